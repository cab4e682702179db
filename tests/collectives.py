"""Collectives equal the library's, and send what the formulas say."""

import inspect
import itertools
import math
import os
import time
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from torch.utils._pytree import tree_map

import collectives as dist
import parallel
from further.letters import tensors_in
from tests.links import carried, served_by
from tests.pool import is_plain, needs_kernels, on_both, on_plain, on_ranks, parametrize


# ---------------------------------------------------------------------------------------------------------- collectives

BIG = 300_000  # float64: 2.4 MB
LARGE = BIG // 8  # the same where `carried` has set all bounds an eighth as high
TREES = "broadcast reduce gather scatter".split()
NTHS = "all_gather_into_tensor reduce_scatter_tensor all_to_all_single".split()  # between a tensor and its Nths
DIRECT = ["all_to_all", "all_gather", "reduce_scatter", "all_reduce", *NTHS]  # a switch can carry them straight
COLLECTIVES = [*TREES, *DIRECT]
OF_WHOLE = "broadcast reduce all_reduce".split()  # every rank has a tensor of all K elements
LIBRARYS = torch.float64, torch.float32, torch.int64  # dtypes that it takes in all collectives, on gloo, too
SUMMED = torch.float32, torch.int32, torch.int64, torch.bfloat16, torch.float16
COPIED = torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.complex64
MESSAGES = "send recv isend irecv P2POp batch_isend_irecv".split()
NODES = {2: [1, 2], 4: [2], 8: [4, 2]}  # of so many ranks: how many may stand on each node
WORLD = "init_process_group is_initialized get_rank get_world_size new_group destroy_process_group".split()


def _values(shape, dtype, rank):
    """Small whole numbers, different on every rank and at every place: sums and products are exact in every dtype."""
    count = math.prod(shape)
    return ((torch.arange(count) * 7 + rank * 5) % 3 + (rank % 2)).to(dtype).view(shape)


def _spread(tensor):
    """The same values with gaps between them in memory."""
    return torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]


def _in_rows(tensor):
    """(N, B, ...) with the N parts of a row side by side in memory."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


# How a rank's part lies in memory, and how the whole.
LAYOUTS = {"plain": (torch.clone, torch.clone), "gaps": (_spread, _spread), "gaps in parts": (_spread, torch.clone),
           "rows": (torch.clone, _in_rows)}


class Case(NamedTuple):
    """What a collective is called with. part: the shape of a rank's part. whole: that of all parts in one tensor; left
    out, they lie along dimension 0."""
    part: tuple
    dtype: torch.dtype = torch.float64
    op: dist.ReduceOp = dist.ReduceOp.SUM
    root: int = 0
    layout: str = "plain"
    async_op: bool = False
    whole: tuple = None


def arguments_of(name, case):
    """A collective's arguments, by the names that torch.distributed gives them. All tensors are full of numbers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lay_part, lay_whole = LAYOUTS[case.layout]

    def part(i=0):
        return lay_part(_values(case.part, case.dtype, rank + i))

    def whole(i=0):
        return lay_whole(_values(case.whole or (size * case.part[0], *case.part[1:]), case.dtype, rank + i))

    def parts(first=1):
        return [part(first + i) for i in range(size)]

    def of_root():
        return parts() if rank == case.root else None

    make = {"tensor": part, "input_tensor": part, "input": whole, "output_tensor": whole,
            "output": part if "reduce" in name else lambda: whole(1),
            "tensor_list": parts, "input_list": parts, "input_tensor_list": parts,
            "output_tensor_list": lambda: parts(size + 1), "gather_list": of_root, "scatter_list": of_root,
            "src": lambda: case.root, "dst": lambda: case.root, "op": lambda: case.op}
    return {key: make[key]() for key in inspect.signature(getattr(torch_dist, name)).parameters if key in make}


def left_by(comm, name, case):
    """Call a collective of ours or of torch.distributed itself; returns all tensors it was given, as it leaves them."""
    arguments = arguments_of(name, case)
    if case.whole and comm is dist:
        for t in tensors_in(arguments):
            t.requires_grad_(t.is_floating_point())
    handle = getattr(comm, name)(**arguments, async_op=case.async_op)
    assert (handle is not None) == case.async_op
    if handle:
        handle.wait()
        if torch.get_default_device().type == "cuda":  # of which wait() holds up a stream
            torch.cuda.synchronize()
        # The library's reduce-scatter never says so on gloo.
        assert "reduce_scatter" in name or handle.is_completed()
    return [t.detach().flatten().cpu() for t in tensors_in(arguments)]


def left_by_library(name, case):
    """As `left_by`, of torch.distributed. It gets the same numbers flat, without gaps, and in a dtype that it knows."""
    part = math.prod(case.part)
    flat = case._replace(part=(part,), whole=(dist.get_world_size() * part,), layout="plain", async_op=False,
                         dtype=case.dtype if case.dtype in LIBRARYS else torch.float64)
    left = left_by(torch_dist, name, flat)
    if name == "reduce" and dist.get_rank() != case.root:  # the library may leave anything: only the root's may change
        left = [arguments_of(name, case)["tensor"].flatten().cpu()]
    return [t.to(case.dtype) for t in left]


def ways_of(direct):
    """The ways that this process can go with collectives, `direct` or not; see WAYS."""
    size, cuda = dist.get_world_size(), torch_dist.get_backend() == "nccl"
    if is_plain():
        return ["plain"]
    if size == 8 and not cuda:  # no link has a loop that only 8 ranks enter
        return ["ring"]
    library = ["torch"] * (size < 4)  # it gets what `Library` is called with, however many ranks there are
    windows = ["windows"] * (cuda or 1 < size < 5) + ["kernel"] * cuda
    return [*["plain"] * cuda, *library, "ring", *["messages", *windows] * direct]


def compare_with_library(cases, *ways):
    """cases: of each collective. What the library leaves is computed once, for all ways of ours."""
    wants = {name: [left_by_library(name, case) for case in some] for name, some in cases.items()}
    for way in ways:
        with carried(way):
            for name, case, want in ((name, *both) for name in cases for both in zip(cases[name], wants[name])):
                if way != "torch" or library_takes(name, case):
                    torch.testing.assert_close(left_by(dist, name, case), want, rtol=1e-6, atol=0,
                                               msg=lambda text: f"{name}, {way}, {case}: {text}")


def library_takes(name, case):
    """Of NTHS all layouts, because `Library` sees to them; and it leaves other ranks' tensors as they are in no reduce.
    """
    return case.dtype in LIBRARYS and (case.layout == "plain" or name in NTHS) and name != "reduce"


def cases_for(name, size):
    """Shapes (0 and 1 element, not divisible by the world, large), dtypes, ops, roots, layouts, async."""
    root, reduces = size - 1, "reduce" in name
    big = LARGE if name in OF_WHOLE else LARGE // size
    cases = [Case((n,), root=root, layout=layout, async_op=layout == "gaps")
             for n, layout in ((0, "gaps"), (1, "plain"), (7, "gaps"), (1001, "plain"))]
    cases += [Case((big,), root=root, async_op=True), Case((big // 7, 7), torch.float32, root=size // 2, layout="gaps")]
    if reduces:
        cases.append(Case((big + 1,), op=dist.ReduceOp.AVG))
    if size == 2:  # how numbers are combined, and what of, has nothing to do with how many ranks there are
        cases += [Case((11,), op=op, root=root) for op in dist.COMBINE if reduces]
        cases += [Case((6,), dtype) for dtype in (SUMMED if reduces else COPIED)]
    if size < 4 and name in NTHS:
        cases.append(Case((5, 8, 32), layout="rows", whole=(size, 5, 8, 32)))  # in windows 4 rows at a time, or 2
        shapes = {(2, 3): (size, 2, 3), (3, 2): (2 * size, 3), (): (size, 1), (0, 2): (size, 0, 2)}  # any that fit
        cases += [Case(part, torch.float32, layout=layout, async_op=layout == "gaps", whole=whole)
                  for (part, whole), layout in zip(shapes.items(), ("plain", "gaps", "gaps", "plain"))]
    return cases


@on_both
@parametrize("names", [TREES, DIRECT], ids=" ".join)
@parametrize("size", [1, 2, 3, 4, 5, 8])
@on_ranks()
def test_collective_equals_library(names, size):
    """Each by name, with the library's names of arguments, and of all tensors, those that it only reads included; those
    that a switch can carry straight between nodes, too."""
    direct = names == DIRECT
    cases = {name: cases_for(name, size) for name in names}
    nodes = [] if is_plain() and size != 4 else NODES.get(size, [])
    compare_with_library(cases, *ways_of(direct), *nodes * direct)


def test_arguments_are_the_librarys():
    """Names, order, defaults: what examples write for torch.distributed, they may write for ours, so that `import
    collectives as dist` is the only line that they must change."""
    for name in *COLLECTIVES, *MESSAGES, *WORLD:
        ours, library = ([(p.name, p.default) for p in inspect.signature(getattr(comm, name)).parameters.values()]
                         for comm in (dist, torch_dist))
        assert ours == library, name


UNEVEN = {2: ["plain", "ring", "messages", "windows", "kernel"], 3: ["windows", "kernel"], 4: [2],
          5: ["ring", "messages"]}  # ways of so many ranks


@on_both
@parametrize("size", UNEVEN)
@on_ranks()
def test_blocks_may_be_uneven(rank, size):
    """Of any sizes, some of them empty, in lists and as rows of one tensor. What was sent may be written at once."""
    for way in ["plain"] if is_plain() else UNEVEN[size]:
        if way == "kernel":
            needs_kernels()
        slots = {"WINDOW_BYTES": 1 << 10} if way in ("windows", "kernel") else {}  # some blocks take several turns
        with carried(way, **slots):
            for number, (dtype, columns) in enumerate(itertools.product((torch.bfloat16, torch.uint8), (1, 3, 16))):
                rows = np.random.default_rng(number).integers(-3, 12, (size, size)).clip(0)
                rows[0] *= number != 1  # a rank that sends nothing
                exchange_blocks(rank, rows, dtype, columns, async_op=number % 2 == 1)


def exchange_blocks(rank, rows, dtype, columns, async_op):
    """rows[i, j]: how many rank i has for rank j."""
    ranks = range(len(rows))

    def block(i, j):
        """What rank i has for rank j."""
        return ((torch.arange(rows[i, j] * columns) * 3 + 7 * i + 11 * j) % 50).to(dtype).view(-1, columns)

    def check(name, want, given, *sizes):
        """The collective puts `want` in place of zeros."""
        got = tree_map(torch.zeros_like, want)
        handle = getattr(dist, name)(got, given, *sizes, async_op=async_op)
        if handle:
            handle.wait()
        for t in tensors_in(given):
            t.fill_(9)
        torch.testing.assert_close(got, want, rtol=0, atol=0)

    outgoing = [block(rank, r) for r in ranks]
    incoming = [block(r, rank) for r in ranks]
    sent = [t.nbytes for r, t in enumerate(outgoing) if r != rank and len(t)]
    joined = torch.cat(outgoing)
    dist.reset_traffic()
    check("all_to_all", incoming, outgoing)
    log = dist.traffic()["all_to_all"]
    in_two_levels = len(rows) == 4
    assert in_two_levels or log.bytes == sum(sent) and (async_op or log.messages == len(sent))
    check("all_to_all_single", torch.cat(incoming), joined, rows[:, rank].tolist(), rows[rank].tolist())
    check("all_gather", [block(r, 0) for r in ranks], block(rank, 0))
    check("reduce_scatter", len(rows) * block(0, rank) + sum(ranks), [block(0, r) + rank for r in ranks])


@on_both
@parametrize("size", [2, 4])
@on_ranks()
def test_point_to_point(rank, size):
    """Each rank of a group hands a tensor to the next one, whose number in the world or in the group it gives."""
    ends = [0, size - 1]
    for ranks, group in ([*range(size)], None), (ends, dist.new_group(ends)):
        if rank in ranks:
            hand_on(ranks, group, ranks.index(rank))


def hand_on(ranks, group, me):
    to, left = (me + 1) % len(ranks), (me - 1) % len(ranks)
    tensor, want = (_values((3, 5), torch.bfloat16, ranks[i]) for i in (me, left))
    received = [torch.zeros_like(tensor) for _ in range(3)]
    dist.reset_traffic()
    if me % 2:
        assert dist.recv(received[0], ranks[left], group) == ranks[left]
    dist.send(tensor, group=group, group_dst=to)
    if not me % 2:
        assert dist.recv(received[0], group=group, group_src=left) == ranks[left]
    handles = [dist.isend(tensor, ranks[to], group), dist.irecv(received[1], ranks[left], group)]
    handles += dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, ranks[to], group=group),
                                       dist.P2POp(dist.irecv, received[2], group=group, group_peer=left)])
    for handle in handles:
        handle.wait()
    assert all(got.equal(want) for got in received)
    assert dist.traffic() == {"send": dist.Traffic(1, 1, tensor.nbytes), "isend": dist.Traffic(2, 2, 2 * tensor.nbytes)}


@parametrize("size", [2, 5])
@on_ranks()
def test_barrier_lets_nobody_pass_before_the_last(rank):
    dist.barrier()  # in a link's first operation ranks wait for each other anyway
    time.sleep(0.03 * rank)
    arrived = torch.tensor(time.time(), dtype=torch.float64)
    dist.barrier()
    left = time.time()
    dist.all_reduce(arrived, dist.ReduceOp.MAX)
    assert arrived <= left


@parametrize("comm", ["ours", "torch"])
@on_ranks(5)
def test_subgroups(comm, rank):
    """Two disjoint groups at work at the same time, roots named by global rank and by rank in the group."""
    members = range(rank % 2, 5, 2)
    group = [dist.new_group([*range(first, 5, 2)]) for first in (0, 1)][rank % 2]
    dist.use(group, comm)
    dist.reset_traffic()
    small, large = (torch.full((elements,), 1.0 + rank, dtype=torch.float64) for elements in (3, BIG))
    handle = dist.all_reduce(large, group=group, async_op=True)
    dist.all_reduce(small, group=group)  # behind the one under way, not into it
    handle.wait()
    assert small.eq(large[:3]).all() and large.eq(sum(members) + len(members)).all()
    for root in {"src": members[1]}, {"group_src": 1}:
        dist.broadcast(small.fill_(rank), group=group, **root)
        assert small.eq(members[1]).all()
    dist.barrier(group)
    assert dist.all_reduce(small, group=torch_dist.GroupMember.NON_GROUP_MEMBER) is None
    assert bool(dist.traffic()) == (comm == "ours")  # the library's is not counted


def sent_by(name, elements):
    """The log of a collective where all K elements are so many float32."""
    part = elements if name in OF_WHOLE else elements // dist.get_world_size()
    dist.reset_traffic()
    left_by(dist, name, Case((part,), torch.float32))
    (logged, log), = dist.traffic().items()
    assert (logged, log.calls) == (name, 1)
    return log


@on_both
@parametrize("size", [2, 3, 4, 5, 8])
@on_ranks()
def test_bytes_sent_are_the_formulas(rank, size):
    """And the messages. (bench.py's formula of broadcasts and reduces is proven with it.)"""
    ways = [way for way in ways_of(True) if way != "torch"]
    for way in dict.fromkeys([*ways, *["kernel"] * (size < 4 and not is_plain())]):
        if way == "kernel":
            needs_kernels()
        elements = 40 if way == "kernel" else 400
        with carried(way):
            for name in DIRECT:
                log, steps = sent_by(name, elements * size), (size - 1) * (2 if name == "all_reduce" else 1)
                assert (log.messages, log.bytes) == (steps, steps * 4 * elements), name
            for name in TREES:  # the root is rank 0
                mine = sent_by(name, elements * size).messages
                torch_dist.all_reduce(every := torch.tensor(mine))
                root = (size - 1).bit_length() if name in ("broadcast", "scatter") else 0
                assert every == size - 1 and (rank > 0 or mine == root), name


@on_both
@parametrize("size,node", [(4, 2), (8, 2), (8, 4)])
@on_ranks()
def test_between_nodes_every_rank_sends_its_share(node, rank, size):
    """M nodes of n ranks: an all-reduce sends 2(n-1)/n x K inside, 2(M-1)/M x K/n between; its halves half of each. One
    ring over all nodes leaves the sending between them to one rank of each, the last."""
    k = 4 * (elements := 400 * size * size)
    inside, between = (node - 1) * k // node, (size // node - 1) * k // size
    with carried(node):
        for name in DIRECT:
            log, times = sent_by(name, elements), 2 if name == "all_reduce" else 1
            assert "to_all" in name or (log.bytes - log.outside, log.outside) == (times * inside, times * between)
    with patch.dict(os.environ, LOCAL_WORLD_SIZE=str(node)), served_by(dist.Link):
        log, last = sent_by("all_reduce", elements), rank % node == node - 1
        assert log.bytes == 2 * (size - 1) * k // size and log.outside == last * log.bytes


@parametrize("size, elements", [(2, 12), (4, LARGE)])
@on_ranks()
def test_calls_that_come_again_see_new_values(elements, rank, size):
    """On the same memory. (GPUs replay the third.)"""
    for name in *NTHS, "all_reduce":
        ours, theirs = (arguments_of(name, Case((elements,))) for _ in range(2))
        for i in range(5):
            for t, other in zip(tensors_in(ours), tensors_in(theirs), strict=True):
                t.copy_(other.add_(i))
            for comm, given in (dist, ours), (torch_dist, theirs):
                getattr(comm, name)(**given)
            assert all(map(torch.equal, tensors_in(ours), tensors_in(theirs))), name


@on_both
@on_ranks(1)
def test_no_number_is_cast_or_repeated_in_silence():
    """As copy_ would do it, with what a rank sends to itself."""
    one, two, whole = torch.ones(1), torch.ones(2), torch.ones(2, dtype=torch.int64)
    for room in one, whole:
        calls = [(name, two, room) for name in NTHS]
        calls += [("gather", two, [room]), ("scatter", two, [room]),
                  ("all_gather", [two], room), ("reduce_scatter", two, [room]), ("all_to_all", [two], [room]),
                  ("all_gather", [two, two], two), ("reduce_scatter", two, [two, two])]  # two parts of one rank
        for name, *given in calls:
            with pytest.raises(ValueError, match="elements|dtype|for each rank"):
                getattr(dist, name)(*given)


@on_both
@on_ranks(1)
def test_what_is_no_group_is_refused_in_a_line():
    for group, kind in (parallel.make_mesh(torch.get_default_device().type, dp=1), "DeviceMesh"), ([0], "list"):
        with pytest.raises(TypeError, match=f"not a {kind}: give mesh.get_group"):
            dist.all_reduce(torch.ones(1), group=group)


@on_plain
@on_ranks(2)
def test_after_an_operation_that_failed_none_runs(rank):
    """A peer could take its messages for those of the one that failed."""
    group, t = dist.new_group([0, 1]), torch.ones(4)
    with pytest.raises(ValueError, match="use SUM"):
        dist.all_reduce(t, dist.ReduceOp.BXOR, group, async_op=True).wait()
    with pytest.raises(ValueError, match="use SUM"):
        dist.all_reduce(t, group=group, async_op=True).wait()
    with pytest.raises(ValueError, match="use SUM"):
        dist.all_reduce(t, group=group)
    assert t.eq(1).all()
    dist.destroy_process_group(group)


@parametrize("size", [3, 4, 5])
@on_ranks()
def test_all_reduce_leaves_the_same_bits_on_every_rank(rank):
    torch.manual_seed(rank)
    for n in (5, 1000, BIG):
        dist.all_reduce(t := torch.randn(n))
        torch_dist.broadcast(first := t.clone(), 0)
        assert t.equal(first)


@on_both
@on_ranks(2)
def test_tensors_of_inference_mode_may_be_sent_after_it(rank):
    """As those of a metric that was computed in it."""
    for async_op in False, True:
        with torch.inference_mode():
            summed, spread = torch.ones(3) * rank, torch.zeros(2, 3).T
        handles = [dist.all_reduce(summed, async_op=async_op),
                   dist.all_gather_into_tensor(spread, torch.full((3,), 1.0 * rank), async_op=async_op)]
        for handle in handles if async_op else ():
            handle.wait()
        assert summed.eq(1).all() and spread.sum() == 3
