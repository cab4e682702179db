"""ZeRO: what it sends and keeps, what is whole when, and steps that are dropped."""

import copy
import dataclasses
import gc
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

import collectives as dist
import model
import parallel
import train


from further.sampling import whole_model
from tests.data import stepped_by
from tests.layouts import SMALL, small_gpt, tokens_of
from tests.pool import close, is_plain, on_cpus, on_cpus_both, on_ranks, parallelize, parametrize
from safe.flags import Settings
from theory.memory import memory_bytes


# ------------------------------------------------------------------------------------------------- bytes sent and kept

def laid_out(net, stage, compute_dtype=None):
    """(what to call, its optimizer) of fast/'s edition, at a stage of ZeRO."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    if stage == 3:
        wrapped = FastFSDP(net, None, compute_dtype)
        return wrapped, FSDPOptimizer(wrapped.parameters(), sgd, [wrapped])
    return net, AheadOptimizer(net.parameters(), sgd, None, stage, 0.009, compute_dtype)


def bytes_alive():
    """Of all tensors of this process, each storage once. The collectives' receive buffers do not count."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)
               and not issubclass(type(t), FakeTensor)]  # torch.compile keeps some, which have no memory
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())


def wait_for(reducers):
    """Until what is under way has come: before, a ring has room for chunks, too."""
    for reducer in reducers:
        for sent in reducer.under_way:
            sent[1].wait()


@on_cpus
@parametrize("stage", [2, 3])
@on_ranks(2)
def test_at_most_two_buckets_are_under_way(stage):
    """Of somebody's own four layers: each leaves in every backward, so whole gradients never add up."""
    layer = 4 * 48 ** 2  # bytes
    x = torch.ones(2, 48)
    net = nn.Sequential(*[nn.Linear(48, 48, bias=False) for _ in range(4)])
    model, opt = laid_out(net, stage)
    before = bytes_alive()
    for _ in range(2):
        model(x).sum().backward()
        wait_for(opt.reducers)
        # A shard of the gradients lives on, and two buckets with room for their averages.
        assert bytes_alive() - before <= 4 * layer / 2 + 2 * (layer + layer / 2)
    opt.finish_grad_sync()
    opt.step()
    opt.zero_grad()
    assert bytes_alive() <= before  # the next forward needs the room


@on_cpus_both
@parametrize("zero, within", [(0, 4), (1, 4), (2, 2), (3, 4)])
@on_ranks(4)
def test_zero_keeps_what_the_table_says(zero, within):
    """Between backward and step, in bf16 with AdamW, on any device. The reference drops gradients when they are
    averaged, and each rank keeps its part of the average."""
    config, before = model.GPTConfig(vocab_size=256, seq_len=16, n_layer=2, n_head=4, n_embd=64), bytes_alive()
    layout = train.Layout(dp=4, dtype=torch.bfloat16, zero=zero, zero_within=within)
    net = parallelize(config, layout, "cpu", optimizer=partial(torch.optim.AdamW, lr=0.1))
    x = torch.randint(256, (2, 16)).split(1)
    for step in range(2):
        net.zero_grad()
        net.forward_backward(x, x)
        kept = bytes_alive() - before
        net.step()
    net.zero_grad()
    table = memory_bytes(config, Settings(
        dp=within, zero=zero, dtype="bf16", batch_size=within, fast="off" if is_plain() else "on"))
    stays, gradients = table["parameters"] + table["optimizer"], table["gradients"]
    assert abs(kept / (stays + gradients) - 1) < 0.05 and bytes_alive() - before < 1.05 * stays, (kept, table)


@parametrize("zero, schedule", [(1, "interleaved"), (2, "interleaved"), *(
    (0, schedule) for schedule in ("1f1b", "zb-h1", "dualpipe-v"))])
@on_ranks(4)
def test_replicas_of_a_stage_reduce_each_gradient_once_with_its_own_last_backward(zero, schedule):
    """At stage 2 once a micro-batch. Nothing is left to `finish_grad_sync`, or to `step`."""
    net = small_gpt(dataclasses.replace(SMALL, n_layer=4), dp=2, pp=2, zero=zero, schedule=schedule,
                    virtual_stages=1 + (schedule == "interleaved"))
    x, y = (t.to(net.device).split(2) for t in tokens_of(0))
    net.forward_backward(x, y)  # between GPUs its collectives make windows, 64 MiB a group
    net.zero_grad()
    name, before = "reduce_scatter_tensor" if zero else "all_reduce", bytes_alive()
    dist.reset_traffic()
    net.run(net.lists(len(x)), x, y, 1.0, None)
    in_backward = dist.traffic()[name].calls
    net.optimizer.finish_grad_sync()
    k = 4 * sum(param.numel() for param in stepped_by(net.optimizer))  # of ZeRO half of the gradients, padded
    assert not zero or bytes_alive() - before < 2.5 * k  # full ones would add 2 k
    net.optimizer.step()
    sent, times = dist.traffic()[name], len(x) if zero == 2 else 1
    assert sent.calls == in_backward > times
    assert 0 <= sent.bytes - times * k <= 28  # of the loss and three counts


@parametrize("compute_dtype", [None, torch.bfloat16], ids=str)
@on_ranks(2)
def test_gradients_that_add_up_exist_once(compute_dtype):
    """While micro-batches add up there is one set of gradients, in the shards' dtype."""
    net = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    _, sync = laid_out(net, 1, compute_dtype)
    before, most = bytes_alive(), []
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(lambda param: most.append(bytes_alive() - before))
    for _ in range(3):
        with sync.no_sync():
            net(torch.ones(2, 64, dtype=compute_dtype)).sum().backward()
    assert 0.9 < max(most) / (4 * 8 * 64 ** 2) < 1.2


# ------------------------------------------------------------------------------------------- what is whole, and when

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
    def __init__(self, count):
        super().__init__()
        self.forks = nn.ModuleList(Fork() for _ in range(count))

    def forward(self, x, both=True, order=None):
        hidden = residual = x
        for i in order or range(len(self.forks)):
            hidden, residual = self.forks[i](hidden, residual, both)
        return hidden + residual


def when_it_computes(unit, look):
    """Call look() before the unit's forward, after FSDP's own hook, and when backward has its first matrix's gradient,
    which comes last."""
    unit.register_forward_pre_hook(lambda unit, inputs: look())
    next(p for p in unit.parameters() if p.dim() > 1).register_hook(lambda grad: look())


@on_ranks(2)
def test_fsdp_gathers_the_next_unit_while_one_computes():
    """Which units are whole when each computes: itself and the next that has matrices, in forward and backward; none
    that is dropped is still on its way."""
    net, seen = Forks(4), []
    forks = [*net.forks]
    net.forks.insert(2, nn.LayerNorm(4))  # its vectors are always whole
    model, optimizer = laid_out(net, 3)

    def whole():
        return [i for i, fork in enumerate(forks) if model.bucket_of[fork.always.weight].weights is not None]

    for fork in forks:
        when_it_computes(fork, lambda: seen.append(whole()))
    for _ in range(2):
        seen.clear()
        model(torch.ones(2, 4), order=[0, 1, 3, 4]).sum().backward()
        optimizer.finish_grad_sync()
    assert seen == [[0, 1], [1, 2], [2, 3], [3], [2, 3], [1, 2], [0, 1], [0]], seen
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(model(x, order=[0, 1, 3, 4]).sum(), x)  # a backward for x alone, as in zero bubble
    assert whole() == [0, 3]  # the first, with which it ends, and the last, which is kept for a backward
    with torch.no_grad():
        model(torch.ones(2, 4), order=[0, 3, 4])  # 1, expected after 0, comes for nothing
    assert not whole() and not any(flat.handle for flat in model.flats)


@parametrize("layout, device", [(dict(dp=2), "meta"), (dict(dp=2, zero=3), "cpu"), (dict(pp=2), "cpu")])
@on_ranks(2)
def test_a_whole_model_is_on_the_cpu_where_ranks_keep_parts_of_it(layout, device, rank):
    """A GPU, here "meta", may not have room for all."""
    net = small_gpt(SMALL, **layout)
    whole = whole_model(types.SimpleNamespace(config=net.config, net=net, device="meta"))
    assert {tensor.device.type for tensor in whole.state_dict().values()} == {"meta" if rank else device}


@on_ranks(2)
def test_a_bucket_of_both_ends_of_a_model_leaves_last():
    """As of a root's own parameters; else none could leave before it."""
    params = [nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in (torch.float64, None, torch.float64)]
    assert make_buckets(params, 1) == [[params[1]], params[::-2]]


@on_ranks(2)
def test_a_micro_batch_may_leave_layers_out_if_all_ranks_do():
    """A bucket that the first one has left incomplete is no earlier complete in the second."""
    torch.manual_seed(0)  # the same on all ranks, whatever ran before
    one = Forks(3).double()
    net = copy.deepcopy(one)
    model, optimizer = laid_out(net, 2)
    for both in False, True, True:
        for some in one, model:
            some(torch.ones(2, 4, dtype=torch.float64), both).square().sum().backward()
    optimizer.finish_grad_sync()
    norm = parallel.clip_grad_norm_(stepped_by(optimizer), 0)
    assert close(norm.cpu(), nn.utils.get_total_norm([p.grad for p in one.parameters()]).cpu())


@parametrize("way", [0, 1, 2, 3])
@on_ranks(2)
def test_16_bit_gradients_add_up_in_float32(way):
    """Of 12 backwards that leave a parameter of the bucket out. (bf16 itself would lose 2 beside 2048.)"""
    net, x = Forks(1), torch.ones(1, 4, dtype=torch.bfloat16)
    for param in net.parameters():
        nn.init.zeros_(param)
    model, optimizer = laid_out(net, way, torch.bfloat16)

    def backward(times):
        (model(x, both=False).sum() * times).backward()  # twice that for each of 4 x 4 weights

    with optimizer.no_sync():  # one for all, so that nobody says where one of them ends
        for i in range(11):
            backward(1 if i else 1024)
    backward(1)
    optimizer.finish_grad_sync()
    total = sum(shard.grad.sum() for shard in stepped_by(optimizer))
    if way:
        dist.all_reduce(total)
    assert total == (1024 + 11) * 2 * 4 * 4


@on_cpus_both
@on_ranks(4)
def test_the_norm_takes_its_groups_from_the_parameters():
    """Cut by tensor parallelism, then by ZeRO; by all ranks, and by some of them."""
    mesh = parallel.make_mesh("cpu", dp=2, tp=2)
    dp, tp = (mesh.get_group(axis) for axis in ("dp", "tp"))
    net, cut = (model.GPT(SMALL).double() for _ in range(2))
    parallel.tensor_parallel(cut, tp)
    unit = parallel.Unit([*cut.parameters()], dp, 1, torch.float64)
    for some in net, cut:
        some(tokens_of(0)[0]).square().sum().backward()
    unit.start_average()
    unit.finish_average()
    want = nn.utils.get_total_norm([p.grad for p in net.parameters()])
    for params in net.parameters(), unit.stepped.values():
        assert close(parallel.clip_grad_norm_(params, 0), want)
    ends = [nn.Parameter(torch.ones(2).double()) for _ in range(2)]
    for param, group in zip(ends, (torch.distributed.group.WORLD, tp)):  # 4 parts of one, 2 of the other
        param.grad = torch.ones(2).double()
        parallel.set_placement(param, sharded_over=(group,))
    assert parallel.clip_grad_norm_(ends, 0).item() == pytest.approx(12 ** 0.5)
