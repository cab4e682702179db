"""A product of matrices in tiles: what a program keeps in registers, and what programs share in L2.

C = activation(A B), A (M, K), B (K, N). 2 M N K FLOPs. Element by element, A would be read N times and B M times. A
program keeps a BM x BN tile of C in registers and walks once over K: A is then read N / BN times, B M / BM times.
The activation runs on the tile while it is in registers, which saves writing C and reading it again.

Programs that run at a time, in the order of their numbers, share what they read in L2. Which program has which tile
of C, of 4 rows and 3 columns:

    row by row      0   1   2        in groups of 2 rows     0   2   4        programs 0 to 3 read 2 rows of A's tiles
                    3   4   5                                1   3   5        either way, but here 2 columns of B's,
                    6   7   8                                6   8  10        there all 3
                    9  10  11                                7   9  11

On an H100 132 programs run at a time. Row by row of C they need a few rows of A's tiles and all of B. In groups of
GROUP rows, walked column by column, they need GROUP rows of A's tiles and 132 / GROUP columns of B's: `tiles_read` in
lessons/kernels.py counts them.

This is the page to learn tiling from. The model multiplies with cuBLAS, which is faster (H200, bf16,
32768 x 768 x 3072 with GELU: 386 us in tiles of 256 x 128, 340 us for cuBLAS and then the GELU kernel).
"""

from kernels import DTYPES, exact, tl, triton


def tile_of(program, tall, wide, group):
    """(row, column) of the tile that a program computes. C has `tall` rows and `wide` columns of tiles. With tall 4,
    wide 3, group 2 programs 0 to 5 compute (0, 0) (1, 0) (0, 1) (1, 1) (0, 2) (1, 2), program 6 (2, 0)."""
    first = program // (group * wide) * group  # the first row of tiles of this program's group
    height = min(tall - first, group)  # the last group may be lower
    within = program % (group * wide)
    return first + within % height, within // height


_tile = triton.jit(tile_of)  # tile_of itself is for `tiles_read`


@triton.jit
def _matmul(a_ptr, b_ptr, c_ptr, M, N, K, a_row, a_column, b_row, b_column,
            FUNCTION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    row, column = _tile(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    # Beyond the edge, rows and columns wrap around: in bounds without a mask (K alone needs one), and never stored.
    a_ptr += (rows % M)[:, None].to(tl.int64) * a_row + ks[None] * a_column                     # (BM, BK)
    b_ptr += ks[:, None] * b_row + (columns % N)[None].to(tl.int64) * b_column                  # (BK, BN)
    tile = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        a = tl.load(a_ptr, ks[None] < K - start, 0)
        b = tl.load(b_ptr, ks[:, None] < K - start, 0)
        tile = tl.dot(exact(a), exact(b), tile, input_precision="tf32x3")  # of float32 three TF32 products
        a_ptr += BK * a_column
        b_ptr += BK * b_row
    if FUNCTION is not None:
        tile = FUNCTION(tile)
    mask = (rows[:, None] < M) & (columns[None] < N)
    tl.store(c_ptr + rows[:, None].to(tl.int64) * N + columns[None], tile, mask)


def matmul(a, b, function=None, tiles=(64, 64, 32, 8)):
    """a @ b, or function(a @ b), (M, N), for a (M, K), b (K, N) of any strides, in one of DTYPES. Else ValueError.

    function: _gelu, _elu. tiles: (BM, BN, BK, GROUP); 64 x 64 of C in float32 are 16 KiB of registers."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype or a.dtype not in DTYPES:
        raise ValueError(f"product of {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}: needs (M, K) and "
                         f"(K, N) of one dtype, bfloat16, float16 or float32")
    M, K = a.shape
    N = b.shape[1]
    BM, BN, BK, GROUP = tiles
    c = a.new_empty(M, N)
    _matmul[(triton.cdiv(M, BM) * triton.cdiv(N, BN),)](
        a, b, c, M, N, K, *a.stride(), *b.stride(), function, BM, BN, BK, GROUP, num_warps=8, num_stages=3)
    return c
