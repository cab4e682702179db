"""A run's page: its curves over steps, its memory, and what it said of itself, in one HTML file that loads nothing.

    python train.py --out runs/1     writes runs/1/index.html while it trains
    python -m lessons runs runs/*    draws several runs in one picture

The curves are SVG that Python writes from log.jsonl, so the page needs no script. assets/run.html is the look.
"""

import contextlib
import html
import json
import math
import os
import pathlib
import string
import time

from safe.files import keep_others
from safe.sizes import BadInput

LOOK = pathlib.Path(__file__).parent.parent / "assets/run.html"
CURVES = {"loss": "loss, nats a token", "val_loss": "validation loss, nats a token", "grad_norm": "gradient norm",
          "lr": "learning rate", "tokens_per_s": "tokens/s", "mfu": "MFU"}
MOST = 500  # points of a curve, more than a screen shows


def entries_of(folder):
    """The steps in a run's log.jsonl, as dicts; somebody's notes among them are left out."""
    entries = []
    with open(pathlib.Path(folder, "log.jsonl"), errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and isinstance(entry.get("step"), int):
                    entries.append(entry)
    return entries


def points_of(entries, key):
    """[(step, value)] of what is a number, every so many that few enough are left, and the last."""
    points = [(entry["step"], entry[key]) for entry in entries
              if isinstance(entry.get(key), (int, float)) and math.isfinite(entry[key])]
    return points[:-1:len(points) // MOST + 1] + points[-1:]


def chart(title, lines):
    """Html of a curve for each run, {its name: points}, on one scale. A run without points keeps its colour."""
    steps, values = zip(*(point for points in lines.values() for point in points))
    left = min(steps)
    low = min(values)
    width = max(steps) - left or 1
    height = max(values) - low or 1
    curves = names = ""
    for i, (name, points) in enumerate(lines.items()):
        if not points:
            continue
        path = " ".join(f"{70 + 540 * (x - left) / width:.1f},{170 - 150 * (y - low) / height:.1f}" for x, y in points)
        curves += f'<polyline class="c{i % 6}" points="{path}"/>'
        names += f'<span class="c{i % 6}">{html.escape(name)} {points[-1][1]:.5g}</span> '
    return (f'<figure><figcaption>{title}<br>{names}</figcaption><svg viewBox="0 0 620 190" role="img" '
            f'aria-label="{title}"><path d="M70 15V175H615"/>{curves}<text x="62" y="24" text-anchor="end">'
            f'{max(values):.4g}</text><text x="62" y="174" text-anchor="end">{low:.4g}</text>'
            f'<text x="70" y="188">{left}</text><text x="610" y="188" text-anchor="end">step {max(steps)}</text>'
            '</svg></figure>\n')


def page_of(title, runs, more="", refresh=""):
    """Html of several runs, {name: entries}, in one picture a curve."""
    charts = ""
    for key, name in CURVES.items():
        lines = {run: points_of(entries, key) for run, entries in runs.items()}
        charts += chart(name, lines) if any(lines.values()) else ""
    return string.Template(LOOK.read_text()).substitute(
        title=html.escape(title), charts=charts, more=more, refresh=refresh)


def memory_table(entries):
    """Html of a rank's memory, of the last start that has measured it."""
    found = [entry for entry in entries if "measured_bytes" in entry][-1:]
    rows = "".join(f"<tr><th>{kind}<td>{entry['predicted_bytes'][kind] / 2**20:,.1f}<td>{measured / 2**20:,.1f}"
                   for entry in found for kind, measured in entry["measured_bytes"].items())
    return rows and f"<table><tr><th>MiB of a rank<th>predicted<th>measured{rows}</table>\n"


def write_page(path, text):
    """A reader never sees half of it. It may be lost in a power cut, because it can be written again."""
    with open(f"{path}.part", "w", errors="replace") as file:
        file.write(text)
    os.replace(f"{path}.part", path)


class Page:
    """index.html of the run in --out, on rank 0. said: what the run has printed of itself, but for its steps."""

    def __init__(self, folder):
        self.folder = folder
        self.said = []
        self.next = 0.0

    def write(self, over=False):
        """Write it anew, unless the last time was so recent that this would take more than a hundredth of the run. A
        full disk costs the page, not the run. over: the run has ended, so readers need not load the page again."""
        start = time.perf_counter()
        if start < self.next and not over:
            return
        path = pathlib.Path(self.folder, "index.html")
        with contextlib.suppress(OSError, BadInput):
            keep_others(path, "--out")
            entries = entries_of(self.folder)
            more = memory_table(entries) + f"<pre>{html.escape(chr(10).join(self.said))}</pre>"
            refresh = "" if over else '<meta http-equiv="refresh" content="10">'
            write_page(path, page_of(str(self.folder), {"": entries}, more, refresh))
        now = time.perf_counter()
        self.next = now + 100 * (now - start)
