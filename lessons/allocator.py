"""A caching allocator: why a GPU has more memory reserved than tensors take, and what fragments are.

    python -m lessons allocator

cudaMalloc waits for the GPU, so PyTorch asks for a large segment at a time, keeps it, and serves tensors from it: the
smallest free block that is large enough, of which the rest stays free. A freed block merges with its free neighbours.
Free blocks that lie apart cannot serve one large tensor: then a new segment is reserved, though there were bytes
enough. The rules are those of PyTorch's CUDACachingAllocator, without its pool for tensors below 1 MiB.
"""

import dataclasses

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from further.letters import tensors_in
from lessons.bench.timing import say
from model import GPT, PRESETS
from safe.reports import size, storages

MIB = 1 << 20


class Allocator:
    """segments: lists of blocks [bytes, who has it], from the first to the last byte; nobody has a free block."""

    def __init__(self):
        self.segments = []
        self.allocated = self.peak = 0

    def allocate(self, who, wanted):
        wanted = -(-wanted // 512) * 512
        fits = [(block[0], i, j) for i, segment in enumerate(self.segments) for j, block in enumerate(segment)
                if block[1] is None and block[0] >= wanted]
        _, i, j = min(fits, default=(0, len(self.segments), 0))
        if not fits:
            self.segments.append([[20 * MIB if wanted < 10 * MIB else -(-wanted // (2 * MIB)) * 2 * MIB, None]])
        segment = self.segments[i]
        rest = segment[j][0] - wanted
        segment[j:j + 1] = [[wanted, who]] + [[rest, None]] * (rest > 0)
        self.allocated += wanted
        self.peak = max(self.peak, self.allocated)
        return i

    def free(self, who, i):
        merged = []
        for n, owner in self.segments[i]:
            if owner is who:
                owner = None
                self.allocated -= n
            if owner is None and merged and merged[-1][1] is None:
                merged[-1][0] += n
            else:
                merged.append([n, owner])
        self.segments[i] = merged

    def reserved(self):
        return sum(n for segment in self.segments for n, _ in segment)


class Served(TorchDispatchMode):
    """Inside, an allocator serves each new tensor, and takes its memory back when nobody holds the tensor."""

    def __init__(self, allocator):
        super().__init__()
        self.allocator, self.places = allocator, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        older = storages(tensors_in((args, kwargs)))
        out = function(*args, **(kwargs or {}))
        for storage in [storage for storage in self.places if storage.expired()]:
            self.allocator.free(storage, self.places.pop(storage))
        for storage, n in storages(tensors_in(out)).items():
            if n and storage not in older and storage not in self.places:
                self.places[storage] = self.allocator.allocate(storage, n)
        return out


def demo_allocator():
    """What tensors take, and what a caching allocator reserves, where all steps are alike and where lengths vary."""
    config = dataclasses.replace(PRESETS["gpt2"], n_layer=4)
    for name, lengths in {"1,024 tokens in each step": [1024] * 6,
                          "448 to 1,024 tokens": [448, 768, 576, 1024, 640, 896]}.items():
        allocator = Allocator()
        net = GPT(config, seed=None)  # on the meta device: shapes, and no memory
        with Served(allocator):
            for T in lengths:
                logits = net(torch.zeros(4, T, dtype=torch.int64, device="meta"))
                logits.float().logsumexp(-1).mean().backward()
                del logits
                net.zero_grad()
        free = [n for segment in allocator.segments for n, who in segment if who is None]
        say(f"{name:26} tensors at most {size(allocator.peak):>11}, reserved {size(allocator.reserved()):>11}; free at "
            f"the end {size(sum(free)):>11} in {len(free)} pieces, the largest {size(max(free))}")
