"""Links measured pair by pair: on CPUs sockets, on GPUs NCCL's messages beside copies.

    python -m lessons links --ranks 4 --json FILE
    python bench.py plan --machine FILE --gpus 4 --model tiny --dtype fp32

CS336 lecture 8, 1.2 and 1.3. docs/reading.md, "The machine", explains what `nvidia-smi topo -m` prints.
"""

import argparse
import dataclasses
import functools
import itertools
import shutil
import subprocess

import torch
import torch.distributed as torch_dist

import collectives as dist
from fast.links import fast_link
from lessons.bench.rates import measure_machine
from lessons.bench.timing import interleaved, is_first, ROWS, say, write_json
from model import PRESETS
from safe.files import check_file
from safe.sizes import reject

SHORT, LONG = 1 << 10, 1 << 24  # bytes


def check(ranks, json):
    reject(ranks == 1, "--ranks 1: one process has nobody to send to; give --ranks 2")
    if json:
        check_file(json, "--json", ROWS)


def there_and_back(link, i, j, message):
    """By messages: rank i sends, j sends it back. Other ranks do nothing."""
    for source, to in (i, j), (j, i):
        link.exchange([(message, to)] * (link.rank == source), [(message, source)] * (link.rank == to))


def written_and_read(window, i, j, message):
    """By copies: rank i writes into j's memory, and reads it from there. Rank j does nothing."""
    if window.rank == i:
        place = window.place(j, message)
        window.copy(place, message)
        window.copy(message, place)


def ways(link):
    """{what carries a message: function(rank, rank, message)}: the textbook's link, and `link`, the fastest. Call it on
    all ranks."""
    textbook, ours = dist.Link(link.group).during("links"), link.during("links")
    found = {"sockets" if link.device == "cpu" else "NCCL": functools.partial(there_and_back, textbook)}
    window = ours.window(LONG) if hasattr(ours, "window") else None
    if window:
        found["copies"] = functools.partial(written_and_read, window)
    return found


def demo_links(json=""):
    """Links pair by pair: microseconds of a short message, GB/s of a long one, by each way that this machine has."""
    link, n = fast_link(torch_dist.group.WORLD), dist.get_world_size()
    device, found, slowest = torch.device(link.device), ways(link), float("inf")
    if device.type == "cuda" and is_first() and shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi", "topo", "-m"])
    messages = [torch.zeros(size, dtype=torch.uint8, device=device) for size in (SHORT, LONG)]
    say(f"one way of {SHORT:,} bytes, us, and of {LONG:,}, GB/s; all other ranks wait\n"
        f"{'ranks':8}" + "".join(f"{way + ', us':>14}{'GB/s':>9}" for way in found))
    for pair in itertools.combinations(range(n), 2):
        took = interleaved({(way, len(t)): functools.partial(function, *pair, t)
                            for way, function in found.items() for t in messages}, device, 5, calls=3)
        rates = {way: 2 * LONG / took[way, LONG] for way in found}
        say(f"{pair[0]} - {pair[1]:<4}" + "".join(f"{1e6 * took[way, SHORT] / 2:14.1f}{rates[way] / 1e9:9.2f}"
                                                  for way in found))
        slowest = min(slowest, max(rates.values()))  # a ring waits for it
    link.close()
    if json:
        dtype, preset = ("bf16", "gpt2-xl") if device.type == "cuda" else ("fp32", "tiny")
        machine = dataclasses.replace(measure_machine(device, dtype, PRESETS[preset]), link=slowest)
        write_json(argparse.Namespace(what="links", json=json), device, machine=dataclasses.asdict(machine))
        say(f"{json}: this machine, with links of {slowest / 1e9:.2f} GB/s, the slowest pair's; all else measured now")
