"""Kernels equal PyTorch."""

import functools
import itertools
import math
import re
import sys

import pytest
import torch
import torch.nn.functional as F

import collectives as dist
import fast
import kernels
import model
import parallel
from tests.collectives import _spread
from tests.pool import GPUS, close, needs_kernels
from fast.adamw import AdamW
from fast.context import add_rows
from fast.exchange import sum_rows
from fast.norm import add_layer_norm
from lessons.kernels import main, tiles_read
from safe.flags import BadInput, check_layout, Settings


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
LENGTHS = [1, 17, 127, 1000, 4096]


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


def put_back(monkeypatch, *modules):
    """Let the reference's own leaves stand in these modules."""
    for module, name, plain in fast.PLAIN:
        if module in modules:
            monkeypatch.setattr(module, name, plain)


@pytest.fixture
def plain_kernels(triton_kernels, monkeypatch):
    """Only kernels.py: one tile size, nothing fused or padded."""
    put_back(monkeypatch, kernels)


@pytest.fixture(params=["fast", "plain"])
def either_way(request, triton_kernels):
    """By fast/, and by kernels.py alone."""
    if request.param == "plain":
        request.getfixturevalue("plain_kernels")


def random(*shape, dtype=torch.float32, gaps=False):
    x = torch.randn(*shape, device=KERNEL_DEVICE).to(dtype)
    return (_spread(x.cpu()).to(KERNEL_DEVICE) if gaps and KERNEL_DEVICE == "cpu"
            else x.t().contiguous().t() if gaps else x)


def no_worse_than_pytorch(ours, theirs, inputs, units=2):
    """Results and all gradients of `ours` against float64: within 1.1 of PyTorch's own error on the same inputs.

    Where PyTorch is exact by luck (one element), half a unit in the last place is allowed; in float32, where exp has
    such errors, `units`. The interpreter does not round to bf16 but cuts digits off: twice the error.
    """
    runs = []
    for function, cast in ((ours, lambda x: x), (theirs, lambda x: x), (theirs, lambda x: x.double())):
        leaves = [cast(x.detach()).requires_grad_() for x in inputs]
        outputs = function(*[x * 1 for x in leaves])  # not leaves: cross-entropy overwrites its input
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.manual_seed(1)
        grads = [cast(torch.randn(y.shape, device=y.device).to(inputs[0].dtype)).to(y.dtype) for y in outputs]
        runs.append([y.detach().clone() for y in outputs] + list(torch.autograd.grad(outputs, leaves, grads)))
    for i, (mine, other, exact) in enumerate(zip(*runs)):
        if exact.norm() < 1e-12:  # a gradient of exactly 0, as that of a single key
            assert mine.norm() < 1e-5
            continue
        error, allowed = (float((x.double() - exact).norm() / exact.norm()) for x in (mine, other))
        unit = torch.finfo(mine.dtype).eps * (units if mine.dtype == torch.float32 else 0.5)
        slack = 2.2 if mine.dtype == torch.bfloat16 and not GPUS else 1.1
        assert mine.shape == exact.shape and error <= slack * max(allowed, unit), (i, error, allowed)


def test_hand_derived_backwards_equal_autograd():
    x, w, b, dy = (torch.randn(5, 7, dtype=torch.float64) for _ in range(4))
    x.requires_grad_()
    for forward, backward, library in [(kernels.elu_reference, kernels.elu_backward_reference, F.elu),
                                       (kernels.gelu_reference, kernels.gelu_backward_reference,
                                        lambda x: F.gelu(x, approximate="tanh"))]:
        assert (close(forward(x), library(x), 1e-14)
                and close(backward(x, dy).detach(), torch.autograd.grad(library(x), x, dy)[0], 1e-14))
    w, b = w[0].clone().requires_grad_(), b[0].clone().requires_grad_()
    y, m, k = kernels.layer_norm_reference(x, w, b, 1e-5)
    assert close(y, F.layer_norm(x, (7,), w, b), 1e-14)
    for mine, exact in zip(kernels.layer_norm_backward_reference(x, dy, w, m, k),
                           torch.autograd.grad(y, (x, w, b), dy)):
        assert close(mine.detach(), exact, 1e-14)
    q, k, v, do = (torch.randn(2, 3, T, 4, dtype=torch.float64, requires_grad=True) for T in (5, 7, 7, 5))
    for is_causal in (True, False):
        o, lse = kernels.attention_reference(q, k, v, is_causal)
        assert close(o.detach(), plain_attention(q, k, v, is_causal).detach(), 1e-14)
        for mine, exact in zip(kernels.attention_backward_reference(q, k, v, o, lse, do, is_causal),
                               torch.autograd.grad(o, (q, k, v), do)):
            assert close(mine.detach(), exact, 1e-13)
    targets = torch.tensor([0, 6, 3, 3, 1])
    loss = F.cross_entropy(x, targets)
    top, total, picked = kernels.softmax_sums(x.detach(), targets)
    assert close((total.log() + top - picked).mean(), loss.detach(), 1e-14)
    assert close(kernels.softmax_minus_onehot(x.detach(), targets, top, total, x.new_tensor(3 / 5)),
                 torch.autograd.grad(3 * loss, x)[0], 1e-14)


def plain_attention(q, k, v, is_causal):
    mask = (torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
            if is_causal else None)
    # float32's kernel takes nothing else, and PyTorch's other path is as exact as it is slow.
    whole = torch.contiguous_format
    return F.scaled_dot_product_attention(q, k.clone(memory_format=whole), v, mask)


def plain_norm(x, w, b):
    # With eps 1e-5 a GPU's fused multiply-add leaves 316 roundings of a row of one number, whose gradient is 0.
    return F.layer_norm(x, w.shape, w, b, 1e-3)


def plain_cross_entropy(z, targets):
    return F.cross_entropy(z if z.dtype == torch.float64 else z.float(), targets)


def grouped_by_loop(counts, x, w, b=None):
    return torch.cat([F.linear(rows, w[e], None if b is None else b[e]) for e, rows in enumerate(x.split(counts))])


def grouped_linear(counts, x, w, b=None):
    return kernels.grouped_linear(x, w, b, torch.tensor(counts, device=x.device))


GROUPS = [[3, 0, 1, 70, 0, 17], [0, 0, 40], [1], [0, 0], [16, 16, 64, 0]]  # none, one, many; all in one; no rows at all
ALL_DTYPES = torch.float32, torch.float16, torch.bfloat16
HALF = torch.bfloat16 if GPUS else torch.float16  # no bf16 dot in the interpreter
WITH_PRODUCTS = torch.float32, HALF


def rows_of_kernels():
    """Yield (whether fast/ replaces it, name, ours, PyTorch's, a function that draws inputs of a dtype, dtypes)."""
    def draw(*shapes, scale=1, swap=None):  # swap: two dimensions that change places in memory
        def inputs(dtype):
            every = [scale * random(*shape, dtype=dtype) for shape in shapes]
            return [x.transpose(*swap).contiguous().transpose(*swap) for x in every] if swap else every
        return inputs

    for ours, theirs in (kernels.elu, F.elu), (kernels.gelu, functools.partial(F.gelu, approximate="tanh")):
        for n in LENGTHS:
            yield False, f"{ours.__name__} {n}", ours, theirs, draw((n,), scale=3), ALL_DTYPES
        yield False, f"{ours.__name__} strided", ours, theirs, draw((3, 50, 7), swap=(0, 2)), ALL_DTYPES

    norm, add = (functools.partial(function, eps=1e-3) for function in (kernels.layer_norm, add_layer_norm))
    for rows, width in [(1, 1), (3, 17), (7, 127), (2, 1000)] + ([(5, 768), (4, 1600), (2, 5000)] if GPUS else []):
        x, w, size = (2, rows, width), (width,), f"{rows} x {width}"
        yield True, f"norm {size}", norm, plain_norm, draw(x, w, w, scale=2), ALL_DTYPES
        yield (False, f"add, norm {size}", add, lambda x, r, w, b: (x + r, plain_norm(x + r, w, b)), draw(x, x, w, w),
               ALL_DTYPES)
        yield (False, f"x, norm {size}", lambda x, w, b: add(x, None, w, b), lambda x, w, b: (x, plain_norm(x, w, b)),
               lambda dtype, x=x, w=w: draw(x, swap=(1, 2))(dtype) + draw(w, w)(dtype), ALL_DTYPES)

    sizes = [(2, 3, 1, 1, 16), (2, 3, 17, 127, 32), (1, 2, 130, 130, 64), (2, 1, 33, 70, 128), (1, 2, 5, 20, 256)]
    for (B, H, Tq, Tk, D), causal in itertools.product(sizes + [(2, 3, 1000, 1000, 64)] * bool(GPUS), (True, False)):
        size, plain = f"{B} {H} {Tq} {Tk} {D}{' causal' * causal}", functools.partial(plain_attention, is_causal=causal)
        q, k = (B, H, Tq, D), (B, H, Tk, D)
        yield (True, f"attention {size}", lambda *qkv, causal=causal: kernels.FlashAttention.apply(*qkv, causal), plain,
               lambda dtype, q=q, k=k: draw(q)(dtype) + draw(k, swap=(2, 3))(dtype) + draw(k)(dtype), WITH_PRODUCTS)
        if Tq == Tk:
            yield (True, f"packed attention {size}", functools.partial(kernels.attention, is_causal=causal),
                   lambda qkv, plain=plain: plain(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2),
                   draw((B, Tq, 3, H, D)), WITH_PRODUCTS)

    for rows, vocab in (1, 1), (17, 127), (3, 4096), (2, 5000):
        targets = torch.arange(2 * rows, device=KERNEL_DEVICE)[::2] * 7 % vocab  # not contiguous
        for way, swap in ("", None), (" strided", (0, 1)):
            yield (False, f"cross-entropy {rows} x {vocab}{way}",  # 3 times, so that the gradient that arrives is not 1
                   lambda z, targets=targets: 3 * kernels.cross_entropy(z, targets),
                   lambda z, targets=targets: 3 * plain_cross_entropy(z, targets),
                   draw((rows, vocab), scale=5, swap=swap), ALL_DTYPES)

    for counts, K, N in zip(GROUPS, (40, 16, 33, 8, 72), (264, 64, 7, 24, 80)):
        ours, theirs = (functools.partial(function, counts) for function in (grouped_linear, grouped_by_loop))
        x, w, b = (sum(counts), K), (len(counts), N, K), (len(counts), N)
        yield True, f"grouped {counts}", ours, theirs, draw(x, w, b), WITH_PRODUCTS
        if counts is GROUPS[0]:
            yield True, f"grouped {counts} without bias", ours, theirs, draw(x, w), WITH_PRODUCTS
            yield True, f"grouped {counts} strided", ours, theirs, draw(x, w, swap=(-1, -2)), WITH_PRODUCTS

    yield (True, "linear", lambda x, w, b: kernels.Linear.apply(x, w, b, None), F.linear,
           draw((2, 3, 16), (37, 16), (37,)), (torch.float32,))


@pytest.mark.parametrize("way,dtype,ours,theirs,inputs", [
    pytest.param(way, dtype, ours, theirs, inputs, id=f"{name}-{way}-{str(dtype)[6:]}")
    for replaced, name, ours, theirs, inputs, dtypes in rows_of_kernels()
    for way in ("fast", "plain")[:1 + replaced] for dtype in dtypes])
def test_kernel(request, way, dtype, ours, theirs, inputs, triton_kernels, monkeypatch):
    """A GPU multiplies and adds attention's scores with one rounding, the interpreter with two: there float32 may be
    four units off, or PyTorch's luck with the instructions of one CPU or another decides. Rows so wide that several
    programs of layer norm share one: test_python_kernels_py."""
    if way == "plain":
        put_back(monkeypatch, kernels)
    units = 4 if "attention" in request.node.name and not GPUS else 2
    no_worse_than_pytorch(ours, theirs, inputs(dtype), units)


def test_activations_near_0_and_far_from_it(triton_kernels):
    tiny = torch.tensor([-1e-7, -1e-3, -0.3, -0.36, -100.0, 0.0, 1e-7, 50.0], device=KERNEL_DEVICE)
    tanh = functools.partial(F.gelu, approximate="tanh")
    for ours, theirs, least in (kernels.elu, F.elu, 0), (kernels.gelu, tanh, 1e-8):
        assert torch.allclose(ours(tiny).double(), theirs(tiny.double()), rtol=1e-6, atol=least)
        assert ours(torch.empty(0, 4, device=KERNEL_DEVICE)).shape == (0, 4)


def test_layer_norm_is_deterministic_and_takes_unused_results(triton_kernels):
    x, r, w, b = (random(50, 96).requires_grad_(), random(50, 96), random(96).requires_grad_(),
                  random(96).requires_grad_())
    grads = [torch.autograd.grad(add_layer_norm(x, r, w, b)[1].square().sum(), (x, w, b)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    assert torch.equal(torch.autograd.grad(add_layer_norm(x, r, w, b)[0].sum(), x)[0], torch.ones_like(x))


def test_flash_attention_of_rows_that_see_no_key(either_way):
    q, k, v = (random(1, 2, T, 16).requires_grad_() for T in (20, 5, 5))
    y = kernels.FlashAttention.apply(q, k, v, True)
    y.sum().backward()
    assert (not y[:, :, :15].any() and not q.grad[:, :, :15].any() and y[:, :, 15:].any() and q.grad.isfinite().all()
            and v.grad.isfinite().all())


def test_cross_entropy_where_all_that_is_read_at_first_is_impossible(triton_kernels):
    z, targets = random(2, 5000), torch.full((2,), 4999, device=KERNEL_DEVICE)
    z[:, :4097] = -math.inf  # more than the kernel reads at a time
    assert close(kernels.cross_entropy(z, targets), F.cross_entropy(z.double(), targets), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_outputs_that_8_does_not_divide(dtype, triton_kernels):
    """The weight is padded with zeros and the result is a view without them, whatever gradient comes back and however
    often."""
    one = random(16, dtype=dtype).requires_grad_()  # a row alone
    assert torch.autograd.grad(kernels.linear(one, random(37, 16, dtype=dtype), random(37, dtype=dtype)).sum(),
                               one)[0].shape == (16,)
    x, w, targets = (random(2, 3, 16, dtype=dtype).requires_grad_(), random(37, 16, dtype=dtype).requires_grad_(),
                     torch.arange(6, device=KERNEL_DEVICE))
    kernels.use("torch")
    want = kernels.linear(x, w)
    want_grads = [torch.autograd.grad(f(want), [x, w], retain_graph=True) for f in (
        lambda y: y.square().sum(), lambda y: F.cross_entropy(y.float().flatten(0, 1), targets))]
    kernels.use("triton")
    got = kernels.linear(x, w)
    assert got.shape == want.shape and close(got.detach(), want.detach(), 1e-2)
    for f, grads in zip((lambda y: y.square().sum(), lambda y: kernels.cross_entropy(y.flatten(0, 1), targets)),
                        want_grads):
        for g, h in zip(torch.autograd.grad(f(got), [x, w], retain_graph=True), grads):
            assert g.shape == h.shape and close(g, h, 2e-2)


def test_cross_entropy_overwrites_logits_and_says_so(triton_kernels):
    x, targets = random(6, 40).requires_grad_(), torch.arange(6, device=KERNEL_DEVICE)
    logits = x * 1
    loss = kernels.cross_entropy(logits, targets)
    loss.backward(retain_graph=True)
    assert torch.equal(logits, x.grad)  # no second tensor of that size was made
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    logits = x * 1
    loss, other = kernels.cross_entropy(logits, targets), logits.square().sum()  # saves the logits too
    loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def vocabulary_parallel_loss(dtype, choice):
    kernels.use(choice)
    torch.manual_seed(0)
    logits, targets = (4 * torch.randn(2, 3, 41, device="cpu")).to(dtype), torch.randint(41, (2, 3), device="cpu")
    logits, targets = logits.to(torch.get_default_device()), targets.to(torch.get_default_device())
    mine = logits.tensor_split(dist.get_world_size(), 2)[dist.get_rank()].clone().requires_grad_()
    loss = parallel.cross_entropy(mine * 1, targets, 41, None)
    loss.backward()
    kernels.use("auto")
    return loss.item(), mine.grad.cpu()


def test_vocabulary_parallel_cross_entropy_by_kernels(pool):
    needs_kernels(pool)
    ours, exact = (pool(3).run(vocabulary_parallel_loss, dtype, choice)
                   for dtype, choice in ((torch.float32, "triton"), (torch.float64, "torch")))
    for (loss, grad), (exact_loss, exact_grad) in zip(ours, exact):
        assert close(loss, exact_loss, 1e-6) and close(grad, exact_grad, 1e-6)


@pytest.mark.parametrize("dtype", WITH_PRODUCTS, ids=str)
def test_matmul(dtype, triton_kernels):
    for (M, K, N), tiles in [((1, 1, 1), (16, 16, 16, 1)), ((17, 127, 33), (16, 16, 32, 2)),
                             ((127, 40, 100), (32, 16, 16, 3))]:
        a, b = random(M, K, dtype=dtype), random(N, K, dtype=dtype).T
        product = a.double() @ b.double()
        unit = torch.finfo(dtype).eps * (2 if dtype == torch.float32 else 0.5)  # as above
        for ours, theirs, exact in ((kernels.matmul(a, b, None, tiles), a @ b, product), (
                kernels.matmul(a, b, kernels._gelu, tiles), F.gelu(a @ b, approximate="tanh"),
                kernels.gelu_reference(product))):
            error, allowed = (float((c.double() - exact).norm() / exact.norm()) for c in (ours, theirs))
            assert error <= 1.1 * max(allowed, unit), (M, K, N, error, allowed)
    # Rows + columns of tiles.
    assert tiles_read(32, 32, 1, 128) == 4 + 32 and tiles_read(32, 32, 8, 128) == 8 + 16


def test_a_choice_of_kernels_is_obeyed_plain(plain_kernels):
    for choice in ("torch", "triton"):
        kernels.use(choice)
        assert kernels.on_triton(random(2)) == (choice == "triton")


def test_product_plain(plain_kernels):
    a, b = random(70, 40), random(40, 130)
    assert close(kernels.matmul(a, b, kernels._elu).double(), F.elu(a.double() @ b.double()), 1e-6)
    x, w, bias, taken = (random(2, 3, 16).requires_grad_(), random(37, 16).requires_grad_(),
                         random(37).requires_grad_(), [])
    y = kernels.Linear.apply(x, w, bias, None)
    assert y.equal(kernels.linear(x, w, bias))
    dx, dw, db = torch.autograd.grad(y.square().sum(), (x, w, bias))
    kernels.Linear.apply(x, w.detach(), bias.detach(),
                         lambda dy, x: taken.extend((dy.T @ x, kernels.bias_gradient(dy)))).square().sum().backward()
    assert x.grad.equal(dx) and taken[0].equal(dw) and taken[1].equal(db)


def test_unsupported_tensors_raise_with_shape_and_reason(triton_kernels):
    x, w = random(3, 4), random(4)
    for call, words in [(lambda: kernels.gelu(x.double()), r"\(3, 4\) of torch.float64"),
                        (lambda: kernels.elu(x.int()), "torch.int32"),
                        (lambda: kernels.layer_norm(x, w[:3], w), r"\(3, 4\) with weight \(3,\)"),
                        (lambda: kernels.layer_norm(random(1, 65537), random(65537), random(65537)), "1 to 65536"),
                        (lambda: add_layer_norm(x, x[:1], w, w), r"\(1, 4\)"),
                        (lambda: kernels.cross_entropy(x, torch.zeros(2, dtype=torch.int64)),
                         r"\(3, 4\) and targets \(2,\)"),
                        (lambda: kernels.FlashAttention.apply(*3 * [random(1, 2, 5, 24)], True),
                         r"head dim 24 .*\(1, 2, 5, 24\)"),
                        (lambda: kernels.FlashAttention.apply(*2 * [random(1, 2, 5, 16)], random(1, 2, 6, 16), True),
                         r"v \(1, 2, 6, 16\)"),
                        (lambda: kernels.attention(random(1, 5, 2, 2, 16)), r"packed attention .*\(1, 5, 2, 2, 16\)"),
                        (lambda: kernels.matmul(x, x), r"\(3, 4\).*needs \(M, K\) and \(K, N\)"),
                        (lambda: kernels.grouped_linear(x, random(2, 5, 3), None, torch.tensor([1, 2])),
                         r"x \(3, 4\), weight \(2, 5, 3\)"),
                        (lambda: kernels.grouped_linear(x, random(1, 5, 4).double(), None, torch.tensor([3])),
                         "weight torch.float64"),
                        (lambda: kernels.use("cuda"), "'cuda'")]:
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("way", ["fast", "plain"])
def test_training_with_kernels_follows_pytorch(way, triton_kernels, monkeypatch):
    if way == "plain":
        put_back(monkeypatch, kernels, model)
    config, losses = model.GPTConfig(61, 16, 2, 2, 32), {}
    for choice in ("triton", "torch"):
        kernels.use(choice)
        net = model.GPT(config).to(KERNEL_DEVICE)
        optimizer = torch.optim.SGD(net.parameters(), 0.3)
        for step in range(3):
            x = torch.randint(61, (1, 17), generator=torch.Generator().manual_seed(0)).to(KERNEL_DEVICE)
            loss = parallel.cross_entropy(net(x[:, :-1]), x[:, 1:], 61)
            losses.setdefault(choice, []).append(loss.item())
            if step < 2:  # nobody sees what a last step would change
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    assert close(losses["triton"], losses["torch"], 1e-5) and losses["torch"][-1] < losses["torch"][0] - 0.1


def test_auto_leaves_the_cpu_and_float64_to_pytorch(monkeypatch):
    monkeypatch.setattr(kernels.Map, "apply", lambda *args: pytest.fail("a Triton kernel ran"))
    kernels.gelu(torch.ones(3, device="cpu")), kernels.gelu(torch.ones(3, dtype=torch.float64, device=KERNEL_DEVICE))
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="need a CUDA GPU|need the package triton"):
        kernels.use("triton")
    with pytest.raises(BadInput, match="--kernels triton.*give --kernels auto"):
        check_layout(Settings(kernels="triton"), model.PRESETS["tiny"], 1, 1)
    if kernels.HAVE_TRITON:
        monkeypatch.setattr(kernels, "INTERPRETED", True)
        with pytest.raises(BadInput, match="--kernels triton"):
            check_layout(Settings(kernels="triton", dtype="fp64"), model.PRESETS["tiny"], 1, 1)
        kernels.use("auto")


def test_adamw_is_torch_s_and_clips_and_copies_on_its_way(triton_kernels):
    start, grads = random(1500), random(5, 1500)
    mine, theirs = (torch.nn.Parameter(start.to(d)) for d in (torch.float32, torch.float64))
    kwargs = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.3}
    ours, exact = AdamW([mine], **kwargs), torch.optim.AdamW([theirs], **kwargs)
    copy = torch.empty(1500, dtype=torch.float16, device=mine.device)
    ours.copies = {mine: copy}
    for i, grad in enumerate(grads):  # another scale every time: Adam divides one that stays the same out again
        ours.scale = torch.tensor([0.25 + i], device=mine.device)
        mine.grad, theirs.grad = grad, (0.25 + i) * grad.double()
        ours.step(), exact.step()
        assert ours.scale is None  # a scale is one step's
    assert close(mine, theirs, 1e-6) and torch.equal(copy, mine.detach().half())
    exact.load_state_dict(ours.state_dict())  # the state is torch's
    for a, b in zip(ours.state[mine].values(), exact.state[theirs].values()):
        assert close(a, b, 1e-6)
    with pytest.raises(ValueError, match="1500,.*torch.float64"):
        theirs.grad = grads[0].double()
        AdamW([theirs]).step()


def test_rows_with_gaps_are_added(triton_kernels):
    for totals, parts in itertools.product((torch.float32, torch.float16), repeat=2):
        total, part = random(2, 5, 3, 2, 8).to(totals), random(2, 9, 2, 8).to(parts)[:, 3:8]
        want = total.clone()
        want[:, :, 1] = (want[:, :, 1].float() + part.float()).to(totals)
        add_rows(total[:, :, 1], part)
        assert torch.equal(total, want)
        want[:, :, 2] = part.to(totals)
        add_rows(total[:, :, 2], part, first=True)
        assert torch.equal(total, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_sum_rows(dtype, triton_kernels):
    exactly = GPUS or dtype != torch.bfloat16  # the interpreter cuts digits off
    for ranks, n in [(1, 1), (2, 17), (3, 1000), (4, 4096), (5, 5001)]:
        for divide in (False, True):
            rows = random(ranks, n).to(dtype).unbind()
            expected = functools.reduce(torch.add, [row.to(torch.promote_types(dtype, torch.float32)) for row in rows])
            expected = (expected / ranks if divide else expected).to(dtype)
            out = torch.full_like(rows[0], math.nan)
            sum_rows(rows, [out], divide)
            # The order too.
            assert (torch.equal(out, expected) if exactly and not divide
                    else close(out, expected, torch.finfo(dtype).eps))
            sum_rows(rows, rows, divide)
            assert all(torch.equal(row, out) for row in rows)
    for wrong in [(rows, [out[1:]]), ([rows[0], rows[1][1:]], [out]), ([random(n, 2).to(dtype)[:, 0]], [out]),
                  (rows, [out.int()]), ([out.int()], [out.int()])]:
        with pytest.raises(ValueError, match="sum of rows"):
            sum_rows(*wrong, False)


def test_python_kernels_py(monkeypatch, capsys):
    torch.manual_seed(0)
    monkeypatch.setattr(sys, "argv", ["kernels.py"])
    main()
    kernels.use("auto")
    printed = capsys.readouterr().out
    if kernels.HAVE_TRITON:
        rows = {line[:24].strip(): [part.split() for part in line[24:].split(" | ")]
                for line in printed.splitlines() if re.search(r"e-\d\d ", line)}
        assert ({"cross-entropy", "product + GELU", "layer norm 5000"} < set(rows)
                and printed.endswith("times, on a GPU: python bench.py kernels\n"))
        for name, (*ours, theirs) in rows.items():  # by the reference, and by fast/
            assert len(ours) == 2 and all(float(a) <= 2 * max(float(b), 1e-6) for half in ours
                                          for a, b in zip(half, theirs)), (name, ours, theirs)
