"""What ranks that are threads of one process (further/together.py) wait for, when none of them can go on.

Where a thread stands is read off its frames: which collective it is in, and for which layer, gradient or action.
"""

from torch import nn

import parallel
from further.buckets import Bucket


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
        serves += [x for x in values if isinstance(x, (Bucket, nn.Module, parallel.Action))]
        for model in [*values, *getattr(frame.f_locals.get("self"), "stages", {}).values()]:
            for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
                names |= {module: name} | {param: f"{name}.{leaf}" for leaf, param in module._parameters.items()}
        frame = frame.f_back
    first = next(iter(serves), "")
    if isinstance(first, Bucket):
        first = names.get(first.params[0], f"bucket of {first.numel}")
    return str(names.get(first, first)).removeprefix("module.")
