"""The command line of the whole program: every flag, and one line for each that cannot be obeyed.

What divides what stands in further/fits.py; here is what only the whole program has, and what a machine cannot do."""

import argparse
import os
import pathlib
import sys
import time
from dataclasses import dataclass

import torch

import kernels
import parallel
from further.fits import multiple, refuse_misfit
from further.flags import config_of, dashed, device_for, flag, Flags, processes_of
from further.lists import check, lower, schedule_of
from safe import survive
from safe.files import tell
from safe.huggingface import check_sizes, open_hf, shortened
from further.bad_input import BadInput, reject


# ------------------------------------------------------------------------------------------------------------- settings

@dataclass
class Settings(Flags):
    """Every flag of the command line: those of the reference, and those that only the whole program has."""
    init_from: str = flag("", "start from the weights, and with the sizes, of this Hugging Face folder of a GPT-2")
    dtype: str = flag("fp32", "of the layers; bf16 and fp16 keep float32 masters; fp8: bf16, and blocks' products in 8 "
                              "bits", choices=list(parallel.PRECISIONS))
    profile: str = flag("", "folder, for Perfetto, of trace.json, what every rank ran in the third step, and "
                            "rank-0.json and so on, PyTorch's profile of the fourth; a CUDA graph shows as its launch")
    fast: str = flag("auto", "the same numbers sooner, by what fast/ has in place of the reference; auto: on GPUs",
                     choices=["auto", "on", "off"])
    cuda_graphs: str = flag("auto", "replay a step from one CUDA graph, so that the CPU does not launch each kernel; "
                                    "auto: on GPUs, with --experts only in bf16 and with --ep 1",
                            choices=["auto", "off", "on"])
    deterministic: bool = flag(False, "attention's backward adds up in a fixed order where it would not, so that runs "
                                      "are equal to the bit; for Hopper GPUs, head dim 128 and 2,048 tokens or more")
    survive: bool = flag(False, "let the others go on when a rank dies: docs/surviving.md")
    keep: int = flag(2, "how many of the newest checkpoints to keep; 0: all")
    timeout: int = flag(600, "seconds without progress after which a rank stops and names the silent ranks")


def refuse(program, problem):
    """End this process with exit code 2. The first rank of each node says why, in one line, because a file may be
    missing on one node alone. Another rank speaks if it has not been ended by then, because it alone refuses."""
    rank = os.environ.get("RANK", "0")
    if os.environ.get("LOCAL_RANK", rank) == "0":
        tell(f"{program}: {problem}", sys.stderr)
    else:
        time.sleep(2)  # torchrun ends all ranks when one has exited, so the rank that prints has to be the first
        tell(f"{program}: rank {rank}: {problem}", sys.stderr)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print its usage and exit on every rank, maybe before rank 0 prints
        raise BadInput(message.removeprefix("argument ") + "; see --help")


# ---------------------------------------------------------------------------------------------------------------- model

# Sizes that mean nothing in a model without experts.
NEED_EXPERTS = "top_k", "expert_every", "shared_experts"
SIZES = ("n_layer", "n_head", "n_kv_head", "n_embd", "inner", "seq_len", "vocab_size", "experts", *NEED_EXPERTS)
LONGEST = 2048  # tokens of a sequence, if only a folder says how many: 16 of a Qwen's 32,768 have 320 GB of logits


def model_config(s, checkpoint=None, open_folder=open_hf):
    """(GPTConfig, source of initial weights or None) that the settings ask for. checkpoint: the one of --resume."""
    if not checkpoint and not s.init_from:
        config = config_of(s)
        reject(s.n_kv_head is not None and config.arch == "gpt2", f"--n-kv-head {s.n_kv_head} is for a Llama: give "
               "--arch llama, too")
        for name in NEED_EXPERTS:
            reject(getattr(s, name) is not None and not config.experts, f"{dashed(name)} is for a model with experts: "
                   "give --experts 4, say, too")
        check_sizes(config, dashed)
        return config, None
    reject(checkpoint and s.init_from, f"--init-from {s.init_from} beside --resume: leave --init-from out, or leave "
           "--resume out")
    config, source = (checkpoint.config, checkpoint.source) if checkpoint else open_weights(s, open_folder)
    where = "--resume" if checkpoint else "--init-from"
    for name in (*SIZES, "activation", "arch"):
        value = getattr(s, name)
        there = config.hidden if name == "inner" else getattr(config, name, "none")
        there = "no experts" if name in NEED_EXPERTS and not config.experts else there
        reject(value not in (None, there),
               f"{dashed(name)} {value}: the model in {where} has {there}; leave the flag out")
    return config, source


def open_weights(s, open_folder):
    """(config, source) of --init-from, with no longer sequences than --seq-len asks for."""
    try:
        reject(not os.path.isdir(s.init_from), "no such folder; GPT-2's comes by `git clone` (with git-lfs) from "
               "https://huggingface.co/openai-community/gpt2")
        config, source = open_folder(s.init_from)
    except (ValueError, OSError) as error:
        goes_on = s.out and any(pathlib.Path(s.out).glob("step-*"))
        instead = "; to go on in --out, leave --init-from out and add --resume" * bool(goes_on)
        raise BadInput(f"--init-from {s.init_from}: {error}{instead}") from None
    seq_len = LONGEST if s.seq_len is None and config.arch == "llama" else s.seq_len
    if seq_len is not None and seq_len < config.seq_len:
        config, source = shortened(config, source, seq_len)
        check_sizes(config, dashed)
    return config, source


# --------------------------------------------------------------------------------------------------------------- layout

def check_layout(s, config, world, local_world):
    """Reject a layout whose sizes do not divide, or that this machine cannot take. Fills in s.dp, s.schedule, s.device,
    s.fast and s.cuda_graphs. Returns how many processes the layout needs."""
    processes = processes_of(s, world)
    refuse_misfit(s, config, dashed, world, local_world if world > local_world else 0)
    try:
        check(lower(schedule_of(s.schedule)(s.pp, s.micro_batches, s.virtual_stages)), s.micro_batches)
    except ValueError as problem:  # a ScheduleError has several lines, which show its author where it stops
        raise BadInput(f"--schedule {s.schedule}: {problem}; give --micro-batches "
                       f"{multiple(s.micro_batches, s.pp)}") from None
    store, restarts = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("USE_AGENT_STORE", "MAX_RESTARTS"))
    # Torchrun keeps that store over restarts, with the addresses of the processes that died (pytorch #135712).
    reject(world > local_world and store == "True" and restarts != "0", "--max-restarts on several nodes: processes "
           "that are started again would not meet; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes")
    check_device(s, config, world, local_world if world > 1 else processes)
    if s.survive:
        check_survival(s, processes)
    return processes


def check_survival(s, processes):
    """Reject what further/survive.py cannot do, or no process can be left for."""
    started = int(os.environ.get("WORLD_SIZE") or 1) > 1 and not survive.is_ours()
    reject(started, "--survive under torchrun, which ends all ranks when one dies: give it to python train.py")
    reject(s.dp == 1, f"--survive with one replica: give --dp {max(2, processes + 1)}" if processes == 1 else
           "--survive with one replica, which goes as a whole: give --dp 2")
    wants = {"--device cpu": s.device != "cpu", "--fast off": s.fast != "off", "--ep 1": s.ep > 1,
             "--optimizer adamw": s.optimizer != "adamw", "no --profile": s.profile,
             "no --zero-within": s.zero_within, "--comm ours": s.comm == "torch"}
    for need, lacks in wants.items():
        reject(lacks, f"--survive wants {need}")
    reject(sys.platform != "linux", "--survive is for Linux")


def check_device(s, config, world, local):
    """Reject what this machine's devices cannot take. Fills in s.device, s.fast and s.cuda_graphs. local: how many
    processes are here."""
    gpus = gpus_here()
    short = f"need as many GPUs and it has {gpus}: give --device cpu"
    reject(world > local and s.device == "auto" and 0 < gpus < local,  # not the CPU: other nodes may have GPUs
           f"--device auto: {local} processes on this node {short}")
    s.device = device_for(s.device, local)
    reject(s.device == "cuda" and local > gpus, f"--device cuda: {local} processes on this machine {short}"
           + f", or a layout of {gpus}" * (gpus > 0))
    if s.fast == "auto":
        s.fast = "on" if s.device == "cuda" else "off"
    able = s.device == "cuda" and s.fast == "on" and replayable(s, config)
    able = able and (not config.experts or torch.cuda.get_device_capability() >= (9, 0))  # what F.grouped_mm needs
    reject(s.cuda_graphs == "on" and not able, "--cuda-graphs on is for --device cuda --fast on, and for --experts "
           "only with --dtype bf16 and --ep 1, from Hopper on: leave it out")
    s.cuda_graphs = "on" if able and s.cuda_graphs != "off" else "off"
    reject(s.kernels == "triton" and s.dtype == "fp64", "--kernels triton computes in fp32, bf16 or fp16: give "
           "--kernels auto")
    checked_use(s.kernels)
    reject(s.kernels == "triton" and config.head_dim not in kernels.HEAD_DIMS, f"--kernels triton: --n-embd "
           f"{config.n_embd} / --n-head {config.n_head} is a head dim of {config.head_dim}, and attention's kernel "
           f"takes {', '.join(map(str, kernels.HEAD_DIMS))}: give --kernels auto")
    if s.dtype == "fp8":
        check_fp8(s, config)


def checked_use(choice):
    """As kernels.use, but BadInput for a choice that this machine cannot take."""
    reject(choice not in ("auto", "torch", "triton"), f"kernels '{choice}' are not one of auto, torch, triton")
    able = kernels.HAVE_TRITON and (kernels.INTERPRETED or torch.cuda.is_available())
    reject(choice == "triton" and not able, "--kernels triton needs the package triton, and a CUDA GPU, or "
           "TRITON_INTERPRET=1, which runs them slowly on the CPU: give --kernels auto")
    kernels.use(choice)


def replayable(s, config):
    """Whether a CUDA graph can replay a step. Not where the CPU must read in each block how many tokens experts get:
    because tokens travel to them, or because each has a product of its own."""
    widths = config.n_embd, config.up_width // s.tp, config.hidden // s.tp
    at_once = s.dtype == "bf16" and s.kernels != "torch" and not any(n % 8 for n in widths)
    return not config.experts or s.ep == 1 and at_once


def check_fp8(s, c):
    """Reject --dtype fp8 where a product cannot have 8 bits."""
    able = s.device == "cuda" and torch.cuda.get_device_capability() >= (8, 9) and kernels.HAVE_TRITON
    reject(not able or s.kernels == "torch" or s.fast == "off", "--dtype fp8 is for the kernels of --fast on, on "
           "GPUs of compute capability 8.9 or more (Ada, Hopper): give --dtype bf16")
    reject(s.cp > 1 or c.experts, "--dtype fp8 is for whole sequences and dense MLPs: leave --cp and --experts out, or "
           "give --dtype bf16")
    tokens = s.batch_size // (s.dp * s.micro_batches) * c.seq_len
    for what, width in (("--n-embd", c.n_embd), ("tokens of a micro-batch on a rank:", tokens),
                        ("q, k, v / --tp:", c.qkv_width // s.tp), ("attention's width / --tp:", c.heads_width // s.tp),
                        ("the MLP's width / --tp:", c.hidden // s.tp)):
        reject(width % 16, f"--dtype fp8: {what} {width} is no multiple of 16: give --dtype bf16")


def gpus_here():
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
