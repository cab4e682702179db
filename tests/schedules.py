"""f and g, cuts, the mesh, pipelines and their schedules."""

import dataclasses
import functools
import itertools
import weakref
from collections import defaultdict
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kernels
import model
import parallel
from tests.layouts import SMALL, tokens_of
from fast.linear import WeightGradients
from fast.graphs import CollectingMicroBatch
from tests.pool import close, is_plain, on_cpus_both, on_ranks, parametrize, runs_kernels, table, uncollected
from further.kinds import resized
from further.lists import check, lower, parse, ScheduleError
from further.pieces import split_pieces
from further.schedules import (
    dualpipe_v, HalvedMicroBatch, interleaved, SCHEDULES, v_half, v_min, zb_v, zero_bubble_h1)
from theory.clock import draw, simulate


@on_ranks(2)
def test_f_and_g_change_nothing_in_place():
    """What autograd has saved, or will hand to others, is not summed up in place."""
    x, dy = torch.full((3,), 0.5, requires_grad=True), torch.ones(3)
    parallel.CopyToGroup.apply(x, None).backward(dy)
    assert dy.eq(1).all() and x.grad.eq(2).all()
    x.grad = None
    parallel.ReduceFromGroup.apply(x.tanh(), None).backward(dy)  # tanh keeps its output
    assert close(x.grad.cpu(), 1 - x.detach().cpu().tanh() ** 2, 1e-6)


@parametrize("size,vocab", [(2, 37), (8, 11)])
@on_ranks()
def test_vocabulary_parallel_cross_entropy_of_large_logits(vocab, rank, size):
    """Gradients, and targets that do not count, are proven by layouts."""
    torch.manual_seed(1)
    z, y = 300 * torch.randn(18, vocab, dtype=torch.float64), torch.randint(vocab, (18,))
    mine = z.tensor_split(size, -1)[rank]
    loss = parallel.cross_entropy(mine[None], y[None], vocab, None)
    assert close(loss.cpu(), F.cross_entropy(z, y, reduction="sum").cpu())


class Scaled(nn.Embedding):
    def forward(self, tokens):
        return 8 * super().forward(tokens)


@on_ranks(1)
def test_cut_layers_refuse_what_they_cannot_do():
    """What takes a layer's place would drop all this in silence."""
    f, g = parallel.CopyToGroup.apply, parallel.ReduceFromGroup.apply
    plan = {"0": functools.partial(parallel.VocabParallelEmbedding, g=g)}
    columns = {"0": functools.partial(parallel.ColumnParallelLinear, f=f)}
    row = {"0": functools.partial(parallel.RowParallelLinear, g=g)}
    hooked, scaled, watched = (nn.Linear(4, 4) for _ in range(3))
    hooked.register_full_backward_pre_hook(lambda *_: None)
    scaled.forward = lambda x: 8 * F.linear(x, scaled.weight)
    watched.weight.register_hook(lambda grad: 2 * grad)
    for says, plan_of, layer in [
            ("max_norm, sparse", plan, nn.Embedding(10, 4, max_norm=1.0, sparse=True)),
            ("not ParametrizedLinear", columns, nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
            ("with _backward_pre_hooks", columns, hooked), ("weight_backward_hooks", row, watched),
            ("with forward", row, scaled),
            ("a plain Embedding can be cut over ranks, not Scaled: leave it out", plan, Scaled(10, 4)),
            ("a plain Linear can be cut over ranks, not Conv1d with", columns, nn.Conv1d(4, 4, 1))]:
        with pytest.raises(ValueError, match=says):
            parallel.tensor_parallel(nn.Sequential(layer), None, plan_of)
    with pytest.raises(ValueError, match="needs 9 processes, there are 1"):
        parallel.make_mesh("cpu", 3, 3)


@on_ranks(2)
def test_tokens_outside_of_the_vocabulary_give_nan():
    """Or an error, where the CPU may read them."""
    plan = {"0": functools.partial(parallel.VocabParallelEmbedding, g=parallel.ReduceFromGroup.apply)}
    net = parallel.tensor_parallel(nn.Sequential(nn.Embedding(10, 4)), None, plan)
    ways = ["torch"] + ["triton"] * runs_kernels()
    for bad, read, way, width in itertools.product((-2, 10), (True, False), ways, (5, 10)):  # half of the logits, all
        z = torch.ones(1, 2, width, requires_grad=True)
        numbers = torch.tensor([[3, bad]])
        kernels.use(way)
        with patch.object(kernels, "readable", lambda tensor: read):
            assert net(numbers).isnan().all(2).tolist() == [[False, True]]
            if read:
                with pytest.raises(IndexError, match="of 10 logits they are 0 to 9"):
                    parallel.cross_entropy(z, numbers, 10)
            else:
                loss = parallel.cross_entropy(z * 1, numbers, 10)
                assert loss.isnan() and torch.autograd.grad(loss, z)[0].isnan().all()


# --------------------------------------------------------------------------------------------------- pipeline schedules

IN_A_V = zb_v, v_half, v_min, dualpipe_v


def test_every_schedule_can_run():
    """With fewer micro-batches than ranks, too. Interleaved leaves v open."""
    for (name, make), p in itertools.product(SCHEDULES.items(), (1, 2, 3, 4, 7)):
        for m in {1, 2, p, p + 1, 2 * p - 1, 3 * p + 1}:  # beyond two fillings of the pipe the same turns come again
            for v in [1, 2, 3] if name == "interleaved" else [1]:
                check(lower(make(p, m, v)), m)


def test_schedules_idle_and_hold_what_the_lecture_says():
    """F = I = W = 1. (For p = 4, m = 8 the demo of pipelines prints both of all schedules.)"""
    for p, fillings in itertools.product(range(1, 9), (1, 2, 2.5, 4)):
        m = int(fillings * p)
        for make, idle, peak in [(parallel.gpipe, 3 * (p - 1), [m] * p), (zero_bubble_h1, p - 1, [p] * p),
                                 (parallel.one_f_one_b, 3 * (p - 1), [p - r for r in range(p)])]:
            timeline = simulate(make(p, m))
            assert {*timeline.idle} == {idle} and timeline.peak == peak, make
        for v in (1, 2, 3, 4):
            assert close(max(simulate(interleaved(p, m, v)).idle), 3 * (p - 1) / v)
        assert max(simulate(parallel.one_f_one_b(p, m), 2, 3, 1).idle) == 6 * (p - 1)  # uneven costs


@parametrize("make, idle, less, held", [
    # idle of p ranks, at most (and the papers' bubble); how much less; activations at most, on all ranks but of V-Min
    (zb_v, lambda p: (p - 1) / 2, 0, lambda p: p),  # p / 2
    (v_half, lambda p: 3 * (p - 1) / 2, 1 / 2, lambda p: (p + 2) // 2),  # 3p / 2
    (v_min, lambda p: 2 * (p - 1) + 1 / 2, 1, lambda p: (p + 4) // 3),  # 2p
    (dualpipe_v, lambda p: (p - 1) / 2, 0, lambda p: (2 * p + 1) / 2)])  # p - 1
def test_schedules_in_a_v_idle_and_hold_what_their_papers_say(make, idle, less, held):
    """F = I = W = 1 for all layers of a rank, B = 2, F&B = 3. A stage is half of a rank's layers, and DualPipeV's table
    counts such halves: of 2p stages a bubble of (p-1) (F&B + B - 3W), and 2p + 1 activations. Of V-Min alone the bubble
    grows with m where I takes longer than F."""
    for p, fillings in itertools.product(range(2, 9), (2, 4)):
        lists = make(p, fillings * p)
        assert parallel.ranks_of_stages(lists) == {stage: min(stage, 2 * p - 1 - stage) for stage in range(2 * p)}
        timeline = simulate(lists)
        assert idle(p) - less <= max(timeline.idle) <= idle(p) and max(timeline.peak) == held(p)
        assert make == v_min or min(timeline.peak) == held(p)
    few, many = (max(simulate(make(4, m), 1, 1.5, 1).idle) for m in (8, 16))
    assert close(many, few + 8 * (make == v_min))


def test_a_dualpipe_runs_each_f_beside_a_backward():
    """In the middle of a step: F of one stage, then I and W of the other, of an earlier micro-batch."""
    rank_1 = [(action.kind, action.stage) for action in dualpipe_v(4, 16)[1]]
    turn = [("F", 1), ("I", 6), ("W", 6), ("F", 6), ("I", 1), ("W", 1)]
    assert any(rank_1[start:start + 12] == 2 * turn for start in range(len(rank_1)))


# Of three ranks' lists, in the middle one: other actions in place of some (=none: gone). F2' is of its second stage.
BROKEN = """
    1f1b    F0=RF0 RF0=F0           deadlock
    1f1b    RF0=F0,RF0 F0=none      deadlock                before what it needs has come
    1f1b    RB0=B0,RB0 B0=none      deadlock
    1f1b    RB2=none                deadlock
    1f1b    SF1=none                deadlock
    1f1b    RF0=RF1 RF1=RF0         deadlock                rank 0 sends them in the other order
    1f1b    B3=none                 must each be there
    1f1b    B3=B3,B3                is there twice
    1f1b    B3=B3,another's         does not live on rank
    split   I2=W2 W2=I2             deadlock
    in a v  W2=none                 must each be there
    in a v  F2=F2' F2'=F2           deadlock
"""
OF = {"1f1b": [parallel.one_f_one_b], "split": [zero_bubble_h1, *IN_A_V], "in a v": IN_A_V}


@parametrize("make,change,says", [
    (make, dict(pair.split("=") for pair in change.split()), says)
    for schedules, change, says, *_ in table(BROKEN) for make in OF[schedules]])
def test_broken_schedules_are_rejected(make, change, says):
    def name(action):
        return str(action) + "'" * (action.stage > 2)

    lists = lower(make(3, 6))
    named = {name(action): [action] for action in lists[1]} | {"another's": lists[2][:1], "none": []}
    names = ",".join(change.get(name(old), name(old)) for old in lists[1]).split(",")
    lists[1] = [action for new in names for action in named[new]]
    with pytest.raises(ScheduleError, match=says) as error:
        check(lists)
    assert "rank 2" in str(error.value) and (says == "must each be there" or "->" in str(error.value))


def test_a_micro_batch_that_no_list_has_is_missed():
    lists = parallel.one_f_one_b(2, 4)
    for number in range(4):
        without = [[action for action in actions if action.micro_batch != number] for actions in lists]
        with pytest.raises(ScheduleError, match=f"stage 0, micro-batch {number}: F and B.*must each be there"):
            check(lower(without), 4)
    with pytest.raises(ScheduleError, match="F2 is there, and there are 2 micro-batches"):
        check(lower(parallel.one_f_one_b(2, 3)), 2)


def test_schedules_are_read_as_they_are_printed():
    for make in SCHEDULES.values():
        lists = make(3, 4, 2)
        assert parse(draw(simulate(lists))) == lists
    swapped = parse("rank 0  F0/1 B0/1\nrank 1  F0/0 B0/0")  # a stage a rank, but not its own
    assert parse(draw(simulate(swapped))) == swapped


@parametrize("text, says", [
    ("", "begins with rank 0"), ("rank 1  F0 B0", "begins with rank 0"), ("rank 0  F0 X0", "'X0' is no action"),
    ("rank 0  F0 B0 B0", "B0 is there twice"), ("rank 0  F0 F2 B0 B2", "micro-batch 1: F and B"),
    ("rank 0  F0 B0\nrank 1  B0 .. F0", "deadlock"),
    ("rank 0  F0 B0\nrank 1  F0/2 B0/2", "stage 1, micro-batch 0: F and B")])
def test_texts_of_schedules_that_cannot_run_are_refused(text, says):
    with pytest.raises(ValueError, match=says):
        parse(text)


# --------------------------------------------------------------------------------------------------- running a schedule

def test_layers_are_split_by_cost():
    even = model.GPTConfig(100, 8, 6, 2, 8)
    for stages in range(1, 9):
        cuts = split_pieces(even, stages)
        assert [i for cut in cuts for i in cut] == list(range(8)) and all(cuts) and len(cuts) == stages
    assert split_pieces(dataclasses.replace(even, vocab_size=100_000), 2) == [range(7), range(7, 8)]
    heavy_block = resized(even, n_layer=4, experts=4, top_k=4, expert_every=4)
    assert split_pieces(heavy_block, 2) == [range(4), range(4, 6)]


class AddsToGrad:
    """A stand-in, which adds gradients where autograd does."""

    def add(self, param, a, b=None):
        grad = a if b is None else a @ b
        param.grad = grad if param.grad is None else param.grad + grad


def collecting(net):
    return CollectingMicroBatch(net, None, WeightGradients(net, defaultdict(AddsToGrad)))


def halves_of(net):
    """A micro-batch of this program whose backward comes in halves."""
    if is_plain():
        return HalvedMicroBatch(net, None)
    return collecting(net)


@on_cpus_both
@parametrize("first, frozen", [(1, ()), (0, ("wte", "wpe", "ln_"))])
@on_ranks(1)
def test_weight_gradients_wait_for_w(first, frozen):
    """I computes no Linear's, and in the reference none. Both halves together are B, behind frozen layers, too."""
    found, device = [], torch.get_default_device()
    for make in (lambda net: parallel.MicroBatch(net, None)), halves_of:
        net = model.GPT(SMALL, pieces=range(first, 2)).double().to(device)
        params = {name: param for name, param in net.named_parameters()
                  if param.requires_grad_(not any(word in name for word in frozen)).requires_grad}
        micro_batch = make(net)
        x = torch.ones(2, 5, SMALL.n_embd).double().requires_grad_() if first else tokens_of(0)[0].to(device)
        y = micro_batch.forward(x)
        kinds = "B" if make != halves_of else "IW"
        for kind in kinds:
            if kind == "W":
                micro_batch.backward_weights()
            else:
                dx = (micro_batch.backward if kind == "B" else micro_batch.backward_input)(torch.ones_like(y))
            early = {name for name, param in params.items() if param.grad is not None}
            if kind == "I" and first:  # of frozen tokens, the first layer's product is autograd's
                assert early == {name for name in params if "ln_" in name and not is_plain()}
                assert dx.shape == y.shape
        found.append([micro_batch.x.grad if kinds == "B" else None] + [param.grad for param in params.values()])
    assert all(close(halves, whole, 1e-12) for whole, halves in zip(*(grads[1:] for grads in found), strict=True))


def test_w_keeps_what_it_computes_from_until_it_has():
    """After I neither the graph lives, nor the stage's input, whose gradient has been sent."""
    net = model.GPT(SMALL, pieces=range(1, 3))
    micro_batch = collecting(net)
    x, kept, alive = torch.ones(2, 5, SMALL.n_embd).requires_grad_(), [], []
    given, compute = weakref.ref(x), micro_batch.weight_gradients.compute

    def computed(*computed_from):
        alive.append(sum(gradient() is not None for gradient in kept))
        compute(*computed_from)

    with uncollected():
        y = micro_batch.forward(x)
        del x
        micro_batch.backward_input(torch.ones_like(y))
        assert given() is None
        kept = [weakref.ref(dy) for _, _, dy, _ in micro_batch.later]
        with patch.object(micro_batch.weight_gradients, "compute", computed):
            micro_batch.backward_weights()
    assert alive == [8, 7, 6, 5, 4, 3, 2, 1]


class Shared(nn.Module):
    """x W W."""

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.rand(4, 4))

    def forward(self, x):
        return x @ self.W @ self.W


class Both(torch.autograd.Function):
    """x W, of which the second half is an output of its own."""

    @staticmethod
    def forward(ctx, x, W):
        ctx.save_for_backward(x, W)
        return torch.chunk(x @ W, 2, 1)

    @staticmethod
    def backward(ctx, *dy):
        x, W = ctx.saved_tensors
        return torch.cat(dy, 1) @ W.T, x.T @ torch.cat(dy, 1)


class Outputs(Shared):
    """What is made of two outputs of one operation, of one shape; last of all the second of two."""

    def forward(self, x):
        a, b = Both.apply(x, self.W)
        return Both.apply(torch.cat([a * b, b], 1), self.W)[1]


@on_cpus_both
@parametrize("kind", [Shared, Outputs])
@on_ranks(1)
def test_i_and_w_of_shared_weights_and_of_several_outputs_are_b(kind):
    """Weights are counted once, each output has its own gradient: pytorch #180952, #170277."""
    torch.manual_seed(1)
    net = kind()
    x, grads = torch.rand(3, 4), []
    for micro_batch, kinds in (parallel.MicroBatch(net, None), "B"), (halves_of(net), "IW"):
        y = micro_batch.forward(x.clone().requires_grad_())
        if kinds == "B":
            dx = micro_batch.backward(torch.ones_like(y))
        else:
            dx = micro_batch.backward_input(torch.ones_like(y))
            micro_batch.backward_weights()
        grads.append((dx, net.W.grad))
        net.W.grad = None
    assert all(map(close, *grads)) and grads[0][1].norm() > 1


@on_ranks(1)
def test_a_failed_i_puts_nothing_off():
    block = model.GPT(SMALL, pieces=range(1, 2)).double().to(torch.get_default_device())
    micro_batch = halves_of(block)
    micro_batch.forward(torch.ones(2, 5, SMALL.n_embd).double().requires_grad_())
    with pytest.raises(RuntimeError):
        micro_batch.backward_input(torch.ones(1, 1, dtype=torch.float64))  # of another shape
    assert micro_batch.weight_gradients.later is None  # so that the next B computes its own
