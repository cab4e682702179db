"""Starting the processes of a layout, and ending them together."""

import contextlib
import logging
import multiprocessing
import os
import pathlib
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as torch_dist

from collectives import meeting_place
from further.refusals import check_start, forget_launcher
from safe.files import tell
from further.bad_input import BadInput, reject


# --------------------------------------------------------------------------------------------------- starting processes

def started():
    """As check_start. Call it first of all."""
    for number in range(3):  # a closed stdout: else a file that is opened later would get what is printed
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    return check_start()


def cores(root="/"):
    """How many cores this process may use: a job may have fewer than its machine, by its control group (version 2)."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with contextlib.suppress(OSError):
        path = pathlib.Path(root, "proc/self/cgroup").read_text().strip().rpartition(":")[2]
        own = pathlib.Path(root, "sys/fs/cgroup", path.lstrip("/"))
        for folder in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                quota, period = map(int, (folder / "cpu.max").read_text().split())
                allowed = min(allowed, quota // period)
    return max(1, allowed)


def check_room(processes):
    """BadInput where a machine has no place for temporary files, or allows a process too few files."""
    try:
        tempfile.gettempdir()
    except OSError:
        raise BadInput("no folder takes PyTorch's temporary files: set TMPDIR to one that can be written") from None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 48 + 8 * processes
    if soft < needed <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    reject(hard < needed, f"{processes} processes need {needed} open files each, and {hard} are allowed: give ulimit "
           f"-n {needed}")


# What a scheduler, a closed terminal or a limit of time sends: the step ends, is saved, and the run with it.
ENDS = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
TAKEN = [signal.SIGINT, signal.SIGQUIT, *ENDS]  # by a launcher, which hands them on to its ranks


def start_again(processes, saved=lambda: True):
    """Run this command line again as `torchrun --nproc_per_node processes` would, in this process's place, and exit.

    SIGHUP and SIGTERM go on to the ranks, and others of ENDS as SIGTERM. Ranks have 30 s to save and end; then the exit
    code is 0 if `saved()` says so. A rank without an error must return or call sys.exit(0): the launcher waits for the
    result of a forked one.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    check_room(processes)
    keep_quiet()
    end_with_launcher()
    forget_launcher()
    for number in set(ENDS) - {signal.SIGTERM, signal.SIGHUP}:  # which torchrun hands on
        signal.signal(number, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    share_cores(processes)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by nohup, but torchrun would handle it
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # ranks inherit this
    program = os.path.abspath(sys.argv[0])  # not __main__, which is pdb's or a profiler's where they run it
    folder, file = os.path.split(program)
    words = ["--module", os.path.basename(folder)] if file == "__main__.py" else [program]  # `python -m lessons`
    if may_fork():
        # Ranks are forked from this process, because a new process would spend four seconds on importing PyTorch.
        from torch import _dynamo  # noqa: F401  optimizers need it: import it once, before the fork
        os.register_at_fork(after_in_child=forked)
        words = ["--run-path", "--start-method", "fork", program]
    # The address, because ranks would look up a machine name that may not resolve.
    flags = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1",
             "--nproc_per_node", str(processes)]
    try:
        with second_interrupt_quits():  # ranks end with this process
            run.run(run.parse_args([*flags, *words, *sys.argv[1:]]))
    except ChildFailedError as error:  # the rank itself has said what happened
        rank, failure = error.get_first_failure()
        by_signal = f"rank {rank} ended with exit code {failure.exitcode}; all others were stopped"
        sys.exit(failure.exitcode if failure.exitcode > 0 else by_signal)
    except (SignalException, KeyboardInterrupt) as stop:
        if getattr(stop, "sigval", None) in ENDS:
            sys.exit(0 if saved() else 1)
        sys.exit(130)
    sys.exit(0)


def share_cores(processes):
    """Let each rank that this process starts have its part of the cores, unless somebody has said how many."""
    if not re.fullmatch(r"\s*0*[1-9]\d*\s*(,.*)?", os.environ.get("OMP_NUM_THREADS", "")):
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // processes))


def keep_quiet():
    """Let torchrun's log leave out that it hands on a signal, and that a rank has ended, which `start_again` says."""
    for name in "distributed.elastic.agent.server", "distributed.elastic.multiprocessing":
        logging.getLogger(f"torch.{name}.api").setLevel(logging.CRITICAL)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.CRITICAL)


def threads():
    """The number of threads of this process on Linux; 0 elsewhere."""
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0


_imported = threads()


def may_fork():
    """Whether ranks can be forked from this process. They cannot if it has started threads since the imports, as the
    first large tensor does on several cores, because a fork copies no threads and PyTorch would wait for them for ever.
    They cannot if there are GPUs, because CUDA does not survive a fork, nor without /dev/shm, where a fork's queues
    have their locks."""
    with contextlib.suppress(OSError):
        multiprocessing.Lock()
        return 0 < threads() == _imported and not torch.cuda.is_available()
    return False


def is_forked():
    """Whether this process is a rank that `start_again` has forked. Its launcher waits for it to return."""
    return multiprocessing.parent_process() is not None


def forked():
    """Undo in a forked rank what belongs to its launcher: signal handlers, and a thread for each core."""
    for number in TAKEN:
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))  # a number a level of nesting


@contextlib.contextmanager
def second_interrupt_quits(hint=""):
    """Inside, the first Ctrl-C prints the hint, beside Python's handler, and the second one ends this process, also
    where it waits in a receive, in which Python calls no handler. Within a second two are one: the terminal sends it to
    all ranks, and torchrun hands it on to them."""
    heard, tell_it = os.pipe()
    os.set_blocking(tell_it, False)

    def listen():
        first = None
        while number := ord(os.read(heard, 1)):
            if number != signal.SIGINT:
                continue
            if first and time.monotonic() - first > 1:
                os._exit(130)
            if not first:
                first = time.monotonic()
                if hint:
                    tell(hint)

    before = signal.set_wakeup_fd(tell_it)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(tell_it, b"\0")  # not its closing, because a forked rank may have the pipe, too
        listener.join()  # a thread that frees what has a C++ destructor while Python exits would abort the process
        os.close(tell_it)
        os.close(heard)


def end_after_sigterm():
    """Call it when all is saved. After a signal the launcher no longer reads the result for which a forked rank waits
    at its end, and would kill it after 30 s. So it ends by itself."""
    if is_forked():
        signal.alarm(3)


def end_with_launcher():
    """Let the system kill this process when the one that started it dies, by SIGKILL too, so that no orphan stays."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:  # the thread of another launcher may end first
        import ctypes
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; at SIGTERM a rank would save and exit with 0


def settled_rendezvous(device_type, timeout):
    """For `dist.initialize`: as collectives.meeting_place, after what lets a run end cleanly."""
    end_with_launcher()
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # Ctrl-C ends a rank, also in a receive, with no traceback
        by_default = os.getpid() != 1  # the kernel keeps from process 1, a container's first, what it does not handle
        signal.signal(signal.SIGINT, signal.SIG_DFL if by_default else lambda *_: os._exit(130))
    c10d = torch_dist.distributed_c10d  # new groups get these, and not the timeout of init_process_group
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timedelta(seconds=timeout)
    if device_type == "cuda":
        # Pipelines send to one peer a group, so this warning means nothing.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    if sys.platform == "linux" and os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        # Ranks of one node meet on the loopback interface, because gloo would look up this machine's name, which may
        # not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return meeting_place(device_type, timeout)
