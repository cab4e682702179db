"""Train a GPT, on one process or many:

    python train.py                                          one process
    torchrun --nproc_per_node 4 train.py --dp 2 --tp 2       four: two replicas, each cut in two
    python train.py --out runs/1                             with checkpoints
    python train.py --out runs/1 --resume --steps 900        goes on from the newest of them
    python train.py --steps 0 --sample 200 --resume runs/1   text from it
    torchrun --nproc_per_node 2 train.py --plain --dp 2      the upper halves of all files alone, to step through

With no flags it trains a 0.8M-parameter model on the source of Python's standard library, in a minute or two on a CPU.
Every layout sees the same tokens and logs the same loss, because a batch is a function of (seed, step, sample), and
initial weights are a function of (seed, name). `python train.py --help` lists the flags.

The upper half is a complete program. The lower half puts subclasses into the table FASTER, which check the input, start
the processes that a layout needs, go on from the newest checkpoint in --out, survive crashes and report more.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import sys
import sysconfig
from dataclasses import dataclass, field

import numpy as np
import torch

import collectives as dist
import kernels
import model
import parallel
from model import ACTIVATIONS, GPT, PRESETS, buffers, materialize, shapes

FASTER = {}  # class of the upper half -> the subclass to take in its place


# ------------------------------------------------------------------------------------------------------------- settings

def flag(default, help, **more):
    return field(default=default, metadata=dict(help=help, **more))


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
SIZES = "n_layer", "n_head", "n_embd", "seq_len", "vocab_size", "experts", "top_k", "expert_every"
MOMENTS = "exp_avg", "exp_avg_sq"  # what AdamW keeps of a parameter: running means of its gradient and of its square


@dataclass
class Flags:
    """Flags of the command line, --with-dashes."""
    data: str = flag("", "a text file, read as bytes; left out, the source of Python's standard library")
    model: str = flag("tiny", "preset", choices=list(PRESETS))
    n_layer: int = flag(None, "blocks, instead of the preset's")
    n_head: int = flag(None, "attention heads, instead of the preset's")
    n_embd: int = flag(None, "width, instead of the preset's")
    seq_len: int = flag(None, "tokens a sequence, instead of the preset's")
    vocab_size: int = flag(None, "vocabulary, instead of the preset's")
    activation: str = flag(None, "of the MLP, instead of the preset's", choices=list(ACTIVATIONS))
    experts: int = flag(None, "MLPs that a block's router has to choose from, instead of the preset's one")
    top_k: int = flag(None, "experts that a token goes through (2)")
    expert_every: int = flag(None, "of how many blocks the last has experts (1)")
    balance_rate: float = flag(1e-3, "what a step adds to an expert's bias, or takes from it, to even out the load")
    steps: int = flag(450, "optimizer steps")
    batch_size: int = flag(16, "sequences a step, over all ranks")
    micro_batches: int = flag(1, "parts of each rank's share of a step; their gradients add up")
    lr: float = flag(2e-3, "peak learning rate")
    min_lr: float = flag(1e-4, "learning rate at the end of the cosine")
    warmup_steps: int = flag(20, "steps of linear warm-up")
    weight_decay: float = flag(0.1, "AdamW's, on matrices only")
    clip: float = flag(1.0, "largest gradient norm; 0 does not clip")
    seed: int = flag(0, "of weights, batches and sampling")
    dp: int = flag(None, "data-parallel replicas; left out, what --tp, --cp and --pp leave")
    tp: int = flag(1, "ranks each layer is cut over")
    sp: bool = flag(False, "sequence parallelism: tp cuts the tokens too, between the layers that it cuts")
    cp: int = flag(1, "context parallelism: ranks each sequence is cut over")
    cp_kind: str = flag("ring", "keys and values go round, or tokens are traded for heads", choices=["ring", "ulysses"])
    ep: int = flag(1, "ranks of dp that share out the experts")
    pp: int = flag(1, "ranks the layers are spread over, as a pipeline")
    schedule: str = flag("1f1b", "of the pipeline", choices=list(parallel.SCHEDULES))
    virtual_stages: int = flag(1, "stages a rank has, for --schedule interleaved")
    zero: int = flag(0, "ZeRO over dp x cp: 1 shards optimizer state, 2 also gradients, 3 parameters", choices=range(4))
    zero_within: int = flag(None, "ranks that ZeRO shards over, e.g. a node's; other such groups are replicas")
    dtype: str = flag("fp32", "of the layers; bf16 and fp16 keep float32 masters", choices=list(DTYPES))
    reduce_dtype: str = flag("same", "what replicas send gradients in; same: as they add up", choices=["same", "bf16"])
    recompute: str = flag("none", "what backward runs again, not to keep it", choices=["none", "block", "attention"])
    device: str = flag("auto", "auto: CUDA where each process gets a GPU of its own", choices=["auto", "cpu", "cuda"])
    kernels: str = flag("auto", "auto: Triton from Hopper GPUs on, except in fp64", choices=["auto", "torch", "triton"])
    comm: str = flag("ours", "collectives: the fastest, the textbook's, PyTorch's", choices=["ours", "ring", "torch"])
    plain: bool = flag(False, "run the upper halves of all files alone; several processes need torchrun then")
    eval_every: int = flag(100, "steps between validations, and one at the end; 0: never")
    log_every: int = flag(10, "steps between log lines; 0: never")
    sample: int = flag(200, "tokens to generate at the end; 0: none")
    prompt: str = flag("def ", "what the sample continues (data of bytes)")
    out: str = flag("", "folder for log.jsonl and checkpoints")
    save_every: int = flag(100, "steps between checkpoints, and one at the end; 0: only that one")
    resume: str = flag("", "checkpoint to go on from, or its folder; no value: --out", nargs="?", const="newest")


def parse(arguments):
    kind = FASTER.get(Flags, Flags)
    parser = FASTER.get(argparse.ArgumentParser, argparse.ArgumentParser)(
        description="Train a GPT on one process or many.", allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for f in dataclasses.fields(kind):
        how = {"action": "store_true"} if f.type is bool else {"type": f.type, "default": f.default}
        parser.add_argument("--" + f.name.replace("_", "-"), **how, **f.metadata)
    return kind(**vars(parser.parse_args(arguments)))


def config_of(s):
    """The preset's GPTConfig, with the sizes that were given. inner=0: the MLP is 4 times as wide as n_embd."""
    given = {name: getattr(s, name) for name in (*SIZES, "activation") if getattr(s, name) is not None}
    return dataclasses.replace(PRESETS[s.model], inner=0, **given)


def processes_of(s, world):
    """How many processes the layout takes. Where --dp is left out, it becomes what the other axes leave of `world`."""
    s.dp = s.dp or max(1, world // (s.tp * s.pp * s.cp))
    return s.dp * s.tp * s.pp * s.cp


def device_for(asked, processes):
    """--device, where it is auto: CUDA if each process on this machine gets a GPU of its own, else the CPU."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= processes
    return asked if asked != "auto" else "cuda" if enough else "cpu"


# ----------------------------------------------------------------------------------------------------------------- data

def standard_library():
    """The source files of Python's standard library: the one text that is on every reader's machine."""
    root, others = pathlib.Path(sysconfig.get_paths()["stdlib"]), {"site-packages", "dist-packages", "test", "tests"}
    return [file for file in root.rglob("*.py") if not others & set(file.parts)]


def read_texts(files):
    """All files' bytes, uint8, in the order of their names; a file with a zero byte in it is no text and left out."""
    texts = [file.read_bytes() for file in sorted(files)]
    return np.frombuffer(b"\n".join(text for text in texts if b"\0" not in text), np.uint8)


def split(tokens):
    """(training tokens, held-out tokens): the last tenth is held out."""
    return np.split(tokens, [len(tokens) - len(tokens) // 10])


def batch(tokens, seed, step, batch_size, seq_len, samples):
    """Inputs and targets, int64 (n, T) on the CPU, of some samples (a slice) of a step's batch. They depend on the
    arguments alone, so in every layout a step sees the same tokens."""
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - seq_len, batch_size)[samples]
    rows = torch.from_numpy(np.stack([tokens[i:i + seq_len + 1] for i in starts]).astype(np.int64))     # (n, T + 1)
    return rows[:, :-1], rows[:, 1:]


# ------------------------------------------------------------------------------------------------------------- training

def learning_rate(s, step):
    """Linear warm-up, then half a cosine from lr to min_lr at the last step; steps count from 0."""
    if step < s.warmup_steps:
        return s.lr * (step + 1) / s.warmup_steps
    progress = (step - s.warmup_steps) / max(1, s.steps - 1 - s.warmup_steps)
    return s.min_lr + (s.lr - s.min_lr) * (1 + math.cos(math.pi * min(1, progress))) / 2


def how_even(loads):
    """Of loads (L, E), 0 in blocks without experts: {"load_max": the largest, as a multiple of the mean,
    "load_entropy": in nats, log E at most; the mean over blocks}."""
    shares = loads[loads.sum(1) > 0].double()
    shares /= shares.sum(1, keepdim=True)
    return {"load_max": (shares.max() * loads.shape[1]).item(),
            "load_entropy": torch.special.entr(shares).sum(1).mean().item()}


class LossScale:
    """fp16's smallest number is 6e-8. So that gradients stay above it, the loss is multiplied by `scale`, and
    `clip_grad_norm_` divides them by it. A step whose gradients are not finite is skipped, and halves the scale. 200
    good steps double it. Micikevicius et al., "Mixed Precision Training" (2018)."""

    def __init__(self, start=2.0**16, interval=200):
        self.scale, self.interval, self.good = start, interval, 0

    def update(self, finite):
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.good % self.interval == 0:
            self.scale = min(2.0**24, self.scale * 2)


class Trainer:
    """Model, optimizer, data and this rank's place in the mesh. s: the Flags. source(name) gives a parameter's initial
    value; None: the seed does. data: (training tokens, held-out tokens)."""

    def __init__(self, s, config, source, data, device):
        self.s, self.config, self.device = s, config, device
        self.train_data, self.held_out = data
        self.mesh = parallel.make_mesh(device.type, s.dp, s.tp, s.pp, s.cp)
        self.control = dist.new_group(backend="gloo")  # all ranks, for `agree`; on the CPU, where Python reads it
        reduce_dtype = None if s.reduce_dtype == "same" else DTYPES[s.reduce_dtype]
        self.net = parallel.parallelize(config, self.mesh, device, DTYPES[s.dtype], source, s.seed, s.zero,
                                        reduce_dtype, s.recompute, s.virtual_stages, s.zero_within,
                                        s.sp, s.cp_kind, s.ep)
        for group in self.net.groups:
            dist.use(group, s.comm)
        self.optimizer = self.make_optimizer(torch.optim.AdamW)
        self.scaler = LossScale() if s.dtype == "fp16" else None
        self.skipped = 0  # steps left out because a number was not finite
        self.loads = None  # how many tokens each expert got in the last step that was not left out, int64 (L, E)
        n, r = s.batch_size // s.dp, dist.get_rank(self.net.dp)
        self.samples = slice(r * n, (r + 1) * n)  # this rank's of each batch; its peers in tp, cp and pp take the same

    def make_optimizer(self, adamw):
        return self.net.make_optimizer(adamw, self.s.weight_decay, lr=self.s.lr, betas=(0.9, 0.95))

    def train(self, saved):
        """Run the steps after checkpoint `saved`, all if it is None; then show a sample. Steps count from 0."""
        for step in range(self.load(saved), self.s.steps):
            dist.reset_traffic()  # the log of what a step sends, which the lower half reads
            loss, norm = self.step(step)
            self.report(step + 1, loss, norm)
            if self.s.out and self.due("save", step + 1):
                self.save(step + 1)
        if self.s.sample:
            self.show_sample()

    def step(self, step):
        """One optimizer step. Returns (mean loss over this rank's micro-batches, gradient norm before clipping)."""
        s, scale = self.s, self.scaler.scale if self.scaler else 1.0
        x, y = self.micro_batches(self.train_data, s.seed, step)
        self.optimizer.zero_grad()
        loss = self.net.forward_backward(x, y, s.schedule, scale)  # averages gradients over replicas, too
        norm = self.net.clip_grad_norm_(s.clip, scale)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(s, step)
        if self.all_finite(loss, norm):
            self.optimizer.step()
            if self.config.experts:
                self.loads = self.net.balance(s.balance_rate)
        return loss, norm

    def micro_batches(self, tokens, seed, step):
        """This rank's samples of a step: [inputs, targets], each a tuple of micro-batches, int64 (B, T)."""
        rows = batch(tokens, seed, step, self.s.batch_size, self.config.seq_len, self.samples)
        return [t.to(self.device).chunk(self.s.micro_batches) for t in rows]

    def all_finite(self, loss, norm):
        """Whether this step counts. If one rank finds that its loss or the norm is not finite, all ranks skip the step,
        because replicas must stay equal."""
        bad, = self.agree(not (loss.isfinite() and norm.isfinite()))
        self.skipped += bad
        if self.scaler:
            self.scaler.update(not bad)
        return not bad

    def agree(self, *numbers):
        """The largest of each whole number over all ranks, so that all do the same thing."""
        numbers = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        dist.all_reduce(numbers, dist.ReduceOp.MAX, self.control)
        return numbers.tolist()

    def due(self, what, done):
        """Whether "log", "eval" or "save" comes after `done` steps. 0 means never, but there is always a last save."""
        every, last = getattr(self.s, what + "_every"), done == self.s.steps
        return every > 0 and done % every == 0 or last and (every > 0 or what == "save")

    def report(self, done, loss, norm):
        """After `done` steps, when due: loss, gradient norm and the loss of held-out data."""
        if self.due("log", done) or self.due("eval", done):
            loss, lr = self.mean_over_ranks(loss), learning_rate(self.s, done - 1)
            entry = {"step": done, "loss": loss, "grad_norm": norm.item(), "lr": lr}
            if self.loads is not None:
                entry |= how_even(self.loads)
            if self.due("eval", done):
                entry["val_loss"] = self.evaluate()
            self.record(entry)

    def record(self, entry):
        """Rank 0 prints the entry and adds it to log.jsonl."""
        if dist.get_rank() == 0:
            print("  ".join(f"{key} {value:.6g}" for key, value in entry.items()), flush=True)
            if self.s.out:
                with open(os.path.join(self.s.out, "log.jsonl"), "a") as file:
                    file.write(json.dumps(entry) + "\n")

    def mean_over_ranks(self, loss):
        loss = loss.clone()
        dist.all_reduce(loss, dist.ReduceOp.AVG, self.net.replicas)  # ranks of tp and pp have the same loss
        return loss.item()

    @torch.no_grad()
    def evaluate(self, batches=8):
        """Mean loss, in nats a token, over the same held-out batches every time, in every layout."""
        losses = [self.net.forward(*self.micro_batches(self.held_out, self.s.seed, i)) for i in range(batches)]
        return self.mean_over_ranks(torch.stack(losses).mean())

    def whole_model(self):
        """Each rank gives its parts; rank 0 gets the GPT that one process would hold, the others its shapes alone."""
        whole, device = GPT(self.config, seed=None), self.device if dist.get_rank() == 0 else "meta"
        materialize(whole, self.net.whole_parameter, device, parallel.master_dtype(self.net.dtype))
        return whole

    def show_sample(self):
        """Rank 0 prints what the model goes on with after the prompt."""
        whole = self.whole_model()
        if dist.get_rank() == 0:
            prompt = torch.tensor([list(os.fsencode(self.s.prompt)) or [10]], device=self.device)
            tokens = whole.generate(prompt, self.s.sample, 0.8, top_k=40, seed=self.s.seed)[0].tolist()
            text = bytes(min(t, 255) for t in tokens).decode(errors="replace")
            print(f"--- sample, {self.s.sample} tokens ---\n{text}\n---", flush=True)

    # A checkpoint has whole tensors, so every layout can load it. Batches and samples are functions of (seed, step), so
    # the number of steps stands for the position in the data and the state of every random generator.

    def whole_tensors(self):
        """(label, tensor) of each parameter, "wte.weight", and of its moments, "exp_avg.wte.weight": whole, one at a
        time, on all ranks, because each gives its part."""
        for key in (None, *MOMENTS):
            for name in {**shapes(self.config), **({} if key else buffers(self.config))}:
                yield f"{key}.{name}" if key else name, self.net.whole_parameter(name, key)

    def save(self, done):
        """Write step-00000100.pt into --out."""
        tensors = {label: tensor.cpu() for label, tensor in self.whole_tensors() if dist.get_rank() == 0}
        if dist.get_rank() == 0:
            torch.save({"step": done, "skipped": self.skipped, "scaler": self.scaler and vars(self.scaler),
                        "tensors": tensors}, os.path.join(self.s.out, f"step-{done:08}.pt"))

    def load(self, saved):
        """Go on as if never stopped; returns how many steps are done. Weights came with the model, from `source`; here
        each rank takes its part of the moments."""
        if not saved:
            return 0
        self.skipped = saved["skipped"]
        if self.scaler and saved["scaler"]:
            vars(self.scaler).update(saved["scaler"])
        if updates := saved["step"] - self.skipped:  # before the first one, an optimizer has no state
            for name in shapes(self.config):
                for key in MOMENTS:
                    self.net.load_state(name, key, saved["tensors"][f"{key}.{name}"])
            for param in [p for group in self.optimizer.param_groups for p in group["params"]]:
                self.optimizer.state[param]["step"] = torch.tensor(float(updates), device="cpu")
        return saved["step"]


# ---------------------------------------------------------------------------------------------------------------- start

class Run:
    """What a command line asks for: `s` (Flags), `config`, `data`, `saved` (a checkpoint, or None) and `source` (of
    initial weights, or None)."""

    def __init__(self, arguments):
        world, s = int(os.environ.get("WORLD_SIZE", "1")), parse(arguments)
        processes = processes_of(s, world)
        if processes != world:
            sys.exit(f"train.py: this layout needs torchrun --nproc_per_node {processes}; {world} were started")
        if s.batch_size % (s.dp * s.micro_batches):
            sys.exit("train.py: --batch-size must be a multiple of --dp x --micro-batches")
        s.device = device_for(s.device, dist.processes_of_a_node(world))
        kernels.use(s.kernels)
        self.s, self.config, self.saved, self.source = s, config_of(s), None, None
        self.data = split(read_texts([pathlib.Path(s.data)] if s.data else standard_library()))
        if s.resume:
            path = pathlib.Path(s.out if s.resume == "newest" else s.resume)
            path = max(path.glob("step-*.pt")) if path.is_dir() else path
            self.saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            tensors = self.saved["tensors"]
            self.source = lambda name: tensors["wte.weight" if name == "lm_head.weight" else name]  # they are one
        if s.out:
            os.makedirs(s.out, exist_ok=True)

    def start(self):
        """Meet the other processes, train, part."""
        device = dist.initialize(self.s.device)
        Trainer(self.s, self.config, self.source, self.data, device).train(self.saved)
        dist.destroy_process_group()


def main():
    """Read the command line and train. What stands below the files' bars is reached through these tables alone."""
    tables = [dist.LINKS, dist.PREPARE, kernels.FASTER, kernels.CHECKS, model.FASTER, model.CHECKS, parallel.FASTER,
              parallel.BUCKET_MB, FASTER]
    for table in tables if "--plain" in sys.argv else ():
        table.clear()
    FASTER.get(Run, Run)(sys.argv[1:]).start()


# ============================================================ machinery: the same results, faster or safer ============

import contextlib
import errno
import fcntl
import functools
import gc
import re
import shutil
import signal
import socket
import time
import traceback
import zlib
from collections import Counter
from functools import partial

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from model import crc_of_file, open_hf, read_safetensors, sync_folder, write_file, write_hf, write_safetensors

# -------------------------------------------------------------------------------------------------- settings, bad input

@dataclass
class Settings(Flags):
    """Every flag of the command line: those above, and those that only this half of the file has."""
    data: str = flag("", "a text file, a folder of text, or a .bin of tokens (uint16, or llm.c's with its header); "
                         "left out, the source of Python's standard library as bytes. The last 10 %% are held out")
    out: str = flag("", "folder for log.jsonl and checkpoints; the same command again goes on from the newest one")
    resume: str = flag("", "go on from this checkpoint, or the newest in this folder; without a value, in --out. Flags "
                           "that decide the losses (data, sizes, --lr ...) keep its values if they are left out",
                       nargs="?", const="newest", metavar="PATH")
    init_from: str = flag("", "start from the weights, and with the sizes, of this Hugging Face GPT-2 folder")
    trace: str = flag("", "folder for trace.json: what every rank ran in the third step, for Perfetto")
    profile: str = flag("", "folder for rank-0.json and so on: PyTorch's profile of the third step on each rank, for "
                            "Perfetto; kernels that CUDA graphs replay show as graph launches")
    cuda_graphs: str = flag("auto", "launch a micro-batch's kernels as one CUDA graph, so that the CPU does not launch "
                                    "each of them; auto: on GPUs, without experts, with --zero 0 or 1 (2 and 3 with "
                                    "--pp 1 --schedule 1f1b)", choices=["auto", "off", "on"])
    keep: int = flag(2, "how many of the newest checkpoints to keep; 0: all")
    on_nan: str = flag("stop", "what all ranks do if a loss or gradient is not finite", choices=["stop", "skip"])
    timeout: int = flag(600, "seconds without progress after which a rank stops and names the silent ranks")


def schedule_of(s):
    """The pipeline's actions, a list for each rank. ValueError if they cannot be made or would never finish."""
    return checked(parallel.SCHEDULES[s.schedule], s.pp, s.micro_batches, s.virtual_stages)


@functools.cache  # bench.py's plan asks for the same lists in thousands of layouts
def checked(schedule, p, m, v):
    lists = schedule(p, m, v)
    parallel.check(parallel.lower(lists))
    return lists


class BadInput(Exception):
    """Its text is one line for the user: the flag or the file, what is wrong, a value that would work."""


def reject(wrong, text):
    if wrong:
        raise BadInput(text)


def refuse(program, problem, rank):
    """End this process with exit code 2. The first rank of each node says why, in one line, because a file may be
    missing on one node alone."""
    if not rank or os.environ.get("LOCAL_RANK") == "0":
        print(f"{program}: {problem}", file=sys.stderr, flush=True)
    else:
        time.sleep(2)  # torchrun ends all ranks when one has exited, so the rank that prints has to be the first
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print its usage and exit on every rank, maybe before rank 0 prints
        raise BadInput(message.removeprefix("argument ") + "; see --help")


def check_numbers(s):
    """Reject numbers that are wrong whatever the other flags are."""
    at_least_1 = {"batch_size", "micro_batches", "dp", "tp", "pp", "cp", "ep", "virtual_stages", "timeout",
                  *SIZES} - {"experts"}
    for f in dataclasses.fields(s):
        given, least = getattr(s, f.name), int(f.name in at_least_1)
        if f.type in (int, float) and given is not None and not least <= given <= 1e9:  # nan and inf, too
            value = f.default or getattr(PRESETS["tiny"], f.name, 2)
            raise BadInput(f"--{f.name.replace('_', '-')} {given}: must be between {least} and a billion, e.g. {value}")
    reject(s.lr < s.min_lr, f"--min-lr {s.min_lr:g} is above --lr {s.lr:g}: give e.g. --min-lr {s.lr / 10:g}")


def model_config(s, checkpoint=None):
    """(GPTConfig, source of initial weights or None) that the settings ask for. checkpoint: the one of --resume."""
    where, folder = ("--resume", checkpoint.path) if checkpoint else ("--init-from", s.init_from)
    reject(checkpoint and s.init_from, f"--init-from {s.init_from} beside --resume: leave one of them out")
    given = {name: getattr(s, name) for name in (*SIZES, "activation") if getattr(s, name) is not None}
    if not folder:
        n_head, n_embd = (given.get(name, getattr(PRESETS[s.model], name)) for name in ("n_head", "n_embd"))
        reject(n_embd % n_head, f"--n-embd {n_embd} is not a multiple of {n_head} heads: give e.g. --n-embd "
               f"{-(-n_embd // n_head) * n_head}")
        top_k = given.get("top_k", PRESETS[s.model].top_k)
        reject(0 < given.get("experts", 0) < top_k, f"--experts {s.experts} is less than the {top_k} that a token goes "
               f"through: give --top-k {s.experts} or --experts {max(4, top_k)}")
        for name in ("top_k", "expert_every"):
            reject(name in given and not given.get("experts"), f"--{name.replace('_', '-')} is for a model with "
                   "experts: give --experts 4, say, too")
        every, blocks = given.get("expert_every", 1), given.get("n_layer", PRESETS[s.model].n_layer)
        reject(every > blocks, f"--expert-every {every}: the last of each {every} blocks has experts, but the model "
               f"has only {blocks}: give --expert-every {blocks}")
        return config_of(s), None
    try:
        config, source = open_hf(folder)
    except (ValueError, OSError) as error:
        raise BadInput(f"{where} {folder}: {error}") from None
    for name, value in given.items():
        there = getattr(config, name) if config.experts or name not in ("top_k", "expert_every") else "no experts"
        reject(value != there, f"--{name.replace('_', '-')} {value}: the model in {where} has {there}; leave the flag "
               "out")
    return config, source


def check_layout(s, config, world, local_world):
    """Reject a layout whose sizes do not divide or that needs more GPUs than there are. Fills in s.dp, s.device and
    s.cuda_graphs. Returns how many processes the layout needs."""
    processes, rest, unit = processes_of(s, world), s.tp * s.pp * s.cp, s.dp * s.micro_batches
    instead = f"--dp {world // rest}" if world % rest == 0 else "--tp 1 --pp 1 --cp 1 and leave --dp out"
    axes = f"--dp {s.dp} x --tp {s.tp} x --pp {s.pp}" + f" x --cp {s.cp}" * (s.cp > 1)
    reject(world > 1 and world != processes, f"{axes} needs {processes} processes, {world} were started: give "
           f"{instead}")
    reject(world > local_world and local_world % s.tp, f"--tp {s.tp} would reach over the edge of a node with "
           f"{local_world} processes, though tp sends in every layer: give --tp {math.gcd(s.tp, local_world)}")
    reject(config.n_head % s.tp, f"--tp {s.tp} does not divide the model's {config.n_head} heads: give --tp "
           f"{math.gcd(s.tp, config.n_head)}")
    reject(s.sp and s.tp == 1, "--sp cuts tokens over --tp: give --tp 2, say, or leave --sp out")
    chunks = s.cp * (2 if s.cp > 1 and s.cp_kind == "ring" else 1)
    parts = math.lcm(chunks, s.cp * s.tp if s.sp else 1)
    who = f"--cp {s.cp}" * (s.cp > 1) + " with " * (s.cp > 1 and s.sp) + f"--tp {s.tp} --sp" * s.sp
    reject(config.seq_len % parts, f"{who}: sequences of {config.seq_len} tokens cannot be cut into {parts} parts: "
           f"give --seq-len {-(-config.seq_len // parts) * parts}")
    heads = config.n_head // s.tp
    reject(s.cp_kind == "ulysses" and heads % s.cp, f"--cp-kind ulysses: --cp {s.cp} does not divide the {heads} heads "
           f"of a rank: give --cp {math.gcd(s.cp, heads)} or --cp-kind ring")
    fixed = s.init_from or s.resume  # then --experts cannot change the model
    reject(s.ep > 1 and not config.experts, f"--ep {s.ep} shares out experts, and the model has none: "
           + f"give --experts {2 * s.ep}, say, or " * (not fixed) + "leave --ep out")
    shared, enough = math.gcd(s.ep, s.dp, config.experts), world == 1 and config.experts % s.ep == 0
    reject(s.dp % s.ep, f"--ep {s.ep} does not divide --dp {s.dp}: give --ep {shared}"
           + f" or --dp {-(-s.dp // s.ep) * s.ep}" * enough)
    reject(config.experts % s.ep, f"--ep {s.ep} does not divide the {config.experts} experts: give --ep {shared}")
    reject(config.inner < s.tp or config.vocab_size < s.tp, f"--tp {s.tp} is more than the MLP ({config.inner}) or "
           f"the vocabulary ({config.vocab_size}) is wide: give a smaller --tp")
    reject(s.batch_size % unit, f"--batch-size {s.batch_size} is not a multiple of --dp {s.dp} x --micro-batches "
           f"{s.micro_batches}: give e.g. --batch-size {-(-s.batch_size // unit) * unit}")
    check_schedule(s, config)
    replicas = s.dp * s.cp
    within = s.zero_within or replicas
    reject(replicas % within, f"--zero-within {within} does not divide --dp {s.dp}{f' x --cp {s.cp}' * (s.cp > 1)}: "
           f"give --zero-within {math.gcd(within, replicas)}")
    reject(s.zero_within and not s.zero, f"--zero-within {within} is for ZeRO, which is off: give --zero 1, 2 or 3")
    reject(s.reduce_dtype != "same" and s.dtype == "fp64", f"--reduce-dtype {s.reduce_dtype} would lose what --dtype "
           "fp64 keeps: leave one of them out")
    local, gpus = local_world if world > 1 else processes, gpus_here()
    short = f"need as many GPUs and it has {gpus}: give --device cpu"
    reject(world > local_world and s.device == "auto" and 0 < gpus < local,  # not the CPU: other nodes may have GPUs
           f"--device auto: {local} processes on this node {short}")
    s.device = device_for(s.device, local)
    able = s.device == "cuda" and replayable(s, config)
    reject(s.cuda_graphs == "on" and not able, "--cuda-graphs on is for --device cuda, --zero 0 or 1 (2 or 3 with --pp "
           "1 --schedule 1f1b) and no --experts: leave it out")
    if s.cuda_graphs == "auto":
        s.cuda_graphs = "on" if able else "off"
    try:
        kernels.use(s.kernels)
    except ValueError as problem:
        raise BadInput(f"--kernels {s.kernels}: {problem}; give --kernels auto") from None
    reject(s.kernels == "triton" and (s.dtype == "fp64" or s.device == "cpu" and not kernels.INTERPRETED),
           "--kernels triton is for CUDA in fp32, bf16 or fp16: give --kernels auto")
    reject(s.device == "cuda" and local > gpus, f"--device cuda: {local} processes on this machine {short}"
           + f", or a layout of {gpus}" * (gpus > 0))
    return processes


def replayable(s, config):
    """Whether CUDA graphs can replay a micro-batch. Not with experts: the CPU must read their counts in each block."""
    return not config.experts and (s.zero < 2 or s.pp == 1 and s.schedule == "1f1b")


def check_schedule(s, config):
    """Reject a schedule that makes no lists for these ranks, micro-batches and stages, or lists that cannot finish."""
    def stages_of(**change):
        """How many stages the schedule has with some settings changed; 0 if it cannot be made."""
        with contextlib.suppress(ValueError):
            return parallel.stages_of(schedule_of(dataclasses.replace(s, **change)))
        return 0

    stages = s.pp * s.virtual_stages
    reject(stages > config.n_layer + 2, f"--pp {s.pp} x --virtual-stages {s.virtual_stages} is more stages than the "
           f"model's {config.n_layer} layers with embedding and head: give --pp {config.n_layer + 2} or fewer in all")
    if s.virtual_stages > 1 and (s.pp == 1 or stages_of(micro_batches=s.pp) < stages):
        some = [name for name in parallel.SCHEDULES if stages_of(schedule=name, pp=2, micro_batches=2) > 2]
        raise BadInput(f"--virtual-stages {s.virtual_stages} needs --schedule {' or '.join(some)} and --pp 2 or more")
    try:
        schedule_of(s)
    except parallel.ScheduleError as problem:  # several lines, which show whoever adds a schedule where it stops
        raise BadInput(f"--schedule {s.schedule}: {problem}") from None
    except ValueError as problem:
        works = [m for m in range(s.micro_batches, s.micro_batches + s.pp) if stages_of(micro_batches=m)]
        instead = f"; give --micro-batches {works[0]}" if works else ""
        raise BadInput(f"--schedule {s.schedule}: {problem}{instead}") from None


def load_data(s):
    """(training tokens, held-out tokens, whether they are bytes): arrays, uint8 or, mapped from a .bin, uint16."""
    where = f"--data {s.data}" if s.data else "the standard library"
    try:
        is_bin = s.data.endswith(".bin") and os.path.isfile(s.data)
        tokens = read_tokens(s.data, where) if is_bin else read_texts(files_of(s))
    except OSError as error:
        raise BadInput(f"{where}: {error.strerror}; leave the flag out for the standard library's source") from None
    reject(not len(tokens), f"{where} is empty: give text, or leave the flag out for the standard library's source")
    return *split(tokens), tokens.dtype == np.uint8


def files_of(s):
    """The text files of --data. In a folder, neither hidden files nor those that this run or that of --resume wrote."""
    if not os.path.isdir(s.data):
        return [pathlib.Path(s.data)] if s.data else standard_library()
    whole = pathlib.Path(s.data).resolve()
    folders = s.out, s.trace, s.profile, s.resume, os.path.dirname(s.resume.rstrip("/"))
    written = [folder for folder in (pathlib.Path(f).resolve() for f in folders if f) if whole in folder.parents]
    return [f for f in pathlib.Path(s.data).rglob("*") if f.is_file() and not f.name.startswith(".")
            and not any(f.resolve().is_relative_to(folder) for folder in written)]


def check_data(s, config, train, held_out):
    shortest = min(len(train), len(held_out) if s.eval_every else len(train))
    reject(shortest <= config.seq_len, f"--data {s.data or '(standard library)'} is too short: {shortest:,} tokens in "
           f"a part, one sequence needs {config.seq_len + 1:,}; give more text or --seq-len {max(1, shortest - 1)}")
    for part in (train, held_out):
        for start in range(0, min(len(part), 1 << 28), 1 << 24):  # 512 MiB; `micro_batches` checks the rest
            check_tokens(part[start:start + (1 << 24)], config.vocab_size)


def check_tokens(tokens, vocab_size):
    largest = int(tokens.max()) if len(tokens) else 0
    reject(largest >= vocab_size, f"--data holds token {largest}: give --vocab-size {largest + 1} or more")


def read_tokens(path, where):
    """Tokens of a .bin file, uint16. llm.c's begin with 256 int32 (20240520, version, how many tokens, ...)."""
    size = os.path.getsize(path)
    header = np.fromfile(path, np.int32, min(256, size // 4))
    if len(header) == 256 and header[0] == 20240520:
        reject(header[1] != 1 or size != 1024 + 2 * int(header[2]), f"{where}: its header says version {header[1]} and "
               f"{header[2]} tokens, it holds {(size - 1024) // 2}: give a whole file of version 1")
        return np.memmap(path, np.uint16, "r", offset=1024)
    reject(size % 2, f"{where}: {size} bytes are not uint16 tokens; a text must not be named .bin")
    return np.memmap(path, np.uint16, "r") if size else np.empty(0, np.uint16)


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


def run_of(s, config, data):
    """A run's identity: what decides its losses, but not its layout. A run goes on in --out only with its own."""
    edges = slice(0, 1 << 20), slice(-1 << 20, None)  # of each part: reading all would take minutes
    crc = zlib.crc32(np.concatenate([tokens[edge] for tokens in data[:2] for edge in edges]).tobytes())
    start = {"init_from": os.path.abspath(s.init_from)} if s.init_from else {}
    flags = {name: getattr(s, name) for name in NUMBERS} | {"data": s.data and os.path.abspath(s.data)}
    sizes = dataclasses.asdict(config)
    if config.experts:
        flags["balance_rate"] = s.balance_rate
    else:  # older manifests lack these keys, and must still match
        sizes = {name: value for name, value in sizes.items() if name not in ("experts", "top_k", "expert_every")}
    return {"flags": flags, "start": start, "model": sizes,
            "data": {"tokens": len(data[0]) + len(data[1]), "bytes": bool(data[2]), "crc32": crc}}


def differences(there, here, parts=("model", "flags", "start", "data")):
    """How two results of `run_of` differ, in words. Data counts by its contents, not its path, so it may move."""
    return [f"{'data: ' if part == 'data' else '--'}{key.replace('_', '-')} {a.get(key, 'none')} there, "
            f"{b.get(key, 'none')} here" for part in parts for a, b in [(there[part], here[part])] for key in a | b
            if a.get(key) != b.get(key) and (part, key) != ("flags", "data")]


def checkpoints(folder):
    """Paths of the complete checkpoints in a folder, oldest first."""
    names = [name for name in os.listdir(folder) if re.fullmatch(r"step-\d{8,}", name)] if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in sorted(names, key=lambda name: int(name[5:]))]


def crc_of(value):
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def open_checkpoint(path, read_all):
    """The Checkpoint at path. BadInput names what is missing or damaged. read_all: check all bytes, not only sizes."""
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


# -------------------------------------------------------------------------------------------------------------- reports

PEAK_TFLOPS = {  # dense 16-bit, by the maker's datasheet
    "H[18]00 PCIe": 756, "H[12]00 NVL": 835, "H[128]00": 989, "A[18]00": 312, "B200": 2250, "L40S": 362, "L4": 121,
    "RTX 4090$": 165, "RTX 3090$": 71, "V100 PCIE": 112, "V100": 125, "T4": 65}


HALF_COUNTED = "MFU counts half of attention's FLOPs, those that the mask leaves: sequences are longer than 4C"


def peak_flops(device):
    """FLOP/s of this GPU by its datasheet. None for an unknown GPU, whose MFU would be a guess."""
    name = torch.cuda.get_device_name(device).replace("-", " ") if device.type == "cuda" else ""
    return next((1e12 * value for key, value in PEAK_TFLOPS.items() if re.search(rf"\b{key}(\b|$)", name)), None)


class BirthLog(TorchDispatchMode):
    """Measures what activations take: counts the bytes of every tensor made inside it, except views of older ones."""

    def __init__(self):
        super().__init__()
        self.born = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for older, tensors in ((True, (args, kwargs)), (False, out)):
            for t in parallel.tensors_in(tensors):
                self.born.setdefault(StorageWeakRef(t.untyped_storage()), 0 if older else t.untyped_storage().nbytes())
        return out

    def ignore(self, tensors):
        """Do not count these tensors."""
        self.born.update((StorageWeakRef(t.untyped_storage()), 0) for t in tensors)

    def alive(self):
        """Bytes of the counted tensors that still exist."""
        return sum(size for storage, size in self.born.items() if not storage.expired())


def gpus_here():
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def processes_here():
    return dist.processes_of_a_node(int(os.environ.get("WORLD_SIZE") or 1))


def describe(trainer):
    s, c, mesh, run = trainer.s, trainer.config, trainer.mesh, trainer.run
    device, here, gpus = trainer.device.type, processes_here(), gpus_here()
    pipeline = f" x pp {s.pp} ({s.schedule})" if s.pp > 1 else ""
    axes = f"dp {s.dp}" + f" (ep {s.ep})" * (s.ep > 1) + f" x tp {s.tp}" + " with sp" * s.sp
    axes += f" x cp {s.cp} ({s.cp_kind})" * (s.cp > 1) + pipeline
    experts = f" ({c.active_parameters():,} a token: {c.top_k} of {c.experts} experts)" if c.experts else ""
    origin = run.checkpoint.path if run.checkpoint else s.init_from or s.model
    trainer.say(
        f"device   {device}: {here} process{'es' * (here > 1)} on this machine, {gpus or 'no'} GPU{'s' * (gpus > 1)}\n"
        f"layout   {axes} = {mesh.size()} processes, {device} "
        f"({'NCCL' if device == 'cuda' else 'gloo'}), ZeRO stage {s.zero}"
        f"{f' within {s.zero_within}' if s.zero_within else ''}, collectives: {s.comm}\n"
        f"model    {origin}: {c.n_layer} layers, {c.n_head} heads, width {c.n_embd}, vocabulary {c.vocab_size}, "
        f"{c.parameters():,} parameters{experts}, {s.dtype}\n"
        f"data     {s.data or 'the Python standard library'}: {len(trainer.train_data):,} {trainer.unit}s to train on, "
        f"{len(trainer.held_out):,} held out\n"
        f"batch    {s.batch_size} sequences of {c.seq_len} a step = {s.batch_size * c.seq_len:,} tokens: "
        f"dp {s.dp} x {s.micro_batches} micro-batches of {s.batch_size // s.dp // s.micro_batches}")
    if mesh.size() > here:
        node = mesh.mesh // here  # (pp, dp, cp, tp): the node of each rank
        axes = [axis for axis in mesh.mesh_dim_names if axis != "cp" or s.cp > 1]
        crossing = [axis for i, axis in enumerate(mesh.mesh_dim_names) if (node.amax(i) > node.amin(i)).any()]
        trainer.say(f"nodes    {mesh.size() // here} of {here} processes: {' and '.join(crossing)} between nodes, "
                    f"{' and '.join(axis for axis in axes if axis not in crossing)} inside")
    kinds = [f"{kind} {size(n)}" for kind, n in predicted_bytes(trainer).items()]
    trainer.say(f"memory   a rank, predicted: {', '.join(kinds)}")


def load_here(net, loads):
    """Tokens that this rank's experts got, as a multiple of 1/N of all. loads (L, E) are the whole batch's, so this
    assumes that every group of ranks that shares out the experts got equal loads."""
    ranks, rank = dist.get_world_size(net.ep), dist.get_rank(net.ep)
    return (loads.chunk(ranks, 1)[rank].sum() / loads.sum() * ranks).item()


def predicted_bytes(trainer, load=1.0):
    """`parallel.memory_bytes` of this rank. load: as there."""
    s, rank, lists = trainer.s, trainer.mesh.get_coordinate()[0], schedule_of(trainer.s)
    return parallel.memory_bytes(trainer.config, s.zero, s.zero_within or s.dp * s.cp, s.tp, trainer.net.dtype,
                                 s.recompute, s.batch_size // s.dp // s.micro_batches,
                                 parallel.split_pieces(trainer.config, s.pp * s.virtual_stages)[rank::s.pp],
                                 math.ceil(parallel.most_held(lists[rank]) / s.virtual_stages),
                                 kernels.on_triton(torch.empty(0, device=trainer.device)), s.sp, s.cp, s.cp_kind,
                                 s.ep, s.dp * s.cp // s.ep, load)


def write_trace(trainer, folder, say):
    """Write what every rank ran in this step into one file, for Perfetto (ui.perfetto.dev) or chrome://tracing."""
    spans = parallel.recorded_times(trainer.net.pipeline)
    every = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    torch.distributed.gather_object(spans, every)
    if every is None:
        return
    words = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "SF": "send activation",
             "RF": "post receive of activation", "SB": "send gradient", "RB": "post receive of gradient"}
    start = min(begin for spans in every for _, begin, _ in spans)
    events = [{"name": f"{kind} stage {stage} micro-batch {i}", "cat": words[kind], "ph": "X", "pid": 0, "tid": rank,
               "ts": 1e6 * (begin - start), "dur": 1e6 * (end - begin),
               "args": {"what": words[kind], "stage": stage, "micro_batch": i}}
              for rank, spans in enumerate(every) for (kind, stage, i), begin, end in spans]
    events += [{"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
               for rank in range(len(every))]
    try:
        os.makedirs(folder, exist_ok=True)
        pathlib.Path(folder, "trace.json").write_text(json.dumps({"traceEvents": events}))
    except OSError as problem:  # a full disk costs the trace, not the run
        say(f"no trace in {folder}: {problem.strerror}")


@contextlib.contextmanager
def named(owner, method, name):
    """Inside, the profile shows each call of owner.method as a range called `name`, or name(the call's arguments)."""
    whole, own = getattr(owner, method), method in vars(owner)

    def ranged(*args):
        with torch.profiler.record_function(name if isinstance(name, str) else name(*args)):
            return whole(*args)

    setattr(owner, method, ranged)
    try:
        yield
    finally:
        if own:
            setattr(owner, method, whole)
        else:
            delattr(owner, method)


def collective_name(link, name, operation, arguments, async_op):
    """From Watched.run's arguments, e.g. "all_reduce 4,096 bytes": the size of the largest argument, tensor or list."""
    sizes = Counter()
    for argument, t in dist.tensors_of(arguments):
        sizes[argument] += t.nbytes
    return f"{name} {max(sizes.values()):,} bytes" if sizes else name


def exchange_name(window, outgoing, incoming):
    """As collective_name, from Window.all_to_all's arguments. Experts on GPUs of one node call it, not Watched.run."""
    return f"all_to_all_single {sum(size for _, size in outgoing):,} bytes"


def action_name(action):
    return f"{action} stage {action.stage}"


def phases(trainer):
    """(owner, method, name in the profile) of the methods that Trainer.step calls, in order."""
    net, optimizer = trainer.net, trainer.optimizer
    return [(trainer, "micro_batches", "batch"), (optimizer, "zero_grad", "zero_grad"),
            (net, "forward_backward", "forward_backward"), (net, "clip_grad_norm_", "clip"),
            (trainer, "all_finite", "all_finite"), (optimizer, "step", "step"), (net, "balance", "balance")]


@contextlib.contextmanager
def profiled(trainer):
    """Profile the step that runs inside. Ranges name the step's phases, the pipeline's actions and finish_grad_sync in
    forward_backward, and collectives, on whatever thread they run. `named` replaces these methods until the end."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler prints lines of its own on every rank
    activities = torch.profiler.ProfilerActivity
    ranges = [*phases(trainer), (dist.Watched, "run", collective_name),
              (dist.Window, "all_to_all", exchange_name), (trainer.net.pipeline, "do", action_name),
              *[(sync, "finish_grad_sync", "finish_grad_sync") for sync in dict.fromkeys(trainer.net.syncs.values())]]
    with contextlib.ExitStack() as stack, torch.profiler.profile(
            activities=[activities.CPU] + [activities.CUDA] * (trainer.device.type == "cuda"),
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)) as profile:
        for each in ranges:
            stack.enter_context(named(*each))
        yield
    write_profile(trainer, profile)


def write_profile(trainer, profile):
    """Write a file on each rank. Rank 0 prints where the files are and how long its phases took."""
    folder, rank, problem, problems = trainer.s.profile, dist.get_rank(), None, [None] * dist.get_world_size()
    path = pathlib.Path(folder, f"rank-{rank}.json")
    try:
        os.makedirs(folder, exist_ok=True)
        path.write_text("")  # raises an error where the profiler would fail silently
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    except (OSError, ValueError) as error:  # ValueError: a file cut short
        problem = getattr(error, "strerror", None) or "not written whole, the disk may be full"
        with contextlib.suppress(OSError):
            path.unlink()
            path.with_name(path.name + ".tmp").unlink()  # the profiler's own unfinished file
    torch.distributed.gather_object(problem, None if rank else problems, group=trainer.control)
    if lost := [f"rank {r}: {why}" for r, why in enumerate(problems) if why]:
        trainer.say(f"no profile in {folder} of {', '.join(lost)}")  # a full disk costs the profile, not the run
    elif rank == 0:
        files = "rank-0.json" + f" to rank-{len(problems) - 1}.json" * (len(problems) > 1)
        rows = [f"         {name:<16} {cpu:9.2f} ms" + f", kernels {kernels:9.2f} ms" * (trainer.device.type == "cuda")
                for name, cpu, kernels in phase_times(events, [name for _, _, name in phases(trainer)])]
        trainer.say("\n".join([f"profile  {folder}: {files}, for ui.perfetto.dev; rank 0's step on the CPU:", *rows]))


def phase_times(events, names):
    """[(name, ms on the CPU, ms of the kernels and copies that any thread launched meanwhile)] of a trace's ranges with
    these names. Kernels that overlap on two streams both count in full."""
    launched = {e["args"]["correlation"]: e["ts"] for e in events
                if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e["args"]}
    ran = [(launched.get(e["args"].get("correlation"), 0), e["dur"]) for e in events
           if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    mine = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in names]
    return [(e["name"], e["dur"] / 1e3, sum(dur for ts, dur in ran if e["ts"] <= ts < e["ts"] + e["dur"]) / 1e3)
            for e in sorted(mine, key=lambda e: e["ts"])]


def describe_first_steps(trainer):
    """Print the measured memory beside the predicted, and the bytes that one step sends. Returns both memories for the
    log."""
    predicted, measured = predicted_bytes(trainer, trainer.share), trainer.measured_bytes()
    kinds = ", ".join(f"{kind} {size(n)} ({size(predicted[kind])})" for kind, n in measured.items())
    if trainer.device.type == "cuda":
        kinds += (f"; the allocator holds {size(torch.cuda.memory_allocated())}, at most "
                  f"{size(torch.cuda.max_memory_allocated())}")
    sent = ", ".join(f"{name} {t.calls} calls {size(t.bytes)}" for name, t in dist.traffic().items() if t.bytes)
    sent = "not counted with --comm torch" if trainer.s.comm == "torch" else sent or "nothing"
    trainer.say(f"memory   measured (predicted): {kinds}\ntraffic  sent by rank 0 a step: {sent}")
    return {"predicted_bytes": predicted, "measured_bytes": measured}


def size(n):
    return next(f"{n / 2**k:.1f} {unit}" for k, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if n >= 2**k or k == 10)


# ------------------------------------------------------------------------------------------- training under observation

class NotFinite(Exception):
    pass


class Terminated(Exception):
    """SIGTERM has come, and the step that was running is finished and saved."""


class WatchedTrainer(Trainer):
    """The Trainer for long runs: it reports memory and speed, writes traces and profiles, names the rank whose numbers
    are not finite, stops cleanly on SIGTERM, and saves checkpoints that are complete or absent.

    data: (training tokens, held-out tokens, whether they are bytes). run: the WatchedRun, None in a benchmark."""

    def __init__(self, s, config, source, data, device, run=None):
        self.run, self.bytes, self.unit = run, data[2], "byte" if data[2] else "token"
        self.log = self.births = self.first = self.unread = self.gpu_flops = None
        self.bad, self.activations, self.share, self.memory = 0, 0, 1.0, {}
        self.terminated, self.stopping, self.saved = False, False, True
        super().__init__(s, config, source, data[:2], device)

    def make_optimizer(self, adamw):
        if self.s.cuda_graphs == "on":
            parallel.replay_micro_batches(self.net)
        mixed = self.net.dtype != parallel.master_dtype(self.net.dtype)
        flat = mixed and kernels.on_triton(torch.empty(0, device=self.device))
        return super().make_optimizer(kernels.AdamW if flat else partial(adamw, fused=True))

    # the loop

    def train(self, saved):
        describe(self)
        with contextlib.suppress(Terminated):
            super().train(saved)
        if self.run.saving and not self.s.steps and not self.run.checkpoint:
            self.save(0)

    def step(self, step, births=None):
        """As in Trainer. births: a BirthLog that measures activations; the first step has one of its own."""
        dist.progress("starting the step", step=step + 1)
        looked_at = (self.s.trace or self.s.profile) and self.first is not None  # a benchmark has no first step
        third = looked_at and step == min(self.first + 2, self.s.steps - 1)  # steps before it warm up
        trace = third and self.s.trace
        if trace:
            parallel.record_times(self.net.pipeline)
        self.births = births or (BirthLog() if step == self.first else None)
        self.net.pipeline.on_forward = self.note_activations if self.births else None
        profile = profiled(self) if third and self.s.profile else contextlib.nullcontext()
        with self.births or contextlib.nullcontext(), profile:
            done = super().step(step)
        if self.births and self.net.ep and self.loads is not None:
            self.share = load_here(self.net, self.loads)
        self.births = self.net.pipeline.on_forward = None
        if trace:
            write_trace(self, self.s.trace, self.say)
        return done

    def micro_batches(self, tokens, seed, step):
        rows = batch(tokens, seed, step, self.s.batch_size, self.config.seq_len, self.samples)
        for t in rows:
            check_tokens(t, self.config.vocab_size)
        if self.device.type == "cuda":  # a copy from pageable memory makes the CPU wait, and then the GPU
            rows = [t.contiguous().pin_memory().to(self.device, non_blocking=True) for t in rows]
        if self.births:
            self.births.ignore(rows)
        return [t.chunk(self.s.micro_batches) for t in rows]

    def all_finite(self, loss, norm):
        """As in Trainer. self.bad becomes 0 if all is finite, 1 if only the norm is not; else world size + 1 - r, where
        r is the first rank whose loss is not."""
        blame = 1 + dist.get_world_size() - dist.get_rank()
        alarm = torch.where(loss.isfinite(), (~norm.isfinite()).long(), blame)
        late = self.device.type == "cuda" and self.s.on_nan == "stop" and not self.scaler
        self.bad, self.stopping = self.agree(self.read(alarm, late), self.terminated)
        finite = not self.bad
        self.skipped += not finite
        if self.scaler:
            hopeless = self.scaler.scale == 1
            self.scaler.update(finite)
            self.bad = self.bad and hopeless  # fp16 overflows sometimes; it is an error only at the smallest scale
        return finite

    def read(self, alarm=None, late=False):
        """`alarm`, a number on the device, as an int. late: return the alarm of the step before, which has arrived by
        now, because waiting for this step's would leave the GPU idle. Without `alarm`: return the one still unread."""
        before, self.unread = self.unread, None
        if late:
            self.unread = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True), torch.cuda.Event()
            self.unread[0].copy_(alarm, non_blocking=True)
            self.unread[1].record()
        if before:
            before[1].synchronize()
        return int(before[0] if before else 0 if late or alarm is None else alarm)

    # printing and logging

    def say(self, text):
        with contextlib.suppress(OSError):  # output to a full disk: Python prints the text when there is room
            if dist.get_rank() == 0:
                print(text, flush=True)

    def where(self, done):
        return f"step {done:>{len(str(self.s.steps))}}/{self.s.steps}"

    def due(self, what, done):
        also = what == "log" and self.s.log_every > 0 and (done == 1 or self.stopping)
        return also or super().due(what, done)

    def report(self, done, loss, norm):
        self.raise_alarm(done)
        if done == min(self.first + 2, self.s.steps):
            self.memory = describe_first_steps(self)
        if self.due("log", done) or self.due("eval", done):
            norm.item()  # waits for the device
            self.seconds, self.sent = time.perf_counter() - self.since, sum(t.bytes for t in dist.traffic().values())
        super().report(done, loss, norm)
        if self.stopping:
            if self.s.out:
                self.save(done)
            kept = "the same command goes on from here" if self.s.out and self.saved else "nothing is saved"
            self.say(f"{self.where(done)}  SIGTERM: {kept}{'' if self.s.out else ' without --out'}")
            raise Terminated

    def raise_alarm(self, done):
        """If a number was not finite, raise NotFinite; with --on-nan skip, say so instead. Before a checkpoint is
        saved, also read the alarm that is still unread."""
        bad = self.bad or (self.stopping or self.due("save", done)) and self.agree(self.read())[0]
        if not bad:
            return
        what = "the gradient" if bad == 1 else f"the loss on rank {dist.get_world_size() + 1 - bad}"
        self.write_log({"step": done, "not_finite": what, "on_nan": self.s.on_nan})
        if self.s.on_nan == "stop":
            raise NotFinite(f"{what} is not finite: a smaller --lr may help, or --on-nan skip")
        self.say(f"{self.where(done)}  {what} is not finite: step skipped, {self.skipped} in all")

    def record(self, entry):
        """Print and log the entry. Its speed is the mean over the steps since the last entry."""
        s, done, tokens = self.s, entry["step"], self.s.batch_size * self.config.seq_len
        speed, scale, mfu = (done - self.logged) * tokens / self.seconds, "", ""
        entry |= dict(tokens_per_s=speed, comm_bytes=self.sent if s.comm != "torch" else None, **self.memory)
        if self.scaler:
            entry |= dict(loss_scale=self.scaler.scale, skipped_steps=self.skipped)
            scale = f"scale {self.scaler.scale:g} ({self.skipped} skipped)  "
        load = f"load {entry['load_max']:.2f} x mean  " if "load_max" in entry else ""
        if self.gpu_flops:
            entry["mfu"] = speed * self.config.flops_per_token() / self.gpu_flops / self.mesh.size()
            mfu = f"MFU {100 * entry['mfu']:.1f} %  "
        if s.log_every:
            left = int((s.steps - done) * tokens / speed)
            self.say(f"{self.where(done)}  loss {entry['loss']:.4f}  norm {entry['grad_norm']:.2f}  "
                     f"lr {entry['lr']:.1e}  {scale}{load}{speed / 1e3:.1f}k tokens/s  {mfu}"
                     f"left {left // 60}:{left % 60:02}")
        if "val_loss" in entry:
            self.say(f"{self.where(done)}  validation loss {entry['val_loss']:.4f} nats a {self.unit}, "
                     f"{entry['val_loss'] / math.log(2):.2f} bits")
        if s.log_every:
            self.write_log(entry)
        self.since, self.logged, self.memory = time.perf_counter(), done, {}

    def write_log(self, entry):
        if self.log and (problem := self.log.write(entry)):
            self.say(f"log      step {entry['step']} waits to be written to {self.s.out}/log.jsonl: {problem.strerror}")

    def show_sample(self):
        """As in Trainer, also for data of tokens. All ranks agree before each token: if the others only waited for rank
        0's last one, they could time out."""
        dist.progress("sampling")
        whole = self.whole_model()
        prompt = list(os.fsencode(self.s.prompt)) if self.bytes else self.held_out[:1].tolist()
        tokens = torch.tensor([prompt or [10]], device=self.device)
        for i in range(self.s.sample):
            if not self.agree(self.terminated)[0] and dist.get_rank() == 0:
                tokens = whole.generate(tokens, 1, 0.8, top_k=40, seed=self.s.seed + i)
        tokens = tokens[0].tolist()
        text = bytes(min(t, 255) for t in tokens).decode(errors="replace") if self.bytes else " ".join(map(str, tokens))
        self.say(f"--- sample, {self.s.sample} tokens ---\n{text}\n---")

    # checkpoints

    def save(self, done):
        s, started = self.s, time.perf_counter()
        if self.log:
            with contextlib.suppress(OSError):  # if the disk is full, writing the checkpoint says so
                os.fsync(self.log.file)
        problem = self.write(done)
        self.saved = problem is None
        if problem:
            left = checkpoints(s.out)
            there = f"{os.path.basename(left[-1])} is complete" if left else "no checkpoint is there yet"
            now = "going on" if done < s.steps else "ended"
            self.say(f"{self.where(done)}  not saved in {s.out}: {problem.strerror}; {now}, {there}")
            self.write_log({"step": done, "not_saved": problem.strerror})
        elif self.stopping or done == s.steps:
            kind = "GPT-2 with experts" if self.config.experts else "Hugging Face GPT-2"
            self.say(f"saved    {s.out}: log.jsonl, step-{done:08} ({kind}, optimizer)")
        self.since += time.perf_counter() - started

    def write(self, done):
        """Rank 0 writes the checkpoint into --out. All ranks call this, to gather one whole tensor at a time. Returns
        the OSError if writing failed, else None; None on the other ranks."""
        whole, problem, rest = shapes(self.config), None, self.whole_tensors()

        def get(label):
            found, tensor = next(rest)
            assert found == label, f"{found} was gathered where the file has {label}"
            return tensor

        if dist.get_rank() == 0:
            part, final = (os.path.join(self.s.out, name) for name in (f".step-{done:08}.part", f"step-{done:08}"))
            try:
                shutil.rmtree(part, ignore_errors=True)
                dtype = parallel.master_dtype(self.net.dtype)
                files = write_hf(part, self.config, get, dtype)
                files["optimizer.safetensors"] = write_safetensors(
                    os.path.join(part, "optimizer.safetensors"),
                    {f"{key}.{name}": (dtype, shape) for key in MOMENTS for name, shape in whole.items()}, get)
                manifest = {"format": 1, "step": done, "updates": done - self.skipped, "skipped": self.skipped,
                            "scaler": self.scaler and vars(self.scaler), "files": files, "run": self.run.identity}
                write_file(os.path.join(part, "manifest.json"), json.dumps(manifest | {"crc32": crc_of(manifest)}))
                sync_folder(part)
                os.rename(part, final)
                sync_folder(self.s.out)
                for old in checkpoints(self.s.out)[:-self.s.keep] if self.s.keep else []:
                    gone = os.path.join(self.s.out, f".{os.path.basename(old)}.old")
                    os.rename(old, gone)  # because a folder half removed must not look like a checkpoint
                    shutil.rmtree(gone)
            except OSError as error:
                problem = error
                shutil.rmtree(part, ignore_errors=True)
        for _ in rest:  # the other ranks take part in gathering; so does rank 0 after an error, or they would hang
            pass
        return problem

    def load(self, saved):
        first = saved["step"] if saved else 0
        least, most = self.agree(-first, first)
        reject(most != -least, f"ranks found checkpoints of steps {-least} to {most}: --out and --resume must be "
               "folders that all nodes share")
        if saved:
            changes = differences(saved["run"], self.run.identity, ("flags",)) if self.s.steps else []
            self.say(f"resume   {self.run.checkpoint.path}: " + ", ".join([f"after step {first}", *changes]))
        if first < self.s.steps:
            super().load(saved)
        for param in [p for group in self.optimizer.param_groups if group.get("fused") for p in group["params"]]:
            if state := self.optimizer.state.get(param):
                state["step"] = state["step"].to(self.device)
        # A cluster sends SIGTERM before it takes the machine away. The handler only sets a flag, so that this step ends
        # and is saved. The handler stays after an error, because torchrun sends SIGTERM to ranks that still print it.
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "terminated", True))
        self.log = Log(os.path.join(self.s.out, "log.jsonl"), first) if self.run.lock else None
        self.gpu_flops = peak_flops(self.device)
        if self.device.type == "cuda" and self.gpu_flops is None:
            self.say(f"speed    unknown GPU {torch.cuda.get_device_name(self.device)}, no MFU")
        if self.gpu_flops and self.config.long_sequences:
            self.say(f"speed    {HALF_COUNTED}")
        self.first, self.logged, self.since = first, first, time.perf_counter()
        return first

    def note_activations(self):  # without gradients of earlier micro-batches and buffers of collectives
        gc.collect()  # recomputation leaves reference cycles, which keep dropped activations until they are collected
        self.births.ignore([*parallel.kept_tensors(self.net)["gradients"], *dist.scratches()])
        self.activations = max(self.activations, self.births.alive())

    def measured_bytes(self):
        """{kind: bytes} of this rank's tensors, each storage counted once. parallel.memory_bytes predicts it."""
        sizes, seen = {}, set()
        for kind, tensors in parallel.kept_tensors(self.net).items():
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            sizes[kind] = sum(storages[place] for place in storages.keys() - seen)
            seen |= storages.keys()
        return dict(sizes, activations=self.activations)


# ------------------------------------------------------------------------------------------------- a run that survives

class WatchedRun(Run):
    """The Run that checks its input before processes connect, starts them itself, locks --out, and explains errors.

    It also has `checkpoint` (the Checkpoint to go on from, or None), `identity` (by `run_of`), `processes` (how many
    the layout needs), `saving` (whether --out gets checkpoints) and `lock` (the Lock of --out, on rank 0).
    """

    def __init__(self, arguments):
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        try:
            self.prepare(arguments)
        except BadInput as problem:
            refuse("train.py", problem, self.rank)

    def prepare(self, arguments):
        s = parse(arguments)
        checkpoint = find_checkpoint(s, self.rank == 0)
        if checkpoint:
            trained_with = checkpoint.manifest["run"]["flags"].items()
            s = parse([f"--{name.replace('_', '-')}={value}" for name, value in trained_with] + arguments)
        check_numbers(s)
        config, source = model_config(s, checkpoint)
        self.processes = check_layout(s, config, self.world, processes_here())
        if checkpoint and not s.steps and checkpoint.manifest["run"]["data"]["bytes"]:
            data = np.empty(0, np.uint8), np.empty(0, np.uint8), True  # only a sample is asked for
        else:
            data = load_data(s)
            check_data(s, config, *data[:2])
        reject(s.sample and data[2] and max(os.fsencode(s.prompt), default=0) >= config.vocab_size,
               f"--prompt {s.prompt!r} has a byte beyond the vocabulary of {config.vocab_size}: give other text")
        identity = run_of(s, config, data)
        if checkpoint and s.steps and (how := differences(checkpoint.manifest["run"], identity, ("data",))):
            raise BadInput(f"--data {s.data or '(the standard library)'} is not what {checkpoint.path} was trained on "
                           f"({'; '.join(how)}): give that, or start a new run with --init-from {checkpoint.path}")
        self.saving, self.lock = bool(s.out) and not (checkpoint and not s.steps), None
        if self.saving:
            asked = checkpoint
            checkpoint, identity = start_of(s, identity, asked, self.rank == 0)
            if checkpoint is not asked:
                source = open_hf(checkpoint.path)[1]
        moments = read_moments(checkpoint, config) if checkpoint else None
        self.saved = checkpoint and checkpoint.manifest | {"tensors": moments}
        for folder, name in (s.trace, "--trace"), (s.profile, "--profile"):
            if folder and self.rank == 0:
                check_folder(folder, name)
        if self.saving and self.rank == 0:
            self.lock = claim(s.out, identity)
        self.s, self.config, self.source, self.data = s, config, source, data
        self.checkpoint, self.identity = checkpoint, identity

    def start(self):
        sys.stdout.reconfigure(errors="replace")  # a sample may hold letters that this terminal cannot print
        if self.processes != self.world:
            if self.lock:  # release it, for the rank 0 that is about to start
                self.lock.mark_all_saved()
                self.lock.file.close()
            dist.start_again(self.processes, lambda: not self.lock or self.lock.all_saved())
        self.watch = dist.Watch("train.py", self.s.timeout)
        try:
            device = dist.initialize(self.s.device, self.s.timeout)
            self.watch.start()
            saved = self.train(device)
        except Exception as error:  # noqa: BLE001  the other ranks must hear of any error
            if not isinstance(error, (BadInput, NotFinite, dist.PeerError, torch.distributed.DistError)):
                traceback.print_exception(error)
            self.watch.give_up(error)
        finally:
            self.watch.stop()
        dist.destroy_process_group()
        sys.exit(0 if saved else 1)

    def train(self, device):
        """Train, as Run.start does. Returns whether everything was saved; always True on ranks other than 0."""
        before = signal.getsignal(signal.SIGTERM)
        trainer = WatchedTrainer(self.s, self.config, self.source, self.data, device, self)
        trainer.train(self.saved)
        signal.signal(signal.SIGTERM, before)
        if trainer.terminated:
            dist.end_after_sigterm()
        if self.lock and trainer.saved:
            self.lock.mark_all_saved()
        dist.barrier()
        return trainer.saved


FASTER.update({Flags: Settings, argparse.ArgumentParser: Parser, Run: WatchedRun})

if __name__ == "__main__":
    main()
