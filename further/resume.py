"""Checkpoints: how does a run go on, in any layout, as if it had never stopped?

    torchrun --nproc_per_node 2 train.py --plain --tp 2 --steps 50 --out runs/plain
    torchrun --nproc_per_node 2 train.py --plain --dp 2 --out runs/plain --resume

Batches and samples are functions of (seed, step), so the number of steps stands for the position in the data and the
state of every random generator. What remains is the weights, AdamW's moments and fp16's loss scale:

    step-00000200/
        config.json, model.safetensors   a Hugging Face folder; float32 masters where layers compute in 16 bits
        tokenizer.json, ...              with safe/: what came with the weights, or with --tokenizer
        optimizer.safetensors            exp_avg.NAME and exp_avg_sq.NAME of every parameter, whole
        manifest.json                    step, settings, loss scale; size and CRC-32 of each file, and of itself

It takes 12 bytes a parameter. A crash or a full disk must not leave half a checkpoint that looks whole. So each is
written into .step-00000200.part, and gets its name when every byte is on the disk.
"""

import dataclasses
import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Callable, NamedTuple

import torch

import collectives as dist
from further.bad_input import BadInput, reject
from further.flags import config_of, dashed, Flags, learning_rate, sizes_in
from further.folder import (
    hf_config, read_safetensors, source_of, sync_folder, write_file, write_folder, write_safetensors)
from further.kinds import resized
from further.text import Bytes
from further.whole import MOMENTS, set_updates, whole_tensor
from further import whole
from model import GPTConfig, shapes, shapes_of_all
from parallel import master_dtype


# ----------------------------------------------------------------------------------------------------- a run's identity

NUMBERS = ("data", "steps", "batch_size", "lr", "min_lr", "warmup_steps", "weight_decay", "clip", "seed", "dtype",
           "optimizer", "pack")  # flags that decide the losses


def run_of(s, config):
    """What decides a run's losses, but not its layout: its flags and its model."""
    flags = {name: getattr(s, name) for name in NUMBERS if hasattr(s, name)}
    model = {"experts": 0, **dataclasses.asdict(config), "arch": config.arch, "inner": config.hidden,
             "n_kv_head": config.kv_heads, "head_size": config.head_dim}
    return {"flags": flags, "start": {}, "model": model, "data": {}}


KEEPS = {"adamw": MOMENTS, "muon": ("exp_avg",)}  # what each --optimizer keeps of a matrix of a block
# Flags of other versions that decide a model or its losses, and the values with which a run is as without them.
UNKNOWN = {"islands": (1,), "latent": (None, 0), "delta_every": (None, 0), "expert_groups": (None, 1),
           "balance_rate": (1e-3,)}


def unknown(trained_with):
    """What a run was trained with that this program has not, in words; "" if there is nothing. trained_with: its
    flags."""
    for name, same in UNKNOWN.items():
        if (value := trained_with.get(name, same[0])) not in same:
            return f"it was trained with {dashed(name)} {value}, which this train.py does not have"
    return ""


def check_optimizer(trained_with, s):
    """BadInput if flags s cannot go on from what a run has kept. (A mean that begins with zeros, where the number of
    steps says that it is warm, would make steps many times too large.) trained_with: its flags."""
    there, here = trained_with.get("optimizer", "adamw"), s.optimizer
    lost = ", ".join(key for key in KEEPS[here] if key not in KEEPS[there])
    reject(lost, f"--optimizer {here} goes on from {lost}, which the --optimizer {there} in --resume has not kept: "
           f"give --optimizer {there}")


# ------------------------------------------------------------------------------------------------------------- written

def whole_tensors(trainer):
    """(label, tensor) of each parameter, "wte.weight", and of its moments, "exp_avg.wte.weight": whole, one at a time,
    on all ranks, because each gives its part."""
    for name in shapes_of_all(trainer.config):
        yield name, trainer.net.whole_parameter(name)
    for key in MOMENTS:
        for name in shapes(trainer.config):
            yield f"{key}.{name}", trainer.net.whole_parameter(name, key)


def whole_parameter(net, name, key=None):
    """A parameter or a buffer of a ParallelGPT, as whole.py's `whole_tensor`."""
    return whole_tensor(net, name, shapes_of_all(net.config)[name], key)


def save(trainer, done, run=None, said=None, beside=None):
    """Write the checkpoint after `done` steps into --out, on rank 0. Call it on all ranks. OSError on rank 0 if that
    fails. run: the run's identity; said: the contents of config.json; beside: {name: bytes} of other files."""
    tensors = whole_tensors(trainer)
    try:
        if dist.get_rank() == 0:
            run = run or run_of(trainer.s, trainer.config) | {"data": {"bytes": isinstance(trainer.vocabulary, Bytes)}}
            own = {name: text.encode() for name, text in getattr(trainer.vocabulary, "files", {}).items()}
            write(trainer, done, tensors, run, said, own if beside is None else beside)
    finally:
        for _ in tensors:  # the other ranks take part in gathering; so does rank 0 after an error, or they would hang
            pass


def write(trainer, done, tensors, run, said, beside):
    final = Path(trainer.s.out, f"step-{done:08}")
    part = final.with_name(f".{final.name}.part")
    config = trainer.config
    dtype = master_dtype(trainer.net.layout.dtype)
    moments = {f"{label}.{name}": shape for label in MOMENTS for name, shape in shapes(config).items()}
    manifest = {"format": 1, "step": done, "skipped": trainer.skipped,
                "scaler": trainer.scaler and vars(trainer.scaler), "run": run}
    try:
        if part.exists():  # of a run that was killed
            shutil.rmtree(part)
        files = manifest["files"] = write_folder(part, config, tensors, dtype, said or hf_config(config, dtype), beside)
        files["optimizer.safetensors"] = write_safetensors(part / "optimizer.safetensors", dtype, moments, tensors)
        write_file(part / "manifest.json", json.dumps(manifest | {"crc32": crc_of(manifest)}))
        sync_folder(part)
        os.rename(part, final)
        sync_folder(final.parent)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        raise


def crc_of(value):
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def crc_of_file(path):
    crc = 0
    with open(path, "rb") as file:  # not mapped, because it may be empty
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


# ------------------------------------------------------------------------------------------------- found again, checked

class Checkpoint(NamedTuple):
    path: Path
    manifest: dict    # and under "tensors" the moments, {label: whole tensor}
    config: GPTConfig
    source: Callable  # source(name): a whole parameter; tensors are read when used

    @property
    def step(self):
        return self.manifest["step"]

    @property
    def flags(self):
        return self.manifest["run"]["flags"]


def checkpoints(folder):
    """Paths of the complete checkpoints in a folder, oldest first. (Other versions' --plain wrote files, .pt.)"""
    found = [path for path in Path(folder).glob("step-*") if re.fullmatch(r"step-\d{8,}(\.pt)?", path.name)]
    return sorted(found, key=lambda path: (int(path.stem[5:]), path.suffix != ".pt"))


def find_checkpoint(s, read_all=True):
    """The Checkpoint that --resume asks for, or None. BadInput if there is no whole one. read_all: check all bytes,
    not only sizes."""
    if not s.resume:
        return None
    reject(s.resume == "newest" and not s.out, "--resume without a value goes on in --out: give --out DIR too")
    path = Path(s.out if s.resume == "newest" else s.resume)
    found = checkpoints(path)
    is_one = path.suffix == ".pt" or "step-" in path.name or (path / "manifest.json").exists()
    reject(not found and not is_one, f"--resume {path}: holds no complete checkpoint; leave --resume out to begin anew")
    return open_checkpoint(found[-1] if found else path, read_all)


def open_checkpoint(path, read_all=True):
    """The Checkpoint at path. BadInput names what is missing or damaged."""
    try:
        found = open_file(path) if path.suffix == ".pt" else open_folder(path, read_all)
        how = unknown(found.flags | found.manifest["run"]["model"])
    except Exception as error:  # noqa: BLE001  anything may stand in a damaged or hostile file
        why = f"has no {error}" if isinstance(error, KeyError) else getattr(error, "strerror", None) or str(error)
        named = "manifest.json" if isinstance(error, json.JSONDecodeError) else getattr(error, "filename", None)
        raise BadInput(f"--resume {path}: {f'{os.path.basename(named)}: ' if named else ''}{why.splitlines()[0]}; move "
                       "it away to go on from the checkpoint before, or give a whole one") from None
    reject(how, f"--resume {path}: {how}: name another")
    return found


def open_folder(path, read_all):
    manifest = json.loads((path / "manifest.json").read_text())
    reject(manifest.pop("crc32") != crc_of(manifest), "manifest.json: it does not match its own checksum")
    reject(manifest["format"] != 1, f"manifest.json: its format is {manifest['format']}, this train.py reads 1")
    for name, entry in manifest["files"].items():
        size = (path / name).stat().st_size
        reject(size != entry["bytes"], f"{name}: it has {size:,} bytes, by the manifest {entry['bytes']:,}")
        reject(read_all and crc_of_file(path / name) != entry["crc32"], f"{name}: its checksum is not the manifest's")
    model = manifest["run"]["model"]
    config = resized(GPTConfig(), **model)
    manifest["tensors"] = read_safetensors(path / "optimizer.safetensors")
    return Checkpoint(path, manifest, config, source_of(config, read_safetensors(path / "model.safetensors")))


def open_file(path):
    """A file step-00000200.pt, as --plain of other versions wrote it. No tokenizer lies beside it, so a flag says where
    it is. Of the data it is known only whether it is bytes."""
    saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    known = {field.name for field in dataclasses.fields(Flags)}
    s = Flags(**{name: value for name, value in saved["flags"].items() if name in known})
    config = config_of(s)
    run = run_of(s, config) | {"data": {"bytes": not s.tokenizer}}
    run["flags"] |= {name: saved["flags"][name] for name in (*UNKNOWN, "tokenizer") if name in saved["flags"]}
    weights = {"lm_head.weight": saved["tensors"].get("wte.weight")} | saved["tensors"]  # a tied head is not there
    return Checkpoint(path, saved | {"run": run, "files": {}}, config, weights.__getitem__)


# ------------------------------------------------------------------------------------------------------------ and back

def read_checkpoint(s, config, *_):
    """(the manifest of the checkpoint that --resume asks for, source(name) of its weights). BadInput if its model has
    other sizes than `config`."""
    found = find_checkpoint(s)
    here = run_of(s, config)["model"]
    there = found.manifest["run"]["model"]
    others = [f"{dashed(name)} {size}" for name, size in sizes_in(there).items() if size != here.get(name)]
    reject(there.items() - here.items(),
           f"the model in --resume has other sizes: give {' '.join(others) or '--config with its run.json'}")
    return found.manifest, found.source


def load(trainer, saved, say):
    """Let a Trainer go on as if never stopped; returns how many steps are done. Its weights came with the model, from
    `source`; here each rank takes its part of the moments. say(text) hears of a change of the learning rate."""
    s = trainer.s
    done = saved["step"]
    before = dataclasses.replace(s)
    vars(before).update(saved["run"]["flags"])
    was, now = learning_rate(before, done), learning_rate(s, done)
    if was != now and done < s.steps:
        say(f"lr       of step {done + 1}: {was:.4g} by the checkpoint's settings, now {now:.4g}")
    trainer.skipped = saved["skipped"]
    if trainer.scaler and saved["scaler"]:
        vars(trainer.scaler).update(saved["scaler"])
    updates = done - trainer.skipped
    if updates:  # before the first one, an optimizer has no state
        load_moments(trainer.net, saved["tensors"], updates)
    return done


def load_moments(net, tensors, updates):
    """Let a ParallelGPT's optimizer take its part of a checkpoint's moments, made by so many updates."""
    for key in MOMENTS:
        load_state(net, key, lambda name, key=key: tensors[f"{key}.{name}"])
    set_updates(net, updates)


def load_state(net, key, source):
    """As further/whole.py's, of a ParallelGPT: both ends of a tied embedding have the same."""
    tied = {"lm_head.weight": "wte.weight"} if net.config.tied else {}
    whole.load_state(net, key, lambda name: source(tied.get(name, name)))
