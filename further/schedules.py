"""More schedules: how small can a pipeline's bubble get?

A schedule is a function of (p ranks, m micro-batches, v stages a rank) that returns a list of actions for each rank.
Its name enters SCHEDULES, and `--schedule` takes it. parallel.py's section on pipelines lists the idle time of each.

    torchrun --nproc_per_node 2 train.py --plain --pp 2 --micro-batches 4 --schedule zb-h1
"""

from parallel import Action, SCHEDULES, one_f_one_b, take_turns


def interleaved(p, m, v):
    """1F1B with v stages a rank: stage c p + r is rank r's c-th. Narayanan et al., "Megatron-LM" (2021).

    Micro-batches go through in groups of p, each group through all v stages before the next: p must divide m. Rank r
    runs ahead by (v-1) p forwards, until its last stage begins, and by 2 more for each of the p-1-r later
    ranks, as Megatron does.
    """
    if v == 1:
        return one_f_one_b(p, m)
    if m % p:
        raise ValueError(f"an interleaved schedule of {p} ranks needs micro-batches in multiples of {p}, not {m}")

    def rank(r):
        turns = [(k // p % v, k // (p * v) * p + k % p) for k in range(m * v)]  # (which of its stages, micro-batch)
        return take_turns([Action("F", c * p + r, i) for c, i in turns], 2 * (p - 1 - r) + (v - 1) * p,
                          [[Action("B", (v - 1 - c) * p + r, i)] for c, i in turns])  # backward: the last stage first
    return [rank(r) for r in range(p)]


def zero_bubble_h1(p, m, v=1):
    """1F1B with backward in two: rank r puts W off by r micro-batches, so that it sends the result of I earlier."""
    def rank(r):
        put_off = [[Action("W", r, i - r)] if i >= r else [] for i in range(m + r)]
        backwards = [[Action("I", r, i)] + put_off[i] for i in range(m)]
        return take_turns([Action("F", r, i) for i in range(m)], p - 1 - r, backwards) + sum(put_off[m:], [])
    return [rank(r) for r in range(p)]


SCHEDULES.update({"interleaved": interleaved, "zb-h1": zero_bubble_h1})
