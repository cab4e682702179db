"""Checkpoints survive crashes, kills, full disks, and are refused when damaged."""

import dataclasses
import errno
import functools
import itertools
import json
import math
import os
import pathlib
import re
import resource
import shutil
import signal
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed.run

import collectives as dist
import parallel
import train
from further.flags import ABOUT, Flags, parse
from tests.pool import close, GPUS, HERE, on_cpus, on_linux, parametrize, table
from tests.runs import (
    end_of, log_of, processes, ran, Ranks, run_training, start, TRAIN, trained)
from further.folder import read_safetensors
from further.resume import checkpoints, crc_of, NUMBERS, open_checkpoint
from model import shapes_of_all
from safe.checkpoints import start_of
from safe.files import Log
from safe.page import Page
from safe.flags import model_config, Parser, Settings
from safe.reports import nothing_else_lost
from safe.run import Plain
from further.bad_input import BadInput
from train import Trainer


# The flags that are not in NUMBERS: a run's identity has these as its model, its data and its start.
KNOWN_OTHERWISE = {*"""arch model n_layer n_head n_kv_head n_embd seq_len vocab_size activation
    experts top_k expert_every shared_experts inner tokenizer init_from""".split()}
# And these decide no losses, but for rounding.
NO_LOSSES = {*"""micro_batches dp tp sp cp cp_kind ep pp schedule virtual_stages zero
    zero_within recompute recompute_blocks loss_chunk device kernels fast comm plain together config eval_every
    log_every sample prompt temperature out save_every resume profile cuda_graphs
    deterministic survive keep timeout""".split()}


def test_every_flag_that_decides_the_losses_is_known():
    flags = {field.name for field in dataclasses.fields(Settings)}
    assert flags == {*NUMBERS} | KNOWN_OTHERWISE | NO_LOSSES, "each must be in one of the three"


# Processes, flags, and flags of the second run alone.
SAME = """
    2  --dtype bf16
    2  --zero 1 --dtype bf16
    4  --tp 2 --zero 2 --dtype fp16
    2  --zero 3 --dtype bf16
    2  --tp 2 --vocab-size 259
    2  --tp 2 --arch llama --n-layer 2 --dtype fp64
    2  --ep 2 --experts 4 --n-layer 2 --dtype fp64  --eval-every 1 --recompute block"""


@parametrize("row", table(SAME), ids=str)
def test_resumed_run_is_the_same_to_the_bit(trained, tmp_path, row):
    """The newest checkpoint is lost, the same command goes on from the one before: same losses, same files, bit for
    bit."""
    size, flags, *second = row
    flags = f"--steps 4 --save-every 2 --lr 0.01 --clip 0.5 --out OUT {flags} "
    trained(size, flags)
    want = end_of(tmp_path)
    assert [step for step, _ in want[1]] == [1, 2, 3, 4] and want[0] == 4
    shutil.rmtree(tmp_path / "step-00000004")
    trained(size, flags + "".join(second))
    assert end_of(tmp_path) == want


# Through which layouts of how many processes a run moves, and a model.
MOVES = """
    4 --tp 2 --sp --zero 2, 4 --pp 2 --zero 1 --micro-batches 2, 1, 4 --zero 3 --zero-within 2, 2 --cp 2 --zero 2
    2 --dp 2 --ep 2, 4 --tp 2 --ep 2, 2 --pp 2 --schedule zb-v, 2 --dp 2 --ep 2 --zero 3  --n-layer 2 --experts 4
    4 --tp 2 --zero 1, 2 --pp 2, 1  --n-layer 2 --optimizer muon"""


@parametrize("row", table(MOVES), ids=str)
def test_checkpoint_fits_every_layout(trained, tmp_path, row):
    """A step in each: one process's losses, weights and moments, and to the bit its routers' biases, which move by
    whole steps."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    moves, *model = row
    moves = moves.split(", ")
    flags, logged = f"{' '.join(model)} --lr 0.01 --clip 0.5 --dtype fp64 --steps", ("step", "loss", "grad_norm", "lr")
    trained(1, f"{flags} {len(moves)} --out OUT/whole")
    for step, move in enumerate(moves, 1):
        size, _, layout = move.partition(" ")
        trained(int(size), f"{flags} {step} --out OUT/moved {layout}" + " --resume" * (step > 1))
        assert close(log_of(moved, *logged), log_of(whole, *logged)[:step]), layout
    for file in ("model", "optimizer"):
        want, got = (read_safetensors(out / f"step-{len(moves):08}" / f"{file}.safetensors") for out in (whole, moved))
        assert want.keys() == got.keys() and all(t.dtype == torch.float64 for t in got.values())
        assert all(close(got[name], t) for name, t in want.items())
        biases = [name for name in want if name.endswith("router.bias")]
        assert bool(biases) == ("experts" in flags and file == "model")
        assert all(got[name].equal(want[name]) for name in biases)


def as_file(folder):
    """The same checkpoint as a file, which --plain of other versions wrote. Returns its path."""
    found = open_checkpoint(folder)
    weights = {name: found.source(name) for name in shapes_of_all(found.config)}
    flags = Flags(dp=1, n_layer=2, n_head=2, n_embd=16, seq_len=16, batch_size=8, experts=4, expert_every=2)
    flags = vars(flags) | found.flags | {"steps": 4}
    file = folder.with_suffix(".pt")
    torch.save({"step": found.step, "skipped": found.manifest["skipped"], "scaler": None, "flags": flags,
                "tensors": weights | found.manifest["tensors"]}, file)
    shutil.rmtree(folder)
    return file


def test_plain_logs_the_same_losses_and_checkpoints_cross_the_modes(start, tmp_path):
    """--plain logs the whole program's losses and knows no flag of safe/'s. Checkpoints of each fit another layout of
    the other, and so do files of other versions."""
    def run(flags, *codes):
        return start(f"--dtype fp64 --save-every 2 --n-layer 2 --experts 4 --expert-every 2 --steps 4 {flags}",
                     len(codes)).said([*codes])

    def rows(out):
        return log_of(out, "step", "loss", "grad_norm")

    whole, plain, again, third = (tmp_path / name for name in ("whole", "plain", "again", "third"))
    step, last = "step-00000002", "step-00000004"
    run(f"--dp 2 --ep 2 --out {whole}", 0, 0)
    run(f"--plain --dp 2 --ep 2 --out {plain}", 0, 0)
    assert "lr       of" not in run(f"--plain --zero 3 --resume {plain / step} --out {again}", 0, 0)
    run(f"--plain --resume {whole / step} --out {third}", 0)
    said = run(f"--plain --resume {plain / step} --steps 3 --warmup-steps 0", 0)
    assert "lr       of step 3: 0.0003 by the checkpoint's settings, now 0.0001\n" in said
    assert sorted(os.listdir(plain)) == ["log.jsonl", step, last]
    assert close(rows(plain), rows(whole)) and close(rows(again), rows(whole)[2:])
    want = read_safetensors(whole / last / "model.safetensors")
    for out in plain, again, third:  # a choice of experts that turned out otherwise would move a bias
        tensors = read_safetensors(out / last / "model.safetensors")
        assert tensors.keys() == want.keys() and all(close(tensors[name], t, 1e-8) for name, t in want.items())
        assert all(tensors[name].equal(t) for name, t in want.items() if name.endswith("router.bias"))
    shutil.rmtree(plain / last)
    file = as_file(plain / step)
    assert "unrecognized arguments: --keep" in run("--plain --keep 2", 2, 2)
    assert "holds another run (--lr 0.002 there, 0.5 here)" in run(f"--out {plain} --lr 0.5", 2)
    run(f"--plain --resume {file}", 0)
    assert f"{file.name}: after step 2" in run(f"--tp 2 --out {plain}", 0, 0)  # as the same command goes on
    assert close(rows(plain), rows(whole)) and (plain / last).is_dir()
    os.truncate(file, os.path.getsize(file) // 2)
    said = run(f"--resume {file}", 2)
    assert f"--resume {file}: " in said and "give a whole one" in said and "Trace" not in said


def test_a_run_with_flags_that_are_not_here_goes_on_if_they_changed_nothing(start, tmp_path):
    """As other versions of train.py leave them."""
    whole = tmp_path / "whole"
    start(f"--steps 2 --out {whole}").said()
    manifest, run = whole / "step-00000002" / "manifest.json", whole / "run.json"

    def with_flags(**more):
        there = json.loads(manifest.read_text())
        there["run"]["flags"] |= more
        there["crc32"] = crc_of({key: value for key, value in there.items() if key != "crc32"})
        manifest.write_text(json.dumps(there))
        run.write_text(json.dumps(there["run"]))

    ways = f"--resume {manifest.parent}", f"--plain --resume {manifest.parent}"
    with_flags(islands=1, outer_lr=0.7, delta_every=0)
    for way in ways:
        assert "step 3" in start(f"--steps 3 {way}").said()
    with_flags(islands=2)
    for way in ways:
        assert "trained with --islands 2, which this train.py does not have: name" in start(way).said([2])
    shutil.rmtree(manifest.parent)
    assert "/whole holds another run (it was trained with --islands 2" in start(f"--steps 2 --out {whole}").said([2])


def test_a_run_json_is_a_command_line(start, tmp_path, capsys):
    """--config takes a run's flags and sizes, and flags on the line win. --help without "all" has ten flags."""
    start("--steps 2 --lr 0.01 --out OUT").said()
    for flags in Settings, Flags:
        def parsed(*words, flags=flags):
            return parse(Parser(**ABOUT), flags, [*words])

        s = parsed("--config", f"{tmp_path}/run.json", "--lr", "0.5")
        assert (s.lr, s.steps, s.n_embd, s.seq_len, s.arch) == (0.5, 2, 16, 16, "gpt2")
        with pytest.raises(BadInput, match="--config /no/such: no run.json of a run"):
            parsed("--config", "/no/such")
        for words, shown in (["--help"], 10), (["--help", "all"], len(dataclasses.fields(flags))):
            with pytest.raises(SystemExit):
                parsed(*words)
            assert len(re.findall(r"(?m)^  --(?!help)", capsys.readouterr().out)) == shown


TRAINING = "(?m)^(data|batch|memory|page|resume|step|traffic|saved) "  # lines of a run that trains


def test_resume_takes_settings_along_and_says_what_changes(start, tmp_path):
    def run(flags):
        return ran(["--device", "cpu", *flags.split(), str(out)], 1, tmp_path / "log")

    out = tmp_path / "run"
    first = "--steps 3 --seed 5 --save-every 2 --out OUT/run"
    said = start(first).said()
    assert re.findall(r"saved    step (\d): \S+/run/step-0000000\1\n", said) == ["2", "3"] and "/index.html: " in said
    said = start(first).said()
    assert "steps    all 3 are done: --resume --steps 6 trains on\n" in said and not re.search(TRAINING, said)
    assert ("step-00000003: after step 3, --steps 3 there, 5 here, --lr 0.002 there, 0.005 here\n"
            "lr       of step 4: 0.0004 by the checkpoint's settings, now 0.001\n"
            in run("--steps 5 --lr 0.005 --log-every 1 --resume --out"))
    said = run("--sample 6 --steps 0 --resume")  # leaves nothing
    assert "--- sample, 6 tokens" in said and not re.search(TRAINING, said)
    assert log_of(out, "step") == [1, 2, 3, 4, 5]
    assert open_checkpoint(out / "step-00000005", True).manifest["run"]["flags"]["seed"] == 5
    assert sorted(os.listdir(out)) == [
        ".lock", "index.html", "log.jsonl", "run.json", "step-00000003", "step-00000005"]


def test_nothing_that_no_run_has_written_is_lost(trained, tmp_path):
    """Folders that a killed run has left go, older checkpoints, though a file manager has been there, and nothing
    else. (What would be written over is refused: tests/refusals.py.)"""
    flags = "--save-every 1 --out OUT --steps "
    trained(1, flags + "2 --keep 0")
    (tmp_path / "step-00000002/.DS_Store").write_bytes(b"\0\0\0\1Bud1")
    files = {tmp_path / name: b"mine" for name in (
        ".step-notes.txt.swp", ".step-00000004.pt.Xa1b2c", ".step-00000001.part", ".step-by-step.d/notes",
        ".hidden/notes", "step-00000001/notes", "step-by-step/notes", "step-notes", "notes.part", "notes.old")}
    for path, data in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    left = tmp_path / ".step-00000007.old", tmp_path / ".tokens-abcdefgh"
    for folder in left:
        folder.mkdir()
        (folder / "tokens.bin.part").write_bytes(bytes(9))
    (tmp_path / ".step-00000008.part").symlink_to(tmp_path / "step-by-step")
    trained(1, flags + "3 --keep 1 --resume")
    assert {path: path.read_bytes() for path in files} == files and (tmp_path / ".step-00000008.part").exists()
    assert not any(folder.exists() for folder in left)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001", "step-00000003"]
    page = tmp_path / "index.html"
    page.write_text("mine")
    Page(tmp_path).write()
    assert page.read_text() == "mine"


def test_a_run_goes_on_where_its_weights_lie_now(trained, tmp_path):
    """A path may be another, what lies there may not."""
    def run(flags):
        return trained(1, f"--steps 2 --save-every 1 --keep 0 --out OUT/run {flags}", refused_with)

    trained(1, "--steps 1 --out OUT/old")
    trained(1, "--steps 1 --seed 1 --out OUT/other")
    assert run("--init-from OUT/old/step-00000001") == [""]
    shutil.rmtree(tmp_path / "run" / "step-00000002")
    (tmp_path / "old").rename(tmp_path / "new")
    assert run("--init-from OUT/new/step-00000001") == [""] and end_of(tmp_path / "run")[0] == 2
    said, = run("--init-from OUT/other/step-00000001")
    assert "(weights of --init-from /" in said and said.endswith("or leave --init-from out and add --resume")
    said, = run("--init-from OUT/old/step-00000001")
    assert said.endswith("to go on in --out, leave --init-from out and add --resume")
    assert run("--resume --steps 3") == [""]


def refused_with(flags):
    """Train; what is said if that is refused, else ""."""
    with patch("safe.run.refuse", lambda program, problem: pytest.skip(str(problem))):
        try:
            run_training(flags)
            return ""
        except pytest.skip.Exception as refusal:
            return str(refusal)


def dies(nth, after):
    """From now on: SIGKILL just before, or just after, the nth time that something becomes durable, gets its name or
    goes. The run's page does not count, because it is written when there is time."""
    count = itertools.count(1)

    def deadly(call, *arguments, **more):
        last = "index.html" not in str(arguments) and next(count) == nth
        last and not after and os.kill(os.getpid(), signal.SIGKILL)
        call(*arguments, **more)
        last and os.kill(os.getpid(), signal.SIGKILL)

    for name in ("fsync", "replace", "rename", "unlink"):
        setattr(os, name, functools.partial(deadly, getattr(os, name)))


def test_a_rank_may_look_while_rank_0_writes_the_first_files(tmp_path):
    """Between its look for run.json and its look for the log, both come: they are this run's own."""
    def none_yet(path, *_):
        (tmp_path / "log.jsonl").write_text('{"step": 0}\n')
        raise FileNotFoundError(path)

    s = Settings(out=str(tmp_path), dp=1)
    config, _ = model_config(s)
    with patch.object(pathlib.Path, "read_text", none_yet):
        assert start_of(s, config, None, False) == (None, None)
    with pytest.raises(BadInput, match="already holds files of a run, and no run.json"):
        start_of(s, config, None, False)


@on_cpus
def test_killed_at_each_point_of_a_write(start, trained, tmp_path):
    """The same run, killed again and again, each time a little later in the writing of its first or second
    checkpoint."""
    flags, out = "--steps 16 --save-every 2 --keep 1 --out OUT/", tmp_path / "run"
    trained(1, flags + "whole")
    half, last = 0, 0
    # 5 is the log, 15 the checkpoint's name, 17 the older one's, which then goes.
    for nth in (1, 6, 8, 11, 13, 15, 16, 17, 18, 20, 21, 22):
        start(flags + "run", before=functools.partial(dies, nth, nth % 2)).said([-9])
        found = [open_checkpoint(path, True).manifest["step"] for path in checkpoints(out)]
        assert max(found, default=0) >= last  # never less than before
        last = max(found, default=0)
        for unfinished in out.glob(".step*"):
            if nth < 22:  # or removing it would count
                half += 1
                shutil.rmtree(unfinished)
    assert half >= 6 and 4 <= last < 16
    start(flags + "run").said()
    assert end_of(out) == end_of(tmp_path / "whole") and not [*out.glob(".step*")]


def test_killed_or_stalled_rank_is_named_by_the_others(start, tmp_path):
    """At once, or within the timeout. A run that is suspended for longer, while the other has its turn, goes on."""
    stalled = start("--steps 1000000 --tp 2 --pp 2 --timeout 5 --out OUT/waits --save-every 0", 4, "stalled")
    silent = stalled.processes[1]
    try:
        stalled.wait_for("step      20/")
        for rank in range(4):
            stalled.kill(rank, signal.SIGSTOP)
        started = time.time()
        killed = start("--steps 1000000 --dp 3 --batch-size 9 --timeout 60 --out OUT/run --save-every 20", 3, "three")
        killed.wait_for("saved    step 20")
        killed.kill(0)
        assert killed.end() == [-9, 1, 1]
        time.sleep(max(0, started + 6 - time.time()))
        stalled.since = os.path.getsize(stalled.log)
        for rank in range(4):
            stalled.kill(rank, signal.SIGCONT)
        stalled.wait_for("0/1000000")
        stalled.kill(1, signal.SIGSTOP)
        stalled.processes.remove(silent)
        assert stalled.end() == [1, 1, 1]
    finally:
        silent.kill()  # or pytest would wait for it in the end
    said, row = killed.printed(), r"(?m)^train.py: rank \d: step \d+, \w.*rank {} gives no sign of life since step"
    assert re.search(row.format(0), said) and "Traceback" not in said
    assert len(re.findall(r"(?m)^train.py: rank [12]: step \d+, \w", said)) == 2, said
    saved = int(checkpoints(tmp_path / "run")[-1].name[5:])
    assert re.findall(".*the same command.*", said) == [f"train.py: the same command goes on from step {saved}"], said
    assert len(re.findall(row.format(1), stalled.printed())) == 3, stalled.printed()
    pages = [(tmp_path / run / "index.html").read_text() for run in ("waits", "run")]
    assert [("No sign of life" in page, bool(re.search(row.format(1), page))) for page in pages] == [
        (False, True), (True, False)]  # rank 0 has written why, or has been killed itself


def warned_at_step_20():
    """Rank 1 gets a scheduler's signal then, and all ranks get it when they have ended."""
    def step(trainer, number):
        if number == 20 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return real(trainer, number)

    def destroy():
        os.kill(os.getpid(), signal.SIGUSR1)
        real_destroy()

    real, real_destroy = Trainer.gradients, dist.destroy_process_group
    Trainer.gradients, dist.destroy_process_group = step, destroy


@on_cpus
def test_a_scheduler_s_signal_saves_and_the_run_goes_on(start, trained, tmp_path):
    flags, out = "--steps 60 --save-every 0 --dp 2 --out OUT/", tmp_path / "run"
    trained(2, flags + "whole")
    said = start(flags + "run", 2, before=warned_at_step_20).said()
    assert "SIGUSR1: the same command goes on from step " in said
    step = end_of(out)[0]
    assert 20 <= step < 60 and max(log_of(out, "step")) == step
    assert f"after step {step}" in start(flags + "run", 2).said()
    assert end_of(out) == end_of(tmp_path / "whole")


def full_at_step_2():
    """Rank 1's GPU is full."""
    def step(trainer, number):
        if number == 1 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Of 79 GiB 96 MiB is free. Including this, ...")
        return real(trainer, number)

    real, Trainer.gradients = Trainer.gradients, step


def test_a_full_gpu_says_what_needs_less(start):
    said = start("--steps 4 --dp 2", 2, before=full_at_step_2).said([1, 1])
    assert re.search("train.py: rank 1: step 2.*: CUDA out of memory. Of 79 GiB 96 MiB is free. Give more "
                     "--micro-batches, --recompute block or --zero 3; `python bench.py plan` lists", said), said
    assert "Traceback" not in said and "the same command" not in said


def said_by(flags):
    try:
        return run_training(flags)
    except BadInput as error:
        return str(error)


def not_finite(flags):
    """One rank's loss is NaN in step 3; what the others do."""
    whole, steps = parallel.cross_entropy, itertools.count(1)

    def loss(*arguments):
        return whole(*arguments) * (math.nan if next(steps) == 3 and dist.get_rank() == 1 else 1)

    with patch.object(parallel, "cross_entropy", loss):
        return said_by(flags)


@parametrize("zero", [0, 3])
def test_nan_stops_all_ranks_alike_or_lowers_the_loss_scale(pool, trained, tmp_path, zero):
    if pool(2).device_type != "cpu":
        pytest.skip("a graph would replay what Python multiplied with when it was recorded")

    def run(dtype):
        return trained(2, f"--steps 5 --save-every 1 --zero {zero} --dtype {dtype} --out OUT/{dtype}", not_finite)

    assert all("the loss on rank 1 is not finite in step 3" in error for error in run("fp32"))
    assert end_of(tmp_path / "fp32")[0] == 2  # what is saved is from before
    assert run("fp16") == [True, True]
    step, losses, *_ = want = end_of(tmp_path / "fp16")
    assert step == 5 and [i for i, loss in losses if loss == "nan"] == [3] and len(losses) == 5
    manifests = [open_checkpoint(tmp_path / "fp16" / f"step-0000000{i}", True).manifest for i in (4, 5)]
    assert [(m["step"], m["skipped"]) for m in manifests] == [(4, 1), (5, 1)]
    shutil.rmtree(tmp_path / "fp16" / "step-00000005")
    assert run("fp16") == [True, True] and end_of(tmp_path / "fp16") == want


def seen_late(flags):
    """not_finite, where each step looks at the numbers of the step before, as on GPUs."""
    kept = [train.Found(torch.zeros(()), torch.zeros(()))]
    with patch.object(Plain, "look", lambda s, trainer: lambda found: kept.append(found) or kept.pop(0)):
        return not_finite(flags)


@parametrize("steps", [3, 5])  # at the end all are settled
@on_cpus
def test_a_nan_that_is_seen_late_has_its_own_step_s_number(trained, tmp_path, steps):
    said = trained(2, f"--steps {steps} --out OUT", seen_late)
    assert all("the loss on rank 1 is not finite in step 3" in error for error in said)


def overflow(flags):
    """What is said where the first update makes weights so large that the second step's loss is not finite."""
    return said_by(["--lr", "1e9", "--warmup-steps", "0", *flags])


@parametrize("save_every", [2, 4])
def test_nothing_is_saved_of_a_step_whose_nan_is_seen_late(pool, trained, tmp_path, save_every):
    """GPUs look at a step's numbers in the next step."""
    said = trained(1, f"--steps 9 --save-every {save_every} --out OUT/late", overflow)
    assert all("is not finite" in error for error in said)
    assert not list((tmp_path / "late").glob("step-*"))


@on_cpus
def test_full_disk_costs_the_checkpoint_and_nothing_else(start, trained, tmp_path):
    out, flags = tmp_path / "run", "--save-every 2 --dp 2 --out OUT/run --steps "
    # Room for the weights, not for the optimizer.
    full = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (40_000, 40_000))
    trained(2, flags + "2")
    old = end_of(out)
    said = start(flags + "4 --resume", 2, before=full).said([1, 0])
    assert re.search(r"step 4/4  not saved in .*: File too large; older checkpoints there are complete", said), said
    assert end_of(out)[2:] == old[2:] and not any(out.glob(".step*"))
    trained(2, flags + "4 --resume")
    assert end_of(out)[0] == 4


def on_a_poor_filesystem(flags):
    """What is warned of where folders cannot be brought to the disk, and nothing can be locked."""
    def unknown(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    fsync, warned = os.fsync, []
    with (patch.object(os, "fsync", lambda file: unknown() if os.path.isdir(f"/proc/self/fd/{file}") else fsync(file)),
          patch("fcntl.flock", unknown), patch("further.folder.warn_once", warned.append),
          patch("safe.checkpoints.warn_once", warned.append)):
        run_training(flags)
    return {line.split(" (")[0] for line in warned}


@on_linux
def test_a_filesystem_without_locks_and_fsync_of_folders(trained, tmp_path):
    said, = trained(1, "--steps 1 --out OUT", on_a_poor_filesystem)
    assert end_of(tmp_path)[0] == 1 and said == {
        "the filesystem of --out has no locks", "the filesystem of --out cannot say when data is on the disk"}


def test_report_that_cannot_be_written_is_all_that_is_lost(text):
    said = []
    with nothing_else_lost("trace", "there", said.append):
        pathlib.Path(text, "below-a-file").write_text("")
    assert said == ["no trace in there: Not a directory"]


def test_log_survives_a_full_disk_and_a_torn_line(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    notes = b'{"note": "by hand"}\n[1]\nhalf\n\xff\xfe\n{"step": null}\n'
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + notes + b'{"st')
    log, write = Log(str(path), 1), os.write

    def full(file, data):
        write(file, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert log.write({"step": 2}).errno == errno.ENOSPC
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:5]))
    assert log.write({"step": 3}) is None
    monkeypatch.setattr(os, "write", write)
    assert log.write({"step": 4, "loss": math.nan}) is None
    assert path.read_bytes() == b'{"step": 1}\n' + notes + b'{"step": 3}\n{"step": 4, "loss": "nan"}\n'
    path.write_text("a last word")
    log = Log(str(path), 1)
    assert path.read_text() == "a last word\n"
    path.rename(tmp_path / "log.old")
    assert log.write({"step": 1}) is None and path.read_text() == '{"step": 1}\n'


def store_of_its_own():
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as README says


@on_linux
def test_two_nodes_and_a_killed_rank_that_comes_back(start, text, tmp_path):
    """Two torchrun agents, as on two machines, of two ranks each; ZeRO within each, replicas between. A rank is killed;
    torchrun starts all of them again, and they go on by themselves, to the losses of one process. Ranks are copies of
    their agent, because each new process would spend three seconds on importing PyTorch."""
    flags = "--steps 60 --save-every 20 --log-every 20 --dtype fp64 --out "
    one = start(flags + "OUT/one")
    out = str(tmp_path / "run")
    words = (f"--nnodes 2 --nproc_per_node 2 --max-restarts 2 --local-addr 127.0.0.1 "
             f"--start-method {'spawn' if GPUS else 'fork'} "
             f"--rdzv_backend c10d --rdzv_endpoint 127.0.0.1:{one.store.port} "
             f"--run-path {HERE}/train.py {' '.join(TRAIN)} --data {text} "
             f"--zero 3 --zero-within 2 {flags}{out}").split()
    nodes = [Ranks(words, 1, tmp_path / f"node {i}", program=torch.distributed.run.__file__, launcher="fork",
                   before=store_of_its_own) for i in range(2)]
    try:
        deadline = time.time() + 300
        while not checkpoints(out):
            assert time.time() < deadline, nodes[0].printed() + nodes[1].printed()
            time.sleep(0.05)
        os.kill(processes(nodes[-1].processes[0].pid)[-1], signal.SIGKILL)
        said = one.said() + nodes[0].said() + nodes[1].said()
    finally:
        for node in nodes:
            node.processes[0].kill()  # its ranks go with it
    assert "ZeRO stage 3 within 2" in said
    assert re.search(r"resume   \S+/run/step-00000\d+: after step \d+\n", said), said
    assert close(log_of(out, "loss"), log_of(tmp_path / "one", "loss")) and log_of(out, "step") == [1, 20, 40, 60]
    assert end_of(out)[0] == 60
