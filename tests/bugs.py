"""Bugs that real systems shipped, each as one changed line of the reference. docs/bugs.md says what users saw."""

import importlib
import math
import re
import sys
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests import layouts
from tests.breaks import HERE, REFERENCE
from tests.pool import close
from tests.puzzles import ranks
from tests.walls import copy_reference


class Bug(NamedTuple):
    name: str
    thread: str   # where its users tell of it: owner/repository#number
    where: str    # a file and a function in it
    old: str      # a line that stands in the file once
    new: str
    layout: str   # a row of tests/layouts.py, which is red with the new line
    symptom: str  # what the function of this name says then


BUGS = [
    Bug("A pipeline divides the loss that it logs, not the one it goes back from", "pytorch/torchtitan#2972",
        "parallel.py Pipeline.backward",
        "dy = self.dloss",
        "dy = torch.ones_like(self.dloss)",
        "n_layer=5 pp=2 schedule=1f1b micro_batches=2 tied=0",
        "norm x 80; gradients x 80"),
    Bug("Parameters that every rank keeps enter the norm once a rank", "ROCm/TransformerEngine#715",
        "parallel.py clip_grad_norm_",
        "square += torch.nn.utils.get_total_norm(some).double().square() / n",
        "square += torch.nn.utils.get_total_norm(some).double().square()",
        "tp=2",
        "loss wrong after a step; norm x 1.26"),
    Bug("Each stage divides again what the next one has divided", "deepspeedai/DeepSpeed#8152",
        "parallel.py Pipeline.backward",
        'self.hand_on(Action("SB", s, i), dx)',
        'self.hand_on(Action("SB", s, i), dx / len(self.x))',
        "holes=1 pp=2 micro_batches=4",
        "loss wrong after a step; norm x 0.707; gradients wrong in 1 of 28, as wte.weight; "
        "gradients x 0.25 in 13 of 28, as wpe.weight"),
    Bug("Cutting the layers unties head and embedding", "NVIDIA-NeMo/RL#227", "parallel.py tensor_parallel",
        "new.weight = slices.setdefault(layer.weight, new.weight)",
        "slices.setdefault(layer.weight, new.weight)",
        "tp=2",
        "loss wrong after a step; norm x 1.01; gradients wrong in 1 of 28, as wte.weight"),
    Bug("Parts of a gradient are averaged, not added up", "EleutherAI/gpt-neox#1259",
        "parallel.py ParallelGPT.add_up_gradients",
        "dist.all_reduce(param.grad, group=group)",
        "dist.all_reduce(param.grad, dist.ReduceOp.AVG, group)",
        "sp=1 n_layer=3 tp=2 tokens=8",
        "loss wrong after a step; norm x 0.717; gradients x 0.5 in 21 of 40, as wpe.weight"),
    Bug("Each replica takes the mean over its own targets", "huggingface/transformers#34242",
        "parallel.py ParallelGPT.weight_of_a_target",
        "dist.all_reduce(count, group=self.groups.replicas)",
        "count *= dist.get_world_size(self.groups.replicas)",
        "holes=1 dp=2 micro_batches=4 zero=0",
        "loss x 0.999; norm x 1.04; gradients wrong"),
    Bug("Ranks that share a sequence are divided by, too", "deepspeedai/DeepSpeed#5555",
        "parallel.py ParallelGPT.weight_of_a_target",
        "replicas = dist.get_world_size(self.groups.replicas)",
        "replicas = dist.get_world_size(self.groups.dp)",
        "cp=2 tokens=8 cp_kind=ulysses",
        "loss x 0.5; norm x 0.5; gradients x 0.5"),
    Bug("Merging two blocks of attention overflows", "jzhang38/EasyContext#14",
        "further/context.py RingAttention.forward",
        "total = torch.logaddexp(lse[:, :, rows], lse_s)",
        "total = lse[:, :, rows] + (1 + (lse_s - lse[:, :, rows]).exp()).log()",
        "cp=2 tokens=8 cp_kind=ring",
        "loss NaN; norm NaN; gradients NaN; ranks differ"),
    Bug("Each replica clips, and then they average", "mindspore-lab/mindcv#603", "parallel.py Bucket.message",
        "return total.to(self.reduce_dtype or total.dtype)",
        "return total * (0.3 / total.norm()).clamp(max=1)",
        "dp=2",
        "loss wrong after a step; norm x 0.149; gradients wrong"),
    Bug("Experts' gradients are of several ranks' losses", "deepspeedai/DeepSpeed#5618",
        "further/experts.py expert_parallel",
        "param.place = replace(param.place, same_expert=same_experts, losses=dist.get_world_size(group))",
        "param.place = replace(param.place, same_expert=same_experts)",
        "experts=4 tokens=8 n_layer=1 dp=2 ep=2",
        "loss wrong after a step; norm x 1.19; gradients x 2 in 4 of 17, as h.0.mlp.experts.c_fc.weight"),
    Bug("A micro-batch's gradient overwrites the ones before", "ServiceNow/Fast-LLM#551",
        "parallel.py add_to_shard",
        "bucket.shard.grad += average",
        "bucket.shard.grad = average",
        "tied=0 recompute=block micro_batches=2 dp=2 zero=2",
        "loss wrong after a step; norm x 0.715; gradients wrong"),
    Bug("Weights in bf16 have no float32 masters", "vllm-project/speculators#765",
        "parallel.py ShardedOptimizer.cast",
        "bucket.weights[bucket.own].copy_(bucket.shard)",
        "bucket.shard.copy_(bucket.weights[bucket.own].copy_(bucket.shard))",
        "dp=2 micro_batches=2 zero=0 dtype=bfloat16",
        "weights right; most weights of norms still 1"),
]


def copy_with(bug, folder):
    """Copy the reference into a folder, with the bug's new line in place of its old one."""
    file = folder / bug.where.split()[0]
    copy_reference(REFERENCE, folder)
    lines = file.read_text().splitlines(keepends=True)
    at, = [i for i, line in enumerate(lines) if line.strip() == bug.old]
    lines[at] = lines[at].replace(bug.old, bug.new)
    file.write_text("".join(lines))


def in_layout_by(folder, *args, **options):
    """tests/layouts.py runs the reference whose copy lies in a folder; so from now on in this process."""
    sys.path.insert(0, str(folder))
    for name in [*sys.modules]:
        if name.split(".")[0] in REFERENCE:
            del sys.modules[name]
    layouts.dist, layouts.kernels, layouts.model, layouts.parallel = map(importlib.import_module, REFERENCE[:4])
    return layouts.in_layout(*args, **options)


def factor(ours, theirs, tolerance):
    """"" where a tensor is right; "x 2" where it is twice as large, element by element; else "wrong"."""
    ours, theirs = (torch.as_tensor(values).double() for values in (ours, theirs))
    times = float((ours * theirs).sum() / theirs.square().sum())
    if close(ours, theirs, tolerance):
        return ""
    if math.isnan(times):
        return "NaN"
    return f"x {times:.3g}" if close(ours, times * theirs, tolerance) else "wrong"


def symptom(results, want, tolerance):
    """How the steps that all ranks ran differ from one process, in a line."""
    losses, norms, gradients, weights = results[0]
    loss, norm = factor(losses[0], want[0][0], tolerance), factor(norms[0], want[1][0], tolerance)
    if not loss and factor(losses, want[0], tolerance):
        loss = "wrong after a step"
    said = [f"loss {loss}"] * bool(loss) + [f"norm {norm}"] * bool(norm)
    found = defaultdict(list)
    for name, gradient in gradients.items():
        found[factor(gradient, want[2][name], tolerance)].append(name)
    for how, names in found.items():
        if how:
            few = f" in {len(names)} of {len(gradients)}, as {names[0]}" if len(found) > 1 else ""
            said.append(f"gradients {how}{few}")
    if not any(factor(weight, want[3][name], tolerance) for name, weight in weights.items()):
        said.append("weights right")
    if any(not close(others[3][name], weight) for others in results for name, weight in weights.items()):
        said.append("ranks differ")
    ones = np.concatenate([weight for name, weight in weights.items() if "ln_" in name and "weight" in name]) == 1
    if ones.mean() > 0.5:
        said.append("most weights of norms still 1")
    return "; ".join(said)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.thread)
def test_a_line_makes_the_bug_that_shipped(bug, ranks, tmp_path):
    """Without it test_layout_equals_one_process is green, which has the same row."""
    copy_with(bug, tmp_path)
    (layout, optimizer, micro_batches, change), options = layouts.arguments_of(layouts.case_of(bug.layout))
    results = ranks(math.prod(layout.values())).run(in_layout_by, tmp_path, layout, optimizer, micro_batches, change,
                                                    **options)
    want = layouts.one_process(optimizer, *(options[name] for name in layouts.SIZED), **change)
    assert symptom(results, want, 2**-5 if "dtype" in options else 1e-10) == bug.symptom


def test_docs_tell_of_each_bug():
    """docs/bugs.md has the same rows and lines, and each line stands in the function that it names."""
    text = (HERE / "docs" / "bugs.md").read_text()
    link = r"\[(.+?/.+?#\d+)\]\(https://github\.com/.+?\)"
    assert re.findall(rf"(?m)^\| \d+ \| (.+) \| {link} \| `(.+)` \| (.+) \|$", text) == [
        (bug.name, bug.thread, bug.layout, bug.symptom) for bug in BUGS]
    told = re.findall(r"(?m)^\*\*\d+\.\*\* `(.+)`, `(.+)`\. (?s:.+?)\n```diff\n-(.+)\n\+(.+)\n```$", text)
    assert told == [(*bug.where.split(), bug.old, bug.new) for bug in BUGS]
    rows = [row for _, _, row, _ in layouts.proofs()]
    rows += [row for many, _ in layouts.NEAR for row in layouts.expanded(many)]
    assert {bug.layout for bug in BUGS} <= set(rows)
    for file, name, line, _ in told:
        before = (HERE / file).read_text().partition(line + "\n")[0]
        inside = [re.findall(pattern, before)[-1] for pattern in (r"(?m)^(?:class|def) (\w+)", r"(?m)^ *def (\w+)")]
        assert inside == [name.split(".")[0], name.split(".")[-1]]
