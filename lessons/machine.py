"""A GPU counted: memories and links, sectors, banks, branches, waves, tiles, the roofline.

    python -m lessons machine

CS336 lectures 5 and 6; Ultra-Scale Playbook, the chapter on GPUs. docs/reading.md has the sources of sizes and rates.
"""

import math
import re
from collections import Counter

import torch

from model import PRESETS
from theory.speed import MACHINES, operations, PEAK_TFLOPS

WARP, SECTOR, BANKS, SMS = 32, 32, 32, 132  # threads; bytes; words of 4 bytes that shared memory gives at once; H100's
CLOCK = 1.83e9                               # of an H100 under load: 989 TFLOP/s are 132 SMs x 4,096 FLOPs a clock
CORES, HELD, SHARED = 128, 64, 227 << 10    # of an SM: cores; warps that it holds; bytes of shared memory for a block

LEVELS = {  # of an H100, nearest first: who shares it; its size; bytes/s one way by NVIDIA's papers, if they say so
    "registers": ("a thread", "256 KB an SM", None),
    "shared memory, L1": ("a block, an SM", "256 KB an SM", SMS * 128 * CLOCK),  # 128 bytes a clock and SM
    "L2": ("all SMs", "50 MB", None),
    "HBM": ("all SMs", "80 GB", 3.35e12),
    "NVLink": ("a node's GPUs", "18 links", 450e9),
    "PCIe 5.0": ("a GPU, its CPU", "16 lanes", 64e9),
    "PCIe 7.0": ("no H100 has it", "16 lanes", 242e9),
    "network": ("all nodes", "a card a GPU", 50e9)}
REACHED = {"hbm": "HBM, read plus written,", "link": "between GPUs of a node", "network": "between nodes"}  # of Machine


def apart(stride):
    """What the threads of a warp read: numbers of 4 bytes, `stride` numbers apart."""
    return [stride * thread for thread in range(WARP)]


def sectors(numbers):
    """Sectors that one load of a warp touches, one number a thread."""
    return len({4 * number // SECTOR for number in numbers})


def bank_passes(numbers):
    """Passes of shared memory for one load of a warp. In one pass each bank gives one number."""
    return max(Counter(number % BANKS for number in {*numbers}).values())


def branch_passes(ways):
    """Mean passes of a warp, where thread i takes branch ways[i]. A warp runs each branch that its threads take."""
    return sum(len({*ways[i:i + WARP]}) for i in range(0, len(ways), WARP)) / math.ceil(len(ways) / WARP)


def waves(programs, at_once):
    """(how many waves the programs run in, the share of the last wave's multiprocessors that have a program). So also
    tiles of `at_once` rows over so many rows, and the share of the last tile that is in use."""
    count = math.ceil(programs / at_once)
    return count, (programs - (count - 1) * at_once) / at_once


def reads(rows, columns):
    """Numbers that a product reads for each multiply-add, if one thread or program computes rows x columns outputs."""
    return (rows + columns) / (rows * columns)


def shared_by(tiles):
    """Bytes of shared memory for tiles of A and B, BM x BK and BK x BN in 16 bits, so many stages of them."""
    m, n, k, stages = tiles
    return 2 * (m + n) * k * stages


def show(title, cases, label, count):
    """A line a case: its label and its count."""
    print(f"\n{title}")
    for case in cases:
        print(f"  {label.format(case):34}{count(case)}")


def demo_machine():
    """What a GPU does with warps, waves, tiles and memory, counted."""
    rates = MACHINES["h100"]
    model = "gpt2-xl"
    weights = 2 * PRESETS[model].parameters()

    def level(name):
        whose, size, rate = LEVELS[name]
        return f"{whose:16}{size:14}" + (f"{rate / 1e9:7,.0f} GB/s{1e3 * weights / rate:8,.1f} ms" if rate else "")

    show(f"memories and links of an H100, nearest first; ms to read {model}'s 16-bit weights, {weights / 1e9:.1f} GB",
         LEVELS, "{}", level)
    reached = ", ".join(f"{what} {getattr(rates, name) / 1e9:,.0f} GB/s{' (estimate)' * (name in rates.estimated)}"
                        for name, what in REACHED.items())
    print(f"  {rates.name} reaches: {reached}")
    peaks = {gpu: next(tflops for name, tflops in PEAK_TFLOPS.items() if re.fullmatch(name, gpu))
             for gpu in ("V100", "A100", "H100", "B200")}
    listed = ", ".join(f"{gpu} {peak:,}" for gpu, peak in peaks.items())
    print(f"  TFLOP/s of 16-bit products, by datasheet: {listed}\n\n"
        f"{SMS} multiprocessors (SMs) x {CORES} cores = {SMS * CORES:,}. Of 8 warps of {WARP} threads a block has "
        f"{8 * WARP}. An SM holds {HELD} warps:\n{HELD // 8} such blocks, {HELD * WARP // CORES} threads a core, which "
        f"takes turns. So {SMS * HELD // 8:,} such blocks run at a time, and all others wait. "
        f"{CORES // WARP} schedulers an SM, one for {WARP} cores: a control unit serves a warp.")
    show(f"coalescing: a load of a warp of {WARP} threads, numbers of 4 bytes; sectors of {SECTOR} bytes",
         (1, 2, 4, 8, 32), "stride {}",
         lambda stride: "{:2} sectors, {:.1%} of their bytes are used".format(n := sectors(apart(stride)), 4 / n))
    show(f"shared memory: {BANKS} banks, one word of 4 bytes each at once", (1, 2, 32, 33), "stride {}",
         lambda stride: f"passes: {bank_passes(apart(stride))}")
    i = torch.arange(1 << 15)
    x = torch.randn(len(i), generator=torch.Generator().manual_seed(0)) > 0
    ways = {"x > 0, x random": x, "x > 0, x sorted": x.sort()[0], "thread % 4": i % 4, "warp % 4": i // WARP % 4}
    show("divergence: passes of a warp through an `if` (timed by python -m lessons ladder)", ways, "{}",
         lambda name: f"{branch_passes(ways[name].tolist()):.2f}")
    full = "{}, the last one {:.1%} full"
    show(f"waves: programs on {SMS} multiprocessors, one on each", (SMS, SMS + 1, 2 * SMS, 2048), "{:,} programs",
         lambda n: "waves: " + full.format(*waves(n, SMS)))
    show("the last tile, of 256 rows", (1536, 1537, 1600, 1792), "{:,} rows",
         lambda n: "tiles: " + full.format(*waves(n, 256)))
    show(f"shared memory of tiles BM x BN x BK, 16 bits, stages; a block has {SHARED >> 10} KB",
         ((64, 64, 64, 4), (128, 128, 64, 4), (256, 128, 64, 4), (256, 256, 64, 4)), "{0[0]} x {0[1]} x {0[2]}, {0[3]}",
         lambda tiles: f"{shared_by(tiles) >> 10} KB: " + (f"{SHARED // shared_by(tiles)} at once on an SM"
                                                          if shared_by(tiles) <= SHARED else "does not fit"))
    show("coarsening: numbers read for a multiply-add, where one thread or program has n x n outputs",
         (32, 64, 128), "n = {}", lambda n: f"{reads(n, n):.3f}, in place of {reads(1, 1):.0f}")
    found, ridge = operations(PRESETS[model], 8192), rates.matmul / rates.hbm

    def bound(name):
        flops, moved = found[name]
        seconds = max(flops / rates.matmul, moved / rates.hbm)
        waits = "compute" if flops / moved > ridge else "memory"
        return f"{flops / moved:8.1f} FLOPs a byte: {waits}, at least {1e6 * seconds:,.1f} us"

    show(f"{model}, 8192 tokens, bf16, forward. {rates.name}: {rates.matmul / 1e12:.0f} TFLOP/s of products, "
         f"{rates.hbm / 1e12:.2f} TB/s of copies, so the ridge is at {ridge:.0f} FLOPs a byte\n"
         "(python bench.py kernels times such operations, as shares of this roofline)", found, "{}", bound)
