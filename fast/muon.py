"""Muon's step: fewer products, half of each symmetric one, and fewer passes over memory.

Takes the place of further/muon.py's orthogonal, for 16-bit matrices on Hopper GPUs, and of its updates and move, for
float32 ones. On an H100 a step of the optimizer takes 90 ms for XL's parameters, with half products by pointers 142.
"""

import torch

import kernels
from fast.grouped import programs_beside_transfers, tma_takes
from further.muon import COEFFICIENTS, move, orthogonal, SHARE, unit, updates
from kernels import dot, load_float32, TensorDescriptor, this_program, tl, triton


# --------------------------------------------------------------------------------------------------- symmetric products
#
# The product of two symmetric matrices that commute is symmetric, as x x^T is. So only its tiles on the diagonal and
# below are computed, and each is stored a second time as its mirror image. Row r of tiles of BM x 2 BM has r // 2 + 1
# of them. Where a tile's right half lies above the diagonal, another tile's mirror image is stored there, so this half
# goes beyond the edge, where TMA stores nothing: a branch would keep Triton from making one loop of tiles and K.
# (H100, 12 matrices of 1600 x 6400 times their transposes: 0.37 ms, with a branch 0.39, with tiles of 128 x 128 0.50,
# by pointers in place of TMA 0.49. cuBLAS, which computes both halves: 0.54.)

@triton.jit
def _store_both(Y, C, matrix, row, column, n, tile, beta):
    """Store a tile (BM, BM), with beta C, in row `row` and column `column` of such tiles, and its mirror image.

    Of a tile on the diagonal only the lower half counts: once rounded, two matrices do not quite commute, and if g were
    not symmetric, the error would grow tenfold in each step.
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
def _symmetric(A, B, C, Y, tiles, many, n, K, alpha, beta, diagonal, TRANSPOSED: tl.constexpr, BM: tl.constexpr,
               BK: tl.constexpr):
    """y = alpha a b^T + beta c, plus `diagonal` on the diagonal. a, b (many, n, K), or (many, K, n) if TRANSPOSED. Rows
    2 p and 2 p + 1 of tiles begin with tile p (p + 1) of a matrix. Persistent, as tuned_grouped_kernel is."""
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
            if TRANSPOSED:
                x = A.load([matrix, k, row * BM]).reshape(BK, BM).T
                tile = dot(x, B.load([matrix, k, 2 * column * BM]).reshape(BK, 2 * BM), tile)
            else:
                x = A.load([matrix, row * BM, k]).reshape(BM, BK)
                tile = dot(x, B.load([matrix, 2 * column * BM, k]).reshape(2 * BM, BK).T, tile)
        i = row * BM + tl.arange(0, BM)
        j = 2 * column * BM + tl.arange(0, 2 * BM)
        tile = tile * alpha + tl.where(i[:, None] == j[None], diagonal, 0.0)
        left, right = tile.reshape(BM, 2, BM).permute(0, 2, 1).split()
        _store_both(Y, C, matrix, row, 2 * column, n, left, beta)
        _store_both(Y, C, matrix, row, 2 * column + 1, n, right, beta)


def symmetric(a, b, c=None, alpha=1.0, beta=0.0, diagonal=0.0):
    """alpha a b^T + beta c + diagonal I of `many` matrices, where this is symmetric: a, b (many, n, k), c (many, n, n).

    16-bit matrices that `tma_takes`; of each, rows or columns are contiguous.
    """
    many, n, k = a.shape
    transposed = a.stride(2) != 1
    BM = 128 if n >= 128 else 32
    BK = 64 if n >= 128 else 32
    a_block, b_block = ([1, BK, BM], [1, BK, 2 * BM]) if transposed else ([1, BM, BK], [1, 2 * BM, BK])
    y = a.new_empty(many, n, n)
    tiles = sum(row // 2 + 1 for row in range(triton.cdiv(n, BM)))
    describe = TensorDescriptor.from_tensor
    _symmetric[(min(programs_beside_transfers(a.device), many * tiles),)](
        describe(a.mT if transposed else a, a_block), describe(b.mT if transposed else b, b_block),
        None if c is None else describe(c, [1, BM, BM]), describe(y, [1, BM, BM]),
        tiles, many, n, k, alpha, beta, diagonal, transposed, BM, BK, num_warps=8, num_stages=3)
    return y


# --------------------------------------------------------------------------------------------------- on the Gram matrix
#
# Each of Newton-Schulz's steps multiplies x by a polynomial q of g = x x^T, and the next g is q g q. So where x is much
# wider than g, steps can be taken on g alone: x is multiplied once, by the product of their polynomials. But in bf16
# g loses singular values of x below 0.06, and rounding errors grow. So after two steps x is multiplied, and a new g
# computed. Against float64 this is half to 1.5 times as far off as five steps on x. (With a new g after three, up to
# 0.14 of the norm, where steps on x are 0.01 off. With one g for all five, singular values of 300 and far above.) All
# polynomials of g commute, so all these products are symmetric.

LEAST_ROWS = 1024  # below, cuBLAS's whole product takes as long as our half, and its launch costs the CPU less


def fast_orthogonal(x):
    """further.muon.orthogonal. A 1600 x 6400 matrix takes 47 a^3 FLOPs, a = 1600, in place of 90."""
    n, high, wide = x.shape
    a = min(high, wide)
    if not (kernels.on_triton(x) and a >= LEAST_ROWS and a % 8 == 0 and x.is_contiguous() and tma_takes(x)):
        return orthogonal(x)
    tall = high > wide
    x = unit(x)
    first, third, fifth = COEFFICIENTS
    for steps in (2, 2, 1) if max(high, wide) >= 2 * a else (1,) * 5:
        rows = x.mT if tall else x
        g = symmetric(rows, rows)
        product = None
        for step in range(steps):
            q = symmetric(g, g, g, fifth, third, first)
            product = q if product is None else symmetric(product, q)
            if step + 1 < steps:
                g = symmetric(symmetric(g, q), q)
        x = x @ product if tall else product @ x
    return x


# -------------------------------------------------------------------------------------------------- passes over memory
#
# Per element, updates reads g and m in float32 and writes m and 16 bits of u, move reads w and 16 bits and writes w: 24
# bytes. PyTorch's operations would move 56.

@triton.jit
def _update(g, m, u, n, share, BLOCK: tl.constexpr):
    at = this_program() * BLOCK + tl.arange(0, BLOCK)
    new = load_float32(g + at, at < n)
    moment = tl.load(m + at, at < n)
    moment += share * (new - moment)
    tl.store(m + at, moment, at < n)
    tl.store(u + at, moment + share * (new - moment), at < n)


@triton.jit
def _move(w, direction, n, keep, rate, BLOCK: tl.constexpr):
    at = this_program() * BLOCK + tl.arange(0, BLOCK)
    tl.store(w + at, keep * tl.load(w + at, at < n) - rate * load_float32(direction + at, at < n), at < n)


def _able(tensors):
    return all(t.dtype == torch.float32 and t.is_contiguous() and kernels.on_triton(t) for t in tensors)


def fast_updates(g, m):
    """further.muon.updates."""
    if not _able((*g, *m)):
        return updates(g, m)
    u = m[0].new_empty(sum(map(len, m)), dtype=torch.bfloat16)
    for new, moment, part in zip(g, m, u.split([*map(len, m)])):
        _update[(triton.cdiv(len(moment), 1024),)](new, moment, part, len(moment), SHARE, 1024, num_warps=4)
    torch.autograd.graph.increment_version(m)
    return u


def fast_move(w, found, keep, rate):
    """further.muon.move."""
    if not _able(w):
        return move(w, found, keep, rate)
    for numbers, direction in zip(w, found):
        _move[(triton.cdiv(len(numbers), 1024),)](numbers, direction.contiguous(), len(numbers), keep, rate, 1024,
                                                  num_warps=4)
    torch.autograd.graph.increment_version(w)
