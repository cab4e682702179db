"""Four bits: two weights in a byte, and a scale for each 64 of them.

As in lessons/eight_bits.py, the bytes of the weights are what a product of few rows waits for. In 4 bits a weight is a
whole number q from -7 to 7 times a scale. A row's largest weight would make all others of the row coarse, so each GROUP
of columns has its own scale, a float32: 4.5 bits a weight. Byte j of a group has q of column j in its low half, and of
column j + GROUP/2 in its high half.

    python bench.py lessons --only eight-bits    times, bytes, errors
    python -m lessons sampling                   what it costs in loss
"""

import torch

from kernels import dot, tl, triton

GROUP = 64


def in_int4(w):
    """(q, s) of w (out, in), where GROUP divides `in`: int8 (out, in / 2), float32 (out, in / GROUP)."""
    groups = w.float().unflatten(1, (-1, GROUP))                                              # (out, groups, GROUP)
    scale = groups.abs().amax(2).clamp(min=1e-30) / 7                                         # (out, groups)
    low, high = (groups / scale[:, :, None]).round().to(torch.int8).chunk(2, 2)
    return (low & 15 | high << 4).flatten(1), scale


def from_int4(q, scale):
    """The weights (out, in), float32. Shifts to the right repeat the sign."""
    groups = q.unflatten(1, (-1, GROUP // 2))
    return (torch.cat([groups << 4 >> 4, groups >> 4], 2) * scale[:, :, None]).flatten(1)


@triton.jit
def _few_rows_of_four(x, w, scale, y, rows, width, out, R: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """BN columns of y = x (scale w)^T, group after group. The halves of a byte meet the halves of x's columns."""
    HALF: tl.constexpr = GROUP // 2
    row, column, k = tl.arange(0, R)[:, None], tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, HALF)
    x += row * width + k                                                                      # (R, HALF)
    w += column[:, None].to(tl.int64) * (width // 2) + k                                      # (BN, HALF)
    scale += column * (width // GROUP)                                                        # (BN)
    total = tl.zeros((R, BN), tl.float32)
    for group in range(width // GROUP):
        first = tl.load(x + group * GROUP, row < rows, 0)
        second = tl.load(x + group * GROUP + HALF, row < rows, 0)
        both = tl.load(w + group * HALF, column[:, None] < out, 0).to(tl.int32)
        part = dot(first, tl.trans((both << 28 >> 28).to(first.dtype)))
        part = dot(second, tl.trans((both >> 4).to(first.dtype)), part)
        total += part * tl.load(scale + group, column < out, 0)
    tl.store(y + row * out + column, total, (row < rows) & (column < out))


def few_rows_of_four(x, q, scale):
    """y = x w^T, (R, out), for x (R, in), R up to 16, and w by `in_int4`."""
    (rows, width), out = x.shape, len(q)
    y = x.new_empty(rows, out)
    _few_rows_of_four[(triton.cdiv(out, 32),)](x, q, scale, y, rows, width, out, 16, 32, GROUP, num_warps=4,
                                               num_stages=6)
    return y
