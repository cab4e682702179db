"""The edition that runs by default on GPUs: further/full.py's, sooner.

Each attribute is a subclass of what Full has, or does what the function of further/ does that it stands for.
"""

import torch

from fast.adamw import AdamW
from fast.context import TunedRing
from fast.experts import visit_under_own_rows
from fast.pipeline import PatientPipeline
from fast.sequence import gathered, RegatheringColumns, scattered
from fast.zero import AheadOptimizer, GuardedFlatFSDP
from further.full import Full
from theory.clock import split_pieces


class Fast(Full):
    sharded = GuardedFlatFSDP
    flat_optimizer = AheadOptimizer
    columns = RegatheringColumns
    pieces_of = staticmethod(split_pieces)
    pipeline = PatientPipeline
    sequence = gathered, scattered
    context = {"ring": TunedRing.apply}
    experts = {"travel": visit_under_own_rows}

    @classmethod
    def clip_grad_norm_(cls, optimizer, max_norm, groups, scale):
        """With fast.adamw's AdamW, clipping only computes a factor: the kernel scales gradients as it reads them."""
        inner = optimizer.inner
        if not isinstance(inner, AdamW):
            return super().clip_grad_norm_(optimizer, max_norm, groups, scale)
        norm = super().clip_grad_norm_(optimizer, 0, groups, 1.0) / scale
        inner.scale = (max_norm / (norm + 1e-6) if max_norm else torch.ones_like(norm)).clamp(max=1) / scale
        return norm
