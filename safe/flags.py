"""The command line of the whole program: every flag, and one line for each that cannot be obeyed."""

import argparse
import contextlib
import dataclasses
import functools
import math
import os
import sys
import time
from dataclasses import dataclass

import torch

import collectives as dist
import kernels
import parallel
from model import PRESETS
from safe.huggingface import open_hf
from theory.speed import replayable
from train import SIZES, config_of, device_for, flag, Flags, processes_of


# -------------------------------------------------------------------------------------------------- settings, bad input

@dataclass
class Settings(Flags):
    """Every flag of the command line: those of train.py, and those that only the whole program has."""
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
    return checked(parallel.schedules()[s.schedule], s.pp, s.micro_batches, s.virtual_stages)


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
        config, source = checkpoint.open() if checkpoint else open_hf(folder)
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
        some = [name for name in parallel.schedules() if stages_of(schedule=name, pp=2, micro_batches=2) > 2]
        raise BadInput(f"--virtual-stages {s.virtual_stages} needs --schedule {' or '.join(some)} and --pp 2 or more")
    try:
        schedule_of(s)
    except parallel.ScheduleError as problem:  # several lines, which show whoever adds a schedule where it stops
        raise BadInput(f"--schedule {s.schedule}: {problem}") from None
    except ValueError as problem:
        works = [m for m in range(s.micro_batches, s.micro_batches + s.pp) if stages_of(micro_batches=m)]
        instead = f"; give --micro-batches {works[0]}" if works else ""
        raise BadInput(f"--schedule {s.schedule}: {problem}{instead}") from None


def gpus_here():
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def processes_here():
    return dist.processes_of_a_node(int(os.environ.get("WORLD_SIZE") or 1))
