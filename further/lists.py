r"""A schedule's lists, of any actions: transfers put in, proven, read from a text.

What parallel.py does, with errors that show where; and a proof for lists that somebody has written.

    from further.lists import check, lower, parse
    lists = parse("rank 0  F0 F1 B0 B1 \n rank 1  F0 B0 F1 B1")
"""

import functools
import pathlib
import re
from collections import deque

import parallel
from further.schedules import SCHEDULES
from parallel import Action, carried, goes_to, needs, ranks_of_stages, result_of


def run_in_turns(lists, can_run):
    """All ranks' lists as one, in an order in which they can run: [(rank, action)].

    In each turn, each rank whose next action can_run(action, done, waiting) runs it. done: actions of earlier turns and
    their results; waiting: all ranks' next actions. ScheduleError if no rank can go on.
    """
    order = []
    done = set()
    left = [deque(actions) for actions in lists]
    while any(left):
        first = [(rank, actions[0]) for rank, actions in enumerate(left) if actions]
        waiting = {action for _, action in first}
        turn = [(rank, action) for rank, action in first if can_run(action, done, waiting)]
        if not turn:
            at = {rank: len(lists[rank]) - len(actions) for rank, actions in enumerate(left)}
            raise ScheduleError(lists, at, f"deadlock: no rank can go on: {', '.join(waits(lists, at))}")
        for rank, action in turn:
            left[rank].popleft()
            done.update([action, result_of(action)])
        order += turn
    return order


def waits(lists, at):
    """What keeps each rank from running its action at[rank], in words: an action that lists[rank][:at[rank]] lack."""
    stages = ranks_of_stages(lists)
    makers = {result_of(action): (rank, i) for rank, actions in enumerate(lists) for i, action in enumerate(actions)}
    names = [names_of(actions, rank) for rank, actions in enumerate(lists)]
    for rank, i in at.items():
        if i < len(lists[rank]):
            makers_of_it = [makers[result] for result in needs(lists[rank][i], stages) if result in makers]
            late = [f"{names[other][j]} of rank {other}" for other, j in makers_of_it if j >= at[other]]
            yield f"rank {rank} waits at {names[rank][i]}" + " for " * bool(late) + " and ".join(late)


def in_order(lists):
    """parallel's, with a ScheduleError."""
    stages = ranks_of_stages(lists)
    return run_in_turns(lists, lambda action, done, waiting: done.issuperset(needs(action, stages)))


def lower(lists):
    """parallel's, with a ScheduleError."""
    return parallel.lower(lists, in_order)


OTHER_END = {"SF": "RF", "RF": "SF", "SB": "RB", "RB": "SB"}  # of a transfer


def check_complete(lists, m=None):
    """ScheduleError unless each stage runs F and B (or F, I and W) of each micro-batch once, on one rank. m: how many
    micro-batches there are; None: the lists say it. Returns which rank each stage is on."""
    stage_to_rank = ranks_of_stages([[action for action in actions if action.kind not in OTHER_END]
                                     for actions in lists])
    listed = set()
    for rank, actions in enumerate(lists):
        for i, action in enumerate(actions):
            stage = goes_to(action) if action.kind[0] == "R" else action.stage
            if stage_to_rank.get(stage) != rank:
                raise ScheduleError(lists, {rank: i}, f"{action} of stage {stage} does not live on rank {rank}")
            if m and action.micro_batch >= m:
                raise ScheduleError(lists, {rank: i}, f"{action} is there, and there are {m} micro-batches")
            if action in listed:
                raise ScheduleError(lists, {rank: i}, f"{action} is there twice, on rank {rank}")
            listed.add(action)
    for s, stage in enumerate(stage_to_rank):
        if s != stage:
            rank = stage_to_rank[stage]
            at = {rank: gap(lists[rank], stage, 0)}
            raise ScheduleError(lists, at, f"stage {stage} is there, and stage {s} is not")
    m = m or 1 + max((action.micro_batch for action in listed), default=0)
    for s, rank in stage_to_rank.items():
        for i in range(m):  # a large m in a short list costs nothing, because it ends at the first gap
            kinds = [kind for kind in "FBIW" if Action(kind, s, i) in listed]
            if "".join(kinds) not in ("FB", "FIW"):
                raise ScheduleError(lists, {rank: gap(lists[rank], s, i)}, f"stage {s}, micro-batch {i}: F and B, or "
                                    f"F, I and W, must each be there; it has {', '.join(kinds) or 'none'}")
    return stage_to_rank


def size_of_schedule(lists):
    """(ranks, micro-batches, stages a rank) of complete lists."""
    return len(lists), 1 + max(action.micro_batch for action in lists[0]), len(ranks_of_stages(lists)) // len(lists)


def gap(actions, stage, micro_batch):
    """Where to show that a stage lacks an action of a micro-batch: at the last one that it has of it, or else of the
    next micro-batch, or at the list's end."""
    near = [i for i, action in enumerate(actions)
            if action.kind in "FBIW" and action.stage == stage and action.micro_batch >= micro_batch]
    return min(near, key=lambda i: (actions[i].micro_batch, -i), default=len(actions))


def check(lists, m=None):
    """Prove that lowered lists can run: raises ScheduleError unless they are complete, each action comes after what it
    needs, each receive has its send, and there is no deadlock even if each send waits for its receive."""
    stage_to_rank = check_complete(lists, m)

    def can_run(action, done, waiting):
        if action.kind in OTHER_END:  # what it carries is made, and the other end is next on its rank, too
            return carried(action) in done and action._replace(kind=OTHER_END[action.kind]) in waiting
        # A computation: what it needs was made on this rank, or received from the rank that made it.
        rank = stage_to_rank[action.stage]
        return done.issuperset(result if stage_to_rank[result.stage] == rank
                               else result._replace(kind="R" + result.kind)
                               for result in needs(action, stage_to_rank))

    run_in_turns(lists, can_run)


@functools.cache  # for 16 ranks and 128 micro-batches it takes 0.1 s
def checked(schedule, p, m, v):
    """A schedule's lists with transfers, which callers must not change, proven."""
    lists = lower(schedule(p, m, v))
    check(lists, m)
    return lists


def names_of(actions, rank):
    """A rank's actions as text. Unless stage `rank` is its only one, F0/2 is F0 of stage 2, RF0/2 receives its result.
    """
    numbered = {action.stage for action in actions if action.kind not in OTHER_END} != {rank}
    return [f"{action}/{action.stage}" if numbered else str(action) for action in actions]


class ScheduleError(ValueError):
    """A schedule that cannot run. Its text is the grid, with an arrow before action at[rank] of each rank in `at`."""

    def __init__(self, lists, at, why):
        self.lists = lists
        self.at = at
        lines = [why]
        for rank, actions in enumerate(lists):
            cells = names_of(actions, rank) + ["end"]
            if rank in at:
                cells.insert(at[rank], "->")
            lines.append(f"rank {rank}  " + " ".join(cells))
        super().__init__("\n".join(lines))


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
            action = re.fullmatch(r"([FBIW])(\d{1,9})(?:/(\d{1,9}))?", word)
            if action:
                actions.append(Action(action[1], int(action[3] or rank), int(action[2])))
            elif not re.fullmatch(r"\.+|-+", word):
                raise ValueError(f"rank {rank}: {word!r} is no action: write F0, or F0/2 for that of stage 2")
        lists.append(actions)
    if not lists:
        raise ValueError("no schedule: its first row begins with rank 0")
    check_complete(lists)
    check(lower(lists))
    stages = {len({action.stage for action in actions}) for actions in lists}
    if 0 in stages or len(stages) > 1:
        raise ValueError(f"ranks have {sorted(stages)} stages: give each equally many")
    return lists


def read_schedule(s):
    """The text of --schedule-file. ValueError, in one line, unless it is a schedule for --pp and --micro-batches. s:
    train.py's Flags."""
    file = s.schedule_file
    try:
        text = pathlib.Path(file).read_text("utf-8-sig")
        lists = parse(text)
    except ScheduleError as error:
        why = str(error).partition("\n")[0]
        raise ValueError(f"--schedule-file {file}: {why}; give lists that can run") from None
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise ValueError(f"--schedule-file {file}: {what}; give a row a rank, as `python -m lessons pipeline` prints"
                         ) from None
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


@functools.cache  # each text is one schedule, because `checked` proves a schedule once
def schedule_in(text):
    """The schedule(p, m, v) of a text, which is for its own p and m alone."""
    lists = parse(text)
    return lambda p, m, v: lists
