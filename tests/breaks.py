"""What fast/ and safe/ replace or override is proven by tests that run the reference: broken there, one must fail.

    python tests/breaks.py [--jobs 2] [--unchecked] [NAME ...]    NAME: a part of names; left out, all functions

For each function of the reference in whose place fast/ or safe/ has another, a copy of the project is made in which it
has no body, and the tests that run the reference run there, the likely ones first, until one fails. Should none fail,
it returns its first argument. A line each: the function, how it was broken, the test; GREEN where all pass; or, for
what no test can see, the reason. First all these tests must pass as things are, unless `--unchecked`. The suite leaves
this out, because it takes half an hour.
"""

import argparse
import ast
import concurrent.futures
import functools
import importlib
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
REFERENCE = "collectives", "kernels", "model", "parallel", "further", "train"
RUN_IT = "the_reference_(s_|alone|in_a)|(?<!ex)plain|_demo_"  # in the names of tests that run the reference
LIKELY = {  # beginning of a function's name: parts of tests' names
    "collectives.rendezvous": "its_own_logs_the_same_losses[1-|plain_logs",
    "collectives": "the_reference_s_collectives",
    "train": "its_own_logs_the_same_losses[1-|plain_logs", "kernels": "test_kernel", "further.context": "plain-context",
    "further.experts": "plain-experts", "further.nodes": "plain-nodes", "further.sequence": "plain-sequence",
    "parallel.P": "plain-pipeline", "parallel.Shard": "plain-zero", "parallel.F": "plain-zero", "": "plain-data"}
UNSEEN = {  # function: why no test can see that it is broken
    "collectives.Link.on_a_stream": "only a group of GPUs has streams",
    "collectives.Link.close": "it does nothing, because this link keeps nothing of its own",
}


def replaced():
    """Names of what rows of SWAPS replace and of what classes of fast/ and safe/ override: "parallel.DDP.forward"."""
    import fast
    import safe
    names, rooms = set(), [importlib.import_module(f"{room}.{file.stem}") for room in ("safe", "fast")
                           for file in (HERE / room).glob("*.py") if file.stem != "__init__"]
    for module, name, new in safe.SWAPS + fast.SWAPS:
        old, name = getattr(module, name), f"{module.__name__}.{name}"
        if not (isinstance(old, type) and issubclass(new, old)):  # nothing of it is left
            names |= {f"{name}.{method}" for method in vars(old)} if isinstance(old, type) else {name}
    for kind in {kind for room in rooms for kind in vars(room).values() if isinstance(kind, type)}:
        for upper, lower in itertools.combinations(kind.__mro__, 2):
            if room_of(upper) in ("fast", "safe") and room_of(lower) in REFERENCE:
                shared = {name for name in vars(upper).keys() & vars(lower).keys() if is_code(getattr(lower, name))}
                names |= {f"{lower.__module__}.{lower.__qualname__}.{name}" for name in shared}
    return sorted(name for name in names if broken(name))


def room_of(kind):
    return kind.__module__.split(".")[0]


def is_code(value):
    return callable(value) or isinstance(value, property)


def broken(name, way="no body"):
    """(file, its text with this function broken so); None where that is no way to break it, or its code stands nowhere,
    as that of what a dataclass has."""
    parts = name.split(".")
    length = 1 + (parts[0] == "further")
    file = pathlib.Path(*parts[:length]).with_suffix(".py")
    tree = node = ast.parse((HERE / file).read_text())
    for part in parts[length:]:
        owner, node = node, next((n for n in node.body if getattr(n, "name", None) == part), None)
    if node:
        taken = [a.arg for a in node.args.args if a.arg not in ("self", "cls", "ctx")]
        yields = any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in ast.walk(node))
        if way != "no body" and (yields or not taken):
            return None
        node.body = ast.parse("return; yield" if yields else f"return {None if way == 'no body' else taken[0]}").body
    else:  # a class's `no_sync = nullcontext`
        bound = [n.id for s in owner.body if isinstance(s, ast.Assign) for n in ast.walk(s) if isinstance(n, ast.Name)]
        if way != "no body" or part not in bound:
            return None
        owner.body += ast.parse(f"{part} = lambda *arguments, **more: None").body
    return file, ast.unparse(tree)


def pytest(folder, *words):
    """(exit code, what it prints) of pytest in a folder. A test that hangs for a quarter of an hour is red, too."""
    done = subprocess.run(["timeout", "900", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
                          cwd=folder, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


@functools.cache
def tests():
    """The tests that run the reference, by their names in pytest."""
    listed = pytest(HERE, "--collect-only", "test_all.py")[1].splitlines()
    return [t for t in listed if re.search(f"^test_all.py::.*({RUN_IT})", t)]


def first_red(some, file=None, text=""):
    """The first of these tests that fails in a copy of the project whose `file` has this text; None if all pass."""
    with tempfile.TemporaryDirectory(prefix="breaks-") as folder:
        shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns(".git", "__pycache__"), dirs_exist_ok=True)
        if file:
            pathlib.Path(folder, file).write_text(text)
        code, printed = pytest(folder, "-x", "-rfE", f"--basetemp={folder}/.tmp", *some)
    red = re.search(r"(?m)^(?:FAILED|ERROR) (?:test_all.py::)?(.*?)(?: - |$)", printed)
    return red[1] if red else code and f"exit code {code}\n{printed[-1000:]}"


def verdict(name):
    if name in UNSEEN:
        return f"{name}: unseen: {UNSEEN[name]}"
    parts = next(parts for start, parts in LIKELY.items() if name.startswith(start)).split("|")
    likely = [test for test in tests() if any(part in test for part in parts)]
    for way, some in itertools.product(("no body", "its argument"), (likely, tests())):
        if some and (change := broken(name, way)) and (red := first_red(some, *change)):
            return f"{name}: {way}: {red}"
    return f"{name}: GREEN"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--unchecked", action="store_true")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    names = [name for name in replaced() if not args.names or any(part in name for part in args.names)]
    print(f"{len(names)} functions, {len(tests())} tests", flush=True)
    if not args.unchecked and (red := first_red(tests())):
        sys.exit(f"red before anything is broken: {red}")
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        lines = [print(line, flush=True) or line for line in pool.map(verdict, names)]
    sys.exit(any(line.endswith(": GREEN") for line in lines))


if __name__ == "__main__":
    main()
