"""Shared experts: what if every token needs the same thing?

Where a router chooses all of a token's experts, each of these learns what all tokens need. Shared experts see every
token, and the others are free to differ. DeepSeek's models have one or two.

    python train.py --plain --experts 4 --shared-experts 1
"""

from dataclasses import replace
from functools import partial

import kernels
from further.experts import MixtureOfExperts
from model import MLP
from parallel import ColumnParallelLinear, RowParallelLinear

# S experts that each token meets are one MLP, S times as wide, whose output is added to the routed sum. No router
# weighs it. So to parallelism it is an MLP like any other: all ranks of dp and ep keep it, and average its gradient; tp
# cuts it by columns and rows, with an f and a g of its own. A block then sends 6 all-reduces of BTC in place of 4. (One
# f and one g around both sums would do. Apart, the shared experts can be computed while tokens travel, as others do.)
# Dai et al., "DeepSeekMoE" (2024), section 3.2.

class SharedMixture(MixtureOfExperts):
    def __init__(self, config):
        super().__init__(config)
        self.shared = MLP(replace(config, inner=config.shared_experts * config.hidden))

    def forward(self, x):                                                                     # (B, T, C)
        return super().forward(x) + self.shared(x)


def shared_plan(config, f, g, columns=ColumnParallelLinear):
    """How tensor parallelism cuts them, as parallel.gpt2_plan says it of the other layers."""
    return {
        "mlp.shared.c_fc": partial(columns, f=f, fused=(1,) * (config.up_width // config.hidden)),  # 2 of a gated MLP
        "mlp.shared.c_proj": partial(kernels.table[RowParallelLinear], g=g),
    }
