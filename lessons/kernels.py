"""Each kernel's error against float64: the reference's, the one that training runs, PyTorch's."""

import os
import sys
import warnings

import torch
import torch.nn.functional as F

import kernels
import fast
from fast import linear, norm
from lessons.measure import patched, plain_rows
from kernels import (
    _gelu, cross_entropy, elu, FlashAttention, gelu, HAVE_TRITON, layer_norm, tile_of)




def operations(dtype, device):
    """Yield (name, our function, PyTorch's, inputs) of each operation that `main` compares."""
    def random(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    yield "ELU", elu, F.elu, [random(3000)]
    yield "GELU", gelu, lambda x: F.gelu(x, approximate="tanh"), [random(90, 33)]
    for width in (24, 1600, 5000):
        x, r, w, b = random(3, width), random(3, width), 1 + random(width), random(width)
        yield f"layer norm {width}", layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b), [x, w, b]
        yield (f"add + norm {width}", norm.add_layer_norm,
               lambda x, r, w, b: (x + r, F.layer_norm(x + r, w.shape, w, b)), [x, r, w, b])
    for D, causal in (16, True), (16, False), (64, True), (64, False):
        yield (f"attention {D}{' causal' * causal}", lambda *qkv, causal=causal: FlashAttention.apply(*qkv, causal),
               lambda *qkv, causal=causal: F.scaled_dot_product_attention(*qkv, is_causal=causal),
               [random(1, 2, 80, D) for _ in "qkv"])
    targets = torch.randint(5000, (8,), device=device)
    yield "linear", kernels.linear, F.linear, [random(2, 3, 16), random(37, 16), random(37)]
    counts = torch.tensor([3, 0, 70, 17], device=device)
    yield ("grouped product", lambda *xwb: kernels.grouped_linear(*xwb, counts),
           lambda *xwb: kernels.grouped_reference(*xwb, counts), [random(90, 40), random(4, 72, 40), random(4, 72)])
    yield ("cross-entropy", lambda z: cross_entropy(z, targets),
           lambda z: F.cross_entropy(z if z.dtype == torch.float64 else z.float(), targets), [random(8, 5000)])
    yield ("product + GELU", lambda a, b: kernels.matmul(a, b, _gelu), lambda a, b: F.gelu(a @ b, approximate="tanh"),
           [random(300, 200), random(200, 130)])


def errors(function, exact, inputs):
    """Relative errors of `function` against `exact` in float64: [of its worst result, of its worst gradient]."""
    values = []
    for f, dtype in ((function, inputs[0].dtype), (exact, torch.float64)):
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
        outputs = f(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.manual_seed(0)
        grads = [torch.randn(y.shape, device=y.device).to(inputs[0].dtype).to(y.dtype) for y in outputs]
        values.append([outputs, torch.autograd.grad(outputs, leaves, grads) if outputs[0].requires_grad else ()])
    return [max(float(((a.double() - b).norm() / b.norm()).detach()) for a, b in zip(*parts))
            for parts in zip(*values) if parts[0]]


def tiles_read(tall, wide, group, at_once=132):
    """How many rows of A's tiles plus columns of B's tiles `at_once` programs read together, on average."""
    tiles = [tile_of(program, tall, wide, group) for program in range(tall * wide)]
    waves = [tiles[start:start + at_once] for start in range(0, len(tiles), at_once)]
    return sum(len({row for row, _ in wave}) + len({column for _, column in wave}) for wave in waves) / len(waves)


def main():
    gpu = torch.cuda.is_available()
    if not HAVE_TRITON:
        print("The package triton is not installed: PyTorch's own operations run in place of these kernels.")
        return
    if not gpu and not kernels.INTERPRETED:  # Triton reads the variable below when it decorates a kernel: start again
        words = [sys.executable, "-m", "lessons", *sys.argv[1:]]
        os.execve(sys.executable, words, {**os.environ, "TRITON_INTERPRET": "1"})
    kernels.use("triton")
    warnings.filterwarnings("ignore", "overflow encountered")  # NumPy's: of exp in branches that tl.where drops
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    print(f"relative error against float64, {dtype}, of forward and of the worst gradient:\n"
          f"  {'':22} kernels.py           | fast/'s               | PyTorch's own")
    for name, ours, theirs, inputs in operations(dtype, device):
        with patched(plain_rows(kernels)):
            columns = [errors(ours, theirs, inputs) if ours != norm.add_layer_norm else []]  # kernels.py has no such
        with patched(fast.SWAPS):
            columns += [errors(ours, theirs, inputs), errors(theirs, theirs, inputs)]
        columns = ("  ".join(f"{e:.2e}" for e in column) for column in columns)
        print(f"  {name:22} " + " | ".join(f"{column:18}" for column in columns), flush=True)
    high, broad, _, group = linear.TILES
    tall, wide = 8192 // high, 8192 // broad
    print(f"product 8192 x 8192 x 8192 in tiles of {high} x {broad}: an element of A is read {wide} times, of B "
          f"{tall}; 132 programs at once need {tiles_read(tall, wide, 1):.1f} rows and columns of tiles row by row, "
          f"{tiles_read(tall, wide, group):.1f} in groups")
    print("times, on a GPU: python bench.py kernels")
