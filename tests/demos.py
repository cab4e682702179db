"""`python -m lessons`: what the demos print is true."""

import contextlib
import io
import re
import sys
from collections import Counter

import pytest

import lessons.demos
import model


def test_pipeline_demo_draws_all_schedules(capsys):
    lessons.demos.demo_pipeline(4, 8, 2)
    printed = capsys.readouterr().out
    for line in ("gpipe: idle 9 by the formula | 9 simulated", "1f1b: idle 9 by the formula | 9 simulated",
                 "interleaved: idle 4.5 by the formula | 4.5 simulated", "zb-h1: idle 3 by the formula | 3 simulated",
                 "zb-v: idle 1.5 by the formula | 1.5 simulated", "v-half: idle 4.5 by the formula | 4.5 simulated",
                 "v-min: idle 5.5 by the formula | 5.5 simulated",
                 "dualpipe-v: idle 1.5 by the formula | 1.5 simulated",
                 "peak activations 4 3 2 1", "rank 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0"):
        assert line in printed


def test_memory_demo_shows_the_lecture_s_activations(monkeypatch, capsys):
    """Of the lecture's 34 bytes model.py lacks dropout's masks, 2; statistics of norms and heads are small."""
    monkeypatch.setattr(sys, "argv", ["lessons", "memory"])
    lessons.demos.main()
    rows = [line.split()[-3::2] for line in capsys.readouterr().out.splitlines() if re.match("  .*[|]", line)]
    norms, heads = 16 / 12288, 4 * 96 / 12288
    ours = 32 + norms + heads, 8 + norms + (24 + heads) / 8, (32 + norms + heads) / 8, (24 + norms) / 8, 2
    lecture = 34 + 80, 10 + 104 / 8, 114 / 8, 34 / 8, 2
    assert rows == [[f"{a:.2f}", f"{b:.2f}"] for a, b in zip(lecture, ours)]


def demo_lines(name):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        lessons.demos.DEMOS[name][0]()
    return out.getvalue().splitlines()


def test_collectives_demo_shows_steps_and_counts_bytes(plain_pool):
    lines = plain_pool(4).run(demo_lines, "collectives")[0]
    ring = lines[lines.index("  all-gather step 2: chunk r-2, complete, goes right") + 1:][:4]
    assert [line.split()[2:] for line in ring] == [["abcd"] * 4] * 4
    counts = [line.split()[1:4:2] for line in lines if " | " in line and "counted" not in line]
    assert len(counts) == 5 and all(counted == formula for counted, formula in counts)


def test_data_demo_shows_buckets_that_are_complete_before_backward_ends(plain_pool):
    lines = plain_pool(3).run(demo_lines, "data")[0]
    rows = [line for line in lines if " of 52 " in line]
    leaves = [int(row.split()[0]) for row in rows]
    assert leaves == sorted(set(leaves)) and len(leaves) > 2 and leaves[-1] == 52
    assert "ln_f, h.3" in rows[0] and "h.0, wpe, wte" in rows[0] and rows[-1].endswith(" nothing")
    law, (ddp, naive) = 4 * 8 * model.PRESETS["tiny"].parameters() // 3, (line.split()[-4:] for line in lines[-3:-1])
    assert f"{law:,}" in lines[-1] and abs(int(ddp[2].replace(",", "")) - law) <= 4 * 8 * len(leaves)  # padding
    assert int(naive[0]) == 52 and int(ddp[0]) == len(leaves) and max(float(naive[3]), float(ddp[3])) < 1e-13


def test_tensor_demo_sends_the_formula_and_equals_the_uncut_layer(plain_pool):
    lines = plain_pool(3).run(demo_lines, "tensor")[0]
    law = 4 * 16 * 128 * 96 * 8 // 3
    assert f"{law:,} a rank" in lines[0] and sum(f"{law:,} bytes sent" in line for line in lines) == 4  # f and g, twice
    assert ([re.findall(r"\([\d, ]+\)", line)[0] for line in lines if line.startswith("  rank")]
            == 3 * ["(96, 96)"] + 3 * ["(96, 128)"])
    errors = [[float(e) for e in re.findall(r"\de-\d+", line)] for line in lines if "off from one" in line]
    assert len(errors) == 2 and all(len(pair) == 2 and max(pair) < 1e-13 for pair in errors)


def test_experts_demo_sends_the_rows_that_travel(plain_pool):
    lines = plain_pool(2).run(demo_lines, "experts")[0]
    tokens = [re.findall(r"(0\.\d\d) x expert (\d)", line) for line in lines if " token " in line]
    assert len(tokens) == 10 and all(abs(float(a) + float(b) - 1) < 0.02 and e != f for (a, e), (b, f) in tokens)
    table = [line.replace(",", "") for line in lines if "forward" in line and " | " in line]
    rows = [[int(n) for n in re.findall(r"\d+", line.split("forward")[0])][1:] for line in table]
    for rank, row in enumerate(rows):
        chosen = Counter(int(e) for token in tokens[5 * rank:5 * rank + 5] for _, e in token)
        assert row == [chosen[e] for e in range(4)] + [chosen[0] + chosen[1], chosen[2] + chosen[3]]
    law = 8 * 32 * (rows[0][5] + rows[1][4])  # of the rows that travel, a rank sends some and the others' outputs
    for line in table:
        assert f"forward {law + 2 * 8} | {law + 2 * 8}   backward {law} | {law} " in line
        assert len(errors := re.findall(r"\de[-+]\d+", line)) == 2 and max(map(float, errors)) < 1e-14


@pytest.mark.parametrize("n", [1, 3, 4])
def test_context_demo_has_equal_work_by_zigzag_alone(n, capsys):
    lessons.demos.demo_context(n)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[1:] for line in lines if line.startswith("  rank ")]
    work = [[0 if cell == "idle" else float(cell) for cell in re.findall(r"idle|(?<=: )\S+", line)]
            for line in lines if line.startswith("  rank ")]
    assert work == [[2] + [4] * r + [0] * (n - 1 - r) for r in range(n)] + [[2] * n] * n  # contiguous, zigzag
    assert [float(row[-1]) for row in rows] == [2 + 4 * r for r in range(n)] + [2 * n] * n
    assert [row[1] for row in rows[n:]] == [f"{r},{2 * n - 1 - r}" for r in range(n)]  # the chunks of its queries
    longest = [float(line.split()[-1]) for line in lines if "  busiest " in line]
    assert longest == [2 + 4 * (n - 1), 2 * n] and f"are {2 * n} a rank" in lines[-1]
