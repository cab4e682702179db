"""Byte-pair encoding: how does a text become GPT-2's token numbers?

A text is cut into pieces: words, numbers, punctuation, spaces. A piece begins as its bytes. Then the pair of neighbours
that stands first in merges.txt becomes one token, again and again, until no neighbours stand there. vocab.json has
each token's number. The merges were learned from a text: in each round its most frequent pair became a token. So
frequent words are one token, and any bytes are some tokens. Sennrich et al., "Neural Machine Translation of Rare Words
with Subword Units" (2016); Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); CS336's
lecture 1.

    python -m further.bpe my.txt --vocab-size 4096 --out vocab    learns a vocabulary
    python train.py --plain --data my.txt --tokenizer vocab       trains a model on its tokens
"""

import argparse
import functools
import heapq
import itertools
import json
import re
import unicodedata
from collections import Counter, defaultdict
from math import inf
from pathlib import Path

import numpy as np

END = "<|endoftext|>"  # the token between two texts
FILES = "vocab.json", "merges.txt"


# --------------------------------------------------------------------------------------------------- pieces and letters

@functools.cache
def kinds_of_letters():
    r"""What `re` calls \p{L}, \p{N}, Unicode's \s, and one or more of all others.

    Python's `re` has no \p{L}. Its \w is \p{L}, \p{N} and "_"; its \s is Unicode's White_Space and four more.
    """
    kinds = "".join(unicodedata.category(chr(i))[0] for i in range(0x110000))
    numbers = "".join(f"{chr(run.start())}-{chr(run.end() - 1)}" for run in re.finditer("N+", kinds))
    return rf"[^\W_{numbers}]", f"[{numbers}]", r"[^\S\x1c-\x1f]", r"(?:[^\w\s]+|[_\x1c-\x1f]+)"


@functools.cache
def piece_pattern():
    r"""GPT-2's pattern: 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    letter, number, space, other = kinds_of_letters()
    return re.compile(rf"'s|'t|'re|'ve|'m|'ll|'d| ?{letter}+| ?{number}+| ?{other}+"
                      rf"|{space}+(?![\S\x1c-\x1f])|{space}+")


# The letter for each byte, as both files spell tokens: a printable byte's own, and for others U+0100 and on, so that no
# token has a space in it. A space is "Ġ".
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = sorted({*range(256)} - {*PRINTABLE})
LETTERS = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(OTHERS)}


def text_of(raw):
    """Bytes as a str. Those that are not UTF-8 become surrogates, and `spelled` makes them bytes again."""
    return raw.decode("utf-8", "surrogateescape")


def spelled(piece):
    """A piece as a list of LETTERS, one a byte."""
    return [LETTERS[byte] for byte in piece.encode("utf-8", "surrogateescape")]


# ------------------------------------------------------------------------------------------------------ text to numbers

def read(folder):
    """What a Tokenizer is made of: ({name: text} of its files, {token: number}, pairs, special tokens).

    merges.txt has a pair a line, below a line with its version. Special tokens are taken as a whole where a text has
    them; of those that begin alike, the longest comes first."""
    files = {name: Path(folder, name).read_text("utf-8-sig") for name in FILES}
    merges = [line.split(" ") for line in files["merges.txt"].split("\n")
              if line and not line.startswith("#version")]
    return files, json.loads(files["vocab.json"]), merges, [END]


class Tokenizer:
    """The tokenizer of a Hugging Face GPT-2 folder: encode(text) -> list of int, decode(numbers) -> str.

    contents: as `read` finds them in the folder, or from elsewhere. OSError if a file is missing."""
    begin, end = "", END  # stand before and after each text

    def __init__(self, folder, contents=None):
        self.folder = folder
        self.contents = contents or read(folder)
        self.files, self.numbers, merges, special, *_ = self.contents
        self.ranks = {(first, second): rank for rank, (first, second) in enumerate(merges)}
        byte_of = {letter: bytes([byte]) for byte, letter in LETTERS.items()}
        self.bytes = {number: b"".join(byte_of.get(letter, letter.encode()) for letter in token)
                      for token, number in self.numbers.items()}
        self.special = re.compile(f"({'|'.join(map(re.escape, special))})")
        self.numbers_of = functools.lru_cache(1 << 17)(self.numbers_of)  # most pieces come again

    def __len__(self):
        return len(self.numbers)

    def joined(self, texts):
        """Texts, each its bytes, as one."""
        return self.begin + (self.end + self.begin).join(map(text_of, texts))

    def tokens_of(self, texts, packed=False):  # ends stand between texts anyway
        return self.array_of(self.joined(texts))

    @property
    def end_token(self):
        """The number of what stands between two texts; None: nothing does."""
        return self.numbers.get(self.end)

    def array_of(self, text):
        """Its tokens: uint16, which is enough for GPT-2's 50,257, or uint32 if the vocabulary needs that."""
        return np.array(self.encode(text), np.uint16 if len(self) <= 1 << 16 else np.uint32)

    def pieces(self, text):
        return piece_pattern().findall(text)

    def encode(self, text):
        numbers = []
        for i, part in enumerate(self.special.split(text)):  # each second part is a special token
            if i % 2:
                numbers.append(self.numbers[part])
            else:
                for piece in self.pieces(part):
                    numbers += self.numbers_of(piece)
        return numbers

    def numbers_of(self, piece):
        """A heap has the pair that stands first in merges.txt on top, so n bytes take about n log n steps."""
        parts = [*spelled(piece), ""]  # each in the place of its first letter; "" where another part's letters are
        first = [*range(len(parts))]   # of a part's last letter: the place of its first one

        def rank(i):
            return self.ranks.get((parts[i], parts[i + len(parts[i])]), inf)

        heap = [(rank(i), i) for i in first]
        heapq.heapify(heap)
        while heap[0][0] < inf:  # the last place makes no pair, so it stays
            best, i = heapq.heappop(heap)
            if rank(i) == best:  # else another pair has taken a part of this one
                j = i + len(parts[i])
                parts[i] += parts[j]
                parts[j] = ""
                first[i + len(parts[i]) - 1] = i
                for changed in first[i - 1], i:
                    heapq.heappush(heap, (rank(changed), changed))
        return [self.numbers[part] for part in parts if part]

    def decode(self, numbers):
        return b"".join(self.bytes.get(number, b"") for number in numbers).decode(errors="replace")


# ---------------------------------------------------------------------------------------------------------- learned

def joined(parts, pair):
    """The parts, with neighbours that are this pair as one, from left to right."""
    result = []
    for part in parts:
        if result and (result[-1], part) == pair:
            result[-1] += part
        else:
            result.append(part)
    return result


def learn(texts, size):
    """The merges, in order, of a vocabulary of `size` tokens: 256 bytes, END, and for the rest the pair that is then
    the most frequent. Fewer where no pair comes twice."""
    times = Counter(piece for text in texts for part in text_of(text).split(END)
                                for piece in piece_pattern().findall(part))
    parts = {piece: spelled(piece) for piece in times}
    counts = Counter()
    where = defaultdict(dict)  # pair -> pieces that have had it, in an order that is always the same

    def count(piece, sign):
        for pair in itertools.pairwise(parts[piece]):
            counts[pair] += sign * times[piece]
            where[pair][piece] = True

    for piece in times:
        count(piece, 1)
    merges = []
    tokens = {END, *LETTERS.values()}
    while len(tokens) < size:
        pair = max(counts, key=counts.get, default=None)
        if counts[pair] < 2:
            break
        merges.append(pair)
        tokens.add("".join(pair))  # two pairs may make the same token
        for piece in where.pop(pair):  # only these pieces' pairs change
            count(piece, -1)
            parts[piece] = joined(parts[piece], pair)
            count(piece, 1)
        del counts[pair]
    return merges


def write_learned(files, size, folder):
    """Learn a vocabulary from text files and write it, as a Hugging Face GPT-2 folder has it. Returns what to say."""
    texts = [file.read_bytes() for file in files]
    whole = b"".join(texts)
    if not whole or b"\0" in whole:
        raise ValueError(f"{', '.join(map(str, files))}: no text to learn from, or zero bytes in it")
    if not 257 <= size <= 65536:
        raise ValueError(f"--vocab-size {size}: must be between 257 and 65,536: give e.g. --vocab-size 4096")
    folder.mkdir(parents=True, exist_ok=True)
    for name in (name for name in FILES if (folder / name).exists()):
        raise ValueError(f"--out {folder}: a {name} is there already: name a new folder, e.g. --out {folder}-2")
    merges = learn(texts, size)
    tokens = dict.fromkeys([*LETTERS.values(), *map("".join, merges), END])
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}), "utf-8")
    (folder / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in [("#version:", "0.2"), *merges]), "utf-8")
    count = len(Tokenizer(folder).tokens_of(texts))
    return (f"{folder}: {len(tokens):,} tokens; the {len(whole):,} bytes are {count:,}, {len(whole) / count:.2f} bytes "
            "a token")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path, help="text to learn from")
    parser.add_argument("--vocab-size", type=int, required=True, help="tokens: 256 bytes, one between texts, pairs")
    parser.add_argument("--out", type=Path, required=True, help="folder for vocab.json and merges.txt")
    s = parser.parse_args()
    try:
        print(write_learned(s.files, s.vocab_size, s.out))
    except (OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
