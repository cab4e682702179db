"""Sequence parallelism: between sublayers each tensor-parallel rank keeps 1/N of the tokens, in place of all.

    torchrun --nproc_per_node 2 train.py --plain --tp 2 --sp
"""

import torch
from torch.autograd.function import once_differentiable

import collectives as dist
from parallel import placement_of, set_placement, tensor_parallel


# ------------------------------------------------------------------------------ sequence parallel: f and g over tokens
#
# Between g and the next f every rank of the group keeps, norms and adds up the same (B, T, C). Cut over T, each does so
# for its own (B, T/N, C), and the two all-reduces are taken apart:
#
#     ... + ─ norm ─ f ─ A ─ GeLU ─ B ─ g ─ + ─ norm ─ f ...      f: forward all-gather, backward reduce-scatter
#      T/N tokens    │     T tokens     │    T/N tokens           g: forward reduce-scatter, backward all-gather
#
# That sends as many bytes as before, and each rank keeps an Nth of what lies outside of the products. A's layer keeps
# the T tokens that f has gathered, because dA = X^T dY needs them. A parameter that sees T/N tokens alone (of a norm, a
# bias added after g, positions) has a part of its gradient: the group must add the parts up, which its placement says.
# Korthikanti et al., "Reducing Activation Recomputation" (2022), who call this pair g and g with a bar, and gather X
# again in backward, to keep T/N tokens of it, too. CS336 lecture 7, sequence parallelism.

def gather_tokens(x, group):
    """(B, T/N, C) of each rank -> (B, T, C)."""
    whole = x.new_empty(dist.get_world_size(group), *x.shape)                                 # (N, B, T/N, C)
    dist.all_gather_into_tensor(whole, x.contiguous(), group)
    return whole.transpose(0, 1).flatten(1, 2)


def scatter_tokens(x, group):
    """(B, T, C) of each rank, a term of a sum -> (B, T/N, C), this rank's tokens of the sum."""
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1).contiguous()     # (N, B, T/N, C)
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(mine, parts, group=group)
    return mine


class Conjugate(torch.autograd.Function):
    """A collective and its conjugate: forward is there(x, group), backward back(gradient, group)."""

    @staticmethod
    def forward(ctx, x, group, there, back):
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.back(grad, ctx.group), None, None, None


def gathered(x, group):
    """f: (B, T/N, C) -> (B, T, C). Backward adds gradients up, because each token went into every rank's columns."""
    return Conjugate.apply(x, group, gather_tokens, scatter_tokens)


def scattered(x, group):
    """g: each rank's term of a sum, (B, T, C) -> its tokens of the sum, (B, T/N, C)."""
    return Conjugate.apply(x, group, scatter_tokens, gather_tokens)


def sequence_parallel(module, group, plan):
    """Tensor parallelism of a GPT whose tokens are cut between its sublayers, in place. plan: as `gpt2_plan`, with
    `gathered` for f and `scattered` for g. N must divide T."""
    tensor_parallel(module, group, plan)
    for param in module.parameters():
        before = placement_of(param)
        if all(cut.group != group for cut in before.cuts) and group not in before.partial_over:
            set_placement(param, partial_over=before.partial_over + (group,))
    positions = module.positions  # context parallelism may have cut the sequence before
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    module.positions = lambda all_positions: positions(all_positions).chunk(ranks)[rank]
