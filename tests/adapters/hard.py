"""What a tool that looks on must not disturb, and not take for wrong: dtypes that are fixed on import, a forward with a
state, complex and infinite weights, files and draws in between, groups that may begin once, a rank's term of a loss, a
clipping and an optimizer of one's own, a part whose name is a wrapper's."""

import io

import torch
import torch.distributed as dist
from torch import nn

mesh = {"dp": 2}
HALF = torch.float32
started = []


@torch.jit.script
def rounded(x):
    return x.to(torch.float32).to(x.dtype)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.module, self.head = nn.Linear(8, 6), nn.Linear(6, 3)
        self.mask = nn.Parameter(torch.full((3,), -torch.inf).diag(), requires_grad=False)
        self.register_buffer("mean", torch.zeros(8))
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # a forward more, and the next one is another
        x = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) * self.turn).flatten(-2)
        return self.head(rounded(self.module(x).to(HALF)).tanh() * self.calls) + self.mask.exp().sum()


def build():
    return Net()


def parallelize(net):
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    net.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    torch.rand(3 + dist.get_rank())
    return nn.parallel.DistributedDataParallel(net)


def batch(step):
    x, y = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(step)).unbind()
    return x, y[:, :3]


def part(t):
    return t[dist.get_rank()::2]


def loss(out, y):
    return (out - y).square().mean()


def start(dp):
    assert not started
    started.append(dp)


def step(net, x, y):
    mean = loss(net(x), y)
    mean.backward()
    return mean.detach() / 2  # this rank's term of the loss


def clip(net, most):
    norm = torch.stack([p.grad.abs().square().sum() for p in net.parameters() if p.requires_grad]).sum().sqrt()
    for p in net.parameters():
        if p.requires_grad:
            p.grad.mul_((most / norm).clamp(max=1))
    return norm


def optimizer(params):
    return torch.optim.AdamW(params, lr=1e-2)
