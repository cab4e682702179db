r"""Byte-pair encoding: how does a text become GPT-2's, Llama 3's or Qwen's token numbers?

A text is cut into pieces: words, numbers, punctuation, spaces. A piece begins as its bytes. Then the pair of neighbours
that stands first in the merges becomes one token, again and again, until no neighbours stand there. The vocabulary has
each token's number. The merges were learned from a text: in each round its most frequent pair became a token. So
frequent words are one token, and any bytes are some tokens. Sennrich et al., "Neural Machine Translation of Rare Words
with Subword Units" (2016); Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); CS336's
lecture 1. What has changed since GPT-2 is how a text is cut:

                GPT-2               Llama 3                                     Qwen 2 and 3
    words       " code"             "(code" too: any one sign before it         as Llama 3
    numbers     " 2024"             " ", "202", "4": at most three digits       " ", "2", "0", "2", "4"
    signs       " ==", "\n"         " ==\n": with the line ends behind them     as Llama 3
    'll         as it is written    'LL too                                     as Llama 3

So no long number is a token because the texts happened to repeat that number. Qwen's text is normalized first (NFC): a
letter and its accent become one code point. Llama 3 takes a piece that is a token for that token, although its merges
may not make it. Both have special tokens of their own. A Llama wants one before each text.

    python train.py --plain --data my.txt --tokenizer gpt2    gpt2: a folder with vocab.json and merges.txt
"""

import functools
import heapq
import json
import re
import unicodedata
from math import inf
from pathlib import Path

import numpy as np

from further.bad_input import BadInput, reject

END = "<|endoftext|>"  # the token between two texts
ENDS = END, "<|end_of_text|>"  # GPT-2's and Qwen's; Llama 3's
FILES = "vocab.json", "merges.txt"
WHOLE = "tokenizer.json"  # all of a tokenizer in one file


# --------------------------------------------------------------------------------------------------- pieces and letters

# The patterns that cut a text into pieces: GPT-2's, Llama 3's, and Qwen 2 and 3's.
GPT2S = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3S = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWENS = LLAMA_3S.replace("{1,3}", "")


@functools.cache
def compiled(pattern):
    r"""One of these patterns, as Python's `re` spells it, which has no \p{L} and no \p{N}.

    Its \w is \p{L}, \p{N} and "_"; its \s is Unicode's White_Space and four more.
    """
    kinds = "".join(unicodedata.category(chr(i))[0] for i in range(0x110000))
    numbers = "".join(f"{chr(run.start())}-{chr(run.end() - 1)}" for run in re.finditer("N+", kinds))
    ours = {
        r"[^\s\p{L}\p{N}]+": r"(?:[^\w\s]+|[_\x1c-\x1f]+)+", r"[^\r\n\p{L}\p{N}]": r"(?:[^\w\r\n]|_)",
        r"\p{L}": rf"[^\W_{numbers}]", r"\p{N}": f"[{numbers}]", r"\S": r"[\S\x1c-\x1f]", r"\s": r"[^\S\x1c-\x1f]"}
    return re.compile(re.sub("|".join(map(re.escape, ours)), lambda found: ours[found[0]], pattern))


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


# ----------------------------------------------------------------------------------------------------------- the files

# What a tokenizer.json must say where, so that what is made here are its tokens. truncation and padding, which are for
# a model's batches, are not obeyed.
EVERY = {
    "model.type": ["BPE"], "model.dropout": [None, 0], "model.continuing_subword_prefix": [None, ""],
    "model.end_of_word_suffix": [None, ""]}
GPT2 = EVERY | {
    "normalizer": [None], "pre_tokenizer.type": ["ByteLevel"], "pre_tokenizer.add_prefix_space": [False],
    "pre_tokenizer.use_regex": [None, True]}
LATER = EVERY | {
    "normalizer.type": [None, "NFC"], "pre_tokenizer.type": ["Sequence"], "pre_tokenizer.pretokenizers.2": [None],
    **{f"pre_tokenizer.pretokenizers.{key}": fine for key, fine in {
        "0.type": ["Split"], "0.pattern.Regex": [LLAMA_3S, QWENS], "0.behavior": ["Isolated"],
        "0.invert": [None, False], "1.type": ["ByteLevel"], "1.add_prefix_space": [False],
        "1.use_regex": [False]}.items()}}


def value_at(whole, path):
    """What stands at "pre_tokenizer.pretokenizers.0.type"; None if nothing does."""
    for key in path.split("."):
        whole = {str(i): part for i, part in enumerate(whole)} if isinstance(whole, list) else whole
        whole = whole.get(key) if isinstance(whole, dict) else None
    return whole


def text_in(folder, name):
    return Path(folder, name).read_text("utf-8-sig")


def read_two(folder):
    """The files of a GPT-2: vocab.json, and merges.txt with a pair a line below a line with its version. Tokens that
    were added later stand in a third file."""
    vocab, lines = texts = [text_in(folder, name) for name in FILES]
    merges = [line.split(" ") for line in lines.split("\n") if line and not line.startswith("#version")]
    added = json.loads(text_in(folder, "added_tokens.json")) if Path(folder, "added_tokens.json").exists() else {}
    return dict(files=dict(zip(FILES, texts)), merges=merges, end=END, special=[*added, END],
                numbers=json.loads(vocab) | added)


def read_whole(folder):
    """A tokenizer.json. BadInput if it makes other tokens than can be made here."""
    text = text_in(folder, WHOLE)
    whole = json.loads(text)
    table = LATER if value_at(whole, "pre_tokenizer.type") == "Sequence" else GPT2
    for path, fine in table.items():
        reject(value_at(whole, path) not in fine,
               f"{WHOLE}: {path} is {value_at(whole, path)!r:.90}, which is not known here")
    model = whole["model"]
    composed = whole.get("normalizer") is not None
    for token in whole["added_tokens"]:
        others = [key for key in ("lstrip", "rstrip", "single_word", *["normalized"] * composed) if token.get(key)]
        reject(others, f"{WHOLE}: {token['content']!r} has {others}, which is not known here")
    numbers = model["vocab"] | {token["content"]: token["id"] for token in whole["added_tokens"]}
    end = end_of(folder, numbers)
    return dict(files={WHOLE: text}, numbers=numbers, end=end, begin=begin_of(whole), composed=composed,
                merges=[pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]],
                special=[end, *(token["content"] for token in whole["added_tokens"])],
                pattern=value_at(whole, "pre_tokenizer.pretokenizers.0.pattern.Regex") or GPT2S,
                takes_whole=bool(model.get("ignore_merges")))


def begin_of(whole):
    """The special tokens that a tokenizer.json puts before each text, as one str."""
    last = whole.get("post_processor")
    for step in value_at(last, "processors") or [last]:
        if value_at(step, "type") == "TemplateProcessing":
            names = [value_at(part, "SpecialToken.id") for part in step["single"]]
            return "".join(names[:names.index(None)])
    return ""


def end_of(folder, numbers):
    """The token that stands after each text: one of ENDS, or what tokenizer_config.json calls eos_token."""
    config = Path(folder, "tokenizer_config.json")
    named = json.loads(config.read_text("utf-8-sig")).get("eos_token") if config.exists() else None
    for end in *ENDS, value_at(named, "content") or named:
        if end in numbers:
            return end
    raise BadInput(f"{WHOLE}: the vocabulary has no {END!r}: say in {config.name} beside it which token ends a text, "
                   'as "eos_token"')


# ------------------------------------------------------------------------------------------------------ text to numbers

class Tokenizer:
    """The tokenizer in a Hugging Face folder, of tokenizer.json, or else of vocab.json and merges.txt: encode(text) ->
    list of int, decode(numbers) -> str. BadInput or OSError where a file is missing, cut short, or unknown here.

    encode(text) gives what the package tokenizers does without special tokens, tokens_of(texts) what it does with.
    Special tokens are taken as a whole where a text has them; of those that begin alike, the longest comes first."""
    begin = ""           # stands before each text
    pattern = GPT2S      # of a piece
    composed = False     # whether a text is normalized first
    takes_whole = False  # whether a piece that is a token is not merged

    def __init__(self, folder):
        self.folder = folder
        try:
            vars(self).update((read_whole if Path(folder, WHOLE).exists() else read_two)(folder))
            self.check()
        except (TypeError, AttributeError, LookupError) as error:
            raise BadInput(f"a file of the tokenizer is damaged ({error})") from None
        self.ranks = {(first, second): rank for rank, (first, second) in enumerate(self.merges)}
        byte_of = {letter: bytes([byte]) for byte, letter in LETTERS.items()}
        self.bytes = {number: b"".join(byte_of.get(letter, letter.encode()) for letter in token)
                      for token, number in self.numbers.items()}
        if WHOLE in self.files:  # no LETTERS spell its special tokens
            self.bytes |= {self.numbers[token]: token.encode() for token in self.special}
        longest_first = sorted({*self.special}, key=len, reverse=True)
        self.split_special = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split
        self.numbers_of = functools.lru_cache(1 << 17)(self.numbers_of)  # most pieces come again

    def check(self):
        for pair in self.merges:
            reject(len(pair) != 2, f"merges.txt: {' '.join(pair)!r} is not two tokens with one space between them")
        made = {*map("".join, self.merges)}
        for token in (*LETTERS.values(), self.end, *made):
            reject(token not in self.numbers,
                   f"the vocabulary has no {token!r}, which its merges make or any text may need")
        size = len(self.numbers)
        reject(sorted(self.numbers.values()) != [*range(size)], f"the tokens are not numbered from 0 to {size - 1}")
        unmade = len(self.numbers.keys() - made - {*LETTERS.values(), *self.special})
        reject(10 * unmade > size, f"its merges do not make {unmade:,} of the {size:,} tokens: they may be cut short")

    def __len__(self):
        return len(self.numbers)

    def joined(self, texts):
        """Texts, each its bytes, as one."""
        return self.begin + (self.end + self.begin).join(map(text_of, texts))

    def tokens_of(self, texts, packed=False):  # ends stand between texts anyway
        return self.array_of(self.joined(texts))

    @property
    def end_token(self):
        """The number of what stands between two texts."""
        return self.numbers[self.end]

    def array_of(self, text):
        """Its tokens: uint16, which is enough for GPT-2's 50,257, or uint32 if the vocabulary needs that."""
        return np.array(self.encode(text), np.uint16 if len(self) <= 1 << 16 else np.uint32)

    def pieces(self, text):
        text = unicodedata.normalize("NFC", text) if self.composed else text
        return compiled(self.pattern).findall(text)

    def encode(self, text):
        numbers = []
        for i, part in enumerate(self.split_special(text)):  # each second part is a special token
            if i % 2:
                numbers.append(self.numbers[part])
            else:
                for piece in self.pieces(part):
                    numbers += self.numbers_of(piece)
        return numbers

    def numbers_of(self, piece):
        """A heap has the pair that stands first in the merges on top, so n bytes take about n log n steps."""
        if self.takes_whole and (number := self.numbers.get("".join(spelled(piece)))) is not None:
            return [number]
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
