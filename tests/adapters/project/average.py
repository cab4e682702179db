"""A project whose tests `python -m lessons mutate` looks at."""

import torch.distributed as dist


def average(t):
    dist.all_reduce(t)
    t /= dist.get_world_size()
