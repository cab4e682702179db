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
import fast
import safe.checkpoints
from tests.pool import GPUS, in_new_process, on_ranks
from tests.runs import TINY, TORCHRUN, Ranks, command, log_of, processes


# Starts a command where there is no network but the loopback interface, and this machine's name means nothing.
ALONE = "unshare", "-n", "-u", "sh", "-c", 'ip link set lo up && hostname made-up && exec "$@"', "sh"


@functools.cache
def can_be_alone():
    return bool(shutil.which("unshare")) and not subprocess.run([*ALONE, "true"], capture_output=True).returncode


ENDS = {  # signal, exit code, what is said, whether the ranks are copies of their launcher or new processes
    "Ctrl-C": (signal.SIGINT, 130, "", "fork"), "SIGTERM": (signal.SIGTERM, 0, "", "fork"),
    "killed launcher": (signal.SIGKILL, -9, "", "fork"),
    "killed rank": (signal.SIGKILL, 1, "ended with exit code -9; all others were stopped", "new")}


def run_and_end(how, text, out):
    """Two processes, started by torchrun or by train.py itself, and their end: (printed, exit code, who is left)."""
    flags = [*TINY, "--dp", "2", "--device", "cpu", "--data", text, "--out", out, "--eval-every", "2", "--sample", "4"]
    if how == "torchrun":
        process = command(*ALONE * can_be_alone(), *TORCHRUN, "train.py", *flags, "--steps", "2")
        return "".join(process.communicate(timeout=120)), process.returncode, []
    run = Ranks([*flags, "--steps", "1000000"], 1, out + ".log", launcher=ENDS[how][3])
    run.wait_for("\nstep ")
    launcher, = run.processes
    ranks = processes(launcher.pid)
    assert len(ranks) == 2, run.printed()
    os.kill(ranks[-1] if how == "killed rank" else launcher.pid, ENDS[how][0])
    deadline = time.time() + 20
    while (left := {launcher.pid, *ranks} & {*processes()}) and time.time() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return run.printed(), *run.end(20), left


@pytest.fixture(scope="session")
def ends(text, tmp_path_factory):
    """({how: what `run_and_end` returns}, the folder of these runs). Two at a time, for torchrun's takes as long as
    all others, which start as copies of a process that has imported PyTorch. Another way is that of
    test_two_nodes_and_a_killed_rank_that_comes_back."""
    hows = ["torchrun", *ENDS] if sys.platform == "linux" else ["torchrun"]
    folder = tmp_path_factory.mktemp("ends")
    with concurrent.futures.ThreadPoolExecutor(2) as two:
        return dict(zip(hows, two.map(lambda how: run_and_end(how, text, str(folder / how)), hows))), folder


def test_processes_start_together(ends):
    """train.py under a torchrun of one process starts two. It has no network but the loopback interface, and a name
    that does not resolve, if this machine can do that."""
    printed, code, _ = ends[0]["torchrun"]
    assert code == 0 and "resolve hostname" not in printed and "(made-up, " not in printed, printed
    for said in ("device   cpu: 2 processes on this machine, ", "dp 2 x tp 1 = 2 processes, cpu (gloo)",
                 "step 2/2  loss", "validation loss", "--- sample, 4 tokens", "measured (predicted)"):
        assert printed.count(said) == 1, said
    assert log_of(ends[1] / "torchrun", "step") == [1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("how", ENDS)
def test_processes_end_together(ends, how):
    printed, code, left = ends[0][how]
    assert not left and code == ENDS[how][1] and ENDS[how][2] in printed, (left, code, printed)
    assert how != "Ctrl-C" or "Traceback" not in printed, printed
    assert how != "SIGTERM" or safe.checkpoints.checkpoints(str(ends[1] / how)), printed


@pytest.mark.parametrize("op", ["broadcast", "scatter"])
@on_ranks(8)
def test_a_tree_goes_round_by_round(op):
    """In each exchange one message. Those that leave together share the link, so the largest subtree would get its data
    last."""
    link, most = type(dist.link_of(None)), []
    exchange = link.exchange
    with unittest.mock.patch.object(link, "exchange", lambda self, sends=(), receives=(): (
            most.append(len(sends)), exchange(self, sends, receives))):
        t = torch.ones(8, 4)
        if op == "broadcast":
            dist.broadcast(t, src=2)
        else:
            dist.scatter(t[0], [*t] if dist.get_rank() == 2 else None, src=2)
    assert max(most) <= 1


def seconds_that_groups_wait():
    fast.on()
    dist.initialize("cpu", 7)
    groups = torch.distributed.group.WORLD, dist.new_group([0])
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_new_groups_wait_as_long_as_the_world():
    assert in_new_process(seconds_that_groups_wait) == [7.0, 7.0]


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
        logs.append(log_of(out, "loss", "grad_norm"))
    assert "cuda (NCCL)" in printed and "after step 50" in printed and log_of(out)[-1]["val_loss"] < 3
    assert len(logs[0]) == 60 and logs[0] == logs[1]
