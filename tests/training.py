"""train.py: losses, traces, profiles, data, bad input."""

import contextlib
import dataclasses
import io
import itertools
import json
import os
import pathlib
import re
import struct
import sys
import unittest.mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import safe.launch
import collectives as dist
import model
import parallel
import theory.speed
import train
from tests.models import damage
from tests.pool import GPUS, close
from tests.runs import TINY, log_of, Ranks, run_training
from further.schedules import zero_bubble_h1
from safe.data import load_data
from safe.files import read_safetensors
from safe.flags import BadInput, check_layout, Settings
from safe.huggingface import load, save
from safe.reports import phase_times


def plain_log(text):
    """What the test below must log, by a plain loop: (loss, gradient norm, learning rate) of each step, and validation
    losses."""
    tokens, steps, losses = np.fromfile(text, np.uint8), [], []
    net = model.GPT(model.GPTConfig(256, 16, 1, 2, 16)).double()
    s, parts = Settings(steps=10, lr=0.02, warmup_steps=3), np.split(tokens, [len(tokens) - len(tokens) // 10])
    opt = torch.optim.AdamW(
        [{"params": [p for p in net.parameters() if (p.dim() > 1) == matrix], "weight_decay": 0.1 * matrix}
         for matrix in (1, 0)], betas=(0.9, 0.95))

    def loss_of(part, step):
        x, y = train.batch(part, 0, step, 8, 16, slice(None))
        return F.cross_entropy(net(x).flatten(0, 1), y.flatten())

    for step in range(10):
        opt.zero_grad()
        loss, rate = loss_of(parts[0], step), train.learning_rate(s, step)
        loss.backward()
        steps.append((loss.item(), nn.utils.clip_grad_norm_(net.parameters(), 0.5).item(), rate))
        for group in opt.param_groups:
            group["lr"] = rate
        opt.step()
        if step in (4, 9):
            losses.append(sum(loss_of(parts[1], i).item() / 8 for i in range(8)))
    return steps, losses


def test_every_layout_logs_the_same_losses(pool, text, tmp_path, request):
    """10 steps in float64 with micro-batches, evaluation, sample and saved model; AdamW, clipping and schedule as users
    get them."""
    logs, device = {}, request.node.callspec.params["pool"]
    for dp, tp, zero, pp in ((1, 1, 0, 1), (1, 2, 0, 1), (2, 2, 0, 1), (2, 1, 1, 1), (2, 2, 2, 1), (2, 2, 3, 1),
                             (2, 1, 1, 2), (1, 1, 0, 3)):
        if device == "cuda" and dp * tp * pp > GPUS:
            continue
        out = str(tmp_path / f"dp{dp}tp{tp}zero{zero}pp{pp}")
        os.mkdir(out)
        pool(dp * tp * pp).run(run_training, TINY + [
            "--data", text, "--dtype", "fp64", "--steps", "10", "--dp", str(dp), "--tp", str(tp),
            "--micro-batches", "2", "--eval-every", "5", "--sample", "5", "--out", out, "--device", device,
            "--zero", str(zero), "--pp", str(pp), "--trace", out, "--schedule", "zb-h1" if pp == 2 else "1f1b",
            "--lr", "0.02", "--clip", "0.5", "--warmup-steps", "3"])
        logs[dp, tp, zero, pp] = log_of(out)
    one = logs.pop((1, 1, 0, 1))
    steps, losses = plain_log(text)
    assert close([(entry["loss"], entry["grad_norm"], entry["lr"]) for entry in one], steps)
    assert close([entry["val_loss"] for entry in one if "val_loss" in entry], losses)
    assert [entry["step"] for entry in one] == list(range(1, 11)) and one[-1]["loss"] < one[0]["loss"] - 0.5
    assert all({"step", "loss", "grad_norm", "lr", "tokens_per_s", "comm_bytes"} <= set(entry) for entry in one)
    assert one[0]["comm_bytes"] == 0 and max(entry["grad_norm"] for entry in one) > 0.5
    assert [entry["step"] for entry in one if "val_loss" in entry] == [5, 10]
    for layout, log in logs.items():
        assert len(log) == len(one)
        for a, b in zip(log, one):
            for key in {"loss", "grad_norm", "lr", "val_loss"} & set(b):
                assert abs(a[key] - b[key]) <= 1e-10 * abs(b[key]), (layout, a, b)
        assert all(entry["comm_bytes"] > 0 for entry in log)
        memory = next(entry for entry in log if "measured_bytes" in entry)
        for kind in ("parameters", "gradients", "optimizer"):
            predicted, measured = memory["predicted_bytes"][kind], memory["measured_bytes"][kind]
            assert abs(measured - predicted) <= 0.02 * predicted + 200, (layout, kind, memory)  # padding
        # ZeRO-2 and 3 have gradients on the wire beside; a stage with no block keeps next to nothing; a GPU's attention
        # in float64 keeps the probabilities.
        if layout[2] < 2 and layout[3] < 3 and device == "cpu":
            kept = memory["measured_bytes"]["activations"] / memory["predicted_bytes"]["activations"]
            assert 0.9 < kept < 1.1, (layout, memory)
        models = [load(tmp_path / name / "step-00000010")
                  for name in ("dp{}tp{}zero{}pp{}".format(*layout), "dp1tp1zero0pp1")]
        assert all(close(p.detach(), q.detach(), 1e-6) for p, q in zip(*(m.parameters() for m in models)))


def test_trace_holds_every_rank_s_actions(pool, text, tmp_path):
    out = str(tmp_path / "trace")
    pool(2).run(run_training,
                TINY + ["--data", text, "--steps", "3", "--pp", "2", "--micro-batches", "4", "--schedule", "zb-h1",
                        "--sample", "0", "--eval-every", "0", "--trace", out,
                        "--device", pool(2).device_type])
    events = [e for e in json.loads(pathlib.Path(out, "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    for rank, actions in enumerate(parallel.lower(zero_bubble_h1(2, 4))):
        mine = sorted((e for e in events if e["tid"] == rank), key=lambda e: e["ts"])
        assert [e["name"] for e in mine] == [f"{a.kind} stage {a.stage} micro-batch {a.micro_batch}" for a in actions]
        assert all(e["dur"] >= 0 for e in mine)
    span = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events}
    # Waiting for the stage before is no part of a span: 1 ms for clocks of two GPUs.
    for kind, first in (("F", 0), ("I", 1)):
        for i in range(4):
            there, here = (span[f"{kind} stage {stage} micro-batch {i}"] for stage in (first, 1 - first))
            assert here[0] > there[1] - 1e3


def ranges_of(path):
    """[(name, start, end)] of the ranges that `safe.reports.profiled` names, by their start, in us, without torch's."""
    events = json.loads(path.read_text())["traceEvents"]
    mine = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation"]
    return sorted((e for e in mine if not e[0].startswith(("Optimizer.", "gloo:", "nccl:"))), key=lambda e: e[1])


@pytest.mark.parametrize("layout,collective", [
    ("--dp 2", "all_reduce"), ("--dp 2 --zero 3 --ep 2 --experts 4", "all_to_all_single"),
    ("--pp 2 --schedule zb-h1 --trace OUT", "all_reduce"), ("--tp 2 --comm torch", "all_reduce")])
def test_profile_holds_every_rank_s_phases(pool, text, tmp_path, layout, collective):
    """Phases in the order of the step, actions and collectives inside of theirs; the losses of a run without."""
    logs = []
    for name, more in ("with", ["--profile", str(tmp_path / "profile")]), ("without", []):
        os.mkdir(tmp_path / name)
        pool(2).run(run_training,
                    TINY + ["--data", text, "--steps", "4", "--micro-batches", "2", "--dtype", "fp64", "--sample", "0",
                            "--eval-every", "0", "--out", str(tmp_path / name), "--device", pool(2).device_type,
                            "--cuda-graphs", "off"]  # what a graph sends is seen as its launch alone
                    + layout.replace("OUT", str(tmp_path)).split() + more)
        logs.append([(entry["step"], entry["loss"], entry["grad_norm"]) for entry in log_of(tmp_path / name)])
    assert logs[0] == logs[1] and len(logs[0]) == 4
    phases = ["batch", "zero_grad", "forward_backward", "clip", "all_finite", "step", "balance"]
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {"rank-0.json", "rank-1.json"}
    for rank in range(2):
        ranges = ranges_of(tmp_path / "profile" / f"rank-{rank}.json")
        assert all(end > start for _, start, end in ranges)
        mine = [e for e in ranges if e[0] in phases]
        assert [e[0] for e in mine] == phases[:None if "experts" in layout else -1]
        assert all(end <= start for (_, _, end), (_, start, _) in itertools.pairwise(mine))
        _, start, end = mine[2]
        inside = [name for name, a, b in ranges if start < a and b < end]
        lists = zero_bubble_h1(2, 2) if "--pp" in layout else parallel.one_f_one_b(1, 2)
        actions = parallel.lower(lists)[rank % len(lists)]
        assert [name for name in inside if " stage " in name] == [f"{a} stage {a.stage}" for a in actions]
        assert "finish_grad_sync" in inside and any(re.match(rf"{collective} [\d,]+ bytes$", n) for n in inside), inside
    if "--trace" in layout:
        assert len([e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]) > 8


def test_profile_of_a_gpu_counts_what_a_phase_launched():
    """Kernels run later than their launch, which may come from another thread; a graph's share one launch."""
    def event(cat, name, ts, dur, correlation=None):
        return {"cat": cat, "name": name, "ph": "X", "ts": ts, "dur": dur, "args": {"correlation": correlation}}

    events = [event("user_annotation", "step", 200, 50), event("user_annotation", "clip", 100, 50),
              event("user_annotation", "F0 stage 0", 0, 90), event("gpu_user_annotation", "step", 600, 99),
              event("cuda_runtime", "cudaLaunchKernel", 120, 5, 1), event("cuda_runtime", "cudaGraphLaunch", 210, 5, 2),
              event("cuda_driver", "cuLaunchKernel", 170, 5, 3), event("kernel", "a", 205, 1000, 1),
              event("kernel", "b", 600, 2000, 2), event("gpu_memcpy", "c", 700, 3000, 2),
              event("kernel", "launched between the two", 800, 9, 3),
              event("kernel", "whose launch came before the profile", 110, 9, 4), {"ph": "M", "name": "thread_name"}]
    assert phase_times(events, ["clip", "step"]) == [("clip", 0.05, 1.0), ("step", 0.05, 5.0)]


def test_library_collectives_log_the_same_losses(pool, text, tmp_path):
    losses = []
    for comm in ("ours", "ring", "torch"):
        out = str(tmp_path / comm)
        os.mkdir(out)
        pool(2).run(run_training,
                    TINY + ["--data", text, "--dtype", "fp64", "--steps", "3", "--tp", "2", "--sample", "0",
                            "--eval-every", "0", "--comm", comm, "--out", out])
        losses.append([entry["loss"] for entry in log_of(out)])
    assert all(max(same) - min(same) < 1e-10 for same in zip(*losses))


def test_plain_logs_the_same_losses(text, tmp_path):
    """`--plain` logs the whole program's losses, knows no flag of safe/'s, and its checkpoints fit another
    layout."""
    flags = TINY + ["--data", text, "--dtype", "fp64", "--device", "cpu", "--eval-every", "0", "--sample", "4",
                    "--save-every", "2", "--n-layer", "2", "--experts", "4", "--expert-every", "2"]
    runs = [(["--dp", "2", "--ep", "2", "--steps", "4"], "whole", 0),
            (["--plain", "--dp", "2", "--ep", "2", "--steps", "4"], "plain", 0),
            (["--plain", "--zero", "3", "--steps", "4", "--resume", str(tmp_path / "plain" / "step-00000002.pt")],
             "again", 0),
            (["--plain", "--keep", "2"], "none", 2)]
    for more, out, code in runs:
        ranks = Ranks([*flags, *more, "--out", str(tmp_path / out)], 2, tmp_path / f"{out}.txt")
        assert ranks.end() == [code, code], ranks.printed()
    assert "unrecognized arguments: --keep" in ranks.printed()
    assert sorted(os.listdir(tmp_path / "plain")) == ["log.jsonl", "step-00000002.pt", "step-00000004.pt"]
    whole, plain, again = ([(e["step"], e["loss"], e["grad_norm"]) for e in log_of(tmp_path / out)]
                           for out in ("whole", "plain", "again"))
    assert close(plain, whole) and close(again, whole[2:])
    plain, again = (torch.load(tmp_path / out / "step-00000004.pt")["tensors"] for out in ("plain", "again"))
    whole = read_safetensors(tmp_path / "whole" / "step-00000004" / "model.safetensors")
    for tensors in (plain, again):  # a choice of experts that turned out otherwise would move a bias
        assert tensors["h.1.mlp.router.bias"].equal(whole["transformer.h.1.mlp.router.bias"].float())
        assert close(tensors["h.1.mlp.experts.c_fc.weight"][3],
                     whole["transformer.h.1.mlp.experts.3.c_fc.weight"].t(), 1e-8)
    assert "--- sample, 4 tokens" in (tmp_path / "plain.txt").read_text()


def test_init_from_starts_where_the_folder_ends(pool, text, tmp_path):
    save(model.GPT(model.GPTConfig(256, 16, 1, 2, 16), seed=7), tmp_path / "hf")
    os.mkdir(tmp_path / "out")
    pool(2).run(run_training,
                ["--init-from", str(tmp_path / "hf"), "--data", text, "--dtype", "fp64", "--steps", "1", "--tp", "2",
                 "--batch-size", "4", "--sample", "0", "--lr", "0", "--min-lr", "0", "--out", str(tmp_path / "out")])
    before, after = load(tmp_path / "hf"), load(tmp_path / "out" / "step-00000001")
    assert all(p.equal(q) for p, q in zip(before.parameters(), after.parameters()))
    tokens = np.fromfile(text, np.uint8)
    x, y = train.batch(tokens[:len(tokens) - len(tokens) // 10], 0, 0, 4, 16, slice(None))
    with torch.device("cpu"):
        want = F.cross_entropy(before.double()(x).flatten(0, 1), y.flatten()).item()
    assert abs(log_of(tmp_path / "out")[0]["loss"] - want) < 1e-10


def test_batches_depend_on_seed_step_and_sample_alone():
    tokens = np.arange(1000, dtype=np.uint16)
    whole = train.batch(tokens, 1, 2, 8, 16, slice(None))
    part = train.batch(tokens, 1, 2, 8, 16, slice(3, 5))
    assert (whole[0][3:5].equal(part[0]) and whole[0][:, 1:].equal(whole[1][:, :-1])
            and (whole[1] - whole[0]).unique().tolist() == [1])
    for seed, step in (1, 3), (2, 2):
        assert not train.batch(tokens, seed, step, 8, 16, slice(None))[0].equal(whole[0])


def test_learning_rate_schedule():
    s = Settings(steps=100, warmup_steps=10, lr=1.0, min_lr=0.1)
    rates = [train.learning_rate(s, step) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and rates[99] == 0.1
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


def test_mfu_is_of_known_gpus_alone(monkeypatch):
    for name, tflops in {"NVIDIA H200": 989, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA L40S": 362, "NVIDIA L4": 121,
                         "NVIDIA GeForce RTX 4090": 165,
                         "NVIDIA L40": None, "NVIDIA H20": None, "AMD Instinct MI300X": None}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert theory.speed.peak_flops(torch.device("cuda")) == (tflops and 1e12 * tflops), name
    assert theory.speed.peak_flops(torch.device("cpu")) is None


def training_at_a_known_peak(flags):
    with unittest.mock.patch.object(theory.speed, "peak_flops", lambda device: 1e12), \
            contextlib.redirect_stdout(io.StringIO()) as out:
        run_training(flags)
    return out.getvalue()


@pytest.mark.parametrize("tokens, long", [("64", False), ("65", True)])
def test_train_says_when_mfu_counts_half_of_attention(pool, text, tmp_path, tokens, long):
    printed, = pool(1).run(training_at_a_known_peak, TINY + ["--data", text, "--steps", "2", "--seq-len", tokens,
                                                             "--out", str(tmp_path)])
    config = model.GPTConfig(256, int(tokens), 1, 2, 16)
    assert "  MFU " in printed and (theory.speed.HALF_COUNTED in printed) == long == config.long_sequences
    for entry in log_of(tmp_path):
        assert "mfu" not in entry or close(entry["mfu"], entry["tokens_per_s"] * config.flops_per_token() / 1e12)
    assert config.flops_per_token() == 6 * (config.parameters() - 16 * int(tokens)) + (12 - 6 * long) * 16 * int(tokens)


def test_token_files(tmp_path):
    tokens = (np.arange(5000) * 7 % 300).astype(np.uint16)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(tokens)
    tokens.tofile(tmp_path / "nano.bin")
    (tmp_path / "llmc.bin").write_bytes(header.tobytes() + tokens.tobytes())
    for name in ("nano.bin", "llmc.bin"):
        a, b, is_bytes = load_data(Settings(data=str(tmp_path / name)))
        assert np.concatenate([a, b]).tolist() == tokens.tolist() and len(b) == 500 and not is_bytes
    os.mkdir(tmp_path / "folder")
    (tmp_path / "folder" / "b.txt").write_text("second")
    (tmp_path / "folder" / "a.md").write_text("first")
    (tmp_path / "folder" / "c.png").write_bytes(b"\0\1\2")
    a, b, is_bytes = load_data(Settings(data=str(tmp_path / "folder")))
    assert bytes(a) + bytes(b) == b"first\nsecond" and is_bytes
    os.mkdir(tmp_path / "folder" / "run")
    (tmp_path / "folder" / "run" / "log.jsonl").write_text("{}")  # what a run writes beside its data is not its data
    for out, resume, some in (("run", "", b"first\nsecond"), ("", "run", b"first\nsecond"),
                              ("", "run/step-00000001", b"first\nsecond"),
                              ("", "", b"first\nsecond\n{}"), (".", "", b"first\nsecond\n{}"),
                              ("..", "", b"first\nsecond\n{}")):
        out, resume = (str(tmp_path / "folder" / path) if path else "" for path in (out, resume))
        a, b, is_bytes = load_data(Settings(data=str(tmp_path / "folder"), out=out, resume=resume))
        assert bytes(a) + bytes(b) == some, (out, resume)


BAD = [  # flags, and what the one line must name
    (["--model", "gpt5"], "--model"), (["--steps", "many"], "--steps"), (["--steps", "-1"], "--steps -1"),
    (["--bogus", "1"], "--bogus"),
    (["--lr", "nan"], "--lr nan"), (["--lr", "-1"], "--lr -1"), (["--clip", "inf"], "--clip inf"),
    (["--min-lr", "1"], "--min-lr 1"),
    (["--batch-size", "0"], "--batch-size 0"), (["--micro-batches", "3"], "--micro-batches 3"),
    (["--seed", "-3"], "--seed"),
    (["--dp", "0"], "--dp 0"), (["--dp", "3"], "--batch-size 18"), (["--tp", "3"], "--tp 1"), (["--tp", "8"], "--tp 4"),
    (["--n-head", "3"], "--n-embd 129"), (["--seq-len", "0"], "--seq-len"), (["--vocab-size", "100"], "--vocab-size"),
    (["--data", "/no/such/file"], "/no/such/file"), (["--data", "EMPTY"], "empty"), (["--data", "SHORT"], "--seq-len"),
    (["--data", "EMPTY_BIN", "--vocab-size", "9"], "empty"), (["--data", "ODD_BIN"], "odd.bin"),
    (["--data", "CUT_BIN"], "cut.bin"),
    (["--data", "BIG_BIN"], "--vocab-size 60001"), (["--device", "tpu"], "--device"), (["--pp", "7"], "--pp 6"),
    (["--pp", "2", "--schedule", "zigzag"], "--schedule"),
    (["--pp", "2", "--virtual-stages", "2"], "--schedule interleaved"),
    (["--pp", "2", "--virtual-stages", "2", "--schedule", "interleaved"], "--micro-batches 2"),
    (["--trace", "FILE"], "--trace"), (["--profile", "FILE"], "--profile"),
    (["--cuda-graphs", "on", "--device", "cpu"], "--cuda-graphs on"), (["--virtual-stages", "0"], "--virtual-stages 0"),
    (["--comm", "mpi"], "--comm"),
    (["--init-from", "/no/such/folder"], "--init-from"), (["--init-from", "HF", "--n-layer", "3"], "--n-layer 3"),
    (["--init-from", "BAD_HF"], "config.json"), (["--out", "FILE"], "--out"), (["--out", "OLD_RUN"], "--out"),
    (["--data", "ASCII", "--vocab-size", "123", "--prompt", "é"], "--prompt"), (["--dtype", "int8"], "--dtype"),
    (["--warmup-steps", "-1"], "--warmup-steps"), (["--zero", "4"], "--zero"), (["--recompute", "all"], "--recompute"),
    (["--resume"], "--out DIR"), (["--resume", "/no/such/run"], "--resume /no/such/run"),
    (["--resume", "--out", "HF"], "no complete checkpoint"),
    (["--resume", "HF"], "leave --resume out"), (["--save-every", "-1"], "--save-every -1"),
    (["--keep", "-1"], "--keep -1"),
    (["--keep", "two"], "--keep"), (["--timeout", "0"], "--timeout 0"), (["--on-nan", "pray"], "--on-nan"),
    (["--out", "READ_ONLY"], "--out"),
    (["--dp", "8", "--zero", "2", "--zero-within", "6"], "--zero-within 6 does not divide --dp 8: give --zero-"),
    (["--dp", "2", "--zero-within", "2"], "give --zero 1, 2 or 3"),
    (["--sp"], "--sp cuts tokens over --tp: give --tp 2"),
    (["--sp", "--tp", "4", "--seq-len", "66"], "sequences of 66 tokens cannot be cut into 4 parts: give --seq-len 68"),
    (["--cp", "4", "--seq-len", "20"], "--cp 4: sequences of 20 tokens cannot be cut into 8 parts: give --seq-len 24"),
    (["--cp", "2", "--tp", "2", "--sp", "--seq-len", "6"], "cannot be cut into 4 parts: give --seq-len 8"),
    (["--cp", "3", "--cp-kind", "ulysses", "--seq-len", "12"], "does not divide the 4 heads of a rank: give --cp 1 or"),
    (["--cp", "0"], "--cp"), (["--cp-kind", "star"], "--cp-kind"),
    (["--ep", "0"], "--ep 0"), (["--dp", "2", "--ep", "2"], "give --experts 4, say, or leave --ep out"),
    (["--ep", "2", "--experts", "4"], "--ep 2 does not divide --dp 1: give --ep 1 or --dp 2"),
    (["--dp", "6", "--ep", "4", "--experts", "3"], "--ep 4 does not divide --dp 6: give --ep 1"),
    (["--dp", "4", "--ep", "4", "--experts", "6"], "--ep 4 does not divide the 6 experts: give --ep 2"),
    (["--experts", "4", "--top-k", "5"], "less than the 5 that a token goes through: give --top-k 4 or --experts 5"),
    (["--experts", "1"], "give --top-k 1 or --experts 4"), (["--top-k", "1"], "--top-k is for a model with experts"),
    (["--expert-every", "2"], "--expert-every is for a model with experts: give --experts 4"),
    (["--experts", "4", "--expert-every", "5"], "give --expert-every 4"), (["--experts", "-1"], "--experts -1"),
    (["--balance-rate", "nan"], "--balance-rate nan"),
    (["--init-from", "HF", "--experts", "4"], "--experts 4: the model in --init-from has 0; leave the flag out"),
    (["--init-from", "HF", "--top-k", "2"], "--top-k 2: the model in --init-from has no experts; leave the flag out"),
    (["--init-from", "HF", "--dp", "2", "--ep", "2"], "the model has none: leave --ep out"),
    (["--init-from", "EXPERTS", "--top-k", "1"], "--top-k 1: the model in --init-from has 2; leave the flag out"),
    (["--init-from", "BAD_EXPERTS"], "config.json: model_type 'gpt2' with num_experts 2"),
    (["--cuda-graphs", "on", "--experts", "4"], "and no --experts: leave it out"),
    (["--dtype", "fp64", "--reduce-dtype", "bf16"], "--reduce-dtype bf16"), (["--batch-size", "1e3"], "--batch-size"),
    (["--sample", "-5"], "--sample"),
    (["--data", "ASCII", "--vocab-size", "123", "--prompt", os.fsdecode(b"\xff")], "--prompt"),
    (["--out", "NO_LOCK"], "--out")]


@pytest.fixture(scope="session")
def bad_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    files = {"EMPTY": ("empty.txt", b""), "SHORT": ("short.txt", b"x" * 500), "EMPTY_BIN": ("empty.bin", b""),
             "ODD_BIN": ("odd.bin", b"123"), "FILE": ("file", b""), "ASCII": ("ascii.txt", b"plain text\n" * 1000),
             "CUT_BIN": ("cut.bin", struct.pack("<256i", 20240520, 1, 1000, *[0] * 253) + b"12"),
             "BIG_BIN": ("big.bin", np.full(5000, 60000, np.uint16).tobytes())}
    for name, data in files.values():
        (folder / name).write_bytes(data)
    paths = {key: str(folder / name) for key, (name, _) in files.items()}
    save(model.GPT(model.GPTConfig(256, 16, 1, 2, 16)), folder / "hf")
    save(model.GPT(model.GPTConfig(256, 16, 1, 2, 16)), folder / "bad_hf")
    (folder / "bad_hf" / "config.json").write_text("{}")
    for name in ("experts", "bad_experts"):
        save(model.GPT(model.GPTConfig(256, 16, 1, 2, 16, experts=2)), folder / name)
        paths[name.upper()] = str(folder / name)
    damage(folder / "bad_experts", "experts of a GPT-2")
    os.makedirs(folder / "no-lock" / ".lock")
    os.mkdir(folder / "old")
    (folder / "old" / "log.jsonl").write_text("")
    os.mkdir(folder / "read-only", 0o555)
    paths["READ_ONLY"] = str(folder / "read-only") if os.geteuid() else "/proc/run"  # root may write anywhere, almost
    return {**paths, "HF": str(folder / "hf"), "BAD_HF": str(folder / "bad_hf"), "OLD_RUN": str(folder / "old"),
            "NO_LOCK": str(folder / "no-lock")}


@pytest.mark.parametrize("flags,names", BAD, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_bad_input_is_one_line_and_exit_code_2(flags, names, bad_files, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py"] + ["--data", bad_files["ASCII"]] * ("--data" not in flags)
                        + [bad_files.get(f, f) for f in flags])
    monkeypatch.setattr(safe.launch, "start_again", lambda n: pytest.fail("processes were started"))
    monkeypatch.setattr(dist, "initialize", lambda *a: pytest.fail("a process group was started"))
    with pytest.raises(SystemExit) as exit:
        train.main()
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and err.count("\n") == 1 and names in err and not out, err


def test_more_processes_than_gpus(monkeypatch):
    """--device auto takes CUDA where each process on this machine gets a GPU of its own; --device cuda means it."""
    def layout(processes, world=1, local_world=1, **more):
        s = Settings(dp=processes // 2, tp=2, batch_size=24, **more)
        assert check_layout(s, model.PRESETS["tiny"], world, local_world) == processes
        return s.device, s.cuda_graphs

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for gpus in (0, 1, 2, 4, 8):
        for processes in (2, 4, 8):
            want = ("cuda", "on") if processes <= gpus else ("cpu", "off")
            # Before and after it starts itself again.
            assert layout(processes) == layout(processes, processes, processes) == want
            assert layout(processes, device="cpu") == ("cpu", "off")
            if processes > gpus:
                with pytest.raises(BadInput, match=f"{processes} processes on this machine need as many GPUs and "
                                   f"it has {gpus}: give --device cpu"):
                    layout(processes, device="cuda")
        s = Settings()
        assert check_layout(s, model.PRESETS["tiny"], 1, 1) == 1 and s.device == ("cuda" if gpus else "cpu")
    s, experts = Settings(dp=8, ep=2), dataclasses.replace(model.PRESETS["tiny"], experts=4)
    assert check_layout(s, experts, 8, 8) == 8 and (s.device, s.cuda_graphs) == ("cuda", "off")
    with pytest.raises(BadInput, match="--cuda-graphs on is for --device cuda, --zero 0 or 1 .*no --experts"):
        check_layout(Settings(dp=8, ep=2, cuda_graphs="on"), experts, 8, 8)
    for zero, pp, schedule in itertools.product(range(4), (1, 2), ("1f1b", "gpipe")):
        s = Settings(dp=8 // pp, pp=pp, zero=zero, schedule=schedule)
        check_layout(s, model.PRESETS["tiny"], 8, 8)
        assert s.cuda_graphs == ("on" if zero < 2 or (pp, schedule) == (1, "1f1b") else "off")
    gpus = 2
    with pytest.raises(BadInput, match="--device auto: 4 processes on this node need as many GPUs and it has 2: "
                       "give --device cpu"):
        layout(8, 8, 4)  # the other node might choose otherwise
    with pytest.raises(BadInput, match="needs 6 processes, 4 were started: give --dp 2"):
        check_layout(Settings(dp=3, tp=2), model.PRESETS["tiny"], 4, 4)
    assert check_layout(Settings(tp=2), model.PRESETS["tiny"], 16, 2) == 16  # eight nodes of two
    with pytest.raises(BadInput,
                       match="--tp 4 would reach over the edge of a node with 2 processes.*give --tp 2"):
        check_layout(Settings(tp=4), model.PRESETS["tiny"], 16, 2)
