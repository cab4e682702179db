"""All ranks in one process, to stop in one and look at the others, to draw a step, and to run hundreds.

    python -m lessons together --dp 2 --tp 2 --out step.svg         a step's messages, and its picture on a clock
    python -m lessons together --dp 2 --tp 2 --break all_reduce     pdb in the rank that calls it first; `ranks[3]`, too
    python -m lessons together --break Unit.gather --rank 2         in rank 2, in any function of the reference
    python -m lessons together --many-ranks 256                    a ring of 256, FSDP on 64, 1F1B on 1,024
"""

import argparse
import functools
import inspect
import math
import os
import pathlib
import pdb
import sys
import time
from bdb import BdbQuit
from collections import Counter
from threading import current_thread
from types import SimpleNamespace

import torch
import torch.distributed as torch_dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import collectives as dist
import parallel
import train
from further import together
from lessons.drawer import Cell, COLOURS, Frame, GREY, legend, svg_of
from lessons.pictures import check_picture
from lessons.puzzles import HERE
from model import GPTConfig
from safe.sizes import reject
from theory.clock import simulate
from theory.speed import MACHINES


# ---------------------------------------------------------------------------------------------------------------- clock

class Clock(together.World):
    """A World with a clock for each thread: FLOPs and messages take a machine's time. now: {thread: its time, ticket:
    when the message arrives}; spans: [(thread, what, start, end)]; log: [(end, sender, receiver, bytes, operation)]."""

    def __init__(self, machine):
        # An eager worker begins when it is started. By the draws of seed 2 some rank waits where `--break` stops.
        super().__init__(2, worker="eager")
        self.machine, self.now, self.spans, self.log = machine, Counter(), [], []

    def begin(self):
        """Forget what this rank has done so far, which was to make the model, and set its clock to 0."""
        me = current_thread()
        self.log = [sent for sent in self.log if f"rank {sent[1]}" != me.name]
        self.spans = [span for span in self.spans if span[0].removesuffix("'s worker") != me.name]
        self.now[me] = 0

    def spend(self, what, seconds):
        me = current_thread()
        if seconds > 0:
            self.spans.append((me.name, what, self.now[me], self.now[me] + seconds))
            self.now[me] += seconds

    def post(self, ticket, tensor, what):
        self.spend(what or "message", tensor.nbytes / self.machine.link)
        self.now[ticket] = self.now[current_thread()] + self.machine.hop
        self.log.append((self.now[ticket], ticket[1], ticket[2], tensor.nbytes, what or "message"))
        super().post(ticket, tensor, what)

    def follow(self, event):
        me = current_thread()
        if me is not me.rank:  # an operation, which begins when it is started
            self.now.setdefault(me, self.now[event])
        self.spend("wait", self.now[event] - self.now[me])


class Computing(TorchDispatchMode):
    """Inside, this rank's matrix products take time on its clock."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out, flops = op(*args, **kwargs or {}), flop_registry.get(op.overloadpacket)
        if flops:
            clock = current_thread().world
            clock.spend("compute", flops(*args, **kwargs or {}, out_val=out) / clock.machine.matmul)
        return out


# ---------------------------------------------------------------------------------------------------------- in one rank

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


def step_of(world, layout):
    """A training step on one rank; its loss."""
    config = GPTConfig(vocab_size=256, seq_len=128, n_layer=4, n_head=8, n_embd=256)
    net = train.parallelize(config, layout, "cpu", optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    x = torch.arange(8 * 128).view(8, 128).remainder(251).chunk(layout.dp)[dist.get_rank(net.groups.dp)].chunk(2)
    dist.barrier()
    world.begin()
    with Computing():
        loss = net.forward_backward(x, x)
        net.clip_grad_norm_(1.0)
        net.step()
    return loss.item()


def draw(world, path):
    """A lane for each thread: what it computes, sends, and waits for, on the clock."""
    kinds = dict(zip(dict.fromkeys(span[1] for span in world.spans), COLOURS)) | {"wait": GREY}
    unit = 830 / max(span[3] for span in world.spans)
    rows = {name: row for row, name in enumerate(sorted({span[0] for span in world.spans}), 2)}
    cells = [Cell(rows[name], start, "", end - start, kinds[what]) for name, what, start, end in world.spans]
    names = {row: name for name, row in rows.items()}
    pathlib.Path(path).write_text(svg_of(Frame(legend(kinds, 160 / unit) + cells, "", (), names, unit, 140)))


# ----------------------------------------------------------------------------------------------------------- many ranks

def ring():
    dist.all_reduce(torch.ones(4 * dist.get_world_size()))


def fsdp():
    n = dist.get_world_size()
    layers = [torch.nn.Linear(n, n, bias=False) for _ in range(3)]
    net = parallel.Parallel(layers, lambda output, _: output.sum(), parallel.make_mesh("cpu", dp=n), zero=3)
    dist.reset_traffic()
    net.pipeline.run(net.lists(1)[0], [torch.ones(1, n)], [None], torch.ones(()))


def one_f_one_b(m=8):
    """A stage is a product of two numbers, so F takes one product, and B two."""
    p, rank = dist.get_world_size(), dist.get_rank()
    stage = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1, 1), torch.nn.Unflatten(1, (1, 1)))
    pipeline = parallel.Pipeline({rank: stage}, {r: r for r in range(p)}, {rank: []}, {}, lambda y, target: y.sum(),
                                 None, lambda piece, x: (1, 1, 1), torch.float32, torch.device("cpu"))
    with Computing():
        x = torch.ones(1, 1, requires_grad=True)  # so that the first stage's B takes two products, too
        pipeline.run(lowered(p, m)[rank], [x] * m, [None] * m, torch.ones(()))


@functools.cache
def lowered(p, m):
    return parallel.lower(parallel.one_f_one_b(p, m))


def many(n):
    """Messages and bytes of a rank, and time on the clock: counted, and by the formulas."""
    machine, units = MACHINES["h200"], SimpleNamespace(matmul=2, link=math.inf, hop=0)  # a product takes 1
    steps = 2 * (n - 1)
    rows = [("ring all-reduce", n, ring, machine, steps, 16, steps * (machine.hop + 16 / machine.link)),
            ("FSDP, 3 layers", n // 4, fsdp, machine, 8 * (n // 4 - 1), n, None),
            ("1F1B, 8 micro-batches", 4 * n, one_f_one_b, units, 16, 4,
             simulate(parallel.one_f_one_b(4 * n, 8)).length)]
    for name, ranks, body, rates, messages, nbytes, formula in rows:
        world, start = Clock(rates), time.perf_counter()
        logs = together.run(ranks, lambda: body() or dist.traffic(), world)[ranks // 2].values()
        sent, weighs = (sum(getattr(log, what) for log in logs) for what in ("messages", "bytes"))
        clock = f", {max(world.now.values()):.6g} on the clock ({formula:.6g})" if formula else ""
        print(f"{name}, {ranks} ranks: {sent} messages ({messages}), {weighs:,} bytes "
              f"({messages * nbytes:,}){clock}; took {time.perf_counter() - start:.1f} s")


def demo_together(dp, tp, pp, out, many_ranks, rank, **stop):
    """All ranks as threads of one process: a step's messages, pdb in one rank, hundreds of ranks."""
    name = stop["break"]
    if out:
        check_picture(out, "--out")
    if many_ranks:
        reject(many_ranks < 8, f"--many-ranks {many_ranks}: FSDP takes a quarter of them: give --many-ranks 8 "
               "or more")
        return many(many_ranks)
    reject(8 % dp or 8 % tp or pp > 6, f"--dp {dp} --tp {tp} --pp {pp}: 8 sequences, 8 heads and 6 pieces cannot be "
           "shared out so: give e.g. --dp 2 --tp 2 --pp 1")
    n = dp * tp * pp
    reject(rank is not None and not name, f"--rank {rank} is for --break: give --break all_reduce, too")
    reject(rank is not None and not 0 <= rank < n, f"--rank {rank}: there are ranks 0 to {n - 1}: give --rank 0")
    world, layout = Clock(MACHINES["h200"]), train.Layout(dp=dp, tp=tp, pp=pp)
    if name:
        debugger = Debugger(name, rank)
        sys.settrace(debugger.trace_dispatch)
    try:
        losses = together.run(n, functools.partial(step_of, world, layout), world)
    except BdbQuit:
        return
    finally:
        sys.settrace(None)
    if name and not debugger.stopped:
        print(f"{'no rank has' if rank is None else f'rank {rank} has not'} called {name} in this step")
    for moment, sender, receiver, nbytes, operation in world.log[-10:]:
        print(f"{1e6 * moment:9.1f} us  rank {sender} -> rank {receiver}  {nbytes:9,} bytes  {operation}")
    print(f"the last of {len(world.log)} messages; a step takes {1e6 * max(world.now.values()):.0f} us on an H200's "
          f"clock; loss {losses[0]:.6f}")
    if out:
        draw(world, out)
