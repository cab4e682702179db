"""Right in 16 bits alone, where gradients in 32 bits are copies: in fp32 and fp64 they are the gradients themselves."""

import torch
import torch.distributed as dist
from torch import nn

mesh = {"dp": 2}


def build():
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def parallelize(net):
    return net


def batch(step):
    x, y = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(step)).unbind()
    return x, y[:, :3]


def part(t):
    return t.chunk(2)[dist.get_rank()]


def loss(out, y):
    return (out - y).square().mean()


def step(net, x, y):
    mean = loss(net(x), y)
    mean.backward()
    for p in net.parameters():
        g = p.grad.to(torch.float32)  # a copy of 16 bits, no copy of 32
        spare = p.grad.to(torch.float32)
        spare.zero_()                 # such as a buffer that is used again
        dist.all_reduce(g)
        p.grad = (g / 2).to(p.dtype)
    return mean
