"""The edition that runs by default on GPUs: the reference's numbers, sooner.

Each attribute is a subclass of what the reference has, or does what the function of further/ does that it stands for.
`on` is what a program calls that trains a GPT with it: fast.on(), and the kernels of the GPT's layers.
"""

import os

import fast
import kernels
from fast import llama, norm
from fast.context import TunedRing
from fast.experts import fast_grouped, FusedExperts, visit_under_own_rows, without_sorting
from fast.graphs import RecordedPipeline
from fast.muon import fast_orthogonal
from fast.sequence import GatherInPlace, RegatheringColumns, scattered
from fast.tensor import BiasedOnce, CopyInPlace, ReduceInPlace
from fast.units import WrittenMatrices, WrittenUnit
from further.expert_parallel import through_experts
from further.experts import Experts, grouped_linear
from further.llama import rms_norm, rotary, swiglu
from further.muon import orthogonal, UnitOfMatrices
from further.schedules import HalvedPipeline
from model import Block
from parallel import Pipeline, Reference, RowParallelLinear, Unit


class FusedBlock(Block):
    """One kernel adds a sublayer's output to the residual stream and takes the norm: 4 passes over memory, not 5."""

    def forward(self, x, **beside):
        one = self.ln_1
        two = self.ln_2
        x, y = norm.add_layer_norm(x, None, one.weight, one.bias, one.eps)  # with x: one backward for both its uses
        x, y = norm.add_layer_norm(x, self.attn(y, **beside), two.weight, two.bias, two.eps)
        return x + self.mlp(y)


LAYERS = {  # of a GPT: what computes the same sooner
    Block: FusedBlock,
    RowParallelLinear: BiasedOnce,
    Experts: FusedExperts,
    rms_norm: norm.tuned_rms_norm,
    swiglu: llama.swiglu,
    rotary: llama.rotary,
    grouped_linear: fast_grouped,
    orthogonal: fast_orthogonal,
    through_experts: without_sorting,
    Unit: WrittenUnit,
    UnitOfMatrices: WrittenMatrices,
    Pipeline: RecordedPipeline,
    HalvedPipeline: RecordedPipeline,
}


def on():
    """As fast.on(), with the GPT's layers. Before CUDA is used: PyTorch then keeps memory in pieces that can grow. In
    pieces of fixed sizes a step of 8 billion parameters would leave 22 of 140 GiB between them."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    fast.on()
    kernels.table.update(LAYERS)


class Fast(Reference):
    """What train.parallelize makes a GPT of."""
    columns = RegatheringColumns
    tensor = CopyInPlace.apply, ReduceInPlace.apply
    sequence = GatherInPlace.apply, scattered
    context = {"ring": TunedRing.apply}
    experts = {"travel": visit_under_own_rows}
