"""`python -m lessons same`: right layouts are the same, and faults are seen, placed and named."""

import itertools
import os
import subprocess
import sys
from functools import partial

import torch
import torch.nn.functional as F

import collectives as dist
import model
import parallel
import train
from further.context import own_tokens
from further.experts import routers
from lessons import same
from tests import layouts, pool
from tests.pool import parametrize
from tests.runs import ran


def adapter_of(case, edition=parallel.Reference):
    """The adapter of a GPT in a row's layout, which SGD steps."""
    (layout, _, m, change), options = layouts.arguments_of(case)
    batch, tokens, bias, holes, _ = (options.pop(name) for name in ("batch", "tokens", "bias", "holes", "pack"))
    config = layouts.sized(**change)
    fields = {name: value for name, value in options.items() if hasattr(train.Layout, name)}
    mesh = {axis: layout.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")}
    made = []

    def build():
        net = model.GPT(config)
        for router in routers(net).values() if bias else ():
            router.bias = torch.tensor(layouts.BIASES[bias])
        return net

    def parallelize(whole):
        tensors = dict([*whole.named_parameters(remove_duplicate=False), *whole.named_buffers()])
        net = pool.parallelize(config, train.Layout(**layout, **{"dtype": torch.float64, **fields}), "cpu",
                               bias and (lambda name: tensors[name].detach()),
                               partial(torch.optim.SGD, lr=0.5), edition)
        made[:] = [net]
        return [*net.pieces.values()]

    def part(t):
        return t.chunk(mesh["dp"])[dist.get_rank(made[0].groups.dp)]

    def rows(t):
        groups = made[0].groups
        if mesh["cp"] == 1:
            return part(t)
        return part(t)[:, own_tokens(tokens, dist.get_rank(groups.cp), mesh["cp"], made[0].layout.cp_kind)]

    def whole(_, what):
        names = model.shapes(config)
        if what == "weights":
            return {name: made[0].whole_parameter(name).clone() for name in names}
        found = layouts.whole_gradients(made[0], made[0].optimizer, names)
        return {name: torch.from_numpy(gradient) for name, gradient in found.items()}

    def update(_):
        made[0].step()
        made[0].zero_grad()

    return dict(
        mesh=mesh, build=build, parallelize=parallelize, part=part, rows=rows, whole=whole, update=update,
        micro_batches=m, exact=False, batch=lambda step: layouts.tokens_of(step, batch, tokens, config, holes),
        loss=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten().clamp(min=-1), ignore_index=-1),
        step=lambda _, x, y: made[0].forward_backward([*x.chunk(m)], [*y.chunk(m)]),
        clip=lambda _, most: made[0].clip_grad_norm_(most))


def on_rank(case, edition=parallel.Reference, steps=None):
    """What this rank observes. steps: of so many; None: of all."""
    user, _ = same.adapters(adapter_of(case, edition))
    return [*itertools.islice(same.observed(user), steps)]


def weights_on_rank(case):
    """The weights that a row's steps leave, whole."""
    place, options = layouts.arguments_of(case)
    return layouts.in_layout(parallel.Reference, *place, **options)[3]


def told(case, ranks):
    """What the tool says of what ranks have observed; "" if they are the same as one process. Where fast/ is on, whose
    blocks call no submodules, it sees less."""
    user, alone = same.adapters(adapter_of(case))
    rows = sorted({tuple(rank[0]["rows"][0].tolist()) for rank in ranks})
    parts = [part for some in rows for part in torch.tensor(some).chunk(user.micro_batches)]
    for number, (*ours, one) in enumerate(zip(*ranks, same.observed(alone, parts * (len(parts) > 1))), 1):
        step = same.Step(user, one, ours)
        if step.cause:
            kind = step.cause[0][0].kind
            lines = [line.strip() for line in step.says(kind, step.found[kind])]
            return f"step {number}, {kind}: {'; '.join(lines)}"
    return ""


# ----------------------------------------------------------------------------------------------------- models of others

MODEL = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

def build(): return nn.Sequential(Block(), Block(), nn.Linear(8, 6))
def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(12, 4, 8, generator=draw), torch.randint(6, (12, 4), generator=draw)
def loss(out, y): return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())
"""
OTHERS = {
    "ddp": """
mesh, micro_batches = {"dp": 2}, 3
def parallelize(net):
    net = nn.parallel.DistributedDataParallel(net)
    return net
def part(t): return t.chunk(2)[dist.get_rank()]
def step(net, x, y):
    total = 0
    for i, (a, b) in enumerate(zip(x.chunk(3), y.chunk(3))):
        net.require_backward_grad_sync = i == 2
        some = loss(net(a), b) / 3
        some.backward()
        total += some.detach()
    return total
def clip(net, most): return nn.utils.clip_grad_norm_(net.parameters(), most)
""",
    "fsdp x tp": """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import *
mesh = {"dp": 2, "tp": 2}
def parallelize(net):
    places = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in net[:2]:
        parallelize_module(block, places["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=places["dp"])
    return fully_shard(net, mesh=places["dp"])
def part(t): return t.chunk(2)[dist.get_rank() // 2]
""",
    "pipeline": """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
mesh, micro_batches = {"pp": 2}, 4
def parallelize(net):
    global schedule
    rank = dist.get_rank()
    mine = nn.Sequential()
    for i in range(1) if rank == 0 else range(1, 3):
        mine.add_module(str(i), net[i])
    schedule = Schedule1F1B(PipelineStage(mine, rank, 2, torch.device("cpu")), 4, loss_fn=loss)
    return mine
def step(net, x, y):
    losses = []
    if dist.get_rank() == 0:
        schedule.step(x)
        return None
    schedule.step(target=y, losses=losses)
    return torch.stack(losses).mean()
"""}
FAULTS = [  # an adapter, what stands there, what somebody wrote, what the tool says
    ("ddp", "/ 3\n", "\n", "loss: x 3 = micro-batches"),
    ("ddp", "i == 2", "i == 0", "terms of a mean over dp, which nobody has reduced"),
    ("ddp", "some.backward", "net.zero_grad(); some.backward", "it has 0 0 1 0 0 1 times on dp 0"),
    ("ddp", "most): return", "most): return 2 *", "its square: x 4"),
    ("ddp", "def step", "def update(net): pass\ndef step", "zero on every rank"),
    ("ddp", "return net\n", "net.module[1].up.weight.data += dist.get_rank()\n    return net\n",
     "1.up.weight: right on dp 0, wrong on dp 1"),
    ("fsdp x tp", "for block in net[:2]:\n", """for block in net[:2]:
        block.norm.register_forward_hook(lambda m, a, o: o * 4)
""", "what 0.norm returns: x 4 = dp x tp"),
    ("fsdp x tp", "return t.chunk(2)[dist.get_rank() // 2]", "return t.chunk(2)[0]",
     "what 0.norm returns: right on dp 0 tp 0"),
    ("pipeline", "loss_fn=loss", "loss_fn=loss, scale_grads=False", "x 4 = micro-batches: a sum where a mean is meant")]


def said(folder, text, code, *flags, start=ran):
    """What the tool prints, alone in a folder with an adapter, if it ends with this exit code. It is started in a copy
    of a process that has imported PyTorch."""
    for name, lines in (("same.py", open(same.__file__).read()), ("mine.py", text)):
        (folder / name).write_text(lines)
    return start(["mine.py", *flags], 1, folder / "log", [code], program="same.py", folder=str(folder),
                 before=partial(os.chdir, folder), launcher="fork")


def in_new_python(flags, size, log, codes, folder, **_):
    """As a reader starts it."""
    done = subprocess.run([sys.executable, "same.py", *flags], cwd=folder, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"})
    assert done.returncode == codes[0], done.stdout + done.stderr
    return done.stdout + done.stderr


@parametrize("kind, flags", [("ddp", ()), ("fsdp x tp", ("--all",)), ("pipeline", ("--dtype", "bf16"))])
def test_right_models_of_others_are_the_same(tmp_path, kind, flags):
    text = said(tmp_path, MODEL + OTHERS[kind], 0, *flags, start=ran if flags else in_new_python)
    assert text.endswith("\nSAME\n"), text
    assert "--all" not in flags or "tp cuts dimension 0, dp cuts dimension 0" in text


@parametrize("kind, old, new, words", FAULTS, ids=range(len(FAULTS)))
def test_faults_are_seen_and_named(tmp_path, kind, old, new, words):
    assert old in OTHERS[kind]
    text = said(tmp_path, MODEL + OTHERS[kind].replace(old, new, 1), 1)
    assert words in text, text


@parametrize("old, new, words", [
    ("mesh,", "size,", "mine.py: the adapter has no mesh"),
    ("return net\n", "return None\n", " of 2: parallelize(net) returns None: give a module"),
    ("total = 0", "total = x.no", "line 25, in step: AttributeError: 'Tensor' object has no attribute 'no'")])
def test_an_adapter_that_cannot_run_is_refused_in_a_line(tmp_path, old, new, words):
    text = said(tmp_path, MODEL + OTHERS["ddp"].replace(old, new, 1), 2)
    assert words in text and text.count("\n") == 1, text
