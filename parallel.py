"""Parallel training, applied to a model from outside. In lecture order, each section adds one idea:

    mesh        which ranks form which group: axes (pp, dp, cp, tp), tensor parallel innermost
    data        replicas average their gradients: one all-reduce a parameter, then one a bucket
    ZeRO        stage 1 shards the optimizer, stage 2 the gradients too, stage 3 (FSDP) the parameters too
    tensor      every matrix is cut by columns or rows; a sublayer costs one all-reduce forward, g, and one backward, f
    pipeline    layers are spread over ranks: GPipe and 1F1B, as lists of actions
    norm        one gradient norm over any combination
    whole       whole tensors from cut ones and back, for checkpoints

train.py puts them together, in an order that works: `parallelize`.

further/ has a file each for sequence parallelism, context parallelism, experts, more schedules, and groups on several
nodes. `parallel.DDP`, `ShardedOptimizer` and `FSDP`, for any nn.Module, are there, too: the last function finds them.

`python -m lessons data`, `memory`, `fsdp`, `tensor`, `pipeline`, and for further/ `context`, `experts`: on a laptop.

`group=None` is all ranks, as in torch.distributed. What sections tell each other of a parameter is its `Placement`.

Letters: N ranks in the group, r this rank, K parameters, m micro-batches, p pipeline ranks, v stages a rank; B, T, C, V
as in model.py. Read with: CS336 lectures 7 and 8; Ultra-Scale Playbook, the chapters of the same names.
"""

import functools
import importlib
import itertools
import math
import weakref
from collections import Counter, defaultdict, deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh

import collectives as dist
import kernels


# ----------------------------------------------------------------------------------------------------------------- mesh

def make_mesh(device_type, dp=1, tp=1, pp=1, cp=1):
    """A torch DeviceMesh with axes ("pp", "dp", "cp", "tp"); `mesh["tp"].get_group()` is this rank's group along tp.

    tp is innermost, because its ranks talk in every layer, and neighbours share a node. Of pp 2, dp 2, tp 2 each rank
    has these groups:

        rank    0    1    2    3    4    5    6    7
        tp      01   01   23   23   45   45   67   67
        dp      02   13   02   13   46   57   46   57
        pp      04   15   26   37   04   15   26   37

    Call it on all ranks, as every function that makes groups. ValueError unless pp x dp x cp x tp is the world size.
    """
    there, needed = dist.get_world_size(), pp * dp * cp * tp
    if needed != there:
        raise ValueError(f"pp {pp} x dp {dp} x cp {cp} x tp {tp} needs {needed} processes, there are {there}")
    return init_device_mesh(device_type, (pp, dp, cp, tp), mesh_dim_names=("pp", "dp", "cp", "tp"))


def groups_of(grids):
    """Of the grid of ranks that this rank is in: [its group along the rows, its group along the columns]."""
    return sum([dist.rows_and_columns(grid) for grid in grids.tolist()], [])


def group_or_world(group):
    return group or torch.distributed.group.WORLD


@dataclass(frozen=True)
class Placement:
    """How a parameter and its gradient are spread over ranks: `param.placement`. Data parallelism needs the default
    alone: a whole parameter, the same on all ranks that average its gradient. Whoever cuts one sets fields, and the
    norm reads them. Parameters of a bucket have equal placements. (How each was cut does not count.)
    """
    sharded_over: tuple = ()  # groups whose ranks hold other parts of the model: other columns, shards, or layers
    partial_over: tuple = ()  # groups whose ranks have terms of its gradient, which is their sum: the two stages of a
                              # tied embedding, the ranks that saw T/N tokens each
    twins: int = 1            # parameters of this rank that are one: the ends of a tied embedding, if both live here
    average_over: object = None  # of an expert: the group that keeps the same one, and averages its gradient,
    divide_by: int = 1           # by how many: an expert's gradient adds up those of so many ranks' losses
    decays: bool = None       # whether it has weight decay; None: as its shape says
    cuts: tuple = field(default=(), compare=False)  # the `Cut`s that took this rank's part of the whole tensor,
    whole: tuple = field(default=None, compare=False)  # and that one's shape


WHOLE = Placement()  # made once, because every step asks for the placement of every parameter


def placement_of(param):
    return getattr(param, "placement", WHOLE)


class PlacedParameter(nn.Parameter):
    """A parameter with a placement of its own. A deep copy of it, as for an average of weights, has the same."""

    def __deepcopy__(self, memo):
        copy = super().__deepcopy__(memo)
        copy.placement = self.placement
        return copy


def set_placement(param, **changes):
    """Change fields of a parameter's placement."""
    param.__class__ = PlacedParameter
    param.placement = replace(placement_of(param), **changes)


def is_matrix(param):
    """Whether a parameter has weight decay, and FSDP shards it. Biases and norms have none, and stay whole."""
    decays = placement_of(param).decays
    return param.dim() >= 2 if decays is None else decays


# ---------------------------------------------------------------------------------------------- data parallel: replicas
#
# Every rank holds the whole model and sees its own part of the batch. Gradients are averaged, so replicas stay equal:
# an all-reduce of K elements, 2(N-1)/N x K sent by each rank and step, however many micro-batches the step has.

def average_gradients(module, group=None):
    """The lecture's data parallelism: after backward, one all-reduce a parameter. Each tensor, however small, pays the
    latency of a collective, and nothing computes meanwhile. A rank that has no gradient of a parameter sends zeros."""
    for param in module.parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad.to_dense()
            dist.all_reduce(param.grad, dist.ReduceOp.AVG, group)


class Bucket:
    """Parameters whose gradients travel together, in one collective. group: the N ranks that average them.

        params     W (2, 3)             b (2)   V (2, 2)
        message    0  1  2  3  4  5     6  7    8  9 10 11       `view(message, W)` is the first six, as (2, 3)

    Gradients of several micro-batches add up in .grad; when the bucket leaves, `take_message` lays them side by side.
    """

    def __init__(self, params, group):
        self.params = params
        self.placement = placement_of(params[0])
        self.group = self.placement.average_over or group  # few ranks keep the same expert (further/experts.py)
        self.channel = None  # in which the bucket travels: `give_channels` sets it
        self.first, self.numel = {}, 0
        for p in params:
            self.first[p] = self.numel  # where in the message it begins
            self.numel += p.numel()

    def view(self, flat, param):
        """A parameter's part of a flat vector, in the parameter's shape."""
        return flat[self.first[param]:][:param.numel()].view(param.shape)

    @torch.no_grad()
    def take_message(self):
        """The gradients side by side, to be sent; every .grad is dropped. A parameter without one counts as zero."""
        message = self.begin_message()
        for param in self.params:
            if param.grad is not None and param.requires_grad:
                self.view(message, param).add_(param.grad)  # a FlatBucket's message may hold sums before
                param.grad = None
        if self.placement.divide_by > 1:
            message /= self.placement.divide_by
        return message

    def begin_message(self):
        return torch.zeros(self.numel, dtype=self.params[0].dtype, device=self.params[0].device)


def all_reduce_bucket(bucket):
    """Start to average a bucket: 2(N-1)/N x K elements sent. Returns (handle, input, output), as a Reducer's `send`."""
    message = bucket.take_message()
    if dist.get_world_size(bucket.group) == 1:
        return dist.Handle(), message, message
    handle = dist.all_reduce(message, dist.ReduceOp.AVG, bucket.channel, async_op=True)
    return handle, message, message


def give_channels(buckets):
    """Let the buckets of one object travel apart from all else that its groups send: a channel for each group."""
    channels = {}
    for bucket in buckets:
        if bucket.group not in channels:
            channels[bucket.group] = dist.Channel(bucket.group)
        bucket.channel = channels[bucket.group]


def split_into_grads(bucket, average):
    """Make each parameter's .grad its part of the average. Frozen ones have none, so an optimizer leaves them alone."""
    for param in bucket.params:
        if param.requires_grad:
            param.grad = bucket.view(average, param)


def make_buckets(params, megabytes=None, same=lambda param: None):
    """Lists of parameters, each of about `megabytes` (25, as PyTorch's), in the order in which they fill up from the
    last layer back, because backward computes the last gradients first. Those of a list have one dtype, device,
    placement and requires_grad, and the same value of same(param)."""
    limit = (megabytes or 25) * 2**20
    filling, full = {}, []
    for param in reversed(params):
        key = param.dtype, param.device, placement_of(param), param.requires_grad, same(param)
        if key in filling and sum(p.nbytes for p in [*filling[key], param]) > limit:
            full.append(filling.pop(key))
        filling[key] = [*filling.pop(key, []), param]  # moved to the end: lists leave as they fill up
    return [*full, *filling.values()]


class Reducer:
    """Sends buckets while backward still computes: each leaves when its last gradient is there and all before it left.

    All ranks must start the same collectives in the same order, or one bucket would be added to another. So buckets
    leave in the order of the list, in a channel of their own. A parameter that gets no gradient therefore holds up its
    bucket, and those after it in the list, until `finish`. Three buckets, the last layer's first:

        backward computes      gradients of 0     gradients of 1     gradients of 2
        the network                               all-reduce of 0    all-reduce of 1    all-reduce of 2
                                                                                        `finish` waits

    send(bucket): starts a collective; returns (handle, its input, its output). store(bucket, output): once it is done.
    """

    def __init__(self, buckets, send, store):
        self.buckets, self.send, self.store = buckets, send, store
        self.bucket_of = {p: bucket for bucket in buckets for p in bucket.params}
        self.under_way = deque()  # (bucket, handle, input, output): the tensors must live until handle.wait()
        self.syncing = True       # whether this backward sends
        self.begin_step()
        call_when_computed(self.bucket_of, self.computed)

    def begin_step(self):
        self.next = 0  # the bucket that leaves next
        self.missing = {bucket: set(bucket.params) for bucket in self.buckets}  # gradients that are still to come

    @contextmanager
    def no_sync(self):
        """Goes around every backward but the step's last one: gradients add up, and are not sent."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def computed(self, param):
        """Autograd calls this when it has added all of a backward's gradient to param.grad."""
        if self.syncing:
            self.mark_ready(self.bucket_of[param], param)

    def mark_ready(self, bucket, param):
        """A bucket waits for one gradient less, and may leave."""
        if param not in self.missing[bucket]:
            raise RuntimeError("a second backward before finish_grad_sync(): run all but the last one under no_sync(); "
                               "to drop a step, call zero_grad() of the model, or of the ShardedOptimizer")
        self.missing[bucket].discard(param)
        while self.next < len(self.buckets) and self.complete(self.buckets[self.next]):
            self.start(self.buckets[self.next])
            self.next += 1

    def complete(self, bucket):
        """Whether all gradients are there. Frozen parameters have none."""
        return not any(p.requires_grad for p in self.missing[bucket])

    def start(self, bucket):
        if any(p.requires_grad for p in bucket.params):
            self.under_way.append((bucket, *self.send(bucket)))

    @torch.no_grad()
    def finish_oldest(self):
        bucket, handle, _, output = self.under_way.popleft()
        handle.wait()
        self.store(bucket, output)

    def unsent(self):
        """The buckets that have not left yet: `finish` sends them."""
        return self.buckets[self.next:]

    def finish(self):
        """Send what has not left, and wait for all averages. Call it after the step's last backward, on every rank."""
        for bucket in self.unsent():
            self.start(bucket)
        while self.under_way:
            self.finish_oldest()
        self.begin_step()

    def reset(self):
        """Drop the gradients of an unfinished step, for example after its backward raised on all ranks. (If it raised
        on some, they have sent other buckets than the rest, and the group is of no more use.) Call it on all ranks."""
        while self.under_way:
            self.under_way.popleft()[1].wait()
        for param in self.bucket_of:
            param.grad = None
        self.begin_step()


class Averager:
    """What averages gradients by `reducers`: BucketDDP and FlatOptimizer have one, FlatFSDP has two."""

    def no_sync(self):
        return self.reducers[-1].no_sync()  # FlatFSDP's other one sends in every backward

    def finish_grad_sync(self):
        """Send the gradients that have not left, and wait for all averages."""
        for reducer in self.reducers:
            reducer.finish()

    def zero_grad(self, set_to_none=True):
        """Drop all gradients, and an unfinished step. Call it on all ranks."""
        for reducer in self.reducers:
            reducer.reset()


class BucketDDP(Averager, nn.Module):
    """Data parallel over any module: gradients are averaged bucket by bucket, while backward still computes.

        model = BucketDDP(module, group)            the first rank broadcasts its parameters
        with model.no_sync(): loss.backward()       every micro-batch but the last: gradients only add up
        loss.backward(); model.finish_grad_sync()   now every rank's .grad is the mean over the ranks

    A parameter that a rank did not use counts as zero there, so one that nobody used has a gradient of zero, not None.
    Parameters may be frozen and unfrozen between steps, on all ranks alike. Buffers, such as BatchNorm's statistics,
    are each rank's own: further/ddp.py sends them, and refuses ranks whose models differ.
    Li et al., "PyTorch Distributed" (2020). CS336 lecture 8, data parallelism.
    """

    def __init__(self, module, group=None, bucket_mb=None):
        super().__init__()
        self.module, self.group = module, group_or_world(group)
        self.buckets = [Bucket(params, self.group) for params in make_buckets([*module.parameters()], bucket_mb)]
        for bucket in self.buckets:
            for param in bucket.params:
                dist.broadcast(param.detach(), group=bucket.group, group_src=0)
        give_channels(self.buckets)
        self.reducers = [Reducer(self.buckets, all_reduce_bucket, split_into_grads)]

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def refuse_others(param, method):
    """RuntimeError if more than one object averages a parameter's gradient: the mean would be taken twice."""
    if len(param._post_accumulate_grad_hooks) > 1:
        methods = [hook.method() for hook in param._post_accumulate_grad_hooks.values() if hasattr(hook, "method")]
        if any(other not in (None, method) for other in methods):
            raise RuntimeError("two objects average the gradient of one parameter, such as a DDP of the model and a "
                               "ShardedOptimizer of its parameters: make one of them only")


def call_when_computed(params, method):
    """Let autograd call method(param) when a backward has added all it has to param.grad."""
    method = weakref.WeakMethod(method)  # or parameters and buckets would keep each other alive

    def call(param):
        if alive := method():
            refuse_others(param, alive)
            alive(param)

    call.method = method
    for param in params:
        is_trained = param.requires_grad
        if param.is_floating_point() or param.is_complex():
            param.requires_grad_(True)  # else it takes no hook, and it may be trained later
            param.register_post_accumulate_grad_hook(call)
            param.requires_grad_(is_trained)


# ------------------------------------------------------------------------------------------------- ZeRO: sharded states
#
# In data parallelism every rank keeps the same. ZeRO lets each keep an Nth. K parameters, float32, Adam; bytes a rank:
#
#                  parameters   gradients   optimizer    sent a step, elements
#     stage 0          4K           4K          8K       2 (N-1)/N K              all-reduce
#     stage 1          4K           4K          8K/N     2 (N-1)/N K              reduce-scatter, all-gather: its halves
#     stage 2          4K           4K/N        8K/N     (m+1) (N-1)/N K          reduce-scatter m times, all-gather
#     stage 3          4K/N         4K/N        8K/N     3m (N-1)/N K             m x (2 all-gathers, reduce-scatter)
#
# Besides, stages 2 and 3 have three buckets' whole gradients. Stage 3 has the weights of two layers and tied ones, and
# gathers those of some layers only once. Rajbhandari et al., "ZeRO" (2020). CS336 lecture 7.

# The lecture's own forms of stages 1 and 3 come first. They take a tensor at a time, and wait for each collective.

def in_nths(tensor, ranks):
    """A tensor's numbers in N rows of one length, (N, K/N rounded up). 11 for 2 ranks: (2, 6), the last one is 0."""
    return F.pad(tensor.flatten(), (0, -tensor.numel() % ranks)).view(ranks, -1)


class ZeRO1:
    """The lecture's ZeRO-1: reduce-scatter each gradient, step my Nth of each tensor, all-gather the Nths.

        optimizer = ZeRO1(module.parameters(), torch.optim.AdamW, group, lr=1e-3)
        loss.backward(); optimizer.step()

    `inner` keeps states of this rank's Nths. Every parameter needs a gradient, and starts alike on all ranks.
    """

    def __init__(self, params, optimizer_class, group=None, **options):
        self.params, self.group = list(params), group
        self.ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.nths = [nn.Parameter(in_nths(p.detach(), self.ranks)[rank].clone()) for p in self.params]
        self.inner = optimizer_class(self.nths, **options)

    @torch.no_grad()
    def step(self):
        for param, nth in zip(self.params, self.nths):
            nth.grad = torch.empty_like(nth)
            dist.reduce_scatter_tensor(nth.grad, in_nths(param.grad, self.ranks), dist.ReduceOp.AVG, self.group)
            param.grad = None
        self.inner.step()
        for param, nth in zip(self.params, self.nths):
            whole = nth.new_empty(self.ranks * len(nth))
            dist.all_gather_into_tensor(whole, nth, self.group)
            param.copy_(whole[:param.numel()].view(param.shape))


class ZeRO3:
    """The lecture's ZeRO-3: gather a layer's weights, compute, free; in backward gather again, and scatter gradients.

        ZeRO3(module, group)                                       each parameter becomes this rank's Nth of it, 1-D
        optimizer = torch.optim.AdamW(module.parameters(), ...)
        loss.backward(); optimizer.step(); optimizer.zero_grad()   one backward a step

        a parameter     storage of `whole`    .data         .grad
        gather          all bytes             whole         None
        free            0 bytes               this Nth      None
        gather again    all bytes             whole         None; then, in backward, the whole gradient
        scatter         0 bytes               this Nth      the average's Nth

    .data changes because the optimizer steps the Nth. That alone frees nothing: autograd has saved views of `whole`. So
    the storage under them shrinks and grows back. When dW is there, W may go: a layer makes dX together with it. Every
    parameter must be trained, and used in its own layer's forward alone. (nn.MultiheadAttention uses its out_proj's.)
    """

    def __init__(self, module, group=None):
        self.group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.shape, self.whole, self.nth = {}, {}, {}
        for param in module.parameters():
            self.shape[param], self.whole[param] = param.shape, in_nths(param.detach(), self.ranks).clone()
            self.nth[param] = self.whole[param][self.rank].clone()
            param.register_post_accumulate_grad_hook(self.scatter)
        self.free(module.parameters())
        for layer in module.modules():
            layer.register_forward_pre_hook(self.gather)
            layer.register_forward_hook(lambda layer, *_: self.free(layer.parameters(recurse=False)))
            layer.register_full_backward_pre_hook(self.gather)

    def gather(self, layer, *_):
        for param in layer.parameters(recurse=False):
            whole = self.whole[param]
            whole.untyped_storage().resize_(whole.nbytes)
            dist.all_gather_into_tensor(whole, self.nth[param], self.group)
            param.data = whole.view(-1)[:self.shape[param].numel()].view(self.shape[param])

    def free(self, params):
        for param in params:
            param.data = self.nth[param]
            self.whole[param].untyped_storage().resize_(0)

    def scatter(self, param):
        average = torch.empty_like(self.nth[param])
        dist.reduce_scatter_tensor(average, in_nths(param.grad, self.ranks), dist.ReduceOp.AVG, self.group)
        param.grad = None  # of the whole tensor's shape, which .grad must have while the tensor is whole
        self.free([param])
        param.grad = average


# Mixed precision: layers compute with 16-bit weights, and the optimizer steps float32 masters of them, which here are
# the shards. Gradients add up in float32, too.

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64,
              "fp8": torch.bfloat16}  # all but the products of blocks, in fast/fp8.py


def master_dtype(dtype):
    """What weights are kept and gradients added up in: bf16 has 8 significant bits, so 0.02 - 0.00001 would be 0.02."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class FlatBucket(Bucket):
    """A Bucket whose weights lie side by side, too: its parameters become views of one vector, `weights`, zero-padded
    to a multiple of N, so that one all-gather gathers them all. Their values are the first rank's.

    shard: the Parameter that an optimizer steps, weights[own]: this rank's Nth, or all if not `sharded`. Averages of
    gradients end up in its .grad. Rank 1 of 2 with parameters of 6, 2 and 3 elements:

        float32    weights   W W W W W W b b V V V 0      all float32; W, b and V are views
                   shard                 ^^^^^^^^^^^      a view of weights[6:12], so a step changes the weights
        bf16       weights   w w w w w w b b v v v 0      all bf16
                   shard                 B B V V V 0      float32 of its own, the master; `cast_masters` writes it there

    Gradients of 16-bit weights must not add up in 16 bits, so each backward's go into `total`, float32, at once.
    """

    def __init__(self, params, group, sharded=True, compute_dtype=None, device=None):
        super().__init__(params, group)
        self.dtype, self.device = params[0].dtype, torch.device(device or params[0].device)
        ranks, rank = (dist.get_world_size(self.group), dist.get_rank(self.group)) if sharded else (1, 0)
        self.share_out(ranks, rank)
        values = self.zeros(self.dtype)  # as they come; in float32 `weights` is this tensor
        if not params[0].is_meta:
            for p in params:
                self.view(values, p).copy_(p.detach())
            dist.broadcast(values, group=self.group, group_src=0)
        if compute_dtype and self.dtype.is_floating_point:  # frozen parameters may be whole numbers
            self.dtype = compute_dtype
        self.weights = values.to(self.dtype)
        for p in params:
            point_into(p, self.view(self.weights, p))
        mine = self.weights[self.own]  # a view: to step the shard is to change the weights
        if self.dtype != master_dtype(self.dtype):
            mine = values[self.own].to(torch.float32, copy=True)  # `cast_masters` writes it into the weights
        self.shard = nn.Parameter(mine, params[0].requires_grad)
        self.total, self.total_dtype = None, self.shard.dtype  # gradients side by side, and what they add up in
        over = self.placement.sharded_over + ((self.group,) if sharded else ())
        self.shard.placement = replace(self.placement, sharded_over=over, cuts=(), decays=all(map(is_matrix, params)))

    def share_out(self, ranks, rank):
        width = -(-self.numel // ranks)  # of an Nth, rounded up
        self.numel = ranks * width  # padded, as the message is
        self.own = slice(rank * width, (rank + 1) * width)

    def zeros(self, dtype):
        return torch.zeros(self.numel, dtype=dtype, device=self.device)

    @torch.no_grad()
    def collect(self, param):
        """Move .grad into its part of the total."""
        if self.total is None:
            self.total = self.zeros(self.total_dtype)
        self.view(self.total, param).add_(param.grad)
        param.grad = None

    def begin_message(self):
        total, self.total = self.total, None
        return self.zeros(self.total_dtype) if total is None else total

    def holds_gradients(self):
        return self.total is not None or any(p.grad is not None and p.requires_grad for p in self.params)

    def kept(self, param):
        """What this rank keeps of a parameter: (the shard, where in it that lies, where in the flat parameter)."""
        start = self.first[param]
        low = max(start, self.own.start)
        high = max(low, min(start + param.numel(), self.own.stop))
        return self.shard, slice(low - self.own.start, high - self.own.start), slice(low - start, high - start)

    def reduce_scatter(self, message, average):
        """Start to average a message: this rank's Nth goes into `average`."""
        return dist.reduce_scatter_tensor(average, message, dist.ReduceOp.AVG, self.channel, async_op=True)

    def all_gather(self):
        """Start to gather `weights`: this rank gives its Nth."""
        return dist.all_gather_into_tensor(self.weights, self.weights[self.own], self.channel, async_op=True)


def point_into(param, view):
    """Let a parameter's numbers lie in this memory. It stays the same object, so nobody has to be told."""
    if not param.is_meta:
        param.data = view
    else:  # .data of a tensor without memory takes none
        new = type(param)(view.data, param.requires_grad)
        new.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, new)


@torch.no_grad()
def cast_masters(buckets):
    """Float32 masters into 16-bit weights. Without masters, the shards are views of the weights."""
    for bucket in buckets:
        if bucket.dtype != bucket.shard.dtype:
            bucket.weights[bucket.own].copy_(bucket.shard)


def reduce_scatter_bucket(bucket, in_place=False):
    """Start to average a bucket: each rank gets its Nth. (N-1)/N x K elements sent.

    The average gets a tensor of its own, so that the message can be freed. in_place (stage 1): it is a view of the
    message, which stays until zero_grad, the table's 4K. Messages wait for `finish` there, all of them, so tensors of
    their own would come on top.
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


class FlatOptimizer(Averager):
    """ZeRO-1, and ZeRO-2 with stage=2: each rank keeps the optimizer state of its Nth of the parameters, and steps it.

        optimizer = FlatOptimizer(model.parameters(), torch.optim.AdamW, group, lr=1e-3)
        with optimizer.no_sync(): loss.backward()              every micro-batch but the last
        loss.backward(); optimizer.finish_grad_sync()          gradients: reduce-scatter
        clip_grad_norm_(optimizer.shards, 1.0, [group])
        optimizer.step(); optimizer.zero_grad()                own Nth stepped, parameters: all-gather

    params: any parameters or parameter groups; they become views of flat buffers, equal on all ranks of the group.
    optimizer_class: any whose update is element by element (SGD, Adam, ...), because a shard cuts through tensors.
    One that needs whole tensors brings buckets that do not cut them (further/muon.py).
    stage=2: gradients leave in every backward, not only in the last one, so whole ones never add up. All ranks must use
    the same parameters in each backward then. stage=0 shards nothing. compute_dtype: see mixed precision, above.

    `inner`, of that class, steps the shards: PyTorch's schedulers take it, and its state_dict is this rank's. It must
    be made after parameters were frozen, and overwrites what is written into 16-bit weights later: ShardedOptimizer of
    further/zero.py lets you freeze and write between steps.
    """
    bucket_class = FlatBucket

    def __init__(self, params, optimizer_class, group=None, stage=1, bucket_mb=None, compute_dtype=None, **kwargs):
        throwaway = optimizer_class(params, **kwargs)  # it knows what param_groups `params` make: of a list, one
        param_groups = throwaway.param_groups
        param_group_of = {p: i for i, g in enumerate(param_groups) for p in g["params"]}  # by number
        self.group, self.stage = group_or_world(group), stage
        new_bucket = getattr(throwaway, "new_bucket", self.bucket_class)
        self.buckets = [new_bucket(some, self.group, stage > 0, compute_dtype)
                        for some in make_buckets([*param_group_of], bucket_mb, param_group_of.get)]
        give_channels(self.buckets)
        self.shards = [bucket.shard for bucket in self.buckets]
        for i, g in enumerate(param_groups):
            g.pop("param_names", None)  # shards have none
            g["params"] = [bucket.shard for bucket in self.buckets if param_group_of[bucket.params[0]] == i]
        self.inner = optimizer_class(param_groups, **kwargs)
        send = {0: all_reduce_bucket, 1: partial(reduce_scatter_bucket, in_place=True), 2: reduce_scatter_bucket}
        reducer = (EveryBackward if stage == 2 else FlatReducer)(self.buckets, send[stage], add_to_shard)
        self.reducers = [reducer]
        self.bucket_of = reducer.bucket_of

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    def zero_grad(self, set_to_none=True):
        super().zero_grad()
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self):
        """Step the shards, then all-gather the other ranks' Nths."""
        if not self.reducers[0].finished:
            raise RuntimeError("a step before finish_grad_sync(): its gradients have not been averaged")
        changing = [bucket for bucket in self.buckets if bucket.shard.grad is not None]
        self.update(changing)
        self.gather_weights(changing)

    def update(self, buckets):
        """Step every shard that has a gradient. Write float32 masters, if any, into these buckets' weights."""
        self.inner.step()
        cast_masters(buckets)

    def gather_weights(self, buckets):
        """All-gather: send this rank's Nth of the weights and receive the others', (N-1)/N x K elements."""
        if self.stage:
            for bucket in buckets:
                bucket.all_gather().wait()


class FlatReducer(Reducer):
    """A Reducer of FlatBuckets."""

    @property
    def finished(self):
        """Whether all gradients have been averaged."""
        return not (self.next or self.under_way or any(bucket.holds_gradients() for bucket in self.buckets))

    def computed(self, param):
        bucket = self.bucket_of[param]
        if bucket.total_dtype != bucket.dtype:
            bucket.collect(param)
        super().computed(param)

    def reset(self):
        super().reset()
        for bucket in self.buckets:
            bucket.total = None


class EveryBackward(FlatReducer):
    """ZeRO-2's and 3's Reducer: a bucket leaves in each backward, so whole gradients never add up.

    All ranks must use the same parameters in each. Then autograd completes buckets in the same order on all of them, so
    a bucket need not wait for those before it in the list.
    """

    def __init__(self, *options):
        self.left = []  # what has left in this step, in words, for those who compare ranks (further/ddp.py)
        super().__init__(*options)

    def begin_step(self):
        super().begin_step()
        self.left.clear()

    @contextmanager
    def no_sync(self):
        yield  # it changes nothing

    def mark_ready(self, bucket, param):
        self.missing[bucket].discard(param)
        if self.complete(bucket):
            self.start(bucket)

    def start(self, bucket):
        # Full gradients cost the memory of two messages under way, and of the next one's gradients. (On GPUs more may
        # be in memory: Python runs ahead, and freed memory is used again only when its stream is done with it.)
        while len(self.under_way) > 1:
            self.finish_oldest()
        self.left.append(f"bucket {self.buckets.index(bucket)}")
        super().start(bucket)
        self.missing[bucket] = set(bucket.params)  # for the next backward

    def unsent(self):
        """Those of which a backward has computed some gradients, not all."""
        return [bucket for bucket in self.buckets if bucket.holds_gradients()]


class FlatParameter(FlatBucket):
    """The FlatBucket of one unit of FSDP, of which this rank keeps the shard alone. (The name is PyTorch's.)

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
    """What FSDP does when a unit's last gradient is there. A layer's backward makes dx together with dW, so that is
    there, too, and the unit's weights are no longer needed."""
    flat.free()
    return reduce_scatter_bucket(flat)


def fsdp_units(module):
    """[(module, parameters that its forward alone uses)]: what FSDP gathers at a time. Of a GPT wte, wpe, each child of
    the container h, ln_f, lm_head. (Nested modules: further/lend.py.)"""
    containers = nn.ModuleList, nn.ModuleDict, nn.Sequential
    layers = [child.children() if isinstance(child, containers) else [child] for child in module.children()]
    return [(unit, list(unit.parameters())) for unit in itertools.chain(*layers)]


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
    inside of the unit runs its layers again (`before_layer`). ZeRO3's backward hooks would say so, too, but under them
    nobody may change a unit's output in place.

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
        for flat in self.flats_of[unit]:
            self.need(flat)
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
        if not flat.is_whole:
            flat.make_whole()
            if not self.in_forward:
                self.begin_backward(self.unit_of[flat])

    def begin_backward(self, unit):
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


class FlatFSDP(Averager, nn.Module):
    """ZeRO-3: parameters exist whole only while their layer computes.

        model = FlatFSDP(module, group)                           not inside of another module
        optimizer = torch.optim.AdamW(model.parameters(), ...)    on this rank's shards, 1-D, without names
        with model.no_sync(): loss.backward()                     every micro-batch but the last
        loss.backward(); model.finish_grad_sync(); optimizer.step(); model.zero_grad()

    A unit is each child of a ModuleList, ModuleDict or Sequential (a block of a GPT), and each child outside of those.
    Matrices are sharded, one flat parameter a unit; their gradients leave in every backward, under no_sync, too.
    Vectors (biases, norms; a thousandth of GPT-2's K) stay whole, and are all-reduced once a step. All ranks must use
    the same parameters in each backward. (PyTorch's shards vectors, too, and under no_sync keeps whole gradients.)

    A parameter may be used in its unit's forward alone, and written never: elsewhere it is NaN. FSDP of further/fsdp.py
    has no such rules, and its parameters keep their names.

    compute_dtype: that of layers and inputs, e.g. torch.bfloat16; shards and their gradients have its `master_dtype`.
    Shards are vectors: for weight decay ask `is_matrix`, not their shape. A module on the meta device is never whole
    anywhere: name its device, and give its values to `load`. Zhao et al., "PyTorch FSDP" (2023). CS336 lecture 7.
    """
    units_of = staticmethod(fsdp_units)
    flat_class = FlatParameter
    prefetcher_class = Prefetcher

    def __init__(self, module, group=None, compute_dtype=None, device=None):
        super().__init__()
        self.module, self.group = module, group_or_world(group)
        units = self.units_of(module)
        first_unit_of = {p: unit for unit, params in reversed(units) for p in params}  # a tied one lies with its first
        matrices = [p for p in module.parameters() if is_matrix(p)]
        vectors = [p for p in module.parameters() if not is_matrix(p)]
        self.flats = [self.flat_class(some, self.group, True, compute_dtype, device)
                      for some in make_buckets(matrices, math.inf, first_unit_of.get)]  # a whole unit each
        self.vectors = [FlatBucket(some, self.group, False, compute_dtype, device)
                        for some in make_buckets(vectors, math.inf)]
        self.buckets = self.flats + self.vectors
        give_channels(self.buckets)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.reducers = [EveryBackward(self.flats, free_and_scatter, add_to_shard),
                         FlatReducer(self.vectors, all_reduce_bucket, add_to_shard)]
        flats_of = {unit: list(dict.fromkeys(self.bucket_of[p] for p in params if is_matrix(p)))
                    for unit, params in units}
        self.prefetcher = self.prefetcher_class(flats_of)

    def forward(self, *args, **kwargs):
        cast_masters(self.vectors)
        with self.prefetcher.forward():
            return self.module(*args, **kwargs)

    def finish_grad_sync(self):
        super().finish_grad_sync()
        self.prefetcher.free()

    def zero_grad(self, set_to_none=True):
        super().zero_grad()
        for bucket in self.buckets:
            bucket.shard.grad = None

    def named_parameters(self, *args, **kwargs):
        """What an optimizer steps: this rank's shards, of vectors all. (parameters() asks here.)"""
        return ((f"shard.{i}", flat.shard) for i, flat in enumerate(self.buckets))

    @torch.no_grad()
    def load(self, source):
        """Set every parameter to source(name), a whole tensor, of which this rank keeps its part."""
        for name, param in self.module.named_parameters():
            take_part(self.bucket_of[param].kept(param), param, source(name))


# --------------------------------------------------------------------------------------------- tensor parallel: f and g
#
# Y = GeLU(X A) B. A is cut by columns, so each rank computes its slice of the hidden layer alone, GeLU included. B is
# cut by rows to match, so each rank has a full-size Y that is one term of the sum. One all-reduce adds them up:
#
#          ┌─ X ─ A_0 ─ GeLU ─ B_0 ─ Y_0 ─┐
#     X ─ f                                g ─ Y    f: forward identity, backward all-reduce (all used X: dX adds up)
#          └─ X ─ A_1 ─ GeLU ─ B_1 ─ Y_1 ─┘        g: forward all-reduce, backward identity (dY reaches each term as is)
#
# Three things that ranks of a group may hold in place of a tensor explain f, g, and what must still be added up:
#
#            a tensor in forward                         its gradient in backward
#     X      replicated: the same on every rank          partial: each rank's columns of A have made a term of it
#     X A    cut: each rank has its columns              cut: each rank has that of its columns
#     Y_r    partial: each rank has a term of Y          replicated: dY is the gradient of each term
#
# f adds up X's gradient, g the Y_r. A parameter that is replicated and has a partial gradient (a norm's weight that saw
# some tokens alone) must have that added up before the step: `placement.partial_over` says so.
#
# X is (BT, in), A (in, out). A layer's `weight` is A transposed, as in model.py. Attention is the same with heads for
# columns. A block, attention and MLP, sends 2 x 2(N-1)/N x BTC elements forward and as many backward. Until backward
# a rank keeps all of X and an Nth of the hidden layer. Shoeybi et al., "Megatron-LM" (2019); CS336 lecture 8.

def all_columns(x, weight, group=None):
    """The lecture's tensor parallelism of one layer, forward alone: X (..., in) -> Y = X A, (..., out), on all ranks,
    through which no gradient flows.

    weight (out/N, in): this rank's columns of A. Each layer costs an all-gather of Y, (N-1)/N of it sent by a rank. The
    pair f and g, below, cuts two layers at the cost of one all-reduce.
    """
    mine = x @ weight.T                                                                       # (..., out/N)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group)
    return torch.cat(parts, -1)


class CopyToGroup(torch.autograd.Function):
    """f: forward identity, backward all-reduce: X went into every rank's columns of A, so dX adds up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)  # autograd needs a new tensor

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)  # because autograd may still need the incoming one
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromGroup(torch.autograd.Function):
    """g: forward all-reduce, backward identity: Y is a plain sum, so each term's gradient is dY."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)  # because all_reduce works in place
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None


class Cut:
    """How a parameter is cut over a group, along `dim`. A rank gets its Nth; uneven sizes differ by one.

    fused=(1, 1, 1): three matrices of these relative sizes, such as q, k, v, lie in one. Each is cut by itself, so that
    a rank gets its heads of q, of k and of v.

        q0 q1 | k0 k1 | v0 v1    ->    rank 0: q0 k0 v0    rank 1: q1 k1 v1
    """

    def __init__(self, group, dim, fused=(1,)):
        self.group, self.dim, self.fused = group_or_world(group), dim, fused
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def __deepcopy__(self, memo):
        return self  # a group has no copy

    def part(self, full):
        """What this rank has of the whole tensor."""
        unit = full.shape[self.dim] // sum(self.fused)
        matrices = full.split([n * unit for n in self.fused], self.dim)
        mine = [matrix.tensor_split(self.size, self.dim)[self.rank] for matrix in matrices]
        return torch.cat(mine, self.dim)

    def first(self, rows):
        """The index of this rank's first row, of `rows` rows in all."""
        return self.rank * (rows // self.size) + min(self.rank, rows % self.size)


class ColumnParallelLinear(nn.Module):
    """X (..., in) -> this rank's columns of X A + b, (..., out/N). Weight (out/N, in), bias (out/N)."""

    def __init__(self, layer, group, f, fused=(1,)):  # f: CopyToGroup.apply, or sequence parallelism's
        super().__init__()
        check_replaceable(layer, nn.Linear)
        self.f = f
        self.cut = Cut(group, 0, fused)  # A's columns are the weight's rows
        self.weight, self.bias = local_parameter(layer.weight, self.cut), local_parameter(layer.bias, self.cut)

    def forward(self, x):                                                                     # (..., in)
        return kernels.linear(self.f(x, self.cut.group), self.weight, self.bias)              # (..., out/N)


class RowParallelLinear(nn.Module):
    """This rank's slice of X (..., in/N) -> the whole X B + b (..., out). Weight (out, in/N), bias (out), not cut."""

    def __init__(self, layer, group, g):  # g: ReduceFromGroup.apply, or sequence parallelism's
        super().__init__()
        check_replaceable(layer, nn.Linear)
        self.g = g
        self.cut = Cut(group, 1)
        self.weight, self.bias = local_parameter(layer.weight, self.cut), layer.bias

    def forward(self, x):                                                                     # (..., in/N)
        y = self.g(kernels.linear(x, self.weight), self.cut.group)                            # (..., out)
        # After the sum, or the bias would be added N times. Its gradient is that of Y, equal on all ranks.
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Token ids (...) -> embeddings (..., C). Each rank looks up the V/N rows of the table that it holds.

    A token outside of 0 .. V-1 is an IndexError on the CPU. A GPU is not waited for: there its embedding is NaN."""

    def __init__(self, embedding, group, g):
        super().__init__()
        check_replaceable(embedding, nn.Embedding)
        self.g = g
        self.cut = Cut(group, 0)
        self.weight = local_parameter(embedding.weight, self.cut)
        self.rows = embedding.num_embeddings
        self.first = self.cut.first(self.rows)

    def forward(self, tokens):                                                                # (...)
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        nowhere = (tokens < 0) | (tokens >= self.rows)
        if kernels.readable(tokens) and nowhere.any():
            raise IndexError(f"tokens from {tokens.min()} to {tokens.max()}: an embedding of {self.rows} rows takes 0 "
                             f"to {self.rows - 1}")
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)                         # (..., C)
        instead = x.new_zeros(tokens.shape).masked_fill(nowhere, math.nan)  # 0 where another rank has the row
        return self.g(torch.where(elsewhere.unsqueeze(-1), instead.unsqueeze(-1), x), self.cut.group)


EMBEDDINGS = nn.Embedding, VocabParallelEmbedding  # their backward needs rows' numbers, no weights


def local_parameter(param, cut):
    """This rank's part of a parameter, which knows how it was cut."""
    if param is None:
        return None
    local = nn.Parameter(cut.part(param.detach()).contiguous(), param.requires_grad)
    local.placement = before = placement_of(param)
    set_placement(local, cuts=before.cuts + (cut,), sharded_over=before.sharded_over + (cut.group,),
                  whole=whole_shape(param))
    return local


def check_replaceable(layer, kind):
    """ValueError for a layer with options or hooks: what takes its place has a weight and a bias alone."""
    what = [name for name in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse", "parametrizations")
            if getattr(layer, name, None) is not None and getattr(layer, name) is not False]
    what += ["hooks"] * any((layer._forward_pre_hooks, layer._forward_hooks, layer._backward_hooks))
    if what or not isinstance(layer, kind):
        raise ValueError(f"tensor parallelism cuts a plain nn.{kind.__name__}, not {type(layer).__name__}"
                         f"{' with ' * bool(what)}{', '.join(what)}")


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of logits (n, V/N), this rank's slice of the vocabulary, against targets (n).

    loss = log(sum exp z) - z_target: the maximum, the sum of exponentials and the target's logit are all-reduced, 3n
    elements in place of nV. Backward sends nothing: it is softmax minus one-hot, slice by slice.
    """

    @staticmethod
    def forward(ctx, logits, targets, group, first):
        z, targets = logits if logits.stride(-1) == 1 else logits.contiguous(), targets.contiguous()
        mine, total, target = kernels.softmax_sums(z, targets, first)  # (n); the target's is 0 if another rank has it
        top = mine.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
        sums = torch.stack([total * (mine - top).exp(), target])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(z, targets, top, sums[0])
        ctx.first = first
        return kernels.summed_loss(top, *sums, targets)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        z, targets, top, total = ctx.saved_tensors
        return kernels.softmax_minus_onehot(z.detach(), targets, top, total, grad, ctx.first), None, None, None


def cross_entropy(logits, targets, vocab_size, group=None):
    """Loss in nats of logits (B, T, V), or (B, T, V/N) of each rank of `group`, against targets (B, T), summed over the
    targets that count. Which do, and what others outside of the vocabulary do, says kernels.checked_targets."""
    logits, targets = logits.flatten(0, 1), targets.flatten()
    if logits.shape[1] == vocab_size:
        return kernels.cross_entropy(logits, targets)
    targets, factor = kernels.checked_targets(targets, vocab_size)
    return VocabParallelCrossEntropy.apply(logits, targets, group, Cut(group, 0).first(vocab_size)) * factor


def gpt2_plan(f, g):
    """How each layer of a GPT-2 is cut, with this f and g. What is not named (layer norms, positions) stays whole."""
    column, row = partial(ColumnParallelLinear, f=f), partial(RowParallelLinear, g=g)
    return {
        "wte": partial(VocabParallelEmbedding, g=g),
        "attn.c_attn": partial(column, fused=(1, 1, 1)),
        "attn.c_proj": row,
        "mlp.c_fc": column,
        "mlp.c_proj": row,
        "lm_head": column,
    }


def planned(name, plan):
    """What a plan does with the layer of this name; None: it stays whole."""
    return next((how for ending, how in plan.items() if ("." + name).endswith("." + ending)), None)


def tensor_parallel(module, group, plan=None):
    """Put this rank's slices in place of the layers that the plan names; left out, it is a GPT's `gpt2_plan`. N must
    divide the heads. Ties stay ties."""
    plan = plan or gpt2_plan(CopyToGroup.apply, ReduceFromGroup.apply)
    slices = {}  # layer or weight -> its slice: a tied one is cut once
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if how := planned(name, plan):
            new = slices[layer] = slices.get(layer) or how(layer, group)
            if hasattr(layer, "weight"):
                new.weight = slices.setdefault(layer.weight, new.weight)
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, new)
    return module


# ----------------------------------------------------------------------------------- pipeline: layers spread over ranks
#
# Each rank holds a stage, a run of consecutive layers. A batch passes through all stages in m micro-batches, so that p
# ranks can compute at the same time. Each rank idles, in all, as long as a micro-batch and its gradient need for the
# other p-1 stages: (p-1) (F + B), of the times that a stage takes for a micro-batch's forward and backward. This is the
# bubble. Neighbours alone talk: B T C elements a micro-batch forward, and as many backward. CS336 lecture 7.

def gpipe_step(stage, loss, x, y, like, group=None):
    """The lecture's pipeline: receive, compute, send, for each micro-batch; then gradients, from the last rank up.

    stage: this rank's layers. loss(output, target) divides by m, because .grad adds up over micro-batches. x, y: lists
    of m inputs and m targets; the first rank reads x, the last one y. like: a tensor of the shape and dtype that stages
    send. Returns the losses, on the last rank.
    """
    rank = dist.get_rank(group)
    last = dist.get_world_size(group) - 1
    done = []
    for x_i, y_i in zip(x, y):
        if rank > 0:
            x_i = torch.empty_like(like)
            dist.recv(x_i, group=group, group_src=rank - 1)
            x_i.requires_grad_()
        out = stage(x_i)
        if rank < last:
            dist.send(out.detach(), group=group, group_dst=rank + 1)
        else:
            out = loss(out, y_i)
        done.append((x_i, out))
    for x_i, out in done:
        dy = None  # of the loss
        if rank < last:
            dy = torch.empty_like(like)
            dist.recv(dy, group=group, group_src=rank + 1)
        out.backward(dy)
        if rank > 0:
            dist.send(x_i.grad, group=group, group_dst=rank - 1)
    return [out.detach() for _, out in done] if rank == last else []


# ------------------------------------------------------------------------------ pipeline: schedules as lists of actions
#
# GPipe holds activations of all m micro-batches. 1F1B runs the same forwards and backwards in another order, and rank r
# holds those of p - r. So that one loop can run any order, a schedule is data, a list of actions for each rank:
#
#     F2    forward of micro-batch 2 through a stage
#     B2    its backward: the gradients of the stage's weights, and that of its input, which the stage before waits for
#
# Functions write the lists, `lower` adds the transfers, and `Pipeline` runs them. Stage s is on rank s here. Schedules
# of further/schedules.py idle less: ranks have several stages, and a B is split in two. further/lists.py checks lists.

class Action(NamedTuple):
    """What a rank does for one micro-batch in one stage. kind: F or B; after `lower` also SF and RF, which send and
    receive what that F has made, and SB and RB. `stage` is that of the F or B: RF0 of stage 0 is for stage 1's rank."""
    kind: str
    stage: int
    micro_batch: int

    def __str__(self):
        return f"{self.kind}{self.micro_batch}"


def gpipe(p, m, v=1):
    """All forwards, then all backwards. Huang et al., "GPipe" (2019). (v: other schedules have v stages a rank.)"""
    return [whole_batch("F", r, m) + whole_batch("B", r, m) for r in range(p)]


def whole_batch(kind, stage, m):
    return [Action(kind, stage, i) for i in range(m)]


def one_f_one_b(p, m, v=1):
    """Rank r runs p-1-r forwards ahead, then one forward, one backward, in turn: at most p-r activations, whatever m.

    From the start of its F to the end of its B a micro-batch takes p-r ranks forward and back, this one among them:
    (p-r) (F + B). In that time the rank can run p-r F and p-r B, so p-r micro-batches keep it busy. Narayanan et al.,
    "PipeDream-2BW" (2020), call it PipeDream-Flush.
    """
    return [alternate(whole_batch("F", r, m), p - 1 - r, whole_batch("B", r, m)) for r in range(p)]


def alternate(forwards, ahead, backwards):
    """First `ahead` forwards (warm-up). Then, until no backward is left: one forward if any is left, one backward
    (steady state; when no forward is left, cool-down)."""
    actions = forwards[:ahead]
    left = deque(forwards[ahead:])
    for backward in backwards:
        if left:
            actions.append(left.popleft())
        actions.append(backward)
    return actions


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}  # name: schedule(p, m, v)


def ranks_of_stages(lists):
    """Which rank each stage of a schedule is on, {stage: rank}."""
    stage_to_rank = {action.stage: rank for rank, actions in enumerate(lists) for action in actions}
    return dict(sorted(stage_to_rank.items()))


def stages_on(rank, stage_to_rank):
    return [stage for stage, its_rank in stage_to_rank.items() if its_rank == rank]


def needs(action, stages):
    """The actions whose results an F or a B computes with: B0 of stage 0 with the activations of its own F0, and with
    the gradient that B0 of stage 1 has made. stages: all that there are."""
    kind, s, i = action
    if kind == "F":
        needed = [Action("F", s - 1, i)]
    else:
        needed = [Action("F", s, i), Action("B", s + 1, i)]
    return [action for action in needed if action.stage in stages]  # not before the first one, or after the last


def goes_to(action):
    """The stage that waits for what an F or a B makes. (None is there after the last stage's F and the first's B.)"""
    return action.stage + (1 if action.kind[-1] == "F" else -1)


def in_order(lists):
    """All ranks' lists as one, in an order in which they can run: [(rank, action)].

    In each turn, each rank runs its next action if all that it needs was made in earlier turns. ValueError if no rank
    can go on. 1F1B for p = 2, m = 2:

        turn       1   2   3   4   5   6
        rank 0    F0  F1   .  B0   .  B1    in turn 3, its B0 still needs the result of rank 1's B0
        rank 1     .  F0  B0  F1  B1
    """
    stages = ranks_of_stages(lists)
    left = [deque(actions) for actions in lists]
    done = set()
    order = []
    while any(left):
        turn = [(rank, actions.popleft()) for rank, actions in enumerate(left)
                if actions and done.issuperset(needs(actions[0], stages))]
        if not turn:
            raise ValueError("deadlock: each rank waits for another one's result")
        done.update(action for _, action in turn)
        order += turn
    return order


def lower(lists):
    """Lower lists to what runs: add the transfers. A result that another rank needs is sent as soon as it is made. The
    send is appended to its rank's list, the receive to the other's, after all that the other has run so far. (A receive
    only posts a buffer, so it may stand early.) 1F1B for p = 2, m = 2, before and after:

        rank 0    F0 F1 B0 B1        F0 SF0 F1 SF1 RB0 B0 RB1 B1
        rank 1    F0 B0 F1 B1        RF0 RF1 F0 B0 SB0 F1 B1 SB1

    Why there is no deadlock: number the transfers as they are appended, so each list has them in rising order. Suppose
    that all ranks wait, and take the lowest number that is not done. Its two ranks have computations alone before it.
    These can run: what they need was computed there, or came by a transfer of a lower number, which is done. So both
    ranks reach the transfer, and do not wait.
    """
    stage_to_rank = ranks_of_stages(lists)
    lowered = [[] for _ in lists]
    for rank, action in in_order(lists):
        lowered[rank].append(action)
        add_transfer(lowered, action, rank, stage_to_rank.get(goes_to(action)))
    return lowered


def add_transfer(lowered, result, rank, other):
    """Let a rank send an action's result to another rank. other: None if nobody waits for it."""
    if other not in (None, rank):
        lowered[rank].append(result._replace(kind="S" + result.kind))
        lowered[other].append(result._replace(kind="R" + result.kind))


def carried(transfer):
    """The action whose result a send or a receive carries: F0 of SF0 and of RF0."""
    return transfer._replace(kind=transfer.kind[1])


@functools.cache  # for 16 ranks and 128 micro-batches it takes 0.1 s
def lowered_lists(schedule, p, m, v):
    """A schedule's lists with transfers, which callers must not change."""
    return lower(schedule(p, m, v))


def even_pieces(config, stages):
    """The L+2 pieces of a GPT cut into `stages` runs of about equal length: [range, ...]."""
    starts = [(config.n_layer + 2) * stage // stages for stage in range(stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


# --------------------------------------------------------------------------------------------- pipeline: running a list

class MicroBatch:
    """One micro-batch in one stage: forward, later backward. loss(output, target): the last stage's, else None.

    In between it holds the stage's input, and the edge in autograd's graph where backward starts. The output itself,
    BTC numbers, may be freed. (`gpipe_step` keeps it.)
    """

    def __init__(self, module, loss):
        self.module = module
        self.loss = loss

    def forward(self, x, target=None):
        """x: tokens (B, T), or the output of the stage before. Returns this stage's, or the loss, detached."""
        self.x = x.requires_grad_() if x.is_floating_point() and torch.is_grad_enabled() else x
        y = self.module(self.x)
        if self.loss:
            y = self.loss(y, target)
        self.edge = get_gradient_edge(y) if y.requires_grad else None  # None: of frozen layers before all others
        return y.detach()

    def backward(self, dy):
        """dy: the gradient of what forward returned. Returns that of x; parameters' are added to .grad."""
        if self.edge:
            torch.autograd.backward(self.edge, dy)
        return self.x.grad


class Pipeline:
    """This rank's stages of a pipeline, which run any lowered list. One stage and no transfers is ordinary training.

    stages: {stage: module} of this rank. stage_to_rank: {stage: rank} of all. loss(output, target): the last stage's.
    Activations and their gradients are sent as (B, T / cut, width), in dtype.
    """

    def __init__(self, stages, stage_to_rank, mesh, loss, dtype, width, device, cut=1):
        self.stages = stages
        self.stage_to_rank = stage_to_rank
        self.last_stage = len(stage_to_rank) - 1
        self.group = mesh["pp"].get_group()
        self.loss = loss
        self.dtype = dtype
        self.width = width
        self.device = device
        self.cut = cut

    def run(self, actions, x, y, dloss=None, averagers=None):
        """x, y: tokens and targets of each micro-batch, (B, T). Returns the losses, detached, on the last stage.

        dloss: the gradient of each loss, from which its backward starts, a tensor of one number. averagers: {stage:
        what averages its gradients}, for no_sync(); None for forwards alone. After an exception the process group is of
        no more use, because messages may still be under way.
        """
        self.begin(actions, x, y, dloss, averagers)
        for action in actions:
            self.do(action)
        self.wait_for_sent(0)
        return self.losses

    def begin(self, actions, x, y, dloss, averagers):
        """Of the last step nothing is left."""
        self.x = x
        self.y = y
        self.dloss = dloss
        self.averagers = averagers
        self.last_backward = {action.stage: action for action in actions if action.kind == "B"}
        self.micro_batches = {}  # (stage, number) -> MicroBatch, until its backward has ended
        self.results = {}        # an F or a B -> (handle, what it made), until a stage or a send takes it
        self.sending = deque()   # (handle, tensor) of each message that is on its way
        self.losses = []

    def do(self, action):
        match action.kind[0]:
            case "F":
                self.forward(action)
            case "B":
                self.backward(action)
            case "S":
                self.send(action)
            case "R":
                self.receive(action)

    def forward(self, action):
        _, s, i = action
        x = self.x[i] if s == 0 else self.wait_for(Action("F", s - 1, i))
        micro_batch = self.new_micro_batch(s)
        out = micro_batch.forward(x, self.y[i])
        if torch.is_grad_enabled():
            self.micro_batches[s, i] = micro_batch
        if s == self.last_stage:
            self.losses.append(out)
        else:
            self.results[action] = dist.Handle(), out

    def new_micro_batch(self, stage):
        return MicroBatch(self.stages[stage], self.loss_of(stage))

    def loss_of(self, stage):
        return self.loss if stage == self.last_stage else None

    def backward(self, action):
        _, s, i = action
        micro_batch = self.micro_batches.pop((s, i))
        dy = self.gradient_for(s, i)
        with self.averaging(action):
            dx = micro_batch.backward(dy)
        if s > 0:
            self.results[action] = dist.Handle(), dx

    def gradient_for(self, s, i):
        """Where a stage's backward starts: the gradient of the loss, or that of its output, from the next stage."""
        return self.dloss if s == self.last_stage else self.wait_for(Action("B", s + 1, i))

    def averaging(self, action):
        """A stage's gradients are averaged in its last backward; until then they only add up. (But ZeRO 2 and 3 send in
        each, whatever no_sync says.)"""
        last = self.last_backward[action.stage] == action
        return nullcontext() if last else self.averagers[action.stage].no_sync()

    def wait_for(self, result):
        """What an action has made, on another rank, which has sent it, or in another stage of this one."""
        handle, tensor = self.results.pop(result)
        handle.wait()
        return tensor

    def receive(self, action):
        """Post a receive into a new buffer, for which `wait_for` waits. All transfers go through one group. NCCL runs
        those of a group one after the other; that cannot hang, because `lower` gives both ends the same order."""
        buffer = self.room_for(action.micro_batch)
        handle = dist.irecv(buffer, group=self.group, group_src=self.stage_to_rank[action.stage])
        self.results[carried(action)] = handle, buffer

    def room_for(self, micro_batch):
        """A tensor that takes a micro-batch's activation between two stages, or its gradient."""
        batch, tokens = self.x[micro_batch].shape
        return torch.empty(batch, tokens // self.cut, self.width, dtype=self.dtype, device=self.device)

    def send(self, action):
        _, tensor = self.results.pop(carried(action))
        handle = dist.isend(tensor, group=self.group, group_dst=self.stage_to_rank[goes_to(action)])
        self.sending.append((handle, tensor))
        self.wait_for_sent(2)

    def wait_for_sent(self, most):
        """Free outputs once they are sent, all but the latest `most`. To wait for a send cannot hang: why `lower` makes
        no deadlock holds for sends that wait for their receives."""
        while len(self.sending) > most:
            handle, _ = self.sending.popleft()
            handle.wait()


# ----------------------------------------------------------------------------------------------------------------- norm

def copies(placement, groups):
    """On how many ranks of the groups the same gradient lies. If all add up their squares, it counts so often.

        ranks / parts    ranks that hold this part of the parameter, because it is cut into so many parts
        x equal          parts whose gradients are the same, because they were added up over these ranks
        x twins          parameters of one rank that are the same

    Tied embedding, tp 2, pp 2. The table E is cut in two by tp, and the last stage has it, too:

        rank                     0            1            2            3
        stage                    first        first        last         last
        holds                    E_0          E_1          E_0 again    E_1 again      4 ranks / 4 parts
        gradient                 G_0          G_1          G_0          G_1            x 2 equal: the ends' sums

    A layer norm's weight there is cut by pp alone: 4 ranks / 2 parts. Sequence parallelism adds up its gradient over
    tp, which does not cut it: only a `partial_over` inside of `sharded_over` makes different parts equal.
    """
    size = dist.get_world_size
    ranks = math.prod(map(size, groups))
    parts = math.prod(map(size, placement.sharded_over))
    equal = math.prod(size(group) for group in placement.partial_over if inside(group, placement.sharded_over))
    return ranks * equal * placement.twins // parts


def inside(group, groups):
    """Whether one of `groups` has all ranks of a group."""
    ranks = torch.distributed.get_process_group_ranks
    return any(set(ranks(group)) <= set(ranks(other)) for other in groups)


def clip_grad_norm_(parameters, max_norm, groups=(), scale=1.0):
    """Scale all gradients so that their norm over the whole model is at most max_norm (0: leave them); returns the
    norm, float64. Call it after finish_grad_sync, on all ranks.

    Every rank adds up the squares of its gradients, each divided by how often the same one counts (`copies`). This
    number is all-reduced over each group in turn, so each element of the model counts once. dp 2, tp 2, pp 2, ZeRO-1:

        on a rank                          cut over      copies    added by all 8 ranks
        shard of a matrix of stage 0       dp, tp, pp    1         8 different parts, of stage 0 and of stage 1
        shard of a norm's weight           dp, pp        2 (tp)    each part twice, halved
        shard of the tied embedding        dp, tp, pp    2 (sums)  stages 0 and 1 hold the same, halved

    groups: all that parameters may be cut over; ValueError where one is missing. scale: fp16's, divided out first.
    """
    groups = list(map(group_or_world, groups))
    parameters = list(dict.fromkeys([parameters] if isinstance(parameters, torch.Tensor) else parameters))
    device = parameters[0].device if parameters else None
    parameters = [p for p in parameters if p.grad is not None]
    over = {group for p in parameters for group in placement_of(p).sharded_over if dist.get_world_size(group) > 1}
    if not all(inside(group, groups) for group in over):
        raise ValueError("clip_grad_norm_: a parameter is cut over a group that is not in `groups`")
    if scale != 1 and parameters:
        torch._foreach_mul_([p.grad for p in parameters], 1 / scale)
    grads = defaultdict(list)
    for p in parameters:
        grads[copies(placement_of(p), groups)].append(p.grad.detach())
    square = torch.zeros((), dtype=torch.float64, device=device)
    for n, some in grads.items():
        square += torch.nn.utils.get_total_norm(some).double().square() / n
    for group in groups:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(square, group=group)
    norm = square.sqrt()
    if max_norm and parameters:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


# -------------------------------------------------------------------------------- whole tensors: the inverse of cutting
#
# Checkpoints hold whole tensors, so that any layout can go on from them. A rank's part of one is `cut_like`'s, and of
# that, with ZeRO, what a bucket's `kept` says lies in its shard. Back: every rank puts what it has where it belongs,
# and `put_together` merges them. One tensor at a time is whole. (Large models' trainers write shards.)

def whole_shape(param):
    return placement_of(param).whole or param.shape


def cut_like(param, whole):
    """This rank's part of a whole tensor, where expert and tensor parallelism cut the parameter."""
    for cut in placement_of(param).cuts:
        whole = cut.part(whole)
    return whole


# kept: as `FlatBucket.kept` gives it, or with an optimizer's state in place of what is stepped.

def take_part(kept, param, whole):
    """Copy this rank's part of a whole tensor to where it keeps that. RuntimeError for one of another shape."""
    stepped, here, there = kept
    if whole.shape != whole_shape(param):
        raise RuntimeError(f"size mismatch: {tuple(whole.shape)} for a parameter of {tuple(whole_shape(param))}")
    stepped.view(-1)[here] = cut_like(param, whole).reshape(-1)[there].to(stepped)


def part_here(kept, param):
    """(which elements of the whole tensor this rank has, their values), as `put_together` takes them."""
    stepped, here, there = kept
    shape = whole_shape(param)
    numbers = torch.arange(math.prod(shape), device=stepped.device).view(shape)  # cut like the tensor, they say which
    return cut_like(param, numbers).reshape(-1)[there], stepped.detach().reshape(-1)[here]


def whole_of(kept, param, groups):
    """A parameter's whole tensor, on all ranks of the groups over which it is cut."""
    return put_together(whole_shape(param), *part_here(kept, param), groups)


def put_together(shape, here, values, groups):
    """The whole tensor, of `shape`, on all ranks of the groups, each of which has some of its values. here: where these
    lie in the flat tensor, a slice or numbers. Four numbers on two ranks:

        rank 0    5  6  0  0        rank 1    0  0  7  8        both    5  6  7  8

    A sum would double what two ranks have, as the two stages of a tied embedding do. So of each byte the largest is
    taken: ranks that have a value have the same one, and the others 0, whatever the dtype. An all-gather would send
    half as much, but would have to know who has what.
    """
    whole = values.new_zeros(math.prod(shape))
    whole[here] = values
    for group in groups:
        dist.all_reduce(whole.view(torch.uint8), dist.ReduceOp.MAX, group)
    return whole.view(shape)


# ------------------------------------------------------------------------------------------------------- any nn.Module
#
# BucketDDP, FlatOptimizer and FlatFSDP serve a GPT. What a model of anybody needs besides (checks that ranks agree,
# buffers, layers frozen between steps, weights written, parameters with names) are subclasses of them, in further/.

OF_ANY_MODULE = {"DDP": "further.ddp", "ShardedOptimizer": "further.zero", "FSDP": "further.fsdp"}


def __getattr__(name):
    """Python asks here for a name that this module lacks."""
    if name not in OF_ANY_MODULE:
        raise AttributeError(f"module 'parallel' has no attribute '{name}'")
    return getattr(importlib.import_module(OF_ANY_MODULE[name]), name)
