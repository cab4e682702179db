"""Bugs that real systems shipped, each as one changed line of the reference. docs/bugs.md is their table."""

import importlib
import math
import pathlib
import re
import sys
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import torch

from tests import layouts
from tests.pool import close, HERE, parametrize
from tests.puzzles import ranks
from tests.walls import REFERENCE, copy_reference


class Bug(NamedTuple):
    thread: str    # where its users tell of it: owner/repository#number
    layout: str    # a row of tests/layouts.py, which is red with the new line
    symptom: str   # what the function of this name says then
    file: str
    function: str
    old: str       # a line that stands in the file once, in this function
    new: str


PAGE = pathlib.Path(HERE, "docs", "bugs.md").read_text()
ROWS = re.findall(r"(?m)^\| \d+ \| .+ \| \[(.+?)\]\(https://github\.com/.+?\) \| `(.+)` \| (.+) \|$", PAGE)
LINES = re.findall(r"(?m)^\*\*\d+\.\*\* `(.+)`, `(.+)`\. (?s:.+?)\n```diff\n-(.+)\n\+(.+)\n```$", PAGE)
BUGS = [Bug(*row, *line) for row, line in zip(ROWS, LINES, strict=True)]


def in_layout_by(folder, *args, **options):
    """tests/layouts.py runs the reference whose copy lies in a folder; so from now on in this process."""
    sys.path.insert(0, str(folder))
    for name in [*sys.modules]:
        if name.split(".")[0] in REFERENCE:
            del sys.modules[name]
    return importlib.reload(layouts).in_layout(*args, **options)


def factor(ours, theirs, tolerance):
    """"" where a tensor is right; "x 2" where it is twice as large, element by element; else "wrong"."""
    ours, theirs = (torch.as_tensor(values).double() for values in (ours, theirs))
    times = float((ours * theirs).sum() / theirs.square().sum())
    if close(ours, theirs, tolerance):
        return ""
    if math.isnan(times):
        return "NaN"
    return f"x {times:.3g}" if close(ours, times * theirs, tolerance) else "wrong"


def symptom(results, want, tolerance):
    """How the steps that all ranks ran differ from one process, in a line."""
    losses, norms, gradients, weights = results[0]
    loss, norm = factor(losses[0], want[0][0], tolerance), factor(norms[0], want[1][0], tolerance)
    if not loss and factor(losses, want[0], tolerance):
        loss = "wrong after a step"
    said = [f"loss {loss}"] * bool(loss) + [f"norm {norm}"] * bool(norm)
    found = defaultdict(list)
    for name, gradient in gradients.items():
        found[factor(gradient, want[2][name], tolerance)].append(name)
    for how, names in found.items():
        if how:
            few = f" in {len(names)} of {len(gradients)}, as {names[0]}" if len(found) > 1 else ""
            said.append(f"gradients {how}{few}")
    if not any(factor(weight, want[3][name], tolerance) for name, weight in weights.items()):
        said.append("weights right")
    if any(not close(others[3][name], weight) for others in results for name, weight in weights.items()):
        said.append("ranks differ")
    ones = np.concatenate([weight for name, weight in weights.items() if "ln_" in name and "weight" in name]) == 1
    if ones.mean() > 0.5:
        said.append("most weights of norms still 1")
    return "; ".join(said)


@parametrize("bug", BUGS, ids=lambda bug: bug.thread)
def test_a_line_makes_the_bug_that_shipped(bug, ranks, tmp_path):
    """Without it test_layout_equals_one_process is green, which has the same row."""
    copy_reference(REFERENCE, tmp_path)
    before, after = (tmp_path / bug.file).read_text().split(f" {bug.old}\n")
    inside = [re.findall(pattern, before)[-1] for pattern in (r"(?m)^(?:class|def) (\w+)", r"\bdef (\w+)")]
    assert inside == [bug.function.split(".")[0], bug.function.split(".")[-1]]
    (tmp_path / bug.file).write_text(f"{before} {bug.new}\n{after}")
    (layout, optimizer, micro_batches, change), options = layouts.arguments_of(layouts.case_of(bug.layout))
    results = ranks(math.prod(layout.values())).run(in_layout_by, tmp_path, layout, optimizer, micro_batches, change,
                                                    **options)
    want = layouts.one_process(optimizer, *(options[name] for name in layouts.SIZED), **change)
    assert symptom(results, want, 2**-5 if "dtype" in options else 1e-10) == bug.symptom


def test_each_bug_has_a_layout_of_the_tests():
    rows = [row for _, _, row, _ in layouts.proofs()]
    rows += [row for many, _ in layouts.NEAR for row in layouts.expanded(many)]
    assert {bug.layout for bug in BUGS} <= {*rows} and len(BUGS) == 12
