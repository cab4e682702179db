"""Which of the field's habits would have seen a bug? Every row of docs/bugs.md, and mutants of every collective.

    python -m lessons blind                             the matrix of docs/bugs.md, and mutants by strategy
    python -m lessons blind --out assets/blind.svg      and its picture
    python -m lessons blind --quick 1                   a few of both

Each bug runs in a copy of the reference with its line, as threads of one process (further/together.py), and so does the
right program. A habit sees what is off by more than its tolerance. `HABITS` says what each looks at.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import multiprocessing
import pathlib
import re
import shutil
import sys
import tempfile
from typing import NamedTuple
from unittest.mock import patch

import torch

import collectives as dist
from further import together
from lessons.puzzles import HERE

REFERENCE = "collectives", "kernels", "model", "parallel", "further", "train"


# ------------------------------------------------------------------------------------------------------ rows and copies

class Bug(NamedTuple):
    thread: str    # where its users tell of it: owner/repository#number
    layout: str    # a row of tests/layouts.py, which is red with the new line
    symptom: str   # what tests/bugs.py says of it
    file: str
    function: str
    old: str       # a line that stands in the file once, in this function
    new: str


def bugs():
    """Those of docs/bugs.md."""
    page = pathlib.Path(HERE, "docs", "bugs.md").read_text()
    rows = re.findall(r"(?m)^\| \d+ \| .+ \| \[(.+?)\]\(https://github\.com/.+?\) \| `(.+)` \| (.+) \|$", page)
    lines = re.findall(r"(?m)^\*\*\d+\.\*\* `(.+)`, `(.+)`\. (?s:.+?)\n```diff\n-(.+)\n\+(.+)\n```$", page)
    return [Bug(*row, *line) for row, line in zip(rows, lines, strict=True)]


def copy_with(bug, folder):
    """The reference into a folder, with the bug's line; None: as it is. Returns the text before the line."""
    for name in REFERENCE:
        for file in sorted((HERE / name).glob("*.py")) or [HERE / f"{name}.py"]:
            target = pathlib.Path(folder, file.relative_to(HERE))
            target.parent.mkdir(exist_ok=True)
            shutil.copy(file, target)
    if bug:
        file = pathlib.Path(folder, bug.file)
        before, after = file.read_text().split(f" {bug.old}\n")
        file.write_text(f"{before} {bug.new}\n{after}")
        return before


def loaded_from(folder):
    """From now on in this process the reference's modules are those of a folder."""
    sys.path.insert(0, str(folder))
    for name in [*sys.modules]:
        if name.split(".")[0] in REFERENCE:
            del sys.modules[name]


# --------------------------------------------------------------------------------------------------------------- a run

NUMBERS = {"true": True, "float16": torch.float16, "bfloat16": torch.bfloat16}
AXES = "dp", "tp", "cp", "pp"


def case_of(row):
    """{option: value} of a layout's row."""
    words = (word.split("=") for word in row.split())
    return {name: int(value) if value.isdigit() else NUMBERS.get(value, value) for name, value in words}


def one_rank(case):
    """The same model and data on one process."""
    spread = *AXES, "sp", "ep", "cp_kind", "zero", "micro_batches", "schedule", "recompute", "dtype"
    return {name: value for name, value in case.items() if name not in spread}


def tokens_of(step, case, vocabulary=37):
    """Inputs and targets: each token decides the next one, but for a fifth of them. holes: as in tests/layouts.py."""
    draw = torch.Generator().manual_seed(step)
    batch, tokens = case.get("batch", 8), case.get("tokens", 10)
    rows = torch.randint(vocabulary, (batch, tokens + 1), generator=draw)
    for t in range(tokens):
        follows = torch.rand(batch, generator=draw) < 0.8
        rows[:, t + 1] = torch.where(follows, (5 * rows[:, t] + 3) % vocabulary, rows[:, t + 1])
    x, y = rows[:, :-1], rows[:, 1:].clone()
    if case.get("holes"):
        y[torch.rand(y.shape, generator=draw) < 0.3] = -1
        y[batch - batch // 4:, 1:] = -1
    return x, y


class Ran(NamedTuple):
    losses: list
    norms: list
    gradients: dict    # of the first step, {name: whole tensor}
    weights: dict      # after the last
    bytes: int         # that this rank sent in a step


def train_on(case, steps, adam, dtype):
    """What one rank has of some steps, as train.py's own loop logs it."""
    import model
    import train
    from further import experts
    dist = train.dist
    sizes = {field.name for field in dataclasses.fields(experts.ExpertsConfig)}
    config = experts.resized(
        model.GPTConfig(vocab_size=37, seq_len=10, n_layer=2, n_head=8, n_embd=32),
        **{name: bool(value) if name == "tied" else value for name, value in case.items() if name in sizes})
    fields = {field.name for field in dataclasses.fields(train.Layout)} - {"dtype"}
    layout = train.Layout(**{name: value for name, value in case.items() if name in fields}, dtype=dtype)
    optimizer = functools.partial(torch.optim.AdamW, lr=3e-3) if adam else functools.partial(torch.optim.SGD, lr=0.5)
    net = train.parallelize(config, layout, "cpu", optimizer=optimizer)
    losses, norms, gradients, sent = [], [], {}, 0
    mine = case.get("batch", 8) // layout.dp
    for step in range(steps):
        x, y = (t.split(mine)[dist.get_rank(net.groups.dp)].split(mine // case.get("micro_batches", 1))
                for t in tokens_of(step, case))
        dist.reset_traffic()
        net.zero_grad()
        loss = net.forward_backward(x, y)
        if not step and not (adam and steps > 1):
            gradients = whole(net, train.shapes(config))
        norms.append(float(net.clip_grad_norm_(1.0 if adam else 0.3)))
        net.optimizer.step()
        if config.experts:
            experts.balance(net, 0.02)
        sent = sum(log.bytes for log in dist.traffic().values())  # of the last step, which gathers no gradients
        dist.all_reduce(loss, dist.ReduceOp.AVG, net.groups.dp_cp)
        losses.append(float(loss))
    weights = {} if adam else {name: net.whole_parameter(name).double().numpy() for name in train.shapes(config)}
    return Ran(losses, norms, gradients, weights, sent)


def whole(net, names):
    """Gradients as one process would have them: gathered as what an optimizer keeps of each parameter."""
    for param in net.params:
        net.optimizer.state[param]["gradient"] = param.grad
    found = {name: net.whole_parameter(name, "gradient").double().numpy() for name in names}
    for param in net.params:
        del net.optimizer.state[param]["gradient"]
    return found


def runs_of(job):
    """(exact, curve, half) of a job: of each rank, two steps of SGD in float64; `steps` of AdamW, where 16 bits are no
    part of the row in float32; a step in bf16. Or a text, of what stops it."""
    bug, case, steps, mutant = job
    torch.set_num_threads(1)
    n = math.prod(case.get(axis, 1) for axis in AXES)
    with tempfile.TemporaryDirectory() as folder:
        if bug:
            copy_with(bug, folder)
            loaded_from(folder)
        import train
        from further import together
        some = {name: value for name, value in case.items() if name != "dtype"}

        def run(*options):
            with mutated(train.dist, *mutant) if mutant else contextlib.nullcontext():
                return together.run_joined(n, lambda: train_on(some, *options))
        try:
            return run(2, False, torch.float64), run(steps, True, case.get("dtype", torch.float32)), run(
                1, False, torch.bfloat16)
        except Exception as why:  # noqa: BLE001  it stops, which everybody sees
            return f"{type(why).__name__}: {why}"


# -------------------------------------------------------------------------------------------------------------- habits

def off(ours, theirs):
    """The relative error: infinite where not finite."""
    ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    error = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))
    return error if math.isfinite(error) else math.inf


def worst(ours, theirs):
    return max(off(ours[name], theirs[name]) for name in theirs)


# name: (what is off in a run, beside one process and the right program in this layout; from when on it is seen; blind)
HABITS = {
    "loss curve": (lambda ran, one, right: off(
        sum(ran[1][0].losses[-10:]), sum(one[1][0].losses[-10:])), 0.02,
                   "Adam divides by a gradient's scale, and clipping takes the norm's away"),
    "first loss": (lambda ran, one, right: off(ran[0][0].losses[0], one[0][0].losses[0]), 1e-4,
                   "it is there before any gradient is"),
    "first norm": (lambda ran, one, right: off(ran[0][0].norms[0], one[0][0].norms[0]), 1e-2,
                   "one number of all parameters: a wrong one among many, or a wrong update, hardly moves it"),
    "bf16 gradients": (lambda ran, one, right: worst(ran[2][0].gradients, one[0][0].gradients), 0.05,
                       "nothing that comes after backward: norms, clipping, gathers, masters"),
    "bytes": (lambda ran, one, right: max(off(a.bytes, b.bytes) if b.bytes else float(a.bytes > 0)
                                          for a, b in zip(ran[0], right[0])), 1e-9,
              "what is sent, not what is in it: only a call left out, or routing that went astray, shows"),
    "float64": (lambda ran, one, right: max(max(
        off(a.losses, one[0][0].losses), off(a.norms, one[0][0].norms), worst(a.gradients, one[0][0].gradients),
        worst(a.weights, one[0][0].weights)) for a in ran[0]), 1e-10,
                "what float64 does not have: roundings of 16 bits, overflow, races")}


def verdicts(ran, one, right):
    """{habit: by how much it is off}; infinite for all where the run stops."""
    return {name: math.inf if isinstance(ran, str) else measure(ran, one, right)
            for name, (measure, *_) in HABITS.items()}


# ------------------------------------------------------------------------------------------------------------- mutants

STRATEGIES = {
    "DDP": "dp=2", "ZeRO 1": "dp=2 zero=1", "ZeRO 2": "dp=2 zero=2 micro_batches=2", "ZeRO 3": "dp=2 zero=3",
    "tensor": "tp=2", "sequence": "tp=2 sp=1 tokens=8", "pipeline": "pp=2 micro_batches=2",
    "ring": "cp=2 tokens=8 cp_kind=ring", "Ulysses": "cp=2 tokens=8 cp_kind=ulysses",
    "experts": "dp=2 ep=2 experts=4 tokens=8"}
CALLS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "batch_isend_irecv",
         "isend")


@contextlib.contextmanager
def mutated(dist, call=None, place=None, kind=None, found=None):
    """Change dist's function `call` where it is called from the function `place`. kind: "out": nobody calls it; "one":
    rank 1 does not; "op": a sum in place of a mean, or the other way round; "alone": in a group of this rank alone.
    found: a set that gets all (call, place) instead."""
    def wrapped(name, real):
        def stand_in(*arguments, **options):
            here = sys._getframe(1).f_code.co_name
            if found is not None and dist.get_world_size(inspect.signature(real).bind(
                    *arguments, **options).arguments.get("group")) > 1:
                found.add((name, here))
            if (name, here) != (call, place):
                return real(*arguments, **options)
            if kind == "out" or kind == "one" and dist.get_rank() == 1:
                return [] if name == "batch_isend_irecv" else dist.Handle()
            bound = inspect.signature(real).bind(*arguments, **options)
            bound.apply_defaults()
            sum_or_mean = {dist.ReduceOp.SUM: dist.ReduceOp.AVG, dist.ReduceOp.AVG: dist.ReduceOp.SUM}
            if kind == "op":
                bound.arguments["op"] = sum_or_mean.get(bound.arguments["op"], dist.ReduceOp.SUM)
            if kind == "alone":
                bound.arguments["group"] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            return real(**bound.arguments)
        return stand_in
    with contextlib.ExitStack() as around:
        for name in CALLS:
            around.enter_context(patch.object(dist, name, wrapped(name, getattr(dist, name))))
        yield


def places_of(row):
    """[(call, place)] of the collectives that a strategy's step calls."""
    found, case = set(), case_of(row)
    with mutated(dist, found=found):
        together.run_joined(2, lambda: train_on(case, 1, True, torch.float32))
    return sorted(found - {("all_reduce", name) for name in ("train_on", "put_together")})


def mutants(row):
    """[(call, place, kind)]"""
    with multiprocessing.get_context("fork").Pool(1) as one:
        found = one.apply(places_of, (row,))
    return [(call, place, kind) for call, place in found for kind in ("out", "one", "op", "alone")
            if kind not in ("op", "alone") or call in ("all_reduce", "reduce_scatter_tensor") or (
                kind == "alone" and call == "all_to_all_single")]


# -------------------------------------------------------------------------------------------------------------- matrix

def matrix(rows, steps):
    """Of rows (name, bug, case, mutant): {name: verdicts}. Right programs run beside them."""
    jobs = {}
    for name, bug, case, mutant in rows:
        for job in (None, one_rank(case), steps, None), (None, case, steps, None), (bug, case, steps, mutant):
            jobs[repr(job)] = job
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        ran = dict(zip(jobs, pool.map(runs_of, jobs.values(), chunksize=1)))
    return {name: verdicts(ran[repr((bug, case, steps, mutant))], ran[repr((None, one_rank(case), steps, None))],
                           ran[repr((None, case, steps, None))]) for name, bug, case, mutant in rows}


def seen(values):
    return [values[habit] > limit for habit, (_, limit, _) in HABITS.items()]


def lines_of(found):
    """A row each: by how much it is off for each habit, * where that is seen."""
    yield f"{'':44}" + "".join(f"{habit:>16}" for habit in HABITS)
    for name, values in found.items():
        marks = zip(seen(values), (values[habit] for habit in HABITS))
        yield f"{name:44}" + "".join(f"{'*' if is_seen else ' ':>5} {value:10.2g}" for is_seen, value in marks)


def draw(found, path):
    """A row a bug, a column a habit: filled where it sees the bug."""
    from lessons.pictures import box, COLOURS, words, write_svg
    parts = [words(430 + 100 * i, 16, habit, 12) for i, habit in enumerate(HABITS)]
    for row, (name, values) in enumerate(found.items()):
        y = 28 + 20 * row
        parts.append(words(360, y + 12, name, 11, "end"))
        for i, (habit, is_seen) in enumerate(zip(HABITS, seen(values))):
            parts.append(box(385 + 100 * i, y, 90, 17, COLOURS[2] if is_seen else "#8882"))
            parts.append(words(430 + 100 * i, y + 12, f"{values[habit]:.2g}", 10))
    write_svg(path, 36 + 20 * len(found), parts)


def demo_blind(quick, out):
    """Which of six habits would have seen each bug that shipped, and each mutant of a collective."""
    shipped, steps = bugs(), 60
    numbered = [(f"{i}  {bug.thread}", bug, case_of(bug.layout), None) for i, bug in enumerate(shipped, 1)]
    found = matrix(numbered[::8] if quick else numbered, steps)
    print(*lines_of(found), sep="\n")
    print(f"\n{sum(map(any, map(seen, found.values())))} of {len(found)} bugs are seen by one habit at least:")
    for i, (habit, (_, _, blind)) in enumerate(HABITS.items()):
        print(f"  {habit:15} sees {sum(seen(values)[i] for values in found.values()):2}; {blind}")
    if out:
        draw(found, out)
    rows = [(f"{strategy}: {call} in {place}, {kind}", None, case_of(row), (call, place, kind))
            for strategy, row in list(STRATEGIES.items())[:1 if quick else None] for call, place, kind in mutants(row)]
    changed = matrix(rows, 15)
    print("\nEvery call of a collective in a step, changed. out: nobody calls it; one: rank 1 does not; op: a sum for\n"
          "a mean, or the other way round; alone: in a group of one rank. inf: it stops.")
    print(*lines_of(changed), sep="\n")
    for strategy in dict.fromkeys(name.split(":")[0] for name in changed):
        some = [seen(values) for name, values in changed.items() if name.split(":")[0] == strategy]
        counts = ", ".join(f"{habit} {sum(column)}" for habit, column in zip(HABITS, zip(*some)))
        print(f"{strategy}: of {len(some)} mutants {counts}")
