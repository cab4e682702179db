"""Room for transfers beside kernels that fill a GPU, and what TMA takes: for the kernels that run one program a
multiprocessor.
"""

import weakref

import collectives as dist
import kernels
from kernels import programs_at_once


def tma_takes(*tensors):
    """Whether TMA can address these 16-bit tensors (rows at multiples of 16 bytes), on Hopper, which the tiles fit."""
    return all(t.numel() and t.dtype.itemsize == 2 and t.shape[-1] % 8 == 0 and t.data_ptr() % 16 == 0
               and (kernels.INTERPRETED or kernels._generation(t.device) == 9) for t in tensors)


UNDER_WAY = weakref.WeakSet()  # transfers that nobody has waited for yet; each lives as long as its handle


def programs_beside_transfers(device):
    """How many programs a product may have. Two multiprocessors stay free, while transfers are under way, for the
    one-program kernels that signal other GPUs: else these would wait until the product ends."""
    return programs_at_once(device) - 2 * bool(UNDER_WAY)


def under_way(handle):
    """The handle of a transfer beside which products leave room, until its wait()."""
    transfer = dist.Handle()  # not what is returned: in a cycle, what a recorded one keeps would stay

    def wait():
        UNDER_WAY.discard(transfer)
        handle.wait()

    UNDER_WAY.add(transfer)
    return dist.Handle(wait, handle.is_completed)
