"""The edition for speed: buckets that leave under backward, flat shards, units gathered ahead.

    torchrun --nproc_per_node 2 train.py --form full --dp 2 --zero 3

It trains the same GPT as parallel.Lecture, with fewer and larger messages. fast/edition.py goes on from here.
"""

from further.buckets import Averager
from further.flat import FlatOptimizer
from further.prefetch import FlatFSDP
from further.schedules import HalvedPipeline
from parallel import Lecture


class FSDPOptimizer(Averager):
    """ZeRO-3's optimizer, as parallel.ZeRO3: it steps the shards of FlatFSDPs, one for each stage of this rank.

    params: the shards, as parameter groups. optimizer_class: of `inner`, which steps them.
    """

    def __init__(self, params, optimizer_class, modules):
        self.inner = optimizer_class(params)
        self.modules = modules
        self.group = modules[0].group
        self.reducers = [reducer for module in modules for reducer in module.reducers]
        self.buckets = [bucket for module in modules for bucket in module.buckets]
        self.bucket_of = {param: bucket for bucket in self.buckets for param in bucket.params}

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    def finish_grad_sync(self):
        for module in self.modules:
            module.finish_grad_sync()

    def zero_grad(self, set_to_none=True):
        for module in self.modules:
            module.zero_grad()

    def step(self):
        self.inner.step()

    def kept(self, param):
        return self.bucket_of[param].kept(param)


class Full(Lecture):
    """The edition that further/ has."""
    muon = 2
    sharded = FlatFSDP
    flat_optimizer = FlatOptimizer
    pipeline = HalvedPipeline

    @classmethod
    def optimizer(cls, zero, params, optimizer_class, group, modules, dtype):
        if zero == 3:
            return FSDPOptimizer(params, optimizer_class, modules)
        return cls.flat_optimizer(params, optimizer_class, group, zero, compute_dtype=dtype)
