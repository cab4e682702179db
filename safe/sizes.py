"""Sizes and choices that no model or machine can have, refused."""

from dataclasses import fields

import torch

import kernels
from kernels import HAVE_TRITON, use
from model import ACTIVATIONS, GPTConfig


# --------------------------------------------------------------------------------------------------------- bad sizes

def check_sizes(config):
    """ValueError, which begins with a field's name, unless a model can have these sizes, fields of a GPTConfig."""
    for field in fields(GPTConfig):
        value, least = getattr(config, field.name), 0 if field.name in ("inner", "experts") else 1
        if type(value) is not field.type:  # not isinstance, by which True is an int
            raise ValueError(f"{field.name} {value!r} must be of type {field.type.__name__}")
        if field.type is int and not least <= value < 2**31:
            raise ValueError(f"{field.name} {value} must be at least {least} and less than 2^31")
    if config.n_embd % config.n_head:
        raise ValueError(f"n_embd {config.n_embd} must be a multiple of n_head {config.n_head}")
    if config.activation not in ACTIVATIONS:
        raise ValueError(f"activation {config.activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if config.experts and config.top_k > config.experts:
        raise ValueError(f"top_k {config.top_k} must be at most the number of experts, {config.experts}")
    if config.experts and config.expert_every > config.n_layer:
        raise ValueError(f"expert_every {config.expert_every} must be at most the number of blocks, {config.n_layer}")
    if not 0 <= config.norm_eps <= 1:
        raise ValueError(f"norm_eps {config.norm_eps} must be between 0 and 1")


# ------------------------------------------------------------------------------------------------------------- checks

def checked_use(choice):
    """As kernels.use, but ValueError for a choice that this machine cannot take."""
    if choice not in ("auto", "torch", "triton"):
        raise ValueError(f"kernels '{choice}' are not one of auto, torch, triton")
    if choice == "triton" and not (HAVE_TRITON and (kernels.INTERPRETED or torch.cuda.is_available())):
        raise ValueError("triton kernels need " + ("a CUDA GPU" if HAVE_TRITON else "the package triton")
                         + ", or TRITON_INTERPRET=1 to run them slowly on the CPU")
    use(choice)
