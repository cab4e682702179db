"""What fast/ and safe/ replace or override is proven by tests that run the reference: broken there, one must fail.

    python tests/breaks.py [NAME ...]    NAME: a part of functions' names; left out, all functions

For each function of the reference in whose place fast/ or safe/ has another, a copy of the project is made in which it
returns None, and the tests that run the reference run there, the last one that failed first, until one fails. Should
none fail, the function returns its last argument. A line each: the function, what it returned, the test; GREEN where
all pass. That is right for Link.on_a_stream, because only GPUs have streams, and Link.close, which does nothing there.
The suite leaves this out, because it takes half an hour.
"""

import importlib
import itertools
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
REFERENCE = "collectives", "kernels", "model", "parallel", "further", "train"
RUN_IT = "reference_s_ or reference_alone or reference_in_a or plain and not explain or demo_"


def methods(kind, names):
    """Those of `names` that a class of the reference defines itself: ["parallel.DDP.forward"]"""
    return [f"{kind.__module__}.{kind.__qualname__}.{name}" for name in vars(kind).keys() & names
            if callable(getattr(kind, name)) and name[0] != "_"]  # a broken __init__ would be seen at once


def room_of(kind):
    return kind.__module__.split(".")[0]


def replaced():
    """Names of what rows of SWAPS replace and of what classes of fast/ and safe/ override."""
    import fast
    import safe
    names = []
    for module, name, new in safe.SWAPS + fast.SWAPS:
        old = getattr(module, name)
        if not isinstance(old, type):
            names.append(f"{module.__name__}.{name}")
        elif not issubclass(new, old):  # nothing of it is left
            names += methods(old, vars(old))
    for file in [*HERE.glob("safe/*.py"), *HERE.glob("fast/*.py")]:
        for kind in vars(importlib.import_module(f"{file.parent.name}.{file.stem}")).values():
            for upper, lower in itertools.combinations(getattr(kind, "__mro__", ()), 2):
                if room_of(upper) in ("fast", "safe") and room_of(lower) in REFERENCE:
                    names += methods(lower, vars(upper))
    return sorted({*names})


def first_red(cache, name="", returned=""):
    """The first test of the reference that fails where this function returns that; None if all pass."""
    with tempfile.TemporaryDirectory(prefix="breaks-") as folder:
        shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns(".git", "__pycache__"), dirs_exist_ok=True)
        if name:
            file, function = re.fullmatch(r"(further\.\w+|\w+)\.(.*)", name).groups()
            with open(f"{folder}/{file.replace('.', '/')}.py", "a") as text:
                text.write(f"\n{function} = lambda *values, **more: {returned}\n")
        words = ["timeout", "900", sys.executable, "-m", "pytest", "-qx", "-rfE", "-k", RUN_IT, "test_all.py",
                 "--failed-first", "-o", f"cache_dir={cache}", f"--basetemp={folder}/.tmp"]
        done = subprocess.run(words, cwd=folder, text=True, stdout=subprocess.PIPE)
    red = re.search(r"(?m)^(?:FAILED|ERROR) (?:test_all.py::)?(.*?)(?: - |$)", done.stdout)
    return red[1] if red else done.returncode and f"exit code {done.returncode}"


def main():
    with tempfile.TemporaryDirectory() as cache:
        print(f"nothing: {first_red(cache) or 'GREEN'}", flush=True)
        for name in replaced():
            if not sys.argv[1:] or any(part in name for part in sys.argv[1:]):
                for returned in "None", "values[-1]":
                    if red := first_red(cache, name, returned):
                        break
                print(f"{name}: {returned}: {red or 'GREEN'}", flush=True)


if __name__ == "__main__":
    main()
