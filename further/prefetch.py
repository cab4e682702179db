"""ZeRO-3 that gathers the next layer's weights while one computes, so that no layer waits for its own.

A unit's matrices are one flat parameter. While a unit computes, the next one's are gathered. `FlatFSDP` is
parallel.ZeRO3 with such units. Zhao et al., "PyTorch FSDP" (2023). CS336 lecture 7.

    torchrun --nproc_per_node 2 train.py --form full --dp 2 --zero 3
"""

import math
from collections import Counter
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from further.buckets import all_reduce_bucket, Averager, make_buckets
from further.flat import (
    add_to_shard, cast_masters, EveryBackward, FlatBucket, FlatReducer, reduce_scatter_bucket, ShardAverager)
from further.units import units_of
from further.whole import take_part
from parallel import EMBEDDINGS, group_or_world, is_matrix


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


class FlatFSDP(Averager, nn.Module):
    """ZeRO-3: parameters exist whole only while their layer computes.

        model = FlatFSDP(module, group)                           not inside of another module
        optimizer = torch.optim.AdamW(model.parameters(), ...)    on this rank's shards, 1-D, without names
        with model.no_sync(): loss.backward()                     every micro-batch but the last
        loss.backward(); model.finish_grad_sync(); optimizer.step(); model.zero_grad()

    A unit is each child of a ModuleList, ModuleDict or Sequential (a block of a GPT), and each child outside of those.
    Matrices are sharded, one flat parameter a unit; their gradients are sent in every backward, under no_sync, too.
    Vectors (biases, norms; a thousandth of GPT-2's K) stay whole, and are all-reduced once a step. All ranks must use
    the same parameters in each backward. (PyTorch's shards vectors, too, and under no_sync keeps whole gradients.)

    A parameter may be used in its unit's forward alone, and written never: elsewhere it is NaN.

    compute_dtype: that of layers and inputs, e.g. torch.bfloat16; shards and their gradients have its `master_dtype`.
    Shards are vectors: for weight decay ask `is_matrix`, not their shape. A module on the meta device is never whole
    anywhere: name its device, and give its values to `load`. Zhao et al., "PyTorch FSDP" (2023). CS336 lecture 7.
    """
    reducer_class = FlatReducer
    every_backward = EveryBackward
    kept = ShardAverager.kept

    def __init__(self, module, group=None, compute_dtype=None, device=None):
        super().__init__()
        self.module, self.group = module, group_or_world(group)
        units = units_of(module)
        first_unit_of = {p: unit for unit, params in reversed(units) for p in params}  # a tied one lies with its first
        matrices = [p for p in module.parameters() if is_matrix(p)]
        vectors = [p for p in module.parameters() if not is_matrix(p)]
        self.flats = [FlatParameter(unit_params, self.group, True, compute_dtype, device)
                      for unit_params in make_buckets(matrices, math.inf, first_unit_of.get)]  # a whole unit each
        self.vectors = [FlatBucket(bucket_params, self.group, False, compute_dtype, device)
                        for bucket_params in make_buckets(vectors, math.inf)]
        self.reducers = [self.every_backward(self.flats, free_and_scatter, add_to_shard),
                         self.reducer_class(self.vectors, all_reduce_bucket, add_to_shard)]
        flats_of = {unit: list(dict.fromkeys(self.bucket_of[p] for p in params if is_matrix(p)))
                    for unit, params in units}
        self.prefetcher = Prefetcher(flats_of)

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
        """What an optimizer steps: this rank's shards of matrices, and whole vectors. (parameters() asks here.)"""
        return ((f"shard.{i}", flat.shard) for i, flat in enumerate(self.buckets))

    @torch.no_grad()
    def load(self, source):
        """Set every parameter to source(name), a whole tensor, of which this rank keeps its part."""
        for name, param in self.module.named_parameters():
            take_part(self.kept(param), param, source(name))
