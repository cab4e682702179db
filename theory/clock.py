"""A pipeline's schedule on a clock: pieces cut by their cost, a Timeline of any lists of actions, and its drawing."""

import functools
import itertools
from typing import NamedTuple

import parallel
from parallel import homes_of, in_order, needs, result_of


# ---------------------------------------------------------------------------- pipeline: stages that take equally long

@functools.cache
def split_pieces(config, stages):
    """Cut the L+2 pieces of a GPT into `stages` runs, so that the slowest run takes as little time as possible:
    [range, ...], cached, so callers must not change it.

    Costs are multiply-adds a token: of a block its attention and matrices (of experts, k), of the head C V. The
    embedding costs nothing, because it is a look-up.
    """
    c, n = config.n_embd, config.n_layer + 2
    mlps = [config.top_k if config.has_experts(i) else 1 for i in range(config.n_layer)]
    cost = [0] + [4 * c * c + 2 * c * config.inner * k + config.seq_len * c for k in mlps] + [c * config.vocab_size]

    @functools.cache
    def best(end, k):
        """Cut the pieces before `end` into k stages: (the slowest one's cost, the first piece of each, last first)."""
        if k == 1:
            return sum(cost[:end]), (0,)
        return min((max(rest, sum(cost[start:end])), (start, *starts))
                   for start in range(k - 1, end) for rest, starts in [best(start, k - 1)])

    starts = best(n, stages)[1][::-1]
    return [range(a, b) for a, b in zip(starts, (*starts[1:], n))]


@functools.cache
def placed(schedule, p, v):
    return parallel.place_stages(parallel.Layout(pp=p, schedule=schedule, virtual_stages=v))


def homes_in(s):
    """Where stages live in layout s, {stage: rank}."""
    return placed(s.schedule, s.pp, s.virtual_stages)


def stages_in(s, config, rank):
    """[(stage, its pieces)] of a pipeline rank in layout s."""
    cuts = split_pieces(config, len(homes_in(s)))
    return [(stage, cuts[stage]) for stage in parallel.stages_on(rank, homes_in(s))]


# ------------------------------------------------------------------------------------------------- schedules on a clock

class Timeline(NamedTuple):
    """Times in the unit of `simulate`'s costs."""
    spans: list         # for each rank: [(action, start, end)]
    length: float
    idle: list          # for each rank: time in which it computes nothing
    peak: list          # for each rank: the most activations it holds at once, in micro-batches of all its stages


def most_held(actions):
    """The most activations that a list holds at once: each from its F to its B or W."""
    return max(itertools.accumulate({"F": 1, "B": -1, "W": -1}.get(action.kind, 0) for action in actions), default=0)


def simulate(lists, forward=1.0, input_gradient=1.0, weight_gradient=1.0, transfer=0.0):
    """Give each action of lists without transfers a start and an end: a Timeline.

    A cost is the time that a micro-batch takes on all v stages of a rank, so one stage takes 1/v of it. transfer: the
    time of a message. An activation is held from the end of its F to the end of its B or W.
    """
    homes = homes_of(lists)
    v = len(homes) // len(lists)
    cost = {"F": forward / v, "I": input_gradient / v, "W": weight_gradient / v}
    cost["B"] = cost["I"] + cost["W"]
    end, spans, clock = {}, [[] for _ in lists], [0.0] * len(lists)
    for r, action in in_order(lists):
        start = max([clock[r]] + [end[n] + transfer * (homes[n.stage] != r) for n in needs(action, homes)])
        end[result_of(action)] = clock[r] = start + cost[action.kind]
        spans[r].append((action, start, clock[r]))
    idle = [max(clock) - sum(b - a for _, a, b in row) for row in spans]
    return Timeline(spans, max(clock), idle, [most_held(actions) / v for actions in lists])


def draw(timeline, unit=1.0):
    """The timeline as text: a row a rank, a column a unit of time. F2 is F of micro-batch 2; dots are idle time."""
    columns = round(timeline.length / unit)
    width = max(len(str(a)) for row in timeline.spans for a, _, _ in row) + 1
    lines = []
    for r, row in enumerate(timeline.spans):
        cells = ["." * (width - 1)] * columns
        for action, start, end in row:
            for c in range(round(start / unit), round(end / unit)):
                cells[c] = str(action).ljust(width - 1) if c == round(start / unit) else "-" * (width - 1)
        lines.append(f"rank {r}  " + " ".join(cells))
    return "\n".join(lines)
