"""Two levels: how do groups on several nodes use all network cards, not one?

`two_levels` registers `TwoLevels` as a group's link, so no caller of a collective changes. M: nodes. n: ranks of the
group on each node.

    torchrun --nnodes 2 ... train.py --plain --dp 8        on each of two nodes with four processes
"""

import functools
from collections import defaultdict

import torch
import torch.distributed as torch_dist
from torch.distributed import ReduceOp

import collectives as dist
from collectives import average, Link, link_of, node_of


# Hybrid sharding: the n ranks of a node shard among themselves (`Layout.zero_within`), so ZeRO's gathers and
# reduce-scatters stay inside the node. What parallel.py says of N ranks under ZeRO then holds of n. Once a step,
# however many micro-batches it has, the nodes average the gradient of each shard: an all-reduce of K/n elements.

@torch.no_grad()
def average_between(units, groups):
    """Average over `replicate`, the ranks that have the same rows, what the ranks of `shard` have averaged. (All ranks
    that keep an expert have averaged its gradient at once.)"""
    for unit in units:
        if unit.group is groups.shard and unit.total is not None:
            dist.all_reduce(unit.total, dist.ReduceOp.AVG, groups.replicate)


# Two levels, for groups that are not sharded by node:

class TwoLevels(Link):
    """A group on M nodes with n ranks on each; rank r is number r mod n of node r // n.

    In one ring all that leaves a node goes through one rank's network card (so NCCL lays several rings). Here all n
    ranks of a node send 1/n of it each:

        all-reduce       reduce-scatter inside the node | all-reduce of my chunk between the nodes | all-gather inside
        reduce-scatter   inside, once for the chunks of each node | between
        all-gather       between | inside, once for the chunks of each node

    Elements sent by each rank in an all-reduce: 2(n-1)/n x K inside, 2(M-1)/M x K/n between. The halves send half.
    """

    def __init__(self, group, levels):
        """levels: two groups of this rank, its node and the ranks of its number in all nodes."""
        super().__init__(group)
        self.inside, self.between = map(link_of, levels)

    def levels(self):
        """Both links, as the operation under way sees them."""
        return self.inside.during(self.name, self.aside), self.between.during(self.name, self.aside)

    def of_each_node(self, chunks):
        return [chunks[first:first + self.inside.size] for first in range(0, self.size, self.inside.size)]

    def all_reduce(self, flat, op):
        (inside, between), add = self.levels(), ReduceOp.SUM if op == ReduceOp.AVG else op
        chunks = flat.tensor_split(inside.size)
        mine = chunks[inside.rank]
        inside.reduce_scatter(chunks, mine, add)
        between.all_reduce(mine, add)
        average(op, mine, self.size)
        inside.all_gather(chunks)

    def reduce_scatter(self, chunks, result, op):
        (inside, between), add = self.levels(), ReduceOp.SUM if op == ReduceOp.AVG else op
        sums = [torch.empty_like(own[inside.rank]) for own in self.of_each_node(chunks)]  # over the ranks of my node
        for node, own in enumerate(self.of_each_node(chunks)):
            inside.reduce_scatter(own, sums[node], add)
        between.reduce_scatter(sums, result, add)
        average(op, result, self.size)

    def all_gather(self, chunks):
        inside, between = self.levels()
        between.all_gather(chunks[inside.rank::inside.size])
        for own in self.of_each_node(chunks):
            inside.all_gather(own)


def maker_of(levels):
    """What makes a group's link of its two levels. A program may have put a faster one into LINKS."""
    return functools.partial(dist.LINKS.get("nodes", TwoLevels), levels=levels)


def two_levels(group, groups):
    """Let a group work in two levels, if it spans several nodes, with equally many ranks, at least 2, on each.

    groups: [the ranks, ascending, of each group of a mesh's axis], of which `group` is this rank's. Call it on all
    ranks of the world, before the group is used, because every rank must take part in making every sub-group.
    """
    group = group or torch_dist.group.WORLD
    if group in dist.process.registered:  # a mesh of one axis takes the world's group: already done
        return
    for ranks in groups:
        nodes = defaultdict(list)
        for rank in ranks:
            nodes[node_of(rank)].append(rank)
        counts = {len(node) for node in nodes.values()}
        if len(nodes) > 1 and len(counts) == 1 and counts != {1}:
            if levels := dist.rows_and_columns([*nodes.values()]):
                dist.process.registered[group] = maker_of(levels)
