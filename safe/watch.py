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

from safe.messages import PeerError, progress
from safe.sizes import BadInput


# ---------------------------------------------------------------------------------- a watch for hung runs, and the demo

class Watch:
    """Ends a run that hangs, and says which rank is to blame. A thread of each rank writes a sign of life into the
    store that torchrun keeps, every 0.2 s, and ends the process after `timeout` seconds without progress.

        watch = Watch("train.py", timeout); initialize(...); watch.start()
        except Exception as error: watch.give_up(error)
        finally: watch.done = True

    A sign is `progress()`. A rank that gives up reads the last signs of the others and names those that are silent
    (killed, stopped, cut off); if all are alive, it says what each of them is doing.
    """

    store = None  # where the signs are, if there are other ranks
    end = None  # what this rank's sign says of its end: the error; "" if another rank is to blame
    done = False

    def __init__(self, name, timeout):
        self.name, self.timeout, self.pause, self.ending = name, timeout, min(0.2, timeout / 10), threading.Lock()

    def start(self):
        """Call after `initialize`."""
        if get_world_size() > 1:
            progress("starting")
            # A connection of its own, because the group's may be blocked.
            self.store = torch_dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                                             wait_for_workers=False)
            threading.Thread(target=self._live, daemon=True).start()

    def _sign(self):
        self.store.set(f"watch/{get_rank()}", json.dumps([time.time(), self.end, *progress()]))

    def _live(self):
        while not self.done:
            with contextlib.suppress(torch_dist.DistError):  # the store may have gone with its node
                self._sign()
            if time.monotonic() - progress()[2] > self.timeout:
                self.give_up(f"no progress for {self.timeout} s")
            time.sleep(self.pause)

    def _others(self):
        """In words: which other ranks are silent; if none is, which have failed; if none has, what each is doing."""
        def signs():
            keys = {r: f"watch/{r}" for r in range(get_world_size()) if r != get_rank()}
            return {r: json.loads(self.store.get(key)) if self.store.check([key]) else [0, None, 0, "starting", 0]
                    for r, key in keys.items()}

        before, silent, failed, others = signs(), [], [], []
        for _ in range(4):
            self._sign()  # because others must not take this rank for a silent one
            time.sleep(self.pause)
        for r, sign in signs().items():
            _, end, step, what, _ = sign
            others.append(f"rank {r}: step {step}, {what}")
            if end:
                failed.append(f"rank {r} failed in step {step}, {what}: {end}")
            elif end is None and sign == before[r]:
                silent.append(f"rank {r} gives no sign of life since step {step}, {what}")
        return "; ".join(silent or failed or others[:8])

    def give_up(self, error):
        """Print this rank, its step and operation, the error, and the state of the other ranks; end the process. What
        is wrong here and is no BadInput has a traceback, too."""
        if not self.ending.acquire(blocking=False):
            time.sleep(60)  # the other thread is about to end this process
        step, what, _ = progress()
        lost, others = isinstance(error, (str, PeerError, torch_dist.DistError)), ""
        if not lost and not isinstance(error, BadInput):
            traceback.print_exception(error)
        if self.store:
            with contextlib.suppress(torch_dist.DistError):
                others = f"; {self._others()}" if lost else ""
                self.end = "" if lost else f"{type(error).__name__}: {error}"
                self._sign()
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        line = f"{self.name}: {rank}step {step}, {what}: {error}{others}\n"
        print(line, end="", file=sys.stderr, flush=True)  # written at once, or lines of several ranks would mix
        os._exit(1)
