"""Whole tensors from cut ones, and back: how can any layout go on from a checkpoint of any other?

Checkpoints hold whole tensors. A rank's part of a whole tensor is what parallel.py's `cut_like` returns. With ZeRO the
rank keeps a shard of that part, and the optimizer's `kept` says which. Back: every rank puts what it has where it
belongs, and `put_together` merges them. One tensor at a time is whole. (Large models' trainers write shards.)

    torchrun --nproc_per_node 2 train.py --plain --tp 2 --out runs/plain
"""

import math

import torch

import collectives as dist
from parallel import cut_like, whole_shape


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
