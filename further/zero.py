"""ZeRO-1 and 2 for a model of your own: who freezes layers, or writes into parameters, between steps?

    optimizer = ShardedOptimizer(net.named_parameters(), torch.optim.AdamW, lr=1e-3)

A FlatOptimizer is made for a GPT, whose parameters are trained all the time, and written by nobody else. This one
does what PyTorch's optimizers do: docs/own-model.md has a program.
"""

import math

import torch
from torch import nn
from torch.autograd.graph import increment_version

import collectives as dist
from further.channels import give_channels, hold_where_order_may_differ
from further.ddp import refuse_other_order, refuse_unlike
from further.flat import FlatBucket, FlatOptimizer, point_into
from parallel import group_or_world


class WatchedBucket(FlatBucket):
    """A FlatBucket that sees what is done to its parameters between steps.

    parts: {parameter: the part of the shard that an optimizer steps by itself}, once some parameters are frozen.
    """

    def __init__(self, *options):
        super().__init__(*options)
        self.parts = {}
        self.note_weights()

    def note_weights(self):
        """Note where each parameter lies, and its version, which grows whenever somebody writes into it."""
        self.noted = [(p.data_ptr(), p._version) for p in self.params]

    @torch.no_grad()
    def take_up_writes(self):
        """Take up what somebody has done to the parameters since `note_weights`: load_state_dict wrote into them, or
        p.data = ... or to(memory_format) has moved them away from `weights`. The shard follows; where a 16-bit weight
        has not changed, its float32 master stays. ValueError for another dtype, shape or device."""
        for p, noted in zip(self.params, self.noted):
            if (p.data_ptr(), p._version) == noted:
                continue
            view = self.view(self.weights, p)
            if (p.shape, p.dtype, p.device) != (view.shape, view.dtype, view.device):
                raise ValueError(f"a parameter is now {tuple(p.shape)} {p.dtype} on {p.device}, and was "
                                 f"{tuple(view.shape)} {view.dtype} on {view.device}: change a module before its "
                                 "optimizer is made")
            point_into(p, view.copy_(p))
            shard, here, there = super().kept(p)
            new, master = view.reshape(-1)[there], shard[here]
            master.copy_(torch.where(new == master.to(new.dtype), master, new))
        self.note_weights()

    def kept(self, param):
        shard, here, there = super().kept(param)
        return (self.parts[param], slice(None), there) if param in self.parts else (shard, here, there)

    def split(self, inner):
        """Let an optimizer step the parts of the shard one by one, each with its own state, because it must leave out
        those of frozen parameters."""
        state = inner.state.pop(self.shard, {})
        for param in self.params:
            shard, here, _ = super().kept(param)
            part = self.parts[param] = nn.Parameter(shard.detach()[here], param.requires_grad)
            part.placement = shard.placement
            if state:
                inner.state[part] = {key: (value[here] if value.shape == shard.shape else value).clone()
                                     for key, value in state.items()}
        for group in inner.param_groups:
            if any(p is self.shard for p in group["params"]):
                group["params"] = [p for p in group["params"] if p is not self.shard] + [*self.parts.values()]

    def grads_of_parts(self):
        """Give each part its part of the shard's gradient, and a frozen one none."""
        for param, part in self.parts.items():
            _, here, _ = super().kept(param)
            grad = self.shard.grad if param.requires_grad else None
            part.grad = None if grad is None else grad[here]


@torch.no_grad()
def show_overflow_to_all(shards, group):
    """Where a rank's shards have gradients that are not finite, one of every other rank's becomes NaN, too. All ranks
    add up 0 x their largest gradient. 0 x inf and 0 x NaN are NaN, and so is the sum; else it is 0."""
    grads = [shard.grad.detach() for shard in shards if shard.grad is not None and shard.grad.numel()]
    nothing = (0 * torch.nn.utils.get_total_norm(grads, math.inf)).to(dist.link_of(group).device, torch.float32)
    dist.all_reduce(nothing, group=group)
    for grad in grads[:1]:
        grad[:1] += nothing


# Optimizers whose update of an element depends on others of its tensor.
WHOLE_TENSORS = torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon, torch.optim.SparseAdam


class ShardedOptimizer(FlatOptimizer):
    """A FlatOptimizer of any module's parameters, with names or without.

    Between steps they may be frozen and unfrozen, on all ranks alike, and written, by load_state_dict or p.data = ...;
    in 16 bits p.data.copy_ goes unseen. optimizer_class: its step takes no closure; ValueError for one that looks at
    whole tensors. grad_scaler: let all ranks see what is not finite, a number more a step, so that
    torch.amp.GradScaler decides alike. all_used: as for DDP. ValueError, too, where ranks have other parameters than
    the first one.

    named: {name: parameter}; where `params` have no names, their numbers stand for them. (further/states.py asks.)
    """
    bucket_class = WatchedBucket

    def __init__(self, params, optimizer_class, group=None, stage=1, bucket_mb=None, compute_dtype=None,
                 grad_scaler=True, all_used=False, **kwargs):
        one_process = optimizer_class(params, **kwargs)
        if isinstance(one_process, WHOLE_TENSORS) or hasattr(one_process, "new_bucket"):
            raise ValueError(f"{type(one_process).__name__} looks at whole tensors, and a shard has parts of them: use "
                             "DDP, or an optimizer that works element by element")
        param_groups = one_process.param_groups
        names = [name for g in param_groups for name in g.pop("param_names", [None] * len(g["params"]))]
        params = [p for g in param_groups for p in g["params"]]
        self.named = {i if name is None else name: p for i, (name, p) in enumerate(zip(names, params))}
        refuse_unlike(params, group_or_world(group))
        super().__init__(param_groups, optimizer_class, group, stage, bucket_mb, compute_dtype, **kwargs)
        give_channels(self.buckets)
        if stage < 2:
            hold_where_order_may_differ(self.reducers[0], all_used)
        self.agrees = grad_scaler and stage > 0

    def finish_grad_sync(self):
        if self.stage == 2:
            refuse_other_order(self.reducers[0], self.group)
        super().finish_grad_sync()
        if self.agrees:
            show_overflow_to_all(self.shards, self.group)
        for bucket in self.buckets:
            if len({p.requires_grad for p in bucket.params}) == 2 and not bucket.parts:
                self.split(bucket)
            bucket.grads_of_parts()

    def split(self, bucket):
        bucket.split(self.inner)

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        for bucket in self.buckets:
            if bucket.parts and set_to_none:
                bucket.shard.grad = None

    @torch.no_grad()
    def step(self):
        for bucket in self.buckets:
            bucket.take_up_writes()
        super().step()
        self.note_step([bucket for bucket in self.buckets if bucket.shard.grad is not None])

    def note_step(self, changed):
        for bucket in changed:
            increment_version(bucket.params)  # so that a backward through the old weights is refused
            bucket.note_weights()
