"""Is a parallel model the same as one process? If not: which tensor is the first that differs, and how?

    python lessons/same.py mine.py              exit code 0: the same; 1: something differs; 2: not compared, and why
    python lessons/same.py mine.py --dtype bf16 --device cuda

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
    def grad(p): ...                      where a gradient is, if not in p.grad; None if nowhere: its update decides
    def rename(name): ...                 a parallel module's name in the whole model
    def whole(net, what): ...             {name: tensor} of all "weights" or "gradients", where shards hide them
    def clip(net, max_norm): ...          clip; returns the global norm before it, or None
    def optimizer(params): ...            of both sides, in place of SGD with rate 0.5
    def update(net): ...                  a step of that in the parallel model, if it has its own; no gradients then
    micro_batches = 1                     of a rank's part, for the words that say what is wrong

One process runs `build()` on the whole batch, then a process for each rank what `parallelize` made of that, in float64
over gloo. Which numbers of a weight a rank has is learned: `build()`'s weights are numbered, cut, and read.
Weights, losses, gradients, the norm, buffers, updates decide; what submodules return, and its gradients, say where the
first fault is. In fp32 and bf16 a tensor may be off by FACTOR times as much as it moves where each weight of the one
process moves by one unit in the last place. Where the model casts to 32 bits and then writes in place, float64 has no
copy: what differs there is wrong if it differs in bf16, too.
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
STEPS = 3             # the second one finds what the first has left behind, the third one its update
TOLERANCE = 1e-9      # in float64, of a tensor's largest number
MOVES, FACTOR = 3, 4  # of the bounds in 32 and 16 bits: how often the weights move, and what a move is multiplied by
MAX_NORM = 0.01       # small, so that clipping clips
SECONDS = 180         # that ranks have
WRAPPERS = "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"
KINDS = "weights", "updates", "forward", "loss", "backward", "gradients", "norm", "buffers"
OPTIONS = dict(part=lambda t: t, grad=lambda p: p.grad, rename=lambda name: name, start=lambda **mesh: None,
               whole=None, clip=None, update=None, micro_batches=1,
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
        torch.nn.utils.clip_grads_with_norm_(params, most, norm - one.gap)  # which divides by a norm 1e-6 larger
        return norm

    for name in "mesh", "build", "parallelize", "batch", "loss":
        must(name in given, f"the adapter has no {name}; the head of {os.path.basename(__file__)} says what it is")
    user = SimpleNamespace(**OPTIONS | {"step": step} | given)
    user.described = bool(user.whole)
    both = {name: getattr(user, name) for name in ("start", "build", "batch", "loss", "optimizer")}
    one = SimpleNamespace(**OPTIONS | both | {"step": step, "clip": user.clip and clip}, gap=0,
                          mesh=dict.fromkeys(user.mesh, 1), parallelize=lambda net: net)
    return user, one


# ------------------------------------------------------------------------------------------------------------ on a rank

def real(t):
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def local(t):
    """A copy of what this rank has of it, flat, in float64 on the CPU. A complex number is two; None is no number."""
    t = torch.empty(0) if t is None else t.detach()
    t = t.to_local() if hasattr(t, "to_local") else t
    t = t.wait() if hasattr(t, "wait") else t
    t = real(t.to_dense() if t.is_sparse else t)
    t = t if t.untyped_storage().size() else t.new_zeros(0)  # a weight that is freed
    return t.flatten().to("cpu", torch.float64, copy=True)


def unwrapped(name):
    """Without the words that wrappers have put there. A part of the model's own of such a name loses it, in the one
    process, too."""
    return ".".join(word for word in name.split(".") if word not in WRAPPERS)


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
    """(the model, its modules, {name: parameter}, {name: buffer})."""
    torch.manual_seed(0)
    net = user.build()
    net._apply(lambda t: t.to(device, dtype if t.is_floating_point() else dtype.to_complex() if t.is_complex()
                              else t.dtype))
    params, buffers = tensors(net)
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
            for name, t in some.items():
                name = user.rename(unwrapped(name))
                found[(i, name) if name in found else name] = t  # stages may have the same names
    return net, nets, *held


def observed(user, device="cpu", dtype=torch.float64, move=0, numbered=False, pieces=()):
    """Yields what each step computes, {kind: {name: numbers}}, and more.

    move: a seed; each weight is then one unit in the last place larger or smaller. numbered: yields but the numbers
    that a rank has. pieces: (a step, numbers of some samples, ...); yields but the gradients of each of these there."""
    def has(what):
        if user.whole:
            return {name: local(t) for name, t in user.whole(net, what).items()}
        return {name: local(p if what == "weights" else grad_of(p)) for name, p in params.items()}

    def grad_of(p):
        t = user.grad(p)
        partial = any(kind.is_partial() for kind in getattr(t, "placements", ()))
        return t.redistribute(placements=p.placements) if partial else t

    def gradients_of(some):
        net.zero_grad()
        user.step(net, *(t[some.to(device)] for t in batch))
        return has("gradients")

    def held():
        return has("weights") | {name: local(t) for name, t in buffers.items()}

    net, nets, params, buffers = prepared(user, device, dtype, move, numbered)
    if numbered:
        yield held()
        return
    calls, back = record(nets, lambda name: user.rename(unwrapped(name)))
    optimizer = None if user.update else user.optimizer([*dict.fromkeys(params.values())])
    for number in range(STEPS):
        torch.manual_seed(number)  # whatever the ranks have drawn before
        batch = user.batch(number)
        must(isinstance(batch, (tuple, list)), f"batch(step) returns a {type(batch).__name__}: give a tuple of tensors")
        batch = [t.to(device, dtype if t.is_floating_point() else t.dtype) for t in batch]
        if number in pieces[:1]:
            yield [*map(gradients_of, pieces[1:])]
            return
        n, drawn = len(batch[0]), torch.get_rng_state()
        samples = torch.arange(n, device=device)[:, None].repeat(1, batch[0].numel() // n)
        loss = user.step(net, *map(user.part, batch))
        found = {
            "samples": user.part(samples)[:, 0].tolist(), "draws": not drawn.equal(torch.get_rng_state()),
            "held": held(), "gradients": has("gradients"), "norm": {},
            "forward": {name: torch.cat([call[0] for call in some]) for name, some in calls.items()},
            "backward": {name: torch.cat([call[1] for call in calls[name] if call[1:]]) for name in back},
            "loss": {} if loss is None else {"loss": local(torch.as_tensor(loss))},
            "targets": sum(int((t >= 0).sum()) for t in batch[1:2] if not t.is_floating_point())}
        for p in params.values() if not user.update else ():
            p.grad = None if (t := grad_of(p)) is None else t.to(p.dtype)
        norm = user.clip and user.clip(net, MAX_NORM)
        if norm is not None:
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)
            found["norm"] = {"its square": local(norm).square()}
        yield found
        (user.update or (lambda net: optimizer.step() or [each.zero_grad() for each in nets]))(net)
        calls.clear(), back.clear()


def work(rank, size, folder, job):
    """One process: what it observes, into a file."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    sys.path[:1] = [os.path.dirname(os.path.abspath(job.file)), os.getcwd()]
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if job.device == "cpu" else "cpu:gloo,cuda:nccl", rank=rank, world_size=size,
                            init_method=f"file://{folder}/meet")
    with in_float64() if job.dtype == "fp64" else contextlib.nullcontext():
        user, one = adapters(runpy.run_path(job.file))
        mine, found = user if job.ranks else one, []
        mine.start(**mine.mesh)
        moves = 1 if job.ranks or job.dtype == "fp64" else 1 + MOVES
        for move in range(moves + bool(user.clip and mine is one)):  # the last one clips without 1e-6
            one.gap = 1e-6 * (move == moves)
            found.append([*observed(mine, job.device, DTYPES[job.dtype], move % moves, job.numbered, job.pieces)])
        dist.barrier()  # nobody leaves whom others need
    names = "mesh", "micro_batches", "described"
    torch.save([{name: getattr(user, name) for name in names}, found], f"{folder}/{rank}")


def run(job, ranks=0, **more):
    """(the adapter's settings, what each rank has observed, a list a move). ranks=0: of one process."""
    job = SimpleNamespace(**dict(numbered=False, pieces=(), ranks=ranks) | vars(job) | more)
    size = ranks or 1
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        try:
            method = "fork" if sys.platform == "linux" else "spawn"  # a copy of this process has imported PyTorch
            multiprocessing.start_processes(work, (size, folder, job), size, start_method=method)
        except multiprocessing.ProcessRaisedException as problem:
            at = re.findall(rf'{os.path.basename(job.file)}", line (\d+), in (\w+)', problem.msg)
            where = "".join(f", line {line}, in {function}" for line, function in at[-1:])
            said = problem.msg.strip().splitlines()[-1].replace("ValueError: ", "")
            raise ValueError(f"rank {problem.error_index} of {size}{where}: {said}") from None
        found = [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(size)]
    return SimpleNamespace(**found[0][0]), [some for _, some in found]


# ----------------------------------------------------------------------------------------- the ranks beside one process

def largest(t):
    t = t[t.isfinite()]
    return float(t.abs().max()) if len(t) else 0.0


def off(a, b):
    """How far apart numbers are. What is infinite in both is not."""
    return (a - b).abs().where(a != b, 0)


def close(a, b, limit):
    return len(a) == len(b) and bool((off(a, b) <= limit).all())


def scale(mine, its):
    """k, so that k times the second is nearest to the first."""
    return float((mine * its).sum() / (its * its).sum().clamp(min=1e-300))


def nearest(t, whole, limit=0):
    """(where the nearest number to each of t stands in whole, whether there is none besides)."""
    ordered, order = whole.sort()
    right = torch.searchsorted(ordered, t).clamp(max=len(whole) - 1)
    left = (right - 1).clamp(min=0)
    at = torch.where((t - ordered[left]).abs() < (t - ordered[right]).abs(), left, right)
    gaps = ordered.diff(prepend=torch.tensor([-math.inf]), append=torch.tensor([math.inf]))
    return order[at], torch.minimum(gaps[at], gaps[at + 1]) > limit


def located(rank, one, read):
    """({name of the whole: (where it lies in what a rank has, one tensor after the other; which of its numbers that
    is)}, names of tensors whose numbers are new, which are taken for the whole's of that name)."""
    sizes = {name: len(t) for name, t in one["held"].items()}
    start = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0)))
    given, which, new = numbers(sum(sizes.values())), [], set()
    for name, t in rank["held"].items():
        mine = read[name] if len(read.get(name, ())) == len(t) else torch.zeros(len(t))
        at, _ = nearest(mine, given)
        at[given[at] != mine] = -1
        if name in rank["gradients"] and sizes.get(name) == len(t) and (at < 0).all():
            at = start[name] + torch.arange(len(t))
            new.add(name)
        which.append(at)
    which = torch.cat(which)
    places = {name: ((which >= i) & (which < i + sizes[name])).nonzero()[:, 0] for name, i in start.items()}
    return {name: (at, which[at] - start[name]) for name, at in places.items()}, new


def by_kind(run):
    """What is observed in each step, {kind: {name: numbers}}."""
    for before, now in zip([None, *run], run):
        held, params = now["held"], now["gradients"]
        yield now | {"weights": {} if before else {name: held[name] for name in params},
                     "updates": {name: (held[name] - before["held"][name]).nan_to_num(0) for name in params if before},
                     "buffers": {name: t for name, t in held.items() if name not in params}}


def joined(some, held):
    """(all that a rank has of a kind, one tensor that is held after the other; which of these numbers it has)."""
    pairs = [(some.get(name, ()), t) for name, t in held.items()]
    has = [len(mine) == len(t) for mine, t in pairs]
    return (torch.cat([mine if ok else t for ok, (mine, t) in zip(has, pairs)]),
            torch.cat([torch.full((len(t),), ok) for ok, (_, t) in zip(has, pairs)]))


def factors_of(sizes):
    """{k: words} of the products and quotients of up to three sizes, in the fewest words."""
    single = [some for name, n in sizes.items() if n > 1 for some in ((n, name), (1 / n, "1/" + name))]
    words = {1: "right", 0: "zero"}
    for many in 1, 2, 3:
        found = {}
        for some in itertools.combinations(single, many):
            found.setdefault(math.prod(n for n, _ in some), []).append(" x ".join(name for _, name in some))
        words = {k: f"x {k:.6g} = {' or '.join(names)}" for k, names in found.items()} | words
    return words


class Compared:
    """What ranks have of a tensor, {place: (numbers, what they should be; None: some of the whole's)}. over: the axes
    over which these are terms of a sum; None: they are wrong, and `words` say why."""

    def __init__(self, step, kind, name, whole, pairs, overs=((),)):
        self.step, self.kind, self.name, self.whole, self.pairs = step, kind, name, whole, pairs
        self.limit = step.limit(kind, name)
        self.over = next((over for over in overs if {*self.factors(over)} == {1}), None)

    def summed(self, over):
        """The pairs, of sums over these axes; none if all terms are alike."""
        found, differ = [], not over
        for place, (mine, its) in self.pairs.items():
            terms = [t for other, (t, _) in self.pairs.items() if {axis for axis, _ in {*place} - {*other}} <= {*over}]
            if any(len(t) != len(mine) for t in terms):
                return []
            differ = differ or not all(close(t, mine, self.limit) for t in terms)
            found.append((sum(terms), its))
        return found if differ else []

    def factors(self, over=()):
        """k of each pair, whose numbers are k times what they should be; None if no such k has a name."""
        return [self.factor(*pair) for pair in self.summed(over)]

    def factor(self, mine, its):
        near = None if its is None else scale(mine, its)
        rounds = max(1e-6, 3 * self.step.eps)
        ks = [k for k in self.step.words if (k if its is None else math.isclose(k, near, rel_tol=rounds))]
        return next((k for k in [1, *ks] if close(mine, k * self.beside(mine, its, k), self.limit * max(1, k))), None)

    def beside(self, mine, its, k=1):
        """What these should be, if they are k times that."""
        return self.whole[nearest(mine / k, self.whole)[0]].where(mine != 0, 0) if its is None else its

    def off(self):
        return float(torch.cat([off(mine, self.beside(mine, its)) for mine, its in self.pairs.values()]).max())

    def words(self):
        """What is wrong."""
        step, ks = self.step, self.factors()
        if {*ks} <= {*step.words} and len({*ks}) == 1:
            return step.words[ks[0]]
        for over in step.overs[1:]:
            for k, what in (1, "sum"), (step.size(over), "mean"):
                if {*self.factors(over)} == {k}:
                    return f"terms of a {what} over {' and '.join(over)}, which nobody has reduced"
        counted = self.counted()
        if not counted and ks and (1 in ks or None not in ks):
            counted = ", ".join(f"{step.words.get(k, 'wrong')} on {step.told(at)}" for at, k in zip(self.pairs, ks))
        return counted or (f"off by {self.off() / max(1e-12, largest(self.whole)):.1e}" if ks else "no rank has one")

    def counted(self):
        """How often each part of the batch is in a gradient: the solution of a linear system, beside the right one."""
        given = self.step.pieces if self.kind == "gradients" else []
        found, pieces = [], [piece[self.name] for piece in given if piece[self.name].any()]
        for place, pair in self.pairs.items() if pieces else ():
            index = self.step.layout[place][self.name][1]
            columns, both = torch.stack([t[index] for t in pieces], 1), torch.stack(pair, 1)
            times = torch.linalg.lstsq(columns, both).solution
            once = times[:, 1]
            if not close((columns @ times).flatten(), both.flatten(), 100 * self.limit) or once.abs().min() < 1e-6:
                return None
            ks = " ".join(f"{round(k, 4) + 0:.3g}" for k in (times[:, 0] / once).tolist())
            found.append(f"{ks} times on {self.step.told(place)}")
        return found and f"of the batch's parts, rank by rank, it has {', '.join(found)}, not 1 each"


class Step:
    """One step of the ranks beside one process's. found: {kind: [Compared]}; notes: what could not be compared."""

    def __init__(self, user, one, ranks, layouts, before, moved, eps):
        self.user, self.one, self.before, self.moved, self.eps = user, one, before, moved, eps
        self.notes, self.index, self.pieces = [], {}, []
        places = itertools.product(*([(axis, i) for i in range(n)] for axis, n in user.mesh.items()))
        self.ranks = dict(zip(places, ranks))
        self.layout = dict(zip(self.ranks, layouts))
        self.words = factors_of(user.mesh | {"micro-batches": user.micro_batches, "targets": one["targets"]})
        large = [axis for axis, n in user.mesh.items() if n > 1]
        self.overs = [over for n in range(len(large) + 1) for over in itertools.combinations(large, n)]
        missing = {*one["samples"]}.difference(*(rank["samples"] for rank in ranks))
        self.notes += [f"part(t) gives no rank sample {min(missing, default=0)}"] * bool(missing)
        kinds = [kind for kind in KINDS if not eps or kind not in ("forward", "backward")]
        self.found = {kind: [*getattr(self, kind, functools.partial(self.placed, kind))()] for kind in kinds}
        self.wrong = {kind: [c for c in found if c.over is None] for kind, found in self.found.items()}

    def size(self, over):
        return math.prod(map(self.user.mesh.get, over))

    def told(self, place):
        return " ".join(f"{axis} {i}" for axis, i in place if self.user.mesh[axis] > 1) or "rank 0"

    def limit(self, kind, name):
        """How far off a tensor may be."""
        t = self.one[kind][name]
        # What should be 0, such as the gradient of a key's bias, is rounding, of the others' size.
        size = max(largest(t), 1e-3 * max(map(largest, self.one[kind].values())))
        limit = size * TOLERANCE * (1e-3 if kind == "loss" else 1)
        if self.eps:
            limit = FACTOR * self.eps * (largest(self.one["held"][name]) if kind == "updates" else size)
        return max([limit, *(FACTOR * largest(other[kind][name] - t) for other in self.moved)])

    def placed(self, kind):
        """Of tensors whose numbers' places are known."""
        found = {place: joined(rank[kind], rank["held"]) for place, rank in self.ranks.items()}
        most = max(map(largest, self.before["gradients"].values()), default=0)
        for name, whole in self.one[kind].items():
            pairs, count = {}, torch.zeros(len(self.one["held"][name]))
            whole = whole if len(whole) else count.clone()  # no gradient is one of 0
            g = self.before["gradients"].get(name, ()) if kind == "updates" else ()
            for place in self.ranks:
                at, index = self.layout[place][name]
                count[index] += 1
                mine, has = (t[at] for t in found[place])
                if len(g):  # an optimizer may step by the rounding of a gradient that is none
                    has &= ((g == 0) | (g.abs() > 1e-5 * most))[index]
                if has.any():
                    pairs[place] = mine[has], whole[index[has]]
            if kind == "weights" and not count.all():
                self.notes.append(f"{name}: {int((count == 0).sum())} of {len(whole)} numbers are on no rank")
            if pairs:
                yield Compared(self, kind, name, whole, pairs)

    def forward(self):
        for name, whole in self.one["forward"].items():
            pairs = {place: (rank["forward"][name], None) for place, rank in self.ranks.items()
                     if name in rank["forward"]}
            c = Compared(self, "forward", name, whole, pairs, self.overs)
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
            for place, (t, its) in pairs.items() if not factors else ():
                k = scale(t, its)
                factors[place] = k if k > 0 and close(t, k * its, 1e-6 * largest(t)) else 1
            least = min(factors.values(), default=1)
            pairs = {place: (t, its * factors.get(place, least)) for place, (t, its) in pairs.items()}
            if pairs or some and not any(name in self.ranks[place]["backward"] for place in some):
                yield Compared(self, "backward", name, whole * least, pairs, self.overs)

    def loss(self):
        """One that all ranks have, or terms of a sum or mean. Else it is a rank's own, unless a factor has a name."""
        for c in self.scalar("loss"):
            values = [t for t, _ in c.pairs.values()]
            mean = sum(values) / len(values)
            own = any(not close(t, mean, 1e-9 * largest(mean)) for t in values)
            k = c.factor(mean, c.whole)
            over = next((over for over in self.overs[1:] if own and k and math.isclose(k * self.size(over), 1)), None)
            if over:
                self.notes.append(f"the ranks' losses add up over {' and '.join(over)}")
            elif own and not k:
                self.notes.append("the ranks' losses are their own, which make up no mean and no sum")
            else:
                yield Compared(self, "loss", "loss", c.whole, dict.fromkeys(c.pairs, (mean, c.whole)))

    def norm(self):
        return self.scalar("norm")

    def scalar(self, kind):
        for name, whole in self.one[kind].items():
            pairs = {place: (rank[kind][name], whole) for place, rank in self.ranks.items() if rank[kind]}
            if pairs:
                yield Compared(self, kind, name, whole, pairs)

    def decides(self):
        """Kinds that are wrong, and say so."""
        return [kind for kind, wrong in self.wrong.items() if wrong and kind not in ("forward", "backward")]

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
            terms = f": terms of a sum over {' and '.join(c.over)}, which nobody has added up before {wrong[0].name}"
            yield f"the one before it, {c.name}, is right{terms * bool(c.over)}"


# ------------------------------------------------------------------------------------------------------------- verdicts

def judged(user, ones, ranks, read=(), eps=0):
    """([Step], whether they are the same, None where nobody can say; the step and the kind of the first that is wrong;
    why). ones: what one process observes, as it is and then each time its weights move."""
    one, *moved = ([*by_kind(run)] for run in ones)
    both = itertools.zip_longest(ranks, read, fillvalue={})
    layouts, new = zip(*(located(run[0], one[0], some) for run, some in both))
    steps = [Step(user, one[i], some, layouts, one[max(0, i - 1)], [run[i] for run in moved], eps)
             for i, some in enumerate(zip(*map(by_kind, ranks)))]
    bad = next((i for i, step in enumerate(steps) if step.decides()), None)
    if bad is None:
        return steps, True, None, ""
    kind = steps[bad].cause()
    wrong, first = steps[bad].wrong[kind], (bad, kind)
    alike = all(len({tuple(t.tolist()) for t, _ in c.pairs.values()}) == 1 for c in wrong)
    if kind == "weights" and alike and {c.name for c in wrong} <= set().union(*new):
        return steps, None, first, "parallelize(net) has not taken net's weights"
    if kind != "weights" and any(run["draws"] for step in steps[:bad + 1] for run in (step.one, *step.ranks.values())):
        return steps, None, first, "the model draws random numbers, as dropout does: switch that off"
    return steps, False, first, ""


def parts(ranks, micro_batches):
    """What each rank has of the batch, in micro-batches."""
    return [part for some in sorted({tuple(rank["samples"]) for rank in ranks})
            for part in torch.tensor(some).chunk(micro_batches)]


def report(steps, first):
    """Lines, up to what is wrong first."""
    for i, step in enumerate(steps[:first[0] + 1 if first else None], 1):
        counts = [f"{len(found) - len(step.wrong[kind])} of {len(found)} {kind}"
                  for kind, found in step.found.items() if found]
        yield f"step {i}: {', '.join(counts)} equal"
        yield from (f"    note: {note}" for note in step.notes)
    if first:
        yield from (f"    {first[1]}: {text}" for text in step.says(first[1]))


def compared(file, dtype, device):
    """(whether an adapter's two models are the same, None where nobody can say; lines about it). Raises ValueError if
    the adapter cannot run."""
    must(os.path.isfile(file), "no such file; give an adapter, with mesh, build, parallelize, batch and loss")
    job, eps, read = SimpleNamespace(file=file, device=device, dtype=dtype), 0, []
    if dtype != "fp64":
        eps = torch.finfo(DTYPES[dtype]).eps
    user, (ones,) = run(job)
    size = math.prod(user.mesh.values())
    ranks = [found for found, in run(job, size)[1]]
    with contextlib.suppress(ValueError):  # then names must do
        if not user.described:
            read = [found for ((found,),) in run(job, size, dtype="fp64", numbered=True)[1]]
    steps, same, first, why = judged(user, ones, ranks, read, eps)
    if first and first[1] == "gradients" and not eps:
        some = parts([rank[first[0]] for rank in ranks], user.micro_batches)
        steps[first[0]].pieces = len(some) > 1 and run(job, pieces=(first[0], *some))[1][0][0][0] or []
    mesh = " x ".join(f"{axis} {n}" for axis, n in user.mesh.items())
    verdict = {True: "SAME", False: "NOT THE SAME", None: f"NOT COMPARED: {why}"}[same]
    return same, [f"{os.path.basename(file)}: {mesh} beside one process, in {dtype}", *report(steps, first), verdict]


def main(file, dtype, device):
    """Is a parallel model the same as one process? Of a file that says what both are."""
    import torch._dynamo  # noqa: F401  once, or each process would, for its optimizer
    torch.set_num_threads(1)
    try:
        same, lines = compared(file, dtype, device)
    except Exception as problem:  # noqa: BLE001  in the adapter
        print(f"{file}: {problem}", file=sys.stderr)
        sys.exit(2)
    print("\n".join(lines))
    sys.exit({True: 0, False: 1, None: 2}[same])


def add_to(parser):
    """The flags, on a command line."""
    parser.add_argument("file", help="the adapter")
    parser.add_argument("--dtype", choices=DTYPES, default="fp64")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser


if __name__ == "__main__":
    main(**vars(add_to(argparse.ArgumentParser()).parse_args()))
