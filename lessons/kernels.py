"""Kernels beside PyTorch's: the cases, which bench.py times; and each one's error against float64."""

import functools
import itertools
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel, SDPBackend

import fast
import kernels
from fast import edition, norm
from further import by_hand
from further.letters import tensors_in
from further import tiles as tiled
from kernels import HAVE_TRITON
from lessons.bench.timing import off, patched, plain_kernels


class Case(NamedTuple):
    """An operation of ours, and PyTorch's, each a function of the inputs."""
    name: str
    ours: object
    plain: object
    inputs: list
    passes: tuple           # the fewest bytes that can move, forward and backward, over those of the first input
    flops: tuple = (0, 0)
    peers: dict = None      # {who: (function, its inputs)} to time beside ours; None: `plain`, eager and compiled
    reference: bool = True  # whether kernels.py has this operation, too; fast/ fuses some

    def who(self):
        peers = self.peers or {"eager": (self.plain, self.inputs),
                               "torch.compile": (torch.compile(self.plain, dynamic=False), self.inputs)}
        return {**peers, "ours": (self.ours, self.inputs)}


class Size(NamedTuple):
    """What the next functions make inputs of: about n elements of a dtype on a device."""
    device: torch.device
    dtype: torch.dtype
    n: int

    @property
    def large(self):
        return self.n > 1 << 20

    def random(self, *shape):
        return torch.randn(shape, dtype=self.dtype, device=self.device, requires_grad=True)


def elu(size):
    yield Case("ELU", kernels.elu, by_hand.elu_reference, [size.random(size.n)], (2, 3))


def gelu(size):
    yield Case("GELU", kernels.gelu, functools.partial(F.gelu, approximate="tanh"), [size.random(size.n)], (2, 3))


def layer_norm(size):
    def plain(x, w, b):
        return F.layer_norm(x, w.shape, w, b)

    c = 1600
    x, w, b = size.random(max(2, size.n // 2 // c), c), size.random(c), size.random(c)
    yield Case(f"layer norm {c}", kernels.layer_norm, plain, [x, w, b], (2, 3))
    yield Case(f"add, norm {c}", norm.add_layer_norm, lambda x, r, w, b: (x + r, plain(x + r, w, b)),
               [x, size.random(*x.shape), w, b], (4, 4), reference=False)


def cross_entropy(size):
    v = 50304 if size.large else 300
    rows = max(2, size.n // 2 // v)
    y = torch.randint(v, (rows,), device=size.device)
    yield Case("cross-entropy", lambda z: kernels.row_losses(z, y).sum(),
               lambda z: F.cross_entropy(kernels.at_least_float32(z), y, reduction="sum"),
               [size.random(rows, v)], (1, 2))


def attention(size):
    causal = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    backends = {"FLASH": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    backends = backends if size.device.type == "cuda" else {"math": SDPBackend.MATH}
    for d, t in itertools.product((64, 128), (1024, 4096, 16384)):
        b, h, t = (16384 // t, 2048 // d, t) if size.large else (1, 2, t // 64)
        packed, qkv = size.random(b, t, 3, h, d), [size.random(b, h, t, d) for _ in range(3)]
        yield Case(f"attention T={t} D={d} causal", kernels.attention,
                   lambda packed: causal(*packed.permute(2, 0, 3, 1, 4)).transpose(1, 2), [packed], (4 / 3, 8 / 3),
                   (2 * b * h * t * t * d, 5 * b * h * t * t * d),
                   {f"SDPA {key}": (sdpa_kernel(backend)(causal), qkv) for key, backend in backends.items()})


def simple_attention(size):
    causal = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    yield Case("attention T=70 D=16, simple", kernels.SimpleAttention.apply, causal,
               [size.random(1, 2, 70, 16) for _ in range(3)], (4 / 3, 8 / 3))


TILES = 256, 128, 64, 8  # BM, BN, BK, GROUP: the fastest of six measured


def matmul(size):
    side, tiles = (8192, TILES) if size.large else (64, (64, 64, 32, 8))
    a, b = (size.random(side, side).detach() for _ in range(2))
    yield Case(f"product {side}", functools.partial(tiled.matmul, tiles=tiles), torch.matmul, [a, b], (3, 0),
               (2 * side**3, 0), {"cuBLAS": (torch.matmul, [a, b])})


CASES = {"elu": elu, "gelu": gelu, "layer_norm": layer_norm, "cross_entropy": cross_entropy, "attention": attention,
         "matmul": matmul}  # those that take most of a training step


def errors(function, exact, inputs):
    """Relative errors of `function` against `exact` in float64: [of its worst result, of its worst gradient]."""
    values = []
    for f, dtype in ((function, inputs[0].dtype), (exact, torch.float64)):
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
        outputs = tensors_in(f(*leaves))
        torch.manual_seed(0)
        grads = [torch.randn(y.shape, device=y.device).to(inputs[0].dtype).to(y.dtype) for y in outputs]
        values.append([outputs, torch.autograd.grad(outputs, leaves, grads) if outputs[0].requires_grad else ()])
    return [max(map(off, *parts)) for parts in zip(*values) if parts[0]]


def tiles_read(tall, wide, group, at_once=132):
    """How many rows of A's tiles plus columns of B's tiles `at_once` programs read together, on average."""
    tiles = [tiled.tile_of(program, tall, wide, group) for program in range(tall * wide)]
    waves = [tiles[start:start + at_once] for start in range(0, len(tiles), at_once)]
    return sum(len({row for row, _ in wave}) + len({column for _, column in wave}) for wave in waves) / len(waves)


def main():
    """Each kernel's error beside PyTorch's; what a product's tiles read."""
    if HAVE_TRITON:
        show_errors()
    else:
        print("The package triton is not installed: PyTorch's own operations run in place of these kernels.")
    high, broad, _, group = TILES
    tall, wide = 8192 // high, 8192 // broad
    print(f"product 8192 x 8192 x 8192 in tiles of {high} x {broad}: an element of A is read {wide} times, of B "
          f"{tall}; 132 programs at once\nread so many rows and columns of tiles: in row order "
          f"{tiles_read(tall, wide, 1):.1f}, in groups of {group} {tiles_read(tall, wide, group):.1f}")
    print("times, on a GPU: python bench.py kernels")


def show_errors():
    kernels.use("triton")
    warnings.filterwarnings("ignore", "overflow encountered")  # NumPy's: of exp in branches that tl.where drops
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    print(f"relative error against float64, {dtype}, of forward and of the worst gradient:\n"
          f"  {'':30} kernels.py           | fast/'s               | PyTorch's own")
    size = Size(torch.device(device), dtype, 1 << 12)
    for case in itertools.chain(*(make(size) for make in (*CASES.values(), simple_attention))):
        with patched(plain_kernels(*kernels.table)):
            columns = [errors(case.ours, case.plain, case.inputs) if case.reference else []]
        with patched((kernels.table, f, new) for f, new in (fast.KERNELS | edition.LAYERS).items()):
            columns += [errors(some, case.plain, case.inputs) for some in (case.ours, case.plain)]
        columns = ("  ".join(f"{e:.2e}" for e in column) for column in columns)
        print(f"  {case.name:30} " + " | ".join(f"{column:18}" for column in columns), flush=True)
