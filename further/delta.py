"""Gated delta rule: what if a layer's memory of a sequence did not grow with it?

Most blocks of Qwen3-Next and of Kimi Linear have such a layer in place of attention; every n-th has attention.

    python train.py --plain --arch llama --delta-every 4
    torchrun --nproc_per_node 2 train.py --plain --arch llama --delta-every 4 --tp 2
"""

import torch
import torch.nn.functional as F
from torch import nn

import kernels
from further.delta_state import Nothing, Sampled
from further.expert_parallel import cut_in_place
from further.llama import of_some_heads
from further.rms_norm import RMSNorm
from model import Linear
from parallel import Cut, set_placement


# ------------------------------------------------------------------------------------------------------- the delta rule
#
# A head's memory is a matrix S (D, D), which a key reads and writes. A token lets all of it fade by a (0 < a <= 1),
# reads what its key k finds, and replaces a part b of that by its value v. Then its query q reads:
#
#     S_t = a S_(t-1) + k d^T        d = b (v - (a S_(t-1))^T k)        o = S_t^T q
#
# T steps one after the other would leave a GPU idle. A chunk of J tokens can be computed at once. With c_t the product
# of all a of the chunk up to t, and S that of its begin, each d depends on S and on the d before it:
#
#     d_t + sum over i < t of  b_t (c_t / c_i) (k_t . k_i) d_i  =  b_t v_t - b_t c_t S^T k_t
#
# On the left is a triangular matrix (its inverse is the "UT transform"). Solved for the columns on the right it gives
# U and W with d = U - W S. So a chunk's end is an affine function of its begin, and a few products do all else:
#
#     S_end = M S + Z        M = c_J I - K'^T W        Z = K'^T U        K': keys, each times c_J / c_t
#
# Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (2024), "Gated Delta Networks" (2024).

CHUNK = 64


def recurrent(q, k, v, log_a, b):
    """The definition, a token at a time. q, k, v (B, T, H, D), log a and b (B, T, H) -> (B, T, H, D)."""
    state, outputs = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None]), []             # (B, H, D, D)
    for q_t, k_t, v_t, a_t, b_t in zip(*(x.unbind(1) for x in (q, k, v, log_a.exp(), b))):
        state = a_t[..., None, None] * state
        found = (k_t.unsqueeze(2) @ state).squeeze(2)                                         # (B, H, D)
        state = state + k_t.unsqueeze(3) * (b_t.unsqueeze(2) * (v_t - found)).unsqueeze(2)
        outputs.append((q_t.unsqueeze(2) @ state).squeeze(2))
    return torch.stack(outputs, 1)


def in_chunks(x):
    """(B, T, H, ...) -> (B, H, n, J, ...). The last chunk is filled up with zeros, which leave S as it is."""
    size = min(CHUNK, x.shape[1])
    x = F.pad(x.transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, -x.shape[1] % size))
    return x.unflatten(2, (-1, size))


def chunked(q, k, v, log_a, b, start):
    """As `recurrent`. start(M, Z) gives S of the first chunk (B, H, D, D), from all chunks' M and Z (B, H, n, D, D)."""
    tokens = q.shape[1]
    q, k, v, log_c, b = map(in_chunks, (q, k, v, log_a, b))
    log_c, b = log_c.cumsum(3).unsqueeze(4), b.unsqueeze(4)                                   # (B, H, n, J, 1)
    since = (log_c - log_c.mT).tril().exp().tril()                                            # c_t / c_i
    left = (b * k @ k.mT * since).tril(-1)                     # and ones on the diagonal, which the solver adds
    right = torch.cat([b * v, b * k * log_c.exp()], 4)
    u, w = torch.linalg.solve_triangular(left, right, upper=False, unitriangular=True).chunk(2, 4)
    until_end = (k * (log_c[..., -1:, :] - log_c).exp()).mT                                   # K'^T
    m = log_c[..., -1:, :].exp() * torch.eye(k.shape[4], dtype=k.dtype, device=k.device) - until_end @ w
    z = until_end @ u
    states = [start(m, z)]
    for m_chunk, z_chunk in zip(m.unbind(2), z.unbind(2)):
        states.append(m_chunk @ states[-1] + z_chunk)
    s = torch.stack(states[:-1], 2)                                                           # (B, H, n, D, D)
    o = q * log_c.exp() @ s + (q @ k.mT * since) @ (u - w @ s)
    return o.flatten(2, 3)[:, :, :tokens].transpose(1, 2)                                     # (B, T, H, D)


# ------------------------------------------------------------------------------------------------------------ the layer

class ShortConvolution(nn.Module):
    """y_t = w_0 x_(t-3) + ... + w_3 x_t, each column by itself. The weight (4 x columns) is a vector, as a norm's: it
    begins as ones and has no weight decay."""

    def __init__(self, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns * 4))

    def forward(self, x, before):                                                             # (B, T, ...), (B, 3, ...)
        rows = torch.cat([before, x], 1)
        return sum(rows[:, i:i + x.shape[1]] * w for i, w in enumerate(self.weight.view(-1, 4).unbind(1)))


class Decay(nn.Module):
    """log a (B, T, H), below 0, of a column a head."""

    def __init__(self, heads):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))

    def forward(self, x):
        return -self.A_log.exp() * F.softplus(x + self.dt_bias)


class GatedDelta(nn.Module):
    """A short convolution of q, k, v, the gated delta rule, a norm and a gate. It runs a slice of the heads, as
    Attention does."""
    before = Nothing()  # what it knows of earlier tokens: --cp and a cache put another in its place
    pieces = 1          # of each sequence: under --cp, parts that are not neighbours

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        columns = (*[config.head_dim] * 4, 1, 1)  # of a head: q, k, v, gate; decay, b
        self.c_attn = Linear(config.n_embd, config.n_head * sum(columns), bias=False)
        set_placement(self.c_attn.weight, fused=columns)
        self.conv = ShortConvolution(3 * config.heads_width)
        self.decay = Decay(config.n_head)
        self.norm = RMSNorm(config.head_dim, config.norm_eps)
        self.c_proj = Linear(config.heads_width, config.n_embd, bias=False)

    def forward(self, x):                                                                     # (B, T, C)
        every = self.c_attn(x).unflatten(1, (self.pieces, -1)).flatten(0, 1)                  # of each piece
        heads = every.shape[2] // (4 * self.head_dim + 2)                                     # H, this rank's
        width = heads * self.head_dim
        qkv, gate, decay, b = every.split([3 * width, width, heads, heads], 2)
        qkv = F.silu(self.conv(qkv, self.before.rows(qkv)))
        q, k, v, decay, b = map(kernels.at_least_float32, (*qkv.chunk(3, 2), decay, b))
        q, k, v = (part.unflatten(2, (heads, -1)) for part in (q, k, v))                      # (B, T, H, D)
        q, k = (part * (part.square().sum(3, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
        o = chunked(q * self.head_dim ** -0.5, k, v, self.decay(decay), b.sigmoid(), self.before.state)
        y = self.norm(o.to(x.dtype)) * F.silu(gate).view(o.shape)
        return self.c_proj(y.reshape(len(x), -1, width))                                      # (B, T, C)


    def cache(self, length):
        return Sampled()


def delta_plan():
    """What tp cuts of it, besides matrices: a rank gets its heads."""
    return {
        "attn.conv": lambda layer, group: cut_in_place(layer, Cut(group, 0, (1, 1, 1))),
        "attn.decay": lambda layer, group: cut_in_place(layer, Cut(group, 0)),
        "attn.norm": of_some_heads,
    }
