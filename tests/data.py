"""Data parallelism on other modules; updates, loss scaling."""

import numpy as np
import torch
from torch import nn

import collectives as dist
import parallel
from further.loss_scale import LossScale
from tests.pool import close, on_both, on_cpus_both, on_ranks, parametrize


# ------------------------------------------------------------------------------------------------------ other modules

class Odd(nn.Module):
    """What an average may trip over: tied, frozen and unused layers, a branch that not all ranks take, a number."""

    def __init__(self):
        super().__init__()
        self.first, self.tied, self.frozen = nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(7, 7)
        self.left, self.right, self.unused = nn.Linear(7, 1), nn.Linear(7, 1), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x, right):
        h = torch.tanh(self.frozen(torch.tanh(self.first(x) + self.tied(2 * x))))
        return (self.right if right else self.left)(h) * self.scale


def module_and_inputs(branches, seed):
    """A module nobody here wrote, and its inputs: one for each of 2 micro-batches and each rank."""
    torch.manual_seed(seed)
    size, device = dist.get_world_size(), torch.get_default_device()
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(2, size, 4, 5))).to(device)

    def right(i, rank):
        return branches and (i + rank) % 3 == 0

    return Odd().double().to(device), [[(x[i, rank], right(i, rank)) for rank in range(size)] for i in range(2)]


@on_both
@parametrize("branches", [False, True])
@on_ranks(3)
def test_data_parallel_on_modules_nobody_here_wrote(branches, rank, size):
    """Three steps of SGD with momentum over two micro-batches, clipped, against one process. Before the second,
    gradients are not zeroed, so they add up. Ranks take different branches."""
    (one, inputs), (net, _) = module_and_inputs(branches, 0), module_and_inputs(branches, 0)
    trained = [[p for p in some.parameters() if p.requires_grad] for some in (one, net)]
    reference, opt = (torch.optim.SGD(params, lr=0.1, momentum=0.9) for params in trained)
    for step in range(3):
        if step != 1:
            reference.zero_grad()
            opt.zero_grad()
        for of_ranks in inputs:
            for x in of_ranks:
                (one(*x).square().mean() / size).backward()
            net(*of_ranks[rank]).square().mean().backward()
        parallel.average_gradients(net)
        norm = parallel.clip_grad_norm_(net.parameters(), 0.05)
        assert close(norm, nn.utils.clip_grad_norm_(one.parameters(), 0.05)) and norm > 0.05
        reference.step()
        opt.step()
    for (name, ours), theirs in zip(net.named_parameters(), one.parameters(), strict=True):
        assert close(ours.detach(), theirs.detach()), name


@on_cpus_both  # on GPUs the CPU is ahead of all messages anyway
@on_ranks(2)
def test_an_average_is_on_its_way_while_others_compute(rank):
    """Rank 1 begins its own when rank 0 has come back, so nothing can have arrived there."""
    net, x, come_back = nn.Linear(8, 8), torch.ones(2, 8), torch.zeros(1)
    unit = parallel.Unit([*net.parameters()], None, 0, torch.float32)
    if rank == 1:
        dist.recv(come_back, 0)
    net(x * (rank + 1)).sum().backward()
    unit.start_average()
    if rank == 0:
        handle, _, _ = unit.sending
        assert not handle.is_completed()
        dist.send(come_back, 1)
    unit.finish_average()
    assert unit.stepped[net.weight].grad.eq(3).all()


@on_ranks(2)
def test_clipping_takes_what_pytorch_s_takes():
    """A generator."""
    weight = nn.Parameter(torch.zeros(4, 3))
    weight.grad = torch.ones(4, 3)
    assert close(parallel.clip_grad_norm_(iter([weight]), 0), 12 ** 0.5, 1e-6)
    assert parallel.clip_grad_norm_(iter(()), 1.0) == 0


# -------------------------------------------------------------------------------------------------------- low precision

def test_loss_scale_grows_and_backs_off():
    scaler = LossScale(start=8.0, interval=2)
    scales = [scaler.update(finite) or scaler.scale for finite in (True, True, True, False, False, False, True, True)]
    assert scales == [8, 16, 16, 8, 4, 2, 2, 4]
