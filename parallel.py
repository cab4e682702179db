"""Parallel training, applied to a model from outside. In lecture order, each section the previous one plus one idea:

    mesh        which ranks form which group: axes (pp, dp, tp), tensor parallel innermost
    data        replicas average their gradients: naive, then in buckets while backward still runs
    tensor      every matrix cut by columns or rows; two all-reduces a sublayer pair, f and g
    norm        one gradient norm over any combination
    recipe      `parallelize` puts them together, in the only order that works

Groups are arguments, never globals; `group=None` is all ranks, as in torch.distributed. Everything in "data" works on any
nn.Module; tensor parallelism needs a table that says how each layer is cut, and ours is GPT-2's.

Letters: N ranks in the group, r this rank, K parameters, B, T, C, V as in model.py.
Read with: CS336 lecture 7-8; Ultra-Scale Playbook "data parallelism", "tensor parallelism".
"""

from collections import defaultdict
from contextlib import contextmanager

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import collectives as dist
from model import GPT, initial_weight, materialize


# -------------------------------------------------------------------------------------------------------------------- mesh

def make_mesh(device_type, dp=1, tp=1, pp=1):
    """A torch DeviceMesh with axes ("pp", "dp", "tp"); `mesh["tp"].get_group()` is this rank's tensor-parallel group.

    Ranks are counted with tp innermost: tensor-parallel peers, who talk in every layer, are neighbours and share a node.
    Call it on all ranks; pp x dp x tp must be the world size.
    """
    if pp * dp * tp != dist.get_world_size():
        raise ValueError(f"pp {pp} x dp {dp} x tp {tp} needs {pp * dp * tp} processes, there are {dist.get_world_size()}")
    return init_device_mesh(device_type, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))


# ---------------------------------------------------------------------------------------------------- data parallel: replicas
#
# Every rank holds the whole model and sees its own part of the batch. Gradients are averaged, so replicas stay equal:
# an all-reduce of K elements, 2(N-1)/N x K sent by each rank and step, however many micro-batches the step has.

def average_gradients(module, group=None):
    """The lecture's data parallelism: after backward, one all-reduce a parameter. Right, and slow twice over.

    Nothing is sent while backward runs, and every small tensor pays a full ring's latency.
    """
    for param in module.parameters():
        if param.requires_grad:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad, dist.ReduceOp.AVG, group)


class Bucket:
    """Some parameters' gradients side by side in one flat buffer, zero-padded to a multiple of N: one collective for all."""

    def __init__(self, params, ranks):
        self.params, self.missing, self.handle, self.views = params, set(params), None, None
        self.numel = -(-sum(p.numel() for p in params) // ranks) * ranks

    def fill(self):
        """Copy the gradients in and let `.grad` be views of the buffer: the originals are freed. A missing one counts as zero."""
        if self.views is None:
            self.flat = torch.zeros(self.numel, dtype=self.params[0].dtype, device=self.params[0].device)
            sizes = [p.numel() for p in self.params]
            self.views = [v.view_as(p) for v, p in zip(self.flat.split(sizes + [self.numel - sum(sizes)]), self.params)]
        new = [(view, p) for view, p in zip(self.views, self.params) if p.grad is None or p.grad.data_ptr() != view.data_ptr()]
        found = [(view, p.grad) for view, p in new if p.grad is not None]
        with torch.no_grad():
            if found:
                torch._foreach_copy_([view for view, _ in found], [grad for _, grad in found])
            for view, param in new:
                if param.grad is None:
                    view.zero_()
                param.grad = view


def make_buckets(params, megabytes, ranks):
    """Parameters in buckets of about `megabytes`, last layers first: the order in which backward finishes their gradients."""
    buckets, current, size = [], [], 0
    for param in reversed(params):
        if current and (size + param.numel() * param.element_size() > megabytes * 2**20 or
                        (param.dtype, param.device) != (current[0].dtype, current[0].device)):
            buckets.append(Bucket(current, ranks))
            current, size = [], 0
        current.append(param)
        size += param.numel() * param.element_size()
    return buckets + ([Bucket(current, ranks)] if current else [])


class DDP(nn.Module):
    """Data parallel over any module: gradients are averaged bucket by bucket while backward still computes earlier ones.

        model = DDP(module, group)                  broadcasts parameters and buffers of the group's first rank
        with model.no_sync(): loss.backward()       every micro-batch but the last: gradients only add up
        loss.backward(); model.finish_grad_sync()   now every rank's .grad is the mean over the ranks

    A bucket leaves when its last gradient has come, and never before the bucket in front of it: the order is the same on all
    ranks. Tied parameters count once, frozen ones not at all. Ranks may use different parameters: one that a rank did not use
    counts as zero there, and one that nobody used keeps .grad None as in one process; agreeing on that takes one small
    all-reduce a step, which `find_unused_parameters=False` saves where every parameter is always used.

    Li et al., "PyTorch Distributed" (2020). CS336 lecture 8, data parallelism.
    """

    def __init__(self, module, group=None, bucket_mb=25, find_unused_parameters=True):
        super().__init__()
        self.module, self.group, self.find_unused, self.syncing = module, group, find_unused_parameters, True
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.buckets = make_buckets(self.params, bucket_mb, dist.get_world_size(group))
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.params}
        self.launched = 0
        if dist.get_world_size(group) > 1:
            for tensor in [*module.parameters(), *module.buffers()]:
                dist.broadcast(tensor.detach(), group=group, group_src=0)
            for param in self.params:
                param.register_post_accumulate_grad_hook(self._gradient_ready)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self):
        """Inside, backward only adds to .grad: nothing is sent."""
        self.syncing, before = False, self.syncing
        try:
            yield
        finally:
            self.syncing = before

    def _gradient_ready(self, param):  # the hook hands over the parameter, its gradient is param.grad
        if not self.syncing:
            return
        bucket = self.bucket_of[param]
        if bucket.handle is not None:
            raise RuntimeError("a second backward before finish_grad_sync(): run all but the last one under no_sync()")
        bucket.missing.discard(param)
        while self.launched < len(self.buckets) and not self.buckets[self.launched].missing:
            self._launch()

    def _launch(self):
        bucket = self.buckets[self.launched]
        bucket.fill()
        bucket.handle = dist.all_reduce(bucket.flat, dist.ReduceOp.AVG, self.group, async_op=True)
        self.launched += 1

    def finish_grad_sync(self):
        """Send what has not left yet and wait for all of it. Call after the step's last backward, on every rank."""
        if dist.get_world_size(self.group) == 1:
            return
        unused = [p for p in self.params if p.grad is None]
        if self.find_unused:
            used = torch.tensor([p.grad is not None for p in self.params], dtype=torch.uint8, device=self.params[0].device)
        while self.launched < len(self.buckets):
            self._launch()
        if self.find_unused:
            dist.all_reduce(used, dist.ReduceOp.MAX, self.group)
        for bucket in self.buckets:
            bucket.handle.wait()
            bucket.handle, bucket.missing = None, set(bucket.params)
        self.launched = 0
        if self.find_unused and unused:
            used = dict(zip(self.params, used.tolist()))
            for param in unused:
                param.grad = param.grad if used[param] else None


# ------------------------------------------------------------------------------------------------- tensor parallel: f and g
#
# Y = GeLU(X A) B. A is cut by columns, so each rank computes its slice of the hidden layer alone, GeLU included; B is cut by
# rows to match, so each rank has a full-size Y that is one term of the sum. One all-reduce adds them up:
#
#          ┌─ X ─ A_0 ─ GeLU ─ B_0 ─ Y_0 ─┐
#     X ─ f                                g ─ Y        f: forward nothing, backward all-reduce (X fed all ranks: dX adds up)
#          └─ X ─ A_1 ─ GeLU ─ B_1 ─ Y_1 ─┘            g: forward all-reduce, backward nothing (dY reaches every term as it is)
#
# Attention is the same with heads for columns. A block sends 2 x 2(N-1)/N x BTC forward and as much backward.
# Shoeybi et al., "Megatron-LM" (2019), section 3. CS336 lecture 8, tensor parallelism.

class CopyToGroup(torch.autograd.Function):
    """f: forward identity, backward all-reduce."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may still hold the incoming one
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromGroup(torch.autograd.Function):
    """g: forward all-reduce, backward identity."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Shard:
    """How a parameter is cut over a group: along `dim`, after splitting that dim into `parts` equal parts.

    parts=3 is the fused q, k, v matrix: every rank gets its heads of each third. Uneven sizes differ by one, nothing is padded.
    """

    def __init__(self, group, dim, parts=1):
        self.group, self.dim, self.parts = group, dim, parts
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def cut(self, full, rank=None):
        rank = self.rank if rank is None else rank
        return torch.cat([part.tensor_split(self.size, self.dim)[rank] for part in full.chunk(self.parts, self.dim)], self.dim)

    def gather(self, local, shape):
        """The whole tensor, of `shape`, on every rank of the group."""
        full = local.new_empty(shape)
        pieces = [self.cut(full, r) for r in range(self.size)]
        rows = local.new_zeros(self.size, max(p.numel() for p in pieces))
        rows[self.rank, :local.numel()] = local.detach().reshape(-1)
        dist.all_gather_into_tensor(rows.view(-1), rows[self.rank].clone(), group=self.group)
        parts = [row[:p.numel()].view(p.shape).chunk(self.parts, self.dim) for row, p in zip(rows, pieces)]
        return torch.cat([torch.cat([p[i] for p in parts], self.dim) for i in range(self.parts)], self.dim)


class ColumnParallelLinear(nn.Module):
    """X (..., in) -> this rank's columns of X A^T + b, (..., out/N). Weight (out/N, in), bias (out/N)."""

    def __init__(self, linear, group, parts=1):
        super().__init__()
        self.group, shard = group, Shard(group, 0, parts)
        self.weight, self.bias = _cut(linear.weight, shard), _cut(linear.bias, shard)

    def forward(self, x):
        return F.linear(CopyToGroup.apply(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """This rank's slice of X (..., in/N) -> the whole X A^T + b (..., out). Weight (out, in/N), bias (out), whole everywhere."""

    def __init__(self, linear, group):
        super().__init__()
        self.group, self.weight, self.bias = group, _cut(linear.weight, Shard(group, 1)), linear.bias

    def forward(self, x):
        y = ReduceFromGroup.apply(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias  # after the sum, so that it is added once and not N times


class VocabParallelEmbedding(nn.Module):
    """Token ids (...) -> embeddings (..., C), each rank looking up the rows it holds: V/N of the table."""

    def __init__(self, embedding, group):
        super().__init__()
        self.group, shard = group, Shard(group, 0)
        self.weight = _cut(embedding.weight, shard)
        self.first = _first_row(embedding.num_embeddings, shard)

    def forward(self, tokens):
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return ReduceFromGroup.apply(x.masked_fill(elsewhere.unsqueeze(-1), 0), self.group)  # zero where another rank has it


def _cut(param, shard):
    if param is None:
        return None
    local = nn.Parameter(shard.cut(param.detach()).contiguous(), param.requires_grad)
    local.shard = shard
    return local


def _first_row(rows, shard):
    return sum(len(part) for part in torch.arange(rows).tensor_split(shard.size)[:shard.rank])


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits (n, V/N), each rank holding its slice of the vocabulary, against targets (n).

    loss = log(sum exp z) - z_target needs three numbers a token, not V: the maximum, the sum of exponentials and the target's
    logit are all-reduced, 3n elements in place of nV. Backward needs nothing: softmax minus one-hot, slice by slice.
    """

    @staticmethod
    def forward(ctx, logits, targets, group, first):
        z = logits if logits.dtype == torch.float64 else logits.float()
        top = z.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
        z = (z - top.unsqueeze(-1)).contiguous()
        local = targets - first
        elsewhere = (local < 0) | (local >= z.shape[1])
        local = local.masked_fill(elsewhere, 0)
        target = z.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0)
        p = z.exp_()
        sums = torch.stack([p.sum(-1), target])
        dist.all_reduce(sums, group=group)
        p /= sums[0].unsqueeze(-1)
        ctx.save_for_backward(p, local, elsewhere)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx, grad):
        p, local, elsewhere = ctx.saved_tensors
        p = p.clone()  # saved tensors stay as they are: backward may run again
        p.scatter_add_(1, local.unsqueeze(1), elsewhere.to(p.dtype).sub(1).unsqueeze(1))
        return (p * (grad / len(p))).to(ctx.dtype), None, None, None


def cross_entropy(logits, targets, vocab_size, group=None):
    """Mean loss in nats of logits (B, T, V) or, under tensor parallelism over `group`, (B, T, V/N), against targets (B, T)."""
    logits, targets = logits.flatten(0, 1), targets.flatten()
    if logits.shape[1] == vocab_size:
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)
    return VocabParallelCrossEntropy.apply(logits, targets, group, _first_row(vocab_size, Shard(group, 0)))


GPT2_PLAN = {  # how each layer of a GPT-2 is cut; whatever is not named (layer norms, positions) stays whole
    "wte": VocabParallelEmbedding,
    "attn.c_attn": lambda linear, group: ColumnParallelLinear(linear, group, parts=3),
    "attn.c_proj": RowParallelLinear,
    "mlp.c_fc": ColumnParallelLinear,
    "mlp.c_proj": RowParallelLinear,
    "lm_head": ColumnParallelLinear,
}


def tensor_parallel(module, group, plan=GPT2_PLAN):
    """Replace every layer the plan names (by the end of its name) with this rank's slice of it, in place. Ties stay ties.

    Sizes need not divide, except heads: the qkv matrix must be cut at a head's edge.
    """
    slices = {}  # weight -> its slice: a tied weight is cut once
    for name, layer in list(module.named_modules()):
        for ending, make in plan.items():
            if name == ending or name.endswith("." + ending):
                new = make(layer, group)
                new.weight = slices.setdefault(layer.weight, new.weight)
                parent, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(parent), leaf, new)
    return module


# -------------------------------------------------------------------------------------------------------------------- norm

def clip_grad_norm_(parameters, max_norm):
    """Scale all gradients so that their norm over the whole model is at most max_norm (0: leave them); returns the norm.

    Call after finish_grad_sync. Squares of sliced parameters are summed over their group; those of whole ones are the same on
    every rank and count once, as does a tied parameter. The sum over a group is one all-reduce of one number.
    """
    grads = defaultdict(list)  # group, or None for whole parameters -> gradients
    parameters = list(dict.fromkeys(p for p in parameters if p.grad is not None))
    for p in parameters:
        grads[p.shard.group if hasattr(p, "shard") else None].append(p.grad)
    square = 0
    for group, some in grads.items():
        part = torch.nn.utils.get_total_norm(some).square()
        if group is not None:
            dist.all_reduce(part, group=group)
        square = square + part
    norm = square.sqrt() if parameters else torch.zeros(())
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


# ------------------------------------------------------------------------------------------------------------------- recipe

def parallelize(config, mesh, device, dtype=torch.float32, source=None, seed=0):
    """Build the GPT of `config` on this rank, laid out over the mesh; returns it wrapped in DDP.

    source(name) gives a parameter's whole initial value (as `model.open_hf` returns one); left out, seed and name decide it.
    The order matters:
    """
    tp, dp = mesh["tp"].get_group(), mesh["dp"].get_group()
    # 1. Shapes only. Nothing is allocated before it is known which part of it belongs here.
    model = GPT(config, seed=None)
    # 2. Cut the layers: what follows must see this rank's parameters, and see them once.
    if dist.get_world_size(tp) > 1:
        tensor_parallel(model, tp)
    # 3. Weights, one whole parameter at a time, of which each rank keeps its slice: the same numbers in every layout.
    materialize(model, source or (lambda name: initial_weight(config, name, seed)), device, dtype,
                lambda param, whole: param.shard.cut(whole) if hasattr(param, "shard") else whole)
    # 4. Data parallel last: its buckets hold the parameters as they are now.
    return DDP(model, dp, find_unused_parameters=False)


def whole_parameter(param, shape):
    """A parameter as one process would hold it, on every rank of its group. All of them must ask, in the same order."""
    return param.shard.gather(param, shape) if hasattr(param, "shard") else param.detach()
