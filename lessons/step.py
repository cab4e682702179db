"""A step is one list: what each rank does, in which order, what is there meanwhile, and what it sends.

    python -m lessons step --dp 2 --zero 3
    python -m lessons step --dp 1 --pp 2 --micro-batches 3 --schedule zb-h1
    python -m lessons step --dp 1 --tp 2 --sp --recompute block

Its flags are train.py's, and so are those of the lessons types, path and together.
"""

from collections import Counter
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

import collectives as dist
import train
from further import together
from safe.flags import check_layout, Settings

# Of the lessons of a layout, before their command lines.
SMALL = "--batch-size 24 --seq-len 16 --n-layer 2 --n-head 4 --n-embd 32 --device cpu --fast off".split()


def settings_of(parser, words):
    """(train.py's settings for a step of a small GPT, how many ranks they take)"""
    s = train.parse(parser, Settings, SMALL + words)
    return s, check_layout(s, train.config_of(s), 1, 1)


def trainer_of(s):
    """Of a small GPT in a layout, on this rank."""
    data = *train.split(np.arange(4000) % 251), train.Bytes()
    return train.Trainer(s, train.config_of(s), None, data, torch.device("cpu"))


class Watch:
    """Goes around the actions of a Pipeline. rows: of each [action, pieces that are whole, micro-batches that wait for
    their backward, pieces whose gradients wait for an A, bytes that the action has sent by collective]. beside: bytes
    that were sent between actions."""

    def __init__(self, pipeline):
        self.pipeline = pipeline
        self.rows = []
        self.beside = Counter()

    @contextmanager
    def __call__(self, action):
        if action is None:  # a wait within an action
            yield
            return
        self.beside.update(newly_sent())
        yield
        self.wait_for_messages(action)
        pieces = self.pipeline.pieces.items()
        whole = [i for i, units in self.pipeline.units.items() if all(map(is_whole, units))]
        waiting = [i for i, piece in pieces if any(param.grad is not None for param in piece.parameters())]
        alive = sorted((i, piece) for piece, i in self.pipeline.micro_batches)
        self.rows.append((action, whole, alive, waiting, newly_sent()))

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


def newly_sent():
    """{collective: bytes that this rank has sent since the last call}"""
    found = {name: log.bytes for name, log in dist.traffic().items() if log.bytes}
    dist.reset_traffic()
    return found


def one_step(s):
    """On this rank; its loss."""
    return trainer_of(s).step(0).loss


def watched(s):
    """One step of a small GPT on this rank: (its place in the pipeline, rows as Watch has them, {collective: bytes that
    the step sends beside its list}). Others than the first of each stage of the pipeline do the same as these: None."""
    trainer = trainer_of(s)
    net = trainer.net
    net.pipeline.around = watch = Watch(net.pipeline)
    dist.reset_traffic()
    trainer.step(0)
    watch.beside.update(newly_sent())
    rank = dist.get_rank(net.groups.pp)
    return (rank, watch.rows, watch.beside) if dist.get_rank() == net.mesh.mesh[rank].min() else None


def demo_step(s, ranks):
    """The list of a step: what each rank does, in which order, what is there meanwhile, and what it sends."""
    stages = [*filter(None, together.run(ranks, partial(watched, s), together.World(worker="eager")))]
    several = s.micro_batches > 1
    for rank, rows, _ in stages:
        print(f"rank {rank}   " + " ".join(name_of(action, several) for action, *_ in rows))
    print("\nwhole: pieces whose weights are there. alive: what waits for its backward. waiting: whose gradients "
          "wait for an A.\n")
    for rank, rows, beside in stages:
        print(f"rank {rank}  {'':8}{'whole':14}{'alive':26}{'waiting':14}sent")
        for action, whole, alive, waiting, bytes_sent in rows:
            alive = " ".join(f"{i}/{piece}" if several else str(piece) for i, piece in alive)
            cells = [name_of(action, several), numbers(whole), alive, numbers(waiting), in_bytes(bytes_sent)]
            print("        {:8}{:14}{:26}{:14}{}".format(*cells).rstrip())
        print(f"        beside the list, such as targets, tied ends, the norm: {in_bytes(beside) or 'nothing'}")


def in_bytes(sent):
    return ", ".join(f"{name} {nbytes:,} B" for name, nbytes in sent.items())


def numbers(pieces):
    return " ".join(map(str, pieces))


def name_of(action, several):
    """F2 is of piece 2. With several micro-batches F1/2 is of micro-batch 1 and piece 2."""
    return f"{action.kind}{action.micro_batch}/{action.stage}" if several else f"{action.kind}{action.stage}"
