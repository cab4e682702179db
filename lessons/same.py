"""Is a parallel model the same as one process? If not: which tensor is the first that differs, and how?

    python lessons/same.py mine.py              exit code 1 where something differs, 2 where mine.py cannot be run
    python lessons/same.py mine.py --all        how each tensor lies on the ranks; a rank's whole traceback
    python lessons/same.py mine.py --dtype bf16 --device cuda

This file needs PyTorch alone, so copy it. mine.py is an adapter, which has

    mesh = {"dp": 2, "tp": 2}             the axes of the ranks, the last one the fastest
    def build(): ...                      the whole model, the same on every rank
    def parallelize(net): ...             the parallel model: a module, or a list of them (stages)
    def batch(step): ...                  the whole batch, a tuple of tensors; the model takes the first
    def part(t): ...                      what this rank has of such a tensor (without it: all)
    def loss(out, *rest): ...             of what the model returns and the batch's other tensors

and, where it must,

    def start(**mesh): ...                your own groups; in the one process all sizes are 1
    def step(net, *batch): ...            a rank's forward and backward on its part; returns the loss, or None
    def grad(p): ...                      where a gradient is, if not in p.grad
    def rename(name): ...                 a parallel module's or parameter's name in the whole model
    def rows(t): ...                      what this rank's layers see of a tensor (B, T), if not part(t)
    def whole(net, what): ...             {name: tensor} of all "weights" or "gradients", where shards hide them
    def clip(net, max_norm): ...          clip; returns the global norm before it
    def update(net): ...                  one step of SGD with rate 0.5; then no gradients
    micro_batches = 1, steps = 2, tolerance = 1e-9, exact = True (False: your code chooses its own dtypes)

One process runs `build()` on the whole batch, then a process for each rank what `parallelize` made of that, in float64
over gloo. Along each axis the ranks must have of each tensor the same, or cuts along a dimension, or terms of a sum.
Weights, losses, gradients, the norm decide; what submodules return, and its gradients, say where the first fault is.
The second step follows one of SGD, and finds what the first left behind. In other dtypes a tensor may be off by FACTOR
times as much as it moves where each weight of the one process moves by one unit in the last place.
"""

import argparse
import contextlib
import faulthandler
import functools
import itertools
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
KINDS = "weights", "updates", "forward", "loss", "backward", "gradients", "norm"
SETTINGS = dict(start=lambda **mesh: None, steps=2, tolerance=1e-9, exact=True)
HOOKS = dict(part=lambda t: t, grad=lambda p: p.grad, rename=lambda name: name, parallelize=lambda net: net, rows=None,
             whole=None, clip=None, update=None, micro_batches=1)


def must(ok, text):
    if not ok:
        raise ValueError(text)


def adapters(given):
    """That of the parallel model, which has these names, and that of the whole model in one process."""
    def step(net, first, *rest):
        loss = given["loss"](net(first), *rest)
        loss.backward()
        return loss

    for name in "mesh", "build", "parallelize", "batch", "loss":
        must(name in given, f"the adapter has no {name}; the head of {os.path.basename(__file__)} says what it is")
    user = SimpleNamespace(**SETTINGS | HOOKS | {"step": step} | given)
    must(isinstance(user.mesh, dict), f'mesh is {user.mesh!r}: give axes and their sizes, as {{"dp": 2}}')
    rename = user.rename
    user.rename = lambda name: rename(".".join(word for word in name.split(".") if word not in WRAPPERS))
    one = SimpleNamespace(**vars(user) | HOOKS | {"step": step, "mesh": dict.fromkeys(user.mesh, 1)})
    one.clip = user.clip and (lambda net, most: torch.nn.utils.clip_grad_norm_(net.parameters(), most))
    return user, one


# ------------------------------------------------------------------------------------------------------------ on a rank

def local(t):
    """A copy of what this rank has of it, in float64 on the CPU."""
    t = t.detach()
    t = t.to_local() if hasattr(t, "to_local") else t
    t = t.wait() if hasattr(t, "wait") else t
    return t.to("cpu", torch.float64, copy=True)


def record(nets, rename):
    """({module: [[the tensor that it returns first, its gradient], a list a call]}, [modules in backward's order]),
    which hooks fill."""
    def note(name, module, given, out):
        if torch._C._current_graph_task_id() == -1:  # else a checkpoint computes it again, in backward
            for t in [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()][:1]:
                calls.setdefault(name, []).append(call := [local(t)])
                if t.requires_grad:
                    t.register_hook(lambda gradient: back.append(name) or call.append(local(gradient)))

    calls, back = {}, []
    named = {rename(name): part for net in nets for name, part in net.named_modules()}  # what is wrapped comes last
    for name, part in named.items():
        if name and not isinstance(part, torch.nn.Identity):  # which stands for a layer of another stage
            part.register_forward_hook(functools.partial(note, name))
    return calls, back


@contextlib.contextmanager
def in_float64():
    """What asks for fewer bits by name gets 64, too."""
    torch.set_default_dtype(torch.float64)
    dtypes = dict.fromkeys(("float32", "float16", "bfloat16", "float", "half"), torch.float64)
    casts = dict.fromkeys(("float", "half", "bfloat16"), torch.Tensor.double)
    with patch.multiple(torch, **dtypes), patch.multiple(torch.Tensor, **casts):
        yield


def prepared(user, device, dtype, move):
    """(the modules of the model, {name: parameter}, {name: all names of its parameter})."""
    torch.manual_seed(0)
    net = user.build()
    must(isinstance(net, torch.nn.Module), f"build() returns {net!r:.40}: give a module")
    net.to(device, dtype)
    names = {}
    for name, p in net.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    torch.manual_seed(move)
    for p in names if move else ():
        p.data *= 1 + torch.finfo(dtype).eps * (torch.rand(p.shape) - 0.5).sign().to(p)
    net = user.parallelize(net)
    nets = [*net] if isinstance(net, (list, tuple)) else [net]
    are = all(isinstance(each, torch.nn.Module) for each in nets)
    must(are, f"parallelize(net) returns {net!r:.40}: give a module, or a list of modules")
    params = {user.rename(name): p for net in nets for name, p in net.named_parameters(remove_duplicate=False)}
    names = {name: some for some in names.values() for name in some}
    unknown = min(params.keys() - names.keys(), default=None)
    must(user.whole or not unknown, f"build() has no {unknown}: give rename(name), for names as {min(names)}")
    return net, nets, params, names


def of_modules(calls, back, m):
    """{"forward": {module: what it returned, if m > 1 a list of m micro-batches}, "backward": gradients of that}."""
    found = {}
    for i, kind, names in (0, "forward", calls), (1, "backward", back):
        last = {name: [call[i] for call in calls[name][-m:] if call[i:]] for name in names
                if m > 1 or len(calls[name]) == 1}  # one that runs twice has no one output
        found[kind] = {name: some if m > 1 else some[0] for name, some in last.items() if some and some[0].dim()}
    return found


def observed(user, samples=(), device="cpu", dtype=torch.float64, move=0):
    """Yields what each step computes, {kind: {name: tensor}}, and more.

    samples: numbers of some, of each of which gradients are computed once more. move: a seed; each weight is then one
    unit in the last place larger or smaller."""
    def has(what):
        found = user.whole(net, what) if user.whole else {
            name: p if what == "weights" else user.grad(p) for name, p in params.items()}
        return {name: local(torch.zeros_like(params[name]) if t is None else t) for name, t in found.items()}

    def gradients_of(some):
        net.zero_grad()
        user.step(net, *(t[some.to(device)] for t in batch))
        return has("gradients")

    user.start(**user.mesh)
    net, nets, params, names = prepared(user, device, dtype, move)
    calls, back = record(nets, user.rename)
    optimizer = torch.optim.SGD([*dict.fromkeys(params.values())], lr=0.5, foreach=False)
    before = {}
    for number in range(user.steps):
        batch = [t.to(device, dtype if t.is_floating_point() else t.dtype) for t in user.batch(number)]
        grid = torch.arange(batch[0].shape[:2].numel(), device=device).view(len(batch[0]), -1)
        rows, weights = (user.rows or user.part)(grid).cpu(), has("weights")
        found = {"names": names, "rows": (rows[:, 0] // grid.shape[1], rows[0] % grid.shape[1]), "norm": {},
                 "weights": {} if before else weights,
                 "updates": {name: weights[name] - t for name, t in before.items()}}
        loss = user.step(net, *map(user.part, batch))
        found |= of_modules(calls, back, user.micro_batches)
        found |= {"loss": {} if loss is None else {"loss": local(torch.as_tensor(loss))}, "gradients": has("gradients"),
                  "targets": sum(int((t >= 0).sum()) for t in batch[1:2] if not t.is_floating_point())}
        grads, before = {p: user.grad(p) for p in params.values()}, weights
        found["partial"] = [name for name, p in params.items()
                            if any(kind.is_partial() for kind in getattr(grads[p], "placements", ()))]
        found["pieces"] = [*map(gradients_of, samples)]
        for p, grad in grads.items():
            p.grad = grad if grad is None else grad.to(p.dtype)
        if user.clip:
            found["norm"] = {"its square": local(torch.as_tensor(user.clip(net, MAX_NORM))).square()}
        yield found
        (user.update or (lambda net: optimizer.step() or [each.zero_grad() for each in nets]))(net)
        calls.clear(), back.clear()


def work(rank, user, folder, args, samples, moves):
    """One process: what it observes, into a file."""
    faulthandler.dump_traceback_later(args.timeout, exit=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    size, dtype = math.prod(user.mesh.values()), DTYPES[args.dtype]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl", rank=rank, world_size=size,
                            init_method=f"file://{folder}/meet{size}")
    with in_float64() if dtype == torch.float64 and user.exact else contextlib.nullcontext():
        found = [[*observed(user, samples, args.device, dtype, move)] for move in moves]
    torch.save(found, f"{folder}/{size}.{rank}")
    dist.barrier()  # nobody leaves whom others need


def run(user, folder, args, samples=(), moves=(0,)):
    """What each rank has observed."""
    size = math.prod(user.mesh.values())
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    try:
        multiprocessing.start_processes(work, (user, folder, args, samples, moves), size, start_method="fork")
    except multiprocessing.ProcessRaisedException as problem:
        at = re.findall(rf'{os.path.basename(args.file)}", line (\d+), in (\w+)', problem.msg)
        where = "".join(f", line {line}, in {function}" for line, function in at[-1:])
        said = f"rank {problem.error_index} of {size}{where}: {problem.msg.strip().splitlines()[-1]}"
        raise ValueError(problem.msg * args.all + said.replace("ValueError: ", "")) from None
    except multiprocessing.ProcessExitedException:
        raise ValueError(f"a rank ended, maybe as --timeout {args.timeout:g} says; see above") from None
    return [torch.load(f"{folder}/{size}.{rank}", weights_only=False) for rank in range(size)]


# -------------------------------------------------------------------------------------- how tensors lie on the ranks

def largest(t):
    return float(t.abs().max()) if t.numel() else 0.0


def close(a, b, limit):
    return a.shape == b.shape and largest(a - b) <= limit


def ratio(a, b):
    """The k for which k x b is nearest to a."""
    return float((a * b).sum() / (b * b).sum().clamp(min=1e-300))


def hows(parts, shape, sums):
    """All ways in which parts {place: tensor} may have a tensor of this shape: ((axis, kind), ...), first the axis that
    cuts first. kind: "same", "sum", or (dimension, blocks): a part has a piece of each block, such as q, k and v."""
    axes = [i for i, values in enumerate(zip(*parts)) if len({*values}) > 1]
    dims = sorted({d for t in parts.values() for d in range(t.dim()) if t.shape[d:d + 1] != shape[d:d + 1]})
    sums = ["sum"] * (sums and len({t.shape for t in parts.values()}) == 1)
    for kinds in itertools.product(["same", *itertools.product(dims, (1, 2, 3)), *sums], repeat=len(axes)):
        cut = [kind[0] for kind in kinds if len(kind) == 2]
        yield from itertools.permutations(zip(axes, kinds)) if len({*cut}) < len(cut) else [(*zip(axes, kinds),)]


def cut(whole, parts, how):
    """{place: what it would have of the whole tensor}; None where these parts cannot be that."""
    found = {}
    for place, part in parts.items():
        t = whole if part.dim() == whole.dim() else whole.flatten()  # of a flat parameter
        for axis, kind in how:
            if len(kind) == 2:
                d, n = kind[0], 1 + max(other[axis] for other in parts)
                t = torch.cat([[*some.chunk(n, d), *[some.narrow(d, 0, 0)] * n][place[axis]]
                               for some in t.chunk(kind[1], d)], d)
        if t.shape != part.shape:
            return None
        found[place] = t
    return found


class Compared:
    """What ranks have of a tensor, {place: part}, beside the whole one of the one process. how: how they make that;
    None: they do not, and `words` say why."""

    def __init__(self, step, kind, name, whole):
        self.step, self.kind, self.name, self.whole, self.parts = step, kind, name, whole, step.parts(kind, name)
        # What should be 0, such as the gradient of a key's bias, is rounding, of the others' size.
        size = max(largest(whole), 1e-3 * max(map(largest, step.wholes[kind].values())))
        self.limit = step.bounds.get((kind, name), step.user.tolerance * size * (1e-3 if kind == "loss" else 1))
        self.near = max(self.limit, 1e-7 * size)
        sums = kind in ("forward", "backward") or any(name in rank["partial"] for rank in step.ranks)
        self.how = next((how for how, pairs in self.fits(whole, sums) if all(
            close(*pair, self.limit) for pair in pairs.values())), None)

    def fits(self, whole, sums):
        """Of all ways in which the parts can make the whole (how, {place: (what a rank has, what it should have)})."""
        for how in hows(self.parts, whole.shape, sums):
            over = [axis for axis, kind in how if kind == "sum"]
            terms = {place: [t for other, t in self.parts.items() if all(
                a == b or axis in over for axis, (a, b) in enumerate(zip(place, other)))] for place in self.parts}
            differ = any(not close(t, some[0], self.limit) for some in terms.values() for t in some)
            its = cut(whole, self.parts, how) if differ or not over else None
            if its:
                yield how, {place: (sum(some), its[place]) for place, some in terms.items()}

    @functools.cached_property
    def nearest(self):
        """(by how much it is off, how, pairs) of the nearest fit without sums."""
        fits = [(max(largest(a - b) for a, b in pairs.values()), how, pairs)
                for how, pairs in self.fits(self.whole, False)]
        return min(fits, key=lambda fit: fit[0], default=(0, (), {}))

    def factor(self, *pairs):
        """k, if all that these ranks have is k times what they should have; else None."""
        if not pairs:
            return None
        mine, its = (torch.cat([t.flatten() for t in some]) for some in zip(*pairs))
        k = ratio(mine, its)
        return k if close(mine, k * its, self.near * max(1, abs(k))) and abs(k) > 1e-6 else None

    def lies(self):
        says = {"same": "same on {}", "sum": "terms of a sum over {}"}
        return ", ".join(says.get(kind, f"{{}} cuts dimension {kind[0]}").format(self.step.axes[axis])
                         for axis, kind in self.how) or "whole"

    def words(self):
        return next((test, text.format(*said)) for test, text in WORDS if (said := test(self)) is not None)


# ---------------------------------------------------------------------------------------------------------------- words
#
# A test returns what its words need, or None where they would not be true. The first true ones are told.

def absent(c):
    return None if c.parts else ()


def not_finite(c):
    places = [place for place, t in c.parts.items() if not t.isfinite().all()]
    return (", ".join(map(c.step.told, places)),) if places else None


def misshapen(c):
    return None if c.nearest[2] else ({*(tuple(t.shape) for t in c.parts.values())}, tuple(c.whole.shape))


def zero(c):
    return None if any(t.any() for t in c.parts.values()) else ()


def scaled(c):
    for how, pairs in [c.nearest[1:], *c.fits(c.whole, c.kind in ("forward", "backward", "gradients", "norm"))]:
        over = [c.step.axes[axis] for axis, kind in how if kind == "sum"]
        k = c.factor(*pairs.values())
        if k and not over:
            says = ": a sum where a mean is meant" if k > 1 else ": a mean where a sum is meant"
            return (c.step.times(k) + says * (c.kind == "gradients" and "=" in c.step.times(k)),)
        for n, says in (1, "sum"), (math.prod(map(c.step.sizes.get, over)), "mean"):
            if k and math.isclose(k, n, rel_tol=c.step.rounds):
                return (f"terms of a {says} over {' and '.join(over)}, which nobody has reduced",)
    return None


def counted(c):
    """How often each part of the batch is in a gradient: the solution of a linear system, beside the right one."""
    found, pieces = [], [piece[c.name] for piece in c.step.one["pieces"]] if c.kind == "gradients" else []
    cuts = [cut(piece, c.parts, c.nearest[1]) for piece in pieces]
    for place, pair in c.nearest[2].items() if cuts else ():
        columns, both = (torch.stack([t.flatten() for t in some], 1) for some in ([each[place] for each in cuts], pair))
        times = torch.linalg.lstsq(columns, both).solution
        if not close(columns @ times, both, 10 * c.near) or largest(1 / times[:, 1]) > 1e6:
            return None
        ks = " ".join(f"{round(k, 4) + 0:.3g}" for k in (times[:, 0] / times[:, 1]).tolist())
        found.append(f"{ks} times on {c.step.told(place)}")
    return (", ".join(found),) if found else None


def rounded(c):
    return off(c) if c.nearest[0] < 1e-5 * largest(c.whole) else None


def taken_for(c):
    for name, other in c.step.wholes[c.kind].items():
        for _, pairs in c.fits(other, False) if other.shape == c.whole.shape and other.any() else ():
            if all(close(*pair, c.near) for pair in pairs.values()):
                return (name,)
    return None


def right_on_some(c):
    """Or on each rank off by a factor of its own; or each rank has another one."""
    texts = []
    for place, (mine, its) in c.nearest[2].items():
        k = 1 if close(mine, its, c.near) else c.factor((mine, its))
        texts.append("right" if k == 1 else "zero" if not mine.any() else c.step.times(k) if k else "wrong")
    if {*texts} == {"wrong"}:
        first, *others = c.parts.values()
        alike = all(close(first, other, c.near) for other in others) or "same" not in dict(c.nearest[1]).values()
        return None if alike else ("another on each rank",)
    return (", ".join(f"{text} on {c.step.told(place)}" for text, place in zip(texts, c.parts)),) if (
        "wrong" not in texts or "right" in texts) else None


def biased(c):
    mine, its = [*c.nearest[2].values()][-1]
    off = (mine - its).reshape(-1, mine.shape[-1])
    for name, bias in c.step.wholes["weights"].items() if c.kind == "forward" else ():
        if bias.shape == off.shape[1:] and close(off, (k := ratio(off[0], bias)) * bias.expand_as(off), c.near):
            return name, k + 1
    return None


def reordered(c):
    mine, its = (torch.cat([t.flatten() for t in some]).sort().values for some in zip(*c.nearest[2].values()))
    return () if close(mine, its, c.near) else None


def off(c):
    return (c.nearest[0] / max(1e-12, largest(c.whole)),)


WORDS = [
    (absent, "no rank has one"),
    (not_finite, "infinite, or not a number, on {}"),
    (misshapen, "of shape {} on the ranks, {} in one process"),
    (zero, "zero on every rank"),
    (rounded, "off by {:.1e}: computed in 32 bits"),
    (scaled, "{}"),
    (counted, "of the batch's parts, rank by rank, it has {}, not 1 each"),
    (taken_for, "what {} is in one process"),
    (right_on_some, "{}"),
    (biased, "{} is added {:.4g} times"),
    (reordered, "the same numbers in another order"),
    (off, "off by {:.1e}")]


# --------------------------------------------------------------------------------------------------------------- a step

class Step:
    """One step of the ranks beside one process's. found: {kind: [Compared]}; wrong: those that differ."""

    def __init__(self, user, one, ranks, bounds=()):
        self.user, self.one, self.ranks, self.bounds, self.axes = user, one, ranks, dict(bounds), [*user.mesh]
        self.places = [*itertools.product(*map(range, user.mesh.values()))]
        self.rounds = 0.02 if bounds else 1e-6
        self.sizes = user.mesh | {"micro-batches": user.micro_batches, "targets": one["targets"]}
        self.wholes, self.factor = {kind: dict(one[kind]) for kind in KINDS}, 1
        for kind in "forward", "backward":
            self.wholes[kind] = {name: self.in_order(t) for name, t in one[kind].items() if self.parts("forward", name)}
        for name, t in [*self.wholes["backward"].items()][:1]:  # ranks may go back from the mean over their own targets
            c = Compared(self, "backward", name, t)
            self.factor = c.factor(*c.nearest[2].values()) or 1
            self.wholes["backward"] = {name: self.factor * t for name, t in self.wholes["backward"].items()}
            self.bounds |= {key: n * self.factor for key, n in self.bounds.items() if key[0] == "backward"}
        self.found = {kind: [Compared(self, kind, name, t) for name, t in some.items() if self.must_have(kind, name)]
                      for kind, some in self.wholes.items()}
        self.wrong = {kind: [c for c in some if c.how is None] for kind, some in self.found.items()}

    def must_have(self, kind, name):
        """Of a tied weight ranks may have one name; and of a loss, none."""
        first = self.one["names"].get(name, [name])[0]
        return self.parts(kind, name) or kind not in ("forward", "loss", "norm") and first == name

    def parts(self, kind, name):
        found = {place: rank[kind][name] for place, rank in zip(self.places, self.ranks) if name in rank[kind]}
        if self.user.micro_batches > 1 and kind in ("forward", "backward") and name in self.one[kind]:
            if len(self.one[kind][name]) % len(self.one["rows"][0]):  # of no batch, as of positions
                return {place: sum(some) if kind == "backward" else some[0] for place, some in found.items()}
            return {place: torch.cat(some) for place, some in found.items()}
        return dict.fromkeys(found, sum(found.values()) / len(found)) if kind == "loss" and found else found

    def in_order(self, whole):
        """Its rows as they lie on one rank after the other."""
        for d, n in enumerate(map(len, self.one["rows"])):
            order = sum(dict.fromkeys(tuple(rank["rows"][d].tolist()) for rank in self.ranks), ())
            if whole.dim() > d + 1 and whole.shape[d] == n == len(order):
                whole = whole.index_select(d, torch.tensor(order))
        return whole

    def times(self, k):
        """A factor, and the sizes that it may be made of."""
        sizes, texts = {name: size for name, size in self.sizes.items() if size > 1}, {}
        for powers in itertools.product((0, 1, -1), repeat=len(sizes)):
            if math.isclose(k, math.prod(map(pow, sizes.values(), powers)), rel_tol=self.rounds):
                names = [["", name, "1/" + name][power] for name, power in zip(sizes, powers) if power]
                texts.setdefault(len(names), []).append(" x ".join(names))
        return f"x {k:.{2 if self.bounds else 6}g}" + (" = " + " or ".join(texts[min(texts)]) if texts else "")

    def told(self, place):
        return " ".join(f"{axis} {i}" for axis, i in zip(self.axes, place) if self.sizes[axis] > 1) or "rank 0"

    @functools.cached_property
    def cause(self):
        """Weights, losses, gradients and norms decide; modules may have rows in an order or a number of their own."""
        weights, updates, forward, loss, backward, gradients, norm = self.wrong.values()
        forward = forward * bool(loss or self.bounds or not self.found["loss"])  # a right loss comes from right numbers
        for some in weights, updates, forward, loss, backward, gradients, norm:
            told = [(c, text) for c in some for test, text in [c.words()]
                    if c.kind not in ("forward", "backward") or test not in (reordered, misshapen)]
            if told and (weights or updates or loss or gradients or norm):
                return told if some in (weights, updates, gradients) else told[:1]
        return []

    def report(self, everything=False):
        """The lines that say so."""
        for kind, found in self.found.items():
            for c in found if everything else ():
                yield f"        {kind:9} {c.name:44} {'DIFFERS' if c.how is None else c.lies()}"
            has_factor = kind == "backward" and abs(self.factor - 1) > self.rounds
            more = f", {self.times(self.factor)} all of them" * has_factor
            if found:
                yield f"  {kind:10} {len(found) - len(self.wrong[kind])} of {len(found)} equal{more}"
            if self.cause and self.cause[0][0] in found:
                yield from self.says(kind, found)

    def says(self, kind, found):
        texts = {}
        for c, text in self.cause:
            texts.setdefault(text, []).append(c.name)
        what = {"forward": "what {} returns", "backward": "the gradient of what {} returns"}.get(kind, "{}")
        for text, names in [*texts.items()][:4]:
            more = f" and {len(names) - 3} more" * (len(names) > 3)
            yield f"    {what.format(', '.join(names[:3]))}{more}: {text}"
        for c in found[:found.index(self.cause[0][0])][-1:] if what != "{}" else ():
            lies = c.lies() if c.how is not None else "in another order"
            yield f"        the one before it, {c.name}, is right: {lies}"


def bounds_of(one, moved, number, dtype):
    """{(kind, name): how far off it may be}, from how far it moves, and at least from the last place of its largest
    value, or of an update's weight."""
    found = {}
    for kind in KINDS if moved else ():
        for name, t in one[number][kind].items():
            size = largest(one[0]["weights"][name] if kind == "updates" else t) * torch.finfo(dtype).eps
            found[kind, name] = FACTOR * max(size, *(largest(other[number][kind][name] - t) for other in moved))
    return found


def main(**flags):
    """Is a parallel model the same as one process? Of a file that says what both are."""
    args = SimpleNamespace(**flags)
    try:
        must(os.path.isfile(args.file), "no such file; give an adapter, with mesh, build, parallelize, batch and loss")
        sys.path[:1] = [os.path.dirname(os.path.abspath(args.file)), os.getcwd()]
        user, alone = adapters(runpy.run_path(args.file))
        with tempfile.TemporaryDirectory() as folder:
            ranks = run(user, folder, args)
            samples = sorted({tuple(rank[0][0]["rows"][0].tolist()) for rank in ranks})
            parts = [part for some in samples for part in torch.tensor(some).chunk(user.micro_batches)]
            moves = range(1 + MOVES * (args.dtype != "fp64"))
            (one, *moved), = run(alone, folder, args, parts * (len(parts) > 1), moves)
    except Exception as problem:  # noqa: BLE001  in the adapter
        print(f"{args.file}: {problem}", file=sys.stderr)
        sys.exit(2)
    mesh = " x ".join(f"{axis} {n}" for axis, n in user.mesh.items())
    print(f"{os.path.basename(args.file)}: {mesh} beside one process, {user.steps} steps in {args.dtype}")
    for number, found in enumerate(one):
        print(f"step {number + 1}")
        step = Step(user, found, [rank[0][number] for rank in ranks], bounds_of(one, moved, number, DTYPES[args.dtype]))
        print(*step.report(args.all), sep="\n")
        if step.cause:
            break
    print("NOT THE SAME" if step.cause else "SAME")
    sys.exit(int(bool(step.cause)))


def add_to(parser):
    """The flags, on a command line."""
    parser.add_argument("file", help="the adapter")
    parser.add_argument("--all", action="store_true", help="how each tensor lies on the ranks; whole tracebacks")
    parser.add_argument("--dtype", choices=DTYPES, default="fp64")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--timeout", type=float, default=180, help="seconds that ranks have")
    return parser


if __name__ == "__main__":
    main(**vars(add_to(argparse.ArgumentParser()).parse_args()))
