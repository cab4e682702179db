"""The same strategies of PyTorch's own parts, so that our times can be judged."""

import contextlib
import zlib
from functools import partial

import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import collectives as dist
import kernels
import parallel
from lessons.bench.timing import patched, plain_kernels
from model import GPT, materialize, shapes_of_all
from theory.clock import stage_to_rank_in, stages_in


def random_source(config, device):
    """A function from names to weights, matrices near 0 and vectors near 1. They are drawn on the device, because for
    GPT-2 XL a CPU needs longer than the benchmark. A name has the same weights on every rank: routers that differ
    would send each rank's tokens elsewhere."""
    sizes = shapes_of_all(config)
    sizes = {"lm_head.weight": sizes["wte.weight"]} | sizes  # of a tied head

    def draw(name):
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        return torch.randn(sizes[name], device=device, generator=generator).mul_(0.02).add_(len(sizes[name]) == 1)

    return draw


# Each peer is a builder(config, s, device, x, y, compiled) -> (step, its name), which trains on the micro-batches x, y
# of ours.

def plain_model(config, device, compiled, dtype=torch.float32, pieces=None, recompute="none"):
    """A GPT of the reference's classes, each block compiled if asked for, and run again in backward unless "none"."""
    with patched(plain_kernels(*kernels.table)):
        net = GPT(config, seed=None, pieces=pieces)
    materialize(net, random_source(config, device), device, dtype)
    if config.arch == "llama":  # a compiler would compute cos and sin in each block
        for block in net.h.values():
            block.attn.table = partial(same, block.attn.table(torch.empty(0, device=device)))
    # All blocks share compiled code, and each kind of input needs its own. An error, should there be too many: PyTorch
    # would go on without compiling.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if compiled:
        for block in net.h.values():
            block.forward = torch.compile(block.forward)
    if recompute != "none":
        for block in net.h.values():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return net


def same(value, _):
    return value


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def token_loss_in_float32(logits, targets):
    return token_loss(logits.float(), targets)


ADAMW = {"lr": 1e-4, "fused": True}


def torch_step(model, s, device, x, y, loss=None, optimizer=None, precision=None):
    """A function that runs one training step. precision: the context of forward and backward; left out, autocast."""
    kinds = {}  # DTensors and others are clipped apart, each by their own norm
    for param in model.parameters():
        kinds.setdefault(type(param), []).append(param)
    optimizer = optimizer or torch.optim.AdamW([{"params": kind} for kind in kinds.values()], **ADAMW)
    loss = loss or (lambda tokens, targets: token_loss_in_float32(model(tokens), targets))
    precision = precision or partial(torch.autocast, device.type, parallel.PRECISIONS[s.dtype], s.dtype != "fp32")

    def step():
        optimizer.zero_grad()
        for i, (tokens, targets) in enumerate(zip(x, y)):
            last = i == len(x) - 1 or not hasattr(model, "no_sync")
            with contextlib.nullcontext() if last else model.no_sync(), precision():
                (loss(tokens, targets) / len(x)).backward()
        for kind in kinds.values():
            torch.nn.utils.clip_grad_norm_(kind, 1.0)
        optimizer.step()
    return step


def torch_compiled(config, s, device, x, y, compiled):
    """torch.compile of model and loss, on one GPU. Weights and loss in float32, layers under autocast."""
    model = plain_model(config, device, compiled, recompute=s.recompute)
    loss = torch.compile(lambda tokens, targets: token_loss(model(tokens), targets))
    return torch_step(model, s, device, x, y, loss), "model"


def world_mesh(device):
    """PyTorch's mesh of all ranks. It has the world's group, which stays, because DTensor's caches (of torch 2.11 at
    least) take equal meshes for the same, and would use the group of an earlier one, which `free_memory` destroys."""
    return DeviceMesh.from_group(torch_dist.group.WORLD, device.type)


def torch_ddp(config, s, device, x, y, compiled):
    """DistributedDataParallel, with ZeroRedundancyOptimizer for ZeRO-1. Weights in float32, layers under autocast."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = plain_model(config, device, compiled, recompute=s.recompute)
    model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if not s.zero:
        return torch_step(model, s, device, x, y), "DDP"
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    return torch_step(model, s, device, x, y, optimizer=optimizer), "ZeroRedundancyOptimizer"


def torch_fsdp(config, s, device, x, y, compiled):
    """fully_shard. For ZeRO-2 weights stay whole after forward (no second all-gather), which comes nearest to it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    model, kept = plain_model(config, device, compiled, recompute=s.recompute), s.zero == 2
    options = {"mesh": world_mesh(device), "reshard_after_forward": not kept,
               "mp_policy": MixedPrecisionPolicy(parallel.PRECISIONS[s.dtype], torch.float32)}
    for part in (*model.h.values(), model):
        fully_shard(part, **options)
    of_logits = torch.compile(token_loss_in_float32) if compiled else token_loss_in_float32
    step = torch_step(model, s, device, x, y, lambda tokens, targets: of_logits(model(tokens), targets),
                      precision=contextlib.nullcontext)
    return step, "fully_shard" + ", kept" * kept


def torch_tp(config, s, device, x, y, compiled):
    """DTensor. Weights are in the compute dtype without float32 masters, so it does less work than ours. It cuts c_attn
    into N contiguous parts, not by heads, so its results differ, but not its work."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module)
    net = plain_model(config, device, compiled, parallel.PRECISIONS[s.dtype])
    parallelize_module(net, world_mesh(device), {
        "wte": RowwiseParallel(input_layouts=Replicate()),
        "h.*.attn.c_attn": ColwiseParallel(), "h.*.attn.c_proj": RowwiseParallel(),
        "h.*.mlp.c_fc": ColwiseParallel(), "h.*.mlp.c_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    if config.tied:
        net.lm_head.weight = net.wte.weight
    step = torch_step(net, s, device, x, y, lambda tokens, targets: token_loss(net(tokens), targets),
                      precision=loss_parallel)
    return step, "DTensor"


THEIR_SCHEDULES = {"1f1b": "1F1B", "zb-v": "ZBVZeroBubble", "zb-h1": "InterleavedZeroBubble",
                   "dualpipe-v": "DualPipeV"}


def torch_pipeline(config, s, device, x, y, compiled):
    """torch.distributed.pipelining. It does less work than ours: 16-bit weights have no masters, tied weights are not
    kept equal, and each rank clips by its own norm."""
    from torch.distributed.pipelining import PipelineStage, schedules
    name = THEIR_SCHEDULES[s.schedule]
    modules = {i: plain_model(config, device, compiled, parallel.PRECISIONS[s.dtype], pieces)
               for i, pieces in stages_in(s, config, dist.get_rank()).items()}
    group = dist.new_group()  # of its own, so that a peer that fails leaves no messages to the next one
    stages = [PipelineStage(module, i, len(stage_to_rank_in(s)), device, group=group) for i, module in modules.items()]
    runner = getattr(schedules, "Schedule" + name)(
        stages[0] if name == "1F1B" else stages, len(x),
        loss_fn=lambda logits, targets: token_loss(logits.float(), targets))
    params = [p for module in modules.values() for p in module.parameters()]
    optimizer = torch.optim.AdamW(params, **ADAMW)
    given = [torch.cat(x)] if 0 in modules else []
    wanted = {"target": torch.cat(y), "losses": []} if len(stage_to_rank_in(s)) - 1 in modules else {}

    def step():
        optimizer.zero_grad()
        try:
            runner.step(*given, **wanted)
        except Exception:
            cuda = device.type == "cuda"  # no other rank must go on waiting for this one
            (torch_dist.distributed_c10d._abort_process_group if cuda else dist.destroy_process_group)(group)
            raise
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return step, name


PEERS = {"one": torch_compiled, "ddp": torch_ddp, "zero1": torch_ddp, "zero2": torch_fsdp, "zero3": torch_fsdp,
         "tp": torch_tp, "dense twin": torch_ddp,
         **dict.fromkeys(THEIR_SCHEDULES, torch_pipeline)}
