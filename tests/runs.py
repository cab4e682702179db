"""Runs of the programs, in this process, in a pool's and in processes of their own."""

import contextlib
import gc
import inspect
import io
import json
import operator
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as torch_dist

import fast.run
import further.resume
import safe.flags
import safe.launch
import safe.run
import train
from tests.pool import HERE, forkserver


# ------------------------------------------------------------------------------------------------------------- training

TINY = "--n-layer 1 --n-head 2 --n-embd 16 --seq-len 16 --batch-size 8 --log-every 1".split()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    # Bytes of each tensor peer's.
    path.write_text("".join(f"line {i} of {i * i}: the quick brown föx\n" for i in range(2000)), "utf-8")
    return str(path)


def parse(arguments):
    """What the whole program makes of a command line."""
    return train.parse(safe.flags.Parser(**train.ABOUT), safe.flags.Settings, arguments)


def run_training(flags):
    """train.py's own run, in this pool's processes and on their device, which `--device auto` need not find."""
    device = torch.get_default_device()
    with torch.device("cpu"):  # as when it is started
        run = safe.run.Run(["--device", device.type, *flags], train.Trainer, fast.run)
        try:
            saved, _ = run.train(device)
            return saved
        finally:
            if run.lock:
                run.lock.close()


@pytest.fixture
def trained(pool, text, tmp_path):
    """trained(size, flags): trains a tiny model on `text` in a pool. In the flags, OUT stands for the test's folder."""
    def run(size, flags, train=run_training):
        words = ["--device", pool(size).device_type, *flags.replace("OUT", str(tmp_path)).split()]
        return pool(size).run(train, [*TRAIN, "--data", text, *words])
    return run


def printed_by(function, *args, **options):
    """What it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        function(*args, **options)
    return out.getvalue()


def output_of(main, *words):
    """What a program's `main` prints in this process, with these words behind its name."""
    with patch.object(sys, "argv", ["", *map(str, words)]):
        return printed_by(main)


def log_of(folder, *keys):
    """Entries of log.jsonl; with keys, these values of the entries that have them all."""
    entries = [json.loads(line) for line in open(os.path.join(folder, "log.jsonl"))]
    return [operator.itemgetter(*keys)(entry) for entry in entries if {*keys} <= {*entry}] if keys else entries


# -------------------------------------------------------------------------------------------------- starting and ending

def command(*words):
    """What a command prints in this project's folder. It must end within ten minutes, with exit code 0."""
    done = subprocess.run(words, cwd=HERE, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, timeout=600,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout


def processes(parent=None):
    """Pids of all processes, or of those that this one has started."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            state, ppid = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z" and parent in (None, int(ppid)):
                found.append(int(process.name))
    return found


# -------------------------------------------------------------------------------------------------- checkpoints, faults
#
# Here processes die, so they are not the pool's: `Ranks` runs train.py in new ones, started as torchrun would but in a
# tenth of its time, because they are copies of one that has imported PyTorch.

slow = pytest.mark.skipif(not os.environ.get("SLOW"), reason="takes minutes: SLOW=1 pytest test_all.py")


def _rank(rank, size, port, flags, log, before, program, folder, forks):
    gc.freeze()
    torch.set_num_threads(1)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    if before:
        before()
    if size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    inspect.getmodule = lambda *_: None  # torchrun asks again and again, and this copy has thousands of modules
    if forks:  # this copy has none of the threads that were counted there
        safe.launch._imported = safe.launch.threads()
    if folder != HERE:
        import_from(folder)
    sys.argv = [os.path.join(folder, program), *flags]
    if program.endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)  # `python -m program`


def import_from(folder):
    """From now on modules come from this folder, none from this file's."""
    sys.path[:] = [folder, *(path for path in sys.path if path and os.path.abspath(path) not in (HERE, folder))]
    here = pathlib.Path(HERE)
    ours = {path.stem for path in here.glob("*.py")} | {path.parent.name for path in here.glob("*/*.py")}
    for name in [*sys.modules]:
        if name.split(".")[0] in ours:
            del sys.modules[name]


class Ranks:
    """`size` processes of one run, of train.py or another program, which may be killed. What they print goes to `log`.

    others: {rank: flags that it has besides}. before: called in each of them first. folder: one with the reference's
    files alone, whose program runs in place of the whole one. launcher: it starts processes of its own, by "fork" or
    from "new", and the test must see to its end."""

    def __init__(self, flags, size, log, before=None, program="train.py", folder=HERE, launcher=None, others=None):
        # Theirs; it survives them.
        self.store = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        open(log, "a").close()
        self.log, self.since = str(log), os.path.getsize(log)  # of what comes, not of what another run has left there
        self.processes = []
        for r in range(size):
            own = [*flags, *(others or {}).get(r, "").split()]
            settings = r, size, self.store.port, own, self.log, before, program, folder, launcher == "fork"
            self.processes.append(forkserver().Process(target=_rank, args=settings, daemon=not launcher))
        for process in self.processes:
            process.start()

    def kill(self, rank, sig=signal.SIGKILL):
        os.kill(self.processes[rank].pid, sig)

    def printed(self):
        with open(self.log) as file:
            file.seek(self.since)
            return file.read()

    def wait_for(self, text, timeout=200):
        deadline = time.time() + timeout
        while text not in self.printed():
            assert time.time() < deadline and any(p.is_alive() for p in self.processes), self.printed()
            time.sleep(0.02)

    def end(self, timeout=200):
        """Their exit codes, which must come within `timeout` seconds."""
        deadline = time.time() + timeout
        for p in self.processes:
            p.join(max(0, deadline - time.time()))
        codes = [p.exitcode for p in self.processes]
        for p in self.processes:
            p.kill()
        assert None not in codes, f"{codes}\n{self.printed()}"
        return codes

    def said(self, codes=None):
        """What they print that end with these exit codes; left out, all with 0."""
        assert self.end() == (codes or [0] * len(self.processes)), self.printed()
        return self.printed()


def ran(flags, size, log, codes=None, **more):
    return Ranks(flags, size, log, **more).said(codes)


@pytest.fixture
def start(text, tmp_path):
    """start(flags, size): `Ranks` that train a tiny model on `text`. In the flags, OUT stands for the test's folder."""
    def begin(flags, size=1, log="log", **more):
        words = [*TRAIN, "--data", text, *flags.replace("OUT", str(tmp_path)).split()]
        return Ranks(words, size, tmp_path / log, **more)
    return begin


TRAIN = TINY + "--device cpu --eval-every 0 --sample 0".split()


def end_of(run):
    """(step of the newest checkpoint, losses in the order of the log, checksums of its files, steps left out, loss
    scale) of a run's folder."""
    newest = further.resume.open_checkpoint(further.resume.checkpoints(run)[-1], True).manifest
    return newest["step"], log_of(run, "step", "loss"), newest["files"], newest["skipped"], newest["scaler"]
