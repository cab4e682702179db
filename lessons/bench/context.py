"""Attention to a sequence that is spread over ranks: ring and Ulysses, beside PyTorch's context_parallel.

    python bench.py context --gpus 2
"""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel, SDPBackend

import kernels
from fast.edition import Fast
from further.context import in_a_ring
from further.ulysses import ulysses_attention
from lessons.bench.peers import world_mesh
from lessons.bench.rates import both_ways, replays_of
from lessons.bench.timing import interleaved, Table, write_json

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FLASH": SDPBackend.FLASH_ATTENTION}


def context(a, device):
    """Causal attention, forward and backward, to one sequence. A rank has its tokens of it, as --cp gives them. On GPUs
    ours is replayed from CUDA graphs, as training has it."""
    cuda = device.type == "cuda" and not a.quick
    heads = 16
    width, dtype = (128, torch.bfloat16) if cuda else (16, torch.float32)
    table = Table(f"{a.gpus} processes; causal attention of {heads} heads of {width} to one sequence, {dtype}, forward "
                  "and backward\nthe Nth: of one GPU's time for all of it", {
        "tokens": "tokens:>7,", "way": "way:<12", "who": "who:<31", "ms": "ms:>9.2f",
        "tflops": "TFLOP/s GPU:>11.1f"}, device)

    def measure(tokens, way, who, step):
        seconds = interleaved({"": step}, device, a.repeats, 3)[""] / (a.gpus if way == "the Nth" else 1)
        flops = 7 * tokens**2 * heads * width / a.gpus
        table.row(tokens=tokens, way=way, who=who, ms=1e3 * seconds, tflops=flops / seconds / 1e12)

    for tokens in (16384, 65536) if cuda else (512,):
        whole, part = (torch.randn(1, t, 3, heads, width, device=device, dtype=dtype, requires_grad=True)
                       for t in (tokens, tokens // a.gpus))
        steps = {"ring": both_ways(functools.partial(in_a_ring, group=None, ring=Fast.context["ring"]),
                                   part),
                 "ulysses": both_ways(functools.partial(ulysses_attention, group=None), part),
                 "the Nth": both_ways(kernels.attention, whole)}
        for way, step in replays_of(steps, device).items():
            measure(tokens, way, "ours", step)
        for name in BACKENDS if cuda else ():  # they take no float32
            few, many = ([x.detach().transpose(1, 2).contiguous().requires_grad_() for x in qkv.unbind(2)]
                         for qkv in (part, whole))
            with sdpa_kernel(BACKENDS[name]):
                measure(tokens, "the Nth", f"torch, {name}", both_ways(causal, *many))
                for rotation, way in ("alltoall", "ring"), ("allgather", "gathered"):
                    with rotating(rotation, device, tokens):
                        measure(tokens, way, f"torch, {name}", both_ways(causal, *few))
    write_json(a, device, table)


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # looked up here, because context_parallel patches F


def rotating(rotation, device, tokens):
    """Inside, PyTorch's attention is a ring's. rotation: how keys and values reach the other ranks."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    set_rotate_method(rotation)
    whole = torch.zeros(1, tokens, device=device)  # it wants a tensor to cut
    return context_parallel(world_mesh(device), buffers=[whole], buffer_seq_dims=[1], no_restore_buffers={whole})
