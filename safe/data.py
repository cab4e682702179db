"""Text, folders of text and files of tokens, refused in one line where they cannot be trained on."""

import os
import pathlib

import numpy as np

from safe.flags import reject
from train import read_texts, split, standard_library


def load_data(s):
    """(training tokens, held-out tokens, whether they are bytes): arrays, uint8 or, mapped from a .bin, uint16."""
    where = f"--data {s.data}" if s.data else "the standard library"
    try:
        is_bin = s.data.endswith(".bin") and os.path.isfile(s.data)
        tokens = read_tokens(s.data, where) if is_bin else read_texts(files_of(s))
        problem = "" if len(tokens) else "it is empty"
    except OSError as error:
        problem = error.strerror
    reject(problem, f"{where}: {problem}; give text, or leave the flag out for the standard library's source")
    return *split(tokens), tokens.dtype == np.uint8


def files_of(s):
    """The text files of --data. In a folder, neither hidden files nor those that this run or that of --resume wrote."""
    if not os.path.isdir(s.data):
        return [pathlib.Path(s.data)] if s.data else standard_library()
    data = pathlib.Path(s.data).resolve()
    written = s.out, s.trace, s.profile, s.resume, os.path.dirname(s.resume.rstrip("/"))
    inside = {pathlib.Path(folder).resolve() for folder in written if folder} - {data, *data.parents}
    return [file for file in data.rglob("*") if file.is_file() and not file.name.startswith(".")
            and inside.isdisjoint(file.parents)]


def check_data(s, config, train, held_out):
    shortest = min(len(train), len(held_out) if s.eval_every else len(train))
    reject(shortest <= config.seq_len, f"--data {s.data or '(standard library)'} is too short: {shortest:,} tokens in "
           f"a part, one sequence needs {config.seq_len + 1:,}; give more text or --seq-len {max(1, shortest - 1)}")
    largest = max(int(part[:1 << 28].max(initial=0)) for part in (train, held_out))  # of 512 MiB, a second
    reject(largest >= config.vocab_size, f"--data holds token {largest}: give --vocab-size {largest + 1} or more")


def read_tokens(path, where):
    """Tokens of a .bin file, uint16, as nanoGPT writes it."""
    size = os.path.getsize(path)
    reject(size % 2 or not size, f"{where}: {size} bytes are no uint16 tokens; a text must not be named .bin")
    return np.memmap(path, np.uint16, "r")
