"""A model and its batches, for several adapters."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def build():
    return nn.Sequential(Block(), Block(), nn.Linear(8, 6))


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(12, 4, 8, generator=draw), torch.randint(6, (12, 4), generator=draw)


def loss(out, y):
    return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())
