"""Pages: the reference as a small site, prose beside the code it speaks of.

    python -m lessons pages --out site    then open site/index.html in a browser; left out, it is runs/site

A page a file. Docstrings and comments stand on the left, the code that follows them on the right, with its line
numbers. Names lead to their definitions, in any file. The index is the README's reading path, whose stops are a page
each. Besides, there are pictures that one steps through by buttons. Nothing is loaded from elsewhere, and scripts run
in these pictures alone.
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
from lessons.frames import ring_frames, tensor_frames, WIDTH, zero_frames
from lessons.pictures import svg_of
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
    """{address, such as parallel.ZeRO1.make_stepped: the link to it}"""
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

def link_of(target, home):
    """Where a Markdown link of the page `home` leads among the pages; "" if it leads elsewhere."""
    found = re.fullmatch(r"(?:docs/)?(?:(reading|words|lecture)\.md)?(#.*)?", target)
    page, place = (found[1] or home, found[2] or "") if found else ("", "")
    stop = re.match(r"#(\d+)-", place) if page == "reading" else None
    return f"stop-{stop[1]}.html" if stop else page and f"{page}.html{place}"


def inline(text, module="", home="index"):
    """Html of a paragraph. `code` leads to its definition in the file named before it, at first this module. **Bold**
    is Markdown's. Links between pages are kept; of others the text stays."""
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

    def led(match):
        link = link_of(match[2], home)
        return f'<a href="{link}">{match[1]}</a>' if link else match[1]

    text = html.escape(text, quote=False).replace("&lt;br&gt;", "<br>").replace("\\_", "_")
    text = re.sub(r"\[([^]()]*)\]\(([^)]*)\)", led, text)  # but not a kernel[(7,)](...)
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
    """As GitHub makes a heading's."""
    return re.sub(r"[^\w -]", "", re.sub(r"\]\(.*?\)", "", title).lower()).replace(" ", "-")


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

def table(lines, home):
    """Html of a Markdown table."""
    head, _, *rows = [re.split(r"\s*(?<!\\)\|\s*", re.sub(r"^\| ?| ?\|$", "", line)) for line in lines]
    out = "<table>" + "".join(f"<th>{inline(name, home=home)}</th>" for name in head)
    for row in rows:
        cells = [f'<td title="{name.replace("`", "")}">{inline(cell, home=home)}</td>' for name, cell in zip(head, row)]
        out += f"<tr>{''.join(cells)}</tr>\n"
    return out + "</table>\n"


def markdown(text, home):
    """Html of a page's headings, paragraphs, tables, pictures, lists and commands."""
    for name, target in re.findall(r"^\[(.+)\]: (.+)$", text, re.M):  # what [name] stands for
        text = re.sub(rf"(?<![\w`])\[{re.escape(name)}\](?![(:])", f"[{name}]({target})", text)
    text = re.sub(r"^\[.+\]: .+$", "", text, flags=re.M)
    parts = re.split(r"^ *```\w*\n(.*?)^ *```$", text, flags=re.M | re.S)  # every second one is code
    return "".join(f"<pre>{html.escape(textwrap.dedent(part).rstrip())}</pre>\n" if i % 2 else told(part, home)
                   for i, part in enumerate(parts))


def told(text, home):
    """Html of what stands between blocks of code."""
    out = ""
    for block in filter(None, map(str.strip, text.split("\n\n"))):
        if block.startswith(("<details>", "</details>", "<!--")):
            out += block + "\n"
        elif block.startswith("#"):
            marks, _, title = block.partition(" ")
            out += f'<h{len(marks)} id="{anchor(title)}">{inline(title, home=home)}</h{len(marks)}>\n'
        elif block.startswith("|"):
            out += table(block.splitlines(), home)
        elif picture := re.fullmatch(r"!\[(.*)\]\(.*(assets/.*)\)", block):
            out += f"<figure>{(HERE / picture[2]).read_text()}<figcaption>{picture[1]}</figcaption></figure>\n"
        elif block.startswith("- "):
            items = [f"<li>{inline(item, home=home)}</li>" for item in block[2:].split("\n- ")]
            out += f"<ul>{''.join(items)}</ul>\n"
        else:
            out += f"<p>{inline(block, home=home)}</p>\n"
    return out


def index_page():
    """The README's beginning, and its reading path."""
    beginning, *sections = re.split(r"^(?=## )", (HERE / "README.md").read_text(), flags=re.M)
    return markdown(beginning + next(some for some in sections if "Reading path" in some.splitlines()[0]), "index")


def doc(name):
    return (HERE / f"docs/{name}.md").read_text()


def stops():
    """{a stop's number: its title and text}, in the order in which to read."""
    parts = re.split(r"^### (\d+)\. ", doc("reading"), flags=re.M)
    return {n: re.split(r"^##", text, flags=re.M)[0] for n, text in zip(parts[1::2], parts[2::2])}


def reading_page():
    """docs/reading.md, where a link stands for each stop."""
    text = doc("reading")
    for n, stop in stops().items():
        title = f"{n}. {stop.partition(chr(10))[0]}"
        text = text.replace(f"### {n}. {stop}", f"### [{title}](#{anchor(title)})\n\n")
    return markdown(text, "reading")


def stop_page(n):
    """A stop, with a link to its picture that moves, and its question, which the README has."""
    page = next((page for page, of in STOP_OF.items() if of == n), "")
    link = f'<p><a href="{page}.html">Its picture, to step through</a></p>\n' if page else ""
    title, _, rest = stops()[n].partition("\n")
    question = re.search(rf"^\| \[{n}\. .*\| (.*) \|$", (HERE / "README.md").read_text(), re.M)[1]
    asks = f"**Then answer.** {question} [The answers](reading.md#answers) come last."
    return markdown(f"# {n}. {title}\n", "reading") + link + markdown(f"{rest}\n\n{asks}\n", "reading")


# -------------------------------------------------------------------------------------------------- pictures that move

STEPPED = {  # name: (frames, title, what it shows)
    "ring": (ring_frames, "Ring all-reduce", "Four ranks add up their tensors. A colour for each rank whose numbers "
             "are in a chunk; an arrow from each sender to its receiver."),
    "zero": (zero_frames, "ZeRO-3", "What four ranks keep of each piece of a model in a step. A box is a "
             "rank's weights, and below them its gradients, in quarters 0 to 3."),
    "tensor": (tensor_frames, "Tensor parallelism", "An MLP, Y = GeLU(X A) B, on two ranks. Blue is rank 0's, orange "
               "rank 1's, grey is the same on both. Multiply along: a row at the left with a column above.")}
FIXED = {"pipeline": lambda: {name: moving.pipeline({"schedule": name}) for name in SCHEDULES},
         "layout": lambda: {"fixed": moving.layout({})}}
STOP_OF = {"ring": "1", "zero": "3", "tensor": "4", "pipeline": "5", "layout": "9"}
CHOICES = {"SCHEDULES": [*SCHEDULES], "MODELS": [*PRESETS], "MACHINES": [*MACHINES]}


def asset(name):
    return (HERE / "lessons" / name).read_text()


def moving_page(name, live):
    """A picture that moves: its HTML, and explore.js with its data; live: a server has that of what has controls."""
    if name in STEPPED:
        frames, title, says = STEPPED[name]
        body = string.Template(asset("steps.html")).substitute(title=title, stop=STOP_OF[name], says=says)
        data = [[svg_of(height, parts, WIDTH), said] for height, parts, said in frames()]
    else:
        body, data = asset(f"{name}.html"), None if live else FIXED[name]()
    given = {"NAME": name, "FIXED": data, **CHOICES}
    constants = "".join(f"const {key} = {json.dumps(value)};\n" for key, value in given.items()).replace("</", "<\\/")
    return f"<style>{asset('explore.css')}</style>\n{body}<script>\n{constants}{asset('explore.js')}</script>\n"


# ---------------------------------------------------------------------------------------------------------------- pages

OF_FILES = {module_of(file): file for file in FILES}
GROUPS = {  # of the bar: {a page's name: what is shown for it}
    "read": {name: name for name in ("index", "reading", "words", "lecture")},
    "stops": {f"stop-{n}": f"{n}. {text.partition(chr(10))[0]}" for n, text in stops().items()},
    "pictures": {name: name for name in (*STEPPED, *FIXED)},
    "files": {name: file for name, file in OF_FILES.items() if "/" not in file},
    "further": {name: file.removeprefix("further/") for name, file in OF_FILES.items() if "/" in file}}
NAMES = [name for group in GROUPS.values() for name in group]


def bar(name):
    """The row above a page: a menu for each group, and which of its group the page is, between its neighbours."""
    menus = place = ""
    for group, labels in GROUPS.items():
        links = "".join(f'<a href="{page}.html" class="{page == name}">{label}</a>' for page, label in labels.items())
        menus += f'<details name="menu"><summary class="{name in labels}">{group}</summary><div>{links}</div></details>'
        if name in labels:
            order = [*labels]
            at = order.index(name)
            stop = STOP_OF.get(name, name.removeprefix("stop-"))
            here = (f'<a href="stop-{stop}.html">stop {stop} of {len(GROUPS["stops"])}</a>' if stop.isdecimal() else
                    f"{at + 1} of {len(order)}")
            around = (order[at - 1] if at else "", "&lsaquo;"), ([*order, ""][at + 1], "&rsaquo;")
            before, after = (f'<a href="{page}.html" title="{labels[page]}">{sign}</a>' if page else sign
                             for page, sign in around)
            place = f"<span>{before} {here} {after}</span>"
    return f"<nav>{menus}{place}</nav>"


def page_of(name, live=False):
    """A page's text. live: as for `moving_page`."""
    if name in OF_FILES:
        body = file_page(OF_FILES[name])
    elif name == "index":
        body = index_page()
    elif name == "reading":
        body = reading_page()
    elif name in GROUPS["read"]:
        body = markdown(doc(name), name)
    elif name in GROUPS["stops"]:
        body = stop_page(name.removeprefix("stop-"))
    else:
        body = moving_page(name, live)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} - ringGPT</title><style>{asset("pages.css")}</style>
{bar(name)}
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
