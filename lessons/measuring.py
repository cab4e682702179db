"""Measuring: clocks, warm-up, a profiler's table; where a step's memory goes: over time, by autograd's graph, in an
allocator; a loss scale.

    python -m lessons measuring

Ultra-Scale Playbook, the chapters on profiling and on GPUs; CS336 lecture 6. docs/reading.md, "Measuring".
"""

import gc
import math
import os
import time

import torch
import torch.nn.functional as F

import collectives as dist
from further.loss_scale import LossScale
from lessons.bench.strategies import make_trainer
from lessons.bench.timing import is_first, mark, of_all_ranks, say, synchronize
from model import GPT, PRESETS
from safe.flags import Settings
from safe.reports import BirthLog, size
from theory.memory import activation_bytes

MIB = 1 << 20


# ----------------------------------------------------------------------------------------------------------------- time

def clocks(what, call, stamp, wait, between):
    """Print when a call returns, when its work is done, and how long by stamps that are queued before and after it."""
    start = time.perf_counter()
    first, _, last = stamp(), call(), stamp()
    returned = time.perf_counter() - start
    wait()
    done = time.perf_counter() - start
    say(f"  {what:36}{1e3 * returned:12.2f}{1e3 * done:12.2f}{1e3 * between(first, last):12.2f}")


def profile_table(step):
    """A profiler's rows, the longest first: of the third and fourth of four calls."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(schedule=schedule, profile_memory=True) as profile:
        for _ in range(4):
            step()
            profile.step()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_cpu_time_total - row.self_device_time_total)
    for row in rows[:9]:
        say(f"  {row.key[:46]:48}{row.count:6}{row.self_cpu_time_total:12,.0f}{row.self_device_time_total:12,.0f}"
            f"{(row.self_cpu_memory_usage + row.self_device_memory_usage) / MIB:12.1f}")


# --------------------------------------------------------------------------------------------------------------- memory

def timeline(config, device):
    """Print the bytes alive after each block's forward and backward: activations, then what backward makes. On a GPU
    write the allocator's own timeline, too."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history()
    net, x = GPT(config).to(device), torch.zeros(4, config.seq_len, dtype=torch.int64, device=device)
    births, points = BirthLog(), []

    def note(when):
        gc.collect()
        points.append((when, births.alive(())))

    for name, block in net.h.items():
        block.register_forward_hook(lambda *_, name=name: note(f"forward of h.{name}"))
        block.register_full_backward_hook(lambda *_, name=name: note(f"backward of h.{name}"))
    with births:
        net(x).sum().backward()
    if device.type == "cuda" and is_first():
        os.makedirs("runs", exist_ok=True)
        torch.cuda.memory._dump_snapshot("runs/memory.pickle")
        say("  runs/memory.pickle is for https://pytorch.org/memory_viz")
    for when, alive in points:
        say(f"  {when:20}{size(alive):>10}  " + "#" * (60 * alive // max(n for _, n in points)))


def kept_by(node):
    """[(name, tensor)] that a node of PyTorch's keeps."""
    kept = [(name, getattr(node, name)) for name in dir(node) if name.startswith("_saved_")]
    return [(name.removeprefix("_saved_"), tensor) for name, tensor in kept if isinstance(tensor, torch.Tensor)]


def nodes_of(output):
    """The graph's nodes in the order of forward, parameters' own left out: {node: [the nodes that made its inputs]}."""
    found, todo = {}, [output.grad_fn]
    while todo:
        node = todo.pop()
        found[node] = [maker for maker, _ in node.next_functions if maker and maker.next_functions]
        todo += [maker for maker in found[node] if maker not in found]
    return dict(sorted(found.items(), key=lambda item: item[0]._sequence_nr()))


def graph(config):
    """Print a block's nodes, and the tensors that each keeps for backward. A tensor that two nodes keep is there once;
    a weight is kept without more memory."""
    block = GPT(config, pieces=range(1, 2)).h["0"]
    x = torch.randn(1, config.seq_len, config.n_embd, requires_grad=True)
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    seen, total = set(), 0
    nodes = nodes_of(block(x.clone()))
    number = {node: i for i, node in enumerate(nodes)}
    for node, makers in nodes.items():
        say(f"{number[node]:4}  {' '.join(str(number[maker]) for maker in makers):6} {node.name()}")
        for name, tensor in kept_by(node):
            memory = tensor.untyped_storage().data_ptr()
            new = memory not in seen | weights
            what = size(tensor.untyped_storage().nbytes()) if new else "a weight" if memory in weights else "kept above"
            seen.add(memory)
            total += new * tensor.untyped_storage().nbytes()
            say(f"{'':14}{name:12} {str(tuple(tensor.shape)):20} {what}")
    formula = activation_bytes(config, Settings(dp=1, batch_size=1, dtype="fp32"), [range(1, 2)])
    say(f"kept in all {total:,} bytes, by the formula {formula:,}")


class Allocator:
    """A caching allocator. cudaMalloc waits for the GPU, so PyTorch asks for a segment at a time, keeps it, and serves
    tensors from it: the smallest free block that is large enough, of which the rest stays free. A freed block merges
    with its free neighbours. Free blocks that lie apart cannot serve one large tensor: then a new segment is reserved,
    though there were bytes enough. (PyTorch's rules for small tensors are left out.)

    segments: a pair each, (bytes, {first byte of a tensor: the byte behind its last}).
    """

    def __init__(self):
        self.segments = []

    def free_blocks(self):
        """[(bytes, its segment's number, its first byte)]"""
        found = []
        for number, (size, tensors) in enumerate(self.segments):
            edges = [0, *sorted([*tensors.keys(), *tensors.values()]), size]
            found += [(end - first, number, first) for first, end in zip(edges[::2], edges[1::2]) if end > first]
        return found

    def allocate(self, wanted):
        """The tensor's place: (its segment's number, its first byte)."""
        fits = [block for block in self.free_blocks() if block[0] >= wanted]
        if not fits:
            self.segments.append((-(-wanted // (2 * MIB)) * 2 * MIB, {}))
            return self.allocate(wanted)
        _, number, first = min(fits)
        self.segments[number][1][first] = first + wanted
        return number, first

    def free(self, number, first):
        del self.segments[number][1][first]


WIDTHS = [768, 2304, 3072] * 8 + [50257]  # numbers a token: in each of 8 blocks x, q, k, v and the MLP's; then logits


def allocations(lengths):
    """Serve what steps of sequences of these lengths keep, in float32; backward frees it in the other order."""
    allocator = Allocator()
    for tokens in lengths:
        places = [allocator.allocate(4 * tokens * width) for width in WIDTHS]
        for place in reversed(places):
            allocator.free(*place)
    most, reserved = 4 * max(lengths) * sum(WIDTHS), sum(size for size, _ in allocator.segments)
    return f"tensors at most {size(most):>11}, reserved {size(reserved):>11} in {len(allocator.segments)} segments"


# ----------------------------------------------------------------------------------------------------------------- fp16

def loss_scale():
    """Print steps of fp16 whose loss scale begins too high: they are skipped, and halve it, until gradients fit; then
    it doubles."""
    n = dist.get_world_size()
    s = Settings(dp=n, batch_size=2 * n, device="cpu", fast="off", dtype="fp16")
    trainer = make_trainer(PRESETS["tiny"], s, torch.device("cpu"))
    trainer.scaler = LossScale(start=2.0**22, interval=4)
    for step in range(12):
        scale, skipped = trainer.scaler.scale, trainer.skipped
        loss, norm, _ = trainer.step(step)
        say(f"{step + 1:4}  2^{math.log2(scale):<8.0f}{loss:10.4f}  {norm:13.4f}"
            + "  skipped" * (trainer.skipped - skipped))


def demo_measuring():
    """One call by three clocks; warm-up; a profiler's table; memory: over time, kept by nodes, in an allocator;
    fp16."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    link, message = dist.link_of(None), torch.ones(1 << 22)
    dist.all_reduce(message, async_op=True).wait()  # warms up
    say("ms                                        it returns     it is done    by events")
    clocks(f"all-reduce of {size(message.nbytes)}, async_op=True", lambda: dist.all_reduce(message, async_op=True),
           lambda: link.worker.start(time.perf_counter), lambda: link.last.wait(), lambda a, b: b.wait() - a.wait())
    if device.type == "cuda":
        a = torch.randn(8192, 8192, device=device)
        torch.mm(a, a)
        synchronize(device)
        clocks("a product on the GPU", lambda: torch.mm(a, a), lambda: mark(device), lambda: synchronize(device),
               lambda a, b: a.elapsed_time(b) / 1e3)
    start = time.perf_counter()
    time.sleep(0.2 * dist.get_rank())
    dist.barrier()
    passed = time.perf_counter() - start
    say("\nrank r sleeps 0.2 r s; seconds until it has passed the barrier: "
        + " ".join(f"{seconds:.2f}" for seconds in of_all_ranks(passed)))
    took = {}
    for barriers in 0, 1:  # which rank is slow changes from step to step
        start = time.perf_counter()
        for i in range(6):
            time.sleep(0.05 * ((i + dist.get_rank()) % 2))
            if barriers:
                dist.barrier()
        dist.barrier()
        took[barriers] = time.perf_counter() - start
    say(f"six steps, of which every other takes 0.05 s on a rank: {took[0]:.2f} s, "
        f"with a barrier in each {took[1]:.2f}")
    x, took = torch.randn(2000, 1000, device=device, requires_grad=True), []

    def step():
        F.layer_norm(x, x.shape[1:]).sum().backward()
        synchronize(device)

    for _ in range(5):
        start = time.perf_counter()
        step()
        took.append(1e3 * (time.perf_counter() - start))
    say("\nlayer norm, forward and backward; ms of the first calls: " + " ".join(f"{ms:.2f}" for ms in took))
    say(f"\n{'of two calls':50}{'calls':>6}{'CPU, us':>12}{'GPU, us':>12}{'MiB':>12}")
    profile_table(step)
    config = PRESETS["tiny"]
    say("\nbytes alive in a step of the tiny model, batch 4, but for its weights")
    timeline(config, device)
    say(f"\nthe graph that autograd records of a block, one sequence of {config.seq_len} tokens, float32\n"
        "node  of     operation, and what it keeps")
    graph(config)
    say("\na caching allocator, which keeps what it has reserved: six steps")
    for name, lengths in {"of 1,024 tokens": [1024] * 6, "of 448 to 1,024": [448, 768, 576, 1024, 640, 896]}.items():
        say(f"  {name:20}{allocations(lengths)}")
    say("\nfp16\nstep  loss scale      loss  gradient norm")
    loss_scale()
