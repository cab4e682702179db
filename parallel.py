"""Parallel training, applied to a model from outside. In lecture order, each section adds one idea:

    mesh        which ranks form which group: axes (pp, dp, cp, tp), tensor parallel innermost
    data        replicas average their gradients: one all-reduce a parameter, then one a bucket
    ZeRO        stage 1 shards the optimizer, stage 2 the gradients too, stage 3 (FSDP) the parameters too
    tensor      every matrix is cut by columns or rows; a sublayer costs one all-reduce forward, g, and one backward, f
    sequence    between them the tokens are cut: f and g become all-gather and reduce-scatter
    context     all tokens of a sequence are cut: keys and values go round a ring, or heads are exchanged for tokens
    expert      ranks of dp share out the experts, and tokens travel to those that the router chose
    pipeline    layers are spread over ranks: GPipe, 1F1B, interleaved, zero-bubble, as lists of actions
    norm        one gradient norm over any combination
    recipe      `parallelize` puts them together, in an order that works

`python parallel.py data`, `memory`, `tensor`, `context`, `experts` and `pipeline` show six of them on a laptop.

`group=None` is all ranks, as in torch.distributed. "data" and "ZeRO" work on any nn.Module, the other sections on the
GPT of model.py. What sections must tell each other stands on the parameters:

    param.split_over    the groups whose ranks hold other parts of the parameter, or the layers of other stages
    param.sums          the groups over which its gradient must still be added: a tied embedding's two stages, the ranks
                        that saw T/N tokens each
    param.replicas      an expert's: the ranks that keep the same expert and average its gradient
    param.fed           an expert's: from how many ranks' tokens each of these ranks has computed its gradient
    param.cuts          the `Cut`s by which expert and tensor parallelism took this rank's part of it

Letters: N ranks in the group, r this rank, K parameters, m micro-batches, p pipeline ranks, v stages a rank; B, T, C, V
as in model.py. Read with: CS336 lectures 7 and 8; Ultra-Scale Playbook, the chapters of the same names.
"""

import itertools
import math
import weakref
from collections import Counter, defaultdict, deque
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

import collectives as dist
import kernels
from model import GPT, Experts, Linear, buffers, initial_weight, materialize, materialize_buffers, routers, shapes

FASTER = {}  # class or function -> what gives the same numbers sooner, below the bar; `train.py --plain` empties it
BUCKET_MB = {}  # device type -> megabytes a bucket, where 25 (PyTorch's own choice) is not best


def faster(what):
    return FASTER.get(what, what)


class Replaceable:
    """Making one of these makes the subclass that `FASTER` names for it, where there is one."""

    def __new__(cls, *args, **kwargs):
        return super().__new__(faster(cls))


# ----------------------------------------------------------------------------------------------------------------- mesh

def make_mesh(device_type, dp=1, tp=1, pp=1, cp=1):
    """A torch DeviceMesh with axes ("pp", "dp", "cp", "tp"); `mesh["tp"].get_group()` is this rank's group along tp.

    tp is innermost, because its ranks talk in every layer, and neighbours share a node. Call it on all ranks, as every
    function that makes groups. ValueError unless pp x dp x cp x tp is the world size.
    """
    there, needed = dist.get_world_size(), pp * dp * cp * tp
    if needed != there:
        raise ValueError(f"pp {pp} x dp {dp} x cp {cp} x tp {tp} needs {needed} processes, there are {there}")
    return init_device_mesh(device_type, (pp, dp, cp, tp), mesh_dim_names=("pp", "dp", "cp", "tp"))


def ranks_of_replicas(mesh):
    """The ranks that keep the same parameters, those of dp and cp, for each place of pp and tp: (pp tp, dp cp)."""
    return mesh.mesh.permute(0, 3, 1, 2).flatten(2).flatten(0, 1)


def split_experts(mesh, n):
    """[the group of n neighbours along dp who share out the experts, the group of the ranks that keep the same experts
    as this one]; where n is 1, [None, None]. n must divide dp."""
    if n == 1:
        return [None, None]
    neighbours = mesh.mesh.unflatten(1, (-1, n)).permute(0, 4, 1, 3, 2)                       # (pp, tp, dp/n, cp, n)
    return groups_of(neighbours.flatten(0, 1).flatten(1, 2))                                  # (pp tp, dp/n cp, n)


def groups_of(grids):
    """Of the grid of ranks that this rank is in: [its group along the rows, its group along the columns]."""
    return sum([dist.rows_and_columns(grid) for grid in grids.tolist()], [])


def make_groups(mesh, zero_within, ep, tied):
    """This rank's groups, by name. pp, dp, cp, tp: its lines along the mesh's axes. Besides:

    replicas          the ranks that average gradients, dp x cp
    within, between   ZeRO's: `zero_within` neighbours among the replicas share out the states (None: all of them do);
                      `between` are the ranks with the same shard, or None
    ep, same_experts  of `split_experts`
    ends              the pipeline's first and last rank, if both keep a `tied` embedding, else None
    """
    groups = SimpleNamespace(**{axis: mesh[axis].get_group() for axis in mesh.mesh_dim_names})
    groups.replicas, groups.between, groups.ends = groups.dp, None, None
    ranks, make = ranks_of_replicas(mesh), torch.distributed.new_subgroups_by_enumeration
    if mesh["cp"].size() > 1:
        groups.replicas, _ = make(ranks.tolist())
    dist.two_levels(groups.replicas, ranks.tolist())  # they send most, so they cross nodes in two levels
    groups.within = groups.replicas
    if zero_within not in (None, ranks.shape[1]):
        groups.within, groups.between = groups_of(ranks.unflatten(1, (-1, zero_within)))
    groups.ep, groups.same_experts = split_experts(mesh, ep)
    if tied and mesh.shape[0] > 1:
        groups.ends, _ = make(mesh.mesh[[0, -1]].flatten(1).T.tolist())  # the first and the last rank of each pipeline
    return groups


# ---------------------------------------------------------------------------------------------- data parallel: replicas
#
# Every rank holds the whole model and sees its own part of the batch. Gradients are averaged, so replicas stay equal:
# an all-reduce of K elements, 2(N-1)/N x K sent by each rank and step, however many micro-batches the step has.

def average_gradients(module, group=None):
    """The lecture's data parallelism: after backward, one all-reduce a parameter. Each tensor, however small, pays the
    latency of a collective."""
    for param in module.parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad  # else other ranks would hang
            dist.all_reduce(param.grad, dist.ReduceOp.AVG, group)


class Bucket:
    """Parameters side by side in one flat vector, zero-padded to a multiple of N: one collective serves all of them.

    group: the N ranks that average their gradients. between: None, or the ranks of other groups with the same shard.
    """

    def __init__(self, params, group, between=None):
        self.params, self.group, self.between = params, group_or_world(group), between
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.numel = -(-sum(p.numel() for p in params) // ranks) * ranks  # padded
        self.own = slice(rank * self.numel // ranks, (rank + 1) * self.numel // ranks)  # this rank's Nth
        self.dtype, self.device = params[0].dtype, params[0].device
        self.total = None           # the gradients added up, one flat vector; None until the first is moved here
        self.shard = None           # ZeRO: the Parameter the optimizer steps; its .grad is where gradients end up
        self.fed = getattr(params[0], "fed", 1)  # more for experts alone, in their section

    def new(self, dtype):
        return torch.zeros(self.numel, dtype=dtype, device=self.device)

    def views(self, flat):
        """`flat` as the parameters' shapes, in their order."""
        sizes = [p.numel() for p in self.params]
        return [v.view(p.shape) for v, p in zip(flat.split(sizes + [self.numel - sum(sizes)]), self.params)]

    def overlap(self, param, part):
        """What of a parameter lies in `part`, a slice of the vector: (where in the flat parameter, where in `part`)."""
        start = sum(p.numel() for p in itertools.takewhile(lambda p: p is not param, self.params))
        low = max(start, part.start)
        high = max(low, min(start + param.numel(), part.stop))
        return slice(low - start, high - start), slice(low - part.start, high - part.start)

    def gather_one(self, param, local):
        """One whole parameter, or its moment, each piece broadcast by the rank that keeps it. local: this rank's shard
        of the vector of all. Call it on all ranks."""
        whole, width = local.new_empty(param.shape), len(local)
        for rank in range(self.numel // width):  # one turn where nothing is sharded
            there, here = self.overlap(param, slice(rank * width, (rank + 1) * width))
            if rank * width == self.own.start:
                whole.view(-1)[there] = local[here]
            if width < self.numel and here.start < here.stop:
                dist.broadcast(whole.view(-1)[there], group=self.group, group_src=rank)
        return whole


def group_or_world(group):
    return group or torch.distributed.group.WORLD


def make_buckets(params, megabytes, group, kind=lambda param: (), bucket_class=Bucket, between=None):
    """Parameters in buckets of about `megabytes`, last layers first, because backward computes their gradients first.

    All parameters of a bucket have the same dtype and device. The sections below need more: ZeRO the same kind(param),
    expert and tensor parallelism the same groups to be averaged, cut and summed over.
    """
    filling, full = {}, []  # filling: {what parameters have in common: those of the bucket that is not yet full}
    for param in reversed(params):
        limit = (megabytes or BUCKET_MB.get(param.device.type, 25)) * 2**20
        over = (param.replicas, None) if hasattr(param, "replicas") else (group, between)
        key = (over, param.dtype, param.device, split_over(param), sums(param), kind(param))
        if key in filling and sum(p.nbytes for p in [*filling[key], param]) > limit:
            full.append((over, filling.pop(key)))
        filling.setdefault(key, []).append(param)
    return [bucket_class(some, *over) for over, some in full + [(key[0], some) for key, some in filling.items()]]


def split_over(param):
    return getattr(param, "split_over", ())


def sums(param):
    return getattr(param, "sums", ())


class Reducer(Replaceable):
    """Averages gradients over the ranks, bucket by bucket: an all-reduce once a step, 2(N-1)/N x K elements sent.

    Autograd adds up micro-batches in .grad. `finish` moves a bucket's gradients from there into one flat vector,
    `bucket.total`, and averages that. Each .grad is then a view of the average. reduce_dtype: of what is sent.
    """
    no_sync = nullcontext  # goes around every backward but the step's last one; here it changes nothing

    def __init__(self, buckets, reduce_dtype=None):
        self.buckets, self.reduce_dtype = buckets, reduce_dtype
        self.bucket_of = {p: bucket for bucket in buckets for p in bucket.params}

    def finish(self):
        """Average all gradients. Call after the step's last backward, on every rank."""
        for bucket in self.buckets:
            self.collect(bucket)
            self.send(bucket)

    @torch.no_grad()
    def collect(self, bucket):
        """Add .grad to the total, and free it: only one bucket's gradients exist twice. A missing one is zero."""
        if bucket.total is None:
            # A shard is float32 where weights have 16 bits, so that micro-batches add up in float32.
            bucket.total = bucket.new(bucket.dtype if bucket.shard is None else bucket.shard.dtype)
        for view, param in zip(bucket.views(bucket.total), bucket.params):
            if param.grad is not None:
                view += param.grad
                param.grad = None

    def send(self, bucket):
        handle, _, average = self.start(bucket)
        handle.wait()
        self.store(bucket, average)

    def start(self, bucket):
        """Begin to average a total: (handle, message, average); both tensors must live until handle.wait()."""
        message = self.message(bucket)
        return dist.all_reduce(message, dist.ReduceOp.AVG, bucket.group, async_op=True), message, message

    def message(self, bucket):
        """The total, in the dtype that is sent. The bucket forgets it, so that its memory can go."""
        total, bucket.total = bucket.total, None
        if bucket.fed > 1:  # an expert has the gradient of the sum of so many ranks' losses, and wants that of the mean
            total /= bucket.fed
        return total.to(self.reduce_dtype or total.dtype)

    def store(self, bucket, average):
        """Put an average where the optimizer looks for it."""
        for view, param in zip(bucket.views(average.to(bucket.dtype)), bucket.params):
            param.grad = view


class DDP(Replaceable, nn.Module):
    """Data parallel over any module: gradients are averaged bucket by bucket.

        model = DDP(module, group)                  the first rank broadcasts its parameters and buffers
        with model.no_sync(): loss.backward()       every micro-batch but the last: gradients only add up
        loss.backward(); model.finish_grad_sync()   now every rank's .grad is the mean over the ranks

    A parameter that a rank did not use counts as zero there, so one that nobody used has a gradient of zero, not None.
    Li et al., "PyTorch Distributed" (2020). CS336 lecture 8, data parallelism.
    """

    def __init__(self, module, group=None, bucket_mb=None):
        super().__init__()
        self.module, self.group = module, group_or_world(group)
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), group=getattr(tensor, "replicas", self.group), group_src=0)
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.buckets = make_buckets(self.params, bucket_mb, self.group)
        self.reducer = Reducer(self.buckets)
        self.reducers, self.no_sync, self.finish_grad_sync = [self.reducer], self.reducer.no_sync, self.reducer.finish

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


# ------------------------------------------------------------------------------------------------- ZeRO: sharded states
#
# In data parallelism every rank keeps the same. ZeRO lets each keep an Nth. K parameters, float32, Adam; bytes a rank:
#
#                  parameters   gradients   optimizer    sent a step, elements
#     stage 0          4K           4K          8K       2 (N-1)/N K              all-reduce
#     stage 1          4K           4K          8K/N     2 (N-1)/N K              reduce-scatter, all-gather: its halves
#     stage 2          4K           4K/N        8K/N     (m+1) (N-1)/N K          reduce-scatter m times, all-gather
#     stage 3          4K/N         4K/N        8K/N     3m (N-1)/N K             m times all-gather 2x, reduce-scatter
#
# Besides, stage 2 has one bucket's whole gradient, stage 3 also one unit's parameters. (The last unit is gathered once,
# because backward begins with it.) In hybrid sharding the n ranks of a node shard among themselves. The table then
# holds with n for N, and once a step nodes all-reduce each shard's gradient, K/n elements.
# Rajbhandari et al., "ZeRO" (2020). CS336 lecture 7.

class ShardReducer(Reducer):
    """The reducer of parameters whose optimizer steps `bucket.shard`: averages end up in the shard's .grad.

    A gradient moves into `bucket.total` as soon as a backward has computed it. The total has the shard's dtype, float32
    for 16-bit weights, so micro-batches do not add up in 16 bits. `finish` all-reduces totals at stage 0, where a shard
    is all of its bucket, and reduce-scatters them at stage 1. At stage 2 no rank keeps a full gradient: when a backward
    has computed a bucket's last one, on_complete(bucket) is called, and the bucket is reduce-scattered.
    """

    def __init__(self, buckets, stage, reduce_dtype=None, on_complete=lambda bucket: None):
        super().__init__(buckets, reduce_dtype)
        self.stage, self.on_complete = stage, on_complete
        self.missing = {bucket: set(bucket.params) for bucket in buckets}  # parameters whose gradient is still to come
        call_when_computed(self.bucket_of, self.computed)

    def computed(self, param):
        bucket = self.bucket_of[param]
        self.collect(bucket)
        self.missing[bucket].discard(param)
        if self.stage == 2 and not self.missing[bucket]:
            self.missing[bucket] = set(bucket.params)
            self.on_complete(bucket)
            self.send(bucket)

    def start(self, bucket):
        if self.stage == 0:
            return super().start(bucket)
        message = self.message(bucket)
        average = message[bucket.own]
        if self.stage == 2:
            average = torch.empty_like(average)  # so that the full vector can go
        handle = dist.reduce_scatter_tensor(average, message, dist.ReduceOp.AVG, bucket.group, async_op=True)
        return handle, message, average

    def store(self, bucket, average):
        if bucket.shard.grad is None:
            bucket.shard.grad = average.to(bucket.shard.dtype)
        else:
            bucket.shard.grad += average

    def finish(self):
        for bucket in self.buckets:
            if self.stage < 2 or bucket.total is not None:  # stage 2 has sent what was complete
                self.collect(bucket)
                self.send(bucket)
            self.missing[bucket] = set(bucket.params)
        self.average_between()

    @torch.no_grad()
    def average_between(self):
        """Average shards over `bucket.between`, once a step, however many micro-batches it has."""
        for bucket in self.buckets:
            if bucket.between and bucket.shard.grad is not None:
                message = bucket.shard.grad.to(self.reduce_dtype or bucket.shard.dtype)
                dist.all_reduce(message, dist.ReduceOp.AVG, bucket.between)
                bucket.shard.grad.copy_(message)


def call_when_computed(params, method):
    """Let autograd call method(param) when a backward has added all it has to param.grad."""
    method = weakref.WeakMethod(method)  # or parameters and buckets would keep each other alive
    for param in params:
        param.register_post_accumulate_grad_hook(lambda p: (alive := method()) and alive(p))


class ShardedOptimizer(Replaceable, torch.optim.Optimizer):
    """ZeRO-1, and ZeRO-2 with stage=2: each rank keeps the optimizer state of its Nth of the parameters, and steps it.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, group, lr=1e-3)
        with optimizer.no_sync(): loss.backward()              every micro-batch but the last
        loss.backward(); optimizer.finish_grad_sync()          gradients: reduce-scatter
        clip_grad_norm_(optimizer.shards, 1.0, [group])
        optimizer.step(); optimizer.zero_grad()                own Nth stepped, parameters: all-gather

    params: any parameters or parameter groups; they become views of flat buffers, equal on all ranks of the group.
    optimizer_class: any whose update is element by element (SGD, Adam, ...), because a shard cuts through tensors.
    compute_dtype: the parameters become bf16 or fp16, and the shards are their float32 masters. reduce_dtype: what
    gradients are sent in. stage=0 shards nothing, and has masters. stage=2: all ranks must use the same parameters in
    each backward. between: the ranks that keep the same shard, where `group` is not all replicas.
    """

    def __init__(self, params, optimizer_class, group=None, stage=1, bucket_mb=None, compute_dtype=None,
                 reduce_dtype=None, between=None, **kwargs):
        params = list(params)
        param_groups = [dict(g) for g in params] if params and isinstance(params[0], dict) else [{"params": params}]
        self.group, self.stage = group_or_world(group), stage
        number_of = {}  # parameter -> the number of its parameter group, of a tied one the first
        for i, g in enumerate(param_groups):
            for p in g["params"]:
                if p.requires_grad:
                    number_of.setdefault(p, i)
                elif not p.is_meta:
                    spread(p.detach(), self.group, between)
                    p.data = p.data.to(compute_dtype) if compute_dtype and p.is_floating_point() else p.data
        self.params = list(number_of)
        self.buckets = make_buckets(self.params, bucket_mb, self.group, number_of.get, between=between)
        for bucket in self.buckets:
            values = make_shard(bucket, stage > 0)
            bucket.dtype = compute_dtype or bucket.dtype
            bucket.weights = values.to(bucket.dtype)
            if bucket.dtype != values.dtype:
                bucket.shard.data = bucket.shard.data.clone()  # a master of its own, no longer a view of `values`
            for view, p in zip(bucket.views(bucket.weights), bucket.params):
                p.data = view  # from here on, gathering the flat buffer is gathering the parameters
        self.shards = [bucket.shard for bucket in self.buckets]
        self.with_masters = [bucket for bucket in self.buckets if bucket.dtype != bucket.shard.dtype]
        for i, g in enumerate(param_groups):
            g["params"] = [bucket.shard for bucket in self.buckets if number_of[bucket.params[0]] == i]
        self.inner = optimizer_class(param_groups, **kwargs)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state  # learning rates are changed here
        self.reducer = ShardReducer(self.buckets, stage, reduce_dtype)
        self.no_sync, self.finish_grad_sync = self.reducer.no_sync, self.reducer.finish

    @torch.no_grad()
    def step(self):
        """Step the own shard, then all-gather the parameters."""
        self.inner.step()
        self.cast()
        self.gather_weights(self.buckets)

    def cast(self):
        """Float32 masters into 16-bit weights. Without masters, the shards are views of the weights."""
        for bucket in self.with_masters:
            bucket.weights[bucket.own].copy_(bucket.shard)

    def gather_weights(self, buckets):
        """All-gather: send this rank's Nth of the weights and receive the others', (N-1)/N x K elements."""
        for bucket in buckets if self.stage else ():
            dist.all_gather_into_tensor(bucket.weights, bucket.weights[bucket.own], bucket.group)


def spread(tensor, group, between):
    """Give every replica the first one's values."""
    if between:
        dist.broadcast(tensor, group=between, group_src=0)
    dist.broadcast(tensor, group=group, group_src=0)


def master_dtype(dtype):
    """What weights are kept and gradients added up in: bf16 has 8 significant bits, so 0.02 - 0.00001 would be 0.02."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def is_matrix(param):
    """Whether a parameter has weight decay; biases and norms have none. Shards and stacks say it by `.matrix`."""
    return getattr(param, "matrix", param.dim() >= 2)


def make_shard(bucket, sharded):
    """Make `bucket.shard`, which an optimizer steps: this rank's Nth of the values; all, if not `sharded`.

    Returns all values, as the first rank has them; the shard is a view, or of 16-bit values a float32 copy.
    """
    values, first = bucket.new(bucket.dtype), bucket.params[0]
    if not first.is_meta:
        for view, p in zip(bucket.views(values), bucket.params):
            view.copy_(p.detach())
        spread(values, bucket.group, bucket.between)
    bucket.own = bucket.own if sharded else slice(0, bucket.numel)
    bucket.shard = shard = nn.Parameter(values[bucket.own].to(master_dtype(values.dtype)))
    shard.split_over, shard.sums = split_over(first) + ((bucket.group,) if sharded else ()), sums(first)
    shard.matrix = all(is_matrix(p) for p in bucket.params)
    return values


class FlatParameter(Replaceable, Bucket):
    """A Bucket of one unit of FSDP, of which this rank keeps an Nth, `shard`. (The name is PyTorch's.)

    Layers compute with views of `weights`, a flat buffer. `free` shrinks its storage to 0 bytes, `gather` refills it.
    The views stay the same objects, so what autograd saved in forward is right again in backward.
    """

    def become_flat(self, device, compute_dtype, stays_whole):
        """Keep the shard alone. Returns {old parameter: new one}, views of `weights` with no memory until `gather`."""
        old, self.device, self.stays_whole = self.params, torch.device(device or self.device), stays_whole
        make_shard(self, not stays_whole)
        self.shard.data = self.shard.data.clone()  # so that the other values can go
        self.shard.requires_grad_(old[0].requires_grad)
        self.dtype = compute_dtype or self.dtype
        self.weights = self.new(self.dtype)
        # .data gives each view its own version counter. A refill does not raise it; else autograd would refuse to run.
        self.params = [nn.Parameter(view.data, p.requires_grad) for view, p in zip(self.views(self.weights), old)]
        for new, p in zip(self.params, old):
            new.__dict__.update(p.__dict__)  # split_over, sums, cuts, ...
        self.uses_left = 0
        self.free()
        return dict(zip(old, self.params))

    @torch.no_grad()
    def gather(self):
        """Make the parameters whole, in the compute dtype: an all-gather, (N-1)/N x K elements sent."""
        if self.version == self.shard._version:  # already whole; a step of the optimizer would have raised the version
            return
        self.version = self.shard._version
        if not self.stays_whole:
            self.weights.untyped_storage().resize_(self.numel * self.dtype.itemsize)
        self.weights[self.own] = self.shard  # the cast from the master's dtype
        if not self.stays_whole:
            self.all_gather()

    def all_gather(self):
        dist.all_gather_into_tensor(self.weights, self.weights[self.own], self.group)

    def free(self):
        self.version = None
        if not self.stays_whole:
            self.weights.untyped_storage().resize_(0)


class FSDP(Replaceable, nn.Module):
    """ZeRO-3: parameters exist whole only while their layer computes.

        model = FSDP(module, group)                               any module
        optimizer = torch.optim.AdamW(model.parameters(), ...)    on this rank's shards, in the master dtype
        with model.no_sync(): loss.backward()                     every micro-batch but the last
        loss.backward(); model.finish_grad_sync(); optimizer.step()

    A unit is each child of a ModuleList, ModuleDict or Sequential (a block of a GPT), and each layer outside of those:

        forward    before a unit: gather it       after it: free it, but for the last one, with which backward begins
        backward   before a unit: gather it       when its last gradient is there: free it, reduce-scatter its gradients

    Matrices are sharded, one flat parameter a unit. 1-D parameters (biases, norms; a thousandth of K) stay whole, and
    are all-reduced once a step. A tied parameter stays whole from its first use to its last, a frozen one
    from backward's gather to `finish_grad_sync`. All ranks must use the same parameters in each backward.

    compute_dtype: what layers compute in, e.g. torch.bfloat16; shards and their gradients keep the module's dtype. A
    module on the meta device is never whole anywhere: name its device, and give its values to `load`. between: as for
    ShardedOptimizer. Zhao et al., "PyTorch FSDP" (2023). CS336 lecture 7, ZeRO-3.
    """

    def __init__(self, module, group=None, compute_dtype=None, reduce_dtype=None, device=None, between=None):
        super().__init__()
        self.module, self.group, self.compute_dtype = module, group_or_world(group), compute_dtype
        for buffer in module.buffers():
            if not buffer.is_meta:
                spread(buffer, self.group, between)
        units = fsdp_units(module)
        unit_of = {p: unit for unit, params in reversed(units) for p in params}  # of a tied one the first
        # Of any size: a bucket for each unit's matrices. All biases and norms have kind False, and share one.
        self.buckets = make_buckets(list(module.parameters()), math.inf, self.group,
                                    lambda p: (p.requires_grad, is_matrix(p) and unit_of[p]), FlatParameter, between)
        replaced = {}
        for flat in self.buckets:
            replaced.update(flat.become_flat(device, compute_dtype, stays_whole=not is_matrix(flat.params[0])))
        self.bucket_of = {p: flat for flat in self.buckets for p in flat.params}
        for owner in module.modules():
            for leaf, p in list(owner.named_parameters(recurse=False)):
                setattr(owner, leaf, replaced[p])
        self.units = {unit: list(dict.fromkeys(self.bucket_of[replaced[p]] for p in params)) for unit, params in units}
        self.uses = Counter(flat for flats in self.units.values() for flat in flats)  # in a forward; a tied one's are 2
        with_shards = [flats for flats in self.units.values() if not all(flat.stays_whole for flat in flats)]
        self.last, self.in_backward = with_shards[-1] if with_shards else [], False
        for unit in self.units:
            unit.register_forward_pre_hook(self.before_forward)
            unit.register_forward_hook(self.after_forward)
        matrices, vectors = ([flat for flat in self.buckets if flat.shard.requires_grad and flat.stays_whole == whole]
                             for whole in (False, True))
        self.reducers = [ShardReducer(matrices, 2, reduce_dtype, on_complete=lambda flat: flat.free()),
                         ShardReducer(vectors, 0, reduce_dtype)]
        self.no_sync = self.reducers[1].no_sync  # 1-D gradients add up; the others leave in every backward

    def forward(self, *args, **kwargs):
        self.in_backward = False
        for flat in self.buckets:
            flat.uses_left = self.uses[flat]
        if self.compute_dtype:
            args, kwargs = tree_map_only(
                torch.Tensor, lambda x: x.to(self.compute_dtype) if x.is_floating_point() else x, (args, kwargs))
        return self.module(*args, **kwargs)

    def before_forward(self, unit, inputs):
        for flat in self.units[unit]:
            flat.gather()

    def after_forward(self, unit, inputs, output):
        if self.in_backward:  # recomputation, inside the unit's backward, which frees it
            return
        for flat in self.units[unit]:
            flat.uses_left -= 1
            if not (flat.stays_whole or flat.uses_left > 0 or flat in self.last and torch.is_grad_enabled()):
                flat.free()
        for tensor in tree_leaves(output):  # of tuples, lists and dicts of tensors
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda grad: self.before_backward(unit))  # called first in the unit's backward

    def before_backward(self, unit):
        self.in_backward = True
        self.before_forward(unit, ())  # gathers the unit's weights, as before forward

    def finish_grad_sync(self):
        """Send the gradients that have not left, such as 1-D ones; free what backward did not."""
        for reducer in self.reducers:
            reducer.finish()
        for flat in self.buckets:
            flat.free()
        self.in_backward = False

    def named_parameters(self, *args, **kwargs):
        """What an optimizer steps: this rank's flat shards, of 1-D parameters all."""
        return ((f"shard.{i}", flat.shard) for i, flat in enumerate(self.buckets))

    @torch.no_grad()
    def load(self, get):
        """Set every parameter to get(param, name), a whole tensor, of which this rank keeps its shard."""
        for name, param in self.module.named_parameters():
            flat = self.bucket_of[param]
            there, here = flat.overlap(param, flat.own)
            flat.shard[here] = get(param, name).reshape(-1)[there].to(flat.shard)


def fsdp_units(module):
    """[(module, parameters that its forward alone uses)]: what FSDP gathers at a time."""
    units, containers = [], (nn.ModuleList, nn.ModuleDict, nn.Sequential)

    def add_units(m, unit):
        lists = (nn.ParameterList, nn.ParameterDict)  # they have no forward of their own
        if unit is None and (m._parameters or any(isinstance(child, lists) for child in m.children())):
            unit = (m, [])
            units.append(unit)
        if unit:
            unit[1].extend(m.parameters(recurse=False))
        for child in m.children():
            if isinstance(m, containers) and not isinstance(child, containers):
                units.append((child, list(child.parameters())))
            else:
                add_units(child, unit)

    add_units(module, None)
    return units


# --------------------------------------------------------------------------------------------- tensor parallel: f and g
#
# Y = GeLU(X A) B. A is cut by columns, so each rank computes its slice of the hidden layer alone, GeLU included. B is
# cut by rows to match, so each rank has a full-size Y that is one term of the sum. One all-reduce adds them up:
#
#          ┌─ X ─ A_0 ─ GeLU ─ B_0 ─ Y_0 ─┐
#     X ─ f                                g ─ Y    f: forward nothing, backward all-reduce (all used X: dX adds up)
#          └─ X ─ A_1 ─ GeLU ─ B_1 ─ Y_1 ─┘        g: forward all-reduce, backward nothing (dY reaches each term as is)
#
# X is (BT, in), A (in, out). A layer's `weight` is A transposed, as in model.py. Attention is the same with heads for
# columns. A block sends 2 x 2(N-1)/N x BTC elements forward and as many backward. (The lecture's code all-gathers after
# every matrix. With B cut by rows, one all-reduce serves two matrices.) Until backward a rank keeps all of X and an Nth
# of the hidden layer. Shoeybi et al., "Megatron-LM" (2019); CS336 lecture 8.

class CopyToGroup(torch.autograd.Function):
    """f: forward identity, backward all-reduce: X went into every rank's columns of A, so dX adds up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)  # autograd needs a new tensor

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)  # because autograd may still need the incoming one
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromGroup(torch.autograd.Function):
    """g: forward all-reduce, backward identity: Y is a plain sum, so each term's gradient is dY."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Cut:
    """How a parameter is cut over a group, along `dim`. A rank gets its Nth; uneven sizes differ by one.

    parts=3: each third of the fused q, k, v matrix is cut by itself, so a rank gets its heads of q, of k and of v.
    """

    def __init__(self, group, dim, parts=1):
        self.group, self.dim, self.parts = group_or_world(group), dim, parts
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def part(self, full, rank=None):
        """What a rank, by default this one, has of the whole tensor."""
        rank = self.rank if rank is None else rank
        parts = [part.tensor_split(self.size, self.dim)[rank] for part in full.chunk(self.parts, self.dim)]
        return torch.cat(parts, self.dim)

    def first(self, rows):
        """The first of so many rows that this rank has."""
        return self.rank * (rows // self.size) + min(self.rank, rows % self.size)

    def gather(self, local, shape):
        """The whole tensor, of `shape`, on every rank of the group."""
        pieces = [self.part(torch.empty(shape, device="meta"), r) for r in range(self.size)]  # each rank's shape
        rows = local.new_zeros(self.size, max(p.numel() for p in pieces))  # padded, because the collective needs equals
        rows[self.rank, :local.numel()] = local.detach().reshape(-1)
        dist.all_gather_into_tensor(rows.view(-1), rows[self.rank], group=self.group)
        parts = [row[:p.numel()].view(p.shape).chunk(self.parts, self.dim) for row, p in zip(rows, pieces)]
        return torch.cat([torch.cat(ranks, self.dim) for ranks in zip(*parts)], self.dim)


class ColumnParallelLinear(Replaceable, nn.Module):
    """X (..., in) -> this rank's columns of X A + b, (..., out/N). Weight (out/N, in), bias (out/N)."""
    linear = staticmethod(kernels.linear)

    def __init__(self, layer, group, f, parts=1):
        super().__init__()
        self.group, self.f, cut = group, f, Cut(group, 0, parts)  # A's columns are the weight's rows
        self.weight, self.bias = local_parameter(layer.weight, cut), local_parameter(layer.bias, cut)

    def forward(self, x):
        return self.linear(self.f(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """This rank's slice of X (..., in/N) -> the whole X B + b (..., out). Weight (out, in/N), bias (out), not cut."""
    linear = staticmethod(kernels.linear)

    def __init__(self, layer, group, g):
        super().__init__()
        self.group, self.g = group, g
        self.weight, self.bias = local_parameter(layer.weight, Cut(group, 1)), layer.bias

    def forward(self, x):
        y = self.g(self.linear(x, self.weight, None), self.group)
        return y if self.bias is None else y + self.bias  # once, after the sum; dY, its gradient, is equal on all


class RowParallelExperts(nn.Module):
    """A RowParallelLinear of each expert, before g: rows (n, in/N) -> this rank's term of the sum (n, out). Weight
    (E, out, in/N), bias (E, out/N).

    A token's k outputs, biases included, are weighed and added before g. So each rank adds its Nth of the bias alone.
    """

    def __init__(self, layer, group):
        super().__init__()
        cut, out = Cut(group, 1), layer.bias.shape[1]
        self.weight, self.bias = local_parameter(layer.weight, Cut(group, 2)), local_parameter(layer.bias, cut)
        first = cut.first(out)
        self.zeros = first, out - first - self.bias.shape[1]  # how many before this rank's Nth, and behind it

    def forward(self, rows, counts):
        return kernels.grouped_linear(rows, self.weight, F.pad(self.bias, self.zeros), counts)


def between_f_and_g(experts, group, f, g):
    """Put f before and g after an `Experts`, in place. Tokens, choices and weights all go through f, because each rank
    has only a term of the weights' gradient, too."""
    forward = experts.forward
    experts.forward = lambda *inputs: g(forward(*(f(tensor, group) for tensor in inputs)), group)
    return experts


class VocabParallelEmbedding(nn.Module):
    """Token ids (...) -> embeddings (..., C). Each rank looks up the V/N rows of the table that it holds."""

    def __init__(self, embedding, group, g):
        super().__init__()
        self.group, self.g, cut = group, g, Cut(group, 0)
        self.weight = local_parameter(embedding.weight, cut)
        self.first = cut.first(embedding.num_embeddings)

    def forward(self, tokens):
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        x = x.masked_fill(elsewhere.unsqueeze(-1), 0)  # zero where another rank has the row
        return self.g(x, self.group)


def local_parameter(param, cut):
    """This rank's part of a parameter, which knows how it was cut."""
    if param is None:
        return None
    local = nn.Parameter(cut.part(param.detach()).contiguous(), param.requires_grad)
    local.__dict__.update(param.__dict__)
    local.cuts, local.split_over = cuts(param) + (cut,), split_over(param) + (cut.group,)
    return local


def cut_in_place(layer, cut):
    """Put this rank's parts of a layer's parameters in their places."""
    for leaf, param in list(layer.named_parameters()):
        setattr(layer, leaf, local_parameter(param, cut))
    return layer


def cuts(param):
    return getattr(param, "cuts", ())


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits (n, V/N), this rank's slice of the vocabulary, against targets (n).

    loss = log(sum exp z) - z_target: the maximum, the sum of exponentials and the target's logit are all-reduced, 3n
    elements in place of nV. Backward sends nothing: it is softmax minus one-hot, slice by slice.
    """

    @staticmethod
    def forward(ctx, logits, targets, group, first):
        z, local = logits if logits.stride(-1) == 1 else logits.contiguous(), targets - first
        mine, total, target = kernels.softmax_sums(z, local)  # (n) each; the target's is 0 where another rank has it
        top = mine.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
        sums = torch.stack([total * (mine - top).exp(), target])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(z, local, top, sums[0])
        return (sums[0].log() + (top - sums[1])).mean()

    @staticmethod
    def backward(ctx, grad):
        z, local, top, total = ctx.saved_tensors
        return kernels.softmax_minus_onehot(z.detach(), local, top, total, grad / len(z)), None, None, None


def cross_entropy(logits, targets, vocab_size, group=None):
    """Mean loss in nats of logits (B, T, V), or (B, T, V/N) of each rank of `group`, against targets (B, T)."""
    logits, targets = logits.flatten(0, 1), targets.flatten()
    if logits.shape[1] == vocab_size:
        return kernels.cross_entropy(logits, targets)
    return VocabParallelCrossEntropy.apply(logits, targets, group, Cut(group, 0).first(vocab_size))


def gpt2_plan(f, g):
    """How each layer of a GPT-2 is cut, with this f and g. What is not named (layer norms, positions) stays whole."""
    column, row = partial(ColumnParallelLinear, f=f), partial(RowParallelLinear, g=g)
    return {
        "wte": partial(VocabParallelEmbedding, g=g),
        "attn.c_attn": partial(column, parts=3),
        "attn.c_proj": row,
        "mlp.c_fc": column,
        "mlp.c_proj": row,
        "lm_head": column,
        "mlp.experts": partial(between_f_and_g, f=f, g=g),
        "experts.c_fc": lambda layer, group: cut_in_place(layer, Cut(group, 1)),  # (E, out/N, in) and bias (E, out/N)
        "experts.c_proj": RowParallelExperts,
    }


GPT2_PLAN = gpt2_plan(CopyToGroup.apply, ReduceFromGroup.apply)


def planned(name, plan):
    """What a plan does with the layer of this name; None: it stays whole."""
    return next((how for ending, how in plan.items() if ("." + name).endswith("." + ending)), None)


def tensor_parallel(module, group, plan=GPT2_PLAN):
    """Put this rank's slices in place of the layers that the plan names. N must divide the heads. Ties stay ties."""
    slices = {}  # weight -> its slice: a tied weight is cut once
    for name, layer in list(module.named_modules()):
        if how := planned(name, plan):
            new = how(layer, group)
            if hasattr(layer, "weight"):
                new.weight = slices.setdefault(layer.weight, new.weight)
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, new)
    return module


# ------------------------------------------------------------------------------ sequence parallel: f and g over tokens
#
# Between g and the next f every rank of the group keeps, norms and adds up the same (B, T, C). Cut over T, each does so
# for its own (B, T/N, C), and the two all-reduces are taken apart:
#
#     ... + ─ norm ─ f ─ A ─ GeLU ─ B ─ g ─ + ─ norm ─ f ...      f: forward all-gather, backward reduce-scatter
#      T/N tokens    │     T tokens     │    T/N tokens           g: forward reduce-scatter, backward all-gather
#
# That sends as many bytes as before, and each rank keeps an Nth of what lies outside of the products. A's layer keeps
# the T tokens that f has gathered, because dA = X^T dY needs them. A parameter that sees T/N tokens alone (of a norm, a
# bias added after g, positions) has a part of its gradient: the group must add the parts up, which `param.sums` says.
# Korthikanti et al., "Reducing Activation Recomputation" (2022). CS336 lecture 7, sequence parallelism.

def gather_tokens(x, group):
    """(B, T/N, C) of each rank -> (B, T, C)."""
    whole = x.new_empty(dist.get_world_size(group), *x.shape)                                 # (N, B, T/N, C)
    dist.all_gather_into_tensor(whole, x.contiguous(), group)
    return whole.transpose(0, 1).flatten(1, 2)


def scatter_tokens(x, group):
    """(B, T, C) of each rank, a term of a sum -> (B, T/N, C), this rank's tokens of the sum."""
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1).contiguous()     # (N, B, T/N, C)
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(mine, parts, group=group)
    return mine


class Trade(torch.autograd.Function):
    """Forward is there(x, group), backward is back(gradient, group)."""

    @staticmethod
    def forward(ctx, x, group, there, back):
        ctx.group, ctx.back = group, back
        return faster(there)(x, group)

    @staticmethod
    def backward(ctx, grad):
        return faster(ctx.back)(grad, ctx.group), None, None, None


def gathered(x, group):
    """f: (B, T/N, C) -> (B, T, C). Backward adds gradients up, because each token went into every rank's columns."""
    return Trade.apply(x, group, gather_tokens, scatter_tokens)


def scattered(x, group):
    """g: each rank's term of a sum, (B, T, C) -> its tokens of the sum, (B, T/N, C)."""
    return Trade.apply(x, group, scatter_tokens, gather_tokens)


def sequence_parallel(module, group):
    """Tensor parallelism of a GPT whose tokens are cut between its sublayers, in place. N must divide T."""
    tensor_parallel(module, group, gpt2_plan(gathered, scattered))
    for param in module.parameters():
        if all(cut.group != group for cut in cuts(param)):
            param.sums = sums(param) + (group,)
    positions = module.positions  # context parallelism may have cut the sequence before
    module.positions = lambda every: positions(every).chunk(dist.get_world_size(group))[dist.get_rank(group)]


# ----------------------------------------------------------------------------- context parallel: a sequence over ranks
#
# Each rank holds T/N tokens of every sequence, in all layers. Only attention looks at other ranks' tokens. In ring
# attention queries stay, and keys and values go round, N-1 times to the right. In step s a rank has those of rank r-s.
# Attention to these alone has the output O_s and for each query L_s, the log of its sum of exp scores. They are merged
# into O and L, those of all earlier steps (at first 0 and -inf):
#
#     L_new = log(exp L + exp L_s)        O_new = O exp(L - L_new) + O_s exp(L_s - L_new)
#
# Backward needs P = exp(S - L), S the scores and L that of all keys. So K and V go round again. Their dK and dV follow
# them, and each rank adds its part, until they are home. A rank sends (N-1)/N x 2BTC elements forward, as many
# backward, and as many again of dK and dV, in float32. (With tensor parallelism, C/tp stands for C.)
#
# A causal query sees earlier tokens only. If each rank held T/N neighbours, rank 0 would have nothing to do after step
# 0, and the last rank would work in every step. So rank r holds chunks r and 2N-1-r of 2N ("zigzag"), and all ranks
# have equal work in each step:
#
#     rank 0    chunks 0 and 7   step 0, own keys:          causal attention within the two chunks
#     rank 1           1     6   keys of an earlier rank:   all queries see the first chunk of keys, none the second
#     rank 2           2     5   keys of a later rank:      the second chunk of queries sees all keys, the first none
#     rank 3           3     4
#
# Ulysses is the other way: an all-to-all trades tokens for heads, (B, T/N, H, D) for (B, T, H/N, D), each rank computes
# ordinary attention for its heads, and a second all-to-all trades back. q, k, v and o make it
# (N-1)/N x 4BTC/N elements forward, as many backward. N must divide the heads.
# Liu et al., "Ring Attention" (2023); Jacobs et al., "DeepSpeed Ulysses" (2023).

def own_tokens(tokens, rank, n, kind, device="cpu"):
    """Which of a sequence's `tokens` a rank of n holds: int64 (T/N). n must divide tokens, 2n for a ring."""
    chunks = torch.arange(tokens, device=device).view(2 * n if kind == "ring" else n, -1)
    return torch.cat([chunks[rank], chunks[2 * n - 1 - rank]]) if kind == "ring" else chunks[rank]


def shift(tensor, group):
    """Send a tensor to the right rank, and return the left rank's."""
    rank, n, incoming = dist.get_rank(group), dist.get_world_size(group), torch.empty_like(tensor)
    for handle in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % n),
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % n)]):
        handle.wait()
    return incoming


def going_round(tensor, group):
    """Yields (rank, its tensor): this rank's, then in step s that of the rank s to its left."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    yield rank, tensor
    for s in range(1, n):
        tensor = shift(tensor, group)
        yield (rank - s) % n, tensor


def seen(rank, other, half):
    """Which queries of a rank see keys of `other`: (slice of queries, slice of keys, causal). half: tokens a chunk."""
    if other == rank:
        return slice(None), slice(None), True
    return (slice(None), slice(half), False) if other < rank else (slice(half, None), slice(None), False)


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries to all ranks' keys: qkv (B, T/N, 3, H, D) -> (B, T/N, H, D)."""

    @staticmethod
    def forward(ctx, qkv, group):
        q, *kv = qkv.permute(2, 0, 3, 1, 4)                                                   # (B, H, T/N, D)
        ctx.group, wide = group, torch.float64 if q.dtype == torch.float64 else torch.float32
        o, lse = q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:3], -math.inf, dtype=wide)  # lse (B, H, T/N)
        # This has S and P of a part in memory, (T/N, T/N) a head. Below the bar flash attention takes its place.
        attend = kernels.faster(kernels.attention_reference)
        for other, (k, v) in faster(going_round)(torch.stack(kv), group):
            rows, keys, causal = seen(dist.get_rank(group), other, q.shape[2] // 2)
            o_s, lse_s = attend(q[:, :, rows], k[:, :, keys], v[:, :, keys], causal)
            total = torch.logaddexp(lse[:, :, rows], lse_s)
            old, new = ((some - total).exp().unsqueeze(3) for some in (lse[:, :, rows], lse_s))
            o[:, :, rows] = o[:, :, rows] * old + o_s * new
            lse[:, :, rows] = total
        o = o.to(q.dtype)
        ctx.save_for_backward(qkv, o, lse)
        return o.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        qkv, o, lse = ctx.saved_tensors
        (q, *kv), do, rank = qkv.permute(2, 0, 3, 1, 4), do.transpose(1, 2).contiguous(), dist.get_rank(ctx.group)
        dq, dkv = torch.zeros_like(q, dtype=lse.dtype), 0  # dkv: as received, the sum of other ranks' parts
        for other, (k, v) in faster(going_round)(torch.stack(kv), ctx.group):
            rows, keys, causal = seen(rank, other, q.shape[2] // 2)
            dq_part, *part = kernels.faster(kernels.attention_backward_reference)(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], o[:, :, rows], lse[:, :, rows], do[:, :, rows], causal)
            dq[:, :, rows] += dq_part
            mine = torch.zeros(2, *k.shape, dtype=lse.dtype, device=k.device)                 # (2, B, H, T/N, D)
            mine[:, :, :, keys] = torch.stack(part).to(lse.dtype)
            if other == rank:
                own = mine  # the others' parts of this rank's dK and dV are received last
            else:
                dkv = shift(mine + dkv, ctx.group)
        return torch.stack([dq, *(own + dkv)]).to(qkv.dtype).permute(1, 3, 0, 2, 4), None     # as qkv


def heads_for_tokens(x, group):
    """(B, T/N, ..., H, D) -> (B, T, ..., H/N, D): this rank's heads of all tokens."""
    parts = x.unflatten(-2, (dist.get_world_size(group), -1)).movedim(-3, 0).contiguous()     # (N, B, T/N, ..., H/N, D)
    dist.all_to_all_single(whole := torch.empty_like(parts), parts, group=group)
    return whole.movedim(0, 1).flatten(1, 2)


def tokens_for_heads(x, group):
    """(B, T, ..., H/N, D) -> (B, T/N, ..., H, D): all heads of this rank's tokens."""
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0).contiguous()       # (N, B, T/N, ..., H/N, D)
    dist.all_to_all_single(whole := torch.empty_like(parts), parts, group=group)
    return whole.movedim(0, -3).flatten(-3, -2)


def ulysses_attention(qkv, group):
    """As RingAttention, but rank r holds T/N neighbours, from token r T/N on."""
    y = kernels.attention(Trade.apply(qkv, group, heads_for_tokens, tokens_for_heads))        # (B, T, H/N, D)
    return Trade.apply(y, group, tokens_for_heads, heads_for_tokens)


def context_parallel(module, group, kind):
    """Let a GPT compute with this rank's tokens alone, in place: `own_tokens` says which. kind: "ring", "ulysses"."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    attention = {"ring": faster(RingAttention).apply, "ulysses": ulysses_attention}[kind]
    if n == 1:
        return
    module.positions = lambda every: own_tokens(n * len(every), rank, n, kind, every.device)
    for block in module.h.values():
        block.attn.attention = lambda qkv: attention(qkv, group)


# ----------------------------------------------------------------- expert parallel: tokens travel to the chosen experts
#
# Experts are most of a model's parameters, and each token needs k of them. So N neighbours along dp share out the
# experts, E/N each; all other parameters lie on every rank. Each rank routes its own tokens. It sends every token as k
# rows, to the ranks that keep its experts, and gets the experts' outputs back:
#
#                        dispatch (permute)                                      combine (unpermute)
#     rank 0   tokens ─ router ─ sort ─┐ all-   ┌─ sort ─ experts 0, 1 ─ unsort ─┐ all-   ┌─ unsort ─ weigh, add up
#     rank 1   tokens ─ router ─ sort ─┘ to-all └─ sort ─ experts 2, 3 ─ unsort ─┘ to-all └─ unsort ─ weigh, add up
#
# Both sorts are by expert: the first puts rows for one rank side by side, the second rows for one expert. First the
# ranks exchange E counts, because each must know how many rows it will receive. Then there are four exchanges of rows:
# there and back, in forward and in backward. In each a rank sends (N-1)/N of its k B T rows of C elements, if the load
# is balanced.
#
# The same expert lies on dp/N x cp ranks, its copies. Each rank's loss is the mean over its own tokens, and a copy gets
# the tokens of N ranks, so it has the gradient of a sum of N losses. The gradient of the mean over all ranks is
# therefore the average over the copies, divided by N (`param.fed`).
# Lepikhin et al., "GShard" (2020); Fedus et al., "Switch Transformers" (2021).

def exchange(rows, group, sends, receives):
    """Send the first sends[0] of the rows (n, C) to rank 0, and so on. The result begins with receives[0] rows of rank
    0."""
    incoming = rows.new_empty(sum(receives), rows.shape[1])
    dist.all_to_all_single(incoming, rows.contiguous(), receives, sends, group)
    return incoming


def visit(mlps, group, rows, counts):
    """`Experts.mlps` of experts that lie on the ranks of a group: rows (R, C), sorted by expert, counts (E) -> (R, C).

    mlps: the same of this rank's E/N experts. The CPU must know how many rows are sent, so it waits for the GPU.
    """
    n = dist.get_world_size(group)
    dist.all_to_all_single(incoming := torch.empty_like(counts), counts, group=group)
    both = torch.stack([counts, incoming]).view(2, n, -1)                                     # (2, rank, expert)
    sends, receives = both.sum(2).tolist()                                                    # rows of each rank
    there, back = (partial(exchange, sends=a, receives=b) for a, b in ((sends, receives), (receives, sends)))
    y = faster(through_experts)(mlps, Trade.apply(rows, group, there, back), both[1])
    return Trade.apply(y, group, back, there)


def through_experts(mlps, rows, counts):
    """Rows (R, C) by rank of origin and then by expert, counts (N, E/N) of each -> (R, C) in the same order."""
    expert = torch.arange(counts.shape[1], device=rows.device).repeat(len(counts)).repeat_interleave(
        counts.flatten(), output_size=len(rows))                                              # of each row
    order = expert.argsort(stable=True)
    y = mlps(rows.index_select(0, order), counts.sum(0))
    return y.index_select(0, order.argsort())


def expert_parallel(module, group, copies):
    """Let each rank of the group keep E/N of a GPT's experts, in place. copies: the ranks that keep the same ones."""
    for experts in [part for part in module.modules() if isinstance(part, Experts)]:
        for layer in (experts.c_fc, experts.c_proj):
            for param in cut_in_place(layer, Cut(group, 0)).parameters():
                param.replicas, param.fed = copies, dist.get_world_size(group)
        experts.mlps = partial(faster(visit), experts.mlps, group)


# ------------------------------------------------------------------------------ pipeline: schedules as lists of actions
#
# Stage s holds a slice of the layers and runs on rank s mod p; a batch passes through in m micro-batches. A schedule
# is a list of actions for each rank, in the order in which it runs them. Functions below write lists, `lower` adds the
# transfers, `check` proves that they can run, and `Pipeline` runs them.
#
#     F   forward of one micro-batch through one stage
#     B   backward = I, then W:   I gradient of the input (the paper's B), which the stage before waits for
#                                 W gradient of the weights, which nobody waits for
#
# Idle time of every rank, with F = I = W = 1 (CS336 lecture 7; Qi et al., "Zero Bubble Pipeline Parallelism", 2023):
#
#     GPipe, 1F1B       (p-1) (F + I + W)         GPipe holds m micro-batches' activations, 1F1B p - rank
#     interleaved       (p-1) (F + I + W) / v     v stages a rank, each 1/v as long; holds p + (p-1 - 2 rank) / v
#     ZB-H1             (p-1) (F + I - W)         rank r runs W r micro-batches late; at most p activations a rank

class Action(NamedTuple):
    kind: str           # "F", "B", "I", "W"; after `lower` also SF, RF: send, receive an activation; SB, RB: a gradient
    stage: int
    micro_batch: int

    def __str__(self):
        return f"{self.kind}{self.micro_batch}"


def gpipe(p, m, v=1):
    """All forwards, then all backwards. Huang et al., "GPipe" (2019)."""
    return [[Action("F", r, i) for i in range(m)] + [Action("B", r, i) for i in range(m)] for r in range(p)]


def take_turns(forwards, ahead, backwards):
    """First `ahead` forwards. Then in turn one forward, while any is left, and one backward, a list of actions."""
    actions = forwards[:ahead]
    for k, backward in enumerate(backwards):
        actions += forwards[ahead + k:ahead + k + 1] + backward
    return actions


def one_f_one_b(p, m, v=1):
    """Rank r runs p-1-r forwards ahead, then one forward, one backward, in turn: at most p-r activations, whatever m.

    A micro-batch goes through p-1-r more ranks and back, so its B ends p-r turns (F + B) after its F began. So p-r
    micro-batches keep the rank busy. Narayanan et al., "PipeDream-2BW" (2020), call it PipeDream-Flush.
    """
    return [take_turns([Action("F", r, i) for i in range(m)], p - 1 - r, [[Action("B", r, i)] for i in range(m)])
            for r in range(p)]


def interleaved(p, m, v):
    """1F1B with v stages a rank: stage c p + r is rank r's c-th. Narayanan et al., "Megatron-LM" (2021).

    Micro-batches go through in groups of p, each group through all v stages before the next: p must divide m. Rank r
    runs ahead by (v-1) p forwards, until its last stage begins, and by 2 more for each of the p-1-r later
    ranks, as Megatron does.
    """
    if v == 1:
        return one_f_one_b(p, m)
    if m % p:
        raise ValueError(f"an interleaved schedule of {p} ranks needs micro-batches in multiples of {p}, not {m}")

    def rank(r):
        turns = [(k // p % v, k // (p * v) * p + k % p) for k in range(m * v)]  # (which of its stages, micro-batch)
        return take_turns([Action("F", c * p + r, i) for c, i in turns], 2 * (p - 1 - r) + (v - 1) * p,
                          [[Action("B", (v - 1 - c) * p + r, i)] for c, i in turns])  # backward: the last stage first
    return [rank(r) for r in range(p)]


def zero_bubble_h1(p, m, v=1):
    """1F1B with backward in two: rank r puts W off by r micro-batches, so that it sends the result of I earlier."""
    def rank(r):
        put_off = [[Action("W", r, i - r)] if i >= r else [] for i in range(m + r)]
        backwards = [[Action("I", r, i)] + put_off[i] for i in range(m)]
        return take_turns([Action("F", r, i) for i in range(m)], p - 1 - r, backwards) + sum(put_off[m:], [])
    return [rank(r) for r in range(p)]


def stages_of(lists):
    return 1 + max(action.stage for actions in lists for action in actions)


def needs(action, stages, listed):
    """The actions whose results an action computes with. listed: all actions, for the next stage may run B, or I and W,
    whichever this one runs."""
    kind, s, i = action
    if kind == "F":
        return [Action("F", s - 1, i)] if s else []
    if kind == "W":
        return [Action("I", s, i)]
    later = Action("B" if Action("B", s + 1, i) in listed else "I", s + 1, i)
    return [Action("F", s, i)] + ([later] if s + 1 < stages else [])


def other_end(transfer):
    """The receive that takes what this sends, or the send that fills what this receives."""
    kind, s, i = transfer
    return Action({"S": "R", "R": "S"}[kind[0]] + kind[1], s + (1 if kind in ("SF", "RB") else -1), i)


class ScheduleError(ValueError):
    """A schedule that cannot run. Its text is the grid, with an arrow at the cell of each rank that is stuck."""

    def __init__(self, lists, at, why):
        rows = [f"rank {r}  " + " ".join(("->" if i == at[r] else "") + str(a) for i, a in enumerate(actions))
                + (" -> end" if at[r] >= len(actions) else "") for r, actions in enumerate(lists)]
        super().__init__(why + "\n" + "\n".join(rows))


def walk(lists, ready, stuck):
    """Go through all ranks' lists together. Each turn yields [(rank, action)]: the next action of each rank that is
    ready(action, done, heads). done: the actions of earlier turns; heads: the next of each rank. Raises
    ScheduleError(stuck) if no rank is ready."""
    at, done = [0] * len(lists), set()
    while heads := {actions[i]: r for r, (actions, i) in enumerate(zip(lists, at)) if i < len(actions)}:
        now = [(r, action) for action, r in heads.items() if ready(action, done, heads)]
        if not now:
            raise ScheduleError(lists, at, stuck)
        yield now
        for r, action in now:
            done.add(action)
            at[r] += 1


def in_order(lists):
    """[(rank, action)] of lists without transfers, each after what it needs."""
    stages, listed = stages_of(lists), set().union(*lists)
    for now in walk(lists, lambda action, done, _: done.issuperset(needs(action, stages, listed)),
                    "needs what comes later"):
        yield from now


def lower(lists):
    """Add the transfers: an output that another rank needs is sent as soon as it is made. The send is appended to its
    rank's list, the receive to the other's, after all that the other has run so far. So both see their transfers in
    the same order, and do not wait for each other."""
    p, stages, lowered = len(lists), stages_of(lists), [[] for _ in lists]
    for r, action in in_order(lists):
        lowered[r].append(action)
        send = Action("SF" if action.kind == "F" else "SB", action.stage, action.micro_batch)
        receive = other_end(send)
        if action.kind != "W" and 0 <= receive.stage < stages and receive.stage % p != r:
            lowered[r].append(send)
            lowered[receive.stage % p].append(receive)
    return lowered


def check(lists):
    """Prove that lowered lists can run: raises ScheduleError unless each stage runs F and B (or F, I and W) of each
    micro-batch once, on its rank, after what they need, each receive has its send, and there is no deadlock even if
    each send waits for its receive."""
    p, stages, listed = len(lists), stages_of(lists), set()
    for r, actions in enumerate(lists):
        for i, action in enumerate(actions):
            at = [i if q == r else -1 for q in range(p)]
            if action.stage % p != r:
                raise ScheduleError(lists, at, f"{action} of stage {action.stage} does not live on rank {r}")
            if action in listed:
                raise ScheduleError(lists, at, f"{action} is there twice")
            listed.add(action)
    for s, i in itertools.product(range(stages), {action.micro_batch for action in listed}):
        if "".join(kind for kind in "FBIW" if Action(kind, s, i) in listed) not in ("FB", "FIW"):
            why = f"stage {s}, micro-batch {i}: F and B, or F, I and W, must each be there"
            raise ScheduleError(lists, [-1] * p, why)

    def ready(action, done, heads):
        kind, s, i = action
        if kind[0] in "SR":  # a rank at a transfer waits until the other rank is at the same one
            send = action if kind[0] == "S" else other_end(action)
            made = any(Action(k, send.stage, i) in done for k in ("F" if kind[1] == "F" else "BI"))
            return made and send in heads and other_end(send) in heads
        received = "RF" if kind == "F" else "RB"
        return all((n if n.stage % p == s % p else Action(received, s, i)) in done
                   for n in needs(action, stages, listed))

    for _ in walk(lists, ready, "deadlock: no rank can go on"):
        pass


# --------------------------------------------------------------------------------------------- pipeline: running a list

class WeightGradients:
    """Computes the weight gradients of a stage's Linears, dW = dy^T x and db, which no other stage waits for."""
    put_off = None  # a list: it gets functions that compute them, for a "W" to call; None: they are computed at once

    def take(self, weight, bias, dy, x):
        @torch.no_grad()
        def gradients():
            if weight.requires_grad:
                self.add(weight, dy.T, x)
            if bias is not None and bias.requires_grad:
                self.add(bias, kernels.faster(kernels.bias_gradient)(dy))
        gradients() if self.put_off is None else self.put_off.append(gradients)

    def add(self, param, a, b=None):
        """What autograd does at the end of a backward: add a gradient, or the product a b, to .grad; call the hooks."""
        grad = a if b is None else a @ b
        param.grad = grad if param.grad is None else param.grad.add_(grad)
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            hook(param)


def split_linears(module):
    """Let every Linear of the module leave its weight gradients to the WeightGradients that this returns. Autograd sees
    detached weights, so its hooks do not fire before the weight gradient exists. Norms, embeddings and tied weights
    stay with autograd, in "I"."""
    weight_gradients = WeightGradients()

    def linear(product, x, weight, bias=None):
        if not x.requires_grad:  # all before it is frozen, so nothing detached would have a backward
            return product(x, weight, bias)
        return product(x, weight.detach(), None if bias is None else bias.detach(),
                       partial(weight_gradients.take, weight, bias))

    owners = Counter(param for layer in module.modules() for param in layer._parameters.values())
    for layer in module.modules():
        if isinstance(layer, (Linear, ColumnParallelLinear, RowParallelLinear)) and owners[layer.weight] == 1:
            layer.linear = partial(linear, layer.linear)
    return weight_gradients


def even_pieces(config, stages):
    """The L+2 pieces of a GPT cut into `stages` runs of about equal length: [range, ...]."""
    starts = [(config.n_layer + 2) * stage // stages for stage in range(stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


class Passage:
    """One micro-batch's way through one stage: forward, later backward "B", or in its halves "I" and "W".

    In between it holds the input, and the output's edge in autograd's graph. The output itself may go.
    """

    def __init__(self, module, loss, weight_gradients):
        self.module, self.loss, self.weight_gradients, self.put_off = module, loss, weight_gradients, []

    def forward(self, x, target=None):
        """x: tokens (B, T), or the output of the stage before. Returns this stage's, or the loss, detached."""
        self.x = x.requires_grad_() if x.is_floating_point() and torch.is_grad_enabled() else x
        y = self.module(self.x)
        y = self.loss(y, target) if self.loss else y
        self.edge = get_gradient_edge(y) if torch.is_grad_enabled() else None
        return y.detach()

    def backward(self, kind, dy=None):
        """dy: the gradient of what forward returned. Returns that of x; parameters' are added to .grad."""
        if kind == "W":
            for gradients in self.put_off:
                gradients()
            return None
        self.weight_gradients.put_off = self.put_off if kind == "I" else None
        dx = self.gradients(dy)
        self.weight_gradients.put_off = None
        return dx

    def gradients(self, dy):
        torch.autograd.backward(self.edge, dy)
        return self.x.grad


class Pipeline(Replaceable):
    """Runs any lowered list of actions on this rank's stages. One stage and no transfers is ordinary training.

    stages: {stage: module}, of `count` on all ranks. loss(output, target): the last stage's. dtype, width: of what is
    sent between stages, activations and their gradients (B, T / cut, width).
    """

    def __init__(self, stages, count, mesh, loss, dtype, width, device, cut=1):
        self.stages, self.count, self.loss = stages, count, loss
        self.dtype, self.width, self.device, self.cut = dtype, width, device, cut
        self.p, self.group, self.split = mesh.shape[0], mesh["pp"].get_group(), False
        self.weight_gradients = dict.fromkeys(stages, WeightGradients())  # unused until a schedule splits a backward

    def run(self, actions, x, y, scale=1.0, syncs=None):
        """x, y: tokens and targets of each micro-batch, (B, T). Returns the losses, detached, on the last stage.

        Backward starts from `scale` times their mean. syncs: {stage: what has the no_sync() for all backwards but the
        last}; None for forwards alone.
        """
        self.begin(actions, x, y, scale, syncs)
        for action in actions:
            self.do(action)
        for handle, _ in self.sending:
            handle.wait()
        return self.losses

    def do(self, action):
        methods = {"F": self.forward, "SF": self.send, "SB": self.send, "RF": self.expect, "RB": self.expect}
        methods.get(action.kind, self.backward)(action)  # B, I and W are all parts of backward

    def begin(self, actions, x, y, scale, syncs):
        self.x, self.y, self.scale = x, y, scale / len(x)
        self.shape = len(x[0]), x[0].shape[1] // self.cut, self.width
        self.values = {}  # receive -> (handle, tensor) that it fills, or that a stage here has made for another stage
        self.passages, self.losses, self.sending = {}, [], deque()
        self.syncs, self.last = syncs, {(action.kind, action.stage): action for action in actions}
        if any(action.kind == "I" for action in actions):
            self.split_backward()

    def split_backward(self):
        """From now on, weight gradients can be put off. Once, for all stages."""
        if not self.split:
            self.split, self.weight_gradients = True, {s: split_linears(module) for s, module in self.stages.items()}

    def expect(self, receive):
        """Post a receive into a new buffer, which `take` hands out. All transfers go through one group. NCCL runs those
        of a group one after the other; that cannot hang, because `lower` gives both ends the same order."""
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        handle = dist.irecv(buffer, group=self.group, group_src=other_end(receive).stage % self.p)
        self.values[receive] = handle, buffer

    def take(self, receive):
        """What a stage computes with, received or made by another stage of this rank."""
        handle, tensor = self.values.pop(receive)
        handle.wait()
        return tensor

    def send(self, action):
        receive = other_end(action)
        _, tensor = self.values.pop(receive)
        handle = dist.isend(tensor, group=self.group, group_dst=receive.stage % self.p)
        self.sending.append((handle, tensor))

    def forward(self, action):
        _, s, i = action
        passage = self.passage(action)
        out = passage.forward(self.x[i] if s == 0 else self.take(Action("RF", s, i)), self.y[i])
        if s == self.count - 1:
            self.losses.append(out)
        else:
            self.values[Action("RF", s + 1, i)] = dist.Handle(), out
        if torch.is_grad_enabled():
            self.passages[s, i] = passage

    def passage(self, action):
        s = action.stage
        return Passage(self.stages[s], self.loss if s == self.count - 1 else None, self.weight_gradients[s])

    def backward(self, action):
        kind, s, i = action
        passage = self.passages[s, i] if kind == "I" else self.passages.pop((s, i))
        if kind == "W":
            dy = None
        elif s == self.count - 1:
            dy = torch.full((), self.scale, dtype=self.losses[0].dtype, device=self.device)
        else:
            dy = self.take(Action("RB", s, i))
        with nullcontext() if self.last[kind, s] == action else self.syncs[s].no_sync():
            dx = passage.backward(kind, dy)
        if s and kind != "W":
            self.values[Action("RB", s - 1, i)] = dist.Handle(), dx


# ----------------------------------------------------------------------------------------------------------------- norm

def copies(param, groups):
    """On how many ranks of the groups the same gradient of a parameter lies."""
    size, over = dist.get_world_size, split_over(param)
    again = [group for group in sums(param) if inside(group, over)]  # the sum made their gradients equal
    return math.prod(map(size, groups)) * math.prod(map(size, again)) // math.prod(map(size, over))


def inside(group, groups):
    """Whether one of `groups` has all ranks of a group."""
    ranks = torch.distributed.get_process_group_ranks
    return any(set(ranks(group)) <= set(ranks(other)) for other in groups)


def clip_grad_norm_(parameters, max_norm, groups=(), scale=1.0):
    """Scale all gradients so that their norm over the whole model is at most max_norm (0: leave them); returns the
    norm, float64. Call it after finish_grad_sync, on all ranks.

    Every rank adds up the squares of its gradients, each divided by the number of ranks that hold the same one. This
    number is all-reduced over each group in turn, so each element of the model counts once. dp 2, tp 2, pp 2, ZeRO-1:

        on a rank                          cut over      copies    added by all 8 ranks
        shard of a matrix of stage 0       dp, tp, pp    1         8 different parts, of stage 0 and of stage 1
        shard of a norm's weight           dp, pp        2 (tp)    each part twice, halved
        shard of the tied embedding        dp, tp, pp    2 (sums)  stages 0 and 1 hold the same, halved

    groups: all that parameters may be cut over; ValueError where one is missing. scale: fp16's, divided out first.
    """
    groups = list(map(group_or_world, groups))
    parameters = list(dict.fromkeys(p for p in parameters if p.grad is not None))
    over = {group for p in parameters for group in split_over(p) if dist.get_world_size(group) > 1}
    if not all(inside(group, groups) for group in over):
        raise ValueError("clip_grad_norm_: a parameter is cut over a group that is not in `groups`")
    if scale != 1 and parameters:
        torch._foreach_mul_([p.grad for p in parameters], 1 / scale)
    grads = defaultdict(list)
    for p in parameters:
        grads[copies(p, groups)].append(p.grad)
    square = torch.zeros((), dtype=torch.float64, device=parameters[0].device if parameters else None)
    for n, some in grads.items():
        square += torch.nn.utils.get_total_norm(some).double().square() / n
    for group in groups:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(square, group=group)
    norm = square.sqrt()
    if max_norm and parameters:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


# --------------------------------------------------------------------------------------------------------------- recipe

SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-h1": zero_bubble_h1}


def parallelize(config, mesh, device, dtype=torch.float32, source=None, seed=0, zero=0, reduce_dtype=None,
                recompute="none", virtual_stages=1, zero_within=None, sequence=False, context="ring", ep=1):
    """Build the GPT of `config` on this rank, laid out over the mesh; returns a ParallelGPT.

    dtype: what layers compute in; bf16 and fp16 keep float32 masters, and gradients are sent in float32 or
    `reduce_dtype`. source(name) gives a parameter's whole initial value; left out, seed and name decide it. zero: the
    ZeRO stage, over dp x cp, or each `zero_within` neighbours of them. recompute: "block" or "attention" is run again
    in backward, not kept. sequence: tp cuts the tokens, too. context: "ring" or "ulysses", for cp. ep: ranks of dp that
    share out the experts. The order of the five steps matters.
    """
    if virtual_stages > 1 and mesh.shape[0] == 1:
        raise ValueError(f"virtual_stages {virtual_stages} needs a pipeline of at least 2 ranks: give 1")
    groups = make_groups(mesh, zero_within, ep, config.tied)
    p, master = mesh.shape[0], master_dtype(dtype)
    source = source or (lambda name: initial_weight(config, name, seed))
    stages, pieces_of = {}, faster(even_pieces)(config, p * virtual_stages)
    for stage in range(dist.get_rank(groups.pp), len(pieces_of), p):  # rank r has stages r, r + p, ...
        # 1. Shapes without memory, of this stage's layers, because a whole layer may not fit on one rank.
        model = GPT(config, seed=None, pieces=pieces_of[stage])
        # 2. Cut the layers, because what follows must see this rank's parameters.
        cut_layers(model, groups, sequence, context)
        # 3. What to run again in backward. ZeRO-3's hooks go around it, so that the second run finds whole weights.
        for block in model.h.values() if recompute != "none" else ():
            layer = block if recompute == "block" else block.attn
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        # 4. Weights, one parameter at a time, of which each rank keeps its part: the same numbers in every layout.
        if zero == 3:
            materialize_buffers(model.to(master), source, device)
            model = FSDP(model, groups.within, dtype, reduce_dtype, device, groups.between)
            model.load(lambda param, name: cut_like(param, source(name)))
        else:
            materialize(model, source, device, master, cut_like)
        # 5. Data parallel last, because steps 2 and 4 put new parameters in place of the old. (ZeRO-3 stands in step 4,
        # ZeRO-1 and ZeRO-2 and float32 masters in `make_optimizer`.)
        if zero == 0 and dtype == master and not reduce_dtype:
            model = DDP(model, groups.replicas)
        stages[stage] = model
    return ParallelGPT(config, mesh, groups, device, dtype, stages, pieces_of, zero, reduce_dtype, sequence, context)


def cut_layers(model, groups, sequence, context):
    """Over cp, ep and tp, in place; and mark what the pipeline has cut."""
    context_parallel(model, groups.cp, context)
    if groups.ep:
        expert_parallel(model, groups.ep, groups.same_experts)
    if dist.get_world_size(groups.tp) > 1:
        (sequence_parallel if sequence else tensor_parallel)(model, groups.tp)
    if dist.get_world_size(groups.pp) > 1:
        for name, param in model.named_parameters():
            param.split_over = split_over(param) + (groups.pp,)
            # The first and the last stage have a tied weight. Both start alike and step alike: their gradients add up.
            if model.config.tied and name in ("wte.weight", "lm_head.weight"):
                param.sums = sums(param) + (groups.ends,)


def cut_like(param, whole):
    """This rank's part of a whole tensor, where expert and tensor parallelism cut the parameter."""
    for cut in cuts(param):
        whole = cut.part(whole)
    return whole


def gather_cuts(param, local, shape):
    """The whole tensor, of `shape`, on all ranks that the parameter is cut over."""
    whole = [torch.empty(shape, device="meta")]  # before each cut, for its shape
    for cut in cuts(param):
        whole.append(cut.part(whole[-1]))
    for cut, before in reversed([*zip(cuts(param), whole)]):
        local = cut.gather(local, before.shape)
    return local


class ParallelGPT(Replaceable):
    """This rank's part of a GPT: `stages` {stage: module}, and what a training loop does with them.

        net = parallelize(config, mesh, device, ...)
        optimizer = net.make_optimizer(torch.optim.AdamW, weight_decay=0.1, lr=1e-3)
        optimizer.zero_grad()
        loss = net.forward_backward(x, y, "1f1b")          x, y: this rank's micro-batches
        norm = net.clip_grad_norm_(1.0); optimizer.step()
    """

    def __init__(self, config, mesh, groups, device, dtype, stages, pieces_of, zero, reduce_dtype, sequence, context):
        self.config, self.mesh, self.device, self.dtype = config, mesh, device, dtype
        self.stages, self.count, self.zero, self.reduce_dtype = stages, len(pieces_of), zero, reduce_dtype
        vars(self).update(vars(groups))  # self.pp, self.dp, self.replicas, ...
        self.groups = [*dict.fromkeys(vars(groups).values()), None]  # None: all ranks
        self.counted = [self.replicas, self.pp] + [self.tp] * sequence  # whose ranks have routed different tokens
        self.routers = {i: router for stage in stages for i, router in routers(self.module(stage)).items()}
        self.p, self.context = mesh.shape[0], context
        self.owners = {}  # name -> the stage that has it; of a tied weight, the first
        for stage, pieces in enumerate(pieces_of):
            model = GPT(config, seed=None, pieces=pieces)
            for name, _ in [*model.named_parameters(), *model.named_buffers()]:
                self.owners.setdefault("wte.weight" if config.tied and name == "lm_head.weight" else name, stage)
        self.pipeline = Pipeline(stages, len(pieces_of), mesh, self.loss, dtype, config.n_embd, torch.device(device),
                                 mesh["tp"].size() if sequence else 1)
        wrapped = [model for model in stages.values() if isinstance(model, FSDP)]
        self.bucket_of = {param: bucket for model in wrapped for param, bucket in model.bucket_of.items()}

    def make_optimizer(self, optimizer_class, weight_decay=0.0, **kwargs):
        """An optimizer over this rank's parameters or shards, with weight decay on matrices only."""
        groups = []
        for model in self.stages.values():  # each has its own groups, so that no bucket waits for two stages
            for matrix, decay in (False, 0.0), (True, weight_decay):
                params = [p for p in model.parameters() if is_matrix(p) == matrix]
                groups += [{"params": params, "weight_decay": decay}] if params else []
        if all(isinstance(model, (DDP, FSDP)) for model in self.stages.values()):
            # syncs: by stage, what has no_sync and finish_grad_sync
            self.optimizer, self.syncs = optimizer_class(groups, **kwargs), self.stages
            self.params = [p for group in groups for p in group["params"]]
            self.reducers = [reducer for model in self.stages.values() for reducer in model.reducers]
        else:
            self.optimizer = ShardedOptimizer(groups, optimizer_class, self.within, self.zero, None, self.dtype,
                                              self.reduce_dtype, self.between, **kwargs)
            self.params, self.syncs = self.optimizer.shards, dict.fromkeys(self.stages, self.optimizer)
            self.bucket_of, self.reducers = self.optimizer.reducer.bucket_of, [self.optimizer.reducer]
        return self.optimizer

    def actions(self, schedule, m):
        """This rank's lowered list, of a schedule that is checked first; "forward" runs no backward."""
        if schedule == "forward":
            lists = lower([[Action("F", s, i) for s in range(r, self.count, self.p) for i in range(m)]
                           for r in range(self.p)])
        else:
            lists = lower(SCHEDULES[schedule](self.p, m, self.count // self.p))
            check(lists)
            if stages_of(lists) != self.count:
                raise ValueError(f"schedule {schedule} runs one stage a rank: give virtual_stages 1")
        return lists[self.mesh.get_coordinate()[0]]

    def loss(self, logits, targets):
        return cross_entropy(logits, targets, self.config.vocab_size, self.tp)

    def forward_backward(self, x, y, schedule="1f1b", scale=1.0):
        """One step's gradients, after zero_grad: of `scale` times the mean loss over micro-batches x, y, lists of
        (B, T), and over replicas. Returns the mean loss of this rank's own tokens, on every rank of the pipeline."""
        for router in self.routers.values():
            router.load = 0
        loss = self.run(x, y, schedule, scale, self.syncs)
        for sync in dict.fromkeys(self.syncs.values()):
            sync.finish_grad_sync()
        self.add_up_gradients()
        return loss

    @torch.no_grad()
    def add_up_gradients(self):
        """Over `param.sums`. Last, because shards are small."""
        for param in self.params:
            for group in sums(param):
                dist.all_reduce(param.grad, group=group)

    @torch.no_grad()
    def balance(self, rate):
        """After the optimizer's step: move the routers' biases against the load of the last forward_backward. Returns
        how often all ranks chose each expert, int64 (L, E), 0 in blocks without experts."""
        loads = torch.zeros(self.config.n_layer, self.config.experts, dtype=torch.int64, device=self.device)
        for i, router in self.routers.items():
            loads[i] = router.load
        for group in self.counted:
            dist.all_reduce(loads, group=group)
        for i, router in self.routers.items():
            router.balance(loads[i], rate)
        return loads

    @torch.no_grad()
    def forward(self, x, y):
        """The mean loss over micro-batches, with no gradients."""
        return self.run(x, y, "forward", 1.0, None)

    def run(self, x, y, schedule, scale, syncs):
        if (n := dist.get_world_size(self.cp)) > 1:
            own = own_tokens(x[0].shape[1], dist.get_rank(self.cp), n, self.context, x[0].device)
            x, y = ([tokens[:, own] for tokens in some] for some in (x, y))
        losses = self.pipeline.run(self.actions(schedule, len(x)), x, y, scale, syncs)
        total = torch.zeros((), dtype=master_dtype(self.dtype), device=self.device)
        for loss in losses:
            total += loss / len(x)
        if self.p > 1:
            dist.all_reduce(total, group=self.pp)  # the other stages have none
        return total

    def clip_grad_norm_(self, max_norm, scale=1.0):
        """As the function of this name, over the whole model."""
        return clip_grad_norm_(self.params, max_norm, [None], scale)

    def module(self, stage):
        """A stage without its DDP or FSDP."""
        return getattr(self.stages[stage], "module", self.stages[stage])

    def kept(self, stage, name):
        """(a parameter of this rank, what the optimizer steps for it, their bucket, or None if both are one)"""
        param = self.module(stage).get_parameter(name)
        bucket = self.bucket_of.get(param)
        return param, bucket.shard if bucket else param, bucket

    @torch.no_grad()
    def whole_parameter(self, name, key=None):
        """A parameter as one process would hold it, in the master dtype; with `key`, what the optimizer keeps of it
        (zeros before its first step); or a buffer. Gathered from the bucket's ranks, then the cuts'; then its stage
        sends to all. Call it on all ranks."""
        owner, is_buffer = self.owners[name], name in buffers(self.config)
        shape = {**shapes(self.config), **buffers(self.config)}[name]
        dtype = torch.float32 if is_buffer else master_dtype(self.dtype)
        local = torch.empty(shape, dtype=dtype, device=self.device)
        if owner in self.stages and is_buffer:
            local = self.module(owner).get_buffer(name)
        elif owner in self.stages:
            param, stepped, bucket = self.kept(owner, name)
            local = stepped.detach()
            if key is not None:
                local = self.optimizer.state.get(stepped, {}).get(key, torch.zeros_like(stepped))
            local = bucket.gather_one(param, local) if bucket else local
            local = gather_cuts(param, local, shape)
        if self.p > 1:
            local = local.clone()
            dist.broadcast(local, group=self.pp, group_src=owner % self.p)
        return local

    @torch.no_grad()
    def load_state(self, name, key, whole):
        """Let the optimizer keep under `key` this rank's part of `whole`, of a parameter's shape."""
        names = {self.owners[name]: name}
        if self.config.tied and name == "wte.weight":
            names.setdefault(self.count - 1, "lm_head.weight")
        for stage in names.keys() & self.stages.keys():
            param, stepped, bucket = self.kept(stage, names[stage])
            there, here = bucket.overlap(param, bucket.own) if bucket else (slice(None), slice(None))
            kept = self.optimizer.state[stepped].setdefault(key, torch.zeros_like(stepped))
            kept.view(-1)[here] = cut_like(param, whole).reshape(-1)[there].to(kept)


# ============================================================ machinery: the same results, faster or safer ============

import argparse
import functools
import os
import time
from contextlib import contextmanager

from model import PRESETS, GPTConfig, count_of_each

BUCKET_MB["cuda"] = 100  # larger than on a CPU, because a GPU's links are faster, but their latency is not shorter


# ----------------------------------------------------------------------------- gradients sent while backward still runs

class Early:
    """Sends a bucket as soon as its last gradient is computed, so that its traffic overlaps the rest of backward.

    Stages 0 and 1 send in the step's last backward, stage 2 in every backward. Buckets leave in one fixed order on all
    ranks, even if ranks have used different parameters. Stage 2 has at most two buckets under way, so full gradients
    cost the memory of these two and of the next one. A micro-batch's last two arrive in the next backward or `finish`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.place = {bucket: i for i, bucket in enumerate(self.buckets)}
        self.syncing, self.under_way = True, deque()  # whether this backward sends; (bucket, handle, message, average)
        self.restart()

    def restart(self):
        self.next, self.ready = 0, set()  # the index of the bucket that leaves next; the buckets that are complete
        self.waiting = {bucket: set(bucket.params) for bucket in self.buckets}  # gradients not computed yet

    def computed(self, param):
        bucket = self.bucket_of[param]
        if self.stage < 2 and self.place[bucket] < self.next:
            raise RuntimeError("a second backward before finish_grad_sync(), or one after a backward that raised: run "
                               "all but the last one under no_sync(); after an error, call zero_grad() of the model, "
                               "or of the ShardedOptimizer")
        super().computed(param)
        if self.stage < 2 and self.syncing:
            self.waiting[bucket].discard(param)
            if not self.waiting[bucket]:
                self.ready.add(bucket)
        while self.next < len(self.buckets) and self.buckets[self.next] in self.ready:
            self.leave()

    @contextmanager
    def no_sync(self):
        before, self.syncing = self.syncing, self.stage == 2
        try:
            with super().no_sync():
                yield
        finally:
            self.syncing = before

    @torch.no_grad()
    def collect(self, bucket):
        fresh = bucket.total is None
        if not fresh and all(param.grad is None for param in bucket.params):
            return  # all were moved before, by `complete`, `no_sync` or a CUDA graph
        if fresh:
            bucket.total = torch.empty(bucket.numel, dtype=self.total_dtype(bucket), device=bucket.device)
            bucket.total[sum(p.numel() for p in bucket.params):] = 0  # the padding
        views = bucket.views(bucket.total)
        if some := [(view, p.grad) for view, p in zip(views, bucket.params) if p.grad is not None]:
            (torch._foreach_copy_ if fresh else torch._foreach_add_)(*map(list, zip(*some)))
        for view, param in zip(views, bucket.params):
            if fresh and param.grad is None:
                view.zero_()
            param.grad = None

    def leave(self):
        bucket = self.buckets[self.next]
        self.ready.discard(bucket)
        self.collect(bucket)
        self.under_way.append((bucket, *self.start(bucket)))
        self.next += 1

    def start(self, bucket):
        if dist.get_world_size(bucket.group) > 1 or bucket.between:
            return super().start(bucket)
        message = self.message(bucket)
        return SimpleNamespace(wait=lambda: None), message, message

    @torch.no_grad()
    def receive(self):
        bucket, handle, _, average = self.under_way.popleft()
        handle.wait()
        self.store(bucket, average)

    def finish(self):
        while self.next < len(self.buckets):
            self.leave()
        while self.under_way:
            self.receive()
        self.restart()

    def forget(self):
        """Drop the gradients of an unfinished step, for example after its backward raised. Call it on all ranks."""
        while self.under_way:
            self.under_way.popleft()[1].wait()
        for bucket in self.buckets:
            bucket.total = None
            for param in bucket.params:
                param.grad = None
        self.restart()


class HookedReducer(Reducer):
    """A Reducer for which autograd calls computed(param) as soon as that parameter's gradient is there."""
    stage = 0  # ZeRO's

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        call_when_computed(self.bucket_of, self.computed)

    def computed(self, param):
        pass

    def total_dtype(self, bucket):
        """In which gradients add up."""
        return bucket.dtype


class BucketwiseReducer(ShardReducer):
    """Moves a bucket's gradients into its total when all are computed: a few kernels a bucket, not one a parameter.
    Until then they stay in .grad, which costs the memory of a bucket."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.half_averaged = set()  # buckets averaged over `bucket.group`, but not yet over `bucket.between`

    def computed(self, param):
        bucket = self.bucket_of[param]
        self.missing[bucket].discard(param)
        if not self.missing[bucket]:
            self.missing[bucket] = set(bucket.params)
            self.complete(bucket)

    def complete(self, bucket):
        self.on_complete(bucket)
        self.collect(bucket)

    def total_dtype(self, bucket):
        return self.stage == 2 and self.reduce_dtype or bucket.shard.dtype  # stage 2 sends at once: nothing adds up

    @contextmanager
    def no_sync(self):
        try:
            yield
        finally:
            for bucket in self.buckets:
                if self.stage < 2 and self.holds(bucket):  # `complete` was not called, because a parameter was not used
                    self.collect(bucket)

    def start(self, bucket):
        if bucket.between:
            self.half_averaged.add(bucket)
        return super().start(bucket)

    def holds(self, bucket):
        """Whether the bucket has gradients that are not sent yet."""
        return bucket.total is not None or any(p.grad is not None for p in bucket.params)


class EarlyReducer(Early, HookedReducer):

    @contextmanager
    def no_sync(self):
        try:
            with super().no_sync():
                yield
        finally:
            for bucket in self.buckets:
                if bucket.total is not None:  # CUDA graphs add to the total, so eager micro-batches must, too
                    self.collect(bucket)


class EarlyShardReducer(Early, BucketwiseReducer):
    """At stage 2 the shard's .grad is set when the first reduce-scatter into it starts; its numbers arrive later.
    RuntimeError if somebody drops .grad before `finish`."""

    def restart(self):
        super().restart()
        self.missing = {bucket: set(bucket.params) for bucket in self.buckets}
        self.promised = {}  # bucket -> the shard's .grad, into which gradients of this step are on their way

    def complete(self, bucket):
        super().complete(bucket)
        if self.stage == 2:
            self.ready.add(bucket)

    def leave(self):
        super().leave()
        if self.stage == 2:
            self.next %= len(self.buckets)  # after the last bucket comes the first one, of the next micro-batch
            bucket, _, _, average = self.under_way[-1]
            self.keeps_promise(bucket)
            if bucket.shard.grad is None:
                same = average.dtype == bucket.shard.dtype
                bucket.shard.grad = average if same else torch.zeros_like(bucket.shard)
            self.promised[bucket] = bucket.shard.grad
            while len(self.under_way) > 2:
                self.receive()

    def keeps_promise(self, bucket):
        if self.promised.get(bucket, bucket.shard.grad) is not bucket.shard.grad:
            raise RuntimeError("gradients were zeroed before finish_grad_sync(): to drop a step, zero_grad() must be "
                               "called on the FSDP module or the ShardedOptimizer")

    def store(self, bucket, average):
        self.keeps_promise(bucket)
        if average is not bucket.shard.grad:
            super().store(bucket, average)

    def finish(self):
        while self.stage == 2 and (self.next or any(map(self.holds, self.buckets))):  # until a round is complete
            self.leave()
        self.next = len(self.buckets) if self.stage == 2 else self.next
        super().finish()
        self.average_between()

    @torch.no_grad()
    def average_between(self):
        """As ShardReducer's, but all all-reduces are started before the first is waited for, so that they overlap."""
        waiting = []
        for bucket in filter(self.half_averaged.__contains__, self.buckets):
            message = bucket.shard.grad.to(self.reduce_dtype or bucket.shard.dtype)
            handle = dist.all_reduce(message, dist.ReduceOp.AVG, bucket.between, async_op=True)
            waiting.append((bucket.shard.grad, message, handle))
        for grad, message, handle in waiting:
            handle.wait()
            grad.copy_(message)
        self.half_averaged.clear()

    def forget(self):
        super().forget()
        self.half_averaged.clear()

    @property
    def finished(self):
        return not (self.next or self.under_way or self.half_averaged or any(map(self.holds, self.buckets)))


class RestartableDDP(DDP):

    def zero_grad(self, set_to_none=True):
        """As any module's. After a backward that raised, call it on all ranks before the next backward."""
        self.reducer.forget()
        super().zero_grad(set_to_none)


class GuardedOptimizer(ShardedOptimizer):
    """A ShardedOptimizer that saves a pass over the weights, and raises ValueError for parameters added later.

    kernels.AdamW writes the 16-bit weights while it updates their masters, so they need no cast afterwards, and a
    bucket's all-gather runs beside the update of the buckets after it. `step` finishes an unfinished step; `zero_grad`
    drops it.
    """
    cut = False   # whether parameters have been cut into shards
    late = False  # whether forward waits for weights, not `step`

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Bucket -> the handle of its all-gather under way; bucket -> the event at its end, for which graphs wait.
        self.cut, self.gathering, self.arrived = True, {}, {}
        if isinstance(self.inner, kernels.AdamW):
            self.inner.copies = {b.shard: b.weights[b.own] for b in self.with_masters}
            if self.stage:  # by a weak reference, so that an optimizer that nobody keeps is freed at once
                bucket_of, gather = {b.shard: b for b in self.buckets}, weakref.WeakMethod(self.gather_weights)
                self.inner.stepped = lambda shard: gather()([bucket_of[shard]], wait=False)

    def zero_grad(self, set_to_none=True):
        """Drop the shards' gradients and those of an unfinished step. Call it on all ranks."""
        if not self.late:  # else forward or the next step waits
            self.wait_for_weights(self.buckets)  # a step that failed has started to gather them
        self.reducer.forget()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self):
        self.wait_for_weights(self.buckets)
        if not self.reducer.finished:
            self.finish_grad_sync()
        super().step()

    def gather_weights(self, buckets, wait=True):
        """wait: until they are there, unless forward does."""
        for bucket in reversed(buckets) if self.stage else ():  # forward wants the first layers first
            if bucket not in self.gathering:
                self.gathering[bucket] = handle = dist.all_gather_into_tensor(
                    bucket.weights, bucket.weights[bucket.own], bucket.group, async_op=True)
                if bucket in self.arrived:
                    with torch.cuda.stream(self.stream):  # so that the updates of later buckets need not wait
                        handle.wait()
                        self.arrived[bucket].record()
        if wait and not self.late:
            self.wait_for_weights(self.buckets)

    def wait_in(self, *modules):
        """Let each unit of the modules wait for its own weights when its forward begins. Then `step` waits for none,
        and they travel under the forward of the layers before. Whoever reads or writes parameters elsewhere calls
        `wait_for_weights(buckets)` first; the modules' state_dict and load_state_dict do."""
        self.late, self.stream = True, torch.cuda.Stream() if torch.cuda.is_initialized() else None
        for bucket in self.buckets:
            if self.stage and bucket.weights.is_cuda:  # graphs wait for events, the same ones in every step
                self.arrived[bucket] = torch.cuda.Event(external=True)
                self.arrived[bucket].record()  # no gather comes before the first forward
        wait = weakref.WeakMethod(self.wait_for_weights)

        def hook(buckets):
            return lambda *_: (alive := wait()) and alive(buckets)

        for module in modules:
            for unit, params in fsdp_units(module):  # frozen parameters have no bucket
                mine = {self.reducer.bucket_of[p] for p in params if p in self.reducer.bucket_of}
                unit.register_forward_pre_hook(hook(mine))
            module.register_state_dict_pre_hook(hook(self.buckets))
            module.register_load_state_dict_pre_hook(hook(self.buckets))

    def wait_for_weights(self, buckets):
        for bucket in buckets:
            if bucket in self.arrived and torch.cuda.is_current_stream_capturing():
                self.arrived[bucket].wait()  # every replay does, for the gather before it
            elif bucket in self.gathering:
                self.gathering.pop(bucket).wait()

    def cast(self):
        if not isinstance(self.inner, kernels.AdamW):
            super().cast()

    def state_dict(self):
        """This rank's part: torch.optim's state_dict, and the master weights if parameters have 16 bits."""
        return dict(self.inner.state_dict(), masters=[b.shard.detach() for b in self.with_masters])

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Load what `state_dict` returned on this rank in a run of as many ranks. 16-bit parameters are set from their
        masters. Call it on all ranks."""
        self.wait_for_weights(self.buckets)
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "masters"})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        masters = state_dict.get("masters") or [b.weights[b.own] for b in self.with_masters]
        for bucket, master in zip(self.with_masters, masters, strict=True):
            bucket.shard.copy_(master)
        for bucket in self.with_masters:
            bucket.weights[bucket.own].copy_(bucket.shard)
        self.gather_weights(self.with_masters)
        self.wait_for_weights(self.buckets)

    def add_param_group(self, group):
        if self.cut:
            raise ValueError("ShardedOptimizer cuts its parameters once, when it is made: make a new one with all of "
                             "them")
        super().add_param_group(group)


class FetchedParameter(FlatParameter):
    """A FlatParameter whose all-gather can be started early, so that it overlaps computation; `gather` waits for it."""
    handle = None

    def start(self):
        if self.version != self.shard._version:
            self.wait()
            super().gather()

    def all_gather(self):
        self.handle = dist.all_gather_into_tensor(self.weights, self.weights[self.own], self.group, async_op=True)

    def gather(self):
        self.start()
        self.wait()

    def wait(self):
        if self.handle:
            self.handle.wait()
            self.handle = None

    def free(self):
        self.wait()  # a gather under way must not write into freed memory
        super().free()


class FetchingFSDP(FSDP):
    """Gathers the next unit while one computes, so that layers need not wait. The cost: two units are whole at a time.

        forward    all-gather unit i+1 | compute unit i      in the order in which the last forward used the units
        backward   all-gather unit i-1 | compute unit i      in this forward's order, reversed
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.order, self.last_order = [], []
        self.reducers[1].syncing = False  # 1-D gradients have few elements: send them in finish_grad_sync
        for part in self.module.modules():
            part.register_state_dict_pre_hook(self._refuse)
            part.register_load_state_dict_pre_hook(self._refuse)
            part._apply = self._refuse

    def _refuse(self, *_, **__):
        raise RuntimeError("FSDP's parameters have no memory between steps: read them with full_state_dict(), set them "
                           "with load(), and copy, move or cast a module before you wrap it")

    _apply = __deepcopy__ = _refuse

    @torch.no_grad()
    def full_state_dict(self):
        """{name: whole tensor in the master dtype} on every rank. Call it on all ranks."""
        named = [(name, param, self.bucket_of[param]) for name, param in self.module.named_parameters()]
        return {name: flat.gather_one(param, flat.shard.detach()) for name, param, flat in named}

    def zero_grad(self, set_to_none=True):
        """Drop the shards' gradients and those of an unfinished step. Call it on all ranks."""
        for reducer in self.reducers:
            reducer.forget()
        super().zero_grad(set_to_none)

    def fetch(self, unit):
        for flat in self.units[unit]:
            flat.start()

    def forward(self, *args, **kwargs):
        self.last_order, self.order = self.order, []
        output = super().forward(*args, **kwargs)
        keep = self.last if torch.is_grad_enabled() else ()
        for flat in self.buckets:
            if not flat.stays_whole and flat not in keep:
                flat.free()  # gathered ahead, but this forward did not use it
        if torch.is_grad_enabled() and self.order:
            self.fetch(self.order[-1])  # because backward starts with it
        return output

    def before_forward(self, unit, inputs):
        super().before_forward(unit, inputs)
        if not self.in_backward:  # in backward a checkpoint runs the unit again, which is no part of the order
            i = len(self.order)
            self.order.append(unit)
            if i + 1 < len(self.last_order) and self.last_order[i] is unit:
                self.fetch(self.last_order[i + 1])

    def after_forward(self, unit, inputs, output):
        super().after_forward(unit, inputs, output)
        if not self.in_backward:
            position = len(self.order) - 1
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: self.fetch_before(position))

    def fetch_before(self, position):
        if 0 < position <= len(self.order):
            self.fetch(self.order[position - 1])


def tensors_in(value):
    """The tensors in a module's output: a tensor, or tuples, lists and dicts of them."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class LeanGPT(ParallelGPT):
    """A ParallelGPT that makes each list of actions once, and adds gradients up in few messages. With kernels.AdamW,
    clipping only computes a factor, because the kernel scales the gradients as it reads them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.lists = {}  # (schedule, micro-batches) -> this rank's actions

    def make_optimizer(self, *args, **kwargs):
        optimizer = super().make_optimizer(*args, **kwargs)
        if isinstance(optimizer, GuardedOptimizer) and isinstance(self.pipeline, GraphPipeline):
            optimizer.wait_in(*self.stages.values())
        return optimizer

    def actions(self, schedule, m):
        if (schedule, m) not in self.lists:
            self.lists[schedule, m] = super().actions(schedule, m)
        return self.lists[schedule, m]

    @torch.no_grad()
    def add_up_gradients(self):
        """As in ParallelGPT, with one message for all gradients of a group and dtype. The cost: copies in and out."""
        over = defaultdict(list)
        for param in self.params:
            for group in sums(param):
                over[group, param.grad.dtype].append(param.grad)
        for (group, _), grads in over.items():
            flat = grads[0] if len(grads) == 1 else torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=group)
            if len(grads) > 1:
                for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
                    grad.copy_(part.view_as(grad))

    def clip_grad_norm_(self, max_norm, scale=1.0):
        inner = getattr(self.optimizer, "inner", self.optimizer)
        if not isinstance(inner, kernels.AdamW):
            return super().clip_grad_norm_(max_norm, scale)
        norm = clip_grad_norm_(self.params, 0, [None]) / scale
        inner.scale = (max_norm / (norm + 1e-6) if max_norm else torch.ones_like(norm)).clamp(max=1) / scale
        return norm


# ------------------------------------------------------------------------------ sequence parallel: without permutations
#
# A rank's tokens of B > 1 sequences lie apart in memory, so gather_tokens and scatter_tokens copy them into one message
# or out of it. On an H200 that takes 96 us for 64 MiB, as long as the message itself. Between GPUs of a node a kernel,
# or the copy engines, read and write each sequence's tokens in place where `dist.takes_rows`, so the functions below
# save that copy.

def start_gathering(x, group, async_op=False):
    """Start to all-gather x (B, T/N, C): (handle, (B, N, T/N, C)). The handle is None unless async_op."""
    n = dist.get_world_size(group)
    if dist.takes_rows(x[0].nbytes, group, not async_op):
        whole = x.new_empty(len(x), n, *x.shape[1:]).transpose(0, 1)
    else:
        whole = x.new_empty(n, *x.shape)
    return dist.all_gather_into_tensor(whole, x.contiguous(), group, async_op), whole.transpose(0, 1)


def start_scattering(x, group, async_op=False):
    """Start to reduce-scatter x (B, T, C), a rank's term of a sum: (handle, (B, T/N, C) of the sum)."""
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1)                  # (N, B, T/N, C)
    mine = x.new_empty(parts.shape[1:])
    parts = parts if dist.takes_rows(mine[0].nbytes, group, not async_op) else parts.contiguous()
    return dist.reduce_scatter_tensor(mine, parts, group=group, async_op=async_op), mine


def gather_in_place(x, group):
    if not dist.takes_rows(x[0].nbytes, group):
        return gather_tokens(x, group)
    return start_gathering(x, group)[1].flatten(1, 2)


def scatter_in_place(x, group):
    if not dist.takes_rows(x[0].nbytes // dist.get_world_size(group), group):
        return scatter_tokens(x, group)
    return start_scattering(x, group)[1]


class RegatheredProduct(torch.autograd.Function):
    """f, then X W^T + b. X is (B, T/N, in), and a rank keeps only these, its own tokens, until backward.

    That saves memory. The cost: backward gathers X again, while it computes dY W. Then it adds up dX over the ranks,
    while it computes dY^T X. So a sublayer takes 5 halves of an all-reduce in place of 4. take: as for kernels.Linear.
    In a zero-bubble pipeline "I" gathers X, and "W" frees it.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, group, take=None):
        ctx.group, ctx.take = group, take
        ctx.save_for_backward(x, weight)
        return F.linear(faster(gather_tokens)(x, group), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, weight), added, dx, dy = ctx.saved_tensors, dist.Handle(), None, dy.contiguous()
        gathered, whole = start_gathering(x, ctx.group, async_op=True)
        if ctx.needs_input_grad[0]:
            added, dx = start_scattering(dy @ weight, ctx.group, async_op=True)
        gathered.wait()
        gradients = kernels.weight_gradients(ctx, dy.flatten(0, -2), whole.flatten(0, -2))
        added.wait()
        return dx, *gradients, None, None


# ----------------------------------------------------------- tensor parallel: biases added by the activation's kernel

class FusableColumns(ColumnParallelLinear):
    """`product` leaves out the bias, so that the activation's kernel can add it in a pass that it makes anyway.

    In sequence parallelism f is `gathered`. Then the whole product is a RegatheredProduct, which gathers X itself, so
    self.f does nothing. A layer without a bias, which in a GPT is the head alone, keeps the gathered X for backward.
    """

    def __init__(self, layer, group, *args, **kwargs):
        super().__init__(layer, group, *args, **kwargs)
        if self.f is gathered and self.bias is not None:
            self.f = lambda x, group: x
            self.linear = lambda x, weight, bias=None, take=None: RegatheredProduct.apply(x, weight, bias, group, take)

    def product(self, x):
        return self.linear(self.f(x, self.group), self.weight)


# -------------------------------------------------------------------------------------- context parallel: tuned kernels

def start_shift(tensor, group):
    """Start a `shift` without waiting for it: (handles, the tensor that will be received). Strides may be any."""
    link, incoming = dist.link_of(group), tensor.new_empty(tensor.shape)
    if isinstance(link, dist.Direct):  # copies between GPUs of one node
        kernels.SPARED = 2  # multiprocessors for their barriers, which attention would else hold up until it ends
        return [link.run("isend", lambda link: link.shift(tensor.contiguous().view(-1), incoming.view(-1)),
                         {"tensor": tensor, "incoming": incoming}, async_op=True)], incoming
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    return dist.batch_isend_irecv([
        dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=(rank + 1) % n),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % n)]), incoming


def going_round_ahead(tensor, group):
    """As `going_round`, but a tensor is sent on before it is yielded, so that it travels while the caller computes."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    for s in range(n):
        handles, incoming = start_shift(tensor, group) if s < n - 1 else ([], None)
        yield (rank - s) % n, tensor
        wait(handles)
        tensor = incoming


class TunedRing(RingAttention):
    """RingAttention on Triton's kernels. Merging takes few further passes over memory. Messages overlap computation.

    The first K and V travel while a rank computes with its own keys: O in forward, dQ in backward. It computes dK and
    dV of its own keys last, because meanwhile those of other ranks' keys travel home. Over more than two ranks, sums
    are float32. Over two ranks a sum has two terms, and the first stays in the 16 bits in which its kernel wrote it.
    """

    @staticmethod
    def forward(ctx, qkv, group):
        rank, half = dist.get_rank(group), qkv.shape[1] // 2
        ctx.tuned, ctx.group = kernels.flash_takes(qkv) and half % 128 == 0, group  # both chunks must be whole tiles
        if not ctx.tuned:
            return RingAttention.forward(ctx, qkv, group)
        qkv = qkv.contiguous()
        q = qkv.permute(2, 0, 3, 1, 4)[0]                                                     # (B, H, T/N, D)
        for other, kv in going_round_ahead(qkv[:, :, 1:], group):                             # (B, T/N, 2, H, D)
            (k, v), (rows, keys, causal) = kv.permute(2, 0, 3, 1, 4), seen(rank, other, half)
            part, part_lse = kernels.tuned_attention_forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], causal)
            if other == rank:
                o, lse = part.to(sum_dtype(part, group)), part_lse
            else:
                kernels.merge_parts(o[:, :, rows], lse[:, rows], part, part_lse)
        o = o.to(q.dtype)
        ctx.save_for_backward(qkv, o, lse)
        return o.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        if not ctx.tuned:
            return RingAttention.backward(ctx, do)
        (qkv, o, lse), rank, half = ctx.saved_tensors, dist.get_rank(ctx.group), do.shape[1] // 2
        (q, k, v), do, delta = qkv.permute(2, 0, 3, 1, 4), kernels.aligned(do.transpose(1, 2)), torch.empty_like(lse)
        grads, dkv, handles = torch.empty_like(qkv), None, []  # dkv: dK and dV received with the keys
        dq, dk, dv = grads.permute(2, 0, 3, 1, 4)                                             # (B, H, T/N, D)
        for other, kv in going_round_ahead(qkv[:, :, 1:], ctx.group):
            if other == rank:
                kernels.tuned_backward_q(q, k, v, o, lse, delta, do, True, dq)
                total = grads[:, :, 0].to(sum_dtype(dq, ctx.group))                           # (B, T/N, H, D)
                continue
            rows, keys, _ = seen(rank, other, half)
            dq_part, dkv_part = gradients_of_part(*(x[:, :, rows] for x in (q, o, do)), lse[:, rows], delta[:, rows],
                                                  kv[:, keys])
            kernels.add_rows(total[:, rows], dq_part)
            wait(handles)
            first = dkv is None
            if first:
                dkv = torch.empty(kv.shape, dtype=torch.float32, device=kv.device)
                dkv[:, dkv_part.shape[1]:] = 0
            kernels.add_rows(dkv[:, keys], dkv_part, first)
            handles, dkv = start_shift(dkv, ctx.group)
        kernels.tuned_backward_kv(q, k, v, lse, delta, do, True, dk, dv)
        wait(handles)
        kernels.add_rows(grads[:, :, 1:], dkv)
        if dist.get_world_size(ctx.group) > 2:
            grads[:, :, 0] = total
        return grads, None


def sum_dtype(part, group):
    """The dtype in which tensors like `part` are added up over the ranks."""
    return part.dtype if dist.get_world_size(group) == 2 else torch.float32


def wait(handles):
    for handle in handles:
        handle.wait()


def gradients_of_part(q, o, do, lse, delta, kv):
    """(dQ (B, Tq, H, D), dK and dV (B, Tk, 2, H, D)) of attention to another rank's keys; all queries see all keys."""
    dq, dkv = torch.empty(q.transpose(1, 2).shape, dtype=q.dtype, device=q.device), kv.new_empty(kv.shape)
    k, v, dk, dv = (*kv.permute(2, 0, 3, 1, 4), *dkv.permute(2, 0, 3, 1, 4))
    kernels.tuned_backward_q(q, k, v, o, lse, delta, do, False, dq.transpose(1, 2))
    kernels.tuned_backward_kv(q, k, v, lse, delta, do, False, dk, dv)
    return dq, dkv


# ---------------------------------------------------------------------------- pipeline: stages that take equally long

@functools.cache
def split_pieces(config, stages):
    """Cut the L+2 pieces of a GPT into `stages` runs, so that the slowest run takes as little time as possible:
    [range, ...], cached, so callers must not change it.

    Costs are multiply-adds a token: of a block its attention and matrices (of experts, k), of the head C V. The
    embedding costs nothing, because it is a look-up.
    """
    c, n = config.n_embd, config.n_layer + 2
    mlps = [config.top_k if config.has_experts(i) else 1 for i in range(config.n_layer)]
    cost = [0] + [4 * c * c + 2 * c * config.inner * k + config.seq_len * c for k in mlps] + [c * config.vocab_size]

    @functools.cache
    def best(end, k):
        """Cut the pieces before `end` into k stages: (the slowest one's cost, the first piece of each, last first)."""
        if k == 1:
            return sum(cost[:end]), (0,)
        return min((max(rest, sum(cost[start:end])), (start, *starts))
                   for start in range(k - 1, end) for rest, starts in [best(start, k - 1)])

    starts = best(n, stages)[1][::-1]
    return [range(a, b) for a, b in zip(starts, (*starts[1:], n))]


# ------------------------------------------------------------------------------------------- pipeline: transfers, times

class NamedHandle:
    """A handle whose wait() reports progress, and whose error names the transfer that failed."""

    def __init__(self, handle, what):
        self.handle, self.what, self.is_completed = handle, what, handle.is_completed

    def wait(self):
        dist.progress(f"waiting for the {self.what}")
        with dist.lost_peer_named(f"waited for the {self.what}"):
            self.handle.wait()


def pipeline_channels(mesh, around):
    """{(from, to): group of two neighbours} of this rank's pipeline; from, to: places in it.

    Each direction has its own group, so that activations and gradients do not wait for each other. around: the last
    rank sends to the first one, too.
    """
    p, channels = mesh.shape[0], {}
    neighbours = [(r, (r + 1) % p) for r in range(p if around else p - 1) if p > 1]
    pairs = sorted({pair for r, q in neighbours for pair in ((r, q), (q, r))})
    for ranks in mesh.mesh.flatten(1).T.tolist():  # of each pipeline
        made = {pair: dist.new_group([ranks[place] for place in pair]) for pair in pairs}
        if dist.get_rank() in ranks:
            channels = made
    return channels


class PatientPipeline(Pipeline):
    """A Pipeline that posts receives late on CUDA, frees an output once it is sent, and names a failed transfer.

    On CUDA a waiting receive is a kernel that occupies multiprocessors. A product that needs all of them then takes two
    waves instead of one. So a receive is posted only when its value is needed, because the rank would idle then anyway.
    With gloo a waiting receive disturbs no computation, so it is posted where `lower` put it. Received late, transfers
    of both directions would wait for each other in one group, so each direction between two neighbours has its own.
    channels: of another pipeline of this mesh. If left out, groups are made, so all ranks must make a pipeline.
    """
    on_forward = None  # None, or a function to call after each forward: train.py measures activations there

    def __init__(self, stages, count, mesh, *args, channels=None):
        super().__init__(stages, count, mesh, *args)
        self.rank, *place = mesh.get_coordinate()
        self.ranks, self.channels = mesh.mesh[:, *place].tolist(), channels or pipeline_channels(mesh, count > self.p)

    def begin(self, *args):
        super().begin(*args)
        self.expected = defaultdict(deque)  # pipeline rank -> receives that are not posted yet

    def expect(self, receive):
        if self.device.type == "cuda":
            self.expected[other_end(receive).stage % self.p].append(receive)
        else:
            self.post(receive)

    def post(self, receive):
        source, kind = other_end(receive).stage % self.p, "activation" if receive.kind == "RF" else "gradient"
        what = f"{kind} of micro-batch {receive.micro_batch} from rank {self.ranks[source]} (pipeline rank {source})"
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        with dist.lost_peer_named(f"posted the {what}"):
            handle = dist.irecv(buffer, self.ranks[source], self.channels[source, self.rank])
        self.values[receive] = NamedHandle(handle, what), buffer

    def take(self, receive):
        source = other_end(receive).stage % self.p
        while receive not in self.values:  # post all earlier ones first, because the other rank sends in this order
            self.post(self.expected[source].popleft())
        return super().take(receive)

    def send(self, action):
        receive, what = other_end(action), f"send {action} of the pipeline"
        to, (_, tensor) = receive.stage % self.p, self.values.pop(receive)
        dist.progress(what)
        with dist.lost_peer_named(what):
            handle = dist.isend(tensor, self.ranks[to], self.channels[self.rank, to])
        self.sending.append((NamedHandle(handle, what), tensor))

    def do(self, action):
        super().do(action)
        if action.kind == "F" and self.on_forward:
            self.on_forward()
        while self.sending and self.sending[0][0].is_completed():
            self.sending.popleft()[0].wait()


class Stopwatch:
    """Times each action of a pipeline, from the moment its input is there: waiting for the input does not count.

    Until `stop` it replaces the pipeline's `do` and `take` by methods that note times. On CUDA a time is an event in
    the stream, so the CPU need not wait for the GPU. stop() returns [(action, start, end)], seconds of the wall clock.
    """

    def __init__(self, pipeline):
        self.pipeline, self.cuda, self.spans = pipeline, pipeline.device.type == "cuda", []
        if self.cuda:
            torch.cuda.synchronize()
        self.origin, self.zero = time.time(), self.now()
        do, take = pipeline.do, pipeline.take

        def timed(action):
            self.begin = self.now()
            do(action)
            self.spans.append((action, self.begin, self.now()))

        def take_and_begin(receive):
            value = take(receive)
            self.begin = self.now()  # until now the rank was idle
            return value
        pipeline.do, pipeline.take = timed, take_and_begin

    def now(self):
        if not self.cuda:
            return time.time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self):
        del self.pipeline.do, self.pipeline.take
        if self.cuda:
            torch.cuda.synchronize()
            return [(a, *(self.origin + self.zero.elapsed_time(e) / 1e3 for e in events)) for a, *events in self.spans]
        return self.spans


def record_times(pipeline):
    """Time all actions from now on, until `recorded_times` is called."""
    pipeline.stopwatch = Stopwatch(pipeline)


def recorded_times(pipeline):
    """[(action, start, end)] of what this rank ran since `record_times`, in seconds of the wall clock."""
    return pipeline.stopwatch.stop()


# ------------------------------------------------------------------------------------------------ pipeline: CUDA graphs
#
# A block launches some 45 kernels a micro-batch. Small kernels end before the CPU has launched the next one, so the GPU
# idles. Replaying a recorded CUDA graph costs the CPU one launch. The price: a graph uses fixed addresses, so it keeps
# its memory, inputs are copied in and outputs out, and gradients are added to the buckets' flat vectors, which must not
# move. A replay runs no autograd hooks. ZeRO-2 and 3 gather units and reduce-scatter gradients in hooks, so for them
# the hooks run during the recording, and what they launch becomes part of the graph.

class Totals:
    """A reducer's flat vectors, to which recordings add gradients. They keep their addresses from step to step."""

    def __init__(self, reducer):
        self.reducer, self.of = reducer, {}  # parameter -> its part of a flat vector
        self.flats = {bucket: torch.empty(bucket.numel, dtype=reducer.total_dtype(bucket), device=bucket.device)
                      for bucket in reducer.buckets}
        for bucket, flat in self.flats.items():
            self.of.update(zip(bucket.params, bucket.views(flat)))

    def begin(self, overwrite):
        """Zero the totals; if gradients overwrite them, only the padding, which clipping by a NaN norm sets to NaN."""
        for bucket, flat in self.flats.items():
            flat[sum(p.numel() for p in bucket.params) if overwrite else 0:] = 0
            bucket.total = flat

    def add(self, param, a, b=None, overwrite=False, computed=True):
        """Add a gradient a, or a product a b, to param's total. Adding a bf16 product to float32 takes one pass."""
        total, beta = self.of[param], 0 if overwrite else 1
        if b is None:
            (total.copy_ if overwrite else total.add_)(a)
        elif total.dtype == a.dtype:
            total.addmm_(a, b, beta=beta)
        else:
            torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, out=total)
        if computed:  # what autograd's hook would do
            self.reducer.computed(param)

    def forget(self):
        """Drop the .grads that recording has set: they are views of the totals, which would be added to themselves."""
        for bucket in self.flats:
            for param in stepped(bucket):
                param.grad = None

    def close(self, unused):
        """Record the sending of all gradients. unused: parameters without one. Returns the averages of each bucket."""
        for param in unused:
            self.of[param].zero_()
        self.reducer.finish()
        return [[p.grad for p in stepped(bucket)] for bucket in self.flats]

    def replayed(self, averages):
        """A graph has sent and received all buckets, so put the reducer into the state in which all have left."""
        for bucket, grads in zip(self.flats, averages):
            for p, grad in zip(stepped(bucket), grads):
                p.grad = grad
            bucket.total = None
        self.reducer.next = len(self.flats)


class ShardTotals:
    """The totals of ZeRO-2 and 3, which send gradients in every micro-batch. sync: an FSDP or a ShardedOptimizer.

    The averages of several micro-batches add up in the shards' .grad, and 1-D gradients in `bucket.total`. Both keep
    their addresses from step to step. If a step has one micro-batch, both lie in its graph's memory.
    """

    def __init__(self, sync):
        self.sync, self.flats = sync, {}
        self.reducers, self.units = (sync.reducers, sync.buckets) if isinstance(sync, FSDP) else ([sync.reducer], [])
        self.buckets = [(bucket, reducer) for reducer in self.reducers for bucket in reducer.buckets]

    def begin(self, overwrite):
        """Zero the tensors that gradients are added to. With `overwrite` there are none: a step has one micro-batch."""
        if overwrite:
            self.flats.clear()
            return
        for bucket, reducer in self.buckets:
            if bucket not in self.flats:
                self.flats[bucket] = torch.empty_like(bucket.shard)
            flat = self.flats[bucket].zero_()
            if reducer.stage == 2:
                bucket.shard.grad = flat
            else:
                bucket.shard.grad, bucket.total = None, flat

    def settle(self, kind):
        """End what a graph must not leave open: messages under way and, after backward, units that are whole."""
        for reducer in self.reducers:
            while reducer.under_way:
                reducer.receive()
        for flat in self.units:
            flat.wait() if kind == "F" else flat.free()

    def forget(self):
        """Drop the .grads that a recording has set, which hold no numbers. Free units that evaluation left whole."""
        self.settle("B")
        for reducer in self.reducers:
            reducer.forget()
        for bucket, _ in self.buckets:
            bucket.shard.grad = None

    def close(self, unused):
        self.sync.finish_grad_sync()
        return [bucket.shard.grad for bucket, _ in self.buckets]

    def replayed(self, averages):
        """Put the reducers into the state in which all buckets have left."""
        for (bucket, reducer), average in zip(self.buckets, averages):
            bucket.shard.grad, bucket.total = average, None
            if reducer.stage < 2:
                reducer.next = len(reducer.buckets)


def stepped(bucket):
    """The parameters that an optimizer steps for a bucket: the bucket's own, or its shard."""
    return bucket.params if bucket.shard is None else [bucket.shard]


class Recording(Passage):
    """A Passage recorded as CUDA graphs, one for each action in `kinds` ("FB" or "FIW").

    A Recording keeps memory for one micro-batch's activations, so each micro-batch in flight needs its own. Recordings
    that are never in flight together share the memory of one `pool`. closes: this is the step's last micro-batch, and
    its graph also sends the gradients. overwrite: it is the only one, so its gradients replace those of the last step.
    """

    def __init__(self, module, loss, weight_gradients, totals, kinds, x, target, pool=None, closes=False,
                 overwrite=False):
        super().__init__(module, loss, weight_gradients)
        self.totals, self.kinds, self.closes, self.overwrite = totals, kinds, closes, overwrite
        self.pool, self.touched = pool or torch.cuda.graph_pool_handle(), set()
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.input, self.target, weight_gradients.add = x.detach().clone(), target.clone(), self.add
        dist.make_room()
        self.graphs = {kind: dist.RecordedGraph(partial(self.record, kind), self.pool) for kind in kinds}
        self.edge, self.put_off = None, []  # kept alive, autograd's nodes would tie eager steps to the recording stream

    def record(self, kind):
        if kind == "F":
            self.output = super().forward(self.input, self.target)
            self.dy = torch.empty_like(self.output)
        elif kind == "W":
            super().backward("W")
        else:
            self.dx = super().backward(kind, self.dy)
        if self.closes and kind == self.kinds[-1]:
            self.averages = self.totals.close(set(self.params) - self.touched if self.overwrite else ())

    def add(self, param, a, b=None):
        self.touched.add(param)
        self.totals.add(param, a, b, self.overwrite, self.closes)

    def gradients(self, dy):
        wanted = [self.x] * self.x.requires_grad + self.params
        grads = list(torch.autograd.grad(self.edge, wanted, dy, allow_unused=True))
        dx = grads.pop(0) if self.x.requires_grad else None
        for param, grad in zip(self.params, grads):
            if grad is not None:
                self.add(param, grad)
        return dx

    def replay(self, kind):
        self.graphs[kind].replay()
        if self.closes and kind == self.kinds[-1]:
            self.totals.replayed(self.averages)

    def forward(self, x, target=None):
        self.input.detach().copy_(x)
        if self.loss:
            self.target.copy_(target)
        self.replay("F")
        return self.output.clone()

    def backward(self, kind, dy=None):
        if kind != "W":
            self.dy.copy_(dy)
        self.replay(kind)
        return self.dx.clone() if kind != "W" and self.dx is not None else None


class HookedRecording(Recording):
    """A Recording that includes what autograd's hooks launch: ZeRO-2 and 3 gather and free units, and send gradients.

    Units are gathered into the graphs' memory. A freed unit's memory is used again, so it holds two units at a time.
    """
    gradients = Passage.gradients

    def __init__(self, module, loss, weight_gradients, totals, *args, overwrite=False, **kwargs):
        totals.forget()  # frees all units, because the graph would not gather one that is whole now
        totals.begin(overwrite)
        super().__init__(module, loss, weight_gradients, totals, *args, overwrite=overwrite, **kwargs)
        del weight_gradients.add  # hooks add gradients up; this reference would keep the memory

    def record(self, kind):
        super().record(kind)
        self.totals.settle(kind)


def no_graphs():
    """An empty store for the recordings of a GraphPipeline."""
    return SimpleNamespace(recordings={},   # {stage: [Recording that no micro-batch is using]}
                           closing={},      # {stage: Recording of the last micro-batch, if it sends the gradients, too}
                           recorded_for=None)  # (shape of its micro-batches, actions)


class GraphPipeline(PatientPipeline):
    """Replays micro-batches from CUDA graphs, so that the CPU launches one graph instead of some 45 kernels a block.

    The first step with new shapes or actions warms up. The second one records, and from then on graphs are replayed.
    With one stage and one micro-batch in flight, the graph of the last micro-batch sends the gradients. Otherwise, if
    there are several replicas, the last micro-batch runs eagerly, because its hooks send the gradients.
    """
    recording = Recording

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.graphs, self.totals, self.replaying = no_graphs(), {}, False

    def begin(self, actions, x, y, scale, syncs):
        super().begin(actions, x, y, scale, syncs)
        self.replaying = syncs is not None
        if not self.replaying:
            return
        self.replicated = dist.get_world_size(next(iter(syncs.values())).group) > 1
        self.last_of = {a.stage: a.micro_batch for a in actions if a.kind in "BW"}  # stage -> its last micro-batch
        self.add_up(syncs)
        kinds = "FIW" if any(a.kind == "I" for a in actions) else "FB"
        alone = self.count == 1 and kinds == "FB" and most_held(actions) == 1  # whether a graph can send gradients
        asked, graphs = (x[0].shape, tuple(actions)), self.graphs
        overwrite = asked == graphs.recorded_for and alone and len(x) == 1
        for totals in self.totals.values():
            totals.begin(overwrite)
        if asked != graphs.recorded_for:
            graphs.recordings, graphs.closing, graphs.recorded_for = {}, {}, asked
        elif not graphs.recordings:
            for stage in self.stages:
                self.record(stage, actions, kinds, alone, overwrite, self.totals[syncs[stage]])
            self.add_up(syncs)
            for totals in self.totals.values():
                totals.forget()
                totals.begin(overwrite)

    def add_up(self, syncs):
        """Let weight gradients be added to the totals, in eager runs, too, so that both add in the same order."""
        self.split_backward()
        for stage, sync in syncs.items():
            if sync not in self.totals:
                self.totals[sync] = Totals(sync.reducer)
            self.weight_gradients[stage].add = self.totals[sync].add

    def record(self, stage, actions, kinds, alone, overwrite, totals):
        example = self.x[0] if stage == 0 else torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        recording = partial(self.recording, self.stages[stage], self.loss if stage == self.count - 1 else None,
                            self.weight_gradients[stage], totals, kinds, example, self.y[0])
        if alone:
            self.graphs.closing[stage] = closing = recording(closes=True, overwrite=overwrite)
            self.graphs.recordings[stage] = [recording(pool=closing.pool)] if len(self.x) > 1 else []
        else:
            eager = self.last_of[stage] if self.replicated else None
            mine = [a for a in actions if a.stage == stage and a.micro_batch != eager]
            self.graphs.recordings[stage] = [recording() for _ in range(most_held(mine))]

    def passage(self, action):
        s, closes = action.stage, self.replaying and action.micro_batch == self.last_of[action.stage]
        if closes and s in self.graphs.closing:
            return self.graphs.closing[s]
        if self.replaying and self.graphs.recordings.get(s) and not (closes and self.replicated):
            return self.graphs.recordings[s].pop()
        return super().passage(action)

    def backward(self, action):
        passage = self.passages[action.stage, action.micro_batch]
        super().backward(action)
        if action.kind != "I" and isinstance(passage, Recording) and not passage.closes:
            self.graphs.recordings[action.stage].append(passage)


class HookedGraphPipeline(GraphPipeline):
    """A GraphPipeline for ZeRO-2 and 3: it has one stage, and graphs send the gradients of each micro-batch."""
    recording = HookedRecording

    def begin(self, actions, x, y, scale, syncs):
        if syncs is not None and (most_held(actions) > 1 or any(action.kind == "I" for action in actions)):
            raise ValueError("CUDA graphs of ZeRO-2 and 3 run one micro-batch, F and B, before the next one: give "
                             "schedule 1f1b")
        super().begin(actions, x, y, scale, syncs)

    def add_up(self, syncs):
        for sync in syncs.values():
            self.totals.setdefault(sync, ShardTotals(sync))


def replay_micro_batches(net):
    """Let a ParallelGPT replay its micro-batches from CUDA graphs. ValueError if ZeRO-2 or 3 has several stages,
    because while one micro-batch waits for its backward, the graphs of others would gather and free the same units."""
    if net.zero > 1 and net.count > 1:
        raise ValueError(f"CUDA graphs of ZeRO-{net.zero} need one stage, not {net.count}")
    pipeline = HookedGraphPipeline if net.zero > 1 else GraphPipeline
    net.pipeline = pipeline(net.stages, net.count, net.mesh, net.loss, net.dtype, net.config.n_embd,
                            torch.device(net.device), net.pipeline.cut, channels=net.pipeline.channels)


# --------------------------------------------------------------------------------------------------- tokens to experts

def without_sorting(mlps, rows, counts):
    """As through_experts; with Triton there is no sort, because the counts say where each row belongs."""
    if len(counts) == 1:  # all rows come from one rank, so they are in order
        return mlps(rows, counts[0])
    if not kernels.on_triton(rows):
        return through_experts(mlps, rows, counts)
    by_expert, by_rank = counts.T.flatten(), counts.flatten()
    starts = (by_expert.cumsum(0) - by_expert).view(-1, len(counts)).T.flatten()              # by rank and expert
    moves = (starts + by_rank - by_rank.cumsum(0)).repeat_interleave(by_rank, output_size=len(rows))
    places = (torch.arange(len(rows), device=rows.device) + moves).int().unsqueeze(1)
    return kernels.combine(mlps(kernels.dispatch(rows, places), counts.sum(0)), places)


class Travel(torch.autograd.Function):
    """Starts to send rows, and `Arrival` waits for them. What is computed between the two hides the transfer.

    Backward runs in reverse order, so there Arrival starts the gradient's transfer, and Travel waits for it. trip: what
    both share: the group, how many rows go to and come from each rank, and the handle.
    """

    @staticmethod
    def forward(ctx, rows, trip):
        ctx.trip = trip
        trip.handle, arriving = start_exchange(rows, trip.group, trip.sends, trip.receives)
        return arriving

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        ctx.trip.handle.wait()
        return vars(ctx.trip).pop("grad"), None


class Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx, arriving, trip):
        ctx.trip = trip
        trip.handle.wait()
        return arriving.view_as(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        trip = ctx.trip
        trip.handle, trip.grad = start_exchange(grad, trip.group, trip.receives, trip.sends)
        return grad, None


def start_exchange(rows, group, sends, receives):
    """Start an `exchange` without waiting for it: (handle, the rows that will be received)."""
    arriving = rows.new_empty(sum(receives), rows.shape[1])
    return dist.all_to_all_single(arriving, rows.contiguous(), receives, sends, group, async_op=True), arriving


# Exchanges are hidden in groups with this link, and from so many bytes of rows a rank on. Measured on two H200s with
# GPT-2 medium, 8 experts in every second block: with 128 MiB of rows a step takes 233 ms instead of 245; with 64 MiB it
# takes 158 ms instead of 131, because then the step waits for the CPU.
HIDE_EXCHANGES = {"link": dist.NodeLink, "bytes": 3 << 25}


def visit_under_own_rows(mlps, group, rows, counts):
    """As visit, but while rows travel, a rank's own experts compute with the rows that stay. R must be equal on all
    ranks, because it decides whether they do so.

    Rows travel there during c_fc of the rows that stay, and back during c_proj; gradients likewise. The cost: rows that
    stay are multiplied apart, so the CPU launches more kernels, and each expert has two gradients to add up.
    """
    experts, link = mlps.__self__, dist.link_of(group)
    if not isinstance(link, HIDE_EXCHANGES["link"]) or rows.nbytes < HIDE_EXCHANGES["bytes"] or link.size == 1:
        return visit(mlps, group, rows, counts)
    n, rank, kernels.SPARED = link.size, link.rank, 2  # products spare 2 multiprocessors for the transfers' signals
    dist.all_to_all_single(incoming := torch.empty_like(counts), counts, group=group)
    both = torch.stack([counts, incoming]).view(2, n, -1)                                     # (2, rank, expert)
    sends, receives = both.sum(2).tolist()
    first = sum(sends[:rank])                                                                 # rows for lower ranks
    before, own, after = rows.split([first, sends[rank], len(rows) - first - sends[rank]])
    sends[rank] = receives[rank] = 0
    there, back = (SimpleNamespace(group=group, sends=a, receives=b) for a, b in ((sends, receives), (receives, sends)))
    stay, others = both[1, rank], torch.cat([both[1, :rank], both[1, rank + 1:]])

    away = before if rank == n - 1 else after if rank == 0 else torch.cat([before, after])
    arriving = Travel.apply(away, there)
    own = experts.activation(experts.c_fc(own.clone(), stay))  # a copy: a view would keep all rows alive
    y = faster(through_experts)(mlps, Arrival.apply(arriving, there), others)
    arriving = Travel.apply(y, back)
    own = experts.c_proj(own, stay)
    y = Arrival.apply(arriving, back)
    return torch.cat([own, y] if rank == 0 else [y, own] if rank == n - 1 else [y[:first], own, y[first:]])


FASTER.update({visit: visit_under_own_rows, through_experts: without_sorting, Reducer: EarlyReducer,
               ShardReducer: EarlyShardReducer, DDP: RestartableDDP, ShardedOptimizer: GuardedOptimizer,
               FlatParameter: FetchedParameter, FSDP: FetchingFSDP, even_pieces: split_pieces,
               Pipeline: PatientPipeline, ParallelGPT: LeanGPT, gather_tokens: gather_in_place,
               scatter_tokens: scatter_in_place, ColumnParallelLinear: FusableColumns, RingAttention: TunedRing,
               going_round: going_round_ahead})


# ----------------------------------------------------------------------------------------- memory: predicted and in use

def memory_bytes(config, zero=0, dp=1, tp=1, dtype=torch.float32, recompute="none", micro_batch=1, pieces=None,
                 held=1, fused=True, sequence=False, cp=1, context="ring", ep=1, copies=None, load=1.0):
    """Predicted bytes a rank: {"parameters", "gradients", "optimizer", "activations"}.

    dtype: what layers compute in. optimizer: AdamW's two moments, and float32 master weights if dtype is bf16 or fp16.
    activations: those of `held` micro-batches of `micro_batch` sequences, by activation_bytes. pieces: a pipeline
    rank's runs of pieces, from `split_pieces`; None means all. fused: our cross-entropy kernel computes the loss.
    sequence, context: as for parallelize. Ranks: dp share out the shards, cp share a sequence, ep share out the
    experts, `copies` keep the same experts (None: dp / ep). load: tokens of a rank's experts over an equal share.
    """
    tokens_cut, twice = tp if sequence else 1, cp > 1 and (context == "ulysses" or config.n_head > tp)
    pieces = [range(config.n_layer + 2)] if pieces is None else pieces
    wide, narrow, whole, vector, mine = master_dtype(dtype).itemsize, dtype.itemsize, 0, 0, 0
    for some, shared, ranks in zip(local_elements(config, tp, tuple(pieces)), (1, ep), (dp, copies or dp // ep)):
        m, v = some[True] / shared, some[False] / shared  # of matrices, of vectors, on this rank
        whole, vector = whole + m + v, vector + v
        mine += m / ranks + v if zero == 3 else (m + v) / (ranks if zero else 1)  # what this rank's optimizer steps
    masters = wide * mine if wide != narrow else 0
    return {"parameters": int(narrow * whole if zero < 3 else narrow * vector + (0 if masters else wide * mine)),
                "gradients": int(wide * (whole if zero < 2 else mine)), "optimizer": int(2 * wide * mine + masters),
                "activations": held * activation_bytes(config, micro_batch, tp, narrow, recompute, pieces, fused,
                                                       tokens_cut, twice, ep, load) // cp}


@functools.cache
def local_elements(config, tp, pieces):
    """Elements of these pieces on one of tp ranks: (those outside of experts, those of experts), each {is it a matrix:
    elements}."""
    count = Counter(), Counter()
    for run in pieces:
        for i in run:
            for total, some in zip(count, elements_of(config, tp, i)):
                total.update(some)
        if config.tied and {0, config.n_layer + 1} <= set(run):  # one weight, not two
            count[0][True] -= config.vocab_size * config.n_embd / tp
    return count


@functools.cache
def elements_of(config, tp, i):
    """local_elements of piece i alone."""
    count = Counter(), Counter()
    for name, param in GPT(config, seed=None, pieces=range(i, i + 1)).named_parameters():
        layer, _, leaf = name.rpartition(".")
        how = planned(layer, GPT2_PLAN)
        whole = how is None or getattr(how, "func", None) is RowParallelLinear and leaf == "bias"
        count[".experts." in name][is_matrix(param)] += param.numel() / (1 if whole else tp)
    return count


def activation_bytes(config, micro_batch, tp, width, recompute, pieces, fused=True, tokens_cut=1, twice=False, ep=1,
                     load=1.0):
    """Bytes that autograd keeps from the forward of `micro_batch` sequences to their backward. Of a block, in elements
    a token:

        whole on every rank: x, LN(x), x + attention, LN of that                  4C / tokens_cut
        cut over tp: q, k, v, attention's output, MLP before and after GeLU       4C + 2 inner
                     attention's output once more, if `twice`                     C

    Each layer norm also keeps two float32 numbers a token, and attention one a head. No (T, T) matrix is kept.
    recompute="block" keeps x alone; "attention" drops q, k, v and attention's output. What backward then computes again
    exists for one block at a time, and is not counted. twice: Ulysses keeps the output before and after its all-to-all;
    a ring keeps it head by head for itself, and token by token for the projection. Experts have `routed_bytes` in place
    of 2 inner. The embedding keeps its positions once; if the vocabulary is cut, also row numbers and a mask, 9 bytes a
    token. The head keeps its input, LN of it, and the logits. PyTorch's loss keeps a float32 log-softmax instead of the
    logits. The loss of a cut vocabulary keeps them as they are, and so does a `fused` one, which writes the gradient
    over them. Every loss keeps the targets, 8 bytes a token; all but PyTorch's keep three float32 numbers a token, too.
    ZB-H1 keeps more than this: the output gradients that its W actions need.
    """
    tokens, c = micro_batch * config.seq_len, config.n_embd
    blocks = [config.has_experts(i - 1) for run in pieces for i in run if 1 <= i <= config.n_layer]
    first, head = (any(i in run for run in pieces) for i in (0, config.n_layer + 1))
    attention = ((4 + twice) * c * width + 4 * config.n_head) / tp
    rest = (4 * c * width + 16) / tokens_cut
    mlps = sum(routed_bytes(config, tp, width, tokens_cut, ep, load, fused) if routed else 2 * config.inner * width / tp
               for routed in blocks)
    every = {"none": rest + attention, "attention": rest, "block": c * width / tokens_cut}[recompute] * len(blocks)
    every += mlps if recompute != "block" else 0
    logits = config.vocab_size / tp * (width if fused or tp > 1 else max(width, 4))
    ids, targets = 8 / micro_batch + 9 * (tp > 1), 8 + 12 * (fused or tp > 1)
    last = (c * width + 8) / tokens_cut + c * width + logits + targets
    return int(tokens * (every + first * ids + head * last))


def routed_bytes(config, tp, width, tokens_cut, ep, load, fused):
    """Bytes a token that a router and k experts keep for backward:

                                                                         PyTorch's kernels: elements   `fused`: bytes
        router    each expert's score, and its place (int64) in order    E float32, E int64            nothing
                  the input in float32                                   C, if layers have 16 bits     nothing
                  k chosen scores, their sum, and the k weights          2k + 1                        4k + 4
                  the numbers of the k experts                           among the places              8k
        sorting   where each row comes from, and where it goes           3k int64                      4k
                  the same where rows are received from other ranks      2k int64, times `load`        4k, times `load`
        experts   rows received, MLP before and after GeLU               k (C + 2 inner / tp), times `load`
                  outputs that come back to be weighed                   k C

    A rank routes 1 / tokens_cut of the tokens. If tokens_cut > 1, it also keeps the k weights of all tokens.
    """
    c, k, wide = config.n_embd, config.top_k, max(width, 4)
    rows = k * load * (c + 2 * config.inner / tp) * width + k * c * width
    if fused:
        return rows + (12 * k + 4) / tokens_cut + 4 * k * ((tokens_cut > 1) + 1 + load * (ep > 1))
    router = config.experts * (wide + 8) + (2 * k + (k > 1)) * wide + (wide > width) * (4 - width) * c
    return rows + router / tokens_cut + k * (24 + 16 * load * (ep > 1) + width * (wide > width))


def kept_tensors(net):
    """This rank's tensors that outlive a step, by kind: {"parameters", "gradients", "optimizer"}."""
    models, buckets = net.stages.values(), [bucket for reducer in net.reducers for bucket in reducer.buckets]
    shards = [b.shard for b in buckets if b.shard is not None]
    module = [p for m in models for p in getattr(m, "module", m).parameters()]
    mixed = net.dtype != master_dtype(net.dtype)
    kinds = {
        "parameters": module + ([] if mixed else shards),
        "gradients": [p.grad for p in module + shards] + [b.total for b in buckets] + [
            t for reducer in net.reducers for t in tensors_in(list(getattr(reducer, "under_way", ())))],
        "optimizer": (shards if mixed else []) + [t for p in net.optimizer.state.values() for t in p.values()]}
    return {kind: [t for t in tensors if isinstance(t, torch.Tensor) and t.dim()] for kind, tensors in kinds.items()}


# ------------------------------------------------------------------------------------------------- schedules on a clock

class Timeline(NamedTuple):
    """Times in the unit of `simulate`'s costs."""
    spans: list         # for each rank: [(action, start, end)]
    length: float
    idle: list          # for each rank: time in which it computes nothing
    peak: list          # for each rank: the most activations it holds at once, in micro-batches of all its stages


def most_held(actions):
    """The most activations that a list holds at once: each from its F to its B or W."""
    return max(itertools.accumulate({"F": 1, "B": -1, "W": -1}.get(action.kind, 0) for action in actions), default=0)


def simulate(lists, forward=1.0, input_gradient=1.0, weight_gradient=1.0, transfer=0.0):
    """Give each action of lists without transfers a start and an end: a Timeline.

    A cost is the time that a micro-batch takes on all v stages of a rank, so one stage takes 1/v of it. transfer: the
    time of a message. An activation is held from the end of its F to the end of its B or W.
    """
    p, stages, listed = len(lists), stages_of(lists), set().union(*lists)
    v = stages // p
    cost = {"F": forward / v, "I": input_gradient / v, "W": weight_gradient / v}
    cost["B"] = cost["I"] + cost["W"]
    end, spans, clock = {}, [[] for _ in lists], [0.0] * p
    for r, action in in_order(lists):
        start = max([clock[r]] + [end[n] + transfer * (n.stage % p != r) for n in needs(action, stages, listed)])
        end[action] = clock[r] = start + cost[action.kind]
        spans[r].append((action, start, clock[r]))
    idle = [max(clock) - sum(b - a for _, a, b in row) for row in spans]
    return Timeline(spans, max(clock), idle, [most_held(actions) / v for actions in lists])


def draw(timeline, unit=1.0):
    """The timeline as text: a row a rank, a column a unit of time. F2 is F of micro-batch 2; dots are idle time."""
    columns = round(timeline.length / unit)
    width = max(len(str(a)) for row in timeline.spans for a, _, _ in row) + 1
    lines = []
    for r, row in enumerate(timeline.spans):
        cells = ["." * (width - 1)] * columns
        for action, start, end in row:
            for c in range(round(start / unit), round(end / unit)):
                cells[c] = str(action).ljust(width - 1) if c == round(start / unit) else "-" * (width - 1)
        lines.append(f"rank {r}  " + " ".join(cells))
    return "\n".join(lines)


def draw_svg(timeline, path):
    """Write the timeline as SVG: F is blue, B and I are orange, W is green. It fits light and dark pages."""
    colours = {"F": "#4c8dd6", "B": "#e0883a", "I": "#e0883a", "W": "#4ba36b"}
    scale, height = 960 / timeline.length, 26
    box = f'viewBox="0 0 1040 {height * len(timeline.spans) + 8}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="11">']
    for r, row in enumerate(timeline.spans):
        out.append(f'<text x="4" y="{r * height + 19}" fill="#888">rank {r}</text>')
        for action, start, end in row:
            x, w = 60 + start * scale, (end - start) * scale
            opacity = 1 - 0.35 * (action.stage // len(timeline.spans) % 2)
            out.append(f'<rect x="{x:.1f}" y="{r * height + 4}" width="{w:.1f}" height="{height - 4}" '
                       f'fill="{colours[action.kind]}" fill-opacity="{opacity}" stroke="#fff" stroke-width="0.5"/>'
                       f'<text x="{x + w / 2:.1f}" y="{r * height + 19}" fill="#fff" text-anchor="middle">'
                       f'{action.micro_batch}</text>')
    with open(path, "w") as file:
        file.write("\n".join(out + ["</svg>\n"]))


# ---------------------------------------------------------------------------------------------------------------- demos

def demo_memory(arguments):
    config, gib = PRESETS[arguments.model], 2**30
    print(f"{arguments.model}, {config.parameters():,} parameters, dp {arguments.dp} x tp {arguments.tp}, "
          f"{arguments.dtype}, AdamW: GiB a GPU, without activations\n\n"
          f"{'stage':8}{'parameters':>12}{'gradients':>12}{'optimizer':>12}{'total':>10}   sharded over dp")
    dtype = getattr(torch, arguments.dtype)
    stages = [memory_bytes(config, zero, arguments.dp, arguments.tp, dtype) for zero in range(4)]
    totals = [b["parameters"] + b["gradients"] + b["optimizer"] for b in stages]
    kept = ("nothing", "optimizer", "optimizer, gradients", "optimizer, gradients, parameters")
    for zero, (b, total, what) in enumerate(zip(stages, totals, kept)):
        print(f"ZeRO-{zero}  {b['parameters'] / gib:12.2f}{b['gradients'] / gib:12.2f}{b['optimizer'] / gib:12.2f}"
              f"{total / gib:10.2f}   {what}\n        {'#' * round(40 * total / totals[0])}")
    print("\nGradients are float32. With 16-bit weights the optimizer keeps 12 bytes a parameter: two moments and a\n"
          "float32 master. At stage 3 the master's Nth, part of the optimizer here, is all that is kept of a matrix:\n"
          "16-bit weights exist only while its layer computes.")


def demo_pipeline(arguments):
    p, m, v = arguments.stages, arguments.micro_batches, arguments.virtual_stages
    schedules = [("GPipe", gpipe(p, m), 3 * (p - 1), 1), ("1F1B", one_f_one_b(p, m), 3 * (p - 1), 1),
                 ("ZB-H1", zero_bubble_h1(p, m), p - 1 if m >= p else None, 1)]
    if m % p == 0:
        schedules.insert(2, (f"interleaved 1F1B, v={v}", interleaved(p, m, v), 3 * (p - 1) / v, v))
    else:
        print(f"(no interleaved schedule: {m} micro-batches are not a multiple of {p} stages)")
    for name, lists, formula, chunks in schedules:
        check(lower(lists))
        timeline = simulate(lists)
        idle = max(timeline.idle)
        print(f"\n{name}: idle {'' if formula is None else f'{formula:g} by the formula | '}{idle:g} simulated, bubble "
              f"{100 * idle / timeline.length:.0f} % of {timeline.length:g}; peak activations "
              + " ".join(f"{n:g}" for n in timeline.peak))
        print(draw(timeline, 1 / chunks))
        if arguments.svg:
            os.makedirs(arguments.svg, exist_ok=True)
            draw_svg(timeline, os.path.join(arguments.svg, f"pipeline-{name.split()[0].lower()}.svg"))
    print("\nF, I and W take 1 unit of time each, B = I + W takes 2. A column is 1 unit. An activation counts 1, from\n"
          "its F to its B or W. If a rank has v stages, a column is 1/v units, an activation counts 1/v, and the\n"
          "rank's second F0 runs micro-batch 0 through its next stage. -- is the rest of an action, .. is idle.")


def traffic_of(operation):
    """What this rank has sent by one operation since the counts were reset. Resets all counts."""
    sent = dist.traffic().get(operation, dist.Traffic())
    dist.reset_traffic()
    return sent


def off(a, b):
    return ((a - b).norm() / b.norm()).item()  # the relative error of a


def demo_data(arguments):
    """Data parallelism in float64: when each bucket leaves, what the naive way and DDP send, and their errors."""
    N, rank, config = dist.get_world_size(), dist.get_rank(), PRESETS["tiny"]
    dist.use(None, "ring")  # the lecture's: below the bar small tensors go another way, in fewer messages
    say, mine, K = (print if rank == 0 else lambda text: None), slice(2 * rank, 2 * rank + 2), config.parameters()
    x, y = torch.randint(config.vocab_size, (2, 2 * N, config.seq_len), generator=torch.Generator().manual_seed(0))
    one, naive, net = (GPT(config).double() for _ in range(3))
    model, came, left = DDP(net, bucket_mb=2), set(), []
    piece = {p: ".".join(name.split(".")[:2 if name.startswith("h.") else 1]) for name, p in net.named_parameters()}

    def look(param):  # called right after DDP's own hook
        came.add(param)
        for bucket in model.buckets[len(left):model.reducer.next]:
            left.append(bucket)
            has, lacks = (", ".join(dict.fromkeys(piece[p] for p in some))
                          for some in (bucket.params, [p for p in reversed(model.params) if p not in came]))
            say(f"  {len(came):7} of {len(piece)}{bucket.numel * 8 // 1024:>9}   {has:22}"
                f"{lacks or 'nothing, so it travels alone'}")

    for param in model.params:
        param.register_post_accumulate_grad_hook(look)
    say(f"{N} ranks, 2 of {2 * N} sequences each, the same GPT on all: K = {K:,} parameters in {len(piece)} tensors, "
        f"float64.\nA bucket leaves when its last gradient is computed, and travels while backward goes on:\n\n"
        f"  gradients ready      KiB   bucket of             backward still computes")
    traffic_of("all_reduce")
    cross_entropy(one(x), y, config.vocab_size).backward()
    cross_entropy(model(x[mine]), y[mine], config.vocab_size).backward()
    model.finish_grad_sync()
    rows = [("DDP, in buckets", traffic_of("all_reduce"), net)]
    cross_entropy(naive(x[mine]), y[mine], config.vocab_size).backward()
    average_gradients(naive)
    rows = [("naive, after backward", traffic_of("all_reduce"), naive)] + rows
    say("\n  sent by rank 0           all-reduces  messages         bytes   gradients' error against one process")
    for what, sent, other in rows:
        error = max(off(p.grad, q.grad) for p, q in zip(other.parameters(), one.parameters()))
        say(f"  {what:25}{sent.calls:11}{sent.messages:10}{sent.bytes:14,}   {error:.0e}")
    say(f"  {'2(N-1)/N x K x 8 bytes (float64)':46}{2 * (N - 1) * 8 * K // N:14,}   in 2(N-1) messages an all-reduce")
    dist.use(None, "ours")


def demo_tensor(arguments):
    """Tensor parallelism in float64: attention and an MLP cut over the ranks, what f and g send, and the errors."""
    N, rank = dist.get_world_size(), dist.get_rank()
    config, say = GPTConfig(n_layer=1, n_head=2 * N, n_embd=32 * N), print if rank == 0 else lambda text: None
    generator = torch.Generator().manual_seed(0)
    X, dY = torch.randn(2, 16, config.seq_len, config.n_embd, dtype=torch.float64, generator=generator)
    say(f"{N} ranks have the same X (B, T, C) = {tuple(X.shape)} and dY. An all-reduce sends 2(N-1)/N x BTC x 8 "
        f"bytes = {2 * (N - 1) * X.nbytes // N:,} a rank.")
    one, net = GPT(config).double().h["0"], tensor_parallel(GPT(config).double(), None).h["0"]
    for name, first, what in (("attn", "c_attn", "Attention: Y = heads(X A) B; X A is each head's q, k and v"),
                              ("mlp", "c_fc", "MLP: Y = GeLU(X A) B")):
        whole, cut, inner = getattr(one, name), getattr(net, name), []
        cut.c_proj.register_forward_pre_hook(lambda layer, inputs, inner=inner: inner.append(inputs[0].detach()))
        x, x_cut = X.clone().requires_grad_(), X.clone().requires_grad_()
        Y = whole(x)
        Y.backward(dY)
        traffic_of("all_reduce")
        Y_cut = cut(x_cut)
        g = traffic_of("all_reduce")
        Y_cut.backward(dY)
        f, term = traffic_of("all_reduce"), inner[0] @ cut.c_proj.weight.T
        (A, B), (A_r, B_r) = ([tuple(getattr(m, leaf).weight.T.shape) for leaf in (first, "c_proj")]
                              for m in (whole, cut))
        say(f"\n{what}. A {A} is cut by columns, B {B} by rows:")
        dist.print_in_order(f"  rank {rank}   A_{rank} {A_r}   into B {tuple(inner[0].shape)}   B_{rank} {B_r}   "
                            f"its term of Y {tuple(term.shape)}, {100 * off(term, Y):.0f} % off Y")
        say(f"  f   forward   nothing                                 backward  all-reduce of dX, {f.bytes:,} bytes "
            f"sent\n"
            f"  g   forward   all-reduce of Y, {g.bytes:9,} bytes sent   backward  nothing\n"
            f"  relative error, off from one rank's result: Y {off(Y_cut, Y):.0e}, dX {off(x_cut.grad, x.grad):.0e}")


def context_steps(n, kind):
    """What each rank of a ring computes in each step: [step][rank] is (chunks of queries, chunks of keys, blocks).

    A sequence has 2n chunks. A block is the scores of one chunk with another, half a block those of one with itself.
    """
    held = [own_tokens(2 * n, rank, n, kind) for rank in range(n)]  # a sequence of 2n tokens, so a token is a chunk

    def work(rank, other):
        rows, keys, causal = seen(rank, other, 1) if kind == "ring" else (slice(None), slice(None), True)
        mine, theirs = held[rank][rows], held[other][keys]
        ahead = mine.unsqueeze(1) - theirs  # how many chunks the queries are ahead of the keys
        blocks = (ahead > 0) + 0.5 * (ahead == 0) if causal else torch.ones(ahead.shape)
        return mine.tolist(), theirs.tolist(), blocks.sum().item()
    return [[work(rank, (rank - s) % n) for rank in range(n)] for s in range(n)]


def demo_context(arguments):
    n = arguments.ranks
    print(f"N = {n} ranks share a sequence of 2N = {2 * n} chunks. Keys and values go round to the right, so in step s "
          f"a rank\nhas those of the rank s to its left. \"Q x K: W\" means that queries of chunks Q see keys of "
          f"chunks K, in W blocks of\nscores. A block is one chunk with another. A chunk with itself is half a block, "
          f"because attention is causal.")
    for kind, title in ("ulysses", "contiguous chunks, if a ring used them"), ("ring", "zigzag, which our ring uses"):
        steps = context_steps(n, kind)
        longest = [max(blocks for _, _, blocks in row) for row in steps]

        def cell(queries, keys, blocks):
            text = "{} x {}: {:g}".format(*(",".join(map(str, some)) for some in (queries, keys)), blocks)
            return (text if blocks else "idle").ljust(18)

        print(f"\n{title}\n          holds     " + "".join(f"step {s}".ljust(18) for s in range(n)) + "blocks")
        for rank, row in enumerate(zip(*steps)):
            print(f"  rank {rank:<3} {','.join(map(str, row[0][0])):10}" + "".join(cell(*work) for work in row)
                  + f"{sum(blocks for _, _, blocks in row):g}")
        print("  the busiest        " + "".join(f"{most:g}".ljust(18) for most in longest) + f"{sum(longest):g}")
    print(f"\nA step lasts as long as its busiest rank. All {2 * n * n} blocks, shared out evenly, are {2 * n} a rank, "
          f"and zigzag takes just that.")


def demo_experts(arguments):
    """Experts over the ranks in float64: where tokens go, what the exchange sends, the errors; then balancing."""
    N, rank = dist.get_world_size(), dist.get_rank()
    config, say = GPTConfig(seq_len=5, n_embd=32, experts=2 * N), print if rank == 0 else lambda text: None
    one, net, C, E = GPT(config).double().h["0"].mlp, GPT(config).double(), config.n_embd, config.experts
    expert_parallel(net, *split_experts(make_mesh("cpu", dp=N), N))
    cut, mine, generator = net.h["0"].mlp, slice(rank, rank + 1), torch.Generator().manual_seed(2)
    for router in (one.router, cut.router):
        router.weight.detach().mul_(10)  # initial scores are almost equal; this makes them differ
    X, dY = torch.randn(2, N, config.seq_len, C, dtype=torch.float64, generator=generator)
    x, x_cut = X.clone().requires_grad_(), X[mine].clone().requires_grad_()
    Y = one(x)
    Y.backward(dY)
    say(f"{N} ranks, {config.seq_len} tokens each, C = {C} wide, float64. E = {E} experts, 2 on each rank. A token's "
        f"output is the\nweighted sum of k = {config.top_k} experts' outputs:\n")
    chosen, gates = cut.router(x_cut)
    lines = [" + ".join(f"{gate:.2f} x expert {e}" for e, gate in zip(*token)) for token in zip(chosen[0], gates[0])]
    dist.print_in_order("\n".join(f"  rank {rank:<3} token {t}   {line}" for t, line in enumerate(lines)))

    counts = count_of_each(chosen, E)
    rows, incoming = counts.view(N, 2).sum(1), counts.new_empty(N)
    dist.all_to_all_single(incoming, rows)
    say("\n           rows for expert" + "".join(f"{e:4}" for e in range(E)) + "    so for rank"
        + "".join(f"{r:4}" for r in range(N)))
    dist.print_in_order(f"  rank {rank:<3}" + 16 * " " + "".join(f"{n:4}" for n in counts) + 15 * " "
                        + "".join(f"{n:4}" for n in rows))
    dist.reset_traffic()
    Y_cut = cut.experts(x_cut, chosen, gates)
    there = traffic_of("all_to_all_single").bytes
    Y_cut.backward(dY[mine])
    back = traffic_of("all_to_all_single").bytes
    law = 8 * C * (rows.sum() + incoming.sum() - 2 * rows[rank]).item()  # rows for others, outputs of rows from others
    errors = [off(Y_cut, Y[mine]), off(x_cut.grad, x.grad[mine])]
    errors.append(max(off(p.grad, q.grad.chunk(N)[rank])
                      for p, q in zip(cut.experts.parameters(), one.experts.parameters())))
    say("\n           bytes sent by all-to-all: counted | formula     errors against one process\n"
        "           forward             backward                Y       dX      its experts' gradients")
    dist.print_in_order(f"  rank {rank:<3}{there:8,} | {law + 16 * (N - 1):<8,}{back:8,} | {law:<8,}      "
                        + "   ".join(f"{error:.0e}" for error in errors))
    say("\nIn forward a rank sends rows to other ranks' experts, and outputs for the rows that it received: C x 8 "
        "bytes each.\nBackward sends their gradients. Before all this, a rank sends E/N counts of 8 bytes to each "
        "other rank, so that the\nother rank knows how many rows it will receive.")
    demo_balance(cut.router, generator, say)


def demo_balance(router, generator, say, rate=0.01, tokens=500):
    """Balance a router on the same tokens, 50 times. The tokens are alike, so at first most prefer the same experts."""
    N, rank, (E, C) = dist.get_world_size(), dist.get_rank(), router.weight.shape
    batch = torch.randn(N, tokens, C, dtype=torch.float64, generator=generator)
    batch += torch.randn(C, dtype=torch.float64, generator=generator)
    say(f"\nBalancing: each round routes the same {tokens} tokens a rank. After it an expert's bias falls by {rate} if "
        f"it got more\nthan the mean of {N * tokens * router.top_k // E} tokens, else it rises. The mean bias stays 0. "
        f"Biases only decide which experts are chosen.\n\n  rounds   largest    " + "load".rjust(6).ljust(6 * E + 2)
        + "  bias")
    for done in range(51):
        router.load = 0
        _, gates = router(batch[rank:rank + 1])
        gates.sum().backward()  # because the router counts its load in backward
        dist.all_reduce(load := router.load)
        if done in (0, 10, 50):
            say(f"  {done:6}   {load.max() * E / load.sum():.2f} x mean" + "".join(f"{n:6}" for n in load) + "  "
                + "".join(f"{b:+7.2f}" for b in router.bias))
        router.balance(load, rate)


def positive(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1, e.g. 4")
    return int(text)


class Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, without argparse's usage
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}; see --help\n")


def main():
    parser = Parser(description="Demos of parallel training.")
    demos = parser.add_subparsers(required=True, metavar="DEMO")
    memory = demos.add_parser("memory", help="the ZeRO table: bytes a GPU at each stage")
    memory.add_argument("--model", choices=list(PRESETS), default="gpt2-xl")
    memory.add_argument("--dp", type=positive, default=8)
    memory.add_argument("--tp", type=positive, default=1)
    memory.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    memory.set_defaults(run=demo_memory, processes=False)
    pipeline = demos.add_parser("pipeline", help="the schedules: grids, bubbles, activations")
    pipeline.add_argument("--stages", type=positive, default=4)
    pipeline.add_argument("--micro-batches", type=positive, default=8)
    pipeline.add_argument("--virtual-stages", type=positive, default=2)
    pipeline.add_argument("--svg", metavar="DIR", help="also write an SVG of each schedule there")
    pipeline.set_defaults(run=demo_pipeline, processes=False)
    context = demos.add_parser("context", help="a sequence cut over ranks: who holds and computes what in each step")
    context.add_argument("--ranks", type=positive, default=4, help="ranks of the ring; starts no processes")
    context.set_defaults(run=demo_context, processes=False)
    for name, demo, what in (("data", demo_data, "gradients sent in buckets during backward, or one by one"),
                             ("tensor", demo_tensor, "attention and MLP cut over ranks: shapes, f and g, bytes"),
                             ("experts", demo_experts, "tokens that travel to experts; balancing their load")):
        ranks = demos.add_parser(name, help=what)
        ranks.add_argument("--ranks", type=positive, default=2, help="processes to start, on the CPU")
        ranks.set_defaults(run=demo, processes=True)
    arguments = parser.parse_args()
    if not arguments.processes:
        return arguments.run(arguments)
    if "RANK" not in os.environ:
        dist.start_again(arguments.ranks)
    dist.initialize("cpu")
    arguments.run(arguments)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
