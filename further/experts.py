"""Mixture of experts: how does a model grow while each token costs the same?

Each token meets k of E experts, so parameters grow with E and FLOPs with k. A GPT of an `ExpertsConfig` has them.
further/expert_parallel.py lets ranks share them out.

    python train.py --plain --experts 4
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import collectives as dist
import kernels
from model import GPTConfig
from parallel import set_placement


# -------------------------------------------------------------------------------------------------- mixture of experts
#
# In place of one MLP a block has E, and a router sends each token through k of them. Parameters grow with E, FLOPs with
# k. A router left alone learns to use few experts. The usual remedies depend on how a batch is
# cut into micro-batches and over ranks: an auxiliary loss is a product of two means over a part's tokens (unless all
# ranks first add up their counts), and with a capacity each expert drops the tokens that a part has beyond it. Here no
# token is dropped. Each expert has a bias, which is added to its scores when experts are chosen, and not when their
# outputs are weighed. After a step it falls by `rate` if more than 1/E of the batch's choices fell on the expert; if
# fewer did, it rises. How many did is a sum of integers, so it is the same in every layout.
# Shazeer et al., "Outrageously Large Neural Networks" (2017); Wang et al., "Auxiliary-Loss-Free Load Balancing" (2024);
# DeepSeek-V3 (2024), section 2.1.2. CS336 lecture 4.

class Router(nn.Module):
    """Chooses k of E experts for each token, and weighs them. In float32, or float64, whatever layers compute in.

    load: int64 (E), how often each expert was chosen since `load *= 0`; 0 at first. Backward counts, so evaluation does
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
            self.count_in_backward(gates, counts)
        return chosen, gates

    def choose(self, x):
        """(the numbers of k experts (B, T, k), the weights of their outputs (B, T, k), how often each is chosen (E))"""
        x, weight = kernels.at_least_float32(x), kernels.at_least_float32(self.weight)
        scores = (x @ weight.T).sigmoid()  # each its own: a softmax would tie them together  # (B, T, E)
        biased = scores.detach() + self.bias
        ranked = biased.sort(descending=True, stable=True).indices                            # equals: the first leads
        chosen = ranked[..., :self.top_k]                                                     # (B, T, k)
        gates = scores.gather(-1, chosen)                                                     # (B, T, k)
        if self.top_k > 1:  # the share of one alone is always 1, which would give the router no gradient
            gates = gates / gates.sum(-1, keepdim=True)
        return chosen, gates, count_of_each(chosen, len(weight))

    def count_in_backward(self, gates, counts):
        """Once, though a backward in halves comes here twice."""
        def count(grad):
            hook.remove()
            self.load += counts  # in place, because a recorded step adds to the same memory

        hook = gates.register_hook(count)

    @torch.no_grad()
    def balance(self, load, rate):
        """Move the bias against the load (E) of a whole batch. Its mean stays 0."""
        self.bias += rate * (load.sum() - len(load) * load).sign()
        self.bias -= self.bias.double().mean()  # the mean is taken in float64, so that every device rounds alike


def count_of_each(chosen, experts):
    """How often each expert's number stands in `chosen`, of any shape: int64 (E)."""
    return (chosen.reshape(-1, 1) == torch.arange(experts, device=chosen.device)).sum(0)


@torch.no_grad()
def loads(net):
    """How often all ranks chose each expert in the last forward_backward, int64 (L, E), 0 in blocks without experts.
    net: a ParallelGPT."""
    counts = torch.zeros(net.config.n_layer, net.config.experts, dtype=torch.int64, device=net.device)
    for i, router in net.routers.items():
        counts[i] = router.load
    routed_differently = [net.groups.dp_cp, net.groups.pp] + [net.groups.tp] * net.layout.sp
    for group in routed_differently:
        dist.all_reduce(counts, group=group)
    return counts


def balance(net, loads, rate):
    """After the optimizer's step: move the routers' biases against these loads."""
    for i, router in net.routers.items():
        router.balance(loads[i], rate)


@dataclass(frozen=True)
class ExpertsConfig(GPTConfig):
    """Sizes of a GPT of which some blocks have experts."""
    experts: int = 4           # E: MLPs that a block has to choose from
    top_k: int = 2             # k: experts that a token goes through
    expert_every: int = 1      # every n-th block has experts
    shared_experts: int = 0    # that every token goes through besides

    def has_experts(self, block):
        """Whether the block of this number, from 0, has experts."""
        return block % self.expert_every == self.expert_every - 1

    def mlp(self, block):
        return self.mixture() if self.has_experts(block) else super().mlp(block)

    def mixture(self):
        if self.shared_experts:
            from further.shared import SharedMixture
            return SharedMixture(self)
        return MixtureOfExperts(self)

    def active_parameters(self):
        return self.parameters() - self.parameters(self.stacked) // self.experts * (self.experts - self.top_k)

    def stacked(self, name):
        """["h.0.mlp.experts.0.c_fc.weight", ...] of "h.0.mlp.experts.c_fc.weight"."""
        numbered = name.replace(".experts.", ".experts.{}.")
        return [numbered.format(e) for e in range(self.experts)] if numbered != name else []


def grouped_linear(x, weight, bias, counts):
    """A product for each expert: y_r = W_e x_r + b_e of each row r of expert e.

    x (R, in), its rows sorted by expert; weight W (E, out, in), bias (E, out) or None: (R, out). counts: int64 (E), how
    many rows each expert has, zeros included; they must add up to R. All are on one device, in one dtype.
    Deterministic. An expert without rows has a gradient of zero. The loop wants counts on the CPU, which then waits for
    the GPU, and small products leave multiprocessors idle: fast/experts.py serves all by one launch.
    """
    biases = [None] * len(weight) if bias is None else bias
    of_experts = zip(x.split(counts.tolist()), weight, biases, strict=True)
    return torch.cat([F.linear(rows, w, b) for rows, w, b in of_experts])


class StackedLinear(nn.Module):
    """A Linear of each expert, weight (E, out, in), bias (E, out): rows (n, in) -> (n, out).

    counts (E) says whose rows they are: the first counts[0] are the first expert's, the next counts[1] the second's.
    """

    def __init__(self, experts, n_in, n_out, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, n_out, n_in))
        self.bias = nn.Parameter(torch.empty(experts, n_out)) if bias else None
        if bias:
            set_placement(self.bias, decays=False)  # it is E vectors, so weight decay leaves it alone

    def forward(self, rows, counts):
        return kernels.table[grouped_linear](rows, self.weight, self.bias, counts)


class Experts(nn.Module):
    """E MLPs: tokens (B, T, C), their experts' numbers and weights (B, T, k) -> weighted sums of outputs (B, T, C).

    Each token becomes k rows, one for each of its experts. Rows are sorted by expert, so that each expert multiplies
    one matrix. Outputs are put back in the order of the tokens.
    """

    def __init__(self, config):
        super().__init__()
        self.c_fc = StackedLinear(config.experts, config.n_embd, config.up_width, config.biased)
        self.c_proj = StackedLinear(config.experts, config.hidden, config.n_embd, config.biased)
        self.count, self.activation = config.experts, config.activation_function()

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
        self.router, self.experts = Router(config), kernels.table[Experts](config)

    def forward(self, x):                                                                     # (B, T, C)
        return self.experts(x, *self.router(x))


def routers(model):
    """{number of a block: its Router}."""
    return {int(i): block.mlp.router for i, block in model.h.items() if isinstance(block.mlp, MixtureOfExperts)}


def how_even(loads):
    """Of loads (L, E), 0 in blocks without experts: {"load_max": the busiest expert's, as a multiple of the mean}."""
    shares = loads[loads.sum(1) > 0].double()
    shares /= shares.sum(1, keepdim=True)
    return {"load_max": (shares.max() * loads.shape[1]).item()}
