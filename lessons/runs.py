"""Several runs in one picture, from the log.jsonl that each has left in its --out."""

import os

from lessons.bench.timing import say
from safe.files import check_file, OURS, writable
from safe.page import entries_of, page_of, write_page
from safe.sizes import reject


def runs(folders, out):
    """The curves of several runs in one picture, losses in bits a byte: `python -m lessons runs runs/*`."""
    logged = [folder for folder in folders if os.path.isfile(os.path.join(folder, "log.jsonl"))]
    found = {folder: entries for folder in logged if (entries := entries_of(folder))}
    reject(not found, f"{folders[0]}: no log.jsonl with a step is there; give a folder of train.py's --out, e.g. "
           "runs/1")
    with writable(os.path.dirname(out) or ".", "--out"):
        check_file(out, "--out", OURS["index.html"])
        write_page(out, page_of(" ".join(found), found, in_bits=True))
    say(out)


def add_to(lessons):
    """The lesson's flags, on the command line."""
    lesson = lessons.add_parser("runs", help=runs.__doc__)
    lesson.add_argument("folders", nargs="+", metavar="FOLDER", help="train.py's --out; others are left out")
    lesson.add_argument("--out", default="runs/index.html", metavar="FILE", help="the page")
    lesson.set_defaults(demo=runs)
