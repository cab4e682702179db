"""Sampling measured: prefill and decode, with the cache and without, by batch, with weights of 8 and 4 bits.

    python -m lessons sampling

The prompt runs at once (prefill): a weight that is read serves all of its tokens. Then each new token runs alone
(decode), and all weights are read for it. A batch shares them, but each sequence has its own cache. So latency, ms a
token, is bytes over the memory's rate, or launches; throughput, tokens/s, grows with the batch. Fewer bits are fewer
bytes. Fused operations are fewer launches, and a CUDA graph needs none.

How large models run on GPUs, "inference". Decode is further/sampling.py's.
"""

import copy
import statistics
import time

import torch
import torch.nn.functional as F

import kernels
from fast.recorded import RecordedGraph
from further.by_hand import gelu_reference
from further.sampling import CachedGPT
from lessons.bench.timing import launch_us, say, synchronize
from lessons.eight_bits import few_rows, floats_of, in_few_bits
from model import Linear, PRESETS
from safe.data import load_data
from safe.flags import Settings
from further.text import batch, Bytes


class FewBits(torch.nn.Module):
    """A linear layer whose weights have 8 or 4 bits. On a GPU a kernel reads these for few rows. For many rows, and on
    a CPU, floats are made of them first."""

    def __init__(self, layer, bits):
        super().__init__()
        self.bits = bits
        self.weight, self.scale = in_few_bits(layer.weight.detach(), bits)
        self.bias = layer.bias

    def forward(self, x):                                                                     # (..., in)
        rows = x.flatten(0, -2)
        if len(rows) > 16 or not kernels.on_triton(x):
            return F.linear(x, floats_of(self.weight, self.scale, self.bits).to(x.dtype), self.bias)     # (..., out)
        y = few_rows(rows, self.weight, self.scale).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def with_bits(net, bits):
    """A copy whose layers, the head too, have weights of so many bits. The embedding stays: a token reads one row."""
    net = copy.deepcopy(net)
    for owner in [*net.modules()]:
        for name, layer in owner.named_children():
            if isinstance(layer, Linear):
                setattr(owner, name, FewBits(layer, bits))
    return net


def weights_read(net):
    """Bytes of the matrices that one forward reads."""
    layers = [layer for layer in net.modules() if isinstance(layer, (Linear, FewBits))]
    return sum(layer.weight.nbytes + (layer.scale.nbytes if isinstance(layer, FewBits) else 0) for layer in layers)


def trained(config, steps, device):
    """(a CachedGPT after some steps on Python's standard library, the function of its loss on held-out text)"""
    text, held_out, _ = load_data(Settings(), Bytes())
    net = CachedGPT(config).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def loss(net, tokens, step):
        x, y = (t.to(device) for t in batch(tokens, 0, step, 16, config.seq_len, slice(None)))
        return F.cross_entropy(net(x).flatten(0, 1).float(), y.flatten())

    for step in range(steps):
        optimizer.zero_grad()
        loss(net, text, step).backward()
        optimizer.step()
    return net.requires_grad_(False), lambda net: sum(loss(net, held_out, i).item() for i in range(8)) / 8


def median_ms(call, device):
    samples = []
    for _ in range(13):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        samples.append(1e3 * (time.perf_counter() - start))
    return statistics.median(samples[3:])


def table(title, heads, rows, device):
    """rows: {name: (a call, how many tokens it runs for its sequences, what stands in the columns `heads`)}. On a GPU
    each call is also replayed from a CUDA graph."""
    cuda = device.type == "cuda"
    columns = ["ms", *["replayed"] * cuda, "tokens/s", *heads]
    say(f"\n{title:34}" + "".join(f"{column:>16}" for column in columns))
    for name, (call, tokens, *more) in rows.items():
        times = [median_ms(call, device)]
        if cuda:
            times.append(median_ms(RecordedGraph(call).replay, device))
        cells = [*(f"{ms:.3f}" for ms in times), f"{1e3 * tokens / times[-1]:,.0f}", *more]
        say(f"{name:34}" + "".join(f"{cell:>16}" for cell in cells))


def forward(net, tokens, seen):
    """A call that runs tokens (B, T) behind the first `seen` of them, whose keys and values are in its own caches."""
    net.newest_logits(tokens[:, :max(1, seen)])
    caches = net.caches

    def call():
        net.caches = caches
        for cache in caches:
            cache.seen = seen
        net.logits_after(tokens[:, seen:])
    return call


def demo_sampling(steps=60):
    """Sampling: prefill and decode, the cache, batches, weights of 8 and 4 bits; what launches cost."""
    device, config = torch.device("cuda" if torch.cuda.is_available() else "cpu"), PRESETS["tiny"]
    say(f"trains for {steps} steps ...")
    net, held_out = trained(config, steps, device)
    net = net.bfloat16() if device.type == "cuda" else net
    unfused, T, dtype = copy.deepcopy(net), config.seq_len // 2, net.wte.weight.dtype
    for block in unfused.h.values():
        block.mlp.activation = gelu_reference
    nets = {str(dtype)[6:]: net, "int8, a scale a row": with_bits(net, 8), "int4, a scale a group": with_bits(net, 4)}
    text = torch.randint(config.vocab_size, (64, T + 1), device=device)
    say(f"tiny after {steps} steps, {dtype}, {device.type}; {T} tokens, then one more")
    table("one sequence", ["a weight serves"], {
        "prefill: all tokens at once": (forward(net, text[:1, :T], 0), T, T),
        "decode: one more, with the cache": (forward(net, text[:1], T), 1, 1),
        "  GELU in 6 operations, not in 1": (forward(unfused, text[:1], T), 1, 1),
        "  without the cache": (lambda: net(text[:1]), 1, T + 1)}, device)
    say(f"(GELU: {5 * config.n_layer} launches more; one alone takes {launch_us(device):.1f} us)")
    a_token, weights = 2 * config.n_layer * config.n_embd * dtype.itemsize, weights_read(net)
    table("decode a batch of", ["weights a token", "cache a token"], {
        str(B): (forward(net, text[:B], T), B, f"{weights // B:,}", f"{(T + 1) * a_token:,}") for B in (1, 4, 16, 64)},
        device)
    say("(In bytes that are read. A sequence's cache: 2 L C numbers for each token)")
    table("decode with weights in", ["weights a token", "held-out loss"], {
        name: (forward(some, text[:1], T), 1, f"{weights_read(some):,}", f"{held_out(some):.4f}")
        for name, some in nets.items()}, device)
