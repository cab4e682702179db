"""Demos of the reading path, on a laptop."""

import argparse
import os
import time

import torch
import torch.distributed as torch_dist

import collectives as dist
import parallel
from further import experts as further_experts
from further.context import own_tokens, seen
from further.experts import count_of_each, split_experts
from further.schedules import interleaved, zero_bubble_h1
from lessons import kernels as errors
from lessons.measure import say
from model import GPT, PRESETS, GPTConfig
from parallel import (
    average_gradients, check, cross_entropy, gpipe, lower, make_mesh, one_f_one_b, tensor_parallel)
import safe
from safe import launch
from theory.clock import draw, simulate
from theory.memory import memory_bytes


def say_in_order(text):
    """Print one text of each rank, in rank order, on rank 0."""
    texts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    torch_dist.gather_object(text, texts)
    for line in texts or ():
        say(line)


def traffic_of(operation):
    """What this rank has sent by one operation since the counts were reset. Resets all counts."""
    sent = dist.traffic().get(operation, dist.Traffic())
    dist.reset_traffic()
    return sent


def ring_states(device="cpu"):
    """This rank's tensor, as a list with a number for each chunk, before and after each step of a ring all-reduce. Rank
    r starts from 1 << r, so a sum has a bit for each rank whose data is in it. Call on all ranks."""
    size, states = dist.get_world_size(), []
    t = torch.full((size,), 1 << dist.get_rank(), device=device)

    class Looking(dist.Link):
        def exchange(self, sends=(), receives=()):
            states.append(t.tolist())
            super().exchange(sends, receives)

    Looking(torch_dist.group.WORLD).all_reduce(t, dist.ReduceOp.SUM)
    return [*states, t.tolist()]


def demo_collectives(arguments):
    """Every collective before and after, the steps of a ring all-reduce, and the bytes that each sends."""
    device, rank, n = torch.device(arguments.device), dist.get_rank(), dist.get_world_size()

    def row(*numbers):
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    def values(tensors):
        return "  ".join(f"{name} {t.tolist() if isinstance(t, torch.Tensor) else [x.tolist() for x in t]}"
                         for name, t in tensors.items() if t is not None)

    root, empty = rank == 0, [0] * n
    tens = [10 * rank + i for i in range(n)]
    for title, call, tensors in (
            ("broadcast: one to all", dist.broadcast, {"t": row(1, 2, 3) if root else row(0, 0, 0)}),
            ("scatter: one sends each its part", dist.scatter,
             {"t": row(0), "parts": [row(10 * i) for i in range(n)] if root else None}),
            ("gather: scatter backwards", dist.gather,
             {"t": row(10 + rank), "parts": [row(0) for _ in range(n)] if root else None}),
            ("reduce: gather, combining on the way", dist.reduce, {"t": row(rank, 10 * rank)}),
            ("all-gather: gather, for everybody", dist.all_gather_into_tensor,
             {"output": row(*empty), "input": row(10 + rank)}),
            ("reduce-scatter: each gets its slice of the sum", dist.reduce_scatter_tensor,
             {"output": row(0), "input": row(*tens)}),
            ("all-reduce = reduce-scatter + all-gather", dist.all_reduce, {"t": row(*tens)}),
            ("all-to-all: a transpose over ranks", dist.all_to_all_single,
             {"output": row(*empty), "input": row(*tens)})):
        before = values(tensors)
        call(*tensors.values())
        say(f"\n{title}")
        say_in_order(f"  rank {rank}   {before}   ->   {values(tensors)}")

    say("\nbarrier: rank r calls it after r/5 s, and all return when the last has called")
    start = time.perf_counter()
    time.sleep(rank / 5)
    dist.barrier()
    say_in_order(f"  rank {rank}   left after {time.perf_counter() - start:.2f} s")

    say("\nring all-reduce: a row is a rank, a column a chunk, a letter a rank whose data it has")
    steps = ["start", *(f"reduce-scatter step {s}: chunk r-{s + 1} goes right and is added" for s in range(n - 1)),
             *(f"all-gather step {s}: chunk r-{s}, complete, goes right" for s in range(n - 1))]
    for step, state in zip(steps, ring_states(device), strict=True):
        say(f"  {step}")
        chunks = ["".join("abcdefghijklmnopqrstuvwxyz"[i] for i in range(n) if bits >> i & 1) for bits in state]
        say_in_order(f"    rank {rank}   " + "  ".join(chunk.ljust(n, "·") for chunk in chunks))

    say(f"\nbytes sent by rank 0, K = {n} MiB, N = {n}:  counted | formula")
    whole, part = torch.ones(n << 18, device=device), torch.ones(1 << 18, device=device)
    k, rounds = whole.nbytes, (n - 1).bit_length()
    for call, tensors, formula, text in (
            (dist.all_reduce, [whole], 2 * (n - 1) * k // n, "2(N-1)/N K"),
            (dist.reduce_scatter_tensor, [part, whole], (n - 1) * k // n, "(N-1)/N K"),
            (dist.all_gather_into_tensor, [whole, part], (n - 1) * k // n, "(N-1)/N K"),
            (dist.broadcast, [whole], rounds * k, "ceil(log2 N) K at the root"),
            (dist.barrier, [], rounds, "ceil(log2 N)")):
        dist.reset_traffic()
        call(*tensors)
        say(f"  {call.__name__:24}{traffic_of(call.__name__).bytes:>12,} | {formula:>12,}   {text}")


def demo_sizes(arguments):
    """Parameters, FLOPs and training bytes of every preset."""
    print(f"{'preset':12} {'layers':>6} {'heads':>5} {'width':>5} {'vocab':>6} {'context':>7} {'parameters':>13} "
          f"{'FLOPs/token':>12} {'training MiB':>12}")
    for name, c in PRESETS.items():
        print(f"{name:12} {c.n_layer:6} {c.n_head:5} {c.n_embd:5} {c.vocab_size:6} {c.seq_len:7} {c.parameters():13,} "
              f"{c.flops_per_token():12.3g} {16 * c.parameters() / 2**20:12,.0f}")
    print("\nFLOPs/token: 6 (K - T C) + 12 L C T, forward and backward. Training: float32 weights 4 bytes a parameter, "
          "gradients 4,\nAdamW 8; activations come on top.")


def demo_memory(arguments):
    """The ZeRO table: bytes a GPU at each stage."""
    config, gib = PRESETS[arguments.model], 2**30
    print(f"{arguments.model}, {config.parameters():,} parameters, dp {arguments.dp} x tp {arguments.tp}, "
          f"{arguments.dtype}, AdamW: GiB a GPU, without activations\n\n"
          f"{'stage':8}{'parameters':>12}{'gradients':>12}{'optimizer':>12}{'total':>10}   sharded over dp")
    dtype = getattr(torch, arguments.dtype)
    whole = None
    for zero, what in enumerate(("nothing", "optimizer", "optimizer, gradients", "optimizer, gradients, parameters")):
        kinds = memory_bytes(config, zero, arguments.dp, arguments.tp, dtype)
        sizes = [kinds[kind] for kind in ("parameters", "gradients", "optimizer")]
        whole = whole or sum(sizes)
        print(f"ZeRO-{zero}  {''.join(f'{size / gib:12.2f}' for size in sizes)}{sum(sizes) / gib:10.2f}   {what}\n"
              f"        {'#' * round(40 * sum(sizes) / whole)}")
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


def off(a, b):
    return ((a - b).norm() / b.norm()).item()  # the relative error of a


def demo_data(arguments):
    """Data parallelism in float64: when each bucket leaves, what the naive way and DDP send, and their errors."""
    N, rank, config = dist.get_world_size(), dist.get_rank(), PRESETS["tiny"]
    dist.use(None, "ring")  # the lecture's: where fast/ is on, small tensors go another way, in fewer messages
    mine, K = slice(2 * rank, 2 * rank + 2), config.parameters()
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
    config = GPTConfig(n_layer=1, n_head=2 * N, n_embd=32 * N)
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
        say_in_order(f"  rank {rank}   A_{rank} {A_r}   into B {tuple(inner[0].shape)}   B_{rank} {B_r}   "
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
    config = GPTConfig(seq_len=5, n_embd=32, experts=2 * N)
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
    say_in_order("\n".join(f"  rank {rank:<3} token {t}   {line}" for t, line in enumerate(lines)))

    counts = count_of_each(chosen, E)
    rows, incoming = counts.view(N, 2).sum(1), counts.new_empty(N)
    dist.all_to_all_single(incoming, rows)
    say("\n           rows for expert" + "".join(f"{e:4}" for e in range(E)) + "    so for rank"
        + "".join(f"{r:4}" for r in range(N)))
    say_in_order(f"  rank {rank:<3}" + 16 * " " + "".join(f"{n:4}" for n in counts) + 15 * " "
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
    say_in_order(f"  rank {rank:<3}{there:8,} | {law + 16 * (N - 1):<8,}{back:8,} | {law:<8,}      "
                 + "   ".join(f"{error:.0e}" for error in errors))
    say("\nIn forward a rank sends rows to other ranks' experts, and outputs for the rows that it received: C x 8 "
        "bytes each.\nBackward sends their gradients. Before all this, a rank sends E/N counts of 8 bytes to each "
        "other rank, so that the\nother rank knows how many rows it will receive.")
    demo_balance(cut.router, generator)


def demo_balance(router, generator, rate=0.01, tokens=500):
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


def count(default, help):
    return {"type": positive, "default": default, "help": help}


MEMORY = {"--model": {"choices": list(PRESETS), "default": "gpt2-xl"}, "--dp": count(8, "replicas"),
          "--tp": count(1, "ranks that share every layer"),
          "--dtype": {"choices": ["float32", "bfloat16"], "default": "bfloat16"}}
PIPELINE = {"--stages": count(4, "ranks"), "--micro-batches": count(8, "of a step"),
            "--virtual-stages": count(2, "stages of a rank, if interleaved")}
LESSONS = (  # name, function, processes to start, help, options
    ("sizes", demo_sizes, 0, "parameters, FLOPs and training bytes of every preset", {}),
    ("kernels", lambda arguments: errors.main(), 0, "each kernel's error beside PyTorch's", {}),
    ("collectives", demo_collectives, 4, "every collective, step by step, and the bytes it sends",
     {"--device": {"choices": ["cpu", "cuda"], "default": "cpu"}}),
    ("memory", demo_memory, 0, "the ZeRO table: bytes a GPU at each stage", MEMORY),
    ("data", demo_data, 2, "gradients sent in buckets, or one by one", {}),
    ("tensor", demo_tensor, 2, "attention and MLP cut over ranks: shapes, f and g, bytes", {}),
    ("pipeline", demo_pipeline, 0, "the schedules: grids, bubbles, activations", PIPELINE),
    ("context", demo_context, 0, "a sequence cut over ranks: who holds and computes what in each step",
     {"--ranks": count(4, "ranks of the ring; starts no processes")}),
    ("experts", demo_experts, 2, "tokens that travel to experts; balancing their load", {}))


def main():
    parser = Parser(prog="python -m lessons", description="Lessons of the reading path. They run the reference.")
    lessons = parser.add_subparsers(required=True, metavar="LESSON")
    for name, run, ranks, help, options in LESSONS:
        lesson = lessons.add_parser(name, help=help)
        if ranks:
            options = {"--ranks": count(ranks, "processes to start"), **options}
        for option, more in options.items():
            lesson.add_argument(option, **more)
        lesson.set_defaults(run=run, processes=ranks > 0)
    arguments = parser.parse_args()
    if not arguments.processes:
        return arguments.run(arguments)
    if "RANK" not in os.environ:
        launch.start_again(arguments.ranks)
    safe.on()  # ranks meet where this machine's name does not resolve, too, and name what fails; the numbers are equal
    dist.initialize(getattr(arguments, "device", "cpu"))
    arguments.run(arguments)
    dist.barrier()
    dist.destroy_process_group()
