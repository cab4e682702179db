"""Dispatch by node: how often must a token cross the network?

Of a token's k experts several may lie on one node. As rows for experts it goes there several times. Here it goes to a
node once, where it is shared out, and one sum of outputs comes back. Routers can also be held to few nodes.

    torchrun --nnodes 2 ... train.py --plain --dp 4 --ep 4 --experts 8 --dispatch node --expert-groups 2
"""

import math
from functools import partial

import torch

import collectives as dist
from further.expert_parallel import exchange, exchange_counts
from further.experts import count_of_each, Experts, Router
from further.sequence import Conjugate
from parallel import groups_of


# N ranks share out the experts, on M nodes, n on each: E/M experts lie on a node. The ranks of one number on all nodes
# exchange tokens, then those of one node rows for experts:
#
#                    between the nodes            inside of a node
#     tokens ── once to each node that has ─┬─ a row for each expert there ── experts ─┐
#               some of its k experts       └─ weigh, add up ─────────────────────────┘
#     add up ── one sum back from each ────────┘
#
# With a token travel its k choices and their weights, because the node weighs its experts' outputs before they go back.
# Rows of C that cross the network for a token, forward, there and back: 2 times the other nodes that it meets, in place
# of 2 times its experts there. Of E = 64 experts, k = 6 and M = 4 nodes, by chance: 2.5 in place of 4.5. Inside of a
# node as many rows travel as before, and those that came from elsewhere.
#
# If each node's experts are a group, `GroupRouter` bounds how many nodes a token meets. It changes the model, whichever
# ranks train it, and its groups are the config's, so a layout may have other nodes, or none.
# DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.2; "DeepSeek-V3" (2024), sections 2.1.2 and 3.2.2.

def split_nodes(mesh, n):
    """Of the n neighbours along dp who share out the experts [those of this node, those of this number on all nodes].
    """
    lines = mesh.mesh.unflatten(1, (-1, n)).permute(0, 4, 1, 3, 2).reshape(-1, n)             # (groups, n)
    nodes = [dist.node_of(rank) for rank in lines[0].tolist()]
    inside = math.gcd(n, nodes.count(nodes[0]))  # equally many on each
    return groups_of(lines.unflatten(1, (-1, inside)))                                        # (groups, nodes, inside)


def spread(rows, places, size):
    """(size, C): rows (n, C) at their places, zeros elsewhere. It only reads, so that each run adds in the same order.
    """
    where = torch.full((size,), len(rows), device=rows.device)
    where[places] = torch.arange(len(rows), device=rows.device)
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]).index_select(0, where)


def through_nodes(experts, between, x, chosen, gates):
    """As Experts.forward, whose `mlps` takes rows for all experts of this node: (B, T, C) -> (B, T, C)."""
    nodes = dist.get_world_size(between)
    tokens, choices, weights = x.flatten(0, 1), chosen.flatten(0, 1), gates.flatten(0, 1)     # (t, C), (t, k), (t, k)
    node_of_choice = choices // (experts.count // nodes)
    every = torch.arange(nodes, device=x.device)
    to, token = (node_of_choice == every.view(-1, 1, 1)).any(-1).nonzero().unbind(1)          # by node, then by token
    _, sends, receives = exchange_counts(count_of_each(to, nodes), between)
    there, back = (partial(exchange, sends=a, receives=b) for a, b in ((sends, receives), (receives, sends)))
    arrived, arrived_weights = (Conjugate.apply(some.index_select(0, token), between, there, back)
                                for some in (tokens, weights))
    y = on_this_node(experts, between, arrived, there(choices[token], between), arrived_weights)
    y = Conjugate.apply(y, between, back, there)
    return spread(y, token * nodes + to, len(tokens) * nodes).view(*x.shape[:2], nodes, -1).sum(-2)


def on_this_node(experts, between, tokens, choices, weights):
    """Tokens (n, C), k choices and weights each -> of the experts of this node the weighted sums (n, C)."""
    here = experts.count // dist.get_world_size(between)
    choices = choices - dist.get_rank(between) * here                                         # here: 0, 1, ...
    row, slot = ((choices >= 0) & (choices < here)).nonzero().unbind(1)
    order = choices[row, slot].argsort(stable=True)
    row, slot = row[order], slot[order]
    y = experts.mlps(tokens.index_select(0, row), count_of_each(choices[row, slot], here))
    y = spread(y, row * choices.shape[1] + slot, choices.numel()).view(*choices.shape, y.shape[1])   # (n, k, C)
    return (y * weights.unsqueeze(-1).to(y.dtype)).sum(-2)


def dispatch_by_node(module, between):
    """Let tokens of a GPT with expert parallelism, whose `mlps` work inside of a node, come from all nodes."""
    for experts in [part for part in module.modules() if isinstance(part, Experts)]:
        experts.forward = partial(through_nodes, experts, between)


class GroupRouter(Router):
    """DeepSeek-V3's: a token's k experts lie in a few groups of neighbours, whose two best experts have the largest
    sums of biased scores."""

    def __init__(self, config):
        super().__init__(config)
        self.groups, self.top_groups = config.expert_groups, config.top_groups

    def allowed(self, scores):                                                                # (B, T, E)
        scores = scores.unflatten(-1, (self.groups, -1))                                      # (B, T, groups, E/groups)
        best = scores.topk(min(2, scores.shape[-1]), -1).values.sum(-1)
        chosen = best.sort(descending=True, stable=True).indices[..., :self.top_groups]
        others = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
        return scores.masked_fill(others.unsqueeze(-1), -math.inf).flatten(-2)
