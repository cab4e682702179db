"""Channels: what if two objects send in one group, each in an order of its own?

All ranks must start a group's collectives in the same order. What starts under backward does not: a rank that leaves
out a layer sends that layer's bucket later than the others do, perhaps after another model's bucket, or after an
all_reduce of the caller's. In a channel of its own each object keeps its own order, and meets nobody else's messages.
DDP, ShardedOptimizer and FSDP of a module of your own have one each.
"""

import weakref

import torch
import torch.distributed as torch_dist

import collectives as dist


class Channel:
    """Takes a group's place in the functions of collectives.py, for one object. Make it on all ranks of the group.

        channel = Channel(group)
        dist.all_reduce(tensor, group=channel, async_op=True)

    On gloo it is a number in the messages' tags, and a thread. Where messages have no tags, as with NCCL, it is a process
    group of the same ranks, which the next channel reuses when this one is gone on all of them.
    """

    def __init__(self, group=None):
        group = group or torch_dist.group.WORLD
        if group not in dist.process.channels:
            dist.process.channels[group] = Channels(group)
        self.link = dist.process.channels[group].next_link()
        weakref.finalize(self, self.link.close).atexit = False

    def size(self):  # torch's get_world_size asks
        return self.link.size


class Channels:
    """Those of a group. count: how many there were. links: those that are in use, {process group: weak reference}."""

    def __init__(self, group):
        self.group = group
        self.count = 0
        self.others = {}

    def next_link(self):
        link = dist.link_of(self.group)
        if isinstance(link, dist.NoLink) or link.size == 1:
            return link
        self.count += 1
        other = self.group if link.knows_tags else self.another_group()
        apart = link.like_this(other)
        apart.channel = self.count
        if other is not self.group:
            self.others[other] = weakref.ref(apart)
        return apart

    def another_group(self):
        """A process group of the same ranks: one that no rank uses any more, or a new one."""
        known = torch_dist.distributed_c10d._world.pg_names
        self.others = {other: user for other, user in self.others.items() if other in known}
        mine = [len(known), *(user() is None for user in self.others.values())]
        mine = torch.tensor(mine, device=dist.link_of(self.group).device)
        ranks = [torch.empty_like(mine) for _ in range(torch_dist.get_world_size(self.group))]
        dist.all_gather(ranks, mine, self.group)
        groups, *free = torch.stack(ranks).T.tolist()
        for other, free_there in zip(self.others, free):
            if all(free_there):
                return other
        if len(set(groups)) > 1:  # PyTorch names a group that some ranks alone make after this number
            raise RuntimeError(f"ranks have made different numbers of process groups, {groups}: make groups on all "
                               "ranks, before models are wrapped")
        members = torch_dist.get_process_group_ranks(self.group)
        if getattr(torch_dist.group.WORLD, "bound_device_id", None):
            return torch_dist.split_group(self.group, [[*range(len(members))]])
        return torch_dist.new_group(members, use_local_synchronization=True)

    def close(self, all_groups):
        """Called when the group is destroyed, or all are."""
        for other in () if all_groups else self.others:
            torch_dist.destroy_process_group(other)


def give_channels(buckets):
    """Let the buckets of one object travel apart from all else that their groups send: a channel for each group."""
    channels = {}
    for bucket in buckets:
        if bucket.group not in channels:
            channels[bucket.group] = Channel(bucket.group)
        bucket.channel = channels[bucket.group]
