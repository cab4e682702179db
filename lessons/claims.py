"""The lecture's claims in figures, beside ours."""

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
    lecture: float  # the lecture's figure
    ours: float
    note: str
    command: str    # measures it


GPT3 = GPTConfig(50257, 2048, 96, 96, 12288)
STRATEGIES = "python bench.py strategies --gpus 4 --only"


def bytes_of(items, n):
    """Bytes that rank 0 of n sends."""
    return sum(item.times * sent(item.op, elements, item.width, n, 0) for item in items for elements in item.elements)


def claims_of_traffic():
    n, k, btc = 8, 1 << 20, GPT3.seq_len * GPT3.n_embd
    yield Claim("all-reduce of k: a rank sends, in k", 2 * (n - 1) / n, sent("all_reduce", k, 4, n, 0) / (4 * k),
                f"2 (N-1)/N, N = {n}", "python bench.py collectives --gpus 4 --comm ring --only all_reduce")
    for zero, name, figure, note in ((0, "ddp", 2, ""), (1, "zero1", 2, ""), (2, "zero2", 2, ""),
                                     (3, "zero3", 3, "; a stage's last unit is gathered once")):
        s = Settings(dp=n, zero=zero, batch_size=n, dtype="fp32")
        buckets = messages_of_buckets(s, "dp", [(k, 2 if zero == 3 else 0)], n)
        yield Claim(f"{name}: a rank sends in a step, in K", figure, bytes_of(buckets, n) / (4 * k),
                    f"(N-1)/N of it, N = {n}{note}", f"{STRATEGIES} {name}")
    law = 8 * (n - 1) / n
    for layout, of, figure, note, name in (
            ({"tp": n}, "tp: a rank sends for a block", law, f"8 (N-1)/N, N = {n}", "tp"),
            ({"tp": n, "sp": True}, "tp+sp: a rank sends for a block", law,
             f"8 (N-1)/N, N = {n}; backward gathers again what f gathered", "tp+sp"),
            ({"pp": 4}, "pp: a rank sends for a micro-batch", 2, "activations on, gradients back", "1f1b")):
        items = messages(GPT3, Settings(dp=1, dtype="bf16", batch_size=1, **layout), [(1, range(1, 2))], [])
        passed = [item for item in items if item.what.startswith("activations")]
        yield Claim(f"{of}, in BTC", figure, bytes_of(passed, n) / (2 * btc), note, f"{STRATEGIES} {name}")


def claims_of_memory():
    """A block of the lecture keeps 34 + 5 heads T/C bytes for each of BTC elements, ours 32: model.py has no dropout,
    whose masks take 2, and flash attention keeps statistics instead of the T x T scores."""
    large, n = GPTConfig(50257, 2048, 36, 32, 4096), 64
    for zero, figure in enumerate((120, 31.4, 16.6, 1.88)):
        kinds = memory_bytes(large, zero, n, dtype=torch.bfloat16)
        gb = {kind: 7.5 * size / large.parameters() for kind, size in kinds.items() if kind != "activations"}
        note = f"16-bit ones: {sum(gb.values()) - gb['gradients'] / 2:.4g}" if zero < 3 else (
            "no 16-bit shard besides masters")
        yield Claim(f"ZeRO-{zero}: 7.5 billion parameters, {n} GPUs: GB", figure, sum(gb.values()),
                    f"gradients are float32; {note}", "python -m lessons memory")
    scores, t, leaner = 5 * GPT3.n_head * GPT3.seq_len / GPT3.n_embd, 8, "no dropout, no T x T scores"
    for flags, figure, tp, tokens_cut, recompute, note in (
            ("", 34 + scores, 1, 1, "none", leaner),
            ("--tp 8", 10 + (24 + scores) / t, t, 1, "none", leaner),
            ("--tp 8 --sp", (34 + scores) / t, t, t, "none", leaner),
            ("--tp 8 --sp --recompute attention", 34 / t, t, t, "attention", "nor q, k, v, attention's output kept"),
            ("--recompute block", 2, 1, 1, "block", "only the block's input")):
        kept = activation_bytes(GPT3, 1, tp, 2, recompute, [range(1, 2)], tokens_cut=tokens_cut)
        yield Claim(f"activations of a block, in BTC: {flags or 'one GPU'}", figure,
                    kept / (GPT3.seq_len * GPT3.n_embd), note,
                    f"python train.py --steps 50 {flags.replace('8', '2')}".rstrip())


def claims_of_pipelines():
    p, m = 4, 8
    for schedule, v, bubble, most, flags in (
            ("gpipe", 1, (p - 1) / m, m, ""), ("1f1b", 1, (p - 1) / m, p, ""),
            ("interleaved", 2, (p - 1) / m / 2, p + (p - 1) / 2, " --n-layer 6"),
            ("zb-h1", 1, (p - 1) / m / 3, p, "")):
        timeline = simulate(parallel.SCHEDULES[schedule](p, m, v))
        note, command = f"{p} ranks, {p * v} stages, {m} micro-batches, F = I = W", f"{STRATEGIES} {schedule}{flags}"
        yield Claim(f"{schedule}: bubble over work", bubble, max(timeline.idle) / (3 * m), note, command)
        yield Claim(f"{schedule}: micro-batches that a rank holds", most, max(timeline.peak), note, command)


def claims_of_time():
    """By `predict`, for H200s. F: FLOP/s of products; W: bytes/s to another GPU."""
    xl, large, h200 = PRESETS["gpt2-xl"], GPTConfig(50257, 2048, 32, 32, 4096), MACHINES["h200"]
    yield Claim("FLOPs to train on a token, in K", 6, xl.flops_per_token() / xl.parameters(), "GPT-2 XL; 12 L C T more",
                "python -m lessons sizes")
    for n, link, note in ((8, h200.link, "gradients are float32; blocks do more than products"),
                          (64, h200.network, "two levels: each GPU's card carries an 8th")):
        z3 = predict(large, Settings(dtype="bf16", dp=n, zero=3, batch_size=8 * n), h200)
        yield Claim(f"zero3, {n} GPUs: tokens a GPU that hide traffic", (n - 1) / n * h200.matmul / link,
                    8 * large.seq_len * z3.dp_all / z3.compute, f"F/W (N-1)/N; {note}",
                    f"python bench.py plan --n-layer 32 --n-head 32 --n-embd 4096 --seq-len 2048 --gpus {n}")


CLAIMS = claims_of_traffic, claims_of_memory, claims_of_pipelines, claims_of_time
