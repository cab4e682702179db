"""What each rank keeps: predicted bytes of parameters, gradients, optimizer states and activations; and the tensors
of a running model by kind, which the predictions are held against.
"""

import dataclasses
import functools
from collections import Counter

from further.expert_parallel import expert_plan
from further.letters import tensors_in
from further.llama import of_some_heads
from further.pieces import matrices
from further.shared import shared_plan
from model import GPT, GPTConfig
from parallel import gpt2_plan, is_matrix, master_dtype, planned
from theory.clock import is_fast, lists_of, most_held, stages_in
from theory.traffic import blocks_of, contents, runs_again, shards_of, tokens_of, widths


# ----------------------------------------------------------------------------------------- memory: predicted and in use

def memory_bytes(config, s, rank=0, load=1.0, micro_batches=None):
    """Predicted bytes of a pipeline rank of a layout: {"parameters", "gradients", "optimizer", "activations"}.

    All but activations are what is left when a step ends.

    s: train.py's settings. optimizer: AdamW's two moments, Muon's one, and float32 master weights if layers compute in
    bf16 or fp16. activations: the most that the rank holds at once, by its list of actions for so many `micro_batches`
    (None: all) and the activation_bytes of each of its stages. load: tokens of a rank's experts over an equal share.

    Where PyTorch computes a loss in 16 bits, sorts tokens for experts, or takes the mask of --pack, as on a CPU, it
    keeps more than is counted here. So does the reference, where W comes after I.
    """
    stages = stages_in(s, config, rank)
    narrow, wide = widths(s)
    whole, mine, muons = elements_kept(config, s, stages.values())
    masters = wide * mine if wide > narrow else 0
    actions = lists_of(s.schedule, s.pp, micro_batches or s.micro_batches, s.virtual_stages)[rank]
    sizes = {stage: activation_bytes(config, s, [run], load) for stage, run in stages.items()}
    return {
        # ZeRO-3's are whole in a step alone, but for the row that the optimizer steps
        "parameters": int(narrow * whole if s.zero < 3 else 0 if masters else wide * mine),
        "gradients": int(wide * (mine if s.zero else whole)),
        "optimizer": int(wide * (2 * mine - muons) + masters),
        "activations": most_held(actions, sizes)}


PLAN = {**gpt2_plan(None, None), **expert_plan(None, None), **shared_plan(GPTConfig(), None, None)}  # of what is cut


@functools.cache
def elements_of_piece(config, tp, i):
    """How many elements of a piece are on one of tp ranks: {(experts', of a block's matrices): number}."""
    count = Counter()
    for name, param in GPT(config, seed=None, pieces=[i]).named_parameters():
        layer = name.rpartition(".")[0]
        how = planned(layer, PLAN)
        added_to_the_sum = name.endswith(("attn.c_proj.bias", "mlp.c_proj.bias"))
        whole = how in (None, of_some_heads) or added_to_the_sum
        matrix = is_matrix(param) and name.startswith("h.")  # Muon leaves tables to AdamW
        count[".experts." in name, matrix] += param.numel() / (1 if whole else tp)
    return count


def elements_of(config, s, runs):
    """The same of all pieces of a rank; of experts those that its ep ranks leave it. The ends of a tied embedding,
    where a rank has both, are one parameter."""
    pieces = [i for run in runs for i in run]
    total = Counter()
    for i in pieces:
        for (experts, matrices), n in elements_of_piece(config, s.tp, i).items():
            total[experts, matrices] += n / (s.ep if experts else 1)
    if config.tied and 0 in pieces and config.n_layer + 1 in pieces:
        total[False, False] -= table_elements(config, s)
    return total


def elements_kept(config, s, runs):
    """(elements of all parameters of a rank's runs of pieces; of these its optimizer steps; of these Muon)"""
    whole = mine = muons = 0
    for (experts, matrices), n in elements_of(config, s, runs).items():
        copies = s.replicas // s.ep if experts else shards_of(s)
        part = n / copies if s.zero else n
        whole += n
        mine += part
        muons += part * (matrices and s.optimizer == "muon")
    return whole, mine, muons


def activation_bytes(config, s, pieces, load=1.0):
    """Bytes that autograd keeps from a micro-batch's forward to its backward.

    Blocks keep `block_bytes`. The embedding keeps its positions once; if the vocabulary is cut, also row numbers and a
    mask, 9 bytes a token. The head keeps its input, LN of it, and the logits, over which the loss writes their
    gradient; of the loss a token keeps its target and three float32 numbers. With --loss-chunk the head keeps the
    gradients of LN's output and of its weight, and no logits.
    """
    tokens = tokens_of(config, s)
    c = config.n_embd
    width, wide = widths(s)
    again = {*blocks_of(config, runs_again(config, s, pieces))}
    kinds = Counter((bool(config.experts) and config.has_experts(i - 1), i in again)
                    for i in blocks_of(config, pieces))
    blocks = sum(n * block_bytes(config, s, *kind, load) for kind, n in kinds.items())
    _, _, first, head = contents(config, pieces)
    positions = config.seq_len / s.cp * (config.arch == "gpt2")
    ids = 8 * positions + 9 * tokens * (s.tp > 1)
    if s.loss_chunk:
        loss = wide * table_elements(config, s)
    else:
        loss = tokens * (config.vocab_size / s.tp * width + 8 + 3 * 4)
    last = (c * width + norm_bytes(config, s)) / (s.tp if s.sp else 1) + c * width
    return int(blocks + first * ids + head * (tokens * last + loss))


def block_bytes(config, s, routed, again, load):
    """Bytes that autograd keeps of a block. routed: it has experts. again: backward runs what --recompute names again;
    what that computes exists for one block at a time, and is not counted.

    In elements a token:

        x, and x + attention                            2C, of the tokens that this rank has under --sp
        LN of each, the input of a product              2C, of the same tokens; of all where further/'s f gathered them
        q, k, v, attention's output                     4C / tp
        attention's output once more, with --cp         C / tp: Ulysses has it before and after its all-to-all, a ring
                                                        head by head for itself and by token for the projection
        MLP before and after GeLU                       2 inner / tp

    Each norm also keeps `norm_bytes`, and attention a float32 number a head. No (T, T) matrix is kept. Of a Llama q, k,
    v are (H + 2 H/G) D, the MLP is 2 inner before and inner after, and cos and sin of each position are D float32
    numbers. Experts have `routed_bytes`.

    --recompute block keeps x alone. mlp drops what the MLP has inside. In every block mlp also drops the norms'
    outputs, unless f has gathered a copy, and, in dense blocks whose MLP does not run again, the output of the
    activation function. --dtype fp8: a product keeps its input and its weight in a byte an element. So to drop a norm's
    or an activation's output saves nothing there.
    """
    tokens = tokens_of(config, s)
    c = config.n_embd
    width = widths(s)[0]
    tokens_cut = s.tp if s.sp else 1
    own = c * width / tokens_cut
    if again and s.recompute == "block":
        return tokens * own
    gathers = s.sp and not is_fast(s)
    eight = s.dtype == "fp8"
    norms_go = s.recompute == "mlp" and not eight
    hidden = config.hidden / s.tp
    attention = attention_bytes(config, s) + eight * config.heads_width / s.tp
    mlp = mlp_width(config, s) * width / s.tp - eight * hidden * (width - 1)
    if routed:  # the router keeps LN(x), too
        mlp = routed_bytes(config, s, load) + config.shared_experts * mlp
        mlp += bool(config.shared_experts and gathers) * c * width
    elif norms_go:
        mlp -= hidden * width
    of_attention, of_mlp = matrices(config, s.tp) if eight else (0, 0)
    kept = 2 * own + 2 * norm_bytes(config, s) / tokens_cut
    weights = 0
    parts = [(attention, of_attention, gathers)]
    if not again:  # else the MLP runs again
        parts.append((mlp, of_mlp, gathers and not routed))
    for inside, of_weights, copied in parts:
        kept += inside
        weights += of_weights
        if not norms_go or copied:
            kept += c if eight else c * width if copied else own
    return tokens * kept + weights


def norm_bytes(config, s):
    """Bytes that a norm keeps of a token besides its input: mean and 1/std, or 1/std alone. PyTorch has no kernel of
    RMSNorm on CPUs: there it also keeps x/std, here counted in float32."""
    if config.arch == "gpt2":
        return 8
    return 4 + 4 * config.n_embd * (s.device == "cpu" and not is_fast(s))


def attention_bytes(config, s):
    """Bytes a token that attention keeps for backward."""
    width = widths(s)[0]
    twice = s.cp > 1 and (s.cp_kind != "ring" or config.n_head > s.tp)
    heads = ((config.qkv_width + (1 + twice) * config.heads_width) * width + 4 * config.n_head) / s.tp
    positions = config.seq_len / s.cp / tokens_of(config, s)  # of a sequence, over the tokens of all sequences
    return heads + (config.arch == "llama") * max(width, 4) * config.head_dim * positions


def table_elements(config, s):
    """Of this rank's part of the embedding, or of the head's weight."""
    return config.vocab_size * config.n_embd / s.tp


def mlp_width(config, s):
    """Elements of the hidden layer that a token keeps: before the activation and after, and of PyTorch's SwiGLU the
    gate."""
    return config.up_width + config.hidden * (1 + (config.arch == "llama" and not is_fast(s)))


def routed_bytes(config, s, load):
    """Bytes a token that a router and k experts keep for backward:

                                                                         elements
        router    each expert's score, and its place (int64) in order    E float32, E int64
                  the input in float32                                   C, if layers have 16 bits
                  k chosen scores, their sum, and the k weights          2k + 1
        sorting   where each row comes from                              k int32
                  the same where rows are received from other ranks      k int32, times `load`
        experts   rows received, MLP before and after GeLU               k (C + 2 inner / tp), times `load`
                  outputs that come back to be weighed                   k C

    A rank routes 1 / tokens_cut of the tokens. If tokens_cut > 1, it also keeps the k weights of all tokens.
    """
    c = config.n_embd
    k = config.top_k
    width = widths(s)[0]
    tokens_cut = s.tp if s.sp else 1
    wide = max(width, 4)
    rows = k * load * (c + mlp_width(config, s) / s.tp) * width + k * c * width
    router = config.experts * (wide + 8) + (2 * k + (k > 1)) * wide + (wide > width) * (4 - width) * c
    sorting = 4 * (tokens_cut > 1) + 4 + 4 * load * (s.ep > 1)
    return rows + router / tokens_cut + k * sorting


def kept_tensors(net):
    """This rank's tensors that outlive a step, by kind: {"parameters", "gradients", "optimizer"}."""
    units = net.units
    module = [p for piece in net.pieces.values() for p in piece.parameters()]
    stepped = [*net.params, *(unit.mine for unit in units)]
    mixed = net.layout.dtype != master_dtype(net.layout.dtype)
    kinds = {
        "parameters": [module, [unit.weights for unit in units], [] if mixed else stepped],
        "gradients": [[p.grad for p in module + net.params],
                      [(unit.total, unit.sending, getattr(unit, "message", None)) for unit in units]],
        "optimizer": [stepped if mixed else [], list(net.optimizer.state.values())]}
    return {kind: [t for t in tensors_in(parts) if t.dim()] for kind, parts in kinds.items()}


# ----------------------------------------------------------------------------------------------------------------- plan

ROOM = 0.9  # share of a GPU's memory that predicted bytes may fill; temporaries, gaps and NCCL's buffers take the rest


def besides(config, s, stages):
    """Bytes of weights that are whole, and of gradients that wait for an A, at most, as a list of equally large pieces
    has them: two pieces' weights, one's gradients. ZeRO-1's gradients wait, all of them, for the last micro-batch;
    their averages come as they go."""
    narrow, wide = widths(s)
    pieces = sum(map(len, stages.values()))
    whole = sum(elements_of(config, s, stages.values()).values())
    gathered = 2 / pieces * narrow * whole if s.zero == 3 else 0
    waiting = 1 - 1 / shards_of(s) if s.zero == 1 and s.micro_batches > 1 else 1 / pieces
    return gathered + waiting * wide * whole * (s.zero > 0)


def needed_bytes(config, s):
    """Bytes that each pipeline rank needs on a GPU, with what a step holds besides, and what a block recomputes, or a
    chunk of logits."""
    i = min(config.expert_every, config.n_layer) if config.experts else 1
    again, kept = (activation_bytes(config, some, [range(i, i + 1)])  # of a block with experts
                   for some in (dataclasses.replace(s, recompute="none"), s))
    chunk = widths(s)[0] * (s.loss_chunk + config.n_embd) * config.vocab_size / s.tp  # and its term of dW
    few = min(s.micro_batches, 3 * s.pp)  # of the schedules that are WORTH it more change no peak
    ranks = [stages_in(s, config, rank) for rank in range(s.pp)]
    return [max(again - kept, contents(config, stages.values())[3] * chunk * bool(s.loss_chunk))
            + besides(config, s, stages) + sum(memory_bytes(config, s, rank, micro_batches=few).values())
            for rank, stages in enumerate(ranks)]
