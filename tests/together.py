"""All ranks as threads of one process: the bits of real processes in every order, and deadlocks that are named."""

import contextlib
import io
import itertools
import math
import re
import sys
from bdb import BdbQuit
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as torch_dist

import collectives as dist
import lessons.demos
import parallel
from further import together
from tests import layouts
from tests.pool import in_new_process
from tests.runs import output_of, printed_by

ORDERS = [*itertools.product(range(10), (False, True), ("drawn", "eager", "late"))]


def steps_of(row, orders):
    """What the steps of a row of tests/layouts.py give on each rank, in each order."""
    torch.set_num_threads(1)
    place, options = layouts.arguments_of(layouts.case_of(f"steps=1 n_layer=1 {row}"))
    with patch.object(torch_dist, "all_reduce", dist.all_reduce):  # there is no library's
        steps = partial(layouts.in_layout, parallel.Reference, *place, **options)
        return [together.run(math.prod(place[0].values()), steps, together.World(*order)) for order in orders]


@pytest.mark.parametrize("row", ["dp=2 zero=0 micro_batches=2", "tp=2", "pp=2 micro_batches=2 schedule=zb-h1",
                                 "dp=2 zero=3 recompute=block", "cp=2 tokens=8", "dp=2 ep=2 experts=4 tokens=8"])
def test_ranks_that_are_threads_give_the_bits_of_processes_in_every_order(plain_pool, row):
    place, options = layouts.arguments_of(layouts.case_of(f"steps=1 n_layer=1 {row}"))
    want = plain_pool(2).run(layouts.in_layout, parallel.Reference, *place, **options)
    for got in in_new_process(steps_of, row, ORDERS[:6]):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------------ planted faults

def head_on():
    """Both send first."""
    mine, theirs = torch.ones(2, 3)
    dist.send(mine, 1 - dist.get_rank())
    dist.recv(theirs, 1 - dist.get_rank())


def not_all():
    if dist.get_rank():
        dist.all_reduce(torch.ones(4))


def unlike_sizes():
    dist.all_reduce(torch.ones(4 + 2 * dist.get_rank()))


def too_early():
    """The result is read before wait()."""
    t = torch.ones(4)
    handle, read = dist.all_reduce(t, async_op=True), t.sum().item()
    handle.wait()
    return read


def still_sent():
    """A tensor is written while it is being sent."""
    t = torch.ones(4)
    if dist.get_rank():
        dist.recv(t, 0)
        return t.sum().item()
    handle = dist.isend(t, 1)
    t.zero_()
    handle.wait()


def turned():
    """One rank averages its layers in another order."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    units = [parallel.Unit([*layer.parameters()], None, 0, torch.float32) for layer in net]
    net(torch.ones(2, 4)).sum().backward()
    for unit in reversed(units) if dist.get_rank() else units:
        unit.start_average()
    for unit in units:
        unit.finish_average()


def found(body):
    """What each order gives: results, or the first words of a deadlock."""
    said = set()
    for order in ORDERS:
        try:
            said.add(str(together.run(2, body, together.World(*order))))
        except together.Deadlock as deadlock:
            said |= {*str(deadlock).split("; ")}
    return said


@pytest.mark.parametrize("body, some", [
    (head_on, {"[None, None]", "rank 0 waits for rank 1 to receive"}),
    (not_all, {"rank 1 waits for rank 0 in all_reduce", "rank 0 has ended"}),
    (unlike_sizes, {"rank 0 has sent rank 1 8 bytes in all_reduce", "rank 1 has sent rank 0 12 bytes in all_reduce"}),
    (too_early, {"[4.0, 4.0]", "[4.0, 8.0]"}), (still_sent, {"[None, 4.0]", "[None, 0.0]"}),
    (turned, {"rank 0's worker waits for rank 1 in all_reduce, 0.weight",
              "rank 1's worker waits for rank 0 in all_reduce, 1.weight"})],
    ids=lambda value: getattr(value, "__name__", ""))
def test_orders_find_what_is_wrong_in_some_and_a_deadlock_is_named(body, some):
    assert some <= in_new_process(found, body)


# ------------------------------------------------------------------------------------------------------------ programs

def debugged(commands, function, *words):
    """What it prints in this process, with pdb's commands typed."""
    with patch.object(sys, "stdin", io.StringIO("\n".join(commands))):
        return function(*words)


def with_a_breakpoint():
    def body():
        numbers = torch.full((2,), 5.0 + dist.get_rank())
        if dist.get_rank() == 1:
            breakpoint()
        dist.all_reduce(numbers)
        print(f"end of {dist.get_rank()}")

    def run():
        with contextlib.suppress(BdbQuit):
            together.run(4, body)

    return printed_by(run)


def test_a_breakpoint_stops_in_any_rank_and_shows_the_others():
    """One that is set while another rank's thread runs under pdb, too; in all ranks but the one that it names it does
    not. To quit ends all of them without a word."""
    said = in_new_process(debugged, ["b collectives.ring_all_gather, get_rank() == 2", "c", "p get_rank(), ranks[2]",
                                     "p ranks[0]['numbers'].tolist()", "p ranks[3]['nothing']", "q"], with_a_breakpoint)
    assert len(re.findall(r"collectives.py\(\d+\)ring_all_gather", said)) == 1 and "end of" not in said
    assert re.search(r"\(2, rank 2 can go on; collectives.py:\d+ ring_all_gather\)\n.*\[5.0, 5.0\]\n", said), said
    assert said.endswith("*** KeyError: 'rank 3 has no nothing now'\n(Pdb) ")
    said = in_new_process(debugged, ["c"], with_a_breakpoint)
    assert sorted(re.findall(r"end of (\d)", said)) == [*"0123"]


def test_the_lesson_shows_the_last_messages():
    said = in_new_process(output_of, lessons.demos.main, *"together --dp 2 --tp 1".split())
    assert re.search(r"rank [01] -> rank [01] +[\d,]+ bytes  all_reduce\n", said) and "; loss " in said, said
