"""Context parallelism: one sequence, too long for one rank, is cut over several.

    torchrun --nproc_per_node 2 train.py --plain --cp 2
"""

import math
from functools import partial

import torch
from torch.autograd.function import once_differentiable

import collectives as dist
import kernels
from further.ulysses import ulysses_attention


# ----------------------------------------------------------------------------- context parallel: a sequence over ranks
#
# Each rank holds T/N tokens of every sequence, in all layers. Only attention looks at other ranks' tokens. In ring
# attention queries stay, and keys and values go round, N-1 times to the right. In step s a rank has those of rank r-s.
# Attention to these alone has the output O_s and for each query L_s, the log of its sum of exp scores. They are merged
# into O and L, those of all earlier steps (at first 0 and -inf):
#
#     L_new = log(exp L + exp L_s)        O_new = O exp(L - L_new) + O_s exp(L_s - L_new)
#
# Backward needs P = exp(S - L), S the scores and L that of all keys. So K and V go round again, and their dK and dV go
# with them: a rank adds its part to those of the keys that it has, and sends the sum to the right, to where these keys
# go next. N = 3, what rank 0 does with the keys of rank 0, 2, 1:
#
#     step 0   own keys: keep the own part
#     step 1   keys of 2: its part is the first one, send it to rank 1, where these keys go
#     step 2   keys of 1: add its part to rank 2's, which has come from there; send the sum to rank 1, which owns them
#     end      from rank 2 came the others' parts for its own keys: add the own part
#
# A rank sends (N-1)/N x 2BTC elements forward, as many backward, and as many again of dK and dV, in float32. (With
# tensor parallelism, C/tp stands for C.)
#
# A causal query sees earlier tokens only. If each rank held T/N neighbours, rank 0 would have nothing to do after step
# 0, and the last rank would work in every step. So rank r holds chunks r and 2N-1-r of 2N: of 4 ranks, rank 0 holds 0
# and 7, rank 1 holds 1 and 6, rank 2 holds 2 and 5, rank 3 holds 3 and 4 ("zigzag"). Then all ranks have equal work:
#
#     own keys, step 0          causal attention within the two chunks
#     keys of a lower rank      all queries see the first chunk of keys, none sees the second
#     keys of a higher rank     the second chunk of queries sees all keys, the first sees none
#
# Liu et al., "Ring Attention" (2023), without the zigzag, which came later. further/ulysses.py has the other way.

def own_tokens(tokens, rank, n, kind, device="cpu"):
    """Which of a sequence's `tokens` a rank of n holds: int64 (T/N). kind: "ring", where 2n must divide tokens, or
    "ulysses", where n must."""
    numbers = torch.arange(tokens, device=device)
    if kind == "ulysses":
        return numbers.view(n, -1)[rank]
    chunks = numbers.view(2 * n, -1)
    return torch.cat([chunks[rank], chunks[2 * n - 1 - rank]])


def cut_tokens(micro_batches, group, kind):
    """This rank's tokens of each micro-batch (B, T): tensors (B, T/N)."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    return [tokens[:, own_tokens(tokens.shape[1], rank, n, kind, tokens.device)] for tokens in micro_batches]


def shift(tensor, group):
    """Send a tensor to the right rank, and return the left rank's."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    incoming = torch.empty_like(tensor)
    right = dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % n)
    left = dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % n)
    for handle in dist.batch_isend_irecv([right, left]):
        handle.wait()
    return incoming


def going_round(tensor, group):
    """Yields (rank, its tensor): this rank's, then in step s that of the rank s to its left."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    yield rank, tensor
    for s in range(1, n):
        tensor = shift(tensor, group)
        yield (rank - s) % n, tensor


def seen(rank, other, half):
    """Which queries of a rank see which keys of rank `other`: (slice of queries, slice of keys, causal). half: tokens a
    chunk."""
    if other == rank:
        return slice(None), slice(None), True
    if other < rank:
        return slice(None), slice(half), False
    return slice(half, None), slice(None), False


def first_keys(starts, group, other, rows, keys):
    """The first of rank other's `keys` that each of this rank's `rows` sees, (B, rows): they are of its document. rows,
    keys: slices of a rank's tokens. starts: as for a GPT, of all tokens of the sequence; None: None."""
    if starts is None:
        return None
    n = dist.get_world_size(group)
    own, others = (own_tokens(starts.shape[1], rank, n, "ring", starts.device)
                   for rank in (dist.get_rank(group), other))
    return torch.searchsorted(others[keys], starts[:, own[rows]].contiguous())


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries to all ranks' keys: qkv (B, T/N, 3, H, D), or as kernels.heads takes it, ->
    (B, T/N, H, D). around: how keys and values go round, as `going_round`. starts: as for a GPT. Every rank knows all
    documents' boundaries, so no message tells them."""

    @staticmethod
    def forward(ctx, qkv, group, around=going_round, starts=None):
        q, *kv = kernels.heads(qkv)                                                           # (B, H, T/N, D)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        o = q.new_zeros(q.shape, dtype=wide)
        lse = q.new_full(q.shape[:3], -math.inf, dtype=wide)                                  # (B, H, T/N)
        for other, (k, v) in around(torch.stack(kv), group):
            rows, keys, causal = seen(dist.get_rank(group), other, q.shape[2] // 2)
            first = first_keys(starts, group, other, rows, keys)
            o_s, lse_s = kernels.table[kernels.attention_reference](
                q[:, :, rows], k[:, :, keys], v[:, :, keys], causal, first)
            total = torch.logaddexp(lse[:, :, rows], lse_s)
            old = (lse[:, :, rows] - total).exp().unsqueeze(3)
            new = (lse_s - total).exp().unsqueeze(3)
            o[:, :, rows] = o[:, :, rows] * old + o_s * new
            lse[:, :, rows] = total
        o = o.to(q.dtype)
        ctx.group = group
        ctx.around = around
        ctx.save_for_backward(qkv, o, lse, starts)
        return o.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        qkv, o, lse, starts = ctx.saved_tensors
        q, *kv = kernels.heads(qkv)
        do = do.transpose(1, 2).contiguous()
        rank = dist.get_rank(ctx.group)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        arrived = 0  # dK and dV from the left: the parts of ranks that had these keys before
        for other, (k, v) in ctx.around(torch.stack(kv), ctx.group):
            rows, keys, causal = seen(rank, other, q.shape[2] // 2)
            dq_part, *part = kernels.table[kernels.attention_backward_reference](
                q[:, :, rows], k[:, :, keys], v[:, :, keys], o[:, :, rows], lse[:, :, rows], do[:, :, rows], causal,
                first_keys(starts, ctx.group, other, rows, keys))
            dq[:, :, rows] += dq_part
            mine = torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)                 # (2, B, H, T/N, D)
            mine[:, :, :, keys] = torch.stack(part).to(lse.dtype)
            if other == rank:
                own = mine
            else:
                arrived = shift(arrived + mine, ctx.group)
        grads = torch.cat([dq, *(own + arrived)], 1)                                          # (B, H + 2H/G, T/N, D)
        return grads.to(qkv.dtype).transpose(1, 2).reshape(qkv.shape), None, None, None


def in_a_ring(qkv, group, ring, starts=None):
    return ring(qkv, group, going_round, starts)


def context_parallel(module, group, kind, ring=RingAttention.apply):
    """Let a GPT compute with this rank's tokens alone, in place: `own_tokens` says which."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    attention = partial(in_a_ring, ring=ring) if kind == "ring" else ulysses_attention
    attention = partial(attention, group=group)
    module.positions = lambda own: own_tokens(n * len(own), rank, n, kind, own.device)
    for block in module.h.values():
        block.attn.positions = module.positions
        block.attn.attention = attention
