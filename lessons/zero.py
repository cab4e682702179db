"""Data parallelism and ZeRO 0 to 3 side by side: a small GPT on several ranks beside one process, and GPT-2 XL's bytes.

    python -m lessons zero --ranks 2
    python -m lessons zero --model gpt2 --dp 4

All ranks are threads of one process (further/together.py).
"""

from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

import collectives as dist
import train
from further import together
from lessons.bench.peers import token_loss
from model import GPT, GPTConfig, PRESETS
from parallel import average_gradients, into_pieces, one_f_one_b, with_weights
from safe.flags import Settings
from safe.reports import storages
from theory.memory import activation_bytes, memory_bytes

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # its momentum is an optimizer's state
STEPS = 3
M = 2  # micro-batches of a step


# ------------------------------------------------------------------------------------------------------- a GPT on ranks

class Found(NamedTuple):
    """Of a strategy on one rank: losses (STEPS); bytes kept between steps, weights, masters and momentum; bytes of
    gradients at most, and when the last backward has ended; what was sent, {collective: its log}."""
    losses: torch.Tensor
    kept: int
    most: int
    at_the_end: int
    traffic: dict


def config_on(ranks):
    return GPTConfig(vocab_size=64, seq_len=32, n_layer=8, n_head=ranks, n_embd=16 * ranks, tied=False)


def tokens_of(config, step, ranks):
    """Inputs and targets of all ranks, 4 sequences each, (2, 4 N, T)."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(config.vocab_size, (2, 4 * ranks, config.seq_len), generator=generator)


def own_tokens(config, step):
    """This rank's micro-batches: inputs, targets."""
    ranks = dist.get_world_size()
    return [t.chunk(M) for t in tokens_of(config, step, ranks).chunk(ranks, 1)[dist.get_rank()]]


def losses_of(net, optimizer, batches, after_backward=lambda: None):
    """Steps of a module, whose batches are lists of micro-batches (x, y). Returns the losses (STEPS)."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        parts = [token_loss(net(x), y) / len(batch) for x, y in batch]
        for part in parts:
            part.backward()
        after_backward()
        optimizer.step()
        losses.append(sum(parts).detach())
    return torch.stack(losses)


def in_one_process(config, ranks):
    """Losses of whole batches."""
    net = GPT(config).double()
    return losses_of(net, SGD(net.parameters()), [[tokens_of(config, step, ranks)] for step in range(STEPS)])


def bytes_of(tensors):
    """Of their memory; views share one, and what was freed has none."""
    return sum(storages([t for t in tensors if t is not None]).values())


def kept(params, optimizer):
    return bytes_of([*params, *[value for state in optimizer.state.values() for value in state.values()]])


def averaged(config):
    """average_gradients on this rank, behind backward."""
    net = GPT(config).double()
    params = [*net.parameters()]
    optimizer = SGD(params)
    held = []

    def after_backward():
        held.append(bytes_of([param.grad for param in params]))
        average_gradients(net)

    dist.reset_traffic()
    batches = [[*zip(*own_tokens(config, step))] for step in range(STEPS)]
    losses = losses_of(net, optimizer, batches, after_backward)
    return Found(losses, kept(params, optimizer), max(held), held[-1], dist.traffic())


def gradient_bytes(net):
    """Of gradients on this rank: those of layers, those on their way, averages that have come."""
    units = net.units
    sending = sum(unit.weights.numel() * unit.mine.itemsize for unit in units if unit.sending)
    return sending + bytes_of([*(param.grad for param in net.unit_of), *(unit.total for unit in units)])


def sharded(zero, config):
    """A stage of ZeRO on this rank, as a list."""
    layout = train.Layout(dp=dist.get_world_size(), zero=zero, dtype=torch.float64)
    net = train.parallelize(config, layout, "cpu", optimizer=SGD)
    held = []

    @contextmanager
    def look(action):
        yield
        held.append(gradient_bytes(net))

    net.pipeline.around = look
    dist.reset_traffic()
    losses = []
    for step in range(STEPS):
        net.zero_grad()
        losses.append(net.forward_backward(*own_tokens(config, step)))
        net.step()
    return Found(torch.stack(losses), kept([*net.unit_of, *net.params], net.optimizer), max(held), held[-1],
                 dist.traffic())


STRATEGIES = {  # name: (what a rank runs, elements that a step sends by the table over `with_weights`, in K (N-1)/N)
    "average_gradients": (averaged, 2),
    "ZeRO-0": (partial(sharded, 0), 2),
    "ZeRO-1": (partial(sharded, 1), 2),
    "ZeRO-2": (partial(sharded, 2), M + 1),
    "ZeRO-3": (partial(sharded, 3), 3 * M)}


def side_by_side(ranks):
    config = config_on(ranks)
    K = config.parameters()
    right = in_one_process(config, ranks)
    print(f"{ranks} ranks, float64, a GPT of K = {K:,} parameters in {len([*GPT(config).parameters()])} tensors and "
          f"{config.n_layer + 2} pieces.\n{STEPS} steps of {M} micro-batches; KiB kept: weights and momentum between "
          f"steps; gradients: KiB at most, and when the\nlast backward has ended; error: of the losses, against one "
          f"process.\n\n{'':19}{'messages':>9}{'bytes sent':>12}{'by the table':>14}{'KiB kept':>10}"
          f"{'gradients':>11}{'at the end':>12}{'error':>8}")
    for name, (run, shares) in STRATEGIES.items():
        found = together.run(ranks, partial(run, config), together.World(worker="eager"))
        loss = torch.stack([one.losses for one in found]).mean(0)
        messages, nbytes = (sum(getattr(log, what) for log in found[0].traffic.values())
                            for what in ("messages", "bytes"))
        table = STEPS * shares * (ranks - 1) * K * 8 // ranks
        print(f"{name:19}{messages:9}{nbytes:12,}{table:14,}{found[0].kept / 1024:10.0f}{found[0].most / 1024:11.0f}"
              f"{found[0].at_the_end / 1024:12.0f}{(loss - right).abs().max():8.0e}")
    print("\nA tensor at a time takes more messages than a piece at a time. Besides gradients and weights a step sends "
          "three\nnumbers: targets, micro-batches, their square. ZeRO-3 sends less than the table: an embedding's "
          "backward needs no\nweights, and the last piece keeps its weights from forward to backward.\n\n"
          "The list of a step of one micro-batch, of a GPT of two blocks: pieces 0 to 3. G gathers, D drops,\n"
          "A averages, and nobody waits for an A until the end:\n")
    [chain] = one_f_one_b(1, 1)
    for zero in range(4):
        actions = with_weights(into_pieces(chain, {0: range(4)}), zero, lookups=(0,))
        print(f"ZeRO-{zero}  " + " ".join(f"{action.kind}{action.stage}" for action in actions))


# -------------------------------------------------------------------------------------------------- a large GPT's bytes

def zero_table(model, dp):
    """Bytes that a GPU keeps, and sends, at each stage."""
    config = PRESETS[model]
    print(f"\n{model}, {config.parameters():,} parameters, dp {dp}, bf16, AdamW, a sequence a GPU: GiB a GPU\n\n"
          f"{'stage':8}{'parameters':>12}{'gradients':>12}{'optimizer':>12}{'together':>10}{'activations':>13}"
          f"{'sent':>8}   sharded over dp")
    for zero, what in enumerate(("nothing", "optimizer", "optimizer, gradients", "optimizer, gradients, parameters")):
        s = Settings(dp=dp, zero=zero, dtype="bf16", batch_size=dp, fast="off")
        kept = memory_bytes(config, s)
        if zero == 1:  # of several micro-batches: until the last backward gradients add up, whole
            kept["gradients"] = 4 * config.parameters()
        *sizes, activations = (kept[kind] / 2**30 for kind in ("parameters", "gradients", "optimizer", "activations"))
        sent = SENT[zero] * config.parameters() * (dp - 1) / dp / 2**30
        print(f"ZeRO-{zero}  {''.join(f'{n:12.2f}' for n in sizes)}{sum(sizes):10.2f}{activations:13.2f}{sent:8.2f}   "
              f"{what}")
    print("\nGradients: while micro-batches add up. Sent: in a step of one micro-batch. With m of them ZeRO-2 sends\n"
          "gradients m times, ZeRO-3 weights, too. ZeRO changes no activations.\n"
          "ZeRO-0 all-reduces gradients, in two halves of 4 bytes a parameter. ZeRO-1 sends one such half, and in\n"
          "place of the other it gathers weights, 2 bytes a parameter. ZeRO-3 gathers them twice.\n\n"
          "Gradients are float32. With 16-bit weights the optimizer keeps 12 bytes a parameter: two moments and a\n"
          "float32 master. At stage 3 the master's shard, part of the optimizer here, is all that is kept of a\n"
          "parameter: 16-bit weights exist only while their piece computes.")


SENT = 8, 6, 6, 8  # bytes a parameter that a rank sends of (N-1)/N of them: halves of 4 bytes, gathers of 2


def activation_table():
    """Activations of a block: the lecture's, and ours. The lecture's block keeps 34 + 5 heads T/C bytes for each of BTC
    elements, ours 32: model.py has no dropout, whose masks take 2, and flash attention keeps statistics instead of the
    T x T scores."""
    print("\nactivations that a block of GPT-3 keeps, in bytes / BTC:  the lecture | here")
    gpt3, t = GPTConfig(50257, 2048, 96, 96, 12288), 8
    scores = 5 * gpt3.n_head * gpt3.seq_len / gpt3.n_embd
    for name, lecture, flags in (
            ("one GPU", 34 + scores, {}), ("--tp 8", 10 + (24 + scores) / t, {"tp": t}),
            ("--tp 8 --sp", (34 + scores) / t, {"tp": t, "sp": True}),
            ("--recompute block", 2, {"recompute": "block"})):
        kept = activation_bytes(gpt3, Settings(dp=1, batch_size=1, dtype="bf16", **flags), [range(1, 2)])
        print(f"  {name:36}{lecture:6.2f} | {kept / gpt3.seq_len / gpt3.n_embd:.2f}")
    print("Here there is no dropout, and no T x T scores are kept.")


def demo_zero(ranks=2, model="gpt2-xl", dp=8):
    """Data parallelism and ZeRO 0 to 3: messages, bytes sent and kept, the list of a step, GPT-2 XL's bytes."""
    side_by_side(ranks)
    zero_table(model, dp)
    activation_table()
