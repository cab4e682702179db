"""Linear layers: a bias's gradient by one kernel, outputs padded.

Takes the place of kernels.linear and bias_gradient. On an H200 a step of GPT-2 124M with its 50,257 tokens
takes 74 % longer without padding. A bias's gradient takes 25 us, PyTorch's 46.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

import kernels
from kernels import bias_gradient, Linear, programs_at_once, tl, triton, weight_gradients


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
    e, part, parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    if counts is None:
        first, end = e * rows, e * rows + rows
    else:
        group = tl.arange(0, E_PAD)
        first = tl.sum(tl.load(counts + group, group < e, 0), 0)
        end = first + tl.load(counts + e)
    column = tl.program_id(0) * N + tl.arange(0, N)[None]
    total = tl.zeros((M, N), tl.float32)
    for start in tl.range(first + part * M, end, parts * M, num_stages=STAGES):
        row = (start + tl.arange(0, M)[:, None]).to(tl.int64)
        total += tl.load(x + row * width + column, (row < end) & (column < width), 0).to(tl.float32)
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
    (rows, width), groups, parts = dy.shape, 1, programs_at_once(dy.device) // 2
    if counts is not None:
        groups, parts = len(counts), 16
    partial = dy.new_empty(groups, parts, width, dtype=torch.float32)
    _column_sums[triton.cdiv(width, 64), groups, parts](dy, counts, partial, rows, width,
                                                        triton.next_power_of_2(groups), 32, 64, 3, num_warps=2)
    return sum_parts(partial, dy.dtype)


def fast_bias_gradient(dy):
    return column_sums(dy)[0] if kernels.on_triton(dy) else bias_gradient(dy)


# ------------------------------------------------------------------------------------------------------ padded outputs

def pads(x, weight):
    """Whether the weight (out, in) gets rows of zeros: if x is 16-bit and 8 does not divide `out` (50257 in GPT-2).

    cuBLAS's fast kernels need rows that begin at multiples of 16 bytes. The three products (forward, dx, dW) of
    8192 x 1600 with 50257 columns take 35 ms on an H200, with 50304 columns 6. The price is a copy of the weight.
    """
    return len(weight) % 8 and x.dtype.itemsize == 2 and kernels.on_triton(x)


class PaddedLinear(torch.autograd.Function):
    """x W^T, computed with a padded W. take: as for kernels.Linear."""

    @staticmethod
    def forward(ctx, x, weight, take):
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
        return dx, *weight_gradients(ctx, rows[:, :dy.shape[-1]], x.reshape(-1, x.shape[-1]))


def fast_linear(x, weight, bias=None, take=None):
    if bias is None and pads(x, weight):
        return PaddedLinear.apply(x, weight, take)
    if take or bias is not None and kernels.on_triton(x):  # else F.linear is as fast
        return Linear.apply(x, weight, bias, take)
    return F.linear(x, weight, bias)


def pad_columns(dy, y):
    """dy (..., out), the gradient of y[..., :out], as (rows, y.shape[-1]) with zeros in the padding columns.

    If cross-entropy wrote dy over the logits in y, y's padding columns already hold zeros, and this returns a view.
    Any other dy is copied.
    """
    width, rows = y.shape[-1], dy.reshape(-1, dy.shape[-1])
    if dy.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() and rows.stride() == (width, 1):
        return rows.as_strided((len(rows), width), rows.stride())
    return F.pad(rows, (0, width - rows.shape[1]))
