"""A Parallel of pieces that are no GPT's equals one process."""

import itertools
import math
import re
from functools import partial

import pytest
import torch
from torch import nn

import collectives as dist
from further import together
from further.lists import check, check_weights
from further.schedules import HalvedPipeline, SCHEDULES, zero_bubble_h1
from further.whole import take_state, whole_state
from parallel import (
    Action, ColumnParallelLinear, CopyToGroup, even_runs, into_pieces, lower, make_mesh, Parallel, Pipeline,
    ranks_of_stages, ReduceFromGroup, RowParallelLinear, ScheduleError, tensor_parallel, VocabParallelEmbedding,
    with_weights)
from tests.pool import close, parametrize

TABLE = {"up": partial(ColumnParallelLinear, f=CopyToGroup.apply),
         "down": partial(RowParallelLinear, g=ReduceFromGroup.apply)}
LOSS = partial(nn.functional.mse_loss, reduction="sum")
SGD = partial(torch.optim.SGD, lr=0.1)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Wide(nn.Module):
    """Inputs and outputs of pieces have different shapes, and the norm's weights are vectors. The output is not
    contiguous."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(n_in), nn.Linear(n_in, 12), nn.Linear(12, n_out)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).tanh()).T.contiguous().T


def pieces_of(seed):
    torch.manual_seed(seed)
    return [piece.double() for piece in (nn.Linear(5, 6), Wide(6, 7), Wide(7, 8), nn.Linear(8, 3))]


def batch(step, n=8):
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(n, width, generator=generator, dtype=torch.float64) for width in (5, 3))


def of_one_process(steps=2, frozen=()):
    net = nn.Sequential(*pieces_of(0))
    for i in frozen:
        net[i].requires_grad_(False)
    optimizer = SGD([param for param in net.parameters() if param.requires_grad])
    losses, norms = [], []
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = LOSS(net(x), y) / y.numel()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.3).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: param.detach() for name, param in net.named_parameters()}


def on_rank(sizes, m, frozen=(), seeds=False, **options):
    """Losses, norms and whole weights of two steps. seeds: each rank begins with other weights."""
    mesh = make_mesh("cpu", **sizes)
    pieces = pieces_of(dist.get_rank() if seeds else 0)
    for i in frozen:
        pieces[i].requires_grad_(False)
    for piece in pieces:
        tensor_parallel(piece, mesh.get_group("tp"), TABLE)
    net = Parallel(pieces, LOSS, mesh, optimizer=SGD, dtype=torch.float64, **options)
    losses, norms = [], []
    for step in range(2):
        x, y = (t.chunk(sizes.get("dp", 1))[dist.get_rank(mesh.get_group("dp"))].chunk(m) for t in batch(step))
        net.zero_grad()
        loss = net.forward_backward(x, y)
        norms.append(net.clip_grad_norm_(0.3).item())
        net.step()
        dist.all_reduce(loss, dist.ReduceOp.AVG, mesh.get_group("dp"))
        losses.append(loss.item())
    return losses, norms, whole_state(net)["weights"]


class Plain(Pipeline):
    """The reference's, which fast/ does not replace."""


HALVED = dict(schedule=zero_bubble_h1, pipeline=HalvedPipeline)


@parametrize("sizes, m, options", [
    ({"dp": 2}, 2, {}), ({"dp": 2}, 2, {"zero": 1}), ({"dp": 4}, 2, {"zero": 2}),
    ({"dp": 2, "tp": 2}, 2, {"zero": 3}), ({"pp": 2, "dp": 2}, 2, {"zero": 3, "pipeline": Plain}),
    ({"pp": 2, "dp": 2}, 4, {"zero": 2, **HALVED}), ({"dp": 2}, 2, {"zero": 3, "frozen": (0, 1)}),
    ({"pp": 2, "dp": 2}, 2, {"zero": 1, "frozen": (0,)}), ({"pp": 2}, 2, {"frozen": (0, 1), **HALVED})], ids=str)
def test_a_chain_of_pieces_equals_one_process(sizes, m, options):
    """Under tp the layers of the table are cut; what is frozen stays as it is, and needs no gradient before the first
    piece that is trained."""
    for found in together.run(math.prod(sizes.values()), lambda: on_rank(sizes, m, **options)):
        assert_same(of_one_process(frozen=options.get("frozen", ())), found)


def assert_same(want, got):
    assert all(close(a, b, 1e-12) for both in zip(want[:2], got[:2]) for a, b in zip(*both, strict=True))
    assert want[2].keys() == got[2].keys()
    assert all(close(got[2][name], weight, 1e-12) for name, weight in want[2].items())


@parametrize("axis", ["dp", "tp"])
def test_ranks_start_with_the_first_one_s_weights(axis):
    for found in together.run(2, lambda: on_rank({axis: 2}, 1, seeds=True, zero=1)):
        assert_same(of_one_process(), found)


def test_a_layer_of_two_names_is_cut_once():
    def body():
        torch.manual_seed(0)
        net = nn.ModuleDict({"up": nn.Linear(4, 6)})
        net["again"] = nn.ModuleDict({"up": net["up"]})
        tensor_parallel(net, None, TABLE)
        return net["up"] is net["again"]["up"], net["up"].weight.shape
    assert together.run(2, body) == 2 * [(True, (3, 4))]


def test_a_tied_weight_of_one_rank_is_saved_once():
    def body():
        pieces = [nn.Linear(4, 4, bias=False) for _ in range(3)]
        pieces[2].weight = pieces[0].weight
        net = Parallel(pieces, LOSS, make_mesh("cpu", dp=2), zero=3, optimizer=SGD)
        return whole_state(net)["weights"]
    for weights in together.run(2, body):
        assert [*weights] == ["0.weight", "1.weight"] and all(weight.any() for weight in weights.values())


def test_a_state_is_taken_by_any_layout():
    """Weights and moments of one, after two steps of AdamW, are those of the other."""
    def trained(state, sizes, **options):
        net = Parallel(pieces_of(3), LOSS, make_mesh("cpu", **sizes), optimizer=ADAMW, dtype=torch.float64, **options)
        if state:
            take_state(net, state, 1)
        x, y = (t.chunk(sizes["dp"])[dist.get_rank(net.groups.dp_cp)] for t in batch(int(bool(state))))
        net.zero_grad()
        net.forward_backward([x], [y])
        net.step()
        return whole_state(net)

    ways = {"dp": 1}, {"dp": 2, "zero": 3}, {"dp": 1, "pp": 2}, {"dp": 2, "zero": 1}
    states = []
    for there, here in zip(ways, ways[1:] + ways[:1]):
        state = None
        for way in there, here:
            sizes = {axis: n for axis, n in way.items() if axis != "zero"}
            state, *_ = together.run(math.prod(sizes.values()), lambda: trained(state, sizes, zero=way.get("zero", 0)))
        states.append(state)
    for state in states[1:]:
        assert all(close(state[key][name], whole, 1e-9) for key in states[0] for name, whole in states[0][key].items())


def test_two_models_of_the_same_pieces_have_one_norm():
    def body():
        pieces, norms = pieces_of(0), []
        for _ in range(2):
            net = Parallel(pieces, LOSS, make_mesh("cpu", pp=2), optimizer=SGD, dtype=torch.float64)
            step(net)
            norms.append(net.clip_grad_norm_(0.0).item())
        return norms
    for first, second in together.run(2, body):
        assert first == second


def chain(mesh, left_out=None, loss=LOSS, cut=False, **options):
    pieces = [None if i == left_out else piece for i, piece in enumerate(pieces_of(0))]
    for piece in pieces if cut else ():
        tensor_parallel(piece, mesh.get_group("tp"), TABLE)
    return Parallel(pieces, loss, mesh, dtype=torch.float64, **{"zero": 2, "optimizer": SGD} | options)


def step(net, m=1):
    net.forward_backward(*(t.chunk(m) for t in batch(0)))


def frozen_too_late(mesh):
    net = chain(mesh)
    net.pieces[1].requires_grad_(False)
    step(net)


def twice(mesh):
    net = chain(mesh)
    step(net)
    step(net)


def after_steps_of_both_numbers(mesh):
    net = chain(mesh)
    for m in 1, 2, 1 + dist.get_rank():
        net.zero_grad()
        step(net, m)


def tied(mesh):
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return Parallel([first, last], LOSS, mesh, optimizer=SGD)


def sent(mesh, out):
    net = chain(mesh)
    net.pipeline.x = [torch.empty(2, 5, dtype=torch.float64)]
    net.pipeline.check_sent(torch.empty(2, 6, dtype=torch.float64), 0, 0)
    net.pipeline.check_sent(out, 0, 0)


A_MEAN = 'a loss that is no sum: give reduction="sum"'


@parametrize("told, sizes, body", [
    ("piece 3 is None: give shape=", {"pp": 2}, lambda mesh: chain(mesh, left_out=3)),
    ("5 stages are more than 4 pieces: give at most 4 stages", {"pp": 5}, chain),
    ("a step of 0 micro-batches: give lists x and y of at least 1", {"dp": 2},
     lambda mesh: chain(mesh).forward_backward([], [])),
    ("micro-batches, others have more or fewer", {"dp": 2}, lambda mesh: step(chain(mesh), 1 + dist.get_rank())),
    ("micro-batches, others have more or fewer", {"dp": 2}, after_steps_of_both_numbers),
    ("freeze parameters", {"dp": 2}, frozen_too_late), ("before zero_grad", {"dp": 2}, twice),
    ("zero=4: give 0, 1, 2 or 3", {"dp": 2}, lambda mesh: chain(mesh, zero=4)),
    ("a mesh that cuts sequences", {"cp": 2}, chain),
    ("a schedule of F I W: give the pipeline", {"dp": 2}, lambda mesh: chain(mesh, schedule=zero_bubble_h1)),
    ("share a parameter", {"pp": 2}, tied),
    ("pieces that are cut: give shape=", {"pp": 2, "tp": 2}, lambda mesh: chain(mesh, cut=True)),
    (A_MEAN, {"dp": 2}, lambda mesh: chain(mesh, loss=nn.functional.mse_loss)),
    (A_MEAN, {"dp": 2}, lambda mesh: chain(mesh, loss=partial(nn.MSELoss()))),
    ("2 x and 3 y: give a y for each x", {"dp": 2}, lambda mesh: chain(mesh).forward_backward([1, 2], [1, 2, 3])),
    ("SGD's state is not known", {"dp": 2},
     lambda mesh: whole_state(chain(mesh, optimizer=partial(SGD, momentum=0.9)))),
    ("Adagrad's state is not known", {"dp": 2},
     lambda mesh: take_state(chain(mesh, optimizer=partial(torch.optim.Adagrad, lr=0.1)), {}, 1)),
    ("another model's: one of them alone has 4.bias", {"dp": 2},
     lambda mesh: take_state(chain(mesh), {"weights": dict.fromkeys([*chain(mesh).shapes, "4.bias"])}, 1)),
    ("piece 0 returns (2, 6) of torch.float32", {"pp": 2}, lambda mesh: sent(mesh, torch.empty(2, 6))),
    ("piece 0 returns (2, 7) of", {"pp": 2}, lambda mesh: sent(mesh, torch.empty(2, 7, dtype=torch.float64))),
    ("some pieces are None", {"pp": 2},
     lambda mesh: whole_state(chain(mesh, left_out=3 - 3 * dist.get_rank(), shape=lambda i, x: x.shape))),
    ("an embedding of 1 rows cannot be cut over 2 ranks", {"tp": 2},
     lambda mesh: VocabParallelEmbedding(nn.Embedding(1, 4), None, None))],
    ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_chain_cannot_be_is_refused_in_one_line(told, sizes, body):
    """Some of it would train wrong, or hang."""
    def refused():
        with pytest.raises((ValueError, RuntimeError), match=re.escape(told)):
            body(make_mesh("cpu", **sizes))
    together.run(math.prod(sizes.values()), refused)


# ------------------------------------------------------------------------------------------------- lists that are wrong

RIGHT = [Action(word[0], int(word[1]), 0) for word in "F0 F1 F2 B2 B1 B0".split()]
WRONG = [  # ZeRO's stage, a change of its list: (what is left out, what is put in front of it), what is said, where
    (3, "G1", "", "the weights of piece 1 are not whole", "F1"),
    (3, "D1", "", "piece 1 is whole already", "G1"),
    (3, "A1", "", "gradients of piece 1 are not averaged", "end"),
    (2, "A2", "", "gradients of piece 2 are not averaged", "end"),
    (1, "", "A1 B1", "no gradient that waits", "A1"),
    (0, "", "A2 A2", "no gradient that waits", "A2"),
    (0, "", "G0 F0", "ZeRO-0 has nothing to gather", "G0"),
    (1, "", "D1 F2", "only ZeRO-3 drops", "D1"),
    (3, "", "D1 B1", "the weights of piece 1 are not whole", "B1"),
    (3, "", "D0 B2", "piece 0 is not whole", "D0"),
    (3, "", "G0 A0", "put D for piece 0", "end"),
]


@parametrize("zero, out, put, told, place", WRONG, ids=lambda value: str(value))
def test_a_wrong_list_is_refused_at_its_place(zero, out, put, told, place):
    """Each trains wrong, or uses memory that is not there. Right ones are accepted for every stage and schedule."""
    right = with_weights(RIGHT, zero, lookups=(0,))
    check([right], zero=zero, lookups=(0,))
    names = [f"{action.kind}{action.stage}" for action in right]
    if out:
        names.remove(out)
    if put:
        new, before = put.split()
        names.insert(names.index(before), new)
    wrong = [Action(name[0], int(name[1]), 0) for name in names]
    with pytest.raises(ScheduleError, match=told) as error:
        check([wrong], zero=zero, lookups=(0,))
    at = error.value.at[0]
    assert [*names, "end"][at] == place


@parametrize("schedule", SCHEDULES)
def test_every_schedule_s_letters_are_right(schedule):
    """Of 2 and 3 ranks, few and many micro-batches, every stage of ZeRO: proven, and at most two pieces are whole."""
    for p, m, zero in itertools.product((1, 2, 3), (1, 2, 5), range(4)):
        v = 2 if schedule == "interleaved" else 1
        made = SCHEDULES[schedule](p, m, v)
        runs = even_runs(9, len(ranks_of_stages(made)))
        lists = [with_weights(into_pieces(actions, runs), zero, (0,)) for actions in made]
        check(lower(lists), m, zero, (0,))
        whole, _ = zip(*(check_weights(lists, rank, zero, (0,)) for rank in range(p)))
        assert zero != 3 or max(whole) <= 2
