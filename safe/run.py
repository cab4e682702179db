"""The training program that checks its input first, survives crashes, and explains errors.

train.py's `main` hands it the Trainer, and what fast/ has in place of a Trainer's parts. `Run` prepares what a command
line asks for; `Loop` goes through the Trainer's steps."""

import contextlib
import gc
import math
import os
import pathlib
import signal
import sys
import time
import traceback
from functools import partial

import torch

import collectives as dist
import safe
from further.bad_input import BadInput, writable
from further.experts import how_even
from further.flags import ABOUT, dashed, due, learning_rate, parse
from further.muon import Muon
from further.refusals import agreed, check_numbers, check_steps, told
from further.resume import check_optimizer, checkpoints, crc_of, find_checkpoint, load
from further.sampling import show_sample
from further.survive import Survivor
from further.text import Bytes
from safe import launch
from safe.checkpoints import (
    check_same_data, differences, fingerprint, identity_of, lock, start_of, write_checkpoint)
from safe.data import (
    bytes_a_token, check_data, check_prompt, check_vocabulary, checked_batch, load_data, open_vocabulary)
from safe.files import check_folder, Log, tell
from safe.flags import check_layout, model_config, Parser, refuse, Settings
from safe.huggingface import came_with
from safe.messages import progress
from safe.page import Page
from safe.survive import LEFT, Meeting, start
from safe.reports import describe, describe_first_steps, measured, profiled, share_of, size, traced
from safe.watch import Watch
from theory import speed


# -------------------------------------------------------------------------------------------- steps under observation

class Loop:
    """The steps of a Trainer: reports of memory and speed, traces and profiles, a stop of all ranks at a signal or at
    numbers that are not finite, and checkpoints.

    run: the Run. steps: the Trainer, or a Survivor, whose Trainer is another one after each death. look(found): which
    step's numbers to judge by now, this one's or, on GPUs, those of the one before.
    """
    terminated = stopping = 0  # the signal to end that this rank has had; that one of them has had
    saved = True  # whether the last checkpoint was written
    since = None  # the time of the last report
    lost = ()     # with --survive, the errors of a message that does not come

    def __init__(self, run, steps, look):
        self.run, self.steps, self.look = run, steps, look
        self.s = run.s
        self.config = run.config
        _, held_out, vocabulary = run.data
        self.unit = "byte" if isinstance(vocabulary, Bytes) else "token"
        self.bytes_a_token = bytes_a_token(held_out, vocabulary)
        self.first = self.logged = run.saved["step"] if run.saved else 0
        self.memory = {"after_step": self.first, "unit": self.unit}  # for the log's next entry

    @property
    def trainer(self):
        return self.steps.trainer if self.s.survive else self.steps

    def train(self):
        """The steps that the checkpoint has not done; then a sample."""
        s = self.s
        i = min(self.first, s.steps)
        missed = (0.0, None) if s.survive else None  # when a message has not come, the error
        try:
            while missed or i <= s.steps and not self.stopping:
                try:
                    if missed:
                        i = min(self.meet_the_living(*missed), s.steps)
                        missed = None
                        gc.collect()  # old groups, in cycles, would keep their connections open
                    if self.since is None:
                        self.begin()
                    if i < s.steps:
                        self.step(i)
                    else:
                        self.show_sample()
                    if i == s.steps or self.stopping:
                        self.trainer.agree(0)  # nobody leaves who may be missed
                    i += 1
                except self.lost as error:
                    missed = time.perf_counter(), error
                    self.stopping = 0  # all agree on that again, in the step that is made again
        except torch.OutOfMemoryError as error:
            full, *_ = str(error).partition(" Including")
            graphs = "--cuda-graphs off, " * (s.cuda_graphs == "on")
            raise BadInput(f"{full} Give {graphs}more --micro-batches, --recompute block or --zero 3; `python bench.py "
                           "plan` lists layouts that fit") from None
        if self.run.page:
            self.run.page.write(over=True)

    def meet_the_living(self, since, error):
        """Also at the start. Returns the step to go on with. Rank 0 may be another one now, who writes into --out."""
        run = self.run
        try:
            i = self.steps.go_on()
        except TimeoutError:  # nobody else is dead: the error is this rank's own
            traceback.print_exception(error)
            sys.exit(1)
        if i is None:
            sys.exit(LEFT)
        self.logged = min(self.logged, i)  # a report may come again
        if dist.get_rank() == 0 and run.s.out:
            for _ in range(100):
                with contextlib.suppress(BadInput):  # who has it leaves, too
                    run.lock = run.lock or lock(run.s.out, run.identity)
                    break
                time.sleep(0.1)
            run.log = Log(f"{run.s.out}/log.jsonl", i)
            run.page = run.page or Page(run.s.out)
        if not self.since:
            return i
        seconds = time.perf_counter() - since
        self.say(f"survive  --dp {self.trainer.s.dp} goes on with step {i + 1}, {seconds:.1f} s after a message that "
                 "has not come")
        return i

    def begin(self):
        """Say what is trained, and take over what a checkpoint has."""
        if self.run.lock:
            self.run.page = Page(self.s.out)
        describe(self)
        if self.s.survive and self.s.zero:
            twice = sum(4 * unit.mine.nbytes for unit in self.trainer.net.units)  # row, gradient, two moments
            self.say(f"survive  each rank also keeps the row of the rank before: {size(twice)}")
        if self.first < self.s.steps:
            self.go_on()
        self.since = time.perf_counter()

    def step(self, i):
        progress("starting the step", step=i + 1)
        dist.reset_traffic()  # the log then holds what one step sends
        with self.observed(i):
            found = self.steps.gradients(i)
            self.steps.update(found, i, self.judge(i + 1, found))
        if i == self.first:
            self.seen.share = share_of(self.trainer, found.loads)
        self.after(i + 1, found)

    def go_on(self):
        """Take over what a checkpoint has besides weights."""
        trainer, run = self.trainer, self.run
        if run.saved:
            changes = differences(run.saved["run"], run.identity, ("flags",))
            self.say(f"resume   {run.checkpoint.path}: " + ", ".join([f"after step {self.first}", *changes]))
            if not self.s.survive:  # else the Survivor's Trainer has it already
                load(trainer, run.saved, self.say)
        if trainer.optimizer.param_groups[0].get("fused"):  # it wants them there
            for state in trainer.optimizer.state.values():
                state["step"] = state["step"].to(trainer.device)

    @contextlib.contextmanager
    def observed(self, i):
        """The first step measures activations. With --profile the third one is traced, because those before it warm
        up, and the fourth is profiled, which takes time."""
        last = self.s.steps - 1
        with contextlib.ExitStack() as around:
            if i == self.first:
                self.seen = around.enter_context(measured(self.trainer))
            if self.s.profile and i == min(self.first + 2, last):
                around.enter_context(traced(self))
            if self.s.profile and i == min(self.first + 3, last):
                around.enter_context(profiled(self))
            yield

    def judge(self, done, found):
        """Whether all ranks leave step `done` out, because the numbers of one are not finite. All ranks ask each other
        once a step, also whether one of them has had a signal to end. BadInput, before anything is saved, unless a
        smaller scale of fp16 may help."""
        trainer = self.trainer
        hopeless = not trainer.scaler or trainer.scaler.scale == 1  # until then, an overflow of fp16 is no error
        judged = self.look(found)
        bad, self.stopping = trainer.agree(not judged.is_finite, self.terminated)
        if bad and hopeless:
            self.blame(judged.loss, done - (judged is not found))
        return bad

    def blame(self, loss, done):
        """Say what is not finite in step `done`."""
        world = dist.get_world_size()
        # The first rank has the largest number.
        rank, = self.trainer.agree(0 if loss.isfinite() else world - dist.get_rank())
        what = f"the loss on rank {world - rank}" if rank else "the gradient"
        raise BadInput(f"{what} is not finite in step {done}: a smaller --lr may help")

    def after(self, done, found):
        """What follows a step: reports, a checkpoint."""
        s = self.s
        if done == min(self.first + 2, s.steps):
            self.memory = self.memory | describe_first_steps(self)
        is_due = due(s, "log", done) or due(s, "eval", done) or s.log_every > 0 and (done == 1 or self.stopping)
        saves = s.out and (self.stopping or due(s, "save", done))
        if saves or done == s.steps:
            self.settle(done)  # nothing that is not finite is saved
        if is_due:
            self.report(done, found)
        if saves:
            self.save(done)
        if self.stopping:
            kept = f"the same command goes on from step {done}" if s.out and self.saved else "nothing is saved"
            self.say(f"{self.where(done)}  {signal.Signals(self.stopping).name}: {kept}")

    def settle(self, done):
        """Judge by the last step's numbers, too, where `look` holds them back."""
        last = self.look(None)
        if last and self.trainer.agree(not last.is_finite)[0]:
            self.blame(last.loss, done)

    # printing and logging

    def say(self, text):
        if dist.get_rank() == 0:
            tell(text)
            if self.run.page and not text.startswith(("step", "saved")):
                self.run.page.said.append(text)

    def where(self, done):
        return f"step {done:>{len(str(self.s.steps))}}/{self.s.steps}"

    def report(self, done, found):
        """Print and log what is known after `done` steps. The speed is the mean over the steps since the last time."""
        s, trainer = self.s, self.trainer
        norm = found.norm.item()  # waits for the device
        seconds = time.perf_counter() - self.since
        sent = sum(t.bytes for t in dist.traffic().values())
        tokens = s.batch_size * self.config.seq_len
        rate = (done - self.logged) * tokens / seconds
        entry = {"step": done, "loss": trainer.mean_over_ranks(found.loss), "grad_norm": norm,
                 "lr": learning_rate(s, done - 1), "tokens_per_s": rate,
                 "comm_bytes": sent if s.comm != "torch" else None, **self.memory}
        more = ""
        if trainer.scaler:
            entry |= dict(loss_scale=trainer.scaler.scale, skipped_steps=trainer.skipped)
            more += f"scale {trainer.scaler.scale:g} ({trainer.skipped} skipped)  "
        if found.loads is not None:
            entry |= how_even(found.loads)
            more += f"load {entry['load_max']:.2f} x mean  "
        if mfu := speed.mfu(self.config, rate / trainer.net.mesh.size(), speed.peak_flops(trainer.device)):
            entry["mfu"] = mfu / 100
            more += f"MFU {mfu:.1f} %  "
        if due(s, "eval", done):
            entry["val_loss"] = trainer.evaluate()
        if s.log_every:
            left = int((s.steps - done) * tokens / rate)
            problem = self.run.log and self.run.log.write(entry)  # first: what is printed is there
            self.say(f"{self.where(done)}  loss {entry['loss']:.4f}  norm {norm:.2f}  lr {entry['lr']:.1e}  {more}"
                     f"{rate / 1e3:.1f}k tokens/s  left {left // 60}:{left % 60:02}")
            if problem:
                self.say(f"log      step {done} is not in {s.out}/log.jsonl: {problem.strerror}")
        if "val_loss" in entry:
            bits = entry["val_loss"] / math.log(2)
            more = f", {bits / self.bytes_a_token:.2f} bits a byte" if self.bytes_a_token else ""
            self.say(f"{self.where(done)}  validation loss {entry['val_loss']:.4f} nats a {self.unit}, {bits:.2f} bits"
                     + more)
        if self.run.page:
            self.run.page.write()
        self.since = time.perf_counter()
        self.logged = done
        self.memory = {}

    def show_sample(self):
        """All ranks agree before each tenth token: if the others only waited for rank 0's last one, they could time
        out."""
        def goes_on():
            [self.stopping] = self.trainer.agree(self.terminated)
            return not self.stopping

        if self.s.sample:
            progress("sampling")
            show_sample(self.trainer, self.say, goes_on)

    def save(self, done):
        """Rank 0 writes the checkpoint into --out. All ranks call this, to gather one whole tensor at a time."""
        if self.s.survive and os.path.exists(f"{self.s.out}/step-{done:08}"):
            return  # written before a death, after which the step came again
        started = time.perf_counter()
        try:
            if self.run.log:
                self.run.log.sync()
            write_checkpoint(self.trainer, done, self.run.identity, self.run.came)
            self.say(f"saved    step {done}: {self.s.out}/step-{done:08}")
            self.saved = True
        except OSError as error:
            self.saved = False
            self.say(f"{self.where(done)}  not saved in {self.s.out}: {error.strerror}; older checkpoints there are "
                     "complete")
        self.since += time.perf_counter() - started


# ------------------------------------------------------------------------------------------------- a run that survives

class Plain:
    """What a Run takes where --fast is off; fast/run.py has the same names."""
    mode = "reference + safe: what you read, with checks around it; --plain leaves those out"

    on = staticmethod(safe.on)

    @staticmethod
    def parts(s, device):
        return {"optimizer": partial(Muon if s.optimizer == "muon" else torch.optim.AdamW, fused=True, foreach=False)}

    @staticmethod
    def prepare(trainer):
        pass

    @staticmethod
    def look(s, trainer):
        return lambda found: found  # None is none


FOR_EVER = 10**6  # seconds: the Watch ends a run that hangs, because it knows of time in which all ranks were suspended


class Run:
    """What a command line asks for, checked before processes connect:

    s, config     Settings, GPTConfig
    data          tokens to train on, held-out tokens, their vocabulary; source: of initial weights, or None
    checkpoint    the Checkpoint to go on from, or None; saved: what it says
    identity      of the run; came: the Came of its weights
    world         how many processes were started; processes: how many the layout needs
    lock          the file in --out that is locked, on rank 0, if checkpoints go there; likewise log and page; else None

    trainer: train.py's Trainer. fast: fast/run.py, or what has the same names."""
    lock = log = page = saved = None

    def __init__(self, arguments, trainer, fast):
        self.make_trainer = trainer
        try:
            self.world = launch.started()
            self.on_rank_0 = os.environ.get("RANK", "0") == "0"
            self.prepare(arguments)
        except (ValueError, OSError) as problem:
            refuse("train.py", problem)
        except KeyboardInterrupt:
            sys.exit(130)
        self.edition = fast if self.s.fast == "on" else Plain
        self.edition.on()

    def settings(self, arguments):
        """(Settings, the Checkpoint of --resume or None): a run goes on with what decided its losses."""
        s = parse(Parser(**ABOUT), Settings, arguments)
        checkpoint = find_checkpoint(s, self.on_rank_0)
        if checkpoint:
            words = [dashed(name) if value is True else f"{dashed(name)}={value}"
                     for name, value in checkpoint.flags.items() if value is not False and hasattr(s, name)]
            s = parse(Parser(**ABOUT), Settings, words + arguments)
        check_numbers(s)
        return s, checkpoint

    def prepare(self, arguments):
        """Fill in what a Run has. ValueError or OSError if it cannot be run."""
        s, checkpoint = self.settings(arguments)
        self.s = s
        vocabulary = open_vocabulary(s, checkpoint)
        if s.tokenizer and not checkpoint and not s.init_from:
            s.vocab_size = s.vocab_size or len(vocabulary)
        self.config, self.source = model_config(s, checkpoint)
        s.vocab_size = self.config.vocab_size
        self.processes = check_layout(s, self.config, self.world, dist.processes_of_a_node(self.world))
        launch.check_room(self.processes)
        check_vocabulary(s, self.config, vocabulary)
        self.left_out = []
        self.identity = identity_of(s, self.config)
        if checkpoint and not s.steps:  # a sample reads no data, and leaves nothing
            s.out = ""
            self.data = b"", b"", vocabulary
        else:
            checkpoint = self.prepare_data(vocabulary, checkpoint)
        s.prompt = getattr(vocabulary, "begin", "") + s.prompt
        check_prompt(s, self.config, vocabulary)
        self.checkpoint = checkpoint
        if checkpoint:
            self.source = checkpoint.source
            self.saved = checkpoint.manifest
        self.came = came_with(checkpoint.path if checkpoint else s.init_from, s.tokenizer)
        for files in "trace.json", "rank-*.json":
            check_folder(s.profile, "--profile", files)  # on each rank, because nodes may have folders of their own
        if s.out and self.on_rank_0 and self.processes == self.world:  # else rank 0, once started, takes the lock
            self.lock = lock(s.out, self.identity)
            with writable(s.out, "--out"):
                self.log = Log(f"{s.out}/log.jsonl", checkpoint.step if checkpoint else 0)
        there = checkpoint and f"of step {checkpoint.step} with CRC-32 {crc_of(self.saved['files']):08x}"
        more = {"the checkpoint in the folder that all nodes share": there or "none",
                "the weights' CRC-32": self.identity["start"].get("weights")}
        self.meet = partial(agreed, launch.settled_rendezvous, told(s, self.config, self.data, **more))

    def prepare_data(self, vocabulary, checkpoint):
        """Read the data. Returns the Checkpoint to go on from: that of --resume, or the newest in --out."""
        s = self.s
        known = checkpoint and checkpoint.manifest["run"]
        if checkpoint:
            check_steps(s, checkpoint.step)
        if s.out:
            checkpoint, known = start_of(s, self.config, checkpoint, self.on_rank_0)
        if checkpoint and checkpoint.step < s.steps:
            check_optimizer(checkpoint.flags, s)
        self.data = load_data(s, vocabulary, self.left_out)
        check_data(s, self.config, *self.data)
        self.identity["data"] = fingerprint(*self.data)
        if known:
            self.identity["start"] = known["start"]
            check_same_data(s, known, self.identity, checkpoint)
        return checkpoint

    def start(self):
        torch.set_num_threads(min(torch.get_num_threads(), launch.cores()))
        if self.processes != self.world:
            if self.s.survive:
                start(self.processes, self.all_saved)
            launch.start_again(self.processes, self.all_saved)
        watch = Watch(self.s.timeout, self.how_to_go_on, self.last_words)
        try:
            device = torch.device("cpu")
            if not self.s.survive:
                watch.start()
                device = dist.initialize(self.s.device, FOR_EVER, self.meet)
                watch.connect()
            saved, stopping = self.train(device)
        except Exception as error:  # noqa: BLE001  the other ranks must hear of any error
            watch.give_up(error)
        watch.stop()
        dist.destroy_process_group()
        sys.exit(130 if stopping == signal.SIGINT else 0 if saved else 1)

    def all_saved(self):
        """By what rank 0 leaves in .lock."""
        lock = pathlib.Path(self.s.out, ".lock")
        return not self.s.out or not lock.exists() or not lock.read_text()

    def how_to_go_on(self):
        """A line for the user, after this run's end; "" where nothing is saved."""
        found = checkpoints(self.s.out) if self.s.out else []
        return f"the same command goes on from step {int(found[-1].stem[5:])}" if found else ""

    def last_words(self, words):
        if self.page:
            self.page.said.append(words)
            self.page.write(over=True)

    def train(self, device):
        """Returns (whether everything was saved, always True on ranks other than 0; the signal that ended it, or 0)."""
        s = self.s

        batch = checked_batch(s, self.config.vocab_size, self.data, device)

        def build(s, saved):
            source = saved["tensors"].__getitem__ if saved and saved is not self.saved else self.source
            trainer = self.make_trainer(s, self.config, source, self.data, device, batch=batch,
                                        **self.edition.parts(s, device))
            self.edition.prepare(trainer)
            if s.survive and saved:
                load(trainer, saved, str)
            return trainer

        if s.survive:
            loop = Loop(self, Survivor(s, build, Meeting(s.timeout), self.saved), lambda found: found)
            loop.lost = RuntimeError
        else:
            trainer = build(s, None)
            loop = Loop(self, trainer, self.edition.look(s, trainer))
            dist.barrier()  # or Ctrl-C could end a rank that has no handler yet, while the others save
        # A cluster sends one of `launch.ENDS` before it takes the machine away, a terminal SIGHUP when it is closed,
        # which is ignored under nohup, and SIGINT at Ctrl-C, which without --out ends a rank at once. The handler only
        # sets a number, so that this step ends and is saved. It stays after an error, because torchrun sends SIGTERM to
        # ranks that still print it.
        ends = [*launch.ENDS, *[signal.SIGINT] * bool(s.out)]
        ends = [end for end in ends if signal.getsignal(end) != signal.SIG_IGN]
        before = [signal.signal(end, lambda number, _: setattr(loop, "terminated", number)) for end in ends]
        hint = "Ctrl-C   this step ends and is saved; a second Ctrl-C quits at once" * self.on_rank_0
        with launch.second_interrupt_quits(hint) if s.out else contextlib.nullcontext():
            loop.train()
        for end, handler in zip(ends, before):  # after a stop all is saved: a scheduler's second signal is ignored
            is_late = loop.stopping and end != signal.SIGINT
            signal.signal(end, signal.SIG_IGN if is_late else handler)
        if loop.terminated:
            launch.end_after_sigterm()
        if self.lock and loop.saved:
            self.lock.truncate(0)  # possible even on a full disk
        return loop.saved, loop.stopping
