"""A pipeline's schedule on a clock: a Timeline of any lists of actions, and its drawing."""

import functools
from typing import NamedTuple

import parallel
from further.lists import schedule_of
from further.pieces import split_pieces
from parallel import in_order, names_of, needs, ranks_of_stages, result_of


@functools.cache
def lists_of(schedule, p, m, v):
    """A schedule's lists, cached, so callers must not change them."""
    return schedule_of(schedule)(p, m, v)


@functools.cache
def placed(schedule, p, v):
    return ranks_of_stages(lists_of(schedule, p, 2 * p, v))


def stage_to_rank_in(s):
    """Where stages live in layout s, {stage: rank}."""
    return placed(s.schedule, s.pp, s.virtual_stages)


@functools.cache
def halves_backward(schedule, p, v):
    """Whether a schedule runs backward in two, I and W."""
    return any(action.kind == "I" for actions in lists_of(schedule, p, 2 * p, v) for action in actions)


def is_fast(s):
    """Whether layout s runs in fast/'s edition. One that does not say is meant for GPUs."""
    return getattr(s, "fast", "off") != "off"


def stages_in(s, config, rank):
    """{stage: its pieces} of a pipeline rank in layout s."""
    runs = split_pieces(config, len(stage_to_rank_in(s)))
    return {stage: runs[stage] for stage in parallel.stages_on(rank, stage_to_rank_in(s))}


# ------------------------------------------------------------------------------------------------- schedules on a clock

class Timeline(NamedTuple):
    """Times in the unit of `simulate`'s costs."""
    spans: list         # for each rank: [(action, start, end)]
    length: float
    idle: list          # for each rank: time in which it computes nothing
    peak: list          # for each rank: the most activations that it holds at once, in micro-batches of all its stages


def most_held(actions, sizes=None):
    """The most activations that a list holds at once: each from its F to its B or W. sizes: {stage: that of its
    activations}; None: each counts 1."""
    held = most = 0
    for kind, stage, _ in actions:
        size = sizes[stage] if sizes else 1
        held += {"F": size, "B": -size, "W": -size}.get(kind, 0)
        most = max(most, held)
    return most


def simulate(lists, forward=1.0, input_gradient=1.0, weight_gradient=1.0):
    """Give each action of lists without transfers a start and an end: a Timeline. Messages take no time, nor do G, D
    and A.

    A cost is the time that a micro-batch takes on all v stages of a rank, so one stage takes 1/v of it. An activation
    is held from the end of its F to the end of its B or W.
    """
    stage_to_rank = ranks_of_stages(lists)
    v = len(stage_to_rank) // len(lists)
    cost = {"F": forward / v, "I": input_gradient / v, "W": weight_gradient / v}
    cost["B"] = cost["I"] + cost["W"]
    spans = [[] for _ in lists]
    clock = [0.0] * len(lists)  # each rank's
    end = {}                    # of each result
    for r, action in in_order(lists):
        start = max([clock[r], *(end[result] for result in needs(action, stage_to_rank))])
        end[result_of(action)] = clock[r] = start + cost.get(action.kind, 0)
        spans[r].append((action, start, clock[r]))
    length = max(clock)
    idle = [length - sum(end - start for _, start, end in row) for row in spans]
    return Timeline(spans, length, idle, [most_held(actions) / v for actions in lists])


def bubble(schedule, p, v, f, i, w):
    """How long each of p ranks idles by the lecture's formulas, if there are p micro-batches or more, v stages a rank.
    f, i, w: what F, I and W of a micro-batch take on all stages of a rank. None for a schedule without a formula here:
    `simulate` measures its bubble.

    Each further rank adds so much on the clock, where I takes a little longer than F and W. Zero-bubble schedules fill
    it with W. V-Min's is longer, by what grows with the number of micro-batches.
    """
    a_rank = {"gpipe": f + i + w, "1f1b": f + i + w, "interleaved": (f + i + w) / v, "zb-h1": f + i - w,
              "zb-v": i - w / 2, "v-half": 3 * i / 2, "v-min": 2 * (f + i + w) / 3, "dualpipe-v": (f + i - w) / 2}
    return (p - 1) * a_rank[schedule] if schedule in a_rank else None


def draw(timeline):
    """The timeline as text, which `further.lists.parse` reads: a row a rank, a column as long as its shortest
    action. F2 is F of micro-batch 2, F2/5 that of stage 5; dots are idle time."""
    unit = min(end - start for row in timeline.spans for _, start, end in row)
    columns = round(timeline.length / unit)
    names = [names_of([action for action, _, _ in row], rank) for rank, row in enumerate(timeline.spans)]
    width = max(len(name) for row in names for name in row)
    lines = []
    for r, row in enumerate(timeline.spans):
        cells = ["." * width] * columns
        for name, (_, start, end) in zip(names[r], row):
            first, last = round(start / unit), round(end / unit)
            cells[first:last] = [name.ljust(width)] + ["-" * width] * (last - first - 1)
        lines.append(f"rank {r}  " + " ".join(cells))
    return "\n".join(lines)
