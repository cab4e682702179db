"""ZeRO-3 for a model of your own: what if its parameters are read elsewhere, and have names?

    model = FSDP(module, group)
    optimizer = torch.optim.AdamW(model.parameters(), ...)    by name: model.named_parameters()
    loss.backward(); model.finish_grad_sync(); optimizer.step(); optimizer.zero_grad()

A FlatFSDP is made for a GPT: it steps flat shards, and uses each parameter in its unit's forward alone. This one does
what PyTorch's FSDP does with use_orig_params, and takes any module: docs/own-model.md.
"""

from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.utils._pytree import tree_map_only

import collectives as dist
from further.ddp import broadcast_in_one, refuse_new, refuse_unlike
from further.lend import Lender, LentParameter, nested_units
from further.prefetch import FlatFSDP
from further.zero import show_overflow_to_all
from parallel import (
    group_or_world, is_matrix, PlacedParameter, placement_of, take_part, whole_of, whole_shape)


class FSDP(FlatFSDP):
    """A FlatFSDP of any module, whose parameters keep their names: for groups by name, schedulers, and readers.

    Between steps, from finish_grad_sync to the next forward, the module's parameters are this rank's parts: vectors in
    the master dtype, maybe empty, each with a .grad alike. They may be frozen, unfrozen, written, or moved by p.data =
    ... From forward to finish_grad_sync the module has its whole parameters in their place. To read one outside of its
    unit's forward starts an all-gather, so all ranks must read it. ValueError where ranks have other models than the
    first one, whose values and buffers win. grad_scaler: as for ShardedOptimizer.
    """
    units_of = staticmethod(nested_units)
    flat_class = LentParameter
    prefetcher_class = Lender

    def __init__(self, module, group=None, compute_dtype=None, device=None, grad_scaler=True):
        named = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        refuse_unlike([*module.parameters(), *module.buffers()], group_or_world(group))
        broadcast_in_one([buffer for buffer in module.buffers() if not buffer.is_meta], group)
        owners = [(m, name, p) for m in module.modules() for name, p in m._parameters.items() if p is not None]
        saved_buffers = [name for name in module.state_dict() if name in buffers]
        super().__init__(module, group, compute_dtype, device)
        self.named, self.saved_buffers, self.owners = named, saved_buffers, owners
        self.compute_dtype, self.agrees = compute_dtype, grad_scaler
        self.prefetcher.expect = self.expect
        self.memory = {}  # parameter -> what of it lies in the shard
        self.parts = {}   # parameter -> that as a Parameter
        for p, bucket in self.bucket_of.items():
            shard, here, _ = bucket.kept(p)
            self.memory[p] = shard.detach()[here]
            self.parts[p] = PlacedParameter(self.memory[p], p.requires_grad)
            self.parts[p].placement = replace(shard.placement, decays=is_matrix(p))
        self.show_parts()

    def expect(self, flat):
        """A unit's backward begins, which computes all of its bucket, whatever the one before has left out."""
        missing = self.reducers[0].missing
        if flat in missing:
            missing[flat] = set(flat.params)

    @contextmanager
    def no_sync(self):
        of_matrices, of_vectors = self.reducers
        with of_matrices.no_sync(), of_vectors.no_sync():
            yield

    def show_parts(self, shown=True):
        self.shows_parts = shown
        for module, name, p in self.owners:
            module._parameters[name] = self.parts[p] if shown else p

    def forward(self, *args, **kwargs):
        between = self.shows_parts
        if between:
            self.take_up_changes()
            self.show_parts(False)
        if self.compute_dtype:
            args, kwargs = tree_map_only(
                torch.Tensor, lambda x: x.to(self.compute_dtype) if x.is_floating_point() else x, (args, kwargs))
        try:
            return super().forward(*args, **kwargs)
        finally:
            if between and not torch.is_grad_enabled():
                self.show_parts()

    @torch.no_grad()
    def take_up_changes(self):
        """Take up what somebody has done to the parts between steps: frozen them, or moved them by p.data = ..."""
        refuse_new(self.module, {*self.parts.values()})
        for p, part in self.parts.items():
            memory = self.memory[p]
            if part.data_ptr() != memory.data_ptr():
                part.data = memory.copy_(same_shape("a parameter's part", part, memory.shape))
            p.requires_grad_(part.requires_grad)

    @torch.no_grad()
    def finish_grad_sync(self):
        super().finish_grad_sync()
        for p, part in self.parts.items():
            shard, here, _ = self.bucket_of[p].kept(p)
            if p.requires_grad and shard.grad is not None:
                part.grad = shard.grad[here] if part.grad is None else part.grad + shard.grad[here]
            part.requires_grad_(p.requires_grad)
        for bucket in self.buckets:
            bucket.shard.grad = None  # so that the parts' are the only ones
        if self.agrees:
            show_overflow_to_all(self.parts.values(), self.group)
        self.show_parts()

    def zero_grad(self, set_to_none=True):
        super().zero_grad()
        for part in self.parts.values():
            part.grad = None

    def named_parameters(self, *args, **kwargs):
        """This rank's parts, at any time."""
        for name, p in self.module.named_parameters(*args, **kwargs):
            yield name, self.parts.get(p, p)

    def kept(self, param):
        """As a bucket's: what the optimizer steps for a parameter is its part."""
        _, _, there = self.bucket_of[param].kept(param)
        return self.parts[param], slice(None), there

    def state_dict(self, *args, **kwargs):
        raise RuntimeError("an FSDP keeps parts of its parameters: call full_state_dict() on all ranks")

    @torch.no_grad()
    def full_state_dict(self):
        """{name: whole tensor} on every rank: parameters, in the master dtype, and the first rank's buffers. Call it on
        all ranks."""
        whole = {}
        for name, param in self.named.items():
            part, *_ = kept = self.kept(param)
            whole[name] = whole_of(kept, param, placement_of(part).sharded_over)
        for name in self.saved_buffers:
            whole[name] = self.module.get_buffer(name).clone()
            dist.broadcast(whole[name], group=self.group, group_src=0)
        return whole

    @torch.no_grad()
    def load_state_dict(self, whole):
        """The inverse. RuntimeError where names lack or are unknown, or a shape is another."""
        if names := whole.keys() ^ {*self.named, *self.saved_buffers}:
            raise RuntimeError(f"the state has other names than the model: {min(names)} is in one of the two alone")
        self.load(whole.__getitem__)
        for name in self.saved_buffers:
            buffer = self.module.get_buffer(name)
            buffer.copy_(same_shape(name, whole[name], buffer.shape))

    @torch.no_grad()
    def load(self, source):
        for name, param in self.named.items():
            take_part(self.kept(param), param, same_shape(name, source(name), whole_shape(param)))


def same_shape(name, tensor, shape):
    if tensor.shape != shape:
        raise RuntimeError(f"size mismatch: {name} is {tuple(tensor.shape)}, and in the model {tuple(shape)}")
    return tensor
