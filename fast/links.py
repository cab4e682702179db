"""Which link serves a group: what `fast.on()` puts into collectives.LINKS.

All that it chooses between GPUs of a node saves 2.8 % of a step of GPT-2 medium (DDP) to 30 % (--tp --sp) over rings of
messages, on two H200s.
"""

import torch.distributed as torch_dist

from collectives import node_of
from fast.nccl import NcclLink, NodeLink
from safe.messages import Watched, WatchedLevels


class TwoLevelNcclLink(WatchedLevels, NcclLink):
    """GPUs of several nodes: copies and windows inside, rings between."""

    def __init__(self, group, levels):
        super().__init__(group, levels)
        self.inside.replays = self.between.replays = self.replays  # one recording holds the work of all three links


def fast_levels(group, levels):
    """As further/nodes.py's TwoLevels."""
    return (TwoLevelNcclLink if torch_dist.get_backend(group) == "nccl" else WatchedLevels)(group, levels)


def fast_link(group):
    """The fastest link for this group."""
    if torch_dist.get_backend(group) != "nccl":
        return Watched(group)
    nodes = set(map(node_of, torch_dist.get_process_group_ranks(group)))
    return NodeLink(group) if len(nodes) == 1 else NcclLink(group)


LINKS = {"ours": fast_link, "nodes": fast_levels}  # the others are safe/'s
