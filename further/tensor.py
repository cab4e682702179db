"""Tensor parallelism for a module of your own: which layers can be cut, and who else holds them?

    column = partial(ColumnParallelLinear, f=CopyToGroup.apply)
    row = partial(RowParallelLinear, g=ReduceFromGroup.apply)
    tensor_parallel(module, group, {"up": column, "down": row})

The layers that it puts in are parallel.py's. They know a weight and a bias. So a layer that does more, or a parameter
that is more than numbers, is refused before anything is cut. And who holds a layer, in a list or in a closure, has the
cut one, which would not be so if it were replaced in the module alone, as parallel.tensor_parallel does.
"""

from torch import nn

from parallel import (
    ColumnParallelLinear, Cut, PlacedParameter, placement_of, planned_layers, RowParallelLinear, VocabParallelEmbedding)


# In place of which kind of layer each one stands, and which dimension of the weight it cuts.
CUT = {ColumnParallelLinear: (nn.Linear, 0), RowParallelLinear: (nn.Linear, 1),
       VocabParallelEmbedding: (nn.Embedding, 0)}


def tensor_parallel(module, group, plan):
    """Make the layers that the plan names this rank's slices. plan: as parallel.gpt2_plan. Layers and parameters stay
    the objects that they are, so ties stay ties, and who holds one has its slice. ValueError for a layer that does more
    than its kind, or has a parameter of a layer that the plan does not name."""
    layers = planned_layers(module, plan)
    check_ties(module, layers)
    cuts = {}  # parameter -> its Cut
    for layer, how in layers.items():
        cut_of = next((CUT[kind] for kind in CUT if issubclass(how.func, kind)), None)
        if cut_of:
            check_replaceable(layer, cut_of[0])
            check_cuttable(layer, Cut(group, cut_of[1], how.keywords.get("fused", (1,))), cuts)
    for layer, how in layers.items():
        become(layer, how(layer, group))
    return module


def check_ties(module, layers):
    """ValueError for a parameter of a layer that is cut and of one that is not."""
    whole = {param for layer in module.modules() if layer not in layers for param in layer.parameters(recurse=False)}
    if shared := whole.intersection(param for layer in layers for param in layer.parameters(recurse=False)):
        names = [name for name, param in module.named_parameters(remove_duplicate=False) if param in shared]
        raise ValueError(f"{' and '.join(names)} are one parameter: the plan must cut all of these layers, or none")


def check_replaceable(layer, kind):
    """ValueError for a layer that is more than its kind: what takes its place has a weight and a bias alone."""
    what = [name for name in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
            if getattr(layer, name, None) is not None and getattr(layer, name) is not False]
    of_its_own = {**layer._parameters, **layer._buffers, **layer._modules}
    what += [name for name in of_its_own if name not in ("weight", "bias")]
    what += ["hooks"] * any(hooks for name, hooks in vars(layer).items() if name.endswith("_hooks"))
    if getattr(layer.forward, "__func__", None) is not kind.forward:
        what.append("a forward of its own")
    if what or not isinstance(layer, kind):
        raise ValueError(f"a plain {kind.__name__} can be cut over ranks, not {type(layer).__name__}"
                         f"{' with ' * bool(what)}{', '.join(what)}")


def check_cuttable(layer, cut, cuts):
    """ValueError for a layer with a parameter that is more than numbers, that has fewer rows than there are ranks, or
    that another layer cuts otherwise. cuts: {parameter: Cut} of the layers before, to which this one's are added."""
    for param in layer.parameters() if cut.dim == 0 else [layer.weight]:
        what = f"a parameter of {tuple(param.shape)} cannot be cut over {cut.size} ranks"
        is_plain = type(param) in (nn.Parameter, PlacedParameter)
        if not is_plain or param._backward_hooks or param._post_accumulate_grad_hooks:
            raise ValueError(f"{what}: it is no plain nn.Parameter, or it has hooks, which expect all of it; cut it "
                             "before you register them")
        others = [cuts.setdefault(param, cut), *placement_of(param).cuts]
        if any(other.group == cut.group and not other.is_like(cut) for other in others):
            raise ValueError(f"{what} in two ways: layers that are tied to each other must be cut alike")
        if param.shape[cut.dim] // sum(cut.fused) < cut.size:
            rows = param.shape[cut.dim] // sum(cut.fused)
            raise ValueError(f"{what} along dimension {cut.dim}: give a group of {rows} or fewer")


def become(layer, new):
    """Make a layer another one for all who hold it."""
    layer.__class__ = type(new)
    vars(layer).update(vars(new) | {"training": layer.training})
