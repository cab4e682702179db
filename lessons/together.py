"""All ranks in one process: a step's messages, and pdb in one rank, from where all others can be looked at.

    python -m lessons together --dp 2 --tp 2                        a step's messages, in the order of their sends
    python -m lessons together --dp 2 --tp 2 --break all_reduce     pdb in the rank that calls it first; `ranks[3]`, too
    python -m lessons together --break Unit.gather --rank 2         in rank 2, in any function of the reference
"""

import argparse
import functools
import inspect
import os
import pdb
import sys
from bdb import BdbQuit
from threading import current_thread

import torch
import torch.distributed as torch_dist

import collectives as dist
import train
from further import together
from lessons.puzzles import HERE
from model import GPTConfig
from further.bad_input import reject


class Log(together.World):
    """A World that notes its messages: [(sender, receiver, bytes, operation)]."""

    def __init__(self):
        super().__init__(2, worker="eager")  # by the draws of seed 2 some rank waits where `--break` stops
        self.log = []

    def post(self, ticket, tensor, what):
        self.log.append((ticket[1], ticket[2], tensor.nbytes, what or "message"))
        super().post(ticket, tensor, what)


def functions_called(name):
    """The codes of the functions and methods of this name in the reference: all_reduce, Unit.gather,
    collectives.isend. PyTorch's isend and irecv count, too, because a collective's messages go through them."""
    sent = map(inspect.unwrap, (torch_dist.isend, torch_dist.irecv))
    found = {function.__code__ for function in sent if function.__name__ == name}
    for module in [*sys.modules.values()]:
        if os.path.dirname(getattr(module, "__file__", None) or "") not in (str(HERE), str(HERE / "further")):
            continue
        for owner in module, *[kind for kind in vars(module).values() if isinstance(kind, type)]:
            for value in vars(owner).values():
                function = inspect.unwrap(getattr(value, "__func__", value))
                if inspect.isfunction(function) and function.__module__ == module.__name__:
                    whole = f".{module.__name__}.{function.__qualname__}"
                    found |= {function.__code__} if whole.endswith(f".{name}") else set()
    return found


def function(name):
    """For --break."""
    if not functions_called(name):
        raise argparse.ArgumentTypeError(f"{name} is no function of the five files or of further/: give e.g. --break "
                                         "all_reduce or --break Unit.gather")
    return name


class Debugger(pdb.Pdb):
    """pdb that stops in the first call of a function, on a rank if one is given, and says in its prompt where it is."""
    stopped = False

    def __init__(self, name, rank):
        super().__init__()
        self.reset()
        self.botframe = sys._getframe()
        for code in functions_called(name):
            on_rank = f"__import__('collectives').get_rank() == {rank}" if rank is not None else None
            self.set_break(code.co_filename, code.co_firstlineno, False, on_rank, code.co_name)
        self.set_continue()

    def interaction(self, frame, traceback):
        self.prompt = f"({current_thread().name}) "
        if not self.stopped:
            self.clear_all_breaks()
            print("`up` is the caller, `ranks` are all ranks, `c` goes on, `q` quits.")
        self.stopped = True
        super().interaction(frame, traceback)


def step_of(layout):
    """A training step on one rank; its loss."""
    config = GPTConfig(vocab_size=256, seq_len=128, n_layer=4, n_head=8, n_embd=256)
    net = train.parallelize(config, layout, "cpu", optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    x = torch.arange(8 * 128).view(8, 128).remainder(251).chunk(layout.dp)[dist.get_rank(net.groups.dp)].chunk(2)
    dist.barrier()  # so that all ranks are there when one stops
    loss = net.forward_backward(x, x)
    net.clip_grad_norm_(1.0)
    net.step()
    return loss.item()


def demo_together(dp, tp, pp, rank, **stop):
    """All ranks as threads of one process: a step's messages, pdb in one rank."""
    name = stop["break"]
    reject(8 % dp or 8 % tp or pp > 6, f"--dp {dp} --tp {tp} --pp {pp}: 8 sequences, 8 heads and 6 pieces cannot be "
           "cut so: give e.g. --dp 2 --tp 2 --pp 1")
    n = dp * tp * pp
    reject(rank is not None and not name, f"--rank {rank} is for --break: give --break all_reduce, too")
    reject(rank is not None and not 0 <= rank < n, f"--rank {rank}: there are ranks 0 to {n - 1}: give --rank 0")
    world = Log()
    if name:
        debugger = Debugger(name, rank)
        sys.settrace(debugger.trace_dispatch)
    try:
        losses = together.run(n, functools.partial(step_of, train.Layout(dp=dp, tp=tp, pp=pp)), world)
    except BdbQuit:
        return
    finally:
        sys.settrace(None)
    if name and not debugger.stopped:
        print(f"{'no rank has' if rank is None else f'rank {rank} has not'} called {name} in this step")
    for sender, receiver, nbytes, operation in world.log[-10:]:
        print(f"rank {sender} -> rank {receiver}  {nbytes:9,} bytes  {operation}")
    print(f"the last of {len(world.log)} messages, the model's start among them; loss {losses[0]:.6f}")
