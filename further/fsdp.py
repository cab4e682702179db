"""ZeRO-3 for a model of your own: what if its parameters are read elsewhere, and have names?

    model = FSDP(module, group)
    optimizer = torch.optim.AdamW(model.parameters(), ...)    by name: model.named_parameters()
    loss.backward(); model.finish_grad_sync(); optimizer.step(); optimizer.zero_grad()

A FlatFSDP is made for a GPT: it steps flat shards, and uses each parameter in its unit's forward alone. This one does
what PyTorch's FSDP does with use_orig_params, and takes any module: docs/own-model.md.
"""

from dataclasses import replace
from functools import partial

import torch
from torch.utils._pytree import tree_map_only

import collectives as dist
from further.channels import give_channels, hold_where_order_may_differ
from further.ddp import broadcast_in_one, refuse_new, refuse_other_order, refuse_unlike
from further.lend import Lender, LentParameter
from further.prefetch import FlatFSDP
from further.states import whole_of
from further.whole import take_part
from further.zero import show_overflow_to_all
from parallel import group_or_world, is_matrix, PlacedParameter, placement_of, whole_shape


class OfPart:
    """A vector that is this rank's part of a parameter, or of its gradient. A norm of it is no norm of the whole, and
    is refused: torch's clip_grad_norm_ would clip each rank's part by another factor."""
    NORMS = {"norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "_foreach_norm"}

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = function.__self__.__name__ if function.__name__ == "__get__" else function.__name__  # of an attribute
        if name in OfPart.NORMS:
            raise RuntimeError("an FSDP's rank has parts of parameters and gradients, and the norm of a part is not "
                               "that of the whole: parallel.clip_grad_norm_(model.parameters(), max_norm) clips "
                               "by the norm over all ranks, and returns it; with max_norm 0 it only returns it")
        with torch._C.DisableTorchFunctionSubclass():  # so that results are common tensors
            if name in ("dim", "ndim", "ndimension") and isinstance(args[0], Part):
                return len(args[0].placement.whole)
            return function(*args, **kwargs or {})


class Part(OfPart, PlacedParameter):
    """What the optimizer steps. It has as many dimensions as the whole parameter, for those who group by `dim()`; its
    shape is a vector's."""


class PartOfGradient(OfPart, torch.Tensor):
    """A part's .grad."""


class FSDP(FlatFSDP):
    """A FlatFSDP of any module, whose parameters keep their names: for groups by name, schedulers, and readers.

    Between steps, from finish_grad_sync to the next forward, the module's parameters are this rank's parts: vectors in
    the master dtype, maybe empty, each with a .grad alike, but with the whole's `dim()`. They may be frozen, unfrozen,
    written, or moved by p.data = ... Hooks on them, post-accumulate ones, too, run in finish_grad_sync. From forward to
    finish_grad_sync the module has its whole parameters in their place. To read one outside of its unit's forward
    starts an all-gather, so all ranks must read it. ValueError where ranks have other models than the first one, whose
    values and buffers win. grad_scaler: as for ShardedOptimizer.
    """
    flat_class = LentParameter
    prefetcher_class = Lender

    def __init__(self, module, group=None, compute_dtype=None, device=None, grad_scaler=True):
        named = dict(module.named_parameters(remove_duplicate=False))
        refuse_unlike([*module.parameters(), *module.buffers()], group_or_world(group))
        broadcast_in_one([buffer for buffer in module.buffers() if not buffer.is_meta], group)
        owners = [(m, name, p) for m in module.modules() for name, p in m._parameters.items() if p is not None]
        super().__init__(module, group, compute_dtype, device)
        give_channels(self.buckets)
        hold_where_order_may_differ(self.reducers[1], False)  # vectors' gradients are few
        self.named, self.owners = named, owners
        self.compute_dtype, self.agrees = compute_dtype, grad_scaler
        self.prefetcher.expect = self.expect
        for i, flat in enumerate(self.flats):
            flat.note_gather = partial(self.reducers[0].started.append, f"gather {i}")
        self.memory = {}  # parameter -> what of it lies in the shard
        self.parts = {}   # parameter -> that as a Parameter
        for p, bucket in self.bucket_of.items():
            shard, here, _ = bucket.kept(p)
            self.memory[p] = shard.detach()[here]
            self.parts[p] = Part(self.memory[p], p.requires_grad)
            self.parts[p].placement = replace(shard.placement, decays=is_matrix(p), whole=whole_shape(p))
        self.trained = {p: p.requires_grad for p in self.parts}
        # torch.compile may trace the model's forward, and no vector with a matrix's dim().
        self.take_up_changes = torch.compiler.disable(self.take_up_changes)
        self.show_parts = torch.compiler.disable(self.show_parts)
        self.show_parts()

    def expect(self, flat):
        """A unit's backward begins, which computes all of its bucket, whatever the one before has left out."""
        missing = self.reducers[0].missing
        if flat in missing:
            missing[flat] = set(flat.params)

    def show_parts(self, shown=True):
        self.shows_parts = shown
        for module, name, p in self.owners:
            module._parameters[name] = self.parts[p] if shown else p

    def forward(self, *args, **kwargs):
        between = self.shows_parts
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
        """Take up what somebody has done to the parts: frozen them, or moved them by p.data = ..."""
        refuse_new(self.module, {*self.parts, *self.parts.values()})
        for p, part in self.parts.items():
            memory = self.memory[p]
            if (part.dtype, part.device) != (memory.dtype, memory.device):
                raise RuntimeError(f"a parameter is now {part.dtype} on {part.device}, and was {memory.dtype} on "
                                   f"{memory.device}: cast or move a module before it is wrapped")
            if part.data_ptr() != memory.data_ptr():
                part.data = memory.copy_(same_shape("a parameter's part", part, memory.shape))
        self.take_up_frozen()

    def take_up_frozen(self):
        """Of a parameter and its part somebody has frozen or unfrozen the one that he saw: the other follows."""
        for p, part in self.parts.items():
            if part.requires_grad != self.trained[p]:
                p.requires_grad_(part.requires_grad)
            self.trained[p] = p.requires_grad
            part.requires_grad_(p.requires_grad)

    @torch.no_grad()
    def finish_grad_sync(self):
        refuse_other_order(self.reducers[0], self.group)
        self.take_up_frozen()
        super().finish_grad_sync()
        for p, part in self.parts.items():
            shard, here, _ = self.bucket_of[p].kept(p)
            if p.requires_grad and shard.grad is not None:
                new = shard.grad[here].as_subclass(PartOfGradient)
                for hook in (part._backward_hooks or {}).values():
                    changed = hook(new)
                    new = new if changed is None else changed.as_subclass(PartOfGradient)
                part.grad = new if part.grad is None else (part.grad + new).as_subclass(PartOfGradient)
        for bucket in self.buckets:
            bucket.shard.grad = None  # so that the parts' are the only ones
        if self.agrees:
            show_overflow_to_all(self.parts.values(), self.group)
        self.show_parts()
        for part in self.parts.values():
            if part.grad is not None:
                for hook in (part._post_accumulate_grad_hooks or {}).values():
                    hook(part)

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

    def __deepcopy__(self, memo):
        raise RuntimeError("an FSDP is not copied, because it keeps parts of its parameters: copy a module before it "
                           "is wrapped, or set another FSDP's weights with load_state_dict(model.full_state_dict())")

    def saved_buffers(self):
        """Names of the buffers that a state has; forward may have made some."""
        return [f"{prefix}.{name}".lstrip(".") for prefix, m in self.module.named_modules(remove_duplicate=False)
                for name, buffer in m._buffers.items()
                if buffer is not None and name not in m._non_persistent_buffers_set]

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
        for name in self.saved_buffers():
            whole[name] = self.module.get_buffer(name).clone()
            dist.broadcast(whole[name], group=self.group, group_src=0)
        return whole

    @torch.no_grad()
    def load_state_dict(self, whole):
        """The inverse. RuntimeError where names lack or are unknown, or a shape is another."""
        if names := whole.keys() ^ {*self.named, *self.saved_buffers()}:
            raise RuntimeError(f"the state has other names than the model: {min(names)} is in one of the two alone")
        self.load(whole.__getitem__)
        for name in self.saved_buffers():
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
