"""ZeRO-1 by hand: each rank steps its parameters, and sends them. Nobody has the others' gradients, or needs them."""

import torch
import torch.distributed as dist
from mlp import batch, build, loss  # noqa: F401

mesh = {"dp": 2}


def parallelize(net):
    return net


def part(t):
    return t.chunk(2)[dist.get_rank()]


def step(net, x, y):
    mean = loss(net(x), y)
    mean.backward()
    for i, p in enumerate(net.parameters()):
        dist.reduce(p.grad, i % 2)
        p.grad = p.grad / 2 if i % 2 == dist.get_rank() else None
    return mean


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-2)


own = []


def update(net):
    params = [*net.parameters()]
    if not own:
        own.append(optimizer(params[dist.get_rank()::2]))
    own[0].step()
    for i, p in enumerate(params):
        dist.broadcast(p.data, i % 2)
        p.grad = None
