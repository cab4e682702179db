"""Demos of the reading path, on a laptop."""

import argparse
import dataclasses
import inspect
import math
import os
import re
import sys
import time
from collections import Counter

import torch
from torch.utils.flop_counter import FlopCounterMode

import collectives as dist
import fast
from further import expert_parallel, llama
from further.context import own_tokens, seen
from further.groups import split_experts
from further.experts import count_of_each, ExpertsConfig
from further.lists import check
from further.schedules import SCHEDULES
from lessons import kernels, links, mutate, pages, puzzles, same
from lessons.bench.timing import of_all_ranks, off, say, say_in_order, traffic_of
from lessons.blind import demo_blind
from lessons.compiled import demo_compile
from lessons.drawer import terminal
from lessons.explore import explore
from lessons.ladder import demo_ladder
from lessons.lecture8 import demo_lecture8
from lessons.letters import check as check_letters
from lessons.machine import demo_machine
from lessons.measuring import demo_measuring
from lessons.overlap import demo_overlap
from lessons.path import demo_path
from lessons.pictures import frames_of_ring, ring_states, ring_steps
from lessons.sampling import demo_sampling
from lessons.step import demo_step, settings_of
from lessons.survive import demo_survive
from lessons.together import demo_together
from lessons.zero import demo_zero
from model import GPT, PRESETS, GPTConfig, shapes
from parallel import lower, make_mesh, tensor_parallel
import safe
from safe import launch
from safe.flags import dashed, gpus_here, Parser, refuse
from further.bad_input import BadInput
from theory.clock import bubble, draw, simulate
from theory.speed import MACHINES
from theory.traffic import sent
from further.flags import config_of, layout_of


def shown(tensors):
    return "   ".join(str(t.tolist()) for t in tensors)


def by_hand(tensor):
    """The sum over all ranks, point to point: one rank does all the work, and its links carry all bytes."""
    rank, other = dist.get_rank(), torch.empty_like(tensor)
    for peer in range(1, dist.get_world_size()):
        if rank == 0:
            dist.recv(other, peer)
            tensor += other
        elif rank == peer:
            dist.send(tensor, 0)
    for peer in range(1, dist.get_world_size()):
        if rank == 0:
            dist.send(tensor, peer)
        elif rank == peer:
            dist.recv(tensor, 0)


def demo_collectives():
    """Every collective before and after, the steps of a ring all-reduce, and the bytes that each sends."""
    rank, n = dist.get_rank(), dist.get_world_size()
    one, tens = torch.tensor([10 + rank]), 10 * rank + torch.arange(n)
    to_fill, parts_to_fill = torch.zeros_like(one), torch.zeros_like(tens)

    def at_root(parts):
        return [parts.view(n, 1)] if rank == 0 else []

    for title, call, *tensors in (
            ("broadcast: one to all, such as parameters at the start", dist.broadcast, tens),
            ("scatter: one sends each its part, as of a batch (output, input)", dist.scatter, to_fill, *at_root(tens)),
            ("gather: scatter backwards, as for losses (input, output)", dist.gather, one, *at_root(parts_to_fill)),
            ("reduce: gather, combining on the way", dist.reduce, tens),
            ("all-gather: gather, for everybody (output, input)", dist.all_gather_into_tensor, parts_to_fill, one),
            ("reduce-scatter: each its slice of the sum (output, input)", dist.reduce_scatter_tensor, to_fill, tens),
            ("all-reduce = reduce-scatter + all-gather", dist.all_reduce, tens),
            ("all-to-all: a transpose over ranks (output, input)", dist.all_to_all_single, parts_to_fill, tens)):
        tensors = [t.clone() for t in tensors]
        before = shown(tensors)
        call(*[list(t) if t.dim() > 1 else t for t in tensors])  # scatter and gather take a list of parts
        say(f"\n{title}")
        say_in_order(f"  rank {rank}   {before}   ->   {shown(tensors)}")

    say("\nring all-reduce: rank r begins with 1, 2, ... times 10^r, so digits say whose numbers a chunk has; [new]")
    for frame in frames_of_ring(of_all_ranks(ring_states()), ring_steps(n)):
        say(terminal(frame))
    whole = torch.ones(n << 18)
    dist.reset_traffic()
    by_hand(whole)
    there = dist.traffic()["send"].bytes if n > 1 else 0
    say(f"\nan all-reduce by hand, all to rank 0 and back: rank 0 sends {there:,} "
        f"bytes, (N-1) K; of the ring's ranks each 2(N-1)/N K")
    say(f"\nbytes sent by rank 0, K = {n} MiB, N = {n}:  counted | formula")
    part = torch.ones(1 << 18)
    for call, tensors, text in (
            (dist.all_reduce, [whole], "2(N-1)/N K"),
            (dist.reduce_scatter_tensor, [part, whole], "(N-1)/N K"),
            (dist.all_gather_into_tensor, [whole, part], "(N-1)/N K"),
            (dist.broadcast, [whole], "ceil(log2 N) K at the root; all ranks together (N-1) K"),
            (dist.barrier, [], "ceil(log2 N)")):
        dist.reset_traffic()
        call(*tensors)
        op, formula = call.__name__, sent(call.__name__, whole.numel(), 4, n)
        say(f"  {op:24}{traffic_of(op).bytes:>12,} | {formula:>12,}   {text}")


def demo_sizes():
    """Parameters, FLOPs and training bytes of every preset; a block's matrices over C^2."""
    print(f"{'preset':12} {'layers':>6} {'heads':>5} {'width':>5} {'vocab':>6} {'context':>7} {'parameters':>13} "
          f"{'FLOPs/token':>12} {'training MiB':>12}")
    for name, c in PRESETS.items():
        print(f"{name:12} {c.n_layer:6} {c.n_head:5} {c.n_embd:5} {c.vocab_size:6} {c.seq_len:7} {c.parameters():13,} "
              f"{c.flops_per_token():12.3g} {16 * c.parameters() / 2**20:12,.0f}")
    print("\nFLOPs/token: 6 (K - T C) + 12 L C T, forward and backward. Training: float32 weights 4 bytes a parameter, "
          "gradients 4,\nAdamW 8; activations come on top.\n\n"
          f"{'matrices of a block over C^2':32}{'q, k, v':>12}{'projection':>12}{'MLP, up':>12}"
          f"{'MLP, down':>12}{'all':>8}")
    wide = dataclasses.replace(llama.PRESETS["1b"], n_kv_head=0)
    for name, c in {"GPT-2 XL": PRESETS["gpt2-xl"], "Llama, hidden layer 8/3 C": dataclasses.replace(wide, inner=0),
                    "Llama, hidden layer 4 C": wide, "  and half as many k and v": llama.PRESETS["1b"]}.items():
        sizes = [math.prod(shape) / c.n_embd**2 for leaf, shape in shapes(c).items()
                 if leaf.startswith("h.0.") and len(shape) > 1]
        print(f"{name:32}{''.join(f'{n:12.2f}' for n in sizes)}{sum(sizes):8.2f}")
    xl = PRESETS["gpt2-xl"]
    print(f"GPT-2 XL beside its blocks: embedding V C = {xl.vocab_size * xl.n_embd:,}, which is the head, too; "
          f"positions T C = {xl.seq_len * xl.n_embd:,}.\nOf a parameter's 6 FLOPs a token 2 are forward, 4 backward; "
          "counted in a GPT of {:.1f}M parameters {:.2f}, {:.2f}.".format(*flops_of_a_parameter()))
    print("\nwhat a sampler's cache keeps of a token in a layer, numbers")
    for name, c in {"16 heads of 128": wide, "half as many k and v": llama.PRESETS["1b"]}.items():
        print(f"{name:32}{2 * c.kv_heads * c.head_dim:12,}")


def flops_of_a_parameter():
    """(parameters in millions, FLOPs a parameter and token forward, backward) of a small GPT, as PyTorch counts
    them."""
    net = GPT(GPTConfig(seq_len=16, n_layer=4, n_head=4, n_embd=256))
    with FlopCounterMode(display=False) as counted:
        loss = net(torch.zeros(1, 16, dtype=torch.int64)).sum()
        forward = counted.get_total_flops()
        loss.backward()
    count = net.config.parameters() - 16 * 256  # positions multiply nothing
    return count / 1e6, *(flops / 16 / count for flops in (forward, counted.get_total_flops() - forward))


DRAWN = "gpipe", "1f1b", "interleaved", "zb-h1"


def demo_pipeline(stages=4, micro_batches=8, virtual_stages=2, schedule=""):
    """Schedules: grids, bubbles, activations. Four of them, or the one that --schedule names.

    --virtual-stages are a rank's, of the schedule interleaved.
    """
    p, m = stages, micro_batches
    odd = {"v-half": -(p % 2) / 2, "v-min": 0.5 if p % 3 == 0 else -0.5}  # what the formula leaves out
    print("F, I and W take 1 unit of time each, B = I + W takes 2. A column is 1 unit. An activation counts 1,\n"
          "from its F to its B or W. If a rank has v stages, a column is 1/v units, an activation counts 1/v, and\n"
          "F0/5 runs micro-batch 0 through stage 5. -- is the rest of an action, .. idle.")
    for name in [schedule] if schedule else DRAWN:
        v = virtual_stages if name == "interleaved" else 1
        lists = SCHEDULES[name](p, m, v)
        check(lower(lists), m)
        formula, timeline = bubble(name, p, v, 1, 1, 1), simulate(lists)
        holds = formula is not None and m >= p
        said = f"{max(formula + odd.get(name, 0), 0):g} by the formula | " if holds else ""
        idle = max(timeline.idle)
        print(f"\n{name}: idle {said}{idle:.4g} simulated, bubble "
              f"{100 * idle / timeline.length:.0f} % of {timeline.length:g}; peak activations "
              + " ".join(f"{n:g}" for n in timeline.peak))
        print(draw(timeline))
    if m < p:
        print("\nThe lecture's formulas hold for as many micro-batches as stages, or more.")


def both_ways(module, op, x, dy):
    """Run a module and its backward: (Y, dX, bytes of a collective `op` that this rank sends forward, backward)."""
    x = x.clone().requires_grad_()
    traffic_of(op)
    y = module(x)
    forward = traffic_of(op).bytes
    y.backward(dy)
    return y, x.grad, forward, traffic_of(op).bytes


def demo_tensor():
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
        cut.c_proj.register_forward_pre_hook(lambda layer, inputs: inner.append(inputs[0].detach()))
        Y, dX, *_ = both_ways(whole, "all_reduce", X, dY)
        Y_cut, dX_cut, g, f = both_ways(cut, "all_reduce", X, dY)
        term = inner[0] @ cut.c_proj.weight.T
        (A, B), (A_r, B_r) = ([tuple(getattr(m, leaf).weight.T.shape) for leaf in (first, "c_proj")]
                              for m in (whole, cut))
        say(f"\n{what}. A {A} is cut by columns, B {B} by rows:")
        say_in_order(f"  rank {rank}   A_{rank} {A_r}   between them {tuple(inner[0].shape)}   B_{rank} {B_r}   "
                     f"its term of Y {tuple(term.shape)}, {100 * off(term, Y):.0f} % off Y")
        say(f"  f   forward   identity                                backward  all-reduce of dX, {f:,} bytes sent\n"
            f"  g   forward   all-reduce of Y, {g:9,} bytes sent   backward  identity\n"
            f"  relative error, off from one rank's result: Y {off(Y_cut, Y):.0e}, dX {off(dX_cut, dX):.0e}")


def demo_types(s, ranks):
    """Letters of a step on all ranks, one after the other: replicated, varying, a term of a sum or of a mean."""
    start = time.perf_counter()
    config = config_of(s)
    tokens = torch.randint(config.vocab_size, (2, s.batch_size // s.dp, config.seq_len))
    steps, wrong = check_letters(config, layout_of(s), range(ranks), *(t.chunk(s.micro_batches) for t in tokens))
    sent = Counter()
    for step in steps.values():
        for (axis, what, place), times in step.sent.items():
            sent[axis, what, re.sub(r"\.\d+\.", ".*.", place)] += times
    for (axis, what, place), times in sorted(sent.items()):
        print(f"{axis:4} {what:36}{times:5} x  {place}")
    print(f"\n{ranks} ranks, {time.perf_counter() - start:.1f} s, no message sent. {wrong or 'Nothing is wrong.'}")
    if wrong:
        raise SystemExit(1)


def context_work(rank, other, n, kind):
    """What a rank of a ring of n computes with the keys of another: (text, blocks).

    A sequence has 2n chunks. A block is the scores of one chunk with another, half a block those of one with itself.
    """
    mine, theirs = (own_tokens(2 * n, r, n, kind) for r in (rank, other))  # a sequence of 2n tokens: one is a chunk
    if kind == "ring":
        rows, keys, _ = seen(rank, other, 1)
        mine, theirs = mine[rows], theirs[keys]
    ahead = mine.unsqueeze(1) - theirs  # how many chunks the queries are ahead of the keys
    blocks = ((ahead > 0) + 0.5 * (ahead == 0)).sum().item()
    queries, keys = (",".join(map(str, chunks.tolist())) for chunks in (mine, theirs))
    return f"{queries} x {keys}: {blocks:g}" if blocks else "idle", blocks


def demo_context(ranks=4):
    """A sequence cut over ranks: who computes what in each step."""
    n = ranks
    print(f"N = {n} ranks share a sequence of 2N = {2 * n} chunks. Keys and values go round to the right, so in step s "
          f"a rank\nhas those of the rank s to its left. \"Q x K: W\" means that queries of chunks Q see keys of "
          f"chunks K, in W blocks of\nscores. A block is one chunk with another. A chunk with itself is half a block, "
          f"because attention is causal.")

    def show(title, cells, total):
        print(f"  {title:8}" + "".join(cell.ljust(18) for cell in cells) + total)

    for kind, title in ("ulysses", "contiguous chunks, if a ring used them"), ("ring", "zigzag, which our ring uses"):
        print(f"\n{title}")
        show("", [f"step {s}" for s in range(n)], "blocks")
        longest = [0] * n
        for rank in range(n):
            cells, blocks = zip(*[context_work(rank, (rank - s) % n, n, kind) for s in range(n)])
            longest = list(map(max, longest, blocks))
            show(f"rank {rank}", cells, f"{sum(blocks):g}")
        show("busiest", [f"{most:g}" for most in longest], f"{sum(longest):g}")
    print(f"\nA step lasts as long as its busiest rank. All {2 * n * n} blocks, shared out evenly, are {2 * n} a rank, "
          f"and zigzag takes just that.")


def demo_experts():
    """Experts over the ranks in float64: where tokens go, what the exchange sends, and the errors."""
    N, rank = dist.get_world_size(), dist.get_rank()
    config = ExpertsConfig(seq_len=5, n_embd=32, experts=2 * N)
    one, net, C, E = GPT(config).double().h["0"].mlp, GPT(config).double(), config.n_embd, config.experts
    expert_parallel.expert_parallel(net, *split_experts(make_mesh("cpu", dp=N), N))
    cut, mine, generator = net.h["0"].mlp, slice(rank, rank + 1), torch.Generator().manual_seed(2)
    for router in (one.router, cut.router):
        router.weight.detach().mul_(10)  # initial scores are almost equal; this makes them differ
    X, dY = torch.randn(2, N, config.seq_len, C, dtype=torch.float64, generator=generator)
    Y, dX, *_ = both_ways(one, "all_to_all_single", X, dY)
    Y_cut, dX_cut, there, back = both_ways(cut, "all_to_all_single", X[mine], dY[mine])
    say(f"{N} ranks, {config.seq_len} tokens each, C = {C} wide, float64. E = {E} experts, 2 on each rank. A token's "
        f"output is the\nweighted sum of k = {config.top_k} experts' outputs:\n")
    chosen, gates = cut.router(X[mine])
    lines = [" + ".join(f"{gate:.2f} x expert {e}" for e, gate in zip(*token)) for token in zip(chosen[0], gates[0])]
    say_in_order("\n".join(f"  rank {rank:<3} token {t}   {line}" for t, line in enumerate(lines)))

    counts = count_of_each(chosen, E)
    rows, incoming = counts.view(N, 2).sum(1), counts.new_empty(N)
    dist.all_to_all_single(incoming, rows)
    law = 8 * C * (rows.sum() + incoming.sum() - 2 * rows[rank]).item()  # rows for others, outputs of rows from others
    say("\n           rows for each expert, so for each rank; bytes sent by all-to-all: counted | formula; errors")
    say_in_order(f"  rank {rank:<3}{counts.tolist()}   {rows.tolist()}   forward {there:,} | {law + 16 * (N - 1):,}   "
                 f"backward {back:,} | {law:,}   Y {off(Y_cut, Y[mine]):.0e}, dX {off(dX_cut, dX[mine]):.0e}")
    say("\nIn forward a rank sends rows to other ranks' experts, and outputs for the rows that it received: C x 8 "
        "bytes each.\nBackward sends their gradients. Before all this, a rank sends E/N counts of 8 bytes to each "
        "other rank, so that the\nother rank knows how many rows it will receive.")


def positive(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1, e.g. 4")
    return int(text)


DEMOS = {  # an argument of the function is a flag of the command line
    "sizes": demo_sizes, "machine": demo_machine, "kernels": kernels.main, "compile": demo_compile,
    "collectives": demo_collectives, "step": demo_step, "zero": demo_zero, "tensor": demo_tensor, "types": demo_types,
    "pipeline": demo_pipeline, "context": demo_context, "experts": demo_experts, "measuring": demo_measuring,
    "links": links.demo_links, "lecture8": demo_lecture8, "ladder": demo_ladder, "sampling": demo_sampling,
    "overlap": demo_overlap, "together": demo_together, "path": demo_path, "blind": demo_blind,
    "survive": demo_survive, "pages": pages.pages, "explore": explore}
ON_RANKS = {  # how many, if --ranks is left out; each is a process and runs the demo
    demo_collectives: 4, demo_tensor: 2, demo_experts: 2, demo_measuring: 2, demo_lecture8: 2, links.demo_links: 2}
OF_A_LAYOUT = {  # flags are train.py's; those that stand before the command line
    demo_step: "--dp 2", demo_types: "--dp 2 --tp 2", demo_together: "--dp 2 --tp 2", demo_path: "--dp 2 --tp 2"}
CHOICES = {"model": PRESETS, "machine": MACHINES, "schedule": SCHEDULES}


BY_STOP = {  # of docs/reading.md
    "1 Messages and the ring": "collectives links together",
    "2, 3 Averaging gradients; a step is a list": "zero overlap step",
    "4 f and g": "tensor types",
    "5 Pipelines": "pipeline lecture8",
    "The machine; 6 to 8 kernels": "machine ladder compile kernels",
    "9, 10 A layout, and a step of it": "sizes path",
    "Measuring": "measuring",
    "Further": "context experts sampling survive",
    "All of it, to touch": "pages explore puzzles",
    "Your own code (docs/same.md has mutate, too, docs/bugs.md blind)": "same"}
BY_TEXT = {  # of docs/lecture.md
    "Lecture 8": "lecture8 collectives zero tensor pipeline measuring",
    "GPUs, an introduction": "machine ladder compile kernels",
    "Notes on lectures 5 to 8": "zero machine step overlap",
    "The playbook's crash course": "collectives measuring sizes overlap ladder",
    "How large models run on GPUs": "measuring sampling ladder compile"}


def told_of(parser):
    """Its first paragraph, in one line."""
    return " ".join((parser.description or "").partition("\n\n")[0].split())


def listing(parsers):
    """All lessons by stop, with what each shows; and their names by text."""
    lines = ["by stop (0 is python lessons/micro.py):"]
    for stop, names in BY_STOP.items():
        lines.append(f"  {stop}")
        lines += [f"    {name:13}{told_of(parsers[name])}" for name in names.split()]
    lines.append("\nby text:")
    return "\n".join(lines + [f"  {text:30}{names}" for text, names in BY_TEXT.items()])


def flags_of(demo):
    """{flag: what it is if left out}"""
    if demo in OF_A_LAYOUT:
        return {}
    if demo in ON_RANKS:
        return {"ranks": ON_RANKS[demo]}
    return {name: argument.default for name, argument in inspect.signature(demo).parameters.items()}


def parser_of_all():
    parser = Parser(prog="python -m lessons", formatter_class=argparse.RawDescriptionHelpFormatter)
    lessons = parser.add_subparsers(required=True, metavar="LESSON")
    for name, demo in DEMOS.items():
        lesson = lessons.add_parser(name, description=demo.__doc__)
        lesson.set_defaults(demo=demo)
        for flag, default in flags_of(demo).items():
            kind = {"port": int}.get(flag, positive if isinstance(default, int) else str)
            lesson.add_argument(dashed(flag), type=kind, default=default, choices=CHOICES.get(flag),
                                help=f"default: {default or 'none'}")
    puzzles.add_to(lessons)
    same.add_to(lessons.add_parser("same", description=same.main.__doc__)).set_defaults(demo=same.main)
    mutate.add_to(lessons.add_parser("mutate", description=mutate.mutate.__doc__)).set_defaults(demo=mutate.mutate)
    parser.description = listing(lessons.choices)
    return parser


def run_on_ranks(demo, ranks):
    """Starts so many processes, unless torchrun has. Each runs the demo."""
    if "RANK" not in os.environ:
        launch.start_again(ranks)
    on_links = demo is links.demo_links
    (fast if on_links else safe).on()  # ranks name what fails; the numbers are equal
    device = "cuda" if on_links and gpus_here() >= ranks else "cpu"
    dist.initialize(device, rendezvous=launch.settled_rendezvous)  # also where this machine's name does not resolve
    demo()
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = parser_of_all()
    if len(sys.argv) == 1:
        return parser.print_help()
    try:
        launch.started()
        demo = DEMOS.get(sys.argv[1])
        if demo in OF_A_LAYOUT:
            parser = Parser(prog=f"python -m lessons {sys.argv[1]}", description=demo.__doc__, add_help=False)
            return demo(*settings_of(parser, OF_A_LAYOUT[demo].split() + sys.argv[2:]))
        flags = vars(parser.parse_args())
        demo = flags.pop("demo")
        if demo is links.demo_links:
            links.check(**flags)
        if demo not in ON_RANKS:
            return demo(**flags)
    except BadInput as problem:
        refuse(parser.prog, problem)
    run_on_ranks(demo, **flags)
