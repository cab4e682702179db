"""Pages to touch: schedules that one edits and runs, layouts to compare, beside the pages of `lessons.pages`.

    python -m lessons explore        prints an address, for a browser on this machine

The browser draws. What it draws is computed here, by theory/, by `check`, and by lessons/turns.py, which trains with
what was edited.
The server listens at 127.0.0.1 alone. It answers requests that name it as Host and know the token in its address, and
only with what stands in `TABLES`: no path leads to a file.
"""

import functools
import hmac
import json
import os
import pathlib
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl

from further.lists import parse, size_of_schedule
from lessons import moving, pages
from lessons.puzzles import HERE
from safe.sizes import BadInput, reject

LIMIT = 1 << 18  # bytes of a request's body; 16 ranks with 64 micro-batches and 4 stages each are 110,000
SECONDS = 300    # that a run may take


# ------------------------------------------------------------------------------------------------------ lists that run

running, drawing, stopping = threading.Lock(), threading.Lock(), threading.Event()


def turns(file, has_left):
    """What `python -m lessons turns` finds of the lists in this file. BadInput if has_left() or the server stops."""
    folder = pathlib.Path(file).parent
    said, found, end = folder / "said", folder / "found.json", time.monotonic() + SECONDS
    with open(said, "w") as output:
        process = subprocess.Popen([sys.executable, "-m", "lessons", "turns", file, "--out", found], cwd=HERE,
                                   start_new_session=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                   env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)})
    try:
        while process.poll() is None:
            reject(has_left() or stopping.wait(0.1), "the run was given up")
            reject(time.monotonic() > end, f"the run takes more than {SECONDS} s")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with its ranks
            process.wait()
    code = process.returncode
    reject(code, f"the run ended with exit code {code}: {said.read_text(errors='replace')[-500:]}")
    return json.loads(found.read_text())


def run(query, has_left=lambda: False):
    """Train with the lists in query["text"] and with 1F1B, in turns: what `turns` returns."""
    lists = parse(query.get("text", ""))
    p, _, v = size_of_schedule(lists)
    sizes = {"ranks": (p, 8), "stages a rank": (v, 4), "actions": (sum(map(len, lists)), 1024)}
    for what, (count, most) in sizes.items():
        reject(count > most, f"these lists have {count} {what}: give at most {most} to run them here")
    reject(not running.acquire(blocking=False), "another run is under way: wait for its end")
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            text = pathlib.Path(folder, "lists.txt")
            text.write_text(query["text"])
            return turns(text, has_left)
    finally:
        running.release()


# --------------------------------------------------------------------------------------------------------------- server

@functools.cache
def page(name):
    """A page's text, computed when it is asked for the first time. One at a time, because some pages run ranks as
    threads, and two such worlds do not fit into a process."""
    with drawing:
        return pages.page_of(name, live=True)


DATA = {"pipeline.json": moving.pipeline, "layout.json": moving.layout}
TABLES = {"GET": {**DATA, **{f"{name}.html": lambda query, name=name: page(name) for name in pages.NAMES}},
          "POST": {**DATA, "run": run}}  # a list may be too long for an address
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
           "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
                                      "style-src 'unsafe-inline'; frame-ancestors 'none'"}


class Explorer(BaseHTTPRequestHandler):
    timeout = 20  # seconds that a browser may be silent in the middle of a request

    def do_GET(self):
        self.tell(self.path.partition("?")[2])

    def do_POST(self):
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length[:9]) > LIMIT:
            self.answer(413, f"give a body of at most {LIMIT} bytes, with its Content-Length")
            while self.rfile.read1(1 << 16):  # a browser that still sends would see a broken connection, and no answer
                pass
            return
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            return self.answer(400, f"the body ends after {len(body)} of {length} bytes")
        self.tell(body.decode(errors="replace"))

    def has_left(self):
        """Whether the browser has closed this connection."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return True

    def tell(self, query):
        token, _, name = self.path.partition("?")[0][1:].partition("/")
        knows = hmac.compare_digest(token.encode(), self.server.token.encode())
        if not knows or self.headers.get("Host") not in self.server.hosts:
            return self.answer(403, "give the address that `python -m lessons explore` has printed")
        if name not in TABLES[self.command]:
            return self.answer(404, "no such page: give pipeline.html, layout.html or index.html")
        try:
            given = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=20))
            found = run(given, self.has_left) if name == "run" else TABLES[self.command][name](given)
        except ValueError as problem:
            return self.answer(400, str(problem))
        if name.endswith(".html"):
            self.answer(200, found, "text/html")
        else:
            self.answer(200, json.dumps(found), "application/json")

    def answer(self, status, text, kind="text/plain"):
        body = text.encode()
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8", "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nothing, because the terminal shows the address."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """A browser that leaves in the middle of an answer is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def server_at(port):
    """A server that is not running yet. port: 0 takes one that is free."""
    try:
        server = Server(("127.0.0.1", port), Explorer)
    except (OSError, OverflowError) as problem:
        raise BadInput(f"--port {port}: {problem}; leave --port out, and a free one is taken") from None
    server.token = secrets.token_urlsafe(16)
    server.hosts = {f"{name}:{server.server_port}" for name in ("127.0.0.1", "localhost")}
    return server


def explore(port):
    """Schedules to edit and run, layouts to compare, in a browser on this machine."""
    with server_at(port) as server:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl-C does
        print(f"http://127.0.0.1:{server.server_port}/{server.token}/pipeline.html\nCtrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            stopping.set()
            running.acquire(timeout=10)  # until a run has ended its processes and removed its folder
