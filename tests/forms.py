"""The short forms that open the sections of parallel.py: each equals one process if its messages are sent.
(fast/ takes the place of none of them.)"""

import torch
import torch.nn.functional as F

import collectives as dist
import parallel
from lessons import lecture8
from lessons.bench.timing import of_all_ranks, patched
from tests.pool import close, on_plain, on_ranks, parametrize


def without(names):
    """Collectives, or kinds of messages, do nothing."""
    return patched([(dist, name, lambda *_, **__: None) for name in names.split()])


@on_plain
@parametrize("lost", ["", "all_reduce"])
@on_ranks(3)
def test_f_and_g_as_the_lecture_has_them(lost):
    """Y needs g, dX needs f."""
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(0)
    x, A, B, dy = (torch.randn(size, dtype=torch.float64, generator=generator).to(torch.get_default_device())
                   for size in ((2, 4, 5), (5, 6), (6, 7), (2, 4, 7)))
    x.requires_grad_()
    want = F.gelu(x @ A) @ B
    want = want.detach(), *torch.autograd.grad(want, x, dy)
    with without(lost):
        hidden = F.gelu(parallel.CopyToGroup.apply(x, None) @ A.chunk(3, 1)[rank])
        y = parallel.ReduceFromGroup.apply(hidden @ B.chunk(3)[rank], None)
        have = y.detach(), *torch.autograd.grad(y, x, dy)
    assert [close(a, b) for a, b in zip(have, want)] == [not lost] * 2


@on_plain
@parametrize("strategy, lost", [
    (lecture8.data_parallel, "all_reduce"), (lecture8.pipeline, "send recv"),
    (lecture8.all_gather_tensor_parallel, "all_gather_into_tensor"),
    (lecture8.all_gather_tensor_parallel, "reduce_scatter_tensor")],
    ids=lambda value: getattr(value, "__name__", value))
@on_ranks(3)
def test_strategies_as_the_lecture_has_them(strategy, lost):
    """Gradients of its deep MLP; the pipeline is `gpipe_step`."""
    for names in "", lost:
        with without(names):
            *_, error = lecture8.beside_one_process(strategy)
        assert all(error < (1e-3 if names else 1e-12) for error in of_all_ranks(error)) == (not names)
