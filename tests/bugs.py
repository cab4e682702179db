"""Bugs that real systems shipped, each as one changed line of the reference. docs/bugs.md is their table."""

import math
import re

import numpy as np
import pytest

import parallel
from lessons import blind
from lessons.blind import bugs
from lessons.puzzles import HERE
from tests import layouts, same
from tests.pool import in_new_process, parametrize, pools


BUGS = bugs()


@pytest.fixture(scope="module")
def ranks():
    """Processes of their own, because wrong code may leave messages behind that nobody has received."""
    with pools("cpu", plain=True) as get:
        yield get


def with_bug(bug, function, *args):
    with blind.with_line(bug):
        return function(*args)


@parametrize("bug", BUGS, ids=lambda bug: bug.thread)
def test_a_line_makes_the_bug_that_shipped(bug, ranks):
    """Without it test_layout_equals_one_process is green, which has the same row."""
    before, _ = (HERE / bug.file).read_text().split(f" {bug.old}\n")
    inside = [re.findall(pattern, before)[-1] for pattern in (r"(?m)^(?:class|def) (\w+)", r"\bdef (\w+)")]
    assert inside == [bug.function.split(".")[0], bug.function.split(".")[-1]]
    case = blind.case_of(bug.layout)
    some = ranks(math.prod(case.get(axis, 1) for axis in blind.AXES))
    if "dtype" in case:  # weights in bf16 without masters: one process in bf16 has none, too
        weights = some.run(with_bug, bug, same.weights_on_rank, case)[0]
        ones = [weight == 1 for name, weight in weights.items() if "ln_" in name and "weight" in name]
        assert np.concatenate(ones).mean() > 0.5 and bug.symptom == "most weights of norms are still 1"
        return
    found = some.run(with_bug, bug, same.on_rank, case, parallel.Reference, int(bug.symptom[5]))  # "step 1, ..."
    assert ranks(1).run(same.told, case, found) == [bug.symptom]


def test_each_bug_has_a_layout_of_the_tests():
    rows = [row for _, _, row, _ in layouts.proofs()]
    rows += [row for many, _ in layouts.NEAR for row in layouts.expanded(many)]
    assert {bug.layout for bug in BUGS} <= {*rows} and len(BUGS) == 33


def test_habits_see_what_they_look_at():
    """Three bugs, of norms, 16 bits and gathers; of DDP's mutants a sum for a mean, and a call that one rank leaves
    out."""
    jobs = [("bugs", bug.layout, [bug], steps) for bug, steps in ((BUGS[1], 20), (BUGS[11], 45), (BUGS[20], 2))]
    jobs.append(("DDP", "n_layer=1 dp=2", [], 5))
    found = in_new_process(blind.matrix, jobs)
    seen = {name: "".join(".x"[is_seen] for _, is_seen in habits) for _, name, habits in found}
    mutants = {name: seen.pop(name) for name in [*seen] if name.startswith("all_reduce in ")}
    assert [*seen.values()] == ["..x..x.", "x......", "....xxx"] and len(mutants) == 12
    assert mutants["all_reduce in start_average, op"] == "..xx.xx"
    assert {mark for name, mark in mutants.items() if name.endswith(", one")} == {7 * "x"}
