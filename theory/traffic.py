"""What each strategy sends: G and A of a rank's list, and a table of what F and B of its pieces send.

Letters: N ranks in a group, k bytes of a tensor, K parameters, B, T, C, V, L as in model.py, m micro-batches,
p pipeline ranks. Read with: CS336 lecture 7; Ultra-Scale Playbook, the chapters on each axis.
"""

from collections import Counter
from typing import NamedTuple

import torch

import parallel
from theory.clock import halves_backward, is_fast, stage_to_rank_in


def sent(op, elements, width, n, rank=0, small=0, switched=False):
    """Bytes that rank `rank` of n sends in one collective. elements: of the whole tensor that is gathered or scattered,
    of `width` bytes each; where ranks have uneven parts a tuple, how many each has, or is sent. The root is rank 0.

    Rings and, if a switch joins all ranks (`switched`), direct exchange send (N-1)/N k for half an all-reduce, k =
    elements x width. Up to `small` bytes an all-reduce is log2(N) rounds of the whole tensor. In a binomial tree each
    rank sends the whole to the roots of its subtrees. A barrier has log2(N) rounds of a byte.
    """
    if isinstance(elements, tuple):
        kept = (rank + 1) % n if op == "all_gather" else rank  # a ring passes on all but its right neighbour's
        return width * (sum(elements) - elements[kept])
    k = elements * width
    if op == "all_reduce" and k <= small:
        core = 1 << (n.bit_length() - 1)  # the largest power of two; each rank beyond it sends once, to one below
        return k if rank >= core else k * (core.bit_length() - 1 + (rank + core < n))
    if op == "all_reduce":  # N need not divide K: the last chunks are one element shorter
        chunk = [width * (elements // n + (c % n < elements % n)) for c in (rank, rank + 1)]
        return k - chunk[0] + ((n - 1) * chunk[0] if switched else k - chunk[1])
    if op == "broadcast":
        below = n if rank == 0 else min(rank & -rank, n - rank)  # ranks in this one's subtree, itself included
        return k * (below - 1).bit_length()
    return {"isend": k, "reduce": k * (rank > 0), "barrier": (n - 1).bit_length()}.get(op, (n - 1) * k // n)


HALVES = SCATTER, GATHER = "reduce_scatter_tensor", "all_gather_into_tensor"  # the two halves of an all-reduce


def in_two_levels(op, elements, inside, nodes, rank):
    """TwoLevels' parts of a collective, for rank `rank` of a node's `inside`: [(times, op, elements, on the node?)]."""
    if op != "all_reduce":
        return [(nodes, op, elements // nodes, True), (1, op, elements // inside, False)]
    mine = elements // inside + (rank < elements % inside)
    return [*((1, half, elements, True) for half in HALVES), (1, op, mine, False)]


class Message(NamedTuple):
    """One kind of collective or message of a training step.

    axis: the group that it goes through, as train.make_groups names it: "tp", "cp", "ep", "pp"; "shard", the ranks over
    which ZeRO shards, all of dp x cp or a part of it; "replicate", those with the same shard; "dp_cp", dp x cp where
    the caller waits; "embedding", a pipeline's first and last stage; "same_experts", the ranks that have them; "world",
    all ranks; "all", all ranks in the trainer's own group.
    """
    what: str
    op: str
    axis: str
    elements: object  # as `sent` takes them
    width: int        # bytes an element
    times: int = 1    # how often in a step


# ------------------------------------------------------------------------------------------------- sizes of a layout

def blocks_of(config, runs):
    """The blocks in a rank's runs of pieces, by number from 1."""
    return [i for run in runs for i in run if 1 <= i <= config.n_layer]


def contents(config, runs):
    """(blocks, blocks with experts, embeddings, heads): how many there are of each in a rank's runs of pieces."""
    pieces = [i for run in runs for i in run]
    blocks = blocks_of(config, runs)
    routed = sum(config.has_experts(i - 1) for i in blocks) if config.experts else 0
    return len(blocks), routed, pieces.count(0), pieces.count(config.n_layer + 1)


def runs_again(config, s, runs):
    """The blocks of a rank's runs of pieces of which backward runs a part again."""
    blocks = [blocks_of(config, [run])[:s.recompute_blocks or None] for run in runs]
    return blocks if s.recompute != "none" else []


def recomputed(config, s, runs):
    """How many these are: (blocks, blocks with experts)."""
    return contents(config, runs_again(config, s, runs))[:2]


def backward_runs(s):
    """How often a piece's backward runs for a micro-batch. The reference's I and W each run it, and what sends in it
    sends twice; fast/'s W takes what I has kept."""
    return 2 if not is_fast(s) and halves_backward(s.schedule, s.pp, s.virtual_stages) else 1


def widths(s):
    """(bytes of an element in the dtype that layers compute in, in the dtype that gradients are summed in)."""
    dtype = parallel.PRECISIONS[s.dtype]
    return dtype.itemsize, parallel.master_dtype(dtype).itemsize


def tokens_of(config, s):
    """Tokens of a micro-batch on a rank."""
    return s.batch_size // s.dp // s.micro_batches * config.seq_len // s.cp


def chunks_of(config, s):
    """How many of a micro-batch's tokens head and loss take at a time: [all], or the sizes of --loss-chunk's chunks."""
    tokens = tokens_of(config, s)
    chunk = s.loss_chunk or tokens
    return [min(chunk, tokens - first) for first in range(0, tokens, chunk)]


def shards_of(s):
    """How many ranks ZeRO cuts over."""
    return s.zero_within or s.replicas


# ------------------------------------------------------------------------------------------------- weights, gradients

def messages_of_list(actions, net):
    """Messages of G and A in a rank's list, and of what a step adds up behind it. net: the Parallel that runs it.

    A unit of two pieces, as a tied embedding, is gathered once while one of them holds it.
    """
    names = {group: name for name, group in vars(net.groups).items()}
    holders = Counter()  # unit -> pieces that have gathered it and not dropped it
    for kind, piece, _ in actions:
        for unit in net.pipeline.units[piece] if kind in "GD" else ():
            if kind == "G" and not holders[unit]:
                yield Message("weights", GATHER, names[unit.group], unit.weights.numel(), unit.weights.itemsize)
            holders[unit] += 1 if kind == "G" else -1
        for unit in net.pipeline.averaged[piece] if kind == "A" else ():
            if unit.trained:
                op = SCATTER if unit.zero else "all_reduce"
                yield Message("gradients", op, names[unit.group], unit.weights.numel(), unit.mine.itemsize)
    yield from messages_of_sums(net)
    if muon := getattr(net.optimizer, "matrices", {}):
        yield from messages_of_muon(muon)


def messages_of_muon(matrices):
    """Messages of Muon's step, which gathers each matrix that tp has cut. On GPUs in 16 bits."""
    for param, parts in matrices.items():
        width = 2 if param.is_cuda and param.dtype == torch.float32 else param.itemsize
        for part in parts:
            if part.group:
                elements = torch.distributed.get_world_size(part.group) * (part.here.stop - part.here.start)
                yield Message("matrices", GATHER, "tp", elements, width)


def messages_of_sums(net):
    """Messages of gradients that are added up, or averaged, behind the list: of what this rank steps."""
    names = {group: name for name, group in vars(net.groups).items()}
    for unit in [unit for unit in net.units if unit.trained]:
        row = unit.mine.numel(), unit.mine.itemsize
        if net.groups.replicate and unit.group is net.groups.shard:
            yield Message("averages of shards", "all_reduce", "replicate", *row)
        for group in unit.partial_over:
            yield Message("sums of gradients", "all_reduce", names[group], *row)


def messages_of_unit(s, axis, elements, gathers=2):
    """Messages of G and A of a unit, where there is no list to read them off. gathers: how often ZeRO-3 gathers it for a
    micro-batch, once if its B needs no weights, or follows its F."""
    m = s.micro_batches
    narrow, wide = widths(s)
    if s.zero:
        yield Message("weights", GATHER, axis, elements, narrow, m * gathers if s.zero == 3 else 1)
        yield Message("gradients", SCATTER, axis, elements, wide, m if s.zero > 1 else 1)
        elements //= shards_of(s)
    else:
        yield Message("gradients", "all_reduce", axis, elements, wide)
    if axis == "shard" and shards_of(s) < s.replicas:
        yield Message("averages of shards", "all_reduce", "replicate", elements, wide)


# ------------------------------------------------------------------------------------------- what F and B of pieces send
#
#     piece                 F                          B                              of B times tokens
#     embedding             g
#     block                 f g f g                    the same backwards             x: C; experts' rows: k C
#     block with experts    f g f, rows, rows, g       the same backwards
#     head and loss         f, three numbers a token   f
#     attention with --cp   keys and values            keys, values, their gradients
#
#     tp    f    -                                         all-reduce of dx
#           g    all-reduce of terms                       -
#     sp    f    all-gather of x                           reduce-scatter of dx
#           g    reduce-scatter of terms                   all-gather of dy

# Beside backward's products, with async_op, in fast/.
AGAIN, MEANWHILE = "activations gathered again", "gradients scattered meanwhile"


def messages_of_tensors(config, s, stages):
    """Messages of tensor parallelism, f's and g's. Shared experts have an f and a g of their own."""
    m = s.micro_batches
    narrow, wide = widths(s)
    blocks, routed, first, last = contents(config, stages.values())
    twice, twice_routed = recomputed(config, s, stages.values())
    shared = bool(config.experts and config.shared_experts)
    sublayers = m * (2 * blocks + shared * routed)
    times = backward_runs(s)
    # What backward runs again: all f's, and all g's but the last one, whose result it does not need.
    again = times * m * (twice * (s.recompute == "block") + shared * twice_routed)
    for rows in chunks_of(config, s):
        yield Message("loss: the maximum", "all_reduce", "tp", rows, wide, m * last)
        yield Message("loss: two sums", "all_reduce", "tp", 2 * rows, wide, m * last)
    x = tokens_of(config, s) * config.n_embd
    reduce = SCATTER if s.sp else "all_reduce"
    # fast/ sends what it can beside products. It gathers again what f has gathered, but experts and FP8 have kept it.
    beside = (sublayers - m * routed) * (is_fast(s) and s.sp)
    yield Message("embedding, head", reduce, "tp", x, narrow, m * (first + times * last))
    yield Message("g, forward", reduce, "tp", x, narrow, sublayers + again)
    yield Message("f, backward", reduce, "tp", x, narrow, times * sublayers - beside)
    if s.sp:
        yield Message("embedding, head", GATHER, "tp", x, narrow, m * (first + last))
        yield Message("f, forward", GATHER, "tp", x, narrow, sublayers + again + times * m * twice)
        yield Message("g, backward", GATHER, "tp", x, narrow, times * sublayers)
        yield Message(AGAIN, GATHER, "tp", x, narrow, beside * (s.dtype != "fp8"))
        yield Message(MEANWHILE, SCATTER, "tp", x, narrow, beside)


def messages_of_context(config, s, stages):
    """Messages of context parallelism. Recomputing runs attention's forward again, with both of Ulysses' all-to-alls,
    because c_proj's weight gradient needs the second one's result."""
    yield Message("loss", "all_reduce", "cp", 1, widths(s)[1])
    narrow, wide = widths(s)
    heads, keys = (tokens_of(config, s) * n * config.head_dim // s.tp for n in (config.n_head, config.kv_heads))
    times = backward_runs(s)
    forwards = s.micro_batches * contents(config, stages.values())[0]
    twice = s.micro_batches * recomputed(config, s, stages.values())[0] * (s.recompute == "block")
    both = forwards + times * (forwards + twice)  # forwards and backwards: keys and values travel in each
    if s.cp_kind == "ring":
        yield Message("keys and values", "isend", "cp", 2 * keys, narrow, (s.cp - 1) * both)
        yield Message("their gradients", "isend", "cp", 2 * keys, wide, (s.cp - 1) * times * forwards)
    else:
        yield Message("heads for tokens", "all_to_all_single", "cp", heads + 2 * keys, narrow, both)
        yield Message("tokens for heads", "all_to_all_single", "cp", heads, narrow, both)


def messages_of_experts(config, s, stages, rows):
    """Messages of a rank's blocks with experts. stages, rows: as for `messages`.

    Rows of C elements travel to their expert and back, in forward and in backward. Recomputing an MLP or a block runs
    its forward again, the way back included, because the gradients of the gates need the rows that came back. Before
    the rows go counts, which tell each rank how many rows come.
    """
    narrow, wide = widths(s)
    choices = config.top_k * tokens_of(config, s)
    routed = contents(config, stages.values())[1]
    again = recomputed(config, s, stages.values())[1]
    times = backward_runs(s)
    passes = s.micro_batches * routed  # through blocks, forward
    forwards = passes + times * s.micro_batches * again
    if s.ep > 1:
        yield Message("counts of rows", "all_to_all_single", "ep", config.experts, 8, forwards)
        for i, ways in enumerate(rows or [(choices, choices)]):
            runs = 1 + times * (i % routed < again) if rows else forwards
            for way in ways:
                elements = tuple(n * config.n_embd for n in way) if rows else way * config.n_embd
                yield Message("rows", "all_to_all_single", "ep", elements, narrow, runs)
                yield Message("gradients of rows", "all_to_all_single", "ep", elements, narrow,
                              times if rows else times * passes)
    if s.sp:  # f gathers choices and gates, too
        yield Message("choices", GATHER, "tp", choices, 8, forwards)
        yield Message("gates", GATHER, "tp", choices, wide, forwards)
    if s.tp > 1:
        yield Message("gradients of gates", SCATTER if s.sp else "all_reduce", "tp", choices, wide, times * passes)
    for axis in ("dp_cp", "pp") + ("tp",) * s.sp:
        yield Message("loads", "all_reduce", axis, config.n_layer * config.experts, 8)


def messages_of_pipeline(config, s, stages):
    """Messages of a pipeline. F sends to the next stage, B to the one before, if they live elsewhere."""
    narrow, wide = widths(s)
    stage_to_rank = stage_to_rank_in(s)
    rank = stage_to_rank[min(stages)]
    neighbours = sum(stage_to_rank.get(i + side, rank) != rank for i in stages for side in (1, -1))
    passed = tokens_of(config, s) * config.n_embd // (s.tp if s.sp else 1)
    yield Message("activations", "isend", "pp", passed, narrow, s.micro_batches * neighbours)
    yield Message("loss", "all_reduce", "pp", 1, wide)


def messages(config, s, stages, of_parameters, rows=None):
    """All Messages of one rank in a training step of train.py in layout s.

    stages: this rank's {number: pieces}.
    of_parameters: messages of weights and gradients, of messages_of_list or messages_of_unit.
    rows: how many rows this rank sends to each rank of ep and gets from each, for each forward in order: [((to rank 0,
        to rank 1, ...), (from rank 0, ...)), ...]; None: equally many for each expert.
    """
    yield from of_parameters
    if config.experts:
        yield from messages_of_experts(config, s, stages, rows)
    if s.tp > 1:
        yield from messages_of_tensors(config, s, stages)
    if s.cp > 1:
        yield from messages_of_context(config, s, stages)
    if s.pp > 1:
        yield from messages_of_pipeline(config, s, stages)
    yield Message("how many targets count, and micro-batches", "all_reduce", "dp_cp", 3, 8)
    yield Message("gradient norm", "all_reduce", "world", 1, 8)
    yield Message("who stops, who skips", "all_reduce", "all", 2, 8)
