"""Pages: the reference as a small site, prose beside the code it speaks of.

    python -m lessons pages --out site    then open site/index.html in a browser; left out, it is runs/site

A page a file. Docstrings and comments stand on the left, the code that follows them on the right, with its line
numbers. Names lead to their definitions, in any file. The index is the README's reading path. Besides, there are
pictures that one steps through by buttons. Nothing is loaded from elsewhere, and scripts run in these pictures alone.
pages.css, beside this file, is the look; explore.js and explore.css are the pictures'.
"""

import ast
import functools
import html
import itertools
import json
import keyword
import os
import pathlib
import re
import string
import textwrap

from further.schedules import SCHEDULES
from lessons import moving, puzzles
from lessons.pictures import ring_frames, svg_of, tensor_frames, zero_frames
from lessons.puzzles import HERE
from model import PRESETS
from safe.files import check_file, check_folder
from theory.speed import MACHINES

FILES = [name for name in puzzles.FILES if "__" not in name]  # but for further/__init__.py, which has no code
WIDE = 52  # columns: wider pictures stand above their code, not beside it


# ------------------------------------------------------------------------------------------------- what names lead to

def module_of(file):
    return file.removesuffix(".py").replace("/", ".")


def named(body):
    """(name, line) of what these statements define."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{name}", line) for name, line in named(node.body))
        if isinstance(node, ast.Assign):
            yield from ((part.id, node.lineno) for part in ast.walk(node.targets[0]) if isinstance(part, ast.Name))


def tree_of(file):
    return ast.parse((HERE / file).read_text())


def definitions(file):
    """{name: line}; of several of one name the first."""
    return dict(reversed([*named(tree_of(file).body)]))


@functools.cache
def targets():
    """{address, such as parallel.ZeRO1.shard: the link to it}"""
    found = {}
    for file in FILES:
        module = module_of(file)
        found[module] = f"{module}.html"
        found |= {f"{module}.{name}": f"{module}.html#{name}" for name in definitions(file)}
    return found


def imports_of(file):
    """{name: address} of what a file imports."""
    found = {}
    for node in ast.walk(tree_of(file)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found |= {alias.asname or alias.name: prefix + alias.name for alias in node.names}
    return found


# ----------------------------------------------------------------------------------------------------------------- code

TOKEN = re.compile(r'''
    (?P<q> [rbf]* (?: """ (?s:.*?) """ | " (?: \\. | [^"\\\n] )* " | ' (?: \\. | [^'\\\n] )* ' ) )
  | (?P<em> \# .* )
  | (?P<var> \d (?: [\w.] | (?<=e) - )* )
  | (?P<name> [^\W\d] \w* )''', re.VERBOSE)


def highlighted(file):
    """Html of each line: keywords <b>, strings <q>, numbers <var>, comments <em>, definitions <dfn>, uses <a>. (In the
    reference no local name is also a function's.)"""
    module, known, text = module_of(file), imports_of(file), html.escape((HERE / file).read_text(), quote=False)
    ids = {(line, name.rpartition(".")[2]): name for name, line in definitions(file).items()}

    def tag_of(match):
        if match.lastgroup != "name" or keyword.iskeyword(match[0]):
            return "b" if match["name"] else match.lastgroup
        before = text[:match.start()]
        name = re.search(r"[\w.]*\Z", before[-99:])[0] + match[0]  # with what stands before its dots
        begins, dot, rest = name.partition(".")
        address = known.get(begins, f"{module}.{begins}") + dot + rest
        if found := ids.pop((before.count("\n") + 1, name), None):
            if before.endswith("\nclass "):
                known["self"] = f"{module}.{found}"
            return f'dfn id="{found}"'
        is_given = re.match(" *=(?!=)", text[match.end():][:9])  # a parameter, or what is assigned
        link = targets().get(address)
        return f'a href="{link}"' if link and name != "self" and not is_given else ""

    def tagged(match):
        tag = tag_of(match)
        lines = [f"<{tag}>{part}</{tag.split()[0]}>" for part in match[0].split("\n")] if tag else [match[0]]
        return "\n".join(lines)

    return TOKEN.sub(tagged, text).split("\n")


class Row:
    """Prose, and the numbers of the lines of code beside it. A row with a title begins a section."""

    def __init__(self, title=""):
        self.text, self.title, self.lines = "", title, []


def docstrings(tree):
    """{line: (its last line, its text)}"""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            is_file = isinstance(node, ast.Module)  # whose text begins at the margin, so that nothing is cut off
            if text := ast.get_docstring(node, clean=not is_file):
                found[node.body[0].lineno] = node.body[0].end_lineno, text
    return found


def rows_of(file):
    """A file's lines, all but blank ones, as rows in order. A class's first method stands beside the class's text."""
    lines, texts, rows, n = (HERE / file).read_text().splitlines(), docstrings(tree_of(file)), [Row(file)], 0
    while n < len(lines):
        n += 1
        line, row, gap = lines[n - 1], rows[-1], not lines[n - 2].strip()
        goes_on = n - 1 in row.lines and line.find("#") == lines[n - 2].find("#")  # from the comment before
        if n in texts:
            n, text = texts[n]
            row.text += "\n" + text
        elif line.lstrip().startswith("#") and not goes_on:
            said = line.strip().removeprefix("#").removeprefix(" ")
            if said.startswith("-----"):
                rows.append(Row(said.strip("- ")))
            else:
                if row.lines or gap:
                    rows.append(Row())
                rows[-1].text += said + "\n"
        elif line.strip():
            is_alone = len(row.lines) < 2 and n + 1 not in texts  # a class's first method, which has no text
            if row.title or gap and (line[0] != " " or re.match(" +(@|def )", line) and not is_alone):
                rows.append(Row())
            rows[-1].lines.append(n)
    return rows


# ---------------------------------------------------------------------------------------------------------------- prose

def inline(text, module=""):
    """Html of a paragraph. `code` leads to its definition in the file named before it, at first this module. **Bold**
    is Markdown's. Links to docs/reading.md lead to its page; of others the text stays."""
    def linked(match):
        nonlocal module
        name = match[1] or match[2]
        if name in FILES:
            module = address = module_of(name)
        else:
            address = f"{module}.{name}"
        code = f"<code>{name.replace(' ', ' <wbr>')}</code>"
        link = targets().get(address)
        return f'<a href="{link}">{code}</a>' if link else code

    text = html.escape(text, quote=False).replace("&lt;br&gt;", "<br>").replace("\\_", "_")
    text = re.sub(r"\[([^]]*)\]\((?:docs/)?reading\.md(#[^)]*)\)", r'<a href="reading.html\2">\1</a>', text)
    text = re.sub(r"\[([^]()]*)\]\([^)]*\)", r"\1", text)  # but not a kernel[(7,)](...)
    text = re.sub(r"`([^`]+)`|\b((?:further/)?\w+\.py)\b", linked, text)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)


def is_drawn(line):
    """Whether a line of a comment is a picture's: indented by four, or in columns."""
    return line.startswith("    ") or "   " in line


def prose(text, module):
    """Html of a docstring or comment."""
    out = ""
    for drawn, lines in itertools.groupby(text.splitlines(), is_drawn):
        block = "\n".join(lines)
        if drawn:
            out += f"<pre>{html.escape(textwrap.dedent(block))}</pre>\n"
        else:
            out += "".join(f"<p>{inline(part, module)}</p>\n" for part in block.split("\n\n") if part.strip())
    return out


def anchor(title):
    return re.sub(r"\W+", "-", title.lower())


def beside(row, code, module):
    """Html of a row: its prose to the left of its code, or above, where a picture needs the width."""
    text, above = prose(row.text, module), not row.lines
    above |= any(is_drawn(line) and len(line) > WIDE for line in row.text.splitlines())
    title = f'<h2 id="section-{anchor(row.title)}">{row.title}</h2>\n' if row.title else ""
    out = f'<section>{title}{text}</section>\n' if above else ""
    lines = ""
    for n in row.lines:
        gap = "" if code[n - 2] or n == row.lines[0] else " class=gap"  # a blank line before it
        lines += f'<span id="L{n}" data-n="{n}"{gap}>{code[n - 1]}</span>'
    return out + f'<div class="row"><div>{"" if above else text}</div><pre>{lines}</pre></div>\n' * bool(lines)


def file_page(file):
    rows, code = rows_of(file), highlighted(file)
    sections = "".join(f'<a href="#section-{anchor(row.title)}">{row.title}</a>\n' for row in rows[1:] if row.title)
    first, *others = [beside(row, code, module_of(file)) for row in rows]
    return f'{first}<nav>{sections}</nav>\n{"".join(others)}'


# ---------------------------------------------------------------------------------------------------------------- index

def markdown(text):
    """Html of the README's headings, paragraphs, tables, pictures and commands."""
    out = ""
    for block in filter(None, map(str.strip, text.split("\n\n"))):
        if block.startswith("#"):
            marks, _, title = block.partition(" ")
            out += f'<h{len(marks)} id="{anchor(title)}">{inline(title)}</h{len(marks)}>\n'
        elif block.startswith("|"):
            head, _, *rows = [re.split(r"\s*(?<!\\)\|\s*", line.strip("| ")) for line in block.splitlines()]
            out += "<table>" + "".join(f"<th>{name}</th>" for name in head)
            for row in rows:
                cells = [f'<td title="{name}">{inline(cell)}</td>' for name, cell in zip(head, row)]
                out += f"<tr>{''.join(cells)}</tr>\n"
            out += "</table>\n"
        elif picture := re.fullmatch(r"!\[(.*)\]\(.*(assets/.*)\)", block):
            out += f"<figure>{(HERE / picture[2]).read_text()}<figcaption>{picture[1]}</figcaption></figure>\n"
        elif block.startswith("- "):
            out += f"<ul>{''.join(f'<li>{inline(item)}</li>' for item in block[2:].split(chr(10) + '- '))}</ul>\n"
        elif block.startswith("```"):
            out += "<pre>" + html.escape(block.strip("`\n")) + "</pre>\n"
        else:
            out += f"<p>{inline(block)}</p>\n"
    return out


def index_page():
    """The README's beginning, and its reading path."""
    beginning, *sections = re.split(r"^(?=## )", (HERE / "README.md").read_text(), flags=re.M)
    return markdown(beginning + next(some for some in sections if "Reading path" in some.splitlines()[0]))


# -------------------------------------------------------------------------------------------------- pictures that move

STEPPED = {  # name: (frames, title, the stop it belongs to, what it shows)
    "ring": (ring_frames, "Ring all-reduce", "6-ring-all-reduce",
             "Four ranks, four chunks. A colour for each rank whose data is in a chunk; a line under what arrived."),
    "zero": (zero_frames, "ZeRO-3", "9-zero-3",
             "What rank 0 of four keeps of each layer, in the full edition, which gathers the next block meanwhile "
             "(further/prefetch.py). A quarter of a box is its own part; pale is on its way."),
    "tensor": (tensor_frames, "Tensor parallelism", "10-tensor-parallelism",
               "An MLP, Y = GeLU(X A) B, on two ranks. A cell is a number: blue is above 0, orange below.")}
FIXED = {"pipeline": lambda: {name: moving.pipeline({"schedule": name}) for name in SCHEDULES},
         "layout": lambda: {"fixed": moving.layout({})}}
CHOICES = {"SCHEDULES": [*SCHEDULES], "MODELS": [*PRESETS], "MACHINES": [*MACHINES]}


def asset(name):
    return (HERE / "lessons" / name).read_text()


def moving_page(name, live):
    """A picture that moves: its HTML, and explore.js with its data; live: a server has that of what has controls."""
    if name in STEPPED:
        frames, title, stop, says = STEPPED[name]
        body = string.Template(asset("steps.html")).substitute(title=title, stop=stop, says=says)
        data = [[svg_of(height, parts), said] for height, parts, said in frames()]
    else:
        body, data = asset(f"{name}.html"), None if live else FIXED[name]()
    given = {"NAME": name, "FIXED": data, **CHOICES}
    constants = "".join(f"const {key} = {json.dumps(value)};\n" for key, value in given.items()).replace("</", "<\\/")
    return f"<style>{asset('explore.css')}</style>\n{body}<script>\n{constants}{asset('explore.js')}</script>\n"


# ---------------------------------------------------------------------------------------------------------------- pages

OF_FILES = {module_of(file): file for file in FILES}
NAMES = ["index", "reading", *STEPPED, *FIXED, *OF_FILES]


def page_of(name, live=False):
    """A page's text. live: as for `moving_page`."""
    if name in OF_FILES:
        body = file_page(OF_FILES[name])
    elif name == "index":
        body = index_page()
    elif name == "reading":
        body = markdown((HERE / "docs/reading.md").read_text())
    else:
        body = moving_page(name, live)
    links = [f'<a href="{other}.html" class="{other == name}">{other}</a>' for other in NAMES]
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} - ringGPT</title><style>{asset("pages.css")}</style>
<nav>{" ".join(links)}</nav>
<main class="{"file" if name in OF_FILES else "text"}">
{body}</main></html>
"""


def pages(out):
    """The reference as HTML, prose beside code, behind the README's reading path; and pictures to step through."""
    check_folder(out, "--out")
    for name in NAMES:
        check_file(os.path.join(out, f"{name}.html"), "--out", rb"\n<title>.* - ringGPT</title>")
    for name in NAMES:
        pathlib.Path(out, f"{name}.html").write_text(page_of(name))
    print(f"{out}/index.html")
