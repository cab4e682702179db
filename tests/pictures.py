"""Pictures show what the code does."""

import itertools
import json
import pathlib
import xml.etree.ElementTree

import pytest

import lessons.demos
import lessons.pictures
import model
from safe.flags import Settings
from tests.pool import HERE
from theory.memory import memory_bytes


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


TRACE = [{"ph": "X", "name": f"{kind} stage 0 micro-batch 3", "tid": 0, "ts": 5e6 + i, "dur": 1,
          "args": {"stage": 0, "micro_batch": 3}} for i, kind in enumerate(("F", "SF", "RB", "I", "W"))]
TRACE.append({"ph": "M", "name": "thread_name", "tid": 0})
OF_NO_FILE = "ring", "zero-stages", "schedules"


def test_pictures_show_the_code_and_a_trace(run_bench, tmp_path):
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": TRACE}))
    printed = run_bench("pictures", str(tmp_path / "trace.json"), "--into", str(tmp_path / "made"))
    texts = {path.stem: path.read_text() for path in (tmp_path / "made").iterdir()}
    assert set(texts) == {*OF_NO_FILE, "pipeline"}
    assert all(f"{name}.svg" in printed and fits(text) for name, text in texts.items())
    for name in OF_NO_FILE:
        old = pathlib.Path(HERE, "assets", f"{name}.svg").read_text()
        assert texts[name] == old, f"assets/{name}.svg is old: python bench.py pictures"
    forward, backward, other = lessons.pictures.COLOURS[:3]
    cells = [(box.get("fill"), box.get("x"), box.get("width")) for box in drawn([texts["pipeline"]])
             if box.get("height") == "18.0"]
    assert cells == [(forward, "80.0", "179.0"), (backward, "620.0", "179.0"), (other, "800.0", "179.0")]  # no sends


def test_bars_of_zero_stages_are_as_high_as_their_bytes():
    boxes = [box for box in drawn(lessons.pictures.draw_zero_stages()[1]) if box.tag == "rect"][4:]  # after the legend
    values = [n for zero in range(4) for n in memory_bytes(model.PRESETS["gpt2-xl"], Settings(
        dp=8, zero=zero, dtype="bf16", recompute="block", batch_size=32)).values()]
    heights = [float(box.get("height")) for box in boxes]
    assert heights == pytest.approx([180 * n / max(values) for n in values], abs=0.1)
