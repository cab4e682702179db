"""Every layout equals one process."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import pkgutil
import re
from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch import nn

import collectives as dist
import fast
import fast.context
import fast.experts
import fast.nccl
import further.chunked_loss
import further.flags
import further.groups
import further.expert_parallel
import further.context
import further.experts
import further.packed
import further.schedules
import kernels
import model
import parallel
import train
from tests.links import nodes_of
from tests.pool import (
    BOTH, close, DEVICES, in_new_process, needs_kernels, on_both, on_cpus_both, on_ranks, parallelize, parametrize,
    table)
from fast.edition import Fast
from fast.units import WrittenUnit
from further.experts import routers
from further.kinds import resized
from further.llama import LlamaConfig
from further.muon import Muon
from further.resume import load_state
from further.schedules import HalvedPipeline, zero_bubble_h1
from lessons.blind import AXES, case_of, intercepted, value_of
from safe.flags import BadInput, check_layout, Settings
from safe.huggingface import check_sizes


# -------------------------------------------------------------------------------------------------------- one process

SMALL = model.GPTConfig(vocab_size=37, seq_len=10, n_layer=2, n_head=8, n_embd=32)  # the vocabulary divides by nothing
BATCH = 8
CLIP = 0.3   # fires: the norms are 0.5 and more
RATE = 0.02  # of balancing: two steps can change a choice
DECAY = 0.1  # of matrices only


def sized(**sizes):
    """SMALL with some sizes changed, or its architecture."""
    return resized(SMALL, **sizes)


def tokens_of(step, batch=BATCH, tokens=SMALL.seq_len, config=SMALL, holes=False, pack=False):
    """Inputs and targets (batch, T) of a step, the same on every rank. holes: some targets do not count, of the last
    quarter of sequences all but the first, and of the last sequence of four or more none. pack: a quarter of inputs are
    the end token, 0."""
    draw = np.random.default_rng(step)
    rows = torch.from_numpy(draw.integers(0, config.vocab_size, (batch, config.seq_len + 1)))
    x, y = rows[:, :tokens], rows[:, 1:tokens + 1]
    if holes:
        y = y.masked_fill(torch.from_numpy(draw.random(y.shape) < 0.3), -1)
        y[batch - batch // 4:, 1:] = -100  # PyTorch's own
        y[max(3, batch - 1):] = -1
    return x * (x % 4 > 0) if pack else x, y


def logits_of(net, x, pack):
    """Of a whole batch, (B, T, V). pack: of each document alone."""
    if not pack:
        return net(x)
    documents = [row.tensor_split([i + 1 for i, token in enumerate(row.tolist()) if token == 0]) for row in x]
    return torch.stack([torch.cat([net(part[None])[0] for part in some if len(part)]) for some in documents])


def optimizer_of(name, **options):
    kind, lr = {"sgd": (torch.optim.SGD, 0.5), "adamw": (torch.optim.AdamW, 1e-2), "muon": (Muon, 1e-2)}[name]
    return functools.partial(kind, lr=lr, **options)


def matrices_in(config, name, weight):
    """Views of the matrices that lie in one of a block's weights, or in each expert's part of it: q, k and v, or a
    Llama's a and b."""
    rows = [weight.shape[-2]]
    if "c_attn" in name:
        rows = [config.n_head * config.head_dim, *2 * [config.kv_heads * config.head_dim]]
    elif "c_fc" in name and config.arch == "llama":
        rows = 2 * [config.hidden]
    return [part for matrix in weight.view(-1, *weight.shape[-2:]) for part in matrix.split(rows)]


class LibraryMuon:
    """PyTorch's Muon of each matrix of a GPT's blocks, given alone, and its AdamW of all else. Nothing is rounded to
    bf16."""

    def __init__(self, net, groups):
        self.parts = {}  # parameter -> its matrices, each a view
        self.config, self.names = net.config, {p: name for name, p in net.h.named_parameters()}
        for name, p in net.h.named_parameters():
            if p.dim() > 1 and name.endswith("weight"):
                self.parts[p] = [nn.Parameter(matrix) for matrix in matrices_in(net.config, name, p.data)]
        self.muon = torch.optim.Muon(sum(self.parts.values(), []), 1e-2, DECAY, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(
            [group | {"params": [p for p in group["params"] if p not in self.parts]} for group in groups], 1e-2)
        self.zero_grad = net.zero_grad

    def step(self):
        for p, parts in self.parts.items():
            for part, grad in zip(parts, matrices_in(self.config, self.names[p], p.grad), strict=True):
                part.grad = grad
        with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            self.muon.step()
        self.adamw.step()


@functools.cache
def one_process(optimizer, steps, batch, tokens, bias, clip, holes, pack, **change):
    """Losses, norms, gradients of the first step, weights after the last: by plain PyTorch. bias: the routers' to begin
    with. clip: 0 does not."""
    config = sized(**change)
    net, margins = model.GPT(config).double(), []
    for router in routers(net).values():
        router.bias = torch.tensor(BIASES[bias] or [0.0] * config.experts)
        router.register_forward_hook(lambda router, inputs, _: margins.append(margin_of(router, *inputs)))
    matrices = [p for n, p in net.named_parameters() if p.dim() > 1 and not n.endswith("bias")]
    vectors = [p for n, p in net.named_parameters() if n.endswith("bias") or p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    opt = LibraryMuon(net, groups) if optimizer == "muon" else optimizer_of(optimizer)(groups)
    losses, norms, grads = [], [], None
    for step in range(steps):
        x, y = tokens_of(step, batch, tokens, config, holes, pack)
        y = y.masked_fill((x == 0) & bool(pack), -1)
        opt.zero_grad()
        loss = F.cross_entropy(logits_of(net, x, pack).flatten(0, 1), y.flatten().clamp(min=-1), ignore_index=-1)
        loss.backward()
        grads = grads or {n: p.grad.clone() for n, p in net.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip or math.inf)))
        losses.append(loss.item())
        opt.step()
        for router in routers(net).values():
            mean = batch * tokens * router.top_k / config.experts
            router.bias += torch.tensor([RATE * float(np.sign(mean - n)) for n in router.load.tolist()])
            router.bias -= router.bias.double().mean()
            router.load = 0
    assert min(norms) > clip and min(margins, default=1) > 1e-9
    return losses, norms, grads, {n: p.detach() for n, p in [*net.named_parameters(), *net.named_buffers()]}


@torch.no_grad()
def margin_of(router, x):
    """How near a token has come to another choice: the smallest distance of its last expert from the next one."""
    scores = F.pad((x @ router.weight.T).sigmoid() + router.bias, (0, 1), value=-math.inf)  # after all experts none
    scores = scores.sort(descending=True).values
    return float((scores[..., router.top_k - 1] - scores[..., router.top_k]).min())


# ---------------------------------------------------------------------------------------------------------- in a layout

def small_gpt(config=SMALL, optimizer=functools.partial(torch.optim.SGD, lr=0.1), edition=None, frozen=None, **options):
    """A ParallelGPT in a layout on this process's device. frozen(name): whether a parameter is not trained."""
    def freeze(piece, *more):
        for name, param in piece.named_parameters():
            param.requires_grad_(not (frozen and frozen(name)))
        return real(piece, *more)

    real = train.keep_less
    with patch.object(train, "keep_less", freeze):
        return parallelize(config, train.Layout(**options), torch.get_default_device(), None, optimizer, edition)


ROLES = {"averaging": "Unit.start_average", "scattering": "Unit.start_average", "gathering": "Unit.gather"}


def without_collective(where):
    """Take the collectives out of one function, or of the one that has a role: calls from its code return
    at once, having done nothing."""
    name, *method = ROLES.get(where, where).split(".")
    files = [importlib.import_module(f"further.{file.name}") for file in pkgutil.iter_modules(further.__path__)]
    targets = [getattr(file, name) for file in (parallel, train, *files) if hasattr(file, name)]
    assert targets, f"without={where}: neither parallel.py, nor train.py, nor further/ has it"
    codes = {inspect.unwrap(functools.reduce(getattr, method, target)).__code__ for target in targets}

    return intercepted(lambda name, code, given: None if code in codes else given)


def average_over_copies():
    """Experts' gradients are averaged over all ranks, as if each kept the same experts."""
    real = further.groups.split_experts
    return patch.object(further.groups, "split_experts",
                        lambda mesh, n: [real(mesh, n)[0], torch_dist.group.WORLD])


def sums_of_all_keys():
    """Ring attention goes back through the log-sum-exps of a block's keys alone."""
    def backward(q, k, v, o, lse, do, *mask):
        return real(q, k, v, o, kernels.attention_reference(q, k, v, *mask)[1], do, *mask)
    real = kernels.table[kernels.attention_backward_reference]
    return patch.dict(kernels.table, {kernels.attention_backward_reference: backward})


def keys_travel_ahead():
    """Keys and values stay where they are. (The reference's `shift` sends them, too.)"""
    return patch.object(fast.context, "start_shift", lambda tensor, group: (dist.Handle(), tensor))


def mean_of_micro_batches():
    """A micro-batch's loss is the mean over its own targets, a step's the mean of these means."""
    def loss(net, logits, targets):
        return real(net, logits, targets) / (targets != -1).sum().clamp(min=1)
    real = train.ParallelGPT.loss
    return patch.multiple(train.ParallelGPT, loss=loss, weight_of_a_target=lambda net, y: torch.tensor(
        1 / len(y), dtype=torch.float64, device=net.device))


def mean_of_replicas():
    """A replica's loss is the mean over its own targets, a step's the mean of these means."""
    return patch.object(train.ParallelGPT, "weight_of_a_target", lambda net, y: 1 / (
        torch.cat([*y]) != -1).sum().clamp(min=1).double())


@contextlib.contextmanager
def ends_apart():
    """Of a tied embedding whose ends are on one rank the head's gradient is lost."""
    def do(pipeline, action):
        real(pipeline, action)
        if action.stage == pipeline.last_piece and action.kind in "BW":
            pipeline.pieces[action.stage].lm_head.weight.grad = None

    def add(unit, param, a, b=None):  # in fast/'s edition a product is never in .grad
        if b is None or param.shape != (SMALL.vocab_size, SMALL.n_embd):
            write(unit, param, a, b)

    real = HalvedPipeline.do
    write = WrittenUnit.add
    with patch.object(HalvedPipeline, "do", do), patch.object(WrittenUnit, "add", add):
        yield


def chunk_left_out():
    """Of each head that computes the loss in chunks, every second one does not count."""
    def some_losses(*args, **options):
        return real(*args, **options) * (next(calls) % 2)
    real, calls = further.chunked_loss.row_losses, itertools.count()
    return patch.object(further.chunked_loss, "row_losses", some_losses)


def positions_from_zero():
    """A Llama's ranks of cp turn queries and keys as if each had a sequence's first tokens."""
    def cut(module, *args, **options):
        real(module, *args, **options)
        for block in module.h.values():
            del block.attn.positions
    real = further.context.context_parallel
    return patch.object(further.context, "context_parallel", cut)


def documents_see_each_other():
    real = kernels.seen_keys
    return patch.object(kernels, "seen_keys", lambda q, k, is_causal, starts: real(q, k, is_causal, None))


def positions_run_on():
    """From one document to the next."""
    real = model.GPT.embed
    return patch.object(model.GPT, "embed", lambda net, tokens, starts=None: real(net, tokens))


def next_document_counts():
    """Its first token is the target of the end token before it."""
    return patch.object(further.packed, "packed", lambda x, y, end: (x, y, further.packed.starts_of(x, end)))


def boundaries_of_own_tokens():
    """A rank of a ring takes where a document begins in the sequence for where it begins among the keys that it has."""
    def first_keys(starts, group, other, rows, keys):
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        return starts[:, further.context.own_tokens(starts.shape[1], rank, n, "ring", starts.device)[rows]]
    return patch.object(further.context, "first_keys", first_keys)


BREAKS = {function.__name__: function for function in (
    documents_see_each_other, positions_run_on, next_document_counts, boundaries_of_own_tokens, chunk_left_out,
    positions_from_zero, average_over_copies, sums_of_all_keys, keys_travel_ahead, mean_of_micro_batches,
    mean_of_replicas, ends_apart)}


def rows_in_place():
    """Sequences are gathered and scattered where tokens belong, however small they are."""
    return patch.object(fast.nccl, "takes_rows", lambda nbytes, group, waits=True: True)


@contextlib.contextmanager
def under_own_rows():
    """Experts' rows travel under what a rank's own rows need, whatever the group and the width."""
    with patch.dict(fast.experts.HIDE_EXCHANGES, link=dist.Link, bytes=0), patch.object(
            fast.experts, "start_exchange", wraps=fast.experts.start_exchange) as started:
        yield
    assert started.called


def in_turns(p, m, v=1):
    """ZB-H1 where backwards of stage 0, and each second one of the others, are in one piece."""
    def is_whole(half):
        return half.stage == 0 or half.micro_batch % 2
    return [[half._replace(kind="B") if half.kind == "I" and is_whole(half) else half for half in actions
             if half.kind != "W" or not is_whole(half)] for actions in zero_bubble_h1(p, m)]

# What fast/ does on GPUs, or with much to send.
FORCED = {function.__name__: function for function in (rows_in_place, under_own_rows)}


def in_layout(edition, *args, without=None, node=None, choice="auto", forced=None, **options):
    """`train_steps` on this rank. without: a function of the reference whose collectives do nothing, one of ROLES, or
    one of BREAKS. node: as if torchrun had started nodes of so many ranks. choice: of kernels. forced: of FORCED."""
    with contextlib.ExitStack() as around:
        if choice == "triton":
            needs_kernels()
        if node:
            around.enter_context(nodes_of(node))
        if forced:
            around.enter_context(FORCED[forced]())
        if without:
            broken = BREAKS[without]() if without in BREAKS else without_collective(without)
            around.enter_context(broken)
        around.enter_context(patch.dict(further.schedules.SCHEDULES, {"in-turns": in_turns}))
        kernels.use(choice)
        return train_steps(edition, *args, **options)


def train_steps(edition, layout, optimizer, micro_batches, change, steps, batch, tokens, bias, clip, holes, pack,
                cuda_graphs=False, comm="ours", dtype=torch.float64, two_levels=None, want=None, **options):
    """The same steps laid out over the processes: losses, norms, the first step's gradients, weights; both whole.
    two_levels: whether the dp group must work in two levels. want: one process's gradients and weights, {name: array};
    then of ours, how far each of this rank's is from its part of them."""
    config = sized(**change)
    device = torch.get_default_device()
    source = bias and (lambda name: torch.tensor(BIASES[bias]) if name.endswith("router.bias")
                       else model.initial_weight(config, name, 0))
    net = parallelize(config, train.Layout(**layout, dtype=dtype, **options), device, source,
                      optimizer_of(optimizer, weight_decay=DECAY), edition)
    opt = net.optimizer
    assert two_levels is None or two_levels == (layout["dp"] in map(dist.get_world_size, dist.process.registered))
    for group in net.all_groups():
        dist.use(group, comm)
    if cuda_graphs:
        net.pipeline.records = True
    losses, norms, grads, shapes = [], [], {}, model.shapes(config)
    mine = batch // dist.get_world_size(net.groups.dp)
    for step in range(steps):
        rows = tokens_of(step, batch, tokens, config, holes, pack)
        rows = further.packed.packed(*rows, end=0) if pack else rows
        rows = [t.to(device).split(mine)[dist.get_rank(net.groups.dp)].split(mine // micro_batches) for t in rows]
        net.zero_grad()
        evaluated = net.forward(*rows) if holes else None
        total = net.forward_backward(*rows)
        assert evaluated is None or dtype != torch.float64 or close(evaluated, total, 1e-12)
        if step == 0:
            grads = distances(net, want[0], lambda param: param.grad) if want else whole_gradients(net, opt, shapes)
        norms.append(float(net.clip_grad_norm_(clip)))
        net.step()
        if config.experts:
            further.experts.balance(net, further.experts.loads(net), RATE)
        if cuda_graphs and step == 0:
            net.forward(*rows)  # eager, and what it gathers must not be missing in what is recorded next
        torch_dist.all_reduce(total, group=net.groups.dp_cp)  # the library's: this one must work under sabotage too
        losses.append(float(total) / dist.get_world_size(net.groups.dp_cp))
    if want:
        biases = [float((buffer.cpu() - torch.from_numpy(want[1][name])).abs().max())
                  for piece in net.pieces.values() for name, buffer in piece.named_buffers()]
        return losses, norms, grads, distances(net, want[1], torch.detach) + biases
    return losses, norms, grads, {n: net.whole_parameter(n).cpu().numpy().copy()
                                  for n in model.shapes_of_all(config)}


def whole_gradients(net, optimizer, names):
    """{name: gradient} as one process would have it: gathered as what an optimizer keeps of each parameter."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for param in params:
        optimizer.state[param]["gradient"] = param.grad
    whole = {name: net.whole_parameter(name, "gradient").cpu().numpy().copy() for name in names}
    for param in params:
        del optimizer.state[param]["gradient"]
    return whole


def distances(net, want, held):
    """How far held(param) of each parameter that this rank steps is from its part of one process's tensors, relative to
    their largest values: to gather gradients and weights would take half of a layout's time."""
    largest = {name: max(1e-3, abs(whole).max()) for name, whole in want.items()}
    load_state(net, "expected", lambda name: torch.from_numpy(want[name] / largest[name]))
    load_state(net, "scale", lambda name: torch.full(want[name].shape, 1 / largest[name], dtype=torch.float64))
    found = []
    for param in net.params:
        state, ours = net.optimizer.state[param], held(param)
        expected, scale = state.pop("expected"), state.pop("scale")
        off = (0 if ours is None else ours * scale) - expected
        found.append(float(off.abs().max()) if off.numel() else 0.0)  # Muon's owner of no matrix has none
    return found


def differences(got, want, tolerance=1e-10):
    """What of (losses, norms, distances of gradients and of weights) differs from one process by more than the
    tolerance."""
    wrong = [[not close(ours, exact, tolerance) for ours, exact in zip(*both, strict=True)]
             for both in zip(got[:2], want)]
    wrong += [[not distance <= tolerance for distance in some] for some in got[2:]]
    return [f"{kind} {i}" for kind, some in zip(("loss", "norm", "gradient", "weight"), wrong)
            for i, is_wrong in enumerate(some) if is_wrong]


# ----------------------------------------------------------------------------------------------------------- as a table
#
# A row is words OPTION=VALUE: flags of train.py, or fields of Layout. Besides: batch, tokens (of a sequence),
# holes (targets that do not count), optimizer, tied, inner, bias (of the routers), node. Each row runs in the reference
# and in fast/'s edition.

# Of routers: no token for the second expert; of k = 1 all for the first.
BIASES = {None: (), "few": (0.0, -9.0, 0.0, 0.0), "all": (9.0, 0.0, 0.0, 0.0)}
SIZES = {"arch", *(field.name for kind in (further.experts.ExpertsConfig, LlamaConfig)
                   for field in dataclasses.fields(kind))}
# Two steps: what one leaves behind, the second finds.
SIZED = {"steps": 2, "batch": BATCH, "tokens": SMALL.seq_len, "bias": None, "clip": CLIP, "holes": False,
         "pack": False}


def expanded(row):
    """All rows that one with alternatives stands for: of "dp=2 zero=1,2" one with zero=1 and one with zero=2."""
    words = [[f"{name}={value}" for value in values.split(",")]
             for name, values in (word.split("=") for word in row.split())]
    return [" ".join(choice) for choice in itertools.product(*words)]


def arguments_of(case):
    """((layout, optimizer, micro-batches, the model's changes), the other options), as `in_layout` takes them."""
    case = {"optimizer": "sgd", "micro_batches": 1, **SIZED, **case}
    layout, change = ({name: case.pop(name) for name in names if name in case} for names in (AXES, SIZES))
    return (layout, case.pop("optimizer"), case.pop("micro_batches"), change), case


def differences_in(pool, case, tolerances=(1e-10,), run=in_layout):
    """What differs from one process by more than a tolerance: a list for each rank and tolerance."""
    (layout, optimizer, micro_batches, change), options = arguments_of(case)
    want = one_process(optimizer, *(options[name] for name in SIZED), **change)
    arrays = [{name: tensor.numpy() for name, tensor in tensors.items()} for tensors in want[2:]]
    results = pool(math.prod(layout.values())).run(run, pool.edition, layout, optimizer, micro_batches, change,
                                                   **options, want=arrays)
    return [differences(got, want, tolerance) for tolerance in tolerances for got in results]


# Subjects, and what one of their rows goes with; their rows. without=X: wrong without X.
LAYOUTS = """
data
    dp=1,4 micro_batches=2 tied=0 activation=elu
    dp=2 without=averaging
# Micro-batches and replicas have few targets that count, or none: the loss is no mean of means.
holes  holes=1
    dp=2 micro_batches=4 zero=0
    dp=2 tp=2 micro_batches=2 sp=1 recompute=block
    dp=2 cp=2 tokens=8 micro_batches=2 cp_kind=ulysses
    dp=2 ep=2 experts=4 tokens=8 micro_batches=4
    pp=2 micro_batches=8 schedule=zb-h1
    dp=1 micro_batches=8 without=mean_of_micro_batches
    pp=2 micro_batches=4 without=mean_of_micro_batches
    dp=4 without=mean_of_replicas
    cp=2 tokens=8 without=mean_of_replicas
    tp=2 without=VocabParallelCrossEntropy.forward
# Head and loss take so many tokens at a time, and what is left over.
chunked  loss_chunk=7 holes=1 micro_batches=2
    dp=2 zero=0,1,2 recompute=mlp
    dp=2 zero=3 optimizer=adamw
    dp=2 tp=2 sp=1 zero=3 tied=0 recompute=block
    dp=2 pp=2 schedule=zb-h1 zero=2
    pp=2 schedule=zb-v n_layer=3 tied=0
    cp=2 tp=2 tokens=8 arch=llama
chunked  loss_chunk=7
    dp=2 zero=3 without=gathering,chunk_left_out
    tp=2 without=CopyToGroup.backward,VocabParallelCrossEntropy.forward
    pp=2 schedule=zb-h1 micro_batches=4 without=chunk_left_out,Parallel.add_up_gradients
# Each document as if it were alone.
packed  pack=1 micro_batches=2
    dp=2 zero=1 recompute=mlp optimizer=adamw
    dp=2 tp=2 sp=1 zero=3 loss_chunk=7 recompute=mlp
    dp=2 pp=2 schedule=zb-h1 zero=2 holes=1 tied=0
    pp=2 schedule=interleaved virtual_stages=2 arch=llama recompute=block
    cp=2 tp=2 sp=1 tokens=8 cp_kind=ring
    cp=4 tokens=8 cp_kind=ring,ulysses arch=llama tied=0
    dp=2 cp=2 ep=2 experts=4 tokens=8 zero=1 cp_kind=ulysses
packed  pack=1
    dp=2 without=documents_see_each_other,positions_run_on,next_document_counts
    cp=2 tokens=8 without=documents_see_each_other,boundaries_of_own_tokens,shift
    cp=2 tokens=8 cp_kind=ulysses without=documents_see_each_other,heads_for_tokens
tensor
    dp=2 tp=2 tied=0 activation=elu
    tp=4 micro_batches=2
    tp=3 n_head=3 n_embd=24 inner=40
    tp=2 without=CopyToGroup.backward,ReduceFromGroup.forward,VocabParallelCrossEntropy.forward,clip_grad_norm_
zero  tied=0 recompute=block micro_batches=2
    dp=1,2 zero=2
zero  optimizer=adamw recompute=mlp micro_batches=2
    dp=1 zero=1,3
    dp=2 tp=2 zero=1,3
zero
    dp=2 zero=1 without=scattering,gathering
    dp=2 zero=2 without=scattering,clip_grad_norm_
    dp=2 zero=3 without=scattering,gathering,clip_grad_norm_
    dp=4 zero=1,2,3 zero_within=2 without=average_between
# Nothing divides by 3: units are padded, and the padding stays out of norm and weights.
zero  dp=3 micro_batches=3 batch=9 n_head=3 n_embd=27 inner=40
    zero=1,3
# In two levels, of nodes of half the ranks; or ZeRO within two neighbours, replicas between.
nodes  optimizer=adamw two_levels=1
    dp=4 node=2 micro_batches=2 zero=0,3
    dp=4 node=2 micro_batches=2 zero=1 zero_within=1
    dp=4 node=2 micro_batches=2 zero=2 zero_within=2
    dp=4 tp=2 node=4 zero=3 zero_within=2 n_layer=1
nodes  optimizer=adamw two_levels=0
    dp=4 pp=2 node=4 schedule=zb-h1 micro_batches=2 zero=2 zero_within=2 n_layer=1
# More and fewer micro-batches than stages; five layers, which no p divides.
pipeline  n_layer=5
    pp=3 schedule=gpipe micro_batches=2
    pp=3 schedule=zb-h1 micro_batches=1
    pp=2 schedule=1f1b micro_batches=2 tied=0
    pp=4 schedule=1f1b micro_batches=8
    pp=2 virtual_stages=3 schedule=interleaved micro_batches=4
    pp=3 virtual_stages=2 schedule=interleaved micro_batches=3 batch=24 tied=0
pipeline
    pp=2 without=Parallel.add_up_gradients,clip_grad_norm_
    pp=3 micro_batches=4 schedule=in-turns
    dp=2 pp=2 micro_batches=4 schedule=in-turns zero=1,3
# Stages in a V: two on each rank, the first and the last on one.
pipeline  n_layer=4
    pp=3 schedule=zb-v,v-min micro_batches=4 tied=0
    pp=3 schedule=v-half micro_batches=2
    pp=2 schedule=dualpipe-v virtual_stages=2 micro_batches=8
pipeline  n_layer=3
    dp=1 schedule=zb-v micro_batches=2
    pp=2 schedule=dualpipe-v micro_batches=1 tied=0
    dp=2 pp=2 schedule=zb-v micro_batches=2 zero=0,3
    dp=2 pp=2 schedule=zb-v micro_batches=2 zero=1 without=ends_apart
    dp=2 tp=2 pp=2 schedule=zb-h1 micro_batches=2 sp=1 zero=3 recompute=block
pipeline  n_layer=3 micro_batches=4
    dp=2 pp=2 schedule=1f1b zero=3
    dp=2 pp=2 schedule=zb-h1 zero=2 recompute=mlp
    pp=2 schedule=zb-h1 recompute=mlp
    dp=2 pp=2 schedule=1f1b zero=2 without=scattering
    dp=2 pp=2 schedule=zb-h1 zero=3 without=scattering
    dp=2 pp=2 schedule=interleaved virtual_stages=2 zero=3 optimizer=adamw tied=0
# Tokens are cut between the layers that tp cuts.
sequence  sp=1
    tp=5 n_head=5 n_embd=30 recompute=block n_layer=1
    tp=2 micro_batches=2 schedule=zb-h1
    tp=2 micro_batches=2 forced=rows_in_place
    tp=2 pp=2 schedule=interleaved virtual_stages=2 micro_batches=2
sequence  sp=1 n_layer=3
    tp=2 tokens=8 without=gather_tokens,scatter_tokens,clip_grad_norm_,Parallel.add_up_gradients
sequence  optimizer=adamw tied=0 sp=1
    dp=2 tp=2 zero=2 micro_batches=2 recompute=mlp recompute_blocks=1
    tp=2 pp=2 schedule=zb-h1 zero=1 micro_batches=4
# All tokens are cut, over cp.
context  tokens=8 cp_kind=ring
    cp=4 zero=3
    dp=2 cp=2 zero=2 zero_within=2 micro_batches=2 recompute=block
    cp=2 tp=2 sp=1 recompute=block micro_batches=2 optimizer=adamw tied=0
    cp=2 pp=2 schedule=zb-h1 zero=3 micro_batches=2
    cp=4 arch=llama n_kv_head=2 zero=3 recompute=block micro_batches=2
    dp=2 cp=4 ep=2 experts=4 zero=2 recompute=block n_layer=1
context  tokens=8 cp_kind=ulysses
    cp=4 tp=2 sp=1 zero=3 optimizer=adamw n_layer=1
    cp=2 pp=2 schedule=interleaved virtual_stages=2 micro_batches=2
    dp=2 cp=2 zero=1 micro_batches=2 optimizer=adamw tied=0
context  cp=2 tokens=8
    cp_kind=ring without=shift,averaging,sums_of_all_keys
    cp_kind=ulysses without=heads_for_tokens,tokens_for_heads
# Balanced after each step.
experts  experts=4 tokens=8
    dp=2 ep=2 micro_batches=2 experts=2 top_k=2
    dp=2 cp=2 ep=2 micro_batches=2
    dp=2 tp=2 ep=2 micro_batches=2 bias=few
    dp=2 pp=2 ep=2 schedule=zb-h1 micro_batches=2
experts  optimizer=adamw tied=0 experts=4 tokens=8
    dp=2 ep=2 zero=3 micro_batches=2 bias=few
    dp=2 ep=2 zero=2 bias=all top_k=1
    dp=4 ep=2 zero=1 micro_batches=2 recompute=block bias=few
    dp=4 ep=4 zero=1 micro_batches=2 bias=all
    dp=4 ep=2 zero=2 zero_within=2 micro_batches=2 expert_every=2
    dp=2 cp=2 ep=2 zero=3 cp_kind=ulysses top_k=3 recompute=mlp
    dp=2 pp=2 ep=2 schedule=interleaved virtual_stages=2 zero=2 micro_batches=2
    dp=2 tp=2 ep=2 zero=3 sp=1 recompute=block
experts  experts=4 tokens=8 n_layer=1
    dp=2 ep=2 without=exchange
    dp=4 ep=2 without=average_over_copies
    steps=3 dp=2 ep=2 without=loads
    tp=2 without=CopyToGroup.backward,ReduceFromGroup.forward
    steps=3 tp=2 sp=1 without=loads,scatter_tokens
# And some that all tokens go through.
shared  experts=4 shared_experts=2 tokens=8
    dp=2 ep=2 zero=3 micro_batches=2 optimizer=adamw
    dp=2 tp=2 ep=2 recompute=mlp micro_batches=2 expert_every=2
    tp=2 pp=2 sp=1 micro_batches=2 schedule=zb-h1 arch=llama
    dp=2 cp=2 ep=2 zero=1 cp_kind=ulysses recompute=block tied=0
    tp=2 dp=2 shared_experts=1 optimizer=muon
shared  experts=4 shared_experts=1 tokens=8 n_layer=1
    tp=2 without=CopyToGroup.backward,ReduceFromGroup.forward
    tp=2 sp=1 without=scatter_tokens
    dp=2 ep=2 without=exchange,averaging
muon  optimizer=muon
    dp=2 zero=1 without=scattering,gathering
    tp=2 without=directions
    dp=4 zero=2 micro_batches=2 tied=0
    dp=2 tp=2 sp=1 zero=1 micro_batches=2
    pp=2 micro_batches=2
    dp=2 cp=2 zero=1 zero_within=2 tokens=8
    dp=4 ep=2 experts=4 tokens=8 zero=1
    dp=2 tp=2 zero=1 arch=llama head_size=12 n_kv_head=2 tokens=8
# A Llama, or Qwen: rotary positions follow the zigzag, tp cuts the heads of keys, norms of heads stay whole.
llama  arch=llama n_kv_head=4 tokens=8
    dp=2 micro_batches=2 zero=1 tied=0 optimizer=adamw
    tp=4 micro_batches=2 n_kv_head=0
    tp=2 qk_norm=1 qkv_bias=1 head_size=6
    cp=4 tied=0 qk_norm=1
    cp=2 tp=2 cp_kind=ulysses sp=1 recompute=block micro_batches=2
    dp=2 pp=2 schedule=zb-h1 micro_batches=2 zero=3 recompute=block
    dp=2 tp=2 ep=2 experts=4 zero=1 expert_every=2
llama  arch=llama n_kv_head=2 tokens=8
    tp=2 qk_norm=1 without=Parallel.add_up_gradients
    cp=2 without=positions_from_zero
    cp=2 cp_kind=ulysses without=positions_from_zero
experts  experts=4 tokens=8 forced=under_own_rows
    dp=2 ep=2 zero=3 recompute=block micro_batches=2 bias=few optimizer=adamw tied=0
    dp=2 ep=2 bias=all top_k=1
    dp=3 ep=3 experts=6 batch=6
    dp=2 tp=2 ep=2 sp=1 micro_batches=2
"""


def rows():
    """(subject, row, [what without it is wrong])."""
    subject, many = "", []
    for line in re.findall("(?m)^[^#\n]+$", LAYOUTS):
        if line[0] != " ":
            subject, *many = re.split("  +", line)
            continue
        row, _, without = line.strip().partition(" without=")
        for common in many or [""]:
            yield from ((subject, one, [*filter(None, without.split(","))]) for one in expanded(f"{common} {row}"))


def proofs():
    """(pool, subject, row, what without it is wrong, or ""): each row in the reference and in fast/'s edition; what is
    wrong without something in the reference, and in fast/'s where the same function sends."""
    for subject, row, without in rows():
        for pool in DEVICES if "forced=" in row else BOTH:  # forced: fast/'s own ways
            yield pool, subject, row, ""
        for role in without:
            yield "plain", subject, row, role
            if role not in OTHER_IN_FAST:
                yield "cpu", subject, row, role


# Functions in whose place fast/ has others.
OTHER_IN_FAST = "CopyToGroup.backward", "ReduceFromGroup.forward", "gather_tokens", "scatter_tokens"


def test_how_many_rows_each_edition_has():
    """None is lost in silence. Of 150 rows 5 force what fast/ alone has."""
    pairs = Counter((pool, bool(without)) for pool, _, _, without in proofs() if pool != "cuda")
    assert pairs == {("cpu", False): 150, ("plain", False): 145, ("plain", True): 66, ("cpu", True): 55}


@parametrize("pool, subject, row, without", [*proofs()], indirect=["pool"])
def test_layout_equals_one_process(pool, subject, row, without):
    """And is wrong, on every rank, without what the row names."""
    if without:
        steps = 2 if "gather" in without else 1  # the second finds what the first has not gathered
        assert all(differences_in(pool, {**case_of(f"steps={steps} {row}"), "without": without}))
    else:
        assert not any(differences_in(pool, case_of(row))), told(pool, case_of(row))


def told(pool, case):
    """Of a row that is red: what `python -m lessons same` says of its layout, under SGD."""
    from tests import same  # which imports this module
    ranks = math.prod(case.get(axis, 1) for axis in AXES)
    found = pool(ranks).run(same.on_rank, case, pool.edition)
    return in_new_process(same.told, case, found) or "Under plain SGD it is right"


NEAR = [  # rows that round, and how near they are: layers in 16 bits, the kernels' float32
    ("dp=2 micro_batches=2 zero=0,1,2,3 dtype=bf16", 2**-5),
    ("dp=2 micro_batches=2 zero=1,3 dtype=fp16", 2**-8),
    ("dp=2 micro_batches=2 zero=1 dtype=bf16 arch=llama n_kv_head=2", 2**-5),
    *((f"{layout} steps=1 choice=triton dtype=fp32 n_layer=1 n_head=2 vocab_size=11 seq_len=4 batch=2 tokens=4", 1e-5)
      for layout in ("dp=2 zero=3 holes=1", "tp=2 sp=1 holes=1", "dp=2 ep=2 experts=4 bias=few",
                    "cp=2 arch=llama n_kv_head=1", "pack=1", "cp=2 pack=1 arch=llama n_kv_head=1"))]


@on_both
@parametrize("row, tolerance", [(one, tolerance) for row, tolerance in NEAR for one in expanded(row)],
                         ids=str)
def test_layouts_that_round_are_near_one_process(pool, row, tolerance):
    """Not float64's numbers, but near."""
    found = differences_in(pool, case_of(row), [tolerance, tolerance / 800])
    half = len(found) // 2
    assert not any(found[:half]) and all(found[half:])


# -------------------------------------------------------------------------------------------------------- refused, or 0

@parametrize("layout, zero", [({"dp": 2}, 0), ({"dp": 2}, 2), ({"tp": 2}, 0)], ids=str)
@on_ranks(2)
def test_a_batch_in_which_no_target_counts_has_loss_and_gradients_of_0(layout, zero):
    net = small_gpt(**layout, zero=zero)
    x = tokens_of(0)[0].to(net.device).split(4)
    assert net.forward_backward(x, [torch.full_like(tokens, -1) for tokens in x]) == 0
    assert net.clip_grad_norm_(1.0) == 0


@on_both
@parametrize("zero", [0, 1, 2, 3])
@on_ranks(2)
def test_a_step_begins_from_nothing_and_gives_what_stays(zero):
    """zero_grad() drops an unfinished step, at any of its backwards; without it a second forward_backward is refused. A
    whole parameter is no view of what is stepped."""
    net = small_gpt(dp=2, zero=zero, dtype=torch.float64)
    x, y = (t.to(net.device).split(2)[:2] for t in tokens_of(0))
    net.forward_backward(x, y)
    before = net.whole_parameter("wpe.weight")
    kept = before.clone()
    with pytest.raises(RuntimeError, match="before zero_grad"):
        net.forward_backward(x, y)
    net.step()
    assert before.equal(kept)
    net.zero_grad()
    net.forward_backward(x, y)
    norm = net.clip_grad_norm_(0)
    for raises in 0, 1:  # the micro-batch in whose backward wpe's gradient, one of the last, cannot be computed
        calls = itertools.count()
        hook = net.pieces[0].wpe.weight.register_hook(lambda grad: None if next(calls) < raises else 1 / 0)
        net.zero_grad()
        with pytest.raises(ZeroDivisionError):
            net.forward_backward(x, y)
        hook.remove()
        net.zero_grad()
        net.forward_backward(x, y)
        assert close(net.clip_grad_norm_(0), norm)


@on_cpus_both
@parametrize("zero", range(4))
@on_ranks(2)
def test_all_editions_live_in_one_process(zero):
    """And give the same numbers, whichever kernels and links the process has."""
    x, y = ([t.split(4)[dist.get_rank()]] for t in tokens_of(0))
    nets = [small_gpt(edition=edition, dp=2, zero=zero, dtype=torch.float64)
            for edition in (parallel.Reference, Fast)]
    for _ in range(2):
        losses, norms = zip(*((net.forward_backward(x, y), net.clip_grad_norm_(CLIP)) for net in nets))
        assert all(close(loss, losses[0], 1e-12) for loss in losses)
        assert all(close(norm, norms[0]) for norm in norms)
        for net in nets:
            net.step()
            net.zero_grad()


@on_ranks(1)
def test_second_derivatives_through_tensor_parallelism_are_refused():
    """An all-reduce inside of a backward is nothing that autograd could differentiate."""
    device = torch.get_default_device()
    net = model.GPT(SMALL).to(device)
    net.again = net.h["0"].mlp  # one layer under two names
    parallel.tensor_parallel(net, None)
    assert net.again.c_fc is net.h["0"].mlp.c_fc
    loss = net(tokens_of(0)[0].to(device)).square().sum()
    grads = torch.autograd.grad(loss, [*net.parameters()], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum(grad.square().sum() for grad in grads).backward()


@on_ranks(1)
@parametrize("zero", range(4))
def test_without_an_optimizer_a_gpt_is_for_evaluation(zero):
    """In 16 bits, too, whoever keeps the masters."""
    net, other = small_gpt(optimizer=None, dtype=torch.bfloat16, zero=zero), small_gpt(dtype=torch.bfloat16, zero=zero)
    x, y = ([t.to(net.device)] for t in tokens_of(0))
    assert net.forward(x, y).equal(other.forward(x, y))
    with pytest.raises(RuntimeError, match="built for evaluation"):
        net.forward_backward(x, y)


@on_ranks(2)
def test_frozen_experts_stay_each_rank_s_own():
    config, name = resized(SMALL, experts=4), "h.0.mlp.experts.c_fc.weight"

    net = small_gpt(config, frozen=lambda other: other == name, dp=2, ep=2, zero=1)
    assert net.whole_parameter(name).cpu().equal(model.initial_weight(config, name, 0))


@parametrize("layout", [{"dp": 2, "zero": 2}, {"pp": 2}, {"tp": 2, "sp": True}, {"cp": 2},
                                    {"cp": 2, "cp_kind": "ulysses"}], ids=str)
@on_ranks(2)
def test_micro_batches_may_differ_in_size_and_length(layout):
    net, one = small_gpt(**layout, dtype=torch.float64), model.GPT(SMALL).double()
    x, y = ([t[:1, :4], t[1:6, :8], t[6:, :4]] for t in (t.to(net.device) for t in tokens_of(0)))
    losses = [F.cross_entropy(one.to(net.device)(a).flatten(0, 1), b.flatten(), reduction="sum") for a, b in zip(x, y)]
    want = sum(losses) / sum(b.numel() for b in y)
    want.backward()
    loss = net.forward_backward(x, y)
    dist.all_reduce(loss, dist.ReduceOp.AVG, net.groups.dp_cp)
    norm = nn.utils.get_total_norm([p.grad for p in one.parameters()])
    assert close(loss, want.detach()) and close(net.clip_grad_norm_(0), norm)


def refused(message, *args, **options):
    with pytest.raises(ValueError, match=message):
        in_layout(*args, **options)


@parametrize("row, message", [
    ("virtual_stages=2", "this schedule has 1 stages a rank, not 2"),
    ("pp=2 virtual_stages=2 schedule=1f1b", "give virtual_stages 1")])
def test_a_layout_that_cannot_run_is_refused(pool, row, message):
    place, options = arguments_of(case_of(row))
    pool(math.prod(place[0].values())).run(refused, message, pool.edition, *place, **options)


# ------------------------------------------------------------------------------------------------------------ at random

# Around each of these, all other options are drawn.
AROUND = table("""
    dp=4
    tp=3
    cp=3
    cp=4
    pp=4 schedule=gpipe
    pp=3 schedule=zb-h1
    pp=2 schedule=interleaved virtual_stages=3 n_layer=4
    pp=2 schedule=dualpipe-v
    dp=3 ep=3 experts=6
    dp=2 tp=2
    tp=2 arch=llama
    dp=2 cp=2
    tp=2 cp=2
    dp=2 pp=2 schedule=zb-v
    tp=2 pp=2 schedule=v-half
    cp=2 pp=2 schedule=v-min
    dp=2 tp=2 pp=2 schedule=1f1b""")
# What may be drawn: a flag's choices, all of them, and some values of the others; tied, samples, holes are no flags.
# Odd sizes divide by nothing.
FLAGS = {field.name: field.metadata.get("choices") for field in dataclasses.fields(train.Flags)}
DRAWN = {"schedule": [*further.schedules.SCHEDULES]}
DRAWN |= {name: [*FLAGS[name]]
          for name in ("zero", "recompute", "comm", "cp_kind", "activation")}
SOME = """sp=False,True ep=1,2,3 zero_within=None,1,2,3 virtual_stages=1,2,3
    micro_batches=1,2,3 loss_chunk=0,4,9 clip=0.0,0.1 experts=0,3,4,6 top_k=1,2 expert_every=1,2 shared_experts=0,1
    n_layer=1,2,3 n_head=2,3,4 n_embd=12,20,27 seq_len=5,7,8,12 vocab_size=11,37
    optimizer=sgd,adamw,muon tied=False,True inner=0,19 samples=1,2,3 holes=False,True pack=False,True arch=gpt2,llama
    n_kv_head=0,1,2"""
DRAWN |= {name: [*map(value_of, values.split(","))] for name, values in (word.split("=") for word in SOME.split())}
LATER = {*"model dtype device kernels plain together recompute_blocks".split()}  # they round, or are
# tested alone
OF_THE_RUN = {*"""data steps batch_size lr min_lr warmup_steps weight_decay seed eval_every log_every
    sample prompt temperature tokenizer out save_every resume config""".split()}
IDLE = {  # options that change nothing where one of these is so
    "cp_kind": "cp=1", "schedule": "pp=1", "virtual_stages": "pp=1 schedule=gpipe schedule=1f1b schedule=zb-h1",
    "sp": "tp=1", "zero_within": "zero=0", "ep": "experts=0 dp=1", "top_k": "experts=0",
    "expert_every": "experts=0", "shared_experts": "experts=0", "activation": "arch=llama", "n_kv_head": "arch=gpt2"}


def draw_layout(draw, around, left):
    """{option: value} without idle options. Every second value is one of `left`, {option: [value]}, while there are.
    What train.py refuses is drawn anew."""
    size = math.prod(map(around.get, AXES))
    while True:
        case = {}
        for name, values in DRAWN.items():
            values = left[name] if left[name] and draw.integers(2) else values
            case[name] = values[draw.integers(len(values))]
        case |= around
        words = {f"{name}={value}" for name, value in case.items()}
        case = {name: value for name, value in case.items() if not words & {*IDLE.get(name, "").split()}}
        if case["n_embd"] % case["n_head"] or case.get("expert_every", 1) > case["n_layer"]:
            continue
        flags, sizes = ({name: case[name] for name in names if name in case} for names in (FLAGS, SIZES))
        settings = Settings(device="cpu", fast="on", dtype="fp64", batch_size=batch_of(case), **flags)
        with contextlib.suppress(BadInput):
            check_sizes(config := sized(**sizes), str)
            if check_layout(settings, config, size, size) == size:
                return case


def batch_of(case):
    return case["dp"] * case["micro_batches"] * case["samples"]


def layouts_of_seed(seed):
    """{row: a layout around it}, and the values that none of them has."""
    draw, cases, left = np.random.default_rng(seed), {}, DRAWN
    for row, in AROUND:
        cases[row] = case = draw_layout(draw, dict.fromkeys(AXES, 1) | case_of(row), left)
        left = {name: [value for value in values if case.get(name, ()) != value] for name, values in left.items()}
    return cases, left


@functools.cache
def drawn_layouts():
    """Those of the first seed that leaves out no value."""
    for seed in range(20):
        cases, left = layouts_of_seed(seed)
        if not any(left.values()):
            return cases
    pytest.fail(f"of these values some are never drawn, give AROUND a row with them: {left}")


def test_every_value_of_every_option_is_drawn():
    """And every flag is drawn, or tested elsewhere, or none of the layout's."""
    assert drawn_layouts()
    assert FLAGS.keys() - DRAWN.keys() == {*AXES} | LATER | OF_THE_RUN, "each flag must be in one of these"
    assert not any(FLAGS[name] for name in OF_THE_RUN)


@on_both
@parametrize("row", sum(AROUND, []))
def test_layouts_drawn_at_random_equal_one_process(pool, row):
    """With whatever goes with each pair of axes."""
    drawn = drawn_layouts()[row]
    case = {name: value for name, value in drawn.items() if name != "samples"}
    assert not any(differences_in(pool, {**case, "batch": batch_of(drawn), "tokens": drawn["seq_len"]})), drawn
