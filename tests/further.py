"""Sequences, contexts and experts over ranks equal one process."""

import contextlib
import dataclasses
import itertools
import math
import types
import unittest.mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fast.nccl
import fast.context
import collectives as dist
import fast.attention
import further.context
import further.experts
import kernels
import model
from tests.collectives import DirectGlooLink, served_by
from tests.kernels import random
from tests.layouts import SMALL, all_of, differences, in_layout, one_process
from tests.pool import close, needs_kernels


@pytest.mark.parametrize("layout,micro_batches,schedule,options", [
    ({"tp": 2}, 2, "1f1b", {}), ({"tp": 5}, 1, "1f1b", {"recompute": "block"}), ({"tp": 2}, 2, "zb-h1", {}),
    ({"dp": 2, "tp": 2}, 2, "1f1b", {"zero": 1}),
    ({"dp": 2, "tp": 2}, 2, "1f1b", {"zero": 2, "recompute": "attention"}),
    ({"dp": 2, "tp": 2}, 2, "1f1b", {"zero": 3, "recompute": "block"}), ({"dp": 2, "tp": 2}, 1, "1f1b", {}),
    ({"tp": 2, "pp": 2}, 4, "zb-h1", {"zero": 1}), ({"tp": 2, "pp": 2}, 4, "interleaved", {"virtual_stages": 2}),
    ({"dp": 2, "tp": 2, "pp": 2}, 2, "1f1b", {"zero": 3}),
    ({"dp": 4, "tp": 2}, 1, "1f1b", {"zero": 2, "zero_within": 2}),
    ({"tp": 2, "pp": 4}, 2, "zb-h1", {"recompute": "attention"})], ids=str)
def test_sequence_parallel_equals_one_process(pool, layout, micro_batches, schedule, options):
    """Tokens are cut between the layers that tp cuts. ZeRO steps by AdamW with an untied embedding, the others by SGD
    with a tied one."""
    optimizer, change = ("adamw", {"n_layer": 3, "tied": False}) if "zero" in options else ("sgd", {"n_layer": 3})
    change |= {"n_head": 5, "n_embd": 30} if layout["tp"] == 5 else {}
    want = one_process(optimizer, **change)
    results = pool(math.prod(layout.values())).run(in_layout, layout, optimizer, micro_batches, change,
                                                   schedule=schedule, sequence=True, **options)
    for got in [*results, all_of(results)]:
        assert not differences(got, want), change


def in_layout_by_rows(*args, **options):
    with unittest.mock.patch.object(fast.nccl, "takes_rows", lambda nbytes, group, waits=True: True):
        return in_layout(*args, **options)


def test_sequence_parallel_in_place_equals_one_process(pool):
    """Gathered and scattered where tokens belong, however small they are."""
    want = one_process("sgd", n_layer=3)
    for got in pool(2).run(in_layout_by_rows, {"tp": 2}, "sgd", 2, {"n_layer": 3}, sequence=True):
        assert not differences(got, want)


@pytest.mark.parametrize("context", ["ring", "ulysses"])
@pytest.mark.parametrize("layout,micro_batches,schedule,options", [
    ({"cp": 2}, 2, "1f1b", {}), ({"cp": 4}, 1, "1f1b", {"zero": 3}), ({"dp": 2, "cp": 2}, 2, "1f1b", {"zero": 1}),
    ({"dp": 2, "cp": 2}, 2, "1f1b", {"zero": 2, "zero_within": 2, "recompute": "block"}),
    ({"cp": 2, "tp": 2}, 1, "1f1b", {"sequence": True, "recompute": "attention"}),
    ({"cp": 2, "pp": 2}, 4, "zb-h1", {"zero": 3}), ({"cp": 2, "pp": 2}, 4, "interleaved", {"virtual_stages": 2}),
    ({"dp": 2, "cp": 2, "tp": 2}, 1, "1f1b", {"zero": 2, "sequence": True}),
    ({"cp": 2, "tp": 2, "pp": 2}, 2, "zb-h1", {"zero": 1, "sequence": True})], ids=str)
def test_context_parallel_equals_one_process(pool, layout, micro_batches, schedule, options, context):
    """All tokens are cut, over cp. Where the ring steps by SGD with a tied embedding, Ulysses steps by AdamW with an
    untied one, and the other way round."""
    first = (context == "ring") == ("zero" in options)
    optimizer, change = ("sgd", {"n_layer": 3}) if first else ("adamw", {"n_layer": 3, "tied": False})
    want = one_process(optimizer, tokens=8, **change)
    results = pool(math.prod(layout.values())).run(in_layout, layout, optimizer, micro_batches, change, tokens=8,
                                                   schedule=schedule, context=context, **options)
    for got in [*results, all_of(results)]:
        assert not differences(got, want), change


FEW, ALL = (0.0, -9.0, 0.0, 0.0), (9.0, 0.0, 0.0, 0.0)  # no token for the second expert; of k = 1 all for the first


@pytest.mark.parametrize("layout,micro_batches,schedule,options,experts", [
    ({"dp": 1}, 2, "1f1b", {}, {}), ({"tp": 2}, 1, "1f1b", {}, {}), ({"dp": 2}, 1, "1f1b", {"zero": 1}, {}),
    ({"dp": 2}, 2, "1f1b", {"ep": 2}, {}), ({"dp": 2}, 2, "1f1b", {"ep": 2, "zero": 3}, {"bias": FEW}),
    ({"dp": 2}, 1, "1f1b", {"ep": 2, "zero": 2}, {"bias": ALL, "top_k": 1}),
    ({"dp": 2}, 2, "1f1b", {"ep": 2}, {"experts": 2, "top_k": 2}), ({"dp": 2}, 1, "1f1b", {"ep": 2}, {"top_k": 1}),
    ({"dp": 4}, 2, "1f1b", {"ep": 2, "zero": 1, "recompute": "block"}, {"bias": FEW}),
    ({"dp": 4}, 1, "1f1b", {"ep": 4, "zero": 2}, {}), ({"dp": 4}, 2, "1f1b", {"ep": 4, "zero": 1}, {"bias": ALL}),
    ({"dp": 4}, 2, "1f1b", {"ep": 2, "zero": 3, "recompute": "block"}, {}),
    ({"dp": 4}, 2, "1f1b", {"ep": 2, "zero": 2, "zero_within": 2}, {"expert_every": 2}),
    ({"dp": 2, "tp": 2}, 2, "1f1b", {"ep": 2}, {"bias": FEW}),
    ({"dp": 2, "tp": 2}, 2, "1f1b", {"ep": 2, "sequence": True}, {}), ({"dp": 2, "cp": 2}, 2, "1f1b", {"ep": 2}, {}),
    ({"dp": 2, "cp": 2}, 1, "1f1b", {"ep": 2, "zero": 3, "context": "ulysses"}, {"top_k": 3}),
    ({"dp": 2, "pp": 2}, 4, "1f1b", {"ep": 2, "zero": 1}, {"expert_every": 2}),
    ({"dp": 2, "pp": 2}, 4, "zb-h1", {"ep": 2}, {}),
    ({"dp": 2, "pp": 2}, 4, "interleaved", {"ep": 2, "zero": 2, "virtual_stages": 2}, {}),
    ({"dp": 4, "tp": 2}, 1, "1f1b", {"ep": 4, "zero": 3, "sequence": True}, {}),
    ({"dp": 4, "cp": 2}, 1, "1f1b", {"ep": 2, "zero": 2}, {"expert_every": 3}),
    ({"dp": 2, "tp": 2, "pp": 2}, 2, "zb-h1", {"ep": 2, "zero": 1, "sequence": True}, {})], ids=str)
def test_expert_parallel_equals_one_process(pool, layout, micro_batches, schedule, options, experts):
    """Balanced after each step. ZeRO steps by AdamW with an untied embedding, the others by SGD with a tied one."""
    optimizer, change = ("adamw", {"n_layer": 3, "tied": False}) if "zero" in options else ("sgd", {"n_layer": 3})
    change |= {"experts": 4, **experts}
    bias = change.pop("bias", None)
    want = one_process(optimizer, tokens=8, bias=bias, **change)
    results = pool(math.prod(layout.values())).run(in_layout, layout, optimizer, micro_batches, change, tokens=8,
                                                   schedule=schedule, bias=bias, **options)
    assert set(all_of(results)[2]) == set(want[2])
    for got in [*results, all_of(results)]:
        assert not differences(got, want), change


def averaged_over_all_replicas(*args, **options):
    """Experts' gradients as if there were no reason to treat them apart."""
    def expert_parallel(module, group, copies):
        real(module, group, copies)
        for param in module.parameters():
            param.__dict__.pop("replicas", None), param.__dict__.pop("fed", None)
    real = further.experts.expert_parallel
    with unittest.mock.patch.object(further.experts, "expert_parallel", expert_parallel):
        return in_layout(*args, **options)


@pytest.mark.parametrize("layout,how", [
    ({"dp": 2}, "exchange"), ({"dp": 2}, "ParallelGPT.balance"), ({"dp": 2}, averaged_over_all_replicas),
    ({"dp": 4}, averaged_over_all_replicas), ({"dp": 2, "tp": 2}, "ParallelGPT.balance"),
    *(({"tp": 2}, name) for name in ("CopyToGroup.backward", "ReduceFromGroup.forward")),
    *(({"tp": 2, "sequence": True}, name) for name in ("scatter_tokens", "ParallelGPT.balance"))],
    ids=lambda value: getattr(value, "__name__", str(value)))
def test_experts_are_wrong_without(pool, layout, how):
    """A collective, or the average over an expert's own copies."""
    change, sequence = {"experts": 4, "n_layer": 1}, "sequence" in layout
    layout = {axis: size for axis, size in layout.items() if axis != "sequence"}
    want, options = one_process("sgd", tokens=8, **change), {"sequence": sequence, "ep": min(2, layout.get("dp", 1))}
    run, sabotage = (in_layout, how) if isinstance(how, str) else (how, None)
    for got in pool(math.prod(layout.values())).run(run, layout, "sgd", 1, change, sabotage, tokens=8, **options):
        assert differences(got, want)


def test_a_router_takes_the_lower_number_of_equal_scores_and_counts_what_backward_has_passed_once():
    config = dataclasses.replace(SMALL, experts=5, top_k=2)
    router = further.experts.Router(config)
    with torch.no_grad():
        router.weight.zero_()
        router.bias.copy_(torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]))
    x = torch.randn(2, 3, 32, device="cpu").requires_grad_()
    with torch.no_grad():
        router(x)
    chosen, gates = router(x)
    assert chosen.tolist() == 2 * [3 * [[1, 3]]] and gates.eq(0.5).all() and router.load == 0
    gates.sum().backward()
    assert router.load.tolist() == [0, 6, 0, 6, 0]
    router.balance(router.load, 0.5)
    assert close(router.bias, torch.tensor([0.5, 0.5, 0.5, 0.5, 1.5]) - 0.7, 1e-6)
    router.load = 0
    # Backward needs what sin keeps, so it runs the whole router again.
    torch.utils.checkpoint.checkpoint(lambda x: router(x)[1].sin(), x, use_reentrant=False).sum().backward()
    assert router.load.tolist() == [6, 0, 0, 0, 6]


def test_a_router_computes_in_float32_and_its_weights_have_a_gradient_for_one_expert():
    """Of bf16 tokens and weights, products and choice are those of float32; the bias enters the choice alone."""
    torch.manual_seed(1)
    router = further.experts.Router(dataclasses.replace(SMALL, experts=4, top_k=1))
    nn.init.normal_(router.weight), nn.init.zeros_(router.bias)
    router.weight.data = router.weight.data.bfloat16()
    x = torch.randn(1, 50, 32).bfloat16()
    scores = (x.double() @ router.weight.double().T).sigmoid()
    chosen, gates = router(x)
    assert gates.dtype == torch.float32 and torch.equal(chosen, scores.argmax(-1, keepdim=True))
    assert close(gates, scores.gather(-1, chosen), 1e-6)
    router.bias += torch.tensor([0.0, 0.0, 2.0, 0.0])
    chosen, gates = router(x)
    assert chosen.eq(2).all() and close(gates, scores[..., 2:3], 1e-6)
    gates.sum().backward()
    assert router.weight.grad[2].abs().sum() > 0


def test_experts_are_mlps_of_their_own():
    """A token's output is the weighted sum of k dense MLPs' outputs; each expert begins as its name says."""
    config = dataclasses.replace(SMALL, experts=3, top_k=2)
    net = model.GPT(config).double()
    mixture, x = net.h["0"].mlp, torch.randn(2, 5, 32, device="cpu").double()
    chosen, gates = mixture.router(x)
    experts, want = mixture.experts, torch.zeros_like(x)
    for b, t, k in itertools.product(range(2), range(5), range(2)):
        e = chosen[b, t, k]
        inner = kernels.gelu(F.linear(x[b, t], experts.c_fc.weight[e], experts.c_fc.bias[e]))
        want[b, t] += gates[b, t, k] * F.linear(inner, experts.c_proj.weight[e], experts.c_proj.bias[e])
    assert close(mixture(x), want, 1e-12)
    one = model.initial_value(config, "h.0.mlp.experts.1.c_fc.weight", (128, 32), 0)
    assert torch.equal(net.get_parameter("h.0.mlp.experts.c_fc.weight")[1], one.double())


def where_keys_and_values_stay(*args, **options):
    with unittest.mock.patch.object(fast.context, "start_shift", lambda tensor, group: ([], tensor)):
        return in_layout(*args, **options)


def test_a_ring_is_wrong_where_keys_and_values_stay(pool):
    """The reference's `shift` sends them, too."""
    want = one_process("sgd", tokens=8)
    for got in pool(2).run(where_keys_and_values_stay, {"cp": 2}, "sgd", 1, {}, tokens=8):
        assert differences(got, want)


def with_the_block_s_own_sums(*args, **options):
    def backward(q, k, v, o, lse, do, is_causal):
        return real(q, k, v, o, kernels.attention_reference(q, k, v, is_causal)[1], do, is_causal)
    real = kernels.attend_backward
    with unittest.mock.patch.object(kernels, "attend_backward", backward):
        return in_layout(*args, **options)


def test_ring_attention_goes_back_through_the_sums_of_all_keys(pool):
    want = one_process("sgd", tokens=8)
    for got in pool(2).run(with_the_block_s_own_sums, {"cp": 2}, "sgd", 1, {}, tokens=8):
        assert differences(got, want)


def ring_on_kernels(dtype, link):
    """(how far O, dQ, dK and dV of ring attention are from those of one rank, bytes sent)."""
    rank, n = dist.get_rank(), dist.get_world_size()
    B, T, H, D = 4 // n, 256 * n, 1, 16
    torch.manual_seed(0)
    qkv, dy = torch.randn(B, T, 3, H, D), torch.randn(B, T, H, D)
    whole, mine = qkv.double().requires_grad_(), further.context.own_tokens(T, rank, n, "ring", qkv.device)
    y = kernels.attention(whole)
    y.backward(dy.double())
    kernels.use("triton")
    try:
        with served_by(link) if link else contextlib.nullcontext():
            dist.reset_traffic()
            part = qkv[:, mine].to(dtype).requires_grad_()
            out = further.context.RingAttention.apply(part, None)
            out.backward(dy[:, mine].to(dtype))
    finally:
        kernels.use("auto")
    assert out.dtype == part.grad.dtype == dtype and out.is_contiguous()
    pairs = [(out, y[:, mine]), *zip(part.grad.unbind(2), whole.grad[:, mine].unbind(2))]
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs], sum(t.bytes for t in dist.traffic().values())


@pytest.mark.parametrize("size,dtype,error", [(2, torch.float16, 1e-3), (4, torch.float32, 1e-6)], ids=str)
def test_ring_attention_on_kernels(pool, size, dtype, error):
    """Merged by their kernel, with dK and dV of a rank's own keys last; sent as without it: K and V twice, dK and dV,
    in float32, once."""
    needs_kernels(pool)
    link = DirectGlooLink if pool.device_type == "cpu" and size == 2 else None
    for errors, sent in pool(size).run(ring_on_kernels, dtype, link):
        assert max(errors) < error, errors
        assert sent == (size - 1) * 2 * 4 // size * 256 * 16 * (2 * dtype.itemsize + 4)


@pytest.mark.parametrize("size,kind", [(1, "ring"), (2, "ring"), (4, "ring"), (4, "ulysses")])
def test_each_rank_has_its_own_tokens_and_as_much_to_do(pool, size, kind):
    """Together all tokens, once; by zigzag, as many pairs of query and key in each step on every rank."""
    tokens = pool(size).run(tokens_of_rank, 16 * size, kind)
    assert sorted(sum(tokens, [])) == list(range(16 * size))
    for r, mine in enumerate(tokens) if kind == "ring" else ():
        for other, theirs in enumerate(tokens):
            rows, keys, causal = further.context.seen(r, other, 8)
            pairs = {(q, k) for i, q in enumerate(mine) for j, k in enumerate(theirs)
                     if i in range(16)[rows] and j in range(16)[keys] and (not causal or j <= i)}
            assert pairs == {(q, k) for q in mine for k in theirs if k <= q}
            assert len(pairs) == (16 * 17 // 2 if r == other else 128)


def test_cuts_that_leave_a_rest_are_refused():
    with pytest.raises(RuntimeError, match="invalid for input of size 10"):
        further.context.own_tokens(10, 0, 2, "ring")
    with pytest.raises(RuntimeError, match="multiply up to the size of dim 1"):
        further.experts.split_experts(types.SimpleNamespace(mesh=torch.zeros(2, 3, 1, 1, device="cpu")), 2)


def tokens_of_rank(tokens, kind):
    return further.context.own_tokens(tokens, dist.get_rank(), dist.get_world_size(), kind).tolist()


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_in_parts_is_attention(is_causal, triton_kernels):
    """Parts of the keys, merged by their log-sum-exps, and their gradients, by the kernels and without; some rows of a
    causal part see nothing."""
    q, k, v, do = (random(1, 2, 40, 16) for _ in range(4))
    want = [x.requires_grad_() for x in (q.double(), k.double(), v.double())]
    o = F.scaled_dot_product_attention(*want, is_causal=is_causal)
    grads = torch.autograd.grad(o, want, do.double())
    for choice in ("triton", "torch"):
        kernels.use(choice)
        parts = [fast.attention.attention_block(q[:, :, rows], k[:, :, keys], v[:, :, keys], causal)
                 for rows, keys, causal in [(slice(24, None), slice(24), False),
                                            (slice(24, None), slice(24, None), is_causal)]]
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        merged = sum(part * (its - lse).exp().unsqueeze(3) for part, its in parts)
        assert close(merged.cpu(), o[:, :, 24:].detach().cpu(), 1e-5)
        whole, sums = fast.attention.attention_block(q, k, v, is_causal)
        back = fast.attention.attention_block_backward(q, k, v, whole, sums, do, is_causal)
        assert all(close(a.cpu(), b.cpu(), 1e-5) for a, b in zip(back, grads))
        none, sums = fast.attention.attention_block(q, k[:, :, :8], v[:, :, :8], True)  # rows 0 to 31 see no key
        assert (sums[:, :, :32] == -math.inf).all() and sums[:, :, 32:].isfinite().all()
        assert (none[:, :, :32] == 0).all()
        back = fast.attention.attention_block_backward(q, k[:, :, :8], v[:, :, :8], none, sums, do, True)
        assert all(t.isfinite().all() for t in back) and (back[0][:, :, :32] == 0).all()
