"""A GPT in stages of several pieces, whose gradients leave in buckets while backward computes.

fast/ runs it in place of parallel.py's list of pieces. Parameters whose gradients travel together are a bucket. Its
message is sent when backward has computed the last of its gradients, and backward goes on meanwhile. With ZeRO 1 and 2
a rank's shard is a part of a bucket; with ZeRO-3 weights are gathered a unit ahead.
"""

import math
import weakref
from collections import Counter, defaultdict, deque
from contextlib import contextmanager, ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import collectives as dist
import parallel
import train
from fast.adamw import AdamW
from further.lists import checked
from further.muon import is_muons, matrices_of, Muon
from further.pieces import split_pieces
from further.whole import take_part
from model import GPT, initial_weight, materialize, materialize_buffers
from parallel import (
    group_or_world, is_matrix, lower, master_dtype, params_of, Placement, placement_of, set_placement, stages_on,
    VocabParallelEmbedding, whole_batch)


# -------------------------------------------------------------------------------------------------------------- buckets

class Bucket:
    """Parameters whose weights lie side by side, and whose gradients travel together, over the N ranks of a group.

        params     W (2, 3)             b (2)   V (2, 2)
        message    0  1  2  3  4  5     6  7    8  9 10 11       `view(message, W)` is the first six, as (2, 3)

    The parameters become views of one vector, `weights`, zero-padded to a multiple of N, so that one all-gather gathers
    them all. Their values are the first rank's.

    shard: the Parameter that an optimizer steps, weights[own]: 1/N of them, or all if not `sharded`. Averages of
    gradients end up in its .grad. Rank 1 of 2 with parameters of 6, 2 and 3 elements:

        float32    weights   W W W W W W b b V V V 0      all float32; W, b and V are views
                   shard                 ^^^^^^^^^^^      a view of weights[6:12], so a step changes the weights
        bf16       weights   w w w w w w b b v v v 0      all bf16
                   shard                 B B V V V 0      float32 of its own, the master; `cast_masters` writes it there

    Gradients of 16-bit weights must not accumulate in 16 bits, so each backward's go into `total`, float32, at once.
    """

    def __init__(self, params, group, sharded=True, compute_dtype=None, device=None):
        self.params = params
        self.placement = placement_of(params[0])
        self.group = self.placement.average_over or group  # few ranks keep the same expert (further/experts.py)
        self.first, self.numel = {}, 0
        for p in params:
            self.first[p] = self.numel  # where in the message it begins
            self.numel += p.numel()
        self.dtype, self.device = params[0].dtype, torch.device(device or params[0].device)
        ranks, rank = (dist.get_world_size(self.group), dist.get_rank(self.group)) if sharded else (1, 0)
        self.share_out(ranks, rank)
        values = self.zeros(self.dtype)  # in the parameters' own dtype; in float32 `weights` is this tensor
        if not params[0].is_meta:
            for p in params:
                self.view(values, p).copy_(p.detach())
            dist.broadcast(values, group=self.group, group_src=0)
        self.dtype = compute_dtype or self.dtype
        self.weights = values.to(self.dtype)
        for p in params:
            point_into(p, self.view(self.weights, p))
        mine = self.weights[self.own]  # a view: to step the shard is to change the weights
        if self.dtype != master_dtype(self.dtype):
            mine = values[self.own].to(torch.float32, copy=True)  # `cast_masters` writes it into the weights
        self.shard = nn.Parameter(mine, params[0].requires_grad)
        self.total, self.total_dtype = None, self.shard.dtype  # gradients side by side, and their dtype
        over = self.placement.sharded_over + ((self.group,) if sharded else ())
        self.shard.placement = replace(self.placement, sharded_over=over, cuts=(), decays=all(map(is_matrix, params)))

    def share_out(self, ranks, rank):
        width = -(-self.numel // ranks)  # of a shard, rounded up
        self.numel = ranks * width  # padded, as the message is
        self.own = slice(rank * width, (rank + 1) * width)

    def zeros(self, dtype):
        return torch.zeros(self.numel, dtype=dtype, device=self.device)

    def view(self, flat, param):
        """A parameter's part of a flat vector, in the parameter's shape."""
        return flat[self.first[param]:][:param.numel()].view(param.shape)

    @torch.no_grad()
    def collect(self, param):
        """Move .grad into its part of the total."""
        if self.total is None:
            self.total = self.zeros(self.total_dtype)
        self.view(self.total, param).add_(param.grad)
        param.grad = None

    def take_message(self):
        """The gradients side by side, to be sent. A parameter without one counts as zero."""
        message, self.total = self.zeros(self.total_dtype) if self.total is None else self.total, None
        if self.placement.divide_by > 1:
            message /= self.placement.divide_by
        return message

    def holds_gradients(self):
        return self.total is not None or any(p.grad is not None and p.requires_grad for p in self.params)

    def kept(self, param):
        """What this rank keeps of a parameter: (the shard, where in it that lies, where in the flat parameter)."""
        start = self.first[param]
        low = max(start, self.own.start)
        high = max(low, min(start + param.numel(), self.own.stop))
        return self.shard, slice(low - self.own.start, high - self.own.start), slice(low - start, high - start)

    def reduce_scatter(self, message, average):
        """Start to average a message: this rank's shard goes into `average`."""
        return dist.reduce_scatter_tensor(average, message, dist.ReduceOp.AVG, self.group, async_op=True)

    def all_gather(self):
        """Start to gather `weights`: this rank gives its shard."""
        return dist.all_gather_into_tensor(self.weights, self.weights[self.own], self.group, async_op=True)


def point_into(param, view):
    """Let a parameter's numbers lie in this memory. Modules that hold the parameter notice nothing: it stays the same
    object."""
    if not param.is_meta:
        param.data = view
    else:  # a meta tensor's .data cannot be set to memory
        new = type(param)(view.data, param.requires_grad)
        new.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, new)


@torch.no_grad()
def cast_masters(buckets):
    """Float32 masters into 16-bit weights. Without masters, the shards are views of the weights."""
    for bucket in buckets:
        if bucket.dtype != bucket.shard.dtype:
            bucket.weights[bucket.own].copy_(bucket.shard)


def make_buckets(params, megabytes=None, same=lambda param: None):
    """Lists of parameters, one for each bucket, of about `megabytes` (25; 100 on GPUs, whose links are faster and whose
    latency is not shorter). The last layer's list is first, because backward computes its gradients first. The
    parameters of a list have one dtype, device, placement and requires_grad, and the same value of same(param). A tied
    embedding has a placement like no other, so it has a bucket of its own, and the stages of both its ends shard it
    alike."""
    limit = (megabytes or (100 if any(param.is_cuda for param in params) else 25)) * 2**20
    filling, full = {}, []
    for param in reversed(params):
        key = param.dtype, param.device, placement_of(param), param.requires_grad, same(param)
        if key in filling and sum(p.nbytes for p in [*filling[key], param]) > limit:
            full.append(filling.pop(key))
        filling[key] = [*filling.pop(key, []), param]  # moved to the end, because lists are sent as they fill up
    return [*full, *filling.values()]


def all_reduce_bucket(bucket):
    """Start to average a bucket: 2(N-1)/N x K elements sent. Returns (handle, input, output), as a Reducer's `send`."""
    message = bucket.take_message()
    if dist.get_world_size(bucket.group) == 1:
        return dist.Handle(), message, message
    return dist.all_reduce(message, dist.ReduceOp.AVG, bucket.group, async_op=True), message, message


def reduce_scatter_bucket(bucket, in_place=False):
    """Start to average a bucket: each rank gets its shard. (N-1)/N x K elements sent.

    The average gets a tensor of its own, so that the message can be freed. in_place (stage 1): the average is a view of
    the message, which stays until zero_grad: the 4K of gradients in parallel.py's table. At stage 1 all messages wait
    for `finish`, so tensors of their own would come on top.
    """
    message = bucket.take_message()
    if dist.get_world_size(bucket.group) == 1:
        return dist.Handle(), message, message
    average = message[bucket.own]
    if not in_place:
        average = torch.empty_like(average)
    return bucket.reduce_scatter(message, average), message, average


def add_to_shard(bucket, average):
    """Add an average to the shard's .grad, which several micro-batches share at stage 2."""
    if bucket.shard.grad is None:
        bucket.shard.grad = average
    else:
        bucket.shard.grad += average


# ------------------------------------------------------------------------------------------- averages, under backward

class Reducer:
    """Sends buckets while backward still computes: each when its last gradient is there and all before it are sent.

    All ranks must start the same collectives in the same order, or one bucket would be added to another. So buckets
    are sent in the order of the list. A parameter that gets no gradient therefore holds up its bucket, and those after
    it in the list, until `finish`. Three buckets, the last layer's first:

        backward computes      gradients of 0     gradients of 1     gradients of 2
        the network                               all-reduce of 0    all-reduce of 1    all-reduce of 2
                                                                                        `finish` waits

    send(bucket): starts a collective; returns (handle, its input, its output). Subclasses have computed(param), which
    autograd calls when it has added all of a backward's gradient to param.grad.
    """

    holds = False  # whether buckets leave in `finish` alone

    def __init__(self, buckets, send):
        self.buckets, self.send = buckets, send
        self.bucket_of = {p: bucket for bucket in buckets for p in bucket.params}
        self.under_way = deque()  # (bucket, handle, input, output): the tensors must live until handle.wait()
        self.syncing = True       # whether this backward sends
        self.begin_step()
        call_when_computed(self.bucket_of, self.computed)

    def begin_step(self):
        self.next = 0  # the bucket that is sent next
        self.missing = {bucket: set(bucket.params) for bucket in self.buckets}  # gradients that are still to come

    @contextmanager
    def no_sync(self):
        """Goes around every backward but the step's last one: gradients accumulate, and are not sent."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def mark_ready(self, bucket, param):
        """A bucket waits for one gradient less. Send all buckets that are now complete and next in order."""
        if param not in self.missing[bucket]:
            raise RuntimeError("a second backward before finish_grad_sync(): run all but the last one under no_sync(); "
                               "to drop a step, call zero_grad() of the FlatFSDP or FlatOptimizer")
        self.missing[bucket].discard(param)
        while self.next < len(self.buckets) and self.complete(self.buckets[self.next]):
            self.start(self.buckets[self.next])
            self.next += 1

    def complete(self, bucket):
        """Whether all gradients are there. Frozen parameters have none."""
        return not (self.holds or any(p.requires_grad for p in self.missing[bucket]))

    def start(self, bucket):
        if any(p.requires_grad for p in bucket.params):
            self.under_way.append((bucket, *self.send(bucket)))

    @torch.no_grad()
    def finish_oldest(self):
        bucket, handle, _, output = self.under_way.popleft()
        handle.wait()
        add_to_shard(bucket, output)

    def unsent(self):
        """The buckets that have not been sent yet: `finish` sends them."""
        return self.buckets[self.next:]

    def finish(self):
        """Send the other buckets, and wait for all averages. Call it after the step's last backward, on every rank."""
        for bucket in self.unsent():
            self.start(bucket)
        while self.under_way:
            self.finish_oldest()
        self.begin_step()

    @property
    def finished(self):
        """Whether all gradients have been averaged."""
        return not (self.next or self.under_way or any(bucket.holds_gradients() for bucket in self.buckets))

    def reset(self):
        """Drop the gradients of an unfinished step, for example after its backward raised on all ranks. (If it raised
        on some, they have sent other buckets than the rest, and the group is of no more use.) Call it on all ranks."""
        while self.under_way:
            self.under_way.popleft()[1].wait()
        for bucket in self.buckets:
            bucket.total = None
            for param in bucket.params:
                param.grad = None
        self.begin_step()


class EveryBackward(Reducer):
    """ZeRO-2's and 3's Reducer: a bucket is sent in each backward, so whole gradients never accumulate.

    All ranks must use the same parameters in each. Then autograd completes buckets in the same order on all of them, so
    a bucket need not wait for those before it in the list.
    """

    def no_sync(self):
        return nullcontext()

    def mark_ready(self, bucket, param):
        self.missing[bucket].discard(param)
        if self.complete(bucket):
            self.start(bucket)

    def start(self, bucket):
        # Full gradients cost the memory of two messages under way, and of the next one's gradients. (On GPUs more may
        # be in memory: Python runs ahead, and freed memory is used again only when its stream is done with it.)
        while len(self.under_way) > 1:
            self.finish_oldest()
        super().start(bucket)
        self.missing[bucket] = set(bucket.params)  # for the next backward

    def unsent(self):
        """The buckets of which a backward has computed some gradients, not all."""
        return [bucket for bucket in self.buckets if bucket.holds_gradients()]


def call_when_computed(params, method):
    """Let autograd call method(param) when a backward has added all of param's gradient to param.grad."""
    method = weakref.WeakMethod(method)  # or parameters and buckets would keep each other alive

    def call(param):
        if alive := method():
            alive(param)

    for param in params:
        is_trained = param.requires_grad
        param.requires_grad_(True)  # else it takes no hook, and it may be trained later
        param.register_post_accumulate_grad_hook(call)
        param.requires_grad_(is_trained)


class Averager:
    """What averages gradients by `reducers`, and has an `inner` optimizer that steps the shards of their buckets."""

    @cached_property
    def buckets(self):
        return [bucket for reducer in self.reducers for bucket in reducer.buckets]

    @cached_property
    def bucket_of(self):
        return {param: bucket for bucket in self.buckets for param in bucket.params}

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    @contextmanager
    def no_sync(self):
        """Goes around all backwards of a step but the last one."""
        with ExitStack() as around:
            for reducer in self.reducers:
                around.enter_context(reducer.no_sync())
            yield

    def finish_grad_sync(self):
        """Send the gradients that have not been sent, and wait for all averages."""
        for reducer in self.reducers:
            reducer.finish()

    def kept(self, param):
        """As parallel.Unit's."""
        return self.bucket_of[param].kept(param)

    def zero_grad(self):
        """Drop all gradients, and an unfinished step. Call it on all ranks."""
        for reducer in self.reducers:
            reducer.reset()
        for bucket in self.buckets:
            bucket.shard.grad = None

    def step(self):
        self.inner.step()


# ---------------------------------------------------------------------------------------------------------- ZeRO 0 to 2

class FlatOptimizer(Averager):
    """ZeRO-1, and ZeRO-2 with stage=2: each rank keeps the optimizer state of its shard, and steps that.

        optimizer = FlatOptimizer(model.parameters(), torch.optim.AdamW, group)
        with optimizer.no_sync(): loss.backward()              every micro-batch but the last
        loss.backward(); optimizer.finish_grad_sync()          gradients: reduce-scatter
        optimizer.step(); optimizer.zero_grad()                own shard stepped, parameters: all-gather

    params: any parameters or parameter groups; they become views of flat buffers, equal on all ranks of the group.
    optimizer_class: any whose update is element by element (SGD, Adam, ...), because a shard cuts through tensors.
    One that needs whole tensors brings buckets that do not cut them (OwnedMuon). stage=0 shards nothing. compute_dtype:
    that of layers. `inner`, of that class, steps the shards. It must be made after parameters were frozen, and
    overwrites what is written into 16-bit weights later. Subclasses have `reducer_class`, `every_backward`, and
    update(buckets) and gather_weights(buckets).
    """

    def __init__(self, params, optimizer_class, group=None, stage=1, bucket_mb=None, compute_dtype=None):
        throwaway = optimizer_class(params)  # made to read its param_groups: a plain list is one group
        param_groups = throwaway.param_groups
        param_group_of = {p: i for i, g in enumerate(param_groups) for p in g["params"]}  # by number
        self.group, self.stage = group_or_world(group), stage
        new_bucket = getattr(throwaway, "new_bucket", Bucket)
        buckets = [new_bucket(bucket_params, self.group, stage > 0, compute_dtype)
                   for bucket_params in make_buckets([*param_group_of], bucket_mb, param_group_of.get)]
        for i, g in enumerate(param_groups):
            g.pop("param_names", None)  # shards have none
            g["params"] = [bucket.shard for bucket in buckets if param_group_of[bucket.params[0]] == i]
        self.inner = optimizer_class(param_groups)
        send = {0: all_reduce_bucket, 1: partial(reduce_scatter_bucket, in_place=True), 2: reduce_scatter_bucket}
        reducer_class = self.every_backward if stage == 2 else self.reducer_class
        self.reducers = [reducer_class(buckets, send[stage])]

    @torch.no_grad()
    def step(self):
        """Step the shards, then all-gather the other ranks'."""
        if not self.reducers[0].finished:
            raise RuntimeError("a step before finish_grad_sync(): its gradients have not been averaged")
        changing = [bucket for bucket in self.buckets if bucket.shard.grad is not None]
        self.update(changing)
        self.gather_weights(changing)


# ZeRO-1's Nths would cut through Muon's matrices. So rank r's part of a bucket is not an Nth: it is the matrices that r
# owns. Four matrices on 3 ranks:
#
#     weights, gradients    a a a a a a a a a a a a  b b b b c c c c  d d d d d d d d
#     owner                 0                        1                2
#
# Reduce-scatter and all-gather have parts of unlike sizes then.

def owners(costs, group):
    """{parameter: the rank that steps it}: the costliest first, each to the rank that has least so far."""
    owner = {}
    loads = {}  # group -> what each of its ranks has to do
    for p in sorted(costs, key=costs.get, reverse=True):
        ranks = placement_of(p).average_over or group  # an expert's are few
        load = loads.setdefault(ranks, [0] * dist.get_world_size(ranks))
        owner[p] = load.index(min(load))
        load[owner[p]] += costs[p]
    return owner


class OwnedBucket(Bucket):
    """A Bucket whose shard has whole matrices, shard.matrices: [(which of its numbers, Matrices)]."""

    def __init__(self, owner, params, *options):
        self.owner = owner
        super().__init__(sorted(params, key=owner.get), *options)
        self.shard.matrices = []
        for p in self.mine:
            start = self.kept(p)[1].start
            self.shard.matrices += [(slice(start + here.start, start + here.stop), of) for here, of in p.matrices]

    def share_out(self, ranks, rank):
        every = [[p for p in self.params if self.owner[p] % ranks == r] for r in range(ranks)]  # or all, if ranks is 1
        self.mine = every[rank]
        self.sizes = [sum(p.numel() for p in some) for some in every]
        first = sum(self.sizes[:rank])
        self.own = slice(first, first + self.sizes[rank])

    def reduce_scatter(self, message, average):
        return dist.reduce_scatter(average, [*message.split(self.sizes)], dist.ReduceOp.AVG, self.group, True)

    def all_gather(self):
        return dist.all_gather([*self.weights.split(self.sizes)], self.weights[self.own], self.group, True)


class OwnedMuon(Muon):
    """Muon of a FlatOptimizer, which makes it twice: of named parameters, then of their shards, which have no names."""

    def __init__(self, params, **adamw):
        torch.optim.AdamW.__init__(self, params, **adamw)
        for group in self.param_groups:
            for name, p in zip(group.get("param_names", ()), group["params"]):
                if is_muons(name, p):
                    p.matrices = matrices_of(name, p)
                    set_placement(p, decays=True)  # unlike embeddings', which it decides, so buckets have one kind
        every = params_of(self)
        self.matrices = {p: p.matrices for p in every if hasattr(p, "matrices")}

    def new_bucket(self, params, group, *options):
        """What a FlatOptimizer lays these parameters into."""
        if params[0] not in self.matrices:
            return Bucket(params, group, *options)
        costs = {p: sum(matrices.cost for _, matrices in found) for p, found in self.matrices.items()}
        return OwnedBucket(owners(costs, group), params, group, *options)


# --------------------------------------------------------------------------------------------------------------- ZeRO-3

EMBEDDINGS = nn.Embedding, VocabParallelEmbedding  # their backward needs row indices, no weights


def units_of(module):
    """[(module, parameters that its forward alone uses)]: what FSDP gathers at a time. Of a GPT wte, wpe, each child of
    the container h, ln_f and lm_head; the GPT itself is no unit, because it owns no parameter.

    A module that owns parameters is a unit, with all that lies in it. So is each child of a container. Containers may
    be nested.
    """
    units, containers = [], (nn.ModuleList, nn.ModuleDict, nn.Sequential)

    def add_units(m, unit):  # unit: the parameters of the unit that m lies in, or None
        if unit is None and m._parameters:
            unit = []
            units.append((m, unit))
        if unit is not None:
            unit.extend(m.parameters(recurse=False))
        for child in m.children():
            if isinstance(m, containers) and not isinstance(child, containers):
                units.append((child, list(child.parameters())))
            else:
                add_units(child, unit)

    add_units(module, None)
    return units


class FlatParameter(Bucket):
    """The Bucket of one unit of FSDP, of which this rank keeps the shard alone. (The name is PyTorch's.)

        after                  weights    handle    is_whole    parameters
        free                   None       None      False       NaN
        begin_gather           memory     handle    False       NaN, so none shows half-gathered values
        make_whole             memory     None      True        views of `weights`
        free(keep=True)        memory     None      False       NaN

    Memory lives on while anybody has a view of it, so neither the shard nor autograd may have one.
    """

    def __init__(self, *options):
        super().__init__(*options)
        self.shard.data = self.shard.data.clone()  # as a view it would keep all of `weights`
        self.nothing = torch.full((), math.nan).to(self.weights)
        self.handle = None  # of a gather under way
        self.is_whole = True
        self.free()

    @torch.inference_mode(False)  # or training could not use what an evaluation has gathered
    @torch.no_grad()
    def begin_gather(self):
        """Begin to make the parameters whole, in the compute dtype: an all-gather, (N-1)/N x K elements sent."""
        if self.weights is None:
            self.weights = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            self.weights[self.own] = self.shard  # the cast from the master's dtype
            self.handle = self.all_gather()

    def end_gather(self):
        handle, self.handle = self.handle, None  # first, so that a gather that failed is not waited for again
        if handle:
            handle.wait()

    def make_whole(self):
        self.begin_gather()
        self.end_gather()
        self.is_whole = True
        for p in self.params:
            p.data = self.view(self.weights, p)

    def free(self, keep=False):
        """keep: the memory, for the next use."""
        self.end_gather()
        if not keep:
            self.weights = None
        if self.is_whole:
            self.is_whole = False
            for p in self.params:
                p.data = self.nothing.expand(p.shape)


def free_and_scatter(flat):
    """What FSDP does when a unit's last gradient is there. A layer's backward makes dx together with dW. So dx is
    there, too, and nothing needs the weights now."""
    flat.free()
    return reduce_scatter_bucket(flat)


class Prefetcher:
    """Keeps the matrices of each unit whole while it computes, and gathers the next one meanwhile.

        when                                     who hears of it      what it does
        a unit's forward begins                  before_forward       end its gather (or make it), begin the next one's
        it has ended                             after_forward        free it
        backward needs one of its weights        need                 end its gather, begin the previous one's, free
                                                                      the next if frozen: no gradient has freed it
        its last weight gradient is there        EveryBackward.start  free_and_scatter

    Three units a, b, c; a gather is an all-gather of parameters, a scatter a reduce-scatter of gradients:

                 forward                              backward
        compute  a            b            c          c            b                a
        network  gather b     gather c                gather b     scatter c,       scatter b    scatter a
                                                                   gather a
        freed             a            b                       c               b               a

    The last unit's memory is kept in between, because backward begins with it; so is a tied parameter's, from its first
    use on. A frozen one stays whole until backward reaches the unit before it. Next is next in the list of units with
    matrices, previous among those whose backward needs them: no embedding. A model that uses units in another order
    gathers some too early, and some only when they are needed.

    Backward needs a weight when autograd asks for what forward has saved of it (`unpack`), or when a `checkpoint`
    inside of the unit runs its layers again (`before_layer`).

    flats_of: {unit: the FlatParameters that it computes with}. Mostly one; a tied weight has two units, and a frozen
    one or another dtype a flat of its own.
    """

    def __init__(self, flats_of):
        self.flats_of = flats_of
        uses = Counter(flat for flats in flats_of.values() for flat in flats)
        self.flats = [*uses]
        sharded = [unit for unit, flats in flats_of.items() if flats]
        self.next = dict(zip(sharded, sharded[1:]))
        used = [unit for unit in sharded if not isinstance(unit, EMBEDDINGS)]  # in backward, too
        self.previous = dict(zip(used[1:], used))
        self.unit_of = {flat: unit for unit in sharded for flat in flats_of[unit]}  # a tied one's last
        last = flats_of[sharded[-1]] if sharded else []
        self.until_backward = {flat for flat in uses if uses[flat] > 1 or flat in last}  # their memory is kept
        self.in_forward = False
        for unit, flats in flats_of.items():
            unit.register_forward_pre_hook(self.before_forward, prepend=True)
            unit.register_forward_hook(self.after_forward)
            for layer in [*unit.modules()][1:]:
                layer.register_forward_pre_hook(partial(self.before_layer, flats))

    def before_forward(self, unit, inputs):
        self.before_layer(self.flats_of[unit])
        if self.in_forward:
            self.prefetch(self.next.get(unit))

    def before_layer(self, flats, *_):
        for flat in flats:
            self.need(flat)

    def after_forward(self, unit, inputs, output):
        if self.in_forward:  # else a `checkpoint` around the unit runs it again, in backward, which will free it
            for flat in self.flats_of[unit]:
                flat.free(keep=flat in self.until_backward)

    def need(self, flat):
        """Make a flat whole. If forward is over, its unit's backward has begun."""
        if flat.is_whole:
            return
        flat.make_whole()
        if not self.in_forward:
            unit = self.unit_of[flat]
            self.prefetch(self.previous.get(unit))
            for done in self.flats_of.get(self.next.get(unit), ()):
                if done not in self.until_backward:
                    done.free()

    def prefetch(self, unit):
        """Begin to gather a unit; `need` will wait for it."""
        for flat in self.flats_of.get(unit, ()):
            flat.begin_gather()

    @contextmanager
    def forward(self):
        """Goes around the model's forward. For weights, autograd saves which flat they are in and where, no memory."""
        self.free()  # because the optimizer may have stepped the shards
        self.in_forward = True
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self.in_forward = False
            if not torch.is_grad_enabled():
                self.free()

    def pack(self, tensor):
        memory = tensor.untyped_storage().data_ptr()
        for flat in self.flats:
            if flat.is_whole and flat.weights.data_ptr() == memory:
                return flat, (tensor.size(), tensor.stride(), tensor.storage_offset())
        return None, tensor.detach()

    def unpack(self, saved):
        flat, what = saved  # a tensor, or where in the flat it is
        if flat is None:
            return what
        self.need(flat)
        return flat.weights.as_strided(*what)

    def free(self):
        for flat in self.flats:
            flat.free()


class FlatFSDP(nn.Module):
    """ZeRO-3: parameters exist whole only while their layer computes.

    A unit is each child of a ModuleList, ModuleDict or Sequential (a block of a GPT), and each child outside of those.
    Matrices are sharded, one flat parameter a unit; their gradients are sent in every backward, under no_sync, too.
    Vectors (biases, norms; a thousandth of GPT-2's K) stay whole, and are all-reduced once a step. All ranks must use
    the same parameters in each backward.

    compute_dtype: that of layers and inputs, e.g. torch.bfloat16; shards and their gradients have its `master_dtype`.
    A module on the meta device is never whole anywhere: name its device, and give its values to `load`. Zhao et al.,
    "PyTorch FSDP" (2023). CS336 lecture 7. Subclasses have `reducer_class` and `every_backward`.
    """

    def __init__(self, module, group=None, compute_dtype=None, device=None):
        super().__init__()
        self.module, self.group = module, group_or_world(group)
        units = units_of(module)
        first_unit_of = {p: unit for unit, params in reversed(units) for p in params}  # a tied one lies with its first
        matrices = [p for p in module.parameters() if is_matrix(p)]
        vectors = [p for p in module.parameters() if not is_matrix(p)]
        self.flats = [FlatParameter(unit_params, self.group, True, compute_dtype, device)
                      for unit_params in make_buckets(matrices, math.inf, first_unit_of.get)]  # a whole unit each
        self.vectors = [Bucket(bucket_params, self.group, False, compute_dtype, device)
                        for bucket_params in make_buckets(vectors, math.inf)]
        self.reducers = [self.every_backward(self.flats, free_and_scatter),
                         self.reducer_class(self.vectors, all_reduce_bucket)]
        self.bucket_of = {p: bucket for bucket in [*self.flats, *self.vectors] for p in bucket.params}
        flats_of = {unit: list(dict.fromkeys(self.bucket_of[p] for p in params if is_matrix(p)))
                    for unit, params in units}
        self.prefetcher = Prefetcher(flats_of)

    def forward(self, *args, **kwargs):
        cast_masters(self.vectors)
        with self.prefetcher.forward():
            return self.module(*args, **kwargs)

    def named_parameters(self, *args, **kwargs):
        """What an optimizer steps: this rank's shards of matrices, and whole vectors. (parameters() asks here.)"""
        return ((f"shard.{i}", bucket.shard) for i, bucket in enumerate([*self.flats, *self.vectors]))

    @torch.no_grad()
    def load(self, source):
        """Set every parameter to source(name), a whole tensor, of which this rank keeps its part."""
        for name, param in self.module.named_parameters():
            take_part(self.bucket_of[param].kept(param), param, source(name))


class FSDPOptimizer(Averager):
    """Steps the shards of FlatFSDPs, one for each stage of this rank."""

    def __init__(self, params, optimizer_class, modules):
        self.inner = optimizer_class(params)
        self.modules = modules
        self.group = modules[0].group
        self.reducers = [reducer for module in modules for reducer in module.reducers]

    def finish_grad_sync(self):
        super().finish_grad_sync()
        for module in self.modules:
            module.prefetcher.free()


# ---------------------------------------------------------------------------------------------------------------- a GPT

class Twin(Placement):
    """Of the ends of a tied embedding that are in two stages of one rank: copies, whose gradients are added up."""


def parallelize(config, layout, device, source, optimizer, edition):
    """As train.parallelize, in stages. edition: fast/edition.py's Fast, or a subclass."""
    device = torch.device(device)
    piece_to_rank = train.piece_to_rank_of(config, layout)
    mesh = parallel.make_mesh(device.type, layout.dp, layout.tp, layout.pp, layout.cp)
    groups = train.make_groups(mesh, layout, piece_to_rank, config)
    source = source or partial(initial_weight, config, seed=0)
    schedule = train.schedule_of(layout.schedule)
    stage_to_rank = parallel.ranks_of_stages(schedule(layout.pp, 2 * layout.pp, layout.virtual_stages))
    pieces_of = split_pieces(config, len(stage_to_rank))
    ends_apart = config.tied and len(stage_to_rank) > 1 and not groups.embedding
    stages = {}
    for stage in stages_on(dist.get_rank(groups.pp), stage_to_rank):
        model = GPT(config, seed=None, pieces=pieces_of[stage])
        train.cut_layers(model, layout, groups, edition)
        train.mark_ends(model, groups)
        for name, param in model.named_parameters():
            if layout.pp > 1:
                set_placement(param, sharded_over=placement_of(param).sharded_over + (groups.pp,))
            if ends_apart and name in ("wte.weight", "lm_head.weight"):
                set_placement(param)
                param.placement = Twin(**vars(param.placement))
        train.keep_less(model, layout)
        if layout.zero == 3:  # before it has weights, so that it is never whole on a rank
            materialize_buffers(model.to(master_dtype(layout.dtype)), source, device)
            model = edition.sharded(model, groups.shard, layout.dtype, device)
            model.load(source)
        else:
            materialize(model, source, device, master_dtype(layout.dtype), parallel.cut_like)
        stages[stage] = model
    return StagedGPT(config, layout, device, mesh, groups, stages, stage_to_rank, optimizer, edition)


def average_between(shards, group):
    for shard in shards:
        if shard.grad is not None and not placement_of(shard).average_over:
            dist.all_reduce(shard.grad, dist.ReduceOp.AVG, group)


class StagedGPT(train.ParallelGPT):
    """A ParallelGPT whose pieces are stages: `pieces` {stage: module without its FSDP}."""
    unit_of = {}
    units = []

    def __init__(self, config, layout, device, mesh, groups, stages, stage_to_rank, optimizer, edition):
        self.config = config
        self.layout = layout
        self.device = device
        self.mesh = mesh
        self.groups = groups
        self.zero = layout.zero
        self.dtype = layout.dtype
        self.piece_to_rank = stage_to_rank
        self.pieces = {stage: getattr(model, "module", model) for stage, model in stages.items()}
        self.made = {}
        self.seen = set()
        self.routers = {}
        if config.experts:
            from further.experts import routers
            self.routers = {i: router for piece in self.pieces.values() for i, router in routers(piece).items()}
        self.optimizer = optimizer and self.averaging(optimizer, stages, edition)
        if not optimizer and layout.zero < 3:  # layers get their 16 bits from an optimizer, if there is one
            for model in stages.values():
                model.to(layout.dtype)
        self.pipeline = edition.pipeline(stages, stage_to_rank, mesh, self.loss, self.shape, layout.dtype, device,
                                         self.optimizer)

    def averaging(self, optimizer, stages, edition):
        """What averages gradients, and steps by the `optimizer`, a partial."""
        if getattr(optimizer, "func", None) is Muon:
            optimizer = partial(OwnedMuon, *optimizer.args, **optimizer.keywords)
        if self.zero == 3:
            return FSDPOptimizer(param_groups(stages), optimizer, [*stages.values()])
        return edition.flat_optimizer(param_groups(stages), optimizer, self.groups.shard, self.zero,
                                      compute_dtype=self.dtype)

    @property
    def params(self):
        """What the optimizer steps: this rank's shards."""
        return [param for param in params_of(self.optimizer) if param.requires_grad and param.numel()]

    def kept(self, param):
        return self.optimizer.kept(param)

    def lists(self, m, training=True):
        p = self.layout.pp
        if training:
            return checked(train.schedule_of(self.layout.schedule), p, m, self.layout.virtual_stages)
        return lower([[action for stage in stages_on(rank, self.piece_to_rank)
                       for action in whole_batch("F", stage, m)] for rank in range(p)])

    def zero_grad(self):
        self.optimizer.zero_grad()

    def forward_backward(self, *args, **options):
        if any(param.grad is not None for param in self.params):  # what is added up below would be added up twice
            raise RuntimeError("a second forward_backward before zero_grad(): give all micro-batches of a step at once")
        return super().forward_backward(*args, **options)

    def twins(self):
        """The shards of both ends of a tied embedding, where this rank has both in two stages, and trains both."""
        ends = [param for param in self.params if isinstance(param.placement, Twin)]
        return ends if len(ends) == 2 else []

    @torch.no_grad()
    def add_up_gradients(self):
        self.optimizer.finish_grad_sync()
        if self.groups.replicate:
            average_between(self.params, self.groups.replicate)
        together = defaultdict(list)
        for param in self.params:
            if param.grad is not None and (over := placement_of(param).partial_over):
                together[over, param.grad.dtype].append(param.grad)
        for (over, _), grads in together.items():
            flat = torch.cat([grad.flatten() for grad in grads])
            for group in over:
                dist.all_reduce(flat, group=group)
            for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads])):
                grad.copy_(summed.view_as(grad))
        if twins := self.twins():
            one, other = twins
            one.grad += other.grad
            other.grad.copy_(one.grad)

    def clip_grad_norm_(self, max_norm, scale=1.0):
        """With fast.adamw's AdamW, clipping only computes a factor: the kernel scales gradients as it reads them. Twins
        have the same gradient, so the norm takes one of them."""
        *first, other = self.twins() or [None]
        params = [param for param in self.params if param is not other]
        inner = self.optimizer.inner
        if not isinstance(inner, AdamW):
            norm = parallel.clip_grad_norm_(params, max_norm, scale)
            for one in first:
                other.grad.copy_(one.grad)
            return norm
        norm = parallel.clip_grad_norm_(params, 0) / scale
        inner.scale = (max_norm / (norm + 1e-6) if max_norm else torch.ones_like(norm)).clamp(max=1) / scale
        return norm

    def step(self):
        self.optimizer.step()


def param_groups(stages):
    """For an optimizer: matrices have weight decay, biases and norms have none. Each stage has its own groups, so that
    no bucket waits for two stages. Parameters come with their names; FSDP's are its shards."""
    groups = []
    for model in stages.values():
        for matrix, options in (False, {"weight_decay": 0.0}), (True, {}):
            params = [named for named in model.named_parameters() if is_matrix(named[1]) == matrix]
            groups += [{"params": params, **options}] if params else []
    return groups


Parallel = StagedGPT  # its add_up_gradients stands for the reference's
