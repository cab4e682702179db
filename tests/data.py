"""Data parallelism on other modules; updates, loss scaling, low precision."""

import gc
import os
import unittest.mock
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import collectives as dist
import fast.adamw
import fast.zero
import kernels
import parallel
import train
from tests.collectives import ring_only
from tests.kernels import KERNEL_DEVICE
from tests.pool import GPUS, close
from tests.runs import TINY, log_of, run_training


# --------------------------------------------------------------------------------------- data parallel on other modules

class Odd(nn.Module):
    """Everything that trips a gradient hook: tied, frozen and unused layers, a branch, a buffer, sizes 1 and 7."""

    def __init__(self):
        super().__init__()
        self.first, self.tied, self.frozen = nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(7, 7)
        self.left, self.right, self.unused, self.scale = (nn.Linear(7, 1), nn.Linear(7, 1), nn.Linear(3, 3),
                                                          nn.Parameter(torch.ones(())))
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("count", torch.randn(()))

    def forward(self, x, right):
        h = torch.tanh(self.frozen(torch.tanh(self.first(x) + self.tied(2 * x))))
        return (self.right if right else self.left)(h) * self.scale


def odd_case(kind):
    """Two accumulated micro-batches a step, ranks that take different branches; two AdamW steps. Weights of every
    rank."""
    device, rank, size = torch.get_default_device(), dist.get_rank(), dist.get_world_size()
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(2, size, 4, 5))).to(device)

    def fresh(seed):
        with torch.device("cpu"):
            torch.manual_seed(seed)
            return Odd().double().to(device)

    def branch(i, r):
        return kind == "branches" and (i + r) % 3 == 0

    one = fresh(0)
    net = fresh(0 if kind == "naive" else rank)  # other weights on other ranks: the first rank's must win
    wrapped = net if kind == "naive" else parallel.DDP(net, bucket_mb=1e-4)  # a hundred bytes: many buckets
    steps = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-2, weight_decay=0.5)
             for m in (one, net)]
    for step in range(2):
        for opt in steps:
            opt.zero_grad()
        for i in range(2):
            for r in range(size):
                (one(x[i, r], branch(i, r)).square().mean() / size).backward()
        for i in range(2):
            mine = wrapped(x[i, rank], branch(i, rank)).square().mean()
            if kind != "naive" and i == 0:
                with wrapped.no_sync():
                    mine.backward()
            else:
                mine.backward()
        if kind == "naive":
            parallel.average_gradients(net)
        else:
            wrapped.finish_grad_sync()
        for (name, p), q in zip(net.named_parameters(), one.parameters()):
            if q.grad is None and p.requires_grad:
                assert not p.grad.any(), name  # what nobody used has a gradient of zero
                p.grad = None
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or close(p.grad.cpu(), q.grad.cpu()), name
        for opt in steps:
            opt.step()
    assert all(close(p.detach().cpu(), q.detach().cpu())
               for p, q in zip(net.state_dict().values(), one.state_dict().values()))
    assert one.unused.weight.equal(net.unused.weight)  # weight decay did not touch it
    return True


@pytest.mark.parametrize("kind", ["naive", "buckets", "branches"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_data_parallel_on_a_module_with_tied_frozen_unused_layers(pool, kind, size):
    pool(size).run(odd_case, kind)


@ring_only
def ddp_traffic():
    device = torch.get_default_device()
    net = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 77)).to(device)
    wrapped = parallel.DDP(net, bucket_mb=1.2)
    dist.reset_traffic()
    with wrapped.no_sync():
        wrapped(torch.ones(2, 512)).sum().backward()
    quiet = dist.traffic()
    wrapped(torch.ones(2, 512)).sum().backward()
    started = getattr(wrapped.reducer, "next", 1)  # while backward ran; the reference sends in `finish`
    wrapped.finish_grad_sync()
    assert not quiet and started >= 1
    return dist.traffic()["all_reduce"], [b.numel for b in wrapped.buckets], sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_data_parallel_sends_two_n_minus_one_over_n(pool, size, monkeypatch):
    """And nothing under no_sync, and each bucket once: gradients are K elements, padded per bucket to a multiple of
    N."""
    for log, buckets, k in pool(size).run(ddp_traffic):
        assert 0 <= sum(buckets) - k < size * len(buckets) and log.calls == len(buckets) > 1
        assert log.bytes == sum(2 * (size - 1) * b // size for b in buckets) * 4


def second_backward():
    wrapped = parallel.DDP(nn.Linear(3, 3))
    wrapped(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="run all but the last one under no_sync"):
        wrapped(torch.ones(2, 3)).sum().backward()
    wrapped.finish_grad_sync()


def test_second_backward_says_what_to_do(pool):
    pool(2).run(second_backward)


def updates_and_gathers(stage):
    """(buckets, what a step with AdamW's kernel did, whether all ranks' weights are equal and as PyTorch's AdamW's)."""
    kernels.use("triton")
    device, events, nets = torch.get_default_device(), [], []
    for optimizer in torch.optim.AdamW, fast.adamw.AdamW:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)).to(device)
        opt = fast.zero.GuardedOptimizer(net.parameters(), optimizer, bucket_mb=0.01, stage=stage, lr=0.1,
                                        compute_dtype=torch.bfloat16)
        net(torch.ones(2, 64, device=device, dtype=torch.bfloat16)).sum().backward()
        opt.finish_grad_sync()
        if optimizer is fast.adamw.AdamW:
            stepped, gather = opt.inner.stepped, dist.all_gather_into_tensor
            opt.inner.stepped = lambda shard: (events.append("update"), stepped(shard))
            with unittest.mock.patch.object(dist, "all_gather_into_tensor", lambda *args, **kwargs: (
                    events.append("gather"), gather(*args, **kwargs))[1]):
                opt.step()
            stepped(opt.shards[0])  # as if the step had failed after the first bucket
            opt.zero_grad()
            assert not opt.gathering
        else:
            opt.step()
        nets.append(torch.cat([p.detach().float().flatten() for p in net.parameters()]))
    kernels.use("auto")
    buckets, alone = len(opt.buckets), weakref.ref(opt)
    gc.disable()
    del opt
    assert alone() is None
    gc.enable()
    every = [torch.empty_like(nets[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(every, nets[0])
    return buckets, events, all(t.equal(nets[0]) for t in every) and close(nets[0], nets[1], 1e-2)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_are_gathered_beside_the_updates_after_them(pool, stage):
    if not kernels.HAVE_TRITON or pool.device_type != KERNEL_DEVICE:
        pytest.skip("no kernels here: no package triton, or it is for the machine's GPUs")
    for buckets, events, equal in pool(2).run(updates_and_gathers, stage):
        assert buckets > 2 and events == (["update", "gather"] if stage else ["update"]) * buckets and equal


def waits_of_units(stage):
    """What a forward after a step waits for, unit by unit, and whether its weights are those of a step that waits."""
    torch.manual_seed(0)
    nets, waited, device = [], [], torch.get_default_device()
    for late in True, False:
        net = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)]).double().to(device)
        for i, param in enumerate(net.parameters()):
            param.data.copy_(torch.linspace(-1, 1, param.numel()).view_as(param) + i)
        opt = fast.zero.GuardedOptimizer(net.parameters(), torch.optim.Adam, bucket_mb=0.01, stage=stage, lr=0.1)
        if late:
            opt.wait_in(net)
        for _ in range(2):
            x = torch.ones(2, 64, dtype=torch.float64, device=device)
            for layer in net:
                before = set(opt.gathering)
                x = layer(x)
                if late:
                    waited.append(sorted(i for bucket in before - set(opt.gathering) for i, other in enumerate(net)
                                         if opt.reducer.bucket_of[other.weight] is bucket))
            x.square().mean().backward()
            opt.finish_grad_sync()
            opt.step()
            opt.zero_grad()
        left = len(opt.gathering)
        nets.append(net.state_dict())
        assert not opt.gathering and left == late * len(opt.buckets)
    return waited, all(nets[0][name].equal(nets[1][name]) for name in nets[0])


@pytest.mark.parametrize("stage", [1, 2])
def test_a_unit_waits_for_its_own_weights_alone(pool, stage):
    """And state_dict for all. The first forward follows no step, so it waits for nothing."""
    for waited, equal in pool(2).run(waits_of_units, stage):
        assert waited == [[], [], [], [0], [1], [2]] and equal


def test_loss_scale_grows_and_backs_off():
    scaler = train.LossScale(start=8.0, interval=2)
    scales = [scaler.update(finite) or scaler.scale for finite in (True, True, True, False, False, False, True, True)]
    assert scales == [8, 16, 16, 8, 4, 2, 2, 4]


def test_low_precision_trains_like_float32(pool, text, tmp_path):
    """And bf16 keeps what bf16 alone would round away: a float32 master. Same data, 40 steps."""
    ends = {}
    for name, flags in [("fp32", []), ("bf16", ["--zero", "2"]), ("bf16-3", ["--zero", "3", "--reduce-dtype", "bf16"]),
                        ("fp16", ["--zero", "1"]), ("bf16-0", [])]:
        out = str(tmp_path / name)
        os.mkdir(out)
        pool(2).run(run_training,
                    TINY + ["--data", text, "--dtype", name[:4], "--steps", "40", "--sample", "0", "--eval-every", "40",
                            "--lr", "0.01", "--warmup-steps", "3", "--out", out, *flags,
                            "--device", "cuda" if GPUS and pool(2).device_type == "cuda" else "cpu"])
        ends[name] = log_of(out)[-1]["val_loss"]
    assert all(abs(end / ends["fp32"] - 1) < 0.02 for end in ends.values()), ends
