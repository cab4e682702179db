"""Going on from a checkpoint step-00000100.pt of train.py. Its tensors are whole, so any layout can read it.

    torchrun --nproc_per_node 2 train.py --plain --tp 2 --steps 50 --out runs/plain
    torchrun --nproc_per_node 2 train.py --plain --dp 2 --out runs/plain --resume

Batches and samples are functions of (seed, step), so the number of steps stands for the position in the data and the
state of every random generator. What remains is the weights, AdamW's moments and fp16's loss scale.
"""

import argparse
import dataclasses
import os
import pathlib

import torch

import collectives as dist
import parallel
from further.flags import learning_rate
from further.kinds import shapes_of_all
from further.whole import part_here, put_together, take_part
from model import buffers, shapes


# --------------------------------------------------------------------------------------------------------------- there



def whole_tensors(trainer):
    """(label, tensor) of each parameter, "wte.weight", and of its moments, "exp_avg.wte.weight": whole, one at a time,
    on all ranks, because each gives its part."""
    for name in shapes_of_all(trainer.config):
        yield name, trainer.net.whole_parameter(name)
    for key in MOMENTS:
        for name in shapes(trainer.config):
            yield f"{key}.{name}", trainer.net.whole_parameter(name, key)


def save(trainer, done):
    """Write step-00000100.pt into --out, on rank 0. Call it on all ranks."""
    tensors = {label: tensor.cpu() for label, tensor in whole_tensors(trainer) if dist.get_rank() == 0}
    if dist.get_rank() == 0:
        path = os.path.join(trainer.s.out, f"step-{done:08}.pt")
        torch.save({"step": done, "skipped": trainer.skipped, "scaler": trainer.scaler and vars(trainer.scaler),
                    "flags": vars(trainer.s), "tensors": tensors}, path + ".part")
        os.replace(path + ".part", path)  # a file of that name is whole


@torch.no_grad()
def whole_parameter(net, name, key=None):
    """A parameter of a ParallelGPT as one process would hold it, in the master dtype; with `key`, what the optimizer
    keeps of it (zeros before its first step); or a buffer. Call it on all ranks."""
    shape = shapes_of_all(net.config)[name]
    dtype = torch.float32 if name in buffers(net.config) else parallel.master_dtype(net.layout.dtype)
    part = slice(0), torch.empty(0, device=net.device)  # of a rank that has nothing of it
    groups = []
    for piece in net.pieces.values():
        if name in (own := dict(piece.named_buffers())):
            part = slice(None), own[name].view(-1)
    for param in [param for param, its_name in net.named_parameters().items() if its_name == name]:
        stepped, *where = net.kept(param)
        held = stepped
        if key is not None:
            held = net.optimizer.state.get(stepped, {}).get(key, torch.zeros_like(stepped))
        part = part_here((held, *where), param)
        groups = [group for group in parallel.placement_of(stepped).sharded_over if group != net.groups.pp]
    here, values = part
    return put_together(shape, here, values.to(dtype), [*groups, net.groups.pp])  # another stage's ranks know pp alone


# ------------------------------------------------------------------------------------------------------------ and back

MOMENTS = "exp_avg", "exp_avg_sq"  # what a checkpoint has of each parameter besides its value
KEEPS = {"adamw": MOMENTS, "muon": ("exp_avg",)}  # what each --optimizer keeps of a matrix of a block


# Flags of other versions that decide a model or its losses, and the values with which a run is as without them.
UNKNOWN = {"islands": (1,), "latent": (None, 0), "delta_every": (None, 0), "expert_groups": (None, 1)}


def unknown(trained_with):
    """What a run was trained with that this program has not, in words; "" if there is nothing. trained_with: its
    flags."""
    for name, same in UNKNOWN.items():
        if (value := trained_with.get(name, same[0])) not in same:
            return f"it was trained with --{name.replace('_', '-')} {value}, which this train.py does not have"
    return ""


def lacking(trained_with, s):
    """Why flags s cannot go on from what a run has kept, in words; "" if they can. (A mean that begins with zeros,
    where the number of steps says that it is warm, would make steps many times too large.) trained_with: its flags."""
    there, here = trained_with.get("optimizer", "adamw"), s.optimizer
    lost = ", ".join(key for key in KEEPS[here] if key not in KEEPS[there])
    if lost:
        return (f"--optimizer {here} goes on from {lost}, which the --optimizer {there} in --resume has not kept: "
                f"give --optimizer {there}")
    return ""


def newest(path):
    """The file at `path`, or the newest step-*.pt in that folder. ValueError if there is none."""
    path = pathlib.Path(path)
    found = sorted(path.glob(f"step-{8 * '[0-9]'}.pt")) if path.is_dir() else [path] if path.suffix == ".pt" else []
    if not found or not found[-1].exists():
        raise ValueError(
            f"--resume {path}: no file step-*.pt, as --plain writes it; leave --plain out to go on from others")
    return found[-1]


def read_checkpoint(s, config, config_of):
    """(the newest checkpoint at --resume, source(name) of its weights). ValueError if its model has other sizes than
    `config`. config_of(flags): the config that a run with these flags has."""
    file = newest(s.out if s.resume == "newest" else s.resume)
    try:
        saved = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        flags = argparse.Namespace(**saved["flags"])
    except Exception:  # noqa: BLE001  a damaged file can make the unpickler raise anything
        raise ValueError(f"--resume {file}: no whole checkpoint; name another") from None
    if why := unknown(saved["flags"]):
        raise ValueError(f"--resume {file}: {why}: name another")
    there = {"experts": 0, **dataclasses.asdict(config_of(flags))}
    for name, size in there.items():
        if size != getattr(config, name, None):
            raise ValueError(f"the model in --resume has other sizes: give --{name.replace('_', '-')} {size}")
    weights = {"lm_head.weight": saved["tensors"]["wte.weight"]} | saved["tensors"]  # a tied head is not there
    return saved, weights.__getitem__


def load(trainer, saved, say):
    """Let a Trainer go on as if never stopped; returns how many steps are done. Its weights came with the model, from
    `source`; here each rank takes its part of the moments. say(text): a change of the learning rate is said."""
    s = trainer.s
    done = saved["step"]
    before = argparse.Namespace(**vars(s) | saved.get("run", saved)["flags"])
    was, now = learning_rate(before, done), learning_rate(s, done)
    if was != now and done < s.steps:
        say(f"lr       of step {done + 1}: {was:.4g} by the checkpoint's settings, now {now:.4g}")
    trainer.skipped = saved["skipped"]
    if trainer.scaler and saved["scaler"]:
        vars(trainer.scaler).update(saved["scaler"])
    if done > trainer.skipped:  # before the first update, an optimizer has no state
        load_moments(trainer, saved["tensors"], done - trainer.skipped)
    return done


def load_moments(trainer, tensors, updates):
    """Each rank takes its part of a checkpoint's moments, after so many updates."""
    for key in MOMENTS:
        load_state(trainer.net, key, lambda name: tensors[f"{key}.{name}"])
    for group in trainer.optimizer.param_groups:
        for param in group["params"]:
            trainer.optimizer.state[param]["step"] = torch.tensor(float(updates), device="cpu")


@torch.no_grad()
def load_state(net, key, source):
    """Let a ParallelGPT's optimizer keep under `key` this rank's part of source(name), a tensor of each parameter's
    shape."""
    for param, name in net.named_parameters().items():
        stepped, *where = net.kept(param)
        if not param.requires_grad or not stepped.numel():
            continue
        state = net.optimizer.state[stepped].setdefault(key, torch.zeros_like(stepped))
        whole = source("wte.weight" if net.config.tied and name == "lm_head.weight" else name)
        take_part((state, *where), param, whole)
