"""Activations that backward computes again instead of keeping: of MLPs and norms, of attention, or of blocks.

    block      x is kept, all else of a block is computed again: a third more FLOPs
    attention  q, k, v, what attention gave, and the sequence's (T, T) scores where a kernel keeps them
    mlp        what an MLP has inside, and the outputs of both norms. Attention, which costs T^2, runs once

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016); Korthikanti et al. (2022) for parts of a block.
"""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint


def recompute(model, part, blocks=0):
    """Let backward compute `part` of a GPT's first `blocks` blocks again, or of all, where that is 0."""
    for block in [*model.h.values()][:blocks or None]:
        layer = {"mlp": block.mlp, "attention": block.attn, "block": block}[part]
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        if part == "mlp":
            block.forward = partial(without_norms, block)


def without_norms(block, x):
    """Block.forward, which keeps no output of a norm: (B, T, C) -> (B, T, C). Of every block 4 B T C bytes fewer in
    16 bits."""
    y = block.ln_1(x)
    x = x + forgotten(y, block.attn(y), partial(block.ln_1, x))
    y = block.ln_2(x)
    return x + forgotten(y, block.mlp(y), partial(block.ln_2, x))


def forgotten(y, out, again):
    """`out`, whose graph has saved y, and until its backward y has no memory. Then again() gives the values.

    The tensor stays, because autograd holds it, and its storage goes. (`checkpoint` would also run the product that
    takes y a second time.) Megatron-Core does so, too, and calls the output discarded.
    """
    if not out.requires_grad:
        return out
    storage = y.untyped_storage()
    size = storage.nbytes()

    @torch.no_grad()
    def fill(grad):
        storage.resize_(size)
        y.data.copy_(again())  # .data: autograd would take y for changed since it was saved

    out.register_hook(fill)
    storage.resize_(0)
    return out
