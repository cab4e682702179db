"""Muon beside AdamW: what its step costs, and what it learns from as many tokens.

    python -m lessons muon --steps 300 --lr "1e-3 2e-3 4e-3"
    python bench.py optimizers --model gpt2-xl
"""

import argparse
import itertools
import time
from functools import partial

import torch

import collectives as dist
import kernels
import parallel
import train
from fast.adamw import AdamW
from fast.edition import Fast
from further.full import Full
from further.muon import Muon
from lessons.bench.timing import interleaved, Table, write_json
from model import PRESETS
from safe.launch import settled_rendezvous

KINDS = {"AdamW": torch.optim.AdamW, "Muon": Muon}


# ------------------------------------------------------------------------------------------------ loss at equal tokens

def rates(text):
    """Learning rates of a text, for --lr."""
    try:
        found = [*map(float, text.split())]
    except ValueError:
        found = []
    if not found or not all(0 <= rate <= 1e9 for rate in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of learning rates: give e.g. --lr 1e-3")
    return found


def demo_muon(steps, batch_size, model, lr):
    """Loss of held-out text after as many tokens, by AdamW and by Muon, for learning rates."""
    device = dist.initialize("cuda" if torch.cuda.is_available() else "cpu")
    config = PRESETS[model]
    vocabulary = train.Bytes()
    tokens = vocabulary.tokens_of([file.read_bytes() for file in train.standard_library()])
    marks = sorted({-(-steps * part // 4) for part in (1, 2, 3, 4)})
    print(f"{model}, {config.parameters():,} parameters, float32, on {device.type}; the standard library, "
          f"{batch_size} x {config.seq_len} bytes a step.\nHeld-out loss, nats a byte, after so many steps; "
          f"ms of a step, and of these the optimizer's\n")
    print(f"{'':7} {'lr':>7}" + "".join(f"{mark:>9}" for mark in marks) + f"{'step':>9}{'optimizer':>11}")
    for rate, name in itertools.product(lr, KINDS):
        s = train.Flags(dp=1, steps=steps, batch_size=batch_size, lr=rate, min_lr=rate / 20, optimizer=name.lower())
        trainer = train.Trainer(s, config, None, (*train.split(tokens), vocabulary), device)
        losses, step_ms, update_ms = trained(trainer, marks)
        print(f"{name:7} {rate:7.0e}" + "".join(f"{loss:9.4f}" for loss in losses)
              + f"{step_ms:9.0f}{update_ms:11.1f}", flush=True)
    dist.destroy_process_group()


def trained(trainer, marks):
    """(held-out losses after the steps in `marks`, ms of a step, ms of an update)."""
    update = trainer.optimizer.step
    losses, spent, updates = [], 0.0, 0.0

    def timed_update():
        nonlocal updates
        began = now(trainer.device)
        update()
        updates += now(trainer.device) - began

    trainer.optimizer.step = timed_update
    for step in range(trainer.s.steps):
        began = now(trainer.device)
        trainer.step(step)
        spent += now(trainer.device) - began
        if step + 1 in marks:
            losses.append(trainer.evaluate())
    return losses, 1e3 * spent / trainer.s.steps, 1e3 * updates / trainer.s.steps


def now(device):
    """Seconds; on the CPU of its work, because others may work there, too."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


# ---------------------------------------------------------------------------------------------------- an update, timed

def optimizers(a):
    """The time of an optimizer's step, with the all-gather of the weights."""
    device = dist.initialize(a.device, rendezvous=settled_rendezvous)
    dtype = parallel.PRECISIONS[a.dtype]
    ours = dtype != parallel.master_dtype(dtype) and kernels.on_triton(torch.empty(0, device=device))
    kinds = {"AdamW": AdamW if ours else partial(torch.optim.AdamW, fused=True), "Muon": partial(Muon, fused=True)}
    table = Table(f"{a.gpus} processes; {a.model}, {a.config.parameters():,} parameters, {a.dtype}. A step of the "
                  "optimizer, with the all-gather of the weights", {
        "zero": "ZeRO:>4", "optimizer": "optimizer:<9", "ms": "ms:>9.2f", "state": "MiB of state a rank:>19,.0f"},
        device)
    for zero, name in itertools.product((0, 1) if a.gpus > 1 else (0,), a.only):
        layout = train.Layout(dp=a.gpus, zero=zero, dtype=dtype)
        net = train.parallelize(a.config, layout, device, optimizer=partial(kinds[name], lr=1e-3),
                                edition=Fast if kernels.table else Full)
        grads = [torch.randn_like(p) for p in net.params]

        def step():
            for p, grad in zip(net.params, grads):  # Muon drops them
                p.grad = grad
            net.optimizer.step()

        seconds = interleaved({name: step}, device, a.repeats, 1)
        kept = sum(t.nbytes for state in net.optimizer.state.values() for t in state.values() if torch.is_tensor(t))
        table.row(zero=zero, optimizer=name, ms=1e3 * seconds[name], state=kept / 2**20)
    write_json(a, device, table)
