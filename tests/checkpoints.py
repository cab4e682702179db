"""Checkpoints survive crashes, kills, full disks, and are refused when damaged."""

import errno
import fcntl
import json
import math
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import sys
import time
import types

import numpy as np
import pytest
import torch

import collectives as dist
import parallel
import train
from tests.models import Malice
from tests.pool import close
from tests.runs import (
    command, end_of, log_of, processes_with, Ranks, run_training, slow, TINY, TORCHRUN, TRAIN)
from fast.run import FastRun
from safe.checkpoints import checkpoints, crc_of, differences, open_checkpoint
from safe.files import crc_of_file, read_safetensors, write_safetensors
from safe.flags import Settings
from safe.folder import Log
from safe.huggingface import load
from safe.reports import write_profile, write_trace
from safe.run import NotFinite


SAME = [(1, []), (2, ["--zero", "1", "--dtype", "bf16"]), (4, ["--tp", "2", "--zero", "2", "--dtype", "fp16"]),
        (4, ["--zero", "3"]),
        (4, ["--pp", "2", "--tp", "2", "--micro-batches", "2", "--schedule", "zb-h1"]),
        (2, ["--zero", "3", "--dtype", "bf16"]), (2, ["--dtype", "bf16"]), (2, ["--tp", "2", "--vocab-size", "259"])]


@pytest.mark.parametrize("size,flags", SAME, ids=lambda x: " ".join(x) if isinstance(x, list) else str(x))
def test_resumed_run_is_the_same_to_the_bit(pool, text, tmp_path, size, flags):
    """The newest checkpoint is lost, the same command goes on from the one before: same losses, same files, bit for
    bit."""
    flags = TRAIN + ["--data", text, "--steps", "4", "--save-every", "2", "--lr", "0.01", "--clip", "0.5", "--out",
                     str(tmp_path), *flags]
    flags[flags.index("--device") + 1] = pool(size).device_type
    pool(size).run(run_training, flags)
    want = end_of(tmp_path)
    assert [step for step, _ in want[1]] == [1, 2, 3, 4] and want[0] == 4
    shutil.rmtree(tmp_path / "step-00000004")
    pool(size).run(run_training, flags)
    assert end_of(tmp_path) == want


def test_checkpoint_fits_every_layout(pool, text, tmp_path):
    """A run moves: dp 2 x tp 2 with sp, pipeline with ZeRO-1, one process, ZeRO-3 within 2, from the middle of one to
    the middle of the next."""
    device = pool(4).device_type
    flags = TRAIN + ["--data", text, "--steps", "7", "--save-every", "1", "--keep", "0", "--lr", "0.01", "--clip",
                     "0.5", "--dtype", "fp64", "--device", device]
    pool(1).run(run_training, flags + ["--out", str(tmp_path / "whole")])
    moves = [(4, ["--tp", "2", "--sp"], 1), (2, ["--cp", "2"], 2),
             (4, ["--pp", "2", "--zero", "1", "--micro-batches", "2"], 3), (1, [], 4),
             (4, ["--zero", "3", "--zero-within", "2"], 5), (3, ["--pp", "3"], 6), (2, ["--zero", "2", "--tp", "1"], 7)]
    out = str(tmp_path / "moved")
    for size, layout, stop in moves:
        assert pool(size).run(run_training, flags + layout + ["--out", out]) == [True] * size
        log = log_of(out)
        assert [entry["step"] for entry in log] == list(range(1, 8))
        for a, b in zip(log, log_of(tmp_path / "whole")):
            assert all(abs(a[key] - b[key]) <= 1e-10 * abs(b[key])
                       for key in ("loss", "grad_norm", "lr")), (layout, a, b)
        for step in range(stop + 1, 8):  # the next layout goes on from the middle
            shutil.rmtree(os.path.join(out, f"step-{step:08}"))
    for file in ("model", "optimizer"):
        want, got = (read_safetensors(f"{folder}/step-00000007/{file}.safetensors")
                     for folder in (tmp_path / "whole", out))
        assert (want.keys() == got.keys()
                and all(t.dtype == torch.float64 and close(got[name], t) for name, t in want.items()))


def test_checkpoint_of_experts_fits_every_layout(pool, text, tmp_path):
    """To the bit in the layout that wrote it, also with evaluation after each step, or recomputation. In others losses
    differ by rounding, and a router's biases, which move by whole steps, not at all."""
    flags = TRAIN + ["--data", text, "--steps", "4", "--save-every", "2", "--lr", "0.01", "--clip", "0.5", "--dtype",
                     "fp64", "--n-layer", "2", "--experts", "4", "--device", pool(2).device_type]

    def biases(out):
        tensors = read_safetensors(f"{out}/step-00000004/model.safetensors")
        return {name: tensor for name, tensor in tensors.items() if name.endswith("router.bias")}

    whole, shared = str(tmp_path / "whole"), ["--dp", "2", "--ep", "2"]
    pool(2).run(run_training, flags + shared + ["--out", whole])
    want, same = end_of(whole), [["--eval-every", "1"], ["--recompute", "block"]]
    assert [step for step, _ in want[1]] == [1, 2, 3, 4] and len(biases(whole)) == 2
    assert all(b.any() and b.equal(b.float().double()) for b in biases(whole).values())
    for more in same:
        out = str(tmp_path / more[0])
        pool(2).run(run_training, flags + shared + more + ["--out", out])
        assert end_of(out) == want, more
    for size, layout in [(2, shared), (1, []), (2, ["--dp", "2"]), (2, ["--tp", "2"]), (2, ["--pp", "2"]),
                         (2, [*shared, "--zero", "3"])]:
        out = str(tmp_path / " ".join(["resumed", *layout]))
        shutil.copytree(whole, out)
        shutil.rmtree(f"{out}/step-00000004")
        pool(size).run(run_training, flags + layout + ["--out", out])
        got = end_of(out)
        assert layout != shared or got == want
        assert [step for step, _ in got[1]] == [1, 2, 3, 4] and got[1][:2] == want[1][:2]
        assert all(abs(a - b) <= 1e-10 * b for (_, a), (_, b) in zip(got[1], want[1])), (layout, got, want)
        assert all(b.equal(biases(whole)[name]) for name, b in biases(out).items()), layout


def test_manifests_of_older_runs_had_no_experts_and_no_folder_to_start_from():
    older = {"model": {"n_layer": 2}, "flags": {}, "start": {}, "data": {}}
    dense = {"model": {"n_layer": 2, "experts": 0, "top_k": 2, "expert_every": 1}, "flags": {"balance_rate": 1e-3},
             "start": {"init_from": ""}, "data": {}}
    assert differences(older, dense) == []
    routed = {**dense, "model": dense["model"] | {"experts": 4}, "start": {"init_from": "/x"}}
    assert differences(older, routed) == ["--experts none there, 4 here", "--init-from none there, /x here"]


def test_checkpoints_cross_the_modes(text, tmp_path, capfd):
    """The whole program goes on from a checkpoint of --plain, with its losses; --plain refuses one of the whole
    program's in one line."""
    flags = [*TRAIN, "--data", text, "--dtype", "fp64", "--n-layer", "2", "--steps", "4", "--save-every", "2"]

    def run(code, *more, size=2):
        ranks = Ranks([*flags, *more], size, tmp_path / "printed")
        assert ranks.end() == [code] * size, ranks.printed()
        return ranks.printed()

    run(0, "--plain", "--zero", "1", "--out", str(tmp_path / "plain"))
    want = [(entry["step"], entry["loss"]) for entry in log_of(tmp_path / "plain")]
    (tmp_path / "plain" / "step-00000004.pt").unlink()
    said = run(2, "--out", str(tmp_path / "plain"), "--lr", "0.5")
    assert "holds another run (--lr 0.002 there, 0.5 here)" in said
    printed = run(0, "--tp", "2", "--out", str(tmp_path / "plain"))  # as the same command goes on
    assert "step-00000002.pt: after step 2" in printed and os.path.isdir(tmp_path / "plain" / "step-00000004")
    got = [(entry["step"], entry["loss"]) for entry in log_of(tmp_path / "plain") if "loss" in entry]
    assert [step for step, _ in got] == [1, 2, 3, 4] and close(got, want)
    file = str(tmp_path / "plain" / "step-00000002.pt")
    assert "--- sample, 3 tokens" in run(0, "--resume", file, "--steps", "0", "--sample", "3", size=1)
    for wrong in str(tmp_path / "plain" / "step-00000004"), str(tmp_path / "none"):
        said = run(2, "--plain", "--dp", "2", "--resume", wrong).splitlines()
        why = (f"train.py: --resume {wrong}: no file step-*.pt, as --plain writes it; leave --plain out to go on from "
               "others")
        assert set(said) == {why}
    with open(file, "r+b") as opened:
        opened.truncate(os.path.getsize(file) // 2)
    said = run(2, "--resume", file, size=1)
    assert f"--resume {file}: " in said and "give a whole file that --plain has written" in said and "Trace" not in said


def test_resume_takes_settings_along_and_says_what_changes(text, tmp_path):
    flags = TRAIN + ["--data", text, "--steps", "3", "--seed", "5", "--save-every", "2", "--out", str(tmp_path / "run")]
    assert Ranks(flags, 1, tmp_path / "log").end() == [0]
    longer = Ranks(["--resume", "--out", str(tmp_path / "run"), "--steps", "5", "--lr", "0.005", "--device", "cpu",
                    "--log-every", "1", "--sample", "6", "--prompt", "line"], 1, tmp_path / "log")
    assert longer.end() == [0]
    assert ("step-00000003: after step 3, --steps 3 there, 5 here, --lr 0.002 there, 0.005 here"
            in longer.printed()), longer.printed()
    assert [entry["step"] for entry in log_of(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert open_checkpoint(tmp_path / "run" / "step-00000005", True).manifest["run"]["flags"]["seed"] == 5
    files = sorted(os.listdir(tmp_path / "run"))
    sample = Ranks(["--sample", "6", "--steps", "0", "--resume", str(tmp_path / "run"), "--prompt", "line", "--device",
                    "cpu"], 1, tmp_path / "log")
    assert sample.end() == [0]
    assert sample.printed().split("---")[-2] == longer.printed().split("---")[-2]  # the same six bytes after "line"
    assert files == sorted(os.listdir(tmp_path / "run")) == [".lock", "log.jsonl", "run.json", "step-00000003",
                                                             "step-00000005"]


def test_transformers_reads_a_checkpoint(pool, text, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pool(2).run(run_training, TRAIN + ["--data", text, "--steps", "2", "--tp", "2", "--out", str(tmp_path)])
    hf = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "step-00000002").eval()
    ours, tokens = load(tmp_path / "step-00000002"), torch.arange(32).view(2, 16)
    with torch.no_grad():
        assert (hf(tokens).logits - ours(tokens)).abs().max() < 1e-5


def test_killed_at_each_point_of_a_write(text, tmp_path):
    """The same run, killed again and again, each time a little later in the writing of its first or second
    checkpoint."""
    flags = TRAIN + ["--data", text, "--steps", "16", "--save-every", "2", "--keep", "1"]
    assert Ranks(flags + ["--out", str(tmp_path / "whole")], 1, tmp_path / "log").end() == [0]
    out, half, last = str(tmp_path / "run"), 0, 0
    # 5 is the log, 15 the checkpoint's name, 17 the older one's, which then goes.
    for nth in (1, 6, 8, 11, 13, 15, 16, 17, 18, 20, 21, 22):
        assert Ranks(flags + ["--out", out], 1, tmp_path / "log", deaths=(nth, nth % 2)).end() == [-9]
        found = [open_checkpoint(path, True).manifest["step"] for path in checkpoints(out)]
        assert max(found, default=0) >= last  # never less than before
        last = max(found, default=0)
        for name in os.listdir(out):
            if name.startswith(".step") and nth < 22:  # or removing it would count
                half += 1
                shutil.rmtree(os.path.join(out, name))
    assert half >= 6 and 4 <= last < 16
    assert Ranks(flags + ["--out", out], 1, tmp_path / "log").end() == [0]
    assert end_of(out) == end_of(tmp_path / "whole") and not any(name.startswith(".step") for name in os.listdir(out))


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=slow)])
def test_killed_runs_lose_nothing(text, tmp_path, kills):
    """SIGKILL at any moment, writes included, to one rank or all: what is under a checkpoint's name is whole, and the
    same command ends with the loss, and the files, of the run that nobody killed."""
    flags = TRAIN + ["--data", text, "--steps", "30", "--save-every", "1", "--timeout", "120", "--dp", "2", "--zero",
                     "1"]
    assert Ranks(flags + ["--out", str(tmp_path / "whole")], 2, tmp_path / "log").end() == [0, 0]
    want, rng, killed, unfinished = end_of(tmp_path / "whole"), np.random.default_rng(kills), 0, 0

    def newest(out):
        return max([0] + [int(path[-8:]) for path in checkpoints(out)])

    while killed < kills:
        out = str(tmp_path / f"run{killed}")
        for _ in range(min(5, kills - killed)):  # so many times the same run, then it is let through
            ranks = Ranks(flags + ["--out", out], 2, tmp_path / "log")
            step = rng.integers(newest(out), 30) if rng.random() < 0.8 else 0  # in training, or while they start
            while newest(out) < step and ranks.processes[0].is_alive():
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.05 if step else 2))
            victims = [0, 1] if rng.random() < 0.3 else [int(rng.integers(2))]
            for rank, process in enumerate(ranks.processes):
                process.kill() if rank in victims else process.terminate()  # as torchrun does with the others
            if -9 not in ranks.end():
                break  # it was faster
            killed += 1
            unfinished += any(name.startswith(".step") for name in os.listdir(out)) if os.path.exists(out) else 0
            for path in checkpoints(out):
                open_checkpoint(path, True)
        last = Ranks(flags + ["--out", out], 2, tmp_path / "log")
        assert last.end() == [0, 0], last.printed()
        assert end_of(out) == want
        assert not any(name.startswith(".step") for name in os.listdir(out))
    if kills >= 100:
        assert unfinished  # some of them were caught writing
    print(f"{killed} runs killed, {unfinished} of them while they wrote; none lost anything")


def test_killed_or_stalled_rank_is_named_by_the_others(text, tmp_path):
    """At once, or within the timeout, in which the other run has its turn."""
    flags = TRAIN + ["--data", text, "--steps", "1000000"]
    stalled = Ranks(flags + ["--tp", "2", "--pp", "2", "--timeout", "6"], 4, tmp_path / "stalled")
    try:
        stalled.wait_for("step      20/")
        stalled.kill(1, signal.SIGSTOP)
        started = time.time()
        killed = Ranks(flags + ["--dp", "3", "--batch-size", "9", "--timeout", "60"], 3, tmp_path / "killed")
        killed.wait_for("step      20/")
        killed.kill(2)
        assert killed.end(20) == [1, 1, -9]
        assert stalled.end(30, [0, 2, 3]) == [1, 1, 1] and time.time() - started > 4.5
    finally:
        stalled.processes[1].kill()  # or pytest would wait for it in the end
    lines = [line for line in killed.printed().splitlines() if line.startswith("train.py: ")]
    assert len(lines) == 2 and any("rank 2 gives no sign of life since step" in line for line in lines), lines
    assert (all(re.match(r"train.py: rank [01]: step \d+, \w.*", line) for line in lines)
            and "Traceback" not in killed.printed())
    lines = [line for line in stalled.printed().splitlines() if line.startswith("train.py: ")]
    assert (len(lines) == 3
            and all("rank 1 gives no sign of life since step" in line for line in lines)), stalled.printed()


def test_sigterm_saves_and_the_run_goes_on(text, tmp_path):
    flags = TRAIN + ["--data", text, "--steps", "100", "--save-every", "0", "--dp", "2"]
    assert Ranks(flags + ["--out", str(tmp_path / "whole")], 2, tmp_path / "log").end() == [0, 0]
    ranks = Ranks(flags + ["--out", str(tmp_path / "run")], 2, tmp_path / "log")
    ranks.wait_for("step  20/100")
    ranks.kill(1, signal.SIGTERM)  # one of them is enough
    assert ranks.end() == [0, 0] and "SIGTERM: the same command goes on from here" in ranks.printed()
    step = end_of(tmp_path / "run")[0]
    assert 20 <= step < 100 and max(entry["step"] for entry in log_of(tmp_path / "run")) == step
    again = Ranks(flags + ["--out", str(tmp_path / "run")], 2, tmp_path / "log")
    assert again.end() == [0, 0] and f"after step {step}" in again.printed()
    assert end_of(tmp_path / "run") == end_of(tmp_path / "whole")


def not_finite(text, out, on_nan, zero):
    """One rank's loss is NaN in step 3; what the others do."""
    flags = TRAIN + ["--data", text, "--steps", "5", "--on-nan", on_nan, "--zero", str(zero), "--save-every", "1",
                     "--out", out]
    run = FastRun(flags)
    whole, calls = parallel.cross_entropy, []

    def loss(*arguments):
        calls.append(0)
        return whole(*arguments) * (math.nan if len(calls) == 3 and dist.get_rank() == 1 else 1)

    parallel.cross_entropy = loss
    try:
        return run.train(torch.device("cpu"))
    except NotFinite as error:
        return str(error)
    finally:
        parallel.cross_entropy = whole
        if run.lock:
            run.lock.file.close()


@pytest.mark.parametrize("zero", [0, 3])
def test_nan_stops_or_skips_all_ranks_alike(text, tmp_path, pool, zero):
    if pool(2).device_type != "cpu":
        pytest.skip("the flags say cpu")
    for text_of_error in pool(2).run(not_finite, text, str(tmp_path / "stop"), "stop", zero):
        assert "the loss on rank 1 is not finite" in text_of_error
    assert log_of(tmp_path / "stop")[-1] == {"step": 3, "not_finite": "the loss on rank 1", "on_nan": "stop"}
    assert end_of(tmp_path / "stop")[0] == 2  # what is saved is from before
    assert pool(2).run(not_finite, text, str(tmp_path / "skip"), "skip", zero) == [True, True]
    step, losses, *_ = end_of(tmp_path / "skip")
    losses = dict(losses)
    assert step == 5 and losses[3] == "nan" and all(math.isfinite(losses[i]) for i in (1, 2, 4, 5))
    manifests = [open_checkpoint(str(tmp_path / "skip" / f"step-0000000{i}"), True).manifest for i in (4, 5)]
    assert [(m["updates"], m["skipped"]) for m in manifests] == [(3, 1), (4, 1)]
    want = end_of(tmp_path / "skip")
    shutil.rmtree(tmp_path / "skip" / "step-00000005")
    assert (pool(2).run(not_finite, text, str(tmp_path / "skip"), "skip", zero) == [True, True]
            and end_of(tmp_path / "skip") == want)


def test_full_disk_costs_the_checkpoint_and_nothing_else(text, tmp_path):
    flags = TRAIN + ["--data", text, "--steps", "4", "--save-every", "2", "--out", str(tmp_path / "run"), "--dp", "2"]
    assert Ranks(flags + ["--steps", "2"], 2, tmp_path / "log").end() == [0, 0]
    before = end_of(tmp_path / "run")
    # Room for the weights, not for the optimizer.
    full = Ranks(flags + ["--resume"], 2, tmp_path / "log", file_bytes=40_000)
    assert full.end() == [1, 0], full.printed()
    assert re.search(r"step 4/4  not saved in .*: File too large; ended, step-00000002 is complete",
                     full.printed()), full.printed()
    assert end_of(tmp_path / "run")[2:] == before[2:] and log_of(tmp_path / "run")[-1]["not_saved"]
    assert not any(name.startswith(".step") for name in os.listdir(tmp_path / "run"))
    assert Ranks(flags + ["--resume"], 2, tmp_path / "log").end() == [0, 0] and end_of(tmp_path / "run")[0] == 4


def trace_into(folder):
    said = []
    write_trace([(parallel.Action("F", 0, 0), 0.0, 1.0)], folder, said.append)
    return said


def test_trace_that_cannot_be_written_is_all_that_is_lost(pool, text):
    assert (pool(1).run(trace_into, os.path.join(text, "below-a-file"))
            == [[f"no trace in {text}/below-a-file: Not a directory"]])


def profile_into(folder, text):
    profile = types.SimpleNamespace(export_chrome_trace=lambda path: pathlib.Path(path + ".tmp").write_text(text))
    said, s = [], Settings(profile=folder)
    write_profile(types.SimpleNamespace(s=s, control=None, say=said.append, device=torch.device("cpu")), profile)
    return said


def test_profile_that_cannot_be_written_is_all_that_is_lost(pool, text, tmp_path):
    below = os.path.join(text, "below-a-file")
    assert (pool(1).run(profile_into, below, "")
            == [[f"no profile in {below} of rank 0: Not a directory"]])
    (tmp_path / "rank-1.json").write_text('{"traceEvents": []}')  # of an earlier run: no file of this one
    said, _ = pool(2).run(profile_into, str(tmp_path), '{"traceEvents": [{"na')
    lost = " of rank 0: not written whole, the disk may be full, rank 1: not written whole, the disk may be full"
    assert said == [f"no profile in {tmp_path}{lost}"] and not os.listdir(tmp_path)


def test_log_survives_a_full_disk_and_a_torn_line(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    log = Log(str(path), 1)
    write = os.write

    def full(file, data):
        write(file, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert log.write({"step": 2}).errno == errno.ENOSPC
    assert path.read_text() == '{"step": 1}\n'
    monkeypatch.setattr(os, "write", write)
    assert log.write({"step": 3, "loss": math.nan}) is None
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "loss": "nan"}\n'


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_two_nodes_and_a_killed_rank_that_comes_back(text, tmp_path):
    """Two torchrun agents, as on two machines, of two ranks each; ZeRO within each, replicas between. A rank is killed;
    torchrun starts all of them again, and they go on by themselves, to the losses of one process."""
    flags = TRAIN + ["--data", text, "--steps", "60", "--save-every", "20", "--log-every", "20", "--dtype", "fp64"]
    one = Ranks([*flags, "--out", str(tmp_path / "one")], 1, tmp_path / "log")
    flags += ["--zero", "3", "--zero-within", "2"]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    out = str(tmp_path / "run")
    nodes = [command(*TORCHRUN, "--nnodes", "2", "--nproc_per_node", "2", "--max-restarts", "2",
                     "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "train.py", *flags, "--out", out)
             for _ in range(2)]
    try:
        deadline = time.time() + 300
        while len(checkpoints(out)) < 2:
            assert time.time() < deadline
            time.sleep(0.05)
        os.kill(processes_with(out, nodes[-1].pid)[-1], signal.SIGKILL)
        printed = [node.communicate(timeout=300) for node in nodes]
    finally:
        for node in nodes:
            node.kill()  # its rank goes with it
    assert [node.returncode for node in nodes] == [0, 0], printed
    text_of = "".join(out for out, _ in printed)
    assert "nodes    2 of 2 processes: dp between nodes, pp and tp inside" in text_of
    assert "ZeRO stage 3 within 2" in text_of and one.end() == [0]
    losses, alone = ([entry["loss"] for entry in log_of(folder)] for folder in (out, tmp_path / "one"))
    assert close(losses, alone) and len(alone) == 4
    assert re.search(r"resume   \S+/run/step-00000(\d+): after step \d+\n", text_of), text_of
    assert [entry["step"] for entry in log_of(out)] == [1, 20, 40, 60] and end_of(out)[0] == 60


BAD_CHECKPOINTS = [  # what was done to it, flags, and what the one line must say
    ("no manifest", [], "holds no complete checkpoint"), ("manifest gone", [], "manifest.json: No such file"),
    ("manifest cut", [], "manifest.json"),
    ("manifest flipped", [], "manifest.json: it does not match its own checksum"),
    ("newer format", [], "its format is 2"),
    ("weights cut", [], "model.safetensors: it has"), ("weights flipped", [], "model.safetensors: its checksum"),
    ("moments flipped", [], "optimizer.safetensors: its checksum"),
    ("moments gone", [], "optimizer.safetensors: No such file"),
    ("config flipped", [], "config.json: its checksum"),
    ("other shape", [], "wpe.weight is (16, 16), config.json makes it (12, 16)"),
    ("other moments", [], "exp_avg.wpe.weight is ((8, 32)"), ("moment missing", [], "exp_avg_sq.wpe.weight is missing"),
    ("moment half precision", [], "exp_avg.wpe.weight is ((16, 16), torch.bfloat16)"),
    ("pickled weights", [], "model.safetensors: not a whole .safetensors file"),
    ("pickled moments", [], "not a whole .safetensors file"),
    ("", ["--vocab-size", "300"], "--vocab-size 300: the model in --resume has 256"),
    ("", ["--n-layer", "2"], "--n-layer 2"), ("", ["--experts", "4"], "--experts 4: the model in --resume has 2"),
    ("", ["--data", "OTHER"], "--data"), ("", ["--init-from", "/no"], "--init-from /no beside --resume"),
    ("", ["--out", "OTHER_RUN"], "(--lr 0.002 there, 0.5 here): name a new folder"),
    ("", ["--out", "OTHER_RUN", "--steps", "3"], "/other-2, or add --resume\n"),
    ("", ["--out", "OTHER_RUN", "--experts", "4"], "(--experts 2 there, 4 here; --lr 0.002 there, 0.5 here): name a"),
    ("", ["--out", "OTHER_RUN", "--experts", "0"], "/other-2\n"),  # --resume would refuse another number of experts
    ("", ["--out", "LOCKED"], "process 1 on here writes there"),
    ("", ["--out", "NEW"], "a run goes on in its own folder"),
    ("", ["--out", "IN_THE_WAY"], "step-00000003 would be in the way")]


@pytest.fixture(scope="session")
def finished_run(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    ranks = Ranks(TRAIN + ["--data", text, "--steps", "3", "--save-every", "1", "--experts", "2", "--out",
                           str(folder / "run")], 1, folder / "log")
    assert ranks.end() == [0], ranks.printed()
    return folder / "run"


def damage_checkpoint(path, how):
    """Flip, cut, forge. Where the manifest is made to match what was forged, only the contents can tell."""
    part, _, what = how.partition(" ")
    file = path / {"manifest": "manifest.json", "weights": "model.safetensors",
                   "config": "config.json"}.get(part, "optimizer.safetensors")
    if how == "no manifest":
        shutil.rmtree(path)
        os.mkdir(path.parent / ".step-00000003.part")
    elif what == "gone":
        file.unlink()
    elif what == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    elif what == "flipped":
        data = bytearray(file.read_bytes())
        data[data.index(b"skipped") if part == "manifest" else len(data) // 2] ^= 1  # which leaves it JSON
        file.write_bytes(data)
    elif how:
        manifest = json.loads((path / "manifest.json").read_text())
        manifest.pop("crc32")
        moments = read_safetensors(path / "optimizer.safetensors")
        if how == "newer format":
            manifest["format"] = 2
        elif how == "other shape":
            file = path / "config.json"
            file.write_text(file.read_text().replace('"n_positions": 16', '"n_positions": 12'))
        elif how.startswith("pickled"):
            file = path / ("model.safetensors" if how == "pickled weights" else "optimizer.safetensors")
            torch.save({"wte.weight": Malice()}, file)
        else:
            if how == "other moments":
                moments["exp_avg.wpe.weight"] = moments["exp_avg.wpe.weight"].view(8, 32)
            elif how == "moment missing":
                del moments["exp_avg_sq.wpe.weight"]
            dtypes = {name: torch.float32 for name in moments}
            if how == "moment half precision":
                text = file.read_bytes()
                header = json.loads(text[8:8 + struct.unpack("<Q", text[:8])[0]])
                entry = header["exp_avg.wpe.weight"]
                entry["dtype"], entry["data_offsets"][1] = "BF16", entry["data_offsets"][0] + 2 * 16 * 16
                new = json.dumps(header).encode()
                file.write_bytes(struct.pack("<Q", len(new)) + new + text[8 + struct.unpack("<Q", text[:8])[0]:])
            else:
                write_safetensors(str(file), {name: (dtypes[name], tuple(t.shape))
                                                    for name, t in moments.items()}, moments.__getitem__)
        if file.name in manifest["files"]:
            manifest["files"][file.name] = {"bytes": os.path.getsize(file), "crc32": crc_of_file(file)}
        (path / "manifest.json").write_text(json.dumps(manifest | {"crc32": crc_of(manifest)}))


@pytest.mark.parametrize("how,flags,says", BAD_CHECKPOINTS, ids=lambda x: " ".join(x) if isinstance(x, list) else x)
def test_bad_checkpoint_is_one_line_and_exit_code_2(how, flags, says, finished_run, bad_files, tmp_path, text,
                                                    monkeypatch, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    step = run / "step-00000003"
    if how == "no manifest":
        shutil.rmtree(run / "step-00000002")
    damage_checkpoint(step, how)
    monkeypatch.chdir(tmp_path)
    special = {"OTHER": bad_files["ASCII"], "OTHER_RUN": str(tmp_path / "other"), "LOCKED": str(run),
               "IN_THE_WAY": str(run), "NEW": str(tmp_path / "new")}
    resume = run if how == "no manifest" else run / "step-00000002" if "IN_THE_WAY" in flags else step
    resume = ["--resume", str(resume)]
    if "OTHER_RUN" in flags:
        shutil.copytree(run, tmp_path / "other")
        resume, flags = [], ["--data", text, *TINY, "--steps", "3", "--lr", "0.5", "--experts", "2", *flags]
    if "LOCKED" in flags:
        lock = open(run / ".lock", "w+")  # noqa: SIM115  locked until the test ends
        lock.write("process 1 on here"), lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    monkeypatch.setattr(sys, "argv", ["train.py", "--device", "cpu", *resume] + [special.get(f, f) for f in flags])
    monkeypatch.setattr(dist, "initialize", lambda *a: pytest.fail("a process group was started"))
    with pytest.raises(SystemExit) as exit:
        train.main()
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and err.count("\n") == 1 and says in err and not out, err
    assert before == {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} and not os.path.exists("hacked")


def test_bad_input_ends_real_processes_before_they_meet(finished_run, tmp_path):
    for size, flags, says in [(1, ["--resume", str(finished_run), "--tp", "3"], "--tp 3"),
                              (2, ["--resume", "/no/such", "--dp", "2"], "/no/such")]:
        ranks = Ranks(flags, size, tmp_path / "log")
        assert (ranks.end() == [2] * size and ranks.printed().count("\n") == 1
                and says in ranks.printed()), ranks.printed()
