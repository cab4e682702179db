"""Every collective of the lecture, from send and receive.

The names and arguments are those of `torch.distributed`, so `import collectives as dist` works. Tensors of K elements,
cut into N chunks or made of N, on N ranks; r is this rank. Ranks, chunks, steps and rounds count from 0.

    collective                afterwards, on rank r            algorithm          takes           elements sent
    broadcast                 the root's tensor                binomial tree      log2(N) rounds  (N-1) K, all together
    reduce                    at the root: the sum over ranks  binomial tree      log2(N) rounds  (N-1) K, all together
    gather                    at the root: all ranks' tensors  binomial tree      log2(N) rounds
    scatter                   the root's r-th tensor           binomial tree      log2(N) rounds
    reduce_scatter(_tensor)   chunk r of the sum over ranks    ring               N-1 steps       (N-1)/N K by each rank
    all_gather(_into_tensor)  all ranks' chunks                ring               N-1 steps       (N-1)/N K
    all_reduce                the sum over ranks               both rings         2(N-1) steps    2(N-1)/N K
    all_to_all(_single)       chunk r of every rank's tensor   pairwise exchange  N-1 steps       (N-1)/N K
    barrier                   all ranks have called it         dissemination      log2(N) rounds  a byte a round

Where N is no power of two, log2(N) is rounded up. COMBINE has the other operations that may stand in place of the sum.
send, recv, isend, irecv and batch_isend_irecv are torch.distributed's own; what is sent is counted.

Read from the top: the algorithms are loops of `link.exchange`. A public function runs one on its group's `Link`, which
sends the messages. further/nodes.py has a link for groups on several nodes, fast/ has faster ones.

    python -m lessons collectives        walks through all of them, with 4 processes

Read with: CS336 lecture 8 (collective operations), Ultra-Scale Playbook "parallel programming crash course".
"""

import atexit
import contextlib
import os
import queue
import threading
import zlib
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch.distributed import ReduceOp, get_backend, get_rank, get_world_size, init_process_group, new_group
from torch.distributed import is_initialized, recv  # noqa: F401  for those who import this module as `dist`


# ----------------------------------------------------------------------------------------------------------------- ring
#
# Ranks stand in a ring. Each sends to its right, rank r+1, and receives from its left, rank r-1:
#
#     ┌─> rank 0 ──> rank 1 ──> rank 2 ──> rank 3 ─┐
#     └────────────────────────────────────────────┘
#
# The tensor is cut into N chunks. In step s, 0 to N-2, rank r
#
#     reduce-scatter   sends its partial sum of chunk r-1-s, receives one of chunk r-2-s, and adds its own chunk to that
#     all-gather       sends chunk r-s, and receives chunk r-1-s, which is complete
#
# Three ranks. Left: "chunk: ranks in the partial sum that rank r has made". Right: the chunks that rank r has complete.
#
#              reduce-scatter                             all-gather
#              rank 0       rank 1       rank 2           rank 0     rank 1     rank 2
#     start                                               0          1          2
#     step 0   1: 2+0       2: 0+1       0: 1+2           0 2        1 0        2 1
#     step 1   0: 1+2+0     1: 2+0+1     2: 0+1+2         0 2 1      1 0 2      2 1 0
#
# In each half a rank sends N-1 chunks of K/N elements, (N-1)/N K. Only with a switch that adds up do ranks send less.

def ring_reduce_scatter(link, chunks, op):
    """Combine chunk c of all ranks on rank c, which returns it. The chunks stay as they are."""
    right, left = (link.rank + 1) % link.size, (link.rank - 1) % link.size
    combine = COMBINE[op]  # before anything is sent
    partial = chunks[(link.rank - 1) % link.size]
    for s in range(link.size - 1):
        mine = chunks[(link.rank - 2 - s) % link.size]
        received = torch.empty_like(mine)
        link.exchange([(partial, right)], [(received, left)])
        partial = combine(received, mine, out=received)
    average(op, partial, link.size)
    return partial


def ring_all_gather(link, chunks):
    """Rank c holds chunk c; afterwards every rank holds all."""
    right, left = (link.rank + 1) % link.size, (link.rank - 1) % link.size
    for s in range(link.size - 1):
        outgoing, incoming = chunks[(link.rank - s) % link.size], chunks[(link.rank - 1 - s) % link.size]
        link.exchange([(outgoing, right)], [(incoming, left)])


def ring_all_reduce(link, flat, op):
    """Combine `flat` of all ranks in place. All get the same bits, because one rank has computed each chunk."""
    chunks = flat.tensor_split(link.size)  # where N does not divide K, the last chunks are one element shorter
    chunks[link.rank].copy_(ring_reduce_scatter(link, chunks, op))
    ring_all_gather(link, chunks)


# ----------------------------------------------------------------------------------------------------------------- tree
#
# A binomial tree over v = (r - root) mod N. v's parent is v with its lowest set bit cleared; its children are v + 1,
# v + 2, v + 4, ... below that bit, and child v + d heads the d ranks v+d .. v+2d-1, as far as there are so many:
#
#     0 ─┬─ 1                 log2(N) rounds instead of N-1: in each one, all who have the data pass it on.
#        ├─ 2 ─── 3
#        └─ 4 ─┬─ 5
#              └─ 6 ─── 7

def tree(link, root, group_root):
    """(parent, [(child, d), ...] with the nearest child first, ranks in my subtree); parent, child: ranks of the group.

    In gather and scatter, row i is rank r + i's, so rows d to 2d-1 are those of the child at distance d. Callers
    name the root by its global rank or by its rank in the group. Of six ranks, with root 0:

        rank 0    (None, [(1, 1), (2, 2), (4, 4)], 6)
        rank 2    (0, [(3, 1)], 2)
        rank 4    (0, [(5, 1)], 2)
    """
    root = torch_dist.get_group_rank(link.group, root or 0) if group_root is None else group_root
    if not 0 <= root < link.size:
        raise ValueError(f"rank {root} is not in a group of {link.size}")
    v = (link.rank - root) % link.size
    lowest_bit = v & -v  # the largest power of two that divides v; 0 at the root
    parent = (link.rank - lowest_bit) % link.size if v else None
    d = 1
    children = []
    while d < link.size - v and d != lowest_bit:
        children.append(((link.rank + d) % link.size, d))
        d *= 2
    return parent, children, min(d, link.size - v)


def _broadcast(link, tensor, src, group_src):
    parent, children, _ = tree(link, src, group_src)
    flat = flatten(tensor)
    if parent is not None:
        link.exchange(receives=[(flat, parent)])
        unflatten(flat, tensor)
    for child, _ in reversed(children):  # a round each; the largest subtree first, because it takes longest
        link.exchange(sends=[(flat, child)])


def _reduce(link, tensor, dst, op, group_dst):
    parent, children, _ = tree(link, dst, group_dst)
    # Only the root's tensor may change, so what adds up on other ranks needs a copy. A leaf adds up nothing.
    flat = flatten(tensor).clone() if children and parent is not None else flatten(tensor)
    for child, _ in children:
        theirs = torch.empty_like(flat)
        link.exchange(receives=[(theirs, child)])
        COMBINE[op](flat, theirs, out=flat)
    if parent is not None:
        link.exchange(sends=[(flat, parent)])
    else:
        average(op, flat, link.size)
        unflatten(flat, tensor)


def _gather(link, tensor, gather_list, dst, group_dst):
    parent, children, count = tree(link, dst, group_dst)
    if parent is None:
        check_list(link, gather_list, tensor)
    rows = tensor.new_empty(count, tensor.numel())
    rows[0] = flatten(tensor)
    link.exchange(receives=[(rows[d:2 * d].view(-1), child) for child, d in children])
    if parent is not None:
        link.exchange(sends=[(rows.view(-1), parent)])
    else:
        for i, row in enumerate(rows):
            unflatten(row, gather_list[(link.rank + i) % link.size])


def _scatter(link, tensor, scatter_list, src, group_src):
    parent, children, count = tree(link, src, group_src)
    rows = tensor.new_empty(count, tensor.numel())
    if parent is not None:
        link.exchange(receives=[(rows.view(-1), parent)])
    else:
        check_list(link, scatter_list, tensor)
        for i, row in enumerate(rows):
            unflatten(flatten(scatter_list[(link.rank + i) % link.size]), row)
    for child, d in reversed(children):
        link.exchange(sends=[(rows[d:2 * d].view(-1), child)])
    unflatten(rows[0], tensor)


# ---------------------------------------------------------------------------------------------- pairwise, dissemination

def pairwise_all_to_all(link, outgoing, incoming):
    """Send outgoing[c] to rank c and receive incoming[c] from it, for every rank c; my own is copied.

    In step s everybody sends s+1 places to the right, so no rank has two senders at a time.
    """
    unflatten(outgoing[link.rank], incoming[link.rank])
    for s in range(link.size - 1):
        to, source = (link.rank + 1 + s) % link.size, (link.rank - 1 - s) % link.size
        link.exchange([(outgoing[to], to)], [(incoming[source], source)])


def _barrier(link):
    """Round i: tell rank r + 2^i, hear from rank r - 2^i. After log2(N) rounds all have heard, indirectly, of all."""
    mine, theirs = torch.zeros(2, 1, dtype=torch.uint8, device=link.device)
    distance = 1
    while distance < link.size:
        link.exchange([(mine, (link.rank + distance) % link.size)], [(theirs, (link.rank - distance) % link.size)])
        distance *= 2


# --------------------------------------------------------------------------------------------------- reduction and cuts

class Operations(dict):
    def __missing__(self, op):  # gloo has bitwise ones, NCCL a premultiplied sum
        raise ValueError(f"op {op} is not supported: use SUM, AVG, MAX, MIN or PRODUCT")


COMBINE = Operations({ReduceOp.SUM: torch.add, ReduceOp.AVG: torch.add, ReduceOp.MAX: torch.maximum,
                      ReduceOp.MIN: torch.minimum, ReduceOp.PRODUCT: torch.mul})


def average(op, tensor, size):
    """The mean is the sum, divided once at the end (whole numbers round toward zero, as NCCL does). So an fp16 mean
    overflows where the sum does: fp16 gradients are better sent in float32."""
    if op == ReduceOp.AVG and size > 1:
        tensor.div_(size, rounding_mode=None if tensor.is_floating_point() or tensor.is_complex() else "trunc")


def flatten(tensor):
    """(K,) view of the tensor, or, if it is not contiguous, of a copy, which `unflatten` copies back."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.as_strided((len(flat),), (1,))  # stride 1, to be sent as bytes: torch leaves it open below 2 elements


def unflatten(flat, tensor):
    if flat.data_ptr() != tensor.data_ptr():
        check_alike(flat, tensor)
        tensor.detach().copy_(flat.view(tensor.shape))


def check_alike(given, room):
    """ValueError for tensors of unlike sizes or dtypes, which copy_ would broadcast or cast without a word."""
    if given.numel() != room.numel() or given.dtype != room.dtype:
        raise ValueError(f"{given.numel()} elements of {given.dtype} have a tensor of {room.numel()} of {room.dtype}: "
                         "give one of the same size and dtype")


def check_list(link, tensors, like):
    """ValueError unless there is a tensor for each rank, each of the dtype of `like`."""
    dtypes = [t.dtype for t in tensors or ()]
    if dtypes != link.size * [like.dtype]:
        raise ValueError(f"a list of {len(dtypes)} tensors of {' '.join(map(str, dict.fromkeys(dtypes)))}: give "
                         f"{link.size} of {like.dtype}, one for each rank")


def blocks(tensor, sizes, n):
    """How many elements each of n ranks' blocks has: `sizes` rows of the tensor, or equally many."""
    rows = tensor.size(0)
    sizes = sizes or [rows // n] * n
    if len(sizes) != n or sum(sizes) != rows:
        raise ValueError(f"all_to_all_single: {rows} rows are not {n} blocks of {sizes} rows")
    row = tensor.numel() // max(1, rows)
    return [row * size for size in sizes]


# ----------------------------------------------------------------------------------------------------- public functions

# Each gives its group's Link an algorithm and its arguments: those of torch.distributed's function of the same name, in
# order, without `group` and `async_op`.

def broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    """Copy `tensor` of global rank `src` into `tensor` of every rank, of any shape and dtype. Binomial tree: the root
    sends up to log2(N) copies, all ranks together N-1. With `async_op`, here as everywhere, returns a handle."""
    return link_of(group).run("broadcast", async_op, _broadcast, tensor, src, group_src)


def reduce(tensor, dst=None, op=ReduceOp.SUM, group=None, async_op=False, group_dst=None):
    """Combine `tensor` of all ranks into `tensor` of global rank `dst`; the others keep theirs. Binomial tree."""
    return link_of(group).run("reduce", async_op, _reduce, tensor, dst, op, group_dst)


def gather(tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None):
    """Collect `tensor` of every rank into `gather_list` (N tensors of its shape) on rank `dst`. Binomial tree."""
    return link_of(group).run("gather", async_op, _gather, tensor, gather_list, dst, group_dst)


def scatter(tensor, scatter_list=None, src=None, group=None, async_op=False, group_src=None):
    """Hand `scatter_list[i]` of rank `src` to `tensor` of rank i: gather backwards. Binomial tree."""
    return link_of(group).run("scatter", async_op, _scatter, tensor, scatter_list, src, group_src)


def all_gather(tensor_list, tensor, group=None, async_op=False):
    """Put `tensor` of rank i into `tensor_list[i]` of every rank, for all i; sizes may differ from rank to rank."""
    return link_of(group).run("all_gather", async_op, _all_gather, tensor_list, tensor)


def _all_gather(link, tensor_list, tensor):
    check_list(link, tensor_list, tensor)
    flats = [flatten(t) for t in tensor_list]
    unflatten(flatten(tensor), flats[link.rank])
    link.all_gather(flats)
    for flat, t in zip(flats, tensor_list):
        unflatten(flat, t)


def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
    """Concatenate `input_tensor` (K/N elements) of all ranks, in rank order, into `output_tensor` (K) on every rank.
    `input_tensor` may be this rank's slice of `output_tensor`."""
    return link_of(group).run("all_gather_into_tensor", async_op, _all_gather_into_tensor, output_tensor, input_tensor)


def _all_gather_into_tensor(link, output_tensor, input_tensor):
    flat = flatten(output_tensor)
    chunks = flat.view(link.size, -1).unbind()
    unflatten(flatten(input_tensor), chunks[link.rank])  # which copies nothing if that is the input itself
    link.all_gather(chunks)
    unflatten(flat, output_tensor)


def reduce_scatter(output, input_list, op=ReduceOp.SUM, group=None, async_op=False):
    """Combine `input_list[i]` of all ranks into `output` of rank i; sizes may differ."""
    return link_of(group).run("reduce_scatter", async_op, _reduce_scatter, output, input_list, op)


def _reduce_scatter(link, output, input_list, op):
    check_list(link, input_list, output)
    check_alike(input_list[link.rank], output)
    result = flatten(output)
    link.reduce_scatter([flatten(t) for t in input_list], result, op)
    unflatten(result, output)


def reduce_scatter_tensor(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    """Combine `input` (K elements) of all ranks and leave slice r of the result in `output` (K/N) of rank r.
    `output` may be this rank's slice of `input`."""
    return link_of(group).run("reduce_scatter_tensor", async_op, _reduce_scatter_tensor, output, input, op)


def _reduce_scatter_tensor(link, output, input, op):
    result = flatten(output)
    chunks = flatten(input).view(link.size, -1).unbind()
    check_alike(chunks[link.rank], output)
    link.reduce_scatter(chunks, result, op)
    unflatten(result, output)


all_gather_single, reduce_scatter_single = all_gather_into_tensor, reduce_scatter_tensor  # as torch 2.13 calls them


def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False):
    """Combine `tensor` of all ranks in place; every rank ends with the same bits."""
    return link_of(group).run("all_reduce", async_op, _all_reduce, tensor, op)


def _all_reduce(link, tensor, op):
    flat = flatten(tensor)
    link.all_reduce(flat, op)
    unflatten(flat, tensor)


def all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False):
    """Send `input_tensor_list[i]` to rank i, put what rank i sent into `output_tensor_list[i]`; sizes may differ."""
    return link_of(group).run("all_to_all", async_op, _all_to_all, output_tensor_list, input_tensor_list)


def _all_to_all(link, output_tensor_list, input_tensor_list):
    for tensors in input_tensor_list, output_tensor_list:
        check_list(link, tensors, input_tensor_list[0])
    check_alike(input_tensor_list[link.rank], output_tensor_list[link.rank])
    outgoing, incoming = ([flatten(t) for t in tensors] for tensors in (input_tensor_list, output_tensor_list))
    link.all_to_all(outgoing, incoming)
    for flat, t in zip(incoming, output_tensor_list):
        unflatten(flat, t)


def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
    """Send block i of `input`'s rows to rank i, put what rank i sent into block i of `output`: a transpose over ranks.
    Blocks are equal unless the split sizes (rows per rank) say otherwise. A rank sends all but its own block, once."""
    return link_of(group).run("all_to_all_single", async_op, _all_to_all_single, output, input, output_split_sizes,
                              input_split_sizes)


def _all_to_all_single(link, output, input, output_split_sizes, input_split_sizes):
    result = flatten(output)
    outgoing = flatten(input).split(blocks(input, input_split_sizes, link.size))
    incoming = result.split(blocks(output, output_split_sizes, link.size))
    check_alike(outgoing[link.rank], incoming[link.rank])
    link.all_to_all(outgoing, incoming)
    unflatten(result, output)


def barrier(group=None, async_op=False):
    """Return when every rank of the group has called it."""
    handle = link_of(group).run("barrier", async_op, _barrier)
    if torch.cuda.is_initialized() and not async_op:
        torch.cuda.current_stream().synchronize()  # so far only the stream waits, but a barrier holds up the CPU
    return handle


# Messages of the caller's own: torch.distributed's, counted

def count_sent(name, tensor, group, dst, group_dst):
    if group is not torch_dist.GroupMember.NON_GROUP_MEMBER:
        dst = torch_dist.get_global_rank(group or torch_dist.group.WORLD, group_dst) if dst is None else dst
        process.traffic[name].calls += 1
        process.traffic[name].count(tensor, node_of(dst) != node_of(get_rank()))


def start_one(op, tensor, peer, group, tag, group_peer):
    """Start one message. Where the group has its NCCL communicator from the start, as after `initialize`, it goes as a
    batch, because PyTorch warns of each new pair of ranks that send to each other without one."""
    if getattr(group or torch_dist.group.WORLD, "bound_device_id", None) is None:
        return op(tensor, peer, group, tag, group_peer)
    handle, = torch_dist.batch_isend_irecv([torch_dist.P2POp(op, tensor, peer, group, tag, group_peer)])
    return handle


def send(tensor, dst=None, group=None, tag=0, group_dst=None):
    """Returns when `tensor` may be written again."""
    count_sent("send", tensor, group, dst, group_dst)
    torch_dist.send(tensor, dst, group, tag, group_dst)


def isend(tensor, dst=None, group=None, tag=0, group_dst=None):
    """What pipelines send. Returns a handle."""
    count_sent("isend", tensor, group, dst, group_dst)
    return start_one(torch_dist.isend, tensor, dst, group, tag, group_dst)


def irecv(tensor, src=None, group=None, tag=0, group_src=None):
    """Returns a handle."""
    return start_one(torch_dist.irecv, tensor, src, group, tag, group_src)


def P2POp(op, tensor, peer=None, group=None, tag=0, group_peer=None):
    """A message for `batch_isend_irecv`. op: isend or irecv."""
    op = {isend: torch_dist.isend, irecv: torch_dist.irecv}.get(op, op)
    return torch_dist.P2POp(op, tensor, peer, group, tag, group_peer)


def batch_isend_irecv(p2p_op_list):
    """Start all these messages, so that none waits for another. Returns handles."""
    for p2p in p2p_op_list:
        if p2p.op is torch_dist.isend:
            count_sent("isend", p2p.tensor, p2p.group, p2p.peer, None)
    return torch_dist.batch_isend_irecv(p2p_op_list)


# --------------------------------------------------------------------------------------------- a group seen as messages

DEVICE = {"gloo": "cpu", "nccl": "cuda"}  # the tensors that each backend sends
TAG = 1 << 30  # messages of collectives have tags from here on, so a `recv` of the caller's never takes one


class Handle:
    """What `async_op=True` returns. wait(): until the result may be used. On CPUs the caller waits, and gets what went
    wrong in the operation as an exception. On GPUs the current stream waits, and Python goes on."""

    def __init__(self, wait=lambda: None, is_completed=lambda: True):
        self.wait = lambda timeout=None: wait()  # the timeout that counts is the group's
        self.is_completed = is_completed


class Link:
    """One process group as the algorithms see it: `rank`, `size`, and messages to the other ranks of the group.

    A message is a flat tensor of any dtype, sent as bytes. Receivers know the sizes, so empty messages are not sent at
    all. Algorithms rely on one thing: messages from one rank to another are received in the order of their sends.
    """

    def __init__(self, group):
        self.group = group
        self.rank = torch_dist.get_rank(group)
        self.size = torch_dist.get_world_size(group)
        self.backend = torch_dist.get_backend(group)
        self.device = DEVICE[self.backend]
        self.nodes = [node_of(rank) for rank in torch_dist.get_process_group_ranks(group)]  # of each rank of the group
        self.worker = self.stream = None  # which run operations with `async_op`: a thread on CPUs, a stream on GPUs
        self.last = Handle()  # of the latest operation that the worker was given

    def during(self, name, aside=False):
        """This link as one operation sees it: a shallow copy with the operation's name, because an operation that runs
        beside the caller must not find the name of a later one.

        aside: whether the operation runs beside the caller.
        """
        call = object.__new__(type(self))  # copy.copy would take 6 us, this 1
        call.__dict__ = vars(self) | {"name": name, "aside": aside}
        return call

    # What the public functions call. chunks: N flat tensors; chunk r is mine. Subclasses have other algorithms.

    all_gather = ring_all_gather  # as methods: their `link` is self
    all_reduce = ring_all_reduce
    all_to_all = pairwise_all_to_all

    def reduce_scatter(self, chunks, result, op):
        """Combine chunk r of all ranks into `result`, which may be chunk r itself; other chunks stay as they are."""
        unflatten(ring_reduce_scatter(self, chunks, op), result)

    # Messages

    def exchange(self, sends=(), receives=()):
        """Start all these messages, then wait for all. Lists of (flat tensor, peer).

        They start as one batch. In NCCL a send may wait for its receive: if all ranks sent first, none would reach its
        receive. A batch is one operation.
        """
        ops = [(torch_dist.irecv, t, peer) for t, peer in receives if t.numel()]
        for t, peer in sends:
            if t.numel():
                self.log.count(t, self.nodes[peer] != self.nodes[self.rank])
                ops.append((torch_dist.isend, t, peer))
        ops = [torch_dist.P2POp(op, t.view(torch.uint8), None, self.group, self.tag(t), peer) for op, t, peer in ops]
        for handle in torch_dist.batch_isend_irecv(ops) if ops else ():  # every collective sends here
            handle.wait()

    def tag(self, message):
        """Where ranks call different operations, or with other dtypes or sizes, their messages have different tags: the
        call ends in gloo's timeout, not in wrong numbers. (NCCL knows no tags.)"""
        what = f"{self.name} {message.dtype} {message.nbytes}"
        return TAG + (zlib.crc32(what.encode()) & (TAG - 1))

    @property
    def log(self):
        return process.traffic[self.name]

    # Operations, which wait or run beside the caller

    def run(self, name, async_op, algorithm, *arguments):
        """Call algorithm(self.during(name), *arguments), logged under `name`. All ranks call in the same order.

        With `async_op` return a handle at once. The operation then runs beside the caller, after those before it. A
        blocking call waits behind those, too, or its messages would overtake theirs. (NCCL keeps that order itself: a
        group has one stream for all of its messages.)
        """
        process.traffic[name].calls += 1

        def operation():
            with inference_where(arguments):
                algorithm(self.during(name, async_op), *arguments)

        if not async_op and self.last.is_completed():
            self.last.wait()  # raises if it failed: peers could take this operation's messages for those of that one
            return operation()
        if self.device == "cuda":
            return self.on_a_stream(operation, tensors_among(arguments))
        self.worker = self.worker or Worker()
        self.last = self.worker.start(operation)
        return self.last if async_op else self.last.wait()

    def on_a_stream(self, operation, tensors):
        """Queue the operation on a stream of its own, which waits for what the caller has queued so far."""
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            operation()
            done = self.stream.record_event()
        for t in tensors:
            t.record_stream(self.stream)  # the allocator must not reuse their memory before the stream is done
        return Handle(lambda: torch.cuda.current_stream().wait_event(done), done.query)

    def close(self):
        """Called before the group is destroyed."""
        if self.worker:
            self.worker.close()


class Worker:
    """A thread that calls functions one after the other, in the order in which they come. When one has failed, those
    after it end with the same error: peers could take their messages for those of the one that failed."""

    def __init__(self):
        self.jobs = queue.SimpleQueue()
        # A daemon thread, because a process that fails must be able to exit while a receive is still blocked.
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()
        atexit.register(self.close)

    def start(self, function):
        done = Future()
        self.jobs.put((done, function))
        return Handle(done.result, done.done)

    def work(self):
        failed = None
        while (job := self.jobs.get()) is not None:
            done, function = job
            try:
                if failed:
                    raise failed
                result = function()
                job = function = None  # before the caller hears of the result: they keep the operation's tensors alive
                done.set_result(result)
            except BaseException as error:  # noqa: BLE001  the caller's thread raises it, in wait()
                failed = error
                done.set_exception(error)
            job = done = function = None

    def close(self):
        atexit.unregister(self.close)
        self.jobs.put(None)
        if threading.current_thread() is not self.thread:  # where the garbage collector may run
            self.thread.join(2)  # a thread that is inside C++ when Python exits would abort the process


def inference_where(arguments):
    """Goes around an operation: tensors that were made in inference mode can be written in inference mode alone."""
    made_in_it = any(t.is_inference() for t in tensors_among(arguments))
    return torch.inference_mode() if made_in_it else contextlib.nullcontext()


def tensors_among(values):
    """The tensors among some values, and in lists among them."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_among(value)
    return found


# ---------------------------------------------------------------------------------------------------------- traffic log

@dataclass
class Traffic:
    """What this rank has done under one operation's name: calls, messages sent, bytes sent, of them to other nodes."""
    calls: int = 0
    messages: int = 0
    bytes: int = 0
    outside: int = 0

    def count(self, message, outside=False):
        self.messages += 1
        self.bytes += message.nbytes
        self.outside += message.nbytes * outside


def traffic():
    """The log so far: operation name -> Traffic. Every message is counted where it is sent, by no formula."""
    return {name: replace(log) for name, log in process.traffic.items() if log.calls}


def reset_traffic():
    """Start the log again from zero."""
    process.traffic.clear()


def processes_of_a_node(world):
    """How many processes torchrun started on each node. Without torchrun there is one node, with all of the world's."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or world)


def node_of(rank):
    """The node on which torchrun started a global rank."""
    return rank // processes_of_a_node(get_world_size())


# ------------------------------------------------------------------------------------------------------- choice of link

# What makes the link of a group. "torch" is there after `import further.library`. A program may put others here before
# it makes a group, "nodes" among them, the two levels of further/nodes.py: `fast.on()` does.
LINKS = {"ours": Link, "ring": Link}


class Process:
    """What this module keeps while a process runs. (Of ranks that are threads, in further/together.py, each has one.)

        traffic      operation name -> Traffic
        links        group -> {one of LINKS' names: Link, "in use": the one that serves the group}
        registered   group -> what makes its link in place of LINKS["ours"], where further/nodes.py has said so
        stores       where it has met others: (store, rank, world size)
        worlds       how many it has joined
        makers       LINKS; ranks that are threads have the reference's own
    """

    def __init__(self, makers=LINKS):
        self.makers = makers
        self.traffic = defaultdict(Traffic)
        self.links = defaultdict(dict)
        self.registered = {}
        self.stores = {}
        self.worlds = 0


process = Process()


def use(group, comm):
    """Choose what carries a group's messages: "ours": the best way; "ring": the textbook's; "torch": the library's,
    once further/library.py is imported."""
    if group is torch_dist.GroupMember.NON_GROUP_MEMBER:
        return
    group = group or torch_dist.group.WORLD
    made = process.links[group]
    made["in use"] = made[comm] = made.get(comm) or make_link(group, comm)


def make_link(group, comm):
    """The Link of a group for a name in LINKS. ValueError for another one."""
    make = process.makers.get(comm)
    if make is None:
        raise ValueError(f"no collectives are called {comm}: there are ours, ring and, after import further.library, "
                         "torch")
    if comm == "ours":
        make = process.registered.get(group, make)
    return make(group)


class NoLink:
    """Of a rank outside the group, which has nothing to do."""

    def run(self, *_):
        return None


def link_of(group):
    """The Link that serves this group. TypeError for what is no group, a DeviceMesh or a list of ranks."""
    if group is torch_dist.GroupMember.NON_GROUP_MEMBER:
        return NoLink()
    group = torch_dist.group.WORLD if group is None else group
    if not isinstance(group, torch_dist.ProcessGroup):
        raise TypeError(f"group must be a process group, not a {type(group).__name__}: give mesh.get_group('dp'), say, "
                        "or new_group(ranks)")
    if "in use" not in process.links[group]:
        use(group, "ours")
    return process.links[group]["in use"]


# -------------------------------------------------------------------------------------------------------- start and end

def meeting_place(device_type, timeout):
    """Where processes meet, as arguments of init_process_group: under torchrun where the environment says, alone in a
    store of one's own. ValueError if WORLD_SIZE speaks of others, and no RANK says which of them this process is."""
    if not os.environ.get("RANK") and os.environ.get("WORLD_SIZE", "") in ("", "1"):
        return {"store": torch_dist.HashStore(), "rank": 0, "world_size": 1}
    place = tuple(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if place not in process.stores:  # it outlives groups, or a rank would meet others in a store that rank 0 is closing
        process.stores[place] = next(torch_dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    store, rank, size = process.stores[place]
    store.set_timeout(timedelta(seconds=timeout))
    # A second world that met under the same keys would find the first one's sockets.
    process.worlds += 1
    world = f"{attempt()}world {process.worlds}"
    return {"store": torch_dist.PrefixStore(world, store), "rank": rank, "world_size": size}


def attempt():
    """What the keys of this process begin with in torchrun's store. With --max-restarts the store outlives the
    processes, and still holds the addresses of those that have ended (pytorch #135712)."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"attempt {restarts} " * (os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def initialize(device_type, timeout=600, rendezvous=meeting_place):
    """Join the processes torchrun started (or be a world of one without it); returns this rank's torch.device.
    "cpu" takes gloo, "cuda" NCCL with one GPU a local rank. timeout: seconds until a silent peer is an error.
    rendezvous: where they meet; safe/launch.py has another. (`join` of further/together.py takes threads of this
    process for ranks.)"""
    gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if device_type == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)
    init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout), device_id=gpu,
                       **rendezvous(device_type, timeout))
    return gpu or torch.device("cpu")


def rows_and_columns(grid):
    """[group of this rank's row, group of its column] in a grid of global ranks; [] outside. Call it on all ranks."""
    lines = [*grid, *zip(*grid)]
    groups = [new_group(list(ranks)) for ranks in lines]
    return [group for group, ranks in zip(groups, lines) if get_rank() in ranks]


def destroy_process_group(group=None):
    """torch.distributed's own, for one group or all; what was kept for it goes, too."""
    for served in [*process.links, *process.registered] if group is None else [group]:
        for link in set(process.links.pop(served, {}).values()):
            link.close()
        process.registered.pop(served, None)
    torch_dist.destroy_process_group(group)
    if group is None:
        reset_traffic()
