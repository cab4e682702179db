"""Head and loss in chunks: how many rows of logits exist, and to the bit the loss of all at once. (Layouts that equal
one process are rows of tests/layouts.py.)"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import collectives as dist
import kernels
from further.chunked_loss import ChunkedLoss
from further.letters import tensors_in
from safe.reports import BirthLog
from tests.layouts import SMALL, small_gpt, tokens_of
from tests.pool import on_both, on_ranks, parametrize


class WidestLogits(TorchDispatchMode):
    """Notes the most rows of any tensor that is `width` wide, but for transposed weights."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        wide = [t.numel() // self.width for t in tensors_in(out)
                if t.dim() and t.shape[-1] == self.width and t.shape[0] != SMALL.n_embd]
        self.rows = max([self.rows, *wide])
        return out


@on_both
@parametrize("layout", [{}, {"tp": 2}, {"tp": 2, "sp": True}, {"dp": 2, "zero": 3}, {"pp": 2, "schedule": "zb-h1"}],
             ids=str)
@on_ranks(2)
def test_no_more_rows_of_logits_exist_than_a_chunk_has(layout):
    """Neither in forward, nor in backward, nor in evaluation."""
    layout = {"dp": 2 // layout.get("tp", layout.get("pp", 1)), **layout}
    head = layout.get("pp", 1) - 1 == dist.get_rank() or layout.get("pp", 1) == 1
    for chunk in 0, 7:
        net = small_gpt(**layout, loss_chunk=chunk, dtype=torch.float64)
        width = SMALL.vocab_size // net.layout.tp + (dist.get_rank(net.groups.tp) < SMALL.vocab_size % net.layout.tp)
        batch = [[t[:4].to(net.device)] for t in tokens_of(0)]
        with torch.autograd.set_multithreading_enabled(False), WidestLogits(width) as seen:
            net.forward(*batch)
            net.forward_backward(*batch)
        assert seen.rows == head * (chunk or 40)


@on_both
@parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@on_ranks(2)
def test_a_chunked_loss_is_that_of_all_rows_to_the_bit(dtype):
    """And gradients are, but for rounding, with our kernels or PyTorch's. On a GPU losses are, too: how a product adds
    up depends on how many rows it has."""
    for layout in {"dp": 2, "zero": 3}, {"tp": 2}, {"dp": 2, "optimizer": None}:
        whole, *others = (small_gpt(**layout, loss_chunk=chunk, dtype=dtype) for chunk in (0, 1, 7, 32, 64))
        batch = [[t[:4, :8].to(whole.device)] for t in tokens_of(0, holes=True)]
        for kernel in "torch", "auto":
            kernels.use(kernel)
            run = "forward_backward" if whole.optimizer else "forward"
            losses = [getattr(net, run)(*batch) for net in (whole, *others)]
            off = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype] * losses[0].is_cuda
            assert all((loss - losses[0]).abs() <= off * losses[0] for loss in losses)
            for net in (whole, *others) if whole.optimizer else ():
                net.zero_grad()


def test_a_chunk_leaves_its_rows_of_dx_alone():
    """Its term of dW, as large as the head, has gone when the next chunk's logits are there."""
    x, weight = torch.randn(12, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    alive = []

    def losses(logits, targets):
        alive.append(births.alive({}))
        return kernels.row_losses(logits, targets)

    with BirthLog() as births:
        ChunkedLoss.apply(x, weight, torch.arange(12), 3, losses, True)
    assert alive[-1] - alive[0] < 2 * x.nbytes < weight.nbytes
