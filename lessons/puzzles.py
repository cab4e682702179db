"""Puzzles: the reference with a hole, because nothing teaches a collective like one that is missing.

    python -m lessons puzzles                      lists them
    python -m lessons puzzles ring --into ring     writes the reference into a folder, with a hole where the idea was
    python -m lessons puzzles ring --check ring    runs that folder's code: green, or which rank got what
    python -m lessons puzzles ring --solution      prints what stood there

A puzzle is an example, which yields what each rank gets, by name. The reference runs it, too, and says what each rank
should have got. The example imports inside, because that is where the folder's modules are found. Its docstring is the
task. Holes are found by name; no solution is kept here.
"""

import ast
import itertools
import os
import pathlib
import re
import shutil
import sys
import textwrap
import traceback
from typing import Callable, NamedTuple

import torch
from torch import nn

import kernels
from further.bad_input import reject, writable

HERE = pathlib.Path(__file__).resolve().parent.parent
FILES = ["model.py", "kernels.py", "collectives.py", "parallel.py", "train.py",
         *sorted(str(path.relative_to(HERE)) for path in HERE.glob("further/*.py"))]


# ------------------------------------------------------------------------------------------------------------- examples

def ring(rank):
    """A step of the ring: send `partial` to the right, receive the left rank's partial sum, and combine that with this
    rank's own chunk of the same number, which stays as it is. The result is the `partial` of the next step."""
    import collectives as dist
    whole, part = (rank + 1) * torch.arange(1.0, 7), torch.empty(2)
    dist.reduce_scatter_tensor(part, whole)
    yield "reduce-scatter", part
    yield "the input of reduce-scatter, afterwards", whole
    dist.all_reduce(whole, dist.ReduceOp.MAX)
    yield "all-reduce of the maximum", whole


def zero0(rank):
    """Data parallelism, of one parameter: make param.grad the mean of all ranks' gradients. A rank that has not used
    the parameter has None in place of a gradient."""
    from parallel import average_gradients
    net = nn.ParameterList(torch.arange(1.0, 5).split(2))
    loss = (rank + 1) * (net[0] + net[1] if rank else net[0])  # rank 0 does not use the second one
    loss.sum().backward()
    average_gradients(net)
    yield "averaged gradients", torch.stack([p.grad for p in net])


def zero1(rank):
    """A under ZeRO: each rank has its gradients in `rows` (N, K/N). Make `average`, a tensor like self.mine, for this
    rank's row of the mean over self.group, and start the collective that writes it: `handle` is what that returns."""
    from parallel import Unit
    weights = nn.Parameter(torch.arange(10.0, 60, 10))
    unit = Unit([weights], None, 1, torch.float32)
    ((rank + 1) * torch.arange(1, 6) * weights).sum().backward()
    unit.start_average()
    unit.finish_average()
    yield "gradient of this rank's row", unit.stepped[weights].grad


def lists_with_letters(chain, pieces, stages):
    from parallel import into_pieces, with_weights
    for zero in stages:
        letters = with_weights(into_pieces(chain, {0: range(pieces)}), zero, lookups=(0,))
        yield f"the list of stage {zero}", " ".join(f"{a}/{a.stage}" for a in letters)


def zero2(rank):
    """Where an A stands: note in `last` that action n is the last backward whose gradients an A of piece `averaged`
    averages. Stages 0 and 1 have one A a piece and step, from stage 2 on there is one a micro-batch. The first part of
    a key is the piece, the second tells its As apart."""
    from parallel import gpipe
    yield from lists_with_letters(*gpipe(1, 2), 2, (1, 2))


def zero3(rank):
    """Where G and D stand: if action n needs weights that are neither there nor on their way, put a G of its piece
    before the action that comes one earlier. Under ZeRO-3 put a D behind action n, unless the next action
    is of the same piece. `before` and `after` have a list for each action, `whole` the pieces that were gathered. A
    lookup's backward needs no weights."""
    from parallel import one_f_one_b
    yield from lists_with_letters(*one_f_one_b(1, 1), 3, (1, 3))


def g(rank):
    """g's backward: Y was the sum of all ranks' terms, and every rank has the same dY. Return the gradient of this
    rank's term, and None for the group."""
    from parallel import ReduceFromGroup
    term = torch.ones(2, requires_grad=True)
    ReduceFromGroup.apply(term, None).backward(torch.tensor([3.0, 4]))
    yield "gradient of its term", term.grad


def vocabulary(rank):
    """Three numbers a token: ranks exchange `top`, the largest logit of all slices, and `sums` (2, n): of all slices
    the sum of exp(z - top), and the target's logit. `own_top`, `total` and `target` are this slice's.
    (all_reduce overwrites its tensor.)"""
    from parallel import cross_entropy
    logits = torch.tensor([[[1.0, 2]], [[3, 2]]])[rank].log().requires_grad_()                 # (1, V/N)
    loss = cross_entropy(logits.unsqueeze(0), torch.tensor([[2]]), vocab_size=4)
    loss.backward()
    yield "loss", loss
    yield "gradient of its logits", logits.grad


def order(rank):
    """1F1B's order: return a list of actions for each rank. `whole_batch` and `alternate`, above, help."""
    from parallel import one_f_one_b
    yield "its list", " ".join(map(str, one_f_one_b(3, 4)[rank]))


def transfers(rank):
    """Where sends and receives go: if another rank waits for the action's result, append the send (SF, SB) to this
    rank's list, and put the receive (RF, RB) into the other's, so that no ranks wait for each other."""
    from further.lists import check
    from further.schedules import SCHEDULES
    from parallel import lower
    for schedule in SCHEDULES.values():
        check(lower(schedule(3, 3, 2)))
    yield "lowered lists", "can run"


def softmax(rank):
    """Online softmax: `s` are the scores of a block of keys, `v` their values. Bring m, l and acc up to date, and scale
    down what they held before."""
    import kernels
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 70, 16)  # three blocks of keys
    o = kernels.SimpleAttention.apply(q, k, v)
    yield "O of queries 0, 23, 46 and 69", o[0, 0, ::23, 0]


class Puzzle(NamedTuple):
    """The hole begins at the function's first statement that mentions a word, as far inside as one does. It has so many
    statements; None: all to the end of the block."""
    example: Callable
    ranks: int
    file: str
    function: str
    word: str
    statements: int = None


PUZZLES = {puzzle.example.__name__: puzzle for puzzle in (
    Puzzle(ring, 3, "collectives.py", "ring_reduce_scatter", "mine"),
    Puzzle(zero0, 2, "parallel.py", "average_gradients", "None"),
    Puzzle(zero1, 3, "parallel.py", "Unit.start_average", "empty_like"),
    Puzzle(zero2, 1, "parallel.py", "with_weights", "averaged"),
    Puzzle(zero3, 1, "parallel.py", "with_weights", "lookups", 2),
    Puzzle(g, 2, "parallel.py", "ReduceFromGroup.backward", "return"),
    Puzzle(vocabulary, 2, "parallel.py", "VocabParallelCrossEntropy.forward", "top", 4),
    Puzzle(order, 3, "parallel.py", "one_f_one_b", "return"),
    Puzzle(transfers, 1, "parallel.py", "add_transfer", "if"),
    Puzzle(softmax, 1, "kernels.py", "simple_attention_kernel", "m_new"))}


# ---------------------------------------------------------------------------------------------------------------- holes

def from_word(block, word):
    """The innermost block's statements from the first that mentions a word."""
    rest = [*itertools.dropwhile(lambda statement: not re.search(rf"\b{word}\b", ast.unparse(statement)), block)]
    return rest and (from_word(getattr(rest[0], "body", []), word) or rest)


def hole(puzzle):
    """(lines of the reference's file, the slice of them that is the puzzle's). LookupError if a name is not there."""
    text = (HERE / puzzle.file).read_text()
    node = ast.parse(text)
    for name in puzzle.function.split("."):
        node = {getattr(inner, "name", ""): inner for inner in node.body}[name]
    block = from_word(node.body[bool(ast.get_docstring(node)):], puzzle.word)[:puzzle.statements]
    return text.splitlines(), slice(block[0].lineno - 1, block[-1].end_lineno)


def solution(puzzle):
    lines, part = hole(puzzle)
    return textwrap.dedent("\n".join(lines[part]))


def empty(puzzle):
    task = textwrap.fill("# Puzzle: " + " ".join((puzzle.example.__doc__ or "").split()), 96, subsequent_indent="# ")
    return task + "\nraise NotImplementedError('puzzle: nothing is written here yet')"


def filled(puzzle, body):
    """The file's text with a body, whose lines begin at column 0, in the hole."""
    lines, part = hole(puzzle)
    lines[part] = textwrap.indent(body, re.match(" *", lines[part.start])[0]).splitlines()
    return "\n".join(lines) + "\n"


def write(folder, changed, text):
    """The reference's files into a folder, one of them changed to a text."""
    for file in FILES:
        path = pathlib.Path(folder, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / file, path)
    pathlib.Path(folder, changed).write_text(text)


def loaded_from(folder):
    """From now on in this process the reference's modules are those of a folder."""
    sys.path.insert(0, str(folder))
    for module in [*sys.modules]:
        if module.split(".")[0] in ("further", *(file[:-3] for file in FILES)):
            del sys.modules[module]


# --------------------------------------------------------------------------------------------------------------- checks

def shown(value):
    """A text as it is, a tensor's numbers to three digits. (+ 0.0, because -0.0 is the same number.)"""
    return value if isinstance(value, str) else str((value.detach().double().round(decimals=3) + 0.0).tolist())


def found_in(folder, puzzle):
    """[{what: what this rank gets}, one a rank] by the modules of a folder. Ranks are threads of this process."""
    loaded_from(folder)
    import collectives as dist
    from further import together

    def on_rank():
        return {what: shown(value) for what, value in puzzle.example(dist.get_rank())}

    return together.run(puzzle.ranks, on_rank)


def problems(puzzle, folder):
    """What ranks get wrong by a folder's code, a line each. A deadlock says who waits for whom."""
    folder = os.path.abspath(folder)
    wanted = found_in(HERE, puzzle)
    try:
        found = found_in(folder, puzzle)
    except Exception as error:  # noqa: BLE001  whatever the solver's code raises
        while error.__cause__:  # Triton's interpreter raises one error from another
            error = error.__cause__
        at = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(folder)]
        where = f" ({os.path.basename(at[-1].filename)}, line {at[-1].lineno})" if at else ""
        return [f"{type(error).__name__}: {error}{where}"]
    return [f"rank {rank}: {what}: got {found[rank][what]}, should have got {right}"
            for rank, names in enumerate(wanted) for what, right in names.items() if found[rank][what] != right]


def puzzles(name, into, check_in, shows_solution):
    """Collectives, schedules and kernels to write: the reference with a hole, and a check."""
    if not name:
        reject(into or check_in or shows_solution, "which puzzle? Name one, e.g. ring; without flags they are listed")
        for name, puzzle in PUZZLES.items():
            print(f"{name:12}{puzzle.file:28}{puzzle.function:36}{(puzzle.example.__doc__ or '').split(':')[0]}")
        return
    puzzle = PUZZLES[name]
    if shows_solution:
        print(solution(puzzle))
    if into:
        reject(os.path.exists(into), f"--into {into}: it is there already; give a new folder, e.g. {into}-2")
        with writable(into, "--into"):
            write(into, puzzle.file, filled(puzzle, empty(puzzle)))
        print(f"{into}/{puzzle.file}, {puzzle.function}: write what is missing, then\n"
              f"python -m lessons puzzles {name} --check {into}")
    if check_in:
        reject(not os.path.exists(os.path.join(check_in, puzzle.file)),
               f"--check {check_in}: no {puzzle.file} is there; write it first: --into {check_in}")
        reject(puzzle.file == "kernels.py" and not kernels.HAVE_TRITON,
               f"--check: {name} needs Triton, which is not installed; take another one, e.g. ring")
        wrong = problems(puzzle, check_in)
        print("\n".join(wrong) or "green")
        sys.exit(bool(wrong))


def add_to(lessons):
    """The lesson's flags, on the command line."""
    lesson = lessons.add_parser("puzzles", description=puzzles.__doc__)
    lesson.add_argument("name", nargs="?", choices=[*PUZZLES], metavar="PUZZLE", help="left out, all are listed")
    lesson.add_argument("--into", metavar="FOLDER", help="write the reference there, with a hole")
    lesson.add_argument("--check", metavar="FOLDER", dest="check_in", help="run what is there on a small example")
    lesson.add_argument("--solution", action="store_true", dest="shows_solution", help="print what stood in the hole")
    lesson.set_defaults(demo=puzzles)
