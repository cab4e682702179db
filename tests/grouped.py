"""Grouped products, sorting by expert."""

import math

import pytest
import torch

import collectives as dist
import further.experts
import kernels
import model
from tests.kernels import HALF, KERNEL_DEVICE, WITH_PRODUCTS, either_way, grouped_linear, random  # noqa: F401
from tests.pool import close, needs_kernels
from fast.experts import FusedExperts, visit_under_own_rows, without_sorting
from further.experts import expert_parallel, MixtureOfExperts


def mixture_of(config, dtype):
    mixture, draw = MixtureOfExperts(config), torch.Generator("cpu").manual_seed(0)
    sizes = {name: t.shape for name, t in [*mixture.named_parameters(), *mixture.named_buffers()]}
    model.materialize(mixture, lambda name: 0.3 * torch.randn(sizes[name], generator=draw, device="cpu"),
                      KERNEL_DEVICE, dtype)
    return mixture


@pytest.mark.parametrize("dtype", WITH_PRODUCTS, ids=str)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_sorting_follows_pytorch(k, dtype, triton_kernels):
    """Outputs, all gradients and the loads; tokens, and of k = 5 choices, are more than one program's; an expert that
    few choose gets none."""
    config = model.GPTConfig(n_embd=40, n_head=2, inner=24, experts=5, top_k=k)
    x, dy, results = random(2, 35, 40, dtype=dtype), random(2, 35, 40, dtype=dtype), []
    for choice in ("torch", "triton"):
        kernels.use(choice)
        mixture, leaf = mixture_of(config, dtype), x.clone().requires_grad_()
        mixture.router.bias[3] = -2
        y = mixture(leaf)
        y.backward(dy)
        results.append([mixture.router.load, y, leaf.grad, *(p.grad for p in mixture.parameters())])
        assert isinstance(mixture.experts, FusedExperts)
    (load, *want), (its, *got) = results
    assert torch.equal(load, its) and (load[3] == 0) == (k < 5)
    tolerance = 1e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    assert all(close(a, b, tolerance) for a, b in zip(got, want, strict=True))


def results_of_shared_experts(choice):
    """Outputs, gradients and loads on this rank of two, which share out four experts."""
    kernels.use(choice)
    rank, device = dist.get_rank(), torch.get_default_device()
    mixture = mixture_of(model.GPTConfig(n_embd=16, n_head=1, inner=16, experts=4), torch.float32).to(device)
    expert_parallel(mixture, None, None)
    assert mixture.experts.mlps.func is visit_under_own_rows
    assert further.experts.through_experts is without_sorting
    mixture.router.bias[1] = -2  # no tokens for the first rank's second expert
    x, dy = torch.randn(2, 1, 6 + rank, 16, generator=torch.Generator("cpu").manual_seed(rank), device="cpu").to(device)
    x.requires_grad_()
    y = mixture(x)
    y.backward(dy)
    kernels.use("auto")
    return [t.detach().cpu().numpy() for t in (y, x.grad, *(p.grad for p in mixture.parameters()), mixture.router.load)]


def test_visits_without_sorting_give_the_same(pool):
    needs_kernels(pool)
    for got, want in zip(*(pool(2).run(results_of_shared_experts, choice) for choice in ("triton", "torch"))):
        assert all(close(a, b, 1e-5) for a, b in zip(got, want, strict=True)) and got[-1][1] == 0


def test_groups_do_not_touch_each_other(either_way):
    """NaN in one group's rows, matrix and bias stay there, and a group without rows has gradients of zero."""
    x, w, b, dy = (random(*shape, dtype=HALF) for shape in ((142, 40), (4, 72, 40), (4, 72), (142, 72)))
    results = []
    for poison in (0.5, math.nan):
        for t in x[5:75], dy[5:75], w[1:3], b[1:3]:
            t.fill_(poison)
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        y = grouped_linear([5, 70, 0, 67], *leaves)
        y.backward(dy)
        results.append([torch.cat([t[:5], t[75:]]) for t in (y.detach(), leaves[0].grad)]
                       + [t.grad[[0, 2, 3]] for t in leaves[1:]])
        assert y[5:75].isnan().all() == leaves[1].grad[1].isnan().all() == math.isnan(poison)
        assert not leaves[1].grad[2].any() and not leaves[2].grad[2].any()
    for clean, beside in zip(*results):
        assert torch.equal(clean, beside)
