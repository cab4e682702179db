"""All ranks in one process: each is a thread, one runs at a time, and messages lie in a dictionary.

    python train.py --together --dp 2 --tp 2               a breakpoint() stops in one rank, and the others stand still
    together.join(4)                                       in place of your own program's dist.initialize
    together.run(4, body)                                  [what body() returns on each rank]; it joins as above

collectives.py, parallel.py and train.py run unchanged. PyTorch keeps groups for each thread, as its own tests want it,
and `Queues` is a backend with isend and irecv. A rank runs until it waits for a message, or has sent one. Then a draw
says who goes on. Two runs of equal `World`s are the same. If nobody can go on, `Deadlock` says who waits for what.

Read with: CS336 lecture 8; Kahn, "The Semantics of a Simple Language for Parallel Programming" (1974): a program whose
ranks receive in order, and write nothing that is still being sent, computes the same in every order.
"""

import itertools
import random
import runpy
import sys
import threading
from collections import defaultdict

import torch
import torch.distributed as torch_dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

import collectives as dist
from further.deadlock import operation, purpose, told


class Deadlock(RuntimeError):
    """Nobody can go on. Its text says who waits for whom, in what, who has ended, and what nobody has received."""


# -------------------------------------------------------------------------------------------------------------- threads

class Task:
    """A thread that runs when it is its turn: a rank, or an operation of one's worker. serves: what the operation is
    for."""

    def __init__(self, world, name, body, rank=None, serves=""):
        self.world, self.name, self.body, self.rank, self.serves = world, name, body, rank or self, serves
        self.result = self.error = None  # of body()
        self.waits_for, self.ended = "", False
        self.own = {"traffic_log": defaultdict(dist.Traffic), "links": defaultdict(dict), "registered": {}}
        self.turn, self.thread = threading.Semaphore(0), threading.Thread(target=self.main, daemon=True)
        self.thread.task = self
        world.can_go_on(self)
        self.thread.start()

    def main(self):
        self.turn.acquire()
        try:
            self.result = self.body()
        except BaseException as error:  # noqa: BLE001  who joins it raises it
            self.error = error
        self.ended, self.body = True, None  # whose tensors may go
        self.world.wake(self)
        self.world.pass_on()

    def join(self, waits_for=""):
        """What body() returns, when it has."""
        while not self.ended:
            self.world.sleep(self, waits_for)
        self.world.follow(self)
        if self.error:
            raise self.error
        return self.result

    def frame(self):
        """Where it stands."""
        return sys._current_frames()[self.thread.ident]


class Worlds(ThreadLocalWorld):
    """PyTorch's bookkeeping of groups, for each thread."""
    comms = []  # before 2.12 it has none, and destroy_process_group asks


def current():
    """The Task that runs; None outside of all."""
    return getattr(threading.current_thread(), "task", None)


class Worker:
    """A rank's collectives.Worker. An operation is a thread, which waits for the one before."""

    def __init__(self):
        self.last, self.groups = None, ThreadLocalWorld._world.world

    def start(self, function):
        me, before = current(), self.last

        def operation():
            ThreadLocalWorld._world.world = self.groups
            me.world.follow(me)
            if before:
                before.join()
            return function()

        self.last = task = Task(me.world, f"{me.name}'s worker", operation, me, purpose(sys._getframe()))
        if me.world.worker == "eager":
            me.world.sleep()
        return dist.Handle(lambda: task.join("its worker"), lambda: task.ended)

    def close(self):
        """No thread is left when its operations have ended."""


class World:
    """All ranks, and the order in which they run. No library promises one, so a program that is right gives the same
    bits in each.

        seed         of the draws
        rendezvous   a send lasts until its irecv has begun, and reads its tensor then; else it copies
        worker       what `async_op` starts runs "eager", before all else; "late", after all; or as "drawn"

    ready: (ranks, workers) that can go on. asleep: the other tasks, {event: tasks}. messages: {ticket: (tensor, in what
    operation)}, sent and not received; posted: {ticket: tensor}, what irecv waits for. A ticket is (group, sender,
    receiver, tag, number).
    """

    def __init__(self, seed=0, rendezvous=False, worker="drawn"):
        self.random, self.rendezvous, self.worker = random.Random(seed), rendezvous, worker
        self.ready, self.asleep, self.ranks, self.deadlock = ([], []), defaultdict(list), [], ""
        self.messages, self.posted, self.counts = {}, {}, defaultdict(itertools.count)
        self.store, self.ended = torch_dist.HashStore(), threading.Event()

    def can_go_on(self, task):
        self.ready[task.rank is not task].append(task)

    def sleep(self, event=None, waits_for=""):
        """Until `wake(event)`; without one, let others run."""
        me = current()
        me.waits_for = waits_for
        if event:
            self.asleep[event].append(me)
        else:
            self.can_go_on(me)
        self.pass_on()
        me.turn.acquire()
        if self.deadlock and waits_for:
            raise Deadlock(self.deadlock)

    def wake(self, event):
        for task in self.asleep.pop(event, ()):
            task.waits_for = ""
            self.can_go_on(task)

    def post(self, ticket, tensor, what):
        self.messages[ticket] = tensor, what
        self.wake(ticket)

    def moved(self, ticket):
        """Whether a message is where it belongs; it goes there if both its ends are here."""
        if ticket in self.messages and ticket in self.posted:
            self.posted.pop(ticket).copy_(self.messages.pop(ticket)[0])
            self.wake(ticket)
        return ticket not in self.messages and ticket not in self.posted

    def follow(self, task):
        """What runs needs what the task has done. For a subclass with a clock."""

    def pass_on(self):
        """Draw who runs next. What collectives.py keeps once a process becomes his."""
        if not any(self.ready):
            self.deadlock = told(self)
            if not self.deadlock:
                return self.ended.set()
            for event in [*self.asleep]:
                self.wake(event)
        able = [*filter(None, self.ready)]
        tasks = {"late": able[0], "eager": able[-1]}.get(self.worker) or self.random.choice(able)
        task = tasks.pop(self.random.randrange(len(tasks)))
        vars(dist).update(task.rank.own)
        task.turn.release()


# ------------------------------------------------------------------------------------------------------------- messages

class Queues(torch_dist.ProcessGroup):
    """A group, of one rank's thread."""

    def getBackendName(self):
        return "together"

    @property
    def group_name(self):
        return c10d._world.pg_names[self]

    def ticket(self, end, sender, receiver, tag):
        key = self.group_name, *(torch_dist.get_global_rank(self, rank) for rank in (sender, receiver)), tag
        return *key, next(current().world.counts[end, key])

    def send(self, tensors, dst, tag):
        world, ticket = current().world, self.ticket("send", self.rank(), dst, tag)
        tensor = tensors[0].detach() if world.rendezvous else tensors[0].detach().clone()
        world.post(ticket, tensor, operation(sys._getframe()))
        world.sleep()

        def wait():
            while world.rendezvous and not world.moved(ticket):
                world.sleep(ticket, f"rank {ticket[2]} to receive")
        return dist.Handle(wait)

    def recv(self, tensors, src, tag):
        world, ticket = current().world, self.ticket("receive", src, self.rank(), tag)
        world.posted[ticket] = tensors[0].data
        world.wake(ticket)

        def wait():
            while not world.moved(ticket):
                world.sleep(ticket, f"rank {ticket[1]}")
        return dist.Handle(wait)


dist.DEVICE["together"] = "cpu"
if "together" not in torch_dist.Backend.backend_list:  # it may be imported anew
    torch_dist.Backend.register_backend("together",
                                        lambda store, rank, size, timeout: Queues(rank, size), devices=["cpu"])


# ---------------------------------------------------------------------------------------------------------------- start

def run(n, body, world=None):
    """[body() of each of n ranks]. Raises the first error, or the Deadlock."""
    world, isolate = world or World(), torch._C._distributed_c10d._set_thread_isolation_mode
    kept, groups, hook = {**vars(dist)}, c10d._world, sys.excepthook
    dist.Worker, c10d._world = Worker, Worlds()
    isolate(True)
    try:
        world.ranks += [Task(world, f"rank {number}", body) for number in range(n)]
        world.pass_on()
        world.ended.wait()
    finally:
        isolate(False)
        vars(dist).update(kept)
        c10d._world, sys.excepthook = groups, hook
    errors = [rank.error for rank in world.ranks if rank.error]
    for error in sorted(errors, key=lambda error: isinstance(error, Deadlock)):
        raise error
    return [rank.result for rank in world.ranks]


def run_joined(n, body, world=None):
    """As `run`, of ranks that have joined one another."""
    def joined():
        join(n)
        return body()
    return run(n, joined, world)


def join(n):
    """As `dist.initialize`: join the others; returns the device. Outside of them, run this program again as each of n
    ranks, and exit."""
    me = current()
    if not me:
        run(n, lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
        sys.exit()
    dist.init_process_group("together", rank=me.world.ranks.index(me), world_size=n, store=me.world.store)
    return torch.device("cpu")
