"""Is a parallel model the same as one process? If not: which tensor is the first that differs, and how?

    python lessons/same.py mine.py              exit code 0: the same; 1: something differs; 2: not compared, and why
    python lessons/same.py mine.py --dtype fp64 fp32 bf16 --device cuda
    python lessons/same.py mine.py --json       the same for programs; --all: a rank's whole traceback
    same.check("mine.py")                       from a test: what --json prints, as a dict

This file needs PyTorch alone, so copy it. mine.py is an adapter, which has

    mesh = {"dp": 2, "tp": 2}             the axes of the ranks, the last one the fastest
    def build(): ...                      the whole model, the same on every rank
    def parallelize(net): ...             the parallel model, of net's weights: a module, or a list of them (stages)
    def batch(step): ...                  the whole batch, a tuple of tensors; the model takes the first
    def part(t): ...                      what this rank has of such a tensor (without it: all)
    def loss(out, *rest): ...             of what the model returns and the batch's other tensors

and, where it must,

    def start(**mesh): ...                your own groups, once a process; in the one process all sizes are 1
    def step(net, *batch): ...            a rank's forward and backward on its part; returns the loss, or None
    def grad(p): ...                      where a gradient is, if not in p.grad
    def rename(name): ...                 a parallel module's name in the whole model
    def whole(net, what): ...             {name: tensor} of all "weights" or "gradients", where shards hide them
    def clip(net, max_norm): ...          clip; returns the global norm before it, or None
    def optimizer(params): ...            of both sides, in place of SGD with rate 0.5
    def update(net): ...                  a step of that in the parallel model, if it has its own; no gradients then
    micro_batches = 1, steps = 3, tolerance = 1e-9

One process runs `build()` on the whole batch, then a process for each rank what `parallelize` made of that, in float64
over gloo. Which numbers of a weight a rank has is learned: `build()`'s weights are numbered, cut, and read.
Weights, losses, gradients, the norm, buffers, updates decide; what submodules return, and its gradients, say where the
first fault is. What differs in float64 runs in fp32, and if need be in bf16, before it is called wrong. There a tensor
may be off by FACTOR times as much as it moves where each weight of the one process moves by one unit in the last place.
"""

import argparse
import contextlib
import faulthandler
import functools
import itertools
from json import dumps
import logging
import math
import os
import re
import runpy
import sys
import tempfile
import warnings
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.utils._pytree import tree_leaves

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
MOVES, FACTOR = 3, 4  # of the bounds in 32 and 16 bits: how often the weights move, and what a move is multiplied by
MAX_NORM = 0.01       # small, so that clipping clips
WRAPPERS = "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"
KINDS = "weights", "updates", "forward", "loss", "backward", "gradients", "norm", "buffers"
HOOKS = dict(part=lambda t: t, grad=lambda p: p.grad, rename=lambda name: name, parallelize=lambda net: net,
             whole=None, clip=None, update=None, micro_batches=1)
SETTINGS = dict(start=lambda **mesh: None, steps=3, tolerance=1e-9,
                optimizer=lambda params: torch.optim.SGD(params, lr=0.5, foreach=False))


def must(ok, text):
    if not ok:
        raise ValueError(text)


def adapters(given):
    """That of the parallel model, which has these names, and that of the whole model in one process."""
    def step(net, first, *rest):
        loss = given["loss"](net(first), *rest)
        loss.backward()
        return loss

    def clip(net, most):
        params = [p for p in net.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        torch.nn.utils.clip_grads_with_norm_(params, most, norm - one.gap)
        return norm

    for name in "mesh", "build", "parallelize", "batch", "loss":
        must(name in given, f"the adapter has no {name}; the head of {os.path.basename(__file__)} says what it is")
    user = SimpleNamespace(**SETTINGS | HOOKS | {"step": step} | given)
    must(isinstance(user.mesh, dict), f'mesh is {user.mesh!r}: give axes and their sizes, as {{"dp": 2}}')
    user.trusted = not user.update or "whole" in given or "grad" in given  # what decides is where the gradients are
    one = SimpleNamespace(**vars(user) | HOOKS | {"step": step, "mesh": dict.fromkeys(user.mesh, 1), "gap": 0})
    one.clip = user.clip and clip
    return user, one


# ------------------------------------------------------------------------------------------------------------ on a rank

def real(t):
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def local(t):
    """A copy of what this rank has of it, flat, in float64 on the CPU. A complex number is two; what is freed, none."""
    t = t.detach()
    t = t.to_local() if hasattr(t, "to_local") else t
    t = t.wait() if hasattr(t, "wait") else t
    t = real(t.to_dense() if t.is_sparse else t)
    return (t if t.untyped_storage().size() else t.new_zeros(0)).flatten().to("cpu", torch.float64, copy=True)


def unwrapped(name, known):
    """Without the words that wrappers have put there."""
    words = name.split(".")
    while ".".join(words) not in known and {*words} & {*WRAPPERS}:
        words.remove(next(word for word in words if word in WRAPPERS))
    return ".".join(words)


def record(nets, rename):
    """({module: [[the tensor that it returns first, its gradient], a list a call]}, {modules in backward's order}),
    which hooks fill."""
    def note(name, module, given, out):
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint computes it again, in backward
            for t in [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()][:1]:
                calls.setdefault(name, []).append(call := [local(t)])
                if t.requires_grad:
                    t.register_hook(functools.partial(came, name, call))

    def came(name, call, gradient):
        back[name] = call.append(local(gradient))

    calls, back = {}, {}
    named = {rename(name): part for net in nets for name, part in net.named_modules()}  # what is wrapped comes last
    for name, part in named.items():
        if name and not isinstance(part, torch.nn.Identity):  # which stands for a layer of another stage
            part.register_forward_hook(functools.partial(note, name))
    return calls, back


@contextlib.contextmanager
def in_float64():
    """What asks for fewer bits by name gets 64, too."""
    torch.storage._dtype_to_storage_type_map(), torch.storage._storage_type_to_dtype_map()  # torch.save's, as they are
    dtypes = dict.fromkeys(("float32", "float16", "bfloat16", "float", "half"), torch.float64)
    complexes = dict.fromkeys(("complex64", "cfloat"), torch.complex128)
    casts = dict.fromkeys(("float", "half", "bfloat16"), torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    with patch.multiple(torch, **dtypes, **complexes), patch.multiple(torch.Tensor, **casts):
        yield


def numbers(n):
    """n different numbers between 0 and 1, which neither each other's sums nor means are."""
    bits = 24 if n < 2 ** 20 else 52  # float32 has 24
    return (torch.arange(1, n + 1) * 0x9E3779B1 % 2 ** bits).double() / 2 ** bits


def tensors(net):
    """({name: parameter}, {name: buffer that a checkpoint would have})."""
    cached = {f"{at}.{name}".strip(".") for at, part in net.named_modules()
              for name in part._non_persistent_buffers_set}
    return dict(net.named_parameters()), {name: t for name, t in net.named_buffers() if name not in cached}


def prepared(user, device, dtype, move, numbered):
    """(the model, its modules, {(stage, name): parameter}, {(stage, name): buffer}, the whole model's names)."""
    torch.manual_seed(0)
    net = user.build()
    must(isinstance(net, torch.nn.Module), f"build() returns {net!r:.40}: give a module")
    net._apply(lambda t: t.to(device, dtype if t.is_floating_point() else dtype.to_complex() if t.is_complex()
                              else t.dtype))
    params, buffers = tensors(net)
    known = {*params, *dict(net.named_modules())}
    given = [real(t.data) for t in [*params.values(), *buffers.values()]]
    for t, some in zip(given, numbers(sum(t.numel() for t in given)).split([t.numel() for t in given])):
        if numbered and t.is_floating_point():
            t.copy_(some.view(t.shape))
    torch.manual_seed(move)
    for p in params.values() if move else ():
        real(p.data).mul_(1 + torch.finfo(dtype).eps * (torch.rand(real(p).shape) - 0.5).sign().to(real(p)))
    net = user.parallelize(net)
    nets = [*net] if isinstance(net, (list, tuple)) else [net]
    are = all(isinstance(each, torch.nn.Module) for each in nets)
    must(are, f"parallelize(net) returns {net!r:.40}: give a module, or a list of modules")
    held = {}, {}
    for i, each in enumerate(nets):
        for found, some in zip(held, tensors(each)):
            found |= {(i, user.rename(unwrapped(name, known))): t for name, t in some.items()}
    return net, nets, *held, known


def observed(user, device="cpu", dtype=torch.float64, move=0, numbered=False, pieces=None):
    """Yields what each step computes, {kind: {name: numbers}}, and more.

    move: a seed; each weight is then one unit in the last place larger or smaller. numbered: yields but the numbers
    that a rank has. pieces: (a step, numbers of some samples, ...); yields but the gradients of each of these there."""
    def has(what):
        if user.whole:
            return {(0, name): local(t) for name, t in user.whole(net, what).items()}
        return {key: local(p) for key, p in params.items()} if what == "weights" else {
            key: None if (t := grad_of(p)) is None else local(t) for key, p in params.items()}

    def grad_of(p):
        t = user.grad(p)
        partial = any(kind.is_partial() for kind in getattr(t, "placements", ()))
        return t.redistribute(placements=p.placements) if partial else t

    def gradients_of(some):
        net.zero_grad()
        user.step(net, *(t[some.to(device)] for t in batch))
        return has("gradients")

    net, nets, params, buffers, known = prepared(user, device, dtype, move, numbered)
    if numbered:
        yield has("weights") | {key: local(t) for key, t in buffers.items()}
        return
    calls, back = record(nets, lambda name: user.rename(unwrapped(name, known)))
    optimizer = None if user.update else user.optimizer([*dict.fromkeys(params.values())])
    before = {}
    for number in range(user.steps):
        torch.manual_seed(number)  # whatever the ranks have drawn before
        batch = user.batch(number)
        must(isinstance(batch, (tuple, list)), f"batch(step) returns {batch!r:.40}: give a tuple of tensors")
        batch = [t.to(device, dtype if t.is_floating_point() else t.dtype) for t in batch]
        if pieces and pieces[0] == number:
            yield [*map(gradients_of, pieces[1:])]
            return
        n, drawn = len(batch[0]), torch.get_rng_state()
        samples = torch.arange(n, device=device)[:, None].repeat(1, batch[0].numel() // n)
        loss = user.step(net, *map(user.part, batch))
        weights = has("weights")
        found = {
            "samples": user.part(samples)[:, 0].tolist(), "draws": not drawn.equal(torch.get_rng_state()),
            "params": [*weights], "norm": {}, "held": weights | {key: local(t) for key, t in buffers.items()},
            "gradients": has("gradients"), "updates": {
                key: (weights[key] - t).where(weights[key] != t, torch.zeros(1)) for key, t in before.items()},
            "forward": {name: torch.cat([call[0] for call in some]) for name, some in calls.items()},
            "backward": {name: torch.cat([call[1] for call in calls[name] if call[1:]]) for name in back},
            "loss": {} if loss is None else {"loss": local(torch.as_tensor(loss))},
            "targets": sum(int((t >= 0).sum()) for t in batch[1:2] if not t.is_floating_point())}
        for p in params.values():
            p.grad = None if (t := grad_of(p)) is None else t.to(p.dtype)
        norm = user.clip and user.clip(net, MAX_NORM)
        if norm is not None:
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)
            found["norm"] = {"its square": local(norm).square()}
        yield found
        before = weights
        (user.update or (lambda net: optimizer.step() or [each.zero_grad() for each in nets]))(net)
        calls.clear(), back.clear()


def work(rank, size, folder, job):
    """One process: what it observes, into a file."""
    faulthandler.dump_traceback_later(job.timeout, exit=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    sys.path[:1] = [os.path.dirname(os.path.abspath(job.file)), os.getcwd()]
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if job.device == "cpu" else "cpu:gloo,cuda:nccl", rank=rank, world_size=size,
                            init_method=f"file://{folder}/meet")
    dtype = DTYPES[job.dtype]
    with in_float64() if job.dtype == "fp64" else contextlib.nullcontext():
        user, one = adapters(runpy.run_path(job.file))
        mine = user if job.ranks else one
        one.gap = job.gap
        mine.start(**mine.mesh)
        found = [[*observed(mine, job.device, dtype, move, job.numbered, job.pieces)] for move in job.moves]
        dist.barrier()  # nobody leaves whom others need
    settings = {name: getattr(user, name) for name in ("mesh", "steps", "tolerance", "micro_batches", "trusted")}
    torch.save([settings | {"clips": bool(user.clip), "whole": bool(user.whole)}, found], f"{folder}/{rank}")


def run(job, ranks=0, **more):
    """(the adapter's settings, what each rank has observed; of ranks=0 one process)."""
    job = SimpleNamespace(**dict(moves=[0], numbered=False, pieces=None, gap=0, ranks=ranks) | vars(job) | more)
    size = ranks or 1
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        try:
            multiprocessing.start_processes(work, (size, folder, job), size, start_method=job.method)
        except multiprocessing.ProcessRaisedException as problem:
            at = re.findall(rf'{os.path.basename(job.file)}", line (\d+), in (\w+)', problem.msg)
            where = "".join(f", line {line}, in {function}" for line, function in at[-1:])
            said = f"rank {problem.error_index} of {size}{where}: {problem.msg.strip().splitlines()[-1]}"
            raise ValueError(problem.msg * job.all + said.replace("ValueError: ", "")) from None
        except multiprocessing.ProcessExitedException:
            raise ValueError(f"a rank ended, maybe as --timeout {job.timeout:g} says; see above") from None
        found = [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(size)]
    return SimpleNamespace(**found[0][0]), [some for _, some in found]


# ----------------------------------------------------------------------------------------- the ranks beside one process

def largest(t):
    t = t[t.isfinite()]
    return float(t.abs().max()) if len(t) else 0.0


def close(a, b, limit):
    return len(a) == len(b) and bool(((a - b).abs() <= limit).logical_or(a == b).all())


def nearest(t, whole, limit=0):
    """(where the nearest number to each of t stands in whole, whether there is none besides)."""
    ordered, order = whole.sort()
    right = torch.searchsorted(ordered, t).clamp(max=len(whole) - 1)
    left = (right - 1).clamp(min=0)
    at = torch.where((t - ordered[left]).abs() < (t - ordered[right]).abs(), left, right)
    gaps = ordered.diff(prepend=torch.tensor([-math.inf]), append=torch.tensor([math.inf]))
    return order[at], torch.minimum(gaps[at], gaps[at + 1]) > limit


def located(has, one, read):
    """({name of the whole: (where it lies in what a rank has, one tensor after the other; which of its numbers that
    is)}, names of tensors whose numbers are new, which are taken for the whole's of that name)."""
    sizes = {key: len(t) for key, t in one["held"].items()}
    start = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0)))
    given, which, new = numbers(sum(sizes.values())), [], set()
    for key, t in has["held"].items():
        mine = read[key] if len(read.get(key, ())) == len(t) else torch.zeros(len(t))
        at, _ = nearest(mine, given)
        at[given[at] != mine] = -1
        whole = 0, key[1]
        if key in has["params"] and sizes.get(whole) == len(t) and (at < 0).all():
            at = start[whole] + torch.arange(len(t))
            new.add(key[1])
        which.append(at)
    which = torch.cat(which)
    places = {key: ((which >= i) & (which < i + sizes[key])).nonzero()[:, 0] for key, i in start.items()}
    return {key[1]: (at, which[at] - start[key]) for key, at in places.items()}, new


def vector(rank, source):
    """(all numbers that a rank has, one tensor after the other; which of them it has)."""
    pairs = [(t, rank[source].get(key)) for key, t in rank["held"].items()]
    has = [mine is not None and len(mine) == len(t) for t, mine in pairs]
    return (torch.cat([mine if ok else t for ok, (t, mine) in zip(has, pairs)]),
            torch.cat([torch.full((len(t),), ok) for ok, (t, _) in zip(has, pairs)]))


class Compared:
    """What ranks have of a tensor, {place: (numbers, what they should be; None: some of the whole's)}. over: the axes
    over which these are terms of a sum; None: they are wrong, and `words` say why."""

    def __init__(self, step, kind, name, whole, pairs, sums=False):
        self.step, self.kind, self.name, self.whole, self.pairs = step, kind, name, whole, pairs
        self.source = {"weights": "held", "buffers": "held"}.get(kind, kind)
        # What should be 0, such as the gradient of a key's bias, is rounding, of the others' size.
        size = max(largest(whole), 1e-3 * max(map(largest, step.wholes.get(kind, {0: whole}).values())))
        self.limit = step.bounds.get((self.source, name), step.user.tolerance * size * (1e-3 if kind == "loss" else 1))
        self.near = max(self.limit, 1e-7 * size)
        fits = (over for over in step.overs[:None if sums else 1] if {*map(self.is_right, self.summed(over))} == {True})
        self.over = next(fits, None)

    def summed(self, over):
        """The pairs, of sums over these axes; none if all terms are alike."""
        found, differ = [], not over
        for place, (mine, its) in self.pairs.items():
            terms = [t for other, (t, _) in self.pairs.items()
                     if all(a == b or i in over for i, (a, b) in enumerate(zip(place, other)))]
            if any(len(t) != len(mine) for t in terms):
                return []
            differ = differ or not all(close(t, mine, self.limit) for t in terms)
            found.append((sum(terms), its))
        return found if differ else []

    def beside(self, mine, its):
        """What these should be."""
        return self.whole[nearest(mine, self.whole)[0]].where(mine != 0, 0) if its is None else its

    def is_right(self, pair):
        return close(pair[0], self.beside(*pair), self.limit)

    def factor(self, mine, its):
        """k, if all that a rank has is k times what it should have; else None."""
        if its is None:
            return next((k for k, _ in self.step.names if self.is_right((mine / k, None))), None)
        k = float((mine * its).sum() / (its * its).sum().clamp(min=1e-300))
        return 1 if self.is_right((mine, its)) else 0 if not mine.any() else k if (
            close(mine, k * its, self.near * max(1, abs(k))) and abs(k) > 1e-6) else None

    def off(self):
        return max((largest(mine - self.beside(mine, its)) for mine, its in self.pairs.values()), default=0)

    def words(self):
        """What is wrong."""
        step, (most, size) = self.step, (self.off(), max(1e-12, largest(self.whole)))
        texts = {place: step.times(self.factor(*pair)) for place, pair in self.pairs.items()}
        bad = [step.told(place) for place, (t, _) in self.pairs.items()
               if t.isfinite().all() < self.whole.isfinite().all()]
        if bad or not texts:
            return f"infinite, or not a number, on {', '.join(bad)}" if bad else "no rank has one"
        if most < 1e-5 * size and not step.bounds:
            return f"off by {most / size:.1e}: computed in 32 bits"
        text, *others = dict.fromkeys(texts.values())
        if not others and text != "wrong" and ("=" in text or len(self.whole) > 1):
            mean = ": a sum where a mean is meant" if "= 1/" not in text else ": a mean where a sum is meant"
            mean *= self.kind == "gradients" and "=" in text
            return "zero on every rank" if text == "zero" else text + mean
        for over in step.overs[1:]:
            ks = {step.times(self.factor(*pair)) for pair in self.summed(over)}
            for k, says in (1, "sum"), (step.size(over), "mean"):
                if ks == {step.times(k)}:
                    return f"terms of a {says} over {step.told_of(over)}, which nobody has reduced"
        apart = ", ".join(f"{text} on {step.told(place)}" for place, text in texts.items())
        clear = others and ("wrong" not in texts.values() or "right" in texts.values())
        return self.counted() or (apart if clear else f"off by {most / size:.1e}")

    def counted(self):
        """How often each part of the batch is in a gradient: the solution of a linear system, beside the right one."""
        given = self.step.pieces if self.kind == "gradients" else []
        found, pieces = [], [piece[0, self.name] for piece in given if piece[0, self.name] is not None]
        for place, pair in self.pairs.items() if pieces else ():
            index = self.step.layout[place][self.name][1]
            columns, both = torch.stack([t[index] for t in pieces if t.any()], 1), torch.stack(pair, 1)
            times = torch.linalg.lstsq(columns, both).solution
            if not close((columns @ times).flatten(), both.flatten(), 10 * self.near) or largest(1 / times[:, 1]) > 1e6:
                return None
            ks = " ".join(f"{round(k, 4) + 0:.3g}" for k in (times[:, 0] / times[:, 1]).tolist())
            found.append(f"{ks} times on {self.step.told(place)}")
        return f"of the batch's parts, rank by rank, it has {', '.join(found)}, not 1 each" if found else None


class Step:
    """One step of the ranks beside one process's. found: {kind: [Compared]}; notes: what could not be compared."""

    def __init__(self, user, one, ranks, layouts, before, bounds=(), eps=0):
        self.user, self.one, self.before, self.bounds = user, one, before, dict(bounds)
        self.rounds, self.notes, self.index, self.pieces = max(1e-6, 2.5 * eps), [], {}, []
        self.ranks = dict(zip(itertools.product(*map(range, user.mesh.values())), ranks))
        self.layout = dict(zip(self.ranks, layouts))
        missing = {*one["samples"]}.difference(*(rank["samples"] for rank in ranks))
        self.notes += [f"part(t) gives no rank sample {min(missing, default=0)}"] * bool(missing)
        large = [i for i, n in enumerate(user.mesh.values()) if n > 1]
        self.overs = [over for n in range(len(large) + 1) for over in itertools.combinations(large, n)]
        self.names = [(1, ())]
        for name, n in (user.mesh | {"micro-batches": user.micro_batches, "targets": one["targets"]}).items():
            self.names += [(k * m, (*some, text)) for k, some in self.names if n > 1
                           for m, text in ((n, name), (1 / n, "1/" + name))]
        params = [*one["params"]]
        self.wholes = {
            "weights": {key[1]: one["held"][key] for key in params if not one["updates"]},
            "buffers": {key[1]: t for key, t in one["held"].items() if key not in params},
            "updates": {key[1]: t for key, t in one["updates"].items()},
            "gradients": {key[1]: torch.zeros(len(one["held"][key])) if t is None else t
                          for key, t in one["gradients"].items()}}
        self.wholes |= {kind: one[kind] for kind in ("loss", "norm", *["forward", "backward"] * (not self.bounds))}
        self.found = {kind: [*getattr(self, kind, functools.partial(self.places, kind))()]
                      for kind in KINDS if kind in self.wholes}
        self.wrong = {kind: [c for c in found if c.over is None] for kind, found in self.found.items()}

    def places(self, kind):
        """Of tensors whose numbers' places are known."""
        source = "held" if kind in ("weights", "buffers") else kind
        found = {place: vector(rank, source) for place, rank in self.ranks.items()}
        most = max((largest(t) for t in self.before["gradients"].values() if t is not None), default=0)
        for name, whole in self.wholes[kind].items():
            lies, pairs = {place: self.layout[place][name] for place in found}, {}
            g = self.before["gradients"].get((0, name)) if kind == "updates" else None
            for place, (at, index) in lies.items():
                mine, has = (t[at] for t in found[place])
                if g is not None:  # an optimizer may step by the rounding of a gradient that is none
                    has &= (g == 0)[index] | (g.abs() > 1e-5 * most)[index]
                if has.any():
                    pairs[place] = mine[has], whole[index[has]]
            n = len(torch.cat([index for _, index in lies.values()]).unique())
            if kind == "weights" and n < len(whole):
                self.notes.append(f"{name}: {len(whole) - n} of {len(whole)} numbers are on no rank")
            if pairs or n and kind == "gradients" and whole.any() and self.user.trusted:
                yield Compared(self, kind, name, whole, pairs)

    def forward(self):
        for name, whole in self.one["forward"].items():
            pairs = {place: (rank["forward"][name], None) for place, rank in self.ranks.items()
                     if name in rank["forward"]}
            c = Compared(self, "forward", name, whole, pairs, True)
            for place, (t, _) in zip(pairs, c.summed(c.over or ())):
                at, alone = nearest(t, whole, 2 * c.limit)
                keep = alone & ((t - whole[at]).abs() <= c.limit) & (at.bincount(minlength=len(whole))[at] == 1)
                self.index[place, name] = len(t), keep.nonzero()[:, 0], at[keep]
            if pairs:
                yield c

    def backward(self):
        """Where a gradient lies, forward has told. Ranks may go back from the mean over their own targets: each has a
        factor, that of the first gradient."""
        factors = {}
        for name, whole in self.one["backward"].items():
            pairs, some = {}, [place for place, rank in self.ranks.items() if name in rank["forward"]]
            for place in some:
                (n, mine, its), t = self.index[place, name], self.ranks[place]["backward"].get(name, ())
                if len(its) and len(t) == n and len(whole) == len(self.one["forward"][name]):
                    pairs[place] = t[mine], whole[its]
            c = Compared(self, "backward", name, whole, pairs)
            factors = factors or {place: c.factor(*pair) or 1 for place, pair in pairs.items()}
            pairs = {place: (t, its * factors.get(place, min(factors.values()))) for place, (t, its) in pairs.items()}
            if pairs or some and not any(name in self.ranks[place]["backward"] for place in some):
                yield Compared(self, "backward", name, whole * min(factors.values(), default=1), pairs, True)

    def loss(self):
        """One that all ranks have, or terms of a sum or mean. Else it is a rank's own, unless a factor has a name."""
        values = [rank["loss"]["loss"] for rank in self.ranks.values() if rank["loss"] and self.one["loss"]]
        mean = sum(values) / max(1, len(values))
        own = any(not close(t, mean, 1e-9 * largest(mean)) for t in values)
        for over in self.overs[:None if own else 1] if values else ():
            c = self.scalar("loss", [mean * self.size(over)])
            if c.over is not None:
                self.notes += [f"the ranks' losses add up over {self.told_of(over)}"] * bool(over)
                return [c]
        c = values and self.scalar("loss", [mean])
        if own and "=" not in c.words():
            self.notes.append("the ranks' losses are their own, which make up no mean and no sum")
            return []
        return [c] if values else []

    def norm(self):
        values = [rank["norm"]["its square"] for rank in self.ranks.values() if rank["norm"]]
        return [self.scalar("norm", values)] if values and self.one["norm"] else []

    def scalar(self, kind, values):
        (name, whole), = self.one[kind].items()
        return Compared(self, kind, name, whole, dict(zip(self.ranks, [(t, whole) for t in values])))

    def times(self, k):
        """A factor, and the fewest sizes that it may be made of."""
        some = [names for n, names in self.names if k is not None and math.isclose(n, k, rel_tol=self.rounds)]
        texts = [" x ".join(names) for names in some if len(names) == min(map(len, some))]
        return {None: "wrong", 0: "zero", 1: "right"}.get(k) or (
            f"x {k:.{2 if self.bounds else 6}g}" + f" = {' or '.join(texts)}" * bool(texts and texts[0]))

    def told(self, place):
        return " ".join(f"{axis} {i}" for i, (axis, n) in zip(place, self.user.mesh.items()) if n > 1) or "rank 0"

    def size(self, over):
        return math.prod([*self.user.mesh.values()][i] for i in over)

    def told_of(self, over):
        return " and ".join([*self.user.mesh][i] for i in over)

    def decides(self):
        return [kind for kind in ("weights", "updates", "loss", "norm", "buffers", *["gradients"] * self.user.trusted)
                if self.wrong[kind]]

    def cause(self):
        """The kind of the first that is wrong, of a step in which something is: right numbers come from right ones."""
        skip = ["forward"] * bool(self.found["loss"] and not self.wrong["loss"])
        skip += ["backward"] * (not self.wrong["gradients"])
        return next(kind for kind, wrong in self.wrong.items() if wrong and kind not in skip)

    def says(self, kind):
        """Lines of what is wrong in this kind."""
        found, wrong, texts = self.found[kind], self.wrong[kind], {}
        what = {"forward": "what {} returns", "backward": "the gradient of what {} returns"}.get(kind)
        for c in wrong[:1] if what else wrong:
            texts.setdefault(c.words(), []).append(c.name)
        for text, names in [*texts.items()][:4]:
            more = f" and {len(names) - 3} more" * (len(names) > 3)
            yield f"{(what or '{}').format(', '.join(names[:3]))}{more}: {text}"
        modules = kind == "loss" and self.found.get("forward") and not self.wrong["forward"]
        if modules or kind == "backward" and wrong[0] is found[0]:
            yield "what modules return is right, maybe in another order than the targets: look at the loss"
        for c in found[:found.index(wrong[0])][-1:] if what else ():
            terms = f": terms of a sum over {self.told_of(c.over)}, which nobody has added up before {wrong[0].name}"
            yield f"the one before it, {c.name}, is right{terms * bool(c.over)}"


# ------------------------------------------------------------------------------------------------------------- verdicts

def bounds_of(one, moved, eps):
    """{(kind, name): how far off it may be}, from how far it moves, and at least from the last place of its largest
    value, or of an update's weight."""
    for kind in ("held", "updates", "gradients", "loss", "norm") if moved else ():
        for key, t in one[kind].items():
            size = largest(one["held"][key] if kind == "updates" else t) if t is not None else 0
            moves = [largest(other[kind][key] - t) for other in moved if t is not None]
            yield (kind, key[1] if kind in ("held", "updates", "gradients") else key), FACTOR * max(
                size * eps, *moves, 0)


def judged(steps, new=()):
    """(whether they are the same, None where nobody can say; the step and the kind of the first that is wrong; why)."""
    bad = next((i for i, step in enumerate(steps) if step.decides()), None)
    if bad is None:
        return True, None, ""
    before = bad and not steps[0].user.trusted and steps[bad - 1].wrong["gradients"]  # a wrong update follows from them
    i, kind = (bad - 1, "gradients") if before else (bad, steps[bad].cause())
    wrong = steps[i].wrong[kind]
    alike = all(len({tuple(t.tolist()) for t, _ in c.pairs.values()}) == 1 for c in wrong)
    if kind == "weights" and alike and {c.name for c in wrong} <= {*new}:
        return None, (i, kind), "parallelize(net) has not taken net's weights"
    if kind != "weights" and any(run["draws"] for step in steps[:i + 1] for run in (step.one, *step.ranks.values())):
        return None, (i, kind), "the model draws random numbers, as dropout does: switch that off"
    return False, (i, kind), ""


def parts(ranks, micro_batches):
    """What each rank has of the batch, in micro-batches."""
    return [part for some in sorted({tuple(rank["samples"]) for rank in ranks})
            for part in torch.tensor(some).chunk(micro_batches)]


def compared(job, read):
    """([Step], what `judged` says of them) of one dtype. read: numbered weights, as ranks read them, once."""
    moves, eps = range(1 + MOVES * (job.dtype != "fp64")), torch.finfo(DTYPES[job.dtype]).eps
    user, (ones,) = run(job, moves=moves)
    size = math.prod(user.mesh.values())
    ranks = [found[0] for found in run(job, size)[1]]
    with contextlib.suppress(ValueError):  # then names must do
        if not read and not user.whole:
            read += [found[0][0] for found in run(job, size, dtype="fp64", numbered=True)[1]]
    both = itertools.zip_longest(ranks, read, fillvalue={})
    places, new = zip(*(located(rank[0], ones[0][0], some) for rank, some in both))
    for gap in (0, 1e-6)[:1 + user.clips]:  # PyTorch divides by a norm that is 1e-6 larger
        one, *moved = ones if not gap else run(job, moves=moves, gap=gap)[1][0]
        steps = [Step(user, one[i], [rank[i] for rank in ranks], places, one[max(0, i - 1)],
                      bounds_of(one[i], [other[i] for other in moved], eps), eps) for i in range(user.steps)]
        same, first, why = judged(steps, set().union(*new))
        if not first or first[1] != "updates":
            break
    some = parts([rank[first[0]] for rank in ranks], user.micro_batches) if first and first[1] == "gradients" else []
    if len(some) > 1 and job.dtype == "fp64":
        steps[first[0]].pieces = run(job, pieces=(first[0], *some))[1][0][0][0]
    return steps, (same, first, why)


def check(file, dtypes=("fp64",), device="cpu", timeout=180, method="forkserver", everything=False):
    """{"same": True, False, or None where nobody can say, "why": text, "mesh": {axis: size}, "runs": {dtype: {...}}} of
    an adapter's file. Raises ValueError if it cannot run."""
    must(os.path.isfile(file), "no such file; give an adapter, with mesh, build, parallelize, batch and loss")
    multiprocessing.set_forkserver_preload(["torch._dynamo"])
    runs, steps, read, given = {}, {}, [], [*dtypes]
    for dtype in given:
        try:
            job = SimpleNamespace(file=file, device=device, timeout=timeout, method=method, all=everything, dtype=dtype)
            steps[dtype], (same, first, why) = compared(job, read)
        except ValueError:
            must(dtype not in dtypes, str(sys.exc_info()[1]))
            break  # this model has no such dtype, and what was seen before remains
        told = steps[dtype][:first[0] + 1 if first else None]
        runs[dtype] = {"same": same, "why": why, "notes": [*dict.fromkeys(sum((step.notes for step in told), []))],
                       "steps": [{kind: [len(some) - len(step.wrong[kind]), len(some)]
                                  for kind, some in step.found.items() if some} for step in told]}
        if first:
            runs[dtype] |= {"step": first[0] + 1, "kind": first[1], "says": [*told[-1].says(first[1])]}
        if same is False:
            given += [other for other in [{"fp64": "fp32", "fp32": "bf16"}.get(dtype)] if other and other not in given]
    same, why = decided(runs, steps)
    return {"file": file, "mesh": [*steps.values()][0][0].user.mesh, "same": same, "why": why, "runs": runs}


def decided(runs, steps):
    """(whether they are the same in all dtypes, why)."""
    right, wrong = ([dtype for dtype in runs if runs[dtype]["same"] is same] for same in (True, False))
    if len(right + wrong) < len(runs) or not wrong:
        return None if len(right + wrong) < len(runs) else True, max(run["why"] for run in runs.values())
    first = steps[wrong[0]]
    bad = [(c, i) for i, step in enumerate(first) for kind in step.decides() for c in step.wrong[kind]]
    fewer = [dtype for dtype in right if [*DTYPES].index(dtype) > [*DTYPES].index(wrong[0])]
    seen = any(c.off() > 4 * steps[dtype][i].bounds.get((c.source, c.name), math.inf)  # as it would be, were it there
               for dtype in fewer for c, i in bad)
    if fewer and (seen or all(c.off() < 1e-5 * largest(c.whole) for c, _ in bad)):
        return True, (f"in {' and '.join(right)}. In {' and '.join(wrong)} a cast to as many bits is no copy, so what "
                      "is written in place there is the tensor itself; or something is computed in 32 bits")
    return False, f"although the same in {' and '.join(right)}" * bool(right)


def lines(found):
    mesh = " x ".join(f"{axis} {n}" for axis, n in found["mesh"].items())
    (dtype, first), *others = found["runs"].items()
    yield f"{os.path.basename(found['file'])}: {mesh} beside one process, in {dtype}"
    for i, step in enumerate(first["steps"], 1):
        yield f"step {i}"
        for kind, (equal, of) in step.items():
            yield f"  {kind:10} {equal} of {of} equal"
            if (i, kind) == (first.get("step"), first.get("kind")):
                yield from (f"    {text}" for text in first["says"])
    yield from (f"  note: {note}" for note in first["notes"])
    for dtype, one in others:
        told = f"step {one['step']}, {one['kind']}: {one['says'][0]}" if "step" in one else "the same"
        yield f"in {dtype}: {told}"
    verdict = {True: "SAME", False: "NOT THE SAME", None: "NOT COMPARED"}[found["same"]]
    yield verdict + f": {found['why']}" * bool(found["why"])


def main(file, dtype, device, timeout, all, json):
    """Is a parallel model the same as one process? Of a file that says what both are."""
    import torch._dynamo  # noqa: F401  once, or each process would, for its optimizer
    torch.set_num_threads(1)
    try:
        # A copy of this process has imported PyTorch, and nothing of the adapter's.
        found = check(file, dtype, device, timeout, "fork" if sys.platform == "linux" else "spawn", all)
    except Exception as problem:  # noqa: BLE001  in the adapter
        print(f"{file}: {problem}", file=sys.stderr)
        sys.exit(2)
    print(dumps(found, indent=1) if json else "\n".join(lines(found)))
    sys.exit({True: 0, False: 1, None: 2}[found["same"]])


def add_to(parser):
    """The flags, on a command line."""
    parser.add_argument("file", help="the adapter")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["fp64"], help="one after the other")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--timeout", type=float, default=180, help="seconds that ranks have")
    parser.add_argument("--all", action="store_true", help="whole tracebacks")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


if __name__ == "__main__":
    main(**vars(add_to(argparse.ArgumentParser()).parse_args()))
