"""What this machine can do: rates of products, copies, attention and links."""

import functools
import json
import os

import torch
import torch.distributed as torch_dist

import collectives as dist
import kernels
import parallel
from fast import recorded
from fast.edition import FusedBlock
from fast.nccl import Direct
from lessons.bench.timing import interleaved, readable
from further.bad_input import reject
from theory import speed
from theory.speed import MACHINES, Machine, matrices, passes
from theory.traffic import HALVES, in_two_levels, sent


# ------------------------------------------------------------------------------------------------------------- formulas
#
# The planner predicts a step's time from formulas, so that layouts can be compared without a GPU; it needs the rates of
# a machine (`Machine`). `messages` lists what each rank sends, in which collective and how often. `sent` turns that
# into bytes, which `strategies` compares with the bytes counted. `call_seconds` turns it into seconds, and `predict`
# adds the seconds of the computation.

def sent_in(link, op, elements, width):
    """Bytes that this rank sends in one collective of a link's group, which may work in two levels."""
    if hasattr(link, "inside") and op in ("all_reduce", *HALVES):
        return sum(times * sent_in(link.inside if near else link.between, part, count, width)
                   for times, part, count, near in in_two_levels(op, elements, link.inside.size, link.between.size,
                                                                 link.inside.rank))
    return sent(op, elements, width, link.size, link.rank, isinstance(link, Direct))


# ---------------------------------------------------------------------------------------------------------- the machine

def replays_of(steps, device):
    """On CUDA {name: a replay of the step from a CUDA graph}, because a step itself takes the CPU's time where the CPU
    launches kernels later than the GPU could run them. The steps must exist as long as the replays, which use their
    tensors. What a graph allocates is free once its replay is dropped. On the CPU the steps themselves."""
    if device.type != "cuda":
        return steps
    for step in steps.values():
        for _ in range(2):  # the first call compiles and tunes kernels, which a recording cannot do
            step()
    recorded.make_room()
    pool = torch.cuda.graph_pool_handle()  # one for all, because they run one after the other
    return {name: recorded.RecordedGraph(step, pool).replay for name, step in steps.items()}


def hot(steps, device):
    """Seconds a call of {name: function}. Each is called on a GPU for a quarter of a second in a row: then it runs at
    its power limit, as in training. (On an H200 products were 5 to 9 % slower than in turns of 3 calls.)"""
    once = interleaved(steps, device, 1, 3)
    calls = {name: max(3, int(0.25 / took)) if device.type == "cuda" else 3 for name, took in once.items()}
    return {name: interleaved({name: step}, device, 5, calls[name])[name] for name, step in steps.items()}


def both_ways(function, *inputs):
    """A function that runs `function`, which may be a module, forward and backward."""
    dy, leaves = torch.randn_like(function(*inputs)), [*inputs, *getattr(function, "parameters", list)()]
    return lambda: torch.autograd.grad(function(*inputs), leaves, dy)


def measure_machine(device, dtype, config):
    """The Machine of these processes: its rates at a dense model's sizes and in this --dtype, and of its links. (Those
    of FP8 are not measured: its steps are predicted as bf16's.) All ranks measure at once, because in training, too,
    they share power. On CUDA the computing is replayed, so that a slow CPU changes nothing.

    A block is measured with all sequences and with a quarter of them. If that takes s + f and s + f / 4, s is its
    start."""
    dtype = parallel.PRECISIONS[dtype]
    cuda, n, c, t = device.type == "cuda", dist.get_world_size(), config.n_embd, config.seq_len
    b = max(1, (32768 if cuda else 1024) // t)  # so much that no GPU waits for its CPU
    few = max(1, b // 4)
    random = functools.partial(torch.randn, dtype=dtype, device=device, requires_grad=True)

    block = FusedBlock(config, 0).to(device, dtype)
    targets = torch.zeros(b, t, dtype=torch.int64, device=device)
    shapes = (c, config.qkv_width), (config.heads_width, c), (c, config.up_width), (config.hidden, c)  # in, out
    layers = [(random(b * t, n_in), random(n_out, n_in), random(b * t, n_out)) for n_in, n_out in shapes]  # x, w, dy
    source, target = torch.zeros(2, 1 << 29 if cuda else 1 << 24, dtype=torch.uint8, device=device)
    computing = {
        "products": torch.no_grad()(lambda: [(x @ w.T, dy @ w, dy.T @ x) for x, w, dy in layers]),
        "block": both_ways(block, random(b, t, c)),
        "few": both_ways(block, random(few, t, c)),
        "attention": both_ways(kernels.attention, random(
            b, t, config.n_head // config.kv_heads + 2, config.kv_heads, config.head_dim)),
        "loss": both_ways(lambda z: parallel.cross_entropy(z, targets, config.vocab_size),
                          random(b, t, config.vocab_size))}
    copying = {"copy": lambda: target.copy_(source)}
    seconds = hot(replays_of(computing, device) | copying, device)
    start = max(0.0, (b * seconds["few"] - few * seconds["block"]) / max(1, b - few))
    rest = seconds["block"] - start - seconds["attention"] - seconds["products"]
    name, memory = "CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / n
    if cuda:
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    hop, link = measure_links(device) if n > 1 else (None, None)
    return Machine(
        name, speed.peak_flops(device), memory,
        matmul=6 * b * t * sum(matrices(config)) / seconds["products"], start=start,
        attention=7 * b * t * t * config.heads_width / seconds["attention"],
        elementwise=sum(passes(config)) * b * t * dtype.itemsize / max(rest, 0.05 * seconds["block"]),
        loss=b * t * config.vocab_size / seconds["loss"], hbm=2 * source.nbytes / seconds["copy"],
        link=link, hop=hop)


def measure_links(device):
    """(seconds of latency, bytes/s) of a collective of all ranks, from a short and a long all-reduce."""
    n = dist.get_world_size()
    short, long = (torch.zeros(1 << log, device=device) for log in ((11, 26) if device.type == "cuda" else (8, 21)))
    calls = {name: functools.partial(dist.all_reduce, t) for name, t in (("short", short), ("long", long))}
    seconds = interleaved(replays_of(calls, device), device, 5, calls=5)
    more = 2 * (n - 1) / n * (long.nbytes - short.nbytes)
    return seconds["short"], more / (seconds["long"] - seconds["short"])


# ---------------------------------------------------------------------------------------------------------- collectives

# Bus bandwidth, as nccl-tests defines it: bytes of the whole tensor / seconds x this factor. It is what a link carries.
BUS = {"all_reduce": lambda n: 2 * (n - 1) / n, "broadcast": lambda n: 1, "reduce": lambda n: 1, **dict.fromkeys(
    ("reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single"), lambda n: (n - 1) / n)}


def calls_of(op, size, device):
    """({column of `bench.py collectives`: function that runs one collective over a tensor of `size` bytes}, the
    tensor's elements): ours and PyTorch's."""
    n = dist.get_world_size()
    count = max(1, size // 4 // n) * n
    whole, other, part = (torch.zeros(k, device=device) for k in (count, count, count // n))
    arguments = {"all_reduce": (whole,), "reduce_scatter_tensor": (part, whole), "broadcast": (whole, 0),
                 "all_gather_into_tensor": (whole, part), "all_to_all_single": (other, whole), "reduce": (whole, 0)}[op]
    return {who: functools.partial(getattr(module, op), *arguments)
            for who, module in (("us", dist), ("torch_us", torch_dist))}, count


def load_machine(a):
    machine = MACHINES.get(a.machine)
    if machine is None:
        advice = f"give one of {', '.join(MACHINES)}, or a file that `bench.py strategies --json` wrote"
        with readable(f"--machine {a.machine}", advice), open(a.machine) as file:
            machine = Machine(**json.load(file)["machine"])
    reject(a.dtype == "fp32" and a.machine in MACHINES,
           f"--dtype fp32: the rates of {a.machine} are bf16's; leave it out, or give a file to --machine")
    reject(machine.link is None,
           f"--machine {a.machine}: one process has no link to measure; write it with --gpus 2 or more")
    reject(a.gpus > machine.node and not machine.network,
           f"--gpus {a.gpus} is more than the {machine.node} of a node, and --machine {a.machine} does not say how "
           'fast the network is: add there e.g. "network": 45e9')
    return machine
