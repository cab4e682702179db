"""Train a GPT, on one process or many:

    python train.py                                          one process
    torchrun --nproc_per_node 4 train.py --dp 2 --tp 2       four: two replicas, each cut in two
    python train.py --dp 2 --tp 2                            the same: it starts itself again under torchrun
    python train.py --out runs/1                             with checkpoints: the same command again goes on after the last
    python train.py --steps 0 --sample 200 --resume runs/1   text from the newest of them

With no flags it trains a 0.8M-parameter model on the source of Python's standard library, in a minute or two on a CPU.
Every layout sees the same tokens and logs the same loss: a batch is a function of (seed, step, sample), initial weights of
(seed, name). `python train.py --help` lists the flags.
"""

import argparse
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
import signal
import socket
import sys
import sysconfig
import time
import traceback
import zlib
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import collectives as dist
import kernels
import parallel
from model import (
    ACTIVATIONS,
    GPT,
    PRESETS,
    GPTConfig,
    crc_of_file,
    materialize,
    open_hf,
    read_safetensors,
    shapes,
    sync_folder,
    write_file,
    write_hf,
    write_safetensors,
)

# ---------------------------------------------------------------------------------------------------------------- settings

def flag(default, help, **more):
    return field(default=default, metadata=dict(help=help, **more))


@dataclass
class Settings:
    """Every flag of the command line, --with-dashes."""
    data: str = flag("", "a text file, a folder of text, or a .bin of tokens (uint16, or llm.c's with its header); "
                         "left out, the source of Python's standard library as bytes. The last 10 %% are held out")
    model: str = flag("tiny", "preset", choices=list(PRESETS))
    n_layer: int = flag(None, "blocks, instead of the preset's")
    n_head: int = flag(None, "attention heads, instead of the preset's")
    n_embd: int = flag(None, "width, instead of the preset's")
    seq_len: int = flag(None, "tokens a sequence, instead of the preset's")
    vocab_size: int = flag(None, "vocabulary, instead of the preset's")
    activation: str = flag(None, "of the MLP, instead of the preset's", choices=list(ACTIVATIONS))
    init_from: str = flag("", "start from the weights in this Hugging Face GPT-2 folder (its sizes count, not --model's)")
    steps: int = flag(450, "optimizer steps")
    batch_size: int = flag(16, "sequences a step, over all ranks")
    micro_batches: int = flag(1, "parts in which each rank's share of a step is computed, gradients adding up")
    lr: float = flag(2e-3, "peak learning rate")
    min_lr: float = flag(1e-4, "learning rate at the end of the cosine")
    warmup_steps: int = flag(20, "steps of linear warm-up")
    weight_decay: float = flag(0.1, "AdamW's, on matrices only")
    clip: float = flag(1.0, "largest gradient norm; 0 does not clip")
    seed: int = flag(0, "of weights, batches and sampling")
    dp: int = flag(None, "data-parallel replicas; left out, what --tp and --pp leave")
    tp: int = flag(1, "ranks each layer is cut over")
    pp: int = flag(1, "pipeline stages, ranks the layers are spread over")
    schedule: str = flag("1f1b", "of the pipeline", choices=list(parallel.SCHEDULES))
    trace: str = flag("", "folder for trace.json, what every rank ran in the third step, for Perfetto or chrome://tracing")
    virtual_stages: int = flag(1, "stages a rank has, for --schedule interleaved")
    zero: int = flag(0, "ZeRO stage over dp: 1 shards optimizer state, 2 gradients too, 3 parameters too", choices=[0, 1, 2, 3])
    dtype: str = flag("fp32", "what layers compute in; bf16 and fp16 keep float32 masters, fp16 scales its loss",
                      choices=["fp32", "bf16", "fp16", "fp64"])
    reduce_dtype: str = flag("same", "what gradients travel in over dp: as they are added up (float32), or bf16, half of it",
                             choices=["same", "bf16"])
    recompute: str = flag("none", "run each block, or its attention, again in backward instead of keeping its activations",
                          choices=["none", "block", "attention"])
    cuda_graphs: str = flag("auto", "record a micro-batch's kernels once and replay them, which spares the CPU; auto: on several GPUs, "
                                    "where ZeRO is 0 or 1", choices=["auto", "off", "on"])
    device: str = flag("auto", "auto takes CUDA where each process on this machine gets a GPU of its own", choices=["auto", "cpu", "cuda"])
    kernels: str = flag("auto", "Triton kernels or PyTorch's own operations; auto takes Triton from Hopper GPUs on, except in fp64",
                        choices=["auto", "torch", "triton"])
    comm: str = flag("ours", "collectives: ours, as fast as they go; the textbook's ring; torch.distributed's own", choices=["ours", "ring", "torch"])
    eval_every: int = flag(100, "steps between validations, and one at the end; 0: never")
    log_every: int = flag(10, "steps between log lines; 0: never")
    sample: int = flag(200, "tokens to generate at the end; 0: none")
    prompt: str = flag("def ", "what the sample continues (data of bytes)")
    out: str = flag("", "folder for log.jsonl and checkpoints; the same command with it again goes on where they end")
    save_every: int = flag(100, "steps between checkpoints, and one at the end; 0: only that one")
    keep: int = flag(2, "newest checkpoints to keep; 0: all")
    resume: str = flag("", "go on from this checkpoint, or the newest in this folder; without a value, the newest in --out. What "
                           "decides the numbers (data, sizes, --lr and so on) comes with it where the flag is left out",
                       nargs="?", const="newest", metavar="PATH")
    on_nan: str = flag("stop", "what a loss or gradient that is not finite does to all ranks", choices=["stop", "skip"])
    timeout: int = flag(600, "seconds without progress until a rank gives up and says which other one is missing")


SIZES = "n_layer", "n_head", "n_embd", "seq_len", "vocab_size"


class BadInput(Exception):
    """One line for the user: the flag or the file, what is wrong, a value that would work."""


def refuse(program, problem, rank):
    """End this process with exit code 2; the first rank of each node says why, in one line: a file may be missing on one alone."""
    if not rank or os.environ.get("LOCAL_RANK") == "0":
        print(f"{program}: {problem}", file=sys.stderr, flush=True)
    else:
        time.sleep(2)  # torchrun ends all ranks when the first one is gone: that one has something to say
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print its whole usage, and exit on every rank before rank 0 has spoken
        raise BadInput(message.removeprefix("argument ") + "; see --help")


def parse(arguments):
    parser = Parser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False,
                    description="Train a GPT on one process or many.")
    for f in dataclasses.fields(Settings):
        parser.add_argument("--" + f.name.replace("_", "-"), type=f.type, default=f.default, **f.metadata)
    return Settings(**vars(parser.parse_args(arguments)))


def check_numbers(s):
    """Numbers that make no sense on their own."""
    for f in dataclasses.fields(s):
        given, least = getattr(s, f.name), int(f.name in ("batch_size", "micro_batches", "dp", "tp", "pp", "virtual_stages", "timeout", *SIZES))
        if f.type in (int, float) and given is not None and not least <= given <= 1e9:  # not (nan), not (inf) either
            value = f.default or getattr(PRESETS["tiny"], f.name, 2)
            raise BadInput(f"--{f.name.replace('_', '-')} {given}: must be between {least} and a billion, e.g. {value}")
    if s.lr < s.min_lr:
        raise BadInput(f"--min-lr {s.min_lr:g} is above --lr {s.lr:g}: give e.g. --min-lr {s.lr / 10:g}")


def model_config(s, checkpoint=None):
    """(GPTConfig, source of weights or None) the settings ask for."""
    where, folder = ("--resume", checkpoint.path) if checkpoint else ("--init-from", s.init_from)
    if checkpoint and s.init_from:
        raise BadInput(f"--init-from {s.init_from} beside --resume: the weights can come from one of them, leave the other out")
    if folder:
        try:
            config, source = open_hf(folder)
        except (ValueError, OSError) as error:
            raise BadInput(f"{where} {folder}: {error}") from None
    else:
        config, source = PRESETS[s.model], None
    given = {name: getattr(s, name) for name in (*SIZES, "activation") if getattr(s, name) is not None}
    if source:
        for name, value in given.items():
            if value != getattr(config, name):
                raise BadInput(f"--{name.replace('_', '-')} {value}: the model in {where} has {getattr(config, name)}; "
                               f"leave the flag out")
    n_head, n_embd = given.get("n_head", config.n_head), given.get("n_embd", config.n_embd)
    if n_embd % n_head:
        raise BadInput(f"--n-embd {n_embd} is not a multiple of {n_head} heads: give e.g. --n-embd {-(-n_embd // n_head) * n_head}")
    if not source:
        config = dataclasses.replace(config, inner=0, **given)
    return config, source


def gpus_here():
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_for(asked, processes, gpus):
    """--device, where it is auto: CUDA if each process on this machine gets a GPU of its own, else the CPU."""
    return asked if asked != "auto" else "cuda" if gpus >= processes else "cpu"


def check_layout(s, config, world, local_world):
    """Everything that must divide, and enough GPUs. Fills in s.dp and s.device; returns the number of processes needed."""
    if s.dp is None:
        s.dp = max(1, world // (s.tp * s.pp))
    processes = s.dp * s.tp * s.pp
    if world > 1 and world != processes:
        rest = s.tp * s.pp
        raise BadInput(f"--dp {s.dp} x --tp {s.tp} x --pp {s.pp} needs {processes} processes, {world} were started: give "
                       + (f"--dp {world // rest}" if world % rest == 0 else "--tp 1 --pp 1 and leave --dp out"))
    stages = s.pp * s.virtual_stages
    if s.virtual_stages > 1 and (s.schedule != "interleaved" or s.pp == 1):
        raise BadInput(f"--virtual-stages {s.virtual_stages} is for --schedule interleaved and --pp of at least 2: give those too")
    if stages > config.n_layer + 2:
        raise BadInput(f"--pp {s.pp} x --virtual-stages {s.virtual_stages} is more stages than the model's {config.n_layer} layers "
                       f"with embedding and head: give --pp {config.n_layer + 2} or fewer in all")
    if s.schedule == "interleaved" and s.virtual_stages > 1 and s.micro_batches % s.pp:
        raise BadInput(f"--micro-batches {s.micro_batches} is not a multiple of --pp {s.pp}, as --schedule interleaved needs: give "
                       f"--micro-batches {-(-s.micro_batches // s.pp) * s.pp}")
    if world > local_world and local_world % s.tp:
        raise BadInput(f"--tp {s.tp} would reach over the edge of a node with {local_world} processes, and it talks in every layer: "
                       f"give --tp {math.gcd(s.tp, local_world)}, and --pp for what is left")
    if config.n_head % s.tp:
        raise BadInput(f"--tp {s.tp} does not divide the model's {config.n_head} heads: give --tp {math.gcd(s.tp, config.n_head)}")
    if config.inner < s.tp or config.vocab_size < s.tp:
        raise BadInput(f"--tp {s.tp} is more than the MLP ({config.inner}) or the vocabulary ({config.vocab_size}) is wide: "
                       f"give a smaller --tp")
    if s.batch_size % (s.dp * s.micro_batches):
        unit = s.dp * s.micro_batches
        raise BadInput(f"--batch-size {s.batch_size} is not a multiple of --dp {s.dp} x --micro-batches {s.micro_batches}: "
                       f"give e.g. --batch-size {-(-s.batch_size // unit) * unit}")
    if s.reduce_dtype != "same" and s.dtype == "fp64":
        raise BadInput(f"--reduce-dtype {s.reduce_dtype} would undo --dtype fp64: leave one of them out")
    local, gpus = local_world if world > 1 else processes, gpus_here()
    if world > local_world and s.device == "auto" and 0 < gpus < local:  # on another node there may be enough: both must be the same
        raise BadInput(f"--device auto: {local} processes on this node need as many GPUs and it has {gpus}: give --device cpu")
    s.device = device_for(s.device, local, gpus)
    able = s.device == "cuda" and s.zero < 2
    if s.cuda_graphs == "on" and not able:
        raise BadInput(f"--cuda-graphs on is for --device cuda and --zero 0 or 1, not {s.device} and {s.zero}: leave it out")
    if s.cuda_graphs == "auto":
        s.cuda_graphs = "on" if able and processes > 1 else "off"
    try:
        kernels.use(s.kernels)
    except ValueError as problem:
        raise BadInput(f"--kernels {s.kernels}: {problem}; give --kernels auto") from None
    if s.kernels == "triton" and (s.dtype == "fp64" or s.device == "cpu" and not kernels.INTERPRETED):
        raise BadInput("--kernels triton is for CUDA in fp32, bf16 or fp16: give --kernels auto")
    if s.device == "cuda" and local > gpus:
        raise BadInput(f"--device cuda: {local} processes on this machine need as many GPUs and it has {gpus}: "
                       f"give --device cpu" + (f", or a layout of {gpus}" if gpus else ""))
    return processes


# -------------------------------------------------------------------------------------------------------------------- data

def load_data(s):
    """(training tokens, held-out tokens, whether they are bytes): numpy arrays, uint8 or, mapped from a .bin, uint16. BadInput."""
    where = f"--data {s.data}"
    if not s.data:  # the one text that is on every reader's machine
        where, root = "the standard library", pathlib.Path(sysconfig.get_paths()["stdlib"])
        tokens = read_texts(f for f in root.rglob("*.py") if not {"site-packages", "dist-packages", "test", "tests"} & set(f.parts))
    elif os.path.isdir(s.data):
        whole = pathlib.Path(s.data).resolve()  # and in it what runs write: this one, and the one that it goes on from
        written = [pathlib.Path(folder).resolve() for folder in (s.out, s.trace, s.resume, os.path.dirname(s.resume.rstrip("/"))) if folder]
        written = [folder for folder in written if folder != whole and folder.is_relative_to(whole)]
        tokens = read_texts(f for f in pathlib.Path(s.data).rglob("*") if f.is_file() and not f.name.startswith(".")
                            and not any(f.resolve().is_relative_to(folder) for folder in written))
    elif not os.path.isfile(s.data):
        raise BadInput(f"{where}: no such file or folder; leave the flag out for the standard library's source")
    elif s.data.endswith(".bin"):
        tokens = read_tokens(s.data, where)
    else:
        tokens = read_texts([pathlib.Path(s.data)])
    if not len(tokens):
        raise BadInput(f"{where} is empty: give text, or leave the flag out for the standard library's source")
    train, held_out = np.split(tokens, [len(tokens) - len(tokens) // 10])
    return train, held_out, tokens.dtype == np.uint8


def check_data(s, config, train, held_out):
    shortest = min(len(train), len(held_out) if s.eval_every else len(train))
    if shortest <= config.seq_len:
        raise BadInput(f"--data {s.data or '(standard library)'} is too short: {shortest:,} tokens in a part, one sequence needs "
                       f"{config.seq_len + 1:,}; give more text or --seq-len {max(1, shortest - 1)}")
    for part in (train, held_out):
        for start in range(0, min(len(part), 1 << 28), 1 << 24):  # half a gigabyte at most: `batch` checks the rest as it comes
            check_tokens(part[start:start + (1 << 24)], config.vocab_size)


def check_prompt(s, config, is_bytes):
    if s.sample and is_bytes and max(os.fsencode(s.prompt), default=0) >= config.vocab_size:
        raise BadInput(f"--prompt {s.prompt!r} has a byte beyond the vocabulary of {config.vocab_size}: give other text, or --sample 0")


def check_tokens(tokens, vocab_size):
    largest = int(tokens.max(initial=0))
    if largest >= vocab_size:
        raise BadInput(f"--data holds token {largest}, the vocabulary ends at {vocab_size - 1}: give --vocab-size {largest + 1}")


def read_texts(files):
    """All files' bytes in the order of their names; files that are not text (with a zero byte in them) are left out."""
    texts = []
    for file in sorted(files):
        try:
            text = file.read_bytes()
        except OSError as error:
            raise BadInput(f"--data: {error}") from None
        if b"\0" not in text:
            texts.append(text)
    return np.frombuffer(b"\n".join(texts), np.uint8)


def read_tokens(path, where):
    """Tokens of a .bin file: llm.c's has 256 int32 first (20240520, version, number of tokens), nanoGPT's is nothing but uint16."""
    size = os.path.getsize(path)
    try:
        header = np.fromfile(path, np.int32, min(256, size // 4))
    except OSError as error:
        raise BadInput(f"--data: {error}") from None
    if len(header) == 256 and header[0] == 20240520:
        if header[1] != 1 or size != 1024 + 2 * int(header[2]):
            raise BadInput(f"{where}: the header speaks of version {header[1]} and {header[2]} tokens, the file holds "
                           f"{(size - 1024) // 2}: give a whole file of version 1")
        return np.memmap(path, np.uint16, "r", offset=1024)
    if size % 2:
        raise BadInput(f"{where}: {size} bytes are not uint16 tokens; a text must not be named .bin")
    return np.memmap(path, np.uint16, "r") if size else np.empty(0, np.uint16)


def batch(tokens, seed, step, batch_size, seq_len, vocab_size, samples):
    """Inputs and targets, int64 (n, T) on the CPU, of some samples (a slice) of a step's batch: the same whoever asks, in every layout."""
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - seq_len, batch_size)[samples]
    rows = np.stack([tokens[i:i + seq_len + 1] for i in starts]).astype(np.int64)
    check_tokens(rows, vocab_size)
    rows = torch.from_numpy(rows)
    return rows[:, :-1], rows[:, 1:]


# ------------------------------------------------------------------------------------------------------------- checkpoints
#
# A folder a step, whole or not there: it is written as .step-00000200.part and renamed once every byte is on the disk.
#
#     step-00000200/
#         config.json, model.safetensors   a Hugging Face GPT-2 folder; float32 masters where layers compute in 16 bits
#         optimizer.safetensors            exp_avg.NAME and exp_avg_sq.NAME of every parameter, whole
#         manifest.json                    step, settings, loss scale; size and CRC-32 of each file, and of itself
#
# 12 bytes a parameter. Nothing in it knows the layout, and nothing is pickled. Batches, samples and initial weights are functions of
# (seed, step), so the step is the data position, the place in the learning-rate schedule and the state of every random generator.

NUMBERS = ("data", "steps", "batch_size", "lr", "min_lr", "warmup_steps", "weight_decay", "clip", "seed", "dtype", "reduce_dtype",
           "on_nan")
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Checkpoint:
    path: str
    manifest: dict

    def flags(self):
        """What it was trained with, as a command line: flags that come after it win."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in self.manifest["run"]["flags"].items()]


def run_of(s, config, data):
    """What decides a run's numbers, whatever its layout: a folder of checkpoints goes on under the same, and no other."""
    ends = [tokens[part] for tokens in data[:2] for part in (slice(0, 1 << 20), slice(-1 << 20, None))]  # all would take minutes
    start = {name: os.path.abspath(given) for name in ("init_from", "resume") if (given := getattr(s, name)) and given != "newest"}
    return {"flags": {name: getattr(s, name) for name in NUMBERS} | {"data": s.data and os.path.abspath(s.data)}, "start": start,
                "model": dataclasses.asdict(config), "data": {"tokens": len(data[0]) + len(data[1]), "bytes": bool(data[2]),
                                                            "crc32": zlib.crc32(np.concatenate(ends).tobytes())}}


def differences(there, here, parts=("flags", "start", "model", "data")):
    """In words, what of two `run_of` differs. A data set may move: its contents count, not its path."""
    return [f"{'data: ' if part == 'data' else '--'}{key.replace('_', '-')} {a.get(key)} there, {b.get(key)} here"
            for part in parts for a, b in [(there[part], here[part])] for key in a | b
            if a.get(key) != b.get(key) and (part, key) != ("flags", "data")]


def checkpoints(folder):
    """The complete ones in a folder, oldest first."""
    names = [name for name in os.listdir(folder) if re.fullmatch(r"step-\d{8,}", name)] if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in sorted(names, key=lambda name: int(name[5:]))]


def crc_of(value):
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def open_checkpoint(path, read_all):
    """A Checkpoint. BadInput names what is missing or damaged; read_all: by every byte of it, not by sizes alone."""
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
                raise ValueError(f"it has {os.path.getsize(file):,} bytes, by the manifest {entry['bytes']:,}: cut short, or another file")
            if read_all and crc_of_file(file) != entry["crc32"]:
                raise ValueError("its checksum is not the manifest's: damaged, or another file")
        return Checkpoint(path, manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"has no {error}" if isinstance(error, KeyError) else error
        path = os.path.abspath(path)
        others = [name for name in map(os.path.basename, checkpoints(os.path.dirname(path))) if name != os.path.basename(path)]
        raise BadInput(f"--resume {path}: {os.path.basename(file)}: {why}; "
                       + (f"move that folder away to go on from {others[-1]}" if others else "give a complete checkpoint")) from None


def find_checkpoint(s, read_all):
    """The Checkpoint that --resume asks for, or None."""
    if s.resume == "newest" and not s.out:
        raise BadInput("--resume without a value takes the newest checkpoint in --out: give --out DIR too, or --resume DIR")
    if not s.resume:
        return None
    folder = s.out if s.resume == "newest" else s.resume
    if not os.path.isdir(folder):
        raise BadInput(f"--resume {folder}: no such folder; give one that a run with --out has written")
    if os.path.exists(os.path.join(folder, "manifest.json")) or folder.rstrip("/").rpartition("/")[2].startswith("step-"):
        return open_checkpoint(folder, read_all)
    found = checkpoints(folder)
    if not found:
        raise BadInput(f"--resume {folder}: holds no complete checkpoint, no step-00000100/; leave --resume out to begin anew")
    return open_checkpoint(found[-1], read_all)


def read_moments(checkpoint, config):
    """{exp_avg.NAME: whole tensor}, mapped from the file; BadInput where a name, shape or dtype is not this model's."""
    dtype = parallel.master_dtype(DTYPES[checkpoint.manifest["run"]["flags"]["dtype"]])
    path = os.path.join(checkpoint.path, "optimizer.safetensors")
    try:
        moments = read_safetensors(path)
    except ValueError as error:
        raise BadInput(f"--resume {error}") from None
    want = {f"{key}.{name}": (shape, dtype) for key in MOMENTS for name, shape in shapes(config).items()}
    have = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in moments.items()}
    for name in want | have:
        if want.get(name) != have.get(name):
            raise BadInput(f"--resume {path}: {name} is {have.get(name, 'missing')}, the model makes it {want.get(name, 'nothing')}: "
                           f"give a checkpoint of this model")
    return moments


def start_of(s, run, checkpoint, read_all):
    """(the Checkpoint to go on from or None, the run): that of --out where it holds this very run, else --resume's."""
    found = checkpoints(s.out)
    another = f"name a new folder, e.g. --out {s.out.rstrip('/')}-2"
    if checkpoint and os.path.realpath(os.path.join(checkpoint.path, "..")) == os.path.realpath(s.out):
        if os.path.realpath(found[-1]) != os.path.realpath(checkpoint.path):
            raise BadInput(f"--resume {checkpoint.path}: {found[-1]} would be in the way of what follows: {another}")
        return checkpoint, run | {"start": checkpoint.manifest["run"]["start"]}
    there = None
    with contextlib.suppress(OSError, ValueError), open(os.path.join(s.out, "run.json")) as file:
        there = json.load(file)
    if there is None and (found or os.path.exists(os.path.join(s.out, "log.jsonl"))):
        raise BadInput(f"--out {s.out} already holds files of a run, and no run.json that says which: {another}")
    if there and (how := differences(there, run)):
        raise BadInput(f"--out {s.out} holds another run ({'; '.join(how[:3])}): {another}" + (", or add --resume" if found else ""))
    return open_checkpoint(found[-1], read_all) if found else checkpoint, run


def claim(folder, run):
    """Make --out this run's own, on rank 0: locked as long as the process lives. Returns the lock, a file."""
    check_folder(folder, "--out")
    try:
        lock = open(os.path.join(folder, ".lock"), "a+")  # noqa: SIM115  open, and locked, until the process ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = error.strerror
        if error.errno == errno.EAGAIN:
            lock.seek(0)
            why = f"{lock.read().strip() or 'another run'} writes there"
        raise BadInput(f"--out {folder}: {why}; name another folder, e.g. --out {folder.rstrip('/')}-2") from None
    try:
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        write_file(os.path.join(folder, "run.json"), json.dumps(run))
        for name in os.listdir(folder):  # what a run that was killed had not finished, or not finished removing
            if re.fullmatch(r"\.step-\d+\.(part|old)", name):
                shutil.rmtree(os.path.join(folder, name))
    except OSError as error:
        raise BadInput(f"--out {folder}: {error.strerror}; name a folder that can be written") from None
    return lock


class Log:
    """log.jsonl, an entry a line. A full disk keeps entries waiting until there is room, and tears no line."""

    def __init__(self, path, step):
        kept = []
        with contextlib.suppress(FileNotFoundError), open(path) as file:
            for line in file:
                with contextlib.suppress(ValueError):  # a line that was being written when the power went
                    kept += [line] if json.loads(line)["step"] <= step else []  # the others will come again
        write_file(path, "".join(kept))
        self.file, self.waiting = os.open(path, os.O_WRONLY | os.O_APPEND), b""

    def write(self, entry):
        """entry: {"step": ..., ...}, its numbers finite or made text. Returns the OSError that keeps it waiting, or None."""
        entry = {key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in entry.items()}
        self.waiting += json.dumps(entry).encode() + b"\n"
        size = os.fstat(self.file).st_size
        try:
            if os.write(self.file, self.waiting) < len(self.waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.waiting = b""
        except OSError as error:
            os.ftruncate(self.file, size)
            return error


# ---------------------------------------------------------------------------------------------------------------- training

PEAK_TFLOPS = {"H[18]00 PCIe": 756, "H[12]00 NVL": 835, "H[128]00": 989, "A[18]00": 312, "B200": 2250, "L40S": 362, "L4": 121,
               "RTX 4090$": 165, "RTX 3090$": 71, "V100 PCIE": 112, "V100": 125, "T4": 65}  # dense 16-bit, by the maker's datasheet


def peak_flops(device):
    """FLOP/s of this GPU by its datasheet, or None: MFU of an unknown GPU would be a guess."""
    name = torch.cuda.get_device_name(device).replace("-", " ") if device.type == "cuda" else ""
    return next((1e12 * value for key, value in PEAK_TFLOPS.items() if re.search(rf"\b{key}(\b|$)", name)), None)


def learning_rate(s, step):
    """Linear warm-up, then half a cosine from lr to min_lr at the last step; steps count from 0."""
    if step < s.warmup_steps:
        return s.lr * (step + 1) / s.warmup_steps
    progress = (step - s.warmup_steps) / max(1, s.steps - 1 - s.warmup_steps)
    return s.min_lr + (s.lr - s.min_lr) * (1 + math.cos(math.pi * min(1, progress))) / 2


DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


class LossScale:
    """fp16's smallest number is 6e-8: the loss is multiplied so that gradients stay above it, and they are divided again.

    A step whose gradients are not finite is skipped and the scale halved; after 200 good ones it doubles. Every rank decides by
    the same number, the global norm. Micikevicius et al., "Mixed Precision Training" (2018).
    """

    def __init__(self, start=2.0**16, interval=200):
        self.scale, self.interval, self.good, self.skipped = start, interval, 0, 0

    def update(self, finite):
        self.good = self.good + 1 if finite else 0
        self.skipped += not finite
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.good % self.interval == 0:
            self.scale = min(2.0**24, self.scale * 2)


class BirthLog(TorchDispatchMode):
    """Counts the bytes of every tensor made inside it, views of older ones apart: `alive()` is what of them still exists."""

    def __init__(self):
        super().__init__()
        self.born = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for older, tensors in ((True, (args, kwargs)), (False, out)):
            for t in parallel.tensors_in(tensors):
                self.born.setdefault(StorageWeakRef(t.untyped_storage()), 0 if older else t.untyped_storage().nbytes())
        return out

    def alive(self, but=()):
        """Bytes that still exist, of all tensors but some."""
        but = {StorageWeakRef(t.untyped_storage()) for t in but}
        return sum(size for storage, size in self.born.items() if not storage.expired() and storage not in but)


class Trainer:
    """What a run holds: model, optimizer, data and its place in the mesh."""

    def __init__(self, s, config, source, data, device):
        self.s, self.config, self.device = s, config, device
        self.train_data, self.held_out, self.bytes = data
        self.mesh = parallel.make_mesh(device.type, s.dp, s.tp, s.pp)
        self.tp, self.dp, self.pp = (self.mesh[axis].get_group() for axis in ("tp", "dp", "pp"))
        self.control = dist.new_group(backend="gloo")  # for `agree`: on the CPU, whatever the GPU is doing
        self.dtype, self.scaler = DTYPES[s.dtype], LossScale() if s.dtype == "fp16" else None
        self.skipped, self.bad, self.unread, self.terminated, self.stopping = 0, 0, None, False, False
        self.net = parallel.parallelize(config, self.mesh, device, self.dtype, source, s.seed, s.zero, DTYPES.get(s.reduce_dtype),
                                        s.recompute, s.virtual_stages)
        if s.cuda_graphs == "on":
            parallel.replay_micro_batches(self.net)
        for group in (self.tp, self.dp, self.pp, self.net.ends, None):
            dist.use(group, s.comm)
        flat = self.dtype != parallel.master_dtype(self.dtype) and kernels.on_triton(torch.empty(0, device=device))
        adamw = kernels.AdamW if flat else partial(torch.optim.AdamW, fused=device.type == "cuda")
        self.optimizer = self.net.make_optimizer(adamw, s.weight_decay, lr=s.lr, betas=(0.9, 0.95))

    def micro_batches(self, tokens, seed, step):
        """This rank's share of a step: (inputs, targets), a list of micro-batches each. Tensor and pipeline peers get the same."""
        mine = self.s.batch_size // self.s.dp
        first = dist.get_rank(self.dp) * mine
        rows = batch(tokens, seed, step, self.s.batch_size, self.config.seq_len, self.config.vocab_size, slice(first, first + mine))
        if self.device.type == "cuda":  # from pageable memory the copy would stop the CPU, and soon the GPU
            rows = [t.contiguous().pin_memory().to(self.device, non_blocking=True) for t in rows]
        return [t.split(mine // self.s.micro_batches) for t in rows]

    def step(self, step, births=None):
        """One optimizer step. Returns (mean loss over this rank's micro-batches, gradient norm before clipping), on the device."""
        s, scale = self.s, self.scaler.scale if self.scaler else 1.0
        x, y = self.micro_batches(self.train_data, s.seed, step)
        self.optimizer.zero_grad()
        with births or contextlib.nullcontext():
            self.net.pipeline.on_forward = births and (lambda: self.note_activations(births))
            loss = self.net.forward_backward(x, y, s.schedule, scale)
            self.net.pipeline.on_forward = None
        norm = self.net.clip_grad_norm_(s.clip, scale)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(s, step)
        blame = 1 + dist.get_world_size() - dist.get_rank()  # 1: the gradients, of all; more: the loss, of the first such rank
        alarm = torch.where(loss.isfinite(), (~norm.isfinite()).long(), blame)
        late = self.device.type == "cuda" and s.on_nan == "stop" and not self.scaler
        self.bad, self.stopping = self.agree(self.read(alarm, late), self.terminated)
        if not self.bad:
            self.optimizer.step()
        self.skipped += bool(self.bad)
        if self.scaler:
            hopeless = self.scaler.scale == 1
            self.scaler.update(not self.bad)
            self.bad = self.bad and hopeless  # fp16 overflows now and then: that is what the scale is for
        return loss, norm

    def agree(self, *numbers):
        """The largest of each whole number over all ranks: what one knows, all know, and all do the same in the same step."""
        numbers = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        dist.all_reduce(numbers, dist.ReduceOp.MAX, self.control)
        return numbers.tolist()

    def read(self, alarm=None, late=False):
        """`alarm`, a number on the device, as an int. late: the one of the step before, already here, for to wait for this step's would
        leave the GPU idle. Without `alarm`: the one still unread."""
        before, self.unread = self.unread, None
        if late:
            self.unread = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True), torch.cuda.Event()
            self.unread[0].copy_(alarm, non_blocking=True)
            self.unread[1].record()
        if before:
            before[1].synchronize()
        return int(before[0] if before else 0 if late or alarm is None else alarm)

    def save(self, step, run):
        """Write step's checkpoint into --out, on all ranks: one whole tensor at a time. Returns the OSError, or None, as the other
        ranks always do."""
        whole, problem = shapes(self.config), None
        asked = iter([(name, key) for key in (None, *MOMENTS) for name in whole])

        def get(name):
            return self.net.whole_parameter(*next(asked))

        if dist.get_rank() == 0:
            part, final = (os.path.join(self.s.out, name) for name in (f".step-{step:08}.part", f"step-{step:08}"))
            try:
                shutil.rmtree(part, ignore_errors=True)
                dtype = parallel.master_dtype(self.dtype)
                files = write_hf(part, self.config, get, dtype)
                files["optimizer.safetensors"] = write_safetensors(
                    os.path.join(part, "optimizer.safetensors"),
                    {f"{key}.{name}": (dtype, shape) for key in MOMENTS for name, shape in whole.items()}, get)
                updates = max((int(state["step"]) for state in self.optimizer.state.values() if "step" in state), default=0)
                manifest = {"format": 1, "step": step, "updates": updates, "skipped": self.skipped, "files": files, "run": run,
                                "scaler": vars(self.scaler) if self.scaler else None}
                write_file(os.path.join(part, "manifest.json"), json.dumps(manifest | {"crc32": crc_of(manifest)}))
                sync_folder(part)
                os.rename(part, final)
                sync_folder(self.s.out)
                for old in checkpoints(self.s.out)[:-self.s.keep] if self.s.keep else []:
                    gone = os.path.join(self.s.out, f".{os.path.basename(old)}.old")
                    os.rename(old, gone)  # first out of sight: a folder half removed must not look like a checkpoint
                    shutil.rmtree(gone)
            except OSError as error:
                problem = error
                shutil.rmtree(part, ignore_errors=True)
        for rest in asked:  # the other ranks; and rank 0 after an error, for they wait for its part
            self.net.whole_parameter(*rest)
        return problem

    def load(self, checkpoint, moments):
        """Go on as if never stopped; the weights have come with the model. Each rank reads its part of the file."""
        manifest, state = checkpoint.manifest, self.optimizer.state
        self.skipped = manifest["skipped"]
        if self.scaler and manifest["scaler"]:
            vars(self.scaler).update(manifest["scaler"])
        if manifest["updates"]:  # before the first one, an optimizer has no state
            for name in shapes(self.config):
                for key in MOMENTS:
                    self.net.load_state(name, key, moments[f"{key}.{name}"])
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    state[p]["step"] = torch.tensor(float(manifest["updates"]), device=p.device if group.get("fused") else "cpu")

    def note_activations(self, births):  # gradients of the micro-batches before are no activations, nor is what collectives keep
        self.activations = max(getattr(self, "activations", 0), births.alive([*self.kept_tensors()["gradients"], *dist.scratches()]))

    def buckets(self):
        return [bucket for reducer in self.net.reducers for bucket in reducer.buckets]

    def kept_tensors(self):
        return parallel.kept_tensors(self.net)

    def measured_bytes(self):
        """What the tensors of each kind take on this rank, storages counted once; to set beside parallel.memory_bytes."""
        sizes, seen = {}, set()
        for kind, tensors in self.kept_tensors().items():
            storages = {t.untyped_storage() for t in tensors}
            storages = {st.data_ptr(): st.nbytes() for st in storages if st.data_ptr() not in seen}
            seen |= set(storages)
            sizes[kind] = sum(storages.values())
        return dict(sizes, activations=self.activations)

    def mean_over_ranks(self, loss):
        loss = loss.clone()
        dist.all_reduce(loss, dist.ReduceOp.AVG, self.dp)
        return loss.item()

    @torch.no_grad()
    def evaluate(self, batches=8):
        """Mean loss over the same held-out batches every time, in every layout."""
        losses = [self.net.forward(*self.micro_batches(self.held_out, self.s.seed, i)) for i in range(batches)]
        return self.mean_over_ranks(torch.stack(losses).mean())

    def sample(self, n):
        """Text (or token numbers) the model goes on with, on rank 0; the other ranks help to gather the weights."""
        rank, whole = dist.get_rank(), GPT(self.config, seed=None)
        materialize(whole, self.net.whole_parameter, self.device if rank == 0 else "meta", parallel.master_dtype(self.dtype))
        prompt = list(os.fsencode(self.s.prompt)) if self.bytes else self.held_out[:1].tolist()
        tokens = torch.tensor([prompt or [10]], device=self.device)
        for i in range(n):  # all ranks together: to wait for the last token could take longer than --timeout
            if rank == 0:
                tokens = whole.generate(tokens, 1, temperature=0.8, top_k=40, seed=self.s.seed + i)
            if self.agree(self.terminated)[0]:
                break
        tokens = tokens[0].tolist()
        return bytes(min(t, 255) for t in tokens).decode(errors="replace") if self.bytes else " ".join(map(str, tokens))


def describe(trainer, say, run):
    s, c, mesh, local_world = trainer.s, trainer.config, trainer.mesh, run.local_world
    each, here, gpus = s.batch_size // s.dp // s.micro_batches, min(local_world, mesh.size()), gpus_here()
    say(f"device   {trainer.device.type}: {here} process{'es' * (here > 1)} on this machine, {gpus or 'no'} GPU{'s' * (gpus > 1)}")
    say(f"model    {run.checkpoint.path if run.checkpoint else s.init_from or s.model}: {c.n_layer} layers, {c.n_head} heads, "
        f"width {c.n_embd}, vocabulary {c.vocab_size}, {c.parameters():,} parameters, {s.dtype}")
    say(f"data     {s.data or 'the Python standard library'}: {len(trainer.train_data):,} {'bytes' if trainer.bytes else 'tokens'} "
        f"to train on, {len(trainer.held_out):,} held out")
    say(f"layout   dp {s.dp} x tp {s.tp}{f' x pp {s.pp} ({s.schedule})' if s.pp > 1 else ''} = {mesh.size()} processes, "
        f"{trainer.device.type} ({'NCCL' if trainer.device.type == 'cuda' else 'gloo'}), ZeRO stage {s.zero}, collectives: {s.comm}")
    say(f"batch    {s.batch_size} sequences of {c.seq_len} a step = {s.batch_size * c.seq_len:,} tokens: "
        f"dp {s.dp} x {s.micro_batches} micro-batches of {each}")
    if mesh.size() > local_world:
        node = mesh.mesh // local_world  # (pp, dp, tp): the node of each rank
        crossing = [axis for i, axis in enumerate(("pp", "dp", "tp")) if (node.amax(i) > node.amin(i)).any()]
        say(f"nodes    {mesh.size() // local_world} of {local_world} processes: {' and '.join(crossing)} between nodes, "
            f"{' and '.join(axis for axis in ('pp', 'dp', 'tp') if axis not in crossing)} inside")
    say("memory   a rank, predicted: " + ", ".join(f"{kind} {size(n)}" for kind, n in predicted_bytes(trainer).items()))


def predicted_bytes(trainer):
    s, rank = trainer.s, trainer.mesh.get_coordinate()[0]
    lists = parallel.SCHEDULES[s.schedule](s.pp, s.micro_batches, s.virtual_stages)
    return parallel.memory_bytes(trainer.config, s.zero, s.dp, s.tp, trainer.dtype, s.recompute,
                                 s.batch_size // s.dp // s.micro_batches,
                                 parallel.split_pieces(trainer.config, s.pp * s.virtual_stages)[rank::s.pp],
                                 math.ceil(parallel.most_held(lists[rank]) / s.virtual_stages),
                                 kernels.on_triton(torch.empty(0, device=trainer.device)))


def write_trace(trainer, folder, say):
    """What every rank ran in this step, as one file for Perfetto (ui.perfetto.dev) or chrome://tracing: a row a rank."""
    spans, every = parallel.recorded_times(trainer.net.pipeline), [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    torch.distributed.gather_object(spans, every)
    if every is None:
        return
    words = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "SF": "send activation",
             "RF": "post receive of activation", "SB": "send gradient", "RB": "post receive of gradient"}
    start = min(begin for spans in every for _, begin, _ in spans)
    events = [{"name": f"{kind} stage {stage} micro-batch {i}", "cat": words[kind], "ph": "X", "pid": 0, "tid": rank,
                   "ts": 1e6 * (begin - start), "dur": 1e6 * (end - begin), "args": {"what": words[kind], "stage": stage, "micro_batch": i}}
              for rank, spans in enumerate(every) for (kind, stage, i), begin, end in spans]
    events += [{"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}} for rank in range(len(every))]
    try:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "trace.json"), "w") as file:
            json.dump({"traceEvents": events}, file)
    except OSError as problem:  # a full disk costs the trace, not the run
        say(f"no trace in {folder}: {problem.strerror}")


def describe_first_steps(trainer, say):
    """What the start promised beside what came of it, and what one step sends. Returns the bytes for the log."""
    predicted, measured = predicted_bytes(trainer), trainer.measured_bytes()
    say("memory   measured (predicted): " + ", ".join(f"{kind} {size(n)} ({size(predicted[kind])})" for kind, n in measured.items())
        + (f"; the allocator holds {size(torch.cuda.memory_allocated())}, at most {size(torch.cuda.max_memory_allocated())}"
           if trainer.device.type == "cuda" else ""))
    sent = ", ".join(f"{name} {t.calls} calls {size(t.bytes)}" for name, t in dist.traffic().items() if t.bytes)
    say("traffic  sent by rank 0 a step: " + ("not counted with --comm torch" if trainer.s.comm == "torch" else sent or "nothing"))
    return {"predicted_bytes": predicted, "measured_bytes": measured}


def size(n):
    return next(f"{n / 2**k:.1f} {unit}" for k, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if n >= 2**k or k == 10)


def resume(trainer, run, say):
    """Load the run's checkpoint, if it has one; returns how many steps are done."""
    first = run.checkpoint.manifest["step"] if run.checkpoint else 0
    least, most = trainer.agree(-first, first)
    if most != -least:
        raise BadInput(f"ranks found checkpoints of steps {-least} to {most}: --out and --resume must be folders that all nodes share")
    if run.checkpoint:
        changes = differences(run.checkpoint.manifest["run"], run.identity, ("flags",)) if run.s.steps else []
        say(f"resume   {run.checkpoint.path}: after step {first}" + "".join(f", {change}" for change in changes))
        if first < run.s.steps:
            trainer.load(run.checkpoint, run.moments)
    return first


class NotFinite(Exception):
    pass


def train(run, device):
    """All steps that are left, and a sample. Returns, on rank 0, whether all there is to save is on the disk; True on the others."""
    s, config, rank = run.s, run.config, dist.get_rank()

    def say(text):
        if rank == 0:
            with contextlib.suppress(OSError):  # what is printed may go to the disk that is full: it comes when there is room again
                print(text, flush=True)

    trainer = Trainer(s, config, run.source, run.data, device)
    describe(trainer, say, run)
    # Clusters announce by SIGTERM that they will take the machine away: then the step ends first, and is saved. After an error this
    # stays: torchrun sends SIGTERM to those who are still telling what went wrong.
    before = signal.signal(signal.SIGTERM, lambda *_: setattr(trainer, "terminated", True))
    saved = train_steps(trainer, run, resume(trainer, run, say), say)
    if run.saving and not s.steps and not run.checkpoint and (problem := trainer.save(0, run.identity)):
        say(f"not saved in {s.out}: {problem.strerror}")
        saved = False
    if s.sample and not trainer.stopping:
        dist.progress("sampling")
        text = trainer.sample(s.sample)
        say(f"--- sample, {s.sample} tokens after {s.prompt!r} ---\n{text}\n---" if trainer.bytes else f"sample   {text}")
    signal.signal(signal.SIGTERM, before)
    return saved


def train_steps(trainer, run, first, say):
    """Steps `first` to the last, or to SIGTERM; returns what `train` does. NotFinite where --on-nan is stop."""
    s, config, device = run.s, run.config, trainer.device
    log = Log(os.path.join(s.out, "log.jsonl"), first) if run.lock else None

    def record(entry):
        if log and (problem := log.write(entry)):
            say(f"log      step {entry['step']} waits to be written to {s.out}/log.jsonl: {problem.strerror}")

    peak, tokens, saved = peak_flops(device), s.batch_size * config.seq_len, True
    if device.type == "cuda" and peak is None:
        say(f"speed    unknown GPU {torch.cuda.get_device_name(device)}, no MFU")
    since, last, memory = time.perf_counter(), first, {}
    for step in range(first, s.steps):
        done, entry = step + 1, None
        dist.reset_traffic()
        dist.progress("starting the step", step=done)
        tracing = s.trace and step == min(first + 2, s.steps - 1)  # the first steps warm up
        if tracing:
            parallel.record_times(trainer.net.pipeline)
        loss, norm = trainer.step(step, BirthLog() if step == first else None)
        if tracing:
            write_trace(trainer, s.trace, say)
        where = f"step {done:>{len(str(s.steps))}}/{s.steps}"
        saving = run.saving and (done == s.steps or trainer.stopping or s.save_every and done % s.save_every == 0)
        if bad := trainer.bad or (saving or done == s.steps) and trainer.agree(trainer.read())[0]:
            what = "the gradient" if bad == 1 else f"the loss on rank {dist.get_world_size() + 1 - bad}"
            record({"step": done, "not_finite": what, "on_nan": s.on_nan})
            if s.on_nan == "stop":
                raise NotFinite(f"{what} is not finite: a smaller --lr may help, or --on-nan skip")
            say(f"{where}  {what} is not finite: step skipped, {trainer.skipped} in all")
        sent = sum(t.bytes for t in dist.traffic().values()) if s.comm != "torch" else None
        if done == min(first + 2, s.steps):
            memory = describe_first_steps(trainer, say)
        evaluate = s.eval_every and (done % s.eval_every == 0 or done == s.steps)
        if s.log_every and (done % s.log_every == 0 or done in (1, s.steps) or evaluate or trainer.stopping):
            loss, norm = trainer.mean_over_ranks(loss), norm.item()  # .item() waits for the device: only here, not every step
            now = time.perf_counter()
            speed = (done - last) * tokens / (now - since)
            left = (s.steps - done) * tokens / speed
            entry = dict(step=done, loss=loss, grad_norm=norm, lr=learning_rate(s, step), tokens_per_s=speed, comm_bytes=sent, **memory)
            text = f"{where}  loss {loss:.4f}  norm {norm:.2f}  lr {entry['lr']:.1e}  "
            if trainer.scaler:
                entry.update(loss_scale=trainer.scaler.scale, skipped_steps=trainer.scaler.skipped)
                text += f"scale {trainer.scaler.scale:g} ({trainer.scaler.skipped} skipped)  "
            text += f"{speed / 1e3:.1f}k tokens/s  "
            if peak:
                entry["mfu"] = speed * config.flops_per_token() / peak / trainer.mesh.size()
                text += f"MFU {100 * entry['mfu']:.1f} %  "
            say(text + f"left {int(left) // 60}:{int(left) % 60:02}")
            since, last, memory = now, done, {}
        if evaluate:
            started = time.perf_counter()
            val_loss = trainer.evaluate()
            say(f"{where}  validation loss {val_loss:.4f}"
                + (f" nats a byte, {val_loss / math.log(2):.2f} bits" if trainer.bytes else ""))
            if entry:
                entry["val_loss"] = val_loss
            since += time.perf_counter() - started
        if entry:
            record(entry)
        if saving:
            started = time.perf_counter()
            if log:
                with contextlib.suppress(OSError):  # a disk that is full only now: the checkpoint will say so
                    os.fsync(log.file)
            problem = trainer.save(done, run.identity)
            saved = problem is None
            if problem:
                left = checkpoints(s.out)
                say(f"{where}  not saved in {s.out}: {problem.strerror}; {'going on' if done < s.steps else 'ended'}, "
                    + (f"{os.path.basename(left[-1])} is complete" if left else "no checkpoint is there yet"))
                record({"step": done, "not_saved": problem.strerror})
            elif trainer.stopping or done == s.steps:
                say(f"saved    {s.out}: log.jsonl, step-{done:08} (Hugging Face GPT-2, optimizer)")
            since += time.perf_counter() - started
        if trainer.stopping:
            say(f"{where}  SIGTERM: " + ("the same command goes on from here" if saving and saved else "nothing is saved"
                                        + (" without --out" if not saving else "")))
            break
    return saved


# ------------------------------------------------------------------------------------------------------------------- start

@dataclass
class Run:
    """A command line, checked, and what it led to."""
    s: Settings
    config: GPTConfig
    source: object           # source(name): a parameter's initial value; None: by the seed
    data: tuple
    checkpoint: Checkpoint   # to go on from, or None
    moments: dict            # of its optimizer
    identity: dict           # `run_of`
    processes: int
    local_world: int
    saving: bool
    lock: object             # of --out, on rank 0


def prepare(arguments, rank=0, world=1, local_world=1):
    """The Run that a command line asks for. BadInput says what is wrong with it."""
    s = parse(arguments)
    checkpoint = find_checkpoint(s, rank == 0)
    if checkpoint:
        s = parse(checkpoint.flags() + arguments)
    check_numbers(s)
    config, source = model_config(s, checkpoint)
    processes = check_layout(s, config, world, local_world)
    if checkpoint and not s.steps and checkpoint.manifest["run"]["data"]["bytes"]:
        data = np.empty(0, np.uint8), np.empty(0, np.uint8), True  # only to sample
    else:
        data = load_data(s)
        check_data(s, config, *data[:2])
    check_prompt(s, config, data[2])
    identity = run_of(s, config, data)
    if checkpoint and s.steps and (how := differences(checkpoint.manifest["run"], identity, ("data",))):
        raise BadInput(f"--data {s.data or '(the standard library)'} is not what {checkpoint.path} was trained on ({'; '.join(how)}): "
                       f"give that, or --init-from {checkpoint.path} to start a new run from its weights")
    saving, lock = bool(s.out) and not (checkpoint and not s.steps), None
    if saving:
        asked = checkpoint
        checkpoint, identity = start_of(s, identity, asked, rank == 0)
        if checkpoint is not asked:
            source = open_hf(checkpoint.path)[1]
    moments = read_moments(checkpoint, config) if checkpoint else None
    if s.trace and rank == 0:
        check_folder(s.trace, "--trace")
    if saving and rank == 0:
        lock = claim(s.out, identity)
    return Run(s, config, source, data, checkpoint, moments, identity, processes, local_world, saving, lock)


def main():
    sys.stdout.reconfigure(errors="replace")  # a sample may hold what this terminal cannot show
    rank = int(os.environ.get("RANK", "0"))
    world, local_world = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        run = prepare(sys.argv[1:], rank, world, local_world)
    except BadInput as problem:
        refuse("train.py", problem, rank)
    s = run.s
    if run.processes != world:
        if run.lock:  # rank 0 writes into it, and empties it when all is saved: a full disk has room for that
            run.lock.truncate(0)
            run.lock.close()
        dist.start_again(run.processes, lambda: not run.lock or not os.path.getsize(run.lock.name))
    watch = dist.Watch("train.py", s.timeout)
    try:
        device = dist.initialize(s.device, s.timeout)
        watch.start()
        saved = train(run, device)
        if run.lock and saved:
            run.lock.truncate(0)
        dist.barrier()
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must hear of it
        if not isinstance(error, (BadInput, NotFinite, dist.PeerError, torch.distributed.DistError)):
            traceback.print_exc()
        watch.give_up(error)
    watch.stop()
    dist.destroy_process_group()
    sys.exit(0 if saved else 1)


def check_folder(folder, name):
    try:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, ".writable"), "w"):
            pass
        os.remove(os.path.join(folder, ".writable"))
    except OSError as error:
        raise BadInput(f"{name} {folder}: {error.strerror}; name a folder that can be written") from None


# ============================================================ machinery: the same results, faster or safer ============

if __name__ == "__main__":
    main()
