"""Links that report progress, refuse wrong arguments, and say which operation lost its peer."""

import contextlib
import gc
import re
import time

import collectives as dist
from collectives import Link, tensors_among
from further.library import arguments_of, Library
from further.nodes import TwoLevels


_progress = [0, "starting", 0.0]


def progress(what=None, step=None):
    """[step, what this process does or did last, since when (time.monotonic)], after setting what is given."""
    _progress[0] = step or _progress[0]
    if what:
        _progress[1:] = what, time.monotonic()
    return list(_progress)


class PeerError(RuntimeError):
    """A message cannot come, because its sender is gone or was silent for longer than the group's timeout."""


@contextlib.contextmanager
def lost_peer_named(what):
    """If messages inside fail, as they start or in wait(), raise a PeerError that names `what` they were for."""
    try:
        yield
    except RuntimeError as error:
        text = re.sub(r"^\[\S+:\d+\] ", "", str(error)).split(". ")[0]  # without gloo's file name and advice
        raise PeerError(f"{what}: {text}") from None


class Watched(Link):
    """A Link that reports progress, refuses wrong arguments, and says which operation lost its peer."""
    around = contextlib.nullcontext  # for a profile: around((name, arguments)) holds an operation

    def run(self, name, async_op, algorithm, *arguments):
        progress(name)
        self.check(name, arguments)

        def watched(call, *given):  # on whatever thread; `Library` calls the library in place of this
            progress(name)
            with self.around((name, given)):
                call.perform(algorithm, *given)
            if async_op:  # the caller does not wait, so he does not say so
                progress(f"after {name}")

        result = super().run(name, async_op, watched, *arguments)
        if not async_op:
            progress(f"after {name}")
        return result

    def perform(self, algorithm, *arguments):
        """The operation under way."""
        algorithm(self, *arguments)

    def check(self, name, arguments):
        """ValueError for wrong arguments that an algorithm would find only when it has sent something, or in another
        thread."""
        named = dict(zip(arguments_of(name), arguments))
        for key, value in named.items():
            for t in tensors_among([value]):
                if t.device.type != self.device:
                    raise ValueError(f"{name}: a {self.backend} group takes {self.device.upper()} tensors, "
                                     f"but {key} is on {t.device}")
        dist.COMBINE[named.get("op", dist.ReduceOp.SUM)]  # raises for one that is not there, in a group of one, too
        if sum(named.get(root) is not None for root in ("src", "dst", "group_src", "group_dst")) == 2:
            raise ValueError("give the root once: by global rank or by rank in the group")
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            whole, part = arguments[:2] if name == "all_gather_into_tensor" else arguments[1::-1]
            if whole.numel() != self.size * part.numel():
                raise ValueError(f"{name}: {whole.numel()} elements must hold {self.size} times {part.numel()}")

    def exchange(self, sends=(), receives=()):
        with self.named():
            super().exchange(sends, receives)

    def named(self):
        return lost_peer_named(f"{self.name} in a group of {self.size}")

    def close(self):
        super().close()
        if self.backend == "nccl":
            gc.collect()  # NCCL frees a group only when all CUDA graphs of its kernels are gone


class WatchedLibrary(Watched, Library):
    """The library's collectives."""


class WatchedLevels(TwoLevels, Watched):
    """`TwoLevels` that is Watched."""


LINKS = {"ours": Watched, "ring": Watched, "torch": WatchedLibrary, "nodes": WatchedLevels}  # for collectives.LINKS
