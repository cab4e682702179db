"""Eight bits: a product of few rows takes as long as its weights take to be read, so halve their bytes.

Sampling multiplies a row a sequence, x (R, in), with a whole matrix W (out, in). That is 2 R FLOPs a weight, and an
H200 has time for 400 while it reads a weight of 2 bytes: it waits for memory. In int8 each row of W is whole numbers q
up to 127 and a scale s, its largest weight / 127. y = s (x q^T): s comes last, and q is exact in 16 bits, bf16's, too.
A weight is off by at most s / 2, an element of y by at most s / 2 times the sum of |x|, and by its own rounding.

    python bench.py lessons --only eight-bits    times, bytes, errors

In training it is the products themselves that become faster, in FP8 (fast/fp8.py), and what costs is to make its
copies: by PyTorch's operations, or by a kernel that reads a tensor once for both.

    python bench.py lessons --only casts

CS336 lecture 5: low precision.
"""

import functools

import torch

from fast.fp8 import LARGEST, two_copies
from kernels import dot, exact, tl, triton
from lessons.bench.timing import off, say
from lessons.four_bits import few_rows_of_four, in_int4


@triton.jit
def _few_rows(x, w, scale, y, rows, width, out, R: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """BN columns of y = scale x w^T, all rows: w is read once, and in registers it gets x's dtype."""
    row, column, k = tl.arange(0, R)[:, None], tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    x += row * width + k                                                                      # (R, BK)
    w += column[:, None].to(tl.int64) * width + k                                             # (BN, BK)
    total = tl.zeros((R, BN), tl.float32)
    for start in range(0, width, BK):
        some = tl.load(x + start, (row < rows) & (k < width - start), 0)
        tile = tl.load(w + start, (column[:, None] < out) & (k < width - start), 0)
        total = dot(some, tl.trans(exact(tile).to(some.dtype)), total)
    total *= tl.load(scale + column, column < out, 0)
    tl.store(y + row * out + column, total, (row < rows) & (column < out))


def few_rows(x, w, scale):
    """scale x w^T, (R, out), for x (R, in) in 16 bits, R up to 16; w (out, in), int8 or as x; scale (out), float32."""
    (rows, width), out = x.shape, len(w)
    y = x.new_empty(rows, out)
    _few_rows[(triton.cdiv(out, 64),)](x, w, scale, y, rows, width, out, 16, 64, 256, num_warps=4, num_stages=3)
    return y


def in_int8(w):
    """(q, s) of w (out, in): int8 (out, in), float32 (out)."""
    scale = w.float().abs().amax(1).clamp(min=1e-30) / 127
    return (w / scale[:, None]).round().to(torch.int8), scale


def sixteen_and_eight_bits(device, n, side):
    """8 rows times a matrix of twice the side."""
    side *= 2
    w, x = (torch.randn(rows, side, device=device, dtype=torch.bfloat16) for rows in (side, 8))
    q, scale = in_int8(w)
    ways = {"PyTorch, 16 bits": (torch.mm, [x, w.T]), "16 bits": (few_rows, [x, w, torch.ones_like(scale)]),
            "8 bits": (few_rows, [x, q, scale]), "4 bits": (few_rows_of_four, [x, *in_int4(w)])}
    exact = x.double() @ w.double().T
    errors = ", ".join(f"{way} {off(f(*given), exact):.2%}" for way, (f, given) in ways.items())
    say(f"eight-bits, relative errors: {errors}")
    return {way: (f, given, sum(t.nbytes for t in given) + 2 * exact.numel()) for way, (f, given) in ways.items()}


def casts_to_fp8(device, n, side):
    """A tensor in bf16 becomes FP8 with a scale, as it is and transposed. (The bytes of PyTorch's: |x|, its largest, a
    quotient, the cast, the copy.)"""
    x = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    dtype = torch.float8_e4m3fn

    def one_by_one(x):
        q = (x / (x.abs().amax() / LARGEST[dtype])).to(dtype)
        return q, q.T.contiguous()
    one_copy = functools.partial(two_copies, dtype=dtype, transposed=False)
    both = functools.partial(two_copies, dtype=dtype)
    return {"PyTorch, both": (one_by_one, [x], 15 * x.numel()), "one copy": (one_copy, [x], 5 * x.numel()),
            "both": (both, [x], 6 * x.numel())}
