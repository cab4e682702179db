"""PyTorch's DDP, three micro-batches, clipping."""

import torch.distributed as dist
from mlp import batch, build, loss  # noqa: F401
from torch import nn

mesh, micro_batches = {"dp": 2}, 3


def parallelize(net):
    net = nn.parallel.DistributedDataParallel(net)
    return net


def part(t):
    return t.chunk(2)[dist.get_rank()]


def step(net, x, y):
    total = 0
    for i, (a, b) in enumerate(zip(x.chunk(3), y.chunk(3))):
        net.require_backward_grad_sync = i == 2
        some = loss(net(a), b) / 3
        some.backward()
        total += some.detach()
    return total


def clip(net, most):
    return nn.utils.clip_grad_norm_(net.parameters(), most)
