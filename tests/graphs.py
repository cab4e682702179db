"""Replayed graphs equal one process."""

import contextlib
import gc
import itertools
import weakref
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, TorchDispatchMode
from torch.utils._pytree import tree_map_only

import collectives as dist
import fast.graphs
import fast.recorded
import fast.tensor
import parallel
from further.experts import ExpertsConfig, loads
from further.letters import tensors_in
from further.schedules import SCHEDULES
from parallel import carried, goes_to, lower, needs, ranks_of_stages
from tests.layouts import case_of, differences_in, expanded, in_layout, sized, SMALL, small_gpt, tokens_of
from tests.links import served_by
from tests.pool import close, on_cpus, on_gpus, on_ranks, parametrize, uncollected
from fast.graphs import received_late
from fast.linear import WeightGradients
from fast.nccl import LeavesRoom
from fast.recorded import count_traffic, traffic_since
from fast.units import WrittenUnit
from safe.messages import Watched


class Tape(TorchDispatchMode):
    """A CUDA graph for the CPU, in place of fast.recorded.RecordedGraph: it keeps what runs in `body()` and undoes it;
    `replay` runs it again, on the same tensors."""
    recording = None  # the one in whose body the process is

    def __init__(self, body, pool=None):
        super().__init__()
        self.steps, self.before, self.born, self.alive = [], {}, set(), []
        real, sent, Tape.recording = torch.UntypedStorage.resize_, dist.traffic(), self

        def resize(storage, size):
            real(storage, size)
            self.born.add(storage.data_ptr())
            self.steps.append(lambda: real(storage, size))

        with self, patch.object(torch.UntypedStorage, "resize_", resize):
            body()
        Tape.recording = None
        for storage, values in self.before.values():
            storage.copy_(values)
        self.sends = traffic_since(sent)
        count_traffic(self.sends, -1)

    def writes(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.born:
            self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # FSDP's parameters have other memory later
        args, kwargs = tree_map_only(nn.Parameter, lambda p: p.data, (args, kwargs or {}))
        names = function._schema.arguments
        given = dict(zip((a.name for a in names), args)) | kwargs
        written = tensors_in([given.get(a.name) for a in names if a.alias_info and a.alias_info.is_write])
        for t in written:
            self.writes(t)
        out = function(*args, **kwargs)
        old = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        new = set() if written else {t.untyped_storage().data_ptr() for t in tensors_in(out)} - old
        self.born |= new
        self.alive.append((args, kwargs, out))  # or memory would be given out again
        if written or new:
            def step():
                again = function(*args, **kwargs)
                for made, t in zip(tensors_in(out) if new else (), tensors_in(again)):
                    if t.numel():  # an empty one has grown since
                        made.copy_(t)
            self.steps.append(step)
        return out

    @torch.no_grad()
    def replay(self):
        for step in self.steps:
            step()
        count_traffic(self.sends)


@contextlib.contextmanager
def graphs_on_tape():
    """CUDA graphs, emulated on a CPU."""
    if torch.get_default_device().type == "cuda":
        yield
        return
    start = Watched.run

    def taped(link, name, async_op, *call):
        if Tape.recording is None:
            return start(link, name, async_op, *call)

        def again():
            before = dist.traffic()
            start(link, name, False, *call)
            count_traffic(traffic_since(before), -1)  # a graph's are counted by who replays it
        with _disable_current_modes():
            for t in tensors_in(call):
                Tape.recording.writes(t)
            start(link, name, False, *call)
        Tape.recording.steps.append(again)
        return dist.Handle() if async_op else None

    def taped_message(send):
        def call(tensor, *to):
            if Tape.recording is None:
                return send(tensor, *to)
            handles, steps = [], Tape.recording.steps

            def begin():
                before = dist.traffic()
                with _disable_current_modes():
                    handles.append(send(tensor, *to))
                return before

            begin()
            steps.append(lambda: count_traffic(traffic_since(begin()), -1))
            return dist.Handle(lambda: (steps.append(lambda: handles.pop().wait()), handles.pop().wait()))
        return call

    with (patch.object(fast.recorded, "RecordedGraph", Tape), patch.object(Watched, "run", taped),
          patch.object(dist, "isend", taped_message(dist.isend)),
          patch.object(dist, "irecv", taped_message(dist.irecv))):
        yield


def in_layout_on_tape(*args, without=None, **options):
    """in_layout, with CUDA graphs; without: of a recording, what a replay would have to do besides."""
    with graphs_on_tape(), contextlib.ExitStack() as broken, patch.object(fast.tensor, "BESIDE_FROM", 0):
        if without == "inputs":
            broken.enter_context(patch.object(fast.graphs, "given_to", lambda *_: []))
        if without == "refresh":
            broken.enter_context(patch.object(parallel.Unit, "refresh", lambda unit: None))
        return in_layout(*args, cuda_graphs=True, **options)


def test_what_fails_while_a_graph_is_recorded_is_said():
    """Not that the capture, which ends in the middle, leaves work open."""
    def full():
        raise torch.OutOfMemoryError("full")

    graph = Mock()
    graph.capture_end.side_effect = RuntimeError("capturing stream has unjoined work")
    with (patch.multiple(torch.cuda, CUDAGraph=lambda: graph, current_stream=Mock, stream=contextlib.nullcontext),
          patch.object(fast.recorded, "_recording_stream", Mock), pytest.raises(torch.OutOfMemoryError)):
        fast.recorded.RecordedGraph(full)
    assert graph.capture_end.call_count == 1


REPLAYED = """
    dp=2
    dp=2 micro_batches=4 zero=0,1,2,3
    tp=2 schedule=zb-h1
    pp=2 micro_batches=4 schedule=gpipe
    pp=2 micro_batches=4 schedule=interleaved virtual_stages=2
    dp=2 pp=2 micro_batches=4 schedule=zb-h1 zero=1,3
    pp=2 micro_batches=2 schedule=zb-v
    tp=2 micro_batches=2 recompute=none,block sp=0,1
    tp=2 sp=1 tied=0
    dp=2 micro_batches=2 zero=1,3 loss_chunk=7
    pp=2 micro_batches=2 schedule=zb-h1 loss_chunk=7
    dp=1 micro_batches=2 zero=3
    dp=2 zero=3
    dp=4 micro_batches=2 zero=2 zero_within=2
    dp=2 tp=2 zero=3 recompute=block sp=1
"""


@parametrize("row", [row for line in REPLAYED.strip().splitlines() for row in expanded(line)])
def test_replayed_graphs_equal_one_process(pool, row):
    """The first step warms up, the second records and replays, the third replays: weights after three must be those of
    one process."""
    assert not any(differences_in(pool, case_of("steps=3 " + row), run=in_layout_on_tape))


@parametrize("schedule", SCHEDULES)
def test_receives_that_are_posted_late_come_in_the_order_of_their_sends(schedule):
    """Between each two ranks; and each stands before what needs it, behind all that the rank can compute without."""
    for p, m in itertools.product((2, 3, 4), (1, 2, 5, 8)):
        made = SCHEDULES[schedule](p, m, 2 if schedule == "interleaved" else 1)
        where = ranks_of_stages(made)
        lists = [received_late(actions, where) for actions in lower(made)]
        for rank, actions in enumerate(lists):
            assert sorted(actions) == sorted(lower(made)[rank])
            there = set()
            for n, action in enumerate(actions):
                missing = [result for result in needs(action, where) if where[result.stage] != rank]
                assert action.kind[0] in "SR" or there.issuperset(missing)
                there |= {carried(action)} if action.kind[0] == "R" else set()
                assert action.kind[0] != "R" or actions[n + 1].kind[0] != "S"
            for source in {*range(p)} - {rank}:
                sent = [carried(a) for a in lists[source] if a.kind[0] == "S" and where.get(goes_to(a)) == rank]
                assert sent == [carried(a) for a in actions if a.kind[0] == "R" and where[a.stage] == source]


@on_gpus
@on_ranks(2)
def test_a_recorded_step_takes_as_much_memory_as_a_launched_one():
    """But for a few units and PyTorch's own room for products, 32 MiB a stream, which units of 48 MiB dwarf. Twelve
    blocks travel one after the other, twice."""
    config = sized(n_layer=12, n_embd=1024)
    net = small_gpt(config, dp=2, zero=3)
    net.pipeline.records = True
    batch = [[t.to(net.device)] for t in tokens_of(0)]
    peaks = []
    for _ in range(2):
        net.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        net.forward_backward(*batch)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    unit = 4 * 12 * config.n_embd**2
    assert peaks[1] < peaks[0] + 8 * unit, [peak / unit for peak in peaks]


class Keeping(Watched):
    """Its handles keep what an operation uses, as those of NcclLink do while a graph is recorded."""

    def run(self, name, async_op, algorithm, *arguments):
        handle = super().run(name, async_op, algorithm, *arguments)
        if async_op:
            handle.keeps = dist.tensors_among(arguments)
        return handle


class KeepingLink(LeavesRoom, Keeping):
    """As between GPUs, products leave room for transfers."""


def accumulator_of(param):
    """The node that adds to its .grad. Autograd makes one for a graph, and another once that graph is gone."""
    return param.view_as(param).grad_fn.next_functions[0][0]


@on_cpus
@parametrize("layout", [{"dp": 2}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}, {"tp": 2}, {"tp": 2, "sp": True},
                        {"tp": 2, "sp": True, "recompute": "mlp"}, {"cp": 2}], ids=str)
@on_ranks(2)
def test_a_step_leaves_no_node_of_its_graph(layout):
    """Not even until garbage is collected. A node has a stream, in a recording another than in steps that are launched,
    so if one stayed, a later step would use both, and PyTorch warns."""
    with (patch.dict(dist.LINKS, ours=KeepingLink), served_by(KeepingLink),  # the world's link is there already
          patch.object(fast.tensor, "BESIDE_FROM", 0)):
        net = small_gpt(**layout)
        net.pipeline.records = True
        params, found = [param for piece in net.pieces.values() for param in piece.parameters()], []

        def mark(*_):
            for param in params:
                accumulator_of(param).metadata["marked"] = True
            found.append(marked())

        def marked():
            return sum("marked" in accumulator_of(param).metadata for param in params)

        net.pieces[max(net.pieces)].register_forward_hook(mark)
        with uncollected():
            net.forward_backward(*([t.to(net.device)] for t in tokens_of(0, tokens=8)))
            found.append(marked())
    assert found[0] > 0 == found[1]


def recorded_net(**options):
    """(a model whose list is replayed, a batch)"""
    net = small_gpt(dp=dist.get_world_size(), dtype=torch.float64, **options)
    net.pipeline.records = True
    return net, [t.to(net.device) for t in tokens_of(0)]


@on_cpus  # the tape stands for graphs
@parametrize("zero", [0, 2, 3])
@on_ranks(1)
def test_a_recording_of_another_shape_goes_before_its_first_step(zero):
    """A step of other micro-batches finds no memory of the graph before."""
    with graphs_on_tape():
        net, (x, y) = recorded_net(zero=zero)
        recorded, losses = [], []
        for sizes in 8, 8, 8, (3, 5), (3, 5), (3, 5):
            recorded.append(weakref.ref(net.pipeline.recording or net))
            net.zero_grad()
            losses.append((net.forward(x.split(sizes), y.split(sizes)),
                           net.forward_backward(x.split(sizes), y.split(sizes))))
            net.step()
        gc.collect()
        assert recorded[2]() is recorded[3]() is None and net.pipeline.recording
        assert all(close(*pair) for pair in losses) and losses[-1][0] < losses[-2][0]


@parametrize("least, options, expected", [
    (0, {}, ["sum", "dW", "wait"] + ["sum", "dW, db", "dW, db", "wait"] * 4), (1 << 30, {}, ["dW"] + ["dW, db"] * 8),
    (0, {"sp": True}, ["sum", "dW", "wait"] + ["sum", "dW", "dW, db", "wait"] * 4)], ids=str)
@on_ranks(2)
def test_weight_gradients_of_cut_layers_wait_for_traffic(least, options, expected):
    """Of the head, and of two sublayers in each of two blocks. With sp biases of rows stay with autograd. A small
    gradient travels beside nothing: even so only two layers' wait."""
    log, waiting, take = [], [], WeightGradients.take

    def logged(send):
        def call(*args, async_op=False, **more):
            handle = send(*args, async_op=async_op, **more)
            if not async_op or "group" not in more:  # of a unit
                return handle
            log.append("sum")
            return dist.Handle(lambda: (log.append("wait"), handle.wait()))
        return call

    def computed(collector, weight, bias, *rest):
        log.append("dW" if bias is None else "dW, db")
        return compute(collector, weight, bias, *rest)

    def taken(collector, *computed_from):
        take(collector, *computed_from)
        waiting.append(len(collector.waiting))

    compute = WeightGradients.compute
    with (graphs_on_tape(), patch.object(fast.tensor, "BESIDE_FROM", least),
          patch.object(dist, "all_reduce", logged(dist.all_reduce)),
          patch.object(dist, "reduce_scatter_tensor", logged(dist.reduce_scatter_tensor)),
          patch.multiple(WeightGradients, compute=computed, take=taken)):
        net = small_gpt(sized(tied=not options), tp=2, **options)
        net.pipeline.records = True
        net.forward_backward(*([t.to(net.device)] for t in tokens_of(0)))
    assert log == expected and max(waiting) == 2


@on_cpus  # in a recording an error would end the capture, too
@on_ranks(2)
def test_no_weight_gradient_waits_from_a_dropped_step():
    """Backward raises on both ranks while the gradients of a block wait."""
    def fail(*_):
        raise ZeroDivisionError

    grads = []
    with graphs_on_tape():
        for drops in False, True:
            net = small_gpt(tp=2)
            net.pipeline.records = True
            batch = [[t.to(net.device)] for t in tokens_of(0)]
            if drops:
                hook = net.pieces[1].h["0"].mlp.c_fc.register_full_backward_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    net.forward_backward(*batch)
                hook.remove()
                net.zero_grad()
            net.forward_backward(*batch)
            grads.append([param.grad.clone() for param in net.params])
    assert all(close(*pair) for pair in zip(*grads, strict=True))


@on_cpus  # on GPUs some of it ends the capture with an error
@parametrize("row", ["zero=0 without=inputs", "zero=1 without=refresh", "zero=2 without=refresh"])
def test_replayed_graphs_are_wrong_without(pool, row):
    """The copies of a step's tokens; the gathers of weights that an evaluation has left whole."""
    assert all(differences_in(pool, case_of("steps=3 dp=2 micro_batches=4 " + row), run=in_layout_on_tape))


@parametrize("zero, micro_batches", [(0, 2), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)])
@on_ranks(2)
def test_replayed_graphs_send_what_eager_steps_do(zero, micro_batches):
    """Of three steps, the first eager, the second recorded, the third replayed alone: what each collective has sent.
    Losses are those of a model that is never recorded, and no step leaves anything."""
    found = []
    with graphs_on_tape():
        (net, batch), (other, _) = (recorded_net(zero=zero) for _ in range(2))
        other.pipeline.records = False
        batch = [t[:4].chunk(micro_batches) for t in batch]
        for _ in range(3):
            losses = []
            for one in other, net:
                dist.reset_traffic(), one.zero_grad()
                losses.append(one.forward_backward(*batch))
                sent = dist.traffic()
                one.step()
            assert close(*losses)
            found.append(sent)
            assert not any(unit.sending or unit.gathering for unit in net.units)
        recording = net.pipeline.recording
        net.forward(*batch)
        assert net.pipeline.recording is recording is not None  # an evaluation records nothing
    eager, recorded, replayed = found
    assert eager == recorded == replayed != {}


@on_cpus  # on GPUs the reference's products, of float64, make the CPU read how many tokens each expert gets
@on_ranks(1)
def test_a_replayed_step_counts_what_experts_get():
    """Each of its tokens once for each expert, because all are chosen."""
    config = ExpertsConfig(**vars(SMALL), experts=2, top_k=2)
    with graphs_on_tape():
        net = small_gpt(config, dp=1, dtype=torch.float64)
        net.pipeline.records = True
        for _ in range(4):
            net.zero_grad()
            net.forward_backward(*[tokens.to(net.device).chunk(2) for tokens in tokens_of(0)])
            assert loads(net).eq(tokens_of(0)[0].numel()).all()
    assert net.pipeline.recording


@on_ranks(2)
def test_a_message_that_has_become_the_average_is_not_written_over():
    """Of two A's in a step under ZeRO-0, on GPUs, which keep its memory."""
    weight = nn.Parameter(torch.zeros(3))
    unit = WrittenUnit([weight], None, 0, torch.float32)
    for value in 1.0, 2.0:
        unit.add(weight, torch.full((3,), value))
        unit.room = unit.message, unit.places
        unit.start_average()
        unit.finish_average()
    assert unit.stepped[weight].grad.eq(3).all()
