"""Small all-reduces in few rounds, large ones in the reference's rings; over gloo and NCCL.

Few rounds take the place of the ring for small all-reduces: 0.8 ms for 256 KiB among four processes, in a ring 2.1.
"""

import torch

from collectives import average, COMBINE, unflatten
from safe.messages import Watched


# Up to so many bytes an all-reduce takes recursive doubling. Small messages cost latency, not bytes, so log2(N) rounds
# with the whole tensor beat 2(N-1) steps with an Nth. 4 processes on 2 cores: 256 KiB 0.8 ms against the ring's 2.1,
# 1 MiB 1.8 against 2.9, equal at 4 MiB. NCCL between nodes is not measured: by formula, with 8 us a message and 45 GB/s
# a GPU, both are equal at 4 MiB among 16 ranks. Where a switch joins all ranks, one round is enough: every rank sends
# its whole tensor to every other (4 H200s: 1 MiB 36 us against 40 in two halves, 4 MiB 79 against 60).
DOUBLING_BYTES = {"gloo": 1 << 20, "nccl": 1 << 22, "switched": 1 << 20}


def recursive_doubling(link, flat, op):
    """All-reduce in log2(N) rounds: in round i the ranks that differ in bit i swap the whole tensor and both add.

    Ranks beyond the largest power of two hand theirs to a partner first and get the answer back last. Both sides of a
    swap add the same two numbers, so every rank ends with the same bits.
    """
    core = 1 << (link.size.bit_length() - 1)
    theirs = link.scratch(flat, len(flat))
    if link.rank >= core:
        link.exchange(sends=[(flat, link.rank - core)])
        link.exchange(receives=[(flat, link.rank - core)])
        return
    if link.rank + core < link.size:
        link.exchange(receives=[(theirs, link.rank + core)])
        COMBINE[op](flat, theirs, out=flat)
    distance = 1
    while distance < core:
        link.exchange([(flat, link.rank ^ distance)], [(theirs, link.rank ^ distance)])
        COMBINE[op](flat, theirs, out=flat)
        distance *= 2
    average(op, flat, link.size)
    if link.rank + core < link.size:
        link.exchange(sends=[(flat, link.rank + core)])


def summing_ring(link, chunks, op, sums=None):
    """As ring_reduce_scatter, with one receive buffer. sums: room for a chunk, which takes the partial sums; left out,
    chunks are overwritten by those that pass through this rank."""
    right, left = (link.rank + 1) % link.size, (link.rank - 1) % link.size
    received = link.scratch(chunks[0], max(map(len, chunks)))
    outgoing = chunks[left]
    for s in range(link.size - 1):
        mine = chunks[(link.rank - 2 - s) % link.size]
        incoming = received[:len(mine)]
        link.exchange([(outgoing, right)], [(incoming, left)])
        outgoing = mine if sums is None else sums[:len(mine)]
        COMBINE[op](incoming, mine, out=outgoing)
    average(op, outgoing, link.size)
    return outgoing


class DoublingLink(Watched):
    """A Watched link that all-reduces tensors of up to `doubling_bytes` whole, and others in place."""

    @property
    def doubling_bytes(self):
        """The most bytes of a tensor that an all-reduce sends whole, in few rounds; a larger one goes in chunks."""
        return DOUBLING_BYTES[self.backend]

    def all_reduce(self, flat, op):
        if flat.nbytes <= self.doubling_bytes:
            recursive_doubling(self, flat, op)
            return
        chunks = flat.tensor_split(self.size)
        summing_ring(self, chunks, op)
        self.all_gather(chunks)

    def reduce_scatter(self, chunks, result, op):
        # The sums grow in `result` where they can: room of their own, and a copy, would take 25 MiB a third longer.
        width, inputs = max(map(len, chunks)), {chunk.untyped_storage().data_ptr() for chunk in chunks}
        if len(result) == width and result.untyped_storage().data_ptr() not in inputs:  # later steps still read these
            sums = result
        else:
            sums = torch.empty(width, dtype=result.dtype, device=result.device)
        unflatten(summing_ring(self, chunks, op, sums), result)

    def scratch(self, like, count):
        """Room for `count` elements of `like`'s dtype and device, not initialised."""
        return torch.empty(count, dtype=like.dtype, device=like.device)
