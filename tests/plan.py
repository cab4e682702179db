"""Predictions obey the formulas."""

import dataclasses
import itertools
import json
import math
import re


import bench
import lessons.plan
import model
import parallel
import theory.clock
from tests.benchmark import H200, asked
from tests.llama import write_folder
from tests.pool import close, parametrize
from tests.runs import output_of, parse
from lessons.overlap import hidden_from, ratios
from lessons.plan import CHUNK, SPLIT, describe_layout, rows_of
from further.experts import ExpertsConfig
from further.schedules import SCHEDULES
from safe.flags import check_layout, model_config, replayable, Settings
from theory.clock import simulate
from theory.memory import ROOM, needed_bytes
from theory.speed import (
    counted_flops, matrices, mfu, mfu_note, operations, passes, predict, ring_hides, stage_seconds)

EVEN = model.GPTConfig(256, 1024, 30, 16, 2048)
XL = model.PRESETS["gpt2-xl"]
LONG = model.GPTConfig(50257, 131072, 12, 16, 2048)
MOE = ExpertsConfig(256, 1024, 6, 16, 2048, experts=16, expert_every=2)
# Machines of bandwidth alone: without latency; and computing in no time, so that nothing hides what is sent.
FAST = dataclasses.replace(H200, hop=0.0, network_hop=0.0)
IDLE = dataclasses.replace(FAST, matmul=1e30, attention=1e30, long_attention=1e30, elementwise=1e30, loss=1e30,
                           hbm=1e30, start=0.0)


def layout(flags="", config=XL):
    s = parse("--dp 1 --batch-size 32 --dtype bf16".split() + flags.split())
    if s.cuda_graphs == "auto":
        s.cuda_graphs = "on" if replayable(s, config) else "off"
    return s


K, BTC, OUTSIDE = 4 * XL.parameters(), 131072 * 2048, dataclasses.replace(MOE, top_k=0).active_parameters()
LINK, NETWORK = 1 / H200.link, 1 / H200.network
ALL = "--cp 4 --batch-size 1 --recompute block"  # recomputing: attention runs forward twice


def rows_law(ep):
    """A token's k rows travel four times, less an Nth."""
    return 3 * 4 * (ep - 1) / ep * 2 * 4 * 1024 * 2048 * 2 * LINK


def moe_law(ep):
    """Gradients of experts go over their copies, the rest over dp: a reduce-scatter in float32, a gathering in bf16.
    The rows that travel in backward hide as much of the first, those in forward as much of the second."""
    elements = 7 / 8 * OUTSIDE + (1 - ep / 8) * (MOE.parameters() - OUTSIDE) / ep
    return 4 * elements * LINK - rows_law(ep) / 2 + max(0, 2 * elements * LINK - rows_law(ep) / 2)


@parametrize("config,flags,axis,law", [
    (XL, "--dp 4", "dp", 2 * 3 / 4 * K * LINK), (XL, "--dp 4 --zero 3", "dp", (2 / 2 + 1) * 3 / 4 * K * LINK),
    (EVEN, "--tp 4", "tp", 30 * 4 * 2 * 3 / 4 * 32 * 1024 * 2048 * 2 * LINK),  # 4 all-reduces of BTC a block
    # Eight nodes in two levels: every rank's eighth through a network card of its own, and both halves inside.
    *((XL, "--dp 64 --batch-size 512" + zero, "dp", 2 * 7 / 8 * (K / 8 * NETWORK + K * LINK))
      for zero in ("", " --zero 3", " --zero 3 --zero-within 8")),
    (LONG, ALL, "cp", 12 * 3 / 4 * BTC * (2 * 4 + 2 * 2 + 2 * 4) * LINK),
    (LONG, ALL + " --cp-kind ulysses", "cp", 12 * 3 / 4 * 4 * BTC / 4 * 2 * 3 * LINK),
    *((MOE, f"--dp 8 --ep {ep} --zero 1", axis, law(ep)) for ep in (1, 2, 8)
      for axis, law in (("ep", rows_law), ("dp", moe_law))),
    (MOE, "--dp 8 --ep 8 --recompute block", "ep", 6 / 4 * rows_law(8))])
def test_traffic_takes_what_the_formulas_say(config, flags, axis, law):
    s = layout(flags, config)
    costs = predict(config, s, IDLE)
    assert close(getattr(costs, axis), law, 0.06), (getattr(costs, axis), law)
    slower = predict(config, s, dataclasses.replace(IDLE, link=H200.link / 2, network=H200.network / 2))
    assert close(getattr(slower, axis), 2 * law, 0.06)


def test_a_ring_between_nodes_leaves_each_by_one_card():
    lone = predict(XL, layout("--dp 8"), dataclasses.replace(IDLE, node=1))
    assert close(lone.dp, 2 * 7 / 8 * K * NETWORK, 0.03)


def test_computation_hides_traffic_and_fills_the_step():
    one, dp, z3 = (predict(XL, layout(flags), FAST) for flags in ("--batch-size 8", "--dp 4", "--dp 4 --zero 3"))
    assert sum(one) == one.compute + one.optimizer
    assert close(one.compute, dp.compute) and 0.3 < 8 * 1024 * XL.flops_per_token() / sum(one) / H200.peak < 0.6
    assert 1 / 3 < dp.dp / (2 * 3 / 4 * K * LINK) < 0.4  # nearly all hidden, at a third of its time
    assert z3.optimizer == dp.optimizer / 4
    ring = predict(LONG, layout(ALL), FAST)
    assert close(ring.cp, 12 / 4 * BTC * 8 * LINK)  # the last dK and dV
    tied, untied = (predict(dataclasses.replace(EVEN, vocab_size=50257, tied=tied), layout("--pp 8 --micro-batches 8"),
                            FAST) for tied in (True, False))
    assert close(tied.pp - untied.pp, 4 * 50257 * 2048 * LINK)  # its gradient, between two


def test_a_block_has_a_fixed_cost_and_sums_of_dx_travel_beside_dw():
    small, large = (predict(XL, layout("--micro-batches 4"), dataclasses.replace(FAST, start=x)) for x in (0.0, 1e-3))
    assert close(large.compute - small.compute, 4 * 48 * 1e-3)  # in each micro-batch
    on, off = (predict(EVEN, layout(f"--tp 4 --fast {fast}", EVEN), FAST).tp for fast in ("on", "off"))
    assert close(off, 30 * 4 * 2 * 3 / 4 * 32 * 1024 * 2048 * 2 * LINK, 0.02)
    assert 0.6 < on / off < 0.7  # one of two in backward, at a third of its time


def test_experts_take_as_long_as_wide_mlps():
    """Two experts a token where there was one MLP, in every second block: the products of MLPs half as wide again. And
    each rank steps its Nth of all."""
    ideal = dataclasses.replace(H200, elementwise=math.inf, hbm=math.inf)
    wide = model.GPTConfig(256, 1024, 6, 16, 2048, 6 * 2048)
    moe, dense = (predict(some, layout("--dp 8", some), ideal).compute for some in (MOE, wide))
    assert close(moe, dense, 1e-6)
    one, two = (predict(MOE, layout(f"--dp 8 --zero 1 --ep {ep}", MOE), FAST).optimizer for ep in (1, 2))
    assert close(one, two, 1e-6)


@parametrize("schedule, m", [*((name, 8) for name in SCHEDULES if name != "v-min"), ("interleaved", 2)])
def test_the_lecture_s_bubble_is_that_of_the_clock(schedule, m):
    """With fewer micro-batches than ranks it is the clock's."""
    machine, v = dataclasses.replace(FAST, elementwise=2e12), 1 + (schedule == "interleaved")  # W <= F, or ZB-H1 idles
    s = dataclasses.replace(layout(f"--pp 4 --micro-batches {m} --virtual-stages {v}"), schedule=schedule)
    stages = theory.clock.stages_in(s, EVEN, 1)
    timeline = simulate(SCHEDULES[schedule](4, m, v), *stage_seconds(EVEN, s, machine, stages))
    assert close(predict(EVEN, s, machine).bubble, max(timeline.idle), 0.05)


@parametrize("dtype, width", [("bf16", 2), ("fp32", 4)])
def test_a_ring_hides_where_the_bytes_take_as_long_as_the_flops(dtype, width):
    """A rank's t queries see t/2 of another rank's keys: 2C FLOPs for each pair in each product, two forward and five
    backward. A token's key and value are 2C numbers of `width` bytes. Backward also sends their float32 gradients."""
    flops, link = 400e12, 300e9
    hidden = ring_hides(flops, link, parallel.PRECISIONS[dtype])
    for tokens, sent, products in zip(hidden, (2 * width, 2 * width + 8), (2, 5)):
        assert close(sent * tokens / link, products * tokens**2 / flops)


def test_traffic_hides_from_the_tokens_that_the_ratio_names():
    """With one token less it does not; of tensor and pipeline parallelism tokens cancel."""
    some, more = (ratios(XL, tokens, 8, H200) for tokens in (100, 700))
    for name in some:
        for link in (0, 1):
            least = hidden_from(100, some[name][link], more[name][link])
            if name in ("tp", "pp"):
                assert least == ("any" if ratios(XL, 1, 8, H200)[name][link] <= 1 else "never")
                continue
            least = int(least.replace(",", ""))
            assert ratios(XL, least, 8, H200)[name][link] <= 1 < ratios(XL, least - 1, 8, H200)[name][link]


def test_operations_move_and_compute_what_the_planner_counts():
    flops, moved = ({name: pair[i] for name, pair in operations(XL, 64).items()} for i in (0, 1))
    products = flops["q, k, v"] + flops["projection"] + flops["MLP, up"] + flops["MLP, down"]
    assert products == 2 * 64 * sum(matrices(XL))
    assert 2 * moved["layer norm"] + 2 * moved["x + y"] + moved["GELU"] == 2 * 64 * passes(XL)[0]


def test_mfu_of_long_sequences_counts_what_the_mask_leaves():
    """A GPU that does products and attention at its peak has an MFU of 100 %, but for the scores that a backward
    kernel computes again."""
    ideal = dataclasses.replace(H200, matmul=H200.peak, attention=H200.peak, elementwise=math.inf, hbm=math.inf,
                                loss=math.inf, long_attention=None, start=0.0)
    for tokens in 3072, 3073, 131072:
        config = dataclasses.replace(model.PRESETS["gpt2"], seq_len=tokens)
        scores = config.n_layer * config.n_embd * tokens  # 2 LCT forward and 5 backward are computed
        products = 6 * 12 * config.n_layer * config.n_embd**2 + 6 * config.vocab_size * config.n_embd
        speed = tokens / sum(predict(config, layout("--batch-size 1"), ideal))
        assert close(mfu(config, speed, ideal.peak), 100 * counted_flops(config) / (products + 7 * scores), 1e-3)
        assert bool(mfu_note(config)) == (tokens > 3072)
    assert 85 < mfu(config, speed, ideal.peak) <= 100


LARGE = "--n-layer 24 --n-head 96 --n-embd 12288"  # a quarter of GPT-3
VERY_LONG = f"--gpus 16 --batch-size 2 --seq-len 131072 --machine h100 {LARGE}"
LISTED = [  # flags, how many layouts are listed, and what is true of each
    ("--gpus 12 --batch-size 24", 15, lambda s: s.cp == 1),
    (f"--gpus 1 {LARGE}", 0, None),
    # All that fit: sequences are cut where nothing else does, experts shared out, states sharded or layers cut.
    (VERY_LONG + " --top 1000", 18, lambda s: s.cp > 1),
    ("--gpus 8 --machine h100 --batch-size 64 --experts 32 --top 1000", 23,
     lambda s: s.ep > 1 or s.zero == 3 or s.pp > 1),
    ("--gpus 8 --machine SMALL --top 1000", 43, lambda s: s.zero or s.pp > 1)]


@parametrize("flags, number, holds", LISTED)
def test_plan_lists_what_can_run_and_fits(tmp_path, flags, number, holds):
    small = tmp_path / "small.json"
    small.write_text(json.dumps({"machine": dataclasses.asdict(H200) | {"memory": 12 * 2**30}}))
    a = asked(f"plan {flags.replace('SMALL', str(small))} --json {tmp_path / 'plan.json'}")
    lessons.plan.plan(a, None)
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert len(rows) == number and [row["ms"] for row in rows] == sorted(row["ms"] for row in rows)
    for row in rows:
        s = Settings(**{**row["settings"], "device": "cpu", "fast": "on"})
        assert check_layout(s, a.config, 1, 1) == a.gpus and row["layout"] == describe_layout(s)
        assert s.schedule not in SPLIT or s.recompute == "none" and s.micro_batches >= s.pp
        ranks = [n / 2**30 for n in needed_bytes(a.config, s)]
        assert row["gib"] == max(ranks) < 0.9 * a.machine.memory / 2**30 and len(ranks) == s.pp
        assert holds(s) and 0 < row["mfu"] < 70 and (row["cp"] > 0) == (s.cp > 1) and (row["ep"] > 0) == (s.ep > 1)


def test_plan_runs_no_more_again_than_has_to_be():
    """Of each layout it lists the fastest way to fit that there is: a part, so many blocks, the loss in chunks."""
    a = asked("plan --model cs336-8b --n-layer 14 --gpus 2 --batch-size 2 --machine h100")
    rows = list(rows_of(a))
    ways = [("none", 0), *itertools.product(("mlp", "block"), range(14))]
    for row in rows:
        assert parse(f"--batch-size 2 --dtype bf16 {row['layout']}".split()) == Settings(**row["settings"])
        times = []
        for (part, blocks), chunk in itertools.product(ways, (0, CHUNK)):
            s = Settings(**row["settings"] | dict(recompute=part, recompute_blocks=blocks, loss_chunk=chunk))
            if max(needed_bytes(a.config, s)) <= ROOM * a.machine.memory:
                s.cuda_graphs = "on" if replayable(s, a.config) else "off"
                times.append(1e3 * sum(predict(a.config, s, a.machine)))
        assert close(row["ms"], min(times), 1e-6), row["layout"]
    assert any(row["settings"]["recompute_blocks"] and row["settings"]["loss_chunk"] for row in rows)


@parametrize("flags", ["--model gpt2-xl --gpus 16 --batch-size 16", "--init-from FOLDER --gpus 8"])
def test_plan_begins_with_its_fastest_layout_s_command(tmp_path, flags):
    """Which train.py takes."""
    write_folder(tmp_path, "qwen3", max_position_embeddings=3000)
    flags = flags.replace("FOLDER", str(tmp_path))
    printed = output_of(bench.main, *f"plan {flags} --top 3 --json {tmp_path}/plan.json".split())
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    torchrun, _, words = printed.partition("\n")[0].partition(" train.py ")
    s, a = parse(words.split()), asked(f"plan {flags}")
    each, nodes = (int((re.findall(rf"--{name} (\d+)", torchrun) or [1])[0]) for name in ("nproc_per_node", "nnodes"))
    s.device = "cpu"
    assert model_config(s)[0] == a.config and check_layout(s, a.config, a.gpus, 8) == a.gpus == each * nodes
    assert each <= 8 and describe_layout(s) == rows[0]["layout"]
    assert (s.batch_size, s.dtype) == (a.batch_size, "bf16")