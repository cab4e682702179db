"""Whole tensors from cut ones, and back: how can any layout go on from a checkpoint of any other?

Checkpoints hold whole tensors. A rank's part of a whole tensor is what parallel.py's `cut_like` returns. With ZeRO the
rank keeps a shard of that part, and `kept` says which. Back: every rank puts what it has where it belongs, and
`put_together` merges them. One tensor at a time is whole. (Large models' trainers write shards.)

    torchrun --nproc_per_node 2 train.py --plain --tp 2 --out runs/plain
"""

import math

import torch

import collectives as dist
from parallel import cut_like, master_dtype, placement_of, whole_shape

MOMENTS = "exp_avg", "exp_avg_sq"  # what AdamW keeps of each parameter


# kept: as parallel.Unit.kept returns it, or with an optimizer's state in place of what is stepped.

def take_part(kept, param, whole):
    """Copy this rank's part of a whole tensor to where it keeps that. RuntimeError for one of another shape."""
    stepped, here, there = kept
    if whole.shape != whole_shape(param):
        raise RuntimeError(f"size mismatch: {tuple(whole.shape)} for a parameter of {tuple(whole_shape(param))}")
    stepped.view(-1)[here] = cut_like(param, whole).reshape(-1)[there].to(stepped)


def part_here(kept, param):
    """(which elements of the whole tensor this rank has, their values), as `put_together` takes them."""
    stepped, here, there = kept
    shape = whole_shape(param)
    numbers = torch.arange(math.prod(shape), device=stepped.device).view(shape)  # cut like the tensor, they say which
    return cut_like(param, numbers).reshape(-1)[there], stepped.detach().reshape(-1)[here]


def put_together(shape, here, values, groups):
    """The whole tensor, of `shape`, on all ranks of the groups, each of which has some of its values. here: where these
    lie in the flat tensor, a slice or numbers. Four numbers on two ranks:

        rank 0    5  6  0  0        rank 1    0  0  7  8        both    5  6  7  8

    Of each byte the largest is taken: ranks that have a value have the same one, and the others 0, whatever the dtype.
    (A sum would double what two ranks have.) An all-gather would send half as much, but would have to know who has
    what.
    """
    whole = values.new_zeros(math.prod(shape))
    whole[here] = values
    for group in groups:
        dist.all_reduce(whole.view(torch.uint8), dist.ReduceOp.MAX, group)
    return whole.view(shape)


def whole_tensor(net, name, shape, key=None):
    """A parameter of a parallel.Parallel as one process would hold it, in the master dtype; with `key`, what the
    optimizer keeps of it (zeros before its first step); or a buffer, float32. Call it on all ranks."""
    dtype = master_dtype(net.dtype)
    here, values, groups = slice(0), torch.empty(0, device=net.device), []  # of a rank that has nothing of it
    for param in [param for param, own in net.named_parameters().items() if own == name]:
        stepped, *where = net.kept(param)
        kept = net.optimizer.state[stepped] if net.optimizer and stepped in net.optimizer.state else {}
        tensor = stepped if key is None else kept.get(key, torch.zeros_like(stepped))
        here, values = part_here((tensor, *where), param)
        groups = [group for group in placement_of(stepped).sharded_over if group != net.groups.pp]
    return put_together(shape, here, values.to(dtype), [*groups, net.groups.pp])  # another stage's ranks know pp alone


@torch.no_grad()
def load_state(net, key, source):
    """Let a Parallel's optimizer keep under `key` this rank's part of source(name), a tensor of each parameter's
    shape."""
    for param, name in net.named_parameters().items():
        stepped, *where = net.kept(param)
        if param.requires_grad and stepped.numel():
            state = net.optimizer.state[stepped].setdefault(key, torch.zeros_like(stepped))
            take_part((state, *where), param, source(name))


def set_updates(net, updates):
    """How many updates an optimizer takes itself to have made."""
    for group in net.optimizer.param_groups:
        for param in group["params"]:
            net.optimizer.state[param]["step"] = torch.tensor(float(updates), device="cpu")


# ---------------------------------------------------------------------------------------- a Parallel of your own pieces

def whole_state(net, keys=MOMENTS):
    """{"weights": {name: whole tensor}, and as much for each of the optimizer's `keys`} of a parallel.Parallel, on all
    ranks. Call it on all ranks. What the optimizer has not kept yet is zeros."""
    return {key: {name: whole_tensor(net, name, shape, None if key == "weights" else key)
                  for name, shape in net.shapes.items()} for key in ("weights", *keys)}


@torch.no_grad()
def take_state(net, state, steps, keys=MOMENTS):
    """Let each rank take its part of what `whole_state` has returned, in any layout, after so many optimizer steps."""
    for param, name in net.named_parameters().items():
        stepped, *where = net.kept(param)
        take_part((stepped.detach(), *where), param, state["weights"][name].to(net.device))
    if net.optimizer:
        for key in keys:
            load_state(net, key, lambda name, key=key: state[key][name].to(net.device))
        set_updates(net, steps)
    for unit in net.units:
        unit.refresh()
