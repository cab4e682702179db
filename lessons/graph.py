"""The graph that autograd records of a block, and what each of its nodes keeps for backward.

    python -m lessons graph --model tiny

A forward leaves a node an operation. A node knows the nodes that made its inputs: backward walks there. It also keeps
the tensors that its own gradient needs, and these are a block's activations. A tensor that two nodes keep is there
once; a weight is kept without more memory. So the bytes add up to `activation_bytes` of theory/memory.py.
"""

import torch

from lessons.bench.timing import say
from model import GPT, PRESETS
from safe.flags import Settings
from safe.reports import size
from theory.memory import activation_bytes


def kept_by(node):
    """[(name, tensor)] that an autograd node keeps. Of PyTorch's nodes they are attributes, of our own a tuple."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    kept = [(name.removeprefix("_saved_"), getattr(node, name)) for name in names]
    kept += [("", tensor) for tensor in getattr(node, "saved_tensors", ())]
    return [(name, tensor) for name, tensor in kept if isinstance(tensor, torch.Tensor)]


def nodes_of(output):
    """The graph's nodes in the order of forward, parameters' own left out: {node: [the nodes that made its inputs]}."""
    found = {}

    def visit(node):
        if node is None or node in found or node.name().endswith("AccumulateGrad"):
            return
        found[node] = None  # begun
        makers = [maker for maker, _ in node.next_functions]
        for maker in makers:
            visit(maker)
        del found[node]
        found[node] = [maker for maker in makers if maker in found]

    visit(output.grad_fn)
    return found


def demo_graph(model):
    """A block's autograd graph: its nodes, what each keeps for backward, and the formula's bytes."""
    config = PRESETS[model]
    block = GPT(config, pieces=range(1, 2)).h["0"]
    x = torch.randn(1, config.seq_len, config.n_embd, requires_grad=True)
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    seen, total = set(), 0
    graph = nodes_of(block(x.clone()))
    number = {node: i for i, node in enumerate(graph)}
    say(f"a block of {model}, one sequence of {config.seq_len} tokens, float32\nnode  of     operation")
    for node, makers in graph.items():
        say(f"{number[node]:4}  {' '.join(str(number[maker]) for maker in makers):6} {node.name()}")
        for name, tensor in kept_by(node):
            memory = tensor.untyped_storage().data_ptr()
            new = memory not in seen | weights
            what = size(tensor.untyped_storage().nbytes()) if new else "a weight" if memory in weights else "kept above"
            seen.add(memory)
            total += new * tensor.untyped_storage().nbytes()
            say(f"{'':14}{name:12} {str(tuple(tensor.shape)):20} {what}")
    formula = activation_bytes(config, Settings(dp=1, batch_size=1, dtype="fp32"), [range(1, 2)], fused=False)
    say(f"kept in all {total:,} bytes, by the formula {formula:,}")
