"""Demos of the reading path, on a laptop."""

import argparse
import os
import time

import torch
import torch.distributed as torch_dist
from torch.distributed import get_rank, get_world_size, ReduceOp

import collectives as dist
import parallel
from collectives import (
    all_gather_into_tensor, all_reduce, all_to_all_single, barrier, broadcast, gather, Link, reduce,
    reduce_scatter_tensor, reset_traffic, scatter, traffic)
from further import experts as further_experts
from further.context import own_tokens, seen
from further.experts import count_of_each, split_experts
from further.schedules import interleaved, zero_bubble_h1
from lessons import kernels as errors
from lessons import sizes
from model import GPT, PRESETS, GPTConfig
from parallel import (
    average_gradients, check, cross_entropy, gpipe, lower, make_mesh, one_f_one_b, tensor_parallel)
from safe import launch
from theory.clock import draw, simulate
from theory.memory import memory_bytes


def print_in_order(text):
    """Print one text of each rank, in rank order, on rank 0."""
    texts = [None] * get_world_size() if get_rank() == 0 else None
    torch_dist.gather_object(text, texts)
    for line in texts or ():
        print(line, flush=True)


def ring_states(device="cpu"):
    """This rank's tensor, as a list with a number for each chunk, before and after each step of a ring all-reduce. Rank
    r starts from 1 << r, so a sum has a bit for each rank whose data is in it. Call on all ranks."""
    size, states = get_world_size(), []
    t = torch.full((size,), 1 << get_rank(), device=device)

    class Looking(Link):
        def exchange(self, sends=(), receives=()):
            states.append(t.tolist())
            super().exchange(sends, receives)

    Looking(torch_dist.group.WORLD).all_reduce(t, ReduceOp.SUM)
    return [*states, t.tolist()]


def _demo(device):
    rank, size = get_rank(), get_world_size()

    def say(text):
        if rank == 0:
            print(text)

    def show(title, call, **tensors):
        def values():
            return "  ".join(f"{name} {t.tolist() if isinstance(t, torch.Tensor) else [x.tolist() for x in t]}"
                             for name, t in tensors.items() if t is not None)
        before = values()
        call()
        say(f"\n{title}")
        print_in_order(f"  rank {rank}   {before}   ->   {values()}")

    def row(*numbers):
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    t = row(1, 2, 3) if rank == 0 else row(0, 0, 0)
    show("broadcast: one to all", lambda: broadcast(t, src=0), t=t)
    t, parts = row(0), [row(10 * i) for i in range(size)] if rank == 0 else None
    show("scatter: one sends each its part", lambda: scatter(t, parts, src=0), parts=parts, t=t)
    t, parts = row(10 + rank), [row(0) for i in range(size)] if rank == 0 else None
    show("gather: scatter backwards", lambda: gather(t, parts, dst=0), t=t, parts=parts)
    t = row(rank, 10 * rank)
    show("reduce: gather, combining on the way", lambda: reduce(t, dst=0), t=t)
    out, t = row(*[0] * size), row(10 + rank)
    show("all-gather: gather, for everybody", lambda: all_gather_into_tensor(out, t), input=t, output=out)
    out, t = row(0), torch.arange(size, device=device) + 10 * rank
    show("reduce-scatter: each gets its slice of the sum", lambda: reduce_scatter_tensor(out, t), input=t, output=out)
    t = torch.arange(size, device=device) + 10 * rank
    show("all-reduce = reduce-scatter + all-gather", lambda: all_reduce(t), t=t)
    out, t = row(*[0] * size), torch.arange(size, device=device) + 10 * rank
    show("all-to-all: a transpose over ranks", lambda: all_to_all_single(out, t), input=t, output=out)

    say("\nbarrier: rank r calls it after r/5 s, and all return when the last has called")
    start = time.perf_counter()
    time.sleep(rank / 5)
    barrier()
    print_in_order(f"  rank {rank}   left after {time.perf_counter() - start:.2f} s")

    whose, steps = "abcdefghijklmnopqrstuvwxyz", ring_states(device)
    for s, state in enumerate(steps):
        say("\nring all-reduce: a row is a rank, a column a chunk, a letter a rank whose data it has\n  start" if s == 0
            else f"  reduce-scatter step {s - 1}: chunk r-{s} goes right and is added" if s < size
            else f"  all-gather step {s - size}: chunk r-{s - size}, complete, goes right")
        cells = ["".join(whose[i] for i in range(size) if value >> i & 1) for value in state]
        print_in_order(f"    rank {rank}   " + "  ".join(cell.ljust(size, "·") for cell in cells))

    say(f"\nbytes sent by rank 0, K = {size} MiB, N = {size}:  counted | formula")
    n, t, slice_ = size, torch.ones(size << 18, device=device), torch.ones(1 << 18, device=device)
    k = t.nbytes
    for name, call, formula, text in [
            ("all_reduce", lambda: all_reduce(t), 2 * (n - 1) * k // n, "2(N-1)/N K"),
            ("reduce_scatter_tensor", lambda: reduce_scatter_tensor(slice_, t), (n - 1) * k // n, "(N-1)/N K"),
            ("all_gather_into_tensor", lambda: all_gather_into_tensor(t, slice_), (n - 1) * k // n, "(N-1)/N K"),
            ("broadcast", lambda: broadcast(t, src=0), (n - 1).bit_length() * k, "ceil(log2 N) K at the root"),
            ("barrier", lambda: barrier(), (n - 1).bit_length(), "ceil(log2 N)")]:
        reset_traffic()
        call()
        say(f"  {name:24}{traffic()[name].bytes:>12,} | {formula:>12,}   {text}")


# ---------------------------------------------------------------------------------------------------------------- demos

def demo_memory(arguments):
    config, gib = PRESETS[arguments.model], 2**30
    print(f"{arguments.model}, {config.parameters():,} parameters, dp {arguments.dp} x tp {arguments.tp}, "
          f"{arguments.dtype}, AdamW: GiB a GPU, without activations\n\n"
          f"{'stage':8}{'parameters':>12}{'gradients':>12}{'optimizer':>12}{'total':>10}   sharded over dp")
    dtype = getattr(torch, arguments.dtype)
    stages = [memory_bytes(config, zero, arguments.dp, arguments.tp, dtype) for zero in range(4)]
    totals = [b["parameters"] + b["gradients"] + b["optimizer"] for b in stages]
    kept = ("nothing", "optimizer", "optimizer, gradients", "optimizer, gradients, parameters")
    for zero, (b, total, what) in enumerate(zip(stages, totals, kept)):
        print(f"ZeRO-{zero}  {b['parameters'] / gib:12.2f}{b['gradients'] / gib:12.2f}{b['optimizer'] / gib:12.2f}"
              f"{total / gib:10.2f}   {what}\n        {'#' * round(40 * total / totals[0])}")
    print("\nGradients are float32. With 16-bit weights the optimizer keeps 12 bytes a parameter: two moments and a\n"
          "float32 master. At stage 3 the master's Nth, part of the optimizer here, is all that is kept of a matrix:\n"
          "16-bit weights exist only while its layer computes.")


def demo_pipeline(arguments):
    p, m, v = arguments.stages, arguments.micro_batches, arguments.virtual_stages
    schedules = [("GPipe", gpipe(p, m), 3 * (p - 1), 1), ("1F1B", one_f_one_b(p, m), 3 * (p - 1), 1),
                 ("ZB-H1", zero_bubble_h1(p, m), p - 1 if m >= p else None, 1)]
    if m % p == 0:
        schedules.insert(2, (f"interleaved 1F1B, v={v}", interleaved(p, m, v), 3 * (p - 1) / v, v))
    else:
        print(f"(no interleaved schedule: {m} micro-batches are not a multiple of {p} stages)")
    for name, lists, formula, chunks in schedules:
        check(lower(lists))
        timeline = simulate(lists)
        idle = max(timeline.idle)
        print(f"\n{name}: idle {'' if formula is None else f'{formula:g} by the formula | '}{idle:g} simulated, bubble "
              f"{100 * idle / timeline.length:.0f} % of {timeline.length:g}; peak activations "
              + " ".join(f"{n:g}" for n in timeline.peak))
        print(draw(timeline, 1 / chunks))
    print("\nF, I and W take 1 unit of time each, B = I + W takes 2. A column is 1 unit. An activation counts 1, from\n"
          "its F to its B or W. If a rank has v stages, a column is 1/v units, an activation counts 1/v, and the\n"
          "rank's second F0 runs micro-batch 0 through its next stage. -- is the rest of an action, .. is idle.")


def traffic_of(operation):
    """What this rank has sent by one operation since the counts were reset. Resets all counts."""
    sent = dist.traffic().get(operation, dist.Traffic())
    dist.reset_traffic()
    return sent


def off(a, b):
    return ((a - b).norm() / b.norm()).item()  # the relative error of a


def demo_data(arguments):
    """Data parallelism in float64: when each bucket leaves, what the naive way and DDP send, and their errors."""
    N, rank, config = dist.get_world_size(), dist.get_rank(), PRESETS["tiny"]
    dist.use(None, "ring")  # the lecture's: where fast/ is on, small tensors go another way, in fewer messages
    say, mine, K = (print if rank == 0 else lambda text: None), slice(2 * rank, 2 * rank + 2), config.parameters()
    x, y = torch.randint(config.vocab_size, (2, 2 * N, config.seq_len), generator=torch.Generator().manual_seed(0))
    one, naive, net = (GPT(config).double() for _ in range(3))
    model, came, complete = parallel.DDP(net, bucket_mb=2), set(), []
    piece = {p: ".".join(name.split(".")[:2 if name.startswith("h.") else 1]) for name, p in net.named_parameters()}

    def look(param):  # called when backward has computed this parameter's gradient
        came.add(param)
        for bucket in model.buckets:
            if bucket not in complete and came.issuperset(bucket.params):
                complete.append(bucket)
                has, lacks = (", ".join(dict.fromkeys(piece[p] for p in some))
                              for some in (bucket.params, [p for p in reversed(model.params) if p not in came]))
                say(f"  {len(came):7} of {len(piece)}{bucket.numel * 8 // 1024:>9}   {has:22}{lacks or 'nothing'}")

    for param in model.params:
        param.register_post_accumulate_grad_hook(look)
    say(f"{N} ranks, 2 of {2 * N} sequences each, the same GPT on all: K = {K:,} parameters in {len(piece)} tensors, "
        f"float64.\nA bucket is complete when its last gradient is computed. parallel.py sends all buckets after "
        f"backward; fast/overlap.py\nsends each when it is complete, so that it travels while backward goes on:\n\n"
        f"  gradients ready      KiB   bucket of             backward still computes")
    traffic_of("all_reduce")
    cross_entropy(one(x), y, config.vocab_size).backward()
    cross_entropy(model(x[mine]), y[mine], config.vocab_size).backward()
    model.finish_grad_sync()
    rows = [("DDP, in buckets", traffic_of("all_reduce"), net)]
    cross_entropy(naive(x[mine]), y[mine], config.vocab_size).backward()
    average_gradients(naive)
    rows = [("naive, after backward", traffic_of("all_reduce"), naive)] + rows
    say("\n  sent by rank 0           all-reduces  messages         bytes   gradients' error against one process")
    for what, sent, other in rows:
        error = max(off(p.grad, q.grad) for p, q in zip(other.parameters(), one.parameters()))
        say(f"  {what:25}{sent.calls:11}{sent.messages:10}{sent.bytes:14,}   {error:.0e}")
    say(f"  {'2(N-1)/N x K x 8 bytes (float64)':46}{2 * (N - 1) * 8 * K // N:14,}   in 2(N-1) messages an all-reduce")
    dist.use(None, "ours")


def demo_tensor(arguments):
    """Tensor parallelism in float64: attention and an MLP cut over the ranks, what f and g send, and the errors."""
    N, rank = dist.get_world_size(), dist.get_rank()
    config, say = GPTConfig(n_layer=1, n_head=2 * N, n_embd=32 * N), print if rank == 0 else lambda text: None
    generator = torch.Generator().manual_seed(0)
    X, dY = torch.randn(2, 16, config.seq_len, config.n_embd, dtype=torch.float64, generator=generator)
    say(f"{N} ranks have the same X (B, T, C) = {tuple(X.shape)} and dY. An all-reduce sends 2(N-1)/N x BTC x 8 "
        f"bytes = {2 * (N - 1) * X.nbytes // N:,} a rank.")
    one, net = GPT(config).double().h["0"], tensor_parallel(GPT(config).double(), None).h["0"]
    for name, first, what in (("attn", "c_attn", "Attention: Y = heads(X A) B; X A is each head's q, k and v"),
                              ("mlp", "c_fc", "MLP: Y = GeLU(X A) B")):
        whole, cut, inner = getattr(one, name), getattr(net, name), []
        cut.c_proj.register_forward_pre_hook(lambda layer, inputs, inner=inner: inner.append(inputs[0].detach()))
        x, x_cut = X.clone().requires_grad_(), X.clone().requires_grad_()
        Y = whole(x)
        Y.backward(dY)
        traffic_of("all_reduce")
        Y_cut = cut(x_cut)
        g = traffic_of("all_reduce")
        Y_cut.backward(dY)
        f, term = traffic_of("all_reduce"), inner[0] @ cut.c_proj.weight.T
        (A, B), (A_r, B_r) = ([tuple(getattr(m, leaf).weight.T.shape) for leaf in (first, "c_proj")]
                              for m in (whole, cut))
        say(f"\n{what}. A {A} is cut by columns, B {B} by rows:")
        print_in_order(f"  rank {rank}   A_{rank} {A_r}   into B {tuple(inner[0].shape)}   B_{rank} {B_r}   "
                            f"its term of Y {tuple(term.shape)}, {100 * off(term, Y):.0f} % off Y")
        say(f"  f   forward   nothing                                 backward  all-reduce of dX, {f.bytes:,} bytes "
            f"sent\n"
            f"  g   forward   all-reduce of Y, {g.bytes:9,} bytes sent   backward  nothing\n"
            f"  relative error, off from one rank's result: Y {off(Y_cut, Y):.0e}, dX {off(x_cut.grad, x.grad):.0e}")


def context_steps(n, kind):
    """What each rank of a ring computes in each step: [step][rank] is (chunks of queries, chunks of keys, blocks).

    A sequence has 2n chunks. A block is the scores of one chunk with another, half a block those of one with itself.
    """
    held = [own_tokens(2 * n, rank, n, kind) for rank in range(n)]  # a sequence of 2n tokens, so a token is a chunk

    def work(rank, other):
        rows, keys, causal = seen(rank, other, 1) if kind == "ring" else (slice(None), slice(None), True)
        mine, theirs = held[rank][rows], held[other][keys]
        ahead = mine.unsqueeze(1) - theirs  # how many chunks the queries are ahead of the keys
        blocks = (ahead > 0) + 0.5 * (ahead == 0) if causal else torch.ones(ahead.shape)
        return mine.tolist(), theirs.tolist(), blocks.sum().item()
    return [[work(rank, (rank - s) % n) for rank in range(n)] for s in range(n)]


def demo_context(arguments):
    n = arguments.ranks
    print(f"N = {n} ranks share a sequence of 2N = {2 * n} chunks. Keys and values go round to the right, so in step s "
          f"a rank\nhas those of the rank s to its left. \"Q x K: W\" means that queries of chunks Q see keys of "
          f"chunks K, in W blocks of\nscores. A block is one chunk with another. A chunk with itself is half a block, "
          f"because attention is causal.")
    for kind, title in ("ulysses", "contiguous chunks, if a ring used them"), ("ring", "zigzag, which our ring uses"):
        steps = context_steps(n, kind)
        longest = [max(blocks for _, _, blocks in row) for row in steps]

        def cell(queries, keys, blocks):
            text = "{} x {}: {:g}".format(*(",".join(map(str, some)) for some in (queries, keys)), blocks)
            return (text if blocks else "idle").ljust(18)

        print(f"\n{title}\n          holds     " + "".join(f"step {s}".ljust(18) for s in range(n)) + "blocks")
        for rank, row in enumerate(zip(*steps)):
            print(f"  rank {rank:<3} {','.join(map(str, row[0][0])):10}" + "".join(cell(*work) for work in row)
                  + f"{sum(blocks for _, _, blocks in row):g}")
        print("  the busiest        " + "".join(f"{most:g}".ljust(18) for most in longest) + f"{sum(longest):g}")
    print(f"\nA step lasts as long as its busiest rank. All {2 * n * n} blocks, shared out evenly, are {2 * n} a rank, "
          f"and zigzag takes just that.")


def demo_experts(arguments):
    """Experts over the ranks in float64: where tokens go, what the exchange sends, the errors; then balancing."""
    N, rank = dist.get_world_size(), dist.get_rank()
    config, say = GPTConfig(seq_len=5, n_embd=32, experts=2 * N), print if rank == 0 else lambda text: None
    one, net, C, E = GPT(config).double().h["0"].mlp, GPT(config).double(), config.n_embd, config.experts
    further_experts.expert_parallel(net, *split_experts(make_mesh("cpu", dp=N), N))
    cut, mine, generator = net.h["0"].mlp, slice(rank, rank + 1), torch.Generator().manual_seed(2)
    for router in (one.router, cut.router):
        router.weight.detach().mul_(10)  # initial scores are almost equal; this makes them differ
    X, dY = torch.randn(2, N, config.seq_len, C, dtype=torch.float64, generator=generator)
    x, x_cut = X.clone().requires_grad_(), X[mine].clone().requires_grad_()
    Y = one(x)
    Y.backward(dY)
    say(f"{N} ranks, {config.seq_len} tokens each, C = {C} wide, float64. E = {E} experts, 2 on each rank. A token's "
        f"output is the\nweighted sum of k = {config.top_k} experts' outputs:\n")
    chosen, gates = cut.router(x_cut)
    lines = [" + ".join(f"{gate:.2f} x expert {e}" for e, gate in zip(*token)) for token in zip(chosen[0], gates[0])]
    print_in_order("\n".join(f"  rank {rank:<3} token {t}   {line}" for t, line in enumerate(lines)))

    counts = count_of_each(chosen, E)
    rows, incoming = counts.view(N, 2).sum(1), counts.new_empty(N)
    dist.all_to_all_single(incoming, rows)
    say("\n           rows for expert" + "".join(f"{e:4}" for e in range(E)) + "    so for rank"
        + "".join(f"{r:4}" for r in range(N)))
    print_in_order(f"  rank {rank:<3}" + 16 * " " + "".join(f"{n:4}" for n in counts) + 15 * " "
                        + "".join(f"{n:4}" for n in rows))
    dist.reset_traffic()
    Y_cut = cut.experts(x_cut, chosen, gates)
    there = traffic_of("all_to_all_single").bytes
    Y_cut.backward(dY[mine])
    back = traffic_of("all_to_all_single").bytes
    law = 8 * C * (rows.sum() + incoming.sum() - 2 * rows[rank]).item()  # rows for others, outputs of rows from others
    errors = [off(Y_cut, Y[mine]), off(x_cut.grad, x.grad[mine])]
    errors.append(max(off(p.grad, q.grad.chunk(N)[rank])
                      for p, q in zip(cut.experts.parameters(), one.experts.parameters())))
    say("\n           bytes sent by all-to-all: counted | formula     errors against one process\n"
        "           forward             backward                Y       dX      its experts' gradients")
    print_in_order(f"  rank {rank:<3}{there:8,} | {law + 16 * (N - 1):<8,}{back:8,} | {law:<8,}      "
                        + "   ".join(f"{error:.0e}" for error in errors))
    say("\nIn forward a rank sends rows to other ranks' experts, and outputs for the rows that it received: C x 8 "
        "bytes each.\nBackward sends their gradients. Before all this, a rank sends E/N counts of 8 bytes to each "
        "other rank, so that the\nother rank knows how many rows it will receive.")
    demo_balance(cut.router, generator, say)


def demo_balance(router, generator, say, rate=0.01, tokens=500):
    """Balance a router on the same tokens, 50 times. The tokens are alike, so at first most prefer the same experts."""
    N, rank, (E, C) = dist.get_world_size(), dist.get_rank(), router.weight.shape
    batch = torch.randn(N, tokens, C, dtype=torch.float64, generator=generator)
    batch += torch.randn(C, dtype=torch.float64, generator=generator)
    say(f"\nBalancing: each round routes the same {tokens} tokens a rank. After it an expert's bias falls by {rate} if "
        f"it got more\nthan the mean of {N * tokens * router.top_k // E} tokens, else it rises. The mean bias stays 0. "
        f"Biases only decide which experts are chosen.\n\n  rounds   largest    " + "load".rjust(6).ljust(6 * E + 2)
        + "  bias")
    for done in range(51):
        router.load = 0
        _, gates = router(batch[rank:rank + 1])
        gates.sum().backward()  # because the router counts its load in backward
        dist.all_reduce(load := router.load)
        if done in (0, 10, 50):
            say(f"  {done:6}   {load.max() * E / load.sum():.2f} x mean" + "".join(f"{n:6}" for n in load) + "  "
                + "".join(f"{b:+7.2f}" for b in router.bias))
        router.balance(load, rate)


def positive(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1, e.g. 4")
    return int(text)


class Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, without argparse's usage
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}; see --help\n")


def demo_collectives(arguments):
    _demo(torch.device(arguments.device))


def main():
    parser = Parser(prog="python -m lessons", description="Lessons of the reading path. They run the reference.")
    lessons = parser.add_subparsers(required=True, metavar="LESSON")

    def lesson(name, run, help, ranks=None):
        found = lessons.add_parser(name, help=help)
        if ranks:
            found.add_argument("--ranks", type=positive, default=ranks, help="processes to start")
        found.set_defaults(run=run, processes=bool(ranks), device="cpu")
        return found

    lesson("sizes", lambda arguments: sizes.main(), "parameters, FLOPs and training bytes of every preset")
    kernels = lesson("kernels", lambda arguments: errors.main(), "each kernel's error beside PyTorch's, then its times")
    kernels.add_argument("words", nargs=argparse.REMAINDER, help="for bench.py kernels, which prints times on a GPU")
    collectives = lesson("collectives", demo_collectives, "every collective, step by step, and the bytes it sends", 4)
    collectives.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    memory = lesson("memory", demo_memory, "the ZeRO table: bytes a GPU at each stage")
    memory.add_argument("--model", choices=list(PRESETS), default="gpt2-xl")
    memory.add_argument("--dp", type=positive, default=8)
    memory.add_argument("--tp", type=positive, default=1)
    memory.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    lesson("data", demo_data, "gradients sent in buckets, or one by one", 2)
    lesson("tensor", demo_tensor, "attention and MLP cut over ranks: shapes, f and g, bytes", 2)
    pipeline = lesson("pipeline", demo_pipeline, "the schedules: grids, bubbles, activations")
    pipeline.add_argument("--stages", type=positive, default=4)
    pipeline.add_argument("--micro-batches", type=positive, default=8)
    pipeline.add_argument("--virtual-stages", type=positive, default=2)
    context = lesson("context", demo_context, "a sequence cut over ranks: who holds and computes what in each step")
    context.add_argument("--ranks", type=positive, default=4, help="ranks of the ring; starts no processes")
    lesson("experts", demo_experts, "tokens that travel to experts; balancing their load", 2)
    arguments = parser.parse_args()
    if not arguments.processes:
        return arguments.run(arguments)
    if "RANK" not in os.environ:
        launch.start_again(arguments.ranks)
    dist.initialize(arguments.device)
    arguments.run(arguments)
    dist.barrier()
    dist.destroy_process_group()
