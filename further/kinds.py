"""Which config has these sizes? Experts, a Llama, latent attention: each is a subclass, in a file of its own.

And which tensors has a model of that config, and how does tensor parallelism cut its layers?
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


def of_kind(config, s, called):
    """A preset of the kind that flags s ask for. ValueError for a GPT-2 with a size of a Llama. called(field): what
    users call it."""
    for name in "latent", "delta_every":
        if getattr(s, name) and config.arch != "llama":
            raise ValueError(f"{called(name)} {getattr(s, name)} is for a Llama: give --arch llama, too")
    kinds = {name: getattr(s, name) for name in ("experts", "latent") if getattr(s, name)}
    return resized(config, **kinds) if kinds else config


def add_to_plan(plan, config, f, g, columns):
    """How tensor parallelism cuts the layers that a GPT-2 has not. Arguments as for train.tensor_plan."""
    if config.experts:
        from further.expert_parallel import expert_plan
        plan |= expert_plan(f, g)
        if config.shared_experts:
            from further.shared import shared_plan
            plan |= shared_plan(config, f, g, columns)
    if config.arch == "llama":
        from further.llama import llama_plan
        plan |= llama_plan(f, columns)
    if config.latent:
        from further.latent import latent_plan
        plan |= latent_plan(f, columns)
    if config.delta_every:
        from further.delta import delta_plan
        plan |= delta_plan()


def shapes_of_all(config):
    """Name -> shape of every parameter of the whole model, then of every buffer."""
    return {**shapes(config), **buffers(config)}
