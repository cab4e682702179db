"""Collectives equal the library's, and send what the formulas say."""

import contextlib
import functools
import io
import itertools
import math
import os
import time
import unittest.mock

import pytest
import torch
import torch.distributed as torch_dist

import collectives as dist
import fast.gloo
import fast.links
import fast.nccl
import fast.rings
import fast.windows
import further.nodes
from tests.pool import close, is_plain


# ---------------------------------------------------------------------------------------------------------- collectives

OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
       "product": dist.ReduceOp.PRODUCT}
BIG = 300_000  # float64: 2.4 MB, beyond recursive doubling
LARGE = BIG // 8  # the same where `compare_with_library` has set all bounds an eighth as high


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
    lists = name in ("gather", "scatter", "all_gather", "all_to_all")
    every = [prepare(torch.zeros(shape, dtype=dtype)) for _ in range(size * lists)]
    if name == "broadcast":
        args, out = ({"tensor": t, "src": root}), [t]
    elif name == "reduce":
        args, out = {"tensor": t, "dst": root, "op": op}, [t] if rank == root else []
    elif name == "gather":
        args, out = ({"tensor": t, "gather_list": every if rank == root else None, "dst": root},
                     every if rank == root else [])
    elif name == "scatter":
        lists = [prepare(_values(shape, dtype, i + 10)) for i in range(size)] if rank == root else None
        t, args = every[0], {"tensor": every[0], "scatter_list": lists, "src": root}
        out = [t]
    elif name == "all_gather":
        args, out = {"tensor_list": every, "tensor": t}, every
    elif name == "reduce_scatter":
        lists = [prepare(_values(shape, dtype, rank + i)) for i in range(size)]
        args, out = {"output": t, "input_list": lists, "op": op}, [t]
    elif name == "all_to_all":
        lists = [prepare(_values(shape, dtype, rank + i)) for i in range(size)]
        args, out = {"output_tensor_list": every, "input_tensor_list": lists}, every
    elif name == "all_gather_into_tensor":
        whole = prepare(torch.zeros((size * shape[0],) + shape[1:], dtype=dtype))
        args, out = {"output_tensor": whole, "input_tensor": t}, [whole]
    elif name == "reduce_scatter_tensor":
        whole = prepare(_values((size * shape[0],) + shape[1:], dtype, rank))
        args, out = {"output": t, "input": whole, "op": op}, [t]
    elif name == "all_reduce":
        args, out = {"tensor": t, "op": op}, [t]
    if name == "all_to_all" and comm is torch_dist and torch_dist.get_backend() == "gloo":  # not in each version
        comm.all_to_all_single(whole := torch.zeros(size, t.numel(), dtype=dtype), torch.stack(lists).view(size, -1))
        return list(whole.view(size, *shape))
    handle = getattr(comm, name)(**args, async_op=async_op)
    if async_op:
        handle.wait()
    else:
        assert handle is None
    if name == "reduce" and comm is dist and rank != root:
        assert torch.equal(t, _values(shape, dtype, rank))  # only the root's changes
    return [o.cpu().clone() for o in out]


class DirectGlooLink(fast.nccl.Direct, fast.gloo.GlooLink):
    """What GPUs of a node do, but for memory of their own, on CPUs."""


@contextlib.contextmanager
def served_by(kind):
    serve_world_by(kind)
    try:
        yield
    finally:
        back_to_ours()


@contextlib.contextmanager
def nodes_of(count):
    """As if torchrun had started nodes of so many ranks: the world works in two levels, even if one has no use for it.
    """
    size = dist.get_world_size()
    dist.use(None, "ours")  # a link to come back to, made before there are nodes
    with unittest.mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(count)):
        grid = [range(first, first + count) for first in range(0, size, count)]
        dist._levels[torch_dist.group.WORLD] = dist.rows_and_columns(grid)
        kinds = {"gloo": fast.links.TwoLevelGlooLink, "nccl": fast.links.TwoLevelNcclLink}
        serve_world_by(further.nodes.TwoLevels if is_plain() else kinds[torch_dist.get_backend()])
        try:
            yield
        finally:
            levels = dist._levels.pop(torch_dist.group.WORLD)
            back_to_ours()
            for group in levels:
                dist.destroy_process_group(group)


def serve_world_by(kind):
    """A new link, which knows nothing of earlier calls; `back_to_ours` brings back the old one."""
    dist._links[torch_dist.group.WORLD]["in use"] = kind(torch_dist.group.WORLD)


def back_to_ours():
    link = dist.link_of(None)
    dist.use(None, "ours")
    if link is not dist.link_of(None):
        link.close()


def compare_with_library(name, cases, *ways):
    """What the library leaves is computed once, for all ways of ours."""
    cuda = torch_dist.get_backend() == "nccl"
    bounds = [(fast.rings, "DOUBLING_BYTES"), (fast.windows, "WINDOW_FROM"), (fast.nccl, "SUM_FROM"),
              (fast.windows, "WINDOW_BYTES"), (fast.gloo, "SLOT_BYTES"), (fast.gloo, "make_mailboxes")]
    kept, wants = [getattr(*bound) for bound in bounds], [library_results(name, *case) for case in cases]
    for way in ways:
        fast.rings.DOUBLING_BYTES = dict.fromkeys(fast.rings.DOUBLING_BYTES, 1 << 17)
        through_windows = way in ("windows", "kernel")
        fast.windows.WINDOW_FROM, fast.windows.WINDOW_BYTES = (0, 1 << 14) if through_windows else (1 << 40, 0)
        fast.nccl.SUM_FROM = 0 if way == "kernel" else 1 << 40
        fast.gloo.SLOT_BYTES = 1 << 12  # and through many slots
        if way == "messages":  # over gloo, as where ranks do not share memory
            fast.gloo.make_mailboxes = lambda link: None
        if way == "windows":
            fast.rings.DOUBLING_BYTES = {"switched": 0}
        if isinstance(way, int):  # nodes of so many ranks
            with nodes_of(way):
                wrong = wrong_results(name, cases, wants)
        else:
            serve_world_by({"plain": dist.Link, "ring": fast.nccl.NcclLink if cuda else fast.gloo.GlooLink}.get(
                way, fast.nccl.NodeLink if cuda else DirectGlooLink))
            wrong = wrong_results(name, cases, wants)
            back_to_ours()
        for bound, value in zip(bounds, kept):
            setattr(*bound, value)
        assert not wrong, (way, wrong[0])


def library_results(name, shape, dtype, op, root, spread, async_op):
    """The library's gloo knows neither avg nor every dtype nor gaps: it gets float64 and a plain tensor, the same
    numbers."""
    base = dtype if dtype in (torch.float64, torch.int64) else torch.float64
    lib_op = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
    want = _collective_results(torch_dist, name, shape, base, lib_op, root, False, False)
    if op == dist.ReduceOp.AVG:
        want = [w / dist.get_world_size() for w in want]
    return [w != 0 for w in want] if dtype == torch.bool else want


def wrong_results(name, cases, wants):
    """Where a collective leaves something else than the library's."""
    wrong = []
    for (shape, dtype, op, root, spread, async_op), want in zip(cases, wants):
        got = _collective_results(dist, name, shape, dtype, op, root, spread, async_op)
        for w, g in zip(want, got, strict=True):
            g = g.real if dtype.is_complex else g
            if (not dtype.is_complex and g.dtype != dtype
                    or not close(g.double(), w.double(), 1e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-6)):
                wrong.append((name, shape, dtype, str(op), root, spread, async_op, w, g))
    return wrong


NAMES = ["broadcast", "reduce", "gather", "scatter", "all_to_all", "all_gather", "reduce_scatter",
         "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"]
DIRECT = NAMES[-6:]  # those that go straight from rank to rank where a switch joins them


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_collective_equals_library(pool, name, size):
    """Each by name, over shapes (0 and 1 element, not divisible by the world, large), dtypes, ops, roots, gaps,
    async."""
    # Of each rank.
    add, root = dist.ReduceOp.SUM, size - 1
    big = LARGE if name in ("broadcast", "reduce", "all_reduce") else LARGE // size
    cases = [((n,), torch.float64, add, root, spread, False) for n in (0, 1, 2, 7, 1001) for spread in (False, True)]
    cases += [((3, 5, 2), torch.float32, add, 0, True, True), ((big,), torch.float64, add, root, False, True),
              ((big // 7, 7), torch.float32, add, size // 2, True, False)]
    if "reduce" in name:
        cases += [((big + 1,), torch.float64, op, 0, False, False) for op in (dist.ReduceOp.AVG, dist.ReduceOp.MAX)]
    # How numbers are combined, and what of, has nothing to do with how many ranks there are.
    if size < 5 and "reduce" in name:
        cases += [((11,), dtype, op, root, False, False) for op in OPS.values()
                  for dtype in (torch.float64, torch.float32)]
        cases += [((6,), dtype, add, 0, False, False)
                  for dtype in (torch.int32, torch.int64, torch.bfloat16, torch.float16)]
    elif size < 5:
        cases += [((6,), dtype, add, 0, False, False)
                  for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.complex64)]
    direct = ("messages", "windows", "kernel")[:1 + 2 * (pool.device_type == "cuda")] if name in DIRECT else ()
    pool(size).run(compare_with_library, name, cases, "ring", "plain", *direct)


@pytest.mark.parametrize("name", DIRECT[1:])
@pytest.mark.parametrize("size,node", [(2, 1), (2, 2), (4, 2), (8, 4), (8, 2)])
def test_two_levels_equal_library(pool, name, size, node):
    cases = [((n,), torch.float64, op, 0, n == 7, n == 1001) for n in (0, 1, 2, 7, 1001, LARGE // size)
             for op in (dist.ReduceOp.SUM, *[dist.ReduceOp.AVG, dist.ReduceOp.MAX] * ("reduce" in name))]
    pool(size).run(compare_with_library, name, cases, node)


def uneven_lists(node):
    """Each rank's own size, some of them 0."""
    rank, size, three = dist.get_rank(), dist.get_world_size(), lambda i: (i * 5 % 3, 3)
    kinds = [dist.Link, type(dist.link_of(None))] + [DirectGlooLink] * (torch_dist.get_backend() == "gloo")
    for served in [nodes_of(node)] if node else map(served_by, kinds):
        with served:
            gathered = [torch.zeros(three(i)) for i in range(size)]
            dist.all_gather(gathered, _values(three(rank), torch.float32, rank))
            assert all(torch.equal(t, _values(three(i), torch.float32, i)) for i, t in enumerate(gathered))
            total = torch.zeros(three(rank))
            handle = dist.reduce_scatter(total, [_values(three(i), torch.float32, rank) for i in range(size)],
                                         async_op=True)
            handle.wait()
            assert torch.equal(total, sum(_values(three(rank), torch.float32, i) for i in range(size)))
            incoming = [torch.zeros(three(rank + i)) for i in range(size)]
            dist.all_to_all(incoming, [_values(three(rank + i), torch.float32, rank) for i in range(size)])
            assert all(torch.equal(t, _values(three(rank + i), torch.float32, i)) for i, t in enumerate(incoming))


@pytest.mark.parametrize("size,node", [(1, None), (2, None), (4, None), (5, None), (4, 2)])
def test_lists_may_be_uneven(pool, size, node):
    pool(size).run(uneven_lists, node)


def wrong_lists():
    t, n = torch.ones(2), dist.get_world_size()
    for call, what in [(lambda: dist.all_gather([t] * (n + 1), t), f"tensor_list must hold {n}"),
                       (lambda: dist.reduce_scatter(t, [t] * (n - 1)), f"input_list must hold {n}"),
                       (lambda: dist.all_to_all([t] * n, [t]), f"input_tensor_list must hold {n}"),
                       (lambda: dist.all_to_all([t] * n, [t.int()] * n), "all tensors must have one dtype")]:
        with pytest.raises(ValueError, match=what):
            call()


def test_wrong_lists_are_refused_before_anything_is_sent(pool):
    pool(2).run(wrong_lists)


def pass_on(comm, how, group, tensor):
    """Hand a tensor to the next rank of the group and take the one before's; returns what came, and from whom."""
    ranks = torch_dist.get_process_group_ranks(group or torch_dist.group.WORLD)
    me, n, received = ranks.index(dist.get_rank()), len(ranks), torch.zeros_like(tensor)
    right, left, source = ranks[(me + 1) % n], ranks[me - 1], None
    if how == "send" and me % 2:
        source = comm.recv(received, left, group)
        comm.send(tensor, right, group)
    elif how == "send":
        comm.send(tensor, group=group, group_dst=(me + 1) % n)
        source = comm.recv(received, group=group, group_src=(me - 1) % n)
    elif how == "isend":
        for handle in [comm.isend(tensor, dst=right, group=group), comm.irecv(received, src=left, group=group)]:
            handle.wait()
    else:
        for handle in comm.batch_isend_irecv([comm.P2POp(comm.isend, tensor, right, group=group),
                                              comm.P2POp(comm.irecv, received, group=group, group_peer=(me - 1) % n)]):
            handle.wait()
    return received, source


def point_to_point():
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [None] + [g for g in [dist.new_group([0, size - 1])] if rank in (0, size - 1)] * (size > 2)
    for group, how in itertools.product(groups, ("send", "isend", "batch_isend_irecv")):
        for shape, dtype in [((1,), torch.float64), ((3, 5), torch.bfloat16), ((100_000,), torch.int64)]:
            tensor = _values(shape, dtype, rank)
            dist.reset_traffic()
            ours, theirs = (pass_on(comm, how, group, tensor) for comm in (dist, torch_dist))
            assert torch.equal(ours[0], theirs[0]) and ours[1] == theirs[1]
            name = "send" if how == "send" else "isend"
            assert dist.traffic() == {name: dist.Traffic(1, 1, tensor.nbytes)}
    if torch_dist.get_backend() == "gloo":  # from whoever sends
        t = torch.zeros(3)
        assert (dist.send(t + 5, 1) if rank == 0 else dist.recv(t) if rank == 1 else None) == (0 if rank == 1 else None)
        assert rank != 1 or (t == 5).all()


@pytest.mark.parametrize("size", [2, 4, 5])
def test_point_to_point_equals_library(pool, size):
    pool(size).run(point_to_point)


def handles():
    """After its wait the result is there, and the operation finished, by whatever carries it."""
    for comm in ("ours", "ring", "torch"):
        dist.use(None, comm)
        tensor = torch.ones(3)
        handle = dist.all_reduce(tensor, async_op=True)
        handle.wait()
        assert (tensor == dist.get_world_size()).all() and handle.is_completed()


@pytest.mark.parametrize("size", [2, 3])
def test_handles_say_that_they_are_done(pool, size):
    pool(size).run(handles)


def barrier_times():
    time.sleep(0.03 * dist.get_rank())
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


def examples(comm):
    """What lectures show first, with `comm` for torch.distributed: each collective, then an MLP in parallel."""
    rank, size = comm.get_rank(), comm.get_world_size()

    def say(what, *values):
        print(f"rank {rank} {what}", *[v.tolist() if isinstance(v, torch.Tensor) else v for v in values])

    t = torch.arange(3) + 10 * rank
    comm.broadcast(t, src=0)
    say("broadcast", t)
    t = torch.tensor([rank + 1.0, 2.0 * rank])
    comm.reduce(t, dst=0, op=comm.ReduceOp.SUM)
    say("reduce", t if rank == 0 else "")
    for op in (comm.ReduceOp.SUM, comm.ReduceOp.MAX, comm.ReduceOp.MIN, comm.ReduceOp.PRODUCT):
        t = torch.tensor([rank + 1.0, 2.0])
        comm.all_reduce(tensor=t, op=op)
        say("all_reduce", t)
    work = comm.all_reduce(t, async_op=True)
    work.wait()
    say("all_reduce, waited for", t)
    mine = torch.full((2,), float(rank))
    gathered = [torch.empty(2) for _ in range(size)] if rank == 1 else None
    comm.gather(mine, gathered, dst=1)
    say("gather", *gathered or [])
    gathered = [torch.empty(2) for _ in range(size)]
    comm.all_gather(gathered, mine)
    say("all_gather", *gathered)
    comm.scatter(mine, [torch.full((2,), 5.0 * i) for i in range(size)] if rank == 0 else None, src=0)
    say("scatter", mine)
    comm.reduce_scatter(mine, [torch.full((2,), rank + 10.0 * i) for i in range(size)], op=comm.ReduceOp.SUM)
    say("reduce_scatter", mine)
    whole = torch.empty(2 * size)
    comm.all_gather_into_tensor(output_tensor=whole, input_tensor=mine)
    comm.reduce_scatter_tensor(output=mine, input=whole)
    say("reduce-scatter + all-gather", whole, mine)
    comm.all_to_all_single(whole, torch.arange(2.0 * size) + rank)
    say("all_to_all_single", whole)
    comm.barrier()
    pair = comm.new_group([0, size - 1])
    if rank in (0, size - 1):
        comm.all_reduce(mine, group=pair)
    say("in a group", mine, comm.get_world_size(pair))

    # An MLP of `size` layers of 8 x 8, on 16 samples, float64: each strategy ends with the same loss.
    layers = [torch.sin(torch.arange(64.0, dtype=torch.float64) * (i + 1)).view(8, 8) for i in range(size)]
    x = torch.cos(torch.arange(128.0, dtype=torch.float64)).view(16, 8)

    # Data parallel: each rank its part of the batch; gradients are averaged.
    params = [w.clone().requires_grad_() for w in layers]
    for _ in range(2):
        y = x.chunk(size)[rank]
        for w in params:
            y = torch.tanh(y @ w)
        loss = y.square().mean()
        loss.backward()
        for w in params:
            comm.all_reduce(w.grad, op=comm.ReduceOp.SUM)
            w.data -= 0.1 * w.grad / size
            w.grad = None
        comm.all_reduce(loss.data)
        say("data parallel", round(loss.item() / size, 12))

    # Tensor parallel: each rank some columns of every matrix; activations are gathered.
    y, width = x, 8 // size
    for w in layers:
        part = torch.tanh(y @ w[:, rank * width:(rank + 1) * width])
        parts = [torch.empty_like(part) for _ in range(size)]
        comm.all_gather(tensor_list=parts, tensor=part)
        y = torch.cat(parts, dim=1)
    say("tensor parallel", round(y.square().mean().item(), 12))

    # Pipeline parallel: each rank a layer; micro-batches pass from rank to rank, and their gradients back.
    w, saved, losses = layers[rank].clone().requires_grad_(), [], []
    for i in range(4):
        y = x.chunk(4)[i].clone()
        if rank > 0:
            comm.recv(tensor=y, src=rank - 1)
        y.requires_grad_()
        out = torch.tanh(y @ w)
        saved.append((y, out))
        if rank < size - 1:
            comm.send(tensor=out.detach(), dst=rank + 1)
        else:
            losses.append(out.square().mean())
    for i, (y, out) in enumerate(saved):
        grad = torch.empty_like(out)
        if rank < size - 1:
            comm.recv(grad, src=rank + 1)
        torch.autograd.backward(losses[i] if losses else out, None if losses else grad)
        if rank > 0:
            comm.isend(y.grad, dst=rank - 1).wait()
    say("pipeline", round(w.grad.sum().item(), 9), *[round(loss.item(), 12) for loss in losses])


def printed_by(comm):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        examples({"ours": dist, "library": torch_dist}[comm])
    return out.getvalue()


@pytest.mark.parametrize("size", [2, 4])
def test_examples_print_the_same(pool, size):
    """`import collectives as dist` is the only line that examples for torch.distributed must change."""
    ours, library = (pool(size).run(printed_by, comm) for comm in ("ours", "library"))
    assert ours == library and all(len(text.splitlines()) == 18 for text in ours)


def ring_only(function):
    """The function with no recursive doubling: its sizes are a matter of speed, the ring's bytes are the law."""
    @functools.wraps(function)
    def run(*args):
        if type(dist.link_of(None)) is dist.Link:  # in the reference no size is chosen for speed
            return function(*args)
        kept, fast.rings.DOUBLING_BYTES = fast.rings.DOUBLING_BYTES, {"gloo": 0, "nccl": 0, "switched": 0}
        serve_world_by(type(dist.link_of(None)))  # without graphs that do otherwise
        try:
            return function(*args)
        finally:
            fast.rings.DOUBLING_BYTES = kept
            back_to_ours()
    return run


@ring_only
def traffic_counts(elements):
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
    n, elements = size, 400_000 // size * size
    k = 4 * elements
    counts = pool(size).run(traffic_counts, elements)
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


@ring_only
def traffic_by_level(node, elements):
    """{collective: (bytes that stay on this rank's node, bytes that leave it)} in nodes of `node` ranks; in rings."""
    size, t = dist.get_world_size(), torch.ones(elements)
    slice_ = torch.ones(elements // size)
    calls = {"all_reduce": lambda: dist.all_reduce(t),
             "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(slice_, t),
             "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(t, slice_),
             "all_gather": lambda: dist.all_gather([torch.empty_like(slice_) for _ in range(size)], slice_),
             "reduce_scatter": lambda: dist.reduce_scatter(slice_, list(t.view(size, -1)))}

    def count():
        counted = {}
        for name, call in calls.items():
            dist.reset_traffic()
            call()
            log = dist.traffic()[name]
            counted[name] = log.bytes - log.outside, log.outside
        return counted
    with nodes_of(node):
        levels = count()
    with unittest.mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(node)), served_by(dist.Link):
        return levels, count()


@pytest.mark.parametrize("size,node", [(4, 2), (8, 2), (8, 4)])
def test_between_nodes_every_rank_sends_its_share(pool, size, node):
    """M nodes of L ranks: an all-reduce sends 2(L-1)/L x K inside, 2(M-1)/M x K/L between; its halves half of each."""
    m, elements = size // node, 400 * size * size
    k = 4 * elements
    inside, between = (node - 1) * k // node, (m - 1) * k // size
    results = pool(size).run(traffic_by_level, node, elements)
    for rank, (levels, rings) in enumerate(results):
        assert levels.pop("all_reduce") == (2 * inside, 2 * between)
        assert set(levels.values()) == {(inside, between)} and len(levels) == 4
        last = rank % node == node - 1  # of its node: who sends all that leaves it, where there is one ring
        assert rings["all_reduce"][last] == 2 * (size - 1) * k // size and not rings["all_reduce"][not last]


@pytest.mark.parametrize("size,messages", [(2, 1), (4, 2), (8, 3)])
def test_small_all_reduce_takes_log2_rounds(pool, size, messages):
    messages = messages if pool.device_type == "cpu" else size - 1  # GPUs of a node: one round, to everybody
    assert {(t.messages, t.bytes) for t in pool(size).run(small_traffic)} == {(messages, messages * 40)}


def repeated_calls(elements):
    """The same memory again and again, with new values: each call sees them, and counts the same bytes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, part, counted = torch.zeros(size * elements), torch.zeros(elements), []
    for i in range(6):
        dist.reset_traffic()
        part.fill_(rank + i)
        dist.all_gather_into_tensor(whole, part, async_op=True).wait()
        assert whole.view(size, -1).eq(torch.arange(size).view(-1, 1) + i).all(), i
        dist.reduce_scatter_tensor(part, whole)
        assert part.eq(size * (rank + i)).all()
        dist.all_reduce(whole)
        assert whole.view(size, -1).eq(size * (torch.arange(size).view(-1, 1) + i)).all()
        counted.append({name: t.bytes for name, t in dist.traffic().items()})
    assert all(log == counted[0] for log in counted)


@pytest.mark.parametrize("elements", [10, 300_000])
def test_repeated_calls_on_the_same_memory(pool, elements):
    pool(4).run(repeated_calls, elements)


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
