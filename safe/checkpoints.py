"""Whose run a folder holds, and its checkpoints: found, locked, removed when newer ones are whole."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import re
import shutil
import socket
import zlib

import numpy as np

import collectives as dist
from further.bad_input import BadInput, reject, writable
from further.bpe import Tokenizer, WHOLE
from further.flags import dashed
from further.folder import UNKNOWN, warn_once, write_file
from further.resume import checkpoints, open_checkpoint, run_of, save, unknown
from further.text import Bytes
from parallel import master_dtype
from safe.files import keep_others
from safe.huggingface import config_json, weight_files


# ----------------------------------------------------------------------------------------------------- a run's identity

def identity_of(s, config):
    """What decides a run's losses. A run goes on in --out only with its own. Of the data it says nothing: `fingerprint`
    does, when the data is read."""
    run = run_of(s, config)
    run["flags"]["data"] = s.data and os.path.abspath(s.data)
    run["start"] = {"init_from": s.init_from and os.path.abspath(s.init_from), "weights": crc_of_weights(s.init_from)}
    return run


def crc_of_edges(arrays):
    """Of the first and last MiB of each: all would take minutes."""
    crc = 0
    for array in arrays:
        for edge in array[:1 << 20], array[-1 << 20:]:
            crc = zlib.crc32(np.ascontiguousarray(edge), crc)
    return crc


def fingerprint(train, held_out, vocabulary):
    """The identity of a Trainer's data."""
    return {"tokens": len(train) + len(held_out), "bytes": isinstance(vocabulary, Bytes),
            "crc32": crc_of_edges([train, held_out])}


def crc_of_weights(folder):
    """The identity of the weights in a folder of --init-from; 0 without one."""
    return crc_of_edges(np.memmap(file, np.uint8, "r") for file in weight_files(folder)) if folder else 0


PATHS = "data", "init_from"  # data and weights count by their contents, so they may move


def differences(there, here, parts=("model", "flags", "start", "data")):
    """How two identities differ in what both know, in words."""
    found = []
    for part in parts:
        for key, value in here[part].items():
            known = there[part].get(key, value)
            if known != value and key not in PATHS:
                name = f"data: {key}" if part == "data" else dashed(key)
                if key == "weights":
                    name, known, value = "weights of --init-from", there[part]["init_from"], here[part]["init_from"]
                found.append(f"{name} {shown(known)} there, {shown(value)} here")
    return found


def shown(value):
    return "none" if value in (None, "") else value


# ------------------------------------------------------------------------------------------------- written and removed

def write_checkpoint(trainer, done, run, came):
    """Write the checkpoint after `done` steps into --out, on rank 0, and remove all but the newest --keep there; those
    with somebody's files stay. Call it on all ranks. OSError on rank 0 if it is not saved. run: the identity; came: the
    Came of the weights."""
    config = trainer.config
    said = config_json(config, master_dtype(trainer.net.layout.dtype), came.config, token_ids(trainer.vocabulary))
    save(trainer, done, run, said, {**class_of_tokenizer(trainer), **came.files})
    out, keep = trainer.s.out, trainer.s.keep
    ours = [path for path in checkpoints(out) if path.is_dir() and has_no_others(path)]
    for old in ours[:-keep] if dist.get_rank() == 0 else ():
        gone = old.with_name(f".{old.name}.old")
        with nothing_lost(old):
            os.rename(old, gone)  # because a folder half removed must not look like a checkpoint
            shutil.rmtree(gone)


@contextlib.contextmanager
def nothing_lost(path):
    """Where something cannot be removed, that is said once, and costs nothing but its space."""
    try:
        yield
    except OSError as error:
        warn_once(f"{path} cannot be removed: {error.strerror}")


def class_of_tokenizer(trainer):
    """{name: bytes} of a file that says which class the tokenizer is of: for all but a GPT-2 transformers would take
    another."""
    config, vocabulary = trainer.config, trainer.vocabulary
    if config.arch == "gpt2" and not config.experts or not isinstance(vocabulary, Tokenizer):
        return {}
    kind = "PreTrainedTokenizerFast" if WHOLE in vocabulary.files else "GPT2Tokenizer"
    return {"tokenizer_config.json": json.dumps({"tokenizer_class": kind}).encode()}


def token_ids(vocabulary):
    """The numbers of the tokens that begin and end a text."""
    numbers = getattr(vocabulary, "numbers", {})
    end = numbers.get(getattr(vocabulary, "end", None))
    return {"bos_token_id": numbers.get(getattr(vocabulary, "begin", None), end), "eos_token_id": end}


# What file managers leave in every folder that somebody looks into.
LEFT_BEHIND = r"\.DS_Store|\._.*|\.directory|Thumbs\.db|desktop\.ini"


def has_no_others(path):
    """Whether a folder is a checkpoint, and has no file but its own."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        own = {"manifest.json", *json.loads((path / "manifest.json").read_text())["files"]}
        others = {name for name in os.listdir(path) if not re.fullmatch(LEFT_BEHIND, name)} - own
        if others:
            warn_once(f"{path} stays, because of {min(others)}, which no run has written")
        return not others
    return False


# -------------------------------------------------------------------------------------------------- the folder of --out

def start_of(s, config, asked, read_all):
    """(the Checkpoint to go on from, the identity of the run in --out), each None if there is none. asked: the
    Checkpoint of --resume; None takes the newest in --out. BadInput if --out holds another run.

    Data is not compared, because this comes before a text is encoded into --out."""
    out = pathlib.Path(s.out)
    found = checkpoints(out)
    another = f"name a new folder, e.g. --out {out}-2"
    for name in "run.json", "index.html", ".lock":
        keep_others(out / name, "--out")
    if asked:
        own = asked.path.resolve().parent == out.resolve()
        is_newest = found and found[-1].samefile(asked.path)
        reject(own and not is_newest,
               f"--resume {asked.path}: newer checkpoints lie beside it: move them away, or {another}")
        reject(not own and (found or (out / "run.json").exists()), f"--out {out} holds another run than --resume "
               f"{asked.path}: leave --out out, or {another}")
        return asked, asked.manifest["run"]
    newest = open_checkpoint(found[-1], read_all) if found else None
    logged = (out / "log.jsonl").exists()  # asked first: rank 0 may be writing run.json, and then the log, meanwhile
    try:
        there = json.loads((out / "run.json").read_text())
    except (OSError, ValueError):
        there = newest and newest.manifest["run"]
    reject(not there and logged,
           f"--out {out} already holds files of a run, and no run.json that says which: {another}")
    here = identity_of(s, config)
    how = there and (unknown(there["flags"] | there["model"]) or "; ".join(differences(there, here)[:3]))
    instead = f", or {'leave --init-from out and ' * bool(s.init_from)}add --resume" * bool(newest)
    reject(how, f"--out {out} holds another run ({how}): {another}{instead}")
    return newest, there


def check_same_data(s, known, here, checkpoint):
    """Reject data that is not what a run was trained on. known, here: the identity of that run and of this."""
    how = differences(known, here, ("data",))
    another = f"--out {s.out}-2 " * bool(s.out)
    anew = checkpoint and f", or for a new run give {another}--init-from {checkpoint.path} and leave --resume out"
    reject(how, f"--data {s.data or '(the standard library)'} is not what this run was trained on ({'; '.join(how)}): "
           f"give that{anew or ''}")


def lock(folder, identity):
    """Make --out this run's own, on rank 0, and keep a second run from writing there.

    Returns the file .lock, which is locked until it is closed or this process ends. It names the process. Rank 0
    empties the file when all is saved; the process that started the ranks looks at it to choose its exit code."""
    out = pathlib.Path(folder)
    with writable(out, "--out"):
        file = (out / ".lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = (out / ".lock").read_text().strip() or "another run"
            raise BadInput(f"--out {out}: {holder} writes there; wait for its end, or give --out {out}-2 and leave "
                           "--resume out") from None
        except OSError as error:
            if error.errno not in (*UNKNOWN, errno.ENOLCK):
                raise
            warn_once(f"the filesystem of --out has no locks ({error.strerror}): nothing keeps a second run out of it")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        write_file(out / "run.json", json.dumps(identity))
        for path in out.iterdir():  # a killed run leaves folders half written or half removed
            unfinished = re.fullmatch(r"\.step-\d{8,}\.(part|old)|\.tokens-\w{8}", path.name)
            if unfinished and path.is_dir() and not path.is_symlink():
                with nothing_lost(path):
                    shutil.rmtree(path)
    return file
