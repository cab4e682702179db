"""Latent attention: what must a sampler keep of a token?

Grouped queries keep fewer keys and values. Latent attention keeps none: of a token R numbers stay, its latent, from
which each head makes a key and a value of its own. A GPT of a `LatentConfig` is a Llama with DeepSeek-V2's attention.

    python train.py --plain --arch llama --latent 32

Read with: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1. CS336 lecture 3.
"""

import functools
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

import kernels
import parallel
from further.experts import Router
from further.llama import angles, gated, LlamaConfig, LlamaExpertsConfig, turned
from further.rms_norm import RMSNorm
from model import GPT, MLP, Attention, Linear


# ----------------------------------------------------------------------------------------------------- latent attention
#
#     c = norm(x W_down)                (B, T, R)         the latent, of all heads
#     k, v = c W_up                     (B, T, H, D)      each head's
#     r = rotary(x W_r)                 (B, T, r)         the rotary key, of all heads
#     scores = q . (k, r)               a query has D + r numbers, of which the last r are turned
#
# Positions have a key of their own because W_up could not be absorbed (below) if something turned k between the two.
#
# Under tensor parallelism a rank has H/N heads' columns of W_q and W_up. All ranks compute the same c and r, which go
# into every rank's heads. So both go through f, and their gradients add up over the ranks:
#
#            ┌─ W_down ─ norm ─ c ─┐       ┌─ W_up ─ k, v ─┐
#         x ─┤                     ├── f ──┤               ├─ attention of H/N heads ─ W_proj ─ g
#            └─ W_r ── r ──────────┘       └───────────────┘
#
# Who lets c alone go through f, because W_up's layer has one, leaves out the gradient of r from the other ranks' heads.
# Shapes and the first loss are right then, and the norm almost. W_down, W_r and the norm stay whole, and so do their
# gradients. In backward f sends BT (R + r) elements, besides the BTC of W_q's f.
#
# Kernels take heads of one width, so values get r zeros behind their D numbers. P V then takes (D + r) / D times as
# long, all of attention (D + r) / (D + r/2) times, 1.2 where r = D/2; --cp sends the zeros, too.

class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values come from a latent. It runs a slice of the heads, as Attention does.
    c_down's rows are R of the latent, then r of the rotary key; c_up's are of each head D of its key, D of its value.
    """
    attention = staticmethod(Attention.attention)  # --cp puts others in the place of these two
    positions = staticmethod(GPT.positions)
    f = staticmethod(lambda shared: shared)        # --tp: what all heads share goes into every rank's

    def __init__(self, config):
        super().__init__()
        self.config = config
        heads = config.n_head
        self.c_q = Linear(config.n_embd, heads * config.query_width, bias=False)
        self.c_down = Linear(config.n_embd, config.shared_width, bias=False)
        self.latent_norm = RMSNorm(config.latent, 1e-6)
        self.c_up = Linear(config.latent, 2 * heads * config.head_dim, bias=False)
        self.c_proj = Linear(config.heads_width, config.n_embd, bias=False)

    def forward(self, x, **starts):                                                           # (B, T, C)
        config = self.config
        parts = config.latent, config.rope_dim
        latent, key = self.c_down(x).split(parts, -1)
        latent, key = self.f(torch.cat([self.latent_norm(latent), key], -1)).split(parts, -1)
        q = self.c_q(x).unflatten(-1, (-1, config.query_width))                               # (B, T, H, D + r)
        q, q_turned = q.split([config.head_dim, config.rope_dim], -1)
        own = self.positions(torch.arange(q.shape[1], device=x.device))
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = angles(config.seq_len, config.rope_dim, config.rope_theta, x.device, dtype)
        turn = functools.partial(turned, cos=cos[own][:, None], sin=sin[own][:, None])
        y = self.attend(torch.cat([q, turn(q_turned)], -1), latent, turn(key.unsqueeze(2)), **starts)
        return self.c_proj(y.flatten(2))                                                      # (B, T, C)

    def attend(self, q, latent, key, **starts):  # a cache puts another in its place
        """q (B, T, H, D + r), latent (B, T, R), key (B, T, 1, r) -> (B, T, H, D)."""
        D = self.config.head_dim
        k, v = self.c_up(latent).unflatten(-1, (-1, 2 * D)).chunk(2, -1)                      # (B, T, H, D)
        k = torch.cat([k, key.expand(-1, -1, k.shape[2], -1)], -1)
        v = F.pad(v, (0, self.config.rope_dim))
        return self.attention(torch.stack([q, k, v], 2), **starts)[..., :D]

    def cache(self, length):
        return LatentCache(self, length)


class LatentCache:
    """A layer's latents and rotary keys of the tokens so far: R + r numbers a token, where keys and values are 2 H D.

    They are not made into keys and values again. Of each head q . (W_k c) = (W_k^T q) . c, so W_k is absorbed into the
    query, and sum_t p_t W_v c_t = W_v sum_t p_t c_t, so values are made of one sum. Then all heads' queries read one
    key, (c, r), and one value, c.
    """
    seam = "attend"  # of the layer, which `look` stands in for

    def __init__(self, layer, length):
        self.layer, self.length, self.seen = layer, length, 0

    def look(self, q, latent, key):                                    # of t new tokens
        first, D = self.seen, self.layer.config.head_dim
        self.seen += q.shape[1]
        new = torch.cat([latent, key.squeeze(2)], -1)                                         # (B, t, R + r)
        if first == 0:
            self.kept = new.new_empty(len(new), self.length, new.shape[-1])
        self.kept[:, first:self.seen] = new
        k = self.kept[:, None, :self.seen]                                                    # (B, 1, T, R + r)
        w_k, w_v = self.layer.c_up.weight.view(q.shape[2], 2, D, -1).unbind(1)                # (H, D, R)
        q, q_turned = q.transpose(1, 2).split([D, key.shape[-1]], -1)                         # (B, H, t, D)
        q = torch.cat([q @ w_k, q_turned], -1)                                                # (B, H, t, R + r)
        q = q * math.sqrt(k.shape[-1] / self.layer.config.query_width)  # the product divides by the root of R + r
        y = kernels.library_attention(q, k, k[..., :latent.shape[-1]], is_causal=first == 0)  # (B, H, t, R)
        return (y @ w_v.mT).transpose(1, 2)


@dataclass(frozen=True)
class LatentConfig(LlamaConfig):
    """Sizes of a Llama with latent attention."""
    latent: int = 64             # R: numbers from which a token's keys and values are made
    rope_size: int = 0           # r: of the rotary key that all heads share; 0: D/2

    @property
    def kv_heads(self):
        return self.n_head       # each head makes its own

    @property
    def rope_dim(self):
        return self.rope_size or self.head_dim // 2

    @property
    def query_width(self):
        return self.head_dim + self.rope_dim

    @property
    def qkv_width(self):
        """Of what attention takes: values have zeros behind them."""
        return 3 * self.n_head * self.query_width

    @property
    def shared_width(self):
        return self.latent + self.rope_dim

    def flops_per_token(self):
        return super().flops_per_token() + 6 * self.n_layer * self.n_head * self.rope_dim * self.seq_len

    def full_attention(self):
        return LatentAttention(self)


@dataclass(frozen=True)
class LatentExpertsConfig(LlamaExpertsConfig, LatentConfig):
    """Of such a model of which some blocks have experts: DeepSeek-V3, or with a softmax V2."""
    first_dense: int = 0         # blocks before the first that has experts
    dense_inner: int = 0         # width of the MLP's hidden layer in blocks without experts; 0: an expert's
    softmax: bool = False        # of scores

    def has_experts(self, block):
        return block >= self.first_dense and super().has_experts(block)

    def router(self):
        return SoftmaxRouter(self) if self.softmax else super().router()

    def mlp(self, block):
        if self.has_experts(block) or not self.dense_inner:
            return super().mlp(block)
        return gated(MLP(replace(self, inner=self.dense_inner)))


class SoftmaxRouter(Router):
    """DeepSeek-V2's: k shares of a softmax, as they are. It has no bias to even out the load: theirs was evened out by
    a loss that depends on the layout."""

    def scores(self, logits):
        return logits.softmax(-1)

    def shares(self, gates):
        return gates

    def balance(self, load, rate):
        pass


KINDS = LatentConfig, LatentExpertsConfig  # without and with experts


# --------------------------------------------------------------------------------------------------- tensor parallelism

def through(attention, group, f):
    """Let what all heads share go through f, in place."""
    attention.f = lambda shared: f(shared, group)
    return attention


def latent_plan(f, columns=parallel.ColumnParallelLinear):
    """What is cut otherwise than in a Llama. N must divide H. c_up's own f is none: its input has gone through one."""
    return {
        "attn": functools.partial(through, f=f),
        "attn.c_q": functools.partial(columns, f=f),
        "attn.c_up": functools.partial(columns, f=lambda shared, group: shared),
    }
