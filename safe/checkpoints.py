"""Checkpoints that survive crashes and full disks, written, found again and checked."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import types
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from model import GPTConfig, shapes
from safe.files import crc_of_file, read_safetensors, sync_folder, write_file, write_safetensors
from safe.flags import BadInput, dashed, reject
from safe.huggingface import open_hf, write_hf
from train import Bytes, config_of, MOMENTS

# A crash or a full disk must not leave half a checkpoint that looks whole. So each is written into a folder called
# .step-00000200.part, which is renamed only when every byte is on the disk:
#
#     step-00000200/
#         config.json, model.safetensors   a Hugging Face GPT-2 folder; float32 masters where layers compute in 16 bits
#         vocab.json, merges.txt           of a tokenizer, if the run has one
#         optimizer.safetensors            exp_avg.NAME and exp_avg_sq.NAME of every parameter, whole
#         manifest.json                    step, settings, loss scale; size and CRC-32 of each file, and of itself
#
# It takes 12 bytes a parameter. Any layout can load it, because its tensors are whole. Nothing in it is pickled, so
# loading one runs no code.


# ----------------------------------------------------------------------------------------------------- a run's identity

NUMBERS = ("data", "steps", "batch_size", "lr", "min_lr", "warmup_steps", "weight_decay", "clip", "seed", "dtype",
           "reduce_dtype", "on_nan", "balance_rate")  # flags that decide the losses


def run_of(s, config, data):
    """A run's identity: what decides its losses, but not its layout. A run goes on in --out only with its own."""
    edges = slice(0, 1 << 20), slice(-1 << 20, None)  # of each part: reading all would take minutes
    crc = zlib.crc32(np.concatenate([tokens[edge] for tokens in data[:2] for edge in edges]).tobytes())
    return {**settled(s, config),
            "data": {"tokens": len(data[0]) + len(data[1]), "bytes": isinstance(data[2], Bytes), "crc32": crc}}


def settled(s, config):
    """The parts of `run_of` that flags decide."""
    flags = {name: getattr(s, name) for name in NUMBERS} | {"data": s.data and os.path.abspath(s.data)}
    start = {"init_from": s.init_from and os.path.abspath(s.init_from)}
    return {"flags": flags, "start": start, "model": dataclasses.asdict(config)}


def differences(there, here, parts=("model", "flags", "start", "data")):
    """How two results of `run_of` differ in what both know, in words. Data counts by its contents, not its path, so it
    may move."""
    found = []
    for part in parts:
        for key, value in here[part].items():
            known = there[part].get(key, value)
            if key != "data" and known != value:
                name = f"data: {key}" if part == "data" else dashed(key)
                found.append(f"{name} {known or 'none'} there, {value or 'none'} here")
    return found


# ------------------------------------------------------------------------------------------------------------- written

def write_checkpoint(out, manifest, config, dtype, get, texts):
    """Write a checkpoint into the folder `out`; OSError if that fails. get(label) returns one whole tensor at a time,
    in the order of Trainer.whole_tensors. manifest: all but the files and checksums. texts: {name: contents} of a
    tokenizer's files."""
    name = f"step-{manifest['step']:08}"
    part = os.path.join(out, f".{name}.part")
    try:
        files = write_hf(part, config, get, dtype)
        files["optimizer.safetensors"] = write_safetensors(
            os.path.join(part, "optimizer.safetensors"),
            {label: (dtype, shape) for label, shape in moments_of(config).items()}, get)
        files |= {file: write_file(os.path.join(part, file), text) for file, text in texts.items()}
        manifest = manifest | {"format": 1, "files": files}
        write_file(os.path.join(part, "manifest.json"), json.dumps(manifest | {"crc32": crc_of(manifest)}))
        sync_folder(part)
        os.rename(part, os.path.join(out, name))
        sync_folder(out)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        raise


def remove_old(out, keep):
    """Remove all checkpoints but the newest `keep`. Those of --plain stay."""
    ours = [path for path in checkpoints(out) if os.path.isdir(path)]
    for old in ours[:-keep]:
        gone = os.path.join(out, f".{os.path.basename(old)}.old")
        os.rename(old, gone)  # because a folder half removed must not look like a checkpoint
        shutil.rmtree(gone)


def moments_of(config):
    """{label: shape} of what AdamW keeps of all parameters."""
    return {f"{key}.{name}": shape for key in MOMENTS for name, shape in shapes(config).items()}


def crc_of(value):
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


# ------------------------------------------------------------------------------------------------- found again, checked

@dataclass
class Checkpoint:
    path: str
    manifest: dict
    config: GPTConfig
    source: Callable  # source(name): a whole parameter
    moments: dict     # {label: whole tensor}; these and the parameters are read when used
    tokenizer: str    # folder of the tokenizer's files, "" if the run had none


def open_plain(path):
    """A file step-00000200.pt, as the reference writes it. Its manifest says of the data only whether it is bytes."""
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        s = types.SimpleNamespace(**{"on_nan": "stop", "init_from": "", "tokenizer": "", **saved["flags"]})
        config, tensors = config_of(s), saved["tensors"]
        manifest = {"step": saved["step"], "updates": saved["step"] - saved["skipped"], "skipped": saved["skipped"],
                    "scaler": saved["scaler"], "run": {**settled(s, config), "data": {"bytes": not s.tokenizer}}}
    except Exception as error:  # noqa: BLE001  a damaged or hostile file can make the unpickler raise anything
        raise BadInput(f"--resume {path}: {why(error)}; give a whole file that --plain has written") from None
    weights = tensors | {"lm_head.weight": tensors["wte.weight"]}  # they are one
    return Checkpoint(path, manifest, config, weights.get, tensors, s.tokenizer)


def why(error):
    """An error in a few words of one line."""
    text = f"has no {error}" if isinstance(error, KeyError) else getattr(error, "strerror", None) or str(error)
    return text.partition("\n")[0]


def checkpoints(folder):
    """Paths of the complete checkpoints in a folder, --plain's files included, oldest first."""
    found = [str(path) for path in pathlib.Path(folder).glob("step-*")
             if re.fullmatch(r"step-\d{8,}(\.pt)?", path.name)]
    return sorted(found, key=lambda path: (int(pathlib.Path(path).stem[5:]), not path.endswith(".pt")))


def open_checkpoint(path, read_all):
    """The Checkpoint at path. BadInput names what is missing or damaged. read_all: check all bytes, not only sizes."""
    if str(path).endswith(".pt"):
        return open_plain(path)
    file = "manifest.json"
    try:
        manifest = json.loads(pathlib.Path(path, file).read_text())
        if manifest.pop("crc32") != crc_of(manifest):
            raise ValueError("it does not match its own checksum")
        if manifest["format"] != 1:
            raise ValueError(f"its format is {manifest['format']}, this train.py reads 1")
        for file, entry in manifest["files"].items():
            size = os.path.getsize(os.path.join(path, file))
            if size != entry["bytes"]:
                raise ValueError(f"it has {size:,} bytes, by the manifest {entry['bytes']:,}")
            if read_all and crc_of_file(os.path.join(path, file)) != entry["crc32"]:
                raise ValueError("its checksum is not the manifest's")
        file = "tensors"
        config, source = open_hf(path)
        moments = read_safetensors(os.path.join(path, "optimizer.safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"--resume {path}: {file}: {why(error)}; move that folder away to go on from the checkpoint "
                       "before, or give a whole one") from None
    return Checkpoint(path, manifest, config, source, moments, path if "vocab.json" in manifest["files"] else "")


def find_checkpoint(s, read_all):
    """The Checkpoint that --resume asks for, or None."""
    if not s.resume:
        return None
    reject(s.resume == "newest" and not s.out, "--resume without a value goes on in --out: give --out DIR too")
    path = s.out if s.resume == "newest" else s.resume
    newest = (checkpoints(path) or [path])[-1]
    is_one = newest != path or path.endswith(".pt") or "step-" in path or os.path.exists(f"{path}/manifest.json")
    reject(not is_one, f"--resume {path}: holds no complete checkpoint; leave --resume out to begin anew")
    return open_checkpoint(newest, read_all)
