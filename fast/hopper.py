"""Attention on Hopper GPUs, in Gluon, for fast/attention.py: warps with one task each, forward and backward."""

import functools
import heapq
import math

import torch

import kernels
from fast import beside
from kernels import load_rows, store_rows, TensorDescriptor, tiled, tl, triton


try:  # Gluon is a part of Triton whose names still change. Without it kernels.py serves Hopper GPUs, too.
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    tma_load, tma_store = (getattr(tma, name, None) or getattr(tma, old) for name, old in (
        ("async_load", "async_copy_global_to_shared"), ("async_store", "async_copy_shared_to_global")))  # old: 3.6
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin
    HAVE_GLUON = True

    @builtin
    def tma_add(descriptor, at, tile, _semantic=None):
        """As tma_store, but add to what is there. Newer Gluon has this by name, 3.6 in its compiler alone."""
        at = _semantic._convert_to_ir_values(at, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, at, tile.handle)
except (ImportError, AttributeError):  # its kernels stay unused, and decorating them does nothing that matters
    gluon = triton
    gl = tl
    HAVE_GLUON = False


# -------------------------------------------------------------------------------------------------------------- forward
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


# ------------------------------------------------------------------------------------------------------------ backward
#
# The two kernels of fast/attention.py compute S and dP twice: 7 matmuls a block. One pass computes them once: 5.
# A program holds dK and dV of BN keys in registers, while it goes over the rows that see them, from the diagonal on (of
# another rank's keys in a ring, over all rows). Each ROWS of these have a part of dQ, which TMA adds in float32 to
# memory: in the order in which parts come, so two runs differ by rounding.
#
# Eight warps compute, one loads ahead, one adds. S^T and dP^T are computed, because P^T and dS^T are in the registers
# that dV's and dK's products want; dS goes through shared memory for dQ's. dP starts from -delta, so dS = P dP, which
# saves registers: were they short, the compiler would wait for each product (its warning C7512), in twice the time.
#
# D = 128, causal, T = 1024, 4096, 16384, in TFLOP/s: an H200 331, 543, 624 | cuDNN 306, 495, 597; the two kernels have
# 289 at T = 1024. A warm H100, from T = 1024 on: 298, 391, 468, 544 | cuDNN 286, 371, 439, 536 | the two kernels 298,
# 353, 399, 454. Four query heads a key head, T = 4096: 490 | 357. With 64 wide heads the two kernels are faster.

ROWS = gl.constexpr(64)
BACKWARD_STAGES = 3  # tiles of Q, and of dO. Of 227 KiB they take 96; K, V, dS and dQ take 128.
ANY_ORDER = True     # whether parts of dQ may be added as they come; train.py's --deterministic says no
FEWEST_ROWS = 1024   # With fewer, filling dQ with zeros, and rounding it in the end, may cost what one pass saves.


@gluon.jit
def _keys_at(tiles, i, blocks, Tq, CAUSAL: gl.constexpr):
    """(head, first key, first row that sees these keys, tiles of rows) of tile i. From the end, so forward's schedule
    serves."""
    head, block = _tile_at(tiles, i, blocks)
    n0 = (blocks - 1 - block) * BN
    m0 = n0 if CAUSAL else 0
    return head, n0, m0, (Tq - m0) // ROWS


@gluon.jit
def _load_for_keys(Q, K, V, DO, LSE, DELTA, tiles, kv_slots, kv_full, kv_free, slots, vectors, q_full, do_full, free,
                   H, G, blocks, Tq, CAUSAL: gl.constexpr, STAGES: gl.constexpr):
    n = 0
    for i in range(gl.load(tiles)):
        head, n0, first, steps = _keys_at(tiles, i, blocks, Tq, CAUSAL)
        b = head // (H // G)
        shared = head % (H // G)
        mbarrier.wait(kv_free.index(0), 1 - i % 2)
        for values in gl.static_range(2):
            mbarrier.expect(kv_full.index(values), K.block_type.nbytes)
            tma_load(V if values else K, [b, shared, n0, 0], kv_full.index(values), kv_slots.index(values))
        for h in range(shared * G, shared * G + G):
            for j in range(steps):
                m0 = first + j * ROWS
                mbarrier.wait(free.index(n % STAGES), 1 - n // STAGES % 2)
                for dy in gl.static_range(2):  # Q and LSE, then dO and delta
                    slot = n % STAGES * 2 + dy
                    full = (do_full if dy else q_full).index(n % STAGES)
                    mbarrier.expect(full, Q.block_type.nbytes + LSE.block_type.nbytes)
                    tma_load(DO if dy else Q, [b, h, m0, 0], full, slots.index(slot))
                    tma_load(DELTA if dy else LSE, [b * H + h, m0], full, vectors.index(slot))
                n += 1


@gluon.jit
def _add_to_dq(DQ, tiles, dq_slot, dq_full, dq_free, free, G, blocks, Tq, CAUSAL: gl.constexpr, STAGES: gl.constexpr):
    n = 0
    for i in range(gl.load(tiles)):
        head, n0, first, steps = _keys_at(tiles, i, blocks, Tq, CAUSAL)
        for h in range(head * G, head * G + G):
            for j in range(steps):
                mbarrier.wait(dq_full.index(0), n % 2)
                mbarrier.arrive(free.index((n + STAGES - 1) % STAGES), pred=n > 0)  # all warps are past step n - 1
                tma_add(DQ, [h, first + j * ROWS, 0], dq_slot)
                tma.store_wait(0)
                mbarrier.arrive(dq_free.index(0))
                n += 1


@gluon.jit
def _ds_of(k, v, q, do, vectors, q_full, do_full, slot, phase, dk, dv, shift, scale2, FACTOR: gl.constexpr):
    """dS^T of a tile of rows; dK without it; dV, whose product may still run."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, ROWS, 16])
    zeros = gl.zeros([BN, ROWS], gl.float32, LAYOUT)
    mbarrier.wait(q_full.index(slot), phase)
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(slot), phase)
    dp = warpgroup_mma(v, do.permute((1, 0)), zeros - vectors.index(2 * slot + 1).load(LAYOUT), is_async=True)
    lse = vectors.index(2 * slot).load(LAYOUT)
    s = warpgroup_mma_wait(1, (s,))
    p = gl.exp2(s * scale2 - lse)
    if shift > -BN:  # row i sees key j if j + shift <= i; below, all rows see all keys
        keys = gl.arange(0, BN, gl.SliceLayout(1, LAYOUT)) + shift
        p = gl.where(keys[:, None] <= gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :], p, 0.0)
    dv = warpgroup_mma(gl.convert_layout(p.to(k.dtype), FACTOR), do, dv, is_async=True)
    dp, dk = warpgroup_mma_wait(1, (dp, dk))
    return (p * dp).to(k.dtype), dk, dv


@gluon.jit
def _gradients(DK, DV, tiles, kv_slots, kv_full, kv_free, slots, vectors, q_full, do_full, ds_slots, dq_slot, dq_full,
               dq_free, scale2, scale, H, G, blocks, Tq, CAUSAL: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, D, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
    HALF: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, D // 2, 16])
    k = kv_slots.index(0).reshape([BN, D])
    v = kv_slots.index(1).reshape([BN, D])
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    n = gl.to_tensor(0)
    above = 0 if CAUSAL else -BN  # shift of the first rows of a query head
    for i in range(gl.load(tiles)):
        head, n0, _, steps = _keys_at(tiles, i, blocks, Tq, CAUSAL)
        shift = gl.to_tensor(above)
        dv = gl.zeros([BN, D], gl.float32, LAYOUT)
        mbarrier.wait(kv_full.index(0), i % 2)
        dk = warpgroup_mma_init(gl.zeros([BN, D], gl.float32, LAYOUT))
        mbarrier.wait(kv_full.index(1), i % 2)
        for _ in range(steps * G):
            q = slots.index(2 * slot).reshape([ROWS, D])
            do = slots.index(2 * slot + 1).reshape([ROWS, D])
            ds, dk, dv = _ds_of(k, v, q, do, vectors, q_full, do_full, slot, phase, dk, dv, shift, scale2, FACTOR)
            ds_slot = ds_slots.index(n % 2).reshape([BN, ROWS])
            ds_slot.store(ds)
            fence_async_shared()
            dq = gl.zeros([ROWS, D], gl.float32, HALF)
            dq = warpgroup_mma(ds_slot.permute((1, 0)), k, dq, use_acc=False, is_async=True)
            dk = warpgroup_mma(gl.convert_layout(ds, FACTOR), q, dk, is_async=True)
            dq, dv = warpgroup_mma_wait(1, (dq, dv))
            mbarrier.wait(dq_free.index(0), 1 - n % 2)
            dq_slot.reshape([ROWS, D]).store(dq)
            fence_async_shared()
            mbarrier.arrive(dq_full.index(0))
            shift = gl.where(shift == above + ROWS - steps * ROWS, above, shift - ROWS)  # above: the next query head
            phase = gl.where(slot == STAGES - 1, 1 - phase, phase)
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)
            n += 1
        dk, dv = warpgroup_mma_wait(0, (dk, dv))
        k.store((dk * scale).to(k.dtype))
        v.store(dv.to(v.dtype))
        fence_async_shared()
        tma_store(DK, [head // (H // G), head % (H // G), n0, 0], kv_slots.index(0))
        tma_store(DV, [head // (H // G), head % (H // G), n0, 0], kv_slots.index(1))
        tma.store_wait(0)
        mbarrier.arrive(kv_free.index(0))


@gluon.jit
def one_pass_backward_kernel(Q, K, V, DO, LSE, DELTA, DQ, DK, DV, tiles, stride, scale2, scale, H, G, blocks, Tq,
                             CAUSAL: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """dK and dV of all tiles of BN keys, as `tiles` hands them out. dQ / scale is added to DQ (B*H, Tq, D), float32."""
    tiles += gl.program_id(0) * stride
    kv_slots = gl.allocate_shared_memory(K.dtype, [2, 1, 1, BN, D], K.layout)
    slots = gl.allocate_shared_memory(Q.dtype, [2 * STAGES, 1, 1, ROWS, D], Q.layout)
    vectors = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, ROWS], LSE.layout)
    ds_slots = gl.allocate_shared_memory(Q.dtype, [2, 1, 1, BN, ROWS], Q.layout)
    dq_slot = gl.allocate_shared_memory(gl.float32, [1, ROWS, D], DQ.layout)
    kv_full = _barriers(2, 1)
    kv_free = _barriers(1, 1)
    q_full = _barriers(STAGES, 1)
    do_full = _barriers(STAGES, 1)
    free = _barriers(STAGES, 1)
    dq_full = _barriers(1, 1)
    dq_free = _barriers(1, 1)
    fence_async_shared()
    gl.warp_specialize([
        (_gradients, (DK, DV, tiles, kv_slots, kv_full, kv_free, slots, vectors, q_full, do_full, ds_slots, dq_slot,
                      dq_full, dq_free, scale2, scale, H, G, blocks, Tq, CAUSAL, D, STAGES)),
        (_load_for_keys, (Q, K, V, DO, LSE, DELTA, tiles, kv_slots, kv_full, kv_free, slots, vectors, q_full, do_full,
                          free, H, G, blocks, Tq, CAUSAL, STAGES)),
        (_add_to_dq, (DQ, tiles, dq_slot, dq_full, dq_free, free, G, blocks, Tq, CAUSAL, STAGES)),
    ], [1, 1], [24, 24])


@triton.jit
def delta_and_zeros_kernel(O, DO, DELTA, DQ, T_pad, H, D: tl.constexpr, BM: tl.constexpr):
    bh = tl.program_id(1)
    m0 = tl.program_id(0) * BM
    o = load_rows(O, bh // H, bh % H, m0).to(tl.float32)
    delta = tl.sum(o * load_rows(DO, bh // H, bh % H, m0).to(tl.float32), 1)
    tl.store(DELTA + bh.to(tl.int64) * T_pad + m0 + tl.arange(0, BM), delta)
    DQ.store([bh, m0, 0], tl.zeros([1, BM, D], tl.float32))


@triton.jit
def rounded_dq_kernel(SUM, DQ, scale, H, D: tl.constexpr, BM: tl.constexpr):
    bh = tl.program_id(1)
    m0 = tl.program_id(0) * BM
    store_rows(DQ, bh // H, bh % H, m0, SUM.load([bh, m0, 0]).reshape(BM, D) * scale)


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


def described(tile, swizzled=128):
    """A descriptor of Triton's, as Gluon's."""
    x = tile.base
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzled, element_bitwidth=8 * x.itemsize, rank=x.dim())
    return GluonDescriptor(x, tile.shape, tile.strides, tile.block_shape, layout)


def specialized_attention_forward(q, k, v, is_causal):
    """As tuned_attention_forward."""
    B, H, Tq, D = q.shape
    Tk = k.shape[2]
    o = q.new_empty(B, Tq, H, D).transpose(1, 2)
    lse = q.new_empty(B * H, Tq, dtype=torch.float32)
    together = max(1, (32 << 20) // (2 * k[0, 0].nbytes))  # of L2's 50 MiB
    programs = min(beside.programs_beside_transfers(q.device), B * H * (Tq // TILE))
    tiles = specialized_tiles(Tq, Tk, is_causal, B * H, together, programs, q.device)
    specialized_forward_kernel[(programs,)](
        described(tiled(q, TILE // 2)), described(tiled(k, TILE)), described(tiled(v, TILE)),
        described(tiled(o, TILE // 2)), lse, tiles, tiles.shape[1], math.log2(math.e) / math.sqrt(D), Tq, Tk, H,
        H // k.shape[1], Tq // TILE, CAUSAL=is_causal, D=D, STAGES=STAGES[D], num_warps=4, maxnreg=168)
    return o, lse


def one_pass_takes(q, k, is_causal):
    any_order = ANY_ORDER and not torch.are_deterministic_algorithms_enabled()
    return (any_order and is_causal and q.shape[2] == k.shape[2] >= FEWEST_ROWS and q.shape[3] == 128
            and specialized_takes(q, k, is_causal))


def tiled_rows(x, rows):
    """As `tiled`, of x (B*H, T), for tiles (1, rows)."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0) if len(x) > 1 else 16, 1], [1, rows])


def tiled_sum(x):
    """As `tiled`, of x (B*H, T, D), for tiles (1, ROWS, D)."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, ROWS.value, x.shape[2]])


def one_pass_backward(q, k, v, o, lse, do, dq, dk, dv):
    """As tuned_attention_backward, causal. Needs 4 bytes for each number of dq besides, free when it returns."""
    delta, dq_sum = delta_and_zeros(o, do, lse)
    add_in_one_pass(q, k, v, do, lse, delta, True, dq_sum, dk, dv)
    write_rounded(dq_sum, dq)


def delta_and_zeros(o, do, lse):
    """What `add_in_one_pass` needs: (delta, as lse; zeros (B*H, Tq, D), float32, for dQ / scale)."""
    B, H, T, D = o.shape
    rows = ROWS.value
    delta = torch.empty_like(lse)
    dq_sum = o.new_empty(B * H, T, D, dtype=torch.float32)
    delta_and_zeros_kernel[T // rows, B * H](
        tiled(o, rows), tiled(do, rows), delta, tiled_sum(dq_sum), lse.stride(0), H, D, rows)
    return delta, dq_sum


def add_in_one_pass(q, k, v, do, lse, delta, is_causal, dq_sum, dk, dv):
    """Add dQ / scale to dq_sum, and write dk, dv. lse, delta, dq_sum: of q's rows, which may be some of those of
    `delta_and_zeros`. Not causal, all rows see all keys."""
    B, H, Tq, D = q.shape
    Tk = k.shape[2]
    G = H // k.shape[1]
    blocks = Tk // TILE
    rows = ROWS.value
    scale = 1 / math.sqrt(D)
    programs = min(beside.programs_beside_transfers(q.device), B * H // G * blocks)
    together = max(1, round(programs / blocks))  # heads that programs are at, so that Q, dO and dQ stay in L2
    tiles = specialized_tiles(Tk, Tq, is_causal, B * H // G, together, programs, q.device)
    one_pass_backward_kernel[(programs,)](
        described(tiled(q, rows)), described(tiled(k, TILE)), described(tiled(v, TILE)), described(tiled(do, rows)),
        described(tiled_rows(lse, rows), 0), described(tiled_rows(delta, rows), 0), described(tiled_sum(dq_sum)),
        described(tiled(dk, TILE)), described(tiled(dv, TILE)), tiles, tiles.shape[1], scale * math.log2(math.e),
        scale, H, G, blocks, Tq, CAUSAL=is_causal, D=D, STAGES=BACKWARD_STAGES, num_warps=8, maxnreg=168)


def write_rounded(dq_sum, dq):
    _, H, T, D = dq.shape
    rows = ROWS.value
    rounded_dq_kernel[T // rows, len(dq_sum)](tiled_sum(dq_sum), tiled(dq, rows), 1 / math.sqrt(D), H, D, rows)
