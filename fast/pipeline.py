"""Transfers of a pipeline that neither disturb products nor wait for each other, and name what failed.

A subclass of the Pipelines, for stages of several pieces, whose gradients an optimizer of fast/stages.py averages.
Receives posted early cost 6.5 % of a step of 1F1B on two H200s.
"""

import itertools
from collections import defaultdict, deque
from contextlib import nullcontext

import torch

import collectives as dist
from fast.linear import WeightGradients
from further.schedules import HalvedPipeline
from parallel import carried, goes_to, MicroBatch
from safe.messages import lost_peer_named, progress


HALVES = {"B": "IW", "I": "I", "W": "W"}  # of a backward
MADE_BY = {"F": "activation", "B": "gradient"}


# ------------------------------------------------------------------------------------------- pipeline: transfers, times

def named(handle, what):
    """The handle, whose wait() reports progress, and whose error names the transfer that failed."""
    def wait():
        progress(f"waiting for the {what}")
        with lost_peer_named(f"waited for the {what}"):
            handle.wait()

    return dist.Handle(wait, handle.is_completed)


def pipeline_channels(mesh, stage_to_rank):
    """{(from, to): group of two ranks that have neighbouring stages} of this rank's pipeline; from, to: places in it.

    Each direction has its own group, so that activations and gradients do not wait for each other.
    """
    channels = {}
    neighbours = {pair for pair in itertools.pairwise(stage_to_rank.values()) if len(set(pair)) == 2}
    pairs = sorted(neighbours | {pair[::-1] for pair in neighbours})
    for ranks in mesh.mesh.flatten(1).T.tolist():  # of each pipeline
        made = {pair: dist.new_group([ranks[place] for place in pair]) for pair in pairs}
        if dist.get_rank() in ranks:
            channels = made
    return channels


class CollectingMicroBatch(MicroBatch):
    """A MicroBatch that runs W apart from I. weight_gradients: the stage's WeightGradients; None for F and B alone."""

    def __init__(self, module, loss, weight_gradients=None):
        super().__init__(module, loss)
        self.weight_gradients = weight_gradients
        self.later = []  # what W computes weight gradients from

    def backward(self, dy):
        dx = self.gradients(dy)
        if self.weight_gradients:
            self.weight_gradients.catch_up()
        return dx

    def gradients(self, dy):
        return super().backward(dy)

    def backward_input(self, dy):
        with self.weight_gradients.put_off(self.later):
            dx = self.gradients(dy)
        self.x = self.edge = None  # W, which may come late, needs neither
        return dx

    def backward_weights(self):
        while self.later:  # what a layer has used goes before the next one's dW is there
            self.weight_gradients.compute(*self.later.pop(0))


class PatientPipeline(HalvedPipeline):
    """A Pipeline of stages that posts receives late on CUDA, frees an output once it is sent, names a failed transfer,
    and computes nothing twice in W.

    On CUDA a waiting receive is a kernel that occupies multiprocessors. A product that needs all of them then takes two
    waves instead of one. So a receive is posted only when its value is needed, because the rank would idle then anyway.
    With gloo a waiting receive disturbs no computation, so it is posted where `lower` put it. Received late, transfers
    of both directions would wait for each other in one group, so each direction between two neighbours has its own.
    sync: the optimizer that averages gradients, in each stage's last backward, or with ZeRO 2 and 3 in all; None: for
    evaluation. channels: of another pipeline with these arguments. If left out, groups are made, so all ranks must make
    a pipeline.
    """

    def __init__(self, stages, stage_to_rank, mesh, loss, shape, dtype, device, sync=None, channels=None):
        nothing = dict.fromkeys(stages, ())
        super().__init__(stages, stage_to_rank, nothing, nothing, loss, mesh.get_group("pp"), shape, dtype, device)
        self.arguments = stages, stage_to_rank, mesh, loss, shape, dtype, device, sync
        self.sync = sync
        self.rank = dist.get_rank(self.group)
        self.ranks = torch.distributed.get_process_group_ranks(self.group)
        self.channels = channels or pipeline_channels(mesh, stage_to_rank)
        self.weight_gradients = {}  # {stage's module: its WeightGradients}, once a schedule has halves of backwards

    def run(self, actions, x, y, dloss=None, beside=None):
        beside = beside or [{}] * len(x)
        self.begin(actions, x, y, beside)
        return super().run(actions, x, y, dloss, beside)

    def begin(self, actions, x, y, beside):
        for weight_gradients in self.weight_gradients.values():
            weight_gradients.waiting.clear()  # of a step whose backward raised
        self.expected = defaultdict(deque)  # pipeline rank -> receives that are not posted yet
        # Later actions overwrite earlier ones, so that the last ones stay.
        self.last_with = {(half, action.stage): action for action in actions for half in HALVES.get(action.kind, "")}
        if any(action.kind == "I" for action in actions):
            self.separate_weight_gradients()

    def separate_weight_gradients(self):
        """From now on, W can run apart from I."""
        if not self.weight_gradients:
            self.weight_gradients = {module: WeightGradients(module) for module in self.pieces.values()}

    def micro_batch(self, module, loss):
        return CollectingMicroBatch(module, loss, self.weight_gradients.get(module))

    def backward(self, action):
        with self.syncing(action):
            super().backward(action)

    def backward_input(self, action):
        with self.syncing(action):
            super().backward_input(action)

    def backward_weights(self, action):
        with self.syncing(action):
            super().backward_weights(action)

    def syncing(self, action):
        """Gradients are averaged once no later action of the stage adds to those of the same parameters: I computes
        those of norms, W those of matrices, B both."""
        last = all(self.last_with[half, action.stage] == action for half in HALVES[action.kind])
        return nullcontext() if last else self.sync.no_sync()

    def receive(self, action):
        if self.device.type == "cuda":
            self.expected[self.piece_to_rank[action.stage]].append(action)
        else:
            self.post(action)

    def room_for(self, micro_batch):
        """A tensor that takes a micro-batch's activation between two stages, or its gradient."""
        return torch.empty(self.shape(0, self.x[micro_batch]), dtype=self.dtype, device=self.device)

    def post(self, receive):
        source = self.piece_to_rank[receive.stage]
        result = carried(receive)
        what = f"{MADE_BY[result.kind]} of micro-batch {result.micro_batch} from rank {self.ranks[source]}"
        buffer = self.room_for(receive.micro_batch)
        with lost_peer_named(f"posted the {what}"):
            handle = dist.irecv(buffer, self.ranks[source], self.channels[source, self.rank])
        self.results[result] = named(handle, what), buffer

    def wait_for(self, result):
        source = self.piece_to_rank[result.stage]
        while result not in self.results:  # post all earlier ones first, because the other rank sends in this order
            self.post(self.expected[source].popleft())
        return super().wait_for(result)

    def send(self, action):
        what = f"send {action} of the pipeline"
        to = self.piece_to_rank[goes_to(action)]
        tensor = self.results.pop(carried(action))[1].detach()
        progress(what)
        with lost_peer_named(what):
            handle = dist.isend(tensor, self.ranks[to], self.channels[self.rank, to])
        self.sending.append((named(handle, what), tensor))

    def wait_for_sent(self, most):
        """On CUDA a send that is waited for would hold up the stream, so until the end only those that are over are."""
        if most == 0 or self.device.type != "cuda":
            super().wait_for_sent(most)
        while self.sending and self.sending[0][0].is_completed():
            self.sending.popleft()[0].wait()

    def do(self, action):
        super().do(action)
        self.wait_for_sent(2)
