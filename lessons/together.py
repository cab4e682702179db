"""All ranks in one process, to stop in one and look at the others, to draw a step, and to run hundreds.

    python -m lessons together --dp 2 --tp 2 --out step.svg         a step's messages, and its picture on a clock
    python -m lessons together --dp 2 --tp 2 --break all_reduce     pdb in the rank that calls it first; `ranks[3]`, too
    python -m lessons together --many-ranks 256                    a ring of 256, FSDP on 64, 1F1B on 1,024
"""

import builtins
import contextlib
import functools
import itertools
import math
import os
import pdb
import re
import time
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode

import collectives as dist
import parallel
import train
from further import together
from further.deadlock import waiting
from lessons.puzzles import HERE
from model import GPTConfig
from theory.clock import simulate
from theory.speed import MACHINES

CONFIG = GPTConfig(vocab_size=256, seq_len=128, n_layer=4, n_head=8, n_embd=256)


class Clock(together.World):
    """A World with a clock for each thread: FLOPs and messages take a machine's time. spans: [(thread, what, start,
    end)]; log: [(end, sender, receiver, bytes, operation)]."""

    def __init__(self, machine):
        # An eager worker begins when it is started. By the draws of seed 2 some rank waits where `--break` stops.
        super().__init__(2, worker="eager")
        self.machine, self.now, self.done, self.counters = machine, Counter(), Counter(), {}
        self.arrives, self.spans, self.log = {}, [], []

    def spend(self, what, seconds):
        me = together.current()
        if seconds > 0:
            self.spans.append((me.name, what, self.now[me], self.now[me] + seconds))
            self.now[me] += seconds

    def compute(self):
        """Count what this rank has computed since the last call."""
        me = together.current()
        if me in self.counters:
            flops = self.counters[me].get_total_flops()
            self.spend("compute", (flops - self.done[me]) / self.machine.matmul)
            self.done[me] = flops

    def until(self, moment):
        self.compute()
        self.spend("wait", moment - self.now[together.current()])

    def post(self, ticket, tensor, what):
        self.compute()
        self.spend(what or "message", tensor.nbytes / self.machine.link)
        self.arrives[ticket] = self.now[together.current()] + self.machine.hop
        self.log.append((self.arrives[ticket], ticket[1], ticket[2], tensor.nbytes, what or "message"))
        super().post(ticket, tensor, what)

    def moved(self, ticket):
        if done := super().moved(ticket):
            self.until(self.arrives.pop(ticket, 0))
        return done

    def follow(self, task):
        self.now.setdefault(together.current(), self.now[task])  # an operation begins when it is started
        self.compute()
        self.until(self.now[task])


class Seen:
    """A rank, as another one sees it in pdb: what it waits for, its line, its tensors. ranks[3]["x"] is its x."""

    def __init__(self, task):
        self.task = task

    def frame(self):
        frame = self.task.frame()
        while frame and not re.match(rf"{HERE}/(?!further/|lessons/)", frame.f_code.co_filename):
            frame = frame.f_back
        return frame

    def __getitem__(self, name):
        return self.frame().f_locals[name]

    def __repr__(self):
        frame, task = self.frame(), self.task
        if not frame:
            return f"{task.name} has not begun, or has ended"
        tensors = [f"{name} {tuple(t.shape)}" for name, t in frame.f_locals.items() if isinstance(t, torch.Tensor)]
        place = f"{os.path.relpath(frame.f_code.co_filename, HERE)}:{frame.f_lineno} {frame.f_code.co_name}"
        return "; ".join([waiting(task) if task.waits_for else f"{task.name} can go on", place, *tensors])


def stopping(name, world):
    """dist's function of this name, with pdb before its first call."""
    real, calls = getattr(dist, name), itertools.count()

    def stop(*arguments, **options):
        if next(calls) == 0:
            builtins.ranks = [*map(Seen, world.ranks)]
            print(f"{together.current().name} calls {name}. `up` is its caller, `ranks` are all, `c` goes on.")
            pdb.set_trace()
        return real(*arguments, **options)
    return patch.object(dist, name, stop)


def step_of(world, layout):
    """A training step on one rank; its loss."""
    net = train.parallelize(CONFIG, layout, "cpu", optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    x = torch.arange(8 * 128).view(8, 128).remainder(251).chunk(layout.dp)[dist.get_rank(net.groups.dp)].chunk(2)
    world.log.clear(), world.spans.clear(), world.now.clear()  # what made the model
    with FlopCounterMode(display=False) as world.counters[together.current()]:
        loss = net.forward_backward(x, x)
        net.clip_grad_norm_(1.0)
        net.optimizer.step()
    world.compute()
    return loss.item()


def draw(world, path):
    """A lane for each thread: what it computes, sends, and waits for, on the clock."""
    from lessons.pictures import box, COLOURS, legend, words, write_svg
    lanes = {name: 40 + 22 * i for i, name in enumerate(sorted({span[0] for span in world.spans}))}
    kinds = dict(zip(dict.fromkeys(span[1] for span in world.spans), [*COLOURS, "#4443", "#a83", "#38a"]))
    kinds["wait"] = "#8883"
    unit = 830 / max(span[3] for span in world.spans)
    parts = [*legend(6, 160, kinds), *(words(140, y + 12, name, 10, "end") for name, y in lanes.items())]
    parts += [box(150 + start * unit, lanes[name], (end - start) * unit, 18, kinds[what])
              for name, what, start, end in world.spans]
    write_svg(path, 50 + 22 * len(lanes), parts)


# ----------------------------------------------------------------------------------------------------------- many ranks

def ring():
    dist.all_reduce(torch.ones(4 * dist.get_world_size()))


def fsdp():
    n = dist.get_world_size()
    model = parallel.FlatFSDP(torch.nn.Sequential(*(torch.nn.Linear(n, n, bias=False) for _ in range(3))))
    dist.reset_traffic()
    model(torch.ones(1, n)).sum().backward()
    model.finish_grad_sync()


class Tiny(torch.nn.Linear):
    """A stage. F takes a unit of time, B two."""

    def forward(self, x):
        spend = together.current().world.spend
        y = super().forward(x if x.is_floating_point() else x[..., None].float())
        y.register_hook(lambda grad: spend("B", 2))
        spend("F", 1)
        return y


def one_f_one_b(m=8):
    p, rank, mesh = dist.get_world_size(), dist.get_rank(), {"pp": SimpleNamespace(get_group=lambda: None)}
    pipeline = parallel.Pipeline({rank: Tiny(1, 1)}, {r: r for r in range(p)}, mesh, lambda y, target: y.sum(),
                                 torch.float32, 1, torch.device("cpu"))
    actions = parallel.lowered_lists(parallel.one_f_one_b, p, m, 1)[rank]
    alone = {rank: SimpleNamespace(no_sync=contextlib.nullcontext)}
    pipeline.run(actions, [torch.ones(1, 1, dtype=torch.int64)] * m, [None] * m, torch.ones(()), alone)


def many(n):
    """Messages and bytes of a rank, and time on the clock: counted, and by the formulas."""
    machine, free = MACHINES["h200"], SimpleNamespace(matmul=1, link=math.inf, hop=0)
    steps = 2 * (n - 1)
    rows = [("ring all-reduce", n, ring, machine, steps, 16, steps * (machine.hop + 16 / machine.link)),
            ("FSDP, 3 layers", n // 4, fsdp, machine, 8 * (n // 4 - 1), n, None),
            ("1F1B, 8 micro-batches", 4 * n, one_f_one_b, free, 16, 4, simulate(parallel.one_f_one_b(4 * n, 8)).length)]
    for name, ranks, body, rates, messages, nbytes, formula in rows:
        world, start = Clock(rates), time.perf_counter()
        logs = together.run_joined(ranks, lambda: body() or dist.traffic(), world)[ranks // 2].values()
        sent, weighs = (sum(getattr(log, what) for log in logs) for what in ("messages", "bytes"))
        clock = f", {max(world.now.values()):.6g} on the clock ({formula:.6g})" if formula else ""
        print(f"{name}, {ranks} ranks: {sent} messages ({messages}), {weighs:,} bytes "
              f"({messages * nbytes:,}){clock}; took {time.perf_counter() - start:.1f} s")


def demo_together(dp, tp, pp, out, many_ranks, **stop):
    """All ranks as threads of one process: a step's messages, pdb in one rank, hundreds of ranks."""
    if many_ranks:
        return many(many_ranks)
    world, layout = Clock(MACHINES["h200"]), train.Layout(dp=dp, tp=tp, pp=pp)
    with stopping(stop["break"], world) if stop["break"] else contextlib.nullcontext():
        losses = together.run_joined(dp * tp * pp, functools.partial(step_of, world, layout), world)
    for moment, sender, receiver, nbytes, operation in world.log[-10:]:
        print(f"{1e6 * moment:9.1f} us  rank {sender} -> rank {receiver}  {nbytes:9,} bytes  {operation}")
    print(f"the last of {len(world.log)} messages; a step takes {1e6 * max(world.now.values()):.0f} us on an H200's "
          f"clock; loss {losses[0]:.6f}")
    if out:
        draw(world, out)
