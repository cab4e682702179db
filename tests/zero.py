"""ZeRO: what it sends and keeps, what is whole when, and steps that are dropped."""

import contextlib
import copy
import dataclasses
import gc

import pytest
import torch
from torch import nn

import collectives as dist
import fast.gloo
import model
import parallel
from further.nodes import average_between
from tests.collectives import ring_only
from tests.data import laid_out, module_and_inputs, stepped_by
from tests.layouts import SMALL, tokens_of
from tests.pool import close, is_plain, on_both, on_ranks
from safe.flags import Settings
from theory.memory import memory_bytes


# ------------------------------------------------------------------------------------------------- bytes sent and kept

def bytes_alive():
    """Of all tensors of this process, each storage once. The collectives' receive buffers do not count."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    scratches = {t.untyped_storage().data_ptr() for t in fast.gloo.scratches()}
    return sum(size for place, size in sizes.items() if place not in scratches)


def wait_for(reducers):
    """Until what is under way has come: before, the reference's ring has room for chunks, too."""
    for reducer in reducers:
        for sent in reducer.under_way:
            sent[1].wait()


@ring_only
def step_of_zero(stage, micro_batches, reduce_dtype=None, within=None):
    """(bytes of each collective, of K elements) of a step, for K float32 elements in four units that divide evenly."""
    group, ranks, x = None, range(size := dist.get_world_size()), torch.ones(2, 48)
    n = within or size
    if within:
        grid = [ranks[first:first + within] for first in range(0, size, within)]
        group, between = dist.rows_and_columns(grid)
    net = nn.Sequential(*[nn.Linear(48, 48, bias=False) for _ in range(4)]).to(torch.get_default_device())
    k = 4 * sum(p.numel() for p in net.parameters())
    start = bytes_alive() - k
    model, sync, opt = laid_out(net, stage, lr=0.1, group=group, reduce_dtype=reduce_dtype)
    before, reducers = bytes_alive(), sync.reducers if stage == 3 else [sync.reducer]
    assert stage != 3 or before - start < k  # a shard, no whole unit
    dist.reset_traffic()
    for i in range(micro_batches):
        with sync.no_sync() if i < micro_batches - 1 else contextlib.nullcontext():
            model(x).sum().backward()
        wait_for(reducers)
        # A shard of the gradients lives on. Of four buckets at most two are under way, with room for their averages.
        assert stage in ("ddp", 1) or bytes_alive() - before <= k / n + 2 * (k / 4 + k / 4 / n)
    sync.finish_grad_sync()
    if within:
        average_between(reducers, between)
    opt.step()
    opt.zero_grad()
    assert bytes_alive() <= before  # the next forward needs the room
    return {name: t.bytes for name, t in dist.traffic().items()}, k


@on_both
@pytest.mark.parametrize("size, within", [(2, None), (3, None), (4, None), (4, 2)])
@pytest.mark.parametrize("m", [1, 3])
@on_ranks()
def test_zero_sends_what_the_table_says(m, within):
    """m micro-batches. Hybrid sharding: the table's with n for N, and once a step each shard of the gradients between
    two groups. bf16 halves gradients alone."""
    size, scattered, gathered = dist.get_world_size(), "reduce_scatter_tensor", "all_gather_into_tensor"
    sent, k = step_of_zero("ddp", m)
    assert sent == {"all_reduce": 2 * (size - 1) * k // size}
    n = within or size
    for stage, law in {1: {scattered: 1, gathered: 1}, 2: {scattered: m, gathered: 1},
                       3: {scattered: m, gathered: 2 * m - m / 4}}.items():  # the last unit of 4: once
        want = {name: times * (n - 1) * k // n for name, times in law.items()}
        if within:
            want["all_reduce"] = k // n
        assert step_of_zero(stage, m, None, within)[0] == want, stage
        halved = {name: sent if name == gathered else sent // 2 for name, sent in want.items()}
        assert step_of_zero(stage, m, torch.bfloat16, within)[0] == halved, stage


@pytest.mark.parametrize("pool", ["cpu", "plain"], indirect=True)
@pytest.mark.parametrize("zero, within", [(0, 4), (1, 4), (2, 4), (3, 4), (2, 2), (3, 2)])
@on_ranks(4)
def test_zero_keeps_what_the_table_says(zero, within):
    """Between backward and step, in bf16 with AdamW, on any device."""
    config, before = model.GPTConfig(vocab_size=256, seq_len=16, n_layer=2, n_head=4, n_embd=64), bytes_alive()
    layout = parallel.Layout(dp=4, dtype=torch.bfloat16, zero=zero, zero_within=within)
    net = parallel.parallelize(config, layout, "cpu")
    opt = net.make_optimizer(torch.optim.AdamW, lr=0.1)
    x, y = (torch.randint(256, (2, 16)).split(1) for _ in range(2))
    for step in range(2):
        opt.zero_grad()
        net.forward_backward(x, y)
        kept = bytes_alive() - before
        opt.step()
    table = memory_bytes(config, Settings(dp=within, zero=zero, dtype="bf16", batch_size=within))
    assert abs(kept / sum(table[kind] for kind in ("parameters", "gradients", "optimizer")) - 1) < 0.05, (kept, table)


@pytest.mark.parametrize("zero", [1, 2])
@on_ranks(4)
def test_each_gradient_is_reduced_once_under_several_stages(zero):
    """At stage 2 once a micro-batch. `step` reduces none."""
    device = torch.get_default_device()
    net = parallel.parallelize(dataclasses.replace(SMALL, n_layer=4),
                               parallel.Layout(dp=2, pp=2, zero=zero, schedule="interleaved", virtual_stages=2),
                               device)
    optimizer = net.make_optimizer(torch.optim.SGD, lr=0.1)
    x, y = (t.to(device).split(4)[dist.get_rank(net.groups.dp)].split(1) for t in tokens_of(0))
    before = bytes_alive()
    dist.reset_traffic()
    net.forward_backward(x, y)
    k = 4 * sum(param.numel() for param in stepped_by(optimizer))  # half of the gradients, padded
    sent = dist.traffic()["reduce_scatter_tensor"]
    assert sent.bytes == {1: 1, 2: len(x)}[zero] * k
    assert bytes_alive() - before < 2.5 * k  # full ones would add 2 k
    optimizer.step()
    assert dist.traffic()["reduce_scatter_tensor"] == sent


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16], ids=str)
@on_ranks(2)
def test_gradients_that_add_up_exist_once(compute_dtype):
    """While micro-batches add up there is one set of gradients, in the shards' dtype."""
    net = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)]).to(torch.get_default_device())
    optimizer = parallel.ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, bucket_mb=0.02,
                                          compute_dtype=compute_dtype)
    before, most = bytes_alive(), []
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(lambda param: most.append(bytes_alive() - before))
    for _ in range(3):
        with optimizer.no_sync():
            net(torch.ones(2, 64, dtype=compute_dtype)).sum().backward()
    assert 0.9 < max(most) / sum(4 * p.numel() for p in net.parameters()) < 1.2


# ------------------------------------------------------------------------------------------- what is whole, and when

class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x, order):
        for i in order:
            x = self.rows[i](x)
        return x


@on_ranks(2)
def test_fsdp_gathers_the_next_unit_while_one_computes():
    """Which units are whole when each computes: itself and the next, in forward and backward; none that is dropped is
    still on its way."""
    net, seen = Rows().to(torch.get_default_device()), []
    model = parallel.FSDP(net)

    def whole():
        return [i for i, row in enumerate(net.rows) if row.weight.untyped_storage().size()]

    def look(*_):
        seen.append(whole())

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
    assert not whole() and not any(bucket.handle for bucket in model.buckets)


class Fork(nn.Module):
    """A unit that now and then leaves a layer out, and hands the residual on beside the hidden state."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, hidden, residual, both):
        residual = residual + hidden  # its gradient comes last
        hidden = torch.tanh(self.always(residual))
        return (self.sometimes(hidden) if both else hidden), residual


class Forks(nn.Module):
    def __init__(self):
        super().__init__()
        self.forks = nn.ModuleList(Fork() for _ in range(3))

    def forward(self, x, both):
        residual = x
        for fork in self.forks:
            x, residual = fork(x, residual, both)
        return x + residual


@on_both
@pytest.mark.parametrize("way", [2, 3])
@on_ranks(2)
def test_a_micro_batch_may_leave_layers_out_if_all_ranks_do(way):
    """A bucket that the first one has left incomplete is no earlier complete in the second. After backward no unit is
    whole, though its outputs' gradients come one after the other."""
    torch.manual_seed(0)  # the same on all ranks, whatever ran before
    one, net = Forks().double(), Forks().double().to(torch.get_default_device())
    net.load_state_dict(one.state_dict())
    model, sync, optimizer = laid_out(net, way, lr=1.0)
    for both in False, True, True:
        x = torch.ones(2, 4, dtype=torch.float64)
        one(x, both).square().sum().backward()
        model(x.to(torch.get_default_device()), both).square().sum().backward()
    if way == 3:
        assert not any(flat.weights.untyped_storage().size() for flat in model.buckets)
    sync.finish_grad_sync()
    norm = parallel.clip_grad_norm_(stepped_by(optimizer), 0, [None])
    assert close(norm.cpu(), nn.utils.get_total_norm([p.grad for p in one.parameters()]).cpu())


class Half(nn.Module):
    """A unit of two layers, of which it uses one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Module()
        self.layers.used, self.layers.unused = (nn.Parameter(torch.zeros(2, 2)) for _ in range(2))

    def forward(self, x):
        return x @ self.layers.used


@on_both
@pytest.mark.parametrize("way", [0, 1, 2, 3])
@on_ranks(2)
def test_16_bit_gradients_add_up_in_float32(way):
    """Of 300 backwards that leave a parameter of the bucket out. (bf16 itself cannot count beyond 256.)"""
    net = nn.Sequential(Half()).to(torch.get_default_device())
    if way == 3:
        model = sync = parallel.FSDP(net, compute_dtype=torch.bfloat16)
    else:
        model, sync = net, parallel.ShardedOptimizer(net.parameters(), torch.optim.SGD, stage=way, lr=1.0,
                                                     compute_dtype=torch.bfloat16)
    for i in range(300):
        with sync.no_sync() if i < 299 else contextlib.nullcontext():
            model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    sync.finish_grad_sync()
    shards = list(sync.parameters()) if way == 3 else sync.shards
    total = torch.stack([shard.grad.sum() for shard in shards]).sum()
    if way:
        dist.all_reduce(total)
    assert total == 4 * 300


@on_both
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16], ids=str)
@on_ranks(2)
def test_sharded_optimizer_loads_its_state(compute_dtype):
    """state_dict of one ShardedOptimizer into another: the same step, and a learning rate changed in between counts."""
    if is_plain():
        compute_dtype = None  # the reference's has no masters
    def step(net, optimizer, lr):
        optimizer.param_groups[0]["lr"] = lr
        net(torch.ones(2, 3, dtype=compute_dtype)).square().sum().backward()
        optimizer.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
        return net.weight.detach().clone()

    pairs = []
    for _ in range(2):
        net = nn.Linear(3, 3, bias=False).to(torch.get_default_device())
        pairs.append((net, parallel.ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1,
                                                     compute_dtype=compute_dtype)))
    (net, one), (other_net, other) = pairs
    weight = step(net, one, 0.1)
    if compute_dtype is None:  # 16-bit weights come with their masters
        other_net.load_state_dict(net.state_dict())
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert other_net.weight.equal(weight)
    # Masters hold more than 16-bit weights do.
    assert all(a.equal(b) for a, b in zip(stepped_by(one), stepped_by(other)))
    assert step(net, one, 0.2).equal(weight := step(other_net, other, 0.2))
    assert step(other_net, other, 0.0).equal(weight)


@on_both
@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("way", ["ddp", 0, 1, 2, 3])
@on_ranks(2)
def test_a_dropped_step_leaves_nothing(way, between):
    """A step's gradients are zeroed between micro-batches, or before they are all there, as after a backward that
    raised: the next one's are its own, or whoever zeroed them is told how."""
    net, ((x, _), _) = module_and_inputs("encoder", 0)
    model, sync, optimizer = laid_out(net, way, lr=0.0)
    norms = []
    for dropped in False, True:
        if dropped:
            with sync.no_sync() if between else contextlib.nullcontext():
                (1000 * model(*x).square().mean()).backward()
            optimizer.zero_grad()
            if way in ("ddp", 3) and not between:
                with pytest.raises(RuntimeError, match="run all but the last one under no_sync|to drop a step, zero_g"):
                    model(*x).square().mean().backward()
                    sync.finish_grad_sync()
        optimizer.zero_grad()
        if way in ("ddp", 3):
            model.zero_grad()
        model(*x).square().mean().backward()
        sync.finish_grad_sync()
        if way in (1, 2, 3):
            with pytest.raises(ValueError, match="not in `groups`"):
                parallel.clip_grad_norm_(stepped_by(optimizer), 1.0)
        norms.append(float(parallel.clip_grad_norm_(stepped_by(optimizer), 0, [None])))
    assert close(*norms)


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_an_optimizer_that_is_zeroed_steps_nothing(stage):
    net, ((x, _), _) = module_and_inputs("odd", 0)
    model, sync, optimizer = laid_out(net, stage, lr=1.0)
    shards = stepped_by(optimizer)
    before = [shard.detach().clone() for shard in shards]
    model(*x).square().mean().backward()
    sync.finish_grad_sync()
    optimizer.zero_grad(set_to_none=False)
    assert all(shard.grad.eq(0).all() for shard in shards)
    optimizer.zero_grad()
    assert all(shard.grad is None for shard in shards)
    model(*x).square().mean().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert all(a.equal(b) for a, b in zip(before, shards)) and optimizer.reducer.finished
    with pytest.raises(ValueError, match="cuts its parameters once"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@on_both
@on_ranks(2)
def test_fsdp_itself_is_not_read():
    """Its parameters are views of freed memory: who reads one crashes."""
    with pytest.raises(RuntimeError, match="full_state_dict"):
        laid_out(module_and_inputs("odd", 0)[0], 3, lr=0.0)[0].state_dict()


@on_ranks(2)
def test_fsdp_s_module_computes_with_the_shards_and_is_not_read_or_moved():
    net, ((x, _), _) = module_and_inputs("odd", 0)
    model, *_ = laid_out(net, 3, lr=0.0)
    for p in model.parameters():
        p.data.mul_(2)
    assert net(*x).equal(model(*x))  # past the wrapper: with the weights of the last step, of layers and its own
    for what in (model.state_dict, net.state_dict, lambda: model.load_state_dict({}), lambda: copy.deepcopy(model),
                 model.half, net.half, net.left.state_dict):
        with pytest.raises(RuntimeError, match="full_state_dict"):
            what()
