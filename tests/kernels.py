"""Kernels equal PyTorch."""

import functools
import itertools
import math
import os
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel, SDPBackend

import fast.experts
import fast.llama
import further.experts
import further.llama
import kernels
import lessons.demos
import model
from further.letters import tensors_in
from tests.pool import close, GPUS, HERE, parametrize, table
from tests.runs import output_of
from fast import edition
from fast.adamw import AdamW
from fast.exchange import AllToAll, sum_rows
from fast.experts import FusedExperts
from fast.norm import add_layer_norm, tuned_rms_norm
from fast.run import prepare
from further import by_hand
from further.experts import ExpertsConfig, MixtureOfExperts
from further.tiles import matmul
from further.whole import MOMENTS
from lessons.compiled import occupancy
from lessons.kernels import attention, CASES, main, tiles_read
from safe.flags import BadInput, check_layout, checked_use, Settings


# -------------------------------------------------------------------------------------------------------------- kernels
#
# Without a GPU the kernels run in Triton's interpreter: the same code, line by line, in NumPy. With one, they run on
# it.

if kernels.HAVE_TRITON and kernels.INTERPRETED:
    from triton.runtime import interpreter

    def replace_once(function, replace=getattr(interpreter, "_patch_lang", None)):
        """The interpreter replaces Triton's functions by its own where a kernel starts, and again wherever that calls
        another function, to no effect. To look through all of them each time took a third of these tests' time."""
        kernel_language = sys.modules["triton.language"]
        seen = [module for module in (kernel_language, kernel_language.core) if module in function.__globals__.values()]
        if not seen or any(kernel_language.core.is_builtin(module.load) for module in seen):
            return replace(function)

    if hasattr(interpreter, "_patch_lang"):
        interpreter._patch_lang = replace_once

KERNEL_DEVICE = "cuda" if GPUS else "cpu"


@pytest.fixture
def triton_kernels():
    """Kernels run, wherever; memory that PyTorch hands out holds NaN, so that what a kernel leaves out is seen."""
    if not kernels.HAVE_TRITON:
        pytest.skip("no package triton for this machine")
    kernels.use("triton")
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
    kernels.use("auto")


@pytest.fixture(params=["fast", "plain"])
def either_way(request, triton_kernels):
    """By fast/, and by kernels.py alone: one tile size, nothing fused or padded."""
    with patch.dict(kernels.table, fast.KERNELS | edition.LAYERS if request.param == "fast" else {}, clear=True):
        yield


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device=KERNEL_DEVICE).to(dtype)


def no_worse_than_pytorch(ours, theirs, inputs, units=2):
    """Results and all gradients of `ours` against float64: within 1.1 of PyTorch's own error on the same inputs.
    theirs: PyTorch's ways to compute it; each result is compared with the worst of them.

    Where PyTorch is exact by luck (one element), half a unit in the last place is allowed; in float32, where exp has
    such errors, `units`. The interpreter does not round to bf16 but cuts digits off: twice the error.
    """
    def run(function, dtype=inputs[0].dtype):
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
        outputs = tensors_in(function(*[x * 1 for x in leaves]))  # not leaves: cross-entropy overwrites its input
        torch.manual_seed(1)
        dys = [random(*y.shape, dtype=inputs[0].dtype).to(y.dtype) for y in outputs]
        results = [y.detach().clone() for y in outputs]
        return results + [*torch.autograd.grad(outputs, leaves, dys)] if outputs[0].requires_grad else results

    runs = run(theirs[0], torch.float64), run(ours), *map(run, theirs)
    for i, (exact, mine, *others) in enumerate(zip(*runs, strict=True)):
        if exact.norm() < 1e-12:  # a gradient of exactly 0, as that of a single key
            assert mine.norm() < 1e-5
            continue
        error, *errors = (float((x.double() - exact).norm() / exact.norm()) for x in (mine, *others))
        unit = torch.finfo(mine.dtype).eps * (units if mine.dtype == torch.float32 else 0.5)
        slack = 2.2 if mine.dtype == torch.bfloat16 and not GPUS else 1.1
        assert mine.shape == exact.shape and error <= slack * max(*errors, unit), (i, error, errors)


def test_a_part_of_the_vocabulary_may_have_no_finite_logit():
    """As of a padded vocabulary, masked: its loss would be NaN on a rank of --tp that has the padding alone."""
    z, targets = torch.full((2, 4), -math.inf, device=KERNEL_DEVICE), torch.tensor([4, 9], device=KERNEL_DEVICE)
    top, total, picked = kernels.softmax_sums(z, targets)
    assert top.isfinite().all() and total.eq(0).all() and picked.eq(0).all()


def test_hand_derived_backwards_equal_autograd():
    """Cross-entropy's is proven by layouts that cut the vocabulary, attention's in tests/attention.py."""
    x, dy = torch.randn(2, 2, 5, 7, dtype=torch.float64)
    w, b = torch.randn(2, 7, dtype=torch.float64)
    y, mean, rstd = by_hand.layer_norm_reference(x, w, b, 1e-5)
    for leaves, ours, function, backward in [
            ([x, w, b], y, lambda *xwb: plain_norm(*xwb, 1e-5),
             by_hand.layer_norm_backward_reference(x, dy, w, mean, rstd)),
            ([x], by_hand.elu_reference(x), F.elu, [by_hand.elu_backward_reference(x, dy)]),
            ([x], by_hand.gelu_reference(x), plain_gelu, [by_hand.gelu_backward_reference(x, dy)])]:
        exact = function(*[leaf.requires_grad_() for leaf in leaves])
        grads = torch.autograd.grad(exact, leaves, dy)
        for a, b in zip((ours, *backward), (exact, *grads), strict=True):
            assert close(a.detach(), b.detach(), 1e-14)


def test_attention_in_blocks_is_pytorch_s():
    """Of 100 tokens in blocks of 32: PyTorch's to 1e-14. So are the kernels, as far as float32 goes: `test_kernel`."""
    q, k, v = torch.randn(3, 100, 16, dtype=torch.float64)
    whole = [x[None, None] for x in (q, k, v)]
    o, lse = by_hand.attention_in_blocks(q, k, v, 32)
    _, sums = kernels.attention_reference(*whole, True)
    assert close(lse, sums[0, 0], 1e-14) and close(o, plain_attention(*whole, True)[0, 0], 1e-14)


plain_gelu = functools.partial(F.gelu, approximate="tanh")


def plain_attention(q, k, v, is_causal):
    """Zero in the first rows, where they see no key."""
    blind = max(0, q.shape[2] - k.shape[2]) if is_causal else 0
    q = q[:, :, blind:]
    mask = (torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
            if is_causal else None)
    # PyTorch's kernel takes no other float32, and its other path would be no second peer.
    q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    return F.pad(F.scaled_dot_product_attention(q, k, v, mask), (0, 0, blind, 0))


def plain_packed_attention(qkv, is_causal):
    q, k, v = kernels.heads(qkv)
    return plain_attention(q, *(kernels.to_each_query(x, q) for x in (k, v)), is_causal).transpose(1, 2)


def plain_norm(x, w, b, eps):
    return F.layer_norm(x, w.shape, w, b, eps)


def turns(T, D):
    angles = torch.arange(T * D // 2, device=KERNEL_DEVICE).view(T, D // 2) * 0.1
    return {"cos": angles.cos(), "sin": angles.sin()}


def cross_entropy(z, targets):
    return kernels.row_losses(z, targets).sum()


def plain_cross_entropy(z, targets):
    z, targets = z if z.dtype == torch.float64 else z.float(), targets.clamp(min=-1)
    return F.cross_entropy(z, targets, ignore_index=-1, reduction="sum")


def grouped_linear(x, w, b=None, *, counts):
    return kernels.table[further.experts.grouped_linear](x, w, b, torch.tensor(counts, device=x.device))


def plain_grouped(x, w, b=None, *, counts):
    return further.experts.grouped_linear(x, w, b, torch.tensor(counts))


@torch.no_grad()
def plain_product(a, b, function=None, tiles=None):
    return {None: torch.clone, kernels._gelu: plain_gelu, kernels._elu: F.elu}[function](a @ b)


ALL_DTYPES = torch.float32, torch.float16, torch.bfloat16
WITH_PRODUCTS = torch.float32, torch.bfloat16


class Row(NamedTuple):
    """An operation of ours, PyTorch's, the shapes of its inputs, what else both are given. strided: in memory, an
    input's last two dimensions have changed places. replaced: fast/ has another, and the reference's is tested, too."""
    name: str
    ours: object
    plain: object
    shapes: list
    options: dict = {}
    dtypes: tuple = ALL_DTYPES
    scale: int = 1
    strided: bool = False
    replaced: bool = False

    def inputs(self, dtype):
        every = [self.scale * random(*shape, dtype=dtype) for shape in self.shapes]
        return [x.mT.contiguous().mT if self.strided and x.dim() > 1 else x for x in every]


def sizes(text):
    """A table's rows. Those behind "GPU", which are large, are for one; the interpreter takes those before."""
    small, _, large = text.partition("GPU")
    return table(small.rstrip() + large * bool(GPUS))


# Rows, width.
NORMS = sizes("""
    7  127
    2  1000
    GPU
    5  768
    4  1600
    2  5000""")
# B, H, Tq, Tk, D. Causal, in the fifth the first 15 rows see no key. The last ones are whole tiles, as specialised
# warps of a Hopper take them, one a program and many.
ATTENTIONS = sizes("""
    2  3   17    127   32
    1  2   130   130   64
    2  1   33    70    128
    1  2   5     20    256
    1  2   20    5     16
    GPU
    2  3   1000  1000  64
    1  1   128   128   128
    3  5   384   384   64
    2  20  256   1024  128
    1  5   2048  2048  128""")
# B, groups, heads of a group, T, D.
GROUPED_ATTENTIONS = sizes("""
    2  2  2  70   16
    GPU
    2  4  2  256  128
    1  2  3  384  64""")


def rows_of_kernels():
    for name, ours, plain in ("elu", kernels.elu, F.elu), ("gelu", kernels.gelu, plain_gelu):
        yield Row(name, ours, plain, [(3, 50, 7)], scale=3, strided=True)

    eps = {"eps": 0.1}
    for rows, width in NORMS:
        x, w = (2, rows, width), (width,)
        yield Row("norm", kernels.layer_norm, plain_norm, [x, w, w], eps, scale=2, strided=True, replaced=True)
        yield Row("add, norm", add_layer_norm, lambda x, r, *more, eps: (x + r, plain_norm(x + r, *more, eps)),
                  [x, x, w, w], eps)
        yield Row("rms norm", tuned_rms_norm, further.llama.rms_norm, [x, w], eps, scale=2)
        yield Row("add, rms norm", lambda x, r, w, eps: add_layer_norm(x, r, w, None, eps),
                  lambda x, r, w, eps: (x + r, further.llama.rms_norm(x + r, w, eps)), [x, x, w], eps)
    yield Row("swiglu", fast.llama.swiglu, further.llama.swiglu, [(2, 3, 2060)], scale=3)
    yield Row("rotary", fast.llama.rotary, further.llama.rotary, [(2, 5, 4, 3, 24)], turns(5, 24))

    for (B, H, Tq, Tk, D), causal in itertools.product(ATTENTIONS, (True, False)):
        name, masked, (q, k) = "attention" + " causal" * causal, {"is_causal": causal}, ((B, H, T, D) for T in (Tq, Tk))
        yield Row(name, lambda *qkv, is_causal: kernels.FlashAttention.apply(*qkv, is_causal), plain_attention,
                  [q, k, k], masked, WITH_PRODUCTS, strided=causal, replaced=True)
        if Tq == Tk and causal:
            yield Row("simple attention", lambda *qkv, is_causal: kernels.SimpleAttention.apply(*qkv), plain_attention,
                      [q, k, k], masked, WITH_PRODUCTS)
        if Tq == Tk:
            yield Row(f"packed {name}", kernels.attention, plain_packed_attention, [(B, Tq, 3, H, D)], masked,
                      WITH_PRODUCTS, replaced=True)
    for B, G, shared, T, D in GROUPED_ATTENTIONS:
        yield Row("grouped attention causal", kernels.attention, plain_packed_attention, [(B, T, G + 2, shared, D)],
                  {"is_causal": True}, WITH_PRODUCTS, replaced=True)

    for rows, vocab in (17, 127), (2, 5000):
        whole = (torch.arange(2 * rows, device=KERNEL_DEVICE) * 7 // 2 % vocab)[::2]  # not contiguous
        some, none = whole.clone(), torch.full_like(whole, -1)
        some[1::3], some[4::6] = -1, -100
        for which, targets in ("", whole), (" of some rows, strided", some), (" of no row", none):
            yield Row(f"cross-entropy{which}", cross_entropy, plain_cross_entropy, [(rows, vocab)],
                      {"targets": targets}, scale=5, strided=targets is some)
    # More than the kernel reads at a time is impossible.
    hidden, last = torch.arange(5000, device=KERNEL_DEVICE) < 4097, torch.full((2,), 4999, device=KERNEL_DEVICE)
    yield Row("cross-entropy of what is read last",
              lambda z: cross_entropy(z.masked_fill(hidden, -math.inf), last),
              lambda z: plain_cross_entropy(z.masked_fill(hidden, -math.inf), last), [(2, 5000)])

    # Of the groups some have no rows, one, many; all rows are in one; there are none at all.
    for counts, K, N in ([3, 0, 1, 70], 40, 264), ([0, 0, 40], 16, 64), ([0, 0], 8, 24), ([1], 33, 7), (
            [16, 64, 0], 72, 80):
        groups, shapes = {"counts": counts}, [(sum(counts), K), (len(counts), N, K), (len(counts), N)]
        yield Row(f"grouped {counts}", grouped_linear, plain_grouped, shapes, groups, WITH_PRODUCTS, replaced=True)
    yield Row("grouped strided, without bias", grouped_linear, plain_grouped, shapes[:2], groups, WITH_PRODUCTS,
              strided=True, replaced=True)

    # 8 does not divide the outputs, so fast/ pads a weight of 16 bits, and cuts off whatever gradient comes back.
    x, w, b = (2, 3, 16), (37, 16), (37,)
    targets, linear = torch.arange(6, device=KERNEL_DEVICE), lambda *inputs: kernels.table[F.linear](*inputs)

    def loss_of_linear(x, w):
        y = linear(x, w)
        torch.autograd.grad(y.square().sum(), x, retain_graph=True)  # a backward before, which changes nothing
        return cross_entropy(y.flatten(0, 1), targets)

    yield Row("linear", lambda x, w, b: fast.linear.Product.apply(x, w, b, None), F.linear, [x, w, b],
              dtypes=(torch.float32,), replaced=True)
    yield Row("linear of a row", linear, F.linear, [(16,), w, b])
    yield Row("linear without bias", linear, F.linear, [x, w])
    yield Row("linear, cross-entropy", loss_of_linear,
              lambda x, w: plain_cross_entropy(F.linear(x, w).flatten(0, 1), targets), [x, w])

    for M, K, N, options in ((33, 40, 17, {}), (17, 127, 33, {"function": kernels._gelu}),
                             (127, 40, 100, {"tiles": (32, 16, 16, 3)}), (70, 40, 130, {"function": kernels._elu})):
        yield Row("product", lambda a, b, **options: matmul(a, b, **options), plain_product, [(M, K), (K, N)],
                  options, WITH_PRODUCTS, strided="function" in options, replaced=True)


def proofs_of_kernels():
    """Ways, dtypes and rows. Of an operation in several sizes that fast/ replaces, the interpreter takes half, in which
    every pair of size, way and dtype still occurs; a GPU takes all."""
    rows = [(row.name.partition(" [")[0], row) for row in rows_of_kernels()]
    sizes, seen = Counter(name for name, _ in rows), Counter()
    for name, row in rows:
        for (i, way), (j, dtype) in itertools.product(enumerate(("fast", "plain")[:1 + row.replaced]),
                                                      enumerate(row.dtypes)):
            if GPUS or not row.replaced or sizes[name] == 1 or (i + j + seen[name]) % 2 == 0:
                yield pytest.param(way, dtype, row, id=f"{row.name} {row.shapes[0]}-{way}-{str(dtype)[6:]}")
        seen[name] += 1


@parametrize("either_way,dtype,row", [*proofs_of_kernels()], indirect=["either_way"])
def test_kernel(either_way, dtype, row):
    """A GPU multiplies and adds attention's scores with one rounding, the interpreter with two: there float32 may be
    four units off, or PyTorch's luck with the instructions of one CPU or another decides. Rows so wide that several
    programs of layer norm share one: test_python_kernels_py. In float32 ours and cuBLAS add a column's rows one after
    the other, PyTorch's fastest attention in groups: of 1000 rows they are off by 8e-7 and 5e-7 (H200)."""
    scores = "attention" in row.name
    ours, plain = (functools.partial(function, **row.options) for function in (row.ours, row.plain))
    ways = [plain] + [sdpa_kernel(SDPBackend.MATH)(plain)] * (scores and dtype == torch.float32)
    no_worse_than_pytorch(ours, ways, row.inputs(dtype), 4 if scores and not GPUS else 2)


def test_activations_near_0_and_far_from_it(triton_kernels):
    x = torch.tensor([-1e-7, -1e-3, -0.3, -0.36, -100.0, 0.0, 1e-7, 50.0], device=KERNEL_DEVICE)
    for ours, theirs, least in (kernels.elu, F.elu, 0), (kernels.gelu, plain_gelu, 1e-8):
        assert torch.allclose(ours(x).double(), theirs(x.double()), rtol=1e-6, atol=least)
        assert ours(x[:0, None]).shape == (0, 1) and ours(x[:1]).equal(ours(x)[:1])


def test_layer_norm_is_deterministic_and_takes_unused_results(triton_kernels):
    leaves = [random(*shape).requires_grad_() for shape in ((50, 96), (50, 96), (96,), (96,))]
    first, again = (torch.autograd.grad(add_layer_norm(*leaves)[1].square().sum(), leaves) for _ in range(2))
    assert all(map(torch.equal, first, again))
    assert torch.autograd.grad(add_layer_norm(*leaves)[0].sum(), leaves[0])[0].eq(1).all()


def test_cross_entropy_overwrites_logits_and_says_so(triton_kernels):
    x, targets = random(6, 40).requires_grad_(), torch.arange(6, device=KERNEL_DEVICE)
    logits = x * 1
    loss, other = cross_entropy(logits, targets), logits.square().sum()  # saves the logits too
    loss.backward(retain_graph=True)
    assert logits.equal(x.grad)  # no second tensor of that size was made
    for again in loss, other:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            again.backward()


def test_unsupported_tensors_raise_with_shape_and_reason(triton_kernels):
    x, w, wide = random(3, 4), random(4), random(65537)
    q, odd = random(1, 2, 5, 16), random(1, 2, 5, 24)
    double, three = torch.nn.Parameter(w.double()), torch.tensor([3], device=KERNEL_DEVICE)
    double.grad = w.double()
    exchange = AllToAll([0, 0], 0, "cpu")
    for words, call in {
            "(3, 4) of torch.float64": lambda: kernels.gelu(x.double()),
            "(3, 4) with weight (3,)": lambda: kernels.layer_norm(x, w[:3], w),
            "1 to 65536": lambda: kernels.layer_norm(wide[None], wide, wide),
            "(1, 4)": lambda: add_layer_norm(x, x[:1], w, w),
            "(3, 4) and targets (1,)": lambda: cross_entropy(x, three),
            "head dim 24 (q (1, 2, 5, 24)": lambda: kernels.FlashAttention.apply(odd, odd, odd, True),
            "v (1, 2, 6, 16)": lambda: kernels.FlashAttention.apply(q, q, random(1, 2, 6, 16), True),
            "packed attention takes qkv (B, T, 3, H, D), or (B, T, G + 2, H/G, D), not (1, 5, 2, 2, 16)":
                lambda: kernels.attention(random(1, 5, 2, 2, 16)),
            "(3, 4) torch.float32: needs (M, K) and (K, N)": lambda: matmul(x, x),
            "my own block has 8 bytes to be sent, 16 to be received":
                lambda: exchange([(0, 8), (0, 0)], [(0, 16), (0, 0)]),
            "(4,) of torch.float64": AdamW([double]).step,
            "sum of rows": lambda: sum_rows([w, w[1:]], w, False),
            "'cuda'": lambda: checked_use("cuda")}.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            call()


def test_a_choice_of_kernels_is_obeyed(triton_kernels):
    for choice in "torch", "triton":
        kernels.use(choice)
        assert kernels.on_triton(random(2)) == (choice == "triton")


def test_auto_leaves_the_cpu_and_float64_to_pytorch(monkeypatch):
    monkeypatch.setattr(kernels.Map, "apply", lambda *args: pytest.fail("a Triton kernel ran"))
    kernels.gelu(torch.ones(3, device="cpu")), kernels.gelu(torch.ones(3, dtype=torch.float64, device=KERNEL_DEVICE))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for interpreted, dtype, heads, says in (
            (True, "fp32", 16, "dim of 8"), (True, "fp64", 4, ""), (False, "fp32", 4, "")):
        monkeypatch.setattr(kernels, "INTERPRETED", interpreted)
        with pytest.raises(BadInput, match=f"--kernels triton.*{says}.*give --kernels auto"):
            check_layout(Settings(kernels="triton", dtype=dtype), model.GPTConfig(n_head=heads), 1, 1)
    with pytest.raises(ValueError, match="needs the package triton, and a CUDA GPU"):
        checked_use("triton")


@parametrize("resumed", [False, True])
def test_adamw_is_torch_s_and_steps_neighbours_by_one_kernel(resumed, triton_kernels):
    """Two whose numbers, gradients and copies lie side by side, and one whose do not. It clips on its way. Moments that
    a checkpoint brings lie side by side, too."""
    device, options = KERNEL_DEVICE, {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.3}
    start, grads = random(3000).float(), random(2, 3000).float()
    copies = torch.empty(3000, device=device, dtype=torch.float16)
    places = slice(0, 1000), slice(1000, 1700), slice(1800, 3000)
    params = [torch.nn.Parameter(start[place]) for place in places]
    theirs = [torch.nn.Parameter(start[place].double()) for place in places]
    ours, exact = AdamW(params[::-1], **options), torch.optim.AdamW(theirs, **options)  # units list them in any order
    if resumed:
        net = SimpleNamespace(units=[], pieces={}, pipeline=SimpleNamespace())
        prepare(SimpleNamespace(s=Settings(resume="there"), net=net, optimizer=ours))
        for mine, key in itertools.product(params, MOMENTS):
            ours.state[mine].setdefault(key, torch.zeros_like(mine))  # as further/whole.py reads them
    ours.copies.update(zip(params, (copies[place] for place in places)))
    with patch.object(ours, "runs_of", side_effect=lambda some: runs.append(runs_of(some)) or runs[-1]):
        runs, runs_of = [], AdamW.runs_of.__get__(ours)
        for i, row in enumerate(grads):
            scale = 0.25 + i  # another one every time: Adam divides one that stays the same out
            ours.scale = torch.tensor([scale], device=device)
            for place, mine, other in zip(places, params, theirs):
                mine.grad, other.grad = row[place], scale * row[place].double()
            ours.step(), exact.step()
            assert ours.scale is None  # a scale is one step's
    assert [[len(run) for run in step] for step in runs] == [[2, 1]] * 2
    for place, mine, other in zip(places, params, theirs):
        torch.testing.assert_close([mine, ours.state[mine]], [other, exact.state[other]], rtol=1e-6, atol=1e-6,
                                   check_dtype=False)
        assert copies[place].equal(mine.half()) and ours.state[mine]["step"] == 2


@parametrize("dtype", [torch.float64, *ALL_DTYPES], ids=str)
def test_sum_rows(dtype, triton_kernels):
    """In this order, too, but the interpreter cuts digits of bf16 off."""
    tolerance = torch.finfo(dtype).eps
    for ranks, n in [(1, 1), (2, 17), (5, 5001)]:
        rows = random(ranks, n).to(dtype).unbind()
        total = sum(row.to(torch.promote_types(dtype, torch.float32)) for row in rows)
        mean, out = torch.empty(2, n, dtype=dtype, device=KERNEL_DEVICE)
        sum_rows(rows, mean, True)
        assert close(mean, (total / ranks).to(dtype), tolerance)
        sum_rows(rows, out, False)
        assert close(out, total.to(dtype), 0 if GPUS or dtype != torch.bfloat16 else tolerance)
        sum_rows(rows, rows[-1], False)
        assert rows[-1].equal(out)


def test_python_kernels_py(monkeypatch, capsys):
    """(In the interpreter one of attention's sizes: test_kernel has larger ones.)"""
    if kernels.INTERPRETED:
        monkeypatch.setitem(CASES, "attention", lambda size: itertools.islice(attention(size), 1))
    monkeypatch.setattr(sys, "argv", ["kernels.py"])
    main()
    kernels.use("auto")
    printed = capsys.readouterr().out
    assert tiles_read(32, 32, 1, 128) == 4 + 32 and tiles_read(32, 32, 8, 128) == 8 + 16  # rows + columns of tiles
    if kernels.HAVE_TRITON:
        rows = re.findall(r"(?m)^  (.{30})(.*)\|(.*)\|(.*e-\d\d.*)$", printed)
        assert {"cross-entropy", "product 64", "add, norm 1600"} < {name.strip() for name, *_ in rows}
        assert printed.endswith("times, on a GPU: python bench.py kernels\n")
        for name, *columns in rows:
            *ours, theirs = ([float(word) for word in column.split()] for column in columns)
            assert all(a <= 2 * max(b, 1e-6) for way in ours for a, b in zip(way, theirs)), name


# ----------------------------------------------------------------------------------------------------- experts' kernels

@parametrize("k, dtype", [(1, torch.bfloat16), (2, torch.float32), (5, torch.float32)], ids=str)
def test_sorting_follows_pytorch(k, dtype, triton_kernels):
    """Outputs, all gradients and the loads; tokens, and of k = 5 choices, are more than one program's; an expert that
    few choose gets none."""
    mixture = MixtureOfExperts(ExpertsConfig(n_embd=40, n_head=2, inner=24, experts=5, top_k=k))
    for t in [*mixture.parameters(), *mixture.buffers()]:
        torch.nn.init.normal_(t, std=0.3)
    mixture = mixture.to(KERNEL_DEVICE, dtype)
    mixture.router.bias[3] = -2
    x, dy = random(2, 35, 40, dtype=dtype).requires_grad_(), random(2, 35, 40, dtype=dtype)

    def results(choice):
        kernels.use(choice)
        mixture.router.load = 0
        y = mixture(x)
        grads = torch.autograd.grad(y, [x, *mixture.parameters()], dy)
        return mixture.router.load, y.detach(), *grads

    (load, *theirs), (same, *ours) = results("torch"), results("triton")
    tolerance = 1e-5 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    assert load.equal(same) and (load[3] == 0) == (k < 5) and isinstance(mixture.experts, FusedExperts)
    assert all(close(one, other, tolerance) for one, other in zip(ours, theirs))


def test_a_kernel_compiles_for_a_gpu_that_is_not_there(capsys):
    """Neighbours are loaded four at a time, every second number alone; products are those of the tensor cores."""
    if not kernels.HAVE_TRITON:
        pytest.skip("no Triton")
    compiler = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "lessons", "compile"], env=compiler, cwd=HERE, capture_output=True,
                          text=True, timeout=300)
    rows = dict(re.findall(r"^(.*?)  +(\d.*)", done.stdout, re.MULTILINE))
    assert "2 ld.global.v4.b32, " in rows["copy, stride 1"] and "8 ld.global.b32, " in rows["copy, stride 2"]
    products = [re.search(r" (\d+) wgmma\S*m64n128k(\d+)\.f32\.(\w+)", rows[f"product, {kind}"])
                for kind in ("bf16", "fp32")]
    wide, odd = rows["product, bf16"], rows["  B's rows of 50,257"]  # which no copy of 16 bytes can load
    assert "ld.global.b16" in odd and "ld.global.b16" not in wide
    assert int(odd.split(" cp.async.cg")[0].split()[-1]) == int(wide.split(" cp.async.cg")[0].split()[-1]) / 2
    # Two warpgroups share 128 rows, and a round has k = 32. Of float32 three products make one.
    assert [tuple(found.groups()) for found in products] == [("2", "16", "bf16"), ("12", "8", "tf32")]
    assert occupancy(128, 0, 4) == 16 and occupancy(129, 0, 4) == 12 and occupancy(32, 100 << 10, 8) == 16
    with patch.object(kernels, "INTERPRETED", True), pytest.raises(SystemExit, match="2"):
        output_of(lessons.demos.main, "compile")
    assert "env -u TRITON_INTERPRET python -m lessons compile" in capsys.readouterr().err
