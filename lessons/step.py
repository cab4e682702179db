"""A step is one list: what each rank does, in which order, what is there meanwhile, and what it sends.

    python -m lessons step --dp 2 --zero 3
    python -m lessons step --dp 1 --pp 2 --micro-batches 3 --schedule zb-h1
    python -m lessons step --dp 1 --tp 2 -- --sp --recompute block           further flags of train.py
"""

from collections import Counter
from contextlib import contextmanager

import numpy as np
import torch

import collectives as dist
import train
from further import together
from safe.flags import check_layout, Parser, Settings


class Watch:
    """Goes around the actions of a Pipeline. rows: of each [action, pieces that are whole, micro-batches that wait for
    their backward, pieces whose gradients wait for an A, bytes that the action has sent by collective]."""

    def __init__(self, pipeline):
        self.pipeline = pipeline
        self.rows = []

    @contextmanager
    def __call__(self, action):
        if action is None:  # a wait within an action
            yield
            return
        before = sent()
        yield
        self.wait_for_messages(action)
        more = {name: nbytes - before.get(name, 0) for name, nbytes in sent().items()}
        pieces = self.pipeline.pieces.items()
        whole = [i for i, units in self.pipeline.units.items() if all(map(is_whole, units))]
        waiting = [i for i, piece in pieces if any(param.grad is not None for param in piece.parameters())]
        alive = sorted((i, piece) for piece, i in self.pipeline.micro_batches)
        self.rows.append((action, whole, alive, waiting, {name: nbytes for name, nbytes in more.items() if nbytes}))

    def wait_for_messages(self, action):
        """Of G and A, so that their bytes are counted here. (A step does not wait.)"""
        for unit in self.pipeline.units[action.stage] if action.kind == "G" else ():
            if unit.gathering:
                unit.gathering.wait()
        for unit in self.pipeline.averaged[action.stage] if action.kind == "A" else ():
            if unit.sending:
                unit.sending[0].wait()


def is_whole(unit):
    """Whether the weights of a unit are there: gathered, and not dropped."""
    return unit.weights.untyped_storage().size() and (unit.users or not unit.zero)


def sent():
    return {name: log.bytes for name, log in dist.traffic().items()}


def step(s):
    """One step of a small GPT on this rank: (its place in the pipeline, rows as Watch has them, {collective: bytes that
    the step sends beside its list}). Others than the first of each stage of the pipeline do the same as these: None."""
    data = *train.split(np.arange(4000) % 251), train.Bytes()
    trainer = train.Trainer(s, train.config_of(s), None, data, torch.device("cpu"))
    net = trainer.net
    net.pipeline.around = watch = Watch(net.pipeline)
    dist.reset_traffic()
    trainer.step(0)
    beside = Counter(sent())
    for *_, bytes_sent in watch.rows:
        beside.subtract(bytes_sent)
    rank = dist.get_rank(net.groups.pp)
    return (rank, watch.rows, +beside) if dist.get_rank() == net.mesh.mesh[rank].min() else None


def settings_of(dp, tp, pp, zero, micro_batches, schedule, more):
    """(train.py's settings for a step of a small GPT, how many ranks they take). more: further flags of train.py."""
    flags = (f"--dp {dp} --tp {tp} --pp {pp} --zero {zero} --micro-batches {micro_batches} --schedule {schedule} "
             f"--batch-size {dp * micro_batches} --seq-len 16 --n-layer {max(2, 2 * pp - 2)} --n-head 4 --n-embd 32 "
             "--device cpu --fast off")
    s = train.parse(Parser(add_help=False), Settings, flags.split() + more)
    return s, check_layout(s, train.config_of(s), 1, 1)


def demo_step(dp, tp, pp, zero, micro_batches, schedule, more):
    """The list of a step: what each rank does, in which order, what is there meanwhile, and what it sends. Further
    flags are train.py's, e.g. --sp, --recompute block."""
    s, ranks = settings_of(dp, tp, pp, zero, micro_batches, schedule, more)
    stages = [*filter(None, together.run(ranks, lambda: step(s), together.World(worker="eager")))]
    several = s.micro_batches > 1
    for rank, rows, _ in stages:
        print(f"rank {rank}   " + " ".join(name_of(action, several) for action, *_ in rows))
    print("\nwhole: pieces whose weights are there. alive: what waits for its backward. waiting: whose gradients "
          "wait for an A.\n")
    for rank, rows, beside in stages:
        print(f"rank {rank}  {'':8}{'whole':14}{'alive':22}{'waiting':14}sent")
        for action, whole, alive, waiting, bytes_sent in rows:
            alive = " ".join(f"{i}/{piece}" if several else str(piece) for i, piece in alive)
            cells = [name_of(action, several), numbers(whole), alive, numbers(waiting), in_bytes(bytes_sent)]
            print("        {:8}{:14}{:22}{:14}{}".format(*cells).rstrip())
        print(f"        beside the list, such as targets, tied ends, the norm: {in_bytes(beside) or 'nothing'}")


def in_bytes(sent):
    return ", ".join(f"{name} {nbytes:,} B" for name, nbytes in sent.items())


def numbers(pieces):
    return " ".join(map(str, pieces))


def name_of(action, several):
    """F2 is of piece 2. With several micro-batches F1/2 is of micro-batch 1 and piece 2."""
    return f"{action.kind}{action.micro_batch}/{action.stage}" if several else f"{action.kind}{action.stage}"
