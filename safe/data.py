"""Text, folders of text, files of tokens and tokenizers, refused in one line where they cannot be trained on."""

import codecs
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import re
import tempfile

import numpy as np

from further.bpe import END, FILES, LETTERS, read, Tokenizer
from further.bpe_json import JsonTokenizer, read_whole, WHOLE
from further.fits import parts_of_sequence
from further.text import Bytes, split, standard_library
from safe.files import is_ours, writable, write_blocks
from safe.sizes import BadInput, reject


class Numbers:
    """The vocabulary of a .bin without --tokenizer: a token shows as its number. Samples go on after the number 0."""
    end_token = None

    def encode(self, text):
        return [0]

    def decode(self, tokens):
        return " ".join(map(str, tokens))


# ------------------------------------------------------------------------------------------------------- vocabularies

def open_vocabulary(s, checkpoint):
    """The vocabulary of --tokenizer, or that which lies beside the weights that the run starts from; else bytes. What a
    .bin holds are numbers, so it needs none."""
    flag = "--tokenizer"
    folder = s.tokenizer
    if not folder:
        flag, folder = ("--resume", str(checkpoint.path)) if checkpoint else ("--init-from", s.init_from)
        if is_bin(s) or not any(os.path.exists(os.path.join(folder, name)) for name in (WHOLE, *FILES)):
            return Numbers() if is_bin(s) else Bytes()
    try:
        return open_tokenizer(folder)
    except (OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        what = f"{os.path.basename(error.filename)}: {error.strerror}" if isinstance(error, OSError) else error
    raise BadInput(f"{flag} {folder}: {what}; give a folder with a GPT-2's, Llama 3's or Qwen's own {WHOLE}, or a "
                   f"GPT-2's {' and '.join(FILES)}" + ", or what needs none: --data TOKENS.bin" * (not s.tokenizer))


def open_tokenizer(folder):
    """The Tokenizer of a folder: of tokenizer.json, as in transformers, else of vocab.json and merges.txt. An error of
    many kinds if they are damaged."""
    if not os.path.exists(f"{folder}/{WHOLE}"):
        contents = read(folder)
        check_contents(*contents[1:], END)
        return Tokenizer(folder, contents)
    *_, how = contents = read_whole(folder)
    check_contents(*contents[1:4], how["end"])
    return JsonTokenizer(folder, contents)


def check_contents(numbers, merges, special, end):
    for pair in merges:
        reject(len(pair) != 2, f"merges.txt: {' '.join(pair)!r} is not two tokens with one space between them")
    made = {*map("".join, merges)}
    for token in (*LETTERS.values(), end, *made):
        reject(token not in numbers, f"the vocabulary has no {token!r}, which its merges make or any text may need")
    reject(sorted(numbers.values()) != [*range(len(numbers))],
           f"the tokens are not numbered from 0 to {len(numbers) - 1}")
    unmade = len(numbers.keys() - made - {*LETTERS.values(), *special})
    reject(10 * unmade > len(numbers), f"its merges do not make {unmade:,} of the {len(numbers):,} tokens: they may be "
           "cut short")


def check_vocabulary(s, config, vocabulary):
    """Reject numbers that the model would take for other tokens than they are. Embeddings may be larger than a
    tokenizer, because some are padded to a multiple of 64 or 128."""
    mine = config.vocab_size
    has_weights = s.init_from or s.resume
    if isinstance(vocabulary, Tokenizer):
        size = len(vocabulary)
        another = size > mine or has_weights and s.tokenizer and 8 * size < 7 * mine
        reject(another, f"--tokenizer {vocabulary.folder}: has {size:,} tokens, the model {mine:,}: give "
               + ("the tokenizer that came with its weights" if has_weights else f"--vocab-size {size} or more"))
    reject(s.init_from and isinstance(vocabulary, Bytes) and mine > len(vocabulary) and not learned_bytes(s.init_from),
           f"--init-from {s.init_from}: its {mine:,} tokens are not bytes: give --tokenizer FOLDER, with the "
           f"{WHOLE}, or {' and '.join(FILES)}, that came with the weights")


def check_prompt(s, config, vocabulary):
    prompt = vocabulary.encode(s.prompt or "\n") if s.sample else []
    reject(max(prompt, default=0) >= config.vocab_size, f"--prompt {s.prompt!r} has a byte beyond the vocabulary of "
           f"{config.vocab_size}: give other text")
    reject(len(prompt) > config.seq_len, f"--prompt has {len(prompt):,} tokens, the model's context is of "
           f"{config.seq_len:,}: give a shorter one, or --sample 0")


def learned_bytes(folder):
    """Whether this is a checkpoint of ours whose run read text as bytes."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads(pathlib.Path(folder, "manifest.json").read_text())["run"]["data"]["bytes"]


def bytes_a_token(tokens, vocabulary):
    """The mean of some of these; 0 if it is not known. The token between two texts counts as the one byte that is there
    without it."""
    if not isinstance(vocabulary, Tokenizer) or not len(tokens):
        return 0
    sizes = np.array([len(vocabulary.bytes[number]) for number in range(len(vocabulary))])
    sizes[vocabulary.numbers[vocabulary.end]] = 1
    return sizes[tokens[:1 << 24]].mean()


# --------------------------------------------------------------------------------------------------------------- data

def is_bin(s):
    return s.data.endswith(".bin") and not os.path.isdir(s.data)


def load_data(s, vocabulary, left_out=None):
    """(training tokens, held-out tokens, vocabulary): arrays, uint8 of bytes, else uint16, uint32, mapped from a .bin.

    left_out: a list, which gets the names of files that are no text."""
    where = f"--data {s.data}" if s.data else "the standard library"
    left_out = [] if left_out is None else left_out
    reject(os.path.exists(s.data) and not os.path.isfile(s.data) and not os.path.isdir(s.data),
           f"{where} is no file or folder: give one")  # each rank reads it, and a pipe can be read once
    reject(s.pack and vocabulary.end_token is None, f"--pack: in {where} no end token stands between documents: give "
           "text, or leave --pack out")
    reject(s.tokens and not is_bin(s), f"--tokens {s.tokens} is for a .bin, and {where} is text: leave --tokens out")
    try:
        if is_bin(s):
            tokens = read_bin(s.data, s.tokens)
        else:
            texts = read_texts(files_of(s), left_out)
            bytewise = isinstance(vocabulary, Bytes)
            tokens = vocabulary.tokens_of(texts, s.pack) if bytewise else encoded(s, texts, vocabulary)
        problem = "" if len(tokens) else about_left_out(left_out) or "it is empty"
    except OSError as error:
        problem = f"{error.strerror}{f': {error.filename}' * (error.filename not in (None, s.data))}"
    reject(problem and s.resume, f"{where}: {problem}; give --data TEXT, where the run's text lies now")
    reject(problem, f"{where}: {problem}; give text, or leave the flag out for the standard library's source")
    return *split(tokens), vocabulary


def files_of(s):
    """The files of --data. In a folder, none that a run wrote, and none of its vocabulary or weights."""
    if not os.path.isdir(s.data):
        return [pathlib.Path(s.data)] if s.data else standard_library()
    data = pathlib.Path(s.data).resolve()
    written = s.out, s.trace, s.profile, s.resume, os.path.dirname(s.resume.rstrip("/")), s.tokenizer, s.init_from
    return [*files_in(data, {pathlib.Path(folder).resolve() for folder in written if folder} - {data, *data.parents})]


def files_in(folder, seen):
    """What lies in a folder, also behind links, but neither hidden files nor hidden folders, nor what a run has
    written. Each folder is read once, whatever links lead there, and those in `seen` are not."""
    def stop(error):
        raise error

    for here, folders, names in os.walk(folder, followlinks=True, onerror=stop):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = pathlib.Path(here)
        written = written_by_runs(here, names)
        if here.resolve() in seen or written & {*RUNS} and here != folder:
            folders.clear()
        else:
            seen = seen | {here.resolve()}
            yield from (here / name for name in names if not name.startswith(".") and name not in written)


RUNS = "run.json", "log.jsonl", "manifest.json"  # where a run has written one of these, all is the run's


def written_by_runs(folder, names):
    """Those of a folder's files that train.py or further.bpe have written."""
    vocabulary = {*FILES} if {*FILES} <= {*names} else set()
    encoded_there = {name for name in names if re.fullmatch(r"tokens-[0-9a-f]{16}\.bin", name)}
    return vocabulary | encoded_there | {name for name in names if is_ours(folder / name)}


def read_texts(files, left_out):
    """Each file's bytes, in the order of their names, without UTF-8's mark at its start. left_out gets the names of
    those with a zero byte, which no text has, and of what is no file."""
    texts = []
    for file in sorted(files):
        text = file.read_bytes() if file.is_file() or len(files) == 1 else b"\0"
        text = text.removeprefix(codecs.BOM_UTF8)
        if b"\0" in text:
            left_out.append(file.name)
        else:
            texts.append(text)
    return texts


def about_left_out(names):
    """In words, which files are no text; nothing if there are none."""
    others = f" and {len(names) - 3:,} more" * (len(names) > 3)
    return f"left out, as no text: {', '.join(names[:3])}{others}" * bool(names)


def read_bin(path, asked):
    """The tokens of a .bin, mapped: numbers of uint16, or of what --tokens says, and nothing else."""
    kind = asked or "uint16"
    size = os.path.getsize(path)
    reject(size == 0 or size % np.dtype(kind).itemsize, f"--data {path}: {size} bytes are no {kind} tokens; give "
           "tokens, or a text under another name than .bin")
    return np.memmap(path, kind, "r")


def check_data(s, config, train, held_out, vocabulary):
    used = (train, held_out) if s.eval_every else (train,)
    shortest = min(map(len, used))
    parts = parts_of_sequence(s)
    shorter = (shortest - 1) // parts * parts
    instead = f" or --seq-len {shorter}" * (shorter > 0 and not s.resume)
    reject(shortest <= config.seq_len, f"--data {s.data or '(standard library)'} is too short: {shortest:,} tokens in "
           f"a part, one sequence needs {config.seq_len + 1:,}; give more text{instead}")
    for part in used:
        some = part[:1 << 28]  # 512 MiB, a second; each batch is checked, too
        known = len(vocabulary) if isinstance(vocabulary, Tokenizer) else some.max() + 1
        reject(some.max() >= known, f"--data {s.data} holds token {some.max()}, and the tokenizer has {known:,}: give "
               "the one that made these tokens")
        check_tokens(s, some, config.vocab_size)


def check_tokens(s, tokens, vocab_size):
    """A GPU that looks up a number beyond the vocabulary would stop the run with no word about the data."""
    largest = int(tokens.max()) if len(tokens) else 0
    has_weights = s.init_from or s.resume
    instead = f"data for the model's {vocab_size:,}" if has_weights else f"--vocab-size {largest + 1} or more"
    reject(largest >= vocab_size, f"--data holds token {largest}: give {instead}")


# --------------------------------------------------------------------------------------------------- text encoded once

PART = 1 << 22  # letters that are encoded at a time, because that takes 16 bytes of memory for each
LINE_END = re.compile(r"(?<=[^\W_])\n")  # before it a piece ends, whatever follows. (Llama 3's signs take it along.)
_encoded = {}  # key of text and vocabulary: tokens; a rank that was forked from its launcher finds them here


def encoded(s, texts, vocabulary):
    """The tokens of texts, uint16 or uint32. Of a node's processes one encodes. With --out it leaves them there in a
    .bin, for the others and for later runs with the same text and vocabulary."""
    key = hashlib.sha256()
    ends = [vocabulary.begin, vocabulary.end] if vocabulary.begin or vocabulary.end != END else []  # not in all files
    for part in (*map(str.encode, [*vocabulary.files.values(), *ends]), *texts):
        key.update(part)
        key.update(b"\0")  # no text has a zero byte
    key = key.hexdigest()[:16]
    path = pathlib.Path(s.out, f"tokens-{key}.bin")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # where there are no locks, each process encodes
            file = stack.enter_context(open(f"{tempfile.gettempdir()}/ringgpt-{os.getuid()}-{key}.lock", "w"))
            fcntl.flock(file, fcntl.LOCK_EX)  # it goes when the file is closed, or the process dies
        if s.out and path.exists():
            return np.memmap(path, vocabulary.array_of("").dtype, "r")
        if key not in _encoded:
            parts = ["", *parts_of(vocabulary.joined(texts))]
            _encoded[key] = np.concatenate([vocabulary.array_of(part) for part in parts])
        tokens = _encoded[key]
        if s.out and len(tokens):  # the file has its name when it is whole, though other nodes may write it, too
            with writable(s.out, "--out"), tempfile.TemporaryDirectory(dir=s.out, prefix=".tokens-") as own:
                write_blocks(f"{own}/tokens.bin", [tokens.data])
                os.replace(f"{own}/tokens.bin", path)
    return tokens


def parts_of(text, size=PART):
    """Cut a text into parts of about `size` letters, each encoded as it is in the whole: no piece lies in two."""
    start = 0
    while start < len(text):
        found = LINE_END.search(text, start + size)
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end
