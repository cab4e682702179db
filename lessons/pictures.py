"""SVG of what the code does, and of files from --json and --trace."""

import contextlib
import functools
import html
import itertools
import os
import re
import sys
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as torch_dist

import collectives as dist
import further.experts
import kernels
import model
import parallel
import train
from fast.overlap import EarlyReducer
from further.experts import split_experts
from further.sequence import sequence_parallel
from lessons.demos import context_steps, ring_states
from lessons.measure import of_all_ranks, patched, plain_rows, reference, say
from model import GPT, PRESETS, GPTConfig
from safe.flags import Settings
from theory.clock import draw_svg, simulate, Timeline
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


def write_svg(folder, name, height, parts):
    path, box = os.path.join(folder, name + ".svg"), f'viewBox="0 0 1000 {height}"'
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


def draw_buckets():
    """DDP's buckets in one backward, drawn from recorded calls of EarlyReducer's methods."""
    events, out = [], []

    def watched(name):
        def call(reducer, what, *more):
            events.append((name, reducer.bucket_of.get(what, what)))
            return method(reducer, what, *more)
        method = getattr(EarlyReducer, name)
        return call

    with patch.multiple(EarlyReducer, **{name: watched(name) for name in ("computed", "start", "store")}):
        net = parallel.DDP(GPT(GPTConfig(n_layer=2)), bucket_mb=0.3)
        net(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
        net.finish_grad_sync()
    names, step = {param: name for name, param in net.module.named_parameters()}, 790 / len(events)
    backward = 190 + step * (1 + max(i for i, (name, _) in enumerate(events) if name == "computed"))
    for b, bucket in enumerate(net.buckets):
        y, (came, (left,), (there,)) = 62 + 40 * b, (
            [190 + step * i for i, event in enumerate(events) if event == (what, bucket)]
            for what in ("computed", "start", "store"))
        out += [words(20, y + 10, f"bucket {b}", 11, "start"),
                words(20, y + 22, f"{len(bucket.params)} tensors from {names[bucket.params[0]]}", 9, "start"),
                boxes(COLOURS[0], [(came[0], y, left - came[0], 22)], 0.35),
                boxes(COLOURS[1], [(left, y, there - left, 22)]), boxes(COLOURS[2], [(there, y, 980 - there, 22)]),
                boxes(COLOURS[0], [(x + 1, y, step - 2, 22) for x in came])]
    said = "a gradient comes, its bucket fills", "the bucket is under way", "the average is in .grad"
    return 62 + 40 * len(net.buckets), [
        *legend(8, 270, dict(zip(said, COLOURS))), *out,
        boxes("#888", [(backward, 34, 1, 40 * len(net.buckets) + 22)]),
        words(backward - 6, 46, "backward: events in order, not on a clock", 11, "end"),
        words(backward + 6, 46, "finish_grad_sync", 11, "start")]


def draw_zero_stages():
    return 280, [chart("GPT-2 XL, bf16, 8 ranks, 4 sequences each, blocks recomputed: GiB of a rank", {
        f"ZeRO-{zero}": {"": {kind: n / 2**30 for kind, n in memory_bytes(
            PRESETS["gpt2-xl"], zero, 8, dtype=torch.bfloat16, recompute="block", micro_batch=4).items()}}
        for zero in range(4)})]


def draw_f_and_g():
    """In order, the outputs of a block's layers, in backward their gradients, and the collectives of f and g."""
    n, run, out, y = dist.get_world_size(), dist.Link.run, [], 30
    for title, cut, tokens in (("tensor parallelism", parallel.tensor_parallel, 4 * n),
                               ("with sequence parallelism", sequence_parallel, 4)):
        events = {"forward": [], "backward": []}  # (a layer or collective, whether of all T tokens, its width)

        def watched(link, name, *more, events=events):
            way = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
            events[way].append((name.removesuffix("_tensor").removesuffix("_into"), True, "C"))
            return run(link, name, *more)

        def seen(layer, x, y, name, events=events):
            what = name, y.shape[1] > 4, f"{y.shape[2] // 8}C/N" if name.endswith(("c_attn", "c_fc")) else "C"
            events["forward"].append(what)
            y.register_hook(lambda grad: events["backward"].append(what))

        with reference(), patch.object(dist.Link, "run", watched):
            cut(net := GPT(GPTConfig(n_layer=1, n_head=n, n_embd=8 * n, seq_len=4 * n)), torch_dist.group.WORLD)
            for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
                net.h["0"].get_submodule(name).register_forward_hook(functools.partial(seen, name=name))
            net.h["0"](torch.zeros(1, tokens, 8 * n, requires_grad=True)).sum().backward()
        for way, some in events.items():
            out.append(words(20, y + 14, f"{title}, {way}", 12, "start"))
            for i, (name, whole, width) in enumerate(some):
                step, height = 960 / len(some), 60 if whole else 15
                out += [boxes(COLOURS[hasattr(dist, name)], [(20 + step * i, y + 40, step - 6, height)]),
                        words(17 + step * (i + 0.5), y + 34, f"{'T' if whole else 'T/N'} x {width}", 10),
                        words(17 + step * (i + 0.5), y + 113, name, 10)]
            y += 125
    return y, [*legend(8, 330, {"output of a layer; in backward its gradient": COLOURS[0],
                                "traffic of f and g": COLOURS[1]}), *out]


def draw_schedules():
    """The four schedules on one time axis, for 4 ranks and 8 micro-batches. F, I and W take equally long."""
    runs = {name: simulate(lists(4, 8, 1 + (name == "interleaved")))
            for name, lists in parallel.SCHEDULES.items()}
    unit, out, y = 880 / max(run.length for run in runs.values()), [], 24
    kinds = {"F forward": COLOURS[0], "B backward: I and W in one": COLOURS[4], "I gradient of the input": COLOURS[1],
             "W gradient of the weights": COLOURS[2]}
    for name, run in runs.items():
        idle = max(run.idle) / run.length
        out.append(words(20, y + 12, f"{name}: {run.length:g} long, {idle:.0%} idle, {max(run.peak):g} held at most",
                         12, "start"))
        for rank, row in enumerate(run.spans):
            out.append(words(20, y + 34 + 20 * rank, f"rank {rank}", 10, "start"))
            for (kind, colour), second in itertools.product(kinds.items(), (False, True)):  # a rank's two stages
                out += cells(colour, [(80 + unit * a, y + 20 + 20 * rank, unit * (b - a) - 1, action.micro_batch)
                                      for action, a, b in row if (action.kind, action.stage > 3) == (kind[0], second)],
                             18, 0.7 if second else 1)
        y += 112
    return y, [*legend(6, 230, kinds), *out]


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


def draw_experts():
    """Each of a rank's 6 tokens goes to 2 random experts of 2N. Drawn are the rows (rank, token) of each expert: as the
    rank sends them, as its experts get them, and as its own come back."""
    n, found, generator = dist.get_world_size(), [], torch.Generator().manual_seed(dist.get_rank())
    group, _ = split_experts(parallel.make_mesh("cpu", dp=n), n)
    experts, x = further.experts.Experts(GPTConfig(n_embd=8, n_head=1, experts=2 * n)), torch.zeros(1, 6, 8)
    x[0, :, 0], x[0, :, 1] = dist.get_rank(), torch.arange(6)

    def seen(rows, counts):
        found.append((rows[:, :2].int().tolist(), counts.tolist()))
        return rows

    with patched(plain_rows(further.experts)), patch.object(experts, "mlps", lambda rows, counts: seen(
            further.experts.visit(seen, group, seen(rows, counts), counts), counts)):
        experts(x, torch.rand(1, 6, 2 * n, generator=generator).argsort(-1)[..., :2], torch.ones(1, 6, 2))
    ranks, out, step = of_all_ranks(found), [], 960 / n
    most = max(len(rows) for some in ranks for rows, _ in some)
    for i, title in enumerate(("rows as they leave, sorted by expert", "all-to-all: rows as experts get them",
                               "all-to-all back: rows on their tokens' rank again, in the order in which they left")):
        out.append(words(20, y := 36 + 64 * i, title, 12, "start"))
        for rank, some in enumerate(ranks):
            rows, counts = some[i]
            number = [e + (i == 1) * 2 * rank for e, count in enumerate(counts) for _ in range(count)]
            for source in range(n):
                out += cells(COLOURS[source % 5], [
                    (20 + step * rank + (step - 10) / most * j, y + 8, (step - 10) / most - 1, e if i < 2 else token)
                    for j, ((r, token), e) in enumerate(zip(rows, number)) if r == source])
    out += [words(step * (r + 0.5) + 20, 16, f"rank {r}: experts {2 * r}, {2 * r + 1}") for r in range(n)]
    return 220, [*out, words(500, 212, "Colours are the tokens' ranks; numbers are experts, in the last row tokens.")]


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
        walks = tiles_walked(Tq, 512, causal, rows)
        done = [(x + 38 * n, 48 + 24 * m, 36, i) for walk in walks for i, (m, n) in enumerate(walk)]
        cut = [(x + 38 * n, 48 + 24 * m, 36, i) for walk in walks for i, (m, n) in enumerate(walk)
               if causal and (n + 1) * rows - 1 > 512 - Tq + m * rows]
        every = [(x + 38 * n, 48 + 24 * m, 36, 22) for m in range(Tq // rows) for n in range(512 // rows)]
        out += [words(x, 38, f"{title}: {len(done)} of {len(every)} tiles", 12, "start"), boxes("#888", every, 0.12),
                *cells(COLOURS[0], sorted({*done} - {*cut}), 22), *cells(COLOURS[1], cut, 22)]
    said = {"all queries see all keys": COLOURS[0], "the mask cuts the tile": COLOURS[1], "never loaded": "#888"}
    return 270, [*out, *legend(254, 330, said), words(
        20, 16, f"Tiles of {rows} queries (down) x {rows} keys (right). A row is a program: it keeps Q, sums and O, "
        "and loads K and V in this order. No score reaches memory.", 11, "start")]


def timeline_of(found):
    """The Timeline of the computation in train.py's trace, so of the pipeline as it ran, for `draw_svg`."""
    events = [event for event in found["traceEvents"] if event["ph"] == "X" and event["name"].split()[0] in {*"FBIW"}]
    first, spans = min(event["ts"] for event in events), defaultdict(list)
    for event in events:
        action = parallel.Action(event["name"][0], event["args"]["stage"], event["args"]["micro_batch"])
        start = event["ts"] - first
        spans[event["tid"]].append((action, start / 1e6, (start + event["dur"]) / 1e6))
    return Timeline([spans[rank] for rank in sorted(spans)],
                             max(row[-1][2] for row in spans.values()), idle=None, peak=None)


def grouped(values):
    """{group: {bar: {part: value}}} for `chart`, of (group, bar, value or {part: value}). Empty values are left out."""
    groups = defaultdict(dict)
    for group, bar, value in values:
        if value:
            groups[group][bar] = value if isinstance(value, dict) else {bar: value}
    return groups


def comparisons(found):
    """(picture, title, groups) of each chart of a --json file's rows. groups: empty if the rows hold nothing for it."""
    rows = sorted(found["rows"], key=lambda row: not row.get("who", "ours").startswith("ours"))  # ours: first colour
    if found["what"] == "kernels":
        for (picture, op, key, unit), way in itertools.product((
                ("attention", "attention ", "tflops", "TFLOP/s"), ("layer-norm", "layer norm ", "tb", "TB/s")),
                ("forward", "backward")):
            some = [row for row in rows if row["op"].startswith(op) and row["way"] == way]
            yield picture, f"{op}{way}, {unit}", grouped(
                (row["op"].removeprefix(op), row["who"], row[key]) for row in some)
    elif found["what"] == "collectives":
        yield "all-reduce", "all-reduce, bus GB/s by size", grouped(
            (f"{row['size']:,.0f} KiB", who, row[key]) for row in rows
            if row["op"] == "all_reduce" and row.get("bus", 0) > 1
            for who, key in (("ours", "bus"), ("torch", "torch_bus")))
    elif found["what"] == "strategies":
        some = [row for row in rows if re.fullmatch("ddp|zero[123]", row["strategy"]) and "memory_by_rank" in row]
        yield "zero-memory", f"{found['model']}, GiB on rank 0: tensors (predicted, measured), peak", grouped(
            (row["strategy"], bar, value) for row in some
            for bar, value in zip(("predicted", "measured", "peak"), (*(
                {kind: n / 2**30 for kind, n in kinds.items()} for kinds in row["memory_by_rank"][0]), row["peak"])))
        yield "strategies", f"{found['model']}, tokens/s a GPU", grouped(
            (row["strategy"], row["who"] if row["who"].startswith("ours") else "torch", row["tokens"]) for row in rows)
    else:
        yield "scaling", "tokens/s a GPU, % of one GPU's", grouped(
            (f"{row['kind']} {row['gpus']}", f"{row['strategy']} {row['who']}", row["efficiency"]) for row in rows)


def pictures(a):
    """Write SVG pictures of what the code does, and of the rows and traces in files."""
    dist.initialize("cpu")
    for draw in (draw_ring, draw_mesh, draw_calls, draw_buckets, draw_zero_stages, draw_f_and_g, draw_schedules,
                 draw_zigzag, draw_experts, draw_tiles):
        height, parts = draw()
        if not dist.get_rank():
            write_svg(a.into, draw.__name__.removeprefix("draw_").replace("_", "-"), height, parts)
    for path, found in a.found.items() if not dist.get_rank() else ():
        if "traceEvents" in found:
            say(picture := os.path.join(a.into, "pipeline.svg"))
            draw_svg(timeline_of(found), picture)
            continue
        charts = defaultdict(list)
        for picture, title, groups in comparisons(found):
            if groups:
                at = f'<g transform="translate(0 {290 * len(charts[picture])})">'
                charts[picture].append(at + chart(f"{title}; {found['hardware']}", groups) + "</g>")
            else:
                say(f"{path}: no rows for '{title}', not drawn")
        for picture, parts in charts.items():
            write_svg(a.into, picture, 290 * len(parts) - 10, parts)
