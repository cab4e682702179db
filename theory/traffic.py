"""What each strategy sends: G and A of a rank's list, and a table of what F and B of its pieces send.

Letters: N ranks in a group, k bytes of a tensor, K parameters, B, T, C, V, L as in model.py, m micro-batches,
p pipeline ranks. Read with: CS336 lecture 7; Ultra-Scale Playbook, the chapters on each axis.
"""

from collections import Counter
from typing import NamedTuple

import parallel
from theory.clock import halves_backward, is_fast, stage_to_rank_in


def sent(op, elements, width, n, rank=0, switched=False):
    """Bytes that rank `rank` of n sends in one collective. elements: of the whole tensor that is gathered or scattered,
    of `width` bytes each. The root is rank 0.

    Rings and, if a switch joins all ranks (`switched`), direct exchange send (N-1)/N k for half an all-reduce, k =
    elements x width. In a binomial tree each rank sends the whole to the roots of its subtrees. A barrier has log2(N)
    rounds of a byte.
    """
    k = elements * width
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
    elements: int   # as `sent` takes them
    width: int      # bytes an element
    times: int = 1  # how often in a step


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
    for unit in net.units:
        row = unit.mine.numel(), unit.mine.itemsize
        if unit.trained and net.groups.replicate and unit.group is net.groups.shard:
            yield Message("averages of shards", "all_reduce", "replicate", *row)
        for group in unit.partial_over if unit.trained else ():
            yield Message("sums of gradients", "all_reduce", names[group], *row)


# ------------------------------------------------------------------------------------------ what F and B of pieces send
#
#     piece                 F                          B                                   of B times tokens
#     embedding             g
#     block                 f g f g                    the same backwards                  x: C
#     block with experts    f g f, rows, rows, g       the same backwards                  rows of experts: k C
#     head and loss         f, three numbers a token   f
#     attention with --cp   keys and values            keys, values, their gradients       2 C a head of keys
#
#     tp    f    -                                     all-reduce of dx
#           g    all-reduce of terms                   -
#     sp    f    all-gather of x                       reduce-scatter of dx, all-gather of x, which F has not kept
#           g    reduce-scatter of terms               all-gather of dy
#
# What backward runs again sends again: all f's, and all g's but the last one, whose result it does not need.

def messages_of_tensors(config, s, stages):
    """Messages of tensor parallelism, f's and g's. Shared experts have an f and a g of their own. In the reference f
    keeps what it has gathered; in fast/ experts and FP8 do."""
    m = s.micro_batches
    narrow, wide = widths(s)
    blocks, routed, first, last = contents(config, stages.values())
    twice, twice_routed = recomputed(config, s, stages.values())
    shared = bool(config.experts and config.shared_experts)
    backwards = backward_runs(s) * m
    sublayers = 2 * blocks + shared * routed
    again = twice * (s.recompute == "block") + shared * twice_routed
    forward = m * sublayers + backwards * again
    for rows in chunks_of(config, s):
        yield Message("loss: the maximum", "all_reduce", "tp", rows, wide, m * last)
        yield Message("loss: two sums", "all_reduce", "tp", 2 * rows, wide, m * last)
    x = tokens_of(config, s) * config.n_embd
    ends = m * first + backwards * last
    combine = SCATTER if s.sp else "all_reduce"
    yield Message("sums", combine, "tp", x, narrow, ends + forward)
    yield Message("sums of dX", combine, "tp", x, narrow, backwards * sublayers)
    if s.sp:
        gathered_again = m * (sublayers - routed) * (is_fast(s) and s.dtype != "fp8")
        yield Message("x and dy", GATHER, "tp", x, narrow,
                      m * (first + last) + forward + backwards * (twice + sublayers) + gathered_again)


def messages_of_context(config, s, stages):
    """Messages of context parallelism. Recomputing runs attention's forward again, with both of Ulysses' all-to-alls,
    because c_proj's weight gradient needs the second one's result."""
    narrow, wide = widths(s)
    yield Message("loss", "all_reduce", "cp", 1, wide)
    heads, keys = (tokens_of(config, s) * n * config.head_dim // s.tp for n in (config.n_head, config.kv_heads))
    backwards = backward_runs(s) * s.micro_batches
    blocks = contents(config, stages.values())[0]
    again = recomputed(config, s, stages.values())[0] * (s.recompute == "block")
    both = s.micro_batches * blocks + backwards * (blocks + again)  # keys and values travel forward and backward
    if s.cp_kind == "ring":
        yield Message("keys and values", "isend", "cp", 2 * keys, narrow, (s.cp - 1) * both)
        yield Message("their gradients", "isend", "cp", 2 * keys, wide, (s.cp - 1) * backwards * blocks)
    else:
        yield Message("heads for tokens", "all_to_all_single", "cp", heads + 2 * keys, narrow, both)
        yield Message("tokens for heads", "all_to_all_single", "cp", heads, narrow, both)


def messages_of_experts(config, s, stages):
    """Messages of a rank's blocks with experts, if each expert gets equally many rows.

    Rows of C elements travel to their expert and back, in forward and in backward. Recomputing an MLP or a block runs
    its forward again, the way back included, because the gradients of the gates need the rows that came back. Before
    the rows go counts, which tell each rank how many rows come.
    """
    narrow, wide = widths(s)
    choices = config.top_k * tokens_of(config, s)
    backwards = backward_runs(s) * s.micro_batches
    routed = contents(config, stages.values())[1]
    forwards = s.micro_batches * routed + backwards * recomputed(config, s, stages.values())[1]
    if s.ep > 1:
        yield Message("counts of rows", "all_to_all_single", "ep", config.experts, 8, forwards)
        yield Message("rows", "all_to_all_single", "ep", choices * config.n_embd, narrow,
                      2 * (forwards + backwards * routed))
    if s.sp:  # f gathers choices and gates, too
        yield Message("choices", GATHER, "tp", choices, 8, forwards)
        yield Message("gates", GATHER, "tp", choices, wide, forwards)
    if s.tp > 1:
        yield Message("gradients of gates", SCATTER if s.sp else "all_reduce", "tp", choices, wide, backwards * routed)
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


def messages(config, s, stages, of_parameters):
    """All Messages of one rank in a training step of train.py in layout s. stages: this rank's {number: pieces}.
    of_parameters: messages of weights and gradients, as messages_of_list's."""
    yield from of_parameters
    if config.experts:
        yield from messages_of_experts(config, s, stages)
    if s.tp > 1:
        yield from messages_of_tensors(config, s, stages)
    if s.cp > 1:
        yield from messages_of_context(config, s, stages)
    if s.pp > 1:
        yield from messages_of_pipeline(config, s, stages)
    yield Message("how many targets count, and micro-batches", "all_reduce", "dp_cp", 3, 8)
    yield Message("gradient norm", "all_reduce", "world", 1, 8)
    yield Message("who stops, who skips", "all_reduce", "all", 2, 8)
