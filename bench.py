"""Measures this code beside PyTorch's own and beside the lecture's formulas:

    python bench.py kernels               every kernel beside eager, compiled, SDPA's backends, and the roofline
    python bench.py lessons               lectures 5 to 8: each lesson's ways timed, the lecture's figures beside ours
    python bench.py collectives           time and bandwidth by size; bytes sent against the formula
    python bench.py strategies            one GPT step under every strategy: speed, memory, traffic, overlap, bubble
    python bench.py plan --gpus 64        no GPU needed: layouts that fit, their predicted time, what limits each
    python bench.py scaling               1, 2, 4, ... GPUs, weak and strong
    python bench.py pictures FILE...      SVG of what the code does, and of files from --json and train.py --trace

Each command starts as many processes as it needs (or runs under torchrun) and prints a table; `--json FILE` writes its
rows with hardware, versions and commit. Our code and PyTorch's run in the same processes and take turns, so that both
see the same machine. A time is the median over repeats of the slowest rank's time. `--quick` shows only that a command
works. Tested with PyTorch 2.11 to 2.13; requirements.txt names the newest of them.

Letters: N ranks in a group, k bytes of a tensor, K parameters, B, T, C, V, L as in model.py, m micro-batches,
p pipeline ranks.
Read with: CS336 lecture 7-8; Ultra-Scale Playbook, "finding the best training configuration" and its formulas.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel, SDPBackend

import collectives as dist
import fast
import kernels
import train
from fast import norm
from fast.linear import tuned_matmul
from fast.recorded import RecordedGraph
from lessons.claims import CLAIMS
from lessons.demos import positive
from lessons.gpu import LESSONS
from lessons.machine import BUS, calls_of, fit, law_of, load_machine, measure_machine
from lessons.measure import interleaved, of_all_ranks, readable, say, seconds_of, Table, write_json
from lessons.pictures import pictures, spans_of
from lessons.plan import plan
from lessons.strategies import WITHOUT, configs_of, layouts, strategies
from model import PRESETS
from safe import launch
from safe.flags import BadInput, check_layout, gpus_here, model_config, Parser, refuse, reject, Settings
from safe.folder import check_folder
from safe.launch import is_forked
from theory.speed import MACHINES, describe_machine
from theory.traffic import sent


# -------------------------------------------------------------------------------------------------------------- kernels

class Operation(NamedTuple):
    name: str
    who: dict        # {who: (function, its inputs)}
    moved: tuple     # the fewest bytes that can be read and written, forward and backward
    flops: tuple = (0, 0)


@dataclasses.dataclass
class Size:
    """What the next functions make inputs of: about n elements of a dtype on a device."""
    device: torch.device
    dtype: torch.dtype
    n: int

    def __post_init__(self):
        self.large = self.n > 1 << 20

    def random(self, *shape):
        return torch.randn(shape, dtype=self.dtype, device=self.device, requires_grad=True)


def beside(name, plain, ours, inputs, passes, **others):
    """An Operation, eager, compiled and ours. passes: over its first input, forward and backward."""
    who = {"eager": plain, **others, "torch.compile": torch.compile(plain, dynamic=False), "ours": ours}
    return Operation(f"{name} {str(inputs[0].dtype)[6:]}", {key: (function, inputs) for key, function in who.items()},
                     tuple(count * inputs[0].nbytes for count in passes))


def elu(size):
    yield beside("ELU", kernels.elu_reference, kernels.elu, [size.random(size.n)], (2, 3), **{"F.elu": F.elu})


def gelu(size):
    yield beside("GELU", lambda x: F.gelu(x, approximate="tanh"), kernels.gelu, [size.random(size.n)], (2, 3))


def layer_norm(size):
    def plain(x, w, b):
        return F.layer_norm(x, w.shape, w, b)

    for c in (768, 1600, 4096, 16384):
        x, w, b = size.random(max(2, size.n // 2 // c), c), size.random(c), size.random(c)
        yield beside(f"layer norm {c}", plain, kernels.layer_norm, [x, w, b], (2, 3))
        if c == 1600:  # x + r, and its norm
            yield beside(f"add, norm {c}", lambda x, r, w, b: (x + r, plain(x + r, w, b)), norm.add_layer_norm,
                         [x, size.random(*x.shape), w, b], (4, 4))


def cross_entropy(size):
    v = 50304 if size.large else 300
    rows = max(2, size.n // 2 // v)
    y = torch.randint(v, (rows,), device=size.device)
    yield beside("cross-entropy", lambda z: F.cross_entropy(z.float(), y), lambda z: kernels.cross_entropy(z, y),
                 [size.random(rows, v)], (1, 2))


def attention(size):
    backends = {"FLASH": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    backends = backends if size.device.type == "cuda" else {"math": SDPBackend.MATH}
    causal = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    for d, t in itertools.product((64, 128), (1024, 4096, 16384)):
        b, h, t = 16384 // t if size.large else 1, 2048 // d, t if size.large else t // 64
        qkv = [size.random(b, h, t, d) for _ in range(3)]
        who = {f"SDPA {key}": (sdpa_kernel(backend)(causal), qkv) for key, backend in backends.items()}
        who["ours"] = kernels.attention, [size.random(b, t, 3, h, d)]
        flops = b * h * t * t * d
        yield Operation(f"attention T={t} D={d} causal", who, (4 * qkv[0].nbytes, 8 * qkv[0].nbytes),
                        (2 * flops, 5 * flops))


def grouped(size):
    """The product of sorted rows with each group's own matrix, for equal groups and for groups that halve from one to
    the next. The loop is given its counts on the CPU, so it does not wait for the GPU."""
    rows, n_in, n_out = (16384, 1536, 6144) if size.large else (40, 16, 24)
    for count, even in itertools.product((4, 16), (True, False)):
        sizes = [rows // count] * count if even else [rows >> min(e + 1, count - 1) for e in range(count)]
        sizes[0] += rows - sum(sizes)
        counts = torch.tensor(sizes, device=size.device)
        inputs = x, w = size.random(rows, n_in), size.random(count, n_out, n_in)

        def one_by_one(x, w, sizes=sizes):
            return torch.cat([some @ matrix.T for some, matrix in zip(x.split(sizes), w)])

        who = {"cuBLAS, a loop": (one_by_one, inputs),
               "ours": (functools.partial(kernels.grouped_linear, bias=None, counts=counts), inputs)}
        if size.device.type == "cuda" and size.dtype == torch.bfloat16:
            ends = counts.cumsum(0).int()

            def by_pytorch(x, w, ends=ends):
                return torch._grouped_mm(x, w.transpose(1, 2), ends)

            who["_grouped_mm"] = by_pytorch, inputs
        flops, out = 2 * rows * n_in * n_out, rows * n_out * x.itemsize
        yield Operation(f"grouped product {count} {'even' if even else 'skewed'}", who,
                        (x.nbytes + w.nbytes + out, 2 * (x.nbytes + w.nbytes) + out), (flops, 2 * flops))


def matmul(size):
    side = 8192 if size.large else 64
    a, b = (size.random(side, side).detach() for _ in range(2))
    yield Operation(f"matmul {side}", {"cuBLAS": (torch.matmul, [a, b]), "ours": (tuned_matmul, [a, b])},
                    (3 * a.nbytes, 0), (2 * side**3, 0))


KERNELS = {"elu": elu, "gelu": gelu, "layer_norm": layer_norm, "cross_entropy": cross_entropy, "attention": attention,
           "grouped": grouped, "matmul": matmul}  # those that take most of a training step


def measure_kernels(a):
    device = torch.device(a.device, *[0] * (a.device == "cuda"))
    kernels.use("triton")  # ours or an error
    n, side, repeats = (1 << 28, 8192, 10) if device.type == "cuda" and not a.quick else (1 << 12, 64, 2)
    (x, y), m = torch.zeros(2, n, device=device), torch.randn(side, side, device=device).bfloat16()
    ceilings = seconds_of({"copy": (y.copy_, [x]), "matmul": (torch.matmul, [m, m])}, device, repeats)
    hbm, peak = 2 * x.nbytes / ceilings["copy"][0], 2 * side**3 / ceilings["matmul"][0]
    del x, y, m
    say(f"copy {hbm / 1e12:.2f} TB/s, bf16 product of {side} x {side} {peak / 1e12:.0f} TFLOP/s. The roofline is "
        f"the longer time: bytes at the first rate, or FLOPs at the second\n"
        f"to see what torch.compile has written: TORCH_LOGS=output_code python bench.py kernels --only elu")
    table = Table("TB/s: the fewest bytes that must move, over seconds. All in bfloat16 except the second ELU", {
        "op": "operation:<30", "way": "way:<8", "who": "who:<14", "ms": "ms:>9.3f", "tb": "TB/s:>6.2f",
        "tflops": "TFLOP/s:>8.0f", "bound": "bound by:<8", "share": "% of roofline:>13.0f"})
    cases = [(name, torch.bfloat16) for name in a.only] + [("elu", torch.float32)] * ("elu" in a.only)
    for name, dtype in cases:
        for operation in KERNELS[name](Size(device, dtype, n)):
            for who, seconds in seconds_of(operation.who, device, repeats).items():
                for way, t, moved, flops in zip(("forward", "backward"), seconds, operation.moved, operation.flops):
                    table.row(op=operation.name, way=way, who=who, ms=1e3 * t, tb=moved / t / 1e12,
                              tflops=flops / t / 1e12 if flops else None,
                              bound="memory" if moved / hbm > flops / peak else "compute",
                              share=100 * max(moved / hbm, flops / peak) / t)
            torch._dynamo.reset()
    write_json(a.json, "kernels", device, [table], copy_bytes_per_s=hbm, matmul_flops=peak)


def lessons(a):
    device, on_triton = torch.device(a.device, *[0] * (a.device == "cuda")), a.device == "cuda" or kernels.INTERPRETED
    kernels.use("triton" if on_triton else "auto")
    n, side, repeats = (1 << 12, 64, 2) if a.quick else (1 << 28, 8192, 10) if a.device == "cuda" else (1 << 24, 512, 5)
    size = SimpleNamespace(n=n, side=side, repeats=repeats)
    pairs = Table("Lectures 5 and 6, measured: how many times faster than the lesson's first way, with how many times "
                  "fewer bytes", {
        "lesson": "lesson:<11", "says": "the lecture:<46", "way": "way:<17", "ms": "ms:>10.3f",
        "faster": "faster:>9.2f", "fewer": "fewer:>6.2f", "gb": "GB:>8.3f", "speed": "GB/s:>8,.1f",
        "tflops": "TFLOP/s:>9.2f", "read": "read:<29"})
    for name in filter(a.only.__contains__, LESSONS):
        lesson = LESSONS[name]
        try:
            rows = lesson.measure(device, size)
        except Exception as problem:  # a lesson that fails on this GPU does not stop the others
            if not on_triton:
                raise
            reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            pairs.row(lesson=name, says=lesson.says, way=f"failed: {reason}", read=lesson.read)
            continue
        for i, (way, seconds, moved, flops) in enumerate(rows):
            pairs.row(lesson=name, says="" if i else lesson.says, way=way, ms=1e3 * seconds, read=lesson.read,
                      faster=rows[0][1] / seconds, fewer=rows[0][2] / moved, gb=moved / 1e9,
                      speed=moved / seconds / 1e9, tflops=flops / seconds / 1e12 if flops else None)
    figures = Table("Lectures 7 and 8: the lecture's figure, ours as computed here, and what measures it", {
        "claim": "claim:<62", "lecture": "lecture:>9,.5g", "ours": "ours:>9,.5g", "note": "note:<68",
        "command": "command:<40"})
    for claim in itertools.chain(*(topic() for topic in CLAIMS)) if "claims" in a.only else ():
        figures.row(**claim._asdict())
    write_json(a.json, "lessons", device, [pairs, figures])


GRAPHED = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"  # timed from a CUDA graph, too


def collectives(a):
    device = dist.initialize(a.device)
    dist.use(None, a.comm)
    dtype, name = (torch.bfloat16, "gpt2-xl") if device.type == "cuda" else (torch.float32, "tiny")
    machine = measure_machine(device, dtype, PRESETS[name], a.comm)
    say(f"{a.gpus} processes, {torch_dist.get_backend()}\n{describe_machine(machine)}")
    table = Table("float32; times are the slowest rank's; bytes sent by all ranks together", {
        "op": "collective:<22", "size": "KiB:>9,.0f", "us": "ours us:>10,.0f", "torch_us": "torch us:>10,.0f",
        "ours_graph_us": "ours graph:>10,.0f", "torch_graph_us": "torch graph:>11,.0f", "ratio": "torch / ours:>12.2f",
        "alg": "alg GB/s:>8.2f", "bus": "bus GB/s:>8.2f", "torch_bus": "torch bus:>9.2f",
        "counted": "bytes sent:>14,", "formula": "formula:>14,"})
    lines = Table("seconds = a x messages + bytes sent / b, fitted over the sizes", {
        "op": "collective:<22", "a": "ours a, us:>10.1f", "b": "ours b, GB/s:>12.2f", "torch_a": "torch a, us:>11.1f",
        "torch_b": "torch b, GB/s:>13.2f"})
    logs = range(10, 21, 5) if a.quick else range(10, 31 if device.type == "cuda" else 25, 2)
    for op in a.only:
        for size in [0] if op == "barrier" else [1 << log for log in logs]:
            table.row(**measure_collective(op, size, a, device))
    for op in a.only:
        rows = [row for row in table.rows if row["op"] == op and "torch_us" in row]
        if len(rows) > 1:
            messages, sizes, ours, theirs = zip(*((row["messages"], row["most"], row["us"], row["torch_us"])
                                                  for row in rows))
            (ours_a, ours_b), (torch_a, torch_b) = fit(messages, sizes, ours), fit(messages, sizes, theirs)
            lines.row(op=op, a=ours_a, b=ours_b / 1e3, torch_a=torch_a, torch_b=torch_b / 1e3)
    write_json(a.json, "collectives", device, [table, lines], machine=dataclasses.asdict(machine))


def measure_collective(op, size, a, device):
    """A row. messages, most: of the rank that sends most of them, and most bytes."""
    calls, count = calls_of(op, size, device)
    if device.type == "cuda" and a.comm == "ours" and op in GRAPHED:
        for who in ("ours", "torch"):
            calls[who]()  # what a first call sets up cannot be recorded
            calls[who + "_graph"] = RecordedGraph(calls[who]).replay
    seconds = interleaved(calls, device, 3 if a.quick else 7, calls=max(1, min(20, (1 << 24) // max(size, 1))))
    dist.reset_traffic()
    calls["ours"]()
    logs = of_all_ranks(dist.traffic().get(op, dist.Traffic()))
    row = {"op": op, "n": a.gpus, "size": count / 256, "us": 1e6 * seconds["ours"]}
    if count:
        row |= {"alg": 4e-9 * count / seconds["ours"], "bus": 4e-9 * count / seconds["ours"] * BUS[op](a.gpus)}
    if "torch" in seconds:  # a collective
        law = law_of(None)
        row |= {f"{who}_us": 1e6 * took for who, took in seconds.items() if who != "ours"}
        row |= {"ratio": seconds["torch"] / seconds["ours"], "counted": sum(log.bytes for log in logs),
                "formula": sum(sent(op, count, 4, a.gpus, rank, *law) for rank in range(a.gpus)),
                "messages": max(log.messages for log in logs), "most": max(log.bytes for log in logs)}
    if count and "torch" in seconds:
        row["torch_bus"] = 4e-9 * count / seconds["torch"] * BUS[op](a.gpus)
    return row


# -------------------------------------------------------------------------------------------------------------- scaling

def scaling(a):
    """Run `strategies` with 1, 2, 4, ... processes. In weak scaling the batch grows with them, in strong it stays."""
    table = Table("scaling: tokens/s a GPU, and as a share of one GPU's", {
        "kind": "scaling:<7", "gpus": "GPUs:>5", "strategy": "strategy:<11", "who": "who:<31", "batch": "batch:>6",
        "ms": "ms:>8.1f", "tokens": "tokens/s GPU:>12,.0f", "efficiency": "efficiency %:>12.1f", "mfu": "MFU %:>5.1f"})
    worlds, one = [1 << i for i in range(a.gpus.bit_length())], {}
    names = "device", "comm", "dtype", "model", "cuda_graphs", "repeats", *train.SIZES
    given = [word for name in names if getattr(a, name) for word in (f"--{name.replace('_', '-')}", getattr(a, name))]

    @functools.cache  # in the largest world weak and strong are the same run
    def rows(n, batch):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "rows.json")
            words = [sys.executable, os.path.abspath(__file__), "strategies", "--gpus", n, "--batch-size", batch,
                     "--json", path, "--accumulate", batch // n // a.batch_size, "--only", *a.only,
                     *["--quick"] * a.quick, *given]
            subprocess.run(list(map(str, words)), check=True, stdout=subprocess.DEVNULL)
            with open(path) as file:
                return json.load(file)["rows"]

    for kind, n in itertools.product(("weak", "strong") if a.kind == "both" else (a.kind,), worlds):
        batch = a.batch_size * (n if kind == "weak" else worlds[-1])
        for row in rows(n, batch):
            first = one.setdefault((kind, row["strategy"], row["who"]), row["tokens"])
            table.row(kind=kind, gpus=n, batch=batch, efficiency=100 * row["tokens"] / first,
                      **{key: row.get(key) for key in ("strategy", "who", "ms", "tokens", "mfu")})
    write_json(a.json, "scaling", torch.device(a.device), [table])
    return table


# ---------------------------------------------------------------------------------------------------------------- flags

WHAT = {"kernels": measure_kernels, "lessons": lessons, "collectives": collectives, "strategies": strategies,
        "plan": plan, "scaling": scaling, "pictures": pictures}
OF_A_MODEL, TRAINED = ("strategies", "plan", "scaling"), ("strategies", "scaling")
MEASURED = ("kernels", "collectives", *TRAINED)


def option(takers, name, help=None, **more):
    """An entry of FLAGS: the commands of WHAT that take it, its name, the arguments for argparse."""
    return takers, name, dict(more, help=help)


number = functools.partial(option, type=positive)
FLAGS = [
    option((*MEASURED, "lessons", "plan"), "--json", "write the rows there, with hardware, versions, commit",
           default="", metavar="FILE"),
    number((*MEASURED[1:], "plan"), "--gpus", "processes, in plan GPUs; left out, all GPUs, on the CPU 2, in plan 8"),
    option((*MEASURED, "lessons"), "--device", choices=["auto", "cpu", "cuda"], default="auto"),
    option((*MEASURED, "lessons"), "--quick", "tiny sizes, few repeats: shows only that it works", action="store_true"),
    option((*MEASURED, "lessons"), "--only", "which kernels, lessons, collectives or strategies; left out, all (but "
           "experts and dense twin only with --experts), in scaling ddp and zero3", nargs="+", metavar="NAME"),
    option(OF_A_MODEL, "--model", "preset; left out, gpt2, on the CPU tiny, in plan gpt2-xl", choices=list(PRESETS)),
    *(number(OF_A_MODEL, "--" + name.replace("_", "-"), "instead of the preset's") for name in train.SIZES),
    number(OF_A_MODEL, "--batch-size", "sequences a step of all GPUs, in scaling of each; left out, 8 for each GPU"),
    option(OF_A_MODEL, "--dtype", "what layers compute in; left out, bf16, on the CPU fp32", choices=["bf16", "fp32"]),
    option(("collectives",), "--comm", "what to compare with torch's; ring: the textbook's", choices=["ours", "ring"],
           default="ours"),
    option(TRAINED, "--comm", "collectives under our strategies", choices=["ours", "ring", "torch"],
           default="ours"),
    number(("strategies",), "--accumulate", "micro-batches without a pipeline", default=1),
    number(("strategies",), "--micro-batches", "micro-batches of a pipeline", default=8),
    number(("strategies",), "--virtual-stages", "stages of a rank in the interleaved pipeline", default=2),
    option(TRAINED, "--cuda-graphs", "as in train.py", choices=["auto", "off", "on"], default="auto"),
    option(("kernels", "collectives", "strategies"), "--plain", "measure the reference alone, without fast/",
           action="store_true"),
    number(TRAINED, "--repeats", "timed runs of each step; left out, 7, but 3 with --quick"),
    option(("strategies",), "--without", "time ours without these pieces of fast/, one at a time; no names: all of "
           + ", ".join(WITHOUT), nargs="*", choices=list(WITHOUT), metavar="PIECE"),
    option(("scaling",), "--kind", "whether the batch grows with the GPUs", choices=["weak", "strong", "both"],
           default="both"),
    option(("plan",), "--machine", f"{', '.join(MACHINES)}, or a file that `collectives --json` wrote", default="h200"),
    number(("plan",), "--node", "GPUs of a node, instead of the machine's"),
    number(("plan",), "--network", "rate from a GPU to another node, instead of the machine's", metavar="GB/S"),
    number(("plan",), "--top", "layouts to print", default=15),
    option(("pictures",), "files", "files from --json or train.py's --trace; without one, the code alone", nargs="*",
           metavar="FILE"),
    option(("pictures",), "--into", "where the SVG files go", default="assets", metavar="DIR"),
]


def parse(words):
    parser = Parser(description="What the lecture predicts, what we measure, what PyTorch's own does.",
                          allow_abbrev=False)
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT", help=" | ".join(WHAT))
    for what in WHAT:
        sub = whats.add_parser(what, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        for takers, name, more in FLAGS:
            if what in takers:
                sub.add_argument(name, **more)
    others = argparse.Namespace(gpus=1, accumulate=1, micro_batches=1, virtual_stages=1, without=None,
                                plain=False)  # no flags there
    return parser.parse_args(words, others)


def check(a, world):
    """Fill in flags left out; BadInput before any process starts. Returns the number of processes needed."""
    if a.what == "pictures":
        check_files(a)
        return world if world > 1 else 4
    reject(a.json and (os.path.isdir(a.json) or not os.path.isdir(os.path.dirname(os.path.abspath(a.json)))),
           f"--json {a.json}: no file can be written there; give e.g. --json rows.json")
    if a.what == "plan":
        a.gpus, a.device = a.gpus or 8, "cuda"
        a.machine = load_machine(a)
        check_model(a, "gpt2-xl")
        return 1
    check_processes(a, world)
    if a.what in TRAINED:
        check_model(a, "gpt2" if a.device == "cuda" and not a.quick else "tiny")
        check_strategies(a)
        return a.gpus if a.what == "strategies" else 1
    check_names(a)
    return a.gpus if a.what == "collectives" else 1


def check_names(a):
    able = {"", *["triton"] * (a.device == "cuda" or kernels.INTERPRETED), *["cuda"] * (a.device == "cuda")}
    names = {"kernels": tuple(KERNELS), "collectives": (*BUS, "barrier"),
             "lessons": (*(name for name, lesson in LESSONS.items() if lesson.needs in able), "claims")}[a.what]
    a.only = a.only or names
    for name in a.only:
        why = "it wants a GPU; " if a.what == "lessons" and name in LESSONS else ""
        reject(name not in names, f"--only {name}: {why}there are {', '.join(names)}")
    reject(a.what == "kernels" and "triton" not in able,
           "--device cpu: kernels are Triton's and want a GPU; with TRITON_INTERPRET=1, --quick works")
    reject(a.what == "collectives" and a.gpus == 1, "--gpus 1: one process has nobody to send to; give --gpus 2"
           + " --device cpu" * (a.device == "cuda"))


def check_model(a, preset):
    a.dtype = a.dtype or ("bf16" if a.device == "cuda" else "fp32")
    a.model = a.model or preset
    a.config = model_config(Settings(model=a.model, **{name: getattr(a, name) for name in train.SIZES}))[0]
    a.batch_size = a.batch_size or 8 * (1 if a.what == "scaling" else a.gpus)


def check_processes(a, world):
    gpus = gpus_here()
    a.device = ("cuda" if gpus else "cpu") if a.device == "auto" else a.device
    reject(world > 1 and a.what == "scaling",
           "scaling starts its own processes: give python bench.py scaling, without torchrun")
    reject(world > 1 and a.gpus not in (None, world),
           f"--gpus {a.gpus}: torchrun has started {world} processes; leave it out")
    a.gpus = a.gpus or (world if world > 1 else max(1, gpus) if a.device == "cuda" else 2)
    reject(a.device == "cuda" and world == 1 and a.gpus > gpus,
           f"--gpus {a.gpus}: this machine has {gpus}; give " + (f"--gpus {gpus}" if gpus else "--device cpu"))


def check_strategies(a):
    """Set a.layouts, {strategy: Settings} of those that can run, and a.reasons, why others cannot. BadInput for one
    that --only names and that cannot run."""
    a.without = list(WITHOUT) if a.without == [] else a.without
    reject(a.without and a.comm != "ours", f"--comm {a.comm}: --without times ours; leave --comm out")
    a.repeats = a.repeats or (3 if a.quick else 7)
    batch_size = a.batch_size
    asked, (a.config, routed, twin) = a.config.experts > 0, configs_of(a.config)
    every = layouts(a.gpus, a.micro_batches, a.virtual_stages, routed.experts)
    a.configs = {name: {"experts": routed, "dense twin": twin}.get(name, a.config) for name in every}
    if a.what == "scaling":  # only what one process can run, too
        batch_size, a.only = batch_size * a.gpus, a.only or ["ddp", "zero3"]
        every = {name: every[name] for name in layouts(1, 1, 1) if name in every}
    a.layouts, a.reasons = {}, []
    for name in a.only or [name for name in every if asked or name not in ("experts", "dense twin")]:
        reject(name not in every, f"--only {name}: with {a.gpus} processes there are {', '.join(every)}")
        given = {"dtype": a.dtype, "device": a.device, "batch_size": batch_size, "micro_batches": a.accumulate,
                 "cuda_graphs": "off" if a.plain else a.cuda_graphs, "plain": a.plain}
        s = Settings(**given | every[name])
        try:
            check_layout(s, a.configs[name], 1, 1)
            a.layouts[name] = s
        except BadInput as problem:
            reject(a.only, f"--only {name}: {problem}")
            a.reasons.append(f"{name}: {problem}")
    reject(not a.layouts, f"--batch-size {a.batch_size}: no strategy can run with it; {''.join(a.reasons[:1])}")


def check_files(a):
    """Set a.found, {file: what is in it}. BadInput for files that cannot be drawn."""
    a.found, first = {}, {}
    for path in a.files:
        with (readable(lambda: path, "give files that `bench.py ... --json` or `train.py --trace` wrote"),
              open(path) as file):
            found = json.load(file)
            kind = "trace" if "traceEvents" in found and spans_of(found) else found["what"]  # ValueError: empty
        reject(kind not in ("trace", *MEASURED),
               f"{path}: there is no picture of {kind}; give files of {', '.join(MEASURED)}, or a trace")
        reject(kind in first, f"{path} would overwrite the pictures of {first.get(kind)}; give another --into folder")
        a.found[path], first[kind] = found, path
    if int(os.environ.get("RANK", "0")) == 0:
        check_folder(a.into, "--into")


def main():
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if len(sys.argv) == 1:
        print(__doc__.strip())
        return
    try:
        a = parse(sys.argv[1:])
        if not a.plain:
            fast.on()
        processes = check(a, world)
    except BadInput as problem:
        refuse("bench.py", problem, rank)
    if processes > world:
        launch.start_again(processes)
    WHAT[a.what](a)
    if dist.is_initialized():
        torch_dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        if not is_forked():  # a forked rank must return, because its launcher waits for the result
            os._exit(0)  # all is written, and Python's normal exit now and then aborts in a thread that a peer left


if __name__ == "__main__":
    main()
