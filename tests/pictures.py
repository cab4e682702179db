"""Pictures show what the code does."""

import itertools
import json
import os
import re
import sys
import xml.etree.ElementTree
from collections import Counter

import pytest
import torch

import lessons.demos
import lessons.pictures
from tests.pool import HERE
from tests.runs import named


def ring_states():
    return lessons.demos.ring_states(), lessons.pictures.draw_ring()[1]


@pytest.mark.parametrize("size", [3, 4])
def test_ring_picture_is_the_law(pool, size):
    """Step s of reduce-scatter adds to chunk r-2-s of rank r, step s of all-gather completes chunk r-s-1; each step
    changes no other."""
    if pool.device_type == "cuda":
        pytest.skip("the picture is of processes on the CPU")
    states, (parts, *_) = zip(*pool(size).run(ring_states))
    states = list(zip(*states))  # [state][rank][chunk]
    assert len(states) == 2 * size - 1 and states[0] == tuple([1 << r] * size for r in range(size))
    for s, (before, after) in enumerate(itertools.pairwise(states)):
        for r in range(size):
            changed = [c for c in range(size) if before[r][c] != after[r][c]]
            assert changed == [(r - 2 - s if s < size - 1 else r - (s - size + 1) - 1) % size]
            assert after[r][changed[0]].bit_count() == min(s + 2, size)
    assert states[-1] == tuple([(1 << size) - 1] * size for _ in range(size))
    colours = [element for element in drawn(parts) if element.get("fill") in lessons.pictures.COLOURS[:size]]
    assert ([element.get("d").count("z") for element in colours]
            == [sum(bits >> r & 1 for state in states for row in state for bits in row)
               for r in range(size)])


def drawn(parts):
    """Elements of SVG text, which must be XML."""
    return list(xml.etree.ElementTree.fromstring(f"<svg>{''.join(parts)}</svg>").iter())


OF_NO_FILE = "ring", "mesh", "calls", "zero-stages", "schedules", "zigzag", "tiles"


def fits(svg):
    """Boxes and words lie inside the picture, and no words on others. A letter is 0.6 of its size wide, or less."""
    root, taken = xml.etree.ElementTree.fromstring(svg), []
    _, _, right, bottom = map(float, root.get("viewBox").split())
    for path in root.iter("{*}path"):
        taken += [(x, y, x + w, y + h, False) for x, y, w, h in (
            map(float, box) for box in re.findall(r"M(\S+) ([^h]+)h([^v]+)v([^h]+)h", path.get("d")))]
    for word in root.iter("{*}text"):
        x, y, size = (float(word.get(key)) for key in ("x", "y", "font-size"))
        width = 0.6 * size * len(word.text)
        x -= width * {"start": 0, "middle": 0.5, "end": 1}[word.get("text-anchor")]
        taken.append((x, y - 0.75 * size, x + width, y + 0.2 * size, True))
    assert all(x >= 0 and y >= 0 and x_end <= right and y_end <= bottom for x, y, x_end, y_end, _ in taken), taken
    return not any(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
                   for a, b in itertools.combinations([box for box in taken if box[4]], 2))


def test_pictures_show_what_the_code_does(pool):
    """Names of calls are there; groups are those of a mesh; tiles are those with a key that is seen."""
    for Tq, causal in (512, True), (512, False), (256, True), (200, True):
        sees = torch.ones(Tq, 512, dtype=torch.bool).tril(512 - Tq) if causal else torch.ones(Tq, 512, dtype=torch.bool)
        walks = lessons.pictures.tiles_walked(Tq, 512, causal, 64)
        assert [(m, n) for walk in walks for m, n in walk] == [
            (m, n) for m in range(-(-Tq // 64)) for n in range(8) if sees[64 * m:64 * m + 64, 64 * n:64 * n + 64].any()]
    if pool.device_type == "cuda":
        pytest.skip("the picture is of processes on the CPU")
    title, found = pool(4).run(calls_of_a_step)[0]
    assert "--dp 2 --tp 2" in title
    for path, sent in found:
        assert path[0][0] == "train.py" and path[-1] == ("torch.distributed", "isend") and sent > 0
        assert sys.version_info < (3, 11) or all(named(name.partition(".<locals>")[0]) for _, name in path[:-1])
    _, parts = lessons.pictures.draw_mesh()
    letters = [element.text for element in drawn(parts) if element.text in [*"abcdefgh"]]
    assert len(letters) == 7 * 16 and Counter(letters)["a"] == 2 * 6 + 4  # dp x cp are groups of 4, all others of 2


def calls_of_a_step():
    return lessons.pictures.calls_of_a_step()


def test_pictures_show_what_files_hold(run_bench, tmp_path):
    GiB = 2**30
    files = {
        "kernels": [{"op": f"attention T={t} D=64 causal", "way": way, "who": who, "tflops": x, "tb": 1}
                    for t in (1024, 4096)
                    for way in ("forward", "backward") for who, x in (("SDPA <new>", 200 + t / 64), ("ours", 100))],
        "collectives": [{"op": "all_reduce", "size": 1024, "bus": 3, "torch_bus": 2},
                        {"op": "all_reduce", "a": 1, "b": 2}],
        "strategies": [{"strategy": name, "who": "ours", "tokens": 1e4, "peak": peak, "memory_by_rank": [
            [{"parameters": GiB, "activations": GiB}, {"parameters": GiB, "activations": 3 * GiB}]]}
                       for name, peak in (("ddp", None), ("zero1", 4.5))],
        "scaling": [{"kind": "weak", "gpus": n, "strategy": "ddp", "who": "ours", "efficiency": 101 - n}
                    for n in (1, 2)]}
    for what, rows in files.items():
        (tmp_path / f"{what}.json").write_text(
            json.dumps({"what": what, "hardware": "a machine", "model": "tiny", "rows": rows}))
    events = [{"ph": "X", "name": f"{kind} stage 0 micro-batch 3", "tid": 0, "ts": 5e6 + i, "dur": 1,
               "args": {"stage": 0, "micro_batch": 3}}
              for i, kind in enumerate(("F", "SF", "RB", "I", "W"))]
    (tmp_path / "trace.json").write_text(
        json.dumps({"traceEvents": events + [{"ph": "M", "name": "thread_name", "tid": 0}]}))
    paths = [str(tmp_path / f"{what}.json") for what in (*files, "trace")]
    printed = run_bench("pictures", *paths, "--into", str(tmp_path / "made"))
    made = {name: drawn([(tmp_path / "made" / name).read_text()]) for name in os.listdir(tmp_path / "made")}
    assert set(made) == {name + ".svg" for name in (*OF_NO_FILE, "attention", "all-reduce", "zero-memory", "scaling",
                                                    "pipeline")}
    for name in OF_NO_FILE:
        text = (tmp_path / "made" / f"{name}.svg").read_text()
        assert len(text) < 60 * 1024 and fits(text), name
        # A method's name has its class from Python 3.11 on.
        if name != "calls" or sys.version_info >= (3, 11):
            with open(os.path.join(HERE, "assets", f"{name}.svg")) as file:
                assert text == file.read(), f"assets/{name}.svg is old: python bench.py pictures"
    assert "no rows for 'layer norm forward, TB/s', not drawn" in printed and "layer-norm.svg" not in printed

    def bars(name, colour):  # heights, the legend's box first
        return [float(height) for path in made[name] if path.get("fill") == colour
                for height in re.findall(r"v([\d.]+)", path.get("d"))][1:]
    ours, theirs, other = lessons.pictures.COLOURS[:3]
    tallest = 180 / (200 + 4096 / 64)
    assert bars("attention.svg", ours)[:2] == pytest.approx([100 * tallest] * 2, abs=0.1)
    assert bars("attention.svg", theirs)[:2] == pytest.approx([216 * tallest, 180], abs=0.1)
    assert bars("zero-memory.svg", ours) == [40] * 4 and bars("zero-memory.svg", theirs) == [40, 120] * 2
    assert bars("zero-memory.svg", other) == [180] and bars("all-reduce.svg", ours) == [180]
    assert bars("scaling.svg", ours) == pytest.approx([180, 99 * 1.8], abs=0.1)
    words = [element.text for element in made["attention.svg"] if element.tag.endswith("text")]
    assert {"attention forward, TFLOP/s; a machine", "SDPA <new>", "ours", "T=4096 D=64 causal", "264"} <= set(words)
    cells = [(path.get("fill"), path.get("d")) for path in made["pipeline.svg"] if path.get("d")][4:]  # 4: the legend
    assert [(colour, *re.findall(r"M(\S+) .*?h([\d.]+)", d)) for colour, d in cells] == [
        (ours, ("80.0", "179.0")), (theirs, ("620.0", "179.0")), (other, ("800.0", "179.0"))]  # no sends, no receives
