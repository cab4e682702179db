"""Pages that move: a run's own, those that `python -m lessons explore` serves, and those that need no server."""

import json
import os
import xml.etree.ElementTree

import pytest

import lessons.demos
from safe.page import MOST, Page, points_of
from tests.runs import output_of

# --------------------------------------------------------------------------------------------------------- a run's page

NOTES = b'{"note": "by hand"}\n[1]\n"step"\n\xff\xfe\n{"step": null, "loss": 1}\n{"st'


def logged(folder, *entries):
    folder.mkdir()
    (folder / "log.jsonl").write_bytes(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries) + NOTES)
    return folder


def curves_of(page):
    """{title: the points of each curve} of a page, whose pictures are XML."""
    found = {}
    for picture in page.split("<svg")[1:]:
        svg = xml.etree.ElementTree.fromstring("<svg" + picture.split("</svg>")[0] + "</svg>")
        found[svg.get("aria-label")] = [line.get("points").split() for line in svg.iter("polyline")]
    return found


def test_several_runs_are_one_picture(tmp_path):
    one = logged(tmp_path / "one", {"step": 1, "loss": 4.0, "lr": 1e-3}, {"step": 3, "loss": 2.0, "val_loss": "nan"})
    two = logged(tmp_path / "<two>", {"step": 1, "loss": 3.0, "val_loss": 9.0}, {"step": 2, "not_finite": "loss"})
    output_of(lessons.demos.main, "runs", one, two, tmp_path / "none", "--out", tmp_path / "all" / "runs.html")
    page = (tmp_path / "all" / "runs.html").read_text()
    assert curves_of(page) == {"loss, nats a token": [["70.0,20.0", "610.0,170.0"], ["70.0,95.0"]],
                               "validation loss, nats a token": [["70.0,170.0"]], "learning rate": [["70.0,170.0"]]}
    assert "&lt;two&gt;" in page and "<two>" not in page and "<script" not in page and "http-equiv" not in page
    with pytest.raises(SystemExit, match="2"):
        output_of(lessons.demos.main, "runs", tmp_path / "none")


def test_a_long_run_s_curve_has_few_points_and_the_last():
    points = points_of([{"step": i, "loss": float(i)} for i in range(100_001)], "loss")
    assert MOST / 2 < len(points) <= MOST + 1 and points[0] == (0, 0) and points[-1] == (100_000, 100_000)


def test_a_run_s_page_is_whole_at_every_moment_and_seldom_written(tmp_path, monkeypatch):
    entry = {"step": 1, "loss": 4.0, "predicted_bytes": {"gradients": 1 << 20},
             "measured_bytes": {"gradients": 3 << 19}}
    page = Page(logged(tmp_path / "run", entry))
    page.said += ["layout   dp 2", "<b>"]
    index, seen, replace = tmp_path / "run" / "index.html", [], os.replace
    monkeypatch.setattr(os, "replace", lambda *files: (seen.append(index.exists()), replace(*files)))
    page.write()
    assert seen == [False] and "http-equiv" in index.read_text()
    page.write()  # so soon it would be a large part of the run
    assert len(seen) == 1
    page.write(over=True)
    text = index.read_text()
    assert seen == [False, True] and "http-equiv" not in text and text.endswith("</html>\n")
    assert "<tr><th>gradients<td>1.0<td>1.5" in text and "layout   dp 2\n&lt;b&gt;" in text
    monkeypatch.setattr(os, "replace", lambda *files: 1 / 0 if index.exists() else None)
    (tmp_path / "run" / "log.jsonl").unlink()
    page.write(over=True)  # costs the page, not the run
    assert index.read_text() == text
