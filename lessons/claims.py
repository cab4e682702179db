"""The lecture's claims in figures, beside ours."""

import dataclasses
from typing import NamedTuple

import torch

import parallel
from model import PRESETS, GPTConfig
from safe.flags import Settings
from theory.clock import simulate
from theory.memory import activation_bytes, memory_bytes
from theory.speed import MACHINES, predict
from theory.traffic import messages, messages_of_buckets, sent


# The claims of lectures 7 and 8 need many GPUs, so they are computed: by the formulas that `strategies` and the tests
# compare with counted bytes and measured memory, by simulated schedules, and by `predict`.

class Claim(NamedTuple):
    claim: str
    lecture: float  # the lecture's figure; None: it has none
    ours: float
    note: str
    command: str    # measures it


GPT3, STRATEGIES = GPTConfig(50257, 2048, 96, 96, 12288), "python bench.py strategies --gpus 4 --only"


def bytes_of(items, n):
    """Bytes that rank 0 of n sends."""
    return sum(item.times * sent(item.op, elements, item.width, n, 0) for item in items for elements in item.elements)


def claims_of_traffic():
    n, k, block, btc = 8, 1 << 20, [(1, range(1, 2))], GPT3.seq_len * GPT3.n_embd
    yield Claim("all-reduce of k: a rank sends, in k", 2 * (n - 1) / n, sent("all_reduce", k, 4, n, 0) / (4 * k),
                f"2 (N-1)/N, N = {n}", "python bench.py collectives --gpus 4 --comm ring --only all_reduce")
    for zero, (name, figure) in enumerate({"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3}.items()):
        s = Settings(dp=n, zero=zero, batch_size=n, dtype="fp32")
        buckets = messages_of_buckets(s, "dp", [(k, 2 if zero == 3 else 0)], n)
        yield Claim(f"{name}: a rank sends in a step, in K", figure, bytes_of(buckets, n) / (4 * k), f"(N-1)/N of it, "
                    f"N = {n}" + "; a stage's last unit is gathered once" * (zero == 3), f"{STRATEGIES} {name}")
    for name, sp in ("tp", False), ("tp+sp", True):
        s = Settings(dp=1, tp=n, sp=sp, dtype="bf16", batch_size=1)
        passed = [item for item in messages(GPT3, s, block, []) if item.what.startswith("activations")]
        yield Claim(f"{name}: a rank sends for a block, in BTC", 8 * (n - 1) / n, bytes_of(passed, n) / (2 * btc),
                    f"8 (N-1)/N, N = {n}" + "; backward gathers again what f gathered" * sp, f"{STRATEGIES} {name}")
    s = Settings(dp=1, pp=4, dtype="bf16", batch_size=1)
    passed = [item for item in messages(GPT3, s, block, []) if item.what == "activations"]
    yield Claim("pp: a rank sends for a micro-batch, in BTC", 2, bytes_of(passed, 2) / (2 * btc),
                "activations on, gradients back", f"{STRATEGIES} 1f1b")


def claims_of_memory():
    """A block of the lecture keeps 34 + 5 heads T/C bytes for each of BTC elements, ours 32: model.py has no dropout,
    whose masks take 2, and flash attention keeps statistics instead of the T x T scores."""
    large, n = GPTConfig(50257, 2048, 36, 32, 4096), 64
    for zero, figure in enumerate((120, 31.4, 16.6, 1.88)):
        kinds = memory_bytes(large, zero, n, dtype=torch.bfloat16)
        gradients, *others = (7.5 * kinds[kind] / large.parameters()
                              for kind in ("gradients", "parameters", "optimizer"))
        yield Claim(f"ZeRO-{zero}: 7.5 billion parameters, {n} GPUs: GB", figure, gradients + sum(others),
                    "gradients are float32; " + (f"16-bit ones: {gradients / 2 + sum(others):.4g}" if zero < 3 else
                                                 "no 16-bit shard besides masters"), "python -m lessons memory")
    scores, t = 5 * GPT3.n_head * GPT3.seq_len / GPT3.n_embd, 8
    for flags, figure, tp, sp, recompute, note in (
            ("", 34 + scores, 1, False, "none", "no dropout, no T x T scores"),
            ("--tp 8", 10 + (24 + scores) / t, t, False, "none", "no dropout, no T x T scores"),
            ("--tp 8 --sp", (34 + scores) / t, t, True, "none", "no dropout, no T x T scores"),
            ("--tp 8 --sp --recompute attention", 34 / t, t, True, "attention", "nor q, k, v, attention's output kept"),
            ("--recompute block", 2, 1, False, "block", "only the block's input")):
        kept = activation_bytes(GPT3, 1, tp, 2, recompute, [range(1, 2)], tokens_cut=tp if sp else 1)
        yield Claim(f"activations of a block, in BTC: {flags or 'one GPU'}", figure,
                    kept / (GPT3.seq_len * GPT3.n_embd), note,
                    " ".join(["python train.py", *flags.replace("8", "2").split(), "--steps 50"]))


def claims_of_pipelines():
    p, m = 4, 8
    for schedule, v, bubble, most in (("gpipe", 1, (p - 1) / m, m), ("1f1b", 1, (p - 1) / m, p),
                                      ("interleaved", 2, (p - 1) / m / 2, p + (p - 1) / 2),
                                      ("zb-h1", 1, (p - 1) / m / 3, p)):
        timeline = simulate(parallel.SCHEDULES[schedule](p, m, v))
        for what, figure, ours in (("bubble over work", bubble, max(timeline.idle) / (3 * m)),
                                   ("micro-batches that a rank holds", most, max(timeline.peak))):
            yield Claim(f"{schedule}: {what}", figure, ours, f"{p} ranks, {m} micro-batches, F = I = W"
                        + f", {v} stages a rank" * (v > 1), f"{STRATEGIES} {schedule}" + " --n-layer 6" * (v > 1))


def claims_of_time():
    """By `predict`, for H200s. F: FLOP/s of products; W: bytes/s to another GPU."""
    xl, large, h200 = PRESETS["gpt2-xl"], GPTConfig(50257, 2048, 32, 32, 4096), MACHINES["h200"]
    sizes = "python bench.py plan --n-layer 32 --n-head 32 --n-embd 4096 --seq-len 2048"

    def costs(config, machine=h200, **layout):
        return predict(config, Settings(dtype="bf16", **layout), machine)
    yield Claim("FLOPs to train on a token, in K", 6, xl.flops_per_token() / xl.parameters(), "GPT-2 XL; 12 L C T more",
                "python -m lessons sizes")
    for n, link, note in ((8, h200.link, "gradients are float32; blocks do more than products"),
                          (64, h200.network, "two levels: each GPU's card carries an 8th")):
        z3 = costs(large, dp=n, zero=3, batch_size=8 * n)
        yield Claim(f"zero3, {n} GPUs: tokens a GPU that hide traffic", (n - 1) / n * h200.matmul / link,
                    8 * large.seq_len * z3.dp_all / z3.compute, f"F/W (N-1)/N; {note}", f"{sizes} --gpus {n}")
    for batch, note in (64, "too few tokens a GPU for dp alone"), (1024, "enough tokens a GPU for dp alone"):
        alone, mixed = (costs(large, dp=64 // tp, tp=tp, zero=3, batch_size=batch).step for tp in (1, 4))
        yield Claim(f"step of zero3 / of zero3+tp 4: 64 GPUs, {batch} sequences", None, alone / mixed, note,
                    f"{sizes} --gpus 64 --batch-size {batch}")
    for wire, rate in ("NVLink 4, 450", 450e9), ("PCIe 7, 121", 121e9), ("Ethernet, 0.2", 0.2e9):
        ddp = costs(xl, dataclasses.replace(h200, link=rate), dp=8, batch_size=64)
        yield Claim(f"gradients of GPT-2 XL, ms: {wire} GB/s each way", 2e3 * 7 / 8 * 4 * xl.parameters() / rate,
                    1e3 * ddp.dp_all, f"8 GPUs, float32; {100 * ddp.dp / ddp.step:.0f} % of a step after hiding",
                    "python bench.py collectives --only all_reduce")


CLAIMS = claims_of_traffic, claims_of_memory, claims_of_pipelines, claims_of_time
