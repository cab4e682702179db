"""Attention by specialised warps: its tiles, its schedule, what the compiler makes of it."""

import functools
import itertools
import math
import os
import subprocess
import sys
import types
from unittest.mock import patch

import pytest
import torch

import fast.attention
import kernels
from fast import hopper
from fast.hopper import specialized_takes
from tests import gluon
from tests.kernels import KERNEL_DEVICE, plain_attention, random, triton_kernels  # noqa: F401
from tests.memory import make_trainer
from tests.pool import close, HERE, on_ranks, parametrize
from tests.runs import TINY


COMPILE_FOR_HOPPER = """
import triton
from fast import exchange, hopper, muon
from lessons.eight_bits import _few_rows
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
layout = hopper.gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
kernel, D, TILE = hopper.specialized_forward_kernel, 128, hopper.TILE
sizes = {"CAUSAL": True, "D": D, "STAGES": hopper.STAGES[D]}
rows = {"Q": TILE // 2, "K": TILE, "V": TILE, "O": TILE // 2}
types = {name: f"tensordesc<bf16[1, 1, {rows[name]}, {D}],{layout!r}>" for name in rows}
types |= {"LSE": "*fp32", "tiles": "*i32", "scale": "fp32"} | dict.fromkeys(sizes, "constexpr")
source = GluonASTSource(kernel, {name: types.get(name, "i32") for name in kernel.arg_names}, sizes, {})
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 168})
print(D, compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"))
kernel = hopper.one_pass_backward_kernel
sizes = {"CAUSAL": True, "D": D, "STAGES": hopper.BACKWARD_STAGES}
rows = {"Q": 64, "DO": 64, "K": TILE, "V": TILE, "DK": TILE, "DV": TILE}
types = {name: f"tensordesc<bf16[1, 1, {rows[name]}, {D}],{layout!r}>" for name in rows}
for name, shape, swizzled in ("LSE", [1, 64], 0), ("DELTA", [1, 64], 0), ("DQ", [1, 64, D], 128):
    layout = hopper.gl.NVMMASharedLayout(swizzle_byte_width=swizzled, element_bitwidth=32, rank=len(shape))
    types[name] = f"tensordesc<fp32{shape},{layout!r}>"
types |= {"tiles": "*i32", "scale2": "fp32", "scale": "fp32"} | dict.fromkeys(sizes, "constexpr")
source = GluonASTSource(kernel, {name: types.get(name, "i32") for name in kernel.arg_names}, sizes, {})
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "maxnreg": 168})
code = compiled.asm["ptx"]
print(D, compiled.metadata.shared, code.count("wgmma.mma_async"), code.count("cp.reduce.async.bulk.tensor"))
kernel, aligned = exchange._all_reduce, [["tt.divisibility", 16]]
for n, even, send, gather in (4, True, True, True), (4, False, True, False), (8, True, False, True):
    sizes = {"N": n, "EVEN": even, "ROWS": send != gather, "SEND": send, "GATHER": gather,
             "OP": "avg" if gather else "max", "TOTAL": exchange.tl.float32, "PROGRAMS": 256, "SLOTS": 4,
             "SLOT": exchange.sum_slot_bytes(n) // 2, "LINES": n}
    types = {name: "*bf16" for name in ("flat", "own")} | {"windows": "*i64"} | dict.fromkeys(
        sizes, "constexpr")
    whole = ["flat", "own", "width", "row"] + ["least", "apart"] * even
    source = triton.compiler.ASTSource(
        kernel, {name: types.get(name, "i32") for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): value for name, value in sizes.items()},
        {(kernel.arg_names.index(name),): aligned for name in whole})
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    print("sums", even, code.count("st.global.v4"), code.count("st.global.b16"), code.count("acquire") - send - gather)
kernel, sizes = muon._symmetric, {"BM": 128, "BK": 64}
blocks = {"A": [1, 128, 64], "B": [1, 256, 64], "C": [1, 128, 128], "Y": [1, 128, 128]}
types = {name: f"tensordesc<bf16{shape}>" for name, shape in blocks.items()} | dict.fromkeys(sizes, "constexpr")
types |= dict.fromkeys(("alpha", "beta"), "fp32")
source = triton.compiler.ASTSource(
    kernel, {name: types.get(name, "i32") for name in kernel.arg_names},
    {(kernel.arg_names.index(name),): value for name, value in sizes.items()}, {})
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "num_stages": 3})
print("half", compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"))
for dtype in "i8", "bf16":
    sizes = {"R": 16, "BN": 32, "BK": 256, "PACKED": False}
    types = {"x": "*bf16", "w": f"*{dtype}", "scale": "*fp32", "y": "*bf16"} | dict.fromkeys(sizes, "constexpr")
    names = _few_rows.arg_names
    source = triton.compiler.ASTSource(
        _few_rows, {name: types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in sizes.items()},
        {(names.index(name),): aligned for name in ("x", "w", "scale", "y", "width", "out")})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 4})
    print("bits", compiled.metadata.shared, *map(compiled.asm["ptx"].count, ("cp.async.cg", "mma.sync")))
"""


def test_kernels_for_hopper_compile_without_a_gpu(tmp_path):
    """By the Triton that is installed. Attention's tiles fit into 227 KiB of shared memory, and there are the wgmma of
    two groups, each with one loop and one round of two products, whose k = 16 goes through D and then through BN.
    Backward in one pass has five products, over D, D, 64 rows, 64 rows and 128 keys, and adds to memory. The
    all-reduce writes vectors, but for uneven chunks, and waits once for all ranks' pieces and once for their sums, a
    reduce-scatter only for pieces, an all-gather only for sums. Muon's symmetric product has the wgmma of one loop.
    Weights in 8 bits have 8 bits in shared memory, too: each of the 3 or 4 tiles under way has 32 x 256 bytes less."""
    if not hopper.HAVE_GLUON:
        pytest.skip("no Gluon in this Triton, or no Triton")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["TRITON_CACHE_DIR"] = str(tmp_path)  # so that it is compiled now
    done = subprocess.run([sys.executable, "-c", COMPILE_FOR_HOPPER], env=environ, cwd=HERE, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (D, shared, products), backward, *sums, half, few, many = (line.split() for line in done.stdout.splitlines())
    for _, even, vectors, singles, waits in sums:
        assert (vectors > "0", singles > "0", waits) == (even == "True", even == "False", "0")
    assert int(shared) <= 227 << 10 and int(products) == 2 * 2 * (int(D) + hopper.TILE) // 16
    assert int(backward[1]) <= 227 << 10 and int(backward[2]) == (2 * int(D) + 2 * 64 + 128) // 16 and int(backward[3])
    assert int(half[1]) <= 227 << 10 and half[2] == "4"  # of k = 16 in one round, so tiles and K are one loop
    assert "0" not in few + many and int(many[1]) - int(few[1]) in (3 * 32 * 256, 4 * 32 * 256)


def takes(Tq, Tk, D, is_causal, itemsize=2, taker=specialized_takes):
    """As on a Hopper GPU."""
    q, k = (types.SimpleNamespace(shape=(1, 2, T, D), is_cuda=True, device=None, itemsize=itemsize) for T in (Tq, Tk))
    with patch.multiple(kernels, _generation=lambda device: 9, INTERPRETED=False), patch.object(
            hopper, "HAVE_GLUON", True):
        return taker(q, k, is_causal)


def test_specialized_attention_takes_whole_tiles_alone():

    assert takes(128, 256, 64, True) and takes(256, 128, 128, False)
    for refused in ((256, 128, 128, True), (100, 128, 64, True), (128, 100, 64, False), (128, 128, 32, True),
                    (0, 0, 64, True), (128, 128, 64, True, 4)):
        assert not takes(*refused), refused
    one_pass = functools.partial(takes, taker=hopper.one_pass_takes)
    assert one_pass(1024, 1024, 128, True)
    for refused in (896, 896, 128, True), (2048, 4096, 128, True), (2048, 2048, 64, True), (2048, 2048, 128, False):
        assert not one_pass(*refused), refused


@on_ranks(1)
def test_dq_is_added_up_in_a_fixed_order_where_asked(text):
    for flags in [], ["--deterministic"], []:
        make_trainer([*TINY, "--data", text, *flags])
        assert takes(2048, 2048, 128, True, taker=hopper.one_pass_takes) == (not flags)


@parametrize("Tq, Tk, is_causal, costs, heads, together", [
    (1024, 1024, True, range(2, 10), 200, 64), (128, 128, True, [2], 7, 3), (2**14, 2**14, True, range(2, 130), 16, 4),
    (256, 512, True, [4, 5], 6, 3), (256, 512, False, [5, 5], 6, 3)])
def test_specialized_tiles_are_handed_out_once(Tq, Tk, is_causal, costs, heads, together):
    """Group of heads after group of heads, the longest first, each to the program that has least to do. A tile costs
    the blocks of keys that it sees, and one more."""
    blocks, programs = len(costs), min(132, len(costs) * heads)
    tiles = hopper.specialized_tiles(Tq, Tk, is_causal, heads, together, programs, "cpu")
    rows = [row[1:1 + row[0]] for row in tiles.tolist()]
    given, spent = [[] for _ in range(programs)], [0] * programs
    for first in range(0, heads, together):
        longest = sorted(range(blocks), key=lambda i: -costs[i])
        for i, head in itertools.product(longest, range(first, min(heads, first + together))):
            given[least := spent.index(min(spent))].append(head * blocks + i)
            spent[least] += costs[i]
    assert rows == given


@parametrize("rows", [slice(None), slice(128, None)], ids=["causal", "some queries, all keys"])
def test_backward_in_one_pass(triton_kernels, monkeypatch, rows):
    """Two query heads a key head, and two tiles a program. Without a Hopper GPU, the kernel runs as plain Python."""
    if not hopper.HAVE_GLUON:
        pytest.skip("no Gluon in this Triton, or no Triton")
    real = specialized_takes(*[torch.empty(1, 1, 128, 128, dtype=torch.bfloat16, device=KERNEL_DEVICE)] * 2, True)
    shape, dtype = ((384, 128), torch.bfloat16) if real else ((384, 16), torch.float32)
    if not real:
        monkeypatch.setattr(hopper, "described", gluon.Descriptor)
        monkeypatch.setattr(hopper, "one_pass_backward_kernel", gluon.Launch(hopper.one_pass_backward_kernel, hopper))
    is_causal = rows == slice(None)
    q, k, v, do = (random(1, heads, *shape, dtype=dtype) for heads in (4, 2, 2, 4))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    y = plain_attention(leaves[0], *(x.repeat_interleave(2, 1) for x in leaves[1:]), is_causal)
    s = q.double() @ k.double().repeat_interleave(2, 1).mT
    if is_causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
    lse = (s / math.sqrt(shape[1])).logsumexp(-1).flatten(0, 1).float() / math.log(2)
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    o = y.detach().to(dtype)
    if is_causal:
        hopper.one_pass_backward(q, k, v, o, lse, do, dq, dk, dv)
    else:  # twice, so dQ is added up
        delta, dq_sum = hopper.delta_and_zeros(o, do, lse)
        for _ in range(2):
            hopper.add_in_one_pass(q[:, :, rows], k, v, do[:, :, rows], lse[:, rows], delta[:, rows], False,
                                   dq_sum[:, rows], dk, dv)
        hopper.write_rounded(dq_sum, dq)
        dq /= 2
    do = torch.zeros_like(do).index_copy_(2, torch.arange(shape[0], device=do.device)[rows], do[:, :, rows])
    for ours, exact in zip((dq, dk, dv), torch.autograd.grad(y, leaves, do.double())):
        assert close(ours, exact, tolerance=1e-2 if real else 1e-5)


def test_attention_to_keys_that_some_queries_do_not_see(triton_kernels):
    """Of 40 queries the last 8 see some of 8 keys. (That parts of the keys merge into attention, and their gradients,
    is what context parallelism proves, by the kernels and without.)"""
    *qkv, do = (random(1, 2, T, 16, dtype=torch.float64) for T in (40, 8, 8, 40))
    leaves = [x.clone().requires_grad_() for x in qkv]
    y = plain_attention(*leaves, True)
    exact = y.detach(), *torch.autograd.grad(y, leaves, do)
    for choice, dtype, tolerance in ("triton", torch.float32, 1e-5), ("torch", torch.float64, 1e-14):
        kernels.use(choice)
        *given, dy = (x.to(dtype) for x in (*qkv, do))
        o, sums = fast.attention.attention_block(*given, True)
        grads = fast.attention.attention_block_backward(*given, o, sums, dy, True)
        assert all(map(functools.partial(close, tolerance=tolerance), (o, *grads), exact))
        for of_queries in o, grads[0], sums.exp():
            assert of_queries[:, :, :32].eq(0).all() and of_queries[:, :, 32:].isfinite().all()
