"""Letters: right layouts are clean, what is left out is seen, and to what letters cannot see they are blind."""

import math
import re
from unittest.mock import patch

import torch

import further.schedules
import train
from further.letters import Letters, made, Wrong
from lessons import blind, demos, letters
from lessons.blind import case_of, mutated, STRATEGIES, wrong_by_letters
from tests import layouts
from tests.pool import in_new_process, parametrize
from tests.runs import output_of

MORE = [  # HSDP whose shards and replicas lie across cp and ep; these eight ranks are one process, too
    "dp=4 cp=2 ep=2 experts=4 tokens=8 zero=2 zero_within=2 micro_batches=2",
    "dp=4 cp=2 ep=2 experts=4 tokens=8 zero=3 zero_within=4", "dp=4 cp=2 tokens=8 zero=1 zero_within=4"]


def wrong_in(row):
    """What letters find in a row of LAYOUTS, on the first rank of each stage: its other ranks run the same."""
    (layout, _, micro_batches, change), options = layouts.arguments_of(case_of(row))
    ranks, config = math.prod(layout.values()), layouts.sized(**change)
    sizes = options["batch"] // layout.get("dp", 1), options["tokens"], config, options["holes"]
    fields = {name: value for name, value in options.items() if hasattr(train.Layout, name)}
    with patch.dict(further.schedules.SCHEDULES, {"in-turns": layouts.in_turns}):
        return letters.check(config, train.Layout(**layout, **fields), range(0, ranks, ranks // layout.get("pp", 1)),
                             *(t.chunk(micro_batches) for t in layouts.tokens_of(0, *sizes)))[1]


def wrong_in_rows(rows):
    return {row: wrong for row in rows if (wrong := wrong_in(row))}


def test_letters_of_right_layouts_are_clean():
    rows = [row for _, row, _ in layouts.rows() if "forced=" not in row]
    assert in_new_process(wrong_in_rows, rows + MORE) == {} and len(rows) > 100


def wrong_in_mutants(row):
    """{mutant: what letters say} of each call of a strategy's step."""
    case, found = case_of(f"n_layer=1 {row}"), {}
    wrong, mutants = blind.mutants_in(wrong_by_letters, case)
    assert not wrong
    for mutant in mutants:
        with mutated(*mutant):
            found[mutant] = wrong_by_letters(case)
    return found


@parametrize("strategy, mutants", [("ZeRO 3", 10), ("tensor", 8), ("sequence", 14), ("pipeline", 10), ("experts", 16)])
def test_letters_see_each_mutant_of_a_collective(strategy, mutants):
    """All but the norm's, and each says where: the line, the parameter, or who sends."""
    found = in_new_process(wrong_in_mutants, STRATEGIES[strategy])
    assert len(found) == mutants and all(found.values())
    place = r"\.py:\d+ |(gradient of|after a step) \S+\.(weight|bias) |the loss|a router's bias|a message of ranks"
    assert all(re.search(place, wrong) for wrong in found.values())


def wrong_in_bugs():
    found = {}
    for bug in blind.bugs():
        with blind.with_line(bug):
            found[bug.number] = re.sub(r":\d+ ", ":N ", wrong_by_letters(case_of(bug.layout)))
    return found


def test_which_bugs_that_shipped_letters_see():
    """To the others they are blind: to numbers, to the norm, and to what of several right ones a line takes."""
    found = in_new_process(wrong_in_bugs)
    seen = " ".join(number for number, wrong in found.items() if wrong)
    assert seen == "5 6 9 18 20 21 22 23 28 31"
    assert found["20"] == ("rank 0   tp: mm of a term of a sum and each rank's own\n"
                           "    since backward of lm_head parallel.py:N ColumnParallelLinear.forward\n"
                           "    at backward of h.1.mlp.c_proj parallel.py:N RowParallelLinear.forward")


@parametrize("name, given, letter", [
    ("mm", "VV", "P"), ("mm", "RV", "V"), ("addmm", "VVV", "P"), ("add", "PP", "P"), ("add", "0P", "P"),
    ("sum", "M", "M"), ("mul", "PR", "P"), ("gelu", "V", "V"), ("gelu", "0", "R"), ("neg", "0", "0"),
    ("native_layer_norm_backward", "PR", "P"), ("add", "PR", None), ("addmm", "RVV", None), ("mul", "PV", None),
    ("mul", "PP", None), ("gelu", "P", None), ("add", "EV", None)])
def test_what_operations_make_of_letters(name, given, letter):
    try:
        assert made(name, [*given], True) == letter
    except Wrong:
        assert letter is None


def test_parts_of_what_is_joined_keep_their_letters():
    types = Letters({"tp": (2, 1)})
    a, b = torch.ones(2, 3), torch.ones(2)
    types.set(a, {"tp": "P of a product"})
    with types:
        both = torch.cat([a.flatten(), b])
        parts = both.split([6, 2])
        parts[0].zero_()
    assert [types.of(t)["tp"] for t in (parts[0].view(2, 3)[1], parts[1])] == ["0", "R"]


def test_the_lesson_shows_what_f_and_g_make_of_letters():
    printed = re.sub(r":\d+ ", ":N ", in_new_process(output_of, demos.main, "types"))
    for shown in (
            "tp   all_reduce SUM: P -> R                  8 x  h.*.attn.c_proj parallel.py:N ReduceFromGroup.forward",
            "parallel.py:N CopyToGroup.backward, backward of h.*.attn.c_attn parallel.py:N CopyToGroup.forward",
            "dp   gradient: V -> M                        8 x  h.*.ln_1.weight", "Nothing is wrong."):
        assert shown in printed
