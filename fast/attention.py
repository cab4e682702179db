"""Flash attention tuned for Hopper: TMA, warps with one task each, packed q, k and v.

In place of kernels.py's flash attention, forward and backward. With fast/hopper.py, head dim 128, T = 16,384,
forward reaches 714 TFLOP/s on an H200 (cuDNN 632), backward 624 (597).
"""

import math

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from fast.hopper import (
    one_pass_backward, one_pass_takes, specialized_attention_forward, specialized_takes, tiled_rows)
from kernels import (
    aligned, attention_backward, attention_backward_reference, attention_forward, attention_reference, dot, DTYPES,
    finite_or_inf, flash_takes, heads, last_key, load_rows, store_rows, tiled, tl, triton)


# ---------------------------------------------------------------------------------------------------------- attention
#
# The kernels of kernels.py spend time on exponentials in base e, and on masks where nothing is masked. Here `scale` has
# a factor log2(e), because the hardware's exponential is 2^x; so LSE is in base 2. In backward, static_range compiles
# each loop over blocks twice: without a mask for blocks that all rows see whole, with one for blocks on the diagonal or
# at an edge. fast/hopper.py takes what it can of all this.

@triton.jit
def tuned_backward_q_kernel(Q, K, V, O, DO, LSE, DELTA, DQ, T_pad, scale2, scale, Tq, Tk, H, G, CAUSAL: tl.constexpr,
                            D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """dQ of BM rows of one head, and their delta for the kernel below. 3 matmuls a block."""
    bh = tl.program_id(1)
    b = bh // H
    h = bh % H
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    rows = m0 + tl.arange(0, BM)
    last = last_key(rows, Tq, Tk, CAUSAL)
    full = tl.maximum(last_key(m0, Tq, Tk, CAUSAL) + 1, 0) // BN * BN            # all of these rows see keys [0, full),
    end = last_key(m0 + BM - 1, Tq, Tk, CAUSAL) + 1                              # none sees keys from `end` on
    q = load_rows(Q, b, h, m0)
    do = load_rows(DO, b, h, m0)
    o = load_rows(O, b, h, m0)
    lse = tl.load(LSE + bh.to(tl.int64) * T_pad + rows)                           # (BM,)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(DELTA + bh.to(tl.int64) * T_pad + rows, delta)
    dq = tl.zeros([BM, D], tl.float32)
    for MASK in tl.static_range(2):
        for n0 in range(full if MASK else 0, end if MASK else full, BN):
            k = load_rows(K, b, h // G, n0)
            v = load_rows(V, b, h // G, n0)
            s = dot(q, k.T)                                                    # (BM, BN)
            dp = dot(do, v.T)
            p = tl.exp2(s * scale2 - lse[:, None])
            if MASK:
                p = tl.where(n0 + tl.arange(0, BN)[None, :] <= last[:, None], p, 0.0)
            ds = p * (dp - delta[:, None])
            dq = dot(ds.to(k.dtype), k, dq)
    store_rows(DQ, b, h, m0, dq * scale)


@triton.jit
def tuned_backward_kv_kernel(Q, K, V, DO, LSE, DELTA, DK, DV, scale2, scale, Tq, Tk, H, G, CAUSAL: tl.constexpr,
                             D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """dK and dV of BN keys of one head, summed over its G heads of queries. 4 matmuls a block, of S^T and dP^T, as dV
    and dK need them."""
    b = tl.program_id(1) // (H // G)
    shared = tl.program_id(1) % (H // G)
    n0 = tl.program_id(0) * BN
    cols = n0 + tl.arange(0, BN)
    start = tl.maximum(n0 + Tq - Tk, 0) // BM * BM if CAUSAL else 0               # no row before this sees these keys
    full = tl.maximum(n0 + BN - 1 + Tq - Tk, 0) if CAUSAL else 0                  # each row from here on sees them all
    full = tl.minimum(tl.cdiv(full, BM) * BM, Tq) if n0 + BN <= Tk else Tq        # (no row, if some keys are past Tk)
    k = load_rows(K, b, shared, n0)
    v = load_rows(V, b, shared, n0)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, D], tl.float32)
    for h in range(shared * G, shared * G + G):
        for FREE in tl.static_range(2):
            for m0 in range(full if FREE else start, Tq if FREE else full, BM):
                q = load_rows(Q, b, h, m0)
                do = load_rows(DO, b, h, m0)
                lse = LSE.load([b * H + h, m0]).reshape(BM)                       # inf past the last row: P is 0 there
                delta = DELTA.load([b * H + h, m0]).reshape(BM)
                s = dot(k, q.T)                                                   # (BN, BM)
                p = tl.exp2(s * scale2 - lse[None, :])
                if not FREE:
                    last = last_key(m0 + tl.arange(0, BM), Tq, Tk, CAUSAL)
                    p = tl.where(cols[:, None] <= last[None, :], p, 0.0)
                dp = dot(v, do.T)
                dv = dot(p.to(do.dtype), do, dv)
                ds = p * (dp - delta[None, :])
                dk = dot(ds.to(q.dtype), q, dk)
    store_rows(DK, b, shared, n0, dk * scale)
    store_rows(DV, b, shared, n0, dv)


# (BM, BN, warps, stages) by head dim; head dims up to 64 share an entry. Beside each stand its TFLOP/s, causal / not
# causal, then those of other choices: on an H200, bf16, T = 4096, C = 2048, counting only matmuls that are computed,
# in short runs (a warm GPU reaches 10 to 15 % less).
# Two or three small programs on a multiprocessor often beat a large one: a program's softmax waits for S, and meanwhile
# another program can use the tensor cores.
ATTENTION_TILES = {
    "dq": {64: (128, 64, 8, 3),          # 579 / 655   (64, 64, 4, 3) 577 / 590   (128, 64, 8, 2) 473 / 506
           128: (128, 64, 8, 3),         # 563 / 641   (64, 64, 4, 2) 525 / 573   (128, 32, 8, 3) 450 / 627
           256: (64, 32, 4, 2)},
    "dkv": {64: (64, 64, 4, 3),          # 533 / 582   (64, 64, 4, 2) 496 / 484   (64, 128, 8, 2) 362 / 381
            128: (64, 64, 4, 2),         # 625 / 656   (32, 64, 4, 3) 554 / 567   (64, 128, 8, 2) 512 / 541
            256: (32, 64, 8, 2)},
}
# float32 runs on kernels.py's own kernels. There products are plain, without tensor cores, so tiles matter little; and
# LSE stays in base e, because its rounding once more, to base 2, is 5 % of a gradient's error. As three TF32 products
# each, at head dim 64 they took a sixth of the time, but gradients were 1.1 (D = 64) to 1.25 times (128) as far off as
# PyTorch's. So the model leaves float32 to PyTorch; rings, and who asks for Triton, come here.


def backward_settings(name, q, k, is_causal):
    """(BM, BN, the last arguments, the options of a launch) of a kernel of ATTENTION_TILES."""
    _, H, Tq, D = q.shape
    scale = 1 / math.sqrt(D)
    BM, BN, warps, stages = ATTENTION_TILES[name][max(D, 64)]
    last = scale * math.log2(math.e), scale, Tq, k.shape[2], H, H // k.shape[1], is_causal, D, BM, BN
    return BM, BN, last, {"num_warps": warps, "num_stages": stages}


def natural(q, starts):
    """Whether the kernels of kernels.py run alone, whose LSE is in base e: others know no documents, and no float32."""
    return q.dtype == torch.float32 or starts is not None


def tuned_attention_forward(q, k, v, is_causal, starts=None):
    """O (B, H, Tq, D), laid out in memory as (B, Tq, H, D), and LSE (B*H, Tq rounded up to 128), float32, base 2; where
    it is `natural`, as `attention_forward` returns it."""
    check_attention(q, k, v)
    if starts is None and specialized_takes(q, k, is_causal):
        return specialized_attention_forward(q, k, v, is_causal)
    o, lse = attention_forward(q, k, v, is_causal, starts)
    return o, lse if natural(q, starts) else padded(lse * math.log2(math.e))


def padded(lse):
    """lse (B*H, T) with +inf up to a multiple of 128 rows: what the tuned kernels read."""
    return F.pad(lse, (0, -lse.shape[1] % 128), value=math.inf)


def tuned_attention_backward(q, k, v, o, lse, do, is_causal, dq, dk, dv, starts=None):
    """Write the gradients into dq, dk, dv, whose strides TMA must be able to address, as `aligned` says."""
    if natural(q, starts):
        return attention_backward(q, k, v, o, lse, do, is_causal, dq, dk, dv, starts)
    do = aligned(do)
    if one_pass_takes(q, k, is_causal):
        return one_pass_backward(q, k, v, o, lse, do, dq, dk, dv)
    delta = torch.empty_like(lse)
    tuned_backward_q(q, k, v, o, lse, delta, do, is_causal, dq)
    tuned_backward_kv(q, k, v, lse, delta, do, is_causal, dk, dv)


def tuned_backward_q(q, k, v, o, lse, delta, do, is_causal, dq):
    """Write dq, and delta, which `tuned_backward_kv` reads. delta has lse's strides."""
    BM, BN, last, options = backward_settings("dq", q, k, is_causal)
    tuned_backward_q_kernel[lse.shape[1] // BM, len(lse)](
        tiled(q, BM), tiled(k, BN), tiled(v, BN), tiled(o, BM), tiled(do, BM), lse, delta, tiled(dq, BM), lse.stride(0),
        *last, **options)


def tuned_backward_kv(q, k, v, lse, delta, do, is_causal, dk, dv):
    BM, BN, last, options = backward_settings("dkv", q, k, is_causal)
    tuned_backward_kv_kernel[triton.cdiv(k.shape[2], BN), len(k) * k.shape[1]](
        tiled(q, BM), tiled(k, BN), tiled(v, BN), tiled(do, BM), tiled_rows(lse, BM), tiled_rows(delta, BM),
        tiled(dk, BN), tiled(dv, BN), *last, **options)


def check_attention(q, k, v):
    if (q.dim() != 4 or k.shape != v.shape or k.dim() != 4 or len(q) != len(k) or q.shape[3] != k.shape[3]
            or not q.numel() or not k.numel() or q.shape[1] % k.shape[1] or q.dtype not in DTYPES
            or not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device):
        raise ValueError(f"attention takes q (B, H, Tq, D), k and v (B, H/G, Tk, D), in bfloat16, float16 or float32, "
                         f"all on one device, none empty, not q {tuple(q.shape)} {q.dtype} on {q.device}, k "
                         f"{tuple(k.shape)} {k.dtype} on {k.device}, v {tuple(v.shape)} {v.dtype} on {v.device}")
    if q.shape[0] * q.shape[1] > 65535:
        raise ValueError(f"B * H is {q.shape[0] * q.shape[1]} (q {tuple(q.shape)}), a launch takes 65535: split the "
                         f"batch")


class PackedAttention(torch.autograd.Function):
    """FlashAttention of qkv, as kernels.heads takes it apart. The kernels write its gradient as one tensor, too."""

    @staticmethod
    def forward(ctx, qkv, is_causal, starts):
        qkv = aligned(qkv)
        ctx.is_causal = is_causal
        o, lse = tuned_attention_forward(*heads(qkv), is_causal, starts)
        ctx.save_for_backward(qkv, o, lse, starts)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        qkv, o, lse, starts = ctx.saved_tensors
        grad = torch.empty_like(qkv)
        tuned_attention_backward(*heads(qkv), o, lse, do, ctx.is_causal, *heads(grad), starts)
        return grad, None, None


# What ring attention computes in place of the two references. O has q's dtype here. The kernels' LSE is +inf where a
# row sees no key; that of the tuned ones is in base 2, and padded to a multiple of 128 rows. It is converted from and
# to L.

def attention_block(q, k, v, is_causal, starts=None):
    if not flash_takes(q):
        return attention_reference(q, k, v, is_causal, starts)
    o, lse = tuned_attention_forward(*map(aligned, (q, k, v)), is_causal, starts)
    lse = lse[:, :q.shape[2]].reshape(q.shape[:3]) * (1 if natural(q, starts) else math.log(2))
    return o, lse.masked_fill(lse == math.inf, -math.inf)


def attention_block_backward(q, k, v, o, lse, do, is_causal, starts=None):
    if not flash_takes(q):
        return attention_backward_reference(q, k, v, o, lse, do, is_causal, starts)
    q, k, v, o, do = map(aligned, (q, k, v, o, do))
    lse = finite_or_inf(lse).flatten(0, 1).squeeze(2).float()
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    lse = lse.contiguous() if natural(q, starts) else padded(lse / math.log(2))
    tuned_attention_backward(q, k, v, o, lse, do, is_causal, *grads, starts)
    return grads
