"""What tests of the reference prove: broken in one place, one of them must fail.

    python tests/breaks.py FILE.py [NAME]    NAME: a part of functions' names; left out, all functions

For each function of the file a copy of the project is made in which it returns its last argument, and the tests that
run the reference run there until one fails. A line each: the function, and the test; GREEN where all pass. That is
right for Link.on_a_stream, because only GPUs have streams, and Link.close, which does nothing there. The suite leaves
this out, because it takes half an hour.
"""

import ast
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent.parent
RUN_IT = "reference_s_ or reference_alone or reference_in_a or plain and not explain or demo_"


def functions(file):
    """Names of a file's functions and methods. (A broken __init__ would be seen at once.)"""
    for node in ast.parse((HERE / file).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield from [f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)]


def first_red(file, name):
    """The first failure of the tests that run the reference where this function is broken."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns(".git", "__pycache__"), dirs_exist_ok=True)
        with open(f"{folder}/{file}", "a") as text:
            text.write(f"\n{name} = lambda *values, **more: values[-1]\n")
        words = [sys.executable, *"-m pytest -qx -rfE test_all.py -p no:cacheprovider -k".split(), RUN_IT]
        printed = subprocess.run(words, cwd=folder, text=True, stdout=subprocess.PIPE).stdout
    red = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return red[0] if red else "GREEN"


if __name__ == "__main__":
    file, part = (sys.argv[1:] + [""])[:2]
    for name in functions(file):
        if part in name and "__" not in name:
            print(f"{name}: {first_red(file, name)}", flush=True)
