"""The lecture's own forms, which open the sections of parallel.py: each equals one process if its messages are sent."""

import contextlib
import unittest.mock

import pytest
import torch
import torch.nn.functional as F

import collectives as dist
import model
import parallel
from tests.layouts import SMALL, tokens_of
from tests.pool import close, on_ranks


def summed_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def trained(net, batches, before=None):
    """A GPT's parameters after a step of SGD for each batch; before(): what changes it, and returns a step function."""
    step = before(net) if before else torch.optim.SGD(net.parameters(), 0.5).step
    for x, y in batches:
        net.zero_grad()
        (summed_loss(net(x), y) / y.numel()).backward()
        step()
    return [param.detach() for param in net.parameters()]


def naive(net):
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    return lambda: parallel.average_gradients(net) or optimizer.step()


def zero_1(net):
    return parallel.ZeRO1(net.parameters(), torch.optim.SGD, lr=0.5).step


def zero_3(net):
    parallel.ZeRO3(net)
    return torch.optim.SGD(net.parameters(), 0.5).step


@contextlib.contextmanager
def without(names):
    """Collectives, or kinds of messages, do nothing."""
    with contextlib.ExitStack() as around:
        for name in names.split():
            around.enter_context(unittest.mock.patch.object(dist, name, lambda *_, **__: None))
        yield


on_the_reference = pytest.mark.parametrize("pool", ["plain"], indirect=True)  # fast/ takes the place of none of them


def without_one(*names):
    return pytest.mark.parametrize("lost", ["", *names])


@on_the_reference
@pytest.mark.parametrize("size", [2, 3], ids=str)
@pytest.mark.parametrize("form, lost", [
    (naive, ""), (naive, "all_reduce"),
    *((form, lost) for form in (zero_1, zero_3) for lost in ("", "reduce_scatter_tensor", "all_gather_into_tensor"))],
    ids=lambda value: getattr(value, "__name__", value))
@on_ranks()
def test_data_parallelism_and_zero_as_the_lecture_has_them(form, lost):
    """2 steps of a GPT with a tied embedding; nothing divides by 3."""
    n, rank, device = dist.get_world_size(), dist.get_rank(), torch.get_default_device()
    batches = [[t.to(device) for t in tokens_of(step, batch=6)] for step in range(2)]
    want = trained(model.GPT(SMALL).double().to(device), batches)
    with without(lost):
        mine = [[t.chunk(n)[rank] for t in batch] for batch in batches]
        got = trained(model.GPT(SMALL).double().to(device), mine, form)
    if form is zero_3:
        want = [parallel.in_nths(whole, n)[rank] for whole in want]
    assert all(map(close, got, want)) == (not lost)


@on_the_reference
@without_one("all_gather")
@on_ranks(3)
def test_a_layer_cut_by_columns_as_the_lecture_has_it(lost):
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, dtype=torch.float64, generator=generator).to(torch.get_default_device())
                 for size in ((2, 4, 5), (6, 5)))
    with without(lost):
        y = parallel.all_columns(x, weight.chunk(3)[rank])
    assert close(y, x @ weight.T) == (not lost)


@on_the_reference
@without_one("send recv")
@on_ranks(3)
def test_a_pipeline_as_the_lecture_has_it(lost):
    """Its losses, and the gradients of each stage's layers. The embedding is not tied: its ends would be two."""
    rank, device, config = dist.get_rank(), torch.get_default_device(), model.GPTConfig(
        vocab_size=11, seq_len=4, n_layer=3, n_head=2, n_embd=8, tied=False)
    one = model.GPT(config).double().to(device)
    x, y = (torch.randint(11, (8, 4), generator=torch.Generator().manual_seed(i)).to(device) for i in range(2))
    want = summed_loss(one(x), y)
    want.backward()
    pieces = parallel.even_pieces(config, 3)[rank]
    stage = model.GPT(config, pieces=pieces).double().to(device)
    like = torch.zeros(2, 4, 8, dtype=torch.float64, device=device)
    with without(lost):
        losses = parallel.gpipe_step(stage, summed_loss, x.split(2), y.split(2), like)
    right = [close(param.grad, one.get_parameter(name).grad) for name, param in stage.named_parameters()]
    right += [close(sum(losses), want)] * (rank == 2)
    assert all(right) == (not lost)
