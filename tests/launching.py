"""Processes start and end together."""

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from unittest.mock import patch

import pytest
import torch

import collectives as dist
import fast
from tests.pool import GPUS, forkserver, in_new_process, on_ranks
from tests.runs import TINY, TORCHRUN, Ranks, command, log_of, processes
import safe.launch
from safe.checkpoints import checkpoints


# Starts a command where there is no network but the loopback interface, and this machine's name means nothing.
ALONE = "unshare", "-n", "-u", "sh", "-c", 'ip link set lo up && hostname made-up && exec "$@"', "sh"


FLAGS = [*TINY, *"--dp 2 --device cpu --eval-every 2 --sample 4 --data".split()]


def test_processes_start_together(text, tmp_path):
    """train.py under a torchrun of one process starts two. It has no network but the loopback interface, and a name
    that does not resolve, if this machine can do that."""
    can_be_alone = shutil.which("unshare") and not subprocess.run([*ALONE, "true"], capture_output=True).returncode
    words = *ALONE * bool(can_be_alone), *TORCHRUN, "train.py", *FLAGS, text, "--out", str(tmp_path), "--steps", "2"
    printed = command(*words)
    assert not re.search(r"resolve hostname|\(made-up, ", printed), printed
    for said in ("device   cpu: 2 processes on this machine, ", "dp 2 x tp 1 = 2 processes, cpu (gloo)",
                 "step 2/2  loss", "validation loss", "--- sample, 4 tokens", "measured (predicted)"):
        assert printed.count(said) == 1, said
    assert log_of(tmp_path, "step") == [1, 2]


ENDS = [  # what ends, by which signal, exit code, whether ranks are copies of their launcher or new processes
    ("launcher", signal.SIGINT, 130, "fork"), ("launcher", signal.SIGTERM, 0, "fork"),
    ("launcher", signal.SIGKILL, -9, "fork"), ("rank", signal.SIGKILL, 1, "new")]


def left_of(pids):
    """Those of these processes that have not ended after 20 seconds, and that now do."""
    deadline = time.time() + 20
    while (left := {*pids} & {*processes()}) and time.time() < deadline:
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("victim, how, code, launcher", ENDS)
def test_processes_end_together(text, tmp_path, victim, how, code, launcher):
    """SIGTERM leaves a checkpoint, Ctrl-C no traceback, and a rank's death is told."""
    run = Ranks([*FLAGS, text, "--out", str(tmp_path), "--steps", "1000000"], 1, tmp_path / "log", launcher=launcher)
    run.wait_for("\nstep ")
    pid = run.processes[0].pid
    ranks = processes(pid)
    assert len(ranks) == 2, run.printed()
    os.kill(ranks[-1] if victim == "rank" else pid, how)
    assert not left_of([pid, *ranks]) and run.end(20) == [code], run.printed()
    assert how != signal.SIGTERM or checkpoints(tmp_path)
    assert how != signal.SIGINT or "Traceback" not in run.printed()
    assert victim != "rank" or "ended with exit code -9; all others were stopped" in run.printed()


def meet_and_stay(pipe):
    fast.on()
    dist.initialize("cpu", 60)
    pipe.send(os.getpid())
    time.sleep(60)


def start_ranks_and_stay(pipe):
    with patch("torch.distributed.run.run", lambda arguments: meet_and_stay(pipe)):
        safe.launch.start_again(1)


def start_and_stay(stay, pipe):
    """A launcher whose one rank, which PyTorch has not made, does as `stay` says."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    multiprocessing.get_context("fork").Process(target=stay, args=(pipe,)).start()
    time.sleep(60)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("stay", [meet_and_stay, start_ranks_and_stay])
def test_a_killed_launcher_leaves_no_rank_behind(stay):
    """Nor a rank of torchrun's that is itself a launcher. (Ranks that PyTorch forks get a SIGINT from it.)"""
    pipe, theirs = multiprocessing.Pipe()
    launcher = forkserver().Process(target=start_and_stay, args=(stay, theirs))
    launcher.start()
    rank = pipe.recv() if pipe.poll(60) else None
    launcher.kill()
    assert rank and not left_of([rank])


@on_ranks(8)
def test_a_tree_goes_round_by_round():
    """In each exchange one message. Those that leave together share the link, so the largest subtree would get its data
    last."""
    link, t = type(dist.link_of(None)), torch.ones(8, 4)
    with patch.object(link, "exchange", autospec=True, side_effect=link.exchange) as exchange:
        dist.broadcast(t, src=2)
        dist.scatter(t[0], [*t] if dist.get_rank() == 2 else None, src=2)
    assert all(len(some) <= 1 for call in exchange.call_args_list for some in [*call.args[1:], *call.kwargs.values()])


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
        printed = command(sys.executable, "train.py", "--dp", "2", "--tp", "2", "--dtype", "bf16", "--steps", "60",
                          "--save-every", "50", "--log-every", "1", "--out", str(out))
        logs.append(log_of(out, "loss", "grad_norm"))
    assert "cuda (NCCL)" in printed and "after step 50" in printed and log_of(out)[-1]["val_loss"] < 3
    assert len(logs[0]) == 60 and logs[0] == logs[1]
