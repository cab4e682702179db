"""Muon's step: half of each symmetric product.

Takes the place of further/muon.py's orthogonal, for 16-bit matrices on Hopper GPUs. On an H100 x x^T of 12 matrices of
1600 x 6400 takes 0.37 ms, cuBLAS's whole product 0.54.
"""

import torch

import kernels
from fast.beside import programs_beside_transfers, tma_takes
from further.muon import COEFFICIENTS, orthogonal, unit
from kernels import dot, TensorDescriptor, tl, triton


# --------------------------------------------------------------------------------------------------- symmetric products
#
# x x^T is symmetric. So only its tiles on the diagonal and below are computed, and each is stored a second time as its
# mirror image. Row r of tiles of BM x 2 BM has r // 2 + 1 of them. Where a tile's right half lies above the diagonal,
# another tile's mirror image is stored there, so this half goes beyond the edge, where TMA stores nothing: a branch
# would keep Triton from making one loop of tiles and K. (H100, 12 matrices of 1600 x 6400 times their
# transposes: 0.37 ms, with a branch 0.39, with tiles of 128 x 128 0.50, by pointers in place of TMA 0.49. cuBLAS, which
# computes both halves: 0.54.)

@triton.jit
def _store_both(Y, C, matrix, row, column, n, tile, beta):
    """Store a tile (BM, BM), with beta C, in row `row` and column `column` of such tiles, and its mirror image.

    Of a tile on the diagonal only the lower half counts, so that the product is symmetric to the bit.
    """
    BM: tl.constexpr = tile.shape[0]
    if C is not None:
        tile += beta * C.load([matrix, row * BM, column * BM]).reshape(BM, BM).to(tl.float32)
    y = tile.to(Y.dtype)
    at = tl.arange(0, BM)
    lower = (at[:, None] >= at[None]) | (column < row)
    mirror = y.T
    Y.store([matrix, tl.where(column > row, n, row * BM), column * BM], tl.where(lower, y, mirror).reshape(1, BM, BM))
    Y.store([matrix, tl.where(column >= row, n, column * BM), row * BM], mirror.reshape(1, BM, BM))


@triton.jit
def _symmetric(A, B, C, Y, tiles, many, n, K, alpha, beta, BM: tl.constexpr, BK: tl.constexpr):
    """y = alpha a a^T + beta c. A, B: a (many, n, K) in blocks of BM and of 2 BM rows. Rows 2 p and 2 p + 1 of tiles
    begin with tile p (p + 1) of a matrix. Persistent: a program takes one tile after the other."""
    for program in tl.range(tl.program_id(0), many * tiles, tl.num_programs(0), flatten=True):
        matrix = program // tiles
        t = program % tiles
        p = ((tl.sqrt(4.0 * t + 1) - 1) / 2).to(tl.int32)
        p += (p + 1) * (p + 2) <= t  # where the root was rounded
        p -= p * (p + 1) > t
        column = t - p * (p + 1)
        second = (column > p).to(tl.int32)
        row = 2 * p + second
        column -= second * (p + 1)
        tile = tl.zeros((BM, 2 * BM), tl.float32)
        for k in range(0, K, BK):
            x = A.load([matrix, row * BM, k]).reshape(BM, BK)
            tile = dot(x, B.load([matrix, 2 * column * BM, k]).reshape(2 * BM, BK).T, tile)
        tile *= alpha
        left, right = tile.reshape(BM, 2, BM).permute(0, 2, 1).split()
        _store_both(Y, C, matrix, row, 2 * column, n, left, beta)
        _store_both(Y, C, matrix, row, 2 * column + 1, n, right, beta)


def symmetric(a, c=None, alpha=1.0, beta=0.0):
    """alpha a a^T + beta c of `many` matrices: a (many, n, k), a symmetric c (many, n, n), contiguous, in 16 bits.
    `tma_takes` them and the result, so n and k are multiples of 8."""
    many, n, k = a.shape
    BM = 128 if n >= 128 else 32
    BK = 64 if n >= 128 else 32
    y = a.new_empty(many, n, n)
    tiles = sum(row // 2 + 1 for row in range(triton.cdiv(n, BM)))
    describe = TensorDescriptor.from_tensor
    _symmetric[(min(programs_beside_transfers(a.device), many * tiles),)](
        describe(a, [1, BM, BK]), describe(a, [1, 2 * BM, BK]), None if c is None else describe(c, [1, BM, BM]),
        describe(y, [1, BM, BM]), tiles, many, n, k, alpha, beta, BM, BK, num_warps=8, num_stages=3)
    return y


LEAST_ROWS = 1024  # below, cuBLAS's whole product takes as long as our half, and its launch costs the CPU less


def fast_orthogonal(x):
    """further.muon.orthogonal. A 1600 x 6400 matrix takes 65 a^3 FLOPs, a = 1600, in place of 90."""
    _, high, wide = x.shape
    if not (kernels.on_triton(x) and min(high, wide) >= LEAST_ROWS and high % 8 == 0 and tma_takes(x)):
        return orthogonal(x)
    is_tall = high > wide
    x = unit(x.mT if is_tall else x).contiguous()
    first, third, fifth = COEFFICIENTS
    for _ in range(5):
        square = symmetric(x)
        polynomial = symmetric(square, square, fifth, third)
        x = torch.baddbmm(x, polynomial, x, beta=first)
    return x.mT if is_tall else x
