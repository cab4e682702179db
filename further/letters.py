"""Letters: can one process, without a message, know that all ranks together would compute the right gradients?

    python -m lessons types --dp 2 --tp 2 --sp

Over each axis of the mesh a tensor has a letter, and so has its gradient:

    R   replicated        every rank has the same                what is made of R alone
    V   varying           each rank has its own                  columns, tokens, shards, and what is made of them
    P   term of a sum     all ranks' terms add up to the tensor  a product over a dimension that tp has cut
    M   term of a mean    likewise                               over dp and cp a loss, and a parameter's gradient

Collectives change letters. A term may go through what is linear. A term and an R may not be added, or the R would count
once a rank. At the optimizer a gradient has its parameter's letters. What f and g do follows: behind f a tensor is R,
its gradient P; from X A to B both are V; before g the tensor is P, its gradient R; everywhere else both are R.

Letters show what is missing, doubled, or in the wrong place. They are blind to numbers: scales, orders, the norm, the
wrong tensor of the right letter. That Python used a rank's number is invisible, too: x[rank] of an R is taken for an R.
Read with: DESIGN.md of meta-pytorch/spmd_types; JAX's shard_map with check_vma.
"""

import math
from collections import Counter
from weakref import WeakKeyDictionary

import torch
from torch.distributed import get_process_group_ranks as ranks_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import collectives as dist

WORDS = {"0": "zero", "R": "the same on every rank", "V": "each rank's own", "P": "a term of a sum",
         "M": "a term of a mean", "E": "memory that nobody has written"}
ORDER = "".join(WORDS)  # what has parts of several letters has the last of these
LINEAR = """add add_ sub sub_ rsub neg sum stack clone copy_ _to_copy _unsafe_view constant_pad_nd select_backward
            slice_backward""".split()
PRODUCTS = "mul mul_ div div_ mm bmm where masked_fill index index_select index_add scatter_add".split()
COLLECTIVES = {  # which letters it takes, over the axes of its group, and what it makes of them
    "all_reduce SUM": ("PV", "R"), "reduce_scatter_tensor SUM": ("PV", "V"), "all_reduce MAX": ("V", "R"),
    "all_reduce AVG": ("M", "R"), "reduce_scatter_tensor AVG": ("M", "V"),
    "all_gather_into_tensor": ("V", "R"), "all_to_all_single": ("V", "V")}
WHOLE = 0, math.inf  # of a tensor's memory


class Wrong(Exception):
    """What is wrong, and where."""


def made(name, letters, is_cut):
    """The letter of what an operation makes of these. is_cut: ranks have cut what a product adds up. Wrong where ranks
    together would not compute what one process does."""
    if name == "addmm":
        return made("add", [letters[0], made("mm", letters[1:], is_cut)], is_cut)
    given = [letter for letter in letters if letter != "0"]
    last = last_of(given, "0" if name in LINEAR + PRODUCTS else "R")
    if is_cut and name == "mm" and given == ["V", "V"]:
        return "P"
    if last[0] in "PME" and name != "cat":
        given.remove(last)
        fits = "VPM" if name in LINEAR else "R" if name in PRODUCTS or name.endswith("_backward") else ""
        if last[0] == "E" or not fits or not {letter[0] for letter in given} <= {*fits}:
            raise Wrong(f"{name} of {' and '.join(dict.fromkeys(WORDS[letter[0]] for letter in letters))}{last[1:]}")
    return last


def last_of(letters, otherwise="R"):
    return max(letters, key=lambda letter: ORDER.index(letter[0]), default=otherwise)


def extent(t):
    """From which byte of its memory on a tensor lies, and up to which. One with gaps counts as the whole."""
    start = t.storage_offset() * t.element_size()
    return (start, start + t.nbytes) if t.is_contiguous() else WHOLE


def tensors_in(values):
    """Tensors among values, and in tuples, lists and dicts of them."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


class Letters(TorchDispatchMode):
    """Inside, every tensor has letters, {axis: letter}. What is left out is R. Behind P, M and E stands since when.

    grid: {axis: (its ranks, by how much a rank's number grows along it)}. calls: {(ranks, what they call together): how
    often}. sent: {(axis, what becomes of which letter, place): how often}. place(): where in the program one is.
    """

    def __init__(self, grid):
        super().__init__()
        self.grid, self.calls, self.sent = grid, Counter(), Counter()
        self.parts = WeakKeyDictionary()  # memory -> {extent: letters}

    def axes_of(self, *groups):
        """Along which the ranks of a group lie."""
        return {axis for group in groups for axis, (n, step) in self.grid.items()
                if len({rank // step % n for rank in ranks_of(group)}) > 1}

    def of(self, t):
        """Letters of the smallest known part of the memory that has all of t."""
        parts, (start, end) = self.parts.get(t.untyped_storage(), {}), extent(t)
        around = [part for part in parts if part[0] <= start and end <= part[1]]
        return parts[min(around, key=lambda part: part[1] - part[0])] if around else dict.fromkeys(self.grid, "R")

    def set(self, t, letters):
        """t was written. Of a part that it overlaps the rest is as before."""
        letters = {axis: letters.get(axis, "R") for axis in self.grid}
        parts, (start, end) = self.parts.setdefault(t.untyped_storage(), {}), extent(t)
        whole = parts.get(WHOLE, letters) if t.nbytes < t.untyped_storage().nbytes() else letters
        for part in [part for part in parts if part[0] < end and start < part[1]]:
            before = parts.pop(part)
            for rest in ((part[0], start), (end, part[1])) if part != WHOLE else ():
                if rest[0] < rest[1]:
                    parts[rest] = before
        parts[start, end] = letters
        parts[WHOLE] = {axis: last_of([whole[axis], letters[axis]]) for axis in self.grid}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if not func.is_view and (name := func.overloadpacket.__name__.removeprefix("_foreach_")) != "detach":
            read = tensors_in(args[name in ("copy_", "fill_"):])
            for t in tensors_in(args[0] if name.endswith("_") else out):
                self.set(t, {axis: self.letter(axis, name, read) for axis in self.grid})
            if name == "cat":  # each part keeps its letters
                tensors, dim, *_ = *args, 0
                for part, t in zip(out.split([t.shape[dim] for t in tensors], dim), tensors):
                    if part.is_contiguous() and t.numel():
                        self.set(part, self.of(t))
        return out

    def letter(self, axis, name, read):
        """Of what an operation makes."""
        try:
            letter = "E" if "empty" in name else "0" if "zero" in name else made(
                name, [self.of(t)[axis] for t in read if t.numel()], axis == "tp")
        except Wrong as problem:
            self.wrong(axis, problem)
        return f"{letter}\n    since {self.place()}" if letter in ("P", "E") else letter

    @torch.no_grad()
    def collective(self, group, name, async_op, algorithm, output, *others):
        """As a Link's `run`, but nothing is sent, and ones come out."""
        name += " " + others[-1].name if "reduce" in name else ""
        sent, (takes, makes) = tensors_in(others) or [output], COLLECTIVES[name]
        letters = {axis: last_of(self.of(t)[axis] for t in sent) for axis in self.grid}
        for axis in self.axes_of(group):
            before = letters[axis]
            if before[0] not in "0" + takes:
                self.wrong(axis, f"{name} of {WORDS[before[0]]}{before[1:]}")
            letters[axis] = before if before == "0" else makes
            self.sent[axis, f"{name}: {before[0]} -> {letters[axis]}", self.place()] += 1
        self.calls[tuple(ranks_of(group)), name] += 1
        if output is not sent[0]:
            output.fill_(1)
        self.set(output, letters)
        return dist.Handle()

    def must_be(self, what, t, wanted):
        for axis, letter in self.of(t).items():
            if letter[0] not in "0" + (want := wanted.get(axis, "R")[0]):
                self.wrong(axis, f"{what} is {WORDS[letter[0]]}, not {WORDS[want]}{letter[1:]}")

    def wrong(self, axis, problem):
        raise Wrong(f"{axis}: {problem}\n    at {self.place()}")
