"""A run that goes on when one of its ranks is killed: further/survive.py.

    python -m lessons survive
"""

import os
import pathlib
import random
import signal
import subprocess
import sys

TRAIN = pathlib.Path(__file__).parents[1] / "train.py"


def demo_survive(dp=3, zero=0, kill_at=60):
    """Trains on dp processes, kills one of them after so many steps, and the others go on. Kill more yourself."""
    flags = f"--survive --dp {dp} --zero {zero} --steps 200 --log-every 20 --batch-size 12 --n-layer 2 --sample 0"
    with subprocess.Popen([sys.executable, TRAIN, *flags.split()], stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout:
            print(line, end="", flush=True)
            _, found, processes = line.partition("are processes ")
            if found:
                ranks = [*map(int, processes.split())]
            if line.startswith("step") and line.split("/")[0].split()[-1] == str(kill_at):
                killed = random.choice(ranks)
                print(f"killing process {killed}: kill -9 {killed}", flush=True)
                os.kill(killed, signal.SIGKILL)
    sys.exit(run.returncode)
