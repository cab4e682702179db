"""Groups of what train.make_groups leaves out: context and expert parallelism, ZeRO within a node, nodes.

    dp_cp             the ranks that average gradients: dp x cp
    shard, replicate  ZeRO's: `zero_within` neighbours in dp_cp share out the states (None: all of it does); `replicate`
                      are the ranks with the same shard, or None. (HSDP's groups of these names)
    ep, same_experts  of `split_experts`: who share out the experts, and who have the same ones
"""

import torch

import collectives as dist
from further.nodes import two_levels


def ranks_of_dp_cp(mesh):
    """The ranks that keep the same parameters, those of dp and cp: a row for each place in pp and tp. For pp 2, dp 2,
    tp 2 [[0, 2], [1, 3], [4, 6], [5, 7]]."""
    return mesh.mesh.permute(0, 3, 1, 2).flatten(2).flatten(0, 1)                             # (pp tp, dp cp)


def groups_of(grids):
    """Of the grid of ranks that this rank is in: [its group along the rows, its group along the columns]."""
    return sum([dist.rows_and_columns(grid) for grid in grids.tolist()], [])


def split_experts(mesh, n):
    """[the group of n neighbours along dp who share out the experts, the group of the ranks that keep the same experts
    as this one]. n must divide dp."""
    neighbours = mesh.mesh.unflatten(1, (-1, n)).permute(0, 4, 1, 3, 2)                       # (pp, tp, dp/n, cp, n)
    return groups_of(neighbours.flatten(0, 1).flatten(1, 2))                                  # (pp tp, dp/n cp, n)


def add_groups(groups, mesh, layout):
    """Give train.make_groups' groups those that this layout has besides. Call it on all ranks."""
    two_levels(None, [range(mesh.size())])
    dp_cp = ranks_of_dp_cp(mesh).reshape(-1, layout.replicas)
    if layout.cp > 1:
        groups.dp_cp, _ = torch.distributed.new_subgroups_by_enumeration(dp_cp.tolist())
    two_levels(groups.dp_cp, dp_cp.tolist())  # they send most
    groups.shard = groups.dp_cp
    if layout.zero and layout.zero_within not in (None, layout.replicas):
        groups.shard, groups.replicate = groups_of(dp_cp.unflatten(1, (-1, layout.zero_within)))
    if layout.ep > 1:
        groups.ep, groups.same_experts = split_experts(mesh, layout.ep)
