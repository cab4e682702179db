"""`python -m lessons same`: right layouts are the same, faults are seen, placed and named. `mutate`: what tests see."""

import itertools
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
from functools import partial

import torch
import torch.nn.functional as F

import collectives as dist
import model
import parallel
import train
from further.experts import routers
from lessons import mutate, same
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
        mesh=mesh, build=build, parallelize=parallelize, part=part, whole=whole, update=update,
        micro_batches=m, batch=lambda step: layouts.tokens_of(step, batch, tokens, config, holes),
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
    one = [*itertools.islice(same.observed(alone), len(ranks[0]))]
    steps, _, first, _ = same.judged(user, [one], ranks)
    if not first:
        return ""
    (number, kind), parts = first, same.parts([rank[first[0]] for rank in ranks], user.micro_batches)
    if kind == "gradients" and len(parts) > 1:
        steps[number].pieces = next(same.observed(alone, pieces=(number, *parts)))
    return f"step {number + 1}, {kind}: {'; '.join(steps[number].says(kind))}"


SAMPLE = 24  # each so many of LAYOUTS' rows


@parametrize("row", [row for _, row, _ in layouts.rows() if not re.search("forced=|in-turns", row)][::SAMPLE])
def test_no_row_of_layouts_is_called_wrong(plain_pool, row):
    case = layouts.case_of(row)
    found = plain_pool(math.prod(case.get(axis, 1) for axis in layouts.AXES)).run(on_rank, case)
    assert not told(case, found)


# ----------------------------------------------------------------------------------------------------- models of others

ADAPTERS = pathlib.Path(__file__).parent / "adapters"
FAULTS = [  # an adapter, what stands there, what somebody wrote, what the tool says
    ("ddp", "/ 3\n", "\n", "loss: x 3 = micro-batches"),
    ("ddp", "i == 2", "i == 0", "terms of a mean over dp, which nobody has reduced"),
    ("ddp", "some.backward", "net.zero_grad(); some.backward", "it has 0 0 1 0 0 1 times on dp 0"),
    ("ddp", "return nn.utils", "return 2 * nn.utils", "its square: off by 3.0e+00"),
    ("ddp", "def step", "def update(net): pass\ndef step", "0.norm.bias, 0.up.weight and 11 more: zero"),
    ("ddp", "return net\n", "net.module[1].up.weight.data += dist.get_rank()\n    return net\n",
     "1.up.weight: right on dp 0, wrong on dp 1"),
    ("fsdp_tp", "for block in net[:2]:\n", """for block in net[:2]:
        block.norm.register_forward_hook(lambda m, a, o: o * 4)
""", "what 0.norm returns: x 4 = dp x tp"),
    ("fsdp_tp", "return t.chunk(2)[dist.get_rank() // 2]", "return t.chunk(2)[0]",
     "note: part(t) gives no rank sample 6"),
    ("pipeline", "loss_fn=loss", "loss_fn=loss, scale_grads=False", "x 4 = micro-batches"),
    ("tensor", "module in net.attn, net.up", "module in net.attn,",
     "norm, is right: terms of a sum over tp, which nobody has added up before attn.proj"),
    ("tensor", "        dist.all_reduce(shared, group=pairs[dist.get_rank() // 2])\n", "",
     "the gradient of what attn.qkv returns: off by"),
    ("hard", "mean.backward()\n", "mean.backward(); net.module.turn.grad.imag = 0\n",
     "    gradients: turn: off by 1.0e+00"),
    ("cp", "        dist.all_reduce(grad)\n", "", "the gradient of what qkv returns: off by"),
    ("cp --dtype fp32", "grad.contiguous()", "grad.to(torch.bfloat16).to(grad.dtype)", "gradients: qkv."),
    ("vocabulary", "softmax = z.exp() / sums[0, :, None]", "softmax = z.exp()",
     "the gradient of what 2 returns: off by"),
    ("vocabulary", "(1 + 2 * Z * log[:, None])", "1", "the gradient of what 2 returns: off by"),
    ("zero", "        dist.broadcast(p.data, i % 2)\n", "", "    updates: 0.norm.weight"),
    ("zero", "p.grad / 2 if", "p.grad if", "x 2 = dp")]


def said(folder, name, code, *flags, change=("", "")):
    """What the tool prints, in a folder with an adapter, if it ends with this exit code. It is started in a copy of a
    process that has imported PyTorch."""
    for file in [pathlib.Path(same.__file__), *ADAPTERS.glob("*.py")]:
        shutil.copy(file, folder)
    text = (ADAPTERS / f"{name}.py").read_text()
    assert change[0] in text
    (folder / "mine.py").write_text(text.replace(*change, 1))
    return ran(["mine.py", *flags], 1, folder / "log", [code], program="same.py", folder=str(folder),
               before=partial(os.chdir, folder), launcher="fork")


def in_new_python(words, folder, code):
    """What it prints, as a reader starts it: our modules are not there."""
    settings = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True,
                          env=os.environ | settings)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@parametrize("name, flags", [("ddp", ()), ("fsdp_tp", ()), ("pipeline", ("--dtype", "bf16")),
                             ("tensor", ()), ("hard", ()), ("cp", ("--dtype", "fp32")), ("cp", ("--dtype", "bf16")),
                             ("zero", ()), ("vocabulary", ())])
def test_right_models_of_others_are_the_same(tmp_path, name, flags):
    text = said(tmp_path, name, 0, *flags)
    assert text.endswith("\nSAME\n"), text
    assert not re.search("on no rank|0 of 0", text), text
    if name == "ddp":
        assert in_new_python(["same.py", "mine.py"], tmp_path, 0) == text


def test_where_nobody_has_a_gradient_its_update_decides(tmp_path):
    """And finds it in p.grad, where it was."""
    text = said(tmp_path, "zero", 0, change=("own = []", "own = []\ngrad = lambda p: None"))
    assert text.endswith("\nSAME\n") and "gradients" not in text and "14 of 14 updates" in text, text


@parametrize("name, old, new, words", FAULTS, ids=range(len(FAULTS)))
def test_faults_are_seen_and_named(tmp_path, name, old, new, words):
    name, *flags = name.split()
    text = said(tmp_path, name, 1, *flags, change=(old, new))
    assert words in text and "\nNOT THE SAME" in text, text


@parametrize("old, new, words", [
    ("mesh,", "size,", " of 1: the adapter has no mesh"),
    ("return net\n", "return None\n", " of 2: parallelize(net) returns None: give a module"),
    (" 3\n", " 3\nboth, batch = batch, lambda step: both(step)[0]\n",
     " of 1: batch(step) returns a Tensor: give a tuple"),
    ("return nn.utils", "return x.no, nn.utils", "line 30, in clip: NameError: name 'x' is not defined")])
def test_an_adapter_that_cannot_run_is_refused_in_a_line(tmp_path, old, new, words):
    text = said(tmp_path, "ddp", 2, change=(old, new))
    assert words in text and text.count("\n") == 1, text


def test_what_nobody_can_compare_is_said(tmp_path):
    """Dropout; weights that parallelize has drawn."""
    drops = "net.register_forward_hook(lambda m, a, o: nn.functional.dropout(o)); net = nn"
    text = said(tmp_path, "ddp", 2, change=("net = nn", drops))
    assert "NOT COMPARED: the model draws random numbers" in text
    text = said(tmp_path, "ddp", 2, change=("net = nn", "net[1].up.reset_parameters(); net = nn"))
    assert "NOT COMPARED: parallelize(net) has not taken net's weights" in text


@parametrize("name, counts, code", [("blind", "3 faults: 1 seen, 0 hang, 1 survive, 1 not reached", 1),
                                    ("seeing", "3 faults: 2 seen, 0 hang, 0 survive, 1 not reached", 0)])
def test_mutate_says_what_tests_do_not_see(tmp_path, name, counts, code):
    """Of a line that is called once: there is no call before it, so nothing is stale."""
    shutil.copytree(ADAPTERS / "project", tmp_path / "project")
    words = [mutate.__file__, "--", sys.executable, "-m", "pytest", "-q", "-k", name, "tests"]
    text = in_new_python(words, tmp_path / "project", code)
    assert counts in text, text
    survives = "average.py:7: all_reduce: the tests pass with its result times the ranks" in text
    assert survives == (name == "blind")
