"""RMSNorm: what of a layer norm does a model need?

    python train.py --plain --arch llama

Read with: kernels.py "layer norm"; CS336 lecture 3.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from kernels import load_float32, on_triton, programs_at_once, table, this_program, tl, triton


# Its scale alone: no mean, no bias. Over each row, rstd = 1 / sqrt(mean(x^2) + eps), xhat = x rstd, g = dy w:
#
#     y = xhat w        dw = sum over rows of dy xhat        dx = rstd (g - xhat mean(g xhat))
#
# Bytes: forward 2 passes of x, backward 3 (x, dy, dx), as a layer norm's. Zhang and Sennrich (2019).

@triton.jit
def _rms_norm(x_ptr, weight_ptr, y_ptr, rstd_ptr, width, eps, BLOCK: tl.constexpr):
    """A row a program, all of it in registers."""
    row = this_program()
    column = tl.arange(0, BLOCK)
    mask = column < width
    x = load_float32(x_ptr + row * width + column, mask)
    rstd = 1 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    weight = load_float32(weight_ptr + column, mask)
    tl.store(y_ptr + row * width + column, x * rstd * weight, mask)


@triton.jit
def _rms_norm_backward(x_ptr, dy_ptr, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, rows, width, BLOCK: tl.constexpr):
    """As many programs as run at once, each striding over the rows. partial (programs, width): their shares of dw."""
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < width
    weight = load_float32(weight_ptr + column, mask)
    dw = tl.zeros((BLOCK,), tl.float32)
    for row in range(first, rows, tl.num_programs(0)):
        offsets = tl.cast(row, tl.int64) * width + column
        rstd = tl.load(rstd_ptr + row)
        dy = load_float32(dy_ptr + offsets, mask)
        xhat = load_float32(x_ptr + offsets, mask) * rstd
        g = dy * weight
        tl.store(dx_ptr + offsets, rstd * (g - xhat * (tl.sum(g * xhat, 0) / width)), mask)
        dw += dy * xhat
    tl.store(partial_ptr + first.to(tl.int64) * width + column, dw, mask)


class RowNorm(torch.autograd.Function):
    """The RMSNorm of each row of x. Keeps x and a number a row."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        x = x.contiguous()
        width = x.shape[-1]
        y = torch.empty_like(x)
        rstd = x.new_empty(x.numel() // width, dtype=torch.float32)
        _rms_norm[(len(rstd),)](x, weight, y, rstd, width, eps, triton.next_power_of_2(width))
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        width = x.shape[-1]
        programs = min(len(rstd), 4 * programs_at_once(x.device))
        dx = torch.empty_like(x)
        partial = x.new_empty(programs, width, dtype=torch.float32)
        _rms_norm_backward[(programs,)](x, dy.contiguous(), weight, rstd, dx, partial, len(rstd), width,
                                        triton.next_power_of_2(width))
        return dx, partial.sum(0).to(weight.dtype), None


def rms_norm(x, weight, eps):
    """RMSNorm of x (..., width), weight (width)."""
    return table[RowNorm].apply(x, weight, eps) if on_triton(x) else F.rms_norm(x, x.shape[-1:], weight, eps)


class RMSNorm(nn.RMSNorm):
    bias = None

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)
