"""Every claim of the other files, on a machine with no GPU. `pytest test_all.py`

A strategy is right if it equals one process: in float64, where a logic error stands out from rounding by ten orders of
magnitude, on gloo. So the same training step runs in every layout, and loss, each gathered gradient, the gradient norm, and the
weights after three clipped SGD steps (which, unlike Adam's, do not forgive a wrong factor) must agree to 1e-10. And a test must
be able to fail: each strategy runs again with its collective taken out, and must then be found wrong.

Processes come from a pool, started once for each world size. With GPUs, the same tests run again on NCCL.
"""

import json
import math
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
import traceback

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
import torch.nn as nn
import torch.nn.functional as F

import collectives as dist
import model
import parallel
import train
from model import GPT, GPTConfig

HERE = os.path.dirname(os.path.abspath(__file__))
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


# ------------------------------------------------------------------------------------------------------------ pool of processes

def _worker(rank, size, device_type, folder, pipe):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    torch_dist.init_process_group("nccl" if device_type == "cuda" else "gloo", rank=rank, world_size=size,
                                  store=torch_dist.FileStore(f"{folder}/store", size),
                                  device_id=device if device_type == "cuda" else None)
    torch.set_default_device(device)
    while True:
        job = pipe.recv()
        if job is None:
            os._exit(0)
        function, args = job
        try:
            pipe.send((True, globals()[function](*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Pool:
    """`size` processes that have joined one group; run(function, *args) calls a function of this file on all of them."""

    def __init__(self, size, device_type, folder):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "test_all"])
        self.processes, self.pipes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            self.processes.append(context.Process(target=_worker, args=(rank, size, device_type, folder, theirs), daemon=True))
            self.processes[-1].start()

    def run(self, function, *args, timeout=120):
        """Results in rank order. A rank's exception fails the test; silence breaks the pool, which starts anew."""
        for pipe in self.pipes:
            pipe.send((function.__name__, args))
        results, deadline = [], time.time() + timeout
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0.0, deadline - time.time())):
                self.stop()
                pytest.fail(f"rank {rank} was silent for {timeout} s")
            ok, value = pipe.recv()
            if not ok:
                self.stop()
                pytest.fail(f"rank {rank}:\n{value}")
            results.append(value)
        return results

    def stop(self):
        for process in self.processes:
            process.kill()
        self.processes = []


DEVICES = ["cpu"] + (["cuda"] if GPUS > 1 else [])


@pytest.fixture(scope="session", params=DEVICES)
def pool(request, tmp_path_factory):
    """pool(size): the processes of that world."""
    pools = {}

    def get(size):
        if request.param == "cuda" and size > GPUS:
            pytest.skip(f"{size} ranks need {size} GPUs, this machine has {GPUS}")
        if size not in pools or not pools[size].processes:
            pools[size] = Pool(size, request.param, str(tmp_path_factory.mktemp("pool")))
        return pools[size]

    yield get
    for p in pools.values():
        p.stop()


def close(a, b, tolerance=1e-10):
    """Relative to the largest value; NaN is never close."""
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    return a.shape == b.shape and float((a - b).abs().max() if a.numel() else 0) <= tolerance * max(1e-3, float(b.abs().max()) if b.numel() else 1)


# ----------------------------------------------------------------------------------------------------------------- collectives

OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
       "product": dist.ReduceOp.PRODUCT}
BIG = 300_000  # float64: 2.4 MB, beyond recursive doubling


def _values(shape, dtype, rank):
    """Small whole numbers, different on every rank and at every place: sums and products are exact in every dtype."""
    count = math.prod(shape)
    return ((torch.arange(count) * 7 + rank * 5) % 3 + (rank % 2)).to(dtype).view(shape)


def _spread(tensor):
    """The same values with gaps between them in memory."""
    gaps = torch.zeros(tensor.shape + (2,), dtype=tensor.dtype)
    gaps[..., 0] = tensor
    return gaps[..., 0]


def _collective_results(comm, name, shape, dtype, op, root, spread, async_op):
    """One collective by name with `comm`, ours or torch.distributed itself; returns what it left in all its tensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    prepare = _spread if spread else (lambda t: t)
    t = prepare(_values(shape, dtype, rank))
    every = [prepare(torch.zeros(shape, dtype=dtype)) for _ in range(size)]
    if name == "broadcast":
        args, out = (dict(tensor=t, src=root)), [t]
    elif name == "reduce":
        args, out = dict(tensor=t, dst=root, op=op), [t] if rank == root else []
    elif name == "gather":
        args, out = dict(tensor=t, gather_list=every if rank == root else None, dst=root), every if rank == root else []
    elif name == "scatter":
        lists = [prepare(_values(shape, dtype, i + 10)) for i in range(size)] if rank == root else None
        t, args = every[0], dict(tensor=every[0], scatter_list=lists, src=root)
        out = [t]
    elif name == "all_gather_into_tensor":
        whole = prepare(torch.zeros((size * shape[0],) + shape[1:], dtype=dtype))
        args, out = dict(output_tensor=whole, input_tensor=t), [whole]
    elif name == "reduce_scatter_tensor":
        whole = prepare(_values((size * shape[0],) + shape[1:], dtype, rank))
        args, out = dict(output=t, input=whole, op=op), [t]
    elif name == "all_reduce":
        args, out = dict(tensor=t, op=op), [t]
    handle = getattr(comm, name)(**args, async_op=async_op)
    if async_op:
        handle.wait()
    else:
        assert handle is None
    return [o.cpu().clone() for o in out]


def compare_with_library(name, cases):
    wrong = []
    for shape, dtype, op, root, spread, async_op in cases:
        # The library's gloo knows neither avg nor every dtype nor gaps: it gets float64 and a plain tensor, the same numbers.
        base = dtype if dtype in (torch.float64, torch.int64) else torch.float64
        lib_op = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
        want = _collective_results(torch_dist, name, shape, base, lib_op, root, False, False)
        got = _collective_results(dist, name, shape, dtype, op, root, spread, async_op)
        if op == dist.ReduceOp.AVG:
            want = [w / dist.get_world_size() for w in want]
        if dtype == torch.bool:
            want = [w != 0 for w in want]
        for w, g in zip(want, got):
            g = g.real if dtype.is_complex else g
            if not dtype.is_complex and g.dtype != dtype or not close(g.double(), w.double(), 1e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-6):
                wrong.append((name, shape, dtype, str(op), root, spread, async_op, w, g))
    assert not wrong, wrong[0]


NAMES = ["broadcast", "reduce", "gather", "scatter", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_collective_equals_library(pool, name, size):
    """Each by name, over shapes (0 and 1 element, not divisible by the world, large), dtypes, ops, roots, gaps, async."""
    add, root = dist.ReduceOp.SUM, size - 1
    cases = [((n,), torch.float64, add, root, spread, False) for n in (0, 1, 2, 7, 1001) for spread in (False, True)]
    cases += [((3, 5, 2), torch.float32, add, 0, True, True), ((BIG,), torch.float64, add, root, False, True),
              ((BIG // 7, 7), torch.float32, add, size // 2, True, False)]
    if "reduce" in name:
        cases += [((11,), dtype, op, root, False, False) for op in OPS.values() for dtype in (torch.float64, torch.float32)]
        cases += [((BIG + 1,), torch.float64, op, 0, False, False) for op in (dist.ReduceOp.AVG, dist.ReduceOp.MAX)]
        cases += [((6,), dtype, add, 0, False, False) for dtype in (torch.int32, torch.int64, torch.bfloat16, torch.float16)]
    else:
        cases += [((6,), dtype, add, 0, False, False)
                  for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.complex64)]
    pool(size).run(compare_with_library, name, cases)


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


def barrier_times():
    time.sleep(0.1 * dist.get_rank())
    arrived = time.time()
    dist.barrier()
    return arrived, time.time()


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_barrier_lets_nobody_pass_before_the_last(pool, size):
    times = pool(size).run(barrier_times)
    assert min(left for _, left in times) >= max(arrived for arrived, _ in times)


def subgroup_results():
    """Two disjoint groups at work at the same time, roots named by global rank and by rank in the group."""
    rank = dist.get_rank()
    groups = [torch_dist.new_group([0, 2]), torch_dist.new_group([1, 3, 4])]
    members, group = ([0, 2], groups[0]) if rank in (0, 2) else ([1, 3, 4], groups[1])
    small, large = torch.full((3,), rank + 1.0), torch.full((BIG,), rank + 1.0, dtype=torch.float64)
    handle = dist.all_reduce(large, group=group, async_op=True)
    dist.all_reduce(small, group=group)  # behind the one under way, not into it
    handle.wait()
    expected = sum(m + 1.0 for m in members)
    assert (small == expected).all() and (large == expected).all()
    t = torch.full((2,), float(rank))
    dist.broadcast(t, src=members[-1], group=group)
    assert (t == members[-1]).all()
    dist.broadcast(t.fill_(rank), group_src=1, group=group)
    assert (t == members[1]).all()
    assert dist.all_reduce(t, group=torch_dist.GroupMember.NON_GROUP_MEMBER) is None


def test_subgroups(pool):
    pool(5).run(subgroup_results)


def traffic_counts(elements, ring):
    size, rank = dist.get_world_size(), dist.get_rank()
    t, slice_ = torch.ones(elements), torch.ones(elements // size)
    counts = {}
    for name, call in [("all_reduce", lambda: dist.all_reduce(t)),
                       ("reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(slice_, t)),
                       ("all_gather_into_tensor", lambda: dist.all_gather_into_tensor(t, slice_)),
                       ("all_to_all_single", lambda: dist.all_to_all_single(torch.empty_like(t), t)),
                       ("broadcast", lambda: dist.broadcast(t, src=0)), ("reduce", lambda: dist.reduce(t, dst=0)),
                       ("gather", lambda: dist.gather(slice_, list(t.view(size, -1)) if rank == 0 else None, dst=0)),
                       ("scatter", lambda: dist.scatter(slice_, list(t.view(size, -1)) if rank == 0 else None, src=0))]:
        dist.reset_traffic()
        call()
        log = dist.traffic()
        assert list(log) == [name] and log[name].calls == 1
        counts[name] = log[name].messages, log[name].bytes
    return counts


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_bytes_sent_are_the_formulas(pool, size):
    n, elements = size, size * 400_000 // size * size
    elements -= elements % size
    k = 4 * elements
    counts = pool(size).run(traffic_counts, elements, True)
    for rank, count in enumerate(counts):
        assert count["all_reduce"] == (2 * (n - 1), 2 * (n - 1) * k // n)
        assert count["reduce_scatter_tensor"] == count["all_gather_into_tensor"] == (n - 1, (n - 1) * k // n)
        assert count["all_to_all_single"] == (n - 1, (n - 1) * k // n)
        assert count["reduce"] == ((1, k) if rank else (0, 0))  # every rank but the root sends once
    assert sum(c["broadcast"][1] for c in counts) == (n - 1) * k
    assert counts[0]["broadcast"] == counts[0]["scatter"][:1] + ((n - 1).bit_length() * k,)
    assert max(c["broadcast"][0] for c in counts) == (n - 1).bit_length()
    assert sum(c["gather"][0] for c in counts) == sum(c["scatter"][0] for c in counts) == n - 1


def small_traffic():
    dist.reset_traffic()
    dist.all_reduce(torch.ones(10))
    return dist.traffic()["all_reduce"]


@pytest.mark.parametrize("size,messages", [(2, 1), (4, 2), (8, 3)])
def test_small_all_reduce_takes_log2_rounds(pool, size, messages):
    assert {(t.messages, t.bytes) for t in pool(size).run(small_traffic)} == {(messages, messages * 40)}


def same_bits_everywhere():
    torch.manual_seed(dist.get_rank())
    sums = [torch.randn(n) for n in (5, 1000, BIG * 2)]
    for t in sums:
        dist.all_reduce(t)
    return [t.cpu() for t in sums]


@pytest.mark.parametrize("size", [3, 4, 5])
def test_all_reduce_leaves_the_same_bits_on_every_rank(pool, size):
    first, *others = pool(size).run(same_bits_everywhere)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other))


def async_overlap():
    """The caller computes while the operation runs; results come in order; an error is raised in wait()."""
    t = torch.ones(4 * BIG)
    handles = [dist.all_reduce(t, async_op=True) for _ in range(4)]
    pending = not handles[-1].is_completed()
    for handle in handles:
        handle.wait()
    assert (t == dist.get_world_size() ** 4).all()
    return pending


def test_async_runs_beside_the_caller(pool):
    assert all(pool(3).run(async_overlap))


def bad_calls():
    messages = []
    for call in (lambda: dist.all_gather_into_tensor(torch.zeros(5), torch.zeros(2)),
                 lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(5)),
                 lambda: dist.all_gather_into_tensor(torch.zeros(4), torch.zeros(2), async_op=True).wait(),
                 lambda: dist.all_to_all_single(torch.zeros(5), torch.zeros(5)),
                 lambda: dist.gather(torch.zeros(2), [torch.zeros(2)], dst=dist.get_rank()),
                 lambda: dist.all_reduce(torch.zeros(2), op=dist.ReduceOp.BAND),
                 lambda: dist.broadcast(torch.zeros(2), src=0, group_src=0)):
        with pytest.raises(ValueError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_bad_calls_raise_before_anything_is_sent(pool):
    assert "must hold 3 times" in pool(3).run(bad_calls)[0][0]
    pool(3).run(small_traffic)  # and the group still works


def library_serves_the_group():
    group = torch_dist.new_group(range(dist.get_world_size()))
    dist.use_library(group)
    dist.reset_traffic()
    t = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(t, dist.ReduceOp.AVG, group)
    dist.all_reduce(t.clone(), group=group, async_op=True).wait()
    dist.barrier(group)
    assert not dist.traffic()
    return float(t[0])


def test_library_can_serve_a_group(pool):
    assert pool(3).run(library_serves_the_group) == [2.0] * 3
