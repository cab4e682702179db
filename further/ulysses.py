"""Ulysses: what if ranks that share a sequence trade tokens for heads? And a ring between such groups?

    torchrun --nproc_per_node 2 train.py --plain --cp 2 --cp-kind ulysses
    torchrun --nproc_per_node 4 train.py --plain --cp 4 --cp-kind ulysses+ring
"""

import torch

import collectives as dist
import kernels
from further.fits import ulysses_ranks
from further.sequence import Conjugate
from parallel import groups_of


# --------------------------------------------------------------------------------------- Ulysses: heads for tokens
#
# Each of N ranks holds T/N tokens. An all-to-all trades tokens for heads, (B, T/N, H, D) for (B, T, H/N, D), each rank
# computes ordinary attention for its heads, and a second all-to-all trades back. q, k, v and o make it
# (N-1)/N x 4BTC/N elements forward, as many backward. N must divide the heads of keys.
#
# With a ring: U neighbours on one node trade tokens for heads, and rings go between R = N/U such groups. A group holds
# the tokens that one rank of a ring of R would hold, a rank of it the Uth part of them. After the first all-to-all it
# has all the group's tokens and an Uth of the heads, for which it has a ring of its own. N = 4, U = 2, tokens 0 to 7:
#
#     rank            0      1      2      3
#     its tokens      0 1    6 7    2 3    4 5      the zigzag's chunks of a ring of two: 0 1 and 6 7, 2 3 and 4 5
#     trades with     1      0      3      2        inside a node
#     its ring        0 2    1 3    0 2    1 3      between nodes
#
# K and V that a rank sends round are (R-1)/N x 2BTC elements, where a ring of N sends (N-1)/N. They are as large in
# each step, and meanwhile a rank computes U times as long: so links that are U times as slow hide. Heads are needed for
# U ranks, not for N. With U = 1 it is a ring, with U = N Ulysses.
# Jacobs et al., "DeepSpeed Ulysses" (2023); Fang and Zhao, "USP" (2024), with a ring.

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


def ulysses_attention(qkv, group, attention=kernels.attention, **starts):
    """As RingAttention, but rank r holds T/N neighbours, from token r T/N on. attention: to all the group's tokens,
    or, of an own ring, to other groups', too."""
    whole = Conjugate.apply(regrouped(qkv), group, heads_for_tokens, tokens_for_heads)    # (B, T, G + 2, H/G/N, D)
    y = attention(regrouped(whole, back=True), **starts)                                          # (B, T, H/N, D)
    return Conjugate.apply(y, group, tokens_for_heads, heads_for_tokens)


def split_context(mesh, layout, config):
    """This rank's groups (of the U that trade tokens for heads, of its ring); None: it would have nobody else."""
    inside = ulysses_ranks(layout, config, dist.processes_of_a_node(mesh.size()))
    if inside in (1, layout.cp):
        group = mesh.get_group("cp")
        return (None, group) if inside == 1 else (group, None)
    lines = mesh.mesh.transpose(2, 3).flatten(0, 2)                                           # (pp dp tp, cp)
    return groups_of(lines.unflatten(1, (-1, inside)))
