"""What computation can hide: the playbook's four ratios, with bytes, beside the playbook's own and what was measured.

    python -m lessons overlap --model gpt2-xl --ranks 8 --machine h200

Ultra-Scale Playbook, "the math for compute/communication overlap".
"""

import torch

from model import PRESETS
from theory.speed import MACHINES, overlaps, ring_hides


def demo_overlap(model, ranks, tokens, machine):
    """Traffic's seconds over those of the products that can hide it, for each strategy."""
    config, rates, n = PRESETS[model], MACHINES[machine], ranks
    k, c, layers = config.parameters(), config.n_embd, config.n_layer
    per_byte = rates.matmul / rates.link
    printed = {"dp": k / (2 * tokens) * (n - 1) / n, "ZeRO-3, forward": (n - 1) / n / (2 * tokens),
               "tp": (n - 1) / (2 * c), "pp": n / (32 * c * layers)}
    print(f"{model}, {n} ranks, {tokens:,} tokens on each, 16-bit weights, float32 gradients. {rates.name}: F = "
          f"{rates.matmul / 1e12:.0f} TFLOP/s of products,\nW = {rates.link / 1e9:.0f} GB/s in a node, "
          f"{rates.network / 1e9:.0f} between nodes (an estimate).\nBytes and FLOPs of a block, of pp a stage: "
          f"traffic's time over the products', which can hide it up to 1.\n\n"
          f"{'':20}{'MB sent':>10}{'GFLOPs':>10}{'in a node':>12}{'between':>10}{'as printed in the playbook':>30}")
    for name, (sent, flops) in overlaps(config, tokens, n).items():
        here, there = (sent / link / (flops / rates.matmul) for link in (rates.link, rates.network))
        said = f"{printed[name] * per_byte:30.3g}" if name in printed else ""
        print(f"{name:20}{sent / 1e6:10,.1f}{flops / 1e9:10,.0f}{here:12.3f}{there:10.3f}{said}")
    near, far = (max(ring_hides(rates.attention_with(8192), link, torch.bfloat16))
                 for link in (rates.link, rates.network))
    print(f"cp, ring: hidden from {near:,.0f} tokens of a rank on, between nodes {far:,.0f} (`ring_hides`)\n\n"
          "The playbook's bandwidth counts elements, and K stays in its data-parallel ratio, where it cancels.\n"
          "Where --tp's all-reduces could hide, nothing here hides them: the next product waits for them.\n\n"
          "measured on H200s (docs/results.md, docs/tried.md):")
    sent, _ = overlaps(PRESETS["gpt2-xl"], 8192, 4)["dp"]
    seconds = sent * PRESETS["gpt2-xl"].n_layer / MACHINES["h200"].link
    print(f"  XL, DDP, 8 sequences each: one GPU 171 ms a step, four 177. Of {1e3 * seconds:.0f} ms of traffic 6 "
          "show.\n"
          "  --tp 2, 12 blocks of width 4096: 58.1 ms; in pieces, so that sums hide under products, 57.9.")
