"""Rings in pieces, over gloo and NCCL."""

from collections import defaultdict

import torch

from collectives import COMBINE, _average, Handle, recursive_doubling
from safe.messages import Watched


# A ring cuts its chunks into pieces of at most this many bytes, so that it sums one piece while the next is on the
# wire. Pieces are large because every message costs a wake-up or a kernel launch.
PIECE_BYTES = {"gloo": 1 << 24, "nccl": 1 << 30}
# Gloo sends a message only after the receiver has announced its receive. So receives are posted this many messages
# early: 4 processes on 2 cores sum 64 MiB in 74 ms instead of 84, 4 MiB in 5.8 ms instead of 7.7.
RECEIVES_AHEAD = 4
# Up to so many bytes an all-reduce takes recursive doubling. Small messages cost latency, not bytes, so log2(N) rounds
# with the whole tensor beat 2(N-1) steps with an Nth. 4 processes on 2 cores: 256 KiB 0.8 ms against the ring's 2.1,
# 1 MiB 1.8 against 2.9, equal at 4 MiB. NCCL between nodes is not measured: by formula, with 8 us a message and 45 GB/s
# a GPU, both are equal at 4 MiB among 16 ranks. Where a switch joins all ranks, one round is enough: every rank sends
# its whole tensor to every other (4 H200s: 1 MiB 36 us against 40 in two halves, 4 MiB 79 against 60).
DOUBLING_BYTES = {"gloo": 1 << 20, "nccl": 1 << 22, "switched": 1 << 20}


class Pending(Handle):
    """The handle of an operation under way. `wait()` raises the operation's error."""

    def __init__(self, wait, is_completed):
        self.wait, self.is_completed = wait, is_completed


# ------------------------------------------------------------------------------------------------------ rings in pieces

class PiecewiseLink(Watched):
    """Rings in pieces: a rank sums one piece while the next is on the wire, where in `Link` the wire waits for the sum.
    It costs more messages. Up to DOUBLING_BYTES an all-reduce takes recursive doubling."""

    @property
    def doubling_bytes(self):
        """The most bytes of a tensor that an all-reduce sends whole, in few rounds; a larger one goes in chunks."""
        return DOUBLING_BYTES[self.backend]

    def reduce_scatter(self, chunks, result, op):
        """The ring leaves partial sums in `result`. If that lies in the input, which later steps still read, a buffer
        of K/N elements takes its place."""
        if len({*map(len, chunks)}) > 1:  # a result that is smaller than another chunk cannot hold its partial sums
            super().reduce_scatter(chunks, result, op)
            return
        if self.size == 1:
            result.copy_(chunks[0])
            return
        over_input = result.untyped_storage().data_ptr() in {c.untyped_storage().data_ptr() for c in chunks}
        into = torch.empty_like(result) if over_input else result
        self._ring_reduce_scatter(chunks, [into] * (self.size - 1), op)
        _average(op, into, self.size)
        if over_input:
            result.copy_(into)

    def all_gather(self, chunks):
        pieces, in_flight, ahead = self._pieces(chunks)
        order = [piece for s in range(self.size) for piece in pieces[(self.rank - s) % self.size]]
        count = len(pieces[0])
        self._ring(order[:-count], order[count:], in_flight, ahead)  # step s+1 sends what step s received

    def all_reduce(self, flat, op):
        if flat.nbytes <= self.doubling_bytes or len(flat) < self.size:
            recursive_doubling(self, flat, op)
            return
        chunks = flat.tensor_split(self.size)
        if self.size > 1:
            sums = [chunks[(self.rank - 2 - s) % self.size] for s in range(self.size - 1)]
            self._ring_reduce_scatter(chunks, sums, op)
        _average(op, chunks[self.rank], self.size)
        self.all_gather(chunks)

    def _ring_reduce_scatter(self, chunks, results, op):
        """Sum chunk c over all ranks onto rank c. results[s]: takes the sums of step s; the last one is the answer."""
        pieces, in_flight, ahead = self._pieces(chunks)
        mine = [piece for s in range(self.size - 1) for piece in pieces[(self.rank - 2 - s) % self.size]]
        sums = [piece for result in results for piece in result.tensor_split(len(pieces[0]))]
        # Step s+1 sends what step s summed.
        outgoing = [*pieces[(self.rank - 1) % self.size], *sums[:len(mine) - len(pieces[0])]]
        width = max(piece.numel() for piece in mine)
        slots = self.scratch(chunks[0], width * ahead)
        incoming = [slots[t % ahead * width:][:piece.numel()] for t, piece in enumerate(mine)]
        self._ring(outgoing, incoming, in_flight, ahead, lambda t: COMBINE[op](incoming[t], mine[t], out=sums[t]))

    def _pieces(self, chunks):
        """Cut every chunk into equally many pieces. Returns [[piece, ...] of each chunk], how many sends are in flight
        at once, and how many messages early receives are posted."""
        count = max(1, -(-max(chunk.nbytes for chunk in chunks) // PIECE_BYTES[self.backend]))
        in_flight = min(2, count)
        ahead = in_flight if self.backend == "nccl" else RECEIVES_AHEAD
        return [chunk.tensor_split(count) for chunk in chunks], in_flight, ahead

    def _ring(self, outgoing, incoming, in_flight, ahead, arrived=lambda t: None):
        """Send outgoing[t] right and receive incoming[t] from the left, for every t; then call arrived(t).

        Message t + in_flight is sent after arrived(t), so it may carry what arrived(t) computed. With two in flight,
        one piece is summed while the next is on the wire. Receives are posted `ahead` messages early.
        """
        right, left, total = (self.rank + 1) % self.size, (self.rank - 1) % self.size, len(outgoing)
        handles = defaultdict(list)
        for t in range(-ahead, total):
            if t >= 0:
                self.wait(handles[t])
                arrived(t)
            s, q = t + in_flight, t + ahead
            send, receive = ([(tensors[i], peer)] if 0 <= i < total else []
                             for tensors, i, peer in ((outgoing, s, right), (incoming, q, left)))
            if s == q:  # in one batch, because NCCL runs only the messages of a batch at the same time
                handles[s] = self.post(send, receive)
            else:
                handles[q] += self.post(receives=receive)
                handles[s] += self.post(sends=send)
