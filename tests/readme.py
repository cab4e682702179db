"""The README and docs/ name what is there, and their commands run."""

import ast
import concurrent.futures
import contextlib
import dataclasses
import importlib
import json
import operator
import os
import pathlib
import re
import runpy
import shlex
import signal
import shutil
import sys
import types
from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bench
import collectives as dist
import kernels
import lessons.demos
import lessons.gpu
import lessons.pages
import parallel
import safe.flags
import safe.launch
import theory.clock
import train
from further.expert_parallel import split_experts
from further.groups import ranks_of_dp_cp
from further.lists import check, lower
from tests.kernels import no_worse_than_pytorch, random
from tests.layouts import LAYOUTS, small_gpt, tokens_of
from tests.pool import close, HERE, in_new_process, parametrize
from tests.runs import TRAIN, command, output_of, printed_by, ran, slow
from tests.walls import CORE, REFERENCE, ROOMS, SOURCES, TREES, room_of


TOP = pathlib.Path(HERE)
PAGES = {str(page.relative_to(TOP)): page.read_text() for page in sorted([TOP / "README.md", *TOP.glob("docs/*.md")])}
PLAIN = re.search(r"(?m)^plain\(\) { n=\$1; shift; (.*); }$", PAGES["README.md"])[1]


def section(title, page="README.md"):
    return PAGES[page].split(f"\n## {title}\n")[1].split("\n## ")[0]


def named(token, where=None):
    """Whether `token` is a class, function, method or constant of these files, or of one of them. Before its name may
    stand its module's: fast.adamw.AdamW."""
    files = [where] if where else [file.removesuffix(".py") for file in SOURCES if "__main__" not in file]
    for file in files:
        module = importlib.import_module(file.removesuffix("/__init__").replace("/", "."))
        with contextlib.suppress(AttributeError):
            operator.attrgetter(token.removeprefix(f"{module.__name__}."))(module)
            return True
    return False


def code_of(token):
    """The lines of all classes, functions or methods of that name."""
    found = []
    for file, tree in TREES.items():
        nodes = [tree]
        for name in token.split("."):
            nodes = [inner for node in nodes for inner in node.body if getattr(inner, "name", None) == name]
        found += [ast.get_source_segment(SOURCES[file], node) for node in nodes]
    return "\n".join(found)


def inline_code(text):
    """What stands in single backticks, outside of fenced blocks; lines that were wrapped are one again."""
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", outside)]


def commands(text):
    """Every command of a page: lines of its fenced blocks, and what stands in backticks and starts like one. `plain` is
    what the README's function of that name runs."""
    blocks = [block for language, block in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL) if not language]
    lines = re.sub(r"\\\n *", " ", "".join(blocks)).splitlines() + inline_code(text)
    lines = [part.split("   ")[0].strip() for line in lines for part in re.split(" &&? ", line)]
    lines = [re.sub(r"^plain (\d) (.*)", lambda m: PLAIN.replace("$n", m[1]).replace('"$@"', m[2]), line)
             for line in lines]
    return [line for line in dict.fromkeys(lines) if re.match(r"(\S*/)?(python3?|pytest|torchrun|srun) |SLOW=1 ", line)]


def levels():
    """The reading path's levels, the README's and two of docs/reading.md: of each its rows, as lists of cells."""
    further, whole = (section(title, "docs/reading.md") for title in ("Further", "The whole program"))
    tables = [re.search(r"(?m)(?:^\|.*\n)+", text)[0] for text in (section("Reading path"), further, whole)]
    return [[[cell.strip() for cell in line.strip("| \n").split("|")] for line in table.splitlines()[2:]]
            for table in tables]


def slug(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@parametrize("page", PAGES)
def test_links_and_pictures_are_there(page):
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    for link in re.findall(r"\]\((?!https:)([^)]+)\)", text) + re.findall(r"(?m)^\[[^]]+\]: (\S+)", text):
        file, _, anchor = link.partition("#")
        there = os.path.normpath(os.path.join(os.path.dirname(page), file)) if file else page
        assert (TOP / there).exists(), link
        assert not anchor or anchor in map(slug, re.findall(r"(?m)^#+ (.*)", PAGES[there])), link


def test_reading_path_names_what_is_there():
    """A row's names are defined in the file before them, and a level reads its own rooms."""
    whole = [room for room in ROOMS if room not in REFERENCE]
    for rooms, rows in zip((CORE, REFERENCE, whole), levels(), strict=True):
        for row in rows:
            where = None
            for file, name, part in re.findall(r"\]\((?:\.\./)?([\w/]+)\.py\)|`([^`]+)`|\"([^\"]+)\"", row[1]):
                where = file or where
                begins = rf"(def |class |){name.split('.')[0]}" if name else f"# -+ {part}"
                assert room_of(where) in rooms, row
                assert file or re.search(rf"(?m)^{begins}\b", SOURCES[f"{where}.py"]), row
                assert not name or named(name, where), row
            assert where, row
    lecture, further, others = map(len, levels())
    assert lecture == 13 and further > 15 and others > 20


def test_stops_have_one_order_everywhere():
    """Numbered from 1 as they are read: the README's table, docs/reading.md's stops, answers and minutes, the links of
    docs/lecture.md, and the pages."""
    path, passages = PAGES["docs/reading.md"], PAGES["docs/lecture.md"]
    titles = [row[0].split("]")[0].lstrip("[") for row in levels()[0]]
    numbers = [title.split(".")[0] for title in titles]
    assert numbers == [str(n) for n in range(1, len(titles) + 1)]
    assert re.findall(r"(?m)^### (\d+\. .*)", path) == titles == [*lessons.pages.GROUPS["stops"].values()]
    assert re.findall(r"(?m)^\*\*(\d+)\.\*\* ", path) == numbers
    links = re.findall(r"(?m)^\[(\d+)\]: reading\.md#(\S+)$", passages)
    assert links == [*zip(numbers, map(slug, titles))]
    minutes = re.findall(r"(?m)^\|[^|]*\| (\d+\. [^|]+) \| \d+ \|", section("For a teacher", "docs/reading.md"))
    assert {*minutes} <= {*titles} and [*minutes] == sorted(minutes, key=titles.index) and len(minutes) > 9


def test_passages_name_what_their_stop_opens():
    """A name of docs/lecture.md stands in a file of its row, or of its stop's section of docs/reading.md."""
    page = PAGES["docs/lecture.md"]
    stops = dict(re.findall(r"(?m)^\[([^]]+)\]: reading\.md#(\S+)$", page))
    sections = re.split(r"(?m)^##+ ", PAGES["docs/reading.md"])
    opened = {slug(text.split("\n")[0]): SOURCES.keys() & re.findall(r"[\w/]+\.py", text) for text in sections}
    tables = re.findall(r"(?m)^\| passage \| stop \|.*\n((?:\|.*\n)+)", page)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for text in tables for line in text.splitlines()[1:]]
    for _, where, looks, _ in rows:
        files = set(re.findall(r"`([\w/]+\.py)`", looks)).union(
            *(opened[stops[stop]] for stop in re.findall(r"[^],[ ][^],[]*", where)))
        for name in re.findall(r"`([A-Za-z_][\w.]*)`", looks):
            last = name.split(".")[-1]
            assert any(name == file or re.search(rf"\b{last}\b", SOURCES[file]) for file in files), (name, files)
    assert len(tables) == 5 and len(rows) > 100


def test_call_path_and_map_name_what_is_there():
    listed = re.findall(r"(?m)^    (\w+)(\.py|/) ", section("What is where"))
    assert {name for name, _ in listed} == {*ROOMS} - {"tests"}
    where, called = None, []
    for line in section("Stepping through", "docs/reading.md").split("```")[1].splitlines()[1:]:
        where = line.split(".py")[0] if re.match(r"\w+\.py", line) else where
        called += [(where, name) for name in re.findall(r"[A-Z]\w+\.\w+", line)]
    said = in_new_process(output_of, lessons.demos.main, *"path --dp 2 --tp 2".split())
    shown = {name.split(".")[-1] for name in re.findall(r"(?m)[\w.]+$", said)}  # before Python 3.11 without its class
    assert len(called) > 20 and all(named(name, where) and name.split(".")[1] in shown for where, name in called)


@parametrize("page", sorted(PAGES.keys() - {"docs/bugs.md", "docs/tried.md"}))
def test_names_and_flags_of_a_page_are_there(page):
    flags = {safe.flags.dashed(field.name) for field in dataclasses.fields(safe.flags.Settings)}
    flags |= {name for _, name, _ in bench.FLAGS}
    text = "".join(SOURCES.values())
    for token in inline_code(PAGES[page]):
        if re.fullmatch(r"[\w/]+\.py", token):
            assert token in SOURCES, token
        elif re.fullmatch(r"(?![A-Z_]+$)[A-Za-z_][\w.]*", token):  # the environment's
            assert named(token) or re.search(rf"(?<!\w){re.escape(token)}(?!\w)", text) or names_tests(token), token
        elif token.startswith("--"):
            assert {*re.findall(r"--[a-z][a-z-]*", token)} <= flags, token


def names_tests(word):
    return [name for name in vars(sys.modules["test_all"]) if name.startswith("test_") and word in name]


def test_lessons_name_what_to_read():
    for lesson in lessons.gpu.LESSONS.values():
        assert named(lesson.read.split()[1], lesson.read.split(".py")[0]), lesson.read


def test_exercises_break_what_stands_in_the_place_they_name():
    """What a row says to leave out stands in what it names first; its tests are there, with rows of that subject."""
    rows = re.findall(r"(?m)^\| `([\w.]+)`: (.*) \| `(\w+)`(.*) \|$", PAGES["docs/exercises.md"])
    for where, change, test, subject in rows:
        code = code_of(where)
        assert code and all(re.search(rf"\b{name}\b", code) for name in re.findall(r"`(\w+)`", change)), where
        assert test in names_tests(test), test
        assert not subject or re.search(rf"(?m)^{subject.strip(', ')}\b", LAYOUTS), subject
    assert len(rows) == 17


def test_the_hours_of_the_reading_path_are_its_stops():
    hours, when = Counter(), ""
    table = section("For a teacher", "docs/reading.md")
    for begins, minutes in re.findall(r"(?m)^\|([^|]*)\| [^|]+ \| (\d+) \|", table):
        when = begins.strip() or when
        hours[when] += int(minutes) / 60
    assert [*map(round, hours.values())] == [2, 4, 11] and hours["first evening"] == 2.5
    said = " ".join(section("Reading path").split())
    assert "two and a half hours" in said and "four hours" in said and "eleven hours" in said


def test_each_claim_names_its_tests():
    rows = [line for line in section("What it proves").splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 10
    for row in rows:
        assert names_tests(row.strip("| ").split("`")[-2]), row


def test_ci_runs_the_readme_s_test_command():
    line, = [line for line in section("Two commands").splitlines() if line.endswith("pytest test_all.py")]
    assert line in (TOP / ".ci" / "run").read_text().splitlines()


def program_of(line):
    """(program, its words, processes that torchrun starts) of a command, or (None, words, 1)."""
    words = [word for word in shlex.split(line) if not word.startswith("SLOW=")]
    processes = int(words[words.index("--nproc_per_node") + 1]) if "--nproc_per_node" in words else 1
    if "sh" in words:  # what its shell runs
        words = re.sub(r"\$\(.*?\)", "", words[words.index("sh") + 2]).split()
    if words[1:3] == ["-m", "lessons"]:
        return "lessons", words[3:], 1
    if words[0].endswith("pytest"):
        return "pytest", words[1:], 1
    script = next((word for word in words if word.endswith(".py")), None)
    return script, words[words.index(script) + 1:] if script else words, processes


@parametrize("page", PAGES)
def test_commands_of_a_page_are_understood(page, monkeypatch, capsys):
    class OnlyParses(safe.flags.Parser):
        def parse_args(self):
            super().parse_args()
            sys.exit(0)

    monkeypatch.setattr(lessons.demos, "Parser", OnlyParses)
    for line in commands(PAGES[page]):
        program, words, processes = program_of(line)
        if program == "pytest" and "-k" in words:
            wanted = words[words.index("-k") + 1].split()[0]
            assert wanted == "NAME" or names_tests(wanted), line
        elif program == "train.py" and "--help" not in words:
            flags = train.Flags if "--plain" in words else safe.flags.Settings
            s = train.parse(safe.flags.Parser(**train.ABOUT), flags, words)
            assert "--plain" not in words or train.processes_of(s, processes) == processes, line
        elif program == "bench.py":
            bench.parse([word for word in words if word != "..."])
        elif program == "lessons" and words != ["NAME"]:
            with pytest.raises(SystemExit, match="0"):
                output_of(lessons.demos.main, *words)
    assert not capsys.readouterr().err


@parametrize("shell", ["sh", "dash", "bash", "zsh", "fish"])
def test_what_is_pasted_into_a_shell_runs_there(shell):
    """Every command of a block, the lines of a comment too: zsh knows none in what is typed."""
    blocks = [block for text in PAGES.values() for block in re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", text)]
    assert len(blocks) > 20 and not [body for kind, body in blocks if not kind and re.search(r"(?m)(^|\s)#", body)]
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")
    plain = re.search(r"(?m)^function plain.*" if shell == "fish" else r"(?m)^plain\(\).*", PAGES["README.md"])[0]
    stub = "function torchrun; echo $argv; end" if shell == "fish" else 'torchrun() { echo "$@"; }'
    assert command(shell, "-c", f"{stub}\n{plain}\nplain 2 --dp 'a b'") == (
        "--nproc_per_node 2 train.py --plain --steps 50 --dp a b\n")


def test_commands_of_the_lecture_run(text, tmp_path):
    """As typed, but with a tiny model: with the same batch, losses are the same. Demos have tests of their own."""
    lines = dict.fromkeys(line for row in levels()[0] for line in commands(row[3]))
    losses, log = [], tmp_path / "log"
    for program, words, processes in map(program_of, lines):
        if program == "train.py":
            said = ran([*words, *TRAIN, "--data", text, "--steps", "2"], processes, log)
            losses.append(re.findall(r"loss (\S+)", said))
    assert len(lines) == 12 and len(losses) == 3 and losses[0] == losses[1] == losses[2] != []


STRATEGIES = """
import os
import torch
import torch.nn.functional as F
import collectives as dist

def say(*words):  # in one write, or ranks would write between its words
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def cleanup():
    torch.distributed.destroy_process_group()

def data_parallelism_main(rank, world_size, data, num_layers, num_steps):
    setup(rank, world_size)
    params = [get_init_params(num_dim, num_dim, rank) for _ in range(num_layers)]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    for step in range(num_steps):
        x = data.chunk(world_size)[rank].to(get_device(rank))
        for param in params:
            x = F.gelu(x @ param)
        x.square().mean().backward()
        for param in params:
            dist.all_reduce(tensor=param.grad, op=dist.ReduceOp.AVG, async_op=False)
        optimizer.step()
    say("data", *(param.sum().item() for param in params))
    cleanup()

def tensor_parallelism_main(rank, world_size, data, num_layers):
    setup(rank, world_size)
    x, num_dim = data.to(get_device(rank)), data.size(1)
    for _ in range(num_layers):
        own = F.gelu(x @ get_init_params(num_dim, num_dim // world_size, rank))
        parts = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(tensor_list=parts, tensor=own, async_op=False)
        x = torch.cat(parts, 1)
    say("tensor", *summarize_tensor(x))
    cleanup()

def pipeline_parallelism_main(rank, world_size, data, num_layers, num_micro_batches):
    setup(rank, world_size)
    params = [get_init_params(data.size(1), data.size(1), rank) for _ in range(num_layers // world_size)]
    for x in data.to(get_device(rank)).chunk(num_micro_batches):
        if rank > 0:
            dist.recv(tensor=x, src=rank - 1)
        for param in params:
            x = F.gelu(x @ param)
        if rank + 1 < world_size:
            dist.send(tensor=x, dst=rank + 1)
    say("pipeline", *summarize_tensor(x))
    cleanup()
"""


@parametrize("size", [2, 3])
def test_what_stands_around_lecture_8_s_code_runs_it(size, tmp_path):
    """The page's code before and after strategies that call what the lecture's call. All ranks end with one model."""
    before, after = re.findall(r"```python\n(.*?)```", PAGES["docs/lecture.md"], re.DOTALL)
    file = tmp_path / "lecture.py"
    file.write_text("\n".join([STRATEGIES, before, after]))
    said = ran([], size, tmp_path / "log", program=str(file))
    assert len(set(re.findall("(?m)^data .*", said))) == 1 and said.count("data ") == size
    assert said.count("tensor 12 12\n") == size and said.count("pipeline 4 12\n") == size


# GPUs, nodes, a person; or it is refused
NEEDS = (r"srun|HOST|nsys|ncu |dist_op|gpt2|eight-bits|bench.py kernels|\.venv|git |pytest|my\.txt|mine|pdb|--help|"
         r"NAME|FILE|--tp 3|--check")


@slow
@parametrize("page", PAGES)
def test_commands_run_as_typed(page, tmp_path):
    """In the order of the page, with every step."""
    blocks = [body for kind, body in re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", PAGES[page]) if not kind]
    typed = [line for block in blocks for line in re.sub(r"\\\n *", " ", block).splitlines()]
    typed += [line for line in commands(PAGES[page]) if line not in " ".join(typed)]
    for line in [line.split("   ")[0].replace("runs/", f"{tmp_path}/") for line in typed]:
        if not re.search(NEEDS, line):
            path = f"{os.path.dirname(sys.executable)}:$PATH"
            command("bash", "-c", f'unset TRITON_INTERPRET; PATH="{path}"; {line}')


def test_readme_shows_the_groups_of_a_mesh(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 16)
    monkeypatch.setattr(parallel, "init_device_mesh", lambda device, sizes, mesh_dim_names: types.SimpleNamespace(
        mesh=torch.arange(16).view(sizes), mesh_dim_names=mesh_dim_names))
    monkeypatch.setattr(dist, "rows_and_columns", lambda grid: [grid])  # which would make groups
    mesh = parallel.make_mesh("cpu", dp=2, tp=2, pp=2, cp=2)
    experts = torch.tensor(split_experts(mesh, 2))
    groups = {name: mesh.mesh.movedim(i, 3).reshape(8, 2) for i, name in enumerate(mesh.mesh_dim_names)}
    groups |= {"dp x cp": ranks_of_dp_cp(mesh), "ep 2, of dp": experts.flatten(0, 1),
               "copies of experts": experts.transpose(1, 2).flatten(0, 1)}
    for name, ranks in groups.items():
        letter = {rank: "abcdefgh"[i] for i, group in enumerate(sorted(ranks.tolist())) for rank in group}
        row = " +".join(letter[rank] for rank in range(16))
        assert re.search(f"(?m)^{name}  +{row} ", PAGES["docs/words.md"]), name


def library_code():
    """README's, which wants a process without groups: the module of its product, the gradient's norm."""
    code, = re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.DOTALL)
    exec(code, names := {})
    return kernels.table[F.linear].__module__, names["norm"].item()


def test_readme_library_code_is_fast():
    assert in_new_process(library_code) == ("fast.fp8", pytest.approx(128 ** 0.5))  # each of 8 gradients is 4


def cells_run():
    """[(what a code cell of the notebook prints and returns, what stands there)], run as Jupyter would, in its folder.
    """
    os.chdir(os.path.join(HERE, "docs"))
    cells, names, found = json.loads(pathlib.Path("four_ranks.ipynb").read_text())["cells"], {}, []
    for cell in cells:
        if cell["cell_type"] == "code":
            *lines, last = ast.parse("".join(cell["source"])).body
            is_value = isinstance(last, ast.Expr)
            rest = ast.Module(lines if is_value else [*lines, last], [])
            said = printed_by(exec, compile(rest, "cell", "exec"), names)
            said += repr(eval(compile(ast.Expression(last.value), "cell", "eval"), names)) if is_value else ""
            stands = [out.get("text") or out["data"]["text/plain"] for out in cell["outputs"]]
            found.append((said, "".join(map("".join, stands))))
    return found


def test_the_notebook_says_what_stands_in_it():
    cells = in_new_process(cells_run)
    assert len(cells) == 3 and all(said == stands for said, stands in cells), cells
    assert "rank 3 waits for rank 2 in all_reduce" in cells[1][0] and cells[2][0] == "True"


def die_at_the_first_save():
    """Of what comes in this process."""
    real = os.replace
    patch.object(os, "replace", lambda *files: (real(*files), os.kill(os.getpid(), signal.SIGKILL))).start()


def test_somebody_s_own_script_goes_on_with_other_processes(tmp_path):
    """The page's commands, the first one killed in the middle; losses and weights are those of one process."""
    page = PAGES["docs/own-model.md"]
    (tmp_path / "mine.py").write_text(re.search(r"(?s)```python\n(.*?)```", page)[1])
    alone, losses = ("mine.py", ["mine.pt", "1"], 1), {}
    for number, (program, words, size) in enumerate([alone, *map(program_of, commands(page))]):
        file = str(tmp_path / f"{size == 1}{words[0]}")
        before = die_at_the_first_save if number == 1 else None
        said = ran([file, words[1]], size, tmp_path / "log", [-signal.SIGKILL, 1, 1, 1] if before else None,
                   before=before, program=str(tmp_path / program))
        losses[size] = re.findall(rf"step (\d+)/60 on {size}  loss (\S+)", said)
    assert [[step for step, _ in lines] for lines in losses.values()] == [["20", "40", "60"], ["20"], ["40", "60"]]
    assert [float(loss) for size in (4, 3) for _, loss in losses[size]] == pytest.approx(
        [float(loss) for _, loss in losses[1]], abs=0.002)
    one, many = (torch.load(tmp_path / f"{is_one}mine.pt")["weights"] for is_one in (True, False))
    assert all(close(many[name], weight, 1e-3) for name, weight in one.items())


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


def sign_gradients(file):
    """SignSGD's of a linear layer; and an edition trains a GPT with it."""
    net = nn.Linear(3, 2).double()
    with torch.no_grad():
        [p.fill_(0.5) for p in net.parameters()]
    added = runpy.run_path(file)
    strategy = added["SignSGD"](net.parameters(), torch.optim.SGD)
    net(torch.tensor([[1.0, -1.0, 1.0 if dist.get_rank() else -5.0]], dtype=torch.float64)).sum().backward()
    strategy.finish_grad_sync()
    gpt = small_gpt(edition=added["Signs"], dp=dist.get_world_size())
    gpt.forward_backward(*([t.to(gpt.device)] for t in tokens_of(0)))
    assert all(p.grad.abs().eq(1).logical_or(p.grad == 0).all() for p in gpt.params)
    return [p.grad.tolist() for p in net.parameters()]


def test_readme_code_does_what_it_says(pool, tmp_path, triton_kernels):
    file = tmp_path / "code.py"  # which Triton reads
    file.write_text("\n\n".join(re.findall(r"```python\n(.*?)```", PAGES["docs/adding.md"], re.DOTALL)))
    added = runpy.run_path(file)
    eager = added["eager"]
    for p, m in ((1, 1), (3, 5), (4, 8)):
        check(lower(eager(p, m, 1)))
    assert theory.clock.simulate(eager(4, 8, 1)).peak == [7, 5, 3, 1]
    no_worse_than_pytorch(added["relu2"], [lambda x: F.relu(x).square()], [random(1000)])
    for grads in pool(2).run(sign_gradients, file):
        assert grads == [[[1, -1, 0]] * 2, [1, 1]]  # of the third input, one vote for and one against, however loud
