"""A GPU counted: sectors, banks, branches, waves, tiles and the roofline, on a laptop; on a GPU timed beside it.

    python -m lessons machine

CS336 lectures 5 and 6; Ultra-Scale Playbook, the chapter on GPUs. docs/reading.md has the table of sizes and rates.
"""

import functools
import math
from collections import Counter

import torch
import torch.nn.functional as F

import kernels
from lessons.kernels import TILES
from lessons.measure import say, seconds_of
from model import PRESETS
from theory.speed import MACHINES, operations

WARP, SECTOR, BANKS, SMS = 32, 32, 32, 132  # threads; bytes; words of 4 bytes that shared memory gives at once; H100's


def sectors(stride, first=0, width=4):
    """Sectors that one load of a warp touches: its threads read numbers of `width` bytes, `stride` numbers apart."""
    return len({width * (first + stride * thread) // SECTOR for thread in range(WARP)})


def bank_passes(stride):
    """Passes of shared memory for one load of a warp. In one pass each bank gives one word."""
    return max(Counter(word % BANKS for word in {stride * thread for thread in range(WARP)}).values())


def branch_passes(ways):
    """Mean passes of a warp, where thread i takes branch ways[i]. A warp runs each branch that its threads take."""
    return sum(len({*ways[i:i + WARP]}) for i in range(0, len(ways), WARP)) / math.ceil(len(ways) / WARP)


def waves(programs, at_once=SMS):
    """(how many waves the programs run in, the share of the last wave's multiprocessors that have a program). So also
    tiles of `at_once` rows over so many rows, and the share of the last tile that is in use."""
    count = math.ceil(programs / at_once)
    return count, (programs - (count - 1) * at_once) / at_once


def reads(rows, columns):
    """Numbers that a product reads for each multiply-add, if one thread or program computes rows x columns outputs."""
    return (rows + columns) / (rows * columns)


def show(title, rows):
    """rows: [(label, what is counted, how to make (function, its inputs) that a GPU times, or None)]"""
    say(f"\n{title}")
    for label, counted, make in rows:
        time = ""
        if make and torch.cuda.is_available():
            took, = seconds_of({label: make()}, torch.device("cuda"), 5).values()
            time = f"{1e6 * took[0]:12,.1f} us"
        say(f"  {label:34}{counted:52}{time}")


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, dtype=dtype, device="cuda")


def product(m, n, k, tiles):
    return functools.partial(kernels.matmul, tiles=tiles), [random(m, k), random(k, n)]


def strided(stride):
    """A copy of 2^24 numbers, each `stride` numbers after the one before."""
    return torch.empty(1 << 24, device="cuda").copy_, [random(stride << 24, dtype=torch.float32)[::stride]]


def timed_operations(config, tokens):
    """{name: (function, inputs)}, as `operations` names them."""
    c, v = config.n_embd, config.vocab_size
    x, y, up, w, b = random(tokens, c), random(tokens, c), random(tokens, config.hidden), random(c), random(c)
    qkv = random(tokens // config.seq_len, config.seq_len, 3, config.n_head, config.head_dim)
    targets = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    return {"layer norm": (kernels.layer_norm, [x, w, b]), "q, k, v": (F.linear, [x, random(3 * c, c)]),
            "attention": (kernels.attention, [qkv]), "projection": (F.linear, [x, random(c, c)]),
            "x + y": (torch.add, [x, y]), "MLP, up": (F.linear, [x, random(config.hidden, c)]),
            "GELU": (kernels.gelu, [up]), "MLP, down": (F.linear, [up, random(c, config.hidden)]),
            "head": (F.linear, [x, random(v, c)]),
            "cross-entropy": (kernels.cross_entropy, [random(tokens, v), targets])}


def demo_machine(model, machine):
    """What a GPU does with warps, waves, tiles and memory: counted, and on a GPU timed."""
    config, rates, tokens = PRESETS[model], MACHINES[machine], 8192
    tokens -= tokens % config.seq_len
    partial, count, at_once = functools.partial, 1 << 15, SMS
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        at_once = gpu.multi_processor_count
        fields = "multi_processor_count", "regs_per_multiprocessor", "shared_memory_per_multiprocessor", "L2_cache_size"
        say("\n".join([gpu.name, *(f"  {name:34}{getattr(gpu, name, '-')}" for name in (*fields, "total_memory"))]))
    show(f"coalescing: a load of a warp of {WARP} threads, numbers of 4 bytes; sectors of {SECTOR} bytes", [
        (f"stride {stride}", f"{n:2} sectors, {4 * WARP / SECTOR / n:.1%} of their bytes are used",
         partial(strided, stride)) for stride in (1, 2, 4, 8, 32) for n in [sectors(stride)]])
    show(f"shared memory: {BANKS} banks, one word of 4 bytes each at once", [
        (f"stride {stride}", f"passes: {bank_passes(stride)}", None) for stride in (1, 2, 32, 33)])
    signs = (torch.randn(count, generator=torch.Generator().manual_seed(0)) > 0).tolist()
    show("divergence: passes of a warp through an `if` (timed by python -m lessons extension)", [
        (label, f"{branch_passes(ways):.2f}", None) for label, ways in (
            ("x > 0, x random", signs), ("x > 0, x sorted", sorted(signs)),
            ("thread % 4", [i % 4 for i in range(count)]), ("warp % 4", [i // WARP % 4 for i in range(count)]))])
    show(f"waves: programs on {at_once} multiprocessors, one on each", [
        (f"{n:,} programs", "waves: {}, the last one {:.1%} full".format(*waves(n, at_once)),
         partial(product, n * TILES[0], TILES[1], 8192, TILES)) for n in (at_once, at_once + 1, 2 * at_once, 2048)])
    show("the last tile, of 256 rows", [
        (f"{n:,} rows", "tiles: {}, the last one {:.1%} full".format(*waves(n, 256)),
         partial(product, n, 8192, 1600, TILES)) for n in (1536, 1537, 1600, 1792)])
    show("coarsening: numbers read for a multiply-add, where one thread or program has several outputs", [
        (f"{rows} x {columns} outputs", f"{reads(rows, columns):.3f}",
         partial(product, 4096, 4096, 4096, (rows, columns, 32, 8)) if rows > 4 else None)
        for rows, columns in ((1, 1), (4, 4), (32, 32), (64, 64), (256, 128))])
    ridge = rates.matmul / rates.hbm
    made = timed_operations(config, tokens) if torch.cuda.is_available() else {}
    show(f"{model}, {tokens:,} tokens, bf16, forward. {rates.name}: {rates.matmul / 1e12:.0f} TFLOP/s of products, "
         f"{rates.hbm / 1e12:.2f} TB/s of copies, so the ridge is at {ridge:.0f} FLOPs a byte", [
             (name, f"{flops / moved:8.1f} FLOPs a byte: {'compute' if flops / moved > ridge else 'memory'}, at least "
              f"{1e6 * max(flops / rates.matmul, moved / rates.hbm):,.1f} us", lambda name=name: made[name])
             for name, (flops, moved) in operations(config, tokens).items()])
