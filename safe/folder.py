"""The folder of --out: whose run it holds, the lock that keeps others out, and its log."""

import contextlib
import errno
import fcntl
import json
import math
import os
import pathlib
import re
import shutil
import socket
import tempfile

from safe.checkpoints import checkpoints, differences, open_checkpoint
from safe.files import write_file
from safe.flags import BadInput, reject


def start_of(s, identity, asked, read_all):
    """(the Checkpoint to go on from or None, the run's identity). asked: the Checkpoint of --resume; None takes the
    newest in --out. BadInput if --out holds another run."""
    found, folder = checkpoints(s.out), s.out.rstrip("/")
    if asked:
        home = os.path.dirname(os.path.abspath(asked.path))
        reject(not found or not os.path.samefile(found[-1], asked.path), f"--resume {asked.path}: a run goes on in its "
               f"own folder, from the newest checkpoint there: give --out {home} and move newer ones away; or begin "
               f"another run from its weights, with --init-from {asked.path}")
        return asked, identity | {"start": asked.manifest["run"]["start"]}
    newest = open_checkpoint(found[-1], read_all) if found else None
    try:
        there = json.loads(pathlib.Path(s.out, "run.json").read_text())
    except (OSError, ValueError):
        there = newest and newest.manifest["run"]
    another = f"name a new folder, e.g. --out {folder}-2"
    reject(not there and os.path.exists(os.path.join(s.out, "log.jsonl")), f"--out {s.out} already holds files of a "
           f"run, and no run.json that says which: {another}")
    if there and (how := differences(there, identity)):
        raise BadInput(f"--out {s.out} holds another run ({'; '.join(how[:3])}): {another}"
                       + ", or add --resume" * bool(newest and not differences(there, identity, ("model", "data"))))
    return newest, identity


@contextlib.contextmanager
def writable(folder, name):
    """Make the folder that flag `name` asks for. BadInput if that fails, or what is written inside."""
    try:
        os.makedirs(folder, exist_ok=True)
        yield
    except OSError as error:
        raise BadInput(f"{name} {folder}: {error.strerror}; name a folder that can be written") from None


def check_folder(folder, name):
    with writable(folder, name), tempfile.TemporaryFile(dir=folder):
        pass


def lock(folder, identity):
    """Make --out this run's own, on rank 0, and keep a second run from writing there.

    Returns the file .lock, which is locked until it is closed or this process ends. It names the process. Rank 0
    empties it when all is saved; the process that started the ranks looks at it to choose its exit code."""
    path = pathlib.Path(folder, ".lock")
    with writable(folder, "--out"):
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"--out {folder}: {path.read_text().strip() or 'another run'} writes there; name another "
                           f"folder, e.g. --out {folder.rstrip('/')}-2") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        write_file(os.path.join(folder, "run.json"), json.dumps(identity))
        for name in os.listdir(folder):  # a killed run leaves folders half written or half removed
            if re.fullmatch(r"\.step-\d+\.(part|old)", name):
                shutil.rmtree(os.path.join(folder, name))
    return file


class Log:
    """log.jsonl, an entry a line. If the disk is full, entries are lost, and no line is cut in two.

    step: a run that resumes drops the entries of later steps, because it will write them again."""

    def __init__(self, path, step):
        kept = []
        with contextlib.suppress(FileNotFoundError), open(path) as file:
            for line in file:
                with contextlib.suppress(ValueError):  # a line that a power cut left incomplete
                    kept += [line] if json.loads(line)["step"] <= step else []
        write_file(path, "".join(kept))
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def write(self, entry):
        """Write entry, {"step": ..., ...}; nan and inf become text. Returns the OSError if it is lost, else None."""
        odd = {key: str(n) for key, n in entry.items() if isinstance(n, float) and not math.isfinite(n)}
        line = json.dumps(entry | odd).encode() + b"\n"
        size = os.fstat(self.file).st_size
        try:
            if os.write(self.file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self.file, size)
            return error
