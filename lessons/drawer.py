"""The drawer: a picture is a Frame, rows of cells and arrows. It is drawn in a terminal, as SVG, or as steps of a page.

    terminal(frame)     a line a row
    svg_of(frame)       for a file, or for a page
    stepped(frames)     for a page that one steps through; lessons/pages.js has its buttons

Colours are of middle brightness, on no background, so that a picture can be read on a light page and on a dark one.
"""

import html
import pathlib
from typing import NamedTuple

COLOURS = "#4c8dd6", "#e0883a", "#4ba36b", "#9a6fc4", "#c2577a", "#888888"
GREY = "#8883"  # of what belongs to nobody
ROW = 20        # pixels from a row to the next; a cell is 18 high


class Cell(NamedTuple):
    """A box in row `row`, which need not be a whole number, from `x` on, with a text. colour "": the text alone. mark:
    the colour of an outline. place: what a page calls the cell."""
    row: float
    x: float
    text: str = ""
    width: float = 1
    colour: str = ""
    mark: str = ""
    place: str = ""


class Frame(NamedTuple):
    """cells: those that come later lie above. arrows: [(colour, (row, x), (row, x))], from the one to the other. names:
    {row: what stands at its left}. unit: pixels that 1 of x takes. left: pixels for the names."""
    cells: list
    says: str = ""
    arrows: tuple = ()
    names: dict = {}
    unit: float = 40
    left: int = 60


def moved(frame, down, right):
    """(cells, arrows, names) of a frame elsewhere."""
    cells = [cell._replace(row=cell.row + down, x=cell.x + right) for cell in frame.cells]
    arrows = [(colour, *((row + down, x + right) for row, x in points)) for colour, *points in frame.arrows]
    return cells, arrows, {row + down: name for row, name in frame.names.items()}


def stacked(frames):
    """Frames as one, below each other, each below what it says."""
    found, names, row = [], {}, 0.0
    for frame in frames:
        cells, _, named = moved(frame, row + 1, 0)
        names |= {row: frame.says} | named
        found += cells
        row = found[-1].row + 1.5
    return frames[0]._replace(cells=found, names=names)


# ------------------------------------------------------------------------------------------------------------- terminal

def terminal(frame):
    """What the frame says, then a line a row. What is outlined stands in brackets."""
    texts = [(cell, f"[{cell.text}]" if cell.mark else cell.text) for cell in frame.cells if cell.text]
    wide = max((len(text) + 1) / cell.width for cell, text in texts)  # characters that 1 of x takes
    margin = max(map(len, frame.names.values()), default=0) + 2
    lines = dict(frame.names)
    for cell, text in sorted(texts, key=lambda one: one[0].x):
        line = lines.get(cell.row, "")
        lines[cell.row] = line.ljust(margin + round(wide * cell.x)) + text
    return "\n".join([frame.says, *(lines[row] for row in sorted(lines))])


# ------------------------------------------------------------------------------------------------------------------ svg

START = '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" fill="#888" viewBox="0 0 '


def svg_of(frame, live=False):
    """live: a page asks cells for their places."""
    ends = [(cell.row, cell.x + cell.width) for cell in frame.cells] + [at for _, *way in frame.arrows for at in way]
    rows, right = zip(*ends)
    width = round(frame.left + frame.unit * max(right) + 6)
    names = [f'<text y="{ROW * row + 14:.4g}">{html.escape(name)}</text>' for row, name in frame.names.items()]
    cells = [f'<g data-place="{cell.place}">{box_of(frame, cell)}</g>' if live else box_of(frame, cell)
             for cell in frame.cells]
    return "\n".join([f'{START}{width} {ROW * (max(rows) + 1) + 2:.0f}" width="{width}" font-size="12">', *names,
                      '<g text-anchor="middle">', *cells, "</g>", *(arrow_of(frame, *one) for one in frame.arrows),
                      "</svg>"]) + "\n"


def box_of(frame, cell):
    x, y, width = frame.left + frame.unit * cell.x, ROW * cell.row + 1, max(frame.unit * cell.width - 1, 1)
    mark = f' stroke="{cell.mark}" stroke-width="2"' * bool(cell.mark)
    drawn = f'<path d="M{x:.4g} {y:.4g}h{width:.4g}v18h-{width:.4g}z" fill="{cell.colour or "none"}"{mark}/>'
    white = ' fill="#fff"' * (len(cell.colour) == 7)  # on a colour that nothing shines through
    text = f'<text x="{x + width / 2:.4g}" y="{y + 13:.4g}"{white}>{html.escape(cell.text)}</text>'
    return drawn * bool(cell.colour or cell.mark) + text * bool(cell.text)


def arrow_of(frame, colour, *ends):
    """It is level or upright."""
    (x0, y0), (x, y) = [(frame.left + frame.unit * x, ROW * row) for row, x in ends]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    head = " ".join(f"{x - 7 * dx + 4 * k * dy:.4g},{y - 7 * dy + 4 * k * dx:.4g}" for k in (-1, 1))
    return (f'<path d="M{x0:.4g} {y0:.4g}L{x - 5 * dx:.4g} {y - 5 * dy:.4g}" stroke="{colour}" stroke-width="2"/>'
            f'<polygon points="{x:.4g},{y:.4g} {head}" fill="{colour}"/>')


# ----------------------------------------------------------------------------------------------------------------- page

def html_page(title, body, script, menu="", kind="text"):
    """Html of a page, with its looks, and a script of this folder, in it."""
    look, code = (pathlib.Path(__file__).with_name(name).read_text() for name in ("pages.css", script))
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} - ringGPT</title><style>{look}</style>
{menu}
<main class="{kind}">
{body}</main><script>{code}</script></html>
"""


def stepped(title, says, frames):
    """Html of frames to step through. The first one shows without a script."""
    steps = "".join(f'<div class="step"{" hidden" * bool(i)}>{svg_of(frame)}<p role="status">{html.escape(frame.says)}'
                    f'</p></div>\n' for i, frame in enumerate(frames))
    buttons = "".join(f"<button>{name}</button> " for name in ("start", "back", "next", "end", "play"))
    return (f'<div class="stepped"><p><strong>{title}.</strong> {says}</p>\n<p class="buttons">{buttons}'
            f'<output>1 of {len(frames)}</output></p>\n{steps}</div>\n')
