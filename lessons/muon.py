"""Muon beside AdamW: what its step costs, and what it learns from as many tokens.

    python -m lessons muon --steps 300 --lr "1e-3 2e-3 4e-3"
    python bench.py optimizers --model gpt2-xl
"""

import itertools
import time
from functools import partial

import torch
from torch import nn
import torch.nn.functional as F

import collectives as dist
import kernels
import parallel
import train
from fast.adamw import AdamW
from further.muon import Muon
from lessons.measure import interleaved, Table, write_json
from model import GPT, PRESETS

KINDS = {"AdamW": torch.optim.AdamW, "Muon": Muon}


# ------------------------------------------------------------------------------------------------ loss at equal tokens

def demo_muon(steps, batch_size, model, lr):
    """Loss of held-out text after as many tokens, by AdamW and by Muon, for learning rates."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = PRESETS[model]
    tokens, held_out = train.split(train.Bytes().tokens_of([file.read_bytes() for file in train.standard_library()]))
    marks = sorted({-(-steps * part // 4) for part in (1, 2, 3, 4)})
    print(f"{model}, {config.parameters():,} parameters, float32, on {device.type}; the standard library, "
          f"{batch_size} x {config.seq_len} bytes a step.\nHeld-out loss, nats a byte, after so many steps; "
          f"ms of a step, and of these the optimizer's\n")
    print(f"{'':7} {'lr':>7}" + "".join(f"{mark:>9}" for mark in marks) + f"{'step':>9}{'optimizer':>11}")
    for rate, (name, kind) in itertools.product(map(float, lr.split()), KINDS.items()):
        s = train.Flags(steps=steps, lr=rate, min_lr=rate / 20)
        losses, step_ms, update_ms = trained(config, kind, s, (tokens, held_out), batch_size, device, marks)
        print(f"{name:7} {rate:7.0e}" + "".join(f"{loss:9.4f}" for loss in losses)
              + f"{step_ms:9.0f}{update_ms:11.1f}", flush=True)


def trained(config, kind, s, data, batch_size, device, marks):
    """(held-out losses after the steps in `marks`, ms of a step, ms of an update)."""
    net = GPT(config).to(device)
    groups = [{"params": [named for named in net.named_parameters() if parallel.is_matrix(named[1]) == matrix],
               "weight_decay": s.weight_decay * matrix} for matrix in (True, False)]
    optimizer = kind(groups, lr=s.lr, betas=(0.9, 0.95))
    losses, spent, updates = [], 0.0, 0.0
    for step in range(s.steps):
        began = now(device)
        loss_of(net, data[0], step, batch_size, device).backward()
        nn.utils.clip_grad_norm_(net.parameters(), s.clip)
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(s, step)
        stepped = now(device)
        optimizer.step()
        ended = now(device)
        net.zero_grad()
        spent += ended - began
        updates += ended - stepped
        if step + 1 in marks:
            with torch.no_grad():
                losses.append(sum(loss_of(net, data[1], i, batch_size, device).item() for i in range(8)) / 8)
    return losses, 1e3 * spent / s.steps, 1e3 * updates / s.steps


def loss_of(net, tokens, step, batch_size, device):
    x, y = train.batch(tokens, 0, step, batch_size, net.config.seq_len, slice(None))
    return F.cross_entropy(net(x.to(device)).flatten(0, 1), y.to(device).flatten())


def now(device):
    """Seconds; on the CPU of its work, because others may work there, too."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


# ---------------------------------------------------------------------------------------------------- an update, timed

def optimizers(a):
    """The time of an optimizer's step, with the all-gather of the weights."""
    device = dist.initialize(a.device)
    dtype = parallel.PRECISIONS[a.dtype]
    ours = dtype != parallel.master_dtype(dtype) and kernels.on_triton(torch.empty(0, device=device))
    kinds = {"AdamW": AdamW if ours else partial(torch.optim.AdamW, fused=True), "Muon": partial(Muon, fused=True)}
    table = Table(f"{a.gpus} processes; {a.model}, {a.config.parameters():,} parameters, {a.dtype}. A step of the "
                  "optimizer, with the all-gather of the weights", {
        "zero": "ZeRO:>4", "optimizer": "optimizer:<9", "ms": "ms:>9.2f", "state": "MiB of state a rank:>19,.0f"},
        device)
    for zero, name in itertools.product((0, 1) if a.gpus > 1 else (0,), a.only):
        layout = train.Layout(dp=a.gpus, zero=zero, dtype=dtype)
        net = train.parallelize(a.config, layout, device, optimizer=partial(kinds[name], lr=1e-3))
        step = partial(step_of, net, [torch.randn_like(p) for p in net.params])
        seconds = interleaved({name: step}, device, a.repeats, 1)
        kept = sum(t.nbytes for state in net.optimizer.state.values() for t in state.values() if torch.is_tensor(t))
        table.row(zero=zero, optimizer=name, ms=1e3 * seconds[name], state=kept / 2**20)
    write_json(a, device, table)


def step_of(net, grads):
    for p, grad in zip(net.params, grads):  # Muon drops them
        p.grad = grad
    net.optimizer.step()
