"""Muon. (Layouts that equal one process are rows of tests/layouts.py.)"""

from unittest.mock import Mock, patch

import torch

import fast.muon
import further.muon
import model
from fast.beside import tma_takes
from fast.muon import fast_orthogonal, symmetric
from further.muon import Muon, orthogonal
from tests.kernels import KERNEL_DEVICE
from tests.layouts import DECAY, SMALL
from tests.pool import close, parametrize

OPTIONS = {"lr": 1e-2, "weight_decay": DECAY}


@parametrize("shape", [(32, 32), (24, 40), (40, 24)])
def test_newton_schulz_is_pytorch_s_to_the_bit(shape):
    """In bf16."""
    u = torch.randn(shape)
    theirs = torch.optim._muon._zeropower_via_newtonschulz(u, (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert orthogonal(u.bfloat16().unsqueeze(0))[0].equal(theirs)


@parametrize("shape", [(2, 40, 48), (1, 136, 64), (1, 520, 16)], ids=str)  # the last has five rows of tiles
def test_half_of_a_symmetric_product_is_the_whole(shape, triton_kernels):
    """In bf16, alone and with a matrix added. (The interpreter cuts bf16 off, it does not round.)"""
    a = torch.randn(shape, device=KERNEL_DEVICE, dtype=torch.bfloat16)
    ours, want = symmetric(a), a.double() @ a.double().mT
    assert ours.equal(ours.mT) and close(ours, want, 2**-7)
    c = ours
    got, want = symmetric(c, c, 2.0315 / 64, -4.775), 2.0315 / 64 * c.double() @ c.double().mT - 4.775 * c.double()
    assert got.equal(got.mT) and close(got, want, 2**-6)


@parametrize("shape", [(2, 32, 48), (2, 24, 64), (2, 64, 24), (1, 136, 272), (1, 40, 32)], ids=str)
def test_newton_schulz_on_kernels_goes_the_same_way(shape, triton_kernels):
    """Of the second u one singular value is far above the others."""
    n, high, wide = shape
    noise = torch.randn(shape, device=KERNEL_DEVICE)
    spike = torch.randn(n, high, 1, device=KERNEL_DEVICE) @ torch.randn(n, 1, wide, device=KERNEL_DEVICE)
    for u in noise * torch.logspace(0, -1, wide, device=KERNEL_DEVICE), spike + 0.2 * noise:
        ours = Mock(wraps=symmetric)
        with patch.object(fast.muon, "LEAST_ROWS", 8), patch.object(fast.muon, "symmetric", ours):
            assert close(fast_orthogonal(u.bfloat16()), orthogonal(u.double()), 0.065)
        assert ours.called or not tma_takes(u.bfloat16())


@parametrize("most, at_once", [(1, [3, 1, 1, 1] * 2), (6 * 32**2, [4, 4, 1, 1, 1, 1]), (1 << 27, [8, 2, 2])])
def test_matrices_of_one_size_step_together_as_alone(most, at_once):
    """Of two blocks. `most`: elements that are multiplied at once; at_once: how many matrices are."""
    nets = [model.GPT(SMALL) for _ in range(2)]
    called = []
    for net, limit in zip(nets, (1, most)):
        opt = Muon(net.named_parameters(), **OPTIONS)
        called.clear()
        with patch.object(further.muon, "MOST", limit), patch.object(
                further.muon, "orthogonal", side_effect=lambda x: called.append(len(x)) or orthogonal(x)):
            for step in range(2):
                draw = torch.Generator().manual_seed(step)
                for p in net.parameters():
                    p.grad = torch.randn(p.shape, generator=draw)
                opt.step()
    assert sorted(called) == sorted(2 * at_once)
    assert all(close(p.detach(), q.detach(), 1e-6) for p, q in zip(*(net.parameters() for net in nets), strict=True))
