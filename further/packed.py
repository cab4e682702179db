"""Packed documents: what if a sequence is several short texts, and no token may see another text's?

    python train.py --plain --pack

Texts are joined with an end token behind each, and a sequence is cut out of that anywhere. Of its tokens `starts` says
where the document of each begins. Three things follow, of T = 8 tokens, "|" the end token:

    tokens       c d | e f g | h
    starts       0 0 0 3 3 3 3 7      a query sees keys from there to itself
    positions    0 1 2 0 1 2 3 0      its own number less its start. (Rotary positions turn by differences: no change)
    targets      d | - f g | - .      none behind an end token: the next document's first token cannot be known

No score connects two documents, so each trains as if it were alone. Every rank has the tokens of its whole sequences,
so under --cp no message tells boundaries: a query's start is a number in the sequence, and a rank of a ring knows which
keys it has. What documents cost a ring is balance. The zigzag gives all ranks equal work if every query sees all keys
before it. A rank whose tokens are of short documents has little to do, and waits for the others in each of N steps.

Krell et al., "Efficient Sequence Packing without Cross-contamination" (2021); Llama 3 (2024), section 3.2.
"""

import torch


def starts_of(tokens, end):
    """Where each token's document begins, int64 like tokens (B, T): behind the last end token before it, or at 0."""
    every = torch.arange(tokens.shape[1], device=tokens.device)
    first = torch.zeros_like(tokens)
    first[:, 1:] = every[1:] * (tokens[:, :-1] == end)  # of a document's first token its number, else 0
    return first.cummax(1).values


def packed(x, y, end):
    """(inputs, targets, starts) of inputs and targets (B, T) that were cut out of joined texts."""
    return x, y.masked_fill(x == end, -1), starts_of(x, end)
