"""What a run trains on where no file says more: texts, each byte a token, cut into batches.

    python train.py --data a_text
"""

import os
import pathlib
import sysconfig

import numpy as np
import torch


def standard_library():
    """The source files of Python's standard library: the one text that is on every reader's machine."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    others = {"site-packages", "dist-packages", "test", "tests"}
    return sorted(file for file in root.rglob("*.py") if not others & set(file.relative_to(root).parts))


class Bytes:
    """The vocabulary that needs no file: each byte of a text is a token. further/bpe.py's has the same methods."""

    def __len__(self):
        return 256

    end_token = 0  # with --pack behind each text, none of which has a zero byte

    def tokens_of(self, texts, packed=False):
        return np.frombuffer((b"\0" if packed else b"\n").join(texts), np.uint8)

    def encode(self, text):
        return list(os.fsencode(text))

    def decode(self, tokens):
        return bytes(min(token, 255) for token in tokens).decode(errors="replace")


def split(tokens):
    """(training tokens, held-out tokens): the last tenth is held out."""
    return np.split(tokens, [len(tokens) - len(tokens) // 10])


def batch(tokens, seed, step, batch_size, seq_len, samples):
    """Inputs and targets, int64 (n, T) on the CPU, of some samples (a slice) of a step's batch. They depend on the
    arguments alone, so in every layout a step sees the same tokens."""
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - seq_len, batch_size)[samples]
    rows = torch.from_numpy(np.stack([tokens[i:i + seq_len + 1] for i in starts]).astype(np.int64))     # (n, T + 1)
    return rows[:, :-1], rows[:, 1:]
