"""Head and loss in chunks of tokens: what if the logits of all of them do not fit?

    python train.py --plain --loss-chunk 256

16,384 tokens of a vocabulary of 151,936 are 4.6 GiB of logits in bf16. Here at most `chunk` rows of them exist on any
rank. A chunk's gradients are computed in forward, as soon as its loss is there, so its logits can be dropped:

              logits z (chunk, V)      dz, over z      dx = dz W, kept        dW += dz^T x, kept
    chunk 0   compute                  compute         rows 0 to chunk-1      first term
    chunk 1   over those of chunk 0    ...             the next rows          second term

Backward multiplies what is kept by the gradient of the loss. So no product runs twice: to compute the logits again in
backward would be one more of 2 BTCV FLOPs, in place of three four. The costs: dW, V C numbers in the master dtype, is
kept from a micro-batch's forward to its backward, and a chunk's term of it passes through memory once more. Where a
schedule parts a backward into I and W, the head's part of both is in F. --tp sends two all-reduces a chunk, of as many
numbers in all. Hsu et al., "Liger Kernel" (2024).
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

import kernels
from parallel import ColumnParallelLinear, master_dtype, row_losses


class ChunkedLoss(torch.autograd.Function):
    """The summed loss of x (n, C) through a head's weight (V/N, C) against targets (n). losses(logits, targets) gives
    each row's. trains: whether gradients are wanted."""

    @staticmethod
    def forward(ctx, x, weight, targets, chunk, losses, trains):
        dx = []
        dw = torch.zeros_like(weight, dtype=master_dtype(weight.dtype)) if trains else None
        of_rows = []
        for rows, some in zip(x.split(chunk), targets.split(chunk)):
            with torch.set_grad_enabled(trains):
                inputs = rows.detach().requires_grad_(trains), weight.detach().requires_grad_(trains)
                loss = losses(kernels.table[F.linear](*inputs), some)                         # (chunk)
                total = loss.sum()
            of_rows.append(loss.detach())
            if trains:
                dx_rows, dw_rows = torch.autograd.grad(total, inputs)
                dx.append(dx_rows)
                dw += dw_rows
                del dw_rows  # or the next chunk's, V C numbers, would come on top
        if trains:
            ctx.save_for_backward(torch.cat(dx), dw)
        return torch.cat(of_rows).sum()  # in the order in which all rows at once would be added up

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        dx, dw = ctx.saved_tensors
        return dx * dloss, dw * dloss, None, None, None, None


def chunked_loss(layer, chunk, vocab_size, x, targets):
    """What a head computes in place of logits: the summed loss of x (B, T, C) against targets (B, T)."""
    group = None
    if isinstance(layer, ColumnParallelLinear):
        group = layer.cut.group
        x = layer.f(x, group)  # once for all chunks, so that backward adds up dX once
    losses = partial(row_losses, vocab_size=vocab_size, group=group)
    return ChunkedLoss.apply(x.flatten(0, 1), layer.weight, targets.flatten(), chunk, losses, torch.is_grad_enabled())


def compute_loss_in(layer, chunk, vocab_size):
    """Let a GPT's head compute the loss itself, in place, of so many tokens at a time. It is then given targets."""
    layer.forward = partial(chunked_loss, layer, chunk, vocab_size)
