"""Messages beside the caller, mailboxes, lost peers, wrong calls."""

import contextlib
import itertools
import os
import re
import sys
import time
import weakref
from datetime import timedelta
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as torch_dist

import collectives as dist
import fast.gloo
import parallel
import safe.messages
from fast.gloo import GlooLink, Mailboxes
from lessons.bench.timing import patched
from safe.messages import PeerError, progress
from tests.collectives import BIG
from tests.layouts import small_gpt, tokens_of
from tests.links import replaced, served_by, WAYS
from tests.pool import on_cpus, on_gpus, on_ranks, parametrize, uncollected


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
            ("all_to_all_single", (zeros(9), zeros(3), [3] * 3, [1] * 3), "sends itself 1 elements, and has"),
            ("all_gather", ([t] * 4, t), "tensor_list must hold 3, one for each rank"),
            ("all_to_all", ([t] * 3, [t.int()] * 3), "all tensors must have one dtype"),
            ("scatter", (t, [elsewhere] * 3, rank),
             f"scatter: a {backend} group takes {device} tensors, but scatter_list is on meta"),
            ("all_reduce", (t, dist.ReduceOp.BAND), "is not supported: use SUM"),
            ("broadcast", (t, 0, None, False, 0), "give the root once")]:
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
            ("posted the activation of micro-batch 0 from rank 0", (dist, "irecv", gone))]
    for kind, call, what, *broken in [
            (safe.messages.Watched, lambda: dist.all_reduce(t), "all_reduce in a group of 2", some),
            (GlooLink, lambda: dist.all_reduce(t), "all_reduce in a group of 2", some),
            (GlooLink, lambda: dist.all_reduce(t, async_op=True).wait(), "all_reduce in a group of 2", some),
            (GlooLink, dist.barrier, "barrier in a group of 2", some),
            (GlooLink, lambda: net.forward_backward([x], [y]), *step[rank])]:
        says = f"^{re.escape(what)}: Connection closed by peer$"
        with (replaced(WAYS["messages"][1]), served_by(kind), patched(broken), pytest.raises(PeerError, match=says)):
            call()


def needs_mailboxes():
    """In a process of a pool: the test is skipped where processes cannot share memory so."""
    if torch.get_default_device().type == "cuda" or sys.platform != "linux":
        pytest.skip("processes share memory through Linux's /proc, for tensors of the CPU")
    try:
        os.listdir(f"/proc/{os.getppid()}/fd")
    except PermissionError:
        pytest.skip("processes of this machine may not look at each other")


@parametrize("slot_bytes", [16, 1024])
@parametrize("size", [2, 3, 5])
@on_ranks()
def test_ranks_of_a_machine_hand_on_messages_of_any_size(slot_bytes, rank, size):
    """All at once, both ways and in order."""
    needs_mailboxes()
    sizes = [1, slot_bytes - 1, slot_bytes, slot_bytes + 1, 3, 9 * slot_bytes + 5, 0, 2]
    pairs = [(i, r) for i in range(len(sizes)) for r in range(size) if r != rank]

    def message(i, source, to):
        return torch.arange(sizes[i]) * 7 + 100 * source + 10 * to + i

    with patch.object(fast.gloo, "SLOT_BYTES", slot_bytes), served_by(GlooLink) as link:
        dist.barrier()  # mailboxes are made in the first operation
        for times in range(3):
            call, into = link.during("messages"), [(torch.zeros(sizes[i], dtype=torch.int64), r) for i, r in pairs]
            got = call.post(receives=into[:len(into) // 2])
            went = call.post([(message(i, rank, r), r) for i, r in pairs])
            got += call.post(receives=into[len(into) // 2:])
            for handle in went + got if times % 2 else got[::-1] + went:
                handle.wait()
            assert all(t.equal(message(i, r, rank)) for (t, _), (i, r) in zip(into, pairs))
        assert type(link.mailboxes) is Mailboxes


def offers_another_secret(boxes, link, make=Mailboxes.__init__):
    make(boxes, link)
    boxes.offer[2] += 1


OBSTACLES = {  # why a rank cannot take part in mailboxes: what is otherwise there
    "no memory": (os, "memfd_create", Mock(side_effect=OSError)),
    "an older Python": (os, "memfd_create", Mock(side_effect=AttributeError)),
    "no such process": (os, "getpid", lambda: 2 ** 22 + 1),
    "another's memory": (Mailboxes, "__init__", offers_another_secret)}


@parametrize("cause", OBSTACLES)
@on_ranks(3)
def test_ranks_that_share_no_memory_send_over_gloo(cause, rank):
    """Rank 1 cannot take part in mailboxes."""
    needs_mailboxes()
    obstacle = patch.object(*OBSTACLES[cause])
    with obstacle if rank == 1 else contextlib.nullcontext(), served_by(GlooLink) as link:
        t = torch.ones(3) * (1 + rank)
        dist.all_reduce(t)
        assert link.mailboxes is False and t.eq(6).all()


@on_ranks(2)
def test_a_wrong_first_call_waits_for_nobody(rank):
    """Rank 0 hears of it at once though rank 1 never calls."""
    needs_mailboxes()
    with served_by(GlooLink):
        if rank == 0:
            with pytest.raises(ValueError, match="all_reduce: a gloo group takes CPU tensors, but tensor is on meta"):
                dist.all_reduce(torch.zeros(2, device="meta"))
            assert progress()[1] == "all_reduce"


@on_ranks(2)
def test_a_closed_link_keeps_no_memory():
    """No garbage collection is needed."""
    needs_mailboxes()
    with uncollected():
        with served_by(GlooLink) as link:
            dist.barrier()
            kept = weakref.ref(link.mailboxes)
        del link
        assert kept() is None


@on_ranks(2)
def test_ranks_that_call_different_things_hear_of_it(rank):
    """Mailboxes name both sides. Without them no message is taken for another, so the group's timeout ends the call."""
    needs_mailboxes()
    t = torch.ones(4)
    calls = {"16 bytes in torch.float32 of all_reduce": lambda group=None: dist.all_reduce(t, group=group),
             "32 bytes in torch.float32 of all_reduce": lambda group=None: dist.all_reduce(t.repeat(2), group=group),
             "16 bytes in torch.int32 of all_reduce": lambda group=None: dist.all_reduce(t.int(), group=group),
             "16 bytes in torch.float32 of all_gather": lambda group=None: dist.all_gather([t, t], t, group=group),
             "1 bytes in torch.uint8 of barrier": dist.barrier}
    for pair in itertools.combinations(calls, 2):
        mine, theirs = pair if rank == 0 else pair[::-1]
        says = f"rank {1 - rank} sends {theirs}, call 1, rank {rank} expects {mine}, call 1$"
        with served_by(GlooLink), pytest.raises(PeerError, match=says):
            calls[mine]()
    with served_by(GlooLink):
        dist.broadcast(t, rank)  # each is the root, and waits for nobody
        with pytest.raises(PeerError, match="of broadcast, call 1, .* of broadcast, call 2$"):
            dist.broadcast(t, 1 - rank)
    for mine in [*calls][:2], [*calls][::2], [*calls][::3]:
        dist.use(group := dist.new_group(timeout=timedelta(seconds=0.5)), "ring")
        with pytest.raises(PeerError, match="Timed out waiting 500ms|Connection closed by peer"):  # which was earlier
            calls[mine[rank]](group)


@parametrize("silent,seconds,says", [(False, 60, "Connection closed by rank 2"),
                                                 (True, 0.2, "nothing arrived for 0.2 s")])
@on_ranks(3)
def test_message_of_a_lost_or_silent_peer_is_named(silent, seconds, says, rank):
    """By the number that its user knows, and not by its place in the group."""
    needs_mailboxes()
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    with served_by(GlooLink, group) as link:
        dist.barrier(group)
        if rank == 1:
            with (patch.object(link.mailboxes, "timeout", seconds),
                  pytest.raises(PeerError, match=f"^all_reduce in a group of 2: {says}$")):
                dist.all_reduce(torch.ones(3), group=group)
        if silent:
            torch_dist.barrier(group)  # until rank 1 has heard of it
