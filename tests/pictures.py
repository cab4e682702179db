"""Pictures show what the code does."""

import itertools
import json
import pathlib
import xml.etree.ElementTree

import pytest

import lessons.demos
import lessons.pictures
from tests.pool import HERE


def drawn(parts):
    """Elements of SVG text, which must be XML."""
    return list(xml.etree.ElementTree.fromstring(f"<svg>{''.join(parts)}</svg>").iter())


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
    colours = [element.get("fill") for element in drawn(parts)]
    assert [colours.count(colour) for colour in lessons.pictures.COLOURS[:size]] == [
        sum(bits >> r & 1 for state in states for row in state for bits in row) for r in range(size)]


def fits(svg):
    """Boxes and words lie inside the picture, and no words on others. A letter is 0.6 of its size wide, or less."""
    root, taken = xml.etree.ElementTree.fromstring(svg), []
    _, _, right, bottom = map(float, root.get("viewBox").split())
    for word in root.iter("{*}text"):
        x, y, size = (float(word.get(key)) for key in ("x", "y", "font-size"))
        width = 0.6 * size * len(word.text)
        x -= width * {"start": 0, "middle": 0.5}[word.get("text-anchor")]
        taken.append((x, y - 0.75 * size, x + width, y + 0.2 * size))
    apart = not any(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
                    for a, b in itertools.combinations(taken, 2))
    for box in root.iter("{*}rect"):
        x, y, width, height = (float(box.get(key)) for key in ("x", "y", "width", "height"))
        taken.append((x, y, x + width, y + height))
    return apart and all(x >= 0 and y >= 0 and x_end <= right and y_end <= bottom for x, y, x_end, y_end in taken)


FILES_DRAWN = {
    "kernels": [{"op": f"attention T={t} D=64 causal", "way": way, "who": who, "tflops": x, "tb": 1}
                for t in (1024, 4096)
                for way in ("forward", "backward") for who, x in (("ours", 100), ("SDPA <new>", 200 + t / 64))],
    "collectives": [{"op": "all_reduce", "size": 1024, "bus": 3, "torch_bus": 2}, {"op": "all_reduce", "a": 1, "b": 2}],
    "scaling": [{"kind": "weak", "gpus": n, "strategy": "ddp", "who": "ours", "efficiency": 101 - n} for n in (1, 2)]}
TRACE = [{"ph": "X", "name": f"{kind} stage 0 micro-batch 3", "tid": 0, "ts": 5e6 + i, "dur": 1,
          "args": {"stage": 0, "micro_batch": 3}} for i, kind in enumerate(("F", "SF", "RB", "I", "W"))]
TRACE.append({"ph": "M", "name": "thread_name", "tid": 0})
OF_NO_FILE = "ring", "zero-stages", "schedules"


def test_pictures_show_what_files_hold(run_bench, tmp_path):
    files = {what: {"what": what, "hardware": "a machine", "rows": rows} for what, rows in FILES_DRAWN.items()}
    for name, found in {**files, "trace": {"traceEvents": TRACE}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    printed = run_bench("pictures", *map(str, tmp_path.glob("*.json")), "--into", str(tmp_path / "made"))
    texts = {path.stem: path.read_text() for path in (tmp_path / "made").iterdir()}
    assert set(texts) == {*OF_NO_FILE, "attention", "all-reduce", "scaling", "pipeline"}
    assert all(f"{name}.svg" in printed and fits(text) for name, text in texts.items())
    for name in OF_NO_FILE:
        old = pathlib.Path(HERE, "assets", f"{name}.svg").read_text()
        assert texts[name] == old, f"assets/{name}.svg is old: python bench.py pictures"
    made = {name: drawn([text]) for name, text in texts.items()}

    def bars(name, colour):  # heights, the legend's box first
        boxes = [box for box in made[name] if box.get("fill") == colour and box.tag.endswith("rect")]
        return [float(box.get("height")) for box in boxes][1:]
    ours, theirs, other = lessons.pictures.COLOURS[:3]
    tallest = 180 / (200 + 4096 / 64)
    assert bars("attention", ours)[:2] == pytest.approx([100 * tallest] * 2, abs=0.1)
    assert bars("attention", theirs)[:2] == pytest.approx([216 * tallest, 180], abs=0.1)
    assert bars("all-reduce", ours) == [180] and bars("all-reduce", theirs) == [120]
    assert bars("scaling", ours) == pytest.approx([180, 99 * 1.8], abs=0.1)
    words = [element.text for element in made["attention"] if element.tag.endswith("text")]
    assert {"attention forward, TFLOP/s; a machine", "SDPA <new>", "ours", " T=4096 D=64 causal", "264"} <= set(words)
    cells = [(box.get("fill"), box.get("x"), box.get("width")) for box in made["pipeline"]
             if box.get("height") == "18.0"]
    assert cells == [(ours, "80.0", "179.0"), (theirs, "620.0", "179.0"), (other, "800.0", "179.0")]  # no sends
