"""All ranks in one process: each is a thread, one runs at a time, and messages lie in a dictionary.

    python train.py --together --dp 2 --tp 2               a breakpoint() stops in one rank, and the others stand still
    together.join(4)                                       in place of your own program's dist.initialize
    together.run(4, body)                                  [what body() returns on each of 4 ranks of a world]
    python -m pdb train.py --together --dp 4               a breakpoint of pdb's stops in every rank that comes there

Where a debugger stops, `ranks[3]` is rank 3, as further/deadlock.py `Seen` shows it.

collectives.py, parallel.py and train.py run unchanged. PyTorch keeps groups for each thread, as its own tests want it,
and `Queues` is a backend with isend and irecv. A rank runs until it waits for a message, or has sent one. Then a draw
says who goes on. Two runs of equal `World`s are the same. If nobody can go on, `Deadlock` says who waits for what.

Read with: CS336 lecture 8; Kahn, "The Semantics of a Simple Language for Parallel Programming" (1974): a program whose
ranks receive in order, and write nothing that is still being sent, computes the same in every order.
"""

import builtins
import itertools
import random
import runpy
import sys
import threading
from bdb import BdbQuit
from collections import defaultdict
from concurrent.futures import Future
from functools import partial
from threading import current_thread
from types import SimpleNamespace

import torch
import torch.distributed as torch_dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

import collectives as dist
from further.deadlock import operation, purpose, Seen, told


class Deadlock(RuntimeError):
    """Nobody can go on. Its text says who waits for whom, in what, who has ended, and what nobody has received."""


# -------------------------------------------------------------------------------------------------------------- threads

class Task(threading.Thread):
    """Runs when it is its turn: a rank, or an operation of one's worker. serves: what the operation is for."""

    def __init__(self, world, name, body, rank=None, serves=""):
        super().__init__(name=name, daemon=True)
        self.world, self.body, self.rank, self.serves = world, body, rank or self, serves
        self.done, self.waits_for, self.turn = Future(), "", threading.Semaphore(0)
        self.groups = SimpleNamespace()  # PyTorch's bookkeeping of them
        self.process = dist.Process({"ours": dist.Link, "ring": dist.Link})
        world.can_go_on(self)
        self.start()

    def wait_for_turn(self):
        """A debugger goes along from rank to rank, because Python traces each thread by itself."""
        self.turn.acquire()
        sys.settrace(self.world.trace)
        for frame in Seen(self).frames() if self.world.trace else ():  # calls that have begun
            frame.f_trace = self.world.trace

    def run(self):
        self.wait_for_turn()
        try:
            self.done.set_result(self.body())
        except BdbQuit as error:
            self.world.quit = error
            return self.world.ended.set()
        except BaseException as error:  # noqa: BLE001  who asks for the result raises it
            self.done.set_exception(error)
        self.body = None  # whose tensors may go
        self.world.wake(self)
        self.world.pass_on()

    def result(self, waits_for=""):
        """What body() returns, when it has."""
        while not self.done.done():
            self.world.sleep(self, waits_for)
        return self.done.result()

    def frame(self):
        """Where it stands; None if it has ended."""
        return sys._current_frames().get(self.ident)


class Worker:
    """A rank's collectives.Worker. An operation is a thread, which waits for the one before."""
    last = None

    def start(self, function):
        me, before = current_thread(), self.last

        def operation():
            if before:
                before.result()
            return function()

        self.last = task = Task(me.world, f"{me.name}'s worker", operation, me, purpose(sys._getframe()))
        me.world.sleep()
        return dist.Handle(lambda: task.result("its worker"), task.done.done)

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
        self.ended = threading.Event()
        self.trace = self.quit = None  # what Python traces the rank with whose turn it is; a debugger's end

    def can_go_on(self, task):
        self.ready[task.rank is not task].append(task)

    def sleep(self, event=None, waits_for=""):
        """Until `wake(event)`; without one, let others run."""
        me = current_thread()
        me.waits_for = waits_for
        if event:
            self.asleep[event].append(me)
        else:
            self.can_go_on(me)
        self.pass_on()
        me.wait_for_turn()
        if self.deadlock and waits_for:
            raise Deadlock(self.deadlock)

    def wake(self, event):
        for task in self.asleep.pop(event, ()):
            task.waits_for = ""
            self.can_go_on(task)

    def post(self, ticket, tensor, what):
        if not tensor.is_contiguous():
            raise ValueError("a message must be contiguous")  # gloo and NCCL want it, too
        self.messages[ticket] = tensor, what
        self.deliver(ticket)

    def deliver(self, ticket):
        """The message goes where it belongs, if both its ends are here."""
        if ticket in self.messages and ticket in self.posted:
            self.posted.pop(ticket).copy_(self.messages.pop(ticket)[0])
            self.wake(ticket)

    def wait(self, ticket, waits_for):
        """Until the message is where it belongs."""
        if ticket in self.messages or ticket in self.posted:
            self.sleep(ticket, waits_for)

    def pass_on(self):
        """Draw who runs next. What PyTorch and collectives.py keep once a process becomes his."""
        if not any(self.ready):
            self.deadlock = told(self)
            if not self.deadlock:
                return self.ended.set()
            for event in [*self.asleep]:
                self.wake(event)
        able = [*filter(None, self.ready)]
        tasks = {"late": able[0], "eager": able[-1]}.get(self.worker) or self.random.choice(able)
        task = tasks.pop(self.random.randrange(len(tasks)))
        ThreadLocalWorld._world = task.rank.groups
        dist.process = task.rank.process
        self.trace = sys.gettrace()
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
        return *key, next(current_thread().world.counts[end, key])

    def send(self, tensors, dst, tag):
        world, ticket = current_thread().world, self.ticket("send", self.rank(), dst, tag)
        tensor = tensors[0].data if world.rendezvous else tensors[0].data.clone()
        world.post(ticket, tensor, operation(sys._getframe()))
        world.sleep()
        return dist.Handle(lambda: world.rendezvous and world.wait(ticket, f"rank {ticket[2]} to receive"))

    def recv(self, tensors, src, tag):
        world, ticket = current_thread().world, self.ticket("receive", src, self.rank(), tag)
        world.posted[ticket] = tensors[0].data
        world.deliver(ticket)
        return dist.Handle(lambda: world.wait(ticket, f"rank {ticket[1]}"))


dist.DEVICE["together"] = "cpu"
if "together" not in torch_dist.Backend.backend_list:  # it may be imported anew
    torch_dist.Backend.register_backend("together",
                                        lambda store, rank, size, timeout: Queues(rank, size), devices=["cpu"])


# ---------------------------------------------------------------------------------------------------------------- start

def run(n, body, world=None):
    """[body() of each of n ranks, which have joined one another]. Raises the first error, or the Deadlock, or BdbQuit
    where a debugger was left."""
    world, store = world or World(), torch_dist.HashStore()

    def joined(rank):
        dist.init_process_group("together", rank=rank, world_size=n, store=store)
        return body()

    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    kept, groups, hook = (dist.Worker, dist.process), c10d._world, sys.excepthook
    before = getattr(builtins, "ranks", None)
    dist.Worker, c10d._world = Worker, ThreadLocalWorld()
    isolate(True)
    try:
        world.ranks += [Task(world, f"rank {rank}", partial(joined, rank)) for rank in range(n)]
        builtins.ranks = [*map(Seen, world.ranks)]  # a debugger finds it in any frame
        world.pass_on()
        world.ended.wait()
    finally:
        isolate(False)
        dist.Worker, dist.process = kept
        c10d._world, sys.excepthook = groups, hook
        builtins.ranks = before
    if world.quit:
        raise world.quit
    for rank in sorted(world.ranks, key=lambda rank: isinstance(rank.done.exception(), Deadlock)):
        rank.done.result()  # raises what another rank may wait for in vain
    return [rank.done.result() for rank in world.ranks]


def join(n):
    """In place of `dist.initialize`: run this program again as each of n ranks, and exit. There, the device."""
    if not isinstance(current_thread(), Task):
        try:
            run(n, lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
        except BdbQuit:
            if sys.gettrace():  # `python -m pdb` ends then
                raise
        sys.exit()
    return torch.device("cpu")
