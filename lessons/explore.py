"""Pages to touch: schedules that one edits and runs, layouts to compare, beside the pages of `lessons.pages`.

    python -m lessons explore        prints an address, for a browser on this machine

The browser draws. What it draws is computed here, by theory/, by `check`, and by train.py, which runs what was edited.
The server listens at 127.0.0.1 alone. It answers requests that name it as Host and know the token in its address, and
only with what stands in `TABLES`: no path leads to a file.
"""

import functools
import hmac
import json
import os
import pathlib
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from further.lists import parse
from lessons import moving, pages
from lessons.pictures import spans_of
from lessons.puzzles import HERE
from parallel import ranks_of_stages
from safe.sizes import BadInput, reject
from theory.clock import simulate

LIMIT = 1 << 16  # bytes of a request's body
SECONDS = 300    # that a run may take
STEPS = 3        # of a run: the third one is traced


# ------------------------------------------------------------------------------------------------------ lists that run

def train(folder, lists, *flags):
    """Run train.py on lists of this size. Returns the losses of its steps."""
    m = 1 + max(action.micro_batch for action in lists[0])
    sizes = {"pp": len(lists), "micro-batches": m, "batch-size": 2 * m, "n-layer": 2 * len(ranks_of_stages(lists)),
             "n-embd": 256, "steps": STEPS, "sample": 0, "eval-every": 0, "log-every": 1, "device": "cpu",
             "data": "collectives.py", "out": f"{folder}/out"}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    done = subprocess.run([sys.executable, "train.py", *words, *flags], cwd=HERE, timeout=SECONDS, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    reject(done.returncode, f"train.py ended with exit code {done.returncode}: {done.stdout[-500:]}")
    return [json.loads(line)["loss"] for line in open(f"{folder}/out/log.jsonl")]


def costs_of(spans, v):
    """[F, I, W]: medians of what a micro-batch takes on a rank's v stages. A B that ran whole counts half as each."""
    times = defaultdict(list)
    for action, start, end in sum(spans, []):
        times[action.kind].append(v * (end - start))
    half = statistics.median(times.pop("B", [0])) / 2
    return [statistics.median(times.get(kind, [half])) for kind in "FIW"]


running, drawing = threading.Lock(), threading.Lock()


def run(query):
    """Train with 1F1B and with the lists in query["text"]: the losses of both; how long the lists took, measured, and
    by the clock with the F, I and W that were measured."""
    lists = parse(query.get("text", ""))
    v = len(ranks_of_stages(lists)) // len(lists)
    reject(len(lists) > 8 or v > 4 or sum(map(len, lists)) > 1024, "too many: give at most 8 ranks and 4 stages a rank")
    reject(not running.acquire(blocking=False), "another run is under way: wait for its end")
    try:
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
            text = pathlib.Path(two, "lists.txt")
            text.write_text(query["text"])
            losses = {"1f1b": train(one, lists), "yours": train(two, lists, "--schedule-file", text, "--trace", two)}
            spans = spans_of(json.loads(pathlib.Path(two, "trace.json").read_text()), 1e-3)
    finally:
        running.release()
    predicted = simulate(lists, *costs_of(spans, v)).spans
    return {"losses": losses, "predicted": moving.picture(predicted), "measured": moving.picture(spans)}


# --------------------------------------------------------------------------------------------------------------- server

@functools.cache
def page(name):
    """A page's text, computed when it is asked for the first time. One at a time, because some pages run ranks as
    threads, and two such worlds do not fit into a process."""
    with drawing:
        return pages.page_of(name, live=True)


TABLES = {"GET": {"pipeline.json": moving.pipeline, "layout.json": moving.layout,
                  **{f"{name}.html": lambda query, name=name: page(name) for name in pages.NAMES}},
          "POST": {"run": run}}
KINDS = {"html": "text/html", "json": "application/json", "run": "application/json"}
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
           "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
                                      "style-src 'unsafe-inline'; frame-ancestors 'none'"}


class Explorer(BaseHTTPRequestHandler):
    timeout = 20  # seconds that a browser may be silent in the middle of a request

    def do_GET(self):
        self.tell(urlsplit(self.path).query)

    def do_POST(self):
        length = self.headers.get("Content-Length", "")
        if length.isdecimal() and int(length[:9]) <= LIMIT:
            self.tell(self.rfile.read(int(length)).decode(errors="replace"))
        else:
            self.answer(413, f"give a body of at most {LIMIT} bytes, with its Content-Length")

    def tell(self, query):
        token, _, name = urlsplit(self.path).path[1:].partition("/")
        knows = hmac.compare_digest(token.encode(), self.server.token.encode())
        if not knows or self.headers.get("Host") not in self.server.hosts:
            return self.answer(403, "give the address that `python -m lessons explore` has printed")
        if name not in TABLES[self.command]:
            return self.answer(404, "no such page: give pipeline.html, layout.html or index.html")
        try:
            found = TABLES[self.command][name](dict(parse_qsl(query, max_num_fields=20)))
        except (ValueError, subprocess.TimeoutExpired) as problem:
            return self.answer(400, str(problem))
        text = found if isinstance(found, str) else json.dumps(found)
        self.answer(200, text, KINDS[name.rpartition(".")[2]])

    def answer(self, status, text, kind="text/plain"):
        body = text.encode()
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8", "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nothing, because the terminal shows the address."""


def server_at(port):
    """A server that is not running yet. port: 0 takes one that is free."""
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Explorer)
    except (OSError, OverflowError) as problem:
        raise BadInput(f"--port {port}: {problem}; leave --port out, and a free one is taken") from None
    server.daemon_threads = True
    server.token = secrets.token_urlsafe(16)
    server.hosts = {f"{name}:{server.server_port}" for name in ("127.0.0.1", "localhost")}
    return server


def explore(port):
    """Schedules to edit and run, layouts to compare, in a browser on this machine."""
    with server_at(port) as server:
        print(f"http://127.0.0.1:{server.server_port}/{server.token}/pipeline.html\nCtrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
