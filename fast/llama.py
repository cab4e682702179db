"""SwiGLU and rotary positions as kernels: each number is read once and written once.

Takes the place of further/llama.py's swiglu and rotary, which PyTorch computes in about four passes each.
"""

import torch
from torch.autograd.function import once_differentiable

from further.llama import rotary as plain_rotary
from further.llama import swiglu as plain_swiglu
from kernels import load_float32, on_triton, this_program, tl, triton


# --------------------------------------------------------------------------------------------------------------- SwiGLU
#
#     y = a s b        db = dy a s        da = dy b (s + a s (1 - s)),  s the sigmoid of a
#
# Elements moved: forward 3 n (a, b, y), backward 5 n (a, b, dy, da, db). Shazeer, "GLU Variants" (2020).

@triton.jit
def _swiglu(ab_ptr, dy_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """A part of a row a program: out = y (rows, width); with a dy, out = da, db (rows, 2 width)."""
    row = this_program()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    a = load_float32(ab_ptr + 2 * row * width + column, mask)
    b = load_float32(ab_ptr + 2 * row * width + width + column, mask)
    s = 1 / (1 + tl.exp(-a))
    if dy_ptr is None:
        tl.store(out_ptr + row * width + column, a * s * b, mask)
    else:
        dy = load_float32(dy_ptr + row * width + column, mask)
        tl.store(out_ptr + 2 * row * width + column, dy * b * (s + a * s * (1 - s)), mask)
        tl.store(out_ptr + 2 * row * width + width + column, dy * a * s, mask)


class GatedLayer(torch.autograd.Function):
    """a s b of ab (..., 2 width): (..., width). Keeps ab."""

    @staticmethod
    def forward(ctx, ab):
        ab = ab.contiguous()
        ctx.save_for_backward(ab)
        width = ab.shape[-1] // 2
        return launch_swiglu(ab, None, ab.new_empty(*ab.shape[:-1], width))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        [ab] = ctx.saved_tensors
        return launch_swiglu(ab, dy.contiguous(), torch.empty_like(ab))


def launch_swiglu(ab, dy, out):
    width = ab.shape[-1] // 2
    _swiglu[ab.numel() // (2 * width), triton.cdiv(width, 1024)](ab, dy, out, width, 1024)
    return out


def swiglu(ab):
    return GatedLayer.apply(ab) if on_triton(ab) else plain_swiglu(ab)


# ----------------------------------------------------------------------------------------------------- rotary positions

@triton.jit
def _rotate(x_ptr, y_ptr, cos_ptr, sin_ptr, T, turned, heads, half, sign, HEADS: tl.constexpr, HALF: tl.constexpr):
    """A token a program. Of its heads the first are turned, those of queries and keys; the others, values, copied."""
    token = this_program()
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None]
    angle = token % T * half + column
    cos = tl.load(cos_ptr + angle, column < half, 0)                                          # (1, HALF)
    sin = tl.load(sin_ptr + angle, column < half, 0) * sign
    offsets = (token * heads + head) * 2 * half + column                                      # (HEADS, HALF)
    mask = (head < heads) & (column < half)
    a = load_float32(x_ptr + offsets, mask)
    b = load_float32(x_ptr + offsets + half, mask)
    tl.store(y_ptr + offsets, tl.where(head < turned, a * cos - b * sin, a), mask)
    tl.store(y_ptr + offsets + half, tl.where(head < turned, b * cos + a * sin, b), mask)


class Rotation(torch.autograd.Function):
    """`rotary`, by the kernel. Keeps cos and sin."""

    @staticmethod
    def forward(ctx, qkv, cos, sin, sign):
        ctx.save_for_backward(cos, sin)
        ctx.sign = sign
        qkv = qkv.contiguous()
        B, T, parts, shared, D = qkv.shape
        heads = parts * shared
        y = torch.empty_like(qkv)
        _rotate[(B * T,)](qkv, y, cos, sin, T, heads - shared, heads, D // 2, sign, triton.next_power_of_2(heads),
                          triton.next_power_of_2(D // 2))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return Rotation.apply(dy, *ctx.saved_tensors, -ctx.sign), None, None, None


def rotary(qkv, cos, sin):
    return Rotation.apply(qkv, cos, sin, 1.0) if on_triton(qkv) else plain_rotary(qkv, cos, sin)
