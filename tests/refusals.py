"""Bad input: a program says what is wrong in one line, ends with exit code 2, and has written nothing."""

import errno
import fcntl
import functools
import itertools
import json
import os
import pickle
import random
import re
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch

import bench
import collectives as dist
import further.together
import kernels
import lessons.demos
import lessons.together
import model
import safe.flags
import safe.launch
import safe.run
import train
from further.bpe import END, LETTERS
from further.resume import crc_of
from further.flags import Flags
from further.kinds import resized
from further.refusals import check_numbers
from safe.flags import check_layout, model_config
from safe.huggingface import save
from tests.pool import parametrize
from tests.runs import parse, ran, TINY, TRAIN
from tests.text import BY_HAND, json_of, write_vocabulary
from theory.speed import MACHINES


# Flags, and what the one line must say; left out, the flags. Words in capitals are files of `files`; $ ends the line.
REFUSED = {
    train.main: """
        --steps -1
        --lr nan
        --min-lr 1
        --bogus 1                           | --bogus
        --recompute-blocks 2                | give --recompute mlp, too
        --vocab-size 100                    | --vocab-size
        --schedule bogus                    | bogus: No such file or directory; give one of gpipe, 
        --schedule SHORT                    | is no action: write F0, or F0/2 for that of stage 2; give
        --schedule STUCK --pp 2             | at B0, rank 1 waits at B0; give
        --schedule MARKED                   | of 2 ranks and 1 micro-batches: give --pp 2 --micro-batches 1
        --plain --schedule STUCK            | deadlock: no rank can go on: rank 0 waits at B0
        --cuda-graphs on --device cpu       | --cuda-graphs on
        --dtype fp8 --device cpu            | on GPUs of compute capability 8.9 or more (Ada, Hopper): give --dtype bf16
        --arch llama --model gpt2           | --model gpt2 is no preset of --arch llama: give --model tiny
        --n-kv-head 2                       | --n-kv-head 2 is for a Llama: give --arch llama, too
        --data /no/such/file                | /no/such/file
        --data SHORT                        | give more text or --seq-len 49$
        --data TWO                          | give more text$
        --data ZERO                         | left out, as no text: zero; give text
        --data FIFO --dp 2                  | fifo is no file or folder: give one
        --data BIG_BIN --init-from HF       | holds token 60000: give data for the model's 256
        --data BIG_BIN --tokenizer HAND     | holds token 60000, and the tokenizer has 265: give the one that made
        --data EMPTY_BIN --vocab-size 9     | 0 bytes are no uint16 tokens; give tokens, or a text under
        --data ODD_BIN                      | odd_bin.bin
        --data BIG_BIN                      | --vocab-size 60001
        --data ASCII --vocab-size 123 --prompt BYTE_255 | --prompt
        --seq-len 3 --prompt four           | tokens, the model's context is of 3: give a shorter one, or --sample 0
        --profile MINE                      | the trace.json there is no run's: name a new folder, e.g. --profile
        --out MINE                          | the index.html there is no run's: name a new folder, e.g. --out
        --out MINE/lock                     | the .lock there is no run's
        --out OLD_RUN                       | --out
        --out READ_ONLY                     | --out
        --pack --data BIG_BIN               | no end token stands between documents: give text
        --top-k 1                           | --top-k is for a model with experts
        --cuda-graphs on --experts 4        | only with --dtype bf16 and --ep 1
        --init-from HF --n-layer 3          | --n-layer 3
        --init-from NO_SHARD                | holds no b.safetensors, which model.safetensors.index.json names
        --init-from NO_INDEX                | model.safetensors.index.json: no index of weights
        --init-from NO_SIZE                 | config.json: has no n_positions
        --init-from HF --dp 2 --ep 2        | the model has none: leave --ep out
        --init-from HF --top-k 2            | --top-k 2: the model in --init-from has no experts; leave the flag out
        --init-from BAD_EXPERTS             | config.json: model_type 'gpt2' with num_experts 2
        --resume                            | --out DIR
        --resume HALF_RUN                   | holds no complete checkpoint
        --resume STEP_3 --vocab-size 300    | --vocab-size 300: the model in --resume has 256
        --resume STEP_3 --steps 4 --data ASCII | --data
        --resume STEP_3 --steps 4 --data /no/such/file | give --data TEXT, where the run's text lies now
        --init-from /no/such --out RUN --experts 2 | leave --init-from out and add --resume$
        --init-from EXPERTS --data TEXT --steps 3 --out RUN | weights of --init-from none there, /
        --resume STEP_3 --init-from HF      | beside --resume: leave --init-from out, or leave --resume out
        TINY --data TEXT --steps 3 --lr 0.5 --out RUN --experts 4 | (--experts 2 there, 4 here; --lr 0.002 there, 0
        --resume STEP_3 --steps 4 --out RUN | process 1 on here writes there; wait for its end, or give --out
        --resume STEP_3 --dp 2              | all 3 steps are done: give --steps 6, say, or --steps 0 for a sample
        --resume STEP_2 --steps 4 --out RUN | newer checkpoints lie beside it: move them away, or name a new folder
        --plain --dp 2                      | needs torchrun --nproc_per_node 2; 1 were started
        --plain --lr nan                    | --lr nan: must be between 0 and a billion: give e.g. --lr 0.002
        --plain --vocab-size 50             | too small for the text: give --vocab-size 121
        --plain --data ASCII --resume MUON  | exp_avg_sq, which the --optimizer muon in --resume has not kept: give --op
        --data ASCII --resume MUON --optimizer adamw | has not kept: give --optimizer muon$
        --plain --data ASCII --resume PLAIN --steps 1 | all 1 steps are done: give --steps 2
        --plain --data ASCII --resume PLAIN --n-layer 3 | the model in --resume has other sizes: give --n-layer 4
        --plain --data ZERO                 | has zero bytes, as UTF-16 and a .bin have them: give text in UTF-8
        --plain --data ASCII --out FOLDER   | holds a run, which this one would write over: add --resume, or name a new
        --plain --data ASCII --resume BROKEN | broken.pt: 
        --plain --data SHORT                | the held-out tenth is of 50 tokens: give more text$
        --plain --data TEXT --resume STEP_3 | the model in --resume has other sizes: give --
        --tokenizer NO_JSON                 | --tokenizer
        --tokenizer OTHER_MERGES            | vocabulary has no 'zq'
        --tokenizer GAPS                    | from 0 to 264
        --tokenizer SPACES                  | merges.txt: 'l o ' is not two tokens with one space between them
        --tokenizer CUT                     | its merges do not make 200 of the 465 tokens: they may be cut short
        --tokenizer WHOLE                   | tokenizer.json: pre_tokenizer.type is 'Metaspace', which is not known
        --tokenizer STRIPS                  | tokenizer.json: '<|endoftext|>' has ['lstrip'], which is not known here
        --tokenizer HAND --vocab-size 264   | has 265 tokens, the model 264: give --vocab-size 265 or more
        --init-from LARGE                   | its 400 tokens are not bytes: give --tokenizer FOLDER""",
    bench.main: """
        bogus                               | WHAT
        kernels --only elu --device cpu     | want a GPU
        kernels --gpus 2 --device cpu       | --gpus 2
        plan --machine nope                 | --machine nope
        plan --dtype fp32                   | --machine
        plan --dtype fp8                    | --dtype fp8 is for strategies: give --dtype bf16
        plan --gpus 16 --machine MACHINE    | network
        collectives --gpus 1 --device cpu   | --gpus 2
        strategies --json /no/such/x.json --device cpu | --json
        strategies --only ddp7 --device cpu | --only ddp7
        strategies --gpus 2 --batch-size 3 --only ddp --device cpu | --batch-size 4
        plan --init-from HF --model gpt2    | --model gpt2 beside --init-from: leave one of them out
        plan --json WORDS                   | words.bin: is there, and not what would be written: name a new file""",
    lessons.demos.main: """
        step --dp 5                         | give e.g. --batch-size 25
        tensor --ranks 0                    | --ranks
        links --ranks 1                     | --ranks 1: one process has nobody to send to; give --ranks 2
        together --tp 3                     | give --tp 2 or 4
        types --ep 3 --experts 6            | --ep 3 does not divide both --dp 2 and the
        types --dp 3 --cp 2 --zero 1 --zero-within 3 | --zero-within 3 cuts through the ranks of --cp or --ep
        blind --out WORDS                   | words.bin: is there, and not what would be written: name a new file
        pages --out MINE                    | index.html: is there, and not what would be written: name a new file
        puzzles ring --into EMPTY/deep      | Not a directory; name a folder that can be written
        explore --port 70000                | leave --port out
        puzzles rings                       | rings
        puzzles --into NEW                  | Name one, e.g. ring
        puzzles ring --into HF              | --into
        puzzles ring --check HF             | --check"""}


# Layouts and sizes that do not divide: each mode refuses them in the same words.
UNDIVIDED = """
    --n-head 3                              | give --n-embd 129
    --arch llama --n-kv-head 3              | give --n-kv-head 2 or 4
    --arch llama --n-embd 12                | give --n-embd 16
    --experts 4 --top-k 5                   | give --top-k 4 or --experts 5
    --experts 4 --expert-every 5            | give --expert-every 4
    --tp 3                                  | 4 heads of the model (did you mean --dp 3?): give --tp 2 or 4
    --n-head 128 --tp 128 --vocab-size 125  | --tp 128 is more than the vocabulary's 125 tokens
    --sp                                    | give --tp 2, say, or leave --sp out
    --sp --tp 4 --seq-len 66                | give --seq-len 68
    --cp 4 --seq-len 20                     | give --seq-len 24
    --cp 2 --tp 2 --sp --seq-len 6          | give --seq-len 8
    --cp 3 --cp-kind ulysses --seq-len 12   | give --cp 2 or 4 or --cp-kind ring
    --dp 2 --ep 2                           | give --experts 4, say, or leave --ep out
    --ep 2 --experts 4                      | give --ep 1 or --dp 2
    --dp 4 --ep 4 --experts 6               | give --ep 2
    --dp 3                                  | give e.g. --batch-size 18
    --dp 8 --zero 2 --zero-within 6         | give --zero-within 4 or 8
    --dp 2 --zero-within 2                  | give --zero 1, 2 or 3
    --pp 7                                  | give --pp 6 or fewer
    --pp 4 --schedule zb-v                  | give --pp 3 or fewer
    --pp 2 --virtual-stages 2               | is for --schedule interleaved and --pp 2 or more: leave it out
    --virtual-stages 7 --schedule interleaved | give --virtual-stages 6 or fewer
    --pp 2 --virtual-stages 4 --schedule interleaved | give --virtual-stages 3 or fewer
    --optimizer muon --arch llama --n-head 3 --n-kv-head 3 --n-embd 96 --tp 3 | 256 numbers of the MLP's width: give"""


class Started(BaseException):
    """Processes would start now, or meet others."""


@pytest.fixture
def refusal(monkeypatch, capsys):
    """refusal(main, words): the line with which a program ends before any process starts or meets another; "" if it
    would start, or does its work."""
    def start(*_, **__):
        raise Started

    monkeypatch.setattr(safe.launch, "start_again", start)
    monkeypatch.setattr(dist, "initialize", start)
    monkeypatch.setattr(further.together, "join", start)
    monkeypatch.setattr(lessons.together.together, "run", start)
    monkeypatch.setattr(kernels, "INTERPRETED", False)

    def of(main, words):
        monkeypatch.setattr("sys.argv", ["", *words])
        code = None
        try:
            main()
        except Started:
            code = "started"
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        assert err.count("\n") == 1 and not out if code == 2 else not err and (code is None or code == "started"), err
        assert not out or code is None
        return err
    return of


def remedies(line):
    """What a refusal advises: of each alternative {flag: its words, or None to leave it out}."""
    line = line.replace("; see --help", "")
    flag, advice = re.findall("--[a-z-]+", line)[:1], re.search(r"(?s)\b(give|leave|name|add) .*", line)
    found = []
    for part in re.split(r",? or (?=--|give|leave|add)", advice[0] if advice else ""):
        out = re.findall(r"leave (--[a-z-]+) out", part) + flag * bool(re.search("leave (it|the flag) out", part))
        given = re.findall(r"(--[a-z-]+)(?: (?!out|too|and|or)([^\s,;]+))?", re.sub("leave .*? out", "", part))
        if not re.search("[A-Z]{3}|move", part):
            found.append({name: [name, value] if value else [name] for name, value in given} | dict.fromkeys(out))
    return [remedy for remedy in found if remedy]


def heeded(words, remedy):
    """The words with which the advice was followed."""
    words = " ".join(words)
    for flag, more in remedy.items():
        words = re.sub(f" {flag}( (?!--)\\S+)?(?= |$)", "", f" {words}").strip() + " " + " ".join(more or [])
    return words.split()


@pytest.fixture(scope="session")
def files(text, tmp_path_factory):
    """{word: path} of what rows name, in one folder."""
    folder = tmp_path_factory.mktemp("bad")
    for name in "hf experts bad_experts large no_shard no_index no_size".split():
        sizes = model.GPTConfig(400 if name == "large" else 256, 16, 1, 2, 16)
        save(model.GPT(resized(sizes, experts=2 * ("experts" in name))), folder / name)
    hand = [*LETTERS.values(), *map("".join, BY_HAND), END]
    for name, merges, tokens in [("hand", BY_HAND, hand), ("gaps", [], []),
                                 ("other_merges", [("z", "q")], hand),
                                 ("spaces", BY_HAND, hand), ("cut", BY_HAND, [*hand, *map(str, range(1000, 1200))])]:
        write_vocabulary(folder / name, merges, tokens)
    config, size = ((folder / name / "config.json").read_bytes() for name in ("bad_experts", "no_size"))
    whole = json_of(folder / "hand")
    for name in "no_shard", "no_index":
        (folder / name / "model.safetensors").rename(folder / name / "a.safetensors")
    for name, data in {
            "no_shard/model.safetensors.index.json": b'{"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}',
            "no_index/model.safetensors.index.json": b"[]", "zero": b"text\0text", "two": b"xx",
            "no_size/config.json": size.replace(b"n_positions", b"n_"),
            "spaces/merges.txt": "".join(f"{a} {b} \n" for a, b in BY_HAND).encode(),
            "whole/tokenizer.json": whole.replace('"ByteLevel"', '"Metaspace"').encode(),
            "strips/tokenizer.json": whole.replace('"lstrip": false', '"lstrip": true').encode(),
            "words.bin": "wörds\n".encode() * 1000,
            "tokens.bin": (np.arange(5000, dtype=np.uint16) % 256).tobytes(),
            "stuck.txt": b"rank 0  F0 B0\nrank 1  B0 F0\n",
            "marked.txt": b"\xef\xbb\xbfrank 0  F0 .. B0\nrank 1  .. F0 B0\n",
            "mine/index.html": b"<h1>mine</h1>",
            "mine/trace.json": b'{"traceEvents": [{"name": "fetch"}]}',
            "mine/lock/.lock": b"mine",
            "broken.pt": b"PK",
            "empty": b"", "short": b"x" * 500, "ascii": b"plain text\n" * 1000, "empty_bin.bin": b"",
            "odd_bin.bin": b"123", "big_bin.bin": np.full(5000, 60000, np.uint16).tobytes(),
            "bad_experts/config.json": config.replace(b"ringgpt_moe", b"gpt2"),
            "no_json/vocab.json": b"{", "old_run/log.jsonl": b"",
            "gaps/vocab.json": json.dumps({token: 2 * i for i, token in enumerate(hand)}).encode(),
            "half_run/.step-00000003.part/file": b"",
            "machine.json": json.dumps({"machine": asdict(MACHINES["h200"]) | {"network": None}}).encode()}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    os.mkdir(folder / "read_only", 0o555)
    os.mkfifo(folder / "fifo")
    os.mkdir(folder / "muon")
    for file, flags in ("step-00000001.pt", Flags()), ("muon/step-00000001.pt", Flags(optimizer="muon")):
        torch.save({"flags": vars(flags), "step": 1, "skipped": 0, "scaler": None, "tensors": {"wte.weight": 0}},
                   folder / file)
    flags = f"--data {text} --steps 3 --save-every 1 --experts 2 --out {folder / 'run'}"
    ran([*TRAIN, *flags.split()], 1, folder / "log")
    lock = open(folder / "run" / ".lock", "w")  # noqa: SIM115  locked until the last test ends
    lock.write("process 1 on here")
    lock.flush()
    fcntl.flock(lock, fcntl.LOCK_EX)
    words = {path.stem.upper(): path for path in folder.iterdir()} | {
        "FOLDER": folder, "folder": folder, "lock": lock, "TEXT": text, "TINY": " ".join(TINY),
        "BYTE_255": os.fsdecode(b"\xff"),
        "NEW": folder / "new", "PLAIN": folder / "step-00000001.pt",
        "STEP_2": folder / "run" / "step-00000002", "STEP_3": folder / "run" / "step-00000003"}
    return words if os.geteuid() else words | {"READ_ONLY": "/proc/run"}  # root may write anywhere, almost


@parametrize("main, row", [(main, row) for main, rows in REFUSED.items() for row in rows.split("\n")
                                       if row], ids=lambda value: getattr(value, "__module__", value))
def test_bad_input_is_one_line_and_exit_code_2(main, row, files, refusal, monkeypatch):
    def written():
        return {path: path.read_bytes() for path in files["folder"].rglob("*") if path.is_file()}

    flags, _, says = map(str.strip, row.partition(" | "))
    words = [re.sub("^[A-Z_0-9]+", lambda name: str(files.get(name[0], name[0])), word) for word in flags.split()]
    words = " ".join(words).split(" ")
    if main == train.main and not {"--data", "--resume"} & {*words}:
        words += ["--data", str(files["ASCII"])]
    before, said = written(), refusal(main, words)
    assert (says or flags) in said.replace("\n", "$") and written() == before
    if main == train.main:
        monkeypatch.setattr(safe.run, "lock", lambda *_: None)
        monkeypatch.setattr(safe.run, "Log", lambda *_: None)
        heed(functools.partial(refusal, main), words, said)


@parametrize("row", UNDIVIDED.strip().splitlines())
def test_what_does_not_divide_is_refused_in_the_same_words_in_each_mode(row, files, refusal):
    flags, _, says = map(str.strip, row.partition(" | "))
    words = f"{flags} --data {files['ASCII']}".split()
    said = {refusal(train.main, words + mode) for mode in ([], ["--plain"], ["--together"])}
    assert len(said) == 1 and says in min(said), said
    heed(functools.partial(refusal, train.main), words + ["--together"], min(said))


def heed(refusal, words, said, hops=3):
    """Whatever a refusal advises, the program starts, or has another advice, which in the end lets it start."""
    for remedy in remedies(said):
        now = refusal(heeded(words, remedy))
        assert not now or hops and remedies(now), (words, said, now)
        heed(refusal, heeded(words, remedy), now, hops - 1)


@parametrize("nth", [1, 2])
def test_a_full_disk_at_the_start_is_one_line(nth, files, refusal, tmp_path, monkeypatch):
    """It is full when run.json, or the log, is written: nothing half written is left."""
    calls = itertools.count(1)

    def fsync(file):
        if next(calls) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    said = refusal(train.main, [*TINY, *f"--device cpu --data {files['TEXT']} --out {tmp_path}/new".split()])
    assert f"--out {tmp_path}/new: No space left on device; name a folder that can be written" in said
    assert not [*tmp_path.rglob("*.part")]


def refusal_of_layout(words, world, here):
    try:
        s = parse(words)
        check_numbers(s)
        check_layout(s, model_config(s)[0], world, here)
    except ValueError as problem:
        return str(problem)
    return ""


VALUES = """dp=0,1,2,3,4,5,6,7,8 tp=1,2,3,4,5,6,7,8 pp=0,1,2,3,4,5,6,7 cp=1,2,3,4 ep=1,2,3,4 experts=0,1,2,3,4,5,6
    top-k=1,2,3,4,5 expert-every=1,2,3,4,5 n-layer=1,2,3,4,5,6,7,8 n-head=1,2,3,4,5,6 n-embd=12,30,128 seq-len=0,1,20,66
    batch-size=0,1,2,3,4,6,8,12,15,16 micro-batches=0,1,2,3,4,5,6 zero=0,1,2,3 zero-within=1,2,3,4,5,6
    virtual-stages=1,2,3,4 cp-kind=ulysses sp= cuda-graphs=on kernels=triton device=cuda lr=0,nan
    min-lr=1"""
VALUES = {"schedule": [*further.flags.SCHEDULES]} | {
    flag: values.split(",") for flag, values in (word.split("=") for word in VALUES.split())}


def test_advice_on_drawn_layouts_leads_to_a_start(monkeypatch):
    """Of several faults one is told after the other."""
    monkeypatch.setattr(safe.flags, "gpus_here", lambda: 0)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    draw = random.Random(0)
    for _ in range(150):
        world, flags = draw.choice([1, 1, 1, 2, 3, 4, 6, 8]), draw.sample([*VALUES], draw.randint(1, 5))
        refusal = functools.partial(refusal_of_layout, world=world, here=draw.choice([world, max(1, world // 2)]))
        words = " ".join(f"--{flag} {draw.choice(VALUES[flag])}" for flag in flags).split()
        told = [refusal(words)]
        while told[-1]:
            assert len(told) < 15 and remedies(told[-1]), told
            words = heeded(words, draw.choice(remedies(told[-1])))
            told.append(refusal(words))


def test_bad_input_ends_all_ranks_before_they_meet(tmp_path):
    said = ran("--resume /no/such --dp 2".split(), 2, tmp_path / "log", [2, 2])
    told = {line.replace("train.py: rank 1: ", "train.py: ") for line in said.splitlines()}  # rank 1 was not ended
    assert len(told) == 1 and "/no/such" in said, said


# ------------------------------------------------------------------------------------------------- damaged checkpoints

class Malice:
    def __reduce__(self):
        return os.system, ("touch hacked",)


def cut(data):
    return data[:-10]


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def edited(old, new):
    return lambda data: data.replace(old, new)


def of_another_format(data):
    manifest = json.loads(data) | {"format": 2}
    del manifest["crc32"]
    return json.dumps(manifest | {"crc32": crc_of(manifest)}).encode()


MANIFEST, CONFIG, WEIGHTS = "manifest.json", "config.json", "model.safetensors"
DAMAGED = {  # flag: a file of a checkpoint, what becomes of its bytes (None: it goes), what the one line must say
    "--resume": [
        ("optimizer.safetensors", None, "optimizer.safetensors: No such file"),
        (MANIFEST, cut, "manifest.json: "), (MANIFEST, of_another_format, "its format is 2"),
        (MANIFEST, edited(b"skipped", b"skjpped"), "manifest.json: it does not match its own checksum"),
        (WEIGHTS, cut, "model.safetensors: it has"), (WEIGHTS, flipped, "model.safetensors: its checksum")],
    "--init-from": [  # which reads no manifest, so only the contents can tell
        (WEIGHTS, lambda _: pickle.dumps({"wte.weight": Malice()}), "not a whole .safetensors file"),
        (WEIGHTS, cut, "it is cut short or damaged"),
        (WEIGHTS, edited(b"experts.1.c_fc.weight", b"experts.9.c_fc.weight"),
         "model.safetensors: has no transformer.h.0.mlp.experts.1.c_fc.weight, which config.json asks for"),
        (WEIGHTS, edited(b"[64, 16]", b"[16, 64]"),
         "h.0.mlp.experts.0.c_proj.weight is (16, 64), config.json makes it (64, 16)"),
        (CONFIG, cut, "config.json: ")]}


@parametrize("flag, file, change, says", [(flag, *row) for flag, rows in DAMAGED.items() for row in rows])
def test_damaged_checkpoint_is_one_line_and_exit_code_2(flag, file, change, says, files, tmp_path, monkeypatch,
                                                        refusal):
    """Nothing in it runs."""
    step = tmp_path / "step-00000003"
    shutil.copytree(files["STEP_3"], step)
    (step / file).write_bytes(change((step / file).read_bytes())) if change else (step / file).unlink()
    monkeypatch.chdir(tmp_path)
    assert says in refusal(train.main, ["--device", "cpu", "--data", str(files["TEXT"]), flag, str(step)])
    assert not os.path.exists("hacked")
