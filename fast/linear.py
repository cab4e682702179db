"""Linear layers: a bias's gradient by one kernel, outputs padded, weight gradients that come later.

In place of PyTorch's F.linear. On an H200 a step of GPT-2 124M with its 50,257 tokens
takes 74 % longer without padding. A bias's gradient takes 25 us, PyTorch's 46.
"""

from collections import Counter
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

import kernels
import parallel
from kernels import load_float32, programs_at_once, tl, triton


# ---------------------------------------------------------------------------------------------------- sums of columns
#
# A bias's gradient is the sum of dy's rows. For (32768, 768) the kernel takes 25 us, PyTorch's 46, reading dy once 12.
# The price is a second, small launch, in `sum_parts`, because each program sums only some of the rows.

@triton.jit
def _column_sums(x, counts, sums, rows, width, E_PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                 STAGES: tl.constexpr):
    """A program reads N columns of a group of rows, M rows at a time, and keeps their sums in registers. Programs of
    the same columns take every n-th M rows; each writes its sums to its own row of sums (groups, programs, width).
    Groups have `rows` rows each, or as many as counts says."""
    e = tl.program_id(1)
    part = tl.program_id(2)
    parts = tl.num_programs(2)
    if counts is None:
        first = e * rows
        end = e * rows + rows
    else:
        group = tl.arange(0, E_PAD)
        first = tl.sum(tl.load(counts + group, group < e, 0), 0)
        end = first + tl.load(counts + e)
    column = tl.program_id(0) * N + tl.arange(0, N)[None]
    total = tl.zeros((M, N), tl.float32)
    for start in tl.range(first + part * M, end, parts * M, num_stages=STAGES):
        row = (start + tl.arange(0, M)[:, None]).to(tl.int64)
        total += load_float32(x + row * width + column, (row < end) & (column < width))
    tl.store(sums + (e * parts + part).to(tl.int64) * width + column, tl.sum(total, 0, keep_dims=True), column < width)


def sum_parts(partial, dtype):
    """(k, parts, width) float32 -> (k, width) of dtype: add up the programs' sums, in the same order in every run."""
    k, parts, width = partial.shape
    out = partial.new_empty(k, width, dtype=dtype)
    _column_sums[triton.cdiv(width, 32), k, 1](partial, None, out, parts, width, 1, 128, 32, 1, num_warps=4)
    return out


def column_sums(dy, counts=None):
    """(1, width): the sum over the rows of dy (rows, width). Or, where counts (E) say how many rows each group has, (E,
    width): for dy (16384, 6144) that takes 55 us; reading dy takes 48."""
    rows, width = dy.shape
    groups = 1
    parts = programs_at_once(dy.device) // 2
    if counts is not None:
        groups = len(counts)
        parts = 16
    partial = dy.new_empty(groups, parts, width, dtype=torch.float32)
    _column_sums[triton.cdiv(width, 64), groups, parts](dy, counts, partial, rows, width,
                                                        triton.next_power_of_2(groups), 32, 64, 3, num_warps=2)
    return sum_parts(partial, dy.dtype)


def bias_gradient(dy):
    """Sums over the rows of dy (rows, out): (out). A TwoCopies of fast/fp8.py has them."""
    ours = isinstance(dy, torch.Tensor) and kernels.on_triton(dy)
    return column_sums(dy)[0] if ours else dy.sum(0)


# --------------------------------------------------------------------------------------------------- weight gradients
#
#     y = x W^T + b        dx = dy W        dW = dy^T x        db = sum over rows of dy
#
# Another pipeline stage waits for dx, but none for dW and db. Both are written where they travel (fast/units.py).

LINEARS = torch.nn.Linear, parallel.ColumnParallelLinear, parallel.RowParallelLinear
MOST_WAITING = 2  # layers. A sublayer has two that --tp cuts


class WeightGradients:
    """Computes the weight gradients of a piece's Linears in autograd's place, for fast/graphs.py. unit_of: {parameter:
    its WrittenUnit}. What runs for one Linear:

        F   its product, in one of the functions below, which `collected` gives detached weights and `take`
        I   autograd calls the function's backward, which returns dx, and puts (W, b, dy, x) into `later`
        W   compute(W, b, dy, x): dW = dy^T x, db = sum of dy
        B   as I, but computes at once, except layers that --tp cuts: they wait until the next all-reduce, or the end of
            the backward, calls `catch_up`. At most MOST_WAITING wait, because what they need takes memory

    Norms, embeddings, routers, experts, tied weights and biases that are added after g (with --sp) stay with autograd,
    in I.
    """
    later = None  # a list during an I

    def __init__(self, module, unit_of):
        self.unit_of = unit_of
        self.waiting = []
        uses = Counter(param for layer in module.modules() for param in layer._parameters.values())
        for layer in module.modules():
            if isinstance(layer, LINEARS) and uses[layer.weight] == 1:
                layer.weight.collector = self

    @contextmanager
    def put_off(self, later):
        """What an "I" runs in: its weight gradients are not computed, what they need goes into `later`."""
        self.later = later
        try:
            yield
        finally:
            self.later = None

    def take(self, weight, *computed_from):
        if self.later is not None:
            self.later.append((weight, *computed_from))
        elif parallel.placement_of(weight).cuts:
            self.waiting.append((weight, *computed_from))
            self.catch_up(MOST_WAITING)
        else:
            self.compute(weight, *computed_from)

    def catch_up(self, leave=0):
        """Compute what waits, all but the latest `leave`."""
        while len(self.waiting) > leave:
            self.compute(*self.waiting.pop(0))

    @torch.no_grad()
    def compute(self, weight, bias, dy, x):
        if weight.requires_grad:
            self.unit_of[weight].add(weight, dy.T, x)
        if bias is not None and bias.requires_grad:
            self.unit_of[bias].add(bias, bias_gradient(dy))


class Taker(NamedTuple):
    """take(dy, x), of rows, for a product of these parameters."""
    collector: WeightGradients
    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, dy, x):
        self.collector.take(self.weight, self.bias, dy, x)


def collected(x, weight, bias):
    """(weight, bias, take) for a product. Where a WeightGradients collects, the parameters are detached, so that
    autograd's hooks do not fire before the weight gradient exists, and a Taker hands it what it needs."""
    collector = getattr(weight, "collector", None)
    if not collector or not x.requires_grad:  # all before x is frozen, so nothing detached would have a backward
        return weight, bias, None
    return weight.detach(), None if bias is None else bias.detach(), Taker(collector, weight, bias)


def gradients_of(ctx, dy, x):
    """In a product's backward: (dW, db) of rows; both None where a Taker has what they are computed from. x: detached,
    because a Taker may keep it, and with it the graph before it, down to the stage's input and its gradient."""
    if ctx.take:
        ctx.take(dy, x)
        return None, None
    _, needs_dw, needs_db, *_ = ctx.needs_input_grad
    return dy.T @ x if needs_dw else None, bias_gradient(dy) if needs_db else None


class Product(torch.autograd.Function):
    """x W^T + b. take: as `collected` gives it. adds: whether b is added; without, it has a gradient all the same."""

    @staticmethod
    def forward(ctx, x, weight, bias, take, adds=True):
        ctx.take = take
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias if adds else None)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1]).contiguous()                                        # (rows, out)
        dx = (dy @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return dx, *gradients_of(ctx, dy, x.detach().reshape(-1, x.shape[-1])), None, None


# ------------------------------------------------------------------------------------------------------ padded outputs

def pads(x, weight):
    """Whether the weight (out, in) gets rows of zeros: if x is 16-bit and 8 does not divide `out` (50257 in GPT-2).

    cuBLAS's fast kernels need rows that begin at multiples of 16 bytes. The three products (forward, dx, dW) of
    8192 x 1600 with 50257 columns take 35 ms on an H200, with 50304 columns 6. The price is a copy of the weight.
    """
    return len(weight) % 8 and x.dtype.itemsize == 2 and kernels.on_triton(x)


class PaddedProduct(torch.autograd.Function):
    """x W^T, computed with a padded W."""

    @staticmethod
    def forward(ctx, x, weight, bias, take):
        padded = F.pad(weight, (0, 0, 0, -len(weight) % 64))
        y = F.linear(x, padded)                                                               # (..., padded)
        ctx.take = take
        # Backward needs y, because cross-entropy writes its gradient over the logits in y. Saved as y.data, because
        # autograd raises an error if a saved tensor is overwritten, but does not check .data.
        ctx.save_for_backward(x, padded, y.data)
        return y[..., :len(weight)]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, padded, y = ctx.saved_tensors
        rows = pad_columns(dy, y)
        dx = (rows @ padded).view(x.shape) if ctx.needs_input_grad[0] else None
        return dx, *gradients_of(ctx, rows[:, :dy.shape[-1]], x.detach().reshape(-1, x.shape[-1])), None


def fast_linear(x, weight, bias=None, adds=True):
    """F.linear. adds: as for Product."""
    inputs = x, *collected(x, weight, bias)
    if bias is None and pads(x, weight):
        return PaddedProduct.apply(*inputs)
    if inputs[-1] or bias is not None and kernels.on_triton(x) or not adds:  # else F.linear is as fast
        return Product.apply(*inputs, adds)
    return F.linear(x, weight, bias)


def pad_columns(dy, y):
    """dy (..., out), the gradient of y[..., :out], as (rows, y.shape[-1]) with zeros in the padding columns.

    If cross-entropy wrote dy over the logits in y, y's padding columns already hold zeros, and this returns a view.
    Any other dy is copied.
    """
    width = y.shape[-1]
    rows = dy.reshape(-1, dy.shape[-1])
    if dy.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() and rows.stride() == (width, 1):
        return rows.as_strided((len(rows), width), rows.stride())
    return F.pad(rows, (0, width - rows.shape[1]))
