"""The training program with both rooms on: safe/'s, with graphs, AdamW's kernel, and windows in the profile."""

import torch

import kernels
import parallel
from fast.adamw import AdamW
from fast.gloo import scratches
from fast.graphs import replay_micro_batches
from fast.windows import Window
from safe.run import WatchedRun, WatchedTrainer
from train import Trainer


class FastTrainer(WatchedTrainer):
    """The WatchedTrainer that replays micro-batches from CUDA graphs, and steps float32 masters with our AdamW."""

    def make_optimizer(self, adamw):
        if self.s.cuda_graphs == "on":
            replay_micro_batches(self.net)
        mixed = self.net.layout.dtype != parallel.master_dtype(self.net.layout.dtype)
        flat = mixed and kernels.on_triton(torch.empty(0, device=self.device))
        return Trainer.make_optimizer(self, AdamW) if flat else super().make_optimizer(adamw)

    def buffers_of_collectives(self):
        return scratches()

    def profiled_collectives(self):
        return [*super().profiled_collectives(), (Window, "all_to_all", exchange_name)]


def exchange_name(window, outgoing, incoming):
    """As collective_name, from Window.all_to_all's arguments. Experts on GPUs of one node call it, not Watched.run."""
    return f"all_to_all_single {sum(size for _, size in outgoing):,} bytes"


class FastRun(WatchedRun):
    mode = "fast + safe; --plain runs what you read"
    trainer = FastTrainer
