"""Data parallelism and ZeRO on other modules; updates, loss scaling, low precision."""

import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import math
import types
import weakref
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import collectives as dist
import fast.adamw
import fast.zero
import further.library  # noqa: F401  for dist.use(group, "torch")
import kernels
import parallel
from further.loss_scale import LossScale
from further.states import full_optimizer_state, load_optimizer_state
from tests.pool import (
    close, is_plain, needs_kernels, on_both, on_cpus_both, on_ranks, own, parametrize, table, uncollected)


# ------------------------------------------------------------------------------------------------------ other modules

class Odd(nn.Module):
    """Everything that trips a gradient hook: tied, frozen and unused layers, a branch, a buffer, sizes 1 and 7,
    parameters in a list that has no forward of its own; laid out, gradients of words are sparse."""

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


@dataclasses.dataclass
class Hidden:
    state: torch.Tensor
    rows: torch.Tensor


class Crooked(nn.Module):
    """A unit that is used past its forward: a hook reads its weight, a caller calls another method, and takes a tensor
    that its forward has set aside. It hides its output, and a view of a weight, where a search of lists finds none."""

    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Linear(5, 5), nn.Parameter(torch.randn(6, 5))
        self.register_forward_pre_hook(lambda unit, inputs: setattr(unit, "size", unit.layer.weight.square().mean()))

    def forward(self, x):
        self.aside = self.size * torch.tanh(self.layer(x))
        return Hidden(self.layer(x), self.table[:len(x)])

    def other(self, x):
        return self.layer(torch.tanh(x @ self.table.T @ self.table))


class Crookeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(Crooked() for _ in range(4))

    def forward(self, x):
        y = x
        for unit in self.units:
            hidden = unit(y)
            y = hidden.state.unsqueeze(1).squeeze(1)
            y += hidden.rows  # writes into a view of the unit's output
        return self.units[1].other(y) + sum(checkpoint(unit, y, use_reentrant=False).state + unit.aside
                                            for unit in self.units)


def module_and_inputs(kind, seed):
    """A module nobody here wrote, and its inputs: one for each of 2 micro-batches and each rank."""
    torch.manual_seed(seed)
    size, device = dist.get_world_size(), torch.get_default_device()
    net, shape, more = Odd(), (4, 5), lambda i, rank: [kind == "branches" and (i + rank) % 3 == 0]
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0, batch_first=True)
        net, shape, more = nn.TransformerEncoder(layer, 2, nn.LayerNorm(12)), (2, 5, 12), lambda i, rank: []
    if kind == "crooked":
        net, more = Crookeds(), lambda i, rank: []
    x = torch.from_numpy(np.random.default_rng(3).normal(size=(2, size, *shape))).to(device)
    return net.double().to(device), [[(x[i, rank], *more(i, rank)) for rank in range(size)] for i in range(2)]


def laid_out(net, way, optimizer=torch.optim.SGD, group=None, compute_dtype=None, grad_scaler=True, **options):
    """(what to call, what has no_sync and finish_grad_sync, optimizer). way: a stage of ZeRO, "ddp" or "naive"."""
    for part in net.modules():
        part.sparse = True  # which embeddings ask for
    if way == "naive":
        finish = functools.partial(parallel.average_gradients, net)
        sync = types.SimpleNamespace(no_sync=contextlib.nullcontext, finish_grad_sync=finish)
        return net, sync, optimizer([p for p in net.parameters() if p.requires_grad], **options)
    if way in ("ddp", 3):
        if way == "ddp":
            wrapped = own("DDP")(net, group, bucket_mb=4e-4)  # 400 bytes: many buckets
        else:
            wrapped = own("FSDP")(net, group, compute_dtype=compute_dtype, grad_scaler=grad_scaler)
        return wrapped, wrapped, optimizer(wrapped.parameters(), **options)
    sharded = own("ShardedOptimizer")(net.parameters(), optimizer, group, way, 0.009,
                                        compute_dtype=compute_dtype, grad_scaler=grad_scaler, **options)
    return net, sharded, sharded


def stepped_by(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


@on_both
@parametrize("kind, way", [*itertools.product(["odd", "encoder"], ["naive", "ddp", 0, 1, 2, 3]),
                                       ("branches", "naive"), ("branches", "ddp"), ("crooked", 3)])
@on_ranks(3)
def test_data_parallel_and_zero_on_modules_nobody_here_wrote(kind, way, rank, size):
    """Three steps of SGD with momentum over two micro-batches, clipped, against one process, with a forward between
    backward and step. Before the second, gradients are not zeroed, so they add up. Ranks begin with weights of their
    own, and the first one's win; they take different branches. Nothing outlives its model."""
    (one, inputs), (net, _) = module_and_inputs(kind, 0), module_and_inputs(kind, 0 if way == "naive" else rank)
    model, sync, opt = laid_out(net, way, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for step in range(3):
        if step != 1:
            reference.zero_grad()
            opt.zero_grad()
        for i, of_ranks in enumerate(inputs):
            for x in of_ranks:
                (one(*x).square().mean() / size).backward()
            with sync.no_sync() if i == 0 else contextlib.nullcontext():
                model(*of_ranks[rank]).square().mean().backward()
        sync.finish_grad_sync()
        model(*of_ranks[rank])  # ZeRO-3 gathers weights that the step then replaces
        norm = parallel.clip_grad_norm_(stepped_by(opt), 0.05)
        assert close(norm, nn.utils.clip_grad_norm_(one.parameters(), 0.05)) and norm > 0.05
        reference.step()
        opt.step()
    with torch.no_grad():
        assert close(model(*inputs[0][0]), one(*inputs[0][0]))
    state = net.state_dict if way == "ddp" else model.full_state_dict if way == 3 else net.named_parameters
    for name, value in dict(state()).items():
        assert close(value.detach(), one.state_dict()[name]), name
    if way != "naive":
        alive = weakref.ref(sync.reducers[0])
        del model, sync, opt, net, state, value
        gc.collect()
        assert alive() is None


@on_cpus_both  # on GPUs the CPU is ahead of all messages anyway
@on_ranks(2)
def test_backward_returns_before_its_buckets_have_arrived(rank):
    """Rank 1 begins its backward when rank 0 has come back from its own, so nothing can have arrived there."""
    net, x, come_back = nn.Linear(8, 8), torch.ones(2, 8), torch.zeros(1)
    wrapped = own("DDP")(net)
    if rank == 1:
        dist.recv(come_back, 0)
    wrapped(x * (rank + 1)).sum().backward()
    if rank == 0:
        (_, handle, *_), = wrapped.reducers[0].under_way
        assert not handle.is_completed()
        dist.send(come_back, 1)
    wrapped.finish_grad_sync()
    assert net.weight.grad.eq(3).all()


def twice(net, x, leaves_out):
    """What a model of two layers says, or one that a rank runs without its first layer."""
    return net[1](x if leaves_out else torch.tanh(net[0](x))).square().mean()


@on_both
@parametrize("first, second, comm", table("""
    ddp   ddp   ours
    0     1     ours
    1     1     ours
    2     ddp   ours
    3     0     ours
    3     1     ring
    ddp   1     torch
    3     ddp   torch
"""))
@on_ranks(2)
def test_whatever_a_rank_leaves_out_all_collectives_are_right(first, second, comm, rank, size):
    """Two models of one shape in one group; the caller's own collectives before finish_grad_sync. One rank runs the
    second model without a layer, in the next step not at all."""
    dist.use(None, comm)
    torch.manual_seed(0)
    one = [nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double() for _ in range(2)]
    laid = [laid_out(copy.deepcopy(net), way, lr=1.0) for net, way in zip(one, (first, second))]
    of_second, ready = laid[1][0], torch.ones(1)
    of_second = getattr(of_second, "module", of_second)
    reference = torch.optim.SGD([p for net in one for p in net.parameters()], lr=1.0)
    x = torch.randn(2, size, 4, 6, dtype=torch.float64)
    for step in range(2):
        for i, part in enumerate(x):
            whole = [one[0](part[r]).square().mean() + (
                0 if step and r else twice(one[1], part[r], r)) for r in range(size)]
            (sum(whole) / size).backward()
            with contextlib.ExitStack() as stack:
                for _, sync, _ in laid if i == 0 else ():
                    stack.enter_context(sync.no_sync())
                loss = laid[0][0](part[rank]).square().mean()
                if not (step and rank):
                    loss = loss + twice(of_second, part[rank], rank)
                loss.backward()
            dist.all_reduce(loss := loss.detach())
            dist.broadcast(ready, 0)
            dist.barrier()
            assert close(loss, sum(whole).detach())
        held = comm == "torch" or torch_dist.get_backend() == "nccl"
        assert laid[1][1].reducers[-1].holds == held
        for _, sync, opt in laid:
            sync.finish_grad_sync()
            opt.step()
            opt.zero_grad()
        reference.step()
        reference.zero_grad()
    for net, (model, _, _), way in zip(one, laid, (first, second)):
        state = model.full_state_dict() if way == 3 else getattr(model, "module", model).state_dict()
        assert all(map(close, state.values(), net.state_dict().values()))


@on_both
@parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_one_object_averages_a_gradient(stage):
    """PyTorch's ZeRO-1 stands beside a DDP. Ours takes its place."""
    net = nn.Linear(4, 4)
    both = own("DDP")(net), own("ShardedOptimizer")(net.parameters(), torch.optim.SGD, stage=stage, lr=1.0)
    with pytest.raises(RuntimeError, match="two objects average the gradient of one parameter, such as a DDP"):
        net(torch.ones(1, 4)).sum().backward()
    del both
    own("DDP")(net)(torch.ones(1, 4)).sum().backward()  # the others are gone


@on_both
@parametrize("way", ["ddp", 1, 3])
@on_ranks(3)
def test_models_that_differ_are_refused_on_all_ranks(way, rank):
    """In a shape, their number, a dtype, what is trained, a buffer; and so are optimizers of whole tensors."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return

    def changed(change):
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        if rank == 2:
            change(net)
        return net

    for change in (lambda net: net.append(nn.Linear(1, 1)), lambda net: net[0].requires_grad_(False), nn.Module.double,
                   lambda net: setattr(net[0], "bias", nn.Parameter(torch.zeros(1))),
                   *[lambda net: setattr(net[1], "running_mean", None)] * (way != 1)):
        with pytest.raises(ValueError, match="rank 2 has another model than the group's first rank"):
            laid_out(changed(change), way, group=group, lr=1.0)
    if way == 1:
        with pytest.raises(ValueError, match="Adafactor looks at whole tensors"):
            laid_out(nn.Linear(4, 4), way, torch.optim.Adafactor, group, lr=1.0)


@on_both
@parametrize("way", ["ddp", 3])
@on_ranks(2)
def test_what_would_train_something_else_is_refused(way):
    """A layer takes another's place, or comes in addition: nobody would average its gradients. DDP is not copied. FSDP
    takes no embedding whose rows are scaled down when they are looked up: ranks keep parts of what forward writes."""
    for change in (lambda net: net.append(nn.Linear(4, 4)),
                   lambda net: setattr(net[0], "bias", nn.Parameter(torch.zeros(4)))):
        net = nn.Sequential(nn.Linear(4, 4))
        model, sync, _ = laid_out(net, way, lr=1.0)
        change(net)
        with pytest.raises(RuntimeError, match="0.bias|1.weight came into the module after it was wrapped"):
            model(torch.ones(1, 4)).sum().backward()
            sync.finish_grad_sync()
    if way == "ddp":
        with pytest.raises(RuntimeError, match="copy its module"):
            copy.deepcopy(model)
    else:
        model = own("FSDP")(nn.Sequential(nn.Embedding(4, 4, max_norm=0.01), nn.Linear(4, 4)))
        with pytest.raises(RuntimeError, match=r"shape \(4, 4\) was written while it was whole"):
            model(torch.arange(4))


@on_ranks(2)
def test_clipping_takes_what_pytorch_s_takes():
    """One tensor, or a generator."""
    weight = nn.Parameter(torch.zeros(4, 3))
    weight.grad = torch.ones(4, 3)
    assert close(parallel.clip_grad_norm_(weight, 0), 12 ** 0.5, 1e-6)
    assert parallel.clip_grad_norm_(iter(()), 1.0) == 0


def freeze(net, step):
    """A layer is frozen at first, then another, then one parameter of a third, then none."""
    net.requires_grad_(True)
    for frozen in [[net[0]], [net[4]], [net[0].weight, net[2].bias], []][step]:
        frozen.requires_grad_(False)


def move(net, step):
    """Change the weights, or where they lie, as people do."""
    weights = [net[0].weight, net[2].bias]
    if step == 1:
        nn.utils.vector_to_parameters(1.5 * nn.utils.parameters_to_vector(net.parameters()), net.parameters())
    elif step == 2:
        for weight in weights:
            weight.data = weight.data.clone().t() if weight.dim() == 2 else weight.data / 2
    elif step == 3:
        net.load_state_dict({name: value.clamp(-0.1, 0.1) for name, value in net.state_dict().items()})


@on_both
@parametrize("change, way", [*itertools.product([freeze, move], ["ddp", 0, 1, 2]), (freeze, 3)])
@on_ranks(2)
def test_what_people_do_between_steps_is_what_one_process_does(change, way, rank):
    torch.manual_seed(0)
    one = nn.Sequential(*[nn.Linear(6, 6) if i % 2 == 0 else nn.Tanh() for i in range(5)]).double()
    net, x = copy.deepcopy(one), torch.randn(2, 4, 6, dtype=torch.float64)
    change(one, 0), change(net, 0)
    options = dict(lr=0.05, weight_decay=0.1)
    reference, (model, sync, opt) = torch.optim.AdamW(one.parameters(), **options), laid_out(
        net, way, torch.optim.AdamW, **options)
    for step in range(4):
        change(one, step), change(net, step)
        reference.zero_grad()
        opt.zero_grad()
        one(x.view(8, 6)).square().mean().backward()
        model(x[rank]).square().mean().backward()
        sync.finish_grad_sync()
        norms = [parallel.clip_grad_norm_(stepped_by(some), 0.01) for some in (reference, opt)]
        reference.step()
        opt.step()
        weights = model.full_state_dict() if way == 3 else net.state_dict()
        assert close(*norms) and all(map(close, weights.values(), one.state_dict().values())), step


def train_more(net, way, compute_dtype, group, steps, states=None):
    """(weights, optimizer's state), both whole, after steps on all ranks' inputs, from `states` on. The first layer is
    frozen in the first step, so it has been stepped less often."""
    model = net
    if way == 3:
        model = own("FSDP")(net, group, compute_dtype)
        opt = torch.optim.AdamW(model.named_parameters(), lr=0.05)
        sync, of_opt = model, [opt]
    else:
        sync = opt = own("ShardedOptimizer")(net.named_parameters(), torch.optim.AdamW, group, way,
                                                          lr=0.05, compute_dtype=compute_dtype)
        of_opt = []
    if states:
        model.load_state_dict(states[0])
        load_optimizer_state(sync, states[1], *of_opt)
    for step in steps:
        net[0].requires_grad_(step > 0)
        opt.zero_grad()
        model(torch.linspace(-1, 1, 5, dtype=net[0].weight.dtype) + step).square().mean().backward()
        sync.finish_grad_sync()
        opt.step()
    weights = model.full_state_dict() if way == 3 else net.state_dict()
    return {name: value.clone() for name, value in weights.items()}, full_optimizer_state(sync, *of_opt)


@on_both
@parametrize("way, compute_dtype", [(0, None), (1, None), (2, torch.bfloat16), (3, None), (3, torch.bfloat16)],
             ids=str)
@on_ranks(3)
def test_training_goes_on_from_another_number_of_ranks(way, compute_dtype, rank):
    """Of two ranks, then three; as if nothing had happened, and of float64 as one process's own optimizer."""
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3)).to(torch.float32 if compute_dtype else torch.float64)

    two = dist.new_group([0, 1])
    whole = train_more(make(), way, compute_dtype, None, range(4))
    half = [train_more(make(), way, compute_dtype, two, range(2)) if rank < 2 else None]
    torch.distributed.broadcast_object_list(half, 0)
    resumed = train_more(make(), way, compute_dtype, None, range(2, 4), half[0])
    assert [state["step"] for state in whole[1].values()] == [3, 3, 4, 4]
    for ours, theirs in [whole[:1], resumed[:1]], [whole[1].values(), resumed[1].values()]:
        for a, b in zip(ours, theirs, strict=True):
            assert a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    unnamed = own("ShardedOptimizer")(make().parameters(), torch.optim.Adam)
    for state, message in ({4: {}}, "no parameter is called 4"), ({0: {"exp_avg": torch.ones(3)}}, "exp_avg of 0 is"):
        with pytest.raises(ValueError, match=message):
            load_optimizer_state(unnamed, state)


@on_both
@on_ranks(2)
def test_masters_follow_16_bit_weights_that_are_loaded():
    """A weight that has not changed keeps its master's digits. Another dtype is refused."""
    net = nn.Linear(8, 8, bias=False)
    nn.init.ones_(net.weight)
    model, sync, opt = laid_out(net, 1, lr=2**-10, compute_dtype=torch.bfloat16)

    def step():
        model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()  # a gradient of 1
        sync.finish_grad_sync()
        opt.step()
        opt.zero_grad()

    step()  # bf16 rounds 1 - 2**-10 to 1
    loaded = torch.ones(8, 8)
    loaded[::2] = 3
    net.load_state_dict({"weight": loaded})
    step()
    masters = opt.shards[0].detach().view(4, 8)
    assert masters[::2].eq(3 - 2**-10).all() and masters[1::2].eq(1 - 2**-9).all()
    net.half()
    with pytest.raises(ValueError, match="is now .* torch.float16 .* was .* torch.bfloat16"):
        opt.step()


@on_both
@parametrize("way", [1, 2, 3])
@on_ranks(2)
def test_ranks_leave_out_the_same_steps(way):
    """torch.amp.GradScaler looks at a rank's own shard; one has what is not finite. So do all, with unscale_ or not."""
    net = nn.Linear(8, 1, bias=False)
    model, sync, opt = laid_out(net, way, lr=0.5)
    scaler, before = torch.amp.GradScaler(torch.get_default_device().type, init_scale=4.0), net.weight.detach().clone()
    for unscale in False, True:
        x = torch.ones(1, 8)
        x[0, 0] = math.inf
        scaler.scale(model(x).sum()).backward()
        sync.finish_grad_sync()
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert scaler.get_scale() == 1 and net.weight.equal(before)  # or this rank's part of it


@on_both
@on_ranks(3)
def test_fsdp_s_parameters_keep_their_names(rank):
    """For groups by name, a schedule, and who moves a weight between steps; its state has buffers, and loads."""
    def make(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double().eval()

    one, net, x = make(0), make(0), torch.randn(2, 4, dtype=torch.float64)
    model = own("FSDP")(net)
    for some in one, model:
        first, *others = named = dict(some.named_parameters())
        assert [*named] == [*dict(one.named_parameters())]
        opt = torch.optim.SGD([{"params": [named[first]], "lr": 0.5}, {"params": [named[name] for name in others]}])
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
        for _ in range(3):
            some(x).square().mean().backward()
            getattr(some, "finish_grad_sync", int)()
            opt.step()
            schedule.step()
            opt.zero_grad()
            named[first].data = named[first].data / 2
    net[1].running_mean += rank  # the first one's counts
    whole, other = model.full_state_dict(), own("FSDP")(make(1))
    other.load_state_dict(whole)
    assert whole.keys() == one.state_dict().keys() and close(other(x), one(x))
    for state, message in (whole | {"0.weight": whole["2.bias"]}, "size mismatch: 0.weight is"), ({}, "other names"):
        with pytest.raises(RuntimeError, match=message):
            other.load_state_dict(state)
    layer = one[0].requires_grad_(False)
    never_whole = own("FSDP")(nn.Linear(4, 5, dtype=torch.float64, device="meta"), device=x.device)
    never_whole.load(layer.get_parameter)
    assert close(never_whole(x), layer(x))
    for flat in never_whole, own("FlatFSDP")(nn.Linear(4, 5)):
        with pytest.raises(RuntimeError, match="size mismatch"):
            flat.load(lambda name: torch.zeros(6, 6, 6))


class Mean(nn.Module):
    """Forward assigns the buffer anew, or makes it."""

    def forward(self, x):
        self.register_buffer("mean", x.detach().mean(0))
        return x


@on_both
@on_ranks(2)
def test_replicas_have_the_first_one_s_buffers_after_a_step(rank):
    """One that forward writes, and one that it makes."""
    net = nn.Sequential(nn.BatchNorm1d(3), Mean())
    model = own("DDP")(net)
    for _ in range(2):
        model(torch.arange(12.0).view(4, 3) * (1 + rank)).sum().backward()
        net[1].mean += rank
        model.finish_grad_sync()
        model.zero_grad()
    assert close(net[0].running_mean, 0.19 * torch.tensor([4.5, 5.5, 6.5]), 1e-6)
    assert net[1].mean.abs().max() < 1e-5
    with torch.inference_mode():
        net(torch.ones(2, 3))  # makes the buffer there
    model.module[0](torch.ones(2, 3)).sum().backward()
    model.finish_grad_sync()


@on_both
@on_ranks(2)
def test_what_looks_at_fsdp_s_parameters_is_right_or_refused(rank):
    """Groups by dimensions, hooks, norms, a copy, a cast; a layer that is frozen after a forward without backward, by
    its part or by what the module shows meanwhile."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).double()
    one = copy.deepcopy(net)
    model, x = own("FSDP")(net), torch.randn(2, 4, 3, dtype=torch.float64)
    assert [p.dim() for p in model.parameters()] == [p.ndim for p in net.parameters()] == [2, 1, 2, 1]
    compiled = torch.compile(model, backend="eager") if is_plain() else model  # it takes a second
    assert close(compiled(x[rank]), one(x[rank]))
    model(x[rank]).sum().backward()
    model.finish_grad_sync()
    part = net[0].weight
    for norm in (lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
                 lambda: nn.utils.get_total_norm([part.grad]), lambda: torch._foreach_norm([part.grad]), part.norm,
                 part.grad.norm, lambda: torch.norm(part.grad)):
        with pytest.raises(RuntimeError, match=r"the norm of a part is not .* parallel.clip_grad_norm_\(model.para"):
            norm()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="not copied|copy, move or cast a module before"):
        torch.optim.swa_utils.AveragedModel(model)

    def step(param):
        param.data -= 0.1 * param.grad
        param.grad = None

    net[0].bias.register_hook(lambda grad: 2 * grad)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    model(x[rank]).square().mean().backward()
    model.finish_grad_sync()
    one(x.view(8, 3)).square().mean().backward()
    one[0].bias.grad *= 2
    for p in one.parameters():
        step(p)
    assert all(map(close, model.full_state_dict().values(), one.state_dict().values()))
    parts = dict(model.named_parameters())
    for frozen in parts["0.weight"], net[1].bias:
        model(x[rank])
        frozen.requires_grad_(False)
    model(x[rank]).sum().backward()
    net[1].weight.requires_grad_(False)  # after backward
    model.finish_grad_sync()
    assert [p.requires_grad for p in model.parameters()] == [False, True, False, False]
    parts["1.bias"].data = parts["1.bias"].data.float()
    with pytest.raises(RuntimeError, match="is now torch.float32 .* cast or move a module before"):
        model(x[rank])


@on_both
@on_ranks(2)
def test_a_model_that_is_cast_when_it_is_wrapped_is_refused():
    model = own("DDP")(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="torch.float16.* cast or move a module before it is wrapped"):
        model.half()(torch.ones(1, 2))


@on_both
@parametrize("way", [2, 3])
@on_ranks(2)
def test_zero_2_and_3_say_so_where_ranks_use_other_layers(way, rank):
    """Of one size, so that one's gradients would be added to another's. (FSDP's gathers may wait for each other before:
    then messages that do not match say so, or a timeout does.)"""
    net = nn.ModuleList(nn.Linear(48, 48, bias=False) for _ in range(3))  # a bucket each
    net.forward = lambda x: net[2](net[1 if rank and way == 2 else 0](x))
    model, sync, _ = laid_out(net, way, lr=1.0)
    model(torch.ones(1, 48)).sum().backward()
    if way == 3 and rank:
        sync.reducers[0].started.append("gather 1")
    with pytest.raises(RuntimeError, match=f"rank {1 - rank} has used other parameters"):
        sync.finish_grad_sync()


# -------------------------------------------------------------------------------------- gathers beside what comes after

def layers_and_optimizer(optimizer, stage, **options):
    """Three layers, the same on every rank, and what steps them, in several buckets."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).to(torch.get_default_device())
    return net, fast.zero.AheadOptimizer(net.parameters(), optimizer, bucket_mb=0.01, stage=stage, lr=0.1, **options)


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
