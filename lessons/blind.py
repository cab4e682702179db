"""Which of the field's habits would have seen a bug? Every row of docs/bugs.md, and mutants of every collective.

    python -m lessons blind                             the tables of docs/bugs.md
    python -m lessons blind --out assets/blind.svg      and its picture

The right program runs in a row's layout, as threads of one process (further/together.py), then each wrong one. A habit
sees what is off by more than it tolerates.
"""

import contextlib
import importlib
import inspect
import math
import multiprocessing
import operator
import pathlib
import re
import sys
from ast import literal_eval
from collections import defaultdict
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch

import collectives as dist
import model
import train
from collectives import ReduceOp
from further import experts, kinds, together
from lessons import letters
from lessons.drawer import Cell, COLOURS, Frame, GREY, svg_of
from lessons.pictures import check_picture
from lessons.puzzles import HERE
from parallel import PRECISIONS
from safe.launch import cores

HABITS = {  # each sees what is off by more than this; docs/bugs.md says what it is blind to
    "loss curve": 0.02, "first loss": 1e-4, "first norm": 1e-2, "bf16 gradients": 0.05, "bytes": 1e-9,
    "float64": 1e-10, "letters": 0.5}  # letters: 1 if they say that something is wrong
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


def bugs():
    """Those of docs/bugs.md."""
    page = pathlib.Path(HERE, "docs", "bugs.md").read_text()
    rows = re.findall(r"(?m)^\| (\d+) \| .+ \| \[(.+?)\]\(https://github\.com/.+?\) \| `(.+)` \| (.+) \|$", page)
    lines = re.findall(r"(?m)^\*\*\d+\.\*\* `(.+)`, `(.+)`\. (?s:.+?)\n```diff\n-(.+)\n\+(.+)\n```$", page)
    return [Bug(*row, *line) for row, line in zip(rows, lines, strict=True)]


@contextlib.contextmanager
def with_line(bug):
    """Inside, the function has the bug's line."""
    module = importlib.import_module(bug.file.removesuffix(".py").replace("/", "."))
    text = (HERE / bug.file).read_text().replace(f" {bug.old}\n", f" {bug.new}\n")
    code = compile(text, module.__file__, "exec", dont_inherit=True)
    for name in bug.function.split("."):
        code, = (part for part in code.co_consts if getattr(part, "co_name", "") == name)
    function = inspect.unwrap(operator.attrgetter(bug.function)(module))
    right, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = right


AXES = "dp", "tp", "cp", "pp"


def value_of(word):
    """A number, a truth value, None, a dtype by the flag's name, or the word."""
    try:
        return literal_eval(word)
    except (ValueError, SyntaxError):
        return PRECISIONS.get(word, word)


def case_of(row):
    """{option: value} of a row; a later word replaces an earlier one."""
    return {name: value_of(value) for name, value in (word.split("=") for word in row.split())}


# --------------------------------------------------------------------------------------------------------------- a run

def tokens_of(step, tokens, holes):
    """8 sequences and their targets: each counts up in steps of its own. holes: of the last two one target counts."""
    draw = torch.Generator().manual_seed(step)
    first, by = torch.randint(1, 37, (2, 8, 1), generator=draw)
    rows = (first + by % 4 * torch.arange(tokens + 1)) % 37
    x, y = rows[:, :-1], rows[:, 1:].clone()
    if holes:
        y[6:, 1:] = -1
    return x, y


def laid_out(case, dtype):
    """(config, layout) of a row."""
    config = kinds.resized(model.GPTConfig(37, 10, 2, 8, 32), **case)
    layout = {name: value for name, value in case.items() if hasattr(train.Layout, name)}
    return config, train.Layout(**layout | {"dtype": dtype})


def ranks_of(case):
    return math.prod(case.get(axis, 1) for axis in AXES)


def tokens_on(case, step, replica):
    """(inputs, targets) of a replica's micro-batches."""
    return [t.chunk(case.get("dp", 1))[replica].chunk(case.get("micro_batches", 1))
            for t in tokens_of(step, case.get("tokens", 10), "holes" in case)]


def train_on(case, steps, optimizer, dtype):
    """Steps on one rank. Returns (their losses and norms, (steps, 2); what it has of the first step's gradients, and of
    the weights; bytes that it sends in a step)."""
    config, layout = laid_out(case, dtype)
    net, log = train.parallelize(config, layout, "cpu", optimizer=optimizer), []
    for step in range(steps):
        x, y = tokens_on(case, step, dist.get_rank(net.groups.dp))
        dist.reset_traffic()
        net.zero_grad()
        loss = net.forward_backward(x, y)
        if step == 0:
            gradients = [param.grad.clone() for param in net.params]
        log.append([loss, net.clip_grad_norm_(0.3)])
        if steps > 1:  # of one step gradients are looked at, which some optimizers would refuse
            net.step()
        if config.experts:
            experts.balance(net, experts.loads(net), 0.02)
    return torch.tensor(log), gradients, net.params, sum(some.bytes for some in dist.traffic().values())


def looked_at(case, steps):
    """{habit: the tensors that it looks at}, of two steps of SGD in float64, one in bf16, and `steps` of AdamW in
    float32 or the row's own dtype; of letters 1, or 2 if they are wrong."""
    def all_ranks(*run):
        """As `train_on`, with losses and norms the mean over ranks, as they are logged."""
        logs, gradients, weights, sent = zip(*together.run(ranks_of(case), partial(train_on, case, *run)))
        return torch.stack(logs).mean(0), sum(gradients, []), sum(weights, []), torch.tensor(sent)

    sgd, adamw = partial(torch.optim.SGD, lr=0.5), partial(torch.optim.AdamW, lr=3e-3, fused=True)
    log, gradients, weights, sent = all_ranks(2, sgd, torch.float64)
    _, rounded, *_ = all_ranks(1, sgd, torch.bfloat16)
    curve, *_ = all_ranks(steps, adamw, case.get("dtype", torch.float32))
    return {"loss curve": [curve[-10:, 0].mean()], "first loss": log[0, :1], "first norm": log[0, 1:],
            "bf16 gradients": rounded, "bytes": sent, "float64": [*log.T, *gradients, *weights],
            "letters": [torch.tensor(1.0 + bool(wrong_by_letters(case)))]}


def wrong_by_letters(case):
    """What letters say."""
    return letters.check(*laid_out(case, torch.float32), range(ranks_of(case)), *tokens_on(case, 0, 0))[1]


def off(ours, theirs):
    """The largest relative error of a tensor; infinite where one is not finite, or has another shape."""
    errors = [((a - b).double().norm() / b.double().norm().clamp(min=1e-12)).item() if a.shape == b.shape else math.inf
              for a, b in zip(ours, theirs)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


# ------------------------------------------------------------------------------------------------------------- mutants

CALLS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "reduce_scatter",
         "all_gather", "batch_isend_irecv", "isend")
KINDS = {  # of mutants: what becomes of a call's arguments; None: nothing is called
    "out": lambda given: None,
    "one": lambda given: None if dist.get_rank() == 1 else given,
    "op": lambda given: given | {"op": ReduceOp.AVG if given["op"] == ReduceOp.SUM else ReduceOp.SUM},
    "alone": lambda given: given | {"group": dist.new_group([dist.get_rank()], use_local_synchronization=True)}}


def intercepted(change):
    """Inside, each of CALLS is called with change(its name, the code that calls it, {argument: value})."""
    def stand_in(name, real, *values, **options):
        given = change(name, sys._getframe(1).f_code, inspect.getcallargs(real, *values, **options))
        if given is None:
            return [] if name == "batch_isend_irecv" else dist.Handle()
        return real(**given)

    return patch.multiple(dist, **{name: partial(stand_in, name, getattr(dist, name)) for name in CALLS})


def mutants_in(run, *args):
    """(what run(*args) returns, its mutants as `mutated` takes them: of each collective that it calls)."""
    def note(name, code, given):
        if dist.get_world_size(given.get("group")) > 1:
            mutants.update((name, code.co_name, kind) for kind in [*KINDS][:4 if "op" in given else 2])
        return given

    mutants = set()
    with intercepted(note):
        return run(*args), mutants


def mutated(call, place, kind):
    """Inside, the collective `call` is changed where the function `place` calls it."""
    return intercepted(lambda name, code, given: KINDS[kind](given) if (name, code.co_name) == (call, place) else given)


# -------------------------------------------------------------------------------------------------------------- matrix

def compared(kind, row, bugs, steps):
    """[(kind, name, [(by how much it is off, whether it is seen), a pair a habit]), ...] of a layout's bugs; without
    any, of its mutants. Infinite: it stops."""
    torch.set_num_threads(1)
    case = case_of(row)
    right, mutants = mutants_in(looked_at, case, steps)
    changes = {f"{bug.number:>2}  {bug.thread}": with_line(bug) for bug in bugs}
    found = []
    for name, change in (changes or {"{} in {}, {}".format(*some): mutated(*some) for some in mutants}).items():
        with change:
            try:
                off_by = [*map(off, looked_at(case, steps).values(), right.values())]
            except Exception:  # noqa: BLE001  it stops, which everybody sees
                off_by = [math.inf] * len(HABITS)
        found.append((kind, name, [(n, n > limit) for n, limit in zip(off_by, HABITS.values())]))
    return found


def matrix(jobs):
    """What `compared` returns of all jobs, each its arguments and in a new process."""
    import torch._dynamo  # noqa: F401  or the first optimizer of each process would, which takes two seconds
    with multiprocessing.get_context("fork").Pool(cores(), maxtasksperchild=1) as pool:
        return sorted(sum(pool.starmap(compared, jobs, chunksize=1), []))


def draw(found, path):
    """A row a bug, a column a habit: filled where it sees the bug."""
    cells = [Cell(0, column, habit) for column, habit in enumerate(HABITS)]
    names = {}
    for row, (_, name, habits) in enumerate((bug for bug in found if bug[0] == "bugs"), 1):
        names[row] = name
        cells += [Cell(row, column, f"{n:.2g}", 1, COLOURS[2] if is_seen else GREY)
                  for column, (n, is_seen) in enumerate(habits)]
    pathlib.Path(path).write_text(svg_of(Frame(cells, "", (), names, 90, 365)))


def demo_blind(out=None):
    """Which of seven habits would have seen each bug that shipped, and each mutant of a collective.

    --out FILE.svg draws the bugs.
    """
    if out:
        check_picture(out, "--out")
    rows = defaultdict(list)
    for bug in bugs():
        rows[bug.layout].append(bug)
    found = matrix([("bugs", row, some, 60) for row, some in rows.items()]
                   + [(name, f"n_layer=1 {row}", [], 15) for name, row in STRATEGIES.items()])
    print("By how much each number is off; *: its habit sees it; inf: the run stops. Mutants: out: nobody calls the\n"
          "collective; one: rank 1 does not; op: a sum for a mean, or the other way round; alone: in a group of\n"
          f"one.\n\n{'':66}", *(f"{habit:>15}" for habit in HABITS))
    seen = defaultdict(list)
    for kind, name, habits in found:
        seen[kind].append([is_seen for _, is_seen in habits])
        print(f"{kind:12}{name:54}", *(f"{'*' * is_seen:>4} {n:10.2g}" for n, is_seen in habits))
    print("\nHow many each habit sees")
    for kind, marks in seen.items():
        print(f"{kind:12}{len(marks):3}{'':51}", *(f"{sum(column):15}" for column in zip(*marks)))
    if out:
        draw(found, out)
