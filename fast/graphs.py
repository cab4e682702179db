"""A pipeline's micro-batches, replayed from CUDA graphs.

GraphPipeline takes the place of a GPT's Pipeline. Without graphs a step of GPT-2 medium takes 2 % longer on two H200s
(DDP, --tp), 26 % (ZeRO-3), 31 % (--tp --sp), and four times as long in two stages.
"""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch

import collectives as dist
from fast.pipeline import CollectingMicroBatch, PatientPipeline
from fast import recorded
from fast.fp8 import TwoCopies
from fast.zero import AheadOptimizer
from fast.stages import EveryBackward, FSDPOptimizer
from theory.clock import most_held


# ------------------------------------------------------------------------------------------------ pipeline: CUDA graphs
#
# A block launches some 45 kernels a micro-batch. Small kernels end before the CPU has launched the next one, so the GPU
# idles. Replaying a recorded CUDA graph costs the CPU one launch. The price: a graph uses fixed addresses, so it keeps
# its memory, inputs are copied in and outputs out, and gradients are added to the buckets' flat vectors, which must not
# move. A replay runs no autograd hooks. ZeRO-2 and 3 gather units and reduce-scatter gradients in hooks, so for them
# the hooks run during the recording, and what they launch becomes part of the graph.

class Totals:
    """The flat vectors of a FlatOptimizer, to which recordings add gradients. They keep their addresses."""

    def __init__(self, sync):
        self.sync = sync
        self.reducers = sync.reducers
        self.flats = {bucket: torch.empty(bucket.numel, dtype=bucket.total_dtype, device=bucket.device)
                      for bucket in sync.buckets}
        self.of = {p: bucket.view(flat, p) for bucket, flat in self.flats.items() for p in bucket.params}

    def begin(self, overwrite):
        """Zero the totals; if gradients overwrite them, only the padding, which clipping by a NaN norm sets to NaN.
        Drop the .grads: they are views of the totals, which would be added to themselves."""
        self.sync.zero_grad()
        for bucket, flat in self.flats.items():
            flat[sum(p.numel() for p in bucket.params) if overwrite else 0:] = 0
            bucket.total = flat

    def add(self, param, a, b=None, overwrite=False, computed=True):
        """Add a gradient a, or a product a b, to param's total. Adding a bf16 product to float32 takes one pass."""
        total = self.of[param]
        beta = 0 if overwrite else 1
        if b is None:
            (total.copy_ if overwrite else total.add_)(a)
        elif isinstance(a, TwoCopies):
            a.add_product(b, total, beta)
        elif total.dtype == a.dtype:
            total.addmm_(a, b, beta=beta)
        else:
            torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, out=total)
        if computed:  # what autograd's hook would do
            self.sync.reducers[0].computed(param)

    def settle(self, kind):
        """Nothing is under way between the actions that are recorded."""

    def close(self):
        """Record the sending of all gradients. Returns {what an optimizer steps: its average}."""
        self.sync.finish_grad_sync()
        return {bucket.shard: bucket.shard.grad for reducer in self.reducers for bucket in reducer.buckets}

    def replayed(self, averages):
        """A graph has sent and received all buckets, so put the reducers into the state in which all have left."""
        for p, average in averages.items():
            p.grad = average
        for reducer in self.reducers:
            for bucket in reducer.buckets:
                bucket.total = None
            if not isinstance(reducer, EveryBackward):
                reducer.next = len(reducer.buckets)


class ShardTotals(Totals):
    """The totals of ZeRO-2 and 3, which send gradients in every micro-batch. sync: an FSDPOptimizer or a FlatOptimizer.

    The averages of several micro-batches add up in the shards' .grad, and 1-D gradients in `bucket.total`. Both keep
    their addresses from step to step. If a step has one micro-batch, both lie in its graph's memory.
    """

    def __init__(self, sync):
        self.sync = sync
        self.reducers = sync.reducers
        self.flats = {}
        modules = sync.modules if isinstance(sync, FSDPOptimizer) else []
        self.units = [flat for module in modules for flat in module.flats]

    def begin(self, overwrite):
        """Zero the tensors that gradients are added to. With `overwrite` there are none: a step has one micro-batch.
        First drop the .grads that a recording has set, which hold no numbers, and free units that evaluation left
        whole."""
        self.settle("B")
        self.sync.zero_grad()
        if overwrite:
            self.flats.clear()
            return
        for reducer in self.reducers:
            for bucket in reducer.buckets:
                if bucket not in self.flats:
                    self.flats[bucket] = torch.empty_like(bucket.shard)
                flat = self.flats[bucket].zero_()
                if isinstance(reducer, EveryBackward):
                    bucket.shard.grad = flat
                else:
                    bucket.total = flat

    def settle(self, kind):
        """End what a graph must not leave open: messages under way and, after backward, units that are whole."""
        for reducer in self.reducers:
            while reducer.under_way:
                reducer.finish_oldest()
        for flat in self.units:
            flat.end_gather() if kind == "F" else flat.free()


class Recording(CollectingMicroBatch):
    """A MicroBatch recorded as CUDA graphs, one for each action in `kinds` ("FB" or "FIW").

    A Recording keeps memory for one micro-batch's activations, so each micro-batch in flight needs its own. Recordings
    that are never in flight together share the memory of one `pool`. closes: this is the step's last micro-batch, and
    its graph also sends the gradients. overwrite: it is the only one, so its gradients replace those of the last step.
    (Each parameter of a GPT has one in each micro-batch, so no old one stays.)

    Of ZeRO-2 and 3 it includes what autograd's hooks launch, which gather and free units, and send gradients. Units are
    gathered into the graphs' memory. A freed unit's memory is used again, so it holds two units at a time.
    """

    def __init__(self, module, loss, weight_gradients, totals, kinds, x, target, beside, pool=None, closes=False,
                 overwrite=False):
        super().__init__(module, loss, weight_gradients)
        totals.begin(overwrite)  # frees all units, because a graph would not gather one that is whole now
        self.totals = totals
        self.kinds = kinds
        self.closes = closes
        self.overwrite = overwrite
        self.pool = pool or torch.cuda.graph_pool_handle()
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.input = x.detach().clone().requires_grad_(x.is_floating_point())
        self.target = target.clone()
        self.beside = {name: tensor.clone() for name, tensor in beside.items()}
        if weight_gradients:
            weight_gradients.add = self.add
        recorded.make_room()
        self.graphs = {kind: recorded.RecordedGraph(partial(self.record, kind), self.pool) for kind in kinds}
        self.edge = None  # kept alive, autograd's nodes would tie eager steps to the recording stream
        self.later = []

    def record(self, kind):
        if kind == "F":
            self.output = super().forward(self.input, self.target, **self.beside)
            self.dy = torch.empty_like(self.output)
        elif kind == "W":
            super().backward_weights()
        elif kind == "I":
            self.dx = super().backward_input(self.dy)
        else:
            self.dx = super().backward(self.dy)
        if self.closes and kind == self.kinds[-1]:
            self.averages = self.totals.close()
        self.totals.settle(kind)

    def add(self, param, a, b=None):
        self.totals.add(param, a, b, self.overwrite, self.closes)

    def gradients(self, dy):
        if not self.weight_gradients or not self.edge:  # ZeRO-2 and 3; a frozen stage
            return super().gradients(dy)
        wanted = [self.x] * self.x.requires_grad + self.params
        grads = list(torch.autograd.grad(self.edge, wanted, dy, allow_unused=True))
        dx = grads.pop(0) if self.x.requires_grad else None
        for param, grad in zip(self.params, grads):
            if grad is not None:
                self.add(param, grad)
        return dx

    def replay(self, kind):
        self.graphs[kind].replay()
        if self.closes and kind == self.kinds[-1]:
            self.totals.replayed(self.averages)

    def forward(self, x, target=None, **beside):
        self.input.detach().copy_(x)
        if self.loss:
            self.target.copy_(target)
        for name, tensor in beside.items():
            self.beside[name].copy_(tensor)
        self.replay("F")
        return self.output.detach().clone().requires_grad_(self.output.requires_grad)

    def backward(self, dy):
        return self.replay_from(dy, "B")

    def backward_input(self, dy):
        return self.replay_from(dy, "I")

    def replay_from(self, dy, kind):
        self.dy.copy_(dy)
        self.replay(kind)
        return None if self.dx is None else self.dx.clone()

    def backward_weights(self):
        self.replay("W")


class GraphPipeline(PatientPipeline):
    """Replays micro-batches from CUDA graphs, so that the CPU launches one graph instead of some 45 kernels a block.

    The first step with new shapes or actions warms up. The second one records, and from then on graphs are replayed.
    A step whose micro-batches differ in shape runs eagerly. All ranks must get the same shapes in a step. Who sends:

        ZeRO      stages    in flight    m      the gradients are sent by
        0, 1      1         1            1      the graph, which writes them over the totals
        0, 1      1         1            > 1    the last micro-batch's graph; all graphs add to the totals
        0, 1      more, or I and W       any    hooks of the last micro-batch, which runs eagerly if there are replicas
        2, 3      1         1            any    each micro-batch's graph (HookedGraphPipeline)

    graphs, once there is a step with these shapes and actions: recordings {stage: [Recording that no micro-batch is
    using]}; closing {stage: Recording of the last micro-batch, if it sends the gradients, too}; recorded_for (shape of
    its micro-batches, actions). Whoever sets it to None has them recorded anew.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.graphs = None
        self.totals = None

    def add_up(self, sync):
        """Let weight gradients be added to the totals, in eager runs, too, so that both add in the same order."""
        self.separate_weight_gradients()
        self.totals = self.totals or Totals(sync)
        for weight_gradients in self.weight_gradients.values():
            weight_gradients.add = self.totals.add

    def begin(self, actions, x, y, beside):
        super().begin(actions, x, y, beside)
        self.replaying = torch.is_grad_enabled()
        if self.replaying:
            self.x = x
            self.y = y
            self.beside = beside
            self.actions = actions
            self.last = {action.stage: action.micro_batch for action in actions if action.kind in "BW"}
            self.replicated = dist.get_world_size(self.sync.group) > 1
            self.prepare(actions, self.sync)

    def prepare(self, actions, sync):
        """Record, if the step before has warmed up for it; point all gradients at the totals."""
        kinds = "FIW" if any(a.kind == "I" for a in actions) else "FB"
        # alone: whether a graph can send gradients
        alone = self.last_piece == 0 and kinds == "FB" and most_held(actions) == 1
        shapes = {part.shape for part in self.x}
        asked = shapes, tuple(actions)
        known = self.graphs is not None and self.graphs.recorded_for == asked
        overwrite = known and alone and len(self.x) == 1
        if not known:
            self.graphs = SimpleNamespace(recordings={}, closing={}, recorded_for=asked)
        elif not self.graphs.recordings and len(shapes) == 1:
            for stage in self.pieces:
                self.record(stage, kinds, alone, overwrite)
        self.add_up(sync)
        self.totals.begin(overwrite)

    def record(self, stage, kinds, alone, overwrite):
        graphs = self.graphs
        example = self.x[0] if stage == 0 else self.room_for(0).zero_()
        module = self.pieces[stage]
        recording = partial(Recording, module, self.loss if stage == self.last_piece else None,
                            self.weight_gradients.get(module), self.totals, kinds, example, self.y[0], self.beside[0])
        if alone:
            graphs.closing[stage] = closing = recording(closes=True, overwrite=overwrite)
            graphs.recordings[stage] = [recording(pool=closing.pool)] if len(self.x) > 1 else []
        else:
            mine = [a for a in self.actions if a.stage == stage and not (self.replicated and self.is_of_last(a))]
            graphs.recordings[stage] = [recording() for _ in range(most_held(mine))]

    def is_of_last(self, action):
        """Whether its micro-batch is the last one of its stage."""
        return action.micro_batch == self.last[action.stage]

    def forward(self, action):
        self.stage = action.stage
        self.closes = self.replaying and self.is_of_last(action)
        super().forward(action)

    def micro_batch(self, module, loss):
        graphs = self.graphs
        stage = self.stage
        if self.closes and stage in graphs.closing:
            return graphs.closing[stage]
        if self.replaying and graphs.recordings.get(stage) and not (self.closes and self.replicated):
            return graphs.recordings[stage].pop()
        return super().micro_batch(module, loss)

    def backward(self, action):
        with self.giving_back(action):
            super().backward(action)

    def backward_weights(self, action):
        with self.giving_back(action):
            super().backward_weights(action)

    @contextmanager
    def giving_back(self, action):
        """Inside, the last backward of a micro-batch: another one may use its Recording then."""
        micro_batch = self.micro_batches[action.stage, action.micro_batch]
        yield
        if isinstance(micro_batch, Recording) and not micro_batch.closes:
            self.graphs.recordings[action.stage].append(micro_batch)


class HookedGraphPipeline(GraphPipeline):
    """A GraphPipeline for ZeRO-2 and 3: it has one stage, and graphs send the gradients of each micro-batch."""

    def add_up(self, sync):
        self.totals = self.totals or ShardTotals(sync)


def replay_micro_batches(net):
    """Let a StagedGPT replay its micro-batches from CUDA graphs, and its layers wait for their own weights.

    ValueError if ZeRO-2 or 3 has several stages or another schedule than 1F1B, because while one micro-batch waits for
    its backward, the graphs of others would gather and free the same units."""
    zero = net.layout.zero
    pipeline = GraphPipeline
    if zero > 1:
        pipeline = HookedGraphPipeline
        if len(net.piece_to_rank) > 1 or net.layout.schedule != "1f1b":
            raise ValueError(f"CUDA graphs of ZeRO-{zero} need one stage, not {len(net.piece_to_rank)}, and one "
                             f"micro-batch, F and B, before the next one: give schedule 1f1b")
    net.pipeline = pipeline(*net.pipeline.arguments, channels=net.pipeline.channels)
    if isinstance(net.optimizer, AheadOptimizer):
        net.optimizer.wait_in(*net.pieces.values())
