"""Bugs that real systems shipped, each as one changed line of the reference. docs/bugs.md is their table."""

import importlib
import math
import re
from collections import defaultdict

import numpy as np
import torch

from lessons import blind
from lessons.blind import bugs, copy_with
from lessons.puzzles import HERE, loaded_from
from tests import layouts
from tests.pool import close, in_new_process, parametrize
from tests.puzzles import code_is_kept, ranks


BUGS = bugs()


def in_layout_by(folder, *args, **options):
    """tests/layouts.py runs the reference whose copy lies in a folder; so from now on in this process."""
    loaded_from(folder)
    here = importlib.reload(layouts)
    return here.in_layout(here.parallel.Lecture, *args, **options)


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
    copy_with(bug, tmp_path)
    before, _ = (HERE / bug.file).read_text().split(f" {bug.old}\n")
    inside = [re.findall(pattern, before)[-1] for pattern in (r"(?m)^(?:class|def) (\w+)", r"\bdef (\w+)")]
    assert inside == [bug.function.split(".")[0], bug.function.split(".")[-1]]
    (layout, optimizer, micro_batches, change), options = layouts.arguments_of(blind.case_of(bug.layout))
    results = ranks(math.prod(layout.values())).run(code_is_kept, in_layout_by, tmp_path, layout, optimizer,
                                                    micro_batches, change, **options)
    want = layouts.one_process(optimizer, *(options[name] for name in layouts.SIZED), **change)
    assert symptom(results, want, 2**-5 if "dtype" in options else 1e-10) == bug.symptom


def test_each_bug_has_a_layout_of_the_tests():
    rows = [row for _, _, row, _ in layouts.proofs()]
    rows += [row for many, _ in layouts.NEAR for row in layouts.expanded(many)]
    assert {bug.layout for bug in BUGS} <= {*rows} and len(BUGS) == 26


def test_habits_see_what_they_look_at():
    """Two bugs, of norms and of 16 bits; of DDP's mutants a sum for a mean, and a call that one rank leaves out."""
    jobs = [("bugs", bug.layout, [bug], steps) for bug, steps in ((BUGS[1], 20), (BUGS[11], 45))]
    jobs.append(("DDP", "n_layer=1 dp=2", [], 5))
    found = in_new_process(blind.matrix, jobs)
    seen = {name: "".join(".x"[is_seen] for _, is_seen in habits) for _, name, habits in found}
    mutants = {name: seen.pop(name) for name in [*seen] if name.startswith("all_reduce in ")}
    assert [*seen.values()] == ["..x..x.", "x......"] and len(mutants) == 12
    assert mutants["all_reduce in average_gradient, op"] == "..xx.xx"
    assert {mark for name, mark in mutants.items() if name.endswith(", one")} == {7 * "x"}
