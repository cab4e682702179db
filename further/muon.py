"""Muon: what if an optimizer needs whole matrices, and ZeRO cuts them?

Each matrix gets one owner among the data-parallel ranks. Gradients are averaged on the owner, the owner steps the
matrix, and all gather it.

    torchrun --nproc_per_node 2 train.py --plain --dp 2 --zero 1 --optimizer muon

Read with: Jordan, "Muon" (2024); Liu et al., "Muon is Scalable for LLM Training" (2025), whose scale is taken.
"""

import itertools
import math
from collections import defaultdict
from typing import NamedTuple

import torch

import collectives as dist
import kernels
from parallel import is_matrix, params_together, placement_of, Unit, whole_shape


# ----------------------------------------------------------------------------------------------------------- one matrix
#
#     m <- 0.95 m + 0.05 g        u = 0.95 m + 0.05 g        w <- w - lr decay w - lr 0.2 sqrt(max(rows, columns)) O(u)
#
# O(u) is U V^T of u = U S V^T: the same directions, all equally strong. AdamW divides each number by its usual size,
# Muon each singular value. The numbers of O(u) have a root mean square of 1 / sqrt(max(rows, columns)), AdamW's updates
# one of about 0.2, so with this scale Muon takes AdamW's learning rate and weight decay.
#
# The state is m: 4 bytes an element, AdamW's 8. The step is no longer cheap: 5 (4 a^2 b + 2 a^3) FLOPs for an a x b
# matrix, a <= b, so 300 C^3 for a block. To train a block on T tokens takes 72 C^2 T. So for GPT-2 XL and 8 sequences
# of 1024 tokens the step adds 81 %, for 512 sequences 1.3 %. The owners share it out.
#
# One matrix of a small model leaves most of a GPU idle, and its fifteen products wait for their launches. So matrices
# of one size are multiplied together. A GPT-2 has three sizes: q, k, v and the projection of all blocks; the first
# matrix of their MLPs; the second.

COEFFICIENTS = 3.4445, -4.775, 2.0315  # of s, s^3 and s^5
SHARE = 0.05  # of a gradient in m


def unit(x):
    """Matrices (n, rows, columns) divided by their norms, so that no singular value is above 1."""
    return x / x.norm(dim=(1, 2), keepdim=True).clamp(1e-7)


def orthogonal(x):
    """O(u) of n matrices (n, rows, columns), roughly, by Newton-Schulz: no division, five times three products.

    Each time a singular value s becomes 3.4445 s - 4.775 s^3 + 2.0315 s^5, and U and V stay, because x x^T x is
    U S^3 V^T. After five times an s from 0.002 to 1 is between 0.68 and 1.20.
    """
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x  # so that x x^T is the smaller square
    x = unit(x)
    first, third, fifth = COEFFICIENTS
    for _ in range(5):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
        x = torch.baddbmm(x, polynomial, x, beta=first)
    return x.mT if is_tall else x


class Matrices(NamedTuple):
    """n matrices of one size that lie side by side in a parameter."""
    here: slice     # which of its numbers
    n: int
    rows: int       # of each, on this rank
    columns: int
    dim: int        # tp has cut them along it, -2 or -1
    group: object   # over these ranks; None: they are whole


def matrices_of(name, param):
    """[Matrices] of a parameter. An expert's are its own, and so are each of q, k, v, where `Placement.fused` says how
    large these are, or the name that they are thirds, as in a GPT-2."""
    *experts, rows, columns = param.shape
    thirds = "c_attn" in name and whole_shape(param) == (3 * columns, columns)
    fused = placement_of(param).fused or ((1, 1, 1) if thirds else (1,))
    cuts = [(cut.dim - param.dim(), cut.group) for cut in placement_of(param).cuts if cut.dim >= len(experts)]  # tp's
    found, end = [], 0
    for size, alike in itertools.groupby(fused):  # q apart from k and v, if they are not as large
        n = math.prod(experts) * len([*alike])
        height = rows // sum(fused) * size
        start, end = end, end + n * height * columns
        found.append(Matrices(slice(start, end), n, height, columns, *(cuts or [(-1, None)])[0]))
    return found


MOST = 1 << 27  # elements of this rank that are multiplied at once: 0.25 GiB in 16 bits, so a step needs little room


def directions(u, dim, group):
    """u (n, rows, columns) -> (O(u), by how much it is scaled). Where the ranks of a group have cut matrices along dim,
    they gather them: each rank sends (N-1)/N of its 2 bytes an element. All then compute the same O(u), so tp makes
    this step no faster."""
    if group:
        pieces = u.new_empty(dist.get_world_size(group), *u.shape)
        dist.all_gather_into_tensor(pieces, u, group)
        u = torch.cat([*pieces], dim)
    found = kernels.table[orthogonal](u)
    if group:
        found = found.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
    return found, 0.2 * math.sqrt(max(u.shape[1:]))


# ------------------------------------------------------------------------------------------------------- with ZeRO
#
# ZeRO's rows cut through matrices. Here each row holds whole ones, so each rank steps its own. Four on 2 ranks:
#
#     row 0      a a a a a a c c
#     row 1      b b b b d d . .
#
# Rows are as long as the longest, so messages carry some padding. A block has few matrices, of few sizes. Alone they
# pad to a third more on 4 ranks, and to 2.7 times as much on 8. Four blocks fill the rows of 2 and of 4 ranks, and pad
# to 1.2 times as much on 8. So four blocks share a unit. The price: ZeRO-3 has up to eight blocks' matrices whole.

BLOCKS = 4


class UnitOfMatrices(Unit):
    """A Unit whose rows hold whole parameters: the largest first, each in the row that has least so far."""

    def lay_out(self, ranks):
        starts, used = rows_of(self.params, ranks)
        width = max(used)
        return {param: starts[param][0] * width + starts[param][1] for param in self.params}, width

    def in_rows(self, tensors, ranks):
        rows = tensors[0].new_zeros(ranks * self.width)
        for start, tensor in zip(self.starts.values(), tensors):
            rows[start:start + tensor.numel()] = tensor.flatten()
        return rows.view(ranks, -1)


def rows_of(params, ranks):
    """({parameter: (its row, where it starts there)}, how long each row is)"""
    used = [0] * ranks
    starts = {}
    for param in sorted(params, key=torch.numel, reverse=True):
        row = used.index(min(used))
        starts[param] = row, used[row]
        used[row] += param.numel()
    return starts, used


def make_units(pieces, group, zero, dtype):
    """As parallel.make_units, with ZeRO of whole matrices of blocks."""
    ours = {param for piece in pieces.values() for name, param in piece.named_parameters()
            if zero and is_muons(name, param)}
    units = []
    blocks = defaultdict(list)  # (who averages them, ...): [(piece, its matrices)]
    for (piece, ranks, *place), params in params_together(pieces, group, ours.__contains__).items():
        if params[0] in ours:
            blocks[ranks, *place].append((piece, params))
        else:
            units.append((piece, kernels.table[Unit](params, ranks, zero, dtype)))
    for (ranks, *_), every in blocks.items():
        for first in range(0, len(every), BLOCKS):
            some = every[first:first + BLOCKS]
            params = [param for _, matrices in some for param in matrices]
            units.append((some[0][0], kernels.table[UnitOfMatrices](params, ranks, zero, dtype)))
    return units


# ------------------------------------------------------------------------------------------------------- all parameters

def is_muons(name, param):
    """Whether Muon steps a parameter: a matrix of a block. Embeddings, head and vectors are AdamW's."""
    return is_matrix(param) and ".h." in "." + name


class Muon(torch.optim.AdamW):
    """Muon for the matrices of a GPT's blocks, AdamW for all else.

        Muon(model.named_parameters(), lr=2e-3)

    params: named ones, or groups of such. Other options are AdamW's. m stands where AdamW has its first moment, because
    checkpoints know that. A step drops matrices' .grad. What shall be frozen is frozen before.
    """
    make_units = staticmethod(make_units)

    def __init__(self, params, **adamw):
        super().__init__(params, **adamw)
        self.matrices = {p: matrices_of(name, p) for group in self.param_groups
                         for name, p in zip(group["param_names"], group["params"]) if is_muons(name, p)}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            alike = defaultdict(list)
            for p in group["params"]:
                if p in self.matrices and p.grad is not None:
                    for of, *numbers in self.parts(p):
                        alike[of[2:]].append((of, *numbers))
                    p.grad = None  # so AdamW leaves it alone
            for some in alike.values():
                at_once = max(1, MOST // max(1, *(w.numel() for _, w, _, _ in some)))
                for first in range(0, len(some), at_once):
                    self.step_matrices(some[first:first + at_once], group["lr"], group["weight_decay"])
        super().step()

    def parts(self, p):
        """[(Matrices, their numbers in p, in its gradient, in m)]"""
        state = self.state[p]
        state.pop("exp_avg_sq", None)  # a checkpoint has zeros for it
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(p)
        flat = p.view(-1), p.grad.reshape(-1), state["exp_avg"].view(-1)
        return [(of, *(numbers[of.here] for numbers in flat)) for of in self.matrices[p]]

    def step_matrices(self, parts, lr, decay):
        """parts: of matrices of one size. On GPUs u has 16 bits, unless it is float64; CPUs multiply 16 bits slowly."""
        every, w, g, m = zip(*parts)
        torch._foreach_lerp_(m, g, SHARE)
        u = torch.cat(torch._foreach_lerp(g, m, 1 - SHARE))
        if u.is_cuda and u.dtype == torch.float32:
            u = u.bfloat16()
        _, _, rows, columns, dim, group = every[0]
        found, scale = directions(u.view(-1, rows, columns), dim, group)
        torch._foreach_mul_(w, 1 - lr * decay)
        for numbers, direction in zip(w, found.split([of.n for of in every])):
            numbers.view(direction.shape).sub_(direction, alpha=lr * scale)
