"""Backward by hand: activations and layer norm in PyTorch's operations, and their derivatives without autograd.

The math stands in kernels.py, at the heads of "activations" and "layer norm". Its kernels compute the same in one pass.

    python -m lessons kernels    errors against float64
"""

import math

import torch


def elu_reference(x):
    return torch.where(x > 0, x, x.exp() - 1)


def elu_backward_reference(x, dy):
    return torch.where(x > 0, dy, dy * x.exp())


def gelu_reference(x):
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def gelu_backward_reference(x, dy):
    s = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return dy * (s + x * s * (1 - s) * 2 * math.sqrt(2 / math.pi) * (1 + 0.134145 * x**2))


def layer_norm_reference(x, weight, bias, eps):
    """(y, mean, rstd), mean and rstd (rows, 1)."""
    mean = x.mean(-1, keepdim=True)
    rstd = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x - mean) * rstd * weight + bias, mean, rstd


def layer_norm_backward_reference(x, dy, weight, mean, rstd):
    """(dx, dw, db)."""
    xhat = (x - mean) * rstd
    g = dy * weight
    dx = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    return dx, (dy * xhat).flatten(0, -2).sum(0), dy.flatten(0, -2).sum(0)
