"""Checkpoints that survive crashes and full disks, the lock of --out, and its log."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import pathlib
import re
import shutil
import socket
import types
import zlib
from dataclasses import dataclass

import numpy as np
import torch

import parallel
from model import buffers, GPTConfig, shapes
from safe.files import crc_of_file, read_safetensors, write_file
from safe.flags import BadInput, reject
from safe.huggingface import open_hf
from train import config_of, DTYPES, MOMENTS


# --------------------------------------------------------------------------------------------- checkpoints that survive
#
# A crash or a full disk must not leave half a checkpoint that looks whole. So each is written into a folder called
# .step-00000200.part, which is renamed only when every byte is on the disk:
#
#     step-00000200/
#         config.json, model.safetensors   a Hugging Face GPT-2 folder; float32 masters where layers compute in 16 bits
#         optimizer.safetensors            exp_avg.NAME and exp_avg_sq.NAME of every parameter, whole
#         manifest.json                    step, settings, loss scale; size and CRC-32 of each file, and of itself
#
# It takes 12 bytes a parameter. Any layout can load it, because its tensors are whole. Nothing in it is pickled, so
# loading one runs no code.

NUMBERS = ("data", "steps", "batch_size", "lr", "min_lr", "warmup_steps", "weight_decay", "clip", "seed", "dtype",
           "reduce_dtype", "on_nan")  # flags that decide the losses


@dataclass
class Checkpoint:
    path: str
    manifest: dict

    def open(self):
        """(GPTConfig, source of weights)"""
        return open_hf(self.path)


@dataclass
class PlainCheckpoint(Checkpoint):
    """A file step-00000200.pt, as the reference writes it. Its manifest says nothing of the data but that it is bytes.
    """
    config: GPTConfig
    tensors: dict

    def open(self):
        return self.config, lambda name: self.tensors["wte.weight" if name == "lm_head.weight" else name]


def open_plain(path):
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        s = types.SimpleNamespace(**{"on_nan": "stop", "init_from": "", **saved["flags"]})
        config, tensors = config_of(s), saved["tensors"]
        for name, shape in {**shapes(config), **buffers(config)}.items():
            if tuple(tensors[name].shape) != shape:
                raise ValueError(f"{name} is {tuple(tensors[name].shape)}, its flags make it {shape}")
        manifest = {"step": saved["step"], "updates": saved["step"] - saved["skipped"], "skipped": saved["skipped"],
                    "scaler": saved["scaler"], "run": {**settled(s, config), "data": {"bytes": True}}}
    except Exception as error:  # noqa: BLE001  a damaged or hostile file can make the unpickler raise anything
        why = f"has no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
        raise BadInput(f"--resume {path}: {why}; give a whole file that --plain has written") from None
    return PlainCheckpoint(path, manifest, config, tensors)


def run_of(s, config, data):
    """A run's identity: what decides its losses, but not its layout. A run goes on in --out only with its own."""
    edges = slice(0, 1 << 20), slice(-1 << 20, None)  # of each part: reading all would take minutes
    crc = zlib.crc32(np.concatenate([tokens[edge] for tokens in data[:2] for edge in edges]).tobytes())
    return {**settled(s, config),
            "data": {"tokens": len(data[0]) + len(data[1]), "bytes": bool(data[2]), "crc32": crc}}


def settled(s, config):
    """The parts of `run_of` that flags decide."""
    start = {"init_from": os.path.abspath(s.init_from)} if s.init_from else {}
    flags = {name: getattr(s, name) for name in NUMBERS} | {"data": s.data and os.path.abspath(s.data)}
    sizes = dataclasses.asdict(config)
    if config.experts:
        flags["balance_rate"] = s.balance_rate
    else:  # older manifests lack these keys, and must still match
        sizes = {name: value for name, value in sizes.items() if name not in ("experts", "top_k", "expert_every")}
    return {"flags": flags, "start": start, "model": sizes}


def differences(there, here, parts=("model", "flags", "start", "data")):
    """How two results of `run_of` differ, in words. Data counts by its contents, not its path, so it may move, and by
    what is known of the data there."""
    return [f"{'data: ' if part == 'data' else '--'}{key.replace('_', '-')} {a.get(key, 'none')} there, "
            f"{b.get(key, 'none')} here" for part in parts for a, b in [(there[part], here[part])]
            for key in (a if part == "data" else a | b)
            if a.get(key) != b.get(key) and (part, key) != ("flags", "data")]


def checkpoints(folder):
    """Paths of the complete checkpoints in a folder, --plain's files included, oldest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    names = [name for name in names if re.fullmatch(r"step-\d{8,}(\.pt)?", name)]
    return [os.path.join(folder, name) for name in sorted(names, key=lambda name: (int(name[5:].removesuffix(".pt")),
                                                                                  not name.endswith(".pt")))]


def crc_of(value):
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def open_checkpoint(path, read_all):
    """The Checkpoint at path. BadInput names what is missing or damaged. read_all: check all bytes, not only sizes."""
    if str(path).endswith(".pt"):
        return open_plain(path)
    file = os.path.join(path, "manifest.json")
    try:
        with open(file) as text:
            manifest = json.load(text)
        if manifest.pop("crc32") != crc_of(manifest):
            raise ValueError("it does not match its own checksum")
        if manifest["format"] != 1:
            raise ValueError(f"its format is {manifest['format']}, this train.py reads 1")
        for name in ("config.json", "model.safetensors", "optimizer.safetensors"):
            file, entry = os.path.join(path, name), manifest["files"][name]
            if os.path.getsize(file) != entry["bytes"]:
                raise ValueError(f"it has {os.path.getsize(file):,} bytes, by the manifest {entry['bytes']:,}: cut "
                                 f"short, or another file")
            if read_all and crc_of_file(file) != entry["crc32"]:
                raise ValueError("its checksum is not the manifest's: damaged, or another file")
        return Checkpoint(path, manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"has no {error}" if isinstance(error, KeyError) else getattr(error, "strerror", None) or error
        path = os.path.abspath(path)
        others = [os.path.basename(other) for other in checkpoints(os.path.dirname(path)) if other != path]
        instead = f"move that folder away to go on from {others[-1]}" if others else "give a complete checkpoint"
        raise BadInput(f"--resume {path}: {os.path.basename(file)}: {why}; {instead}") from None


def find_checkpoint(s, read_all):
    """The Checkpoint that --resume asks for, or None."""
    if not s.resume:
        return None
    reject(s.resume == "newest" and not s.out, "--resume without a value goes on in --out: give --out DIR too")
    folder = s.out if s.resume == "newest" else s.resume
    if folder.endswith(".pt") and os.path.isfile(folder):
        return open_checkpoint(folder, read_all)
    reject(not os.path.isdir(folder), f"--resume {folder}: no such folder; give one that a run with --out has written")
    is_one = os.path.basename(folder.rstrip("/")).startswith("step-")
    if not is_one and not os.path.exists(os.path.join(folder, "manifest.json")):
        found = checkpoints(folder)
        reject(not found, f"--resume {folder}: holds no complete checkpoint; leave --resume out to begin anew")
        folder = found[-1]
    return open_checkpoint(folder, read_all)


def read_moments(checkpoint, config):
    """{exp_avg.NAME or exp_avg_sq.NAME: whole tensor}, mapped from the file. BadInput if a name, shape or dtype is not
    this model's."""
    dtype = parallel.master_dtype(DTYPES[checkpoint.manifest["run"]["flags"]["dtype"]])
    if isinstance(checkpoint, PlainCheckpoint):
        path, moments = checkpoint.path, {name: tensor for name, tensor in checkpoint.tensors.items()
                                          if name.startswith(MOMENTS)}
    else:
        path = os.path.join(checkpoint.path, "optimizer.safetensors")
        try:
            moments = read_safetensors(path)
        except ValueError as error:
            raise BadInput(f"--resume {error}") from None
    want = {f"{key}.{name}": (shape, dtype) for key in MOMENTS for name, shape in shapes(config).items()}
    have = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in moments.items()}
    for name in want | have:
        reject(want.get(name) != have.get(name), f"--resume {path}: {name} is {have.get(name, 'missing')}, the model "
               f"makes it {want.get(name, 'nothing')}: give a checkpoint of this model")
    return moments


def start_of(s, identity, asked, read_all):
    """(the Checkpoint to go on from or None, the run's identity). asked: the Checkpoint of --resume; None takes the
    newest in --out. BadInput if --out holds another run."""
    found, folder = checkpoints(s.out), s.out.rstrip("/")
    another = f"name a new folder, e.g. --out {folder}-2"
    if asked:
        home = os.path.dirname(os.path.abspath(asked.path))
        reject(os.path.realpath(home) != os.path.realpath(s.out), f"--resume {asked.path}: a run goes on in its own "
               f"folder: give --out {home}; or begin another run from its weights, with --init-from {asked.path}")
        reject(os.path.realpath(found[-1]) != os.path.realpath(asked.path), f"--resume {asked.path}: {found[-1]} "
               "would be in the way of what follows: move it away, or go on from there")
        return asked, identity | {"start": asked.manifest["run"]["start"]}
    there = None
    with contextlib.suppress(OSError, ValueError), open(os.path.join(s.out, "run.json")) as file:
        there = json.load(file)
    if there is None and found and found[-1].endswith(".pt"):
        newest = open_checkpoint(found[-1], read_all)
        there = newest.manifest["run"]
    if there is None and (found or os.path.exists(os.path.join(s.out, "log.jsonl"))):
        raise BadInput(f"--out {s.out} already holds files of a run, and no run.json that says which: {another}")
    if there and (how := differences(there, identity)):
        raise BadInput(f"--out {s.out} holds another run ({'; '.join(how[:3])}): {another}"
                       + ", or add --resume" * bool(found and not differences(there, identity, ("model", "data"))))
    return open_checkpoint(found[-1], read_all) if found else None, identity


class Lock:
    """Keeps a second run from writing into the same --out, by a lock on its file .lock that lasts until this process
    ends. The file names the process. Rank 0 empties it when all is saved; the process that started the ranks looks at
    it to choose its exit code."""

    def __init__(self, folder):
        self.file = open(os.path.join(folder, ".lock"), "a+")  # noqa: SIM115  open, and locked, until the process ends
        fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self.file.flush()

    def mark_all_saved(self):
        self.file.truncate(0)  # possible even on a full disk

    def all_saved(self):
        return not os.path.getsize(self.file.name)


def claim(folder, identity):
    """Make --out this run's own, on rank 0. Returns its Lock."""
    check_folder(folder, "--out")
    try:
        lock = Lock(folder)
        write_file(os.path.join(folder, "run.json"), json.dumps(identity))
        for name in os.listdir(folder):  # a killed run leaves folders half written or half removed
            if re.fullmatch(r"\.step-\d+\.(part|old)", name):
                shutil.rmtree(os.path.join(folder, name))
    except OSError as error:
        why = error.strerror
        if error.errno == errno.EAGAIN:
            why = f"{pathlib.Path(folder, '.lock').read_text().strip() or 'another run'} writes there"
        raise BadInput(f"--out {folder}: {why}; name another folder, e.g. --out {folder.rstrip('/')}-2") from None
    return lock


def check_folder(folder, name):
    try:
        os.makedirs(folder, exist_ok=True)
        probe = pathlib.Path(folder, ".writable")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInput(f"{name} {folder}: {error.strerror}; name a folder that can be written") from None


class Log:
    """log.jsonl, an entry a line. If the disk is full, entries wait in memory for room, and no line is cut in two.

    step: a run that resumes drops the entries of later steps, because it will write them again."""

    def __init__(self, path, step):
        kept = []
        with contextlib.suppress(FileNotFoundError), open(path) as file:
            for line in file:
                with contextlib.suppress(ValueError):  # a line that a power cut left incomplete
                    kept += [line] if json.loads(line)["step"] <= step else []
        write_file(path, "".join(kept))
        self.file, self.waiting = os.open(path, os.O_WRONLY | os.O_APPEND), b""

    def write(self, entry):
        """Write entry, {"step": ..., ...}; nan and inf become text. Returns the OSError if entries have to wait, else
        None."""
        odd = {key: str(n) for key, n in entry.items() if isinstance(n, float) and not math.isfinite(n)}
        self.waiting += json.dumps(entry | odd).encode() + b"\n"
        size = os.fstat(self.file).st_size
        try:
            if os.write(self.file, self.waiting) < len(self.waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.waiting = b""
        except OSError as error:
            os.ftruncate(self.file, size)
            return error
