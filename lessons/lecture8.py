"""Lecture 8's three strategies in its own form, with the backwards that it leaves as exercises, on its deep MLP.

    python -m lessons lecture8 --ranks 2

CS336 lecture 8. The files of the reading path say how each of them is then made fast.
"""

import torch
import torch.nn.functional as F

import collectives as dist
import parallel
from further.sequence import gathered
from lessons.measure import off, of_all_ranks, say


def mlp(x, params, after=lambda y: y):
    for param in params:
        x = after(F.gelu(x @ param))
    return x


def data_parallel(x, params):
    """Each rank its part of the batch; after backward an all-reduce a parameter. Returns this rank's loss."""
    loss = mlp(x.chunk(dist.get_world_size())[dist.get_rank()], params).square().mean()
    loss.backward()
    for param in params:
        dist.all_reduce(param.grad, dist.ReduceOp.AVG)
    return loss.item()


def all_gather_tensor_parallel(x, params):
    """Each rank its columns of each matrix; an all-gather after each. Its backward is a reduce-scatter (exercise 1):
    each rank's columns have made a term of dX. So the last gradient must be a term, too: N ranks have the same loss."""
    loss = mlp(x, params, lambda y: gathered(y, None)).square().mean()
    (loss / dist.get_world_size()).backward()
    return loss.item()


def pipeline(x, params, micro_batches=4):
    """Each rank its layers: receive, compute, send; backward is the same loop, the other way round (exercise 2)."""
    x = x.chunk(micro_batches)
    parallel.gpipe_step(lambda h: mlp(h, params), lambda y, _: y.square().mean() / micro_batches, x, x, x[0])


def demo_lecture8():
    """Lecture 8's data, tensor and pipeline parallelism, forward and backward, against one process."""
    n, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    x, *weights = torch.randn(1 + 2 * n, 8 * n, 8 * n, dtype=torch.float64, generator=generator) / 2
    one = [weight.clone().requires_grad_() for weight in weights]
    loss = mlp(x, one).square().mean()
    loss.backward()
    say(f"{2 * n} layers of {8 * n} x {8 * n}, float64, {n} ranks; one process: loss {loss:.6f}")
    for strategy, cut in ((data_parallel, lambda ws: ws), (pipeline, lambda ws: ws[2 * rank:2 * rank + 2]),
                          (all_gather_tensor_parallel, lambda ws: [w.chunk(n, 1)[rank] for w in ws])):
        params = [part.clone().requires_grad_() for part in cut(weights)]
        dist.reset_traffic()
        mine = strategy(x.clone(), params)
        sent = ", ".join(f"{op} {log.bytes:,} bytes" for op, log in dist.traffic().items() if log.bytes)
        error = max(off(param.grad, grad) for param, grad in zip(params, cut([p.grad for p in one])))
        say(f"\n{strategy.__name__}: losses of the ranks, what they send, gradients' errors")
        say("\n".join(of_all_ranks(f"  rank {rank}   loss {mine or '-'!s:.8}   {sent}   {error:.0e}")))
