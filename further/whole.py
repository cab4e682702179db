"""Whole tensors from cut ones, and back: how can any layout go on from a checkpoint of any other?

Checkpoints hold whole tensors. A rank's part of a whole tensor is what parallel.py's `cut_like` returns. With ZeRO the
rank keeps a shard of that part, and `kept` says which. Back: every rank puts what it has where it belongs, zeros stand
everywhere else, and of each byte all take the largest. Four numbers on two ranks:

    rank 0    5  6  0  0        rank 1    0  0  7  8        both    5  6  7  8

Ranks that have a value have the same one, so this is right whatever the dtype. (A sum would double what two ranks have.
An all-gather would send half as much, but would have to know who has what.) One tensor at a time is whole. (Large
models' trainers write shards.)

    torchrun --nproc_per_node 2 train.py --plain --tp 2 --out runs/plain
"""

import math

import torch

import collectives as dist
from parallel import cut_like, master_dtype, placement_of, whole_shape

MOMENTS = "exp_avg", "exp_avg_sq"  # what AdamW keeps of each parameter


# there: which numbers of the parameter, flat, a rank keeps, as parallel.Unit.kept says it.

def take_part(kept, there, param, whole):
    """Copy this rank's part of a whole tensor to where it keeps that. RuntimeError for one of another shape."""
    if whole.shape != whole_shape(param):
        raise RuntimeError(f"size mismatch: {tuple(whole.shape)} for a parameter of {tuple(whole_shape(param))}")
    kept.view(-1).copy_(cut_like(param, whole).reshape(-1)[there])


def put_part(kept, there, param, whole):
    """Copy what this rank keeps to where it belongs in a whole tensor, which is flat."""
    numbers = torch.arange(len(whole), device=whole.device).view(whole_shape(param))
    whole[cut_like(param, numbers).reshape(-1)[there]] = kept.reshape(-1).to(whole.dtype)  # cut alike, they say where


@torch.no_grad()
def whole_tensor(net, name, shape, key=None):
    """A parameter of a parallel.Parallel as one process would hold it, in the master dtype; with `key`, what the
    optimizer keeps of it (zeros before its first step); or a buffer. Call it on all ranks."""
    whole = torch.zeros(math.prod(shape), dtype=master_dtype(net.dtype), device=net.device)
    groups = []  # of a rank that has nothing of it
    for param in [param for param, own in net.named_parameters().items() if own == name]:
        stepped, there = net.kept(param)
        state = net.optimizer.state.get(stepped, {}) if net.optimizer else {}
        kept = stepped if key is None else state.get(key)
        if kept is not None:
            put_part(kept, there, param, whole)
        groups = [group for group in placement_of(stepped).sharded_over if group != net.groups.pp]
    for buffer in [buffer for piece in net.pieces.values() for own, buffer in piece.named_buffers() if own == name]:
        whole.copy_(buffer.view(-1))
    for group in [*groups, net.groups.pp]:  # another stage's ranks know pp alone
        dist.all_reduce(whole.view(torch.uint8), dist.ReduceOp.MAX, group)
    return whole.view(shape)


@torch.no_grad()
def load_state(net, key, source):
    """Let a Parallel's optimizer keep under `key` this rank's part of source(name), a tensor of each parameter's
    shape."""
    for param, name in net.named_parameters().items():
        stepped, there = net.kept(param)
        if param.requires_grad and stepped.numel():
            state = net.optimizer.state[stepped].setdefault(key, torch.zeros_like(stepped))
            take_part(state, there, param, source(name))


def set_updates(net, updates):
    """How many updates an optimizer takes itself to have made."""
    for group in net.optimizer.param_groups:
        for param in group["params"]:
            net.optimizer.state[param]["step"] = torch.tensor(float(updates), device="cpu")


# ---------------------------------------------------------------------------------------- a Parallel of your own pieces

def whole_state(net):
    """{"weights": {name: whole tensor}, and as much for each of MOMENTS} of a parallel.Parallel, on all ranks; buffers
    are not in it. Call it on all ranks. What the optimizer has not kept is zeros. ValueError if pieces of the model are
    None, because their names are on other ranks, or if the optimizer keeps something else."""
    if not net.shapes:
        raise ValueError("some pieces are None: give Parallel all of them, on each rank, to make its state whole")
    refuse_other_states(net)
    return {key: {name: whole_tensor(net, name, shape, None if key == "weights" else key)
                  for name, shape in net.shapes.items()} for key in ("weights", *MOMENTS)}


def refuse_other_states(net):
    """ValueError unless the optimizer keeps nothing but MOMENTS."""
    optimizer = net.optimizer
    if not optimizer:
        return
    keeps_more = optimizer.defaults.get("amsgrad") or optimizer.defaults.get("momentum")
    if keeps_more or not isinstance(optimizer, (torch.optim.AdamW, torch.optim.SGD)):
        raise ValueError(f"{type(optimizer).__name__}'s state is not known: AdamW's is, and SGD's without momentum")


@torch.no_grad()
def take_state(net, state, steps):
    """Let each rank take its part of what `whole_state` has returned, in any layout, after so many optimizer steps."""
    refuse_other_states(net)
    if net.shapes and {*net.shapes} != {*state["weights"]}:
        other = ", ".join(sorted({*net.shapes} ^ {*state["weights"]})[:3])
        raise ValueError(f"the state is another model's: one of them alone has {other}")
    for param, name in net.named_parameters().items():
        take_part(*net.kept(param), param, state["weights"][name].to(net.device))
    if net.optimizer:
        for key in MOMENTS:
            load_state(net, key, lambda name, key=key: state[key][name].to(net.device))
        set_updates(net, steps)
    for unit in net.units:
        unit.refresh()
