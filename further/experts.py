"""Mixture of experts and expert parallelism: how does a model grow while each token costs the same?

Each token meets k of E experts, so parameters grow with E and FLOPs with k. Ranks of dp share out the experts, and
tokens travel to those that the router chose. model.py's Block takes its MixtureOfExperts from here where a config has
experts; parallel.py calls `expert_parallel` where ranks share them out.

    torchrun --nproc_per_node 2 train.py --plain --dp 2 --ep 2 --experts 4
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import collectives as dist
import kernels
from further.sequence import Conjugate
from model import ACTIVATIONS
from parallel import Cut, groups_of, local_parameter, set_placement


# -------------------------------------------------------------------------------------------------- mixture of experts
#
# In place of one MLP a block has E, and a router sends each token through k of them. Parameters
# grow with E, FLOPs with k. A router left alone learns to use few experts. The usual remedies depend on how a batch is
# cut into micro-batches and over ranks: an auxiliary loss is a product of two means over a part's tokens (unless all
# ranks first add up their counts), and with a capacity each expert drops the tokens that a part has beyond it. Here no
# token is dropped. Each expert has a bias, which is added to its scores when experts are chosen, and not when their
# outputs are weighed. After a step it falls by `rate` if more than 1/E of the batch's choices fell on the expert; if
# fewer did, it rises. How many did is a sum of integers, so it is the same in every layout.
# Shazeer et al., "Outrageously Large Neural Networks" (2017); Wang et al., "Auxiliary-Loss-Free Load Balancing" (2024);
# DeepSeek-V3 (2024), section 2.1.2. CS336 lecture 4.

class Router(nn.Module):
    """Chooses k of E experts for each token, and weighs them. In float32, or float64, whatever layers compute in.

    load: int64 (E), how often each expert was chosen since somebody set it to 0. Backward counts, so evaluation does
    not count, and a forward that backward runs again does not count twice.
    """

    def __init__(self, config):
        super().__init__()
        self.top_k, self.load = config.top_k, 0
        self.weight = nn.Parameter(torch.empty(config.experts, config.n_embd))
        self.register_buffer("bias", torch.empty(config.experts, dtype=torch.float32))

    def forward(self, x):                                                                     # (B, T, C)
        chosen, gates, counts = self.choose(x)
        if gates.requires_grad:
            gates.register_hook(lambda grad: self.count(counts))
        return chosen, gates

    def choose(self, x):
        """(the numbers of k experts (B, T, k), the weights of their outputs (B, T, k), how often each is chosen (E))"""
        x, weight = kernels.at_least_float32(x), kernels.at_least_float32(self.weight)
        scores = (x @ weight.T).sigmoid()  # each expert's own: a softmax would tie it to the others'; (B, T, E)
        ranked = (scores.detach() + self.bias).sort(descending=True, stable=True).indices     # equals: the first leads
        chosen = ranked[..., :self.top_k]                                                     # (B, T, k)
        gates = scores.gather(-1, chosen)
        if self.top_k > 1:  # with one expert its share is always 1, which would give the router no gradient
            gates = gates / gates.sum(-1, keepdim=True)
        return chosen, gates, count_of_each(chosen, len(weight))

    def count(self, counts):
        self.load = self.load + counts

    @torch.no_grad()
    def balance(self, load, rate):
        """Move the bias against the load (E) of a whole batch. Its mean stays 0."""
        self.bias += rate * (load.sum() - len(load) * load).sign()
        self.bias -= self.bias.double().mean()  # the mean is taken in float64, so that every device rounds alike


def count_of_each(chosen, experts):
    """How often each expert's number stands in `chosen`, of any shape: int64 (E)."""
    return (chosen.reshape(-1, 1) == torch.arange(experts, device=chosen.device)).sum(0)


@torch.no_grad()
def balance(net, rate):
    """After the optimizer's step: move the routers' biases against the load of the last forward_backward. Returns how
    often all ranks chose each expert, int64 (L, E), 0 in blocks without experts. net: a ParallelGPT."""
    loads = torch.zeros(net.config.n_layer, net.config.experts, dtype=torch.int64, device=net.device)
    for i, router in net.routers.items():
        loads[i] = router.load
    routed_differently = [net.groups.replicas, net.groups.pp] + [net.groups.tp] * net.layout.sp
    for group in routed_differently:
        dist.all_reduce(loads, group=group)
    for i, router in net.routers.items():
        router.balance(loads[i], rate)
    return loads


class StackedLinear(nn.Module):
    """A Linear of each expert, weight (E, out, in), bias (E, out): rows (n, in) -> (n, out).

    counts (E) says whose rows they are: the first counts[0] are the first expert's, the next counts[1] the second's.
    """

    def __init__(self, experts, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, n_out, n_in))
        self.bias = nn.Parameter(torch.empty(experts, n_out))
        set_placement(self.bias, decays=False)  # it is E vectors, so weight decay leaves it alone

    def forward(self, rows, counts):
        return kernels.grouped_linear(rows, self.weight, self.bias, counts)


class Experts(nn.Module):
    """E MLPs: tokens (B, T, C), their experts' numbers and weights (B, T, k) -> weighted sums of outputs (B, T, C).

    Each token becomes k rows, one for each of its experts. Rows are sorted by expert, so that each expert multiplies
    one matrix. Outputs are put back in the order of the tokens.
    """

    def __init__(self, config):
        super().__init__()
        self.c_fc = StackedLinear(config.experts, config.n_embd, config.inner)
        self.c_proj = StackedLinear(config.experts, config.inner, config.n_embd)
        self.count, self.activation = config.experts, ACTIVATIONS[config.activation]

    def forward(self, x, chosen, gates):
        order, k = chosen.flatten().argsort(stable=True), chosen.shape[-1]                    # (B T k)
        rows = x.flatten(0, 1).repeat_interleave(k, 0).index_select(0, order)                 # (B T k, C)
        y = self.mlps(rows, count_of_each(chosen, self.count))
        y = y.index_select(0, order.argsort()).view(*chosen.shape, -1)                        # (B, T, k, C)
        return (y * gates.unsqueeze(-1).to(y.dtype)).sum(-2)

    def mlps(self, rows, counts):
        """Rows (n, C), as for StackedLinear -> each through its expert, (n, C)."""
        return self.c_proj(self.activation(self.c_fc(rows, counts)), counts)


class MixtureOfExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router, self.experts = Router(config), Experts(config)

    def forward(self, x):                                                                     # (B, T, C)
        return self.experts(x, *self.router(x))


def routers(model):
    """{number of a block: its Router}."""
    return {int(i): block.mlp.router for i, block in model.h.items() if isinstance(block.mlp, MixtureOfExperts)}


# ------------------------------------------------------------------------------------ experts cut by tensor parallelism

class RowParallelExperts(nn.Module):
    """A RowParallelLinear of each expert, before g: rows (n, in/N) -> this rank's term of the sum (n, out). Weight
    (E, out, in/N), bias (E, out/N).

    A token's k outputs, biases included, are weighed and added before g. So each rank adds its Nth of the bias alone.
    """

    def __init__(self, layer, group):
        super().__init__()
        cut, out = Cut(group, 1), layer.bias.shape[1]
        self.weight, self.bias = local_parameter(layer.weight, Cut(group, 2)), local_parameter(layer.bias, cut)
        first = cut.first(out)
        self.zeros = first, out - first - self.bias.shape[1]  # how many before this rank's Nth, and behind it

    def forward(self, rows, counts):
        return kernels.grouped_linear(rows, self.weight, F.pad(self.bias, self.zeros), counts)


def between_f_and_g(experts, group, f, g):
    """Put f before and g after an `Experts`, in place. Tokens, choices and weights all go through f, because each rank
    has only a term of the weights' gradient, too."""
    experts.register_forward_pre_hook(lambda experts, inputs: tuple(f(tensor, group) for tensor in inputs))
    experts.register_forward_hook(lambda experts, inputs, output: g(output, group))
    return experts


def cut_in_place(layer, cut):
    """Put this rank's parts of a layer's parameters in their places."""
    for leaf, param in list(layer.named_parameters()):
        setattr(layer, leaf, local_parameter(param, cut))
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

def split_experts(mesh, n):
    """[the group of n neighbours along dp who share out the experts, the group of the ranks that keep the same experts
    as this one]. n must divide dp."""
    neighbours = mesh.mesh.unflatten(1, (-1, n)).permute(0, 4, 1, 3, 2)                       # (pp, tp, dp/n, cp, n)
    return groups_of(neighbours.flatten(0, 1).flatten(1, 2))                                  # (pp tp, dp/n cp, n)


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
    y = through_experts(mlps, Conjugate.apply(rows, group, there, back), arriving)
    return Conjugate.apply(y, group, back, there)


def through_experts(mlps, rows, counts):
    """Rows (R, C) by rank of origin and then by expert, counts (N, E/N) of each -> (R, C) in the same order."""
    expert = torch.arange(counts.shape[1], device=rows.device).repeat(len(counts)).repeat_interleave(
        counts.flatten(), output_size=len(rows))                                              # of each row
    order = expert.argsort(stable=True)
    y = mlps(rows.index_select(0, order), counts.sum(0))
    return y.index_select(0, order.argsort())


def expert_parallel(module, group, same_experts):
    """Let each rank of the group keep E/N of a GPT's experts, in place. same_experts: their group."""
    for experts in [part for part in module.modules() if isinstance(part, Experts)]:
        for layer in (experts.c_fc, experts.c_proj):
            for param in cut_in_place(layer, Cut(group, 0)).parameters():
                set_placement(param, average_over=same_experts, divide_by=dist.get_world_size(group))
        experts.mlps = partial(visit, experts.mlps, group)
