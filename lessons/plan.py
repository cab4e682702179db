"""Layouts that fit, with their predicted times."""

import bisect
import dataclasses
import itertools
import math
import shlex

import torch

import parallel
from lessons.bench.timing import say, Table, write_json
from safe.flags import dashed, replayable, Settings, SIZES
from safe.reports import about_context, parameters_in_words
from further.fits import misfit, what_ranks_divide
from theory.clock import stage_to_rank_in, stages_in
from theory.memory import ROOM, needed_bytes
from theory.speed import describe_machine, mfu, mfu_note, predict, ring_hides
from theory.traffic import blocks_of, tokens_of, widths
from further.flags import Layout, LLAMAS


def divisors(n):
    return [i for i in range(1, n + 1) if n % i == 0]


WORTH = (  # (schedule, --virtual-stages). GPipe keeps more, V-Min's bubble grows with m, DualPipeV needs an overlap.
    ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 1), ("v-half", 1))
CHUNK = 4096  # of --loss-chunk, where all logits would take more than a GiB: enough rows for fast products
SPLIT = "zb-h1", "zb-v", "v-half"  # these split backward: W must come late, so blocks are not recomputed


def is_taken(s, config, gpus, node):
    """Whether train.py takes layout s, on nodes of so many GPUs."""
    if misfit(what_ranks_divide(s, config, gpus, node if gpus > node else 0)):
        return False
    most = config.n_layer + 2
    return s.pp <= most and len(stage_to_rank_in(s)) <= most


KINDS = Layout.__dataclass_fields__["cp_kind"].metadata["choices"]


def axes_of(config, gpus, batch_size, dtype, machine):
    """Layouts by their axes alone: tp inside a node, cp where attention hides a ring inside a node."""
    for tp, cp, pp, kind in itertools.product(*[divisors(gpus)] * 3, KINDS):
        own = config.seq_len // cp
        hides = max(ring_hides(machine.attention_with(own, config.head_dim), machine.link, parallel.PRECISIONS[dtype]))
        s = Settings(dp=gpus // (tp * cp * pp), tp=tp, cp=cp, pp=pp, cp_kind=kind, dtype=dtype, batch_size=batch_size)
        if s.dp * tp * cp * pp == gpus and (own >= hides if cp > 1 else kind == "ring"):
            yield s


def all_layouts(config, gpus, batch_size, dtype, machine):
    """Every layout that train.py takes and that may be fast: of 2^n sequences a micro-batch, or one if sequences are
    cut. None recomputes, or takes its loss in chunks."""
    for layout in axes_of(config, gpus, batch_size, dtype, machine):
        if not is_taken(layout, config, gpus, machine.node):
            continue
        replicas, each, local = layout.dp * layout.cp, batch_size // layout.dp, machine.node // layout.tp
        shards = [(zero, within) for zero in range(4 if replicas > 1 else 1)
                  for within in [None] + [local] * (zero > 0 and 1 < local < replicas)]  # a node's replicas, if pp = 1
        sizes = [1 << log for log in range(each.bit_length() if layout.cp == 1 else 1) if each % (1 << log) == 0]
        for size, (schedule, v), (zero, within), sp, ep in itertools.product(
                sizes, WORTH[:None if layout.pp > 1 else 1], shards, {False, layout.tp > 1},
                divisors(max(1, config.experts))):
            m = each // size
            worth = schedule not in SPLIT or m >= layout.pp
            s = dataclasses.replace(layout, zero=zero, zero_within=within, schedule=schedule, virtual_stages=v,
                                    micro_batches=m, sp=sp, ep=ep)
            if worth and is_taken(s, config, gpus, machine.node):
                yield s


def fits(config, s, machine):
    return max(needed_bytes(config, s)) <= ROOM * machine.memory


def fitting(config, s, machine):
    """Layout s if it fits. If not, s in every way that makes it fit: a part that backward runs again, the loss in
    chunks, both. Each way takes time, so a layout that fits needs none."""
    if fits(config, s, machine):
        yield s
        return
    logits = tokens_of(config, s) * config.vocab_size / s.tp * widths(s)[0]
    chunks = (0, CHUNK) if logits > 2**30 else (0,)
    parts = ("none",) if s.schedule in SPLIT else ("none", "mlp", "block")
    for chunk, part in itertools.product(chunks, parts):
        smaller = dataclasses.replace(s, loss_chunk=chunk, recompute=part)
        if fits(config, smaller, machine):
            yield in_fewest_blocks(config, smaller, machine)


def in_fewest_blocks(config, s, machine):
    """Layout s, which fits, with the smallest --recompute-blocks with which it does: each block more frees memory, and
    takes time."""
    if s.recompute == "none":
        return s
    stages = [run for rank in range(s.pp) for run in stages_in(s, config, rank).values()]
    most = max(len(blocks_of(config, [run])) for run in stages)
    some = [dataclasses.replace(s, recompute_blocks=n) for n in range(1, most)]
    first = bisect.bisect_left(some, True, key=lambda fewer: fits(config, fewer, machine))
    return [*some, s][first]  # s itself: in all blocks


SHOWN = ("dp", "tp", "sp", "pp", "cp", "cp_kind", "ep", "zero", "zero_within", "schedule", "virtual_stages",
         "micro_batches", "recompute", "recompute_blocks", "loss_chunk")


def describe_layout(s):
    """train.py's flags for a layout."""
    plain = Settings()
    given = {name: getattr(s, name) for name in SHOWN if getattr(s, name) != getattr(plain, name)}
    return " ".join(f"{dashed(name)} {value}" for name, value in given.items()).replace(" True", "")


def sizes_of(a):
    """The flags that change a preset."""
    return "".join(f" {dashed(name)} {getattr(a, name)}" for name in SIZES if getattr(a, name) is not None)


def describe_model(a):
    """The preset, the flags that change it, and its parameters."""
    return f"{a.init_from or a.model}{sizes_of(a)}, {parameters_in_words(a.config)}"


def command_of(a, layout):
    """The command that trains in this layout; on several nodes, on each of them."""
    each = math.gcd(a.gpus, a.machine.node)
    nodes = a.gpus // each
    over = f"--nnodes {nodes} --rdzv_backend c10d --rdzv_endpoint HOST:29500 " * (nodes > 1)
    arch = " --arch llama" * (a.config.arch == "llama" and a.model not in LLAMAS)
    model = f"--init-from {shlex.quote(a.init_from)}" if a.init_from else f"--model {a.model}{arch}"
    return (f"torchrun {over}--nproc_per_node {each} train.py {model}{sizes_of(a)} --dtype {a.dtype} "
            f"--batch-size {a.batch_size} {layout}").rstrip()


VARIED = "micro_batches", "virtual_stages", "recompute", "recompute_blocks", "loss_chunk"


def rows_of(a):
    """A row of `plan`'s table for each layout that fits, fastest first, of those that take as long the one that needs
    least memory. Of layouts that differ in VARIED alone, the fastest."""
    config, machine = a.config, a.machine
    candidates = []
    for layout in all_layouts(config, a.gpus, a.batch_size, a.dtype, machine):
        for s in fitting(config, layout, machine):
            on_gpus = dataclasses.replace(s, cuda_graphs="on" if replayable(s, config) else "off")
            costs = predict(config, on_gpus, machine)
            candidates.append((round(1e3 * sum(costs), 6), needed_bytes(config, s), costs, s))
    candidates.sort(key=lambda candidate: (candidate[0], max(candidate[1])))
    tokens = a.batch_size * config.seq_len / a.gpus
    seen = set()
    for ms, needed, costs, s in candidates:
        key = describe_layout(dataclasses.replace(s, **{name: getattr(Settings, name) for name in VARIED}))
        if key in seen:
            continue
        seen.add(key)
        shares = {axis: 100 * seconds / sum(costs) for axis, seconds in costs._asdict().items()}
        speed = 1e3 * tokens / ms
        yield dict(layout=describe_layout(s), ms=ms, tokens=speed, gib=max(needed) / 2**30,
                   mfu=mfu(config, speed, machine.peak), settings=dataclasses.asdict(s), **shares)


def plan(a, _):
    rows = [*itertools.islice(rows_of(a), a.top)]
    machine = a.machine
    if rows:
        say(f"{command_of(a, rows[0]['layout'])}\n")
    nodes = f"{machine.node} a node" if a.gpus > machine.node else "one node"
    say(f"{describe_model(a)}, {a.dtype}, on {a.gpus} GPUs, {nodes}, {a.batch_size} sequences of {a.config.seq_len} a "
        f"step{about_context(a.config)}\n{describe_machine(machine)}\n{mfu_note(a.config)}".rstrip())
    shares = {axis: f"{axis} %:>8.1f" for axis in ("bubble", "dp", "tp", "cp", "ep", "pp")}
    table = Table("layouts that fit, fastest first; GiB of the fullest rank; bubble, and traffic that nothing hides, "
                  "in % of the step", {
        "ms": "ms:>10,.1f", "tokens": "tokens/s GPU:>12,.0f", "mfu": "MFU %:>5.1f", "gib": "GiB:>6.1f",
        **{axis: column for axis, column in shares.items() if any(row[axis] for row in rows)}, "layout": "layout:<80"})
    for row in rows:
        table.row(**row)
    if not rows:
        say(f"\nnothing divides batch and heads and fits {ROOM:.0%} of {machine.memory / 2**30:.0f} GiB: give more "
            "--gpus, or another --batch-size")
    near = sum(row["ms"] < 1.03 * rows[0]["ms"] for row in rows)
    if near > 1:
        say(f"\nThe first {near} are within 3 %, and predictions have been up to 6 % too short on two H200s "
            "(docs/results.md): measure them.")
    write_json(a, torch.device("cpu"), table)
