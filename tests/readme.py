"""The README and docs/ name what is there, and their commands run."""

import dataclasses
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
from parallel import make_mesh, Parallel, Reference
from tests.kernels import no_worse_than_pytorch, random
from tests.layouts import small_gpt, tokens_of
from tests.pool import HERE, in_new_process, parametrize
from tests.runs import TRAIN, command, output_of, printed_by, ran, slow
from tests.walls import SOURCES


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


@parametrize("page", sorted(PAGES.keys() - {"docs/bugs.md", "docs/tried.md"}))
def test_names_and_flags_of_a_page_are_there(page):
    flags = {safe.flags.dashed(field.name) for field in dataclasses.fields(safe.flags.Settings)}
    flags |= {name for _, name, _ in bench.FLAGS}
    words = {*re.findall(r"\w+", "".join(SOURCES.values()))}
    for token in inline_code(PAGES[page]):
        if re.fullmatch(r"[\w/]+\.py", token):
            assert token in SOURCES, token
        elif re.fullmatch(r"(?![A-Z_]+$)[A-Za-z_][\w.]*", token):  # not the environment's
            assert token.split(".")[-1] in words or names_tests(token), token
        elif token.startswith("--"):
            assert {*re.findall(r"--[a-z][a-z-]*", token)} <= flags, token


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


def test_plain_s_commands_of_the_readme_run(text, tmp_path):
    """As typed, but with a tiny model: with the same batch, losses are the same."""
    losses = []
    for program, words, processes in map(program_of, commands(PAGES["README.md"])):
        if "--plain" in words:
            said = ran([*words, *TRAIN, "--data", text, "--steps", "2"], processes, tmp_path / "log")
            losses.append(re.findall(r"loss (\S+)", said))
    assert len(losses) > 1 and losses == [losses[0]] * len(losses) and len(losses[0]) == 2


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


def cells_run():
    """[(what a code cell of the notebook prints, what stands there)], run in its folder."""
    os.chdir(os.path.join(HERE, "docs"))
    cells, names = json.loads(pathlib.Path("four_ranks.ipynb").read_text())["cells"], {}
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    return [(printed_by(exec, "".join(cell["source"]), names), [out.get("text") for out in cell["outputs"]])
            for cell in cells]


def test_the_notebook_runs_and_prints_what_stands_in_it():
    cells = in_new_process(cells_run)
    assert len(cells) == 3 and all(said == "".join(sum(filter(None, stands), [])) for said, stands in cells), cells


def test_a_model_of_somebody_s_own_goes_on_with_other_processes(tmp_path):
    """The page's second program: four processes train the first 40 steps, three the rest, with one process's losses."""
    program = re.findall(r"(?s)```python\n(.*?)```", PAGES["docs/own-model.md"])[1]
    losses = []
    for name, steps, size, columns in ("one", 60, 1, 1), ("many", 40, 4, 2), ("many", 60, 3, 1):
        file = tmp_path / f"{steps}.py"
        file.write_text(program.replace("range(first, 60)", f"range(first, {steps})"))
        said = ran([str(tmp_path / name), str(columns)], size, tmp_path / "log", program=str(file))
        losses.append([float(loss) for loss in re.findall(r"step \d+/60 .*loss (\S+)", said)])
    one, first, rest = losses
    assert len(rest) == 1 and first + rest == pytest.approx(one, abs=0.002)


def test_a_network_of_somebody_s_own_learns_the_same_on_two_ranks(tmp_path):
    """The page's CNN, under ZeRO-3."""
    program = tmp_path / "cnn.py"
    program.write_text(re.findall(r"(?s)```python\n(.*?)```", PAGES["docs/own-model.md"])[0])
    one, two = (re.findall(r"loss (\S+)", ran([], n, tmp_path / "log", program=str(program))) for n in (1, 2))
    assert len(one) == 3 and [float(loss) for loss in two] == pytest.approx([float(loss) for loss in one], abs=1e-3)


def sign_gradients(file):
    """SignSGD's of a linear layer; and it trains a GPT."""
    net = nn.Linear(3, 2).double()
    with torch.no_grad():
        [p.fill_(0.5) for p in net.parameters()]
    sgd = partial(runpy.run_path(file)["SignSGD"], lr=0.1)
    n = dist.get_world_size()
    gpt = small_gpt(optimizer=sgd, edition=Reference, dp=n)
    gpt.forward_backward(*([t.to(gpt.device)] for t in tokens_of(0)))
    assert all(p.grad.abs().eq(1).logical_or(p.grad == 0).all() for p in gpt.params)
    ours = Parallel([net], lambda y, _: y.sum(), make_mesh("cpu", dp=n), optimizer=sgd, dtype=torch.float64,
                    units=sgd.func.make_units)
    x = torch.tensor([[1.0, -1.0, 1.0 if dist.get_rank() else -5.0]], dtype=torch.float64)
    ours.forward_backward([x], [x])
    return [p.grad.tolist() for p in ours.params]


def test_readme_code_does_what_it_says(pool, tmp_path, triton_kernels):
    file = tmp_path / "code.py"  # which Triton reads
    file.write_text("\n\n".join(re.findall(r"```python\n(.*?)```", PAGES["docs/adding.md"], re.DOTALL)))
    added = runpy.run_path(file)
    check(lower(added["eager"](4, 8, 1)))
    assert theory.clock.simulate(added["eager"](4, 8, 1)).peak == [7, 5, 3, 1]
    no_worse_than_pytorch(added["relu2"], [lambda x: F.relu(x).square()], [random(1000)])
    for grads in pool(2).run(sign_gradients, file):
        assert grads == [[[1, -1, 0]] * 2, [1, 1]]  # of the third input, one vote for and one against, however loud
