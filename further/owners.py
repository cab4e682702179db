"""Owners: how does ZeRO share out the work of an optimizer that needs whole matrices, as Muon does?

    torchrun --nproc_per_node 2 train.py --plain --form full --dp 2 --zero 1 --optimizer muon
"""

import collectives as dist
from further.flat import FlatBucket
from parallel import placement_of


# ZeRO-1's Nths would cut through matrices. So rank r's part of a bucket is not an Nth: it is the matrices that r owns.
# Four matrices on 3 ranks:
#
#     weights, gradients    a a a a a a a a a a a a  b b b b c c c c  d d d d d d d d
#     owner                 0                        1                2
#
# Reduce-scatter and all-gather have parts of unlike sizes then. A rank sends all of K but what it owns in the first,
# all but what its right neighbour owns in the second; all ranks together what they send under ZeRO-1. But a step of
# the ring takes as long as its largest part: a bucket of one matrix takes N times as long as in Nths.

def owners(costs, group):
    """{parameter: the rank that steps it}: the costliest first, each to the rank that has least so far."""
    owner = {}
    loads = {}  # group -> what each of its ranks has to do
    for p in sorted(costs, key=costs.get, reverse=True):
        ranks = placement_of(p).average_over or group  # an expert's are few
        load = loads.setdefault(ranks, [0] * dist.get_world_size(ranks))
        owner[p] = load.index(min(load))
        load[owner[p]] += costs[p]
    return owner


class OwnedBucket(FlatBucket):
    """A FlatBucket whose shard has whole matrices, shard.matrices: [(which of its numbers, Matrices)]."""

    def __init__(self, owner, params, *options):
        self.owner = owner
        super().__init__(sorted(params, key=owner.get), *options)
        self.shard.matrices = []
        for p in self.mine:
            start = self.kept(p)[1].start
            self.shard.matrices += [(slice(start + here.start, start + here.stop), of) for here, of in p.matrices]

    def share_out(self, ranks, rank):
        every = [[p for p in self.params if self.owner[p] % ranks == r] for r in range(ranks)]  # or all, if ranks is 1
        self.mine = every[rank]
        self.sizes = [sum(p.numel() for p in some) for some in every]
        first = sum(self.sizes[:rank])
        self.own = slice(first, first + self.sizes[rank])

    def reduce_scatter(self, message, average):
        return dist.reduce_scatter(average, [*message.split(self.sizes)], dist.ReduceOp.AVG, self.group, True)

    def all_gather(self):
        return dist.all_gather([*self.weights.split(self.sizes)], self.weights[self.own], self.group, True)
