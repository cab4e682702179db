"""Memory on each GPU of a node that all its GPUs read and write.

fast/nccl.py moves large tensors through them in place of messages. Without windows a step of GPT-2 medium takes 2.2 %
longer on two H200s (ZeRO-3), 10 % (--tp), 21 % (--tp --sp).
"""

import contextlib
import functools

import torch
import torch.distributed as torch_dist
from torch.distributed import get_world_size, ReduceOp

import kernels
from collectives import average, COMBINE, processes_of_a_node, unflatten
from fast import exchange
from fast.exchange import all_to_all_bytes, AllReduce, AllToAll


# NCCL's messages are kernels, which take multiprocessors from the computation beside them; copy engines take none. So
# beside computation, between GPUs that reach each other's memory, operations over at least WINDOW_FROM bytes are
# copies: a reduce-scatter copies into the receiver's window, an all-gather out of the owner's. On 4 H200s, matrix
# products of 39 ms took 42 while copies exchanged 2.4 GiB in 11 ms, and 45 while NCCL's messages did it in 25 ms (14
# when alone).
WINDOW_FROM, WINDOW_BYTES = 1 << 23, 1 << 27


# ----------------------------------------------------------------------------------------------------- GPUs of one node

FREE, ARRIVED = 1, 2  # channels of the signals between two ranks; barriers use channel 0


class Window:
    """Memory on each GPU that all GPUs of the group read and write, so that copy engines can carry messages and take no
    multiprocessor from the computation. It costs its size on every GPU, and barriers in most operations.

    A message is a copy, or an access of a kernel. Copies and barriers are work of a stream, like kernels: bytes that
    were copied before a barrier have arrived after it, on every rank. When an operation ends, no rank accesses another
    rank's window any more. log: the operation's Traffic, in which each counts what it sends.
    """
    made = 0  # windows that this process has made

    def __init__(self, link, mine, handle):
        self.link = link
        self.rank = link.rank
        self.size = link.size
        self.mine = mine
        self.handle = handle
        self.of = [handle.get_buffer(r, mine.shape, torch.uint8) for r in range(link.size)]
        self.others = [(link.rank + i) % link.size for i in range(1, link.size)]  # no two ranks begin with the same one
        self.floats = mine[:4].view(torch.float32)  # a tensor that kernels.on_triton can be asked about
        self.make_kernels(mine.device)

    def make_kernels(self, device):
        places = [window.data_ptr() for window in self.of]
        behind = all_to_all_bytes(self.size)
        self.kernel = AllToAll(places, self.rank, device)
        self.sums = AllReduce([place + behind for place in places], self.rank, device)

    def place(self, r, like, start=0):
        """What a tensor like this one fills of rank r's window, from byte `start` on."""
        return self.of[r][start:start + like.nbytes].view(like.dtype).view(like.shape)

    def copy(self, to, source):
        """Copy by copy engines, row by row where there are gaps between the rows of one. A graph that has recorded it
        crashes once that memory is freed (memory_given_back)."""
        self.link.replays.copies = True
        whole = to.is_contiguous() and source.is_contiguous()
        for place, row in [(to, source)] if whole else zip(to, source):
            place.copy_(row)

    def barrier(self):
        # This barrier kills the process silently when it times out, so Watch must time out earlier.
        self.handle.barrier(timeout_ms=int(1000 * (self.link.timeout + 60)))

    def open(self, flat):
        """Copy `flat` to the beginning of this rank's window, where all ranks can read it until the next barrier. By a
        kernel where there is one: a graph that has recorded it works on any memory at that address."""
        place = self.mine[:flat.nbytes].view(flat.dtype)
        if _kernel_sums(flat):
            exchange.sum_rows([flat], place, False)
        else:
            self.copy(place, flat)
        self.barrier()

    def scatter(self, parts, log):
        """Write parts[r] into rank r's window. Returns the N parts for this rank, its own included."""
        self.barrier()  # all ranks have finished reading their window's old contents
        for r in self.others:
            self.copy(self.place(r, parts[r], self.rank * parts[r].nbytes), parts[r])
            log.count(parts[r])
        self.barrier()
        own = parts[self.rank]
        return [own if r == self.rank else self.place(self.rank, own, r * own.nbytes) for r in range(self.size)]

    def gather(self, parts, own, log):
        """Copy `own` of rank r to parts[r], for every r."""
        self.open(own.view(-1))
        unflatten(own, parts[self.rank])
        for r in self.others:
            self.copy(parts[r], self.place(r, parts[r]))
            log.count(own)
        self.barrier()

    def shift(self, outgoing, incoming, log):
        """Send `outgoing` to the right rank: each rank copies its `incoming` out of the left rank's window."""
        self.open(outgoing)
        self.copy(incoming, self.place(self.rank - 1, incoming))
        log.count(outgoing)
        self.barrier()

    def all_to_all(self, outgoing, incoming, log):
        """Send outgoing[r] to every rank r, and put what rank r sends into incoming[r]; each is (address, bytes).

        One kernel does it without barriers. Every two ranks count what has arrived between them and what was taken, so
        no rank needs the sizes of other pairs, and a message larger than the window goes through it in pieces. The
        kernel takes multiprocessors, as copies would not, but a rank that exchanges tokens has nothing else to compute.
        (2 H200s, us, ours | NCCL: 1 KiB to 4 MiB 19 | 23, 16 MiB 35 | 54, 64 MiB 113 | 139, 1 GiB 1605 | 1627.)
        """
        self.kernel(outgoing, incoming)
        for r in self.others:
            if outgoing[r][1]:
                log.messages += 1
                log.bytes += outgoing[r][1]

    def all_to_all_by_copies(self, outgoing, incoming, log):
        """An all-to-all of flat tensors by copy engines, without my own block. Each sender has a slot in the receiver's
        window, and signals ARRIVED when it has filled the slot. A block larger than the slot takes several turns, for
        which the receiver signals FREE when it has copied the slot out."""
        slot = len(self.mine) // self.size // 16 * 16
        patience = int(1000 * (self.link.timeout + 60))
        outgoing, incoming = ([t.view(torch.uint8) for t in tensors] for tensors in (outgoing, incoming))
        self.barrier()  # all ranks have finished reading their window's old contents
        for start in range(0, max(len(t) for r in self.others for t in (outgoing[r], incoming[r])), slot):
            parts, into = ([t[start:start + slot] for t in tensors] for tensors in (outgoing, incoming))
            for r in self.others:
                if len(parts[r]):
                    if start:
                        self.handle.wait_signal(r, FREE, patience)
                    self.copy(self.of[r][self.rank * slot:][:len(parts[r])], parts[r])
                    self.handle.put_signal(r, ARRIVED, patience)
                    log.count(parts[r])
            for r in self.others:
                if len(into[r]):
                    self.handle.wait_signal(r, ARRIVED, patience)
                    self.copy(into[r], self.mine[r * slot:][:len(into[r])])
                    if start + slot < len(incoming[r]):
                        self.handle.put_signal(r, FREE, patience)


@torch.inference_mode(False)  # the first operation may be in it, and later ones write into the window out of it
def make_window(link, nbytes):
    """A Window for this group. Call it on all ranks; all get None if any GPU cannot reach another or has no room.

    They also get None if they have made different numbers of windows, as the ranks of a pipeline's first and last stage
    have, which share one for the tied embedding. PyTorch (up to 2.13 at least) lets ranks meet under the number of
    windows that each has made, so ranks with different numbers would wait for each other for ever.
    """
    def agreed(*numbers):
        numbers = torch.tensor(numbers, dtype=torch.int64, device="cuda")
        torch_dist.all_reduce(numbers, ReduceOp.MIN, link.group)
        return numbers.tolist()

    import torch.distributed._symmetric_memory as symmetric_memory
    gpus = [rank % processes_of_a_node(get_world_size())
            for rank in torch_dist.get_process_group_ranks(link.group)]
    mine = window = None
    with contextlib.suppress(RuntimeError):
        if all(a == b or torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus):
            mine = symmetric_memory.empty(nbytes, dtype=torch.uint8, device="cuda").zero_()  # counters start from 0
    ready, fewest, most = agreed(mine is not None, Window.made, -Window.made)
    if not ready or fewest != -most:
        return None
    Window.made += 1
    with contextlib.suppress(RuntimeError):  # some containers forbid processes to share memory
        window = Window(link, mine, symmetric_memory.rendezvous(mine, link.group))
    return window if agreed(window is not None)[0] else None


def in_step(chunks, nbytes):
    """For each turn, [the part of each chunk], at most `nbytes` each. All ranks take equally many turns, so that their
    barriers match; some parts are empty."""
    n = nbytes // chunks[0].itemsize
    return ([chunk[start:start + n] for chunk in chunks] for start in range(0, max(map(len, chunks)), n))


def _kernel_sums(tensor):
    """Whether `sum_rows` sums tensors like this one."""
    return tensor.is_cuda and tensor.dtype in exchange.SUMMED and (
        kernels.on_triton(tensor.new_empty(0, dtype=torch.float32)))  # as float32, because sum_rows takes float64, too


def combine_rows(rows, result, op):
    """Combine `rows`, N tensors (n), into `result`. 16-bit rows are summed in float32."""
    if op in (ReduceOp.SUM, ReduceOp.AVG) and _kernel_sums(rows[0]):
        exchange.sum_rows(rows, result, op == ReduceOp.AVG)
        return
    first = rows[0].float() if rows[0].dtype in kernels.DTYPES else rows[0]
    total = functools.reduce(COMBINE[op], rows[1:], first)
    average(op, total, len(rows))
    result.copy_(total)
