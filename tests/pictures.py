"""Pictures show what the code does."""

import json
import pathlib
import re

from lessons.frames import ring_frames, tensor_frames, zero_frames
from tests.pool import HERE, in_new_process
from tests.runs import ran


TRACE = [{"ph": "X", "name": f"{kind} stage 0 micro-batch 3", "tid": 0, "ts": 5e6 + i, "dur": 1,
          "args": {"stage": 0, "micro_batch": 3}} for i, kind in enumerate(("F", "SF", "RB", "I", "W"))]
TRACE.append({"ph": "M", "name": "thread_name", "tid": 0})
OF_NO_FILE = "ring", "zero-stages", "schedules", "explore"
SHOWN = [  # of five actions, equally long, the first, fourth and fifth: F, I, W. Sends are left out.
    '"M80 37h179" stroke="#4c8dd6"', '"M620 37h179" stroke="#e0883a"', '"M800 37h179" stroke="#4ba36b"']


def test_pictures_show_the_code_and_a_trace(tmp_path):
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": TRACE}))
    words = "pictures", str(tmp_path / "trace.json"), "--into", str(tmp_path / "made")
    printed = ran(words, 1, tmp_path / "log", program="bench.py", launcher="fork")
    texts = {path.stem: path.read_text() for path in (tmp_path / "made").iterdir()}
    assert set(texts) == {*OF_NO_FILE, "pipeline"}
    assert all(f"{name}.svg" in printed for name in texts)
    for name in OF_NO_FILE:
        old = pathlib.Path(HERE, "assets", f"{name}.svg").read_text()
        assert texts[name] == old, f"assets/{name}.svg is old: python bench.py pictures"
    assert all(part in texts["pipeline"] for part in SHOWN) and texts["pipeline"].count("<tspan") == 3


def shown(frame):
    """(its texts, how many arrows it has) of a picture that pages step through."""
    parts = "".join(frame[1])
    return re.findall(r">([^<]*)</text>", parts), parts.count("<polygon")


def all_frames():
    """Two such worlds do not fit into a process, so they have one of their own, and each its turn."""
    return [[(*shown(frame), frame[2]) for frame in frames()] for frames in (ring_frames, zero_frames, tensor_frames)]


def test_frames_have_the_numbers_that_the_code_computed_and_an_arrow_a_message():
    ring, zero, tensor = in_new_process(all_frames)
    assert [arrows for _, arrows, _ in ring] == [0] + 6 * [4]
    assert ring[0][0][:4] == ["1", "2", "3", "4"] and ring[-1][0][:16] == 4 * ["1111", "2222", "3333", "4444"]
    assert "4444" in ring[3][0] and "4444" not in ring[2][0]  # a chunk is complete after three steps
    assert [text.split(":")[0] for *_, text in zero[1:-1]] == (
        "G0 G1 F0 D0 G2 F1 D1 F2 G1 B2 D2 A2 B1 D1 A1 B0 A0".split())  # as parallel.py shows it
    assert all(arrows == 4 * (text[0] in "GA") for _, arrows, text in zero[1:])
    assert [arrows for _, arrows, _ in tensor] == [0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 2]
    texts = tensor[5][0]
    assert texts[texts.index("Y, rank 0") + 1:][:12] == texts[texts.index("Y, rank 1") + 1:][:12]
