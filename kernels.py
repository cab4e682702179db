"""What a training step spends its time on beside cuBLAS, as Triton kernels. In lecture order:

    activations      ELU and GELU
    linear           cuBLAS's product, with a backward that can be cut in two
    grouped product  rows sorted by group, each times its own matrix: a mixture of experts (kernels below the bar)
    layer norm       of each row, with a backward that sums over rows in a fixed order
    attention        flash attention
    cross-entropy    never writes a probability, puts the gradient where the logits were
    matrix product   tiles, the order that shares L2, an activation while the tile is in registers

Each section is a page to learn one kernel from: the math, the kernel with one tile size, the autograd function, and the
bytes and FLOPs it should cost. Activations, layer norm and attention also have a reference whose backward is derived by
hand. All but attention and the products are bound by memory: best is to read every element once and write it once, at
the speed of a copy.

    python kernels.py    errors against float64, and PyTorch's own beside them; on a GPU then times

`use("auto")`, the default, takes Triton on Hopper GPUs and later for tensors in bf16, fp16 or float32, and PyTorch's
own operations for all others; `use("triton")` takes it on any GPU. Without Triton (macOS) PyTorch's operations run;
with TRITON_INTERPRET=1 the kernels run on the CPU, slowly, for tests.

Letters: n elements, rows of a given width, V vocabulary, T, H, D as in model.py; dy stands for dloss/dy.
Read with: CS336 lectures 5, 6 (GPUs, kernels, Triton); Triton's own tutorials.
"""

import functools
import math
import os
import sys
import warnings
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # the kernels below stay unused, and decorating them does nothing
    triton, tl = SimpleNamespace(jit=lambda function: function), SimpleNamespace(constexpr=int)

FASTER = {}  # function or class -> what computes the same sooner, below the bar; read at every call
CHECKS = []  # from below the bar: f(choice), which raises ValueError for what `use` cannot take


def faster(function):
    return FASTER.get(function, function)


# ------------------------------------------------------------------------------------------------------------- choice

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HAVE_TRITON, INTERPRETED = hasattr(triton, "cdiv"), os.environ.get("TRITON_INTERPRET") == "1"
_choice = "auto"


def use(choice):
    """"triton": our kernels, an error where they do not apply; "torch": PyTorch's own operations; "auto": our kernels
    from Hopper on, except in float64."""
    global _choice
    for check in CHECKS:
        check(choice)
    _choice = choice


def on_triton(x):
    """Whether our kernels take this tensor. ValueError where they were asked for and cannot."""
    able = HAVE_TRITON and x.dtype in DTYPES and (x.is_cuda or INTERPRETED)
    if _choice == "triton" and not able:
        raise ValueError(f"no Triton kernel for a tensor {tuple(x.shape)} of {x.dtype} on {x.device}: kernels take "
                         f"bfloat16, float16 or float32 on CUDA; use('auto') gives such tensors to PyTorch")
    return able and (_choice == "triton" or _choice == "auto" and x.is_cuda and _generation(x.device) >= 9)


@functools.cache
def _generation(device):
    """9 for Hopper. The tuned kernels need its shared memory."""
    return torch.cuda.get_device_capability(device)[0]


def programs_at_once(device):
    """Multiprocessors: what a grid must fill, and how many programs a persistent kernel starts."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


# -------------------------------------------------------------------------------------------------------- activations
#
#     ELU    y = x where x > 0, exp(x) - 1 elsewhere        dx = dy where x > 0, dy exp(x) elsewhere
#     GELU   y = x s,  s = 1 / (1 + exp(-u)),  u = 2 sqrt(2/pi) (x + 0.044715 x^3)
#            dx = dy (s + x s (1 - s) du/dx),  du/dx = 2 sqrt(2/pi) (1 + 0.134145 x^2)
#
# (GELU's tanh form is 0.5 x (1 + tanh(u/2)), and (1 + tanh(u/2)) / 2 is the sigmoid of u: one exp, no tanh.)
# Elements moved: forward 2 n (x, y), backward 3 n (x, dy, dx). Float32 inside.

def elu_reference(x):
    return torch.where(x > 0, x, x.exp() - 1)


def elu_backward_reference(x, dy):
    return torch.where(x > 0, dy, dy * x.exp())


def gelu_reference(x):
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def gelu_backward_reference(x, dy):
    s = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return dy * (s + x * s * (1 - s) * 2 * math.sqrt(2 / math.pi) * (1 + 0.134145 * x**2))


@triton.jit
def _elu(x):
    # Near 0, exp(x) - 1 loses its digits; above -0.35 seven terms of its series have them all.
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040)))))))
    return tl.where(x > 0, x, tl.where(x > -0.35, series, tl.exp(x) - 1))


@triton.jit
def _elu_slope(x):
    return tl.where(x > 0, 1.0, tl.exp(x))


@triton.jit
def _gelu(x):  # 1.5957... is 2 sqrt(2/pi)
    return x / (1 + tl.exp(-1.5957691216057308 * x * (1 + 0.044715 * x * x)))


@triton.jit
def _gelu_slope(x):
    u = 1.5957691216057308 * x * (1 + 0.044715 * x * x)
    e = tl.exp(-tl.abs(u))  # never overflows, and s (1 - s) = e r^2 loses no digits where s is near 1
    r = 1 / (1 + e)
    return tl.where(u > 0, r, e * r) + x * e * r * r * 1.5957691216057308 * (1 + 0.134145 * x * x)


@triton.jit
def _map(x, dy, y, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    """y = FUNCTION(x), or with a dy (backward, FUNCTION the slope) FUNCTION(x) dy. n elements each."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # int64, because n may pass 2^31
    v = tl.load(x + at, at < n).to(tl.float32)
    d = 1.0 if dy is None else tl.load(dy + at, at < n).to(tl.float32)
    tl.store(y + at, FUNCTION(v) * d, at < n)


class Map(torch.autograd.Function):
    """y = function(x), element by element. Keeps x, not y."""

    @staticmethod
    def forward(ctx, x, function, slope):
        x = x.contiguous()  # the kernel walks over memory in its order
        ctx.save_for_backward(x)
        ctx.slope = slope
        return launch_map(x, None, function)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return launch_map(*ctx.saved_tensors, dy.contiguous(), ctx.slope), None, None


def launch_map(x, dy, function):
    y, n, block = torch.empty_like(x), x.numel(), 4096 // x.element_size()  # 4 KiB a program, 32 bytes a thread
    _map[(triton.cdiv(n, block),)](x, dy, y, n, function, block, num_warps=4)
    return y


def elu(x):
    """ELU with alpha 1. Clevert et al. (2015)."""
    return Map.apply(x, _elu, _elu_slope) if on_triton(x) else F.elu(x)


def gelu(x):
    """GELU in its tanh form, GPT-2's. Hendrycks & Gimpel (2016)."""
    return Map.apply(x, _gelu, _gelu_slope) if on_triton(x) else F.gelu(x, approximate="tanh")


# ------------------------------------------------------------------------------------------------------------- linear
#
#     y = x W^T + b        dx = dy W        dW = dy^T x        db = sum over rows of dy
#
# cuBLAS computes the products. Another pipeline stage waits for dx, but none for dW and db: a zero-bubble pipeline
# takes over what they are computed from, and computes them later.

class Linear(torch.autograd.Function):
    """x W^T + b. take: None, or take(dy, x), of rows, which computes dW and db in autograd's place, now or later."""

    @staticmethod
    def forward(ctx, x, weight, bias, take=None):
        ctx.take = take
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1]).contiguous()                                        # (rows, out)
        dx = (dy @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return dx, *weight_gradients(ctx, dy, x.reshape(-1, x.shape[-1])), None


def weight_gradients(ctx, dy, x):
    """(dW, db) of rows; both None where `take` computes them."""
    if ctx.take:
        ctx.take(dy, x)
        return None, None
    _, needs_dw, needs_db, *_ = ctx.needs_input_grad
    return dy.T @ x if needs_dw else None, faster(bias_gradient)(dy) if needs_db else None


def bias_gradient(dy):
    """Sums over the rows of dy (rows, out): (out)."""
    return dy.sum(0)


def linear(x, weight, bias=None, take=None):
    """x W^T + b for x (..., in), weight W (out, in), bias (out). take: as for Linear."""
    return faster(Linear).apply(x, weight, bias, take) if take else faster(F.linear)(x, weight, bias)


# ----------------------------------------------------------------------------------------------------- grouped product
#
# A mixture of experts multiplies each token by its expert's matrix. Rows of x come sorted by group, as many as `counts`
# says. For row r of group e, and sums over the rows of e:
#
#     y_r = W_e x_r + b_e        dx_r = W_e^T dy_r        dW_e = sum of dy_r x_r^T        db_e = sum of dy_r
#
# A loop of products wants counts on the CPU, which then waits for the GPU, and small groups leave multiprocessors idle.
# Below the bar one launch serves all groups.

def grouped_reference(x, weight, bias, counts):
    """A product for each group. Autograd gives groups without rows a gradient of zero."""
    biases = [None] * len(weight) if bias is None else bias
    groups = zip(x.split(counts.tolist()), weight, biases, strict=True)
    return torch.cat([F.linear(rows, w, b) for rows, w, b in groups])


def grouped_linear(x, weight, bias, counts):
    """x W_e^T + b_e for x (R, in), its rows sorted by group e; weight W (E, out, in), bias (E, out) or None: (R, out).

    counts: int64 (E), on x's device: how many rows each group has, zeros included; they must add up to R. All are in
    one dtype. Deterministic.
    """
    return faster(grouped_reference)(x, weight, bias, counts)


# --------------------------------------------------------------------------------------------------------- layer norm
#
# Over each row, m = mean(x), k = 1 / sqrt(mean((x - m)^2) + eps), xhat = (x - m) k:
#
#     y = xhat w + b        dw = sum over rows of dy xhat        db = sum over rows of dy
#
# x moves all of its row through m and k: both projections of g = dy w are taken out of the gradient,
#
#     dx = k (g - mean(g) - xhat mean(g xhat))
#
# Bytes: forward 2 passes of x, backward 3 (x, dy, dx).

def layer_norm_reference(x, weight, bias, eps):
    """(y, m, k), m and k (rows, 1)."""
    m = x.mean(-1, keepdim=True)
    k = ((x - m).square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x - m) * k * weight + bias, m, k


def layer_norm_backward_reference(x, dy, weight, m, k):
    """(dx, dw, db)."""
    xhat, g = (x - m) * k, dy * weight
    dx = k * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    return dx, (dy * xhat).flatten(0, -2).sum(0), dy.flatten(0, -2).sum(0)


@triton.jit
def _layer_norm(x, weight, bias, y, mean, rstd, width, eps, BLOCK: tl.constexpr):
    """A row a program, all of it in registers: the mean, the squares and y come from one read."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, at = column < width, row * width + column
    v = tl.load(x + at, inside, 0).to(tl.float32)
    m = tl.sum(v, 0) / width
    centred = tl.where(inside, v - m, 0)
    k = 1 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    tl.store(mean + row, m)
    tl.store(rstd + row, k)
    w, b = tl.load(weight + column, inside, 0).to(tl.float32), tl.load(bias + column, inside, 0).to(tl.float32)
    tl.store(y + at, centred * k * w + b, inside)


@triton.jit
def _layer_norm_backward(x, dy, weight, mean, rstd, dx, partial, rows, width, BLOCK: tl.constexpr):
    """As many programs as run at once, each striding over the rows. Its share of dw and db stays in registers.

    partial (2, programs, width) takes the shares at the end. The caller adds them up, in the same order every time.
    """
    first, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, inside, 0).to(tl.float32)
    dw, db = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for row in range(first, rows, programs):
        at, m, k = tl.cast(row, tl.int64) * width + column, tl.load(mean + row), tl.load(rstd + row)
        d = tl.load(dy + at, inside, 0).to(tl.float32)
        xhat = tl.where(inside, (tl.load(x + at, inside, 0).to(tl.float32) - m) * k, 0)
        g = d * w
        tl.store(dx + at, k * (g - tl.sum(g, 0) / width - xhat * (tl.sum(g * xhat, 0) / width)), inside)
        dw += d * xhat
        db += d
    at = partial + first.to(tl.int64) * width + column
    tl.store(at, dw, inside)
    tl.store(at + programs.to(tl.int64) * width, db, inside)


class LayerNorm(torch.autograd.Function):
    """The norm of each row of x. Keeps x and two numbers a row."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        x, width = x.contiguous(), x.shape[-1]
        y, (mean, rstd) = torch.empty_like(x), x.new_empty(2, x.numel() // width, dtype=torch.float32)
        _layer_norm[(len(mean),)](x, weight.contiguous(), bias.contiguous(), y, mean, rstd, width, eps,
                                  triton.next_power_of_2(width), num_warps=8)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        width, programs = x.shape[-1], min(len(mean), programs_at_once(x.device))
        dx, partial = torch.empty_like(x), torch.empty(2, programs, width, dtype=torch.float32, device=x.device)
        _layer_norm_backward[(programs,)](x, dy.contiguous(), weight.contiguous(), mean, rstd, dx, partial, len(mean),
                                          width, triton.next_power_of_2(width), num_warps=8)
        dw, db = partial.sum(1).to(weight.dtype)
        return dx, dw, db, None


def layer_norm(x, weight, bias, eps=1e-5):
    """Layer norm of x (..., width), width to 65,536; weight and bias (width). Ba et al. (2016)."""
    if on_triton(x):
        return faster(LayerNorm).apply(x, weight, bias, eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


# ---------------------------------------------------------------------------------------------------------- attention
#
# One head: queries Q (Tq, D), keys K and values V (Tk, D).
#
#     S = Q K^T / sqrt(D)        P = softmax(S), row by row        O = P V
#
# S and P are (Tq, Tk): 32 heads at T = 16384 would be 16 GiB each in bf16. But row i of O needs only row i of P, and a
# softmax can be summed in one pass over blocks of keys: keep the largest score so far m, the sum l of e^(S-m), and the
# unfinished output; when a block brings a larger score, scale down what is there (online softmax).
#
#     m' = max(m, max_j S_j)     l' = l e^(m-m') + sum_j e^(S_j-m')     acc' = acc e^(m-m') + sum_j e^(S_j-m') V_j
#
# In the end O = acc / l, and of S and P only L = m + ln l is kept: 4 bytes a row instead of 2 Tk. With L any block of P
# comes back at the price of one matmul, P = e^(S - L), and with O's gradient dO
#
#     dV = P^T dO     dP = dO V^T     dS = P * (dP - delta)     dQ = dS K / sqrt(D)     dK = dS^T Q / sqrt(D)
#
# where delta_i = sum_j P_ij dP_ij, from the derivative of softmax, equals sum_d dO_id O_id: no second pass over the
# keys.
#
# Traffic: Q, K, V read once and O written once is 8 T D bytes a head in bf16; blocks of K and V come again for every
# block of rows, but from L2. FLOPs: 4 Tq Tk D a head forward, half that under a causal mask, whose blocks above the
# diagonal are never visited. That is T / 2 FLOPs a byte, or T / 4: the tensor cores are the limit.
# Backward as written above is 5 matmuls to forward's 2. We do 7: one kernel owns rows (dQ), the other keys (dK, dV),
# and both make S and dP. One kernel for all would add up dQ over programs with atomics: in another order every run.
#
# FlashAttention 1 and 2 (Dao 2022, 2023); Milakov and Gimelshein 2018 (online softmax); CS336 lecture 5, assignment 2.

def attention_reference(q, k, v, is_causal):
    """What the kernels compute, with S and P in memory: O like q, but float32 at least, and L (B, H, Tq), -inf where a
    row sees no key. Shapes as in FlashAttention. k and v may be some of the keys alone: ring attention merges the
    outputs of several such calls by their L."""
    q, k, v = map(at_least_float32, (q, k, v))
    Tq, Tk, D = q.shape[2], k.shape[2], q.shape[3]
    s = q @ k.transpose(2, 3) / math.sqrt(D)                                          # (B, H, Tq, Tk)
    if is_causal:
        s = s.masked_fill(~torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq), -math.inf)
    lse = s.logsumexp(3)                                                              # (B, H, Tq)
    return torch.exp(s - finite_or_inf(lse)) @ v, lse


def attention_backward_reference(q, k, v, o, lse, do, is_causal):
    """The five formulas above: dQ, dK, dV. k and v may be some of the keys alone; o and lse are then those of all."""
    q, k, v, o, lse, do = map(at_least_float32, (q, k, v, o, lse, do))
    Tq, Tk, scale = q.shape[2], k.shape[2], 1 / math.sqrt(q.shape[3])
    p = torch.exp(q @ k.transpose(2, 3) * scale - finite_or_inf(lse))                 # (B, H, Tq, Tk)
    if is_causal:
        p = p.tril(Tk - Tq)
    delta = (do * o).sum(3, keepdim=True)                                             # (B, H, Tq, 1)
    ds = p * (do @ v.transpose(2, 3) - delta) * scale                                 # (B, H, Tq, Tk)
    return ds @ k, ds.transpose(2, 3) @ q, p.transpose(2, 3) @ do


def finite_or_inf(lse):
    """L as (B, H, Tq, 1), with +inf in place of -inf. A row that sees no key then has P = exp(S - inf) = 0, not NaN."""
    return lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(3)


def at_least_float32(x):
    return x.float() if x.dtype.itemsize == 2 else x


# The kernels. Tensors arrive as descriptors for TMA, Hopper's copy engine: one thread asks for a (1, 1, rows, D) tile,
# and TMA brings it to shared memory, from rows of any stride, with zeros past the last row, past which it stores
# nothing.

@triton.jit
def last_key(rows, Tq, Tk, CAUSAL: tl.constexpr):
    """The last key that each row sees, negative for none. Causal: the last row sees all, the one above all but one."""
    return tl.minimum(rows + (Tk - Tq), Tk - 1) if CAUSAL else rows * 0 + (Tk - 1)


@triton.jit
def attention_forward_kernel(Q, K, V, O, LSE, scale, Tq, Tk, H, CAUSAL: tl.constexpr, D: tl.constexpr,
                             BM: tl.constexpr, BN: tl.constexpr):
    """O, and LSE, the L above (but +inf for a row without a key), of BM queries of one head. 2 matmuls a block of BN
    keys. Q, K, V, O: TMA descriptors."""
    bh, m0 = tl.program_id(1), tl.program_id(0) * BM
    b, h, rows = bh // H, bh % H, m0 + tl.arange(0, BM)
    last = last_key(rows, Tq, Tk, CAUSAL)
    q = Q.load([b, h, m0, 0]).reshape(BM, D)
    m = tl.full([BM], -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for n0 in range(0, last_key(m0 + BM - 1, Tq, Tk, CAUSAL) + 1, BN):
        k = K.load([b, h, n0, 0]).reshape(BN, D)
        v = V.load([b, h, n0, 0]).reshape(BN, D)
        s = tl.dot(q, k.T, input_precision="ieee") * scale                        # (BM, BN); ieee: float32 without TF32
        s = tl.where(n0 + tl.arange(0, BN)[None, :] <= last[:, None], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        top = tl.where(m_new == -float("inf"), 0.0, m_new)       # m_new, but 0 for a row without a key: no -inf - -inf
        p = tl.exp(s - top[:, None])
        alpha = tl.exp(m - top)                                  # online: l and acc were computed with the old m
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        l = l * alpha + tl.sum(p, 1)
        m = m_new
    some = l > 0                                                 # a row without a key (Tq > Tk): O = 0; L = inf: P = 0
    l = tl.where(some, l, 1.0)
    O.store([b, h, m0, 0], (acc / l[:, None]).to(q.dtype).reshape(1, 1, BM, D))
    tl.store(LSE + bh.to(tl.int64) * Tq + rows, tl.where(some, m + tl.log(l), float("inf")), rows < Tq)


@triton.jit
def attention_backward_q_kernel(Q, K, V, O, DO, LSE, DELTA, DQ, scale, Tq, Tk, H, CAUSAL: tl.constexpr, D: tl.constexpr,
                                BM: tl.constexpr, BN: tl.constexpr):
    """dQ of BM rows of one head, and their delta for the kernel below. 3 matmuls a block."""
    bh, m0 = tl.program_id(1), tl.program_id(0) * BM
    b, h, rows = bh // H, bh % H, m0 + tl.arange(0, BM)
    last = last_key(rows, Tq, Tk, CAUSAL)
    q = Q.load([b, h, m0, 0]).reshape(BM, D)
    do = DO.load([b, h, m0, 0]).reshape(BM, D)
    o = O.load([b, h, m0, 0]).reshape(BM, D)
    lse = tl.load(LSE + bh.to(tl.int64) * Tq + rows, rows < Tq, float("inf"))     # (BM,)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(DELTA + bh.to(tl.int64) * Tq + rows, delta, rows < Tq)
    dq = tl.zeros([BM, D], tl.float32)
    for n0 in range(0, last_key(m0 + BM - 1, Tq, Tk, CAUSAL) + 1, BN):
        k = K.load([b, h, n0, 0]).reshape(BN, D)
        v = V.load([b, h, n0, 0]).reshape(BN, D)
        s = tl.dot(q, k.T, input_precision="ieee") * scale                        # (BM, BN)
        p = tl.where(n0 + tl.arange(0, BN)[None, :] <= last[:, None], tl.exp(s - lse[:, None]), 0.0)
        ds = p * (tl.dot(do, v.T, input_precision="ieee") - delta[:, None])       # without 1/sqrt(D), which comes last
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    DQ.store([b, h, m0, 0], (dq * scale).to(q.dtype).reshape(1, 1, BM, D))


@triton.jit
def attention_backward_kv_kernel(Q, K, V, DO, LSE, DELTA, DK, DV, scale, Tq, Tk, H, CAUSAL: tl.constexpr,
                                 D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """dK and dV of BN keys of one head. 4 matmuls a block, of S^T and dP^T, as dV and dK need them."""
    bh, n0 = tl.program_id(1), tl.program_id(0) * BN
    b, h, keys = bh // H, bh % H, n0 + tl.arange(0, BN)
    k = K.load([b, h, n0, 0]).reshape(BN, D)
    v = V.load([b, h, n0, 0]).reshape(BN, D)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    start = tl.maximum(n0 + Tq - Tk, 0) // BM * BM if CAUSAL else 0               # rows before see none of these keys
    for m0 in range(start, Tq, BM):
        rows = m0 + tl.arange(0, BM)
        q = Q.load([b, h, m0, 0]).reshape(BM, D)
        do = DO.load([b, h, m0, 0]).reshape(BM, D)
        lse = tl.load(LSE + bh.to(tl.int64) * Tq + rows, rows < Tq, float("inf"))  # inf past the last row: P is 0 there
        delta = tl.load(DELTA + bh.to(tl.int64) * Tq + rows, rows < Tq, 0)
        s = tl.dot(k, q.T, input_precision="ieee") * scale                        # (BN, BM)
        p = tl.where(keys[:, None] <= last_key(rows, Tq, Tk, CAUSAL)[None, :], tl.exp(s - lse[None, :]), 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        ds = p * (tl.dot(v, do.T, input_precision="ieee") - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    DK.store([b, h, n0, 0], (dk * scale).to(k.dtype).reshape(1, 1, BN, D))
    DV.store([b, h, n0, 0], dv.to(k.dtype).reshape(1, 1, BN, D))


HEAD_DIMS = (16, 32, 64, 128, 256)


def tiled(x, rows):
    """The TMA descriptor of x (B, H, T, D), for tiles (1, 1, rows, D). Dimensions of 1 get a stride that TMA takes."""
    strides = [s if n > 1 else 16 for n, s in zip(x.shape[:-1], x.stride())] + [1]
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, x.shape[3]])


def tile_rows(D):
    """Rows of a tile: 64, or fewer, for at most 4096 elements. Four float32 tiles are 64 KiB of shared memory."""
    return min(64, 4096 // D)


def attention_forward(q, k, v, is_causal):
    """O (B, H, Tq, D), laid out in memory as (B, Tq, H, D), and LSE (B*H, Tq), float32."""
    (B, H, Tq, D), Tk, rows = q.shape, k.shape[2], tile_rows(q.shape[3])
    o = torch.empty(B, Tq, H, D, dtype=q.dtype, device=q.device).transpose(1, 2)
    lse, sizes = torch.empty(B * H, Tq, dtype=torch.float32, device=q.device), (Tq, Tk, H, is_causal, D, rows, rows)
    q, k, v, tiled_o = (tiled(x, rows) for x in (q, k, v, o))
    grid, scale = (triton.cdiv(Tq, rows), B * H), 1 / math.sqrt(D)
    attention_forward_kernel[grid](q, k, v, tiled_o, lse, scale, *sizes, num_stages=1)
    return o, lse


def attention_backward(q, k, v, o, lse, do, is_causal, dq, dk, dv):
    """Write the gradients into dq, dk, dv. The first kernel also writes delta, which the second one reads."""
    (B, H, Tq, D), Tk, rows = q.shape, k.shape[2], tile_rows(q.shape[3])
    delta, sizes = torch.empty_like(lse), (1 / math.sqrt(D), Tq, Tk, H, is_causal, D, rows, rows)
    q, k, v, o, do, dq, dk, dv = (tiled(x, rows) for x in (q, k, v, o, do.contiguous(), dq, dk, dv))
    attention_backward_q_kernel[triton.cdiv(Tq, rows), B * H](q, k, v, o, do, lse, delta, dq, *sizes, num_stages=1)
    attention_backward_kv_kernel[triton.cdiv(Tk, rows), B * H](q, k, v, do, lse, delta, dk, dv, *sizes, num_stages=1)


def tileable(x):
    """x, or a copy that a descriptor can address: rows at multiples of 16 bytes, the last dimension contiguous."""
    return x.contiguous()


class FlashAttention(torch.autograd.Function):
    """O = softmax(Q K^T / sqrt(D)) V: `FlashAttention.apply(q, k, v, is_causal)`.

    q (B, H, Tq, D), k and v (B, H, Tk, D), bfloat16, float16 or float32, D a power of two from 16 to 256. Returns
    (B, H, Tq, D), in memory (B, Tq, H, D), so that heads are joined without a copy. Causal: row i sees keys
    j <= i + Tk - Tq; a row that sees none is zero. Deterministic. Keeps q, k, v, O and one float32 a row. Raises
    ValueError for other shapes and dtypes. FlashAttention-2, algorithms 1, 2.
    """

    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        q, k, v = map(faster(tileable), (q, k, v))
        o, lse = faster(attention_forward)(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        faster(attention_backward)(q, k, v, o, lse, do, ctx.is_causal, *grads)
        return *grads, None


def flash_takes(x):
    return on_triton(x) and (_choice == "triton" or x.shape[-1] in HEAD_DIMS)


def flash_attention(qkv, is_causal):
    """FlashAttention of qkv (B, T, 3, H, D). Rows of its parts lie apart, so `tileable` copies each."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)                                                     # 3 x (B, H, T, D)
    return FlashAttention.apply(q, k, v, is_causal)


def attention(qkv, is_causal=True):
    """softmax(q k^T / sqrt(D)) v of qkv (B, T, 3, H, D), as one linear layer makes it: (B, T, H, D).

    "auto" leaves head dims that the kernels do not know to PyTorch; "triton" raises.
    """
    if flash_takes(qkv):
        return faster(flash_attention)(qkv, is_causal).transpose(1, 2)                       # (B, T, H, D)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)                                                     # 3 x (B, H, T, D)
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2)      # (B, T, H, D)


# ------------------------------------------------------------------------------------------------------ cross-entropy
#
# Logits z (rows, V), one target t a row. With top = max(z), total = sum exp(z - top), p = softmax(z) = exp(z - top) /
# total:
#
#     loss = mean over rows of log(total) + top - z_t        dz = (p - onehot(t)) / rows
#
# p needs only two numbers a row, so probabilities are never written. GPT-2 at 32 x 1024 tokens has 3.3 GB of logits in
# bf16: a float32 copy, its log-softmax and their gradients would be 20 GB more. Bytes: forward one pass, backward two.
#
# dz goes where z was. That is safe because nothing but this backward wants z: a product's backward needs its inputs,
# not its result. If something else saved z, or backward runs twice, autograd sees the raised version number and says
# so.

@triton.jit
def _softmax_sums(z, targets, tops, totals, picked, vocab, stride, BLOCK: tl.constexpr):
    """One row: a running maximum, and the sum of exponentials relative to it, rescaled when the maximum grows."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    z += row * stride
    top, total = -3.4e38, 0.0  # not -inf: a block of logits that are all -inf would give -inf - -inf
    for start in tl.range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(z + at, at < vocab, -float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(v, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(v - higher), 0)
        top = higher
    tl.store(tops + row, top)
    tl.store(totals + row, total)
    tl.store(picked + row, tl.load(z + target, (target >= 0) & (target < vocab), 0).to(tl.float32))


@triton.jit
def _softmax_minus_onehot(z, targets, tops, totals, scale, vocab, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target, top, factor = tl.load(targets + row), tl.load(tops + row), tl.load(scale)
    share = factor / tl.load(totals + row)
    z += row * stride
    for start in tl.range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(z + at, at < vocab, -float("inf")).to(tl.float32)
        tl.store(z + at, tl.exp(v - top) * share - tl.where(at == target, factor, 0.0), at < vocab)


def softmax_sums(z, targets):
    """(top, total, z_t) of each row of z (rows, V), float32, of float64 float64; rows may lie apart, targets may not.

    A target outside of 0 .. V-1 is on another rank's slice of the vocabulary: its z_t is 0."""
    if not on_triton(z):
        z, here = at_least_float32(z), (0 <= targets) & (targets < z.shape[1])
        top, picked = z.amax(-1), z.gather(1, (targets * here).unsqueeze(1)).squeeze(1) * here
        return top, (z - top.unsqueeze(-1)).exp().sum(-1), picked
    top, total, picked = torch.empty(3, len(z), dtype=torch.float32, device=z.device)
    _softmax_sums[(len(z),)](z, targets, top, total, picked, z.shape[1], z.stride(0), 4096, num_warps=4)
    return top, total, picked


def softmax_minus_onehot(z, targets, top, total, scale):
    """(exp(z - top) / total - onehot(t)) scale, for scale a tensor of one number. Our kernel writes it over z."""
    if not on_triton(z):
        p, here = (z - top.unsqueeze(-1)).exp() / total.unsqueeze(-1), (0 <= targets) & (targets < z.shape[1])
        p.scatter_add_(1, (targets * here).unsqueeze(1), -here.to(p.dtype).unsqueeze(1))
        return (p * scale).to(z.dtype)
    _softmax_minus_onehot[(len(z),)](z, targets, top, total, scale.float(), z.shape[1], z.stride(0), 4096, num_warps=4)
    torch.autograd.graph.increment_version(z)
    return z


class CrossEntropy(torch.autograd.Function):
    """Mean loss of logits (rows, V). Keeps them and two numbers a row; backward writes its result over them."""

    @staticmethod
    def forward(ctx, z, targets):
        z, targets = z if z.stride(-1) == 1 else z.contiguous(), targets.contiguous()
        top, total, picked = softmax_sums(z, targets)
        ctx.save_for_backward(z, targets, top, total)
        return (total.log() + (top - picked)).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        z, targets, top, total = ctx.saved_tensors
        return softmax_minus_onehot(z.detach(), targets, top, total, dloss / len(z)), None


def cross_entropy(logits, targets):
    """Mean cross-entropy in nats, float32, of logits (rows, V) and int64 targets (rows). Overwrites logits in backward.

    The kernel does not check that targets lie in 0 .. V-1, and leaves none out."""
    if not on_triton(logits):
        return F.cross_entropy(at_least_float32(logits), targets)
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"cross-entropy of logits {tuple(logits.shape)} and targets {tuple(targets.shape)}: "
                         f"needs (rows, V) and (rows)")
    return CrossEntropy.apply(logits, targets)


# ----------------------------------------------------------------------------------------------------- matrix product
#
# C = activation(A B), A (M, K), B (K, N). 2 M N K FLOPs. Element by element, A would be read N times and B M times. A
# program keeps a BM x BN tile of C in registers and walks once over K: A is then read N / BN times, B M / BM times.
# The activation runs on the tile while it is in registers, which saves writing C and reading it again.
#
# About 132 programs run at a time (H100), in the order of their numbers, and what they read meets in L2. Row by row of
# C, they need a few rows of A's tiles and all of B. In groups of GROUP rows of tiles, walked column by column, they
# need GROUP rows of A's tiles and 132 / GROUP columns of B's: `tiles_read` counts them.
#
# This is the page to learn tiling from. The model multiplies with cuBLAS, which is faster (H200, bf16,
# 32768 x 768 x 3072 with GELU: 386 us in the tiles below the bar, 340 us for cuBLAS and then the GELU kernel).

def tile_of(program, tall, wide, group):
    """(row, column) of the tile that a program computes. C has `tall` rows and `wide` columns of tiles."""
    first = program // (group * wide) * group  # the first row of tiles of this program's group
    height = min(tall - first, group)  # the last group may be lower
    return first + program % (group * wide) % height, program % (group * wide) // height


_tile = triton.jit(tile_of)


@triton.jit
def _matmul(a, b, c, M, N, K, a_row, a_column, b_row, b_column,
            FUNCTION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    row, column = _tile(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    rows, columns, ks = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN), tl.arange(0, BK)
    # Beyond the edge, rows and columns wrap around: in bounds without a mask (K alone needs one), and never stored.
    a += (rows % M)[:, None].to(tl.int64) * a_row + ks[None] * a_column                         # (BM, BK)
    b += ks[:, None] * b_row + (columns % N)[None].to(tl.int64) * b_column                      # (BK, BN)
    tile = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        tile = tl.dot(tl.load(a, ks[None] < K - k, 0), tl.load(b, ks[:, None] < K - k, 0), tile,
                      input_precision="tf32x3")  # float32 as three TF32 products, on tensor cores; 16 bits: one
        a += BK * a_column
        b += BK * b_row
    inside = (rows[:, None] < M) & (columns[None] < N)
    tl.store(c + rows[:, None].to(tl.int64) * N + columns[None], tile if FUNCTION is None else FUNCTION(tile), inside)


def matmul(a, b, function=None, tiles=(64, 64, 32, 8)):
    """a @ b, or function(a @ b), (M, N), for a (M, K), b (K, N) of any strides, in one of DTYPES. Else ValueError.

    function: _gelu, _elu. tiles: (BM, BN, BK, GROUP); 64 x 64 of C in float32 are 16 KiB of registers."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype or a.dtype not in DTYPES:
        raise ValueError(f"product of {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}: needs (M, K) and "
                         f"(K, N) of one dtype, bfloat16, float16 or float32")
    (M, K), N, (BM, BN, BK, GROUP) = a.shape, b.shape[1], tiles
    c = a.new_empty(M, N)
    _matmul[(triton.cdiv(M, BM) * triton.cdiv(N, BN),)](
        a, b, c, M, N, K, *a.stride(), *b.stride(), function, BM, BN, BK, GROUP, num_warps=8, num_stages=3)
    return c


# ============================================================ machinery: the same results, faster or safer ============
#
# The kernels that training runs. They compute what those above compute, with fewer passes over memory and busier tensor
# cores. The price is code: fused neighbours, special cases, and tables of tiles, warps and stages, timed on an H200.

import contextlib
import heapq

try:  # Gluon is a part of Triton whose names still change. Without it tuned_forward_kernel serves Hopper GPUs, too.
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    tma_load, tma_store = (getattr(tma, name, None) or getattr(tma, old) for name, old in (
        ("async_load", "async_copy_global_to_shared"), ("async_store", "async_copy_shared_to_global")))  # old: 3.6
    HAVE_GLUON = True
except (ImportError, AttributeError):
    gluon, gl = SimpleNamespace(jit=lambda function: function), SimpleNamespace(constexpr=int)
    HAVE_GLUON = False

# ------------------------------------------------------------------------------------------------------------- checks

def check_choice(choice):
    if choice not in ("auto", "torch", "triton"):
        raise ValueError(f"kernels '{choice}' are not one of auto, torch, triton")
    if choice == "triton" and not (HAVE_TRITON and (INTERPRETED or torch.cuda.is_available())):
        raise ValueError("triton kernels need " + ("a CUDA GPU" if HAVE_TRITON else "the package triton")
                         + ", or TRITON_INTERPRET=1 to run them slowly on the CPU")


CHECKS.append(check_choice)


# ------------------------------------------------------------------------------------------------ activations, linear
#
# Adding a bias before the activation would cost a pass over memory, and summing dx for the bias's gradient another one.
# So the activation's kernel adds the bias as it reads x, and its backward sums dx while dx is in registers. The price
# is a small second kernel, `sum_parts`, because each program sums only some of the rows.
#
# `column_sums` without x is that sum alone. For (32768, 768) it takes 25 us, PyTorch's 46, reading the tensor once 12.

@triton.jit
def _bias_map(x, bias, y, rows, width, FUNCTION: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    wide = tl.cdiv(width, N)
    row = (tl.program_id(0) // wide).to(tl.int64) * M + tl.arange(0, M)[:, None]
    column = tl.program_id(0) % wide * N + tl.arange(0, N)[None]
    at, inside = row * width + column, (row < rows) & (column < width)
    v = tl.load(x + at, inside).to(tl.float32) + tl.load(bias + column, column < width).to(tl.float32)
    tl.store(y + at, FUNCTION(v), inside)


@triton.jit
def _bias_backward(x, bias, dy, dx, partial, rows, width,
                   SLOPE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr):
    """dx, and the sums of its columns. A program reads N columns, M rows at a time, and keeps their sums in registers.

    Programs of the same columns take every n-th M rows; each writes its sums to its own row of partial (programs,
    width). SLOPE None: sum the columns of dy instead, and write no dx.
    """
    column = tl.program_id(0) * N + tl.arange(0, N)[None]
    total = tl.zeros((M, N), tl.float32)
    b = tl.load(bias + column, column < width, 0).to(tl.float32) if SLOPE is not None else 0.0
    for start in tl.range(tl.program_id(1) * M, rows, tl.num_programs(1) * M, num_stages=STAGES):
        row = (start + tl.arange(0, M)[:, None]).to(tl.int64)
        at, inside = row * width + column, (row < rows) & (column < width)
        d = tl.load(dy + at, inside, 0).to(tl.float32)
        if SLOPE is not None:
            d *= SLOPE(tl.load(x + at, inside, 0).to(tl.float32) + b)
            tl.store(dx + at, d, inside)
        total += d
    tl.store(partial + tl.program_id(1) * width + column, tl.sum(total, 0, keep_dims=True), column < width)


@triton.jit
def _sum_parts(partial, out, parts, width, M: tl.constexpr, N: tl.constexpr):
    column = tl.program_id(0) * N + tl.arange(0, N)[None]
    partial += tl.program_id(1).to(tl.int64) * parts * width
    total = tl.zeros((M, N), tl.float32)
    for start in tl.range(0, parts, M):
        row = start + tl.arange(0, M)[:, None]
        total += tl.load(partial + row * width + column, (row < parts) & (column < width), 0)
    tl.store(out + tl.program_id(1) * width + column, tl.sum(total, 0, keep_dims=True), column < width)


def sum_parts(partial, dtype):
    """(k, parts, width) float32 -> (k, width) of dtype: add up the programs' sums, in the same order in every run."""
    k, parts, width = partial.shape
    out = torch.empty(k, width, dtype=dtype, device=partial.device)
    _sum_parts[(triton.cdiv(width, 32), k)](partial, out, parts, width, 128, 32, num_warps=4)
    return out


class BiasMap(torch.autograd.Function):
    """function(x + bias); bias (width), along the last dimension. Keeps x and bias, not their sum."""

    @staticmethod
    def forward(ctx, x, bias, function, slope):
        if bias.shape != x.shape[-1:]:
            raise ValueError(f"activation of {tuple(x.shape)} plus a bias {tuple(bias.shape)}: needs one of "
                             f"{tuple(x.shape[-1:])}")
        x, bias, ctx.slope = x.contiguous(), bias.contiguous(), slope
        ctx.save_for_backward(x, bias)
        y, width = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // width
        _bias_map[(triton.cdiv(width, 256) * triton.cdiv(rows, 8),)](x, bias, y, rows, width, function, 8, 256,
                                                                     num_warps=4)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, bias = ctx.saved_tensors
        dx = torch.empty_like(x)
        return dx, column_sums(dy.contiguous(), x, bias, dx, ctx.slope), None, None


WITH_BIAS = {elu: (_elu, _elu_slope), gelu: (_gelu, _gelu_slope)}  # activation: what `BiasMap` takes for it


def add_bias(activation, x, bias):
    """activation(x + bias), in one pass over x for those of WITH_BIAS."""
    if FASTER and activation in WITH_BIAS and on_triton(x):  # bench.py measures without FASTER, too
        return BiasMap.apply(x, bias, *WITH_BIAS[activation])
    return activation(x + bias)


def column_sums(dy, x=None, bias=None, dx=None, slope=None):
    """A bias's gradient (width): the sum over the rows of dy (..., width). With x, dx = dy slope(x + bias) is computed,
    written and summed instead."""
    width = dy.shape[-1]
    rows, parts = dy.numel() // width, max(1, programs_at_once(dy.device) // 2)
    partial = torch.empty(1, parts, width, dtype=torch.float32, device=dy.device)
    # The fastest at 32768 x 768 to 3072 and 8192 x 1600 to 6400. GELU's backward at 32768 x 3072 takes 168 us; with 3
    # stages it would take 237, with 1 stage 179.
    n, warps, stages = (64, 2, 3) if slope is None else (128, 8, 2)
    _bias_backward[(triton.cdiv(width, n), parts)](x, bias, dy, dx, partial, rows, width, slope, 32, n, stages,
                                                   num_warps=warps)
    return sum_parts(partial, dy.dtype)[0]


class PaddedLinear(Linear):
    """Without a bias, `pad_outputs` pads the outputs if 8 does not divide their number."""

    @staticmethod
    def forward(ctx, x, weight, bias, take=None):
        padded = pad_outputs(x, weight) if bias is None else weight
        ctx.padded, ctx.take = padded is not weight, take
        if not ctx.padded:
            return Linear.forward(ctx, x, weight, bias, take)
        y = F.linear(x, padded)                                                               # (..., padded)
        # Backward needs y, because cross-entropy writes its gradient over the logits in y. Saved as y.data, because
        # autograd raises an error if a saved tensor is overwritten, but does not check .data.
        ctx.save_for_backward(x, padded, y.data)
        return y[..., :len(weight)]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if not ctx.padded:
            return Linear.backward(ctx, dy)
        x, padded, y = ctx.saved_tensors
        rows = pad_columns(dy, y)
        dx = (rows @ padded).view(x.shape) if ctx.needs_input_grad[0] else None
        return dx, *weight_gradients(ctx, rows[:, :dy.shape[-1]], x.reshape(-1, x.shape[-1])), None


def fast_linear(x, weight, bias):
    ours = on_triton(x) and (bias is not None or len(weight) % 8)  # else F.linear is as fast
    return PaddedLinear.apply(x, weight, bias) if ours else F.linear(x, weight, bias)


def pad_outputs(x, weight):
    """The weight (out, in), with rows of zeros added if x is 16-bit and 8 does not divide `out` (50257 in GPT-2).

    cuBLAS's fast kernels need rows that begin at multiples of 16 bytes. The three products (forward, dx, dW) of
    8192 x 1600 with 50257 columns take 35 ms on an H200, with 50304 columns 6. The price is a copy of the weight.
    """
    if len(weight) % 8 and x.dtype.itemsize == 2 and on_triton(x):
        return F.pad(weight, (0, 0, 0, -len(weight) % 64))
    return weight


def pad_columns(dy, y):
    """dy (..., out), the gradient of y[..., :out], as (rows, y.shape[-1]) with zeros in the padding columns.

    If cross-entropy wrote dy over the logits in y, y's padding columns already hold zeros, and this returns a view.
    Any other dy is copied.
    """
    width, rows = y.shape[-1], dy.reshape(-1, dy.shape[-1])
    if dy.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() and rows.stride() == (width, 1):
        return rows.as_strided((len(rows), width), rows.stride())
    return F.pad(rows, (0, width - rows.shape[1]))


def fast_bias_gradient(dy):
    return column_sums(dy) if on_triton(dy) else bias_gradient(dy)


FASTER.update({bias_gradient: fast_bias_gradient, F.linear: fast_linear, Linear: PaddedLinear})


# ----------------------------------------------------------------------------------------------------- grouped product
#
# A product for each group would make the CPU wait for counts, and small groups would leave multiprocessors idle. Here
# one launch serves all groups: each program reads counts and finds its own group and rows. The price is a few programs
# without work. Each group is cut into tiles of BM rows separately, so no tile has rows of two groups. With counts
# 5, 0, 3 and BM = 4:
#
#     row        0  1  2  3 | 4           | 5  6  7    |
#     row tile   0: 4 rows  | 1: 1 row    | 2: 3 rows  | 3, 4: surplus, exit
#
# E groups of R rows in all have at most ceil(R / BM) + E row tiles, whatever counts holds, so this many are launched.
# Tile t belongs to the first group e with t < ceil(count_0 / BM) + ... + ceil(count_e / BM). dx is the same product
# with W's strides swapped. For dW, a program owns a tile of one dW_e and sums over e's rows alone, so a NaN in another
# group's rows cannot reach it. y, dx and dW take 2 R in out FLOPs each, as with a single matrix.

@triton.jit
def _rows_of_tile(tile, counts, E, E_PAD: tl.constexpr, BM: tl.constexpr):
    """(group, first row, the row after the group's last) of a row tile. A surplus tile gets a group of E or more."""
    group = tl.arange(0, E_PAD)
    count = tl.load(counts + group, group < E, 0)
    tiles = (count + BM - 1) // BM
    e = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)  # how many groups end before this tile
    start = tl.sum(tl.where(group < e, count, 0), 0)
    first = start + (tile - tl.sum(tl.where(group < e, tiles, 0), 0)) * BM
    return e, first, start + tl.sum(tl.where(group == e, count, 0), 0)


@triton.jit
def _grouped_product(x, weight, bias, y, counts, E, N, K, w_group, w_row, w_column, E_PAD: tl.constexpr,
                     BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    e, first, end = _rows_of_tile(tl.program_id(0), counts, E, E_PAD, BM)
    if e >= E:
        return
    rows, columns, ks = first + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    # In place of rows and columns beyond the edges, the last row and the first columns are read, and not stored.
    x += tl.minimum(rows, end - 1)[:, None] * K + ks[None]                                      # (BM, BK)
    weight += e.to(tl.int64) * w_group + (columns % N)[None].to(tl.int64) * w_row
    weight += ks[:, None] * w_column                                                            # (BK, BN)
    tile = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        tile = tl.dot(tl.load(x, ks[None] < K - k, 0), tl.load(weight, ks[:, None] < K - k, 0), tile,
                      input_precision="tf32x3")
        x += BK
        weight += BK * w_column
    if bias is not None:
        tile += tl.load(bias + e * N + columns, columns < N, 0).to(tl.float32)[None]
    tl.store(y + rows[:, None] * N + columns[None], tile, (rows[:, None] < end) & (columns[None] < N))


@triton.jit
def _grouped_weight_gradient(dy, x, dw, db, counts, N, K, E_PAD: tl.constexpr,
                             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A (BN, BK) tile of dW_e. With db, the program of the tile's first columns also sums BN elements of db_e."""
    e, group = tl.program_id(2), tl.arange(0, E_PAD)
    first = tl.sum(tl.load(counts + group, group < e, 0), 0)
    end = first + tl.load(counts + e)
    n, k = tl.program_id(1) * BN + tl.arange(0, BN), tl.program_id(0) * BK + tl.arange(0, BK)
    tile, total = tl.zeros((BN, BK), tl.float32), tl.zeros((BN,), tl.float32)
    for row in range(first, end, BM):
        rows = row + tl.arange(0, BM)
        d = tl.load(dy + rows[None] * N + n[:, None], (rows[None] < end) & (n[:, None] < N), 0)     # (BN, BM)
        v = tl.load(x + rows[:, None] * K + k[None], (rows[:, None] < end) & (k[None] < K), 0)      # (BM, BK)
        tile = tl.dot(d, v, tile, input_precision="tf32x3")
        total += tl.sum(d.to(tl.float32), 1)
    n = n.to(tl.int64)
    tl.store(dw + (e.to(tl.int64) * N + n)[:, None] * K + k[None], tile, (n[:, None] < N) & (k[None] < K))
    if db is not None:
        if tl.program_id(0) == 0:
            tl.store(db + e * N + n, total, n < N)


GROUPED_TILES = 64, 64, 32  # BM rows, BN outputs, BK inputs


def launch_grouped(x, weight, bias, counts):
    """y (R, out), with masks in place of TMA. weight (E, out, in) of any strides."""
    x, bias, (E, N, K) = x.contiguous(), None if bias is None else bias.contiguous(), weight.shape
    y, (BM, BN, BK) = x.new_empty(len(x), N), GROUPED_TILES
    _grouped_product[triton.cdiv(len(x), BM) + E, triton.cdiv(N, BN)](
        x, weight, bias, y, counts, E, N, K, *weight.stride(), triton.next_power_of_2(E), BM, BN, BK, num_warps=4)
    return y


def launch_grouped_gradients(dy, x, counts, biased):
    dy, x, E, N, K = dy.contiguous(), x.contiguous(), len(counts), dy.shape[1], x.shape[1]
    dw, db, (BM, BN, BK) = x.new_empty(E, N, K), x.new_empty(E, N) if biased else None, GROUPED_TILES
    _grouped_weight_gradient[triton.cdiv(K, BK), triton.cdiv(N, BN), E](
        dy, x, dw, db, counts, N, K, triton.next_power_of_2(E), BM, BN, BK, num_warps=4)
    return dw, db


# On Hopper, TMA moves whole tiles, so that programs compute no addresses and need no masks. But TMA stops only at the
# edges of a tensor, and a group's end is not one. So a tensor of R rows of `width` gets a descriptor with two more
# dimensions, which make the group's end an edge: sizes (2^31 - 2^16, 2^31 - 2^16, 2^30, width), strides
# (2^34 - width, width, width, 1). The element (2^30, end, 2^30 - end + row, column) then lies at
#
#     2^30 (2^34 - width) + end width + (2^30 - end + row) width + column  =  2^64 + row width + column
#
# Addresses have 64 bits, so 2^64 drops out, and this is (row, column). The third index reaches its size 2^30 at
# row = end: from there on, TMA loads zeros and stores nothing. One descriptor, made on the CPU, serves all groups.
#
# TFLOP/s on an H200 in bf16, from 1536 to 6144 columns, R = 16384 rows: 4 groups of 4096 | groups of 8192, 0, 5000 and
# 3192 | 16 groups with sizes by Zipf's law. cuBLAS: a loop, counts on the CPU. _grouped_mm: PyTorch's own function.
#
#                ours               cuBLAS             _grouped_mm
#     forward    685 | 644 | 627    695 | 649 | 579    673 | 620 | 585
#     dx         715 | 720 | 619    728 | 706 | 578    698 | 700 | 610
#     dW         680 | 655 | 548    698 | 695 | 538    688 | 608 | 543
#
# Forward was slower with one tile a program (620 | 598 | 546), with y stored through pointers (483), with tiles of
# 128 x 128 (537), and with BK = 128 in 2 stages (510). Warp specialization, some warps only loading, gains nothing
# forward, and Triton 3.6 miscompiles dW with it.

@triton.jit
def _load_group(D, row, end, column, M: tl.constexpr, N: tl.constexpr):
    return D.load([1 << 30, end, (1 << 30) - end + row, column]).reshape(M, N)


@triton.jit
def _store_group(D, row, end, column, tile, M: tl.constexpr, N: tl.constexpr):
    D.store([1 << 30, end, (1 << 30) - end + row, column], tile.to(D.dtype).reshape(1, 1, M, N))


@triton.jit
def _list_row_tiles(counts, table, E, E_PAD: tl.constexpr, BM: tl.constexpr):
    """table (row tiles, 3): group, first row, the group's end. So no program has to find them for every tile again."""
    e, first, end = _rows_of_tile(tl.program_id(0), counts, E, E_PAD, BM)
    table += 3 * tl.program_id(0)
    tl.store(table, e)
    tl.store(table + 1, first)
    tl.store(table + 2, end)


@triton.jit
def tuned_grouped_kernel(X, W, Y, bias, counts, table, E, N, K, TRANSPOSED: tl.constexpr, E_PAD: tl.constexpr,
                         BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """Persistent: one program a multiprocessor, each computes several tiles. `flatten` makes one loop of those over
    tiles and over K, so that a tile's first loads run while the tile before is stored.

    W (E, N, K), or (E, K, N) if TRANSPOSED. y is stored in two halves, which needs half the shared memory.
    """
    group = tl.arange(0, E_PAD)
    tall = tl.sum((tl.load(counts + group, group < E, 0) + BM - 1) // BM, 0).to(tl.int32)
    wide = tl.cdiv(N, BN)
    for program in tl.range(tl.program_id(0), tall * wide, tl.num_programs(0), flatten=True):
        row, column = _tile(program, tall, wide, GROUP)
        e, first, end = tl.load(table + 3 * row), tl.load(table + 3 * row + 1), tl.load(table + 3 * row + 2)
        n = column * BN
        tile = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            if TRANSPOSED:
                tile = tl.dot(X.load([first, k]), W.load([e, k, n]).reshape(BK, BN), tile)
            else:
                tile = tl.dot(X.load([first, k]), W.load([e, n, k]).reshape(BN, BK).T, tile)
        if bias is not None:
            columns = n + tl.arange(0, BN)
            tile += tl.load(bias + e.to(tl.int64) * N + columns, columns < N, 0).to(tl.float32)[None]
        left, right = tile.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()
        _store_group(Y, first, end, n, left, BM, BN // 2)
        _store_group(Y, first, end, n + BN // 2, right, BM, BN // 2)


@triton.jit
def tuned_grouped_gradient_kernel(DY, X, DW, counts, ends, N, K,
                                  BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """One (BN, BK) tile of dW_e a program. Not persistent: unequal groups make unequal programs, so it is better that
    the hardware starts the next program on the multiprocessor that becomes free."""
    e = tl.program_id(1)
    end = tl.load(ends + e).to(tl.int32)
    first = end - tl.load(counts + e).to(tl.int32)
    row, column = _tile(tl.program_id(0), tl.cdiv(N, BN), tl.cdiv(K, BK), GROUP)
    n, k = row * BN, column * BK
    tile = tl.zeros((BN, BK), tl.float32)
    for at in range(first, end, BM):
        tile = tl.dot(_load_group(DY, at, end, n, BM, BN).T, _load_group(X, at, end, k, BM, BK), tile)
    DW.store([e, n, k], tile.to(DW.dtype).reshape(1, BN, BK))


@triton.jit
def _sum_groups(dy, counts, partial, width, E_PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """partial (E, parts, width): a program sums N columns of one group, over every parts-th block of M rows."""
    e, part, parts, group = tl.program_id(1), tl.program_id(2), tl.num_programs(2), tl.arange(0, E_PAD)
    first = tl.sum(tl.load(counts + group, group < e, 0), 0)
    end = first + tl.load(counts + e)
    column = tl.program_id(0) * N + tl.arange(0, N)[None]
    total = tl.zeros((M, N), tl.float32)
    for start in tl.range(first + part * M, end, parts * M, num_stages=3):
        row = start + tl.arange(0, M)[:, None]
        total += tl.load(dy + row * width + column, (row < end) & (column < width), 0).to(tl.float32)
    tl.store(partial + (e * parts + part).to(tl.int64) * width + column, tl.sum(total, 0, keep_dims=True),
             column < width)


def grouped_descriptor(x, rows, columns):
    width = x.shape[1]
    return TensorDescriptor(x, [2**31 - 2**16] * 2 + [2**30, width], [2**34 - width, width, width, 1],
                            [1, 1, rows, columns])


def tma_takes(*tensors):
    """Whether TMA can address these 16-bit tensors (rows at multiples of 16 bytes), on Hopper, which the tiles fit."""
    return all(t.numel() and t.dtype.itemsize == 2 and t.shape[-1] % 8 == 0 and t.data_ptr() % 16 == 0
               and (INTERPRETED or _generation(t.device) == 9) for t in tensors)


SPARED = 0  # multiprocessors left free for the one-program kernels that signal other GPUs, which else would wait


def tuned_grouped(x, weight, bias, counts):
    check_grouped(x, weight, bias, counts)
    x, (E, N, K), transposed = x.contiguous(), weight.shape, weight.stride(2) != 1
    stored = (weight.mT if transposed else weight).contiguous()
    if not tma_takes(x, stored) or N % 8:
        return launch_grouped(x, weight, bias, counts)
    y, (BM, BN, BK, GROUP, stages) = x.new_empty(len(x), N), GROUPED_TILES_TUNED["product"]
    tall, padded = triton.cdiv(len(x), BM) + E, triton.next_power_of_2(E)
    table = torch.empty(tall, 3, dtype=torch.int32, device=x.device)
    _list_row_tiles[(tall,)](counts, table, E, padded, BM, num_warps=1)
    tuned_grouped_kernel[(min(programs_at_once(x.device) - SPARED, tall * triton.cdiv(N, BN)),)](
        TensorDescriptor(x, list(x.shape), [K, 1], [BM, BK]),
        TensorDescriptor(stored, list(stored.shape), list(stored.stride()), [1, BK, BN] if transposed else [1, BN, BK]),
        grouped_descriptor(y, BM, BN // 2), None if bias is None else bias.contiguous(), counts, table, E, N, K,
        transposed, padded, BM, BN, BK, GROUP, num_warps=8, num_stages=stages)
    return y


def tuned_grouped_gradients(dy, x, counts, biased):
    dy, x, E, N, K = dy.contiguous(), x.contiguous(), len(counts), dy.shape[1], x.shape[1]
    if not tma_takes(dy, x):
        return launch_grouped_gradients(dy, x, counts, biased)
    (BM, BN, BK, GROUP, stages), dw, ends = GROUPED_TILES_TUNED["gradient"], x.new_empty(E, N, K), counts.cumsum(0)
    tuned_grouped_gradient_kernel[triton.cdiv(N, BN) * triton.cdiv(K, BK), E](
        grouped_descriptor(dy, BM, BN), grouped_descriptor(x, BM, BK),
        TensorDescriptor(dw, [E, N, K], [N * K, K, 1], [1, BN, BK]), counts, ends, N, K, BM, BN, BK, GROUP,
        num_warps=8, num_stages=stages)
    return dw, grouped_sums(dy, counts) if biased else None


def grouped_sums(dy, counts):
    """(E, width): sums over the rows of each group. For dy (16384, 6144) it takes 55 us; reading dy takes 48."""
    E, width = len(counts), dy.shape[1]
    partial = torch.empty(E, 16, width, dtype=torch.float32, device=dy.device)
    _sum_groups[triton.cdiv(width, 64), E, 16](dy, counts, partial, width, triton.next_power_of_2(E), 32, 64,
                                               num_warps=2)
    return sum_parts(partial, dy.dtype)


def check_grouped(x, weight, bias, counts):
    if (x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or counts.shape != weight.shape[:1]
            or bias is not None and bias.shape != weight.shape[:2]):
        raise ValueError(f"grouped product of x {tuple(x.shape)}, weight {tuple(weight.shape)}, bias "
                         f"{None if bias is None else tuple(bias.shape)} and counts {tuple(counts.shape)}: needs "
                         f"(R, in), (E, out, in), (E, out) or None, (E)")
    if x.dtype != weight.dtype or counts.dtype != torch.int64 or not x.device == weight.device == counts.device:
        raise ValueError(f"grouped product of x {x.dtype} on {x.device}, weight {weight.dtype} on {weight.device}, "
                         f"counts {counts.dtype} on {counts.device}: x and weight must be of one dtype, counts int64, "
                         f"all on one device")


# BM, BN, BK, GROUP, stages
GROUPED_TILES_TUNED = {"product": (128, 256, 64, 8, 3), "gradient": (64, 128, 256, 8, 3)}


class GroupedLinear(torch.autograd.Function):
    """Keeps x, W and counts."""

    @staticmethod
    def forward(ctx, x, weight, bias, counts):
        ctx.save_for_backward(x, weight, counts)
        return tuned_grouped(x, weight, bias, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, counts = ctx.saved_tensors
        dx = tuned_grouped(dy, weight.mT, None, counts) if ctx.needs_input_grad[0] else None
        _, needs_dw, needs_db, _ = ctx.needs_input_grad
        dw, db = tuned_grouped_gradients(dy, x, counts, needs_db) if needs_dw or needs_db else (None, None)
        return dx, dw, db, None


def fast_grouped(x, weight, bias, counts):
    if not on_triton(x):
        return grouped_reference(x, weight, bias, counts)
    return GroupedLinear.apply(x, weight, bias, counts.contiguous())


FASTER[grouped_reference] = fast_grouped


# --------------------------------------------------------------------------------------------------- tokens to experts
#
# With PyTorch's operations, the router and the sorting of tokens by expert take about 60 launches a block, forward and
# backward, and a gather's backward adds with atomics, in another order in every run. The kernels below take 9 launches
# and add in a fixed order:
#
#     route      scores, the k best, gates; how often each expert is chosen     backward: dx, and dW in parts
#     places     where each of a token's k rows lies among the sorted rows      a counting sort, in two launches
#     dispatch   rows[places[t, j]] = x[t]                                      backward: combine
#     combine    y[t] = sum over j of gates[t, j] rows[places[t, j]]            backward: dispatch, and dgates

@triton.jit
def _route(x, weight, bias, chosen, gates, sums, counts, n, C, E, K: tl.constexpr, E_PAD: tl.constexpr,
           M: tl.constexpr, BK: tl.constexpr):
    t, e, ks = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, E_PAD), tl.arange(0, BK)
    logits = tl.zeros((M, E_PAD), tl.float32)
    for c in range(0, C, BK):
        a = tl.load(x + t[:, None].to(tl.int64) * C + c + ks[None], (t[:, None] < n) & (ks[None] < C - c), 0)
        b = tl.load(weight + e[None] * C + c + ks[:, None], (e[None] < E) & (ks[:, None] < C - c), 0)
        logits = tl.dot(a, b, logits, input_precision="tf32x3")
    scores = 1 / (1 + tl.exp(-logits))
    ranked = tl.where(e[None] < E, scores + tl.load(bias + e, e < E, 0)[None], float("-inf"))
    left, total = ranked, tl.zeros((M,), tl.float32)
    for j in tl.static_range(K):
        here = e[None] == tl.minimum(tl.argmax(left, 1), E - 1)[:, None]  # the first of equals; NaN may pass E
        total += tl.sum(tl.where(here, scores, 0), 1)
        left = tl.where(here, float("-inf"), left)
    picked = tl.sum(((left != ranked) & (t[:, None] < n)).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * E + e, picked, e < E)
    total = total if K > 1 else tl.full((M,), 1.0, tl.float32)
    tl.store(sums + t, total, t < n)
    for j in tl.static_range(K):
        best = tl.minimum(tl.argmax(ranked, 1), E - 1)
        here = e[None] == best[:, None]
        tl.store(chosen + t * K + j, best.to(tl.int64), t < n)
        tl.store(gates + t * K + j, tl.sum(tl.where(here, scores, 0), 1) / total, t < n)
        ranked = tl.where(here, float("-inf"), ranked)


@triton.jit
def _route_backward(x, weight, chosen, gates, sums, dgates, dx, partial, n, C, E, K: tl.constexpr, E_PAD: tl.constexpr,
                    M: tl.constexpr, BK: tl.constexpr):
    """dlogit = (dg - sum of dg g) / S * s (1 - s), where chosen experts have scores s with sum S, and gates g = s / S.
    For k = 1, g = s and dlogit = dg s (1 - s)."""
    t, e, ks = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, E_PAD), tl.arange(0, BK)
    mean, slope, total = tl.zeros((M,), tl.float32), tl.zeros((M, E_PAD), tl.float32), tl.load(sums + t, t < n, 1)
    for j in tl.static_range(K if K > 1 else 0):
        mean += tl.load(dgates + t * K + j, t < n, 0) * tl.load(gates + t * K + j, t < n, 0)
    for j in tl.static_range(K):
        score = tl.load(gates + t * K + j, t < n, 0) * total
        d = (tl.load(dgates + t * K + j, t < n, 0) - mean) / total * score * (1 - score)
        slope += tl.where(e[None] == tl.load(chosen + t * K + j, t < n, 0)[:, None], d[:, None], 0)
    for c in range(0, C, BK):
        own = (t[:, None] < n) & (ks[None] < C - c)
        a = tl.load(x + t[:, None].to(tl.int64) * C + c + ks[None], own, 0).to(tl.float32)              # (M, BK)
        b = tl.load(weight + e[:, None] * C + c + ks[None], (e[:, None] < E) & (ks[None] < C - c), 0)   # (E_PAD, BK)
        back = tl.dot(slope, b.to(tl.float32), input_precision="tf32x3")
        tl.store(dx + t[:, None].to(tl.int64) * C + c + ks[None], back, own)
        tl.store(partial + (tl.program_id(0) * E + e)[:, None] * C + c + ks[None],
                 tl.dot(tl.trans(slope), a, input_precision="tf32x3"), (e[:, None] < E) & (ks[None] < C - c))


class Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, k):
        n, C, E, tokens = x[..., 0].numel(), x.shape[-1], len(weight), x.shape[:-1]
        x, weight = x.contiguous(), weight.contiguous()
        chosen = torch.empty(*tokens, k, dtype=torch.int64, device=x.device)
        gates, sums = (torch.empty(*tokens, some, dtype=torch.float32, device=x.device) for some in (k, 1))
        counts = torch.empty(triton.cdiv(n, 64), E, dtype=torch.int32, device=x.device)
        ctx.sizes = n, C, E, k, max(16, triton.next_power_of_2(E)), 64, 64
        _route[len(counts),](x, weight, bias, chosen, gates, sums, counts, *ctx.sizes, num_warps=4)
        ctx.save_for_backward(x, weight, chosen, gates, sums)
        counts = counts.sum(0)
        ctx.mark_non_differentiable(chosen, counts)
        return chosen, gates, counts

    @staticmethod
    @once_differentiable
    def backward(ctx, _, dgates, __):
        x, weight, chosen, gates, sums = ctx.saved_tensors
        n, C, E, *_ = ctx.sizes
        dx, partial = torch.empty_like(x), torch.empty(1, triton.cdiv(n, 64), E * C, device=x.device)
        _route_backward[partial.shape[1],](x, weight, chosen, gates, sums, dgates.contiguous(), dx, partial,
                                           *ctx.sizes, num_warps=4)
        return dx, sum_parts(partial, weight.dtype).view(E, C), None, None


def route(x, weight, bias, k):
    """For each token of x (..., C), choose the k experts with the largest sigmoid(x W^T) + bias; W (E, C), bias (E)
    float32. Returns (chosen int64 (..., k); gates float32 (..., k), their sigmoids, scaled to add up to 1 if k > 1; how
    often each expert is chosen, int64 (E))."""
    return Route.apply(x, weight, bias, k)


@triton.jit
def _count_slots(chosen, counts, n, E, E_PAD: tl.constexpr, M: tl.constexpr):
    slot, e = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, E_PAD)
    here = tl.load(chosen + slot, slot < n, -1)[:, None] == e[None]
    tl.store(counts + tl.program_id(0) * E + e, tl.sum(here.to(tl.int32), 0), e < E)


@triton.jit
def _places(chosen, counts, places, totals, n, E, programs, E_PAD: tl.constexpr, M: tl.constexpr):
    """A slot is one of a token's k choices. Its place is the number of slots of lower experts, plus those of its own
    expert in earlier programs, plus those of its own expert before it in this program."""
    slot, e = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, E_PAD)
    total, before = tl.zeros((E_PAD,), tl.int32), tl.zeros((E_PAD,), tl.int32)
    for i in range(programs):
        count = tl.load(counts + i * E + e, e < E, 0)
        total += count
        before += tl.where(i < tl.program_id(0), count, 0)
    here = (tl.load(chosen + slot, slot < n, -1)[:, None] == e[None]).to(tl.int32)                      # (M, E_PAD)
    first = tl.cumsum(total, 0) - total + before
    tl.store(places + slot, tl.sum(here * (tl.cumsum(here, 0) - 1 + first[None]), 1), slot < n)
    if tl.program_id(0) == 0:
        tl.store(totals + e, total.to(tl.int64), e < E)


def places_by_expert(chosen, E):
    """Sort the choices (..., k) by expert, and for the same expert in their order. Returns (places int32 (n, k), where
    each choice lies after sorting; how often each expert is chosen, int64 (E))."""
    n, M, width = chosen.numel(), 256, triton.next_power_of_2(E)
    programs = max(1, triton.cdiv(n, M))
    counts, places = (torch.empty(size, dtype=torch.int32, device=chosen.device)
                      for size in ((programs, E), (n // chosen.shape[-1], chosen.shape[-1])))
    chosen, totals = chosen.contiguous(), torch.empty(E, dtype=torch.int64, device=chosen.device)
    _count_slots[programs,](chosen, counts, n, E, width, M, num_warps=4)
    _places[programs,](chosen, counts, places, totals, n, E, programs, width, M, num_warps=4)
    return places, totals


@triton.jit
def _dispatch(x, places, gates, rows, y, dgates, C, K: tl.constexpr, BLOCK: tl.constexpr):
    """rows[place] = x. As combine's backward, with gates: rows[place] = gate x, and dgates = x . y[place]."""
    t, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    v = tl.load(x + t * C + c, c < C, 0).to(tl.float32)
    for j in tl.static_range(K):
        place, w = tl.load(places + t * K + j).to(tl.int64) * C, v
        if gates is not None:
            w = v * tl.load(gates + t * K + j)
            tl.store(dgates + t * K + j, tl.sum(v * tl.load(y + place + c, c < C, 0).to(tl.float32), 0))
        tl.store(rows + place + c, w, c < C)


@triton.jit
def _combine(rows, places, gates, x, C, K: tl.constexpr, BLOCK: tl.constexpr):
    t, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        v = tl.load(rows + tl.load(places + t * K + j).to(tl.int64) * C + c, c < C, 0).to(tl.float32)
        total += v if gates is None else v * tl.load(gates + t * K + j)
    tl.store(x + t * C + c, total, c < C)


def launch_dispatch(x, places, gates=None, y=None):
    """(rows (n k, C), dgates (n, k) or None) of x (n, C)."""
    (n, k), C = places.shape, x.shape[1]
    rows, dgates = x.new_empty(n * k, C), None if gates is None else torch.empty_like(gates)
    if n:
        _dispatch[n,](x.contiguous(), places, gates, rows, y, dgates, C, k, triton.next_power_of_2(C), num_warps=4)
    return rows, dgates


def launch_combine(rows, places, gates=None):
    (n, k), C = places.shape, rows.shape[1]
    x = rows.new_empty(n, C)
    if n:
        _combine[n,](rows.contiguous(), places, gates, x, C, k, triton.next_power_of_2(C), num_warps=4)
    return x


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, places):
        ctx.save_for_backward(places)
        return launch_dispatch(x, places)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, drows):
        return launch_combine(drows, *ctx.saved_tensors), None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, places, gates):
        ctx.save_for_backward(places, *(() if gates is None else (gates, rows)))
        return launch_combine(rows, places, gates)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        drows, dgates = launch_dispatch(dx, *ctx.saved_tensors)
        return drows, None, dgates


def dispatch(x, places):
    """x (n, C), places (n, k) -> rows (n k, C): row places[t, j] is x[t]. places holds 0 to n k - 1, each once."""
    return Dispatch.apply(x, places)


def combine(rows, places, gates=None):
    """rows (n k, C), places (n, k) -> (n, C): each token's sum of its rows, times gates (n, k) float32 if any."""
    return Combine.apply(rows, places, None if gates is None else gates.contiguous())


# --------------------------------------------------------------------------------------------------------- layer norm
#
# A norm and the residual stream's addition before it are both bound by memory. One kernel that does both makes 4 passes
# over memory forward; separate kernels make 5. Backward it adds the stream's gradient, too: 4 passes instead of 6.

@triton.jit
def _add_layer_norm(x, residual, weight, bias, total, y, mean, rstd, width, eps,
                    ADD: tl.constexpr, BLOCK: tl.constexpr):
    """A row a program. The whole row stays in registers, so the mean, the variance and y need one read of it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, at = column < width, row * width + column
    v = tl.load(x + at, inside, 0).to(tl.float32)
    if ADD:
        v = (v + tl.load(residual + at, inside, 0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, v, inside)
        v = v.to(tl.float32)  # normalise the rounded sum that was stored, because backward reads that
    m = tl.sum(v, 0) / width
    centred = tl.where(inside, v - m, 0)
    k = 1 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    tl.store(mean + row, m)
    tl.store(rstd + row, k)
    w, b = tl.load(weight + column, inside, 0).to(tl.float32), tl.load(bias + column, inside, 0).to(tl.float32)
    tl.store(y + at, centred * k * w + b, inside)


@triton.jit
def _add_layer_norm_backward(x, dy, dtotal, weight, mean, rstd, dx, partial, rows, width,
                         ADD: tl.constexpr, BLOCK: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr):
    """As many programs as run at once share the rows. Each keeps its part of dw and db in registers.

    The parts go into partial (2, programs, width), and the caller adds them up in a fixed order, so every run has the
    same result. If dw and db of a row do not fit in registers, SLICES programs share the row. Each needs sums over the
    whole row and reads all of it, mostly from L2, but computes dx, dw and db of its own columns alone.
    """
    first, own, programs = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES, tl.num_programs(0) // SLICES
    column = own * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, inside, 0).to(tl.float32)
    dw, db = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(first, rows, programs, num_stages=STAGES):
        start = tl.cast(row, tl.int64) * width
        m, k = tl.load(mean + row), tl.load(rstd + row)
        d = tl.load(dy + start + column, inside, 0).to(tl.float32)
        xhat = tl.where(inside, (tl.load(x + start + column, inside, 0).to(tl.float32) - m) * k, 0)
        g = d * w
        sum_g, sum_gx = g, g * xhat
        for other in tl.static_range(1, SLICES):
            c = (own + other) % SLICES * BLOCK + tl.arange(0, BLOCK)
            gc = tl.load(dy + start + c, c < width, 0).to(tl.float32) * tl.load(weight + c, c < width, 0).to(tl.float32)
            sum_g += gc
            sum_gx += gc * (tl.load(x + start + c, c < width, 0).to(tl.float32) - m) * k
        dv = k * (g - tl.sum(sum_g, 0) / width - xhat * (tl.sum(sum_gx, 0) / width))
        if ADD:  # x also goes on as the residual stream, whose gradient would else be added in another kernel
            dv += tl.load(dtotal + start + column, inside, 0).to(tl.float32)
        tl.store(dx + start + column, dv, inside)
        dw += d * xhat
        db += d
    at = partial + first.to(tl.int64) * width + column
    tl.store(at, dw, inside)
    tl.store(at + programs.to(tl.int64) * width, db, inside)


def add_layer_norm_forward(x, residual, weight, bias, eps):
    shape, width, x = x.shape, x.shape[-1], x.contiguous()
    if not 1 <= width <= 65536 or weight.shape != (width,) or bias.shape != (width,):
        raise ValueError(f"layer norm of {tuple(shape)} with weight {tuple(weight.shape)} and bias "
                         f"{tuple(bias.shape)}: all three must have the same width, 1 to 65536, because a row has to "
                         f"fit in a multiprocessor's registers")
    if residual is not None and (residual.shape != shape or residual.dtype != x.dtype):
        raise ValueError(f"layer norm of {tuple(shape)} {x.dtype} plus {tuple(residual.shape)} {residual.dtype}: "
                         f"their shapes and dtypes must be equal")
    rows, add = x.numel() // width, residual is not None
    residual = residual.contiguous() if add else x
    y, total = torch.empty_like(x), torch.empty_like(x) if add else x
    mean, rstd = torch.empty(2, rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    # One warp for 1024 columns, from 8192 columns on for 2048. At widths 768, 1600, 4096, 8192, 16384 this moves 3.93,
    # 3.95, 3.91, 3.94, 3.77 TB/s. Half or twice as many warps lose up to 8 %, 32 warps for 16384 columns 38 %.
    warps = max(1, block // (1024 if block < 8192 else 2048))
    _add_layer_norm[(rows,)](x, residual, weight.contiguous(), bias.contiguous(), total, y, mean, rstd, width, eps, add,
                             block, num_warps=warps)
    return total, y, mean, rstd


def add_layer_norm_backward(x, weight, mean, rstd, dtotal, dy):
    width = x.shape[-1]
    rows, use_dtotal = x.numel() // width, dtotal is not None
    dy = torch.zeros_like(x) if dy is None else dy.contiguous()
    dtotal = dtotal.contiguous() if use_dtotal else dy
    # A program takes up to 8192 columns, whose dw and db fill a quarter of the registers, with one warp for 1024. Up to
    # 8 programs of narrower rows, 8192 columns, share a multiprocessor. Two rows are loaded while one is computed, if
    # shared memory has room for them and 8 KiB more. TB/s at the widths above: 3.86, 3.73, 3.81, 3.84, 3.21. With only
    # one row loaded ahead, width 768 has 3.0.
    block = min(triton.next_power_of_2(width), 8192)
    slices = triton.cdiv(width, block)
    row_bytes = x.element_size() * block * (2 * slices + use_dtotal) + weight.element_size() * block * (slices - 1)
    room = torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin if x.is_cuda else 2**16
    ahead = min(2, (room - 8192) // row_bytes)
    programs = min(rows, programs_at_once(x.device) * max(1, min(8, 8192 // block)))
    dx, partial = torch.empty_like(x), torch.empty(2, programs, width, dtype=torch.float32, device=x.device)
    _add_layer_norm_backward[(programs * slices,)](
        x, dy, dtotal, weight.contiguous(), mean, rstd, dx, partial, rows, width, use_dtotal, block, slices, 1 + ahead,
        num_warps=max(1, block // 1024))
    dw, db = sum_parts(partial, weight.dtype)
    return dx, dw, db


class AddLayerNorm(torch.autograd.Function):
    """(x + residual, its norm). Keeps the sum and two numbers a row."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps):
        total, y, mean, rstd = add_layer_norm_forward(x, residual, weight, bias, eps)
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.add = residual is not None
        ctx.set_materialize_grads(False)
        return total if ctx.add else total.view_as(total), y

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal, dy):
        """Gradients from the residual stream and from the norm, or None where there is none."""
        dx, dw, db = add_layer_norm_backward(*ctx.saved_tensors, dtotal, dy)
        return dx, dx if ctx.add else None, dw, db, None


class TunedLayerNorm:
    """LayerNorm by AddLayerNorm, with nothing to add."""

    @staticmethod
    def apply(x, weight, bias, eps):
        return AddLayerNorm.apply(x, None, weight, bias, eps)[1]


def add_layer_norm(x, residual, weight, bias, eps=1e-5):
    """(x + residual, layer norm of it), x and residual (..., width) with width to 65,536.

    The residual stream goes on as the first result. residual None: (x, norm of x), whose uses share one backward.
    """
    if FASTER and on_triton(x):  # bench.py measures without FASTER, too
        return AddLayerNorm.apply(x, residual, weight, bias, eps)
    x = x if residual is None else x + residual
    return x, layer_norm(x, weight, bias, eps)


FASTER[LayerNorm] = TunedLayerNorm


# ---------------------------------------------------------------------------------------------------------- attention
#
# The kernels above spend time on exponentials in base e, and on masks where nothing is masked. Here `scale` has a
# factor log2(e), because the hardware's exponential is 2^x; so LSE is in base 2. static_range compiles each loop over
# blocks twice: without a mask for blocks that all rows see whole, with one for blocks on the diagonal or at an edge.

@triton.jit
def tuned_forward_kernel(Q, K, V, O, LSE, scale, Tq, Tk, T_pad, H, CAUSAL: tl.constexpr, D: tl.constexpr,
                             BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """O and LSE of BM rows of one head."""
    bh = tl.program_id(1)
    # The last rows see the most keys and go first, so that short programs fill the GPU at the end.
    b, h, m0 = bh // H, bh % H, (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    rows = m0 + tl.arange(0, BM)
    last = last_key(rows, Tq, Tk, CAUSAL)
    full = tl.maximum(last_key(m0, Tq, Tk, CAUSAL) + 1, 0) // BN * BN            # all of these rows see keys [0, full),
    end = last_key(m0 + BM - 1, Tq, Tk, CAUSAL) + 1                              # none sees keys from `end` on
    q = Q.load([b, h, m0, 0]).reshape(BM, D)
    m = tl.full([BM], -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for MASK in tl.static_range(2):
        for n0 in range(full if MASK else 0, end if MASK else full, BN):
            k = K.load([b, h, n0, 0]).reshape(BN, D)
            s = tl.dot(q, k.T, input_precision=PRECISION)                         # (BM, BN)
            if MASK:
                s = tl.where(n0 + tl.arange(0, BN)[None, :] <= last[:, None], s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1) * scale)
            top = tl.where(m_new == -float("inf"), 0.0, m_new) if MASK else m_new  # no key yet: -inf - -inf is NaN
            p = tl.exp2(s * scale - top[:, None])
            alpha = tl.exp2(m - top)                                # online softmax: l and acc used the old m
            v = V.load([b, h, n0, 0]).reshape(BN, D)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
            l = l * alpha + tl.sum(p, 1)
            m = m_new
    some = l > 0
    l = tl.where(some, l, 1.0)
    O.store([b, h, m0, 0], (acc / l[:, None]).to(q.dtype).reshape(1, 1, BM, D))
    tl.store(LSE + bh.to(tl.int64) * T_pad + rows, tl.where(some & (rows < Tq), m + tl.log2(l), float("inf")))


# Forward again, for Hopper GPUs, in Gluon: Triton whose author chooses layouts (which thread holds which element),
# shared memory and barriers. A tile is BM rows of one head, and a program computes a list of tiles. One warp only loads
# Q, K and V. Two groups of four warps compute 64 of a tile's rows each. A group starts Q K^T of block n and P V of
# block n - 1 together, waits for the first alone, and computes the softmax of block n while P V runs; so acc is a block
# behind m and l. The groups start their products in turn, so that one's softmax runs during the other's products, too.
# (Shah et al. 2024, FlashAttention-3.)
#
# n counts blocks of keys over all tiles of the program. Block n of K is in slot 2 (n % STAGES) of shared memory, that
# of V in the slot after it. Each group has two slots for Q, so that the next tile's is loaded while this one's is in
# use. Keys come from the last block to the first: under a causal mask only the last one needs a mask, and each row sees
# a key in it, so m is finite from the start.
#
# A barrier counts arrivals. Its phase ends when as many came as `init` says, and all bytes that `expect` names. wait(b,
# p) returns when the phase of parity p has ended; on a new barrier parity 1 counts as ended. Who waits for whom:
#     q_full, full    groups for the warp that loads    q_free    it for the slot's group    free    it for both groups
#     turn[g]         group g for the other one, which has then started its products, not finished them
#
# A warm H200, causal, T = 1024, 4096, 16384, in TFLOP/s, measured alternately with the kernel above and cuDNN:
#     D = 128    here 487, 635, 664    above 360, 419, 453    cuDNN 448, 511, 535    (without `turn` 1 to 6 % less)
#     D =  64    here 344, 421, 442    above 293, 379, 414    cuDNN 340, 408, 434    (without `turn` 2 to 3 % less)

@gluon.jit
def _tile_at(tiles, i, blocks):
    """(head, block of rows) of tile i. tiles: this program's row of `attention_schedule`."""
    tile = gl.load(tiles + 1 + i)
    return tile // blocks, tile % blocks


@gluon.jit
def _key_blocks(block, Tq, Tk, CAUSAL: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """How many blocks of keys a block of rows sees."""
    return gl.minimum((block + 1) * BM + Tk - Tq, Tk) // BN if CAUSAL else Tk // BN


@gluon.jit
def _load_tiles(Q, K, V, tiles, q_slots, q_full, q_free, slots, full, free, Tq, Tk, H, blocks, CAUSAL: gl.constexpr,
                BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    n = 2 * STAGES  # as in `_attend`
    for i in range(gl.load(tiles)):
        bh, block = _tile_at(tiles, i, blocks)
        b, h, key_blocks = bh // H, bh % H, _key_blocks(block, Tq, Tk, CAUSAL, BM, BN)
        for group in gl.static_range(2):
            slot = i % 2 * 2 + group
            mbarrier.wait(q_free.index(slot), 1 - i // 2 % 2)
            mbarrier.expect(q_full.index(slot), Q.block_type.nbytes)
            tma_load(Q, [b, h, block * BM + group * (BM // 2), 0], q_full.index(slot), q_slots.index(slot))
        for j in range(key_blocks):
            for values in gl.static_range(2):
                slot = n % STAGES * 2 + values
                mbarrier.wait(free.index(slot), 1 - n // STAGES % 2)
                mbarrier.expect(full.index(slot), K.block_type.nbytes)
                tma_load(V if values else K, [b, h, (key_blocks - 1 - j) * BN, 0], full.index(slot), slots.index(slot))
            n += 1


@gluon.jit
def _start_products(q, p, acc, n, ahead, behind, slots, full, free, turn, GROUP: gl.constexpr, BM: gl.constexpr,
                    BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Start Q K^T of block n and acc + P V of block n - 1, and wait for the first one. ahead, behind: whether block n,
    and block n - 1, exist. If one does not, its barriers are left out, and its product means nothing."""
    k, v = n % STAGES * 2, (n - 1) % STAGES * 2 + 1
    mbarrier.wait(full.index(k), n // STAGES % 2, pred=ahead)
    mbarrier.wait(turn.index(GROUP), n % 2, pred=ahead)
    s = gl.zeros([BM // 2, BN], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, slots.index(k).reshape([BN, D]).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(full.index(v), (n - 1) // STAGES % 2, pred=behind)
    acc = warpgroup_mma(p, slots.index(v).reshape([BN, D]), acc, is_async=True)
    mbarrier.arrive(turn.index(1 - GROUP), pred=ahead)
    s = warpgroup_mma_wait(1, (s,))
    mbarrier.arrive(free.index(k), pred=ahead)
    return s, acc


@gluon.jit
def _attend(GROUP: gl.constexpr, O, LSE, tiles, q_slots, o_slots, q_full, q_free, slots, full, free, turn, scale, Tq,
            Tk, H, blocks, CAUSAL: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
            STAGES: gl.constexpr):
    """One group's rows of all tiles of this program. Round i starts the first Q K^T of tile i beside the last P V of
    tile i - 1, stores that tile, and computes the rest of tile i. One more round stores the last tile."""
    ROWS: gl.constexpr = BM // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    rows, columns = gl.arange(0, ROWS, ROW_LAYOUT), gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT))
    count, n = gl.load(tiles), 2 * STAGES  # so phases begin with parity 0, and a block n - 1 has a slot
    m = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
    l = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
    p = gl.zeros([ROWS, BN], q_slots.dtype, P_LAYOUT)
    acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    for i in range(count + 1):
        bh, block = _tile_at(tiles, i, blocks)
        key_blocks = gl.where(i < count, _key_blocks(block, Tq, Tk, CAUSAL, BM, BN), 1)
        q_slot = i % 2 * 2 + GROUP
        q = q_slots.index(q_slot).reshape([ROWS, D])
        mbarrier.wait(q_full.index(q_slot), i // 2 % 2, pred=i < count)
        s, acc = _start_products(q, p, acc, n, i < count, i > 0, slots, full, free, turn, GROUP, BM, BN, D, STAGES,
                                 S_LAYOUT)
        if CAUSAL:
            last_seen = rows + (block * BM + GROUP * ROWS + Tk - Tq)
            s = gl.where((columns + (key_blocks - 1) * BN)[None, :] <= last_seen[:, None], s, -float("inf"))
        top = gl.max(s, 1) * scale
        e = gl.exp2(s * scale - top[:, None])
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(free.index((n - 1) % STAGES * 2 + 1), pred=i > 0)
        if i > 0:  # m and l are still tile i - 1's; top and e are tile i's
            bh, block = _tile_at(tiles, i - 1, blocks)
            m0 = block * BM + GROUP * ROWS
            o = acc * gl.convert_layout(1 / l, gl.SliceLayout(1, O_LAYOUT))[:, None]
            tma.store_wait(0)  # TMA has read what lay in the slot
            o_slots.index(GROUP).reshape([ROWS, D]).store(o.to(O.dtype))
            fence_async_shared()  # TMA sees what was written
            tma_store(O, [bh // H, bh % H, m0, 0], o_slots.index(GROUP))
            gl.store(LSE + (bh.to(gl.int64) * Tq + m0) + rows, m + gl.log2(l))
        m = top
        l = gl.sum(e, 1)
        p = gl.convert_layout(e.to(q_slots.dtype), P_LAYOUT)
        acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        n += 1
        for _ in range(1, key_blocks):
            s, acc = _start_products(q, p, acc, n, True, True, slots, full, free, turn, GROUP, BM, BN, D, STAGES,
                                     S_LAYOUT)
            top = gl.maximum(m, gl.max(s, 1) * scale)
            e = gl.exp2(s * scale - top[:, None])
            alpha = gl.exp2(m - top)
            l = l * alpha + gl.sum(e, 1)
            m = top
            acc = warpgroup_mma_wait(0, (acc,))
            mbarrier.arrive(free.index((n - 1) % STAGES * 2 + 1))
            p = gl.convert_layout(e.to(q_slots.dtype), P_LAYOUT)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]  # blocks up to n - 1, to m
            n += 1
        mbarrier.arrive(q_free.index(q_slot), pred=i < count)
    tma.store_wait(0)


@gluon.jit
def specialized_forward_kernel(Q, K, V, O, LSE, tiles, stride, scale, Tq, Tk, H, blocks, CAUSAL: gl.constexpr,
                               D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    """O and LSE (base 2) of all tiles of BM rows, as `tiles` hands them out. Tq, Tk: multiples of BM, BN."""
    tiles += gl.program_id(0) * stride
    q_slots = gl.allocate_shared_memory(Q.dtype, [4, 1, 1, BM // 2, D], Q.layout)
    slots = gl.allocate_shared_memory(K.dtype, [2 * STAGES, 1, 1, BN, D], K.layout)
    o_slots = gl.allocate_shared_memory(O.dtype, [2, 1, 1, BM // 2, D], O.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(4):
        mbarrier.init(q_full.index(slot), 1)
        mbarrier.init(q_free.index(slot), 1)
    for slot in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(slot), 1)
        mbarrier.init(free.index(slot), 2)  # an arrival from each group
    for group in gl.static_range(2):
        mbarrier.init(turn.index(group), 1)
    fence_async_shared()
    mbarrier.arrive(turn.index(0))  # group 0 has the first turn
    gl.warp_specialize([
        (_attend, (0, O, LSE, tiles, q_slots, o_slots, q_full, q_free, slots, full, free, turn, scale, Tq, Tk, H,
                   blocks, CAUSAL, D, BM, BN, STAGES)),
        (_attend, (1, O, LSE, tiles, q_slots, o_slots, q_full, q_free, slots, full, free, turn, scale, Tq, Tk, H,
                   blocks, CAUSAL, D, BM, BN, STAGES)),
        (_load_tiles, (Q, K, V, tiles, q_slots, q_full, q_free, slots, full, free, Tq, Tk, H, blocks, CAUSAL, BM, BN,
                       STAGES)),
    ], [4, 1], [240, 24])  # warps, and registers a thread, of the last two parts. The first has num_warps, and what is
    # left of 3 x 168 registers: a part has at least four warps' registers.


def attention_schedule(costs, heads, together, programs, device):
    """The tiles of each of `programs` programs: (programs, 1 + most tiles + 1), int32. A row begins with their number,
    and its last entry is 0, which is read in `_attend`'s last round. Row block i of head h is h * len(costs) + i, and
    takes time in proportion to costs[i].

    Heads are handed out `together` at a time, so that their keys and values stay in L2; of these the longest tiles
    first, each to the program that has least to do.
    """
    loads, rows = [(0, program) for program in range(programs)], [[] for _ in range(programs)]
    for first in range(0, heads, together):
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            for head in range(first, min(heads, first + together)):
                load, program = heapq.heappop(loads)
                rows[program].append(head * len(costs) + i)
                heapq.heappush(loads, (load + costs[i], program))
    most = max(map(len, rows))
    rows = [[len(row)] + row + [0] * (most + 1 - len(row)) for row in rows]
    return torch.tensor(rows, dtype=torch.int32, device=device)


@functools.cache  # CUDA graphs keep the addresses. While one is recorded, no new schedule can be made.
def specialized_tiles(Tq, Tk, BM, BN, is_causal, heads, together, programs, device):
    """The `attention_schedule` of these sizes. Costs: blocks of keys, and one more for loading Q and storing O."""
    costs = [(min((i + 1) * BM + Tk - Tq, Tk) if is_causal else Tk) // BN + 1 for i in range(Tq // BM)]
    return attention_schedule(costs, heads, together, programs, device)


SPECIALIZED = {64: (128, 128, 3), 128: (128, 128, 2)}  # head dim: BM, BN, STAGES. BM = BN: one block has the diagonal.
# At head dim 128 shared memory has 64 KiB of Q, 128 of K and V, 32 of O, of 227.


def specialized_takes(q, k, is_causal):
    """Whether this is a Hopper GPU, with Gluon, 16-bit numbers, whole tiles, and a key that each row sees."""
    (_, _, Tq, D), Tk = q.shape, k.shape[2]
    able = HAVE_GLUON and not INTERPRETED and q.is_cuda and _generation(q.device) == 9
    return (able and q.itemsize == 2 and D in SPECIALIZED and (Tk >= Tq or not is_causal) and min(Tq, Tk) > 0
            and Tq % SPECIALIZED[D][0] == Tk % SPECIALIZED[D][1] == 0)


def specialized_attention_forward(q, k, v, is_causal, o, lse):
    """Write o (B, H, Tq, D) and lse (B*H, Tq)."""
    (B, H, Tq, D), Tk = q.shape, k.shape[2]
    BM, BN, STAGES = SPECIALIZED[D]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)

    def tiles_of(x, rows):
        like = tiled(x, rows)
        return GluonDescriptor(x, like.shape, like.strides, like.block_shape, layout)

    together = max(1, (32 << 20) // (k[0, 0].nbytes + v[0, 0].nbytes))  # of L2's 50 MiB
    programs = min(programs_at_once(q.device) - SPARED, B * H * (Tq // BM))
    tiles = specialized_tiles(Tq, Tk, BM, BN, is_causal, B * H, together, programs, q.device)
    specialized_forward_kernel[(programs,)](
        tiles_of(q, BM // 2), tiles_of(k, BN), tiles_of(v, BN), tiles_of(o, BM // 2), lse, tiles, tiles.shape[1],
        math.log2(math.e) / math.sqrt(D), Tq, Tk, H, Tq // BM, CAUSAL=is_causal, D=D, BM=BM, BN=BN, STAGES=STAGES,
        num_warps=4, maxnreg=168)


@triton.jit
def tuned_backward_q_kernel(Q, K, V, O, DO, LSE, DELTA, DQ, scale2, scale, Tq, Tk, T_pad, H, CAUSAL: tl.constexpr,
                                D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """dQ of BM rows of one head, and their delta for the kernel below. 3 matmuls a block."""
    bh = tl.program_id(1)
    b, h, m0 = bh // H, bh % H, (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    rows = m0 + tl.arange(0, BM)
    last = last_key(rows, Tq, Tk, CAUSAL)
    full = tl.maximum(last_key(m0, Tq, Tk, CAUSAL) + 1, 0) // BN * BN            # all of these rows see keys [0, full),
    end = last_key(m0 + BM - 1, Tq, Tk, CAUSAL) + 1                              # none sees keys from `end` on
    q = Q.load([b, h, m0, 0]).reshape(BM, D)
    do = DO.load([b, h, m0, 0]).reshape(BM, D)
    o = O.load([b, h, m0, 0]).reshape(BM, D)
    lse = tl.load(LSE + bh.to(tl.int64) * T_pad + rows)                           # (BM,)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(DELTA + bh.to(tl.int64) * T_pad + rows, delta)
    dq = tl.zeros([BM, D], tl.float32)
    for MASK in tl.static_range(2):
        for n0 in range(full if MASK else 0, end if MASK else full, BN):
            k = K.load([b, h, n0, 0]).reshape(BN, D)
            v = V.load([b, h, n0, 0]).reshape(BN, D)
            s = tl.dot(q, k.T, input_precision=PRECISION)                         # (BM, BN)
            dp = tl.dot(do, v.T, input_precision=PRECISION)
            p = tl.exp2(s * scale2 - lse[:, None])
            if MASK:
                p = tl.where(n0 + tl.arange(0, BN)[None, :] <= last[:, None], p, 0.0)
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    DQ.store([b, h, m0, 0], (dq * scale).to(DQ.dtype).reshape(1, 1, BM, D))


@triton.jit
def tuned_backward_kv_kernel(Q, K, V, DO, LSE, DELTA, DK, DV, scale2, scale, Tq, Tk, H, CAUSAL: tl.constexpr,
                             D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """dK and dV of BN keys of one head. 4 matmuls a block, of S^T and dP^T, as dV and dK need them."""
    bh, n0 = tl.program_id(1), tl.program_id(0) * BN
    b, h = bh // H, bh % H
    cols = n0 + tl.arange(0, BN)
    start = tl.maximum(n0 + Tq - Tk, 0) // BM * BM if CAUSAL else 0               # no row before this sees these keys
    full = tl.maximum(n0 + BN - 1 + Tq - Tk, 0) if CAUSAL else 0                  # each row from here on sees them all
    full = tl.minimum(tl.cdiv(full, BM) * BM, Tq) if n0 + BN <= Tk else Tq        # (no row, if some keys are past Tk)
    k = K.load([b, h, n0, 0]).reshape(BN, D)
    v = V.load([b, h, n0, 0]).reshape(BN, D)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    for FREE in tl.static_range(2):
        for m0 in range(full if FREE else start, Tq if FREE else full, BM):
            q = Q.load([b, h, m0, 0]).reshape(BM, D)
            do = DO.load([b, h, m0, 0]).reshape(BM, D)
            lse = LSE.load([bh, m0]).reshape(BM)                                  # inf past the last row: P is 0 there
            delta = DELTA.load([bh, m0]).reshape(BM)
            s = tl.dot(k, q.T, input_precision=PRECISION)                         # (BN, BM)
            p = tl.exp2(s * scale2 - lse[None, :])
            if not FREE:
                last = last_key(m0 + tl.arange(0, BM), Tq, Tk, CAUSAL)
                p = tl.where(cols[:, None] <= last[None, :], p, 0.0)
            dp = tl.dot(v, do.T, input_precision=PRECISION)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    DK.store([b, h, n0, 0], (dk * scale).to(DK.dtype).reshape(1, 1, BN, D))
    DV.store([b, h, n0, 0], dv.to(DV.dtype).reshape(1, 1, BN, D))


# (BM, BN, warps, stages) by head dim; head dims up to 64 share an entry. Beside each stand its TFLOP/s, causal / not
# causal, then those of other choices: on an H200, bf16, T = 4096, C = 2048, counting only matmuls that are computed,
# in short runs (a warm GPU reaches 10 to 15 % less).
# Two or three small programs on a multiprocessor often beat a large one: a program's softmax waits for S, and meanwhile
# another program can use the tensor cores.
ATTENTION_TILES = {
    "forward": {64: (64, 128, 4, 2),     # 424 / 473   (64, 64, 4, 3) 410 / 437   (128, 64, 8, 3) 378 / 416
                128: (64, 64, 4, 3),     # 490 / 507   (128, 128, 8, 3) 444 / 500   (128, 64, 8, 3) 417 / 457
                256: (64, 64, 4, 2)},    # works, but is not tuned
    "dq": {64: (128, 64, 8, 3),          # 579 / 655   (64, 64, 4, 3) 577 / 590   (128, 64, 8, 2) 473 / 506
           128: (128, 64, 8, 3),         # 563 / 641   (64, 64, 4, 2) 525 / 573   (128, 32, 8, 3) 450 / 627
           256: (64, 32, 4, 2)},
    "dkv": {64: (64, 64, 4, 3),          # 533 / 582   (64, 64, 4, 2) 496 / 484   (64, 128, 8, 2) 362 / 381
            128: (64, 64, 4, 2),         # 625 / 656   (32, 64, 4, 3) 554 / 567   (64, 128, 8, 2) 512 / 541
            256: (32, 64, 8, 2)},
}
# For float32 inputs each product is three TF32 products. This is as exact as PyTorch's float32 attention, and at head
# dim 64 three times as fast as plain float32. At head dim 256 the error is twice PyTorch's, so plain float32 is used.
ATTENTION_TILES_FLOAT32 = {64: (64, 32, 4, 2), 128: (32, 32, 4, 1), 256: (16, 16, 4, 1)}


def descriptor(x, rows):
    """The TMA descriptor of x (B, H, T, D), for tiles (1, 1, rows, D), or of x (B*H, T), for tiles (1, rows)."""
    if x.dim() == 4:
        return tiled(x, rows)
    return TensorDescriptor(x, list(x.shape), [x.stride(0) if len(x) > 1 else 16, 1], [1, rows])


def attention_settings(name, q, is_causal):
    """(BM, BN, the other constexprs and the options of a launch) of a kernel of ATTENTION_TILES."""
    D, wide = q.shape[3], q.dtype == torch.float32
    BM, BN, warps, stages = (ATTENTION_TILES_FLOAT32 if wide else ATTENTION_TILES[name])[max(D, 64)]
    precision = "tf32" if not wide else "tf32x3" if D <= 128 else "ieee"
    return BM, BN, {"CAUSAL": is_causal, "D": D, "BM": BM, "BN": BN, "PRECISION": precision, "num_warps": warps,
                    "num_stages": stages}


def tuned_attention_forward(q, k, v, is_causal):
    """O (B, H, Tq, D), laid out in memory as (B, Tq, H, D), and LSE (B*H, Tq rounded up to 128), float32, base 2."""
    check_attention(q, k, v)
    (B, H, Tq, D), Tk, T_pad = q.shape, k.shape[2], triton.cdiv(q.shape[2], 128) * 128
    o = torch.empty(B, Tq, H, D, dtype=q.dtype, device=q.device).transpose(1, 2)
    lse = torch.empty(B * H, T_pad, dtype=torch.float32, device=q.device)
    if specialized_takes(q, k, is_causal):
        specialized_attention_forward(q, k, v, is_causal, o, lse)
        return o, lse
    BM, BN, settings = attention_settings("forward", q, is_causal)
    tuned_forward_kernel[T_pad // BM, B * H](
        descriptor(q, BM), descriptor(k, BN), descriptor(v, BN), descriptor(o, BM), lse,
        math.log2(math.e) / math.sqrt(D), Tq, Tk, T_pad, H, **settings)
    return o, lse


def tuned_attention_backward(q, k, v, o, lse, do, is_causal, dq, dk, dv):
    """Write the gradients into dq, dk, dv, whose strides TMA must be able to address, as `aligned` says."""
    do, delta = aligned(do), torch.empty_like(lse)
    tuned_backward_q(q, k, v, o, lse, delta, do, is_causal, dq)
    tuned_backward_kv(q, k, v, lse, delta, do, is_causal, dk, dv)


def tuned_backward_q(q, k, v, o, lse, delta, do, is_causal, dq):
    """Write dq, and delta, which `tuned_backward_kv` reads. delta has lse's strides."""
    (B, H, Tq, _), Tk, scale = q.shape, k.shape[2], 1 / math.sqrt(q.shape[3])
    BM, BN, settings = attention_settings("dq", q, is_causal)
    tuned_backward_q_kernel[lse.shape[1] // BM, B * H](
        descriptor(q, BM), descriptor(k, BN), descriptor(v, BN), descriptor(o, BM), descriptor(do, BM), lse, delta,
        descriptor(dq, BM), scale * math.log2(math.e), scale, Tq, Tk, lse.stride(0), H, **settings)


def tuned_backward_kv(q, k, v, lse, delta, do, is_causal, dk, dv):
    (B, H, Tq, _), Tk, scale = q.shape, k.shape[2], 1 / math.sqrt(q.shape[3])
    BM, BN, settings = attention_settings("dkv", q, is_causal)
    tuned_backward_kv_kernel[triton.cdiv(Tk, BN), B * H](
        descriptor(q, BM), descriptor(k, BN), descriptor(v, BN), descriptor(do, BM), descriptor(lse, BM),
        descriptor(delta, BM), descriptor(dk, BN), descriptor(dv, BN), scale * math.log2(math.e), scale, Tq, Tk, H,
        **settings)


@triton.jit
def _merge_parts(O, LSE, PART, PART_LSE, o_b, o_h, o_t, lse_bh, part_b, part_h, part_t, part_lse_bh, H, T,
                 D: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows of one head: O <- O 2^(LSE - new) + PART 2^(PART_LSE - new), LSE <- new = log2(2^LSE + 2^PART_LSE)."""
    bh, rows = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b, h, column, inside = bh // H, bh % H, tl.arange(0, D), rows < T
    before = tl.load(LSE + bh * lse_bh + rows, inside, 0)
    part_lse = tl.load(PART_LSE + bh * part_lse_bh + rows, inside, 0)
    top = tl.maximum(before, part_lse)
    total = top + tl.log2(tl.exp2(before - top) + tl.exp2(part_lse - top))
    at = O + b * o_b + h * o_h + rows.to(tl.int64)[:, None] * o_t + column[None, :]
    part = tl.load(PART + b * part_b + h * part_h + rows.to(tl.int64)[:, None] * part_t + column[None, :],
                   inside[:, None], 0).to(tl.float32)
    o = tl.load(at, inside[:, None], 0).to(tl.float32)
    tl.store(at, o * tl.exp2(before - total)[:, None] + part * tl.exp2(part_lse - total)[:, None], inside[:, None])
    tl.store(LSE + bh * lse_bh + rows, total, inside)


def merge_parts(o, lse, part, part_lse):
    """Merge (part, part_lse), attention to some of the keys, into (o, lse), attention to others: in place.

    o and part (B, H, T, D), lse and part_lse (B*H, T) in base 2, as tuned_attention_forward returns them. Every row
    must see a key in each of the two. Computes in float32.
    """
    B, H, T, D = o.shape
    _merge_parts[triton.cdiv(T, 64), B * H](o, lse, part, part_lse, *o.stride()[:3], lse.stride(0), *part.stride()[:3],
                                            part_lse.stride(0), H, T, D, 64)


@triton.jit
def _add_rows(total, part, total_b, total_t, part_b, part_t, T, width, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    b, t = tl.program_id(0).to(tl.int64) // T, tl.program_id(0).to(tl.int64) % T
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = total + b * total_b + t * total_t + column, column < width
    more = tl.load(part + b * part_b + t * part_t + column, inside, 0).to(tl.float32)
    tl.store(at, more if FIRST else tl.load(at, inside, 0).to(tl.float32) + more, inside)


def add_rows(total, part, first=False):
    """total += part; with `first`, total = part. Both (B, T, ...), of any two dtypes, contiguous but for gaps between
    rows. With two dtypes or with gaps, PyTorch's own kernel reaches only a third of the bandwidth."""
    total, part = total.flatten(2), part.flatten(2)  # views, both
    B, T, width = total.shape
    _add_rows[B * T, triton.cdiv(width, 2048)](total, part, *total.stride()[:2], *part.stride()[:2], T, width, first,
                                               2048)


def aligned(x):
    """x if TMA can address it, else a contiguous copy. TMA needs gapless rows that start at multiples of 16 bytes."""
    strides = [s * x.element_size() for n, s in zip(x.shape[:-1], x.stride()) if n > 1]
    ok = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s % 16 == 0 and s > 0 for s in strides)
    return x if ok else x.contiguous()


def check_attention(q, k, v):
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.shape != v.shape or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"attention takes q (B, H, Tq, D), k and v (B, H, Tk, D), not {shapes}")
    if q.shape[3] not in HEAD_DIMS:
        raise ValueError(f"head dim {q.shape[3]} ({shapes}) is not 16, 32, 64, 128 or 256: a tile is 2^i wide")
    if not q.numel() or not k.numel():
        raise ValueError(f"attention over nothing: {shapes}")
    if q.shape[0] * q.shape[1] > 65535:
        raise ValueError(f"B * H is {q.shape[0] * q.shape[1]} ({shapes}), a launch takes 65535: split the batch")
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ValueError(f"q {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device} ({shapes}): "
                         f"all three must be bfloat16, float16 or float32, on one device")


def heads(qkv):
    """q, k, v (B, H, T, D) of qkv (B, T, 3, H, D)."""
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"packed attention takes qkv (B, T, 3, H, D), not {tuple(qkv.shape)}")
    return qkv.permute(2, 0, 3, 1, 4)


class PackedAttention(torch.autograd.Function):
    """FlashAttention of qkv (B, T, 3, H, D). The kernels write its gradient as one tensor, too."""

    @staticmethod
    def forward(ctx, qkv, is_causal):
        qkv, ctx.is_causal = aligned(qkv), is_causal
        o, lse = tuned_attention_forward(*heads(qkv), is_causal)
        ctx.save_for_backward(qkv, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        qkv, o, lse = ctx.saved_tensors
        grad = torch.empty_like(qkv)
        tuned_attention_backward(*heads(qkv), o, lse, do, ctx.is_causal, *heads(grad))
        return grad, None


# What ring attention calls in place of the two references. O has q's dtype here. The tuned kernels' LSE is in base 2,
# +inf where a row sees no key, and padded to a multiple of 128 rows, so it is converted from and to L.

def attention_block(q, k, v, is_causal):
    if not flash_takes(q):
        return attention_reference(q, k, v, is_causal)
    o, lse = tuned_attention_forward(*map(aligned, (q, k, v)), is_causal)
    lse = lse[:, :q.shape[2]].reshape(q.shape[:3]) * math.log(2)
    return o, lse.masked_fill(lse == math.inf, -math.inf)


def attention_block_backward(q, k, v, o, lse, do, is_causal):
    if not flash_takes(q):
        return attention_backward_reference(q, k, v, o, lse, do, is_causal)
    q, k, v, o, do = map(aligned, (q, k, v, o, do))
    lse = finite_or_inf(lse).flatten(0, 1).squeeze(2).float() / math.log(2)
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    tuned_attention_backward(q, k, v, o, F.pad(lse, (0, -lse.shape[1] % 128), value=math.inf), do, is_causal, *grads)
    return grads


FASTER.update({tileable: aligned, attention_forward: tuned_attention_forward,
               attention_backward: tuned_attention_backward, flash_attention: PackedAttention.apply,
               attention_reference: attention_block, attention_backward_reference: attention_block_backward})


# ----------------------------------------------------------------------------------------------------- matrix product

TILES = 256, 128, 64, 8  # BM, BN, BK, GROUP: the fastest of six measured


def tuned_matmul(a, b, function=None):
    """matmul in the fastest tiles. In float32 a tile has twice the bytes, and a product takes three of TF32."""
    return matmul(a, b, function, (64, 64, 32, 8) if a.dtype == torch.float32 else TILES)


FASTER[matmul] = tuned_matmul


# -------------------------------------------------------------------------------------------------------------- AdamW
#
#     m <- m + (1 - beta1) (g - m)      v <- v + (1 - beta2) (g^2 - v)      at step t, with learning rate l and decay d:
#     p <- p (1 - l d) - l (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
#
# g is the gradient times `scale`, the clipping coefficient. One kernel clips, steps and writes the 16-bit copy that
# layers compute with. It reads p, g, m, v and writes p, m, v in float32, and the copy: 30 bytes a parameter. Separate
# kernels for clipping, stepping and copying would move 8 + 28 + 6.

@triton.jit
def _adamw(p, g, m, v, copy, scale, n, lr, beta1, beta2, eps, decay, correction1, correction2, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    d = tl.load(g + at, inside).to(tl.float32)
    if scale is not None:
        d *= tl.load(scale).to(tl.float32)
    m1, v1, p1 = tl.load(m + at, inside), tl.load(v + at, inside), tl.load(p + at, inside)
    m1 += (d - m1) * (1 - beta1)
    v1 += (d * d - v1) * (1 - beta2)
    p1 = p1 * (1 - lr * decay) - lr * (m1 / correction1) / (tl.sqrt(v1 / correction2) + eps)
    tl.store(m + at, m1, inside)
    tl.store(v + at, v1, inside)
    tl.store(p + at, p1, inside)
    if copy is not None:
        tl.store(copy + at, p1, inside)


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW with the same state and update, in one pass over memory. Loshchilov & Hutter (2019).

    scale: None, or a tensor of one element; the next step() multiplies gradients by it as it reads them. copies:
    {parameter: tensor of as many elements}; step() also writes the new values there, in the tensor's own dtype.
    stepped: called with each parameter when its kernel is launched. step() raises ValueError for parameters that are
    not float32, contiguous and on a device that Triton serves.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):  # and no other options
        super().__init__(params, lr, betas, eps, weight_decay)
        self.scale, self.copies, self.stepped = None, {}, lambda param: None

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in reversed(group["params"]):  # buckets come last layers first, and forward wants the first ones
                if p.grad is None:
                    continue
                if not on_triton(p) or p.dtype != torch.float32 or not p.is_contiguous() or not p.grad.is_contiguous():
                    raise ValueError(f"AdamW's kernel takes contiguous float32 parameters on CUDA, not "
                                     f"{tuple(p.shape)} {p.dtype} on {p.device}")
                state = self.state[p]
                if not state:
                    state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                t = state["step"].item()
                _adamw[(triton.cdiv(p.numel(), 1024),)](
                    p, p.grad, state["exp_avg"], state["exp_avg_sq"], self.copies.get(p), self.scale, p.numel(),
                    group["lr"], beta1, beta2, group["eps"], group["weight_decay"], 1 - beta1**t, 1 - beta2**t, 1024,
                    num_warps=4)
                torch.autograd.graph.increment_version(p)
                self.stepped(p)
        self.scale = None  # it holds for one step


# -------------------------------------------------------------------------------------------------------- sum of rows
#
# A reduce-scatter or all-reduce between GPUs ends by adding one row of every rank, which may lie in other GPUs' memory,
# and by storing the sum or mean in one place or several. Adding the rows one by one would read and write the sum again
# for each. This kernel reads every row once and writes every result once.

@triton.jit
def _sum_rows(rows, outs, n, DIVIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64 if rows[0].dtype.element_ty == tl.float64 else tl.float32)
    for r in tl.static_range(len(rows)):
        total += tl.load(rows[r] + at, at < n).to(total.dtype)
    for r in tl.static_range(len(outs)):
        tl.store(outs[r] + at, total / len(rows) if DIVIDE else total, at < n)


def sum_rows(rows, outs, divide):
    """Write the sum of rows, N tensors (n), into each of outs (n); with `divide`, the mean. A row may be one of outs.

    All must be contiguous and of one dtype: bfloat16, float16, float32 (these are summed in float32) or float64. Else
    ValueError. Rows are added in their order.
    """
    n, dtype = len(rows[0]), rows[0].dtype
    alike = all(t.shape == (n,) and t.dtype == dtype and t.is_contiguous() for t in (*rows, *outs))
    if dtype not in (*DTYPES, torch.float64) or not alike:
        raise ValueError(f"sum of rows {[(*t.shape, t.dtype) for t in (*rows, *outs)]}: needs contiguous (n) of one "
                         f"floating dtype")
    block = 4096 // rows[0].element_size()  # 4 KiB a program, as in launch_map
    _sum_rows[(triton.cdiv(n, block),)](tuple(rows), tuple(outs), n, divide, block, num_warps=4)


# --------------------------------------------------------------------------------------------------------- all-to-all
#
# Each GPU of a node has a block of bytes for each other GPU, and only the two know its size. One kernel a GPU exchanges
# all blocks, without a barrier or the CPU, so a CUDA graph can hold it. It costs each GPU a window of 32 MiB, memory
# that the other GPUs can write to. Each program sends a share of a block, piece by piece, to the program of the same
# number on the receiving GPU. After each piece that it sends, it takes one that it receives:
#
#     send   wait until a slot in the receiver's window is free, write a piece there, add 1 to the receiver's `arrived`
#     take   wait until a piece has arrived in my window, copy it out, add 1 to the sender's `taken`
#
# In step s rank r sends to rank r+1+s and receives from r-1-s; the N-1 steps run at the same time. Counters are never
# reset, so launches need no barrier between them. Programs cannot deadlock, even if a GPU has room for only one at a
# time: each waits only for programs of its own number, and a send waits only for the piece SLOTS before it to be taken.
# A block crosses NVLink once. The receiver then copies it out of its window, from L2, while the next pieces arrive.

SHARES, SLOTS, SLOT_BYTES = 128, 4, 1 << 16  # programs, slots for each, bytes of a slot: windows of 32 MiB
LEAST_BYTES = 1 << 12                        # least bytes of a share, so that small blocks need few programs


def all_to_all_bytes(ranks):
    """Bytes of a window: the slots of every program of every step, then four counters of each."""
    return (ranks - 1) * _shares(ranks) * (SLOTS * SLOT_BYTES + 16)


def _shares(ranks):
    """Programs that share a block."""
    return max(1, SHARES // max(1, ranks - 1))


@triton.jit
def _share(n, share, SHARES: tl.constexpr, LEAST_BYTES: tl.constexpr):
    """(start, bytes) of one of SHARES shares of a block of n bytes; n is encoded as `AllToAll.__call__` says."""
    n = (n << 2) >> 3
    width = tl.cdiv(tl.cdiv(n, SHARES), LEAST_BYTES) * LEAST_BYTES
    start = tl.minimum(share * width, n)
    return start, tl.minimum(width, n - start)


@triton.jit
def _copy_bytes(to, source, n, WORD: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy n bytes from address `source` to address `to`; all three are multiples of UNIT."""
    to = tl.multiple_of(to.to(tl.pointer_type(WORD)), UNIT)
    source = tl.multiple_of(source.to(tl.pointer_type(WORD)), UNIT)
    width: tl.constexpr = WORD.primitive_bitwidth // 8
    words = tl.multiple_of(n // width, UNIT // width)
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        # ".cg" reads past L1, which may still hold the old contents of a slot.
        tl.store(to + at, tl.load(source + at, at < words, cache_modifier=".cg"), at < words)


@triton.jit
def _wait(counter, least):
    while tl.atomic_add(counter, 0, sem="acquire", scope="sys") - least < 0:  # correct even past 2^31
        pass


@triton.jit
def _count(counter):
    tl.debug_barrier()  # until all threads of this program have finished the copy that is counted
    tl.atomic_add(counter, 1, sem="release", scope="sys")


@triton.jit
def _all_to_all(blocks, windows, SHARES: tl.constexpr, SLOTS: tl.constexpr, SLOT_BYTES: tl.constexpr,
                LEAST_BYTES: tl.constexpr, WORD: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    N: tl.constexpr = len(blocks) // 4
    share, step = tl.program_id(0), tl.program_id(1)
    outgoing, sends, incoming, receives = blocks[0], blocks[1], blocks[2], blocks[3]
    for s in tl.static_range(1, N):
        outgoing, sends = tl.where(step == s, blocks[4 * s], outgoing), tl.where(step == s, blocks[4 * s + 1], sends)
        incoming = tl.where(step == s, blocks[4 * s + 2], incoming)
        receives = tl.where(step == s, blocks[4 * s + 3], receives)
    start, sends = _share(sends, share, SHARES, LEAST_BYTES)
    outgoing = ((outgoing << 2) >> 3) + start
    start, receives = _share(receives, share, SHARES, LEAST_BYTES)
    incoming = ((incoming << 2) >> 3) + start
    rounds = tl.cdiv(tl.maximum(sends, receives), SLOT_BYTES).to(tl.int32)
    if step == N - 1:  # my own block
        _copy_bytes(incoming, outgoing, sends, WORD, UNIT, BLOCK)
    elif rounds > 0:
        mine, theirs, givers = tl.load(windows + N - 1), tl.load(windows + step), tl.load(windows + N + step)
        number, programs = step * SHARES + share, (N - 1) * SHARES
        slots, counters = number * SLOTS * SLOT_BYTES, programs * SLOTS * SLOT_BYTES + 4 * number
        arrived_here = (mine + counters).to(tl.pointer_type(tl.int32))
        arrived_there = (theirs + counters).to(tl.pointer_type(tl.int32))
        taken_there = (mine + counters + 4 * programs).to(tl.pointer_type(tl.int32))
        taken_here = (givers + counters + 4 * programs).to(tl.pointer_type(tl.int32))
        sent_before, taken_before = arrived_here + 2 * programs, arrived_here + 3 * programs  # no other program's
        sent, taken = tl.load(sent_before), tl.load(taken_before)
        for t in range(0, rounds + 1):
            at, before = t * SLOT_BYTES, (t - 1) * SLOT_BYTES
            if at < sends:
                _wait(taken_there, sent + 1 - SLOTS)
                slot = theirs + slots + (sent & (SLOTS - 1)) * SLOT_BYTES
                _copy_bytes(slot, outgoing + at, tl.minimum(sends - at, SLOT_BYTES), WORD, UNIT, BLOCK)
                _count(arrived_there)
                sent += 1
            if (t > 0) & (before < receives):
                _wait(arrived_here, taken + 1)
                slot = mine + slots + (taken & (SLOTS - 1)) * SLOT_BYTES
                _copy_bytes(incoming + before, slot, tl.minimum(receives - before, SLOT_BYTES), WORD, UNIT, BLOCK)
                _count(taken_here)
                taken += 1
        tl.store(sent_before, sent)
        tl.store(taken_before, taken)


class AllToAll:
    """All-to-alls of N ranks, one kernel a call. rank: this rank's number.

    windows: the addresses of N windows, one on each rank, of `all_to_all_bytes` bytes, zero at first and used by no
    other object. All ranks must make the same calls in the same order, each rank on one stream. If a peer dies, the
    kernel waits for it forever: there is no timeout.
    """

    def __init__(self, windows, rank, device):
        n = len(windows)
        self.peers = [((rank + 1 + s) % n, (rank - 1 - s) % n) for s in range(n)]  # the last is for my own block
        self.windows = torch.tensor([[windows[peer] for peer in line] for line in zip(*self.peers)], device=device)
        self.words = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
        self.shapes, self.compiled = (_shares(n), SLOTS, SLOT_BYTES, LEAST_BYTES), {}

    def __call__(self, outgoing, incoming):
        """Send outgoing[r] to every rank r, and receive from it into incoming[r]. Both are lists of (address, bytes); 0
        bytes are not sent. ValueError if this rank's block to itself has two sizes."""
        blocks, bits = [], 16
        for to, source in self.peers:
            (there, sends), (here, receives) = outgoing[to], incoming[source]
            blocks += there, sends, here, receives
            bits |= there | sends | here | receives
        largest, unit = max(blocks[1::2]), bits & -bits
        if blocks[-3] != blocks[-1]:
            raise ValueError(f"all-to-all: my own block has {blocks[-3]} bytes to be sent, {blocks[-1]} to be received")
        if not largest:
            return
        # Triton compiles a kernel anew for 32- or 64-bit integers, and for multiples of 16. So n is passed as 2n + 1 +
        # 2^62, which always has 64 bits and is odd. In the kernel, (number << 2) >> 3 gives n back.
        blocks = tuple([2 * number + (1 << 62 | 1) for number in blocks])
        grid = min(self.shapes[0], -(-largest // LEAST_BYTES)), len(self.peers), 1
        arguments = blocks, self.windows, *self.shapes, self.words[unit], unit, 4096
        if unit in self.compiled:  # Triton's own lookup would cost the CPU 27 us, twice as much
            self.compiled[unit][grid](*arguments)
            return
        compiled = _all_to_all[grid](*arguments, num_warps=16, num_stages=1)
        if compiled:  # None in the interpreter
            self.compiled[unit] = compiled


# ---------------------------------------------------------------------------- all-reduce, reduce-scatter, all-gather
#
# The same for an all-reduce: one kernel a GPU, no barrier. Rank r sums chunk r. A program does all of it for its slice
# of every chunk, piece by piece, with the programs of its number on the other GPUs. So nobody waits for a whole GPU,
# and one piece travels while another is summed or copied. Round t of a program:
#
#     send    write piece t of every other rank's chunk into that rank's window
#     sum     wait for the others' pieces t-1 of my chunk, add mine; write the sum to the result and into their windows
#     fetch   wait for the others' sums t-2, copy them out of my window
#
# A slot is written to again four pieces later, and nobody need say so. Before I send piece t, I have all ranks' sums
# t-3, so they have read my pieces t-3. Before a rank writes its sum t-1 into my window, it has my piece t-1, so I have
# fetched its sum t-4. (Three slots would do, if an all-gather had a barrier between a fetch and its next count.)
# A reduce-scatter has the same rounds but writes no sums into windows, an all-gather sends no pieces, and its "sums"
# are its own chunk. They still count what they do not write.

SUM_PROGRAMS, SUM_SLOTS = 128, 4


def sum_slot_bytes(ranks):
    """32 KiB for 2 ranks, 16 for 3 and 4, 8 for 5 to 8: windows of 32 to 56 MiB."""
    return (1 << 16) >> (ranks - 1).bit_length()


def all_reduce_bytes(ranks):
    """Bytes of a window: a program's slots and counters for pieces and sums of each other rank, and its own counter."""
    return SUM_PROGRAMS * (2 * (ranks - 1) * (SUM_SLOTS * sum_slot_bytes(ranks) + 4) + 16)


@triton.jit
def _chunk(flat, r, first, row, least, more, end, N: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr):
    """(the address of chunk r, to which the caller adds an index from `first` on; where a program's slice of it ends).
    Chunks have `least` elements, the first `more` of them one longer. They lie side by side or, if ROWS, in rows: row
    after row, each in N parts of `row` elements, one of every chunk."""
    if ROWS:  # (N - 1), because `first` itself skips one part in each row
        start = flat + (r + (first // row).to(tl.int64) * (N - 1)) * row
    else:
        start = flat + r.to(tl.int64) * least + (0 if EVEN else tl.minimum(r, more))
    return start, tl.minimum(end, least + (0 if EVEN else (r < more).to(tl.int32)))


@triton.jit
def _slot(window, line, slot, SLOTS: tl.constexpr, BYTES: tl.constexpr, kind: tl.constexpr):
    return tl.multiple_of((window + (line * SLOTS + slot) * BYTES).to(tl.pointer_type(kind)), 16)


@triton.jit
def _count_for_all(windows, rank, counters: tl.constexpr, first, N: tl.constexpr):
    """Add 1 to this rank's counter on each other rank: the one for line `first` + s - 1 on rank+s."""
    for s in tl.static_range(1, N):
        there = tl.load(windows + (rank + s) % N) + counters + 4 * (first + s - 1)
        tl.atomic_add(there.to(tl.pointer_type(tl.int32)), 1, sem="release", scope="sys")


@triton.jit
def _all_reduce(flat, own, windows, least, more, width, row, N: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
                SEND: tl.constexpr, GATHER: tl.constexpr, OP: tl.constexpr, TOTAL: tl.constexpr, PROGRAMS: tl.constexpr,
                SLOTS: tl.constexpr, SLOT: tl.constexpr):
    """windows: N addresses, and this rank's number. own: a reduce-scatter's result, or what an all-gather sends. SEND:
    send pieces and sum them. GATHER: send sums and fetch them. EVEN: all chunks have `least` elements. TOTAL: the sum's
    dtype. A program does `width` elements of every chunk, SLOT at a time; all ranks do as many rounds, even where their
    chunks are shorter."""
    kind: tl.constexpr = flat.dtype.element_ty
    BYTES: tl.constexpr = SLOT * (kind.primitive_bitwidth // 8)
    counters: tl.constexpr = 2 * PROGRAMS * (N - 1) * SLOTS * BYTES  # they lie behind all slots
    program, rank = tl.program_id(0), tl.load(windows + N).to(tl.int32)
    here = tl.load(windows + rank)
    # The first of N-1 lines of slots, each; rank-s fills line s-1 of them.
    pieces, sums = program * (N - 1), (PROGRAMS + program) * (N - 1)
    # How many pieces this program has handled in all launches; `before`: in those before.
    done = (here + counters + 4 * (2 * PROGRAMS * (N - 1) + program)).to(tl.pointer_type(tl.int32))
    before, lane = tl.load(done), tl.arange(0, SLOT)
    start, end = program * width, tl.minimum(program * width + width, least + (0 if EVEN else 1))
    rounds = tl.cdiv(end - start, SLOT)
    for t in range(0, rounds + 2):
        if t < rounds:
            first, slot = start + t * SLOT, (before + t) & (SLOTS - 1)
            if SEND:
                for s in tl.static_range(1, N):
                    chunk, until = _chunk(flat, (rank + s) % N, first, row, least, more, end, N, EVEN, ROWS)
                    there = _slot(tl.load(windows + (rank + s) % N), pieces + s - 1, slot, SLOTS, BYTES, kind)
                    inside = first + lane < until
                    tl.store(there + lane, tl.load(chunk + first + lane, inside), inside)
                tl.debug_barrier()  # until all threads have written
            _count_for_all(windows, rank, counters, pieces, N)
        if (t > 0) & (t <= rounds):
            first, slot = start + (t - 1) * SLOT, (before + t - 1) & (SLOTS - 1)
            for s in tl.static_range(1, N):
                _wait((here + counters + 4 * (pieces + s - 1)).to(tl.pointer_type(tl.int32)), before + t)
            chunk, until = _chunk(flat, rank, first, row, least, more, end, N, EVEN, ROWS)
            inside = first + lane < until
            mine = tl.load((chunk if SEND else own) + first + lane, inside)
            total = mine
            if SEND:
                total = tl.full((SLOT,), float("-inf") if OP == "max" else 0, TOTAL)
                for r in tl.static_range(N):  # in the ranks' order
                    x = mine
                    if r != rank:
                        line = _slot(here, pieces + (rank - r + N) % N - 1, slot, SLOTS, BYTES, kind)
                        x = tl.load(line + lane, inside, cache_modifier=".cg")  # past L1, as in _copy_bytes
                    x = x.to(TOTAL)
                    total = tl.maximum(total, x, tl.PropagateNan.ALL) if OP == "max" else total + x
                total = (total / N if OP == "avg" else total).to(kind)
            tl.store((chunk if GATHER else own) + first + lane, total, inside)
            if GATHER:
                for s in tl.static_range(1, N):
                    there = _slot(tl.load(windows + (rank + s) % N), sums + s - 1, slot, SLOTS, BYTES, kind)
                    tl.store(there + lane, total, inside)
            tl.debug_barrier()
            _count_for_all(windows, rank, counters, sums, N)
        if t > 1:
            first, slot = start + (t - 2) * SLOT, (before + t - 2) & (SLOTS - 1)
            for s in tl.static_range(1, N):
                _wait((here + counters + 4 * (sums + s - 1)).to(tl.pointer_type(tl.int32)), before + t - 1)
                if GATHER:
                    chunk, until = _chunk(flat, (rank - s + N) % N, first, row, least, more, end, N, EVEN, ROWS)
                    line, inside = _slot(here, sums + s - 1, slot, SLOTS, BYTES, kind), first + lane < until
                    tl.store(chunk + first + lane, tl.load(line + lane, inside, cache_modifier=".cg"), inside)
    if rounds > 0:
        tl.debug_barrier()  # until all threads have read the counter
        tl.store(done, before + rounds)


class AllReduce:
    """All-reduces, reduce-scatters and all-gathers of N ranks, one kernel a call. windows, rank: as for `AllToAll`, but
    of `all_reduce_bytes` bytes. Tensors are contiguous. op: "sum", "avg" or "max", of dtypes that it `combines`.

    One rank sums each element, in the ranks' order, so all get the same bits. 16-bit ones are summed in float32. row:
    Nths do not lie side by side in `flat`, but in rows of N parts of `row` elements, one of every Nth. A part must fill
    whole slots (`takes_rows`).
    """

    def __init__(self, windows, rank, device):
        self.ranks, self.windows = len(windows), torch.tensor([*windows, rank], device=device)

    @staticmethod
    def combines(dtype, op):
        return dtype in (*DTYPES, torch.float64) and op in ("sum", "avg", "max") or (dtype, op) == (torch.int64, "sum")

    def takes_rows(self, nbytes):
        """Whether a row's parts may have so many bytes: no slot may lie across two of them."""
        return nbytes % sum_slot_bytes(self.ranks) == 0

    def all_reduce(self, flat, op):
        """Combine `flat` (n) of all ranks, in place."""
        most = len(flat) - len(flat) % (16 * self.ranks)
        for part in flat[:most], flat[most:]:  # apart, because only chunks of 16 k elements are read in vectors
            self._launch(part, part, SEND=True, GATHER=True, OP=op)

    def reduce_scatter(self, flat, result, op, row=0):
        """Combine `flat` (N n) of all ranks, and write this rank's Nth to `result` (n)."""
        self._launch(flat, result, row, SEND=True, GATHER=False, OP=op)

    def all_gather(self, flat, own, row=0):
        """Write all ranks' `own` (n), of any dtype, to `flat` (N n), of which `own` may be a part."""
        row, (flat, own) = row * flat.itemsize, (t.as_strided(t.shape, (1,)).view(torch.uint8) for t in (flat, own))
        if (flat.data_ptr() | own.data_ptr() | len(own)) % 4 == 0:
            row, flat, own = row // 4, flat.view(torch.int32), own.view(torch.int32)
        self._launch(flat, own, row, SEND=False, GATHER=True, OP="")

    def _launch(self, flat, own, row=0, **what):
        if not len(flat):
            return
        (least, more), slot = divmod(len(flat), self.ranks), sum_slot_bytes(self.ranks) // flat.itemsize
        unit, longest = slot if row else LEAST_BYTES // flat.itemsize, least + (more > 0)
        width = triton.cdiv(triton.cdiv(longest, SUM_PROGRAMS), unit) * unit
        _all_reduce[(triton.cdiv(longest, width),)](
            flat, own, self.windows, least, more, width, row, self.ranks, not more, row > 0, **what,
            TOTAL={torch.float64: tl.float64, torch.int64: tl.int64}.get(flat.dtype, tl.float32),
            PROGRAMS=SUM_PROGRAMS, SLOTS=SUM_SLOTS, SLOT=slot, num_warps=16)


def window_bytes(ranks):
    """Bytes of a window for an `AllToAll` and, behind it, an `AllReduce`."""
    return all_to_all_bytes(ranks) + all_reduce_bytes(ranks)


# ------------------------------------------------------------------------------------------------------------- errors

def operations(dtype, device):
    """Yield (name, our function, PyTorch's, inputs) of each operation that `main` compares."""
    def random(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    yield "ELU", elu, F.elu, [random(3000)]
    yield ("bias + GELU", functools.partial(add_bias, gelu), lambda x, b: F.gelu(x + b, approximate="tanh"),
           [random(90, 33), random(33)])
    for width in (24, 1600, 5000):
        x, r, w, b = random(3, width), random(3, width), 1 + random(width), random(width)
        yield f"layer norm {width}", layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b), [x, w, b]
        yield (f"add + norm {width}", add_layer_norm, lambda x, r, w, b: (x + r, F.layer_norm(x + r, w.shape, w, b)),
               [x, r, w, b])
    for D, causal in (16, True), (16, False), (64, True), (64, False):
        yield (f"attention {D}{' causal' * causal}", lambda *qkv, causal=causal: FlashAttention.apply(*qkv, causal),
               lambda *qkv, causal=causal: F.scaled_dot_product_attention(*qkv, is_causal=causal),
               [random(1, 2, 80, D) for _ in "qkv"])
    targets = torch.randint(5000, (8,), device=device)
    yield "linear", linear, F.linear, [random(2, 3, 16), random(37, 16), random(37)]
    counts = torch.tensor([3, 0, 70, 17], device=device)
    yield ("grouped product", lambda *xwb: grouped_linear(*xwb, counts), lambda *xwb: grouped_reference(*xwb, counts),
           [random(90, 40), random(4, 72, 40), random(4, 72)])
    yield ("cross-entropy", lambda z: cross_entropy(z, targets),
           lambda z: F.cross_entropy(z if z.dtype == torch.float64 else z.float(), targets), [random(8, 5000)])
    yield ("product + GELU", lambda a, b: faster(matmul)(a, b, _gelu), lambda a, b: F.gelu(a @ b, approximate="tanh"),
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


@contextlib.contextmanager
def only_upper_half():
    """Inside, only kernels above the bar run. An operation's forward and backward must be both inside or both out."""
    kept = dict(FASTER)
    FASTER.clear()
    try:
        yield
    finally:
        FASTER.update(kept)


def main():
    gpu = torch.cuda.is_available()
    if not HAVE_TRITON:
        print("The package triton is not installed: PyTorch's own operations run in place of these kernels.")
        return
    if not gpu and not INTERPRETED:  # Triton reads the variable below when it decorates a kernel: start again
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "TRITON_INTERPRET": "1"})
    use("triton")
    warnings.filterwarnings("ignore", "overflow encountered")  # NumPy's: of exp in branches that tl.where drops
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    print(f"relative error against float64, {dtype}, of forward and of the worst gradient:\n"
          f"  {'':22} as training runs it  | the upper half alone | PyTorch's own")
    for name, ours, theirs, inputs in operations(dtype, device):
        columns = [errors(ours, theirs, inputs)]
        with only_upper_half():
            columns += [errors(ours, theirs, inputs), errors(theirs, theirs, inputs)]
        columns = ("  ".join(f"{e:.2e}" for e in column) for column in columns)
        print(f"  {name:22} " + " | ".join(f"{column:18}" for column in columns), flush=True)
    tall, wide = 8192 // TILES[0], 8192 // TILES[1]
    print(f"product 8192 x 8192 x 8192 in tiles of {TILES[0]} x {TILES[1]}: an element of A is read {wide} times, of B "
          f"{tall}; 132 programs at once need {tiles_read(tall, wide, 1):.1f} rows and columns of tiles row by row, "
          f"{tiles_read(tall, wide, TILES[3]):.1f} in groups")
    if not gpu:
        print("times need a GPU")
        return
    sys.stdout.flush()  # bench.py then prints the times, beside PyTorch's
    bench = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bench.py")
    os.execv(sys.executable, [sys.executable, bench, "kernels", *sys.argv[1:]])


if __name__ == "__main__":
    main()
