"""PyTorch's FSDP and tensor parallelism."""

import torch.distributed as dist
from mlp import batch, build, loss  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = {"dp": 2, "tp": 2}


def parallelize(net):
    places = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in net[:2]:
        parallelize_module(block, places["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=places["dp"])
    return fully_shard(net, mesh=places["dp"])


def part(t):
    return t.chunk(2)[dist.get_rank() // 2]
