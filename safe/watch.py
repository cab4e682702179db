"""A watch that ends a run that hangs, and names the rank to blame."""

import contextlib
import json
import os
import sys
import threading
import time
import traceback

import torch.distributed as torch_dist
from torch.distributed import get_rank, get_world_size

from collectives import attempt
from safe.files import tell
from safe.messages import PeerError, progress
from further.bad_input import BadInput


def doing():
    step, what, _ = progress()
    return f"step {step}, {what}"


class Watch:
    """Ends a run that hangs, and says which rank is to blame. A thread of each rank writes a sign of life into the
    store that torchrun keeps, every 0.2 s, and ends the process after `timeout` seconds without progress. Time in
    which the process was suspended (Ctrl-Z, a scheduler, a laptop's lid) does not count.

        watch = Watch(timeout); watch.start(); initialize(...); watch.connect()
        except Exception as error: watch.give_up(error)
        finally: watch.stop()

    how_to_go_on() is a line for the user, or "". The first rank that is alive prints it at the end. Each calls
    last_words(what it prints) before.

    A sign is [the time, how this rank ended, what it is doing]. A rank that gives up reads the last signs of the others
    and names those that are silent (killed, stopped, cut off); if all are alive, it says what each of them is doing.
    """

    store = None  # where the signs are, if there are other ranks
    end = None  # what this rank's sign says of its end: the error; "" if another rank is to blame
    thread = None

    def __init__(self, timeout, how_to_go_on=str, last_words=str):
        self.timeout = timeout
        self.how_to_go_on = how_to_go_on
        self.last_words = last_words
        self.pause = min(0.2, timeout / 10)
        self.ending = threading.Lock()
        self.done = threading.Event()

    def start(self):
        if "RANK" in os.environ:
            progress(f"meeting the others at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
            self.thread = threading.Thread(target=self._live, daemon=True)
            self.thread.start()

    def connect(self):
        """Call after `initialize`."""
        if get_world_size() > 1:
            progress("starting")
            # A connection of its own, because the group's may be blocked.
            store = torch_dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                                        wait_for_workers=False)
            self.store = torch_dist.PrefixStore(f"{attempt()}watch", store)

    def stop(self):
        """Call when all is done. The thread ends first, because it may not use the store while Python exits."""
        self.done.set()
        if self.thread:
            self.thread.join()

    def _sign(self):
        self.store.set(f"{get_rank()}", json.dumps([time.time(), self.end, doing()]))

    def _signs(self):
        """{rank: the last sign} of the other ranks."""
        keys = {rank: f"{rank}" for rank in range(get_world_size()) if rank != get_rank()}
        return {rank: json.loads(self.store.get(key)) if self.store.check([key]) else [0, None, "step 0, starting"]
                for rank, key in keys.items()}

    def _live(self):
        seen = None
        last = time.monotonic()
        idle = 0.0
        while not self.done.is_set():
            if self.store:
                with contextlib.suppress(torch_dist.DistError):  # it may have gone with its node
                    self._sign()
            since = progress()[2]
            now = time.monotonic()
            idle = idle + min(now - last, 5 * self.pause) if since == seen else 0.0  # more: it was suspended
            seen = since
            last = now
            if idle > self.timeout:
                self.give_up(f"no progress for {self.timeout} s")
            self.done.wait(self.pause)

    def _others(self):
        """(the silent ranks among the others, which these are in words). If none is, the words say which have failed;
        if none has, what each is doing."""
        before = self._signs()
        for turn in range(12):
            self._sign()  # because others must not take this rank for a silent one
            time.sleep(self.pause)
            if turn < 3:
                continue
            signs = self._signs()
            silent = {rank: f"rank {rank} gives no sign of life since {what}" for rank, (_, end, what) in signs.items()
                      if end is None and signs[rank] == before[rank]}
            if not silent:  # else somebody is dead, or has waited for a core
                break
        others = [f"rank {rank}: {what}" for rank, (_, end, what) in signs.items()]
        failed = [f"rank {rank} failed in {what}: {end}" for rank, (_, end, what) in signs.items() if end]
        return {*silent}, "; ".join([*silent.values()] or failed or others[:8])

    def give_up(self, error):
        """Print this rank, its step and operation, the error, and the state of the other ranks; end the process. What
        is wrong here and is no BadInput has a traceback, too."""
        if not self.ending.acquire(blocking=False):
            time.sleep(60)  # the other thread is about to end this process
        what = doing()
        others = ""
        silent = set()
        lost = isinstance(error, (str, PeerError, torch_dist.DistError))
        if not lost and not isinstance(error, BadInput):
            traceback.print_exception(error)
        if self.store:
            with contextlib.suppress(torch_dist.DistError):
                if lost:
                    silent, words = self._others()
                    others = f"; {words}"
                self.end = "" if lost else f"{type(error).__name__}: {error}"
                self._sign()
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        words = f"train.py: {rank}{what}: {error}{others}"
        tell(words, sys.stderr)
        ends = threading.Timer(30, os._exit, [1])  # a file system that hangs must not keep this process
        ends.daemon = True
        ends.start()
        with contextlib.suppress(Exception):
            self.last_words(words)
        first = not self.store or get_rank() == min({*range(get_world_size())} - silent)
        if first and not isinstance(error, BadInput) and (more := self.how_to_go_on()):
            tell(f"train.py: {more}", sys.stderr)
        os._exit(1)
