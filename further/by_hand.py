"""By hand: activations and layer norm in PyTorch's operations, and their derivatives without autograd; flash attention.

The math stands in kernels.py, at the heads of "activations", "layer norm" and "attention". Its kernels compute the
same: activations and layer norm in one pass, attention in the same loop over blocks. (kernels.py has attention's
derivative by hand, too: `attention_backward_reference`, of whole matrices, and of blocks a simple kernel.)

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


def attention_in_blocks(q, k, v, size):
    """Causal attention of one head, q, k, v (T, D): O (T, D) and L (T). `simple_attention_kernel` has the same loop."""
    o, lse = torch.empty_like(q), q.new_empty(len(q))
    for rows in torch.arange(len(q)).split(size):                # one program each
        m = q.new_full((len(rows),), -math.inf)                  # the largest score so far, of each row
        l = torch.zeros_like(m)                                  # the sum of exp(score - m)
        acc = torch.zeros_like(q[rows])                          # the sum of exp(score - m) V
        for keys in torch.arange(rows[-1] + 1).split(size):      # later keys no row sees
            s = q[rows] @ k[keys].T / math.sqrt(q.shape[1])
            s = s.masked_fill(keys > rows[:, None], -math.inf)   # which the row does not see
            m_new = torch.maximum(m, s.amax(1))
            p = torch.exp(s - m_new[:, None])
            alpha = torch.exp(m - m_new)                         # l and acc were computed with the old m
            l = l * alpha + p.sum(1)
            acc = acc * alpha[:, None] + p @ v[keys]
            m = m_new
        o[rows] = acc / l[:, None]
        lse[rows] = m + l.log()
    return o, lse
