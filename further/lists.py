r"""Lists that somebody has written: read from a text, and proven before they run.

    from further.lists import check, parse
    lists = parse("rank 0  F0 F1 B0 B1 \n rank 1  F0 B0 F1 B1")
    check(lower(lists))

Actions are those of parallel.py: F, B (or I and W), transfers, and G, D and A of weights and gradients.
"""

import functools
import pathlib
import re
from collections import defaultdict

from further.schedules import SCHEDULES
from parallel import (
    Action, carried, goes_to, in_order, lower, needs, ranks_of_stages, ScheduleError)


OTHER_END = {"SF": "RF", "RF": "SF", "SB": "RB", "RB": "SB"}  # of a transfer
LETTERS = {"G", "D", "A"}


# ---------------------------------------------------------------------------------------------------------------- proof

def check(lists, m=None, zero=None, lookups=(), shared={}):
    """Prove that lowered lists can run: raises ScheduleError unless they are complete, each action comes after what it
    needs, each receive has its send, and there is no deadlock even if each send waits for its receive. With `zero`, a
    stage of ZeRO, each rank's G, D and A are proven, too. m, lookups, shared: as for check_complete, with_weights."""
    stage_to_rank = check_complete(lists, m)

    def can_run(action, done, waiting):
        if action.kind in OTHER_END:  # what it carries is made, and the other end is next on its rank, too
            return carried(action) in done and action._replace(kind=OTHER_END[action.kind]) in waiting
        # A computation: what it needs was made on this rank, or received from the rank that made it.
        rank = stage_to_rank[action.stage]
        return done.issuperset(result if stage_to_rank[result.stage] == rank
                               else result._replace(kind="R" + result.kind)
                               for result in needs(action, stage_to_rank))

    in_order(lists, can_run)
    for rank in range(len(lists)) if zero is not None else ():
        check_weights(lists, rank, zero, lookups, shared)


def check_complete(lists, m=None):
    """ScheduleError unless each stage runs F and B (or F, I and W) of each micro-batch once, on one rank. m: how many
    micro-batches there are; None: the lists say it. Returns which rank each stage is on."""
    stage_to_rank = ranks_of_stages([[action for action in actions if action.kind not in OTHER_END]
                                     for actions in lists])
    listed = set()
    for rank, actions in enumerate(lists):
        for n, action in enumerate(actions):
            stage = goes_to(action) if action.kind[0] == "R" else action.stage
            if stage_to_rank.get(stage) != rank:
                raise ScheduleError(lists, {rank: n}, f"{action} of stage {stage} does not live on rank {rank}")
            if m and action.micro_batch >= m:
                raise ScheduleError(lists, {rank: n}, f"{action} is there, and there are {m} micro-batches")
            if action in listed and action.kind not in LETTERS:
                raise ScheduleError(lists, {rank: n}, f"{action} is there twice, on rank {rank}")
            listed.add(action)
    m = m or 1 + max((action.micro_batch for action in listed), default=0)
    for stage in range(1 + max(stage_to_rank, default=0)):
        for i in range(m):  # a large m in a short list costs nothing, because it ends at the first gap
            kinds = "".join(kind for kind in "FBIW" if Action(kind, stage, i) in listed)
            if kinds not in ("FB", "FIW"):
                rank = stage_to_rank.get(stage, 0)
                why = f"F and B, or F, I and W, must each be there; it has {', '.join(kinds) or 'none'}"
                raise ScheduleError(lists, {rank: len(lists[rank])}, f"stage {stage}, micro-batch {i}: {why}")
    return stage_to_rank


def check_weights(lists, rank, zero, lookups=(), shared={}):
    """ScheduleError unless a rank computes with whole weights alone, drops what is whole and only under ZeRO-3, leaves
    nothing whole then, and averages each gradient once, behind the backward that has made it. Arguments as for
    parallel.with_weights. Returns (the most pieces that are whole at once, the most whose gradients wait for an A).
    """
    whole = set()
    waiting = defaultdict(int)  # piece -> gradients that its A must still average
    most_whole = most_waiting = 0
    for n, (kind, piece, _) in enumerate(lists[rank]):
        def refuse(is_wrong, why):
            if is_wrong:
                raise ScheduleError(lists, {rank: n}, why)

        if kind == "G":
            refuse(not zero, "ZeRO-0 has nothing to gather: leave G out")
            refuse(piece in whole, f"piece {piece} is whole already: leave this G out")
            whole.add(piece)
        elif kind == "D":
            refuse(zero != 3, "only ZeRO-3 drops weights: leave D out")
            refuse(piece not in whole, f"piece {piece} is not whole: leave this D out")
            whole.remove(piece)
        elif kind == "A":
            refuse(not waiting[piece], f"piece {piece} has no gradient that waits for an A: put it behind B or W")
            waiting[piece] = 0
        elif kind not in OTHER_END:
            needed = kind == "F" or piece not in lookups
            refuse(zero and needed and piece not in whole, f"the weights of piece {piece} are not whole: put G before")
            if kind in "BW":
                for averaged in [piece, *shared.get(piece, [])]:
                    waiting[averaged] += 1
        most_whole = max(most_whole, len(whole))
        most_waiting = max(most_waiting, sum(map(bool, waiting.values())))
    left = [piece for piece in waiting if waiting[piece]]
    if left or zero == 3 and whole:
        why = f"gradients of piece {left[0]} are not averaged: put A" if left else f"put D for piece {min(whole)}"
        raise ScheduleError(lists, {rank: len(lists[rank])}, why + " before the end")
    return most_whole, most_waiting


def size_of_schedule(lists):
    """(ranks, micro-batches, stages a rank) of complete lists."""
    return len(lists), 1 + max(action.micro_batch for action in lists[0]), len(ranks_of_stages(lists)) // len(lists)


# -------------------------------------------------------------------------------------------------- a schedule as text

def parse(text):
    """The lists of a schedule, as `python -m lessons pipeline` prints them: a row a rank, whose number may be left
    out. F0/2 is F0 of stage 2. An action of rank r without such a number is of stage r. Dots and dashes are left out.

        rank 0   F0 F1 .. .. B0 -- B1 --
        rank 1   .. F0 B0 -- F1 B1 -- ..

    ValueError if it is no such text; ScheduleError, with the reason that `check` gives, if the lists cannot run.
    """
    lists = []
    for line in filter(None, map(str.strip, text.splitlines())):
        rank = len(lists)
        row = re.fullmatch(rf"(?:rank {rank}\b)?(.*)", line)[1]
        if row.lstrip().startswith("rank"):
            raise ValueError(f"{line[:40]!r} is not the row of rank {rank}: it begins with rank {rank}")
        actions = []
        for word in row.split():
            action = re.fullmatch(r"([FBIWGDA])(\d{1,9})(?:/(\d{1,9}))?", word)
            if action:
                actions.append(Action(action[1], int(action[3] or rank), int(action[2])))
            elif not re.fullmatch(r"\.+|-+", word):
                raise ValueError(f"rank {rank}: {word!r} is no action: write F0, or F0/2 for that of stage 2")
        lists.append(actions)
    if not lists:
        raise ValueError("no schedule: its first row begins with rank 0")
    check_complete(lists)
    check(lower(lists))
    if not all(lists):
        raise ValueError("a rank has no stage: give each at least one")
    return lists


def read_schedule(s):
    """The text of --schedule-file. ValueError, in one line, unless it is a schedule for --pp and --micro-batches. s:
    train.py's Flags."""
    file = s.schedule_file
    try:
        text = pathlib.Path(file).read_text("utf-8-sig")
        lists = parse(text)
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or str(error).partition("\n")[0]  # a ScheduleError has the lists, too
        raise ValueError(f"--schedule-file {file}: {what}; give lists that can run, a row a rank, as `python -m "
                         "lessons pipeline` prints") from None
    p, m, _ = size_of_schedule(lists)
    if (s.pp, s.micro_batches) != (p, m):
        raise ValueError(f"--schedule-file {file} is of {p} ranks and {m} micro-batches: give --pp {p} "
                         f"--micro-batches {m}")
    if s.schedule not in ("1f1b", text):
        raise ValueError(f"--schedule {s.schedule} beside --schedule-file: leave one of them out")
    return text


def schedule_of(name):
    """The schedule(p, m, v) of this name, or of a text of lists that stands in its place."""
    return SCHEDULES.get(name) or schedule_in(name)


@functools.cache
def schedule_in(text):
    """The schedule(p, m, v) of a text, which is for its own p and m alone."""
    lists = parse(text)
    return lambda p, m, v: lists
