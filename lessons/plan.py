"""Layouts that fit, with their predicted times."""

import dataclasses
import itertools
import math
import signal

import torch

import train
from lessons.measure import say, Table, write_json
from safe.flags import Settings
from theory.memory import ROOM, needed_bytes
from theory.speed import describe_machine, mfu, mfu_note, predict, ring_hides, splits_backward


def divisors(n):
    return [i for i in range(1, n + 1) if n % i == 0]


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
                        yield Settings(dp=dp, tp=tp, pp=pp, zero=zero, zero_within=within, schedule=schedule,
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


def plan(a):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` may close the pipe
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
