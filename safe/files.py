"""Whose a file is, a log that a full disk does not harm, folders that can be written."""

import contextlib
import json
import math
import os
import pathlib
import re
import sys
import tempfile

from further.bad_input import BadInput, reject, writable
from further.folder import sync, write_blocks


def tell(text, file=None):
    """Print at once. What cannot be printed (a full disk, a closed pipe or terminal) must not end a run, nor a letter
    that the terminal's encoding lacks, as in a file's name."""
    file = file or sys.stdout
    encoding = file.encoding or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    with contextlib.suppress(OSError):
        print(text + "\n", end="", file=file, flush=True)  # in one write: lines of ranks do not mix


def check_folder(folder, name, files=""):
    """BadInput unless files can be written into the folder that flag `name` asks for, where none of these names (a
    pattern) is somebody else's."""
    if folder:
        with writable(folder, name), tempfile.TemporaryFile(dir=folder):
            pass
        for path in pathlib.Path(folder).glob(files) if files else ():
            keep_others(path, name)


def check_file(path, name, begins):
    """BadInput unless a file can be written at the path that flag `name` gives. One that is there must begin like those
    that we write."""
    try:
        with tempfile.TemporaryFile(dir=os.path.dirname(path) or "."):
            pass
    except OSError as error:
        raise BadInput(f"{name} {path}: {error.strerror}; name a file in a folder that can be written") from None
    start, end = os.path.splitext(path)
    reject(os.path.lexists(path) and not begins_with(path, begins), f"{name} {path}: is there, and not what would be "
           f"written: name a new file, e.g. {name} {start}-2{end}")


# Files that a run writes, and what stands in them near their beginning. Nothing else of these names is written over, or
# read as if it were a run's. What is empty or zeroed, after a power cut, is nobody's.
OURS = {
    r"run\.json": rb'\A\{"flags": \{"data": "',
    r"log\.jsonl": rb'(?m)^\{"step": \d+, "|\A\Z',
    r"index\.html": rb'\A<!doctype html>\n<html lang="en"><meta charset="utf-8">.*\n<title>.*\n<style>\n  :root \{',
    r"\.lock": rb"\A(process \d+ on .*)?\Z",
    r"manifest\.json": rb'\A\{"format": \d+, "step": ',
    r"trace\.json": rb'\A\{"traceEvents": \[(\]|\{"name": "\w+ stage )',
    r"rank-\d+\.json": rb'"ringGPT"',
    r"tokens-[0-9a-f]{16}-\d+\.bin": rb""}


def begins_with(path, pattern):
    if not os.path.isfile(path):  # a pipe would be waited for
        return False
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return bool(re.search(pattern, file.read(1 << 14)))
    return False


def is_ours(path):
    """Whether a run has written this file."""
    return any(re.fullmatch(name, path.name) and begins_with(path, pattern) for name, pattern in OURS.items())


def keep_others(path, name):
    """BadInput if at this path, in the folder that flag `name` asks for, is a file that no run has written."""
    empty = begins_with(path, rb"\A\0*\Z")
    reject(os.path.lexists(path) and not empty and not is_ours(path), f"{name} {path.parent}: the {path.name} there is "
           f"no run's: name a new folder, e.g. {name} {path.parent}-2")


class Log:
    """log.jsonl, an entry a line. If the disk is full, entries are lost, and no line is cut in two.

    step: a run that resumes drops the entries of later steps, because it will write them again. Lines that are no
    entries, somebody's notes, stay."""

    def __init__(self, path, step):
        self.path = path
        kept = []
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            kept = [line for line in file if self.step_of(line) <= step]
        if kept and not kept[-1].endswith(b"\n"):
            kept.append(b"\n")
        write_blocks(path, kept)

    @staticmethod
    def step_of(line):
        """Of an entry its step, of one that a power cut has cut short infinity, of any other line -1."""
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
            return int(json.loads(line)["step"])
        start = b'{"step": '
        return math.inf if line[:len(start)] == start[:len(line)] and not line.endswith(b"\n") else -1

    def opened(self):
        """Each time anew, because somebody may move the file away, or its folder."""
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        return open(self.path, "ab", buffering=0)

    def sync(self):
        with self.opened() as file:
            sync(file)

    def write(self, entry):
        """Write entry, {"step": ..., ...}. Returns the OSError if it is lost, else None."""
        entry = json.loads(json.dumps(entry), parse_constant=str.lower)  # NaN is no JSON, so it becomes "nan"
        line = json.dumps(entry).encode() + b"\n"
        try:
            with self.opened() as file:
                size = file.tell()
                try:
                    while line:  # a full disk takes a part, and then raises the error
                        line = line[os.write(file.fileno(), line):]
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            return error
