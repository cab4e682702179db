"""A run that nobody can stop: further/survive.py, with a rank killed at each message."""

import fcntl
import functools
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from datetime import timedelta
from threading import current_thread
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist

import collectives as dist
from further import together
from further.bad_input import BadInput
from further.flags import config_of, Flags
from further.resume import load, open_checkpoint
from further.survive import Survivor
from further.text import Bytes
from model import shapes
from safe.survive import Meeting
from tests.pool import close, HERE, in_new_process, on_linux, parametrize
from tests.refusals import refusal_of_layout
from tests.runs import log_of, trained  # noqa: F401  a fixture
from train import Trainer


class Killed(BaseException):
    pass


class Lost(RuntimeError):
    pass


class Mortal(together.World):
    """kills: {rank: before which of its messages it dies}. late: a rank hears of a death only where it waits for who is
    dead, or has heard; else at its next message, whatever it is."""

    def __init__(self, n, kills, late, **more):
        super().__init__(**more)
        self.kills, self.late = kills, late
        self.sent, self.epoch, self.words = Counter(), Counter(), defaultdict(dict)
        self.dead, self.gone, self.over = [], [], False  # gone: also those who have left
        self.order, self.known = {0: [*range(n)]}, Counter()  # of each epoch its ranks, and the deaths known by then
        self.store = torch_dist.HashStore()

    @property
    def me(self):
        return self.ranks.index(current_thread().rank)

    def wake_all(self):
        for event in [*self.asleep]:
            self.wake(event)

    def leave(self, me, *dies):
        self.dead += dies
        self.gone.append(me)
        self.wake_all()

    def sleep(self, event=None, waits_for=""):
        super().sleep(event, waits_for)
        if self.me in self.dead:  # one of its threads
            raise Killed

    def check(self, epoch, sender=None):
        """Lost if this message will not come."""
        me = self.me
        heard = not self.late and len(self.dead) > self.known[epoch]
        if heard or epoch < self.epoch[me] or sender is not None and (
                sender in self.gone or self.epoch[sender] > epoch):
            raise Lost

    def post(self, ticket, tensor, what):
        me = self.me
        self.sent[me] += 1
        if self.kills.get(me) == self.sent[me]:
            self.leave(me, me)
            raise Killed
        self.check(ticket[0][0])
        super().post(ticket, tensor, what)

    def wait(self, ticket, waits_for):
        while ticket in self.messages or ticket in self.posted:
            epoch = ticket[0][0]
            self.check(epoch, self.order[epoch][ticket[1]])
            self.sleep(ticket, waits_for)

    def meet(self, choose, word):
        me = self.me
        while True:
            epoch = self.epoch[me] = len(self.gone)
            self.wake_all()
            if self.over:
                return None
            stay = choose([rank for rank in self.order[0] if rank not in self.gone])
            if me not in stay:
                return self.leave(me)
            self.words[epoch][me] = word
            self.wake_all()
            while len(self.gone) == epoch and not {*stay} <= {*self.words[epoch]}:
                self.sleep("the meeting", "the others")
            if len(self.gone) == epoch:
                break
        self.order[epoch], self.known[epoch] = stay, len(self.dead)
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("together", rank=stay.index(me), world_size=len(stay),
                                store=torch_dist.PrefixStore(f"{epoch}", self.store))
        return stay, [self.words[epoch][rank] for rank in stay]


class OfAnEpoch(together.Queues):
    """A group whose messages are no other epoch's."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        world = current_thread().world
        self.epoch = world.epoch[world.me]

    def ticket(self, end, sender, receiver, tag):
        world, ranks = current_thread().world, torch_dist.get_process_group_ranks(self)
        key = (self.epoch, self.group_name), ranks[sender], ranks[receiver], tag
        return *key, next(world.counts[end, key])


TOKENS = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint8)
BASE = {"n_layer": 1, "n_head": 2, "n_embd": 8, "seq_len": 4, "batch_size": 6, "warmup_steps": 0, "lr": 0.01,
        "steps": 3, "dtype": "fp64", "dp": 1}
LAYOUTS = {
    "dp 3": dict(dp=3), "dp 3, ZeRO-1": dict(dp=3, zero=1), "dp 3, ZeRO-2": dict(dp=3, zero=2),
    "dp 3, ZeRO-3": dict(dp=3, zero=3), "dp 2, tp 2": dict(dp=2, tp=2), "dp 2, pp 2": dict(dp=2, pp=2)}


def run(words, kills=(), late=False, change=lambda survivor: None, **loop):
    """(of each rank that has done all steps (losses, {name: weights}), how many messages each rank has sent)"""
    s = Flags(**BASE | words)
    config = config_of(s)
    n = s.dp * s.tp * s.pp * s.cp
    world = Mortal(n, dict(kills), late)

    def make(s, saved):
        source = saved and saved["tensors"].__getitem__
        trainer = Trainer(s, config, source, (TOKENS, TOKENS, Bytes()), torch.device("cpu"))
        if saved:
            load(trainer, saved, str)
        return trainer

    def body():
        try:
            survivor = Survivor(s, make, world.meet)
            change(survivor)
            return train(survivor, **loop)
        except Killed:
            return None
        finally:
            if world.me not in world.gone:
                world.over = True
                world.leave(world.me)

    with patch.object(together, "Queues", OfAnEpoch):
        return [*filter(None, together.run(n, body, world))], world.sent


def train(survivor, asks_first=True):
    """As safe/run.py's Loop."""
    losses, weights, lost, meetings = {}, {}, True, 0
    while meetings < 9:
        try:
            if lost:
                meetings += 1
                i = survivor.go_on()
                lost = False
            if i is None:
                return None
            net = survivor.trainer.net
            if i == survivor.s.steps:
                survivor.trainer.agree(0)
                return losses, weights
            found = survivor.gradients(i)
            if asks_first:
                survivor.trainer.agree(0)
            survivor.update(found, i)
            if not asks_first:
                survivor.trainer.agree(0)
            losses[i] = survivor.trainer.mean_over_ranks(found.loss)
            if i + 1 == survivor.s.steps:
                weights = {name: net.whole_parameter(name) for name in shapes(survivor.trainer.config)}
            i += 1
        except Lost:
            lost = True
    raise RuntimeError("they meet again and again")


@functools.cache
def one_process(**words):
    [alone], _ = run({**words, "dp": 1, "tp": 1, "pp": 1, "cp": 1, "zero": 0})
    return alone


def far(found, words):
    """How far losses and weights are from one process that saw the same batches. Some rank must have done all steps."""
    losses, weights = one_process(**words)
    assert found and all(len(there) == len(losses) for there, _ in found)
    return max(max(abs(there[i] - losses[i]) for i in losses)
               + max((one[name] - weights[name]).abs().max().item() for name in weights) for there, one in found)


def kills_of(words, every=1):
    """({rank: before which message it dies}, late) for each `every`th message of each rank."""
    _, sent = run(words)
    every_kill = [({rank: n + 1}, late) for late in (False, True) for rank in sorted(sent) for n in range(sent[rank])]
    return every_kill[::every]


def sweep(words, every=1):
    """(how many runs, how far the worst is from one process)"""
    kills = kills_of(words, every)
    return len(kills), max(far(run(words, *kill)[0], words) for kill in kills)


@parametrize("layout", [*LAYOUTS])
def test_whoever_dies_at_whichever_message_the_others_go_on(layout):
    runs, worst = in_new_process(sweep, LAYOUTS[layout], 61)
    assert runs > 5 and worst < 1e-10


@parametrize("words", [dict(dp=2, experts=4, zero=1), dict(dp=2, arch="llama", micro_batches=3, zero=2),
                       dict(dp=3, tp=2, zero=3), dict(dp=3, cp=2, zero=2, seq_len=8)], ids=str)
def test_so_they_do_in_other_models_and_layouts(words):
    assert in_new_process(sweep, words, 151)[1] < 1e-10


def two_deaths(zero):
    """How far the worst of some random ones is from one process. Shares of 8 samples differ between three ranks."""
    draw, words, worst = random.Random(zero), dict(dp=4, zero=zero, batch_size=8), 0.0
    for _ in range(8):
        a, b = draw.sample(range(4), 2)
        kills = {a: draw.randrange(1, 150), b: draw.randrange(1, 150)}
        try:
            worst = max(worst, far(run(words, kills, draw.random() < 0.5)[0], words))
        except BadInput as why:  # of two neighbours the second one must not die before what the first one had is safe
            assert zero and abs(a - b) in (1, 3) and "nobody who lives has all of" in str(why), kills
    return worst


@parametrize("zero", [0, 3])
def test_two_ranks_may_die(zero):
    assert in_new_process(two_deaths, zero) < 1e-10


@parametrize("words, kills, why", [
    (dict(dp=4, zero=1, batch_size=8), {1: 60, 2: 60}, "nobody who lives has all of wte.weight: a rank is"),
    (dict(dp=2, tp=2), {0: 40, 3: 40}, "no replica has all of its 2 ranks any more: start again")], ids=str)
def test_what_is_lost_is_named(words, kills, why):
    with pytest.raises(BadInput, match=why):
        in_new_process(run, words, kills, True)


def same_share(survivor):
    """Each rank takes the samples that it took before a death."""
    make, taken = survivor.make, []

    def made(*given):
        trainer = make(*given)
        taken.append(trainer.samples)
        trainer.samples = taken[0]
        return trainer

    survivor.make = made


def one_epoch(survivor):
    """An epoch's messages may be taken for another's."""
    OfAnEpoch.epoch = property(lambda group: 0, lambda group, epoch: None)


def seen(layout, wrong):
    """Whether the sweep finds what is wrong."""
    words = LAYOUTS[layout]
    for kill in kills_of(words, 23):
        try:
            if far(run(words, *kill, **wrong)[0], words) > 1e-10:
                return True
        except (RuntimeError, AssertionError, ValueError, KeyError):
            return True
    return False


@parametrize("layout, wrong", [("dp 3, ZeRO-1", dict(asks_first=False)), ("dp 3", dict(change=same_share)),
                               ("dp 3", dict(change=one_epoch))], ids=["changes first", "same shares", "one epoch"])
def test_the_sweep_sees_what_is_wrong(layout, wrong):
    assert in_new_process(seen, layout, wrong)


# ------------------------------------------------------------------------------------------------------ real processes

def killed(words, victims):
    """(what train.py prints with these flags, its ranks `victims` killed one by one from step 4 on; the exit code)"""
    with subprocess.Popen([sys.executable, "train.py", *words.split()], cwd=HERE, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "are processes" in line:
                ranks = [*map(int, line.split("processes")[1].split())]
            if victims and re.match(r"step *([4-9]|\d\d)/", line):
                os.kill(ranks[victims.pop()], signal.SIGKILL)
    return "".join(lines), process.returncode


SMALL = "--dtype fp64 --batch-size 12 --seq-len 16 --n-layer 1 --n-embd 16 --n-head 2"
SHORT = f"{SMALL} --sample 0 --eval-every 0"


@on_linux
@parametrize("layout, victims, left", [("--dp 3 --zero 3", [2, 0], 1), ("--dp 2 --tp 2", [1], 2)])
def test_processes_are_killed_and_the_log_is_that_of_an_undisturbed_run(trained, text, tmp_path, layout, victims, left):
    """Rank 0, who writes it, too. Nobody is left behind, and a later run goes on from its checkpoint."""
    more = f"{SMALL} --steps 40 --log-every 2 --eval-every 10 --save-every 20 --sample 5 --data {text}"
    trained(1, f"{more} --out OUT/one")
    said, code = killed(f"{more} {layout} --survive --out {tmp_path}/killed", [*victims])
    assert code == 0 and len(re.findall("is dead .signal 9.", said)) == len(victims), said
    assert f"--dp {left} goes on" in said or left == 2 and "--dp 1 goes on" in said
    keys = "step", "loss", "grad_norm"
    assert close(log_of(tmp_path / "killed", *keys), log_of(tmp_path / "one", *keys))
    one, other = (open_checkpoint(tmp_path / run / "step-00000040", True) for run in ("one", "killed"))
    assert all(close(one.source(name), other.source(name)) for name in shapes(one.config))


DIES = """
import os, sys
sys.path.insert(0, os.getcwd())
import safe.run, train
write = safe.run.write_checkpoint
safe.run.write_checkpoint = lambda *given: os.kill(os.getpid(), 9) if os.environ["RANK"] == "0" else write(*given)
train.main()"""


@on_linux
def test_a_signal_s_checkpoint_is_written_by_those_who_live(tmp_path):
    """Rank 0 dies as it begins to write."""
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    words = f"{SHORT} --steps 90000 --survive --dp 2 --out {tmp_path}/run".split()
    with subprocess.Popen([sys.executable, script, *words], cwd=HERE, text=True, stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            if line.startswith("step"):
                process.send_signal(signal.SIGTERM)
                break
        said = process.stdout.read()
    assert "--dp 1 goes on" in said and "the same command goes on from step" in said and process.returncode == 0, said
    assert len([*tmp_path.glob("run/step-*/manifest.json")]) == 1


@on_linux
def test_a_second_run_in_the_folder_is_refused(tmp_path):
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        said, code = killed(f"{SHORT} --survive --dp 2 --out {tmp_path}", [])
    assert code == 2 and "writes there" in said and "is dead" not in said, said


@on_linux
def test_a_save_that_fails_is_told_by_the_exit_code(tmp_path):
    words = f"{SHORT} --steps 4 --survive --dp 2 --out {tmp_path}"
    ran = subprocess.run(["bash", "-c", f"ulimit -f 40; exec {sys.executable} train.py {words}"], cwd=HERE, text=True,
                         capture_output=True)
    assert ran.returncode == 1 and "not saved" in ran.stdout, ran


def group_of_one_who_is_dead():
    with tempfile.TemporaryDirectory() as folder:
        news = pathlib.Path(folder, "news")
        news.write_text("[0, false, [0, 1]]")
        os.environ["RINGGPT_NEWS"] = str(news)
        meeting = object.__new__(Meeting)
        meeting.epoch = 0
        threading.Timer(0.3, news.write_text, ["[1, false, [0]]"]).start()
        meeting.make_group(torch_dist.HashStore(), 0, 2, timedelta(seconds=60))


def test_nobody_waits_for_the_dead_where_groups_are_made():
    with pytest.raises(RuntimeError, match="while a group was made"):
        in_new_process(group_of_one_who_is_dead)


@parametrize("words, why", [
    ("--survive", "--survive with one replica: give --dp 2"),
    ("--survive --tp 2", "which goes as a whole: give --dp 2"),
    ("--survive --dp 2 --optimizer muon", "--survive wants --optimizer adamw"),
    ("--survive --dp 2 --fast on", "--survive wants --fast off"),
    ("--survive --dp 2 --experts 4 --ep 2", "--survive wants --ep 1")])
def test_who_cannot_survive_is_told(words, why):
    assert why in refusal_of_layout(words.split(), 1, 1)


if __name__ == "__main__":
    for layout, words in LAYOUTS.items():
        runs, worst = sweep(words)
        print(f"{layout:14}{runs // 2:5} messages, at each a death, heard of at once and late: {worst:.0e}", flush=True)
