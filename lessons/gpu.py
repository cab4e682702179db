"""GPU lessons: each lesson's ways, timed."""

import functools
import math
import statistics
import time
from typing import NamedTuple

import torch

import kernels
from kernels import tl, triton
from lessons.kernels import tiles_read
from lessons.measure import seconds_of, synchronize


# -------------------------------------------------------------------------------------------------------------- lessons
#
# The numbers that lectures 5 to 8 state, beside ours. A lesson of 5 or 6 computes one result in several ways, the slow
# one first, and times them on the device at hand.

class Lesson(NamedTuple):
    says: str
    read: str        # the code to read: a file and a name in it
    measure: object  # function(device, size) -> [(way, seconds, bytes, FLOPs)]
    needs: str = ""  # "triton" or "cuda"


def timed(device, size, ways):
    """[(way, seconds, bytes, FLOPs)] of {way: (function, inputs, bytes, FLOPs)}."""
    seconds = seconds_of({way: parts[:2] for way, parts in ways.items()}, device, size.repeats)
    return [(way, forward, *ways[way][2:]) for way, (forward,) in seconds.items()]


def three_stopwatches(device, size):
    """Time one product in three ways. It must be the process's first product, because that one loads the libraries."""
    x = torch.ones(size.side, size.side, device=device)

    def stopwatch(waits):
        synchronize(device)
        start = time.perf_counter()
        x @ x
        if waits:
            synchronize(device)
        return time.perf_counter() - start
    first = stopwatch(True)
    warm, early = (statistics.median(stopwatch(waits) for _ in range(5)) for waits in (True, False))
    return [(way, seconds, 3 * x.nbytes, 2 * size.side**3)
            for way, seconds in (("first call", first), ("warm, waited for", warm), ("not waited for", early))]


def one_by_one_and_fused(plain, passes, ours):
    """A lesson: PyTorch's operations one by one, in `passes` reads and writes of x, against one read and one write."""
    def measure(device, size):
        x = torch.randn(size.n, device=device)
        ways = {"one by one": (plain, [x], passes * x.nbytes, 0),
                "ours" if kernels.on_triton(x) else "one operation": (ours, [x], 2 * x.nbytes, 0)}
        if device.type == "cuda":  # on a CPU torch.compile needs a C++ compiler
            ways["torch.compile"] = torch.compile(plain, dynamic=False), [x], 2 * x.nbytes, 0
        return timed(device, size, ways)
    return measure


@triton.jit
def _copy_lines(x, y, line, step, BLOCK: tl.constexpr):
    """A program copies BLOCK numbers of a line. Neighbours in a line are `step` elements apart, lines `line`."""
    at = tl.program_id(1) * line + (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) * step
    tl.store(y + at, tl.load(x + at))


def columns_and_rows(device, size):
    """A copy, down columns or along rows. A GPU reads memory in sectors of 32 bytes. Down a column each sector serves
    one number, unless L2 keeps it for the next column."""
    side = math.isqrt(size.n)
    x, y = torch.randn(2, side, side, device=device)

    def along(line, step):
        if not kernels.on_triton(x):
            return y.copy_(x if step == 1 else x.T)
        _copy_lines[side // min(side, 1024), side](x, y, line, step, min(side, 1024))
        return y
    asked = 2 * x.numel() * (32 if device.type == "cuda" else 4)
    return timed(device, size, {"columns": (lambda: along(1, side), [], asked, 0),
                                "rows": (lambda: along(side, 1), [], 2 * x.nbytes, 0)})


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _sigmoids(x, s, t, y, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """s = sigmoid(x), t = sigmoid(s), y = sigmoid(t). With KEEP, which stores s and t, 1 read, 3 writes; else 1, 1."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    once = _sigmoid(tl.load(x + at))
    twice = _sigmoid(once)
    if KEEP:
        tl.store(s + at, once)
        tl.store(t + at, twice)
    tl.store(y + at, _sigmoid(twice))


@triton.jit
def _sigmoids_backward(x, s, t, dy, dx, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """dx from dy. With KEEP, which reads s and t, 3 reads, 1 write; else, computing them again, 2 and 1."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    once = tl.load(s + at) if KEEP else _sigmoid(tl.load(x + at))
    twice = tl.load(t + at) if KEEP else _sigmoid(once)
    y = _sigmoid(twice)
    tl.store(dx + at, tl.load(dy + at) * once * (1 - once) * twice * (1 - twice) * y * (1 - y))


def three_sigmoids(x, dy, keep):
    """dx, after forward and backward."""
    (s, t, y, dx), grid = torch.empty(4, len(x), device=x.device), (len(x) // 1024,)
    _sigmoids[grid](x, s, t, y, keep, 1024)
    _sigmoids_backward[grid](x, s, t, dy, dx, keep, 1024)
    return dx


def kept_and_recomputed(device, size):
    x, dy = torch.randn(2, size.n, device=device)
    return timed(device, size, {way: (functools.partial(three_sigmoids, keep=keep), [x, dy], passes * x.nbytes, 0)
                                for way, keep, passes in (("s and t kept", True, 8), ("computed again", False, 5))})


# Two loops of 2 and 3 FLOPs a turn. They differ, so that no compiler merges them.
BRANCHES = """template <typename T> T branches(T x) {
    if (x > T(0)) for (int i = 0; i < 200; i++) x = x * T(0.99) + T(0.01);
    else for (int i = 0; i < 200; i++) x = x * x * T(0.3) - T(0.2);
    return x;
}"""


def shuffled_and_sorted(device, size):
    """A branch on the sign of the same numbers, shuffled and sorted. When they are shuffled, a warp of 32 threads has
    both signs and runs both sides of the branch. PyTorch compiles the CUDA."""
    x, branches = torch.randn(size.n, device=device), torch.cuda.jiterator._create_jit_fn(BRANCHES)
    return timed(device, size, {way: (branches, [numbers], 2 * x.nbytes, 500 * size.n)
                                for way, numbers in (("shuffled", x), ("sorted", x.sort().values))})


def ungrouped_and_grouped(device, size):
    """A product of matrices that exceed L2. Bytes are counted as if programs that run at the same time read each row
    and column from memory once."""
    side, tile, at_once = 2 * size.side, 128, kernels.programs_at_once(device)
    a, b = torch.randn(2, side, side, device=device, dtype=torch.bfloat16)
    count = triton.cdiv(side, tile)

    def elements(group):  # read and written
        return triton.cdiv(count**2, at_once) * tile * side * tiles_read(count, count, group, at_once) + side**2
    return timed(device, size, {way: (functools.partial(kernels.matmul, tiles=(tile, tile, 64, group)), [a, b],
                                      2 * elements(group), 2 * side**3)
                                for way, group in (("row after row", 1), ("groups of 8 rows", 8))})


def float32_and_bf16(function, matrices):
    """A lesson in two dtypes: a product of two matrices, or an operation on one tensor, which memory bounds."""
    def measure(device, size):
        x = torch.randn(size.side, size.side, device=device) if matrices == 2 else torch.randn(size.n, device=device)
        return timed(device, size, {str(dtype)[6:]: (
            function, [x.to(dtype)] * matrices, (1 + matrices) * x.numel() * dtype.itemsize,
            2 * size.side**3 * (matrices == 2)) for dtype in (torch.float32, torch.bfloat16)})
    return measure


LESSONS = {
    "timing": Lesson("warm up, then wait for the GPU", "lessons/measure.py interleaved", three_stopwatches),
    "elu": Lesson("eager writes every step to memory", "kernels.py _elu",
                  one_by_one_and_fused(kernels.elu_reference, 8.5, kernels.elu)),
    "fusion": Lesson("GELU in one kernel: one read, one write", "kernels.py _map",
                     one_by_one_and_fused(kernels.gelu_reference, 14, kernels.gelu)),
    "coalescing": Lesson("a burst brings neighbours: use them all", "lessons/gpu.py _copy_lines", columns_and_rows),
    "recompute": Lesson("three sigmoids: compute again, do not read", "lessons/gpu.py _sigmoids_backward",
                        kept_and_recomputed, "triton"),
    "branches": Lesson("a warp runs both sides of a branch", "lessons/gpu.py BRANCHES", shuffled_and_sorted, "cuda"),
    "order": Lesson("programs that run together share L2", "kernels.py tile_of", ungrouped_and_grouped, "triton"),
    "precision": Lesson("fewer bits, and tensor cores", "parallel.py make_shard", float32_and_bf16(torch.mm, 2)),
    "width": Lesson("bound by memory: half the bytes, half the time", "parallel.py make_shard",
                    float32_and_bf16(torch.neg, 1)),
}
