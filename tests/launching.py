"""Processes start and end together."""

import concurrent.futures
import ctypes
import io
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from unittest.mock import patch

import pytest
import torch
import torch.distributed.run

import collectives as dist
from fast import edition
from tests.pool import forkserver, GPUS, HERE, in_new_process, on_linux, on_ranks, parametrize, table
from tests.refusals import refusal_of_layout
from tests.runs import TINY, Ranks, command, import_from, log_of, processes, ran
import safe.launch
from further.resume import checkpoints
from further.bad_input import BadInput
import train


CLONE_NEWUTS, CLONE_NEWNET = 0x4000000, 0x40000000  # of sched.h
FLAGS = [*TINY, *"--dp 2 --device cpu --eval-every 2 --sample 4 --data".split()]


def alone():
    """Where that can be had: there is no network but the loopback interface, and this machine's name means nothing."""
    if not ctypes.CDLL(None).unshare(CLONE_NEWUTS | CLONE_NEWNET):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        socket.sethostname("made-up")


@on_linux
def test_processes_start_together(text, tmp_path):
    """train.py under a torchrun of one process starts two."""
    words = ["--local-addr", "127.0.0.1", "--start-method", "fork", "--run-path", f"{HERE}/train.py", *FLAGS, text,
             "--out", str(tmp_path), "--steps", "2"]
    printed = ran(words, 1, tmp_path / "log", program=torch.distributed.run.__file__, launcher="fork", before=alone)
    assert not re.search(r"resolve hostname|\(made-up, ", printed), printed
    for said in ("dp 2 x tp 1 = 2 processes, cpu (gloo)",
                 "step 2/2  loss", "validation loss", "--- sample, 4 tokens", "measured (predicted)"):
        assert printed.count(said) == 1, said
    assert log_of(tmp_path, "step") == [1, 2]


def left_of(pids):
    """Those of these processes that have not ended after a minute, and that now do."""
    deadline = time.time() + 60
    while (left := {*pids} & {*processes()}) and time.time() < deadline:
        time.sleep(0.01)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def by_nohup():
    """As nohup starts a program, among what others have left in the environment."""
    by_a_terminal(signal.SIG_IGN)
    os.environ.update(PET_NNODES="2", PET_NPROC_PER_NODE="3", OMP_NUM_THREADS="0", WORLD_SIZE="1", LOCAL_RANK="1")


def by_a_terminal(at_its_end=signal.SIG_DFL):
    """As a terminal starts a program, also where the tests themselves run under nohup. Ranks that have saved, and that
    nobody waits for, stay for a tenth of their time."""
    signal.signal(signal.SIGHUP, at_its_end)
    signal.alarm = lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds / 10)


@on_linux
@parametrize("how, code", [("SIGINT", 130), ("SIGINT twice", 130), ("SIGTERM", 0), ("SIGHUP", 0), ("SIGKILL", -9)])
def test_processes_end_with_their_launcher(text, tmp_path, how, code):
    """SIGTERM, a closed terminal and Ctrl-C leave a checkpoint, and no traceback; the second Ctrl-C waits for no step.
    Under nohup no terminal ends them."""
    run = Ranks([*FLAGS, text, "--out", str(tmp_path), "--steps", "1000000"], 1, tmp_path / "log", launcher="fork",
                before=by_nohup if how == "SIGTERM" else by_a_terminal)
    run.wait_for("\nstep ")
    pid = run.processes[0].pid
    ranks = processes(pid)
    assert len(ranks) == 2, run.printed()
    if how == "SIGTERM":
        for process in (*ranks, pid):
            os.kill(process, signal.SIGHUP)
        run.since = os.path.getsize(run.log)
        run.wait_for("\nstep ")
    since = time.time()
    if how == "SIGINT twice":
        os.kill(ranks[1], signal.SIGSTOP)  # no step ends now
        os.kill(pid, signal.SIGINT)
        time.sleep(1.2)
    os.kill(pid, signal.Signals[how.split()[0]])
    assert not left_of([pid, *ranks]) and run.end() == [code] and time.time() < since + 20, run.printed()
    if saved := checkpoints(tmp_path):
        assert f"{how}: the same command goes on from step {int(saved[-1].stem[5:])}\n" in run.printed()
    page = (tmp_path / "index.html").read_text()
    assert ("No sign of life since" in page) == (how in ("SIGINT twice", "SIGKILL"))
    assert bool(saved) == (how not in ("SIGINT twice", "SIGKILL")) and "Traceback" not in run.printed()


@on_linux
def test_one_of_two_launchers_gets_the_folder(text, tmp_path):
    """The other one's ranks are refused in a line, with the exit code of what is refused."""
    words = [*FLAGS, text, "--out", str(tmp_path / "run"), "--steps", "1000000"]
    one = Ranks(words, 1, tmp_path / "log", launcher="fork", before=by_a_terminal)
    one.wait_for("\nstep ")
    said = ran(words, 1, tmp_path / "other", [2], launcher="fork")
    assert re.fullmatch("train.py: --out .* process \\d+ on .* writes there; wait for its end, .*\n", said), said
    one.kill(0, signal.SIGTERM)
    assert one.end() == [0] and (tmp_path / "run/.lock").read_text() == ""


NEW = """
import os, signal, sys, time
if "RANK" not in os.environ:
    import safe.launch
    safe.launch.start_again(2)
words = " ".join(sys.argv[1:])  # one write, or the lines of two ranks mix
sys.stdout.write(f"pid {os.getpid()} of rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {words}\\n")
sys.stdout.flush()
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@on_linux
def test_a_rank_that_dies_takes_the_others_along_and_is_named(tmp_path):
    """Here ranks are new processes, as on a machine with GPUs."""
    (tmp_path / "new.py").write_text(NEW)
    said = ran(["--flag", "a b"], 1, tmp_path / "log", [1], program=str(tmp_path / "new.py"), launcher="new")
    started = dict(re.findall(r"pid (\d+) of rank (\d) of 2 --flag a b\n", said))
    assert {*started.values()} >= {"1"} and not left_of(map(int, started))
    assert "rank 1 ended with exit code -9; all others were stopped" in said


@parametrize("program, words", [("train.py", ["train.py"]), ("lessons/__main__.py", ["--module", "lessons"])])
def test_what_starts_again_is_the_program_and_not_what_runs_it(program, words, monkeypatch):
    """__main__ is pdb's or a profiler's, and may have no __spec__."""
    asked = []
    monkeypatch.setattr("sys.argv", [os.path.join(HERE, program), "--dp", "2"])
    monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace())
    monkeypatch.setattr(safe.launch, "may_fork", lambda: False)
    monkeypatch.setattr(safe.launch, "forget_launcher", lambda: None)
    monkeypatch.setattr(torch.distributed.run, "parse_args", asked.append)
    monkeypatch.setattr(torch.distributed.run, "run", lambda _: None)
    with pytest.raises(SystemExit):
        safe.launch.start_again(2)
    words = [os.path.join(HERE, word) if word.endswith(".py") else word for word in words]
    assert asked[0][-len(words) - 2:] == [*words, "--dp", "2"]


class Notebook(io.TextIOBase):
    """What a notebook has for a stdout: it can be written to, and not much else."""

    def write(self, text):
        return sys.__stdout__.write(text)

    def flush(self):
        sys.__stdout__.flush()


def in_a_notebook_without_paths():
    """Nor does Python put a program's folder in front of its path (PYTHONSAFEPATH)."""
    sys.stdout = Notebook()
    import_from("/no/such")
    sys.path.remove("/no/such")


@parametrize("plain", ["", "--plain"])
def test_train_runs_in_a_notebook_and_without_its_folder_in_the_path(text, tmp_path, plain):
    words = [*TINY, *f"--device cpu --steps 1 --sample 3 --data {text} {plain}".split()]
    assert "tokens ---" in ran(words, 1, tmp_path / "log", before=in_a_notebook_without_paths)


# What the environment has, and how many processes that means, or what is refused.
LEFT = """
    nothing                                             1
    WORLD_SIZE= RANK=                                   1
    WORLD_SIZE=1 RANK=0 LOCAL_RANK=3                    1
    RANK=1 WORLD_SIZE=2 MASTER_ADDR=here MASTER_PORT=1  2
    WORLD_SIZE=2                                        unset RANK and WORLD_SIZE
    RANK=1                                              unset RANK and WORLD_SIZE
    RANK=2 WORLD_SIZE=2 MASTER_ADDR=here MASTER_PORT=1  has RANK=2 and WORLD_SIZE=2
    RANK=x WORLD_SIZE=1 MASTER_ADDR=here MASTER_PORT=1  unset RANK
    RANK=1 WORLD_SIZE=2 MASTER_ADDR=here MASTER_PORT=x  unset RANK and WORLD_SIZE
    SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=4 SLURM_PROCID=0  1
    SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0  srun has .* 4 times .*: start srun --ntasks 1 torchrun .* 4 train.py
    OMPI_COMM_WORLD_SIZE=2  mpirun has .* 2 times .*: start torchrun --nproc_per_node 2 train.py
    PMI_SIZE=2 PMI_RANK=0                               mpiexec has started this program 2 times
    SLURM_STEP_NUM_TASKS=2 RANK=1 WORLD_SIZE=2 MASTER_ADDR=here MASTER_PORT=1  2"""


@parametrize("left, means", table(LEFT))
def test_what_others_left_in_the_environment(left, means):
    left = dict(re.findall(r"(\w+)=(\S*)", left))
    if isinstance(means, str):
        with patch.dict(os.environ, left, clear=True), pytest.raises(SystemExit, match="2"):
            train.Run([])
    with patch.dict(os.environ, left, clear=True):
        if isinstance(means, str):
            with pytest.raises(BadInput, match=means):
                safe.launch.started()
            assert not {"RANK", "LOCAL_RANK"} & {*os.environ}  # or `refuse` would leave the line to rank 0
        else:
            kept = left if means == 2 or "SLURM_NTASKS" in left else {}
            assert safe.launch.started() == means and os.environ == kept


def test_one_of_srun_s_tasks_speaks_for_all(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with (patch.dict(os.environ, SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="1", clear=True),
          pytest.raises(SystemExit, match="2")):
        safe.launch.started()


def test_a_world_size_without_a_rank_is_no_world_of_one():
    """Each process of a script of one's own would train alone."""
    with patch.dict(os.environ, {"WORLD_SIZE": "2"}, clear=True), pytest.raises(ValueError, match="RANK expected"):
        safe.launch.meeting_place("cpu", 1)


def test_ranks_share_the_cores_of_the_job(tmp_path, monkeypatch):
    """Those of its control group."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    assert safe.launch.cores(tmp_path) == 64
    for path, content in [("proc/self/cgroup", "0::/a/b\n"), ("sys/fs/cgroup/a/b/cpu.max", "max 100000"),
                          ("sys/fs/cgroup/a/cpu.max", "450000 100000")]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    assert safe.launch.cores(tmp_path) == 4
    monkeypatch.setattr(safe.launch, "may_fork", lambda: False)
    monkeypatch.setattr(safe.launch, "cores", lambda: 8)
    monkeypatch.setattr(torch.distributed.run, "run", lambda _: None)
    for given, want in {"0": "4", "": "4", "x": "4", "3": "3", "2,1": "2,1"}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        with pytest.raises(SystemExit):
            safe.launch.start_again(2)
        assert os.environ["OMP_NUM_THREADS"] == want


def has_asked_for_gpus():
    return torch.cuda.is_initialized() or "torch.utils.cpp_extension" in sys.modules


def test_what_processes_are_forked_from_has_not_asked_for_gpus():
    """Else none of them could use one."""
    assert not in_new_process(has_asked_for_gpus)


def closed_stdout():
    os.close(1)
    sys.stdout = None
    safe.launch.started()
    print("to nobody")
    return open(os.devnull).fileno()


def test_a_closed_stdout_gets_nothing_in_a_file():
    assert in_new_process(closed_stdout) > 2


def meet_and_stay(pipe):
    edition.on()
    dist.initialize("cpu", 60, safe.launch.settled_rendezvous)
    pipe.send(os.getpid())
    time.sleep(300)


def start_ranks_and_stay(pipe):
    with patch("torch.distributed.run.run", lambda arguments: meet_and_stay(pipe)):
        safe.launch.start_again(1)


def start_and_stay(stay, pipe):
    """A launcher whose one rank, which PyTorch has not made, does as `stay` says."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="a")
    multiprocessing.get_context("fork").Process(target=stay, args=(pipe,)).start()
    time.sleep(300)


@on_linux
@parametrize("stay", [meet_and_stay, start_ranks_and_stay])
def test_a_killed_launcher_leaves_no_rank_behind(stay):
    """Nor a rank of torchrun's that is itself a launcher. (Ranks that PyTorch forks get a SIGINT from it.)"""
    pipe, theirs = multiprocessing.Pipe()
    launcher = forkserver().Process(target=start_and_stay, args=(stay, theirs))
    launcher.start()
    rank = pipe.recv() if pipe.poll(200) else None
    launcher.kill()
    assert rank and not left_of([rank])


@on_ranks(8)
def test_a_tree_goes_round_by_round(rank):
    """In each exchange one message. Those that leave together share the link, so the largest subtree would get its data
    last."""
    link, t = type(dist.link_of(None)), torch.ones(8, 4)
    with patch.object(link, "exchange", autospec=True, side_effect=link.exchange) as exchange:
        dist.broadcast(t, src=2)
        dist.scatter(t[0], [*t] if rank == 2 else None, src=2)
    assert all(len(some) <= 1 for call in exchange.call_args_list for some in [*call.args[1:], *call.kwargs.values()])


def begin_three_times(rank, port, agent):
    """Returns how many seconds groups wait. agent: as under torchrun, whose store outlives the groups; else rank 0 has
    the store."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      TORCHELASTIC_USE_AGENT_STORE=str(agent))
    edition.on()
    for _ in range(3):
        time.sleep(0.1 * (rank == 0))  # rank 1 must not connect to what rank 0 was before
        dist.initialize("cpu", 7, safe.launch.settled_rendezvous)
        groups = torch.distributed.group.WORLD, dist.new_group([0, 1])
        waits = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
        for group in groups:
            dist.all_reduce(t := torch.ones(2) + rank, group=group)
            assert t.eq(3).all()
        assert dist.traffic()["all_reduce"].calls == 2
        dist.destroy_process_group()
    assert not dist.traffic()
    return waits


@parametrize("agent", [True, False])
def test_groups_begin_again_and_wait_as_long_as_the_world(agent):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if not agent:
        del store  # its port is free now
    with concurrent.futures.ProcessPoolExecutor(2, forkserver()) as two:
        assert [*two.map(begin_three_times, range(2), 2 * [port], 2 * [agent])] == 2 * [[7.0, 7.0]]


def test_train_on_gpus(tmp_path):
    """And go on from a checkpoint to the bit, though its first steps run eagerly where the other run replayed
    graphs."""
    flags, logs = "--dp 2 --tp 2 --dtype bf16 --steps 60 --save-every 50 --log-every 1 --out".split(), []
    assert not refusal_of_layout([*flags, "out"], 1, 1)
    if GPUS < 4:
        pytest.skip("needs 4 GPUs")
    for out in (tmp_path / "out", tmp_path / "again"):
        if logs:
            shutil.copytree(tmp_path / "out", out)
            shutil.rmtree(out / "step-00000060")
        printed = command(sys.executable, "train.py", *flags, str(out))
        logs.append(log_of(out, "loss", "grad_norm"))
    assert "cuda (NCCL)" in printed and "after step 50" in printed and log_of(out)[-1]["val_loss"] < 3
    assert len(logs[0]) == 60 and logs[0] == logs[1]


def test_a_process_with_threads_or_gpus_is_not_forked(monkeypatch):
    if sys.platform != "linux":
        pytest.skip("only Linux says how many threads there are")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(safe.launch, "_imported", safe.launch.threads())
    assert safe.launch.may_fork()
    with concurrent.futures.ThreadPoolExecutor(1) as one:
        one.submit(int).result()
        assert not safe.launch.may_fork()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not safe.launch.may_fork()
