"""One step of GPT under each strategy: time, memory, traffic, what is hidden; and without a piece of fast/."""

import dataclasses
import gc
import math
import statistics
import time
from collections import Counter, defaultdict

import numpy as np
import torch
import torch.distributed as torch_dist

import collectives as dist
import kernels
import train
from fast import norm, run
from fast.edition import Fast
from fast.graphs import RecordedPipeline
from further.kinds import resized
from further.schedules import HalvedPipeline, SCHEDULES
from further.text import Bytes
from lessons.bench import peers
from lessons.bench.rates import measure_machine, sent_in
from lessons.bench.timing import (
    interleaved, of_all_ranks, patched, plain_kernels, say, Table, without_collectives, write_json)
from lessons.plan import describe_model
from safe.messages import Watched
from safe.reports import measured, measured_bytes, predicted_bytes, share_of, timed
from safe.run import Plain
from theory.clock import halves_backward, stages_in
from theory.speed import describe_machine, mfu, mfu_note, predict
from theory.traffic import messages, messages_of_list


# ----------------------------------------------------------------------------------------------------------- strategies

def layouts(n, m, experts):
    """{strategy: its fields of train.py's Settings} for n processes. experts: how many the model has."""
    every = {"ddp": {"dp": n}, **{f"zero{zero}": {"dp": n, "zero": zero} for zero in (1, 2, 3)}}
    # Random tokens teach a router nothing, and training on them would soon send all tokens to a few experts.
    still = {"lr": 0.0, "min_lr": 0.0}
    last = {"experts": {"dp": n, "ep": math.gcd(n, experts), **still}, "dense twin": {"dp": n, **still}}
    last = last if experts else {}
    if n == 1:
        return {"one": {"dp": n}, **every, **last}
    every |= {"tp": {"tp": n}, "tp+sp": {"tp": n, "sp": True}, "cp": {"cp": n},
              "cp ulysses": {"cp": n, "cp_kind": "ulysses"}}
    if n > 3 and n % 2 == 0:
        every |= {"dp+tp": {"dp": n // 2, "tp": 2}}
    # pipelines late, because after them ranks have made different numbers of windows, and `make_window` makes no more
    every |= {name: {"pp": n, "micro_batches": m, "schedule": name} for name in SCHEDULES}
    every["interleaved"]["virtual_stages"] = 2
    return every | last


def dense_twin(config):
    """A config without experts, but with MLPs so wide that a token uses as many parameters."""
    mlps = config.n_layer + (config.top_k - 1) * sum(map(config.has_experts, range(config.n_layer)))  # of a token
    return dataclasses.replace(resized(config, experts=0), inner=config.hidden * mlps // config.n_layer)


class Timed(train.Trainer):
    """A Trainer whose steps are judged by the numbers that fast/ looks at. s.fast says what it is made of."""

    def __init__(self, s, config, source, data, device):
        parts = (run if s.fast == "on" else Plain).parts(s, device)
        super().__init__(s, config, source, data, device, **parts)
        if s.fast == "on":
            run.prepare(self)
        self.look = (run if s.fast == "on" else Plain).look(s, self)

    def step(self, i):
        found = self.gradients(i)
        bad, _ = self.agree(not self.look(found).is_finite, 0)  # as safe/run.py asks, who stops, too
        self.update(found, i, bad)
        return found


def make_trainer(config, s, device):
    """A Timed trainer on random tokens."""
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 64 * config.seq_len)
    return Timed(s, config, peers.random_source(config, device), (tokens, tokens, Bytes()), device)


def first_step(trainer):
    """Run it. Returns its Measured."""
    with measured(trainer) as seen:
        found = trainer.step(0)
    seen.share = share_of(trainer, found.loads)
    return seen


def predicted_traffic(trainer):
    """{collective: bytes} that this rank sends in a step, by its list and by formulas: of experts, if each gets equally
    many tokens."""
    s, net = trainer.s, trainer.net
    rank = net.mesh.get_coordinate()[0]
    where = vars(net.groups) | {"world": None, "all": trainer.control}
    total = Counter()
    for item in messages(trainer.config, s, stages_in(s, trainer.config, rank),
                         messages_of_list(net.lists(s.micro_batches)[rank], net)):
        total[item.op] += item.times * sent_in(dist.link_of(where[item.axis]), item.op, item.elements, item.width)
    return {op: n for op, n in total.items() if n}


def communication(trainer, device, seconds, repeats, calls):
    """The percentage of a step that its collectives cost: what it takes less when they send nothing. Then gradients are
    wrong, but the time is right. seconds: a step's."""
    trainer.net.pipeline.recording = None  # a recorded graph would call the real collectives
    with without_collectives():
        without = interleaved({"": lambda: trainer.step(2)}, device, repeats, calls)[""]
    trainer.net.pipeline.recording = None  # the graph just recorded sends nothing
    return 100 - 100 * without / seconds


def measured_bubble(trainer, repeats):
    """The percentage of a pipeline's forward and backward in which its busiest rank has nothing to do."""
    samples = []
    for _ in range(repeats):
        with timed(trainer.net.pipeline) as spans:
            trainer.step(2)
        _, starts, ends = zip(*spans)  # without waiting
        samples.append((sum(ends) - sum(starts), ends[-1] - starts[0]))
    busy, length = (max(of_all_ranks(statistics.median(column))) for column in zip(*samples))
    return 100 - 100 * busy / length


def free_memory():
    """Free what the last strategy left: cycles, cached blocks, every group but the world's (sockets, buffers)."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for group in [*torch_dist.distributed_c10d._world.pg_map]:
        if group is not torch_dist.group.WORLD:
            dist.destroy_process_group(group)
    torch.cuda.empty_cache()  # does nothing without CUDA


def peak_gib(device, build):
    """(what build() returns, GiB that it took at its peak on this rank, by the allocator; None on the CPU)."""
    if device.type != "cuda":
        return build(), None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = build()
    torch.cuda.synchronize()
    return made, (torch.cuda.max_memory_allocated() - before) / 2**30


def fills_half(peak, device):
    """Whether a strategy's peak, in GiB, is more than half of a GPU's memory on any rank."""
    if device.type != "cuda":
        return False
    return max(of_all_ranks(peak)) > torch.cuda.get_device_properties(device).total_memory / 2**31


def strategies(a, device):
    machine = measure_machine(device, a.dtype, a.config)
    say(f"{a.gpus} processes, {torch_dist.get_backend()}; {describe_model(a)}, {a.dtype}; "
        f"{a.batch_size} sequences of {a.config.seq_len} a step\n{describe_machine(machine)}\n"
        f"{mfu_note(a.config)}".rstrip())
    for reason in a.reasons:
        say(f"left out: {reason}")
    table = Table("A step is forward, backward, clip, AdamW; (plan) is its predicted time. Predicted, measured: GiB of "
                  "tensors on the fullest rank\n(peak: the allocator's on rank 0), MiB that rank 0 sends, bubble. "
                  "comm: the share of a step that its collectives cost", {
        "strategy": "strategy:<11", "who": "who:<31",
        "ms": "ms:>8.1f", "ratio": "over ours:>9.3f", "plan": "(plan):>8.1f", "off": "plan / ms:>9.2f",
        "tokens": "tokens/s GPU:>12,.0f", "mfu": "MFU %:>5.1f",
        "memory": "GiB:>6.2f", "memory_measured": "measured:>8.2f", "peak": "peak:>6.2f", "traffic": "MiB sent:>9,.1f",
        "traffic_counted": "counted:>9,.1f", "communication": "comm %:>8.1f", "bubble": "bubble %:>8.1f",
        "bubble_measured": "measured:>8.1f"}, device)
    for name, s in a.layouts.items():
        rows = [*measure_strategy(name, s, a, device, machine)]
        free_memory()
        for piece in a.without:
            ms = 1e3 * seconds_without(piece, name, s, a, device)
            rows.append({"strategy": name, "who": f"ours without {piece}", "ms": ms, "ratio": ms / rows[0]["ms"]})
        for row in rows:
            table.row(**row)
    write_json(a, device, table, model=a.model, machine=dataclasses.asdict(machine))


def never(*args, **more):
    return False


def pieces():
    """{piece of fast/: [(object, attribute, what stands in its place), ...]}, as for `patched`"""
    return {
        "graphs": [(RecordedPipeline, "run", HalvedPipeline.run)],                  # kernels launched one by one
        "kernels": [(kernels, "on_triton", never)],                                 # PyTorch's operations
        "norm": [*plain_kernels(kernels.LayerNorm), (norm, "add_layer_norm", norm.add_and_norm)],  # the reference's
        "adamw": [(run, "parts", lambda s, device: {"edition": Fast, **Plain.parts(s, device)})],  # PyTorch's
        "links": [(dist.LINKS, "ours", Watched)],                                   # rings
        "fp8": [(run, "use_fp8", lambda stage: None)]}                              # of --dtype fp8: bf16


def seconds_without(piece, name, s, a, device):
    """Seconds of a step without a piece of fast/."""
    with patched([*pieces()[piece], (dist.process, "links", defaultdict(dict))]):
        trainer, _ = build_ours(a.configs[name], s, device)
        seconds = interleaved({"": lambda: trainer.step(2)}, device, a.repeats, in_a_row(s, a, device))[""]
        trainer = None
        free_memory()
        for link in {link for links in dist.process.links.values() for link in links.values()}:  # the world's
            link.close()
    return seconds


def in_a_row(s, a, device):
    """How many steps are timed at a time. On GPUs several, because a step may leave traffic to the next one's forward,
    and the CPU runs ahead, as both do in training; but a pipeline fills and drains in each step."""
    return 3 if device.type == "cuda" and not a.quick and s.pp == 1 else 1


def build_ours(config, s, device):
    """(a trainer that has run a few steps, because the first ones take longer; the Measured of the first). With experts
    it has run 64, in which the routers' biases move less and less and even out the loads, as training soon would. Then
    the biases stay, so that all steps take equally long."""
    trainer = make_trainer(config, s, device)
    seen = first_step(trainer)
    for i in range(64 if config.experts else 1):
        trainer.balance_rate = 0.1 * 0.88**i  # 0.83 in all, more than scores of 0 to 1 differ; the last 3e-5
        trainer.step(1)
    trainer.balance_rate = 0.0
    return trainer, seen


def build_peer(name, config, s, device, batches):
    """(a function that runs a step of PyTorch's parts, its label)"""
    # torch.compile needs a C++ compiler on a CPU; of compiled blocks the first W of a V fails on one rank (torch 2.11)
    compiled = device.type == "cuda" and name not in ("zb-v", "dualpipe-v")
    if compiled:
        torch._dynamo.reset()
        # else PyTorch's I frees what its W needs
        torch._functorch.config.donated_buffer = not halves_backward(s.schedule, s.pp, s.virtual_stages)
    step, title = peers.PEERS[name](config, s, device, *batches, compiled)

    def in_pytorch():
        kernels.use("torch")  # because our kernels know neither autocast nor DTensor
        try:
            step()
        finally:
            kernels.use("auto")

    in_pytorch()
    in_pytorch()
    return in_pytorch, f"torch {title}" + ", compiled" * compiled


def tried(build):
    """(what build() returns, None), or (None, why the first rank failed, in one line): on all ranks alike."""
    made, failed = None, None
    try:
        made = build()
    except Exception as error:
        while error.__cause__:
            error = error.__cause__
        failed = time.time(), " ".join(f"{type(error).__name__}: {error}".split())[:200]
    gc.collect()  # a failed peer's connections close
    first = min(filter(None, of_all_ranks(failed)), default=None)
    return (None, first[1]) if first else (made, None)


def memory_and_traffic(trainer, seen):
    """Columns: GiB that the fullest rank keeps, and MiB that rank 0 sends, predicted and found."""
    memory = [max(of_all_ranks(sum(kinds.values()))) / 2**30
              for kinds in (predicted_bytes(trainer, seen.share), measured_bytes(trainer, seen))]
    trainer.step(2)
    dist.reset_traffic()
    trainer.step(2)
    counted = sum(t.bytes for t in dist.traffic().values())
    formula = sum(predicted_traffic(trainer).values())
    return {"memory": memory[0], "memory_measured": memory[1],
            "traffic": formula / 2**20, "traffic_counted": counted / 2**20}


def measure_strategy(name, s, a, device, machine):
    """Rows of one strategy: ours, and PyTorch's own, or why that failed."""
    config, tokens = a.configs[name], a.batch_size * a.config.seq_len / a.gpus
    (trainer, seen), peak = peak_gib(device, lambda: build_ours(config, s, device))
    alone = fills_half(peak, device)  # then there is no room for a peer beside it
    calls = in_a_row(s, a, device)
    found = memory_and_traffic(trainer, seen)
    steps = {"ours": lambda: trainer.step(2)}
    peaks = {"ours": peak}
    batches = trainer.micro_batches(trainer.train_data, 0, 0)
    seconds = {}
    if alone:
        seconds = interleaved(steps, device, a.repeats, calls)
        trainer = None
        steps.clear()
        free_memory()
    why = None
    if name in peers.PEERS and not (name == "one" and device.type == "cpu"):  # which has nothing but compile
        made, why = tried(lambda: peak_gib(device, lambda: build_peer(name, config, s, device, batches)))
        if made:
            (step, title), peak = made
            steps[title] = step
            peaks[title] = peak
    seconds |= interleaved(steps, device, a.repeats, calls) if steps else {}
    ours = seconds["ours"]
    costs = predict(config, s, machine)
    planned = sum(costs)
    found |= {"plan": 1e3 * planned, "off": planned / ours}
    if s.pp > 1 and not alone:
        found |= {"bubble": 100 * costs.bubble / (planned - costs.optimizer),
                  "bubble_measured": measured_bubble(trainer, a.repeats)}
    elif a.gpus > 1 and not alone:
        found["communication"] = communication(trainer, device, ours, a.repeats, calls)
    for who, took in seconds.items():
        speed = tokens / took
        more = found if who == "ours" else {"ratio": took / ours}
        yield {"strategy": name, "who": who, "ms": 1e3 * took, "tokens": speed, "mfu": mfu(config, speed, machine.peak),
               "peak": peaks[who], **more}
    if why:
        yield {"strategy": name, "who": f"torch: {why}"}
