"""Checkpoints that survive crashes and full disks, written, found again and checked; and whose run a folder holds."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import re
import shutil
import socket
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from further.flags import config_of
from further.resume import lacking, MOMENTS, unknown
from further.text import Bytes
from model import GPTConfig, shapes
from parallel import master_dtype
from safe.files import (
    crc_of_file, keep_others, read_safetensors, sync_folder, UNKNOWN, warn_once, writable, write_file,
    write_safetensors)
from safe.flags import dashed, Settings
from safe.huggingface import open_hf, shortened, weight_files, write_hf
from safe.sizes import BadInput, reject

# A crash or a full disk must not leave half a checkpoint that looks whole. So each is written into a folder called
# .step-00000200.part, which is renamed only when every byte is on the disk:
#
#     step-00000200/
#         config.json, model.safetensors   a Hugging Face GPT-2 folder; float32 masters where layers compute in 16 bits
#         tokenizer.json, ...              what came with the weights, or with --tokenizer
#         optimizer.safetensors            exp_avg.NAME and exp_avg_sq.NAME of every parameter, whole
#         manifest.json                    step, settings, loss scale; size and CRC-32 of each file, and of itself
#
# It takes 12 bytes a parameter. Any layout can load it, because its tensors are whole. Nothing in it is pickled, so
# loading one runs no code.


# ----------------------------------------------------------------------------------------------------- a run's identity

NUMBERS = ("data", "steps", "batch_size", "lr", "min_lr", "warmup_steps", "weight_decay", "clip", "seed", "dtype",
           "on_nan", "balance_rate", "optimizer", "pack")  # flags that decide the losses


def run_of(s, config):
    """A run's identity: what decides its losses, but not its layout. A run goes on in --out only with its own. Of the
    data it says nothing: `fingerprint` does, when the data is read."""
    flags = {name: getattr(s, name) for name in NUMBERS} | {"data": s.data and os.path.abspath(s.data)}
    start = {"init_from": s.init_from and os.path.abspath(s.init_from), "weights": crc_of_weights(s.init_from)}
    model = {"experts": 0, **dataclasses.asdict(config), "arch": config.arch, "inner": config.hidden,
             "n_kv_head": config.kv_heads, "head_size": config.head_dim}
    return {"flags": flags, "start": start, "model": model, "data": {}}


def fingerprint(train, held_out, vocabulary):
    """The identity of a Trainer's data."""
    edges = [edge for part in (train, held_out) for edge in (part[:1 << 20], part[-1 << 20:])]  # all would take minutes
    return {"tokens": len(train) + len(held_out), "bytes": isinstance(vocabulary, Bytes),
            "crc32": zlib.crc32(np.concatenate(edges).tobytes())}


def crc_of_weights(folder):
    """The identity of the weights in a folder of --init-from; 0 without one."""
    crc = 0
    for file in weight_files(folder) if folder else ():
        data = np.memmap(file, np.uint8, "r")
        for edge in data[:1 << 20], data[-1 << 20:]:
            crc = zlib.crc32(edge, crc)
    return crc


def differences(there, here, parts=("model", "flags", "start", "data")):
    """How two results of `run_of` differ in what both know, in words. Data and weights count by their contents, not
    their paths, so they may move."""
    found = []
    for part in parts:
        for key, value in here[part].items():
            known = there[part].get(key, value)
            moved = key == "data" or key == "init_from" and "weights" in there[part]
            if known != value and not moved:
                name = f"data: {key}" if part == "data" else dashed(key)
                if key == "weights":
                    name = "weights of --init-from"
                    known = there[part]["init_from"]
                    value = here[part]["init_from"]
                found.append(f"{name} {shown(known)} there, {shown(value)} here")
    return found


def shown(value):
    return "none" if value in (None, "") else value


# ------------------------------------------------------------------------------------------------------------- written

def write_checkpoint(trainer, done, tensors):
    """Write the checkpoint after `done` steps into --out, and remove all but the newest --keep; those of --plain stay,
    and those with somebody's files. OSError if that fails. tensors: of `whole_tensors` of further/resume.py, gathered
    one at a time, in the order of the files."""
    final = pathlib.Path(trainer.s.out, f"step-{done:08}")
    part = final.with_name(f".{final.name}.part")
    dtype = master_dtype(trainer.net.layout.dtype)
    moments = {f"{label}.{name}": shape for label in MOMENTS for name, shape in shapes(trainer.config).items()}
    manifest = {"format": 1, "step": done, "skipped": trainer.skipped,
                "scaler": trainer.scaler and vars(trainer.scaler), "run": trainer.run.identity}
    try:
        files = manifest["files"] = write_hf(part, trainer.config, tensors, dtype, trainer.run.came,
                                             token_ids(trainer.vocabulary))
        files["optimizer.safetensors"] = write_safetensors(part / "optimizer.safetensors", dtype, moments, tensors)
        write_file(part / "manifest.json", json.dumps(manifest | {"crc32": crc_of(manifest)}))
        sync_folder(part)
        os.rename(part, final)
        sync_folder(final.parent)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        raise
    ours = [path for path in checkpoints(final.parent) if path.is_dir() and has_no_others(path)]
    for old in ours[:-trainer.s.keep]:
        gone = old.with_name(f".{old.name}.old")
        os.rename(old, gone)  # because a folder half removed must not look like a checkpoint
        shutil.rmtree(gone)


def token_ids(vocabulary):
    """The numbers of the tokens that begin and end a text."""
    numbers = getattr(vocabulary, "numbers", {})
    end = numbers.get(getattr(vocabulary, "end", None))
    return {"bos_token_id": numbers.get(getattr(vocabulary, "begin", None), end), "eos_token_id": end}


def has_no_others(path):
    """Whether a folder is a checkpoint, and has no file but its own."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return {*os.listdir(path)} == {"manifest.json", *json.loads((path / "manifest.json").read_text())["files"]}
    return False


def crc_of(value):
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


# ------------------------------------------------------------------------------------------------- found again, checked

@dataclass
class Checkpoint:
    path: pathlib.Path
    manifest: dict    # and under "tensors" the moments, {label: whole tensor}
    config: GPTConfig
    source: Callable  # source(name): a whole parameter; tensors are read when used


def checkpoints(folder):
    """Paths of the complete checkpoints in a folder, --plain's files included, oldest first."""
    found = [path for path in pathlib.Path(folder).glob("step-*") if re.fullmatch(r"step-\d{8,}(\.pt)?", path.name)]
    return sorted(found, key=lambda path: (int(path.stem[5:]), path.suffix != ".pt"))


def find_checkpoint(s, read_all):
    """The Checkpoint that --resume asks for, or None."""
    if not s.resume:
        return None
    reject(s.resume == "newest" and not s.out, "--resume without a value goes on in --out: give --out DIR too")
    path = pathlib.Path(s.out if s.resume == "newest" else s.resume)
    found = checkpoints(path)
    is_one = path.suffix == ".pt" or "step-" in path.name or (path / "manifest.json").exists()
    reject(not found and not is_one, f"--resume {path}: holds no complete checkpoint; leave --resume out to begin anew")
    return open_checkpoint(found[-1] if found else path, read_all)


def open_checkpoint(path, read_all):
    """The Checkpoint at path. BadInput names what is missing or damaged. read_all: check all bytes, not only sizes."""
    if path.suffix == ".pt":
        return open_plain(path)
    name = "manifest.json"
    try:
        manifest = json.loads((path / name).read_text())
        reject(manifest.pop("crc32") != crc_of(manifest), "it does not match its own checksum")
        reject(manifest["format"] != 1, f"its format is {manifest['format']}, this train.py reads 1")
        for name, entry in manifest["files"].items():
            size = (path / name).stat().st_size
            reject(size != entry["bytes"], f"it has {size:,} bytes, by the manifest {entry['bytes']:,}")
            reject(read_all and crc_of_file(path / name) != entry["crc32"], "its checksum is not the manifest's")
        name = "tensors"
        config, source = open_hf(path)
        if (seq_len := manifest["run"]["model"]["seq_len"]) < config.seq_len:  # of a Llama, whose folder knows more
            config, source = shortened(config, source, seq_len)
        manifest["tensors"] = read_safetensors(path / "optimizer.safetensors")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"--resume {path}: {name}: {why(error)}; move that folder away to go on from the checkpoint "
                       "before, or give a whole one") from None
    how = unknown(manifest["run"]["flags"] | manifest["run"]["model"])
    reject(how, f"--resume {path}: {how}: name another")
    return Checkpoint(path, manifest, config, source)


def open_plain(path):
    """A file step-00000200.pt, as the reference writes it. No tokenizer lies beside it, so a flag says where it is. Of
    the data it is known only whether it is bytes."""
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        s = Settings(**{name: value for name, value in saved["flags"].items() if hasattr(Settings, name)})
        tensors = saved["tensors"]
        config = config_of(s)
        run = run_of(s, config) | {"data": {"bytes": not s.tokenizer}}
        run["flags"]["tokenizer"] = s.tokenizer
    except Exception as error:  # noqa: BLE001  a damaged or hostile file can make the unpickler raise anything
        raise BadInput(f"--resume {path}: {why(error)}; give a whole file that --plain has written") from None
    how = unknown(saved["flags"])
    reject(how, f"--resume {path}: {how}: name another")
    weights = {"lm_head.weight": tensors["wte.weight"]} | tensors  # a tied head is not there
    return Checkpoint(path, saved | {"run": run}, config, weights.get)


def why(error):
    """An error in a few words of one line."""
    text = f"has no {error}" if isinstance(error, KeyError) else getattr(error, "strerror", None) or str(error)
    return text.partition("\n")[0]


# -------------------------------------------------------------------------------------------------- the folder of --out

def start_of(s, config, asked, read_all):
    """(the Checkpoint to go on from, the identity of the run in --out), each None if there is none. asked: the
    Checkpoint of --resume; None takes the newest in --out. BadInput if --out holds another run.

    Data is not compared, because this comes before a text is encoded into --out."""
    out = pathlib.Path(s.out)
    found = checkpoints(s.out)
    for name in "run.json", "index.html", ".lock":
        keep_others(out / name, "--out")
    if asked:
        own = asked.path.resolve().parent
        is_it = [path.samefile(asked.path) for path in checkpoints(own)]  # no one, if it has been renamed
        away = " and move newer ones away" * (not any(is_it[-1:]))
        ways = [f"give --out {own}{away}"] * any(is_it) + begin_anew(f"{out}-2" if found else "", s, asked)
        reject(not found or not found[-1].samefile(asked.path), f"--resume {asked.path}: a run goes on in its own "
               f"folder, from the newest checkpoint there: {', or '.join(ways)}")
        return asked, asked.manifest["run"]
    newest = open_checkpoint(found[-1], read_all) if found else None
    logged = (out / "log.jsonl").exists()  # asked first: rank 0 may be writing run.json, and then the log, meanwhile
    try:
        there = json.loads((out / "run.json").read_text())
    except (OSError, ValueError):
        there = newest and newest.manifest["run"]
    another = f"name a new folder, e.g. --out {out}-2"
    reject(not there and logged, f"--out {out} already holds files of a run, and no run.json "
           f"that says which: {another}")
    here = run_of(s, config)
    why = there and unknown(there["flags"] | there["model"])
    reject(why, f"--out {out} holds another run: {why}: {another}")
    if there and (how := differences(there, here)):
        same = (newest and not differences(there, here, ("model",))
                and not lacking(there["flags"], s))
        without = "leave --init-from out and " * bool(s.init_from)
        raise BadInput(f"--out {out} holds another run ({'; '.join(how[:3])}): {another}"
                       + f", or {without}add --resume" * bool(same))
    return newest, there


def check_optimizer(s, checkpoint):
    """Reject an optimizer that would go on from what another has not kept."""
    why = lacking(checkpoint.manifest["run"]["flags"], s)
    reject(why and checkpoint.manifest["step"] < s.steps,
           ", or ".join([why, *begin_anew(s.out and f"{s.out}-2", s, checkpoint)]))


def check_same_data(s, known, here, checkpoint):
    """Reject data that is not what a run was trained on. known, here: what `run_of` says of that run and of this."""
    how = differences(known, here, ("data",))
    ways = ["give that", *begin_anew(s.out and f"{s.out}-2", s, checkpoint)]
    reject(how, f"--data {s.data or '(the standard library)'} is not what this run was trained on ({'; '.join(how)}): "
           + ", or ".join(ways))


def begin_anew(out, s, checkpoint):
    """[how a new run begins from a checkpoint's weights]; [] of one of --plain's, which --init-from cannot read."""
    if checkpoint and checkpoint.path.suffix == ".pt":
        return []
    flags = f" --out {out}" * bool(out) + (f" --init-from {checkpoint.path}" if checkpoint else "")
    return [f"for a new run give{flags}" + " and leave --resume out" * bool(s.resume)] * bool(flags)


def lock(folder, identity):
    """Make --out this run's own, on rank 0, and keep a second run from writing there.

    Returns the file .lock, which is locked until it is closed or this process ends. It names the process. The
    process that starts the ranks keeps its lock for them. Rank 0 empties the file when all is saved; the process that
    started the ranks looks at it to choose its exit code."""
    out = pathlib.Path(folder)
    with writable(out, "--out"):
        file = (out / ".lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = (out / ".lock").read_text().strip() or "another run"
            starter = f"process {os.getppid()} on {socket.gethostname()}" if "RANK" in os.environ else ""
            reject(holder != starter, f"--out {out}: {holder} writes there; wait for its end, or give --out {out}-2 "
                   "and leave --resume out")
        except OSError as error:
            if error.errno not in (*UNKNOWN, errno.ENOLCK):
                raise
            warn_once(f"the filesystem of --out has no locks ({error.strerror}): nothing keeps a second run out of it")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        write_file(out / "run.json", json.dumps(identity))
        for path in out.iterdir():  # a killed run leaves folders half written or half removed
            if re.fullmatch(r"\.step-\d{8,}\.(part|old)", path.name) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
    return file
