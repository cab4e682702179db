"""The lecture's own forms, which open the sections of parallel.py: each equals one process if its messages are sent.
(fast/ takes the place of none of them.)"""

import torch

import collectives as dist
import parallel
from further.experts import resized
from lessons import forms, lecture8
from lessons.measure import of_all_ranks, patched
from tests.layouts import SMALL
from tests.pool import close, on_plain, on_ranks, parametrize


def without(names):
    """Collectives, or kinds of messages, do nothing."""
    return patched([(dist, name, lambda *_, **__: None) for name in names.split()])


@on_plain
@parametrize("form", [forms.naive, forms.zero_1, forms.zero_3], ids=lambda form: form.__name__)
@on_ranks(3)
def test_data_parallelism_and_zero_as_the_lecture_has_them(form, rank, size):
    """Losses of 3 steps of a GPT with a tied embedding; nothing divides by 3. (Of two ranks the demo shows it.)"""
    config = resized(SMALL, n_layer=1)
    want, *_ = forms.trained(forms.one_process, config, 0, 1)
    for lost in ["", "all_reduce"] if form == forms.naive else ["", "reduce_scatter_tensor", "all_gather_into_tensor"]:
        with without(lost):
            losses, *_ = forms.trained(form, config, rank, size)
        assert close(torch.stack(of_all_ranks(losses)).mean(0), want) == (not lost), lost


@on_plain
@parametrize("lost", ["", "all_gather"])
@on_ranks(3)
def test_a_layer_cut_by_columns_as_the_lecture_has_it(lost):
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, dtype=torch.float64, generator=generator).to(torch.get_default_device())
                 for size in ((2, 4, 5), (6, 5)))
    with without(lost):
        y = parallel.all_columns(x, weight.chunk(3)[rank])
    assert close(y, x @ weight.T) == (not lost)


@on_plain
@parametrize("strategy, lost", [
    (lecture8.data_parallel, "all_reduce"), (lecture8.pipeline, "send recv"),
    (lecture8.all_gather_tensor_parallel, "all_gather_into_tensor"),
    (lecture8.all_gather_tensor_parallel, "reduce_scatter_tensor")],
    ids=lambda value: getattr(value, "__name__", value))
@on_ranks(3)
def test_lecture_8_s_gradients_are_wrong_without_a_message(strategy, lost):
    """Of its deep MLP; with all messages the demo shows them right."""
    with without(lost):
        *_, error = lecture8.beside_one_process(strategy)
    assert not all(error < 1e-3 for error in of_all_ranks(error))
