"""A run's own page, and lists that one edits and runs in a browser."""

import http.client
import json
import os
import re
import signal
import tempfile
import threading
import time
import xml.etree.ElementTree

import pytest

from lessons import explore
from safe.page import Page, ticks
from tests.pool import table


# --------------------------------------------------------------------------------------------------------- a run's page

def logged(folder, *entries):
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"note": 1}\n[1]\n{"st')
    return folder


def curves_of(page):
    """{title: the points of each curve} of a page, whose pictures are XML."""
    found = {}
    for picture in page.split("<svg")[1:]:
        svg = xml.etree.ElementTree.fromstring("<svg" + picture.split("</svg>")[0] + "</svg>")
        found[svg.get("aria-label")] = [line.get("points").split() for line in svg.iter("polyline")]
    return found


def test_a_page_shows_what_was_logged(tmp_path):
    run = logged(tmp_path / "<run>", {"step": 1, "loss": 4.0, "lr": 1e-3, "after_step": 0, "unit": "byte"},
                 {"step": 3, "loss": 2.0, "val_loss": "nan"}, {"step": 9, "loss": 3.0, "after_step": 5})
    Page(run).write(over=True)
    page = (run / "index.html").read_text()
    assert curves_of(page) == {"loss, nats a byte": [["70.0,20.0", "205.0,170.0", "610.0,95.0"]],
                               "learning rate": [["70.0,170.0"]]}
    assert page.count('d="M340.0 15V175"><title>resumed after step 5</title>') == 1
    assert "&lt;run&gt;" in page and "<run>" not in page and "<script" not in page and "http-equiv" not in page


def test_ticks_are_round_and_inside():
    for low, high in (0, 1), (1.93, 5.21), (1, 450), (-3, 1e-3), (1e-5, 3e-4), (2, 2):
        found = ticks(low, high)
        assert low == high or 2 <= len(found) <= 6 and low <= found[0] and found[-1] <= high + 1e-9, (low, high, found)
    assert ticks(1.93, 5.21) == [2, 3, 4, 5]


def test_a_run_s_page_is_whole_at_every_moment_and_seldom_written(tmp_path, monkeypatch):
    entry = {"step": 1, "loss": 4.0}
    page = Page(logged(tmp_path / "run", entry))
    page.said += ["layout   dp 2", "<b>"]
    index, seen, replace = tmp_path / "run" / "index.html", [], os.replace
    monkeypatch.setattr(os, "replace", lambda *files: (seen.append(index.exists()), replace(*files)))
    page.write()
    assert seen == [False] and "http-equiv" in index.read_text()
    page.last -= 12  # seconds
    page.next = 0.0
    Page.write(page)
    said = re.search('"sign">Written (.* UTC); no pause before was longer than 12 s.*since > 120000'
                     '\\).*No sign of life since (.*), though no pause before was longer than 12 s',
                     index.read_text(), re.S)
    assert said[1] == said[2]
    assert f"killed   after {said[1]}" in Page(tmp_path / "run").before[-1]
    seen.pop()
    page.write()  # so soon it would be a large part of the run
    assert len(seen) == 1
    page.write(over=True)
    text = index.read_text()
    assert seen == [False, True] and "http-equiv" not in text and "sign" not in text and "Ended, after step 1." in text
    assert "layout   dp 2\n&lt;b&gt;" in text
    monkeypatch.setattr(os, "replace", lambda *files: 1 / 0 if index.exists() else None)
    (tmp_path / "run" / "log.jsonl").unlink()
    page.write(over=True)  # costs the page, not the run
    assert index.read_text() == text
    monkeypatch.setattr(os, "replace", replace)
    logged(tmp_path / "run", entry)
    page = Page(tmp_path / "run")  # of the next launch
    page.said += ["resume   after step 1"]
    page.write(over=True)
    text = index.read_text()
    assert re.findall("<summary>(.*)</summary>", text) == ["launch 1", "launch 2"]
    assert text.index("layout   dp 2\n&lt;b&gt;</pre>") < text.index("resume   after step 1</pre>")


# ---------------------------------------------------------------------------------------------------------------- lists

STUCK = [  # ZeRO's stage, a text, check's reason, and the places, "rank action", at which ranks stop
    ("", "rank 0  F0 F1 B0 B1\nrank 1  F0 B1 F1 B0", "deadlock: no rank can go on: rank 0 waits at B0, rank 1 waits at "
     "B1", "0 2, 1 1"),
    ("3", "rank 0  G0/0 F0/0 F0/1 B0/1 B0/0", "the weights of piece 1 are not whole: put G before", "0 2"),
    ("1", "rank 0  F0 B0\nrank 1  G0 F0 B0 A0", "the weights of piece 0 are not whole: put G before", "0 0"),
    ("0", "rank 0  F0 A0 B0", "piece 0 has no gradient that waits for an A: put it behind B or W", "0 1")]


def test_a_list_that_cannot_run_shows_where_in_check_s_words():
    """Cells are those of the list that was given, without transfers."""
    for zero, text, why, places in STUCK:
        found = explore.grid({"text": text, "zero": zero})
        assert (found["why"], found["text"]) == (why, text)
        assert ", ".join(re.findall(r'data-place="(\d+ \d+)"><path [^>]*stroke="#e03b2b"', found["svg"])) == places
    with pytest.raises(ValueError, match="choose one"):
        explore.grid({"text": "rank 0  G0 F0 B0 A0", "zero": ""})


def test_zero_s_letters_are_parallel_py_s_and_what_is_kept_is_said():
    found = explore.grid({"schedule": "interleaved", "p": "1", "m": "1", "v": "3", "zero": "3"})
    letters = "G0 G1 F0 D0 G2 F1 D1 F2 G1 B2 D2 A2 B1 D1 A1 B0 A0".split()
    assert found["text"] == "rank 0  " + " ".join(f"{letter}0/{piece}" for letter, piece in letters)
    assert found["svg"].count("data-place") == len(letters) and "At most 2 pieces are whole" in found["says"]
    assert "idles 2, 14%" in explore.grid({"schedule": "zb-h1", "p": "3", "m": "4"})["says"]


def test_lists_with_letters_train_as_1f1b_does():
    found = explore.run({"schedule": "interleaved", "p": "1", "m": "1", "v": "3", "zero": "3"})
    assert "2 ranks, --n-layer 1" in found["says"] and "All losses are those of 1F1B" in found["says"]
    assert found["svg"].count("<path") == 6


# ---------------------------------------------------------------------------------------------------------- the server

@pytest.fixture(scope="module")
def server():
    with explore.server_at(0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(server, path, body=None, **headers):
    """(status, text) of a request below the token."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("POST" if body is not None else "GET", path.replace("TOKEN", server.token), body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


REFUSED = """
    GET  /wrong/                                 403
    GET  /../train.py                            403
    GET  /TOKEN/../train.py                      404
    POST  /TOKEN/grid  p=17                      400
    POST  /TOKEN/grid  m=x                       400
    POST  /TOKEN/grid  schedule=none             400
    POST  /TOKEN/grid  text=rank                 400
    POST  /wrong/grid                            403
    POST  /TOKEN/run  p=8&m=8&zero=1             400"""


def test_the_server_refuses_all_else_in_a_line(server):
    for method, path, *body, status in table(REFUSED):
        found, text = asked(server, path, "".join(body) if method == "POST" else None)
        assert found == status and text.count("\n") == 0 < len(text), (path, body, found, text)
    assert asked(server, "/TOKEN/", Host="example.com")[0] == 403
    assert asked(server, "/TOKEN/grid", "a" * (1 << 18) + "a")[0] == 413
    with explore.running:
        assert asked(server, "/TOKEN/run", "") == (400, "another run is under way: wait for its end")


FOREVER = """import os, pathlib, time
pathlib.Path("pid").write_text(f"{os.getpgrp()} ")
os.fork()
time.sleep(600)
"""


def test_a_run_ends_when_it_is_cancelled_and_with_the_server(tmp_path, monkeypatch):
    """Its processes and its folder, too."""
    (tmp_path / "train.py").write_text(FOREVER)
    monkeypatch.setattr(explore, "HERE", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = explore.server_at(0)
    monkeypatch.setattr(explore, "server_at", lambda port: server)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answers = []

    def started():
        thread = threading.Thread(target=lambda: answers.append(asked(server, "/TOKEN/run", "p=2&m=2")))
        thread.start()
        for _ in range(1000):
            if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
                break
            time.sleep(0.02)
        return thread, int((tmp_path / "pid").read_text())

    def browse():
        try:
            thread, first = started()
            (tmp_path / "pid").unlink()
            assert asked(server, "/TOKEN/cancel", "")[0] == 200
            thread.join(20)
            answers.extend([first, started()[1]])
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=browse)
    thread.start()
    explore.explore(0)
    thread.join()
    explore.running.release()
    signal.signal(signal.SIGTERM, before)
    assert answers[0] == (400, "the run was given up")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pid", "train.py"]
    for group in answers[1:3]:
        with pytest.raises(ProcessLookupError):
            for _ in range(1000):  # those that were killed may not be gone yet
                os.killpg(group, 0)
                time.sleep(0.01)


def test_a_list_is_edited_and_run_in_a_browser(server, browser, monkeypatch):
    monkeypatch.setattr(explore, "trained", lambda folder, flags: (_ for _ in ()).throw(ValueError("fails")))
    text = "document.querySelector('#text').value"
    browser.open(f"http://127.0.0.1:{server.server_port}/{server.token}/")
    browser.wait(f"{text}.startsWith('rank 0  F0 F1 F2 F3 B0')")
    for name, value in {"p": 1, "m": 1, "v": 3, "schedule": "interleaved", "zero": 3}.items():
        browser.run(f"change({{{name}: '{value}'}})")
    browser.wait(f"{text}.startsWith('rank 0  G0/0 G0/1 F0/0 D0/0')")
    browser.run("move('0 1', 5)")
    browser.wait("refused.textContent.includes('the weights of piece 1 are not whole') && run.disabled")
    browser.run("history.back()")
    browser.wait("!refused.textContent && !run.disabled")
    x, y = browser.run("(() => { const {x, y, width} = cellAt('0 13').getBoundingClientRect(); "
                       "return [x + width / 2, y + 5]; })()")  # D0/1, behind B0/1, to the end
    for kind, to in ("mousePressed", x), ("mouseMoved", 1400), ("mouseReleased", 1400):
        browser.call("Input.dispatchMouseEvent", type=kind, x=to, y=y, button="left", clickCount=1)
    browser.wait(f"{text}.endsWith('A0/0 D0/1') && !run.disabled")
    browser.run("document.querySelector('#run').click()")
    browser.wait("running.textContent === 'fails' && !document.querySelector('#run').hidden")
    browser.errors.clear()  # of the answer 400
    monkeypatch.setattr(explore, "run", lambda query: {"says": "it ran", "svg": "<svg></svg>"})
    browser.run("document.querySelector('#run').click()")
    browser.wait("ran.innerText.includes('it ran') && !ran.hidden")
