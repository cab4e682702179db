"""ZeRO-1 and 2 with one message for many tensors: a shard is a part of a bucket, not of each tensor.

The parameters of a bucket lie side by side, as views of one flat vector, so that one collective moves them all.
`FlatOptimizer` is parallel.ZeRO1 or ZeRO2 with such buckets. With 16-bit weights its shards are the masters.

    torchrun --nproc_per_node 2 train.py --form full --dp 2 --zero 1
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import nn

import collectives as dist
from further.buckets import all_reduce_bucket, Averager, Bucket, make_buckets, Reducer
from parallel import group_or_world, is_matrix, master_dtype, ZeRO0


class FlatBucket(Bucket):
    """A Bucket whose weights lie side by side, too: its parameters become views of one vector, `weights`, zero-padded
    to a multiple of N, so that one all-gather gathers them all. Their values are the first rank's.

    shard: the Parameter that an optimizer steps, weights[own]: 1/N of them, or all if not `sharded`. Averages of
    gradients end up in its .grad. Rank 1 of 2 with parameters of 6, 2 and 3 elements:

        float32    weights   W W W W W W b b V V V 0      all float32; W, b and V are views
                   shard                 ^^^^^^^^^^^      a view of weights[6:12], so a step changes the weights
        bf16       weights   w w w w w w b b v v v 0      all bf16
                   shard                 B B V V V 0      float32 of its own, the master; `cast_masters` writes it there

    Gradients of 16-bit weights must not accumulate in 16 bits, so each backward's go into `total`, float32, at once.
    """

    def __init__(self, params, group, sharded=True, compute_dtype=None, device=None):
        super().__init__(params, group)
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


class ShardAverager(Averager):
    """An Averager whose `inner` steps the shards of FlatBuckets."""
    param_groups = ZeRO0.param_groups
    state = ZeRO0.state

    def kept(self, param):
        """As parallel.ZeRO0's."""
        return self.bucket_of[param].kept(param)

    def zero_grad(self, set_to_none=True):
        super().zero_grad()
        self.inner.zero_grad(set_to_none)

    def step(self):
        self.inner.step()


class FlatOptimizer(ShardAverager):
    """ZeRO-1, and ZeRO-2 with stage=2: each rank keeps the optimizer state of its shard, and steps that.

        optimizer = FlatOptimizer(model.parameters(), torch.optim.AdamW, group, lr=1e-3)
        with optimizer.no_sync(): loss.backward()              every micro-batch but the last
        loss.backward(); optimizer.finish_grad_sync()          gradients: reduce-scatter
        clip_grad_norm_(optimizer.shards, 1.0)
        optimizer.step(); optimizer.zero_grad()                own shard stepped, parameters: all-gather

    params: any parameters or parameter groups; they become views of flat buffers, equal on all ranks of the group.
    optimizer_class: any whose update is element by element (SGD, Adam, ...), because a shard cuts through tensors.
    One that needs whole tensors brings buckets that do not cut them (further/muon.py).
    stage=2: gradients are sent in every backward, not in the last, so whole ones never accumulate. All ranks must use
    the same parameters in each backward then. stage=0 shards nothing. compute_dtype: that of layers.

    `inner`, of that class, steps the shards: PyTorch's schedulers take it, and its state_dict is this rank's. It must
    be made after parameters were frozen, and overwrites what is written into 16-bit weights later.
    """
    reducer_class = FlatReducer
    every_backward = EveryBackward

    def __init__(self, params, optimizer_class, group=None, stage=1, bucket_mb=None, compute_dtype=None, **kwargs):
        throwaway = optimizer_class(params, **kwargs)  # made to read its param_groups: a plain list is one group
        param_groups = throwaway.param_groups
        param_group_of = {p: i for i, g in enumerate(param_groups) for p in g["params"]}  # by number
        self.group, self.stage = group_or_world(group), stage
        new_bucket = getattr(throwaway, "new_bucket", FlatBucket)
        buckets = [new_bucket(bucket_params, self.group, stage > 0, compute_dtype)
                   for bucket_params in make_buckets([*param_group_of], bucket_mb, param_group_of.get)]
        self.shards = [bucket.shard for bucket in buckets]
        for i, g in enumerate(param_groups):
            g.pop("param_names", None)  # shards have none
            g["params"] = [bucket.shard for bucket in buckets if param_group_of[bucket.params[0]] == i]
        self.inner = optimizer_class(param_groups, **kwargs)
        send = {0: all_reduce_bucket, 1: partial(reduce_scatter_bucket, in_place=True), 2: reduce_scatter_bucket}
        reducer_class = self.every_backward if stage == 2 else self.reducer_class
        self.reducers = [reducer_class(buckets, send[stage], add_to_shard)]

    @torch.no_grad()
    def step(self):
        """Step the shards, then all-gather the other ranks'."""
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
        """All-gather: send this rank's shard of the weights and receive the others', (N-1)/N x K elements."""
        if self.stage:
            for bucket in buckets:
                bucket.all_gather().wait()
