"""Grouped products, sorting by expert."""

import math

import pytest
import torch

import kernels
import model
from tests.kernels import HALF, KERNEL_DEVICE, WITH_PRODUCTS, either_way, grouped_linear, random  # noqa: F401
from tests.pool import close
from fast.experts import FusedExperts
from further.experts import MixtureOfExperts


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
        dx, dw, db = (t.grad for t in leaves)
        assert y[5:75].isnan().all() == dw[1].isnan().all() == math.isnan(poison)
        assert not dw[2].any() and not db[2].any()
        results.append([y[:5], y[75:], dx[:5], dx[75:], dw[[0, 2, 3]], db[[0, 2, 3]]])
    assert all(clean.equal(beside) for clean, beside in zip(*results))
