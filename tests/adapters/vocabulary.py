"""A head whose vocabulary is padded and cut, and a loss with a z-loss, of which nobody has whole logits: both ways by
hand."""

import torch
import torch.distributed as dist
from torch import nn

mesh = {"tp": 2}
Z = 0.1  # of the z-loss: Z times the square of log(sum exp z), for each token


def build():
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 9, bias=False))


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(20, 8, generator=draw), torch.randint(9, (20,), generator=draw)


def loss(out, y):
    return nn.functional.cross_entropy(out, y) + Z * out.logsumexp(-1).square().mean()


class Copy(torch.autograd.Function):
    """f: each rank's columns have a term of the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


def parallelize(net):
    padded = nn.functional.pad(net[2].weight.data, (0, 0, 0, 1))
    net[2].weight = nn.Parameter(padded.chunk(2)[dist.get_rank()])
    net[2].register_forward_pre_hook(lambda module, inputs: (Copy.apply(inputs[0]),))
    return net


class Loss(torch.autograd.Function):
    """Of logits (n, V/N) and targets (n)."""

    @staticmethod
    def forward(ctx, z, y):
        first = 5 * dist.get_rank()
        z = z.masked_fill(first + torch.arange(5) >= 9, -torch.inf)
        own = y - first
        mine = (own >= 0) & (own < 5)
        own = own.clamp(0, 4)
        sums = torch.stack([z.exp().sum(-1), z.gather(1, own[:, None])[:, 0] * mine])
        dist.all_reduce(sums)
        log = sums[0].log()
        softmax = z.exp() / sums[0, :, None]
        ctx.save_for_backward(softmax, log, own, mine)
        return (log - sums[1] + Z * log.square()).mean()

    @staticmethod
    def backward(ctx, grad):
        softmax, log, own, mine = ctx.saved_tensors
        dz = softmax * (1 + 2 * Z * log[:, None])
        dz.scatter_add_(1, own[:, None], -1.0 * mine[:, None])
        return grad * dz / len(dz), None


def step(net, x, y):
    mean = Loss.apply(net(x), y)
    mean.backward()
    return mean
