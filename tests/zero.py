"""ZeRO: what it keeps, what is whole when, and in which dtype gradients add up."""

import gc
import types
from functools import partial

import torch
from torch import nn
from torch._subclasses import FakeTensor

import collectives as dist
import model
import parallel
import train

from further.sampling import whole_model
from tests.layouts import SMALL, small_gpt
from tests.pool import is_plain, on_cpus_both, on_ranks, parallelize, parametrize
from safe.flags import Settings
from theory.memory import memory_bytes


# ------------------------------------------------------------------------------------------------- bytes sent and kept

def bytes_alive():
    """Of all tensors of this process, each storage once. The collectives' receive buffers do not count."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)
               and not issubclass(type(t), FakeTensor)]  # torch.compile keeps some, which have no memory
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())


@on_cpus_both
@parametrize("zero, within", [(0, 4), (1, 4), (2, 2), (3, 4)])
@on_ranks(4)
def test_zero_keeps_what_the_table_says(zero, within):
    """Between backward and step, in bf16 with AdamW, on any device. The reference drops gradients when they are
    averaged, and each rank keeps its part of the average."""
    config, before = model.GPTConfig(vocab_size=256, seq_len=16, n_layer=2, n_head=4, n_embd=64), bytes_alive()
    layout = train.Layout(dp=4, dtype=torch.bfloat16, zero=zero, zero_within=within)
    net = parallelize(config, layout, "cpu", optimizer=partial(torch.optim.AdamW, lr=0.1))
    x = torch.randint(256, (2, 16)).split(1)
    for step in range(2):
        net.zero_grad()
        net.forward_backward(x, x)
        kept = bytes_alive() - before
        net.step()
    net.zero_grad()
    table = memory_bytes(config, Settings(
        dp=within, zero=zero, dtype="bf16", batch_size=within, fast="off" if is_plain() else "on"))
    stays, gradients = table["parameters"] + table["optimizer"], table["gradients"]
    assert abs(kept / (stays + gradients) - 1) < 0.05 and bytes_alive() - before < 1.05 * stays, (kept, table)


# ------------------------------------------------------------------------------------------- what is whole, and when

@parametrize("layout, device", [(dict(dp=2), "meta"), (dict(dp=2, zero=3), "cpu"), (dict(pp=2), "cpu")])
@on_ranks(2)
def test_a_whole_model_is_on_the_cpu_where_ranks_keep_parts_of_it(layout, device, rank):
    """A GPU, here "meta", may not have room for all."""
    net = small_gpt(SMALL, **layout)
    whole = whole_model(types.SimpleNamespace(config=net.config, net=net, device="meta"))
    assert {tensor.device.type for tensor in whole.state_dict().values()} == {"meta" if rank else device}


@on_cpus_both
@parametrize("zero", [0, 1, 2, 3])
@on_ranks(2)
def test_16_bit_gradients_add_up_in_float32(zero):
    """Of 16 micro-batches. (bf16 itself would lose 0.125 beside 128.)"""
    layer = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(layer.weight)
    net = parallel.Parallel(
        [layer], lambda output, times: (output * times).sum(), parallel.make_mesh("cpu", dp=2), zero,
        optimizer=partial(torch.optim.SGD, lr=1.0), dtype=torch.bfloat16, count=lambda times: torch.tensor(1))
    x = [torch.ones(2, 4, dtype=torch.bfloat16)] * 16
    net.forward_backward(x, [torch.full((2, 4), times, dtype=torch.bfloat16) for times in [1024] + [1] * 15])
    total = sum(param.grad.sum() for param in net.params)
    if zero:
        dist.all_reduce(total)
    assert total == 4 * 4 * 2 * (1024 + 15) / 16
