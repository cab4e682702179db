"""train.py: losses, traces, profiles, data, bad input."""

import contextlib
import functools
import itertools
import json
import os
import re
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import model
import parallel
import theory.speed
import train
from fast.graphs import received_late
from tests.pool import close, parametrize, table
from tests.refusals import heed, refusal_of_layout
from tests.runs import log_of, parse, printed_by, run_training, trained
from further.lists import lower
from further.schedules import zb_v, zero_bubble_h1
from safe.data import load_data
from safe.flags import BadInput, check_layout, model_config, Settings
from safe.huggingface import load, save
from theory.clock import draw, simulate


@pytest.fixture(scope="session")
def plain_log(text):
    """What the test below must find, by a plain loop: (loss, gradient norm, learning rate) of each step, (step,
    validation loss), and the weights at the end."""
    s, parts = Settings(steps=10, lr=0.02, warmup_steps=3), train.split(np.fromfile(text, np.uint8))
    steps, losses = [], []
    net = model.GPT(model.GPTConfig(256, 16, 1, 2, 16)).double()
    opt = torch.optim.AdamW(
        [{"params": [p for p in net.parameters() if (p.dim() > 1) == matrix], "weight_decay": 0.1 * matrix}
         for matrix in (1, 0)], betas=(0.9, 0.95))

    def loss_of(part, step):
        x, y = train.batch(part, 0, step, 8, 16, slice(None))
        return F.cross_entropy(net(x).flatten(0, 1), y.flatten())

    for step in range(10):
        opt.zero_grad()
        loss, rate = loss_of(parts[0], step), train.learning_rate(s, step)
        loss.backward()
        steps.append((loss.item(), nn.utils.clip_grad_norm_(net.parameters(), 0.5).item(), rate))
        for group in opt.param_groups:
            group["lr"] = rate
        opt.step()
        if step in (4, 9):
            losses.append((step + 1, sum(loss_of(parts[1], i).item() / 8 for i in range(8))))
    assert steps[-1][0] < steps[0][0] - 0.5 and max(norm for _, norm, _ in steps) > 0.5
    return steps, losses, list(net.parameters())


# Processes, flags; walls.py has others.
LAYOUTS = """
    1  --dp 1
    2  --tp 2 --comm ring
    4  --dp 2 --tp 2 --zero 3 --comm torch
    4  --dp 2 --pp 2 --zero 1 --schedule zb-h1
    3  --pp 3"""


@parametrize("size, layout", table(LAYOUTS))
def test_every_layout_logs_the_same_losses(trained, plain_log, tmp_path, size, layout):
    """10 steps in float64 with micro-batches, evaluation, sample and saved model; AdamW, clipping and schedule as users
    get them."""
    steps, losses, weights = plain_log
    trained(size, "--dtype fp64 --steps 10 --micro-batches 2 --eval-every 5 --sample 5 --lr 0.02 --clip 0.5 "
                  f"--warmup-steps 3 --out OUT {layout}")
    assert log_of(tmp_path, "step") == [*range(1, 11)] and close(log_of(tmp_path, "loss", "grad_norm", "lr"), steps)
    assert close(log_of(tmp_path, "step", "val_loss"), losses)
    sent = log_of(tmp_path, "comm_bytes")
    assert len(sent) == 10 and all(sent) == (size > 1 and "torch" not in layout)  # PyTorch's own is not counted
    assert len(log_of(tmp_path, "predicted_bytes", "measured_bytes")) == 1
    assert log_of(tmp_path, "after_step", "unit") == [(0, "byte")]
    saved = load(tmp_path / "step-00000010").parameters()
    assert all(close(p.detach(), q.detach(), 1e-6) for p, q in zip(saved, weights, strict=True))


def test_lists_of_a_file_log_the_losses_of_1f1b(trained, tmp_path):
    """Backwards in halves, two stages a rank, in a V; the run names the file."""
    (tmp_path / "mine.txt").write_text(draw(simulate(zb_v(2, 4))))
    for out, flags in ("there", ""), ("here", "--schedule OUT/mine.txt"):
        trained(2, f"--pp 2 --micro-batches 4 --n-layer 2 --dtype fp64 --steps 2 --out OUT/{out} {flags}")
    there, here = (log_of(tmp_path / out, "step", "loss", "grad_norm") for out in ("there", "here"))
    assert len(here) == 2 and close(here, there) and "mine.txt" in (tmp_path / "here" / "index.html").read_text()


def events_of(path):
    """A trace's events with a duration, in the order in which they began."""
    return sorted((e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"), key=lambda e: e["ts"])


@parametrize("layout,collective", [
    ("--dp 2 --zero 3 --ep 2 --experts 4", "all_to_all_single"),
    ("--pp 2 --schedule zb-h1", "all_reduce"), ("--tp 2 --comm torch", "all_reduce")])
def test_trace_and_profile_hold_every_rank_s_actions(pool, trained, tmp_path, layout, collective):
    """In their order, the profile also collectives; with the losses of a run without. GPUs receive late."""
    def run(out, more=""):
        # With --cuda-graphs a graph is seen as its launch alone.
        trained(2, f"{layout} {more} --steps 4 --micro-batches 4 --dtype fp64 --cuda-graphs off --out OUT/{out}")
        return log_of(tmp_path / out, "step", "loss", "grad_norm")

    profile, pipeline = tmp_path / "profile", "--pp" in layout
    assert run("seen", "--profile OUT/profile") == run("unseen")
    traced = events_of(profile / "trace.json")
    assert all(e["dur"] >= 0 for e in traced)
    schedule, p, shared = (zero_bubble_h1, 2, {}) if pipeline else (parallel.one_f_one_b, 1, {2: [0]})  # a tied head
    runs = [range(0, 2), range(2, 3)] if pipeline else [range(3)]
    lists = [parallel.with_weights(parallel.into_pieces(actions, runs), 3 * ("--zero" in layout), (0,), shared)
             for actions in schedule(p, 4)]
    received = received_late if pool(2).device_type == "cuda" else lambda actions, where: actions
    for rank, actions in enumerate(lower(lists) * (2 // p)):
        actions = received(actions, parallel.ranks_of_stages(lists))
        names = [e["name"] for e in events_of(profile / f"rank-{rank}.json") if e.get("cat") == "user_annotation"]
        assert [name for name in names if " stage " in name] == [f"{action} stage {action.stage}" for action in actions]
        assert any(re.match(rf"{collective} [\d,]+ bytes$", name) for name in names)
        assert [e["name"] for e in traced if e["tid"] == rank] == [
            f"{a.kind} stage {a.stage} micro-batch {a.micro_batch}" for a in actions]
    span = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in traced}
    # Waiting for the stage before is no part of a span: 1 ms for clocks of two GPUs.
    middle = 1  # rank 1's first piece
    for (kind, first, second), i in itertools.product((("F", middle - 1, middle), ("I", middle, middle - 1)),
                                                      range(4 * pipeline)):
        there, here = (span[f"{kind} stage {stage} micro-batch {i}"] for stage in (first, second))
        assert here[0] > there[1] - 1e3


def test_init_from_starts_where_the_folder_ends(trained, tmp_path):
    """A rate of 0 leaves the weights as they are."""
    save(model.GPT(model.GPTConfig(256, 16, 1, 2, 16), seed=7), tmp_path / "hf")
    trained(2, "--init-from OUT/hf --steps 1 --tp 2 --lr 0 --min-lr 0 --out OUT/out")
    before, after = (load(tmp_path / folder).parameters() for folder in ("hf", "out/step-00000001"))
    assert all(p.equal(q) for p, q in zip(before, after, strict=True))


def test_batches_depend_on_seed_step_and_sample_alone():
    tokens = np.arange(1000, dtype=np.uint16)

    def rows(seed, step, samples=slice(None)):
        return train.batch(tokens, seed, step, 8, 16, samples)

    x, y = rows(1, 2)
    assert x[3:5].equal(rows(1, 2, slice(3, 5))[0]) and x[:, 1:].equal(y[:, :-1]) and (y - x == 1).all()
    assert not x.equal(rows(1, 3)[0]) and not x.equal(rows(2, 2)[0])


def test_learning_rate_schedule():
    s = Settings(steps=100, warmup_steps=10, lr=1.0, min_lr=0.1)
    rates = [train.learning_rate(s, step) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and rates[99] == 0.1
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


PEAKS = """
    NVIDIA H200              989
    NVIDIA A100-SXM4-80GB    312
    NVIDIA L40S              362
    NVIDIA L4                121
    NVIDIA GeForce RTX 4090  165
    NVIDIA L40               unknown
    NVIDIA H20               unknown
    AMD Instinct MI300X      unknown"""


def test_mfu_is_of_known_gpus_alone(monkeypatch):
    for name, tflops in table(PEAKS):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert theory.speed.peak_flops(torch.device("cuda")) == (None if tflops == "unknown" else 1e12 * tflops), name
    assert theory.speed.peak_flops(torch.device("cpu")) is None


def training_at_a_known_peak(flags):
    with patch.object(theory.speed, "peak_flops", lambda device: 1e12):
        return printed_by(run_training, flags)


@parametrize("tokens", [64, 65])
def test_train_says_when_mfu_counts_half_of_attention(trained, tmp_path, tokens):
    printed, = trained(1, f"--steps 2 --seq-len {tokens} --out OUT", training_at_a_known_peak)
    config = model.GPTConfig(256, tokens, 1, 2, 16)
    assert "  MFU " in printed and ("MFU counts half" in printed) == (tokens > 64)
    logged = log_of(tmp_path, "mfu", "tokens_per_s")
    assert logged and all(close(mfu, speed * theory.speed.counted_flops(config) / 1e12) for mfu, speed in logged)


@parametrize("flag, path, rest", [
    ("out", "run", b""), ("resume", "run", b""), ("resume", "run/step-00000001", b""), ("out", "", b"\n{}"),
    ("out", ".", b"\n{}"), ("out", "..", b"\n{}")])
def test_folders_of_text(tmp_path, flag, path, rest):
    """What a run writes beside its data is not its data. Folders behind links are, each once; hidden ones are not.
    UTF-8's mark is no text."""
    folder = tmp_path / "folder"
    os.makedirs(folder / "run")
    for name, data in ("b.txt", b"second"), ("c.png", b"\0\1\2"), ("run/log.jsonl", b"{}"):
        (folder / name).write_bytes(data)
    (folder / "a.md").write_text("first", "utf-8-sig")
    for name, data in ("folder/.git/x", b"hidden"), ("linked/deep/z", b"linked"), ("linked/x", b"wide"), (
            "linked/y", b"far\xff"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    for name, target in ("d", "linked"), ("e", "linked"), ("f", "folder"), ("linked/up", "."), ("g", "nowhere"):
        (folder / name if len(name) == 1 else tmp_path / name).symlink_to(tmp_path / target)
    left_out = []
    a, b, _ = load_data(Settings(data=str(folder), **{flag: path and str(folder / path)}), train.Bytes(), left_out)
    linked = b"\nlinked\nwide\nfar\xff"
    assert bytes(a) + bytes(b) == b"first\nsecond" + linked + rest and sorted(left_out) == ["c.png", "g"]


def test_restarts_on_several_nodes_need_a_new_store(monkeypatch):
    s = parse(["--device", "cpu"])
    for store, restarts, fine in ("True", "3", False), ("False", "3", True), ("True", "0", True):
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", store)
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        with contextlib.nullcontext() if fine else pytest.raises(BadInput, match="set TORCH_DISABLE_SHARE_RDZV_TCP_S"):
            assert check_layout(s, model_config(s)[0], 16, 8) == 16


# GPUs | processes started, 1 before it starts itself again | of them on this node | flags | device and graphs, or what
# the refusal says
CARDS = """
    0 | 1 | 1 | | cpu off
    1 | 1 | 1 | | cuda on
    0 | 1 | 1 | --tp 2 | cpu off
    0 | 2 | 2 | --tp 2 | cpu off
    1 | 1 | 1 | --tp 2 | cpu off
    1 | 2 | 2 | --tp 2 | cpu off
    2 | 1 | 1 | --tp 2 | cuda on
    2 | 2 | 2 | --tp 2 | cuda on
    4 | 2 | 2 | --tp 2 | cuda on
    4 | 1 | 1 | --tp 2 --dp 4 | cpu off
    4 | 8 | 8 | --tp 2 --dp 4 | cpu off
    8 | 1 | 1 | --tp 2 --dp 4 | cuda on
    8 | 8 | 8 | --tp 2 --dp 4 | cuda on
    8 | 1 | 1 | --tp 2 --dp 4 --device cpu | cpu off
    8 | 16 | 2 | --tp 2 | cuda on
    8 | 16 | 2 | --tp 4 | --tp 4 would reach over the edge of a node with 2 processes.*give --tp 2
    8 | 4 | 4 | --dp 3 --tp 2 | needs 6 processes, 4 were started: give --dp 2
    2 | 1 | 1 | --tp 2 --dp 2 --device cuda | 4 processes on this machine need as many GPUs and it has 2: give --device
    2 | 8 | 4 | --tp 2 --dp 4 | --device auto: 4 processes on this node need as many GPUs and it has 2: give
    8 | 8 | 8 | --dp 8 --zero 1 --schedule gpipe | cuda on
    8 | 8 | 8 | --dp 8 --zero 2 --schedule gpipe | cuda on
    8 | 8 | 8 | --dp 8 --zero 2 --schedule 1f1b | cuda on
    8 | 8 | 8 | --dp 8 --zero 3 --schedule 1f1b | cuda on
    8 | 8 | 8 | --pp 2 --dp 4 --zero 0 --schedule 1f1b | cuda on
    8 | 8 | 8 | --pp 2 --dp 4 --zero 1 --schedule gpipe | cuda on
    8 | 8 | 8 | --pp 2 --dp 4 --zero 2 --schedule 1f1b | cuda on
    8 | 8 | 8 | --pp 2 --dp 4 --zero 3 --schedule 1f1b | cuda on
    8 | 8 | 8 | --dp 8 --ep 2 --experts 4 | cuda off
    8 | 8 | 8 | --dp 8 --ep 2 --experts 4 --cuda-graphs on | only with --dtype bf16 and --ep 1"""


@parametrize("row", CARDS.strip().splitlines())
def test_layout_takes_what_gpus_there_are(monkeypatch, row):
    """--device auto takes CUDA where each process on this machine gets a GPU of its own; --device cuda means it. On a
    node that has too few, auto refuses: another node might choose otherwise."""
    gpus, world, here, flags, want = row.split("|")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: int(gpus) > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(gpus))
    if "--" in want:
        refusal = functools.partial(refusal_of_layout, world=int(world), here=int(here))
        assert re.search(want.strip(), refusal(flags.split()))
        return heed(refusal, flags.split(), refusal(flags.split()))
    s = parse(flags.split())
    assert check_layout(s, model_config(s)[0], int(world), int(here)) == s.dp * s.tp * s.pp
    assert f"{s.device} {s.cuda_graphs}" == want.strip()
