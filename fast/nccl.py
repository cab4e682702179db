"""GPUs: NCCL's messages replayed from graphs, and direct ways between the GPUs of one node.

fast/links.py takes these links in place of the reference's. On two H200s a step of GPT-2 medium takes 2.8 % longer with
rings of messages (DDP), 5.5 % (ZeRO-3), 10 % (--tp), 30 % (--tp --sp).
"""

import functools

import torch

import collectives as dist
import kernels
from collectives import blocks, link_of, tensors_among
from fast import beside, recorded, windows
from fast.exchange import OPS, SUMMED, window_bytes
from fast.recorded import Replays
from fast.windows import in_step, combine_rows, make_window
from safe.messages import progress, Watched


# If the caller waits, nothing computes beside the operation. Then a kernel does it, from SUM_FROM bytes on. (2 H200s,
# an all-reduce from a CUDA graph, us, by the kernel | NCCL's own: 16 KiB 9 | 11, 1 MiB 12 | 19, 16 MiB 92 | 111, 64 MiB
# 235 | 270, 1 GiB 3132 | 3282. Copies or messages took 23, 22, 156, 393 and 3760 on another host.)
SUM_FROM = 1 << 12


# ----------------------------------------------------------------------------------------------------------------- NCCL

# Operations that are replayed. All-to-alls are not, because experts send other numbers of tokens in each step.
REPLAYED = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast", "reduce", "gather", "scatter")


class LeavesRoom:
    """A link of GPUs. While an operation runs beside the caller, kernels of one program a multiprocessor leave two
    free. Else its barriers, which are kernels, too, would wait for the end of these, or these for the barriers. A
    Llama's step with ZeRO-3 and 32,768 tokens takes 4,840 ms on two H200s instead of 5,320."""

    def run(self, name, async_op, algorithm, *arguments):
        handle = super().run(name, async_op, algorithm, *arguments)
        return beside.under_way(handle) if async_op else handle


class NcclLink(LeavesRoom, Watched):
    """GPUs of several nodes. With async_op operations run on a side stream; REPLAYED ones are recorded."""

    def __init__(self, group):
        super().__init__(group)
        self.replays = Replays()

    @functools.cached_property
    def timeout(self):
        """Seconds until a silent peer is an error: the group's, which windows keep to as well."""
        return self.group._get_backend(torch.device(self.device)).options._timeout.total_seconds()

    def run(self, name, async_op, algorithm, *arguments):
        """As Link.run. An operation that the caller waits for, and that has a graph, is replayed without the rest of
        run, which takes most of a small call's time on the CPU: with it 72 us on one machine, without it 13. Its
        arguments were checked when they were recorded, and the key holds their addresses, shapes and dtypes."""
        waits = not async_op and not torch.cuda.is_current_stream_capturing()
        graph = self.replays.found(self.key_of(name, False, arguments)) if waits else None
        if not graph:
            return super().run(name, async_op, algorithm, *arguments)
        progress(name)
        dist.process.traffic[name].calls += 1
        with self.around((name, arguments)):
            graph.replay()
        progress(f"after {name}")

    def key_of(self, name, aside, arguments):
        """What the graph of an operation goes by, or None if none is recorded."""
        if name not in REPLAYED or self.size == 1:
            return None
        tensors = tensors_among(arguments)
        if not 0 < max([t.nbytes for t in tensors], default=0) <= recorded.REPLAY_BYTES:
            return None
        memory = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]
        how = [value for value in arguments if not isinstance(value, (torch.Tensor, list))]  # op, src, ...
        # A graph goes the way of its recording, by messages or by a kernel. Addresses differ from rank to rank, so one
        # rank may replay a graph where another runs the operation. If `kernels.use` was called in between, each would
        # wait for ever for what the other sends another way.
        return name, aside, kernels._choice, *how, *memory

    def perform(self, algorithm, *arguments):
        key = self.key_of(self.name, self.aside, arguments)
        if not key:
            return super().perform(algorithm, *arguments)
        body = functools.partial(algorithm, self, *arguments)
        super().perform(lambda link, *given: link.replays.run(key, body))

    def on_a_stream(self, operation, tensors):
        # Of high priority, because its barriers would else wait for the end of a kernel that fills the GPU.
        self.stream = self.stream or torch.cuda.Stream(priority=-1)
        if not torch.cuda.is_current_stream_capturing():
            return super().on_a_stream(operation, tensors)
        handle = super().on_a_stream(operation, [])  # a recording could not reuse tensors after record_stream
        handle.keeps = tensors
        return handle

    def close(self):
        self.replays = Replays()
        super().close()


def _written(*tensors):
    """A kernel has written to them."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])  # those have no version


class Direct(LeavesRoom):
    """Algorithms for ranks of which a switch joins every two at full speed, so that no rank need pass chunks on.

    Rank r sends chunk c straight to rank c, for all c at once, and sums the chunks that it receives. This sends the
    ring's bytes in one round instead of N-1 steps, and sums N rows at once, in float32 if they have 16 bits. It costs
    room for N chunks. Between nodes the ring is better, because there one rank of a node sends out of it, not all.
    Large chunks go through windows: they are summed where others wrote them, and gathered from their owners' windows.
    If the caller waits, one kernel does all-reduces, all-to-alls, and the two operations of NTHS.
    """

    def perform(self, algorithm, *arguments):
        if self.name not in NTHS:
            return super().perform(algorithm, *arguments)
        super().perform(lambda link, *given: link.exchange_nths(*NTHS[link.name](*given)) or algorithm(link, *given),
                        *arguments)

    def window(self, nbytes):
        """None, because this class shares no memory; `NodeLink` does."""

    def kernel_window(self):
        """The window of the kernels, or None if the caller does not wait, or kernels or windows cannot be had."""
        # The kernels take other dtypes, too, but on_triton knows those of layers.
        able = not self.aside and kernels.on_triton(torch.empty(0, dtype=torch.float32, device=self.device))
        return self.window(window_bytes(self.size)) if able else None

    def kernel_for(self, flat, op=None):
        """The exchange.AllReduce to combine `flat` by op, or without one to gather it. None if there is none."""
        able = op is None or flat.dtype in SUMMED and op in OPS
        able = able and SUM_FROM <= flat.nbytes < 1 << 31  # the kernel counts elements, or bytes, in 32 bits
        window = self.kernel_window() if able else None
        return window and window.sums

    def all_reduce(self, flat, op):
        if self.size == 1:
            return
        chunks = flat.tensor_split(self.size)
        if kernel := self.kernel_for(flat, op):
            kernel.all_reduce(flat, op)
            self._note_sent(flat, chunks, [chunks[self.rank]] * self.size)
        else:  # two halves, (N-1)/N K sent in each
            self.reduce_scatter(chunks, chunks[self.rank], op)
            self.all_gather(chunks)

    def _note_sent(self, written, *outgoing):
        """Count what a kernel has sent to each other rank, and that it wrote to a tensor. outgoing: lists (N). (Between
        two ranks an all-reduce's two messages are one.)"""
        _written(written)
        log = self.log
        for tensors in outgoing:
            for r in range(self.size):
                if r != self.rank:
                    log.count(tensors[r])

    def window_for_copies(self, chunks):
        """The window through which copies do an operation on N chunks, or None if messages are faster."""
        large = sum(chunk.nbytes for chunk in chunks) >= windows.WINDOW_FROM
        return self.window(windows.WINDOW_BYTES) if large else None

    def reduce_scatter(self, chunks, result, op):
        if window := self.window_for_copies(chunks):
            for *parts, into in in_step([*chunks, result], windows.WINDOW_BYTES // self.size // 16 * 16):
                combine_rows(window.scatter(parts, self.log), into, op)
            return
        own = chunks[self.rank]
        rows = [*own.new_empty(self.size, own.numel())]
        rows[self.rank] = own
        self._swap(chunks, rows)
        combine_rows(rows, result, op)

    def all_gather(self, chunks):
        if window := self.window_for_copies(chunks):
            for parts in in_step(chunks, windows.WINDOW_BYTES):
                window.gather(parts, parts[self.rank], self.log)
        else:
            self._swap([chunks[self.rank]] * self.size, chunks)

    def exchange_nths(self, whole, own, op=None):
        """Gather `own` (B, ...) into `whole` (N, B, ...) or, with an op, reduce-scatter `whole` into `own`, without
        copies within a GPU. Returns False, and does nothing, if neither kernel nor window can."""
        whole = whole.detach()
        own = own.detach()
        gaps = whole.dim() > 1 and not whole.is_contiguous() and whole[0].shape == own.shape
        row, flat = (own[0].numel(), whole.transpose(0, 1)) if gaps else (0, whole)
        nbytes = row * whole.itemsize
        alike = own.is_contiguous() and flat.is_contiguous() and own.dtype == whole.dtype and (
            whole.numel() == self.size * own.numel())
        kernel = self.kernel_for(flat := flat.reshape(-1), op) if alike else None
        if kernel and (not row or kernel.takes_rows(nbytes)):
            if op is None:
                kernel.all_gather(flat, own.view(-1), row)
            else:
                kernel.reduce_scatter(flat, own.view(-1), op, row)
            self._note_sent(whole if op is None else own, [own] * self.size)
        elif alike and ROW_BYTES <= nbytes <= windows.WINDOW_BYTES // self.size and row and (
                window := self.window(windows.WINDOW_BYTES)):
            rows = windows.WINDOW_BYTES // (self.size * nbytes)
            for many, few in zip(whole.split(rows, 1), own.split(rows)):
                if op is None:
                    window.gather(many, few, self.log)
                    continue
                for parts, result in zip(zip(*window.scatter(many, self.log)), few):
                    combine_rows([part.view(-1) for part in parts], result.view(-1), op)
        else:
            return False
        return True

    def shift(self, outgoing, incoming):
        """Send a flat tensor to the right rank and receive the left rank's. Between GPUs copy engines do it, because
        they take no multiprocessor from the computation beside them."""
        if window := self.window(windows.WINDOW_BYTES):
            for out, into in in_step([outgoing, incoming], windows.WINDOW_BYTES):
                window.shift(out, into, self.log)
        else:
            self.exchange([(outgoing, (self.rank + 1) % self.size)], [(incoming, (self.rank - 1) % self.size)])

    def all_to_all(self, outgoing, incoming):
        if self.aside and windows.WINDOW_BYTES and (window := self.window(windows.WINDOW_BYTES)):
            incoming[self.rank].copy_(outgoing[self.rank])
            window.all_to_all_by_copies(outgoing, incoming, self.log)
            return
        self._swap(outgoing, incoming)

    def _swap(self, outgoing, incoming):
        """An all-to-all by one kernel, or by messages that are all sent at once. My own block may be one and the same
        tensor in both."""
        if window := self.kernel_window():
            places = ([(t.data_ptr(), t.nbytes) for t in tensors] for tensors in (outgoing, incoming))
            window.all_to_all(*places, self.log)
            _written(*incoming)
        else:
            incoming[self.rank].copy_(outgoing[self.rank])
            others = [r for r in range(self.size) if r != self.rank]
            self.exchange([(outgoing[r], r) for r in others], [(incoming[r], r) for r in others])


# Rows with gaps between them are copied one by one if each has at least so many bytes, because a copy costs some us.
# (2 H200s: with 32 rows of 1 MiB a step of GPT-2 medium took 137 ms, with 4 rows of 4 MiB 12 x 4096 blocks took 59 ms;
# the same without --sp 107 and 58 ms.)
ROW_BYTES = 1 << 22


def takes_rows(nbytes, group, waits=True):
    """Whether this group gathers (B, ...) into an (N, B, ...) that is not contiguous, and reduce-scatters back, in
    place. nbytes: of one (...). waits: for a call without async_op. Call on all ranks."""
    link = link_of(group)
    if not isinstance(link, NodeLink):
        return False
    window = link.during("takes_rows", not waits).kernel_window()
    return bool(window and window.sums.takes_rows(nbytes)) or nbytes >= ROW_BYTES


NTHS = {  # operations between a tensor and its Nths: (whole, own, op) of their arguments
    "all_gather_into_tensor": lambda output, input: (output, input),
    "reduce_scatter_tensor": lambda output, input, op: (input, output, op)}


class NodeLink(Direct, NcclLink):
    """GPUs of one node. It assumes that a switch joins them."""

    def __init__(self, group):
        super().__init__(group)
        self._windows = {}
        self._waited_all_to_all = window_bytes(self.size), False

    def run(self, name, async_op, algorithm, *arguments):
        if name == "all_to_all_single" and not async_op and self._all_to_all_at_once(*arguments):
            return None
        return super().run(name, async_op, algorithm, *arguments)

    def window_for_copies(self, chunks):
        # It copies at least its own part.
        self.replays.copies |= sum(chunk.nbytes for chunk in chunks) >= windows.WINDOW_FROM
        return super().window_for_copies(chunks)

    def window(self, nbytes):
        """The Window of `nbytes` for the operation under way, or None if it must use messages. Operations beside the
        caller have a window of their own, because two operations at a time would overwrite each other's bytes."""
        key = nbytes, self.aside
        if self.size == 1:
            return None
        if key not in self._windows and not torch.cuda.is_current_stream_capturing():
            self._windows[key] = make_window(self, nbytes)  # all ranks make it together, which cannot be recorded
        return self._windows.get(key)

    def _all_to_all_at_once(self, output, input, output_split_sizes, input_split_sizes):
        """Without `run`, do an all-to-all that the caller waits for, by the addresses of blocks in contiguous tensors.
        `run`, which makes a view of each block, costs the CPU 80 us a call instead of 19. That is more than the kernel
        takes up to 16 MiB, and experts call it five times a block. Returns False if `run` must do it."""
        window = self._windows.get(self._waited_all_to_all)
        if not (window and input.is_contiguous() and output.is_contiguous() and input.is_cuda and output.is_cuda
                and input.dtype == output.dtype and kernels.on_triton(window.floats)):
            return False
        places = []
        for tensor, sizes in (input, input_split_sizes), (output, output_split_sizes):
            at = tensor.data_ptr()
            width = tensor.itemsize
            places.append(place := [])
            for elements in blocks(tensor, sizes, self.size):
                place.append((at, elements * width))
                at += elements * width
        outgoing, incoming = places
        if outgoing[self.rank][1] != incoming[self.rank][1]:
            return False  # `run` says what is wrong
        progress("all_to_all_single")
        log = dist.process.traffic["all_to_all_single"]
        log.calls += 1
        with self.around(("all_to_all_single", [input])):
            window.all_to_all(outgoing, incoming, log)
        _written(output)
        progress("after all_to_all_single")
        return True

    def close(self):
        self._windows.clear()
        super().close()
