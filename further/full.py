"""The edition for speed: buckets that leave under backward, flat shards, units gathered ahead.

    torchrun --nproc_per_node 2 train.py --form full --dp 2 --zero 3

It trains the same GPT as parallel.Lecture, with fewer and larger messages. fast/edition.py goes on from here.
"""

from further.flat import FlatOptimizer, ShardAverager
from further.prefetch import FlatFSDP
from further.schedules import HalvedPipeline
from parallel import Lecture


class FSDPOptimizer(ShardAverager):
    """ZeRO-3's optimizer, with parallel.ZeRO3's methods: it steps the shards of FlatFSDPs, one for each stage of this
    rank.

    params: the shards, as parameter groups. optimizer_class: the class of `inner`, which steps them.
    """

    def __init__(self, params, optimizer_class, modules):
        self.inner = optimizer_class(params)
        self.modules = modules
        self.group = modules[0].group
        self.reducers = [reducer for module in modules for reducer in module.reducers]

    def finish_grad_sync(self):
        for module in self.modules:
            module.finish_grad_sync()


class Full(Lecture):
    """The edition that further/ has."""
    muon = 2
    sharded = FlatFSDP
    flat_optimizer = FlatOptimizer
    pipeline = halved = HalvedPipeline

    @classmethod
    def optimizer(cls, zero, params, optimizer_class, group, modules, dtype):
        if zero == 3:
            return FSDPOptimizer(params, optimizer_class, modules)
        return cls.flat_optimizer(params, optimizer_class, group, zero, compute_dtype=dtype)
