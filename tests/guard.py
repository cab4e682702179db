"""Is B as fast as A? Two commits, or two folders, beside each other on one machine.

    python tests/guard.py --rows cpu fd1f4ac HEAD                  two cores: train.py, and strategies beside PyTorch's
    python tests/guard.py --rows one /tmp/old .                    one GPU: a step of 124M and of XL, beside compiled
    python tests/guard.py --rows kernels --rounds 2 /tmp/old .     one GPU: attention, layer norm, ELU
    python tests/guard.py --rows collectives /tmp/old .            two GPUs: beside NCCL, geometric means over sizes
    python tests/guard.py --rows two --rounds 1 /tmp/old .         two GPUs: strategies
    python tests/guard.py --rows dp-xl --peers /tmp/old .          one command of that group, PyTorch's own beside ours

Only command lines and what they write are used, so modules may move between A and B. Runs alternate A B, B A, ..., so
that a slow moment of the machine hits both. The table comes last: medians (less is better), B over A, half of A's own
spread, PyTorch's own (the fastest of them) over ours, and "higher" or "lower" where every figure of B is so beside
every one of A. Nothing is started that would end after --seconds; what has fewer runs is "incomplete".
"""

import argparse
import itertools
import json
import math
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS = "bench.py strategies --repeats 5 --device "
TWO = STEPS + "cuda --gpus 2 --vocab-size 50304 --model "
# name: (group, command, PIECE). `--without PIECE`, a piece that no strategy of the command uses, makes bench.py time
# ours alone, twice, each time in a new trainer. That is cheaper than beside PyTorch's, and gives two figures a run.
# (Then nothing evens out the experts' loads first: compare them only where A and B draw the same weights.)
COMMANDS = {
    "train": ("cpu", "train.py --device cpu --steps 60", None),
    "train4": ("cpu", "train.py --device cpu --steps 60 --dp 2 --tp 2", None),
    "tiny": ("cpu", STEPS + "cpu --gpus 2 --only ddp zero1 zero2 zero3 tp 1f1b zb-h1", None),
    "one-124m": ("one", STEPS + "cuda --gpus 1 --vocab-size 50304 --model gpt2 --batch-size 32 --only one", None),
    "one-xl": ("one", STEPS + "cuda --gpus 1 --vocab-size 50304 --model gpt2-xl --batch-size 8 --only one", None),
    "kernels": ("kernels", "bench.py kernels --only attention layer_norm elu", None),
    "collectives": ("collectives", "bench.py collectives --gpus 2 --only all_reduce all_gather_into_tensor "
                    "reduce_scatter_tensor all_to_all_single", None),
    "dp-xl": ("two", TWO + "gpt2-xl --batch-size 16 --only ddp zero1 zero3", "rows"),
    "medium": ("two", TWO + "gpt2-medium --batch-size 32 --only tp tp+sp 1f1b zb-h1", "fetching"),
    "experts": ("two", TWO + "gpt2-medium --batch-size 64 --only experts", "fetching"),
    "cp": ("two", TWO + "gpt2 --seq-len 65536 --batch-size 1 --only cp", "fetching"),
}
GROUPS = list(dict.fromkeys(group for group, *_ in COMMANDS.values()))


def checkout(name, folder):
    """The folder of a checkout: `name` itself, or a copy of that commit, made in `folder`."""
    if os.path.isdir(name):
        return pathlib.Path(name).resolve()
    packed = subprocess.run(["git", "-C", ROOT, "archive", "--format=tar", name], capture_output=True)
    if packed.returncode:
        sys.exit(f"guard.py: {name} is neither a folder nor a commit: {packed.stderr.decode().strip()}")
    folder.mkdir()
    subprocess.run(["tar", "x", "-C", folder], input=packed.stdout, check=True)
    return folder


# ------------------------------------------------------------------------------------------------------------- figures

def figures_of(found):
    """{row: (our figures, those of the best of PyTorch's own)} of a --json file of bench.py. Where a row stands for
    several sizes, its figure is their geometric mean."""
    if found["what"] == "without":
        return {f"{row['strategy']}, ms": ([row["ms"], row["ms"] * row["again"]], []) for row in found["rows"]}
    sizes, took = defaultdict(lambda: ([], [])), defaultdict(dict)
    for row in found["rows"]:
        if found["what"] == "strategies":
            sizes[f"{row['strategy']}, ms"][row["who"].startswith("torch")].append(row["ms"])
        elif found["what"] == "kernels":
            took[row["op"], row["way"]][row["who"]] = row["ms"]
        for key in {"us", "ours_graph_us"} & {*row}:  # of collectives; rows of their second table have neither
            ours, peer = sizes[f"{row['op']}{', graph' * (key != 'us')}, us"]
            ours.append(row[key])
            peer.append(row["torch_us" if key == "us" else "torch_graph_us"])
    for (op, way), who in took.items():  # attention's shapes apart; one row for all widths and dtypes of the others
        ours, peer = sizes[f"{re.sub(r' causal| (?:[0-9]+ )?b?float.*', '', op)} {way}, ms"]
        ours.append(who.pop("ours"))
        peer.append(min(who.values()))
    return {row: [[statistics.geometric_mean(some)] if some else [] for some in both] for row, both in sizes.items()}


def run(command, folder, env, timeout):
    """Run a command in a checkout. Returns ({row: (our figures, PyTorch's)}, why there are none)."""
    with tempfile.TemporaryDirectory() as scratch:
        path, start = os.path.join(scratch, "rows.json"), time.perf_counter()
        words = [sys.executable, *command, *["--json", path] * (command[0] == "bench.py")]
        child = subprocess.Popen(words, cwd=folder, env=env, text=True, start_new_session=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = child.communicate(timeout=timeout)
        except BaseException as stop:  # Ctrl-C, too, must leave no ranks behind; on SIGTERM the launcher ends them
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
            if isinstance(stop, subprocess.TimeoutExpired):
                return {}, "stopped, because --seconds were over"
            raise
        if child.returncode:
            return {}, f"exit code {child.returncode}: {((err.strip() or out.strip()).splitlines() or ['-'])[-1]}"
        if command[0] == "bench.py":
            with open(path) as file:
                return figures_of(json.load(file)), ""
        losses = [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", out)[-1:]]  # B must train as A does
        return {"whole run, s": ([time.perf_counter() - start], []), "validation loss": (losses, [])}, ""


def compare(a):
    """Run the commands in turns, then print the table."""
    words = a.rows.split(",")
    names = [name for name, (group, *_) in COMMANDS.items() if name in words or group in words]
    if unknown := {*words} - {*COMMANDS, *GROUPS}:
        sys.exit(f"guard.py: --rows {','.join(unknown)}: there are {', '.join(dict.fromkeys([*GROUPS, *COMMANDS]))}")
    end, samples, runs, took, why = time.monotonic() + a.seconds, {}, defaultdict(int), {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {side: checkout(name, pathlib.Path(scratch, side)) for side, name in (("A", a.A), ("B", a.B))}
        for turn, name in itertools.product(range(a.rounds), names):
            group, line, piece = COMMANDS[name]
            command = line.split() + (["--without", piece] if piece and not a.peers else [])
            # In pairs, because one side alone compares nothing. How long the first pair takes nobody knows.
            if name in why or end - time.monotonic() < 2.1 * took.get(name, 5):
                continue
            env = dict(os.environ)
            if group in ("one", "kernels"):
                env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            for side in "AB" if turn % 2 == 0 else "BA":
                begun = time.monotonic()
                found, problem = run(command, folders[side], env, max(1, end - begun))
                took[name] = time.monotonic() - begun  # the latest, because the first one compiles kernels
                print(f"{name}, {side}, {took[name]:.0f} s: " + (problem or ", ".join(
                    f"{row} {statistics.median(ours):.4g}" for row, (ours, _) in found.items() if ours)), flush=True)
                if problem:
                    why[name] = f"{side}: {problem}"
                    break
                runs[name, side] += 1
                for row, both in found.items():
                    for kept, some in zip(samples.setdefault((name, row, side), ([], [])), both):
                        kept.extend(some)
    print_table(a, names, samples, runs, why)


def print_table(a, names, samples, runs, why):
    print(f"\nA = {a.A}, B = {a.B}\n{'':<42}{'A':>9}{'B':>9}{'B/A':>8}{'A +- %':>8}{'peer/A':>8}{'peer/B':>8}  runs")
    for name in names:
        done = f"{runs[name, 'A']}+{runs[name, 'B']}"
        for row in dict.fromkeys(row for of, row, _ in samples if of == name):
            both = [samples.get((name, row, side), ([], [])) for side in "AB"]
            (x, peer_x), (y, peer_y) = ([statistics.median(some or [math.nan]) for some in side] for side in both)
            first, second = both[0][0], both[1][0]
            apart = 50 * (max(first) - min(first)) / x if len(first) > 1 else math.nan
            verdict = "" if min(len(first), len(second)) < 2 else (
                "higher" if min(second) > max(first) else "lower" if max(second) < min(first) else "")
            cells = f"{x:9.4g}{y:9.4g}{y / x:8.3f}{apart:8.1f}{peer_x / x:8.2f}{peer_y / y:8.2f}".replace("nan", "  -")
            print(f"{name + ': ' + row:<42}{cells}  {done}  "
                  + "incomplete " * (done != f"{a.rounds}+{a.rounds}") + verdict)
        if name in why or not runs[name, "A"]:
            print(f"{name}: incomplete. {why.get(name, 'There was no time for it')}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("A", help="a commit, or a folder with a checkout")
    parser.add_argument("B", help="the same")
    parser.add_argument("--rows", default="cpu", metavar="NAME,...",
                        help=f"groups: {', '.join(GROUPS)}; or their commands: {', '.join(COMMANDS)}")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each command on each side (3)")
    parser.add_argument("--seconds", type=float, default=560, help="start nothing that would end later (560)")
    parser.add_argument("--peers", action="store_true", help="in group two, too, PyTorch's own beside ours")
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
