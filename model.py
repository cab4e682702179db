"""GPT-2 as one device would run it. It sends nothing; a few methods are there for others to replace.

A GPT is a row of pieces: embedding, blocks, head. A stage of a pipeline is a GPT that has some of them. The config
makes the layers, so that a subclass of the config can make others. Parameters carry GPT-2's own names
("h.3.attn.c_attn.weight"). Initial weights depend on the config, the seed and the parameter's name, and on no layout.

    python -m lessons sizes    parameters, FLOPs and training bytes of every preset

Letters: K parameters (N is for ranks), B sequences, T tokens each, C embedding width, H heads, D = C/H width of a head,
V vocabulary, L layers.
Read with: CS336 lectures 1 to 3 for the model; Ultra-Scale Playbook "counting parameters and FLOPs" for the formulas.
"""

import functools
import itertools
import math
import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import kernels


ACTIVATIONS = {"gelu": kernels.gelu, "elu": kernels.elu}


# ------------------------------------------------------------------------------------------------------------- sizes

@dataclass(frozen=True)
class GPTConfig:
    """All sizes of a model, what follows from them, and the layers that it is made of. A subclass can make others."""
    vocab_size: int = 256      # V
    seq_len: int = 128         # T
    n_layer: int = 4           # L
    n_head: int = 4            # H
    n_embd: int = 128          # C
    inner: int = 0             # width of the MLP's hidden layer; 0: `hidden` is 4C
    activation: str = "gelu"   # "gelu" (the tanh form, GPT-2's) or "elu"
    tied: bool = True          # the head is the transposed embedding
    norm_eps: float = 1e-5
    # No fields: further/ has configs with others.
    arch = "gpt2"
    experts = 0
    activations = tuple(ACTIVATIONS)
    biased = True              # whether its linear layers have biases

    @property
    def hidden(self):
        return self.inner or 4 * self.n_embd

    @property
    def head_dim(self):                                        # D
        return self.n_embd // self.n_head

    @property
    def kv_heads(self):
        """Heads of keys and values. Fewer than H, which they divide, where queries are grouped."""
        return self.n_head

    @property
    def heads_width(self):
        """Of all heads' outputs side by side."""
        return self.n_head * self.head_dim

    @property
    def qkv_width(self):
        return (self.n_head + 2 * self.kv_heads) * self.head_dim

    @property
    def up_width(self):
        """Columns of the MLP's first matrix."""
        return self.hidden

    def parameters(self, counts=lambda name: True):
        """K, how many parameters, of those whose name `counts`; a tied head counts once."""
        return sum(math.prod(shape) for name, shape in shapes(self).items() if counts(name))

    def active_parameters(self):
        """How many parameters one token meets."""
        return self.parameters()

    def flops_per_token(self):
        """FLOPs to train on one token: 6 (K - T C) + 12 L C T. Backward takes twice what forward takes.

        6 a parameter that is multiplied: position embeddings (T C) are only added, and an untied token embedding is
        only read. 12 L C T is Q K^T and P V. They count in full, as elsewhere, though a causal kernel skips half.
        PaLM (2022), appendix B.
        """
        read = ["wpe.weight"] if self.tied else ["wpe.weight", "wte.weight"]
        only_read = self.parameters(lambda name: name in read)
        return 6 * (self.active_parameters() - only_read) + 12 * self.n_layer * self.heads_width * self.seq_len

    # The layers. They have no values yet: `initial_weight` gives them, by name.

    def positions(self):
        """The layer of position embeddings. None where a model has none."""
        return embedding(self.seq_len, self.n_embd)

    def norm(self):
        return LayerNorm(self.n_embd, self.norm_eps)

    def attention(self):
        return Attention(self)

    def activation_function(self):
        """From the MLP's `up_width` columns to `hidden`."""
        return ACTIVATIONS[self.activation]

    def mlp(self, block):
        """The MLP of block number `block`, counted from 0."""
        return MLP(self)

    def stacked(self, name):
        """Names under which a parameter's slices get their initial values, one for each expert. []: it is no stack."""
        return []


PRESETS = {
    "tiny": GPTConfig(),  # bytes, a minute or two on a laptop
    "small": GPTConfig(seq_len=256, n_layer=6, n_head=6, n_embd=384),
    "gpt2": GPTConfig(50257, 1024, 12, 12, 768),
    "gpt2-medium": GPTConfig(50257, 1024, 24, 16, 1024),
    "gpt2-large": GPTConfig(50257, 1024, 36, 20, 1280),
    "gpt2-xl": GPTConfig(50257, 1024, 48, 25, 1600),
}


# ------------------------------------------------------------------------------------------------------------ layers

class Linear(nn.Linear):
    is_plain = True  # no more than x A + b, so parallel.tensor_parallel cuts it

    def reset_parameters(self):
        if not self.weight.is_meta:  # PyTorch would draw nothing there, slowly: two thirds of the time to make a model
            super().reset_parameters()

    def forward(self, x):
        return kernels.table[F.linear](x, self.weight, self.bias)  # F.linear itself, unless fast/ is on


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)


def embedding(rows, width):
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)  # nn.Embedding itself draws values


class Attention(nn.Module):
    """Causal self-attention. The number of heads is read off the activations, so it runs a slice of them, too."""

    @staticmethod
    def attention(qkv, **beside):  # replaced with --cp, to see other ranks' keys, and by a cache, to see earlier ones
        return kernels.attention(qkv, **beside)

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.c_attn = Linear(config.n_embd, config.qkv_width, config.biased)   # q, k, v: three thirds, H heads of D
        self.c_proj = Linear(config.heads_width, config.n_embd, config.biased)

    def forward(self, x, **beside):                                                           # (B, T, C)
        qkv = self.c_attn(x)                                                                  # (B, T, 3C)
        B, T, _ = qkv.shape
        y = self.attention(qkv.view(B, T, 3, -1, self.head_dim), **beside)                    # (B, T, H, D)
        return self.c_proj(y.reshape(B, T, -1))                                               # (B, T, C)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = Linear(config.n_embd, config.up_width, config.biased)
        self.c_proj = Linear(config.hidden, config.n_embd, config.biased)
        self.activation = config.activation_function()

    def forward(self, x):                                                                     # (B, T, C)
        return self.c_proj(self.activation(self.c_fc(x)))                                     # (B, T, C)


class Block(nn.Module):
    """Pre-norm: the residual stream passes untouched from the embedding to the head, each sublayer adds to it."""

    def __init__(self, config, number):
        super().__init__()
        self.ln_1 = config.norm()
        self.attn = config.attention()
        self.ln_2 = config.norm()
        self.mlp = config.mlp(number)

    def forward(self, x, **beside):                                                           # (B, T, C)
        x = x + self.attn(self.ln_1(x), **beside)
        return x + self.mlp(self.ln_2(x))                                                     # (B, T, C)


class GPT(nn.Module):
    """GPT-2. `GPT(config)(tokens)` takes int64 (B, T) and returns logits (B, T, V).

    pieces: which of the L+2 pieces (0 the embedding, 1..L the blocks, L+1 the head) to build, a range; left out, all.
    seed: the initial weights'; None leaves the parameters on the meta device, shapes without memory, for `materialize`.
    """

    def __init__(self, config, seed=0, pieces=None):
        super().__init__()
        self.config = config
        pieces = range(config.n_layer + 2) if pieces is None else pieces
        self.wte = self.wpe = self.ln_f = self.lm_head = None  # only the first stage embeds, only the last has a head
        with torch.device("meta"):
            if 0 in pieces:
                self.wte = embedding(config.vocab_size, config.n_embd)
                self.wpe = config.positions()
            self.h = nn.ModuleDict()
            for i in range(config.n_layer):
                if i + 1 in pieces:
                    self.h[str(i)] = kernels.table[Block](config, i)
            if config.n_layer + 1 in pieces:
                self.ln_f = config.norm()
                self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied and self.wte and self.lm_head:
            self.lm_head.weight = self.wte.weight
        if seed is not None:
            materialize(self, lambda name: initial_weight(config, name, seed))

    def embed(self, tokens, starts=None):                                                     # (B, T)
        T = tokens.shape[1]
        if T > self.config.seq_len:
            raise ValueError(f"{T} tokens are more than the {self.config.seq_len} positions this model has")
        x = self.wte(tokens)
        if self.wpe is None:
            return x
        own = self.positions(torch.arange(T, device=tokens.device))
        return x + self.wpe(own if starts is None else own - starts[:, own])                  # (B, T, C)

    @staticmethod
    def positions(all_positions):
        """The positions of this device's tokens, int64 (T), out of all. One device has all tokens."""
        return all_positions

    def head(self, x, targets=None):
        x = self.ln_f(x)
        return self.lm_head(x) if targets is None else self.lm_head(x, targets)               # (B, T, V), or the loss

    def forward(self, x, targets=None, **beside):
        """targets (B, T): of a head that computes the loss itself, else None. beside: `starts` (B, T), if sequences are
        several documents: where each token's begins."""
        x = self.embed(x, **beside) if self.wte else x
        for block in self.h.values():
            x = block(x, **beside)
        return self.head(x, targets) if self.lm_head else x

    def generate(self, tokens, n, temperature=1.0, top_k=None, seed=None):
        """Continue tokens (B, T) by n sampled ones: (B, T + n). Other arguments as for `stream`."""
        sampled = self.stream(tokens, temperature, top_k, seed)
        return torch.cat([tokens, *itertools.islice(sampled, n)], 1)

    @torch.no_grad()
    def stream(self, tokens, temperature=1.0, top_k=None, seed=None):
        """Yield without end a token (B, 1) that continues tokens (B, T) and all those yielded before.

        Temperature 0, or almost 0, takes the likeliest token, top_k samples among the k likeliest.
        """
        generator = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
        while True:
            tokens = tokens[:, -self.config.seq_len:]  # when the context is full, it slides
            logits = self.newest_logits(tokens).float()                                       # (B, V)
            if top_k:
                kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            if temperature > 1e-30:  # below, logits / temperature would be infinite
                token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                token = logits.argmax(-1, keepdim=True)
            yield token
            tokens = torch.cat([tokens, token], 1)

    def newest_logits(self, tokens):
        """Logits (B, V) of what follows tokens (B, T). (further/sampling.py does not run all of them again.)"""
        return self(tokens)[:, -1]


# ----------------------------------------------------------------------------------------------------------- weights

def initial_weight(config, name, seed):
    """GPT-2's initial value of one parameter, float32 on the CPU: the same for this seed and name in every layout.

    Matrices from N(0, 0.02). Two products a block are added to the residual stream. The variances of these 2L terms
    add up, so their matrices are from N(0, 0.02 / sqrt(2L)): then the stream's variance does not grow with L.
    """
    name = "wte.weight" if config.tied and name == "lm_head.weight" else name
    if each := config.stacked(name):
        return torch.stack([initial_value(config, one, shapes(config)[name][1:], seed) for one in each])
    return initial_value(config, name, shapes_of_all(config)[name], seed)


def initial_value(config, name, shape, seed):
    if len(shape) == 1:
        return torch.full(shape, float(name.endswith("weight")), device="cpu")
    std = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 0.02
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return torch.empty(shape, device="cpu").normal_(0, std, generator=generator)


@functools.cache
def shapes(config):
    """Name -> shape of every parameter of the whole model (one dict for all who ask: not to be changed)."""
    return {name: tuple(p.shape) for name, p in GPT(config, seed=None).named_parameters()}


@functools.cache
def shapes_of_all(config):
    """Name -> shape of every parameter, then of every buffer: what is kept and is no parameter, float32. A GPT-2 has
    none."""
    return shapes(config) | {name: tuple(b.shape) for name, b in GPT(config, seed=None).named_buffers()}


def materialize(module, source, device="cpu", dtype=torch.float32, place=lambda param, value: value):
    """Replace every parameter, one at a time, by place(param, source(name)) on `device`; tied ones stay tied. Every
    buffer becomes source(name).

    At no time does more than one whole parameter exist beside what stays here; `place` may keep a part of it.
    """
    made = {}
    for prefix, owner in module.named_modules():
        for leaf, old in list(owner.named_parameters(recurse=False)):
            if old not in made:
                value = place(old, source(f"{prefix}.{leaf}" if prefix else leaf))
                made[old] = type(old)(value.to(device, dtype, copy=True).contiguous(), old.requires_grad)
                made[old].__dict__.update(old.__dict__)  # its placement: how it was cut
            setattr(owner, leaf, made[old])
        for leaf, _ in list(owner.named_buffers(recurse=False)):  # float32 whatever dtype layers have
            owner.register_buffer(leaf, source(f"{prefix}.{leaf}").to(device, torch.float32, copy=True))
