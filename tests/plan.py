"""Predictions obey the formulas."""

import dataclasses
import json
import math
import re

import bench
import further.context
import lessons.plan
import model
import parallel
import theory.clock
import theory.speed
import train
from tests.benchmark import CPU, H200, bench_rows
from tests.pool import close
from further.context import own_tokens
from lessons.plan import all_layouts
from lessons.strategies import parts_of_a_step
from safe.flags import check_layout, Settings
from theory.clock import simulate
from theory.memory import needed_bytes
from theory.speed import mfu, mfu_note, predict, ring_hides, stage_seconds
from theory.traffic import messages

EVEN = model.GPTConfig(256, 1024, 30, 16, 2048)


def layout(**more):
    return Settings(**{"dp": 1, "batch_size": 32, "dtype": "bf16", **more})


def test_plan_obeys_the_formulas():
    config, even = model.PRESETS["gpt2-xl"], EVEN
    H200 = dataclasses.replace(theory.speed.MACHINES["h200"], hop=0.0, network_hop=0.0)  # bandwidth alone
    one, dp = (predict(config, layout(dp=n, batch_size=8 * n), H200) for n in (1, 4))
    assert one.step == one.compute + one.optimizer and one.tp == one.dp == one.bubble == one.transfers == 0
    assert close(one.compute, dp.compute) and 0.3 < 8 * 1024 * config.flops_per_token() / one.step / H200.peak < 0.6
    k = 4 * config.parameters()
    # 2(N-1)/N K; nearly all hidden, at a third of its time.
    assert close(dp.dp_all, 2 * 3 / 4 * k / H200.link, 0.03) and 1 / 3 < dp.dp / dp.dp_all < 0.4
    z3 = predict(config, layout(dp=4, zero=3), H200)
    # Weights are 16-bit.
    assert close(z3.dp_all, (2 / 2 + 1) * 3 / 4 * k / H200.link, 0.05) and z3.optimizer == dp.optimizer / 4
    tp = predict(even, layout(tp=4), H200)
    assert close(tp.tp, 30 * 4 * 2 * 3 / 4 * 32 * 1024 * 2048 * 2 / H200.link, 0.05)  # 4 all-reduces of BTC a block
    # Eight nodes in two levels: every rank's eighth through a network card of its own, and both halves inside.
    far, z3 = (predict(config, layout(dp=64, batch_size=512, zero=zero), H200) for zero in (0, 3))
    assert close(far.dp_all, 2 * 7 / 8 * k / 8 / H200.network + 2 * 7 / 8 * k / H200.link, 0.03)
    assert close(z3.dp_all, far.dp_all, 0.05)  # half as many bytes thrice
    hybrid = predict(config, layout(dp=64, batch_size=512, zero=3, zero_within=8), H200)
    assert close(hybrid.dp_all, 2 * 7 / 8 * k / 8 / H200.network + 2 * 7 / 8 * k / H200.link, 0.05)
    # A ring with one rank on each node leaves it by one network card.
    lone = predict(config, layout(dp=8, batch_size=64), dataclasses.replace(H200, node=1))
    assert close(lone.dp_all, 2 * 7 / 8 * k / H200.network, 0.03)
    pp = [predict(dataclasses.replace(even, vocab_size=50257, tied=tied), layout(pp=8, micro_batches=8), H200)
          for tied in (True, False)]
    # The tied embedding's gradient, between two.
    assert close(pp[0].transfers - pp[1].transfers, 4 * 50257 * 2048 / H200.link)
    # W no longer than F: with a longer one, ZB-H1 idles more than the formula says.
    H200 = dataclasses.replace(H200, elementwise=3e12)
    # The lecture's bubble is that of the clock.
    for schedule, v in [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)]:
        s = layout(pp=4, micro_batches=8, schedule=schedule, virtual_stages=v)
        costs, stages = (predict(even, s, H200),
                         [(i, run) for i, run in enumerate(theory.clock.split_pieces(even, 4 * v)) if i % 4 == 1])
        timeline = simulate(parallel.SCHEDULES[schedule](4, 8, v), *stage_seconds(even, s, H200, stages))
        assert close(costs.bubble, max(timeline.idle), 0.05), schedule


def test_a_ring_hides_where_the_bytes_take_as_long_as_the_flops(run_bench, tmp_path):
    """The formula, from the messages of a step and the pairs of query and key that each rank computes."""
    flops, link, cp = 400e12, 300e9, 4
    config = model.GPTConfig(256, 64 * cp, 1, 4, 48)
    held = [own_tokens(config.seq_len, rank, cp, "ring") for rank in range(cp)]
    for dtype, factors in ("bf16", (2, 2.4)), ("fp32", (4, 3.2)):
        s = layout(cp=cp, batch_size=1, dtype=dtype)
        sent = {item.what: item for item in messages(config, s, [(0, range(3))], []) if item.axis == "cp"}
        keys, grads = (sent[what].elements[0] * sent[what].width for what in ("keys and values", "their gradients"))
        assert sent["keys and values"].times == 2 * (cp - 1) == 2 * sent["their gradients"].times
        rows, seen, _ = further.context.seen(2, 1, 32)
        pairs = len(held[2][rows]) * len(held[1][seen])  # a query and a key: 2C FLOPs in each product
        steps = (keys, 2), (keys + grads, 5)             # bytes, products; FLOPs grow with (T/N)^2, bytes with T/N
        found = ring_hides(flops, link, train.DTYPES[dtype])
        for (sent_bytes, products), tokens, factor in zip(steps, found, factors):
            assert close(tokens, 64 * (sent_bytes / link) / (products * 2 * 48 * pairs / flops))
            assert close(tokens, factor * flops / link)
    _, printed = bench_rows(run_bench, tmp_path, "strategies", *CPU, "--only", "cp", "--repeats", "1", "--seq-len",
                            "32", "--n-layer", "1", "--batch-size", "2")
    assert "cp: T/N is 16. " in printed and re.search(r"from 4 F/W = \S+ tokens forward, 3.2 F/W = \S+ ", printed)


def test_mfu_of_long_sequences_counts_what_the_mask_leaves():
    """A GPU that does products and attention at its peak has an MFU of 100 %, but for the scores that a backward
    kernel computes again."""
    ideal = dataclasses.replace(H200, matmul=H200.peak, attention=H200.peak, elementwise=math.inf, hbm=math.inf,
                                loss=math.inf, launch=0.0, long_attention=None)
    for tokens in (1024, 3072, 3073, 131072):
        config = dataclasses.replace(model.PRESETS["gpt2"], seq_len=tokens)
        scores = config.n_layer * config.n_embd * tokens  # 2 LCT forward and 5 backward are computed
        products = 6 * 12 * config.n_layer * config.n_embd**2 + 6 * config.vocab_size * config.n_embd
        speed = tokens / predict(config, layout(batch_size=1), ideal).step
        assert close(mfu(config, speed, ideal), 100 * config.flops_per_token() / (products + 7 * scores), 1e-3)
        assert config.long_sequences == (tokens > 3072)
    assert 85 < mfu(config, speed, ideal) <= 100 < 150 < 100 * (products + 12 * scores) * speed / ideal.peak
    assert mfu_note(config) and not mfu_note(model.PRESETS["gpt2"])
    assert not any(config.long_sequences for config in model.PRESETS.values())


def test_plan_lets_large_micro_batches_hide_launches():
    """GPT-2, 32 sequences, one GPU, without graphs: 59 ms on a host that took 5 ms to issue a block. The GPU's own work
    is 56 ms."""
    config = dataclasses.replace(model.PRESETS["gpt2"], vocab_size=50304)

    def step(batch_size, launch, **more):
        return predict(config, layout(**{"batch_size": batch_size, "cuda_graphs": "off"} | more),
                             dataclasses.replace(H200, launch=launch)).step

    assert close(step(32, 5e-3), 0.059, 0.05)
    # 12 x 4 ms, all of it ahead of the GPU.
    assert step(32, 4e-3) == step(32, 0.0) and close(step(32, 0.0), 0.056, 0.02)
    assert step(8, 4e-3) > 12 * 4e-3 > 3 * step(8, 0.0)  # four times fewer tokens: the GPU waits
    assert step(8, 4e-3, cuda_graphs="on") == step(8, 0.0) and step(8, 4e-3, recompute="block") > 4 / 3 * 12 * 4e-3


def test_parts_of_a_step_are_what_the_formulas_say():
    """GPT-2's FLOPs, and the bytes that a copy would take as long for: blocks, logits, weights' gradients."""
    config = dataclasses.replace(model.PRESETS["gpt2"], vocab_size=50304)
    s = layout(dp=1, batch_size=32, micro_batches=1)
    parts, tokens = parts_of_a_step(config, s, H200), 32 * 1024
    flops = tokens * (config.flops_per_token() - 6 * 768)  # which counts attention in full, and the last norm's C
    scores = 12 * 12 * 1024 * 768 * tokens
    assert close(parts["products"] * H200.matmul, flops - scores, 2e-3)
    assert close(parts["attention"] * H200.attention, 7 / 12 * scores, 1e-9)
    moved = 12 * (26 * 768 + 5 * 3072 + 2 * 768 + 3 * 768 + 3072) * tokens * 2 + 3 * 2 * 50304 * tokens
    assert close(parts["all other kernels"] * H200.hbm, moved + 12 * 12 * 768**2 * (2 * 2 + 2 * 4), 1e-6)
    assert parts["clipping and AdamW"] == predict(config, s, H200).optimizer


def test_plan_counts_a_shared_sequence():
    """Traffic by the lecture's law; attention is half masked and grows with T; what it hides costs nothing."""
    config = model.GPTConfig(50257, 131072, 12, 16, 2048)
    fast = dataclasses.replace(H200, hop=0.0, network_hop=0.0)
    n, k, passes = 4, 131072 * 2048, 3  # k = BTC; of attention: forward, again, backward
    ring, ulysses, one = (predict(config, layout(batch_size=1, recompute="block", **more), fast)
                          for more in ({"cp": n}, {"cp": n, "cp_kind": "ulysses"}, {}))
    assert close(ring.cp_all, 12 * (n - 1) / n * k * (2 * 4 + 12) / H200.link)
    assert close(ulysses.cp_all, 12 * (n - 1) / n * 4 * k / n * 2 * passes / H200.link) and ulysses.cp == ulysses.cp_all
    assert close(ring.cp, 12 / n * k * 8 / H200.link)  # the last dK and dV
    slow = predict(config, layout(batch_size=1, recompute="block", cp=n), dataclasses.replace(fast, link=1e9))
    assert close(slow.compute, ring.compute) and slow.cp_all - slow.cp < slow.compute  # no more hides than computes
    assert close(one.compute, n * ulysses.compute, 1e-2) and one.cp == one.cp_all == 0
    # 6 LCT FLOPs a token half masked, and 7 where the backward kernel computes the scores again.
    even = dataclasses.replace(H200, long_attention=None, launch=0.0)
    times = [sum(stage_seconds(dataclasses.replace(config, seq_len=t), layout(batch_size=2**20 // t), even,
                                     [(0, range(14))])) for t in (1024, 131072)]
    assert close(times[1] - times[0], 7 * 12 * 2048 * (131072 - 1024) * 2**20 / H200.attention, 1e-6)
    assert close(H200.attention_with(512), 220e12) and 430e12 < H200.attention_with(131072) < 450e12


def test_plan_cuts_sequences_where_nothing_else_fits():
    """GPT-3 with 131072 tokens on 64 H100s; never GPT-2 XL with 1024; and nothing that does not divide."""
    def every(*words):
        a = bench.parse(["plan", "--gpus", "64", *words])
        bench.check(a, 1)
        return a, list(all_layouts(a.config, a.gpus, a.batch_size, a.dtype, a.machine))
    a, settings = every("--batch-size", "8", "--seq-len", "131072", "--n-layer", "96", "--n-head", "96", "--n-embd",
                        "12288", "--machine", "h100", "--top", "8")
    assert {(s.cp, s.cp_kind) for s in settings} > {(cp, kind) for cp in (2, 4, 8, 32) for kind in ("ring", "ulysses")}
    assert min(needed_bytes(a.config, s, True) for s in settings if s.cp == 1) > 0.9 * a.machine.memory
    rows = lessons.plan.plan(a).rows
    assert len(rows) == 8 and all(row["settings"]["cp"] > 1 and row["cp"] > 0 for row in rows)
    assert all(f"cp {row['settings']['cp']} {row['settings']['cp_kind']}" in row["layout"] for row in rows)
    assert all(s.cp == 1 for s in every()[1])
    # 25 heads, then 12; lengths that some cp and tp do not divide.
    for words in (["--seq-len", "98312"], ["--n-head", "12", "--n-embd", "768", "--seq-len", "100012"]):
        a, settings = every("--batch-size", "64", *words)
        cuts = {(s.tp, s.sp, s.cp, s.cp_kind): s for s in settings}
        assert {cp for _, _, cp, _ in cuts} > {1, 2}
        for s in cuts.values():
            assert check_layout(dataclasses.replace(s, device="cpu"), a.config, 64, 8) == 64


def test_plan_counts_experts():
    """A token's k rows travel four times, less an Nth; experts' gradients go over their copies, the rest over dp."""
    config = model.GPTConfig(256, 1024, 6, 16, 2048, experts=16, expert_every=2)
    fast = dataclasses.replace(H200, hop=0.0, network_hop=0.0)
    n, rows, width = 8, 2 * 4 * 1024, 2048 * 2  # k T of a rank's 4 sequences, bytes of each
    costs = {ep: predict(config, layout(dp=n, ep=ep, zero=1), fast) for ep in (1, 2, 8)}
    for ep, found in costs.items():
        assert close(found.ep, 3 * 4 * (ep - 1) / ep * rows * width / H200.link, 1e-3)
        ours, others = config.parameters(0), config.parameters() - config.parameters(0)
        sent = 7 / 8 * ours + (1 - ep / n) * others / ep  # reduce-scatter in float32, all-gather in bf16
        assert close(found.dp_all, 6 * sent / H200.link, 0.03) and close(found.optimizer, costs[1].optimizer, 1e-6)
    again = predict(config, layout(dp=n, ep=8, zero=1, recompute="block"), fast)
    assert close(again.ep, costs[8].ep * 6 / 4, 1e-3)
    # Two experts a token where there was one MLP, in every second block: the products of MLPs half as wide again.
    ideal = dataclasses.replace(H200, elementwise=math.inf, hbm=math.inf, launch=0.0)
    wide = model.GPTConfig(256, 1024, 6, 16, 2048, 6 * 2048)
    moe, dense = (predict(some, layout(dp=n), ideal).compute for some in (config, wide))
    assert close(moe, dense, 1e-6)
    waiting = predict(config, layout(dp=n, ep=8), ideal).compute
    assert close(waiting - moe, 3 * theory.speed.WAIT, 1e-6)
    # No CUDA graph; and where the CPU waits in forward, backward's launches are not issued ahead.
    slow = dataclasses.replace(fast, launch=5e-3)
    assert predict(config, layout(dp=n, cuda_graphs="auto"), slow).compute >= (6 + 3 * 3 / 9) * 5e-3
    assert predict(config, layout(dp=n, ep=8, batch_size=8), slow).compute > (6 + 3 * 7 / 9) * 5e-3


def test_plan_shares_out_experts_that_do_not_fit():
    def plan(*words):
        a = bench.parse(["plan", "--machine", "h100", "--batch-size", "64", *words])
        bench.check(a, 1)
        return a, list(all_layouts(a.config, a.gpus, a.batch_size, a.dtype, a.machine)), lessons.plan.plan(a).rows
    a, settings, rows = plan("--gpus", "8", "--experts", "32", "--top", "40")
    alone = [s for s in settings if s.ep == 1 and s.zero < 3 and s.pp == 1]
    assert alone and min(needed_bytes(a.config, s, True) for s in alone) > a.machine.memory
    assert rows[0]["settings"]["ep"] > 1 and "(ep " in rows[0]["layout"] and rows[0]["ep"] > 0
    assert {row["settings"]["ep"] for row in rows if row["settings"]["pp"] == 1} > {2, 4, 8}
    for row in rows:
        s = Settings(**{**row["settings"], "device": "cpu"})
        assert check_layout(s, a.config, 8, 8) == 8
        assert row["gib"] == needed_bytes(a.config, s, True) / 2**30 < 0.9 * 85e9 / 2**30
    a, settings, _ = plan("--gpus", "24", "--experts", "12", "--expert-every", "3", "--batch-size", "48")
    assert {s.ep for s in settings} == {1, 2, 3, 4, 6, 12}
    layouts = {(s.dp, s.tp, s.pp, s.cp, s.ep, s.sp): s for s in settings}
    for s in layouts.values():
        assert check_layout(dataclasses.replace(s, device="cpu"), a.config, 24, 8) == 24
    assert all(s.ep == 1 for s in plan("--gpus", "8")[1])


def test_plan_lists_what_can_run_and_fits(tmp_path):
    def plan(*words):
        a = bench.parse(["plan", *words])
        assert bench.check(a, 1) == 1
        return a, lessons.plan.plan(a).rows
    a, rows = plan("--gpus", "64", "--batch-size", "512", "--json", str(tmp_path / "plan.json"))
    assert len(rows) == 15 and [row["ms"] for row in rows] == sorted(row["ms"] for row in rows)
    assert all(row["gib"] < 0.9 * H200.memory / 2**30 and 10 < row["mfu"] < 70 for row in rows)
    for row in rows:
        s = Settings(**{**row["settings"], "device": "cpu"})
        assert check_layout(s, a.config, 1, 1) == 64
    assert len(json.loads((tmp_path / "plan.json").read_text())["rows"]) == 15
    a, rows = plan("--gpus", "40", "--top", "200")  # 25 heads, nodes of 8
    assert all(check_layout(Settings(**{**row["settings"], "device": "cpu"}), a.config, 40, 8) == 40
               for row in rows)
    assert plan("--gpus", "4096", "--batch-size", "8192", "--n-layer", "16", "--n-head", "96", "--n-embd", "12288",
                "--top", "2")[1]
    # A sixth of GPT-3 on one GPU.
    assert not plan("--gpus", "1", "--n-layer", "16", "--n-head", "96", "--n-embd", "12288")[1]
    small = dict(dataclasses.asdict(H200), memory=12 * 2**30)  # only where something is sharded or cut
    (tmp_path / "machine.json").write_text(json.dumps({"machine": small}))
    _, rows = plan("--gpus", "8", "--machine", str(tmp_path / "machine.json"))
    assert rows and all(row["settings"]["zero"] or row["settings"]["pp"] > 1 for row in rows)


def test_scaling_compares_with_one_gpu(monkeypatch, capsys):
    def run(words, **more):
        flags = dict(zip(words[3::2], words[4::2]))
        n, batch = int(flags["--gpus"]), int(flags["--batch-size"])
        assert batch // n // int(flags["--accumulate"]) == 8  # micro-batches stay as they are
        with open(flags["--json"], "w") as file:
            json.dump({"rows": [{"strategy": "ddp", "who": "ours", "ms": 1.0, "tokens": 100 - n, "mfu": None}]}, file)
    monkeypatch.setattr(bench.subprocess, "run", run)
    a = bench.parse(["scaling", "--gpus", "4", "--device", "cpu"])
    assert bench.check(a, 1) == 1
    monkeypatch.setattr(bench, "write_json", lambda *args: None)
    rows = bench.scaling(a).rows
    assert [(row["kind"], row["gpus"], row["batch"]) for row in rows] == [
        (kind, n, batch) for kind, batches in (("weak", (8, 16, 32)), ("strong", (32, 32, 32)))
        for n, batch in zip((1, 2, 4), batches)]
    assert close(rows[2]["efficiency"], 100 * 96 / 99)


def test_plan_hides_data_parallel_traffic_alone():
    """What --sp sends costs its whole time. Of dp's, computation hides a part, and of new weights the updates of others
    do, too, where our AdamW makes them."""
    s = layout(dp=2, tp=4, sp=True, zero=1, batch_size=64)
    ours = predict(EVEN, s, H200)
    late = predict(EVEN, s, dataclasses.replace(H200, fused=False))  # weights are gathered after all updates
    assert ours.dp_all == late.dp_all > late.dp > ours.dp > 0
    doubled = predict(EVEN, s, dataclasses.replace(H200, link=H200.link / 2, hop=2 * H200.hop))
    assert close(doubled.tp, 2 * ours.tp, 1e-9)
