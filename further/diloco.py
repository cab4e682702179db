"""DiLoCo: what if the network between groups of ranks is too slow for an all-reduce in every step?

Islands of ranks train apart, H steps each with a batch of its own. Then all islands average how far each has moved.

    torchrun --nproc_per_node 2 train.py --plain --dp 2 --islands 2 --local-steps 10

Read with: Douillard et al., "DiLoCo" (2023).
"""

from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

import collectives as dist
from parallel import params_of


# M islands have the same weights w. Each takes H steps of its own optimizer, the inner one, on its own samples, and
# arrives at w_1 ... w_M. The mean of w - w_i stands for a gradient, the outer one. Nesterov's SGD steps w with it:
#
#     island 1   w ── H inner steps ── w_1 ─┐
#     island 2   w ── H inner steps ── w_2 ─┤    d = mean of (w - w_i)      an all-reduce between the islands
#     island 3   w ── H inner steps ── w_3 ─┘    m <- mu m + d    w <- w - lr (d + mu m)      all go on from w
#
# Inside an island everything is as without islands: tp, pp, cp, ZeRO, whose gradients are averaged in every step.
# Between islands a rank sends 2(M-1)/M of what it steps (K, with ZeRO K/N), 4 bytes an element, once in H steps: 1/H of
# what the average of gradients would be. It keeps w and m beside the inner optimizer's state: 8 bytes an element.
#
# Other strategies equal one process. This one does not, because from the second step of a round on an island computes
# gradients at weights of its own. With H = 1, plain SGD inside, lr 1 and mu 0 it does: d is then the inner lr times the
# mean gradient. With Adam inside it is another algorithm even then, because a mean of normalized gradients is not the
# normalized mean. Each island keeps its own moments from round to round.

class DiLoCo:
    """Steps as `inner_class` does; each `every`th step is followed by an outer one. It is an optimizer itself, so
    ZeRO shards it, and gathers what it has stepped.

        DiLoCo(torch.optim.AdamW, group, 10, 0.7, 0.9, params, lr=1e-3)

    group: of ranks that hold the same part of the model, one of each island. lr, momentum: of the outer step. Its state
    stands beside the inner one's: "outer" is w, "outer_momentum" m. done: steps that have been taken.
    """

    def __init__(self, inner_class, group, every, lr, momentum, params, /, **options):
        self.inner = inner_class(params, **options)
        self.group, self.every = group, every
        self.lr, self.momentum = lr, momentum
        self.done = 0

    def __getattr__(self, name):
        """Whatever else an optimizer has is the inner one's."""
        return getattr(self.inner, name)

    @torch.no_grad()
    def step(self):
        params = params_of(self.inner)
        start = [] if self.done else [p.detach().clone() for p in params]
        self.inner.step()
        for p, w in zip(params, start):  # only now: Adam's first step wants to find no state
            self.state[p].update(outer=w, outer_momentum=torch.zeros_like(w))
        self.done += 1
        if self.done % self.every == 0:
            self.outer_step(params)

    def outer_step(self, params):
        for p in params:
            w, m = self.state[p]["outer"], self.state[p]["outer_momentum"]
            d = w - p
            dist.all_reduce(d, dist.ReduceOp.AVG, self.group)
            m.mul_(self.momentum).add_(d)
            w.sub_(d + self.momentum * m, alpha=self.lr)
            p.copy_(w)


def mesh_of_islands(device_type, layout):
    """As parallel.make_mesh, but an island's ranks follow each other, so that it may be a node, or some. Islands cut
    dp. Of pp 2, dp 2 and 2 islands, which are ranks 0, 1 and 2, 3: [[0, 2], [1, 3]] in place of [[0, 1], [2, 3]]."""
    shape = layout.islands, layout.pp, layout.dp // layout.islands, layout.cp, layout.tp
    ranks = torch.arange(dist.get_world_size(), device="cpu").view(shape)
    ranks = ranks.transpose(0, 1).flatten(1, 2)                                               # (pp, dp, cp, tp)
    return DeviceMesh(device_type, ranks, mesh_dim_names=("pp", "dp", "cp", "tp"))


# Within a round islands differ, so a checkpoint has the weights and moments of each. What has no island in its label is
# the first one's, or the same on all.

def kept_of_islands(islands, moments):
    """{label: (island, what its optimizer keeps; None: its weights)} of what a checkpoint has besides the first
    island's weights and moments."""
    shared = {key: (0, key) for key in ("outer", "outer_momentum")}
    return shared | {f"island{i}" + f".{key}" * bool(key): (i, key)
                     for i in range(1, islands) for key in (None, *moments)}


def source_of_island(source, tensors, islands):
    """A checkpoint's source(name) of weights, on each rank those of its own island. tensors: the checkpoint's."""
    def own(name):
        label = f"island{dist.get_rank() * islands // dist.get_world_size()}"
        found = tensors.get(f"{label}.{name}")
        if found is None and name == "lm_head.weight":  # a tied head is not there
            found = tensors.get(f"{label}.wte.weight")
        return source(name) if found is None else found

    return own


def island_of(net):
    """The number of the island that this rank's part of a ParallelGPT is in; 0 where there is one."""
    return dist.get_rank(net.groups.between) if net.groups.between else 0


def of_islands(optimizer, between, layout):
    """An optimizer class, or its partial, with the outer step of `layout`'s islands around it."""
    return partial(DiLoCo, optimizer, between, layout.local_steps, layout.outer_lr, layout.outer_momentum)
