"""The README names what is there, and its commands run."""

import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import inspect
import io
import os
import re
import runpy
import shlex
import sys
import types
import unittest.mock
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bench
import collectives as dist
import lessons.demos
import parallel
import safe.flags
import safe.launch
import theory.clock
import train
from further.experts import split_experts
from tests.kernels import no_worse_than_pytorch, random
from tests.layouts import SMALL, tokens_of
from tests.pool import HERE, in_new_process
from tests.runs import (
    FILES, files_in, FURTHER, LECTURE, module_of, named, ran, README, readme_commands, readme_levels, TRAIN, WHOLE)


def test_readme_names_what_is_there():
    """Every file, class, function, flag and link. In the reading path's "read" columns, names after a file are defined
    there, and a level reads its own rooms. In the call path a name is defined in the file that its line stands for."""
    sources = {file: inspect.getsource(module_of(file)) for file in FILES}
    rooms = [files_in(LECTURE), files_in([*LECTURE, *FURTHER]), files_in(WHOLE)]
    flags = ({safe.flags.dashed(field.name) for field in dataclasses.fields(safe.flags.Settings)}
             | {name for _, name, _ in bench.FLAGS})
    wrong, text = [], "".join(sources.values())
    for level, read in [(level, read) for level, rows in enumerate(readme_levels()) for read, _, _ in rows]:
        where = None
        for name, section in re.findall(r'`([^`]+)`|"([^"]+)"', read):
            if name.endswith(".py"):
                where = name[:-3]
                wrong += [(level, name)] * (where not in rooms[level])
                continue
            begins = rf"(def |class |){name.split('.')[0]}" if name else f"# -+ {section}"
            if not re.search(rf"(?m)^{begins}\b", sources.get(where, "")) or name and not named(name, where):
                wrong.append((where, name or section))
        wrong += [read] * (where is None and read != "the same")
    for token in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL)):
        if re.fullmatch(r"[\w/]+\.py", token):
            wrong += [token] * (token[:-3] not in FILES)
        # Others are the environment's.
        elif re.fullmatch(r"[A-Za-z_][\w.]*", token) and not re.fullmatch(r"[A-Z_]+", token):
            wrong += [token] * (not named(token) and not re.search(rf"(?<!\w){re.escape(token)}(?!\w)", text))
        elif token.startswith("--"):
            wrong += set(re.findall(r"--[a-z][a-z-]*", token)) - flags
    wrong += [link for link in re.findall(r"\]\(([^)]+)\)", README) if not os.path.exists(os.path.join(HERE, link))]
    listed = re.findall(r"(?m)^    (\w+)(\.py|/) ", README.split("\n## How a step runs\n")[1].split("```text\n")[0])
    assert {name for name, _ in listed} == {file.split("/")[0] for file in FILES} - {"tests"}
    path, where, called = README.split("\n## How a step runs\n")[1].split("```text\n")[1].split("```")[0], None, []
    for line in path.splitlines():
        where = line.split(".py")[0] if re.match(r"\w+\.py", line) else where
        called += [(where, name) for name in re.findall(r"[A-Z]\w+\.\w+", line)]
    wrong += [(where, name) for where, name in called
              if not named(name, where) or not re.search(rf"(?m)^class {name.split('.')[0]}\b", sources[where])]
    lecture, further, whole = map(len, readme_levels())
    assert not wrong and lecture == 12 and further > 15 and whole > 20 and len(called) > 20


def test_readme_commands_are_understood(monkeypatch, capsys):
    class OnlyParses(safe.flags.Parser):
        def parse_args(self):
            super().parse_args()
            sys.exit(0)

    understood = Counter()
    monkeypatch.setattr(lessons.demos, "Parser", OnlyParses)
    for line in readme_commands():
        words = [word for word in shlex.split(line) if not word.startswith("SLOW=")]
        if "sh" in words:  # what its shell runs
            words = re.sub(r"\$\(.*?\)", "", words[words.index("sh") + 2]).split()
        script = next((word for word in words if word.endswith(".py")), None)
        rest = words[words.index(script) + 1:] if script else words
        if words[0].endswith("pytest"):
            tests = [name for name, test in vars(sys.modules["test_all"]).items() if name.startswith("test_")]
            wanted = rest[rest.index("-k") + 1] if "-k" in rest else "NAME"
            assert wanted == "NAME" or any(wanted in name for name in tests), line
            script = "pytest"
        elif script == "train.py" and "--help" not in rest:
            flags = train.Flags if "--plain" in rest else safe.flags.Settings
            s = train.parse(safe.flags.Parser(**train.ABOUT), flags, rest)
            if "--plain" in rest and "--nproc_per_node" in words:
                started = int(words[words.index("--nproc_per_node") + 1])
                assert train.processes_of(s, started) == started, line
        elif script == "bench.py":
            bench.parse([word for word in rest if word != "..."])
        elif "lessons" in words:
            assert words[:3] == ["python", "-m", "lessons"], line
            if words[3:] != ["NAME"]:
                monkeypatch.setattr(sys, "argv", words[2:])
                with pytest.raises(SystemExit, match="0"):
                    lessons.demos.main()
            script = "lessons"
        elif words[0].startswith("--"):
            continue  # a flag alone: the test above
        understood[script] += 1
    assert understood["train.py"] > 30 and understood["bench.py"] > 20 and understood["lessons"] > 8
    assert understood["pytest"] > 4 and not capsys.readouterr().err


@pytest.mark.parametrize("line,says", [("python -m lessons sizes", "6 (K - T C) + 12 L C T"),
                                       ("python bench.py plan --gpus 64", "layouts that fit")])
def test_readme_commands_run(line, says, monkeypatch, capsys):
    assert line in readme_commands()
    words = line.split()[1:]
    monkeypatch.setattr(sys, "argv", words if words[0] != "-m" else words[1:])
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__")
    else:
        runpy.run_path(os.path.join(HERE, words[0]), run_name="__main__")
    assert says in capsys.readouterr().out


def test_a_command_that_starts_processes_runs_and_ends(tmp_path):
    """The ranks are copies of the launcher, which waits for what each of them returns."""
    assert "python -m lessons collectives" in readme_commands()
    printed = ran(["collectives"], 1, tmp_path / "log", program="lessons/__main__.py", launcher="fork")
    assert printed.count("  all-gather step 2: chunk r-2, complete, goes right") == 1


def test_readme_shows_the_groups_of_a_mesh(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 16)
    monkeypatch.setattr(parallel, "init_device_mesh", lambda device, sizes, mesh_dim_names: types.SimpleNamespace(
        mesh=torch.arange(16).view(sizes), mesh_dim_names=mesh_dim_names))
    monkeypatch.setattr(dist, "rows_and_columns", lambda grid: [grid])  # which would make groups
    mesh = parallel.make_mesh("cpu", dp=2, tp=2, pp=2, cp=2)
    experts = torch.tensor(split_experts(mesh, 2))
    groups = {name: mesh.mesh.movedim(i, 3).reshape(8, 2) for i, name in enumerate(mesh.mesh_dim_names)}
    groups |= {"dp x cp": parallel.ranks_of_replicas(mesh), "ep 2, of dp": experts.flatten(0, 1),
               "copies of experts": experts.transpose(1, 2).flatten(0, 1)}
    for name, ranks in groups.items():
        letters = re.search(rf"(?m)^{name}  +((?:[a-h] +){{16}})", README)[1].split()
        assert sorted(ranks.tolist()) == sorted(
            [rank for rank in range(16) if letters[rank] == letter] for letter in {*letters}), name


def debugged(words):
    """What pdb prints of where it has stopped."""
    sys.argv, sys.stdin = words, io.StringIO("w\nq\n")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_module("pdb", run_name="__main__")
    return out.getvalue()


def test_readme_debugger_stops_in_what_was_read():
    line = next(line for line in readme_commands() if line.startswith("python -m pdb"))
    printed = in_new_process(debugged, [*shlex.split(line)[2:], *TRAIN])
    for name in ("train.py", "parallel.py"):
        assert re.search(rf"(?m)^  {re.escape(os.path.join(HERE, name))}\(\d+\)", printed), printed
    assert printed.index("step()") < printed.index("forward_backward()") < printed.rindex("cross_entropy()")


def library_code():
    """README's, which wants a process without groups: the module of its model's class, the gradient."""
    code, = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "fast.on()" in block]
    exec(code, names := {})
    return type(names["model"].reducer).__module__, names["model"].module.weight.grad.tolist()


def test_readme_library_code_is_fast():
    assert in_new_process(library_code) == ("fast.overlap", [[4.0] * 3] * 2)


def test_a_process_with_threads_or_gpus_is_not_forked(monkeypatch):
    if sys.platform != "linux":
        pytest.skip("only Linux says how many threads there are")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(safe.launch, "_imported", safe.launch.threads())
    assert safe.launch.may_fork()
    with concurrent.futures.ThreadPoolExecutor(1) as one:
        one.submit(int).result()
        assert not safe.launch.may_fork()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not safe.launch.may_fork()


def readme_code(folder):
    """README's Python as a module, but for the library's, which is a program of its own."""
    code = "\n\n".join(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
                       if "fast.on()" not in block)
    with open(os.path.join(folder, "readme_code.py"), "w") as file:
        file.write(code)
    spec = importlib.util.spec_from_file_location("readme_code", file.name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sign_gradients(folder):
    net = nn.Linear(3, 2).double()
    with torch.no_grad():
        [p.fill_(0.5) for p in net.parameters()]
    own = os.path.join(folder, f"rank {dist.get_rank()}")  # or one would read what another is writing
    os.mkdir(own)
    strategy = readme_code(own).SignDDP(net, None)
    strategy(torch.tensor([[1.0, -1.0, 1.0 if dist.get_rank() else -5.0]], dtype=torch.float64)).sum().backward()
    strategy.finish_grad_sync()
    with unittest.mock.patch.object(parallel, "DDP", type(strategy)):
        gpt = parallel.parallelize(SMALL, parallel.Layout(dp=dist.get_world_size()), "cpu")
    gpt.make_optimizer(torch.optim.SGD, lr=0.1)
    gpt.forward_backward(*([t] for t in tokens_of(0)))
    assert all(p.grad.abs().eq(1).logical_or(p.grad == 0).all() for p in gpt.params)
    return [p.grad.tolist() for p in net.parameters()]


def test_readme_code_does_what_it_says(pool, tmp_path, triton_kernels):
    added = readme_code(tmp_path)
    for p, m in ((1, 1), (3, 5), (4, 8)):
        parallel.check(parallel.lower(added.eager(p, m, 1)))
    assert theory.clock.simulate(added.eager(4, 8, 1)).peak == [7, 5, 3, 1]
    no_worse_than_pytorch(added.relu2, lambda x: F.relu(x).square(), [random(1000)])
    for grads in pool(2).run(sign_gradients, str(tmp_path)):
        assert grads == [[[1, -1, 0]] * 2, [1, 1]]  # of the third input, one vote for and one against, however loud
