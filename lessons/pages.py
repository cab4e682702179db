"""Pages: the reference as a small site, prose beside the code it speaks of.

    python -m lessons pages --out site           then open site/index.html in a browser; left out, it is runs/site
    python -m lessons pages --show ring          a picture of the site, step by step, in the terminal
    python -m lessons pages --assets assets      README's and docs' pictures again

The index is lessons/micro.py, with its pictures. A stop of docs/reading.md is a page, which has its pictures, the
source of the functions that it names, and beside each command a button that copies it. A file of the reference is a
page: docstrings and comments stand on the left, the code that follows them on the right. Names lead to definitions.
Nothing is loaded from elsewhere. pages.css, beside this file, is the look; pages.js has the buttons.
"""

import ast
import functools
import html
import itertools
import keyword
import os
import pathlib
import re
import textwrap

from lessons import puzzles
from lessons.drawer import html_page, stepped, svg_of, terminal
from lessons.pictures import check_picture, DRAWN, STEPPED
from lessons.puzzles import HERE
from safe.files import check_file, check_folder
from further.bad_input import reject

MICRO = "lessons/micro.py"
FILES = [MICRO, "lessons/lecture8.py", *(name for name in puzzles.FILES if "__" not in name)]
WIDE = 52  # columns: wider drawings stand above their code, not beside it


# ------------------------------------------------------------------------------------------------- what names lead to

def module_of(file):
    return file.removesuffix(".py").replace("/", ".")


def page_name(file):
    return "index" if file == MICRO else module_of(file)


PAGES = {page_name(file): file for file in FILES}
@functools.cache
def tree_of(file):
    return ast.parse((HERE / file).read_text())


def defined(body, prefix=""):
    """{name: its node} of what these statements define; of several of one name the first."""
    found = {}
    for node in body:
        for target in [node] if hasattr(node, "name") else node.targets if isinstance(node, ast.Assign) else []:
            name = getattr(target, "name", None) or getattr(target, "id", "")
            found.setdefault(prefix + name, node)
        if isinstance(node, ast.ClassDef):
            found |= defined(node.body, f"{node.name}.")
    return found


@functools.cache
def targets():
    """{address, such as parallel.Unit.gather: (file, its node)}; a file's own address has its tree."""
    found = {module_of(file): (file, tree_of(file)) for file in FILES}
    return found | {f"{module_of(file)}.{name}": (file, node)
                    for file in FILES for name, node in defined(tree_of(file).body).items()}


def link_to(address):
    """To where a name is defined; "" if it is not in FILES."""
    if address not in targets():
        return ""
    file = targets()[address][0]
    return f"{page_name(file)}.html#{address[len(module_of(file)) + 1:]}".removesuffix("#")


@functools.cache
def imports_of(file):
    """{name: address} of what a file imports."""
    return {alias.asname or alias.name: f"{getattr(node, 'module', '')}.{alias.name}".lstrip(".")
            for node in ast.walk(tree_of(file)) if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names}


# ----------------------------------------------------------------------------------------------------------------- code

TOKEN = re.compile(r'''
    (?P<q> [rbf]* (?: """ (?s:.*?) """ | " (?: \\. | [^"\\\n] )* " | ' (?: \\. | [^'\\\n] )* ' ) )
  | (?P<em> \# .* )
  | (?P<var> \d (?: [\w.] | (?<=e) - )* )
  | (?P<name> [^\W\d] [\w.]* )''', re.VERBOSE)


@functools.cache
def highlighted(file):
    """Html of each line: keywords <b>, strings <q>, numbers <var>, comments <em>, definitions <dfn>, uses <a>. (In the
    reference no local name is also a function's.)"""
    text = html.escape((HERE / file).read_text(), quote=False)
    ids = {(node.lineno, name.rpartition(".")[2]): name for name, node in reversed(defined(tree_of(file).body).items())}

    def tagged(match):
        tag, name = match.lastgroup, match[0]
        if tag == "name":
            begins, dot, rest = name.partition(".")
            link = link_to(imports_of(file).get(begins, f"{module_of(file)}.{begins}") + dot + rest)
            place = ids.pop((text.count("\n", 0, match.start()) + 1, name), None)
            is_given = re.match(" *=(?!=)", text[match.end():match.end() + 9])  # a parameter, or what is assigned
            tag = ("b" if keyword.iskeyword(name) else f'dfn id="{place}"' if place else
                   f'a href="{link}"' if link and not is_given else "")
        return "\n".join(f"<{tag}>{part}</{tag.split()[0]}>" for part in name.split("\n")) if tag else name

    return TOKEN.sub(tagged, text).split("\n")


def blocks_of(file, first=1, last=None):
    """Lines of a file as blocks [title, prose, numbers of the lines of code beside it], in order. Docstrings, and
    comments at the margin, are prose. What has a docstring begins a block; a line of dashes begins a section."""
    documented = [node for node in ast.walk(tree_of(file))
                  if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)]
    texts = {node.body[0].lineno: (node.body[0].end_lineno, ast.get_docstring(node)) for node in documented}
    begins = {min(part.lineno for part in (node, *node.decorator_list)) for node in documented[1:]}
    lines, blocks, n = (HERE / file).read_text().splitlines()[:last], [["" if last else file, "", []]], first
    while n <= len(lines):
        line = lines[n - 1]
        is_comment = line.startswith("#")
        if n in begins or line.startswith("# ---") or is_comment and blocks[-1][2]:
            blocks.append(["", "", []])
        if n in texts:
            n, text = texts[n]
            blocks[-1][1] += text + "\n"
        elif line.startswith("# ---"):
            blocks[-1][0] = line.strip("#- ")
        elif is_comment:
            blocks[-1][1] += line[2:] + "\n"
        elif line:
            blocks[-1][2].append(n)
        n += 1
    return blocks


# ---------------------------------------------------------------------------------------------------------------- prose

COMMAND = re.compile(r"(python|torchrun|plain|pytest)\b .+")


def code_of(text, found):
    """Html of `text` in prose: a name leads to its definition, a command gets a button. found: as of `inline`."""
    address = module_of(text) if text in FILES else f"{found['in']}.{text}"
    if link := link_to(address):
        found[address] = None
        return f'<a href="{link}"><code>{text}</code></a>'
    button = '<button class="copy">copy</button>' * bool(COMMAND.fullmatch(text))
    return f"<code>{text.replace(' ', ' <wbr>')}</code>{button}"


def inline(text, module="", found=None):
    """Html of a paragraph. A name is looked up in the file that was named before it, at first in this module. found:
    {"in": that file's module, of the paragraph before, and of this one; address: None of what was named}."""
    found = {"in": module} if found is None else found

    def linked(match):
        name = match[1] or match[2]
        if name in FILES:
            found["in"] = module_of(name)
        return code_of(name, found)

    def led(match):
        name, page, place = match[1], *re.fullmatch(r"(?:docs/)?(?:(\w+)\.md)?(#.*)?|.*", match[2]).groups()
        stop = re.match(r"#(\d+)-", place or "")
        target = f"stop-{stop[1]}.html" if stop else f"{page}.html{place or ''}" if page in DOCS else ""
        return f'<a href="{target}">{name}</a>' if target else name

    text = re.sub(r"\[([^]()]*)\]\(([^)]*)\)", led, html.escape(text, quote=False))  # but not a kernel[(7,)](...)
    text = re.sub(r"`([^`]+)`|\b((?:further/|lessons/)?\w+\.py)\b", linked, text.replace("\\_", "_"))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)


def is_drawn(line):
    """Whether a line of a comment is a drawing's: indented by four, or in columns."""
    return line.startswith("    ") or "   " in line


def prose(text, module):
    """Html of a docstring or comment."""
    out = ""
    for drawn, lines in itertools.groupby(text.splitlines(), is_drawn):
        block = "\n".join(lines)
        out += f"<pre>{html.escape(textwrap.dedent(block))}</pre>\n" if drawn else "".join(
            f"<p>{inline(part, module)}</p>\n" for part in block.split("\n\n") if part.strip())
    return out


def anchor(title):
    """As GitHub makes a heading's."""
    return re.sub(r"[^\w -]", "", re.sub(r"\]\(.*?\)", "", title).lower()).replace(" ", "-")


def beside(file, title, text, numbers):
    """Html of a block: its prose to the left of its code, or above, where a drawing needs the width."""
    code, said = highlighted(file), prose(text, module_of(file))
    above = not numbers or any(is_drawn(line) and len(line) > WIDE for line in text.splitlines())
    head = f'<h2 id="section-{anchor(title)}">{title}</h2>\n' if title else ""
    lines = "".join(f'<span id="L{n}" data-n="{n}"{"" if code[n - 2] else " class=gap"}>{code[n - 1]}</span>'
                    for n in numbers)
    out = f"<section>{head}{said * above}</section>\n" if above or title else ""
    return out + f'<div class="row"><div>{said * (not above)}</div><pre>{lines}</pre></div>\n' * bool(lines)


@functools.cache
def picture(name):
    frames, title, says, _ = STEPPED[name]
    return stepped(title, says, frames())


def file_page(file):
    """A file's blocks. In lessons/micro.py pictures stand above the functions that do what they show."""
    blocks = blocks_of(file)
    sections = "".join(f'<a href="#section-{anchor(title)}">{title}</a>\n' for title, *_ in blocks[1:] if title)
    shown = {defined(tree_of(MICRO).body)[place].lineno: name for name, (*_, place) in STEPPED.items()}
    body = [beside(file, *block) for block in blocks]
    if file == MICRO:
        body = ["".join(picture(shown[n]) for n in block[2] if n in shown) + html
                for block, html in zip(blocks, body)]
    return f"{body[0]}<nav>{sections}</nav>\n{''.join(body[1:])}"


# ----------------------------------------------------------------------------------------------------------------- docs

DOCS = "reading", "words", "lecture"


def doc(name):
    return (HERE / f"docs/{name}.md").read_text()


def table(lines, found):
    """Html of a Markdown table."""
    head, _, *rows = [re.split(r"\s*(?<!\\)\|\s*", re.sub(r"^\| ?| ?\|$", "", line)) for line in lines]
    out = "<table>" + "".join(f"<th>{inline(name)}</th>" for name in head)
    for row in rows:
        out += "<tr>" + "".join(f"<td>{inline(cell, found=found)}</td>" for cell in row) + "</tr>\n"
    return out + "</table>\n"


def markdown(text, found=None):
    """Html of a page's headings, paragraphs, tables, pictures, lists and commands. found: as of `inline`."""
    for name, target in re.findall(r"^\[(.+)\]: (.+)$", text, re.M):  # what [name] stands for
        text = re.sub(rf"(?<![\w`])\[{re.escape(name)}\](?![(:])", f"[{name}]({target})", text)
    parts = re.split(r"^ *```\w*\n(.*?)^ *```$", re.sub(r"^\[.+\]: .+$", "", text, flags=re.M), flags=re.M | re.S)
    out = ""
    for i, part in enumerate(parts):
        if i % 2:
            button = '<button class="copy">copy</button>' * bool(COMMAND.search(part))
            out += f"<div>{button}<pre>{html.escape(textwrap.dedent(part).rstrip())}</pre></div>\n"
        else:
            out += "".join(told(block, found) for block in filter(None, map(str.strip, part.split("\n\n"))))
    return out


def told(block, found):
    """Html of what stands between blank lines, outside of blocks of code."""
    if block.startswith(("<details>", "</details>", "<!--")):
        return block + "\n"
    if block.startswith("#"):
        marks, _, title = block.partition(" ")
        return f'<h{len(marks)} id="{anchor(title)}">{inline(title)}</h{len(marks)}>\n'
    if block.startswith("|"):
        return table(block.splitlines(), found)
    if shown := re.fullmatch(r"!\[(.*)\]\(.*(assets/.*)\)", block):
        return f"<figure>{(HERE / shown[2]).read_text()}<figcaption>{shown[1]}</figcaption></figure>\n"
    if block.startswith("- "):
        items = "".join(f"<li>{inline(item, found=found)}</li>" for item in block[2:].split("\n- "))
        return f"<ul>{items}</ul>\n"
    return f"<p>{inline(block, found=found)}</p>\n"


def stops():
    """{a stop's number: its title and text}, in the order in which to read, which is docs/reading.md's."""
    parts = re.split(r"^### (\d+)\. ", doc("reading"), flags=re.M)
    return {n: re.split(r"^##", text, flags=re.M)[0] for n, text in zip(parts[1::2], parts[2::2])}


@functools.cache
def stops_of_pictures():
    """{a picture: the first stop that names its page}"""
    return {name: n for name in STEPPED for n, text in reversed(stops().items()) if f"/{name}.html" in text}


def stop_page(n):
    """A stop: its pictures, its text, and the source of what it names."""
    title, _, rest = stops()[n].partition("\n")
    found = {"in": ""}
    text = markdown(rest, found)
    found.pop("in")
    pictures = "".join(picture(name) for name, stop in stops_of_pictures().items() if stop == n)
    source = ""
    for address in found:
        file, node = targets()[address]
        if not isinstance(node, ast.Module):
            rows = "".join(beside(file, *block) for block in blocks_of(file, node.lineno, node.end_lineno))
            is_short = node.end_lineno - node.lineno < 40
            source += (f'<details class="source"{" open" * is_short}><summary><code>{address}</code></summary>'
                       + re.sub(r' id="[^"]*"', "", rows) + "</details>\n")
    return f"<h1>{n}. {inline(title)}</h1>\n{pictures}{text}<h2>Source</h2>\n{source}"


# ---------------------------------------------------------------------------------------------------------------- pages

def contents():
    """{a group of the bar: {a page's name: what is shown for it}}"""
    return {"read": {"index": "micro.py", "lessons.lecture8": "lecture8.py"} | {name: name for name in DOCS},
            "stops": {f"stop-{n}": f"{n}. {text.partition(chr(10))[0]}" for n, text in stops().items()},
            "pictures": {name: title for name, (_, title, *_) in STEPPED.items()},
            "files": {name: file for name, file in PAGES.items() if "/" not in file},
            "further": {name: file for name, file in PAGES.items() if file.startswith("further")}}


def page_of(name):
    """A page's text."""
    if name in PAGES:
        body = file_page(PAGES[name])
    elif name in DOCS:
        body = markdown(doc(name))
    elif name in STEPPED:
        body = picture(name)
    else:
        body = stop_page(name.removeprefix("stop-"))
    menus = "".join(
        f'<details name="menu"><summary class="{name in labels}">{group}</summary><div>'
        + "".join(f'<a href="{page}.html" class="{page == name}">{label}</a>' for page, label in labels.items())
        + "</div></details>" for group, labels in contents().items())
    return html_page(name, body, "pages.js", f"<nav>{menus}</nav>", "file" if name in PAGES else "text")


def in_terminal(name):
    """Print a picture, step by step."""
    reject(name not in STEPPED, f"--show {name}: give one of {', '.join(STEPPED)}")
    frames, title, says, _ = STEPPED[name]
    print("\n\n".join([f"{title}. {says}", *map(terminal, frames())]))


def write_assets(folder):
    check_folder(folder, "--assets")
    for name in DRAWN:
        check_picture(os.path.join(folder, f"{name}.svg"), "--assets")
    for name, draw in DRAWN.items():
        pathlib.Path(folder, f"{name}.svg").write_text(svg_of(draw()))


def pages(out="runs/site", show=None, assets=None):
    """The reference as HTML, prose beside code, with pictures that one steps through.

    --show NAME prints a picture, such as ring, in the terminal. --assets FOLDER writes README's and docs' pictures.
    """
    if show:
        return in_terminal(show)
    if assets:
        return write_assets(assets)
    names = [name for labels in contents().values() for name in labels]
    check_folder(out, "--out")
    for name in names:
        check_file(os.path.join(out, f"{name}.html"), "--out", rb"\n<title>.* - ringGPT</title>")
    for name in names:
        pathlib.Path(out, f"{name}.html").write_text(page_of(name))
    print(f"{out}/index.html")
