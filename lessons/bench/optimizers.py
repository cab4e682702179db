"""A step of the optimizer alone: AdamW beside Muon, which multiplies matrices.

    python bench.py optimizers --model gpt2-xl
"""

import itertools
from functools import partial

import torch

import kernels
import parallel
import train
from fast.adamw import AdamW
from fast.edition import Fast
from further.muon import Muon
from lessons.bench.timing import interleaved, Table, write_json

KINDS = "AdamW", "Muon"


def optimizers(a, device):
    """The time of an optimizer's step, with the all-gather of the weights."""
    dtype = parallel.PRECISIONS[a.dtype]
    ours = dtype != parallel.master_dtype(dtype) and kernels.on_triton(torch.empty(0, device=device))
    kinds = {"AdamW": AdamW if ours else partial(torch.optim.AdamW, fused=True), "Muon": partial(Muon, fused=True)}
    table = Table(f"{a.gpus} processes; {a.model}, {a.config.parameters():,} parameters, {a.dtype}. A step of the "
                  "optimizer, with the all-gather of the weights", {
        "zero": "ZeRO:>4", "optimizer": "optimizer:<9", "ms": "ms:>9.2f", "state": "MiB of state a rank:>19,.0f"},
        device)
    for zero, name in itertools.product((0, 1) if a.gpus > 1 else (0,), a.only):
        layout = train.Layout(dp=a.gpus, zero=zero, dtype=dtype)
        net = train.parallelize(a.config, layout, device, None, partial(kinds[name], lr=1e-3), Fast)
        units = [*dict.fromkeys(net.unit_of.values())]
        grads = [torch.randn_like(p) for p in net.params]

        def step():
            for p, grad in zip(net.params, grads):
                p.grad = grad
            net.step()
            for unit in units if zero else ():
                unit.gather()
            for unit in units:
                unit.wait()

        seconds = interleaved({name: step}, device, a.repeats, 1)
        kept = sum(t.nbytes for state in net.optimizer.state.values() for t in state.values() if torch.is_tensor(t))
        table.row(zero=zero, optimizer=name, ms=1e3 * seconds[name], state=kept / 2**20)
    write_json(a, device, table)
