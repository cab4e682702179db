"""Each strategy in its editions, beside one process: the lecture's short form, the full one, fast/'s.

    python -m lessons forms --ranks 2
"""

import os
import sys
import time
import warnings
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks

import collectives as dist
import parallel
import train
from fast.edition import Fast
from further.full import Full
from lessons.bench.peers import token_loss
from lessons.bench.timing import of_all_ranks, say
from lessons.lecture8 import gpipe_step
from lessons.puzzles import HERE
from model import GPT, GPTConfig
from safe.reports import storages

EDITIONS = {"lecture": parallel.Lecture, "full": Full, "fast": Fast}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # its momentum is an optimizer's state
STEPS = 3

# ZeRO3's hooks stand at the embeddings, too, whose inputs, tokens, have no gradient.
warnings.filterwarnings("ignore", "Full backward hook is firing")


def tokens_of(config, step, ranks):
    """Tokens and targets: 4 sequences for each rank of data parallelism, or 4 micro-batches a stage."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(config.vocab_size, (2, 4 * ranks, config.seq_len), generator=generator)


class Saved:
    """What autograd keeps of a tensor until backward. Of parameters nothing is counted: they are there all the time."""
    now = most = 0  # bytes

    def __init__(self, tensor):
        self.tensor = tensor
        self.nbytes = 0 if isinstance(tensor, torch.nn.Parameter) or tensor._base is not None else tensor.nbytes
        Saved.now += self.nbytes
        Saved.most = max(Saved.most, Saved.now)

    def __del__(self):
        Saved.now -= self.nbytes


def code_run(step):
    """How many functions, and how many lines of them, of parallel.py, further/ and fast/ a step runs."""
    lines = set()

    def look(frame, event, _):
        room = os.path.relpath(frame.f_code.co_filename, HERE).split(os.sep)[0]
        if room not in ("parallel.py", "further", "fast"):
            return None
        if event == "line":
            lines.add((frame.f_code, frame.f_lineno))
        return look

    before = sys.gettrace()
    sys.settrace(look)
    step()
    sys.settrace(before)
    return len({code for code, _ in lines}), len(lines)


def step_of(model, after_backward, tokens):
    """One step; its loss. after_backward: what is called then."""
    x, y = tokens
    loss = token_loss(model(x), y)
    loss.backward()
    for call in after_backward:
        call()
    return loss.detach()


def in_one_process(config):
    """Losses of some steps on whole batches, (STEPS,)."""
    net = GPT(config).double()
    optimizer = SGD(net.parameters())
    after_backward = optimizer.step, optimizer.zero_grad
    return torch.stack([step_of(net, after_backward, tokens_of(config, step, dist.get_world_size()))
                        for step in range(STEPS)])


def strategy(edition, zero, net):
    """(the model to call, its optimizer) of an edition's ZeRO stage, over all ranks."""
    model = edition.sharded(net) if zero == 3 and edition.sharded else net
    return model, edition.optimizer(zero, model.parameters(), SGD, None, [model], None)


def trained(edition, zero, config):
    """Some steps on this rank's part of the batches. Returns (losses, (STEPS,); bytes of weights, shards and momentum
    after them; the steps' seconds; what `code_run` says of one more)."""
    net = GPT(config).double()
    model, optimizer = strategy(edition, zero, net)
    after_backward = optimizer.finish_grad_sync, optimizer.step, optimizer.zero_grad
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = [tokens_of(config, step, ranks).chunk(ranks, 1)[rank] for step in range(STEPS)]
    dist.reset_traffic()
    start = time.perf_counter()
    losses = torch.stack([step_of(model, after_backward, tokens) for tokens in mine])
    seconds = time.perf_counter() - start
    states = [value for state in optimizer.state.values() for value in state.values()]
    kept = sum(storages([*net.parameters(), *parallel.params_of(optimizer), *states]).values())  # of freed memory 0
    sent = dist.traffic()
    return losses, sent, kept, seconds, code_run(partial(step_of, model, after_backward, mine[0]))


def gpipe(config, x, y):
    """A step of the lecture's pipeline. Returns the sum of this rank's losses."""
    rank, n = dist.get_rank(), dist.get_world_size()
    stage = GPT(config, pieces=parallel.even_pieces(config, n)[rank]).double()
    like = torch.empty(1, config.seq_len, config.n_embd, dtype=torch.float64)
    losses = gpipe_step(stage, lambda out, y: token_loss(out, y) / len(x), x.split(1), y.split(1), like)
    return sum(losses, torch.zeros((), dtype=torch.float64))


def one_f_one_b(config, x, y):
    """The same step by 1F1B, of which every rank gets the loss: the last one's counts here."""
    net = train.parallelize(config, train.Layout(pp=dist.get_world_size(), dtype=torch.float64), "cpu", optimizer=SGD)
    dist.reset_traffic()  # that of the start
    loss = net.forward_backward(x.split(1), y.split(1))
    return loss if dist.get_rank() == dist.get_world_size() - 1 else torch.zeros_like(loss)


def row(name, losses, right, sent, kept, seconds, code=("", "")):
    """A line: how far off the losses are, what was sent, what is kept, the time, what code a step runs."""
    error = (losses - right).abs().max().item()
    messages, nbytes = (sum(getattr(log, what) for log in sent.values()) for what in ("messages", "bytes"))
    functions, lines = code
    say(f"  {name:20}{error:12.0e}{messages:10}{nbytes:12,}{kept / 1024:10.0f}{1e3 * seconds:8.0f}"
        f"{functions:>11}{lines:>7}")


def pipelines(config, right):
    n = dist.get_world_size()
    say(f"\n  one step of {4 * n} micro-batches, which pass through all ranks; kept at most for backward.\n"
        "  1F1B's one message more is an all-reduce that gives all ranks the loss, 8 bytes")
    x, y = tokens_of(config, 0, n)
    for way in gpipe, one_f_one_b:
        Saved.most = Saved.now
        dist.reset_traffic()
        start = time.perf_counter()
        with saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            loss = way(config, x, y)
        seconds = time.perf_counter() - start
        sent = dist.traffic()
        row(way.__name__, sum(of_all_ranks(loss)), right, sent, Saved.most, seconds)


def demo_forms():
    """Each strategy as lecture, full and fast have it: losses, messages, bytes, memory, time, lines of code."""
    n = dist.get_world_size()
    config = GPTConfig(vocab_size=64, seq_len=32, n_layer=2 * n, n_head=n, n_embd=16 * n, tied=False)
    want = in_one_process(config)
    say(f"{n} ranks, float64, a GPT of {config.parameters():,} parameters; losses of {STEPS} steps in one process: "
        + " ".join(f"{loss:.6f}" for loss in want.tolist())
        + f"\n\n  {'':20}{'losses, off':>12}{'messages':>10}{'bytes sent':>12}{'KiB kept':>10}{'ms':>8}"
        f"{'functions':>11}{'lines':>7}\n  {STEPS} steps; kept between steps: weights, shards, momentum; "
        "functions and lines of a step")
    for zero in range(4):
        for name, edition in EDITIONS.items():
            losses, *measured = trained(edition, zero, config)
            row(f"ZeRO-{zero}, {name}", torch.stack(of_all_ranks(losses)).mean(0), want, *measured)
    pipelines(config, want[0])
