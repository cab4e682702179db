"""What the drawer draws: what the code did. Its ranks run here as threads, and nothing is computed a second time.

Pages step through the pictures of STEPPED; `python -m lessons pages --assets assets` writes those of DRAWN as SVG.
"""

import functools
import itertools
import re
from collections import defaultdict

import torch
import torch.distributed as torch_dist
import torch.nn.functional as F

import collectives as dist
import parallel
from further import together
from further.schedules import SCHEDULES
from lessons.drawer import Cell, COLOURS, Frame, GREY, moved, stacked, START
from lessons.step import name_of, settings_of, watched
from parallel import goes_to, names_of, result_of
from safe.files import check_file
from safe.flags import Parser
from theory.clock import simulate


# ----------------------------------------------------------------------------------------------------------------- ring

def ring_states():
    """This rank's tensor, as a list with a number for each chunk, before and after each step of a ring all-reduce. Rank
    r starts from 1 << r, so a sum has a bit for each rank whose data is in it. Call on all ranks."""
    size, states = dist.get_world_size(), []
    t = torch.full((size,), 1 << dist.get_rank())
    has = t.clone()

    class Looking(dist.Link):
        def exchange(self, sends=(), receives=()):
            if len(states) < size - 1:  # what a reduce-scatter's step sends is a partial sum, which t does not have
                has[(self.rank - 1 - len(states)) % size] |= sends[0][0].item()
            states.append(has.bitwise_or_(t).tolist())
            super().exchange(sends, receives)

    Looking(torch_dist.group.WORLD).during("all_reduce").all_reduce(t, dist.ReduceOp.SUM)
    return [*states, t.tolist()]


def ring_steps(n):
    """What happens between these states, and before the first."""
    return ["start", *(f"reduce-scatter step {s}: chunk r-{s + 1} goes right and is added" for s in range(n - 1)),
            *(f"all-gather step {s}: chunk r-{s}, complete, goes right" for s in range(n - 1))]


def ring_frame(state, before, says):
    """A row a rank, a column a chunk. state, before: [rank][chunk], a bit for each rank whose numbers are in it. An
    arrow leads to each chunk that came, from the rank above; above the first rank is the last one."""
    n, cells, arrows = len(state), [], []
    for r, c in itertools.product(range(n), repeat=2):
        row, whose = 2 + 2 * r, [rank for rank in range(n) if state[r][c] >> rank & 1]
        is_new = state[r][c] != before[r][c]
        cells += [Cell(row, c + 0.9 * rank / n, width=0.9 / n, colour=COLOURS[rank % 6] + "66") for rank in whose]
        cells.append(Cell(row, c, str((c + 1) * sum(10**rank for rank in whose)), 0.9, GREY, "#888888" * is_new))
        for at in ([row] if r else [row, row + 2 * n]) * is_new:
            arrows.append((COLOURS[(r - 1) % n % 6], (at - 1, c + 0.45), (at, c + 0.45)))
    heads = [Cell(0, c, f"chunk {c}", 0.9) for c in range(n)]
    return Frame(heads + cells, says, arrows, {2 + 2 * r: f"rank {r}" for r in range(n)}, 72)


def frames_of_ring(of_ranks, says):
    """of_ranks: what `ring_states` returns on each rank."""
    states = [*zip(*of_ranks)]
    return [*map(ring_frame, states, states[:1] + states, says)]


def ring_frames():
    says = ring_steps(4)
    says[0] = ("Four ranks want the sum of their tensors. Each tensor is cut into four chunks. Rank 0 has 1, 2, 3, 4, "
               "and each further rank ten times as much. So the digits of a number say whose numbers are in it. In a "
               "step each rank r sends one chunk to the next rank, its right one.")
    says[3] += ". Now each rank has the sum of one chunk"
    says[6] += ". Now all ranks have all sums. Each has sent 6 chunks, which is 2(N-1)/N of its tensor"
    return frames_of_ring(together.run(4, ring_states), says)


def draw_ring():
    """Its steps side by side, each below its name."""
    frames = [frame._replace(cells=[Cell(0, 0, name.partition(":")[0], 4), *frame.cells[4:]])
              for frame, name in zip(ring_frames(), ring_steps(4))]
    cells, arrows, names = zip(*(moved(frame, 0, 4.5 * i) for i, frame in enumerate(frames)))
    return Frame(sum(cells, []), "", sum(arrows, []), names[0], 36)


# ----------------------------------------------------------------------------------------------------------------- ZeRO

OF_ZERO = "--dp 4 --zero 3 --arch llama --n-layer 1".split()  # a Llama's head is not tied to its embedding

PIECES = "embedding", "block", "head"
LETTERS = {  # of a list: what the action does with a piece
    "G": "all ranks send their quarters of the {} round the ring, an all-gather. It travels while they compute on.",
    "F": "each rank runs the {} forward on its own samples. All of its weights are there.",
    "D": "the other ranks' quarters of the {} are freed.",
    "B": "each rank runs the {} backward, and has the whole gradient of its own samples.",
    "A": "a reduce-scatter averages the gradients of the {}: rank r keeps quarter r of the mean. Nobody waits for "
         "it until the step ends."}


def zero_frame(says, held, row_now=None):
    """A row for the weights of a piece, and one for its gradients. Five columns a rank: of a row's four quarters it has
    as many as `held` says, and a space. In row_now quarters go to the next rank; after the last one comes the first."""
    cells, arrows = [Cell(0, 5 * rank, f"rank {rank}", 4) for rank in range(4)], []
    for (i, count), rank in itertools.product(enumerate(held), range(4)):
        row = 1 + i + 0.5 * (i // 2)
        cells.append(Cell(row, 5 * rank, width=4, colour=GREY, mark="#888888" * (i == row_now)))
        for k in range(4) if count == 4 else [rank] * count:
            # A whole gradient is this rank's own; a quarter of it is summed over all ranks.
            colour = COLOURS[rank if i % 2 and count == 4 else k]
            cells.append(Cell(row, 5 * rank + k, str(k), colour=colour + "66" * (k != rank)))
        for x in ([-1, 4] if rank == 0 else [5 * rank + 4]) * (i == row_now):
            arrows.append((COLOURS[rank if x > 0 else 3], (row + 0.5, x), (row + 0.5, x + 1)))
    return Frame(cells, says, arrows, {1 + 2.5 * i: piece for i, piece in enumerate(PIECES)}, 14, 90)


def zero_frames():
    """A step of ZeRO-3, action by action: what rank 0 then has of each piece. All four do the same."""
    s, ranks = settings_of(Parser(add_help=False), OF_ZERO)
    _, rows, _ = together.run(ranks, functools.partial(watched, s), together.World(worker="eager"))[0]
    averaged, frames = set(), [zero_frame(
        "Four ranks train one model, each on its own part of the batch. Of each piece's weights (upper row) rank r "
        "keeps quarter r. There are no gradients yet (lower row). What a rank does is this list: "
        + " ".join(name_of(action, False) for action, *_ in rows), 3 * [1, 0])]
    for action, whole, _, waiting, _ in rows:
        kind, i, _ = action
        says = f"{name_of(action, False)}: " + LETTERS[kind].format(PIECES[i])
        if kind == "B" and i not in whole:
            says += " An embedding's backward needs no weights, so nothing has gathered them."
        averaged |= {i} if kind == "A" else set()
        held = [[4 if j in whole else 1, 4 if j in waiting else int(j in averaged)] for j in range(3)]
        frames.append(zero_frame(says, sum(held, []), 2 * i + (kind == "A") if kind in "GA" else None))
    return [*frames, zero_frame("The step waits for all reduce-scatters. Each rank has a quarter of each piece, and "
                                "the same quarter of its gradient, averaged over all. The optimizer steps these "
                                "quarters; its state exists for them alone, and nothing more is sent.", 6 * [1])]


# -------------------------------------------------------------------------------------------------------------- f and g

def tensor_matrices():
    """This rank's matrices of Y = GeLU(X A) B and of its backward, {name: (rows, columns)}. A term is a rank's part of
    a sum that f or g adds up. Numbers are small and whole, but for GeLU's, so that a reader can multiply them."""
    both, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(3 + dist.get_rank())
    X, dY = torch.randint(-2, 3, (2, 3, 4), generator=both).double()
    A, B = torch.randint(-1, 2, (2, 4, 4), generator=own).double()
    X.requires_grad_()
    XA = parallel.CopyToGroup.apply(X, None) @ A
    Z = F.gelu(XA)
    Y = parallel.ReduceFromGroup.apply(Z @ B, None)
    dZ, dXA, dX = torch.autograd.grad(Y, (Z, XA, X), dY)
    found = {"X": X, "A": A, "X A": XA, "Z": Z, "B": B, "term of Y": Z @ B, "Y": Y, "dY": dY, "B transposed": B.T,
             "dZ": dZ, "d(X A)": dXA, "A transposed": A.T, "term of dX": dXA @ A.T, "dX": dX}
    return {name: t.tolist() for name, t in found.items()}


SAME = {"X", "Y", "dY", "dX"}  # on both ranks
TENSOR_STEPS = [  # matrices, what happens
    ("X,A", "Both ranks have the same X. The first matrix, A, is cut by columns: rank 0 has the left half, rank 1 the "
     "right half. f does nothing forward."),
    ("X,A,X A", "Each rank multiplies X with its columns of A. That gives its columns of X A, complete: nothing is "
     "sent."),
    ("X A,Z", "Z = GeLU(X A) works on each number alone, so each rank applies it to its own columns. Nothing is sent."),
    ("Z,B", "The second matrix, B, is cut by rows: rank 0 has the upper half, rank 1 the lower. Z has as many columns "
     "on each rank as B has rows there."),
    ("Z,B,term of Y", "Each rank multiplies its part of Z with its part of B. Both products have the shape of Y, but "
     "each is only one term of it."),
    ("term of Y,Y", "g adds the two terms: the ranks send them to each other, an all-reduce. Now both have the same "
     "Y."),
    ("dY,B transposed", "Backward. Both ranks have the same dY, because g does nothing backward: it is the gradient of "
     "either term."),
    ("dY,B transposed,dZ", "Each rank multiplies dY with its rows of B, transposed. That gives the gradient of its "
     "columns of Z."),
    ("dZ,d(X A)", "Back through GeLU, number by number. Each rank stays in its own columns."),
    ("d(X A),A transposed,term of dX", "Each rank multiplies with its columns of A, transposed. It gets its half's "
     "share of dX: one term."),
    ("term of dX,dX", "f adds the two terms, the second all-reduce. Now both ranks have the same dX, for the layer "
     "before.")]


def tensor_frame(ranks, names, says):
    """A band a rank, its matrices side by side."""
    cells, arrows = [], ()
    for (rank, found), (n, name) in itertools.product(enumerate(ranks), enumerate(names)):
        cells.append(Cell(6.5 * rank, 4.5 * n, name, 4))
        colour = GREY if name in SAME else COLOURS[rank] + "66"
        for i, j in itertools.product(range(len(found[name])), range(4)):
            text = f"{round(found[name][i][j], 1) + 0:g}"
            cells.append(Cell(6.5 * rank + 1 + i, 4.5 * n + j, text, 1, colour))
    if names[-1] in ("Y", "dX"):
        arrows = [(COLOURS[0], (4.2, 1.5), (6.4, 1.5)), (COLOURS[1], (6.4, 2.5), (4.2, 2.5))]
    return Frame(cells, says, arrows, {0: "rank 0", 6.5: "rank 1"}, 27)


def tensor_frames():
    ranks = together.run(2, tensor_matrices)
    return [tensor_frame(ranks, names.split(","), says) for names, says in TENSOR_STEPS]


# ---------------------------------------------------------------------------------------------------------------- lists

KINDS = {"F": "forward", "B": "backward: I and W in one", "I": "gradient of the input", "W": "gradient of the weights",
         "G": "gather weights", "D": "drop them", "A": "average gradients"}
SHADES = {"F": "#4c8dd6 #86b2e3", "B": "#c2577a #d68fa6", "I": "#d67e30 #e2a56e", "W": "#4ba36b #85c29b",
          "G": "#9a6fc4 #9a6fc4", "D": "#888888 #888888", "A": "#a88420 #a88420"}  # a rank's even stages, odd stages


def shade(action, ranks=1):
    return SHADES[action.kind].split()[action.stage // ranks % 2]


def lanes(spans, says="", unit=24.0, wrong={}, pitch=1):
    """A frame with a row for each rank of a Timeline's spans. Actions that take no time, as G, D and A do on theory's
    clock, stand below the row. wrong: {rank: the number of the action that is outlined}."""
    cells = []
    for rank, row in enumerate(spans):
        free = 0.0  # from where on there is room below the row
        names = names_of([action for action, *_ in row], rank)
        for n, (name, (action, start, end)) in enumerate(zip(names, row)):
            colour, mark = shade(action, len(spans)), "#e03b2b" * (wrong.get(rank) == n)
            at, x, width = pitch * rank, start, end - start
            if not width:
                at, x, width = at + 1, max(start, free), 9 * len(name) / unit
                free = x + width
            text = name if 8 * len(name) <= unit * width else str(action.micro_batch)
            cells.append(Cell(at, x, text, width, colour, mark, f"{rank} {n}"))
    return Frame(cells, says, (), {pitch * rank: f"rank {rank}" for rank in range(len(spans))}, unit)


def on_clock(lists):
    """Lists on theory's clock: (a frame, the Timeline)."""
    timeline = simulate(lists)
    shortest = min(end - start for row in timeline.spans for _, start, end in row if end > start)
    return lanes(timeline.spans, "", max(900 / timeline.length, 24 / shortest), pitch=2), timeline


def pipeline_frames():
    """1F1B of four ranks and six micro-batches, drawn as if B took as long as F."""
    timeline = simulate(parallel.one_f_one_b(4, 6), 1, 0.5, 0.5)
    frames = [lanes(timeline.spans, "Each rank has one stage. It needs a micro-batch's activations from the rank "
                    "above, and in backward its gradient from the rank below. Rank r runs 3 - r forwards ahead, then a "
                    "forward and a backward in turn, and holds 4 - r micro-batches at most. A rank idles "
                    f"{max(timeline.idle):g} of {timeline.length:g}. Step by step:", pitch=2)]
    for time in range(1, round(timeline.length) + 1):
        begun = [[span for span in row if span[1] < time] for row in timeline.spans]
        ran = [(rank, action) for rank, row in enumerate(begun) for action, _, end in row if end == time]
        arrows = []
        for rank, action in ran:
            other = goes_to(result_of(action))
            x = time - 0.5 + 0.2 * (other - rank)
            if other in range(4):
                arrows.append((shade(action), (2 * rank + (other > rank), x), (2 * other + (other < rank), x)))
        says = "; ".join(f"rank {rank} has run {action}" for rank, action in ran)
        frames.append(lanes(begun, says, pitch=2)._replace(arrows=arrows))
    return frames


def draw_schedules():
    """The schedules on one time axis, for 4 ranks and 8 micro-batches. F, I and W take equally long."""
    runs = {name: simulate(lists(4, 8, 1 + (name == "interleaved"))) for name, lists in SCHEDULES.items()}
    unit = 900 / max(run.length for run in runs.values())
    legend = [Cell(0, 7 * n, f"{kind} {KINDS[kind]}", 6.9, SHADES[kind].split()[0]) for n, kind in enumerate("FBIW")]
    return stacked([Frame(legend, unit=unit), *(
        lanes(run.spans, f"{name}: {run.length:g} long, {max(run.idle) / run.length:.0%} idle, {max(run.peak):g} held "
              "at most", unit) for name, run in runs.items())])


def text_of(lists):
    return "\n".join(f"rank {rank}  " + " ".join(names_of(actions, rank)) for rank, actions in enumerate(lists))


def stuck(error):
    """Lists that cannot run: a frame, an action after the other. Transfers are left out, because `check` added them."""
    lists = [[action for action in actions if action.kind in KINDS] for actions in error.lists]
    at = {rank: sum(action.kind in KINDS for action in error.lists[rank][:n]) for rank, n in error.at.items()}
    return lanes([[(action, n, n + 1) for n, action in enumerate(actions)] for actions in lists], unit=48, wrong=at)


# ---------------------------------------------------------------------------------------------------------------- trace

def spans_of(trace):
    """As a Timeline's spans, in microseconds from the first action's start: the pipeline as it ran, from train.py's
    --profile."""
    events = [event for event in trace["traceEvents"] if event["name"].split()[0] in {*"FBIW"}]
    first = min(event["ts"] for event in events)
    spans = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["tid"], event["ts"])):  # a rank's
        action, start = parallel.Action(event["name"][0], **event["args"]), event["ts"] - first
        spans[event["tid"]].append((action, start, start + event["dur"]))
    return [*spans.values()]


def as_it_ran(spans, says=""):
    return lanes(spans, says, 900 / max(end for row in spans for *_, end in row))


# ------------------------------------------------------------------------------------------------------------- pictures

STEPPED = {  # name: (frames, title, what it shows, the function of lessons/micro.py beside which it stands)
    "ring": (ring_frames, "Ring all-reduce", "Four ranks add up their tensors. A colour for each rank whose numbers "
             "are in a chunk; an arrow from each sender to its receiver.", "all_reduce"),
    "zero": (zero_frames, "ZeRO-3", "What four ranks keep of each piece of a model in a step. A box is a rank's "
             "weights, and below them its gradients, in quarters 0 to 3.", "step_list"),
    "tensor": (tensor_frames, "f and g", "An MLP, Y = GeLU(X A) B, on two ranks. Blue is rank 0's, orange rank 1's, "
               "grey is the same on both. Multiply along: a row at the left with a column at its right.", "g_forward"),
    "1f1b": (pipeline_frames, "1F1B", "Four ranks, six micro-batches. A row is a rank, and time goes to the right. An "
             "arrow is a message.", "one_f_one_b")}
DRAWN = {"ring": draw_ring, "schedules": draw_schedules}  # assets/


def check_picture(path, flag):
    """BadInput unless a picture can be written there."""
    check_file(path, flag, re.escape(START.encode()))
