"""Optimizer states of shards made whole, so that training goes on with any number of ranks.

    whole = full_optimizer_state(optimizer)               of a ShardedOptimizer, further/zero.py's
    whole = full_optimizer_state(model, optimizer)        of an FSDP, further/fsdp.py's, and PyTorch's optimizer
    load_optimizer_state(optimizer, whole)                after the module has its weights
    load_optimizer_state(model, whole, optimizer)         (parameters may be cut by tensor parallelism before)

`whole` is {parameter's name: {key: whole tensor}} on every rank. Where the optimizer got no names, the parameters'
numbers stand for them. Of 16-bit weights the float32 master is a state, too. Call both on all ranks.
"""

from collections import defaultdict

import torch

import parallel
from further.flat import cast_masters
from further.whole import part_here, put_together, take_part


def whole_of(kept, param, groups):
    """A parameter's whole tensor, on all ranks of the groups over which it is cut. kept: as further/whole.py has it."""
    return put_together(parallel.whole_shape(param), *part_here(kept, param), groups)


@torch.no_grad()
def full_optimizer_state(sharded, optimizer=None):
    """{name: {key: whole tensor}}: what an optimizer of shards keeps of each parameter."""
    optimizer = optimizer or sharded.inner
    whole = {}
    for name, param in sharded.named.items():
        stepped, *where = sharded.kept(param)
        groups = parallel.placement_of(stepped).sharded_over
        state = dict(optimizer.state.get(stepped, {}))
        if stepped.dtype != param.dtype:
            state["master"] = stepped.detach()
        whole[name] = {key: whole_of((value, *where), param, groups)
                       if value.shape == stepped.shape else value.clone()  # a number, such as its steps
                       for key, value in state.items()}
    return whole


@torch.no_grad()
def load_optimizer_state(sharded, whole, optimizer=None):
    """The inverse: the optimizer keeps this rank's part. ValueError for an unknown name, or a tensor of another shape
    than its parameter's."""
    if optimizer:
        load_parts(sharded, whole, optimizer)
        return
    numbers = {param: {key: value.item() for key, value in whole.get(name, {}).items() if not value.dim()}
               for name, param in sharded.named.items()}
    for bucket in sharded.buckets:
        bucket.take_up_writes()
        unlike = [p for p in bucket.params if p.dim() and numbers[p] != numbers[bucket.params[0]]]
        if unlike and not bucket.parts:
            sharded.split(bucket)
    load_parts(sharded, whole, sharded.inner)
    cast_masters(sharded.buckets)
    sharded.gather_weights(sharded.buckets)
    sharded.note_step(sharded.buckets)


def load_parts(sharded, whole, optimizer):
    """Let the optimizer keep this rank's part of each whole tensor."""
    if unknown := whole.keys() - sharded.named.keys():
        raise ValueError(f"the state is of another model: no parameter is called {min(unknown, key=str)}")
    of_elements = {key for state in whole.values() for key, value in state.items() if value.dim()}
    states = defaultdict(dict)
    for name, param in sharded.named.items():
        stepped, *where = sharded.kept(param)
        for key, value in whole.get(name, {}).items():
            if key not in of_elements:
                states[stepped][key] = value.clone()
                continue
            if value.shape != parallel.whole_shape(param):
                raise ValueError(f"{key} of {name} is {tuple(value.shape)}, the parameter "
                                 f"{tuple(parallel.whole_shape(param))}")
            room = stepped if key == "master" else states[stepped].setdefault(key, torch.zeros_like(stepped))
            take_part((room, *where), param, value)
    order = [p for group in optimizer.param_groups for p in group["params"]]  # PyTorch numbers them so
    state = {i: states[p] for i, p in enumerate(order) if p in states}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
