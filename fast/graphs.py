"""A rank's list, recorded whole.

Takes the place of parallel.py's Pipeline. A block launches some 45 kernels a micro-batch. Small kernels end before the
CPU has launched the next one, so the GPU idles. To replay a step's list, recorded as one CUDA graph, costs the CPU one
launch.
"""

import itertools
from collections import Counter, defaultdict, deque
from functools import partial

import torch
from torch.utils._pytree import tree_leaves, tree_map

import collectives as dist
from fast import recorded
from fast.linear import WeightGradients
from further.schedules import HalvedPipeline
from parallel import carried, goes_to, MicroBatch, needs
from safe.messages import lost_peer_named, progress


class CollectingMicroBatch(MicroBatch):
    """A MicroBatch whose W computes nothing twice, because the piece's WeightGradients keep what W needs."""

    def __init__(self, module, loss, weight_gradients):
        super().__init__(module, loss)
        self.weight_gradients = weight_gradients
        self.later = []  # what W computes weight gradients from

    def backward(self, dy):
        dx = super().backward(dy)
        self.weight_gradients.catch_up()
        return dx

    def backward_input(self, dy):
        with self.weight_gradients.put_off(self.later):
            dx = super().backward(dy)
        self.x = self.edge = None  # W, which may come late, needs neither
        return dx

    def backward_weights(self):
        while self.later:  # what a layer has used goes before the next one's dW is there
            self.weight_gradients.compute(*self.later.pop(0))


class RecordedPipeline(HalvedPipeline):
    """A Pipeline that posts receives late on CUDA, and replays its list from a CUDA graph if it `records`.

    The first step with new shapes or actions warms up. The second one records, and from then on the graph is replayed.
    A graph uses fixed addresses, so it keeps its memory, and inputs are copied in. All ranks must get the same shapes
    in a step.

    On CUDA a waiting receive is a kernel that occupies multiprocessors. A product that needs all of them then takes two
    waves instead of one. So a receive is posted only when its value is needed, because the rank would idle then anyway:
    posted early, receives cost 6.5 % of a step of 1F1B on two H200s. Received late, transfers of both directions would
    wait for each other in one group, so each direction between two neighbours has its own.
    """
    records = False

    def __init__(self, *arguments):
        super().__init__(*arguments)
        unit_of = {param: unit for units in self.units.values() for unit in units for param in unit.params}
        self.weight_gradients = {piece: WeightGradients(module, unit_of) for piece, module in self.pieces.items()}
        self.channels = pipeline_channels(self.mesh, self.piece_to_rank)
        self.rank = dist.get_rank(self.group)
        self.ranks = torch.distributed.get_process_group_ranks(self.group)
        self.steps = Counter()  # how often each list ran with these shapes
        self.recording = None   # the latest Recording

    def run(self, actions, x, y, dloss=None, beside=None):
        for weight_gradients in self.weight_gradients.values():
            weight_gradients.waiting.clear()  # of a step whose backward raised
        inputs = x, y, dloss, beside or [{}] * len(x)
        if not self.records or not torch.is_grad_enabled():
            return self.launch(actions, *inputs)
        key = tuple(actions), *(tensor.shape for tensor in given_to(inputs))
        self.steps[key] += 1
        if self.steps[key] == 1:
            self.recording = None  # its memory goes before other shapes need theirs
            return self.launch(actions, *inputs)
        if not self.recording or self.recording.key != key:
            self.recording = None
            self.recording = Recording(self, key, actions, inputs)
        return self.recording.replay(inputs)

    def launch(self, actions, *inputs):
        """Run the list, kernel by kernel."""
        if self.device.type == "cuda":
            actions = received_late(actions, self.piece_to_rank)
        return super().run(actions, *inputs)

    def forward(self, action):
        self.micro_batch = partial(CollectingMicroBatch, weight_gradients=self.weight_gradients[action.stage])
        super().forward(action)

    def do(self, action):
        super().do(action)
        for unit in self.units[action.stage] if action.kind in ("B", "I") else ():
            unit.collect()

    def wait_for(self, result):
        progress(f"waiting for what {result} of the pipeline makes")
        with lost_peer_named(f"waited for what {result} of the pipeline makes"):
            return super().wait_for(result)

    def receive(self, action):
        between = min(action.stage, goes_to(action))
        buffer = torch.empty(self.shape(between, self.x[action.micro_batch]), dtype=self.dtype, device=self.device)
        source = self.piece_to_rank[action.stage]
        with lost_peer_named(f"receive {action} of the pipeline"):
            handle = dist.irecv(buffer, self.ranks[source], self.channels[source, self.rank])
        self.results[carried(action)] = handle, buffer

    def send(self, action):
        _, tensor = self.results.pop(carried(action))
        tensor = tensor.detach().contiguous()
        target = self.piece_to_rank[goes_to(action)]
        with lost_peer_named(f"send {action} of the pipeline"):
            handle = dist.isend(tensor, self.ranks[target], self.channels[self.rank, target])
        self.sending.append((handle, tensor))
        if self.device.type != "cuda":  # there a send that is waited for would hold up the stream
            self.wait_for_sent(2)


def pipeline_channels(mesh, piece_to_rank):
    """{(from, to): group of two ranks that have neighbouring pieces} of this rank's pipeline; from, to: places in
    it."""
    channels = {}
    pairs = {pair for pair in itertools.pairwise(piece_to_rank.values()) if len(set(pair)) == 2}
    for ranks in mesh.mesh.flatten(1).T.tolist() if pairs else ():  # of each pipeline
        made = {pair: dist.new_group([ranks[place] for place in pair])
                for pair in sorted(pairs | {pair[::-1] for pair in pairs})}
        if dist.get_rank() in ranks:
            channels = made
    return channels


def received_late(actions, piece_to_rank):
    """The same list, each receive directly before the action that needs what comes; all earlier ones from that rank
    first, because it sends in this order."""
    waiting = defaultdict(deque)  # rank -> receives from it
    late = []
    for action in actions:
        if action.kind[0] == "R":
            waiting[piece_to_rank[action.stage]].append(action)
            continue
        for result in needs(action, piece_to_rank):
            from_there = waiting[piece_to_rank[result.stage]]
            while result in map(carried, from_there):
                late.append(from_there.popleft())
        late.append(action)
    return late


def given_to(inputs):
    """All tensors that a step is given, always in the same order."""
    return tree_leaves(inputs)


class Recording:
    """A list with its inputs, (x, y, dloss, beside) of `Pipeline.run`, as a CUDA graph."""

    def __init__(self, pipeline, key, actions, inputs):
        self.key = key
        self.inputs = tree_map(torch.clone, inputs)
        self.units = {unit for some in (pipeline.units, pipeline.averaged) for units in some.values() for unit in units}
        for unit in self.units:
            unit.refresh()  # or the graph would not gather what an evaluation has left whole
        recorded.make_room()

        def body():
            self.losses = pipeline.launch(actions, *self.inputs)

        self.graph = recorded.RecordedGraph(body)
        self.totals = [(unit, unit.total) for unit in self.units if unit.total is not None]

    def replay(self, inputs):
        for into, tensor in zip(given_to(self.inputs), given_to(inputs)):
            into.copy_(tensor)
        self.graph.replay()
        for unit, total in self.totals:
            unit.show_average(total)
        return self.losses
