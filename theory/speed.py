"""How long a step takes, from FLOPs, bytes and a machine's rates: computation, traffic that is hidden or not, bubble.

Read with: Ultra-Scale Playbook, "finding the best training configuration" and its formulas.
"""

import dataclasses
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch

import parallel
from further.pieces import matrices
from theory.clock import bubble, is_fast, lists_of, simulate, stage_to_rank_in, stages_in
from theory.memory import elements_kept, elements_of, table_elements
from theory.traffic import (
    contents, GATHER, HALVES, in_two_levels, Message, messages, recomputed, SCATTER, sent, shards_of, tokens_of,
    widths)


# -------------------------------------------------------------------------------------------------------------- reports

PEAK_TFLOPS = {  # dense 16-bit, by the maker's datasheet
    "H[18]00 PCIe": 756, "H[12]00 NVL": 835, "H[128]00": 989, "A[18]00": 312, "B200": 2250, "L40S": 362, "L4": 121,
    "RTX 4090$": 165, "RTX 3090$": 71, "V100 PCIE": 112, "V100": 125, "T4": 65}


def peak_flops(device):
    """FLOP/s of this GPU by its datasheet. None for an unknown GPU, whose MFU would be a guess."""
    name = torch.cuda.get_device_name(device).replace("-", " ") if device.type == "cuda" else ""
    return next((1e12 * value for key, value in PEAK_TFLOPS.items() if re.search(rf"\b{key}(\b|$)", name)), None)


@dataclass(frozen=True)
class Machine:
    """The rates from which `predict` computes a step's time. They are reached in practice, except `peak`."""
    name: str
    peak: float           # FLOP/s by the datasheet, dense, 16-bit, which MFU is a share of; None: not known, no MFU
    memory: float         # bytes
    matmul: float         # FLOP/s of a block's matrix products with many tokens
    attention: float      # FLOP/s from q, k, v to the heads' outputs, forward and backward, counting only scores that
                          # the mask leaves. In MACHINES: with 1024 tokens
    elementwise: float    # bytes/s of a block's other operations, by `passes`' bytes; above hbm where they are fused
    loss: float           # logits/s through cross-entropy, forward and backward
    hbm: float            # bytes/s of a copy, read plus written
    link: float = None         # bytes/s from one GPU to another of its node
    hop: float = None          # s of latency of a collective inside a node
    network: float = None      # bytes/s from one GPU to another node; None: not known
    network_hop: float = 8e-6  # s of latency of a collective between nodes
    node: int = 8              # GPUs of a node
    long_attention: float = None  # what attention reaches in ever longer rows; None: `attention` has the model's length
    start: float = 0.0  # s that a block, forward and backward, takes besides: gaps between kernels, tiles that leave a
                        # GPU half empty
    estimated: tuple = ("network", "network_hop")  # names of the rates that nobody has measured

    def attention_with(self, tokens, head_dim=64):
        """FLOP/s of attention over so many tokens. Long rows are faster, because each query has a fixed cost, too. In
        MACHINES rates are those of heads of 64; heads of 128 have 1.2 to 1.4 times as many FLOP/s (docs/results.md)."""
        slow = 1 / self.attention
        fast = 1 / (self.long_attention or self.attention)
        wide = 1.4 if self.long_attention and head_dim > 64 else 1.0
        return wide / (fast + (slow - fast) * 1024 / max(1024, tokens))


RATES = {  # field of Machine: in words, times what
    "matmul": ("products {:,.0f} GFLOP/s", 1e-9), "start": ("a block {:.0f} us besides", 1e6),
    "attention": ("causal attention {:,.0f} GFLOP/s", 1e-9),
    "long_attention": ("of long sequences {:,.0f} GFLOP/s", 1e-9), "hbm": ("copies {:,.0f} GB/s", 1e-9),
    "elementwise": ("a block's other operations {:,.0f} GB/s", 1e-9), "loss": ("loss {:,.0f} logits/us", 1e-6),
    "link": ("links in a node {:.1f} GB/s", 1e-9),
    "hop": ("{:.0f} us a collective there", 1e6), "network": ("network {:.1f} GB/s a GPU", 1e-9),
    "network_hop": ("{:.0f} us a collective over it", 1e6)}

# `peak` is the datasheet's, `memory` what CUDA reports. Rates were measured on four GPUs of a kind, but those that are
# `estimated`. --machine FILE takes rates that you have measured. All are of bf16.
H200 = Machine(
    "H200", peak=989e12, memory=150e9, matmul=660e12, attention=270e12, long_attention=450e12, elementwise=5.95e12,
    loss=6.5e11, hbm=4.19e12, link=350e9, hop=1.6e-5, network=45e9, start=1.6e-4)
H100 = dataclasses.replace(
    H200, name="H100", memory=85e9, matmul=720.7e12, attention=274.3e12, long_attention=430e12, elementwise=4.08e12,
    loss=4.798e11, hbm=2.761e12, link=333.8e9, hop=5e-5, start=0.0,
    estimated=("long_attention", "network", "network_hop"))
MACHINES = {"h200": H200, "h100": H100}


def call_seconds(op, elements, width, machine, n, here):
    """Seconds of one collective in a group of n ranks, `here` of them on each node: latency + bytes / bandwidth.

    If a node has several of the ranks but not all, the group works in two levels, and each rank sends its part through
    its own network card. If a node has one of them, that rank has a card, too.
    """
    if 1 < here < n and op in ("all_reduce", *HALVES):
        return sum(times * call_seconds(part, some, width, machine, *((here, here) if near else (n // here, 1)))
                   for times, part, some, near in in_two_levels(op, elements, here, n // here, here - 1))
    hop, rate = (machine.hop, machine.link) if here == n else (
        machine.network_hop, min(machine.link, machine.network))
    return hop + sent(op, elements, width, n) / rate


class Costs(NamedTuple):
    """Predicted seconds of a step on the busiest pipeline rank, whose sum the step takes."""
    compute: float      # forward and backward of all micro-batches
    tp: float           # tensor parallelism's collectives, less the time that fast/ hides under weight gradients
    cp: float           # context parallelism's traffic, less the time that attention hides
    ep: float           # expert parallelism's all-to-alls, which nothing hides
    bubble: float
    pp: float           # a pipeline's transfers that a rank waits for
    dp: float           # data parallelism's collectives, less the time that computation hides
    optimizer: float


def passes(config, tp=1, sp=False, ep=1, routed=False):
    """(F, I, W): elements that a block's kernels read and write for a token, outside of matrix products and attention.

    F: two layer norms 4C, two residual sums 6C, GeLU 2 inner; I: 10C, 6C, 3 inner; W: the sums of the biases'
    gradients, 2C + (3C + inner). tp cuts (3C + inner), sp also the other C. A Llama's SwiGLU takes 3 inner and 5 inner,
    its rotary positions read and write q, k, v each way, and it has no biases. routed: the block has experts, of equal
    loads. Then a token has a row of C for each of its experts. Sorting reads the token and writes its rows, weighing
    reads the rows and writes the token, and the router reads it: about 3 of each. With ep > 1 rows are sorted by expert
    and back once more.
    """
    c = config.n_embd
    k = config.top_k + config.shared_experts if routed else 1
    own = c / tp if sp else c
    rows = k * c
    inner = k * config.hidden / tp
    more = routed * (3 * (c + rows) + 4 * rows * (ep > 1)) + (config.arch == "llama") * 2 * config.qkv_width / tp
    wide = config.up_width // config.hidden  # layers that the activation reads
    biases = config.biased * (2 * own + 3 * c / tp + inner)
    return 10 * own + (wide + 1) * inner + more, 16 * own + (2 * wide + 1) * inner + more, biases


def operations(config, tokens):
    """{operation of a block, then of the head: (FLOPs, the fewest bytes that it reads and writes)}, forward of so many
    tokens in 16 bits. FLOPs of what is no product are counted off kernels.py; of the scores those that the mask
    leaves."""
    width = 2
    c = config.n_embd
    hidden = config.hidden
    v = config.vocab_size

    def product(n_in, n_out):
        return 2 * tokens * n_in * n_out, width * (tokens * (n_in + n_out) + n_in * n_out)

    def numbers(flops, moved, count):
        return flops * tokens * count, width * moved * tokens * count

    heads = config.heads_width
    wide = config.up_width
    scores = 2 * config.seq_len * heads * tokens, width * tokens * (config.qkv_width + heads)
    return {"layer norm": numbers(8, 2, c), "q, k, v": product(c, config.qkv_width),
            "attention": scores, "projection": product(heads, c), "x + y": numbers(1, 3, c),
            "MLP, up": product(c, wide), "GELU": numbers(8, 1 + wide / hidden, hidden), "MLP, down": product(hidden, c),
            "head": product(c, v), "cross-entropy": numbers(4, 1, v)}


def block_seconds(config, s, machine, routed):
    """(F, I, W, what I takes more where it runs a part of the block again): seconds that the GPU computes in one block
    for one micro-batch. routed: the block has experts."""
    narrow, wide = widths(s)
    tokens = tokens_of(config, s)
    met = here = 1  # MLPs: a token's, this rank's
    if routed:
        met, here = (n + config.shared_experts for n in (config.top_k, config.experts // s.ep))
    attention, mlp = matrices(config, s.tp)
    product = 2 * (attention + met * mlp) * tokens / machine.matmul + machine.start / 3  # I and W take as long as F
    scores = attention_seconds(config, s, machine)                              # backward: 2.5 times as long
    f, i, w = (product + tokens * narrow * n / machine.elementwise for n in passes(config, s.tp, s.sp, s.ep, routed))
    into_messages = (attention + here * mlp) * (2 * narrow + 2 * wide) / machine.hbm
    dropped = tokens * narrow * (4 * config.n_embd + (config.up_width + config.hidden) / s.tp) / machine.elementwise
    f += scores
    i += 2.5 * scores + dropped * (s.recompute == "mlp")  # norms run again in every block
    again = {"none": 0.0, "mlp": 2 * met * mlp * tokens / machine.matmul, "block": f}[s.recompute]
    return f, i, w + into_messages, again


def stage_seconds(config, s, machine, stages):
    """(F, I, W): seconds of one micro-batch on a rank with these stages, in layout s, each kind of work at its rate.

    They are the GPU's. A step that no CUDA graph replays takes longer where the CPU issues kernels more slowly.
    """
    tokens = tokens_of(config, s)
    blocks, routed, _, head = contents(config, stages.values())
    twice, twice_routed = recomputed(config, s, stages.values())
    seconds = [0.0, 0.0, 0.0]
    for with_experts, n, n_again in (False, blocks - routed, twice - twice_routed), (True, routed, twice_routed):
        if n:
            *each, again = block_seconds(config, s, machine, with_experts)
            seconds = [total + n * one for total, one in zip(seconds, each)]
            seconds[1] += n_again * again
    if head:
        logits = tokens * config.vocab_size / s.tp
        product = 2 * config.n_embd * logits / machine.matmul
        loss = logits / machine.loss
        parts = product + loss / 3, product + loss * 2 / 3, product
        seconds = [total + part for total, part in zip(seconds, parts)]
    return seconds


def attention_seconds(config, s, machine):
    """Seconds of attention's forward in one block for one micro-batch: Q K^T and P V, half masked, take 2 T H D FLOPs a
    token. The kernels of a ring of N see T/N tokens at once."""
    rate = machine.attention_with(config.seq_len // (s.cp if s.cp_kind == "ring" else 1), config.head_dim)
    return 2 * config.seq_len * config.heads_width / s.tp * tokens_of(config, s) / rate


def ring_hides(flops, link, dtype):
    """(forward, backward): from how many tokens T/N of a rank on attention hides a ring's traffic. flops: F, the FLOP/s
    of attention. link: W, bytes/s between ranks. In bf16 they are 2 F/W and 2.4 F/W.

    In a ring's step a rank sends K and V of T/N tokens and, by the zigzag, computes half of (T/N)^2 scores. A sequence:

        forward     2 x T/N x C x 2 bytes               2 products:  2 x (T/N)^2 x C FLOPs      T/N >= 4/2 F/W
        backward    as many, with dK and dV in float32  5 products:  5 x (T/N)^2 x C FLOPs      T/N >= (4 + 8)/5 F/W
    """
    narrow = dtype.itemsize
    wide = parallel.master_dtype(dtype).itemsize
    return 2 * narrow / 2 * flops / link, (2 * narrow + 2 * wide) / 5 * flops / link


def overlaps(config, tokens, n):
    """{strategy: (bytes that a rank sends, FLOPs of the products beside it)}, with n ranks and `tokens` on each.

    Traffic can hide if bytes / W <= FLOPs / F, for links of W bytes/s and products of F FLOP/s. With weights of
    `narrow` bytes (2), gradients of `wide` bytes (4) and an MLP of 4C the ratios are:

        dp                 gradients, under backward                wide (N-1)/N / (2 tokens)             F/W
        ZeRO-3, forward    weights, under the block before          narrow (N-1)/N / (2 tokens)           F/W
        ZeRO-3, backward   weights, gradients, under one block      (narrow + wide) (N-1)/N / (4 tokens)  F/W
        tp                 two all-reduces, by a block's products   narrow (N-1) / (6C)                   F/W
        pp                 activations, under a stage of L/N        narrow N / (24 C L)                   F/W

    K cancels in the first three, tokens in the last two.
    """
    narrow, wide = 2, 4
    k = int(sum(matrices(config)))
    x = tokens * config.n_embd
    gather = sent(HALVES[1], k, narrow, n)
    scatter = sent(HALVES[0], k, wide, n)
    return {"dp": (2 * scatter, 4 * k * tokens), "ZeRO-3, forward": (gather, 2 * k * tokens),
            "ZeRO-3, backward": (gather + scatter, 4 * k * tokens),
            "tp": (2 * sent("all_reduce", x, narrow, n), 2 * k * tokens / n),
            "pp": (sent("isend", x, narrow, 2), 2 * k * tokens * config.n_layer / n)}


def context_seconds(config, s, machine, stages, spent):
    """Seconds of context parallelism's traffic in a training step that attention does not hide.

    A rank of a ring sends keys and values on while it computes with them, in N-1 of N steps. In backward dK and dV
    follow a step behind, so nothing hides the last ones. Nothing hides Ulysses' all-to-alls.
    """
    total = spent["cp"].total()
    if s.cp == 1 or s.cp_kind == "ulysses":
        return total
    again = recomputed(config, s, stages.values())[0] * (s.recompute == "block")
    runs = 3.5 * contents(config, stages.values())[0] + again  # of attention's forward; backward takes 2.5 times
    over = runs * s.micro_batches * attention_seconds(config, s, machine) * (s.cp - 1) / s.cp
    return max(spent["cp"]["their gradients"] / (s.cp - 1), total - over)


# Hidden traffic still costs time, because it takes memory bandwidth from the computation. A byte that is sent is read
# here and written there, and the sum reads it and the byte that it is added to: 4 bytes moved. On an H200 that costs
# 4 x 330 / 4070 GB/s = 32 % of the traffic's time, over a network less. DDP of GPT-2 XL on four H200s saved 64 % of the
# traffic's time; these 32 % and the last bucket are the rest.
MOVED = 4


def groups_of(s):
    """{axis of a Message: (ranks in its groups, distance of neighbours)}, tp innermost. Other axes carry a few numbers.
    """
    replicas = s.replicas
    shards = shards_of(s)
    between = replicas * s.tp  # stages
    return {
        "tp": (s.tp, 1),
        "cp": (s.cp, s.tp),
        "ep": (s.ep, s.tp * s.cp),
        "shard": (shards, s.tp),
        "replicate": (replicas // shards, s.tp * shards),
        "same_experts": (replicas // s.ep, s.tp * s.ep),
        "pp": (min(s.pp, 2), between),
        "embedding": (min(s.pp, 2), s.pp * between // 2)}


def seconds_by_axis(config, s, machine, items):
    """({axis: {purpose: seconds of its Messages}}, {axis: seconds that its traffic costs hidden, by MOVED})."""
    spent = defaultdict(Counter)
    touched = Counter()
    groups = groups_of(s)
    for item in items:
        n, distance = groups.get(item.axis, (1, 1))
        if n == 1:
            continue
        local = max(1, machine.node // distance)
        here = n if n <= local else local if n % local == 0 else 1  # how many of the group's ranks a node has
        call = item.op, item.elements, item.width
        spent[item.axis][item.what] += item.times * call_seconds(*call, machine, n, here)
        touched[item.axis] += item.times * MOVED / machine.hbm * sent(*call, n)
    return spent, touched


def messages_of_parameters(config, s, stages):
    """Messages of G and A of this rank's pieces, as with_weights places them, each as large as the mean piece, and of
    the sum of a tied embedding's ends."""
    pieces = [i for run in stages.values() for i in run]
    ends = pieces.count(0) + pieces.count(config.n_layer + 1)
    m = s.micro_batches
    narrow, wide = widths(s)
    gathers = {0: 0, 3: m * (2 * len(pieces) - ends)}.get(s.zero, len(pieces))
    averages = len(pieces) * (m if s.zero > 1 else 1)
    shards = shards_of(s) if s.zero else 1
    elements = Counter()
    for (experts, _), n in elements_of(config, s, stages.values()).items():
        elements["same_experts" if experts else "shard"] += int(n / len(pieces))
    for axis, n in elements.items():
        yield Message("weights", GATHER, axis, n, narrow, gathers)
        yield Message("gradients", SCATTER if s.zero else "all_reduce", axis, n, wide, averages)
    yield Message("averages of shards", "all_reduce", "replicate", elements["shard"] // shards, wide, len(pieces))
    if config.tied and ends == 1:
        yield Message("tied embedding", "all_reduce", "embedding", int(table_elements(config, s) / shards), wide)


def data_seconds(s, spent, touched, count, forward, backward):
    """Seconds of data parallelism's traffic that computation does not hide. count: pieces on a rank; forward, backward:
    seconds of a micro-batch.

    A G is one computation ahead, so nothing hides the first one; then forward hides those of ZeRO-1 and 2, and all
    computation those of ZeRO-3. Nobody waits for an A, and backward hides all but the last one.
    """
    m = s.micro_batches
    gather, reduce = (spent["shard"][what] + spent["same_experts"][what] for what in ("weights", "gradients"))
    if s.zero == 3:
        seen = max((gather / 2 + reduce) / (m * count), gather + reduce - m * (forward + backward))
    else:
        seen = max(reduce / count, reduce - (m if s.zero == 2 else 1) * backward)
        seen += max(gather / count, gather - forward)
    lost = min(1.0, (touched["shard"] + touched["same_experts"]) / max(gather + reduce, 1e-9))
    between = spent["replicate"].total()  # starts when all else has arrived
    return seen + (gather + reduce - seen) * lost + between


def predict(config, s, machine):
    """Costs of a training step of train.py in layout s."""
    m = s.micro_batches
    stages = max((stages_in(s, config, rank) for rank in range(s.pp)),
                 key=lambda stages: sum(stage_seconds(config, s, machine, stages)))
    f, i, w = stage_seconds(config, s, machine, stages)
    items = messages(config, s, stages, messages_of_parameters(config, s, stages))
    spent, touched = seconds_by_axis(config, s, machine, items)

    tp = spent["tp"].total()
    if is_fast(s) and tp:  # sums of dX travel beside dW
        tp -= min(spent["tp"]["sums of dX"], m * w) * (1 - touched["tp"] / tp)
    ep = spent["ep"].total()
    cp = context_seconds(config, s, machine, stages, spent)
    waits = (tp + cp + ep) / m / 2  # a micro-batch's, in forward, and as long in backward
    costs = f + waits, i + waits, w
    idle = bubble(s.schedule, s.pp, len(stage_to_rank_in(s)) // s.pp, *costs) if m >= s.pp else None
    if idle is None:
        idle = max(simulate(lists_of(s.schedule, s.pp, m, s.virtual_stages), *costs).idle)
    # Ranks wait for transfers where the pipeline fills and drains, once a stage, and at the end for a tied embedding's
    # gradient.
    pp = spent["pp"]["activations"] / m * (s.pp - 1) + spent["embedding"].total()
    pieces = sum(map(len, stages.values()))
    dp = data_seconds(s, spent, touched, pieces, f + waits, i + w + waits)
    # Clipping reads gradients, AdamW reads four numbers and writes three, and weights in the layers' dtype.
    narrow, wide = widths(s)
    _, stepped, _ = elements_kept(config, s, stages.values())
    optimizer = stepped * (8 * wide + narrow * (narrow < wide)) / machine.hbm
    return Costs(m * (f + i + w), tp, cp, ep, idle, pp, dp, optimizer)


def describe_machine(machine):
    """Its name and memory, a line of the rates that were measured, and one of those that are estimates."""
    text = f"{machine.name}, {machine.memory / 2**30:.0f} GiB"
    for title, estimated in ("measured", False), ("estimated", True):
        known = [words.format(getattr(machine, name) * unit) for name, (words, unit) in RATES.items()
                 if (name in machine.estimated) == estimated and getattr(machine, name)
                 and (machine.network or name != "network_hop")]
        text += f"\n{title + ':':<11}{', '.join(known)}" * bool(known)
    return text


def mfu_note(config):
    """A line about attention's FLOPs, if an MFU counts half of them, those that the mask leaves. To count all of them,
    as others do, is a quarter too much at most up to T = 4C. Beyond that a fast kernel's MFU would pass 100 %."""
    half = config.seq_len > 4 * config.n_embd
    return "MFU counts half of attention's FLOPs, those that the mask leaves: sequences are longer than 4C" * half


def counted_flops(config):
    """FLOPs a token that an MFU counts: 6 (K - T C) + 12 L C T, of longer sequences 6 L C T."""
    scores = config.n_layer * config.heads_width * config.seq_len
    return config.flops_per_token() - 6 * scores * bool(mfu_note(config))


def mfu(config, tokens, peak):
    """Percent of `peak` FLOP/s that so many tokens/s a GPU use; None if the peak is not known."""
    return 100 * tokens * counted_flops(config) / peak if peak else None
