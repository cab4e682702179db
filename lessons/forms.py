"""The short forms that open the sections of parallel.py, beside the full ones: what the full ones save.

    python -m lessons forms --ranks 2
"""

import time
import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

import collectives as dist
import parallel
import train
from further.buckets import BucketDDP
from further.flat import FlatOptimizer
from further.prefetch import FlatFSDP
from lessons.bench.peers import token_loss
from lessons.bench.timing import of_all_ranks, say
from model import GPT, GPTConfig

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # its momentum is an optimizer's state
STEPS = 3

# ZeRO3's hooks stand at every module. Of the GPT and its embeddings the inputs are whole numbers, without a gradient.
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


# Each takes a GPT. Returns (the model to call, calls after its backward, the optimizer's states).

def with_sgd(model, *first):
    optimizer = SGD(model.parameters())
    return model, [*first, optimizer.step, optimizer.zero_grad], optimizer.state


def one_process(net):
    return with_sgd(net)


def naive(net):
    return with_sgd(net, partial(parallel.average_gradients, net))


def ddp(net):
    model = BucketDDP(net)
    return with_sgd(model, model.finish_grad_sync)


def with_optimizer(net, optimizer):
    return net, [optimizer.finish_grad_sync, optimizer.step, optimizer.zero_grad], optimizer.state


def zero_1(net):
    return with_optimizer(net, parallel.ZeRO1(net.parameters(), SGD))


def sharded_optimizer(net):
    return with_optimizer(net, FlatOptimizer(net.parameters(), SGD))


def zero_3(net):
    return with_optimizer(net, parallel.ZeRO3(net.parameters(), SGD, None, [net]))


def fsdp(net):
    model = FlatFSDP(net)
    return with_sgd(model, model.finish_grad_sync)


def gpipe(config, x, y):
    """A step of the lecture's pipeline. Returns the sum of this rank's losses."""
    rank, n = dist.get_rank(), dist.get_world_size()
    stage = GPT(config, pieces=parallel.even_pieces(config, n)[rank]).double()
    like = torch.empty(1, config.seq_len, config.n_embd, dtype=torch.float64)
    losses = parallel.gpipe_step(stage, lambda out, y: token_loss(out, y) / len(x), x.split(1), y.split(1), like)
    return sum(losses, torch.zeros((), dtype=torch.float64))


def one_f_one_b(config, x, y):
    """The same step by 1F1B, of which every rank gets the loss: the last one's counts here."""
    net = train.parallelize(config, train.Layout(pp=dist.get_world_size(), dtype=torch.float64), "cpu", optimizer=SGD)
    dist.reset_traffic()  # that of the start
    loss = net.forward_backward(x.split(1), y.split(1))
    return loss if dist.get_rank() == dist.get_world_size() - 1 else torch.zeros_like(loss)


def trained(way, config, rank, ranks):
    """Some steps on this rank's part of the batches. Returns (losses, (STEPS,); bytes of weights and states after them;
    the steps' seconds)."""
    model, after_backward, states = way(GPT(config).double())
    dist.reset_traffic()
    start = time.perf_counter()
    losses = []
    for step in range(STEPS):
        x, y = tokens_of(config, step, dist.get_world_size()).chunk(ranks, 1)[rank]
        loss = token_loss(model(x), y)
        loss.backward()
        for call in after_backward:
            call()
        losses.append(loss.detach())
    seconds = time.perf_counter() - start
    held = [*model.parameters(), *(value for state in states.values() for value in state.values())]
    return torch.stack(losses), sum(t.nbytes for t in held), seconds


def row(name, losses, right, kept, seconds):
    """A line: how far off the losses are, what was sent since the counts were reset, what is kept, the time."""
    sent = dist.traffic().values()
    error = (losses - right).abs().max().item()
    say(f"  {name:20}{error:12.0e}{sum(log.messages for log in sent):10}{sum(log.bytes for log in sent):12,}"
        f"{kept / 1024:10.0f}{1e3 * seconds:8.0f}")


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
        row(way.__name__, sum(of_all_ranks(loss)), right, Saved.most, seconds)


@torch.no_grad()
def mlps(config):
    say("\n  forward of an MLP")
    whole = GPT(config).double().h["0"].mlp
    cut = parallel.tensor_parallel(GPT(config).double(), None).h["0"].mlp
    up, down = (layer.weight.chunk(dist.get_world_size())[dist.get_rank()] for layer in (whole.c_fc, whole.c_proj))
    X = torch.randn(4, 32, config.n_embd, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def all_columns(X):
        hidden = F.gelu(parallel.all_columns(X, up) + whole.c_fc.bias, approximate="tanh")
        return parallel.all_columns(hidden, down) + whole.c_proj.bias

    for name, way, weights in ("all_columns", all_columns, [up, down]), ("f and g", cut, [*cut.parameters()]):
        dist.reset_traffic()
        start = time.perf_counter()
        Y = way(X)
        seconds = time.perf_counter() - start
        row(name, Y, whole(X), sum(w.nbytes for w in weights), seconds)


def demo_forms():
    """The short form of each strategy beside the full one: the same losses; messages, bytes, memory, time."""
    n, rank = dist.get_world_size(), dist.get_rank()
    config = GPTConfig(vocab_size=64, seq_len=32, n_layer=2 * n, n_head=n, n_embd=16 * n, tied=False)
    want, *_ = trained(one_process, config, 0, 1)
    say(f"{n} ranks, float64, a GPT of {config.parameters():,} parameters; losses of {STEPS} steps in one process: "
        + " ".join(f"{loss:.6f}" for loss in want.tolist())
        + f"\n\n  {'':20}{'losses, off':>12}{'messages':>10}{'bytes sent':>12}{'KiB kept':>10}{'ms':>8}\n"
        f"  {STEPS} steps; kept between steps: weights and momentum")
    for way in naive, ddp, zero_1, sharded_optimizer, zero_3, fsdp:
        losses, kept, seconds = trained(way, config, rank, n)
        row(way.__name__, torch.stack(of_all_ranks(losses)).mean(0), want, kept, seconds)
    pipelines(config, want[0])
    mlps(config)
