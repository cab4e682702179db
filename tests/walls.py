"""The walls: the reference is a program of its own, imports point one way, and every row of fast/ and safe/ is entered.

The reference's rows run in processes that never call `fast.on()`. Its programs run in a folder that holds its files
alone.
"""

import ast
import functools
import gc
import inspect
import math
import os
import pathlib
import shutil
import sys
import types
from collections import Counter

import pytest
import torch

import collectives as dist
import fast
import fast.gloo
import kernels
import model
import parallel
import safe
from tests.collectives import (
    COLLECTIVES, test_between_nodes_every_rank_sends_its_share, test_blocks_may_be_uneven,
    test_bytes_sent_are_the_formulas, test_collective_equals_library, test_examples_print_the_same,
    test_point_to_point_equals_library)
from tests.data import test_data_parallel_sends_two_n_minus_one_over_n
from tests.further import (
    averaged_over_all_replicas, FEW, test_context_parallel_equals_one_process,
    test_expert_parallel_equals_one_process, test_experts_are_wrong_without, test_sequence_parallel_equals_one_process)
from tests.layouts import (
    in_layout, test_layouts_drawn_at_random_equal_one_process, test_layouts_that_round_are_near_one_process,
    test_pipeline_composes, test_two_nodes_equal_one_process, test_without_its_collective_it_is_wrong,
    test_zero_on_three_ranks)
from tests.memory import (
    test_16_bit_gradients_add_up_in_float32_whatever_the_schedule, test_overflow_is_skipped_on_all_ranks_alike)
from tests.pool import HERE, forkserver, needs_kernels, pools
from tests.runs import log_of, Ranks, TRAIN
from tests.zero import test_zero_sends_what_the_table_says
from safe.flags import Settings
from theory.memory import memory_bytes

ROOMS = ["collectives", "kernels", "model", "parallel", "further", "train", "theory", "safe", "fast", "lessons",
         "bench", "tests", "test_all"]  # a later one may import any earlier one at its top
REFERENCE = ROOMS[:6]


def files_of(room):
    folder = pathlib.Path(HERE, room)
    return sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


EVERY_FILE = [str(path.relative_to(HERE)) for room in ROOMS for path in files_of(room)]


# ------------------------------------------------------------------------------------------------------ the reference

def cases_of(test):
    """The arguments of a test that has one line of them."""
    return [case if isinstance(case, tuple) else (case,) for case in test.pytestmark[0].args[1]]


@pytest.mark.parametrize("test,arguments", [(test, arguments) for test, some in [
    (test_bytes_sent_are_the_formulas, [(3,), (4,)]),
    (test_between_nodes_every_rank_sends_its_share, [(4, 2)]),
    (test_context_parallel_equals_one_process, [({"cp": 2, "pp": 2}, 4, "zb-h1", {"zero": 3}, "ring")]),
    (test_sequence_parallel_equals_one_process, [({"tp": 2, "pp": 2}, 4, "zb-h1", {"zero": 1})]),
    (test_expert_parallel_equals_one_process, [({"dp": 2}, 2, "1f1b", {"ep": 2, "zero": 3}, {"bias": FEW})]),
    (test_experts_are_wrong_without, [({"dp": 2}, "exchange"), ({"dp": 2}, averaged_over_all_replicas)]),
    (test_point_to_point_equals_library, [(4,)]),
    (test_examples_print_the_same, [(4,)]),
    (test_collective_equals_library, [(name, 3) for name in COLLECTIVES]),
    (test_blocks_may_be_uneven, [(4, "plain")]),
    (test_data_parallel_sends_two_n_minus_one_over_n, [(3, "monkeypatch")]),
    (test_zero_sends_what_the_table_says, [(3, 1), (2, 3)]),
    (test_16_bit_gradients_add_up_in_float32_whatever_the_schedule, [()]),
    (test_without_its_collective_it_is_wrong, cases_of(test_without_its_collective_it_is_wrong)),
    (test_two_nodes_equal_one_process, [({"dp": 4}, 2, "1f1b", zero, 2) for zero in (1, 2, 3)]),
    (test_layouts_that_round_are_near_one_process, [
        (1, torch.bfloat16, None), (2, torch.float32, torch.bfloat16), (3, torch.float16, None)]),
    (test_overflow_is_skipped_on_all_ranks_alike, [("text", 1, ()), ("text", 2, ("--experts", "4", "--ep", "2"))]),
    (test_zero_on_three_ranks, cases_of(test_zero_on_three_ranks)),
    (test_pipeline_composes, [({"dp": 2, "pp": 2}, "1f1b", {"zero": 2}), ({"dp": 2, "pp": 2}, "zb-h1", {"zero": 3})]),
    (test_layouts_drawn_at_random_equal_one_process, cases_of(test_layouts_drawn_at_random_equal_one_process)),
] for arguments in some], ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_reference_alone_passes(plain_pool, request, test, arguments):
    test(plain_pool, *(request.getfixturevalue(a) if a in ("monkeypatch", "text") else a for a in arguments))


def bytes_alive():
    """Of all tensors of this process, each storage once. The collectives' receive buffers do not count."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    scratches = {t.untyped_storage().data_ptr() for t in fast.gloo.scratches()}
    return sum(size for place, size in sizes.items() if place not in scratches)


KEEPER = dict(vocab_size=256, seq_len=16, n_layer=2, n_head=4, n_embd=64)


def bytes_kept(zero, within):
    """Bytes that this rank keeps between backward and step, in bf16 with AdamW."""
    before = bytes_alive()
    net = parallel.parallelize(model.GPTConfig(**KEEPER), parallel.make_mesh("cpu", dp=4), "cpu", torch.bfloat16,
                               zero=zero, zero_within=within)
    opt = net.make_optimizer(torch.optim.AdamW, lr=0.1)
    x, y = (torch.randint(256, (2, 16)).split(1) for _ in range(2))
    for step in range(2):
        opt.zero_grad()
        net.forward_backward(x, y)
        kept = bytes_alive() - before
        opt.step()
    return kept


@pytest.mark.parametrize("way", ["whole", "plain"])
def test_zero_keeps_what_the_table_says(pool, plain_pool, way):
    if pool.device_type == "cuda":
        pytest.skip("the table is that of any device")
    for zero, within in [*((zero, 4) for zero in range(4)), (2, 2), (3, 2)]:
        s = Settings(dp=within, zero=zero, dtype="bf16", batch_size=within)
        table = memory_bytes(model.GPTConfig(**KEEPER), s)
        table = sum(table[kind] for kind in ("parameters", "gradients", "optimizer"))
        for kept in (plain_pool if way == "plain" else pool)(4).run(bytes_kept, zero, within):
            assert abs(kept / table - 1) < 0.05, (zero, kept, table)


PROGRAMS = [  # processes, flags
    (1, "--dtype fp64"), (4, "--dtype fp64 --dp 2 --tp 2"), (2, "--dtype fp64 --tp 2 --sp"),
    (4, "--dtype fp64 --cp 2 --dp 2 --zero 2"), (2, "--dtype fp64 --cp 2 --cp-kind ulysses"),
    (2, "--dtype fp64 --dp 2 --ep 2 --experts 4"), (2, "--dtype fp64 --pp 2 --schedule 1f1b"),
    (2, "--dtype fp64 --pp 2 --schedule zb-h1"), (2, "--dtype fp64 --pp 2 --schedule interleaved --virtual-stages 2"),
    (2, "--dtype fp64 --zero 1"), (2, "--dtype fp64 --zero 2"), (2, "--dtype fp64 --zero 3"),
    (4, "--dtype fp64 --dp 2 --pp 2 --zero 1"), (2, "--dtype bf16 --zero 1"), (2, "--dtype fp16 --zero 3"),
    (4, "--dtype fp64 --zero 1 --zero-within 2")]
OF_DP_ALONE = [(2, "--dtype fp64 --dp 2 --zero 1"), (2, "--dtype fp64 --tp 2"), (2, "--dtype fp64 --pp 2")]


@pytest.fixture(scope="session")
def whole_run(text, tmp_path_factory):
    """whole_run(size, flags): all flags of a run of the whole program, and its log."""
    @functools.cache
    def get(size, flags):
        folder = tmp_path_factory.mktemp("whole")
        flags = [*TRAIN, "--data", text, "--n-layer", "2", "--steps", "3", "--micro-batches", "2", *flags.split()]
        ranks = Ranks([*flags, "--out", str(folder)], size, folder / "printed")
        assert ranks.end() == [0] * size, ranks.printed()
        return flags, log_of(folder)
    return get


def reference_in(folder, rooms=REFERENCE):
    """Copy the reference's files there, and nothing else."""
    for room in rooms:
        for file in files_of(room):
            target = pathlib.Path(folder, file.relative_to(HERE))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    return str(folder)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """{whether further/ is there: a folder with the reference's files alone}"""
    return {True: reference_in(tmp_path_factory.mktemp("reference")),
            False: reference_in(tmp_path_factory.mktemp("core"), [room for room in REFERENCE if room != "further"])}


@pytest.mark.parametrize("size,flags,further", [(*program, True) for program in PROGRAMS]
                         + [(*program, False) for program in OF_DP_ALONE], ids=str)
def test_the_reference_in_a_folder_of_its_own_logs_the_same_losses(folders, whole_run, tmp_path, size, flags, further):
    tolerance = 1e-10 if "fp64" in flags else 1e-3
    flags, log = whole_run(size, flags)
    ranks = Ranks([*flags, "--out", str(tmp_path)], size, tmp_path / "printed", folder=folders[further])
    assert ranks.end() == [0] * size, ranks.printed()
    assert "mode     plain" in ranks.printed()
    assert [entry["step"] for entry in log] == [1, 2, 3] and log[0]["loss"] > 5
    for plain, whole in zip(log_of(tmp_path), log, strict=True):
        for key in {"loss", "grad_norm", "lr", "load_max", "load_entropy"} & set(whole):
            assert abs(plain[key] - whole[key]) <= tolerance * abs(whole[key]), (key, plain, whole)


# ---------------------------------------------------------------------------------------------------------- the walls

def imported(statement):
    """Modules that an import statement names."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    return [statement.module] if isinstance(statement, ast.ImportFrom) else []


@pytest.mark.parametrize("file", EVERY_FILE)
def test_imports_point_one_way(file):
    """At a file's top only rooms before its own, or files of its own. Inside a function the reference may name
    further/, and train.py's last function the rooms that it turns on."""
    room, tree = file.removesuffix(".py").split(os.sep)[0], ast.parse(pathlib.Path(HERE, file).read_text())
    top = {name.split(".")[0] for statement in tree.body for name in imported(statement)} & set(ROOMS)
    inside = {name.split(".")[0] for node in ast.walk(tree) for name in imported(node)} & set(ROOMS)
    before = set(ROOMS[:ROOMS.index(room) + (room not in REFERENCE or room == "further")])
    assert top <= before, f"{file} imports {top - before}"
    late = {"train": {"train", "fast"}}.get(room, {"further"} if room in REFERENCE else set())
    assert inside <= before | late, f"{file} names {inside - before - late}"


def bound_by(statement):
    """Names that a statement of a module binds, or attributes of others that it replaces."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    blocks = [block for field in ("body", "orelse", "handlers", "finalbody") for block in getattr(statement, field, [])]
    own = [node for node in ast.walk(statement) if isinstance(getattr(node, "ctx", None), ast.Store) and not blocks]
    return {ast.unparse(t) for t in own if isinstance(t, (ast.Name, ast.Attribute))}.union(*map(bound_by, blocks))


@pytest.mark.parametrize("file", [file for file in EVERY_FILE if not file.startswith("test")])
def test_each_name_is_bound_once(file):
    """No function is replaced by a later one, no method from outside its class."""
    body = [node for node in ast.parse(pathlib.Path(HERE, file).read_text()).body if not isinstance(node, ast.If)]
    classes = {node.name: node.body for node in body if isinstance(node, ast.ClassDef)}
    bound = [bound for statement in body if not isinstance(statement, ast.Import) for bound in bound_by(statement)]
    others = [name for name in bound if "." in name and name.split(".")[0] not in classes]  # of another module
    bound += [f"{owner}.{name}" for owner, parts in classes.items() for part in parts for name in bound_by(part)]
    assert others + [name for name, times in Counter(bound).items() if times > 1] == []


def test_no_test_is_lost_where_two_modules_share_a_name():
    names = Counter(node.name for path in files_of("tests") for node in ast.parse(path.read_text()).body
                    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))
    assert [name for name, times in names.items() if times > 1] == []


def test_no_function_of_the_reference_is_long():
    sizes = {f"{file}: {node.name}": node.end_lineno - node.lineno + 1 for room in REFERENCE for file in files_of(room)
             for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}
    assert {name: size for name, size in sizes.items() if size > 45} == {}


@pytest.mark.parametrize("file", EVERY_FILE)
def test_no_line_is_longer_than_120_characters(file):
    lines = pathlib.Path(HERE, file).read_text().splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > 120] == []


# ------------------------------------------------------------------------------------------------- what fast/ replaces

def reached_from(value, path, depth=0):
    """(path, object) of what a module's value holds: in containers, partials, closures, defaults, classes' bodies."""
    yield path, value
    if depth == 4:
        return
    parts = {}
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = {f"[{i}]": part for i, part in enumerate(value)}
    elif isinstance(value, dict):
        parts = {f"[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, functools.partial):
        parts = {".func": value.func, ".args": value.args, ".keywords": value.keywords}
    elif isinstance(value, (staticmethod, classmethod)):
        parts = {".__func__": value.__func__}
    elif isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        parts = {"'s defaults": value.__defaults__, "'s keywords": value.__kwdefaults__, "'s closure": cells}
    elif isinstance(value, type) and value.__module__.split(".")[0] in ROOMS:
        parts = {f".{name}": part for name, part in vars(value).items() if not name.startswith("__")}
    for name, part in parts.items():
        yield from reached_from(part, path + name, depth + 1)


def old_objects(modules):
    """Paths from these modules to anything that `fast.on()` has replaced."""
    old = {id(plain): f"{module.__name__}.{name}" for module, name, plain in fast.PLAIN}
    return [f"{path} holds the old {old[id(value)]}" for module in modules for name, top in vars(module).items()
            for path, value in reached_from(top, f"{module.__name__}.{name}") if id(value) in old]


def modules_here():
    """All modules of this project but fast/ and safe/, which keep what they extend, and tests/."""
    return [module for name, module in [*sys.modules.items()]
            if (getattr(module, "__file__", None) or "").startswith(HERE + os.sep)
            and name.split(".")[0] in ROOMS and name.split(".")[0] not in ("fast", "safe", "tests", "test_all")]


def old_objects_here():
    return old_objects(modules_here())


def test_no_old_object_is_reachable(pool):
    assert pool(2).run(old_objects_here) == [[], []]


def test_an_old_object_is_found():
    """In a default argument, a partial, a closure, a class's body, a table."""
    plain = {name: plain for _, name, plain in fast.PLAIN}
    kept = plain["DDP"]
    module = types.ModuleType("kept")
    module.default = lambda kind=kept: kind
    module.partial = functools.partial(kept, bucket_mb=1)
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
    ran, names = set(), {}
    for module, name, new in safe.SWAPS + fast.SWAPS:
        for mark in [new, *codes_of(new)]:  # an object of the class, or the code of a function
            names[mark] = f"{module.__name__}.{name}"

    def called(frame, event, argument):
        if event == "call":
            ran.add(names.get(frame.f_code) or names.get(type(frame.f_locals.get("self"))))

    sys.setprofile(called)
    try:
        with torch.autograd.set_multithreading_enabled(False):  # on GPUs backward would run where nobody looks
            run(*args, **options)
    finally:
        sys.setprofile(None)
    return ran


def start_and_report(pipe):
    fast.on()
    pipe.send(rows_entered(dist.initialize, "cpu"))


def kernels_alone():
    """What somebody calls who takes kernels.py for a library."""
    kernels.use("triton")
    q, k, v = torch.randn(3, 1, 1, 16, 16).requires_grad_().unbind()
    kernels.FlashAttention.apply(q, k, v, True).sum().backward()
    kernels.matmul(torch.randn(16, 16), torch.randn(16, 16))
    kernels.use("auto")


ENTERED = [  # rows, and the layout that enters them: micro-batches, schedule, options, the model's change
    ("collectives.make_link kernels.use kernels.linear model.Block parallel.even_pieces parallel.Pipeline "
     "parallel.ParallelGPT parallel.make_buckets parallel.make_reducer parallel.DDP", {"dp": 2}, 1, "1f1b", {},
     {"n_layer": 5}),
    ("parallel.ShardReducer parallel.ShardedOptimizer", {"dp": 2}, 2, "1f1b", {"zero": 1}, {}),
    ("parallel.FlatParameter parallel.FSDP", {"dp": 2}, 2, "1f1b", {"zero": 3}, {}),
    ("parallel.ColumnParallelLinear", {"tp": 2}, 1, "1f1b", {}, {}),
    ("further.sequence.gather_tokens further.sequence.scatter_tokens", {"tp": 2}, 1, "1f1b", {"sequence": True}, {}),
    ("further.context.RingAttention further.context.going_round kernels.attend kernels.attend_backward", {"cp": 2}, 1,
     "1f1b", {"tokens": 8}, {"seq_len": 8}),
    ("further.experts.Experts further.experts.visit further.experts.through_experts "
     "kernels.grouped_linear", {"dp": 2}, 1, "1f1b", {"ep": 2}, {"experts": 4}),
    ("kernels.Linear kernels.bias_gradient", {"pp": 2}, 2, "zb-h1", {}, {}),
    ("kernels.LayerNorm kernels.flash_attention", {"dp": 1}, 1, "1f1b",
     {"choice": "triton", "dtype": torch.float32, "batch": 1, "tokens": 4},
     {"seq_len": 4, "n_layer": 1, "n_embd": 32, "n_head": 2}),
]


@pytest.mark.parametrize("rows,layout,micro_batches,schedule,options,change", ENTERED, ids=str)
def test_rows_are_entered(pool, rows, layout, micro_batches, schedule, options, change):
    if "choice" in options:
        needs_kernels(pool)
    ranks = pool(math.prod(layout.values()))
    for entered in ranks.run(rows_entered, in_layout, layout, "sgd", micro_batches, change, schedule=schedule,
                             **options):
        assert set(rows.split()) <= entered


def test_every_row_is_entered_by_a_named_layout(triton_kernels):
    receive, send = forkserver().Pipe(duplex=False)
    process = forkserver().Process(target=start_and_report, args=(send,))
    process.start()
    started = receive.recv()
    process.join()
    by_layouts = {row for rows, *_ in ENTERED for row in rows.split()}
    every = {f"{module.__name__}.{name}" for module, name, _ in safe.SWAPS + fast.SWAPS}
    assert every - by_layouts - started - rows_entered(kernels_alone) == set()


def test_on_comes_first():
    """Not once a group exists."""
    with pools("cpu", plain=True) as get:
        get(2).run(on_after_a_group)


def on_after_a_group():
    with pytest.raises(RuntimeError, match="before any process group"):
        fast.on()
