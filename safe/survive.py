"""Processes that may die: who starts them and says who lives, and how the living meet again, for further/survive.py."""

import atexit
import contextlib
import json
import os
import pathlib
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from functools import partial

import torch.distributed as torch_dist

import collectives as dist
from safe import launch
from safe.files import tell

OURS = "survive"  # the run id of ranks that `start` has started
LEFT = 3          # the exit code of a rank that leaves, because its replica has lost another


def is_ours():
    return os.environ.get("TORCHELASTIC_RUN_ID") == OURS


def start(n, saved):
    """Run this command line again as n ranks, in this process's place, and exit when all have ended. No rank is ended,
    unless one refuses the command line. A file tells them [how many are dead, whether one has done all steps, who
    lives]. saved() -> whether rank 0 has written all."""
    store = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    codes, ranks = [], {}
    launch.share_cores(n)
    with tempfile.TemporaryDirectory() as folder:
        news = pathlib.Path(folder, "news")

        def publish():
            dead = sum(code not in (0, LEFT) for code in codes)
            news.with_suffix(".part").write_text(json.dumps([dead, 0 in codes, sorted(ranks.values())]))
            news.with_suffix(".part").replace(news)

        same = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
                "TORCHELASTIC_RUN_ID": OURS, "TORCHELASTIC_USE_AGENT_STORE": True, "RINGGPT_NEWS": news}
        for rank in range(n):
            own = {name: str(value) for name, value in (same | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            ranks[subprocess.Popen([sys.executable, *sys.argv], env=os.environ | own).pid] = rank
        publish()
        tell(f"survive  ranks 0 to {n - 1} are processes {' '.join(map(str, ranks))}")
        interrupted = []
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # the terminal sends it to the ranks, too
            signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
        for number in launch.ENDS:
            signal.signal(number, lambda number, _: [os.kill(pid, number) for pid in [*ranks]])
        while ranks:
            pid, status = os.wait()
            if pid not in ranks:  # a child of the shell in whose place this process runs
                continue
            rank = ranks.pop(pid)
            codes.append(os.waitstatus_to_exitcode(status))
            publish()
            if codes[-1] == 2:  # it has said why
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
                sys.exit(2)
            if codes[-1] not in (0, LEFT) and not interrupted:
                how = f"signal {-codes[-1]}" if codes[-1] < 0 else f"exit code {codes[-1]}"
                tell(f"survive  rank {rank} is dead ({how}); {len(ranks)} live", sys.stderr)
    sys.exit(130 if interrupted else 0 if 0 in codes and saved() else 1)


class Meeting:
    """`meet` of further/survive.py's Survivor. A thread reads the news. When somebody is dead, it closes this process's
    connections, so that whatever the process waits for has an error: a message, or others who want to meet."""
    epoch = -1  # how many were dead when this rank last met others
    waits = False  # whether for the words of others

    def __init__(self, timeout):
        self.timeout = timedelta(seconds=timeout)
        torch_dist.Backend.register_backend("mortal", self.make_group, devices="cpu")
        dist.DEVICE["mortal"] = "cpu"
        self.me = int(os.environ["RANK"])
        launch.settled_rendezvous("cpu", timeout)
        self.adopting = threading.Lock()
        threading.Thread(target=self.listen, daemon=True).start()

    def news(self):
        return json.loads(pathlib.Path(os.environ["RINGGPT_NEWS"]).read_text())

    def listen(self):
        with contextlib.suppress(OSError):  # at the end of all the file goes
            while True:
                time.sleep(0.05)
                with self.adopting:
                    dead, over, _ = self.news()
                    if -1 < self.epoch < dead or over and self.waits:
                        hang_up()

    def make_group(self, store, rank, size, timeout):
        """gloo's. A thread makes it, and is left alone when somebody dies: it may wait for one who does not come, on no
        connection that can be closed."""
        worker = dist.Worker()
        made = worker.start(partial(torch_dist.ProcessGroupGloo, store, rank, size, timeout))
        while not made.is_completed():
            if self.epoch < self.news()[0]:
                atexit.unregister(worker.close)
                raise RuntimeError("somebody has died while a group was made")
            time.sleep(0.01)
        worker.close()
        return made.wait()

    def next_news(self):
        """TimeoutError if nobody else is dead, so that the peer who is missed lives."""
        for _ in range(200):
            with self.adopting:
                dead, over, living = self.news()
                if dead > self.epoch or over:
                    self.epoch = dead
                    return over, living
            time.sleep(0.05)
        raise TimeoutError("a message has not come, but no rank is dead")

    def __call__(self, choose, word):
        while True:
            self.waits = False
            if torch_dist.is_initialized():
                dist.destroy_process_group()
            over, living = self.next_news()
            stay = [] if over else choose(living)
            if self.me not in stay:
                return None
            with contextlib.suppress(RuntimeError):  # somebody has died since
                store = torch_dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                                            wait_for_workers=False, timeout=self.timeout)
                store = torch_dist.PrefixStore(f"epoch {self.epoch}", store)
                store.set(f"{self.me}", json.dumps(word))
                self.waits = True
                words = [json.loads(store.get(f"{rank}")) for rank in stay]
                self.waits = False
                torch_dist.distributed_c10d._world.group_count = 0  # one that was not made has counted
                dist.init_process_group("mortal", store=store, rank=stay.index(self.me), world_size=len(stay),
                                        timeout=self.timeout)
                return stay, words


def hang_up():
    """Close this process's connections. (gloo's `abort` leaves threads waiting that wait already, torch 2.13.)"""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.family != socket.AF_UNIX and connection.getpeername():  # a listener has no peer
                    connection.shutdown(socket.SHUT_RDWR)
