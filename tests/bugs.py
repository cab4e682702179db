"""Bugs that real systems shipped, each as one changed line of the reference. docs/bugs.md tells what their users saw."""

import contextlib
import importlib
import math
import re
import shutil
import sys
import unittest.mock
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests import layouts
from tests.breaks import HERE, REFERENCE
from tests.pool import close


class Bug(NamedTuple):
    name: str
    thread: str   # owner/repository#number
    file: str
    old: str      # a line that stands in the file once
    new: str
    layout: str   # a row of tests/layouts.py, which is red with the new line
    symptom: str  # what the function of this name says then


BUGS = [
    Bug("A pipeline divides the loss that it logs, not the one it goes back from", "pytorch/torchtitan#2972",
        "parallel.py",
        "losses = self.pipeline.run(self.actions(schedule, len(x)), x, y, dloss, syncs)",
        "losses = self.pipeline.run(self.actions(schedule, len(x)), x, y, torch.ones_like(dloss), syncs)",
        "n_layer=5 pp=2 schedule=1f1b micro_batches=2 tied=0",
        ""),
    Bug("Parameters that all ranks keep enter the norm once a rank", "ROCm/TransformerEngine#715", "parallel.py",
        "square += torch.nn.utils.get_total_norm(some).double().square() / n",
        "square += torch.nn.utils.get_total_norm(some).double().square()",
        "tp=2",
        ""),
    Bug("Each replica takes the mean over its own targets", "huggingface/transformers#34242", "parallel.py",
        "dist.all_reduce(count, group=self.groups.replicas)",
        "count *= dist.get_world_size(self.groups.replicas)",
        "holes=1 dp=2 micro_batches=4 zero=0",
        ""),
    Bug("Cutting the layers unties head and embedding", "NVIDIA-NeMo/RL#227", "parallel.py",
        "new.weight = slices.setdefault(layer.weight, new.weight)",
        "slices.setdefault(layer.weight, new.weight)",
        "tp=2",
        ""),
    Bug("Gradients of a sequence's parts are averaged, not added up", "EleutherAI/gpt-neox#1259", "parallel.py",
        "dist.all_reduce(param.grad, group=group)",
        "dist.all_reduce(param.grad, dist.ReduceOp.AVG, group)",
        "sp=1 n_layer=3 tp=2 tokens=8",
        ""),
    Bug("Ranks that share a sequence are counted among the replicas once too often", "deepspeedai/DeepSpeed#5555",
        "parallel.py",
        "replicas = dist.get_world_size(self.groups.replicas)",
        "replicas = dist.get_world_size(self.groups.dp)",
        "cp=2 tokens=8 cp_kind=ulysses",
        ""),
    Bug("Merging two blocks of attention overflows", "jzhang38/EasyContext#14", "further/context.py",
        "total = torch.logaddexp(lse[:, :, rows], lse_s)",
        "total = lse[:, :, rows] + (1 + (lse_s - lse[:, :, rows]).exp()).log()",
        "cp=2 tokens=8 cp_kind=ring",
        ""),
    Bug("Weights in bf16 have no float32 masters", "vllm-project/speculators#765", "parallel.py",
        "bucket.weights[bucket.own].copy_(bucket.shard)",
        "bucket.shard.copy_(bucket.weights[bucket.own].copy_(bucket.shard))",
        "dp=2 micro_batches=2 zero=0 dtype=bfloat16",
        ""),
    Bug("Each replica clips, and then they average", "mindspore-lab/mindcv#603", "parallel.py",
        "return total.to(self.reduce_dtype or total.dtype)",
        "return total * (0.3 / total.norm()).clamp(max=1)",
        "dp=2",
        ""),
    Bug("The hook is given the parameter, and all-reduces that", "huggingface/picotron#39", "parallel.py",
        "handle = dist.all_reduce(message, dist.ReduceOp.AVG, bucket.group, async_op=True)",
        "handle = dist.all_reduce(bucket.params[0].detach(), dist.ReduceOp.AVG, bucket.group, async_op=True)",
        "dp=2",
        ""),
    Bug("Experts' gradients are of several ranks' losses", "deepspeedai/DeepSpeed#5618", "further/experts.py",
        "param.place = replace(param.place, replicas=copies, losses=dist.get_world_size(group))",
        "param.place = replace(param.place, replicas=copies)",
        "experts=4 tokens=8 n_layer=1 dp=2 ep=2",
        ""),
    Bug("A shard's gradient is overwritten by the next micro-batch", "ServiceNow/Fast-LLM#551", "parallel.py",
        "bucket.shard.grad += average",
        "bucket.shard.grad = average",
        "tied=0 recompute=block micro_batches=2 dp=2 zero=2",
        ""),
]


def copy_with(bug, folder):
    """Copy the reference into a folder, with the bug's new line in place of its old one."""
    for name in REFERENCE:
        if (HERE / name).is_dir():
            shutil.copytree(HERE / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(HERE / f"{name}.py", folder)
    lines = (folder / bug.file).read_text().splitlines(keepends=True)
    at, = [i for i, line in enumerate(lines) if line.strip() == bug.old]
    lines[at] = lines[at].replace(bug.old, bug.new)
    (folder / bug.file).write_text("".join(lines))


@contextlib.contextmanager
def reference_in(folder):
    """Inside, tests/layouts.py runs the reference whose copy lies in a folder."""
    def leave():
        names = [name for name in sys.modules if name.split(".")[0] in REFERENCE]
        return {name: sys.modules.pop(name) for name in names}

    kept = leave()
    sys.path.insert(0, str(folder))
    try:
        dist, kernels, model, parallel = map(importlib.import_module, REFERENCE[:4])
        with unittest.mock.patch.multiple(layouts, dist=dist, kernels=kernels, model=model, parallel=parallel):
            yield
        for link in {link for links in dist._links.values() for link in links.values()}:
            link.close()
    finally:
        sys.path.remove(str(folder))
        leave()
        sys.modules.update(kept)


def in_layout_by(folder, *args, **options):
    with reference_in(folder) if folder else contextlib.nullcontext():
        return layouts.in_layout(*args, **options)


def steps_of(pool, case, folder=None):
    """What all ranks get in a layout, by the reference in a folder, or as it is; and what one process gets."""
    (layout, optimizer, micro_batches, change), options = layouts.arguments_of(case)
    sizes = (options[name] for name in ("batch", "tokens", "bias", "clip", "holes"))
    want = layouts.one_process(optimizer, *sizes, **change)
    ranks = math.prod(layout.values())
    return pool(ranks).run(in_layout_by, folder, layout, optimizer, micro_batches, change, **options), want


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
    """How the three steps that all ranks ran differ from one process, in a line."""
    losses, norms, gradients, weights = results[0]
    said = []
    if how := factor(losses[0], want[0][0], tolerance):
        said.append(f"loss {how}")
    elif factor(losses, want[0], tolerance):
        said.append("loss wrong after a step")
    if how := factor(norms[0], want[1][0], tolerance):
        said.append(f"norm {how}")
    found = defaultdict(set)
    for name, gradient in gradients.items():
        found[factor(gradient, want[2][name], tolerance)].add(re.sub(r"h\.\d+\.", "", name))
    for how, names in found.items():
        if how:
            said.append(f"gradients {how}" + (": " + ", ".join(sorted(names)) if len(found) > 1 else ""))
    if not any(factor(weight, want[3][name], tolerance) for name, weight in weights.items()):
        said.append("weights right")
    if any(not close(others[3][name], weight) for others in results for name, weight in weights.items()):
        said.append("ranks differ")
    ones = np.concatenate([weight for name, weight in weights.items() if "ln_" in name and "weight" in name]) == 1
    if ones.mean() > 0.5:
        said.append("most weights of norms still 1")
    return "; ".join(said)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.thread)
def test_a_line_makes_the_bug_that_shipped(bug, plain_pool, tmp_path):
    case = layouts.case_of(bug.layout)
    tolerance = 2**-5 if "dtype" in case else 1e-10
    copy_with(bug, tmp_path)
    right, wrong = (symptom(*steps_of(plain_pool, case, folder), tolerance) for folder in (None, tmp_path))
    print("SYM", bug.thread, "|", wrong, "|", right)
    assert right == "weights right" and wrong == bug.symptom
