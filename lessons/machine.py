"""What this machine can do: rates of products, copies, attention and links."""

import copy
import dataclasses
import functools
import json
import math
import os

import numpy as np
import torch
import torch.distributed as torch_dist

import collectives as dist
import kernels
import parallel
from fast.blocks import FusedBlock
from fast.nccl import Direct
from further.nodes import TwoLevels
from lessons.measure import interleaved, left_out, readable, replaced
from model import GPTConfig
from safe.flags import reject
from theory import speed
from theory.speed import MACHINES, Machine, passes, rounds
from theory.traffic import HALVES, in_two_levels, sent


# ------------------------------------------------------------------------------------------------------------- formulas
#
# The planner predicts a step's time from formulas, so that layouts can be compared without a GPU; it needs the rates of
# a machine (`Machine`). `messages` lists what each rank sends, in which collective and how often. `sent` turns that
# into bytes, which `strategies` compares with the bytes counted. `message_seconds` turns it into seconds, and `predict`
# adds the seconds of the computation.

def law_of(group, waited=True):
    """(small, switched), the arguments of `sent`, as collectives.py works in this group. waited: whether the caller
    waits for its all-reduces. Call on all ranks."""
    link = dist.link_of(group)
    switched, small = isinstance(link, Direct), getattr(link, "doubling_bytes", 0)
    return min(small, link.sums_from() - 1) if waited and switched else small, switched


def sent_in(link, op, elements, width, waited=True):
    """Bytes that this rank sends in one collective of a link's group, which may work in two levels."""
    if not isinstance(link, TwoLevels) or op not in ("all_reduce", *HALVES):
        return sent(op, elements, width, link.size, link.rank, *law_of(link.group, waited))
    return sum(times * sent_in(link.inside if near else link.between, part, count, width, waited)
               for times, part, count, near in in_two_levels(op, elements, link.inside.size, link.between.size,
                                                             link.inside.rank))


# ---------------------------------------------------------------------------------------------------------- the machine

def measure_machine(device, dtype, config, comm):
    """The Machine of these processes: its rates at this model's sizes, of its links under `comm`. All ranks measure at
    once, because in training, too, they share power."""
    config = dataclasses.replace(config, experts=0)  # rates are a dense block's
    cuda, n, c = device.type == "cuda", dist.get_world_size(), config.n_embd
    b, t = max(1, (32768 if cuda else 1024) // config.seq_len), config.seq_len  # so much that no GPU waits for its CPU
    random = functools.partial(torch.randn, dtype=dtype, device=device, requires_grad=True)

    def both_ways(module, x, dy=None):
        def run():
            module.zero_grad()
            x.grad = None
            module(x).backward(dy)
            getattr(module, "finish_grad_sync", int)()
        return run

    block, attention = (FusedBlock(config, 0).to(device, dtype) for _ in range(2))
    attention.attn.c_attn = attention.attn.c_proj = torch.nn.Identity()  # only attention itself is left
    tiny = torch.nn.Sequential(*(FusedBlock(GPTConfig(n_embd=32, n_head=1), 0) for _ in range(8))).to(device, dtype)
    loss, targets = torch.nn.Module(), torch.zeros(b, t, dtype=torch.int64, device=device)
    loss.forward = lambda logits: parallel.cross_entropy(logits, targets, config.vocab_size)
    a, wide, up = random(b * t, c), random(b * t, config.inner), random(c, config.inner)
    x, qkv, logits, row = random(b, t, c), random(b, t, 3 * c), random(b, t, config.vocab_size), random(1, 16, 32)
    source, target = torch.zeros(2, 1 << 29 if cuda else 1 << 24, dtype=torch.uint8, device=device)
    k = min(b * t, 8192)  # tokens of a step on one GPU; with more, products are faster
    steps = {
        "products": torch.no_grad()(lambda: (a @ up, wide @ up.T, a.T @ wide)),
        "fewer": torch.no_grad()(lambda: (a[:k] @ up, wide[:k] @ up.T, a[:k].T @ wide[:k])),
        "copy": lambda: target.copy_(source), "block": both_ways(block, x, torch.randn_like(x)),
        "attention": both_ways(attention.attn, qkv, torch.randn_like(x)), "loss": both_ways(loss, logits),
        "launch": both_ways(tiny, row, torch.randn_like(row))}
    if cuda:
        steps["units"] = replaced(left_out)(both_ways(parallel.FSDP(copy.deepcopy(tiny)), row, torch.randn_like(row)))
    seconds = interleaved(steps, device, 5, calls=3)
    rest = seconds["block"] - seconds["attention"] - seconds["products"] * (2 + 4 * c / config.inner)  # no products
    if cuda:
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    else:
        name, memory = "CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / n
    machine = Machine(
        name, speed.peak_flops(device), memory, matmul=6 * k * c * config.inner / seconds["fewer"],
        attention=7 * b * t * t * c / seconds["attention"],
        elementwise=sum(passes(config)) * b * t * dtype.itemsize / max(rest, 0.05 * seconds["block"]),
        loss=logits.numel() / seconds["loss"], hbm=2 * source.nbytes / seconds["copy"],
        launch=seconds["launch"] / len(tiny), units=seconds["units"] / len(tiny) if cuda else None,
        fused=kernels.on_triton(torch.empty(0, device=device)))
    if n == 1:
        return machine
    group = dist.new_group()
    dist.use(group, comm)
    tensors = [torch.zeros(1 << log, device=device) for log in ((11, 26) if cuda else (8, 21))]  # small, large
    seconds = interleaved({len(some): functools.partial(dist.all_reduce, some, group=group) for some in tensors},
                          device, 5, calls=5)
    switched = isinstance(dist.link_of(group), Direct)
    ways = [rounds("all_reduce", count, 4, n, switched, count == min(seconds)) for count in seconds]
    hop, link = fit(*zip(*ways), list(seconds.values()))
    dist.destroy_process_group(group)
    return dataclasses.replace(machine, link=link, hop=hop, switched=switched)


# ---------------------------------------------------------------------------------------------------------- collectives

# Bus bandwidth, as nccl-tests defines it: bytes of the whole tensor / seconds x this factor. It is what a link carries.
BUS = {"all_reduce": lambda n: 2 * (n - 1) / n, "reduce_scatter_tensor": lambda n: (n - 1) / n,
       "all_gather_into_tensor": lambda n: (n - 1) / n, "all_to_all_single": lambda n: (n - 1) / n,
       "broadcast": lambda n: 1, "reduce": lambda n: 1, "gather": lambda n: (n - 1) / n,
       "scatter": lambda n: (n - 1) / n, "send right": lambda n: 1}


def calls_of(op, size, device):
    """({"ours", "torch": function that runs one collective over a tensor of `size` bytes}, the tensor's elements)."""
    n, rank = dist.get_world_size(), dist.get_rank()
    count = max(1, size // 4 // n) * n if size else 0
    whole, other, part = (torch.zeros(k, device=device) for k in (count, count, count // n))
    parts = list(other.view(n, -1)) if rank == 0 else None
    arguments = {"all_reduce": (whole,), "reduce_scatter_tensor": (part, whole),
                 "all_gather_into_tensor": (whole, part), "all_to_all_single": (other, whole), "broadcast": (whole, 0),
                 "reduce": (whole, 0), "gather": (part, parts, 0), "scatter": (part, parts, 0), "barrier": ()}
    if op == "send right":  # one message, no collective: it shows the link's own speed
        dist.barrier()  # the group's first operation makes its mailboxes
        link = dist.link_of(None)
        return {"ours": lambda: link.exchange([(whole, (rank + 1) % n)], [(other, (rank - 1) % n)])}, count
    return {"ours": lambda: getattr(dist, op)(*arguments[op]),
            "torch": lambda: getattr(torch_dist, op)(*arguments[op])}, count


def fit(messages, sizes, seconds):
    """Fit seconds = a messages + bytes / b; returns (a, b), seconds a message and bytes a second. Errors are relative,
    so that short times count as much as long ones. a is 0, or b infinite, where the times do not show it."""
    m, k, t = (np.asarray(x, float) for x in (messages, sizes, seconds))
    a, per_byte = np.linalg.lstsq(np.stack([m / t, k / t], 1), np.ones(len(t)), rcond=None)[0]
    if a < 0 or per_byte <= 0:  # the times show no latency, or no bandwidth: fit the other alone
        a, per_byte = (0.0, np.mean(t / k)) if a < 0 else (np.mean(t / m), 0.0)
    return float(a), float(1 / per_byte) if per_byte else math.inf


def load_machine(a):
    machine = MACHINES.get(a.machine)
    if machine is None:
        advice = f"give one of {', '.join(MACHINES)}, or a file that `bench.py collectives --json` wrote"
        with readable(lambda: f"--machine {a.machine}", advice), open(a.machine) as file:
            machine = Machine(**json.load(file)["machine"])
    given = {"node": a.node, "network": a.network and 1e9 * a.network,
             "network_hop": machine.network_hop or machine.hop}
    machine = dataclasses.replace(machine, **{key: value for key, value in given.items() if value})
    reject(machine.link is None,
           f"--machine {a.machine}: one process has no link to measure; write it with --gpus 2 or more")
    reject(a.gpus > machine.node and not machine.network,
           f"--gpus {a.gpus} is more than the {machine.node} of a node, and --machine {a.machine} does not say how "
           "fast the network is: give e.g. --network 45")
    return machine
