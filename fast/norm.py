"""Layer norm, or RMSNorm, and the addition before it, in one pass, and a block that uses it.

In place of kernels.LayerNorm, of further/llama.py's rms_norm and of model.Block. Without it a step of GPT-2
124M takes 10 % longer on an H200, of XL 3.0 %.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

import kernels
from fast.linear import sum_parts
from kernels import layer_norm, load_float32, programs_at_once, this_program, tl, triton


# --------------------------------------------------------------------------------------------------------- layer norm
#
# A norm and the residual stream's addition before it are both bound by memory. One kernel that does both makes 4 passes
# over memory forward; separate kernels make 5. Backward it adds the stream's gradient, too: 4 passes instead of 6.
# Without a bias the norm is an RMSNorm, which subtracts no mean.

@triton.jit
def _add_layer_norm(x, residual, weight, bias, total, y, mean, rstd, width, eps, BLOCK: tl.constexpr):
    """A row a program. The whole row stays in registers, so the mean, the variance and y need one read of it."""
    row = this_program()
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    v = load_float32(x + at, inside)
    if residual is not None:
        v = (v + load_float32(residual + at, inside)).to(total.dtype.element_ty)
        tl.store(total + at, v, inside)
        v = v.to(tl.float32)  # normalise the rounded sum that was stored, because backward reads that
    if bias is not None:
        m = tl.sum(v, 0) / width
        v = tl.where(inside, v - m, 0)
        tl.store(mean + row, m)
    k = 1 / tl.sqrt(tl.sum(v * v, 0) / width + eps)
    tl.store(rstd + row, k)
    v *= k * load_float32(weight + column, inside)
    if bias is not None:
        v += load_float32(bias + column, inside)
    tl.store(y + at, v, inside)


@triton.jit
def _add_layer_norm_backward(x, dy, dtotal, weight, mean, rstd, dx, partial, rows, width,
                             BLOCK: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr):
    """As many programs as run at once share the rows. Each keeps its part of dw and db in registers.

    The parts go into partial (2, programs, width), of an RMSNorm (1, programs, width), and the caller adds them up in a
    fixed order, so every run has the same result. If dw and db of a row do not fit in registers, SLICES programs share
    the row. Each needs sums over the whole row and reads all of it, mostly from L2, but computes dx, dw and db of its
    own columns alone.
    """
    first = tl.program_id(0) // SLICES
    own = tl.program_id(0) % SLICES
    programs = tl.num_programs(0) // SLICES
    column = own * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    w = load_float32(weight + column, inside)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(first, rows, programs, num_stages=STAGES):
        start = tl.cast(row, tl.int64) * width
        m = 0.0
        k = tl.load(rstd + row)
        if mean is not None:
            m = tl.load(mean + row)
        d = load_float32(dy + start + column, inside)
        xhat = tl.where(inside, (load_float32(x + start + column, inside) - m) * k, 0)
        g = d * w
        sum_g = g
        sum_gx = g * xhat
        for other in tl.static_range(1, SLICES):
            c = (own + other) % SLICES * BLOCK + tl.arange(0, BLOCK)
            gc = load_float32(dy + start + c, c < width) * load_float32(weight + c, c < width)
            sum_g += gc
            sum_gx += gc * (load_float32(x + start + c, c < width) - m) * k
        dv = g - xhat * (tl.sum(sum_gx, 0) / width)
        if mean is not None:
            dv -= tl.sum(sum_g, 0) / width
            db += d
        dv *= k
        if dtotal is not None:  # of x as the residual stream, which another kernel would else add
            dv += load_float32(dtotal + start + column, inside)
        tl.store(dx + start + column, dv, inside)
        dw += d * xhat
    at = partial + first.to(tl.int64) * width + column
    tl.store(at, dw, inside)
    if mean is not None:
        tl.store(at + programs.to(tl.int64) * width, db, inside)


class AddLayerNorm(torch.autograd.Function):
    """(x + residual, its norm). Keeps the sum and two numbers a row, of an RMSNorm (no bias) one."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps):
        shape = x.shape
        width = shape[-1]
        x = x.contiguous()
        if not 1 <= width <= 65536 or any(p is not None and p.shape != (width,) for p in (weight, bias)):
            raise ValueError(f"layer norm of {tuple(shape)} with weight {tuple(weight.shape)} and bias "
                             f"{tuple(() if bias is None else bias.shape)}: all three must have the same width, 1 to "
                             f"65536, because a row has to fit in a multiprocessor's registers")
        total = x
        rows = x.numel() // width
        block = triton.next_power_of_2(width)
        if residual is not None:
            if residual.shape != shape or residual.dtype != x.dtype:
                raise ValueError(f"layer norm of {tuple(shape)} {x.dtype} plus {tuple(residual.shape)} "
                                 f"{residual.dtype}: their shapes and dtypes must be equal")
            total = torch.empty_like(x)
            residual = residual.contiguous()
        y = torch.empty_like(x)
        rstd = x.new_empty(rows, dtype=torch.float32)
        bias, mean = (bias, None) if bias is None else (bias.contiguous(), torch.empty_like(rstd))
        # One warp for 1024 columns, from 8192 columns on for 2048. At widths 768, 1600, 4096, 8192, 16384 this moves
        # 3.93, 3.95, 3.91, 3.94, 3.77 TB/s. Half or twice as many warps lose up to 8 %, 32 warps for 16384 columns
        # 38 %.
        warps = max(1, block // (1024 if block < 8192 else 2048))
        _add_layer_norm[(rows,)](x, residual, weight.contiguous(), bias, total, y, mean, rstd, width, eps, block,
                                 num_warps=warps)
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.add = residual is not None
        ctx.set_materialize_grads(False)
        return total if ctx.add else total.view_as(total), y

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal, dy):
        """dtotal, dy: gradients from the residual stream and from the norm, or None where there is none."""
        x, weight, mean, rstd = ctx.saved_tensors
        width = x.shape[-1]
        rows = len(rstd)
        dy = torch.zeros_like(x) if dy is None else dy.contiguous()
        dtotal = dtotal if dtotal is None else dtotal.contiguous()
        # A program takes up to 8192 columns, whose dw and db fill a quarter of the registers, with one warp for 1024.
        # Up to 8 programs of narrower rows, 8192 columns, share a multiprocessor. Two rows are loaded while one is
        # computed, if shared memory has room for them and 8 KiB more. TB/s at the widths above: 3.86, 3.73, 3.81, 3.84,
        # 3.21. With only one row loaded ahead, width 768 has 3.0.
        block = min(triton.next_power_of_2(width), 8192)
        slices = triton.cdiv(width, block)
        row_bytes = block * (x.itemsize * (2 * slices + (dtotal is not None)) + weight.itemsize * (slices - 1))
        room = torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin if x.is_cuda else 2**16
        ahead = min(2, (room - 8192) // row_bytes)
        programs = min(rows, programs_at_once(x.device) * min(8, 8192 // block))
        dx = torch.empty_like(x)
        partial = x.new_empty(1 if mean is None else 2, programs, width, dtype=torch.float32)
        _add_layer_norm_backward[(programs * slices,)](
            x, dy, dtotal, weight.contiguous(), mean, rstd, dx, partial, rows, width, block, slices, 1 + ahead,
            num_warps=max(1, block // 1024))
        dw, *db = sum_parts(partial, weight.dtype)
        return dx, dx if ctx.add else None, dw, db[0] if db else None, None


class TunedLayerNorm:
    """LayerNorm by AddLayerNorm, with nothing to add."""

    @staticmethod
    def apply(x, weight, bias, eps):
        return AddLayerNorm.apply(x, None, weight, bias, eps)[1]


def tuned_rms_norm(x, weight, eps):
    """rms_norm, likewise."""
    if kernels.on_triton(x):
        return AddLayerNorm.apply(x, None, weight, None, eps)[1]
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def add_layer_norm(x, residual, weight, bias, eps=1e-5):
    """(x + residual, layer norm of it, or without a bias RMSNorm), x and residual (..., width), width to 65,536.

    The residual stream goes on as the first result. residual None: (x, norm of x), whose uses share one backward.
    """
    if kernels.on_triton(x):
        return AddLayerNorm.apply(x, residual, weight, bias, eps)
    return add_and_norm(x, residual, weight, bias, eps)


def add_and_norm(x, residual, weight, bias, eps=1e-5):
    """add_layer_norm without its kernel."""
    x = x if residual is None else x + residual
    return x, F.rms_norm(x, x.shape[-1:], weight, eps) if bias is None else layer_norm(x, weight, bias, eps)
