"""Train a GPT, on one process or many:

    python train.py                                          one process
    torchrun --nproc_per_node 4 train.py --dp 2 --tp 2       four: two replicas, each cut in two
    python train.py --out runs/1                             with checkpoints
    python train.py --out runs/1 --resume --steps 900        goes on from the newest of them
    python train.py --steps 0 --sample 200 --resume runs/1   text from it
    torchrun --nproc_per_node 2 train.py --plain --dp 2      the reference alone, to step through

With no flags it trains a 0.8M-parameter model on the source of Python's standard library, in a minute or two on a CPU.
Every layout sees the same tokens and logs the same loss, because a batch is a function of (seed, step, sample), and
initial weights are a function of (seed, name). `python train.py --help` lists the flags.

This file is a complete program, and --plain runs it alone. Otherwise its last lines let fast/ and safe/ take the place
of some of its parts: they check the input, start the processes that a layout needs, go on from the newest checkpoint in
--out, survive crashes, report more, and compute the same numbers sooner.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import sys
import sysconfig
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

HERE = os.path.dirname(os.path.realpath(__file__))
if HERE not in sys.path:  # PYTHONSAFEPATH leaves it out
    sys.path.insert(0, HERE)

import collectives as dist
import kernels
import parallel
from model import ACTIVATIONS, GPT, PRESETS, initial_weight, materialize, materialize_buffers


# ------------------------------------------------------------------------------------------------------------- settings

def flag(default, help, **more):
    return field(default=default, metadata=dict(help=help, **more))


SCHEDULES = parallel.SCHEDULES  # {name: schedule(p, m, v)} of --schedule
schedule_of = SCHEDULES.get
FURTHER = importlib.util.find_spec("further")  # without it, no flag is checked, and nothing saved or sampled
if FURTHER:
    from further.lists import schedule_of, SCHEDULES  # which also takes the text of --schedule-file for a name


LLAMAS = "1b", "llama3-8b", "qwen3-0.6b", "cs336-8b"  # presets that only further/llama.py has


@dataclass
class Layout:
    """How a GPT is spread over ranks, and what it computes in."""
    dp: int = flag(1, "data-parallel replicas")
    tp: int = flag(1, "ranks each layer is cut over")
    sp: bool = flag(False, "sequence parallelism: tp cuts the tokens too, between the layers that it cuts")
    cp: int = flag(1, "context parallelism: ranks each sequence is cut over")
    cp_kind: str = flag("ring", "ring: keys and values go round; ulysses: tokens are traded for heads",
                        choices=["ring", "ulysses"])
    ep: int = flag(1, "ranks of dp that share out the experts")
    pp: int = flag(1, "ranks the layers are spread over, as a pipeline")
    schedule: str = flag("1f1b", "of the pipeline", choices=list(SCHEDULES))  # or the text of --schedule-file
    virtual_stages: int = flag(1, "stages a rank has, for --schedule interleaved")
    zero: int = flag(0, "ZeRO over dp x cp: 1 shards optimizer state, 2 also gradients, 3 parameters", choices=range(4))
    zero_within: int = flag(None, "ranks that ZeRO shards over, e.g. a node's; other such groups are replicas")
    recompute: str = flag("none", "what backward computes again", choices=["none", "mlp", "block"])
    recompute_blocks: int = flag(0, "in how many blocks of each stage, the first ones; 0: all")
    loss_chunk: int = flag(0, "tokens whose logits exist at a time, in head and loss; 0: all")
    dtype: torch.dtype = torch.float32  # of the layers

    @property
    def replicas(self):
        """How many ranks average gradients."""
        return self.dp * self.cp


@dataclass
class Flags(Layout):
    """Flags of the command line, --with-dashes: a Layout's, and these."""
    data: str = flag("", "a text file; left out, the source of Python's standard library")
    pack: bool = flag(False, "each file of --data is a document, whose tokens see no other's")
    tokenizer: str = flag("", "folder with tokenizer.json, or vocab.json and merges.txt; left out, tokens are bytes")
    arch: str = flag(None, "architecture, instead of the preset's", choices=["gpt2", "llama"])
    model: str = flag("tiny", "preset", choices=[*PRESETS, *LLAMAS])
    n_layer: int = flag(None, "blocks, instead of the preset's")
    n_head: int = flag(None, "attention heads, instead of the preset's")
    n_kv_head: int = flag(None, "heads of keys and values, of a Llama, instead of the preset's")
    n_embd: int = flag(None, "width, instead of the preset's")
    inner: int = flag(None, "width of the MLP's hidden layer, instead of the preset's")
    seq_len: int = flag(None, "tokens a sequence, instead of the preset's")
    vocab_size: int = flag(None, "vocabulary, instead of the preset's")
    activation: str = flag(None, "of the MLP, instead of the preset's", choices=list(ACTIVATIONS))
    experts: int = flag(None, "MLPs that a block's router has to choose from, instead of the preset's one")
    top_k: int = flag(None, "experts that a token goes through (default: 2)")
    expert_every: int = flag(None, "n, where every n-th block has experts (default: 1)")
    shared_experts: int = flag(None, "further experts of such a block, which every token goes through (default: 0)")
    balance_rate: float = flag(1e-3, "what a step adds to an expert's bias, or takes from it, to even out the load")
    steps: int = flag(450, "optimizer steps")
    batch_size: int = flag(16, "sequences a step, over all ranks")
    micro_batches: int = flag(1, "parts of each rank's share of a step; their gradients add up")
    lr: float = flag(2e-3, "peak learning rate")
    min_lr: float = flag(1e-4, "learning rate at the end of the cosine")
    warmup_steps: int = flag(20, "steps of linear warm-up")
    weight_decay: float = flag(0.1, "of matrices only")
    optimizer: str = flag("adamw", "muon: Muon for the blocks' matrices, AdamW for all else", choices=["adamw", "muon"])
    clip: float = flag(1.0, "largest gradient norm; 0 does not clip")
    seed: int = flag(0, "of weights, batches and sampling")
    dp: int = flag(None, "data-parallel replicas; left out, what --tp, --cp and --pp leave")
    schedule_file: str = flag("", "a text with a list of actions for each rank, in place of --schedule")
    dtype: str = flag("fp32", "of the layers; bf16 and fp16 keep float32 masters",
                      choices=["fp32", "bf16", "fp16", "fp64"])
    device: str = flag("auto", "auto: CUDA where each process gets a GPU of its own", choices=["auto", "cpu", "cuda"])
    kernels: str = flag("auto", "auto: Triton from Hopper on, in 16 bits or fp32", choices=["auto", "torch", "triton"])
    form: str = flag(None, "of the strategies: as the lecture has them, with buckets and prefetching, or with all of "
                           "fast/ (default: lecture with --plain and --together, else full on CPUs, fast on GPUs)",
                     choices=["lecture", "full", "fast"])
    comm: str = flag("ours", "collectives: ours, as fast as --form has them; the textbook's; PyTorch's",
                     choices=["ours", "ring", "torch"])
    plain: bool = flag(False, "run the reference alone, without fast/ and safe/; several processes need torchrun then")
    together: bool = flag(False, "run the reference alone, with all ranks as threads of this process, to step through")
    eval_every: int = flag(100, "steps between validations, and one at the end; 0: never")
    log_every: int = flag(10, "steps between log lines; 0: never")
    sample: int = flag(200, "tokens to generate at the end; 0: none")
    prompt: str = flag("def ", "what the sample continues")
    temperature: float = flag(0.8, "of the sample; 0 takes the likeliest token each time")
    top_k_sample: int = flag(40, "how many of the likeliest tokens each one of the sample is drawn from; 0: all")
    out: str = flag("", "folder for log.jsonl and checkpoints")
    save_every: int = flag(100, "steps between checkpoints, and one at the end; 0: only that one")
    resume: str = flag("", "checkpoint to go on from, or its folder; no value: --out", nargs="?", const="newest")


ABOUT = {"description": "Train a GPT on one process or many.", "allow_abbrev": False}


def dashed(name):
    return "--" + name.replace("_", "-")


def parse(parser, flags, arguments):
    """The command line's arguments as an object of the dataclass `flags`."""
    for f in dataclasses.fields(flags):
        how = {"action": "store_true"} if f.type is bool else {"type": f.type, "default": f.default}
        default = "" if f.type is bool or f.default in (None, "") else f" (default: {f.default})"
        parser.add_argument(dashed(f.name), **how, **f.metadata | {"help": f.metadata["help"] + default})
    return flags(**vars(parser.parse_args(arguments)))


def config_of(s):
    """The preset's GPTConfig, with the sizes that were given. ValueError if the architecture has no such preset, or no
    such size."""
    presets = PRESETS
    if s.arch == "llama" or s.arch is None and s.model in LLAMAS:
        from further.llama import PRESETS as presets
    if s.model not in presets:
        raise ValueError(f"--model {s.model} is no preset of --arch {s.arch or 'gpt2'}: give --model tiny")
    preset = presets[s.model]
    if s.experts:
        from further.kinds import resized
        preset = resized(preset, experts=s.experts)
    given = {field.name: size for field in dataclasses.fields(preset)
             if (size := getattr(s, field.name, None)) is not None}
    return dataclasses.replace(preset, **given)


def layout_of(s):
    """The flags that make a Layout."""
    given = {field.name: getattr(s, field.name) for field in dataclasses.fields(Layout)}
    return Layout(**given | {"dtype": parallel.PRECISIONS[s.dtype]})


def edition_of(form):
    """The reference's edition of --form. (fast/edition.py's can do what Full can.)"""
    if form in (None, "lecture"):
        return parallel.Lecture
    from further.full import Full
    return Full


def processes_of(s, world):
    """How many processes the layout takes. Where --dp is left out, it becomes what the other axes leave of `world`."""
    s.dp = s.dp or max(1, world // (s.tp * s.pp * s.cp))
    return s.dp * s.tp * s.pp * s.cp


def device_for(asked, processes):
    """--device, where it is auto: CUDA if each process on this machine gets a GPU of its own, else the CPU."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= processes
    return asked if asked != "auto" else "cuda" if enough else "cpu"


# ----------------------------------------------------------------------------------------------------------------- data

def standard_library():
    """The source files of Python's standard library: the one text that is on every reader's machine."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    others = {"site-packages", "dist-packages", "test", "tests"}
    return sorted(file for file in root.rglob("*.py") if not others & set(file.relative_to(root).parts))


class Bytes:
    """The vocabulary that needs no file: each byte of a text is a token. further/bpe.py's has the same methods."""

    def __len__(self):
        return 256

    end_token = 0  # with --pack behind each text, none of which has a zero byte

    def tokens_of(self, texts, packed=False):
        return np.frombuffer((b"\0" if packed else b"\n").join(texts), np.uint8)

    def encode(self, text):
        return list(os.fsencode(text))

    def decode(self, tokens):
        return bytes(min(token, 255) for token in tokens).decode(errors="replace")


def vocabulary_of(folder):
    """The vocabulary of --tokenizer."""
    if not folder:
        return Bytes()
    if os.path.exists(os.path.join(folder, "tokenizer.json")):
        from further.bpe_json import JsonTokenizer as Tokenizer
    else:
        from further.bpe import Tokenizer
    return Tokenizer(folder)


def split(tokens):
    """(training tokens, held-out tokens): the last tenth is held out."""
    return np.split(tokens, [len(tokens) - len(tokens) // 10])


def batch(tokens, seed, step, batch_size, seq_len, samples):
    """Inputs and targets, int64 (n, T) on the CPU, of some samples (a slice) of a step's batch. They depend on the
    arguments alone, so in every layout a step sees the same tokens."""
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - seq_len, batch_size)[samples]
    rows = torch.from_numpy(np.stack([tokens[i:i + seq_len + 1] for i in starts]).astype(np.int64))     # (n, T + 1)
    return rows[:, :-1], rows[:, 1:]


# --------------------------------------------------------------------------------------------------------------- recipe

def parallelize(config, layout, device, source=None, optimizer=None, edition=parallel.Lecture):
    """Build the GPT of `config` on this rank; returns a ParallelGPT. Call it on all ranks: it makes groups.

    source(name) gives a parameter's whole initial value; left out, seed 0 and the name decide it. optimizer: a class
    from torch.optim with its options, as a partial; None: for evaluation. edition: whose classes it is made of.
    """
    device = torch.device(device)
    stage_to_rank = stage_to_rank_of(config, layout)
    mesh = parallel.make_mesh(device.type, layout.dp, layout.tp, layout.pp, layout.cp)
    groups = make_groups(mesh, layout, stage_to_rank, config)
    source = source or partial(initial_weight, config, seed=0)
    stages = {}
    master = parallel.master_dtype(layout.dtype)
    pieces_of = edition.pieces_of(config, len(stage_to_rank))
    for stage in parallel.stages_on(dist.get_rank(groups.pp), stage_to_rank):
        # 1. Shapes without memory, of this stage's layers, because a whole layer may not fit on one rank.
        model = GPT(config, seed=None, pieces=pieces_of[stage])
        # 2. Cut the layers, because what follows must see this rank's parameters. They have no values yet. Each
        # remembers its `cuts`, so that `cut_like` can cut its values likewise in step 4.
        cut_layers(model, layout, groups, edition)
        mark_stage(model, len(stage_to_rank), groups)
        # 3. What is not kept from forward to backward. ZeRO-3's hooks come later, so they go around a forward that
        # backward runs again, and its weights are whole.
        keep_less(model, layout)
        # 4. Weights, one parameter at a time, of which each rank keeps its part: the same numbers in every layout.
        if layout.zero == 3 and edition.sharded:
            materialize_buffers(model.to(master), source, device)
            model = edition.sharded(model, groups.shard, layout.dtype, device)
            model.load(source)
        else:
            materialize(model, source, device, master, parallel.cut_like)
        stages[stage] = model
    # 5. The optimizer of the ZeRO stage. It holds the parameters, so it comes after step 4, which replaces them.
    return ParallelGPT(config, layout, device, mesh, groups, stages, stage_to_rank, optimizer, edition)


def keep_less(model, layout):
    """Let a stage compute its loss in chunks, and activations again in backward, where the layout says so."""
    if layout.loss_chunk and model.lm_head:
        from further.chunked_loss import compute_loss_in
        compute_loss_in(model.lm_head, layout.loss_chunk, model.config.vocab_size)
    if layout.recompute != "none":
        from further.recompute import recompute
        recompute(model, layout.recompute, layout.recompute_blocks)


def stage_to_rank_of(config, layout):
    """{stage: rank}: which rank runs each stage of the schedule. The number of micro-batches does not change it.
    ValueError if the model cannot be cut into these stages."""
    p = layout.pp
    v = layout.virtual_stages
    pieces = config.n_layer + 2
    stage_to_rank = parallel.ranks_of_stages(schedule_of(layout.schedule)(p, 2 * p, v))
    stages = len(stage_to_rank)
    if v not in (1, stages // p):
        raise ValueError(f"this schedule has {stages // p} stages a rank, not {v}: give virtual_stages 1")
    if stages > pieces:
        raise ValueError(f"{stages} stages are more than the model's {pieces} pieces, its layers with embedding and "
                         f"head: give a smaller pp")
    return stage_to_rank


OF_FURTHER = "replicate", "ep", "same_experts"


def make_groups(mesh, layout, stage_to_rank, config):
    """This rank's groups, by name. pp, dp, cp, tp: its lines along the mesh's axes. Besides:

    dp_cp      the ranks that average gradients: dp
    shard      the ranks that share out ZeRO's states: as dp_cp
    embedding  the two ranks that keep a tied embedding, of the first and the last stage, else None

    further/groups.py sets those OF_FURTHER, which are None here, for --cp, --ep, --zero-within and nodes.
    """
    groups = SimpleNamespace(**dict.fromkeys(OF_FURTHER))
    for axis in mesh.mesh_dim_names:
        setattr(groups, axis, mesh.get_group(axis))
    groups.dp_cp = groups.shard = groups.dp
    groups.embedding = None
    ends = [stage_to_rank[0], stage_to_rank[len(stage_to_rank) - 1]]
    if config.tied and ends[0] != ends[1]:
        first_and_last = mesh.mesh[ends].flatten(1)                                           # (2, dp cp tp)
        groups.embedding, _ = torch.distributed.new_subgroups_by_enumeration(first_and_last.T.tolist())
    if FURTHER:
        from further.groups import add_groups
        add_groups(groups, mesh, layout)
    return groups


def cut_layers(model, layout, groups, edition):
    """Cut a model's layers over cp, ep and tp, in place."""
    if layout.cp > 1:
        from further.context import context_parallel
        context_parallel(model, groups.cp, layout.cp_kind, **edition.context)
    if layout.ep > 1:
        from further.expert_parallel import expert_parallel
        expert_parallel(model, groups.ep, groups.same_experts, **edition.experts)
    if layout.tp > 1 and layout.sp:
        from further.sequence import gathered, scattered, sequence_parallel
        f, g = edition.sequence or (gathered, scattered)
        sequence_parallel(model, groups.tp, tensor_plan(model.config, f, g, edition.columns))
    elif layout.tp > 1:
        parallel.tensor_parallel(model, groups.tp, tensor_plan(model.config, *edition.tensor, edition.columns))


def tensor_plan(config, f, g, columns):
    """How tensor parallelism cuts each layer of a GPT, with this f and g, and this class of layers cut by columns."""
    plan = parallel.gpt2_plan(f, g, columns)
    if FURTHER:
        from further.kinds import add_to_plan
        add_to_plan(plan, config, f, g, columns)
    return plan


def mark_stage(model, stages, groups):
    """Mark what the pipeline has cut. A tied weight is in the first and in the last stage. Both start alike and step
    alike, because their gradients are added up: over two ranks, or on one."""
    if stages == 1:
        return
    for name, param in model.named_parameters():
        before = parallel.placement_of(param)
        ends = {}
        if model.config.tied and name in ("wte.weight", "lm_head.weight"):
            ends = dict(partial_over=before.partial_over + (groups.embedding,)) if groups.embedding else dict(twins=2)
        parallel.set_placement(param, sharded_over=before.sharded_over + (groups.pp,), **ends)


@torch.no_grad()
def add_up_twins(params):
    """The two ends of a tied embedding, where one rank has both: no message."""
    twins = [param for param in params if parallel.placement_of(param).twins > 1 and param.grad is not None]
    total = sum(param.grad for param in twins)
    for param in twins:
        param.grad.copy_(total)


def who_runs(layout, edition):
    """(the class of pipeline that runs a layout's schedule, the function that makes its lowered lists)"""
    pipeline = edition.pipeline
    lists = parallel.lowered_lists
    if layout.schedule not in parallel.SCHEDULES:
        from further.lists import checked
        from further.schedules import HalvedPipeline
        pipeline = edition.halved or HalvedPipeline
        lists = checked
    return pipeline, lists


class ParallelGPT:
    """This rank's part of a GPT: `stages` {stage: module}, and what a training loop does with them.

        adamw = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
        net = parallelize(config, Layout(dp=2, tp=2), device, optimizer=adamw)
        net.zero_grad()
        loss = net.forward_backward(x, y)                  x, y: this rank's micro-batches
        norm = net.clip_grad_norm_(1.0); net.optimizer.step()

    optimizer: the edition's, of all stages of this rank; it averages their gradients, too. None: for evaluation.
    """

    def __init__(self, config, layout, device, mesh, groups, stages, stage_to_rank, optimizer, edition):
        self.config = config
        self.layout = layout
        self.edition = edition
        self.device = device
        self.mesh = mesh
        self.groups = groups
        self.stages = stages
        self.stage_to_rank = stage_to_rank
        self.routers = {}
        if config.experts:
            from further.experts import routers
            self.routers = {i: router for stage in stages for i, router in routers(self.module(stage)).items()}
        pipeline, self.lowered_lists = who_runs(layout, edition)
        self.pipeline = pipeline(stages, stage_to_rank, mesh, self.loss, layout.dtype, config.n_embd, self.device,
                                 layout.tp if layout.sp else 1)
        self.optimizer = None
        if optimizer:
            self.optimizer = edition.optimizer(layout.zero, self.param_groups(), optimizer, groups.shard,
                                               [*stages.values()], layout.dtype)
        elif not (layout.zero == 3 and edition.sharded):  # layers get their 16 bits from an optimizer, if there is one
            for model in stages.values():
                model.to(layout.dtype)

    def param_groups(self):
        """For an optimizer: matrices have weight decay, biases and norms have none. Each stage has its own groups, so
        that no bucket waits for two stages. Parameters come with their names; FSDP's are its shards."""
        param_groups = []
        for model in self.stages.values():
            for matrix, options in (False, {"weight_decay": 0.0}), (True, {}):
                params = [named for named in model.named_parameters() if parallel.is_matrix(named[1]) == matrix]
                param_groups += [{"params": params, **options}] if params else []
        return param_groups

    @property
    def params(self):
        """What the optimizer steps: parameters, or this rank's shards."""
        return parallel.params_of(self.optimizer)

    def all_groups(self):
        """Every group that carries messages of this model; None: all ranks."""
        return [*dict.fromkeys(vars(self.groups).values()), None]

    def zero_grad(self):
        """Drop all gradients, also those that an unfinished step has left. Call it on all ranks."""
        self.optimizer.zero_grad()

    def balance(self, rate):
        """After a step: further/experts.py evens out the experts' loads, which this returns. None without experts."""
        if self.config.experts:
            from further.experts import balance
            return balance(self, rate)

    def actions(self, m, training=True):
        """This rank's lowered list for m micro-batches; without `training`, of forwards alone."""
        layout = self.layout
        if training:
            lists = self.lowered_lists(schedule_of(layout.schedule), layout.pp, m, layout.virtual_stages)
        else:
            lists = parallel.lower([[action for stage in parallel.stages_on(rank, self.stage_to_rank)
                                     for action in parallel.whole_batch("F", stage, m)] for rank in range(layout.pp)])
        return lists[dist.get_rank(self.groups.pp)]

    def loss(self, logits, targets):
        """Of a micro-batch, summed over the targets that count. With loss_chunk the head has computed it."""
        if self.layout.loss_chunk:
            return logits
        return parallel.cross_entropy(logits, targets, self.config.vocab_size, self.groups.tp)

    def forward_backward(self, x, y, starts=None, scale=1.0):
        """One step's gradients, after zero_grad: of `scale` times the batch's loss. x, y: this rank's micro-batches,
        lists of (B, T) that may differ; starts: likewise, where each token's document begins, or None. The loss is the
        mean over all replicas' targets that are not -1 or -100; 0 if there are none. Returns a number whose mean over
        dp is the loss, the same on all ranks of tp, cp and pp."""
        if not self.optimizer:
            raise RuntimeError("this GPT was built for evaluation: give parallelize(..., optimizer=...) to train it")
        if any(param.grad is not None for param in self.params):  # what is added up below would be added up twice
            raise RuntimeError("a second forward_backward before zero_grad(): give all micro-batches of a step at once")
        for router in self.routers.values():
            router.load = 0
        loss = self.run(x, y, starts, self.actions(len(x)), scale, self.optimizer)
        self.optimizer.finish_grad_sync()
        if self.groups.replicate:
            from further.nodes import average_between
            average_between(self.params, self.groups.replicate)
        self.add_up_gradients()
        add_up_twins(self.params)
        return loss

    @torch.no_grad()
    def add_up_gradients(self):
        """Add up each gradient over its parameter's `partial_over`. Gradients over the same groups travel side by side,
        because most are small: with sequence parallelism six vectors a block. (The shards of a tied embedding's ends
        match, because its two stages shard it alike.)"""
        together = defaultdict(list)
        for param in self.params:
            if param.grad is not None and (over := parallel.placement_of(param).partial_over):
                together[over, param.grad.dtype].append(param.grad)
        for (over, _), grads in together.items():
            flat = torch.cat([grad.flatten() for grad in grads]) if len(grads) > 1 else grads[0].flatten()
            for group in over:
                dist.all_reduce(flat, group=group)
            for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads])):
                grad.copy_(summed.view_as(grad))

    @torch.no_grad()
    def forward(self, x, y, starts=None):
        """Returns what forward_backward returns. Computes no gradients."""
        return self.run(x, y, starts, self.actions(len(x), training=False), 1.0, None)

    def run(self, x, y, starts, actions, scale, sync):
        """Run a list of actions. sync: the optimizer; None for forwards alone. Returns forward_backward's loss."""
        if self.layout.cp > 1:
            from further.context import cut_tokens
            x, y = (cut_tokens(tokens, self.groups.cp, self.layout.cp_kind) for tokens in (x, y))
        weight = self.weight_of_a_target(y)
        beside = [{"starts": rows} for rows in starts] if starts else [{} for _ in y]
        if self.layout.loss_chunk:
            beside = [more | {"targets": targets} for more, targets in zip(beside, y)]
        losses = self.pipeline.run(actions, x, y, scale * weight, sync, beside)
        loss = torch.zeros_like(weight)
        for summed in losses:
            loss += summed * weight
        if self.layout.pp > 1:
            dist.all_reduce(loss, group=self.groups.pp)  # the other stages have none
        if self.layout.cp > 1:
            dist.all_reduce(loss, dist.ReduceOp.AVG, self.groups.cp)  # each rank has the losses of its own tokens
        return loss

    def weight_of_a_target(self, y):
        """R / n, for R replicas that together have n targets that count: what each multiplies the sum of its losses by.
        Gradients are averaged over replicas, which divides by R. So what remains is the sum of all losses / n.

        Losses a, b, c on one replica, d on another: R / n = 2/4, and the mean of 2/4 (a + b + c) and 2/4 d is
        (a + b + c + d) / 4. A mean of the replicas' means would weigh d as much as the other three together.

        Backward starts from it, so no pass over the gradients is needed. It is a tensor, so no CPU waits for a GPU."""
        count = kernels.that_count(torch.cat([tokens.flatten() for tokens in y])).sum()
        dist.all_reduce(count, group=self.groups.dp_cp)
        replicas = dist.get_world_size(self.groups.dp_cp)
        return replicas / count.clamp(min=1).to(parallel.master_dtype(self.layout.dtype))

    def clip_grad_norm_(self, max_norm, scale=1.0):
        """parallel.clip_grad_norm_, over the whole model."""
        return self.edition.clip_grad_norm_(self.optimizer, max_norm, [None], scale)

    def module(self, stage):
        """A stage without its FSDP."""
        return getattr(self.stages[stage], "module", self.stages[stage])

    def whole_parameter(self, name, key=None):
        """A parameter as one process would hold it; with `key`, what the optimizer keeps of it (zeros before its first
        step); or a buffer. Call it on all ranks."""
        from further.resume import whole_parameter
        return whole_parameter(self, name, key)


# ------------------------------------------------------------------------------------------------------------- training

def learning_rate(s, step):
    """Linear warm-up, then half a cosine from lr to min_lr at the last step; steps count from 0."""
    if step < s.warmup_steps:
        return s.lr * (step + 1) / s.warmup_steps
    progress = (step - s.warmup_steps) / max(1, s.steps - 1 - s.warmup_steps)
    return s.min_lr + (s.lr - s.min_lr) * (1 + math.cos(math.pi * min(1, progress))) / 2


class Trainer:
    """Model, optimizer, data and this rank's place in the mesh. s: the Flags. source(name) gives a parameter's initial
    value; None: the seed does. data: (training tokens, held-out tokens, their vocabulary)."""
    sampler = GPT

    def __init__(self, s, config, source, data, device, edition=parallel.Lecture):
        self.s = s
        self.config = config
        self.device = device
        self.train_data, self.held_out, self.vocabulary = data
        on_cpu = "gloo" if device.type == "cuda" else None
        self.control = dist.new_group(backend=on_cpu)  # all ranks, for `agree`, whose numbers the CPU reads
        source = source or partial(initial_weight, config, seed=s.seed)
        optimizer = partial(self.optimizer_class(), lr=s.lr, betas=(0.9, 0.95), weight_decay=s.weight_decay)
        self.net = parallelize(config, layout_of(s), device, source, optimizer, edition)
        self.optimizer = self.net.optimizer
        for group in self.net.all_groups():
            dist.use(group, s.comm)
        self.scaler = None
        if s.dtype == "fp16":
            from further.loss_scale import LossScale
            self.scaler = LossScale()
        self.skipped = 0  # steps left out because a number was not finite
        self.loads = None  # how many tokens each expert got in the last step that was not left out, int64 (L, E)
        n = s.batch_size // s.dp
        r = dist.get_rank(self.net.groups.dp)
        self.samples = slice(r * n, (r + 1) * n)  # this rank's of each batch; its peers in tp, cp and pp take the same

    def optimizer_class(self):
        if self.s.optimizer == "muon":
            from further.muon import Muon
            return Muon
        return torch.optim.AdamW

    def train(self, saved):
        """Run the steps after checkpoint `saved`, all if it is None; then show a sample. Steps count from 0."""
        for step in range(self.load(saved), self.s.steps):
            dist.reset_traffic()  # the log then holds what one step sends
            loss, norm = self.step(step)
            self.report(step + 1, loss, norm)
            if FURTHER and self.s.out and self.due("save", step + 1):
                self.save(step + 1)
        if FURTHER and self.s.sample:
            self.show_sample()

    def step(self, step):
        """One optimizer step. Returns (a number whose mean over replicas is the batch's loss, the norm of the gradient
        before clipping)."""
        s = self.s
        scale = self.scaler.scale if self.scaler else 1.0
        micro_batches = self.micro_batches(self.train_data, s.seed, step)
        self.net.zero_grad()
        loss = self.net.forward_backward(*micro_batches, scale=scale)  # averages gradients over replicas, too
        norm = self.net.clip_grad_norm_(s.clip, scale)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(s, step)
        if self.all_finite(loss, norm):
            self.optimizer.step()
            self.loads = self.net.balance(s.balance_rate)
        return loss, norm

    def micro_batches(self, tokens, seed, step):
        """This rank's samples of a step: [inputs, targets], each a tuple of micro-batches, int64 (B, T); with --pack
        also where each token's document begins."""
        rows = batch(tokens, seed, step, self.s.batch_size, self.config.seq_len, self.samples)
        return [t.to(self.device).chunk(self.s.micro_batches) for t in self.packed(rows)]

    def packed(self, rows):
        if not self.s.pack:
            return rows
        from further.packed import packed
        return packed(*rows, self.vocabulary.end_token)

    def all_finite(self, loss, norm):
        """Whether this step counts. If one rank finds that its loss or the norm is not finite, all ranks skip the step,
        because replicas must stay equal."""
        [bad] = self.agree(not (loss.isfinite() and norm.isfinite()))
        self.skipped += bad
        if self.scaler:
            self.scaler.update(not bad)
        return not bad

    def agree(self, *numbers):
        """The largest of each whole number over all ranks, so that all do the same thing."""
        numbers = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        dist.all_reduce(numbers, dist.ReduceOp.MAX, self.control)
        return numbers.tolist()

    def due(self, what, done):
        """Whether "log", "eval" or "save" comes after `done` steps. 0 means never, but there is always a last save."""
        every = getattr(self.s, what + "_every")
        last = done == self.s.steps
        return every > 0 and done % every == 0 or last and (every > 0 or what == "save")

    def report(self, done, loss, norm):
        """After `done` steps, when due: loss, gradient norm and the loss of held-out data."""
        if self.due("log", done) or self.due("eval", done):
            entry = {"step": done, "loss": self.mean_over_ranks(loss), "grad_norm": norm.item(),
                     "lr": learning_rate(self.s, done - 1)}
            if self.loads is not None:
                from further.experts import how_even
                entry |= how_even(self.loads)
            if self.due("eval", done):
                entry["val_loss"] = self.evaluate()
            self.record(entry)

    def say(self, text):
        if dist.get_rank() == 0:
            print(text, flush=True)

    def record(self, entry):
        """Rank 0 prints the entry and adds it to log.jsonl."""
        self.say("  ".join(f"{key} {value:.6g}" for key, value in entry.items()))
        if self.s.out and dist.get_rank() == 0:
            with open(os.path.join(self.s.out, "log.jsonl"), "a") as file:
                file.write(json.dumps(entry) + "\n")

    def mean_over_ranks(self, loss):
        loss = loss.clone()
        dist.all_reduce(loss, dist.ReduceOp.AVG, self.net.groups.dp)  # ranks of tp, cp and pp have the same loss
        return loss.item()

    @torch.no_grad()
    def evaluate(self, batches=8):
        """Mean loss, in nats a token, over the same held-out batches every time, in every layout."""
        losses = [self.net.forward(*self.micro_batches(self.held_out, self.s.seed, i)) for i in range(batches)]
        return self.mean_over_ranks(torch.stack(losses).mean())

    def show_sample(self):
        """Rank 0 prints what the model goes on with after the prompt."""
        from further.sampling import show_sample
        show_sample(self)

    # A checkpoint has whole tensors, so every layout can load it. Batches and samples are functions of (seed, step), so
    # the number of steps stands for the position in the data and the state of every random generator.

    def save(self, done):
        """Write step-00000100.pt into --out."""
        from further.resume import save
        save(self, done)

    def load(self, saved):
        """Go on after checkpoint `saved`, if there is one; returns how many steps are done."""
        if not saved:
            return 0
        from further.resume import load
        return load(self, saved, learning_rate)


# ---------------------------------------------------------------------------------------------------------------- start

class Run:
    """What a command line asks for: `s` (Flags), `config`, `data` (as for Trainer), `saved` (a checkpoint, or None) and
    `source` (of initial weights, or None)."""
    mode = "plain: the reference alone, which is what you read"
    flags = Flags
    trainer = Trainer
    meet = staticmethod(dist.meeting_place)

    def __init__(self, arguments):
        try:
            self.prepare(arguments)
        except (ValueError, OSError) as why:  # one line, before any process group starts
            print(f"train.py: {why}", file=sys.stderr)
            sys.exit(2)

    def prepare(self, arguments):
        """Read the flags and the files that they name. ValueError or OSError if they cannot be used."""
        self.s = s = parse(argparse.ArgumentParser(**ABOUT), self.flags, arguments)
        if FURTHER:
            from further import refusals
            refusals.check_flags(s, dashed)
        world = int(os.environ.get("WORLD_SIZE") or 1)
        ranks = 1 if s.together else world
        self.edition = edition_of(s.form)
        processes = processes_of(s, ranks)
        s.device = "cpu" if s.together else device_for(s.device, dist.processes_of_a_node(world))
        kernels.use(s.kernels)
        vocabulary = vocabulary_of(s.tokenizer)
        if s.tokenizer:
            s.vocab_size = len(vocabulary)
        self.config = config_of(s)
        if s.schedule_file:
            from further.lists import read_schedule
            s.schedule = read_schedule(s)
        if FURTHER:
            refusals.check_layout(s, self.config, ranks, processes, self.edition, dashed)
        files = [pathlib.Path(s.data)] if s.data else standard_library()
        texts = [file.read_bytes() for file in files]
        self.data = *split(vocabulary.tokens_of(texts, s.pack)), vocabulary
        self.saved = self.source = None
        if s.resume:
            from further.resume import read_checkpoint
            self.saved, self.source = read_checkpoint(s, self.config, config_of)
        if FURTHER:
            refusals.check_files(s, self.config, texts, *self.data, self.saved)
            told = refusals.told(s, self.config, self.data, dashed, checkpoint=self.saved and self.saved["step"])
            self.meet = partial(refusals.agreed, self.meet, told)

    def start(self):
        """Meet the other processes, train, part."""
        if self.s.out:
            os.makedirs(self.s.out, exist_ok=True)
        if self.s.comm == "torch":
            import further.library  # noqa: F401  which adds it to dist.LINKS
        if self.s.together:
            from further.together import join
            device = join(processes_of(self.s, 1))
        else:
            device = dist.initialize(self.s.device, rendezvous=self.meet)
        if dist.get_rank() == 0:
            print(f"mode     {self.mode}", flush=True)
        self.trainer(self.s, self.config, self.source, self.data, device, self.edition).train(self.saved)
        dist.destroy_process_group()


def main():
    """Train with fast/ and safe/, which stand beside this file, or without them."""
    here = pathlib.Path(__file__).parent
    if {"--plain", "--together"} & {*sys.argv} or not all((here / room).is_dir() for room in ("fast", "safe")):
        program = Run
    else:
        from fast.run import FastRun as program
    program(sys.argv[1:]).start()


if __name__ == "__main__":
    import train  # this file again, as the module that fast/ and safe/ know
    train.main()
