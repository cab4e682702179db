"""Which config has these sizes? Experts, a Llama, latent attention: each is a subclass, in a file of its own.

And which tensors has a model of that config?
"""

from dataclasses import asdict, fields

from further.experts import ExpertsConfig
from model import buffers, GPTConfig, shapes


def resized(config, **sizes):
    """A config with some sizes changed, and arch: an ExpertsConfig if there are experts then, else a GPTConfig, or a
    Llama's, or one with latent attention."""
    given = {"arch": config.arch} | asdict(config) | sizes
    kinds = GPTConfig, ExpertsConfig
    if given.get("latent"):
        from further.latent import KINDS as kinds
    elif given["arch"] == "llama":
        from further.llama import KINDS as kinds
    kind = kinds[bool(given.get("experts"))]
    if kind.arch != config.arch:
        given["activation"] = kind.activation
    return kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given})


def shapes_of_all(config):
    """Name -> shape of every parameter of the whole model, then of every buffer."""
    return {**shapes(config), **buffers(config)}
