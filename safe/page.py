"""A run's page: its curves over steps, its memory, and what it said of itself, in one HTML file that loads nothing.

    python train.py --out runs/1     writes runs/1/index.html while it trains

The curves are SVG that Python writes from log.jsonl, so they need no script. assets/run.html is the look. As long as
the run goes on, one line of script says so if nothing has come for long, because who is killed writes no end.
"""

import contextlib
import html
import json
import math
import os
import pathlib
import re
import string
import time

from safe.files import keep_others
from further.bad_input import BadInput

LOOK = pathlib.Path(__file__).parent.parent / "assets/run.html"
CHARTS = {  # title: {key of a log's entry: its curve's name}
    "loss": {"loss": "training", "val_loss": "validation"}, "gradient norm": {"grad_norm": ""},
    "learning rate": {"lr": ""}, "tokens/s": {"tokens_per_s": ""}, "MFU": {"mfu": ""}}
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


def chart(title, curves, resumed=()):
    """Html of a run's curves, {name: points}, over the same steps; both axes name their ends. resumed: steps after
    which the run was started again."""
    steps, values = zip(*(point for points in curves.values() for point in points))
    left = min(steps)
    low = min(values)
    width = max(steps) - left or 1
    height = max(values) - low or 1

    def x_of(step):
        return 70 + 540 * (step - left) / width

    def y_of(value):
        return 170 - 150 * (value - low) / height

    axes = ""
    for value in {low, max(values)}:
        axes += f'<text x="62" y="{y_of(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>'
    for step in {left, max(steps)}:
        axes += f'<text x="{x_of(step):.1f}" y="191" text-anchor="middle">{step}</text>'
    for step in resumed:
        if left <= step <= max(steps):
            axes += (f'<path class="resumed" d="M{x_of(step):.1f} 15V175"><title>resumed after step {step}</title>'
                     '</path>')
    lines = last = ""
    for kind, (name, points) in zip(("curve", "curve other"), curves.items()):
        path = " ".join(f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in points)
        lines += f'<polyline class="{kind}" points="{path}"/>'
        last += f'<span class="{kind}">{f"{name} " if name else ""}{points[-1][1]:.5g}</span> '
    return (f'<figure><figcaption>{title}<br>{last}</figcaption>'
            f'<svg viewBox="0 0 640 196" role="img" aria-label="{title}"><path d="M70 15V175H615"/>{axes}'
            f'<text x="340" y="191" text-anchor="middle">step</text>{lines}</svg></figure>\n')


def sign_of_life(pause):
    """Html of when a run wrote its page. pause: the longest time, in seconds, that it let pass so far. If far more have
    passed for who looks at the page, the text is another."""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    # Only the reader's clock is asked: since when has this tab had the same page, which loads itself anew?
    return (f'<p id="sign">Written {when}; no pause before was longer than {pause:.0f} s.</p>\n'
            f'<script>const first = sessionStorage.getItem("{when}"), since = first ?? Date.now();\n'
            f'sessionStorage.setItem("{when}", since);\n'
            f'if (Date.now() - since > {max(60, round(10 * pause))}000) sign.textContent = '
            f'"No sign of life since {when}, though no pause before was longer than {pause:.0f} s: '
            'the run was killed, hangs, or does something that takes very long.";</script>\n')


def page_of(title, entries, more="", sign=""):
    """Html of a run's entries. sign: of life, of a run that goes on; else the page says where the run has ended."""
    unit = [entry["unit"] for entry in entries if "unit" in entry][-1:] or ["token"]
    resumed = sorted({entry["after_step"] for entry in entries if entry.get("after_step")})
    charts = ""
    for name, keys in CHARTS.items():
        curves = {own: points for key, own in keys.items() if (points := points_of(entries, key))}
        if curves:
            charts += chart(name + f", nats a {unit[0]}" * (name == "loss"), curves, resumed)
    return string.Template(LOOK.read_text()).substitute(
        title=html.escape(title), charts=charts, more=more,
        sign=sign or f"<p>Ended, after step {max((entry['step'] for entry in entries), default=0)}.</p>\n",
        refresh='<meta http-equiv="refresh" content="10">' * bool(sign))


def write_page(path, text):
    """A reader never sees half of it. It may be lost in a power cut, because it can be written again."""
    with open(f"{path}.part", "w", errors="replace") as file:
        file.write(text)
    os.replace(f"{path}.part", path)


class Page:
    """index.html of the run in --out, on rank 0. said: what the run has printed of itself, but for its steps. before:
    what its earlier launches have printed, as Html."""

    def __init__(self, folder):
        self.folder = folder
        self.said = []
        self.before = []
        self.next = 0.0
        self.pause = 1.0
        self.last = time.perf_counter()
        path = pathlib.Path(folder, "index.html")
        with contextlib.suppress(OSError, BadInput):
            keep_others(path, "--out")
            text = path.read_text(errors="replace")
            self.before = re.findall(r"<pre>(.*?)</pre>", text, re.S)
            if killed := re.search('<p id="sign">Written (.*?);', text):
                self.before[-1] += f"\nkilled   after {killed[1]}, or it could not say why it ended"

    def write(self, over=False):
        """Write it anew, unless the last time was so recent that this would take more than a hundredth of the run. A
        full disk costs the page, not the run. over: the run has ended, so readers need not load the page again."""
        start = time.perf_counter()
        if start < self.next and not over:
            return
        self.pause = max(self.pause, start - self.last)
        self.last = start
        path = pathlib.Path(self.folder, "index.html")
        with contextlib.suppress(OSError, BadInput):
            keep_others(path, "--out")
            entries = entries_of(self.folder)
            launches = [*self.before, html.escape("\n".join(self.said))]
            more = "".join(
                f"<details{' open' * (i == len(launches))}><summary>launch {i}</summary><pre>{said}</pre></details>\n"
                for i, said in enumerate(launches, 1))
            sign = "" if over else sign_of_life(self.pause)
            write_page(path, page_of(str(self.folder), entries, more, sign))
        now = time.perf_counter()
        self.next = now + 100 * (now - start)
