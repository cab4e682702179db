"""Llama: what has changed in language models since GPT-2?

RMSNorm stands where a layer norm did, a gated MLP where GELU did. Positions turn queries and keys, and are not added to
the embedding. Several heads of queries share one of keys. Linear layers have no bias. A GPT of a `LlamaConfig` has all
that, and Qwen 2 and 3, which differ from it in a bias and in two norms.

    python train.py --plain --arch llama

Read with: Touvron et al., "LLaMA" (2023); CS336 lecture 3, which asks what most models have in common.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import kernels
import parallel
from further.expert_parallel import cut_in_place
from further.experts import ExpertsConfig
from model import GPT, Attention, GPTConfig, Linear


# --------------------------------------------------------------------------------------------------------------- SwiGLU
#
# The MLP's first matrix makes two hidden layers, a and b, side by side. With the sigmoid s of a:
#
#     y = a s b        db = dy a s        da = dy b (s + a s (1 - s))
#
# Shazeer, "GLU Variants Improve Transformer" (2020). (fast/llama.py has a kernel, which moves each number once.)

def swiglu(ab):
    """ab (..., 2 width) -> (..., width)."""
    a, b = ab.chunk(2, -1)
    return F.silu(a) * b


# ----------------------------------------------------------------------------------------------------- rotary positions
#
# Numbers i and i + D/2 of a query or key at position t are turned, as a point of the plane, by t theta^(-2i/D):
#
#     y_i = x_i cos - x_(i+D/2) sin        y_(i+D/2) = x_(i+D/2) cos + x_i sin
#
# Of a query at t and a key at t' only t - t' is left in q . k. The derivative turns back: sin changes its sign. So
# nothing is kept but the positions. A rank of --cp turns by where its tokens stand in the sequence. Su et al. (2021).

@functools.cache
def angles(length, dim, theta, device, dtype):
    """cos and sin (length, D/2) of every position below `length`."""
    turns = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    both = torch.arange(length, device=device).outer(turns)
    return both.cos().to(dtype), both.sin().to(dtype)


def rotary(qkv, cos, sin):
    """Turn queries and keys of qkv (B, T, G + 2, H/G, D), as kernels.heads has it. cos, sin (T, D/2): its tokens'."""
    cos, sin = cos[:, None, None], sin[:, None, None]                                         # (T, 1, 1, D/2)
    return torch.cat([turned(qkv[:, :, :-1], cos, sin), qkv[:, :, -1:]], 2)


def turned(x, cos, sin):
    """Turn all of x (..., D). cos, sin (..., D/2), whose other dimensions are x's, or 1."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def rms_norm(x, weight, eps):
    """x (..., width) / sqrt(mean(x^2) + eps) weight: a layer norm's scale alone, without mean and bias. Zhang and
    Sennrich (2019)."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


class RMSNorm(nn.RMSNorm):
    bias = None

    def forward(self, x):
        return kernels.table[rms_norm](x, self.weight, self.eps)


# ------------------------------------------------------------------------------------------------------------ the model

class GroupedAttention(Attention):
    """Causal self-attention of grouped queries, with rotary positions. It runs a slice of the heads, as Attention does:
    c_attn's rows are H heads of queries, then H/G of keys, then H/G of values."""
    positions = staticmethod(GPT.positions)  # --cp puts another in its place

    def __init__(self, config):
        super().__init__(config)
        self.config = config
        self.packed = config.n_head // config.kv_heads + 2
        if config.qkv_bias:
            self.c_attn = Linear(config.n_embd, config.qkv_width)
        parallel.set_placement(self.c_attn.weight, fused=config.fused)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def table(self, x):
        """cos and sin of every position, for activations like x."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        config = self.config
        return angles(config.seq_len, config.head_dim, config.rope_theta, x.device, dtype)

    def forward(self, x, **beside):                                                           # (B, T, C)
        qkv = self.c_attn(x)
        B, T, _ = qkv.shape
        qkv = qkv.view(B, T, self.packed, -1, self.head_dim)                                  # (B, T, G + 2, H/G, D)
        if self.config.qk_norm:
            qkv = torch.cat([self.q_norm(qkv[:, :, :-2]), self.k_norm(qkv[:, :, -2:-1]), qkv[:, :, -1:]], 2)
        own = self.positions(torch.arange(T, device=x.device))
        cos, sin = self.table(x)
        y = self.attention(kernels.table[rotary](qkv, cos[own], sin[own]), **beside)          # (B, T, H, D)
        return self.c_proj(y.reshape(B, T, -1))                                               # (B, T, C)


def gated(mlp):
    """Say of an MLP, or of experts, that its first matrix is two: the one that makes a, and b's."""
    for name, param in mlp.named_parameters():
        if name.endswith("c_fc.weight"):
            parallel.set_placement(param, fused=(1, 1))
    return mlp


@dataclass(frozen=True)
class LlamaConfig(GPTConfig):
    """Sizes of a Llama, or of a Qwen 2 or 3."""
    activation: str = "silu"
    tied: bool = False
    n_kv_head: int = 0           # H/G: heads of keys and values; 0: as many as of queries
    head_size: int = 0           # D; 0: C/H
    rope_theta: float = 10000.0  # of rotary positions: the slowest pair turns once in about 2 pi theta tokens
    qk_norm: bool = False        # a norm of each head's query and key, Qwen 3's
    qkv_bias: bool = False       # Qwen 2's
    max_positions: int = 0       # that its weights were trained for, where seq_len is shorter; 0: seq_len
    arch = "llama"
    activations = ("silu",)
    biased = False

    @property
    def hidden(self):
        return self.inner or -(-8 * self.n_embd // 192) * 64  # 8/3 C: three matrices as large as GPT-2's two

    @property
    def head_dim(self):
        return self.head_size or super().head_dim

    @property
    def kv_heads(self):
        return self.n_kv_head or self.n_head

    @property
    def up_width(self):
        return 2 * self.hidden

    @property
    def fused(self):
        """Relative sizes of q, k and v."""
        return self.n_head // self.kv_heads, 1, 1

    def positions(self):
        return None

    def norm(self):
        return RMSNorm(self.n_embd, self.norm_eps)

    def attention(self):
        return GroupedAttention(self)

    def activation_function(self):
        return kernels.table[swiglu]

    def mlp(self, block):
        return gated(super().mlp(block))


@dataclass(frozen=True)
class LlamaExpertsConfig(ExpertsConfig, LlamaConfig):
    """Of a Llama of which some blocks have experts, each a gated MLP."""
    activation: str = "silu"
    tied: bool = False

    def mlp(self, block):
        return gated(super().mlp(block))


KINDS = LlamaConfig, LlamaExpertsConfig  # without and with experts
PRESETS = {
    "tiny": LlamaConfig(n_kv_head=2),
    "1b": LlamaConfig(32000, 4096, 16, 16, 2048, 8192, n_kv_head=8, rope_theta=500000.0),
    "llama3-8b": LlamaConfig(128256, 8192, 32, 32, 4096, 14336, n_kv_head=8, rope_theta=500000.0),
    "qwen3-0.6b": LlamaConfig(151936, 4096, 28, 16, 1024, 3072, norm_eps=1e-6, tied=True, n_kv_head=8, head_size=128,
                              rope_theta=1e6, qk_norm=True),  # which in the end was trained on 32,768 tokens at a time
    "cs336-8b": LlamaConfig(151936, 32768, 34, 32, 4096, 11008)}  # the course's, to plan with


# --------------------------------------------------------------------------------------------------- tensor parallelism

def of_some_heads(norm, group):
    """A norm of heads stays whole. Each rank's heads make a term of its gradient."""
    before = parallel.placement_of(norm.weight)
    parallel.set_placement(norm.weight, partial_over=before.partial_over + (group,))
    return norm


def llama_plan(f, columns=parallel.ColumnParallelLinear):
    """What is cut otherwise than in parallel.gpt2_plan: a rank gets its heads of queries, and the keys and values that
    they read, and both halves of its hidden layer. N must divide H/G."""
    column = functools.partial(columns, f=f)
    return {
        "attn.c_attn": lambda layer, group: column(layer, group, fused=parallel.placement_of(layer.weight).fused),
        "attn.q_norm": of_some_heads,
        "attn.k_norm": of_some_heads,
        "mlp.c_fc": functools.partial(column, fused=(1, 1)),
        "experts.c_fc": lambda layer, group: cut_in_place(layer, parallel.Cut(group, 1, (1, 1))),
    }
