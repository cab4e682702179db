"""ZeRO on other modules: what it sends, and steps that are dropped."""

import functools
import contextlib
import copy
import dataclasses
import unittest.mock

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

import collectives as dist
import fast.graphs
import parallel
from tests.collectives import ring_only
from tests.data import Odd
from tests.layouts import SMALL, tokens_of
from tests.pool import close


# ------------------------------------------------------------------------------------------------ ZeRO on other modules

def module_and_input(kind):
    """A module nobody here wrote, and a (2 micro-batches, ranks, ...) input for it."""
    rng, size = np.random.default_rng(3), dist.get_world_size()
    if kind == "odd":
        net, shape = Odd(), (2, size, 4, 5)
        net.forward = lambda x, _forward=net.forward: _forward(x, False)
    elif kind == "mlp":
        net, shape = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)),
                      (2, size, 4, 6))
        net[2].weight = net[0].weight
        net[3].bias.requires_grad_(False)
    elif kind == "encoder":
        net = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, 20, dropout=0, batch_first=True), 2,
                                    nn.LayerNorm(12))
        shape = (2, size, 2, 5, 12)
    return (net.double().to(torch.get_default_device()),
            torch.from_numpy(rng.normal(size=shape)).to(torch.get_default_device()))


def zero_on(kind, stage):
    """Three steps of SGD with momentum over two micro-batches, clipped, against one process; then the state dict."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def fresh(seed):
        torch.manual_seed(seed)
        return module_and_input(kind)

    (one, x), (net, _) = fresh(0), fresh(0)
    start = [p.detach().clone() for p in one.parameters()]
    if stage < 3:
        opt = parallel.ShardedOptimizer(net.parameters(), torch.optim.SGD, stage=stage, bucket_mb=1e-3, lr=0.1,
                                        momentum=0.9)
        model, sync, params = net, opt, opt.shards
    else:
        model = sync = parallel.FSDP(net)
        params = list(model.parameters())
        opt = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        for p in params:
            assert p.numel() <= sum(q.numel() for q in start) and p.dtype == torch.float64
    reference = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for step in range(3):
        reference.zero_grad()
        opt.zero_grad()
        for i in range(2):
            for r in range(size):
                (one(x[i, r]).square().mean() / size).backward()
            with sync.no_sync() if i == 0 else contextlib.nullcontext():
                model(x[i, rank]).square().mean().backward()
        sync.finish_grad_sync()
        norm = parallel.clip_grad_norm_(params, 0.05, [torch_dist.group.WORLD])
        assert close(norm.cpu(), nn.utils.clip_grad_norm_(one.parameters(), 0.05).cpu()) and norm > 0.05
        reference.step()
        opt.step()
    with torch.no_grad():
        assert close(model(x[0, 0]).cpu(), one(x[0, 0]).cpu())
    state = model.full_state_dict() if stage == 3 else dict(net.named_parameters())
    for name, p in one.named_parameters():
        assert close(state[name].detach().cpu(), p.detach().cpu()), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["odd", "mlp", "encoder"])
def test_zero_on_modules_nobody_here_wrote(pool, kind, stage):
    for size in (2, 3):
        pool(size).run(zero_on, kind, stage)


def start_apart(stage):
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(torch.get_default_device())
    net.register_buffer("count", torch.randn(()))
    if stage == 3:
        return [t.cpu().numpy() for t in (*parallel.FSDP(net).full_state_dict().values(), net.count)]
    parallel.ShardedOptimizer(net.parameters(), torch.optim.SGD, stage=stage, lr=1.0)
    return [p.detach().cpu().numpy() for p in net.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_makes_ranks_equal_that_start_apart(pool, stage):
    first, *others = pool(3).run(start_apart, stage)
    assert all((a == b).all() for other in others for a, b in zip(first, other))


@ring_only
def zero_traffic(stage, micro_batches, reduce_dtype=None, within=None):
    """(Bytes a step of each collective, of K elements), for K float32 elements that divide evenly."""
    groups, ranks = {}, range(dist.get_world_size())
    if within:
        grid = [ranks[first:first + within] for first in range(0, len(ranks), within)]
        groups = dict(zip(("group", "between"), dist.rows_and_columns(grid)))
    net = nn.Sequential(*[nn.Linear(48, 48, bias=False) for _ in range(4)]).to(torch.get_default_device())
    if stage == 0:
        model = sync = parallel.DDP(net)
        opt = torch.optim.SGD(net.parameters(), 0.1)
    elif stage < 3:
        model, opt = net, parallel.ShardedOptimizer(net.parameters(), torch.optim.SGD, stage=stage, bucket_mb=0.009,
                                                    reduce_dtype=reduce_dtype, lr=0.1, **groups)
        sync = opt
    else:
        model = sync = parallel.FSDP(net, reduce_dtype=reduce_dtype, **groups)
        opt = torch.optim.SGD(model.parameters(), 0.1)
    dist.reset_traffic()
    for i in range(micro_batches):
        with sync.no_sync() if i < micro_batches - 1 else contextlib.nullcontext():
            model(torch.ones(2, 48)).sum().backward()
        if stage >= 2:  # full gradients never live across micro-batches; at most two buckets of four are under way
            reducer = opt.reducer if stage == 2 else model.reducers[0]
            assert all(p.grad is None for p in net.parameters()) and all(b.total is None for b in reducer.buckets)
            assert len(getattr(reducer, "under_way", ())) <= 2
    sync.finish_grad_sync()
    opt.step()
    if stage == 3:
        assert all(not b.weights.untyped_storage().size() for b in model.buckets)
    elif stage:
        opt.zero_grad()
        assert all(b.total is None and b.shard.grad is None for b in opt.buckets)  # forward needs the room
    return {name: t.bytes for name, t in dist.traffic().items()}, 4 * sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_zero_sends_what_the_table_says(pool, size, micro_batches):
    m = micro_batches
    for stage, law in enumerate([{"all_reduce": 2}, {"reduce_scatter_tensor": 1, "all_gather_into_tensor": 1},
                                 {"reduce_scatter_tensor": m, "all_gather_into_tensor": 1},
                                 # The last unit of 4: once.
                                 {"reduce_scatter_tensor": m, "all_gather_into_tensor": 2 * m - m / 4}]):
        for sent, k in pool(size).run(zero_traffic, stage, m):
            assert sent == {name: times * (size - 1) * k // size for name, times in law.items()}, stage
        if stage:
            for sent, k in pool(size).run(zero_traffic, stage, m, torch.bfloat16):
                assert (sent["reduce_scatter_tensor"]
                        == law["reduce_scatter_tensor"] * (size - 1) * k // size // 2), stage


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_hybrid_sharding_sends_little_between(pool, micro_batches, dtype):
    """The table's with 2 for N inside; between two groups once a step an Nth of the gradients, however many
    micro-batches."""
    half = 2 if dtype else 1
    for stage in (1, 2, 3):
        for sent, k in pool(4).run(zero_traffic, stage, micro_batches, dtype, 2):
            assert sent["all_reduce"] == 2 * (2 - 1) / 2 * k / 2 / half, stage
            assert sent["reduce_scatter_tensor"] == (1 if stage == 1 else micro_batches) * k / 2 / half, stage


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x, order):
        for i in order:
            x = self.rows[i](x)
        return x


def units_in_time():
    """Which units are whole when each computes: itself and the next, in forward and backward; none that is dropped is
    still on its way."""
    net, seen = Rows().to(torch.get_default_device()), []
    model = parallel.FSDP(net)

    def look(*_):
        seen.append([i for i, bucket in enumerate(reversed(model.buckets)) if bucket.weights.untyped_storage().size()])

    def look_in_backward(row, inputs, y):
        if y.requires_grad:
            y.register_hook(look)

    for row in net.rows:  # after FSDP's own hooks
        row.register_forward_pre_hook(look)
        row.register_forward_hook(look_in_backward)
    for _ in range(2):
        seen.clear()
        model(torch.ones(2, 8), range(4)).sum().backward()
        model.finish_grad_sync()
    assert seen == [[0, 1], [1, 2], [2, 3], [3], [2, 3], [1, 2], [0, 1], [0]], seen
    with torch.no_grad():
        model(torch.ones(2, 8), [0, 2, 3])  # 1, expected after 0, comes for nothing
    assert not any(bucket.handle or bucket.weights.untyped_storage().size() for bucket in model.buckets)


def test_fsdp_gathers_the_next_unit_while_one_computes(pool):
    pool(2).run(units_in_time)


def weights_of_the_step():
    """A forward between backward and step gathers weights that the step then replaces."""
    model = parallel.FSDP(Rows().to(torch.get_default_device()))
    optimizer, x = torch.optim.SGD(model.parameters(), 1.0), torch.ones(1, 8)
    model(x, range(4)).sum().backward()
    model.finish_grad_sync()
    model(x, range(4))
    optimizer.step()
    assert model(x, range(4)).equal(model(x, range(4)))


def test_fsdp_computes_with_the_weights_of_the_last_step(pool):
    pool(2).run(weights_of_the_step)


def state_taken_over(compute_dtype):
    """state_dict of one ShardedOptimizer into another: the same step, and a learning rate changed in between counts."""
    nets = [nn.Linear(3, 3, bias=False).to(torch.get_default_device()) for _ in range(2)]
    one, other = (parallel.ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1, compute_dtype=compute_dtype)
                  for net in nets)

    def step(net, optimizer):
        net(torch.ones(2, 3, dtype=compute_dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return net.weight.detach().clone()

    step(nets[0], one)
    if compute_dtype is None:  # 16-bit weights come with their masters
        nets[1].load_state_dict(nets[0].state_dict())
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert nets[0].weight.equal(nets[1].weight)
    for optimizer in (one, other):
        optimizer.param_groups[0]["lr"] = 0.2
    if compute_dtype:
        assert other.shards[0].equal(one.shards[0])  # masters, which hold more than the weights do
    assert step(nets[0], one).equal(step(nets[1], other))
    other.param_groups[0]["lr"] = 0.0
    assert nets[1].weight.detach().clone().allclose(step(nets[1], other), rtol=0, atol=0)


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16], ids=str)
def test_sharded_optimizer_loads_its_state(pool, compute_dtype):
    pool(2).run(state_taken_over, compute_dtype)


def small_buckets(make, params, megabytes, *args, **kwargs):
    return make(params, megabytes or 0.01, *args, **kwargs)


def reductions_of_a_step(virtual_stages, zero):
    """What forward_backward reduces, then what step does; and what full gradients are left after the first."""
    device = torch.get_default_device()
    small = functools.partial(small_buckets, parallel.make_buckets)
    with unittest.mock.patch.object(parallel, "make_buckets", small):
        net = parallel.parallelize(dataclasses.replace(SMALL, n_layer=4), parallel.make_mesh(device.type, dp=2, pp=2),
                                   device, zero=zero, virtual_stages=virtual_stages)
        net.make_optimizer(torch.optim.SGD, lr=0.1)
    net.optimizer.zero_grad()
    x, y = (t.to(device).split(4)[dist.get_rank(net.dp)].split(1) for t in tokens_of(0))
    reduced = []
    for call in (lambda: net.forward_backward(x, y, "interleaved"), lambda: net.optimizer.step()):
        dist.reset_traffic()
        call()
        reduced.append(dist.traffic().get("reduce_scatter_tensor", dist.Traffic()).calls)
        assert all(bucket.total is None for reducer in net.reducers for bucket in reducer.buckets)
    return reduced, sum(len(reducer.buckets) for reducer in net.reducers), net.optimizer.reducer.stage


def test_each_gradient_is_reduced_once_under_several_stages(pool):
    """And of no bucket two stages' parts: at stage 2 each leaves once a micro-batch."""
    for zero, times in (1, 1), (2, 4):
        for (in_backward, in_step), buckets, _ in pool(4).run(reductions_of_a_step, 2, zero):
            assert in_step == 0 and in_backward == times * buckets, (zero, in_backward, buckets)


def most_gradient_bytes(compute_dtype):
    """The most bytes of gradients while micro-batches add up, over those of one set in the shard's dtype."""
    net = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)]).to(torch.get_default_device())
    optimizer = parallel.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, bucket_mb=0.02,
                                          compute_dtype=compute_dtype)
    most = 0

    def look(param):
        nonlocal most
        kept = [p.grad for p in net.parameters()] + [bucket.total for bucket in optimizer.buckets]
        most = max(most, sum(t.nbytes for t in kept if t is not None))

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(look)
    for i in range(3):
        with optimizer.no_sync():
            net(torch.ones(2, 64, dtype=compute_dtype)).sum().backward()
    optimizer.zero_grad()
    return most / sum(4 * p.numel() for p in net.parameters())


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16], ids=str)
def test_gradients_that_add_up_exist_once(pool, compute_dtype):
    for most in pool(2).run(most_gradient_bytes, compute_dtype):
        assert 0.9 < most < 1.2


class Auxiliary(nn.Module):
    """Its second head is used by nobody."""

    def __init__(self):
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x):
        for row in self.rows:
            x = torch.tanh(row(x))
        return self.heads[0](x)


def two_backwards_past_an_unused_unit():
    torch.manual_seed(0)
    one = Auxiliary().double().to(torch.get_default_device())
    model = parallel.FSDP(copy.deepcopy(one))
    for i in range(2):
        x = torch.full((2, 8), 0.1 + i, dtype=torch.float64)
        (model(x).square().sum()).backward()
        one(x).square().sum().backward()
    model.finish_grad_sync()
    norm = parallel.clip_grad_norm_(list(model.parameters()), 0, [None])
    return float(norm), float(nn.utils.get_total_norm([p.grad for p in one.parameters() if p.grad is not None]))


def test_fsdp_goes_on_past_a_unit_that_nobody_used(pool):
    for norm, want in pool(2).run(two_backwards_past_an_unused_unit):
        assert close(norm, want)


def backward_that_raises():
    """zero_grad of the model is all that a step needs after one whose backward raised."""
    torch.manual_seed(0)
    model = parallel.DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_mb=1e-5)
    model(torch.ones(1, 4)).sum().backward()  # all has left, and nobody finishes
    model.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    model.finish_grad_sync()
    return [p.grad.sum().item() for p in model.module.parameters()]


def test_ddp_drops_a_step(pool):
    first, *others = pool(2).run(backward_that_raises)
    assert first[-1] == 4 and all(first == other for other in others)


class Lists(nn.Module):
    """Parameters in a list that has no forward of its own, a bias in a child, a frozen layer; ranks begin apart."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator(device := torch.get_default_device()).manual_seed(dist.get_rank())
        self.ws = nn.ParameterList(torch.zeros(4, 4) for _ in range(2))
        self.bias, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, device=device))

    def forward(self, x):
        for w in self.ws:
            x = x @ w
        return self.frozen(self.bias(x))


def steps_that_are_dropped(stage):
    """A step's gradients are zeroed before they are all there: the next one's are its own, or whoever zeroed them is
    told how."""
    x, one, net = (torch.randn(2, 4, generator=torch.Generator(torch.get_default_device()).manual_seed(5)), Lists(),
                   Lists())
    for t in one.parameters():
        torch_dist.broadcast(t.detach(), 0)
    model = parallel.FSDP(net) if stage == 3 else net
    optimizer = (torch.optim.SGD(model.parameters(), lr=0.0) if stage == 3 else
                 parallel.ShardedOptimizer(net.parameters(), torch.optim.SGD, None, stage, lr=0.0))
    sync = model if stage == 3 else optimizer
    assert close(model(x).detach(), one(x).detach(), 1e-5)
    (1000 * model(x).square().mean()).backward()
    optimizer.zero_grad()
    if stage == 3:
        with pytest.raises(RuntimeError, match="to drop a step, zero_grad"):
            model(x).square().mean().backward()
            model.finish_grad_sync()
        model.zero_grad()
    model(x).square().mean().backward()
    sync.finish_grad_sync()
    one(x).square().mean().backward()
    shards = list(model.parameters()) if stage == 3 else optimizer.shards
    with pytest.raises(ValueError, match="not in `groups`"):
        parallel.clip_grad_norm_(shards, 1.0)
    want = nn.utils.get_total_norm([p.grad for p in one.parameters() if p.grad is not None])
    assert close(parallel.clip_grad_norm_(shards, 0, [None]).cpu(), want.cpu(), 1e-5)
    if stage < 3:
        optimizer.zero_grad(set_to_none=False)
        assert all(shard.grad.eq(0).all() for shard in optimizer.shards)
        optimizer.zero_grad()
        assert all(shard.grad is None for shard in optimizer.shards)
        before = [shard.detach().clone() for shard in optimizer.shards]
        model(x).square().mean().backward()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 1.0
        optimizer.step()  # of nothing
        assert all(a.equal(b) for a, b in zip(before, optimizer.shards)) and optimizer.reducer.finished
        with pytest.raises(ValueError, match="cuts its parameters once"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        return
    for p in model.parameters():
        p.data.mul_(2)
    assert model.module(x).equal(model(x))  # past the wrapper: with the weights of the last step, biases too
    for what in (model.state_dict, model.module.state_dict, lambda: model.load_state_dict({}),
                 lambda: copy.deepcopy(model), model.half, model.module.half, model.module.bias.state_dict):
        with pytest.raises(RuntimeError, match="full_state_dict"):
            what()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_dropped_step_leaves_nothing_and_frozen_layers_are_equal(pool, stage):
    pool(2).run(steps_that_are_dropped, stage)


def refused():
    device = torch.get_default_device()
    with pytest.raises(ValueError, match="at least 2 ranks"):
        parallel.parallelize(SMALL, parallel.make_mesh(device.type), device, virtual_stages=2)
    net = parallel.parallelize(SMALL, parallel.make_mesh(device.type), device, zero=2)
    fast.graphs.replay_micro_batches(net)
    net.make_optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="give schedule 1f1b"):
        net.forward_backward(*(t.to(device).split(4) for t in tokens_of(0)), "gpipe")
    net.count = 2
    with pytest.raises(ValueError, match="ZeRO-2 need one stage, not 2"):
        fast.graphs.replay_micro_batches(net)


def test_parallelize_refuses_what_cannot_be(pool):
    pool(1).run(refused)
