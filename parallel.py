"""Parallel training, applied to a model from outside. In lecture order, each section adds one idea:

    mesh        which ranks form which group: axes (pp, dp, cp, tp), tensor parallel innermost
    data        replicas average their gradients: one all-reduce a parameter
    ZeRO        stage 1 shards the optimizer, stage 2 the gradients too, stage 3 (FSDP) the parameters too
    tensor      every matrix is cut by columns or rows; a sublayer costs one all-reduce forward, g, and one backward, f
    pipeline    layers are spread over ranks: GPipe and 1F1B, as lists of actions
    norm        one gradient norm over any combination
    edition     `Lecture`: the classes above that a GPT is trained with. further/full.py and fast/edition.py have others

train.py puts them together, in an order that works: `parallelize`.

further/ has a file each for sequence parallelism, context parallelism, experts, more schedules, and groups on several
nodes; and buckets.py, flat.py, prefetch.py, what makes data parallelism and ZeRO fast. docs/own-model.md trains a
module that is no GPT with `average_gradients`, `tensor_parallel` and `clip_grad_norm_`.

`python -m lessons data`, `memory`, `fsdp`, `tensor`, `pipeline`, and for further/ `context`, `experts`: on a laptop.

`group=None` is all ranks, as in torch.distributed. Sections tell each other how a parameter is spread by its
`Placement`.

Letters: N ranks in the group, r this rank, K parameters, m micro-batches, p pipeline ranks, v stages a rank; B, T, C, V
as in model.py. Read with: CS336 lectures 7 and 8; Ultra-Scale Playbook, the chapters of the same names.
"""

import functools
import itertools
import math
from collections import defaultdict, deque
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh

import collectives as dist
import kernels


# ----------------------------------------------------------------------------------------------------------------- mesh

def make_mesh(device_type, dp=1, tp=1, pp=1, cp=1):
    """A torch DeviceMesh with axes ("pp", "dp", "cp", "tp"); `mesh.get_group("tp")` is this rank's group along tp.

    tp is innermost, because its ranks talk in every layer, and neighbours share a node. Of pp 2, dp 2, tp 2 each rank
    has these groups:

        rank    0    1    2    3    4    5    6    7
        tp      01   01   23   23   45   45   67   67
        dp      02   13   02   13   46   57   46   57
        pp      04   15   26   37   04   15   26   37

    Call it on all ranks, as every function that makes groups. ValueError unless pp x dp x cp x tp is the world size.
    """
    there, needed = dist.get_world_size(), pp * dp * cp * tp
    if needed != there:
        raise ValueError(f"pp {pp} x dp {dp} x cp {cp} x tp {tp} needs {needed} processes, there are {there}")
    return init_device_mesh(device_type, (pp, dp, cp, tp), mesh_dim_names=("pp", "dp", "cp", "tp"))


def groups_of(grids):
    """Of the grid of ranks that this rank is in: [its group along the rows, its group along the columns]."""
    return sum([dist.rows_and_columns(grid) for grid in grids.tolist()], [])


def group_or_world(group):
    return group or torch.distributed.group.WORLD


@dataclass(frozen=True)
class Placement:
    """How a parameter and its gradient are spread over ranks: `param.placement`. Data parallelism needs the default
    alone: a whole parameter, the same on all ranks that average its gradient. Whoever cuts a parameter sets fields, and
    the norm reads them.

    sharded_over   groups whose ranks hold other parts of the model: other columns, shards, or layers
    partial_over   groups whose ranks have terms of the gradient, which is the sum of them: the two stages of a tied
                   embedding; the ranks that saw T/N tokens each
    twins          how many parameters of this rank are tied copies: 2 if it has both ends of a tied embedding
    average_over   an expert's: the group that keeps the same expert, and averages its gradient
    divide_by      an expert's: its gradient is the sum of so many ranks' losses, and their mean is wanted
    decays         whether it has weight decay; None: a matrix has, a vector has not
    fused          of a matrix that is several side by side, as q, k, v: their relative sizes
    cuts, whole    the `Cut`s that took this rank's part of the whole tensor, and the whole tensor's shape; these three
                   do not count in ==
    """
    sharded_over: tuple = ()
    partial_over: tuple = ()
    twins: int = 1
    average_over: object = None
    divide_by: int = 1
    decays: bool = None
    fused: tuple = field(default=None, compare=False)
    cuts: tuple = field(default=(), compare=False)
    whole: tuple = field(default=None, compare=False)


WHOLE = Placement()  # made once, because every step asks for the placement of every parameter


def placement_of(param):
    return getattr(param, "placement", WHOLE)


class PlacedParameter(nn.Parameter):
    """A parameter with a placement of its own. A deep copy of it, as for an average of weights, has the same."""

    def __deepcopy__(self, memo):
        copy = super().__deepcopy__(memo)
        copy.placement = self.placement
        return copy


def set_placement(param, **changes):
    """Change fields of a parameter's placement."""
    param.__class__ = PlacedParameter
    param.placement = replace(placement_of(param), **changes)


def is_matrix(param):
    """Whether a parameter has weight decay, and FSDP shards it. Biases and norms have none, and stay whole."""
    decays = placement_of(param).decays
    return param.dim() >= 2 if decays is None else decays


# ---------------------------------------------------------------------------------------------- data parallel: replicas
#
# Every rank holds the whole model and sees its own part of the batch. Gradients are averaged, so replicas stay equal:
# an all-reduce of K elements, 2(N-1)/N x K sent by each rank and step, however many micro-batches the step has.

def average_gradients(module, group=None):
    """After backward, one all-reduce a parameter. Each tensor, however small, pays the latency of a collective, and
    nothing computes meanwhile: further/buckets.py sends many together, under backward."""
    for param in module.parameters():
        if param.requires_grad:
            average_gradient(param, group)


def average_gradient(param, group):
    """Make .grad its mean over the ranks. A rank that has none sends zeros."""
    param.grad = own_gradient(param)
    dist.all_reduce(param.grad, dist.ReduceOp.AVG, averaging_group(param, group))


def own_gradient(param):
    """This rank's gradient. (An expert's is the sum of `divide_by` ranks' losses, and their mean is wanted. An
    embedding's may be sparse, and collectives take dense tensors.)"""
    if param.grad is None:
        return torch.zeros_like(param, dtype=param.grad_dtype)
    return param.grad.to_dense() / placement_of(param).divide_by


def averaging_group(param, group):
    """The ranks that average a parameter's gradient. Few ranks keep the same expert (further/experts.py)."""
    return placement_of(param).average_over or group


# ------------------------------------------------------------------------------------------------- ZeRO: sharded states
#
# In data parallelism every rank keeps the same. ZeRO lets each keep 1/N. K parameters, float32, Adam; bytes a rank:
#
#                  parameters   gradients   optimizer    sent a step, elements
#     stage 0          4K           4K          8K       2 (N-1)/N K              all-reduce
#     stage 1          4K           4K          8K/N     2 (N-1)/N K              reduce-scatter, all-gather: its halves
#     stage 2          4K           4K/N        8K/N     (m+1) (N-1)/N K          reduce-scatter m times, all-gather
#     stage 3          4K/N         4K/N        8K/N     3m (N-1)/N K             m x (2 all-gathers, reduce-scatter)
#
# Each stage below changes one thing of the one before: ZeRO1 what is stepped, ZeRO2 when gradients are sent, ZeRO3 when
# weights exist. They take a tensor at a time, and wait for each collective. further/ has the same stages for speed:
# buckets.py, flat.py, prefetch.py. Besides the table's bytes, stages 2 and 3 hold one tensor's whole gradient at a
# time. Stage 3 also holds one layer's weights, and those tied to them. (Where a schedule of further/ splits a backward,
# they stay longer.) Rajbhandari et al., "ZeRO" (2020). CS336 lecture 7.
#
# Mixed precision: layers compute with 16-bit weights, and the optimizer steps float32 masters of them. Gradients are
# added up in float32, too. bf16 has 8 significant bits, so in bf16 0.02 - 0.00001 is 0.02.

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64,
              "fp8": torch.bfloat16}  # of all but blocks' products, which fast/fp8.py has in 8 bits


def master_dtype(dtype):
    """What the optimizer steps weights of this dtype in, and gradients are added up in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class ZeRO0:
    """Data parallelism as an optimizer: every rank keeps all states and steps all parameters.

        optimizer = ZeRO0(module.parameters(), torch.optim.AdamW, group, lr=1e-3)
        loss.backward()                     of each micro-batch; gradients add up in .grad
        optimizer.finish_grad_sync()        on all ranks
        optimizer.step(); optimizer.zero_grad()

    params: parameters, (name, parameter) pairs or parameter groups, alike on all ranks of the group. optimizer_class:
    the class of `inner`, the optimizer that steps self.stepped[param] in place of each parameter. compute_dtype: the
    layers' dtype, if it is not the parameters'. modules: ZeRO3 hangs hooks on their layers; other stages need none.
    """

    def __init__(self, params, optimizer_class, group=None, modules=(), compute_dtype=None, **options):
        self.group, self.compute_dtype = group_or_world(group), compute_dtype
        param_groups = torch.optim.Optimizer(params, {}).param_groups  # PyTorch reads a list, groups or names alike
        params = [param for param_group in param_groups for param in param_group["params"]]
        self.stepped = {param: self.make_stepped(param) for param in params}
        for param_group in param_groups:
            param_group["params"] = [self.stepped[param] for param in param_group["params"]]
        self.inner = optimizer_class(param_groups, **options)

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    def make_stepped(self, param):
        """What `inner` steps for a parameter: the parameter; if layers compute in 16 bits, a float32 master of it."""
        dtype = self.compute_dtype or param.dtype
        if dtype == master_dtype(dtype):
            return param
        master = placed(param.detach().clone(), param)
        param.data = param.to(dtype)
        param.grad_dtype = master.dtype  # PyTorch's: autograd casts what it adds to .grad to this dtype
        return master

    def no_sync(self):
        """Goes around all backwards of a step but the last. Here nothing is sent in backward, so nothing changes."""
        return nullcontext()

    def finish_grad_sync(self):
        """Average what has not been averaged. Call it after a step's last backward, on all ranks."""
        for param in self.stepped:
            if param.requires_grad:
                self.average(param)

    def average(self, param):
        average_gradient(param, self.group)
        grad = param.grad
        param.grad = None
        self.stepped[param].grad = grad

    @torch.no_grad()
    def step(self):
        self.inner.step()
        for param in self.stepped:
            self.refresh(param)

    def refresh(self, param):
        """Copy what `inner` has stepped into the parameter."""
        if self.stepped[param] is not param:
            param.copy_(self.stepped[param])

    def zero_grad(self, set_to_none=True):
        """Drop all gradients, also those of an unfinished step."""
        for param, stepped in self.stepped.items():
            param.grad = stepped.grad = None

    def kept(self, param):
        """For checkpoints: (the stepped tensor, the slice of that tensor without padding, the slice of the flattened
        parameter that those numbers are)."""
        return self.stepped[param], slice(None), slice(None)


class ZeRO1(ZeRO0):
    """ZeRO-1: reduce-scatter each gradient, step this rank's shard of each tensor, all-gather the shards.

    whole[param]: the tensor in N rows, as `in_rows` below makes them. The parameter is a view of these rows, so that an
    all-gather of the shards changes the parameter.
    """

    def __init__(self, *args, **options):
        self.whole = {}
        super().__init__(*args, **options)

    def make_stepped(self, param):
        group, placement = averaging_group(param, self.group), placement_of(param)
        dtype = self.compute_dtype or param.dtype
        rows = in_rows(param.detach(), dist.get_world_size(group))
        self.whole[param] = rows.to(dtype)
        mine = self.whole[param][dist.get_rank(group)]  # a view: to step the shard is to change the rows
        if dtype != master_dtype(dtype):
            mine = rows[dist.get_rank(group)].to(master_dtype(dtype), copy=True)
        shard = placed(mine, param)
        # The row is flat, so its shape no longer says whether it has weight decay, and no Cut made it.
        shard.placement = replace(placement, sharded_over=placement.sharded_over + (group,), cuts=(), whole=None,
                                  decays=is_matrix(param))
        self.show(param)
        param.grad_dtype = shard.dtype
        return shard

    def show(self, param):
        """Make the parameter a view of its rows, without their padding."""
        param.data = self.whole[param].view(-1)[:param.numel()].view(param.shape)

    def average(self, param):
        group, shard = averaging_group(param, self.group), self.stepped[param]
        rows = in_rows(own_gradient(param), dist.get_world_size(group))
        average = torch.empty_like(shard)
        dist.reduce_scatter_tensor(average, rows, dist.ReduceOp.AVG, group)
        shard.grad = average if shard.grad is None else shard.grad + average
        param.grad = None

    @torch.no_grad()
    def refresh(self, param):
        whole, shard = self.whole[param], self.stepped[param].detach()
        dist.all_gather_into_tensor(whole, shard.to(whole.dtype), averaging_group(param, self.group))

    def kept(self, param):
        shard, n = self.stepped[param], param.numel()
        first = min(n, len(shard) * dist.get_rank(averaging_group(param, self.group)))
        end = min(n, first + len(shard))  # the last rows are padded
        return shard, slice(0, end - first), slice(first, end)


class ZeRO2(ZeRO1):
    """ZeRO-2: each gradient is sent in the backward that has made it, so whole gradients never accumulate.

    All ranks must use the same parameters in each backward. Autograd then completes them in the same order.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for param in self.stepped:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self.average)

    def finish_grad_sync(self):
        for param, shard in self.stepped.items():
            if param.requires_grad and shard.grad is None:  # no backward has used it
                self.average(param)


class ZeRO3(ZeRO2):
    """ZeRO-3: gather a layer's weights, compute, free; in backward gather them again, and scatter gradients.

        optimizer = ZeRO3(module.parameters(), torch.optim.AdamW, group, [module], lr=1e-3)

        a matrix        storage of its rows    .data     .grad
        gather          all bytes              whole     None
        free            0 bytes                NaN       None
        gather again    all bytes              whole     None; then, in backward, the whole gradient
        average         0 bytes                NaN       None; the shard's .grad has grown

    Forward saves a view of `whole[param]` for backward. `free` empties the storage below the view. `gather` fills the
    same storage again, so backward reads the right numbers. (Autograd refuses a saved tensor whose version counter has
    risen. `.data =` keeps the parameter's counter, and the gather raises that of `whole` alone.) Meanwhile .data is
    NaN, so that nobody computes with memory that is not there. A layer makes dX together with dW, so when dW is there,
    W may go. A tied weight goes when the dW of both layers is there: autograd adds them up, then calls the hook once.
    Vectors (biases and norms, a thousandth of GPT-2's K) stay whole.

    Recomputation (PyTorch's `checkpoint`) runs a layer's forward again within its backward. in_backward says which
    matrices must stay then. (Without recomputation `free` needs no `if`.) A frozen matrix has no dW, so it stays whole
    until zero_grad. A matrix must be used in its own layer's forward alone. (nn.MultiheadAttention uses the matrix of
    its out_proj.)
    """

    def __init__(self, params, optimizer_class, group=None, modules=(), compute_dtype=None, **options):
        super().__init__(params, optimizer_class, group, modules, compute_dtype, **options)
        for shard in self.stepped.values():
            shard.data = shard.data.clone()  # as a view it would go with the rows
        self.in_backward = set()
        self.zero_grad()  # frees the matrices
        for layer in [layer for module in modules for layer in module.modules()]:
            if matrices := [param for param in layer.parameters(recurse=False) if is_matrix(param)]:
                layer.register_forward_pre_hook(partial(self.gather, matrices))
                layer.register_forward_hook(partial(self.free, matrices))
                if not isinstance(layer, EMBEDDINGS):  # nn.Embedding and the cut one: their backward needs tokens alone
                    layer.register_full_backward_pre_hook(partial(self.begin_backward, matrices))

    # *_ takes the layer and the tensors that PyTorch gives to each hook.

    def gather(self, matrices, *_):
        for param in matrices:
            storage = self.whole[param].untyped_storage()
            if storage.size() == 0:
                storage.resize_(self.whole[param].nbytes)
                self.refresh(param)
                self.show(param)

    def begin_backward(self, matrices, *_):
        self.gather(matrices)
        self.in_backward.update(matrices)

    def free(self, matrices, *_):
        for param in matrices:
            if param not in self.in_backward:
                param.data = torch.full((), math.nan).to(param).expand(param.shape)
                self.whole[param].untyped_storage().resize_(0)

    def average(self, param):
        super().average(param)
        if is_matrix(param):
            self.in_backward.discard(param)
            self.free([param])

    @torch.no_grad()
    def step(self):
        self.inner.step()
        for param in self.stepped:
            if not is_matrix(param):  # forward gathers the matrices
                self.refresh(param)

    def zero_grad(self, set_to_none=True):
        super().zero_grad()
        self.in_backward.clear()
        self.free(filter(is_matrix, self.stepped))  # an unfinished step has left some whole


def in_rows(tensor, ranks):
    """A tensor's numbers in N rows of equal length, (N, K/N rounded up), padded with zeros. Row r is rank r's shard. Of
    11 numbers 2 rows of 6, of which the last number is the padding."""
    return F.pad(tensor.flatten(), (0, -tensor.numel() % ranks)).view(ranks, -1)


def placed(values, param):
    """A parameter of these values, trained and placed as another one."""
    new = PlacedParameter(values, param.requires_grad)
    new.placement = placement_of(param)
    return new


# --------------------------------------------------------------------------------------------- tensor parallel: f and g
#
# Y = GeLU(X A) B. A is cut by columns, so each rank computes its slice of the hidden layer alone, GeLU included. B is
# cut by rows to match, so each rank has a full-size Y that is one term of the sum. One all-reduce adds them up:
#
#          ┌─ X ─ A_0 ─ GeLU ─ B_0 ─ Y_0 ─┐
#     X ─ f                                g ─ Y    f: forward identity, backward all-reduce (all used X: dX adds up)
#          └─ X ─ A_1 ─ GeLU ─ B_1 ─ Y_1 ─┘        g: forward all-reduce, backward identity (dY reaches each term as is)
#
# Three things that ranks of a group may hold in place of a tensor explain f, g, and what must still be added up. Each
# has a letter:
#
#            a tensor in forward                         its gradient in backward
#     X      R  replicated: the same on every rank       P  partial: each rank's columns of A have made a term of it
#     X A    V  varying: each rank has its columns       V  varying: each rank has that of its columns
#     Y_r    P  partial: each rank has a term of Y       R  replicated: dY is the gradient of each term
#     Y      R                                           R
#
# f adds up X's gradient, g the Y_r: both make R of P. A replicated parameter may have a partial gradient: the weight of
# a norm that saw some of the tokens. Its `placement.partial_over` says over which ranks that must be added up before
# the step. `python -m lessons types` follows the letters through a step, in one process (further/letters.py).
#
# X is (BT, in), A (in, out). (B beside A is the second matrix, in BT and BTC the sequences.) A layer's `weight` is A
# transposed, as in model.py. Attention is the same with heads for columns. A block, attention and MLP, sends
# 2 x 2(N-1)/N x BTC elements forward and as many backward. Until backward a rank keeps all of X and 1/N of the hidden
# layer. Shoeybi et al., "Megatron-LM" (2019); CS336 lecture 8.

class CopyToGroup(torch.autograd.Function):
    """f: forward identity, backward all-reduce: X went into every rank's columns of A, so dX adds up. Nothing is
    computed while it travels. (In CUDA graphs fast/ computes weight gradients meanwhile.)"""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)  # autograd needs a new tensor

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)  # because autograd may still need the incoming one
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromGroup(torch.autograd.Function):
    """g: forward all-reduce, backward identity: Y is a plain sum, so each term's gradient is dY."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)  # because all_reduce works in place
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None


class Cut:
    """How a parameter is cut over a group, along `dim`. A rank gets its slice; uneven sizes differ by one.

    fused=(1, 1, 1): three matrices of these relative sizes, such as q, k, v, lie in one. Each is cut by itself, so that
    a rank gets its heads of q, of k and of v.

        q0 q1 | k0 k1 | v0 v1    ->    rank 0: q0 k0 v0    rank 1: q1 k1 v1
    """

    def __init__(self, group, dim, fused=(1,)):
        self.group, self.dim, self.fused = group_or_world(group), dim, fused
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def __deepcopy__(self, memo):
        return self  # a group has no copy

    def is_like(self, other):
        return (self.group, self.dim, self.fused) == (other.group, other.dim, other.fused)

    def part(self, full):
        """What this rank has of the whole tensor."""
        unit = full.shape[self.dim] // sum(self.fused)
        matrices = full.split([n * unit for n in self.fused], self.dim)
        mine = [matrix.tensor_split(self.size, self.dim)[self.rank] for matrix in matrices]
        return torch.cat(mine, self.dim)

    def first(self, rows):
        """The index of this rank's first row, of `rows` rows in all."""
        return self.rank * (rows // self.size) + min(self.rank, rows % self.size)


class ColumnParallelLinear(nn.Module):
    """X (..., in) -> this rank's columns of X A + b, (..., out/N). Weight (out/N, in), bias (out/N)."""

    def __init__(self, layer, group, f, fused=(1,)):  # f: CopyToGroup.apply, or sequence parallelism's
        super().__init__()
        refuse_unlike(layer, nn.Linear)
        self.f = f
        self.cut = Cut(group, 0, fused)  # A's columns are the weight's rows
        self.weight, self.bias = local_parameter(layer.weight, self.cut), local_parameter(layer.bias, self.cut)

    def forward(self, x):                                                                     # (..., in)
        return kernels.table[F.linear](self.f(x, self.cut.group), self.weight, self.bias)     # (..., out/N)


class RowParallelLinear(nn.Module):
    """This rank's slice of X (..., in/N) -> the whole X B + b (..., out). Weight (out, in/N), bias (out), not cut."""

    def __init__(self, layer, group, g):  # g: ReduceFromGroup.apply, or sequence parallelism's
        super().__init__()
        refuse_unlike(layer, nn.Linear)
        self.g = g
        self.cut = Cut(group, 1)
        self.weight, self.bias = local_parameter(layer.weight, self.cut), layer.bias

    def forward(self, x):                                                                     # (..., in/N)
        y = self.g(kernels.table[F.linear](x, self.weight), self.cut.group)                   # (..., out)
        # After the sum, or the bias would be added N times. Its gradient is that of Y, equal on all ranks.
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Token ids (...) -> embeddings (..., C). Each rank looks up the V/N rows of the table that it holds.

    A token outside of 0 .. V-1 is an IndexError on the CPU. On a GPU, for which the CPU does not wait, such a token's
    embedding is NaN."""

    def __init__(self, embedding, group, g):
        super().__init__()
        refuse_unlike(embedding, nn.Embedding)
        self.g = g
        self.cut = Cut(group, 0)
        self.weight = local_parameter(embedding.weight, self.cut)
        self.rows = embedding.num_embeddings
        self.first = self.cut.first(self.rows)

    def forward(self, tokens):                                                                # (...)
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        invalid = (tokens < 0) | (tokens >= self.rows)
        if kernels.readable(tokens) and invalid.any():
            raise IndexError(f"tokens from {tokens.min()} to {tokens.max()}: an embedding of {self.rows} rows takes 0 "
                             f"to {self.rows - 1}")
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)                         # (..., C)
        instead = x.new_zeros(tokens.shape).masked_fill(invalid, math.nan)  # 0 where another rank has the row
        return self.g(torch.where(elsewhere.unsqueeze(-1), instead.unsqueeze(-1), x), self.cut.group)


def refuse_unlike(layer, kind):
    """ValueError for a layer that does more than its kind: what takes its place multiplies and adds a bias, or looks up
    rows. A subclass of nn.Linear with a forward of its own says by `is_plain` that it does no more."""
    options = [name for name in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
               if getattr(layer, name, None) is not None and getattr(layer, name) is not False]
    parts = {*layer._parameters, *layer._buffers, *layer._modules} - {"weight", "bias"}
    hooks = [name for name, found in vars(layer).items() if name.endswith("_hooks") and found]
    more = [*options, *sorted(parts), *hooks, *["forward"] * ("forward" in vars(layer))]
    is_plain = type(layer) is kind or isinstance(layer, kind) and getattr(layer, "is_plain", False)
    if more or not is_plain:
        raise ValueError(f"a plain {kind.__name__} can be cut over ranks, not {type(layer).__name__}"
                         f"{' with ' * bool(more)}{', '.join(more)}: leave it out of the table")


EMBEDDINGS = nn.Embedding, VocabParallelEmbedding  # their backward needs row indices, no weights


def local_parameter(param, cut):
    """Leave of a parameter this rank's part, in place, so that whoever else holds it has the part, too: a tied layer,
    an optimizer. It knows how it was cut."""
    before = placement_of(param)
    if param is None or any(cut.is_like(done) for done in before.cuts):  # a tied one is cut once
        return param
    set_placement(param, cuts=before.cuts + (cut,), sharded_over=before.sharded_over + (cut.group,),
                  whole=whole_shape(param))
    param.grad = None
    param.data = cut.part(param.detach()).contiguous()
    return param


def whole_shape(param):
    return placement_of(param).whole or param.shape


def cut_like(param, whole):
    """This rank's part of a whole tensor, where expert and tensor parallelism cut the parameter."""
    for cut in placement_of(param).cuts:
        whole = cut.part(whole)
    return whole


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross-entropy of each row of logits (n, V/N), this rank's slice of the vocabulary, against targets (n).

    loss = log(sum exp z) - z_target: the maximum, the sum of exponentials and the target's logit are all-reduced, 3n
    elements in place of nV. Backward sends nothing: it is softmax minus one-hot, slice by slice.
    """

    @staticmethod
    def forward(ctx, logits, targets, group, first):
        z, targets = logits if logits.stride(-1) == 1 else logits.contiguous(), targets.contiguous()
        own_top, total, target = kernels.softmax_sums(z, targets, first)  # (n); target: 0 if another rank has its logit
        top = own_top.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
        sums = torch.stack([total * (own_top - top).exp(), target])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(z, targets, top, sums[0])
        ctx.first = first
        return kernels.loss_of_sums(top, *sums, targets)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        z, targets, top, total = ctx.saved_tensors
        return kernels.softmax_minus_onehot(z.detach(), targets, top, total, grad, ctx.first), None, None, None


def cross_entropy(logits, targets, vocab_size, group=None):
    """Loss in nats of logits (B, T, V), or (B, T, V/N) of each rank of `group`, against targets (B, T), summed over the
    targets that count. kernels.checked_targets says which these are, and what a target outside of the vocabulary does.
    """
    return row_losses(logits.flatten(0, 1), targets.flatten(), vocab_size, group).sum()


def row_losses(logits, targets, vocab_size, group=None):
    """As `cross_entropy`, of each row of logits (n, V) or (n, V/N): (n), 0 where the target does not count."""
    if logits.shape[1] == vocab_size:
        return kernels.row_losses(logits, targets)
    targets, factor = kernels.checked_targets(targets, vocab_size)
    return VocabParallelCrossEntropy.apply(logits, targets, group, Cut(group, 0).first(vocab_size)) * factor


def gpt2_plan(f, g, columns=ColumnParallelLinear):
    """How each layer of a GPT-2 is cut, with this f and g. What is not named (layer norms, positions) stays whole."""
    column, row = partial(columns, f=f), partial(kernels.table[RowParallelLinear], g=g)
    return {
        "wte": partial(VocabParallelEmbedding, g=g),
        "attn.c_attn": partial(column, fused=(1, 1, 1)),
        "attn.c_proj": row,
        "mlp.c_fc": column,
        "mlp.c_proj": row,
        "lm_head": column,
    }


def planned(name, plan):
    """What a plan does with the layer of this name: the entry under its end, "mlp.c_fc" of "h.3.mlp.c_fc". None: the
    layer stays whole."""
    return next((how for ending, how in plan.items() if ("." + name).endswith("." + ending)), None)


def planned_layers(module, plan):
    """{layer: what the plan does with it} of the layers that it names."""
    named = module.named_modules(remove_duplicate=False)
    return {layer: how for name, layer in named if (how := planned(name, plan))}


def tensor_parallel(module, group, plan=None):
    """Put this rank's slices in place of the layers that the plan names; left out, it is a GPT's `gpt2_plan`. N must
    divide the heads. Parameters stay the objects that they are, so ties stay ties. ValueError for a layer that does
    more than nn.Linear or nn.Embedding, because the slice in its place would not."""
    plan = plan or gpt2_plan(CopyToGroup.apply, ReduceFromGroup.apply)
    cut = {layer: how(layer, group) for layer, how in planned_layers(module, plan).items()}
    for name, layer in [*module.named_modules(remove_duplicate=False)]:
        if layer in cut:
            module.set_submodule(name, cut[layer])
    return module


# ----------------------------------------------------------------------------------- pipeline: layers spread over ranks
#
# Each rank holds a stage, a run of consecutive layers. A batch passes through all stages in m micro-batches, so that p
# ranks can compute at the same time. Each rank idles, in all, as long as a micro-batch and its gradient need for the
# other p-1 stages: (p-1) (F + B), of the times that a stage takes for a micro-batch's forward and backward. This is the
# bubble. Micro-batches go between neighbours alone: B T C elements forward, and as many backward. CS336 lecture 7.
# Lecture 8's loop, which receives, computes and sends, is `gpipe_step` of lessons/lecture8.py.
#
# GPipe holds activations of all m micro-batches. 1F1B runs the same forwards and backwards in another order, and rank r
# holds those of p - r. So that one loop can run any order, a schedule is data, a list of actions for each rank:
#
#     F2    forward of micro-batch 2 through a stage
#     B2    its backward: the gradients of the stage's weights, and that of its input, which the stage before waits for
#
# Functions write the lists, `lower` adds the transfers, and `Pipeline` runs them. Stage s is on rank s here. Schedules
# of further/schedules.py idle less: ranks have several stages, and a B is split in two. further/lists.py checks lists.

class Action(NamedTuple):
    """What a rank does for one micro-batch in one stage. kind: F or B. After `lower` also SF and RF, which send and
    receive an F's result, SB and RB a B's. They have the stage of that F or B, so stage 1's rank runs RF0 of stage 0.
    """
    kind: str
    stage: int
    micro_batch: int

    def __str__(self):
        return f"{self.kind}{self.micro_batch}"


def gpipe(p, m, v=1):
    """All forwards, then all backwards. Huang et al., "GPipe" (2019). (v: other schedules have v stages a rank.)"""
    return [whole_batch("F", r, m) + whole_batch("B", r, m) for r in range(p)]


def whole_batch(kind, stage, m):
    return [Action(kind, stage, i) for i in range(m)]


def one_f_one_b(p, m, v=1):
    """Rank r runs p-1-r forwards ahead, then one forward, one backward, in turn: at most p-r activations, whatever m.

    From the start of its F to the end of its B a micro-batch takes p-r ranks forward and back, this one among them:
    (p-r) (F + B). In that time the rank can run p-r F and p-r B, so p-r micro-batches keep it busy. Narayanan et al.,
    "PipeDream-2BW" (2020), call it PipeDream-Flush.
    """
    return [alternate(whole_batch("F", r, m), p - 1 - r, whole_batch("B", r, m)) for r in range(p)]


def alternate(forwards, ahead, backwards):
    """First `ahead` forwards (warm-up). Then, until no backward is left: one forward if any is left, one backward
    (steady state; when no forward is left, cool-down)."""
    actions = forwards[:ahead]
    left = deque(forwards[ahead:])
    for backward in backwards:
        if left:
            actions.append(left.popleft())
        actions.append(backward)
    return actions


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}  # name: schedule(p, m, v)


def ranks_of_stages(lists):
    """Which rank each stage of a schedule is on, {stage: rank}."""
    stage_to_rank = {action.stage: rank for rank, actions in enumerate(lists) for action in actions}
    return dict(sorted(stage_to_rank.items()))


def stages_on(rank, stage_to_rank):
    return [stage for stage, its_rank in stage_to_rank.items() if its_rank == rank]


def needs(action, stages):
    """The actions whose results an F or a B computes with: B0 of stage 0 with the activations of its own F0, and with
    the gradient that B0 of stage 1 has made. stages: all that there are. (I and W: halves of a B, further/schedules.py)
    """
    kind, s, i = action
    of_backward = [Action("F", s, i), Action("B", s + 1, i)]
    needed = {"F": [Action("F", s - 1, i)], "W": [Action("B", s, i)]}.get(kind, of_backward)
    return [action for action in needed if action.stage in stages]  # not before the first one, or after the last


def result_of(action):
    """The action under whose name others know what this one makes: an I makes what a B makes for the stage before. None
    for a W, for which nobody waits, and for transfers."""
    if action.kind == "I":
        return action._replace(kind="B")
    return action if action.kind in ("F", "B") else None


def goes_to(action):
    """The stage that waits for what an F or a B makes. (After the last stage's F, or the first's B, a number that no
    stage has.)"""
    return action.stage + (1 if action.kind[-1] == "F" else -1)


def in_order(lists):
    """All ranks' lists as one, in an order in which they can run: [(rank, action)].

    In each turn, each rank runs its next action if all that it needs was made in earlier turns. ValueError if no rank
    can go on. 1F1B for p = 2, m = 2:

        turn       1   2   3   4   5   6
        rank 0    F0  F1   .  B0   .  B1    in turn 3, its B0 still needs the result of rank 1's B0
        rank 1     .  F0  B0  F1  B1
    """
    stages = ranks_of_stages(lists)
    left = [deque(actions) for actions in lists]
    done = set()
    order = []
    while any(left):
        turn = [(rank, actions.popleft()) for rank, actions in enumerate(left)
                if actions and done.issuperset(needs(actions[0], stages))]
        if not turn:
            raise ValueError("deadlock: each rank waits for another one's result")
        done.update(result_of(action) for _, action in turn)
        order += turn
    return order


def lower(lists, ordered=in_order):
    """Lower lists to what runs: add the transfers. A result that another rank needs is sent as soon as it is made. The
    send is appended to its rank's list, the receive to the other's, after all that the other has run so far. (A receive
    only posts a buffer, so it may stand early.) 1F1B for p = 2, m = 2, before and after:

        rank 0    F0 F1 B0 B1        F0 SF0 F1 SF1 RB0 B0 RB1 B1
        rank 1    F0 B0 F1 B1        RF0 RF1 F0 B0 SB0 F1 B1 SB1

    RF1 stands before F0, because in turn 2 of `in_order` rank 0's F1 comes before rank 1's F0.
    Why there is no deadlock: number the transfers as they are appended. Each list then has them in rising order:

        rank 0    F0 S1 F1 S2 R3 B0 R4 B1          S1: transfer 1 is sent
        rank 1    R1 R2 F0 B0 S3 F1 B1 S4

    Suppose that all ranks wait. Take the lowest transfer that is not done. Before it, its two ranks have transfers that
    are done, and computations. Each computation can run, because what it needs was computed on that rank, or came by a
    lower transfer. So both ranks reach this transfer, and do not wait.
    """
    stage_to_rank = ranks_of_stages(lists)
    lowered = [[] for _ in lists]
    for rank, action in ordered(lists):
        lowered[rank].append(action)
        if result := result_of(action):
            add_transfer(lowered, result, rank, stage_to_rank.get(goes_to(result)))
    return lowered


def add_transfer(lowered, result, rank, other):
    """Let a rank send an action's result to another rank. other: None if nobody waits for it."""
    if other not in (None, rank):
        lowered[rank].append(result._replace(kind="S" + result.kind))
        lowered[other].append(result._replace(kind="R" + result.kind))


def carried(transfer):
    """The action whose result a send or a receive carries: F0 of SF0 and of RF0."""
    return transfer._replace(kind=transfer.kind[1])


@functools.cache  # for 16 ranks and 128 micro-batches it takes 0.1 s
def lowered_lists(schedule, p, m, v):
    """A schedule's lists with transfers, which callers must not change."""
    return lower(schedule(p, m, v))


def even_pieces(config, stages):
    """The L+2 pieces of a GPT cut into `stages` runs of about equal length: [range, ...]."""
    starts = [(config.n_layer + 2) * stage // stages for stage in range(stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


# --------------------------------------------------------------------------------------------- pipeline: running a list

class MicroBatch:
    """One micro-batch in one stage: forward, later backward. loss(output, target): the last stage's, else None.

    In between it holds the stage's input, and the edge in autograd's graph where backward starts. So the output, BTC
    numbers, can be freed once it is sent.
    """

    def __init__(self, module, loss):
        self.module = module
        self.loss = loss

    def forward(self, x, target=None, **beside):
        """x: tokens (B, T), or the output of the stage before. beside: what else the module takes. Returns this stage's
        output, or the loss, detached."""
        self.x = x.requires_grad_() if x.is_floating_point() and torch.is_grad_enabled() else x
        y = self.module(self.x, **beside)
        if self.loss:
            y = self.loss(y, target)
        self.edge = get_gradient_edge(y) if y.requires_grad else None  # None: of frozen layers before all others
        return y.detach()

    def backward(self, dy):
        """dy: the gradient of what forward returned. Returns that of x; parameters' are added to .grad."""
        if self.edge:
            torch.autograd.backward(self.edge, dy)
        return self.x.grad


class Pipeline:
    """This rank's stages of a pipeline, which run any lowered list. One stage and no transfers is ordinary training.

    stages: {stage: module} of this rank. stage_to_rank: {stage: rank} of all. loss(output, target): the last stage's.
    Activations and their gradients are sent as (B, T / cut, width), in dtype.
    """
    around = nullcontext  # a profiler's: around(action) goes around an action, around(None) around a wait in an action

    def __init__(self, stages, stage_to_rank, mesh, loss, dtype, width, device, cut=1):
        self.stages = stages
        self.stage_to_rank = stage_to_rank
        self.last_stage = len(stage_to_rank) - 1
        self.group = mesh.get_group("pp")
        self.loss = loss
        self.dtype = dtype
        self.width = width
        self.device = device
        self.cut = cut

    def run(self, actions, x, y, dloss=None, sync=None, beside=None):
        """x, y: tokens and targets of each micro-batch, (B, T). Returns the losses, detached, on the last stage.

        dloss: the gradient of each loss, from which its backward starts, a tensor of one number. sync: the optimizer
        that averages gradients, for its no_sync(); None for forwards alone. beside: of each micro-batch a dict of
        tensors that all stages' modules take besides x. After an exception the process group is of no more use,
        because messages may still be under way.
        """
        self.begin(actions, x, y, dloss, sync, beside or [{}] * len(x))
        for action in actions:
            with self.around(action):
                self.do(action)
        self.wait_for_sent(0)
        return self.losses

    def begin(self, actions, x, y, dloss, sync, beside):
        """Nothing of the step before is left."""
        self.x = x
        self.y = y
        self.beside = beside
        self.dloss = dloss
        self.sync = sync
        self.last_backward = {action.stage: action for action in actions if action.kind == "B"}
        self.micro_batches = {}  # (stage, number) -> MicroBatch, until its backward has ended
        self.results = {}        # an F or a B -> (handle, what it made), until a stage or a send takes it
        self.sending = deque()   # (handle, tensor) of each message that is on its way
        self.losses = []

    def do(self, action):
        match action.kind[0]:
            case "F":
                self.forward(action)
            case "B":
                self.backward(action)
            case "S":
                self.send(action)
            case "R":
                self.receive(action)

    def forward(self, action):
        _, s, i = action
        x = self.x[i] if s == 0 else self.wait_for(Action("F", s - 1, i))
        micro_batch = self.new_micro_batch(s)
        out = micro_batch.forward(x, self.y[i], **self.beside[i])
        if torch.is_grad_enabled():
            self.micro_batches[s, i] = micro_batch
        if s == self.last_stage:
            self.losses.append(out)
        else:
            self.results[action] = dist.Handle(), out

    def new_micro_batch(self, stage):
        return MicroBatch(self.stages[stage], self.loss_of(stage))

    def loss_of(self, stage):
        return self.loss if stage == self.last_stage else None

    def backward(self, action):
        _, s, i = action
        micro_batch = self.micro_batches.pop((s, i))
        dy = self.gradient_for(s, i)
        with self.averaging(action):
            dx = micro_batch.backward(dy)
        if s > 0:
            self.results[action] = dist.Handle(), dx

    def gradient_for(self, s, i):
        """Where a stage's backward starts: the gradient of the loss, or that of its output, from the next stage."""
        return self.dloss if s == self.last_stage else self.wait_for(Action("B", s + 1, i))

    def averaging(self, action):
        """A stage's gradients accumulate until its last backward, and may be sent from then on. (ZeRO 2 and 3 send in
        each backward, whatever no_sync says.)"""
        last = self.last_backward[action.stage] == action
        return nullcontext() if last else self.sync.no_sync()

    def wait_for(self, result):
        """What an action has made, on another rank, which has sent it, or in another stage of this one."""
        handle, tensor = self.results.pop(result)
        with self.around(None):
            handle.wait()
        return tensor

    def receive(self, action):
        """Post a receive into a new buffer; `wait_for` waits for it. All transfers go through one group. NCCL runs a
        group's transfers one after the other. That cannot hang, because `lower` gives both ends the same order."""
        buffer = self.room_for(action.micro_batch)
        handle = dist.irecv(buffer, group=self.group, group_src=self.stage_to_rank[action.stage])
        self.results[carried(action)] = handle, buffer

    def room_for(self, micro_batch):
        """A tensor that takes a micro-batch's activation between two stages, or its gradient."""
        batch, tokens = self.x[micro_batch].shape
        return torch.empty(batch, tokens // self.cut, self.width, dtype=self.dtype, device=self.device)

    def send(self, action):
        _, tensor = self.results.pop(carried(action))
        handle = dist.isend(tensor, group=self.group, group_dst=self.stage_to_rank[goes_to(action)])
        self.sending.append((handle, tensor))
        self.wait_for_sent(2)  # the latest two may travel while the next action computes

    def wait_for_sent(self, most):
        """Free outputs once they are sent, all but the latest `most`. Waiting for a send cannot hang: the proof in
        `lower` also covers sends that wait for their receives."""
        while len(self.sending) > most:
            handle, _ = self.sending.popleft()
            handle.wait()


# ----------------------------------------------------------------------------------------------------------------- norm

def copies(placement, groups):
    """On how many ranks of the groups the same gradient lies: if all ranks add up their squares, it counts so often.

        ranks / parts    ranks that hold this part of the parameter, because it is cut into so many parts
        x equal          parts whose gradients are the same, because they were added up over these ranks
        x twins          parameters of one rank that are the same

    Tied embedding, tp 2, pp 2. The table E is cut in two by tp, and the last stage has it, too:

        rank                     0            1            2            3
        stage                    first        first        last         last
        holds                    E_0          E_1          E_0 again    E_1 again      4 ranks / 4 parts
        gradient                 G_0          G_1          G_0          G_1            x 2 equal: the ends' sums

    A layer norm's weight there is cut by pp alone: 4 ranks / 2 parts. Sequence parallelism adds up its gradient over
    tp, which does not cut it: only a `partial_over` inside of `sharded_over` makes different parts equal.
    """
    size = dist.get_world_size
    ranks = math.prod(map(size, groups))
    parts = math.prod(map(size, placement.sharded_over))
    equal = math.prod(size(group) for group in placement.partial_over if inside(group, placement.sharded_over))
    return ranks * equal * placement.twins // parts


def inside(group, groups):
    """Whether one of `groups` has all ranks of a group."""
    ranks = torch.distributed.get_process_group_ranks
    return any(set(ranks(group)) <= set(ranks(other)) for other in groups)


def cut_over(parameters):
    """All groups over which any of these parameters is cut. Groups whose ranks are neighbours come first, and of these
    the small ones, so that all ranks use the groups in the same order."""
    groups = [group for param in parameters for group in placement_of(param).sharded_over]
    ranks = {group: torch.distributed.get_process_group_ranks(group) for group in groups}
    return sorted((group for group in ranks if len(ranks[group]) > 1),
                  key=lambda group: (ranks[group][1] - ranks[group][0], len(ranks[group])))


def params_of(optimizer):
    """What an optimizer steps; None steps nothing."""
    return [param for group in optimizer.param_groups for param in group["params"]] if optimizer else []


def clip_grad_norm_(parameters, max_norm, groups=None, scale=1.0):
    """Scale all gradients so that their norm over the whole model is at most max_norm (0: leave them); returns the
    norm, float64. Call it after finish_grad_sync, on all ranks.

    Every rank adds up the squares of its gradients, each divided by how often the same one counts (`copies`). This
    number is all-reduced over each group in turn, so each element of the model counts once. dp 2, tp 2, pp 2, ZeRO-1:

        on a rank                          cut over      copies    added by all 8 ranks
        shard of a matrix of stage 0       dp, tp, pp    1         8 different parts, of stage 0 and of stage 1
        shard of a norm's weight           dp, pp        2 (tp)    each part twice, halved
        shard of the tied embedding        dp, tp, pp    2 (sums)  stages 0 and 1 hold the same, halved

    groups: left out, those over which these parameters are cut. A pipeline gives [None], all ranks, because a stage may
    have no parameters; ValueError where a group is missing. scale: fp16's, divided out first.
    """
    parameters = list(dict.fromkeys([parameters] if isinstance(parameters, torch.Tensor) else parameters))
    groups = cut_over(parameters) if groups is None else list(map(group_or_world, groups))
    device = parameters[0].device if parameters else None
    parameters = [p for p in parameters if p.grad is not None]
    over = {group for p in parameters for group in placement_of(p).sharded_over if dist.get_world_size(group) > 1}
    if not all(inside(group, groups) for group in over):
        raise ValueError("clip_grad_norm_: a parameter is cut over a group that is not in `groups`")
    if scale != 1 and parameters:
        torch._foreach_mul_([p.grad for p in parameters], 1 / scale)
    grads = defaultdict(list)
    for p in parameters:
        grads[copies(placement_of(p), groups)].append(p.grad.detach())
    square = torch.zeros((), dtype=torch.float64, device=device)
    for n, equally_often in grads.items():
        square += torch.nn.utils.get_total_norm(equally_often).double().square() / n
    for group in groups:
        if dist.get_world_size(group) > 1:
            dist.all_reduce(square, group=group)
    norm = square.sqrt()
    if max_norm and parameters:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


# -------------------------------------------------------------------------------------------------------------- edition

class Lecture:
    """The lecture's edition: the classes and functions that train.parallelize makes a GPT of. A subclass is another
    edition.

    zero              the optimizer's class for each ZeRO stage
    sharded           wraps a stage's module at ZeRO-3 before it has weights, so that the stage is never whole on a rank
                      (further/prefetch.py); None: a stage is whole once, while the model is built
    muon              the highest ZeRO stage with --optimizer muon, which needs whole matrices
    columns           the layers that tensor parallelism cuts by columns
    tensor            f and g of tensor parallelism
    sequence          f and g of sequence parallelism; None: further/sequence.py's
    pieces_of         cuts the model into stages
    pipeline          runs gpipe and 1f1b
    halved            runs all other schedules; None: further/schedules.py's
    context, experts  options of context_parallel and expert_parallel
    """
    zero = ZeRO0, ZeRO1, ZeRO2, ZeRO3
    sharded = None
    muon = 0
    columns = ColumnParallelLinear
    tensor = CopyToGroup.apply, ReduceFromGroup.apply
    pieces_of = staticmethod(even_pieces)
    pipeline = Pipeline
    halved = None
    sequence = None
    context = {}
    experts = {}

    @classmethod
    def optimizer(cls, zero, params, optimizer_class, group, modules, dtype):
        """What steps the parameters of this rank's stages, `modules`, and averages their gradients over the group."""
        return cls.zero[zero](params, optimizer_class, group, modules, dtype)

    @classmethod
    def clip_grad_norm_(cls, optimizer, max_norm, groups, scale):
        return clip_grad_norm_(params_of(optimizer), max_norm, groups, scale)
