"""Sorting and exchanging tokens of experts with fewer passes over memory.

Takes the place of further/experts.py's Experts, through_experts and visit. With PyTorch's sorting a step of GPT-2
medium with 8 experts took 1.13 of its time on an H200. What travels under a rank's own rows saves 5 % of a step on two.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

import collectives as dist
import kernels
from fast.linear import column_sums
from fast.nccl import NodeLink
from further.expert_parallel import exchange_counts, expert_of_each, through_experts, visit
from further.experts import Experts, grouped_linear
from kernels import load_float32, this_program, tl, triton


class FusedExperts(Experts):
    """One kernel copies tokens to rows sorted by expert, and one adds the rows back up: no sort, no index_select."""

    def forward(self, x, chosen, gates):
        if not kernels.on_triton(x):
            return super().forward(x, chosen, gates)
        places, counts = places_by_expert(chosen, self.count)
        y = self.mlps(Dispatch.apply(x.flatten(0, 1), places), counts)
        return Combine.apply(y, places, gates.contiguous().view(places.shape)).view_as(x)


@triton.jit
def _add_biases(y, bias, counts, width, E, E_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """y_r += b_e, r a row of expert e. PyTorch's operations would write b_e to memory for each row, and read it."""
    row = this_program()
    ends = tl.cumsum(tl.load(counts + tl.arange(0, E_PAD), tl.arange(0, E_PAD) < E, 0), 0)
    e = tl.sum((ends <= row).to(tl.int64), 0)
    c = tl.arange(0, BLOCK)
    at = y + row * width + c
    tl.store(at, load_float32(at, c < width) + load_float32(bias + e * width + c, c < width), c < width)


class GroupedProduct(torch.autograd.Function):
    """y_r = W_e x_r + b_e of each row r of expert e, by PyTorch's grouped products, which read where groups end on the
    GPU. Keeps x, W, counts and their ends."""

    @staticmethod
    def forward(ctx, x, weight, bias, counts):
        ends = counts.cumsum(0, dtype=torch.int32)
        ctx.save_for_backward(x, weight, counts, ends)
        y = F.grouped_mm(x, weight.mT, offs=ends)
        if bias is not None:
            block = triton.next_power_of_2(y.shape[1])
            _add_biases[len(y),](y, bias, counts, y.shape[1], len(counts), triton.next_power_of_2(len(counts)), block)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, counts, ends = ctx.saved_tensors
        dy = dy.contiguous()
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        dx = F.grouped_mm(dy, weight, offs=ends) if needs_dx else None
        dw = F.grouped_mm(dy.T, x, offs=ends) if needs_dw else None
        return dx, dw, column_sums(dy, counts) if needs_db else None, None


def fast_grouped(x, weight, bias, counts):
    """The reference's loop makes the CPU wait for counts, and small products leave multiprocessors idle."""
    able = kernels.on_triton(x) and x.dtype == torch.bfloat16 and len(x) and not any(n % 8 for n in weight.shape[1:])
    return (GroupedProduct.apply if able else grouped_linear)(x, weight, bias, counts)


# --------------------------------------------------------------------------------------------------- tokens to experts
#
# With PyTorch's operations, the sorting of tokens by expert takes dozens of launches a block, forward and backward, and
# a gather's backward adds with atomics, in another order in every run. The kernels below add in a fixed order:
#
#     places     where each of a token's k rows lies among the sorted rows      a counting sort, in two launches
#     dispatch   rows[places[t, j]] = x[t]                                      backward: combine
#     combine    y[t] = sum over j of gates[t, j] rows[places[t, j]]            backward: dispatch, and dgates

@triton.jit
def _count_slots(chosen, counts, n, E, E_PAD: tl.constexpr, M: tl.constexpr):
    slot = tl.program_id(0) * M + tl.arange(0, M)
    e = tl.arange(0, E_PAD)
    here = tl.load(chosen + slot, slot < n, -1)[:, None] == e[None]
    tl.store(counts + tl.program_id(0) * E + e, tl.sum(here.to(tl.int32), 0), e < E)


@triton.jit
def _places(chosen, counts, places, totals, n, E, programs, E_PAD: tl.constexpr, M: tl.constexpr):
    """A slot is one of a token's k choices. Its place is the number of slots of lower experts, plus those of its own
    expert in earlier programs, plus those of its own expert before it in this program."""
    slot = tl.program_id(0) * M + tl.arange(0, M)
    e = tl.arange(0, E_PAD)
    total = tl.zeros((E_PAD,), tl.int32)
    before = tl.zeros((E_PAD,), tl.int32)
    for i in range(programs):
        count = tl.load(counts + i * E + e, e < E, 0)
        total += count
        before += tl.where(i < tl.program_id(0), count, 0)
    here = (tl.load(chosen + slot, slot < n, -1)[:, None] == e[None]).to(tl.int32)                      # (M, E_PAD)
    first = tl.cumsum(total, 0) - total + before
    tl.store(places + slot, tl.sum(here * (tl.cumsum(here, 0) - 1 + first[None]), 1), slot < n)
    if tl.program_id(0) == 0:
        tl.store(totals + e, total.to(tl.int64), e < E)


def places_by_expert(chosen, E):
    """Sort the choices (..., k) by expert, and for the same expert in their order. Returns (places int32 (n, k), where
    each choice lies after sorting; how often each expert is chosen, int64 (E))."""
    n = chosen.numel()
    M = 256
    width = triton.next_power_of_2(E)
    programs = max(1, triton.cdiv(n, M))
    chosen = chosen.flatten(0, -2).contiguous()
    totals = chosen.new_empty(E)
    counts = chosen.new_empty(programs, E, dtype=torch.int32)
    places = torch.empty_like(chosen, dtype=torch.int32)
    _count_slots[programs,](chosen, counts, n, E, width, M, num_warps=4)
    _places[programs,](chosen, counts, places, totals, n, E, programs, width, M, num_warps=4)
    return places, totals


@triton.jit
def _dispatch(x, places, gates, rows, y, dgates, C, K: tl.constexpr, BLOCK: tl.constexpr):
    """rows[place] = x. As combine's backward, with gates: rows[place] = gate x, and dgates = x . y[place]."""
    t = this_program()
    c = tl.arange(0, BLOCK)
    v = load_float32(x + t * C + c, c < C)
    for j in tl.static_range(K):
        place = tl.load(places + t * K + j).to(tl.int64) * C
        w = v
        if gates is not None:
            w = v * tl.load(gates + t * K + j)
            tl.store(dgates + t * K + j, tl.sum(v * load_float32(y + place + c, c < C), 0))
        tl.store(rows + place + c, w, c < C)


@triton.jit
def _combine(rows, places, gates, x, C, K: tl.constexpr, BLOCK: tl.constexpr):
    t = this_program()
    c = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        v = load_float32(rows + tl.load(places + t * K + j).to(tl.int64) * C + c, c < C)
        total += v if gates is None else v * tl.load(gates + t * K + j)
    tl.store(x + t * C + c, total, c < C)


def launch_dispatch(x, places, gates=None, y=None):
    """(rows (n k, C), dgates (n, k) or None) of x (n, C)."""
    n, k = places.shape
    C = x.shape[1]
    rows = x.new_empty(n * k, C)
    dgates = None if gates is None else torch.empty_like(gates)
    _dispatch[n,](x.contiguous(), places, gates, rows, y, dgates, C, k, triton.next_power_of_2(C), num_warps=4)
    return rows, dgates


def launch_combine(rows, places, gates=None):
    n, k = places.shape
    C = rows.shape[1]
    x = rows.new_empty(n, C)
    _combine[n,](rows.contiguous(), places, gates, x, C, k, triton.next_power_of_2(C), num_warps=4)
    return x


class Dispatch(torch.autograd.Function):
    """x (n, C), places (n, k) -> rows (n k, C): row places[t, j] is x[t]. places holds 0 to n k - 1, each once."""

    @staticmethod
    def forward(ctx, x, places):
        ctx.save_for_backward(places)
        return launch_dispatch(x, places)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, drows):
        return launch_combine(drows, *ctx.saved_tensors), None


class Combine(torch.autograd.Function):
    """rows (n k, C), places (n, k) -> (n, C): each token's sum of its rows, times gates (n, k) float32 if any."""

    @staticmethod
    def forward(ctx, rows, places, gates):
        ctx.save_for_backward(places, *(() if gates is None else (gates, rows)))
        return launch_combine(rows, places, gates)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        drows, dgates = launch_dispatch(dx, *ctx.saved_tensors)
        return drows, None, dgates


# --------------------------------------------------------------------------------------------------- tokens to experts

def without_sorting(mlps, rows, counts):
    """As through_experts, whose sorts `places_by_expert` does with Triton."""
    if len(counts) == 1:  # all rows come from one rank, so they are in order
        return mlps(rows, counts[0])
    if not kernels.on_triton(rows):
        return through_experts(mlps, rows, counts)
    places, counts = places_by_expert(expert_of_each(rows, counts).unsqueeze(1), counts.shape[1])
    return Combine.apply(mlps(Dispatch.apply(rows, places), counts), places, None)


class Travel(torch.autograd.Function):
    """Starts to send rows, and `Arrival` waits for them. What is computed between the two hides the transfer.

    Backward runs in reverse order, so there Arrival starts the gradient's transfer, and Travel waits for it. trip: what
    both share: the group, how many rows go to and come from each rank, and the handle.
    """

    @staticmethod
    def forward(ctx, rows, trip):
        ctx.trip = trip
        trip.handle, arriving = start_exchange(rows, trip.group, trip.sends, trip.receives)
        return arriving

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        ctx.trip.handle.wait()
        return vars(ctx.trip).pop("grad"), None


class Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx, arriving, trip):
        ctx.trip = trip
        trip.handle.wait()
        return arriving.view_as(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        trip = ctx.trip
        trip.handle, trip.grad = start_exchange(grad, trip.group, trip.receives, trip.sends)
        return grad, None


def start_exchange(rows, group, sends, receives):
    """Start an `exchange` without waiting for it: (handle, the rows that will be received)."""
    arriving = rows.new_empty(sum(receives), rows.shape[1])
    return dist.all_to_all_single(arriving, rows.contiguous(), receives, sends, group, async_op=True), arriving


# Exchanges are hidden in groups with this link, and from so many bytes of rows a rank on. Measured on two H200s with
# GPT-2 medium, 8 experts in every second block: with 128 MiB of rows a step takes 233 ms instead of 245; with 64 MiB it
# takes 158 ms instead of 131, because then the step waits for the CPU.
HIDE_EXCHANGES = {"link": NodeLink, "bytes": 3 << 25}


def visit_under_own_rows(mlps, group, rows, counts):
    """As visit, but while rows travel, a rank's own experts compute with the rows that stay. R must be equal on all
    ranks, because it decides whether they do so.

    Rows travel there during c_fc of the rows that stay, and back during c_proj; gradients likewise. The cost: rows that
    stay are multiplied apart, so the CPU launches more kernels, and each expert has two gradients to add up.
    """
    experts = mlps.__self__
    link = dist.link_of(group)
    if not isinstance(link, HIDE_EXCHANGES["link"]) or rows.nbytes < HIDE_EXCHANGES["bytes"] or link.size == 1:
        return visit(mlps, group, rows, counts)
    n = link.size
    rank = link.rank
    arriving, sends, receives = exchange_counts(counts, group)
    first = sum(sends[:rank])                                                                 # rows for lower ranks
    before, own, after = rows.split([first, sends[rank], len(rows) - first - sends[rank]])
    sends[rank] = receives[rank] = 0
    there, back = (SimpleNamespace(group=group, sends=a, receives=b) for a, b in ((sends, receives), (receives, sends)))
    stay = arriving[rank]
    others = torch.cat([arriving[:rank], arriving[rank + 1:]])

    away = before if rank == n - 1 else after if rank == 0 else torch.cat([before, after])
    travelling = Travel.apply(away, there)
    own = experts.activation(experts.c_fc(own.clone(), stay))  # a copy: a view would keep all rows alive
    y = without_sorting(mlps, Arrival.apply(travelling, there), others)
    travelling = Travel.apply(y, back)
    own = experts.c_proj(own, stay)
    y = Arrival.apply(travelling, back)
    return torch.cat([own, y] if rank == 0 else [y, own] if rank == n - 1 else [y[:first], own, y[first:]])
