"""What fast/ hands the training program where --fast is on: parts of a Trainer, and how a step's numbers are looked at.

safe/run.py's `Plain` has the same names, for the reference. That a step looks at the numbers of the step before saves
2.5 % of a step of GPT-2 124M on an H200 with 32 sequences, 6.6 % with 8.
"""

from functools import partial

import torch

import kernels
import parallel
from fast import edition, hopper
from fast.adamw import AdamW
from fast.fp8 import use_fp8
from further.muon import Muon

mode = "fast + safe; --plain runs what you read"
on = edition.on


def parts(s, device, edition=edition.Fast):
    """What a Trainer is made of, by name: fast/'s edition; AdamW's kernel, where it steps float32 masters."""
    dtype = parallel.PRECISIONS[s.dtype]
    masters = dtype != parallel.master_dtype(dtype) and kernels.on_triton(torch.empty(0, device=device))
    adamw = AdamW if masters else partial(torch.optim.AdamW, fused=True, foreach=False)
    optimizer = partial(Muon, fused=True, foreach=False) if s.optimizer == "muon" else adamw
    return {"edition": edition, "optimizer": optimizer}


def prepare(trainer):
    """Let a Trainer compute in 8 bits, and replay its list from a CUDA graph, where its flags say so."""
    hopper.ANY_ORDER = not trainer.s.deterministic
    if trainer.s.dtype == "fp8":
        for module in trainer.net.pieces.values():
            use_fp8(module)
    trainer.net.pipeline.records = trainer.s.cuda_graphs == "on"
    if isinstance(trainer.optimizer, AdamW):
        if trainer.s.resume:
            trainer.optimizer.make_states()
        for unit in trainer.net.units:
            unit.cast_by = trainer.optimizer
            trainer.optimizer.copies |= unit.copies()


def look(s, trainer):
    """Which numbers a step is judged by. On GPUs these are those of the step before, which have arrived by now: to
    wait for its own would leave the GPU idle."""
    late = trainer.device.type == "cuda" and not trainer.scaler
    return Late() if late else lambda found: found


class Late:
    """late(found) gives what it was given the last time, with numbers on the CPU; late(None) likewise, at the end."""
    waiting = None  # (a step's Found, its event)

    def __call__(self, found):
        last = self.waiting
        self.waiting = None
        if found is not None:
            numbers = torch.stack([found.loss.double(), found.norm.double()]).to("cpu", non_blocking=True)
            kept = found._replace(loss=numbers[0], norm=numbers[1])
            self.waiting = kept, torch.cuda.current_stream().record_event()
            last = last or (kept._replace(loss=torch.zeros(()), norm=torch.zeros(())), None)  # all ranks take part
        if not last:
            return None
        found, arrived = last
        if arrived:
            arrived.synchronize()
        return found
