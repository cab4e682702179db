"""The README and docs/: links and figures are there, and commands run."""

import inspect
import json
import os
import pathlib
import re
import runpy
import shlex
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bench
import collectives as dist
import lessons.demos
import safe.flags
import theory.clock
import train
from further.lists import check, lower
from parallel import make_mesh, Parallel, Pipeline
from tests.kernels import no_worse_than_pytorch, random
from tests.pool import HERE, in_new_process, parametrize
from tests.runs import command, output_of, printed_by, ran, slow


TOP = pathlib.Path(HERE)
PAGES = {str(page.relative_to(TOP)): page.read_text() for page in sorted([TOP / "README.md", *TOP.glob("docs/*.md")])}
PLAIN = re.search(r"(?m)^plain\(\) { n=\$1; shift; (.*); }$", PAGES["README.md"])[1]


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


def names_tests(word):
    return [name for name in vars(sys.modules["test_all"]) if name.startswith("test_") and word in name]


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
        def parse_args(self, *words):
            super().parse_args(*words)
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


def test_what_stands_around_lecture_8_s_code_runs_it(tmp_path):
    """The page's code before and after strategies that call what the lecture's call. All ranks end with one model."""
    size = 3
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


FIGURES = """  # flags of a command of questions.md | what it prints | what the page says
    --cp 4                            | isend 36 calls 18.0 MiB            | the ring 36 isends of 18.0 MiB
    --cp 4 --cp-kind ulysses          | all_to_all_single 16 calls 6.0 MiB | Ulysses 16 all-to-alls of 6.0 MiB
    --dp 4 --zero 1 --micro-batches 4 | reduce_scatter_tensor 6 calls 2.4 MiB | ZeRO-1 sends 2.4 + 2.4 MiB
    --dp 4 --zero 3 --micro-batches 4 | reduce_scatter_tensor 24 calls 9.6 MiB | 19.3 + 9.6 MiB
    --tp 4 --sp                       | activations 23.9 MiB               | 30.7 MiB | 23.9 MiB | 18.1 MiB"""


@parametrize("row", FIGURES.splitlines()[1:])
def test_a_page_has_the_figures_that_its_command_prints(row):
    """Those of data depend on Python's version. These do not."""
    flags, printed, said = map(str.strip, row.split("|", 2))
    page = re.sub(r"\s+", " ", PAGES["docs/questions.md"])
    assert f"python train.py {flags} --steps 1 --sample 0" in page and said in page
    assert printed in command(sys.executable, "train.py", *flags.split(), *"--steps 1 --sample 0".split())


def cells_run():
    """[(what a code cell of the notebook prints, what stands there)], run in its folder."""
    os.chdir(os.path.join(HERE, "docs"))
    cells, names = json.loads(pathlib.Path("four_ranks.ipynb").read_text())["cells"], {}
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    return [(printed_by(exec, "".join(cell["source"]), names), [out.get("text") for out in cell["outputs"]])
            for cell in cells]


def test_the_debugger_stops_where_a_list_s_action_begins():
    [line] = re.findall(r"b parallel:(\d+)", PAGES["docs/reading.md"])
    assert int(line) == inspect.getsourcelines(Pipeline.do)[1] + 1


def test_the_notebook_runs_and_prints_what_stands_in_it():
    cells = in_new_process(cells_run)
    assert len(cells) == 3 and all(said == "".join(sum(filter(None, stands), [])) for said, stands in cells), cells


def losses_of(program, tmp_path, words, ranks):
    said = ran([*words], ranks, tmp_path / "log", program=str(program))
    return [float(loss) for loss in re.findall(r"loss (\S+)", said)]


def test_models_of_somebody_s_own_learn_the_same_in_each_layout(tmp_path):
    """The page's programs: ZeRO-3 on two ranks; then four processes for the first 40 steps, three for the rest."""
    first, second = re.findall(r"(?s)```python\n(.*?)```", PAGES["docs/own-model.md"])
    for name, text in ("1", first), ("40", second.replace("range(first, 60)", "range(first, 40)")), ("60", second):
        (tmp_path / f"{name}.py").write_text(text)
    one, two = (losses_of(tmp_path / "1.py", tmp_path, [], n) for n in (1, 2))
    assert len(one) == 3 and two == pytest.approx(one, abs=1e-3)
    many = str(tmp_path / "many")
    one, four, three = (losses_of(tmp_path / f"{steps}.py", tmp_path, words, n) for steps, words, n in (
        (60, [many + "-1", "1"], 1), (40, [many, "2"], 4), (60, [many, "1"], 3)))
    assert len(three) == 1 and four + three == pytest.approx(one, abs=0.002)


def signs(file):
    """The gradients that SignSGD's units leave, of a layer whose third input has an opposite sign on the other rank."""
    sgd = partial(runpy.run_path(file)["SignSGD"], lr=0.1)
    plain = type("Plain", (Pipeline,), {})  # which fast/ does not replace
    net = Parallel([nn.Linear(3, 2).double()], lambda y, _: y.sum(), make_mesh("cpu", dp=dist.get_world_size()),
                   optimizer=sgd, dtype=torch.float64, units=sgd.func.make_units, pipeline=plain)
    x = torch.tensor([[1.0, -1.0, 1.0 if dist.get_rank() else -5.0]], dtype=torch.float64)
    net.forward_backward([x], [x])
    return [p.grad.tolist() for p in net.params]


def test_readme_code_does_what_it_says(pool, tmp_path, triton_kernels):
    file = tmp_path / "code.py"  # which Triton reads
    file.write_text("\n\n".join(re.findall(r"```python\n(.*?)```", PAGES["docs/adding.md"], re.DOTALL)))
    added = runpy.run_path(file)
    check(lower(added["eager"](4, 8, 1)))
    assert theory.clock.simulate(added["eager"](4, 8, 1)).peak == [7, 5, 3, 1]
    no_worse_than_pytorch(added["relu2"], [lambda x: F.relu(x).square()], [random(1000)])
    for grads in pool(2).run(signs, file):
        assert grads == [[[1, -1, 0]] * 2, [1, 1]]  # of the third input, one vote for and one against, however loud
