"""Parallel training, applied to a model from outside. In lecture order, each section the previous one plus one idea:

    mesh        which ranks form which group: axes (pp, dp, tp), tensor parallel innermost
    data        replicas average their gradients: naive, then in buckets while backward still runs
    ZeRO        stage 1 shards the optimizer, stage 2 the gradients too, stage 3 (FSDP) the parameters too
    tensor      every matrix cut by columns or rows; a sublayer costs one all-reduce forward, g, and one backward, f
    pipeline    layers spread over ranks: GPipe, 1F1B, interleaved, zero-bubble, as lists of actions
    norm        one gradient norm over any combination
    recipe      `parallelize` puts them together, in the only order that works

`python parallel.py data | memory | tensor | pipeline` shows the second to fifth of them at work, in seconds on a laptop.

Groups are arguments, never globals; `group=None` is all ranks, as in torch.distributed. "data" and "ZeRO" work on any
nn.Module; tensor parallelism needs a table that says how each layer is cut, and ours is GPT-2's.

Letters: N ranks in the group, r this rank, K parameters, m micro-batches, p pipeline ranks, v stages a rank, B, T, C, V as in model.py.
Read with: CS336 lecture 7-8; Ultra-Scale Playbook "data parallelism", "ZeRO", "tensor parallelism", "pipeline parallelism".
"""

import argparse
import functools
import itertools
import math
import os
import time
import weakref
from collections import Counter, defaultdict, deque
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

import collectives as dist
import kernels
from model import GPT, PRESETS, GPTConfig, Linear, initial_weight, materialize, shapes

# -------------------------------------------------------------------------------------------------------------------- mesh

def make_mesh(device_type, dp=1, tp=1, pp=1):
    """A torch DeviceMesh with axes ("pp", "dp", "tp"); `mesh["tp"].get_group()` is this rank's tensor-parallel group.

    Ranks are counted with tp innermost: tensor-parallel peers, who talk in every layer, are neighbours and share a node.
    Call it on all ranks; pp x dp x tp must be the world size.
    """
    if pp * dp * tp != dist.get_world_size():
        raise ValueError(f"pp {pp} x dp {dp} x tp {tp} needs {pp * dp * tp} processes, there are {dist.get_world_size()}")
    return init_device_mesh(device_type, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))


# ---------------------------------------------------------------------------------------------------- data parallel: replicas
#
# Every rank holds the whole model and sees its own part of the batch. Gradients are averaged, so replicas stay equal:
# an all-reduce of K elements, 2(N-1)/N x K sent by each rank and step, however many micro-batches the step has.

def average_gradients(module, group=None):
    """The lecture's data parallelism: after backward, one all-reduce a parameter. Right, and slow twice over.

    Nothing is sent while backward runs, and every small tensor pays the latency of a collective of its own.
    """
    for param in module.parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad, dist.ReduceOp.AVG, group)


class Bucket:
    """Parameters side by side in one flat vector, zero-padded to a multiple of N: one collective for all of them."""

    def __init__(self, params, group):
        self.params = params
        self.waiting = set(params)  # parameters whose gradient must still come before the bucket can leave
        self.came = 0               # how many gradients there were since the last ones went into `flat`
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        self.numel = -(-sum(p.numel() for p in params) // ranks) * ranks
        self.own = slice(rank * self.numel // ranks, (rank + 1) * self.numel // ranks)  # this rank's Nth
        self.dtype, self.device = params[0].dtype, params[0].device
        self.flat = None            # the gradients, full size
        self.state = "empty"        # of `flat`; "filling", or "sent": then nothing may be added until `finish`
        self.shard = None           # ZeRO: the Parameter the optimizer steps; its .grad is where gradients end up

    def new(self, dtype):
        return torch.zeros(self.numel, dtype=dtype, device=self.device)

    def views(self, flat):
        """`flat` as the parameters' shapes, in their order."""
        sizes = [p.numel() for p in self.params]
        return [v.view(p.shape) for v, p in zip(flat.split(sizes + [self.numel - sum(sizes)]), self.params)]

    def overlap(self, param, own):
        """What of a parameter lies in `own`, a slice of the flat vector: (slice of the flattened parameter, slice of `own`)."""
        start = sum(p.numel() for p in self.params[:next(i for i, p in enumerate(self.params) if p is param)])
        low = max(start, own.start)
        high = max(low, min(start + param.numel(), own.stop))
        return slice(low - start, high - start), slice(low - own.start, high - own.start)

    def gather(self, param, local, group):
        """A parameter's part of a vector that is cut as the shard is (weights, a moment), whole on every rank; all must ask.

        Each piece comes from the rank that keeps it, so no more than this one parameter is ever whole.
        """
        whole, width = local.new_empty(param.shape), len(local)
        for rank in range(self.numel // width):
            own = slice(rank * width, (rank + 1) * width)
            there, here = self.overlap(param, own)
            if own == self.own:
                whole.view(-1)[there] = local[here]
            if width < self.numel and here.start < here.stop:
                dist.broadcast(whole.view(-1)[there], group=group, group_src=rank)
        return whole


def make_buckets(params, megabytes, group, kind=lambda param: ()):
    """Parameters in buckets of about `megabytes`, last layers first: the order in which backward finishes their gradients.

    A bucket holds one dtype, one device, one set of groups that the parameters are cut over, and one `kind`.
    """
    buckets, filling = [], {}
    for param in reversed(params):
        key = (param.dtype, param.device, split_over(param), getattr(param, "tied", False), kind(param))
        if key in filling and sum(p.nbytes for p in [*filling[key], param]) > megabytes * 2**20:
            buckets.append(Bucket(filling.pop(key), group))
        filling.setdefault(key, []).append(param)
    return buckets + [Bucket(some, group) for some in filling.values()]


def split_over(param):
    """The groups a parameter is cut over: () where every rank has all of it."""
    return getattr(param, "split_over", ())


class Reducer:
    """Takes gradients from backward into buckets and sends each bucket the moment it is complete.

    stage 0: all-reduce, in the step's last backward               2(N-1)/N x K sent a step
    stage 1: reduce-scatter, in the step's last backward            (N-1)/N x K
    stage 2: reduce-scatter, in every backward                    m (N-1)/N x K

    Gradients add up in the dtype of the shard, of plain DDP in their own; reduce_dtype: what travels, where it is another. A bucket
    never leaves before the one in front of it, so the order is the same on all ranks. At stage 2 at most two are under way, a
    micro-batch's last two until the next backward or `finish`: of the full gradients there are those, and what the next bucket has so far.
    """

    def __init__(self, buckets, group, stage, reduce_dtype=None, on_complete=lambda bucket: None):
        self.buckets, self.group, self.stage, self.reduce_dtype, self.on_complete = buckets, group, stage, reduce_dtype, on_complete
        self.syncing, self.next, self.finished, self.under_way = True, 0, False, deque()
        self.totals = {}  # where gradients add up in place of .grad, once `begin` has said so; then the flat vectors stay where they lie
        self.keeps_grad = all(bucket.shard is None for bucket in buckets)  # plain DDP: `.grad` stays, a view of the bucket
        self.bucket_of = {p: bucket for bucket in buckets for p in bucket.params}
        ready = weakref.WeakMethod(self.ready)  # weak, or parameters and buckets would keep each other alive
        for param in self.bucket_of:
            param.register_post_accumulate_grad_hook(lambda p: (alive := ready()) and alive(p))

    @contextmanager
    def no_sync(self):
        """Inside, backward only adds up gradients: nothing is sent (stage 2 sends all the same: it has nowhere to keep them)."""
        self.syncing, before = self.stage >= 2, self.syncing
        try:
            yield
        finally:
            self.syncing = before

    def ready(self, param):  # the hook hands over the parameter, its gradient is param.grad
        bucket = self.bucket_of[param]
        if bucket.state == "sent":
            raise RuntimeError("a second backward before finish_grad_sync(), or one after a backward that raised: run all but the "
                               "last one under no_sync()")
        if not self.syncing and self.keeps_grad:
            return  # autograd adds to .grad by itself
        if self.totals and param.grad is not None:  # as graphs add them up, micro-batch by micro-batch: the same to the bit
            self.totals[param] += param.grad.detach()
            param.grad = None
        self.finished = False
        bucket.came += 1
        if self.syncing:
            bucket.waiting.discard(param)
        if not bucket.waiting:
            self.on_complete(bucket)
        elif self.stage < 2 and not self.keeps_grad and bucket.came == len(bucket.params):
            self._move(bucket)  # this micro-batch's part; the next one adds to it
        while self.next < len(self.buckets) and not self.buckets[self.next].waiting:
            self._leave()

    def _leave(self):
        self._move(self.buckets[self.next])
        self._send(self.buckets[self.next])
        self.next += 1
        if self.stage >= 2:
            self.next %= len(self.buckets)  # the next micro-batch fills them again

    @torch.no_grad()
    def _move(self, bucket):
        """Gradients from .grad into the flat vector; a missing one counts as zero. The originals are freed."""
        views, fresh = self._views(bucket), bucket.state == "empty"
        grads = [p.grad for p in bucket.params]
        new = [(view, g) for view, g in zip(views, grads) if g is not None and g.data_ptr() != view.data_ptr()]
        if new:
            (torch._foreach_copy_ if fresh else torch._foreach_add_)(*map(list, zip(*new)))
        for param, view, grad in zip(bucket.params, views, grads):
            if fresh and grad is None:
                view.zero_()
            param.grad = view if self.keeps_grad else None
        bucket.state, bucket.came = "filling", 0

    def _views(self, bucket):
        """The flat vector's parts, one a parameter; there from now on, and free of what an earlier step left in it."""
        if bucket.flat is None:
            dtype = bucket.dtype if bucket.shard is None else self.stage >= 2 and self.reduce_dtype or bucket.shard.dtype
            bucket.flat, bucket.state = torch.empty(bucket.numel, dtype=dtype, device=bucket.device), "empty"
            bucket.flat[sum(p.numel() for p in bucket.params):] = 0  # the padding
        kept = bucket.shard is not None and bucket.state == "empty" and bucket.shard.grad
        if isinstance(kept, torch.Tensor) and kept.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr():
            bucket.shard.grad = kept.clone()  # the last step's gradient, not zeroed: it stays, `flat` is needed
        return bucket.views(bucket.flat)

    def begin(self, fresh):
        """Let `add` put this step's gradients into the flat vectors. Stages 0 and 1. fresh: they overwrite what is there."""
        for bucket in self.buckets:
            self.totals.update(zip(bucket.params, self._views(bucket)))
            bucket.flat[sum(p.numel() for p in bucket.params) if fresh else 0:] = 0  # the padding at least: a NaN's clipping reaches it
            bucket.state = "filling"

    def add(self, param, a, b=None, fresh=False, ready=True):
        """A gradient, or the product a b: a float32 total of bf16 products is made by the product itself, in one pass over memory."""
        total, beta = self.totals[param], 0 if fresh else 1
        if b is None:
            (total.copy_ if fresh else total.add_)(a)
        elif total.dtype == a.dtype:
            total.addmm_(a, b, beta=beta)
        else:
            torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, out=total)
        if ready:
            self.ready(param)

    def replayed(self, grads):
        """A CUDA graph has sent and received all buckets: leave what `finish` leaves, and nothing for it to do."""
        for bucket, grad in zip(self.buckets, grads):
            bucket.shard.grad, bucket.state = grad, "empty"
        self.next = len(self.buckets)

    def _send(self, bucket):
        wire = bucket.flat if self.reduce_dtype is None else bucket.flat.to(self.reduce_dtype)
        if dist.get_world_size(self.group) == 1:
            out, handle = wire, SimpleNamespace(wait=lambda: None)
        elif self.stage == 0:
            out = wire
            handle = dist.all_reduce(wire, dist.ReduceOp.AVG, self.group, async_op=True)
        else:
            out = wire[bucket.own] if wire is bucket.flat and self.stage == 1 else torch.empty_like(wire[bucket.own])
            handle = dist.reduce_scatter_tensor(out, wire, dist.ReduceOp.AVG, self.group, async_op=True)
        bucket.waiting, bucket.state = set(bucket.params), "sent"
        if self.stage >= 2:
            bucket.flat, bucket.state = None, "empty"  # ZeRO-2: from here only `under_way` holds the full gradient, until _receive
            if bucket.shard.grad is None:  # there from now on, though it fills later
                bucket.shard.grad = out if out.dtype == bucket.shard.dtype else torch.zeros_like(bucket.shard)
        self.under_way.append((handle, bucket, wire, out, bucket.shard.grad if self.stage >= 2 else None))
        while self.stage >= 2 and len(self.under_way) > 2:
            self._receive(*self.under_way.popleft())

    def _receive(self, handle, bucket, wire, out, grad):
        handle.wait()
        if self.stage >= 2 and bucket.shard.grad is not grad:
            raise RuntimeError("gradients were zeroed before finish_grad_sync(): to drop a step, zero_grad() of the model")
        bucket.state = "empty"
        if self.stage == 0 and wire is not bucket.flat:
            bucket.flat.copy_(wire)
            out = bucket.flat
        if bucket.shard is not None:
            if bucket.shard.grad is None:
                bucket.shard.grad = out.to(bucket.shard.dtype)
            elif bucket.shard.grad is not out:
                bucket.shard.grad += out

    def forget(self):
        """Drop what a step has left that was never finished: one that was skipped, or whose backward raised. On every rank."""
        while self.under_way:
            self.under_way.popleft()[0].wait()
        for bucket in self.buckets:
            bucket.waiting, bucket.came, bucket.state = set(bucket.params), 0, "empty"
            for param in bucket.params:
                param.grad = None
        self.next, self.finished = 0, True

    def finish(self):
        """Send what has not left yet, wait for all of it."""
        # Stages 0, 1: each bucket leaves once a step; 2: as often as there is something in it.
        while self.next < len(self.buckets) if self.stage < 2 else self.next or any(p.grad is not None for p in self.bucket_of):
            self._leave()
        while self.under_way:
            self._receive(*self.under_way.popleft())
        self.next, self.finished = 0, True


class DDP(nn.Module):
    """Data parallel over any module: gradients are averaged bucket by bucket while backward still computes earlier ones.

        model = DDP(module, group)                  broadcasts parameters and buffers of the group's first rank
        with model.no_sync(): loss.backward()       every micro-batch but the last: gradients only add up
        loss.backward(); model.finish_grad_sync()   now every rank's .grad is the mean over the ranks

    Tied parameters count once, frozen ones not at all. Ranks may use different parameters: one that a rank did not use counts as
    zero there, and one that nobody used keeps .grad None as in one process; agreeing on that takes one small all-reduce a step,
    which `find_unused_parameters=False` saves where every parameter is always used.

    Li et al., "PyTorch Distributed" (2020). CS336 lecture 8, data parallelism.
    """

    def __init__(self, module, group=None, bucket_mb=25, find_unused_parameters=True):
        super().__init__()
        self.module, self.group, self.find_unused = module, group, find_unused_parameters
        self.params = [p for p in module.parameters() if p.requires_grad]
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), group=group, group_src=0)
        self.buckets = make_buckets(self.params, bucket_mb, group) if dist.get_world_size(group) > 1 else []
        self.reducer = Reducer(self.buckets, group, stage=0)
        self.reducers, self.no_sync = [self.reducer], self.reducer.no_sync

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_grad_sync(self):
        """Send what has not left yet and wait for all of it. Call after the step's last backward, on every rank."""
        here = [p.grad is not None for p in self.params]
        self.reducer.finish()
        if self.find_unused and self.buckets:
            used = torch.tensor(here, dtype=torch.uint8, device=self.params[0].device)
            dist.all_reduce(used, dist.ReduceOp.MAX, self.group)
            for param, somewhere in zip(self.params, () if all(here) else used.tolist()):
                param.grad = param.grad if somewhere else None


# ------------------------------------------------------------------------------------------------------- ZeRO: sharded states
#
# Adam keeps 8 bytes a parameter beside 4 of gradient and 4 of weight, and in data parallel every rank keeps the same. ZeRO lets
# each rank keep an Nth. K parameters, float32, bytes a rank (mixed precision: `memory_bytes`):
#
#                  parameters   gradients   optimizer    sent a step, elements
#     stage 0          4K           4K          8K       2 (N-1)/N K              all-reduce
#     stage 1          4K           4K          8K/N     2 (N-1)/N K              reduce-scatter, all-gather: the two halves of it
#     stage 2          4K           4K/N        8K/N     (m+1) (N-1)/N K          reduce-scatter m times, all-gather
#     stage 3          4K/N         4K/N        8K/N     3m (N-1)/N K             all-gather twice, reduce-scatter, m times
#
# Rajbhandari et al., "ZeRO" (2020). CS336 lecture 7.

class ShardedOptimizer(torch.optim.Optimizer):
    """ZeRO-1, and ZeRO-2 with stage=2: each rank holds the optimizer state, and steps the weights, of its Nth of the parameters.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, group, lr=1e-3)
        with optimizer.no_sync(): loss.backward()              every micro-batch but the last
        loss.backward(); optimizer.finish_grad_sync()          gradients: reduce-scatter
        clip_grad_norm_(optimizer.shards, 1.0, [group])
        optimizer.step(); optimizer.zero_grad()                own Nth stepped, parameters: all-gather

    params: any parameters or parameter groups, tied, frozen, on any device; optimizer_class: any whose update is element by
    element (SGD, Adam, ...), since a shard cuts through tensors. Parameters become views of flat buffers, and those of the
    group's ranks are made equal. compute_dtype: the parameters become bf16 or fp16 and the shard keeps float32 masters; gradients
    add up in float32 (at stage 2 under interleaved and zb-h1, where micro-batches overtake each other, some in 16 bits first), and
    travel so or in `reduce_dtype`. stage=0 shards nothing and all-reduces: master weights for plain data parallelism. A parameter
    that no rank used has a gradient of zero here, not None. stage=2: all ranks must use the same parameters in each backward.
    A module's weights are loaded before; later, 16-bit ones come back by this one's `load_state_dict`, which has the masters.
    """

    def __init__(self, params, optimizer_class, group=None, stage=1, bucket_mb=25, compute_dtype=None, reduce_dtype=None, **kwargs):
        groups = list(params)
        groups = [dict(g) for g in groups] if groups and isinstance(groups[0], dict) else [{"params": groups}]
        self.group, self.stage = group or torch.distributed.group.WORLD, stage
        which = {}  # parameter -> its parameter group; a tied one belongs where it comes first
        for i, g in enumerate(groups):
            for p in g["params"]:
                if p.requires_grad:
                    which.setdefault(p, i)
                elif not p.is_meta:
                    dist.broadcast(p.detach(), group=group, group_src=0)
                    p.data = p.data.to(compute_dtype) if compute_dtype and p.is_floating_point() else p.data
        self.params = list(which)
        self.buckets = make_buckets(self.params, bucket_mb, group, which.get)
        for bucket in self.buckets:
            values = make_shard(bucket, self.group, stage > 0)
            bucket.dtype = compute_dtype or bucket.dtype
            bucket.weights = values.to(bucket.dtype)
            if bucket.dtype != values.dtype:
                bucket.shard.data = bucket.shard.data.clone()  # a master of its own, and no longer a view of all `values`
            for view, p in zip(bucket.views(bucket.weights), bucket.params):
                p.data = view  # from here on, gathering the flat buffer is gathering the parameters
        self.shards = [bucket.shard for bucket in self.buckets]
        for i, g in enumerate(groups):
            g["params"] = [bucket.shard for bucket in self.buckets if which[bucket.params[0]] == i]
        self.inner, self.reducer = optimizer_class(groups, **kwargs), None
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.narrow = [b for b in self.buckets if b.dtype != b.shard.dtype]  # 16-bit parameters, whose shards are masters
        self.casts = set(self.narrow)
        if isinstance(self.inner, kernels.AdamW):  # it writes the 16-bit copy in the pass that it makes anyway
            self.inner.copies, self.casts = {b.shard: b.weights[b.own] for b in self.narrow}, set()
        self.reducer = Reducer(self.buckets, group, stage, reduce_dtype)
        self.no_sync, self.finish_grad_sync = self.reducer.no_sync, self.reducer.finish

    def add_param_group(self, group):
        if self.reducer:
            raise ValueError("ShardedOptimizer cuts its parameters once: make a new one with all of them")
        super().add_param_group(group)

    def zero_grad(self, set_to_none=True):
        self.reducer.forget()
        for shard in self.shards:
            shard.grad = None
        if not self.reducer.totals:
            for bucket in self.buckets:
                bucket.flat = None  # forward has the room; backward allocates it again, bucket by bucket, as activations go

    def state_dict(self):
        """This rank's: torch.optim's own, and the master weights where parameters have 16 bits."""
        return dict(self.inner.state_dict(), masters=[b.shard.detach() for b in self.narrow])

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """What `state_dict` gave on this rank of as many; 16-bit parameters come with their masters. On every rank."""
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "masters"})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        for bucket, master in zip(self.narrow, state_dict.get("masters") or [b.weights[b.own] for b in self.narrow], strict=True):
            bucket.shard.copy_(master)
            bucket.weights[bucket.own].copy_(master)
            if self.stage:
                dist.all_gather_into_tensor(bucket.weights, bucket.weights[bucket.own], self.group)

    @torch.no_grad()
    def step(self):
        """Step the own shard, then all-gather the parameters."""
        if not self.reducer.finished:
            self.finish_grad_sync()
        self.inner.step()
        handles = []
        for bucket in self.buckets:
            if bucket in self.casts:
                bucket.weights[bucket.own].copy_(bucket.shard)  # down to bf16 or fp16
            if self.stage:
                handles.append(dist.all_gather_into_tensor(bucket.weights, bucket.weights[bucket.own], self.group, async_op=True))
        for handle in handles:
            handle.wait()


def master_dtype(dtype):
    """What weights are kept and gradients added up in: bf16 has 8 bits, an Adam step of a thousandth would round away."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def is_matrix(param):
    """Whether weight decay is for it: not for biases and norms. A flat shard remembers what it was cut from."""
    return getattr(param, "matrix", param.dim() >= 2)


def make_shard(bucket, group, sharded):
    """Make the Parameter that an optimizer steps for a bucket: this rank's part of the values, in float32 where they are 16-bit.

    Returns all the values, on every rank those of the first one; the shard is a view of them where the dtype is the same.
    """
    values, first = bucket.new(bucket.dtype), bucket.params[0]
    if not first.is_meta:
        for view, p in zip(bucket.views(values), bucket.params):
            view.copy_(p.detach())
        dist.broadcast(values, group=group, group_src=0)
    bucket.own = bucket.own if sharded else slice(0, bucket.numel)
    bucket.shard = shard = nn.Parameter(values[bucket.own].to(master_dtype(values.dtype)))
    shard.split_over = split_over(first) + ((group,) if sharded else ())
    shard.matrix = all(is_matrix(p) for p in bucket.params)
    shard.tied, shard.replica = (getattr(first, mark, False) for mark in ("tied", "replica"))
    return values


class FSDP(nn.Module):
    """ZeRO-3: parameters exist whole only while their layer computes.

        model = FSDP(module, group)                               any module
        optimizer = torch.optim.AdamW(model.parameters(), ...)    on this rank's shards, in the master dtype
        loss.backward()                                           for every micro-batch
        model.finish_grad_sync(); optimizer.step()

    A unit is each child of a ModuleList, ModuleDict or Sequential (a block of a GPT), and each layer outside of those:

        forward    all-gather unit i+1 | compute unit i      then free unit i
        backward   all-gather unit i-1 | compute unit i      then free unit i and reduce-scatter its gradients

    so two units are whole at a time, and communication runs under computation. Matrices are sharded: one flat shard a unit.
    1-D parameters (biases, norms; a thousandth of K) stay whole and are all-reduced once a step, in `finish_grad_sync`. A tied
    parameter stays gathered from its first use in forward to its last, a frozen one from backward to the end. compute_dtype: what layers
    compute in, e.g. torch.bfloat16; shards and their gradients keep the module's own dtype. A module on the meta device is never
    whole anywhere: say on which device it shall live and give its values to `load`, one parameter at a time. All ranks must use the
    same parameters in each backward. To drop a step, `model.zero_grad()`.

    Zhao et al., "PyTorch FSDP" (2023). CS336 lecture 7, ZeRO-3.
    """

    def __init__(self, module, group=None, compute_dtype=None, reduce_dtype=None, device=None):
        super().__init__()
        self.module, self.group, self.compute_dtype = module, group or torch.distributed.group.WORLD, compute_dtype
        for buffer in module.buffers():
            if not buffer.is_meta:
                dist.broadcast(buffer, group=group, group_src=0)
        units = fsdp_units(module)
        unit_of = {p: unit for unit, params in reversed(units) for p in params}  # a tied parameter belongs where it comes first
        self.buckets = make_buckets(list(module.parameters()), math.inf, group,
                                    lambda p: (p.requires_grad, p.dim() > 1 and unit_of[p]))
        replaced = {}
        for bucket in self.buckets:
            bucket.sharded, old = bucket.params[0].dim() > 1, bucket.params
            bucket.device = torch.device(device or bucket.device)
            make_shard(bucket, self.group, bucket.sharded)
            bucket.shard.data = bucket.shard.data.clone()  # no longer a view of all values
            bucket.shard.requires_grad_(old[0].requires_grad)
            bucket.dtype = compute_dtype or bucket.dtype
            bucket.weights = bucket.new(bucket.dtype)
            bucket.gathering, bucket.uses_left, bucket.version = None, 0, None
            # Its own version counter (.data): refilling the buffer before backward is no change to what autograd has saved.
            bucket.params = [nn.Parameter(view.data, p.requires_grad) for view, p in zip(bucket.views(bucket.weights), old)]
            bucket.waiting = set(bucket.params)
            for new, p in zip(bucket.params, old):
                new.__dict__.update(p.__dict__)
                replaced[p] = new
            if bucket.sharded:
                bucket.weights.untyped_storage().resize_(0)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        for owner in module.modules():
            for leaf, p in list(owner.named_parameters(recurse=False)):
                setattr(owner, leaf, replaced[p])
        self.units = {unit: list(dict.fromkeys(self.bucket_of[replaced[p]] for p in params)) for unit, params in units}
        self.uses = {b: sum(b in buckets for buckets in self.units.values()) for b in self.buckets}
        self.order, self.last_order, self.in_backward = [], [], False
        for unit in self.units:
            unit.register_forward_pre_hook(self._before_forward)
            unit.register_forward_hook(self._after_forward)
        trainable = [b for b in self.buckets if b.shard.requires_grad]
        self.reducers = [Reducer([b for b in trainable if b.sharded == kind], self.group, 2 if kind else 0, reduce_dtype, self._free)
                         for kind in (True, False)]
        self.sharded, self.whole = self.reducers
        self.whole.syncing = False  # its few elements leave in finish_grad_sync
        for part in module.modules():
            part.register_state_dict_pre_hook(self._refuse)
            part.register_load_state_dict_pre_hook(self._refuse)
            part._apply = self._refuse

    def _refuse(self, *_, **__):
        raise RuntimeError("FSDP's parameters have no memory between steps: full_state_dict() gives them, load() sets them, and a "
                           "module is copied, moved or cast before it is wrapped")

    _apply = __deepcopy__ = _refuse

    def zero_grad(self, set_to_none=True):
        """The optimizer's gradients, and what a step that was skipped or raised has left of its own. On every rank."""
        for reducer in self.reducers:
            reducer.forget()
        super().zero_grad(set_to_none)

    no_sync = staticmethod(nullcontext)  # gradients leave on every backward: there is nowhere to keep them whole

    def named_parameters(self, *args, **kwargs):
        """What an optimizer steps: this rank's flat shards, and the 1-D parameters of the module in one flat vector."""
        return ((f"shard.{i}", bucket.shard) for i, bucket in enumerate(self.buckets))

    @torch.no_grad()
    def load(self, get):
        """Set every parameter to get(param, name), a whole tensor, one after the other; kept is what lies in this rank's shard."""
        for name, param in self.module.named_parameters():
            bucket = self.bucket_of[param]
            there, here = bucket.overlap(param, bucket.own)
            bucket.shard[here] = get(param, name).reshape(-1)[there].to(bucket.shard)

    @torch.no_grad()
    def full_parameter(self, param):
        """One parameter of the module, whole and in the master dtype. All ranks must ask."""
        bucket = self.bucket_of[param]
        return bucket.gather(param, bucket.shard.detach(), self.group)

    def full_state_dict(self):
        """{name: whole tensor in the master dtype} on every rank. All ranks must ask."""
        return {name: self.full_parameter(param) for name, param in self.module.named_parameters()}

    # Gather and free: the flat buffer's storage grows and shrinks under tensors that stay the same, so what autograd saved in
    # forward is right again in backward.

    @torch.no_grad()
    def _gather(self, bucket, wait):
        if not bucket.sharded:
            if bucket.version != bucket.shard._version:
                bucket.version = bucket.shard._version
                bucket.weights.copy_(bucket.shard)
            return
        storage = bucket.weights.untyped_storage()
        if storage.size() and bucket.version != bucket.shard._version:
            self._free(bucket)  # gathered before the optimizer's step
        if not storage.size():
            bucket.version = bucket.shard._version
            storage.resize_(bucket.numel * bucket.dtype.itemsize)
            mine = bucket.weights[bucket.own]
            mine.copy_(bucket.shard)  # the cast from master to compute dtype
            bucket.gathering = dist.all_gather_into_tensor(bucket.weights, mine, self.group, async_op=True)
        if wait:
            self._arrived(bucket)

    def _arrived(self, bucket):
        if bucket.gathering:
            bucket.gathering.wait()
            bucket.gathering = None

    def _free(self, bucket):
        if bucket.sharded and bucket.weights.untyped_storage().size():
            self._arrived(bucket)  # a gather under way must not write into freed memory
            bucket.weights.untyped_storage().resize_(0)

    def _fetch(self, unit, wait):
        for bucket in self.units[unit]:
            self._gather(bucket, wait)

    def _before_forward(self, unit, inputs):
        self._fetch(unit, wait=True)
        if not self.in_backward:  # not when a checkpoint runs it again
            i = len(self.order)
            self.order.append(unit)
            if i + 1 < len(self.last_order) and self.last_order[i] is unit:
                self._fetch(self.last_order[i + 1], wait=False)

    def _after_forward(self, unit, inputs, output):
        if self.in_backward:
            return
        for bucket in self.units[unit]:
            bucket.uses_left -= 1
            if bucket.uses_left <= 0:
                self._free(bucket)
        if torch.is_grad_enabled():
            position = len(self.order) - 1
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: self._before_backward(unit, position))

    def _before_backward(self, unit, position):
        self.in_backward = True
        self._fetch(unit, wait=True)
        if 0 < position <= len(self.order):
            self._fetch(self.order[position - 1], wait=False)

    def forward(self, *args, **kwargs):
        self.last_order, self.order, self.in_backward = self.order, [], False
        for bucket in self.buckets:
            bucket.uses_left = self.uses[bucket]
            bucket.version = bucket.version if bucket.sharded else None
        if self.compute_dtype:
            args, kwargs = tree_map_only(torch.Tensor, lambda x: x.to(self.compute_dtype) if x.is_floating_point() else x,
                                         (args, kwargs))
        output = self.module(*args, **kwargs)
        for bucket in self.buckets:
            self._free(bucket)
        if torch.is_grad_enabled() and self.order:
            self._fetch(self.order[-1], wait=False)  # backward starts with it
        return output

    def finish_grad_sync(self):
        """Wait for the gradients, all-reduce those of 1-D parameters, free what backward did not. On every rank."""
        self.sharded.finish()
        self.whole.finish()
        for bucket in self.buckets:
            self._free(bucket)
            bucket.version = None  # an optimizer may write where no version counts


def fsdp_units(module):
    """[(module, its parameters)]: what FSDP gathers at a time. No parameter of a child is used outside of its unit's forward."""
    units, containers = [], (nn.ModuleList, nn.ModuleDict, nn.Sequential)

    def walk(m, unit):
        if unit is None and (m._parameters or any(isinstance(child, (nn.ParameterList, nn.ParameterDict)) for child in m.children())):
            unit = (m, [])  # a list of parameters has no forward of its own
            units.append(unit)
        if unit:
            unit[1].extend(m.parameters(recurse=False))
        for child in m.children():
            if isinstance(m, containers) and not isinstance(child, containers):
                units.append((child, list(child.parameters())))
            else:
                walk(child, unit)

    walk(module, None)
    return units


def tensors_in(value):
    """The tensors in a module's output: a tensor, or tuples, lists and dicts of them."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def memory_bytes(config, zero=0, dp=1, tp=1, dtype=torch.float32, recompute="none", micro_batch=1, pieces=None, held=1, fused=True):
    """Predicted bytes a rank: {"parameters", "gradients", "optimizer", "activations"}.

    dtype: what layers compute in. optimizer: AdamW's two moments, and the float32 master weights where that is bf16 or fp16.
    activations: as below, of `held` micro-batches of `micro_batch` sequences at once in a pipeline. pieces: a pipeline rank's runs of
    pieces, as `split_pieces` gives them; left out, all. fused: our cross-entropy takes the loss.
    """
    pieces = [range(config.n_layer + 2)] if pieces is None else pieces
    matrix, vector = local_elements(config, tp, tuple(pieces))
    wide, narrow, whole = master_dtype(dtype).itemsize, dtype.itemsize, matrix + vector
    mine = matrix / dp + vector if zero == 3 else whole / dp if zero else whole  # what this rank's optimizer steps
    masters = wide * mine if wide != narrow else 0
    return {"parameters": int(narrow * whole if zero < 3 else narrow * vector + (0 if masters else wide * mine)),
                "gradients": int(wide * (whole if zero < 2 else mine)), "optimizer": int(2 * wide * mine + masters),
                "activations": held * activation_bytes(config, micro_batch, tp, narrow, recompute, pieces, fused)}


@functools.cache
def local_elements(config, tp, pieces):
    """(elements of matrices, of 1-D parameters) on one of tp ranks, in some runs of pieces."""
    count = [0, 0]
    for run in pieces:
        for name, param in GPT(config, seed=None, pieces=run).named_parameters():
            layer, _, leaf = name.rpartition(".")
            how = planned(layer, GPT2_PLAN)
            count[param.dim() == 1] += param.numel() / (1 if how is None or how is RowParallelLinear and leaf == "bias" else tp)
    return tuple(count)


def activation_bytes(config, micro_batch, tp, width, recompute, pieces, fused=True):
    """Bytes that autograd keeps from the forward of `micro_batch` sequences to their backward. A block, elements a token:

        whole on every rank: x, LN(x), x + attention, LN of that                  4C
        cut over tp: q, k, v, attention's output, MLP before and after GeLU       4C + 2 inner

    and float32 statistics: two numbers a layer norm, one a head; no (T, T) matrix. recompute "block" keeps x alone, "attention"
    drops q, k, v and output; what backward then runs again exists for one block at a time and is not counted. The head keeps its
    input, LN of it, and the logits: as they are where the vocabulary is cut or the loss is `fused`, a kernel that leaves the
    gradient in their place; PyTorch's own loss keeps a float32 log-softmax. Under ZB-H1 the output gradients that W waits with come on top.
    """
    tokens, c = micro_batch * config.seq_len, config.n_embd
    blocks, head = sum(1 <= i <= config.n_layer for run in pieces for i in run), any(config.n_layer + 1 in run for run in pieces)
    attention = (4 * c * width + 4 * config.n_head) / tp
    rest = 4 * c * width + 16 + 2 * config.inner * width / tp
    block = {"none": rest + attention, "attention": rest, "block": c * width}[recompute]
    logits = config.vocab_size / tp * (width if fused or tp > 1 else max(width, 4))
    return int(tokens * (blocks * block + head * (2 * c * width + 16 + logits) + 8))


# ------------------------------------------------------------------------------------------------- tensor parallel: f and g
#
# Y = GeLU(X A) B. A is cut by columns, so each rank computes its slice of the hidden layer alone, GeLU included; B is cut by
# rows to match, so each rank has a full-size Y that is one term of the sum. One all-reduce adds them up:
#
#          ┌─ X ─ A_0 ─ GeLU ─ B_0 ─ Y_0 ─┐
#     X ─ f                                g ─ Y        f: forward nothing, backward all-reduce (X fed all ranks: dX adds up)
#          └─ X ─ A_1 ─ GeLU ─ B_1 ─ Y_1 ─┘            g: forward all-reduce, backward nothing (dY reaches every term as it is)
#
# Attention is the same with heads for columns. By ring, a block sends 2 x 2(N-1)/N x BTC forward and as much backward. (The
# lecture's code all-gathers after every matrix; cutting the second one by rows takes one all-reduce for the two.)
# Shoeybi et al., "Megatron-LM" (2019), section 3. CS336 lecture 8, tensor parallelism.

class CopyToGroup(torch.autograd.Function):
    """f: forward identity, backward all-reduce: X went into every rank's columns of A, and dX is the sum of what they return."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may still hold the incoming one
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromGroup(torch.autograd.Function):
    """g: forward all-reduce, backward identity."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Shard:
    """How a parameter is cut over a group: along `dim`, after splitting that dim into `parts` equal parts.

    parts=3 is the fused q, k, v matrix: every rank gets its heads of each third. Uneven sizes differ by one, nothing is padded.
    """

    def __init__(self, group, dim, parts=1):
        self.group, self.dim, self.parts = group, dim, parts
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def cut(self, full, rank=None):
        rank = self.rank if rank is None else rank
        return torch.cat([part.tensor_split(self.size, self.dim)[rank] for part in full.chunk(self.parts, self.dim)], self.dim)

    def gather(self, local, shape):
        """The whole tensor, of `shape`, on every rank of the group."""
        full = local.new_empty(shape)
        pieces = [self.cut(full, r) for r in range(self.size)]
        rows = local.new_zeros(self.size, max(p.numel() for p in pieces))
        rows[self.rank, :local.numel()] = local.detach().reshape(-1)
        dist.all_gather_into_tensor(rows.view(-1), rows[self.rank].clone(), group=self.group)
        parts = [row[:p.numel()].view(p.shape).chunk(self.parts, self.dim) for row, p in zip(rows, pieces)]
        return torch.cat([torch.cat([p[i] for p in parts], self.dim) for i in range(self.parts)], self.dim)


class ColumnParallelLinear(nn.Module):
    """X (..., in) -> this rank's columns of X A^T + b, (..., out/N). Weight (out/N, in), bias (out/N)."""

    def __init__(self, linear, group, parts=1):
        super().__init__()
        self.group, shard = group, Shard(group, 0, parts)
        self.weight, self.bias = _cut(linear.weight, shard), _cut(linear.bias, shard)

    linear = staticmethod(kernels.linear)

    def forward(self, x):
        return self.linear(CopyToGroup.apply(x, self.group), self.weight, self.bias)

    def product(self, x):
        return self.linear(CopyToGroup.apply(x, self.group), self.weight)


class RowParallelLinear(nn.Module):
    """This rank's slice of X (..., in/N) -> the whole X A^T + b (..., out). Weight (out, in/N), bias (out), whole everywhere."""

    def __init__(self, linear, group):
        super().__init__()
        self.group, self.weight, self.bias = group, _cut(linear.weight, Shard(group, 1)), linear.bias

    linear = staticmethod(kernels.linear)

    def forward(self, x):
        y = ReduceFromGroup.apply(self.linear(x, self.weight, None), self.group)
        return y if self.bias is None else y + self.bias  # after the sum, so that it is added once and not N times


class VocabParallelEmbedding(nn.Module):
    """Token ids (...) -> embeddings (..., C), each rank looking up the rows it holds: V/N of the table."""

    def __init__(self, embedding, group):
        super().__init__()
        self.group, shard = group, Shard(group, 0)
        self.weight = _cut(embedding.weight, shard)
        self.first = _first_row(embedding.num_embeddings, shard)

    def forward(self, tokens):
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return ReduceFromGroup.apply(x.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)  # zero where another rank has it


def _cut(param, shard):
    if param is None:
        return None
    local = nn.Parameter(shard.cut(param.detach()).contiguous(), param.requires_grad)
    local.shard, local.split_over = shard, (shard.group,)
    return local


def _first_row(rows, shard):
    return shard.rank * (rows // shard.size) + min(shard.rank, rows % shard.size)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits (n, V/N), each rank holding its slice of the vocabulary, against targets (n).

    loss = log(sum exp z) - z_target needs three numbers a token, not V: the maximum, the sum of exponentials and the target's
    logit are all-reduced, 3n elements in place of nV. Backward needs nothing: softmax minus one-hot, slice by slice.
    """

    @staticmethod
    def forward(ctx, logits, targets, group, first):
        z, local = logits if logits.stride(-1) == 1 else logits.contiguous(), targets - first
        mine, total, target = (kernels.softmax_sums if kernels.on_triton(z) else softmax_sums)(z, local)
        top = mine.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
        sums = torch.stack([total * (mine - top).exp(), target])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(z, local, top, sums[0])
        return (sums[0].log() + (top - sums[1])).mean()

    @staticmethod
    def backward(ctx, grad):
        z, local, top, total = ctx.saved_tensors
        if kernels.on_triton(z):  # in the logits' memory
            return kernels.softmax_minus_onehot_(z.detach(), local, top, total, (grad / len(z)).float()), None, None, None
        p = (z.to(top.dtype) - top.unsqueeze(-1)).exp() / total.unsqueeze(-1)
        here = (0 <= local) & (local < z.shape[1])
        p.scatter_add_(1, (local * here).unsqueeze(1), -here.to(p.dtype).unsqueeze(1))
        return (p * (grad / len(p))).to(z.dtype), None, None, None


def softmax_sums(z, targets):
    """(top, total, z_t) of each row of z (n, V), as the kernel of that name gives them: z_t is 0 for a target on another rank."""
    z = z if z.dtype == torch.float64 else z.float()
    top, here = z.amax(-1), (0 <= targets) & (targets < z.shape[1])
    return top, (z - top.unsqueeze(-1)).exp().sum(-1), z.gather(1, (targets * here).unsqueeze(1)).squeeze(1) * here


def cross_entropy(logits, targets, vocab_size, group=None):
    """Mean loss in nats of logits (B, T, V) or, under tensor parallelism over `group`, (B, T, V/N), against targets (B, T)."""
    logits, targets = logits.flatten(0, 1), targets.flatten()
    if logits.shape[1] == vocab_size:
        return kernels.cross_entropy(logits, targets)
    return VocabParallelCrossEntropy.apply(logits, targets, group, _first_row(vocab_size, Shard(group, 0)))


GPT2_PLAN = {  # how each layer of a GPT-2 is cut; whatever is not named (layer norms, positions) stays whole
    "wte": VocabParallelEmbedding,
    "attn.c_attn": lambda linear, group: ColumnParallelLinear(linear, group, parts=3),
    "attn.c_proj": RowParallelLinear,
    "mlp.c_fc": ColumnParallelLinear,
    "mlp.c_proj": RowParallelLinear,
    "lm_head": ColumnParallelLinear,
}


def planned(name, plan):
    """What a plan does with the layer of this name; None: it stays whole."""
    return next((how for ending, how in plan.items() if ("." + name).endswith("." + ending)), None)


def tensor_parallel(module, group, plan=GPT2_PLAN):
    """Replace every layer the plan names (by the end of its name) with this rank's slice of it, in place. Ties stay ties.

    Sizes need not divide, except heads: the qkv matrix must be cut at a head's edge.
    """
    slices = {}  # weight -> its slice: a tied weight is cut once
    for name, layer in list(module.named_modules()):
        if how := planned(name, plan):
            new = how(layer, group)
            new.weight = slices.setdefault(layer.weight, new.weight)
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, new)
    return module


# ------------------------------------------------------------------------------------------- pipeline: schedules as lists of actions
#
# Stage s holds a slice of the layers and runs on rank s mod p; a batch passes through in m micro-batches. A schedule is data: one
# list of actions a rank, in the order that rank runs them. Generators write lists, and everything else reads them: `check` proves
# that a list can run, `simulate` times it, `draw` shows it.
#
#     F   forward of one micro-batch through one stage
#     B   backward = I, then W:   I gradient of the input, which the stage before waits for;   W gradient of the weights, which nobody does
#
# Idle time of every rank, with F = I = W = 1 (CS336 lecture 7; Qi et al., "Zero Bubble Pipeline Parallelism", 2023):
#
#     GPipe, 1F1B       (p-1) (F + I + W)         GPipe holds m activations, 1F1B p - rank: it starts backward as soon as it can
#     interleaved       (p-1) (F + I + W) / v     v stages a rank, each 1/v as long: the pipe fills in steps of 1/v
#     ZB-H1             (p-1) (F + I - W)         rank r runs W r micro-batches late; at most p activations on every rank

class Action(NamedTuple):
    kind: str           # "F", "B", "I", "W"; after `lower` also "SF", "RF" (send, receive an activation), "SB", "RB" (a gradient)
    stage: int
    micro_batch: int

    def __str__(self):
        return f"{self.kind}{self.micro_batch}"


def gpipe(p, m, v=1):
    """All forwards, then all backwards. Huang et al., "GPipe" (2019)."""
    return [[Action("F", r, i) for i in range(m)] + [Action("B", r, i) for i in range(m)] for r in range(p)]


def take_turns(forwards, ahead, backwards):
    """`ahead` forwards first, then one forward, as long as there are any, and one backward (a list of actions) in turn."""
    actions = forwards[:ahead]
    for k, backward in enumerate(backwards):
        actions += forwards[ahead + k:ahead + k + 1] + backward
    return actions


def one_f_one_b(p, m, v=1):
    """Rank r runs p-1-r forwards ahead, then one forward, one backward, in turn.

    A micro-batch's B ends p-r turns (F + B) after its F began, for it goes through p-1-r ranks and back: so p-r activations keep
    the rank busy, whatever m is, and more would only wait.
    """
    return [take_turns([Action("F", r, i) for i in range(m)], p - 1 - r, [[Action("B", r, i)] for i in range(m)]) for r in range(p)]


def interleaved(p, m, v):
    """1F1B with v stages a rank: stage c p + r is rank r's c-th. Narayanan et al., "Megatron-LM" (2021).

    Micro-batches go through in groups of p, each group through all v stages before the next: p must divide m.
    """
    if v == 1:
        return one_f_one_b(p, m)
    if m % p:
        raise ValueError(f"an interleaved schedule of {p} ranks needs micro-batches in multiples of {p}, not {m}")

    def rank(r):
        turns = [(k // p % v, k // (p * v) * p + k % p) for k in range(m * v)]  # (which of the rank's stages, micro-batch)
        return take_turns([Action("F", c * p + r, i) for c, i in turns], 2 * (p - 1 - r) + (v - 1) * p,
                          [[Action("B", (v - 1 - c) * p + r, i)] for c, i in turns])  # backward: the last stage first
    return [rank(r) for r in range(p)]


def zero_bubble_h1(p, m, v=1):
    """1F1B with backward in two: rank r puts W off by r micro-batches, so that I reaches the stage before earlier."""
    def rank(r):
        put_off = [[Action("W", r, i - r)] if i >= r else [] for i in range(m + r)]
        backwards = [[Action("I", r, i)] + put_off[i] for i in range(m)]
        return take_turns([Action("F", r, i) for i in range(m)], p - 1 - r, backwards) + [w for some in put_off[m:] for w in some]
    return [rank(r) for r in range(p)]


def stages_of(lists):
    return 1 + max(action.stage for actions in lists for action in actions)


def needs(action, stages):
    """The actions whose results one computes with: those of its own stage, and what a neighbour stage hands over."""
    kind, s, i = action
    if kind == "F":
        return [Action("F", s - 1, i)] if s else []
    if kind == "W":
        return [Action("I", s, i)]
    return [Action("F", s, i)] + ([Action(kind, s + 1, i)] if s + 1 < stages else [])


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


def rounds(lists, ready, stuck):
    """Walk all lists at once: each round yields [(rank, action)], the next of every rank for which ready(action, done, heads) holds.

    done: the actions of earlier rounds; heads: the next of each rank. ScheduleError, saying `stuck`, where no rank can go on.
    """
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
    stages = stages_of(lists)
    for now in rounds(lists, lambda action, done, _: done.issuperset(needs(action, stages)), "needs what never comes before it"):
        yield from now


def lower(lists):
    """Add the transfers: an output that another rank needs is sent as soon as it is there.

    Both ends are placed when the output is made: the send next on its rank's list, the receive at the end of the other's as it is by
    then. So the two ranks of a pair see their transfers in one mirrored order, which keeps NCCL's queues from waiting for each other.
    """
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
    """Prove that lowered lists can run: raises ScheduleError where they cannot.

    Each stage's F and B (or I and W) of each micro-batch once, on its rank, after what they need, their input received; each
    receive matched with a send; and no deadlock even if a send blocks until its receive is reached, the strictest reading.
    """
    p, stages, seen = len(lists), stages_of(lists), set()
    for r, actions in enumerate(lists):
        for i, action in enumerate(actions):
            wrong = ("is there twice" if action in seen else
                     f"of stage {action.stage}: that stage does not live on rank {r}" if action.stage % p != r else None)
            if wrong:
                raise ScheduleError(lists, [i if q == r else -1 for q in range(p)], f"{action} {wrong}")
            seen.add(action)
    for s, i in {(s, a.micro_batch) for a in seen for s in range(stages)}:
        if "".join(kind for kind in "FBIW" if Action(kind, s, i) in seen) not in ("FB", "FIW"):
            raise ScheduleError(lists, [-1] * p, f"stage {s}, micro-batch {i}: F and B, or F, I and W, must each be there")

    def ready(action, done, heads):
        kind, s, i = action
        if kind[0] in "SR":  # both ends at once: a rank at a transfer waits for the other to be at the same one
            send = action if kind[0] == "S" else other_end(action)
            made = any(Action(k, send.stage, i) in done for k in ("F" if kind[1] == "F" else "BI"))
            return made and send in heads and other_end(send) in heads
        received = "RF" if kind == "F" else "RB"
        return all((n if n.stage % p == s % p else Action(received, s, i)) in done for n in needs(action, stages))

    for _ in rounds(lists, ready, "deadlock: no rank can go on"):
        pass


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
    """Run unlowered lists on a clock. Costs are those of a rank's whole share; with v stages a rank, one takes 1/v of it.

    An activation is held from the end of its F to the end of its B or W.
    """
    p, stages = len(lists), stages_of(lists)
    v = stages // p
    cost = {"F": forward / v, "I": input_gradient / v, "W": weight_gradient / v, "B": (input_gradient + weight_gradient) / v}
    end, spans, clock = {}, [[] for _ in lists], [0.0] * p
    for r, action in in_order(lists):
        start = max([clock[r]] + [end[n] + transfer * (n.stage % p != r) for n in needs(action, stages)])
        end[action] = clock[r] = start + cost[action.kind]
        spans[r].append((action, start, clock[r]))
    idle = [max(clock) - sum(b - a for _, a, b in row) for row in spans]
    return Timeline(spans, max(clock), idle, [most_held(actions) / v for actions in lists])


def draw(timeline, unit=1.0):
    """The timeline as text, a row a rank, a column a unit of time; "2" in F2 is the micro-batch, dots are idle."""
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
    """The same as a picture, readable on light and dark pages: forward blue, input gradient orange, weight gradient green."""
    colours = {"F": "#4c8dd6", "B": "#e0883a", "I": "#e0883a", "W": "#4ba36b"}
    scale, height = 960 / timeline.length, 26
    box = f'viewBox="0 0 1040 {height * len(timeline.spans) + 8}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="11">']
    for r, row in enumerate(timeline.spans):
        out.append(f'<text x="4" y="{r * height + 19}" fill="#888">rank {r}</text>')
        for action, start, end in row:
            x, w = 60 + start * scale, (end - start) * scale
            out.append(f'<rect x="{x:.1f}" y="{r * height + 4}" width="{w:.1f}" height="{height - 4}" fill="{colours[action.kind]}" '
                       f'fill-opacity="{1 - 0.35 * (action.stage // len(timeline.spans) % 2)}" stroke="#fff" stroke-width="0.5"/>'
                       f'<text x="{x + w / 2:.1f}" y="{r * height + 19}" fill="#fff" text-anchor="middle">{action.micro_batch}</text>')
    with open(path, "w") as file:
        file.write("\n".join(out + ["</svg>\n"]))


# ------------------------------------------------------------------------------------------------------- pipeline: running a list

def accumulate(param, a, b=None):
    """What autograd does at the end of a backward: add a gradient, or the product a b, to .grad, call the hooks."""
    grad = a if b is None else a @ b
    param.grad = grad if param.grad is None else param.grad.add_(grad)
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        hook(param)


def split_linears(module):
    """Let every Linear of the module queue its weight gradients when asked to; returns the `later` that asks.

    Half of a Linear's backward, dA = dy^T x, is what no other stage waits for: zero-bubble schedules run it later, CUDA graphs add it
    up in buckets. Autograd sees detached weights, so it never takes their gradients for complete. `later.queue` takes closures while an
    "I" runs; while it is None they run at once, into .grad or wherever `later.into` puts them.
    """
    later = SimpleNamespace(queue=None, into=accumulate)

    def linear(x, weight, bias=None):
        def take(dy, x):
            @torch.no_grad()
            def gradients():
                if weight.requires_grad:
                    later.into(weight, dy.T, x)
                if bias is not None and bias.requires_grad:
                    later.into(bias, kernels.bias_gradient(dy))
            gradients() if later.queue is None else later.queue.append(gradients)
        return kernels.Linear.apply(x, weight.detach(), None if bias is None else bias.detach(), take)

    owners = Counter(param for layer in module.modules() for param in layer._parameters.values())
    for layer in module.modules():  # a weight tied to another layer's stays with autograd, which adds the two up
        if isinstance(layer, (Linear, ColumnParallelLinear, RowParallelLinear)) and owners[layer.weight] == 1:
            layer.linear = linear
    return later


@functools.cache
def split_pieces(config, stages):
    """The L+2 pieces of a GPT cut into `stages` runs, so that the slowest takes as little as can be: [range, ...], not to be changed.

    Costs are multiply-adds a token: a block's matrices and attention, the head's C V; looking up an embedding is free.
    """
    c, n = config.n_embd, config.n_layer + 2
    block = 4 * c * c + 2 * c * config.inner + config.seq_len * c
    cost = [0] + [block] * config.n_layer + [c * config.vocab_size]

    @functools.cache
    def best(end, k):
        """(cost of the slowest, where each begins, last first) of k stages that share the pieces up to `end`."""
        if k == 1:
            return sum(cost[:end]), (0,)
        return min((max(rest, sum(cost[start:end])), (start, *starts))
                   for start in range(k - 1, end) for rest, starts in [best(start, k - 1)])

    starts = best(n, stages)[1][::-1]
    return [range(a, b) for a, b in zip(starts, (*starts[1:], n))]


def pipeline_groups(mesh):
    """({(from, to): group of the two}, group of first and last stage), by pipeline rank, for this rank's dp and tp.

    A group for each direction between neighbours, so that an activation never queues behind a gradient. Call on all ranks.
    """
    p, (_, dp, tp) = mesh.shape[0], mesh.get_coordinate()
    channels, ends = {}, None
    for i in range(mesh.shape[1]):
        for j in range(mesh.shape[2]):
            ranks = mesh.mesh[:, i, j].tolist()
            for a, b in sorted({pair for r in range(p) for pair in ((r, (r + 1) % p), ((r + 1) % p, r)) if p > 1}):
                group = dist.new_group([ranks[a], ranks[b]])
                if (i, j) == (dp, tp):
                    channels[a, b] = group
            group = dist.new_group([ranks[0], ranks[-1]]) if p > 1 else None
            ends = group if (i, j) == (dp, tp) else ends
    return channels, ends


class Passage:
    """One micro-batch's way through one stage: forward, later backward "B", or in its halves "I" and "W".

    In between it holds what backward needs: the input, and where in autograd's graph the output came from. Not the output itself,
    whose memory goes when it has been sent.
    """

    def __init__(self, module, loss, later):
        self.module, self.loss, self.later, self.queue = module, loss, later, []

    def forward(self, x, target=None):
        """x: tokens (B, T), or the output of the stage before. Returns the output, on the last stage the loss; detached."""
        self.x = x.requires_grad_() if x.is_floating_point() and torch.is_grad_enabled() else x
        y = self.module(self.x)
        y = self.loss(y, target) if self.loss else y
        self.edge = get_gradient_edge(y) if torch.is_grad_enabled() else None
        return y.detach()

    def backward(self, kind, dy=None):
        """dy: the gradient of what forward returned. Weight gradients go where autograd puts them; returns that of x."""
        if kind == "W":
            for weight_gradients in self.queue:
                weight_gradients()
            return None
        self.later.queue = self.queue if kind == "I" else None
        dx = self._gradients(dy)
        self.later.queue = None
        return dx

    def _gradients(self, dy):
        torch.autograd.backward(self.edge, dy)
        return self.x.grad


class Recording(Passage):
    """A Passage recorded as CUDA graphs: replaying one costs the CPU one launch, where running it costs one a kernel.

    A block launches some 45 kernels a micro-batch, and small ones are over before the CPU has launched the next. A graph's tensors
    stay where they are: inputs are copied in, outputs out, and weight gradients added to the reducer's; autograd's hooks do not run.
    Each recording keeps memory for one micro-batch's activations, so there is one for every micro-batch in flight; those that never
    are in flight together share a pool. closes: this is a step's last micro-batch, and the graph sends the gradients, too. fresh: it
    is the only one, and overwrites what the step before has left.
    """

    def __init__(self, module, loss, later, reducer, kinds, x, target, pool=None, closes=False, fresh=False):
        super().__init__(module, loss, later)
        self.reducer, self.kinds, self.closes, self.fresh = reducer, kinds, closes, fresh
        self.pool, self.came = pool or torch.cuda.graph_pool_handle(), set()
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.input, self.target, self.graphs, later.into = x.detach().clone(), target.clone(), {}, self._add
        for kind in kinds:
            before, graph = dist.traffic(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):  # NCCL's own thread may ask about events
                if kind == "F":
                    self.output = super().forward(self.input, self.target)
                    self.dy = torch.empty_like(self.output)
                elif kind == "W":
                    super().backward("W")
                else:
                    self.dx = super().backward(kind, self.dy)
                if closes and kind == kinds[-1]:
                    for param in set(self.params) - self.came if fresh else ():
                        reducer.totals[param].zero_()  # nobody used it
                    reducer.finish()
                    self.grads = [bucket.shard.grad for bucket in reducer.buckets]
            self.graphs[kind] = graph, dist.traffic_since(before)
            dist.count_traffic(self.graphs[kind][1], -1)
        self.edge, self.queue = None, []  # autograd's nodes go: kept, they would tie later eager steps to the stream of this recording

    def _add(self, param, a, b=None):
        self.came.add(param)
        self.reducer.add(param, a, b, self.fresh, self.closes)

    def _gradients(self, dy):
        wanted = [self.x] * self.x.requires_grad + self.params
        grads = list(torch.autograd.grad(self.edge, wanted, dy, allow_unused=True))
        dx = grads.pop(0) if self.x.requires_grad else None
        for param, grad in zip(self.params, grads):
            if grad is not None:
                self._add(param, grad)
        return dx

    def _replay(self, kind):
        graph, traffic = self.graphs[kind]
        graph.replay()
        dist.count_traffic(traffic)
        if self.closes and kind == self.kinds[-1]:
            self.reducer.replayed(self.grads)

    def forward(self, x, target=None):
        self.input.detach().copy_(x)
        if self.loss:
            self.target.copy_(target)
        self._replay("F")
        return self.output.clone()

    def backward(self, kind, dy=None):
        if kind != "W":
            self.dy.copy_(dy)
        self._replay(kind)
        return self.dx.clone() if kind != "W" and self.dx is not None else None


def no_graphs():
    """What a Pipeline has in CUDA graphs, at first nothing. A run is told by (shape of its micro-batches, actions)."""
    return SimpleNamespace(recordings={},   # {stage: [Recording that no micro-batch is using]}
                           closing={},      # {stage: Recording of the last micro-batch, where it sends gradients, too}
                           last_run=None)   # what these were recorded for, or will be


class Pipeline:
    """Runs any lowered list of actions on this rank's stages. One stage and no transfers is ordinary training.

    stages: {stage: module}; loss(output, target): the last stage's; dtype: of what passes between stages. run() holds an activation
    from F to B (or W), an output only until it is sent. Receives are posted where `lower` put them, so that gloo's transfers run
    under computation; but on CUDA only when their value is needed and the rank would idle anyway. A receive that waits is a kernel
    that holds multiprocessors, and matrix products made for all of them then take two rounds for one.
    """

    def __init__(self, stages, count, mesh, loss, dtype, device):
        self.stages, self.count, self.loss, self.dtype, self.device = stages, count, loss, dtype, device
        self.p, (self.rank, dp, tp) = mesh.shape[0], mesh.get_coordinate()
        self.ranks = mesh.mesh[:, dp, tp].tolist()
        self.channels, self.ends = pipeline_groups(mesh)
        self.later = dict.fromkeys(stages, SimpleNamespace(queue=None))  # until a schedule splits a backward
        self.split, self.graphs = False, no_graphs()
        self.spans = None  # a list: record (action, start, end) of what really runs

    def run(self, actions, x, y, width, scale=1.0, syncs=None, on_forward=lambda: None, reducer=None):
        """x, y: tokens and targets of each micro-batch, (B, T); width: of the activations between stages, (B, T, width).

        Returns the losses, detached, on the last stage; backward starts from `scale` times their mean. syncs: {stage: object with
        no_sync()}, left for the stage's last backward. reducer: gradients add up in its buckets, and from the second run on
        micro-batches are replayed from CUDA graphs; with several replicas all but the last, whose hooks send them, unless one stage
        holds one micro-batch at a time.
        """
        if (reducer or any(a.kind == "I" for a in actions)) and not self.split:
            self.split, self.later = True, {s: split_linears(module) for s, module in self.stages.items()}
        final = {(a.kind, a.stage): a for a in actions}  # the last of its kind on its stage
        self.shape, self.passing, self.expected = (*x[0].shape, width), {}, defaultdict(deque)
        passages, losses, sending = {}, [], deque()
        if reducer:
            self._record(actions, x, y, reducer)
        for action in actions:
            kind, s, i = action
            begin = self._now()
            if kind[0] == "R":
                source = other_end(action).stage % self.p
                self.expected[source].append(action)
                if self.device.type != "cuda":
                    self._post(source)
            elif kind[0] == "S":
                to, tensor = other_end(action).stage % self.p, self.passing.pop(other_end(action))
                sending.append((dist.isend(tensor, self.ranks[to], self.channels[self.rank, to]), tensor))
            elif kind == "F":
                passage = self._passage(s, reducer, closes=any(final.get((k, s)) == (k, s, i) for k in "BW"))
                value = x[i] if s == 0 else self._take(Action("RF", s, i))
                begin = self._now()  # until here the rank was idle
                out = passage.forward(value, y[i])
                if s == self.count - 1:
                    losses.append(out)
                else:
                    self.passing[Action("RF", s + 1, i)] = out
                if torch.is_grad_enabled():
                    passages[s, i] = passage
                on_forward()
            else:
                passage = passages[s, i] if kind == "I" else passages.pop((s, i))
                dy = None if kind == "W" else (self._take(Action("RB", s, i)) if s < self.count - 1 else
                                               torch.full((), scale / len(x), dtype=losses[0].dtype, device=self.device))
                begin = self._now()
                with nullcontext() if syncs is None or final[kind, s] == action else syncs[s].no_sync():
                    dx = passage.backward(kind, dy)
                if s and kind != "W":
                    self.passing[Action("RB", s - 1, i)] = dx
                if kind != "I" and isinstance(passage, Recording) and not passage.closes:
                    self.graphs.recordings[s].append(passage)
            if self.spans is not None:
                self.spans.append((action, begin, self._now()))
            while sending and sending[0][0].is_completed():
                dist.wait_for(sending.popleft()[0], "isend of the pipeline")
        while sending:
            dist.wait_for(sending.popleft()[0], "isend of the pipeline")
        return losses

    def _passage(self, s, reducer, closes):
        """What takes a micro-batch through stage s; closes: the step's last one, whose gradients must be sent."""
        if reducer and closes and s in self.graphs.closing:
            return self.graphs.closing[s]
        if reducer and self.graphs.recordings.get(s) and not (closes and dist.get_world_size(reducer.group) > 1):
            return self.graphs.recordings[s].pop()
        return Passage(self.stages[s], self.loss if s == self.count - 1 else None, self.later[s])

    def _record(self, actions, x, y, reducer):
        """Let gradients add up in the reducer's buckets. The first run of a kind warms up; the second records graphs, for as many
        micro-batches as are in flight at once on each stage."""
        asked, kinds, graphs = (x[0].shape, tuple(actions)), "FIW" if any(a.kind == "I" for a in actions) else "FB", self.graphs
        single = self.count == 1 and kinds == "FB" and most_held(actions) == 1
        closing = {a.stage: a.micro_batch for a in actions if a.kind in "BW"}  # the last one counts
        replicas = dist.get_world_size(reducer.group) > 1
        again = asked == graphs.last_run
        fresh = again and single and len(x) == 1
        reducer.begin(fresh)
        if not again:
            graphs.recordings, graphs.closing, graphs.last_run = {}, {}, asked
        for s, module in self.stages.items() if again and not graphs.recordings else ():
            example = x[0] if s == 0 else torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            recording = partial(Recording, module, self.loss if s == self.count - 1 else None, self.later[s], reducer, kinds,
                                example, y[0])
            if single:  # the last micro-batch's graph can send gradients, too
                graphs.closing[s] = recording(closes=True, fresh=fresh)
                graphs.recordings[s] = [recording(pool=graphs.closing[s].pool)] if len(x) > 1 else []
            else:
                mine = [a for a in actions if a.stage == s and not (replicas and a.micro_batch == closing[s])]
                graphs.recordings[s] = [recording() for _ in range(most_held(mine))]
        for later in self.later.values():  # what runs eagerly adds in the same order, in the same precision
            later.into = reducer.add

    def _post(self, source):
        """Post the next receive from a rank; it sends in the order in which they are expected."""
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        handle = dist.irecv(buffer, self.ranks[source], self.channels[source, self.rank])
        self.passing[self.expected[source].popleft()] = handle, buffer

    def _take(self, receive):
        source = other_end(receive).stage % self.p
        while receive not in self.passing:
            self._post(source)
        value = self.passing.pop(receive)
        if isinstance(value, torch.Tensor):  # from a stage on this rank
            return value
        handle, buffer = value
        kind = "activation" if receive.kind == "RF" else "gradient"
        what = f"{kind} of micro-batch {receive.micro_batch} from rank {self.ranks[source]}"
        dist.progress(f"waiting for the {what}")
        dist.wait_for(handle, f"pipeline rank {self.rank} waited for the {what} (pipeline rank {source})")
        return buffer

    def _now(self):
        if self.spans is None or self.device.type != "cuda":
            return time.time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def record(self):
        """Keep times from now on, until `recorded` is asked."""
        self.spans = []
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.origin, self.zero = time.time(), self._now()

    def recorded(self):
        """[(action, start, end)] of what this rank ran since `record`, in seconds of the wall clock."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            spans = [(a, *(self.origin + self.zero.elapsed_time(e) / 1e3 for e in events)) for a, *events in self.spans]
        else:
            spans = self.spans
        self.spans = None
        return spans


# -------------------------------------------------------------------------------------------------------------------- norm

def clip_grad_norm_(parameters, max_norm, groups=(), scale=1.0):
    """Scale all gradients so that their norm over the whole model is at most max_norm (0: leave them); returns the norm.

    Call after finish_grad_sync, on all ranks. groups: all process groups that parameters may be cut over (tensor parallel,
    ZeRO). Squares of a cut parameter are summed over its groups; a whole one is the same on every rank and counts once, as does a
    tied one. A group costs one all-reduce of a few numbers. scale: gradients are this much too large (fp16's loss scale) and are
    divided by it first. ValueError where a parameter is cut over a group that is not among them.
    """
    groups = [group or torch.distributed.group.WORLD for group in groups]
    parameters = list(dict.fromkeys(p for p in parameters if p.grad is not None))
    if any(all(g is not h for h in groups) for over in set(map(split_over, parameters)) for g in over if dist.get_world_size(g) > 1):
        raise ValueError("clip_grad_norm_: a parameter is cut over a group that is not in `groups`: each rank would scale by another norm")
    by_groups = defaultdict(list)  # bit i set: cut over groups[i] -> gradients
    for p in parameters:
        if getattr(p, "replica", False):
            continue  # a tied weight on the last pipeline stage: the first stage counts it
        by_groups[sum(1 << i for i, g in enumerate(groups) if any(g is h for h in split_over(p)))].append(p.grad)
    squares = torch.zeros(1 << len(groups), dtype=torch.float64, device=parameters[0].device if parameters else None)
    if scale != 1 and parameters:
        torch._foreach_mul_([p.grad for p in parameters], 1 / scale)
    for key, grads in by_groups.items():
        squares[key] = torch.nn.utils.get_total_norm(grads).double().square()
    by_bit = squares.view((2,) * len(groups))  # the last dimension is bit 0
    for i, group in enumerate(groups):
        if dist.get_world_size(group) > 1:
            part = by_bit.select(len(groups) - 1 - i, 1).contiguous()  # every rank takes part, whatever it holds
            dist.all_reduce(part, group=group)
            by_bit.select(len(groups) - 1 - i, 1).copy_(part)
    norm = squares.sum().sqrt()
    if max_norm and parameters:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


# ------------------------------------------------------------------------------------------------------------------- recipe

SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-h1": zero_bubble_h1}


def parallelize(config, mesh, device, dtype=torch.float32, source=None, seed=0, zero=0, reduce_dtype=None, recompute="none",
                virtual_stages=1, cuda_graphs=False):
    """Build the GPT of `config` on this rank, laid out over the mesh; returns a ParallelGPT.

    dtype: what layers compute in; bf16 and fp16 keep float32 masters, and gradients travel in float32 or `reduce_dtype`.
    source(name) gives a parameter's whole initial value (as `model.open_hf` returns one); left out, seed and name decide it.
    zero: the ZeRO stage, over dp. recompute: "block" or "attention" is run again in backward instead of being kept. cuda_graphs:
    replay micro-batches instead of launching their kernels one by one (`Recording`). The order of the five steps matters.
    """
    if cuda_graphs and zero > 1 or virtual_stages > 1 and mesh.shape[0] == 1:
        raise ValueError(f"cuda_graphs need zero 0 or 1, not {zero}; virtual_stages {virtual_stages} a pipeline of at least 2 ranks")
    pp, tp, dp = (mesh[axis].get_group() for axis in ("pp", "tp", "dp"))
    p, master = dist.get_world_size(pp), master_dtype(dtype)
    source = source or (lambda name: initial_weight(config, name, seed))
    stages, cuts = {}, split_pieces(config, p * virtual_stages)
    for stage in range(dist.get_rank(pp), len(cuts), p):
        # 1. Shapes only, of this stage's layers. Nothing is allocated before it is known which part of it belongs here.
        model = GPT(config, seed=None, pieces=cuts[stage])
        # 2. Cut the layers: what follows must see this rank's parameters, and see them once.
        if dist.get_world_size(tp) > 1:
            tensor_parallel(model, tp)
        for name, param in model.named_parameters():
            param.split_over = split_over(param) + ((pp,) if p > 1 else ())
            param.tied = p > 1 and config.tied and name in ("wte.weight", "lm_head.weight")  # one weight on two stages
            param.replica = param.tied and stage > 0
        # 3. What to run again in backward: inside the hooks that ZeRO-3 is about to put around the layers.
        for block in model.h.values() if recompute != "none" else ():
            layer = block if recompute == "block" else block.attn
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        # 4. Weights, one whole parameter at a time, of which each rank keeps its part: the same numbers in every layout.
        if zero == 3:
            model = FSDP(model.to(master), dp, dtype, reduce_dtype, device)
            model.load(lambda param, name: cut_like(param, source(name)))
        else:
            materialize(model, source, device, master, cut_like)
        # 5. Data parallel last: it holds the parameters as they are now. (Two dtypes, CUDA graphs: ShardedOptimizer, at stage 0.)
        if zero == 0 and dtype == master and not reduce_dtype and not cuda_graphs:
            model = DDP(model, dp, find_unused_parameters=False)
        stages[stage] = model
    return ParallelGPT(config, mesh, device, dtype, stages, len(cuts), zero, reduce_dtype, cuda_graphs)


def cut_like(param, whole):
    """This rank's slice of a whole tensor, where tensor parallelism cut the parameter."""
    return param.shard.cut(whole) if hasattr(param, "shard") else whole


class ParallelGPT:
    """This rank's part of a GPT: `stages` {stage: module}, and what a training loop does with them.

        net = parallelize(config, mesh, device, ...)
        optimizer = net.make_optimizer(torch.optim.AdamW, weight_decay=0.1, lr=1e-3)
        optimizer.zero_grad()
        losses = net.forward_backward(x, y, "1f1b")        x, y: this rank's micro-batches
        norm = net.clip_grad_norm_(1.0); optimizer.step()
    """

    def __init__(self, config, mesh, device, dtype, stages, count, zero, reduce_dtype, cuda_graphs):
        self.config, self.mesh, self.device, self.dtype, self.stages, self.count = config, mesh, device, dtype, stages, count
        self.zero, self.reduce_dtype, self.cuda_graphs = zero, reduce_dtype, cuda_graphs
        self.pp, self.dp, self.tp = (mesh[axis].get_group() for axis in ("pp", "dp", "tp"))
        self.p, self.virtual = mesh.shape[0], count // mesh.shape[0]
        self.owners = {}  # name -> the stage that has it; of a tied weight, the first
        for stage, pieces in enumerate(split_pieces(config, count)):
            for name, _ in GPT(config, seed=None, pieces=pieces).named_parameters():
                self.owners.setdefault("wte.weight" if config.tied and name == "lm_head.weight" else name, stage)
        self.pipeline, self.lists = Pipeline(stages, count, mesh, self.loss, dtype, torch.device(device)), {}
        self.bucket_of = {p: b for model in stages.values() if isinstance(model, FSDP) for p, b in model.bucket_of.items()}

    def make_optimizer(self, optimizer_class, weight_decay=0.0, **kwargs):
        """An optimizer over this rank's parameters or shards, with weight decay on matrices only."""
        params = list(dict.fromkeys(p for model in self.stages.values() for p in model.parameters()))
        groups = [{"params": [p for p in params if is_matrix(p)], "weight_decay": weight_decay},
                  {"params": [p for p in params if not is_matrix(p)], "weight_decay": 0.0}]
        if all(isinstance(model, (DDP, FSDP)) for model in self.stages.values()):
            self.optimizer, self.params, self.syncs = optimizer_class(groups, **kwargs), params, self.stages
            self.reducers = [reducer for model in self.stages.values() for reducer in model.reducers]
        else:
            bucket_mb = 25 if torch.device(self.device).type == "cpu" else 100  # a GPU's links are faster, its latencies are not
            self.optimizer = ShardedOptimizer(groups, optimizer_class, self.dp, self.zero, bucket_mb, self.dtype, self.reduce_dtype,
                                              **kwargs)
            self.params, self.syncs = self.optimizer.shards, dict.fromkeys(self.stages, self.optimizer)
            self.bucket_of, self.reducers = self.optimizer.reducer.bucket_of, [self.optimizer.reducer]
        return self.optimizer

    def actions(self, schedule, m):
        """This rank's lowered list; "forward" runs no backward."""
        if (schedule, m) not in self.lists:
            lists = ([[Action("F", s, i) for s in range(r, self.count, self.p) for i in range(m)] for r in range(self.p)]
                     if schedule == "forward" else SCHEDULES[schedule](self.p, m, self.virtual))
            self.lists[schedule, m] = lower(lists)[self.mesh.get_coordinate()[0]]
        return self.lists[schedule, m]

    def loss(self, logits, targets):
        return cross_entropy(logits, targets, self.config.vocab_size, self.tp)

    def forward_backward(self, x, y, schedule="1f1b", scale=1.0, on_forward=lambda: None):
        """One step's gradients, after zero_grad: the mean over lists of micro-batches x, y (B, T), and over dp. Returns the mean loss
        of this rank's micro-batches (of its own data: not yet averaged over dp), the same on every pipeline rank.

        Backward starts from `scale` over the number of micro-batches (`Pipeline.run`), buckets travel as averages: nothing else divides.
        """
        total = self._run(x, y, schedule, scale, on_forward)
        for sync in dict.fromkeys(self.syncs.values()):
            sync.finish_grad_sync()
        for param in self.params:
            if getattr(param, "tied", False):  # the embedding's gradient: what the first stage has of it, and the last
                dist.all_reduce(param.grad, group=self.pipeline.ends)
        return total

    @torch.no_grad()
    def forward(self, x, y):
        """The mean loss over micro-batches, with no gradients."""
        return self._run(x, y, "forward", 1.0, lambda: None)

    def _run(self, x, y, schedule, scale, on_forward):
        syncs, mixed = None if schedule == "forward" else self.syncs, self.dtype != master_dtype(self.dtype)
        if syncs and mixed and self.zero < 2 and not self.cuda_graphs and (
                schedule == "zb-h1" or self.virtual > 1 or self.optimizer.reducer.totals):
            self.optimizer.reducer.begin(fresh=False)  # micro-batches overtake each other: .grad would add them up in 16 bits
        losses = self.pipeline.run(self.actions(schedule, len(x)), x, y, self.config.n_embd, scale, syncs, on_forward,
                                   self.optimizer.reducer if syncs and self.cuda_graphs else None)
        total = torch.zeros((), dtype=master_dtype(self.dtype), device=self.device)
        for loss in losses:
            total += loss / len(x)
        if self.p > 1:
            dist.all_reduce(total, group=self.pp)  # the other stages have none
        return total

    def clip_grad_norm_(self, max_norm, scale=1.0):
        """As the function of this name, over the whole model. Under kernels.AdamW gradients stay as they are: it scales them as it reads
        them."""
        groups, inner = [self.dp, self.tp, self.pp], getattr(self.optimizer, "inner", self.optimizer)
        if not isinstance(inner, kernels.AdamW):
            return clip_grad_norm_(self.params, max_norm, groups, scale)
        norm = clip_grad_norm_(self.params, 0, groups) / scale
        inner.scale = (max_norm / (norm + 1e-6) if max_norm else torch.ones_like(norm)).clamp(max=1) / scale  # as it reads gradients
        return norm

    def _kept(self, stage, name):
        """(a parameter of one of this rank's stages, the tensor that the optimizer steps for it, their bucket).

        The bucket is None where the parameter itself is stepped, else it knows which part of it lies in this rank's shard.
        """
        model = self.stages[stage]
        param = getattr(model, "module", model).get_parameter(name)
        bucket = self.bucket_of.get(param)
        return param, bucket.shard if bucket else param, bucket

    @torch.no_grad()
    def whole_parameter(self, name, key=None):
        """A parameter as one process would hold it, in the master dtype, or what the optimizer keeps of it under `key` (zeros
        before its first step), on every rank. All of them must ask, in the same order."""
        owner, local, shape = self.owners[name], None, shapes(self.config)[name]
        if owner in self.stages:
            param, stepped, bucket = self._kept(owner, name)
            local = stepped.detach() if key is None else self.optimizer.state.get(stepped, {}).get(key, torch.zeros_like(stepped))
            local = bucket.gather(param, local, self.dp) if bucket else local
            local = param.shard.gather(local, shape) if hasattr(param, "shard") else local
        if self.p > 1:
            local = torch.empty(shape, dtype=master_dtype(self.dtype), device=self.device) if local is None else local.clone()
            dist.broadcast(local, group=self.pp, group_src=owner % self.p)
        return local

    @torch.no_grad()
    def load_state(self, name, key, whole):
        """Let the optimizer keep `whole`, of a parameter's shape, under `key`: each rank takes its part. The way back of
        `whole_parameter`, with no communication."""
        names = {self.owners[name]: name}
        if self.config.tied and name == "wte.weight":
            names.setdefault(self.count - 1, "lm_head.weight")
        for stage in names.keys() & self.stages.keys():
            param, stepped, bucket = self._kept(stage, names[stage])
            there, here = bucket.overlap(param, bucket.own) if bucket else (slice(None), slice(None))
            kept = self.optimizer.state[stepped].setdefault(key, torch.zeros_like(stepped))
            kept.view(-1)[here] = cut_like(param, whole).reshape(-1)[there].to(kept)


# ============================================================ machinery: the same results, faster or safer ============

# -------------------------------------------------------------------------------------------------------------------- demos

def demo_memory(arguments):
    config, gib = PRESETS[arguments.model], 2**30
    print(f"{arguments.model}, {config.parameters():,} parameters, dp {arguments.dp} x tp {arguments.tp}, {arguments.dtype}, AdamW: "
          f"GiB a GPU, activations apart\n\n{'stage':8}{'parameters':>12}{'gradients':>12}{'optimizer':>12}{'total':>10}   "
          f"sharded over dp")
    stages = [memory_bytes(config, zero, arguments.dp, arguments.tp, getattr(torch, arguments.dtype)) for zero in range(4)]
    totals = [b["parameters"] + b["gradients"] + b["optimizer"] for b in stages]
    kept = ("nothing", "optimizer", "optimizer, gradients", "optimizer, gradients, parameters")
    for zero, (b, total, what) in enumerate(zip(stages, totals, kept)):
        print(f"ZeRO-{zero}  {b['parameters'] / gib:12.2f}{b['gradients'] / gib:12.2f}{b['optimizer'] / gib:12.2f}"
              f"{total / gib:10.2f}   {what}\n        {'#' * round(40 * total / totals[0])}")
    print("\nGradients are kept in float32; with 16-bit weights the optimizer column holds their float32 masters, 12 bytes a\n"
          "parameter in all. At stage 3 they are all there is: a 16-bit copy exists only while its layer computes.")


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
    print("\nF = I = W = 1, B = I + W; a column is one unit, of 1/v where a rank has v stages. An activation counts 1 while a micro-batch\n"
          "is between its F and its B or W on a rank, 1/v where a rank has v stages: there a second F0 is its next stage's.")


def all_reduced():
    """What all-reduces have sent since this was last asked."""
    sent = dist.traffic().get("all_reduce", dist.Traffic())
    dist.reset_traffic()
    return sent


def off(a, b):
    return ((a - b).norm() / b.norm()).item()


def demo_data(arguments):
    """Data parallelism in float64: when each bucket leaves, what the naive way and DDP send, their gradients beside one process's."""
    N, rank, config = dist.get_world_size(), dist.get_rank(), PRESETS["tiny"]
    say, mine, K = (print if rank == 0 else lambda text: None), slice(2 * rank, 2 * rank + 2), config.parameters()
    x, y = torch.randint(config.vocab_size, (2, 2 * N, config.seq_len), generator=torch.Generator().manual_seed(0))
    one, naive, net = (GPT(config).double() for _ in range(3))
    model, came, left = DDP(net, bucket_mb=2, find_unused_parameters=False), set(), []
    piece = {p: ".".join(name.split(".")[:2 if name.startswith("h.") else 1]) for name, p in net.named_parameters()}

    def look(param):  # runs right after DDP's own hook
        came.add(param)
        for bucket in model.buckets[len(left):model.reducer.next]:
            left.append(bucket)
            has, lacks = (", ".join(dict.fromkeys(piece[p] for p in some))
                          for some in (bucket.params, [p for p in reversed(model.params) if p not in came]))
            say(f"  {len(came):7} of {len(piece)}{bucket.numel * 8 // 1024:>9}   {has:22}{lacks or 'nothing: it travels alone'}")

    for param in model.params:
        param.register_post_accumulate_grad_hook(look)
    say(f"{N} ranks, 2 of {2 * N} sequences each, the same GPT on all: K = {K:,} parameters in {len(piece)} tensors, float64.\n"
        f"A bucket leaves when its last gradient is there, and travels while backward goes on:\n\n"
        f"  gradients there      KiB   bucket of             still to come")
    all_reduced()
    cross_entropy(one(x), y, config.vocab_size).backward()
    cross_entropy(model(x[mine]), y[mine], config.vocab_size).backward()
    model.finish_grad_sync()
    rows = [("DDP, in buckets", all_reduced(), net)]
    cross_entropy(naive(x[mine]), y[mine], config.vocab_size).backward()
    average_gradients(naive)
    rows = [("naive, after backward", all_reduced(), naive)] + rows
    say("\n  sent by rank 0           all-reduces  messages         bytes   gradients, off from one process's")
    for what, sent, other in rows:
        error = max(off(p.grad, q.grad) for p, q in zip(other.parameters(), one.parameters()))
        say(f"  {what:25}{sent.calls:11}{sent.messages:10}{sent.bytes:14,}   {error:.0e}")
    say(f"  {'2(N-1)/N x K x 8 bytes':46}{2 * (N - 1) * 8 * K // N:14,}   if all went by ring; small tensors are sent whole, log2(N) times")


def demo_tensor(arguments):
    """Tensor parallelism in float64: attention and an MLP cut over the ranks, what f and g send, the same numbers as uncut."""
    N, rank = dist.get_world_size(), dist.get_rank()
    config, say = GPTConfig(n_layer=1, n_head=2 * N, n_embd=32 * N), print if rank == 0 else lambda text: None
    X, dY = torch.randn(2, 16, config.seq_len, config.n_embd, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    say(f"{N} ranks, X (B, T, C) = {tuple(X.shape)} and dY the same on all. An all-reduce sends 2(N-1)/N x BTC x 8 bytes = "
        f"{2 * (N - 1) * X.nbytes // N:,} a rank.")
    one, net = GPT(config).double().h["0"], tensor_parallel(GPT(config).double(), None).h["0"]
    for name, first, what in (("attn", "c_attn", "Attention: Y = heads(X A) B, A makes each head's q, k and v"),
                              ("mlp", "c_fc", "MLP: Y = GeLU(X A) B")):
        whole, cut, inner = getattr(one, name), getattr(net, name), []
        cut.c_proj.register_forward_pre_hook(lambda layer, inputs, inner=inner: inner.append(inputs[0].detach()))
        x, x_cut = X.clone().requires_grad_(), X.clone().requires_grad_()
        Y = whole(x)
        Y.backward(dY)
        all_reduced()
        Y_cut = cut(x_cut)
        g = all_reduced()
        Y_cut.backward(dY)
        f, term = all_reduced(), inner[0] @ cut.c_proj.weight.T
        (A, B), (A_r, B_r) = ([tuple(getattr(m, leaf).weight.T.shape) for leaf in (first, "c_proj")] for m in (whole, cut))
        say(f"\n{what}. A {A} is cut by columns, B {B} by rows:")
        dist.print_in_order(f"  rank {rank}   A_{rank} {A_r}   before B {tuple(inner[0].shape)}   B_{rank} {B_r}   "
                            f"its term of Y {tuple(term.shape)}, alone {100 * off(term, Y):.0f} % off")
        say(f"  f   forward   nothing                                 backward  all-reduce of dX, {f.bytes:,} bytes sent\n"
            f"  g   forward   all-reduce of Y, {g.bytes:9,} bytes sent   backward  nothing\n"
            f"  off from one rank's: Y {off(Y_cut, Y):.0e}, dX {off(x_cut.grad, x.grad):.0e}")


def positive(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1, e.g. 4")
    return int(text)


class Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, where argparse would print its usage too
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}; see --help\n")


def main():
    parser = Parser(description="Demos of parallel training.")
    demos = parser.add_subparsers(required=True, metavar="DEMO")
    memory = demos.add_parser("memory", help="the ZeRO table: bytes a GPU at each stage")
    memory.add_argument("--model", choices=list(PRESETS), default="gpt2-xl")
    memory.add_argument("--dp", type=positive, default=8)
    memory.add_argument("--tp", type=positive, default=1)
    memory.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    memory.set_defaults(run=demo_memory)
    pipeline = demos.add_parser("pipeline", help="the schedules: grids, bubbles, activations")
    pipeline.add_argument("--stages", type=positive, default=4)
    pipeline.add_argument("--micro-batches", type=positive, default=8)
    pipeline.add_argument("--virtual-stages", type=positive, default=2)
    pipeline.add_argument("--svg", metavar="DIR", help="write a picture of each there, too")
    pipeline.set_defaults(run=demo_pipeline)
    for name, demo, what in (("data", demo_data, "buckets that leave while backward runs, beside the naive way"),
                             ("tensor", demo_tensor, "attention and MLP cut over ranks: shapes, f and g, bytes")):
        ranks = demos.add_parser(name, help=what)
        ranks.add_argument("--ranks", type=positive, default=2, help="processes to start, on the CPU")
        ranks.set_defaults(run=demo)
    arguments = parser.parse_args()
    if not hasattr(arguments, "ranks"):
        return arguments.run(arguments)
    if "RANK" not in os.environ:
        dist.start_again(arguments.ranks)
    dist.initialize("cpu")
    arguments.run(arguments)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
