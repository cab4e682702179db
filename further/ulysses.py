"""Ulysses: what if ranks that share a sequence trade tokens for heads?

    torchrun --nproc_per_node 2 train.py --plain --cp 2 --cp-kind ulysses
"""

import torch

import collectives as dist
import kernels
from further.sequence import Conjugate


# --------------------------------------------------------------------------------------- Ulysses: heads for tokens
#
# Each of N ranks holds T/N tokens. An all-to-all trades tokens for heads, (B, T/N, H, D) for (B, T, H/N, D), each rank
# computes ordinary attention for its heads, and a second all-to-all trades back. q, k, v and o make it
# (N-1)/N x 4BTC/N elements forward, as many backward. N must divide the heads of keys.
# Jacobs et al., "DeepSpeed Ulysses" (2023).

def heads_for_tokens(x, group):
    """(B, T/N, ..., H, D) -> (B, T, ..., H/N, D): this rank's heads of all tokens."""
    parts = x.unflatten(-2, (dist.get_world_size(group), -1)).movedim(-3, 0).contiguous()     # (N, B, T/N, ..., H/N, D)
    dist.all_to_all_single(whole := torch.empty_like(parts), parts, group=group)
    return whole.movedim(0, 1).flatten(1, 2)


def tokens_for_heads(x, group):
    """(B, T, ..., H/N, D) -> (B, T/N, ..., H, D): all heads of this rank's tokens."""
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0).contiguous()       # (N, B, T/N, ..., H/N, D)
    dist.all_to_all_single(whole := torch.empty_like(parts), parts, group=group)
    return whole.movedim(0, -3).flatten(-3, -2)


def regrouped(qkv, back=False):
    """qkv (B, T, G + 2, H/G, D) with its queries in such an order that a rank's N-th of the next to last dimension has
    the queries that read its keys; and back. With G = 1 it is as it was."""
    *_, parts, shared, _ = qkv.shape
    if parts == 3:
        return qkv
    grid = (parts - 2, shared) if back else (shared, parts - 2)
    q = qkv[:, :, :-2].flatten(2, 3).unflatten(2, grid).transpose(2, 3)
    return torch.cat([q.reshape(qkv[:, :, :-2].shape), qkv[:, :, -2:]], 2)


def ulysses_attention(qkv, group, **starts):
    """As RingAttention, but rank r holds T/N neighbours, from token r T/N on."""
    whole = Conjugate.apply(regrouped(qkv), group, heads_for_tokens, tokens_for_heads)    # (B, T, G + 2, H/G/N, D)
    y = kernels.attention(regrouped(whole, back=True), **starts)                                  # (B, T, H/N, D)
    return Conjugate.apply(y, group, tokens_for_heads, heads_for_tokens)
