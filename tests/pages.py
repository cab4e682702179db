"""`python -m lessons pages`: no line is lost, and no link leads nowhere."""

import ast
import html
import re

import pytest

from lessons.pages import FILES, FIXED, module_of, pages, STEPPED
from lessons.puzzles import HERE
from tests.pool import in_new_process, parametrize


@pytest.fixture(scope="session")
def site_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    in_new_process(pages, str(folder))
    return folder


@pytest.fixture(scope="session")
def site(site_folder):
    """{name of a page: its text}"""
    return {path.name: path.read_text() for path in site_folder.glob("*")}


def text_of(page):
    return html.unescape(re.sub(r"<[^>]*>", "", page))


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
    lines, page = text.splitlines(), site[module_of(file) + ".html"]
    shown = [(int(n), text_of(line)) for n, line in re.findall(r'<span id="L(\d+)"[^>]*>(.*?)</span>', page)]
    numbers = [n for n, _ in shown]
    assert numbers == sorted(set(numbers)) and all(line == lines[n - 1] for n, line in shown)
    assert lines_with_code(text) <= {*numbers}
    assert all(lines[n - 1].lstrip().startswith("#") for n in {*numbers} - lines_with_code(text))
    everything = words(text_of(page))
    for n in {*range(1, len(lines) + 1)} - {*numbers}:
        said = lines[n - 1].strip().removeprefix('r"').strip('"').removeprefix("#").strip(" -")
        assert words(said) in everything, (n, said)


def test_each_link_has_a_target_and_nothing_is_loaded(site):
    ids = {name: re.findall(r' id="([^"]*)"', page) for name, page in site.items()}
    links = 0
    for name, page in site.items():
        assert len(ids[name]) == len({*ids[name]}) or name in ("index.html", "reading.html"), name  # equal headings
        for link in re.findall(r'href="([^"]*)"', page):
            target, _, place = link.partition("#")
            assert target in ({*site} if target else {""}) and (not place or place in ids[target or name]), (name, link)
            links += 1
        assert not re.search(r"<script[^>]|<link|<img|<[^>]*src=|@import|url\(|href=.http", page), name
        assert ("<script>" in page) == (name.removesuffix(".html") in (*STEPPED, *FIXED)), name
        assert not re.search(r"<pre>(fish|text|python)\n|<th>[^<]*`", page), name  # a fence's word, Markdown's signs
    assert links > 1000
