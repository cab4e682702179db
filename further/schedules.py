"""More schedules: how small can a pipeline's bubble get?

A schedule is a function of (p ranks, m micro-batches, v stages a rank) that returns a list of actions for each rank.
Its name enters SCHEDULES, and `--schedule` takes it. parallel.py's section on pipelines lists the idle time of each.

    torchrun --nproc_per_node 2 train.py --plain --pp 2 --micro-batches 4 --schedule zb-h1
"""

from collections import Counter
from functools import partial

import torch

import kernels
import parallel
from model import Linear
from parallel import Action, SCHEDULES, one_f_one_b, take_turns, whole_batch


def interleaved(p, m, v):
    """1F1B with v stages a rank: stage c p + r is rank r's c-th. Narayanan et al., "Megatron-LM" (2021).

    Micro-batches go through in groups of p, each group through all v stages before the next: p must divide m. Rank r
    runs ahead by (v-1) p forwards, until its last stage begins, and by 2 more for each of the p-1-r later
    ranks, as Megatron does. For p = 2, v = 2, m = 4, a rank's second stage in brackets:

        rank 0   F0 F1 (F0)(F1) F2 (B0) F3 (B1)(F2) B0 (F3) B1 (B2)(B3) B2  B3
        rank 1   F0 F1 (F0)(B0)(F1)(B1) F2  B0  F3  B1 (F2)(B2)(F3)(B3) B2  B3
    """
    if v == 1:
        return one_f_one_b(p, m)
    if m % p:
        raise ValueError(f"an interleaved schedule of {p} ranks needs micro-batches in multiples of {p}, not {m}")
    lists = []
    for rank in range(p):
        stages = range(rank, v * p, p)
        forwards = in_groups("F", stages, p, m)
        backwards = in_groups("B", stages[::-1], p, m)
        ahead = (v - 1) * p + 2 * (p - 1 - rank)
        lists.append(take_turns(forwards, ahead, backwards))
    return lists


def in_groups(kind, stages, p, m):
    """A rank's actions of a kind: p micro-batches through all its stages, then the next p."""
    actions = []
    for first in range(0, m, p):
        for stage in stages:
            for i in range(first, first + p):
                actions.append(Action(kind, stage, i))
    return actions


def zero_bubble_h1(p, m, v=1):
    """1F1B with backward in two: rank r runs W r micro-batches after I, so that it sends the result of I earlier."""
    lists = []
    for rank in range(p):
        weights = whole_batch("W", rank, m)
        actions = []
        for action in take_turns(whole_batch("F", rank, m), p - 1 - rank, whole_batch("I", rank, m)):
            actions.append(action)
            if action.kind == "I" and action.micro_batch >= rank:
                actions.append(weights.pop(0))
        lists.append(actions + weights)
    return lists


class WeightGradients:
    """Computes the weight gradients of a stage's Linears in autograd's place, dW = dy^T x and db, because no other
    stage waits for them: at once, or during an "I" later, in its "W".

    Norms, embeddings, tied weights and biases that are added after g stay with autograd, in "I".
    """
    later = None  # during an "I" the list that gets what its "W" computes gradients from: (weight, bias, dy, x)

    def __init__(self, module):
        linears = Linear, parallel.ColumnParallelLinear, parallel.RowParallelLinear
        uses = Counter(param for layer in module.modules() for param in layer._parameters.values())
        for layer in module.modules():
            if isinstance(layer, linears) and uses[layer.weight] == 1:
                layer.linear = partial(self.linear, layer.linear)

    def linear(self, product, x, weight, bias=None):
        """Autograd sees detached weights, so its hooks do not fire before the weight gradient exists."""
        if not x.requires_grad:  # all before it is frozen, so nothing detached would have a backward
            return product(x, weight, bias)
        take = partial(self.take, weight, bias)
        return product(x, weight.detach(), None if bias is None else bias.detach(), take)

    def take(self, *computed_from):
        if self.later is None:
            self.compute(*computed_from)
        else:
            self.later.append(computed_from)

    @torch.no_grad()
    def compute(self, weight, bias, dy, x):
        if weight.requires_grad:
            self.add(weight, dy.T, x)
        if bias is not None and bias.requires_grad:
            self.add(bias, kernels.bias_gradient(dy))

    def add(self, param, a, b=None):
        """What autograd does at the end of a backward: add a gradient, or the product a b, to .grad; call the hooks."""
        grad = a if b is None else a @ b
        param.grad = grad if param.grad is None else param.grad.add_(grad)
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            hook(param)


SCHEDULES.update({"interleaved": interleaved, "zb-h1": zero_bubble_h1})
