"""Lists that one edits and runs: schedules, and ZeRO's letters, in a browser on this machine.

    python -m lessons explore        prints an address

The page draws nothing: what it shows is drawn here, further/lists.py proves the lists, and train.py runs them, by
--schedule, and then 1F1B.
The server listens at 127.0.0.1 alone. It answers requests that name it as Host and know the token in its address.
"""

import hmac
import json
import os
import pathlib
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl

from further.lists import check_weights, LETTERS, parse, size_of_schedule
from further.schedules import SCHEDULES
from lessons.drawer import html_page, svg_of
from lessons.pictures import as_it_ran, on_clock, spans_of, stuck, text_of
from lessons.puzzles import HERE
from parallel import ScheduleError, with_weights
from further.bad_input import BadInput, reject

LIMIT = 1 << 18  # bytes of a request's body; 16 ranks with 64 micro-batches and 4 stages each are 110,000
SECONDS = 300    # that a run may take


# ---------------------------------------------------------------------------------------------------------------- lists

def number(query, name, default, most):
    text = query.get(name, str(default))[:9]
    reject(not text.isdecimal() or not 1 <= int(text) <= most, f"{name} {text}: give a number from 1 to {most}")
    return int(text)


def has_letters(lists):
    return any(action.kind in LETTERS for actions in lists for action in actions)


def lists_of(query):
    """(lists, ZeRO's stage, what is kept at once) of {"text"} or {"schedule", "p", "m", "v"}, and {"zero"}, empty for
    lists without G, D and A. On one rank a stage is a piece of the model, and the first one is the embedding.
    ScheduleError, with the place, if they cannot run."""
    zero, name = query.get("zero", ""), query.get("schedule", "1f1b")
    reject(zero not in ("", *"0123") or name not in SCHEDULES, "give a schedule and a stage of ZeRO that the page has")
    if "text" in query:
        lists = parse(query["text"])
        reject(has_letters(lists) and not zero, "G, D and A are for a stage of ZeRO: choose one")
    else:
        lists = SCHEDULES[name](*(number(query, *most) for most in (("p", 4, 16), ("m", 8, 64), ("v", 2, 8))))
    lookups = (0,) if len(lists) == 1 and size_of_schedule(lists)[2] > 1 else ()
    if "text" not in query and zero:
        lists = [with_weights(actions, int(zero), lookups) for actions in lists]
    kept = [check_weights(lists, rank, int(zero), lookups) for rank in range(len(lists))] if zero else []
    return lists, int(zero or 0), kept


def grid(query):
    """The lists of a query on a clock, where F, I and W of a rank's stages take 1 each."""
    try:
        lists, _, kept = lists_of(query)
    except ScheduleError as error:
        why = str(error).partition("\n")[0]
        return {"svg": svg_of(stuck(error), live=True), "text": query["text"], "says": "", "why": why}
    frame, timeline = on_clock(lists)
    says = (f"{timeline.length:g} long, of which a rank idles {max(timeline.idle):.4g}, "
            f"{max(timeline.idle) / timeline.length:.0%}. Activations are held of {max(timeline.peak):g} at most.")
    if kept:
        whole, waiting = map(max, zip(*kept))
        says += f" At most {whole} pieces are whole at once, and gradients of {waiting} wait for an A."
    return {"svg": svg_of(frame, live=True), "text": text_of(lists), "says": says, "why": ""}


# ------------------------------------------------------------------------------------------------------ lists that run

running, stopping = threading.Lock(), threading.Event()


def run(query):
    """Train with a query's lists, then with 1F1B: how long their steps took, whether losses are equal, and the lists as
    they ran. A stage has two pieces of the model, or on a single rank one, as far as a block is between the ends."""
    lists, zero, _ = lists_of(query)
    p, m, v = size_of_schedule(lists)
    dp, layers = 1 + has_letters(lists), max(1, v - 2 if p == 1 else 2 * p * v - 2)
    for what, count, most in ("ranks", p * dp, 8), ("actions", sum(map(len, lists)), 1024):
        reject(count > most, f"these lists have {count} {what}: give at most {most} to run them here")
    flags = (f"--pp {p} --dp {dp} --zero {zero} --micro-batches {m} --batch-size {2 * m * dp} --n-layer {layers} "
             "--n-embd 256 --n-head 4 --seq-len 64 --steps 11 --log-every 1 --eval-every 0 --sample 0 "
             "--device cpu").split()
    reject(not running.acquire(blocking=False), "another run is under way: wait for its end")
    stopping.clear()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            file = pathlib.Path(folder, "lists.txt")
            file.write_text(text_of(lists))
            ours, ran = trained(pathlib.Path(folder, "lists"), [*flags, "--schedule", file])
            plain, _ = trained(pathlib.Path(folder, "1f1b"), flags)
    finally:
        running.release()
    low, middle, high = statistics.quantiles([2e3 * m * dp * 64 / step["tokens_per_s"] for step in ours[3:]])
    is_equal = all(abs(a["loss"] - b["loss"]) < 1e-4 for a, b in zip(ours, plain))
    return {"says": f"{p * dp} ranks, --n-layer {layers}, 11 steps: a step takes {middle:.0f} ms, half of them "
            f"{low:.0f} to {high:.0f}. The last loss is {ours[-1]['loss']:.4f}. All losses are "
            f"{'' if is_equal else 'NOT '}those of 1F1B. The third step as it ran:",
            "svg": svg_of(as_it_ran(ran[::dp]))}


def trained(folder, flags):
    """(the log's steps, all ranks' spans of the third one) of a run of train.py. BadInput if it is given up."""
    command = [sys.executable, "train.py", *flags, "--out", folder, "--profile", folder / "profile"]
    said, end = folder.with_suffix(".log"), time.monotonic() + SECONDS
    with open(said, "w") as output:
        process = subprocess.Popen(command, cwd=HERE, start_new_session=True, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=output, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        while process.poll() is None:
            reject(stopping.wait(0.1), "the run was given up")
            reject(time.monotonic() > end, f"the run takes more than {SECONDS} s")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with its ranks
            process.wait()
    code = process.returncode
    reject(code, f"the run ended with exit code {code}: {said.read_text(errors='replace')[-500:]}")
    steps = [*map(json.loads, (folder / "log.jsonl").read_text().splitlines())]
    return steps, spans_of(json.loads((folder / "profile/trace.json").read_text()))


# --------------------------------------------------------------------------------------------------------------- server

def body():
    options = "".join(f"<option{' selected' * (name == '1f1b')}>{name}</option>" for name in SCHEDULES)
    return (HERE / "lessons/explore.html").read_text().replace("OPTIONS", options)


HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
           "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
                                      "style-src 'unsafe-inline'; frame-ancestors 'none'"}


class Explorer(BaseHTTPRequestHandler):
    timeout = 20  # seconds that a browser may be silent in the middle of a request

    def do_GET(self):
        self.tell("GET", "")

    def do_POST(self):
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length[:9]) > LIMIT:
            return self.answer(413, f"give a body of at most {LIMIT} bytes, with its Content-Length")
        self.tell("POST", self.rfile.read(int(length)).decode(errors="replace"))

    def tell(self, method, body):
        token, _, name = self.path[1:].partition("/")
        knows = hmac.compare_digest(token.encode(), self.server.token.encode())
        if not knows or self.headers.get("Host") not in self.server.hosts:
            return self.answer(403, "give the address that `python -m lessons explore` has printed")
        answers = {"grid": grid, "run": run, "cancel": lambda query: stopping.set()} if method == "POST" else {}
        if (method, name) == ("GET", ""):
            return self.answer(200, html_page("explore", body(), "explore.js"), "text/html")
        if name not in answers:
            return self.answer(404, "there is no such page")
        try:
            query = dict(parse_qsl(body, keep_blank_values=True, max_num_fields=20))
            self.answer(200, json.dumps(answers[name](query)), "application/json")
        except ValueError as problem:
            self.answer(400, str(problem))

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
    server.token = secrets.token_urlsafe(16)
    server.hosts = {f"{name}:{server.server_port}" for name in ("127.0.0.1", "localhost")}
    return server


def explore(port=0):
    """Lists to edit and run, in a browser on this machine.

    --port 0 takes one that is free.
    """
    with server_at(port) as server:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl-C does
        print(f"http://127.0.0.1:{server.server_port}/{server.token}/\nCtrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            stopping.set()
            running.acquire(timeout=10)  # until a run has ended its processes and removed its folder
