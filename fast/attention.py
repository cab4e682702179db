"""Flash attention tuned for Hopper: TMA, warps with one task each, packed q, k and v.

Takes the place of kernels.py's flash attention, forward and backward. On an H200, head dim 128, T = 16,384, forward
reaches 726 TFLOP/s (cuDNN 636), backward 509 (594). Specialised warps are 1.4 % of a step of GPT-2 124M.
"""

import functools
import heapq
import math

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

import kernels
from fast import grouped
from kernels import (
    attention_backward, attention_backward_reference, attention_forward, attention_reference, dot, DTYPES,
    finite_or_inf, flash_takes, heads, HEAD_DIMS, last_key, load_rows, programs_at_once, store_rows, TensorDescriptor,
    tiled, tl, triton)


try:  # Gluon is a part of Triton whose names still change. Without it kernels.py serves Hopper GPUs, too.
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    tma_load, tma_store = (getattr(tma, name, None) or getattr(tma, old) for name, old in (
        ("async_load", "async_copy_global_to_shared"), ("async_store", "async_copy_shared_to_global")))  # old: 3.6
    HAVE_GLUON = True
except (ImportError, AttributeError):  # its kernels stay unused, and decorating them does nothing that matters
    gluon = triton
    gl = tl
    HAVE_GLUON = False


# ---------------------------------------------------------------------------------------------------------- attention
#
# The kernels of kernels.py spend time on exponentials in base e, and on masks where nothing is masked. Here `scale` has
# a factor log2(e), because the hardware's exponential is 2^x; so LSE is in base 2. In backward, static_range compiles
# each loop over blocks twice: without a mask for blocks that all rows see whole, with one for blocks on the diagonal or
# at an edge.
#
# Forward, for Hopper GPUs, is in Gluon: Triton whose author chooses layouts (which thread holds which element), shared
# memory and barriers. A tile is BM rows of one head, and a program computes a list of tiles. One warp only loads Q, K
# and V. Two groups of four warps compute 64 of a tile's rows each. A group starts Q K^T of block n and P V of block
# n - 1 together, waits for the first alone, and computes the softmax of block n while P V runs; so acc is a block
# behind m and l. The groups start their products in turn, so that one's softmax runs during the other's products, too.
# (Shah et al. 2024, FlashAttention-3.) Elsewhere the reference's forward does.
#
# n counts blocks of keys over all tiles of the program. Block n of K is in slot 2 (n % STAGES) of shared memory, that
# of V in the slot after it. Each group has two slots for Q, so that the next tile's is loaded while this one's is in
# use. Keys come from the last block to the first: under a causal mask only the last one needs a mask, and each row sees
# a key in it, so m is finite from the start.
#
# A barrier counts arrivals. Its phase ends when as many came as `init` says, and all bytes that `expect` names. wait(b,
# p) returns when the phase of parity p has ended; on a new barrier parity 1 counts as ended. Who waits for whom:
#     q_full, full    groups for the warp that loads    q_free    it for the slot's group    free    it for both groups
#     turn[g]         group g for the other one, which has then started its products, not finished them
#
# A warm H200, causal, T = 1024, 4096, 16384, in TFLOP/s, measured alternately with cuDNN:
#     D = 128    here 487, 635, 664    cuDNN 448, 511, 535    (without `turn` 1 to 6 % less)
#     D =  64    here 344, 421, 442    cuDNN 340, 408, 434    (without `turn` 2 to 3 % less)

TILE = 128  # rows of queries, and keys of a block. They are as many, so that one block has a tile's diagonal.
BM = BN = gl.constexpr(TILE)
STAGES = {64: 3, 128: 2}  # head dim: blocks of keys, and of values, in shared memory
# At head dim 128 shared memory has 64 KiB of Q, 128 of K and V, 32 of O, of 227.


@gluon.jit
def _tile_at(tiles, i, blocks):
    """(head, block of rows) of tile i. tiles: this program's row of `specialized_tiles`."""
    tile = gl.load(tiles + 1 + i)
    return tile // blocks, tile % blocks


@gluon.jit
def _key_blocks(block, Tq, Tk, CAUSAL: gl.constexpr):
    """How many blocks of keys a block of rows sees."""
    return gl.minimum((block + 1) * BM + Tk - Tq, Tk) // BN if CAUSAL else Tk // BN


@gluon.jit
def _load_tiles(Q, K, V, tiles, q_slots, q_full, q_free, slots, full, free, Tq, Tk, H, G, blocks, CAUSAL: gl.constexpr,
                STAGES: gl.constexpr):
    n = 2 * STAGES  # as in `_attend`
    for i in range(gl.load(tiles)):
        bh, block = _tile_at(tiles, i, blocks)
        b = bh // H
        h = bh % H
        key_blocks = _key_blocks(block, Tq, Tk, CAUSAL)
        for group in gl.static_range(2):
            slot = i % 2 * 2 + group
            mbarrier.wait(q_free.index(slot), 1 - i // 2 % 2)
            mbarrier.expect(q_full.index(slot), Q.block_type.nbytes)
            tma_load(Q, [b, h, block * BM + group * (BM // 2), 0], q_full.index(slot), q_slots.index(slot))
        for j in range(key_blocks):
            for values in gl.static_range(2):
                slot = n % STAGES * 2 + values
                mbarrier.wait(free.index(slot), 1 - n // STAGES % 2)
                mbarrier.expect(full.index(slot), K.block_type.nbytes)
                at = [b, h // G, (key_blocks - 1 - j) * BN, 0]
                tma_load(V if values else K, at, full.index(slot), slots.index(slot))
            n += 1


@gluon.jit
def _start_products(q, p, acc, n, ahead, behind, slots, full, free, turn, GROUP: gl.constexpr, D: gl.constexpr,
                    STAGES: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Start Q K^T of block n and acc + P V of block n - 1, and wait for the first one. ahead, behind: whether block n,
    and block n - 1, exist. If one does not, its barriers are left out, and its product means nothing."""
    k = n % STAGES * 2
    v = (n - 1) % STAGES * 2 + 1
    mbarrier.wait(full.index(k), n // STAGES % 2, pred=ahead)
    mbarrier.wait(turn.index(GROUP), n % 2, pred=ahead)
    s = gl.zeros([BM // 2, BN], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, slots.index(k).reshape([BN, D]).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(full.index(v), (n - 1) // STAGES % 2, pred=behind)
    acc = warpgroup_mma(p, slots.index(v).reshape([BN, D]), acc, is_async=True)
    mbarrier.arrive(turn.index(1 - GROUP), pred=ahead)
    s = warpgroup_mma_wait(1, (s,))
    mbarrier.arrive(free.index(k), pred=ahead)
    return s, acc


@gluon.jit
def _attend(GROUP: gl.constexpr, O, LSE, tiles, q_slots, o_slots, q_full, q_free, slots, full, free, turn, scale, Tq,
            Tk, H, blocks, CAUSAL: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """One group's rows of all tiles of this program. Round i starts the first Q K^T of tile i beside the last P V of
    tile i - 1, stores that tile, and computes the rest of tile i. One more round stores the last tile."""
    ROWS: gl.constexpr = BM // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    rows = gl.arange(0, ROWS, ROW_LAYOUT)
    columns = gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT))
    count = gl.load(tiles)
    n = 2 * STAGES  # so phases begin with parity 0, and a block n - 1 has a slot
    m = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
    l = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
    p = gl.zeros([ROWS, BN], q_slots.dtype, P_LAYOUT)
    acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    for i in range(count + 1):
        bh, block = _tile_at(tiles, i, blocks)
        key_blocks = gl.where(i < count, _key_blocks(block, Tq, Tk, CAUSAL), 1)
        q_slot = i % 2 * 2 + GROUP
        q = q_slots.index(q_slot).reshape([ROWS, D])
        mbarrier.wait(q_full.index(q_slot), i // 2 % 2, pred=i < count)
        s, acc = _start_products(q, p, acc, n, i < count, i > 0, slots, full, free, turn, GROUP, D, STAGES, S_LAYOUT)
        if CAUSAL:
            last_seen = rows + (block * BM + GROUP * ROWS + Tk - Tq)
            s = gl.where((columns + (key_blocks - 1) * BN)[None, :] <= last_seen[:, None], s, -float("inf"))
        top = gl.max(s, 1) * scale
        e = gl.exp2(s * scale - top[:, None])
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(free.index((n - 1) % STAGES * 2 + 1), pred=i > 0)
        if i > 0:  # m and l are still tile i - 1's; top and e are tile i's
            bh, block = _tile_at(tiles, i - 1, blocks)
            m0 = block * BM + GROUP * ROWS
            o = acc * gl.convert_layout(1 / l, gl.SliceLayout(1, O_LAYOUT))[:, None]
            tma.store_wait(0)  # TMA has read what lay in the slot
            o_slots.index(GROUP).reshape([ROWS, D]).store(o.to(O.dtype))
            fence_async_shared()  # TMA sees what was written
            tma_store(O, [bh // H, bh % H, m0, 0], o_slots.index(GROUP))
            gl.store(LSE + (bh.to(gl.int64) * Tq + m0) + rows, m + gl.log2(l))
        m = top
        l = gl.sum(e, 1)
        p = gl.convert_layout(e.to(q_slots.dtype), P_LAYOUT)
        acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        n += 1
        for _ in range(1, key_blocks):
            s, acc = _start_products(q, p, acc, n, True, True, slots, full, free, turn, GROUP, D, STAGES, S_LAYOUT)
            top = gl.maximum(m, gl.max(s, 1) * scale)
            e = gl.exp2(s * scale - top[:, None])
            alpha = gl.exp2(m - top)
            l = l * alpha + gl.sum(e, 1)
            m = top
            acc = warpgroup_mma_wait(0, (acc,))
            mbarrier.arrive(free.index((n - 1) % STAGES * 2 + 1))
            p = gl.convert_layout(e.to(q_slots.dtype), P_LAYOUT)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]  # blocks up to n - 1, to m
            n += 1
        mbarrier.arrive(q_free.index(q_slot), pred=i < count)
    tma.store_wait(0)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), ARRIVALS)
    return barriers


@gluon.jit
def specialized_forward_kernel(Q, K, V, O, LSE, tiles, stride, scale, Tq, Tk, H, G, blocks, CAUSAL: gl.constexpr,
                               D: gl.constexpr, STAGES: gl.constexpr):
    """O and LSE (base 2) of all tiles of BM rows, as `tiles` hands them out. Tq, Tk: multiples of BM, BN."""
    tiles += gl.program_id(0) * stride
    q_slots = gl.allocate_shared_memory(Q.dtype, [4, 1, 1, BM // 2, D], Q.layout)
    slots = gl.allocate_shared_memory(K.dtype, [2 * STAGES, 1, 1, BN, D], K.layout)
    o_slots = gl.allocate_shared_memory(O.dtype, [2, 1, 1, BM // 2, D], O.layout)
    q_full = _barriers(4, 1)
    q_free = _barriers(4, 1)
    full = _barriers(2 * STAGES, 1)
    free = _barriers(2 * STAGES, 2)  # free: an arrival from each group
    turn = _barriers(2, 1)
    fence_async_shared()
    mbarrier.arrive(turn.index(0))  # group 0 has the first turn
    gl.warp_specialize([
        (_attend, (0, O, LSE, tiles, q_slots, o_slots, q_full, q_free, slots, full, free, turn, scale, Tq, Tk, H,
                   blocks, CAUSAL, D, STAGES)),
        (_attend, (1, O, LSE, tiles, q_slots, o_slots, q_full, q_free, slots, full, free, turn, scale, Tq, Tk, H,
                   blocks, CAUSAL, D, STAGES)),
        (_load_tiles, (Q, K, V, tiles, q_slots, q_full, q_free, slots, full, free, Tq, Tk, H, G, blocks, CAUSAL,
                       STAGES)),
    ], [4, 1], [240, 24])  # warps, and registers a thread, of the last two parts. The first has num_warps, and what is
    # left of 3 x 168 registers: a part has at least four warps' registers.


@functools.cache  # CUDA graphs keep the addresses. While one is recorded, no new schedule can be made.
def specialized_tiles(Tq, Tk, is_causal, heads, together, programs, device):
    """The tiles of each of `programs` programs: (programs, 1 + most tiles + 1), int32. A row begins with their number,
    and its last entry is 0, which is read in `_attend`'s last round. Row block i of head h is h * blocks + i.

    Heads are handed out `together` at a time, so that their keys and values stay in L2; of these the longest tiles
    first, each to the program that has least to do. A tile costs the blocks of keys that it sees, and one more for
    loading Q and storing O.
    """
    costs = [(min((i + 1) * TILE + Tk - Tq, Tk) if is_causal else Tk) // TILE + 1 for i in range(Tq // TILE)]
    loads = [(0, program) for program in range(programs)]
    rows = [[] for _ in range(programs)]
    for first in range(0, heads, together):
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            for head in range(first, min(heads, first + together)):
                load, program = loads[0]
                rows[program].append(head * len(costs) + i)
                heapq.heapreplace(loads, (load + costs[i], program))
    most = max(map(len, rows))
    rows = [[len(row)] + row + [0] * (most + 1 - len(row)) for row in rows]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def specialized_takes(q, k, is_causal):
    """Whether this is a Hopper GPU, with Gluon, 16-bit numbers, whole tiles, and a key that each row sees."""
    _, _, Tq, D = q.shape
    Tk = k.shape[2]
    able = HAVE_GLUON and not kernels.INTERPRETED and q.is_cuda and kernels._generation(q.device) == 9
    return (able and q.itemsize == 2 and D in STAGES and (Tk >= Tq or not is_causal) and min(Tq, Tk) > 0
            and Tq % TILE == Tk % TILE == 0)


def specialized_attention_forward(q, k, v, is_causal):
    """As tuned_attention_forward."""
    B, H, Tq, D = q.shape
    Tk = k.shape[2]
    o = q.new_empty(B, Tq, H, D).transpose(1, 2)
    lse = q.new_empty(B * H, Tq, dtype=torch.float32)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)

    def tiles_of(x, rows):
        like = tiled(x, rows)
        return GluonDescriptor(x, like.shape, like.strides, like.block_shape, layout)

    together = max(1, (32 << 20) // (2 * k[0, 0].nbytes))  # of L2's 50 MiB
    programs = min(programs_at_once(q.device) - grouped.SPARED, B * H * (Tq // TILE))
    tiles = specialized_tiles(Tq, Tk, is_causal, B * H, together, programs, q.device)
    specialized_forward_kernel[(programs,)](
        tiles_of(q, TILE // 2), tiles_of(k, TILE), tiles_of(v, TILE), tiles_of(o, TILE // 2), lse, tiles,
        tiles.shape[1], math.log2(math.e) / math.sqrt(D), Tq, Tk, H, H // k.shape[1], Tq // TILE,
        CAUSAL=is_causal, D=D, STAGES=STAGES[D], num_warps=4, maxnreg=168)
    return o, lse


@triton.jit
def tuned_backward_q_kernel(Q, K, V, O, DO, LSE, DELTA, DQ, T_pad, scale2, scale, Tq, Tk, H, G, CAUSAL: tl.constexpr,
                            D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """dQ of BM rows of one head, and their delta for the kernel below. 3 matmuls a block."""
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    rows = m0 + tl.arange(0, BM)
    last = last_key(rows, Tq, Tk, CAUSAL)
    full = tl.maximum(last_key(m0, Tq, Tk, CAUSAL) + 1, 0) // BN * BN            # all of these rows see keys [0, full),
    end = last_key(m0 + BM - 1, Tq, Tk, CAUSAL) + 1                              # none sees keys from `end` on
    q = load_rows(Q, b, h, m0)
    do = load_rows(DO, b, h, m0)
    o = load_rows(O, b, h, m0)
    lse = tl.load(LSE + bh.to(tl.int64) * T_pad + rows)                           # (BM,)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(DELTA + bh.to(tl.int64) * T_pad + rows, delta)
    dq = tl.zeros([BM, D], tl.float32)
    for MASK in tl.static_range(2):
        for n0 in range(full if MASK else 0, end if MASK else full, BN):
            k = load_rows(K, b, h // G, n0)
            v = load_rows(V, b, h // G, n0)
            s = dot(q, k.T)                                                    # (BM, BN)
            dp = dot(do, v.T)
            p = tl.exp2(s * scale2 - lse[:, None])
            if MASK:
                p = tl.where(n0 + tl.arange(0, BN)[None, :] <= last[:, None], p, 0.0)
            ds = p * (dp - delta[:, None])
            dq = dot(ds.to(k.dtype), k, dq)
    store_rows(DQ, b, h, m0, dq * scale)


@triton.jit
def tuned_backward_kv_kernel(Q, K, V, DO, LSE, DELTA, DK, DV, scale2, scale, Tq, Tk, H, G, CAUSAL: tl.constexpr,
                             D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """dK and dV of BN keys of one head, summed over its G heads of queries. 4 matmuls a block, of S^T and dP^T, as dV
    and dK need them."""
    b = tl.program_id(1) // (H // G)
    shared = tl.program_id(1) % (H // G)
    n0 = tl.program_id(0) * BN
    cols = n0 + tl.arange(0, BN)
    start = tl.maximum(n0 + Tq - Tk, 0) // BM * BM if CAUSAL else 0               # no row before this sees these keys
    full = tl.maximum(n0 + BN - 1 + Tq - Tk, 0) if CAUSAL else 0                  # each row from here on sees them all
    full = tl.minimum(tl.cdiv(full, BM) * BM, Tq) if n0 + BN <= Tk else Tq        # (no row, if some keys are past Tk)
    k = load_rows(K, b, shared, n0)
    v = load_rows(V, b, shared, n0)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    for h in range(shared * G, shared * G + G):
        for FREE in tl.static_range(2):
            for m0 in range(full if FREE else start, Tq if FREE else full, BM):
                q = load_rows(Q, b, h, m0)
                do = load_rows(DO, b, h, m0)
                lse = LSE.load([b * H + h, m0]).reshape(BM)                       # inf past the last row: P is 0 there
                delta = DELTA.load([b * H + h, m0]).reshape(BM)
                s = dot(k, q.T)                                                   # (BN, BM)
                p = tl.exp2(s * scale2 - lse[None, :])
                if not FREE:
                    last = last_key(m0 + tl.arange(0, BM), Tq, Tk, CAUSAL)
                    p = tl.where(cols[:, None] <= last[None, :], p, 0.0)
                dp = dot(v, do.T)
                dv = dot(p.to(do.dtype), do, dv)
                ds = p * (dp - delta[None, :])
                dk = dot(ds.to(q.dtype), q, dk)
    store_rows(DK, b, shared, n0, dk * scale)
    store_rows(DV, b, shared, n0, dv)


# (BM, BN, warps, stages) by head dim; head dims up to 64 share an entry. Beside each stand its TFLOP/s, causal / not
# causal, then those of other choices: on an H200, bf16, T = 4096, C = 2048, counting only matmuls that are computed,
# in short runs (a warm GPU reaches 10 to 15 % less).
# Two or three small programs on a multiprocessor often beat a large one: a program's softmax waits for S, and meanwhile
# another program can use the tensor cores.
ATTENTION_TILES = {
    "dq": {64: (128, 64, 8, 3),          # 579 / 655   (64, 64, 4, 3) 577 / 590   (128, 64, 8, 2) 473 / 506
           128: (128, 64, 8, 3),         # 563 / 641   (64, 64, 4, 2) 525 / 573   (128, 32, 8, 3) 450 / 627
           256: (64, 32, 4, 2)},
    "dkv": {64: (64, 64, 4, 3),          # 533 / 582   (64, 64, 4, 2) 496 / 484   (64, 128, 8, 2) 362 / 381
            128: (64, 64, 4, 2),         # 625 / 656   (32, 64, 4, 3) 554 / 567   (64, 128, 8, 2) 512 / 541
            256: (32, 64, 8, 2)},
}
# float32 runs on kernels.py's own kernels. There products are plain, without tensor cores, so tiles matter little; and
# LSE stays in base e, because its rounding once more, to base 2, is 5 % of a gradient's error. As three TF32 products
# each, at head dim 64 they took a sixth of the time, but gradients were 1.1 (D = 64) to 1.25 times (128) as far off as
# PyTorch's. So the model leaves float32 to PyTorch; rings, and who asks for Triton, come here.


def tiled_rows(x, rows):
    """As `tiled`, of x (B*H, T), for tiles (1, rows)."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0) if len(x) > 1 else 16, 1], [1, rows])


def backward_settings(name, q, k, is_causal):
    """(BM, BN, the last arguments, the options of a launch) of a kernel of ATTENTION_TILES."""
    _, H, Tq, D = q.shape
    scale = 1 / math.sqrt(D)
    BM, BN, warps, stages = ATTENTION_TILES[name][max(D, 64)]
    last = scale * math.log2(math.e), scale, Tq, k.shape[2], H, H // k.shape[1], is_causal, D, BM, BN
    return BM, BN, last, {"num_warps": warps, "num_stages": stages}


def tuned_attention_forward(q, k, v, is_causal):
    """O (B, H, Tq, D), laid out in memory as (B, Tq, H, D), and LSE (B*H, Tq rounded up to 128), float32, base 2; of
    float32 inputs LSE is as `attention_forward` returns it."""
    check_attention(q, k, v)
    if specialized_takes(q, k, is_causal):
        return specialized_attention_forward(q, k, v, is_causal)
    o, lse = attention_forward(q, k, v, is_causal)
    return o, lse if q.dtype == torch.float32 else padded(lse * math.log2(math.e))


def padded(lse):
    """lse (B*H, T) with +inf up to a multiple of 128 rows: what the tuned kernels read."""
    return F.pad(lse, (0, -lse.shape[1] % 128), value=math.inf)


def tuned_attention_backward(q, k, v, o, lse, do, is_causal, dq, dk, dv):
    """Write the gradients into dq, dk, dv, whose strides TMA must be able to address, as `aligned` says."""
    if q.dtype == torch.float32:
        return attention_backward(q, k, v, o, lse, do, is_causal, dq, dk, dv)
    do = aligned(do)
    delta = torch.empty_like(lse)
    tuned_backward_q(q, k, v, o, lse, delta, do, is_causal, dq)
    tuned_backward_kv(q, k, v, lse, delta, do, is_causal, dk, dv)


def tuned_backward_q(q, k, v, o, lse, delta, do, is_causal, dq):
    """Write dq, and delta, which `tuned_backward_kv` reads. delta has lse's strides."""
    BM, BN, last, options = backward_settings("dq", q, k, is_causal)
    tuned_backward_q_kernel[lse.shape[1] // BM, len(lse)](
        tiled(q, BM), tiled(k, BN), tiled(v, BN), tiled(o, BM), tiled(do, BM), lse, delta, tiled(dq, BM), lse.stride(0),
        *last, **options)


def tuned_backward_kv(q, k, v, lse, delta, do, is_causal, dk, dv):
    BM, BN, last, options = backward_settings("dkv", q, k, is_causal)
    tuned_backward_kv_kernel[triton.cdiv(k.shape[2], BN), len(k) * k.shape[1]](
        tiled(q, BM), tiled(k, BN), tiled(v, BN), tiled(do, BM), tiled_rows(lse, BM), tiled_rows(delta, BM),
        tiled(dk, BN), tiled(dv, BN), *last, **options)


def aligned(x):
    """x if TMA can address it, else a contiguous copy. TMA needs gapless rows that start at multiples of 16 bytes."""
    strides = [s * x.itemsize for n, s in zip(x.shape[:-1], x.stride()) if n > 1]
    ok = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s % 16 == 0 and s > 0 for s in strides)
    return x if ok else x.contiguous()


def check_attention(q, k, v):
    if (q.dim() != 4 or k.shape != v.shape or k.dim() != 4 or len(q) != len(k) or q.shape[3] != k.shape[3]
            or not q.numel() or not k.numel() or q.shape[1] % k.shape[1] or q.dtype not in DTYPES
            or not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device):
        raise ValueError(f"attention takes q (B, H, Tq, D), k and v (B, H/G, Tk, D), in bfloat16, float16 or float32, "
                         f"all on one device, none empty, not q {tuple(q.shape)} {q.dtype} on {q.device}, k "
                         f"{tuple(k.shape)} {k.dtype} on {k.device}, v {tuple(v.shape)} {v.dtype} on {v.device}")
    if q.shape[3] not in HEAD_DIMS:
        raise ValueError(f"head dim {q.shape[3]} (q {tuple(q.shape)}) is not 16, 32, 64, 128 or 256: a tile is 2^i "
                         f"wide")
    if q.shape[0] * q.shape[1] > 65535:
        raise ValueError(f"B * H is {q.shape[0] * q.shape[1]} (q {tuple(q.shape)}), a launch takes 65535: split the "
                         f"batch")


class PackedAttention(torch.autograd.Function):
    """FlashAttention of qkv, as kernels.heads takes it apart. The kernels write its gradient as one tensor, too."""

    @staticmethod
    def forward(ctx, qkv, is_causal):
        qkv = aligned(qkv)
        ctx.is_causal = is_causal
        o, lse = tuned_attention_forward(*heads(qkv), is_causal)
        ctx.save_for_backward(qkv, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        qkv, o, lse = ctx.saved_tensors
        grad = torch.empty_like(qkv)
        tuned_attention_backward(*heads(qkv), o, lse, do, ctx.is_causal, *heads(grad))
        return grad, None


# What ring attention calls in place of the two references. O has q's dtype here. The kernels' LSE is +inf where a row
# sees no key; that of the tuned ones is in base 2, and padded to a multiple of 128 rows. It is converted from and to L.

def attention_block(q, k, v, is_causal):
    if not flash_takes(q):
        return attention_reference(q, k, v, is_causal)
    o, lse = tuned_attention_forward(*map(aligned, (q, k, v)), is_causal)
    lse = lse[:, :q.shape[2]].reshape(q.shape[:3]) * (1 if q.dtype == torch.float32 else math.log(2))
    return o, lse.masked_fill(lse == math.inf, -math.inf)


def attention_block_backward(q, k, v, o, lse, do, is_causal):
    if not flash_takes(q):
        return attention_backward_reference(q, k, v, o, lse, do, is_causal)
    q, k, v, o, do = map(aligned, (q, k, v, o, do))
    lse = finite_or_inf(lse).flatten(0, 1).squeeze(2).float()
    lse = lse if q.dtype == torch.float32 else padded(lse / math.log(2))
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    tuned_attention_backward(q, k, v, o, lse, do, is_causal, *grads)
    return grads
