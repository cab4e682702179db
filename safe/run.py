"""The training program that checks its input first, survives crashes, and explains errors."""

import contextlib
import math
import os
import pathlib
import signal
import sys
import time
from functools import partial

import torch

import collectives as dist
from further.experts import how_even
from further.flags import ABOUT, due, learning_rate, parse
from further.refusals import agreed, told
from further.resume import load, whole_tensors
from further.sampling import show_sample
from further.text import batch, Bytes
from safe import launch
from safe.checkpoints import (
    check_optimizer, check_same_data, checkpoints, crc_of, differences, find_checkpoint, fingerprint, lock, run_of,
    start_of, write_checkpoint)
from safe.data import (
    bytes_a_token, check_data, check_prompt, check_tokens, check_vocabulary, load_data, open_vocabulary)
from safe.files import check_folder, Log, sync, tell, writable
from safe.flags import check_layout, check_numbers, dashed, model_config, Parser, refuse, Settings
from safe.huggingface import came_with
from safe.messages import progress
from safe.page import Page
from safe.reports import describe, describe_first_steps, measured, profiled, traced
from safe.sizes import BadInput, reject
from safe.watch import Watch
from theory import speed
from train import Found, optimizer_of, Trainer


# ------------------------------------------------------------------------------------------- training under observation

FOR_EVER = 10**6  # seconds: the Watch ends a run that hangs, because it knows of time in which all ranks were suspended


class NotFinite(BadInput):
    """A loss or a gradient, which other flags may keep finite."""


class Terminated(Exception):
    """A signal to end has come, and the step that was running is finished and saved."""


def checked_batch(s, config, *args):
    """As further.text.batch, of tokens that the model has; in memory from which a GPU copies by itself."""
    rows = batch(*args)
    for t in rows:
        check_tokens(s, t, config.vocab_size)
    return [t.pin_memory() for t in rows] if s.device == "cuda" else rows


class WatchedTrainer(Trainer):
    """The Trainer for long runs: it reports memory and speed, writes traces and profiles, names the rank whose numbers
    are not finite, stops cleanly on SIGTERM and SIGHUP, and saves checkpoints that are complete or absent."""
    run = None  # the WatchedRun; a benchmark has none
    first = 0  # steps that are done when the run goes on from a checkpoint
    log = page = None  # on rank 0, if there is --out: its Log, and its Page
    # What the first steps found: for `describe_first_steps`, and for the log, whose next entry takes `memory`.
    activations = 0
    share = 1.0
    memory = {}
    terminated = stopping = 0  # the signal to end that this rank has had; that one of them has had
    saved = True  # whether the last checkpoint was written

    def __init__(self, s, config, *args, **parts):
        super().__init__(s, config, *args, **{"optimizer": partial(optimizer_of(s), fused=True, foreach=False),
                                              "batch": partial(checked_batch, s, config)} | parts)

    # the loop

    def train(self, saved):
        self.unit = "byte" if isinstance(self.vocabulary, Bytes) else "token"
        self.bytes_a_token = bytes_a_token(self.held_out, self.vocabulary)
        if self.run.lock:
            self.page = self.run.page = Page(self.s.out)
        describe(self, trains=(saved["step"] if saved else 0) < self.s.steps)
        try:
            for step in range(self.load(saved), self.s.steps):
                dist.reset_traffic()  # the log then holds what one step sends
                self.report(step + 1, self.step(step))
                if self.s.out and self.due("save", step + 1):
                    self.save(step + 1)
            if self.s.sample:
                self.show_sample()
        except Terminated:
            pass
        except torch.OutOfMemoryError as error:
            full, *_ = str(error).partition(" Including")
            graphs = "--cuda-graphs off, " * (self.s.cuda_graphs == "on")
            raise BadInput(f"{full} Give {graphs}more --micro-batches, --recompute block or --zero 3; `python bench.py "
                           "plan` lists layouts that fit") from None
        if self.page:
            self.page.write(over=True)

    def step(self, step):
        """As in Trainer. The first step measures activations. The third one, if asked to, is traced and profiled,
        because the steps before it warm up."""
        progress("starting the step", step=step + 1)
        third = step == min(self.first + 2, self.s.steps - 1)
        with contextlib.ExitStack() as around:
            if step == self.first:
                around.enter_context(measured(self))
            if third and self.s.trace:
                around.enter_context(traced(self))
            if third and self.s.profile:
                around.enter_context(profiled(self))
            found = self.gradients(step)
            self.loads = found.loads
            self.update(found, step, not self.all_finite(found.loss, found.norm))
            return found

    def agree(self, *numbers):
        """As in Trainer. self.stopping becomes the same signal on all ranks, if one has had it."""
        *numbers, self.stopping = super().agree(*numbers, self.terminated)
        return numbers

    def all_finite(self, loss, norm):
        """Whether this step counts. If not: NotFinite, before anything is saved; with --on-nan skip, a line that says
        so."""
        hopeless = not self.scaler or self.scaler.scale == 1  # until then, an overflow of fp16 is no error
        [bad] = self.agree(not Found(loss, norm).is_finite)
        finite = not bad
        if finite or not hopeless or not self.run:  # a benchmark also times steps without their collectives
            return finite
        world = dist.get_world_size()
        done = progress()[0]
        blame, = self.agree(0 if loss.isfinite() else world - dist.get_rank())  # the first rank has the largest number
        what = f"the loss on rank {world - blame}" if blame else "the gradient"
        self.write_log({"step": done, "not_finite": what, "on_nan": self.s.on_nan})
        if self.s.on_nan == "stop":
            raise NotFinite(f"{what} is not finite: a smaller --lr may help, or --on-nan skip")
        self.say(f"{self.where(done)}  {what} is not finite: step skipped, {self.skipped + 1} in all")
        return False

    # printing and logging

    def say(self, text):
        if dist.get_rank() == 0:
            tell(text)
            if self.page and not text.startswith(("step", "saved")):
                self.page.said.append(text)

    def where(self, done):
        return f"step {done:>{len(str(self.s.steps))}}/{self.s.steps}"

    def due(self, what, done):
        also = what == "log" and self.s.log_every > 0 and (done == 1 or self.stopping)
        return also or due(self.s, what, done)

    def report(self, done, found):
        if done == min(self.first + 2, self.s.steps):
            self.memory = self.memory | describe_first_steps(self)
        if self.due("log", done) or self.due("eval", done):
            found.norm.item()  # waits for the device
            self.seconds = time.perf_counter() - self.since
            self.sent = sum(t.bytes for t in dist.traffic().values())
            entry = {"step": done, "loss": self.mean_over_ranks(found.loss), "grad_norm": found.norm.item(),
                     "lr": learning_rate(self.s, done - 1)}
            if found.loads is not None:
                entry |= how_even(found.loads)
            if self.due("eval", done):
                entry["val_loss"] = self.evaluate()
            self.record(entry)
        if self.stopping:
            if self.s.out:
                self.save(done)
            kept = f"the same command goes on from step {done}" if self.s.out and self.saved else "nothing is saved"
            self.say(f"{self.where(done)}  {signal.Signals(self.stopping).name}: {kept}")
            raise Terminated

    def record(self, entry):
        """Print and log the entry. Its speed is the mean over the steps since the last entry."""
        s = self.s
        done = entry["step"]
        tokens = s.batch_size * self.config.seq_len
        rate = (done - self.logged) * tokens / self.seconds
        more = ""
        entry |= dict(tokens_per_s=rate, comm_bytes=self.sent if s.comm != "torch" else None, **self.memory)
        if self.scaler:
            entry |= dict(loss_scale=self.scaler.scale, skipped_steps=self.skipped)
            more += f"scale {self.scaler.scale:g} ({self.skipped} skipped)  "
        if "load_max" in entry:
            more += f"load {entry['load_max']:.2f} x mean  "
        if mfu := speed.mfu(self.config, rate / self.net.mesh.size(), speed.peak_flops(self.device)):
            entry["mfu"] = mfu / 100
            more += f"MFU {mfu:.1f} %  "
        if s.log_every:
            left = int((s.steps - done) * tokens / rate)
            self.say(f"{self.where(done)}  loss {entry['loss']:.4f}  norm {entry['grad_norm']:.2f}  "
                     f"lr {entry['lr']:.1e}  {more}{rate / 1e3:.1f}k tokens/s  left {left // 60}:{left % 60:02}")
            self.write_log(entry)
        if "val_loss" in entry:
            bits = entry["val_loss"] / math.log(2)
            more = f", {bits / self.bytes_a_token:.2f} bits a byte" if self.bytes_a_token else ""
            self.say(f"{self.where(done)}  validation loss {entry['val_loss']:.4f} nats a {self.unit}, {bits:.2f} bits"
                     + more)
        if self.page:
            self.page.write()
        self.since = time.perf_counter()
        self.logged = done
        self.memory = {}

    def write_log(self, entry):
        if self.log and (problem := self.log.write(entry)):
            self.say(f"log      step {entry['step']} is not in {self.s.out}/log.jsonl: {problem.strerror}")

    def show_sample(self):
        """As in Trainer. All ranks agree before each tenth token: if the others only waited for rank 0's last one, they
        could time out."""
        progress("sampling")
        show_sample(self, self.say, self.goes_on)

    def goes_on(self):
        self.agree()
        return not self.stopping

    # checkpoints

    def save(self, done):
        """Rank 0 writes the checkpoint into --out. All ranks call this, to gather one whole tensor at a time."""
        started = time.perf_counter()
        tensors = whole_tensors(self)
        try:
            if dist.get_rank() == 0:
                sync(self.log.file)
                write_checkpoint(self, done, tensors)
                self.say(f"saved    step {done}: {self.s.out}/step-{done:08}")
            self.saved = True
        except OSError as error:
            self.saved = False
            problem = error.strerror
            self.say(f"{self.where(done)}  not saved in {self.s.out}: {problem}; older checkpoints there are complete")
            self.write_log({"step": done, "not_saved": problem})
        for _ in tensors:  # the other ranks take part in gathering; so does rank 0 after an error, or they would hang
            pass
        self.since += time.perf_counter() - started

    def load(self, saved):
        first = saved["step"] if saved else 0
        if saved and first < self.s.steps:
            changes = differences(saved["run"], self.run.identity, ("flags",))
            self.say(f"resume   {self.run.checkpoint.path}: " + ", ".join([f"after step {first}", *changes]))
        if saved and first < self.s.steps:
            load(self, saved, self.say)
        if self.optimizer.param_groups[0].get("fused"):  # it wants them there
            for state in self.optimizer.state.values():
                state["step"] = state["step"].to(self.device)
        self.log = self.run.log
        self.first = self.logged = first
        self.memory = {"after_step": first, "unit": self.unit}
        self.since = time.perf_counter()
        return first


# ------------------------------------------------------------------------------------------------- a run that survives

class WatchedRun:
    """The Run that checks its input before processes connect, starts them itself, locks --out, and explains errors.

    It also has `checkpoint` (the Checkpoint to go on from, or None), `identity` (by `run_of`), `world` (how many
    processes were started), `processes` (how many the layout needs), `on_rank_0`, `came` (the Came of its weights),
    and, if checkpoints go to --out, there `lock` (the file that is locked), `log` and `page`; else None.
    """
    mode = "reference + safe: what you read, with checks around it; --plain leaves those out"
    trainer = WatchedTrainer
    lock = log = page = saved = None
    interrupted = False  # whether Ctrl-C has ended it

    def __init__(self, arguments):
        try:
            self.world = launch.started()
            self.on_rank_0 = os.environ.get("RANK", "0") == "0"
            self.prepare(arguments)
        except BadInput as problem:
            refuse("train.py", problem)
        except KeyboardInterrupt:
            sys.exit(130)

    def settings(self, arguments):
        """(Settings, the Checkpoint of --resume or None): a run goes on with what decided its losses."""
        s = parse(Parser(**ABOUT), Settings, arguments)
        checkpoint = find_checkpoint(s, self.on_rank_0)
        if checkpoint:
            trained_with = checkpoint.manifest["run"]["flags"].items()
            words = [dashed(name) if value is True else f"{dashed(name)}={value}"
                     for name, value in trained_with if value is not False and hasattr(s, name)]
            arguments = words + arguments
            s = parse(Parser(**ABOUT), Settings, arguments)
        check_numbers(s)
        return s, checkpoint

    def prepare(self, arguments):
        """Fill in what a Run has. BadInput if it cannot be run."""
        s, checkpoint = self.settings(arguments)
        vocabulary = open_vocabulary(s, checkpoint)
        if s.tokenizer and not checkpoint and not s.init_from:
            s.vocab_size = s.vocab_size or len(vocabulary)
        config, source = model_config(s, checkpoint)
        self.processes = check_layout(s, config, self.world, dist.processes_of_a_node(self.world))
        check_vocabulary(s, config, vocabulary)
        self.identity = checkpoint and checkpoint.manifest["run"]
        self.left_out = []
        if checkpoint and not s.steps:  # a sample reads no data, and leaves nothing
            s.out = ""
            data = b"", b"", vocabulary
        else:
            known = self.identity
            if s.out:
                checkpoint, known = start_of(s, config, checkpoint, self.on_rank_0)
            if checkpoint:
                check_optimizer(s, checkpoint)
            data = load_data(s, vocabulary, self.left_out)
            check_data(s, config, *data)
            self.identity = run_of(s, config) | {"data": fingerprint(*data)}
            if known:
                self.identity["start"] = known["start"]
                check_same_data(s, known, self.identity, checkpoint)
        s.prompt = getattr(vocabulary, "begin", "") + s.prompt
        check_prompt(s, config, vocabulary)
        if self.on_rank_0:
            check_folder(s.trace, "--trace", "trace.json")
            check_folder(s.profile, "--profile", "rank-*.json")
            if s.out:
                self.lock = lock(s.out, self.identity)
                with writable(s.out, "--out"):
                    self.log = Log(f"{s.out}/log.jsonl", checkpoint.manifest["step"] if checkpoint else 0)
        if checkpoint:
            source = checkpoint.source
            self.saved = checkpoint.manifest
        weights = checkpoint.path if checkpoint else s.init_from
        self.came = came_with(weights, s.tokenizer)
        there = checkpoint and f"of step {self.saved['step']} with CRC-32 {crc_of(self.saved.get('files')):08x}"
        more = {"the checkpoint in the folder that all nodes share": there or "none",
                "the weights' CRC-32": self.identity["start"]["weights"]}
        self.meet = partial(agreed, launch.settled_rendezvous, told(s, config, data, dashed, **more))
        self.s = s
        self.config = config
        self.source = source
        self.data = data
        self.checkpoint = checkpoint

    def start(self):
        if hasattr(sys.stdout, "reconfigure"):  # a notebook's has none
            sys.stdout.reconfigure(errors="replace")  # a sample may hold letters that this terminal cannot print
        torch.set_num_threads(min(torch.get_num_threads(), launch.cores()))
        if self.processes != self.world:
            # This process keeps the lock for its ranks. Its name stands in the file until rank 0 writes its own.
            holder = pathlib.Path(self.lock.name).read_text if self.lock else str
            own = holder()
            launch.start_again(self.processes, lambda: holder() in ("", own))
        watch = Watch(self.s.timeout, self.how_to_go_on, self.last_words)
        try:
            watch.start()
            device = dist.initialize(self.s.device, FOR_EVER, self.meet)
            watch.connect()
            saved = self.train(device)
        except Exception as error:  # noqa: BLE001  the other ranks must hear of any error
            watch.give_up(error)
        watch.stop()
        dist.destroy_process_group()
        sys.exit(130 if self.interrupted else 0 if saved else 1)

    def how_to_go_on(self):
        """A line for the user, after this run's end; "" where nothing is saved."""
        found = checkpoints(self.s.out) if self.s.out else []
        return f"the same command goes on from step {int(found[-1].stem[5:])}" if found else ""

    def last_words(self, words):
        if self.page:
            self.page.said.append(words)
            self.page.write(over=True)

    def train(self, device):
        """Train, as Run.start does. Returns whether everything was saved; always True on ranks other than 0."""
        trainer = self.trainer(self.s, self.config, self.source, self.data, device)
        trainer.run = self
        # A cluster sends SIGTERM before it takes the machine away, a terminal SIGHUP when it is closed, which is
        # ignored under nohup, and SIGINT at Ctrl-C, which without --out ends a rank at once. The handler only sets a
        # number, so that this step ends and is saved. It stays after an error, because torchrun sends SIGTERM to ranks
        # that still print it.
        ends = [signal.SIGTERM, signal.SIGHUP, *[signal.SIGINT] * bool(self.s.out)]
        ends = [end for end in ends if signal.getsignal(end) != signal.SIG_IGN]
        before = [signal.signal(end, lambda number, _: setattr(trainer, "terminated", number)) for end in ends]
        hint = "Ctrl-C   this step ends and is saved; a second Ctrl-C quits at once" * self.on_rank_0
        with launch.second_interrupt_quits(hint) if self.s.out else contextlib.nullcontext():
            trainer.train(self.saved)
        for end, handler in zip(ends, before):  # after a stop all is saved: a scheduler's second signal is ignored
            is_late = trainer.stopping and end != signal.SIGINT
            signal.signal(end, signal.SIG_IGN if is_late else handler)
        self.interrupted = trainer.stopping == signal.SIGINT
        if trainer.terminated:
            launch.end_after_sigterm()
        if self.lock and trainer.saved:
            self.lock.truncate(0)  # possible even on a full disk
        dist.barrier()
        return trainer.saved
