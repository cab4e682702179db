"""Links measured pair by pair: on CPUs sockets, on GPUs NCCL's messages.

    python -m lessons links --ranks 4

CS336 lecture 8, 1.2 and 1.3. docs/reading.md, "The machine", explains what `nvidia-smi topo -m` prints.
"""

import functools
import itertools
import shutil
import subprocess

import torch

import collectives as dist
from lessons.bench.timing import interleaved, is_first, say
from further.bad_input import reject

SHORT, LONG = 1 << 10, 1 << 24  # bytes


def check(ranks):
    reject(ranks == 1, "--ranks 1: one process has nobody to send to; give --ranks 2")


def there_and_back(i, j, message):
    """Rank i sends, j sends it back. Other ranks do nothing."""
    for source, to in (i, j), (j, i):
        if dist.get_rank() == source:
            dist.send(message, to)
        elif dist.get_rank() == to:
            dist.recv(message, source)


def demo_links():
    """Links pair by pair: microseconds of a short message, GB/s of a long one."""
    device = torch.device(dist.link_of(None).device)
    cuda = device.type == "cuda"
    if cuda and is_first() and shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi", "topo", "-m"])
    messages = {size: torch.zeros(size, dtype=torch.uint8, device=device) for size in (SHORT, LONG)}
    say(f"one way of {SHORT:,} bytes, us, and of {LONG:,}, GB/s, by {'NCCL' if cuda else 'sockets'}; all other ranks "
        f"wait\n{'ranks':8}{'us':>10}{'GB/s':>9}")
    for i, j in itertools.combinations(range(dist.get_world_size()), 2):
        took = interleaved({size: functools.partial(there_and_back, i, j, message)
                            for size, message in messages.items()}, device, 5, calls=3)
        say(f"{i} - {j:<4}{1e6 * took[SHORT] / 2:10.1f}{2 * LONG / took[LONG] / 1e9:9.2f}")
