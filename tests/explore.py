"""Pages that move: a run's own, those that `python -m lessons explore` serves, and those that need no server."""

import http.client
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import xml.etree.ElementTree
from urllib.parse import urlencode

import pytest

from further.schedules import interleaved, zero_bubble_h1
from lessons import explore, moving, pages, turns
from parallel import Action, one_f_one_b
from safe.page import Page, ticks
from tests.browser import Browser
from tests.pages import site_folder
from tests.pool import close, parametrize, table
from tests.runs import output_of
from theory.clock import critical_path, simulate

# --------------------------------------------------------------------------------------------------------- a run's page

NOTES = b'{"note": "by hand"}\n[1]\n"step"\n\xff\xfe\n{"step": null, "loss": 1}\n{"st'


def logged(folder, *entries):
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_bytes(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries) + NOTES)
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
    entry = {"step": 1, "loss": 4.0, "predicted_bytes": {"gradients": 1 << 20},
             "measured_bytes": {"gradients": 3 << 19}}
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
    assert "<tr><th>gradients<td>1.0<td>1.5" in text and "layout   dp 2\n&lt;b&gt;" in text
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


# ------------------------------------------------------------------------------------------------- what pictures show

def test_the_critical_path_has_no_gap_and_is_as_long_as_the_schedule():
    for make in moving.SCHEDULES.values():
        timeline = simulate(make(4, 8, 2), 1, 1.5, 0.75)
        when = {action: times for row in timeline.spans for action, *times in row}
        path = [when[action] for action in critical_path(timeline)][::-1]
        assert path[0][0] == 0 and path[-1][1] == timeline.length
        assert all(close(end, start) for (_, end), (start, _) in zip(path, path[1:]))


EACH = "F and B, or F, I and W, must each be there"
STUCK = [  # a text, check's reason, and the action at which each rank stops
    ("rank 0  F0 F1 B0 B1\nrank 1  F0 B1 F1 B0", "deadlock: no rank can go on: rank 0 waits at B0, "
     "rank 1 waits at B1", {0: 2, 1: 1}),
    ("rank 0  F0 W0 I0", "deadlock: no rank can go on: rank 0 waits at W0", {0: 1}),
    ("rank 0  F0 F1 B0 B1\nrank 1  F0 F1 B1 B1 B0", "B1 is there twice, on rank 1", {1: 3}),
    ("rank 0  F0 I0 F1 I1 W0", f"stage 0, micro-batch 1: {EACH}; it has F, I", {0: 3}),
    ("rank 0  F0 I0 B0 W0", f"stage 0, micro-batch 0: {EACH}; it has F, B, I, W", {0: 3}),
    ("rank 0  F0 B0 F2 B2", f"stage 0, micro-batch 1: {EACH}; it has none", {0: 3}),
    ("rank 0  F0 B0 F1 B1\nrank 1  F0 B0", f"stage 1, micro-batch 1: {EACH}; it has none", {1: 2}),
    ("rank 0  F0/0 B0/0 F0/7 B0/7", "stage 7 is there, stage 1 is not", {0: 3})]


def test_a_list_that_cannot_run_shows_where_in_check_s_words():
    """Cells are those of the list that was given, without transfers. (The ranks' own F0 and F1 have no fault.)"""
    for text, why, at in STUCK:
        found = moving.pipeline({"text": text})
        assert (found["why"], found["at"], found["text"]) == (why, at, text)


def test_rows_that_are_no_lists_say_what_is_wrong():
    for text, why in (("rank 0", "a rank has no stage"), ("rank 0  F0 B0\nrank 1", "a rank has no stage"),
                      ("", "no schedule"), ("rank 1  F0", "'rank 1  F0' is not the row of rank 0"),
                      ("rank 0  X3", "'X3' is no action")):
        with pytest.raises(ValueError, match=re.escape(why)):
            moving.pipeline({"text": text})


# ---------------------------------------------------------------------------------------------------------- the server

@pytest.fixture(scope="module")
def server():
    with explore.server_at(0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def address(server):
    return f"http://127.0.0.1:{server.server_port}/{server.token}"


def asked(server, path, body=None, **headers):
    """(status, text) of a request below the token."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("POST" if body is not None else "GET", path.replace("TOKEN", server.token), body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_server_gives_what_its_tables_have(server):
    status, text = asked(server, "/TOKEN/pipeline.json?schedule=zb-h1&p=3&m=4")
    assert status == 200 and json.loads(text)["idle"] == 2
    status, text = asked(server, "/TOKEN/layout.json?model=gpt2&gpus=4")
    rows = [dict(zip(moving.COLUMNS, row)) for row in json.loads(text)["rows"]]
    assert status == 200 and len(rows) > 20 and rows[0]["ms"] == min(row["ms"] for row in rows)


# What is asked for, and the answer. MANY are parameters, LONG is longer than a line may be.
REFUSED = """
    /wrong/pipeline.html                 403
    /                                    403
    /../train.py                         403
    /TOKEN/                              404
    /TOKEN/%2e%2e/train.py               404
    /TOKEN//etc/passwd                   404
    /TOKEN/run                           404
    /TOKEN/pipeline.json?p=17            400
    /TOKEN/pipeline.json?m=x             400
    /TOKEN/pipeline.json?f=nan           400
    /TOKEN/pipeline.json?schedule=none   400
    /TOKEN/pipeline.json?text=rank       400
    /TOKEN/layout.json?gpus=-1           400
    /TOKEN/pipeline.json?MANY            400
    /TOKEN/LONG                          414"""


def wide(p, m):
    return moving.text_of(one_f_one_b(p, m))


def test_the_server_refuses_all_else_in_a_line(server):
    for path, status in table(REFUSED):
        found, text = asked(server, path.replace("MANY", "a=1&" * 30).replace("LONG", "a" * 70_000))
        assert found == status and (status == 414 or text.count("\n") == 0 < len(text)), (path[:60], found, text)
    for host in "example.com", f"127.0.0.1:{server.server_port + 1}", "":
        assert asked(server, "/TOKEN/pipeline.json", Host=host)[0] == 403
    assert asked(server, "http://[bad/pipeline.html", Host="here")[0] == 403
    assert asked(server, "/TOKEN/run", "text=" + 10**7 * "F")[0] == 413
    assert asked(server, "/wrong/run", "")[0] == 403
    for text, says in (wide(9, 1), "9 ranks: give at most 8"), (wide(8, 65), "1040 actions: give at most 1024"):
        status, said = asked(server, "/TOKEN/run", urlencode({"text": text}))
        assert status == 400 and says in said


def test_a_body_that_does_not_come_is_not_waited_for(server):
    """One that is too large is dropped. One who is silent keeps nobody else waiting."""
    for length in "10000000", "-1", "many", "", "100":
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.putrequest("POST", f"/{server.token}/run")
        connection.putheader("Content-Length", length)
        connection.endheaders()
        assert length == "100" or connection.getresponse().status == 413
    assert asked(server, "/TOKEN/pipeline.json")[0] == 200
    connection.close()


def ran_by(timeline, seconds):
    """A step as `turns.measure` gives it, a unit of time a millisecond."""
    return seconds, 4.5, [[(Action("SF", 0, 0), 1, 2), *((action, 5 + start / 1e3, 5 + end / 1e3)
                                                         for action, start, end in row)] for row in timeline.spans]


def test_steps_in_turns_are_medians_and_the_clock_has_what_was_measured():
    for lists in zero_bubble_h1(3, 4), one_f_one_b(2, 4):
        timeline, slow = simulate(lists, 2, 4, 1), simulate(lists, 9, 9, 9)
        took = 9.0, 9.0, 0.014, 0.010, 0.012, 0.011, 0.5  # two warm up, one was disturbed
        steps = [ran_by(slow if seconds > 0.1 else timeline, seconds) for seconds in took]
        found = turns.summary(lists, {"yours": steps, "1f1b": steps})
        assert close([found["yours"][key] for key in ("low", "ms", "high")], [11, 12, 14])
        assert found["1f1b"]["steps"] == 5 and found["layers"] == 2 * len(lists)
        assert close([found["measured"]["length"], found["predicted"]["length"]], 2 * [timeline.length])
        assert close(found["clock"], simulate(one_f_one_b(len(lists), 4), 2, 4, 1).length)


def never_trained(file, has_left):
    """Takes the place of `explore.turns`."""
    lists = moving.parse(file.read_text())
    step = ran_by(simulate(lists, 2, 4, 1), 0.0125)
    return turns.summary(lists, {"yours": 5 * [step], "1f1b": 5 * [step]})


def test_lists_that_ran_are_shown(server, monkeypatch):
    monkeypatch.setattr(explore, "turns", never_trained)
    body = urlencode({"text": moving.text_of(zero_bubble_h1(3, 4))})
    status, text = asked(server, "/TOKEN/run", body)
    assert status == 200 and json.loads(text)["yours"]["ms"] == 12.5
    with explore.running:
        assert asked(server, "/TOKEN/run", body) == (400, "another run is under way: wait for its end")


FOREVER = """import os, pathlib, time
os.fork()
pathlib.Path("pid").write_text(f"{os.getpgrp()} ")
time.sleep(600)
"""


@parametrize("leaves", [True, False])
def test_a_run_ends_with_its_browser_and_with_the_server(leaves, tmp_path, monkeypatch, capfd):
    """Its processes and its folder, too."""
    (tmp_path / "lessons").mkdir()
    (tmp_path / "lessons" / "__main__.py").write_text(FOREVER)
    monkeypatch.setattr(explore, "HERE", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = explore.server_at(0)
    monkeypatch.setattr(explore, "server_at", lambda port: server)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)

    def browse():
        connection.request("POST", f"/{server.token}/run", urlencode({"text": wide(2, 2)}))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.02)
        if leaves:
            connection.close()
            while explore.running.locked():
                time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=browse)
    thread.start()
    explore.explore(0)
    thread.join()
    explore.stopping.clear()
    explore.running.release()
    signal.signal(signal.SIGTERM, before)
    assert [path.name for path in tmp_path.iterdir()] in (["pid", "lessons"], ["lessons", "pid"])
    with pytest.raises(ProcessLookupError):
        for _ in range(1000):  # those that were killed may not be gone yet
            os.killpg(int((tmp_path / "pid").read_text()), 0)
            time.sleep(0.01)
    assert capfd.readouterr().err == ""


# ---------------------------------------------------------------------------------------------------------- the browser

@pytest.fixture
def browser(tmp_path):
    if not shutil.which("chromium"):
        pytest.skip("no chromium here, which Debian's package of this name has")
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


CELLS = "document.querySelectorAll('.cell').length"


def changes(browser, action, shown="$('grid').innerHTML"):
    browser.run(f"window.before = {shown}; {action}")
    browser.wait(f"{shown} !== window.before")


def given(name, value):
    return f"""(() => {{ const field = $('controls').elements.{name}; field.value = '{value}';
               field.dispatchEvent(new Event('change', {{bubbles: true}})); }})()"""


def show_all(browser, site, address):
    """Each page loads, and each of its controls changes its picture. site: pages without a server; address: those with
    one."""
    for name in pages.STEPPED:
        browser.open(f"{site}/{name}.html", "document.querySelector('#steps svg')")
        for button in "next", "last", "back", "first", "play":
            changes(browser, f"$('{button}').click()", "$('now').textContent")
    for place in site, address:
        browser.open(f"{place}/pipeline.html", CELLS)
        changes(browser, given("schedule", "zb-h1"))
        for button in "back", "first", "next", "last":
            changes(browser, f"$('{button}').click()", "$('now').textContent")
    for name, value in {"p": 3, "m": 5, "f": 2, "i": 3, "w": 1.5, "schedule": "interleaved", "v": 3}.items():
        changes(browser, given(name, value))
    settings = browser.run("location.hash")  # which carries all that
    browser.open(f"{address}/pipeline.html{settings}", CELLS)
    assert browser.run("$('controls').elements.v.value") == "3"
    browser.open(f"{address}/layout.html#model=gpt2&gpus=4", "$('table').innerText.includes('--dp 4')")
    for name, value in {"gpus": 2, "machine": "h100", "batch": 8, "model": "tiny"}.items():
        changes(browser, given(name, value), "$('table').innerHTML")
    browser.open(f"{site}/layout.html", "document.querySelector('td')")
    for button in 0, 3, 3:
        changes(browser, f"document.querySelectorAll('th button')[{button}].click()", "$('table').innerHTML")
    assert browser.errors == []


def typed(text):
    return f"$('text').focus(); $('text').value = {json.dumps(text)}; $('text').dispatchEvent(new Event('input'))"


def edit_and_run(browser, address):
    """Returns what the page says of a list that was typed, after one that is refused."""
    browser.open(f"{address}/pipeline.html#p=3&m=4&schedule=1f1b", "!$('run').disabled")
    for text in "rank 0  F0 I0\nrank 1  F0 B0", moving.text_of(zero_bubble_h1(3, 4)):
        assert browser.run(typed(text) + ", $('run').disabled")
        browser.wait("!$('run').disabled" if "W0" in text else "$('refused').textContent.includes('it has F, I')")
    browser.run("$('run').click()")
    browser.wait("!$('ran').hidden || $('running').textContent.includes('ended')", 300)
    assert browser.run("$('measured').querySelectorAll('.cell').length") == 36 and browser.errors == []
    return browser.run("$('losses').textContent")


def test_pages_in_a_browser(address, site_folder, browser, monkeypatch):
    """An edited schedule is refused or runs."""
    monkeypatch.setattr(explore, "turns", never_trained)
    show_all(browser, f"file://{site_folder}", address)
    assert "4.500000: equal" in edit_and_run(browser, address)
