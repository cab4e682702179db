"""F and B as one. (Layouts that equal one process are rows of tests/layouts.py.)"""

import itertools
from functools import partial
from unittest.mock import patch

import pytest
import torch

import collectives as dist
from further.kinds import resized
from further.lists import checked
from further.pairs import checked_pairs, in_pairs, Turns
from further.schedules import SCHEDULES
from tests.layouts import SMALL, small_gpt, tokens_of
from tests.pool import on_cpus_both, on_ranks, parametrize


def test_two_passes_change_turns_and_end_alone():
    turns, said = Turns(torch.device("cpu")), []

    def strand(name, times):
        for i in range(times):
            said.append(f"{name}{i}")
            turns.change()
        said.append(name)

    for _ in range(2):
        said.clear()
        turns.both(partial(strand, "a", 3), partial(strand, "b", 1))
        assert said == ["a0", "b0", "a1", "b", "a2", "a"]
    turns.change()  # alone nothing happens


@parametrize("fails", [0, 1])
def test_of_two_passes_one_may_fail(fails):
    """The other ends, and what was raised comes to the caller; then turns go on as if nothing had been."""
    turns, ended = Turns(torch.device("cpu")), []

    def strand(number):
        turns.change()
        if number == fails:
            raise ZeroDivisionError
        turns.change()
        ended.append(number)

    with pytest.raises(ZeroDivisionError):
        turns.both(partial(strand, 0), partial(strand, 1))
    assert ended == [1 - fails]
    turns.both(partial(ended.append, 2), partial(ended.append, 3))
    assert ended[1:] == [2, 3]


def test_each_schedule_can_run_in_pairs():
    """With the same actions in the same order, and as many transfers. Where pairs would make all ranks wait, some are
    taken apart."""
    for (name, schedule), p, m in itertools.product(SCHEDULES.items(), (1, 2, 3, 4), (1, 2, 4, 12)):
        if name == "interleaved" and (p == 1 or m % p):
            continue
        v = 1 + (name == "interleaved")
        for before, after in zip(checked(schedule, p, m, v), checked_pairs(schedule, p, m, v), strict=True):
            assert {*before} == {*after} and len(before) == len(after)
            assert [a for a in before if a.kind in "FBIW"] == [a for a in after if a.kind in "FBIW"]


@parametrize("name, p, m, pairs", [("1f1b", 1, 8, [7]), ("1f1b", 2, 8, [6, 7]), ("dualpipe-v", 2, 8, [11, 12]),
                                   ("dualpipe-v", 4, 12, [13, 16, 16, 16]), ("1f1b", 4, 12, [8, 0, 0, 11])])
def test_a_dualpipe_has_most_pairs(name, p, m, pairs):
    lists = checked_pairs(SCHEDULES[name], p, m, 1)
    assert [sum(len(some) == 2 for some in in_pairs(actions)) for actions in lists] == pairs


@on_cpus_both
@on_ranks(2)
def test_a_pass_computes_while_the_other_s_rows_travel():
    """Between the start of a pass's exchange and the wait for it stands the start of another's."""
    net = small_gpt(resized(SMALL, experts=4), dp=2, ep=2, pairs=True)
    events, real = [], dist.all_to_all_single

    def look(*args, async_op=False, **options):
        handle = real(*args, async_op=async_op, **options)
        if not async_op:
            return handle
        number = sum(kind == "start" for kind, _ in events)
        events.append(("start", number))
        return dist.Handle(lambda: (events.append(("wait", number)), handle.wait()), handle.is_completed)

    x, y = (t.to(net.device).split(1)[4 * dist.get_rank():][:4] for t in tokens_of(0, tokens=8))
    with patch.object(dist, "all_to_all_single", look):
        net.forward_backward(x, y)
    under_way = most = hidden = 0
    for kind, number in events:
        under_way += 1 if kind == "start" else -1
        hidden += kind == "start" and under_way == 2
        most = max(most, under_way)
    # Each of 4 micro-batches has 4 exchanges in F and 4 in B, of two blocks. F0 and the last B run alone.
    assert len(events) == 2 * 4 * 8 and most == 2 and hidden >= 3 * 4
