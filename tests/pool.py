"""Processes for the tests: pools that serve one test after the other, and a second pytest process beside the first."""

import concurrent.futures
import contextlib
import functools
import gc
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import re
import signal
import sys
import time
import traceback

import pytest
import torch
import torch.distributed as torch_dist

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
if not GPUS:
    os.environ["TRITON_INTERPRET"] = "1"  # read when `kernels` is imported; what runs them asks for them by name

import collectives as dist
import kernels
import parallel
import safe.launch
import train
from fast import edition
from fast.edition import Fast


HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Beside:
    """Two processes that run the tests: the first takes them from the front, the second, forked, from the back."""

    def __init__(self, session):
        self.session, self.items, self.config = session, session.items, session.config
        self.taken = multiprocessing.Array("i", 2)  # how many each has taken
        self.folder = self.config._tmp_path_factory.mktemp("beside")  # so both have one folder for all that they write
        self.process = multiprocessing.get_context("fork").Process(target=self.run_second)
        self.process.start()

    def take(self, side):
        """The number of the process's next test; None if all are taken."""
        with self.taken.get_lock():
            if sum(self.taken) == len(self.items):
                return None
            self.taken[side] += 1
            return len(self.items) - self.taken[1] if side else self.taken[0] - 1

    def run(self, side):
        order = [*self.items, None]  # whoever comes last here, the session's fixtures go when it ends
        while (number := self.take(side)) is not None:
            following = order[number - 1 if side else number + 1]
            self.config.hook.pytest_runtest_protocol(item=order[number], nextitem=following)
            if self.session.shouldfail or self.session.shouldstop:
                raise self.session.Failed(self.session.shouldfail or self.session.shouldstop)

    def run_second(self):
        capture = self.config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # into files that are the first process's too
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1), os.dup2(nowhere.fileno(), 2)
        capture.start_global_capturing()
        capture.suspend_global_capture()
        self.config.pluginmanager.register(self)
        # The first process's forkserver serves both, and this one would ask whether its own child still runs.
        multiprocessing.forkserver._forkserver.ensure_running = int
        try:
            self.run(1)
            self.session._setupstate.teardown_exact(None)  # the session's fixtures
        finally:  # Python would wait for processes that are left, and they may not end on SIGTERM
            for process in multiprocessing.active_children():
                process.kill()

    def pytest_runtest_logreport(self, report):
        """Of the second process: the first one shows its reports."""
        with open(self.folder / "reports", "ab") as file:
            pickle.dump(report, file)

    def show_second(self):
        """What the second process has reported, when it has ended; a test of which it has not is lost."""
        self.process.join()
        show = self.config.hook.pytest_runtest_logreport
        left = {item.nodeid: item for item in self.items[len(self.items) - self.taken[1]:]}
        with contextlib.suppress(EOFError), open(self.folder / "reports", "rb") as file:
            while True:
                report = pickle.load(file)
                show(report=report)
                if report.when == "teardown":
                    del left[report.nodeid]
        lost = f"the second process ended before this test did, with exit code {self.process.exitcode}"
        for item in left.values():
            show(report=pytest.TestReport(item.nodeid, item.location, {}, "failed", lost, "call"))


def pytest_runtestloop(session):
    """None: pytest's own loop follows."""
    edition.on()  # in this process; workers of a pool call it themselves, or do not
    option = session.config.option
    alone = option.collectonly or option.usepdb or option.capture != "fd" or session.testsfailed
    alone = alone or safe.launch.cores() == 1 or hasattr(session.config, "workerinput")  # xdist has its own processes
    if alone or len(session.items) < 50 or not safe.launch.may_fork():  # a few tests are not worth pools of their own
        return None
    torch.set_num_threads(1)
    beside = Beside(session)
    try:
        beside.run(0)
        beside.show_second()
    finally:
        if beside.process.is_alive():  # after Ctrl-C, or a failure under -x
            os.kill(beside.process.pid, signal.SIGINT)
        beside.process.join()
    return True


def pytest_runtest_setup(item):
    torch.manual_seed(0)  # whatever ran before in this process


# ---------------------------------------------------------------------------------------------------- pool of processes

plain_here = False  # whether this process runs the reference alone


def _worker(rank, size, device_type, port, pipe, plain):
    global plain_here
    plain_here = plain
    # A thread that gets a message takes no core from the one that sends it, which holds a lock: where it does, gloo
    # asks for the lock again and again until its time is over. That took a third of these processes' time.
    with contextlib.suppress(AttributeError, OSError):  # not on every system, nor in every container
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    gc.freeze()  # what is imported stays: to look at it again and again would take half of some tests
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port),
                      TORCH_GLOO_LAZY_INIT="1")  # only ranks that send to each other are connected
    if not plain:
        edition.on()
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    torch_dist.init_process_group("nccl" if device_type == "cuda" else "gloo", rank=rank, world_size=size,
                                  store=torch_dist.TCPStore("127.0.0.1", port, is_master=False),
                                  device_id=device if device_type == "cuda" else None)
    # The CPU is the default anyway, and to say so costs every call of torch a few microseconds.
    if device_type == "cuda":
        torch.set_default_device(device)
    while True:
        job = pipe.recv()
        if job is None:
            os._exit(0)
        function, args, options = job
        try:
            result = True, function(*args, **options)
        except pytest.skip.Exception as reason:
            result = None, str(reason)
        except BaseException:  # noqa: BLE001  the test's own process raises it
            result = False, traceback.format_exc()
        pipe.send(result)
        # Each holds sockets, and a thread that wakes a hundred times a second until nothing refers to the group: some
        # hundred such threads would take a sixth of two cores. Cycles refer to it, so the garbage collector must come.
        left = [group for group in torch_dist.distributed_c10d._world.pg_map if group is not torch_dist.group.WORLD]
        if left:
            while left:
                dist.destroy_process_group(left.pop(0))
            gc.collect()
        dist.use(None, "ours")  # whoever asked for something else, the next test did not
        kernels.use("auto")


def forkserver():
    """Starts processes at once: from one that has imported what is slow, and has left CUDA alone, which cannot be
    forked."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_all"] * (not GPUS) + ["numpy", "pytest", "bench", "torch._dynamo"])
    return context


def pytest_configure(config):
    """The forkserver imports PyTorch while pytest collects."""
    if not config.option.collectonly:
        forkserver()
        multiprocessing.forkserver.ensure_running()


def in_new_process(function, *args):
    """What a module's function returns in a process without groups, in which fast/ is not on. It has one thread: of
    small tensors two take ten times the time of one, because they wait for each other, and for the other tests."""
    with concurrent.futures.ProcessPoolExecutor(1, forkserver(), torch.set_num_threads, (1,)) as one:
        return one.submit(function, *args).result()


class Pool:
    """`size` processes that have joined one group; run(function, *args) calls a module's function on all of them.

    plain: they run the reference alone."""

    def __init__(self, size, device_type, plain=False):
        context, self.processes, self.pipes, self.device_type, self.plain = forkserver(), [], [], device_type, plain
        self.store = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(size):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            self.processes.append(context.Process(target=_worker, daemon=True,
                                                  args=(rank, size, device_type, self.store.port, theirs, plain)))
            self.processes[-1].start()

    def run(self, function, *args, timeout=300 if GPUS else 200, again=True, **options):  # there, kernels compile first
        """Results in rank order. The first rank's exception fails the test; silence breaks the pool, which starts anew.

        again: where gloo could not connect its processes, which on loaded machines happens once in many thousand
        groups before any code of ours runs, new processes try once more."""
        if not self.processes:
            self.__init__(len(self.pipes), self.device_type, self.plain)
        for pipe in self.pipes:
            pipe.send((function, args, options))
        results, left, deadline = {}, [*self.pipes], time.time() + timeout
        while left:
            ready = multiprocessing.connection.wait(left, max(0.0, deadline - time.time()))
            if not ready:
                self.stop()
                pytest.fail(f"rank {self.pipes.index(left[0])} was silent for {timeout} s")
            rank, (ok, value) = self.pipes.index(ready[0]), ready[0].recv()
            left.remove(ready[0])
            if ok is False:
                self.stop()
                if again and "Gloo connectFullMesh failed" in value:
                    return self.run(function, *args, timeout=timeout, again=False, **options)
                pytest.fail(f"rank {rank}:\n{value}")
            results[rank] = value
        if ok is None:  # all ranks skip alike
            pytest.skip(value)
        return [results[rank] for rank in range(len(self.pipes))]

    def stop(self):
        for process in self.processes:
            process.kill()
        self.processes = []


DEVICES = ["cpu"] + (["cuda"] if GPUS > 1 else [])


@contextlib.contextmanager
def pools(device_type, plain=False):
    """get(size): the Pool of that world."""
    started = {}

    def get(size):
        if device_type == "cuda" and size > GPUS:
            pytest.skip(f"{size} ranks need {size} GPUs, this machine has {GPUS}")
        if size not in started or not started[size].processes:
            started[size] = Pool(size, device_type, plain)
        return started[size]

    yield get
    for p in started.values():
        p.stop()


@pytest.fixture(scope="session")
def plain_pool():
    """As `pool`, with processes that run the reference alone."""
    with pools("cpu", plain=True) as get:
        get.edition = parallel.Reference
        yield get


@pytest.fixture(scope="session", params=DEVICES)
def pool(request):
    """pool(size): the processes of that world, which run fast/'s edition; "plain": the reference. pool.edition is
    their edition."""
    if request.param == "plain":
        yield request.getfixturevalue("plain_pool")
        return
    with pools(request.param) as get:
        get.edition = Fast
        yield get


BOTH = [*DEVICES, "plain"]
parametrize = pytest.mark.parametrize
on_both = parametrize("pool", BOTH, indirect=True)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
on_cpus_both = parametrize("pool", ["cpu", "plain"], indirect=True)
on_cpus = parametrize("pool", DEVICES[:1], indirect=True)
on_plain = parametrize("pool", ["plain"], indirect=True)
on_gpus = parametrize("pool", DEVICES[1:], indirect=True)


def on_ranks(size=None):
    """Make a test of a function that all ranks of a pool run, `size` of them or as the test's parameter `size` says.
    Its parameters are the test's, but for `rank` and `size`, which are its place; what it asserts, it asserts there.

        @parametrize("stage", [1, 2])
        @on_ranks(2)
        def test_zero(stage): ...
    """
    def test_of(function):
        @functools.wraps(function)
        def test(pool, size=size, **parameters):
            pool(size).run(run_body, function.__module__, function.__name__, **parameters)

        own = [name for name in inspect.signature(function).parameters if name not in ("rank", "size")]
        names = ["pool", *["size"] * (size is None), *own]
        test.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names])
        return test
    return test_of


def run_body(module, name, /, **parameters):
    """What `on_ranks` has made a test of. It travels by name, because the test stands in its place."""
    function = getattr(importlib.import_module(module), name).__wrapped__
    place = {"rank": dist.get_rank(), "size": dist.get_world_size()}
    function(**parameters, **{key: place[key] for key in inspect.signature(function).parameters.keys() & place})


@contextlib.contextmanager
def uncollected():
    """Inside, no garbage is collected: what a cycle keeps alive stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def table(text):
    """Its rows, split into cells where two or more spaces stand; whole numbers are numbers."""
    rows = [re.split("  +", line.strip()) for line in text.strip().splitlines()]
    return [[int(cell) if cell.isdigit() else cell for cell in row] for row in rows]


def is_plain():
    """Whether this process runs the reference alone."""
    return plain_here


def edition_here():
    """The edition that a test of this process means if it names none: its own."""
    return parallel.Reference if plain_here else Fast


def parallelize(config, layout, device, source=None, optimizer=None, edition=None):
    """A GPT of an edition, this process's if it is left out."""
    return train.parallelize(config, layout, device, source, optimizer, edition or edition_here())


def runs_kernels():
    """In a process of a pool: whether Triton runs kernels on its device."""
    return kernels.HAVE_TRITON and (kernels.INTERPRETED or torch.get_default_device().type == "cuda")


def needs_kernels():
    """In a process of a pool: the test is skipped where no kernel runs."""
    if not runs_kernels():
        pytest.skip("no Triton for this device")


def close(a, b, tolerance=1e-10):
    """Relative to the largest value; NaN is never close."""
    a, b = (torch.as_tensor(x).detach().double() for x in (a, b))
    return (a.shape == b.shape and float((a - b).abs().max() if a.numel() else 0)
            <= tolerance * max(1e-3, float(b.abs().max()) if b.numel() else 1))
