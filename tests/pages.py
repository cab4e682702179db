"""`python -m lessons pages`: no line is lost, no link leads nowhere, pictures show what the code did."""

import ast
import html
import pathlib
import re
import shutil

import pytest

import parallel
from lessons.blind import bugs
from lessons.pages import FILES, page_name, pages, stops
from lessons.pictures import DRAWN, pipeline_frames, ring_frames, STEPPED, tensor_frames, zero_frames
from lessons.puzzles import HERE
from tests.browser import Browser
from tests.pool import in_new_process, parametrize


@pytest.fixture(scope="session")
def site_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    in_new_process(pages, str(folder), None, None)
    return folder


@pytest.fixture(scope="session")
def site(site_folder):
    """{name of a page: its text}"""
    return {path.name: path.read_text() for path in site_folder.glob("*")}


def text_of(page):
    return html.unescape(re.sub(r"<button.*?</button>|<[^>]*>", "", page))


def words(text):
    """What of a text shows: backticks and white space do not."""
    return "".join(text.replace("`", "").split())


def lines_with_code(text):
    """Lines on which something stands that is neither comment nor docstring."""
    docs = [node.body[0] for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)]
    inside = {line for doc in docs for line in range(doc.lineno, doc.end_lineno + 1)}
    return {n for n, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"} - inside


@parametrize("file", FILES)
def test_a_page_has_each_line_of_code_once_and_in_order_and_all_prose(site, file):
    text = (HERE / file).read_text()
    lines, page = text.splitlines(), site[page_name(file) + ".html"]
    shown = [(int(n), text_of(line)) for n, line in re.findall(r'<span id="L(\d+)"[^>]*>(.*?)</span>', page)]
    numbers = [n for n, _ in shown]
    assert numbers == sorted(set(numbers)) and all(line == lines[n - 1] for n, line in shown)
    assert lines_with_code(text) <= {*numbers}
    everything = words(text_of(page))
    for n in {*range(1, len(lines) + 1)} - {*numbers}:
        said = lines[n - 1].strip().removeprefix('r"').strip('"').removeprefix("#").strip(" -")
        assert words(said) in everything, (n, said)


def test_each_link_has_a_target_and_nothing_is_loaded(site):
    ids = {name: re.findall(r' id="([^"]*)"', page) for name, page in site.items()}
    links = 0
    for name, page in site.items():
        assert len(ids[name]) == len({*ids[name]}) or name == "reading.html", name  # equal headings
        for link in re.findall(r'href="([^"]*)"', page):
            target, _, place = link.partition("#")
            assert (target or name) in site and (not place or place in ids[target or name]), (name, link)
            links += 1
        assert not re.search(r"<script[^>]|<link|<img|<[^>]*src=|@import|url\(|href=.http", page), name
    assert links > 1000


def stop_of_zero(site):
    return next(name for name, page in site.items() if "stop-" in name and "<strong>ZeRO-3." in page)


def test_a_picture_comes_first_at_its_stop_and_stands_in_the_index(site):
    begins = re.compile(r'</h1>\n<div class="stepped"><p><strong>(.*?)\.')
    first = [title for n in stops() for title in begins.findall(site[f"stop-{n}.html"])]
    assert sorted(first) == sorted(title for _, title, *_ in STEPPED.values())
    assert site["index.html"].count('class="stepped"') == len(STEPPED)
    stop = site[stop_of_zero(site)]
    assert "whole = set()" in text_of(stop) and "--zero 3</code><button" in stop.replace(" <wbr>", " ")


# ------------------------------------------------------------------------------------------------------------- pictures

def test_assets_are_current(tmp_path):
    in_new_process(pages, "", None, str(tmp_path))
    for name in DRAWN:
        made, ours = (pathlib.Path(folder, f"{name}.svg").read_text() for folder in (tmp_path, HERE / "assets"))
        assert made == ours, f"assets/{name}.svg is old: python -m lessons pages --assets assets"
    rows = re.findall(r">([^<]*#[^<]*)</text>", (HERE / "assets/blind.svg").read_text())
    assert rows == [f"{bug.number:>2}  {bug.thread}" for bug in bugs()], "lessons blind --out assets/blind.svg"


def all_frames():
    """[texts, arrows, what is said] of each frame. Two worlds do not fit into a process, so each has its turn."""
    return [[([cell.text for cell in frame.cells if cell.text], len(frame.arrows), frame.says) for frame in frames()]
            for frames in (ring_frames, zero_frames, tensor_frames, pipeline_frames)]


def test_frames_have_the_numbers_that_the_code_computed_and_an_arrow_a_message():
    ring, zero, tensor, pipeline = in_new_process(all_frames)
    assert [arrows for _, arrows, _ in ring] == [0] + 6 * [5]  # the last rank's is drawn at both ends
    assert ring[-1][0][4:] == 4 * ["1111", "2222", "3333", "4444"] and "4444" not in ring[2][0]
    assert [text.split(":")[0] for *_, text in zero[1:-1]] == (
        "G0 G1 F0 D0 G2 F1 D1 F2 G1 B2 D2 A2 B1 D1 A1 B0 A0".split())  # as parallel.py shows it
    texts, arrows, _ = tensor[5]  # term of Y and Y of rank 0, then of rank 1
    of_y = [texts[at + 1:at + 13] for at, text in enumerate(texts) if text == "Y"]
    assert of_y[0] == of_y[1] and len({*of_y[0]}) > 5 and arrows == 2
    sent = [action for actions in parallel.lower(parallel.one_f_one_b(4, 6)) for action in actions
            if action.kind[0] == "S"]
    assert sum(arrows for _, arrows, _ in pipeline) == len(sent)


# ------------------------------------------------------------------------------------------------------------- browser

@pytest.fixture
def browser(tmp_path):
    if not shutil.which("chromium"):
        pytest.skip("no chromium here, which Debian's package of this name has")
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()
    assert browser.errors == []


def test_buttons_step_through_a_picture_and_copy_a_command(browser, site_folder, site):
    browser.open(f"file://{site_folder}/{stop_of_zero(site)}")
    for n, shown in (2, 2), (3, 19), (1, 18), (0, 1), (4, 2):  # next, end, back, start, play
        browser.run(f"document.querySelectorAll('.stepped button')[{n}].click()")
        browser.wait(f"document.querySelector('output').innerText === '{shown} of 19'")
    assert browser.run("document.querySelectorAll('.step:not([hidden])').length") == 1
    browser.run("navigator.clipboard.writeText = async text => { window.copied = text; }; "
                "document.querySelector('.copy').click()")
    browser.wait("copied.startsWith('python -m lessons') && document.querySelector('.copy').innerText === 'copied'")
