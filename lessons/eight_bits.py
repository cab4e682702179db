"""Few bits: a product of few rows takes as long as its weights take to be read, so read fewer bytes.

Sampling multiplies a row a sequence, x (R, in), with a whole matrix W (out, in). That is 2 R FLOPs a weight, and an
H200 has time for 400 while it reads a weight of 2 bytes: it waits for memory.

    int8    each row of W is whole numbers q up to 127 and a scale s, its largest weight / 127. y = s (x q^T)
    int4    q is at most 7, two of them in a byte. A row's largest weight would make all others coarse, so each GROUP
            of columns has a scale, a float32: 4.5 bits a weight. Byte j of a group has q of column j in its low half,
            and of column j + GROUP/2 in its high half

A weight is off by at most s / 2, an element of y by at most s / 2 times the sum of |x|, and by its own rounding.

    python bench.py lessons --only eight-bits    times, bytes, errors
    python -m lessons sampling                   what it costs in loss

CS336 lecture 5: low precision.
"""

import torch

from kernels import dot, exact, tl, triton
from lessons.bench.timing import off, say

GROUP = 64


@triton.jit
def _few_rows(x, w, scale, y, rows, width, out, R: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
              PACKED: tl.constexpr):
    """BN columns of y = x (scale w)^T, all rows: w is read once, and in registers it gets x's dtype. BK columns of x at
    a time, in halves. PACKED: these meet the halves of w's bytes, and have a scale of their own."""
    HALF: tl.constexpr = BK // 2
    row, column, k = tl.arange(0, R)[:, None], tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, HALF)
    x += row * width + k                                                                      # (R, HALF)
    w += column[:, None].to(tl.int64) * (width // 2 if PACKED else width) + k                 # (BN, HALF)
    scale += column * (width // BK if PACKED else 1)                                          # (BN)
    total = tl.zeros((R, BN), tl.float32)
    for block in range(tl.cdiv(width, BK)):
        left = width - block * BK
        first = tl.load(x + block * BK, (row < rows) & (k < left), 0)
        second = tl.load(x + block * BK + HALF, (row < rows) & (k < left - HALF), 0)
        if PACKED:
            both = tl.load(w + block * HALF, column[:, None] < out, 0).to(tl.int32)
            low, high = both << 28 >> 28, both >> 4                                           # repeats the sign
        else:
            low = exact(tl.load(w + block * BK, (column[:, None] < out) & (k < left), 0))
            high = exact(tl.load(w + block * BK + HALF, (column[:, None] < out) & (k < left - HALF), 0))
        part = dot(first, tl.trans(low.to(first.dtype)))
        part = dot(second, tl.trans(high.to(first.dtype)), part)
        total += part * tl.load(scale + (block if PACKED else 0), column < out, 0)
    tl.store(y + row * out + column, total, (row < rows) & (column < out))


def few_rows(x, w, scale):
    """x w^T, (R, out), for x (R, in) in 16 bits, R up to 16. w, scale: of in_few_bits, or in x's dtype with a scale
    (out) of ones."""
    (rows, width), out = x.shape, len(w)
    y = x.new_empty(rows, out)
    packed = w.shape[1] < width
    columns, block, stages = (32, GROUP, 6) if packed else (64, 256, 3)
    _few_rows[(triton.cdiv(out, columns),)](x, w, scale, y, rows, width, out, 16, columns, block, packed, num_warps=4,
                                            num_stages=stages)
    return y


def in_few_bits(w, bits):
    """(q, s) of w (out, in). 8 bits: int8 (out, in), float32 (out, 1). 4 bits, where GROUP divides `in`: int8 (out,
    in / 2), float32 (out, in / GROUP)."""
    groups = w.float().unflatten(1, (-1, GROUP if bits == 4 else w.shape[1]))                 # (out, groups, columns)
    scale = groups.abs().amax(2, keepdim=True).clamp(min=1e-30) / (2**(bits - 1) - 1)         # (out, groups, 1)
    q = (groups / scale).round().to(torch.int8)
    if bits == 4:
        low, high = q.chunk(2, 2)
        q = low & 15 | high << 4
    return q.flatten(1), scale.squeeze(2)


def floats_of(q, scale, bits):
    """The weights (out, in) that in_few_bits made these of, float32."""
    groups = q.unflatten(1, (scale.shape[1], -1))
    if bits == 4:
        groups = torch.cat([groups << 4 >> 4, groups >> 4], 2)
    return (groups * scale[:, :, None]).flatten(1)


def sixteen_and_fewer_bits(device, n, side):
    """8 rows times a matrix of twice the side. (In fp16 on a CPU, because Triton's interpreter cannot turn whole
    numbers into bf16.)"""
    side *= 2
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    w, x = (torch.randn(rows, side, device=device, dtype=dtype) for rows in (side, 8))
    ways = {"PyTorch, 16 bits": (torch.mm, [x, w.T]), "16 bits": (few_rows, [x, w, torch.ones(side, device=device)]),
            **{f"{bits} bits": (few_rows, [x, *in_few_bits(w, bits)]) for bits in (8, 4)}}
    exact = x.double() @ w.double().T
    errors = ", ".join(f"{way} {off(f(*given), exact):.2%}" for way, (f, given) in ways.items())
    say(f"eight-bits, relative errors: {errors}")
    return {way: (f, given, sum(t.nbytes for t in given) + 2 * exact.numel()) for way, (f, given) in ways.items()}
