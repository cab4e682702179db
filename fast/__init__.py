"""The same numbers sooner: subclasses and functions that take the place of the reference's leaves.

    import fast; fast.on()      before any process group, model or optimizer is made, in every process

A leaf is a class from which no other class of the reference inherits, or only such as have a row of their own, or a
function that the reference calls through its module. What stands here subclasses or calls the original, which it has
imported by name before `on` rebinds it. There is no off(): the reference alone runs in a process that never calls `on`.
"""

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
from further import nodes as further_nodes
from further import rms_norm as further_rms_norm
from further import schedules as further_schedules
from further import sequence as further_sequence
from further import zero as further_zero
from further.pieces import split_pieces

SWAPS = [  # (module, name there, what takes its place)
    (collectives, "make_link", links.fast_link),
    (kernels, "linear", fp8.linear),
    (kernels, "LayerNorm", norm.TunedLayerNorm),
    (kernels, "tileable", attention.aligned),
    (kernels, "attention_forward", attention.tuned_attention_forward),
    (kernels, "attention_backward", attention.tuned_attention_backward),
    (kernels, "flash_attention", attention.PackedAttention.apply),
    (model, "Block", norm.FusedBlock),
    (further_rms_norm, "RowNorm", norm.TunedRowNorm),
    (further_llama, "swiglu", llama.swiglu),
    (further_llama, "rotary", llama.rotary),
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
    (further_nodes, "TwoLevels", links.fast_levels),
    (further_sequence, "gather_tokens", sequence.gather_in_place),
    (further_sequence, "scatter_tokens", sequence.scatter_in_place),
    (further_context, "attend", attention.attention_block),
    (further_context, "attend_backward", attention.attention_block_backward),
    (further_context, "RingAttention", context.TunedRing),
    (further_context, "going_round", context.going_round_ahead),
    (further_experts, "grouped_linear", grouped.fast_grouped),
    (further_experts, "Experts", experts.FusedExperts),
    (further_expert_parallel, "visit", experts.visit_under_own_rows),
    (further_expert_parallel, "through_experts", experts.without_sorting),
]
PLAIN = [(module, name, getattr(module, name)) for module, name, _ in safe.SWAPS + SWAPS]  # what the reference has


def on():
    """Let this process compute the same numbers sooner, and fail in words. RuntimeError if a group exists already."""
    safe.on()
    safe.swap(SWAPS)
