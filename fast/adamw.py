"""AdamW that writes 16-bit weights beside their masters.

Takes the place of torch.optim.AdamW where 16-bit layers have float32 masters on a GPU (fast/run.py). Without it a step
of GPT-2 124M takes 2.1 % longer on an H200, of XL 5.1 %.
"""

import torch

import kernels
import parallel
from kernels import this_program, tl, triton


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
    at = this_program() * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    d = tl.load(g + at, inside).to(tl.float32)
    if scale is not None:
        d *= tl.load(scale).to(tl.float32)
    m1 = tl.load(m + at, inside)
    v1 = tl.load(v + at, inside)
    p1 = tl.load(p + at, inside)
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
    {parameter: tensor of as many elements}; step() also writes the new values there, in the tensor's own dtype. step()
    raises ValueError for parameters that are not float32, contiguous and on a device that Triton serves.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):  # and no other options
        super().__init__(params, lr, betas, eps, weight_decay)
        self.scale = None
        self.copies = {}

    def clip_grad_norm_(self, parameters, max_norm, scale=1.0):
        """As parallel.py's, but it only computes a factor, by which the kernel multiplies gradients as it reads
        them."""
        norm = parallel.clip_grad_norm_(parameters, 0) / scale
        self.scale = (max_norm / (norm + 1e-6) if max_norm else torch.ones_like(norm)).clamp(max=1) / scale
        return norm

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            stepped = sorted((p for p in group["params"] if p.grad is not None), key=torch.Tensor.data_ptr)
            for run in self.runs_of(stepped):
                first = run[0]
                state = self.state[first]
                torch._foreach_add_([self.state[p]["step"] for p in run], 1)
                t = state["step"].item()
                n = sum(p.numel() for p in run)
                _adamw[(triton.cdiv(n, 1024),)](
                    first, first.grad, state["exp_avg"], state["exp_avg_sq"], self.copies.get(first), self.scale, n,
                    group["lr"], beta1, beta2, group["eps"], group["weight_decay"], 1 - beta1**t, 1 - beta2**t, 1024,
                    num_warps=4)
                torch.autograd.graph.increment_version(run)
        self.scale = None  # it holds for one step

    def runs_of(self, params):
        """Parameters, in the order of their addresses, in lists for one kernel each: their numbers, gradients, states
        and copies lie side by side."""
        runs = []
        end = None
        for p in params:
            able = kernels.on_triton(p) and p.dtype == torch.float32
            if not (able and p.is_contiguous() and p.grad.is_contiguous()):
                raise ValueError(f"AdamW's kernel takes contiguous float32 parameters on CUDA, not "
                                 f"{tuple(p.shape)} {p.dtype} on {p.device}")
            if not self.state[p]:
                self.make_states()
            state = self.state[p]
            parts = [part for part in (p, p.grad, state["exp_avg"], state["exp_avg_sq"], self.copies.get(p))
                     if part is not None]
            if [part.data_ptr() for part in parts] == end:
                runs[-1].append(p)
            else:
                runs.append([p])
            end = [part.data_ptr() + part.nbytes for part in parts]
        return runs

    def make_states(self):
        """Zero moments for parameters that have none, side by side in memory. To be called before a checkpoint's are
        copied there, too: moments that come alone lie alone, and then each parameter takes a kernel of its own."""
        for group in self.param_groups:
            new = sorted((p for p in group["params"] if not self.state[p]), key=torch.Tensor.data_ptr)
            if not new:
                continue
            sizes = [p.numel() for p in new]
            both = [torch.zeros(sum(sizes), device=new[0].device).split(sizes) for _ in range(2)]
            for p, *moments in zip(new, *both):
                m, v = (moment.view_as(p) for moment in moments)
                self.state[p].update(step=torch.zeros(()), exp_avg=m, exp_avg_sq=v)
