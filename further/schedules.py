"""More schedules: how small can a pipeline's bubble get, and how few activations need its ranks hold?

A schedule is a function of (p ranks, m micro-batches, v stages a rank) that returns a list of actions for each rank.
Its name enters SCHEDULES, and `--schedule` takes it. Idle time of every rank, where 1F1B's is (p-1) (F + I + W):

    interleaved       (p-1) (F + I + W) / v     v stages a rank, each 1/v as long; holds p + (p-1 - 2r) / v
    ZB-H1             (p-1) (F + I - W)         rank r runs W r micro-batches late; at most p activations a rank

F, I and W as in parallel.py's section on pipelines; the schedules in a V are below.

    torchrun --nproc_per_node 2 train.py --plain --pp 2 --micro-batches 4 --schedule zb-h1
"""

import itertools
from collections import Counter, defaultdict, deque
from contextlib import contextmanager
from functools import partial

import torch

import kernels
import parallel
from model import Linear
from parallel import Action, alternate, homes_of, needs, result_of, one_f_one_b, whole_batch


def interleaved(p, m, v):
    """1F1B with v stages a rank: stage c p + r is rank r's c-th. Narayanan et al., "Megatron-LM" (2021).

    Micro-batches go through in groups of p, each group through all v stages before the next. (If p does not divide m,
    groups are as even as can be and have at least p.) Rank r runs ahead by v-1 groups of forwards, until its last stage
    begins, and by 2 more forwards for each of the p-1-r later ranks, as Megatron does. For p = 2, v = 2, m = 4, a
    rank's second stage in brackets:

        rank 0   F0 F1 (F0)(F1) F2 (B0) F3 (B1)(F2) B0 (F3) B1 (B2)(B3) B2  B3
        rank 1   F0 F1 (F0)(B0)(F1)(B1) F2  B0  F3  B1 (F2)(B2)(F3)(B3) B2  B3
    """
    if v == 1:
        return one_f_one_b(p, m)
    count = max(1, m // p)
    starts = [m * group // count for group in range(count + 1)]
    groups = [range(start, end) for start, end in itertools.pairwise(starts)]
    lists = []
    for rank in range(p):
        stages = range(rank, v * p, p)
        forwards = in_groups("F", stages, groups)
        backwards = in_groups("B", stages[::-1], groups)
        ahead = (v - 1) * max(map(len, groups)) + 2 * (p - 1 - rank)
        lists.append(alternate(forwards, ahead, backwards))
    return lists


def in_groups(kind, stages, groups):
    """A rank's actions of a kind: a group of micro-batches through all its stages, then the next group."""
    return [Action(kind, stage, i) for group in groups for stage in stages for i in group]


def zero_bubble_h1(p, m, v=1):
    """1F1B with backward in two: rank r runs W r micro-batches after I, so that it sends the result of I earlier."""
    lists = []
    for rank in range(p):
        weights = whole_batch("W", rank, m)
        actions = []
        for action in alternate(whole_batch("F", rank, m), p - 1 - rank, whole_batch("I", rank, m)):
            actions.append(action)
            if action.kind == "I" and action.micro_batch >= rank:
                actions.append(weights.pop(0))
        lists.append(actions + weights)
    return lists


# ------------------------------------------------------------------------------------------------------ stages in a V
#
# Rank r has two stages (v is always 2): r and 2p-1-r. So a micro-batch's way through the ranks is a V, down to the last
# rank and up again. The first and the last stage are both on rank 0, so a tied embedding needs no message. A rank near
# the top holds an activation of its first stage for long, and one of its second only briefly. At the bottom both take
# equally long. So all ranks hold about as many activations, where 1F1B's rank r holds p-r.
#
# With F = I = W = 1 for all layers of a rank, as counted on theory/clock.py's clock:
#
#                     idle time, from m = 2p on                          activations at most
#     ZB-V            (p-1) / 2                                          p
#     V-Half          3 (p-1) / 2, for odd p 1/2 less                    p/2 + 1, rounded down
#     V-Min           2 (p-1) - 1/2, where 3 divides p 2 (p-1) + 1/2     (p+4) / 3, rounded down
#     DualPipeV       (p-1) / 2                                          p + 1/2
#
# With 2 ranks, V-Half and V-Min hold as much as 1F1B: 2. Little memory leaves little room to wait. So V-Min's bubble
# grows with m unless F, I and W take equally long, and V-Half's where F takes longer than I.

def zb_v(p, m, v=2):
    """As many activations as 1F1B, and the smallest bubble: the last rank cannot begin before (p-1) / 2."""
    return squeeze(repeat(p, m, 4, 2), 2 * p)


def v_half(p, m, v=2):
    """About half of 1F1B's activations, and half of its bubble."""
    pause = 3 if p % 2 == 0 else 0
    return squeeze(repeat(p, m, 2, 1, pause), 2 * ((p + 2) // 2))


def v_min(p, m, v=2):
    """About a third of 1F1B's activations, and two thirds of its bubble."""
    pause = 2 if p % 3 == 0 else 0
    return squeeze(repeat(p, m, 1, 1, pause), 2 * ((p + 4) // 3))


def repeat(p, m, down, up, pause=0):
    """Each rank's F and I, in the order in which they would start if a micro-batch began every 6 units of time. In 6
    units a rank runs F, I and W of both its stages. Qi et al., "Pipeline Parallelism with Controllable Memory" (2024),
    call what one micro-batch needs the building block.

    Down the V, a micro-batch's F starts `down` units later on each next rank; up the V, `up` units later. Then comes
    the `pause`, and I goes back in the same steps. It is the shortest with which a rank's two F and two I start in
    different units of the 6.
    A rank's two stages together hold a micro-batch for about 2 (p-1) (down + up) units, so they hold a sixth as many.
    For p = 2, down = up = 1, a rank's second stage in brackets:

        time      0   1   2   3   4   5   6   7
        rank 0   F0         (F0)(I0)         I0
        rank 1       F0 (F0)        (I0) I0
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
            done.add(result_of(action))
            held[rank] += {"F": 1, "I": 0, "W": -1}[action.kind]
            if action.kind == "I":
                weights[rank].append(action._replace(kind="W"))
    return squeezed


def dualpipe_v(p, m, v=2):
    """In the middle of a step each F stands beside I and W of the rank's other stage. DeepSeek, "DualPipeV" (2025),
    which is DualPipe cut in half, as Sea AI Lab proposed, so that no rank holds a layer that another has.

    DeepSeek runs the neighbours as one, F&B, so that the exchange of one's experts hides behind the other's products.
    Here they run one after the other. DeepSeek's bubble, (p-1) (F&B + B - 3W) of a stage's times, is p-1 if nothing
    hides.

    The phases are DeepSeek's. The digit of a word says which of the rank's two stages runs its next micro-batch.
    Fewer than 2p micro-batches run as the first m of 2p. For p = 2, m = 4, a rank's second stage in brackets:

        rank 0  F0  F1  F2 (F0)(I0)(W0)(F1) F3 (I1)(W1)(F2) I0 (I2) W0 (W2)(F3) I1 (I3) I2  W1  I3 (W3) W2  W3
        rank 1  F0 (F0) F1 (F1) F2 (I0)(W0)(F2) I0  W0  F3 (I1)(W1)(F3) I1 (I2) I2 (I3) I3  W1 (W2) W2 (W3) W3
    """
    lists = []
    for rank in range(p):
        later = p - 1 - rank
        phases = [("F0", 2 * later), ("F0 F1", rank + 1),             # fill: down the V, then up, too
                  ("I1 F1", later),                                   # the first gradients, while all F0 so far wait
                  ("F0 I1 F1 I0", max(m, 2 * p) - 2 * p + rank + 1),  # steady
                  ("I1 F1 I0", later), ("I1 I0", rank + 1), ("I0", later)]  # drain, in the opposite order
        stages = {"0": rank, "1": 2 * p - 1 - rank}
        following = defaultdict(itertools.count)  # word -> the micro-batches that it runs, one after the other
        actions = []
        for words, times in phases:
            for word in words.split() * times:
                actions.append(Action(word[0], stages[word[1]], next(following[word])))
        lists.append([action for action in actions if action.micro_batch < m])
    return squeeze(lists, 2 * p)


# ------------------------------------------------------------------------------------------ backward in two: I, later W

class WeightGradients:
    """Computes the weight gradients of a stage's Linears in autograd's place, because no other stage waits for them.

    What runs for a Linear, y = x W^T + b:

        F   model.Linear.forward calls `linear` below: kernels.linear(x, W detached, b detached, take)
        I   autograd calls kernels.Linear.backward: dx = dy W, and take(dy, x), which puts (W, b, dy, x) into `later`
        W   Passage.backward calls compute(W, b, dy, x): dW = dy^T x, db = sum of dy, then the hooks, such as DDP's
        B   as I, but `take` computes at once

    Norms, embeddings, routers, experts, tied weights and biases that are added after g stay with autograd, in I.
    """
    later = None  # a list during an I

    def __init__(self, module):
        linears = Linear, parallel.ColumnParallelLinear, parallel.RowParallelLinear
        uses = Counter(param for layer in module.modules() for param in layer._parameters.values())
        for layer in module.modules():
            if isinstance(layer, linears) and uses[layer.weight] == 1:
                layer.linear = partial(self.linear, layer.linear)

    def linear(self, product, x, weight, bias=None):
        """Autograd sees detached weights, so its hooks do not fire before the weight gradient exists."""
        if not x.requires_grad:  # all before it is frozen, so nothing detached would have a backward
            return product(x, weight, bias)
        take = partial(self.take, weight, bias)
        return product(x, weight.detach(), None if bias is None else bias.detach(), take)

    @contextmanager
    def put_off(self, later):
        """What an "I" runs in: its weight gradients are not computed, what they need goes into `later`."""
        self.later = later
        try:
            yield
        finally:
            self.later = None

    def take(self, *computed_from):
        if self.later is None:
            self.compute(*computed_from)
        else:
            self.later.append(computed_from)

    @torch.no_grad()
    def compute(self, weight, bias, dy, x):
        if weight.requires_grad:
            self.add(weight, dy.T, x)
        if bias is not None and bias.requires_grad:
            self.add(bias, kernels.bias_gradient(dy))

    def add(self, param, a, b=None):
        """What autograd does at the end of a backward: add a gradient, or the product a b, to .grad; call the hooks (a
        private dictionary of PyTorch's)."""
        grad = a if b is None else a @ b
        param.grad = grad if param.grad is None else param.grad.add_(grad)
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            hook(param)


SCHEDULES = parallel.SCHEDULES | {"interleaved": interleaved, "zb-h1": zero_bubble_h1, "zb-v": zb_v, "v-half": v_half,
                                  "v-min": v_min, "dualpipe-v": dualpipe_v}
