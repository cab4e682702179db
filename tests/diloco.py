"""DiLoCo's islands: the one strategy whose run does not equal one process. What it equals instead is told here.

One outer step after each plain SGD step, of lr 1 and without momentum, is one process's step. Else it is what one
process computes that keeps a model for each island, and averages them by hand.
"""

import copy
import functools
import math
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import collectives as dist
import kernels
import model
from fast.adamw import AdamW
from fast.zero import AheadOptimizer
from further.diloco import DiLoCo, island_of
from further.full import Full
from tests.layouts import (
    arguments_of, case_of, DECAY, expanded, in_layout, one_process, optimizer_of, SIZED, sized, small_gpt, tokens_of)
from tests.pool import close, needs_kernels, on_both, on_ranks, parametrize
from tests.runs import start


# -------------------------------------------------------------------------------------------------------------- by hand

@functools.cache
def by_hand(optimizer, steps, batch, tokens, clip, islands, local_steps, outer_lr, outer_momentum, **change):
    """(losses, norms) of each island, and the first one's weights after the last step: a model for each, plain PyTorch,
    whose SGD takes the outer step."""
    config = sized(**change)
    nets = [model.GPT(config).double() for _ in range(islands)]
    inner = [optimizer_of(optimizer, [{"params": [n for n in net.named_parameters() if (n[1].dim() > 1) == matrix],
                                       "weight_decay": DECAY * matrix} for matrix in (True, False)]) for net in nets]
    agreed = copy.deepcopy(nets[0])
    outer = torch.optim.SGD(agreed.parameters(), outer_lr, outer_momentum, nesterov=outer_momentum > 0)
    losses, norms = ([[] for _ in nets] for _ in range(2))
    for step in range(steps):
        for i, net in enumerate(nets):
            x, y = (t.chunk(islands)[i] for t in tokens_of(step, batch, tokens, config))
            net.zero_grad()
            loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
            loss.backward()
            losses[i].append(loss.item())
            norms[i].append(float(nn.utils.clip_grad_norm_(net.parameters(), clip or math.inf)))
            inner[i].step()
        if (step + 1) % local_steps == 0:
            for p, *arrived in zip(agreed.parameters(), *(net.parameters() for net in nets)):
                p.grad = torch.stack([p.detach() - q.detach() for q in arrived]).mean(0)
            outer.step()
            for net in nets:
                net.load_state_dict(agreed.state_dict())
    return losses, norms, {name: p.detach() for name, p in nets[0].named_parameters()}


ISLANDS = {"local_steps": 2, "outer_lr": 0.7, "outer_momentum": 0.9}
ROWS = """
    dp=2 islands=2 micro_batches=2
    dp=4 islands=2 zero=1,3
    dp=4 islands=2 zero=2 zero_within=1
    dp=4 node=2 islands=2 local_steps=1 outer_momentum=0
    dp=3 islands=3 batch=9 local_steps=3
    dp=2 tp=2 islands=2 sp=1 zero=1 recompute=block
    dp=2 pp=2 islands=2 schedule=zb-h1 micro_batches=2 zero=3
    dp=2 pp=2 islands=2 schedule=zb-v micro_batches=2 n_layer=3
    dp=2 cp=2 islands=2 tokens=8 zero=3
    dp=2 tp=2 islands=2 arch=llama n_kv_head=4 tokens=8 comm=torch
    dp=4 islands=2 zero=1 optimizer=muon"""
EQUAL = "steps=2 optimizer=sgd local_steps=1 outer_lr=1 outer_momentum=0 clip=0"  # to one process
OF_ONE = """
    dp=4 islands=4
    dp=4 islands=2 zero=1,3
    dp=2 tp=2 islands=2 sp=1
    dp=2 pp=2 islands=2 micro_batches=2
    dp=2 cp=2 islands=2 tokens=8"""


def table_of(rows):
    return [row for line in rows.strip().splitlines() for row in expanded(line.strip())]


def found_in(pool, case, **options):
    """Of each rank: (losses, norms) of its island, gradients and weights of the first one."""
    place, more = arguments_of(case)
    return pool(math.prod(place[0].values())).run(in_layout, pool.edition, *place, **more, **options)


def exact(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def same(weights, want):
    return all(close(weights[name], p) for name, p in want.items())


@on_both
@parametrize("row", table_of(ROWS))
def test_islands_take_local_steps_and_an_average_as_by_hand(pool, row):
    """The last of five steps ends no round."""
    case = case_of(f"steps=5 optimizer=adamw {row}")
    if case["optimizer"] == "muon" and not issubclass(pool.edition, Full):
        pytest.skip("the lecture's ZeRO cuts matrices that Muon needs whole")
    case = ISLANDS | case
    (_, optimizer, _, change), options = arguments_of(case)
    losses, norms, weights = by_hand(optimizer, *(options[name] for name in ("steps", "batch", "tokens", "clip",
                                     "islands", *ISLANDS)), **change)
    found = found_in(pool, case)
    islands = {min(range(len(losses)), key=lambda i: abs(losses[i][0] - ours[0][0])) for ours in found}
    assert islands == {*range(case["islands"])}
    for ours in found:
        assert any(close(*map(exact, [ours[:2], (losses[i], norms[i])])) for i in islands) and same(ours[3], weights)


@on_both
@parametrize("row", table_of(OF_ONE))
def test_islands_that_average_each_plain_step_equal_one_process(pool, row):
    (_, optimizer, _, change), options = arguments_of(case := case_of(f"{EQUAL} {row}"))
    want = one_process(optimizer, *(options[name] for name in SIZED), **change)
    found = found_in(pool, case)
    assert all(same(ours[3], want[3]) for ours in found)
    assert close(exact([ours[0] for ours in found]).mean(0), exact(want[0]))


@parametrize("pool", ["plain", "full"], indirect=True)
@parametrize("without", ["DiLoCo.outer_step", "averaging"])
def test_islands_are_wrong_without(pool, without):
    """What averages between them, or inside of one."""
    case = case_of(f"{EQUAL} dp=4 islands=2")
    want = one_process("sgd", *({**SIZED, **case}[name] for name in SIZED))
    assert not any(same(ours[3], want[3]) for ours in found_in(pool, case, without=without))


# ------------------------------------------------------------------------------------------- what is sent, what is kept

@on_both
@parametrize("size, layout", [(2, {"dp": 2}), *((4, {"dp": 4, "zero": zero}) for zero in range(4)),
                              (4, {"dp": 2, "tp": 2})], ids=str)
@on_ranks()
def test_islands_send_once_in_a_round(layout):
    """Between them 1/H of what averages of gradients would be. What they agree on is the same on all, in 16 bits, too.
    """
    net = small_gpt(islands=2, local_steps=3, dtype=torch.bfloat16, **layout)
    x, y = (t.to(net.device).split(2)[island_of(net):][:1] for t in tokens_of(0))
    for step in range(6):
        net.zero_grad()
        net.forward_backward(x, y)
        dist.reset_traffic()
        with patch.object(DiLoCo, "outer_step", autospec=True, side_effect=DiLoCo.outer_step) as outer:
            net.optimizer.step()
        rounds, apart = outer.call_count, dist.traffic().get("all_reduce")
        assert rounds == (step % 3 == 2) and rounds == (apart is not None)
        if rounds:
            assert abs(apart.bytes - sum(4 * p.numel() for p in net.params)) <= 4 * len(net.params)
        loss = net.forward(*([t.to(net.device)[:2]] for t in tokens_of(1))).view(1)  # of the same tokens
        dist.all_gather_into_tensor(both := loss.new_empty(2), loss, net.groups.between)
        assert both[0].equal(both[1]) == (step % 3 == 2)


@parametrize("stage", [0, 1])
@on_ranks(2)
def test_islands_step_with_adamw_s_kernel(stage):
    """It writes no 16-bit weights then, and starts no gather: both come after the outer step."""
    needs_kernels()
    kernels.use("triton")
    own_rank, both = dist.rows_and_columns([[0], [1]])
    after = []
    for adamw in torch.optim.AdamW, AdamW:
        torch.manual_seed(0)
        net = nn.Linear(64, 64).to(torch.get_default_device())
        opt = AheadOptimizer(net.parameters(), functools.partial(DiLoCo, adamw, both, 2, 0.7, 0.9), own_rank, stage,
                             compute_dtype=torch.bfloat16, lr=0.1)
        for step in range(4):
            opt.zero_grad()
            (net(torch.ones(2, 64, dtype=torch.bfloat16)).sum() * (1 - 3 * dist.get_rank())).backward()
            opt.finish_grad_sync()
            opt.step()
        after.append(torch.cat([p.detach().float().flatten() for p in net.parameters()]))
    dist.broadcast(first := after[1].clone(), 0)
    assert after[1].equal(first) and close(*after, 1e-2)


def test_an_islands_run_of_plain_goes_on_to_the_bit(start, tmp_path):
    """Amid a round, in which islands differ. (Of the whole program tests/checkpoints.py has rows.)"""
    flags = "--together --dp 2 --islands 2 --local-steps 4 --steps 4 --save-every 2 --out OUT/a"
    start(flags).said()
    file = tmp_path / "a" / "step-00000004.pt"
    want = torch.load(file)["tensors"]
    file.unlink()
    start(flags + " --resume").said()
    got = torch.load(file)["tensors"]
    assert got.keys() == want.keys() and all(got[name].equal(want[name]) for name in want)
    labels = [name for name in want if name.endswith("ln_f.weight")]
    assert labels == [label + "ln_f.weight" for label in (
        "", "exp_avg.", "exp_avg_sq.", "outer.", "outer_momentum.", "island1.", "island1.exp_avg.",
        "island1.exp_avg_sq.")]
