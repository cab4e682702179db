"""Ring attention on tuned kernels, with messages under computation.

A subclass of further/context.py's RingAttention. Over two H100s the ring takes 1.04 times half of one GPU's time for
65,536 tokens, 1.21 times for 16,384, PyTorch's 1.14 and 1.83.
"""

import torch
from torch.autograd.function import once_differentiable

import collectives as dist
import kernels
from fast.attention import tuned_attention_forward, tuned_backward_kv, tuned_backward_q
from fast.hopper import add_in_one_pass, delta_and_zeros, one_pass_takes, write_rounded
from fast.nccl import Direct
from further.context import RingAttention, seen
from kernels import aligned, load_float32, load_rows, store_rows, this_program, tiled, tl, triton


@triton.jit
def _merge_parts(O, LSE, PART, PART_LSE, lse_bh, part_lse_bh, H, ROWS: tl.constexpr):
    """ROWS rows of one head: O <- O 2^(LSE - new) + PART 2^(PART_LSE - new), LSE <- new = log2(2^LSE + 2^PART_LSE)."""
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    lse = LSE + bh.to(tl.int64) * lse_bh + rows
    before = tl.load(lse)
    part_lse = tl.load(PART_LSE + bh.to(tl.int64) * part_lse_bh + rows)
    top = tl.maximum(before, part_lse)
    total = top + tl.log2(tl.exp2(before - top) + tl.exp2(part_lse - top))
    o = load_rows(O, b, h, first).to(tl.float32) * tl.exp2(before - total)[:, None]
    o += load_rows(PART, b, h, first).to(tl.float32) * tl.exp2(part_lse - total)[:, None]
    store_rows(O, b, h, first, o)
    tl.store(lse, total)


def merge_parts(o, lse, part, part_lse):
    """Merge (part, part_lse), attention to some of the keys, into (o, lse), attention to others: in place.

    o and part (B, H, T, D), lse and part_lse (B*H, T) in base 2, as tuned_attention_forward returns them; T a multiple
    of 64. Every row must see a key in each of the two. Computes in float32.
    """
    B, H, T, _ = o.shape
    _merge_parts[T // 64, B * H](tiled(o, 64), lse, tiled(part, 64), part_lse, lse.stride(0), part_lse.stride(0), H, 64)


@triton.jit
def _add_rows(total, part, total_b, total_t, part_b, part_t, T, width, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    b = this_program() // T
    t = this_program() % T
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = total + b * total_b + t * total_t + column
    inside = column < width
    more = load_float32(part + b * part_b + t * part_t + column, inside)
    tl.store(at, more if FIRST else load_float32(at, inside) + more, inside)


def add_rows(total, part, first=False):
    """total += part; with `first`, total = part. Both (B, T, ...), of any two dtypes, contiguous but for gaps between
    rows. With two dtypes or with gaps, PyTorch's own kernel reaches only a third of the bandwidth."""
    total = total.flatten(2)  # views, both
    part = part.flatten(2)
    B, T, width = total.shape
    _add_rows[B * T, triton.cdiv(width, 2048)](total, part, *total.stride()[:2], *part.stride()[:2], T, width, first,
                                               2048)


# -------------------------------------------------------------------------------------- context parallel: tuned kernels

def start_shift(tensor, group):
    """Start a `shift` without waiting for it: (handle, the tensor that will be received). Strides may be any."""
    link = dist.link_of(group)
    incoming = tensor.new_empty(tensor.shape)
    if isinstance(link, Direct):  # copies between GPUs of one node
        return link.run("isend", True, Direct.shift, tensor.contiguous().view(-1), incoming.view(-1)), incoming
    handles = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=(link.rank + 1) % link.size),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=(link.rank - 1) % link.size)])
    return dist.Handle(lambda: [handle.wait() for handle in handles]), incoming


def going_round_ahead(tensor, group):
    """As `going_round`, but a tensor is sent on before it is yielded, so that it travels while the caller computes."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    for s in range(n):
        handle, incoming = start_shift(tensor, group) if s < n - 1 else (dist.Handle(), None)
        yield (rank - s) % n, tensor
        handle.wait()
        tensor = incoming


class TunedRing(RingAttention):
    """RingAttention on Triton's kernels. Merging takes few further passes over memory. Messages overlap computation.

    The first K and V travel while a rank computes with its own keys. In backward it does so in two parts, because at
    the end dK and dV of other ranks' keys travel home: first dQ, last dK and dV; or, in one pass, half of its sequences
    first, of one sequence half of its heads. Over more than two ranks, and in one pass, sums are float32. Else a sum
    has two terms, and the first stays in the 16 bits in which its kernel wrote it.
    """

    @staticmethod
    def forward(ctx, qkv, group, around=None, starts=None):  # keys are sent ahead, whatever `around`
        rank = dist.get_rank(group)
        half = qkv.shape[1] // 2
        ctx.group = group
        # Both chunks must be whole tiles. float32 has no tuned kernels, nor have several documents in a sequence.
        ctx.tuned = (kernels.flash_takes(qkv) and qkv.dtype != torch.float32 and half % 128 == 0 and starts is None)
        if not ctx.tuned:
            return RingAttention.forward(ctx, qkv, group, going_round_ahead, starts)
        qkv = qkv.contiguous()
        q, _, _ = kernels.heads(qkv)                                                          # (B, H, T/N, D)
        for other, kv in going_round_ahead(qkv[:, :, -2:], group):                            # (B, T/N, 2, H/G, D)
            k, v = kv.permute(2, 0, 3, 1, 4)
            rows, keys, causal = seen(rank, other, half)
            part, part_lse = tuned_attention_forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], causal)
            if other == rank:
                o = as_sum(part, group)
                lse = part_lse
            else:
                merge_parts(o[:, :, rows], lse[:, rows], part, part_lse)
        o = o.to(q.dtype)
        ctx.save_for_backward(qkv, o, lse)
        return o.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        if not ctx.tuned:
            return RingAttention.backward(ctx, do)
        qkv, o, lse = ctx.saved_tensors
        rank = dist.get_rank(ctx.group)
        half = do.shape[1] // 2
        q, k, v = kernels.heads(qkv)
        do = aligned(do.transpose(1, 2))
        grads = torch.empty_like(qkv)
        travelling = None  # dK and dV of the keys that are here, summed over the ranks that had them before
        handle = dist.Handle()
        kind = InOnePass if one_pass_takes(q, k, True) else InTwoKernels
        backward = kind(q, k, v, o, lse, do, grads, ctx.group)
        for other, kv in going_round_ahead(qkv[:, :, -2:], ctx.group):
            if other == rank:
                backward.begin()
                continue
            rows, keys, _ = seen(rank, other, half)
            part = backward.add_part(kv[:, keys], rows)
            handle.wait()
            first = travelling is None
            if first:
                travelling = kv.new_empty(kv.shape, dtype=torch.float32)
                travelling[:, part.shape[1]:] = 0
            add_rows(travelling[:, keys], part, first)
            handle, travelling = start_shift(travelling, ctx.group)
        backward.end()
        handle.wait()
        add_rows(grads[:, :, -2:], travelling)
        return grads, None, None, None


def as_sum(part, group):
    """The first part of a sum over the ranks, in the dtype of the sum."""
    return part if dist.get_world_size(group) == 2 else part.float()


class InTwoKernels:
    """A rank's backward through its own keys, in grads, and through other ranks' keys. q, o, do (B, H, T/N, D)."""

    def __init__(self, q, k, v, o, lse, do, grads, group):
        self.group = group
        self.queries = q, o, do
        self.keys = k, v
        self.lse = lse
        self.dq, *self.dkv = kernels.heads(grads)

    def begin(self):
        q, o, do = self.queries
        self.delta = torch.empty_like(self.lse)
        tuned_backward_q(q, *self.keys, o, self.lse, self.delta, do, True, self.dq)
        self.total = as_sum(self.dq.transpose(1, 2), self.group)                              # (B, T/N, H, D)

    def add_part(self, kv, rows):
        """Add dQ of attention of some rows to another rank's keys kv (B, Tk, 2, H/G, D), all of which each of them
        sees. Returns dK and dV, as kv."""
        dkv = kv.new_empty(kv.shape)
        self.add(rows, *kv.permute(2, 0, 3, 1, 4), *dkv.permute(2, 0, 3, 1, 4))
        return dkv

    def add(self, rows, k, v, dk, dv):
        q, o, do = (x[:, :, rows] for x in self.queries)
        lse, delta = self.lse[:, rows], self.delta[:, rows]
        dq = q.new_empty(q.transpose(1, 2).shape)
        tuned_backward_q(q, k, v, o, lse, delta, do, False, dq.transpose(1, 2))
        tuned_backward_kv(q, k, v, lse, delta, do, False, dk, dv)
        add_rows(self.total[:, rows], dq)

    def end(self):
        q, _, do = self.queries
        tuned_backward_kv(q, *self.keys, self.lse, self.delta, do, True, *self.dkv)
        if dist.get_world_size(self.group) > 2:
            self.dq.copy_(self.total.transpose(1, 2))


class InOnePass(InTwoKernels):
    """The same by hopper's one pass, whose kernel adds up all parts of dQ."""

    def begin(self):
        q, o, do = self.queries
        self.delta, self.total = delta_and_zeros(o, do, self.lse)                             # (B*H, T/N, D)
        self.add_own(first=True)

    def add_own(self, first):
        """The first or the other half of its own keys: of the sequences or, if there is one, of the heads."""
        q, _, do = self.queries
        axis = int(len(q) == 1)
        n = self.keys[0].shape[axis]
        start, end = (0, (n + 1) // 2) if first else ((n + 1) // 2, n)
        if start == end:
            return

        def some(x):
            each = x.shape[axis] // n  # heads of queries to one of keys
            return x.narrow(axis, each * start, each * (end - start))

        q, k, v, do, dk, dv = map(some, (q, *self.keys, do, *self.dkv))
        lse, delta, total = (some(x.unflatten(0, self.dq.shape[:2])).flatten(0, 1)
                             for x in (self.lse, self.delta, self.total))
        add_in_one_pass(q, k, v, do, lse, delta, True, total, dk, dv)

    def add(self, rows, k, v, dk, dv):
        q, _, do = (x[:, :, rows] for x in self.queries)
        add_in_one_pass(q, k, v, do, self.lse[:, rows], self.delta[:, rows], False, self.total[:, rows], dk, dv)

    def end(self):
        self.add_own(first=False)
        write_rounded(self.total, self.dq)
