"""Messages beside the caller, lost peers, wrong calls."""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist

import collectives as dist
import parallel
from lessons.bench.timing import patched
from safe.messages import PeerError, progress, Watched
from tests.collectives import BIG
from tests.layouts import small_gpt, tokens_of
from tests.links import served_by
from tests.pool import on_cpus, on_gpus, on_ranks


@on_gpus  # on CPUs a backward returns before its buckets have arrived: tests/data.py
@on_ranks(3)
def test_async_runs_beside_the_caller():
    """The operation gets done while the caller computes."""
    t = torch.ones(4 * BIG)
    handle = dist.all_reduce(t, async_op=True)
    torch.cuda._sleep(2 * 10**9)  # about a second of the caller's stream
    busy, deadline = torch.cuda.current_stream().record_event(), time.time() + 0.5
    while not handle.is_completed() and time.time() < deadline:
        pass
    beside = handle.is_completed() and not busy.query()
    handle.wait()
    assert beside and t.eq(3).all()


@on_ranks(3)
def test_wrong_calls_are_refused_before_anything_is_sent(rank):
    """So the group still works."""
    zeros, t, elsewhere = torch.zeros, torch.ones(2), torch.zeros(2, device="meta")
    backend, device = ("nccl", "CUDA") if t.is_cuda else ("gloo", "CPU")
    dist.all_to_all_single(zeros(3), zeros(3))  # so GPUs have the window of their kernel, which checks less
    for name, given, says in [
            ("all_gather_into_tensor", (zeros(5), zeros(2)), "must hold 3 times 2"),
            ("all_gather_into_tensor", (zeros(4), zeros(2), None, True), "must hold 3 times 2"),
            ("reduce_scatter_tensor", (zeros(2), zeros(5)), "must hold 3 times 2"),
            ("all_to_all_single", (zeros(5), zeros(5)), "5 rows are not 3 blocks"),
            ("all_to_all_single", (zeros(9), zeros(3), [3] * 3, [1] * 3), "1 elements of .* have a tensor of 3"),
            ("all_gather", ([t] * 4, t), "a list of 4 tensors of .*: give 3 of"),
            ("all_to_all", ([t] * 3, [t.int()] * 3), "a list of 3 tensors of .*: give 3 of torch.int32"),
            ("scatter", (t, [elsewhere] * 3, rank),
             f"scatter: a {backend} group takes {device} tensors, but scatter_list is on meta"),
            ("all_reduce", (t, dist.ReduceOp.BAND), "is not supported: use SUM"),
            ("broadcast", (t, 0, None, False, 0), "give the root once"),
            ("broadcast", (t, None, None, False, 9), "rank 9 is not in a group")]:
        with pytest.raises(ValueError, match=says):
            handle = getattr(dist, name)(*given)
            handle.wait()  # where the call itself has not raised, with async_op
    dist.all_reduce(t)
    assert t.eq(3).all()


@on_cpus  # NCCL tells of it in the stream
@on_ranks(2)
def test_a_peer_lost_as_a_message_starts_is_named(rank):
    """Where isend and irecv themselves, not their handles, find out that a peer has gone: by operations, and by a step
    of a pipeline in which rank 0 sends first and rank 1 receives."""
    def gone(*args, **kwargs):
        raise RuntimeError("[/gloo/pair.cc:589] Connection closed by peer. See the log")

    net, (x, y), t = small_gpt(pp=2), tokens_of(0), torch.zeros(7)
    some = torch_dist, "batch_isend_irecv", gone
    step = [(f"send {parallel.Action('SF', 0, 0)} of the pipeline", (torch_dist, "isend", gone)),
            (f"receive {parallel.Action('RF', 0, 0)} of the pipeline", (dist, "irecv", gone))]
    for kind, call, what, *broken in [
            (Watched, lambda: dist.all_reduce(t), "all_reduce in a group of 2", some),
            (Watched, lambda: dist.all_reduce(t, async_op=True).wait(), "all_reduce in a group of 2", some),
            (Watched, dist.barrier, "barrier in a group of 2", some),
            (Watched, lambda: net.forward_backward([x], [y]), *step[rank])]:
        says = f"^{re.escape(what)}: Connection closed by peer$"
        with served_by(kind), patched(broken), pytest.raises(PeerError, match=says):
            call()


@on_cpus
@on_ranks(2)
def test_a_wrong_first_call_waits_for_nobody(rank):
    """Rank 0 hears of it at once though rank 1 never calls."""
    with served_by(Watched):
        if rank == 0:
            with pytest.raises(ValueError, match="all_reduce: a gloo group takes CPU tensors, but tensor is on meta"):
                dist.all_reduce(torch.zeros(2, device="meta"))
            assert progress()[1] == "all_reduce"


@on_cpus  # NCCL knows no tags
@on_ranks(2)
def test_ranks_that_call_different_things_hear_of_it(rank):
    """No message is taken for another, so the group's timeout ends the call."""
    t = torch.ones(4)
    calls = [lambda group: dist.all_reduce(t, group=group), lambda group: dist.all_reduce(t.repeat(2), group=group),
             lambda group: dist.all_reduce(t.int(), group=group), lambda group: dist.all_gather([t, t], t, group=group)]
    for mine in calls[:2], calls[::2], calls[::3]:
        dist.use(group := dist.new_group(timeout=timedelta(seconds=0.5)), "ring")
        with pytest.raises(PeerError, match="Timed out waiting 500ms|Connection closed by peer"):  # which was earlier
            mine[rank](group)
