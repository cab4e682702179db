"""Gradients moved by few kernels; steps that are dropped.

Subclasses of the Reducers of further/buckets.py and flat.py. Copied, not added to zeros, a gradient costs 8 bytes
less a parameter (counted; the time was not measured). Buckets that leave under backward, as the reference's do, save
5.3 % of a step of GPT-2 XL on two H200s.
"""

import weakref
from contextlib import contextmanager

import torch

from further.buckets import Reducer
from further.flat import EveryBackward, FlatReducer


@torch.no_grad()
def collect_all(bucket):
    """Move a bucket's gradients into its total by a few kernels, not one a parameter."""
    came = [p for p in bucket.params if p.grad is not None and p.requires_grad]
    if not came:  # all were moved before, or have left, or a CUDA graph has added them
        return
    fresh = bucket.total is None
    if fresh:
        bucket.total = torch.empty(bucket.numel, dtype=bucket.total_dtype, device=bucket.device)
        bucket.total[sum(p.numel() for p in bucket.params):] = 0  # the padding
    views = [bucket.view(bucket.total, p) for p in came]
    (torch._foreach_copy_ if fresh else torch._foreach_add_)(views, [p.grad.to_dense() for p in came])
    for p in bucket.params:
        if p.grad is not None and p.requires_grad:
            p.grad = None
        elif fresh:
            bucket.view(bucket.total, p).zero_()


def call_before_added(param, bucket):
    """Let no backward add to a 16-bit .grad: one that the backward before has left, because that used only a part of
    the bucket, is moved into the total first."""
    param_alive, bucket_alive = weakref.ref(param), weakref.ref(bucket)  # or the hook would keep both

    def move(grad):
        p, b = param_alive(), bucket_alive()
        if p.grad is not None and b:
            b.collect(p)

    is_trained = param.requires_grad
    param.requires_grad_(True)  # else it takes no hook, and it may be trained later
    param.register_hook(move)
    param.requires_grad_(is_trained)


class FastReducer(Reducer):
    """A Reducer that moves gradients a bucket at a time. Until then they stay in .grad: the memory of a bucket."""

    def __init__(self, *options):
        super().__init__(*options)
        for param, bucket in self.bucket_of.items():
            if bucket.total_dtype != bucket.dtype:
                call_before_added(param, bucket)

    def begin_step(self):
        super().begin_step()
        self.computing = {bucket: set(bucket.params) for bucket in self.buckets}  # what this backward still computes

    def computed(self, param):
        bucket = self.bucket_of[param]
        self.computing[bucket].discard(param)
        if not any(p.requires_grad for p in self.computing[bucket]):
            self.collect_rest([bucket])
        if self.syncing:
            self.mark_ready(bucket, param)

    def collect_rest(self, buckets):
        """Move what .grad has, where it must not add up there: in 16 bits, or beside what CUDA graphs add up."""
        for bucket in buckets:
            self.computing[bucket] = set(bucket.params)
            if bucket.total is not None or bucket.total_dtype != bucket.dtype:
                collect_all(bucket)

    @contextmanager
    def no_sync(self):
        try:
            with super().no_sync():
                yield
        finally:
            self.collect_rest(self.buckets)  # of which a backward may not have used all parameters

    def start(self, bucket):
        collect_all(bucket)
        super().start(bucket)

    def reset(self):
        super().reset()
        for bucket in self.buckets:
            bucket.total = None


class FastFlatReducer(FastReducer, FlatReducer):
    """Of FlatBuckets, a bucket at a time as well."""


class FastEveryBackward(FastReducer, EveryBackward):
    """The shard's .grad is set when the first reduce-scatter into it starts; its numbers arrive later. RuntimeError if
    somebody drops .grad before `finish`."""

    def begin_step(self):
        super().begin_step()
        self.promised = {}  # bucket -> the shard's .grad, into which gradients of this step are on their way

    def start(self, bucket):
        super().start(bucket)
        self.keeps_promise(bucket)
        if bucket.shard.grad is None:
            bucket.shard.grad = self.under_way[-1][-1]
        self.promised[bucket] = bucket.shard.grad

    @torch.no_grad()
    def finish_oldest(self):
        bucket, handle, _, average = self.under_way.popleft()
        handle.wait()
        self.keeps_promise(bucket)
        if average is not bucket.shard.grad:
            self.store(bucket, average)

    def keeps_promise(self, bucket):
        if bucket in self.promised and self.promised[bucket] is not bucket.shard.grad:
            raise RuntimeError("gradients were zeroed before finish_grad_sync(): to drop a step, zero_grad() must be "
                               "called on the FlatFSDP or the FlatOptimizer")
