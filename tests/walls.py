"""The walls: the reference is a program of its own, imports point one way, and every row of fast/ and safe/ is entered.

The reference's rows run in processes that never call `fast.on()`. Its programs run in a folder that holds its files
alone.
"""

import ast
import compileall
import functools
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

import collectives as dist
import fast
import kernels
import parallel
import safe
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

# Ranks, flags, whether further/ is there, too: it has them as threads of one process.
PROGRAMS = """
    4  --tp 2 --sp --pp 2 --schedule zb-v             further
    4  --dp 2 --cp 2 --ep 2 --experts 4 --zero 2 --zero-within 2      further
    2  --dp 2 --dtype fp16 --zero 3                   further
    4  --dp 2 --tp 2 --zero 1
    2  --pp 2"""


def copy_reference(rooms, folder):
    for file in sum(map(files_of, rooms), []):
        target = folder / file.relative_to(HERE)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(file, target)


@pytest.fixture(scope="session")
def reference_in(tmp_path_factory):
    """reference_in(rooms): a folder that holds the reference's files, and nothing else."""
    @functools.cache
    def copied(rooms):
        folder = tmp_path_factory.mktemp("alone")
        copy_reference(rooms, folder)
        compileall.compile_dir(folder, quiet=1)  # once, even where Python is told to write no bytecode
        return str(folder)
    return copied


@on_cpus
@parametrize("row", table(PROGRAMS), ids=str)
def test_the_reference_in_a_folder_of_its_own_logs_the_same_losses(start, trained, tmp_path, reference_in, row):
    size, flags, *further = row
    tolerance = 1e-3 if "--dtype" in flags else 1e-10
    keys = ["step", "loss", "grad_norm", "lr"] + ["load_max", "load_entropy"] * ("--experts" in flags)
    flags = f"--n-layer 2 --steps 3 --micro-batches 2 --dtype fp64 {flags} --out OUT/"
    if further:
        alone = start(flags + "plain --together", folder=reference_in(REFERENCE))
    else:
        alone = start(flags + "plain", size, folder=reference_in(CORE))
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


def test_imports_point_one_way():
    """Only rooms before its own, or files of its own. Inside its last function train.py may name the rooms that it
    turns on."""
    wrong = []
    for file, tree in TREES.items():
        room = room_of(file)
        before = ROOMS[:ROOMS.index(room) + (room not in REFERENCE or room == "further")]
        late = ["train", "fast"] * (room == "train")
        for nodes, able in (tree.body, before), (ast.walk(tree), before + late):
            rooms = {name.split(".")[0] for node in nodes for name in imported(node)}
            wrong += [(file, other) for other in rooms & {*ROOMS} - {*able}]
    assert wrong == []


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
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno > 44] == []
    assert [(file, line) for file, source in SOURCES.items() for line in source.splitlines() if len(line) > 120] == []


# ------------------------------------------------------------------------------------------------- what fast/ replaces

def reached_from(value, depth=4):
    """A module's value and what it holds: in containers, partials, closures, defaults, classes' bodies."""
    yield value
    parts = []
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
    elif isinstance(value, (staticmethod, classmethod)):
        parts = [value.__func__]
    elif isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        parts = value.__defaults__, value.__kwdefaults__, cells
    elif isinstance(value, type) and value.__module__.split(".")[0] in ROOMS:
        parts = [part for name, part in vars(value).items() if not name.startswith("__")]
    for part in parts if depth else ():
        yield from reached_from(part, depth - 1)


def old_objects(modules):
    """What these modules' names hold that `fast.on()` has replaced."""
    old = {id(plain): f"{module.__name__}.{name}" for module, name, plain in fast.PLAIN}
    return [f"{module.__name__}.{name} holds the old {old[id(value)]}" for module in modules
            for name, top in vars(module).items() for value in reached_from(top) if id(value) in old]


def modules_here():
    """All modules of this project but fast/ and safe/, which keep what they extend, and tests/."""
    return [module for name, module in [*sys.modules.items()]
            if (getattr(module, "__file__", None) or "").startswith(HERE + os.sep)
            and name.split(".")[0] in ROOMS and name.split(".")[0] not in ("fast", "safe", "tests", "test_all")]


@on_ranks(2)
def test_no_old_object_is_reachable():
    assert old_objects(modules_here()) == []


def test_an_old_object_is_found():
    """In a default argument, a partial, a closure, a class's body, a table."""
    plain = {name: plain for _, name, plain in fast.PLAIN}
    kept = plain["Reducer"]
    module = types.ModuleType("kept")
    module.default = lambda kind=kept: kind
    module.partial = functools.partial(kept, store=None)
    module.closure = lambda: kept
    module.table = {"ring": [plain["going_round"]]}
    assert len(old_objects([module])) == 4


def codes_of(value):
    """The code of a function, or of all functions in a class's body."""
    if inspect.ismethod(value):  # a class's apply
        value = value.__self__
    value = getattr(value, "__func__", value)
    if not isinstance(value, type):
        return {inspect.unwrap(value).__code__}
    parts = (part for part in vars(value).values() if isinstance(part, (types.FunctionType, staticmethod, classmethod)))
    return set().union(*map(codes_of, parts))


def rows_entered(run, *args, **options):
    """"module.name" of each row whose function, or a method of whose class or of an object of it, ran in run(*args)."""
    ran, names = set(), defaultdict(set)  # one may stand in two places
    for module, name, new in safe.SWAPS + fast.SWAPS:
        for mark in [new, *codes_of(new)]:  # an object of the class, or the code of a function
            names[mark].add(f"{module.__name__}.{name}")

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


def own_model():
    """What somebody enters who has no Layout."""
    dist.initialize("cpu")
    parallel.FSDP(torch.nn.Linear(2, 2))
    parallel.ShardedOptimizer(torch.nn.Linear(2, 2).parameters(), torch.optim.SGD)


def rows_entered_by_own_model():
    fast.on()
    return rows_entered(own_model)


def kernels_alone():
    """What somebody calls who takes kernels.py for a library."""
    kernels.use("triton")
    q, k, v = random(3, 1, 1, 16, 16).requires_grad_().unbind()
    kernels.FlashAttention.apply(q, k, v, True).sum().backward()
    kernels.matmul(random(16, 16), random(16, 16))
    kernels.use("auto")


ENTERED = {  # a layout, and the rows that it enters
    "dp=2 n_layer=5": "collectives.make_link kernels.use kernels.linear model.Block parallel.even_pieces "
                      "parallel.Pipeline parallel.make_buckets parallel.Bucket parallel.Reducer",
    "dp=2 micro_batches=2 zero=1": "parallel.FlatOptimizer parallel.FlatReducer",
    "dp=2 micro_batches=2 zero=3": "parallel.EveryBackward parallel.FlatFSDP",
    "dp=4 node=2": "further.nodes.TwoLevels",
    "tp=2": "parallel.ColumnParallelLinear",
    "tp=2 sp=1": "further.sequence.gather_tokens further.sequence.scatter_tokens",
    "pp=2 micro_batches=2 schedule=zb-h1": "further.schedules.HalvedPipeline",
    "cp=2 tokens=8 seq_len=8": "further.context.RingAttention further.context.going_round further.context.attend "
                               "further.context.attend_backward",
    "dp=2 ep=2 experts=4": "further.experts.Experts further.expert_parallel.visit "
                           "further.expert_parallel.through_experts further.experts.grouped_linear",
    "dp=1 choice=triton dtype=fp32 batch=1 tokens=4 seq_len=4 n_head=2 vocab_size=11":
        "kernels.LayerNorm kernels.flash_attention",
    "dp=1 choice=triton dtype=fp32 batch=1 tokens=4 seq_len=4 n_head=2 vocab_size=11 arch=llama n_kv_head=1":
        "further.rms_norm.RowNorm further.llama.swiglu further.llama.rotary",
}


@parametrize("layout", ENTERED)
def test_rows_are_entered(pool, layout):
    place, options = arguments_of(case_of(f"steps=1 n_layer=1 {layout}"))
    for entered in pool(math.prod(place[0].values())).run(rows_entered, in_layout, *place, **options):
        assert set(ENTERED[layout].split()) <= entered


def test_every_row_is_entered_by_a_named_layout(triton_kernels):
    started = in_new_process(rows_entered_by_own_model)
    by_layouts = set(" ".join(ENTERED.values()).split())
    every = {f"{module.__name__}.{name}" for module, name, _ in safe.SWAPS + fast.SWAPS}
    assert every - by_layouts - started - rows_entered(kernels_alone) == set()


@on_plain
@on_ranks(2)
def test_on_comes_first():
    """Not once a group exists."""
    with pytest.raises(RuntimeError, match="before any process group"):
        fast.on()
