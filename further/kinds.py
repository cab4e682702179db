"""Which config has these sizes? Experts, a Llama: each is a subclass, in a file of its own.

And how does tensor parallelism cut its layers?
"""

from dataclasses import asdict, fields

from further.experts import ExpertsConfig
from model import GPTConfig


def resized(config, **sizes):
    """A config with some sizes changed, and arch: an ExpertsConfig if there are experts then, else a GPTConfig, or a
    Llama's."""
    given = {"arch": config.arch} | asdict(config) | sizes
    kinds = GPTConfig, ExpertsConfig
    if given["arch"] == "llama":
        from further.llama import KINDS as kinds
    kind = kinds[bool(given.get("experts"))]
    if kind.arch != config.arch:
        given["activation"] = kind.activation
    return kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given})


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
