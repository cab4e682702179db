"""F and B as one: what if a micro-batch computes while another one's tokens travel to their experts?

    torchrun --nproc_per_node 2 train.py --plain --dp 2 --ep 2 --experts 4 --micro-batches 8 --pairs

Read with: DeepSeek-V3 (2024), section 3.2.1, "DualPipe".
"""

import functools
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Semaphore

import torch

import collectives as dist
from further.expert_parallel import visit
from further.experts import Experts
from further.lists import check, checked
from parallel import add_transfer, goes_to, needs, ranks_of_stages, result_of


# Rows travel to their experts and back in each pass, which has nothing to do meanwhile. Another micro-batch's pass has.
# So an F and a B that stand side by side in a rank's list run as one, F+B, in turns that change at exchanges:
#
#     F of 3    attention ┄┄┄ there ┄┄┄┄ experts ┄┄┄ back ┄┄┄┄ attention       ┄┄┄ rows travel
#     B of 1              sums ┄┄┄┄ back ┄┄┄┄┄ experts ┄┄┄ there ┄┄┄┄ attention
#
# Only one pass computes at a time, so each computes what it would alone. All ranks that share out experts run the same
# list, so turns change at the same places, and collectives keep one order.
# It costs the memory of one more micro-batch: without pairs a B frees its activations before the next F.

class Turns:
    """Two passes, each in a thread of its own, of which one computes and the other waits for its rows. (A backward runs
    inside of autograd, from where no generator could yield.)"""

    def __init__(self, device):
        self.helper = ThreadPoolExecutor(1, initializer=lambda: device.type == "cuda" and torch.cuda.set_device(device))
        self.gates = [Semaphore(0), Semaphore(0)]
        self.now = 0   # which pass computes
        self.left = 0  # how many have not ended

    def both(self, one, other):
        """Run two functions, the first one first. What one of them raises is raised when the other has ended."""
        self.left = 2
        self.now = 0
        second = self.helper.submit(self.one_of_both, 1, other)
        self.gates[0].release()
        try:
            self.one_of_both(0, one)
        finally:
            second.result()

    def one_of_both(self, number, run):
        self.gates[number].acquire()
        try:
            run()
        finally:
            self.left -= 1
            if self.left:
                self.now = 1 - number
                self.gates[self.now].release()

    def change(self):
        """The other pass's turn, until that changes turns, too, or ends. Nothing happens if it has ended."""
        if self.left == 2:
            me = self.now
            self.now = 1 - me
            self.gates[1 - me].release()
            self.gates[me].acquire()

    def exchange(self, rows, group, sends, receives):
        """As expert_parallel's, but the other pass computes until the rows are there."""
        incoming = rows.new_empty(sum(receives), rows.shape[1])
        handle = dist.all_to_all_single(incoming, rows.contiguous(), receives, sends, group, async_op=True)
        self.change()
        handle.wait()
        return incoming


# ---------------------------------------------------------------------------------------------------------------- lists

def is_pair(one, other):
    """Whether two computations of a list may run as one: neither waits for the other."""
    return {one.kind, other.kind} in ({"F", "B"}, {"F", "I"}) and one.micro_batch != other.micro_batch


def in_pairs(actions):
    """[[action] or [action, the one that runs with it], ...] of a list, lowered or not."""
    actions = [*actions]
    while actions:
        n = 2 if len(actions) > 1 and is_pair(*actions[:2]) else 1
        yield actions[:n]
        actions = actions[n:]


def lower(lists):
    """As parallel.lower, but neighbours that make a pair stay neighbours: what both need is received before them, and
    what they have made is sent after them. Where all ranks would wait for each other, one pair is taken apart.
    """
    stage_to_rank = ranks_of_stages(lists)
    left = [deque(in_pairs(actions)) for actions in lists]
    lowered = [[] for _ in lists]
    done = set()

    def can_run(some):
        return done.issuperset(needed for action in some for needed in needs(action, stage_to_rank))

    while any(left):
        turn = [(rank, units.popleft()) for rank, units in enumerate(left) if units and can_run(units[0])]
        if not turn:
            units = next(units for units in left if units and can_run(units[0][:1]))
            units.extendleft([[action] for action in reversed(units.popleft())])
        for rank, some in turn:
            lowered[rank] += some
            for action in some:
                done |= {action, result_of(action)}
                if result := result_of(action):
                    add_transfer(lowered, result, rank, stage_to_rank.get(goes_to(result)))
    return lowered


@functools.cache
def checked_pairs(schedule, p, m, v):
    """As lists.checked, with pairs."""
    checked(schedule, p, m, v)  # else `lower` could find no rank that goes on
    lists = lower(schedule(p, m, v))
    check(lists, m)
    return lists


def paired(pipeline):
    """A class of pipelines as `pipeline`, which runs pairs."""
    class PairedPipeline(pipeline):
        def __init__(self, stages, *args, **options):
            super().__init__(stages, *args, **options)
            self.turns = Turns(self.device)
            for experts in [part for stage in stages.values() for part in stage.modules() if isinstance(part, Experts)]:
                experts.mlps = partial(visit, *experts.mlps.args, travel=self.turns.exchange)

        def do_all(self, actions):
            for action, *other in in_pairs(actions):
                with self.around(action):
                    if other:
                        self.turns.both(partial(self.do, action), partial(self.do, *other))
                    else:
                        self.do(action)
                for done in other:
                    with self.around(done):  # those who watch see both; the first one's time is that of both
                        pass

    return PairedPipeline
