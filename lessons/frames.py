"""Pictures that pages step through: ring all-reduce, ZeRO-3, tensor parallelism. What is drawn is what the code did.

A frame is (height, parts, what happens), WIDTH wide, so that a telephone shows its numbers as large as text. An arrow
leads from a sender to its receiver.
"""

import itertools

from further import together
from lessons.moving import ring_states, tensor_matrices, zero3_step
from lessons.pictures import box, COLOURS, words
from lessons.step import name_of

WIDTH = 380
GREY = "#8883"  # of what belongs to no rank


def arrow(colour, *points):
    """Along these points. Its last part is level or upright."""
    (x0, y0), (x, y) = points[-2:]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    path = " ".join(f"{i:.4g},{j:.4g}" for i, j in (*points[:-1], (x - 5 * dx, y - 5 * dy)))
    head = " ".join(f"{x - 7 * dx + 4 * k * dy:.4g},{y - 7 * dy + 4 * k * dx:.4g}" for k in (-1, 1))
    return (f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<polygon points="{x:.4g},{y:.4g} {head}" fill="{colour}"/>')


def outline(x, y, width, height):
    return (f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" fill="none" '
            'stroke="currentColor" stroke-width="2"/>')


# ----------------------------------------------------------------------------------------------------------------- ring

def ring_picture(state, before):
    """Rows are ranks, columns chunks. state, before: [rank][chunk], a bit for each rank whose numbers are in it."""
    n, bottom = len(state), 262
    for r, c in itertools.product(range(n), range(n)):
        x, y, held = 52 + 78 * c, 36 + 58 * r, state[r][c]
        whose = [rank for rank in range(n) if held >> rank & 1]
        yield box(x, y, 68, 34, GREY)
        yield from (box(x + 17 * rank, y + 29, 17, 5, COLOURS[rank]) for rank in whose)
        yield words(x + 34, y + 20, str((c + 1) * sum(10**rank for rank in whose)), 15)
        if held != before[r][c]:  # it came from the rank above, the first one's from the last
            start, middle = y - 24, x + 34
            yield outline(x, y, 68, 34)
            yield (arrow(COLOURS[r - 1], (middle, start), (middle, y)) if r else
                   arrow(COLOURS[n - 1], (middle, y + 58 * n - 24), (middle, bottom), (374, bottom), (374, 24),
                         (middle, 24), (middle, y)))
    yield from (words(0, 58 + 58 * r, f"rank {r}", 13, "start") for r in range(n))
    yield from (words(86 + 78 * c, 14, f"chunk {c}", 13) for c in range(n))


def ring_frames():
    states = [*zip(*together.run(4, ring_states))]  # [state][rank][chunk]
    n = len(states[0])
    said = ["Four ranks want the sum of their tensors. Each tensor is cut into four chunks. Rank 0 has 1, 2, 3, 4, and "
            "each further rank ten times as much. So the digits of a number say whose numbers are in it."]
    for s in range(n - 1):
        said.append(f"Reduce-scatter, step {s + 1} of {n - 1}. Each rank sends one chunk to the next rank, which adds "
                    f"its own numbers to it. Rank 0 sends chunk {(-s - 1) % n}.")
    said[-1] += " Now each rank has the sum of one chunk."
    for s in range(n - 1):
        said.append(f"All-gather, step {s + 1} of {n - 1}. Each rank sends the sum that it got last to the next rank, "
                    f"which keeps it. Rank 0 sends chunk {-s % n}.")
    said[-1] += f" Now all ranks have all sums. Each has sent {2 * (n - 1)} chunks, which is 2(N-1)/N of its tensor."
    return [(270, ring_picture(state, before), text) for state, before, text in zip(states, states[:1] + states, said)]


# --------------------------------------------------------------------------------------------------------------- ZeRO-3

def zero_picture(weights, grads, now="", moving=""):
    """Rows are pieces, columns ranks. weights, grads: how many quarters of each piece a rank has. now: the piece that
    works. moving: "weights" or "gradients" of it, if they are on their way."""
    n = 4
    for rank in range(n):
        yield words(108 + 76 * rank, 14, f"rank {rank}", 13)
        for i, piece in enumerate(weights):
            x, y = 78 + 76 * rank, 24 + 50 * i
            for kind, held, top in ("weights", weights, y), ("gradients", grads, y + 20):
                yield box(x, top, 60, 17, GREY)
                for k in range(n) if held[piece] == n else [rank] * held[piece]:
                    # A whole gradient is this rank's own; a quarter of it is summed over all ranks.
                    colour = COLOURS[rank if kind == "gradients" and held[piece] == n else k]
                    yield box(x + 15 * k, top, 15, 17, colour if k == rank else colour + "aa")
                    yield words(x + 15 * k + 7, top + 13, str(k), 12)
                if piece == now and kind == moving:
                    yield arrow(COLOURS[rank], (x + 60, top + 8), (x + 76, top + 8)) if rank < n - 1 else arrow(
                        COLOURS[rank], (x + 60, top + 8), (374, top + 8), (374, y + 42), (70, y + 42), (70, top + 8),
                        (78, top + 8))
            if piece == now:
                yield outline(x - 1, y - 1, 62, 39)
    for i, piece in enumerate(weights):
        yield words(0, 37 + 50 * i, piece, 12, "start")


LETTERS = {  # of a list: what the action does with a piece
    "G": "all ranks send their quarters of the {} round the ring, an all-gather. It travels while they compute on.",
    "F": "each rank runs the {} forward on its own samples. All of its weights are there.",
    "D": "the other ranks' quarters of the {} are freed.",
    "B": "each rank runs the {} backward, and has the whole gradient of its own samples.",
    "A": "a reduce-scatter averages the gradients of the {}: rank r keeps quarter r of the mean. Nobody waits for "
         "it until the step ends."}


def zero_frames():
    """A step of ZeRO-3, action by action: what rank 0 then has of each piece. All four do the same."""
    pieces, rows = together.run(4, zero3_step)[0]
    averaged, frames = set(), []

    def frame(text, whole=(), waiting=(), *now):
        weights = {piece: 4 if i in whole else 1 for i, piece in enumerate(pieces)}
        grads = {piece: 4 if i in waiting else int(i in averaged) for i, piece in enumerate(pieces)}
        frames.append((24 + 50 * len(pieces), [*zero_picture(weights, grads, *now)], text))

    frame("Four ranks train one model, each on its own part of the batch. Of each piece's weights (upper row) rank r "
          "keeps quarter r. There are no gradients yet (lower row). What a rank does is this list: "
          + " ".join(name_of(action, False) for action, *_ in rows) + ".")
    for action, whole, _, waiting, _ in rows:
        kind, i, _ = action
        said = f"{name_of(action, False)}: " + LETTERS[kind].format(pieces[i])
        if kind == "B" and i not in whole:
            said += " An embedding's backward needs no weights, so nothing has gathered them."
        if kind == "A":
            averaged.add(i)
        frame(said, whole, waiting, pieces[i], {"G": "weights", "A": "gradients"}.get(kind, ""))
    frame("The step waits for all reduce-scatters. Each rank has a quarter of each piece, and the same quarter of its "
          "gradient, averaged over all. The optimizer steps these quarters; its state exists for them alone, and "
          "nothing more is sent.")
    return frames


# --------------------------------------------------------------------------------------------------------------- tensor

CELL, LINE = 27, 22  # a number's width and height
OF_RANKS = COLOURS[0] + "66", COLOURS[1] + "66"


def matrix(x, y, name, rows, colour):
    """colour(row, column) of each number. Its name stands above it."""
    yield words(x + CELL * len(rows[0]) / 2, y - 7, name, 13)
    for (i, row), j in itertools.product(enumerate(rows), range(len(rows[0]))):
        yield box(x + CELL * j, y + LINE * i, CELL - 1, LINE - 1, colour(i, j))
        shown = f"{row[j]:.1f}".removesuffix(".0")
        yield words(x + CELL * j + CELL / 2, y + LINE * i + 15, "0" if shown == "-0" else shown, 12)


def beside_each_other(ranks, name):
    """Two ranks' matrices, cut by columns, as one."""
    return [a + b for a, b in zip(ranks[0][name], ranks[1][name])]


def cut_by_columns(ranks, shown, left, top, product, after):
    """left x top = product, and what comes of it number by number."""
    halves, whole = lambda i, j: OF_RANKS[j // 4], lambda i, j: GREY
    yield from matrix(8, 156, left, ranks[0][left], whole)
    yield from matrix(140, 38, f"{top}:  rank 0 | rank 1", beside_each_other(ranks, top), halves)
    for name, y in (product, 156), (after, 252):
        if name in shown:
            yield from matrix(140, y, name, beside_each_other(ranks, name), halves)


def cut_by_rows(ranks, shown, left, top, term, total):
    """left x top = the sum of two terms. Each rank has one, and after an all-reduce the sum."""
    rows = [row for rank in ranks for row in rank[top]]
    yield from matrix(8, 244, f"{left}:  rank 0 | rank 1", beside_each_other(ranks, left),
                      lambda i, j: OF_RANKS[j // 4])
    yield from matrix(250, 38, top, rows, lambda i, j: OF_RANKS[i // 4])
    name = total if total in shown else term
    if name in shown:
        for rank, y in enumerate((244, 340)):
            yield from matrix(250, y, f"{name}, rank {rank}", ranks[rank][name],
                              lambda i, j: GREY if name == total else OF_RANKS[rank])
    if name == total:
        yield arrow(COLOURS[0], (254, 311), (254, 338)) + arrow(COLOURS[1], (354, 338), (354, 311))


TENSOR_STEPS = {  # the newest matrix: what happens
    "A": "Both ranks have the same X. The first matrix, A, is cut by columns: rank 0 has the left half (blue), rank 1 "
         "the right half (orange). f does nothing forward.",
    "X A": "Each rank multiplies X with its columns of A. That gives its columns of X A, complete: nothing is sent.",
    "Z": "GeLU works on each number alone, so each rank applies it to its own columns. Nothing is sent.",
    "B": "The second matrix, B, is cut by rows: rank 0 has the upper half, rank 1 the lower. Z has as many columns on "
         "each rank as B has rows there.",
    "term of Y": "Each rank multiplies its part of Z with its part of B. Both products have the shape of Y, but each "
                 "is only one term of it.",
    "Y": "g adds the two terms: the ranks send them to each other, an all-reduce. Now both have the same Y.",
    "dY": "Backward. Both ranks have the same dY, because g does nothing backward: it is the gradient of either term.",
    "dZ": "Each rank multiplies dY with its rows of B, transposed. That gives the gradient of its columns of Z.",
    "d(X A)": "Back through GeLU, number by number. Each rank stays in its own columns.",
    "term of dX": "Each rank multiplies with its columns of A, transposed. It gets its half's share of dX: one term.",
    "dX": "f adds the two terms, the second all-reduce. Now both ranks have the same dX, for the layer before."}


def tensor_frames():
    """An MLP on two ranks, product by product. Blue is rank 0's, orange rank 1's, grey is the same on both."""
    ranks = together.run(2, tensor_matrices)
    for rank, name in itertools.product(ranks, "AB"):
        rank[name + " transposed"] = [list(column) for column in zip(*rank[name])]
    products = [(3, cut_by_columns, "X", "A", "X A", "Z"), (3, cut_by_rows, "Z", "B", "term of Y", "Y"),
                (3, cut_by_columns, "dY", "B transposed", "dZ", "d(X A)"),
                (2, cut_by_rows, "d(X A)", "A transposed", "term of dX", "dX")]
    names, frames = [*TENSOR_STEPS], []
    for steps, picture, *parts in products:
        for _ in range(steps):
            newest = names[len(frames)]
            frames.append((410, [*picture(ranks, names[:len(frames) + 1], *parts)], TENSOR_STEPS[newest]))
    return frames
