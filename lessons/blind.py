"""Which of the field's habits would have seen a bug? Every row of docs/bugs.md, and mutants of every collective.

    python -m lessons blind                             the tables of docs/bugs.md
    python -m lessons blind --out assets/blind.svg      and its picture
    python -m lessons blind --quick 1                   a few of both

The right program runs in a row's layout, as threads of one process (further/together.py), then each wrong one. A habit
sees what is off by more than it tolerates.
"""

import contextlib
import dataclasses
import inspect
import math
import multiprocessing
import pathlib
import re
import sys
import tempfile
from ast import literal_eval
from collections import defaultdict
from functools import cache, partial
from typing import NamedTuple
from unittest.mock import patch

import torch

import collectives as dist
from lessons.puzzles import HERE, loaded_from, write
from safe.launch import cores

HABITS = {  # name: (it sees what is off by more than this, what it is blind to)
    "loss curve": (0.02, "Adam divides by a gradient's scale, and clipping takes the norm's away"),
    "first loss": (1e-4, "it is there before any gradient is"),
    "first norm": (1e-2, "one number of all parameters: a wrong one among many, or a wrong update, hardly moves it"),
    "bf16 gradients": (0.05, "nothing that comes after backward: norms, clipping, gathers, masters"),
    "bytes": (1e-9, "what is sent, not what is in it: only a call left out, or routing that went astray, shows"),
    "float64": (1e-10, "what float64 does not have: roundings of 16 bits, overflow, races")}
STRATEGIES = {  # whose mutants train a model of one layer
    "DDP": "dp=2", "ZeRO 1": "dp=2 zero=1", "ZeRO 2": "dp=2 zero=2 micro_batches=2", "ZeRO 3": "dp=2 zero=3",
    "tensor": "tp=2", "sequence": "tp=2 sp=1 tokens=8", "pipeline": "pp=2 micro_batches=2",
    "ring": "cp=2 tokens=8 cp_kind=ring", "Ulysses": "cp=2 tokens=8 cp_kind=ulysses",
    "experts": "dp=2 ep=2 experts=4 tokens=8"}


# ----------------------------------------------------------------------------------------------------------------- rows

class Bug(NamedTuple):
    number: str    # its row of docs/bugs.md
    thread: str    # where its users tell of it: owner/repository#number
    layout: str    # a row of tests/layouts.py, which is red with the new line
    symptom: str   # what tests/bugs.py says of it
    file: str
    function: str
    old: str       # a line that stands in the file once, in this function
    new: str

    def halves(self):
        """The file's text before the line, and after it."""
        return (HERE / self.file).read_text().split(f" {self.old}\n")


def bugs():
    """Those of docs/bugs.md."""
    page = pathlib.Path(HERE, "docs", "bugs.md").read_text()
    rows = re.findall(r"(?m)^\| (\d+) \| .+ \| \[(.+?)\]\(https://github\.com/.+?\) \| `(.+)` \| (.+) \|$", page)
    lines = re.findall(r"(?m)^\*\*\d+\.\*\* `(.+)`, `(.+)`\. (?s:.+?)\n```diff\n-(.+)\n\+(.+)\n```$", page)
    return [Bug(*row, *line) for row, line in zip(rows, lines, strict=True)]


def copy_with(bug, folder):
    """The reference into a folder, with the bug's line."""
    write(folder, bug.file, f" {bug.new}\n".join(bug.halves()))


NAMED = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32")}
AXES = "dp", "tp", "cp", "pp"


def value_of(word):
    """A number, a truth value, None, what NAMED has of that name, or the word."""
    try:
        return literal_eval(word)
    except (ValueError, SyntaxError):
        return NAMED.get(word, word)


def case_of(row):
    """{option: value} of a row; a later word replaces an earlier one."""
    return {name: value_of(value) for name, value in (word.split("=") for word in row.split())}


# --------------------------------------------------------------------------------------------------------------- a run

@cache
def tokens_of(step, tokens, holes):
    """8 sequences and their targets: each counts up in steps of its own. holes: of the last two one target counts."""
    draw = torch.Generator().manual_seed(step)
    first, by = torch.randint(1, 37, (2, 8, 1), generator=draw)
    rows = (first + by % 4 * torch.arange(tokens + 1)) % 37
    x, y = rows[:, :-1], rows[:, 1:].clone()
    if holes:
        y[6:, 1:] = -1
    return x, y


def train_on(case, steps, optimizer, dtype):
    """Steps on one rank. Returns (their losses and norms, (steps, 2); what it has of the first step's gradients, and of
    the weights; bytes that it sends in a step)."""
    import model
    import train
    from further import experts

    def chosen(kind):
        return {field.name: case[field.name] for field in dataclasses.fields(kind) if field.name in case}

    config = experts.resized(model.GPTConfig(37, 10, 2, 8, 32), **chosen(experts.ExpertsConfig))
    layout = train.Layout(**chosen(train.Layout) | {"dtype": dtype})
    net, log = train.parallelize(config, layout, "cpu", optimizer=optimizer), []
    for step in range(steps):
        x, y = (t.chunk(layout.dp)[train.dist.get_rank(net.groups.dp)].chunk(case.get("micro_batches", 1))
                for t in tokens_of(step, case.get("tokens", 10), "holes" in case))
        train.dist.reset_traffic()
        net.zero_grad()
        loss = net.forward_backward(x, y)
        if step == 0:
            gradients = [param.grad.clone() for param in net.params]
        log.append([loss, net.clip_grad_norm_(0.3)])
        net.optimizer.step()
        if config.experts:
            experts.balance(net, 0.02)
    return torch.tensor(log), gradients, net.params, sum(some.bytes for some in train.dist.traffic().values())


def looked_at(case, steps):
    """{habit: the tensors that it looks at}, of two steps of SGD in float64, one in bf16, and `steps` of AdamW in
    float32 or the row's own dtype."""
    from further import together
    sgd, adamw = partial(torch.optim.SGD, lr=0.5), partial(torch.optim.AdamW, lr=3e-3, fused=True)
    exact, half, curve = (
        [*zip(*together.run_joined(math.prod(case.get(axis, 1) for axis in AXES), partial(train_on, case, *run)))]
        for run in ((2, sgd, torch.float64), (1, sgd, torch.bfloat16),
                    (steps, adamw, case.get("dtype", torch.float32))))
    exact_log, curve_log = (torch.stack(some[0]).mean(0) for some in (exact, curve))  # over ranks, as it is logged
    return {"loss curve": [curve_log[-10:, 0].mean()], "first loss": exact_log[0, :1], "first norm": exact_log[0, 1:],
            "bf16 gradients": sum(half[1], []), "bytes": torch.tensor(exact[3]),
            "float64": [*exact_log.T, *sum(exact[1] + exact[2], [])]}


def off(ours, theirs):
    """The largest relative error of a tensor; infinite where one is not finite, or has another shape."""
    errors = [((a - b).double().norm() / b.double().norm().clamp(min=1e-12)).item() if a.shape == b.shape else math.inf
              for a, b in zip(ours, theirs)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


# ------------------------------------------------------------------------------------------------------------- mutants

CALLS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "batch_isend_irecv",
         "isend")


@contextlib.contextmanager
def mutated(call=None, place=None, kind=None, found=None):
    """Change the collective `call` where the function `place` calls it. kind: "out": nobody calls it; "one": rank 1
    does not; "op": a sum in place of a mean, or the other way round; "alone": in a group of this rank alone.
    found: a set that gets (call, place, kind) of all that could be changed."""
    def stand_in(name, real, *values, **options):
        here, bound = (name, sys._getframe(1).f_code.co_name), inspect.signature(real).bind(*values, **options)
        bound.apply_defaults()
        given = bound.arguments
        if found is not None and dist.get_world_size(given.get("group")) > 1:
            found.update((*here, kind) for kind in ("out", "one", *("op", "alone") * ("op" in given)))
        if here != (call, place):
            return real(**given)
        if kind == "out" or kind == "one" and dist.get_rank() == 1:
            return [] if name == "batch_isend_irecv" else dist.Handle()
        if kind == "op":
            given["op"] = dist.ReduceOp.AVG if given["op"] == dist.ReduceOp.SUM else dist.ReduceOp.SUM
        if kind == "alone":
            given["group"] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return real(**given)

    with patch.multiple(dist, **{name: partial(stand_in, name, getattr(dist, name)) for name in CALLS}):
        yield


# -------------------------------------------------------------------------------------------------------------- matrix

def compared(row, bugs, steps):
    """{name: {habit: by how much it is off}} of a layout's bugs; without any, of its mutants. Infinite: it stops."""
    torch.set_num_threads(1)
    case, mutants, found = case_of(row), set(), {}
    with mutated(found=mutants):
        right = looked_at(case, steps)
    for change in bugs or sorted(mutants):
        with contextlib.ExitStack() as around:
            if bugs:
                copy_with(change, folder := around.enter_context(tempfile.TemporaryDirectory()))
                loaded_from(folder)
            else:
                around.enter_context(mutated(*change))
            try:
                ran = looked_at(case, steps)
                off_by = {habit: off(ran[habit], right[habit]) for habit in HABITS}
            except Exception:  # noqa: BLE001  it stops, which everybody sees
                off_by = dict.fromkeys(HABITS, math.inf)
        found["{:>2}  {}".format(*change) if bugs else "{} in {}, {}".format(*change)] = off_by
    return found


def matrix(jobs):
    """{(kind, name): {habit: by how much it is off}} of jobs (kind, row, bugs, steps): each in a new process."""
    import torch._dynamo  # noqa: F401  or the first optimizer of each process would, which takes two seconds
    with multiprocessing.get_context("fork").Pool(cores(), maxtasksperchild=1) as pool:
        ran = pool.starmap(compared, [job for _, *job in jobs], chunksize=1)
    return {(kind, name): off_by for (kind, *_), found in zip(jobs, ran) for name, off_by in found.items()}


def sees(off_by):
    return [off_by[habit] > limit for habit, (limit, _) in HABITS.items()]


def draw(found, path):
    """A row a bug, a column a habit: filled where it sees the bug."""
    from lessons.pictures import box, COLOURS, words, write_svg
    parts = [words(430 + 100 * i, 16, habit, 12) for i, habit in enumerate(HABITS)]
    for row, (name, off_by) in enumerate(found):
        parts.append(words(360, 40 + 20 * row, name, 11, "end"))
        for i, (is_seen, n) in enumerate(zip(sees(off_by), off_by.values())):
            parts.append(box(385 + 100 * i, 28 + 20 * row, 90, 17, COLOURS[2] if is_seen else "#8882"))
            parts.append(words(430 + 100 * i, 40 + 20 * row, f"{n:.2g}", 10))
    write_svg(path, 36 + 20 * len(found), parts)


def demo_blind(quick, out):
    """Which of six habits would have seen each bug that shipped, and each mutant of a collective."""
    rows, strategies = defaultdict(list), [*STRATEGIES.items()]
    for bug in bugs()[::8 if quick else 1]:
        rows[bug.layout].append(bug)
    found = matrix([("bugs", row, some, 60) for row, some in rows.items()]
                   + [(name, f"n_layer=1 {row}", [], 15) for name, row in strategies[:1 if quick else None]])
    print("By how much each number is off; *: its habit sees it; inf: the run stops. Mutants: out: nobody calls the\n"
          "collective; one: rank 1 does not; op: a sum for a mean, or the other way round; alone: in a group of\n"
          f"one.\n\n{'':66}", *(f"{habit:>15}" for habit in HABITS))
    seen = defaultdict(list)
    for (kind, name), off_by in sorted(found.items()):
        seen[kind].append(sees(off_by))
        marks = zip(seen[kind][-1], off_by.values())
        print(f"{kind:12}{name:54}", *(f"{'*' * is_seen:>4} {n:10.2g}" for is_seen, n in marks))
    print("\nHow many each habit sees")
    for kind, marks in seen.items():
        print(f"{kind:12}{len(marks):3}{'':51}", *(f"{sum(column):15}" for column in zip(*marks)))
    for habit, (limit, blind) in HABITS.items():
        print(f"{habit}, off by more than {limit:g}: {blind}")
    if out:
        draw([(name, off_by) for (kind, name), off_by in sorted(found.items()) if kind == "bugs"], out)
