"""ZeRO-3 where parameters are read elsewhere: what if a hook, a method or another unit uses a weight that is not whole?

What further/fsdp.py adds to further/prefetch.py's FlatParameter and Prefetcher. Reading a parameter gathers its unit.
"""

import functools
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_leaves

from further.prefetch import FlatParameter, Prefetcher


class Absent:
    """What a parameter is while its unit is not whole: who uses its values in Python has the unit gathered first. To
    what does not ask, as a kernel in C++, it is NaN."""
    WITHOUT_VALUES = {"grad", "requires_grad", "requires_grad_", "is_leaf", "shape", "size", "dim", "ndim", "numel",
                      "nbytes", "dtype", "device", "is_meta", "is_floating_point", "is_complex", "layout", "_version",
                      "untyped_storage",
                      "_backward_hooks", "register_hook", "_post_accumulate_grad_hooks",
                      "register_post_accumulate_grad_hook"}

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        attribute = getattr(function, "__self__", None)  # if the function gets or sets one
        if getattr(attribute, "__name__", function.__name__) not in Absent.WITHOUT_VALUES:
            for param in tree_leaves((args, kwargs)):
                if isinstance(param, Absent):
                    param.lend(param)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


@functools.cache
def absent(kind):
    """The Absent class of a class of parameters."""
    return type(f"Absent{kind.__name__}", (Absent, kind), {"kind": kind})


class LentParameter(FlatParameter):
    """A FlatParameter whose parameters are `Absent` while it is free."""
    note_gather = int  # called for each gather. Its owner sets it
    versions = ()  # of the parameters when they became whole

    def begin_gather(self):
        if self.weights is None:
            self.note_gather()
        super().begin_gather()

    def make_whole(self):
        for p in self.params:
            if isinstance(p, Absent):
                p.__class__ = p.kind
        super().make_whole()
        self.versions = [p._version for p in self.params]

    def free(self, keep=False):
        """RuntimeError if somebody has written into the parameters, such as an nn.Embedding with max_norm: this rank
        keeps the shard alone, so it would be lost."""
        now = [p._version for p in self.params] if self.is_whole else []
        written = [p.shape for p, before, after in zip(self.params, self.versions, now) if before != after]
        super().free(keep)
        for p in self.params:
            if not isinstance(p, Absent):
                p.__class__ = absent(type(p))
        if written:
            raise RuntimeError(f"a parameter of shape {tuple(written[0])} was written while it was whole, between "
                               "forward and finish_grad_sync: FSDP keeps what is written between steps")


class Lender(Prefetcher):
    """A Prefetcher that also gathers what is read outside of its unit's forward: in a hook, in a method of another
    name, in another unit; and frees that when the next unit begins. What autograd saves it treats as autograd does: a
    tensor that was written since is refused, and a caller's own hooks, such as `checkpoint`'s, go on saving it.

    expect(flat): called when a flat's backward begins. Its owner sets it.
    """

    def __init__(self, flats_of):
        # torch.compile may trace the units, and not what changes a parameter's class or asks for an address.
        for hook in "before_forward", "before_layer", "after_forward", "pack", "unpack":
            setattr(self, hook, torch.compiler.disable(getattr(self, hook)))
        super().__init__(flats_of)
        self.lent = []
        for flat in self.flats:
            for p in flat.params:
                p.lend = functools.partial(self.lend, flat)

    def need(self, flat):
        if not (flat.is_whole or self.in_forward):
            self.expect(flat)
        super().need(flat)

    def lend(self, flat, param):
        self.need(flat)
        if self.in_forward:
            self.lent.append(flat)

    def take_back(self, except_for=()):
        for flat in self.lent:
            if flat not in except_for:
                flat.free()
        self.lent = []

    def before_forward(self, unit, inputs):
        self.take_back(except_for=self.flats_of[unit])
        super().before_forward(unit, inputs)

    @contextmanager
    def forward(self):
        self.others = torch._C._autograd._top_saved_tensors_default_hooks(True) or (with_version, of_version)
        with super().forward():
            try:
                yield
            finally:
                self.take_back()

    def pack(self, tensor):
        pack, unpack = self.others
        if tensor.layout == torch.strided:
            flat, place = super().pack(tensor)
            if flat and flat.dtype == tensor.dtype:
                return flat, flat.shard._version, place
        return None, unpack, pack(tensor)

    def unpack(self, saved):
        flat, version, kept = saved
        if flat is None:
            return version(kept)
        same_version(flat.shard, version)
        return super().unpack((flat, kept))


def with_version(tensor):
    return tensor.detach(), tensor._version


def of_version(saved):
    same_version(*saved)
    return saved[0]


def same_version(tensor, version):
    if tensor._version != version:
        raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace "
                           f"operation: {tuple(tensor.shape)}, at version {tensor._version}, expected {version}")
