"""A run's daily life: what befell others' programs."""

import ctypes
import errno
import functools
import importlib
import io
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import types
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed.run

import collectives as dist
import safe.data
import safe.launch
from further.bpe import FILES
from further.refusals import how_ranks_differ
from further.resume import open_checkpoint
from safe.data import load_data, open_vocabulary
from safe.files import tell
from safe.flags import Settings
from safe.page import sign_of_life
from train import Trainer
from safe.watch import Watch
from tests.launching import CLONE_NEWNET
from tests.pool import HERE, in_new_process, on_linux, parametrize
from tests.runs import ran, Ranks, run_training, start, TRAIN, trained
from tests.text import BY_HAND, write_vocabulary


# ------------------------------------------------------------------------------------------------------ how a run ends

def test_no_thread_outlives_a_run_and_none_holds_its_groups(monkeypatch):
    """A thread that is left would free what has a C++ destructor while Python exits, which aborts."""
    before = threading.active_count()  # of this process, which has run other tests
    with safe.launch.second_interrupt_quits("hint"):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    monkeypatch.setenv("RANK", "0"), monkeypatch.setenv("MASTER_ADDR", ""), monkeypatch.setenv("MASTER_PORT", "")
    watch = Watch(60)
    watch.start()
    watch.stop()
    assert not watch.thread.is_alive()


def aborts_at_its_end():
    """One of the ranks that torchrun starts first has saved all, and aborts."""
    def destroy():
        real()
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(0.3)
            os._exit(134)

    real, dist.destroy_process_group = dist.destroy_process_group, destroy


@on_linux
def test_a_run_that_has_ended_and_is_started_again_ends_well(text, tmp_path):
    words = ("--nproc_per_node 2 --max-restarts 1 --local-addr 127.0.0.1 --rdzv_backend c10d "
             "--rdzv_endpoint 127.0.0.1:0 "
             f"--start-method fork --run-path {HERE}/train.py --data {text} --steps 2 --out {tmp_path}").split()
    said = ran([*words, *TRAIN], 1, tmp_path / "log", program=torch.distributed.run.__file__, launcher="fork",
               before=aborts_at_its_end)
    assert "all 2 are done" in said


def waits_as_process_1():
    """The exit code of the first process of a container, which gets a Ctrl-C."""
    if ctypes.CDLL(None).unshare(0x20000000):  # CLONE_NEWPID
        return None
    heard, tell = os.pipe()
    if not (pid := os.fork()):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
        safe.launch.settled_rendezvous("cpu", 1)
        os.write(tell, b".")
        time.sleep(2)
        os._exit(0)
    os.read(heard, 1)
    os.kill(pid, signal.SIGINT)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@on_linux
def test_ctrl_c_ends_a_container():
    code = in_new_process(waits_as_process_1)
    if code is None:
        pytest.skip("this user may not make such a process")
    assert code


def started_by_a_thread():
    codes = []

    def start():
        if not (pid := os.fork()):
            os.environ["RANK"] = "0"
            safe.launch.end_with_launcher()
            time.sleep(0.5)
            os._exit(0)
        codes.append(pid)
        time.sleep(0.2)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    return os.waitstatus_to_exitcode(os.waitpid(codes[0], 0)[1])


@on_linux
def test_a_rank_outlives_the_thread_that_has_started_it():
    assert in_new_process(started_by_a_thread) == 0


# -------------------------------------------------------------------------------------------------- where a run starts

def removed_folder():
    os.chdir(folder := tempfile.mkdtemp())
    os.rmdir(folder)


def full_stdout():
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def few_files(most):
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


NOT_ALLOWED = 77


def no_names():
    """Where "localhost" has no address."""
    hidden = " && ".join(f"mount --bind /dev/null /etc/{name}" for name in ("hosts", "resolv.conf"))
    apart = ctypes.CDLL(None).unshare(0x20000 | CLONE_NEWNET) == 0  # CLONE_NEWNS
    if not apart or subprocess.call(f"ip link set lo up && mount --make-rprivate / && {hidden}", shell=True):
        os._exit(NOT_ALLOWED)


def no_semaphores():
    def none(*_):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    import multiprocessing.synchronize
    multiprocessing.synchronize._multiprocessing = types.SimpleNamespace(SemLock=none)


def no_folder_for_temporary_files():
    tempfile.tempdir = None
    tempfile._candidate_tempdir_list = lambda: ["/no/such"]


PLACES = [
    (removed_folder, ""), (removed_folder, "--dp 2"), (full_stdout, ""), (full_stdout, "--dp 2"),
    (functools.partial(few_files, 128), "--dp 2 --tp 2"),
    (functools.partial(few_files, 64), "--dp 4"),
    (no_names, "--dp 2"),
    (no_semaphores, "--dp 2"),
    (no_folder_for_temporary_files, "--dp 2")]


@on_linux
@parametrize("before, flags", PLACES)
def test_a_run_trains_or_says_in_a_line_what_it_lacks(text, tmp_path, before, flags):
    words = [*TRAIN, "--data", text, "--steps", "2", "--out", str(tmp_path / "run"), *flags.split()]
    run = Ranks(words, 1, tmp_path / "log", before=before, launcher="fork")
    code, = run.end(8 if before == no_names else 200)
    if code == NOT_ALLOWED:
        pytest.skip("this user may not make such a place")
    assert code in (0, 2) and "Traceback" not in run.printed()
    assert open_checkpoint(tmp_path / "run/step-00000002", True) if code == 0 else run.printed().count("\n") == 1


@parametrize("program", ["gpt.py", "project/train.py"])
def test_a_script_behind_a_link_finds_its_other_files(text, tmp_path, program):
    (tmp_path / "gpt.py").symlink_to(f"{HERE}/train.py")
    (tmp_path / "project").symlink_to(HERE)
    folder = str((tmp_path / program).parent)
    said = ran([*TRAIN, "--data", text, "--steps", "1"], 1, tmp_path / "log", program=str(tmp_path / program),
               folder=folder)
    assert "reference + safe" in said


def no_docstrings():
    def compiled(loader, name):
        if "/project/" not in loader.path:
            return real(loader, name)
        return compile(loader.get_data(loader.path), loader.path, "exec", dont_inherit=True, optimize=2)

    kind = importlib.machinery.SourceFileLoader
    real, kind.get_code = kind.get_code, compiled


@parametrize("program, word", [("lessons", "puzzles"), ("lessons", "sizes"), ("bench.py", "--help"),
                               ("train.py", "--help")])
def test_programs_run_without_docstrings(tmp_path, program, word):
    (tmp_path / "project").symlink_to(HERE)  # from there all files are compiled anew
    ran([word], 1, tmp_path / "log", program=program, folder=str(tmp_path / "project"), before=no_docstrings)


# -------------------------------------------------------------------------------------------------- ranks must agree

@parametrize("plain", ["", "--plain"])
@parametrize("flags, name", [
    ("--lr 0.5", "--lr is 0.5 on rank 1 and 0.002 on the others"), ("--data OTHER", "the training data is "),
    ("--eval-every 1", "--eval-every is 1 on rank 1 and 0 on the others"),
    ("--tp 2 --dp 1", "--dp is 1 on rank 1 and 2 on the others; --tp is 2 on rank 1 and 1 on the others")])
def test_a_rank_that_was_told_other_things_is_named(start, text, tmp_path, plain, flags, name):
    """The other text has the same length, and differs in its middle."""
    raw = pathlib.Path(text).read_bytes()
    (tmp_path / "other").write_bytes(raw[:9000] + bytes([raw[9000] ^ 1]) + raw[9001:])
    other = flags.replace("OTHER", str(tmp_path / "other"))
    said = start(f"--steps 3 --dp 2 {plain}", 2, others={1: other}).said([2, 2])
    assert said.startswith(f"train.py: {name}") and said.count("\n") == 1 and "on rank 1 and" in said


def test_who_differs_is_whom_most_do_not_agree_with():
    a, b = {"--lr": 1, "--seed": 0}, {"--lr": 2, "--seed": 0}
    assert how_ranks_differ([a, a, a]) == ""
    assert how_ranks_differ([b, a, a, b, a]).startswith("--lr is 2 on ranks 0, 3 and 1 on the others: start")


# ------------------------------------------------------------------------------------------- what lies beside weights

BESIDE = {"empty.txt": b"", "tokenizer_notes.txt": b"", "odd.txt": b"odd", "\udcff.txt": b"no UTF-8",
          "n" * 255: b"a long name"}


def test_a_name_that_the_terminal_cannot_write_is_printed_all_the_same():
    for encoding, name, printed in ("utf-8", "\udcff.txt", rb"\udcff.txt"), ("ascii", "naïve.txt", rb"na\xefve.txt"):
        out = io.TextIOWrapper(io.BytesIO(), encoding)
        tell(f"export   {name}", out)
        assert out.buffer.getvalue() == b"export   " + printed + b"\n"


@on_linux
def test_no_file_beside_the_weights_harms_a_checkpoint(trained, tmp_path):
    """Nor in --tokenizer's folder. One that cannot be read (here a process's memory) stays behind."""
    trained(1, "--steps 1 --out OUT/old")
    weights = tmp_path / "old/step-00000001"
    for folder in weights, write_vocabulary(tmp_path / "words", BY_HAND):
        for name, data in BESIDE.items():
            (folder / name).write_bytes(data)
        (folder / "token_unreadable").symlink_to("/proc/self/mem")
        (folder / "unreadable").symlink_to("/proc/self/mem")
        (folder / "token_linked.txt").symlink_to(folder / "odd.txt")
        (folder / "nowhere").symlink_to("nothing")
    trained(1, "--steps 1 --init-from OUT/old/step-00000001 --out OUT/run")
    trained(1, "--steps 1 --tokenizer OUT/words --out OUT/with-words")
    for run, names in ("run", {*BESIDE, "token_linked.txt"}), ("with-words", {"tokenizer_notes.txt", *FILES,
                                                                             "token_linked.txt"}):
        files = {*open_checkpoint(tmp_path / run / "step-00000001", True).manifest["files"]}
        assert files == names - {"n" * 255} | {"config.json", "model.safetensors", "optimizer.safetensors"}


def test_a_run_in_its_weights_folder_takes_no_file_of_its_own_along(trained, tmp_path):
    trained(1, "--steps 1 --out OUT/old")
    shutil.copytree(tmp_path / "old/step-00000001", weights := tmp_path / "w", ignore=lambda *_: ["manifest.json"])
    (weights / "notes.txt").write_text("mine")
    for _ in range(2):  # then from a folder with its log and its page
        trained(1, "--steps 1 --init-from OUT/w --out OUT/w")
        files = {*open_checkpoint(weights / "step-00000001", True).manifest["files"]}
        assert files == {"config.json", "model.safetensors", "optimizer.safetensors", "notes.txt"}
        shutil.rmtree(weights / "step-00000001")


# ------------------------------------------------------------------------------------------------------- what is saved

def busy(flags):
    with patch("shutil.rmtree", side_effect=OSError(errno.EBUSY, "Device or resource busy")):
        return run_training(flags)


def test_an_old_checkpoint_that_is_busy_costs_nothing(trained, tmp_path):
    assert trained(1, "--steps 4 --save-every 1 --keep 1 --out OUT", busy) == [True]


def test_a_llama_s_checkpoint_names_the_kind_of_its_tokenizer(trained, tmp_path):
    write_vocabulary(tmp_path / "words", BY_HAND)
    trained(1, "--arch llama --tokenizer OUT/words --steps 1 --out OUT")
    config = tmp_path / "step-00000001/tokenizer_config.json"
    assert config.exists() and "tokenizer_class" in json.loads(config.read_text())


def test_a_page_is_alive_whatever_the_reader_s_clock_says():
    if not (node := shutil.which("node")):
        pytest.skip("needs node")
    script = re.search("<script>(.*?)</script>", sign_of_life(1.0), re.S)[1]
    kept = "getItem: key => null, setItem() {}"
    page = (f"const now = Date.now; Date.now = () => now() + 3e5; const document = {{}}, sign = {{textContent: ''}}, "
            f"localStorage = {{{kept}}}, sessionStorage = localStorage; {script}; console.log(sign.textContent)")
    assert "No sign of life" not in subprocess.check_output([node, "-e", page], text=True)


# ------------------------------------------------------------------------------------------------------- text, tokens

def cut_at_step_20(path):
    def step(trainer, number):
        if number == 20:
            os.truncate(path, 0)
        return real(trainer, number)

    real, Trainer.gradients = Trainer.gradients, step


@on_linux
def test_data_that_is_written_over_is_named(start, tmp_path):
    np.arange(60000, dtype=np.uint16).__mod__(250).tofile(path := tmp_path / "tokens.bin")
    run = start(f"--data {path} --steps 60 --vocab-size 256", before=functools.partial(cut_at_step_20, path))
    run.end()
    assert "--data" in run.printed().splitlines()[-1]


@parametrize("left", [0.5, 0])
def test_tokens_that_were_cut_short_are_made_anew(text, tmp_path, left):
    s = Settings(data=text, out=str(tmp_path), tokenizer=str(write_vocabulary(tmp_path / "words", BY_HAND)))
    words = open_vocabulary(s, None)
    want = [len(part) for part in load_data(s, words)[:2]]
    path, = tmp_path.glob("tokens-*.bin")
    os.truncate(path, int(path.stat().st_size * left) // 2 * 2)
    try:
        assert [len(part) for part in load_data(s, words)[:2]] == want
    except (ValueError, OSError) as why:
        assert path.name in str(why)
