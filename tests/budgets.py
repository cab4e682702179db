"""Each room has a budget of tokens, which a change may lower, and raises only with its reason."""

import ast
import io
import tokenize

from tests.pool import parametrize
from tests.walls import CORE, SOURCES, TREES, room_of

BUDGETS = [  # a name, its rooms, and the most tokens of code that they may have together
    ("five files", CORE, 26_900),
    ("further", ("further",), 29_600),
    ("fast", ("fast",), 43_700),
    ("safe", ("safe",), 17_100),
    ("theory", ("theory",), 11_000),
    ("lessons with bench.py", ("lessons", "bench"), 70_000),
    ("tests", ("tests", "test_all"), 109_400)]
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def docstrings(tree):
    """Where each begins: (line, column)."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    first = [node.body[0] for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node) is not None]
    return {(node.lineno, node.col_offset) for node in first}


def tokens_of(source, tree):
    """Comments, docstrings and line ends do not count. An f-string is one token, because before Python 3.12 it is."""
    count, inside, left_out = 0, 0, docstrings(tree)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        count += not inside and token.type not in NO_CODE and token.start not in left_out
        name = tokenize.tok_name[token.type]
        inside += (name == "FSTRING_START") - (name == "FSTRING_END")
    return count


@parametrize("name, rooms, budget", BUDGETS)
def test_a_room_keeps_to_its_budget(name, rooms, budget):
    size = sum(tokens_of(SOURCES[file], TREES[file]) for file in SOURCES if room_of(file) in rooms)
    assert size <= budget, (f"{name}: {size:,} tokens of code, the budget is {budget:,}: "
                            "a change that exceeds a budget deletes something or says why")


def test_each_file_is_in_one_budget_and_a_token_is_counted_once():
    rooms = [room for _, rooms, _ in BUDGETS for room in rooms]
    assert len(rooms) == len({*rooms}) and {*map(room_of, SOURCES)} == {*rooms}
    source = 'def f(x):  # a comment\n    """A docstring."""\n    return f"{x}, " "twice"\n'
    assert tokens_of(source, ast.parse(source)) == 9  # def f ( x ) : return, and two strings
