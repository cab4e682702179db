"""bench.py: traffic is the formulas', tables are whole, bad input is one line."""

import contextlib
import itertools
import json
import math
import re
from unittest.mock import patch

import torch
import torch.distributed as torch_dist

import bench
import collectives as dist
import kernels
import lessons.bench.rates
import lessons.links
import model
from further.experts import ExpertsConfig
from lessons import gpu
from lessons.bench import peers, strategies
from lessons.bench.rates import BUS, calls_of, sent_in
from lessons.bench.strategies import (
    communication, dense_twin, free_memory, make_trainer, predicted_traffic)
from lessons.bench.timing import interleaved, of_all_ranks, without_collectives
from further.sampling import CachedGPT
from lessons.eight_bits import few_rows, floats_of, in_few_bits
from lessons.sampling import FewBits, weights_read, with_bits
from tests.kernels import GPUS, KERNEL_DEVICE
from tests.links import nodes_of
from tests.pool import close, is_plain, on_both, on_cpus, on_ranks, parametrize
from tests.runs import output_of, parse, printed_by, ran
from theory.speed import MACHINES, Machine
from theory.traffic import HALVES
from train import config_of


# ------------------------------------------------------------------------------------------------------------ benchmark

def settings_of(flags):
    sizes = "--vocab-size 67 --seq-len 16 --n-layer 3 --n-head 4 --n-embd 48 --batch-size 8"
    return parse(f"--dp 1 --dtype fp32 {sizes} --fast {'off' if is_plain() else 'on'} {flags}".split())


def trainer_of(flags):
    """A Trainer of random tokens with train.py's flags, of this process's edition."""
    s = settings_of(flags)
    return make_trainer(config_of(s), s, torch.get_default_device())


def links_said():
    """(what lessons links prints of short messages, bytes that this rank sent)."""
    with patch.multiple(lessons.links, SHORT=1 << 8, LONG=1 << 16):
        dist.reset_traffic()
        return printed_by(lessons.links.demo_links), dist.traffic()["send"].bytes


def test_links_are_measured_pair_by_pair(pool):
    """Eight turns of three messages of each size, there or back."""
    size = 3
    (said, _), *_ = told = pool(size).run(links_said)
    rows = re.findall(r"(?m)^(\d) - (\d) +[\d.]+ +[\d.]+$", said)
    assert [(int(i), int(j)) for i, j in rows] == [*itertools.combinations(range(size), 2)]
    assert [sent for _, sent in told] == size * [(size - 1) * 24 * (256 + (1 << 16))]


TRAFFIC = """
    --dtype bf16 --micro-batches 2
    --dp 2
    --dp 2 --zero 1 --dtype bf16
    --dp 2 --zero 2 --micro-batches 2
    --dp 3 --zero 3 --batch-size 6 --dtype bf16
    --dp 4 --zero 2 --zero-within 2 --micro-batches 2
    --dp 4 --zero 3 --zero-within 2
    --cp 2 --recompute block --recompute-blocks 1
    --cp 2 --cp-kind ulysses --recompute block --dtype bf16
    --cp 4 --zero 3 --micro-batches 2
    --arch llama --cp 2 --recompute block
    --tp 2 --sp --recompute block --micro-batches 2
    --tp 2 --sp --recompute block --recompute-blocks 1
    --arch llama --tp 2 --micro-batches 2 --loss-chunk 20
    --arch llama --dp 2 --tp 2 --sp --zero 3 --dtype bf16
    --cp 2 --tp 2 --sp --zero 1 --recompute mlp
    --model qwen3-0.6b --tp 2 --dp 2 --sp --n-kv-head 2 --zero 3
    --pp 2 --micro-batches 4 --schedule zb-h1
    --pp 2 --micro-batches 4 --schedule interleaved --virtual-stages 2
    --pp 3 --micro-batches 4 --schedule gpipe
    --dp 2 --pp 2 --zero 1 --micro-batches 4
    --tp 2 --pp 2 --sp --micro-batches 2 --schedule zb-h1 --recompute block
    --tp 2 --pp 2 --micro-batches 2 --schedule zb-h1 --loss-chunk 20 --recompute mlp
    --dp 2 --pp 2 --zero 2 --micro-batches 4 --schedule zb-v
    --dp 2 --pp 2 --zero 3 --micro-batches 4 --schedule zb-v
    --cp 2 --pp 2 --zero 3 --micro-batches 4 --schedule zb-h1 --recompute block
    --cp 2 --pp 2 --cp-kind ulysses --micro-batches 4 --schedule v-half
    --dp 2 --experts 4 --ep 2 --zero 3 --micro-batches 2 --top-k 4
    --dp 4 --experts 4 --ep 2 --zero 3 --zero-within 2 --top-k 4
    --dp 2 --tp 2 --sp --experts 4 --ep 2 --recompute block --recompute-blocks 1 --top-k 4
    --dp 2 --pp 2 --experts 4 --ep 2 --schedule zb-h1 --micro-batches 2 --top-k 4
    --tp 2 --pp 2 --sp --experts 4 --shared-experts 1 --schedule dualpipe-v --micro-batches 2 --recompute mlp
    --arch llama --dp 2 --tp 2 --sp --experts 4 --shared-experts 1 --ep 2 --top-k 4
    --dp 2 --cp 2 --experts 4 --ep 2 --zero 2 --recompute mlp --top-k 4
    --cp 2 --pack --micro-batches 2
    --cp 2 --cp-kind ulysses --pack
    --dp 2 --pp 2 --optimizer muon --zero 3 --micro-batches 2 --experts 4 --ep 2 --top-k 4"""


@on_both
@parametrize("size", [1, 2, 3, 4])
@on_ranks()
def test_every_strategy_sends_what_the_table_says(size):
    """Each expert gets all tokens, because the table says what equal loads send. Step 0 would measure memory."""
    for case in TRAFFIC.strip().splitlines():
        if math.prod(map(int, re.findall(r"--[dtpc]p (\d)", case))) != size:
            continue
        trainer = trainer_of(case)
        dist.reset_traffic()
        trainer.step(2)
        counted = {op: t.bytes for op, t in dist.traffic().items() if t.bytes}
        assert predicted_traffic(trainer) == counted and (counted or size == 1), case
        del trainer
        free_memory()


@on_ranks(2)
def test_a_step_runs_without_its_collectives():
    """Whichever way they are called, and waited for."""
    cases = "--dp 2 | --dp 2 --zero 2 | --dp 2 --zero 3 | --tp 2 | --tp 2 --sp | --cp 2 | --cp 2 --cp-kind ulysses"
    for case in [*cases.split(" | "), "--dp 2 --ep 2 --experts 4"]:
        trainer = trainer_of(case)
        trainer.step(0)
        dist.reset_traffic()
        assert communication(trainer, torch.get_default_device(), 1.0, 1, 1) < 100
        assert {op for op, t in dist.traffic().items() if t.bytes} <= {"isend"}, case  # --cp's ring sends on
        del trainer
        free_memory()


def hurry():
    """The machine's rates are measured once."""
    lessons.bench.rates.interleaved = lambda steps, device, repeats, calls: interleaved(steps, device, 1, 1)


def bench_rows(tmp_path, *words):
    """(what bench.py writes as JSON, what it prints) with two processes, which it forks."""
    file = tmp_path / "rows.json"
    words = [*words, "--quick", "--device", "cpu", "--gpus", "2", "--json", str(file)]
    printed = ran(words, 1, tmp_path / "log", program="bench.py", launcher="fork", before=hurry)
    found = json.loads(file.read_text())
    assert found["torch"] == torch.__version__ and {"hardware", "commit", "triton", "command"} <= set(found)
    return found, printed


@parametrize("size,nodes", [(2, 0), (5, 0), (8, 0), (4, 2), (8, 2)])
@on_ranks()
def test_bytes_of_every_collective_are_the_formulas(nodes):
    """nodes: in two levels, nodes of so many ranks; 0: in one."""
    ops, sizes = ["all_reduce", *HALVES] if nodes else BUS, (5000, 1_600_000)
    with nodes_of(nodes) if nodes else contextlib.nullcontext():
        for op, size in itertools.product(ops, sizes):
            calls, elements = calls_of(op, size, torch.get_default_device())
            dist.reset_traffic()
            calls["us"]()
            assert sent_in(dist.link_of(None), op, elements, 4) == dist.traffic()[op].bytes, (op, elements)


def test_bench_collectives(tmp_path):
    found, _ = bench_rows(tmp_path, "collectives", "--only", "all_reduce", "reduce")
    rows = found["rows"]
    assert {row["op"] for row in rows} == {"all_reduce", "reduce"}
    assert all(row["counted"] == row["formula"] and row["torch_us"] > 0 and row["us"] > 0 for row in rows)
    last = [row for row in rows if row["op"] == "all_reduce"][-1]  # 1 MiB: 2(N-1)/N of it goes over the bus
    assert close(last["bus"], 2**20 / last["us"] / 1e3) and last["counted"] == 2 * 2**20


def test_bench_strategies(tmp_path):
    only = ["zb-h1", "experts", "dense twin"]
    found, printed = bench_rows(tmp_path, "strategies", "--only", *only, "--repeats", "1", "--seq-len", "32",
                                "--experts", "8", "--expert-every", "2", "--without", "norm",
                                "--n-layer", "2", "--n-embd", "32", "--n-head", "2", "--batch-size", "8")
    ours = [row for row in found["rows"] if row["who"] == "ours"]
    assert [row["strategy"] for row in ours] == only and "MFU %" in printed and Machine(**found["machine"]).link > 0
    others = [row for row in found["rows"] if row not in ours]
    less = "ours without norm"
    assert [row["who"] for row in others] == ["torch InterleavedZeroBubble", less, less, "torch DDP", less]
    assert all(row["ratio"] > 0 for row in others) and all(row["tokens"] > 0 and row["mfu"] is None for row in ours)
    for row in ours:
        assert row["traffic"] == row["traffic_counted"] > 0 or row["strategy"] == "experts"
        assert 0.7 < row["memory"] / row["memory_measured"] < 1.2 and close(row["off"], row["plan"] / row["ms"])
        assert ("bubble_measured" in row) == (row["strategy"] == "zb-h1") != ("communication" in row)


def test_bench_optimizers(tmp_path):
    found, _ = bench_rows(tmp_path, "optimizers", "--n-layer", "1", "--repeats", "1")
    assert [row["optimizer"] for row in found["rows"] if row["ms"] > 0] == ["adamw", "muon"]


def asked(flags):
    """What bench.py makes of its command line."""
    a = bench.parse(flags.split())
    bench.check(a, 1)
    return a


def test_a_gathering_left_out_repeats_the_own_part():
    own = torch.arange(6.0).view(3, 2)
    for whole in torch.zeros(6, 2), torch.zeros(3, 2, 2).transpose(0, 1):
        with without_collectives():
            dist.all_gather_into_tensor(whole, own, async_op=True).wait()
        assert torch.equal(whole.reshape(2, 3, 2), own.expand(2, 3, 2))


@on_ranks(2)
def test_a_peer_that_fails_on_one_rank_is_left_out_on_all(rank):
    assert strategies.tried(lambda: 1 / rank) == (None, "ZeroDivisionError: division by zero")
    assert strategies.tried(dist.get_rank) == (rank, None)


@on_cpus
@on_ranks(2)
def test_strategies_of_pytorch_take_the_worlds_group():
    """They leave no groups. Ranks draw equal weights."""
    device = torch.device("cpu")
    config, x = model.GPTConfig(68, 16, 2, 4, 48), torch.zeros(1, 2, 16, dtype=torch.int64)
    torch.manual_seed(torch_dist.get_rank())
    drawn = of_all_ranks(peers.random_source(config, device)("wpe.weight")[0, 0].item())
    assert drawn[0] == drawn[1]
    for name, flags in ("zero3", "--dp 2 --zero 3"), ("tp", "--tp 2"):
        peers.PEERS[name](config, parse(flags.split()), device, x, x, False)[0]()
    assert [*torch_dist.distributed_c10d._world.pg_map] == [torch_dist.group.WORLD]


def test_a_dense_twin_takes_as_many_flops():
    for routed in ExpertsConfig(experts=8, expert_every=2), ExpertsConfig(n_layer=6, experts=16, top_k=3):
        twin = dense_twin(routed)
        blocks = sum(map(routed.has_experts, range(routed.n_layer)))
        others = blocks * routed.n_embd * (routed.experts + routed.top_k - 1)  # routers, k - 1 biases
        assert twin.experts == 0 and twin.parameters() == routed.active_parameters() - others


@parametrize("device, fewer", [  # a lesson, a way, and how many times fewer bytes that moves
    ("cpu", {("precision", "bfloat16"): 2, ("flash-512", "flash"): 65 / 64, ("coalescing", "rows"): 8.5}),
    (KERNEL_DEVICE, {("fusion", "ours"): 7, ("elu", "ours"): 8.5 / 2})])
def test_bench_lessons(monkeypatch, tmp_path, request, device, fewer):
    """On a CPU all that needs no Triton."""
    on_triton = ("fusion", "ours") in fewer
    if on_triton:
        request.getfixturevalue("triton_kernels")
    else:
        monkeypatch.setattr(kernels, "INTERPRETED", False)
    path = tmp_path / "rows.json"
    output_of(bench.main, "lessons", "--quick", "--device", device, "--json", path)
    found = {(row["lesson"], row["way"]): row["fewer"] for row in json.loads(path.read_text())["rows"]}
    wanted = {name for name, lesson in gpu.LESSONS.items() if on_triton or not lesson.on_triton}
    assert {name for name, _ in found} == wanted and fewer.items() <= found.items()


@parametrize("bits, most", [(8, 127), (4, 7)])
@parametrize("rows, width, out", [(1, 64, 64), (8, 320, 70), (16, 192, 33)])
def test_weights_of_few_bits_are_off_by_half_a_step(bits, most, rows, width, out, triton_kernels):
    """At most, each of them; the product is as near that of these weights as 16 bits allow. 4 bits: two in a byte, and
    each 64 have a scale. (In fp16 on a CPU, because Triton's interpreter does not round to bf16.)"""
    dtype = torch.bfloat16 if GPUS else torch.float16
    w, x = (torch.randn(count, width, device=KERNEL_DEVICE, dtype=dtype) for count in (out, rows))
    w[-1] = 0
    q, scale = in_few_bits(w, bits)
    assert q.dtype == torch.int8 and q.shape == (out, width * bits // 8)
    scales = scale if bits == 8 else scale.repeat_interleave(64, 1)
    weights = floats_of(q, scale, bits)
    assert ((weights - w).abs() <= 0.501 * scales).all()
    assert (weights / scales)[:-1].abs().unflatten(1, (-1, width if bits == 8 else 64)).amax(2).round().eq(most).all()
    assert close(few_rows(x, q, scale), x.double() @ weights.double().T, 2**-8)


@parametrize("bits", [8, 4])
def test_a_cached_gpt_samples_with_few_bits(bits, triton_kernels):
    """As a GPT whose weights are those numbers, and reads fewer bytes."""
    config = model.GPTConfig(37, 16, 2, 2, 64)
    net, same = (kind(config, 3).to(KERNEL_DEVICE) for kind in (CachedGPT, model.GPT))
    for one, other in zip(net.parameters(), same.parameters()):
        one.data += torch.randn_like(one) * (one.dim() == 1)  # biases, too
        other.data = one.data
    some = with_bits(net, bits)
    for module, layer in zip(same.modules(), some.modules(), strict=True):
        if isinstance(layer, FewBits):
            module.weight = torch.nn.Parameter(floats_of(layer.weight, layer.scale, bits))
    tokens = torch.randint(37, (2, 12), device=KERNEL_DEVICE)
    for end in range(9, 13):
        logits = some.newest_logits(tokens[:, :end])
        assert close(logits, same(tokens[:, :end])[:, -1].double(), 1e-4)
        assert not close(logits, net(tokens[:, :end])[:, -1].double(), 1e-4)
    assert 32 / (bits + 1) < weights_read(net) / weights_read(some) < 32 / bits


H200 = MACHINES["h200"]
