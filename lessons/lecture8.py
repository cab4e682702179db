"""Lecture 8's three strategies in its own form, with the backwards that it leaves as exercises, on its deep MLP.

    python -m lessons lecture8 --ranks 2

CS336 lecture 8. The files of the reading path make each of these strategies fast.
"""

import torch
import torch.nn.functional as F

import collectives as dist
from further.sequence import gathered
from lessons.bench.timing import off, say, say_in_order


def mlp(x, params, after=lambda y: y):
    for param in params:
        x = after(F.gelu(x @ param))
    return x


def data_parallel(x, params):
    """Each rank takes its part of the batch. After backward, one all-reduce a parameter. Returns this rank's loss."""
    loss = mlp(x.chunk(dist.get_world_size())[dist.get_rank()], params).square().mean()
    loss.backward()
    for param in params:
        dist.all_reduce(param.grad, dist.ReduceOp.AVG)
    return loss.item()


def all_gather_tensor_parallel(x, params):
    """Each rank has its columns of each matrix. Behind each matrix an all-gather makes Y whole. The all-gather's
    backward is a reduce-scatter (exercise 1), because each rank's columns have made a term of dX. Behind the last
    matrix it adds up N equal gradients, because every rank computes the same loss. So the loss is divided by N."""
    loss = mlp(x, params, lambda y: gathered(y, None)).square().mean()
    (loss / dist.get_world_size()).backward()
    return loss.item()


def gpipe_step(stage, loss, x, y, like):
    """The lecture's pipeline: receive, compute, send, for each micro-batch; then gradients, from the last rank up.

    stage: this rank's layers. loss(output, target) divides by m, because .grad adds up over micro-batches. x, y: lists
    of m inputs and m targets, on every rank; the first reads the inputs, the last the targets. like: a tensor of the
    shape and dtype that stages send. Returns the losses, on the last rank.
    """
    rank = dist.get_rank()
    last = dist.get_world_size() - 1
    done = []
    for x_i, y_i in zip(x, y, strict=True):
        if rank > 0:
            x_i = torch.empty_like(like)
            dist.recv(x_i, rank - 1)
            x_i.requires_grad_()
        out = stage(x_i)
        if rank < last:
            dist.send(out.detach(), rank + 1)
        else:
            out = loss(out, y_i)
        done.append((x_i, out))
    for x_i, out in done:
        dy = None  # on the last rank, where `out` is the loss: its gradient is 1
        if rank < last:
            dy = torch.empty_like(like)
            dist.recv(dy, rank + 1)
        if out.requires_grad:  # not if all layers up to here are frozen
            out.backward(dy)
        if rank > 0:
            dist.send(x_i.grad, rank - 1)
    return [out.detach() for _, out in done] if rank == last else []


def pipeline(x, params, micro_batches=4):
    """Each rank has its layers: receive, compute, send. Backward is the same loop, from the last rank up (exercise 2).
    """
    x = x.chunk(micro_batches)
    gpipe_step(lambda h: mlp(h, params), lambda y, _: y.square().mean() / micro_batches, x, x, x[0])


STRATEGIES = {  # {strategy: the part of the weights, 2 matrices a rank, that a rank of n has}
    data_parallel: lambda weights, rank, n: weights,
    pipeline: lambda weights, rank, n: weights[2 * rank:2 * rank + 2],
    all_gather_tensor_parallel: lambda weights, rank, n: [weight.chunk(n, 1)[rank] for weight in weights]}


def beside_one_process(strategy):
    """Returns (one process's loss, this rank's, its gradients' error)."""
    n, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    x, *weights = torch.randn(1 + 2 * n, 8 * n, 8 * n, dtype=torch.float64, generator=generator) / 2
    one = [weight.clone().requires_grad_() for weight in weights]
    right = mlp(x, one).square().mean()
    right.backward()
    params, exact = (STRATEGIES[strategy](some, rank, n) for some in (weights, [param.grad for param in one]))
    params = [param.clone().requires_grad_() for param in params]
    dist.reset_traffic()
    loss = strategy(x, params)
    return right.item(), loss, max(off(param.grad, grad) for param, grad in zip(params, exact))


def demo_lecture8():
    """Lecture 8's data, tensor and pipeline parallelism, forward and backward, against one process."""
    n = dist.get_world_size()
    say(f"{2 * n} layers of {8 * n} x {8 * n}, float64, {n} ranks. In data_parallel a rank's loss is that of its own "
        "samples;\nin pipeline no rank adds up the micro-batches' losses.")
    for strategy in STRATEGIES:
        right, loss, error = beside_one_process(strategy)
        sent = ", ".join(f"{op} {log.bytes:,} bytes" for op, log in dist.traffic().items() if log.bytes)
        say(f"\n{strategy.__name__}, one process's loss {right:.6f}: ranks' losses, what they send, gradients' errors")
        said = "-" if loss is None else f"{loss:.6f}"
        say_in_order(f"  rank {dist.get_rank()}   loss {said}   {sent}   {error:.0e}")
