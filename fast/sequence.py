"""Sequence parallelism without permutations, and with less memory.

Other f and g than further/sequence.py's, and a subclass of ColumnParallelLinear. Gathering in place saves 10 % of a
step of GPT-2 medium with --tp --sp on two H200s. X is kept of T/N tokens, not T (but in FP8).
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

import collectives as dist
import kernels
from fast import nccl
from fast.context import add_rows
from fast.linear import collected, gradients_of
from fast.tensor import added_beside, CopyInPlace
from further.sequence import Conjugate
from parallel import ColumnParallelLinear


# ------------------------------------------------------------------------------ sequence parallel: without permutations
#
# A rank's tokens of B > 1 sequences lie apart in memory, so gather_tokens and scatter_tokens copy them into one message
# or out of it. On an H200 that takes 96 us for 64 MiB, as long as the message itself. Between GPUs of a node a kernel,
# or the copy engines, read and write each sequence's tokens in place where `nccl.takes_rows`, so the functions below
# save that copy. Elsewhere a kernel makes it: beside products rows of less than 4 MiB are not copied in place.

def packed(x):
    """x (A, B, ...) without gaps between its rows. PyTorch's own copy has a third of the kernel's bandwidth."""
    if x.is_contiguous() or not kernels.on_triton(x):
        return x.contiguous()
    out = x.new_empty(x.shape)
    add_rows(out, x, first=True)
    return out


def start_gathering(x, group, async_op=False):
    """Start to all-gather x (B, T/N, C): (handle, (B, N, T/N, C)). The handle is None unless async_op."""
    n = dist.get_world_size(group)
    if nccl.takes_rows(x[0].nbytes, group, not async_op):
        whole = x.new_empty(len(x), n, *x.shape[1:]).transpose(0, 1)
    else:
        whole = x.new_empty(n, *x.shape)
    return dist.all_gather_into_tensor(whole, x.contiguous(), group, async_op), whole.transpose(0, 1)


def start_scattering(x, group, async_op=False):
    """Start to reduce-scatter x (B, T, C), a rank's term of a sum: (handle, (B, T/N, C) of the sum)."""
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1)                  # (N, B, T/N, C)
    mine = x.new_empty(parts.shape[1:])
    parts = parts if nccl.takes_rows(mine[0].nbytes, group, not async_op) else packed(parts)
    return dist.reduce_scatter_tensor(mine, parts, group=group, async_op=async_op), mine


def gather_in_place(x, group):
    return packed(start_gathering(x, group)[1]).flatten(1, 2)


def scatter_in_place(x, group):
    return start_scattering(x, group)[1]


class GatherInPlace(torch.autograd.Function):
    """f. collector: as for CopyInPlace."""

    @staticmethod
    def forward(ctx, x, group, collector=None):
        ctx.group = group
        ctx.collector = collector
        return gather_in_place(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return added_beside(ctx.collector, grad, partial(start_scattering, grad, ctx.group)), None, None


def scattered(x, group):
    return Conjugate.apply(x, group, scatter_in_place, gather_in_place)


class RegatheredProduct(torch.autograd.Function):
    """f, then X W^T + b. X is (B, T/N, in), and a rank keeps only these, its own tokens, until backward.

    That saves memory. The cost: backward gathers X again, while it computes dY W. Then it adds up dX over the ranks,
    while it computes dY^T X, and the weight gradients that wait. So a sublayer takes 5 halves of an all-reduce in place
    of 4. In a zero-bubble pipeline "I" gathers X, and "W" frees it.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, take, group):
        ctx.group = group
        ctx.take = take
        ctx.save_for_backward(x, weight)
        return F.linear(gather_in_place(x, group), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        added = dist.Handle()
        dx = None
        dy = dy.contiguous()
        arrived, whole = start_gathering(x, ctx.group, async_op=True)
        if ctx.needs_input_grad[0]:
            added, dx = start_scattering(dy @ weight, ctx.group, async_op=True)
        arrived.wait()
        gradients = gradients_of(ctx, dy.flatten(0, -2), packed(whole).flatten(0, -2))
        if ctx.take:
            ctx.take.collector.catch_up()
        added.wait()
        return dx, *gradients, None, None


class RegatheringColumns(ColumnParallelLinear):
    """In sequence parallelism f is a GatherInPlace. Then f and the product are one RegatheredProduct. A layer without a
    bias and not fused, which in a GPT or a Llama is the head alone, keeps the gathered X for backward. With
    --dtype fp8 f and the product stay apart, too: FP8 keeps all T tokens, in a byte an element, and gathers nothing
    again. An f that stays apart, and CopyInPlace without sequence parallelism, is told whose weight gradients wait.
    """

    def __init__(self, layer, group, f, fused=(1,)):
        super().__init__(layer, group, f, fused)
        self.product = None
        if f == GatherInPlace.apply and (self.bias is not None or len(fused) > 1):
            self.product = lambda x, weight, bias: RegatheredProduct.apply(x, *collected(x, weight, bias), group)

    def forward(self, x):
        if self.product and not hasattr(self.weight, "in_fp8"):
            return self.product(x, self.weight, self.bias)
        if self.f in (GatherInPlace.apply, CopyInPlace.apply):
            x = self.f(x, self.cut.group, getattr(self.weight, "collector", None))
            return kernels.table[F.linear](x, self.weight, self.bias)
        return super().forward(x)
