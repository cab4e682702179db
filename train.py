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
from model import ACTIVATIONS, GPT, PRESETS, initial_weight, materialize


# ------------------------------------------------------------------------------------------------------------- settings

def flag(default, help, **more):
    return field(default=default, metadata=dict(help=help, **more))


SCHEDULES = parallel.SCHEDULES  # {name: schedule(p, m, v)} of --schedule
schedule_of = SCHEDULES.get
FURTHER = importlib.util.find_spec("further")  # without it, no flag is checked, and nothing saved or sampled
if FURTHER:
    from further.ideas import idea  # what --cp, --experts and others ask for, by name: see the table there
    SCHEDULES = idea("SCHEDULES")
    schedule_of = idea("schedule_of")  # which also takes the text of --schedule-file for a name


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
    comm: str = flag("ours", "collectives: ours, with --fast the fastest; the textbook's; PyTorch's",
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
        presets = idea("PRESETS")
    if s.model not in presets:
        raise ValueError(f"--model {s.model} is no preset of --arch {s.arch or 'gpt2'}: give --model tiny")
    preset = presets[s.model]
    if s.experts:
        preset = idea("resized")(preset, experts=s.experts)
    given = {field.name: size for field in dataclasses.fields(preset)
             if (size := getattr(s, field.name, None)) is not None}
    return dataclasses.replace(preset, **given)


def layout_of(s):
    """The flags that make a Layout."""
    given = {field.name: getattr(s, field.name) for field in dataclasses.fields(Layout)}
    return Layout(**given | {"dtype": parallel.PRECISIONS[s.dtype]})


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

def parallelize(config, layout, device, source=None, optimizer=None, edition=parallel.Reference):
    """Build the GPT of `config` on this rank; returns a ParallelGPT. Call it on all ranks: it makes groups.

    source(name) gives a parameter's whole initial value; left out, seed 0 and the name decide it. optimizer: a class
    from torch.optim with its options, as a partial; None: for evaluation. edition: whose layers it is made of.
    """
    device = torch.device(device)
    piece_to_rank = piece_to_rank_of(config, layout)
    mesh = parallel.make_mesh(device.type, layout.dp, layout.tp, layout.pp, layout.cp)
    groups = make_groups(mesh, layout, piece_to_rank, config)
    source = source or partial(initial_weight, config, seed=0)
    pieces = [None] * len(piece_to_rank)
    stages = parallel.pieces_of_stages(schedule_of(layout.schedule), layout.pp, layout.virtual_stages, len(pieces))
    first_block = {i: max(1, stage.start) for stage in stages.values() for i in stage}
    for i in parallel.stages_on(dist.get_rank(groups.pp), piece_to_rank):
        # 1. Shapes without memory, a piece at a time, because the model may not fit on one rank.
        pieces[i] = piece = GPT(config, seed=None, pieces=[i])
        # 2. Cut the layers, because what follows must see this rank's parameters. They have no values yet. Each
        # remembers its `cuts`, so that `cut_like` can cut its values likewise in step 4.
        cut_layers(piece, layout, groups, edition)
        mark_ends(piece, groups)
        # 3. What is not kept from forward to backward.
        keep_less(piece, layout, i - first_block[i])
        # 4. Weights, one parameter at a time, of which each rank keeps its part: the same numbers in every layout.
        materialize(piece, source, device, parallel.master_dtype(layout.dtype), parallel.cut_like)
        if config.tied and piece.lm_head and pieces[0]:
            piece.lm_head.weight = pieces[0].wte.weight  # one rank has both ends: one parameter
    # 5. Units, of what step 4 has made, and the optimizer, of what ZeRO leaves of them.
    return ParallelGPT(config, layout, mesh, groups, pieces, optimizer)


def keep_less(model, layout, before=0):
    """Let a stage, or a piece of it behind `before` blocks, compute its loss in chunks, and activations again in
    backward, where the layout says so."""
    if layout.loss_chunk and model.lm_head:
        idea("compute_loss_in")(model.lm_head, layout.loss_chunk, model.config.vocab_size)
    if layout.recompute != "none":
        idea("recompute")(model, layout.recompute, layout.recompute_blocks, before)


def piece_to_rank_of(config, layout):
    """{piece: rank}: which rank runs each of the model's L+2 pieces, embedding, blocks, head. The number of
    micro-batches does not change it. ValueError if the model cannot be cut into the schedule's stages."""
    p = layout.pp
    v = layout.virtual_stages
    pieces = config.n_layer + 2
    schedule = schedule_of(layout.schedule)
    stages = len(parallel.ranks_of_stages(schedule(p, 2 * p, v)))
    if v not in (1, stages // p):
        raise ValueError(f"this schedule has {stages // p} stages a rank, not {v}: give virtual_stages 1")
    if stages > pieces:
        raise ValueError(f"{stages} stages are more than the model's {pieces} pieces, its layers with embedding and "
                         f"head: give a smaller pp")
    return parallel.ranks_of_stages(parallel.lists_of_pieces(schedule, p, 2 * p, v, pieces))


OF_FURTHER = "replicate", "ep", "same_experts"


def make_groups(mesh, layout, piece_to_rank, config):
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
    ends = [piece_to_rank[0], piece_to_rank[len(piece_to_rank) - 1]]
    if config.tied and ends[0] != ends[1]:
        first_and_last = mesh.mesh[ends].flatten(1)                                           # (2, dp cp tp)
        groups.embedding, _ = torch.distributed.new_subgroups_by_enumeration(first_and_last.T.tolist())
    if FURTHER:
        idea("add_groups")(groups, mesh, layout)
    return groups


def cut_layers(model, layout, groups, edition):
    """Cut a model's layers over cp, ep and tp, in place."""
    if layout.cp > 1:
        idea("context_parallel")(model, groups.cp, layout.cp_kind, **edition.context)
    if layout.ep > 1:
        idea("expert_parallel")(model, groups.ep, groups.same_experts, **edition.experts)
    if layout.tp > 1 and layout.sp:
        f, g = edition.sequence or (idea("gathered"), idea("scattered"))
        idea("sequence_parallel")(model, groups.tp, tensor_plan(model.config, f, g, edition.columns))
    elif layout.tp > 1:
        parallel.tensor_parallel(model, groups.tp, tensor_plan(model.config, *edition.tensor, edition.columns))


def tensor_plan(config, f, g, columns):
    """How tensor parallelism cuts each layer of a GPT, with this f and g, and this class of layers cut by columns."""
    plan = parallel.gpt2_plan(f, g, columns)
    if FURTHER:
        idea("add_to_plan")(plan, config, f, g, columns)
    return plan


def mark_ends(piece, groups):
    """If two ranks have the ends of a tied embedding, both start alike and step alike, because their gradients are
    added up."""
    for layer in (piece.wte, piece.lm_head):
        if groups.embedding and layer:
            over = parallel.placement_of(layer.weight).partial_over
            parallel.set_placement(layer.weight, partial_over=over + (groups.embedding,))


class ParallelGPT(parallel.Parallel):
    """This rank's part of a GPT, in a layout, and what a training loop does with it.

        adamw = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
        net = parallelize(config, Layout(dp=2, tp=2), device, optimizer=adamw)
        net.zero_grad()
        loss = net.forward_backward(x, y)                  x, y: this rank's micro-batches
        norm = net.clip_grad_norm_(1.0); net.step()

    pieces: embedding, blocks and head, each a GPT of one piece; None where another rank has it.
    """
    lookups = (0,)

    def __init__(self, config, layout, mesh, groups, pieces, optimizer):
        self.config = config
        self.layout = layout
        self.routers = {}
        if config.experts:
            of_piece = map(idea("routers"), filter(None, pieces))
            self.routers = {i: router for routers in of_piece for i, router in routers.items()}
        pipeline = parallel.Pipeline
        if layout.schedule not in parallel.SCHEDULES:
            pipeline = idea("HalvedPipeline")
        units = getattr(getattr(optimizer, "func", None), "make_units", parallel.make_units)
        super().__init__(pieces, self.loss, mesh, layout.zero, schedule_of(layout.schedule), layout.virtual_stages,
                         optimizer, layout.dtype, self.count, self.shape, groups, pipeline, units)

    def named_parameters(self):
        """{parameter: its name in the whole GPT} of this rank's pieces."""
        named = [both for piece in self.pieces.values() for both in piece.named_parameters()]
        return {param: name for name, param in reversed(named)}

    def shape(self, i, tokens):
        """Of what travels between pieces: (B, T, C), or with sequence parallelism (B, T/N, C)."""
        B, T = tokens.shape
        return B, T // (self.layout.tp if self.layout.sp else 1), self.config.n_embd

    def proven(self, lists, training):
        if FURTHER and training:
            idea("check")(lists, None, self.zero, self.lookups, self.shared)
        return lists

    @staticmethod
    def count(targets):
        return kernels.that_count(targets).sum()

    def all_groups(self):
        """Every group that carries messages of this model; None: all ranks."""
        return [*dict.fromkeys(vars(self.groups).values()), None]

    def balance(self, rate):
        """After a step: further/experts.py evens out the experts' loads, which this returns. None without experts."""
        if self.config.experts:
            return idea("balance")(self, rate)

    def loss(self, logits, targets):
        """Of a micro-batch, summed over the targets that count. With loss_chunk the head has computed it."""
        if self.layout.loss_chunk:
            return logits
        return parallel.cross_entropy(logits, targets, self.config.vocab_size, self.groups.tp)

    def forward_backward(self, x, y, starts=None, scale=1.0):
        """As Parallel's. x, y: lists of (B, T); starts: likewise, where each token's document begins, or None. Targets
        of -1 or -100 do not count. The mean of what it returns over dp is the loss, the same on all ranks of tp, cp and
        pp."""
        for router in self.routers.values():
            router.load = 0
        x, y, beside = self.prepare(x, y, starts)
        return self.of_all_tokens(super().forward_backward(x, y, scale, beside))

    @torch.no_grad()
    def forward(self, x, y, starts=None):
        """Returns what forward_backward returns. Computes no gradients."""
        x, y, beside = self.prepare(x, y, starts)
        return self.of_all_tokens(super().forward(x, y, beside))

    def prepare(self, x, y, starts):
        """This rank's tokens and targets, and what pieces take besides: where documents begin; and targets, if the head
        computes the loss."""
        if self.layout.cp > 1:
            x, y = (idea("cut_tokens")(tokens, self.groups.cp, self.layout.cp_kind) for tokens in (x, y))
        beside = [{"starts": rows} for rows in starts] if starts else [{} for _ in y]
        if self.layout.loss_chunk:
            beside = [more | {"targets": targets} for more, targets in zip(beside, y)]
        return x, y, beside

    def of_all_tokens(self, loss):
        if self.layout.cp > 1:
            dist.all_reduce(loss, dist.ReduceOp.AVG, self.groups.cp)  # each rank has the losses of its own tokens
        return loss

    def add_up_gradients(self):
        if self.groups.replicate:
            idea("average_between")(self.params, self.groups.replicate)
        super().add_up_gradients()

    def whole_parameter(self, name, key=None):
        """A parameter as one process would hold it; with `key`, what the optimizer keeps of it (zeros before its first
        step); or a buffer. Call it on all ranks."""
        return idea("whole_parameter")(self, name, key)


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
    build = staticmethod(parallelize)

    def __init__(self, s, config, source, data, device):
        self.s = s
        self.config = config
        self.device = device
        self.train_data, self.held_out, self.vocabulary = data
        on_cpu = "gloo" if device.type == "cuda" else None
        self.control = dist.new_group(backend=on_cpu)  # all ranks, for `agree`, whose numbers the CPU reads
        source = source or partial(initial_weight, config, seed=s.seed)
        optimizer = partial(self.optimizer_class(), lr=s.lr, betas=(0.9, 0.95), weight_decay=s.weight_decay)
        self.net = self.build(config, layout_of(s), device, source, optimizer)
        self.optimizer = self.net.optimizer
        for group in self.net.all_groups():
            dist.use(group, s.comm)
        self.scaler = None
        if s.dtype == "fp16":
            self.scaler = idea("LossScale")()
        self.skipped = 0  # steps left out because a number was not finite
        self.loads = None  # how many tokens each expert got in the last step that was not left out, int64 (L, E)
        n = s.batch_size // s.dp
        r = dist.get_rank(self.net.groups.dp)
        self.samples = slice(r * n, (r + 1) * n)  # this rank's of each batch; its peers in tp, cp and pp take the same

    def optimizer_class(self):
        if self.s.optimizer == "muon":
            return idea("Muon")
        return partial(torch.optim.AdamW, foreach=True)  # else PyTorch steps one PlacedParameter after the other

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
            self.net.step()
            self.loads = self.net.balance(s.balance_rate)
        return loss, norm

    def micro_batches(self, tokens, seed, step):
        """This rank's samples of a step: [inputs, targets], each a tuple of micro-batches, int64 (B, T); with --pack
        also where each token's document begins."""
        rows = batch(tokens, seed, step, self.s.batch_size, self.config.seq_len, self.samples)
        return [t.to(self.device).chunk(self.s.micro_batches) for t in self.packed(rows)]

    def packed(self, rows):
        return idea("packed")(*rows, self.vocabulary.end_token) if self.s.pack else rows

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
                entry |= idea("how_even")(self.loads)
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
        idea("show_sample")(self)

    # A checkpoint has whole tensors, so every layout can load it. Batches and samples are functions of (seed, step), so
    # the number of steps stands for the position in the data and the state of every random generator.

    def save(self, done):
        """Write step-00000100.pt into --out."""
        idea("save")(self, done)

    def load(self, saved):
        """Go on after checkpoint `saved`, if there is one; returns how many steps are done."""
        return idea("load")(self, saved, learning_rate) if saved else 0


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
            idea("check_flags")(s, dashed)
        world = int(os.environ.get("WORLD_SIZE") or 1)
        ranks = 1 if s.together else world
        processes = processes_of(s, ranks)
        s.device = "cpu" if s.together else device_for(s.device, dist.processes_of_a_node(world))
        kernels.use(s.kernels)
        vocabulary = Bytes()
        if s.tokenizer:
            vocabulary = idea("tokenizer")(s.tokenizer)
            s.vocab_size = len(vocabulary)
        self.config = config_of(s)
        if s.schedule_file:
            s.schedule = idea("read_schedule")(s)
        if FURTHER:
            idea("check_layout")(s, self.config, ranks, processes, dashed)
        files = [pathlib.Path(s.data)] if s.data else standard_library()
        texts = [file.read_bytes() for file in files]
        self.data = *split(vocabulary.tokens_of(texts, s.pack)), vocabulary
        self.saved = self.source = None
        if s.resume:
            self.saved, self.source = idea("read_checkpoint")(s, self.config, config_of)
        if FURTHER:
            idea("check_files")(s, self.config, texts, *self.data, self.saved)
            said = idea("told")(s, self.config, self.data, dashed, checkpoint=self.saved and self.saved["step"])
            self.meet = partial(idea("agreed"), self.meet, said)

    def start(self):
        """Meet the other processes, train, part."""
        if self.s.out:
            os.makedirs(self.s.out, exist_ok=True)
        if self.s.comm == "torch":
            idea("Library")  # which puts itself into dist.LINKS
        if self.s.together:
            device = idea("join")(processes_of(self.s, 1))
        else:
            device = dist.initialize(self.s.device, rendezvous=self.meet)
        if dist.get_rank() == 0:
            print(f"mode     {self.mode}", flush=True)
        self.trainer(self.s, self.config, self.source, self.data, device).train(self.saved)
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
