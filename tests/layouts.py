"""Every layout equals one process."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import sys
import types
import unittest.mock

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch import nn

import collectives as dist
import fast
import further.context
import further.experts
import further.nodes
import further.sequence
import kernels
import model
import parallel
import theory.clock
import train
from tests.collectives import nodes_of
from tests.pool import close, needs_kernels
from fast.graphs import replay_micro_batches
from further.experts import routers
from further.schedules import zero_bubble_h1
from safe.flags import BadInput, check_layout, Settings
from theory.clock import simulate


# -------------------------------------------------------------------------------------- every layout equals one process

SMALL = model.GPTConfig(vocab_size=37, seq_len=10, n_layer=2, n_head=8, n_embd=32)  # the vocabulary divides by nothing
BATCH = 8


def tokens_of(step, batch=BATCH, tokens=SMALL.seq_len, config=SMALL):
    """Inputs and targets (batch, T) of a step, the same on every rank."""
    rows = torch.from_numpy(np.random.default_rng(step).integers(0, config.vocab_size, (batch, config.seq_len + 1)))
    return rows[:, :tokens], rows[:, 1:tokens + 1]


DECAY = {"weight_decay": 0.1}  # of matrices only


def optimizer_of(name, params):
    return torch.optim.SGD(params, 0.5) if name == "sgd" else torch.optim.AdamW(params, 1e-2)


CLIP = {"sgd": 0.3, "adamw": 0.3}  # fires: the norms are 0.5 and more


RATE = 0.02  # of balancing: two steps can change a choice


@functools.cache
def one_process(optimizer, batch=BATCH, tokens=SMALL.seq_len, bias=None, clip=None, **change):
    """Losses, norms, gradients of the first step, weights after three: by plain PyTorch. bias: the routers' to begin
    with. clip: 0 does not; left out, that of the optimizer."""
    clip = CLIP[optimizer] if clip is None else clip
    config = dataclasses.replace(SMALL, **change)
    net, margins = model.GPT(config).double(), []
    for router in routers(net).values():
        router.bias = torch.tensor(bias or [0.0] * config.experts)
        router.register_forward_hook(lambda router, inputs, _: margins.append(margin_of(router, *inputs)))
    matrices = [p for n, p in net.named_parameters() if p.dim() > 1 and not n.endswith("bias")]
    vectors = [p for n, p in net.named_parameters() if n.endswith("bias") or p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    opt, losses, norms, grads = optimizer_of(optimizer, groups), [], [], None
    for step in range(3):
        x, y = tokens_of(step, batch, tokens, config)
        opt.zero_grad()
        loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
        loss.backward()
        grads = grads or {n: p.grad.clone() for n, p in net.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), clip or math.inf)))
        losses.append(loss.item())
        opt.step()
        for router in routers(net).values():
            mean = batch * tokens * router.top_k / config.experts
            router.bias += torch.tensor([RATE * float(np.sign(mean - n)) for n in router.load.tolist()])
            router.bias -= router.bias.double().mean()
            router.load = 0
    assert min(norms) > clip and min(margins, default=1) > 1e-9
    return losses, norms, grads, {n: p.detach() for n, p in [*net.named_parameters(), *net.named_buffers()]}


@torch.no_grad()
def margin_of(router, x):
    """How near a token has come to another choice: the smallest distance of its last expert from the next one."""
    scores = ((x @ router.weight.T).sigmoid() + router.bias).sort(descending=True).values
    return math.inf if router.top_k == len(router.bias) else float(
        (scores[..., router.top_k - 1] - scores[..., router.top_k]).min())


SABOTAGED = "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "batch_isend_irecv"


def without_collective(where):
    """Take the collectives out of one function of the reference, and out of what stands in its place: calls from its
    code return at once, having done nothing."""
    name, *method = where.split(".")
    files = parallel, further.sequence, further.context, further.experts, further.nodes
    targets = [getattr(file, name) for file in files if hasattr(file, name)]
    targets += [plain for _, leaf, plain in fast.PLAIN if leaf == name]
    codes = {inspect.unwrap(functools.reduce(getattr, method, target)).__code__ for target in targets}

    def without(real):
        def call(*args, **kwargs):
            if sys._getframe(1).f_code in codes:
                return [] if real.__name__ == "batch_isend_irecv" else dist.Handle()
            return real(*args, **kwargs)
        return call

    for name in SABOTAGED:
        setattr(parallel.dist, name, without(getattr(dist, name)))


def whole_gradients(net, shapes):
    """{name: gradient} of this rank's stages, as one process would have it: from .grad, or from the shards of ZeRO."""
    grads = {}
    if net.zero == 3:  # let the gathering of weights gather gradients, this once
        buckets = [b for stage in net.stages.values() for b in stage.buckets]
        kept = [b.shard.data.clone() for b in buckets]
        for b in buckets:
            b.shard.data.copy_(b.shard.grad)
    for bucket in getattr(net.optimizer, "buckets", []):
        flat = bucket.new(bucket.shard.dtype)
        if net.zero:
            torch_dist.all_gather_into_tensor(flat, bucket.shard.grad, group=bucket.group)
        else:
            flat.copy_(bucket.shard.grad)
        for view, p in zip(bucket.views(flat), bucket.params):
            p.whole_grad = view
    for stage in net.stages.values():
        for name, p in getattr(stage, "module", stage).named_parameters():
            if net.zero == 3:
                grad = stage.bucket_of[p].gather_one(p, stage.bucket_of[p].shard.detach())
            else:
                grad = p.grad if p.grad is not None else p.whole_grad
            name = "wte.weight" if net.config.tied and name == "lm_head.weight" else name
            grads[name] = parallel.gather_cuts(p, grad, shapes[name]).cpu().numpy().copy()
    if net.zero == 3:
        for b, values in zip(buckets, kept):
            b.shard.data.copy_(values)
    return grads


def in_layout(layout, optimizer, micro_batches, change, sabotage=None, batch=BATCH, schedule="1f1b", cuda_graphs=False,
              tokens=SMALL.seq_len, bias=None, clip=None, comm="ours", dtype=torch.float64, choice="auto", **options):
    """The same three steps laid out over the processes; whole gradients and weights, gathered. choice: of kernels."""
    kept = {name: getattr(dist, name) for name in SABOTAGED}
    if sabotage:
        without_collective(sabotage)
    try:
        kernels.use(choice)
        config = dataclasses.replace(SMALL, **change)
        device = torch.get_default_device()
        mesh = parallel.make_mesh(device.type, **layout)
        source = bias and (lambda name: torch.tensor(bias) if name.endswith("router.bias")
                           else model.initial_weight(config, name, 0))
        net = parallel.parallelize(config, mesh, device, dtype, source, **options)
        for group in net.groups:
            dist.use(group, comm)
        if cuda_graphs:
            replay_micro_batches(net)
        opt = net.make_optimizer(lambda groups, **kw: optimizer_of(optimizer, groups), **DECAY)
        losses, norms, grads, shapes = [], [], {}, model.shapes(config)
        mine = batch // dist.get_world_size(net.dp)
        for step in range(3):
            x, y = (t.to(device).split(mine)[dist.get_rank(net.dp)].split(mine // micro_batches)
                    for t in tokens_of(step, batch, tokens, config))
            opt.zero_grad()
            total = net.forward_backward(x, y, schedule)
            grads = grads or whole_gradients(net, shapes)
            norms.append(float(net.clip_grad_norm_(CLIP[optimizer] if clip is None else clip)))
            opt.step()
            if config.experts:
                net.balance(RATE)
            if cuda_graphs and step == 0:
                net.forward(x, y)  # eager, and what it gathers must not be missing in what is recorded next
            torch_dist.all_reduce(total, group=net.replicas)  # the library's: this one must work under sabotage too
            losses.append(float(total) / dist.get_world_size(net.replicas))
        weights = {n: net.whole_parameter(n).cpu().numpy().copy() for n in {**shapes, **model.buffers(config)}}
        return losses, norms, grads, weights
    finally:
        kernels.use("auto")
        for name, function in kept.items():
            setattr(dist, name, function)


def in_layout_on_nodes(node, layout, *args, **options):
    """`in_layout`, as if torchrun had started nodes of `node` ranks; and whether the dp group works in two levels."""
    with nodes_of(node):
        results = in_layout(layout, *args, **options)
        return results, layout["dp"] in map(dist.get_world_size, dist._levels)


def differences(got, want, tolerance=1e-10):
    """What of (losses, norms, gradients, weights) differs by more than the tolerance, by name."""
    losses, norms, grads, weights = got
    close = functools.partial(globals()["close"], tolerance=tolerance)
    return ([f"loss {i}" for i in range(3) if not close(losses[i], want[0][i])]
            + [f"norm {i}" for i in range(3) if not close(norms[i], want[1][i])]
            + [f"gradient {n}" for n in grads if not close(grads[n], want[2][n])]
            + [f"weight {n}" for n in want[3] if not close(weights[n], want[3][n])])


LAYOUTS = [{"dp": 1}, {"dp": 2}, {"dp": 4}, {"dp": 8}, {"tp": 2}, {"tp": 4}, {"tp": 8}, {"dp": 2, "tp": 2},
           {"dp": 4, "tp": 2}, {"dp": 2, "tp": 4}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_equals_one_process(pool, layout):
    """By SGD; AdamW has its turn with ZeRO, with pipelines, and in test_every_layout_logs_the_same_losses."""
    for micro_batches, change in (min(2, BATCH // layout.get("dp", 1)), {}), (1, {"tied": False, "activation": "elu"}):
        want = one_process("sgd", **change)
        for got in pool(math.prod(layout.values())).run(in_layout, layout, "sgd", micro_batches, change):
            assert not differences(got, want), (micro_batches, change)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("layout", [{"dp": 1}, {"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}], ids=str)  # on 8: with nodes
def test_zero_equals_one_process(pool, layout, zero):
    cases = [("sgd", 2, {"tied": False}, "block"), ("sgd", 1, {}, "none"), ("adamw", 2, {}, "attention")]
    for optimizer, micro_batches, change, recompute in cases:
        want = one_process(optimizer, **change)
        for got in pool(math.prod(layout.values())).run(in_layout, layout, optimizer, micro_batches, change, zero=zero,
                                                        recompute=recompute):
            assert not differences(got, want), (optimizer, micro_batches, change, recompute)


@pytest.mark.parametrize("layout,micro_batches,schedule,zero,within", [
    *(({"dp": 4}, 2, "1f1b", *z) for z in ((0, None), (1, None), (3, None), (1, 1), (1, 2), (2, 2), (3, 2))),
    *(({"dp": 4, "tp": 2}, 1, "1f1b", *z) for z in ((0, None), (3, None), (1, 2), (3, 2))),
    *(({"dp": 4, "pp": 2}, 2, "zb-h1", *z) for z in ((0, None), (1, None), (2, 2), (3, 2)))], ids=str)
def test_two_nodes_equal_one_process(pool, layout, micro_batches, schedule, zero, within):
    """dp in two levels, of nodes of half the ranks; or ZeRO within two neighbours, replicas between."""
    want, size = one_process("adamw"), math.prod(layout.values())
    for got, two_levels in pool(size).run(in_layout_on_nodes, size // 2, layout, "adamw", micro_batches, {},
                                          schedule=schedule, zero=zero, zero_within=within):
        assert not differences(got, want) and two_levels == ("pp" not in layout)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_on_three_ranks(pool, zero):
    """Nothing divides by 3: buckets are padded, and the padding stays out of norm and weights."""
    change = {"n_head": 3, "n_embd": 27, "inner": 40}
    want = one_process("sgd", 9, **change)
    for got in pool(3).run(in_layout, {"dp": 3}, "sgd", 3, change, zero=zero, batch=9):
        assert not differences(got, want)


SCHEDULES = ["gpipe", "1f1b", "zb-h1"]


def all_of(results):
    """(losses, norms, gradients, weights) of all pipeline ranks together: each has the gradients of its own stages."""
    return results[0][0], results[0][1], {n: g for r in results for n, g in r[2].items()}, results[0][3]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_pipeline_equals_one_process(pool, schedule, p):
    """More and fewer micro-batches than stages; five layers, which no p divides; tied and untied."""
    cases = [(1, True), (2, False), (3, True), (4, False), (8, True)][:5 if p == 4 else 4]
    for m, tied in cases if schedule != "gpipe" else ((2, True), (8, False)):
        change, batch = {"n_layer": 5, "tied": tied}, 24 if m == 3 else BATCH
        want = one_process("sgd", batch, **change)
        results = pool(p).run(in_layout, {"pp": p}, "sgd", m, change, schedule=schedule, batch=batch)
        assert set(all_of(results)[2]) == set(want[2])
        for got in [*results, all_of(results)]:
            assert not differences(got, want), (m, tied)


def partly_fused(ranks):
    """ZB-H1 whose backwards are in one piece on some ranks."""
    def schedule(p, m, v=1):
        return [[action._replace(kind="B") if r in ranks and action.kind == "I" else action for action in actions
                 if r not in ranks or action.kind != "W"] for r, actions in enumerate(zero_bubble_h1(p, m))]
    return schedule


def in_layout_partly_fused(ranks, *args, **options):
    with unittest.mock.patch.dict(parallel.SCHEDULES, {"partly fused": partly_fused(ranks)}):
        return in_layout(*args, schedule="partly fused", **options)


@pytest.mark.parametrize("ranks", [{0}, {2}, {0, 1}])
def test_stages_may_run_b_or_its_halves(pool, ranks):
    """Checked, simulated, run. Where rank 0 alone does not put W off, ZB-H1 does the same in the same time."""
    lists = partly_fused(ranks)(3, 6)
    parallel.check(parallel.lower(lists))
    h1 = simulate(zero_bubble_h1(3, 6)).length
    assert simulate(lists).length == h1 if ranks == {0} else simulate(lists).length > h1
    want, results = one_process("sgd"), pool(3).run(in_layout_partly_fused, ranks, {"pp": 3}, "sgd", 4, {})
    for got in [*results, all_of(results)]:
        assert not differences(got, want)


@pytest.mark.parametrize("p,m,v", [(2, 2, 2), (2, 8, 3), (3, 3, 2), (4, 4, 1), (4, 8, 2)])
def test_interleaved_pipeline_equals_one_process(pool, p, m, v):
    change, batch = {"n_layer": 7}, 24 if m == 3 else BATCH
    want = one_process("sgd", batch, **change)
    for got in pool(p).run(in_layout, {"pp": p}, "sgd", m, change, schedule="interleaved", batch=batch,
                           virtual_stages=v):
        assert not differences(got, want)


@pytest.mark.parametrize("layout,schedule,options", [
    ({"dp": 2, "tp": 2, "pp": 2}, "1f1b", {}), ({"dp": 2, "tp": 2, "pp": 2}, "zb-h1", {"zero": 1}),
    ({"dp": 2, "pp": 4}, "zb-h1", {}),
    ({"tp": 2, "pp": 4}, "1f1b", {"recompute": "block"}), ({"dp": 2, "tp": 2, "pp": 2}, "zb-h1", {"zero": 3}),
    *(({"dp": 2, "pp": 2}, schedule, {"zero": zero}) for zero in (0, 1, 2, 3) for schedule in ("1f1b", "zb-h1")),
    *(({"dp": 2, "pp": 2}, "interleaved", {"zero": zero, "virtual_stages": 2}) for zero in (0, 1, 2, 3)),
    ({"dp": 2, "pp": 2}, "gpipe", {"zero": 3, "recompute": "attention"})], ids=str)
def test_pipeline_composes(pool, layout, schedule, options):
    """SGD with a tied embedding, or AdamW with an untied one."""
    optimizer, tied = ("adamw", False) if schedule == "interleaved" or "recompute" in options else ("sgd", True)
    change = {"n_layer": 4, "tied": tied}
    want = one_process(optimizer, **change)
    for got in pool(math.prod(layout.values())).run(in_layout, layout, optimizer, 4, change, schedule=schedule,
                                                    **options):
        assert not differences(got, want)


def left_in_backward(schedule):
    net = parallel.parallelize(SMALL, parallel.make_mesh(torch.get_default_device().type, dp=2, pp=2),
                               torch.get_default_device())
    net.make_optimizer(torch.optim.SGD, lr=0.1)
    x, y = (t.to(torch.get_default_device()).split(2) for t in tokens_of(0))
    net.run(x, y, schedule, 1.0, net.syncs)
    left = [stage.reducer.next == len(stage.buckets) > 0 for stage in net.stages.values()]
    for stage in net.stages.values():
        stage.finish_grad_sync()
    return all(left)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replicas_of_a_stage_reduce_with_its_own_last_backward(pool, schedule):
    assert all(pool(4).run(left_in_backward, schedule))


def channels_of(virtual_stages, tied):
    mesh = parallel.make_mesh(torch.get_default_device().type, pp=3)
    made = []
    with unittest.mock.patch.object(dist, "new_group", lambda ranks: made.append(tuple(ranks))):
        net = parallel.parallelize(dataclasses.replace(SMALL, n_layer=6, tied=tied), mesh, torch.get_default_device(),
                                   virtual_stages=virtual_stages)
    return made, sorted(net.pipeline.channels), net.ends is None


def test_pipelines_make_the_groups_they_use(pool):
    """A rank with one stage sends nothing round from the last to the first; an untied embedding is nobody's twice."""
    line, back = [(0, 1), (1, 0), (1, 2), (2, 1)], [(0, 2), (2, 0)]
    for made, channels, endless in pool(3).run(channels_of, 1, False):
        assert made == channels == line and endless
    found = pool(3).run(channels_of, 2, True)
    assert [endless for *_, endless in found] == [False, True, False]
    assert all(made == channels == sorted(line + back) for made, channels, _ in found)


def test_a_schedule_that_would_leave_out_stages_is_refused():
    net = object.__new__(parallel.ParallelGPT)
    net.lists, net.p, net.count, net.mesh = {}, 2, 4, types.SimpleNamespace(get_coordinate=lambda: [0])
    with pytest.raises(ValueError, match="1f1b .*give virtual_stages 1"):
        net.actions("1f1b", 4)
    assert net.actions("interleaved", 4)


def test_layers_are_split_by_cost():
    config = model.GPTConfig(100, 8, 6, 2, 8)
    for stages in range(1, 9):
        cuts = theory.clock.split_pieces(config, stages)
        assert [i for cut in cuts for i in cut] == list(range(8)) and all(cuts) and len(cuts) == stages
    heavy_head = theory.clock.split_pieces(model.GPTConfig(100_000, 8, 6, 2, 8), 2)
    assert heavy_head == [range(7), range(7, 8)]
    heavy_block = theory.clock.split_pieces(model.GPTConfig(100, 8, 4, 2, 8, experts=4, top_k=4, expert_every=4), 2)
    assert heavy_block == [range(4), range(4, 6)]
    assert [len(c) for c in theory.clock.split_pieces(model.PRESETS["gpt2-xl"], 4)] == [13, 13, 13, 11]


def test_uneven_tensor_parallel(pool):
    """Three ranks: a vocabulary of 37, an MLP of 40 wide, 3 heads."""
    change = {"n_head": 3, "n_embd": 24, "inner": 40}
    want = one_process("sgd", **change)
    for got in pool(3).run(in_layout, {"tp": 3}, "sgd", 1, change):
        assert not differences(got, want)


def test_layers_behind_frozen_ones_have_their_gradients():
    """Nothing before the first layer needs a gradient, so a detached weight would have no backward there."""
    def gradients(split):
        net = model.GPT(SMALL).double()
        for name, param in net.named_parameters():
            param.requires_grad = "attn" in name or "mlp" in name
        if split:
            parallel.split_linears(net)
        x, y = tokens_of(0)
        F.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
        return {name: param.grad for name, param in net.named_parameters() if param.requires_grad}

    split = gradients(True)
    for name, want in gradients(False).items():
        assert close(split[name], want, 1e-12), name


# What may be drawn: a flag's choices, all of them, and some values of the others. Odd sizes divide by nothing.
CHOICES = {field.name: [*field.metadata["choices"]] for field in dataclasses.fields(train.Flags)
           if field.metadata.get("choices")}
DRAWN = {name: CHOICES[name] for name in ("schedule", "zero", "recompute", "comm", "cp_kind", "activation")}
DRAWN |= {"dp": [1, 2, 3, 4], "tp": [1, 2, 3, 4], "cp": [1, 2, 3, 4], "pp": [1, 2, 3, 4], "sp": [False, True],
          "ep": [1, 2, 3], "zero_within": [None, 1, 2, 3], "virtual_stages": [1, 2, 3], "micro_batches": [1, 2, 3, 4],
          "clip": [0.0, 0.1], "experts": [0, 3, 4, 6], "top_k": [1, 2], "expert_every": [1, 2], "n_layer": [1, 2, 3, 5],
          "n_head": [2, 3, 4], "n_embd": [12, 20, 27], "seq_len": [5, 7, 8, 12], "vocab_size": [11, 37]}
BESIDE = {"optimizer": ["sgd", "adamw"], "tied": [False, True], "inner": [0, 19], "samples": [1, 2, 3]}  # no flags
SIZES_DRAWN = 4 * [2, 4, 3, 4, 2, 6, 4] + [8, 8]  # ranks of each
LATER = {"model", "dtype", "reduce_dtype", "device", "kernels", "plain"}  # they round, or have tests of their own
OF_THE_RUN = {"data", "balance_rate", "steps", "batch_size", "lr", "min_lr", "warmup_steps", "weight_decay", "seed",
              "eval_every", "log_every", "sample", "prompt", "out", "save_every", "resume"}


def draw_layout(draw, size):
    """{option: value} of so many ranks, without options that change nothing there. What train.py refuses is drawn anew.
    """
    axes = "dp", "tp", "cp", "pp"
    grids = [grid for grid in itertools.product(*map(DRAWN.get, axes)) if math.prod(grid) == size]
    while True:
        case = {name: values[draw.integers(len(values))] for name, values in {**DRAWN, **BESIDE}.items()}
        case |= zip(axes, grids[draw.integers(len(grids))])
        for idle, names in [(case["cp"] == 1, ["cp_kind"]), (case["pp"] == 1, ["schedule"]), (case["tp"] == 1, ["sp"]),
                            (case["pp"] == 1 or case["schedule"] != "interleaved", ["virtual_stages"]),
                            (not case["zero"], ["zero_within"]), (not case["experts"], ["top_k", "expert_every"]),
                            (not case["experts"] or case["dp"] == 1, ["ep"])]:
            for name in names if idle else ():
                case.pop(name)
        if case["n_embd"] % case["n_head"] or case.get("expert_every", 1) > case["n_layer"]:
            continue
        s = Settings(device="cpu", dtype="fp64", batch_size=case["dp"] * case["micro_batches"] * case["samples"],
                           **{name: value for name, value in case.items() if name in DRAWN})
        with contextlib.suppress(BadInput):
            if check_layout(s, model.GPTConfig(**config_drawn(case)), size, size) == size:
                return case


def config_drawn(case):
    """Of the options, the model's."""
    return {field.name: case[field.name] for field in dataclasses.fields(model.GPTConfig) if field.name in case}


@functools.cache
def drawn_layouts():
    """Each is, of 40, the one with most values that none before it has, or else most pairs of values."""
    draw, cases, seen = np.random.default_rng(0), [], set()
    for size in SIZES_DRAWN:
        every = [draw_layout(draw, size) for _ in range(40)]
        cases.append(max(every, key=lambda case: [len({*itertools.combinations(case.items(), n)} - seen)
                                                  for n in (1, 2)]))
        seen.update(itertools.combinations(cases[-1].items(), 1), itertools.combinations(cases[-1].items(), 2))
    return cases


def test_every_value_of_every_option_is_drawn():
    """And every flag is drawn, or tested elsewhere, or none of the layout's."""
    drawn = {item for case in drawn_layouts() for item in case.items()}
    assert [(name, v) for name, values in {**DRAWN, **BESIDE}.items() for v in values if (name, v) not in drawn] == []
    flags = [field.name for field in dataclasses.fields(train.Flags)]
    assert sorted(flags) == sorted([*DRAWN, *LATER, *OF_THE_RUN]) and set(CHOICES) <= DRAWN.keys() | LATER


@pytest.mark.parametrize("number", range(len(SIZES_DRAWN)))
def test_layouts_drawn_at_random_equal_one_process(pool, number):
    """Of all axes at once, with whatever goes with them."""
    case, change = drawn_layouts()[number], config_drawn(drawn_layouts()[number])
    layout = {axis: case[axis] for axis in ("dp", "tp", "cp", "pp")}
    options = {name: case[key] for name, key in {
        "zero": "zero", "zero_within": "zero_within", "sequence": "sp", "context": "cp_kind", "recompute": "recompute",
        "virtual_stages": "virtual_stages", "schedule": "schedule", "ep": "ep", "comm": "comm"}.items() if key in case}
    batch = case["dp"] * case["micro_batches"] * case["samples"]
    want = one_process(case["optimizer"], batch, case["seq_len"], clip=case["clip"], **change)
    results = pool(math.prod(layout.values())).run(
        in_layout, layout, case["optimizer"], case["micro_batches"], change, batch=batch, tokens=case["seq_len"],
        clip=case["clip"], **options)
    for got in [*results, all_of(results)]:
        assert not differences(got, want), case


@pytest.mark.parametrize("dtype,reduce_dtype", [(torch.float32, torch.bfloat16), (torch.bfloat16, None),
                                                (torch.float16, None)], ids=str)
@pytest.mark.parametrize("zero", CHOICES["zero"])
def test_layouts_that_round_are_near_one_process(pool, zero, dtype, reduce_dtype):
    """Gradients that are sent in bf16, and layers in 16 bits: not float64's numbers, but near."""
    want, rounds = one_process("sgd"), {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
    unit = max(rounds[dtype], rounds[reduce_dtype or dtype])
    for got in pool(2).run(in_layout, {"dp": 2}, "sgd", 2, {}, zero=zero, dtype=dtype, reduce_dtype=reduce_dtype):
        assert not differences(got, want, 8 * unit) and differences(got, want, unit / 100)


@pytest.mark.parametrize("layout,options", [({"dp": 2}, {"zero": 3}), ({"tp": 2}, {"sequence": True})], ids=str)
def test_layouts_on_kernels_are_near_one_process(pool, layout, options):
    needs_kernels(pool)
    change = {"n_layer": 1, "n_head": 2, "vocab_size": 11, "seq_len": 4}
    want = one_process("sgd", 2, 4, **change)
    for got in pool(2).run(in_layout, layout, "sgd", 1, change, batch=2, tokens=4, dtype=torch.float32, choice="triton",
                           **options):
        assert not differences(got, want, 1e-5)


@pytest.mark.parametrize("where,layout", [
    ("shift", {"cp": 2}), ("heads_for_tokens", {"cp": 2, "context": "ulysses"}),
    ("tokens_for_heads", {"cp": 2, "context": "ulysses"}), ("Reducer.start", {"cp": 2}),
    *((name, {"tp": 2, "sequence": True}) for name in ("gather_tokens", "scatter_tokens", "clip_grad_norm_",
                                                       "ParallelGPT.add_up_gradients")),
    ("Reducer.start", {"dp": 2}), ("ShardReducer.start", {"dp": 2, "zero": 1}),
    ("ShardReducer.start", {"dp": 2, "zero": 2}),
    ("ShardReducer.start", {"dp": 2, "zero": 3}), ("ShardedOptimizer.gather_weights", {"dp": 2, "zero": 1}),
    ("FlatParameter.all_gather", {"dp": 2, "zero": 3}),
    *(("ShardReducer.average_between", {"dp": 4, "zero": zero, "zero_within": 2}) for zero in (1, 2, 3)),
    ("clip_grad_norm_", {"dp": 2, "zero": 2}), ("clip_grad_norm_", {"dp": 2, "zero": 3}),
    ("ParallelGPT.add_up_gradients", {"pp": 2}), ("clip_grad_norm_", {"pp": 2}), ("CopyToGroup.backward", {"tp": 2}),
    ("ReduceFromGroup.forward", {"tp": 2}),
    ("VocabParallelCrossEntropy.forward", {"tp": 2}), ("clip_grad_norm_", {"tp": 2}),
    ("clip_grad_norm_", {"dp": 2, "tp": 2}), ("Reducer.start", {"dp": 2, "tp": 2})], ids=str)
def test_without_its_collective_it_is_wrong(pool, where, layout):
    options = {name: value for name, value in layout.items() if name.startswith(("zero", "sequence", "context"))}
    layout = {axis: size for axis, size in layout.items() if axis not in options}
    want = one_process("sgd", tokens=8)
    for got in pool(math.prod(layout.values())).run(in_layout, layout, "sgd", 1, {}, where, tokens=8, **options):
        assert differences(got, want)
