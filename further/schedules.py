"""More schedules: a smaller bubble than 1F1B's, or fewer activations on each rank.

A schedule is a function of (p ranks, m micro-batches, v stages a rank) that returns a list of actions for each rank.
Its name enters SCHEDULES, and `--schedule` takes it. Idle time of every rank, where 1F1B's is (p-1) (F + I + W):

    interleaved       (p-1) (F + I + W) / v     v stages a rank, each 1/v as long; holds p + (p-1 - 2r) / v
    ZB-H1             (p-1) (F + I - W)         rank r runs W r micro-batches late; at most p activations a rank

I and W are the two halves of a B, in that order: I computes the gradient of the stage's input, which the stage before
waits for, W those of its weights, which nobody waits for. The schedules in a V are below.

    torchrun --nproc_per_node 2 train.py --plain --pp 2 --micro-batches 4 --schedule zb-h1
"""

import itertools
from collections import defaultdict, deque

import torch
from torch.autograd.graph import get_gradient_edge

import collectives as dist
import parallel
from parallel import Action, alternate, MicroBatch, needs, one_f_one_b, ranks_of_stages, result_of, whole_batch


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
    """1F1B with backward in two: rank r runs W r micro-batches after I, so that it sends the result of I earlier. For
    p = 2, m = 4, with F = I = W, and dots where a rank idles:

        rank 0   F0 F1 .. I0 W0 F2 I1 W1 F3 I2 W2 I3 W3     in 1F1B it idles 3 units, at first until rank 1's W0 is done
        rank 1   .. F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3     I1 runs before W0, so rank 0 gets its result a unit earlier
    """
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
    """Each rank's F and I, in the order in which they would start if a micro-batch began every 6 units of time: so long
    a rank needs for a micro-batch, because F, I and W of each of its two stages take a unit. Qi et al., "Pipeline
    Parallelism with Controllable Memory" (2024), call what one micro-batch needs the building block.

    Down the V, a micro-batch's F starts `down` units later on each next rank; up the V, `up` units later. Then comes
    the `pause`, and I goes back in the same steps. A rank's two stages together hold a micro-batch for about
    2 (p-1) (down + up) units. Every 6 units another one begins, so they hold a sixth as many activations.

    The pause keeps a rank's two F and two I apart, also from those of later micro-batches, which start 6, 12, ... units
    later. V-Half for p = 2 (down 2, up 1), on rank 0, its second stage in brackets. Without a pause (I0) would start
    with F1, I0 with (F1), and (I1) with F2:

        time          0    1    2    3    4    5    6    7    8    9    10   11   12   13   14
        without       F0                       (F0) F1!                      I0!  F2!
        pause of 3    F0                       (F0) F1             (I0)      (F1) F2        I0
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
    """Each rank runs its F and I in the order given, each as early as it can if every action takes equally long. W are
    put between them: where the rank would idle, or where an F comes next and the rank already holds `most` activations
    (each of one stage)."""
    stage_to_rank = ranks_of_stages(lists)
    left = [deque(actions) for actions in lists]
    weights = [deque() for _ in lists]  # each W whose I has run
    held = [0] * len(lists)
    squeezed = [[] for _ in lists]
    done = set()
    while any(left) or any(weights):
        turn = []
        for rank, actions in enumerate(left):
            ready = bool(actions) and done.issuperset(needs(actions[0], stage_to_rank))
            full = ready and actions[0].kind == "F" and held[rank] >= most
            if weights[rank] and (full or not ready):
                turn.append((rank, weights[rank].popleft()))
            elif ready:
                turn.append((rank, actions.popleft()))
        if not turn:
            raise ValueError(f"no rank can go on: {[actions[0] for actions in left if actions]} come first")
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

class HalvedMicroBatch(MicroBatch):
    """A MicroBatch whose backward may come in halves. What a piece of two layers f and g computes:

        F   h = f(x), y = g(h)
        I   dy -> dh -> dx          and nothing for weights
        W   dy -> g's weights; dh -> f's weights

    autograd does not keep dh. So W computes dh once more, and I and W together take longer than B: about 3 F in place
    of 2. (Under tensor parallelism f's all-reduce runs twice, too. With ZeRO-3 W gathers weights once more.) Numbers
    and order of a schedule are right all the same.
    """

    def output(self, **beside):
        y = super().output(**beside)
        # W starts here and not at the loss, which may write its gradient over its input.
        self.output_edge = get_gradient_edge(y) if y.requires_grad else None
        return y

    def backward_input(self, dy):
        """I. Returns the gradient of x, None for tokens, or where all pieces so far are frozen."""
        if not self.edge:
            return None
        inputs = [self.output_edge] + [self.x] * self.x.requires_grad
        self.dy, *dx = torch.autograd.grad(self.edge, inputs, dy, retain_graph=True)
        return dx[0] if dx else None

    def backward_weights(self):
        """W, after I."""
        weights = [param for param in self.module.parameters() if param.requires_grad]
        if weights and self.edge:
            torch.autograd.backward(self.output_edge, self.dy, inputs=weights)


class HalvedPipeline(parallel.Pipeline):
    """A Pipeline whose lists may have I and W."""
    micro_batch = HalvedMicroBatch
    computes = "FBIW"

    def do(self, action):
        match action.kind:
            case "I":
                self.wait_for_weights(action.stage)
                self.backward_input(action)
            case "W":
                self.wait_for_weights(action.stage)
                self.backward_weights(action)
            case _:
                super().do(action)

    def backward_input(self, action):
        _, piece, i = action
        dx = self.micro_batches[piece, i].backward_input(self.gradient_for(piece, i))
        if piece > 0:
            self.results[result_of(action)] = dist.Handle(), dx

    def backward_weights(self, action):
        _, piece, i = action
        self.micro_batches.pop((piece, i)).backward_weights()


SCHEDULES = parallel.SCHEDULES | {"interleaved": interleaved, "zb-h1": zero_bubble_h1, "zb-v": zb_v, "v-half": v_half,
                                  "v-min": v_min, "dualpipe-v": dualpipe_v}
