"""Measuring: one call by three clocks, warm-up, a profiler's table, memory over time and beside its prediction.

    python -m lessons measuring

Ultra-Scale Playbook, the chapters on profiling and on GPUs; CS336 lecture 6. docs/reading.md, "Measuring".
"""

import gc
import math
import os
import time

import torch
import torch.nn.functional as F

import collectives as dist
from further.loss_scale import LossScale
from lessons.bench.strategies import make_trainer
from lessons.bench.timing import is_first, mark, of_all_ranks, say, synchronize
from model import GPT, PRESETS
from safe.flags import Settings
from safe.reports import BirthLog, measured_bytes, predicted_bytes, size


def clocks(what, call, stamp, wait, between):
    """Print when a call returns, when its work is done, and how long by stamps that are queued before and after it."""
    start = time.perf_counter()
    first, _, last = stamp(), call(), stamp()
    returned = time.perf_counter() - start
    wait()
    done = time.perf_counter() - start
    say(f"  {what:36}{1e3 * returned:12.2f}{1e3 * done:12.2f}{1e3 * between(first, last):12.2f}")


def profile_table(step):
    """A profiler's rows, the longest first: of the third and fourth of four calls."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(schedule=schedule, profile_memory=True) as profile:
        for _ in range(4):
            step()
            profile.step()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_cpu_time_total - row.self_device_time_total)
    for row in rows[:9]:
        say(f"  {row.key[:46]:48}{row.count:6}{row.self_cpu_time_total:12,.0f}{row.self_device_time_total:12,.0f}"
            f"{(row.self_cpu_memory_usage + row.self_device_memory_usage) / 2**20:12.1f}")


def timeline(config, device):
    """Print the bytes alive after each block's forward and backward: activations, then what backward makes. On a GPU
    write the allocator's own timeline, too."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history()
    net, x = GPT(config).to(device), torch.zeros(4, config.seq_len, dtype=torch.int64, device=device)
    births, points = BirthLog(), []

    def note(when):
        gc.collect()
        points.append((when, births.alive(())))

    for name, block in net.h.items():
        block.register_forward_hook(lambda *_, name=name: note(f"forward of h.{name}"))
        block.register_full_backward_hook(lambda *_, name=name: note(f"backward of h.{name}"))
    with births:
        net(x).sum().backward()
    if device.type == "cuda" and is_first():
        os.makedirs("runs", exist_ok=True)
        torch.cuda.memory._dump_snapshot("runs/memory.pickle")
        say("  runs/memory.pickle is for https://pytorch.org/memory_viz")
    for when, alive in points:
        say(f"  {when:20}{size(alive):>10}  " + "#" * (60 * alive // max(n for _, n in points)))


def tiny_trainer(**flags):
    """A Trainer of the reference on all ranks, 2 sequences each."""
    n = dist.get_world_size()
    s = Settings(dp=n, batch_size=2 * n, device="cpu", fast="off", **flags)
    return make_trainer(PRESETS["tiny"], s, torch.device("cpu"))


def memory_table():
    """Bytes of a rank, by ZeRO's stage, then by what is recomputed."""
    n = dist.get_world_size()
    say(f"\n{n} ranks, batch {2 * n}: a rank's bytes, measured after a step (predicted for its peak). Stage 1's whole "
        "gradients are gone\nafter the step")
    recomputed = [{"recompute": part} for part in ("mlp", "block")]
    for flags in [{"zero": zero} for zero in range(4)] + recomputed:
        trainer = tiny_trainer(**flags)
        trainer.step(0)
        predicted, measured = predicted_bytes(trainer), measured_bytes(trainer, trainer.seen)
        say(f"  {' '.join(map(str, *flags.items())):22}"
            + "  ".join(f"{kind} {size(m)} ({size(predicted[kind])})" for kind, m in measured.items()))


def demo_fp16():
    """fp16's loss scale, begun too high: steps are skipped, and halve it, until gradients fit; then it doubles."""
    trainer = tiny_trainer(dtype="fp16")
    trainer.scaler = LossScale(start=2.0**22, interval=4)
    say("step  loss scale      loss  gradient norm")
    for step in range(12):
        scale, skipped = trainer.scaler.scale, trainer.skipped
        loss, norm, _ = trainer.step(step)
        say(f"{step + 1:4}  2^{math.log2(scale):<8.0f}{loss:10.4f}  {norm:13.4f}"
            + "  skipped" * (trainer.skipped - skipped))


def demo_measuring():
    """One call by three clocks; warm-up; a profiler's table; memory over time, and predicted beside measured."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    link, message = dist.link_of(None), torch.ones(1 << 22)
    dist.all_reduce(message, async_op=True).wait()  # warms up
    say("ms                                        it returns     it is done    by events")
    clocks(f"all-reduce of {size(message.nbytes)}, async_op=True", lambda: dist.all_reduce(message, async_op=True),
           lambda: link.worker.start(time.perf_counter), lambda: link.last.wait(), lambda a, b: b.wait() - a.wait())
    if device.type == "cuda":
        a = torch.randn(8192, 8192, device=device)
        torch.mm(a, a)
        synchronize(device)
        clocks("a product on the GPU", lambda: torch.mm(a, a), lambda: mark(device), lambda: synchronize(device),
               lambda a, b: a.elapsed_time(b) / 1e3)
    start = time.perf_counter()
    time.sleep(0.2 * dist.get_rank())
    dist.barrier()
    passed = time.perf_counter() - start
    say("\nrank r sleeps 0.2 r s; seconds until it has passed the barrier: "
        + " ".join(f"{seconds:.2f}" for seconds in of_all_ranks(passed)))
    x, took = torch.randn(2000, 1000, device=device, requires_grad=True), []

    def step():
        F.layer_norm(x, x.shape[1:]).sum().backward()
        synchronize(device)

    for _ in range(5):
        start = time.perf_counter()
        step()
        took.append(1e3 * (time.perf_counter() - start))
    say("\nlayer norm, forward and backward; ms of the first calls: " + " ".join(f"{ms:.2f}" for ms in took))
    say(f"\n{'of two calls':50}{'calls':>6}{'CPU, us':>12}{'GPU, us':>12}{'MiB':>12}")
    profile_table(step)
    say("\nbytes alive in a step of the tiny model, batch 4, but for its weights")
    timeline(PRESETS["tiny"], device)
    memory_table()
