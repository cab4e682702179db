"""Layouts that fit, with their predicted times."""

import dataclasses
import itertools
import signal

import torch

import parallel
from lessons.bench.timing import say, Table, write_json
from safe.flags import check_parts, dashed, replayable, Settings, SIZES
from safe.reports import parameters_in_words
from safe.sizes import BadInput
from theory.clock import stage_to_rank_in
from theory.memory import ROOM, needed_bytes
from theory.speed import describe_machine, mfu, mfu_note, predict, ring_hides


def divisors(n):
    return [i for i in range(1, n + 1) if n % i == 0]


WORTH = (  # (schedule, --virtual-stages). GPipe keeps more, V-Min's bubble grows with m, DualPipeV needs an overlap.
    ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 1), ("v-half", 1))
SPLIT = "zb-h1", "zb-v", "v-half"  # these split backward: W must come late, so blocks are not recomputed


def is_taken(s, config, gpus, node):
    """Whether train.py takes layout s, on nodes of so many GPUs."""
    try:
        check_parts(s, config, gpus, min(gpus, node), gpus)
    except BadInput:
        return False
    most = config.n_layer + 2
    return s.pp <= most and len(stage_to_rank_in(s)) <= most


def axes_of(config, gpus, batch_size, dtype, machine):
    """Layouts by their axes alone: tp inside a node, cp where attention hides a ring inside a node."""
    for tp, cp, pp, kind in itertools.product(*[divisors(gpus)] * 3, ("ring", "ulysses")):
        own = config.seq_len // cp
        hides = max(ring_hides(machine.attention_with(own), machine.link, parallel.PRECISIONS[dtype]))
        s = Settings(dp=gpus // (tp * cp * pp), tp=tp, cp=cp, pp=pp, cp_kind=kind, dtype=dtype, batch_size=batch_size)
        if s.dp * tp * cp * pp == gpus and (own >= hides if cp > 1 else kind == "ring"):
            yield s


def all_layouts(config, gpus, batch_size, dtype, machine):
    """Every layout that train.py takes and that may be fast: of 2^n sequences a micro-batch, or one if sequences are
    cut."""
    for layout in axes_of(config, gpus, batch_size, dtype, machine):
        if not is_taken(layout, config, gpus, machine.node):
            continue
        replicas, each, local = layout.dp * layout.cp, batch_size // layout.dp, machine.node // layout.tp
        shards = [(zero, within) for zero in range(4 if replicas > 1 else 1)
                  for within in [None] + [local] * (zero > 0 and 1 < local < replicas)]  # a node's replicas, if pp = 1
        sizes = [1 << log for log in range(each.bit_length() if layout.cp == 1 else 1) if each % (1 << log) == 0]
        for size, (schedule, v), (zero, within), recompute, sp, ep in itertools.product(
                sizes, WORTH[:None if layout.pp > 1 else 1], shards, ("none", "mlp", "attention", "block"),
                {False, layout.tp > 1}, divisors(max(1, config.experts))):
            m = each // size
            worth = schedule not in SPLIT or m >= layout.pp and recompute == "none"
            s = dataclasses.replace(layout, zero=zero, zero_within=within, schedule=schedule, virtual_stages=v,
                                    micro_batches=m, recompute=recompute, sp=sp, ep=ep)
            if worth and is_taken(s, config, gpus, machine.node):
                yield s


SHOWN = ("dp", "tp", "sp", "pp", "cp", "cp_kind", "ep", "zero", "zero_within", "schedule", "virtual_stages",
         "micro_batches", "recompute")


def describe_layout(s):
    """train.py's flags for a layout."""
    plain = Settings()
    given = {name: getattr(s, name) for name in SHOWN if getattr(s, name) != getattr(plain, name)}
    return " ".join(f"{dashed(name)} {value}" for name, value in given.items()).replace(" True", "")


def describe_model(a):
    """The preset, the flags that change it, and its parameters."""
    flags = "".join(f" {dashed(name)} {getattr(a, name)}" for name in SIZES if getattr(a, name) is not None)
    return f"{a.model}{flags}, {parameters_in_words(a.config)}"


def rows_of(a):
    """A row of `plan`'s table for each layout that fits, fastest first. A layout gets one row, for its fastest
    micro-batches and recomputing. `limits`: what takes most of the step beside computing, and its share."""
    config, machine = a.config, a.machine
    candidates = []
    for s in all_layouts(config, a.gpus, a.batch_size, a.dtype, machine):
        on_gpus = dataclasses.replace(s, cuda_graphs="on" if replayable(s, config) else "off")
        candidates.append((predict(config, on_gpus, machine), s))
    candidates.sort(key=lambda pair: sum(pair[0]))
    tokens, seen = a.batch_size * config.seq_len / a.gpus, set()
    for costs, s in candidates:
        key = describe_layout(dataclasses.replace(s, micro_batches=1, virtual_stages=1, recompute="none"))
        if key in seen or max(needed := needed_bytes(config, s)) > ROOM * machine.memory:
            continue
        seen.add(key)
        step = sum(costs)
        shares = {axis: 100 * seconds / step for axis, seconds in costs._asdict().items()}
        limit = max(shares.keys() - {"compute"}, key=shares.get)
        yield dict(layout=describe_layout(s), ms=1e3 * step, tokens=tokens / step, gib=max(needed) / 2**30,
                   ranks=" ".join(f"{n / 2**30:.1f}" for n in needed) if s.pp > 1 else "",
                   mfu=mfu(config, tokens / step, machine.peak), settings=dataclasses.asdict(s),
                   limits=f"{limit} {shares[limit]:.0f} %", **shares)


def plan(a):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` may close the pipe
    config, machine = a.config, a.machine
    say(f"{describe_model(a)}, {a.dtype}, on {a.gpus} GPUs, {a.batch_size} sequences of "
        f"{config.seq_len} a step\n{describe_machine(machine)}{mfu_note(config)}")
    table = Table("layouts that fit, fastest first; GiB of the fullest rank; bubble, and traffic that nothing hides, "
                  "in % of the step", {
        "ms": "ms:>10,.1f", "tokens": "tokens/s GPU:>12,.0f", "mfu": "MFU %:>5.1f", "gib": "GiB:>6.1f",
        **{axis: f"{axis} %:>8.1f" for axis in ("bubble", "dp", "tp", "cp", "ep", "pp")}, "layout": "layout:<80",
        "ranks": "GiB of each pipeline rank:<1"})
    for row in itertools.islice(rows_of(a), a.top):
        table.row(**row)
    if not table.rows:
        say(f"\nnothing divides batch and heads and fits {ROOM:.0%} of {machine.memory / 2**30:.0f} GiB: give more "
            "--gpus, or another --batch-size")
    write_json(a, torch.device("cpu"), table)
