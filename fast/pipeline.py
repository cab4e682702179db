"""Transfers of a pipeline that neither disturb products nor wait for each other, and name what failed.

Takes the place of parallel.Pipeline. Receives posted early cost 6.5 % of a step of 1F1B on two H200s.
"""

import itertools
from collections import defaultdict, deque

import torch

import collectives as dist
from parallel import carried, Pipeline
from safe.messages import lost_peer_named, progress


# ------------------------------------------------------------------------------------------- pipeline: transfers, times

def named(handle, what):
    """The handle, whose wait() reports progress, and whose error names the transfer that failed."""
    def wait():
        progress(f"waiting for the {what}")
        with lost_peer_named(f"waited for the {what}"):
            handle.wait()

    return dist.Handle(wait, handle.is_completed)


def pipeline_channels(mesh, homes):
    """{(from, to): group of two ranks that have neighbouring stages} of this rank's pipeline; from, to: places in it.

    Each direction has its own group, so that activations and gradients do not wait for each other.
    """
    channels = {}
    neighbours = {pair for pair in itertools.pairwise(homes.values()) if len(set(pair)) == 2}
    pairs = sorted(neighbours | {pair[::-1] for pair in neighbours})
    for ranks in mesh.mesh.flatten(1).T.tolist():  # of each pipeline
        made = {pair: dist.new_group([ranks[place] for place in pair]) for pair in pairs}
        if dist.get_rank() in ranks:
            channels = made
    return channels


class PatientPipeline(Pipeline):
    """A Pipeline that posts receives late on CUDA, frees an output once it is sent, and names a failed transfer.

    On CUDA a waiting receive is a kernel that occupies multiprocessors. A product that needs all of them then takes two
    waves instead of one. So a receive is posted only when its value is needed, because the rank would idle then anyway.
    With gloo a waiting receive disturbs no computation, so it is posted where `lower` put it. Received late, transfers
    of both directions would wait for each other in one group, so each direction between two neighbours has its own.
    channels: of another pipeline with these arguments. If left out, groups are made, so all ranks must make a pipeline.
    """
    def __init__(self, stages, homes, mesh, *args, channels=None):
        super().__init__(stages, homes, mesh, *args)
        self.arguments = stages, homes, mesh, *args
        self.rank = dist.get_rank(self.group)
        self.ranks = torch.distributed.get_process_group_ranks(self.group)
        self.channels = channels or pipeline_channels(mesh, homes)

    def begin(self, *args):
        super().begin(*args)
        self.expected = defaultdict(deque)  # pipeline rank -> receives that are not posted yet

    def receive(self, action):
        if self.device.type == "cuda":
            self.expected[self.other_rank(action)].append(action)
        else:
            self.post(action)

    def post(self, receive):
        source = self.other_rank(receive)
        result = carried(receive)
        whose = f"{result.kind} of micro-batch {result.micro_batch}"
        what = f"{whose} from rank {self.ranks[source]} (pipeline rank {source})"
        buffer = self.room_for(receive.micro_batch)
        with lost_peer_named(f"posted the {what}"):
            handle = dist.irecv(buffer, self.ranks[source], self.channels[source, self.rank])
        self.results[result] = named(handle, what), buffer

    def wait_for(self, result):
        source = self.homes[result.stage]
        while result not in self.results:  # post all earlier ones first, because the other rank sends in this order
            self.post(self.expected[source].popleft())
        return super().wait_for(result)

    def send(self, action):
        what = f"send {action} of the pipeline"
        to = self.other_rank(action)
        _, tensor = self.results.pop(carried(action))
        progress(what)
        with lost_peer_named(what):
            handle = dist.isend(tensor, self.ranks[to], self.channels[self.rank, to])
        self.sending.append((named(handle, what), tensor))

    def forget_sent(self, most):
        """On CUDA a send that is waited for would hold up the stream, so forget those that have ended until the end."""
        if most == 0 or self.device.type != "cuda":
            super().forget_sent(most)
        while self.sending and self.sending[0][0].is_completed():
            self.sending.popleft()[0].wait()

    def do(self, action):
        super().do(action)
        self.forget_sent(2)
