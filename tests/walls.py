"""The walls: the reference is a program of its own, imports point one way, and every row of fast/ and safe/ is entered.

The reference's rows run in processes that never call `fast.on()`. Its programs run in a folder that holds its files
alone.
"""

import ast
import compileall
import functools
import graphlib
import importlib
import inspect
import math
import os
import pathlib
import shutil
import sys
import types
from collections import Counter, defaultdict

import pytest
import torch

import fast
import kernels
import safe
from fast import edition
from tests.kernels import random
from tests.layouts import arguments_of, case_of, in_layout
from tests.pool import close, HERE, in_new_process, on_cpus, on_plain, on_ranks, parametrize, table
from tests.runs import log_of, start, trained

# A later one may import any earlier one at its top.
ROOMS = "collectives kernels model parallel further train theory safe fast lessons bench tests test_all".split()
REFERENCE = tuple(ROOMS[:6])
CORE = tuple(room for room in REFERENCE if room != "further")


def files_of(room):
    folder = pathlib.Path(HERE, room)
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


SOURCES = {str(path.relative_to(HERE)): path.read_text() for room in ROOMS for path in files_of(room)}
TREES = {file: ast.parse(source) for file, source in SOURCES.items()}


def room_of(file):
    return file.removesuffix(".py").split(os.sep)[0]


# ------------------------------------------------------------------------------------------------------ the reference

# Processes, or as threads of one; flags.
PROGRAMS = """
    4  --tp 2 --sp --pp 2 --schedule zb-v                             --together
    4  --dp 2 --cp 2 --ep 2 --experts 4 --zero 2 --zero-within 2      --together
    2  --dp 2 --dtype fp16 --zero 3                                   --together
    4  --dp 2 --tp 2 --zero 1
    2  --pp 2"""


def copy_reference(folder):
    for file in sum(map(files_of, REFERENCE), []):
        target = folder / file.relative_to(HERE)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(file, target)


@pytest.fixture(scope="session")
def reference_in(tmp_path_factory):
    """reference_in(): a folder that holds the reference's files, and nothing else."""
    @functools.cache
    def copied():
        folder = tmp_path_factory.mktemp("alone")
        copy_reference(folder)
        compileall.compile_dir(folder, quiet=1)  # once, even where Python is told to write no bytecode
        return str(folder)
    return copied


@on_cpus
@parametrize("row", table(PROGRAMS), ids=str)
def test_the_reference_in_a_folder_of_its_own_logs_the_same_losses(start, trained, tmp_path, reference_in, row):
    size, flags, *together = row
    tolerance = 1e-3 if "--dtype" in flags else 1e-10
    keys = ["step", "loss", "grad_norm", "lr"] + ["load_max"] * ("--experts" in flags)
    flags = f"--n-layer 2 --steps 3 --micro-batches 2 --dtype fp64 {flags} --out OUT/"
    if together:
        alone = start(flags + "plain --together", folder=reference_in())
    else:
        alone = start(flags + "plain", size, folder=reference_in())
    printed = alone.said()
    trained(size, flags + "whole")
    plain, whole = (log_of(tmp_path / name, *keys) for name in ("plain", "whole"))
    assert "mode     plain" in printed and len(plain) == 3 and close(plain, whole, tolerance)


# ---------------------------------------------------------------------------------------------------------- the walls

def imported(statement):
    """Modules that an import statement names."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    return [statement.module] if isinstance(statement, ast.ImportFrom) else []


def arrows():
    """{file: the files that it imports, anywhere in it}."""
    def found(name):
        path = name.replace(".", os.sep)
        return {f"{path}.py", os.path.join(path, "__init__.py")} & {*SOURCES}

    every = {}
    for file, tree in TREES.items():
        names = [name for node in ast.walk(tree) for name in imported(node)]
        names += [f"{node.module}.{alias.name}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                  for alias in node.names]
        every[file] = set().union(*map(found, names)) - {file}
    return every


UP = {("train.py", "fast/run.py"), ("train.py", "safe/run.py")}  # in its last function, which hands one to the other
BACK = {("further/experts.py", "further/shared.py")}  # a config names its layer, which is a subclass of the file's own


def test_imports_point_one_way_and_in_no_circle():
    """Only to rooms before its own, or to files of its own; but train.py, whose `main` names the rooms above."""
    def level(file):
        return ROOMS.index(room_of(file))

    every = {(file, other) for file, others in arrows().items() for other in others}
    up = {(file, other) for file, other in every if level(other) > level(file)}
    assert up == UP
    below = {file: {other for other in others if (file, other) not in BACK} for file, others in arrows().items()
             if room_of(file) not in ("fast", "tests", "test_all")}
    graphlib.TopologicalSorter(below).prepare()  # CycleError names the files
    late = {name for node in TREES["train.py"].body if getattr(node, "name", "") == "main" for some in ast.walk(node)
            for name in imported(some)}
    assert late == {"fast.run", "safe.run"}


def test_each_name_is_bound_once():
    """No function is replaced by a later one, no method from outside its class; no test is lost where two modules share
    its name."""
    bound, others = Counter(), []
    for file, tree in TREES.items():
        others += [(file, ast.unparse(node)) for node in tree.body if isinstance(node, ast.Assign)
                   and isinstance(node.targets[0], ast.Attribute)]
        for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
            names = [node.name for node in owner.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
            bound.update(name if name.startswith("test_") else (file, getattr(owner, "name", ""), name)
                         for name in names)
    assert others + [name for name, times in bound.items() if times > 1] == []


def import_all_without_triton():
    """For a process that nobody uses afterwards."""
    for name in [name for name in sys.modules if name.split(".")[0] in (*ROOMS, "triton")]:
        del sys.modules[name]
    sys.modules["triton"] = None  # so that its import fails
    for file in SOURCES:
        if room_of(file) not in ("tests", "test_all") and not file.endswith("__main__.py"):
            importlib.import_module(file.removesuffix(".py").removesuffix(f"{os.sep}__init__").replace(os.sep, "."))
    return sys.modules["kernels"].HAVE_TRITON


def test_every_file_is_imported_where_there_is_no_triton():
    """As on macOS."""
    assert not in_new_process(import_all_without_triton)


def test_no_function_of_the_reference_and_no_line_is_long():
    assert [(file, node.name) for file, tree in TREES.items() if room_of(file) in REFERENCE for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno > 39] == []
    assert [(file, line) for file, source in SOURCES.items() for line in source.splitlines() if len(line) > 120] == []


# ------------------------------------------------------------------------------------------------- what fast/ replaces

def codes_of(value):
    """The code of a function, or of all functions in a class's body."""
    if inspect.ismethod(value):  # a class's apply
        value = value.__self__
    value = getattr(value, "__func__", value)
    if not isinstance(value, type):
        return {inspect.unwrap(value).__code__}
    parts = (part for part in vars(value).values() if isinstance(part, (types.FunctionType, staticmethod, classmethod)))
    return set().union(*map(codes_of, parts))


def rows():
    """{name: value} of what a process has after edition.on(): kernels.table, collectives.LINKS, the edition's own."""
    own = {f"Fast.{name}": value for name, value in vars(edition.Fast).items() if not name.startswith("__")}
    given = {f"Fast.{kind}": value for kind in ("context", "experts") for value in own.pop(f"Fast.{kind}").values()}
    pairs = {f"Fast.{kind}.{letter}": function for kind in ("tensor", "sequence")
             for letter, function in zip("fg", own.pop(f"Fast.{kind}"))}
    return {**{key.__name__: new for key, new in (fast.KERNELS | edition.LAYERS).items()},
            **{f"LINKS.{name}": new for name, new in (safe.messages.LINKS | fast.links.LINKS).items()},
            **own, **given, **pairs}


def rows_entered(run, *args, **options):
    """The names of rows whose function, or a method of whose class or of an object of it, ran in run(*args)."""
    ran, names = set(), defaultdict(set)  # one may stand in two places
    for name, new in rows().items():
        for mark in [new, *codes_of(new)]:  # an object of the class, or the code of a function
            names[mark].add(name)

    def called(frame, event, argument):
        if event == "call":
            ran.update(names.get(frame.f_code) or names.get(type(frame.f_locals.get("self")), ()))

    sys.setprofile(called)
    try:
        with torch.autograd.set_multithreading_enabled(False):  # on GPUs backward would run where nobody looks
            run(*args, **options)
    finally:
        sys.setprofile(None)
    return ran


def kernels_alone():
    """What somebody calls who takes kernels.py for a library."""
    kernels.use("triton")
    q, k, v = random(3, 1, 1, 16, 16).requires_grad_().unbind()
    kernels.FlashAttention.apply(q, k, v, True).sum().backward()


ENTERED = {  # a layout, and the rows that it enters
    "dp=2 n_layer=5": "LINKS.ours linear Block Unit Pipeline",
    "dp=4 node=2": "LINKS.nodes",
    "dp=2 comm=ring": "LINKS.ring",
    "dp=2 comm=torch": "LINKS.torch",
    "tp=2": "Fast.columns Fast.tensor.f Fast.tensor.g RowParallelLinear",
    "tp=2 sp=1": "Fast.sequence.f Fast.sequence.g",
    "pp=2 micro_batches=2 schedule=zb-h1": "HalvedPipeline",
    "cp=2 tokens=8 seq_len=8": "Fast.context attention_reference attention_backward_reference",
    "dp=2 ep=2 experts=4": "Experts Fast.experts through_experts grouped_linear",
    "dp=1 choice=triton dtype=fp32 batch=1 tokens=4 seq_len=4 n_head=2 vocab_size=11":
        "LayerNorm flash_attention",
    "dp=1 choice=triton dtype=fp32 batch=1 tokens=4 seq_len=4 n_head=2 vocab_size=11 arch=llama n_kv_head=1":
        "rms_norm swiglu rotary",
    "dp=1 choice=triton dtype=fp32 batch=1 tokens=4 seq_len=4 n_head=1 n_embd=16 inner=16 vocab_size=11 optimizer=muon":
        "orthogonal",
    "dp=2 zero=1 optimizer=muon": "UnitOfMatrices",
}


@parametrize("layout", ENTERED)
def test_rows_are_entered(pool, layout):
    place, options = arguments_of(case_of(f"steps=1 n_layer=1 {layout}"))
    for entered in pool(math.prod(place[0].values())).run(rows_entered, in_layout, pool.edition, *place, **options):
        assert set(ENTERED[layout].split()) <= entered


def test_every_row_is_entered_by_a_named_layout(triton_kernels):
    by_layouts = set(" ".join(ENTERED.values()).split())
    assert rows().keys() - by_layouts - rows_entered(kernels_alone) == set()


def names_rebound():
    """Those of the reference that hold something else after fast.on()."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] in REFERENCE]
    before = {(module, name): value for module in modules for name, value in vars(module).items()}
    edition.on()
    return {f"{module.__name__}.{name}" for (module, name), old in before.items() if vars(module)[name] is not old}


def test_editions_kernels_and_links_are_values():
    """No name of the reference stands for them."""
    assert in_new_process(names_rebound) == set()


def modules_of_a_user():
    """Those of this project that docs/own-model.md imports, with fast.on() and without."""
    for name in [name for name in sys.modules if name.split(".")[0] in ROOMS]:
        del sys.modules[name]
    for name in "whole", "together":
        importlib.import_module(f"further.{name}")
    importlib.import_module("fast")
    sys.modules["fast"].on()
    return {*sys.modules}


def test_a_user_s_own_model_and_train_are_harmless():
    """Files of these names that stand beside his program: none of ours asks for them."""
    assert not in_new_process(modules_of_a_user) & {"model", "train"}


@on_plain
@on_ranks(2)
def test_on_comes_first():
    """Not once a group exists."""
    with pytest.raises(RuntimeError, match="before any process group"):
        edition.on()
