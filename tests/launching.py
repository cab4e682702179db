"""Processes start and end together."""

import concurrent.futures
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
import unittest.mock

import pytest
import torch

import collectives as dist
import safe.checkpoints
from tests.pool import GPUS, HERE
from tests.runs import TINY, TORCHRUN, command, log_of, processes_with


def test_ranks_are_told_from_their_launcher_where_process_numbers_begin_again(tmp_path):
    for pid, ppid, name, state in ((32767, 9, "python", "S"), (2, 32767, "python (a) b", "S"),
                                   (3, 32767, "python", "R"), (4, 32767, "python", "Z"), (5, 1, "python", "S")):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} ({name}) {state} {ppid} 1 1 0")
        (folder / "cmdline").write_text("python\0train.py\0--out\0there\0")
    assert sorted(processes_with("there", proc=tmp_path)) == [2, 3, 5, 32767]
    assert sorted(processes_with("there", 32767, tmp_path)) == [2, 3]


# Starts a command where there is no network but the loopback interface, and this machine's name means nothing.
ALONE = "unshare", "-n", "-u", "sh", "-c", 'ip link set lo up && hostname made-up && exec "$@"', "sh"


@functools.cache
def can_be_alone():
    return bool(shutil.which("unshare")) and not subprocess.run([*ALONE, "true"], capture_output=True).returncode


def run_and_end(how, text, out):
    """Two processes, started by torchrun or by train.py itself, and their end: (printed, errors, exit code, who is
    left)."""
    flags = ["train.py", *TINY, "--dp", "2", "--device", "cpu", "--data", text, "--out", out, "--eval-every", "2",
             "--sample", "4"]
    if how == "torchrun":
        process = command(*ALONE * can_be_alone(), *TORCHRUN, *flags, "--steps", "2")
        return *process.communicate(timeout=120), process.returncode, []
    process = command(sys.executable, *flags, "--steps", "1000000")
    for line in process.stdout:
        if line.startswith("step"):
            break
    everyone = processes_with(out)
    assert len(everyone) == 3, process.stderr.read()
    if how == "killed rank":
        os.kill(processes_with(out, process.pid)[-1], signal.SIGKILL)
    else:
        process.send_signal({"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}.get(how, signal.SIGKILL))
    deadline = time.time() + 20
    while processes_with(out) and time.time() < deadline:
        time.sleep(0.1)
    left = processes_with(out)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return *process.communicate(), process.returncode, left


@pytest.fixture(scope="session")
def ends(text, tmp_path_factory):
    """{how: what `run_and_end` returns}, and the folder of these runs. Two at a time, for what takes time is to start.
    Another way is that of test_two_nodes_and_a_killed_rank_that_comes_back."""
    # Those look into /proc.
    hows = ["torchrun"] + ["Ctrl-C", "SIGTERM", "killed rank", "killed launcher"] * (sys.platform == "linux")
    folder = tmp_path_factory.mktemp("ends")
    with concurrent.futures.ThreadPoolExecutor(2) as two:
        return dict(zip(hows, two.map(lambda how: run_and_end(how, text, str(folder / how)), hows))), folder


def test_all_processes_start_and_end_together(ends):
    """train.py under a torchrun of one process, and alone: both start two."""
    ends, folder = dict(ends[0]), ends[1]
    printed, errors, code, _ = ends.pop("torchrun")
    assert code == 0, errors
    assert ("device   cpu: 2 processes on this machine, " in printed
            and "dp 2 x tp 1 = 2 processes, cpu (gloo)" in printed and printed.count("step 2/2  loss") == 1)
    assert "validation loss" in printed and "--- sample, 4 tokens" in printed and "measured (predicted)" in printed
    assert [entry["step"] for entry in log_of(folder / "torchrun")] == [1, 2]
    for how, (_, errors, code, left) in ends.items():
        assert not left, (how, left)
        assert (how != "killed rank"
                or code == 1 and "ended with exit code -9; all others were stopped" in errors), (code, errors)
        assert how != "Ctrl-C" or code == 130 and "Traceback" not in errors, (code, errors)
        assert how != "SIGTERM" or code == 0 and safe.checkpoints.checkpoints(str(folder / how)), (code, errors)


def most_sends_at_once(name):
    """The most messages that this rank sends in one exchange of a broadcast or scatter from rank 2."""
    link, most = type(dist.link_of(None)), []
    exchange = link.exchange
    with unittest.mock.patch.object(link, "exchange", lambda self, sends=(), receives=(): (
            most.append(len(sends)), exchange(self, sends, receives))):
        t = torch.ones(8, 4)
        if name == "broadcast":
            dist.broadcast(t, src=2)
        else:
            dist.scatter(t[0], [*t] if dist.get_rank() == 2 else None, src=2)
    return max(most)


@pytest.mark.parametrize("name", ["broadcast", "scatter"])
def test_a_tree_goes_round_by_round(pool, name):
    """Messages that leave together share the link, so the largest subtree would get its data last."""
    assert set(pool(8).run(most_sends_at_once, name)) <= {0, 1}


def test_new_groups_wait_as_long_as_the_world():
    code = ("import torch, collectives as dist, fast; fast.on(); dist.initialize('cpu', 7); "
            "print([g._get_backend(torch.device('cpu')).options._timeout.total_seconds() for g in "
            "(torch.distributed.group.WORLD, dist.new_group([0]))])")
    assert subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True,
                          timeout=100).stdout == "[7.0, 7.0]\n"


def test_starts_on_a_machine_whose_name_does_not_resolve(ends):
    """Two processes meet where there is no network but the loopback interface."""
    if not can_be_alone():
        pytest.skip("needs root on Linux, and ip")
    printed, errors, code, _ = ends[0]["torchrun"]
    assert code == 0 and "step 2/2" in printed, errors
    assert "resolve hostname" not in errors and "(made-up, " not in errors, errors


@pytest.mark.skipif(GPUS < 4, reason="needs 4 GPUs")
def test_train_on_gpus(tmp_path):
    """And go on from a checkpoint to the bit, though its first steps run eagerly where the other run replayed
    graphs."""
    logs = []
    for out in (tmp_path / "out", tmp_path / "again"):
        if logs:
            shutil.copytree(tmp_path / "out", out)
            shutil.rmtree(out / "step-00000060")
        process = command(sys.executable, "train.py", "--dp", "2", "--tp", "2", "--dtype", "bf16", "--steps", "60",
                          "--save-every", "50", "--log-every", "1", "--out", str(out))
        printed, errors = process.communicate(timeout=180)
        assert process.returncode == 0, errors
        logs.append([(entry["loss"], entry["grad_norm"]) for entry in log_of(out)])
    assert "cuda (NCCL)" in printed and "after step 50" in printed and log_of(out)[-1]["val_loss"] < 3
    assert len(logs[0]) == 60 and logs[0] == logs[1]
