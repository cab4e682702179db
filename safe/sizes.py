"""What is refused in one line; sizes and choices that no model or machine can have."""

import math
from dataclasses import fields

import torch

import kernels
from further.fits import misfit, what_sizes_divide
from kernels import HAVE_TRITON


class BadInput(ValueError):
    """Its text is one line for the user: the flag or the file, what is wrong, a value that would work."""


def reject(wrong, text):
    if wrong:
        raise BadInput(text)


MAY_BE_0 = "inner", "experts", "n_kv_head", "head_size", "max_positions", "shared_experts"


def check_sizes(c, called):
    """BadInput unless a model can have the sizes of the GPTConfig c. called(field): what users call it."""
    for field in fields(c):
        name = called(field.name)
        value = getattr(c, field.name)
        least = int(field.name not in MAY_BE_0)
        # Not isinstance, by which True is an int.
        reject(type(value) is not field.type, f"{name} {value!r} must be of type {field.type.__name__}")
        reject(field.type is int and not least <= value < 2**31,
               f"{name} {value} must be at least {least} and less than 2^31: give e.g. {name} {field.default}")
    reject(c.activation not in c.activations,
           f"{called('activation')} {c.activation!r} is not one of {', '.join(c.activations)}")
    reject(not 0 <= c.norm_eps <= 1, f"{called('norm_eps')} {c.norm_eps} must be between 0 and 1")
    if c.arch == "llama":
        reject(not 0 < c.rope_theta < math.inf, f"{called('rope_theta')} {c.rope_theta} must be above 0")
    reject_misfit(what_sizes_divide(c, called))


def reject_misfit(table):
    """BadInput with the first line of a table of further/fits.py that is true."""
    why = misfit(table)
    reject(why, why)


def check_fixed(hf, fixed):
    """BadInput if a config.json has another value than the one that is supported. fixed: {key: value}."""
    for key, value in fixed.items():
        reject(hf.get(key, value) is not value, f"{key} is {hf.get(key)!r}, only {value} is supported")


def checked_use(choice):
    """As kernels.use, but BadInput for a choice that this machine cannot take."""
    reject(choice not in ("auto", "torch", "triton"), f"kernels '{choice}' are not one of auto, torch, triton")
    reject(choice == "triton" and not (HAVE_TRITON and (kernels.INTERPRETED or torch.cuda.is_available())),
           "triton kernels need the package triton, and a CUDA GPU or TRITON_INTERPRET=1, which runs them slowly on "
           "the CPU")
    kernels.use(choice)
