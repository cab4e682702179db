"""Windows between GPUs, kernels that exchange through them, and replayed graphs of collectives."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import threading
import time
import types
import unittest.mock

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist

import fast.rings
import fast.nccl
import collectives as dist
import fast.exchange
import fast.recorded
import fast.windows
import kernels
from tests.collectives import BIG, OPS, _values, DirectGlooLink
from tests.pool import close, needs_kernels


def messages_beside_a_collective():
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


def test_messages_beside_a_collective(pool):
    if pool.device_type == "cuda":
        pytest.skip("NCCL knows no tags: there messages and collectives keep one order")
    pool(3).run(messages_beside_a_collective)


def link_with_window(rank, windows, barrier):
    """Of one rank of several that are threads: windows are memory of the CPU."""
    link, window = object.__new__(DirectGlooLink), object.__new__(fast.windows.Window)
    link.rank, link.size, link.log, link.window = rank, len(windows), dist.Traffic(), lambda nbytes: window
    window.link, window.mine, window.of, window.barrier = link, windows[rank], windows, barrier.wait
    link.replays, link.device = fast.recorded.Replays(), "cpu"
    window.others = [(rank + i) % link.size for i in range(1, link.size)]
    return link


def all_reduce_through_windows(rank, windows, barrier, tensors):
    """Returns what it sent."""
    link = link_with_window(rank, windows, barrier)
    for t, op in tensors:
        link.all_reduce(t, op)
    return link.log.bytes


def rows_through_windows(rank, windows, barrier, own, terms):
    """(`own` of all ranks side by side, this rank's part of the sum of `terms`, the left one's `own`, bytes sent)."""
    link, left = link_with_window(rank, windows, barrier), torch.full_like(own, math.nan)
    whole, mine = own.new_full((len(own), link.size, *own.shape[1:]), math.nan), torch.full_like(own, math.nan)
    link.exchange_nths(None, whole.transpose(0, 1), own, None)
    link.exchange_nths(None, terms.unflatten(1, (link.size, -1)).transpose(0, 1), mine, dist.ReduceOp.SUM)
    link.shift(own.view(-1), left.view(-1))
    return whole.flatten(1, 2), mine, left, link.log.bytes


class Signals:
    """A flag for each (receiver, sender, channel): put sets one that is down, wait takes down one that is set."""

    def __init__(self):
        self.set, self.changed = set(), threading.Condition()

    def of(self, rank):
        def change(flag, before):
            with self.changed:
                assert self.changed.wait_for(lambda: (flag in self.set) == before, timeout=20)
                self.set ^= {flag}
                self.changed.notify_all()
        return types.SimpleNamespace(put_signal=lambda to, channel, _: change((to, rank, channel), False),
                                     wait_signal=lambda sender, channel, _: change((rank, sender, channel), True))


def all_to_all_by_copies(rank, windows, barrier, signals, rows):
    """rows[i][j]: numbers that i sends to j. Returns what came three times, and what was sent."""
    link, results = link_with_window(rank, windows, barrier), []
    window, link.aside = link.window(0), True
    window.handle = signals.of(rank)
    for turn in range(3):
        outgoing = [torch.arange(n) + 1000 * rank + 100 * turn for n in rows[rank]]
        incoming = [torch.full((line[rank],), -1) for line in rows]
        link.all_to_all(outgoing, incoming)
        for t in outgoing:
            t.fill_(-2)  # it may be written at once
        results.append(incoming)
    return results, link.log


@pytest.mark.parametrize("rows", [[[3, 5], [0, 7]], [[1, 0, 0], [9, 2, 23], [4, 0, 0]], [[0, 0], [0, 0]]], ids=str)
def test_all_to_all_by_copies(rows):
    """In slots of 5 or 8 numbers of 8 bytes: some blocks need several, some none."""
    size, signals, barrier = len(rows), Signals(), threading.Barrier(len(rows), timeout=20)
    windows = [torch.zeros(128, dtype=torch.uint8) for _ in rows]
    with concurrent.futures.ThreadPoolExecutor(size) as threads:
        results = list(threads.map(lambda rank: all_to_all_by_copies(rank, windows, barrier, signals, rows),
                                   range(size)))
    for rank, (turns, log) in enumerate(results):
        for turn, incoming in enumerate(turns):
            for sender, t in enumerate(incoming):
                assert torch.equal(t, torch.arange(rows[sender][rank]) + 1000 * sender + 100 * turn)
        assert log.bytes == 3 * 8 * (sum(rows[rank]) - rows[rank][rank])
    assert not signals.set


def reduce_scatter_between_all_to_alls(rank, windows, barrier, signals, elements):
    """Rank 1 sums late what lies in its window."""
    link = link_with_window(rank, windows, barrier)
    window, link.aside, result = link.window(0), True, torch.zeros(elements)
    window.handle = signals.of(rank)

    def scatter(parts):
        rows = fast.windows.Window.scatter(window, parts)
        time.sleep(0.1 * rank)
        return rows

    window.scatter, numbers = scatter, [torch.arange(elements) + 100.0 * r for r in range(2)]
    for turn in range(2):
        link.all_to_all([torch.full((4,), 100.0)] * 2, [torch.zeros(4) for _ in windows])
        if not turn:
            link.reduce_scatter([chunk * (1 + rank) for chunk in numbers], result, dist.ReduceOp.SUM)
    return (result == 3 * numbers[rank]).all(), link.log.bytes


@pytest.mark.parametrize("elements", [4, 32, 33, 71])  # a turn takes 32: one turn, one, two, three
def test_copies_wait_for_who_reads_his_window(elements, monkeypatch):
    monkeypatch.setattr(fast.windows, "WINDOW_FROM", 0)
    monkeypatch.setattr(fast.windows, "WINDOW_BYTES", 256)
    windows, signals = [torch.zeros(256, dtype=torch.uint8) for _ in range(2)], Signals()
    barrier = threading.Barrier(2, timeout=20)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for right, sent in threads.map(lambda rank: reduce_scatter_between_all_to_alls(
                rank, windows, barrier, signals, elements), range(2)):
            assert right and sent == 4 * (elements + 2 * 4)


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


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_through_windows(size, monkeypatch):
    monkeypatch.setattr(fast.rings, "DOUBLING_BYTES", {"switched": 0})
    monkeypatch.setattr(fast.windows, "WINDOW_FROM", 0)
    monkeypatch.setattr(fast.windows, "WINDOW_BYTES", 1 << 10)  # of copies: several steps for 1001 numbers, one for 70
    cases = ([(torch.float64, n, op) for n in (1, 2, 7, 70, 1001) for op in OPS]
             + [(torch.int32, 50, "sum"), (torch.bfloat16, 50, "avg")])
    tensors = [[(_values((n,), dtype, rank), OPS[op]) for dtype, n, op in cases] for rank in range(size)]
    wants = []
    for rows, (_, _, op) in zip(zip(*tensors), cases):
        rows = torch.stack([t for t, _ in rows]).double()
        wants.append({"sum": rows.sum(0), "avg": rows.mean(0), "max": rows.amax(0), "min": rows.amin(0),
                      "product": rows.prod(0)}[op])
    windows, barrier = ([torch.zeros(1 << 14, dtype=torch.uint8) for _ in range(size)],
                        threading.Barrier(size, timeout=20))
    with concurrent.futures.ThreadPoolExecutor(size) as threads:
        sent = sum(threads.map(lambda rank: all_reduce_through_windows(rank, windows, barrier, tensors[rank]),
                               range(size)))
    for i, (dtype, n, op) in enumerate(cases):
        assert all(close(tensors[rank][i][0], wants[i], 1e-2 if dtype == torch.bfloat16 else 1e-12)
                   for rank in range(size)), (dtype, n, op)
    assert sent == sum(2 * (size - 1) * dtype.itemsize * n for dtype, n, _ in cases)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_that_lie_apart_go_through_windows(size, monkeypatch):
    """Tokens of five sequences, two at a time; and a shift in several pieces."""
    B, t, C = 5, 3, 7
    monkeypatch.setattr(fast.nccl, "ROW_BYTES", 0)
    monkeypatch.setattr(fast.windows, "WINDOW_BYTES", 2 * size * t * C * 8 + 8)
    own, terms = (torch.randn(size, B, tokens, C, dtype=torch.float64) for tokens in (t, size * t))
    windows, barrier = ([torch.zeros(fast.windows.WINDOW_BYTES, dtype=torch.uint8) for _ in range(size)],
                        threading.Barrier(size, timeout=20))
    with concurrent.futures.ThreadPoolExecutor(size) as threads:
        results = list(threads.map(lambda rank: rows_through_windows(rank, windows, barrier, own[rank], terms[rank]),
                                   range(size)))
    for rank, (whole, mine, left, sent) in enumerate(results):
        assert torch.equal(whole, torch.cat([*own], 1)) and torch.equal(left, own[rank - 1])
        assert close(mine, terms.sum(0).chunk(size, 1)[rank], 1e-14)
        assert sent == (2 * (size - 1) + 1) * B * t * C * 8


def ends_then_all():
    """A group of some ranks makes a window, then one of all would: not all have made as many."""
    ends, size = dist.new_group([0, dist.get_world_size() - 1]), dist.get_world_size()
    for group, elements in (ends, 1 << 19), (None, 1 << 19), (None, 1 << 23):
        t = torch.full((elements,), 1.0 + dist.get_rank())
        dist.all_reduce(t, group=group)
        if group is None:
            assert (t == size * (size + 1) / 2).all(), elements


def test_windows_of_some_ranks_do_not_stop_the_others(pool):
    pool(3).run(ends_then_all)


def reduce_in_memory_that_comes_back():
    """Sums over memory that is given back to the driver, and comes again at the same address as another allocation."""
    rank, size, where, results = dist.get_rank(), dist.get_world_size(), [], []
    for elements in (1 << 23, 1 << 23, 1 << 24, 1 << 23, 1 << 20, 1 << 20):  # the last two go by messages
        t = torch.empty(elements)[:1 << 23]
        for _ in range(5):  # often enough to be recorded, and replayed; beside the caller, so by copies
            dist.all_reduce(t.fill_(1.0 + rank), async_op=True).wait()
            results.append(bool((t == size * (size + 1) / 2).all()))
        where.append(t.data_ptr())
        del t
        torch.cuda.empty_cache()
    return (results, len(where) > len(set(where)),
            any(graph.memory is not None for graph in dist.link_of(None).replays.graphs.values()))


def test_copies_are_not_replayed_on_memory_that_was_given_back(pool):
    if pool.device_type == "cpu":
        pytest.skip("copies are for GPUs")
    for right, same_address, copied in pool(2).run(reduce_in_memory_that_comes_back):
        assert all(right) and same_address and copied


def all_to_all_cases():
    rank, size = dist.get_rank(), dist.get_world_size()
    for columns in ((), (3,)):
        t = _values((2 * size,) + columns, torch.float64, rank)
        ours, theirs = torch.zeros_like(t), torch.zeros_like(t)
        dist.all_to_all_single(ours, t)
        torch_dist.all_to_all_single(theirs, t)
        assert torch.equal(ours, theirs)
    sends = [(rank + i) % 3 for i in range(size)]  # uneven, some empty
    receives = [(i + rank) % 3 for i in range(size)]
    t = _values((sum(sends), 2), torch.int64, rank)
    ours, theirs = torch.zeros(sum(receives), 2, dtype=torch.int64), torch.zeros(sum(receives), 2, dtype=torch.int64)
    dist.all_to_all_single(ours, t, receives, sends, async_op=True).wait()
    torch_dist.all_to_all_single(theirs, t, receives, sends)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_all_to_all_equals_library(pool, size):
    pool(size).run(all_to_all_cases)


@contextlib.contextmanager
def kernels_through_files(folder):
    """A link whose windows are files that all processes map. Shares, slots and pieces are so small that blocks take
    many rounds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = {"SHARES": 4, "SLOTS": 2, "SLOT_BYTES": 64, "LEAST_BYTES": 32, "SUM_PROGRAMS": 2,
             "sum_slot_bytes": lambda ranks: 64}
    with unittest.mock.patch.multiple(fast.exchange, **sizes), unittest.mock.patch.object(kernels, "_choice", "triton"):
        link, window = DirectGlooLink(torch_dist.group.WORLD), object.__new__(fast.windows.Window)
        window.link, window.others = link, [(rank + i) % size for i in range(1, size)]
        window.of = [torch.from_file(f"{folder}/{r}", True, fast.exchange.window_bytes(size), dtype=torch.uint8)
                     for r in range(size)]
        window.make_kernels("cpu")
        link.window = lambda nbytes: window if nbytes == fast.exchange.window_bytes(size) else None
        torch_dist.barrier()
        yield link, window


def all_to_all_through_windows(folder):
    rank, size = dist.get_rank(), dist.get_world_size()
    with kernels_through_files(folder) as (link, window):
        for case, (dtype, columns) in enumerate(itertools.product(
                (torch.int64, torch.bfloat16, torch.uint8, torch.float64), (1, 3, 16))):
            rows = np.random.default_rng(case).integers(-3, 12, (size, size)).clip(0).tolist()  # of rank i for rank j
            if case == 1:
                rows[0] = [0] * size  # a rank that sends nothing
            outgoing = [(torch.arange(n * columns) * 3 + 7 * rank + 11 * r + case).to(dtype)
                        for r, n in enumerate(rows[rank])]
            incoming = [torch.zeros(rows[r][rank] * columns, dtype=dtype) for r in range(size)]
            before = dataclasses.replace(link.log)
            link.all_to_all(outgoing, incoming)
            for r, t in enumerate(incoming):
                assert torch.equal(t, (torch.arange(len(t)) * 3 + 7 * r + 11 * rank + case).to(dtype)), (case, r)
            sent = [outgoing[r] for r in window.others if len(outgoing[r])]
            assert (link.log.messages - before.messages, link.log.bytes - before.bytes) == (
                len(sent), sum(t.nbytes for t in sent))
        with pytest.raises(ValueError, match="my own block has 8 bytes to be sent, 16 to be received"):
            link.all_to_all([torch.zeros(1, dtype=torch.int64)] * size, [torch.zeros(2, dtype=torch.int64)] * size)


def sums_through_windows(folder):
    """All-reduces, reduce-scatters and all-gathers, of one element up to several rounds, one after the other."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with kernels_through_files(folder) as (link, window), unittest.mock.patch.object(fast.nccl, "SUM_FROM", 0):
        counters = -4 * fast.exchange.SUM_PROGRAMS * (2 * size + 2)  # those of every program, which soon pass 2^31
        window.of[rank][counters:].view(torch.int32).fill_((1 << 31) - 4)
        torch_dist.barrier()
        for n, dtype, op in [(1, torch.float32, "sum"), (150, torch.bfloat16, "sum"), (150, torch.float16, "max"),
                             (150, torch.float32, "avg"), (150, torch.float64, "avg"), (150, torch.int64, "sum")]:
            terms = [(torch.arange(n) % 13 * (-1)**r + 3 * r).to(dtype) for r in range(size)]
            total = torch.stack(terms).double()
            total = total.amax(0) if op == "max" else total.mean(0) if op == "avg" else total.sum(0)
            whole, before = terms[rank].clone(), dataclasses.replace(link.log)
            link.all_reduce(whole, OPS[op])
            assert close(whole, total, 1e-2 if dtype.itemsize == 2 else 1e-6), (n, dtype, op)
            own = whole.tensor_split(size)[rank].nbytes
            sent = link.log.bytes - before.bytes
            assert sent == whole.nbytes - own + (size - 1) * own

            alone = torch.stack([terms[rank]] * 2, 1)[:, 0]  # of one number, so contiguous, but its stride is 2
            # Side by side, and in rows of 64 bytes.
            for own, whole in ((terms[rank] if n > 1 else alone, torch.empty(size * n, dtype=dtype)),
                               (torch.arange(3 * 64 // dtype.itemsize).to(dtype).view(3, -1) % 11 + rank, None)):
                before = link.log.bytes
                whole = own.new_empty(len(own), size, *own.shape[1:]).transpose(0, 1) if whole is None else whole
                link.exchange_nths(None, whole, own, None)
                every = [own - rank + r if own.dim() > 1 else terms[r] for r in range(size)]
                assert whole.reshape(-1).equal(torch.cat(every).view(-1))
                result = torch.full_like(own, -1)
                link.exchange_nths(None, whole, result, OPS[op])  # all ranks have the same now
                assert close(result, every[rank].double() * (size if op == "sum" else 1), 1e-2)
                assert link.log.bytes - before == 2 * (size - 1) * own.nbytes


@pytest.mark.parametrize("exchange,size", [
    *((all_to_all_through_windows, size) for size in (2, 3, 4)), *((sums_through_windows, size) for size in (2, 3))])
def test_kernels_exchange_through_windows(pool, exchange, size, tmp_path):
    needs_kernels(pool)
    if pool.device_type == "cuda":
        pytest.skip("GPUs have windows of their own")
    pool(size).run(exchange, str(tmp_path))


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


def recorded_all_to_all():
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


def test_all_to_all_in_a_graph(pool):
    if pool.device_type == "cpu":
        pytest.skip("graphs are for GPUs")
    pool(2).run(recorded_all_to_all)


def trees_on_the_same_memory():
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
    return len(dist.link_of(None).replays.graphs)


@pytest.mark.parametrize("size", [2, 3])
def test_trees_are_replayed(pool, size):
    if pool.device_type == "cpu":
        pytest.skip("graphs are for GPUs")
    assert pool(size).run(trees_on_the_same_memory) == [4 * size] * size
