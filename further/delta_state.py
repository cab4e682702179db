"""What must a gated delta rule know of the tokens before its own?

Where a sequence begins, nothing. A sampler knows the state and three tokens, however many there were. Ranks that share
a sequence tell each other, in messages that do not grow with it.

    torchrun --nproc_per_node 2 train.py --plain --arch llama --delta-every 4 --cp 2
"""

import functools

import torch

import collectives as dist
from further.context import inside_of, own_tokens
from further.sequence import gathered


class Nothing:
    """Before a sequence begins."""

    def rows(self, x):
        """The three tokens (B, 3, 3 H D) before x, q, k, v of tokens (B, T, 3 H D)."""
        return x.new_zeros(len(x), 3, x.shape[2])

    def state(self, m, z):
        """S (B, H, D, D) before the first chunk. m, z (B, H, n, D, D): M and Z of each chunk."""
        return torch.zeros_like(z[:, :, 0])


def through_chunks(state, m, z):
    """S after chunks of these M and Z."""
    for m_chunk, z_chunk in zip(m.unbind(2), z.unbind(2)):
        state = m_chunk @ state + z_chunk
    return state


class Sampled(Nothing):
    """After the tokens that it has been asked about: what a sampler keeps."""
    seam = "before"  # of the layer, which `look` stands in for

    def __init__(self):
        self.look = self
        self.seen, self.newest, self.reached = 0, None, None

    def rows(self, x):
        before = self.newest if self.seen else super().rows(x)
        self.seen += x.shape[1]
        self.newest = torch.cat([before, x], 1)[:, -3:]
        return before

    def state(self, m, z):
        before = super().state(m, z) if self.reached is None else self.reached
        self.reached = through_chunks(before, m, z)
        return before


# ------------------------------------------------------------------------------------- context parallel: a prefix scan
#
# Of a sequence over N ranks, each needs S from before its tokens. It knows its tokens' M and Z without S. All ranks
# gather these, and each goes through the ones before its own: S <- M S + Z, from 0 on. That is 2 H D^2 numbers of a
# piece, however long it is. The other blocks' attention wants the zigzag, in which a rank holds two pieces that are no
# neighbours, so 2N of them are gathered, not N. The convolution gathers three tokens of each piece.
# A rank sends (N-1) P x B (2 H D^2 + 9 H D) elements in forward, P = 2 pieces, and as many in backward.
# Sun et al., "LASP-2" (2025), who gather states, of linear attention without a delta.

class OverRanks(Nothing):
    """Before each of a rank's pieces, out of other ranks' pieces. order: int64 (N, P), which place in the sequence each
    rank's pieces have."""

    def __init__(self, group, order):
        self.group, self.order = group, order
        self.mine = order[dist.get_rank(group)].tolist()

    def in_order(self, own):
        """(B P, ...) of each rank -> [(B, ...) of each piece of the sequence]."""
        every = gathered(own.unflatten(0, (-1, len(self.mine))), self.group)                  # (B, N P, ...)
        return [every[:, i] for i in self.order.flatten().argsort().tolist()]

    def own(self, every):
        """[(B, ...) of each piece] -> (B P, ...) of this rank's. Through all of them backward comes to the gather, in
        which all ranks must meet, also the one whose piece is the first and needs none."""
        return torch.stack(every, 1)[:, self.mine].flatten(0, 1)

    def rows(self, x):
        ends = self.in_order(x[:, -3:])
        nothing = super().rows(ends[0])
        return self.own([torch.cat([nothing, *ends[:i]], 1)[:, -3:] for i in range(len(ends))])

    def state(self, m, z):
        maps = zip(m.unbind(2), z.unbind(2))
        whole = functools.reduce(lambda one, two: (two[0] @ one[0], two[0] @ one[1] + two[1]), maps)
        pieces = self.in_order(torch.cat(whole, 3))
        states = [torch.zeros_like(pieces[0].chunk(2, 3)[1])]
        for piece in pieces[:-1]:
            m, z = piece.chunk(2, 3)
            states.append(m @ states[-1] + z)
        return self.own(states)


def delta_over_ranks(module, groups):
    """Context parallelism of a GPT's gated delta rules, in place. groups: as for context_parallel."""
    n, inside = dist.get_world_size(groups.cp), inside_of(groups)
    pieces = 2 if groups.ring else 1
    over = OverRanks(groups.cp, torch.stack([own_tokens(pieces * n, rank, n, inside) for rank in range(n)]))
    for block in module.h.values():
        if hasattr(block.attn, "before"):
            block.attn.pieces, block.attn.before = pieces, over
