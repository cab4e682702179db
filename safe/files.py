"""Files that are whole or absent, the .safetensors format, and what a full disk must not harm.

A .safetensors file has a number n (8 bytes, little-endian), n bytes of JSON {name: {dtype, shape, data_offsets}}, and
then the tensors' bytes.
"""

import contextlib
import errno
import functools
import json
import math
import os
import pathlib
import re
import sys
import tempfile
import zlib

import numpy as np
import torch

from safe.sizes import BadInput, reject

SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
                      "U8": torch.uint8, "BOOL": torch.bool, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
                      "I64": torch.int64}


def read_safetensors(path):
    """{name: tensor} of a .safetensors file, mapped into memory and read when used. In place of a tensor in another
    dtype than the table's stands its dtype's name, because nobody may ask for it. ValueError if the file is damaged."""
    try:
        data = np.memmap(path, np.uint8, "c")  # what is written into it does not reach the file
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:start].tobytes())
        room = data[start:]
        tensors = {}
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            reject(begin < 0 or end > len(room), f"{name} lies outside the file: it is cut short or damaged")
            dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
            values = torch.from_numpy(room[begin:end])
            tensors[name] = values.view(dtype).view(entry["shape"]) if dtype else str(entry["dtype"])
        return tensors
    except Exception as error:  # noqa: BLE001  anything may stand in a damaged header
        raise ValueError(f"{path}: not a whole .safetensors file ({error})") from None


def write_safetensors(path, dtype, shapes, tensors):
    """Write {name: shape} in one dtype. tensors: an iterator of (name, tensor) in the same order, of which it takes no
    more than these, one at a time, so that memory need not hold all."""
    kind, = [kind for kind, known in SAFETENSORS_DTYPES.items() if known == dtype]
    header = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def blocks():
        yield len(text).to_bytes(8, "little") + text
        for name in shapes:
            found, tensor = next(tensors)
            assert found == name, f"{found} comes where {path} has {name}"
            yield tensor.detach().to("cpu", dtype).contiguous().view(-1).view(torch.uint8).numpy().data

    return write_blocks(path, blocks())


def write_file(path, text):
    return write_blocks(path, [text.encode()])


def write_blocks(path, blocks):
    """Write a file that has its name only when all of it is on the disk. Returns its {"bytes", "crc32"}."""
    size = crc = 0
    try:
        with open(f"{path}.part", "wb") as file:
            for block in blocks:
                file.write(block)
                size += len(block)
                crc = zlib.crc32(block, crc)
            file.flush()
            sync(file)
        os.replace(f"{path}.part", path)
    except OSError:  # a full disk, say
        with contextlib.suppress(OSError):
            os.unlink(f"{path}.part")
        raise
    return {"bytes": size, "crc32": crc}


# What a filesystem answers that does not know an operation at all.
UNKNOWN = errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP


def sync(file):
    """Bring a file to the disk. Where a filesystem cannot, that is said once, and costs nothing but the certainty."""
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in UNKNOWN:
            raise
        warn_once(f"the filesystem of --out cannot say when data is on the disk ({error.strerror}): a power cut may "
                  "lose the newest checkpoint")


def sync_folder(path):
    """Bring a folder to the disk: it holds its files' names, which a power cut could lose otherwise."""
    descriptor = os.open(path, os.O_RDONLY)
    sync(descriptor)
    os.close(descriptor)


def tell(text, file=None):
    """Print at once. What cannot be printed (a full disk, a closed pipe or terminal) must not end a run."""
    with contextlib.suppress(OSError):
        print(text + "\n", end="", file=file or sys.stdout, flush=True)  # in one write: lines of ranks do not mix


@functools.cache
def warn_once(text):
    tell(f"warning  {text}", sys.stderr)


def crc_of_file(path):
    crc = 0
    with open(path, "rb") as file:  # not mapped, because it may be empty
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


@contextlib.contextmanager
def writable(folder, name):
    """Make the folder that flag `name` asks for. BadInput if that fails, or what is written inside."""
    try:
        os.makedirs(folder, exist_ok=True)
        yield
    except OSError as error:
        raise BadInput(f"{name} {folder}: {error.strerror}; name a folder that can be written") from None


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
# read as if it were a run's. (N: a number.)
OURS = {
    "run.json": rb'\A\{"flags": \{"data": "',
    "log.jsonl": rb'(?m)^\{"step": \d+, "',
    "index.html": rb'\A<!doctype html>\n<html lang="en"><meta charset="utf-8">.*\n<title>.*\n<style>\n  :root \{',
    ".lock": rb"\A(process \d+ on .*)?\Z",
    "manifest.json": rb'\A\{"format": \d+, "step": ',
    "trace.json": rb'\A\{"traceEvents": \[(\]|\{"name": "\w+ stage )',
    "rank-N.json": rb'"ringGPT"'}


def begins_with(path, pattern):
    if not os.path.isfile(path):  # a pipe would be waited for
        return False
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return bool(re.search(pattern, file.read(1 << 14)))
    return False


def is_ours(path):
    """Whether a run has written this file."""
    pattern = OURS.get(re.sub(r"\d+", "N", path.name))
    return bool(pattern) and begins_with(path, pattern)


def keep_others(path, name):
    """BadInput if at this path, in the folder that flag `name` asks for, is a file that no run has written."""
    reject(os.path.lexists(path) and not is_ours(path), f"{name} {path.parent}: the {path.name} there is no run's: "
           f"name a new folder, e.g. {name} {path.parent}-2")


class Log:
    """log.jsonl, an entry a line. If the disk is full, entries are lost, and no line is cut in two.

    step: a run that resumes drops the entries of later steps, because it will write them again. Lines that are no
    entries, somebody's notes, stay."""

    def __init__(self, path, step):
        kept = []
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            kept = [line for line in file if self.step_of(line) <= step]
        if kept and not kept[-1].endswith(b"\n"):
            kept.append(b"\n")
        write_blocks(path, kept)
        self.path = path

    def sync(self):
        with open(self.path, "a") as file:
            sync(file)

    @staticmethod
    def step_of(line):
        """Of an entry its step, of one that a power cut has cut short infinity, of any other line -1."""
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
            return int(json.loads(line)["step"])
        start = b'{"step": '
        return math.inf if line[:len(start)] == start[:len(line)] and not line.endswith(b"\n") else -1

    def write(self, entry):
        """Write entry, {"step": ..., ...}. Returns the OSError if it is lost, else None."""
        entry = json.loads(json.dumps(entry), parse_constant=str.lower)  # NaN is no JSON, so it becomes "nan"
        line = json.dumps(entry).encode() + b"\n"
        try:
            with open(self.path, "ab", buffering=0) as file:  # each time, because somebody may move it away
                size = file.tell()
                try:
                    while line:  # a full disk takes a part, and then raises the error
                        line = line[os.write(file.fileno(), line):]
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            return error
