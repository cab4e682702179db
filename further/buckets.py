"""Data parallelism with few messages, which are sent while backward computes.

Parameters whose gradients travel together are a bucket. Its message is sent when backward has computed the last of its
gradients, and backward goes on meanwhile. So few collectives pay their latency, and computation hides them.
`BucketDDP` is parallel.average_gradients in buckets, over any module.

    python -m lessons data --ranks 4
"""

import weakref
from collections import deque
from contextlib import contextmanager, ExitStack
from functools import cached_property

import torch
from torch import nn

import collectives as dist
from parallel import group_or_world, placement_of


class Bucket:
    """Parameters whose gradients travel together, in one collective. group: the N ranks that average them.

        params     W (2, 3)             b (2)   V (2, 2)
        message    0  1  2  3  4  5     6  7    8  9 10 11       `view(message, W)` is the first six, as (2, 3)

    Gradients of several micro-batches accumulate in .grad. `take_message` lays them side by side to send the bucket.
    """

    def __init__(self, params, group):
        self.params = params
        self.placement = placement_of(params[0])
        self.group = self.placement.average_over or group  # few ranks keep the same expert (further/experts.py)
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
                self.view(message, param).add_(param.grad)  # a FlatBucket's message may hold a sum already
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
    handle = dist.all_reduce(message, dist.ReduceOp.AVG, bucket.group, async_op=True)
    return handle, message, message


def split_into_grads(bucket, average):
    """Make each parameter's .grad its part of the average. Frozen ones have none, so an optimizer leaves them alone."""
    for param in bucket.params:
        if param.requires_grad:
            param.grad = bucket.view(average, param)


def make_buckets(params, megabytes=None, same=lambda param: None):
    """Lists of parameters, one for each bucket, of about `megabytes` (25, as PyTorch's; 100 on GPUs, whose links are
    faster and whose latency is not shorter). The last layer's list is first, because backward computes its gradients
    first. The parameters of a list have one dtype, device, placement and requires_grad, and the same value of
    same(param). A tied embedding has a placement like no other, so it has a bucket of its own, and the stages of both
    its ends shard it alike."""
    limit = (megabytes or (100 if any(param.is_cuda for param in params) else 25)) * 2**20
    filling, full = {}, []
    for param in reversed(params):
        key = param.dtype, param.device, placement_of(param), param.requires_grad, same(param)
        if key in filling and sum(p.nbytes for p in [*filling[key], param]) > limit:
            full.append(filling.pop(key))
        filling[key] = [*filling.pop(key, []), param]  # moved to the end, because lists are sent as they fill up
    return [*full, *filling.values()]


class Reducer:
    """Sends buckets while backward still computes: each when its last gradient is there and all before it are sent.

    All ranks must start the same collectives in the same order, or one bucket would be added to another. So buckets
    are sent in the order of the list. A parameter that gets no gradient therefore holds up its bucket, and those after
    it in the list, until `finish`. Three buckets, the last layer's first:

        backward computes      gradients of 0     gradients of 1     gradients of 2
        the network                               all-reduce of 0    all-reduce of 1    all-reduce of 2
                                                                                        `finish` waits

    send(bucket): starts a collective; returns (handle, its input, its output). store(bucket, output): once it is done.
    """

    holds = False  # whether buckets leave in `finish` alone

    def __init__(self, buckets, send, store):
        self.buckets, self.send, self.store = buckets, send, store
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

    def computed(self, param):
        """Autograd calls this when it has added all of a backward's gradient to param.grad."""
        if self.syncing:
            self.mark_ready(self.bucket_of[param], param)

    def mark_ready(self, bucket, param):
        """A bucket waits for one gradient less. Send all buckets that are now complete and next in order."""
        if param not in self.missing[bucket]:
            raise RuntimeError("a second backward before finish_grad_sync(): run all but the last one under no_sync(); "
                               "to drop a step, call zero_grad() of the BucketDDP, FlatFSDP or FlatOptimizer")
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
        self.store(bucket, output)

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

    @cached_property
    def buckets(self):
        return [bucket for reducer in self.reducers for bucket in reducer.buckets]

    @cached_property
    def bucket_of(self):
        return {param: bucket for bucket in self.buckets for param in bucket.params}

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

    def zero_grad(self, set_to_none=True):
        """Drop all gradients, and an unfinished step. Call it on all ranks."""
        for reducer in self.reducers:
            reducer.reset()


class BucketDDP(Averager, nn.Module):
    """Data parallel over any module: gradients are averaged bucket by bucket, while backward still computes.

        model = BucketDDP(module, group)            the first rank broadcasts its parameters
        with model.no_sync(): loss.backward()       every micro-batch but the last: gradients accumulate
        loss.backward(); model.finish_grad_sync()   now every rank's .grad is the mean over the ranks

    A parameter that a rank did not use counts as zero there, so one that nobody used has a gradient of zero, not None.
    Parameters may be frozen and unfrozen between steps, on all ranks alike. Buffers, such as BatchNorm's statistics,
    are each rank's own.
    Li et al., "PyTorch Distributed" (2020). CS336 lecture 8, data parallelism.
    """

    def __init__(self, module, group=None, bucket_mb=None):
        super().__init__()
        self.module, self.group = module, group_or_world(group)
        buckets = [Bucket(params, self.group) for params in make_buckets([*module.parameters()], bucket_mb)]
        for bucket in buckets:
            for param in bucket.params:
                dist.broadcast(param.detach(), group=bucket.group, group_src=0)
        self.reducers = [Reducer(buckets, all_reduce_bucket, split_into_grads)]

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


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
