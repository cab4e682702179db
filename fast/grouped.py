"""One launch for the products of all experts.

Takes the place of further/experts.py's grouped_linear, whose loop makes the CPU wait for counts. 16 experts on an H200,
forward: 683 TFLOP/s, a loop of products 607.
"""

import weakref

import torch
from torch.autograd.function import once_differentiable

import collectives as dist
import kernels
from fast.linear import column_sums
from kernels import _tile, dot, load_float32, programs_at_once, TensorDescriptor, tl, triton


# ----------------------------------------------------------------------------------------------------- grouped product
#
# A product for each group would make the CPU wait for counts, and small groups would leave multiprocessors idle. Here
# one launch serves all groups: each program reads counts and finds its own group and rows. The price is a few programs
# without work. Each group is cut into tiles of BM rows separately, so no tile has rows of two groups. With counts
# 5, 0, 3 and BM = 4:
#
#     row        0  1  2  3 | 4           | 5  6  7    |
#     row tile   0: 4 rows  | 1: 1 row    | 2: 3 rows  | 3, 4: surplus, exit
#
# E groups of R rows in all have at most ceil(R / BM) + E row tiles, whatever counts holds, so this many are launched.
# Tile t belongs to the first group e with t < ceil(count_0 / BM) + ... + ceil(count_e / BM). dx is the same product
# with W's strides swapped. For dW, a program owns a tile of one dW_e and sums over e's rows alone, so a NaN in another
# group's rows cannot reach it. y, dx and dW take 2 R in out FLOPs each, as with a single matrix. All this is for 16-bit
# numbers on Hopper; elsewhere the reference's loop does it.

@triton.jit
def _list_row_tiles(counts, table, E, E_PAD: tl.constexpr, BM: tl.constexpr):
    """table (row tiles, 3): the group of each, E or more of a surplus one, its first row, and the row after the group's
    last. So the product's programs need not find them for every tile again."""
    tile = tl.program_id(0)
    group = tl.arange(0, E_PAD)
    count = tl.load(counts + group, group < E, 0)
    tiles = (count + BM - 1) // BM
    e = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)  # how many groups end before this tile
    start = tl.sum(tl.where(group < e, count, 0), 0)
    table += 3 * tile
    tl.store(table, e)
    tl.store(table + 1, start + (tile - tl.sum(tl.where(group < e, tiles, 0), 0)) * BM)
    tl.store(table + 2, start + tl.sum(tl.where(group == e, count, 0), 0))


# TMA moves whole tiles, so that programs compute no addresses and need no masks. But TMA stops only at the edges of a
# tensor, and a group's end is not one. So a tensor of R rows of `width` gets a descriptor with two more dimensions,
# which make the group's end an edge: sizes (2^31 - 2^16, 2^31 - 2^16, 2^30, width), strides (2^34 - width, width,
# width, 1). The element (2^30, end, 2^30 - end + row, column) then lies at
#
#     2^30 (2^34 - width) + end width + (2^30 - end + row) width + column  =  2^64 + row width + column
#
# Addresses have 64 bits, so 2^64 drops out, and this is (row, column). The third index reaches its size 2^30 at
# row = end: from there on, TMA loads zeros and stores nothing. One descriptor, made on the CPU, serves all groups.
#
# TFLOP/s on an H200 in bf16, from 1536 to 6144 columns, R = 16384 rows: 4 groups of 4096 | groups of 8192, 0, 5000 and
# 3192 | 16 groups with sizes by Zipf's law. cuBLAS: a loop, counts on the CPU. _grouped_mm: PyTorch's own function.
#
#                ours               cuBLAS             _grouped_mm
#     forward    685 | 644 | 627    695 | 649 | 579    673 | 620 | 585
#     dx         715 | 720 | 619    728 | 706 | 578    698 | 700 | 610
#
# dW of 16 groups, of 1024 rows each | by Zipf's law: 595 | 538, cuBLAS 580 | 559, _grouped_mm 594 | 548. With one tile
# a program 568 | 544.
#
# Forward was slower with one tile a program (620 | 598 | 546), with y stored through pointers (483), with tiles of
# 128 x 128 (537), and with BK = 128 in 2 stages (510). Warp specialization, some warps only loading, gains nothing
# forward, and Triton 3.6 miscompiles dW with it.

@triton.jit
def _load_group(D, row, end, column, M: tl.constexpr, N: tl.constexpr):
    return D.load([1 << 30, end, (1 << 30) - end + row, column]).reshape(M, N)


@triton.jit
def _store_group(D, row, end, column, tile, M: tl.constexpr, N: tl.constexpr):
    D.store([1 << 30, end, (1 << 30) - end + row, column], tile.to(D.dtype).reshape(1, 1, M, N))


@triton.jit
def tuned_grouped_kernel(X, W, Y, bias, counts, table, E, N, K, TRANSPOSED: tl.constexpr, E_PAD: tl.constexpr,
                         BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """Persistent: one program a multiprocessor, each computes several tiles. `flatten` makes one loop of those over
    tiles and over K, so that a tile's first loads run while the tile before is stored.

    W (E, N, K), or (E, K, N) if TRANSPOSED. y is stored in two halves, which needs half the shared memory.
    """
    group = tl.arange(0, E_PAD)
    tall = tl.sum((tl.load(counts + group, group < E, 0) + BM - 1) // BM, 0).to(tl.int32)
    wide = tl.cdiv(N, BN)
    for program in tl.range(tl.program_id(0), tall * wide, tl.num_programs(0), flatten=True):
        row, column = _tile(program, tall, wide, GROUP)
        e = tl.load(table + 3 * row)
        first = tl.load(table + 3 * row + 1)
        end = tl.load(table + 3 * row + 2)
        n = column * BN
        tile = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            if TRANSPOSED:
                tile = dot(X.load([first, k]), W.load([e, k, n]).reshape(BK, BN), tile)
            else:
                tile = dot(X.load([first, k]), W.load([e, n, k]).reshape(BN, BK).T, tile)
        if bias is not None:
            columns = n + tl.arange(0, BN)
            tile += load_float32(bias + e.to(tl.int64) * N + columns, columns < N)[None]
        left, right = tile.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        _store_group(Y, first, end, n, left, BM, BN // 2)
        _store_group(Y, first, end, n + BN // 2, right, BM, BN // 2)


@triton.jit
def tuned_grouped_gradient_kernel(DY, X, DW, counts, ends, E, N, K,
                                  BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """Persistent, too: (BN, BK) tiles of all dW_e, stored in two halves."""
    tiles = tl.cdiv(N, BN) * tl.cdiv(K, BK)
    for program in range(tl.program_id(0), E * tiles, tl.num_programs(0)):
        e = program // tiles
        end = tl.load(ends + e).to(tl.int32)
        first = end - tl.load(counts + e).to(tl.int32)
        row, column = _tile(program % tiles, tl.cdiv(N, BN), tl.cdiv(K, BK), GROUP)
        n = row * BN
        k = column * BK
        tile = tl.zeros((BN, BK), tl.float32)
        for at in range(first, end, BM):
            tile = dot(_load_group(DY, at, end, n, BM, BN).T, _load_group(X, at, end, k, BM, BK), tile)
        left, right = tile.reshape(BN, 2, BK // 2).permute(0, 2, 1).split()
        DW.store([e, n, k], left.to(DW.dtype).reshape(1, BN, BK // 2))
        DW.store([e, n, k + BK // 2], right.to(DW.dtype).reshape(1, BN, BK // 2))


def grouped_descriptor(x, rows, columns):
    width = x.shape[1]
    return TensorDescriptor(x, [2**31 - 2**16] * 2 + [2**30, width], [2**34 - width, width, width, 1],
                            [1, 1, rows, columns])


def tma_takes(*tensors):
    """Whether TMA can address these 16-bit tensors (rows at multiples of 16 bytes), on Hopper, which the tiles fit."""
    return all(t.numel() and t.dtype.itemsize == 2 and t.shape[-1] % 8 == 0 and t.data_ptr() % 16 == 0
               and (kernels.INTERPRETED or kernels._generation(t.device) == 9) for t in tensors)


GROUP = 8   # rows of tiles that programs share, as in kernels.matmul
UNDER_WAY = weakref.WeakSet()  # transfers that nobody has waited for yet; each lives as long as its handle


def programs_beside_transfers(device):
    """How many programs a product may have. Two multiprocessors stay free, while transfers are under way, for the
    one-program kernels that signal other GPUs: else these would wait until the product ends."""
    return programs_at_once(device) - 2 * bool(UNDER_WAY)


def under_way(handle):
    """The handle of a transfer beside which products leave room, until its wait()."""
    transfer = dist.Handle()  # not what is returned: in a cycle, what a recorded one keeps would stay

    def wait():
        UNDER_WAY.discard(transfer)
        handle.wait()

    UNDER_WAY.add(transfer)
    return dist.Handle(wait, handle.is_completed)


def tuned_grouped(x, weight, bias, counts):
    """y (R, out). weight (E, out, in), or a transposed view of a contiguous (E, in, out)."""
    x = x.contiguous()
    E, N, K = weight.shape
    transposed = weight.stride(2) != 1
    stored = (weight.mT if transposed else weight).contiguous()
    y = x.new_empty(len(x), N)
    BM = 128
    BN = 256
    BK = 64
    tall = triton.cdiv(len(x), BM) + E
    padded = triton.next_power_of_2(E)
    table = x.new_empty(tall, 3, dtype=torch.int32)
    _list_row_tiles[(tall,)](counts, table, E, padded, BM, num_warps=1)
    tuned_grouped_kernel[(min(programs_beside_transfers(x.device), tall * triton.cdiv(N, BN)),)](
        TensorDescriptor(x, list(x.shape), [K, 1], [BM, BK]),
        TensorDescriptor.from_tensor(stored, [1, BK, BN] if transposed else [1, BN, BK]),
        grouped_descriptor(y, BM, BN // 2), None if bias is None else bias.contiguous(), counts, table, E, N, K,
        transposed, padded, BM, BN, BK, GROUP, num_warps=8, num_stages=3)
    return y


def tuned_grouped_gradients(dy, x, counts, biased):
    x = x.contiguous()
    E = len(counts)
    N = dy.shape[1]
    K = x.shape[1]
    BM = 64
    BN = 128
    BK = 256
    dw = x.new_empty(E, N, K)
    programs = min(programs_beside_transfers(x.device), E * triton.cdiv(N, BN) * triton.cdiv(K, BK))
    tuned_grouped_gradient_kernel[(programs,)](
        grouped_descriptor(dy, BM, BN), grouped_descriptor(x, BM, BK),
        TensorDescriptor.from_tensor(dw, [1, BN, BK // 2]), counts, counts.cumsum(0), E, N, K, BM, BN, BK,
        GROUP, num_warps=8, num_stages=3)
    return dw, column_sums(dy, counts) if biased else None


def check_grouped(x, weight, bias, counts):
    if (x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or counts.shape != weight.shape[:1]
            or bias is not None and bias.shape != weight.shape[:2] or x.dtype != weight.dtype
            or counts.dtype != torch.int64 or not x.device == weight.device == counts.device):
        raise ValueError(f"grouped product of x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias "
                         f"{None if bias is None else tuple(bias.shape)} and counts {tuple(counts.shape)}, x "
                         f"{x.dtype} on {x.device}, weight {weight.dtype} on {weight.device}, counts {counts.dtype} on "
                         f"{counts.device}: needs (R, in), (E, out, in), (E, out) or None, (E), all on one device, x "
                         f"and weight of one dtype, counts int64")


class GroupedLinear(torch.autograd.Function):
    """Keeps x, W and counts."""

    @staticmethod
    def forward(ctx, x, weight, bias, counts):
        ctx.save_for_backward(x, weight, counts)
        return tuned_grouped(x, weight, bias, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, counts = ctx.saved_tensors
        dy = dy.contiguous()
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        dx = tuned_grouped(dy, weight.mT, None, counts) if needs_dx else None
        dw, db = tuned_grouped_gradients(dy, x, counts, needs_db) if needs_dw or needs_db else (None, None)
        return dx, dw, db, None
