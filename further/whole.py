"""Whole tensors from cut ones, and back: how can any layout go on from a checkpoint of any other?

Checkpoints hold whole tensors. A rank's part of a whole tensor is what parallel.py's `cut_like` returns. With ZeRO the
rank keeps a shard of that part, and the optimizer's `kept` says which. Back: every rank puts what it has where it
belongs, and `put_together` merges them. One tensor at a time is whole. (Large models' trainers write shards.)

    torchrun --nproc_per_node 2 train.py --plain --tp 2 --out runs/plain
"""

import math

import torch

import collectives as dist
from parallel import cut_like, master_dtype, placement_of, whole_shape


# kept: as parallel.ZeRO0.kept returns it, or with an optimizer's state in place of what is stepped.

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


# ---------------------------------------------------------------------------------------- a Parallel of your own pieces

MOMENTS = "exp_avg", "exp_avg_sq"  # what AdamW keeps of each parameter


def whole_state(net, keys=MOMENTS):
    """{"weights": {name: whole tensor}, and as much for each of the optimizer's `keys`} of a parallel.Parallel, on all
    ranks. Call it on all ranks. What the optimizer has not kept yet is zeros."""
    held = {param: (name, *net.kept(param)) for param, name in net.named_parameters().items()}
    state = {}
    for key in ("weights", *keys):
        state[key] = {}
        for name, shape in net.shapes.items():
            here, values, groups = slice(0), torch.empty(0, dtype=master_dtype(net.dtype), device=net.device), []
            for param in [param for param in held if held[param][0] == name]:
                _, stepped, *where = held[param]
                kept = net.optimizer.state[stepped] if net.optimizer and stepped in net.optimizer.state else {}
                tensor = stepped if key == "weights" else kept.get(key, torch.zeros_like(stepped))
                here, values = part_here((tensor, *where), param)
                groups = [group for group in placement_of(stepped).sharded_over if group != net.groups.pp]
            state[key][name] = put_together(shape, here, values, [*groups, net.groups.pp])
    return state


@torch.no_grad()
def take_state(net, state, steps, keys=MOMENTS):
    """Let each rank take its part of what `whole_state` has returned, in any layout, after so many optimizer steps."""
    for param, name in net.named_parameters().items():
        stepped, *where = net.kept(param)
        take_part((stepped.detach(), *where), param, state["weights"][name].to(net.device))
        if net.optimizer and param.requires_grad and stepped.numel():
            kept = {key: torch.zeros_like(stepped) for key in keys}
            for key, tensor in kept.items():
                take_part((tensor, *where), param, state[key][name].to(net.device))
            net.optimizer.state[stepped] = {"step": torch.tensor(float(steps)), **kept}
    for unit in net.units:
        unit.refresh()
