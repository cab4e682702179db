"""What divides what: which sizes and layouts cannot be, and which ones near them can?

    python train.py --plain --n-embd 130 --n-head 4

Each table has rows (what is wrong, if it is not 0 or False; the line that says so, and a value that works). The first
wrong one counts: those behind it rely on it. train.py and safe/flags.py refuse what they find, before processes meet.
"""

import itertools
import math

from further.lists import schedule_of, size_of_schedule


def multiple(n, of):
    """The smallest multiple of `of` that is not below n."""
    return -(-n // of) * of


def what_sizes_divide(c, called):
    """Of a GPTConfig. called(field): what users call it."""
    n_embd = called("n_embd")
    n_head = called("n_head")
    size = getattr(c, "head_size", 0)
    yield not size and c.n_embd % c.n_head, (
        f"{n_embd} {c.n_embd} is not a multiple of {n_head} {c.n_head}: give {n_embd} {multiple(c.n_embd, c.n_head)}")
    if c.arch == "llama":
        n_kv_head = called("n_kv_head")
        yield c.n_head % c.kv_heads, (
            f"{n_kv_head} {c.kv_heads} does not divide {n_head} {c.n_head}: give {n_kv_head} "
            f"{math.gcd(c.kv_heads, c.n_head)}")
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


def what_ranks_divide(s, c, world=1):
    """Of a layout, pipelines apart. world: how many processes there are; 1: as many as it needs will be started."""
    return itertools.chain(what_tp_and_cp_divide(s, c, world), what_ep_divides(s, c, world), what_dp_divides(s))


def what_tp_and_cp_divide(s, c, world):
    kind = "heads" if c.kv_heads == c.n_head else "heads of keys and values"
    yield c.kv_heads % s.tp, (
        f"--tp {s.tp} does not divide the model's {c.kv_heads} {kind}: give --tp {math.gcd(s.tp, c.kv_heads)}")
    least = min(c.vocab_size, c.hidden)
    yield s.tp > least, (
        f"--tp {s.tp} is more than the vocabulary's {c.vocab_size} tokens, or the hidden layer's {c.hidden} numbers: "
        f"give --tp {max(n for n in range(1, min(least, s.tp) + 1) if s.tp % n == 0)}")
    able = [n for n in range(2, c.kv_heads + 1)
            if c.kv_heads % n == 0 and (world == 1 or world % (n * s.tp * s.pp * s.cp) == 0)]
    instead = f"give --tp {able[0]}, say, or " if able else ""
    yield s.sp and s.tp == 1, f"--sp cuts tokens over --tp: {instead}leave --sp out"

    parts = parts_of_sequence(s)
    yield c.seq_len % parts, (
        f"{'--sp ' * s.sp}--tp {s.tp} --cp {s.cp}: sequences of {c.seq_len} tokens cannot be cut into {parts} parts: "
        f"give --seq-len {multiple(c.seq_len, parts)}")
    heads = c.kv_heads // s.tp
    yield s.cp_kind == "ulysses" and heads % s.cp, (
        f"--cp-kind ulysses: --cp {s.cp} does not divide the {heads} {kind} of a rank: give --cp "
        f"{math.gcd(s.cp, heads)} or --cp-kind ring")


def what_dp_divides(s):
    unit = s.dp * s.micro_batches
    yield s.batch_size % unit, (
        f"--batch-size {s.batch_size} is not a multiple of --dp {s.dp} x --micro-batches {s.micro_batches}: give e.g. "
        f"--batch-size {multiple(s.batch_size, unit)}")
    replicas = s.replicas
    within = s.zero_within or replicas
    yield replicas % within, (
        f"--zero-within {within} does not divide --dp {s.dp}{f' x --cp {s.cp}' * (s.cp > 1)}: give "
        f"--zero-within {math.gcd(within, replicas)}")
    yield s.zero_within and not s.zero, (
        f"--zero-within {within} is for ZeRO, which is off: give --zero 1, 2 or 3")


def parts_of_sequence(s):
    """In how many parts of one length --cp and --sp cut each sequence."""
    chunks = 2 * s.cp if s.cp > 1 and s.cp_kind == "ring" else s.cp
    return math.lcm(chunks, s.cp * s.tp if s.sp else 1)


def what_ep_divides(s, c, world):
    if not c.experts:
        of_a_folder = getattr(s, "init_from", "") or s.resume  # whose model has what it has
        instead = "" if of_a_folder else f"give --experts {2 * s.ep}, say, or "
        yield s.ep > 1, f"--ep {s.ep} shares out experts, and the model has none: {instead}leave --ep out"
    shared = math.gcd(s.ep, s.dp, c.experts)
    more_ranks = f" or --dp {multiple(s.dp, s.ep)}" if world == 1 and c.experts % s.ep == 0 else ""
    yield s.dp % s.ep, f"--ep {s.ep} does not divide --dp {s.dp}: give --ep {shared}{more_ranks}"
    yield c.experts % s.ep, f"--ep {s.ep} does not divide the {c.experts} experts: give --ep {shared}"


def what_stages_divide(s, c):
    """Of a layout whose s.schedule is read."""
    most = c.n_layer + 2
    for a_rank in s.virtual_stages, None:  # before there are lists of so many, and as the lists have it
        if not a_rank:
            lists = schedule_of(s.schedule)(s.pp, 2 * s.pp, s.virtual_stages)
            *_, a_rank = size_of_schedule(lists)
            yield s.pp == 1 and s.virtual_stages > 1 or s.virtual_stages not in (1, a_rank), (
                f"--virtual-stages {s.virtual_stages} is for --schedule interleaved and --pp 2 or more: leave it out")
        fewer = f"--pp {most // a_rank}" if s.virtual_stages == 1 else f"--virtual-stages {max(1, most // s.pp)}"
        yield s.pp * a_rank > most, (
            f"--pp {s.pp} x {a_rank} stages a rank is more than the model's {c.n_layer} layers with embedding and "
            f"head: give {fewer} or fewer")


def what_muon_needs(s, c, edition):
    """Whole matrices, in equal parts."""
    if s.optimizer == "muon":
        yield s.zero > edition.muon, (
            f"--optimizer muon steps whole matrices, and --zero {s.zero} keeps parts of them: give --form full"
            + " --zero 2" * (s.zero == 3))
        yield c.hidden % s.tp, (
            f"--optimizer muon: --tp {s.tp} does not divide the width of the MLP, {c.hidden}: give --tp "
            f"{math.gcd(s.tp, c.hidden)}")
        yield s.zero and s.comm == "torch" and s.device == "cpu", (
            "--comm torch --device cpu: gloo gathers no parts of unlike sizes, as --optimizer muon with --zero has "
            "them: leave --comm out")


def misfit(*tables):
    """The line of the first row that is wrong, or None."""
    return next((line for wrong, line in itertools.chain(*tables) if wrong), None)


def refuse_misfit(s, c, world, edition, called):
    """ValueError, in one line, for flags s that do not fit the GPTConfig c, each other, or an edition."""
    why = misfit(what_sizes_divide(c, called), what_ranks_divide(s, c, world), what_stages_divide(s, c),
                 what_muon_needs(s, c, edition))
    if why:
        raise ValueError(why)
