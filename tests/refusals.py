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
import further.bpe
import further.together
import kernels
import lessons.demos
import lessons.together
import model
import safe.data
import safe.flags
import safe.launch
import safe.run
import train
from further.bpe import END, LETTERS
from safe.checkpoints import crc_of
from safe.files import crc_of_file
from further.kinds import resized
from safe.flags import check_layout, check_numbers, model_config
from safe.huggingface import save
from safe.sizes import BadInput
from tests.pool import parametrize
from tests.runs import parse, ran, TINY, TRAIN
from tests.text import BY_HAND, json_of, write_vocabulary
from theory.speed import MACHINES


# Flags, and what the one line must say; left out, the flags. Words in capitals are files of `files`; $ ends the line.
REFUSED = {
    train.main: """
        --steps -1
        --lr nan
        --lr -1
        --clip inf
        --min-lr 1
        --batch-size 0
        --micro-batches 3
        --dp 0
        --virtual-stages 0
        --resume /no/such/run
        --save-every -1
        --keep -1
        --timeout 0
        --ep 0
        --experts -1
        --balance-rate nan
        --seed -3
        --warmup-steps -1
        --cp 0
        --sample -5
        --temperature -1
        --temperature nan
        --top-k-sample -1
        --top-k-sample x                    | --top-k-sample
        --model gpt5                        | --model
        --bogus 1                           | --bogus
        --zero 4                            | --zero
        --keep two                          | --keep
        --dp 3                              | --batch-size 18
        --tp 3                              | --tp 1
        --tp 8                              | --tp 4
        --pp 7                              | --pp 6
        --n-head 3                          | --n-embd 129
        --recompute-blocks 2                | give --recompute mlp, too
        --seq-len 0                         | --seq-len
        --vocab-size 100                    | --vocab-size
        --pp 2 --virtual-stages 2           | --schedule interleaved
        --schedule-file /no/such            | /no/such: No such file or directory; give a row a rank
        --schedule-file SHORT               | is no action: write F0, or F0/2 for that of stage 2; give
        --schedule-file STUCK --pp 2        | at B0 for B0 of rank 1, rank 1 waits at B0 for F0 of rank 1; give
        --schedule-file UNLIKE --pp 2       | ranks have [1, 2] stages: give each equally many
        --schedule-file LISTS               | lists.txt is of 2 ranks and 1 micro-batches: give --pp 2 --micro-batches 1
        --schedule-file MARKED              | of 2 ranks and 1 micro-batches: give --pp 2 --micro-batches 1
        --schedule-file LISTS --pp 2 --micro-batches 1 --schedule gpipe | leave one of them out
        --schedule-file LISTS --pp 2 --micro-batches 1 --virtual-stages 2 | --virtual-stages 2 is for
        --plain --schedule-file STUCK       | deadlock: no rank can go on: rank 0 waits at B0
        --cuda-graphs on --device cpu       | --cuda-graphs on
        --dtype fp8 --device cpu            | on GPUs of compute capability 8.9 or more (Ada, Hopper): give --dtype bf16
        --dp 8 --zero 2 --zero-within 6     | --zero-within 6 does not divide --dp 8: give --zero-
        --dp 2 --zero-within 2              | give --zero 1, 2 or 3
        --optimizer muon --dp 2 --zero 3    | and --zero 3 keeps parts of them: give --form full --zero 2
        --optimizer muon --dp 2 --zero 1 --comm torch --device cpu | as --optimizer muon with --zero has them: leave --c
        --sp                                | --sp cuts tokens over --tp: give --tp 2
        --sp --tp 4 --seq-len 66            | 66 tokens cannot be cut into 4 parts: give --seq-len 68
        --cp 4 --seq-len 20                 | sequences of 20 tokens cannot be cut into 8 parts: give --seq-len 24
        --cp 2 --tp 2 --sp --seq-len 6      | cannot be cut into 4 parts: give --seq-len 8
        --arch llama --tp 4                 | does not divide the model's 2 heads of keys and values: give --tp 2
        --arch llama --n-kv-head 3          | --n-kv-head 3 does not divide --n-head 4: give --n-kv-head 1
        --arch llama --model gpt2           | --model gpt2 is no preset of --arch llama: give --model tiny
        --arch gpt2 --model llama3-8b       | --model llama3-8b is no preset of --arch gpt2: give --model tiny
        --init-from HF --inner 65           | --inner 65: the model in --init-from has 64; leave the flag out
        --n-kv-head 2                       | --n-kv-head 2 is for a Llama: give --arch llama, too
        --arch llama --experts 4 --out runs/m | has no name in transformers: leave --experts out, or give --plain
        --cp 3 --cp-kind ulysses --seq-len 12 | does not divide the 4 heads of a rank: give --cp 1 or
        --data /no/such/file                | /no/such/file
        --data EMPTY                        | it is empty
        --data SHORT                        | give more text or --seq-len 49$
        --data SHORT --cp 2 --tp 2 --sp     | give more text or --seq-len 48$
        --data SHORT --init-from LONG       | give more text or --seq-len 49$
        --data TWO                          | give more text$
        --data NOTHING                      | left out, as no text: picture; give text
        --data ZERO                         | left out, as no text: zero; give text
        --data FIFO --dp 2                  | can be read by one process alone, and this layout has 2: write it into a
        --data /dev/zero                    | /dev/zero is no file, folder or pipe
        --data LLM_C --tokens uint32        | the header of llm.c's in --data
        --data LLM_C_CUT                    | by its header of llm.c's it has 500 tokens, and there are 499: give a who
        --data U32                          | u32.bin holds uint32: give --tokens uint32, too
        --data LLAMA                        | llama.bin holds uint32: give --tokens uint32, too
        --data TOKENS --tokens uint32       | tokens.bin holds no uint32: it would have token 16,711,934: leave --tokens
        --data ASCII --tokens uint16        | is for a .bin, and --data
        --data WORDS                        | words.bin holds text, and no uint16 tokens; give tokens, or a text under
        --data ZIP                          | zip.bin holds a zip archive, as torch.save and numpy.savez write it
        --data I64                          | i64.bin', 'int64').astype('uint16').tofile('tokens.bin')"$
        --data I64_LARGE                    | holds int64: give the tokens.bin of uint32 that this makes: python
        --data BIG_BIN --init-from HF       | holds token 60000: give data for the model's 256
        --data BIG_BIN --tokenizer HAND     | holds token 60000, and the tokenizer has 265: give the one that made
        --data EMPTY_BIN --vocab-size 9     | 0 bytes are no uint16 tokens; give tokens, or a text under
        --data ODD_BIN                      | odd_bin.bin
        --data BIG_BIN                      | --vocab-size 60001
        --data ASCII --vocab-size 123 --prompt é | --prompt
        --data ASCII --vocab-size 123 --prompt BYTE_255 | --prompt
        --seq-len 3 --prompt four           | tokens, the model's context is of 3: give a shorter one, or --sample 0
        --trace EMPTY                       | --trace
        --trace MINE                        | the trace.json there is no run's: name a new folder, e.g. --trace
        --profile EMPTY                     | --profile
        --profile MINE                      | the rank-0.json there is no run's: name a new folder, e.g. --profile
        --out EMPTY                         | --out
        --out MINE                          | the index.html there is no run's: name a new folder, e.g. --out
        --out MINE/run                      | the run.json there is no run's: name a new folder, e.g. --out
        --out MINE/older                    | the run.json there is no run's
        --out MINE/nulls                    | the run.json there is no run's
        --out MINE/empty                    | the run.json there is no run's
        --out MINE/lock                     | the .lock there is no run's
        --out OLD_RUN                       | --out
        --out READ_ONLY                     | --out
        --out NO_LOCK                       | --out

        --dp 2 --ep 2                       | give --experts 4, say, or leave --ep out
        --ep 2 --experts 4                  | --ep 2 does not divide --dp 1: give --ep 1 or --dp 2
        --dp 6 --ep 4 --experts 3           | --ep 4 does not divide --dp 6: give --ep 1
        --dp 4 --ep 4 --experts 6           | --ep 4 does not divide the 6 experts: give --ep 2
        --experts 4 --top-k 5               | less than the 5 that a token goes through: give --top-k 4 or --experts 5
        --experts 1                         | give --top-k 1 or --experts 4
        --top-k 1                           | --top-k is for a model with experts
        --shared-experts 1                  | --shared-experts is for a model with experts: give --experts 4
        --expert-every 2                    | --expert-every is for a model with experts: give --experts 4
        --experts 4 --expert-every 5        | give --expert-every 4
        --cuda-graphs on --experts 4        | and no --experts: leave it out
        --pack --data BIG_BIN               | no end token stands between documents: give text
        --loss-chunk -1                     | --loss-chunk

        --init-from /no/such/folder         | --init-from
        --init-from HF --n-layer 3          | --n-layer 3
        --init-from BAD_HF                  | config.json
        --init-from NO_WEIGHTS              | holds no model.safetensors, which transformers' save_pretrained writes
        --init-from NO_SHARD                | holds no b.safetensors, which model.safetensors.index.json names
        --init-from NO_INDEX                | model.safetensors.index.json: no index of weights
        --init-from NO_SIZE                 | makes it (1024, 16) (vocab_size 256, n_positions 1024, a GPT-2's, as there
        --init-from HF --seq-len 17         | --seq-len 17: the model in --init-from has 16; leave the flag out
        --init-from HF --seq-len 0          | --seq-len 0: must be between 1 and
        --init-from HF --dp 2 --ep 2        | the model has none: leave --ep out
        --init-from HF --experts 4          | --experts 4: the model in --init-from has 0; leave the flag out
        --init-from HF --top-k 2            | --top-k 2: the model in --init-from has no experts; leave the flag out
        --init-from EXPERTS --top-k 1       | --top-k 1: the model in --init-from has 2; leave the flag out
        --init-from BAD_EXPERTS             | config.json: model_type 'gpt2' with num_experts 2

        --resume                            | --out DIR
        --resume --out HF                   | no complete checkpoint
        --resume HF                         | leave --resume out
        --resume HALF_RUN                   | holds no complete checkpoint
        --resume STEP_3 --tp 3              | --tp 3
        --resume STEP_3 --vocab-size 300    | --vocab-size 300: the model in --resume has 256
        --resume STEP_3 --n-layer 2         | --n-layer 2
        --resume STEP_3 --data ASCII        | --data
        --resume STEP_3 --data /no/such/file | give --data TEXT, where the run's text lies now
        --init-from /no/such --out RUN --experts 2 | leave --init-from out and add --resume$
        --init-from EXPERTS --data TEXT --steps 3 --out RUN | weights of --init-from none there, /
        --resume STEP_3 --experts 4         | --experts 4: the model in --resume has 2
        --resume STEP_3 --init-from HF      | beside --resume: leave --init-from out, or leave --resume out
        TINY --data TEXT --steps 3 --lr 0.5 --out RUN --experts 2 | (--lr 0.002 there, 0.5 here): name a new folder
        TINY --data TEXT --steps 3 --lr 0.5 --out RUN --experts 2 | /run-2, or add --resume$
        TINY --data TEXT --steps 3 --seed 5 --out RUN --experts 2 | (--seed 0 there, 5 here): name a new folder
        TINY --data TEXT --steps 3 --lr 0.5 --out RUN --experts 4 | (--experts 2 there, 4 here; --lr 0.002 there, 0
        TINY --data TEXT --steps 3 --lr 0.5 --out RUN --experts 0 | /run-2$
        --resume STEP_3 --out RUN           | process 1 on here writes there; wait for its end, or give --out
        --resume STEP_3 --out NEW           | goes on in its own folder, from the newest checkpoint there: give --out
        --resume PLAIN --out NEW            | from the newest checkpoint there: give --out /
        --resume RENAMED --out NEW          | from the newest checkpoint there: for a new run give --init-from
        --resume STEP_2 --out RUN           | /run and move newer ones away
        --plain --dp 2                      | needs torchrun --nproc_per_node 2; 1 were started
        --plain --tp 0                      | --tp 0: give 1 or more
        --plain --lr nan                    | --lr nan: give a number, e.g. 0.001
        --plain --zero 1 --zero-within 0    | --zero-within 0: give 1 or more
        --plain --sample -1                 | --sample -1: give 0 or more
        --plain --vocab-size 50             | too small for the text: give --vocab-size 121
        --plain --data ASCII --resume MUON  | exp_avg_sq, which the --optimizer muon in --resume has not kept: give --op
        --data ASCII --resume MUON --optimizer adamw | has not kept: give --optimizer muon$
        --data ASCII --out MUON             | (--optimizer muon there, adamw here): name a new folder, e.g. --out
        --data ASCII --out MUON             | /muon-2$
        --plain --data ASCII --resume PLAIN --n-layer 3 | the model in --resume has other sizes: give --n-layer 4
        --plain --data ZERO                 | has zero bytes, as UTF-16 and a .bin have them: give text in UTF-8
        --plain --data /no/such/file        | No such file or directory: '/no/such/file'
        --plain --data ASCII --tokenizer /no/such | No such file or directory: '/no/such/vocab.json'
        --plain --data ASCII --out EMPTY    | File exists
        --plain --data ASCII --out FOLDER   | holds a run, which this one would write over: add --resume, or name a new
        --plain --data ASCII --out OLD_RUN  | holds a run, which this one would write over: add --resume, or name a new
        --plain --data ASCII --out FOLDER --resume EARLIER | holds a run, which this one would write over
        --plain --data ASCII --resume BROKEN | broken.pt: no whole checkpoint; name another
        --plain --data SHORT                | the held-out tenth is of 50 tokens: give more text$
        --plain --data TEXT --resume STEP_3 | step-00000003: no file step-*.pt, as --plain writes it; leave --plain
        --plain --data ASCII --resume /none | /none: no file step-*.pt, as --plain writes it; leave --plain out

        --tokenizer /no/such                | --tokenizer /no/such: vocab.json: No such file
        --tokenizer HALF                    | merges.txt: No such file
        --tokenizer NO_JSON                 | --tokenizer
        --tokenizer LIST                    | --tokenizer
        --tokenizer OTHER_MERGES            | vocabulary has no 'zq'
        --tokenizer NO_END                  | vocabulary has no '<|endoftext|>'
        --tokenizer GAPS                    | from 0 to 264
        --tokenizer SPACES                  | merges.txt: 'l o ' is not two tokens with one space between them
        --tokenizer CUT                     | its merges do not make 200 of the 465 tokens: they may be cut short
        --tokenizer WHOLE                   | tokenizer.json: pre_tokenizer.type is 'Metaspace', which is not known
        --tokenizer STRIPS                  | tokenizer.json: '<|endoftext|>' has ['lstrip'], which is not known here
        --tokenizer HAND --vocab-size 264   | has 265 tokens, the model 264: give --vocab-size 265 or more
        --tokenizer HAND --data EMPTY       | it is empty; give text
        --tokenizer HAND --data EMPTY --out NEW | it is empty; give text
        --tokenizer HAND --seq-len 3 --prompt zzzz | --prompt has 4 tokens, the model's context is of 3
        --tokenizer HAND --out OLD_RUN      | name a new folder
        --init-from LARGE                   | its 400 tokens are not bytes: give --tokenizer FOLDER
        --init-from LARGE --tokenizer HAND  | has 265 tokens, the model 400: give the tokenizer
        --init-from LARGE_HALF              | merges.txt: No such file
        --init-from OTHER_WORDS             | tokenizer.json: pre_tokenizer.type is 'Metaspace', which""",
    further.bpe.main: """
        /no/such --vocab-size 300 --out NEW | No such file
        EMPTY --vocab-size 300 --out NEW    | no text
        ZERO --vocab-size 300 --out NEW | or zero bytes in it
        ASCII --vocab-size 256 --out NEW    | --vocab-size 256
        ASCII --vocab-size 70000 --out NEW  | --vocab-size 70000
        ASCII --vocab-size 300 --out HAND   | a vocab.json is there already: name a new folder, e.g. --out
        ASCII --vocab-size 300 --out HALF   | a vocab.json is there already: name a new folder, e.g. --out
        TEXT --vocab-size 300 --out EMPTY   | File exists""",
    bench.main: """
        bogus                               | WHAT
        kernels --only foo --device cpu     | --only foo
        kernels --only elu --device cpu     | want a GPU
        kernels --gpus 2 --device cpu       | --gpus 2
        plan --gpus 0                       | --gpus
        plan --machine nope                 | --machine nope
        plan --dtype fp32                   | --machine
        plan --dtype fp8                    | --dtype fp8 is for strategies and scaling: give --dtype bf16
        plan --gpus 16 --machine MACHINE    | network
        plan --gpus 4 --n-head 7            | --n-embd 1603
        plan --model gpt5                   | --model
        collectives --only foo --device cpu | --only foo
        collectives --gpus 1 --device cpu   | --gpus 2
        lessons --only order --device cpu   | there are elu
        strategies --json /no/such/x.json --device cpu | --json
        strategies --json / --device cpu    | --json /
        strategies --only ddp7 --device cpu | --only ddp7
        strategies --only tp --gpus 3 --device cpu | --tp 1
        strategies --gpus 2 --batch-size 3 --only ddp --device cpu | --batch-size 4
        strategies --device tpu             | --device
        scaling --only tp --gpus 3 --device cpu | ddp, zero3, zero1, zero2
        scaling --micro-batches 2 --device cpu | --micro-batches 2
        pictures nope.json                  | nope.json
        pictures MACHINE                    | KeyError 'traceEvents'
        pictures --into MACHINE             | --into
        pictures --into MINE                | ring.svg: is there, and not what would be written: name a new file
        plan --hf HF --model gpt2           | --model gpt2 beside --hf: leave one of them out
        plan --hf FOLDER                    | config.json: [Errno 2] No such file
        plan --json WORDS                   | words.bin: is there, and not what would be written: name a new file
        pictures TRACE                      | trace.json""",
    lessons.demos.main: """
        tensor --ranks 0                    | --ranks
        context --ranks 0                   | --ranks
        data --ranks two                    | --ranks
        experts --ranks -1                  | --ranks
        links --ranks 1                     | --ranks 1: one process has nobody to send to; give --ranks 2
        links --json /no/such/m.json        | --json /no/such/m.json: No such file or directory; name a file in
        links --json WORDS                  | words.bin: is there, and not what would be written: name a new file
        memory --model gpt9                 | --model
        together --break nosuch             | nosuch is no function of the five files or of further/: give e.g.
        together --break ranks[3]           | ranks[3] is no function of the five files
        together --rank 1                   | --rank 1 is for --break: give --break all_reduce, too
        together --break isend --rank 4     | --rank 4: there are ranks 0 to 3: give --rank 0
        together --dp 3                     | give e.g. --dp 2 --tp 2 --pp 1
        types --ep 3                        | --ep 3 does not divide --dp 2: give --ep 1 or --dp 3
        types --dp 3 --cp 2 --zero 1 --zero-within 3 | --zero-within 3 cuts through the ranks of --cp or --ep
        together --pp 7                     | give e.g. --dp 2 --tp 2 --pp 1
        together --many-ranks 7             | give --many-ranks 8 or more
        together --out /no/such/step.svg    | --out /no/such/step.svg: No such file or directory; name a file in
        together --out WORDS                | words.bin: is there, and not what would be written: name a new file
        blind --out WORDS                   | words.bin: is there, and not what would be written: name a new file
        blind --quick 1                     | unrecognized arguments: 1
        pages --out EMPTY                   | --out
        pages --out MINE                    | index.html: is there, and not what would be written: name a new file
        puzzles ring --into EMPTY/deep      | Not a directory; name a folder that can be written
        pages --out                         | --out
        pages --into HF                     | --into
        explore --port 70000                | leave --port out
        explore --port -1                   | leave --port out
        puzzles rings                       | rings
        puzzles --into NEW                  | Name one, e.g. ring
        puzzles ring --into HF              | --into
        puzzles ring --check HF             | --check"""}


# Layouts and sizes that do not divide: each mode refuses them in the same words.
UNDIVIDED = """
    --n-head 3                              | give --n-embd 129
    --arch llama --n-kv-head 3              | give --n-kv-head 1
    --arch llama --n-embd 12                | give --n-embd 16
    --experts 4 --top-k 5                   | give --top-k 4 or --experts 5
    --experts 4 --expert-every 5            | give --expert-every 4
    --tp 3                                  | give --tp 1
    --arch llama --tp 4                     | give --tp 2
    --n-head 128 --tp 128 --vocab-size 125  | --tp 128 is more than the vocabulary's 125 tokens
    --sp                                    | give --tp 2, say, or leave --sp out
    --sp --tp 4 --seq-len 66                | give --seq-len 68
    --cp 4 --seq-len 20                     | give --seq-len 24
    --cp 2 --tp 2 --sp --seq-len 6          | give --seq-len 8
    --cp 3 --cp-kind ulysses --seq-len 12   | give --cp 1 or --cp-kind ring
    --dp 2 --ep 2                           | give --experts 4, say, or leave --ep out
    --ep 2 --experts 4                      | give --ep 1 or --dp 2
    --dp 4 --ep 4 --experts 6               | give --ep 2
    --dp 3                                  | give e.g. --batch-size 18
    --dp 2 --micro-batches 3                | give e.g. --batch-size 18
    --dp 8 --zero 2 --zero-within 6         | give --zero-within 2
    --dp 2 --zero-within 2                  | give --zero 1, 2 or 3
    --pp 7                                  | give --pp 6 or fewer
    --pp 4 --schedule zb-v                  | give --pp 3 or fewer
    --pp 2 --virtual-stages 2               | is for --schedule interleaved and --pp 2 or more: leave it out
    --virtual-stages 7 --schedule interleaved | give --virtual-stages 6 or fewer
    --pp 2 --virtual-stages 4 --schedule interleaved | give --virtual-stages 3 or fewer
    --optimizer muon --dp 2 --zero 3        | give --form full --zero 2
    --optimizer muon --arch llama --n-head 3 --n-kv-head 3 --n-embd 96 --tp 3 | the width of the MLP, 256: give --tp 1
    --optimizer muon --form full --dp 2 --zero 1 --comm torch --device cpu | leave --comm out"""


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
    for name in "hf other_words bad_hf experts bad_experts large large_half no_shard no_index no_size long".split():
        sizes = model.GPTConfig(400 if "large" in name else 256, 64 if name == "long" else 16, 1, 2, 16)
        save(model.GPT(resized(sizes, experts=2 * ("experts" in name))), folder / name)
    hand = [*LETTERS.values(), *map("".join, BY_HAND), END]
    for name, merges, tokens in [("hand", BY_HAND, hand), ("gaps", [], []),
                                 ("other_merges", [("z", "q")], hand), ("no_end", BY_HAND, hand[:-1]),
                                 ("spaces", BY_HAND, hand), ("cut", BY_HAND, [*hand, *map(str, range(1000, 1200))])]:
        write_vocabulary(folder / name, merges, tokens)
    config, size = ((folder / name / "config.json").read_bytes() for name in ("bad_experts", "no_size"))
    whole, short = json_of(folder / "hand"), np.arange(500, dtype=np.uint16).tobytes()
    for name in "no_shard", "no_index":
        (folder / name / "model.safetensors").rename(folder / name / "a.safetensors")
    for name, data in {
            "no_shard/model.safetensors.index.json": b'{"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}',
            "no_index/model.safetensors.index.json": b"[]", "zero": b"text\0text", "two": b"xx",
            "no_size/config.json": size.replace(b"n_positions", b"n_"),
            "spaces/merges.txt": "".join(f"{a} {b} \n" for a, b in BY_HAND).encode(),
            "whole/tokenizer.json": whole.replace('"ByteLevel"', '"Metaspace"').encode(),
            "other_words/tokenizer.json": whole.replace('"ByteLevel"', '"Metaspace"').encode(),
            "strips/tokenizer.json": whole.replace('"lstrip": false', '"lstrip": true').encode(),
            "llm_c.bin": (llm_c := np.array([20240520, 1, 500], np.int32).tobytes() + bytes(1012) + short),
            "llm_c_cut.bin": llm_c[:-2], "i64_large.bin": (np.arange(500) * 200).tobytes(),
            "llama.bin": np.arange(100_000, dtype=np.uint32).tobytes(),
            "words.bin": "wörds\n".encode() * 1000, "zip.bin": b"PK\3\4" + bytes(500),
            "tokens.bin": (np.arange(5000, dtype=np.uint16) % 256).tobytes(),
            "u32.bin": np.arange(500, dtype=np.uint32).tobytes(), "i64.bin": np.arange(500).tobytes(),
            "stuck.txt": b"rank 0  F0 B0\nrank 1  B0 F0\n", "lists.txt": b"rank 0  F0 .. B0\nrank 1  .. F0 B0\n",
            "marked.txt": b"\xef\xbb\xbfrank 0  F0 .. B0\nrank 1  .. F0 B0\n",
            "mine/index.html": b"<h1>mine</h1>", "mine/ring.svg": b"<svg/>",
            "mine/rank-0.json": b'{"schemaVersion": 1}',
            "mine/trace.json": b'{"traceEvents": [{"name": "fetch"}]}', "mine/run/run.json": b'{"name": "mine"}',
            "mine/older/run.json": b'{"flags": {}, "model": {}}', "mine/empty/run.json": b"",
            "mine/lock/.lock": b"mine",
            "mine/nulls/run.json": b'{"flags": null, "start": null, "model": null, "data": null}',
            "unlike.txt": b"rank 0  F0/0 F0/2 B0/2 B0/0\nrank 1  F0 B0\n",
            "broken.pt": b"PK",
            "empty": b"", "short": b"x" * 500, "ascii": b"plain text\n" * 1000, "empty_bin.bin": b"",
            "odd_bin.bin": b"123", "big_bin.bin": np.full(5000, 60000, np.uint16).tobytes(), "nothing/picture": b"\0\1",
            "bad_hf/config.json": b"{}", "no_weights/config.json": b"{}", "large_half/vocab.json": b"{}",
            "bad_experts/config.json": config.replace(b"ringgpt_moe", b"gpt2"), "half/vocab.json": b"{}",
            "no_json/vocab.json": b"{", "list/vocab.json": b"[1]", "old_run/log.jsonl": b"", "no_lock/.lock/file": b"",
            "gaps/vocab.json": json.dumps({token: 2 * i for i, token in enumerate(hand)}).encode(),
            "half_run/.step-00000003.part/file": b"", "trace.json": b'{"traceEvents": []}',
            "machine.json": json.dumps({"machine": asdict(MACHINES["h200"]) | {"network": None}}).encode()}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    os.mkdir(folder / "read_only", 0o555)
    os.mkfifo(folder / "fifo")
    os.mkdir(folder / "muon")
    for file, step, flags in (("step-00000001.pt", 1, train.Flags()), ("earlier.pt", 0, train.Flags()),
                              ("muon/step-00000001.pt", 1, train.Flags(optimizer="muon"))):
        torch.save({"flags": vars(flags), "step": step, "tensors": {"wte.weight": 0}}, folder / file)
    flags = f"--data {text} --steps 3 --save-every 1 --experts 2 --out {folder / 'run'}"
    ran([*TRAIN, *flags.split()], 1, folder / "log")
    shutil.copytree(folder / "run" / "step-00000003", folder / "renamed")
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
        monkeypatch.setattr(safe.data, "standard_library", lambda: [files["ASCII"]])
        monkeypatch.setenv("WORLD_SIZE", (re.findall(r"torchrun --nproc_per_node (\d+)", said) or [""])[0])
    if main in (train.main, further.bpe.main) or words[0] == "together":  # others take minutes, or a browser
        text = re.sub("give (more )?text|give --data TEXT", f"give --data {files['TEXT']}", said)
        text = text.replace("TOKENS.bin", str(files["TOKENS"]))
        heed(lambda words: refusal(main, words), words, text)


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


@parametrize("name, dtype, step", [("I64", "uint16", 1), ("I64_LARGE", "uint32", 200)])
def test_the_command_that_a_refusal_advises_makes_tokens(name, dtype, step, files, refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = re.search('python -c "(.*)"$', refusal(train.main, ["--data", str(files[name])]))
    exec(command[1])
    assert np.fromfile("tokens.bin", dtype).tolist() == [*range(0, 500 * step, step)]
    flags = f"--data tokens.bin --tokens {dtype} --vocab-size 99801 --seq-len 8 --sample 0"
    assert not refusal(train.main, flags.split())


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
    except BadInput as problem:
        return str(problem)
    return ""


VALUES = """dp=0,1,2,3,4,5,6,7,8 tp=1,2,3,4,5,6,7,8 pp=0,1,2,3,4,5,6,7 cp=1,2,3,4 ep=1,2,3,4 experts=0,1,2,3,4,5,6
    top-k=1,2,3,4,5 expert-every=1,2,3,4,5 n-layer=1,2,3,4,5,6,7,8 n-head=1,2,3,4,5,6 n-embd=12,30,128 seq-len=0,1,20,66
    batch-size=0,1,2,3,4,6,8,12,15,16 micro-batches=0,1,2,3,4,5,6 zero=0,1,2,3 zero-within=1,2,3,4,5,6
    virtual-stages=1,2,3,4 cp-kind=ulysses sp= cuda-graphs=on kernels=triton device=cuda lr=0,nan
    min-lr=1"""
VALUES = {"schedule": [*train.SCHEDULES]} | {
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
    assert said.count("\n") == 1 and "/no/such" in said, said


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


PICKLED = pickle.dumps({"wte.weight": Malice()})
MANIFEST, CONFIG, WEIGHTS, MOMENTS = "manifest.json", "config.json", "model.safetensors", "optimizer.safetensors"
DAMAGED = [  # a file of a checkpoint, what becomes of its bytes (None: it goes), what the one line must say
    (MANIFEST, None, "manifest.json: No such file"), (MANIFEST, cut, "manifest.json: "),
    (MANIFEST, edited(b"skipped", b"skjpped"), "manifest.json: it does not match its own checksum"),
    (WEIGHTS, cut, "model.safetensors: it has"), (WEIGHTS, flipped, "model.safetensors: its checksum"),
    (MOMENTS, None, "optimizer.safetensors: No such file")]
FORGED = [  # the manifest is made to match, so only the contents can tell
    (MANIFEST, edited(b'"format": 1', b'"format": 2'), "its format is 2"),
    (MOMENTS, PICKLED, "optimizer.safetensors: not a whole .safetensors file"),
    (WEIGHTS, PICKLED, "model.safetensors: not a whole .safetensors file"),
    (WEIGHTS, b"", "cannot mmap an empty file"), (WEIGHTS, cut, "it is cut short or damaged"),
    (WEIGHTS, edited(b"experts.1.c_fc.weight", b"experts.9.c_fc.weight"),
     "model.safetensors: has no h.0.mlp.experts.1.c_fc.weight, which config.json asks for"),
    (WEIGHTS, edited(b"[64, 16]", b"[16, 64]"),
     "h.0.mlp.experts.0.c_proj.weight is (16, 64), config.json makes it (64, 16)"),
    (CONFIG, cut, "config.json: ")]


@parametrize("forged, file, change, says", [(False, *row) for row in DAMAGED]
                         + [(True, *row) for row in FORGED])
def test_damaged_checkpoint_is_one_line_and_exit_code_2(forged, file, change, says, files, tmp_path, monkeypatch,
                                                        refusal):
    """Nothing in it runs. --init-from, which reads no manifest, says of the contents what --resume says."""
    step = tmp_path / "step-00000003"
    shutil.copytree(files["STEP_3"], step)
    data = change((step / file).read_bytes()) if callable(change) else change
    (step / file).unlink() if data is None else (step / file).write_bytes(data)
    if forged:
        manifest = json.loads((step / MANIFEST).read_text())
        del manifest["crc32"]
        if file in manifest["files"]:
            manifest["files"][file] = {"bytes": len(data), "crc32": crc_of_file(step / file) if data else 0}
        (step / MANIFEST).write_text(json.dumps(manifest | {"crc32": crc_of(manifest)}))
    monkeypatch.chdir(tmp_path)
    for flag in ["--resume"] + ["--init-from"] * (forged and file in (WEIGHTS, CONFIG)):
        assert says in refusal(train.main, ["--device", "cpu", "--data", str(files["TEXT"]), flag, str(step)])
    assert not os.path.exists("hacked")
