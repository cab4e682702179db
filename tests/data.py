"""Data parallelism on other modules; updates, loss scaling."""

import weakref
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

import collectives as dist
import fast.adamw
import fast.zero
import kernels
import parallel
from further.loss_scale import LossScale
from tests.pool import close, needs_kernels, on_both, on_cpus_both, on_ranks, parametrize, uncollected


# ------------------------------------------------------------------------------------------------------ other modules

class Odd(nn.Module):
    """Everything that trips a gradient hook: tied, frozen and unused layers, a branch, a buffer, sizes 1 and 7,
    parameters in a list that has no forward of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.tied, self.frozen = nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(7, 7)
        self.left, self.right, self.unused, self.scale = (nn.Linear(7, 1), nn.Linear(7, 1), nn.Linear(3, 3),
                                                          nn.Parameter(torch.ones(())))
        self.tied.weight = self.first.weight
        self.words = nn.Embedding(4, 5)
        self.frozen.requires_grad_(False)
        self.listed = nn.ParameterList(torch.randn(7) for _ in range(2))
        self.register_buffer("count", torch.randn(()))

    def forward(self, x, right):
        x = x + self.words(torch.arange(4, device=x.device))
        h = torch.tanh(self.frozen(torch.tanh(self.first(x) + self.tied(2 * x))))
        return (self.right if right else self.left)(self.listed[0] * h + self.listed[1]) * self.scale


def module_and_inputs(kind, seed):
    """A module nobody here wrote, and its inputs: one for each of 2 micro-batches and each rank."""
    torch.manual_seed(seed)
    size, device = dist.get_world_size(), torch.get_default_device()
    net, shape, more = Odd(), (4, 5), lambda i, rank: [kind == "branches" and (i + rank) % 3 == 0]
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0, batch_first=True)
        net, shape, more = nn.TransformerEncoder(layer, 2, nn.LayerNorm(12)), (2, 5, 12), lambda i, rank: []
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(2, size, *shape))).to(device)
    return net.double().to(device), [[(x[i, rank], *more(i, rank)) for rank in range(size)] for i in range(2)]


def stepped_by(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


@on_both
@parametrize("kind", ["odd", "encoder", "branches"])
@on_ranks(3)
def test_data_parallel_on_modules_nobody_here_wrote(kind, rank, size):
    """Three steps of SGD with momentum over two micro-batches, clipped, against one process. Before the second,
    gradients are not zeroed, so they add up. Ranks take different branches."""
    (one, inputs), (net, _) = module_and_inputs(kind, 0), module_and_inputs(kind, 0)
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


# -------------------------------------------------------------------------------------- gathers beside what comes after

def layers_and_optimizer(optimizer, stage, **options):
    """Three layers, the same on every rank, and what steps them, in several buckets."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).to(torch.get_default_device())
    optimizer = partial(optimizer, lr=0.1)
    return net, fast.zero.AheadOptimizer(net.parameters(), optimizer, bucket_mb=0.01, stage=stage, **options)


@parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_weights_are_gathered_beside_the_updates_after_them(stage):
    """With AdamW's kernel. Weights are then equal on all ranks, and near those of PyTorch's AdamW."""
    needs_kernels()
    kernels.use("triton")
    events, after, gather = [], [], dist.all_gather_into_tensor
    for adamw in torch.optim.AdamW, fast.adamw.AdamW:
        net, opt = layers_and_optimizer(adamw, stage, compute_dtype=torch.bfloat16)
        net(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
        opt.finish_grad_sync()
        stepped = getattr(opt.inner, "stepped", None)
        opt.inner.stepped = lambda shard: (events.append("update"), stepped(shard))
        events.clear()
        with patch.object(dist, "all_gather_into_tensor", lambda *args, **options: (
                events.append("gather"), gather(*args, **options))[1]):
            opt.step()
        after.append(torch.cat([p.detach().float().flatten() for p in net.parameters()]))
    assert not opt.gathering and close(*after, 1e-2)
    dist.broadcast(first := after[1].clone(), 0)
    assert after[1].equal(first)
    buckets, alone = len(opt.buckets), weakref.ref(opt)
    assert buckets > 2 and events == (["update", "gather"] if stage else ["update"]) * buckets
    with uncollected():
        del opt
        assert alone() is None


@parametrize("stage", [1, 2])
@on_ranks(2)
def test_a_unit_waits_for_its_own_weights_alone(stage):
    """And state_dict for all; the weights are those of a step that waits. The first forward follows no step, so it
    waits for nothing."""
    states, on_their_way = [], []
    for late in True, False:
        net, opt = layers_and_optimizer(torch.optim.Adam, stage)
        if late:
            opt.wait_in(net)
        for _ in range(2):
            x = torch.ones(2, 64)
            for layer in net:
                x = layer(x)
                on_their_way.append([opt.bucket_of[other.weight] in opt.gathering for other in net])
            x.square().mean().backward()
            opt.finish_grad_sync()
            opt.step()
            opt.zero_grad()
        left = len(opt.gathering)
        states.append(net.state_dict())
        assert not opt.gathering and left == late * len(opt.buckets)
    here = [[False, False, False]]
    assert on_their_way == 3 * here + [[False, True, True], [False, False, True]] + 7 * here
    assert all(states[0][name].equal(states[1][name]) for name in states[0])


# -------------------------------------------------------------------------------------------------------- low precision

def test_loss_scale_grows_and_backs_off():
    scaler = LossScale(start=8.0, interval=2)
    scales = [scaler.update(finite) or scaler.scale for finite in (True, True, True, False, False, False, True, True)]
    assert scales == [8, 16, 16, 8, 4, 2, 2, 4]
