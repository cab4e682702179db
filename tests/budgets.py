"""Each room has a budget of tokens, which a change may lower, and raises only with its reason.

    python -m tests.budgets             lines and tokens of code of each room
    python -m tests.budgets FOLDER      of another project's Python files
"""

import ast
import functools
import io
import pathlib
import re
import sys
import tokenize
from collections import Counter

import pytest

from tests.pool import HERE, parametrize
from tests.walls import CORE, SOURCES, TREES, room_of

BUDGETS = [  # a name, its rooms, and the most tokens of code that they may have together
    ("five files", CORE, 26_400),
    ("further", ("further",), 30_200),
    ("fast", ("fast",), 32_600),
    ("safe", ("safe",), 18_110),
    ("theory", ("theory",), 8_060),
    ("lessons with bench.py", ("lessons", "bench"), 56_850),
    ("tests", ("tests", "test_all"), 101_250)]
README = pathlib.Path(HERE, "README.md").read_text()
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def docstrings(tree):
    """Where each begins: (line, column)."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    first = [node.body[0] for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node) is not None]
    return {(node.lineno, node.col_offset) for node in first}


@functools.cache  # three tests ask
def code_of(source, tree):
    """(lines, tokens). Comments, docstrings and line ends do not count. An f-string is one token, because before Python
    3.12 it is."""
    lines, count, inside, left_out = set(), 0, 0, docstrings(tree)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if not inside and token.type not in NO_CODE and token.start not in left_out:
            count += 1
            lines |= {*range(token.start[0], token.end[0] + 1)}
        name = tokenize.tok_name[token.type]
        inside += (name == "FSTRING_START") - (name == "FSTRING_END")
    return len(lines), count


def show(name, sources):
    sizes = [code_of(source, ast.parse(source)) for source in sources]
    lines, tokens = map(sum, zip(*sizes))
    print(f"{name:24}{lines:>8,} lines{tokens:>9,} tokens of code")


@parametrize("name, rooms, budget", BUDGETS)
def test_a_room_keeps_to_its_budget(name, rooms, budget):
    size = sum(code_of(SOURCES[file], TREES[file])[1] for file in SOURCES if room_of(file) in rooms)
    assert size <= budget, (f"{name}: {size:,} tokens of code, the budget is {budget:,}: "
                            "a change that exceeds a budget deletes something or says why")


def test_each_file_is_in_one_budget_and_a_token_is_counted_once():
    rooms = [room for _, rooms, _ in BUDGETS for room in rooms]
    assert len(rooms) == len({*rooms}) and {*map(room_of, SOURCES)} == {*rooms}
    source = 'def f(x):  # a comment\n    """A docstring."""\n    return f"{x}, " "twice"\n'
    assert code_of(source, ast.parse(source)) == (2, 9)  # def f ( x ) : return, and two strings


def test_readme_has_the_lines_that_the_command_counts():
    """To a hundredth, so that not every change must write README."""
    lines = Counter()
    for file, source in SOURCES.items():
        lines[room_of(file)] += code_of(source, TREES[file])[0]
    five = sum(lines[room] for room in CORE)
    counted = five, five + lines["further"], sum(lines.values()) - lines["tests"] - lines["test_all"]
    said = re.search(r"five files ([\d,]+), with further/ ([\d,]+),\s+all rooms but tests ([\d,]+)", README)
    assert [int(n.replace(",", "")) for n in said.groups()] == pytest.approx(counted, rel=0.01), counted


if __name__ == "__main__":
    if sys.argv[1:]:
        show(sys.argv[1], [path.read_text() for path in sorted(pathlib.Path(sys.argv[1]).rglob("*.py"))])
    else:
        for name, rooms, _ in BUDGETS:
            show(name, [source for file, source in SOURCES.items() if room_of(file) in rooms])
        rest = [source for file, source in SOURCES.items() if room_of(file) not in ("tests", "test_all")]
        show("all but tests", rest)
