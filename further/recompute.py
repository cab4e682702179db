"""Activations that backward computes again instead of keeping: what --recompute names.

    block  a block keeps its x alone, and runs again: a third more FLOPs
    mlp    drops what an MLP has inside, and both norms' outputs. Attention, which costs T^2, runs once

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); Korthikanti et al. (2022) for parts of a block.
"""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from model import MLP


def recompute(model, part, blocks=0, before=0):
    """Let backward compute `part` of a stage's first `blocks` blocks again, or of all, where that is 0. With "mlp" the
    other blocks drop both norms' outputs and the activation function's, so no product of theirs runs again. model: a
    GPT, the stage or what comes in it behind `before` blocks."""
    for number, block in enumerate(model.h.values(), before):
        again = not blocks or number < blocks
        if part == "mlp":
            block.forward = partial(without_norms, block)
        if again:
            layer = {"mlp": block.mlp, "block": block}[part]
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        elif part == "mlp" and isinstance(block.mlp, MLP):
            block.mlp.forward = partial(without_activation, block.mlp)


def without_norms(block, x, **beside):
    """Block.forward, which keeps no output of a norm: (B, T, C) -> (B, T, C)."""
    y = block.ln_1(x)
    x = x + forgotten(y, block.attn(y, **beside), partial(block.ln_1, x))
    y = block.ln_2(x)
    return x + forgotten(y, block.mlp(y), partial(block.ln_2, x))


def without_activation(mlp, x):
    """MLP.forward, which keeps what the activation function takes, and not what it gives: (B, T, C) -> (B, T, C)."""
    a = mlp.c_fc(x)
    h = mlp.activation(a)
    return forgotten(h, mlp.c_proj(h), partial(mlp.activation, a))


def forgotten(y, out, again):
    """`out`, whose graph has saved y, and until its backward y has no memory. Then again() gives the values.

    The tensor stays, because autograd holds it, and its storage goes. (`checkpoint` would also run the product that
    takes y a second time.) Megatron-Core does so, too, and calls the output discarded.
    """
    if not out.requires_grad:
        return out
    size = y.untyped_storage().nbytes()
    held = [(y, again)]

    @torch.no_grad()
    def fill(grad):
        if not held:  # a W after its I: y is there
            return
        y, again = held.pop()  # because this function lives as long as the graph, and y should go with who saved it
        y.untyped_storage().resize_(size)
        y.data.copy_(again())  # .data: autograd would take y for changed since it was saved

    out.register_hook(fill)
    y.untyped_storage().resize_(0)
    return out
