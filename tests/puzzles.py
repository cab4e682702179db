"""`python -m lessons puzzles`: an empty hole and a wrong body are red, the body put back is green."""

import functools

import pytest

import kernels
import lessons.demos
import lessons.puzzles
from lessons.puzzles import empty, filled, hole, problems, PUZZLES, solution, write
from tests.pool import in_new_process, parametrize
from tests.runs import output_of, ran
from tests.walls import REFERENCE, SOURCES, room_of

# A mistake in each solution: what stands there, what somebody writes, and what a rank is told. The ring is a step
# behind, gradients are added up, ZeRO-1 averages each micro-batch, a G comes too late, all receives come first.
MISTAKES = """
    ring | link.rank - 2 - s | link.rank - 1 - s | reduce-scatter: got [
    zero0 | ReduceOp.AVG | ReduceOp.SUM | got [[3.0, 3.0], [2.0, 2.0]], should have got [[1.5, 1.5], [1.0, 1.0]]
    zero1 | dist.ReduceOp.AVG | dist.ReduceOp.SUM | row: got [6.0, 12.0], should have got [2.0, 4.0]
    zero2 | action.micro_batch if zero >= 2 else None | action.micro_batch | 1: got G0/0 G0/1 F0/0 F0/1 F1/0 F1/1 B0/1 A
    zero3 | n - 1 | n | stage 3: got G0/0 F0/0 D0/0 G0/1 F0/1 D0/1 G0/2 F0/2 B0/2 D0/2
    g | grad, None | grad / 2, None | got [1.5, 2.0], should have got [3.0, 4.0]
    vocabulary | total * (own_top - top).exp() | total | loss: got 1.153, should have got 0.981
    order | p - 1 - r | p - r | got F0 F1 B0 F2 B1 F3 B2 B3, should have got F0 B0 F1 B1
    transfers | [other].append( | [other].insert(0, | deadlock
    softmax | acc * alpha[:, None] | acc | 23, 46 and 69: got ["""


@parametrize("row", MISTAKES.strip().splitlines(), ids=lambda row: row.split()[0])
def test_a_puzzle_is_red_until_it_is_solved(triton_kernels, tmp_path, row):
    """Solved, its folder is the reference; empty, the first line of the solution is not in its file."""
    name, right, wrong, said = map(str.strip, row.split("|"))
    puzzle = PUZZLES[name]
    if puzzle.file == "kernels.py" and not kernels.INTERPRETED:
        pytest.skip("a puzzle's kernel runs in Triton's interpreter, these tests on GPUs")
    assert solution(puzzle).count(right) == 1
    bodies = {"empty": empty(puzzle), "solved": solution(puzzle), "wrong": solution(puzzle).replace(right, wrong)}
    found = {}
    for kind, body in bodies.items():
        write(tmp_path / kind, puzzle.file, filled(puzzle, body))
        found[kind] = in_new_process(problems, puzzle, str(tmp_path / kind))
    assert found["solved"] == [] and len(found["empty"]) == 1
    assert found["empty"][0].startswith("NotImplementedError: puzzle: nothing is written here yet (")
    assert any(said in line for line in found["wrong"]), found["wrong"]
    for file, text in SOURCES.items():
        assert room_of(file) not in REFERENCE or (tmp_path / "solved" / file).read_text() == text
    first = solution(puzzle).splitlines()[0]
    assert (tmp_path / "empty" / puzzle.file).read_text().count(first) < SOURCES[puzzle.file].count(first)


@parametrize("moved", [{"function": "Unit.start"}, {"function": "Units.start_average"}, {"word": "sizes"}], ids=str)
def test_a_name_that_moved_is_found_out(moved):
    with pytest.raises(LookupError):
        hole(PUZZLES["zero1"]._replace(**moved))


def test_a_check_is_green_or_red_and_never_waits_for_ever(tmp_path):
    def said_of(name, code):
        words = ["puzzles", name, "--check", str(tmp_path / name)]
        return ran(words, 1, tmp_path / "log", [code], program="lessons", launcher="fork")

    write(tmp_path / "g", "parallel.py", SOURCES["parallel.py"])
    assert said_of("g", 0) == "green\n"
    silent = solution(PUZZLES["ring"]).replace("[(partial, right)]", "[(partial, right)] if link.rank else []")
    write(tmp_path / "ring", "collectives.py", filled(PUZZLES["ring"], silent))
    assert "rank 1 waits for rank 0 in reduce_scatter" in said_of("ring", 1)


def test_puzzles_are_listed_and_written(tmp_path):
    lesson = functools.partial(output_of, lessons.demos.main, "puzzles")
    listed = lesson().splitlines()
    assert len(listed) == len(PUZZLES) == len(MISTAKES.strip().splitlines()) and max(map(len, listed)) <= 120
    assert lesson("g", "--solution") == "return grad, None\n"
    assert f"puzzles g --check {tmp_path / 'g'}" in lesson("g", "--into", tmp_path / "g")
    assert "# Puzzle: g's backward: " in (tmp_path / "g" / "parallel.py").read_text()
