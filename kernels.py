"""What a training step spends its time on beside cuBLAS, as Triton kernels:

    activations     ELU and GELU
    layer norm      of each row, with a backward that sums over rows in a fixed order
    attention       flash attention
    cross-entropy   never writes a probability, puts the gradient where the logits were

Each section is a page to learn one kernel from: the math, the kernel, its autograd function, and the bytes and FLOPs it
should cost. Attention also has a reference whose backward is derived by hand; further/by_hand.py has those of
activations and layer norm. All but attention are bound by memory: best is to read every element once and write it once,
at the speed of a copy. (further/tiles.py multiplies matrices.)

    python -m lessons kernels    errors against float64, and PyTorch's own beside them

`use("auto")`, the default, takes Triton on Hopper GPUs and later for tensors in bf16, fp16 or float32 (attention: in
16 bits), and PyTorch's own operations for all others; `use("triton")` takes it on any GPU. Without Triton (macOS)
PyTorch's operations run; with TRITON_INTERPRET=1 the kernels run on the CPU, slowly, for tests.

Where fast/ has something faster than f, a model calls `table[f]` in place of f. That is f itself until `fast.on()` has
said what this process computes instead.

Letters: n elements, rows of a given width, V vocabulary, B, T, H, D as in model.py, Tq queries, Tk keys; dy stands for
dloss/dy; a kernel's x_ptr is the address of x, and capitals as BLOCK, BM are sizes that the compiler knows.
Read with: CS336 lectures 5, 6 (GPUs, kernels, Triton); Triton's own tutorials.
"""

import functools
import math
import os
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # the kernels below stay unused, and decorating them does nothing
    triton = SimpleNamespace(jit=lambda function: function)
    tl = SimpleNamespace(constexpr=int)
    TensorDescriptor = None


# ------------------------------------------------------------------------------------------------------------- choice

class Table(dict):
    """{function or class: what computes the same sooner}. What is not in it stands for itself."""

    def __missing__(self, f):
        return f


table = Table()  # this process's; `fast.on()` fills it
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HAVE_TRITON = hasattr(triton, "cdiv")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # a b + c is rounded once. Triton 3.9 warns unless one says so
_choice = "auto"


def use(choice):
    """"triton": our kernels, an error where they do not apply; "torch": PyTorch's own operations; "auto": our kernels
    from Hopper on, except in float64, and for attention in float32."""
    global _choice
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


def readable(tensor):
    """Whether the CPU can look at its numbers without waiting for a GPU."""
    return tensor.device.type == "cpu"


IN_INTERPRETER = tl.constexpr(INTERPRETED)  # kernels read no other globals


@triton.jit
def exact(x):
    """A factor of tl.dot. Triton's interpreter has no bf16 product: it would multiply the numbers' bits."""
    return x.to(tl.float32) if IN_INTERPRETER else x


@triton.jit
def this_program():
    """This program's number, in 64 bits, because what it is multiplied by may carry it past 2^31."""
    return tl.program_id(0).to(tl.int64)


@triton.jit
def load_float32(pointers, mask):
    """The numbers there, 0 where the mask is False, as float32."""
    return tl.load(pointers, mask, 0).to(tl.float32)


@triton.jit
def dot(a, b, total=None):
    """total + a b. "ieee": float32 without TF32."""
    return tl.dot(exact(a), exact(b), total, input_precision="ieee")


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
#
# How to read a Triton kernel: `_map[(7,)](...)` starts 7 programs. Each runs the function once, in any order, many at a
# time; tl.program_id(0) is its number, 0 to 6. A variable is a block of numbers, spread over the program's threads:
# tl.arange(0, 4) is [0, 1, 2, 3]. A tensor arrives as the address of its first number, so x_ptr + offsets is a block of
# addresses. tl.load reads them into registers. Where `mask` is False it reads nothing; there the block has tl.load's
# third argument or, without one, any number, which a store under the same mask does not write. The compiler knows
# arguments that are tl.constexpr, and compiles once for each of their values.

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
def _map(x_ptr, dy_ptr, y_ptr, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    """Forward: y = FUNCTION(x), n elements, dy_ptr None. Backward: FUNCTION is the slope, and y = FUNCTION(x) dy."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # int64, because n may pass 2^31
    mask = offsets < n  # the last program's block may reach beyond the end
    x = tl.load(x_ptr + offsets, mask)
    y = FUNCTION(x.to(tl.float32))
    if dy_ptr is not None:
        y *= tl.load(dy_ptr + offsets, mask).to(tl.float32)
    tl.store(y_ptr + offsets, y, mask)


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
    y = torch.empty_like(x)
    block = 4096 // x.element_size()  # 4 KiB a program, 32 bytes a thread
    programs = triton.cdiv(x.numel(), block)
    _map[(programs,)](x, dy, y, x.numel(), function, block, num_warps=4)
    return y


def elu(x):
    """ELU with alpha 1. Clevert et al. (2015)."""
    return Map.apply(x, _elu, _elu_slope) if on_triton(x) else F.elu(x)


def gelu(x):
    """GELU in its tanh form, GPT-2's. Hendrycks & Gimpel (2016)."""
    return Map.apply(x, _gelu, _gelu_slope) if on_triton(x) else F.gelu(x, approximate="tanh")


# --------------------------------------------------------------------------------------------------------- layer norm
#
# Over each row, mean = mean(x), rstd = 1 / sqrt(mean((x - mean)^2) + eps), xhat = (x - mean) rstd:
#
#     y = xhat w + b        dw = sum over rows of dy xhat        db = sum over rows of dy
#
# Each x also changes mean and rstd of its row. So from g = dy w go the mean, and through rstd the part along xhat:
#
#     dx = rstd (g - mean(g) - xhat mean(g xhat))
#
# Bytes: forward 2 passes of x, backward 3 (x, dy, dx). Backward's programs also write their shares of dw and db, and
# the caller reads them: 2 x programs x width numbers of float32, few beside x if there are many rows.

@triton.jit
def _layer_norm(x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, width, eps, BLOCK: tl.constexpr):
    """A row a program, all of it in registers: the mean, the squares and y come from one read."""
    row = this_program()
    column = tl.arange(0, BLOCK)
    mask = column < width
    offsets = row * width + column
    x = load_float32(x_ptr + offsets, mask)
    mean = tl.sum(x, 0) / width
    centred = tl.where(mask, x - mean, 0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    weight = load_float32(weight_ptr + column, mask)
    bias = load_float32(bias_ptr + column, mask)
    tl.store(y_ptr + offsets, centred * rstd * weight + bias, mask)


@triton.jit
def _layer_norm_backward(x_ptr, dy_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_ptr, rows, width,
                         BLOCK: tl.constexpr):
    """As many programs as run at once, each striding over the rows. Its share of dw and db stays in registers.

    partial (2, programs, width) takes the shares at the end. The caller adds them up, in the same order every time.
    """
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    mask = column < width
    weight = load_float32(weight_ptr + column, mask)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    for row in range(first, rows, programs):
        offsets = tl.cast(row, tl.int64) * width + column
        mean = tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
        dy = load_float32(dy_ptr + offsets, mask)
        x = load_float32(x_ptr + offsets, mask)
        xhat = tl.where(mask, (x - mean) * rstd, 0)
        g = dy * weight
        dx = rstd * (g - tl.sum(g, 0) / width - xhat * (tl.sum(g * xhat, 0) / width))
        tl.store(dx_ptr + offsets, dx, mask)
        dw += dy * xhat
        db += dy
    share_ptr = partial_ptr + first.to(tl.int64) * width + column
    tl.store(share_ptr, dw, mask)
    tl.store(share_ptr + programs.to(tl.int64) * width, db, mask)


class LayerNorm(torch.autograd.Function):
    """Normalizes each row of x. Keeps x and two numbers a row."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        x = x.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        y = torch.empty_like(x)
        mean, rstd = x.new_empty(2, rows, dtype=torch.float32)
        _layer_norm[(rows,)](x, weight.contiguous(), bias.contiguous(), y, mean, rstd, width, eps,
                             triton.next_power_of_2(width), num_warps=8)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        rows = len(mean)
        width = x.shape[-1]
        programs = min(rows, programs_at_once(x.device))
        dx = torch.empty_like(x)
        partial = x.new_empty(2, programs, width, dtype=torch.float32)
        _layer_norm_backward[(programs,)](x, dy.contiguous(), weight.contiguous(), mean, rstd, dx, partial, rows,
                                          width, triton.next_power_of_2(width), num_warps=8)
        dw, db = partial.sum(1).to(weight.dtype)
        return dx, dw, db, None


def layer_norm(x, weight, bias, eps=1e-5):
    """Layer norm of x (..., width), width to 65,536; weight and bias (width). Ba et al. (2016)."""
    if on_triton(x):
        return table[LayerNorm].apply(x, weight, bias, eps)
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
# In the end O = acc / l, and of S and P only L = m + ln l is kept: 4 bytes a row instead of 2 Tk.
#
# Backward, with O's gradient dO. O = P V gives dV and dP. Row by row P = softmax(S): if S_ij grows by a little e,
# P_ik grows by e P_ik ([j = k] - P_ij), so dS_ij = P_ij (dP_ij - sum_k P_ik dP_ik). S = Q K^T / sqrt(D) gives dQ, dK:
#
#     dV = P^T dO     dP = dO V^T     dS = P * (dP - delta)     dQ = dS K / sqrt(D)     dK = dS^T Q / sqrt(D)
#
# delta_i = sum_k P_ik dP_ik would need a pass over all keys. But dP_ik = dO_i . V_k and sum_k P_ik V_k = O_i, so
# delta_i = dO_i . O_i, which a row knows by itself. And with L any block of P comes back for one matmul, P = e^(S - L).
# So a block of rows i and keys j needs Q_i, dO_i, L_i, delta_i, K_j and V_j alone, and each kernel is a loop over them:
#
#     attention_backward_q_kernel     one program: rows i     loop over j, the keys that i sees     dQ_i += dS_ij K_j
#     attention_backward_kv_kernel    one program: keys j     loop over i, the rows that see j      dV_j += P_ij^T dO_i
#                                                                                                   dK_j += dS_ij^T Q_i
#
# further/by_hand.py has forward so in PyTorch: `attention_in_blocks`.
#
# Traffic: Q, K, V read once and O written once is 8 T D bytes a head in bf16; blocks of K and V come again for every
# block of rows, but from L2. FLOPs: 4 Tq Tk D a head forward, half that under a causal mask, whose blocks above the
# diagonal are never visited. That is T / 2 FLOPs a byte, or T / 4: on an H100, from about 1,050 tokens on, the tensor
# cores are the limit.
# Backward as written above is 5 matmuls to forward's 2. We do 7, because both kernels make S and dP. One kernel for all
# adds up dQ over programs in memory, in another order every run (`simple_attention_backward_kernel`, fast/hopper.py).
#
# Grouped queries: G heads of queries may share one head of keys and values. Head h then reads that of h // G, from the
# same place in memory, and dK, dV add up over the G heads. (Ainslie et al. 2023; GPT-2 has G = 1.)
#
# FlashAttention 1 and 2 (Dao 2022, 2023); Milakov and Gimelshein 2018 (online softmax); CS336 lecture 5, assignment 2.

def heads(qkv):
    """Views of qkv (B, T, G + 2, H/G, D), H heads of queries, then H/G of keys, then as many of values: q (B, H, T, D),
    k and v (B, H/G, T, D)."""
    if qkv.dim() != 5 or qkv.shape[2] < 3:
        raise ValueError(f"packed attention takes qkv (B, T, 3, H, D), or (B, T, G + 2, H/G, D), not "
                         f"{tuple(qkv.shape)}")
    k, v = qkv[:, :, -2:].permute(2, 0, 3, 1, 4)
    return qkv[:, :, :-2].flatten(2, 3).transpose(1, 2), k, v


def to_each_query(x, q):
    """k or v (B, H/G, Tk, D) as every head of q reads it, (B, H, Tk, D)."""
    group = q.shape[1] // x.shape[1]
    return x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2)


def attention_reference(q, k, v, is_causal, starts=None):
    """What the kernels compute, with S and P in memory: O like q, but float32 at least, and L (B, H, Tq), -inf where a
    row sees no key. Shapes as in FlashAttention. k and v may be some of the keys alone: ring attention merges the
    outputs of several such calls by their L. starts (B, Tq): the first key that each row sees; None: all rows see it
    from 0 on."""
    q, k, v = (at_least_float32(to_each_query(x, q)) for x in (q, k, v))
    D = q.shape[3]
    s = q @ k.transpose(2, 3) / math.sqrt(D)                                          # (B, H, Tq, Tk)
    if is_causal or starts is not None:
        s = s.masked_fill(~seen_keys(q, k, is_causal, starts), -math.inf)
    lse = s.logsumexp(3)                                                              # (B, H, Tq)
    return torch.exp(s - finite_or_inf(lse)) @ v, lse                                 # the exponentials are softmax(s)


def seen_keys(q, k, is_causal, starts):
    """Whether each row sees each key: bool, to be broadcast to (B, H, Tq, Tk)."""
    Tq = q.shape[2]
    Tk = k.shape[2]
    seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device)
    if is_causal:
        seen = seen.tril(Tk - Tq)
    if starts is not None:
        seen = seen & (starts[:, None, :, None] <= torch.arange(Tk, device=q.device))
    return seen


def attention_backward_reference(q, k, v, o, lse, do, is_causal, starts=None):
    """The five formulas above: dQ, dK, dV. k and v may be some of the keys alone; o and lse are then those of all.
    starts: as above."""
    shared = k.shape[1]
    k = to_each_query(k, q)
    v = to_each_query(v, q)
    q, k, v, o, lse, do = map(at_least_float32, (q, k, v, o, lse, do))
    scale = 1 / math.sqrt(q.shape[3])
    p = torch.exp(q @ k.transpose(2, 3) * scale - finite_or_inf(lse))                 # (B, H, Tq, Tk)
    if is_causal or starts is not None:
        p = p * seen_keys(q, k, is_causal, starts)
    delta = (do * o).sum(3, keepdim=True)                                             # (B, H, Tq, 1)
    ds = p * (do @ v.transpose(2, 3) - delta) * scale                                 # (B, H, Tq, Tk)
    of_keys = ds.transpose(2, 3) @ q, p.transpose(2, 3) @ do                          # of each head of queries
    return ds @ k, *(x.unflatten(1, (shared, -1)).sum(2) for x in of_keys)


def finite_or_inf(lse):
    """L as (B, H, Tq, 1), with +inf in place of -inf. A row that sees no key then has P = exp(S - inf) = 0, not NaN."""
    return lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(3)


def at_least_float32(x):
    return x.float() if x.dtype.itemsize == 2 else x


@triton.jit
def simple_attention_kernel(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, scale, T, D: tl.constexpr, BLOCK: tl.constexpr):
    """Causal O and L of BLOCK queries of one head. q, k, v, o: contiguous (heads, T, D); lse: L (heads, T)."""
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) * T * D + tl.arange(0, D)[None, :]       # (1, D): its first row
    rows = block * BLOCK + tl.arange(0, BLOCK)[:, None]                           # (BLOCK, 1)
    q = tl.load(q_ptr + head + rows * D, rows < T, 0)                             # (BLOCK, D)
    m = tl.full([BLOCK], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D], tl.float32)
    for n in range(block + 1):  # blocks of keys, up to the one on the diagonal: later ones no row sees
        keys = n * BLOCK + tl.arange(0, BLOCK)[:, None]                           # (BLOCK, 1)
        k = tl.load(k_ptr + head + keys * D, keys < T, 0)
        v = tl.load(v_ptr + head + keys * D, keys < T, 0)
        s = dot(q, k.T) * scale                                                   # (BLOCK, BLOCK)
        s = tl.where(keys.T <= rows, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)  # l and acc were computed with the old m
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + dot(p.to(v.dtype), v)                        # (BLOCK, D)
        m = m_new
    tl.store(o_ptr + head + rows * D, acc / l[:, None], rows < T)
    tl.store(lse_ptr + tl.program_id(1) * T + rows, (m + tl.log(l))[:, None], rows < T)


@triton.jit
def simple_attention_backward_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, scale, T,
                                     D: tl.constexpr, BLOCK: tl.constexpr):
    """dK and dV of BLOCK keys of one head, and their terms of dQ. 5 matmuls a block. Programs add up dQ in memory, in
    another order every run, because each has a term of every later row's. lse, delta: (heads, T)."""
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64) * T
    columns = tl.arange(0, D)[None, :]
    keys = block * BLOCK + tl.arange(0, BLOCK)[:, None]                           # (BLOCK, 1)
    here = (head + keys) * D + columns                                            # (BLOCK, D)
    k = tl.load(k_ptr + here, keys < T, 0)
    v = tl.load(v_ptr + here, keys < T, 0)
    dk = tl.zeros([BLOCK, D], tl.float32)
    dv = tl.zeros([BLOCK, D], tl.float32)
    for n in range(block, tl.cdiv(T, BLOCK)):  # blocks of rows, from the diagonal down: earlier ones see no such key
        rows = n * BLOCK + tl.arange(0, BLOCK)[:, None]
        there = (head + rows) * D + columns
        q = tl.load(q_ptr + there, rows < T, 0)
        do = tl.load(do_ptr + there, rows < T, 0)
        lse = tl.load(lse_ptr + head + rows, rows < T, float("inf"))              # inf past the end: P is 0
        delta = tl.load(delta_ptr + head + rows, rows < T, 0)                     # (BLOCK, 1)
        p = tl.where(keys.T <= rows, tl.exp(dot(q, k.T) * scale - lse), 0.0)      # (BLOCK, BLOCK)
        ds = (p * (dot(do, v.T) - delta) * scale).to(q.dtype)
        dv += dot(p.to(do.dtype).T, do)
        dk += dot(ds.T, q)
        tl.atomic_add(dq_ptr + there, dot(ds, k), rows < T)
    tl.store(dk_ptr + here, dk, keys < T)
    tl.store(dv_ptr + here, dv, keys < T)


class SimpleAttention(torch.autograd.Function):
    """Causal attention of contiguous q, k, v (B, H, T, D): (B, H, T, D)."""

    @staticmethod
    def forward(ctx, q, k, v):
        B, H, T, D = q.shape
        o = torch.empty_like(q)
        lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
        simple_attention_kernel[triton.cdiv(T, 32), B * H](q, k, v, o, lse, 1 / math.sqrt(D), T, D, 32)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        B, H, T, D = q.shape
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        delta = (do.float() * o).sum(3)
        simple_attention_backward_kernel[triton.cdiv(T, 32), B * H](
            q, k, v, do.contiguous(), lse, delta, *grads, 1 / math.sqrt(D), T, D, 32)
        return tuple(grad.to(do.dtype) for grad in grads)


# What the model runs can do more: keys may be more or fewer than queries, heads of queries may share keys (G), a row
# may see its document alone (STARTS), and L is kept for backward. A row that sees no key has O = 0, and L = inf, so
# that P = exp(S - L) is 0. Tensors arrive as descriptors for TMA, Hopper's copy engine: one thread asks for a (1, 1,
# rows, D) tile, and TMA brings it to shared memory, from rows of any stride, with zeros past the last row, past which
# it stores nothing.

@triton.jit
def last_key(rows, Tq, Tk, CAUSAL: tl.constexpr):
    """The last key that each row sees, negative for none. Causal: the last row sees all, the one above all but one."""
    return tl.minimum(rows + (Tk - Tq), Tk - 1) if CAUSAL else rows * 0 + (Tk - 1)  # Tk - 1 for each row


@triton.jit
def first_key(STARTS, b, rows, Tq, Tk):
    """The first key that each row sees: where its document begins, as STARTS (B, Tq) says; 0 if there are none."""
    return rows * 0 if STARTS is None else tl.load(STARTS + b * Tq + rows, rows < Tq, Tk)


@triton.jit
def first_block(STARTS, first, BN: tl.constexpr):
    """The first key of the first block of BN keys in which any row sees a key."""
    return 0 if STARTS is None else tl.min(first, 0) // BN * BN


@triton.jit
def rows_end(STARTS, b, key, Tq, Tk):
    """One past the last row that sees this key or an earlier one. A document's rows are neighbours."""
    end = Tq
    if STARTS is not None:
        end = 0
        for first in range(0, Tq, 1024):
            end += tl.sum((first_key(STARTS, b, first + tl.arange(0, 1024), Tq, Tk) <= key).to(tl.int32), 0)
    return tl.minimum(end, Tq)


@triton.jit
def is_seen(keys, first, last, STARTS):
    """Whether each row sees each key, from its first to its last one."""
    return keys <= last if STARTS is None else (first <= keys) & (keys <= last)


@triton.jit
def first_row(b, h, H, Tq):
    """Where a head begins in LSE and DELTA (B*H, Tq)."""
    return (b * H + h).to(tl.int64) * Tq


@triton.jit
def load_rows(X, b, h, first):
    """The tile (rows, D) of X (B, H, T, D) that begins at row `first` of a head."""
    tile = X.load([b, h, first, 0])                                               # (1, 1, rows, D)
    return tile.reshape(tile.shape[2], tile.shape[3])


@triton.jit
def store_rows(X, b, h, first, tile):
    X.store([b, h, first, 0], tile.to(X.dtype).reshape(1, 1, tile.shape[0], tile.shape[1]))


@triton.jit
def attention_forward_kernel(Q, K, V, O, LSE, STARTS, scale, Tq, Tk, H, G, CAUSAL: tl.constexpr, D: tl.constexpr,
                             BM: tl.constexpr, BN: tl.constexpr):
    """O, and LSE, the L above, of BM queries of one head. 2 matmuls a block of BN keys. Q, K, V, O: TMA descriptors. G
    heads of queries share one of keys. A row without a key has LSE +inf, so that backward's exp(S - LSE) is 0. Blocks
    of keys before all of the rows' documents are skipped."""
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    m0 = tl.program_id(0) * BM
    rows = m0 + tl.arange(0, BM)
    first = first_key(STARTS, b, rows, Tq, Tk)
    last = last_key(rows, Tq, Tk, CAUSAL)
    q = load_rows(Q, b, h, m0)
    m = tl.full([BM], -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for n0 in range(first_block(STARTS, first, BN), last_key(m0 + BM - 1, Tq, Tk, CAUSAL) + 1, BN):
        k = load_rows(K, b, h // G, n0)
        v = load_rows(V, b, h // G, n0)
        s = dot(q, k.T) * scale                                                   # (BM, BN)
        keys = n0 + tl.arange(0, BN)[None, :]
        s = tl.where(is_seen(keys, first[:, None], last[:, None], STARTS), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        top = tl.where(m_new == -float("inf"), 0.0, m_new)       # a row that has seen no key: -inf - -inf would be NaN
        p = tl.exp(s - top[:, None])
        alpha = tl.exp(m - top)                                  # online: l and acc were computed with the old m
        acc = dot(p.to(v.dtype), v, acc * alpha[:, None])
        l = l * alpha + tl.sum(p, 1)
        m = m_new
    some = l > 0                                                 # not of a row without a key (Tq > Tk): its O is 0
    l = tl.where(some, l, 1.0)
    store_rows(O, b, h, m0, acc / l[:, None])
    tl.store(LSE + first_row(b, h, H, Tq) + rows, tl.where(some, m + tl.log(l), float("inf")), rows < Tq)


@triton.jit
def attention_backward_q_kernel(Q, K, V, O, DO, LSE, DELTA, DQ, STARTS, scale, Tq, Tk, H, G, CAUSAL: tl.constexpr,
                                D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """dQ of BM rows of one head, and their delta for the kernel below. 3 matmuls a block."""
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    m0 = tl.program_id(0) * BM
    rows = m0 + tl.arange(0, BM)
    first = first_key(STARTS, b, rows, Tq, Tk)
    last = last_key(rows, Tq, Tk, CAUSAL)
    q = load_rows(Q, b, h, m0)
    do = load_rows(DO, b, h, m0)
    o = load_rows(O, b, h, m0)
    lse = tl.load(LSE + first_row(b, h, H, Tq) + rows, rows < Tq, float("inf"))                # (BM,)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(DELTA + first_row(b, h, H, Tq) + rows, delta, rows < Tq)
    dq = tl.zeros([BM, D], tl.float32)
    for n0 in range(first_block(STARTS, first, BN), last_key(m0 + BM - 1, Tq, Tk, CAUSAL) + 1, BN):
        k = load_rows(K, b, h // G, n0)
        v = load_rows(V, b, h // G, n0)
        s = dot(q, k.T) * scale                                                   # (BM, BN)
        keys = n0 + tl.arange(0, BN)[None, :]
        p = tl.where(is_seen(keys, first[:, None], last[:, None], STARTS), tl.exp(s - lse[:, None]), 0.0)
        ds = p * (dot(do, v.T) - delta[:, None])       # without 1/sqrt(D), which comes last
        dq = dot(ds.to(k.dtype), k, dq)
    store_rows(DQ, b, h, m0, dq * scale)


@triton.jit
def attention_backward_kv_kernel(Q, K, V, DO, LSE, DELTA, DK, DV, STARTS, scale, Tq, Tk, H, G, CAUSAL: tl.constexpr,
                                 D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """dK and dV of BN keys of one head, summed over its G heads of queries. 4 matmuls a block, of S^T and dP^T, as dV
    and dK need them. (To read it first: with Tq = Tk and G = 1 `start` is n0 rounded down to BM, and `h` has one value.
    In the other kernel a program has BM rows of queries in place of BN keys.)"""
    b = tl.program_id(1) // (H // G)
    shared = tl.program_id(1) % (H // G)
    n0 = tl.program_id(0) * BN
    keys = n0 + tl.arange(0, BN)
    k = load_rows(K, b, shared, n0)
    v = load_rows(V, b, shared, n0)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    # Row i sees keys up to i + Tk - Tq, so rows before n0 + Tq - Tk see none of these. Nor do rows from `end` on.
    start = tl.maximum(n0 + Tq - Tk, 0) // BM * BM if CAUSAL else 0
    end = rows_end(STARTS, b, n0 + BN - 1, Tq, Tk)
    for h in range(shared * G, shared * G + G):
        for m0 in range(start, end, BM):
            rows = m0 + tl.arange(0, BM)
            q = load_rows(Q, b, h, m0)
            do = load_rows(DO, b, h, m0)
            lse = tl.load(LSE + first_row(b, h, H, Tq) + rows, rows < Tq, float("inf"))  # inf past the end: P is 0
            delta = tl.load(DELTA + first_row(b, h, H, Tq) + rows, rows < Tq, 0)
            s = dot(k, q.T) * scale                                               # (BN, BM)
            first = first_key(STARTS, b, rows, Tq, Tk)[None, :]
            last = last_key(rows, Tq, Tk, CAUSAL)[None, :]
            p = tl.where(is_seen(keys[:, None], first, last, STARTS), tl.exp(s - lse[None, :]), 0.0)
            dv = dot(p.to(do.dtype), do, dv)
            ds = p * (dot(v, do.T) - delta[None, :])
            dk = dot(ds.to(q.dtype), q, dk)
    store_rows(DK, b, shared, n0, dk * scale)
    store_rows(DV, b, shared, n0, dv)


HEAD_DIMS = (16, 32, 64, 128, 256)


def tiled(x, rows):
    """The TMA descriptor of x (B, H, T, D), for tiles (1, 1, rows, D). Dimensions of 1 get a stride that TMA takes."""
    strides = [s if n > 1 else 16 for n, s in zip(x.shape[:-1], x.stride())] + [1]
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, x.shape[3]])


def tile_rows(D):
    """Rows of a tile: 64, or fewer, for at most 4096 elements. Four float32 tiles are 64 KiB of shared memory."""
    return min(64, 4096 // D)


def aligned(x):
    """x if TMA can address it, else a contiguous copy. TMA needs gapless rows that start at multiples of 16 bytes."""
    strides = [s * x.itemsize for n, s in zip(x.shape[:-1], x.stride()) if n > 1]
    ok = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s % 16 == 0 and s > 0 for s in strides)
    return x if ok else x.contiguous()


def int32(starts):
    return starts if starts is None else starts.int().contiguous()


def attention_forward(q, k, v, is_causal, starts=None):
    """O (B, H, Tq, D), laid out in memory as (B, Tq, H, D), and LSE (B*H, Tq), float32. starts: (B, Tq) or None."""
    B, H, Tq, D = q.shape
    if D not in HEAD_DIMS:
        raise ValueError(f"head dim {D} (q {tuple(q.shape)}) is not one of {HEAD_DIMS}")
    rows = tile_rows(D)
    o = q.new_empty(B, Tq, H, D).transpose(1, 2)
    lse = q.new_empty(B * H, Tq, dtype=torch.float32)
    sizes = Tq, k.shape[2], H, H // k.shape[1], is_causal, D, rows, rows
    attention_forward_kernel[triton.cdiv(Tq, rows), B * H](
        *(tiled(x, rows) for x in (q, k, v, o)), lse, int32(starts), 1 / math.sqrt(D), *sizes, num_stages=1)
    return o, lse


def attention_backward(q, k, v, o, lse, do, is_causal, dq, dk, dv, starts=None):
    """Write the gradients into dq, dk, dv. The first kernel also writes delta, which the second one reads."""
    B, H, Tq, D = q.shape
    shared, Tk = k.shape[1:3]
    rows = tile_rows(D)
    delta = torch.empty_like(lse)
    sizes = int32(starts), 1 / math.sqrt(D), Tq, Tk, H, H // shared, is_causal, D, rows, rows
    q, k, v, o, do, dq, dk, dv = (tiled(x, rows) for x in (q, k, v, o, do.contiguous(), dq, dk, dv))
    attention_backward_q_kernel[triton.cdiv(Tq, rows), B * H](q, k, v, o, do, lse, delta, dq, *sizes, num_stages=1)
    attention_backward_kv_kernel[triton.cdiv(Tk, rows), B * shared](
        q, k, v, do, lse, delta, dk, dv, *sizes, num_stages=1)


class FlashAttention(torch.autograd.Function):
    """O = softmax(Q K^T / sqrt(D)) V: `FlashAttention.apply(q, k, v, is_causal, starts)`.

    q (B, H, Tq, D), k and v (B, H/G, Tk, D), bfloat16, float16 or float32, D a power of two from 16 to 256. Returns
    (B, H, Tq, D), in memory (B, Tq, H, D), so that heads are joined without a copy. Causal: row i sees keys
    j <= i + Tk - Tq; a row that sees none is zero. starts (B, Tq): the first key that each row sees, or None; from row
    to row they may not fall. Deterministic. Keeps q, k, v, O and one float32 a row. Raises ValueError for other shapes
    and dtypes. FlashAttention-2, algorithms 1, 2.
    """

    @staticmethod
    def forward(ctx, q, k, v, is_causal, starts=None):
        q, k, v = map(aligned, (q, k, v))
        o, lse = table[attention_forward](q, k, v, is_causal, starts)
        ctx.save_for_backward(q, k, v, o, lse, starts)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, o, lse, starts = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        table[attention_backward](q, k, v, o, lse, do, ctx.is_causal, *grads, starts)
        return *grads, None, None


def flash_takes(x):
    return on_triton(x) and (_choice == "triton" or x.shape[-1] in HEAD_DIMS)


def flash_attention(qkv, is_causal, starts):
    """FlashAttention of qkv, as `heads` takes it."""
    return FlashAttention.apply(*heads(qkv), is_causal, starts)


def attention(qkv, is_causal=True, starts=None):
    """softmax(q k^T / sqrt(D)) v of qkv (B, T, 3, H, D), as one linear layer makes it: (B, T, H, D). With grouped
    queries qkv is (B, T, G + 2, H/G, D), as `heads` takes it apart. starts (B, T): where each token's document begins,
    whose tokens alone it sees; further/packed.py makes them.

    "auto" leaves float32, in which PyTorch's is faster, and head dims that the kernels do not know to PyTorch; "triton"
    takes the one and raises for the other.
    """
    if flash_takes(qkv) and (qkv.dtype.itemsize == 2 or _choice == "triton"):
        return table[flash_attention](qkv, is_causal, starts).transpose(1, 2)                # (B, T, H, D)
    return library_attention(*heads(qkv), is_causal, starts).transpose(1, 2)                 # (B, T, H, D)


def library_attention(q, k, v, is_causal, starts=None):
    """PyTorch's own: q (B, H, Tq, D), k and v (B, H/G, Tk, D) -> (B, H, Tq, D). With starts the mask is in memory."""
    grouped = q.shape[1] != k.shape[1]
    mask = None if starts is None else seen_keys(q, k, is_causal, starts)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal and mask is None, enable_gqa=grouped)


# ------------------------------------------------------------------------------------------------------ cross-entropy
#
# Logits z (rows, V), one target t a row. With top = max(z), total = sum exp(z - top), p = softmax(z) = exp(z - top) /
# total:
#
#     loss = sum over rows of log(total) + top - z_t        dz = p - onehot(t)
#
# A row whose target is -1, or PyTorch's -100, does not count: it adds 0, and its dz is 0. The loss is a sum, not a
# mean, because only the caller knows how many targets count in the whole batch: a mean of parts' means would weigh
# short parts more.
#
# p needs only two numbers a row, so probabilities are never written. GPT-2 at 32 x 1024 tokens has 3.3 GB of logits in
# bf16: a float32 copy, its log-softmax and their gradients would be 20 GB more. Bytes: forward one pass, backward two.
#
# dz goes where z was. That is safe because nothing but this backward wants z: a product's backward needs its inputs,
# not its result. If something else saved z, or backward runs twice, autograd sees the raised version number and says
# so.

IGNORED = -1  # marks a target that does not count, for the kernels


def that_count(targets):
    """Which targets count: all but -1 and -100, which is PyTorch's."""
    return (targets != IGNORED) & (targets != -100)


def checked_targets(targets, vocab):
    """(targets, with -1 for each that does not count; a factor of the loss, 1).

    Another target outside of 0 .. vocab-1 is an IndexError on the CPU. On a GPU, for which the CPU does not wait, the
    factor is NaN, and so are the loss and its gradients. A training loop then skips the step."""
    counts = that_count(targets)
    wrong = counts & ((targets < 0) | (targets >= vocab))
    if not readable(targets):
        factor = torch.ones((), device=targets.device).masked_fill(wrong.any(), math.nan)
    elif wrong.any():
        raise IndexError(f"targets from {targets.min()} to {targets.max()}: of {vocab} logits they are 0 to "
                         f"{vocab - 1}, or -1 or -100, which do not count")
    else:
        factor = 1.0
    return targets.masked_fill(wrong, 0).masked_fill(~counts, IGNORED), factor  # a row at 0 has its gradient times NaN


@triton.jit
def _softmax_sums(z_ptr, target_ptr, top_ptr, total_ptr, picked_ptr, first, vocab, stride, BLOCK: tl.constexpr):
    """One row: a running maximum, and the sum of exponentials relative to it, rescaled when the maximum grows."""
    row = this_program()
    target = tl.load(target_ptr + row) - first
    z_ptr += row * stride
    top = -3.4e38  # not -inf: a block of logits that are all -inf would give -inf - -inf
    total = 0.0
    for start in tl.range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + column, column < vocab, -float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
        top = higher
    picked = tl.load(z_ptr + target, (target >= 0) & (target < vocab), 0)
    tl.store(top_ptr + row, top)
    tl.store(total_ptr + row, total)
    tl.store(picked_ptr + row, picked.to(tl.float32))


@triton.jit
def _softmax_minus_onehot(z_ptr, target_ptr, top_ptr, total_ptr, scale_ptr, scale_stride, first, vocab, stride,
                          BLOCK: tl.constexpr):
    row = this_program()
    target = tl.load(target_ptr + row)
    top = tl.load(top_ptr + row)
    factor = tl.load(scale_ptr + row * scale_stride, target >= 0, 0)  # 0 in a row that does not count
    share = factor / tl.load(total_ptr + row)
    z_ptr += row * stride
    for start in tl.range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + column, column < vocab, -float("inf")).to(tl.float32)
        onehot = tl.where(column == target - first, factor, 0.0)
        tl.store(z_ptr + column, tl.exp(z - top) * share - onehot, column < vocab)


def softmax_sums(z, targets, first=0):
    """(top, total, z_t) of each row of z (rows, V), float32, of float64 float64; rows may lie apart, targets may not.

    z may be a slice of the vocabulary, from logit `first` on: z_t is 0 where the target's logit is on another slice."""
    if not on_triton(z):
        z = at_least_float32(z)
        column, here = column_of(targets, first, z.shape[1])
        top = z.amax(-1).clamp(min=torch.finfo(z.dtype).min)  # a slice may have no logit above -inf
        picked = z.gather(1, column).squeeze(1).masked_fill(~here, 0)
        return top, (z - top.unsqueeze(-1)).exp().sum(-1), picked
    top, total, picked = torch.empty(3, len(z), dtype=torch.float32, device=z.device)
    _softmax_sums[(len(z),)](z, targets, top, total, picked, first, z.shape[1], z.stride(0), 4096, num_warps=4)
    return top, total, picked


def column_of(targets, first, width):
    """(each target's column (rows, 1) in logits first .. first + width - 1, whether it is there); where not, 0."""
    here = (first <= targets) & (targets < first + width)
    return ((targets - first) * here).unsqueeze(1), here


def loss_of_sums(top, total, picked, targets):
    """Of each row; 0 where the target does not count."""
    return (total.log() + (top - picked)).masked_fill(targets == IGNORED, 0)


def softmax_minus_onehot(z, targets, top, total, scale, first=0):
    """(exp(z - top) / total - onehot(t)) scale, for a scale of each row; 0 in rows that do not count. Our kernel writes
    it over z. first: as for softmax_sums."""
    if not on_triton(z):
        p = (z - top.unsqueeze(-1)).exp() / total.unsqueeze(-1)
        column, here = column_of(targets, first, z.shape[1])
        p.scatter_add_(1, column, -here.to(p.dtype).unsqueeze(1))
        return (p * (scale * (targets != IGNORED)).unsqueeze(1)).to(z.dtype)
    scale = scale.float()
    _softmax_minus_onehot[(len(z),)](z, targets, top, total, scale, scale.stride(0), first, z.shape[1], z.stride(0),
                                     4096, num_warps=4)
    torch.autograd.graph.increment_version(z)
    return z


class CrossEntropy(torch.autograd.Function):
    """Loss of each row of logits (rows, V). Keeps them and two numbers a row; backward writes its result over them."""

    @staticmethod
    def forward(ctx, z, targets):
        z = z if z.stride(-1) == 1 else z.contiguous()
        targets = targets.contiguous()
        top, total, picked = softmax_sums(z, targets)
        ctx.save_for_backward(z, targets, top, total)
        return loss_of_sums(top, total, picked, targets)

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):                                                                  # (rows)
        z, targets, top, total = ctx.saved_tensors
        return softmax_minus_onehot(z.detach(), targets, top, total, dloss), None


def row_losses(logits, targets):
    """Cross-entropy in nats, float32, of each row of logits (rows, V) and int64 targets (rows); 0 in a row whose target
    does not count. `checked_targets` says which do, and what a target outside of 0 .. V-1 does. Our kernel overwrites
    logits in backward."""
    targets, factor = checked_targets(targets, logits.shape[-1])
    if not on_triton(logits):
        return F.cross_entropy(at_least_float32(logits), targets, ignore_index=IGNORED, reduction="none") * factor
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"cross-entropy of logits {tuple(logits.shape)} and targets {tuple(targets.shape)}: "
                         f"needs (rows, V) and (rows)")
    return CrossEntropy.apply(logits, targets) * factor
