"""Every collective of the lecture, from send and receive.

The names and arguments are those of `torch.distributed`, so `import collectives as dist` works. K elements on N ranks:

    collective                           algorithm                         takes            elements sent
    broadcast  reduce  gather  scatter   binomial tree                     log2(N) rounds   N-1 messages by all together
    reduce_scatter(_tensor)              ring                              N-1 steps        (N-1)/N x K by each rank
    all_gather(_into_tensor)             ring                              N-1 steps        (N-1)/N x K
    all_reduce                           reduce-scatter, then all-gather   2(N-1) steps     2(N-1)/N x K
    all_to_all(_single)                  pairwise exchange                 N-1 steps        (N-1)/N x K
    barrier                              dissemination                     log2(N) rounds   a byte a round

Where N is no power of two, log2(N) is rounded up.
send, recv, isend, irecv and batch_isend_irecv are torch.distributed's own, counted.

`Link` is a process group as messages. Algorithms are loops of `link.exchange`. Public functions run them on their
group's link. `TwoLevels`, in further/nodes.py, is a link for groups on several nodes. fast/ has faster links.

    python -m lessons collectives        walks through all of them, with 4 processes

N ranks in the group, r this rank, K elements in the tensor; ranks, chunks, steps and rounds count from 0.
Read with: CS336 lecture 8 (collective operations), Ultra-Scale Playbook "parallel programming crash course".
"""

import functools
import itertools
import os
import queue
import sys
import threading
import zlib
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch.distributed import ReduceOp, get_rank, get_world_size, init_process_group, irecv, new_group
from torch.distributed import is_initialized, recv  # noqa: F401  for those who import this module as `dist`


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


_traffic = defaultdict(Traffic)


def traffic():
    """The log so far: operation name -> Traffic. Every message is counted where it is sent, by no formula."""
    return {name: replace(log) for name, log in _traffic.items() if log.calls}


def reset_traffic():
    """Start the log again from zero."""
    _traffic.clear()


# --------------------------------------------------------------------------------------------- a group seen as messages

DEVICE = {"gloo": "cpu", "nccl": "cuda"}  # the tensors that each backend sends
TAG = 1 << 30  # tags of collectives' messages begin here, so that no `recv` of the caller's takes one


def processes_of_a_node(world):
    """How many processes torchrun started on each node. Without torchrun there is one node, with all of the world's."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or world)


def node_of(rank):
    """The node on which torchrun started a global rank."""
    return rank // processes_of_a_node(get_world_size())


class Handle:
    """What `async_op=True` returns. wait(): until the result may be used. On CPUs the caller waits, and gets what went
    wrong in the operation as an exception. On GPUs the current stream waits, and Python goes on."""

    def __init__(self, wait=lambda: None, is_completed=lambda: True):
        self.wait, self.is_completed = wait, is_completed


class Worker:
    """A thread that calls functions one after the other, in the order in which they come."""

    def __init__(self):
        self.jobs = queue.SimpleQueue()
        # A daemon thread, because a process that fails must be able to exit while a receive is still blocked.
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def start(self, function):
        done = Future()
        self.jobs.put((done, function))
        return Handle(done.result, done.done)

    def work(self):
        while (job := self.jobs.get()) is not None:
            done, function = job
            try:
                done.set_result(function())
            except BaseException as error:  # noqa: BLE001  the caller's thread raises it, in wait()
                done.set_exception(error)
            job = done = function = None  # else they would keep this operation's tensors until the next one

    def close(self):
        self.jobs.put(None)
        self.thread.join(2)  # a thread that is inside C++ when Python exits would abort the process


class Link:
    """One process group as the algorithms see it: `rank`, `size`, and messages to the other ranks of the group.

    A message is a flat tensor of any dtype, sent as bytes. Receivers know the sizes, so empty messages are not sent at
    all. Algorithms rely on one thing: messages from one rank to another are received in the order in which it sends.
    """

    def __init__(self, group):
        self.group, self.rank, self.size = group, torch_dist.get_rank(group), torch_dist.get_world_size(group)
        self.backend = torch_dist.get_backend(group)
        self.device = DEVICE[self.backend]
        self.nodes = [node_of(rank) for rank in torch_dist.get_process_group_ranks(group)]  # of each rank of the group
        self.name, self.log = "", Traffic()  # of the operation under way
        self.worker = self.stream = None  # which run operations with `async_op`: a thread on CPUs, a stream on GPUs
        self.last = Handle()  # of the latest operation that the worker was given

    def run(self, name, operation, arguments, async_op):
        """Call operation(link), logged under `name`. All ranks call in the same order.

        With `async_op` return a handle at once. The operation then runs beside the caller, after those before it. A
        blocking call waits behind those, too, or its messages would overtake theirs.
        arguments: those of torch.distributed's function of this name. The operation has them already; a stream must
        know which memory to keep, and `Library` what to call.
        """
        log = _traffic[name]
        log.calls += 1

        def body():
            self.name, self.log = name, log  # set here, because a Worker may start this after the next call of `run`
            with torch.no_grad():
                operation(self)

        if self.device == "cuda":
            return self.on_a_stream(body, arguments) if async_op else body()
        if not async_op and self.last.is_completed():
            return body()
        self.worker = self.worker or Worker()
        self.last = self.worker.start(body)
        return self.last if async_op else self.last.wait()

    def on_a_stream(self, body, arguments):
        """Queue the operation on a stream of its own, which waits for what the caller has queued so far."""
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            body()
            done = self.stream.record_event()
        for t in tensors_in(arguments.values()):
            t.record_stream(self.stream)  # the allocator must not reuse their memory before the stream is done
        return Handle(lambda: torch.cuda.current_stream().wait_event(done), done.query)

    def exchange(self, sends=(), receives=()):
        """Start all these messages at once, or a ring would hang; then wait for all. Lists of (flat tensor, peer)."""
        for handle in self.post(sends, receives):
            handle.wait()

    def post(self, sends=(), receives=()):
        """Start messages, in one batch so that none waits for another; returns handles, to be waited for once."""
        ops = [(irecv, t, peer) for t, peer in receives if t.numel()]
        for t, peer in sends:
            if t.numel():
                self.count(t, peer)
                ops.append((torch_dist.isend, t, peer))
        ops = [torch_dist.P2POp(op, t.view(torch.uint8), None, self.group, self.tag(t), peer) for op, t, peer in ops]
        return torch_dist.batch_isend_irecv(ops) if ops else []

    def tag(self, message):
        """Where ranks call different operations, or with other dtypes or sizes, their messages have different tags: the
        call ends in gloo's timeout, not in wrong numbers. (NCCL knows no tags.)"""
        return TAG + (zlib.crc32(f"{self.name} {message.dtype} {message.nbytes}".encode()) & (TAG - 1))

    def count(self, message, peer):
        self.log.count(message, self.nodes[peer] != self.nodes[self.rank])

    def scratch(self, like, count):
        """Room for `count` elements of `like`'s dtype and device, not initialised."""
        return torch.empty(count, dtype=like.dtype, device=like.device)

    def close(self):
        """Called before the group is destroyed."""
        if self.worker:
            self.worker.close()

    # Subclasses replace these four. chunks: N flat tensors; chunk r is mine.

    def reduce_scatter(self, chunks, result, op):
        """Combine chunk r of all ranks into `result`, which may be chunk r itself; other chunks stay as they are."""
        # The sums grow in `result` where they can: room of their own, and a copy, would take 25 MiB a third longer.
        width, inputs = max(map(len, chunks)), {chunk.untyped_storage().data_ptr() for chunk in chunks}
        if len(result) == width and result.untyped_storage().data_ptr() not in inputs:  # later steps still read these
            sums = result
        else:
            sums = torch.empty(width, dtype=result.dtype, device=result.device)
        _unflatten(ring_reduce_scatter(self, chunks, op, sums), result)

    def all_gather(self, chunks):
        """Rank c holds chunk c; afterwards every rank holds all. Step s: send chunk r-s right, receive chunk r-1-s."""
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for s in range(self.size - 1):
            outgoing, incoming = chunks[(self.rank - s) % self.size], chunks[(self.rank - 1 - s) % self.size]
            self.exchange([(outgoing, right)], [(incoming, left)])

    def all_reduce(self, flat, op):
        """Combine `flat` of all ranks in place. Few elements would be faster in few rounds: see fast/rings.py."""
        chunks = flat.tensor_split(self.size)  # where N does not divide K, the last chunks are one element shorter
        ring_reduce_scatter(self, chunks, op)
        self.all_gather(chunks)

    def all_to_all(self, outgoing, incoming):
        """Send outgoing[c] to rank c and receive incoming[c] from it, for every rank c; my own is copied.

        Pairwise exchange: in step s everybody sends s+1 places to the right, so no rank has two senders at a time.
        """
        incoming[self.rank].copy_(outgoing[self.rank])
        for s in range(self.size - 1):
            to, source = (self.rank + 1 + s) % self.size, (self.rank - 1 - s) % self.size
            self.exchange([(outgoing[to], to)], [(incoming[source], source)])


def tensors_in(values):
    """The tensors among some values, and in lists among them."""
    return [t for value in values for t in (value if isinstance(value, (list, tuple)) else [value])
            if isinstance(t, torch.Tensor)]


class Library(Link):
    """torch.distributed's own collectives in place of ours. They are not counted.

    Ours take all tensors whose elements fit. Of the library's, those below want contiguous ones, and the first two of
    these want sizes along dimension 0 that fit. So these get contiguous tensors, flat ones where shapes may differ.
    """
    outputs = {"all_gather_into_tensor": "output_tensor", "reduce_scatter_tensor": "output",
               "all_to_all_single": "output"}

    @torch.no_grad()
    def run(self, name, operation, arguments, async_op):
        call = functools.partial(getattr(torch_dist, name), group=self.group, async_op=async_op)
        if name not in self.outputs:
            return call(**arguments)
        given = {key: t for key, t in arguments.items() if isinstance(t, torch.Tensor)}
        flats = {key: _flat(t) for key, t in given.items()}
        if name == "all_to_all_single":  # whose split sizes count rows
            arguments |= {key: flat.view(given[key].shape) for key, flat in flats.items()}
        else:
            arguments |= flats
        handle, output = call(**arguments) or Handle(), self.outputs[name]

        @torch.no_grad()
        def wait():  # and copy back what was made contiguous
            handle.wait()
            _unflatten(flats[output], given[output])

        return Handle(wait, handle.is_completed) if async_op else wait()


_levels = {}  # group -> (this rank's group inside its node, its group between the nodes), where TwoLevels serves it


def rows_and_columns(grid):
    """[group of this rank's row, group of its column] in a grid of global ranks; [] outside. Call it on all ranks."""
    lines = [*grid, *zip(*grid)]
    groups = [new_group(list(ranks)) for ranks in lines]
    return [group for group, ranks in zip(groups, lines) if get_rank() in ranks]


_links = defaultdict(dict)  # group -> {"ours", "ring", "torch": Link, "in use": the one that serves the group}


def use(group, comm):
    """Choose what carries a group's messages: "ours": the best way; "ring": the textbook's; "torch": the library's."""
    if group is torch_dist.GroupMember.NON_GROUP_MEMBER:
        return
    group = group or torch_dist.group.WORLD
    links = _links[group]
    links["in use"] = links[comm] = links.get(comm) or make_link(group, comm)


LINKS = {"ring": Link, "torch": Library}  # what `use` knows besides "ours"


def make_link(group, comm):
    """The Link of a group for "ours" or one of LINKS. ValueError for another name."""
    if comm in LINKS:
        return LINKS[comm](group)
    if comm != "ours":
        raise ValueError(f"no collectives are called {comm}: there are ours, {', '.join(LINKS)}")
    if group in _levels:
        from further.nodes import TwoLevels
        return TwoLevels(group)
    say_what_is_faster(torch_dist.get_backend(group))
    return Link(group)


@functools.cache  # once a process
def say_what_is_faster(backend):
    if backend == "nccl" and get_rank() == 0:
        print("collectives.py: these are the reference's loops of send and recv; `import fast; fast.on()`, before any "
              "group is made, is as fast as NCCL", file=sys.stderr)


def link_of(group):
    """The Link that serves this group."""
    group = group or torch_dist.group.WORLD
    if "in use" not in _links[group]:
        use(group, "ours")
    return _links[group]["in use"]


# --------------------------------------------------------------------------------------------------- reduction and cuts

COMBINE = {ReduceOp.SUM: torch.add, ReduceOp.AVG: torch.add, ReduceOp.MAX: torch.maximum, ReduceOp.MIN: torch.minimum,
           ReduceOp.PRODUCT: torch.mul}


def _average(op, tensor, size):
    """The mean is the sum, divided once at the end (whole numbers round toward zero, as NCCL does). So fp16 overflows
    where the sum does: gradients in it are better sent in float32."""
    if op == ReduceOp.AVG and size > 1:
        tensor.div_(size, rounding_mode=None if tensor.is_floating_point() or tensor.is_complex() else "trunc")


def _flat(tensor):
    """(K,) view of the tensor, or, if it is not contiguous, of a copy, which `_unflatten` copies back."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.as_strided((len(flat),), (1,))  # stride 1, to be sent as bytes: torch leaves it open below 2 elements


def _unflatten(flat, tensor):
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def _nths(whole, part, n):
    """Cut a flat tensor into n chunks of the size and dtype of `part`."""
    if len(whole) != n * len(part) or whole.dtype != part.dtype:
        raise ValueError(f"{len(whole)} elements of {whole.dtype} must hold {n} times {len(part)} of {part.dtype}")
    return whole.view(n, -1).unbind()


def _blocks(tensor, sizes, n):
    """How many elements each of n ranks' blocks has: `sizes` rows of the tensor, or equally many."""
    rows = tensor.size(0)
    sizes = sizes or [rows // n] * n
    if len(sizes) != n or sum(sizes) != rows:
        raise ValueError(f"all_to_all_single: {rows} rows are not {n} blocks of {sizes} rows")
    row = tensor.numel() // max(1, rows)
    return [row * size for size in sizes]


# ------------------------------------------------------------------------------------------------------ ring algorithms
#
# Ranks stand in a ring, and each sends only to its right, rank r+1. The tensor is cut into N chunks. Step s, 0 to N-2:
#
#     reduce-scatter   send chunk r-1-s, receive chunk r-2-s and add my own to it; at the end chunk r is complete
#     all-gather       send chunk r-s, receive chunk r-1-s as it is
#
# Each rank sends N-1 chunks of K/N elements: (N-1)/N x K for either half, 2(N-1)/N x K for the two in a row.
# Reduce-scatter of 3 ranks. After step s rank r has the sum of chunk r-2-s over the ranks r-1-s to r. Chunk: ranks:
#
#                 rank 0        rank 1        rank 2
#     step 0      1: 2+0        2: 0+1        0: 1+2
#     step 1      0: 1+2+0      1: 2+0+1      2: 0+1+2           rank r has chunk r of all

def ring_reduce_scatter(link, chunks, op, sums=None):
    """Combine chunk c of all ranks on rank c, and return it. sums: room for a chunk, which then takes the partial sums;
    left out, chunks are overwritten by those that pass through this rank."""
    right, left = (link.rank + 1) % link.size, (link.rank - 1) % link.size
    received = link.scratch(chunks[0], max(map(len, chunks)))  # K/N elements
    outgoing = chunks[(link.rank - 1) % link.size]
    for s in range(link.size - 1):
        mine = chunks[(link.rank - 2 - s) % link.size]
        incoming = received[:len(mine)]
        link.exchange([(outgoing, right)], [(incoming, left)])
        outgoing = mine if sums is None else sums[:len(mine)]
        COMBINE[op](incoming, mine, out=outgoing)
    _average(op, outgoing, link.size)
    return outgoing


# ------------------------------------------------------------------------------------------------------ tree algorithms
#
# A binomial tree over v = (r - root) mod N. v's parent is v with its lowest set bit cleared; its children are v + 1,
# v + 2, v + 4, ... below that bit, and child v + d heads the d ranks v+d .. v+2d-1, as far as there are so many:
#
#     0 ─┬─ 1                 log2(N) rounds instead of N-1: in each one, all who have the data pass it on.
#        ├─ 2 ─── 3
#        └─ 4 ─┬─ 5
#              └─ 6 ─── 7

def _tree(link, root, group_root):
    """(parent, [(child, d), ...] with the nearest child first, ranks in my subtree); parent, child: ranks of the group.

    Row i of a subtree's data is that of rank r + i, so rows d to 2d-1 are those of the child at distance d. Callers
    name the root by its global rank or by its rank in the group.
    """
    if root is not None and group_root is not None:
        raise ValueError("give the root once: by global rank or by rank in the group")
    root = torch_dist.get_group_rank(link.group, root or 0) if group_root is None else group_root
    v = (link.rank - root) % link.size
    lowest_bit = v & -v  # 0 of the root alone
    parent = (link.rank - lowest_bit) % link.size if v else None
    d, children = 1, []
    while d < link.size - v and d != lowest_bit:
        children.append(((link.rank + d) % link.size, d))
        d *= 2
    return parent, children, min(d, link.size - v)


# ----------------------------------------------------------------------------------------------------- public functions

def _call(name, operation, group, async_op, **arguments):
    """Run what a public function has defined. It passes its locals: its arguments, which are torch.distributed's, and
    the operation. (So it has no others: `Library` would pass them on.)"""
    if arguments.get("op", ReduceOp.SUM) not in COMBINE:
        raise ValueError(f"{name}: op {arguments['op']} is not supported: use SUM, AVG, MAX, MIN or PRODUCT")
    if group is torch_dist.GroupMember.NON_GROUP_MEMBER:
        return None  # a rank outside the group has nothing to do, as in torch.distributed
    return link_of(group).run(name, operation, arguments, async_op)


def _count_sent(name, tensor, group, dst, group_dst):
    if group is not torch_dist.GroupMember.NON_GROUP_MEMBER:
        dst = torch_dist.get_global_rank(group or torch_dist.group.WORLD, group_dst) if dst is None else dst
        _traffic[name].calls += 1
        _traffic[name].count(tensor, node_of(dst) != node_of(get_rank()))


def send(tensor, dst=None, group=None, tag=0, group_dst=None):
    """torch.distributed's own, counted: returns when `tensor` may be written again."""
    _count_sent("send", tensor, group, dst, group_dst)
    torch_dist.send(tensor, dst, group, tag, group_dst)


def isend(tensor, dst=None, group=None, tag=0, group_dst=None):
    """torch.distributed's own, counted: what pipelines send. Returns a handle."""
    _count_sent("isend", tensor, group, dst, group_dst)
    return torch_dist.isend(tensor, dst, group, tag, group_dst)


def P2POp(op, tensor, peer=None, group=None, tag=0, group_peer=None):
    """A message for `batch_isend_irecv`. op: isend or irecv."""
    return torch_dist.P2POp({isend: torch_dist.isend}.get(op, op), tensor, peer, group, tag, group_peer)


def batch_isend_irecv(p2p_op_list):
    """torch.distributed's own, counted: start all these messages, so that none waits for another. Returns handles."""
    for p2p in p2p_op_list:
        if p2p.op is torch_dist.isend:
            _count_sent("isend", p2p.tensor, p2p.group, p2p.peer, None)
    return torch_dist.batch_isend_irecv(p2p_op_list)


def broadcast(tensor, src=None, group=None, async_op=False, group_src=None):
    """Copy `tensor` of global rank `src` into `tensor` of every rank, of any shape and dtype. Binomial tree: the root
    sends up to log2(N) copies, all ranks together N-1. With `async_op`, here as everywhere, returns a handle."""
    def operation(link):
        parent, children, _ = _tree(link, src, group_src)
        flat = _flat(tensor)
        if parent is not None:
            link.exchange(receives=[(flat, parent)])
            _unflatten(flat, tensor)
        for child, _ in reversed(children):  # a round each; the largest subtree first, because it takes longest
            link.exchange(sends=[(flat, child)])
    return _call("broadcast", **locals())


def reduce(tensor, dst=None, op=ReduceOp.SUM, group=None, async_op=False, group_dst=None):
    """Combine `tensor` of all ranks into `tensor` of global rank `dst`; the others keep theirs. Binomial tree."""
    def operation(link):
        parent, children, _ = _tree(link, dst, group_dst)
        # Only the root's tensor may change, so what adds up on other ranks needs a copy. A leaf adds up nothing.
        flat = _flat(tensor).clone() if children and parent is not None else _flat(tensor)
        theirs = link.scratch(flat, len(flat)) if children else None
        for child, _ in children:
            link.exchange(receives=[(theirs, child)])
            COMBINE[op](flat, theirs, out=flat)
        if parent is not None:
            link.exchange(sends=[(flat, parent)])
        else:
            _average(op, flat, link.size)
            _unflatten(flat, tensor)
    return _call("reduce", **locals())


def gather(tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None):
    """Collect `tensor` of every rank into `gather_list` (N tensors of its shape) on rank `dst`. Binomial tree."""
    def operation(link):
        parent, children, count = _tree(link, dst, group_dst)
        rows = tensor.new_empty(count, tensor.numel())
        rows[0] = _flat(tensor)
        link.exchange(receives=[(rows[d:2 * d].view(-1), child) for child, d in children])
        if parent is not None:
            link.exchange(sends=[(rows.view(-1), parent)])
        else:
            for i, row in enumerate(rows):
                gather_list[(link.rank + i) % link.size].copy_(row.view(tensor.shape))
    return _call("gather", **locals())


def scatter(tensor, scatter_list=None, src=None, group=None, async_op=False, group_src=None):
    """Hand `scatter_list[i]` of rank `src` to `tensor` of rank i: gather backwards. Binomial tree."""
    def operation(link):
        parent, children, count = _tree(link, src, group_src)
        rows = tensor.new_empty(count, tensor.numel())
        if parent is not None:
            link.exchange(receives=[(rows.view(-1), parent)])
        else:
            for i, row in enumerate(rows):
                row.copy_(_flat(scatter_list[(link.rank + i) % link.size]))
        for child, d in reversed(children):
            link.exchange(sends=[(rows[d:2 * d].view(-1), child)])
        tensor.copy_(rows[0].view(tensor.shape))
    return _call("scatter", **locals())


def all_gather(tensor_list, tensor, group=None, async_op=False):
    """Put `tensor` of rank i into `tensor_list[i]` of every rank, for all i; sizes may differ from rank to rank."""
    def operation(link):
        flats = [_flat(t) for t in tensor_list]
        flats[link.rank].copy_(_flat(tensor))
        link.all_gather(flats)
        for flat, t in zip(flats, tensor_list):
            _unflatten(flat, t)
    return _call("all_gather", **locals())


def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
    """Concatenate `input_tensor` (K/N elements) of all ranks, in rank order, into `output_tensor` (K) on every rank.
    Ring: (N-1)/N x K elements sent. `input_tensor` may be this rank's slice of `output_tensor`."""
    def operation(link):
        flat, own = _flat(output_tensor), _flat(input_tensor)
        chunks = _nths(flat, own, link.size)
        _unflatten(own, chunks[link.rank])  # nothing to copy where the input is this rank's slice of the output
        link.all_gather(chunks)
        _unflatten(flat, output_tensor)
    return _call("all_gather_into_tensor", **locals())


def reduce_scatter(output, input_list, op=ReduceOp.SUM, group=None, async_op=False):
    """Combine `input_list[i]` of all ranks into `output` of rank i; sizes may differ."""
    def operation(link):
        result = _flat(output)
        link.reduce_scatter([_flat(t) for t in input_list], result, op)
        _unflatten(result, output)
    return _call("reduce_scatter", **locals())


def reduce_scatter_tensor(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    """Combine `input` (K elements) of all ranks and leave slice r of the result in `output` (K/N) of rank r.
    Ring: (N-1)/N x K elements sent. `output` may be this rank's slice of `input`."""
    def operation(link):
        result = _flat(output)
        link.reduce_scatter(_nths(_flat(input), result, link.size), result, op)
        _unflatten(result, output)
    return _call("reduce_scatter_tensor", **locals())


def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False):
    """Combine `tensor` of all ranks in place; every rank ends with the same bits. Ring reduce-scatter, then ring
    all-gather: 2(N-1)/N x K elements sent."""
    def operation(link):
        flat = _flat(tensor)
        link.all_reduce(flat, op)
        _unflatten(flat, tensor)
    return _call("all_reduce", **locals())


def all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False):
    """Send `input_tensor_list[i]` to rank i, put what rank i sent into `output_tensor_list[i]`; sizes may differ."""
    def operation(link):
        outgoing, incoming = ([_flat(t) for t in tensors] for tensors in (input_tensor_list, output_tensor_list))
        link.all_to_all(outgoing, incoming)
        for flat, t in zip(incoming, output_tensor_list):
            _unflatten(flat, t)
    return _call("all_to_all", **locals())


def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
    """Send block i of `input`'s rows to rank i, put what rank i sent into block i of `output`: a transpose over ranks.
    Blocks are equal unless the split sizes (rows per rank) say otherwise. A rank sends all but its own block, once."""
    def operation(link):
        result = _flat(output)
        outgoing = _flat(input).split(_blocks(input, input_split_sizes, link.size))
        incoming = result.split(_blocks(output, output_split_sizes, link.size))
        link.all_to_all(outgoing, incoming)
        _unflatten(result, output)
    return _call("all_to_all_single", **locals())


def barrier(group=None, async_op=False):
    """Return when every rank of the group has called it. Round i: tell rank r + 2^i, hear from rank r - 2^i. After
    log2(N) rounds all have heard, indirectly, of all."""
    def operation(link):
        mine, theirs = torch.zeros(2, 1, dtype=torch.uint8, device=link.device)
        distance = 1
        while distance < link.size:
            link.exchange([(mine, (link.rank + distance) % link.size)], [(theirs, (link.rank - distance) % link.size)])
            distance *= 2
        if mine.is_cuda and not async_op:
            torch.cuda.current_stream().synchronize()  # so far only the stream waits, but a barrier holds up the CPU
    return _call("barrier", **locals())


# -------------------------------------------------------------------------------------------------------- start and end

def initialize(device_type, timeout=600):
    """Join the processes torchrun started (or be a world of one without it); returns this rank's torch.device.
    "cpu" takes gloo, "cuda" NCCL with one GPU a local rank. timeout: seconds until a silent peer is an error."""
    gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if device_type == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)
    init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout), device_id=gpu,
                       **rendezvous(device_type, timeout))
    over_nodes(None, [range(get_world_size())])
    return gpu or torch.device("cpu")


def over_nodes(group, groups):
    """On several nodes, let a group work in two levels; arguments as of further/nodes.py's `two_levels`."""
    if get_world_size() > processes_of_a_node(get_world_size()):
        from further.nodes import two_levels
        two_levels(group, groups)


def rendezvous(device_type, timeout):
    """Where processes meet, as arguments of init_process_group: under torchrun where the environment says, alone in a
    store of one's own."""
    if "RANK" not in os.environ:
        return {"store": torch_dist.HashStore(), "rank": 0, "world_size": 1}
    store, rank, size = next(torch_dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    # torchrun's store outlives groups. A second world that met under the same keys would find the first one's sockets.
    return {"store": torch_dist.PrefixStore(f"world {next(worlds)}", store), "rank": rank, "world_size": size}


worlds = itertools.count()  # that this process has joined


def destroy_process_group(group=None):
    """torch.distributed's own, for one group or all; what was kept for it goes, too."""
    for served in [*_links, *_levels] if group is None else [group]:
        for link in set(_links.pop(served, {}).values()):
            link.close()
        _levels.pop(served, None)
    torch_dist.destroy_process_group(group)
    if group is None:
        reset_traffic()


def __getattr__(name):
    """Python asks for names that are not here."""
    has = ", ".join(n for n in torch_dist.distributed_c10d.__all__ if n in globals())
    raise AttributeError(f"collectives.py has no {name}. Of torch.distributed it has {has}")
