"""Gluon kernels without a GPU: their source as plain Python, a thread for each of a program's parts."""

import inspect
import math
import threading
import types
from functools import partial

import torch
import triton.language as tl


class Pointer:
    """Into a flat tensor."""

    def __init__(self, tensor, at=0):
        self.tensor = tensor
        self.at = at

    def __add__(self, offset):
        return Pointer(self.tensor, self.at + offset)


class Descriptor:
    """In place of TMA's, which Triton's describes."""
    layout = None

    def __init__(self, described, swizzled=None):
        self.x = described.base.as_strided(described.shape, described.strides)
        self.dtype = self.x.dtype
        self.shape = described.block_shape
        self.block_type = types.SimpleNamespace(nbytes=math.prod(self.shape) * self.x.itemsize)

    def tile(self, at):
        return self.x[tuple(slice(int(i), int(i) + n) for i, n in zip(at, self.shape, strict=True))]


class Shared:
    """Memory that the parts of a program share. It holds NaN at first."""

    def __init__(self, x):
        self.x = x
        self.dtype = x.dtype

    def index(self, i):
        return Shared(self.x[int(i)])

    def reshape(self, shape):
        return Shared(self.x.view(shape))

    def permute(self, order):
        return Shared(self.x.permute(order))

    def load(self, layout):
        return self.x.clone()

    def store(self, value):
        assert value.shape == self.x.shape
        self.x.copy_(value)


class Barriers:
    """mbarriers. A phase ends when `count` have arrived, and the expected bytes with them."""

    def __init__(self):
        self.changed = threading.Condition()

    def init(self, barrier, count):
        barrier.x.copy_(torch.tensor([count, count, 0, 0]))  # how many arrive, are missing, bytes missing, the phase

    def change(self, barrier, arrivals, bytes):
        with self.changed:
            count, missing, left, phase = barrier.x.tolist()
            missing -= arrivals
            left += bytes
            done = not missing and not left
            barrier.x.copy_(torch.tensor([count, count, 0, phase + 1] if done else [count, missing, left, phase]))
            self.changed.notify_all()

    def expect(self, barrier, bytes):
        self.change(barrier, 1, bytes)

    def arrive(self, barrier, pred=True):
        if pred:
            self.change(barrier, 1, 0)

    def wait(self, barrier, phase, pred=True):
        with self.changed:
            assert not pred or self.changed.wait_for(lambda: barrier.x[3] % 2 != phase, 20), "a deadlock"


class Launch:
    """Launch(kernel, module)[(programs,)](*arguments, **constants). kernel: one of module's Gluon functions."""

    def __init__(self, kernel, module):
        self.kernel = kernel
        self.module = module

    def __getitem__(self, grid):
        return partial(run, self.kernel, self.module, *grid)


def run(kernel, module, programs, *arguments, num_warps, maxnreg, **constants):
    """Program after program."""
    barriers = Barriers()
    program = [0]

    def allocate(dtype, shape, layout):
        if dtype == torch.int64:  # barriers
            return Shared(torch.zeros(shape[0], 4, dtype=dtype))
        return Shared(torch.full(shape, math.nan, dtype=dtype))

    def product(a, b, acc, use_acc=True, is_async=False):
        a, b = (x.x if isinstance(x, Shared) else x for x in (a, b))
        return acc * use_acc + a.float() @ b.float()

    def load(descriptor, at, barrier, shared):
        shared.x.copy_(descriptor.tile(at))
        barriers.change(barrier, 0, -descriptor.block_type.nbytes)

    def parts(functions, warps, registers):
        failures = []

        def guarded(function, values):
            try:
                with torch.no_grad():  # a thread begins with gradients
                    function(*values)
            except BaseException as e:
                failures.append(e)
        threads = [threading.Thread(target=guarded, args=part, daemon=True) for part in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    gl = types.SimpleNamespace(
        constexpr=int, float32=torch.float32, int64=torch.int64, static_range=range, load=lambda p: int(p.tensor[p.at]),
        program_id=lambda axis: program[0], allocate_shared_memory=allocate, warp_specialize=parts, exp2=torch.exp2,
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), to_tensor=lambda x: x,
        arange=lambda start, end, layout: torch.arange(start, end), convert_layout=lambda x, layout: x,
        where=lambda c, a, b: torch.where(c, a, b) if torch.is_tensor(c) else a if c else b,
        NVMMADistributedLayout=lambda **_: None, DotOperandLayout=lambda **_: None, SliceLayout=lambda *_: None)
    names = {
        "gl": gl, "mbarrier": types.SimpleNamespace(
            MBarrierLayout=lambda: None, init=barriers.init, expect=barriers.expect, arrive=barriers.arrive,
            wait=barriers.wait),
        "tma": types.SimpleNamespace(store_wait=lambda pending: None), "fence_async_shared": lambda: None,
        "warpgroup_mma": product, "warpgroup_mma_init": lambda x: x, "tma_load": load,
        "warpgroup_mma_wait": lambda pending, deps: deps if len(deps) > 1 else deps[0],
        "tma_store": lambda descriptor, at, shared: descriptor.tile(at).copy_(shared.x),
        "tma_add": lambda descriptor, at, shared: descriptor.tile(at).add_(shared.x)}
    names |= {name: value.value for name, value in vars(module).items() if isinstance(value, tl.constexpr)}
    for function in [kernel, *(value for value in vars(module).values() if isinstance(value, type(kernel)))]:
        source = inspect.getsource(function.fn)
        exec(source[source.index("def "):], names)
    arguments = [Pointer(x.flatten()) if torch.is_tensor(x) else x for x in arguments]
    for program[0] in range(programs):
        names[kernel.fn.__name__](*arguments, **constants)
