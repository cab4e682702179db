"""GPU lessons: each lesson's ways, to be timed by `bench.py lessons`."""

import functools
import math
from typing import NamedTuple

import torch

import kernels
from further import by_hand
from further.tiles import matmul
from kernels import triton
from lessons.eight_bits import sixteen_and_fewer_bits
from lessons.kernels import tiles_read
from lessons.ladder import build, missing, STEPS, timed


class Lesson(NamedTuple):
    """A lesson of lecture 5 or 6: one result computed in several ways, the slow one first."""
    says: str
    read: str        # the code to read: a file and a name in it
    ways: object     # function(device, n, side) -> {way: (function, inputs, bytes)}, of n numbers or side x side
    on_triton: bool = False


def one_by_one_and_fused(plain, passes, ours):
    """A lesson: PyTorch's operations one by one, in `passes` reads and writes of x, against one read and one write."""
    def ways(device, n, side):
        x = torch.randn(n, device=device)
        some = {"one by one": (plain, [x], passes * x.nbytes),
                "ours" if kernels.on_triton(x) else "one operation": (ours, [x], 2 * x.nbytes)}
        if device.type == "cuda":  # on a CPU torch.compile needs a C++ compiler
            some["torch.compile"] = torch.compile(plain, dynamic=False), [x], 2 * x.nbytes
        return some
    return ways


def columns_and_rows(device, n, side):
    """A copy that reads down columns or along rows. A GPU reads memory in sectors of 32 bytes, a CPU in lines of 64.
    Down a column each serves one number, unless a cache keeps it for the next column."""
    x, y = torch.randn(2, math.isqrt(n), math.isqrt(n), device=device)
    read = x.numel() * (32 if device.type == "cuda" else 64)
    return {"columns": (y.copy_, [x.T], read + y.nbytes), "rows": (y.copy_, [x], 2 * x.nbytes)}


def columns_and_tiles(device, n, side):
    """A product by the lecture's four kernels, each with the sectors that its warps read. On a CPU column by column,
    which reads all of A for each, and by PyTorch, in tiles: counted as 128 x 128."""
    if device.type == "cuda" and not missing(cuda=True):
        side = max(256, side // 2)
        laws = [law for _, law, _ in STEPS.values()] + [1 / 16]
        return {name: (*way, law * side**3) for (name, way), law in zip(timed(build(cuda=True), side).items(), laws)}
    a, b = torch.randn(2, side, side, device=device)
    tile = min(side, 128)

    def by_columns(a, b):
        return torch.stack([a @ column for column in b.T], 1)
    return {"by columns": (by_columns, [a, b], side * a.nbytes),
            "in tiles": (torch.mm, [a, b], 2 * side // tile * a.nbytes)}


def in_memory_and_flash(tokens):
    """A lesson: causal attention, heads of 64, with S and P in memory and without. Of either, (T, T) in float32 a head,
    a write and a read are counted."""
    def ways(device, n, side):
        t = min(tokens, n >> 12)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        qkv = torch.randn(1, t, 3, max(1, (n >> 12) // t), 64, device=device, dtype=dtype)
        moved = 4 * qkv.nbytes // 3  # q, k, v and the output
        return {"S, P in memory": (lambda qkv: kernels.attention_reference(*qkv.permute(2, 0, 3, 1, 4), True)[0], [qkv],
                                   moved + 16 * t * qkv.numel() // 192),
                "flash": (kernels.attention, [qkv], moved)}
    return ways


def ungrouped_and_grouped(device, n, side):
    """A product of matrices that exceed L2. Bytes are counted as if programs that run at the same time read each row
    and column from memory once."""
    side, tile, at_once = 2 * side, 128, kernels.programs_at_once(device)
    a, b = torch.randn(2, side, side, device=device, dtype=torch.bfloat16)
    count = triton.cdiv(side, tile)

    def elements(group):  # read and written
        return triton.cdiv(count**2, at_once) * tile * side * tiles_read(count, count, group, at_once) + side**2
    return {way: (functools.partial(matmul, tiles=(tile, tile, 64, group)), [a, b], 2 * elements(group))
            for way, group in (("row after row", 1), ("groups of 8 rows", 8))}


def float32_and_bf16(device, n, side):
    x = torch.randn(side, side, device=device)
    return {str(dtype)[6:]: (torch.mm, [x.to(dtype)] * 2, 3 * x.numel() * dtype.itemsize)
            for dtype in (torch.float32, torch.bfloat16)}


LESSONS = {
    "elu": Lesson("eager writes every step to memory", "kernels.py _elu",
                  one_by_one_and_fused(by_hand.elu_reference, 8.5, kernels.elu)),
    "fusion": Lesson("GELU in one kernel: one read, one write", "kernels.py _map",
                     one_by_one_and_fused(by_hand.gelu_reference, 14, kernels.gelu)),
    "coalescing": Lesson("a burst brings neighbours: use them all", "lessons/gpu.py columns_and_rows",
                         columns_and_rows),
    "tiling": Lesson("what is read once serves a whole tile", "lessons/ladder.py KERNELS", columns_and_tiles),
    **{f"flash-{tokens}": Lesson("S and P need not exist", "kernels.py attention", in_memory_and_flash(tokens))
       for tokens in (512, 4096)},
    "order": Lesson("programs that run together share L2", "further/tiles.py tile_of", ungrouped_and_grouped, True),
    "precision": Lesson("fewer bits, and tensor cores", "parallel.py master_dtype", float32_and_bf16),
    "eight-bits": Lesson("few rows wait for weights: halve their bytes", "lessons/eight_bits.py _few_rows",
                         sixteen_and_fewer_bits, True),
}
