"""What `python -m lessons mutate` puts into each process of the tests: Python imports it first, and pytest as a plugin.

Each collective of torch.distributed and of collectives.py is called through `wrapped`, which notes the project's line
that calls it and the tests that run, or makes the fault. Its settings are environment variables.
"""

import functools
import importlib.util
import inspect
import os
import sys
import threading

ROOT, FOLDER, TARGET, FAULT, TEST = (os.environ.get(f"MUTATE_{name}", "")
                                     for name in ("ROOT", "FOLDER", "TARGET", "FAULT", "TEST"))
REDUCE, GATHER = ("skip", "times", "stale"), ("skip", "alone", "stale")
FAULTS = {  # of each collective
    "all_reduce": REDUCE, "reduce": REDUCE, "reduce_scatter_tensor": (*REDUCE, "alone"),
    "reduce_scatter": (*REDUCE, "alone"), "all_gather_into_tensor": GATHER, "all_gather": GATHER,
    "all_to_all_single": GATHER, "all_to_all": GATHER, "broadcast": ("skip", "stale"), "batch_isend_irecv": ("skip",)}
inside = threading.local()  # of a collective, which calls others
noted, before = set(), {}


class Done:
    """The handle of a collective that has ended."""

    def wait(self, *_):
        return True

    def is_completed(self):
        return True


def line_of(frame):
    """The project's line that calls; "" if tests or a library do."""
    path = os.path.relpath(frame.f_code.co_filename, ROOT)
    words = path.split(os.sep)
    tests = {"tests", "test", "conftest.py", "..", "site-packages"} & {*words} or words[-1].startswith("test_")
    return "" if tests or path.startswith("<") else f"{path}:{frame.f_lineno}"


def note(line):
    """A line of the file `lines`: where, and which tests run in any of pytest's processes."""
    for name in [name for name in os.listdir(FOLDER) if name.startswith("now.")]:
        with open(os.path.join(FOLDER, name)) as file:
            test = file.read()
        if (line, test) not in noted:
            noted.add((line, test))
            with open(os.path.join(FOLDER, "lines"), "a") as file:
                file.write(f"{line}\t{test}\n")


def outputs(first):
    return first if isinstance(first, (list, tuple)) else [first]


def alone(name, out, mine, rank, n):
    """Writes what this rank would have alone: its part of its own terms, or its own numbers in each place."""
    if "scatter" in name:
        parts = mine if len(mine) > 1 else mine[0].flatten().tensor_split(n)
        out[0].copy_(parts[rank].view_as(out[0]))
        return
    places = out if len(out) > 1 or "to_all" in name else out[0].flatten().tensor_split(n)
    for t in places:
        own = mine[0].flatten()[:t.numel()]
        if len(own) == t.numel():
            t.copy_(own.view_as(t))


def wrong(real, bound, dist):
    """The call with the fault."""
    if FAULT != "stale" or before:  # the first call has none before it
        with open(os.path.join(FOLDER, "reached"), "a") as file:
            file.write("x")
    if FAULT == "skip":
        return [] if real.__name__ == "batch_isend_irecv" else Done()
    values, group = [*bound.arguments.values()], bound.arguments.get("group")
    n = dist.get_world_size(group)
    asynchronous = bound.arguments.pop("async_op", False)
    if FAULT == "alone":
        alone(real.__name__, outputs(values[0]), outputs(values[1]), dist.get_rank(group), n)
        return Done() if asynchronous else None
    real(*bound.args, **bound.kwargs)
    for i, t in enumerate(outputs(values[0])):
        t = t.detach()
        last = before.get((i, t.shape), t)
        before[i, t.shape] = t.clone()
        t.copy_(t * n if FAULT == "times" else last)
    return Done() if asynchronous else None


def wrapped(real, dist):
    @functools.wraps(real)
    def called(*args, **options):
        if getattr(inside, "call", False):
            return real(*args, **options)
        line = line_of(sys._getframe(1))
        inside.call = True
        try:
            bound = inspect.signature(real).bind(*args, **options)
            counts = line and dist.get_world_size(bound.arguments.get("group")) > 1  # else no fault changes anything
            if counts and not TARGET:
                note(f"{line}\t{real.__name__}")
            if counts and f"{line} {real.__name__}" == TARGET:
                return wrong(real, bound, dist)
            return real(*args, **options)
        finally:
            inside.call = False
    return called


class Finder:
    """Puts `wrapped` around a module's collectives when it has been imported."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in ("torch.distributed", "collectives"):
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, cls)
        if spec and spec.loader:
            spec.loader.exec_module = functools.partial(cls.run, spec.loader.exec_module)
        return spec

    @staticmethod
    def run(right, module):
        right(module)
        for name in FAULTS:
            if hasattr(module, name):
                setattr(module, name, wrapped(getattr(module, name), module))


if ROOT:
    sys.meta_path.insert(0, Finder)


# ------------------------------------------------------------------------------------------------------- pytest's hooks

def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if TEST in ("", item.nodeid)]


def pytest_runtest_logstart(nodeid):
    with open(os.path.join(FOLDER, f"now.{os.getpid()}"), "w") as file:
        file.write(nodeid)


def pytest_runtest_logreport(report):
    with open(os.path.join(FOLDER, "times"), "a") as file:
        file.write(f"{report.nodeid}\t{report.duration if report.passed else 1e9}\n")
