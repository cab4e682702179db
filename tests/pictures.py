"""Pictures show what the code does."""

import json
import pathlib

from tests.pool import HERE
from tests.runs import ran


TRACE = [{"ph": "X", "name": f"{kind} stage 0 micro-batch 3", "tid": 0, "ts": 5e6 + i, "dur": 1,
          "args": {"stage": 0, "micro_batch": 3}} for i, kind in enumerate(("F", "SF", "RB", "I", "W"))]
TRACE.append({"ph": "M", "name": "thread_name", "tid": 0})
OF_NO_FILE = "ring", "zero-stages", "schedules"
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
