"""Measures this code beside PyTorch's own and beside the lecture's formulas:

    python bench.py kernels               every kernel beside eager, compiled, SDPA's backends, and the roofline
    python bench.py lessons               lectures 5 to 8: each lesson's ways timed, the lecture's figures beside ours
    python bench.py collectives           time and bandwidth by size; bytes sent against the formula
    python bench.py strategies            one GPT step under every strategy: speed, memory, traffic, overlap, bubble
    python bench.py plan --gpus 64        no GPU needed: layouts that fit, their predicted time, what limits each
    python bench.py plan --published      the same predictions beside runs that others have published
    python bench.py scaling               1, 2, 4, ... GPUs, weak and strong
    python bench.py pictures FILE...      SVG of what the code does, and of files from --json and train.py --trace

Each command starts as many processes as it needs (or runs under torchrun) and prints a table; `--json FILE` writes its
rows with hardware, versions and commit. Our code and PyTorch's run in the same processes and take turns, so that both
see the same machine. A time is the median over repeats of the slowest rank's time. `--quick` shows only that a command
works. Tested with PyTorch 2.11 to 2.13; requirements.txt names the newest of them.

Letters: N ranks in a group, k bytes of a tensor, K parameters, B, T, C, V, L as in model.py, m micro-batches,
p pipeline ranks.
Read with: CS336 lecture 7-8; Ultra-Scale Playbook, "finding the best training configuration" and its formulas.
"""

import argparse
import contextlib
import copy
import csv
import dataclasses
import functools
import gc
import html
import inspect
import itertools
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn.functional import all_to_all_single  # its backward goes the other way
from torch.nn.attention import SDPBackend, sdpa_kernel

import collectives as dist
import kernels
import model
import parallel
import train
from kernels import tl, triton
from model import GPT, PRESETS, Experts, FusedBlock, GPTConfig, count_of_each, materialize, routers, shapes
from train import BadInput, reject

# PyTorch 2.13 renames some collectives. The old names, which 2.11 and 2.12 know, still work and are used here.
warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning, "torch.distributed")


# ------------------------------------------------------------------------------------------------------------ measuring

def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def interleaved(steps, device, repeats, calls=1):
    """Time {name: function}. Returns {name: seconds a call}, the median over repeats of the slowest rank's time.

    The functions take turns, so that a slow moment of the machine hits all alike. All ranks start a turn together,
    behind a barrier.
    """
    seconds = torch.zeros(len(steps), repeats, dtype=torch.float64, device=device)
    for i in range(-3, repeats):  # the first three warm up
        for j, step in enumerate(steps.values()):
            synchronize(device)
            torch_dist.barrier()
            synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                step()
            synchronize(device)
            if i >= 0:
                seconds[j, i] = (time.perf_counter() - start) / calls
    torch_dist.all_reduce(seconds, torch_dist.ReduceOp.MAX)
    return dict(zip(steps, seconds.median(1).values.tolist()))


def mark(device):
    """The present moment on the device's own clock. A GPU's can be read only after synchronize."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def of_all_ranks(value, group=None):
    every = [None] * dist.get_world_size(group)
    torch_dist.all_gather_object(every, value, group)
    return every


class Table:
    """Prints rows as they come, on rank 0, and keeps them for --json. columns: {key: "title:format"}."""

    def __init__(self, title, columns):
        self.title, self.rows, self.columns = title, [], {}
        for key, (name, form) in ((key, text.rsplit(":", 1)) for key, text in columns.items()):
            self.columns[key] = name, form, re.match(r"[<>]\d+", form)[0]  # last: its side and width

    def row(self, **values):
        if not self.rows:
            say(f"\n{self.title}\n\n" + "  ".join(format(name, place) for name, _, place in self.columns.values()))
        self.rows.append(values)
        say("  ".join(format("-", place) if values.get(key) is None else format(values[key], form)
                      for key, (_, form, place) in self.columns.items()))


def say(text):
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, flush=True)


def write_json(path, what, device, tables, **more):
    """Write the tables' rows, with the hardware, versions and commit that a figure means nothing without."""
    if not path or int(os.environ.get("RANK", "0")):
        return
    here, commit, cuda = os.path.dirname(os.path.abspath(__file__)), "unknown", device.type == "cuda"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.check_output(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=here, text=True,
                                         stderr=subprocess.DEVNULL).strip()
    hardware = torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} CPU, {os.cpu_count()} cores"
    found = {"what": what, "hardware": hardware, "processes": int(os.environ.get("WORLD_SIZE", "1")), "commit": commit,
             "command": " ".join(sys.argv), "torch": torch.__version__, "triton": getattr(triton, "__version__", None),
             "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None, **more,
             "rows": [row for table in tables for row in table.rows]}
    with open(path, "w") as file:
        json.dump(found, file, indent=1)


# ------------------------------------------------------------------------------------------------------------- formulas
#
# The planner predicts a step's time from formulas, so that layouts can be compared without a GPU; it needs the rates of
# a machine (`Machine`). `messages` lists what each rank sends, in which collective and how often. `sent` turns that
# into bytes, which `strategies` compares with the bytes counted. `message_seconds` turns it into seconds, and `predict`
# adds the seconds of the computation.

def law_of(group, waited=True):
    """(small, switched), the arguments of `sent`, as collectives.py works in this group. waited: whether the caller
    waits for its all-reduces. Call on all ranks."""
    link = dist.link_of(group)
    switched, small = isinstance(link, dist.Direct), getattr(link, "doubling_bytes", 0)
    return min(small, link.sums_from() - 1) if waited and switched else small, switched


def sent(op, elements, width, n, rank, small=0, switched=False):
    """Bytes that rank `rank` of n sends in one collective. elements: of the whole tensor that is gathered or scattered,
    of `width` bytes each; for an all-to-all with uneven blocks a tuple, how many for each rank. The root is rank 0.

    Rings and direct exchange send (N-1)/N k for half an all-reduce, k = elements x width. Up to `small` bytes an
    all-reduce is log2(N) rounds of the whole tensor or, if a switch joins all ranks (`switched`), one round in which a
    rank sends it N-1 times. In a binomial tree each rank passes on the data of its subtree.
    """
    if isinstance(elements, tuple):
        return width * (sum(elements) - elements[rank])
    k = elements * width
    if op == "all_reduce" and (k <= small or elements < n and not switched):
        core = 1 << (n.bit_length() - 1)  # the largest power of two
        return k * (n - 1) if switched else k if rank >= core else k * (core.bit_length() - 1 + (rank + core < n))
    if op == "all_reduce":  # N need not divide K: the last chunks are one element shorter
        chunk = [width * (elements // n + (c % n < elements % n)) for c in (rank, rank + 1)]
        return k - chunk[0] + ((n - 1) * chunk[0] if switched else k - chunk[1])
    below = n if rank == 0 else min(rank & -rank, n - rank)  # ranks in this one's subtree, itself included
    return {"isend": k, "broadcast": k * (below - 1).bit_length(), "reduce": k * (rank > 0),
            "gather": below * k // n * (rank > 0), "scatter": (below - 1) * k // n, "barrier": (n - 1).bit_length(),
            **dict.fromkeys((SCATTER, GATHER, "all_to_all_single"), (n - 1) * k // n)}[op]


HALVES = SCATTER, GATHER = "reduce_scatter_tensor", "all_gather_into_tensor"  # the two halves of an all-reduce


def in_two_levels(op, elements, inside, nodes, rank):
    """TwoLevels' parts of a collective, for rank `rank` of a node's `inside`: [(times, op, elements, on the node?)]."""
    if op != "all_reduce":
        return [(nodes, op, elements // nodes, True), (1, op, elements // inside, False)]
    mine = elements // inside + (rank < elements % inside)
    return [*((1, half, elements, True) for half in HALVES), (1, op, mine, False)]


def sent_in(link, op, elements, width, waited=True):
    """Bytes that this rank sends in one collective of a link's group, which may work in two levels."""
    if not isinstance(link, dist.TwoLevels) or op not in ("all_reduce", *HALVES):
        return sent(op, elements, width, link.size, link.rank, *law_of(link.group, waited))
    return sum(times * sent_in(link.inside if near else link.between, part, count, width, waited)
               for times, part, count, near in in_two_levels(op, elements, link.inside.size, link.between.size,
                                                             link.inside.rank))


class Message(NamedTuple):
    """One kind of collective or message of a training step.

    axis: the group that it goes through: "dp" (dp x cp), "tp", "cp", "ep", "pp"; "replicas", dp x cp where the caller
    waits; "ends", a pipeline's first and last stage; "within" and "between", inside and between the groups of ZeRO if
    it shards over a part of dp x cp; "same_experts", the ranks that have them; "world", all ranks; "all", all ranks in
    the trainer's own group.
    """
    what: str
    op: str
    axis: str
    elements: list  # for each call, as `sent` takes them
    width: int      # bytes an element
    times: int = 1  # how often a step repeats all these calls


def contents(config, stages):
    """(blocks, blocks with experts, embeddings, heads): how many a rank's stages, [(number, pieces)], have of each."""
    pieces = [i for _, run in stages for i in run]
    blocks = [i for i in pieces if 1 <= i <= config.n_layer]
    routed = sum(config.has_experts(i - 1) for i in blocks)
    return len(blocks), routed, pieces.count(0), pieces.count(config.n_layer + 1)


def widths(s):
    """(bytes of an element in the dtype that layers compute in, in the dtype that gradients are summed in)."""
    dtype = train.DTYPES[s.dtype]
    return dtype.itemsize, parallel.master_dtype(dtype).itemsize


def tokens_of(config, s):
    """Tokens of a micro-batch on a rank."""
    return s.batch_size // s.dp // s.micro_batches * config.seq_len // s.cp


def messages_of_buckets(s, axis, buckets, shards):
    """Messages that average gradients over an axis and gather weights there, as the table above ShardedOptimizer says.
    buckets: as for `messages`. shards: the number of ranks over which ZeRO cuts them."""
    m, (narrow, wide) = s.micro_batches, widths(s)
    whole, once, twice = ([n for n, gathers in buckets if gathers == times] for times in range(3))
    if s.zero == 3:
        yield Message("weights", GATHER, axis, once + 2 * twice, narrow, m)
        yield Message("gradients", SCATTER, axis, once + twice, wide, m)
        yield Message("1-D gradients", "all_reduce", axis, whole, wide)
    else:
        yield Message("gradients", SCATTER if s.zero else "all_reduce", axis, whole, wide, m if s.zero == 2 else 1)
    if s.zero in (1, 2):
        yield Message("weights", GATHER, axis, whole, narrow)
    if axis == "within":
        kept = [n // shards for n in once + twice] + whole if s.zero == 3 else [n // shards for n in whole]
        yield Message("averages of shards", "all_reduce", "between", kept, wide)


def messages_of_experts(config, s, routed, rows):
    """Messages for a rank's `routed` blocks with experts. rows: as for `messages`.

    Rows of C elements travel to their expert and back, in forward and in backward. Recomputing a block runs its forward
    again, the way back included, because the gradients of the gates need the rows that came back. Before the rows go E
    counts, which tell each expert's rank how many rows come.
    """
    c, m, (narrow, wide) = config.n_embd, s.micro_batches, widths(s)
    choices, forwards = config.top_k * tokens_of(config, s), 1 + (s.recompute == "block")
    if s.ep > 1:
        there, back = ([tuple(c * n for n in each) for each in way] for way in rows) if rows else (
            [[choices * c] * m * routed] * 2)
        yield Message("counts of rows", "all_to_all_single", "ep", [config.experts], 8, forwards * m * routed)
        for way in there, back:  # forward; then backward goes both ways in reverse, once
            yield Message("rows", "all_to_all_single", "ep", way, narrow, forwards)
        for way in back, there:
            yield Message("gradients of rows", "all_to_all_single", "ep", way, narrow)
    if s.sp:  # f gathers choices and gates, too
        yield Message("choices", GATHER, "tp", [choices], 8, forwards * m * routed)
        yield Message("gates", GATHER, "tp", [choices], wide, forwards * m * routed)
    if s.tp > 1:
        yield Message("gradients of gates", SCATTER if s.sp else "all_reduce", "tp", [choices], wide, m * routed)
    for axis in ("replicas", "pp") + ("tp",) * s.sp:
        yield Message("loads", "all_reduce", axis, [config.n_layer * config.experts], 8)


def messages(config, s, stages, buckets, tp_rank=0, partial=None, of_experts=(), rows=None):
    """All Messages of one rank in a training step of train.py in layout s.

    stages: this rank's [(number, pieces)].
    buckets: (elements, how often a micro-batch gathers them) of each bucket of its parameters. Under ZeRO-3 that is 2,
        but 1 for a stage's last unit, which stays whole from forward to backward, and 0 for 1-D parameters.
    of_experts: the same for the parameters that --ep cuts.
    partial: how many elements of gradients --sp sums over tp; None: estimate it.
    rows: how many rows this rank sends to each rank and gets from each, for each call: ([(to rank 0, to rank 1, ...),
        ...], [(from rank 0, ...), ...]); None: equally many for each expert.
    """
    count, m, (narrow, wide), tokens = s.pp * s.virtual_stages, s.micro_batches, widths(s), tokens_of(config, s)
    c, replicas, shards = config.n_embd, s.dp * s.cp, s.zero_within or s.dp * s.cp
    yield from messages_of_buckets(s, "dp" if shards == replicas else "within", buckets, shards)
    yield from messages_of_buckets(s, "same_experts", of_experts, replicas // s.ep)
    blocks, routed, first, last = contents(config, stages)
    activation = [tokens * c]
    if config.experts:
        yield from messages_of_experts(config, s, routed, rows)
    again = {"none": 0, "attention": 1, "block": 2}[s.recompute]  # how many of a block's two sublayers run again
    scatters = m * blocks * (4 + max(0, again - 1))  # the last g does not, because backward does not need its result
    if s.tp > 1:
        yield Message("loss: the maximum, then two sums", "all_reduce", "tp", [tokens, 2 * tokens], wide, m * last)
        for op in HALVES if s.sp else ["all_reduce"]:
            yield Message("embedding, head", op, "tp", activation, narrow, m * (first + last))
    if s.sp:
        # In forward f gathers and g scatters, in backward the other way round. Backward also gathers again what f has
        # gathered, except for experts, which keep their rows, so a block with experts takes 9 halves, not 10.
        gathers = m * (blocks * (6 + again) - routed)
        yield Message("activations: 6 of 10 halves", GATHER, "tp", activation, narrow, gathers)
        yield Message("activations: 4 of 10 halves", SCATTER, "tp", activation, narrow, scatters)
        seen = (blocks * 6 + routed * (config.experts - 1) + first * config.seq_len + last * 2) * c  # routers are whole
        seen //= shards if s.zero in (1, 2) else 1
        yield Message("gradients of T/N tokens", "all_reduce", "tp", [seen if partial is None else partial], wide)
    elif s.tp > 1:  # a block: g twice forward, f twice backward
        yield Message("activations: 4 a block", "all_reduce", "tp", activation, narrow, scatters)
    if s.cp > 1:
        # In backward keys and values go round again, gradients in `wide`; recomputing runs attention's forward again.
        part, forwards = activation[0] // s.tp, m * blocks * (1 + (s.recompute != "none"))
        if s.cp_kind == "ring":
            yield Message("keys and values", "isend", "cp", [2 * part], narrow, (s.cp - 1) * (forwards + m * blocks))
            yield Message("their gradients", "isend", "cp", [2 * part], wide, (s.cp - 1) * m * blocks)
        else:  # recomputing runs both all-to-alls again, because c_proj's weight gradient needs the second one's result
            yield Message("heads for tokens", "all_to_all_single", "cp", [3 * part], narrow, forwards + m * blocks)
            yield Message("tokens for heads", "all_to_all_single", "cp", [part], narrow, forwards + m * blocks)
    if s.pp > 1:
        neighbours = sum((i + 1 < count) + (i > 0) for i, _ in stages)  # F sends right, B left
        passed = activation[0] // (s.tp if s.sp else 1)
        yield Message("activations", "isend", "pp", [passed], narrow, m * neighbours)
        yield Message("loss", "all_reduce", "pp", [1], wide)
        if config.tied and (first or last) and count > 1:
            vocabulary = config.vocab_size // s.tp + (tp_rank < config.vocab_size % s.tp)
            kept = -(-vocabulary * c // (shards if s.zero else 1))
            yield Message("tied embedding", "all_reduce", "ends", [kept], wide, first + last)
    yield Message("gradient norm", "all_reduce", "world", [1], 8)
    yield Message("who stops, who skips", "all_reduce", "all", [2], 8)


@dataclass(frozen=True)
class Machine:
    """The rates from which `predict` computes a step's time. They are reached in practice, except `peak`."""
    name: str
    peak: float           # FLOP/s by the datasheet, dense, 16-bit, which MFU is a share of; None: not known, no MFU
    memory: float         # bytes
    matmul: float         # FLOP/s of a block's matrix products with 8192 tokens
    attention: float      # FLOP/s from q, k, v to the heads' outputs, forward and backward, counting only scores that
                          # the mask leaves. In MACHINES: with 1024 tokens
    elementwise: float    # bytes/s of a block's other operations, by `passes`' bytes; above hbm where they are fused
    loss: float           # logits/s through cross-entropy, forward and backward
    hbm: float            # bytes/s of a copy, read plus written
    launch: float         # s that the CPU takes to issue a block's kernels, forward and backward; CUDA graphs take 0
    link: float = None         # bytes/s from one GPU to another of its node
    hop: float = None          # s of latency of a message inside a node
    network: float = None      # bytes/s from one GPU to another node; None: not known
    network_hop: float = None  # s of latency of a message between nodes
    node: int = 8              # GPUs of a node
    switched: bool = True      # a switch joins the GPUs of a node, so they need no ring
    units: float = None        # `launch` under ZeRO-3, with its hooks but without its collectives
    fused: bool = True         # --kernels auto takes our kernels, for the loss and AdamW, too: Hopper and later
    long_attention: float = None  # what attention reaches in ever longer rows; None: `attention` has the model's length

    def attention_with(self, tokens):
        """FLOP/s of attention over so many tokens. Long rows are faster, because each query has a fixed cost, too."""
        slow, fast = 1 / self.attention, 1 / (self.long_attention or self.attention)
        return 1 / (fast + (slow - fast) * 1024 / max(1024, tokens))


# `peak` is the datasheet's, `memory` what CUDA reports. The H200's rates were measured on four of them. Rates of the
# other GPUs and of all networks are estimates; --machine FILE takes rates that you have measured.
MACHINES = {
    "h200": Machine("H200", 989e12, 150e9, 710e12, 220e12, 5.9e12, 3.4e11, 4.07e12, 1.7e-3, 330e9, 2.7e-5, 45e9, 8e-6,
                    long_attention=450e12),
    "h100": Machine("H100", 989e12, 85e9, 650e12, 210e12, 4.2e12, 2.5e11, 2.8e12, 1.7e-3, 330e9, 2.7e-5, 45e9, 8e-6,
                    long_attention=430e12),
    "a100": Machine("A100", 312e12, 85e9, 250e12, 100e12, 2.5e12, 1.5e11, 1.7e12, 1.7e-3, 200e9, 2.7e-5, 22e9, 8e-6,
                    fused=False, long_attention=170e12),
}


def rounds(op, elements, width, n, direct, small=False):
    """(number of rounds, one after the other; bytes sent) of a collective. direct: a switch joins all ranks. small: an
    all-reduce sends the whole tensor in few rounds."""
    if op == "all_reduce" and small:
        count = 1 if direct else math.log2(n)
        return count, elements * width * (n - 1 if direct else count)
    return (2 if op == "all_reduce" else 1) * (1 if direct or op == "isend" else n - 1), sent(op, elements, width, n, 0)


def message_seconds(item, n, machine, here):
    """Seconds of a Message in a group of n ranks, `here` of them on each node: rounds x hop + bytes / bandwidth for
    each of its calls.

    If a node has several of the ranks but not all, the group works in two levels, and each rank sends its part through
    its own network card. If a node has one of them, that rank has a card, too. An all-reduce is taken to use the faster
    of its two ways; collectives.py decides by DOUBLING_BYTES.
    """
    def seconds(op, elements, n, near):
        hop, rate = (machine.hop, machine.link) if near else (machine.network_hop, min(machine.link, machine.network))
        ways = [rounds(op, elements, item.width, n, machine.switched and near, small)
                for small in ((False, True) if op == "all_reduce" else (False,))]
        return min(count * hop + k / rate for count, k in ways)

    def call(op, elements):
        if here in (1, n) or op not in ("all_reduce", *HALVES):
            return seconds(op, elements, n, here == n)
        return sum(times * seconds(part, count, here if near else n // here, near)
                   for times, part, count, near in in_two_levels(op, elements, here, n // here, here - 1))

    if n == 1:
        return 0.0
    return item.times * sum(count * call(item.op, elements) for elements, count in Counter(item.elements).items())


class Costs(NamedTuple):
    """Predicted seconds of a step on the busiest pipeline rank. A step is the sum of all but the last two."""
    compute: float      # forward and backward of all micro-batches
    tp: float           # tensor parallelism's collectives, less the time that matrix products hide
    cp: float           # context parallelism's traffic, less the time that attention hides
    ep: float           # expert parallelism's all-to-alls, which nothing hides
    bubble: float
    transfers: float    # the pipeline's that a rank waits for, and the tied embedding's gradient between its ends
    dp: float           # data parallelism's collectives, less the time that computation hides
    optimizer: float
    cp_all: float       # all of context parallelism's traffic, hidden or not
    dp_all: float       # all of data parallelism's

    @property
    def step(self):
        return sum(self) - self.cp_all - self.dp_all


def passes(config, tp=1, sp=False, ep=1, routed=False):
    """(F, I, W): elements that a block's kernels read and write for a token, outside of matrix products and attention.

    F: two layer norms 4C, two residual sums 6C, GeLU 2 inner; I: 10C, 6C, 3 inner; W: the sums of the biases'
    gradients, 2C + (3C + inner). tp cuts (3C + inner), sp also the other C. routed: the block has experts, with equal
    loads. Then a token has a row of C for each of its experts. Sorting reads the token and writes its rows; weighing
    and adding up reads the rows and writes the token. The router takes C, in I 3C. With ep > 1 rows are sorted by
    expert and back once more.
    """
    c, k = config.n_embd, config.top_k if routed else 1
    own, rows, inner = c / tp if sp else c, k * c, k * config.inner / tp
    block = 10 * own + 2 * inner, 16 * own + 3 * inner, 2 * own + 3 * c / tp + inner
    travelled = 4 * rows * (ep > 1)
    more = own + 2 * (c + rows) + travelled, 3 * own + 2 * c + 3 * rows + travelled, rows - own
    return [n + routed * experts for n, experts in zip(block, more)]


def block_seconds(config, s, machine, routed):
    """(F, I, W): seconds that the GPU computes in one block for one micro-batch. routed: the block has experts."""
    c, (narrow, wide), tokens = config.n_embd, widths(s), tokens_of(config, s)
    met, here = (config.top_k, config.experts // s.ep) if routed else (1, 1)  # MLPs: a token's, this rank's
    attention, mlp = 4 * c * c / s.tp, 2 * c * config.inner / s.tp
    product = 2 * (attention + met * mlp) * tokens / machine.matmul             # I and W take as many products as F
    scores = attention_seconds(config, s, machine)                              # backward: 2.5 times as long
    f, i, w = (product + tokens * narrow * n / machine.elementwise for n in passes(config, s.tp, s.sp, s.ep, routed))
    into_buckets = (attention + here * mlp) * (2 * narrow + 2 * wide) / machine.hbm
    f, i, w = f + scores, i + 2.5 * scores, w + into_buckets
    again = {"none": 0.0, "attention": scores + 2 * attention * tokens / machine.matmul, "block": f}[s.recompute]
    return f, i + again, w


# With ep > 1 the CPU waits for the counts of rows in each block. Meanwhile the GPU has nothing to do for so many
# seconds, those of a copy and a launch: a rough estimate, not measured.
WAIT = 2e-5


def stage_seconds(config, s, machine, stages):
    """(F, I, W): seconds of one micro-batch on a rank with these stages, in layout s, each kind of work at its rate.

    Without CUDA graphs the CPU issues every kernel, ahead of the GPU where it can: while the GPU computes the head, the
    CPU already issues backward. So a micro-batch takes the GPU's seconds or the CPU's, whichever are more, summed over
    all blocks and the head. If the CPU waits for counts in forward (ep > 1), this holds for forward and backward
    separately. The CPU's seconds are proportional to autograd's functions: 9 in a dense block, 3 more with experts, or
    7 more with ep > 1.
    """
    tokens, (blocks, routed, _, head) = tokens_of(config, s), contents(config, stages)
    f, i, w = ((blocks - routed) * dense + routed * some for dense, some in zip(*(
        block_seconds(config, s, machine, has_experts) for has_experts in (False, True))))
    replayed = train.replayable(s, config) and s.cuda_graphs != "off"
    issue = machine.units if s.zero == 3 and machine.units else machine.launch
    once = 0.0 if replayed else (blocks + routed * (7 if s.ep > 1 else 3) / 9) * issue
    launch = once * (1 if s.recompute == "none" else 4 / 3)
    if head:
        logits = tokens * config.vocab_size / s.tp
        product, loss = 2 * config.n_embd * logits / machine.matmul, logits / machine.loss
        f, i, w = f + product + loss / 3, i + product + loss * 2 / 3, w + product
    if s.ep > 1 and routed:
        waits = routed * WAIT
        slow = max(1.0, (launch - once / 3) / (i + w))  # issuing forward takes a third of `once`
        return max(f, once / 3) + waits, slow * i + waits * (s.recompute == "block"), slow * w
    slow = max(1.0, launch / (f + i + w)) if blocks else 1.0
    return slow * f, slow * i, slow * w


def attention_seconds(config, s, machine):
    """Seconds of attention's forward in one block for one micro-batch: Q K^T and P V, half masked, take 2 T C FLOPs a
    token. A ring's kernels see T/N tokens at once."""
    rate = machine.attention_with(config.seq_len // (s.cp if s.cp_kind == "ring" else 1))
    return 2 * config.seq_len * config.n_embd / s.tp * tokens_of(config, s) / rate


def ring_hides(flops, link, dtype):
    """(forward, backward): from how many tokens T/N of a rank on attention hides a ring's traffic. flops: F, the FLOP/s
    of attention. link: W, bytes/s between ranks. In bf16 they are 2 F/W and 2.4 F/W.

    In a ring's step a rank sends K and V of T/N tokens and, by the zigzag, computes half of (T/N)^2 scores. A sequence:

        forward     2 x T/N x C x 2 bytes               2 products:  2 x (T/N)^2 x C FLOPs      T/N >= 4/2 F/W
        backward    as many, with dK and dV in float32  5 products:  5 x (T/N)^2 x C FLOPs      T/N >= (4 + 8)/5 F/W
    """
    narrow, wide = dtype.itemsize, parallel.master_dtype(dtype).itemsize
    return 2 * narrow / 2 * flops / link, (2 * narrow + 2 * wide) / 5 * flops / link


def context_seconds(config, s, machine, blocks, spent):
    """(seconds of context parallelism's traffic in a training step, those of them that attention does not hide).

    A rank of a ring sends keys and values on while it computes with them, in N-1 of N steps. In backward dK and dV
    follow a step behind, so nothing hides the last ones. Nothing hides Ulysses' all-to-alls.
    """
    every = sum(seconds for (axis, _), seconds in spent.items() if axis == "cp")
    if s.cp == 1 or s.cp_kind == "ulysses":
        return every, every
    runs, gradients = 1 + (s.recompute != "none"), spent["cp", "their gradients"]  # of attention's forward
    keys = spent["cp", "keys and values"] / (runs + 1)
    over = s.micro_batches * blocks * attention_seconds(config, s, machine) * (s.cp - 1) / s.cp
    return every, runs * max(0.0, keys - over) + max(gradients / (s.cp - 1), keys + gradients - 2.5 * over)


@functools.cache
def splits_backward(schedule, p, m, v):
    """Whether weight gradients are actions of their own, or None if the schedule refuses these numbers. It is tried
    with the fewest micro-batches that fill it and leave m's remainder when divided by p."""
    with contextlib.suppress(ValueError):
        lists = parallel.SCHEDULES[schedule](p, p + m % p, v)
        return any(action.kind == "W" for actions in lists for action in actions)


# Hidden traffic still costs time, because it takes memory bandwidth from the computation. A byte that is sent is read
# here and written there, and the sum reads it and the byte that it is added to: 4 bytes moved. On an H200 that costs
# 4 x 330 / 4070 GB/s = 32 % of the traffic's time, over a network less. DDP of GPT-2 XL on four H200s saved 64 % of the
# traffic's time; these 32 % and the last bucket are the rest.
MOVED = 4


def hidden_under_products(config, s, machine, half):
    """Seconds of --sp's traffic that matrix products can hide, in one block for one micro-batch. half: seconds of one
    all-gather or reduce-scatter.

    A linear layer can multiply in N chunks while its input arrives, or its output leaves, in N chunks. That hides at
    most the product's time, less one chunk. A column layer has three halves (forward; in backward its input again and
    its input's gradient), a row layer two. Recomputing runs forward's halves again, except the last.
    """
    c, again = config.n_embd, s.recompute == "block"
    layers = (3 * c, 3 + again), (c, 2 + again), (config.inner, 3 + again), (config.inner, 2)
    chunks = 2 * c * tokens_of(config, s) / s.tp / machine.matmul * (s.tp - 1) / s.tp  # all but one, of width 1
    return sum(halves * min(half, width * chunks) for width, halves in layers)


def predict(config, s, machine, overlap=None):
    """Costs of a training step of train.py in layout s. overlap: None, traffic is hidden as train.py does it, but for
    --tp's; False, no traffic is hidden; True, products also hide --sp's."""
    m, (narrow, wide) = s.micro_batches, widths(s)
    cuts = list(enumerate(parallel.split_pieces(config, s.pp * s.virtual_stages)))
    (f, i, w), stages = max(((stage_seconds(config, s, machine, cuts[rank::s.pp]), cuts[rank::s.pp])
                             for rank in range(s.pp)), key=lambda found: sum(found[0]))
    blocks, routed, _, _ = contents(config, stages)
    shared, experts = parallel.local_elements(config, s.tp, tuple(run for _, run in stages))  # {is a matrix: elements}
    if s.ep == 1:  # else experts have buckets of their own
        shared, experts = shared + experts, Counter()

    # Seconds of each Message, by axis and purpose. groups: {axis: (ranks, distance of neighbours)}, tp innermost.
    replicas = s.dp * s.cp
    each, every, shards = replicas * s.tp, replicas * s.tp * s.pp, s.zero_within or replicas
    groups = {"tp": (s.tp, 1), "cp": (s.cp, s.tp), "dp": (replicas, s.tp), "within": (shards, s.tp),
              "between": (replicas // shards, shards * s.tp), "replicas": (replicas, s.tp),
              "ep": (s.ep, s.tp * s.cp), "same_experts": (replicas // s.ep, s.tp * s.ep),
              "pp": (min(s.pp, 2), each), "ends": (min(s.pp, 2), every // 2), "world": (every, 1), "all": (every, 1)}

    def buckets_of(elements, units, ranks=1):  # ranks: how many share the elements out
        matrices, vectors = (int(elements[is_matrix] / ranks) for is_matrix in (True, False))
        count = units if s.zero == 3 else -(-matrices * wide // (100 << 20))
        unit = matrices // max(1, count)
        return ([(unit, 2)] * (count - 1) + [(unit, 1)] if s.zero == 3 else [(unit, 0)] * count) + [(vectors, 0)]
    buckets = buckets_of(shared, blocks + 1)
    of_experts = buckets_of(experts, routed, s.ep) if s.ep > 1 and routed else []
    count = len(buckets) - 1 + max(0, len(of_experts) - 1) * (s.zero < 3)  # how many are sent in a row
    mine = [item for item in messages(config, s, stages, buckets, of_experts=of_experts) if item.axis != "ends"]
    ends = [item for item in messages(config, s, cuts[:1], []) if item.axis == "ends"]  # all ranks wait
    spent, touched = Counter(), Counter()
    for item in mine + ends:
        n, distance = groups[item.axis]
        local = max(1, machine.node // distance)
        here = n if n <= local else local if n % local == 0 else 1  # how many of the group's ranks a node has
        spent[item.axis, item.what] += message_seconds(item, n, machine, here)
        touched[item.axis] += MOVED / machine.hbm * item.times * sum(
            k * sent(item.op, elements, item.width, n, 0) for elements, k in Counter(item.elements).items())
    tp, ep = (sum(seconds for (axis, _), seconds in spent.items() if axis == some) for some in ("tp", "ep"))
    if overlap and s.sp and blocks:
        halves = sum(seconds for (axis, what), seconds in spent.items() if axis == "tp" and "halves" in what)
        hidden = m * blocks * hidden_under_products(config, s, machine, halves / m / blocks / (
            10 + 3 * (s.recompute == "block")))
        tp -= hidden * max(0.0, 1 - touched["tp"] / tp)
    cp_all, cp = context_seconds(config, s, machine, blocks, spent)
    f, i = f + (tp + cp + ep) / m / 2, i + (tp + cp + ep) / m / 2

    # The lecture's bubble. Ranks wait for transfers where the pipeline fills and drains, once a stage, and at the end
    # for a tied embedding's gradient.
    splits, waits = splits_backward(s.schedule, s.pp, m, s.virtual_stages), s.pp - 1 + m * (overlap is False)
    bubble = (s.pp - 1) * (f + i + (-w if splits else w)) / s.virtual_stages
    transfers = spent["pp", "activations"] / m * waits + spent["ends", "tied embedding"]

    # Clipping reads gradients once, and scales them; AdamW reads four numbers and writes three; then weights are cast
    # down. Our kernel does all of this in one pass, except the first reading.
    moved = 8 * wide + narrow if machine.fused and wide != narrow else 10 * wide + (wide != narrow) * (wide + narrow)
    stepped = shared[True] / (shards if s.zero else 1) + experts[True] / s.ep / (replicas // s.ep if s.zero else 1)
    optimizer = stepped * moved / machine.hbm

    # Backward hides the traffic of gradients, except the last bucket's. ZeRO-1 and 2 gather a bucket's new weights
    # while our AdamW updates the next ones and, with CUDA graphs, while forward computes the layers before. ZeRO-3
    # gathers each unit while the one before computes: in forward nothing hides the first unit, and in backward the last
    # unit is still whole.
    axis, between = "dp" if shards == replicas else "within", spent["between", "averages of shards"]
    gather, reduce = (spent[axis, what] + spent["same_experts", what] for what in ("weights", "gradients"))
    if s.zero == 3:
        one, send = gather / m / (2 * count - 1), reduce / m
        dp = m * (max(one, count * one - f) + max(send / count, (count - 1) * one + send - i - w))
    else:
        late = machine.fused and s.cuda_graphs != "off" and train.replayable(s, config)
        dp = max(reduce / count, reduce - (m if s.zero == 2 else 1) * (i + w))
        dp += max(gather / count, gather - optimizer * machine.fused - f * bool(late or overlap))
    dp = gather + reduce if overlap is False else dp
    lost = min(1.0, (touched[axis] + touched["same_experts"]) / max(gather + reduce, 1e-9))
    dp += (gather + reduce - dp) * lost + between  # `between` starts when all else has arrived
    return Costs(m * (f + i + w) - tp - cp - ep, tp, cp, ep, bubble, transfers, dp, optimizer, cp_all,
                 gather + reduce + between)


# ---------------------------------------------------------------------------------------------------------- the machine

def measure_machine(device, dtype, config, comms):
    """{comm: Machine} with the rates of these processes at this model's sizes. All ranks measure at once, because in
    training, too, they share power."""
    config = dataclasses.replace(config, experts=0)  # rates are a dense block's
    cuda, n, c = device.type == "cuda", dist.get_world_size(), config.n_embd
    b, t = max(1, (32768 if cuda else 1024) // config.seq_len), config.seq_len  # so much that no GPU waits for its CPU
    random = functools.partial(torch.randn, dtype=dtype, device=device, requires_grad=True)

    def both_ways(module, x, dy=None):
        def run():
            module.zero_grad()
            x.grad = None
            module(x).backward(dy)
            getattr(module, "finish_grad_sync", int)()
        return run

    block, attention = (FusedBlock(config, 0).to(device, dtype) for _ in range(2))
    attention.attn.c_attn = attention.attn.c_proj = torch.nn.Identity()  # only attention itself is left
    tiny = torch.nn.Sequential(*(FusedBlock(GPTConfig(n_embd=32, n_head=1), 0) for _ in range(8))).to(device, dtype)
    loss, targets = torch.nn.Module(), torch.zeros(b, t, dtype=torch.int64, device=device)
    loss.forward = lambda logits: parallel.cross_entropy(logits, targets, config.vocab_size)
    a, wide, up = random(b * t, c), random(b * t, config.inner), random(c, config.inner)
    x, qkv, logits, row = random(b, t, c), random(b, t, 3 * c), random(b, t, config.vocab_size), random(1, 16, 32)
    source, target = torch.zeros(2, 1 << 29 if cuda else 1 << 24, dtype=torch.uint8, device=device)
    k = min(b * t, 8192)  # tokens of a step on one GPU; with more, products are faster
    steps = {
        "products": torch.no_grad()(lambda: (a @ up, wide @ up.T, a.T @ wide)),
        "fewer": torch.no_grad()(lambda: (a[:k] @ up, wide[:k] @ up.T, a[:k].T @ wide[:k])),
        "copy": lambda: target.copy_(source), "block": both_ways(block, x, torch.randn_like(x)),
        "attention": both_ways(attention.attn, qkv, torch.randn_like(x)), "loss": both_ways(loss, logits),
        "launch": both_ways(tiny, row, torch.randn_like(row))}
    if cuda:
        steps["units"] = replaced(left_out)(both_ways(parallel.FSDP(copy.deepcopy(tiny)), row, torch.randn_like(row)))
    seconds = interleaved(steps, device, 5, calls=3)
    rest = seconds["block"] - seconds["attention"] - seconds["products"] * (2 + 4 * c / config.inner)  # no products
    if cuda:
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    else:
        name, memory = "CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / n
    machine = Machine(
        name, train.peak_flops(device), memory, matmul=6 * k * c * config.inner / seconds["fewer"],
        attention=7 * b * t * t * c / seconds["attention"],
        elementwise=sum(passes(config)) * b * t * dtype.itemsize / max(rest, 0.05 * seconds["block"]),
        loss=logits.numel() / seconds["loss"], hbm=2 * source.nbytes / seconds["copy"],
        launch=seconds["launch"] / len(tiny), units=seconds["units"] / len(tiny) if cuda else None,
        fused=kernels.on_triton(torch.empty(0, device=device)))
    machines, group = {}, dist.new_group()
    tensors = [torch.zeros(1 << log, device=device) for log in ((11, 26) if cuda else (8, 21))]  # small, large
    for comm in comms if n > 1 else ():
        dist.use(group, comm)
        seconds = interleaved({len(some): functools.partial(dist.all_reduce, some, group=group) for some in tensors},
                              device, 5, calls=5)
        switched = isinstance(dist.link_of(group), dist.Direct)
        ways = [rounds("all_reduce", count, 4, n, switched, count == min(seconds)) for count in seconds]
        hop, link = fit(*zip(*ways), list(seconds.values()))
        machines[comm] = dataclasses.replace(machine, link=link, hop=hop, switched=switched)
    dist.destroy_process_group(group)
    return machines or dict.fromkeys(comms, machine)


def describe_machine(machine):
    unit, scale = ("TFLOP/s", 1e12) if machine.matmul > 1e12 else ("GFLOP/s", 1e9)
    by_length = f" to {machine.long_attention / scale:.0f} by length" if machine.long_attention else ""
    parts = [f"{machine.name}: products {machine.matmul / scale:.0f} {unit}, causal attention "
             f"{machine.attention / scale:.0f}{by_length}", f"memory {machine.hbm / 1e9:,.0f} GB/s, a block's other "
             f"operations {machine.elementwise / 1e9:,.0f}, {machine.memory / 2**30:.0f} GiB",
             f"{1e3 * machine.launch:.2f} ms to launch a block"
             + (f", {1e3 * machine.units:.2f} under ZeRO-3" if machine.units else "")]
    parts += [f"link {machine.link / 1e9:.1f} GB/s, {1e6 * machine.hop:.0f} us a message"] if machine.link else []
    parts += [f"network {machine.network / 1e9:.0f} GB/s a GPU, {machine.node} GPUs a node"] if machine.network else []
    return "; ".join(parts)


def mfu(config, tokens, machine):
    """Percent of the machine's peak FLOP/s that so many tokens/s a GPU use; None if the peak is not known."""
    return 100 * tokens * config.flops_per_token() / machine.peak if machine.peak else None


def mfu_note(config):
    return f"\n{train.HALF_COUNTED}" if config.long_sequences else ""


# -------------------------------------------------------------------------------------------------------------- kernels

class Operation(NamedTuple):
    name: str
    who: dict        # {who: (function, its inputs)}
    moved: tuple     # the fewest bytes that can be read and written, forward and backward
    flops: tuple = (0, 0)


def operations(device, dtype, n, only):
    """The Operations that take most of a training step, on tensors of about n elements."""
    random, large = functools.partial(torch.randn, dtype=dtype, device=device, requires_grad=True), n > 1 << 20

    def against(name, plain, ours, inputs, passes, **more):  # eager, compiled, ours; passes over the first input
        who = {"eager": plain, **more, "torch.compile": torch.compile(plain, dynamic=False), "ours": ours}
        return Operation(f"{name} {str(dtype)[6:]}", {key: (f, inputs) for key, f in who.items()},
                         tuple(count * inputs[0].nbytes for count in passes))

    if "elu" in only:
        yield against("ELU", kernels.elu_reference, kernels.elu, [random(n)], (2, 3), **{"F.elu": F.elu})
    if "gelu" in only:
        yield against("GELU", lambda x: F.gelu(x, approximate="tanh"), kernels.gelu, [random(n)], (2, 3))
    for c in (768, 1600, 4096, 16384) if "layer_norm" in only else ():
        x, w, b = random(max(2, n // 2 // c), c), random(c), random(c)
        yield against(f"layer norm {c}", lambda x, w, b: F.layer_norm(x, w.shape, w, b), kernels.layer_norm, [x, w, b],
                      (2, 3))
        if c == 1600:  # x + r, and its norm
            yield against(f"add, norm {c}", lambda x, r, w, b: (x + r, F.layer_norm(x + r, w.shape, w, b)),
                          kernels.add_layer_norm, [x, random(*x.shape), w, b], (4, 4))
    if "cross_entropy" in only:
        v = 50304 if large else 300
        z, y = random(max(2, n // 2 // v), v), torch.randint(v, (max(2, n // 2 // v),), device=device)
        yield against("cross-entropy", lambda z: F.cross_entropy(z.float(), y), lambda z: kernels.cross_entropy(z, y),
                      [z], (1, 2))
    cuda = {"FLASH": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    causal = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    for d, t in itertools.product((64, 128), (1024, 4096, 16384)) if "attention" in only else ():
        b, h, t = 16384 // t if large else 1, 2048 // d, t if large else t // 64
        q, k, v = random(b, h, t, d), random(b, h, t, d), random(b, h, t, d)
        who = {f"SDPA {key}": (sdpa_kernel(backend)(causal), [q, k, v])
               for key, backend in (cuda if device.type == "cuda" else {"math": SDPBackend.MATH}).items()}
        yield Operation(f"attention T={t} D={d} causal", {**who, "ours": (kernels.attention, [random(b, t, 3, h, d)])},
                        (4 * q.nbytes, 8 * q.nbytes), (2 * b * h * t * t * d, 5 * b * h * t * t * d))
    if "grouped" in only:
        yield from grouped_operations(device, dtype, large)
    if "matmul" in only:
        side = 8192 if large else 64
        with torch.no_grad():
            a, b = torch.randn(2, side, side, dtype=dtype, device=device)
        yield Operation(f"matmul {side}", {"cuBLAS": (torch.matmul, [a, b]), "ours": (kernels.tuned_matmul, [a, b])},
                        (3 * a.nbytes, 0), (2 * side**3, 0))


def grouped_operations(device, dtype, large):
    """The product of sorted rows with each group's own matrix, for equal groups and for groups that halve from one to
    the next. The loop is given its counts on the CPU, so it does not wait for the GPU."""
    rows, n_in, n_out = (16384, 1536, 6144) if large else (40, 16, 24)
    for count, even in itertools.product((4, 16), (True, False)):
        sizes = [rows // count] * count if even else [rows >> min(e + 1, count - 1) for e in range(count)]
        sizes[0] += rows - sum(sizes)
        counts = torch.tensor(sizes, device=device)
        ends = counts.cumsum(0).int()
        x, w = (torch.randn(*shape, dtype=dtype, device=device, requires_grad=True)
                for shape in ((rows, n_in), (count, n_out, n_in)))
        who = {"cuBLAS, a loop": lambda x, w, sizes=sizes: torch.cat(
                   [some @ matrix.T for some, matrix in zip(x.split(sizes), w)]),
               "ours": lambda x, w, counts=counts: kernels.grouped_linear(x, w, None, counts)}
        if has_grouped(device, dtype):
            who["_grouped_mm"] = lambda x, w, ends=ends: torch._grouped_mm(x, w.transpose(1, 2), ends)
        flops, out = 2 * rows * n_in * n_out, rows * n_out * x.itemsize
        yield Operation(f"grouped product {count} {'even' if even else 'skewed'}",
                        {key: (function, [x, w]) for key, function in who.items()},
                        (x.nbytes + w.nbytes + out, 2 * (x.nbytes + w.nbytes) + out), (flops, 2 * flops))


def seconds_of(functions, device, repeats):
    """Time {who: (function, its inputs)} in turns. Returns {who: [median seconds forward, backward]}. A write of 2 GiB
    goes first: it empties L2, and while it runs the CPU launches what is measured."""
    samples = {who: [] for who in functions}
    flush = torch.empty(1 << (31 if device.type == "cuda" else 10), dtype=torch.uint8, device=device)
    for i in range(-2, repeats):
        for who, (function, inputs) in functions.items():
            flush.zero_()
            marks = [mark(device)]
            out = function(*inputs)
            marks.append(mark(device))
            outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
            if outs:
                grads = [torch.ones_like(o) for o in outs]
                flush.zero_()
                marks.append(mark(device))
                torch.autograd.backward(outs, grads)
                marks.append(mark(device))
            synchronize(device)
            took = [b - a if device.type == "cpu" else a.elapsed_time(b) / 1e3 for a, b in zip(marks[::2], marks[1::2])]
            samples[who] += [took] * (i >= 0)
            for x in inputs:
                x.grad = None
    return {who: [statistics.median(column) for column in zip(*rows)] for who, rows in samples.items()}


def measure_kernels(a):
    device = torch.device(a.device, *[0] * (a.device == "cuda"))
    kernels.use("triton")  # ours or an error
    n, side, repeats = (1 << 28, 8192, 10) if device.type == "cuda" and not a.quick else (1 << 12, 64, 2)
    (x, y), m = torch.zeros(2, n, device=device), torch.randn(side, side, device=device).bfloat16()
    ceilings = seconds_of({"copy": (y.copy_, [x]), "matmul": (torch.matmul, [m, m])}, device, repeats)
    hbm, peak = 2 * x.nbytes / ceilings["copy"][0], 2 * side**3 / ceilings["matmul"][0]
    del x, y, m
    say(f"copy {hbm / 1e12:.2f} TB/s, bf16 product of {side} x {side} {peak / 1e12:.0f} TFLOP/s. The roofline is "
        f"the longer time: bytes at the first rate, or FLOPs at the second\n"
        f"to see what torch.compile has written: TORCH_LOGS=output_code python bench.py kernels --only elu")
    table = Table("TB/s: the fewest bytes that must move, over seconds. All in bfloat16 except the second ELU", {
        "op": "operation:<30", "way": "way:<8", "who": "who:<14", "ms": "ms:>9.3f", "tb": "TB/s:>6.2f",
        "tflops": "TFLOP/s:>8.0f", "bound": "bound by:<8", "share": "% of roofline:>13.0f"})
    for dtype, only in ((torch.bfloat16, a.only), (torch.float32, {"elu"} & set(a.only))):
        for operation in operations(device, dtype, n, only):
            for who, seconds in seconds_of(operation.who, device, repeats).items():
                for way, t, moved, flops in zip(("forward", "backward"), seconds, operation.moved, operation.flops):
                    table.row(op=operation.name, way=way, who=who, ms=1e3 * t, tb=moved / t / 1e12,
                              tflops=flops / t / 1e12 if flops else None,
                              bound="memory" if moved / hbm > flops / peak else "compute",
                              share=100 * max(moved / hbm, flops / peak) / t)
            torch._dynamo.reset()
    write_json(a.json, "kernels", device, [table], copy_bytes_per_s=hbm, matmul_flops=peak)


# -------------------------------------------------------------------------------------------------------------- lessons
#
# The numbers that lectures 5 to 8 state, beside ours. A lesson of 5 or 6 computes one result in several ways, the slow
# one first, and times them on the device at hand.

class Lesson(NamedTuple):
    says: str
    read: str        # the code to read: a file and a name in it
    measure: object  # function(device, size) -> [(way, seconds, bytes, FLOPs)]
    needs: str = ""  # "triton" or "cuda"


def timed(device, size, ways):
    """[(way, seconds, bytes, FLOPs)] of {way: (function, inputs, bytes, FLOPs)}."""
    seconds = seconds_of({way: parts[:2] for way, parts in ways.items()}, device, size.repeats)
    return [(way, forward, *ways[way][2:]) for way, (forward,) in seconds.items()]


def three_stopwatches(device, size):
    """Time one product in three ways. It must be the process's first product, because that one loads the libraries."""
    x = torch.ones(size.side, size.side, device=device)

    def stopwatch(waits):
        synchronize(device)
        start = time.perf_counter()
        x @ x
        if waits:
            synchronize(device)
        return time.perf_counter() - start
    first = stopwatch(True)
    warm, early = (statistics.median(stopwatch(waits) for _ in range(5)) for waits in (True, False))
    return [(way, seconds, 3 * x.nbytes, 2 * size.side**3)
            for way, seconds in (("first call", first), ("warm, waited for", warm), ("not waited for", early))]


def one_by_one_and_fused(plain, passes, ours):
    """A lesson: PyTorch's operations one by one, in `passes` reads and writes of x, against one read and one write."""
    def measure(device, size):
        x = torch.randn(size.n, device=device)
        ways = {"one by one": (plain, [x], passes * x.nbytes, 0),
                "ours" if kernels.on_triton(x) else "one operation": (ours, [x], 2 * x.nbytes, 0)}
        if device.type == "cuda":  # on a CPU torch.compile needs a C++ compiler
            ways["torch.compile"] = torch.compile(plain, dynamic=False), [x], 2 * x.nbytes, 0
        return timed(device, size, ways)
    return measure


@triton.jit
def _copy_lines(x, y, line, step, BLOCK: tl.constexpr):
    """A program copies BLOCK numbers of a line. Neighbours in a line are `step` elements apart, lines `line`."""
    at = tl.program_id(1) * line + (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) * step
    tl.store(y + at, tl.load(x + at))


def columns_and_rows(device, size):
    """A copy, down columns or along rows. A GPU reads memory in sectors of 32 bytes. Down a column each sector serves
    one number, unless L2 keeps it for the next column."""
    side = math.isqrt(size.n)
    x, y = torch.randn(2, side, side, device=device)

    def along(line, step):
        if not kernels.on_triton(x):
            return y.copy_(x if step == 1 else x.T)
        _copy_lines[side // min(side, 1024), side](x, y, line, step, min(side, 1024))
        return y
    asked = 2 * x.numel() * (32 if device.type == "cuda" else 4)
    return timed(device, size, {"columns": (lambda: along(1, side), [], asked, 0),
                                "rows": (lambda: along(side, 1), [], 2 * x.nbytes, 0)})


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _sigmoids(x, s, t, y, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """s = sigmoid(x), t = sigmoid(s), y = sigmoid(t). With KEEP, which stores s and t, 1 read, 3 writes; else 1, 1."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    once = _sigmoid(tl.load(x + at))
    twice = _sigmoid(once)
    if KEEP:
        tl.store(s + at, once)
        tl.store(t + at, twice)
    tl.store(y + at, _sigmoid(twice))


@triton.jit
def _sigmoids_backward(x, s, t, dy, dx, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """dx from dy. With KEEP, which reads s and t, 3 reads, 1 write; else, computing them again, 2 and 1."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    once = tl.load(s + at) if KEEP else _sigmoid(tl.load(x + at))
    twice = tl.load(t + at) if KEEP else _sigmoid(once)
    y = _sigmoid(twice)
    tl.store(dx + at, tl.load(dy + at) * once * (1 - once) * twice * (1 - twice) * y * (1 - y))


def three_sigmoids(x, dy, keep):
    """dx, after forward and backward."""
    (s, t, y, dx), grid = torch.empty(4, len(x), device=x.device), (len(x) // 1024,)
    _sigmoids[grid](x, s, t, y, keep, 1024)
    _sigmoids_backward[grid](x, s, t, dy, dx, keep, 1024)
    return dx


def kept_and_recomputed(device, size):
    x, dy = torch.randn(2, size.n, device=device)
    return timed(device, size, {way: (functools.partial(three_sigmoids, keep=keep), [x, dy], passes * x.nbytes, 0)
                                for way, keep, passes in (("s and t kept", True, 8), ("computed again", False, 5))})


# Two loops of 2 and 3 FLOPs a turn. They differ, so that no compiler merges them.
BRANCHES = """template <typename T> T branches(T x) {
    if (x > T(0)) for (int i = 0; i < 200; i++) x = x * T(0.99) + T(0.01);
    else for (int i = 0; i < 200; i++) x = x * x * T(0.3) - T(0.2);
    return x;
}"""


def shuffled_and_sorted(device, size):
    """A branch on the sign of the same numbers, shuffled and sorted. When they are shuffled, a warp of 32 threads has
    both signs and runs both sides of the branch. PyTorch compiles the CUDA."""
    x, branches = torch.randn(size.n, device=device), torch.cuda.jiterator._create_jit_fn(BRANCHES)
    return timed(device, size, {way: (branches, [numbers], 2 * x.nbytes, 500 * size.n)
                                for way, numbers in (("shuffled", x), ("sorted", x.sort().values))})


def ungrouped_and_grouped(device, size):
    """A product of matrices that exceed L2. Bytes are counted as if programs that run at the same time read each row
    and column from memory once."""
    side, tile, at_once = 2 * size.side, 128, kernels.programs_at_once(device)
    a, b = torch.randn(2, side, side, device=device, dtype=torch.bfloat16)
    count = triton.cdiv(side, tile)

    def elements(group):  # read and written
        return triton.cdiv(count**2, at_once) * tile * side * kernels.tiles_read(count, count, group, at_once) + side**2
    return timed(device, size, {way: (functools.partial(kernels.matmul, tiles=(tile, tile, 64, group)), [a, b],
                                      2 * elements(group), 2 * side**3)
                                for way, group in (("row after row", 1), ("groups of 8 rows", 8))})


def float32_and_bf16(function, matrices):
    """A lesson in two dtypes: a product of two matrices, or an operation on one tensor, which memory bounds."""
    def measure(device, size):
        x = torch.randn(size.side, size.side, device=device) if matrices == 2 else torch.randn(size.n, device=device)
        return timed(device, size, {str(dtype)[6:]: (
            function, [x.to(dtype)] * matrices, (1 + matrices) * x.numel() * dtype.itemsize,
            2 * size.side**3 * (matrices == 2)) for dtype in (torch.float32, torch.bfloat16)})
    return measure


LESSONS = {
    "timing": Lesson("warm up, then wait for the GPU", "bench.py interleaved", three_stopwatches),
    "elu": Lesson("eager writes every step to memory", "kernels.py _elu",
                  one_by_one_and_fused(kernels.elu_reference, 8.5, kernels.elu)),
    "fusion": Lesson("GELU in one kernel: one read, one write", "kernels.py _map",
                     one_by_one_and_fused(kernels.gelu_reference, 14, kernels.gelu)),
    "coalescing": Lesson("a burst brings neighbours: use them all", "bench.py _copy_lines", columns_and_rows),
    "recompute": Lesson("three sigmoids: compute again, do not read", "bench.py _sigmoids_backward",
                        kept_and_recomputed, "triton"),
    "branches": Lesson("a warp runs both sides of a branch", "bench.py BRANCHES", shuffled_and_sorted, "cuda"),
    "order": Lesson("programs that run together share L2", "kernels.py tile_of", ungrouped_and_grouped, "triton"),
    "precision": Lesson("fewer bits, and tensor cores", "parallel.py make_shard", float32_and_bf16(torch.mm, 2)),
    "width": Lesson("bound by memory: half the bytes, half the time", "parallel.py make_shard",
                    float32_and_bf16(torch.neg, 1)),
}


# The claims of lectures 7 and 8 need many GPUs, so they are computed: by the formulas that `strategies` and the tests
# compare with counted bytes and measured memory, by simulated schedules, and by `predict`.

class Claim(NamedTuple):
    claim: str
    lecture: float  # the lecture's figure; None: it has none
    ours: float
    note: str
    command: str    # measures it


GPT3, STRATEGIES = GPTConfig(50257, 2048, 96, 96, 12288), "python bench.py strategies --gpus 4 --only"


def bytes_of(items, n):
    """Bytes that rank 0 of n sends."""
    return sum(item.times * sent(item.op, elements, item.width, n, 0) for item in items for elements in item.elements)


def claims_of_traffic():
    n, k, block, btc = 8, 1 << 20, [(1, range(1, 2))], GPT3.seq_len * GPT3.n_embd
    yield Claim("all-reduce of k: a rank sends, in k", 2 * (n - 1) / n, sent("all_reduce", k, 4, n, 0) / (4 * k),
                f"2 (N-1)/N, N = {n}", "python bench.py collectives --gpus 4 --comm ring --only all_reduce")
    for zero, (name, figure) in enumerate({"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3}.items()):
        s = train.Settings(dp=n, zero=zero, batch_size=n, dtype="fp32")
        buckets = messages_of_buckets(s, "dp", [(k, 2 if zero == 3 else 0)], n)
        yield Claim(f"{name}: a rank sends in a step, in K", figure, bytes_of(buckets, n) / (4 * k), f"(N-1)/N of it, "
                    f"N = {n}" + "; a stage's last unit is gathered once" * (zero == 3), f"{STRATEGIES} {name}")
    for name, sp in ("tp", False), ("tp+sp", True):
        s = train.Settings(dp=1, tp=n, sp=sp, dtype="bf16", batch_size=1)
        passed = [item for item in messages(GPT3, s, block, []) if item.what.startswith("activations")]
        yield Claim(f"{name}: a rank sends for a block, in BTC", 8 * (n - 1) / n, bytes_of(passed, n) / (2 * btc),
                    f"8 (N-1)/N, N = {n}" + "; backward gathers again what f gathered" * sp, f"{STRATEGIES} {name}")
    s = train.Settings(dp=1, pp=4, dtype="bf16", batch_size=1)
    passed = [item for item in messages(GPT3, s, block, []) if item.what == "activations"]
    yield Claim("pp: a rank sends for a micro-batch, in BTC", 2, bytes_of(passed, 2) / (2 * btc),
                "activations on, gradients back", f"{STRATEGIES} 1f1b")


def claims_of_memory():
    """A block of the lecture keeps 34 + 5 heads T/C bytes for each of BTC elements, ours 32: model.py has no dropout,
    whose masks take 2, and flash attention keeps statistics instead of the T x T scores."""
    large, n = GPTConfig(50257, 2048, 36, 32, 4096), 64
    for zero, figure in enumerate((120, 31.4, 16.6, 1.88)):
        kinds = parallel.memory_bytes(large, zero, n, dtype=torch.bfloat16)
        gradients, *others = (7.5 * kinds[kind] / large.parameters()
                              for kind in ("gradients", "parameters", "optimizer"))
        yield Claim(f"ZeRO-{zero}: 7.5 billion parameters, {n} GPUs: GB", figure, gradients + sum(others),
                    "gradients are float32; " + (f"16-bit ones: {gradients / 2 + sum(others):.4g}" if zero < 3 else
                                                 "no 16-bit shard besides masters"), "python parallel.py memory")
    scores, t = 5 * GPT3.n_head * GPT3.seq_len / GPT3.n_embd, 8
    for flags, figure, tp, sp, recompute, note in (
            ("", 34 + scores, 1, False, "none", "no dropout, no T x T scores"),
            ("--tp 8", 10 + (24 + scores) / t, t, False, "none", "no dropout, no T x T scores"),
            ("--tp 8 --sp", (34 + scores) / t, t, True, "none", "no dropout, no T x T scores"),
            ("--tp 8 --sp --recompute attention", 34 / t, t, True, "attention", "nor q, k, v, attention's output kept"),
            ("--recompute block", 2, 1, False, "block", "only the block's input")):
        kept = parallel.activation_bytes(GPT3, 1, tp, 2, recompute, [range(1, 2)], tokens_cut=tp if sp else 1)
        yield Claim(f"activations of a block, in BTC: {flags or 'one GPU'}", figure,
                    kept / (GPT3.seq_len * GPT3.n_embd), note,
                    " ".join(["python train.py", *flags.replace("8", "2").split(), "--steps 50"]))


def claims_of_pipelines():
    p, m = 4, 8
    for schedule, v, bubble, most in (("gpipe", 1, (p - 1) / m, m), ("1f1b", 1, (p - 1) / m, p),
                                      ("interleaved", 2, (p - 1) / m / 2, p + (p - 1) / 2),
                                      ("zb-h1", 1, (p - 1) / m / 3, p)):
        timeline = parallel.simulate(parallel.SCHEDULES[schedule](p, m, v))
        for what, figure, ours in (("bubble over work", bubble, max(timeline.idle) / (3 * m)),
                                   ("micro-batches that a rank holds", most, max(timeline.peak))):
            yield Claim(f"{schedule}: {what}", figure, ours, f"{p} ranks, {m} micro-batches, F = I = W"
                        + f", {v} stages a rank" * (v > 1), f"{STRATEGIES} {schedule}" + " --n-layer 6" * (v > 1))


def claims_of_time():
    """By `predict`, for H200s. F: FLOP/s of products; W: bytes/s to another GPU."""
    xl, large, h200 = PRESETS["gpt2-xl"], GPTConfig(50257, 2048, 32, 32, 4096), MACHINES["h200"]
    sizes = "python bench.py plan --n-layer 32 --n-head 32 --n-embd 4096 --seq-len 2048"

    def costs(config, machine=h200, **layout):
        return predict(config, train.Settings(dtype="bf16", **layout), machine)
    yield Claim("FLOPs to train on a token, in K", 6, xl.flops_per_token() / xl.parameters(), "GPT-2 XL; 12 L C T more",
                "python model.py")
    for n, link, note in ((8, h200.link, "gradients are float32; blocks do more than products"),
                          (64, h200.network, "two levels: each GPU's card carries an 8th")):
        z3 = costs(large, dp=n, zero=3, batch_size=8 * n)
        yield Claim(f"zero3, {n} GPUs: tokens a GPU that hide traffic", (n - 1) / n * h200.matmul / link,
                    8 * large.seq_len * z3.dp_all / z3.compute, f"F/W (N-1)/N; {note}", f"{sizes} --gpus {n}")
    for batch, note in (64, "too few tokens a GPU for dp alone"), (1024, "enough tokens a GPU for dp alone"):
        alone, mixed = (costs(large, dp=64 // tp, tp=tp, zero=3, batch_size=batch).step for tp in (1, 4))
        yield Claim(f"step of zero3 / of zero3+tp 4: 64 GPUs, {batch} sequences", None, alone / mixed, note,
                    f"{sizes} --gpus 64 --batch-size {batch}")
    for wire, rate in ("NVLink 4, 450", 450e9), ("PCIe 7, 121", 121e9), ("Ethernet, 0.2", 0.2e9):
        ddp = costs(xl, dataclasses.replace(h200, link=rate), dp=8, batch_size=64)
        yield Claim(f"gradients of GPT-2 XL, ms: {wire} GB/s each way", 2e3 * 7 / 8 * 4 * xl.parameters() / rate,
                    1e3 * ddp.dp_all, f"8 GPUs, float32; {100 * ddp.dp / ddp.step:.0f} % of a step after hiding",
                    "python bench.py collectives --only all_reduce")


CLAIMS = claims_of_traffic, claims_of_memory, claims_of_pipelines, claims_of_time


def lessons(a):
    device, on_triton = torch.device(a.device, *[0] * (a.device == "cuda")), a.device == "cuda" or kernels.INTERPRETED
    kernels.use("triton" if on_triton else "auto")
    n, side, repeats = (1 << 12, 64, 2) if a.quick else (1 << 28, 8192, 10) if a.device == "cuda" else (1 << 24, 512, 5)
    size = SimpleNamespace(n=n, side=side, repeats=repeats)
    pairs = Table("Lectures 5 and 6, measured: how many times faster than the lesson's first way, with how many times "
                  "fewer bytes", {
        "lesson": "lesson:<11", "says": "the lecture:<46", "way": "way:<17", "ms": "ms:>10.3f",
        "faster": "faster:>9.2f", "fewer": "fewer:>6.2f", "gb": "GB:>8.3f", "speed": "GB/s:>8,.1f",
        "tflops": "TFLOP/s:>9.2f", "read": "read:<29"})
    for name in filter(a.only.__contains__, LESSONS):
        lesson = LESSONS[name]
        try:
            rows = lesson.measure(device, size)
        except Exception as problem:  # a lesson that fails on this GPU does not stop the others
            if not on_triton:
                raise
            reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            pairs.row(lesson=name, says=lesson.says, way=f"failed: {reason}", read=lesson.read)
            continue
        for i, (way, seconds, moved, flops) in enumerate(rows):
            pairs.row(lesson=name, says="" if i else lesson.says, way=way, ms=1e3 * seconds, read=lesson.read,
                      faster=rows[0][1] / seconds, fewer=rows[0][2] / moved, gb=moved / 1e9,
                      speed=moved / seconds / 1e9, tflops=flops / seconds / 1e12 if flops else None)
    figures = Table("Lectures 7 and 8: the lecture's figure, ours as computed here, and what measures it", {
        "claim": "claim:<62", "lecture": "lecture:>9,.5g", "ours": "ours:>9,.5g", "note": "note:<68",
        "command": "command:<40"})
    for claim in itertools.chain(*(topic() for topic in CLAIMS)) if "claims" in a.only else ():
        figures.row(**claim._asdict())
    write_json(a.json, "lessons", device, [pairs, figures])


# ---------------------------------------------------------------------------------------------------------- collectives

# Bus bandwidth, as nccl-tests defines it: bytes of the whole tensor / seconds x this factor. It is what a link carries.
BUS = {"all_reduce": lambda n: 2 * (n - 1) / n, "reduce_scatter_tensor": lambda n: (n - 1) / n,
       "all_gather_into_tensor": lambda n: (n - 1) / n, "all_to_all_single": lambda n: (n - 1) / n,
       "broadcast": lambda n: 1, "reduce": lambda n: 1, "gather": lambda n: (n - 1) / n,
       "scatter": lambda n: (n - 1) / n, "send right": lambda n: 1}


def calls_of(op, size, device):
    """({"ours", "torch": function that runs one collective over a tensor of `size` bytes}, the tensor's elements)."""
    n, rank = dist.get_world_size(), dist.get_rank()
    count = max(1, size // 4 // n) * n if size else 0
    whole, other, part = (torch.zeros(k, device=device) for k in (count, count, count // n))
    parts = list(other.view(n, -1)) if rank == 0 else None
    arguments = {"all_reduce": (whole,), "reduce_scatter_tensor": (part, whole),
                 "all_gather_into_tensor": (whole, part), "all_to_all_single": (other, whole), "broadcast": (whole, 0),
                 "reduce": (whole, 0), "gather": (part, parts, 0), "scatter": (part, parts, 0), "barrier": ()}
    if op == "send right":  # one message, no collective: it shows the link's own speed
        dist.barrier()  # the group's first operation makes its mailboxes
        link = dist.link_of(None)
        return {"ours": lambda: link.exchange([(whole, (rank + 1) % n)], [(other, (rank - 1) % n)])}, count
    return {"ours": lambda: getattr(dist, op)(*arguments[op]),
            "torch": lambda: getattr(torch_dist, op)(*arguments[op])}, count


def fit(messages, sizes, seconds):
    """Fit seconds = a messages + bytes / b; returns (a, b), seconds a message and bytes a second. Errors are relative,
    so that short times count as much as long ones. a is 0, or b infinite, where the times do not show it."""
    m, k, t = (np.asarray(x, float) for x in (messages, sizes, seconds))
    a, per_byte = np.linalg.lstsq(np.stack([m / t, k / t], 1), np.ones(len(t)), rcond=None)[0]
    if a < 0 or per_byte <= 0:  # the times show no latency, or no bandwidth: fit the other alone
        a, per_byte = (0.0, np.mean(t / k)) if a < 0 else (np.mean(t / m), 0.0)
    return float(a), float(1 / per_byte) if per_byte else math.inf


GRAPHED = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"  # timed from a CUDA graph, too


def collectives(a):
    device, n = dist.initialize(a.device), a.gpus
    dist.use(None, a.comm)
    backend, law = torch_dist.get_backend(), law_of(None)
    dtype, name = (torch.bfloat16, "gpt2-xl") if device.type == "cuda" else (torch.float32, "tiny")
    machines = measure_machine(device, dtype, PRESETS[name], (a.comm, "torch"))
    say(f"{n} processes, {backend}\n{describe_machine(machines[a.comm])}")
    table = Table("float32; times are the slowest rank's; bytes sent by all ranks together", {
        "op": "collective:<22", "size": "KiB:>9,.0f", "us": "ours us:>10,.0f", "torch_us": "torch us:>10,.0f",
        "ours_graph_us": "ours graph:>10,.0f", "torch_graph_us": "torch graph:>11,.0f", "ratio": "torch / ours:>12.2f",
        "alg": "alg GB/s:>8.2f", "bus": "bus GB/s:>8.2f", "torch_bus": "torch bus:>9.2f",
        "counted": "bytes sent:>14,", "formula": "formula:>14,"})
    lines = Table("seconds = a x messages + bytes sent / b, fitted over the sizes", {
        "op": "collective:<22", "a": "ours a, us:>10.1f", "b": "ours b, GB/s:>12.2f", "torch_a": "torch a, us:>11.1f",
        "torch_b": "torch b, GB/s:>13.2f"})
    points, largest = defaultdict(list), 30 if device.type == "cuda" else 24
    sizes = [1 << i for i in (range(10, 21, 5) if a.quick else range(10, largest + 1, 2))]
    for op in a.only:
        for size in sizes if op != "barrier" else [0]:
            calls, count = calls_of(op, size, device)
            if device.type == "cuda" and a.comm == "ours" and op in GRAPHED:
                for who in ("ours", "torch"):
                    calls[who]()  # what a first call sets up cannot be recorded
                    calls[who + "_graph"] = dist.RecordedGraph(calls[who]).replay
            seconds = interleaved(calls, device, 3 if a.quick else 7, calls=max(1, min(20, (1 << 24) // max(size, 1))))
            dist.reset_traffic()
            calls["ours"]()
            logs = of_all_ranks(dist.traffic().get(op, dist.Traffic()))
            gb, row = 4e-9 * count, {"op": op, "n": n, "size": count / 256, "us": 1e6 * seconds["ours"]}
            if count:
                row |= {"alg": gb / seconds["ours"], "bus": gb / seconds["ours"] * BUS[op](n)}
            if "torch" in seconds:  # a collective
                row |= {"torch_us": 1e6 * seconds["torch"], "ratio": seconds["torch"] / seconds["ours"],
                        "torch_bus": gb / seconds["torch"] * BUS[op](n) if count else None,
                        "counted": sum(log.bytes for log in logs),
                        "formula": sum(sent(op, count, 4, n, r, *law) for r in range(n))}
                row |= {f"{who}_us": 1e6 * took for who, took in seconds.items() if who.endswith("graph")}
                points[op].append((max(log.messages for log in logs), max(log.bytes for log in logs),
                                   seconds["ours"], seconds["torch"]))
            table.row(**row)
            del calls
    for op, (m, k, *both) in ((op, zip(*some)) for op, some in points.items() if len(some) > 1):
        (ours_a, ours_b), (torch_a, torch_b) = (fit(m, k, seconds) for seconds in both)
        lines.row(op=op, a=1e6 * ours_a, b=ours_b / 1e9, torch_a=1e6 * torch_a, torch_b=torch_b / 1e9)
    write_json(a.json, "collectives", device, [table, lines], machine=dataclasses.asdict(machines[a.comm]),
               machine_torch=dataclasses.asdict(machines["torch"]))


# ----------------------------------------------------------------------------------------------------------- strategies

def layouts(n, m, virtual, experts=8):
    """{strategy: its fields of train.py's Settings} for n processes. experts: how many the strategy "experts" has."""
    every = {"one": {"dp": n}} if n == 1 else {}
    every |= {"ddp": {"dp": n}, **{f"zero{zero}": {"dp": n, "zero": zero} for zero in (1, 2, 3)}}
    if n > 1:
        every |= {"tp": {"tp": n}, "tp+sp": {"tp": n, "sp": True}, "cp": {"cp": n},
                  "cp ulysses": {"cp": n, "cp_kind": "ulysses"}}
    if n > 3 and n % 2 == 0:
        every |= {"hsdp": {"dp": n, "zero": 3, "zero_within": n // 2},
                  "dp+tp": {"dp": n // 2, "tp": 2}, "zero3+tp": {"dp": n // 2, "zero": 3, "tp": 2},
                  "zero1+pp": {"dp": n // 2, "zero": 1, "pp": 2, "micro_batches": m},
                  "tp+pp": {"tp": n // 2, "pp": 2, "micro_batches": m}}
    if n > 1:  # last, because after them ranks have made different numbers of windows, and `make_window` makes no more
        every |= {name: {"pp": n, "micro_batches": m, "schedule": name} for name in parallel.SCHEDULES}
        every["interleaved"]["virtual_stages"] = virtual
    # Random tokens teach a router nothing, and training on them would soon send all tokens to a few experts.
    still = {"lr": 0.0, "min_lr": 0.0}
    return every | {"experts": {"dp": n, "ep": math.gcd(n, experts), **still}, "dense twin": {"dp": n, **still}}


def configs_of(config):
    """(the dense model, the model with experts, its dense twin) of a config. If the config has no experts, every second
    block gets 8, of which a token uses 2. The twin has no experts, but MLPs so wide that a token uses as many
    parameters."""
    dense = dataclasses.replace(config, experts=0)
    few = {"experts": 8, "top_k": 2, "expert_every": min(2, config.n_layer)}
    routed = config if config.experts else dataclasses.replace(config, **few)
    mlps = config.n_layer + (routed.top_k - 1) * sum(map(routed.has_experts, range(config.n_layer)))  # of a token
    return dense, routed, dataclasses.replace(dense, inner=config.inner * mlps // config.n_layer)


def random_source(config, device):
    """A function from names to weights, drawn on the device: for GPT-2 XL a CPU needs longer than the benchmark."""
    sizes = {"lm_head.weight": shapes(config)["wte.weight"], **shapes(config)}
    return lambda name: (torch.zeros(config.experts, device=device) if name.endswith("router.bias") else
                         torch.ones(sizes[name], device=device) if len(sizes[name]) == 1 else
                         torch.randn(sizes[name], device=device).mul_(0.02))


def make_trainer(config, s, device):
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 64 * config.seq_len).astype(np.uint16)
    return train.WatchedTrainer(s, config, random_source(config, device), (tokens, tokens, False), device)


WAITED = "tp", "pp", "ends", "replicas", "world", "all"  # axes on which the caller waits for all-reduces


@contextlib.contextmanager
def routes_of(net):
    """Inside, record for each forward of a block with experts int64 (E): how many rows this rank's tokens send to each
    expert. Forwards that backward runs again are not recorded."""
    routes = []

    def kept(mlps, rows, counts):
        if torch._C._current_graph_task_id() == -1:  # no backward is running
            routes.append(counts)
        return mlps(rows, counts)

    with contextlib.ExitStack() as stack:
        for part in (part for stage in net.stages for part in net.module(stage).modules()):
            if isinstance(part, Experts):
                stack.enter_context(patch.object(part, "mlps", functools.partial(kept, part.mlps)))
        yield routes


def predicted_traffic(trainer, routes=()):
    """{collective: bytes} that this rank sends in a step, by the formulas. routes: the step's, by `routes_of`. Call on
    all ranks."""
    s, net, (pp_rank, _, _, tp_rank) = trainer.s, trainer.net, trainer.mesh.get_coordinate()
    stages = list(enumerate(parallel.split_pieces(trainer.config, net.count)))[pp_rank::s.pp]
    kept = [flat for model in net.stages.values() for flat in getattr(model, "last", ())]
    total, buckets, of_experts, rows = Counter(), [], [], None
    for bucket in (bucket for reducer in net.reducers for bucket in reducer.buckets):
        gathers = 0 if getattr(bucket, "stays_whole", True) else 1 if bucket in kept else 2
        (of_experts if net.ep and bucket.group == net.same_experts else buckets).append((bucket.numel, gathers))
    if net.ep:
        n, rank = dist.get_world_size(net.ep), dist.get_rank(net.ep)
        there = [tuple(counts.view(n, -1).sum(1).tolist()) for counts in routes]
        rows = there, list(zip(*([each[rank] for each in calls] for calls in of_all_ranks(there, net.ep))))
    partial = sum(p.numel() for p in net.params if net.tp in parallel.sums(p))
    where = {"dp": net.replicas, "world": None, "all": trainer.control}  # ParallelGPT has the others by name
    for item in messages(trainer.config, s, stages, buckets, tp_rank, partial, of_experts, rows):
        link = dist.link_of(where[item.axis] if item.axis in where else getattr(net, item.axis))
        total[item.op] += item.times * sum(sent_in(link, item.op, elements, item.width, item.axis in WAITED)
                                           for elements in item.elements)
    return {op: n for op, n in total.items() if n}


# The collectives of training. A pipeline's transfers are not among them, because its stages cannot run without them.
TRAINING = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single")


def replaced(make, names=TRAINING):
    """Inside, make(function) replaces every collective of training."""
    return patch.multiple(dist, **{name: make(getattr(dist, name)) for name in names})


def left_out(function):
    """A collective that sends nothing. An all-to-all gives a rank its own data back, so that counts of rows stay
    possible, and as many rows come as leave. An all-gather repeats the rank's own part, because products of unset
    memory, mostly zeros, draw less power and are faster: GPT-2 XL's step under ZeRO-3 took 139 ms in place of 168."""
    def call(*args, **kwargs):
        if function.__name__ == "all_to_all_single":
            args[0].copy_(args[1])
        elif function.__name__ == "all_gather_into_tensor":
            whole, own = args[:2]
            for part in whole.view(-1, *own.shape):
                if part.data_ptr() != own.data_ptr():
                    part.copy_(own)
        return dist.Handle()  # whoever waits finds it done
    return call


def communication_alone(trainer, device, repeats, calls=1):
    """(alone: seconds of a step's collectives, one after the other; without: seconds of the step without them). The
    hidden share is 1 - (whole step - without) / alone. Without collectives gradients are wrong, but the time is right.
    """
    log, scratch = [], {}

    def recorded(function):
        def call(*args, **kwargs):
            bound = inspect.signature(function).bind(*args, **kwargs).arguments
            log.append(functools.partial(function, **{
                key: scratch.setdefault((value.shape, value.dtype, key),
                                        torch.zeros_like(value, memory_format=torch.contiguous_format))
                if isinstance(value, torch.Tensor) else value for key, value in bound.items() if key != "async_op"}))
            return function(*args, **kwargs)
        return call

    trainer.net.pipeline.graphs = parallel.no_graphs()  # a recorded graph would call the real collectives
    with replaced(recorded):
        trainer.step(0)
    alone = interleaved({"": lambda: [call() for call in log]}, device, repeats)[""]
    log.clear(), scratch.clear()
    trainer.net.pipeline.graphs = parallel.no_graphs()
    with replaced(left_out):
        without = interleaved({"": lambda: trainer.step(0)}, device, repeats, calls)[""]
    trainer.net.pipeline.graphs = parallel.no_graphs()  # the graphs just recorded send nothing
    return alone, without


def stage_costs(gradients, trainer, repeats):
    """(F, I, W): seconds of one micro-batch through a rank's stages in the pipeline, without waiting, on the slowest
    rank. If the schedule does not split backward, I and W are half of it each. gradients(): runs a step's forward and
    backward."""
    pipe, samples = trainer.net.pipeline, []
    for _ in range(repeats):
        parallel.record_times(pipe)
        gradients()
        took = Counter()
        for action, start, end in parallel.recorded_times(pipe):
            took[action.kind] += (end - start) / trainer.s.micro_batches
        samples.append((took["F"], took["I"] + took["B"] / 2, took["W"] + took["B"] / 2))
    return max(of_all_ranks([statistics.median(column) for column in zip(*samples)]), key=sum)


# The peers: the same strategies of PyTorch's own parts, so that our times can be judged. Each is a builder(config, s,
# device, x, y) -> (step, its name). x, y: the micro-batches that ours trains on.

def plain_model(config, device, dtype=torch.float32, pieces=None):
    """A GPT of the classes above the bar, each block compiled where there is a GPU: a CPU wants a C++ compiler for it.
    """
    with patch.object(model, "FASTER", {}):
        net = GPT(config, seed=None, pieces=pieces)
    materialize(net, random_source(config, device), device, dtype)
    # All blocks share compiled code, and each kind of input needs its own. An error, should there be too many: PyTorch
    # would go on without compiling.
    torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = 64, True
    for block in net.h.values() if device.type == "cuda" else ():
        block.forward = torch.compile(block.forward)
    return net


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(kinds, device, lr=1e-4):
    return torch.optim.AdamW([{"params": kind} for kind in kinds], lr=lr, fused=True)


def torch_step(model, s, device, x, y, loss=None, optimizer=None, kinds=None, clip=None, precision=None):
    """A function that runs one training step. kinds: lists of parameters, each clipped by its own norm; left out, one
    list of all. precision: the context of forward and backward; left out, autocast."""
    kinds = kinds or [list(model.parameters())]
    clip = clip or (lambda: [torch.nn.utils.clip_grad_norm_(kind, 1.0) for kind in kinds])
    optimizer = optimizer or adamw(kinds, device)
    loss = loss or (lambda tokens, targets: token_loss(model(tokens).float(), targets))
    precision = precision or (lambda: torch.autocast(device.type, train.DTYPES[s.dtype], enabled=s.dtype == "bf16"))

    def step():
        total = 0.0
        optimizer.zero_grad()
        for i, (tokens, targets) in enumerate(zip(x, y)):
            last = i == len(x) - 1 or not hasattr(model, "no_sync")
            with contextlib.nullcontext() if last else model.no_sync(), precision():
                part = loss(tokens, targets) / len(x)
                part.backward()
            total += part.detach()
        clip()
        optimizer.step()
        return total
    return step


def torch_compiled(config, s, device, x, y):
    """torch.compile of model and loss, on one GPU. Weights and loss in float32, layers under autocast."""
    model = plain_model(config, device)
    loss = torch.compile(lambda tokens, targets: token_loss(model(tokens), targets))
    return torch_step(model, s, device, x, y, loss), "model"


def world_mesh(device):
    """PyTorch's mesh of all ranks. It has the world's group, which stays, because DTensor's caches (of torch 2.11 at
    least) take equal meshes for the same, and would use the group of an earlier one that `forget` has destroyed."""
    return DeviceMesh.from_group(torch_dist.group.WORLD, device.type)


def torch_ddp(config, s, device, x, y):
    """DistributedDataParallel, with ZeroRedundancyOptimizer for ZeRO-1. Weights in float32, layers under autocast."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = torch.nn.parallel.DistributedDataParallel(plain_model(config, device), gradient_as_bucket_view=True)
    if not s.zero:
        return torch_step(model, s, device, x, y), "DDP"
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return torch_step(model, s, device, x, y, optimizer=optimizer), "ZeroRedundancyOptimizer"


def torch_fsdp(config, s, device, x, y):
    """fully_shard. For ZeRO-2 weights stay whole after forward (no second all-gather), which comes nearest to it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    model, kept = plain_model(config, device), s.zero == 2
    within = s.zero_within
    mesh = init_device_mesh(device.type, (s.dp // within, within)) if within else world_mesh(device)
    options = {"mesh": mesh, "reshard_after_forward": not kept,
               "mp_policy": MixedPrecisionPolicy(train.DTYPES[s.dtype], torch.float32)}
    for block in model.h.values():
        fully_shard(block, **options)
    fully_shard(model, **options)
    title = "fully_shard" + ", kept" * kept + f", within {s.zero_within}" * bool(s.zero_within)
    return torch_step(model, s, device, x, y, precision=contextlib.nullcontext), title


def torch_tp(config, s, device, x, y):
    """DTensor, with --sp sequence parallel. Weights are in the compute dtype without float32 masters, so it does less
    work than ours. It cuts c_attn into N contiguous parts, not by heads, so its results differ, but not its work."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module)
    net, tokens = plain_model(config, device, train.DTYPES[s.dtype]), Shard(1) if s.sp else Replicate()
    plan = {"wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
            "h.*.attn.c_attn": ColwiseParallel(), "h.*.attn.c_proj": RowwiseParallel(output_layouts=tokens),
            "h.*.mlp.c_fc": ColwiseParallel(), "h.*.mlp.c_proj": RowwiseParallel(output_layouts=tokens),
            "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False)}
    if s.sp:
        plan |= dict.fromkeys(("h.*.ln_1", "h.*.ln_2", "ln_f"), SequenceParallel(use_local_output=True))
        whole = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate())
        plan |= dict.fromkeys(("h.*.attn", "h.*.mlp"), whole)
        positions = net.positions
        net.positions = lambda every: positions(every).chunk(s.tp)[dist.get_rank()]
    parallelize_module(net, world_mesh(device), plan)
    if config.tied:
        net.lm_head.weight = net.wte.weight
    kinds = [[p for p in net.parameters() if isinstance(p, DTensor) == cut] for cut in (True, False)]
    return torch_step(net, s, device, x, y, lambda tokens, targets: token_loss(net(tokens), targets), kinds=kinds,
                      precision=loss_parallel), "DTensor" + ", sp" * s.sp


def torch_pipeline(config, s, device, x, y):
    """torch.distributed.pipelining. It does less work than ours: 16-bit weights have no masters, tied weights are not
    kept equal, and each rank clips by its own norm."""
    from torch.distributed.pipelining import PipelineStage, schedules
    name = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-h1": "InterleavedZeroBubble"}[
        s.schedule]
    rank, cuts = dist.get_rank(), parallel.split_pieces(config, s.pp * s.virtual_stages)
    modules = {i: plain_model(config, device, train.DTYPES[s.dtype], cuts[i]) for i in range(rank, len(cuts), s.pp)}
    stages = [PipelineStage(module, i, len(cuts), device) for i, module in modules.items()]
    runner = getattr(schedules, "Schedule" + name)(
        stages if "Interleaved" in name else stages[0], len(x),
        loss_fn=lambda logits, targets: token_loss(logits.float(), targets))
    params = [p for module in modules.values() for p in module.parameters()]
    optimizer, given = adamw([params], device), [torch.cat(x)] if rank == 0 else []
    wanted = {"target": torch.cat(y), "losses": []} if rank == s.pp - 1 else {}

    def step():
        optimizer.zero_grad()
        runner.step(*given, **wanted)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
    return step, name


class TorchExperts(torch.nn.Module):
    """model.Experts in PyTorch's operations, with all of its parameters or, in a group, this rank's."""

    def __init__(self, experts, group):
        super().__init__()
        self.experts, self.group, self.ranks = experts.count, group, dist.get_world_size(group) if group else 1
        for name, param in experts.named_parameters():
            mine = param.detach().chunk(self.ranks)[dist.get_rank(group) if group else 0].clone()
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(mine))

    def forward(self, x, chosen, gates):                                                  # (B, T, C), 2 x (B, T, k)
        device, k, slots = x.device.type, chosen.shape[-1], chosen.flatten()
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        order = slots.argsort(stable=True)
        rows, counts = x.flatten(0, 1).to(dtype)[order // k], count_of_each(chosen, self.experts)
        y = self.travel(rows, counts) if self.group else self.mlps(rows, counts)
        y = torch.empty_like(y).index_copy(0, order, y).view(*chosen.shape, -1)           # (B, T, k, C)
        return (y * gates.unsqueeze(-1).to(dtype)).sum(-2)

    def exchange(self, rows, sends, receives):
        arrived = rows.new_empty(sum(receives), rows.shape[1])
        return all_to_all_single(arrived, rows.contiguous(), receives, sends, self.group)

    def travel(self, rows, counts):
        torch_dist.all_to_all_single(coming := torch.empty_like(counts), counts, group=self.group)
        sends, receives = torch.stack([counts, coming]).view(2, self.ranks, -1).sum(2).tolist()
        rows = self.exchange(rows, sends, receives)
        here = torch.arange(self.experts // self.ranks, device=rows.device).repeat(self.ranks)
        order = here.repeat_interleave(coming, output_size=len(rows)).argsort(stable=True)
        y = self.mlps(rows[order], coming.view(self.ranks, -1).sum(0))
        return self.exchange(torch.empty_like(y).index_copy(0, order, y), receives, sends)

    def mlps(self, rows, counts):
        group = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))
        hot = F.one_hot(group, len(counts)).to(rows.dtype)  # a product with it adds biases, and sums their gradients
        inner = torch_grouped(rows, self.c_fc_weight.to(rows.dtype), counts)
        inner = self.activate(inner, hot, self.c_fc_bias.to(rows.dtype))
        return torch_grouped(inner, self.c_proj_weight.to(rows.dtype), counts) + hot @ self.c_proj_bias.to(rows.dtype)

    @staticmethod
    def activate(inner, hot, bias):
        return F.gelu(inner + hot @ bias, approximate="tanh")


def has_grouped(device, dtype):
    """Whether PyTorch has a grouped product for this device and dtype."""
    return device.type == "cuda" and dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm")


def torch_grouped(rows, weight, counts):
    """x W_e^T of rows (n, in) that are sorted by expert e, weight (E, out, in): PyTorch's grouped product where it has
    one, else a loop that waits for the counts."""
    if has_grouped(rows.device, rows.dtype):
        return torch._grouped_mm(rows, weight.transpose(1, 2), counts.cumsum(0).int())
    return torch.cat([F.linear(some, weight[e]) for e, some in enumerate(rows.split(counts.tolist()))])


def torch_experts(config, s, device, x, y):
    """The same model and router of PyTorch's parts: torch._grouped_mm, all_to_all_single, and DDP for all parameters
    but the experts that ranks share out. All but the experts is compiled. The dense twin is DDP of compiled blocks.
    Weights, router and loss are in float32, other layers under autocast. Rows travel in 16 bits under autocast."""
    ep, copies = parallel.split_experts(parallel.make_mesh(device.type, dp=s.dp), s.ep)
    compiled = torch.compile if device.type == "cuda" else lambda function: function  # needs C++ on a CPU
    model, whole = plain_model(config, device), torch.autocast(device.type, enabled=False)
    router_of = routers(model)
    for i, block in model.h.items():
        if int(i) in router_of:  # compiled apart from the block, which calls them
            experts, router = TorchExperts(block.mlp.experts, ep), block.mlp.router
            block.mlp.experts, experts.activate = experts, compiled(experts.activate)
            router.choose = whole(compiled(router.choose))
            block.mlp.forward = torch.compiler.disable(block.mlp.forward)  # its sizes depend on the router
    named = dict(model.named_parameters())
    apart = [name for name in named if ".experts." in name] if s.ep > 1 else []
    kinds = [[p for name, p in named.items() if (name in apart) == kind] for kind in (False, True)]
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [*apart, *dict(model.named_buffers())])
    ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def clip():
        for param in kinds[1]:  # its gradient is a sum over the ranks of ep, each with a mean loss of its own
            torch_dist.all_reduce(param.grad, group=copies)
            param.grad /= s.dp
        norms = [torch.nn.utils.get_total_norm([p.grad for p in some]) for some in kinds if some]
        squares = torch.stack(norms).square()
        if apart:
            torch_dist.all_reduce(squares[1:], group=ep)
        torch.nn.utils.clip_grads_with_norm_(named.values(), 1.0, squares.sum().sqrt())
        if router_of:  # their biases are no parameters, so they may move before the optimizer does
            torch_dist.all_reduce(loads := torch.stack([router.load for router in router_of.values()]))
            for router, load in zip(router_of.values(), loads):
                router.balance(load, s.balance_rate)
                router.load = 0

    product = "grouped_mm, " if has_grouped(device, train.DTYPES[s.dtype]) else "a loop of products, "
    title = product * bool(router_of) + "DDP"
    optimizer = adamw([named.values()], device, train.learning_rate(s, 0))
    return torch_step(ddp, s, device, x, y, optimizer=optimizer, clip=clip), title


PEERS = {"one": torch_compiled, "ddp": torch_ddp, "zero1": torch_ddp, "zero2": torch_fsdp, "zero3": torch_fsdp,
         "hsdp": torch_fsdp, "tp": torch_tp, "tp+sp": torch_tp, **dict.fromkeys(parallel.SCHEDULES, torch_pipeline),
         "experts": torch_experts, "dense twin": torch_experts}


def forget():
    """Free what the last strategy left: cycles, cached blocks, every group but the world's (sockets, buffers)."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for group in [*torch_dist.distributed_c10d._world.pg_map]:
        if group is not torch_dist.group.WORLD:
            dist.destroy_process_group(group)
    torch.cuda.empty_cache()  # does nothing without CUDA


def peak_gib(device, build):
    """(what build() returns, GiB that it took at its peak on this rank, by the allocator; None on the CPU)."""
    if device.type != "cuda":
        return build(), None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = build()
    torch.cuda.synchronize()
    return made, (torch.cuda.max_memory_allocated() - before) / 2**30


def strategies(a):
    device = dist.initialize(a.device)
    if a.without:
        without(a, device)
        return
    comms = ("ours", "torch") if a.comm == "both" else (a.comm,)
    machines = measure_machine(device, train.DTYPES[a.dtype], a.config, comms)
    machine = machines[comms[0]]
    say(f"{a.gpus} processes, {torch_dist.get_backend()}; {a.model}, {describe_parameters(a.config)}, {a.dtype}; "
        f"{a.batch_size} sequences of {a.config.seq_len} a step\n{describe_machine(machine)}{mfu_note(a.config)}")
    for reason in a.reasons:
        say(f"left out: {reason}")
    table = Table("A step is forward, backward, clip, AdamW; (plan) is its predicted time. Predicted | measured: "
                  "GiB of tensors on rank 0\n"
                  "(peak: the allocator's), MiB that rank 0 sends, bubble. hidden: communication under computation.", {
        "strategy": "strategy:<11", "who": "who:<31", "ms": "ms:>8.1f", "plan": "(plan):>8.1f",
        "ratio": "torch / ours:>12.2f", "tokens": "tokens/s GPU:>12,.0f", "mfu": "MFU %:>5.1f", "memory": "GiB:>6.2f",
        "memory_measured": "measured:>8.2f", "peak": "peak:>6.2f", "traffic": "MiB sent:>9,.1f",
        "traffic_counted": "counted:>9,.1f", "hidden": "hidden %:>8.0f", "bubble": "bubble %:>8.1f",
        "bubble_measured": "measured:>8.1f"})
    for name, s in a.layouts.items():
        for row in measure_strategy(name, s, a, device, machines):
            table.row(**row)
        forget()
    say("\nGiB of tensors by rank, predicted | measured" + (" (allocator's peak)" if device.type == "cuda" else ""))
    for row in (row for row in table.rows if "memory_by_rank" in row):
        predicted, measured = ("  ".join(f"{sum(kinds.values()) / 2**30:.2f}" for kinds in column)
                               for column in zip(*row["memory_by_rank"]))
        peaks = "" if device.type == "cpu" else f"  ({'  '.join(f'{peak:.2f}' for peak in row['peak_by_rank'])})"
        say(f"  {row['strategy']:<11}  {predicted}  |  {measured}{peaks}")
    for name, s in a.layouts.items():
        if s.cp > 1 and s.cp_kind == "ring":
            say(describe_ring(name, s, a.configs[name], machine))
    if "one" in a.layouts:
        say(describe_one(next(row for row in table.rows if row["strategy"] == "one"), a.configs["one"],
                         a.layouts["one"], machine))
    if "experts" in a.layouts:
        say(describe_experts(table.rows, a.configs["experts"]))
    write_json(a.json, "strategies", device, [table], model=a.model, machine=dataclasses.asdict(machine))


def sends_late(computed):
    """`Early.computed`, but buckets wait for the end of backward."""
    def call(self, param):
        syncing, self.syncing = self.syncing, False
        computed(self, param)
        self.syncing = syncing
    return call


def always(s):
    return True


WITHOUT = {  # a piece of machinery: (object, attribute, what stands in its place, which layouts use it)
    "graphs": (parallel, "replay_micro_batches", lambda net: None, always),        # kernels launched one by one
    "kernels": (kernels, "on_triton", lambda x: False, always),                    # PyTorch's operations
    "tuning": (kernels, "FASTER", {}, always),                                     # the kernels above the bar
    "fusion": (model, "FASTER", {}, always),                                       # the blocks above the bar
    "links": (dist, "LINKS", {**dist.LINKS, **dict.fromkeys(("nccl", "gloo"), dist.LINKS["ring"])}, always),  # rings
    "windows": (dist.NodeLink, "window", dist.Direct.window, always),              # NCCL's messages
    "sums": (dist.NodeLink, "kernel_for", lambda *args: None, always),             # all-reduces by copies, messages
    "replay": (dist, "REPLAY_BYTES", 0, always),                                   # collectives launched one by one
    "early": (parallel.Early, "computed", sends_late(parallel.Early.computed), lambda s: s.dp > 1 and s.zero < 2),
    "fetching": (parallel.FetchingFSDP, "fetch", lambda self, unit: None, lambda s: s.zero == 3),  # no unit ahead
    "rows": (dist, "takes_rows", lambda *args: False, lambda s: s.sp),             # tokens are copied into one message
    "patience": (parallel.PatientPipeline, "expect", parallel.PatientPipeline.post, lambda s: s.pp > 1)}


def without(a, device):
    """Time each strategy's step with all machinery, then without one piece after the other, and with all again."""
    table = Table("A step without a piece of machinery, over a step with all (again: with all, for the noise)", {
        "strategy": "strategy:<11", "ms": "all, ms:>8.1f", **{name: f"{name}:>8.3f" for name in (*a.without, "again")}})

    def seconds(name, piece=None):
        *replacement, used = WITHOUT.get(piece, (always,))
        if not used(a.layouts[name]):
            return None
        with (patch.object(*replacement) if replacement else contextlib.nullcontext(),
              patch.object(dist, "_links", defaultdict(dict))):
            trainer = make_trainer(a.configs[name], a.layouts[name], device)
            trainer.step(0, train.BirthLog())
            found = interleaved({name: lambda: trainer.step(1)}, device, a.repeats, in_a_row(a, device))[name]
            trainer = None
            forget()
            for link in {link for links in dist._links.values() for link in links.values()}:  # the world's
                link.close()
        return found

    for name in a.layouts:
        first = seconds(name)
        row = {piece: seconds(name, piece) for piece in (*a.without, "again")}
        table.row(strategy=name, ms=1e3 * first, **{piece: took and took / first for piece, took in row.items()})
    write_json(a.json, "without", device, [table], model=a.model)
    return table


def describe_ring(name, s, config, machine):
    """A text: from which T/N on attention hides a ring's traffic, by the measured speeds."""
    ways = [f"{factor:g} F/W = {factor * machine.attention / machine.link:,.0f} tokens {way}"
            for factor, way in zip(ring_hides(1, 1, train.DTYPES[s.dtype]), ("forward", "backward"))]
    return (f"\n{name}: T/N is {config.seq_len // s.cp:,}. Attention hides the ring's traffic from {', '.join(ways)},\n"
            f"by the measured F = {machine.attention / 1e9:,.1f} GFLOP/s of causal attention and W = "
            f"{machine.link / 1e9:.1f} GB/s between ranks")


def parts_of_a_step(config, s, machine):
    """{kind of work: its seconds in a step on one GPU}, each at its own best rate: products and attention as measured
    alone, all that is bound by memory at the speed of a copy, and no kernel waits for the CPU."""
    tokens, c, blocks = s.micro_batches * tokens_of(config, s), config.n_embd, config.n_layer
    matrices = blocks * (4 * c * c + 2 * c * config.inner) + c * config.vocab_size
    logit = 3 * widths(s)[0]  # bytes: cross-entropy reads a logit twice, and writes its gradient
    costs = predict(config, dataclasses.replace(s, cuda_graphs="on"), dataclasses.replace(
        machine, elementwise=machine.hbm, loss=machine.hbm / logit, launch=0.0))
    products = 6 * matrices * tokens / machine.matmul
    attention = 3.5 * blocks * s.micro_batches * attention_seconds(config, s, machine)
    return {"products": products, "attention": attention, "clipping and AdamW": costs.optimizer,
            "all other kernels": costs.compute - products - attention}


def describe_one(row, config, s, machine):
    parts = parts_of_a_step(config, s, machine)
    alone = 1e3 * sum(parts.values())
    each = ", ".join(f"{kind} {1e3 * seconds:.1f}" for kind, seconds in parts.items())
    return (f"\none: the parts of a step, each at its best rate, in ms: {each}; together {alone:.1f}. The step takes "
            f"{row['ms']:.1f}, {row['ms'] / alone:.2f} times as long")


def describe_experts(rows, config):
    """A text: tokens/s with experts over those of the dense twin, and the share of a step that all-to-alls take."""
    ours, twins = ([row for row in rows if row["strategy"] == name] for name in ("experts", "dense twin"))
    count = sum(map(config.has_experts, range(config.n_layer)))
    lines = [f"experts: {describe_parameters(config)}, in {count} of {config.n_layer} blocks"]
    lines += [f"tokens/s with experts : of the dense twin   {row['who']} {row['tokens'] / twin['tokens']:.2f}"
              for row, twin in zip(ours, twins)]
    if took := ours[0].get("all_to_all_ms"):
        lines.append(f"all-to-alls take {took:.1f} ms of the step, {100 * took / ours[0]['ms']:.0f} %, measured beside "
                     f"a step without them; the largest load of an expert is {ours[0]['load_max']:.2f} x the mean")
    return "\n" + "\n".join(lines)


def in_a_row(a, device):
    """How many steps are timed at a time. On GPUs several, because a step may leave traffic to the next one's forward,
    and the CPU runs ahead, as both do in training."""
    return 3 if device.type == "cuda" and not a.quick else 1


def warm_up(step, s, config):
    """Run one untimed step, because the first one takes longer. A model with experts takes 64, in which the routers'
    biases move less and less and even out the loads, as training soon would. Then the biases stay, so that all steps
    take equally long."""
    for i in range(64 if config.experts else 1):
        s.balance_rate = 0.1 * 0.88**i  # 0.83 in all, more than scores of 0 to 1 differ; the last 3e-5
        step()
    s.balance_rate = 0.0


def measure_strategy(name, s, a, device, machines):
    """Rows of one strategy: ours with each kind of collectives, and PyTorch's own."""
    comms, config, tokens = list(machines), a.configs[name], a.batch_size * a.config.seq_len / a.gpus
    peer = None if name == "one" and device.type == "cpu" else PEERS.get(name)  # torch.compile needs C++ there

    def build():
        trainer = make_trainer(config, s, device)
        trainer.step(0, train.BirthLog())
        warm_up(lambda: trainer.step(1), s, config)
        return trainer

    def build_peer():
        step, title = peer(config, s, device, *batches)

        def in_pytorch():  # with PyTorch's kernels, because ours know neither autocast nor DTensor
            kernels.use("torch")
            step()
            kernels.use("auto")
        in_pytorch()
        warm_up(in_pytorch, s, config)
        return in_pytorch, f"torch {title}" + ", compiled" * (device.type == "cuda")

    def ours(comm):
        for group in trainer.net.groups:
            dist.use(group, comm)
        trainer.net.pipeline.graphs = graphs[comm]  # a graph sends as it was recorded
        trainer.step(2)

    (trainer, peak), graphs = peak_gib(device, build), {comm: parallel.no_graphs() for comm in (*comms, "ours")}
    batches = trainer.micro_batches(trainer.train_data, 0, 0)
    memory = of_all_ranks((train.predicted_bytes(trainer, trainer.share), trainer.measured_bytes()))
    peaks = of_all_ranks(peak)
    ours("ours")
    with routes_of(trainer.net) as routes:
        dist.reset_traffic()
        ours("ours")
    counted = {op: t.bytes for op, t in dist.traffic().items() if t.bytes}
    formula = predicted_traffic(trainer, routes)

    steps = {comm: functools.partial(ours, comm) for comm in comms}
    if s.pp > 1:
        steps["gradients"] = lambda: (trainer.optimizer.zero_grad(), trainer.net.forward_backward(*batches, s.schedule))
    if peer:
        (steps["peer"], title), peer_peak = peak_gib(device, build_peer)
    calls = 1 if s.pp > 1 else in_a_row(a, device)  # a pipeline's bubble is one step's
    seconds = interleaved(steps, device, a.repeats, calls)
    first = {"memory_by_rank": memory, "peak_by_rank": peaks, "traffic_by_collective": formula,
             "counted_by_collective": counted}
    first["memory"], first["memory_measured"] = (sum(kinds.values()) / 2**30 for kinds in memory[0])
    first["traffic"], first["traffic_counted"] = (sum(sent.values()) / 2**20 for sent in (formula, counted))
    ours(comms[0])
    if s.pp > 1:
        f, i, w = stage_costs(steps["gradients"], trainer, a.repeats)
        timeline = parallel.simulate(parallel.SCHEDULES[s.schedule](s.pp, s.micro_batches, s.virtual_stages), f, i, w)
        first |= {"bubble": 100 * max(timeline.idle) / timeline.length, "f_i_w_ms": [1e3 * x for x in (f, i, w)],
                      "bubble_measured": 100 - 100 * s.micro_batches * (f + i + w) / seconds["gradients"],
                      "gradients_ms": 1e3 * seconds["gradients"]}
    elif a.gpus > 1:
        if s.ep > 1:
            loads = torch.tensor(of_all_ranks([counts.tolist() for counts in routes])).sum(0)  # (blocks, E)
            both = {"with": lambda: trainer.step(0),
                    "without": replaced(left_out, ["all_to_all_single"])(lambda: trainer.step(0))}
            whole, rest = interleaved(both, device, a.repeats).values()
            first |= {"all_to_all_ms": 1e3 * (whole - rest), **train.how_even(loads)}
        alone, without = communication_alone(trainer, device, a.repeats, calls)
        first |= {"communication_ms": 1e3 * alone, "without_communication_ms": 1e3 * without}
        if alone > 0.05 * seconds[comms[0]]:  # less would drown in the step's noise
            first |= {"hidden": 100 * (1 - (seconds[comms[0]] - without) / alone)}

    def row(who, label, peak, **more):
        speed = tokens / seconds[who]
        return dict(strategy=name, who=label, ms=1e3 * seconds[who], tokens=speed, peak=peak,
                    mfu=mfu(config, speed, machines[comms[0]]), settings=dataclasses.asdict(s), **more)

    labels = {"ours": "ours", "ring": "ours, textbook ring", "torch": f"ours, {torch_dist.get_backend()}"}
    for comm in comms:
        yield row(comm, labels[comm], peak, plan=1e3 * predict(config, s, machines[comm]).step,
                  ratio=seconds["peer"] / seconds[comm] if peer else None, **(first if comm == comms[0] else {}))
    if peer:
        yield row("peer", title, peer_peak)


# ----------------------------------------------------------------------------------------------------------------- plan

ROOM = 0.9  # share of a GPU's memory that predicted bytes may fill; temporaries, gaps and NCCL's buffers take the rest


@functools.cache
def held(schedule, p, m, v):
    """Micro-batches whose activations each pipeline rank holds at once."""
    return [parallel.most_held(actions) / v for actions in parallel.SCHEDULES[schedule](p, m, v)]


def needed_bytes(config, s, fused):
    """Bytes that the fullest pipeline rank needs, with what a block recomputes. fused: as in parallel.memory_bytes."""
    cuts, dtype = parallel.split_pieces(config, s.pp * s.virtual_stages), train.DTYPES[s.dtype]
    each, i = s.batch_size // s.dp // s.micro_batches, min(config.expert_every, config.n_layer)  # a block with experts
    again, kept = (parallel.activation_bytes(config, each, s.tp, dtype.itemsize, recompute, [range(i, i + 1)],
                                             tokens_cut=s.tp if s.sp else 1, ep=s.ep) // s.cp
                   for recompute in ("none", s.recompute))
    peak = held(s.schedule, s.pp, min(s.micro_batches, 3 * s.pp), s.virtual_stages)  # more change no peak
    return again - kept + max(
        sum(parallel.memory_bytes(config, s.zero, s.zero_within or s.dp * s.cp, s.tp, dtype, s.recompute, each,
                                  cuts[rank::s.pp], math.ceil(peak[rank]), fused, s.sp, s.cp, s.cp_kind, s.ep,
                                  s.dp * s.cp // s.ep).values())
        for rank in range(s.pp))


def divisors(n):
    return [i for i in range(1, n + 1) if n % i == 0]


PUBLISHED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "assets", "published.csv")
WORTH = ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 4)  # (schedule, stages a rank); GPipe keeps more


def ways_to_cut_sequences(config, tp, ranks, dtype, machine):
    """Every (cp, kind) of train.py that leaves a rank so many tokens that attention hides a ring inside a node."""
    yield 1, "ring"
    for cp in divisors(ranks)[1:]:
        own = config.seq_len // cp
        if own < max(ring_hides(machine.attention_with(own), machine.link, train.DTYPES[dtype])):
            return
        if config.seq_len % (2 * cp) == 0:
            yield cp, "ring"
        if config.seq_len % cp == 0 and config.n_head // tp % cp == 0:
            yield cp, "ulysses"


def all_layouts(config, gpus, batch_size, dtype, machine):
    """Every layout that train.py takes and that may be fast: tp inside a node, 2^n sequences a micro-batch, or one if
    sequences are cut."""
    for tp in divisors(math.gcd(config.n_head, gpus)):
        for (cp, kind), pp in itertools.product(ways_to_cut_sequences(config, tp, gpus // tp, dtype, machine),
                                                divisors(gpus // tp)):
            dp, rest = divmod(gpus // tp // pp, cp)
            if rest or gpus > machine.node and machine.node % tp or pp > config.n_layer + 2 or batch_size % dp:
                continue
            each, local, replicas = batch_size // dp, machine.node // tp, dp * cp  # local: on a node, if pp = 1
            shards = [(zero, None) for zero in range(4 if replicas > 1 else 1)]
            if 1 < local < replicas and replicas % local == 0:
                shards += [(zero, local) for zero in (1, 2, 3)]
            ways = [(recompute, False) for recompute in ("none", "attention", "block")]
            if tp > 1 and config.seq_len % (cp * tp) == 0:  # sp saves about what "attention" does
                ways += [("none", True), ("block", True)]
            shared = divisors(math.gcd(dp, config.experts)) if config.experts else [1]
            sizes = [1 << log for log in range(each.bit_length() if cp == 1 else 1) if each % (1 << log) == 0]
            for size, (schedule, v) in itertools.product(sizes, WORTH if pp > 1 else WORTH[:1]):
                m, splits = each // size, splits_backward(schedule, pp, each // size, v)
                if splits is None or v * pp > config.n_layer + 2 or splits and m < pp:
                    continue
                for (zero, within), (recompute, sp), ep in itertools.product(shards, ways, shared):
                    if not splits or recompute == "none":
                        yield train.Settings(dp=dp, tp=tp, pp=pp, zero=zero, zero_within=within, schedule=schedule,
                                             virtual_stages=v, dtype=dtype, batch_size=batch_size, micro_batches=m,
                                             recompute=recompute, sp=sp, cp=cp, cp_kind=kind, ep=ep)


def describe_layout(s):
    shards = f" ZeRO-{s.zero}" * (s.zero > 0) + f" within {s.zero_within}" * bool(s.zero_within)
    axes = [(s.dp > 1 or s.zero > 0, f"dp {s.dp}" + f" (ep {s.ep})" * (s.ep > 1) + shards),
            (s.tp > 1, f"tp {s.tp}" + " sp" * s.sp), (s.cp > 1, f"cp {s.cp} {s.cp_kind}"),
            (s.pp > 1, f"pp {s.pp} {s.schedule}" + f" x{s.virtual_stages}" * (s.virtual_stages > 1)),
            (s.recompute != "none", f"recompute {s.recompute}")]
    return "  ".join(text for there, text in axes if there) or "one GPU"


def describe_parameters(config):
    active = f" ({config.active_parameters():,} a token: {config.top_k} of {config.experts} experts)"
    return f"{config.parameters():,} parameters" + active * (config.experts > 0)


def limit(costs):
    """What takes most of the step besides computation, in words."""
    name, seconds = max(list(costs._asdict().items())[1:-2], key=lambda item: item[1])
    name = {"tp": "tensor-parallel traffic", "cp": "context-parallel traffic", "ep": "expert-parallel traffic",
            "dp": "data-parallel traffic"}.get(name, name)
    return f"{name} {100 * seconds / costs.step:.0f} %" if seconds > 0.01 * costs.step else "computation"


def run_of(row):
    """A published run, of a row {column: text}, where a text is empty if the source does not print it. Returns config,
    machine, layouts (all Settings that the row can mean), overlap (as for `predict`) and mfu. ValueError, LookupError,
    ArithmeticError: no run can have these numbers.

    Our GPT has neither gated MLPs nor grouped queries, so its MLP gets the width that makes as many weights, and so as
    many FLOPs: a gated MLP has three matrices, not two; K and V lack 2 C^2 (1 - kv_heads / heads). Selective
    recomputing is taken for none, because FlashAttention's backward computes scores again anyway.
    """
    layers, c, heads, few, inner, vocab, seq, gpus, batch, dp, tp, pp, cp, each, v = sizes = [
        int(row[name] or 0) for name in "layers hidden heads kv_heads ffn vocab seq gpus batch dp tp pp cp micro_batch "
                                        "interleave".split()]
    gated, sp, flash, overlap = ({"": None, "yes": True, "no": False}[row[name]]
                                 for name in ("gated", "sp", "flash", "overlap"))
    again = {"": ("none", "block"), "none": ("none",), "selective": ("none",), "block": ("block",)}[row["recompute"]]
    config = GPTConfig(vocab, seq, layers, heads, c,
                       (2 + (gated or 0)) * (inner or 4 * c) // 2 - (c - c * few // heads if few else 0))
    machine, d = MACHINES[row["gpu"]], config.head_dim
    # Others' kernels are taken to move bytes at a copy's rate. Their loss moves 52 bytes for a float32 logit: cast (6),
    # maximum (4), difference (8), exp (8), sum (4), quotient (8), gradient (8), cast (6).
    machine = dataclasses.replace(machine, elementwise=machine.hbm, loss=machine.hbm / 52)
    if flash is False:
        # A query and a key take 4 D FLOPs, masked or not, and 6 passes over their 16-bit score: the product writes it,
        # softmax and dropout each read and write it, the next product reads it. `attention` counts half of the FLOPs.
        machine = dataclasses.replace(machine, attention=2 * d / (4 * d / machine.matmul + 6 * 2 / machine.hbm),
                                      long_attention=None)
    if min(sizes) < 0 or dp * tp * pp * cp != gpus or heads % tp or pp > layers:
        raise ValueError(f"dp {dp} x tp {tp} x pp {pp} x cp {cp} for {layers} layers, {heads} heads, {gpus} GPUs")
    layouts = [train.Settings(dp=dp, tp=tp, pp=pp, cp=cp, sp=tp > 1 if sp is None else sp, zero=zero, batch_size=batch,
                              recompute=recompute, micro_batches=batch // dp // some, virtual_stages=stages,
                              schedule="interleaved" if stages > 1 else "1f1b", dtype="bf16", cuda_graphs="off")
               for some, stages, zero, recompute in itertools.product(
                   [each] if each else (1, 2, 4), [v] if v else divisors(layers // pp) if pp > 1 else [1],
                   [int(row["zero"])] if row["zero"] else (0, 1), again)
               if batch % (dp * some) == 0 and zero in range(4)
               and (stages == 1 or splits_backward("interleaved", pp, batch // dp // some, stages) is not None)]
    percent = float(row["mfu_pct"] or mfu(config, float(row["tokens_per_s_per_gpu"] or 0), machine))
    if not layouts or not 0 < percent < 100:
        raise ValueError(f"MFU {percent:.1f} %, or no way to cut {batch} sequences for dp {dp}, pp {pp}")
    return SimpleNamespace(row=row, config=config, machine=machine, layouts=layouts, overlap=overlap, mfu=percent)


def read_published(path):
    rows = SimpleNamespace(line_num=0)
    with (readable(lambda: f"--published {path}, line {rows.line_num}", f"see {PUBLISHED}"),
          open(path, newline="") as file):
        rows = csv.DictReader(file, restval="")
        return [run_of(row) for row in rows] or [run_of({})]


def spearman(a, b):
    """Spearman's rank correlation of two lists. Equal values get the mean of their ranks."""
    ranks = [(x[:, None] > x).sum(1) + (x[:, None] == x).sum(1) / 2 for x in map(np.asarray, (a, b))]
    return np.corrcoef(ranks)[0, 1]


def plan_published(a):
    """Predict the MFU of runs that others have published. Settings that a source does not print are those of the
    fastest layout that fits."""
    table = Table("published runs: MFU %", {
        "source": "source:<25", "model": "model:<11", "gpu": "GPU:<4", "gpus": "GPUs:>5", "layout": "layout:<45",
        "micro": "micro-batches:>13", "published": "published:>9.1f", "predicted": "predicted:>9.1f",
        "ratio": "ratio:>5.2f", "limit": "beside computation:<29"})
    for run in a.runs:
        found = [(predict(run.config, s, run.machine, run.overlap), s) for s in run.layouts]
        costs, s = min(found, key=lambda pair: (
            needed_bytes(run.config, pair[1], run.machine.fused) > ROOM * run.machine.memory, pair[0].step))
        tokens = s.batch_size * run.config.seq_len / int(run.row["gpus"]) / costs.step
        reached = mfu(run.config, tokens, run.machine)
        table.row(**{name: run.row[name] for name in ("source", "model", "gpu", "gpus")}, layout=describe_layout(s),
                  micro=f"{s.micro_batches} x {s.batch_size // s.dp // s.micro_batches}", published=run.mfu,
                  predicted=reached, ratio=reached / run.mfu, limit=limit(costs))
    kinds = dict.fromkeys(row["gpu"] for row in table.rows)
    for some in [[kind] for kind in kinds] + [kinds] * (len(kinds) > 1):
        rows = [row for row in table.rows if row["gpu"] in some]
        ratios = [row["ratio"] for row in rows]
        rank = spearman(*zip(*((row["published"], row["predicted"]) for row in rows))) if len(rows) > 1 else math.nan
        say(f"{' and '.join(some)}: median ratio {statistics.median(ratios):.2f} of {len(rows)}, {min(ratios):.2f} to "
            f"{max(ratios):.2f}; rank correlation (Spearman) of published and predicted MFU: {rank:.2f}")
    write_json(a.json, "plan", torch.device("cpu"), [table])
    return table


def plan(a):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` may close the pipe
    if a.published:
        return plan_published(a)
    config, machine = a.config, a.machine
    say(f"{a.model}, {describe_parameters(config)}, {a.dtype}, on {a.gpus} GPUs, {a.batch_size} sequences of "
        f"{config.seq_len} a step\n{describe_machine(machine)}{mfu_note(config)}")
    candidates = [(predict(config, s, machine), s)
                  for s in all_layouts(config, a.gpus, a.batch_size, a.dtype, machine)]
    candidates.sort(key=lambda pair: pair[0].step)
    table = Table("layouts that fit, fastest first; communication as a share of computation, hidden or not", {
        "layout": f"layout:<{74 if config.experts or any(s.cp > 1 for _, s in candidates) else 44}",
        "micro": "micro-batches:>13", "ms": "ms:>10,.1f", "tokens": "tokens/s GPU:>12,.0f", "mfu": "MFU %:>5.1f",
        "gib": "GiB:>6.1f", "bubble": "bubble %:>8.1f", "dp": "dp %:>6.1f", "tp": "tp %:>6.1f", "cp": "cp %:>6.1f",
        **({"ep": "ep %:>6.1f"} if config.experts else {}), "pp": "pp %:>6.1f", "limit": "beside computation:<29"})
    tokens, seen = a.batch_size * config.seq_len / a.gpus, set()
    for costs, s in candidates:  # a layout gets one row, for its fastest micro-batches and recomputing
        key = s.dp, s.tp, s.pp, s.cp, s.cp_kind, s.ep, s.zero, s.zero_within, s.sp, s.schedule
        if key in seen or (need := needed_bytes(config, s, machine.fused)) > ROOM * machine.memory:
            continue
        seen.add(key)
        traffic = {"dp": costs.dp_all, "tp": costs.tp, "cp": costs.cp_all, "ep": costs.ep, "pp": costs.transfers}
        table.row(layout=describe_layout(s), micro=f"{s.micro_batches} x {s.batch_size // s.dp // s.micro_batches}",
                  ms=1e3 * costs.step, tokens=tokens / costs.step, gib=need / 2**30,
                  bubble=100 * costs.bubble / costs.step, limit=limit(costs),
                  mfu=mfu(config, tokens / costs.step, machine),
                  **{axis: 100 * seconds / costs.compute for axis, seconds in traffic.items()},
                  settings=dataclasses.asdict(s), costs=costs._asdict())
        if len(table.rows) == a.top:
            break
    if not table.rows:
        smallest = min((needed_bytes(config, s, machine.fused) for _, s in candidates), default=None)
        say("\nno layout divides batch and heads: give another --batch-size" if smallest is None else
            f"\nnothing fits {ROOM:.0%} of {machine.memory / 2**30:.0f} GiB: the leanest layout needs "
            f"{smallest / 2**30:.1f}; give more --gpus")
    write_json(a.json, "plan", torch.device("cpu"), [table], machine=dataclasses.asdict(machine))
    return table


# -------------------------------------------------------------------------------------------------------------- scaling

def scaling(a):
    """Run `strategies` with 1, 2, 4, ... processes. In weak scaling the batch grows with them, in strong it stays."""
    table = Table("scaling: tokens/s a GPU, and as a share of one GPU's", {
        "kind": "scaling:<7", "gpus": "GPUs:>5", "strategy": "strategy:<11", "who": "who:<31", "batch": "batch:>6",
        "ms": "ms:>8.1f", "tokens": "tokens/s GPU:>12,.0f", "efficiency": "efficiency %:>12.1f", "mfu": "MFU %:>5.1f"})
    worlds, one = [1 << i for i in range(a.gpus.bit_length())], {}
    names = "device", "comm", "dtype", "model", "cuda_graphs", "repeats", *train.SIZES
    given = [word for name in names if getattr(a, name) for word in (f"--{name.replace('_', '-')}", getattr(a, name))]

    @functools.cache  # in the largest world weak and strong are the same run
    def rows(n, batch):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "rows.json")
            words = [sys.executable, os.path.abspath(__file__), "strategies", "--gpus", n, "--batch-size", batch,
                     "--json", path, "--accumulate", batch // n // a.batch_size, "--only", *a.only,
                     *["--quick"] * a.quick, *given]
            subprocess.run(list(map(str, words)), check=True, stdout=subprocess.DEVNULL)
            with open(path) as file:
                return json.load(file)["rows"]

    for kind, n in itertools.product(("weak", "strong") if a.kind == "both" else (a.kind,), worlds):
        batch = a.batch_size * (n if kind == "weak" else worlds[-1])
        for row in rows(n, batch):
            first = one.setdefault((kind, row["strategy"], row["who"]), row["tokens"])
            table.row(kind=kind, gpus=n, batch=batch, efficiency=100 * row["tokens"] / first,
                      **{key: row.get(key) for key in ("strategy", "who", "ms", "tokens", "mfu")})
    write_json(a.json, "scaling", torch.device(a.device), [table])
    return table


# ------------------------------------------------------------------------------------------------------------- pictures
#
# Pictures are SVG text: words, boxes, and charts made of both. Colours are of middle brightness, on no background, so
# that a picture can be read on a light page and on a dark one.

COLOURS = "#4c8dd6", "#e0883a", "#4ba36b", "#9a6fc4", "#c2577a", "#888"


def words(x, y, what, size=11, anchor="middle"):
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}">{html.escape(what)}</text>'


def boxes(colour, rectangles, opacity=1):
    """Rectangles (x, y, width, height) of one colour."""
    path = "".join(f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h{-w:.1f}z" for x, y, w, h in rectangles)
    return f'<path fill="{colour}" fill-opacity="{opacity}" d="{path}"/>'


def cells(colour, some, height=20, opacity=1):
    """Boxes (x, y, width, text) of one colour with text in them."""
    return [boxes(colour, [(x, y, width, height) for x, y, width, _ in some], opacity), '<g fill="#fff">',
            *(words(x + width / 2, y + height / 2 + 4, str(text), 10) for x, y, width, text in some), "</g>"]


def legend(y, step, some):
    """some: {text: colour}"""
    return [part for i, (text, colour) in enumerate(some.items())
            for part in (boxes(colour, [(20 + step * i, y, 10, 10)]), words(35 + step * i, y + 9, text, 11, "start"))]


def chart(title, groups):
    """Bars side by side, 1000 x 280. groups: {label: {bar: {part: value}}}; a bar is a stack of parts."""
    bars = [parts for group in groups.values() for parts in group.values()]
    kinds = {part: [] for parts in bars for part in parts}
    unit, step = 180 / max(sum(parts.values()) for parts in bars), 960 / (len(bars) + len(groups) - 1)
    out, x = [words(20, 14, title, 13, "start")], 20.0
    for label, group in groups.items():
        out.append(words(x + step * len(group) / 2, 270, label, 12))
        for bar, parts in group.items():
            y, middle, total = 240.0, x + 0.45 * step, sum(parts.values())
            for part, value in parts.items():
                y -= value * unit
                kinds[part].append((x, y, 0.9 * step, value * unit))
            out += [words(middle, y - 4, f"{total:,.0f}" if total >= 100 else f"{total:.3g}"),
                    words(middle, 253, "" if bar in parts else bar, 10)]
            x += step
        x += step
    for i, (part, rectangles) in enumerate(kinds.items()):
        x = 20 + 960 / max(5, len(kinds)) * i
        out += [boxes(COLOURS[i % len(COLOURS)], [(x, 24, 10, 10), *rectangles]), words(x + 15, 33, part, 11, "start")]
    return "\n".join(out)


def write_svg(folder, name, height, parts):
    path, box = os.path.join(folder, name + ".svg"), f'viewBox="0 0 1000 {height}"'
    with open(path, "w") as file:
        file.write("\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" fill="#888" {box}>',
                              *parts, "</svg>\n"]))
    say(path)


# The next pictures need no file. They call the code's own functions on all ranks, and record the calls inside where the
# results show too little. draw_x() returns (height, parts) of the picture x, and rank 0 writes it.

def draw_ring():
    states = list(zip(*of_all_ranks(dist.ring_states())))  # [state][rank][chunk]
    n, width = len(states[0]), 1000 / len(states)
    names = ["start", *(f"reduce-scatter {s}" for s in range(n - 1)), *(f"all-gather {s}" for s in range(n - 1))]
    out = [words(width * s + width / 2, 14, name) for s, name in enumerate(names)]
    chunks, filled, cell = [], [[] for _ in range(n)], (width - 15) / n
    for s, r, c in itertools.product(range(len(states)), range(n), range(n)):
        x, y, w = width * s + 8 + cell * c, 22 + 30 * r, (cell - 3) / n
        chunks.append((x, y, n * w, 26))
        for i in range(n):
            filled[i] += [(x + w * i, y, w, 26)] * (states[s][r][c] >> i & 1)
    text = f"a row a rank, a column a chunk, a colour for each of the {n} ranks whose data the chunk holds"
    return 44 + 30 * n, [*out, boxes("#888", chunks, 0.2), *map(boxes, COLOURS, filled), words(500, 38 + 30 * n, text)]


def draw_mesh():
    """Which of 16 ranks are a group, axis by axis. Patches let `make_mesh` see 16 ranks."""
    with patch.object(dist, "get_world_size", lambda: 16), patch.object(
            parallel, "init_device_mesh", lambda device, sizes, mesh_dim_names: SimpleNamespace(
                mesh=torch.arange(16).view(sizes), mesh_dim_names=mesh_dim_names)):
        mesh = parallel.make_mesh("cpu", dp=2, tp=2, pp=2, cp=2)
    with patch.object(dist, "rows_and_columns", lambda grid: [grid]):
        grids = parallel.split_experts(mesh, 2)
    axis = {name: mesh.mesh.movedim(i, 3).flatten(0, 2).tolist() for i, name in enumerate(mesh.mesh_dim_names)}
    out = [words(222 + 49 * rank, 34, f"rank {rank}", 10) for rank in range(16)]
    for i, (name, what, groups) in enumerate((
            ("tp 2", "activations, in each layer", axis["tp"]), ("cp 2", "keys and values, in each layer", axis["cp"]),
            ("dp 2", "each its part of the batch", axis["dp"]),
            ("dp x cp", "gradients, once a step", parallel.ranks_of_replicas(mesh)),
            ("ep 2, of dp", "tokens, to their experts", [row for grid in grids for row in grid]),
            ("copies of experts", "their gradients", [column for grid in grids for column in zip(*grid)]),
            ("pp 2", "activations, between stages", axis["pp"]))):
        y = 46 + 38 * i
        out += [words(20, y + 12, name, 12, "start"), words(20, y + 26, what, 10, "start")]
        for g, ranks in enumerate(groups):
            out += cells(COLOURS[g % 5], [(200 + 49 * r, y, 45, "abcdefgh"[g]) for r in ranks], 28, 1 - g // 5 * 0.25)
    return 336, [*out, words(394, 16, "node 0", 12), words(786, 16, "node 1", 12),
                 words(590, 328, "In a row, ranks with the same letter are a group.")]


@contextlib.contextmanager
def upper_halves():
    """Inside, only the code above the files' bars runs, as under train.py --plain, and links are made anew."""
    with contextlib.ExitStack() as stack:
        for table in (dist._links, dist.LINKS, kernels.FASTER, model.FASTER, parallel.FASTER, train.FASTER):
            stack.enter_context(patch.dict(table, clear=True))
        yield


def calls_of_a_step():
    """(title, [(path, bytes)] of the messages that rank 0 sends in a step). path: the calls, ((file, function), ...),
    from train.py down to `isend`."""
    found, files = [], {module.__file__ for module in (dist, kernels, model, parallel, train)}
    tp, start = 2 - dist.get_world_size() % 2, torch_dist.batch_isend_irecv

    def watched(operations):
        frame, path = sys._getframe(1), [("torch.distributed", "isend")]
        while (code := frame.f_code) is not calls_of_a_step.__code__:
            if code.co_filename in files:  # from Python 3.11 on a method is named with its class
                path.insert(0, (os.path.basename(code.co_filename), getattr(code, "co_qualname", code.co_name)))
            frame = frame.f_back
        found.extend((path, operation.tensor.nbytes) for operation in operations if operation.op is torch_dist.isend)
        return start(operations)

    with upper_halves():
        s = train.Settings(dp=dist.get_world_size() // tp, tp=tp, batch_size=dist.get_world_size(), device="cpu")
        trainer = train.Trainer(s, GPTConfig(), None, [np.zeros(1000, np.uint8)] * 2, torch.device("cpu"))
        with patch.object(torch_dist, "batch_isend_irecv", watched):
            trainer.step(0)
    return f"one step of train.py --plain --dp {s.dp} --tp {s.tp}: what rank 0 sends", found


def draw_calls():
    """The calls of a step: on the left down to the collectives, on the right from them down to `isend`."""
    def lines(calls, depth=0):
        for first in dict.fromkeys(path[0] for path, _ in calls):
            inner = [(path[1:], sent) for path, sent in calls if path[0] == first]
            yield depth, *first, [sent for path, sent in inner if not path]
            yield from lines([(path, sent) for path, sent in inner if path], depth + 1)

    title, found = calls_of_a_step()
    files, out, bottom = dict(zip(dict.fromkeys(file for path, _ in found for file, _ in path), COLOURS)), [], 0
    cuts = [[file for file, _ in path].index("collectives.py") for path, _ in found]
    for left, part in (20, lambda path, cut: path[:cut]), (560, lambda path, cut: path[cut:]):
        calls = [(part(path, cut), sent) for (path, sent), cut in zip(found, cuts)]
        for i, (depth, file, name, ends) in enumerate(lines(calls)):
            x, y, said = left + 13 * depth, 64 + 18 * i, f": {len(ends)} messages, {sum(ends):,} bytes" if ends else ""
            out += [boxes(files[file], [(x, y, 8, 12)]),
                    words(x + 14, y + 10, name.rpartition("<locals>.")[2] + said, 11, "start")]
            bottom = max(bottom, y)
    return bottom + 24, [words(20, 16, title, 12, "start"), *legend(32, 150, files), *out]


def draw_buckets():
    """DDP's buckets in one backward, drawn from recorded calls of EarlyReducer's methods."""
    events, out = [], []

    def watched(name):
        def call(reducer, what, *more):
            events.append((name, reducer.bucket_of.get(what, what)))
            return method(reducer, what, *more)
        method = getattr(parallel.EarlyReducer, name)
        return call

    with patch.multiple(parallel.EarlyReducer, **{name: watched(name) for name in ("computed", "start", "store")}):
        net = parallel.DDP(GPT(GPTConfig(n_layer=2)), bucket_mb=0.3)
        net(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
        net.finish_grad_sync()
    names, step = {param: name for name, param in net.module.named_parameters()}, 790 / len(events)
    backward = 190 + step * (1 + max(i for i, (name, _) in enumerate(events) if name == "computed"))
    for b, bucket in enumerate(net.buckets):
        y, (came, (left,), (there,)) = 62 + 40 * b, (
            [190 + step * i for i, event in enumerate(events) if event == (what, bucket)]
            for what in ("computed", "start", "store"))
        out += [words(20, y + 10, f"bucket {b}", 11, "start"),
                words(20, y + 22, f"{len(bucket.params)} tensors from {names[bucket.params[0]]}", 9, "start"),
                boxes(COLOURS[0], [(came[0], y, left - came[0], 22)], 0.35),
                boxes(COLOURS[1], [(left, y, there - left, 22)]), boxes(COLOURS[2], [(there, y, 980 - there, 22)]),
                boxes(COLOURS[0], [(x + 1, y, step - 2, 22) for x in came])]
    said = "a gradient comes, its bucket fills", "the bucket is under way", "the average is in .grad"
    return 62 + 40 * len(net.buckets), [
        *legend(8, 270, dict(zip(said, COLOURS))), *out,
        boxes("#888", [(backward, 34, 1, 40 * len(net.buckets) + 22)]),
        words(backward - 6, 46, "backward: events in order, not on a clock", 11, "end"),
        words(backward + 6, 46, "finish_grad_sync", 11, "start")]


def draw_zero_stages():
    return 280, [chart("GPT-2 XL, bf16, 8 ranks, 4 sequences each, blocks recomputed: GiB of a rank", {
        f"ZeRO-{zero}": {"": {kind: n / 2**30 for kind, n in parallel.memory_bytes(
            PRESETS["gpt2-xl"], zero, 8, dtype=torch.bfloat16, recompute="block", micro_batch=4).items()}}
        for zero in range(4)})]


def draw_f_and_g():
    """In order, the outputs of a block's layers, in backward their gradients, and the collectives of f and g."""
    n, run, out, y = dist.get_world_size(), dist.Link.run, [], 30
    for title, cut, tokens in (("tensor parallelism", parallel.tensor_parallel, 4 * n),
                               ("with sequence parallelism", parallel.sequence_parallel, 4)):
        events = {"forward": [], "backward": []}  # (a layer or collective, whether of all T tokens, its width)

        def watched(link, name, *more, events=events):
            way = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
            events[way].append((name.removesuffix("_tensor").removesuffix("_into"), True, "C"))
            return run(link, name, *more)

        def seen(layer, x, y, name, events=events):
            what = name, y.shape[1] > 4, f"{y.shape[2] // 8}C/N" if name.endswith(("c_attn", "c_fc")) else "C"
            events["forward"].append(what)
            y.register_hook(lambda grad: events["backward"].append(what))

        with upper_halves(), patch.object(dist.Link, "run", watched):
            cut(net := GPT(GPTConfig(n_layer=1, n_head=n, n_embd=8 * n, seq_len=4 * n)), torch_dist.group.WORLD)
            for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
                net.h["0"].get_submodule(name).register_forward_hook(functools.partial(seen, name=name))
            net.h["0"](torch.zeros(1, tokens, 8 * n, requires_grad=True)).sum().backward()
        for way, some in events.items():
            out.append(words(20, y + 14, f"{title}, {way}", 12, "start"))
            for i, (name, whole, width) in enumerate(some):
                step, height = 960 / len(some), 60 if whole else 15
                out += [boxes(COLOURS[hasattr(dist, name)], [(20 + step * i, y + 40, step - 6, height)]),
                        words(17 + step * (i + 0.5), y + 34, f"{'T' if whole else 'T/N'} x {width}", 10),
                        words(17 + step * (i + 0.5), y + 113, name, 10)]
            y += 125
    return y, [*legend(8, 330, {"output of a layer; in backward its gradient": COLOURS[0],
                                "traffic of f and g": COLOURS[1]}), *out]


def draw_schedules():
    """The four schedules on one time axis, for 4 ranks and 8 micro-batches. F, I and W take equally long."""
    runs = {name: parallel.simulate(lists(4, 8, 1 + (name == "interleaved")))
            for name, lists in parallel.SCHEDULES.items()}
    unit, out, y = 880 / max(run.length for run in runs.values()), [], 24
    kinds = {"F forward": COLOURS[0], "B backward: I and W in one": COLOURS[4], "I gradient of the input": COLOURS[1],
             "W gradient of the weights": COLOURS[2]}
    for name, run in runs.items():
        idle = max(run.idle) / run.length
        out.append(words(20, y + 12, f"{name}: {run.length:g} long, {idle:.0%} idle, {max(run.peak):g} held at most",
                         12, "start"))
        for rank, row in enumerate(run.spans):
            out.append(words(20, y + 34 + 20 * rank, f"rank {rank}", 10, "start"))
            for (kind, colour), second in itertools.product(kinds.items(), (False, True)):  # a rank's two stages
                out += cells(colour, [(80 + unit * a, y + 20 + 20 * rank, unit * (b - a) - 1, action.micro_batch)
                                      for action, a, b in row if (action.kind, action.stage > 3) == (kind[0], second)],
                             18, 0.7 if second else 1)
        y += 112
    return y, [*legend(6, 230, kinds), *out]


def draw_zigzag():
    """Two ways to cut a sequence over 4 ranks: who computes which scores in which step, and who waits."""
    out = []
    for y, kind, title in ((44, "", "contiguous: rank r holds chunks 2r and 2r+1"),
                           (274, "ring", "zigzag: rank r holds chunks r and 7-r")):
        start, steps = 420, parallel.context_steps(4, kind)
        out += [words(20, y - 8, title, 12, "start"),
                boxes("#888", [(20 + 40 * k, y + 22 * q, 39, 21) for q in range(8) for k in range(8)], 0.12)]
        for s, step in enumerate(steps):
            longest = max(blocks for _, _, blocks in step)
            out.append(words(start + 17 * longest, y - 8, f"step {s}"))
            for rank, (queries, keys, blocks) in enumerate(step):
                scores = [(20 + 40 * k, y + 22 * q, 39, s) for q in queries for k in keys if k <= q]
                bar = [(start, y + 44 * rank, 35 * blocks - 2, f"rank {rank}")] if blocks else []
                out += cells(COLOURS[rank], scores, 21) + cells(COLOURS[rank], bar, 34)
            start += 35 * longest
        out.append(words(420, y + 190, f"time for {(start - 420) / 35:g} blocks of scores; a rank computes "
                         f"{sum(blocks for step in steps for _, _, blocks in step) / 4:g} in the mean", 11, "start"))
    return 474, [*out, words(20, 14, "On the left scores, queries down, keys to the right: colours are ranks, numbers "
                             "steps. On the right the time that they take.", 11, "start")]


def draw_experts():
    """Each of a rank's 6 tokens goes to 2 random experts of 2N. Drawn are the rows (rank, token) of each expert: as the
    rank sends them, as its experts get them, and as its own come back."""
    n, found, generator = dist.get_world_size(), [], torch.Generator().manual_seed(dist.get_rank())
    group, _ = parallel.split_experts(parallel.make_mesh("cpu", dp=n), n)
    experts, x = Experts(GPTConfig(n_embd=8, n_head=1, experts=2 * n)), torch.zeros(1, 6, 8)
    x[0, :, 0], x[0, :, 1] = dist.get_rank(), torch.arange(6)

    def seen(rows, counts):
        found.append((rows[:, :2].int().tolist(), counts.tolist()))
        return rows

    with patch.object(experts, "mlps", lambda rows, counts: seen(
            parallel.visit(seen, group, seen(rows, counts), counts), counts)):
        experts(x, torch.rand(1, 6, 2 * n, generator=generator).argsort(-1)[..., :2], torch.ones(1, 6, 2))
    ranks, out, step = of_all_ranks(found), [], 960 / n
    most = max(len(rows) for some in ranks for rows, _ in some)
    for i, title in enumerate(("rows as they leave, sorted by expert", "all-to-all: rows as experts get them",
                               "all-to-all back: rows on their tokens' rank again, in the order in which they left")):
        out.append(words(20, y := 36 + 64 * i, title, 12, "start"))
        for rank, some in enumerate(ranks):
            rows, counts = some[i]
            number = [e + (i == 1) * 2 * rank for e, count in enumerate(counts) for _ in range(count)]
            for source in range(n):
                out += cells(COLOURS[source % 5], [
                    (20 + step * rank + (step - 10) / most * j, y + 8, (step - 10) / most - 1, e if i < 2 else token)
                    for j, ((r, token), e) in enumerate(zip(rows, number)) if r == source])
    out += [words(step * (r + 0.5) + 20, 16, f"rank {r}: experts {2 * r}, {2 * r + 1}") for r in range(n)]
    return 220, [*out, words(500, 212, "Colours are the tokens' ranks; numbers are experts, in the last row tokens.")]


def tiles_walked(Tq, Tk, causal, rows):
    """For each program of attention_forward_kernel, the tiles (of queries, of keys) that it computes, in order."""
    last = getattr(kernels.last_key, "fn", kernels.last_key)
    with patch.object(kernels, "tl", SimpleNamespace(minimum=min)):
        return [[(m0 // rows, n0 // rows) for n0 in range(0, last(m0 + rows - 1, Tq, Tk, causal) + 1, rows)]
                for m0 in range(0, Tq, rows)]


def draw_tiles():
    rows, out = kernels.tile_rows(64), []
    for x, Tq, causal, title in ((20, 512, True, "causal"), (350, 512, False, "not causal, as in a ring"),
                                 (680, 256, True, "causal, the last 256 queries")):
        walks = tiles_walked(Tq, 512, causal, rows)
        done = [(x + 38 * n, 48 + 24 * m, 36, i) for walk in walks for i, (m, n) in enumerate(walk)]
        cut = [(x + 38 * n, 48 + 24 * m, 36, i) for walk in walks for i, (m, n) in enumerate(walk)
               if causal and (n + 1) * rows - 1 > 512 - Tq + m * rows]
        every = [(x + 38 * n, 48 + 24 * m, 36, 22) for m in range(Tq // rows) for n in range(512 // rows)]
        out += [words(x, 38, f"{title}: {len(done)} of {len(every)} tiles", 12, "start"), boxes("#888", every, 0.12),
                *cells(COLOURS[0], sorted({*done} - {*cut}), 22), *cells(COLOURS[1], cut, 22)]
    said = {"all queries see all keys": COLOURS[0], "the mask cuts the tile": COLOURS[1], "never loaded": "#888"}
    return 270, [*out, *legend(254, 330, said), words(
        20, 16, f"Tiles of {rows} queries (down) x {rows} keys (right). A row is a program: it keeps Q, sums and O, "
        "and loads K and V in this order. No score reaches memory.", 11, "start")]


def timeline_of(found):
    """The Timeline of the computation in train.py's trace, so of the pipeline as it ran, for `parallel.draw_svg`."""
    events = [event for event in found["traceEvents"] if event["ph"] == "X" and event["name"].split()[0] in {*"FBIW"}]
    first, spans = min(event["ts"] for event in events), defaultdict(list)
    for event in events:
        action = parallel.Action(event["name"][0], event["args"]["stage"], event["args"]["micro_batch"])
        start = event["ts"] - first
        spans[event["tid"]].append((action, start / 1e6, (start + event["dur"]) / 1e6))
    return parallel.Timeline([spans[rank] for rank in sorted(spans)],
                             max(row[-1][2] for row in spans.values()), idle=None, peak=None)


def grouped(values):
    """{group: {bar: {part: value}}} for `chart`, of (group, bar, value or {part: value}). Empty values are left out."""
    groups = defaultdict(dict)
    for group, bar, value in values:
        if value:
            groups[group][bar] = value if isinstance(value, dict) else {bar: value}
    return groups


def comparisons(found):
    """(picture, title, groups) of each chart of a --json file's rows. groups: empty if the rows hold nothing for it."""
    rows = sorted(found["rows"], key=lambda row: not row.get("who", "ours").startswith("ours"))  # ours: first colour
    if found["what"] == "kernels":
        for (picture, op, key, unit), way in itertools.product((
                ("attention", "attention ", "tflops", "TFLOP/s"), ("layer-norm", "layer norm ", "tb", "TB/s")),
                ("forward", "backward")):
            some = [row for row in rows if row["op"].startswith(op) and row["way"] == way]
            yield picture, f"{op}{way}, {unit}", grouped(
                (row["op"].removeprefix(op), row["who"], row[key]) for row in some)
    elif found["what"] == "collectives":
        yield "all-reduce", "all-reduce, bus GB/s by size", grouped(
            (f"{row['size']:,.0f} KiB", who, row[key]) for row in rows
            if row["op"] == "all_reduce" and row.get("bus", 0) > 1
            for who, key in (("ours", "bus"), ("torch", "torch_bus")))
    elif found["what"] == "strategies":
        some = [row for row in rows if re.fullmatch("ddp|zero[123]", row["strategy"]) and "memory_by_rank" in row]
        yield "zero-memory", f"{found['model']}, GiB on rank 0: tensors (predicted, measured), peak", grouped(
            (row["strategy"], bar, value) for row in some
            for bar, value in zip(("predicted", "measured", "peak"), (*(
                {kind: n / 2**30 for kind, n in kinds.items()} for kinds in row["memory_by_rank"][0]), row["peak"])))
        yield "strategies", f"{found['model']}, tokens/s a GPU", grouped(
            (row["strategy"], row["who"] if row["who"].startswith("ours") else "torch", row["tokens"]) for row in rows)
    else:
        yield "scaling", "tokens/s a GPU, % of one GPU's", grouped(
            (f"{row['kind']} {row['gpus']}", f"{row['strategy']} {row['who']}", row["efficiency"]) for row in rows)


def pictures(a):
    """Write SVG pictures of what the code does, and of the rows and traces in files."""
    dist.initialize("cpu")
    for draw in (draw_ring, draw_mesh, draw_calls, draw_buckets, draw_zero_stages, draw_f_and_g, draw_schedules,
                 draw_zigzag, draw_experts, draw_tiles):
        height, parts = draw()
        if not dist.get_rank():
            write_svg(a.into, draw.__name__.removeprefix("draw_").replace("_", "-"), height, parts)
    for path, found in a.found.items() if not dist.get_rank() else ():
        if "traceEvents" in found:
            say(picture := os.path.join(a.into, "pipeline.svg"))
            parallel.draw_svg(timeline_of(found), picture)
            continue
        charts = defaultdict(list)
        for picture, title, groups in comparisons(found):
            if groups:
                at = f'<g transform="translate(0 {290 * len(charts[picture])})">'
                charts[picture].append(at + chart(f"{title}; {found['hardware']}", groups) + "</g>")
            else:
                say(f"{path}: no rows for '{title}', not drawn")
        for picture, parts in charts.items():
            write_svg(a.into, picture, 290 * len(parts) - 10, parts)


# ---------------------------------------------------------------------------------------------------------------- flags

WHAT = {"kernels": measure_kernels, "lessons": lessons, "collectives": collectives, "strategies": strategies,
        "plan": plan, "scaling": scaling, "pictures": pictures}
OF_A_MODEL, TRAINED = ("strategies", "plan", "scaling"), ("strategies", "scaling")
MEASURED = ("kernels", "collectives", *TRAINED)


def option(takers, name, help=None, **more):
    """An entry of FLAGS: the commands of WHAT that take it, its name, the arguments for argparse."""
    return takers, name, dict(more, help=help)


number = functools.partial(option, type=parallel.positive)
FLAGS = [
    option((*MEASURED, "lessons", "plan"), "--json", "write the rows there, with hardware, versions, commit",
           default="", metavar="FILE"),
    number((*MEASURED[1:], "plan"), "--gpus", "processes, in plan GPUs; left out, all GPUs, on the CPU 2, in plan 8"),
    option((*MEASURED, "lessons"), "--device", choices=["auto", "cpu", "cuda"], default="auto"),
    option((*MEASURED, "lessons"), "--quick", "tiny sizes, few repeats: shows only that it works", action="store_true"),
    option((*MEASURED, "lessons"), "--only", "which kernels, lessons, collectives or strategies; left out, all (but "
           "experts and dense twin only with --experts), in scaling ddp and zero3", nargs="+", metavar="NAME"),
    option(OF_A_MODEL, "--model", "preset; left out, gpt2, on the CPU tiny, in plan gpt2-xl", choices=list(PRESETS)),
    *(number(OF_A_MODEL, "--" + name.replace("_", "-"), "instead of the preset's") for name in train.SIZES),
    number(OF_A_MODEL, "--batch-size", "sequences a step of all GPUs, in scaling of each; left out, 8 for each GPU"),
    option(OF_A_MODEL, "--dtype", "what layers compute in; left out, bf16, on the CPU fp32", choices=["bf16", "fp32"]),
    option(("collectives",), "--comm", "what to compare with torch's; ring: the textbook's", choices=["ours", "ring"],
           default="ours"),
    option(TRAINED, "--comm", "collectives under our strategies", choices=["ours", "ring", "torch", "both"],
           default="ours"),
    number(("strategies",), "--accumulate", "micro-batches without a pipeline", default=1),
    number(("strategies",), "--micro-batches", "micro-batches of a pipeline", default=8),
    number(("strategies",), "--virtual-stages", "stages of a rank in the interleaved pipeline", default=2),
    option(TRAINED, "--cuda-graphs", "as in train.py", choices=["auto", "off", "on"], default="auto"),
    number(TRAINED, "--repeats", "timed runs of each step; left out, 7, but 3 with --quick"),
    option(("strategies",), "--without", "time ours without these pieces of machinery, one at a time; no names: all of "
           + ", ".join(WITHOUT), nargs="*", choices=list(WITHOUT), metavar="PIECE"),
    option(("scaling",), "--kind", "whether the batch grows with the GPUs", choices=["weak", "strong", "both"],
           default="both"),
    option(("plan",), "--machine", f"{', '.join(MACHINES)}, or a file that `collectives --json` wrote", default="h200"),
    number(("plan",), "--node", "GPUs of a node, instead of the machine's"),
    number(("plan",), "--network", "rate from a GPU to another node, instead of the machine's", metavar="GB/S"),
    option(("plan",), "--published", "predict, instead, runs that others have published, from a CSV file; "
           "without a value, assets/published.csv", nargs="?", const=PUBLISHED, metavar="FILE"),
    number(("plan",), "--top", "layouts to print", default=15),
    option(("pictures",), "files", "files from --json or train.py's --trace; without one, the code alone", nargs="*",
           metavar="FILE"),
    option(("pictures",), "--into", "where the SVG files go", default="assets", metavar="DIR"),
]


def parse(words):
    parser = train.Parser(description="What the lecture predicts, what we measure, what PyTorch's own does.",
                          allow_abbrev=False)
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT", help=" | ".join(WHAT))
    for what in WHAT:
        sub = whats.add_parser(what, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        for takers, name, more in FLAGS:
            if what in takers:
                sub.add_argument(name, **more)
    others = argparse.Namespace(gpus=1, accumulate=1, micro_batches=1, virtual_stages=1, without=None)  # no flags there
    return parser.parse_args(words, others)


def check(a, world):
    """Fill in flags left out; BadInput before any process starts. Returns the number of processes needed."""
    if a.what == "pictures":
        check_files(a)
        return world if world > 1 else 4
    reject(a.json and (os.path.isdir(a.json) or not os.path.isdir(os.path.dirname(os.path.abspath(a.json)))),
           f"--json {a.json}: no file can be written there; give e.g. --json rows.json")
    if a.what == "plan":
        a.gpus, a.device, a.quick = a.gpus or 8, "cuda", False
        a.machine, a.runs = load_machine(a), read_published(a.published) if a.published else []
    else:
        check_processes(a, world)
    able = {"", *["triton"] * (a.device == "cuda" or kernels.INTERPRETED), *["cuda"] * (a.device == "cuda")}
    names = {"kernels": ("elu", "gelu", "layer_norm", "cross_entropy", "attention", "grouped", "matmul"),
             "lessons": (*(name for name, lesson in LESSONS.items() if lesson.needs in able), "claims"),
             "collectives": (*BUS, "barrier")}.get(a.what)
    if names:
        a.only = a.only or names
        for name in a.only:
            why = "it wants a GPU; " if a.what == "lessons" and name in LESSONS else ""
            reject(name not in names, f"--only {name}: {why}there are {', '.join(names)}")
        reject(a.what == "kernels" and "triton" not in able,
               "--device cpu: kernels are Triton's and want a GPU; with TRITON_INTERPRET=1, --quick works")
        reject(a.what == "collectives" and a.gpus == 1, "--gpus 1: one process has nobody to send to; give --gpus 2"
               + " --device cpu" * (a.device == "cuda"))
        return a.gpus if a.what == "collectives" else 1
    a.without = list(WITHOUT) if a.without == [] else a.without
    a.dtype = a.dtype or ("bf16" if a.device == "cuda" else "fp32")
    a.model = a.model or ("gpt2-xl" if a.what == "plan" else "gpt2" if a.device == "cuda" and not a.quick else "tiny")
    a.config = train.model_config(train.Settings(model=a.model, **{name: getattr(a, name) for name in train.SIZES}))[0]
    a.batch_size = a.batch_size or 8 * (1 if a.what == "scaling" else a.gpus)
    if a.what in TRAINED:
        reject(a.without and a.comm != "ours", f"--comm {a.comm}: --without times ours; leave --comm out")
        a.repeats = a.repeats or (3 if a.quick else 7)
        a.only = a.only or (["ddp", "zero3"] if a.what == "scaling" else None)
        check_strategies(a, a.batch_size * (a.gpus if a.what == "scaling" else 1))
    return a.gpus if a.what == "strategies" else 1


def check_processes(a, world):
    gpus = train.gpus_here()
    a.device = ("cuda" if gpus else "cpu") if a.device == "auto" else a.device
    reject(world > 1 and a.what == "scaling",
           "scaling starts its own processes: give python bench.py scaling, without torchrun")
    reject(world > 1 and a.gpus not in (None, world),
           f"--gpus {a.gpus}: torchrun has started {world} processes; leave it out")
    a.gpus = a.gpus or (world if world > 1 else max(1, gpus) if a.device == "cuda" else 2)
    reject(a.device == "cuda" and world == 1 and a.gpus > gpus,
           f"--gpus {a.gpus}: this machine has {gpus}; give " + (f"--gpus {gpus}" if gpus else "--device cpu"))


def check_strategies(a, batch_size):
    """Set a.layouts, {strategy: Settings} of those that can run, and a.reasons, why others cannot. BadInput for one
    that --only names and that cannot run."""
    asked, (a.config, routed, twin) = a.config.experts > 0, configs_of(a.config)
    every = layouts(a.gpus, a.micro_batches, a.virtual_stages, routed.experts)
    a.configs = {name: {"experts": routed, "dense twin": twin}.get(name, a.config) for name in every}
    if a.what == "scaling":  # only what one process can run, too
        every = {name: every[name] for name in layouts(1, 1, 1) if name in every}
    a.layouts, a.reasons = {}, []
    for name in a.only or [name for name in every if asked or name not in ("experts", "dense twin")]:
        reject(name not in every, f"--only {name}: with {a.gpus} processes there are {', '.join(every)}")
        given = {"dtype": a.dtype, "device": a.device, "batch_size": batch_size, "micro_batches": a.accumulate,
                 "cuda_graphs": a.cuda_graphs}
        s = train.Settings(**given | every[name])
        try:
            train.check_layout(s, a.configs[name], 1, 1)
            a.layouts[name] = s
        except BadInput as problem:
            reject(a.only, f"--only {name}: {problem}")
            a.reasons.append(f"{name}: {problem}")
    reject(not a.layouts, f"--batch-size {a.batch_size}: no strategy can run with it; {''.join(a.reasons[:1])}")


def check_files(a):
    """Set a.found, {file: what is in it}. BadInput for files that cannot be drawn."""
    a.found, first = {}, {}
    for path in a.files:
        with (readable(lambda: path, "give files that `bench.py ... --json` or `train.py --trace` wrote"),
              open(path) as file):
            found = json.load(file)
            kind = "trace" if "traceEvents" in found and timeline_of(found) else found["what"]  # ValueError: empty
        reject(kind not in ("trace", *MEASURED),
               f"{path}: there is no picture of {kind}; give files of {', '.join(MEASURED)}, or a trace")
        reject(kind in first, f"{path} would overwrite the pictures of {first.get(kind)}; give another --into folder")
        a.found[path], first[kind] = found, path
    if int(os.environ.get("RANK", "0")) == 0:
        train.check_folder(a.into, "--into")


def load_machine(a):
    machine = MACHINES.get(a.machine)
    if machine is None:
        advice = f"give one of {', '.join(MACHINES)}, or a file that `bench.py collectives --json` wrote"
        with readable(lambda: f"--machine {a.machine}", advice), open(a.machine) as file:
            machine = Machine(**json.load(file)["machine"])
    given = {"node": a.node, "network": a.network and 1e9 * a.network,
             "network_hop": machine.network_hop or machine.hop}
    machine = dataclasses.replace(machine, **{key: value for key, value in given.items() if value})
    reject(machine.link is None,
           f"--machine {a.machine}: one process has no link to measure; write it with --gpus 2 or more")
    reject(a.gpus > machine.node and not machine.network,
           f"--gpus {a.gpus} is more than the {machine.node} of a node, and --machine {a.machine} does not say how "
           "fast the network is: give e.g. --network 45")
    return machine


@contextlib.contextmanager
def readable(what, advice):
    """Inside, an error in reading what() becomes BadInput."""
    try:
        yield
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError, csv.Error) as error:
        raise BadInput(f"{what()}: {type(error).__name__} {error}; {advice}") from None


def main():
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if len(sys.argv) == 1:
        print(__doc__.strip())
        return
    try:
        a = parse(sys.argv[1:])
        processes = check(a, world)
    except BadInput as problem:
        train.refuse("bench.py", problem, rank)
    if processes > world:
        dist.start_again(processes)
    WHAT[a.what](a)
    if dist.is_initialized():
        torch_dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        if not dist.is_forked():  # a forked rank must return, because its launcher waits for the result
            os._exit(0)  # all is written, and Python's normal exit now and then aborts in a thread that a peer left


if __name__ == "__main__":
    main()
