"""Memory is what the tables predict; 16-bit gradients; overflow."""

import gc
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

import collectives as dist
import model
import parallel
import train
from tests.layouts import small_gpt, tokens_of
from tests.pool import BOTH, close, DEVICES, is_plain, needs_kernels, on_both, on_ranks, parametrize, table
from tests.runs import TINY, output_of, parse
from fast.adamw import AdamW
from further.schedules import SCHEDULES, zero_bubble_h1
from further.recompute import recompute
from lessons.demos import main
from lessons.bench.strategies import first_step, Timed
from lessons.bench.timing import of_all_ranks
from safe.data import load_data
from safe.flags import check_layout, model_config
from safe.reports import BirthLog, measured_bytes, predicted_bytes


def test_memory_table_is_the_lecture_s():
    """16-bit weights, float32 gradients and masters: 2 + 4 + 12 bytes for each of 1.56 billion parameters, in GiB,
    divided by 8 stage by stage.

    (N-1)/N x K = 1,362,909,800 elements: ZeRO-0 sends 2 x 4 bytes for each, ZeRO-1 and 2 4 + 2, ZeRO-3 4 + 2 x 2, as it
    gathers each weight twice. (The embeddings', once: a small part.)"""
    assert """
stage     parameters   gradients   optimizer  together  activations    sent   sharded over dp
ZeRO-0          2.90        5.80       17.41     26.11         2.45   10.15   nothing
ZeRO-1          2.90        5.80        2.18     10.88         2.45    7.62   optimizer
ZeRO-2          2.90        0.73        2.18      5.80         2.45    7.62   optimizer, gradients
ZeRO-3          0.00        0.73        2.18      2.90         2.45   10.15   optimizer, gradients, parameters
""" in output_of(main, *"zero --model gpt2-xl --dp 8".split())


def make_trainer(flags, reference=train.Trainer):
    """What a command line trains with, on this pool's device; `reference` in the reference."""
    device = torch.get_default_device()
    s = parse(["--device", device.type, "--fast", "off" if is_plain() else "on", *flags])
    config, source = model_config(s)
    with torch.device("cpu"), patch("safe.flags.check_fp8"):  # the interpreter multiplies eight bits, too
        check_layout(s, config, dist.get_world_size(), dist.get_world_size())
        make = reference if is_plain() else Timed
        return make(s, config, source, load_data(s, train.Bytes()), device)


# By how many bytes or what part measured activations may miss the predicted, processes, flags
MEMORY = """
    12    1  --dtype fp32 --kernels triton --n-layer 1 --seq-len 16
    0.01  1  --dtype fp32
    12    1  --dtype bf16 --recompute block --kernels triton --n-layer 1 --seq-len 16
    100   2  --fast on --tp 2 --sp --dtype fp8 --kernels triton --n-layer 1 --seq-len 16 --recompute block   scales too
    0.02  2  --tp 2 --dtype bf16 --recompute block --sp --n-embd 128
    0.01  2  --cp 2 --cp-kind ring --n-embd 256 --n-head 4              which tokens are its own, no list says
    0.01  4  --cp 2 --cp-kind ulysses --n-embd 256 --n-head 4 --tp 2 --sp
    0.01  2  --zero 2 --micro-batches 4 --batch-size 8                  gradients on their way are no activations
    0.01  2  --zero 3 --micro-batches 4 --batch-size 8 --recompute mlp
    0.01  2  --dp 2 --tp 1 --recompute mlp --recompute-blocks 1
    0.01  2  --tp 2 --recompute mlp --recompute-blocks 1
    0.02  2  --fast off --tp 2 --sp --arch llama --recompute mlp --batch-size 4     no list has the table of angles
    0.02  2  --zero 1 --micro-batches 4 --batch-size 8 --recompute block
    0.01  2  --pp 2 --micro-batches 2
    0.01  1  --loss-chunk 24 --micro-batches 2
    0.01  1  --loss-chunk 24 --dtype bf16 --kernels triton --n-layer 1 --seq-len 16 --recompute block
    0.01  2  --loss-chunk 24 --tp 2 --sp --zero 1
    0.01  2  --loss-chunk 24 --pp 2 --micro-batches 2 --zero 3
    0.01  2  --fast off --arch llama --tp 2 --sp                        norms of PyTorch's operations, and its gate
    0.03  2  --pp 2 --micro-batches 8 --batch-size 8 --n-layer 6 --n-embd 64 --schedule v-min --fast on
    0.02  1  --experts 4 --n-embd 64 --batch-size 4                     a router's counts are on no list
    0.02  1  --fast on --experts 4 --top-k 1 --kernels triton --n-layer 1 --seq-len 16
    0.02  2  --experts 4 --n-embd 64 --batch-size 4 --dp 2 --ep 2                     by tokens that come
    0.02  2  --experts 4 --dp 2 --ep 2 --seq-len 8 --kernels triton --n-layer 1
    0.02  2  --experts 4 --n-embd 64 --batch-size 4 --tp 2 --shared-experts 2
    0.02  4  --experts 4 --n-embd 64 --batch-size 4 --dp 2 --tp 2 --sp --ep 2 --expert-every 2
    0.01  2  --fast off --tp 2 --sp                                     what f has gathered
    0.01  2  --fast off --tp 2 --sp --loss-chunk 24 --recompute mlp --recompute-blocks 1
    0.01  2  --fast off --tp 2 --sp --recompute mlp
    0.02  2  --fast off --tp 2 --sp --recompute block --arch llama --n-head 4     the table of angles, too
    0.01  2  --fast off --tp 2 --sp --experts 4 --n-embd 64 --batch-size 4 --shared-experts 2 --recompute mlp
    0.01  1  --fast on --arch llama --kernels triton --n-layer 1 --seq-len 16
    0.01  2  --fast off --pp 2 --n-layer 5 --micro-batches 2           cut elsewhere
    0.02  2  --fast off --zero 3                                        vectors are sharded
"""


@parametrize("pool, bound, size, flags", [
    (where, float(bound), size, flags) for bound, size, flags, *_ in table(MEMORY)
    for where in (["plain"] if "--fast off" in flags else DEVICES if "--fast on" in flags else BOTH)],
    indirect=["pool"])
@on_ranks()
def test_memory_is_what_is_predicted(text, bound, flags):
    """Activations alive after forward, and what outlives the step. A loss, its weight and its gradient are on no list,
    12 bytes, nor are a step's totals in float32."""
    if "triton" in flags:
        needs_kernels()
    sizes = "--n-layer 2 --seq-len 64 --n-head 2 --n-embd 32 --batch-size 2 --kernels torch"
    trainer = make_trainer(f"--data {text} {sizes} {flags}".split(), Timed)
    on_cpu = torch.get_default_device().type == "cpu"
    with torch.device("cpu"):
        seen = first_step(trainer)
        measured, predicted = measured_bytes(trainer, seen), predicted_bytes(trainer, seen.share)
    bounds = dict.fromkeys(("parameters", "gradients", "optimizer"), (200, 0.0005))  # bytes of padding
    bounds["activations"] = (0, bound) if bound < 1 else (bound, 0) if on_cpu else (0, 0.02)
    for kind, (some, part) in bounds.items():
        assert abs(measured[kind] - predicted[kind]) <= some + part * predicted[kind], (kind, measured, predicted)
    shares = of_all_ranks(seen.share)
    assert ("--ep" in flags) == (len({*shares}) > 1) and abs(sum(shares) / len(shares) - 1) < 1e-6


def test_what_backward_computes_again_goes_with_what_saved_it():
    """As long as the loss is there, its graph is, too, but not the activations that its backward has used."""
    config = model.GPTConfig(vocab_size=5, seq_len=7, n_layer=3, n_head=2, n_embd=8)

    def left(part):
        net = model.GPT(config)
        if part != "none":
            recompute(net, part)
        births = BirthLog()
        with births:
            loss = net(torch.zeros(3, 7, dtype=torch.int64)).square().sum()
            loss.backward()
        gc.collect()
        return births.alive({}), loss

    none, *others = (left(part)[0] for part in ("none", "mlp", "block"))
    assert others == [none] * 2


@on_both
@parametrize("zero", [0, 1])
@on_ranks(2)
def test_16_bit_gradients_add_up_in_float32_whatever_the_schedule(zero):
    if torch.get_default_device().type == "cuda":
        pytest.skip("products that add to float32 round once less")
    SCHEDULES["added"] = zero_bubble_h1  # as README says how to: nobody knows its name
    every = []
    for schedule in "1f1b", "zb-h1", "added":
        net = small_gpt(pp=2, dtype=torch.bfloat16, zero=zero, schedule=schedule)
        for _ in range(2):
            net.zero_grad()
            net.forward_backward(*(t.split(2) for t in tokens_of(0)))
        every.append([param.grad for param in net.params])
    for one, *others in zip(*every, strict=True):
        assert one.any() and all(map(one.equal, others))


@on_both
@parametrize("flags", ["--zero 0", "--zero 3", "--zero 2 --experts 4 --ep 2"])
@on_ranks(2)
def test_overflow_is_skipped_on_all_ranks_alike(text, flags, rank):
    """One rank's loss overflows: every rank skips the step, halves the scale, and goes on as if nothing had been.
    Routers' biases stay as they are, too."""
    trainer = make_trainer([*TINY, "--data", text, "--dtype", "fp16", *flags.split()])
    names = [*model.shapes_of_all(trainer.config)]
    pipeline = trainer.net.pipeline
    loss, factor = pipeline.loss, torch.ones(())  # CUDA graphs read it where it lies
    pipeline.loss = lambda logits, targets: loss(logits, targets) * factor

    def weights_after(number):
        trainer.step(number)
        return [trainer.net.whole_parameter(name).clone() for name in names]

    weights_after(0)
    before = weights_after(1)
    factor.fill_(1e30 if rank == 1 else 1)
    assert all(map(torch.equal, before, weights_after(2)))
    assert trainer.skipped == 1 and trainer.scaler.scale == 2**15
    factor.fill_(1)
    after = weights_after(3)
    assert trainer.skipped == 1 and not any(map(torch.equal, before[-2:], after[-2:]))
    for weight in after:
        dist.broadcast(first := weight.clone(), 0)
        assert weight.isfinite().all() and weight.equal(first)


@on_ranks(1)
def test_clipping_divides_by_the_loss_scale_first():
    """Gradients 2**16 times too large: the true norm is reported and clipped to, by our function and by AdamW's kernel
    as it reads."""
    p = nn.Parameter(torch.zeros(2))
    for max_norm, clipped in (0.5, [0.3, 0.4]), (50, [3.0, 4.0]), (0, [3.0, 4.0]):
        for optimizer in torch.optim.AdamW([p]), AdamW([p]):
            p.grad = torch.tensor([3.0, 4.0]) * 2**16
            net = SimpleNamespace(optimizer=optimizer, params=[p])
            assert close(parallel.Parallel.clip_grad_norm_(net, max_norm, 2**16).cpu(), 5.0, 1e-6)
            assert close((p.grad * getattr(optimizer, "scale", 1.0)).cpu(), clipped, 1e-5)
