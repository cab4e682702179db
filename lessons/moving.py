"""What the pictures that move show, computed here and drawn by explore.js: data of the pages, frames of the steps.

`python -m lessons explore` serves them with controls, `python -m lessons pages` writes them for fixed settings. The
steps of ring, ZeRO-3 and tensor parallelism are the code's own, which runs here with its ranks as threads.
"""

import argparse
import functools
import itertools

import torch
import torch.distributed as torch_dist

import collectives as dist
import parallel
import train
from further.lists import parse, size_of_schedule
from further.schedules import SCHEDULES
from lessons.plan import rows_of
from lessons.step import Watch
from model import GPT, GPTConfig, PRESETS
from parallel import names_of, ScheduleError
from safe.reports import parameters_in_words
from safe.sizes import reject
from theory.clock import bubble, critical_path, simulate
from theory.speed import MACHINES


# ------------------------------------------------------------------------------------------------------------- pipeline

def number(query, name, default, most, kind=int):
    """A number that a query gives, at least 1, or 0.01 if it need not be whole."""
    least = 1 if kind is int else 0.01
    text = query.get(name, str(default))
    try:
        value = kind(text[:20])
    except ValueError:
        value = 0
    reject(not least <= value <= most, f"{name} {text[:20]}: give a number from {least} to {most}")
    return value


def choice(query, name, default, known):
    reject(query.get(name, default) not in known, f"{name}: give one of {', '.join(known)}")
    return query.get(name, default)


def picture(spans, critical=()):
    """Spans of a Timeline, or of a run, for the browser. ranks: of each its actions, [name, kind, stage, start, end, is
    it critical?]; held: [time, how many micro-batches' activations it holds then] at each change."""
    stages = len({action.stage for row in spans for action, *_ in row})
    share = {"F": 1, "B": -1, "W": -1, "I": 0}
    ranks, held = [], []
    for rank, row in enumerate(spans):
        names = names_of([action for action, *_ in row], rank)
        ranks.append([[name, action.kind, action.stage, start, end, action in critical]
                      for name, (action, start, end) in zip(names, row)])
        count = itertools.accumulate(share[action.kind] * len(spans) / stages for action, *_ in row)
        held.append([[0, 0], *([end, n] for (*_, end), n in zip(row, count))])
    return {"ranks": ranks, "held": held, "length": max(end for row in spans for *_, end in row)}


def text_of(lists):
    return "\n".join(f"rank {rank}  " + " ".join(names_of(actions, rank)) for rank, actions in enumerate(lists))


def stopped(error):
    """Lists that cannot run, with the first line of `check`'s reason, and the number of the action at which a rank
    stops. Transfers are left out, because `check` has added them."""
    lists = [[action for action in actions if action.kind in "FBIW"] for actions in error.lists]
    at = {rank: sum(action.kind in "FBIW" for action in error.lists[rank][:i]) for rank, i in error.at.items()}
    return {"why": str(error).partition("\n")[0], "at": at, "text": text_of(lists)}


def pipeline(query):
    """A schedule on a clock. query: {"schedule", "p", "m", "v", "f", "i", "w"}, or {"text", "f", "i", "w"}."""
    costs = [number(query, name, 1, 100, float) for name in "fiw"]
    name = choice(query, "schedule", "1f1b", SCHEDULES)
    if "text" in query:
        try:
            lists = parse(query["text"])
        except ScheduleError as error:
            return stopped(error)
        name = None
    else:
        lists = SCHEDULES[name](*(number(query, *most) for most in (("p", 4, 16), ("m", 8, 64), ("v", 2, 4))))
    timeline = simulate(lists, *costs)
    p, m, v = size_of_schedule(lists)
    formulas = {known: bubble(known, p, v, *costs) for known in ("1f1b", "zb-h1", name) if known and m >= p}
    return {"text": text_of(lists), "formulas": formulas, "idle": max(timeline.idle), "peak": max(timeline.peak),
            **picture(timeline.spans, critical_path(timeline))}


# --------------------------------------------------------------------------------------------------------------- layout

COLUMNS = {"layout": "layout", "ms": "ms a step", "tokens": "tokens/s a GPU", "mfu": "MFU, %",
           "gib": "GiB, fullest rank", "limits": "what limits"}


@functools.cache
def planned(model, gpus, batch_size, machine):
    asked = argparse.Namespace(model=model, config=PRESETS[model], gpus=gpus, batch_size=batch_size, dtype="bf16",
                               machine=MACHINES[machine])
    return [[row[key] for key in COLUMNS] for row in itertools.islice(rows_of(asked), 60)]


def layout(query):
    """The planner's table, in bf16. query: {"model", "gpus", "batch", "machine"}."""
    model, gpus = choice(query, "model", "gpt2-xl", PRESETS), number(query, "gpus", 8, 1024)
    batch, machine = number(query, "batch", 4 * gpus, 1 << 16), choice(query, "machine", "h200", MACHINES)
    config, name = PRESETS[model], MACHINES[machine].name
    asked = (f"{model}, {parameters_in_words(config)}, bf16, on {gpus} {name}{'s' * (gpus > 1)}: {batch} sequences of "
             f"{config.seq_len:,} tokens a step, {batch / gpus:.4g} a GPU.")
    return {"asked": asked, "columns": [*COLUMNS.values()], "rows": planned(model, gpus, batch, machine)}


# ---------------------------------------------------------------------------------------------- steps of the strategies

def ring_states():
    """This rank's tensor, as a list with a number for each chunk, before and after each step of a ring all-reduce. Rank
    r starts from 1 << r, so a sum has a bit for each rank whose data is in it. Call on all ranks."""
    size, states = dist.get_world_size(), []
    t = torch.full((size,), 1 << dist.get_rank())
    has = t.clone()

    class Looking(dist.Link):
        def exchange(self, sends=(), receives=()):
            if len(states) < size - 1:  # what a reduce-scatter's step sends is a partial sum, which t does not have
                has[(self.rank - 1 - len(states)) % size] |= sends[0][0].item()
            states.append(has.bitwise_or_(t).tolist())
            super().exchange(sends, receives)

    Looking(torch_dist.group.WORLD).during("all_reduce").all_reduce(t, dist.ReduceOp.SUM)
    return [*states, t.tolist()]


def ring_steps(n):
    """What happens between these states, and before the first."""
    return ["start", *(f"reduce-scatter step {s}: chunk r-{s + 1} goes right and is added" for s in range(n - 1)),
            *(f"all-gather step {s}: chunk r-{s}, complete, goes right" for s in range(n - 1))]


def zero3_step():
    """A step of ZeRO-3 on this rank, of a GPT of one block: (names of the pieces, rows as lessons/step.py has them).
    Call on all ranks, which average their gradients."""
    config = GPTConfig(n_layer=1, n_embd=32, tied=False)
    layout = train.Layout(dp=dist.get_world_size(), zero=3)
    net = train.parallelize(config, layout, "cpu", optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    net.pipeline.around = watch = Watch(net.pipeline)
    x = torch.arange(32).view(2, 16)
    net.forward_backward([x], [x])
    return ["embedding", "block", "head"], watch.rows


def tensor_matrices():
    """This rank's matrices of an MLP that is cut over the ranks, {name: (rows, columns)}, in the order in which they
    come, forward and backward. A term is a rank's part of a sum that f or g adds up."""
    ranks = dist.get_world_size()
    config = GPTConfig(vocab_size=8, n_layer=1, n_head=ranks, n_embd=2 * ranks, inner=4 * ranks)
    mlp = parallel.tensor_parallel(GPT(config, seed=0).double(), None).h["0"].mlp
    for layer in mlp.c_fc, mlp.c_proj:  # small whole numbers, which a reader can multiply
        own = torch.Generator().manual_seed(3 + dist.get_rank())
        layer.weight.detach().copy_(torch.randint(-1, 2, layer.weight.shape, generator=own))
    x, dy = torch.randint(-2, 3, (2, 3, config.n_embd), generator=torch.Generator().manual_seed(0)).double()
    inner = []
    mlp.c_fc.register_forward_hook(lambda layer, inputs, output: inner.append(output))
    mlp.c_proj.register_forward_pre_hook(lambda layer, inputs: inner.append(inputs[0]))
    y = mlp(x.requires_grad_())
    for tensor in inner:
        tensor.retain_grad()
    y.backward(dy)
    xa, z = inner
    a, b = mlp.c_fc.weight.T, mlp.c_proj.weight.T
    found = {"X": x, "A": a, "X A": xa, "Z": z, "B": b, "term of Y": z @ b, "Y": y, "dY": dy, "dZ": z.grad,
             "d(X A)": xa.grad, "term of dX": xa.grad @ a.T, "dX": x.grad}
    return {name: matrix.tolist() for name, matrix in found.items()}
