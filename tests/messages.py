"""Messages beside the caller, mailboxes, lost peers, wrong calls."""

import contextlib
import gc
import itertools
import os
import sys
import time
import unittest.mock
import weakref

import pytest
import torch
import torch.distributed as torch_dist

import collectives as dist
import fast.gloo
import parallel
import safe.launch
from tests.collectives import (
    _spread, _values, back_to_ours, BIG, serve_world_by, small_traffic)
from fast.gloo import GlooLink, Mailboxes
from fast.pipeline import PatientPipeline
from safe.messages import PeerError, progress


def async_overlap():
    """The operation gets done while the caller computes; several finish in order."""
    t = torch.ones(4 * BIG)
    if t.is_cuda:
        handle = dist.all_reduce(t, async_op=True)
        torch.cuda._sleep(2 * 10**9)  # about a second of the caller's stream
        busy, deadline = torch.cuda.current_stream().record_event(), time.time() + 0.5
        while not handle.is_completed() and time.time() < deadline:
            pass
        beside = handle.is_completed() and not busy.query()
        handle.wait()
        assert (t == dist.get_world_size()).all()
        return beside
    handles = [dist.all_reduce(t, async_op=True) for _ in range(4)]
    beside = not handles[-1].is_completed()
    for handle in handles:
        handle.wait()
    assert (t == dist.get_world_size() ** 4).all()
    return beside


def test_async_runs_beside_the_caller(pool):
    assert all(pool(3).run(async_overlap))


def bad_calls():
    messages = []
    for call in (lambda: dist.all_gather_into_tensor(torch.zeros(5), torch.zeros(2)),
                 lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(5)),
                 lambda: dist.all_gather_into_tensor(torch.zeros(4), torch.zeros(2), async_op=True).wait(),
                 lambda: dist.all_to_all_single(torch.zeros(5), torch.zeros(5)),
                 lambda: dist.all_to_all_single(torch.zeros(9), torch.zeros(3), [3] * 3, [1] * 3),
                 lambda: dist.gather(torch.zeros(2), [torch.zeros(2)], dst=dist.get_rank()),
                 lambda: dist.all_reduce(torch.zeros(2), op=dist.ReduceOp.BAND),
                 lambda: dist.broadcast(torch.zeros(2), src=0, group_src=0)):
        with pytest.raises(ValueError) as error:
            call()
        messages.append(str(error.value))
    return messages


def tensors_of_two_devices():
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    with pytest.raises(ValueError) as error:
        dist.scatter(here, [here, there] if dist.get_rank() == 0 else [there], src=0)
    return str(error.value)


def test_tensor_of_another_device_is_named(pool):
    takes = {"cpu": "a gloo group takes CPU tensors", "cuda": "a nccl group takes CUDA tensors"}[pool.device_type]
    assert pool(2).run(tensors_of_two_devices) == [f"scatter: {takes}, but scatter_list is on meta"] * 2


def test_bad_calls_raise_before_anything_is_sent(pool):
    assert "must hold 3 times" in pool(3).run(bad_calls)[0][0]
    pool(3).run(small_traffic)  # and the group still works


def lost_at_once():
    """What operations say where isend and irecv themselves, not their handles, find out that a peer has gone."""
    def gone(*args, **kwargs):
        raise RuntimeError("[/gloo/pair.cc:589] Connection closed by peer. See the log")

    mesh = parallel.make_mesh("cpu", pp=dist.get_world_size())
    pipeline = PatientPipeline({}, 2, mesh, None, torch.float32, 1, torch.device("cpu"))
    pipeline.begin([], torch.zeros(1, 1, 1), None, 1.0, None)
    pipeline.values[parallel.Action("RF", 1, 0)] = dist.Handle(), torch.zeros(1, 1, 1)
    calls = [lambda: dist.all_reduce(torch.zeros(7)), lambda: dist.all_reduce(torch.zeros(7), async_op=True).wait(),
             dist.barrier]
    calls += [lambda: pipeline.send(parallel.Action("SF", 0, 0)) if dist.get_rank() == 0
              else pipeline.expect(parallel.Action("RF", 1, 0))]
    said = []
    for comm, call in [("ring", calls[0]), *(("ours", call) for call in calls)]:
        library = ["batch_isend_irecv"] if comm == "ring" else ["isend"]
        irecv = dist.irecv if comm == "ring" else gone
        with (unittest.mock.patch.multiple(torch_dist, **dict.fromkeys(library, gone)),
              unittest.mock.patch.object(dist, "irecv", irecv), unittest.mock.patch.object(fast.gloo, "irecv", irecv),
              gloo_alone()):
            if comm == "ring":
                dist.use(None, "ring")
            with pytest.raises(PeerError) as error:
                call()
            said.append(str(error.value))
    return said


@contextlib.contextmanager
def gloo_alone():
    """As on several machines: ranks have no memory in common."""
    with unittest.mock.patch.object(fast.gloo, "make_mailboxes", lambda link: None):
        serve_world_by(GlooLink)
        yield
        back_to_ours()


def test_a_peer_lost_as_a_message_starts_is_named(pool):
    if pool.device_type == "cuda":
        pytest.skip("NCCL tells of it in the stream")
    for rank, said in enumerate(pool(2).run(lost_at_once)):
        *all_reduces, barrier, pipeline = said
        assert (all_reduces == ["all_reduce in a group of 2: Connection closed by peer"] * 3
                and barrier.startswith("barrier in a group of 2: C"))
        what = [f"send {parallel.Action('SF', 0, 0)} of the pipeline",
                "posted the activation of micro-batch 0 from rank 0 (pipeline rank 0)"][rank]
        assert pipeline == f"{what}: Connection closed by peer"


def messages_of_many_sizes(slot_bytes):
    """Messages of many sizes, all at once, both ways and in order; what was received in place of what."""
    rank, size, wrong = dist.get_rank(), dist.get_world_size(), []
    with unittest.mock.patch.object(fast.gloo, "SLOT_BYTES", slot_bytes):
        serve_world_by(GlooLink)
        dist.barrier()  # mailboxes are made in the first operation
        link = dist.link_of(None)
        sizes = [1, slot_bytes - 1, slot_bytes, slot_bytes + 1, 3, 9 * slot_bytes + 5, 0, 2]
        others = [r for r in range(size) if r != rank]

        def message(n, source, to, i):
            return torch.arange(n, dtype=torch.int64) * 7 + 100 * source + 10 * to + i

        for times in range(3):
            into = [(torch.zeros(n, dtype=torch.int64), r) for n in sizes for r in others]
            got = link.post(receives=into[:len(into) // 2])
            went = link.post([(message(n, rank, r, i), r) for i, n in enumerate(sizes) for r in others])
            got += link.post(receives=into[len(into) // 2:])
            (link.wait(went), link.wait(got)) if times % 2 else (link.wait(got[::-1]), link.wait(went))
            want = [message(n, r, rank, i) for i, n in enumerate(sizes) for r in others]
            wrong += [(a.tolist(), b.tolist()) for (a, _), b in zip(into, want) if not a.equal(b)]
        kind = type(link.mailboxes).__name__
        back_to_ours()
    return kind, wrong


def needs_mailboxes(pool):
    if pool.device_type == "cuda" or sys.platform != "linux":
        pytest.skip("processes share memory through Linux's /proc, for tensors of the CPU")
    try:
        os.listdir(f"/proc/{pool(2).processes[0].pid}/fd")
    except PermissionError:
        pytest.skip("processes of this machine may not look at each other")


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_of_a_machine_hand_on_messages_of_any_size(pool, size):
    needs_mailboxes(pool)
    for slot_bytes in (16, 1024):
        assert pool(size).run(messages_of_many_sizes, slot_bytes) == [("Mailboxes", [])] * size


def without_mailboxes(who, cause):
    """What an all-reduce gives where one rank cannot take part in mailboxes, and whether there are any."""
    def fails(*args, **kwargs):
        raise OSError("not here")

    def absent(*args):
        raise AttributeError("module 'os' has no attribute 'memfd_create'")

    def offers_another_secret(boxes, link):
        whole(boxes, link)
        boxes.offer[2] += 1

    whole, changes = Mailboxes.__init__, {
        "no memory": (os, "memfd_create", fails), "an older Python": (os, "memfd_create", absent),
        "no such process": (os, "getpid", lambda: 2 ** 22 + 1),
        "another's memory": (Mailboxes, "__init__", offers_another_secret)}
    with unittest.mock.patch.object(*changes[cause]) if dist.get_rank() == who else contextlib.nullcontext():
        serve_world_by(GlooLink)
        t = torch.ones(3) * (1 + dist.get_rank())
        dist.all_reduce(t)
        kind, _ = dist.link_of(None).mailboxes, back_to_ours()
    return kind, t.tolist()


@pytest.mark.parametrize("cause", ["no memory", "an older Python", "no such process", "another's memory"])
def test_ranks_that_share_no_memory_send_over_gloo(pool, cause):
    needs_mailboxes(pool)
    assert pool(3).run(without_mailboxes, 1, cause) == [(False, [6.0] * 3)] * 3


def first_call_is_wrong():
    """What rank 0 hears at once though rank 1 never calls; then who keeps the memory of a link that is closed."""
    serve_world_by(GlooLink)
    said = None
    if dist.get_rank() == 0:
        with pytest.raises(ValueError) as error:
            dist.all_reduce(torch.zeros(2, device="meta"))
        said = str(error.value), progress()[1]
    back_to_ours()
    serve_world_by(GlooLink)
    dist.barrier()
    link = dist.link_of(None)
    kept, on = weakref.ref(link.mailboxes), gc.isenabled()
    gc.disable()
    back_to_ours()
    del link
    gone = kept() is None
    if on:
        gc.enable()
    return said, gone


def test_a_wrong_first_call_waits_for_nobody_and_a_closed_link_keeps_no_memory(pool):
    needs_mailboxes(pool)
    (said, gone), other = pool(2).run(first_call_is_wrong)
    assert said == ("all_reduce: a gloo group takes CPU tensors, but tensor is on meta", "all_reduce")
    assert gone and other == (None, True)


def message_of_a_lost_peer():
    """What rank 0 hears where rank 1 has closed its end, and where it is silent."""
    said = []
    for silent in (False, True):
        serve_world_by(GlooLink)
        dist.barrier()
        if dist.get_rank() == 0:
            with unittest.mock.patch.dict(safe.launch.waits, timeout=0.2), pytest.raises(PeerError) as error:
                dist.all_reduce(torch.ones(3))
            said.append(str(error.value))
        elif silent:
            time.sleep(1)
        back_to_ours()
    return said


def test_message_of_a_lost_or_silent_peer_is_named(pool):
    needs_mailboxes(pool)
    lost, silent = pool(2).run(message_of_a_lost_peer)[0]
    assert lost == "all_reduce in a group of 2: Connection closed by rank 1 of the group"
    assert silent == "all_reduce in a group of 2: nothing arrived for 0.2 s"


def library_serves_the_group():
    group = torch_dist.new_group(range(dist.get_world_size()))
    dist.use(group, "torch")
    dist.reset_traffic()
    t = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(t, dist.ReduceOp.AVG, group)
    dist.all_reduce(t.clone(), group=group, async_op=True).wait()
    dist.barrier(group)
    assert not dist.traffic()
    return float(t[0])


def test_library_can_serve_a_group(pool):
    assert pool(3).run(library_serves_the_group) == [2.0] * 3


def library_takes_what_ours_take():
    """Of each of the three: (what our link leaves, what the library's leaves), for shapes and gaps that it alone would
    refuse."""
    rank, n, pairs = dist.get_rank(), dist.get_world_size(), []
    shapes = [((n, 2, 3), (2, 3)), ((2 * n, 3), (3, 2)), ((6 * n,), (2, 3)), ((2, n, 3), (6,)), ((n, 1), ()),
              ((n, 0, 2), (0, 2))]
    for (whole, part), spread, async_op in itertools.product(shapes, (False, True), (False, True)):
        prepare = _spread if spread else (lambda t: t)
        for name, out, into in (("all_gather_into_tensor", whole, part), ("reduce_scatter_tensor", part, whole),
                                ("all_to_all_single", whole, whole)):
            if name == "all_to_all_single" and whole[0] % n:
                continue
            left = []
            for comm in ("ring", "torch"):
                dist.use(None, comm)
                output = prepare(torch.zeros(out)).requires_grad_()
                handle = getattr(dist, name)(output, prepare(_values(into, torch.float32, rank)), async_op=async_op)
                assert (handle is None) != async_op
                if async_op:
                    handle.wait()
                left.append(output.tolist())
            pairs.append((name, whole, part, spread, async_op, *left))
    rows = torch.arange(3.0 * n).view(n, 3) + rank  # this rank's slice of the output is the input
    for comm in ("ring", "torch"):
        dist.use(None, comm)
        dist.all_gather_into_tensor(whole := rows.clone(), whole[rank])
        dist.reduce_scatter_tensor(whole[rank], whole)
        pairs.append((comm, whole[rank].tolist()))
    return pairs


@pytest.mark.parametrize("size", [2, 3])
def test_library_takes_what_ours_take(pool, size):
    for *some, (_, ring), (_, library) in pool(size).run(library_takes_what_ours_take):
        assert ring == library and [pair for pair in some if pair[-2] != pair[-1]] == []


def call_that_returns_before_it_ends():
    """Whether the operation was over when the call returned; the sum; then of a call that must wait its turn."""
    x, word = torch.ones(5), torch.ones(1)
    if dist.get_rank():
        dist.recv(word, 0)  # which rank 0 sends once its own call has returned
    handle = dist.all_reduce(x, async_op=True)
    over = handle.is_completed() and not dist.get_rank()
    if not dist.get_rank():
        dist.send(word, 1)
    dist.all_reduce(x)  # behind it
    handle.wait()
    return over, x.tolist()


def test_async_op_returns_before_the_ring_has_run(plain_pool):
    assert plain_pool(2).run(call_that_returns_before_it_ends) == [(False, [4.0] * 5)] * 2
