"""Measures this code beside PyTorch's own and beside the lecture's formulas:

    python bench.py kernels               every kernel beside eager, compiled, SDPA's backends, and the roofline
    python bench.py lessons               lectures 5 and 6: each lesson's ways timed
    python bench.py collectives           time and bandwidth by size; bytes sent against the formula
    python bench.py strategies            one GPT step under every strategy: speed, memory, traffic, overlap, bubble
    python bench.py plan --gpus 64        no GPU needed: layouts that fit, their predicted time, what limits each
    python bench.py optimizers            a step of AdamW and of Muon alone
    python bench.py picotron --folder F   the same Llama, the same step, in picotron

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
import itertools
import os
import sys

import torch
import torch.distributed as torch_dist

HERE = os.path.dirname(os.path.realpath(__file__))
if HERE not in sys.path:  # PYTHONSAFEPATH leaves it out
    sys.path.insert(0, HERE)

import collectives as dist
import kernels
from fast import edition
from fast.recorded import RecordedGraph
from further.kinds import resized
from further.refusals import check_numbers
from lessons.bench.optimizers import KINDS, optimizers
from lessons.bench.picotron import picotron
from lessons.bench.rates import BUS, calls_of, load_machine, sent_in
from lessons.bench.strategies import dense_twin, layouts, pieces, strategies
from lessons.bench.timing import (
    interleaved, of_all_ranks, ROWS, say, seconds_of, Table, traffic_of, write_json)
from lessons.gpu import LESSONS
from lessons.kernels import CASES, Size
from lessons.plan import plan
from safe import launch
from safe.files import check_file
from safe.flags import (
    check_layout, checked_use, dashed, gpus_here, model_config, Parser, refuse, Settings, SIZES)
from safe.huggingface import read_config
from safe.launch import is_forked
from further.bad_input import BadInput, reject
from theory.speed import MACHINES


# ---------------------------------------------------------------------------------------- kernels, lessons, collectives

def measure_kernels(a, device):
    checked_use("triton")  # ours or an error
    n, side, repeats = (1 << 28, 8192, 10) if device.type == "cuda" and not a.quick else (1 << 12, 64, 2)
    x, y = torch.zeros(2, n, device=device)
    m = torch.randn(side, side, device=device).bfloat16()
    ceilings = seconds_of({"copy": (y.copy_, [x]), "matmul": (torch.matmul, [m, m])}, device, repeats)
    hbm = 2 * x.nbytes / ceilings["copy"][0]
    peak = 2 * side**3 / ceilings["matmul"][0]
    del x, y, m
    say(f"copy {hbm / 1e12:.2f} TB/s, bf16 product of {side} x {side} {peak / 1e12:.0f} TFLOP/s. The roofline is "
        f"the longer time: bytes at the first rate, or FLOPs at the second\n"
        f"to see what torch.compile has written: TORCH_LOGS=output_code python bench.py kernels --only elu")
    table = Table("TB/s: the fewest bytes that must move, over seconds", {
        "op": "operation:<30", "way": "way:<8", "who": "who:<16", "ms": "ms:>9.3f", "tb": "TB/s:>6.2f",
        "tflops": "TFLOP/s:>8.0f", "share": "% of roofline:>13.0f"}, device)
    for case in itertools.chain(*(CASES[name](Size(device, torch.bfloat16, n)) for name in a.only)):
        x = case.inputs[0]
        name = f"{case.name} {str(x.dtype)[6:]}"
        for who, seconds in seconds_of(case.who(), device, repeats).items():
            for way, t, passes, flops in zip(("forward", "backward"), seconds, case.passes, case.flops):
                moved = passes * x.nbytes
                table.row(op=name, way=way, who=who, ms=1e3 * t, tb=moved / t / 1e12,
                          tflops=flops / t / 1e12 if flops else None, share=100 * max(moved / hbm, flops / peak) / t)
        torch._dynamo.reset()
    write_json(a, device, table)


def lessons(a, device):
    kernels.use("triton" if on_triton(a) else "auto")
    n, side, repeats = (1 << 12, 64, 2) if a.quick else (1 << 28, 8192, 10) if a.device == "cuda" else (1 << 24, 512, 5)
    table = Table("Lectures 5 and 6, measured: how many times faster than the lesson's first way, with how many times "
                  "fewer bytes", {
        "lesson": "lesson:<11", "says": "the lecture:<46", "way": "way:<17", "ms": "ms:>10.3f",
        "faster": "faster:>9.2f", "fewer": "fewer:>6.2f", "read": "read:<31"}, device)
    for name in a.only:
        lesson = LESSONS[name]
        ways = lesson.ways(device, n, side)  # {way: (function, inputs, bytes)}
        took = seconds_of({way: parts[:2] for way, parts in ways.items()}, device, repeats)
        first = next(iter(ways))
        for way, (*_, moved) in ways.items():
            table.row(lesson=name, says=lesson.says if way == first else "", way=way, ms=1e3 * took[way][0],
                      read=lesson.read, faster=took[first][0] / took[way][0], fewer=ways[first][2] / moved)
    write_json(a, device, table)


GRAPHED = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"  # timed from a CUDA graph, too


def collectives(a, device):
    dist.use(None, a.comm or "ours")
    say(f"{a.gpus} processes, {torch_dist.get_backend()}")
    table = Table("float32; times are the slowest rank's; bytes sent by all ranks together", {
        "op": "collective:<22", "size": "KiB:>9,.0f", "us": "ours us:>10,.0f", "torch_us": "torch us:>10,.0f",
        "ours_graph_us": "ours graph:>10,.0f", "torch_graph_us": "torch graph:>11,.0f", "bus": "bus GB/s:>8.2f",
        "torch_bus": "torch bus:>9.2f", "counted": "bytes sent:>14,", "formula": "formula:>14,"}, device)
    logs = range(10, 21, 5) if a.quick else range(10, 31 if device.type == "cuda" else 25, 2)
    for op in a.only:
        for log in logs:
            table.row(**measure_collective(op, 1 << log, a, device))
    write_json(a, device, table)


def measure_collective(op, size, a, device):
    """A row."""
    calls, count = calls_of(op, size, device)
    if device.type == "cuda" and a.comm in (None, "ours") and op in GRAPHED:
        for who, column in (("us", "ours_graph_us"), ("torch_us", "torch_graph_us")):
            calls[who]()  # what a first call sets up cannot be recorded
            calls[column] = RecordedGraph(calls[who]).replay
    seconds = interleaved(calls, device, 3 if a.quick else 7, calls=max(1, min(20, (1 << 24) // size)))
    dist.reset_traffic()
    calls["us"]()
    bus = 4e-9 * count * BUS[op](a.gpus)
    return {"op": op, "size": count / 256, **{who: 1e6 * took for who, took in seconds.items()},
            "bus": bus / seconds["us"], "torch_bus": bus / seconds["torch_us"],
            "counted": sum(of_all_ranks(traffic_of(op).bytes)),
            "formula": sum(of_all_ranks(sent_in(dist.link_of(None), op, count, 4)))}


# ---------------------------------------------------------------------------------------------------------------- flags

WHAT = {"kernels": measure_kernels, "lessons": lessons, "collectives": collectives, "strategies": strategies,
        "plan": plan, "optimizers": optimizers, "picotron": picotron}
ON_RANKS = "collectives", "strategies", "optimizers", "picotron"
MODEL = f"arch model {' '.join(SIZES)} dtype"
TAKES = {  # the flags of each command: those of FLAGS, and train.py's
    "kernels": "json quick only device",
    "lessons": "json quick only device",
    "collectives": "json gpus quick only device comm",
    "strategies": f"json gpus quick only repeats without device {MODEL} batch_size micro_batches recompute "
                  "recompute_blocks loss_chunk cuda_graphs",
    "plan": f"json gpus machine top {MODEL} batch_size init_from",
    "optimizers": f"json gpus quick only repeats device {MODEL}",
    "picotron": f"json gpus quick repeats folder device {MODEL} batch_size micro_batches"}
FLAGS = {
    "json": dict(help="write the rows there, with hardware, versions, commit", default="", metavar="FILE"),
    "gpus": dict(help="processes, in plan GPUs; left out, all GPUs, on the CPU 2, in plan 8", type=int),
    "quick": dict(help="tiny sizes, few repeats: shows only that it works", action="store_true"),
    "only": dict(help="which of the command's rows; left out, all (experts, dense twin are there with --experts)",
                 nargs="+", metavar="NAME"),
    "repeats": dict(help="timed runs of each step; left out, 7, but 3 with --quick", type=int),
    "without": dict(help="time ours without these pieces of fast/, too, one at a time; no names: all of "
                         f"{', '.join(pieces())}", nargs="*", choices=[*pieces()], metavar="PIECE", default=()),
    "folder": dict(help="a clone of picotron", required=True),
    "machine": dict(help=f"{', '.join(MACHINES)} (the default), or a file that `strategies --json` wrote",
                    default="h200"),
    "top": dict(help="layouts to print (default: 15)", type=int, default=15)}


def parse(words):
    parser = Parser(description="What the lecture predicts, what we measure, what PyTorch's own does.",
                          allow_abbrev=False)
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT", help=" | ".join(WHAT))
    of_train = {field.name: field for field in dataclasses.fields(Settings)}
    for what, names in TAKES.items():
        sub = whats.add_parser(what, allow_abbrev=False)
        for name in names.split():
            more = FLAGS.get(name) or {"type": of_train[name].type, **of_train[name].metadata}  # None: left out
            sub.add_argument(dashed(name), **more)
    others = argparse.Namespace(gpus=1, repeats=1, top=1, json="", only=[], init_from=None)  # no flags there
    return parser.parse_args(words, others)


def settings(a, **more):
    """train.py's Settings, with the flags that were given."""
    names = [name for name in TAKES[a.what].split() if name not in FLAGS and getattr(a, name) is not None]
    return Settings(**{name: getattr(a, name) for name in names} | more)


def on_triton(a):
    return a.device == "cuda" or kernels.INTERPRETED


def check(a, world):
    """Fill in flags left out; BadInput before any process starts. Returns the number of processes needed."""
    if a.json:
        check_file(a.json, "--json", ROWS)
    for name in "gpus", "repeats", "top":
        reject(getattr(a, name) is not None and getattr(a, name) < 1, f"--{name} {getattr(a, name)}: give 1 or more")
    if a.what == "plan":
        a.gpus = a.gpus or 8
        a.device = "cuda"
        check_model(a, "gpt2-xl")
        a.machine = load_machine(a)
        return 1
    check_processes(a, world)
    a.repeats = a.repeats or (3 if a.quick else 7)
    if a.what in ("strategies", "optimizers", "picotron"):
        check_model(a, "gpt2" if a.device == "cuda" and not a.quick else "tiny")
    checks = {"strategies": check_strategies, "picotron": check_picotron, "optimizers": check_optimizers}
    checks.get(a.what, check_names)(a)
    return a.gpus if a.what in ON_RANKS else 1


def check_names(a):
    able = [name for name, lesson in LESSONS.items() if on_triton(a) or not lesson.on_triton]
    names = {"kernels": CASES, "collectives": BUS, "lessons": able, "optimizers": KINDS}[a.what]
    a.only = a.only or [*names]
    for name in a.only:
        reject(name not in names, f"--only {name}: there are {', '.join(names)} with --device {a.device}")
    reject(a.what == "kernels" and not on_triton(a),
           "--device cpu: kernels are Triton's and want a GPU; with TRITON_INTERPRET=1, --quick works")
    reject(a.what == "collectives" and a.gpus == 1, "--gpus 1: one process has nobody to send to; give --gpus 2")


def check_model(a, preset):
    a.dtype = a.dtype or ("bf16" if a.device == "cuda" else "fp32")
    reject(a.dtype == "fp8" and a.what != "strategies", "--dtype fp8 is for strategies: give --dtype bf16")
    reject(a.init_from and a.model, f"--model {a.model} beside --init-from: leave one of them out, e.g. --model")
    a.model = a.model or (preset if a.arch != "llama" or preset == "tiny" else "1b")
    check_numbers(settings(a))
    a.config, _ = model_config(settings(a), open_folder=read_config)
    if a.what != "optimizers":
        a.batch_size = a.batch_size or 8 * a.gpus


def check_optimizers(a):
    check_names(a)
    a.layouts = {name: checked(a, a.config, dp=a.gpus, zero=int(a.gpus > 1), optimizer=name, batch_size=a.gpus)
                 for name in a.only}


def checked(a, config, **layout):
    """The Settings of a layout that can run in fast/, else BadInput."""
    s = settings(a, fast="on", **layout)
    check_layout(s, config, 1, 1)
    return s


def check_picotron(a):
    reject(not os.path.isfile(os.path.join(a.folder, "train.py")), f"--folder {a.folder}: no train.py is there; get it "
           "by `git clone https://github.com/huggingface/picotron`")
    c = a.config
    reject(c.arch != "llama" or c.experts or c.tied or c.qk_norm or c.qkv_bias or c.heads_width != c.n_embd,
           "picotron trains a Llama: give --arch llama")
    a.layout = checked(a, c, dp=a.gpus)


def check_processes(a, world):
    gpus = gpus_here()
    if a.device in (None, "auto"):
        a.device = "cuda" if gpus else "cpu"
    reject(world > 1 and a.gpus not in (None, world), f"torchrun has started {world} processes: leave --gpus out")
    a.gpus = a.gpus or (world if world > 1 else max(1, gpus) if a.device == "cuda" else 2)
    reject(a.device == "cuda" and world == 1 and a.gpus > gpus,
           f"--gpus {a.gpus}: this machine has {gpus}; give " + (f"--gpus {gpus}" if gpus else "--device cpu"))


def check_strategies(a):
    """Set a.layouts, {strategy: Settings} of those that can run, and a.reasons, why others cannot. BadInput for one
    that --only names and that cannot run."""
    a.without = [*pieces()] if a.without == [] else a.without
    routed = a.config
    a.config = resized(routed, experts=0)
    every = layouts(a.gpus, a.micro_batches or 8, routed.experts)
    a.configs = dict.fromkeys(every, a.config)
    if routed.experts:
        a.configs |= {"experts": routed, "dense twin": dense_twin(routed)}
    a.layouts = {}
    a.reasons = []
    for name in a.only or every:
        reject(name not in every, f"--only {name}: with {a.gpus} processes there are {', '.join(every)}" + (
               "" if routed.experts else "; with --experts 8 also experts and dense twin"))
        try:
            a.layouts[name] = checked(a, a.configs[name], **every[name])
        except BadInput as problem:
            reject(a.only, f"--only {name}: {problem}")
            a.reasons.append(f"{name}: {problem}")
    reject(not a.layouts, f"--batch-size {a.batch_size}: no strategy can run with it; {''.join(a.reasons[:1])}")


def main():
    if len(sys.argv) == 1:
        print(__doc__.strip())
        return
    try:
        world = launch.started()
        a = parse(sys.argv[1:])
        edition.on()
        processes = check(a, world)
    except BadInput as problem:
        refuse("bench.py", problem)
    if processes > world:
        launch.start_again(processes)
    if a.what not in ON_RANKS:
        WHAT[a.what](a, torch.device(a.device))
        return
    WHAT[a.what](a, dist.initialize(a.device, rendezvous=launch.settled_rendezvous))
    torch_dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    if not is_forked():  # a forked rank must return, because its launcher waits for the result
        os._exit(0)  # all is written, and Python's normal exit now and then aborts in a thread that a peer left


if __name__ == "__main__":
    main()
