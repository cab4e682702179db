"""bench.py: traffic is the formulas', tables are whole, bad input is one line."""

import importlib
import dataclasses
import itertools
import json
import sys
import time
import types
import unittest.mock
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist

import safe.launch
import bench
import collectives as dist
import fast.rings
import kernels
import lessons.claims
import lessons.gpu
import lessons.machine
import lessons.peers
import lessons.strategies
import model
import theory.speed
import theory.traffic
import train
from tests.collectives import nodes_of
from tests.kernels import KERNEL_DEVICE, random
from tests.pool import GPUS, close
from tests.runs import Ranks, readme_commands, parse
from fast.zero import FetchingFSDP
from lessons.gpu import Lesson, three_sigmoids
from lessons.machine import calls_of, fit, law_of, sent_in
from lessons.measure import left_out, replaced
from lessons.peers import world_mesh
from lessons.strategies import communication_alone, configs_of, forget, make_trainer, predicted_traffic, routes_of
from safe.flags import check_layout, Settings
from theory.speed import Machine
from theory.traffic import sent


# ------------------------------------------------------------------------------------------------------------ benchmark

def bench_traffic(cases):
    """[(bytes by formula, bytes counted)] of the second step of each case on this rank; small tensors in log2 rounds,
    others in rings."""
    config, found, kept = model.GPTConfig(67, 16, 5, 4, 48), [], fast.rings.DOUBLING_BYTES
    fast.rings.DOUBLING_BYTES = dict.fromkeys(kept, 2000)
    for case in cases:
        s = Settings(**{"dp": 1, "batch_size": 8, "dtype": "fp32", **case})
        sizes = {name: case[name] for name in train.SIZES if name in case}
        trainer = make_trainer(dataclasses.replace(config, **sizes), s, torch.get_default_device())
        trainer.step(0)  # ZeRO-3 learns its order of units
        with routes_of(trainer.net) as routes:
            dist.reset_traffic()
            trainer.step(1)
        counted = {op: t.bytes for op, t in dist.traffic().items() if t.bytes}
        found.append((predicted_traffic(trainer, routes), counted))
        del trainer
        forget()
    fast.rings.DOUBLING_BYTES = kept
    return found


FOUR = {"experts": 4, "ep": 2}
TRAFFIC = {
    1: [{"dtype": "bf16", "micro_batches": 2}],
    2: [{"dp": 2}, {"dp": 2, "zero": 1, "dtype": "bf16"}, {"dp": 2, "zero": 2, "micro_batches": 2},
        {"dp": 2, "zero": 3, "micro_batches": 2},
        *({"cp": 2, "cp_kind": kind, "recompute": recompute, "dtype": dtype} for kind in ("ring", "ulysses")
          for recompute, dtype in (("none", "bf16"), ("block", "fp32"), ("attention", "fp32"))),
        {"tp": 2, "sp": True, "micro_batches": 2}, {"tp": 2, "sp": True, "recompute": "block"},
        {"tp": 2, "sp": True, "recompute": "attention", "dtype": "bf16"},
        {"tp": 2, "recompute": "block"}, {"tp": 2, "recompute": "attention", "micro_batches": 2},
        {"pp": 2, "micro_batches": 4, "schedule": "zb-h1"},
        {"pp": 2, "micro_batches": 4, "schedule": "interleaved", "virtual_stages": 2},
        {"dp": 2, **FOUR}, {"dp": 2, **FOUR, "micro_batches": 2, "expert_every": 2},
        *({"dp": 2, **FOUR, "dtype": "bf16", "recompute": recompute} for recompute in ("block", "attention")),
        {"dp": 2, **FOUR, "zero": 3, "micro_batches": 2, "top_k": 1}, {"dp": 2, "experts": 4, "zero": 2},
        *({"tp": 2, "experts": 4, "recompute": recompute, "dtype": "bf16"} for recompute in ("none", "block"))],
    3: [{"dp": 3, "batch_size": 6}, {"dp": 3, "zero": 3, "batch_size": 6, "dtype": "bf16"},
        {"pp": 3, "micro_batches": 4, "schedule": "gpipe"}],
    4: [{"dp": 4, "zero": 2, "zero_within": 2, "micro_batches": 2}, {"dp": 4, "zero": 3, "zero_within": 2},
        {"dp": 2, "tp": 2, "zero": 3, "micro_batches": 2}, {"dp": 2, "pp": 2, "zero": 1, "micro_batches": 4},
        {"tp": 2, "pp": 2, "sp": True, "micro_batches": 2}, {"dp": 2, "tp": 2, "sp": True, "zero": 1},
        {"cp": 4, "zero": 3, "micro_batches": 2}, {"cp": 2, "tp": 2, "sp": True, "zero": 1},
        {"dp": 2, "tp": 2, "sp": True, "zero": 3, "dtype": "bf16"}, {"tp": 2, "pp": 2, "micro_batches": 2},
        {"dp": 4, **FOUR, "zero": 1}, {"dp": 4, **FOUR, "zero": 3, "zero_within": 2}, {"dp": 2, "tp": 2, **FOUR},
        *({"dp": 2, "tp": 2, "sp": True, **FOUR, "dtype": "bf16", "recompute": recompute}
          for recompute in ("none", "attention", "block")),
        {"dp": 2, "pp": 2, **FOUR, "expert_every": 2, "micro_batches": 2}, {"dp": 2, "cp": 2, **FOUR, "zero": 2}]}


@pytest.mark.parametrize("size", list(TRAFFIC))
def test_bytes_of_every_strategy_are_the_formulas(pool, size):
    for rank, found in enumerate(pool(size).run(bench_traffic, TRAFFIC[size])):
        for case, (formula, counted) in zip(TRAFFIC[size], found):
            assert formula == counted and (counted or size == 1), (rank, case)


def steps_without_collectives(cases):
    found = []
    for case in cases:
        s = Settings(**{"dp": 1, "batch_size": 4, "dtype": "fp32", **case})
        trainer = make_trainer(model.GPTConfig(67, 16, 2, 4, 48), s, torch.get_default_device())
        trainer.step(0)
        found.append(communication_alone(trainer, torch.get_default_device(), 1))
        del trainer
        forget()
    return found


def test_a_step_runs_without_its_collectives(pool):
    """Whichever way they are called, and waited for."""
    cases = [{"dp": 2}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}, {"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2}]
    for found in pool(2).run(steps_without_collectives, cases):
        assert all(alone > 0 and without > 0 for alone, without in found)


@pytest.fixture
def run_bench(tmp_path, monkeypatch):
    """run_bench(*words): what bench.py prints. The ranks that it asks for are forked; torchrun starts those of train.py
    and parallel.py."""
    def run(*words):
        def start_again(processes):
            ranks = Ranks(list(words), processes, tmp_path / "log", program="bench")
            assert ranks.end() == [0] * processes, ranks.printed()
            sys.exit(0)
        monkeypatch.setattr(sys, "argv", ["bench.py", *words])
        monkeypatch.setattr(safe.launch, "start_again", start_again)
        with pytest.raises(SystemExit, match="0"):
            bench.main()
        return (tmp_path / "log").read_text()
    return run


def bench_rows(run_bench, tmp_path, *words):
    printed = run_bench(*words, "--json", str(tmp_path / "rows.json"))
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found["torch"] == torch.__version__ and {"hardware", "commit", "triton", "nccl", "processes"} <= set(found)
    return found, printed


CPU = ["--quick", "--device", "cpu", "--gpus", "2"]


def collectives_traffic():
    """{name: (bytes by formula, bytes counted)} of every collective on this rank, an all-reduce in rings and in log2
    rounds."""
    n, rank, device, found = dist.get_world_size(), dist.get_rank(), torch.get_default_device(), {}
    kept = fast.rings.DOUBLING_BYTES
    for op in (*lessons.machine.BUS, "barrier"):
        for small in (0, 1 << 30) if op == "all_reduce" else [0]:
            fast.rings.DOUBLING_BYTES = dict.fromkeys(kept, small)
            calls, count = calls_of(op, 0 if op == "barrier" else 5000, device)
            dist.reset_traffic()
            calls["ours"]()
            if op != "send right":
                found[op, small] = sent(op, count, 4, n, rank, *law_of(None)), dist.traffic()[op].bytes
                calls["torch"]()
    fast.rings.DOUBLING_BYTES = dict.fromkeys(kept, 0)
    dist.reset_traffic()
    dist.all_reduce(torch.zeros(1003))  # no multiple of any size here
    found["uneven"] = (sent("all_reduce", 1003, 4, n, rank, *law_of(None)),
                       dist.traffic()["all_reduce"].bytes)
    fast.rings.DOUBLING_BYTES = kept
    return found


def two_level_traffic():
    """{name: (bytes by formula, bytes counted)} in nodes of two ranks, small and large."""
    found, n = {}, dist.get_world_size()
    with nodes_of(2):
        for op, elements in itertools.product(("all_reduce", *theory.traffic.HALVES), (4 * n, 400_000)):
            whole, part = torch.ones(elements + (op == "all_reduce")), torch.ones(elements // n)
            scatter, gather = theory.traffic.HALVES
            tensors = {"all_reduce": [whole], scatter: [part, whole], gather: [whole, part]}[op]
            dist.reset_traffic()
            getattr(dist, op)(*tensors)
            found[op, elements] = sent_in(dist.link_of(None), op, len(whole), 4), dist.traffic()[op].bytes
    return found


@pytest.mark.parametrize("size", [4, 8])
def test_bytes_in_two_levels_are_the_formulas(pool, size):
    for rank, found in enumerate(pool(size).run(two_level_traffic)):
        assert len(found) == 6 and all(formula == counted for formula, counted in found.values()), (rank, found)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_bytes_of_every_collective_are_the_formulas(pool, size):
    for rank, found in enumerate(pool(size).run(collectives_traffic)):
        assert all(formula == counted for formula, counted in found.values()), (rank, found)


def test_bench_collectives(run_bench, tmp_path):
    found, printed = bench_rows(run_bench, tmp_path, "collectives", *CPU, "--only", "all_reduce", "scatter", "barrier",
                                "send right")
    rows = [row for row in found["rows"] if "formula" in row]
    assert ({row["op"] for row in rows} == {"all_reduce", "scatter", "barrier"}
            and all(row["counted"] == row["formula"] for row in rows))
    assert (all(row["torch_us"] > 0 and row["us"] > 0 for row in rows) and "all_reduce  " in printed
            and "ours a, us" in printed)
    # 1 MiB in us: bus bandwidth is 2(N-1)/N of the algorithm's.
    last = [row for row in rows if row["op"] == "all_reduce"][-1]
    assert (close(last["alg"], 2**20 / last["us"] / 1e3) and close(last["bus"], last["alg"])
            and last["counted"] == 2 * 2**20)
    assert Machine(**found["machine"]).link > 0


def test_bench_strategies(run_bench, tmp_path):
    found, printed = bench_rows(run_bench, tmp_path, "strategies", *CPU, "--only", "tp", "tp+sp", "zb-h1",
                                "--repeats", "1", "--seq-len", "32", "--n-layer", "2", "--batch-size", "8")
    ours, theirs = (found["rows"][i::2] for i in (0, 1))
    assert [row["strategy"] for row in ours] == [row["strategy"] for row in theirs] == ["tp", "tp+sp", "zb-h1"]
    assert [row["who"] for row in theirs] == ["torch DTensor", "torch DTensor, sp",
                                              "torch InterleavedZeroBubble"]
    assert (all(row["ms"] > 0 and row["tokens"] > 0 and row["mfu"] is None for row in found["rows"])
            and "MFU %" in printed)
    assert all(row["traffic_by_collective"] == row["counted_by_collective"] for row in ours)
    assert all(0.7 < row["memory"] / row["memory_measured"] < 1.2 for row in ours)
    assert all(close(row["off"], row["plan"] / row["ms"]) for row in ours)
    assert close(ours[2]["bubble_measured"], 100 - 100 * 8 * sum(ours[2]["f_i_w_ms"]) / ours[2]["gradients_ms"])
    assert ours[0]["communication_ms"] > 0 and ours[0]["without_communication_ms"] > 0


def times_without(pieces):
    """{strategy: {piece: a step's time without it, over one with all}}; a sleep stands in the place of "fetching"."""
    sleep = FetchingFSDP, "fetch", lambda self, unit: time.sleep(0.1)
    slow = lambda: [sleep], lessons.strategies.WITHOUT["fetching"][1]  # noqa: E731
    layouts = {f"zero{zero}": Settings(dp=2, zero=zero, batch_size=2, device="cpu") for zero in (1, 3)}
    configs = dict.fromkeys(layouts, model.GPTConfig(67, 16, 2, 4, 48))
    a = types.SimpleNamespace(layouts=layouts, configs=configs, repeats=1, without=pieces, json="", model="")
    with unittest.mock.patch.dict(lessons.strategies.WITHOUT, fetching=slow):
        return {row["strategy"]: row for row in lessons.strategies.without(a, torch.device("cpu")).rows}


def test_a_gathering_left_out_repeats_the_own_part():
    own = torch.arange(6.0).view(3, 2)
    for whole in torch.zeros(6, 2), torch.zeros(2, 3, 2), torch.zeros(3, 2, 2).transpose(0, 1):
        with replaced(left_out):
            dist.all_gather_into_tensor(whole, own, async_op=True).wait()
            dist.all_gather_into_tensor(whole, whole.view(2, 3, 2)[1] if len(whole) == 6 else own)
        assert torch.equal(whole.reshape(2, 3, 2), own.expand(2, 3, 2))


def groups_of_peers():
    """How many groups PyTorch's strategies leave; and the mesh itself, on CPUs of a machine that has a GPU, too."""
    before, device = {*torch_dist.distributed_c10d._world.pg_map}, torch.device("cpu")
    config, x = model.GPTConfig(68, 16, 2, 4, 48), torch.zeros(1, 2, 16, dtype=torch.int64)
    kernels.use("torch")
    for fields in ({"dp": 2, "zero": 3}, {"tp": 2}, {"tp": 2, "sp": True}):
        name = "zero3" if "dp" in fields else "tp"
        lessons.peers.PEERS[name](config, Settings(batch_size=4, device="cpu", **fields), device, x, x)[0]()
    kernels.use("auto")
    with unittest.mock.patch.object(torch.cuda, "is_available", lambda: True):
        assert world_mesh(device).get_group() is torch_dist.group.WORLD
    return len({*torch_dist.distributed_c10d._world.pg_map} - before)


def test_strategies_of_pytorch_take_the_worlds_group(pool):
    if pool.device_type == "cpu":
        assert pool(2).run(groups_of_peers) == [0, 0]


def test_bench_strategies_without_a_piece(pool):
    """What stands in a piece's place is in use while a step is timed. A layout without the piece has no time."""
    if pool.device_type == "cuda":
        pytest.skip("the step is the CPU's")
    found = pool(2).run(times_without, ["addition", "fetching"])[0]
    assert found["zero1"]["fetching"] is None and found["zero1"]["addition"] > 0
    assert found["zero3"]["fetching"] > 2 * found["zero3"]["again"]
    assert all(hasattr(owner, attribute) for rows, _ in lessons.strategies.WITHOUT.values()
               for owner, attribute, _ in rows())


def test_bench_strategies_with_experts(run_bench, tmp_path):
    found, printed = bench_rows(run_bench, tmp_path, "strategies", *CPU, "--only", "experts", "dense twin", "--repeats",
                                "1", "--seq-len", "32", "--n-layer", "2", "--batch-size", "8")
    ours = found["rows"][:2]
    assert [row["who"] for row in found["rows"]] == ["ours", "ours", "torch DDP"]
    assert [row["strategy"] for row in found["rows"]] == ["experts", "dense twin", "dense twin"]
    assert ours[0]["settings"]["ep"] == 2 and ours[1]["settings"]["ep"] == 1
    assert all(row["traffic_by_collective"] == row["counted_by_collective"] for row in ours)
    assert ours[0]["traffic_by_collective"]["all_to_all_single"] > 0 and "all_to_all_ms" in ours[0]
    assert all(0.7 < row["memory"] / row["memory_measured"] < 1.2 for row in ours)
    ratio = ours[0]["tokens"] / ours[1]["tokens"]
    assert f"of the dense twin   ours {ratio:.2f}" in printed and "all-to-alls take " in printed
    assert "2 of 8 experts), in 1 of 2 blocks" in printed


def test_a_dense_twin_takes_as_many_flops():
    for config in (model.GPTConfig(), model.GPTConfig(experts=4, top_k=3),
                   model.GPTConfig(n_layer=6, experts=16, top_k=1)):
        dense, routed, twin = configs_of(config)
        assert dense.experts == twin.experts == 0 and routed.experts == (config.experts or 8)
        routers = sum(map(routed.has_experts, range(config.n_layer))) * routed.experts * config.n_embd
        vectors = sum(map(routed.has_experts, range(config.n_layer))) * (routed.top_k - 1) * config.n_embd
        assert twin.parameters() == routed.active_parameters() - routers - vectors
    assert configs_of(model.GPTConfig())[2].inner == 6 * 128


def test_grouped_products_in_the_table_are_the_same(triton_kernels):
    """All who take part compute the same, forward and backward; FLOPs and bytes are those of the tensors."""
    made = list(bench.grouped(bench.Size(torch.device(KERNEL_DEVICE), torch.float32, 1000)))
    assert [made[i].name for i in range(4)] == [f"grouped product {count} {how}" for count in (4, 16)
                                                for how in ("even", "skewed")]
    for operation in made[:2]:
        found = {}
        for who, (function, inputs) in operation.who.items():
            y = function(*inputs)
            found[who] = [y.detach(), *torch.autograd.grad(y.square().sum(), inputs)]
        assert {"ours", "cuBLAS, a loop"} <= set(found)
        for ours, theirs in zip(found["ours"], found["cuBLAS, a loop"]):
            assert close(ours, theirs, 1e-5)
        x, w = inputs
        assert operation.flops == (2 * x.numel() * 24, 4 * x.numel() * 24)
        assert operation.moved == (x.nbytes + w.nbytes + y.nbytes, 2 * (x.nbytes + w.nbytes) + y.nbytes)


def test_line_through_times_is_found():
    messages, sizes = np.array([1, 1, 2, 6, 6]), np.array([1e2, 1e4, 1e5, 1e6, 1e8])
    assert np.allclose(fit(messages, sizes, 3e-5 * messages + sizes / 2e11), (3e-5, 2e11))


def lessons_of(monkeypatch, tmp_path, *words):
    path = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["bench.py", "lessons", "--quick", "--device", KERNEL_DEVICE, "--json", str(path),
                                      *words])
    bench.main()
    return json.loads(path.read_text())["rows"]


def test_bench_lessons(monkeypatch, tmp_path, capsys):
    """On a CPU: all that needs no Triton; and every claim, by formulas written once more."""
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(sys.modules[__name__], "KERNEL_DEVICE", "cpu")
    rows = lessons_of(monkeypatch, tmp_path)
    ways = Counter(row["lesson"] for row in rows if "lesson" in row)
    assert set(ways) == {name for name, lesson in lessons.gpu.LESSONS.items() if not lesson.needs}
    assert min(ways.values()) > 1 and all(row["ms"] > 0 for row in rows if "lesson" in row)
    printed, found = capsys.readouterr().out, [row for row in rows if "claim" in row]
    assert all(row["claim"] in printed and f"{row['ours']:,.5g}" in printed for row in found)
    ours, lecture = ([row[key] for row in found] for key in ("ours", "lecture"))
    ring = [2 * 7 / 8] * 4 + [3 * 7 / 8]
    assert close(ours[:8], [*ring, 8 * 7 / 8, 10 * 7 / 8, 2]) and lecture[:8] == [1.75, 2, 2, 2, 3, 7, 7, 2]
    zero = [7.5 * (2 + 4 + 12), 7.5 * (2 + 4 + 12 / 64), 7.5 * (2 + 16 / 64), 7.5 * 16 / 64]  # float32 gradients
    assert close(ours[8:11], zero[:3], 1e-6) and close(ours[11], zero[3], 0.02)  # ZeRO-3's vectors are on each rank
    assert all(f"16-bit ones: {7.5 * (4 + 12 / 64 - 2 * (z == 2) * 63 / 64) if z else 120:.4g}" in found[8 + z]["note"]
               for z in range(3)) and close(lecture[8:12], [120, 31.4, 16.6, 1.88])
    norms, heads = 16 / 12288, 4 * 96 / 12288  # bytes of statistics
    assert close(ours[12:17], [32 + norms + heads, 8 + norms + (24 + heads) / 8, (32 + norms + heads) / 8,
                               (24 + norms) / 8, 2], 1e-6)
    assert close(lecture[12:17], [34 + 80, 10 + 104 / 8, 114 / 8, 34 / 8, 2])
    assert close(ours[17:25], lecture[17:25]) and close(ours[17:25], [3 / 8, 8, 3 / 8, 4, 3 / 16, 5.5, 1 / 8, 4])
    xl = model.PRESETS["gpt2-xl"]
    assert 6 < ours[25] == xl.flops_per_token() / xl.parameters() < 7
    assert close(lecture[26:28], [7 / 8 * H200.matmul / H200.link, 63 / 64 * H200.matmul / H200.network])
    assert 1 < ours[26] / lecture[26] < 4 / 3 and 1 / 8 < ours[27] / lecture[27] < 1 / 2 and len(found) == 28


def test_lessons_name_what_is_there():
    for lesson in lessons.gpu.LESSONS.values():
        file, name = lesson.read.split()
        assert hasattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name), lesson.read
    for claim in itertools.chain(*(topic() for topic in lessons.claims.CLAIMS)):
        _, program, *words = claim.command.split()
        if program == "bench.py":
            a = bench.parse(words)
            a.device = "cpu"
            bench.check(a, 1)
        elif program == "train.py":
            s = parse(words)
            assert check_layout(s, model.PRESETS["tiny"], 1, 1) == s.tp
        else:
            assert claim.command in readme_commands()
    assert torch.cuda.jiterator._create_jit_fn(lessons.gpu.BRANCHES).kernel_name == "branches"


def test_lessons_on_triton(monkeypatch, tmp_path, capsys, triton_kernels):
    """What a GPU runs, but for CUDA's branches, in the interpreter. A lesson that fails leaves the others."""
    def fail(device, size):
        raise RuntimeError("no such thing\nand more")
    monkeypatch.setitem(lessons.gpu.LESSONS, "width", Lesson("says", "bench.py fail", fail))
    names = ["elu", "fusion", "coalescing", "recompute", "order", "width", "precision"] + ["branches"] * GPUS
    rows = lessons_of(monkeypatch, tmp_path, "--only", *names)
    assert len([row for row in rows if row["lesson"] == "width"]) == 1 and {row["lesson"] for row in rows} == set(names)
    printed = [line for line in capsys.readouterr().out.splitlines() if "failed" in line]
    assert len(printed) == 1 and "failed: no such thing " in printed[0]
    fewer = {row["lesson"]: row["fewer"] for row in rows if "fewer" in row}
    assert fewer["recompute"] == 8 / 5 and fewer["fusion"] == 7 and fewer["elu"] == 8.5 / 2
    x, dy = random(2, 2048).requires_grad_().unbind()
    x.retain_grad()
    x.sigmoid().sigmoid().sigmoid().backward(dy.detach())
    for keep in (True, False):
        assert close(three_sigmoids(x.detach(), dy.detach(), keep), x.grad, 1e-5)
    x = random(64, 128)
    for line, step, grid in (128, 1, (4, 64)), (1, 128, (2, 128)):
        y = torch.empty_like(x)
        lessons.gpu._copy_lines[grid](x, y, line, step, 32)
        assert torch.equal(x, y), step


H200 = theory.speed.MACHINES["h200"]


BAD_BENCH = [
    ("bogus", "WHAT"), ("kernels --only foo", "--only foo"), ("kernels --only elu", "want a GPU"),
    ("plan --gpus 0", "--gpus"),
    ("plan --machine nope", "--machine nope"), ("plan --gpus 16 --machine FILE", "--network"),
    ("plan --gpus 4 --n-head 7", "--n-embd 1603"), ("plan --model gpt5", "--model"),
    ("collectives --only foo", "--only foo"),
    ("lessons --only foo", "there are timing"), ("lessons --only timing branches", "branches: it wants a GPU"),
    ("collectives --gpus 1", "--gpus 2"), ("strategies --json /no/such/x.json", "--json"),
    ("strategies --only ddp7", "--only ddp7"),
    ("strategies --only tp --gpus 3", "--tp 1"), ("strategies --gpus 2 --batch-size 3 --only ddp", "--batch-size 4"),
    ("scaling --only tp --gpus 3", "ddp, zero1, zero2, zero3"), ("kernels --gpus 2", "--gpus 2"),
    ("strategies --json /", "--json /"),
    ("scaling --micro-batches 2", "--micro-batches 2"), ("strategies --device tpu", "--device"),
    ("plan --network -3", "--network"),
    ("pictures nope.json", "nope.json"), ("pictures FILE", "KeyError 'what'"), ("pictures --into FILE", "--into"),
    ("pictures TRACE TRACE", "would overwrite"), ("pictures EMPTY", "empty.json")]


@pytest.mark.parametrize("words,names", BAD_BENCH)
def test_bad_benchmark_is_one_line_and_exit_code_2(words, names, tmp_path, monkeypatch, capsys):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"machine": dict(dataclasses.asdict(H200), network=None)}))
    event = {"ph": "X", "name": "F stage 0 micro-batch 0", "tid": 0, "ts": 0, "dur": 1,
             "args": {"stage": 0, "micro_batch": 0}}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [event]}))
    (tmp_path / "empty.json").write_text(json.dumps({"traceEvents": []}))
    words = words.replace("FILE", str(path)).replace("TRACE", str(tmp_path / "trace.json")).replace(
        "EMPTY", str(tmp_path / "empty.json")).split()
    cpu = ["--device", "cpu"] if words[0] not in ("bogus", "plan", "pictures") and "--device" not in words else []
    monkeypatch.setattr(sys, "argv", ["bench.py", *words, *cpu])
    monkeypatch.setattr(safe.launch, "start_again", lambda n: pytest.fail("processes were started"))
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(SystemExit) as exit:
        bench.main()
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and err.count("\n") == 1 and names in err and not out, err


def test_benchmark_without_a_word_says_what_there_is(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    bench.main()
    printed = capsys.readouterr().out
    assert all(f"python bench.py {what} " in printed for what in bench.WHAT)
