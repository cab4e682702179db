"""A run that nobody can stop: when a rank dies, how do the others go on, with no step lost or made twice?

No checkpoint is read. What makes it possible:

    a step changes a rank at once     its messages all come before `update`, and the last of them asks all ranks whether
                                      the step counts. Who has the answer knows that all have the step's gradients.
    a death is an epoch               who misses a message leaves its groups, so those who wait for it miss theirs. All
                                      meet again, in new groups, whose messages are no older ones'.
    the next rank keeps all, too      with ZeRO a row lies on one rank. The next rank keeps a second copy, and steps it:
                                      it gets the row's gradient, 4 K/N bytes a step, and keeps 12 K/N.

    F B A ...  row to the next rank  |  agree  |  update
    a death here: the step is made again       |  here: who has its gradients makes its update, then all have

When they have met, all have made equally many steps. Every parameter and its moments become whole, from what the living
have of them, as for a checkpoint, and a new Trainer takes its parts. Batches are cut anew, over fewer replicas; shares
may differ by one sample, because a loss counts by its targets. Ranks of a replica that has lost one leave with it.

    python train.py --survive --dp 4              kill any of its processes

Read with: Gray and Lamport, "Consensus on Transaction Commit" (2006), section 3, for the question before the update.
"""

import copy
import dataclasses
import math
from collections import defaultdict

import torch
import torch.distributed as torch_dist

import collectives as dist
from further.bad_input import reject
from further.flags import learning_rate
from further.resume import load_moments, run_of
from further.whole import MOMENTS, put_part
from model import shapes_of_all
from parallel import master_dtype


NEWEST = "start again, from the newest checkpoint in --out"


class Survivor:
    """A Trainer's steps, whoever dies. Its `gradients` and `update` do what the Trainer's do.

    make(s, saved)      a Trainer of the ranks that have met. saved: what further/resume.py reads of a checkpoint, or
                        None at the start
    meet(choose, word)  joins the living in new groups: (those whom choose(all who live) names, the word of each); None
                        for who is not named, or if one has ended
    """
    trainer = second = before = None
    ready = found = None  # what a step has found: of the next update, of the last one
    skipped = False       # whether the last update was left out

    def __init__(self, s, make, meet, saved=None):
        self.s, self.make, self.meet, self.saved = s, make, meet, saved
        self.at = self.done = saved["step"] if saved else 0  # the step this rank is at; how many have changed it
        mesh = torch.arange(s.pp * s.dp * s.cp * s.tp).view(s.pp, s.dp, s.cp, s.tp)
        self.replicas = mesh.movedim(1, 0).flatten(1).tolist()  # of each the ranks, as `meet` numbers them

    def begin(self, ranks, saved):
        """All that a rank goes on with changes at once, because somebody may die in here, too."""
        s = dataclasses.replace(self.s, dp=len(ranks) // len(self.replicas[0]))
        trainer = self.make(s, saved)
        second = before = None
        if s.zero:
            second = second_copy(trainer.net, saved)
            group = trainer.net.groups.shard
            before = ranks[torch_dist.get_process_group_ranks(group)[the_rank_before(group, s.cp)]]
        self.trainer, self.second, self.before = trainer, second, before

    def gradients(self, i):
        self.at = i
        if self.done > i:  # the step has changed this rank, and is not made twice
            return self.found
        found = self.trainer.gradients(i)
        loss = self.trainer.mean_over_ranks(found.loss)  # now, because a replica that dies takes its share along
        self.ready = found._replace(loss=torch.tensor(loss, dtype=torch.float64))
        for unit, copied in zip(self.trainer.net.units, self.second.units if self.second else ()):
            if unit.trained:
                copied.show_average(of_the_rank_before(unit.total, unit.group, self.s.cp))
        return self.ready

    def update(self, found, i, skip=False):
        if self.done > i:
            return
        self.trainer.update(found, i, skip)
        if self.second and not skip:
            for group in self.second.optimizer.param_groups:
                group["lr"] = learning_rate(self.s, i)
            self.second.optimizer.step()
        self.found, self.done, self.skipped = found, i + 1, bool(skip)

    def go_on(self):
        """At the start, and after a message that has not come. Returns the step to go on with; None for a rank that
        leaves."""
        met = self.meet(self.of_whole_replicas, [self.at, self.done, self.skipped, bool(self.trainer)])
        if not met:
            return None
        ranks, words = met
        at, *_, all_have_begun = map(min, zip(*words))
        if not all_have_begun:
            self.begin(ranks, self.saved)
            return at
        _, done, skipped, _ = max(words, key=lambda word: word[1])
        if done > self.done:
            self.update(self.ready, self.done, skipped)
        trainer = self.trainer
        saved = {"step": done, "skipped": trainer.skipped, "scaler": trainer.scaler and vars(trainer.scaler),
                 "run": run_of(trainer.s, trainer.config), "tensors": self.whole(ranks)}
        self.begin(ranks, saved)
        return at

    def of_whole_replicas(self, living):
        """Those of the living all of whose replica live. BadInput if there is no such replica."""
        whole = [replica for replica in self.replicas if {*replica} <= {*living}]
        reject(not whole, f"no replica has all of its {len(self.replicas[0])} ranks any more: {NEWEST}")
        return sorted(sum(whole, []))

    @torch.no_grad()
    def whole(self, living):
        """{label: whole tensor}, as a checkpoint's, of what those who live keep. BadInput names what nobody does."""
        nets = [self.trainer.net, *[self.second] * (self.second is not None and self.before not in living)]
        made = {}
        for name, shape in shapes_of_all(self.trainer.config).items():
            rows = torch.zeros(3, math.prod(shape), dtype=master_dtype(self.trainer.net.dtype))
            there = torch.zeros(math.prod(shape), dtype=torch.uint8)
            for net in nets:
                for param in [param for param, own in net.named_parameters().items() if own == name]:
                    stepped, places = net.kept(param)
                    put_part(torch.ones(stepped.numel()), places, param, there)
                    state = net.optimizer.state.get(stepped, {})
                    for row, kept in zip(rows, [stepped, *[state[key] for key in MOMENTS if key in state]]):
                        put_part(kept, places, param, row)
                buffers = dict(pair for piece in net.pieces.values() for pair in piece.named_buffers())
                if name in buffers:
                    rows[0] = buffers[name].view(-1)
                    there.fill_(1)
            for tensor in there, rows.view(torch.uint8):
                dist.all_reduce(tensor, dist.ReduceOp.MAX)
            reject(not there.all(), f"nobody who lives has all of {name}: a rank is dead, and so is the next one, "
                   f"which kept its rows, too: {NEWEST}")
            labels = name, *[f"{key}.{name}" for key in MOMENTS]
            made |= {label: row.view(shape) for label, row in zip(labels, rows)}
        made.setdefault("lm_head.weight", made["wte.weight"])  # tied
        return made


def the_rank_before(group, cp):
    """This one's, in the ring of a group. With --cp it is one of the replica before, because a replica goes as a whole.
    """
    return (dist.get_rank(group) - cp) % dist.get_world_size(group)


def of_the_rank_before(tensor, group, cp):
    """The tensor that the rank before this one has."""
    n = dist.get_world_size(group)
    to, source = [0] * n, [0] * n
    to[(dist.get_rank(group) + cp) % n] = source[the_rank_before(group, cp)] = tensor.numel()
    theirs = torch.empty_like(tensor)
    dist.all_to_all_single(theirs, tensor.contiguous(), source, to, group)
    return theirs


def second_copy(net, saved):
    """A Parallel like `net`, for the rows of the rank before. It computes nothing but the optimizer's steps."""
    cp = net.layout.cp
    second = copy.copy(net)
    second.unit_of = {}
    second.units = []
    for unit in net.units:
        copied = copy.copy(unit)
        copied.mine = of_the_rank_before(unit.mine, unit.group, cp)
        copied.first = the_rank_before(unit.group, cp) * unit.width
        copied.stepped = {param: copied.make_stepped(param) for param in unit.params}
        second.units.append(copied)
        second.unit_of.update(dict.fromkeys(unit.params, copied))
    second.optimizer = copy.copy(net.optimizer)
    second.optimizer.state, second.optimizer.param_groups = defaultdict(dict), []
    for group in second.param_groups():
        second.optimizer.add_param_group(group)
    if saved and net.optimizer.state:
        load_moments(second, saved["tensors"], saved["step"] - saved["skipped"])
    return second
