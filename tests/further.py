"""Sequences, contexts and experts over ranks equal one process."""

import contextlib
import gc
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import collectives as dist
import fast.context
import fast.experts
import fast.sequence
import further.context
import further.experts
import further.kinds
import kernels
import model
from fast import beside, hopper
from tests import gluon
from tests.kernels import KERNEL_DEVICE, plain_gelu, random, triton_kernels  # noqa: F401
from lessons.bench.timing import patched
from tests.layouts import SMALL, case_of, differences_in
from tests.links import DirectGlooLink, served_by
from tests.pool import close, needs_kernels, on_cpus, on_ranks, parametrize, uncollected


def test_a_ring_is_wrong_where_keys_and_values_stay(pool):
    assert all(differences_in(pool, case_of("cp=2 tokens=8 without=keys_travel_ahead")))


@on_cpus
@on_ranks(2)
def test_products_leave_room_for_a_transfer_until_it_has_been_waited_for():
    """Of a ring's keys and of experts' rows. One that nobody waits for, because its step failed, is forgotten."""
    rows = torch.zeros(8, 4)
    with served_by(DirectGlooLink), patch.object(beside, "programs_at_once", lambda device: 132):
        for start in (lambda: fast.context.start_shift(rows, None),
                      lambda: fast.experts.start_exchange(rows, None, [4, 4], [4, 4])):
            (first, _), (second, _) = start(), start()
            first.wait()
            assert beside.programs_beside_transfers(rows.device) == 130
            second.wait()
            second.wait()
            assert beside.programs_beside_transfers(rows.device) == 132
            start()
            gc.collect()
            assert beside.programs_beside_transfers(rows.device) == 132


def test_a_transfer_that_has_been_waited_for_keeps_no_memory():
    """Not even until garbage is collected, which happens in no recording: there a handle keeps its tensors."""
    transfer = dist.Handle()
    transfer.keeps = torch.zeros(1, device="cpu")
    kept = weakref.ref(transfer.keeps)
    handle = beside.under_way(transfer)
    handle.wait()
    with uncollected():
        del transfer, handle
        assert kept() is None


def test_a_router_takes_the_lower_number_of_equal_scores_and_counts_what_backward_has_passed_once():
    router = further.experts.Router(further.kinds.resized(SMALL, experts=5, top_k=2))
    nn.init.zeros_(router.weight)
    router.bias, x = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]), torch.randn(2, 3, 32, device="cpu").requires_grad_()
    with torch.no_grad():
        router(x)
    chosen, gates = router(x)
    assert chosen.eq(torch.tensor([1, 3])).all() and gates.eq(0.5).all() and router.load == 0
    torch.autograd.grad(gates.sum(), x, retain_graph=True)  # as the two halves of a backward pass it
    gates.sum().backward()
    assert router.load.tolist() == [0, 6, 0, 6, 0]
    router.balance(router.load, 0.5)
    assert close(router.bias, torch.tensor([0.5, 0.5, 0.5, 0.5, 1.5]) - 0.7, 1e-6)
    router.load = 0
    # Backward needs what sin keeps, so it runs the whole router again.
    torch.utils.checkpoint.checkpoint(lambda x: router(x)[1].sin(), x, use_reentrant=False).sum().backward()
    assert router.load.tolist() == [6, 0, 0, 0, 6]


def test_a_router_computes_in_float32():
    """Of bf16 tokens and weights, too."""
    router = further.experts.Router(further.kinds.resized(SMALL, experts=4, top_k=1)).bfloat16()
    x = torch.randn(1, 50, 32).bfloat16()
    nn.init.zeros_(router.bias), nn.init.normal_(router.weight)
    chosen, gates = router(x)
    exact = (x.double() @ router.weight.double().T).sigmoid().max(-1, keepdim=True)
    assert gates.dtype == torch.float32 and close(gates.detach(), exact.values.detach(), 1e-6)
    assert chosen.equal(exact.indices)


@parametrize("k", [1, 2])
def test_experts_are_mlps_of_their_own(k):
    """A token's output is the weighted sum of k dense MLPs' outputs, and autograd's gradients are ours, the router's
    included. The bias enters the choice alone. Each expert begins as its name says."""
    config = further.kinds.resized(SMALL, experts=3, top_k=k)
    net = model.GPT(config).double()
    mixture, x, dy = net.h["0"].mlp, *torch.randn(2, 2, 5, 32, dtype=torch.float64)
    router, fc, proj = mixture.router, mixture.experts.c_fc, mixture.experts.c_proj
    router.bias += torch.tensor([0.3, 0.0, -0.1])
    leaves = [x.requires_grad_(), *mixture.parameters()]
    every = torch.stack([F.linear(plain_gelu(F.linear(x, fc.weight[e], fc.bias[e])), proj.weight[e], proj.bias[e])
                         for e in range(3)], -2)                                              # (B, T, E, C)
    scores = (x @ router.weight.T).sigmoid()
    chosen = (scores + router.bias).topk(k).indices
    gates = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))           # (B, T, E)
    if k > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    exact = (gates.unsqueeze(-1) * every).sum(-2)
    for ours, theirs in zip(*((y, *torch.autograd.grad(y, leaves, dy)) for y in (mixture(x), exact))):
        assert close(ours.detach(), theirs.detach(), 1e-12)
    one = model.initial_value(config, "h.0.mlp.experts.1.c_fc.weight", (128, 32), 0)
    assert one.double().equal(fc.weight[1])


def beside_one_device(qkv, dy, ring, rank, size, dtype):
    """Of attention to a sequence that is cut over ranks: (this rank's output and gradient of qkv, what they are in
    float64)."""
    whole = qkv.double().requires_grad_()
    mine = further.context.own_tokens(qkv.shape[1], rank, size, "ring", qkv.device)
    y = kernels.attention(whole)
    y.backward(dy.double())
    kernels.use("triton")
    with contextlib.nullcontext() if size > 2 or qkv.is_cuda else served_by(DirectGlooLink):
        dist.reset_traffic()
        part = qkv[:, mine].to(dtype).requires_grad_()
        out = ring(part, None)
        out.backward(dy[:, mine].to(dtype))
    return (out, part.grad), (y[:, mine], whole.grad[:, mine])


@parametrize("size, dtype, error", [(2, torch.float16, 1e-3), (4, torch.float32, 1e-6)], ids=str)
@on_ranks()
def test_ring_attention_on_kernels(dtype, error, rank, size):
    """Merged by their kernel, with dK and dV of a rank's own keys last; sent as without it: K and V twice, dK and dV,
    in float32, once."""
    needs_kernels()
    torch.manual_seed(0)
    qkv, dy = torch.randn(4 // size, 128 * size, 3, 1, 16), torch.randn(4 // size, 128 * size, 1, 16)
    (out, grad), (y, exact) = beside_one_device(qkv, dy, further.context.RingAttention.apply, rank, size, dtype)
    assert out.dtype == grad.dtype == dtype and out.is_contiguous()
    for ours, theirs in (out, y), *zip(grad.unbind(2), exact.unbind(2)):
        assert (ours.double() - theirs).norm() < error * theirs.norm()
    sent, keys_and_values = sum(t.bytes for t in dist.traffic().values()), grad.numel() * 2 // 3
    assert sent == (size - 1) * keys_and_values * (2 * dtype.itemsize + 4)


def test_rows_with_gaps_are_packed_by_a_kernel(triton_kernels):
    """Of more numbers than a program copies."""
    for dtype in torch.float32, torch.bfloat16:
        x = random(3, 2, 700, 3, dtype=dtype).transpose(0, 1)
        with patch.object(fast.sequence, "add_rows", side_effect=fast.context.add_rows) as copies:
            y = fast.sequence.packed(x)
        assert y.equal(x) and y.is_contiguous() and copies.call_count == 1
        assert fast.sequence.packed(y) is y


@parametrize("passes, B, heads, own", [(2, 1, 1, 0), (1, 1, 1, 1), (1, 1, 2, 2), (1, 3, 1, 2)], ids=str)
@on_ranks(2)
def test_the_tuned_ring(passes, B, heads, own, rank):
    """Two query heads a key head. Backward in one pass computes a rank's own keys in two parts, if there are two heads
    or sequences. Without a Hopper GPU its kernel runs as plain Python."""
    needs_kernels()
    if own and not hopper.HAVE_GLUON:
        pytest.skip("no Gluon in this Triton, or no Triton")
    T, D = 512, 128 if KERNEL_DEVICE == "cuda" else 16
    torch.manual_seed(0)
    qkv, dy = torch.randn(B, T, 4, heads, D), torch.randn(B, T, 2 * heads, D)
    some = qkv[:, ::2].half().flatten(2, 3).transpose(1, 2)
    real = hopper.specialized_takes(some, some, True)
    kernel = hopper.one_pass_backward_kernel
    with patched([(hopper, "described", hopper.described if real else gluon.Descriptor),
                  (hopper, "one_pass_backward_kernel", kernel if real else gluon.Launch(kernel, hopper)),
                  (fast.context, "one_pass_takes", lambda *_: passes == 1)]), (
            patch.object(fast.context, "add_in_one_pass", side_effect=hopper.add_in_one_pass)) as parts:
        found = beside_one_device(qkv, dy, fast.context.TunedRing.apply, rank, 2, torch.float16)
    assert parts.call_count == (0 if passes == 2 else own + 1)
    for ours, theirs in zip(*found):
        assert (ours.double() - theirs).norm() < 2e-3 * theirs.norm()
