"""lessons/micro.py: it is model.py's GPT, each layout is one process's, and is wrong without its messages."""

import os
import re
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lessons import micro
from model import GPT, GPTConfig
from tests.pool import HERE, in_new_process, parametrize

FILE = os.path.join(HERE, "lessons", "micro.py")
SOURCE = open(FILE).read()
ONE = 1, 1, 1, 0


def of_sizes(*sizes):
    """micro.py with other C, H, T, V, L, BATCH."""
    given = "C, H, T, V, L, BATCH = 8, 4, 4, 12, 2, 4"
    assert SOURCE.count(given) == 1
    module = types.ModuleType("micro_of_sizes")
    exec(compile(SOURCE.replace(given, f"C, H, T, V, L, BATCH = {sizes}"), FILE, "exec"), module.__dict__)
    return module


class RMSNorm(nn.Module):
    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


class Config(GPTConfig):
    biased = False

    def norm(self):
        return RMSNorm()

    def activation_function(self):
        return F.relu


def in_model(micro, rows):
    """model.py's names and shapes for micro's {piece: rows}."""
    tensors = [torch.tensor(rows[piece], dtype=torch.float64) for piece in range(micro.HEAD + 1)]
    named = {"wte.weight": tensors[0][:micro.V], "wpe.weight": tensors[0][micro.V:], "lm_head.weight": tensors[-1]}
    for i in range(micro.L):
        q, k, v, o = tensors[1 + 2 * i].view(micro.H, 4, micro.D, micro.C).transpose(0, 1).flatten(1, 2)
        up, down = tensors[2 + 2 * i].view(-1, 2, micro.C).unbind(1)
        named |= {f"h.{i}.attn.c_attn.weight": torch.cat([q, k, v]), f"h.{i}.attn.c_proj.weight": o.T,
                  f"h.{i}.mlp.c_fc.weight": up, f"h.{i}.mlp.c_proj.weight": down.T}
    return named


def beside_model(sizes):
    """{what: (how far micro's is from that of model.py's GPT, the GPT's largest number)}, of the loss and each
    gradient. (The momentum of the first step is the gradient.)"""
    here = of_sizes(*sizes)
    C, H, T, V, L, BATCH = sizes
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, C, generator=generator, dtype=torch.float64).mul(0.3).tolist() for n in here.ROWS]
    tokens = torch.randint(V, (BATCH, T + 1), generator=generator)
    rank = here.Rank(0, rows, *ONE)
    (loss,), _ = here.run([rank.step(tokens.tolist())])
    gpt = GPT(Config(V, T, L, H, C, tied=False)).double()
    gpt.load_state_dict(in_model(here, rows))
    want = F.cross_entropy(gpt(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    want.backward()
    found = {"loss": (abs(loss - want.item()), want.item())}
    grads = in_model(here, rank.momentum)
    for name, param in gpt.named_parameters():
        found[name] = (param.grad - grads.pop(name)).abs().max().item(), param.grad.abs().max().item()
    assert not grads
    return found


@parametrize("sizes", [(8, 4, 4, 12, 2, 4), (6, 2, 5, 7, 3, 3)], ids=str)
def test_micro_is_the_gpt_of_model_py(sizes):
    """Without fast/, whose blocks want a norm with weights."""
    for name, (far, largest) in in_new_process(beside_model, sizes).items():
        assert far < 1e-12 and largest > 1e-3, name


@pytest.fixture
def furthest():
    """How far a layout is from one process, which was trained before the test changes anything."""
    (one,), one_losses, _ = micro.trained(*ONE)
    return lambda layout: micro.furthest(*micro.trained(*layout)[:2], one, one_losses, layout)


MORE = [(1, 2, 1, 0), (1, 1, 2, 0), (1, 1, 6, 0), (4, 2, 1, 3), (1, 4, 6, 0)] + [
    (2, 2, 3, zero) for zero in range(4)]


@parametrize("layout", [row[:4] for row in micro.LAYOUTS] + MORE, ids=str)
def test_each_layout_of_micro_equals_one_process(layout, furthest):
    dp, tp, pp, _ = layout
    assert furthest(layout) < 1e-14
    sent = micro.trained(*layout)[2]
    stages = [sent[i:i + dp * tp] for i in range(0, dp * tp * pp, dp * tp)]
    assert all(len(set(stage)) == 1 for stage in stages) and min(sent) > 0


@parametrize("zero", range(4))
def test_what_a_rank_of_micro_keeps(zero):
    """1/N of what its optimizer steps from ZeRO-1 on; of ZeRO-3 no whole weights after a step."""
    for rank in micro.trained(4, 1, 1, zero)[0]:
        for kept in rank.mine, rank.momentum:
            assert sum(map(len, kept.values())) * micro.C * (4 if zero else 1) == micro.K
        assert sum(map(len, rank.whole.values())) * micro.C == (0 if zero == 3 else micro.K)


def silent(result):
    """A collective that sends nothing: each rank goes on with its own."""
    def collective(x, group):
        return result(x, *group[:2])
        yield
    return collective


def without(left_out):
    """step_list without the actions for which left_out(stage, letter, piece or other stage)."""
    def actions(zero, stage, stages, micro_batches, whole=micro.step_list):
        return [action for action in whole(zero, stage, stages, micro_batches) if not left_out(stage, *action[:2])]
    return actions


def goes_back(stage, letter, other):
    return letter == "R" and other > stage or letter == "S" and other < stage


MUTANTS = {  # name: (where it counts, what stands in its place)
    "all_reduce": (lambda dp, tp, pp, zero: dp > 1 and not zero, silent(lambda x, n, i: x)),
    "reduce_scatter": (lambda dp, tp, pp, zero: dp > 1 and zero, silent(lambda x, n, i: micro.split(x, n)[i])),
    "all_gather": (lambda dp, tp, pp, zero: dp > 1 and zero, silent(lambda chunk, n, i: chunk * n)),
    "g_forward": (lambda dp, tp, pp, zero: tp > 1, silent(lambda x, n, i: x)),
    "f_backward": (lambda dp, tp, pp, zero: tp > 1, silent(lambda x, n, i: x)),
    "step_list": (lambda dp, tp, pp, zero: pp > 1, without(goes_back))}


@parametrize("name", MUTANTS)
def test_each_layout_of_micro_is_wrong_without_its_messages(name, furthest, monkeypatch):
    counts, instead = MUTANTS[name]
    layouts = [row[:4] for row in micro.LAYOUTS if counts(*row[:4])]
    monkeypatch.setattr(micro, name, instead)
    assert layouts
    for layout in layouts:
        assert furthest(layout) > 1e-4, layout


@parametrize("n", [1, 2, 3, 5])
def test_a_ring_of_micro_adds_up_and_sends_what_the_lecture_says(n):
    """Of 7 rows, which no number of ranks but 1 divides."""
    x = [[[float(rank * 100 + row)] * micro.C for row in range(7)] for rank in range(n)]
    total = [[sum(numbers) for numbers in zip(*rows)] for rows in zip(*x)]
    groups = [micro.ring([*range(n)], rank) for rank in range(n)]
    whole, sent = micro.run([micro.all_reduce(x[rank], groups[rank]) for rank in range(n)])
    assert whole == [total] * n and sum(sent) == 2 * (n - 1) * 7 * micro.C


def test_micro_names_a_deadlock():
    def waits(source):
        yield "recv", source

    def returns():
        return
        yield

    with pytest.raises(RuntimeError, match="^deadlock: rank 0 waits for 1, rank 1 waits for 2$"):
        micro.run([waits(1), waits(2), returns()])


def test_lists_that_micro_shows_are_those_that_it_runs(monkeypatch):
    monkeypatch.setattr(micro, "HEAD", 2)
    for zero in 0, 1, 3:
        shown = re.search(rf"#     ZeRO-{zero} +((?:[A-Z]\d +|[A-Z]\d$)+)", SOURCE, re.M)[1].split()
        assert shown == [f"{letter}{piece}" for letter, piece, _ in micro.step_list(zero, 0, 1, 1)]
    for stage in range(3):
        shown = re.search(rf"#     stage {stage} +(.*)", SOURCE)[1].split()
        assert [cell for cell in shown if cell != ".."] == [f"{kind}{m}" for kind, m in micro.one_f_one_b(stage, 3, 4)]


def test_what_micro_prints():
    """By itself, as on a machine without torch; and each formula is what was sent."""
    printed = subprocess.run([sys.executable, "-S", FILE], capture_output=True, text=True, check=True).stdout
    rows = printed.splitlines()[2:]
    assert len(rows) == len(micro.LAYOUTS)
    for row, (*layout, formula) in zip(rows, micro.LAYOUTS):
        assert [int(number) for number in row.split()[:4]] == layout and row.rstrip().endswith(formula)
        assert float(row.split()[4]) < 1e-14
        if formula:
            assert row.split()[5] == formula.split()[-1], row
