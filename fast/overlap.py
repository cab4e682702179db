"""Gradients sent while backward still runs."""

from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace

import torch

import collectives as dist
from parallel import DDP, call_when_computed, make_buckets, Reducer, ShardReducer


def large_buckets(params, megabytes, *args, **kwargs):
    """As parallel.make_buckets. On GPUs buckets are larger, because their links are faster, but their latency is not
    shorter."""
    on_gpus = any(param.is_cuda for param in params)
    return make_buckets(params, megabytes or (100 if on_gpus else None), *args, **kwargs)


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


def stepped(bucket):
    """The parameters that an optimizer steps for a bucket: the bucket's own, or its shard."""
    return bucket.params if bucket.shard is None else [bucket.shard]
