"""Expert parallelism: what if a model has more experts than one rank can keep?

Ranks of dp share out the experts, and tokens travel to those that the router chose.

    torchrun --nproc_per_node 2 train.py --plain --dp 2 --ep 2 --experts 4
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import collectives as dist
import kernels
from further import experts as mixture
from further.sequence import Conjugate
from parallel import Cut, local_parameter, set_placement


# ------------------------------------------------------------------------------------ experts cut by tensor parallelism

class RowParallelExperts(nn.Module):
    """A RowParallelLinear of each expert, before g: rows (n, in/N) -> this rank's term of the sum (n, out). Weight
    (E, out, in/N), bias (E, out/N).

    A token's k outputs, biases included, are weighed and added before g. So each rank adds its Nth of the bias alone.
    """

    def __init__(self, layer, group):
        super().__init__()
        cut = Cut(group, 1)
        out = layer.weight.shape[1]
        self.weight, self.bias = local_parameter(layer.weight, Cut(group, 2)), local_parameter(layer.bias, cut)
        if self.bias is not None:
            first = cut.first(out)
            self.zeros = first, out - first - self.bias.shape[1]  # how many before this rank's Nth, and behind it

    def forward(self, rows, counts):
        bias = None if self.bias is None else F.pad(self.bias, self.zeros)
        return kernels.table[mixture.grouped_linear](rows, self.weight, bias, counts)


def between_f_and_g(experts, group, f, g):
    """Put f before and g after an `Experts`, in place. Tokens, choices and weights all go through f, because each rank
    has only a term of the weights' gradient, too."""
    experts.register_forward_pre_hook(lambda experts, inputs: tuple(f(tensor, group) for tensor in inputs))
    experts.register_forward_hook(lambda experts, inputs, output: g(output, group))
    return experts


def cut_in_place(layer, cut):
    """Leave of the parameters of a StackedLinear this rank's parts."""
    for param in layer.parameters():
        local_parameter(param, cut)
    return layer


def expert_plan(f, g):
    """How tensor parallelism cuts experts, as parallel.gpt2_plan says it of the other layers."""
    return {
        "mlp.experts": partial(between_f_and_g, f=f, g=g),
        "experts.c_fc": lambda layer, group: cut_in_place(layer, Cut(group, 1)),  # (E, out/N, in) and bias (E, out/N)
        "experts.c_proj": RowParallelExperts,
    }


# ----------------------------------------------------------------- expert parallel: tokens travel to the chosen experts
#
# Experts are most of a model's parameters, and each token needs k of them. So N neighbours along dp share out the
# experts, E/N each; all other parameters lie on every rank. Each rank routes its own tokens. It sends every token as k
# rows, to the ranks that keep its experts, and gets the experts' outputs back:
#
#                        dispatch (permute)                                      combine (unpermute)
#     rank 0   tokens ─ router ─ sort ─┐ all-   ┌─ sort ─ experts 0, 1 ─ unsort ─┐ all-   ┌─ unsort ─ weigh, add up
#     rank 1   tokens ─ router ─ sort ─┘ to-all └─ sort ─ experts 2, 3 ─ unsort ─┘ to-all └─ unsort ─ weigh, add up
#
# Both sorts are by expert: the first puts rows for one rank side by side, the second rows for one expert. First the
# ranks exchange E counts, because each must know how many rows it will receive. Then there are four exchanges of rows:
# there and back, in forward and in backward. In each a rank sends (N-1)/N of its k B T rows of C elements, if the load
# is balanced.
#
# The same expert lies on dp/N x cp ranks, its copies. The batch's loss is the mean of all ranks' losses, and a copy
# gets the tokens of N ranks, so it has the gradient of a sum of N of them. The gradient of the batch's loss is
# therefore the average over the copies, divided by N (`Placement.divide_by`).
# Lepikhin et al., "GShard" (2020); Fedus et al., "Switch Transformers" (2021).

def exchange(rows, group, sends, receives):
    """Send the first sends[0] of the rows (n, C) to rank 0, and so on. The result begins with receives[0] rows of rank
    0."""
    incoming = rows.new_empty(sum(receives), rows.shape[1])
    dist.all_to_all_single(incoming, rows.contiguous(), receives, sends, group)
    return incoming


def exchange_counts(counts, group):
    """counts (E) of the rows that this rank sends -> (those that arrive, by rank and then by expert (N, E/N); how many
    rows go to each rank, a list; how many come from each). The CPU must know these, so it waits for the GPU."""
    dist.all_to_all_single(incoming := torch.empty_like(counts), counts, group=group)
    both = torch.stack([counts, incoming]).view(2, dist.get_world_size(group), -1)            # (2, rank, expert)
    return both[1], *both.sum(2).tolist()


def visit(mlps, group, rows, counts):
    """`Experts.mlps` of experts that lie on the ranks of a group: rows (R, C), sorted by expert, counts (E) -> (R, C).

    mlps: the same of this rank's E/N experts.
    """
    arriving, sends, receives = exchange_counts(counts, group)
    there, back = (partial(exchange, sends=a, receives=b) for a, b in ((sends, receives), (receives, sends)))
    y = kernels.table[through_experts](mlps, Conjugate.apply(rows, group, there, back), arriving)
    return Conjugate.apply(y, group, back, there)


def expert_of_each(rows, counts):
    """Which expert each row is for, int64 (R)."""
    experts = torch.arange(counts.shape[1], device=rows.device).repeat(len(counts))           # (E)
    return experts.repeat_interleave(counts.flatten(), output_size=len(rows))


def through_experts(mlps, rows, counts):
    """Rows (R, C) by rank of origin and then by expert, counts (N, E/N) of each -> (R, C) in the same order."""
    order = expert_of_each(rows, counts).argsort(stable=True)
    y = mlps(rows.index_select(0, order), counts.sum(0))
    return y.index_select(0, order.argsort())


def expert_parallel(module, group, same_experts, travel=visit):
    """Let each rank of the group keep E/N of a GPT's experts, in place. same_experts: their group. travel: how rows go
    there and back."""
    for experts in [part for part in module.modules() if isinstance(part, mixture.Experts)]:
        for layer in (experts.c_fc, experts.c_proj):
            for param in cut_in_place(layer, Cut(group, 0)).parameters():
                set_placement(param, average_over=same_experts, divide_by=dist.get_world_size(group))
        experts.mlps = partial(travel, experts.mlps, group)
