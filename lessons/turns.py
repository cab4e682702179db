"""Lists of a schedule beside 1F1B: two models in the same processes, which take turns, a step each.

    python -m lessons turns lists.txt        a row a rank, as `python -m lessons pipeline` prints them

A machine is faster now and slower then. Two runs one after the other would meet different moments; steps in turns meet
the same ones. So medians can be compared, and the spread says how far.
"""

import json
import os
import pathlib
import statistics
import time

import numpy as np
import torch
import torch.distributed as torch_dist

import collectives as dist
import safe
from further.lists import parse, size_of_schedule
from lessons import moving
from lessons.bench.timing import of_all_ranks, say
from lessons.pictures import costs_of
from lessons.puzzles import HERE
from model import GPTConfig
from parallel import one_f_one_b
from safe import launch
from safe.reports import timed
from safe.sizes import BadInput
from theory.clock import simulate
from further.flags import Flags
from further.text import Bytes, split
from train import Trainer

STEPS = 11     # of each
WARM_UP = 2    # of these, which do not count
SECONDS = 100  # after which no further step begins, if four have counted
TOKENS = 64    # of a sequence


def trainers(lists, text, device):
    """{name: a Trainer}: of the lists, whose text it is, and of 1F1B. They train one model on the same batches."""
    p, m, v = size_of_schedule(lists)
    layers = 2 * p * v
    config = GPTConfig(n_layer=layers, n_embd=256, n_head=4, seq_len=TOKENS, vocab_size=256)
    tokens = np.frombuffer((HERE / "collectives.py").read_bytes(), np.uint8)

    def trainer(schedule, v):
        s = Flags(pp=p, micro_batches=m, batch_size=2 * m, n_layer=layers, n_embd=256, seq_len=TOKENS, steps=STEPS,
                  schedule=schedule, virtual_stages=v, dp=1, device="cpu")
        return Trainer(s, config, None, (*split(tokens), Bytes()), device)
    return {"yours": trainer(text, v), "1f1b": trainer("1f1b", 1)}


def measure(every):
    """Steps in turns: {name: [(the slowest rank's seconds, loss, each rank's actions with their times)]}."""
    found, begun = {name: [] for name in every}, time.perf_counter()
    for step in range(STEPS):
        for name, trainer in every.items():
            torch_dist.barrier()
            start = time.perf_counter()
            with timed(trainer.net.pipeline) as spans:
                loss = trainer.step(step).loss
            took = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            found[name].append((took.item(), trainer.mean_over_ranks(loss), of_all_ranks(spans)))
        late = time.perf_counter() - begun > SECONDS and step >= WARM_UP + 3
        if trainer.agree(late)[0]:
            break
    return found


def summary(lists, found):
    """What explore's page shows of `measure`, in ms. A step's time: its median and its middle half. measured: the
    pipeline of the step of median length; predicted: the clock's, with the F, I and W that were measured; clock: how
    long 1F1B's is on it, with its own F and B."""
    p, m, v = size_of_schedule(lists)
    said = {"layers": 2 * p * v, "ranks": p, "cores": launch.cores()}
    for name, steps in found.items():
        times = sorted(1e3 * seconds for seconds, *_ in steps[WARM_UP:])
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        said[name] = {"ms": middle, "low": low, "high": high, "steps": len(times),
                      "losses": [loss for _, loss, _ in steps]}

    def rows(name):
        """[each rank's computations] of each step that counts, from the fastest to the slowest."""
        return [[[(action, 1e3 * start, 1e3 * end) for action, start, end in row if action.kind in "FBIW"]
                 for row in ranks] for *_, ranks in sorted(found[name][WARM_UP:], key=lambda step: step[0])]

    def on_clock(name, lists, v):
        return simulate(lists, *(v * cost for cost in costs_of(sum(rows(name), []))))

    median = rows("yours")[len(found["yours"][WARM_UP:]) // 2]
    first = min(start for row in median for _, start, _ in row)
    return said | {"measured": moving.picture([[(action, start - first, end - first) for action, start, end in row]
                                               for row in median]),
                   "predicted": moving.picture(on_clock("yours", lists, v).spans),
                   "clock": on_clock("1f1b", one_f_one_b(p, m), 1).length}


def turns(file, out):
    """Train with the lists in a file and with 1F1B, in turns, and compare their steps."""
    try:
        text = pathlib.Path(file).read_text("utf-8-sig")
        lists = parse(text)
    except (OSError, ValueError) as error:
        why = str(getattr(error, "strerror", None) or error).partition("\n")[0]
        raise BadInput(f"{file}: {why}; give a row a rank, as `python -m lessons pipeline` prints") from None
    if "RANK" not in os.environ:
        launch.start_again(len(lists))
    safe.on()
    device = dist.initialize("cpu", rendezvous=launch.settled_rendezvous)
    found = measure(trainers(lists, text, device))
    if dist.get_rank() == 0:
        said = summary(lists, found)
        for name, title in ("yours", "these lists"), ("1f1b", "1F1B"):
            one = said[name]
            say(f"{title:<12} {one['ms']:.1f} ms a step, half of them {one['low']:.1f} to {one['high']:.1f}; loss "
                f"{one['losses'][-1]:.6f}")
        if out:
            pathlib.Path(out).write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


def add_to(lessons):
    """The lesson's flags, on the command line."""
    lesson = lessons.add_parser("turns", help=turns.__doc__)
    lesson.add_argument("file", metavar="FILE", help="a row a rank, as `python -m lessons pipeline` prints them")
    lesson.add_argument("--out", default="", metavar="FILE", help="what explore's page shows of it, as JSON")
    lesson.set_defaults(demo=turns)
