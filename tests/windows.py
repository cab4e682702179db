"""Windows between GPUs, kernels that exchange through them, and replayed graphs of collectives."""

import contextlib
import itertools
import time
import types
import unittest.mock

import numpy as np
import pytest
import torch

import collectives as dist
import fast.exchange
import fast.recorded
import fast.windows
import kernels
from tests.collectives import (
    BIG, Case, compare_with_library, DIRECT, left_by, NTHS)
from tests.links import carried, DirectGlooLink
from tests.pool import needs_kernels, on_cpus, on_gpus, on_ranks


@on_cpus  # NCCL knows no tags: there messages and collectives keep one order
@on_ranks(3)
def test_messages_beside_a_collective():
    """What the caller sends by himself is not taken for a message of a collective that is under way, nor the other way
    round."""
    rank, size = dist.get_rank(), dist.get_world_size()
    large, mine, theirs = torch.full((BIG,), 1.0 + rank), torch.full((1000,), 10.0 + rank), torch.zeros(1000)
    sent = dist.isend(mine, (rank + 1) % size)
    handle = dist.all_reduce(large, async_op=True)
    dist.all_reduce(small := torch.ones(1000))
    dist.recv(theirs, (rank - 1) % size)
    sent.wait()
    handle.wait()
    assert (large == size * (size + 1) / 2).all() and (small == size).all()
    assert (theirs == 10.0 + (rank - 1) % size).all()


@contextlib.contextmanager
def counted(kind, *methods):
    """{method: the mock that counts its calls}"""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(unittest.mock.patch.object(
            kind, name, autospec=True, side_effect=getattr(kind, name))) for name in methods}


@on_cpus  # GPUs have windows of their own
@pytest.mark.parametrize("size", [2, 3, 4])
@on_ranks()
def test_windows_are_used():
    """All that a window can do has been done. That it was right is seen where collectives equal the library's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    methods = "scatter", "gather", "all_reduce", "gather_rows", "scatter_rows", "all_to_all_by_copies", "shift"
    with carried("windows"), counted(fast.windows.Window, *methods) as calls:
        for name in DIRECT:
            left_by(dist, name, Case((7,), async_op=True))
        for name in NTHS:
            left_by(dist, name, Case((5, 8, 32), layout="rows", whole=(size, 5, 8, 32)))
        link, left = dist.link_of(None), torch.zeros(3000, dtype=torch.float64)
        link.log = dist.Traffic()
        link.shift(torch.arange(3000.0, dtype=torch.float64) + rank, left)  # in several turns
        assert left.equal(torch.arange(3000.0, dtype=torch.float64) + (rank - 1) % size) and link.log.bytes == 24_000
    assert all(mock.called for mock in calls.values()), calls


@on_cpus
@pytest.mark.parametrize("elements", [4, 32, 33, 71])  # a turn takes 32: one turn, one, two, three
@on_ranks(2)
def test_copies_wait_for_who_reads_his_window(elements):
    """Rank 1 sums late what lies in its window."""
    scatter, rank, result = fast.windows.Window.scatter, dist.get_rank(), torch.zeros(elements)
    numbers = [torch.arange(elements) + 100.0 * r for r in range(2)]

    def late(window, parts):
        rows = scatter(window, parts)
        time.sleep(0.1 * rank)
        return rows

    dist.reset_traffic()
    with carried("windows", WINDOW_BYTES=256), unittest.mock.patch.object(fast.windows.Window, "scatter", late):
        for turn in range(2):
            dist.all_to_all([torch.zeros(4) for _ in range(2)], [torch.full((4,), 100.0)] * 2, async_op=True).wait()
            if not turn:
                dist.reduce_scatter(result, [chunk * (1 + rank) for chunk in numbers], async_op=True).wait()
    assert (result == 3 * numbers[rank]).all()
    assert sum(log.bytes for log in dist.traffic().values()) == 4 * (elements + 2 * 4)


def sums_by_kernels(name):
    """One element, several rounds, rows of 64 bytes: each by one call of the kernel."""
    size, cases = dist.get_world_size(), []
    for n, dtype, op in [(1, torch.float32, op.SUM), (150, torch.bfloat16, op.SUM), (150, torch.float16, op.MAX),
                         (150, torch.float32, op.AVG), (150, torch.float64, op.AVG), (150, torch.int64, op.SUM)]:
        # One number is contiguous even if its stride is 2.
        cases.append(Case((n,), dtype, op, layout="gaps in parts" if n == 1 else "plain"))
        if name != "all_reduce":
            columns = 64 // dtype.itemsize
            cases.append(Case((3, columns), dtype, op, layout="rows", whole=(size, 3, columns)))
    kernel = name.removesuffix("_tensor").removesuffix("_into")
    with counted(fast.exchange.AllReduce, kernel) as calls:
        compare_with_library(name, cases, "kernel")
    assert calls[kernel].call_count == len(cases)


@on_cpus
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"])
def test_kernels_sum_and_gather(pool, name, size):
    needs_kernels(pool)
    pool(size).run(sums_by_kernels, name)


def block_of_two_sizes():
    with pytest.raises(ValueError, match="my own block has 8 bytes to be sent, 16 to be received"):
        fast.exchange.AllToAll([0, 0], 0, "cpu")([(0, 8), (0, 0)], [(0, 16), (0, 0)])


@on_cpus
def test_kernel_refuses_a_block_of_two_sizes(pool):
    needs_kernels(pool)
    pool(1).run(block_of_two_sizes)


@pytest.mark.parametrize("elements,async_op,ways", [
    (1023, False, ["reduce_scatter"]), (1024, False, ["kernel"]), (1024, True, ["reduce_scatter"]),
    (22 << 20, False, ["kernel"]), (1 << 19, True, ["reduce_scatter", "all_gather"]), (3 << 21, True, ["copies"]),
    (21 << 20, True, ["copies"]), (22 << 20, True, ["reduce_scatter", "all_gather"])])
def test_how_an_all_reduce_between_gpus_goes(elements, async_op, ways, monkeypatch):
    """From SUM_FROM bytes it is one kernel if the caller waits; smaller ones, and those beside the caller, are
    messages; from WINDOW_FROM bytes, as long as one step does, copies; then halves."""
    link, went = object.__new__(DirectGlooLink), []
    link.rank, link.size, link.aside, link.log, link.device = 0, 2, async_op, dist.Traffic(), "cpu"
    window = types.SimpleNamespace(all_reduce=lambda *args: went.append("copies"), others=[1],
                                   sums=types.SimpleNamespace(all_reduce=lambda *args: went.append("kernel")))
    monkeypatch.setattr(link, "window", lambda nbytes: window, raising=False)
    monkeypatch.setattr(kernels, "on_triton", lambda x: True)
    for name in ("reduce_scatter", "all_gather"):
        monkeypatch.setattr(link, name, lambda *args, name=name: went.append(name), raising=False)
    link.all_reduce(torch.empty(elements), dist.ReduceOp.SUM)
    assert went == ways and link.log.bytes == 4 * elements * (ways == ["kernel"])


def test_rows_are_summed_by_the_kernels_asked_for(monkeypatch):
    """On a GPU auto takes Triton, float64 included, and --kernels torch takes torch, where 16-bit rows add up in
    float32."""
    class OnGPU(torch.Tensor):
        is_cuda = True
    called = []
    monkeypatch.setattr(fast.exchange, "sum_rows", lambda rows, results, divide: called.append((rows[0].dtype, divide)))
    monkeypatch.setattr(kernels, "on_triton", lambda x: asked == "auto" and x.dtype in kernels.DTYPES)
    for asked, dtype in itertools.product(("auto", "torch"), (torch.float64, torch.bfloat16)):
        rows, result = ([torch.full((5,), value, dtype=dtype).as_subclass(OnGPU) for value in (256.0, 1.0, 1.0)],
                        torch.zeros(5, dtype=dtype))
        fast.windows._sum_rows(rows, [result], dist.ReduceOp.SUM)
        assert (result == 258).all() == (asked == "torch")
    assert called == [(torch.float64, False), (torch.bfloat16, False)]


class FakeGraph:
    """In place of fast.recorded.RecordedGraph: `body` runs when it is replayed."""

    def __init__(self, body, pool=None):
        self.replay, self.pool = body, pool or object()


def test_third_call_on_the_same_memory_is_recorded(monkeypatch):
    capturing, given_back, ran, recorded = False, 0, [], []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(fast.recorded, "memory_given_back", lambda: given_back)
    monkeypatch.setattr(fast.recorded, "RecordedGraph",
                        lambda body, pool: (recorded.append(body), body(), FakeGraph(body, pool))[-1])
    monkeypatch.setattr(fast.recorded, "REPLAYS", 3)
    replays = fast.recorded.Replays()

    def call(name, copies=False):
        def body():
            ran.append(name)
            replays.copies |= copies
        replays.run((name, False), body)
        return len(recorded)

    assert [call("a") for _ in range(5)] == [0, 0, 1, 1, 1] and len(ran) == 6  # the recording, too, calls the body here
    assert [call("b", copies=True) for _ in range(4)] == [1, 1, 2, 2]
    pools = {graph.pool for graph in replays.graphs.values()}
    assert len(pools) == 1  # operations that run one after the other share memory
    given_back = 1
    # Only the one that copies begins anew.
    assert call("a") == 2 and [call("b", copies=True) for _ in range(4)] == [2, 2, 3, 3]
    capturing = True
    assert [call("c") for _ in range(4)] == [3] * 4 and not replays.calls
    capturing = False
    for name in "cdcdc":  # two are recorded, one more has room: each makes the other's count go
        assert call(name) == 3
    # And no room for a fourth.
    assert [call("c"), call("c")] == [3, 4] and [call("d") for _ in range(5)] == [4] * 5 and not replays.calls


@on_ranks(3)
def test_windows_of_some_ranks_do_not_stop_the_others():
    """A group of some ranks makes a window, then one of all would: not all have made as many."""
    ends, size = dist.new_group([0, dist.get_world_size() - 1]), dist.get_world_size()
    for group, elements in (ends, 1 << 19), (None, 1 << 19), (None, 1 << 23):
        t = torch.full((elements,), 1.0 + dist.get_rank())
        dist.all_reduce(t, group=group)
        if group is None:
            assert (t == size * (size + 1) / 2).all(), elements


@on_gpus
@on_ranks(2)
def test_copies_are_not_replayed_on_memory_that_was_given_back():
    """Sums over memory that is given back to the driver, and comes again at the same address as another allocation."""
    rank, size, where, right = dist.get_rank(), dist.get_world_size(), [], []
    for elements in (1 << 23, 1 << 23, 1 << 24, 1 << 23, 1 << 20, 1 << 20):  # the last two go by messages
        t = torch.empty(elements)[:1 << 23]
        for _ in range(5):  # often enough to be recorded, and replayed; beside the caller, so by copies
            dist.all_reduce(t.fill_(1.0 + rank), async_op=True).wait()
            right.append((t == size * (size + 1) / 2).all())
        where.append(t.data_ptr())
        del t
        torch.cuda.empty_cache()
    assert all(right) and len(where) > len(set(where))  # at one address twice
    assert any(graph.memory is not None for graph in dist.link_of(None).replays.graphs.values())  # some copied


def all_to_alls_in_a_row(most):
    """Other sizes in each, none waited for by the CPU, some beside the caller, some in another group, sums between."""
    rank, size, rng, wrong = dist.get_rank(), dist.get_world_size(), np.random.default_rng(0), []
    other = dist.new_group()
    for i in range(40):
        rows = rng.integers(-most // 4, most, (size, size)).clip(0).tolist()  # of rank i for rank j
        sends, receives = rows[rank], [row[rank] for row in rows]
        x, got = torch.empty(sum(sends), 64), torch.full((sum(receives), 64), -1.0)
        for r, block in enumerate(x.split(sends)):
            block.copy_(torch.arange(len(block))[:, None] % 97 + 100 * rank + 1000 * r + i)
        handle = dist.all_to_all_single(got, x, receives, sends, other if i % 3 == 0 else None, async_op=i % 4 == 0)
        if i % 5 == 0:
            dist.all_reduce(total := torch.ones(1000 + i))
            wrong.append((total != size).any())
        if handle:
            handle.wait()
        x.fill_(-2)  # it may be written at once
        for r, block in enumerate(got.split(receives)):
            wrong.append((block != torch.arange(len(block))[:, None] % 97 + 100 * r + 1000 * rank + i).any())
    dist.destroy_process_group(other)
    assert not any(wrong)


@pytest.mark.parametrize("size", [2, 3])
def test_all_to_alls_in_a_row(pool, size):
    pool(size).run(all_to_alls_in_a_row, 40_000 if pool.device_type == "cuda" else 400)


@on_gpus
@on_ranks(2)
def test_all_to_all_in_a_graph():
    rank, size, graph = dist.get_rank(), dist.get_world_size(), torch.cuda.CUDAGraph()
    x, y = torch.zeros(size * 5000, 64), torch.zeros(size * 5000, 64)
    dist.all_to_all_single(y, x)
    with torch.cuda.graph(graph):
        dist.all_to_all_single(y, x)
    for i in range(20):
        x.copy_((torch.arange(size) + 10.0 * rank + i).repeat_interleave(5000)[:, None].expand_as(x))
        graph.replay()
        assert torch.equal(y[:, 7], (10.0 * torch.arange(size) + rank + i).repeat_interleave(5000))
        dist.all_to_all_single(y, x.neg())  # between replays
        assert torch.equal(y[:, 7], -(10.0 * torch.arange(size) + rank + i).repeat_interleave(5000))


@on_gpus
@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_trees_are_replayed():
    """Each tree is recorded by its third call; a call with another root in between must not take its graph."""
    rank, size = dist.get_rank(), dist.get_world_size()
    t, parts = torch.empty(100), [torch.empty(100) for _ in range(size)]
    for i in range(5):
        for root in range(size):
            dist.broadcast(t.fill_(10 * i + rank), root)
            assert (t == 10 * i + root).all()
            dist.reduce(t.fill_(10 * i + rank), root)
            assert (t == (10 * i * size + size * (size - 1) // 2 if rank == root else 10 * i + rank)).all()
            dist.gather(t.fill_(10 * i + rank), parts if rank == root else None, root)
            assert rank != root or all((part == 10 * i + j).all() for j, part in enumerate(parts))
            dist.scatter(t, [part.fill_(i - j) for j, part in enumerate(parts)] if rank == root else None, root)
            assert (t == i - rank).all()
    assert len(dist.link_of(None).replays.graphs) == 4 * size
