"""What ranks that are threads of one process (further/together.py) wait for, when none of them can go on, and what a
debugger in one of them sees of the others.

Where a thread stands is read off its frames: which collective it is in, and for which layer, gradient or action.
"""

import os
import sys

import torch
from torch import nn

import parallel


class Seen:
    """A rank, as a debugger in another one sees it: what it waits for, its line, its tensors there.

        ranks[3]            shows them
        ranks[3]["x"]       its x, of the innermost of its calls that has one, or whose self has one
    """

    def __init__(self, task):
        self.task = task

    def frames(self):
        """Its calls, innermost first, without those that only hand on messages or belong to a debugger."""
        frame, found = self.task.frame(), []
        while frame:
            module = frame.f_globals.get("__name__", "")
            theirs = module.split(".")[0] in {"torch", *sys.stdlib_module_names}
            if not theirs and module not in ("further.together", __name__) and frame.f_code.co_filename != "<stdin>":
                found.append(frame)
            frame = frame.f_back
        return found

    def __getitem__(self, name):
        for frame in self.frames():
            for names in frame.f_locals, getattr(frame.f_locals.get("self"), "__dict__", {}):
                if name in names:
                    return names[name]
        raise KeyError(f"{self.task.name} has no {name} now")

    def __repr__(self):
        frames, task = self.frames(), self.task
        if not frames:
            return f"{task.name} has not begun, or has ended"
        frame = frames[0]
        tensors = [f"{name} {tuple(t.shape)}" for name, t in frame.f_locals.items() if isinstance(t, torch.Tensor)]
        place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
        return "; ".join([waiting(task) if task.waits_for else f"{task.name} can go on", place, *tensors])


def told(world):
    """Who waits for whom, in what, who has ended, and what nobody has received; "" where nobody waits."""
    stuck = [task for tasks in world.asleep.values() for task in tasks if task.waits_for]
    ended = [f"{rank.name} has ended" for rank in world.ranks if not rank.waits_for]
    lost = [f"rank {ticket[1]} has sent rank {ticket[2]} {tensor.nbytes} bytes in {what or 'a message'}"
            for ticket, (tensor, what) in world.messages.items()]
    return "; ".join([*map(waiting, stuck), *ended, *lost]) if stuck else ""


def waiting(task):
    what = ", ".join(filter(None, (operation(task.frame()), task.serves or purpose(task.frame()))))
    return f"{task.name} waits for {task.waits_for}" + f" in {what}" * bool(what)


def operation(frame):
    """The collective under way."""
    while frame and frame.f_code.co_name != "exchange":
        frame = frame.f_back
    return frame.f_locals["self"].name if frame else ""


def purpose(frame):
    """What a message is for, as far as the functions know that run: a parameter, a layer, an action of a pipeline."""
    serves, names = [], {}
    while frame:
        values = [*frame.f_locals.values()]
        serves += [x for x in values if isinstance(x, (parallel.Unit, nn.Module, parallel.Action))]
        for model in [*values, *getattr(frame.f_locals.get("self"), "pieces", {}).values()]:
            for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
                names |= {module: name} | {param: f"{name}.{leaf}" for leaf, param in module._parameters.items()}
        frame = frame.f_back
    first = next(iter(serves), "")
    if isinstance(first, parallel.Unit):
        first = names.get(first.params[0], "a unit")
    return str(names.get(first, first)).removeprefix("module.")
