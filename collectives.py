"""Every collective of the lecture, from send and receive.

The names and arguments are those of `torch.distributed`, so `import collectives as dist` works. K elements on N ranks:

    collective                           algorithm                         takes            elements sent
    broadcast  reduce  gather  scatter   binomial tree                     log2(N) rounds   N-1 messages by all together
    reduce_scatter(_tensor)              ring                              N-1 steps        (N-1)/N x K by each rank
    all_gather(_into_tensor)             ring                              N-1 steps        (N-1)/N x K
    all_reduce                           reduce-scatter, then all-gather   2(N-1) steps     2(N-1)/N x K
      of fewer than N elements           recursive doubling                log2(N) rounds   log2(N) x K
    all_to_all(_single)                  pairwise exchange                 N-1 steps        (N-1)/N x K
    barrier                              dissemination                     log2(N) rounds   a byte a round

Where N is no power of two, log2(N) is rounded up; recursive doubling rounds it down and takes two rounds more.
send, recv, isend, irecv and batch_isend_irecv are torch.distributed's own, counted.

`Link` is a process group as messages. Algorithms are loops of `link.exchange`. Public functions run them on their
group's link. `TwoLevels` is a link for groups on several nodes. Below the bar stand links that do the same faster.

    torchrun --nproc_per_node 4 collectives.py        walks through all of them

N ranks in the group, r this rank, K elements in the tensor; ranks, chunks, steps and rounds count from 0.
Read with: CS336 lecture 8 (collective operations), Ultra-Scale Playbook "parallel programming crash course".
"""

import os
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

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
TAG = 1 << 30  # of the messages of collectives, so that no `recv` of the caller's takes one. (NCCL knows no tags)


def processes_of_a_node(world):
    """How many processes torchrun started on each node. Without torchrun there is one node, with all of the world's."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or world)


def node_of(rank):
    """The node on which torchrun started a global rank."""
    return rank // processes_of_a_node(get_world_size())


class Handle:
    """What `async_op=True` returns. `wait` until the result may be used; here the operation has finished already."""

    def wait(self):
        return None

    def is_completed(self):
        return True


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
        self.log = Traffic()  # of the operation under way

    @torch.no_grad()
    def run(self, name, operation, arguments, async_op):
        """Call operation(link), logged under `name`. All ranks call in the same order: messages have one TAG.

        `async_op`: above the bar the operation has finished on return; faster links return earlier. arguments: those of
        torch.distributed's function of this name, for `Library`.
        """
        self.log = _traffic[name]
        self.log.calls += 1
        operation(self)
        return Handle() if async_op else None

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
        ops = [torch_dist.P2POp(op, t.view(torch.uint8), None, self.group, TAG, peer) for op, t, peer in ops]
        return torch_dist.batch_isend_irecv(ops) if ops else []

    def count(self, message, peer):
        self.log.count(message, self.nodes[peer] != self.nodes[self.rank])

    def scratch(self, like, count):
        """Room for `count` elements of `like`'s dtype and device, not initialised."""
        return torch.empty(count, dtype=like.dtype, device=like.device)

    def close(self):
        """Called before the group is destroyed."""

    # Subclasses replace these four. chunks: N flat tensors; chunk r is mine.

    def reduce_scatter(self, chunks, result, op):
        """Combine chunk r of all ranks into `result`, which may be chunk r itself; other chunks stay as they are."""
        chunks = [chunk.clone() for chunk in chunks]  # K elements more, because the ring overwrites all chunks
        ring_reduce_scatter(self, chunks, op)
        result.copy_(chunks[self.rank])

    def all_gather(self, chunks):
        """Rank c holds chunk c; afterwards every rank holds all. Step s: send chunk r-s right, receive chunk r-1-s."""
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for s in range(self.size - 1):
            outgoing, incoming = chunks[(self.rank - s) % self.size], chunks[(self.rank - 1 - s) % self.size]
            self.exchange([(outgoing, right)], [(incoming, left)])

    def all_reduce(self, flat, op):
        """Combine `flat` of all ranks in place."""
        if len(flat) < self.size:  # too few elements for N chunks
            recursive_doubling(self, flat, op)
        else:
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


class Library(Link):
    """torch.distributed's own collectives in place of ours. They are not counted.

    Ours take all tensors whose elements fit. Of the library's, those below want contiguous ones, and the first two of
    these want sizes along dimension 0 that fit. So these get contiguous tensors, flat ones where shapes may differ.
    """
    outputs = {"all_gather_into_tensor": "output_tensor", "reduce_scatter_tensor": "output",
               "all_to_all_single": "output"}

    @torch.no_grad()
    def run(self, name, operation, arguments, async_op):
        call = partial(getattr(torch_dist, name), group=self.group, async_op=async_op)
        if name not in self.outputs:
            return call(**arguments)
        given = {key: t for key, t in arguments.items() if isinstance(t, torch.Tensor)}
        flats = {key: _flat(t) for key, t in given.items()}
        if name == "all_to_all_single":  # whose split sizes count rows
            arguments |= {key: flat.view(given[key].shape) for key, flat in flats.items()}
        else:
            arguments |= flats
        handle, output = call(**arguments), self.outputs[name]
        result = CopiedBack(handle or Handle(), flats[output], given[output])
        return result if async_op else result.wait()


class CopiedBack(Handle):
    """The handle of an operation into `flat`, which is the tensor itself, or a copy if the tensor is not contiguous."""

    def __init__(self, handle, flat, tensor):
        self.handle, self.flat, self.tensor = handle, flat, tensor

    @torch.no_grad()
    def wait(self):
        self.handle.wait()
        _unflatten(self.flat, self.tensor)

    def is_completed(self):
        return self.handle.is_completed()


class TwoLevels(Link):
    """A group on M nodes with L ranks on each; rank r is number r mod L of node r // L.

    In one ring all that leaves a node goes through one rank's network card (so NCCL lays several rings). Here all L
    ranks send an Lth each:

        all-reduce       reduce-scatter inside the node | all-reduce of my Lth between the nodes | all-gather inside
        reduce-scatter   inside, once for the chunks of each node | between
        all-gather       between | inside, once for the chunks of each node

    Elements sent by each rank in an all-reduce: 2(L-1)/L x K inside, 2(M-1)/M x K/L between. The halves send half.
    """

    def __init__(self, group):
        super().__init__(group)
        self.inside, self.between = map(link_of, _levels[group])  # my node; the ranks of my number in all nodes

    def levels(self):
        """Both links, which count what they send under the operation that is under way."""
        self.inside.log = self.between.log = self.log
        return self.inside, self.between

    def of_each_node(self, chunks):
        return [chunks[first:first + self.inside.size] for first in range(0, self.size, self.inside.size)]

    def all_reduce(self, flat, op):
        (inside, between), add = self.levels(), ReduceOp.SUM if op == ReduceOp.AVG else op
        chunks = flat.tensor_split(inside.size)
        mine = chunks[inside.rank]
        inside.reduce_scatter(chunks, mine, add)
        between.all_reduce(mine, add)
        _average(op, mine, self.size)
        inside.all_gather(chunks)

    def reduce_scatter(self, chunks, result, op):
        (inside, between), add = self.levels(), ReduceOp.SUM if op == ReduceOp.AVG else op
        sums = [torch.empty_like(own[inside.rank]) for own in self.of_each_node(chunks)]  # over the ranks of my node
        for node, own in enumerate(self.of_each_node(chunks)):
            inside.reduce_scatter(own, sums[node], add)
        between.reduce_scatter(sums, result, add)
        _average(op, result, self.size)

    def all_gather(self, chunks):
        inside, between = self.levels()
        between.all_gather(chunks[inside.rank::inside.size])
        for own in self.of_each_node(chunks):
            inside.all_gather(own)


_levels = {}  # group -> (this rank's group inside its node, its group between the nodes), where TwoLevels serves it


def two_levels(group, groups):
    """Let a group work in two levels, if it spans several nodes, with equally many ranks, at least 2, on each.

    groups: [the ranks, ascending, of each group of a mesh's axis], of which `group` is this rank's. Call it on all
    ranks of the world, before the group is used, because every rank must take part in making every sub-group.
    """
    group = group or torch_dist.group.WORLD
    for ranks in groups if group not in _levels else ():  # a mesh of one axis takes the world's group: already done
        nodes = defaultdict(list)
        for rank in ranks:
            nodes[node_of(rank)].append(rank)
        counts = {len(node) for node in nodes.values()}
        if len(nodes) > 1 and len(counts) == 1 and counts != {1}:
            if mine := rows_and_columns([*nodes.values()]):
                _levels[group] = mine


def rows_and_columns(grid):
    """[group of this rank's row, group of its column] in a grid of global ranks; [] outside. Call it on all ranks."""
    lines = [*grid, *zip(*grid)]
    groups = [new_group(list(ranks)) for ranks in lines]
    return [group for group, ranks in zip(groups, lines) if get_rank() in ranks]


LINKS = {}    # backend -> what makes the Link of a group, given the group; where there is none, Link itself
PREPARE = []  # what `initialize` calls first: f(device_type, timeout); may return arguments for init_process_group
_links = defaultdict(dict)  # group -> {"ours", "ring", "torch": Link, "in use": the one that serves the group}


def use(group, comm):
    """Choose a group's Link: "ours": LINKS', or else this half's; "ring": the textbook's; "torch": the library's."""
    if group is torch_dist.GroupMember.NON_GROUP_MEMBER:
        return
    group = group or torch_dist.group.WORLD
    plain = {"ours": TwoLevels if group in _levels else Link, "ring": Link, "torch": Library}[comm]
    make, links = LINKS.get(torch_dist.get_backend(group) if comm == "ours" else comm, plain), _links[group]
    links["in use"] = links[comm] = links.get(comm) or make(group)


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
    """The mean is the sum, divided once at the end (whole numbers round toward zero, as NCCL does)."""
    if op == ReduceOp.AVG:
        tensor.div_(size, rounding_mode=None if tensor.is_floating_point() or tensor.is_complex() else "trunc")


def _flat(tensor):
    """(K,) view of the tensor, or, if it is not contiguous, of a copy, which `_unflatten` copies back."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.as_strided((len(flat),), (1,))  # stride 1, which torch leaves open for tensors of fewer than 2 elements


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

def ring_reduce_scatter(link, chunks, op):
    """Combine chunk c of all ranks into chunk c of rank c, in place. The other chunks are left with partial sums."""
    right, left = (link.rank + 1) % link.size, (link.rank - 1) % link.size
    received = link.scratch(chunks[0], max(map(len, chunks)))  # K/N elements, the only extra memory
    for s in range(link.size - 1):
        outgoing, growing = chunks[(link.rank - 1 - s) % link.size], chunks[(link.rank - 2 - s) % link.size]
        incoming = received[:len(growing)]
        link.exchange([(outgoing, right)], [(incoming, left)])
        COMBINE[op](incoming, growing, out=growing)
    _average(op, chunks[link.rank], link.size)


# -------------------------------------------------------------------------------------------------- recursive doubling

def recursive_doubling(link, flat, op):
    """All-reduce in log2(N) rounds: in round i the ranks that differ in bit i swap the whole tensor and both add.

    Ranks beyond the largest power of two hand theirs to a partner first and get the answer back last. Both sides of a
    swap add the same two numbers, so every rank ends with the same bits.
    """
    core = 1 << (link.size.bit_length() - 1)
    theirs = link.scratch(flat, len(flat))
    if link.rank >= core:
        link.exchange(sends=[(flat, link.rank - core)])
        link.exchange(receives=[(flat, link.rank - core)])
        return
    if link.rank + core < link.size:
        link.exchange(receives=[(theirs, link.rank + core)])
        COMBINE[op](flat, theirs, out=flat)
    distance = 1
    while distance < core:
        link.exchange([(flat, link.rank ^ distance)], [(theirs, link.rank ^ distance)])
        COMBINE[op](flat, theirs, out=flat)
        distance *= 2
    _average(op, flat, link.size)
    if link.rank + core < link.size:
        link.exchange(sends=[(flat, link.rank + core)])


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
    v, d, children = (link.rank - root) % link.size, 1, []
    while d < link.size - v and not v & d:
        children.append(((link.rank + d) % link.size, d))
        d *= 2
    return (link.rank - (v & -v)) % link.size if v else None, children, min(d, link.size - v)


# ----------------------------------------------------------------------------------------------------- public functions

def _call(name, operation, group, async_op, **arguments):
    if group is torch_dist.GroupMember.NON_GROUP_MEMBER:
        return None  # a rank outside the group has nothing to do, as in torch.distributed
    return link_of(group).run(name, operation, arguments, async_op)  # arguments: for `Library`, torch's own


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
    return _call("broadcast", operation, group, async_op, tensor=tensor, src=src, group_src=group_src)


def reduce(tensor, dst=None, op=ReduceOp.SUM, group=None, async_op=False, group_dst=None):
    """Combine `tensor` of all ranks into `tensor` of global rank `dst`; the others keep theirs. Binomial tree."""
    def operation(link):
        parent, children, _ = _tree(link, dst, group_dst)
        flat = _flat(tensor) if parent is None or not children else _flat(tensor).clone()  # only the root's may change
        theirs = link.scratch(flat, len(flat)) if children else None
        for child, _ in children:
            link.exchange(receives=[(theirs, child)])
            COMBINE[op](flat, theirs, out=flat)
        if parent is not None:
            link.exchange(sends=[(flat, parent)])
        else:
            _average(op, flat, link.size)
            _unflatten(flat, tensor)
    return _call("reduce", operation, group, async_op, tensor=tensor, dst=dst, group_dst=group_dst, op=op)


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
    arguments = {"tensor": tensor, "gather_list": gather_list, "dst": dst, "group_dst": group_dst}
    return _call("gather", operation, group, async_op, **arguments)


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
    arguments = {"tensor": tensor, "scatter_list": scatter_list, "src": src, "group_src": group_src}
    return _call("scatter", operation, group, async_op, **arguments)


def all_gather(tensor_list, tensor, group=None, async_op=False):
    """Put `tensor` of rank i into `tensor_list[i]` of every rank, for all i; sizes may differ from rank to rank."""
    def operation(link):
        flats = [_flat(t) for t in tensor_list]
        flats[link.rank].copy_(_flat(tensor))
        link.all_gather(flats)
        for flat, t in zip(flats, tensor_list):
            _unflatten(flat, t)
    return _call("all_gather", operation, group, async_op, tensor_list=tensor_list, tensor=tensor)


def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
    """Concatenate `input_tensor` (K/N elements) of all ranks, in rank order, into `output_tensor` (K) on every rank.
    Ring: (N-1)/N x K elements sent. `input_tensor` may be this rank's slice of `output_tensor`."""
    def operation(link):
        flat, own = _flat(output_tensor), _flat(input_tensor)
        chunks = _nths(flat, own, link.size)
        _unflatten(own, chunks[link.rank])  # nothing to copy where the input is this rank's slice of the output
        link.all_gather(chunks)
        _unflatten(flat, output_tensor)
    tensors = {"output_tensor": output_tensor, "input_tensor": input_tensor}
    return _call("all_gather_into_tensor", operation, group, async_op, **tensors)


def reduce_scatter(output, input_list, op=ReduceOp.SUM, group=None, async_op=False):
    """Combine `input_list[i]` of all ranks into `output` of rank i; sizes may differ."""
    def operation(link):
        result = _flat(output)
        link.reduce_scatter([_flat(t) for t in input_list], result, op)
        _unflatten(result, output)
    return _call("reduce_scatter", operation, group, async_op, output=output, input_list=input_list, op=op)


def reduce_scatter_tensor(output, input, op=ReduceOp.SUM, group=None, async_op=False):
    """Combine `input` (K elements) of all ranks and leave slice r of the result in `output` (K/N) of rank r.
    Ring: (N-1)/N x K elements sent. `output` may be this rank's slice of `input`."""
    def operation(link):
        result = _flat(output)
        link.reduce_scatter(_nths(_flat(input), result, link.size), result, op)
        _unflatten(result, output)
    return _call("reduce_scatter_tensor", operation, group, async_op, output=output, input=input, op=op)


def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False):
    """Combine `tensor` of all ranks in place; every rank ends with the same bits. Ring reduce-scatter, then ring
    all-gather: 2(N-1)/N x K elements sent. Fewer than N elements take recursive doubling: log2(N) x K."""
    def operation(link):
        flat = _flat(tensor)
        link.all_reduce(flat, op)
        _unflatten(flat, tensor)
    return _call("all_reduce", operation, group, async_op, tensor=tensor, op=op)


def all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False):
    """Send `input_tensor_list[i]` to rank i, put what rank i sent into `output_tensor_list[i]`; sizes may differ."""
    def operation(link):
        outgoing, incoming = ([_flat(t) for t in tensors] for tensors in (input_tensor_list, output_tensor_list))
        link.all_to_all(outgoing, incoming)
        for flat, t in zip(incoming, output_tensor_list):
            _unflatten(flat, t)
    lists = {"output_tensor_list": output_tensor_list, "input_tensor_list": input_tensor_list}
    return _call("all_to_all", operation, group, async_op, **lists)


def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
    """Send block i of `input`'s rows to rank i, put what rank i sent into block i of `output`: a transpose over ranks.
    Blocks are equal unless the split sizes (rows per rank) say otherwise. A rank sends all but its own block, once."""
    def operation(link):
        result = _flat(output)
        outgoing = _flat(input).split(_blocks(input, input_split_sizes, link.size))
        incoming = result.split(_blocks(output, output_split_sizes, link.size))
        link.all_to_all(outgoing, incoming)
        _unflatten(result, output)
    sizes = {"output_split_sizes": output_split_sizes, "input_split_sizes": input_split_sizes}
    return _call("all_to_all_single", operation, group, async_op, output=output, input=input, **sizes)


def barrier(group=None, async_op=False):
    """Return when every rank of the group has called it. Round i: tell rank r + 2^i, hear from rank r - 2^i. After
    log2(N) rounds all have heard, indirectly, of all."""
    def operation(link):
        mine, theirs = torch.zeros(2, 1, dtype=torch.uint8, device=link.device)
        distance = 1
        while distance < link.size:
            link.exchange([(mine, (link.rank + distance) % link.size)], [(theirs, (link.rank - distance) % link.size)])
            distance *= 2
        if mine.is_cuda:
            torch.cuda.current_stream().synchronize()  # so far only the stream waits, but a barrier holds up the CPU
    return _call("barrier", operation, group, async_op)


# -------------------------------------------------------------------------------------------------------- start and end

def initialize(device_type, timeout=600):
    """Join the processes torchrun started (or be a world of one without it); returns this rank's torch.device.
    "cpu" takes gloo, "cuda" NCCL with one GPU a local rank. timeout: seconds until a silent peer is an error."""
    gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if device_type == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)
    world = {} if "RANK" in os.environ else {"store": torch_dist.HashStore(), "rank": 0, "world_size": 1}
    for prepare in PREPARE:
        world |= prepare(device_type, timeout) or {}
    init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout), device_id=gpu, **world)
    two_levels(None, [range(get_world_size())])
    return gpu or torch.device("cpu")


def destroy_process_group(group=None):
    """torch.distributed's own, for one group or all; what was kept for it goes, too."""
    for served in [*_links, *_levels] if group is None else [group]:
        for link in set(_links.pop(served, {}).values()):
            link.close()
        _levels.pop(served, None)
    torch_dist.destroy_process_group(group)


# ============================================================ machinery: the same results, faster or safer ============
#
# Faster subclasses of `Link`: `PiecewiseLink` sends rings in pieces, over gloo and NCCL; `NodeLink` serves the GPUs of
# one node. Then the code that starts processes, and `Watch`, which ends a run that hangs. The demo ends the file.

import contextlib
import functools
import gc
import itertools
import json
import mmap
import queue
import re
import select
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future

import kernels

# A ring cuts its chunks into pieces of at most this many bytes, so that it sums one piece while the next is on the
# wire. Pieces are large because every message costs a wake-up or a kernel launch.
PIECE_BYTES = {"gloo": 1 << 24, "nccl": 1 << 30}
# Gloo sends a message only after the receiver has announced its receive. So receives are posted this many messages
# early: 4 processes on 2 cores sum 64 MiB in 74 ms instead of 84, 4 MiB in 5.8 ms instead of 7.7.
RECEIVES_AHEAD = 4
# `Mailboxes` passes messages between processes of one machine through slots of this size. There are several, so that
# the sender fills one while the receiver empties another. To fill one costs a system call, which may wake the receiver.
SLOT_BYTES, SLOTS = 1 << 20, 4
# Up to so many bytes an all-reduce takes recursive doubling. Small messages cost latency, not bytes, so log2(N) rounds
# with the whole tensor beat 2(N-1) steps with an Nth. 4 processes on 2 cores: 256 KiB 0.8 ms against the ring's 2.1,
# 1 MiB 1.8 against 2.9, equal at 4 MiB. NCCL between nodes is not measured: by formula, with 8 us a message and 45 GB/s
# a GPU, both are equal at 4 MiB among 16 ranks. Where a switch joins all ranks, one round is enough: every rank sends
# its whole tensor to every other (4 H200s: 1 MiB 36 us against 40 in two halves, 4 MiB 79 against 60).
DOUBLING_BYTES = {"gloo": 1 << 20, "nccl": 1 << 22, "switched": 1 << 20}
# On NCCL a batch of messages costs the CPU 100 to 300 us to issue, a CUDA graph of the batch 25 us. So an operation
# that is called again on the same memory is replayed from a graph. Its tensors have at most REPLAY_BYTES, because a
# graph keeps its receive buffers. A group keeps at most REPLAYS graphs. (2 H200s, 1 KiB, us, issued | replayed:
# all-reduce 78 | 20, broadcast 82 | 34, gather 176 | 41.)
REPLAY_BYTES, REPLAYS = 1 << 30, 512
# NCCL's messages are kernels, which take multiprocessors from the computation beside them; copy engines take none. So
# beside computation, between GPUs that reach each other's memory, operations over at least WINDOW_FROM bytes are
# copies: a reduce-scatter copies into the receiver's window, an all-gather out of the owner's. On 4 H200s, matrix
# products of 39 ms took 42 while copies exchanged 2.4 GiB in 11 ms, and 45 while NCCL's messages did it in 25 ms (14
# when alone).
WINDOW_FROM, WINDOW_BYTES = 1 << 23, 1 << 27
# If the caller waits, nothing computes beside the operation. Then a kernel does it, from SUM_FROM bytes on. (2 H200s,
# an all-reduce, us, by the kernel | by copies or messages | NCCL's own, the first and last from a CUDA graph: 16 KiB
# 8 | 23 | 11, 1 MiB 12 | 22 | 17, 16 MiB 85 | 156 | 100, 64 MiB 236 | 393 | 267, 1 GiB 3335 | 3760 | 3277.)
SUM_FROM = 1 << 12


# ---------------------------------------------------------------------------------------- the log, progress, lost peers

def traffic_since(before):
    """The traffic since `before = traffic()`: operation name -> Traffic."""
    zero = Traffic()
    return {name: Traffic(t.calls - b.calls, t.messages - b.messages, t.bytes - b.bytes, t.outside - b.outside)
            for name, t in _traffic.items() for b in [before.get(name, zero)] if t != b}


def count_traffic(more, times=1):
    """Add `more` to the log, `times` times. Replayed graphs need it, because a replay runs no Python that counts."""
    for name, t in more.items():
        log = _traffic[name]
        log.calls += times * t.calls
        log.messages += times * t.messages
        log.bytes += times * t.bytes
        log.outside += times * t.outside


_progress = [0, "starting", 0]


def progress(what=None, step=None):
    """[step, what this process does or did last, how often that has changed], after setting what is given."""
    if step is not None:
        _progress[0] = step
    if what is not None:
        _progress[1:] = what, _progress[2] + 1
    return list(_progress)


class PeerError(RuntimeError):
    """A message cannot come, because its sender is gone or was silent for longer than the group's timeout."""


@contextlib.contextmanager
def lost_peer_named(what):
    """If messages inside fail, as they start or in wait(), raise a PeerError that names `what` they were for."""
    try:
        yield
    except RuntimeError as error:
        text = re.sub(r"^\[\S+:\d+\] ", "", str(error)).split(". ")[0]  # without gloo's file name and advice
        raise PeerError(f"{what}: {text}") from None


def tensors_of(arguments):
    """[(argument's name, tensor)] of an operation's arguments, tensors in lists included."""
    return [(name, t) for name, value in arguments.items() for t in (value if isinstance(value, list) else [value])
            if isinstance(t, torch.Tensor)]


class Watched(Link):
    """A Link that reports progress, refuses wrong arguments, and says which operation lost its peer."""
    name, aside = None, False  # the name of the operation under way; whether it runs beside the caller (async_op)

    def run(self, name, operation, arguments, async_op):
        progress(name)
        self.check(name, arguments)
        self.name = name
        self.prepare()
        result = super().run(name, operation, arguments, async_op)
        progress(f"after {name}")
        return result

    def prepare(self):
        """Called on all ranks before each operation, when its arguments have been checked."""

    def check(self, name, arguments):
        """ValueError for wrong arguments, before anything is sent."""
        for argument, t in tensors_of(arguments):
            if t.device.type != self.device:
                raise ValueError(f"{name}: a {self.backend} group takes {self.device.upper()} tensors, "
                                 f"but {argument} is on {t.device}")
        if arguments.get("op", ReduceOp.SUM) not in COMBINE:
            raise ValueError(f"{name}: op {arguments['op']} is not supported: use SUM, AVG, MAX, MIN or PRODUCT")
        if name == "all_to_all_single":
            room, own = (_blocks(arguments[t], arguments[f"{t}_split_sizes"], self.size)[self.rank]
                         for t in ("output", "input"))
            if room != own:  # copy_ would broadcast one element to many, without an error
                raise ValueError(f"{name}: rank {self.rank} sends itself {own} elements, and has room for {room}")
        for argument, own in (("tensor_list", "tensor"), ("input_list", "output"),
                              ("output_tensor_list", "input_tensor_list")):
            if argument in arguments:
                tensors, t = arguments[argument], arguments[own]
                t = t[self.rank] if isinstance(t, list) and len(t) == self.size else t
                if not (isinstance(tensors, list) and isinstance(t, torch.Tensor) and len(tensors) == self.size
                        and tensors[self.rank].numel() == t.numel()):
                    raise ValueError(f"{name}: {argument} must hold {self.size} tensors, one for each rank, and this "
                                     f"rank's must be as large as {own}")
                if len({t.dtype for _, t in tensors_of(arguments)}) > 1:
                    raise ValueError(f"{name}: all tensors must have one dtype")
        for argument, end in ("gather_list", "dst"), ("scatter_list", "src"):
            if argument in arguments:
                root = _tree(self, arguments[end], arguments[f"group_{end}"])[0] is None
                parts, t = arguments[argument] or [], arguments["tensor"]
                if [(part.shape, part.dtype) for part in parts] != [(t.shape, t.dtype)] * self.size * root:
                    raise ValueError(f"{name}: {argument} must hold {self.size} tensors of {tuple(t.shape)} and "
                                     f"{t.dtype} on the root, and none on the other ranks")

    def naming(self):
        return lost_peer_named(f"{self.name} in a group of {self.size}")

    def exchange(self, sends=(), receives=()):
        self.wait(self.post(sends, receives))

    def post(self, sends=(), receives=()):
        with self.naming():
            return super().post(sends, receives)

    def wait(self, handles):
        """Wait for messages. On NCCL the current stream waits, not the CPU."""
        with self.naming():
            for handle in handles:
                handle.wait()

    def close(self):
        if self.backend == "nccl":
            gc.collect()  # NCCL frees a group only when all CUDA graphs of its kernels are gone


class WatchedLibrary(Watched, Library):
    """torch.distributed's own collectives, reporting progress."""


class Pending(Handle):
    """The handle of an operation under way. `wait()` raises the operation's error."""

    def __init__(self, wait, is_completed):
        self.wait, self.is_completed = wait, is_completed


# ------------------------------------------------------------------------------------------------------ rings in pieces

class PiecewiseLink(Watched):
    """Rings in pieces: a rank sums one piece while the next is on the wire, where in `Link` the wire waits for the sum.
    It costs more messages. Up to DOUBLING_BYTES an all-reduce takes recursive doubling."""

    @property
    def doubling_bytes(self):
        """The most bytes of a tensor that an all-reduce sends whole, in few rounds; a larger one goes in chunks."""
        return DOUBLING_BYTES["switched" if isinstance(self, Direct) else self.backend]

    def reduce_scatter(self, chunks, result, op):
        """The ring leaves partial sums in `result`. If that lies in the input, which later steps still read, a buffer
        of K/N elements takes its place."""
        if len({*map(len, chunks)}) > 1:  # a result that is smaller than another chunk cannot hold its partial sums
            super().reduce_scatter(chunks, result, op)
            return
        if self.size == 1:
            result.copy_(chunks[0])
            return
        over_input = result.untyped_storage().data_ptr() in {c.untyped_storage().data_ptr() for c in chunks}
        into = torch.empty_like(result) if over_input else result
        self._ring_reduce_scatter(chunks, [into] * (self.size - 1), op)
        _average(op, into, self.size)
        if over_input:
            result.copy_(into)

    def all_gather(self, chunks):
        pieces, in_flight, ahead = self._pieces(chunks)
        order = [piece for s in range(self.size) for piece in pieces[(self.rank - s) % self.size]]
        count = len(pieces[0])
        self._ring(order[:-count], order[count:], in_flight, ahead)  # step s+1 sends what step s received

    def all_reduce(self, flat, op):
        if flat.nbytes <= self.doubling_bytes or len(flat) < self.size:
            recursive_doubling(self, flat, op)
            return
        chunks = flat.tensor_split(self.size)
        if self.size > 1:
            sums = [chunks[(self.rank - 2 - s) % self.size] for s in range(self.size - 1)]
            self._ring_reduce_scatter(chunks, sums, op)
        _average(op, chunks[self.rank], self.size)
        self.all_gather(chunks)

    def _ring_reduce_scatter(self, chunks, results, op):
        """Sum chunk c over all ranks onto rank c. results[s]: takes the sums of step s; the last one is the answer."""
        pieces, in_flight, ahead = self._pieces(chunks)
        mine = [piece for s in range(self.size - 1) for piece in pieces[(self.rank - 2 - s) % self.size]]
        sums = [piece for result in results for piece in result.tensor_split(len(pieces[0]))]
        # Step s+1 sends what step s summed.
        outgoing = [*pieces[(self.rank - 1) % self.size], *sums[:len(mine) - len(pieces[0])]]
        width = max(piece.numel() for piece in mine)
        slots = self.scratch(chunks[0], width * ahead)
        incoming = [slots[t % ahead * width:][:piece.numel()] for t, piece in enumerate(mine)]
        self._ring(outgoing, incoming, in_flight, ahead, lambda t: COMBINE[op](incoming[t], mine[t], out=sums[t]))

    def _pieces(self, chunks):
        """Cut every chunk into equally many pieces. Returns [[piece, ...] of each chunk], how many sends are in flight
        at once, and how many messages early receives are posted."""
        count = max(1, -(-max(chunk.nbytes for chunk in chunks) // PIECE_BYTES[self.backend]))
        in_flight = min(2, count)
        ahead = in_flight if self.backend == "nccl" else RECEIVES_AHEAD
        return [chunk.tensor_split(count) for chunk in chunks], in_flight, ahead

    def _ring(self, outgoing, incoming, in_flight, ahead, arrived=lambda t: None):
        """Send outgoing[t] right and receive incoming[t] from the left, for every t; then call arrived(t).

        Message t + in_flight is sent after arrived(t), so it may carry what arrived(t) computed. With two in flight,
        one piece is summed while the next is on the wire. Receives are posted `ahead` messages early.
        """
        right, left, total = (self.rank + 1) % self.size, (self.rank - 1) % self.size, len(outgoing)
        handles = defaultdict(list)
        for t in range(-ahead, total):
            if t >= 0:
                self.wait(handles[t])
                arrived(t)
            s, q = t + in_flight, t + ahead
            send, receive = ([(tensors[i], peer)] if 0 <= i < total else []
                             for tensors, i, peer in ((outgoing, s, right), (incoming, q, left)))
            if s == q:  # in one batch, because NCCL runs only the messages of a batch at the same time
                handles[s] = self.post(send, receive)
            else:
                handles[q] += self.post(receives=receive)
                handles[s] += self.post(sends=send)


# ----------------------------------------------------------------------------------------------------------------- gloo

class PartialMessage(Handle):
    """The handle of a message through Mailboxes. rest: its bytes that are not copied yet."""

    def __init__(self, mailboxes, flat):
        self.mailboxes, self.rest = mailboxes, flat.view(torch.uint8)

    def is_completed(self):
        return not len(self.rest)

    def wait(self):
        self.mailboxes.finish(self)

    def cut(self):
        """Take the bytes for the next slot off the front of `rest`."""
        part, self.rest = self.rest[:SLOT_BYTES], self.rest[SLOT_BYTES:]
        return part


class Mailboxes:
    """Messages between processes of one machine through shared memory, which spares them gloo's threads and TCP. A
    message costs a copy into the shared memory and one out of it.

    From each rank to each other there are SLOTS slots in the sender's memory, and a pipe. The sender copies a message,
    or as much of it as a slot holds, into a slot and writes FULL into the pipe. The receiver copies it out and writes
    EMPTY into the pipe back to the sender. It does so with its next FULL, or when half of the slots are empty, because
    every write may wake the sender for nothing. A rank with nothing to copy sleeps until it can read from a pipe. When
    a process dies, the system closes its pipes, so no rank waits for it.
    """
    timeout = 600  # seconds
    FULL, EMPTY = b"F", b"E"

    def __init__(self, link):
        """Make this rank's memory and pipes. `offer` holds the numbers by which the other ranks open them."""
        self.rank, self.size, self.others = link.rank, link.size, [r for r in range(link.size) if r != link.rank]
        fd = os.memfd_create("mailboxes")  # a file in memory alone, which goes with the last process that maps it
        self.own_ends = [os.fdopen(fd, "r+b", 0)]
        os.ftruncate(fd, self.size * SLOTS * SLOT_BYTES)  # only pages that are written take memory
        self.memory, self.read_ends, ends = [self.slots_in(fd)], {}, [0] * self.size
        for r in self.others:
            self.read_ends[r], end = (os.fdopen(end, mode, 0) for end, mode in zip(os.pipe(), ("rb", "wb")))
            self.own_ends.append(end)
            ends[r] = end.fileno()
        secret = int.from_bytes(os.urandom(7), "little")
        self.secret_of(self.memory[0], self.rank).fill_(secret)
        self.offer = [os.getpid(), fd, secret, *ends]

    def slots_in(self, fd):
        """The slots (N, SLOTS, SLOT_BYTES) of a rank, in row r those to rank r."""
        memory = mmap.mmap(fd, self.size * SLOTS * SLOT_BYTES)
        return torch.frombuffer(memory, dtype=torch.uint8).view(self.size, SLOTS, SLOT_BYTES)

    def secret_of(self, slots, r):
        """A number of rank r, in its slots to itself, which nobody uses."""
        return slots[r, 0, :8].view(torch.int64)

    def open(self, offers):
        """Open every other rank's memory and pipe. OSError or ValueError: one cannot be opened."""
        self.write_ends, self.to, self.source = {}, {}, {}
        for r in self.others:
            pid, fd, secret, *ends = offers[r]
            with open(f"/proc/{pid}/fd/{fd}", "r+b", 0) as file:
                self.memory.append(theirs := self.slots_in(file.fileno()))
            if int(self.secret_of(theirs, r)) != secret:
                raise OSError("a process of another container has this number here")
            self.write_ends[r] = open(f"/proc/{pid}/fd/{ends[self.rank]}", "wb", 0)
            self.to[r], self.source[r] = itertools.cycle(self.memory[0][r]), itertools.cycle(theirs[self.rank])
        self.sends, self.receives = ({r: deque() for r in self.others} for _ in range(2))
        self.empty = dict.fromkeys(self.others, SLOTS)  # how many slots to rank r are empty
        # How many slots from rank r are full, and how many are empty but not yet reported to it.
        self.full, self.emptied = dict.fromkeys(self.others, 0), dict.fromkeys(self.others, 0)

    def send(self, flat, peer):
        self.sends[peer].append(message := PartialMessage(self, flat))
        self._copy(peer)
        return message

    def receive(self, flat, peer):
        self.receives[peer].append(message := PartialMessage(self, flat))
        return message

    def finish(self, message):
        """Copy and sleep until this message is through. Other messages are copied, too: if each of two ranks served one
        message alone, both could wait for ever for the other to empty a slot."""
        while True:
            for r in self.others:
                self._copy(r)
            if message.is_completed():
                return
            self._sleep()

    def _copy(self, r):
        """Fill the empty slots to rank r and empty the full ones from it."""
        while self.sends[r] and self.empty[r]:
            part = self.sends[r][0].cut()
            next(self.to[r])[:len(part)].copy_(part)
            self.empty[r] -= 1
            if self.sends[r][0].is_completed():
                self.sends[r].popleft()
            self._write(r, self.FULL)
        while self.receives[r] and self.full[r]:
            part = self.receives[r][0].cut()
            part.copy_(next(self.source[r])[:len(part)])
            self.full[r] -= 1
            self.emptied[r] += 1
            if self.receives[r][0].is_completed():
                self.receives[r].popleft()
            if self.emptied[r] >= SLOTS // 2:
                self._write(r, b"")

    def _write(self, r, what):
        what, self.emptied[r] = what + self.EMPTY * self.emptied[r], 0
        with contextlib.suppress(BrokenPipeError):  # rank r is gone; `_sleep` says so to those who wait for it
            self.write_ends[r].write(what)

    def _sleep(self):
        """Sleep until a rank with which a message is under way writes into its pipe, and count the slots it reports."""
        poll, of = select.poll(), {}
        for r in self.others:
            if self.sends[r] or self.receives[r]:
                of[self.read_ends[r].fileno()] = r
                poll.register(self.read_ends[r], select.POLLIN)
        heard = poll.poll(min(1000 * self.timeout, 2 ** 31 - 1))
        if not heard:
            raise RuntimeError(f"nothing arrived for {self.timeout} s")
        for fd, _ in heard:
            said = os.read(fd, 4096)
            if not said:
                raise RuntimeError(f"Connection closed by rank {of[fd]} of the group")
            self.full[of[fd]] += said.count(self.FULL)
            self.empty[of[fd]] += said.count(self.EMPTY)

    def close(self):
        for file in *self.read_ends.values(), *self.write_ends.values(), *self.own_ends:
            file.close()


def make_mailboxes(link):
    """Mailboxes for this group, or None if its processes cannot open each other's memory. Call it on all ranks."""
    if link.size == 1 or len(set(link.nodes)) > 1 or sys.platform != "linux":
        return None
    boxes, row = None, [0] * (3 + link.size)
    with contextlib.suppress(OSError, AttributeError):  # some builds of Python have no memfd_create
        boxes = Mailboxes(link)
        row = boxes.offer
    # The link's own messages, which are not counted: they keep their order among its operations, whatever thread runs
    # them, and the library's collectives would not.
    link.log, offers = Traffic(), [torch.tensor(row, device="cpu") for _ in range(link.size)]
    Link.all_gather(link, offers)
    opened = torch.zeros(1, dtype=torch.int32, device="cpu")
    if boxes:
        with contextlib.suppress(OSError, ValueError):
            boxes.open([offer.tolist() for offer in offers])
            opened += 1
    recursive_doubling(link, opened, ReduceOp.MIN)
    if not opened:
        return None
    for file in boxes.own_ends:  # else a pipe would stay open here, by this copy of its end, after its sender dies
        file.close()
    return boxes


class GlooLink(PiecewiseLink):
    """Processes on CPUs. Operations with async_op run in a thread beside the caller, first in, first out."""

    def __init__(self, group):
        super().__init__(group)
        self.room = torch.empty(0, dtype=torch.uint8, device="cpu")  # named, because the default device may be a GPU
        self.mailboxes = self._jobs = self._last = None

    def scratch(self, like, count):
        """One buffer serves all operations, one after the other, because a new one costs a page fault every 4 KiB."""
        if self.room.numel() < count * like.element_size():
            self.room = torch.empty(count * like.element_size(), dtype=torch.uint8, device="cpu")
        return self.room[:count * like.element_size()].view(like.dtype)

    def post(self, sends=(), receives=()):
        def send_by_gloo(t, peer):
            return torch_dist.isend(t.view(torch.uint8), None, self.group, TAG, peer)

        def receive_by_gloo(t, peer):
            return irecv(t.view(torch.uint8), None, self.group, TAG, peer)

        boxes = self.mailboxes
        send, receive = (boxes.send, boxes.receive) if boxes else (send_by_gloo, receive_by_gloo)
        with self.naming():
            handles = [receive(t, peer) for t, peer in receives if t.numel()]
            for t, peer in sends:
                if t.numel():
                    self.count(t, peer)
                    handles.append(send(t, peer))
        return handles

    def run(self, name, operation, arguments, async_op):
        if not async_op and (self._last is None or self._last.is_completed()):
            return super().run(name, operation, arguments, False)
        # Queue behind the operations under way, because every rank must run them in the same order.
        self._last = self._enqueue(functools.partial(super().run, name, operation, arguments, False))
        return self._last if async_op else self._last.wait()

    def prepare(self):
        if self.mailboxes is None:
            self.mailboxes = make_mailboxes(self) or False

    def close(self):
        if self._jobs:
            self._jobs.put(None)
            self._worker.join(2)  # a daemon thread that is inside C++ when Python exits would abort the process
        if self.mailboxes:
            self.mailboxes.close()
        super().close()

    def _enqueue(self, body):
        # A daemon thread, not an executor: a process that fails must be able to exit while a receive is still blocked.
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            self._worker = threading.Thread(target=self._work, daemon=True)
            self._worker.start()
        future = Future()
        self._jobs.put((future, body))
        return Pending(future.result, future.done)

    def _work(self):
        for future, body in iter(self._jobs.get, None):
            try:
                future.set_result(body())
            except BaseException as error:  # noqa: BLE001  the caller's thread raises it, in wait()
                future.set_exception(error)
            future = body = None  # else they would keep this operation's tensors until the next one


def scratches():
    """The buffers that gloo groups keep for messages: for receives, and Mailboxes's slots."""
    links = [link for links in _links.values() for link in links.values() if isinstance(link, GlooLink)]
    return [t for link in links for t in (link.room, *(link.mailboxes.memory if link.mailboxes else ()))]


# ------------------------------------------------------------------------------------------------------ recorded graphs

@functools.cache
def _recording_stream(device):
    """One stream for all recordings, because graphs that share a pool can reuse its memory only on one stream."""
    return torch.cuda.Stream(device)


class RecordedGraph:
    """The GPU's work in `body()` as a CUDA graph, so that a replay spares the CPU the launches. Recording runs nothing.
    The cost: a graph works on the addresses of its recording alone, and keeps the memory that it has allocated.

    result: the tensors that body() returned; each replay fills them. sends: a replay's traffic. pool: the memory pool
    of graphs that never run at the same time as this one.
    """

    def __init__(self, body, pool=None):
        before, self.graph, stream = traffic(), torch.cuda.CUDAGraph(), _recording_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # other threads may go on allocating
            try:
                self.result = body()
            finally:
                self.graph.capture_end()
        self.pool, self.sends = self.graph.pool(), traffic_since(before)
        count_traffic(self.sends, -1)  # recording has counted messages that it did not send

    def replay(self):
        self.graph.replay()
        count_traffic(self.sends)


def make_room():
    """Call before recordings that need much memory. It waits for all kernels and gives PyTorch's unused memory back to
    the driver, because graphs have memory of their own, and none can be given back while one is recorded.

    Garbage is collected first, because recomputation leaves cycles, and the autograd nodes in them would bring their
    stream into a recording.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def memory_given_back():
    """How often PyTorch has given memory back to the driver. A graph replays raw addresses: if the memory that its
    copies between GPUs were recorded on was freed and reused, they crash."""
    return torch.cuda.memory_stats_as_nested_dict()["num_device_free"]


class Replays:
    """Replays a group's operations from CUDA graphs, because to issue their messages costs the CPU longer than a replay
    (REPLAY_BYTES has the figures). Each graph keeps its receive buffers.

    The third call on the same memory records a graph and replays it. The first two calls connect the ranks, and show
    that the same addresses recur, as those of buckets do.
    """

    def __init__(self):
        self.calls, self.graphs = {}, {}  # key of an operation -> how often it ran, or its graph
        self.copies = False  # whether the operation under way copies between GPUs

    def run(self, key, body):
        """Run or replay body(). key: (operation, whether it runs beside the caller, ..., the memory that it uses)."""
        if torch.cuda.is_current_stream_capturing():  # the caller records a larger graph, which takes this in
            body()
            return
        graph = self.graphs.get(key)
        if graph and graph.memory is not None and graph.memory != memory_given_back():  # a slow call, so it comes last
            del self.graphs[key]
        if self.calls.get(key) == 2:
            del self.calls[key]
            self._record(key, body)
        if key in self.graphs:
            self.graphs[key].replay()
            return
        body()
        if len(self.calls) + len(self.graphs) >= REPLAYS and key not in self.calls:
            self.calls.clear()  # forget operations that have not come a third time
        if key in self.calls or len(self.graphs) < REPLAYS:
            self.calls[key] = self.calls.get(key, 0) + 1

    def _record(self, key, body):
        # Graphs of a stream run one after the other, and a graph's memory is free again at its end, so they share a
        # pool. It is taken from a graph that still exists, because a pool whose last graph is gone takes no other.
        pool = next((graph.pool for other, graph in self.graphs.items() if other[1] == key[1]), None)
        self.copies = False
        self.graphs[key] = RecordedGraph(body, pool)
        self.graphs[key].memory = memory_given_back() if self.copies else None


# ----------------------------------------------------------------------------------------------------------------- NCCL

# Operations that are replayed. All-to-alls are not, because experts send other numbers of tokens in each step.
REPLAYED = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast", "reduce", "gather", "scatter")


class NcclLink(PiecewiseLink):
    """GPUs of several nodes. With async_op operations run on a side stream; REPLAYED ones are recorded."""

    def __init__(self, group):
        super().__init__(group)
        self.replays, self._stream = Replays(), None

    def run(self, name, operation, arguments, async_op):
        self.aside, tensors = async_op, [t for _, t in tensors_of(arguments)]
        if name in REPLAYED and self.size > 1 and 0 < max(t.nbytes for t in tensors) <= REPLAY_BYTES:
            memory = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]
            how = [value for value in arguments.values() if not isinstance(value, (torch.Tensor, list))]  # op, src, ...
            key, body = (name, self.aside, *how, *memory), functools.partial(operation, self)
            operation = lambda link: link.replays.run(key, body)  # noqa: E731
        if not async_op:
            return super().run(name, operation, arguments, False)
        # A side stream waits for the work that the caller has queued so far, and for none that it queues later. Its
        # priority is high, because its barriers would else wait for the end of a kernel that fills the GPU.
        self._stream = self._stream or torch.cuda.Stream(priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            super().run(name, operation, arguments, False)
            done = self._stream.record_event()
        if torch.cuda.is_current_stream_capturing():
            # The handle keeps the tensors, because a recording could not reuse their memory after record_stream.
            return Pending(lambda kept=tensors: torch.cuda.current_stream().wait_event(done), done.query)
        for t in tensors:
            t.record_stream(self._stream)  # the allocator must not reuse their memory before the side stream is done
        return Pending(lambda: torch.cuda.current_stream().wait_event(done), done.query)

    def close(self):
        self.replays = Replays()
        super().close()


# ----------------------------------------------------------------------------------------------------- GPUs of one node

FREE, ARRIVED = 1, 2  # channels of the signals between two ranks; barriers use channel 0


class Window:
    """Memory on each GPU that all GPUs of the group read and write, so that copy engines can carry messages and take no
    multiprocessor from the computation. It costs its size on every GPU, and barriers in most operations.

    A message is a copy, or an access of a kernel. Copies and barriers are work of a stream, like kernels: bytes that
    were copied before a barrier have arrived after it, on every rank. When an operation ends, no rank accesses another
    rank's window any more.
    """
    made = 0  # windows that this process has made
    timeout = 600

    def __init__(self, link, mine):
        import torch.distributed._symmetric_memory as symmetric_memory
        self.link, self.mine = link, mine
        self.handle = symmetric_memory.rendezvous(mine, link.group)
        self.of = [self.handle.get_buffer(r, mine.shape, torch.uint8) for r in range(link.size)]
        self.others = [(link.rank + i) % link.size for i in range(1, link.size)]  # no two ranks begin with the same one
        self.floats = mine[:4].view(torch.float32)  # a tensor that kernels.on_triton can be asked about
        self.make_kernels(mine.device)

    def make_kernels(self, device):
        places, behind = [window.data_ptr() for window in self.of], kernels.all_to_all_bytes(self.link.size)
        self.kernel = kernels.AllToAll(places, self.link.rank, device)
        self.sums = kernels.AllReduce([place + behind for place in places], self.link.rank, device)

    def copy(self, to, source):
        """Copy by a copy engine. A graph that has recorded it crashes once that memory is freed (memory_given_back)."""
        self.link.replays.copies = True
        to.copy_(source)

    def barrier(self):
        # This barrier kills the process silently when it times out, so Watch must time out earlier.
        self.handle.barrier(timeout_ms=1000 * (self.timeout + 60))

    def open(self, flat):
        """Copy `flat` where all ranks can read and write it until the next barrier. Returns every rank's tensor."""
        _copy(self, self.mine[:flat.nbytes].view(flat.dtype), flat)
        self.barrier()
        return [window[:flat.nbytes].view(flat.dtype) for window in self.of]

    def scatter(self, parts):
        """Write parts[r] into rank r's window. Returns the N parts (n) for this rank, its own included."""
        self.barrier()  # all ranks have finished reading their window's old contents
        for r in self.others:
            start = self.link.rank * parts[r].nbytes
            self.copy(self.of[r][start:start + parts[r].nbytes], parts[r].view(torch.uint8))
            self.link.log.count(parts[r])
        self.barrier()
        own = parts[self.link.rank]
        rows = [*self.mine[:self.link.size * own.nbytes].view(own.dtype).view(self.link.size, len(own))]
        rows[self.link.rank] = own
        return rows

    def gather(self, parts):
        """Copy parts[r] out of rank r's window, for every other r."""
        self.open(parts[self.link.rank])
        for r in self.others:
            self.copy(parts[r].view(torch.uint8), self.of[r][:parts[r].nbytes])
            self.link.log.count(parts[self.link.rank])
        self.barrier()

    def all_reduce(self, parts, op):
        """`scatter` the parts, sum them, and `gather` the sums. A rank writes its sum into its window, behind the N
        parts, and the others fetch it there."""
        def place(r):
            return self.of[r][len(parts) * parts[r].nbytes:][:parts[r].nbytes].view(parts[r].dtype)

        own = parts[self.link.rank]
        _sum_rows(self.scatter(parts), [own, place(self.link.rank)], op)
        self.barrier()
        for r in self.others:
            self.copy(parts[r], place(r))
            self.link.log.count(own)
        self.barrier()

    def gather_rows(self, whole, own):
        """Copy `own` (B, ...) of rank r to whole[r], for every r. `whole` (N, B, ...) may have gaps between rows."""
        tensors = self.open(own.view(-1))
        whole[self.link.rank].copy_(own)
        for r in self.others:
            for place, row in zip(whole[r], tensors[r].view(own.shape)):
                self.copy(place, row)
            self.link.log.count(own)
        self.barrier()

    def reduce_scatter_rows(self, whole, own, op):
        """Back: combine whole[r] of all ranks into `own` of rank r."""
        for parts, result in zip(zip(*self.scatter_rows(whole)), own):
            _sum_rows([part.view(-1) for part in parts], [result.view(-1)], op)

    def scatter_rows(self, parts):
        """`scatter` of parts (N, B, ...), with or without gaps between rows. Returns [(B, ...) from each rank]."""
        def of_rank(window, r):
            return window[r * own.nbytes:(r + 1) * own.nbytes].view(own.dtype).view(own.shape)

        own = parts[self.link.rank]
        self.barrier()
        for r in self.others:
            for place, row in zip(of_rank(self.of[r], self.link.rank), parts[r]):
                self.copy(place, row)
            self.link.log.count(own)
        self.barrier()
        return [own if r == self.link.rank else of_rank(self.mine, r) for r in range(len(parts))]

    def shift(self, outgoing, incoming):
        """Send `outgoing` to the right rank: each rank copies its `incoming` out of the left rank's window."""
        self.copy(incoming, self.open(outgoing)[self.link.rank - 1])
        self.link.log.count(outgoing)
        self.barrier()

    def all_to_all(self, outgoing, incoming):
        """Send outgoing[r] to every rank r, and put what rank r sends into incoming[r]; each is (address, bytes).

        One kernel does it without barriers. Every two ranks count what has arrived between them and what was taken, so
        no rank needs the sizes of other pairs, and a message larger than the window goes through it in pieces. The
        kernel takes multiprocessors, as copies would not, but a rank that exchanges tokens has nothing else to compute.
        (2 H200s, us, ours | NCCL: 1 KiB to 4 MiB 19 | 23, 16 MiB 35 | 54, 64 MiB 113 | 139, 1 GiB 1605 | 1627.)
        """
        self.kernel(outgoing, incoming)
        for r in self.others:
            if outgoing[r][1]:
                self.link.log.messages += 1
                self.link.log.bytes += outgoing[r][1]

    def all_to_all_by_copies(self, outgoing, incoming):
        """An all-to-all of flat tensors by copy engines, without my own block. Each sender has a slot in the receiver's
        window, and signals ARRIVED when it has filled the slot. A block larger than the slot takes several turns, for
        which the receiver signals FREE when it has copied the slot out."""
        slot, patience = len(self.mine) // self.link.size // 16 * 16, 1000 * (self.timeout + 60)
        outgoing, incoming = ([t.view(torch.uint8) for t in tensors] for tensors in (outgoing, incoming))
        self.barrier()  # all ranks have finished reading their window's old contents
        for start in range(0, max(len(t) for r in self.others for t in (outgoing[r], incoming[r])), slot):
            parts, into = ([t[start:start + slot] for t in tensors] for tensors in (outgoing, incoming))
            for r in self.others:
                if len(parts[r]):
                    if start:
                        self.handle.wait_signal(r, FREE, patience)
                    self.copy(self.of[r][self.link.rank * slot:][:len(parts[r])], parts[r])
                    self.handle.put_signal(r, ARRIVED, patience)
                    self.link.log.count(parts[r])
            for r in self.others:
                if len(into[r]):
                    self.handle.wait_signal(r, ARRIVED, patience)
                    self.copy(into[r], self.mine[r * slot:][:len(into[r])])
                    if start + slot < len(incoming[r]):
                        self.handle.put_signal(r, FREE, patience)


def make_window(link, nbytes):
    """A Window for this group. Call it on all ranks; all get None if any GPU cannot reach another or has no room.

    They also get None if they have made different numbers of windows, as the ranks of a pipeline's first and last stage
    have, which share one for the tied embedding. PyTorch (up to 2.13 at least) lets ranks meet under the number of
    windows that each has made, so ranks with different numbers would wait for each other for ever.
    """
    def agreed(*numbers):
        numbers = torch.tensor(numbers, dtype=torch.int64, device="cuda")
        torch_dist.all_reduce(numbers, ReduceOp.MIN, link.group)
        return numbers.tolist()

    import torch.distributed._symmetric_memory as symmetric_memory
    gpus = [rank % processes_of_a_node(get_world_size())
            for rank in torch_dist.get_process_group_ranks(link.group)]
    mine = window = None
    with contextlib.suppress(RuntimeError):
        if all(a == b or torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus):
            mine = symmetric_memory.empty(nbytes, dtype=torch.uint8, device="cuda").zero_()  # counters start from 0
    ready, fewest, most = agreed(mine is not None, Window.made, -Window.made)
    if not ready or fewest != -most:
        return None
    Window.made += 1
    with contextlib.suppress(RuntimeError):  # some containers forbid processes to share memory
        window = Window(link, mine)
    return window if agreed(window is not None)[0] else None


def _in_step(chunks, nbytes):
    """For each turn, [the part of each chunk], at most `nbytes` each. All ranks take equally many turns, so that their
    barriers match; some parts are empty."""
    n = nbytes // chunks[0].itemsize
    return ([chunk[start:start + n] for chunk in chunks] for start in range(0, max(map(len, chunks)), n))


KERNEL_OPS = {ReduceOp.SUM: "sum", ReduceOp.AVG: "avg", ReduceOp.MAX: "max"}


def _kernel_sums(tensor):
    """Whether kernels.py sums tensors like this one."""
    return tensor.is_cuda and tensor.dtype in (*kernels.DTYPES, torch.float64) and (
        kernels.on_triton(tensor.new_empty(0, dtype=torch.float32)))  # as float32, because sum_rows takes float64, too


def _copy(window, to, source):
    """Copy within a GPU's memory, by a kernel where there is one: a graph that has recorded the kernel works on any
    memory at that address, and one that has recorded a copy engine does not."""
    if _kernel_sums(source):
        kernels.sum_rows([source], [to], False)
    else:
        window.copy(to, source)


def _sum_rows(rows, results, op):
    """Combine `rows`, N tensors (n), into each of `results`. 16-bit rows are summed in float32."""
    if op in (ReduceOp.SUM, ReduceOp.AVG) and _kernel_sums(rows[0]):
        kernels.sum_rows(rows, results, op == ReduceOp.AVG)
        return
    half = rows[0].is_floating_point() and rows[0].itemsize == 2
    total = functools.reduce(COMBINE[op], rows[1:], rows[0].float() if half else rows[0])
    _average(op, total, len(rows))
    for result in results:
        result.copy_(total)


class Direct:
    """Algorithms for ranks of which a switch joins every two at full speed, so that no rank need pass chunks on.

    Rank r sends chunk c straight to rank c, for all c at once, and sums the chunks that it receives. This sends the
    ring's bytes in one round instead of N-1 steps, and sums N rows at once, in float32 if they have 16 bits. It costs
    room for N chunks. Between nodes the ring is better, because there one rank of a node sends out of it, not all.
    Large chunks go through windows: they are summed where others wrote them, and gathered from their owners' windows.
    If the caller waits, one kernel does all-reduces, all-to-alls, and the two operations of NTHS.
    """

    def window(self, nbytes):
        """None, because this class shares no memory; `NodeLink` does."""
        return None

    def sums_from(self):
        """From so many bytes on, a kernel does all-reduces that the caller waits for. Call on all ranks."""
        self.aside = False
        return SUM_FROM if self.kernel_window() else 1 << 62

    def kernel_window(self):
        """The window of the kernels, or None if the caller does not wait, or kernels or windows cannot be had."""
        # The kernels take other dtypes, too, but on_triton knows those of layers.
        able = not self.aside and kernels.on_triton(torch.empty(0, dtype=torch.float32, device=self.device))
        return self.window(kernels.window_bytes(self.size)) if able else None

    def kernel_for(self, flat, op=None):
        """The kernels.AllReduce to combine `flat` by op, or without one to gather it. None if there is none."""
        able = op is None or kernels.AllReduce.combines(flat.dtype, KERNEL_OPS.get(op))
        able = able and SUM_FROM <= flat.nbytes < 1 << 31  # the kernel counts elements, or bytes, in 32 bits
        window = self.kernel_window() if able else None
        return window and window.sums

    def all_reduce(self, flat, op):
        chunks = flat.tensor_split(self.size)
        if kernel := self.kernel_for(flat, op):
            kernel.all_reduce(flat, KERNEL_OPS[op])
            self._note_sent(flat, chunks, [chunks[self.rank]] * self.size)
        elif flat.nbytes <= self.doubling_bytes:  # one round: every rank gets all rows, and sums them in the same order
            self.reduce_scatter([flat] * self.size, flat, op)
        elif WINDOW_FROM <= flat.nbytes and chunks[0].nbytes * (self.size + 1) <= WINDOW_BYTES and (
                window := self.window(WINDOW_BYTES)):
            window.all_reduce(chunks, op)
        else:  # two halves, (N-1)/N K sent in each
            self.reduce_scatter(chunks, chunks[self.rank], op)
            self.all_gather(chunks)

    def _note_sent(self, written, *outgoing):
        """Count what a kernel has sent to each other rank, and that it wrote to a tensor. outgoing: lists (N)."""
        torch.autograd.graph.increment_version(written)
        for tensors in outgoing:
            for r in range(self.size):
                if r != self.rank:
                    self.log.count(tensors[r])

    def window_for_copies(self, chunks):
        """The window through which copies do an operation on N chunks, or None if messages are faster."""
        return self.window(WINDOW_BYTES) if sum(chunk.nbytes for chunk in chunks) >= WINDOW_FROM else None

    def reduce_scatter(self, chunks, result, op):
        if window := self.window_for_copies(chunks):
            for *parts, into in _in_step([*chunks, result], WINDOW_BYTES // self.size // 16 * 16):
                _sum_rows(window.scatter(parts), [into], op)
            return
        own = chunks[self.rank]
        rows = [*self.scratch(own, self.size * own.numel()).view(self.size, -1)]
        rows[self.rank] = own
        self._swap(chunks, rows)
        _sum_rows(rows, [result], op)

    def all_gather(self, chunks):
        if window := self.window_for_copies(chunks):
            for parts in _in_step(chunks, WINDOW_BYTES):
                window.gather(parts)
        else:
            self._swap([chunks[self.rank]] * self.size, chunks)

    def exchange_nths(self, operation, whole, own, op):
        """Gather `own` (B, ...) into `whole` (N, B, ...) or, with an op, reduce-scatter `whole` into `own`, without
        copies within a GPU. operation: does it with such copies, where neither kernel nor window can."""
        gaps, itemsize = whole.dim() > 1 and not whole.is_contiguous() and whole[0].shape == own.shape, whole.itemsize
        row, flat = (own[0].numel(), whole.transpose(0, 1)) if gaps else (0, whole)
        alike = own.is_contiguous() and flat.is_contiguous() and own.dtype == whole.dtype and (
            whole.numel() == self.size * own.numel())
        kernel = self.kernel_for(flat := flat.reshape(-1), op) if alike else None
        if kernel and (not row or kernel.takes_rows(row * itemsize)):
            if op is None:
                kernel.all_gather(flat, own.view(-1), row)
                self._note_sent(whole, [own] * self.size)
            else:
                kernel.reduce_scatter(flat, own.view(-1), KERNEL_OPS[op], row)
                self._note_sent(own, [own] * self.size)
        elif alike and ROW_BYTES <= row * itemsize <= WINDOW_BYTES // self.size and row and (
                window := self.window(WINDOW_BYTES)):
            rows = WINDOW_BYTES // (self.size * row * itemsize)
            for many, few in zip(whole.split(rows, 1), own.split(rows)):
                window.gather_rows(many, few) if op is None else window.reduce_scatter_rows(many, few, op)
        else:
            operation(self)

    def shift(self, outgoing, incoming):
        """Send a flat tensor to the right rank and receive the left rank's. Between GPUs copy engines do it, because
        they take no multiprocessor from the computation beside them."""
        if window := self.window(WINDOW_BYTES):
            for out, into in _in_step([outgoing, incoming], WINDOW_BYTES):
                window.shift(out, into)
        else:
            self.exchange([(outgoing, (self.rank + 1) % self.size)], [(incoming, (self.rank - 1) % self.size)])

    def all_to_all(self, outgoing, incoming):
        if self.aside and WINDOW_BYTES and (window := self.window(WINDOW_BYTES)):
            incoming[self.rank].copy_(outgoing[self.rank])
            window.all_to_all_by_copies(outgoing, incoming)
            return
        if not self._by_one_kernel(outgoing, incoming, own=True):
            incoming[self.rank].copy_(outgoing[self.rank])
            self._swap(outgoing, incoming)

    def _by_one_kernel(self, outgoing, incoming, own):
        """Do an all-to-all by one kernel, with my own block if `own`. Returns False, and does nothing, if the caller
        does not wait, or the kernel or a window cannot be had."""
        window = self.kernel_window()
        if window:
            window.all_to_all(*([(t.data_ptr(), t.nbytes * (own or r != self.rank)) for r, t in enumerate(tensors)]
                                for tensors in (outgoing, incoming)))
            torch.autograd.graph.increment_version(incoming)
        return bool(window)

    def _swap(self, outgoing, incoming):
        """An all-to-all without my own block, by one kernel or by messages that are all sent at once."""
        if not self._by_one_kernel(outgoing, incoming, own=False):
            others = [r for r in range(self.size) if r != self.rank]
            self.exchange([(outgoing[r], r) for r in others], [(incoming[r], r) for r in others])


# Rows with gaps between them are copied one by one if each has at least so many bytes, because a copy costs some us.
# (2 H200s: with 32 rows of 1 MiB a step of GPT-2 medium took 137 ms, with 4 rows of 4 MiB 12 x 4096 blocks took 59 ms;
# the same without --sp 107 and 58 ms.)
ROW_BYTES = 1 << 22


def takes_rows(nbytes, group, waits=True):
    """Whether this group gathers (B, ...) into an (N, B, ...) that is not contiguous, and reduce-scatters back, in
    place. nbytes: of one (...). waits: for a call without async_op. Call on all ranks."""
    link = link_of(group)
    if not isinstance(link, NodeLink):
        return False
    link.aside = not waits
    window = link.kernel_window()
    return bool(window and window.sums.takes_rows(nbytes)) or nbytes >= ROW_BYTES


NTHS = {"all_gather_into_tensor": ("output_tensor", "input_tensor"), "reduce_scatter_tensor": ("input", "output")}


class NodeLink(Direct, NcclLink):
    """GPUs of one node. It assumes that a switch joins them."""

    def __init__(self, group):
        super().__init__(group)
        self._windows, self._waited_all_to_all = {}, (kernels.window_bytes(self.size), False)

    def run(self, name, operation, arguments, async_op):
        if name == "all_to_all_single" and not async_op and self._all_to_all_at_once(**arguments):
            return None
        if name in NTHS:
            whole, own = (arguments[key] for key in NTHS[name])
            operation = functools.partial(Direct.exchange_nths, operation=operation, whole=whole, own=own,
                                          op=arguments.get("op"))
        return super().run(name, operation, arguments, async_op)

    def window_for_copies(self, chunks):
        self.replays.copies |= sum(chunk.nbytes for chunk in chunks) >= WINDOW_FROM  # it copies at least its own part
        return super().window_for_copies(chunks)

    def window(self, nbytes):
        """The Window of `nbytes` for the operation under way, or None if it must use messages. Operations beside the
        caller have a window of their own, because two operations at a time would overwrite each other's bytes."""
        key = nbytes, self.aside
        if self.size == 1:
            return None
        if key not in self._windows and not torch.cuda.is_current_stream_capturing():
            self._windows[key] = make_window(self, nbytes)  # all ranks make it together, which cannot be recorded
        return self._windows.get(key)

    def _all_to_all_at_once(self, output, input, output_split_sizes, input_split_sizes):
        """Without `run`, do an all-to-all that the caller waits for, by the addresses of blocks in contiguous tensors.
        `run`, which makes a view of each block, costs the CPU 80 us a call instead of 19. That is more than the kernel
        takes up to 16 MiB, and experts call it five times a block. Returns False if `run` must do it."""
        window = self._windows.get(self._waited_all_to_all)
        if not (window and input.is_contiguous() and output.is_contiguous() and input.is_cuda and output.is_cuda
                and input.dtype == output.dtype and kernels.on_triton(window.floats)):
            return False
        progress("all_to_all_single")
        self.log = _traffic["all_to_all_single"]
        self.log.calls += 1
        places = []
        for tensor, sizes in (input, input_split_sizes), (output, output_split_sizes):
            at, width = tensor.data_ptr(), tensor.itemsize
            places.append(blocks := [])
            for elements in _blocks(tensor, sizes, self.size):
                blocks.append((at, elements * width))
                at += elements * width
        window.all_to_all(*places)
        torch.autograd.graph.increment_version(output)
        progress("after all_to_all_single")
        return True

    def close(self):
        self._windows.clear()
        super().close()


class WatchedLevels(TwoLevels, Watched):
    """`TwoLevels` that tells both its links which operation is under way, for their error messages and windows."""

    def levels(self):
        for link in self.inside, self.between:
            link.name, link.aside = self.name, self.aside
        return super().levels()


class TwoLevelGlooLink(WatchedLevels, GlooLink):
    """Processes on the CPUs of several nodes."""


class TwoLevelNcclLink(WatchedLevels, NcclLink):
    """GPUs of several nodes: copies and windows inside, rings between."""

    def levels(self):
        self.inside.replays = self.between.replays = self.replays  # one recording holds the work of all three links
        return super().levels()


def gloo_link(group):
    return TwoLevelGlooLink(group) if group in _levels else GlooLink(group)


def nccl_link(group):
    nodes = {node_of(rank) for rank in torch_dist.get_process_group_ranks(group)}
    return NodeLink(group) if len(nodes) == 1 else TwoLevelNcclLink(group) if group in _levels else NcclLink(group)


LINKS.update(gloo=gloo_link, nccl=nccl_link, ring=Watched, torch=WatchedLibrary)


# --------------------------------------------------------------------------------------------------- starting processes

def start_again(processes, saved=lambda: True):
    """Run this command line again as `torchrun --nproc_per_node processes` would, in this process's place, and exit.

    SIGTERM goes on to the ranks, which have 30 s to save and end; then the exit code is 0 if `saved()` says so. A rank
    without an error must return or call sys.exit(0), because the launcher waits for the result of a forked one.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    end_with_launcher()
    for name in list(os.environ):  # an outer torchrun set these, for a world of one
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") or (
                name.startswith(("GROUP_", "ROLE_", "TORCHELASTIC_"))):
            del os.environ[name]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    here = ["--standalone", "--local-addr", "127.0.0.1"]  # else ranks look up a machine name that may not resolve
    if may_fork():
        # Ranks are forked from this process, because a new process would spend four seconds on importing PyTorch.
        from torch import _dynamo  # noqa: F401  optimizers need it: import it once, before the fork
        os.register_at_fork(after_in_child=forked)
        here += ["--run-path", "--start-method", "fork"]
        sys.argv[0] = os.path.abspath(sys.argv[0])
    try:
        run.run(run.parse_args([*here, "--nproc_per_node", str(processes), *sys.argv]))
    except ChildFailedError as error:  # the rank itself has said what happened
        rank, failure = error.get_first_failure()
        sys.exit(f"rank {rank} ended with exit code {failure.exitcode}; all others were stopped")
    except (SignalException, KeyboardInterrupt) as stop:
        if getattr(stop, "sigval", None) == signal.SIGTERM:
            sys.exit(0 if saved() else 1)
        sys.exit(130)
    sys.exit(0)


def threads():
    """The number of threads of this process on Linux; 0 elsewhere."""
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0


_imported = threads()


def may_fork():
    """Whether ranks can be forked from this process. They cannot if it has started threads since the imports, as the
    first large tensor does on several cores, because a fork copies no threads and PyTorch would wait for them for ever.
    They cannot if there are GPUs, because CUDA does not survive a fork."""
    return 0 < threads() == _imported and not torch.cuda.is_available()


_forked = False


def is_forked():
    """Whether this process is a rank that `start_again` has forked. Its launcher waits for it to return."""
    return _forked


def forked():
    """Undo in a forked rank what belongs to its launcher: signal handlers, and a thread for each core."""
    global _forked
    _forked = True
    for name in signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT:
        signal.signal(name, signal.SIG_DFL)
    if os.environ["OMP_NUM_THREADS"].isdigit():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def end_after_sigterm():
    """Call it when all is saved. After SIGTERM the launcher no longer reads the result for which a forked rank waits
    at its end, and would kill it after 30 s. So it ends by itself."""
    if _forked:
        signal.alarm(3)


def end_with_launcher(device_type=None, timeout=None):
    """Let the system kill this process when the one that started it dies, by SIGKILL too, so that no orphan stays."""
    if sys.platform == "linux" and "RANK" in os.environ:
        import ctypes
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; at SIGTERM a rank would save and exit with 0


def settle(device_type, timeout):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank, even inside a receive, and without a traceback
    Window.timeout = Mailboxes.timeout = timeout
    c10d = torch_dist.distributed_c10d  # new groups get these, and not the timeout of init_process_group
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timedelta(seconds=timeout)
    if device_type == "cuda":
        # Pipelines send to one peer a group, so this warning means nothing.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        # Graphs outlive the memory that they were recorded on, so NCCL must not register that memory.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if sys.platform == "linux" and os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        # Ranks of one node meet on the loopback interface, because gloo would look up this machine's name, which may
        # not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def own_store(device_type, timeout):
    """On several nodes torchrun keeps its store over restarts, and the addresses of the processes that died are still
    in it (pytorch #135712). So rank 0 opens a new store for each start and writes its port into the old one. Returns
    arguments for init_process_group that name the new store, or None where the old one will do."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        return None
    rank, size, host = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
    deadline, limit = time.monotonic() + timeout, timedelta(seconds=timeout)
    old = torch_dist.TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    store = None
    if rank == 0:
        store = torch_dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        old.set("new store", str(store.port))
    while store is None:
        port = int(old.get("new store"))
        try:  # if no one listens, the port is of an earlier start; this start's rank 0 will soon write its own
            socket.create_connection((host, port), 2).close()
            store = torch_dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        except OSError:
            if time.monotonic() > deadline:
                raise PeerError(f"rank 0 opened no store on {host} within {timeout} s") from None
            time.sleep(0.1)
    return {"store": store, "rank": rank, "world_size": size}


PREPARE.extend([end_with_launcher, settle, own_store])


# ---------------------------------------------------------------------------------- a watch for hung runs, and the demo

class Watch:
    """Ends a run that hangs, and says which rank is to blame. A thread of each rank writes a sign of life into the
    store that torchrun keeps, every 0.2 s, and ends the process after `timeout` seconds without progress.

        watch = Watch("train.py", timeout); initialize(...); watch.start()
        except Exception as error: watch.give_up(error)

    A sign is `progress()`. A rank that gives up reads the last signs of the others and names those that are silent
    (killed, stopped, cut off); if all are alive, it says what each of them is doing.
    """

    def __init__(self, name, timeout):
        self.name, self.timeout, self.pause = name, timeout, min(0.2, timeout / 10)
        self.store, self.beats, self.ending, self.ended, self.done = None, 0, threading.Lock(), False, False

    def start(self):
        """Call after `initialize`."""
        if get_world_size() > 1:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            # A connection of its own, because the group's may be blocked.
            self.store = torch_dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
            threading.Thread(target=self._live, daemon=True).start()

    def stop(self):
        self.done = True

    def _sign(self, end=None):
        self.beats += 1
        self.store.set(f"watch/{get_rank()}", json.dumps([self.beats, end, *progress()]))

    def _live(self):
        seen, since = None, 0.0
        while not self.done:
            with contextlib.suppress(torch_dist.DistError):  # the store may have gone with its node
                if not self.ended:
                    self._sign()
            now = progress()
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self.timeout and not self.ending.locked():
                threading.Thread(target=self.give_up, args=(f"no progress for {self.timeout} s",), daemon=True).start()
            time.sleep(self.pause)

    def _others(self):
        """In words: which other ranks are silent; if none is, which have failed; if none has, what each is doing."""
        def signs():
            keys = [f"watch/{r}" for r in range(get_world_size())]
            return [json.loads(self.store.get(key)) if self.store.check([key]) else None for key in keys]
        before = signs()
        time.sleep(4 * self.pause)
        others = [(r, old, new) for r, (old, new) in enumerate(zip(before, signs())) if r != get_rank()]
        silent = [f"rank {r} gives no sign of life" + (f" since step {new[2]}, {new[3]}" if new else "")
                  for r, old, new in others if new is None or new[1] is None and new[0] == old[0]]
        failed = [f"rank {r} failed in step {new[2]}, {new[3]}: {new[1]}" for r, _, new in others if new and new[1]]
        return "; ".join(silent or failed or [f"rank {r}: step {new[2]}, {new[3]}" for r, _, new in others][:8])

    def give_up(self, error):
        """Print this rank, its step and operation, the error, and the state of the other ranks; end the process."""
        if not self.ending.acquire(blocking=False):
            time.sleep(60)  # the other thread is about to end this process
        step, what, _ = progress()
        others = ""
        if self.store:
            with contextlib.suppress(torch_dist.DistError):
                lost = isinstance(error, (str, PeerError, torch_dist.DistError))
                others = f"; {self._others()}" if lost else ""
                self.ended = True
                self._sign("" if lost else f"{type(error).__name__}: {error}")
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        # In one piece, because all ranks write at once.
        sys.stderr.write(f"{self.name}: {rank}step {step}, {what}: {error}{others}\n")
        sys.stderr.flush()
        os._exit(1)


def print_in_order(text):
    """Print one text of each rank, in rank order, on rank 0."""
    texts = [None] * get_world_size() if get_rank() == 0 else None
    torch_dist.gather_object(text, texts)
    for line in texts or ():
        print(line, flush=True)


def ring_states(device="cpu"):
    """This rank's tensor, as a list with a number for each chunk, before and after each step of a ring all-reduce. Rank
    r starts from 1 << r, so a sum has a bit for each rank whose data is in it. Call on all ranks."""
    size, states = get_world_size(), []
    t = torch.full((size,), 1 << get_rank(), device=device)

    class Looking(Link):
        def exchange(self, sends=(), receives=()):
            states.append(t.tolist())
            super().exchange(sends, receives)

    Looking(torch_dist.group.WORLD).all_reduce(t, ReduceOp.SUM)
    return [*states, t.tolist()]


def _demo(device):
    rank, size = get_rank(), get_world_size()

    def say(text):
        if rank == 0:
            print(text)

    def show(title, call, **tensors):
        def values():
            return "  ".join(f"{name} {t.tolist() if isinstance(t, torch.Tensor) else [x.tolist() for x in t]}"
                             for name, t in tensors.items() if t is not None)
        before = values()
        call()
        say(f"\n{title}")
        print_in_order(f"  rank {rank}   {before}   ->   {values()}")

    def row(*numbers):
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    t = row(1, 2, 3) if rank == 0 else row(0, 0, 0)
    show("broadcast: one to all", lambda: broadcast(t, src=0), t=t)
    t, parts = row(0), [row(10 * i) for i in range(size)] if rank == 0 else None
    show("scatter: one sends each its part", lambda: scatter(t, parts, src=0), parts=parts, t=t)
    t, parts = row(10 + rank), [row(0) for i in range(size)] if rank == 0 else None
    show("gather: scatter backwards", lambda: gather(t, parts, dst=0), t=t, parts=parts)
    t = row(rank, 10 * rank)
    show("reduce: gather, combining on the way", lambda: reduce(t, dst=0), t=t)
    out, t = row(*[0] * size), row(10 + rank)
    show("all-gather: gather, for everybody", lambda: all_gather_into_tensor(out, t), input=t, output=out)
    out, t = row(0), torch.arange(size, device=device) + 10 * rank
    show("reduce-scatter: each gets its slice of the sum", lambda: reduce_scatter_tensor(out, t), input=t, output=out)
    t = torch.arange(size, device=device) + 10 * rank
    show("all-reduce = reduce-scatter + all-gather", lambda: all_reduce(t), t=t)
    out, t = row(*[0] * size), torch.arange(size, device=device) + 10 * rank
    show("all-to-all: a transpose over ranks", lambda: all_to_all_single(out, t), input=t, output=out)

    say("\nbarrier: rank r calls it after r/5 s, and all return when the last has called")
    start = time.perf_counter()
    time.sleep(rank / 5)
    barrier()
    print_in_order(f"  rank {rank}   left after {time.perf_counter() - start:.2f} s")

    whose, steps = "abcdefghijklmnopqrstuvwxyz", ring_states(device)
    for s, state in enumerate(steps):
        say("\nring all-reduce: a row is a rank, a column a chunk, a letter a rank whose data it has\n  start" if s == 0
            else f"  reduce-scatter step {s - 1}: chunk r-{s} goes right and is added" if s < size
            else f"  all-gather step {s - size}: chunk r-{s - size}, complete, goes right")
        cells = ["".join(whose[i] for i in range(size) if value >> i & 1) for value in state]
        print_in_order(f"    rank {rank}   " + "  ".join(cell.ljust(size, "·") for cell in cells))

    say(f"\nbytes sent by rank 0, K = {size} MiB, N = {size}:  counted | formula")
    n, t, slice_ = size, torch.ones(size << 18, device=device), torch.ones(1 << 18, device=device)
    k = t.nbytes
    for name, call, formula, text in [
            ("all_reduce", lambda: all_reduce(t), 2 * (n - 1) * k // n, "2(N-1)/N K"),
            ("reduce_scatter_tensor", lambda: reduce_scatter_tensor(slice_, t), (n - 1) * k // n, "(N-1)/N K"),
            ("all_gather_into_tensor", lambda: all_gather_into_tensor(t, slice_), (n - 1) * k // n, "(N-1)/N K"),
            ("broadcast", lambda: broadcast(t, src=0), (n - 1).bit_length() * k, "ceil(log2 N) K at the root"),
            ("barrier", lambda: barrier(), (n - 1).bit_length(), "ceil(log2 N)")]:
        reset_traffic()
        call()
        say(f"  {name:24}{traffic()[name].bytes:>12,} | {formula:>12,}   {text}")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        start_again(4)
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    _demo(initialize("cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= local else "cpu"))
    destroy_process_group()
