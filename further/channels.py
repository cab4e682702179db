"""Channels: what if two objects send in one group, each in an order of its own?

All ranks must start a group's collectives in the same order. What starts under backward does not: a rank that leaves
out a layer sends that layer's bucket later than the others do, perhaps after another model's bucket, or after an
all_reduce of the caller's. In a channel of its own each object keeps its own order, and meets nobody else's messages.
DDP, ShardedOptimizer and FSDP of a module of your own have one each.
"""

import weakref

import torch.distributed as torch_dist

import collectives as dist


class Channel:
    """Takes a group's place in the functions of collectives.py, for one object. Make it on all ranks of the group.

        channel = Channel(group)
        dist.all_reduce(tensor, group=channel, async_op=True)

    apart: whether it is one, a number in the messages' tags and a thread. NCCL knows no tags, and a communicator for
    each channel would not do: a kernel that waits for another rank can hold up this GPU, and the other rank waits for
    it. There, and with the library's collectives, a channel is the group itself. So what may come in any order must
    wait until all ranks are at the same place.
    """

    def __init__(self, group=None):
        self.group = group or torch_dist.group.WORLD
        link = dist.link_of(self.group)
        self.apart = link.knows_tags
        self.own = None
        if self.apart:
            self.own = link.like_this()
            self.own.channel = dist.process.channels[self.group] = 1 + dist.process.channels.get(self.group, 0)
            weakref.finalize(self, self.own.close).atexit = False

    @property
    def link(self):
        return self.own or dist.link_of(self.group)

    def size(self):  # torch's get_world_size asks
        return torch_dist.get_world_size(self.group)


def give_channels(buckets):
    """Let the buckets of one object travel apart from all else that their groups send: a channel for each group."""
    channels = {}
    for bucket in buckets:
        if bucket.group not in channels:
            channels[bucket.group] = Channel(bucket.group)
        bucket.channel = channels[bucket.group]


def hold_where_order_may_differ(reducer, all_used):
    """Let buckets leave in finish_grad_sync alone, where all ranks are, if they have no channel of their own: on NCCL
    and with the library's collectives. Else a rank that leaves out a layer would send them in another order than other
    ranks. all_used: no rank leaves out anything, nor starts collectives of its own between backward and
    finish_grad_sync; so buckets leave under backward there, too, which hides their time."""
    reducer.holds = not all_used and not all(bucket.channel.apart for bucket in reducer.buckets)
