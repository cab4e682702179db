"""The same numbers sooner: subclasses and functions that take the place of the reference's leaves.

    import fast; fast.on()      before any process group, model or optimizer is made, in every process

`on` fills `kernels.table` and `collectives.LINKS`: what this process computes with, and what carries its messages.
It also rebinds names of the reference, SWAPS: classes from which no other class of the reference inherits, or only such
as have a row of their own, and functions that the reference calls through their module. What stands here subclasses or
calls the original. There is no off(): the reference alone runs in a process that never calls `on`.
"""

import torch.nn.functional as F

import collectives
import kernels
import model
import parallel
import safe
from fast import attention, context, experts, fp8, grouped, links, llama, norm, overlap, pipeline, sequence, zero
from further import context as further_context
from further import expert_parallel as further_expert_parallel
from further import experts as further_experts
from further import fsdp as further_fsdp
from further import llama as further_llama
from further import rms_norm as further_rms_norm
from further import schedules as further_schedules
from further import sequence as further_sequence
from further import zero as further_zero
from theory.clock import split_pieces

KERNELS = {  # of the reference: what computes the same sooner
    F.linear: fp8.linear,
    kernels.LayerNorm: norm.TunedLayerNorm,
    kernels.attention_forward: attention.tuned_attention_forward,
    kernels.attention_backward: attention.tuned_attention_backward,
    kernels.flash_attention: attention.PackedAttention.apply,
    kernels.attention_reference: attention.attention_block,
    kernels.attention_backward_reference: attention.attention_block_backward,
    model.Block: norm.FusedBlock,
    further_rms_norm.RowNorm: norm.TunedRowNorm,
    further_llama.swiglu: llama.swiglu,
    further_llama.rotary: llama.rotary,
    further_experts.Experts: experts.FusedExperts,
    further_experts.grouped_linear: grouped.fast_grouped,
    further_expert_parallel.through_experts: experts.without_sorting,
}

SWAPS = [  # (module, name there, what takes its place)
    (parallel, "make_buckets", overlap.large_buckets),
    (parallel, "Bucket", overlap.TotalBucket),
    (parallel, "Reducer", overlap.FastReducer),
    (parallel, "FlatReducer", overlap.FastFlatReducer),
    (parallel, "EveryBackward", overlap.FastEveryBackward),
    (parallel, "FlatOptimizer", zero.GuardedOptimizer),
    (parallel, "FlatFSDP", zero.GuardedFlatFSDP),
    (parallel, "ColumnParallelLinear", sequence.RegatheringColumns),
    (parallel, "even_pieces", split_pieces),
    (parallel, "Pipeline", pipeline.PatientPipeline),
    (further_schedules, "HalvedPipeline", pipeline.PatientPipeline),
    (further_zero, "ShardedOptimizer", zero.GuardedZeroOptimizer),
    (further_fsdp, "FSDP", zero.GuardedFSDP),
    (further_sequence, "gather_tokens", sequence.gather_in_place),
    (further_sequence, "scatter_tokens", sequence.scatter_in_place),
    (further_context, "RingAttention", context.TunedRing),
    (further_context, "going_round", context.going_round_ahead),
    (further_expert_parallel, "visit", experts.visit_under_own_rows),
]
PLAIN = [(module, name, getattr(module, name)) for module, name, _ in SWAPS]  # what the reference has


def on():
    """Let this process compute the same numbers sooner, and fail in words. RuntimeError if a group exists already."""
    safe.on()
    kernels.table.update(KERNELS)
    collectives.LINKS.update(links.LINKS)
    for module, name, new in SWAPS:
        setattr(module, name, new)
