"""A block's products in eight bits, --dtype fp8: one kernel reads an operand once and writes both copies of it.

    y = x W^T        dx = dy W        dW = dy^T x

Hopper's tensor cores multiply FP8 twice as fast as bf16, but want both factors with what is summed over side by side.
So of x, W and dy each, one product wants it as it is, and one transposed. Casting costs memory traffic:

    read for the largest element, then once more        2 + 2 bytes an element
    write the copy, and the transposed one              1 + 1

    E4M3    x, W    3 bits behind the leading one, up to 448
    E5M2    dy      2 bits, but from 2^-16 to 57344, because gradients spread wider

A tensor has one scale, of its own numbers: its largest element becomes the largest of its kind. A product is off by 4 %
of its norm in E4M3, by 6 % with one factor in E5M2, in bf16 by 0.2 %. Sums are float32. Masters, gradients' totals, the
residual stream, norms, attention, embedding and head are bf16's. A step of GPT-2 XL with 8 sequences takes 1 / 1.2 of
bf16's; a narrower model gains less, because casts grow with the width, products with its square.

Each rank scales by what it sees, so layouts agree to FP8's rounding, not to the last digits.
Read with: Micikevicius et al. (2022), "FP8 formats for deep learning".
"""

import torch
from torch.autograd.function import once_differentiable

from fast.linear import collected, fast_linear, gradients_of, LINEARS, sum_parts
from kernels import load_float32, tl, triton

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@triton.jit
def _largest(x, found, n, BLOCK: tl.constexpr):
    """The largest |x| of each program's share of n elements, one for each program."""
    most = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK, num_stages=3):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        most = tl.maximum(most, tl.abs(load_float32(x + at, at < n)))
    tl.store(found + tl.program_id(0), tl.max(most, 0))


@triton.jit
def _two_copies(x, found, q, t, unit, sums, rows, width, LARGEST: tl.constexpr, FOUND: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr):
    """q = x / unit, t its transpose. sums (programs, width): of the columns of each BM rows of x."""
    most = tl.max(tl.load(found + tl.arange(0, FOUND)), 0)
    most = tl.where(most > 0, most, LARGEST)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(unit, most / LARGEST)
    row = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None].to(tl.int64)
    column = (tl.program_id(1) * BN + tl.arange(0, BN))[None].to(tl.int64)
    inside = (row < rows) & (column < width)
    v = load_float32(x + row * width + column, inside)
    if sums is not None:
        tl.store(sums + tl.program_id(0) * width + column, tl.sum(v, 0, keep_dims=True), column < width)
    v = (v * (LARGEST / most)).to(q.dtype.element_ty)
    tl.store(q + row * width + column, v, inside)
    if t is not None:
        tl.store(t + tl.trans(column * rows + row), tl.trans(v), tl.trans(inside))


class TwoCopies:
    """A matrix (rows, width) in FP8: `q` times `unit` is its value, `t` is q transposed, the rows of `sums` (programs,
    width) add up to the sums of its columns, before the cast. In a backward it stands in a tensor's place."""
    dtype = torch.float8_e4m3fn  # or E5M2; what others ask is whether it is 16 or 32 bits

    def __init__(self, q, t, unit, sums=None):
        self.q = q
        self.t = t
        self.unit = unit
        self.sums = sums

    @property
    def T(self):
        return TwoCopies(self.t, self.q, self.unit)

    def __matmul__(self, other):
        return self.product(other.T)

    def product(self, other, bias=None, dtype=torch.bfloat16, out=None):
        """self other^T + bias, both summed over along their rows."""
        return torch._scaled_mm(self.q, other.q.T, self.unit, other.unit, bias, out_dtype=dtype, use_fast_accum=True,
                                **{"out": out} if out is not None else {})

    def add_product(self, other, total, beta):
        """total = beta total + self other. No product in FP8 adds to what is there, so beta 1 takes another pass."""
        if beta:
            total.add_(self.product(other.T, dtype=total.dtype))
        else:
            self.product(other.T, dtype=total.dtype, out=total)

    def sum(self, dim):
        return sum_parts(self.sums[None], torch.bfloat16)[0]


def largest(x):
    """What `two_copies` needs first: (256) float32, the largest |x| of each program's share."""
    found = x.new_empty(256, dtype=torch.float32)
    _largest[(len(found),)](x, found, x.numel(), 8192, num_warps=8)
    return found


def two_copies(x, dtype, sums=False, transposed=True):
    """x (rows, width), contiguous, as TwoCopies in a dtype of LARGEST."""
    rows, width = x.shape
    found = largest(x)
    q = x.new_empty(rows, width, dtype=dtype)
    t = x.new_empty(width, rows, dtype=dtype) if transposed else None
    unit = x.new_empty((), dtype=torch.float32)
    programs = triton.cdiv(rows, 128)
    sums = x.new_empty(programs, width, dtype=torch.float32) if sums else None
    _two_copies[programs, triton.cdiv(width, 64)](x, found, q, t, unit, sums, rows, width, LARGEST[dtype], len(found),
                                                  128, 64, num_warps=4)
    return TwoCopies(q, t, unit, sums)


class Product(torch.autograd.Function):
    """x W^T + b. take, adds: as for fast/linear.py's. Of x and W it keeps the transposed copies alone, a byte an
    element."""

    @staticmethod
    def forward(ctx, x, weight, bias, take, adds=True):
        rows = two_copies(x.reshape(-1, x.shape[-1]).contiguous(), torch.float8_e4m3fn)
        matrix = two_copies(weight.contiguous(), torch.float8_e4m3fn)
        ctx.take = take
        ctx.save_for_backward(rows.t, rows.unit, matrix.t, matrix.unit)
        return rows.product(matrix, bias if adds else None).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, x_unit, weight, weight_unit = ctx.saved_tensors
        rows = two_copies(dy.reshape(-1, dy.shape[-1]).contiguous(), torch.float8_e5m2, sums=True)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (rows @ TwoCopies(None, weight, weight_unit)).view(*dy.shape[:-1], -1)
        return dx, *gradients_of(ctx, rows, TwoCopies(None, x, x_unit)), None, None


def use_fp8(stage):
    """Let the products of a stage's blocks run in FP8."""
    for layer in stage.h.modules():
        if isinstance(layer, LINEARS):
            layer.weight.in_fp8 = True


def linear(x, weight, bias=None, adds=True):
    """fast_linear, in FP8 where `use_fp8` says so."""
    if hasattr(weight, "in_fp8"):
        return Product.apply(x, *collected(x, weight, bias), adds)
    return fast_linear(x, weight, bias, adds)
