"""What each strategy sends: folds over a rank's list, and formulas of what F and B of a layout send.

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
    elements: list  # for each call, as `sent` takes them
    width: int      # bytes an element
    times: int = 1  # how often a step repeats all these calls


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


def sequences_of(s):
    """Sequences of a micro-batch, B. A rank has tokens of each of them."""
    return s.batch_size // s.dp // s.micro_batches


def tokens_of(config, s):
    """Tokens of a micro-batch on a rank."""
    return sequences_of(s) * config.seq_len // s.cp


def chunks_of(config, s):
    """How many of a micro-batch's tokens head and loss take at a time: [all], or the sizes of --loss-chunk's chunks."""
    tokens = tokens_of(config, s)
    chunk = s.loss_chunk or tokens
    return [min(chunk, tokens - first) for first in range(0, tokens, chunk)]


def shards_of(s):
    """How many ranks ZeRO cuts over."""
    return s.zero_within or s.replicas


def messages_of_list(actions, net):
    """Messages of G and A in a rank's list, and of what a step adds up behind it. net: the Parallel that runs it.

    A unit of two pieces, as a tied embedding, is gathered once while one of them holds it.
    """
    names = {group: name for name, group in vars(net.groups).items()}
    holders = Counter()  # unit -> pieces that have gathered it and not dropped it
    for kind, piece, _ in actions:
        for unit in net.pipeline.units[piece] if kind in "GD" else ():
            if kind == "G" and not holders[unit]:
                yield Message("weights", GATHER, names[unit.group], [unit.weights.numel()], unit.weights.itemsize)
            holders[unit] += 1 if kind == "G" else -1
        for unit in net.pipeline.averaged[piece] if kind == "A" else ():
            if unit.trained:
                op = SCATTER if unit.zero else "all_reduce"
                yield Message("gradients", op, names[unit.group], [unit.weights.numel()], unit.mine.itemsize)
    yield from messages_of_sums(net)
    if muon := getattr(net.optimizer, "matrices", {}):
        yield from messages_of_muon(muon)


def messages_of_sums(net):
    """Messages of gradients that are added up, or averaged, behind the list: of what this rank steps."""
    names = {group: name for name, group in vars(net.groups).items()}
    for unit in [unit for unit in net.units if unit.trained]:
        row = [unit.mine.numel()], unit.mine.itemsize
        if net.groups.replicate and unit.group is net.groups.shard:
            yield Message("averages of shards", "all_reduce", "replicate", *row)
        for group in unit.partial_over:
            yield Message("sums of gradients", "all_reduce", names[group], *row)


def messages_of_muon(matrices):
    """Messages of Muon's step, which gathers each matrix that tp has cut. On GPUs in 16 bits."""
    for param, parts in matrices.items():
        width = 2 if param.is_cuda and param.dtype == torch.float32 else param.itemsize
        for here, part in parts:
            if part.cut:
                yield Message("matrices", GATHER, "tp", [part.cut.size * (here.stop - here.start)], width)


def messages_of_buckets(s, axis, buckets, shards):
    """In fast/'s edition: messages that average gradients over an axis and gather weights there.

    buckets: (elements, how often a micro-batch gathers them) of each bucket, with its padding. Under ZeRO-3 that is 2,
    but 1 for a stage's last unit, which stays whole from forward to backward, and for an embedding, whose backward
    needs no weights; and 0 for 1-D parameters. shards: the number of ranks over which ZeRO cuts them.
    """
    m = s.micro_batches
    narrow, wide = widths(s)
    whole = [n for n, gathers in buckets if not gathers]
    cut = [n for n, gathers in buckets if gathers]
    if s.zero == 3:
        yield Message("weights", GATHER, axis, [n for n, gathers in buckets for _ in range(gathers)], narrow, m)
        yield Message("gradients", SCATTER, axis, cut, wide, m)
        yield Message("1-D gradients", "all_reduce", axis, whole, wide)
        kept = [n // shards for n in cut] + whole
    else:
        yield Message("gradients", SCATTER if s.zero else "all_reduce", axis, whole, wide, m if s.zero == 2 else 1)
        kept = [n // shards for n in whole]
    if s.zero in (1, 2):
        yield Message("weights", GATHER, axis, whole, narrow)
    if axis == "shard" and shards < s.replicas:
        yield Message("averages of shards", "all_reduce", "replicate", kept, wide)


def scaled(rows, elements):
    """Elements of so many rows: a number, or of each rank its own, as `sent` takes them."""
    return tuple(n * elements for n in rows) if isinstance(rows, tuple) else rows * elements


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
    backwards = times * passes
    forwards = passes + times * s.micro_batches * again
    if s.ep > 1:
        yield Message("counts of rows", "all_to_all_single", "ep", [config.experts], 8, forwards)
        there, back = ([scaled(each, config.n_embd) for each in way] for way in rows or [[choices] * passes] * 2)
        for way, reverse in (there, back), (back, there):
            twice = [each for i, each in enumerate(way) if i % routed < again]  # of each micro-batch, in order
            yield Message("rows", "all_to_all_single", "ep", way + times * twice, narrow)
            yield Message("gradients of rows", "all_to_all_single", "ep", times * reverse, narrow)
    if s.sp:  # f gathers choices and gates, too
        yield Message("choices", GATHER, "tp", [choices], 8, forwards)
        yield Message("gates", GATHER, "tp", [choices], wide, forwards)
    if s.tp > 1:
        yield Message("gradients of gates", SCATTER if s.sp else "all_reduce", "tp", [choices], wide, backwards)
    for axis in ("dp_cp", "pp") + ("tp",) * s.sp:
        yield Message("loads", "all_reduce", axis, [config.n_layer * config.experts], 8)


# Beside backward's products, with async_op.
BESIDE = AGAIN, MEANWHILE = "activations gathered again", "gradients scattered meanwhile"


def messages_of_tensors(config, s, stages):
    """Messages of tensor parallelism, f's and g's."""
    runs = stages.values()
    m = s.micro_batches
    c = config.n_embd
    tokens = tokens_of(config, s)
    narrow, wide = widths(s)
    blocks, routed, first, last = contents(config, runs)
    twice, twice_routed = recomputed(config, s, runs)
    shared = routed if config.experts and config.shared_experts else 0  # these have an f and a g of their own
    sublayers = m * (2 * blocks + shared)
    times = backward_runs(s)
    # Sublayers whose f backward runs again, and whose g: not the last one's, whose result backward does not need.
    shared_again = twice_routed * bool(shared)
    f_again = times * m * (twice * (2 if s.recompute == "block" else 1) + shared_again)
    g_again = times * m * (twice * (s.recompute == "block") + shared_again)
    rows = [n * rows for rows in chunks_of(config, s) for n in (1, 2)]
    yield Message("loss: the maximum, then two sums", "all_reduce", "tp", rows, wide, m * last)
    ends = m * (first + times * last)  # the embedding's g in forward, the head's f in backward
    if not s.sp:
        yield Message("embedding, head", "all_reduce", "tp", [tokens * c], narrow, ends)
        yield Message("activations: 2 a block", "all_reduce", "tp", [tokens * c], narrow, sublayers + g_again)
        yield Message("gradients: 2 a block", "all_reduce", "tp", [tokens * c], narrow, times * sublayers)
        return
    yield Message("embedding, head", GATHER, "tp", [tokens * c], narrow, m * (first + last))
    yield Message("embedding, head", SCATTER, "tp", [tokens * c], narrow, ends)
    # In forward f gathers and g scatters, in backward the other way round: 8 halves a block.
    both_ways = sublayers + times * sublayers
    # Backward also gathers again what f has gathered, but experts and FP8's products have kept it.
    beside = (sublayers - m * routed) * is_fast(s)
    regathered = beside * (s.dtype != "fp8")
    yield Message("activations gathered", GATHER, "tp", [tokens * c], narrow, both_ways + f_again)
    yield Message(AGAIN, GATHER, "tp", [tokens * c], narrow, regathered)
    yield Message(MEANWHILE, SCATTER, "tp", [tokens * c], narrow, beside)
    yield Message("activations scattered", SCATTER, "tp", [tokens * c], narrow, both_ways + g_again - beside)


def messages_of_context(config, s, stages):
    """Messages of context parallelism. Recomputing runs attention's forward again, with both of Ulysses' all-to-alls,
    because c_proj's weight gradient needs the second one's result."""
    yield Message("loss", "all_reduce", "cp", [1], widths(s)[1])
    runs = stages.values()
    narrow, wide = widths(s)
    tokens = tokens_of(config, s)
    heads, keys = (tokens * n * config.head_dim // s.tp for n in (config.n_head, config.kv_heads))
    times = backward_runs(s)
    passes = s.micro_batches * contents(config, runs)[0]
    backwards = times * passes
    twice = times * s.micro_batches * recomputed(config, s, runs)[0] * (s.recompute == "block")
    both = passes + backwards + twice  # forwards and backwards: keys and values travel in each
    if s.cp_kind == "ring":
        yield Message("keys and values", "isend", "cp", [2 * keys], narrow, (s.cp - 1) * both)
        yield Message("their gradients", "isend", "cp", [2 * keys], wide, (s.cp - 1) * backwards)
    else:
        yield Message("heads for tokens", "all_to_all_single", "cp", [heads + 2 * keys], narrow, both)
        yield Message("tokens for heads", "all_to_all_single", "cp", [heads], narrow, both)


def messages_of_pipeline(config, s, stages):
    """Messages of a pipeline. F sends to the next stage, B to the one before, if they live elsewhere."""
    narrow, wide = widths(s)
    stage_to_rank = stage_to_rank_in(s)
    rank = stage_to_rank[min(stages)]
    neighbours = sum(stage_to_rank.get(i + side, rank) != rank for i in stages for side in (1, -1))
    passed = tokens_of(config, s) * config.n_embd // (s.tp if s.sp else 1)
    yield Message("activations", "isend", "pp", [passed], narrow, s.micro_batches * neighbours)
    yield Message("loss", "all_reduce", "pp", [1], wide)


def formula_of_sums(config, s, stages, tp_rank):
    """In fast/'s edition: messages that add up gradients, of the ends of a tied embedding, and of what saw some of the
    tokens or of the heads. tp leaves whole, of matrices, routers and positions; of vectors, norms and biases of
    row-parallel layers."""
    c = config.n_embd
    _, wide = widths(s)
    blocks, routed, first, last = contents(config, stages.values())
    of_matrices = shards_of(s) if s.zero else 1
    of_vectors = shards_of(s) if s.zero in (1, 2) else 1
    vectors = config.head_dim * 2 * blocks * getattr(config, "qk_norm", False)
    matrices = 0
    if s.sp:
        a_norm = config.parameters(lambda name: name.startswith("ln_f."))
        shared = routed if config.experts and config.shared_experts else 0
        matrices += routed * config.experts * c + first * config.parameters(lambda name: name == "wpe.weight")
        vectors += blocks * (2 * a_norm + 2 * c * config.biased)
        vectors += last * a_norm + (shared - routed) * c * config.biased
    if s.tp > 1 and matrices + vectors:
        elements = matrices // of_matrices + vectors // of_vectors
        yield Message("sums of gradients", "all_reduce", "tp", [elements], wide)
    stage_to_rank = stage_to_rank_in(s)
    if config.tied and (first or last) and stage_to_rank[0] != stage_to_rank[len(stage_to_rank) - 1]:
        vocabulary = config.vocab_size // s.tp + (tp_rank < config.vocab_size % s.tp)
        kept = -(-vocabulary * c // of_matrices)
        yield Message("tied embedding", "all_reduce", "embedding", [kept], wide, first + last)


def messages_in_buckets(config, s, stages, buckets, tp_rank=0, of_experts=()):
    """In fast/'s edition, which runs no list with G and A: what messages_of_list gives of the reference. of_experts:
    buckets of the parameters that --ep cuts."""
    yield from messages_of_buckets(s, "shard", buckets, shards_of(s))
    yield from messages_of_buckets(s, "same_experts", of_experts, s.dp * s.cp // s.ep)
    yield from formula_of_sums(config, s, stages, tp_rank)


def messages(config, s, stages, of_parameters, rows=None):
    """All Messages of one rank in a training step of train.py in layout s.

    stages: this rank's {number: pieces}.
    of_parameters: messages of weights and gradients, of messages_of_list or messages_in_buckets.
    rows: how many rows this rank sends to each rank of ep and gets from each, for each call: ([(to rank 0, to rank 1,
        ...), ...], [(from rank 0, ...), ...]); None: equally many for each expert.
    """
    yield from of_parameters
    yield Message("how many targets count, and micro-batches", "all_reduce", "dp_cp", [3], 8)
    if config.experts:
        yield from messages_of_experts(config, s, stages, rows)
    if s.tp > 1:
        yield from messages_of_tensors(config, s, stages)
    if s.cp > 1:
        yield from messages_of_context(config, s, stages)
    if s.pp > 1:
        yield from messages_of_pipeline(config, s, stages)
    yield Message("gradient norm", "all_reduce", "world", [1], 8)
    yield Message("who stops, who skips", "all_reduce", "all", [2], 8)
