"""DiLoCo on a laptop: what do fewer averages cost? Loss against bytes.

    python -m lessons diloco --ranks 2
"""

import dataclasses

import torch

import collectives as dist
from further.full import Full
from lessons.bench.timing import say
from model import PRESETS
from safe.data import load_data
from safe.flags import Settings
from theory.traffic import messages_of_buckets, sent
from train import Bytes, Trainer

STEPS = 200
CONFIG = dataclasses.replace(PRESETS["tiny"], n_layer=2, n_embd=64, seq_len=64)
NEVER = 10**6
MEAN = {"outer_lr": 1.0, "outer_momentum": 0.0}  # an outer step that goes to the islands' mean
ROWS = {"islands": 1}, *({"local_steps": steps} | MEAN for steps in (5, 20, 50, NEVER)), {"local_steps": 20}


def formula(s, rank):
    """Bytes that a rank sends to average weights, or without islands gradients, in the whole run."""
    elements = CONFIG.parameters()
    messages = {item.axis: item for item in messages_of_buckets(s, "shard", [(elements, 0)], s.replicas)}
    message = messages["between" if s.islands > 1 else "shard"]
    rounds = STEPS // s.local_steps if s.islands > 1 else STEPS
    return rounds * sent(message.op, elements, message.width, s.dp, rank)


def demo_diloco():
    """Loss against bytes: each rank an island that trains apart, averaged once in H steps (DiLoCo); beside it DDP."""
    n, rank = dist.get_world_size(), dist.get_rank()
    data = load_data(Settings(), Bytes())
    say(f"{n} ranks, each an island; {CONFIG.parameters():,} parameters, {STEPS} steps of AdamW with 8 sequences of "
        f"{CONFIG.seq_len} tokens a rank.\nValidation loss: where islands never meet, the mean of theirs. Bytes: sent "
        f"by rank 0 in all {STEPS} steps, and by the formula\n\n"
        f"{'':24}{'outer lr':>10}{'momentum':>10}{'validation':>12}{'bytes':>14}{'formula':>14}")
    for row in ROWS:
        s = Settings(**{"islands": n} | row, dp=n, batch_size=8 * n, steps=STEPS, device="cpu", form="full")
        trainer = Trainer(s, CONFIG, None, data, torch.device("cpu"), Full)
        dist.reset_traffic()
        for step in range(STEPS):
            trainer.step(step)
        counted = sum(log.bytes for log in dist.traffic().values())
        name = "DDP" if s.islands == 1 else "never" if s.local_steps == NEVER else f"each {s.local_steps} steps"
        outer = f"{s.outer_lr:10}{s.outer_momentum:10}" if s.islands > 1 else " " * 20
        say(f"{name:24}{outer}{trainer.evaluate():12.4f}{counted:14,}{formula(s, rank):14,}")
