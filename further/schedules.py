"""More schedules: how small can a pipeline's bubble get, and how few activations need its ranks hold?

A schedule is a function of (p ranks, m micro-batches, v stages a rank) that returns a list of actions for each rank.
Its name enters SCHEDULES, and `--schedule` takes it. parallel.py's section on pipelines lists the idle time of each.

    torchrun --nproc_per_node 2 train.py --plain --pp 2 --micro-batches 4 --schedule zb-h1
"""

import itertools
from collections import defaultdict, deque

from parallel import Action, homes_of, needs, one_f_one_b, SCHEDULES, take_turns, whole_batch


def interleaved(p, m, v):
    """1F1B with v stages a rank: stage c p + r is rank r's c-th. Narayanan et al., "Megatron-LM" (2021).

    Micro-batches go through in groups of p, each group through all v stages before the next: p must divide m. Rank r
    runs ahead by (v-1) p forwards, until its last stage begins, and by 2 more for each of the p-1-r later
    ranks, as Megatron does. For p = 2, v = 2, m = 4, a rank's second stage in brackets:

        rank 0   F0 F1 (F0)(F1) F2 (B0) F3 (B1)(F2) B0 (F3) B1 (B2)(B3) B2  B3
        rank 1   F0 F1 (F0)(B0)(F1)(B1) F2  B0  F3  B1 (F2)(B2)(F3)(B3) B2  B3
    """
    if v == 1:
        return one_f_one_b(p, m)
    if m % p:
        raise ValueError(f"an interleaved schedule of {p} ranks needs micro-batches in multiples of {p}, not {m}")
    lists = []
    for rank in range(p):
        stages = range(rank, v * p, p)
        forwards = in_groups("F", stages, p, m)
        backwards = in_groups("B", stages[::-1], p, m)
        ahead = (v - 1) * p + 2 * (p - 1 - rank)
        lists.append(take_turns(forwards, ahead, backwards))
    return lists


def in_groups(kind, stages, p, m):
    """A rank's actions of a kind: p micro-batches through all its stages, then the next p."""
    actions = []
    for first in range(0, m, p):
        for stage in stages:
            for i in range(first, first + p):
                actions.append(Action(kind, stage, i))
    return actions


def zero_bubble_h1(p, m, v=1):
    """1F1B with backward in two: rank r runs W r micro-batches after I, so that it sends the result of I earlier."""
    lists = []
    for rank in range(p):
        weights = whole_batch("W", rank, m)
        actions = []
        for action in take_turns(whole_batch("F", rank, m), p - 1 - rank, whole_batch("I", rank, m)):
            actions.append(action)
            if action.kind == "I" and action.micro_batch >= rank:
                actions.append(weights.pop(0))
        lists.append(actions + weights)
    return lists


# ------------------------------------------------------------------------------------------------------ stages in a V
#
# Rank r has two stages, r and 2p-1-r, so the way through them is a V: down all ranks, and up again. The first and the
# last stage are both on rank 0, so a tied embedding needs no message. A rank early on the way down waits long for the
# gradient of its first stage and briefly for that of its second, so all ranks hold equally many activations, where
# 1F1B's rank r holds p-r. For p = 2 all of these hold 2 or more, as much as 1F1B. With F = I = W = 1:
#
#                     idle time           activations at most, in micro-batches of all layers of a rank
#     ZB-V            (p-1) / 2           p
#     V-Half          3 (p-1) / 2         p/2 + 1, rounded down
#     V-Min           2 (p-1) + 1/2       (p+4) / 3, rounded down
#     DualPipeV       (p-1) / 2           p + 1/2

def zb_v(p, m, v=2):
    """The memory of 1F1B. Rank p-1 cannot begin before (p-1) / 2; from then on it never idles."""
    return squeeze(repeat(p, m, 4, 2), 2 * p)


def v_half(p, m, v=2):
    """Half of the memory and half of the bubble of 1F1B."""
    pause = 3 if p % 2 == 0 else 0
    return squeeze(repeat(p, m, 2, 1, pause), 2 * ((p + 2) // 2))


def v_min(p, m, v=2):
    """A third of the memory and two thirds of the bubble of 1F1B. The bubble grows with m if F, I and W differ."""
    pause = 2 if p % 3 == 0 else 0  # or each I would want the time of an F
    return squeeze(repeat(p, m, 1, 1, pause), 2 * ((p + 4) // 3))


def repeat(p, m, down, up, pause=0):
    """One micro-batch's F and I in a V, its "building block", and the same for the next one every 6 units of time, in
    which a rank has time for F, I and W of both its stages. Qi et al., "Pipeline Parallelism with Controllable Memory"
    (2024). Returns each rank's F and I, in the order of time.

    F and I start `down` later on each next rank of the way down, and `up` later on the way up. A rank's two stages
    together hold a micro-batch for 2 (p-1) (down + up) + 4 units, so they hold a sixth as many. p = 3, down = up = 1,
    no pause, a rank's second stage in brackets:

        time      0   1   2   3   4   5   6   7   8   9  10  11
        rank 0   F0                 (F0)(I0)                 I0
        rank 1       F0         (F0)        (I0)         I0
        rank 2           F0 (F0)                (I0) I0
    """
    way = [down * k for k in range(p)] + [down * p + up * k for k in range(p)]
    back = way[-1] + 1 + pause
    start = {}
    for i, stage in itertools.product(range(m), range(2 * p)):
        start[Action("F", stage, i)] = 6 * i + way[stage]
        start[Action("I", stage, i)] = 6 * i + back + way[2 * p - 1 - stage]
    in_order = sorted(start, key=start.get)
    return [[action for action in in_order if action.stage in (rank, 2 * p - 1 - rank)] for rank in range(p)]


def squeeze(lists, most):
    """Each rank's F and I, in the order given, each as early as it can, if all take equally long; and their W. A W runs
    where its rank would idle, or where it holds `most` activations (each of one stage) and an F comes next."""
    homes = homes_of(lists)
    left = [deque(actions) for actions in lists]
    weights = [deque() for _ in lists]  # each W whose I has run
    held = [0] * len(lists)
    squeezed = [[] for _ in lists]
    done = set()
    while any(left) or any(weights):
        turn = []
        for rank, actions in enumerate(left):
            ready = bool(actions) and done.issuperset(needs(actions[0], homes))
            full = ready and actions[0].kind == "F" and held[rank] >= most
            if weights[rank] and (full or not ready):
                turn.append((rank, weights[rank].popleft()))
            elif ready:
                turn.append((rank, actions.popleft()))
        for rank, action in turn:
            squeezed[rank].append(action)
            done.add(action)
            held[rank] += {"F": 1, "I": 0, "W": -1}[action.kind]
            if action.kind == "I":
                weights[rank].append(action._replace(kind="W"))
    return squeezed


def dualpipe_v(p, m, v=2):
    """DualPipe, cut in half: in the middle of a step each F of one stage stands beside a backward of the other. Sea AI
    Lab, "Cut-in-half" (2025); DeepSeek, "DualPipeV" (2025), who run the two as one, so that the exchanges of each
    one's experts hide behind the other. Here they run one after the other.

    Their phases, where each word's digit says which of the rank's stages runs its next micro-batch. Fewer than 2p
    micro-batches run as the first m of 2p.
    """
    lists = []
    for rank in range(p):
        later = p - 1 - rank
        phases = [("F0", 2 * later), ("F0 F1", rank + 1), ("I1 F1", later),
                  ("F0 I1 F1 I0", max(m, 2 * p) - 2 * p + rank + 1),
                  ("I1 F1 I0", later), ("I1 I0", rank + 1), ("I0", later)]
        stages = {"0": rank, "1": 2 * p - 1 - rank}
        following = defaultdict(itertools.count)  # word -> the micro-batches that it runs, one after the other
        actions = []
        for words, times in phases:
            for word in words.split() * times:
                actions.append(Action(word[0], stages[word[1]], next(following[word])))
        lists.append([action for action in actions if action.micro_batch < m])
    return squeeze(lists, 2 * p)


SCHEDULES.update({"interleaved": interleaved, "zb-h1": zero_bubble_h1, "zb-v": zb_v, "v-half": v_half, "v-min": v_min,
                  "dualpipe-v": dualpipe_v})
