"""SVG of what the code does, and of a trace."""

import html
import itertools
import pathlib
import re
import statistics
from collections import defaultdict

import parallel
from further import together
from further.schedules import SCHEDULES
from lessons.bench.timing import say
from lessons.moving import fsdp_step, ring_states, ring_steps, tensor_matrices
from model import PRESETS
from safe.files import check_file
from safe.flags import Settings
from theory.clock import simulate
from theory.memory import memory_bytes


# ------------------------------------------------------------------------------------------------------------- pictures
#
# Pictures are SVG text: words and boxes. Colours are of middle brightness, on no background, so
# that a picture can be read on a light page and on a dark one. A picture is (height, [parts]), 1000 wide.

COLOURS = "#4c8dd6", "#e0883a", "#4ba36b", "#9a6fc4", "#c2577a", "#888"


def words(x, y, what, size=11, anchor="middle"):
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}">{html.escape(what)}</text>'


def box(x, y, width, height, colour):
    return f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" fill="{colour}"/>'


def legend(y, step, some):
    """some: {text: colour}"""
    for i, (text, colour) in enumerate(some.items()):
        yield box(20 + step * i, y, 10, 10, colour) + words(35 + step * i, y + 9, text, anchor="start")


def chunks(states, s, left, width):
    """What each rank holds of each chunk in state s of a ring: a colour for each rank whose data is in it."""
    n = len(states[s])
    cell = (width - 15) / n
    room, stripe = cell - 3, (cell - 3) / n
    for r, c in itertools.product(range(n), range(n)):
        x, y, held = left + cell * c, 22 + 30 * r, states[s][r][c]
        yield box(x, y, room, 26, "#8883")
        yield from (box(x + stripe * i, y, stripe, 26, COLOURS[i]) for i in range(n) if held >> i & 1)
        if s and held != states[s - 1][r][c]:
            yield box(x, y + 27, room, 2, "#888")


# The next pictures need no file. They call the code's own functions, the ring's on ranks that are threads.

def draw_ring():
    states = [*zip(*together.run(4, ring_states))]  # [state][rank][chunk]
    n, width = len(states[0]), 960 / len(states)
    names = ["start", *(f"{half} {s}" for half in ("reduce-scatter", "all-gather") for s in range(n - 1))]
    out = [words(40 + width * s + width / 2, 14, name) for s, name in enumerate(names)]
    out += [words(38, 39 + 30 * r, f"rank {r}", 10, "end") for r in range(n)]
    for s in range(len(states)):
        out += chunks(states, s, 48 + width * s, width)
    text = (f"a column a chunk, 0 to {n - 1}; a colour for each of the {n} ranks whose data it holds; "
            "a line under what arrived")
    return 44 + 30 * n, [*out, words(520, 38 + 30 * n, text)]


def draw_zero_stages():
    """Bars side by side."""
    stages = [memory_bytes(PRESETS["gpt2-xl"], Settings(
        dp=8, zero=zero, dtype="bf16", recompute="block", batch_size=32)) for zero in range(4)]
    colours = dict(zip(stages[0], COLOURS))
    unit, step, x = 180 / max(max(kinds.values()) for kinds in stages), 960 / 19, 20.0  # 16 bars and 3 gaps
    title = "GPT-2 XL, bf16, 8 ranks, 4 sequences each, blocks recomputed: GiB of a rank"
    out = [words(20, 14, title, 13, "start"), *legend(24, 960 / 5, colours)]
    for zero, kinds in enumerate(stages):
        out.append(words(x + 2 * step, 260, f"ZeRO-{zero}", 12))
        for kind, n in kinds.items():
            out.append(box(x, 240 - n * unit, 0.9 * step, n * unit, colours[kind]))
            out.append(words(x + 0.45 * step, 236 - n * unit, f"{n / 2**30:.3g}"))
            x += step
        x += step
    return 280, out


KINDS = {"F forward": COLOURS[0], "B backward: I and W in one": COLOURS[4], "I gradient of the input": COLOURS[1],
         "W gradient of the weights": COLOURS[2]}


def lanes(spans, unit, y):
    """A row for each rank of a Timeline's spans, `unit` wide a unit of time. A rank's odd stages are paler. A row has
    hundreds of cells, so those of one colour are one path: dashes as thick as a row."""
    colours = {kind[0]: colour for kind, colour in KINDS.items()}
    for rank, row in enumerate(spans):
        middle, dashes, numbers = y + 9 + 20 * rank, defaultdict(str), ""
        for action, start, end in row:
            x, width = 80 + unit * start, unit * (end - start) - 1
            pale = "b3" if action.stage // len(spans) % 2 else ""  # of 255, as hexadecimal digits
            dashes[colours[action.kind] + pale] += f"M{x:.4g} {middle}h{width:.4g}"
            numbers += f'<tspan x="{x + width / 2:.0f}">{action.micro_batch}</tspan>'
        yield words(20, middle + 5, f"rank {rank}", 10, "start")
        yield from (f'<path d="{path}" stroke="{colour}" stroke-width="18"/>' for colour, path in dashes.items())
        yield f'<text y="{middle + 4}" font-size="10" text-anchor="middle" fill="#fff">{numbers}</text>'


def draw_schedules():
    """The schedules on one time axis, for 4 ranks and 8 micro-batches. F, I and W take equally long."""
    runs = {name: simulate(lists(4, 8, 1 + (name == "interleaved"))) for name, lists in SCHEDULES.items()}
    unit = 880 / max(run.length for run in runs.values())
    out = [*legend(6, 230, KINDS)]
    for i, (name, run) in enumerate(runs.items()):
        y, idle = 24 + 112 * i, max(run.idle) / run.length
        said = f"{name}: {run.length:g} long, {idle:.0%} idle, {max(run.peak):g} held at most"
        out += [words(20, y + 12, said, 12, "start"), *lanes(run.spans, unit, y + 20)]
    return 24 + 112 * len(runs), out


def spans_of(trace, unit=1.0):
    """As a Timeline's spans, from the first action's start: the pipeline as it ran, from train.py's --trace. unit: that
    of the times, in microseconds."""
    events = [event for event in trace["traceEvents"] if event["name"].split()[0] in {*"FBIW"}]
    first = min(event["ts"] for event in events)
    spans = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["tid"], event["ts"])):  # a rank's
        action, start = parallel.Action(event["name"][0], **event["args"]), event["ts"] - first
        spans[event["tid"]].append((action, unit * start, unit * (start + event["dur"])))
    return [*spans.values()]


def costs_of(spans):
    """[F, I, W]: medians of what they take. A B that ran whole counts half as I, half as W."""
    times = defaultdict(list)
    for action, start, end in sum(spans, []):
        times[action.kind].append(end - start)
    half = statistics.median(times.pop("B", [0])) / 2
    return [statistics.median(times.get(kind, [half])) for kind in "FIW"]


def draw_trace(found):
    spans = spans_of(found)
    length = max(end for row in spans for *_, end in row)
    return 34 + 20 * len(spans), [*legend(6, 230, KINDS), *lanes(spans, 900 / length, 28)]


# Frames of pictures that pages step through: [(height, parts, what happens)].

def ring_frames():
    states = [*zip(*together.run(4, ring_states))]
    ranks = [words(60, 39 + 30 * r, f"rank {r}", 12, "end") for r in range(4)]
    names = [words(190 + 236 * c, 14, f"chunk {c}", 12) for c in range(4)]
    return [(150, [*ranks, *names, *chunks(states, s, 70, 960)], said) for s, said in enumerate(ring_steps(4))]


ZERO_STEPS = {
    "forward of": "runs forward", "backward of": "runs backward: all of its gradients are here",
    "gather": "is gathered: the other ranks' quarters are on their way", "wait for": "has arrived",
    "free": "is freed, but for rank 0's own quarter",
    "scatter": "is reduce-scattered: of its gradients rank 0 keeps the sum of its own quarter"}


def zero_frames():
    """What rank 0 of four keeps of each unit in a step of ZeRO-3: a quarter, or while it is needed the whole. Pale is
    what is on its way."""
    events = []
    [units] = together.run(1, lambda: fsdp_step(lambda *event: events.append(event)))
    kept = {kind: dict.fromkeys(units, n) for kind, n in (("parameters", 1), ("gradients", 0), ("optimizer", 1))}
    left_after = {"gather": 4, "free": 1, "backward of": 4, "scatter": 1}  # how many quarters
    frames, coming = [], ""
    for what, unit in events:
        kind = "gradients" if what in ("backward of", "scatter") else "parameters"
        if unit in units:  # norms have vectors alone, which stay whole
            kept[kind][unit] = left_after.get(what, kept[kind][unit])
        coming = {"gather": unit, "wait for": ""}.get(what, coming)
        out = [words(192 + 176 * x, 16, name, 15 if name == unit else 11) for x, name in enumerate(units)]
        for i, (kind, quarters) in enumerate(kept.items()):
            out.append(words(100, 44 + 36 * i, kind, 12, "end"))
            for x, (name, n) in enumerate(quarters.items()):
                pale = "66" if name == coming and kind == "parameters" else ""
                out += [box(112 + 176 * x, 26 + 36 * i, 160, 28, "#8883"),
                        box(112 + 176 * x, 26 + 36 * i, 40 * n, 28, COLOURS[i] + pale)]
        frames.append((140, out, f"{unit} {ZERO_STEPS[what]}"))
    return frames


TENSOR_STEPS = {  # the newest matrix: what happens
    "A": "f does nothing forward: both ranks have the same X. A is cut by columns, so each rank has half of them",
    "X A": "each rank multiplies X with its columns, and gets its columns of X A",
    "Z": "GeLU works on each number, so on these columns, too: nothing is sent",
    "B": "B is cut by rows, as many as Z has columns",
    "term of Y": "each product has the shape of Y, but is one term of it: the two differ",
    "Y": "g adds the terms, an all-reduce: both ranks have the same Y",
    "dY": "backward: g does nothing, because each term's gradient is dY",
    "dZ": "dY times B's rows, transposed: the gradient of this rank's columns",
    "d(X A)": "back through GeLU, number by number",
    "term of dX": "each rank knows what its columns of A make of dX: one term of it",
    "dX": "f adds the terms, an all-reduce: both ranks have the same dX"}


def tensor_frames():
    """Two ranks' matrices, step by step. Blue is above 0, orange below, pale is near 0."""
    ranks = together.run(2, tensor_matrices)
    names = [*ranks[0]]
    frames = []
    for newest, said in TENSOR_STEPS.items():
        out = [words(60, 60 + 100 * r, f"rank {r}", 12, "end") for r in range(2)]
        for (r, matrices), (i, name) in itertools.product(enumerate(ranks), enumerate(names[:names.index(newest) + 1])):
            left, y = 80 + 77 * i, 22 + 100 * r
            out.append(words(left + 32, y - 6, name, 13 if name == newest else 10))
            most = max(abs(number) for row in matrices[name] for number in row)
            for (k, row), j in itertools.product(enumerate(matrices[name]), range(4)):
                strength = f"{round(255 * abs(row[j]) / most):02x}"
                out.append(box(left + 16 * j, y + 16 * k, 15, 15, COLOURS[row[j] < 0] + strength))
        frames.append((210, out, said))
    return frames


FRAME = '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" fill="#888" viewBox="0 0 1000 '


def svg_of(height, parts):
    return "\n".join([f'{FRAME}{height}">', *parts, "</svg>"]) + "\n"


def check_picture(path, flag):
    """BadInput unless a picture can be written there."""
    check_file(path, flag, re.escape(FRAME.encode()))


def write_rows(path, left, head, rows):
    """rows: {name: [parts]}, their y from 0; names end at `left`."""
    parts = [*head]
    for i, (name, row) in enumerate(rows.items()):
        parts += [f'<g transform="translate(0 {28 + 20 * i})">', words(left, 12, name, 11, "end"), *row, "</g>"]
    pathlib.Path(path).write_text(svg_of(36 + 20 * len(rows), parts))


DRAWN = {"ring": draw_ring, "zero-stages": draw_zero_stages, "schedules": draw_schedules}


def pictures(a):
    """Write SVG pictures of what the code does, and of a trace."""
    ours = {name: draw() for name, draw in DRAWN.items()}
    for name, (height, parts) in (ours | a.drawn).items():
        path = pathlib.Path(a.into, f"{name}.svg")
        path.write_text(svg_of(height, parts))
        say(str(path))
