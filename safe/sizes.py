"""Sizes and choices that no model or machine can have, refused."""

from dataclasses import fields

import torch

import kernels
from kernels import HAVE_TRITON, use
from model import ACTIVATIONS, GPTConfig


def raise_first(error, rows):
    """rows: [(whether it is wrong, text)]. Raises the error with the first text that holds."""
    for wrong, text in rows:
        if wrong:
            raise error(text)


def multiple(n, of):
    """The smallest multiple of `of` that is not below n."""
    return -(-n // of) * of


def check_sizes(c, called):
    """ValueError unless a model can have the sizes c, fields of a GPTConfig. called(field): what users call it."""
    for field in fields(GPTConfig):
        value, least = getattr(c, field.name), 0 if field.name in ("inner", "experts") else 1
        if type(value) is not field.type:  # not isinstance, by which True is an int
            raise ValueError(f"{called(field.name)} {value!r} must be of type {field.type.__name__}")
        if field.type is int and not least <= value < 2**31:
            raise ValueError(f"{called(field.name)} {value} must be at least {least} and less than 2^31")
    raise_first(ValueError, [
        (c.n_embd % c.n_head, f"{called('n_embd')} {c.n_embd} is not a multiple of {called('n_head')} {c.n_head}: give "
         f"{called('n_embd')} {multiple(c.n_embd, c.n_head)}"),
        (c.activation not in ACTIVATIONS, f"{called('activation')} {c.activation!r} is not one of "
         f"{', '.join(ACTIVATIONS)}"),
        (0 < c.experts < c.top_k, f"{called('experts')} {c.experts} is less than the {c.top_k} that a token goes "
         f"through: give {called('top_k')} {c.experts} or {called('experts')} {max(4, c.top_k)}"),
        (c.experts and c.expert_every > c.n_layer, f"{called('expert_every')} {c.expert_every} must be at most the "
         f"number of blocks, {c.n_layer}: give {called('expert_every')} {c.n_layer}"),
        (not 0 <= c.norm_eps <= 1, f"{called('norm_eps')} {c.norm_eps} must be between 0 and 1")])


def checked_use(choice):
    """As kernels.use, but ValueError for a choice that this machine cannot take."""
    raise_first(ValueError, [
        (choice not in ("auto", "torch", "triton"), f"kernels '{choice}' are not one of auto, torch, triton"),
        (choice == "triton" and not HAVE_TRITON, "triton kernels need the package triton"),
        (choice == "triton" and not (kernels.INTERPRETED or torch.cuda.is_available()), "triton kernels need a CUDA "
         "GPU, or TRITON_INTERPRET=1 to run them slowly on the CPU")])
    use(choice)
