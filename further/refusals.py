"""What a command line may not ask for: bad input is refused in one line, before processes meet.

    python train.py --plain --tp 0

`--plain` looks here, and in further/fits.py for what must divide what. safe/ looks at more.
"""

import dataclasses
import json
import os
import shlex
import sys
import tempfile
import time
import zlib

from further.bad_input import reject, writable
from further.fits import refuse_misfit
from further.flags import dashed
from further.resume import check_optimizer, checkpoints


# ---------------------------------------------------------------------------------------------------------------- start

TASKS = {"SLURM_STEP_NUM_TASKS": ("srun", "SLURM_PROCID"), "OMPI_COMM_WORLD_SIZE": ("mpirun", "OMPI_COMM_WORLD_RANK"),
         "PMI_SIZE": ("mpiexec", "PMI_RANK")}  # how many tasks: (who starts them, which one this is)


def started_by_tasks():
    """What is wrong where srun, mpirun or mpiexec has started this whole program several times; "" if none has. Tasks
    but the first one end here without a word."""
    for name, (starter, number) in TASKS.items():
        tasks = os.environ.get(name, "1")
        if tasks in ("", "1"):
            continue
        if os.environ.get(number, "0") != "0":
            time.sleep(2)  # the first one must speak before mpirun ends it
            sys.exit(2)
        once = "srun --ntasks 1 " * (starter == "srun")
        return (f"{starter} has started this program {tasks} times ({name}), and each would train by itself: start "
                f"{once}torchrun --nproc_per_node {tasks} train.py {shlex.join(sys.argv[1:])} (several nodes: "
                "docs/running.md)")
    return ""


def set_by_torchrun():
    """(RANK, WORLD_SIZE, whether the environment has all that torchrun sets)."""
    given = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")]
    rank, world, port, _ = given
    return rank, world, all(given) and (rank + world + port).isdigit() and int(rank) < int(world)


LAUNCHER_S = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_", "ROLE_",
              "TORCHELASTIC_", "PET_")  # beginnings of what torchrun sets, or takes as its flags


def forget_launcher():
    for name in [name for name in os.environ if name.startswith(LAUNCHER_S)]:
        del os.environ[name]


def check_start():
    """How many processes torchrun, or who sets the same variables, has started. What another program has left of these
    is removed. BadInput if it speaks of several processes, or if others have started several."""
    rank, world, whole = set_by_torchrun()
    if whole:
        return int(world)
    forget_launcher()
    why = started_by_tasks()
    reject(why, why)
    rank = rank or "0"
    world = world or "1"
    reject((rank, world) != ("0", "1"), f"the environment has RANK={rank} and WORLD_SIZE={world}, and no MASTER_ADDR "
           "and MASTER_PORT that belong to them: start with torchrun, or unset RANK and WORLD_SIZE")
    return 1


# ---------------------------------------------------------------------------------------------------------------- flags

AT_LEAST_1 = {*"""dp tp pp cp ep virtual_stages zero_within micro_batches batch_size n_layer n_head n_embd inner seq_len
    vocab_size top_k expert_every timeout""".split()}


def check_flags(s, *_):
    """BadInput for numbers that are wrong whatever the other flags are, and as `check_start`."""
    check_start()
    check_numbers(s)


def check_numbers(s):
    for f in dataclasses.fields(s):
        given = getattr(s, f.name)
        least = int(f.name in AT_LEAST_1)
        is_number = f.type in (int, float) and given is not None
        reject(is_number and not least <= given <= 1e9,  # nan and inf, too
               f"{dashed(f.name)} {given}: must be between {least} and a billion: give e.g. {dashed(f.name)} "
               f"{f.default or 2}")
    reject(s.lr < s.min_lr, f"--min-lr {s.min_lr:g} is above --lr {s.lr:g}: give e.g. --min-lr {s.lr / 10:g}")


def check_layout(s, config, world, processes, *_):
    """BadInput for a layout that the model or the number of processes does not allow."""
    refuse_misfit(s, config, dashed)
    reject(processes != world and not s.together,
           f"this layout needs torchrun --nproc_per_node {processes}; {world} were started")


# ---------------------------------------------------------------------------------------------------------------- ranks

PATHS = "data", "tokenizer", "out", "resume", "init_from", "profile", "config"
OF_ONE_RANK = "keep", "timeout"  # flags that decide neither numbers nor which collectives come


def told(s, config, data, *_, **more):
    """{name: value} of what decides this rank's numbers and collectives. A path may be another on each node, so of a
    path only counts whether there is one. data: (training tokens, held-out tokens, ...)."""
    flags = {name: value for name, value in vars(s).items() if name not in OF_ONE_RANK}
    flags |= {name: "given" if flags[name] else "left out" for name in PATHS if name in flags}
    sizes = {f"the model's {name}": value for name, value in dataclasses.asdict(config).items()}
    contents = {f"the {part} data": f"{len(tokens):,} tokens with CRC-32 {crc_of_tokens(tokens):08x}"
                for part, tokens in zip(("training", "held-out"), data)}
    return {dashed(name): value for name, value in flags.items()} | sizes | contents | more


def crc_of_tokens(tokens, most=1024, size=1 << 16):
    """Of all of them, or of this many blocks, spread evenly."""
    crc = 0
    for i in range(0, len(tokens), max(size, len(tokens) // most)):
        crc = zlib.crc32(tokens[i:i + size], crc)
    return crc


def agreed(meet, here, device_type, timeout):
    """As meet(device_type, timeout), for `dist.initialize`. But ranks that were told other things than the others end
    here, before a collective of theirs could hang, and so do all others, with exit code 2. Each rank sends one message,
    `here`, to rank 0, which says how they differ."""
    place = meet(device_type, timeout)
    store, rank = place["store"], place["rank"]
    every = [f"told {r}" for r in range(place["world_size"])]
    store.set(every[rank], json.dumps(here))
    if rank == 0:
        problem = how_ranks_differ([json.loads(text) for text in store.multi_get(every)])
        if problem:
            print(f"train.py: {problem}", file=sys.stderr, flush=True)
        store.set("problem", problem)
    if store.get("problem"):
        store.set(f"heard {rank}", "")
        if rank == 0:
            store.wait([f"heard {r}" for r in range(place["world_size"])])  # it may be this process's own store
        sys.exit(2)
    return place


def how_ranks_differ(every):
    """In words, up to three differences between what the ranks were told; "" if there are none."""
    found = []
    for name in every[0]:
        values = [there.get(name) for there in every]
        most = max(values, key=values.count)
        others = [rank for rank, value in enumerate(values) if value != most]
        if others:
            ranks = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others[:8]))}"
            found.append(f"{name} is {values[others[0]]!s:.60} on {ranks} and {most!s:.60} on the others")
    return "; ".join(found[:3]) + ": start all ranks with the same flags, on the same data" * bool(found)


# ---------------------------------------------------------------------------------------------------------------- files

def check_files(s, config, texts, train_data, held_out, vocabulary, saved):
    """BadInput for texts that this model cannot be trained on, and unless this run can go on from a checkpoint, or
    can write others into --out. train_data, held_out: the texts' tokens. saved: the checkpoint, or None."""
    reject(any(b"\0" in text for text in texts),
           f"--data {s.data} has zero bytes, as UTF-16 and a .bin have them: give text in UTF-8")
    largest = max(train_data.max(initial=0), held_out.max(initial=0))
    reject(largest >= config.vocab_size,  # with --tp each rank would take it for another's
           f"--vocab-size is too small for the text: give --vocab-size {largest + 1}")
    reject(len(held_out) <= config.seq_len, f"the held-out tenth is of {len(held_out)} tokens: give more text")
    if saved:
        check_steps(s, saved["step"])
    if saved and s.steps > saved["step"]:
        check_optimizer(saved["run"]["flags"], s)
    if s.out:
        check_out(s.out, saved["step"] if saved else None)


def check_steps(s, done):
    """BadInput where --resume has nothing to go on with."""
    reject(0 < s.steps <= done, f"--resume {s.resume}: all {s.steps} steps are done: give --steps {2 * done}, say, or "
           "--steps 0 for a sample")


def check_out(out, done):
    """BadInput unless checkpoints can be written into the folder --out, and none there is of a step after `done`, of
    the checkpoint to go on from; None: unless no run is there."""
    with writable(out, "--out"), tempfile.TemporaryFile(dir=out) as file:
        file.write(b"x")  # which a full disk does not take
    later = [path for path in checkpoints(out) if int(path.stem[5:]) > (done or 0)]
    reject(later or done is None and os.path.exists(os.path.join(out, "log.jsonl")), f"--out {out} holds a run, which "
           f"this one would write over: add --resume, or name a new folder, e.g. --out {out}-2")
