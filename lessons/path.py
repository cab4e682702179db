"""The calls of a training step: from Trainer.step to each collective of rank 0, and from there to isend.

A collective with async_op, as those of G and A, is run by a worker. Its path is the caller's, and then the worker's.

    python -m lessons path --dp 2 --tp 2
"""

import os
import sys
from functools import partial
from threading import current_thread

import train
from further import together
from lessons.puzzles import HERE
from lessons.step import one_step

ROOMS = "train.py", "parallel.py", "model.py", "collectives.py", "further", "fast"


class Calls(together.World):
    """A World that notes for each of rank 0's messages who called whom: {names: [(file, line, name)]}, in two parts.

    above: from Trainer.step to the collective. below: from the collective to the function that sends.
    """

    def __init__(self):
        super().__init__(worker="eager")
        self.above, self.below = {}, {}
        self.begun = {}  # a rank, or an operation of its worker: the calls that began it

    def can_go_on(self, task):
        self.begun.setdefault(task, calls_of(sys._getframe()) if task.rank is not task else [])
        super().can_go_on(task)

    def post(self, ticket, tensor, what):
        task = current_thread()
        if task.rank.name == "rank 0":
            calls = self.begun[task] + calls_of(sys._getframe())
            if calls[0][2] in ("step", "Trainer.step"):
                first = [file for file, *_ in calls].index("collectives.py")
                for found, part in (self.above, calls[:first + 1]), (self.below, calls[first:]):
                    found.setdefault(tuple(name for *_, name in part), part)
        super().post(ticket, tensor, what)


def calls_of(frame):
    """[(file, line, name)] of the functions of ROOMS that run, the outermost first, from Trainer.step if that runs."""
    found = []
    while frame:
        code = frame.f_code
        file = os.path.relpath(code.co_filename, HERE)
        if file.split(os.sep)[0] in ROOMS and file != os.path.join("further", "together.py"):
            found.append((file, frame.f_lineno, getattr(code, "co_qualname", code.co_name)))
        frame = None if code is train.Trainer.step.__code__ else frame.f_back
    return found[::-1]


def show(paths):
    """As a tree: of each path only what differs from the one before."""
    before = ()
    for names, calls in paths.items():
        same = len(os.path.commonprefix([before, names]))
        for depth, (file, line, name) in [*enumerate(calls)][same:]:
            print(f"{file + ':' + str(line):26}{'  ' * depth}{name}")
        before = names


def demo_path(s, ranks):
    """The calls of a step: from Trainer.step to each collective of rank 0, and from there to Link.exchange."""
    world = Calls()
    together.run(ranks, partial(one_step, s), world)
    print("a function, and the line at which it calls the next one; a path that comes again is left out\n")
    show(world.above)
    print()
    show(dict(sorted(world.below.items(), key=lambda path: [call[:2] for call in path[1]])))  # as the lines stand
