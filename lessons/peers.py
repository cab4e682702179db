"""The same strategies of PyTorch's own parts, so that our times can be judged."""

import contextlib

import torch
import torch.distributed as torch_dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn.functional import all_to_all_single

import collectives as dist
import model
import parallel
import train
from further import experts
from further.experts import count_of_each, routers, split_experts
from lessons.measure import patched, plain_rows
from model import GPT, materialize, shapes
from theory.clock import split_pieces


def random_source(config, device):
    """A function from names to weights, drawn on the device: for GPT-2 XL a CPU needs longer than the benchmark."""
    sizes = {"lm_head.weight": shapes(config)["wte.weight"], **shapes(config)}
    return lambda name: (torch.zeros(config.experts, device=device) if name.endswith("router.bias") else
                         torch.ones(sizes[name], device=device) if len(sizes[name]) == 1 else
                         torch.randn(sizes[name], device=device).mul_(0.02))


# The peers: the same strategies of PyTorch's own parts, so that our times can be judged. Each is a builder(config, s,
# device, x, y) -> (step, its name). x, y: the micro-batches that ours trains on.

def plain_model(config, device, dtype=torch.float32, pieces=None):
    """A GPT of the reference's classes, each block compiled where there is a GPU: a CPU wants a C++ compiler for it."""
    with patched(plain_rows(model) + plain_rows(experts)):
        net = GPT(config, seed=None, pieces=pieces)
    materialize(net, random_source(config, device), device, dtype)
    # All blocks share compiled code, and each kind of input needs its own. An error, should there be too many: PyTorch
    # would go on without compiling.
    torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = 64, True
    for block in net.h.values() if device.type == "cuda" else ():
        block.forward = torch.compile(block.forward)
    return net


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(kinds, device, lr=1e-4):
    return torch.optim.AdamW([{"params": kind} for kind in kinds], lr=lr, fused=True)


def torch_step(model, s, device, x, y, loss=None, optimizer=None, kinds=None, clip=None, precision=None):
    """A function that runs one training step. kinds: lists of parameters, each clipped by its own norm; left out, one
    list of all. precision: the context of forward and backward; left out, autocast."""
    kinds = kinds or [list(model.parameters())]
    clip = clip or (lambda: [torch.nn.utils.clip_grad_norm_(kind, 1.0) for kind in kinds])
    optimizer = optimizer or adamw(kinds, device)
    loss = loss or (lambda tokens, targets: token_loss(model(tokens).float(), targets))
    precision = precision or (lambda: torch.autocast(device.type, train.DTYPES[s.dtype], enabled=s.dtype == "bf16"))

    def step():
        total = 0.0
        optimizer.zero_grad()
        for i, (tokens, targets) in enumerate(zip(x, y)):
            last = i == len(x) - 1 or not hasattr(model, "no_sync")
            with contextlib.nullcontext() if last else model.no_sync(), precision():
                part = loss(tokens, targets) / len(x)
                part.backward()
            total += part.detach()
        clip()
        optimizer.step()
        return total
    return step


def torch_compiled(config, s, device, x, y):
    """torch.compile of model and loss, on one GPU. Weights and loss in float32, layers under autocast."""
    model = plain_model(config, device)
    loss = torch.compile(lambda tokens, targets: token_loss(model(tokens), targets))
    return torch_step(model, s, device, x, y, loss), "model"


def world_mesh(device):
    """PyTorch's mesh of all ranks. It has the world's group, which stays, because DTensor's caches (of torch 2.11 at
    least) take equal meshes for the same, and would use the group of an earlier one that `forget` has destroyed."""
    return DeviceMesh.from_group(torch_dist.group.WORLD, device.type)


def torch_ddp(config, s, device, x, y):
    """DistributedDataParallel, with ZeroRedundancyOptimizer for ZeRO-1. Weights in float32, layers under autocast."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    model = torch.nn.parallel.DistributedDataParallel(plain_model(config, device), gradient_as_bucket_view=True)
    if not s.zero:
        return torch_step(model, s, device, x, y), "DDP"
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return torch_step(model, s, device, x, y, optimizer=optimizer), "ZeroRedundancyOptimizer"


def torch_fsdp(config, s, device, x, y):
    """fully_shard. For ZeRO-2 weights stay whole after forward (no second all-gather), which comes nearest to it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    model, kept = plain_model(config, device), s.zero == 2
    within = s.zero_within
    mesh = init_device_mesh(device.type, (s.dp // within, within)) if within else world_mesh(device)
    options = {"mesh": mesh, "reshard_after_forward": not kept,
               "mp_policy": MixedPrecisionPolicy(train.DTYPES[s.dtype], torch.float32)}
    for block in model.h.values():
        fully_shard(block, **options)
    fully_shard(model, **options)
    title = "fully_shard" + ", kept" * kept + f", within {s.zero_within}" * bool(s.zero_within)
    return torch_step(model, s, device, x, y, precision=contextlib.nullcontext), title


def torch_tp(config, s, device, x, y):
    """DTensor, with --sp sequence parallel. Weights are in the compute dtype without float32 masters, so it does less
    work than ours. It cuts c_attn into N contiguous parts, not by heads, so its results differ, but not its work."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module)
    net, tokens = plain_model(config, device, train.DTYPES[s.dtype]), Shard(1) if s.sp else Replicate()
    plan = {"wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
            "h.*.attn.c_attn": ColwiseParallel(), "h.*.attn.c_proj": RowwiseParallel(output_layouts=tokens),
            "h.*.mlp.c_fc": ColwiseParallel(), "h.*.mlp.c_proj": RowwiseParallel(output_layouts=tokens),
            "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False)}
    if s.sp:
        plan |= dict.fromkeys(("h.*.ln_1", "h.*.ln_2", "ln_f"), SequenceParallel(use_local_output=True))
        whole = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate())
        plan |= dict.fromkeys(("h.*.attn", "h.*.mlp"), whole)
        positions = net.positions
        net.positions = lambda every: positions(every).chunk(s.tp)[dist.get_rank()]
    parallelize_module(net, world_mesh(device), plan)
    if config.tied:
        net.lm_head.weight = net.wte.weight
    kinds = [[p for p in net.parameters() if isinstance(p, DTensor) == cut] for cut in (True, False)]
    return torch_step(net, s, device, x, y, lambda tokens, targets: token_loss(net(tokens), targets), kinds=kinds,
                      precision=loss_parallel), "DTensor" + ", sp" * s.sp


def torch_pipeline(config, s, device, x, y):
    """torch.distributed.pipelining. It does less work than ours: 16-bit weights have no masters, tied weights are not
    kept equal, and each rank clips by its own norm."""
    from torch.distributed.pipelining import PipelineStage, schedules
    name = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-h1": "InterleavedZeroBubble"}[
        s.schedule]
    rank, cuts = dist.get_rank(), split_pieces(config, s.pp * s.virtual_stages)
    modules = {i: plain_model(config, device, train.DTYPES[s.dtype], cuts[i]) for i in range(rank, len(cuts), s.pp)}
    stages = [PipelineStage(module, i, len(cuts), device) for i, module in modules.items()]
    runner = getattr(schedules, "Schedule" + name)(
        stages if "Interleaved" in name else stages[0], len(x),
        loss_fn=lambda logits, targets: token_loss(logits.float(), targets))
    params = [p for module in modules.values() for p in module.parameters()]
    optimizer, given = adamw([params], device), [torch.cat(x)] if rank == 0 else []
    wanted = {"target": torch.cat(y), "losses": []} if rank == s.pp - 1 else {}

    def step():
        optimizer.zero_grad()
        runner.step(*given, **wanted)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
    return step, name


class TorchExperts(torch.nn.Module):
    """model.Experts in PyTorch's operations, with all of its parameters or, in a group, this rank's."""

    def __init__(self, experts, group):
        super().__init__()
        self.experts, self.group, self.ranks = experts.count, group, dist.get_world_size(group) if group else 1
        for name, param in experts.named_parameters():
            mine = param.detach().chunk(self.ranks)[dist.get_rank(group) if group else 0].clone()
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(mine))

    def forward(self, x, chosen, gates):                                                  # (B, T, C), 2 x (B, T, k)
        device, k, slots = x.device.type, chosen.shape[-1], chosen.flatten()
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        order = slots.argsort(stable=True)
        rows, counts = x.flatten(0, 1).to(dtype)[order // k], count_of_each(chosen, self.experts)
        y = self.travel(rows, counts) if self.group else self.mlps(rows, counts)
        y = torch.empty_like(y).index_copy(0, order, y).view(*chosen.shape, -1)           # (B, T, k, C)
        return (y * gates.unsqueeze(-1).to(dtype)).sum(-2)

    def exchange(self, rows, sends, receives):
        arrived = rows.new_empty(sum(receives), rows.shape[1])
        return all_to_all_single(arrived, rows.contiguous(), receives, sends, self.group)

    def travel(self, rows, counts):
        torch_dist.all_to_all_single(coming := torch.empty_like(counts), counts, group=self.group)
        sends, receives = torch.stack([counts, coming]).view(2, self.ranks, -1).sum(2).tolist()
        rows = self.exchange(rows, sends, receives)
        here = torch.arange(self.experts // self.ranks, device=rows.device).repeat(self.ranks)
        order = here.repeat_interleave(coming, output_size=len(rows)).argsort(stable=True)
        y = self.mlps(rows[order], coming.view(self.ranks, -1).sum(0))
        return self.exchange(torch.empty_like(y).index_copy(0, order, y), receives, sends)

    def mlps(self, rows, counts):
        group = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))
        hot = F.one_hot(group, len(counts)).to(rows.dtype)  # a product with it adds biases, and sums their gradients
        inner = torch_grouped(rows, self.c_fc_weight.to(rows.dtype), counts)
        inner = self.activate(inner, hot, self.c_fc_bias.to(rows.dtype))
        return torch_grouped(inner, self.c_proj_weight.to(rows.dtype), counts) + hot @ self.c_proj_bias.to(rows.dtype)

    @staticmethod
    def activate(inner, hot, bias):
        return F.gelu(inner + hot @ bias, approximate="tanh")


def has_grouped(device, dtype):
    """Whether PyTorch has a grouped product for this device and dtype."""
    return device.type == "cuda" and dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm")


def torch_grouped(rows, weight, counts):
    """x W_e^T of rows (n, in) that are sorted by expert e, weight (E, out, in): PyTorch's grouped product where it has
    one, else a loop that waits for the counts."""
    if has_grouped(rows.device, rows.dtype):
        return torch._grouped_mm(rows, weight.transpose(1, 2), counts.cumsum(0).int())
    return torch.cat([F.linear(some, weight[e]) for e, some in enumerate(rows.split(counts.tolist()))])


def torch_experts(config, s, device, x, y):
    """The same model and router of PyTorch's parts: torch._grouped_mm, all_to_all_single, and DDP for all parameters
    but the experts that ranks share out. All but the experts is compiled. The dense twin is DDP of compiled blocks.
    Weights, router and loss are in float32, other layers under autocast. Rows travel in 16 bits under autocast."""
    ep, copies = split_experts(parallel.make_mesh(device.type, dp=s.dp), s.ep)
    compiled = torch.compile if device.type == "cuda" else lambda function: function  # needs C++ on a CPU
    model, whole = plain_model(config, device), torch.autocast(device.type, enabled=False)
    router_of = routers(model)
    for i, block in model.h.items():
        if int(i) in router_of:  # compiled apart from the block, which calls them
            experts, router = TorchExperts(block.mlp.experts, ep), block.mlp.router
            block.mlp.experts, experts.activate = experts, compiled(experts.activate)
            router.choose = whole(compiled(router.choose))
            block.mlp.forward = torch.compiler.disable(block.mlp.forward)  # its sizes depend on the router
    named = dict(model.named_parameters())
    apart = [name for name in named if ".experts." in name] if s.ep > 1 else []
    kinds = [[p for name, p in named.items() if (name in apart) == kind] for kind in (False, True)]
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [*apart, *dict(model.named_buffers())])
    ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def clip():
        for param in kinds[1]:  # its gradient is a sum over the ranks of ep, each with a mean loss of its own
            torch_dist.all_reduce(param.grad, group=copies)
            param.grad /= s.dp
        norms = [torch.nn.utils.get_total_norm([p.grad for p in some]) for some in kinds if some]
        squares = torch.stack(norms).square()
        if apart:
            torch_dist.all_reduce(squares[1:], group=ep)
        torch.nn.utils.clip_grads_with_norm_(named.values(), 1.0, squares.sum().sqrt())
        if router_of:  # their biases are no parameters, so they may move before the optimizer does
            torch_dist.all_reduce(loads := torch.stack([router.load for router in router_of.values()]))
            for router, load in zip(router_of.values(), loads):
                router.balance(load, s.balance_rate)
                router.load = 0

    product = "grouped_mm, " if has_grouped(device, train.DTYPES[s.dtype]) else "a loop of products, "
    title = product * bool(router_of) + "DDP"
    optimizer = adamw([named.values()], device, train.learning_rate(s, 0))
    return torch_step(ddp, s, device, x, y, optimizer=optimizer, clip=clip), title


PEERS = {"one": torch_compiled, "ddp": torch_ddp, "zero1": torch_ddp, "zero2": torch_fsdp, "zero3": torch_fsdp,
         "hsdp": torch_fsdp, "tp": torch_tp, "tp+sp": torch_tp, **dict.fromkeys(parallel.SCHEDULES, torch_pipeline),
         "experts": torch_experts, "dense twin": torch_experts}
