"""Attention to a sequence that is spread over ranks: ring and Ulysses, beside PyTorch's context_parallel.

    python bench.py context --gpus 2
"""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel, SDPBackend

import kernels
from fast.edition import Fast
from further.context import in_a_ring, RingAttention
from further.ulysses import ulysses_attention
from lessons.bench.peers import world_mesh
from lessons.bench.rates import both_ways, replays_of
from lessons.bench.strategies import tried
from lessons.bench.timing import interleaved, say, Table, write_json

KINDS = "ring", "ulysses"
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FLASH": SDPBackend.FLASH_ATTENTION}


def context(a, device):
    """Causal attention, forward and backward, to one sequence. A rank has its tokens of it, as --cp gives them. Ours
    also replayed from CUDA graphs, as training has it."""
    cuda = device.type == "cuda" and not a.quick
    heads = 16
    width, dtype = (128, torch.bfloat16) if cuda else (16, torch.float32)
    table = Table(f"{a.gpus} processes; causal attention of {heads} heads of {width} to one sequence, {dtype}, forward "
                  "and backward\nthe Nth: of one GPU's time for all of it", {
        "tokens": "tokens:>7,", "way": "way:<12", "who": "who:<31", "ms": "ms:>9.2f",
        "tflops": "TFLOP/s GPU:>11.1f"}, device)
    for tokens in (16384, 65536) if cuda else (512,):
        def row(way, who, seconds):
            flops = 7 * tokens**2 * heads * width / a.gpus
            table.row(tokens=tokens, way=way, who=who, ms=1e3 * seconds, tflops=flops / seconds / 1e12)

        random = functools.partial(torch.randn, device=device, dtype=dtype, requires_grad=True)
        whole, part = random(1, tokens, 3, heads, width), random(1, tokens // a.gpus, 3, heads, width)
        steps = {way: both_ways(attention, part) for way, attention in ours(a).items()}
        steps["the Nth"] = both_ways(kernels.attention, whole)
        timed = {"ours": steps}
        if device.type == "cuda":
            timed["ours, replayed"] = replays_of(steps, device)
        for who in timed:
            for way, took in interleaved(timed[who], device, a.repeats, 3).items():
                row(way, who, took / (a.gpus if way == "the Nth" else 1))
        for name in BACKENDS if cuda else ():  # they take no float32
            few, many = ([x.detach().transpose(1, 2).contiguous().requires_grad_() for x in qkv.unbind(2)]
                         for qkv in (part, whole))
            with sdpa_kernel(BACKENDS[name]):
                row("the Nth", f"torch, {name}", interleaved(
                    {"": both_ways(causal, *many)}, device, a.repeats, 3)[""] / a.gpus)
                for rotation, way in ("alltoall", "ring"), ("allgather", "gathered"):
                    took, why = tried(lambda: rotated_seconds(rotation, device, tokens, few, a.repeats))
                    if why:
                        say(f"torch, {name}, {way}: {why}")
                    else:
                        row(way, f"torch, {name}", took)
    write_json(a, device, table)


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # looked up here, because context_parallel patches F


def ours(a):
    """{kind of --cp-kind: attention of this rank's qkv (B, T/N, 3, H, D)}"""
    ring = RingAttention.apply if a.plain else Fast.context["ring"]
    ways = {"ring": functools.partial(in_a_ring, group=None, ring=ring),
            "ulysses": functools.partial(ulysses_attention, group=None)}
    return {kind: ways[kind] for kind in a.only}


def rotated_seconds(rotation, device, tokens, qkv, repeats):
    """Seconds of PyTorch's ring attention of this rank's q, k, v (B, H, T/N, D), forward and backward. rotation: how
    keys and values reach the other ranks."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    set_rotate_method(rotation)
    whole = torch.zeros(1, tokens, device=device)  # it wants a tensor to cut
    with context_parallel(world_mesh(device), buffers=[whole], buffer_seq_dims=[1], no_restore_buffers={whole}):
        return interleaved({"": both_ways(causal, *qkv)}, device, repeats, 3)[""]
