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


@pytest.mark.parametrize("dtype", WITH_PRODUCTS, ids=str)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_sorting_follows_pytorch(k, dtype, triton_kernels):
    """Outputs, all gradients and the loads; tokens, and of k = 5 choices, are more than one program's; an expert that
    few choose gets none."""
    mixture = MixtureOfExperts(model.GPTConfig(n_embd=40, n_head=2, inner=24, experts=5, top_k=k))
    for t in [*mixture.parameters(), *mixture.buffers()]:
        torch.nn.init.normal_(t, std=0.3)
    mixture = mixture.to(KERNEL_DEVICE, dtype)
    mixture.router.bias[3] = -2
    x, dy, results = random(2, 35, 40, dtype=dtype).requires_grad_(), random(2, 35, 40, dtype=dtype), []
    for choice in ("torch", "triton"):
        kernels.use(choice)
        mixture.router.load = 0
        y = mixture(x)
        results.append([*torch.autograd.grad(y, [x, *mixture.parameters()], dy), y, mixture.router.load])
    (*want, load), (*got, its) = results
    assert isinstance(mixture.experts, FusedExperts) and torch.equal(load, its) and (load[3] == 0) == (k < 5)
    tolerance = 1e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    assert all(close(a.detach(), b.detach(), tolerance) for a, b in zip(got, want, strict=True))


def test_groups_do_not_touch_each_other(either_way):
    """NaN in one group's rows, matrix and bias stay there, and a group without rows has gradients of zero."""
    x, w, b, dy = (random(*shape, dtype=HALF) for shape in ((142, 40), (4, 72, 40), (4, 72), (142, 72)))
    results = []
    for poison in (0.5, math.nan):
        for t in x[5:75], dy[5:75], w[1:3], b[1:3]:
            t.fill_(poison)
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        y = grouped_linear([5, 70, 0, 67], *leaves)
        dx, dw, db = torch.autograd.grad(y, leaves, dy)
        assert y[5:75].isnan().all() == dw[1].isnan().all() == math.isnan(poison)
        assert not dw[2].any() and not db[2].any()
        results.append([y[:5], y[75:], dx[:5], dx[75:], dw[[0, 2, 3]], db[[0, 2, 3]]])
    assert all(clean.equal(beside) for clean, beside in zip(*results))
