"""Kernels that read and write other GPUs' memory: all-to-all, all-reduce, reduce-scatter, all-gather.

fast/windows.py and fast/nccl.py launch them in place of messages. Without those that sum and gather, a step of GPT-2
medium takes 1.3 % longer on two H200s (ZeRO-3), 3.6 % (--tp), 20 % (--tp --sp). An all-to-all of 64 KiB takes 18 us,
NCCL's 22.
"""

import torch
from torch.distributed import ReduceOp

from kernels import DTYPES, this_program, tl, triton

SUMMED = (*DTYPES, torch.float64)  # dtypes that the kernels add up, those of 16 bits in float32


# -------------------------------------------------------------------------------------------------------- sum of rows
#
# A reduce-scatter or all-reduce between GPUs ends by adding one row of every rank, which may lie in other GPUs' memory,
# and by storing the sum or mean. Adding the rows one by one would read and write the sum again for each. This kernel
# reads every row once and writes the result once.

@triton.jit
def _sum_rows(rows, out, n, DIVIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = this_program() * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64 if rows[0].dtype.element_ty == tl.float64 else tl.float32)
    for r in tl.static_range(len(rows)):
        total += tl.load(rows[r] + at, at < n).to(total.dtype)
    tl.store(out + at, total / len(rows) if DIVIDE else total, at < n)


def sum_rows(rows, out, divide):
    """Write the sum of rows, N tensors (n), into `out` (n), which may be a row; with `divide`, the mean.

    All must be contiguous and of one dtype of SUMMED. Else ValueError. Rows are added in their order.
    """
    alike = all(t.shape == out.shape and t.dtype == out.dtype and t.is_contiguous() for t in (*rows, out))
    if out.dtype not in SUMMED or not alike:
        raise ValueError(f"sum of rows {[(*t.shape, t.dtype) for t in (*rows, out)]}: needs contiguous (n) of one "
                         f"floating dtype")
    block = 4096 // out.itemsize  # 4 KiB a program, as in launch_map
    _sum_rows[(triton.cdiv(len(out), block),)](tuple(rows), out, len(out), divide, block, num_warps=4)


# --------------------------------------------------------------------------------------------------------- all-to-all
#
# Each GPU of a node has a block of bytes for each other GPU, and only the two know its size. One kernel a GPU exchanges
# all blocks, without a barrier or the CPU, so a CUDA graph can hold it. It costs each GPU a window of 32 MiB, memory
# that the other GPUs can write to. Each program sends a share of a block, piece by piece, to the program of the same
# number on the receiving GPU. After each piece that it sends, it takes one that it receives:
#
#     send   wait until a slot in the receiver's window is free, write a piece there, add 1 to the receiver's `arrived`
#     take   wait until a piece has arrived in my window, copy it out, add 1 to the sender's `taken`
#
# In step s rank r sends to rank r+1+s and receives from r-1-s; the N-1 steps run at the same time. Counters are never
# reset, so launches need no barrier between them. Programs cannot deadlock, even if a GPU has room for only one at a
# time: each waits only for programs of its own number, and a send waits only for the piece SLOTS before it to be taken.
# A block crosses NVLink once. The receiver then copies it out of its window, from L2, while the next pieces arrive.

SHARES, SLOTS, SLOT_BYTES = 256, 4, 1 << 15  # programs, slots for each, bytes of a slot: windows of 32 MiB
LEAST_BYTES = 1 << 12                        # least bytes of a share, so that small blocks need few programs


def all_to_all_bytes(ranks):
    """Bytes of a window: the slots of every program of every step, then four counters of each."""
    return (ranks - 1) * _shares(ranks) * (SLOTS * SLOT_BYTES + 16)


def _shares(ranks):
    """Programs that share a block."""
    return SHARES // max(1, ranks - 1)


@triton.jit
def _of_step(blocks, step, i: tl.constexpr):
    """Number i of a step's four. They are encoded as `AllToAll.__call__` says."""
    number = blocks[i]
    for s in tl.static_range(1, len(blocks) // 4):
        number = tl.where(step == s, blocks[4 * s + i], number)
    return (number << 2) >> 3


@triton.jit
def _share(n, share, SHARES: tl.constexpr, LEAST_BYTES: tl.constexpr):
    """(start, bytes) of one of SHARES shares of a block of n bytes."""
    width = tl.cdiv(tl.cdiv(n, SHARES), LEAST_BYTES) * LEAST_BYTES
    start = tl.minimum(share * width, n)
    return start, tl.minimum(width, n - start)


@triton.jit
def _copy_bytes(to, source, n, WORD: tl.constexpr, UNIT: tl.constexpr):
    """Copy n bytes from address `source` to address `to`; all three are multiples of UNIT."""
    to = tl.multiple_of(to.to(tl.pointer_type(WORD)), UNIT)
    source = tl.multiple_of(source.to(tl.pointer_type(WORD)), UNIT)
    width: tl.constexpr = WORD.primitive_bitwidth // 8
    words = tl.multiple_of(n // width, UNIT // width)
    for start in range(0, words, 4096):
        at = start + tl.arange(0, 4096)
        # ".cg" reads past L1, which may still hold the old contents of a slot.
        tl.store(to + at, tl.load(source + at, at < words, cache_modifier=".cg"), at < words)


@triton.jit
def _counter(address):
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def _wait(counter, least):
    while tl.atomic_add(counter, 0, sem="acquire", scope="sys") - least < 0:  # correct even past 2^31
        pass


@triton.jit
def _count(counter):
    tl.debug_barrier()  # until all threads of this program have finished the copy that is counted
    tl.atomic_add(counter, 1, sem="release", scope="sys")


@triton.jit
def _all_to_all(blocks, windows, SHARES: tl.constexpr, SLOTS: tl.constexpr, SLOT_BYTES: tl.constexpr,
                LEAST_BYTES: tl.constexpr, WORD: tl.constexpr, UNIT: tl.constexpr):
    N: tl.constexpr = len(blocks) // 4
    share = tl.program_id(0)
    step = tl.program_id(1)
    start, sends = _share(_of_step(blocks, step, 1), share, SHARES, LEAST_BYTES)
    outgoing = _of_step(blocks, step, 0) + start
    start, receives = _share(_of_step(blocks, step, 3), share, SHARES, LEAST_BYTES)
    incoming = _of_step(blocks, step, 2) + start
    rounds = tl.cdiv(tl.maximum(sends, receives), SLOT_BYTES).to(tl.int32)
    if step == N - 1:  # my own block
        _copy_bytes(incoming, outgoing, sends, WORD, UNIT)
    elif rounds > 0:
        mine = tl.load(windows + N - 1)
        theirs = tl.load(windows + step)
        givers = tl.load(windows + N + step)
        number = step * SHARES + share
        programs = (N - 1) * SHARES
        slots = number * SLOTS * SLOT_BYTES
        counters = programs * SLOTS * SLOT_BYTES + 4 * number
        arrived_here = _counter(mine + counters)
        arrived_there = _counter(theirs + counters)
        taken_there = _counter(mine + counters) + programs
        taken_here = _counter(givers + counters) + programs
        sent_before = arrived_here + 2 * programs  # these two are no other program's
        taken_before = arrived_here + 3 * programs
        sent = tl.load(sent_before)
        taken = tl.load(taken_before)
        for t in range(0, rounds + 1):
            at = t * SLOT_BYTES
            before = (t - 1) * SLOT_BYTES
            if at < sends:
                _wait(taken_there, sent + 1 - SLOTS)
                slot = theirs + slots + (sent & (SLOTS - 1)) * SLOT_BYTES
                _copy_bytes(slot, outgoing + at, tl.minimum(sends - at, SLOT_BYTES), WORD, UNIT)
                _count(arrived_there)
                sent += 1
            if (t > 0) & (before < receives):
                _wait(arrived_here, taken + 1)
                slot = mine + slots + (taken & (SLOTS - 1)) * SLOT_BYTES
                _copy_bytes(incoming + before, slot, tl.minimum(receives - before, SLOT_BYTES), WORD, UNIT)
                _count(taken_here)
                taken += 1
        tl.store(sent_before, sent)
        tl.store(taken_before, taken)


class AllToAll:
    """All-to-alls of N ranks, one kernel a call. rank: this rank's number.

    windows: the addresses of N windows, one on each rank, of `all_to_all_bytes` bytes, zero at first and used by no
    other object. All ranks must make the same calls in the same order, each rank on one stream. The kernel waits for a
    peer that does not come without a timeout: safe/watch.py's Watch ends the run and names the rank.
    """

    def __init__(self, windows, rank, device):
        n = len(windows)
        self.peers = [((rank + 1 + s) % n, (rank - 1 - s) % n) for s in range(n)]  # the last is for my own block
        self.windows = torch.tensor([[windows[peer] for peer in line] for line in zip(*self.peers)], device=device)
        self.words = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
        self.shapes = _shares(n), SLOTS, SLOT_BYTES, LEAST_BYTES
        self.compiled = {}

    def __call__(self, outgoing, incoming):
        """Send outgoing[r] to every rank r, and receive from it into incoming[r]. Both are lists of (address, bytes); 0
        bytes are not sent. ValueError if this rank's block to itself has two sizes."""
        blocks = []
        bits = 16
        for to, source in self.peers:
            there, sends = outgoing[to]
            here, receives = incoming[source]
            blocks += there, sends, here, receives
            bits |= there | sends | here | receives
        largest = max(blocks[1::2])
        unit = bits & -bits
        if blocks[-3] != blocks[-1]:
            raise ValueError(f"all-to-all: my own block has {blocks[-3]} bytes to be sent, {blocks[-1]} to be received")
        if not largest:
            return
        # Triton compiles a kernel anew for 32- or 64-bit integers, and for multiples of 16. So n is passed as 2n + 1 +
        # 2^62, which always has 64 bits and is odd. In the kernel, (number << 2) >> 3 gives n back.
        blocks = tuple([2 * number + (1 << 62 | 1) for number in blocks])
        grid = min(self.shapes[0], -(-largest // LEAST_BYTES)), len(self.peers), 1
        arguments = blocks, self.windows, *self.shapes, self.words[unit], unit
        if unit in self.compiled:  # Triton's own lookup would cost the CPU 27 us, twice as much
            self.compiled[unit][grid](*arguments)
            return
        compiled = _all_to_all[grid](*arguments, num_warps=8, num_stages=1)
        if compiled:  # None in the interpreter
            self.compiled[unit] = compiled


# ---------------------------------------------------------------------------- all-reduce, reduce-scatter, all-gather
#
# The same for an all-reduce: one kernel a GPU, no barrier. Rank r sums chunk r. A program does all of it for its slice
# of every chunk, piece by piece, with the programs of its number on the other GPUs. So nobody waits for a whole GPU,
# and one piece travels while another is summed or copied. Round t of a program:
#
#     send    write piece t of every other rank's chunk into that rank's window
#     sum     wait for the others' pieces t-1 of my chunk, add mine; write the sum to the result and into their windows
#     fetch   wait for the others' sums t-2, copy them out of my window
#
# A reduce-scatter has no fetches, and its sums stay. An all-gather sends no pieces, and its "sums" are its own chunk.
# So pieces and sums are counted apart, and each operation waits only for what it needs.
#
# A slot is written to again four pieces later, and nobody need say so. Before I send piece t, I have all ranks' pieces
# t-2. A rank sends its piece t-2 after it has summed pieces t-4, so mine is read, whose slot I write to now. Before I
# write sum t-1, I have fetched all ranks' sums t-3, each of which was written after its rank had fetched sums t-5. When
# a launch begins, all pieces and sums of those before have been received.
#
# Between two ranks an all-reduce is a reduce-scatter in which each rank's chunk is the whole tensor. It sends as many
# bytes, and an element crosses once, not twice in turn. Both ranks sum in the same order. It works in place: piece t is
# sent one round before its sum is written, with a barrier between.
#
# Two programs share a multiprocessor: while one waits, the other copies. (4 H200s, GB/s on the bus at 1 GiB, all-
# gather, reduce-scatter, all-reduce: one program with twice the threads had 295, 298, 317, two have 317, 326, 341, NCCL
# has 314, 311, 348. Loads that waited for the stores before them had 225, 216, 275.)

SUM_PROGRAMS, SUM_SLOTS = 256, 4
OPS = {ReduceOp.SUM: "sum", ReduceOp.AVG: "avg", ReduceOp.MAX: "max"}


def sum_slot_bytes(ranks):
    """16 KiB up to 4 ranks, 8 for 5, 4 beyond: so a thread needs at most 128 registers, and two programs fit. Windows
    of 32 MiB for two ranks, 96 for four, 56 for eight."""
    return 1 << (14 if ranks <= 4 else 13 if ranks == 5 else 12)


def all_reduce_bytes(ranks):
    """Bytes of a window: a program's slots and counters for pieces and sums of each other rank, and 16 for its own two
    counters."""
    return SUM_PROGRAMS * (2 * (ranks - 1) * (SUM_SLOTS * sum_slot_bytes(ranks) + 4) + 16)


@triton.jit
def _chunk(flat, r, first, lane, row, apart, least, more, end, N: tl.constexpr, EVEN: tl.constexpr,
           ROWS: tl.constexpr):
    """(the addresses of chunk r's elements first + lane; which of them lie in this program's slice of it, up to `end`).
    Chunks have `least` elements, the first `more` of them one longer. They begin `apart` elements apart (0: all are the
    same) or, if ROWS, lie in rows: row after row, each in N parts of `row` elements, one of every chunk."""
    if ROWS:  # (N - 1), because `first` itself skips one part in each row
        start = flat + (r + (first // row).to(tl.int64) * (N - 1)) * row
    else:
        start = flat + r.to(tl.int64) * apart + (0 if EVEN else tl.minimum(r, more))
    return start + first + lane, first + lane < tl.minimum(end, least + (0 if EVEN else (r < more).to(tl.int32)))


@triton.jit
def _slot(window, line, slot, SLOTS: tl.constexpr, BYTES: tl.constexpr, kind: tl.constexpr):
    """The address of a line's slot in a window; of (LINES) lines, and windows, (LINES) addresses."""
    return tl.multiple_of((window + (line * SLOTS + slot) * BYTES).to(tl.pointer_type(kind)), 16)


@triton.jit
def _wait_for_all(counters, least, used):
    """As `_wait`, for those of (LINES) counters that are used."""
    behind = 1
    while behind > 0:
        counts = tl.atomic_add(_counter(counters), 0, used, sem="acquire", scope="sys")
        behind = tl.max((used & (counts - least < 0)).to(tl.int32))


@triton.jit
def _all_reduce(flat, own, windows, apart, least, more, width, row, N: tl.constexpr, EVEN: tl.constexpr,
                ROWS: tl.constexpr, SEND: tl.constexpr, GATHER: tl.constexpr, OP: tl.constexpr, TOTAL: tl.constexpr,
                PROGRAMS: tl.constexpr, SLOTS: tl.constexpr, SLOT: tl.constexpr, LINES: tl.constexpr):
    """windows: N addresses, and this rank's number. own: a reduce-scatter's result (between two ranks, an all-reduce's:
    `flat` itself), or what an all-gather sends. SEND: send pieces and sum them. GATHER: send sums and fetch them. EVEN:
    all chunks have `least` elements. TOTAL: the sum's dtype. A program does `width` elements of every chunk, SLOT at a
    time; all ranks do as many rounds, even where their chunks are shorter. LINES: a power of 2, N-1 or more."""
    kind: tl.constexpr = flat.dtype.element_ty
    BYTES: tl.constexpr = SLOT * (kind.primitive_bitwidth // 8)
    counters: tl.constexpr = 2 * PROGRAMS * (N - 1) * SLOTS * BYTES  # they lie behind all slots
    program = tl.program_id(0)
    rank = tl.load(windows + N).to(tl.int32)
    here = tl.load(windows + rank)
    # What is sent to all other ranks, or comes from them, is (LINES, SLOT), so that all loads are under way before the
    # first store. Line i here is filled by rank-1-i; I fill line i of rank+1+i.
    i = tl.arange(0, LINES)
    used = i < N - 1
    right = (rank + 1 + i) % N
    left = (rank + 2 * N - 1 - i) % N
    there = tl.load(windows + right)
    pieces = program * (N - 1) + i
    sums = (PROGRAMS + program) * (N - 1) + i
    # How many pieces, and how many sums, this program has handled in earlier launches.
    pieces_done = _counter(here + counters + 4 * (2 * PROGRAMS * (N - 1) + program))
    sums_done = pieces_done + PROGRAMS
    pieces_before = tl.load(pieces_done)
    sums_before = tl.load(sums_done)
    lane = tl.arange(0, SLOT)
    start = program * width
    end = tl.minimum(program * width + width, least + (0 if EVEN else 1))
    rounds = tl.cdiv(end - start, SLOT)
    for t in range(0 if SEND else 1, rounds + (2 if GATHER else 1)):
        if SEND:
            if t < rounds:
                at, inside = _chunk(flat, right[:, None], start + t * SLOT, lane[None], row, apart, least, more, end, N,
                                    EVEN, ROWS)
                inside &= used[:, None]
                slots = _slot(there, pieces, (pieces_before + t) & (SLOTS - 1), SLOTS, BYTES, kind)
                tl.store(slots[:, None] + lane[None], tl.load(at, inside), inside)
                tl.debug_barrier()  # until all threads have written, and have read what they were sent before
                tl.atomic_add(_counter(there + counters + 4 * pieces), 1, used, sem="release", scope="sys")
        if (t > 0) & (t <= rounds):
            first = start + (t - 1) * SLOT
            at, inside = _chunk(flat, rank, first, lane, row, apart, least, more, end, N, EVEN, ROWS)
            if SEND:
                _wait_for_all(here + counters + 4 * pieces, pieces_before + t, used)
                slot = (pieces_before + t - 1) & (SLOTS - 1)
                total = tl.full((SLOT,), float("-inf") if OP == "max" else 0, TOTAL)
                for r in tl.static_range(N):  # in the ranks' order
                    line = program * (N - 1) + (rank - r + N) % N - 1
                    place = tl.where(r == rank, at, _slot(here, line, slot, SLOTS, BYTES, kind) + lane)
                    x = tl.load(place, inside, cache_modifier=".cg").to(TOTAL)  # past L1, as in _copy_bytes
                    total = tl.maximum(total, x, tl.PropagateNan.ALL) if OP == "max" else total + x
                total = (total / N if OP == "avg" else total).to(kind)
            else:
                total = tl.load(own + first + lane, inside)
            tl.store(at if GATHER else own + first + lane, total, inside)
            if GATHER:
                slots = _slot(there, sums, (sums_before + t - 1) & (SLOTS - 1), SLOTS, BYTES, kind)
                tl.store(slots[:, None] + lane[None], total[None], used[:, None] & inside[None])
                tl.debug_barrier()
                tl.atomic_add(_counter(there + counters + 4 * sums), 1, used, sem="release", scope="sys")
        if GATHER:
            if t > 1:
                _wait_for_all(here + counters + 4 * sums, sums_before + t - 1, used)
                at, inside = _chunk(flat, left[:, None], start + (t - 2) * SLOT, lane[None], row, apart, least, more,
                                    end, N, EVEN, ROWS)
                inside &= used[:, None]
                slots = _slot(here, sums, (sums_before + t - 2) & (SLOTS - 1), SLOTS, BYTES, kind)
                tl.store(at, tl.load(slots[:, None] + lane[None], inside, cache_modifier=".cg"), inside)
    if rounds > 0:
        tl.debug_barrier()  # until all threads have read the counters
        if SEND:
            tl.store(pieces_done, pieces_before + rounds)
        if GATHER:
            tl.store(sums_done, sums_before + rounds)


class AllReduce:
    """All-reduces, reduce-scatters and all-gathers of N ranks, one kernel a call. windows, rank: as for `AllToAll`, but
    of `all_reduce_bytes` bytes. Tensors are contiguous, their dtype in SUMMED, their op in OPS.

    Each element is summed in the ranks' order, so all get the same bits. 16-bit ones are summed in float32. row:
    Nths do not lie side by side in `flat`, but in rows of N parts of `row` elements, one of every Nth. A part must fill
    whole slots (`takes_rows`).
    """

    def __init__(self, windows, rank, device):
        self.ranks = len(windows)
        self.windows = torch.tensor([*windows, rank], device=device)

    def takes_rows(self, nbytes):
        """Whether a row's parts may have so many bytes: no slot may lie across two of them."""
        return nbytes % sum_slot_bytes(self.ranks) == 0

    def all_reduce(self, flat, op):
        """Combine `flat` (n) of all ranks, in place."""
        most = len(flat) - len(flat) % (16 * self.ranks)
        for part in flat[:most], flat[most:]:  # apart, because only chunks of 16 k elements are read in vectors
            self._launch(part, part, whole=self.ranks == 2, SEND=True, GATHER=self.ranks > 2, OP=OPS[op])

    def reduce_scatter(self, flat, result, op, row=0):
        """Combine `flat` (N n) of all ranks, and write this rank's Nth to `result` (n)."""
        self._launch(flat, result, row, SEND=True, GATHER=False, OP=OPS[op])

    def all_gather(self, flat, own, row=0):
        """Write all ranks' `own` (n), of any dtype, to `flat` (N n), of which `own` may be a part."""
        row *= flat.itemsize
        flat, own = (t.as_strided(t.shape, (1,)).view(torch.uint8) for t in (flat, own))
        if (flat.data_ptr() | own.data_ptr() | len(own)) % 4 == 0:
            row //= 4
            flat = flat.view(torch.int32)
            own = own.view(torch.int32)
        self._launch(flat, own, row, SEND=False, GATHER=True, OP="")

    def _launch(self, flat, own, row=0, whole=False, **what):
        """whole: each rank's chunk is all of `flat`."""
        if not len(flat):
            return
        least, more = divmod(len(flat), 1 if whole else self.ranks)
        slot = sum_slot_bytes(self.ranks) // flat.itemsize
        unit = slot if row else LEAST_BYTES // flat.itemsize
        longest = least + (more > 0)
        width = triton.cdiv(triton.cdiv(longest, SUM_PROGRAMS), unit) * unit
        _all_reduce[(triton.cdiv(longest, width),)](
            flat, own, self.windows, 0 if whole else least, least, more, width, row,
            self.ranks, not more, row > 0, **what,
            TOTAL=tl.float64 if flat.dtype == torch.float64 else tl.float32,
            PROGRAMS=SUM_PROGRAMS, SLOTS=SUM_SLOTS, SLOT=slot,
            LINES=triton.next_power_of_2(self.ranks - 1), num_warps=8)


def window_bytes(ranks):
    """Bytes of a window for an `AllToAll` and, behind it, an `AllReduce`."""
    return all_to_all_bytes(ranks) + all_reduce_bytes(ranks)
