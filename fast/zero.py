"""ZeRO whose weights travel under the optimizer, with CUDA graphs also under the next forward, and whose steps can be
dropped.

Subclasses of FlatOptimizer and FlatFSDP. With AdamW's kernel it saves the cast of all weights, 6 bytes a parameter, and
the network works while the optimizer and the next forward do. The time was not measured by itself.
"""

import weakref

import torch

from fast.adamw import AdamW
from fast.overlap import FastEveryBackward, FastFlatReducer
from further.flat import cast_masters, FlatOptimizer
from further.prefetch import FlatFSDP
from further.units import units_of


class AheadOptimizer(FlatOptimizer):
    """A FlatOptimizer that saves a pass over the weights.

    fast.adamw.AdamW writes the 16-bit weights while it updates their masters, so they need no cast afterwards, and a
    bucket's all-gather runs beside the update of the buckets after it.
    """
    reducer_class = FastFlatReducer
    every_backward = FastEveryBackward
    late = False  # whether forward waits for weights, not `step`

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Bucket -> the handle of its all-gather under way; bucket -> the event at its end, for which graphs wait.
        self.gathering = {}
        self.arrived = {}
        if isinstance(self.inner, AdamW):
            self.inner.copies = {b.shard: b.weights[b.own] for b in self.buckets if b.dtype != b.shard.dtype}
            if self.stage:  # by a weak reference, so that an optimizer that nobody keeps is freed at once
                bucket_of = {b.shard: b for b in self.buckets}
                gather = weakref.WeakMethod(self.gather_weights)
                self.inner.stepped = lambda shard: shard in bucket_of and gather()([bucket_of[shard]], wait=False)

    @torch.no_grad()
    def step(self):
        self.wait_for_weights(self.buckets)
        super().step()

    def update(self, buckets):
        self.inner.step()
        if not isinstance(self.inner, AdamW):
            cast_masters(buckets)

    def gather_weights(self, buckets, wait=True):
        """wait: until they are there, unless forward does."""
        for bucket in reversed(buckets) if self.stage else ():  # forward wants the first layers first
            if bucket not in self.gathering:
                self.gathering[bucket] = handle = bucket.all_gather()
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
        self.late = True
        self.stream = torch.cuda.Stream() if torch.cuda.is_initialized() else None
        for bucket in self.buckets:
            if self.stage and bucket.weights.is_cuda:  # graphs wait for events, the same ones in every step
                self.arrived[bucket] = torch.cuda.Event(external=True)
                self.arrived[bucket].record()  # no gather comes before the first forward
        wait = weakref.WeakMethod(self.wait_for_weights)

        def hook(buckets):
            return lambda *_: (alive := wait()) and alive(buckets)

        for module in modules:
            for unit, params in units_of(module):  # frozen parameters have no bucket
                mine = {self.bucket_of[p] for p in params if p in self.bucket_of}
                unit.register_forward_pre_hook(hook(mine))
            module.register_state_dict_pre_hook(hook(self.buckets))
            module.register_load_state_dict_pre_hook(hook(self.buckets))

    def wait_for_weights(self, buckets):
        for bucket in buckets:
            if bucket in self.arrived and torch.cuda.is_current_stream_capturing():
                self.arrived[bucket].wait()  # every replay does, for the gather before it
            elif bucket in self.gathering:
                self.gathering.pop(bucket).wait()


class FastFSDP(FlatFSDP):
    """A FlatFSDP whose gradients are moved a bucket at a time."""
    reducer_class = FastFlatReducer
    every_backward = FastEveryBackward

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reducers[1].holds = True  # 1-D gradients have few elements: send them in finish_grad_sync
