"""Which faults of communication do a project's own tests see?

    python -m lessons mutate -- pytest -q tests/             in the project's folder; or python .../lessons/mutate.py
    python -m lessons mutate --sample 40 -- pytest -q test_all.py -k equals

The command, pytest's, runs once; each line of the project that calls a collective of torch.distributed, or of
collectives.py, is noted with the tests that reach it. Then each fault of each line runs in the shortest test that
reaches it, and if that passes in the next one, in all processes:

    skip     nobody calls it                                 alone    each rank has what it would have alone
    times    a sum where a mean is meant                     stale    the result of the call before

What still passes is what these tests cannot see. Exit code 1 if something survives, 2 if the command fails as it is.
"""

import argparse
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

TESTS = 2  # that may see a fault
HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "mutants")
MEANS = {"skip": "nobody calls it", "times": "its result times the ranks", "alone": "each rank's own result",
         "stale": "the result of the call before"}


def ran(command, folder, limit, **settings):
    """(exit code, None if its time was over; what it prints), with these settings of mutants/sitecustomize.py."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])]),
                        "PYTEST_ADDOPTS": f"-p sitecustomize {os.environ.get('PYTEST_ADDOPTS', '')}",
                        "MUTATE_ROOT": os.getcwd(), "MUTATE_FOLDER": folder}
    env |= {f"MUTATE_{name.upper()}": value for name, value in settings.items()}
    with open(os.path.join(folder, "out"), "w+") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            try:  # and the ranks that it has started
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.wait()
        out.seek(0)
        return code, out.read()


def rows(folder, name):
    path = os.path.join(folder, name)
    return [line.split("\t") for line in open(path).read().splitlines()] if os.path.exists(path) else []


def noted(folder):
    """{(line, collective): tests that reach it and pass, the shortest first}."""
    seconds, found = defaultdict(float), defaultdict(set)
    for test, n in rows(folder, "times"):
        seconds[test] += float(n)
    for line, name, test in rows(folder, "lines"):
        if seconds[test] < 1e9:
            found[line, name].add(test)
    return {site: sorted(found[site], key=lambda test: (seconds[test], test)) for site in sorted(found)}


def seen(command, folder, site, fault, tests, limit):
    """How the tests see this fault; "" if they do not, None if none of them gets there."""
    found = None
    for test in tests:
        reached = os.path.join(folder, "reached")
        open(reached, "w").close()
        code, _ = ran(command, folder, limit, target=" ".join(site), fault=fault, test=test)
        if os.path.getsize(reached):
            found = "hangs" if code is None else "fails" if code else found or ""
        if found:
            break
    return found


def mutate(command, sample, limit):
    """Which faults of communication do a project's own tests see?"""
    faults_of = runpy.run_path(os.path.join(HERE, "sitecustomize.py"))["FAULTS"]
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        code, text = ran(command, folder, None)
        if code:
            print(f"{text}\n{' '.join(command)} ends with exit code {code}: give tests that pass", file=sys.stderr)
            sys.exit(2)
        sites = noted(folder)
        faults = [(site, fault) for site in sites for fault in faults_of[site[1]]]
        print(f"{len(sites)} lines call a collective; {len(faults)} faults", flush=True)
        if sample:
            faults = sorted(random.Random(0).sample(faults, min(sample, len(faults))))
        counts, survived = defaultdict(int), []
        for site, fault in faults:
            how = seen(command, folder, site, fault, sites[site][:TESTS], limit)
            counts[how] += 1
            survived += [(*site, fault)] * (how == "")
            told = {"": "SURVIVES", None: "not reached"}.get(how, how)
            print(f"{told:12} {fault:6} {site[1]:24} {site[0]}", flush=True)
    print(f"\n{len(faults)} faults: {counts['fails']} seen, {counts['hangs']} hang, {counts['']} survive, "
          f"{counts[None]} not reached again; {(time.time() - start) / 60:.1f} minutes")
    for line, name, fault in survived:
        print(f"{line}: {name}: the tests pass with {MEANS[fault]}")
    sys.exit(int(bool(survived)))


def add_to(parser):
    """The flags, on a command line."""
    parser.add_argument("command", nargs="+", help="after --: what runs the tests")
    parser.add_argument("--sample", type=int, default=0, help="so many faults, drawn; left out, all")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a test; a hang is seen (default: 120)")
    return parser


if __name__ == "__main__":
    mutate(**vars(add_to(argparse.ArgumentParser(description=__doc__.partition("\n")[0])).parse_args()))
