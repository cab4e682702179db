"""Muon's symmetric products at half the work.

Takes the place of further/muon.py's symmetric. Of a Newton-Schulz step's three products two are symmetric, of which
cuBLAS computes both halves. Without these kernels the optimizer's step takes 1.08 (GPT-2) and 1.11 times as long (XL)
on an H100.
"""

import kernels
from further.muon import symmetric
from kernels import exact, tl, triton


@triton.jit
def _symmetric(a, c, out, n, k, a_matrix, a_row, a_column, alpha, beta, BLOCK: tl.constexpr, BK: tl.constexpr):
    """One tile on the diagonal of alpha a a^T + beta c or below it, of one matrix; its mirror image is stored, too.

    Program 0 has tile (0, 0), 1 and 2 have (1, 0) and (1, 1), and so on: row r begins with program r (r + 1) / 2.
    """
    program = tl.program_id(0)
    row = ((tl.sqrt(8.0 * program + 1) - 1) / 2).to(tl.int32)
    row += (row + 1) * (row + 2) // 2 <= program  # where the root was rounded
    row -= row * (row + 1) // 2 > program
    column = program - row * (row + 1) // 2
    rows = row * BLOCK + tl.arange(0, BLOCK)
    columns = column * BLOCK + tl.arange(0, BLOCK)
    ks = tl.arange(0, BK)
    matrix = tl.program_id(1).to(tl.int64)
    # Beyond the edge, rows wrap around: in bounds without a mask (k alone needs one), and never stored.
    left = a + matrix * a_matrix + (rows % n)[:, None].to(tl.int64) * a_row + ks[None] * a_column         # (BLOCK, BK)
    right = a + matrix * a_matrix + (columns % n)[None].to(tl.int64) * a_row + ks[:, None] * a_column     # (BK, BLOCK)
    tile = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, k, BK):
        x = tl.load(left, ks[None] < k - start, 0)
        y = tl.load(right, ks[:, None] < k - start, 0)
        tile = tl.dot(exact(x), exact(y), tile, input_precision="tf32x3")
        left += BK * a_column
        right += BK * a_column
    mask = (rows[:, None] < n) & (columns[None] < n)
    at = matrix * n * n + rows[:, None] * n + columns[None]
    if row == column:  # in three parts, as tf32x3 multiplies, x y and y x round differently
        tile = (tile + tl.trans(tile)) / 2
    tile *= alpha
    if c is not None:
        tile += beta * tl.load(c + at, mask, 0).to(tl.float32)
    tl.store(out + at, tile, mask)
    if row != column:
        mirror = matrix * n * n + columns[:, None] * n + rows[None]
        tl.store(out + mirror, tl.trans(tile), (columns[:, None] < n) & (rows[None] < n))


def half_symmetric(a, c=None, alpha=1.0, beta=0.0):
    """further.muon.symmetric, of whose result one half is computed."""
    if not kernels.on_triton(a):
        return symmetric(a, c, alpha, beta)
    many, n, k = a.shape
    block, bk = (128, 64) if n >= 128 else (32, 32)
    tall = triton.cdiv(n, block)
    out = a.new_empty(many, n, n)
    _symmetric[tall * (tall + 1) // 2, many](
        a, None if c is None else c.contiguous(), out, n, k, *a.stride(), alpha, beta, block, bk, num_warps=8,
        num_stages=3)
    return out
