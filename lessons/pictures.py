"""SVG of what the code does, and of a trace."""

import html
import itertools
import pathlib
import re
import statistics
from collections import defaultdict

import parallel
from further import together
from further.lists import parse
from further.schedules import SCHEDULES
from lessons.bench.timing import say
from lessons.moving import ring_states, stopped, text_of
from model import PRESETS
from parallel import ScheduleError
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


def draw_explore():
    """An edit in `python -m lessons explore`, step by step: from 1F1B to ZB-H1, for 3 ranks and 4 micro-batches."""
    split = re.sub(r"B(\d)", r"I\1 W\1", text_of(parallel.one_f_one_b(3, 4)))
    steps = {"1F1B": text_of(parallel.one_f_one_b(3, 4)),
             "every B becomes I and W: the stage before waits for I alone": split,
             "W0 of rank 2 is dragged before I0": split.replace("rank 2  F0 I0 W0", "rank 2  F0 W0 I0"),
             "each W waits until its rank has nothing else to do, which is ZB-H1": text_of(SCHEDULES["zb-h1"](3, 4, 1))}
    out = [*legend(6, 230, KINDS)]
    for i, (what, text) in enumerate(steps.items()):
        y = 30 + 100 * i
        try:
            run = simulate(parse(text))
            spans, said, stops = run.spans, f"{run.length:g} long, {max(run.idle):g} of it idle", {}
        except ScheduleError as error:
            lists, stops = [[a for a in actions if a.kind in "FBIW"] for actions in error.lists], stopped(error)["at"]
            spans, said = [[(a, j, j + 1) for j, a in enumerate(actions)] for actions in lists], "a deadlock"
        out += [words(20, y + 12, f"{i + 1}. {what}: {said}", 14, "start"), *lanes(spans, 48, y + 22)]
        out += [f'<rect x="{80 + 48 * at}" y="{y + 22 + 20 * rank}" width="47" height="18" fill="none" '
                'stroke="#e03b2b" stroke-width="4"/>' for rank, at in stops.items()]
    return 30 + 100 * len(steps), out


def spans_of(trace):
    """As a Timeline's spans, in microseconds from the first action's start: the pipeline as it ran, from train.py's
    --trace."""
    events = [event for event in trace["traceEvents"] if event["name"].split()[0] in {*"FBIW"}]
    first = min(event["ts"] for event in events)
    spans = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["tid"], event["ts"])):  # a rank's
        action, start = parallel.Action(event["name"][0], **event["args"]), event["ts"] - first
        spans[event["tid"]].append((action, start, start + event["dur"]))
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


FRAME = '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" fill="#888" viewBox="0 0 '


def svg_of(height, parts, width=1000):
    return "\n".join([f'{FRAME}{width} {height}">', *parts, "</svg>"]) + "\n"


def check_picture(path, flag):
    """BadInput unless a picture can be written there."""
    check_file(path, flag, re.escape(FRAME.encode()))


def write_rows(path, left, head, rows):
    """rows: {name: [parts]}, their y from 0; names end at `left`."""
    parts = [*head]
    for i, (name, row) in enumerate(rows.items()):
        parts += [f'<g transform="translate(0 {28 + 20 * i})">', words(left, 12, name, 11, "end"), *row, "</g>"]
    pathlib.Path(path).write_text(svg_of(36 + 20 * len(rows), parts))


DRAWN = {"ring": draw_ring, "zero-stages": draw_zero_stages, "schedules": draw_schedules, "explore": draw_explore}


def pictures(a, _):
    """Write SVG pictures of what the code does, and of a trace."""
    ours = {name: draw() for name, draw in DRAWN.items()}
    for name, (height, parts) in (ours | a.drawn).items():
        path = pathlib.Path(a.into, f"{name}.svg")
        path.write_text(svg_of(height, parts))
        say(str(path))
