"""Units: what FSDP gathers at a time. A unit is less than a model, or no memory would be saved, and more than a layer,
or messages would be small.

    torchrun --nproc_per_node 2 train.py --form full --dp 2 --zero 3
"""

from torch import nn


def units_of(module):
    """[(module, parameters that its forward alone uses)]. Of a GPT wte, wpe, each child of the container h, ln_f and
    lm_head; the GPT itself is no unit, because it owns no parameter.

    A module that owns parameters is a unit, with all that lies in it. So is each child of a container. Containers may
    be nested.
    """
    units, containers = [], (nn.ModuleList, nn.ModuleDict, nn.Sequential)

    def add_units(m, unit):  # unit: the parameters of the unit that m lies in, or None
        if unit is None and m._parameters:
            unit = []
            units.append((m, unit))
        if unit is not None:
            unit.extend(m.parameters(recurse=False))
        for child in m.children():
            if isinstance(m, containers) and not isinstance(child, containers):
                units.append((child, list(child.parameters())))
            else:
                add_units(child, unit)

    add_units(module, None)
    return units
