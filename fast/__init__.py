"""The same numbers sooner: kernels and links for this process.

    import fast; fast.on()      before any process group, model or optimizer is made, in every process

`on` fills `kernels.table` and `collectives.LINKS`: what this process computes with, and what carries its messages. It
needs none of the GPT's files. fast/edition.py has the edition that trains a GPT, and the kernels of its layers. There
is no off(): the reference alone runs in a process that never calls `on`.
"""

import importlib.util
import pathlib
import sys

import torch.nn.functional as F

HERE = pathlib.Path(__file__).resolve().parents[1]
for name in "collectives", "kernels", "parallel", "further", "safe":
    found = importlib.util.find_spec(name)
    if found and found.origin and HERE not in pathlib.Path(found.origin).resolve().parents:
        print(f"{found.origin}: Python takes it for the module {name} of {HERE}; give it another name", file=sys.stderr)
        sys.exit(2)

import collectives
import kernels
import safe
from fast import attention, fp8, links, norm

KERNELS = {  # of the reference: what computes the same sooner
    F.linear: fp8.linear,
    kernels.LayerNorm: norm.TunedLayerNorm,
    kernels.attention_forward: attention.tuned_attention_forward,
    kernels.attention_backward: attention.tuned_attention_backward,
    kernels.flash_attention: attention.PackedAttention.apply,
    kernels.attention_reference: attention.attention_block,
    kernels.attention_backward_reference: attention.attention_block_backward,
}


def on():
    """Let this process compute the same numbers sooner, and fail in words. RuntimeError if a group exists already."""
    if kernels.table.items() >= KERNELS.items():  # it is on
        return
    safe.on()
    kernels.table.update(KERNELS)
    collectives.LINKS.update(links.LINKS)
