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
import json
import os
import pathlib
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch

HERE = os.path.dirname(os.path.realpath(__file__))
if HERE not in sys.path:  # PYTHONSAFEPATH leaves it out
    sys.path.insert(0, HERE)

import collectives as dist
import kernels
import parallel
from further.flags import (
    ABOUT, config_of, dashed, device_for, due, Flags, Layout, layout_of, learning_rate, parse, processes_of)
from further.ideas import idea  # what --cp, --experts and others ask for, by name: see the table there
from further.text import batch, Bytes, split, standard_library
from model import GPT, initial_weight, materialize

schedule_of = idea("schedule_of")  # (a name, or a file) -> schedule(p, m, v)


# --------------------------------------------------------------------------------------------------------------- recipe

def parallelize(config, layout, device, source=None, optimizer=None, edition=parallel.Reference):
    """Build the GPT of `config` on this rank; returns a ParallelGPT. Call it on all ranks: it makes groups.

    source(name) gives a parameter's whole initial value; left out, seed 0 and the name decide it. optimizer: a class
    from torch.optim with its options, as a partial; None: for evaluation. edition: whose layers it is made of.
    """
    device = torch.device(device)
    runs, piece_to_rank = runs_of_stages(config, layout)
    mesh = parallel.make_mesh(device.type, layout.dp, layout.tp, layout.pp, layout.cp)
    groups = make_groups(mesh, layout, piece_to_rank, config)
    source = source or partial(initial_weight, config, seed=0)
    pieces = [None] * len(piece_to_rank)
    first_block = {i: max(1, run.start) for run in runs for i in run}
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
    return ParallelGPT(config, layout, mesh, groups, pieces, runs, optimizer)


def keep_less(model, layout, before=0):
    """Let a stage, or a piece of it behind `before` blocks, compute its loss in chunks, and activations again in
    backward, where the layout says so."""
    if layout.loss_chunk and model.lm_head:
        idea("compute_loss_in")(model.lm_head, layout.loss_chunk, model.config.vocab_size)
    if layout.recompute != "none":
        idea("recompute")(model, layout.recompute, layout.recompute_blocks, before)


def runs_of_stages(config, layout):
    """(of each stage its run of the model's L+2 pieces, embedding, blocks, head, so that all take about equally long;
    {piece: its rank}). ValueError if the model cannot be cut into the schedule's stages."""
    p = layout.pp
    v = layout.virtual_stages
    pieces = config.n_layer + 2
    schedule = schedule_of(layout.schedule)
    stage_to_rank = parallel.ranks_of_stages(schedule(p, 2 * p, v))
    stages = len(stage_to_rank)
    if v not in (1, stages // p):
        raise ValueError(f"this schedule has {stages // p} stages a rank, not {v}: give virtual_stages 1")
    if stages > pieces:
        raise ValueError(f"{stages} stages are more than the model's {pieces} pieces, its layers with embedding and "
                         f"head: give a smaller pp")
    runs = idea("split_pieces")(config, stages)
    return runs, parallel.ranks_of_pieces(runs, stage_to_rank)


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

    def __init__(self, config, layout, mesh, groups, pieces, runs, optimizer):
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
                         optimizer, layout.dtype, self.count, self.shape, groups, pipeline, units, runs)

    def named_parameters(self):
        """{parameter: its name in the whole GPT} of this rank's pieces."""
        return {param: name.partition(".")[2] for param, name in super().named_parameters().items()}

    def shape(self, i, tokens):
        """Of what travels between pieces: (B, T, C), or with sequence parallelism (B, T/N, C)."""
        B, T = tokens.shape
        return B, T // (self.layout.tp if self.layout.sp else 1), self.config.n_embd

    def proven(self, lists, training):
        if training:
            idea("check")(lists, None, self.zero, self.lookups, self.shared)
        return lists

    @staticmethod
    def count(targets):
        return kernels.that_count(targets).sum()

    def all_groups(self):
        """Every group that carries messages of this model; None: all ranks."""
        return [*dict.fromkeys(vars(self.groups).values()), None]

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
            router.load *= 0  # in place, as backward adds to it
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
            idea("average_between")(self.units, self.groups)
        super().add_up_gradients()

    def whole_parameter(self, name, key=None):
        """A parameter as one process would hold it; with `key`, what the optimizer keeps of it (zeros before its first
        step); or a buffer. Call it on all ranks."""
        return idea("whole_parameter")(self, name, key)


# ------------------------------------------------------------------------------------------------------------- training

class Found(NamedTuple):
    """What a step has found."""
    loss: torch.Tensor          # a number whose mean over replicas is the batch's loss
    norm: torch.Tensor          # of the gradient, before it is clipped
    loads: torch.Tensor = None  # how many tokens each expert got, int64 (L, E); None without experts

    @property
    def is_finite(self):
        return bool(self.loss.isfinite() and self.norm.isfinite())


def optimizer_of(s):
    return idea("Muon") if s.optimizer == "muon" else torch.optim.AdamW


class Trainer:
    """Model, optimizer, data and this rank's place in the mesh: `step(i)` is step i, counted from 0.

    s: the Flags. source(name) gives a parameter's initial value; None: the seed does. data: (training tokens, held-out
    tokens, their vocabulary). What safe/ and fast/ have others for: edition, as for `parallelize`; optimizer, a class
    or a partial of one; batch, which gives a step's samples as further.text.batch does.
    """
    balance_rate = 1e-3  # what a step adds to an expert's bias, or takes from it, to even out the load

    def __init__(self, s, config, source, data, device, edition=parallel.Reference, optimizer=None, batch=batch):
        self.s = s
        self.config = config
        self.device = device
        self.batch = batch
        self.train_data, self.held_out, self.vocabulary = data
        on_cpu = "gloo" if device.type == "cuda" else None
        self.control = dist.new_group(backend=on_cpu)  # all ranks, for `agree`, whose numbers the CPU reads
        source = source or partial(initial_weight, config, seed=s.seed)
        optimizer = partial(optimizer or optimizer_of(s), lr=s.lr, betas=(0.9, 0.95), weight_decay=s.weight_decay)
        self.net = parallelize(config, layout_of(s), device, source, optimizer, edition)
        self.optimizer = self.net.optimizer
        for group in self.net.all_groups():
            dist.use(group, s.comm)
        self.scaler = idea("LossScale")() if s.dtype == "fp16" else None
        self.skipped = 0  # steps left out because a number was not finite
        r, b = dist.get_rank(self.net.groups.dp), s.batch_size
        # This rank's of each batch; its peers in tp, cp and pp take the same.
        self.samples = slice(r * b // s.dp, (r + 1) * b // s.dp)

    # A step is two calls. Between them a loop decides whether the step counts, which all ranks must decide alike.

    def step(self, i):
        """Step i, which does not count if any rank finds that its loss or the norm is not finite. Returns the Found."""
        found = self.gradients(i)
        [bad] = self.agree(not found.is_finite)
        self.update(found, i, bad)
        return found

    def gradients(self, i):
        """Of step i's batch, averaged over replicas and clipped. Returns the Found."""
        scale = self.scaler.scale if self.scaler else 1.0
        micro_batches = self.micro_batches(self.train_data, self.s.seed, i)
        self.net.zero_grad()
        loss = self.net.forward_backward(*micro_batches, scale=scale)
        norm = self.net.clip_grad_norm_(self.s.clip, scale)
        return Found(loss, norm, idea("loads")(self.net) if self.config.experts else None)

    def update(self, found, i, skip=False):
        """What step i does with its gradients: the optimizer's step. skip: leave it out, on all ranks."""
        self.skipped += skip
        if self.scaler:
            self.scaler.update(not skip)
        if skip:
            return
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.s, i)
        self.net.step()
        if self.config.experts:
            idea("balance")(self.net, found.loads, self.balance_rate)

    def micro_batches(self, tokens, seed, step):
        """This rank's samples of a step: [inputs, targets], each a tuple of micro-batches, int64 (B, T); with --pack
        also where each token's document begins."""
        rows = self.batch(tokens, seed, step, self.s.batch_size, self.config.seq_len, self.samples)
        if self.s.pack:
            rows = idea("packed")(*rows, self.vocabulary.end_token)
        return [t.to(self.device, non_blocking=True).tensor_split(self.s.micro_batches) for t in rows]

    def agree(self, *numbers):
        """The largest of each whole number over all ranks, so that all do the same thing."""
        numbers = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        dist.all_reduce(numbers, dist.ReduceOp.MAX, self.control)
        return numbers.tolist()

    def mean_over_ranks(self, loss):
        loss = loss.clone()
        dist.all_reduce(loss, dist.ReduceOp.AVG, self.net.groups.dp)  # ranks of tp, cp and pp have the same loss
        return loss.item()

    @torch.no_grad()
    def evaluate(self, batches=8):
        """Mean loss, in nats a token, over the same held-out batches every time, in every layout."""
        losses = [self.net.forward(*self.micro_batches(self.held_out, self.s.seed, i)) for i in range(batches)]
        return self.mean_over_ranks(torch.stack(losses).mean())


# ---------------------------------------------------------------------------------------------------------------- start

class Run:
    """What a command line asks for: `s` (Flags), `config`, `data` (as for Trainer), `saved` (a checkpoint, or None) and
    `source` (of initial weights, or None)."""

    def __init__(self, arguments):
        try:
            self.prepare(arguments)
        except (ValueError, OSError) as why:  # one line, before any process group starts
            print(f"train.py: {why}", file=sys.stderr)
            sys.exit(2)

    def prepare(self, arguments):
        """Read the flags and the files that they name. ValueError or OSError if they cannot be used."""
        self.s = s = parse(argparse.ArgumentParser(**ABOUT), Flags, arguments)
        idea("check_flags")(s, dashed)
        world = int(os.environ.get("WORLD_SIZE") or 1)
        ranks = 1 if s.together else world
        processes = processes_of(s, ranks)
        s.device = "cpu" if s.together else device_for(s.device, dist.processes_of_a_node(world))
        kernels.use(s.kernels)
        vocabulary = Bytes()
        if s.tokenizer:
            vocabulary = idea("Tokenizer")(s.tokenizer)
            s.vocab_size = len(vocabulary)
        self.config = config_of(s)
        idea("check_layout")(s, self.config, ranks, processes, dashed)
        files = [pathlib.Path(s.data)] if s.data else standard_library()
        texts = [file.read_bytes() for file in files]
        self.data = *split(vocabulary.tokens_of(texts, s.pack)), vocabulary
        self.saved = self.source = None
        if s.resume:
            self.saved, self.source = idea("read_checkpoint")(s, self.config, config_of)
        idea("check_files")(s, self.config, texts, *self.data, self.saved)
        said = idea("told")(s, self.config, self.data, dashed, checkpoint=self.saved and self.saved["step"])
        self.meet = partial(idea("agreed"), dist.meeting_place, said)

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
        say("mode     plain: the reference alone, which is what you read")
        self.train(Trainer(self.s, self.config, self.source, self.data, device))
        dist.destroy_process_group()

    def train(self, trainer):
        """The steps that the checkpoint has not done; then a sample."""
        first = idea("load")(trainer, self.saved, say) if self.saved else 0
        self.since = first, time.perf_counter()  # the last report's
        for i in range(first, self.s.steps):
            dist.reset_traffic()  # the log then holds what one step sends
            found = trainer.step(i)
            self.report(trainer, i + 1, found)
            if self.s.out and due(self.s, "save", i + 1):
                idea("save")(trainer, i + 1)
        if self.s.sample:
            idea("show_sample")(trainer, say)

    def report(self, trainer, done, found):
        """After `done` steps, when due: rank 0 prints loss and gradient norm, and the loss of held-out data, and adds
        them to log.jsonl."""
        s = self.s
        if not (due(s, "log", done) or due(s, "eval", done) or done == 1 and s.log_every):
            return
        sent = sum(t.bytes for t in dist.traffic().values())
        entry = {"step": done, "loss": trainer.mean_over_ranks(found.loss), "grad_norm": found.norm.item(),
                 "lr": learning_rate(s, done - 1)}
        if found.loads is not None:
            entry |= idea("how_even")(found.loads)
        before, since = self.since
        a_step = (time.perf_counter() - since) / (done - before)
        entry["tokens_per_s"] = s.batch_size * self.config.seq_len / a_step
        if due(s, "eval", done):
            entry["val_loss"] = trainer.evaluate()
        self.since = done, time.perf_counter()
        said = "  ".join(f"{key} {value:.6g}" for key, value in entry.items())
        say(f"{said}  seconds_left {(s.steps - done) * a_step:.0f}  bytes_sent {sent:,}")
        if s.out and dist.get_rank() == 0:
            with open(os.path.join(s.out, "log.jsonl"), "a") as file:
                file.write(json.dumps(entry) + "\n")


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def main():
    """Train with fast/ and safe/, which stand beside this file, or without them."""
    here = pathlib.Path(__file__).parent
    if {"--plain", "--together"} & {*sys.argv} or not all((here / room).is_dir() for room in ("fast", "safe")):
        Run(sys.argv[1:]).start()
    else:
        import fast.run
        import safe.run
        safe.run.Run(sys.argv[1:], Trainer, fast.run).start()


if __name__ == "__main__":
    import train  # this file again, as the module that fast/ and safe/ know
    train.main()
