"""PyTorch's pipeline. A stage's names are the whole model's."""

import torch
import torch.distributed as dist
from mlp import batch, build, loss  # noqa: F401
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

mesh, micro_batches = {"pp": 2}, 4


def parallelize(net):
    global schedule
    rank = dist.get_rank()
    mine = nn.Sequential()
    for i in range(1) if rank == 0 else range(1, 3):
        mine.add_module(str(i), net[i])
    schedule = Schedule1F1B(PipelineStage(mine, rank, 2, torch.device("cpu")), 4, loss_fn=loss)
    return mine


def step(net, x, y):
    losses = []
    if dist.get_rank() == 0:
        schedule.step(x)
        return None
    schedule.step(target=y, losses=losses)
    return torch.stack(losses).mean()
