"""CUDA graphs of collectives.

Serves fast/graphs.py, and fast/nccl.py for single calls: of 1 KiB on two H200s, an all-reduce takes 20 us, message by
message 78. In steps that graphs.py replays whole, single calls save at most 1 %.
"""

import contextlib
import functools
import gc
import os

import torch

import collectives as dist
from collectives import Traffic, traffic


# On NCCL a batch of messages costs the CPU 100 to 300 us to issue, a CUDA graph of the batch 25 us. So an operation
# that is called again on the same memory is replayed from a graph. Its tensors have at most REPLAY_BYTES, because a
# graph keeps its receive buffers. A group keeps at most REPLAYS graphs. (2 H200s, 1 KiB, us, issued | replayed:
# all-reduce 78 | 20, broadcast 82 | 34, gather 176 | 41.)
REPLAY_BYTES = 1 << 30
REPLAYS = 512

# Graphs outlive the memory that they were recorded on, so NCCL must not register that memory.
os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


# ---------------------------------------------------------------------------------------- the log, progress, lost peers

def traffic_since(before):
    """The traffic since `before = traffic()`: operation name -> Traffic."""
    since = {}
    for name, log in dist.process.traffic.items():
        earlier = before.get(name, Traffic())
        if log != earlier:
            since[name] = Traffic(**{field: n - getattr(earlier, field) for field, n in vars(log).items()})
    return since


def count_traffic(more, times=1):
    """Add `more` to the log, `times` times. Replayed graphs need it, because a replay runs no Python that counts."""
    for name, t in more.items():
        log = vars(dist.process.traffic[name])
        for field, n in vars(t).items():
            log[field] += times * n


# ------------------------------------------------------------------------------------------------------ recorded graphs

@functools.cache
def _recording_stream():
    """One stream for all recordings, because graphs that share a pool can reuse its memory only on one stream."""
    return torch.cuda.Stream()


class RecordedGraph:
    """The GPU's work in `body()` as a CUDA graph, so that a replay spares the CPU the launches. Recording runs nothing.
    The cost: a graph works on the addresses of its recording alone, and keeps the memory that it has allocated.

    sends: a replay's traffic. pool: the memory pool of graphs that never run at the same time as this one.
    """

    def __init__(self, body, pool=None):
        before = traffic()
        stream = _recording_stream()
        self.graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # other threads may go on allocating
            try:
                body()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it says that work is left open, not why
                    self.graph.capture_end()
                raise
            self.graph.capture_end()
        self.pool = self.graph.pool()
        self.sends = traffic_since(before)
        count_traffic(self.sends, -1)  # recording has counted messages that it did not send

    def replay(self):
        self.graph.replay()
        count_traffic(self.sends)


def make_room():
    """Call before recordings that need much memory. It waits for all kernels and gives PyTorch's unused memory back to
    the driver, because graphs have memory of their own, and none can be given back while one is recorded.

    Garbage is collected first, because recomputation leaves cycles, and the autograd nodes in them would bring their
    stream into a recording.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def memory_given_back():
    """How often PyTorch has given memory back to the driver. A graph replays raw addresses: if the memory that its
    copies between GPUs were recorded on was freed and reused, they crash."""
    return torch.cuda.memory_stats_as_nested_dict()["num_device_free"]


class Replays:
    """Replays a group's operations from CUDA graphs, because to issue their messages costs the CPU longer than a replay
    (REPLAY_BYTES has the figures). Each graph keeps its receive buffers.

    The third call on the same memory records a graph and replays it. The first two calls connect the ranks, and show
    that the same addresses recur, as those of units do.
    """

    def __init__(self):
        self.calls = {}   # key of an operation -> how often it ran, until it has a graph
        self.graphs = {}  # key of an operation -> its graph
        self.copies = False  # whether the operation under way copies between GPUs

    def found(self, key):
        """The graph of that key, if it can be replayed, or None."""
        graph = self.graphs.get(key)  # a key's hash costs half a microsecond
        if graph and graph.memory is not None and graph.memory != memory_given_back():  # a slow call, so it comes last
            graph = None
            del self.graphs[key]
        return graph

    def run(self, key, body):
        """Run or replay body(). key: (operation, whether it runs beside the caller, ..., the memory that it uses)."""
        if torch.cuda.is_current_stream_capturing():  # the caller records a larger graph, which takes this in
            body()
            return
        graph = self.found(key)
        if not graph and self.calls.get(key) == 2:
            del self.calls[key]
            # Graphs of a stream run one after the other, and a graph's memory is free again at its end, so they share a
            # pool. It is taken from a graph that still exists, because a pool whose last graph is gone takes no other.
            pool = next((graph.pool for other, graph in self.graphs.items() if other[1] == key[1]), None)
            self.copies = False
            graph = self.graphs[key] = RecordedGraph(body, pool)
            graph.memory = memory_given_back() if self.copies else None
        if graph:
            graph.replay()
            return
        body()
        if len(self.calls) + len(self.graphs) >= REPLAYS and key not in self.calls:
            self.calls.clear()  # forget operations that have not come a third time
        if len(self.graphs) < REPLAYS:
            self.calls[key] = self.calls.get(key, 0) + 1
