"""Products in FP8 are what they would be in float32, for numbers that eight bits hold."""

import gc
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import patch

import torch

import collectives as dist
import kernels
from fast import fp8
from fast.edition import Fast
from fast.linear import WeightGradients
from further.llama import LlamaConfig
from further.recompute import recompute
from model import GPT, GPTConfig, Linear, shapes
from safe.flags import Settings
from safe.reports import BirthLog, storages
from tests.kernels import KERNEL_DEVICE
from tests.layouts import small_gpt
from tests.pool import close, needs_kernels, on_ranks, parametrize
from tests.schedules import AddsToGrad
from theory.memory import activation_bytes
from theory.traffic import messages_of_tensors


LLAMA = LlamaConfig(vocab_size=37, seq_len=16, n_layer=1, n_head=2, n_embd=32, inner=64)


def whole(*shape):
    """Whole numbers from -7 to 7 in bf16, of which E4M3 and E5M2 hold all, and 7 becomes their largest."""
    numbers = torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(sum(shape)))
    numbers.view(-1)[-1] = 7
    return numbers.to(KERNEL_DEVICE, torch.bfloat16)


def few_programs():
    """Inside, the interpreter does not run 256 programs for each largest number, as in test_two_copies."""
    found = (lambda x: x.float().abs().max().view(1)) if kernels.INTERPRETED else fp8.largest
    return patch.object(fp8, "largest", found)


def test_two_copies(triton_kernels):
    """Also of sizes that no tile divides, and of zeros."""
    x = whole(144, 208)
    for dtype in fp8.LARGEST:
        both = fp8.two_copies(x, dtype, sums=True)
        for copy, right in (both.q, x), (both.t, x.T):
            assert torch.equal(copy.float() * both.unit, right.float())
        assert torch.equal(both.sum(0), x.float().sum(0).to(torch.bfloat16))
    zeros = fp8.two_copies(torch.zeros_like(x), dtype)
    assert not zeros.q.float().any() and not zeros.t.float().any() and zeros.unit.isfinite()


def test_products_in_fp8(triton_kernels):
    x, w, b, dy = whole(48, 32), whole(80, 32), whole(80), whole(48, 80)
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    leaves[1].in_fp8 = True
    y = fp8.linear(*leaves)
    y.backward(dy)
    x, w, b, dy = (t.float() for t in (x, w, b, dy))
    for got, right in zip([y, *(leaf.grad for leaf in leaves)], [x @ w.T + b, dy @ w, dy.T @ x, dy.sum(0)]):
        assert torch.equal(got, right.to(torch.bfloat16))


def test_the_matrices_of_blocks_are_in_fp8():
    net = GPT(GPTConfig(n_layer=1), seed=None)
    fp8.use_fp8(net)
    assert [name for name, param in net.named_parameters() if hasattr(param, "in_fp8")] == [
        f"h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]


def test_weight_gradients_in_fp8(triton_kernels):
    """They are the same where a WeightGradients collects them; a product is added to float32."""
    x, dy, block = whole(1, 16, 32), whole(1, 16, 48), torch.nn.Sequential(Linear(32, 48))
    block.to(KERNEL_DEVICE, torch.bfloat16)
    fp8.use_fp8(SimpleNamespace(h=block))
    WeightGradients(block, defaultdict(AddsToGrad))
    block(x.requires_grad_()).backward(dy)
    right = dy[0].float().T @ x[0].detach().float(), dy[0].float().sum(0)
    assert all(torch.equal(p.grad, grad.to(torch.bfloat16)) for p, grad in zip(block.parameters(), right, strict=True))

    one, other = (fp8.two_copies(whole(16, n), torch.float8_e4m3fn) for n in (32, 48))
    total = torch.ones(32, 48, device=KERNEL_DEVICE)
    for beta, extra in (1, 1), (0, 0):
        one.T.add_product(other, total, beta)
        assert torch.equal(total, whole(16, 32).float().T @ whole(16, 48).float() + extra)


@parametrize("part", ["none", "mlp", "block"])
def test_a_block_in_fp8_keeps_what_is_predicted(part, triton_kernels):
    """But for a scale of each copy, 4 bytes."""
    config = LlamaConfig(vocab_size=37, seq_len=128, n_layer=1, n_head=2, n_embd=32, inner=48)
    net = GPT(config).to(KERNEL_DEVICE, torch.bfloat16)
    fp8.use_fp8(net)
    if part != "none":
        recompute(net, part)
    x = whole(1, 128, 32).requires_grad_()
    with few_programs():
        net.h["0"](x)  # makes the table of angles, which stays
        with BirthLog() as births:
            y = net.h["0"](x)
    gc.collect()
    s = Settings(dp=1, batch_size=1, dtype="fp8", recompute=part, device=KERNEL_DEVICE)
    kept = x.nbytes + births.alive(storages([y]))
    assert 0 <= kept - activation_bytes(config, s, [range(1, 2)]) <= 8 * 4


def weights_after_a_step(tokens, in_eight_bits, **layout):
    """Of a Llama, whole and flat. tokens (B, T + 1)."""
    net = small_gpt(LLAMA, edition=Fast, dtype=torch.bfloat16, recompute="mlp", **layout)
    for module in net.pieces.values() if in_eight_bits else ():
        fp8.use_fp8(module)
    net.zero_grad()
    with few_programs():
        net.forward_backward([tokens[:, :-1]], [tokens[:, 1:]])
    net.step()
    return torch.cat([net.whole_parameter(name).flatten() for name in shapes(LLAMA)])


def tokens_of_rank(rank):
    drawn = torch.randint(37, (1, 17), generator=torch.Generator("cpu").manual_seed(rank), device="cpu")
    return drawn.to(torch.get_default_device())


def few_percent_off(eight, plain):
    """Whether a step in FP8 differs from one in bf16, by a few percent."""
    net = small_gpt(LLAMA, edition=Fast, dp=2)
    start = torch.cat([net.whole_parameter(name).flatten() for name in shapes(LLAMA)])
    return 1e-3 < (eight - plain).norm() / (plain - start).norm() < 0.15


@on_ranks(2)
def test_a_llama_in_fp8_trains_alike_at_each_stage_of_zero(rank):
    """Each rank scales by its own numbers, so all stages see the same ones."""
    needs_kernels()
    tokens = tokens_of_rank(rank)
    first, *others = (weights_after_a_step(tokens, True, dp=2, zero=zero) for zero in range(4))
    assert all(close(other, first, 1e-5) for other in others)
    assert few_percent_off(first, weights_after_a_step(tokens, False, dp=2))


@parametrize("layout", [{"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2, "schedule": "zb-h1"}], ids=str)
@on_ranks(2)
def test_a_llama_in_fp8_trains_where_ranks_cut_it(layout):
    """And gathers what is predicted: with --sp FP8 has kept what bf16 gathers again."""
    needs_kernels()
    tokens, found = tokens_of_rank(0), []
    for dtype in "fp8", "bf16":
        dist.reset_traffic()
        found.append(weights_after_a_step(tokens, dtype == "fp8", **layout))
        s = Settings(dp=1, batch_size=1, dtype=dtype, recompute="mlp", **layout)
        gathers = sum(some.times for some in messages_of_tensors(LLAMA, s, {0: range(LLAMA.n_layer + 2)})
                      if some.op == "all_gather_into_tensor")
        assert dist.traffic().get("all_gather_into_tensor", dist.Traffic()).calls == gathers, dtype
    assert few_percent_off(*found)
