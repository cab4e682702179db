"""Data parallelism for a model of your own: what if ranks have other models, or the model has buffers that change?

    model = DDP(module, group)

A BucketDDP with what PyTorch's DistributedDataParallel does besides. docs/own-model.md.
"""

import zlib

import torch
from torch.distributed import get_process_group_ranks

import collectives as dist
from further.buckets import BucketDDP
from further.channels import give_channels, hold_where_order_may_differ
from parallel import group_or_world


class DDP(BucketDDP):
    """A BucketDDP of any module. ValueError where ranks have other models than the first one.

    Parameters and buffers begin as the first rank's. broadcast_buffers: once a step the first rank's buffers, such as
    BatchNorm's running statistics, replace the others'. all_used: see `hold_where_order_may_differ`.
    """

    def __init__(self, module, group=None, bucket_mb=None, broadcast_buffers=True, all_used=False):
        refuse_unlike([*module.parameters(), *module.buffers()], group_or_world(group))
        super().__init__(module, group, bucket_mb)
        give_channels(self.buckets)
        hold_where_order_may_differ(self.reducers[0], all_used)
        broadcast_in_one([*module.buffers()], self.group)
        self.kinds = {p: kind_of(p) for p in module.parameters()}
        self.broadcast_buffers = broadcast_buffers

    def forward(self, *args, **kwargs):
        refuse_new(self.module, self.kinds)
        refuse_changed(self.kinds)
        return super().forward(*args, **kwargs)

    def finish_grad_sync(self):
        refuse_new(self.module, self.kinds)
        super().finish_grad_sync()
        if self.broadcast_buffers:
            broadcast_in_one([*self.module.buffers()], self.group)  # asked anew: a forward may have assigned others

    def __deepcopy__(self, memo):
        raise RuntimeError("a DDP is not copied: copy its module, copy.deepcopy(model.module)")


def refuse_unlike(tensors, group):
    """ValueError on all ranks of the group unless each has as many parameters and buffers, of the same shapes and
    dtypes, with the same requires_grad: else gradients of different parameters would be added up."""
    kinds = [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
    ranks = of_each_rank([len(kinds), sum(t.numel() for t in tensors), zlib.crc32(repr(kinds).encode())], group)
    first = ranks[0][1]
    for rank, (count, elements, kind) in ranks:
        if kind != first[2]:
            raise ValueError(f"rank {rank} has another model than the group's first rank: {count} parameters and "
                             f"buffers of {elements} elements, not {first[0]} of {first[1]}, or in other shapes, "
                             "dtypes or requires_grad")


def of_each_rank(numbers, group):
    """[(rank, its numbers), ...] of a group. numbers: this rank's, integers, as many on each rank."""
    mine = torch.tensor(numbers, device=dist.link_of(group).device)
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(ranks, mine, group)
    return [*zip(get_process_group_ranks(group), torch.stack(ranks).tolist())]


def refuse_new(module, known):
    """RuntimeError for parameters that came into the module when it was wrapped already: nobody averages their
    gradients."""
    if new := [name for name, param in module.named_parameters() if param not in known]:
        raise RuntimeError(f"{new[0]} came into the module after it was wrapped: change a module before that")


def refuse_other_order(reducer, group):
    """RuntimeError on all ranks unless each has gathered and sent the same buckets in the same order since the last
    step: where a rank leaves out a layer, ZeRO-2 and 3 would average gradients of different parameters."""
    order = [*reducer.started, *(f"bucket {reducer.buckets.index(bucket)}" for bucket in reducer.unsent())]
    mine = [len(order), zlib.crc32(repr(order).encode())]
    for rank, of_rank in of_each_rank(mine, group):
        if of_rank != mine:
            raise RuntimeError(f"rank {rank} has used other parameters in backward than this one: ZeRO-2 and 3 want "
                               "the same on all ranks, DDP and stage=1 take a layer left out for zeros")


def kind_of(param):
    return tuple(param.shape), param.dtype, param.device


def refuse_changed(kinds):
    """RuntimeError for parameters that were cast or moved when the model was wrapped already."""
    for param, kind in kinds.items():
        if kind_of(param) != kind:
            raise RuntimeError(f"a parameter is now {kind_of(param)}, and was {kind}: cast or move a module before it "
                               "is wrapped")


@torch.inference_mode()  # an evaluation may have made a buffer in it
def broadcast_in_one(buffers, group):
    """The first rank's buffers to all ranks, in one message of bytes."""
    if not buffers:
        return
    message = torch.cat([buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers])
    dist.broadcast(message, group=group, group_src=0)
    for buffer, part in zip(buffers, message.split([buffer.nbytes for buffer in buffers])):
        buffer.data.copy_(part.clone().view(buffer.dtype).view(buffer.shape))  # .data: no backward uses these numbers
