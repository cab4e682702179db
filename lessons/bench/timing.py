"""Measuring: functions timed in turns, tables of rows, JSON."""

import contextlib
import functools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import warnings
from unittest.mock import patch

import torch
import torch.distributed as torch_dist

import collectives as dist
import kernels
from further.letters import tensors_in
from kernels import triton
from safe.files import tell
from safe.launch import cores
from further.bad_input import BadInput


# PyTorch 2.13 renames some collectives. The old names, which 2.11 and 2.12 know, still work and are used here.
warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning, "torch.distributed")
warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # where a thread of backward begins with a product


# ------------------------------------------------------------------------------------------------------------ measuring

def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def interleaved(steps, device, repeats, calls):
    """Time {name: function}. Returns {name: seconds a call}, the median over repeats of the slowest rank's time. A
    repeat is so many calls in a row.

    The functions take turns, so that a slow moment of the machine hits all alike. All ranks start a turn together,
    behind a barrier.
    """
    seconds = torch.zeros(len(steps), repeats, dtype=torch.float64, device=device)
    for i in range(-3, repeats):  # the first three warm up
        for j, step in enumerate(steps.values()):
            synchronize(device)
            torch_dist.barrier()
            synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                step()
            synchronize(device)
            if i >= 0:
                seconds[j, i] = (time.perf_counter() - start) / calls
    torch_dist.all_reduce(seconds, torch_dist.ReduceOp.MAX)
    return dict(zip(steps, seconds.median(1).values.tolist()))


def mark(device):
    """The present moment on the device's own clock. A GPU's can be read only after synchronize."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def off(a, b):
    """The relative error of a, where b is right."""
    return ((a - b).norm() / b.norm()).item()


@functools.cache
def launch_us(device):
    """Microseconds that this host's CPU takes to launch a kernel of one number; on the CPU, to run such an operation.
    Where launches bind a step, the host decides how long it takes."""
    x, samples = torch.zeros(1, device=device), []
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(100):  # a GPU's queue takes more
            x.add_(1)
        samples.append(1e4 * (time.perf_counter() - start))
    return statistics.median(samples)


def of_all_ranks(value):
    every = [None] * dist.get_world_size()
    torch_dist.all_gather_object(every, value)
    return every


def traffic_of(operation):
    """What this rank has sent by one operation since the counts were reset. Resets all counts."""
    sent = dist.traffic().get(operation, dist.Traffic())
    dist.reset_traffic()
    return sent


def plain_kernels(*functions):
    """Rows for `patched`: these functions and classes of the reference, which then compute themselves."""
    return [(kernels.table, function, function) for function in functions]


@contextlib.contextmanager
def patched(rows):
    """Inside, each (object, attribute, what stands in its place) holds, or (dictionary, key, value)."""
    with contextlib.ExitStack() as stack:
        for owner, name, new in rows:
            is_key = isinstance(owner, dict)
            stack.enter_context(patch.dict(owner, {name: new}) if is_key else patch.object(owner, name, new))
        yield


class Table:
    """Prints rows as they come, on rank 0, and keeps them for --json. columns: {key: "title:format"}. device: what is
    measured; its host's `launch_us` stands at the head."""

    def __init__(self, title, columns, device=None):
        self.title, self.rows, self.device = title, [], device
        self.columns = {key: re.fullmatch(r"(.*):(([<>]\d+).*)", text).groups()  # last: its side and width
                        for key, text in columns.items()}

    def row(self, **values):
        if not self.rows:
            host = f"\nhost: {launch_us(self.device):.1f} us to launch a small kernel" if self.device else ""
            names = "  ".join(format(name, place) for name, _, place in self.columns.values())
            say(f"\n{self.title}{host}\n\n{names}")
        self.rows.append(values)
        say("  ".join(format("-", place) if values.get(key) is None else format(values[key], form)
                      for key, (_, form, place) in self.columns.items()))


def is_first():
    """Whether this is rank 0, or will start the ranks."""
    return int(os.environ.get("RANK", "0")) == 0


def say(text):
    if is_first():
        tell(text)


def say_in_order(text):
    """Print one text of each rank, in rank order, on rank 0."""
    for line in of_all_ranks(text):
        say(line)


ROWS = rb'\A\{\n "what": "'  # how the file begins that write_json writes


def write_json(a, device, *tables, **more):
    """Write the tables' rows, with the hardware, versions and commit that a figure means nothing without."""
    if not a.json or not is_first():
        return
    here, commit = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""
    with contextlib.suppress(OSError):  # where there is no git
        commit = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=here, text=True,
                                capture_output=True).stdout.strip()
    hardware = f"{platform.machine()} CPU, {cores()} cores"
    if device.type == "cuda":
        hardware = f"{torch.cuda.get_device_name(device)}, NCCL {torch.cuda.nccl.version()}"
    found = {"what": a.what, "hardware": hardware, "commit": commit or "unknown", "command": " ".join(sys.argv),
             "torch": torch.__version__, "triton": getattr(triton, "__version__", None),
             "launch_us": launch_us(device), **more,
             "rows": [row for table in tables for row in table.rows]}
    with open(a.json, "w") as file:
        json.dump(found, file, indent=1)


def seconds_of(functions, device, repeats):
    """Time {who: (function, its inputs)} in turns. Returns {who: [median seconds forward, backward]}. A write of 2 GiB
    goes first: it empties L2, and while it runs the CPU launches what is measured."""
    samples = {who: [] for who in functions}
    flush = torch.empty(1 << (31 if device.type == "cuda" else 10), dtype=torch.uint8, device=device)

    def timed(function, *arguments):
        flush.zero_()
        start = mark(device)
        return function(*arguments), start, mark(device)

    for i in range(-2, repeats):
        for who, (function, inputs) in functions.items():
            out, *marks = timed(function, *inputs)
            outs = [o for o in tensors_in(out) if o.requires_grad]
            if outs:
                marks += timed(torch.autograd.grad, outs, inputs, [torch.ones_like(o) for o in outs])[1:]
            synchronize(device)
            took = [b - a if device.type == "cpu" else a.elapsed_time(b) / 1e3 for a, b in zip(marks[::2], marks[1::2])]
            samples[who] += [took] * (i >= 0)
    return {who: [statistics.median(column) for column in zip(*rows)] for who, rows in samples.items()}


def left_out(function):
    """A collective that sends nothing. An all-to-all gives a rank its own data back, so that counts of rows stay
    possible, and as many rows come as leave. An all-gather repeats the rank's own part, because products of unset
    memory, mostly zeros, draw less power and are faster: GPT-2 XL's step under ZeRO-3 took 139 ms in place of 168."""
    def call(*args, **kwargs):
        if function.__name__ == "all_to_all_single":
            args[0].copy_(args[1])
        elif function.__name__ == "all_gather_into_tensor":
            whole, own = args[:2]
            for part in whole.view(-1, *own.shape):  # one of them may be `own`
                part.copy_(own)
        return dist.Handle()  # whoever waits finds it done
    return call


def without_collectives():
    """Inside, training's collectives send nothing. A pipeline's transfers stay, because its stages cannot run without
    them."""
    names = "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single"
    return patched([(dist, name, left_out(getattr(dist, name))) for name in names])


@contextlib.contextmanager
def readable(what, advice):
    """Inside, an error in reading what the file holds becomes BadInput."""
    try:
        yield
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise BadInput(f"{what}: {type(error).__name__} {error}; {advice}") from None
