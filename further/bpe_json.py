r"""tokenizer.json: what has changed in tokenizers since GPT-2's?

Llama 3's and Qwen's tokens are merged as in further/bpe.py. Before that, their texts are cut into other pieces:

                GPT-2               Llama 3                                     Qwen 2 and 3
    words       " code"             "(code" too: any one sign before it         as Llama 3
    numbers     " 2024"             " ", "202", "4": at most three digits       " ", "2", "0", "2", "4"
    signs       " ==", "\n"         " ==\n": with the line ends behind them     as Llama 3
    'll         as it is written    'LL too                                     as Llama 3

So no long number is a token because the texts happened to repeat that number. Qwen's text is normalized first (NFC): a
letter and its accent become one code point. Llama 3 takes a piece that is a token for that token, although its merges
may not make it. Both have special tokens of their own. A Llama wants one before each text.

    python train.py --init-from FOLDER --data my.txt    FOLDER: config.json, model.safetensors, tokenizer.json
"""

import functools
import json
import os
import re
import unicodedata
from pathlib import Path

from further.bpe import END, kinds_of_letters, piece_pattern, spelled, Tokenizer

WHOLE = "tokenizer.json"  # all of a tokenizer, as transformers 5 writes it
ENDS = END, "<|end_of_text|>"  # GPT-2's and Qwen's; Llama 3's


# --------------------------------------------------------------------------------------------------------------- pieces

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
DIGITS = {PATTERN.replace("DIGITS", "{1,3}"): 3, PATTERN.replace("DIGITS", ""): 1}  # Llama 3's pattern, Qwen's


@functools.cache
def later_pattern(digits):
    """PATTERN, as `re` spells it, with so many digits in a piece."""
    letter, number, space, other = kinds_of_letters()
    return re.compile(rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?:[^\w\r\n]|_)?{letter}+|{number}{{1,{digits}}}"
                      rf"| ?{other}+[\r\n]*|{space}*[\r\n]+|{space}+(?![\S\x1c-\x1f])|{space}+")


# ------------------------------------------------------------------------------------------------------------- the file

EVERY = {  # what the file must say where, so that what is made here are its tokens
    "model.type": ["BPE"], "model.dropout": [None, 0], "model.continuing_subword_prefix": [None, ""],
    "model.end_of_word_suffix": [None, ""]}
GPT2 = EVERY | {
    "normalizer": [None], "pre_tokenizer.type": ["ByteLevel"], "pre_tokenizer.add_prefix_space": [False],
    "pre_tokenizer.use_regex": [None, True]}
LATER = EVERY | {
    "normalizer.type": [None, "NFC"], "pre_tokenizer.type": ["Sequence"], "pre_tokenizer.pretokenizers.2": [None],
    **{f"pre_tokenizer.pretokenizers.{key}": fine for key, fine in {
        "0.type": ["Split"], "0.pattern.Regex": [*DIGITS], "0.behavior": ["Isolated"], "0.invert": [None, False],
        "1.type": ["ByteLevel"], "1.add_prefix_space": [False], "1.use_regex": [False]}.items()}}


def value_at(whole, path):
    """What stands at "pre_tokenizer.pretokenizers.0.type"; None if nothing does."""
    for key in path.split("."):
        whole = {str(i): part for i, part in enumerate(whole)} if isinstance(whole, list) else whole
        whole = whole.get(key) if isinstance(whole, dict) else None
    return whole


def begin_of(whole):
    """The special tokens that the file puts before each text, as one str."""
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
    raise ValueError(f"{WHOLE}: the vocabulary has no {END!r}: say in {config.name} beside it which token ends a text, "
                     'as "eos_token"')


def read_whole(folder):
    """What a JsonTokenizer is made of: as further.bpe.read, and a dict of what else differs between tokenizers: digits
    (0: GPT-2's pattern), composed (by NFC), whole (a piece that is a token is not merged), begin, end.

    ValueError if they are other tokens than can be made here."""
    text = Path(folder, WHOLE).read_text("utf-8-sig")
    whole = json.loads(text)
    table = LATER if value_at(whole, "pre_tokenizer.type") == "Sequence" else GPT2
    for path, fine in table.items():
        if value_at(whole, path) not in fine:
            raise ValueError(f"{WHOLE}: {path} is {value_at(whole, path)!r:.90}, which is not known here")
    model, added = whole["model"], whole["added_tokens"]
    composed = whole.get("normalizer") is not None
    for token in added:
        others = [key for key in ("lstrip", "rstrip", "single_word", *["normalized"] * composed) if token.get(key)]
        if others:
            raise ValueError(f"{WHOLE}: {token['content']!r} has {others}, which is not known here")
    numbers = model["vocab"] | {token["content"]: token["id"] for token in added}
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    end = end_of(folder, numbers)
    special = sorted({end, *(token["content"] for token in added)}, key=len, reverse=True)
    how = {"digits": DIGITS.get(value_at(whole, "pre_tokenizer.pretokenizers.0.pattern.Regex"), 0),
           "composed": composed, "whole": bool(model.get("ignore_merges")), "begin": begin_of(whole), "end": end}
    return {WHOLE: text}, numbers, merges, special, how


class JsonTokenizer(Tokenizer):
    """The Tokenizer of a tokenizer.json: GPT-2's, Llama 3's, Qwen 2's or 3's.

    encode(text) gives what the package tokenizers does without special tokens, tokens_of(texts) what it does with."""

    def __init__(self, folder, contents=None):
        super().__init__(folder, contents or read_whole(folder))
        *_, special, self.how = self.contents
        self.begin = self.how["begin"]
        self.end = self.how["end"]
        self.bytes |= {self.numbers[token]: token.encode() for token in special}  # which no LETTERS spell

    def pieces(self, text):
        text = unicodedata.normalize("NFC", text) if self.how["composed"] else text
        digits = self.how["digits"]
        return (later_pattern(digits) if digits else piece_pattern()).findall(text)

    def numbers_of(self, piece):
        number = self.numbers.get("".join(spelled(piece))) if self.how["whole"] else None
        return super().numbers_of(piece) if number is None else [number]


def tokenizer(folder):
    """The vocabulary in a folder: of tokenizer.json, or else of vocab.json and merges.txt."""
    has_json = os.path.exists(os.path.join(folder, "tokenizer.json"))
    return JsonTokenizer(folder) if has_json else Tokenizer(folder)
