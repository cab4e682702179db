"""Starting the processes of a layout, and ending them together."""

import multiprocessing
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as torch_dist

from collectives import rendezvous


# --------------------------------------------------------------------------------------------------- starting processes

waits = {"timeout": 600}  # seconds that a rank waits for another one's message


LAUNCHER_S = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_", "ROLE_",
              "TORCHELASTIC_")  # beginnings of what an outer torchrun sets, for a world of one


def start_again(processes, saved=lambda: True):
    """Run this command line again as `torchrun --nproc_per_node processes` would, in this process's place, and exit.

    SIGTERM goes on to the ranks, which have 30 s to save and end; then the exit code is 0 if `saved()` says so. A rank
    without an error must return or call sys.exit(0), because the launcher waits for the result of a forked one.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    end_with_launcher()
    for name in list(os.environ):
        if name.startswith(LAUNCHER_S):
            del os.environ[name]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    module = sys.modules["__main__"].__spec__  # of `python -m lessons`
    words = ["--module", module.parent] if module else [sys.argv[0]]
    if may_fork():
        # Ranks are forked from this process, because a new process would spend four seconds on importing PyTorch.
        from torch import _dynamo  # noqa: F401  optimizers need it: import it once, before the fork
        os.register_at_fork(after_in_child=forked)
        words = ["--run-path", "--start-method", "fork", os.path.abspath(sys.argv[0])]
    # The address, because ranks would look up a machine name that may not resolve.
    flags = ["--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node", str(processes)]
    try:
        run.run(run.parse_args([*flags, *words, *sys.argv[1:]]))
    except ChildFailedError as error:  # the rank itself has said what happened
        rank, failure = error.get_first_failure()
        sys.exit(f"rank {rank} ended with exit code {failure.exitcode}; all others were stopped")
    except (SignalException, KeyboardInterrupt) as stop:
        if getattr(stop, "sigval", None) == signal.SIGTERM:
            sys.exit(0 if saved() else 1)
        sys.exit(130)
    sys.exit(0)


def threads():
    """The number of threads of this process on Linux; 0 elsewhere."""
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0


_imported = threads()


def may_fork():
    """Whether ranks can be forked from this process. They cannot if it has started threads since the imports, as the
    first large tensor does on several cores, because a fork copies no threads and PyTorch would wait for them for ever.
    They cannot if there are GPUs, because CUDA does not survive a fork."""
    return 0 < threads() == _imported and not torch.cuda.is_available()


def is_forked():
    """Whether this process is a rank that `start_again` has forked. Its launcher waits for it to return."""
    return multiprocessing.parent_process() is not None


def forked():
    """Undo in a forked rank what belongs to its launcher: signal handlers, and a thread for each core."""
    for name in signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT:
        signal.signal(name, signal.SIG_DFL)
    if os.environ["OMP_NUM_THREADS"].isdigit():  # it may be a list, one number a level of nesting
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def end_after_sigterm():
    """Call it when all is saved. After SIGTERM the launcher no longer reads the result for which a forked rank waits
    at its end, and would kill it after 30 s. So it ends by itself."""
    if is_forked():
        signal.alarm(3)


def end_with_launcher():
    """Let the system kill this process when the one that started it dies, by SIGKILL too, so that no orphan stays."""
    if sys.platform == "linux" and "RANK" in os.environ:
        import ctypes
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; at SIGTERM a rank would save and exit with 0


def settled_rendezvous(device_type, timeout):
    """As collectives.rendezvous, after what lets a run end cleanly."""
    end_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank, even inside a receive, and without a traceback
    waits["timeout"] = timeout
    c10d = torch_dist.distributed_c10d  # new groups get these, and not the timeout of init_process_group
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timedelta(seconds=timeout)
    if device_type == "cuda":
        # Pipelines send to one peer a group, so this warning means nothing.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        # Graphs outlive the memory that they were recorded on, so NCCL must not register that memory.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if sys.platform == "linux" and os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        # Ranks of one node meet on the loopback interface, because gloo would look up this machine's name, which may
        # not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return rendezvous(device_type, timeout)
