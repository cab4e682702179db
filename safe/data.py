"""Text, folders of text, files of tokens and tokenizers, refused in one line where they cannot be trained on."""

import codecs
import contextlib
import hashlib
import json
import os
import pathlib
import re
import tempfile

import numpy as np

from further.bad_input import BadInput, reject, writable
from further.bpe import FILES, Tokenizer, WHOLE
from further.fits import parts_of_sequence
from further.folder import write_blocks
from further.text import batch, Bytes, split, standard_library
from safe.files import is_ours


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
        return Tokenizer(folder)
    except (OSError, ValueError) as error:
        what = f"{os.path.basename(error.filename)}: {error.strerror}" if isinstance(error, OSError) else error
    raise BadInput(f"{flag} {folder}: {what}; give a folder with a GPT-2's, Llama 3's or Qwen's own {WHOLE}, or a "
                   f"GPT-2's {' and '.join(FILES)}" + ", or what needs none: --data TOKENS.bin" * (not s.tokenizer))


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
    sizes[vocabulary.end_token] = 1
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
    try:
        if is_bin(s):
            tokens = read_bin(s)
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
    written = s.out, s.profile, s.resume, os.path.dirname(s.resume.rstrip("/")), s.tokenizer, s.init_from
    return [*files_in(data, {pathlib.Path(folder).resolve() for folder in written if folder} - {data, *data.parents})]


RUNS = {"run.json", "log.jsonl", "manifest.json"}  # where a run has written one of these, all is the run's


def files_in(folder, seen):
    """What lies in a folder, also behind links, but neither hidden files nor hidden folders, nor what train.py has
    written, nor a vocabulary. Each folder is read once, whatever links lead there, and those in `seen` are not."""
    def stop(error):
        raise error

    for here, folders, names in os.walk(folder, followlinks=True, onerror=stop):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        here = pathlib.Path(here)
        written = {name for name in names if is_ours(here / name)}
        if {*FILES} <= {*names}:
            written |= {*FILES}
        if here.resolve() in seen or written & RUNS and here != folder:
            folders.clear()
        else:
            seen = seen | {here.resolve()}
            yield from (here / name for name in names if not name.startswith(".") and name not in written)


def read_texts(files, left_out):
    """Each file's bytes, in the order of their names, without UTF-8's mark at its start. left_out gets the names of
    those with a zero byte, which no text has, and of what is no file."""
    texts = []
    for file in sorted(files):
        text = file.read_bytes() if file.is_file() or len(files) == 1 else b"\0"
        if b"\0" in text:
            left_out.append(file.name)
        else:
            texts.append(text.removeprefix(codecs.BOM_UTF8))
    return texts


def about_left_out(names):
    """In words, which files are no text; nothing if there are none."""
    others = f" and {len(names) - 3:,} more" * (len(names) > 3)
    return f"left out, as no text: {', '.join(names[:3])}{others}" * bool(names)


def read_bin(s):
    """The tokens of a .bin, mapped: numbers of uint16, for a vocabulary above 65,536 of uint32, and nothing else."""
    kind = np.dtype(np.uint32 if (s.vocab_size or 0) > 1 << 16 else np.uint16)
    size = os.path.getsize(s.data)
    reject(size == 0 or size % kind.itemsize, f"--data {s.data}: {size} bytes are no {kind} tokens; give tokens, or a "
           "text under another name than .bin")
    return np.memmap(s.data, kind, "r")


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


def checked_batch(s, vocab_size, data, device):
    """A batch(...) as further.text's, of data whose tokens the model knows, and whose file stays as it is: to read one
    that has been cut would end the process, by SIGBUS."""
    on_gpu = device.type == "cuda"
    def state():
        files = [os.stat(part.filename) for part in data if isinstance(part, np.memmap)]
        return [(file.st_size, file.st_mtime_ns) for file in files]

    before = state()

    def checked(*args):
        reject(state() != before, f"--data {s.data or '(the standard library)'}: its tokens were written over while "
               "they were read: start again with a file that stays as it is")
        rows = batch(*args)
        for t in rows:
            check_tokens(s, t, vocab_size)
        # A copy from pageable memory makes the CPU wait, and then the GPU.
        return [t.contiguous().pin_memory() for t in rows] if on_gpu else rows

    return checked


# --------------------------------------------------------------------------------------------------- text encoded once

PART = 1 << 22  # letters that are encoded at a time, because that takes 16 bytes of memory for each
# Where a piece ends whatever stands around: behind the one line end after a sign or a word; before that after a word
# (Llama 3's signs take it along); before a space.
ENDS = r"(?<=\S\n)(?=\S)|(?<=[^\W_])(?=\r?\n)"
_encoded = {}  # key of text and vocabulary: tokens; a rank that was forked from its launcher finds them here


def encoded(s, texts, vocabulary):
    """The tokens of texts, uint16 or uint32. With --out they stay there in a .bin, for later runs with the same text
    and vocabulary. Its name says how many there are."""
    key = hashlib.sha256()
    for part in (*map(str.encode, [*vocabulary.files.values(), vocabulary.begin, vocabulary.end]), *texts):
        key.update(part)
        key.update(b"\0")  # no text has a zero byte
    key = key.hexdigest()[:16]
    dtype = vocabulary.array_of("").dtype
    for path in pathlib.Path(s.out).glob(f"tokens-{key}-*.bin") if s.out else ():
        count = int(path.stem.rpartition("-")[2])
        if os.path.getsize(path) == count * dtype.itemsize:  # else it has been cut short
            return np.memmap(path, dtype, "r")
    if key not in _encoded:
        parts = ["", *parts_of(vocabulary.joined(texts), vocabulary.special)]
        _encoded[key] = np.concatenate([vocabulary.array_of(part) for part in parts])
    tokens = _encoded[key]
    if s.out and len(tokens):  # the file has its name when it is whole, though other ranks write it, too
        with writable(s.out, "--out"), tempfile.TemporaryDirectory(dir=s.out, prefix=".tokens-") as own:
            with contextlib.suppress(FileNotFoundError):  # rank 0 may take the folder for a killed run's
                write_blocks(f"{own}/tokens.bin", [tokens.data])
                os.replace(f"{own}/tokens.bin", f"{s.out}/tokens-{key}-{len(tokens)}.bin")
    return tokens


def parts_of(text, special=(), size=PART):
    """Cut a text into parts of about `size` letters, each encoded as it is in the whole: no piece lies in two, and no
    special token."""
    ends = re.compile(ENDS if any(" " in token for token in special) else rf"{ENDS}|(?<=\S)(?= )")
    start = 0
    while start < len(text):
        found = ends.search(text, start + size)
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end
