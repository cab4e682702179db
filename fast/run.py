"""The training program with both rooms on: safe/'s, with graphs and AdamW's kernel.

Takes the place of safe/run.py's trainer, and puts the rest of fast/ to use that a run must choose. That a step looks at
the numbers of the step before saves 2.5 % of a step of GPT-2 124M on an H200 with 32 sequences, 6.6 % with 8.
"""

from functools import partial

import torch

import kernels
import parallel
import safe
import train
from fast import edition, hopper
from fast.adamw import AdamW
from fast.fp8 import use_fp8
from safe.run import WatchedRun, WatchedTrainer


def optimizer_of(s, device):
    """{"optimizer": our AdamW} where it steps float32 masters, else {}."""
    dtype = parallel.PRECISIONS[s.dtype]
    masters = dtype != parallel.master_dtype(dtype) and kernels.on_triton(torch.empty(0, device=device))
    return {"optimizer": AdamW} if masters and s.optimizer == "adamw" else {}


class FastTrainer(WatchedTrainer):
    """The WatchedTrainer that replays micro-batches from CUDA graphs, and steps float32 masters with our AdamW."""
    unread = None  # (loss and norm of a step on their way to the CPU, the event at their end)

    def __init__(self, s, config, source, data, device, **parts):
        super().__init__(s, config, source, data, device, **{
            "build": partial(train.parallelize, edition=edition.Fast), **optimizer_of(s, device)} | parts)
        hopper.ANY_ORDER = not self.s.deterministic
        if self.s.dtype == "fp8":
            for module in self.net.pieces.values():
                use_fp8(module)
        self.net.pipeline.records = self.s.cuda_graphs == "on"
        if isinstance(self.optimizer, AdamW):
            for unit in self.net.units:
                unit.cast_by = self.optimizer
                self.optimizer.copies |= unit.copies()

    def all_finite(self, loss, norm):
        """As in WatchedTrainer. On GPUs with --on-nan stop a step looks at the numbers of the step before, which have
        arrived by now: to wait for its own would leave the GPU idle."""
        if self.device.type != "cuda" or self.s.on_nan != "stop" or self.scaler:
            return super().all_finite(loss, norm)
        finite = self.read()
        numbers = torch.stack([loss.double(), norm.double()]).to("cpu", non_blocking=True)
        self.unread = numbers, torch.cuda.current_stream().record_event()
        return finite

    def read(self):
        """Whether the numbers that are still unread are finite; NotFinite as in `all_finite`."""
        numbers, arrived = self.unread or (torch.zeros(2), None)  # all ranks take part, with what they have
        self.unread = None
        if arrived:
            arrived.synchronize()
        return super().all_finite(*numbers)

    def report(self, done, found):
        if self.unread and (self.stopping or self.due("save", done)):
            self.read()  # nothing that is not finite is saved
        super().report(done, found)


class FastRun(WatchedRun):
    """The WatchedRun with --fast or without."""

    def prepare(self, arguments):
        super().prepare(arguments)
        if self.s.fast == "on":
            self.mode = "fast + safe; --plain runs what you read"
            edition.on()
            self.trainer = FastTrainer
        else:
            safe.on()
