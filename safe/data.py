"""Text, folders of text and files of tokens, refused in one line where they cannot be trained on."""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import numpy as np

from further.bpe import END, FILES, text_of, Tokenizer
from safe.files import writable, write_blocks
from safe.launch import cores
from safe.sizes import BadInput, reject
from train import Bytes, read_texts, split, standard_library, vocabulary_of


class Numbers:
    """The vocabulary of a .bin without a tokenizer: a token shows as its number. Samples go on after the number 0."""

    def encode(self, text):
        return [0]

    def decode(self, tokens):
        return " ".join(map(str, tokens))


# ------------------------------------------------------------------------------------------------------- vocabularies

def open_vocabulary(s, checkpoint):
    """The vocabulary of --tokenizer, or that which lies beside the weights that the run starts from; else bytes."""
    flag, folder = "--tokenizer", s.tokenizer
    if not folder:
        flag, folder = ("--resume", str(checkpoint.path)) if checkpoint else ("--init-from", s.init_from)
        if not any(os.path.exists(os.path.join(folder, name)) for name in FILES):
            folder = ""
    try:
        found = vocabulary_of(folder)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        what = f"{os.path.basename(error.filename)}: {error.strerror}" if isinstance(error, OSError) else error
        raise BadInput(f"{flag} {folder}: {what}; give a folder with a GPT-2's own vocab.json and merges.txt") from None
    reject(len(found) > 1 << 16, f"{flag} {folder}: its {len(found):,} tokens are more than uint16 can number; give a "
           "vocabulary of at most 65,536")
    return Numbers() if is_bin(s) and not folder else found


def check_vocabulary(s, config, vocabulary):
    """Reject numbers that the model would take for other tokens than they are."""
    mine = config.vocab_size
    if isinstance(vocabulary, Tokenizer):
        instead = "" if s.init_from or s.resume else ", or leave --vocab-size out"
        reject(len(vocabulary) != mine, f"--tokenizer {vocabulary.folder}: has {len(vocabulary):,} tokens, the model "
               f"{mine:,}: give the vocab.json and merges.txt that came with its weights{instead}")
    reject(s.init_from and isinstance(vocabulary, Bytes) and mine > len(vocabulary) and not learned_bytes(s.init_from),
           f"--init-from {s.init_from}: its {mine:,} tokens are not bytes: give --tokenizer FOLDER, with the "
           "vocab.json and merges.txt that came with the weights")


def check_prompt(s, config, vocabulary):
    prompt = vocabulary.encode(s.prompt) if s.sample else []
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
    sizes[vocabulary.numbers[END]] = 1
    return sizes[tokens[:1 << 24]].mean()


# --------------------------------------------------------------------------------------------------------------- data

def is_bin(s):
    return s.data.endswith(".bin") and not os.path.isdir(s.data)


def load_data(s, vocabulary):
    """(training tokens, held-out tokens, vocabulary): arrays, uint8 of bytes, else uint16, mapped from a .bin."""
    where = f"--data {s.data}" if s.data else "the standard library"
    try:
        if is_bin(s):
            size = os.path.getsize(s.data)
            reject(size % 2 or not size, f"{where}: {size} bytes are no uint16 tokens; a text must not be named .bin")
            tokens = np.memmap(s.data, np.uint16, "r")
        else:
            texts = read_texts(files_of(s))
            tokens = vocabulary.tokens_of(texts) if isinstance(vocabulary, Bytes) else encoded(s, texts, vocabulary)
        problem = "" if len(tokens) else "it is empty"
    except OSError as error:
        problem = error.strerror
    reject(problem, f"{where}: {problem}; give text, or leave the flag out for the standard library's source")
    return *split(tokens), vocabulary


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
    used = (train, held_out) if s.eval_every else (train,)
    shortest = min(map(len, used))
    reject(shortest <= config.seq_len, f"--data {s.data or '(standard library)'} is too short: {shortest:,} tokens in "
           f"a part, one sequence needs {config.seq_len + 1:,}; give more text or --seq-len {max(1, shortest - 1)}")
    for part in used:
        check_tokens(part[:1 << 28], config.vocab_size)  # 512 MiB, a second; each batch is checked, too


def check_tokens(tokens, vocab_size):
    """A GPU that looks up a number beyond the vocabulary would stop the run with no word about the data."""
    largest = int(tokens.max()) if len(tokens) else 0
    reject(largest >= vocab_size, f"--data holds token {largest}: give --vocab-size {largest + 1} or more")


# ------------------------------------------------------------------------------------------- text encoded, on all cores

PART = 1 << 22  # letters that a process encodes at a time
LINE_END = re.compile(r"(?<=\S)\n")  # before it a piece ends, whatever follows
WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
from further.bpe import Tokenizer
sys.stdout.buffer.write(Tokenizer(sys.argv[2]).tokens_of([sys.stdin.buffer.read()]).tobytes())
"""
_encoded = {}  # key of text and vocabulary: tokens; a rank that was forked from its launcher finds them here


def encoded(s, texts, vocabulary):
    """The tokens of texts, uint16. Of a node's processes one encodes. With --out it leaves them there in a .bin, for
    the others and for later runs with the same text and vocabulary."""
    key = hashlib.sha256()
    for part in (*map(str.encode, vocabulary.files.values()), *texts):
        key.update(part)
        key.update(b"\0")  # no text has a zero byte
    key = key.hexdigest()[:16]
    path = pathlib.Path(s.out, f"text-{key}.bin")
    with open(f"{tempfile.gettempdir()}/ringgpt-{os.getuid()}-{key}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # it goes when the file is closed, or the process dies
        if s.out and path.exists():
            return np.memmap(path, np.uint16, "r")
        if key not in _encoded:
            _encoded[key] = np.concatenate([*encode_parts(texts, vocabulary)])
        tokens = _encoded[key]
        if s.out and len(tokens):  # the file has its name when it is whole, though other nodes may write it, too
            with writable(s.out, "--out"), tempfile.TemporaryDirectory(dir=s.out, prefix=".text-") as own:
                write_blocks(f"{own}/text.bin", [tokens.data])
                os.replace(f"{own}/text.bin", path)
    return tokens


def encode_parts(texts, vocabulary):
    """The tokens of each part of the texts. Processes of their own encode parts; one part is not worth one."""
    text = END.join(map(text_of, texts))
    parts = [*parts_of(text)]
    if len(parts) < 2:
        yield vocabulary.tokens_of(texts)
        return
    workers, started, done = cores(), time.perf_counter(), 0
    with concurrent.futures.ThreadPoolExecutor(workers) as threads:  # each waits for a process
        for part, tokens in zip(parts, threads.map(lambda part: encode_part(part, vocabulary.folder), parts)):
            done += len(part)
            print(f"text     {done / 1e6:.0f} of {len(text) / 1e6:.0f} million letters encoded, "
                  f"{done / 1e6 / (time.perf_counter() - started):.1f} a second on {workers} cores", flush=True)
            yield tokens


def parts_of(text, size=PART):
    """Cut a text into parts of about `size` letters, each encoded as it is in the whole: no piece lies in two."""
    start = 0
    while start < len(text):
        found = LINE_END.search(text, start + size)
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end


def encode_part(part, folder):
    here = pathlib.Path(__file__).resolve().parents[1]
    tokens = subprocess.check_output([sys.executable, "-c", WORKER, here, folder],
                                     input=part.encode("utf-8", "surrogateescape"))
    return np.frombuffer(tokens, np.uint16)
