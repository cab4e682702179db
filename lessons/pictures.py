"""SVG of what the code does, and of files from --json and --trace."""

import html
import itertools
import os
import sys
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as torch_dist

import collectives as dist
import kernels
import model
import parallel
import train
from further.experts import split_experts
from lessons.demos import context_steps, ring_states
from lessons.measure import of_all_ranks, reference, say
from model import PRESETS, GPTConfig
from safe.flags import Settings
from theory.clock import simulate
from theory.memory import memory_bytes


# ------------------------------------------------------------------------------------------------------------- pictures
#
# Pictures are SVG text: words, boxes, and charts made of both. Colours are of middle brightness, on no background, so
# that a picture can be read on a light page and on a dark one.

COLOURS = "#4c8dd6", "#e0883a", "#4ba36b", "#9a6fc4", "#c2577a", "#888"


def words(x, y, what, size=11, anchor="middle"):
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}">{html.escape(what)}</text>'


def boxes(colour, rectangles, opacity=1):
    """Rectangles (x, y, width, height) of one colour."""
    path = "".join(f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h{-w:.1f}z" for x, y, w, h in rectangles)
    return f'<path fill="{colour}" fill-opacity="{opacity}" d="{path}"/>'


def cells(colour, some, height=20, opacity=1):
    """Boxes (x, y, width, text) of one colour with text in them."""
    return [boxes(colour, [(x, y, width, height) for x, y, width, _ in some], opacity), '<g fill="#fff">',
            *(words(x + width / 2, y + height / 2 + 4, str(text), 10) for x, y, width, text in some), "</g>"]


def legend(y, step, some):
    """some: {text: colour}"""
    return [part for i, (text, colour) in enumerate(some.items())
            for part in (boxes(colour, [(20 + step * i, y, 10, 10)]), words(35 + step * i, y + 9, text, 11, "start"))]


def chart(title, groups):
    """Bars side by side, 1000 x 280. groups: {label: {bar: {part: value}}}; a bar is a stack of parts."""
    bars = [parts for group in groups.values() for parts in group.values()]
    kinds = {part: [] for parts in bars for part in parts}
    unit, step = 180 / max(sum(parts.values()) for parts in bars), 960 / (len(bars) + len(groups) - 1)
    out, x = [words(20, 14, title, 13, "start")], 20.0
    for label, group in groups.items():
        out.append(words(x + step * len(group) / 2, 270, label, 12))
        for bar, parts in group.items():
            y, middle, total = 240.0, x + 0.45 * step, sum(parts.values())
            for part, value in parts.items():
                y -= value * unit
                kinds[part].append((x, y, 0.9 * step, value * unit))
            out += [words(middle, y - 4, f"{total:,.0f}" if total >= 100 else f"{total:.3g}"),
                    words(middle, 253, "" if bar in parts else bar, 10)]
            x += step
        x += step
    for i, (part, rectangles) in enumerate(kinds.items()):
        x = 20 + 960 / max(5, len(kinds)) * i
        out += [boxes(COLOURS[i % len(COLOURS)], [(x, 24, 10, 10), *rectangles]), words(x + 15, 33, part, 11, "start")]
    return "\n".join(out)


def write_svg(path, height, parts):
    box = f'viewBox="0 0 1000 {height}"'
    with open(path, "w") as file:
        file.write("\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" fill="#888" {box}>',
                              *parts, "</svg>\n"]))
    say(path)


# The next pictures need no file. They call the code's own functions on all ranks, and record the calls inside where the
# results show too little. draw_x() returns (height, parts) of the picture x, and rank 0 writes it.

def draw_ring():
    states = list(zip(*of_all_ranks(ring_states())))  # [state][rank][chunk]
    n, width = len(states[0]), 1000 / len(states)
    names = ["start", *(f"reduce-scatter {s}" for s in range(n - 1)), *(f"all-gather {s}" for s in range(n - 1))]
    out = [words(width * s + width / 2, 14, name) for s, name in enumerate(names)]
    chunks, filled, cell = [], [[] for _ in range(n)], (width - 15) / n
    for s, r, c in itertools.product(range(len(states)), range(n), range(n)):
        x, y, w = width * s + 8 + cell * c, 22 + 30 * r, (cell - 3) / n
        chunks.append((x, y, n * w, 26))
        for i in range(n):
            filled[i] += [(x + w * i, y, w, 26)] * (states[s][r][c] >> i & 1)
    text = f"a row a rank, a column a chunk, a colour for each of the {n} ranks whose data the chunk holds"
    return 44 + 30 * n, [*out, boxes("#888", chunks, 0.2), *map(boxes, COLOURS, filled), words(500, 38 + 30 * n, text)]


def draw_mesh():
    """Which of 16 ranks are a group, axis by axis. Patches let `make_mesh` see 16 ranks."""
    with patch.object(dist, "get_world_size", lambda: 16), patch.object(
            parallel, "init_device_mesh", lambda device, sizes, mesh_dim_names: SimpleNamespace(
                mesh=torch.arange(16).view(sizes), mesh_dim_names=mesh_dim_names)):
        mesh = parallel.make_mesh("cpu", dp=2, tp=2, pp=2, cp=2)
    with patch.object(dist, "rows_and_columns", lambda grid: [grid]):
        grids = split_experts(mesh, 2)
    axis = {name: mesh.mesh.movedim(i, 3).flatten(0, 2).tolist() for i, name in enumerate(mesh.mesh_dim_names)}
    out = [words(222 + 49 * rank, 34, f"rank {rank}", 10) for rank in range(16)]
    for i, (name, what, groups) in enumerate((
            ("tp 2", "activations, in each layer", axis["tp"]), ("cp 2", "keys and values, in each layer", axis["cp"]),
            ("dp 2", "each its part of the batch", axis["dp"]),
            ("dp x cp", "gradients, once a step", parallel.ranks_of_replicas(mesh)),
            ("ep 2, of dp", "tokens, to their experts", [row for grid in grids for row in grid]),
            ("copies of experts", "their gradients", [column for grid in grids for column in zip(*grid)]),
            ("pp 2", "activations, between stages", axis["pp"]))):
        y = 46 + 38 * i
        out += [words(20, y + 12, name, 12, "start"), words(20, y + 26, what, 10, "start")]
        for g, ranks in enumerate(groups):
            out += cells(COLOURS[g % 5], [(200 + 49 * r, y, 45, "abcdefgh"[g]) for r in ranks], 28, 1 - g // 5 * 0.25)
    return 336, [*out, words(394, 16, "node 0", 12), words(786, 16, "node 1", 12),
                 words(590, 328, "In a row, ranks with the same letter are a group.")]


def calls_of_a_step():
    """(title, [(path, bytes)] of the messages that rank 0 sends in a step). path: the calls, ((file, function), ...),
    from train.py down to `isend`."""
    found, files = [], {module.__file__ for module in (dist, kernels, model, parallel, train)}
    tp, start = 2 - dist.get_world_size() % 2, torch_dist.batch_isend_irecv

    def watched(operations):
        frame, path = sys._getframe(1), [("torch.distributed", "isend")]
        while (code := frame.f_code) is not calls_of_a_step.__code__:
            if code.co_filename in files:  # from Python 3.11 on a method is named with its class
                path.insert(0, (os.path.basename(code.co_filename), getattr(code, "co_qualname", code.co_name)))
            frame = frame.f_back
        found.extend((path, operation.tensor.nbytes) for operation in operations if operation.op is torch_dist.isend)
        return start(operations)

    with reference():
        s = Settings(dp=dist.get_world_size() // tp, tp=tp, batch_size=dist.get_world_size(), device="cpu")
        trainer = train.Trainer(s, GPTConfig(), None, [np.zeros(1000, np.uint8)] * 2, torch.device("cpu"))
        with patch.object(torch_dist, "batch_isend_irecv", watched):
            trainer.step(0)
    return f"one step of train.py --plain --dp {s.dp} --tp {s.tp}: what rank 0 sends", found


def draw_calls():
    """The calls of a step: on the left down to the collectives, on the right from them down to `isend`."""
    def lines(calls, depth=0):
        for first in dict.fromkeys(path[0] for path, _ in calls):
            inner = [(path[1:], sent) for path, sent in calls if path[0] == first]
            yield depth, *first, [sent for path, sent in inner if not path]
            yield from lines([(path, sent) for path, sent in inner if path], depth + 1)

    title, found = calls_of_a_step()
    files, out, bottom = dict(zip(dict.fromkeys(file for path, _ in found for file, _ in path), COLOURS)), [], 0
    cuts = [[file for file, _ in path].index("collectives.py") for path, _ in found]
    for left, part in (20, lambda path, cut: path[:cut]), (560, lambda path, cut: path[cut:]):
        calls = [(part(path, cut), sent) for (path, sent), cut in zip(found, cuts)]
        for i, (depth, file, name, ends) in enumerate(lines(calls)):
            x, y, said = left + 13 * depth, 64 + 18 * i, f": {len(ends)} messages, {sum(ends):,} bytes" if ends else ""
            out += [boxes(files[file], [(x, y, 8, 12)]),
                    words(x + 14, y + 10, name.rpartition("<locals>.")[2] + said, 11, "start")]
            bottom = max(bottom, y)
    return bottom + 24, [words(20, 16, title, 12, "start"), *legend(32, 150, files), *out]


def draw_zero_stages():
    return 280, [chart("GPT-2 XL, bf16, 8 ranks, 4 sequences each, blocks recomputed: GiB of a rank", {
        f"ZeRO-{zero}": {"": {kind: n / 2**30 for kind, n in memory_bytes(
            PRESETS["gpt2-xl"], zero, 8, dtype=torch.bfloat16, recompute="block", micro_batch=4).items()}}
        for zero in range(4)})]


KINDS = {"F forward": COLOURS[0], "B backward: I and W in one": COLOURS[4], "I gradient of the input": COLOURS[1],
         "W gradient of the weights": COLOURS[2]}


def lanes(spans, unit, y):
    """A row for each rank of a Timeline's spans, `unit` wide a unit of time. A rank's odd stages are paler."""
    colours = {kind[0]: colour for kind, colour in KINDS.items()}
    for rank, row in enumerate(spans):
        yield words(20, y + 14 + 20 * rank, f"rank {rank}", 10, "start")
        alike = defaultdict(list)
        for action, start, end in row:
            cell = 80 + unit * start, y + 20 * rank, unit * (end - start) - 1, action.micro_batch
            alike[action.kind, action.stage // len(spans) % 2].append(cell)
        for (kind, odd), some in alike.items():
            yield from cells(colours[kind], some, 18, 0.7 if odd else 1)


def draw_schedules():
    """The four schedules on one time axis, for 4 ranks and 8 micro-batches. F, I and W take equally long."""
    runs = {name: simulate(lists(4, 8, 1 + (name == "interleaved"))) for name, lists in parallel.SCHEDULES.items()}
    unit = 880 / max(run.length for run in runs.values())
    out = legend(6, 230, KINDS)
    for i, (name, run) in enumerate(runs.items()):
        y, idle = 24 + 112 * i, max(run.idle) / run.length
        said = f"{name}: {run.length:g} long, {idle:.0%} idle, {max(run.peak):g} held at most"
        out += [words(20, y + 12, said, 12, "start"), *lanes(run.spans, unit, y + 20)]
    return 24 + 112 * len(runs), out


def draw_zigzag():
    """Two ways to cut a sequence over 4 ranks: who computes which scores in which step, and who waits."""
    out = []
    for y, kind, title in ((44, "", "contiguous: rank r holds chunks 2r and 2r+1"),
                           (274, "ring", "zigzag: rank r holds chunks r and 7-r")):
        start, steps = 420, context_steps(4, kind)
        out += [words(20, y - 8, title, 12, "start"),
                boxes("#888", [(20 + 40 * k, y + 22 * q, 39, 21) for q in range(8) for k in range(8)], 0.12)]
        for s, step in enumerate(steps):
            longest = max(blocks for _, _, blocks in step)
            out.append(words(start + 17 * longest, y - 8, f"step {s}"))
            for rank, (queries, keys, blocks) in enumerate(step):
                scores = [(20 + 40 * k, y + 22 * q, 39, s) for q in queries for k in keys if k <= q]
                bar = [(start, y + 44 * rank, 35 * blocks - 2, f"rank {rank}")] if blocks else []
                out += cells(COLOURS[rank], scores, 21) + cells(COLOURS[rank], bar, 34)
            start += 35 * longest
        out.append(words(420, y + 190, f"time for {(start - 420) / 35:g} blocks of scores; a rank computes "
                         f"{sum(blocks for step in steps for _, _, blocks in step) / 4:g} in the mean", 11, "start"))
    return 474, [*out, words(20, 14, "On the left scores, queries down, keys to the right: colours are ranks, numbers "
                             "steps. On the right the time that they take.", 11, "start")]


def tiles_walked(Tq, Tk, causal, rows):
    """For each program of attention_forward_kernel, the tiles (of queries, of keys) that it computes, in order."""
    last = getattr(kernels.last_key, "fn", kernels.last_key)
    with patch.object(kernels, "tl", SimpleNamespace(minimum=min)):
        return [[(m0 // rows, n0 // rows) for n0 in range(0, last(m0 + rows - 1, Tq, Tk, causal) + 1, rows)]
                for m0 in range(0, Tq, rows)]


def draw_tiles():
    rows, out = kernels.tile_rows(64), []
    for x, Tq, causal, title in ((20, 512, True, "causal"), (350, 512, False, "not causal, as in a ring"),
                                 (680, 256, True, "causal, the last 256 queries")):
        every = [(x + 38 * n, 48 + 24 * m, 36, 22) for m in range(Tq // rows) for n in range(512 // rows)]
        whole, cut = [], []
        for m, n in itertools.chain(*tiles_walked(Tq, 512, causal, rows)):
            masked = causal and (n + 1) * rows - 1 > 512 - Tq + m * rows
            (cut if masked else whole).append((x + 38 * n, 48 + 24 * m, 36, n))
        title = f"{title}: {len(whole) + len(cut)} of {len(every)} tiles"
        out += [words(x, 38, title, 12, "start"), boxes("#888", every, 0.12), *cells(COLOURS[0], whole, 22),
                *cells(COLOURS[1], cut, 22)]
    said = {"all queries see all keys": COLOURS[0], "the mask cuts the tile": COLOURS[1], "never loaded": "#888"}
    return 270, [*out, *legend(254, 330, said), words(
        20, 16, f"Tiles of {rows} queries (down) x {rows} keys (right). A row is a program: it keeps Q, sums and O, "
        "and loads K and V in this order. No score reaches memory.", 11, "start")]


def spans_of(found):
    """For each rank [(action, start, end)] of the computation in train.py's trace, from 0 to 1: the pipeline as it ran.
    """
    spans = defaultdict(list)
    for event in found["traceEvents"]:
        if event["ph"] == "X" and event["name"].split()[0] in {*"FBIW"}:
            action = parallel.Action(event["name"][0], event["args"]["stage"], event["args"]["micro_batch"])
            spans[event["tid"]].append((action, event["ts"], event["ts"] + event["dur"]))
    every = sum(spans.values(), [])
    first, last = min(start for _, start, _ in every), max(end for _, _, end in every)
    return [[(action, (start - first) / (last - first), (end - first) / (last - first)) for action, start, end in row]
            for _, row in sorted(spans.items())]


def charts_of(found):
    """(picture, title, [(group, bar, value or {part: value})]) of each chart of a --json file's rows."""
    rows = sorted(found["rows"], key=lambda row: not row.get("who", "ours").startswith("ours"))  # ours: first colour
    if found["what"] == "kernels":
        for picture, op, key, unit in (("attention", "attention ", "tflops", "TFLOP/s"),
                                       ("layer-norm", "layer norm ", "tb", "TB/s")):
            for way in "forward", "backward":
                yield picture, f"{op}{way}, {unit}", [
                    (row["op"].removeprefix(op), row["who"], row[key]) for row in rows
                    if row["op"].startswith(op) and row["way"] == way]
    elif found["what"] == "collectives":
        yield "all-reduce", "all-reduce, bus GB/s by size", [
            (f"{row['size']:,.0f} KiB", who, row[key]) for row in rows
            if row["op"] == "all_reduce" and row.get("bus", 0) > 1
            for who, key in (("ours", "bus"), ("torch", "torch_bus"))]
    elif found["what"] == "strategies":
        bars = []
        for row in rows:
            if row["strategy"] in ("ddp", "zero1", "zero2", "zero3") and "memory_by_rank" in row:
                predicted, measured = ({kind: n / 2**30 for kind, n in kinds.items()}
                                       for kinds in row["memory_by_rank"][0])
                bars += [(row["strategy"], "predicted", predicted), (row["strategy"], "measured", measured),
                         (row["strategy"], "peak", row["peak"])]
        yield "zero-memory", f"{found['model']}, GiB on rank 0: tensors (predicted, measured), peak", bars
    else:
        yield "scaling", "tokens/s a GPU, % of one GPU's", [
            (f"{row['kind']} {row['gpus']}", f"{row['strategy']} {row['who']}", row["efficiency"]) for row in rows]


def draw_file(path, found):
    """{picture: (height, parts)} of a file's rows or trace."""
    if "traceEvents" in found:
        spans = spans_of(found)
        return {"pipeline": (34 + 20 * len(spans), [*legend(6, 230, KINDS), *lanes(spans, 900, 28)])}
    charts = defaultdict(list)
    for picture, title, bars in charts_of(found):
        groups = defaultdict(dict)
        for group, bar, value in bars:
            if value:
                groups[group][bar] = value if isinstance(value, dict) else {bar: value}
        if groups:
            at = f'<g transform="translate(0 {290 * len(charts[picture])})">'
            charts[picture].append(at + chart(f"{title}; {found['hardware']}", groups) + "</g>")
        else:
            say(f"{path}: no rows for '{title}', not drawn")
    return {picture: (290 * len(parts) - 10, parts) for picture, parts in charts.items()}


def pictures(a):
    """Write SVG pictures of what the code does, and of the rows and traces in files."""
    dist.initialize("cpu")
    drawn = {draw.__name__.removeprefix("draw_").replace("_", "-"): draw() for draw in (
        draw_ring, draw_mesh, draw_calls, draw_zero_stages, draw_schedules, draw_zigzag, draw_tiles)}
    for path, found in a.found.items():
        drawn |= draw_file(path, found)
    if dist.get_rank() == 0:
        for name, (height, parts) in drawn.items():
            write_svg(os.path.join(a.into, name + ".svg"), height, parts)
