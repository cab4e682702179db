"""Where the ideas of further/ stand that train.py's flags ask for: the one table that train.py reads.

    idea("context_parallel")(model, group, "ring")          what --cp 2 does to a model

A row has the name of a function or class, the flag that asks for it, and its file.
"""

import importlib

IDEAS = """
    add_to_plan           --tp               kinds
    Tokenizer             --tokenizer        bpe
    packed                --pack             packed
    context_parallel      --cp               context
    cut_tokens            --cp               context
    expert_parallel       --ep               expert_parallel
    routers               --experts          experts
    loads                 --experts          experts
    balance               --experts          experts
    how_even              --experts          experts
    sequence_parallel     --sp               sequence
    gathered              --sp               sequence
    scattered             --sp               sequence
    HalvedPipeline        --schedule         schedules
    schedule_of           --schedule         lists
    check                 --pp               lists
    split_pieces          --pp               pieces
    add_groups            --zero-within      groups
    average_between       --zero-within      nodes
    compute_loss_in       --loss-chunk       chunked_loss
    recompute             --recompute        recompute
    LossScale             --dtype            loss_scale
    Muon                  --optimizer        muon
    whole_parameter       --out              resume
    save                  --out              resume
    load                  --resume           resume
    read_checkpoint       --resume           resume
    show_sample           --sample           sampling
    join                  --together         together
    Library               --comm             library
    check_flags           --dp               refusals
    check_layout          --dp               refusals
    check_files           --data             refusals
    told                  --data             refusals
    agreed                --data             refusals
"""
FILE_OF = {name: file for name, _, file in map(str.split, IDEAS.strip().splitlines())}


def idea(name):
    """The function, class or table of this name."""
    return getattr(importlib.import_module(f"further.{FILE_OF[name]}"), name)
