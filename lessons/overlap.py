"""What computation can hide: the playbook's four ratios, with bytes, beside the playbook's own.

    python -m lessons overlap --model gpt2-xl --ranks 8 --machine h200

Ultra-Scale Playbook, "the math for compute/communication overlap".
"""

import math

import torch

from model import PRESETS
from theory.speed import call_seconds, MACHINES, matrices, overlaps, ring_hides


def ratios(config, tokens, n, rates):
    """{strategy: (inside a node, between nodes)}: traffic's seconds over those of the products that can hide it."""
    return {name: tuple(sent / link / (flops / rates.matmul) for link in (rates.link, rates.network))
            for name, (sent, flops) in overlaps(config, tokens, n).items()}


def hidden_from(tokens, ratio, of_more):
    """Solve ratio <= 1 for tokens: from how many on traffic hides. ratio: with `tokens`; of_more: with more of them. A
    ratio that more tokens lower is a constant over tokens; another one does not depend on them."""
    if math.isclose(ratio, of_more):
        return "any" if ratio <= 1 else "never"
    return f"{math.ceil(ratio * tokens):,}"


FOR_AND_AGAINST = """
        keeps               sends                              for                       against
dp      all                 gradients, once a step             any model                 one GPU must hold it
ZeRO-3  K/N                 16-bit weights twice, gradients    large models              in each micro-batch
tp      K/N, less of T C    in every layer, and waits          wide models, no bubble    fast links: a node's 8 GPUs
pp      L/N layers          BTC between two ranks              deep models, slow links   idles (p-1)/(m+p-1); much code
"""


def demo_overlap(model="gpt2-xl", ranks=8, tokens=8192, machine="h200"):
    """Traffic's seconds over those of the products that can hide it, and with how many tokens they do.

    --tokens: on each rank.
    """
    config, rates, n = PRESETS[model], MACHINES[machine], ranks
    k, c, layers = config.parameters(), config.n_embd, config.n_layer
    per_byte = rates.matmul / rates.link
    printed = {"dp": k / (2 * tokens) * (n - 1) / n, "ZeRO-3, forward": (n - 1) / n / (2 * tokens),
               "tp": (n - 1) / (2 * c), "pp": n / (32 * c * layers)}
    some, more = (ratios(config, t, n, rates) for t in (tokens, 4 * tokens))
    print(f"{model}, {n} ranks, {tokens:,} tokens on each, 16-bit weights, float32 gradients. {rates.name}: F = "
          f"{rates.matmul / 1e12:.0f} TFLOP/s of products,\nW = {rates.link / 1e9:.0f} GB/s in a node, "
          f"{rates.network / 1e9:.0f} between nodes (an estimate).\nBytes and FLOPs are a block's, for pp a stage's. "
          f"A ratio is the traffic's time over the products' time. Up to 1\nthe products can hide the traffic.\n\n"
          f"{'':38}{f'{tokens:,} tokens':>21}{f'{4 * tokens:,} tokens':>21}{'<= 1 from tokens':>21}"
          f"{'as printed in':>15}\n"
          f"{'':20}{'MB sent':>9}{'GFLOPs':>9}" + 3 * f"{'in a node':>11}{'between':>10}" + f"{'the playbook':>15}")
    for name, (sent, flops) in overlaps(config, tokens, n).items():
        cells = [f"{ratio:.3f}" for ratio in (*some[name], *more[name])]
        cells += [hidden_from(tokens, *pair) for pair in zip(some[name], more[name])]
        said = f"{printed[name] * per_byte:15.3g}" if name in printed else ""
        print(f"{name:20}{sent / 1e6:9,.1f}{flops / 1e9:9,.0f}"
              + "".join(f"{here:>11}{there:>10}" for here, there in zip(cells[::2], cells[1::2])) + said)
    print(FOR_AND_AGAINST)
    near, far = (max(ring_hides(rates.attention_with(8192), link, torch.bfloat16))
                 for link in (rates.link, rates.network))
    received, block = overlaps(config, tokens, n)["pp"][0], sum(matrices(config))
    ring, levels = (1e3 * call_seconds("all_reduce", k, 4, rates, 2 * rates.node, here) for here in (1, rates.node))
    print(f"two nodes of {rates.node}: all gradients in one ring, which leaves each node by one card, "
          f"{ring:,.0f} ms; in two "
          f"levels {levels:,.0f} ms\n"
          f"cp, ring: hidden from {near:,.0f} tokens of a rank on, between nodes {far:,.0f} (`ring_hides`)\n\n"
          "The playbook's bandwidth counts elements, and K stays in its data-parallel ratio, where it cancels.\n"
          "tp: in forward the next product waits for a sum. Backward's sums can hide under dW; in fast/ they do.\n"
          f"dp: a bucket of 25 MB takes {25e9 * 2 * (n - 1) / n / rates.link:.2f} ms in a node (2(N-1)/N bucket / W), "
          f"a block's backward {1e3 * 4 * block * tokens / rates.matmul:.2f} (4 tokens K / F).\n"
          f"pp's row is BTC: what a stage waits for in forward, {received / 1e6:.1f} MB. A stage sends BTC forward and "
          f"BTC backward, 2 BTC a\nmicro-batch, {2 * received / 1e6:.1f} MB (docs/words.md), and receives as much. The "
          f"playbook adds both up: 4 BTC, {4 * received / 1e6:.1f} MB.")
