"""What divides what, and what excludes what: which sizes and layouts cannot be, and which ones near them can?

    python train.py --plain --n-embd 130 --n-head 4

The one table. A row is (what is wrong, if it is not 0 or False; the line that says so, and values that work). The first
wrong one counts: those behind it rely on it. Each mode refuses what it finds, before processes meet; `bench.py plan`
proposes only layouts in which nothing is wrong.
"""

import itertools
import math

from further.bad_input import reject
from further.lists import schedule_of, size_of_schedule
from further.schedules import SCHEDULES


def multiple(n, of):
    """The smallest multiple of `of` that is not below n."""
    return -(-n // of) * of


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def near(n, total):
    """The divisors of `total` that are next to n, as text."""
    below = [d for d in divisors(total) if d < n][-1:]
    return " or ".join(map(str, below + [d for d in divisors(total) if d > n][:1]))


def divides(flag, n, total, what):
    """The row that says that n must divide `total` of something."""
    return total % n, f"{flag} {n} does not divide the {total} {what}: give {flag} {near(n, total)}"


def what_sizes_divide(c, called):
    """Of a GPTConfig. called(field): what users call it."""
    n_embd, n_head = map(called, ("n_embd", "n_head"))
    size = getattr(c, "head_size", 0)
    yield not size and c.n_embd % c.n_head, (
        f"{n_embd} {c.n_embd} is not a multiple of {n_head} {c.n_head}: give {n_embd} {multiple(c.n_embd, c.n_head)}")
    if c.arch == "llama":
        yield divides(called("n_kv_head"), c.kv_heads, c.n_head, f"heads of {n_head}")
        name, width, heads = (called("head_size"), size, 1) if size else (n_embd, c.n_embd, c.n_head)
        yield c.head_dim % 2, (
            f"{name} {width} makes heads of {c.head_dim} numbers, and rotary positions turn pairs: give {name} "
            f"{multiple(width, 2 * heads)}")
    if c.experts:
        experts, top_k, expert_every = map(called, ("experts", "top_k", "expert_every"))
        yield c.experts < c.top_k, (
            f"{experts} {c.experts} is less than the {c.top_k} that a token goes through: give {top_k} {c.experts} or "
            f"{experts} {max(4, c.top_k)}")
        yield c.expert_every > c.n_layer, (
            f"{expert_every} {c.expert_every} must be at most the number of blocks, {c.n_layer}: give {expert_every} "
            f"{c.n_layer}")


def what_ranks_divide(s, c, world=1, node=0):
    """Of a layout, pipelines apart. world: how many processes there are; 1: as many as it needs will be started. node:
    how many of them are on this machine, if there are others."""
    others = s.tp * s.pp * s.cp
    dp = f"--dp {world // others}" if world % others == 0 else "--tp 1 --pp 1 --cp 1 and leave --dp out"
    yield world not in (1, s.dp * others), (
        f"--dp {s.dp} x --tp {s.tp} x --pp {s.pp} x --cp {s.cp} needs {s.dp * others} processes, {world} were started: "
        f"give {dp}")
    yield node and node % s.tp, (
        f"--tp {s.tp} would reach over the edge of a node with {node} processes, though tp sends in every layer: give "
        f"--tp {math.gcd(s.tp, node or 1)}")
    yield s.recompute_blocks and s.recompute == "none", (
        f"--recompute-blocks {s.recompute_blocks} says how many blocks, not what of them runs again: give --recompute "
        "mlp, too")
    yield from what_tp_and_cp_divide(s, c, world)
    yield from what_ep_divides(s, c, world)
    unit = s.dp * s.micro_batches
    yield s.batch_size % unit, (
        f"--batch-size {s.batch_size} is not a multiple of --dp {s.dp} x --micro-batches {s.micro_batches}: give e.g. "
        f"--batch-size {multiple(s.batch_size, unit)}")
    yield divides("--zero-within", s.zero_within or s.replicas, s.replicas, "ranks that average gradients")
    yield s.zero_within and not s.zero, (
        f"--zero-within {s.zero_within} is for ZeRO, which is off: give --zero 1, 2 or 3")


def what_tp_and_cp_divide(s, c, world):
    kind = "heads" if c.kv_heads == c.n_head else "heads of keys and values"
    yield divides("--tp", s.tp, c.kv_heads, f"{kind} of the model (did you mean --dp {s.tp}?)")
    least = min(c.vocab_size, c.hidden)
    yield s.tp > least, (
        f"--tp {s.tp} is more than the vocabulary's {c.vocab_size} tokens, or the hidden layer's {c.hidden} numbers: "
        f"give --tp {max(n for n in range(1, min(least, s.tp) + 1) if s.tp % n == 0)}")
    able = [n for n in divisors(c.kv_heads)[1:] if world == 1 or world % (n * s.pp * s.cp) == 0]
    instead = f"give --tp {able[0]}, say, or " if able else ""
    yield s.sp and s.tp == 1, f"--sp cuts tokens over --tp: {instead}leave --sp out"
    parts = parts_of_sequence(s)
    yield c.seq_len % parts, (
        f"{'--sp ' * s.sp}--tp {s.tp} --cp {s.cp}: sequences of {c.seq_len} tokens cannot be cut into {parts} parts: "
        f"give --seq-len {multiple(c.seq_len, parts)}")
    if s.cp_kind == "ulysses":
        wrong, line = divides("--cp", s.cp, c.kv_heads // s.tp, f"{kind} of a rank")
        yield wrong, f"--cp-kind ulysses: {line} or --cp-kind ring"
    if s.optimizer == "muon":  # it steps whole matrices, in equal parts
        wrong, line = divides("--tp", s.tp, c.hidden, "numbers of the MLP's width")
        yield wrong, f"--optimizer muon: {line}"


def parts_of_sequence(s):
    """In how many parts of one length --cp and --sp cut each sequence."""
    chunks = 2 * s.cp if s.cp > 1 and s.cp_kind == "ring" else s.cp
    return math.lcm(chunks, s.cp * s.tp if s.sp else 1)


def what_ep_divides(s, c, world):
    if not c.experts:
        of_a_folder = getattr(s, "init_from", "") or s.resume  # whose model has what it has
        instead = "" if of_a_folder else f"give --experts {2 * s.ep}, say, or "
        yield s.ep > 1, f"--ep {s.ep} shares out experts, and the model has none: {instead}leave --ep out"
    shared = math.gcd(s.dp, c.experts)
    more = f" or --dp {multiple(s.dp, s.ep)}" if world == 1 and c.experts % s.ep == 0 else ""
    yield shared % s.ep, (
        f"--ep {s.ep} does not divide both --dp {s.dp} and the {c.experts} experts: give --ep {near(s.ep, shared)}"
        f"{more}")


def what_stages_divide(s, c):
    """Of a layout whose s.schedule is read."""
    yield too_many_stages(s, c, s.virtual_stages)  # asked first, because a list of so many takes long to make
    lists = schedule_of(s.schedule)(s.pp, 2 * s.pp, s.virtual_stages)
    p, m, a_rank = size_of_schedule(lists)
    yield s.schedule not in SCHEDULES and (s.pp, s.micro_batches) != (p, m), (
        f"--schedule {s.schedule} is of {p} ranks and {m} micro-batches: give --pp {p} --micro-batches {m}")
    yield s.pp == 1 and s.virtual_stages > 1 or s.virtual_stages not in (1, a_rank), (
        f"--virtual-stages {s.virtual_stages} is for --schedule interleaved and --pp 2 or more: leave it out")
    yield too_many_stages(s, c, a_rank)


def too_many_stages(s, c, a_rank):
    """The row that says that there are layers for so many stages on each rank."""
    most = c.n_layer + 2
    fewer = f"--pp {most // a_rank}" if s.virtual_stages == 1 else f"--virtual-stages {max(1, most // s.pp)}"
    return s.pp * a_rank > most, (
        f"--pp {s.pp} x {a_rank} stages a rank is more than the model's {c.n_layer} layers with embedding and head: "
        f"give {fewer} or fewer")


def misfit(*tables):
    """The line of the first row that is wrong, or None."""
    return next((line for wrong, line in itertools.chain(*tables) if wrong), None)


def refuse_misfit(s, c, called, world=1, node=0):
    """BadInput for flags s that do not fit the GPTConfig c, or each other."""
    why = misfit(what_sizes_divide(c, called), what_ranks_divide(s, c, world, node), what_stages_divide(s, c))
    reject(why, why)
