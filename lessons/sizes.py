"""Parameters, FLOPs and training bytes of every preset."""

from model import PRESETS


def main():
    print(f"{'preset':12} {'layers':>6} {'heads':>5} {'width':>5} {'vocab':>6} {'context':>7} {'parameters':>13} "
          f"{'FLOPs/token':>12} {'training MiB':>12}")
    for name, c in PRESETS.items():
        print(f"{name:12} {c.n_layer:6} {c.n_head:5} {c.n_embd:5} {c.vocab_size:6} {c.seq_len:7} {c.parameters():13,} "
              f"{c.flops_per_token():12.3g} {16 * c.parameters() / 2**20:12,.0f}")
    print("\nFLOPs/token: 6 (K - T C) + 12 L C T, forward and backward. Training: float32 weights 4 bytes a parameter, "
          "gradients 4,\nAdamW 8; activations come on top.")
