"""What carries the messages of a test: each link of ours, on CPUs as where GPUs share memory or nodes stand apart."""

import contextlib
import os
import shutil
import tempfile
import time
from unittest.mock import patch

import torch
import torch.distributed as torch_dist

import collectives as dist
import fast.exchange
import fast.links
import fast.nccl
import fast.recorded
import fast.windows
import further.nodes
import kernels
from further.library import Library
from lessons.bench.timing import patched
from safe.messages import Watched


class DirectGlooLink(fast.nccl.Direct, Watched):
    """What GPUs of a node do, but for windows, on CPUs."""


class FileWindow(fast.windows.Window):
    """A window between CPUs: files that all processes map. Behind its bytes, flags for each (sender, channel)."""

    def __init__(self, link, nbytes):
        folder = [tempfile.mkdtemp() if link.rank == 0 else None]
        torch_dist.broadcast_object_list(folder, device="cpu")
        files = [torch.from_file(f"{folder[0]}/{r}", True, nbytes + 3 * link.size, dtype=torch.uint8)
                 for r in range(link.size)]
        torch_dist.barrier()
        shutil.rmtree(folder[0], ignore_errors=True)  # all have mapped them
        self.link, self.rank, self.size, self.handle = link, link.rank, link.size, self
        self.of = [file[:nbytes] for file in files]
        self.mine, self.flags = self.of[link.rank], [file[nbytes:].view(link.size, 3) for file in files]
        self.others = [(link.rank + i) % link.size for i in range(1, link.size)]
        if nbytes == fast.exchange.window_bytes(link.size):
            counters = -4 * fast.exchange.SUM_PROGRAMS * (2 * link.size + 2)  # of AllReduce; they soon pass 2^31
            self.mine[counters:].view(torch.int32).fill_((1 << 31) - 4)
            self.make_kernels("cpu")
            torch_dist.barrier()

    def barrier(self):
        torch_dist.barrier()

    def put_signal(self, to, channel, patience):
        """Set a flag that is down; `wait_signal` takes down one that is set."""
        self.change(self.flags[to][self.link.rank], channel, 0)

    def wait_signal(self, source, channel, patience):
        self.change(self.flags[self.link.rank][source], channel, 1)

    def change(self, flags, channel, before):
        while flags[channel] != before:
            time.sleep(0.0001)
        flags[channel] = 1 - before


class WindowGlooLink(DirectGlooLink):
    """What GPUs of a node do, on CPUs. With async_op operations take the ways of those beside the caller."""
    timeout = 0  # a FileWindow waits for ever

    def __init__(self, group):
        super().__init__(group)
        self.replays, self.windows = fast.recorded.Replays(), {}

    def run(self, name, async_op, algorithm, *arguments):
        self.beside = async_op
        super().run(name, False, algorithm, *arguments)
        return dist.Handle() if async_op else None

    def perform(self, algorithm, *arguments):
        self.aside = self.beside
        super().perform(algorithm, *arguments)

    def window(self, nbytes):
        key = nbytes, self.aside
        if key not in self.windows:
            self.windows[key] = FileWindow(self, nbytes)
        return self.windows[key]


@contextlib.contextmanager
def served_by(kind, group=None):
    """A new link, which knows nothing of earlier calls, carries a group's messages; then the old one again."""
    group = group or torch_dist.group.WORLD
    dist.link_of(group)  # one to come back to
    link = dist.process.links[group]["in use"] = kind(group)
    try:
        yield link
    finally:
        dist.use(group, "ours")
        link.close()


@contextlib.contextmanager
def nodes_of(count):
    """As if torchrun had started nodes of so many ranks: the world works in two levels, even if one has no use for it.
    """
    size = dist.get_world_size()
    dist.use(None, "ours")  # a link to come back to, made before there are nodes
    with patch.dict(os.environ, LOCAL_WORLD_SIZE=str(count)):
        grid = [range(first, first + count) for first in range(0, size, count)]
        levels = dist.rows_and_columns(grid)
        dist.process.registered[torch_dist.group.WORLD] = make = further.nodes.maker_of(levels)
        try:
            with served_by(make):
                yield
        finally:
            del dist.process.registered[torch_dist.group.WORLD]
            for group in levels:
                dist.destroy_process_group(group)


OWNERS = {"WINDOW_FROM": fast.windows, "WINDOW_BYTES": fast.windows,
          "SUM_FROM": fast.nccl, "ROW_BYTES": fast.nccl}
NEVER = 1 << 40
THROUGH_WINDOWS = {"WINDOW_FROM": 0, "WINDOW_BYTES": 1 << 14, "ROW_BYTES": 0}
WAYS = {  # way: which link carries the messages, and what is set otherwise than in SMALL
    "plain": (lambda cuda: dist.Link, {}),
    "torch": (lambda cuda: Library, {}),
    "ring": (lambda cuda: fast.nccl.NcclLink if cuda else Watched, {}),
    "messages": (lambda cuda: fast.nccl.NodeLink if cuda else DirectGlooLink, {}),
    "windows": (lambda cuda: fast.nccl.NodeLink if cuda else WindowGlooLink, THROUGH_WINDOWS),
    "kernel": (lambda cuda: fast.nccl.NodeLink if cuda else WindowGlooLink, THROUGH_WINDOWS | {"SUM_FROM": 0})}
# Without the ways that are not asked for.
SMALL = {"SUM_FROM": NEVER, "WINDOW_FROM": NEVER, "WINDOW_BYTES": 0}
# Blocks take many rounds.
SMALL_KERNELS = {"SHARES": 4, "SLOTS": 2, "SLOT_BYTES": 64, "LEAST_BYTES": 32, "SUM_PROGRAMS": 2,
                 "sum_slot_bytes": lambda ranks: 64}


def replaced(values):
    """These of OWNERS' names, each with another value for a while."""
    return patched([(OWNERS[name], name, value) for name, value in values.items()])


@contextlib.contextmanager
def carried(way, **changes):
    """The world's messages by one of WAYS or, if it is a number, between nodes of so many ranks."""
    cuda = torch_dist.get_backend() == "nccl"
    kind, values = WAYS.get(way, (None, {}))
    with replaced(SMALL | values | changes), contextlib.ExitStack() as stack:
        if way == "kernel" and not cuda:
            stack.enter_context(patch.multiple(fast.exchange, **SMALL_KERNELS))
            stack.enter_context(patch.object(kernels, "_choice", "triton"))
        stack.enter_context(served_by(kind(cuda)) if kind else nodes_of(way))
        yield
