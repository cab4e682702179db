"""Parallel training, applied to a model from outside. In lecture order, each section adds one idea:

    mesh        which ranks form which group: axes (pp, dp, cp, tp), tensor parallel innermost
    data        replicas average their gradients: one all-reduce a parameter
    a step      is a list of actions; ZeRO 1 to 3 are where three letters stand in it
    units       what G, D and A do: weights and gradients of a piece travel as one message
    tensor      every matrix is cut by columns or rows; a sublayer costs one all-reduce forward, g, and one backward, f
    pipeline    pieces are spread over ranks: GPipe and 1F1B write the lists, `lower` adds the transfers
    running     `Pipeline` runs any list; `Parallel` is a model whose pieces run so
    norm        one gradient norm over any combination
    edition     which layers and functions `parallelize` takes; fast/ has others

train.py makes a GPT's pieces, and puts all this together in an order that works: `parallelize`.

A model of your own is a `Parallel`, too, if it is a chain of pieces. `group=None` is all ranks, as in
torch.distributed. Sections tell each other how a parameter is spread by its `Placement`.
`python -m lessons step`, `tensor`, `pipeline` show sections on a laptop.

Letters: N ranks in the group, r this rank, K parameters, m micro-batches, p pipeline ranks, v stages a rank; B, T, C, V
as in model.py. Read with: CS336 lectures 7 and 8; Ultra-Scale Playbook, the chapters of the same names.
"""

import copy
import functools
import inspect
import itertools
import math
from collections import defaultdict, deque
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
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
    average_over   an expert's: the group that keeps the same expert, and averages its gradient
    divide_by      an expert's: its gradient is the sum of so many ranks' losses, and their mean is wanted
    decays         whether it has weight decay; None: a matrix has, a vector has not
    fused          of a matrix that is several side by side, as q, k, v: their relative sizes
    cuts, whole    the `Cut`s that took this rank's part of the whole tensor, and the whole tensor's shape; these three
                   do not count in ==
    """
    sharded_over: tuple = ()
    partial_over: tuple = ()
    average_over: object = None
    divide_by: int = 1
    decays: bool = None
    fused: tuple = field(default=None, compare=False)
    cuts: tuple = field(default=(), compare=False)
    whole: tuple = field(default=None, compare=False)


WHOLE = Placement()  # made once, because every step asks for the placement of every parameter


def placement_of(param):
    return getattr(param, "placement", WHOLE)


def set_placement(param, **changes):
    """Change fields of a parameter's placement."""
    param.placement = replace(placement_of(param), **changes)


def is_matrix(param):
    """Whether a parameter has weight decay: matrices have, biases and norms have not. (ZeRO cuts all of them.)"""
    decays = placement_of(param).decays
    return param.dim() >= 2 if decays is None else decays


# ---------------------------------------------------------------------------------------------- data parallel: replicas
#
# Every rank holds the whole model and sees its own part of the batch. Gradients are averaged, so replicas stay equal:
# an all-reduce of K elements, 2(N-1)/N x K sent by each rank and step, however many micro-batches the step has.

def average_gradients(module, group=None):
    """After backward, on all ranks: one all-reduce a parameter. Each tensor, however small, pays the latency of a
    collective, and nothing computes meanwhile. A rank that has not used a parameter sends zeros."""
    for param in module.parameters():
        if param.requires_grad:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            dist.all_reduce(param.grad, dist.ReduceOp.AVG, group)


# ----------------------------------------------------------------------------------------------------- a step is a list
#
# In data parallelism every rank keeps the same. ZeRO lets each keep 1/N. K parameters, float32, Adam; bytes a rank:
#
#                  parameters   gradients   optimizer    sent a step, elements
#     stage 0          4K           4K          8K       2 (N-1)/N K              all-reduce
#     stage 1          4K           4K          8K/N     2 (N-1)/N K              reduce-scatter, all-gather: its halves
#     stage 2          4K           4K/N        8K/N     (m+1) (N-1)/N K          reduce-scatter m times, all-gather
#     stage 3          4K/N         4K/N        8K/N     3m (N-1)/N K             m x (2 all-gathers, reduce-scatter)
#
# (Stage 3 sends a little less: the last piece stays whole from F to B, and an embedding's B needs no weights.)
#
# The model is a chain of pieces: the embedding, each block, the head. What a rank does in a step is a list of actions:
#
#     F    forward of a piece                            B    its backward
#     G    start to gather the piece's weights           F and B wait for it
#     D    drop them
#     A    start to average the piece's gradients        the end of the step waits for it
#
# ZeRO's stages are where G, D and A stand. The step of a model of three pieces, 0, 1 and 2:
#
#     stage 0          F0       F1       F2    B2    A2 B1    A1 B0 A0
#     stage 1    G0 G1 F0    G2 F1       F2    B2    A2 B1    A1 B0 A0      2: with m micro-batches, an A behind each B
#     stage 3    G0 G1 F0 D0 G2 F1 D1    F2 G1 B2 D2 A2 B1 D1 A1 B0 A0      an embedding's B needs no weights
#
# A G stands one computation ahead of the one that needs the weights, so they travel while the one before computes: this
# is called prefetching. Nobody waits for an A until the step ends, so gradients travel while the next B computes: this
# is called overlap. Besides the table's bytes, stage 3 holds the weights of two pieces, and of a tied embedding while
# the head computes. Stages 2 and 3 hold the gradients of three pieces: one computes, two travel.
#
# Rajbhandari et al., "ZeRO" (2020). PyTorch's pipelines call the letters UNSHARD, RESHARD and REDUCE_GRAD. CS336
# lecture 7. `python -m lessons step --dp 2 --zero 3` prints the list of a step.

class Action(NamedTuple):
    """What a rank does for one micro-batch in one piece, or in one stage, which is a run of pieces.

    kind: F, B, G, D or A. For pipelines also SF and RF, which send and receive what an F has made, SB and RB what a B
    has made. They carry the number of the piece of that F or B, so rank 1 runs RF of a piece of rank 0.
    """
    kind: str
    stage: int
    micro_batch: int

    def __str__(self):
        return f"{self.kind}{self.micro_batch}"


def with_weights(actions, zero, lookups=(), shared={}):
    """A rank's computations with G, D and A, as stage `zero` of ZeRO has them.

    lookups: pieces whose backward needs no weights. shared: {piece: pieces whose A averages some of its gradients}, as
    an embedding's A those of a tied head.
    """
    before = defaultdict(list)
    after = defaultdict(list)
    whole = set()  # pieces whose weights are there, or on their way
    last = {}      # an A -> the last backward whose gradients it averages
    for n, action in enumerate(actions):
        piece = action.stage
        if zero >= 1 and piece not in whole and (action.kind == "F" or piece not in lookups):
            before[max(0, n - 1)].append(action._replace(kind="G"))
            whole.add(piece)
        stays = n + 1 < len(actions) and actions[n + 1].stage == piece  # as the last piece, from F to B
        if zero == 3 and piece in whole and not stays:
            after[n].append(action._replace(kind="D"))
            whole.remove(piece)
        if action.kind in ("B", "W"):
            for averaged in [piece, *shared.get(piece, [])]:  # stages 0 and 1: one A a piece, behind its last B
                last[averaged, action.micro_batch if zero >= 2 else None] = n  # 2 and 3: one for each micro-batch
    for (piece, _), n in last.items():
        after[n].append(Action("A", piece, actions[n].micro_batch))
    return [one for n, action in enumerate(actions) for one in [*before[n], action, *after[n]]]


# --------------------------------------------------------------------------------- units: what G, D and A do to a piece
#
# A piece's parameters travel in one message, as one `Unit`. The unit lays their numbers side by side, in N rows of
# equal length, and row r is rank r's. A matrix of 6, one of 4 and a vector of 1, on 2 ranks:
#
#     row 0      W W W W W W        rank 0 steps these
#     row 1      V V V V b .        rank 1 steps these; the last number is padding
#
#     G    all-gather the rows              each parameter is a view of them
#     D    free their memory                each parameter is NaN, so that nobody computes with memory that is not there
#     A    lay the gradients side by side, reduce-scatter them: each rank has the average of its row
#
# Stage 0 keeps all rows on every rank. That is one row for this code, and A is an all-reduce.
#
# A step of stage 1 on 2 ranks. x and y are their gradients, x0 and x1 rows of them:
#
#                backward    A: the mean's own row    optimizer    G of the next step
#     rank 0     x0 x1       g0 = (x0 + y0) / 2       w0 -> w0'    w0' w1'
#     rank 1     y0 y1       g1 = (x1 + y1) / 2       w1 -> w1'    w0' w1'
#
# Mixed precision: layers compute with 16-bit weights, and the optimizer steps float32 masters of them. Gradients are
# added up in float32, too. bf16 has 8 significant bits, so in bf16 0.02 - 0.00001 is 0.02.

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64,
              "fp8": torch.bfloat16}  # of all but blocks' products, which fast/fp8.py has in 8 bits


def master_dtype(dtype):
    """What the optimizer steps weights of this dtype in, and gradients are added up in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class Unit:
    """Parameters that travel together.

    weights    (N, K/N)    what layers compute with; each parameter is a view of it
    mine       (K/N)       this rank's row, in the master dtype; where the layers' dtype is that, stages 0 to 2 have no
                           other copy: it is the row of `weights`
    stepped    {parameter: what the optimizer steps of it}, a view of its part of `mine`. It is empty where the row has
               nothing of the parameter.

    params: with their initial values. group: the ranks that average their gradients. dtype: of the layers.
    """

    def __init__(self, params, group, zero, dtype):
        self.params = params
        self.group = group
        self.zero = zero
        self.trained = params[0].requires_grad
        self.divide_by = placement_of(params[0]).divide_by
        ranks = dist.get_world_size(group) if zero else 1
        rank = dist.get_rank(group) if zero else 0
        self.starts, self.width = self.lay_out(ranks)
        self.first = rank * self.width  # where this rank's row begins
        rows = self.in_rows([param.detach() for param in params], ranks)
        self.weights = rows.to(dtype)
        self.row = self.weights[rank]
        self.has_master = zero == 3 or dtype != master_dtype(dtype)
        self.mine = rows[rank].to(master_dtype(dtype), copy=True) if self.has_master else self.row
        self.stepped = {param: self.make_stepped(param) for param in params}
        self.partial_over = placement_of(params[0]).partial_over
        self.users = 0         # pieces that have gathered it and not dropped it: two, of a tied embedding
        self.gathering = None  # the handle of the gather under way
        self.sending = None    # (handle, rows, average) of the average under way
        self.total = None      # the sum of the averages that have come, (K/N)
        self.views = self.views_of(self.weights)
        self.nothing = self.weights.new_full((), math.nan)
        self.show(self.views)
        if zero == 3:
            self.free()

    @torch.no_grad()
    def gather(self):
        """G: start to all-gather the rows, unless another piece has."""
        self.users += 1
        if self.users == 1:
            self.make_room()
            self.cast()
            self.gathering = dist.all_gather_into_tensor(self.weights, self.row, self.group, async_op=True)

    def wait(self):
        """Until the weights are there."""
        if self.gathering:
            self.gathering.wait()
            self.gathering = None

    def drop(self):
        """D: free the rows' memory, unless another piece needs it."""
        self.users -= 1
        if self.users == 0:
            self.free()

    @torch.no_grad()
    def start_average(self):
        """A: start to average the gradients."""
        self.finish_average()  # of the micro-batch before
        rows = self.take_gradients()                                                          # (N, K/N)
        if self.divide_by > 1:
            rows /= self.divide_by
        if self.zero:
            average = torch.empty_like(self.mine)
            handle = dist.reduce_scatter_tensor(average, rows, dist.ReduceOp.AVG, self.group, async_op=True)
        else:
            average = rows[0]
            handle = dist.all_reduce(rows, dist.ReduceOp.AVG, self.group, async_op=True)
        self.sending = handle, rows, average

    @torch.no_grad()
    def finish_average(self):
        """Wait for the average under way, and add it to those of the micro-batches before."""
        if not self.sending:
            return
        handle, _, average = self.sending
        self.sending = None
        handle.wait()
        if self.total is None:
            self.show_average(average)
        else:
            self.total += average

    # Weights: their memory, and what the optimizer has stepped.

    def make_room(self):
        """What forward saves for backward are views of `weights`. The memory under them may go and come back: backward
        then reads the same numbers."""
        if not self.weights.untyped_storage().size():
            self.weights.untyped_storage().resize_(self.weights.nbytes)
            self.show(self.views)

    def free(self):
        self.wait()
        self.users = 0
        if self.weights.untyped_storage().size():
            self.show([self.nothing.expand(param.shape) for param in self.params])
            self.weights.untyped_storage().resize_(0)

    def show(self, tensors):
        for param, tensor in zip(self.params, tensors):
            param.data = tensor

    @torch.no_grad()
    def refresh(self):
        """After the optimizer's step. In stages 1 and 2 the weights are old until the next G."""
        if self.zero in (1, 2):
            self.users = 0
        elif self.zero == 0:
            self.cast()

    def cast(self):
        """Write this rank's row in the layers' dtype."""
        if self.has_master:
            self.row.copy_(self.mine)

    # Gradients.

    def take_gradients(self):
        """All gradients side by side; .grad is None then. What no backward has used counts as zero."""
        grads = [torch.zeros_like(param, dtype=self.mine.dtype) if param.grad is None else param.grad
                 for param in self.params]
        for param in self.params:
            param.grad = None
        return self.in_rows(grads, len(self.weights))

    def show_average(self, average):
        self.total = average
        for param, stepped in self.stepped.items():
            stepped.grad = self.part_of(average, param)

    def zero_grad(self):
        """Drop all gradients, and what an unfinished step has left."""
        self.finish_average()
        self.total = None
        for param, stepped in self.stepped.items():
            param.grad = None
            stepped.grad = None
        if self.zero == 3:
            self.free()

    # Where numbers lie.

    def lay_out(self, ranks):
        """({parameter: where its first number stands among all}, the length of a row)"""
        ends = [*itertools.accumulate(param.numel() for param in self.params)]
        return dict(zip(self.params, [0, *ends])), -(-ends[-1] // ranks)

    def in_rows(self, tensors, ranks):
        """Tensors of the parameters' shapes side by side, (N, K/N), with padding behind them."""
        numbers = torch.cat([tensor.flatten() for tensor in tensors])
        return F.pad(numbers, (0, ranks * self.width - numbers.numel())).view(ranks, -1)

    def views_of(self, rows):
        """Each parameter's numbers in rows (N, K/N), in its shape."""
        return [rows.view(-1)[start:start + param.numel()].view(param.shape) for param, start in self.starts.items()]

    def here(self, param):
        """From which to which of all numbers this rank's row has the parameter's."""
        start = self.starts[param]
        return [min(max(self.first, at), self.first + self.width) for at in (start, start + param.numel())]

    def part_of(self, row, param):
        """What this rank's row has of a parameter: in the parameter's shape if all of it is there, else flat."""
        low, high = self.here(param)
        part = row[low - self.first:high - self.first]
        return part.view(param.shape) if part.numel() == param.numel() else part

    def make_stepped(self, param):
        stepped = nn.Parameter(self.part_of(self.mine, param), param.requires_grad)
        is_whole = stepped.shape == param.shape
        before = placement_of(param)
        over = before.sharded_over + ((self.group,) if self.zero else ())
        # The shape of a part does not say whether it has weight decay, and no Cut made it.
        stepped.placement = replace(before, sharded_over=over, decays=is_matrix(param),
                                    cuts=before.cuts if is_whole else (), whole=before.whole if is_whole else None)
        param.grad_dtype = self.mine.dtype  # PyTorch's: autograd casts what it adds to .grad to this dtype
        return stepped

    def kept(self, param):
        """For checkpoints: (the stepped tensor, which of the flat parameter's numbers it has)."""
        low, high = (at - self.starts[param] for at in self.here(param))
        return self.stepped[param], slice(low, high) if low < high else slice(0)


def params_together(pieces, group, apart=lambda param: None):
    """Which parameters of this rank's pieces, {number: module}, travel together: {(piece, the ranks that average them,
    ...): [parameter]}.

    A parameter of two pieces, as a tied embedding, belongs to the lower one, because its backward ends last. Experts,
    which other ranks average, are apart, and so are frozen parameters, those that must still be added up over other
    ranks, and those of which `apart` says different things.
    """
    together = defaultdict(list)
    seen = set()
    for piece in sorted(pieces):
        for param in pieces[piece].parameters():
            if param not in seen:
                place = placement_of(param)
                ranks = place.average_over or group
                together[piece, ranks, place.divide_by, place.partial_over, param.requires_grad,
                         apart(param)].append(param)
            seen.add(param)
    return together


def make_units(pieces, group, zero, dtype):
    """Lay the parameters of pieces, {number: module}, into units: [(the piece whose A averages it, the unit)]."""
    return [(piece, kernels.table[Unit](params, ranks, zero, dtype))
            for (piece, ranks, *_), params in params_together(pieces, group).items()]


# --------------------------------------------------------------------------------------------- tensor parallel: f and g
#
# Y = GeLU(X A) B. A is cut by columns, so each rank computes its slice of the hidden layer alone, GeLU included. B is
# cut by rows to match, so each rank has a full-size Y that is one term of the sum. One all-reduce adds them up:
#
#          ┌─ X ─ A_0 ─ GeLU ─ B_0 ─ Y_0 ─┐
#     X ─ f                                g ─ Y    f: forward identity, backward all-reduce (all used X: dX adds up)
#          └─ X ─ A_1 ─ GeLU ─ B_1 ─ Y_1 ─┘        g: forward all-reduce, backward identity (dY reaches each term as is)
#
# Ranks hold one of three things in place of a tensor: all the same (X, Y), each its columns (X A), or each a term of
# the sum (Y_r, and of X's gradient each rank's columns of A have made a term). Where ranks have terms, g in forward and
# f in backward add them up, so that all have the same.
# A parameter that is the same on all ranks may have terms of a gradient, too: the weight of a norm that saw some of the
# tokens. Its `placement.partial_over` says over which ranks these must be added up before the step.
# `python -m lessons types` follows this through a step, in one process.
#
# X is (BT, in), A (in, out). (B beside A is the second matrix, in BT and BTC the sequences.) A layer's `weight` is A
# transposed, as in model.py. Attention is the same with heads for columns. A block, attention and MLP, sends
# 2 x 2(N-1)/N x BTC elements forward and as many backward. Until backward a rank keeps all of X and 1/N of the hidden
# layer. Shoeybi et al., "Megatron-LM" (2019); CS336 lecture 8.

class CopyToGroup(torch.autograd.Function):
    """f: forward identity, backward all-reduce: X went into every rank's columns of A, so dX adds up. Nothing is
    computed while it travels."""

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

    A token outside of 0 .. V-1 has the embedding NaN."""

    def __init__(self, embedding, group, g):
        super().__init__()
        refuse_unlike(embedding, nn.Embedding)
        self.g = g
        self.cut = Cut(group, 0)
        self.rows = embedding.num_embeddings
        if self.rows < self.cut.size:
            raise ValueError(f"an embedding of {self.rows} rows cannot be cut over {self.cut.size} ranks")
        self.weight = local_parameter(embedding.weight, self.cut)
        self.first = self.cut.first(self.rows)

    def forward(self, tokens):                                                                # (...)
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        invalid = (tokens < 0) | (tokens >= self.rows)
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)                         # (..., C)
        x = x.masked_fill(elsewhere.unsqueeze(-1), 0)  # another rank has the row
        return self.g(x.masked_fill(invalid.unsqueeze(-1), math.nan), self.cut.group)


SIZES = "in_features", "out_features", "num_embeddings", "embedding_dim", "_parameters", "training"


def refuse_unlike(layer, kind):
    """ValueError for a layer that does more than its kind: what takes its place multiplies and adds a bias, or looks up
    rows. A subclass of nn.Linear with a forward of its own says by `is_plain` that it does no more."""
    plain = vars(kind(1, 1, device="meta"))
    more = [name for name, value in vars(layer).items() if name not in SIZES and value != plain.get(name)]
    hooks = "_backward_hooks", "_post_accumulate_grad_hooks"  # which would see a part of the gradient
    more += [f"weight{name}" for name in hooks if getattr(getattr(layer, "weight", None), name, None)]
    if more or not (type(layer) is kind or isinstance(layer, kind) and getattr(layer, "is_plain", False)):
        raise ValueError(f"a plain {kind.__name__} can be cut over ranks, not {type(layer).__name__}"
                         f"{' with ' * bool(more)}{', '.join(more)}: leave it out of the table")


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
    targets that count: kernels.checked_targets says which."""
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


def tensor_parallel(module, group, plan=None):
    """Put this rank's slices, of the first rank's weights, in place of the layers that the plan names; left out, it is
    a GPT's `gpt2_plan`. N must divide the heads. Parameters stay the objects that they are, so ties stay ties."""
    plan = plan or gpt2_plan(CopyToGroup.apply, ReduceFromGroup.apply)
    start_alike(module, group)
    cut = {}  # a layer -> its slice
    for name, layer in [*module.named_modules(remove_duplicate=False)]:
        if how := planned(name, plan):
            cut[layer] = cut.get(layer) or how(layer, group)
            module.set_submodule(name, cut[layer])
    return module


def start_alike(module, group):
    """All ranks of the group take the first one's weights and buffers, but for what is cut over them, or has no memory
    yet."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_meta and group_or_world(group) not in placement_of(tensor).sharded_over:
            dist.broadcast(tensor.detach(), group=group, group_src=0)


# ----------------------------------------------------------------------------------- pipeline: layers spread over ranks
#
# Each rank holds a stage, a run of consecutive layers. A batch passes through all stages in m micro-batches, so that p
# ranks can compute at the same time. Each rank idles, in all, as long as a micro-batch and its gradient need for the
# other p-1 stages: (p-1) (F + B), of the times that a stage takes for a micro-batch's forward and backward. This is the
# bubble. Micro-batches go between neighbours alone: B T C elements forward, and as many backward. CS336 lecture 7.
# Lecture 8's loop, which receives, computes and sends: `gpipe_step` of lessons/lecture8.py.
#
# GPipe holds activations of all m micro-batches. 1F1B runs the same forwards and backwards in another order, and rank r
# holds those of p - r. So that one loop can run any order, a schedule is data, a list of actions for each rank:
#
#     F2    forward of micro-batch 2 through a stage
#     B2    its backward: the gradients of the stage's weights, and that of its input, which the stage before waits for
#
# 1F1B for p = 4, m = 6, drawn as if B took as long as F; dots are the bubble:
#
#     rank 0    F0 F1 F2 F3 .. .. .. B0 F4 B1 F5 B2 .. B3 .. B4 .. B5
#     rank 1    .. F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 B3 .. B4 .. B5 ..
#     rank 2    .. .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 F5 B4 .. B5 .. ..
#     rank 3    .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .. .. ..
#
# Functions write the lists, `lower` adds the transfers, and `Pipeline` runs them. Stage s is on rank s here. Schedules
# of further/schedules.py idle less: ranks have several stages, and a B is split in two. further/lists.py checks lists.

def gpipe(p, m, v=1):
    """All forwards, then all backwards. Huang et al., "GPipe" (2019). (v: other schedules have v stages a rank.)"""
    return [whole_batch("F", r, m) + whole_batch("B", r, m) for r in range(p)]


def whole_batch(kind, stage, m):
    return [Action(kind, stage, i) for i in range(m)]


def one_f_one_b(p, m, v=1):
    """Rank r runs p-1-r forwards ahead, then one forward, one backward, in turn: at most p-r activations, whatever m.

    A micro-batch is away for (p-r) (F + B): through p-r ranks forward and back. In that time the rank can run p-r F and
    p-r B, so p-r micro-batches keep it busy. Narayanan et al., "PipeDream-2BW" (2020), call it PipeDream-Flush.
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
    needed = {"F": [Action("F", s - 1, i)], "B": of_backward, "I": of_backward, "W": [Action("B", s, i)]}.get(kind, [])
    return [action for action in needed if action.stage in stages]  # not before the first one, or after the last


def result_of(action):
    """The action under whose name others know what this one makes: an I makes what a B makes for the stage before.
    Nobody waits for a W or a transfer: None."""
    if action.kind == "I":
        return action._replace(kind="B")
    return action if action.kind in ("F", "B") else None


def goes_to(action):
    """The stage that waits for what an F or a B makes. (After the last stage's F, or the first's B, a number that no
    stage has.)"""
    return action.stage + (1 if action.kind[-1] == "F" else -1)


def in_order(lists, can_run=None):
    """All ranks' lists as one, in an order in which they can run: [(rank, action)].

    In each turn, each rank runs its next action if all that it needs was made in earlier turns. ScheduleError if no
    rank can go on. 1F1B for p = 2, m = 2:

        turn       1   2   3   4   5   6
        rank 0    F0  F1   .  B0   .  B1    in turn 3, its B0 still needs the result of rank 1's B0
        rank 1     .  F0  B0  F1  B1

    can_run(action, done, waiting): another rule; done: all actions so far and their results; waiting: all ranks' next
    actions.
    """
    stages = ranks_of_stages(lists)
    can_run = can_run or (lambda action, done, waiting: done.issuperset(needs(action, stages)))
    at = [0] * len(lists)  # how far each rank has come
    done = set()
    order = []
    while unfinished := [rank for rank, actions in enumerate(lists) if at[rank] < len(actions)]:
        waiting = {lists[rank][at[rank]] for rank in unfinished}
        turn = [rank for rank in unfinished if can_run(lists[rank][at[rank]], done, waiting)]
        if not turn:
            stuck = [f"rank {rank} waits at {names_of(lists[rank], rank)[at[rank]]}" for rank in unfinished]
            raise ScheduleError(lists, {rank: at[rank] for rank in unfinished},
                                f"deadlock: no rank can go on: {', '.join(stuck)}")
        for rank in turn:
            action = lists[rank][at[rank]]
            order.append((rank, action))
            done |= {action, result_of(action)}
            at[rank] += 1
    return order


class ScheduleError(ValueError):
    """Lists that cannot run. Its text is the reason and the lists, with an arrow before action at[rank] of each rank in
    `at`."""

    def __init__(self, lists, at, why):
        self.lists = lists
        self.at = at
        lines = [why]
        for rank, actions in enumerate(lists):
            cells = names_of(actions, rank) + ["end"]
            if rank in at:
                cells.insert(at[rank], "->")
            lines.append(f"rank {rank}  " + " ".join(cells))
        super().__init__("\n".join(lines))


def names_of(actions, rank):
    """A rank's actions as text. Unless stage `rank` is its only one, F0/2 is F0 of stage 2, RF0/2 receives its result.
    """
    numbered = {action.stage for action in actions if action.kind[0] not in "SR"} != {rank}
    return [f"{action}/{action.stage}" if numbered else str(action) for action in actions]


def lower(lists):
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
    for rank, action in in_order(lists):
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


def even_runs(pieces, stages):
    """Cut a chain of pieces into as many runs of about equal length: [range of the first stage's pieces, ...]."""
    if stages > pieces:
        raise ValueError(f"{stages} stages are more than {pieces} pieces: give at most {pieces} stages, p ranks of the "
                         f"pipeline times `stages`")
    starts = [pieces * stage // stages for stage in range(stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def into_pieces(actions, pieces_of):
    """A rank's actions of stages as actions of pieces: F goes through the stage's pieces, and backward comes back
    through them. pieces_of: of each stage the range of its pieces."""
    return [Action(kind, piece, i) for kind, stage, i in actions
            for piece in (pieces_of[stage] if kind == "F" else reversed(pieces_of[stage]))]


def ranks_of_pieces(runs, stage_to_rank):
    """{piece: its rank}. runs: as of even_runs."""
    return {piece: stage_to_rank[stage] for stage, run in enumerate(runs) for piece in run}


# ------------------------------------------------------------------------------------------------------- running a list

class MicroBatch:
    """One micro-batch in one piece: forward, later backward. loss(output, target): the last piece's, else None.

    In between it holds the piece's input, and the edge in autograd's graph where backward starts. So the output, BTC
    numbers, can be freed once it is sent.
    """

    def __init__(self, module, loss):
        self.module = module
        self.loss = loss

    def forward(self, x, target=None, **beside):
        """x: what the first piece takes, or the output of the piece before. beside: what else the module takes. Returns
        this piece's output, or the loss: a leaf of autograd's, if there is something to train so far."""
        self.x = x
        y = self.output(**beside)
        if self.loss:
            y = self.loss(y, target)
        self.edge = get_gradient_edge(y) if y.requires_grad else None  # None: all pieces so far are frozen
        return y.detach().requires_grad_(y.requires_grad)

    def output(self, **beside):
        return self.module(self.x, **beside)

    def backward(self, dy):
        """dy: the gradient of what forward returned. Returns that of x; parameters' are added to .grad."""
        if self.edge:
            torch.autograd.backward(self.edge, dy)
        return self.x.grad


class Pipeline:
    """This rank's pieces, which run any list. One rank and no transfers is ordinary training.

    pieces: {number: module} of this rank. piece_to_rank: {number: rank} of all. units, averaged: as make_units returns
    them. loss(output, target): the last piece's. shape(i, x): of piece i's output, for an input x of the first piece.
    mesh: its "pp" are the ranks of the pipeline.
    """
    around = nullcontext  # a profiler's: around(action) goes around an action, around(None) around a wait in an action
    micro_batch = MicroBatch
    computes = "FB"  # the kinds of computations that it runs

    def __init__(self, pieces, piece_to_rank, units, averaged, loss, mesh, shape, dtype, device):
        self.pieces = pieces
        self.piece_to_rank = piece_to_rank
        self.last_piece = len(piece_to_rank) - 1
        self.units = units
        self.averaged = averaged
        self.loss = loss
        self.mesh = mesh
        self.group = mesh.get_group("pp")
        self.shape = shape
        self.dtype = dtype
        self.device = device

    def run(self, actions, x, y, dloss=None, beside=None):
        """x, y: inputs and targets of each micro-batch. Returns the losses, detached, on the rank of the last piece.

        dloss: the gradient of each loss, from which its backward starts, a tensor of one number; None for forwards
        alone. beside: of each micro-batch a dict of tensors that all modules take besides x. After an exception the
        process group is of no more use, because messages may still be under way.
        """
        self.x = x
        self.y = y
        self.dloss = dloss
        self.beside = beside or [{}] * len(x)
        self.micro_batches = {}   # (piece, number) -> MicroBatch, until its backward has ended
        self.results = {}         # an F or a B -> (handle, what it made), until a piece or a send takes it
        self.sending = deque()    # (handle, tensor) of each transfer that is on its way
        self.averaging = deque()  # units whose average is on its way
        self.losses = []
        for action in actions:
            with self.around(action):
                self.do(action)
        self.wait_for_sent(0)
        self.wait_for_averages(0)
        return self.losses

    def do(self, action):
        piece = action.stage
        match action.kind[0]:
            case "F":
                self.wait_for_weights(piece)
                self.forward(action)
            case "B":
                self.wait_for_weights(piece)
                self.backward(action)
            case "G":
                for unit in self.units[piece]:
                    unit.gather()
            case "D":
                for unit in self.units[piece]:
                    unit.drop()
            case "A":
                self.average(piece)
            case "S":
                self.send(action)
            case "R":
                self.receive(action)

    def forward(self, action):
        _, piece, i = action
        x = self.x[i] if piece == 0 else self.wait_for(Action("F", piece - 1, i))
        if piece > 0 and piece - 1 not in self.pieces:
            x.requires_grad_(torch.is_grad_enabled())  # another rank trains what has made it
        is_last = piece == self.last_piece
        micro_batch = self.micro_batch(self.pieces[piece], self.loss if is_last else None)
        out = micro_batch.forward(x, self.y[i], **self.beside[i])
        if not is_last and piece + 1 not in self.pieces:
            self.check_sent(out, piece, i)
        if torch.is_grad_enabled():
            self.micro_batches[piece, i] = micro_batch
        if is_last:
            self.losses.append(out.detach())
        else:
            self.results[action] = dist.Handle(), out

    def check_sent(self, out, piece, i):
        """ValueError unless the next rank has made room for this output, (shape, dtype)."""
        room = torch.Size(self.shape(piece, self.x[i])), self.dtype
        if (out.shape, out.dtype) != room:
            raise ValueError(f"piece {piece} returns {tuple(out.shape)} of {out.dtype}, but what the next rank of the "
                             f"pipeline receives is {tuple(room[0])} of {room[1]}: give the model's shape= and dtype=")

    def backward(self, action):
        _, piece, i = action
        micro_batch = self.micro_batches.pop((piece, i))
        dx = micro_batch.backward(self.gradient_for(piece, i))
        if piece > 0:
            self.results[action] = dist.Handle(), dx

    def gradient_for(self, piece, i):
        """Where a piece's backward starts: the gradient of the loss, or that of its output, from the next piece."""
        return self.dloss if piece == self.last_piece else self.wait_for(Action("B", piece + 1, i))

    def wait_for(self, result):
        """What an action has made: another rank's, which has sent it, or one of this rank's."""
        handle, tensor = self.results.pop(result)
        with self.around(None):
            handle.wait()
        return tensor

    def wait_for_weights(self, piece):
        for unit in self.units[piece]:
            with self.around(None):
                unit.wait()

    def average(self, piece):
        for unit in self.averaged[piece]:
            if unit.trained:
                unit.start_average()
                self.averaging.append(unit)
        self.wait_for_averages(2)  # the latest two may travel while the next action computes

    def wait_for_averages(self, most):
        while len(self.averaging) > most:
            with self.around(None):
                self.averaging.popleft().finish_average()

    def receive(self, action):
        """Post a receive into a new buffer; `wait_for` waits for it. All transfers go through one group. NCCL runs a
        group's transfers one after the other. That cannot hang, because `lower` gives both ends the same order."""
        between = min(action.stage, goes_to(action))  # this piece's output travels, or its gradient
        buffer = torch.empty(self.shape(between, self.x[action.micro_batch]), dtype=self.dtype, device=self.device)
        handle = dist.irecv(buffer, group=self.group, group_src=self.piece_to_rank[action.stage])
        self.results[carried(action)] = handle, buffer

    def send(self, action):
        _, tensor = self.results.pop(carried(action))
        tensor = tensor.detach().contiguous()
        handle = dist.isend(tensor, group=self.group, group_dst=self.piece_to_rank[goes_to(action)])
        self.sending.append((handle, tensor))
        self.wait_for_sent(2)  # the latest two may travel while the next action computes

    def wait_for_sent(self, most):
        """Free outputs once they are sent, all but the latest `most`. Waiting for a send cannot hang: the proof in
        `lower` also covers sends that wait for their receives."""
        while len(self.sending) > most:
            handle, _ = self.sending.popleft()
            handle.wait()


# ------------------------------------------------------------------------------------------- a model, spread over ranks

class Parallel:
    """A model that is a chain of pieces, and what a training loop does with this rank's part of it.

        mesh = make_mesh("cpu", dp=2)
        adamw = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
        net = Parallel([embedding, block, block, head], loss, mesh, zero=3, optimizer=adamw)
        net.zero_grad()
        mean = net.forward_backward(x, y)              x, y: lists of this replica's micro-batches
        norm = net.clip_grad_norm_(1.0)
        net.step()

    pieces      modules that each take a tensor and return one. Parameters are called i.name, in piece number i. What
                shall not be trained is frozen before. None stands for a piece that another rank of the pipeline has.
    loss        (output, target) -> of a micro-batch, summed over as many losses as count(target) says; left out, the
                target's elements
    zero        ZeRO's stage, over dp
    schedule    the pipeline's, with so many `stages` on each rank
    optimizer   a class from torch.optim whose update goes element by element, with its options, as a partial; None: for
                evaluation. Matrices alone have weight decay. What no backward has used has a gradient of zeros.
    dtype       the layers'; with 16 bits the optimizer steps float32 masters
    shape       (i, x) -> of piece i's output for an input x of the first piece. A pipeline needs it where pieces are
                None, are cut, or take more than x; else it is found.
    runs        of each stage the range of its pieces; left out, about equally long
    groups      of this rank: pp; dp_cp, the replicas; shard, the ranks that ZeRO cuts over; left out, the mesh's
    """
    lookups = ()  # pieces whose backward needs no weights, as an embedding's

    def __init__(self, pieces, loss, mesh, zero=0, schedule=one_f_one_b, stages=1, optimizer=None, dtype=torch.float32,
                 count=None, shape=None, groups=None, pipeline=Pipeline, units=make_units, runs=None):
        self.mesh = mesh
        self.zero = zero
        self.schedule = schedule
        self.stages = stages
        self.dtype = dtype
        self.count = count or torch.numel
        group = mesh.get_group("dp")
        self.groups = groups or SimpleNamespace(pp=mesh.get_group("pp"), dp_cp=group, shard=group)
        p = mesh["pp"].size()
        lists = schedule(p, 2 * p, stages)
        stage_to_rank = ranks_of_stages(lists)
        self.runs = runs or even_runs(len(pieces), len(stage_to_rank))
        self.piece_to_rank = ranks_of_pieces(self.runs, stage_to_rank)
        self.pieces = {i: pieces[i] for i in stages_on(dist.get_rank(self.groups.pp), self.piece_to_rank)}
        here = (param.device for piece in self.pieces.values() for param in piece.parameters())
        self.device = next(here, torch.device(mesh.device_type))
        self.shapes = None if None in pieces else {
            name: whole_shape(param) for param, name in param_names(dict(enumerate(pieces))).items()}
        self.check_given(pieces, loss, lists, pipeline, groups, shape)
        shape = shape or (shapes_of(pieces) if p > 1 else None)
        for piece in self.pieces.values() if not groups else ():
            start_alike(piece, mesh.get_group("tp"))
            start_alike(piece, self.groups.dp_cp)
        if p > 1:
            self.note_other_pieces()
        made = units(self.pieces, self.groups.shard, zero, dtype)
        self.units = [unit for _, unit in made]
        self.unit_of = {param: unit for unit in self.units for param in unit.params}
        averaged = {i: [unit for piece, unit in made if piece == i] for i in self.pieces}
        used = {i: [*dict.fromkeys(self.unit_of[param] for param in piece.parameters())]
                for i, piece in self.pieces.items()}
        kind = kernels.table[pipeline]
        self.pipeline = kind(self.pieces, self.piece_to_rank, used, averaged, loss, mesh, shape, dtype, self.device)
        self.shared = {i: [j for j in averaged if j != i and not {*averaged[j]}.isdisjoint(used[i])] for i in used}
        self.made = {}     # lists that have been made
        self.seen = set()  # numbers of micro-batches on which all replicas have agreed
        self.optimizer = optimizer(self.param_groups()) if optimizer else None

    def check_given(self, pieces, loss, lists, pipeline, groups, shape):
        """ValueError for what would hang, or train another model than one process does."""
        p = len(lists)
        ranks = defaultdict(set)  # parameter -> ranks of the pipeline that have it
        for i, piece in enumerate(pieces):
            for param in piece.parameters() if piece else ():
                ranks[param].add(self.piece_to_rank[i])
        kinds = {action.kind for actions in lists for action in actions if action.kind in "FBIW"}
        wrong = {
            f"zero={self.zero}: give 0, 1, 2 or 3": self.zero not in range(4),
            "a mesh that cuts sequences: give cp=1, or `groups`": self.mesh["cp"].size() > 1 and not groups,
            f"a schedule of {' '.join(sorted(kinds))}: give the pipeline that runs these, HalvedPipeline of "
            "further/schedules.py": not kinds <= {*pipeline.computes},
            "two pieces on different ranks share a parameter, and each would train its own: put both on one rank, or "
            "untie them": any(len(some) > 1 for some in ranks.values()),
            "pieces that are cut: give shape=(i, x) -> of piece i's output":
                p > 1 and not shape and any(cut.size > 1 for param in ranks for cut in placement_of(param).cuts),
            'a loss that is no sum: give reduction="sum"': reduction_of(loss) not in ("sum", None)}
        for why, is_so in wrong.items():
            if is_so:
                raise ValueError(why)

    def note_other_pieces(self):
        """Other ranks of the pipeline have other parameters. Another Parallel of these pieces may have noted it."""
        for param in self.named_parameters():
            over = placement_of(param).sharded_over
            if not inside(self.groups.pp, over):
                set_placement(param, sharded_over=over + (self.groups.pp,))

    def named_parameters(self):
        """{parameter: its name} of this rank's pieces."""
        return param_names(self.pieces)

    def param_groups(self):
        """For an optimizer, with names: matrices have weight decay, biases and norms have none. What this rank has
        nothing of is left out."""
        decay, none = [], []
        for param, name in self.named_parameters().items():
            stepped = self.unit_of[param].stepped[param]
            if stepped.numel() and param.requires_grad:
                (decay if is_matrix(param) else none).append((name, stepped))
        param_groups = [{"params": decay}, {"params": none, "weight_decay": 0.0}]
        return [group for group in param_groups if group["params"]] or [{"params": []}]

    @property
    def params(self):
        """What the optimizer steps: this rank's parts of its parameters. [] without one."""
        groups = self.optimizer.param_groups if self.optimizer else []
        return [param for group in groups for param in group["params"]]

    def kept(self, param):
        """For checkpoints, as Unit.kept."""
        return self.unit_of[param].kept(param)

    def lists(self, m, training=True):
        """All ranks' lists of a step with m micro-batches; without `training`, of forwards alone."""
        if m < 1:
            raise ValueError("a step of 0 micro-batches: give lists x and y of at least 1")
        if (m, training) not in self.made:
            p = self.mesh["pp"].size()
            lists = [into_pieces(actions, self.runs) for actions in self.schedule(p, m, self.stages)]
            if not training:
                lists = [[action for i in stages_on(rank, self.piece_to_rank) for action in whole_batch("F", i, m)]
                         for rank in range(p)]
            if not any(action.kind in "GDA" for actions in lists for action in actions):  # else somebody has put them
                lists = [with_weights(actions, self.zero, self.lookups, self.shared) for actions in lists]
            self.made[m, training] = self.proven(lower(lists), training)
        return self.made[m, training]

    def proven(self, lists, training):
        """For subclasses that check lists."""
        return lists

    def zero_grad(self):
        """Drop all gradients, also those that an unfinished step has left. Call it on all ranks."""
        for unit in self.units:
            unit.zero_grad()

    def forward_backward(self, x, y, scale=1.0, beside=None):
        """One step's gradients, after zero_grad: of `scale` times the batch's loss. x, y: inputs and targets of this
        replica's micro-batches, lists whose tensors may differ in size; beside: of each a dict of what else all pieces
        take. The loss is the mean over all replicas' losses that count; 0 if there are none. Returns a number whose
        mean over the replicas is the loss, the same on all ranks of a pipeline."""
        if not self.optimizer:
            raise RuntimeError("this model was built for evaluation: build it with an optimizer to train it")
        if any(unit.total is not None for unit in self.units):  # what comes now would be added to it
            raise RuntimeError("a second forward_backward before zero_grad(): give all micro-batches of a step at once")
        if any(param.requires_grad != unit.trained for unit in self.units for param in unit.params):
            raise RuntimeError("freeze parameters, or let them train again, before the optimizer is made")
        total = self.run(self.lists(len(x)), x, y, scale, beside)
        self.add_up_gradients()
        return total

    @torch.no_grad()
    def forward(self, x, y, beside=None):
        """Returns what forward_backward returns. Computes no gradients."""
        return self.run(self.lists(len(x), training=False), x, y, 1.0, beside)

    def run(self, lists, x, y, scale, beside):
        if len(x) != len(y):
            raise ValueError(f"{len(x)} x and {len(y)} y: give a y for each x")
        weight = self.weight_of_a_target(y)
        losses = self.pipeline.run(lists[dist.get_rank(self.groups.pp)], x, y, scale * weight, beside)
        total = torch.zeros_like(weight)
        for summed in losses:
            total += summed * weight
        dist.all_reduce(total, group=self.groups.pp)  # the other stages have none
        return total

    def weight_of_a_target(self, y):
        """R / n, for R replicas that together have n targets that count: what each multiplies the sum of its losses by.
        Gradients are averaged over replicas, which divides by R. So what remains is the sum of all losses / n.

        Losses a, b, c on one replica, d on another: R / n = 2/4, and the mean of 2/4 (a + b + c) and 2/4 d is
        (a + b + c + d) / 4. A mean of the replicas' means would weigh d as much as the other three together.

        A tensor, so no CPU waits for a GPU. Backward starts from it. ValueError on replicas with another number of
        micro-batches than the others: under ZeRO 2 and 3 one replica would wait for another's A for ever.
        """
        m = len(y)
        counted = torch.as_tensor(sum(map(self.count, y)), dtype=torch.float64, device=self.device)
        numbers = torch.stack([counted, torch.full_like(counted, m), torch.full_like(counted, m * m)])
        dist.all_reduce(numbers, group=self.groups.dp_cp)
        n, sums, squares = numbers
        replicas = dist.get_world_size(self.groups.dp_cp)
        alike = sums * sums == replicas * squares  # if and only if all numbers are equal
        alike |= sums == m                         # nothing was sent, because bench.py has left the collectives out
        why = f"this replica has {m} micro-batches, others have more or fewer: give each equally many"
        if m in self.seen and alike.is_cuda:
            torch._assert_async(alike, why)  # reading it would make the CPU wait
        elif not alike:
            raise ValueError(why)
        self.seen.add(m)
        return replicas / n.where(n != 0, 1).to(master_dtype(self.dtype))

    @torch.no_grad()
    def add_up_gradients(self):
        """Add up each gradient over its parameter's `partial_over`. (Both ends of a tied embedding are units of their
        own, cut into the same rows. So rank r's row is added to rank r's.)"""
        for unit in self.units:
            over = unit.partial_over if unit.trained else ()
            for group in over:
                dist.all_reduce(unit.total, group=group)

    def clip_grad_norm_(self, max_norm, scale=1.0):
        """The function of this name, over the whole model."""
        clip = getattr(self.optimizer, "clip_grad_norm_", clip_grad_norm_)  # one may scale gradients as it reads them
        return clip(self.params, max_norm, scale)

    def step(self):
        """The optimizer's step, of this rank's parts. Then weights that layers compute with are made of them."""
        self.optimizer.step()
        for unit in self.units:
            unit.refresh()


def reduction_of(loss):
    """"mean", "sum" ... of a loss that has this argument, a module or a function; else None."""
    try:
        argument = inspect.signature(loss).parameters.get("reduction")
    except ValueError:  # of a function that is not Python's
        argument = None
    return argument.default if argument else getattr(getattr(loss, "func", loss), "reduction", None)


def param_names(pieces):
    """{parameter: its name} of pieces {number: module}. One that two pieces have is called by the first."""
    named = [(f"{i}.{name}", param) for i, piece in pieces.items() for name, param in piece.named_parameters()]
    return {param: name for name, param in reversed(named)}


def shapes_of(pieces):
    """(i, x) -> the shape of piece i's output for an input x of the first piece, by one forward without memory."""
    if None in pieces:
        raise ValueError(f"piece {pieces.index(None)} is None: give shape=(i, x) -> of piece i's output, or all pieces")
    on_meta = [copy.deepcopy(piece).to("meta") for piece in pieces]

    @functools.cache
    @torch.no_grad()
    def outputs(shape, dtype):
        y = torch.empty(shape, dtype=dtype, device="meta")
        return [(y := piece(y)).shape for piece in on_meta]

    return lambda i, x: outputs(x.shape, x.dtype)[i]


# ----------------------------------------------------------------------------------------------------------------- norm

def copies(placement):
    """On how many ranks the same gradient lies: if all ranks add up their squares, it counts so often.

        ranks / parts    ranks that hold this part of the parameter, because it is cut into so many parts
        x equal          parts whose gradients are the same, because they were added up over these ranks

    Tied embedding, tp 2, pp 2: tp cuts the table E in two, and the last stage has it, too. Both ends have the sum:

        rank                     0            1            2            3
        holds                    E_0          E_1          E_0 again    E_1 again      4 ranks / 4 parts
        gradient                 G_0          G_1          G_0          G_1            x 2 equal

    Only a `partial_over` inside of `sharded_over` makes different parts equal: sequence parallelism adds up a norm's
    gradient over tp, which does not cut it.
    """
    size = dist.get_world_size
    parts = math.prod(map(size, placement.sharded_over))
    equal = math.prod(size(group) for group in placement.partial_over if inside(group, placement.sharded_over))
    return size() * equal // parts


def inside(group, groups):
    """Whether one of `groups` has all ranks of a group."""
    ranks = torch.distributed.get_process_group_ranks
    return any(set(ranks(group)) <= set(ranks(other)) for other in groups)


def clip_grad_norm_(parameters, max_norm, scale=1.0):
    """Scale all gradients so that their norm over the whole model is at most max_norm (0: leave them); returns the
    norm, float64. Call it when gradients are averaged, on all ranks, also on one that has no parameters. scale: fp16's,
    divided out first. (torch.nn.utils.clip_grad_norm_ takes a rank's parts for a whole model: tensor peers would divide
    by different norms, and replicated weights drift apart.)

    Every rank adds up the squares of its gradients, each divided by how often the same one counts (`copies`). This
    number is all-reduced over all ranks, so each element of the model counts once.
    """
    parameters = list(parameters)
    device = parameters[0].device if parameters else torch.distributed.group.WORLD.bound_device_id  # None: the CPU
    square = torch.zeros((), dtype=torch.float64, device=device)
    grads = defaultdict(list)  # how often they count -> gradients
    for param in parameters:
        if param.grad is not None:
            grads[copies(placement_of(param))].append(param.grad)
    every = [grad for some in grads.values() for grad in some]
    if scale != 1 and every:
        torch._foreach_mul_(every, 1 / scale)
    for n, equally_often in grads.items():
        square += torch.nn.utils.get_total_norm(equally_often).double().square() / n
    dist.all_reduce(square)
    norm = square.sqrt()
    if max_norm and every:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


# -------------------------------------------------------------------------------------------------------------- edition

class Reference:
    """What train.parallelize makes a GPT of. A subclass is another edition.

    columns           the layers that tensor parallelism cuts by columns
    tensor            f and g of tensor parallelism
    sequence          f and g of sequence parallelism; None: further/sequence.py's
    context, experts  options of context_parallel and expert_parallel
    """
    columns = ColumnParallelLinear
    tensor = CopyToGroup.apply, ReduceFromGroup.apply
    sequence = None
    context = {}
    experts = {}
