"""`python -m lessons`: what the demos print is true."""

import re
import sys
from unittest.mock import Mock

import pytest

import lessons.demos
from lessons.bench.timing import say
from lessons.ladder import STEPS
from tests.pool import in_new_process, parametrize
from tests.runs import printed_by

# A demo, on how many ranks it runs, and what it prints, which the law gives; "..." is what stands between. Errors below
# 1e-12 read ~0.
SHOWN = [
    # 4 stages, 8 micro-batches: gpipe and 1f1b idle (p-1) x (F + B) = 9, zb-h1 a third of it, interleaved half
    ("pipeline", 1, """
        gpipe: idle 9 by the formula | 9 simulated
        ...
        interleaved: idle 4.5 by the formula | 4.5 simulated
        ...
        1f1b: idle 9 by the formula | 9 simulated, bubble 27 % of 33; peak activations 4 3 2 1
        ...
        zb-h1: idle 3 by the formula | 3 simulated
        ...
        rank 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0"""),
    # 32 threads read 128 bytes, 4 sectors of 32; a product's ridge is 721 TFLOP/s over 2.76 TB/s
    ("machine", 1, """
          HBM                               all SMs         80 GB           3,350 GB/s     0.9 ms
        ...
          NVLink                            a node's GPUs   18 links          450 GB/s     6.9 ms
        ...
          H100 reaches: HBM, read plus written, 2,761 GB/s, between GPUs of a node 334 GB/s, between nodes 45 GB/s (e
        ...
        V100 125, A100 312, H100 989, B200 2,250
        ...
        132 multiprocessors (SMs) x 128 cores = 16,896. Of 8 warps of 32 threads a block has 256. An SM holds 64 warps:
        8 such blocks, 16 threads a core, which takes turns. So 1,056 such blocks run at a time, and all others wait.
        ...
          256 x 128 x 64, 4                 192 KB: 1 at once on an SM
        ...
          256 x 256 x 64, 4                 256 KB: does not fit
        ...
        4 sectors, 100.0% of
        ...
        stride 8                          32 sectors, 12.5% of
        ...
        stride 33                         passes: 1
        ...
        thread % 4                        4.00
        ...
        warp % 4                          1.00
        ...
        133 programs                      waves: 2, the last one 0.8% full
        ...
        tiles: 7, the last one 25.0% full
        ...
        n = 128                           0.016, in place of 2
        ...
        the ridge is at 261
        ...
        2.0 FLOPs a byte: memory
        ...
        256.0 FLOPs a byte: memory
        ...
        1107.0 FLOPs a byte: comp"""),
    # 4 bytes x 7/8 / (2 x 8192) x 660e12 / 350e9; 2 bytes x 7 / (6 x 1600) and 2 x 8 / (24 x 1600 x 48), times the same
    # whatever the tokens; BTC is 2 x 8192 x 1600 bytes
    ("overlap", 1, """
              0.403     3.133      0.101     0.783      3,300    25,667       1.57e+08
        ...
              0.201     1.567      0.050     0.392      1,650    12,834
        ...
              2.750    21.389      2.750    21.389      never     never
        ...
              0.016     0.127      0.016     0.127        any       any
        ...
        which leaves each node by one card, 260 ms; in two levels 48 ms
        cp, ring: hidden from 2,848
        ...
        dp: a bucket of 25 MB takes 0.12 ms in a node (2(N-1)/N bucket / W), a block's backward 1.53 (4 tokens K / F).
        ...
        micro-batch, 52.4 MB (docs/words.md), and receives as much. The playbook adds both up: 4 BTC, 104.9 MB."""),
    # 3 + 1 + 2 x 4; of the gated MLP three matrices, each 8/3 or 4; GQA halves two of q, k, v
    ("sizes", 1, """
        GPT-2 XL                                3.00        1.00        4.00        4.00   12.00
        ...
        Llama, hidden layer 4 C                 3.00        1.00        8.00        4.00   16.00
          and half as many k and v              2.00        1.00        8.00        4.00   15.00
        ...
        GPT-2 XL beside its blocks: embedding V C = 80,411,200, which is the head, too; positions T C = 1,638,400.
        ...
        4 backward; counted in a GPT of 3.2M parameters 1.99, 3.98.
        ...
        16 heads of 128                        4,096
        half as many k and v                   2,048"""),
    # Of 12 x 128^2 weights a block and 256 x 128 of the head; they have 4,864 rows, and 12,800 groups of 64
    ("sampling", 1, """
        prefill: all tokens at once
        ...
                      65
        (GELU: 20 launches more;
        ...
                 204,800         266,240
        ...
               3,276,800
        ...
                 838,656
        ...
                 460,800"""),
    # Six layers of 24 x 24, float64: 2/3 of each gradient goes round twice, 2/3 of each layer's outputs or gradients
    ("lecture8", 3, """
        all_reduce 36,864 bytes   ~0
        ...
        send 9,216 bytes   ~0
        ...
        all_gather_into_tensor 18,432 bytes, reduce_scatter_tensor 18,432 bytes   ~0"""),
    # x, its norm, q, k, v, attention's output, x + that, its norm, the MLP before and after GELU; nodes share tensors.
    # Equal steps find the blocks of the one before; blocks of other lengths lie between what longer ones need. Begun at
    # 2^22, the scale is halved by each skipped step, and doubled after four good ones.
    ("measuring", 2, """
          13  12 9 9 ScaledDotProductFlashAttentionForCpuBackward0
                      key          (1, 4, 128, 32)      192.0 KiB
        ...
                      query        (1, 4, 128, 32)      kept above
        ...
        kept in all 1,052,672 bytes, by the formula 1,052,672
        ...
          of 1,024 tokens     tensors at most   388.3 MiB, reserved   406.0 MiB
        ...
          of 448 to 1,024     tensors at most   388.3 MiB, reserved   574.0 MiB
        ...
           2  2^21
        ...
        inf  skipped
        ...
           3  2^20
        ...
          10  2^20"""),
    # K parameters of 8 bytes, of which 101 tensors x 2 messages x 3 steps make 606. A head's F and B are neighbours,
    # and an embedding's B needs no weights. Of the lecture's 34 bytes model.py lacks dropout's masks, 2; statistics of
    # norms and heads are small.
    ("zero", 1, """
        average_gradients        606 
        ...
        ZeRO-0  F0 F1 F2 F3 B3 A3 B2 A2 B1 A1 B0 A0
        ZeRO-1  G0 G1 F0 G2 F1 G3 F2 F3 B3 A3 B2 A2 B1 A1 B0 A0
        ZeRO-2  G0 G1 F0 G2 F1 G3 F2 F3 B3 A3 B2 A2 B1 A1 B0 A0
        ZeRO-3  G0 G1 F0 D0 G2 F1 D1 G3 F2 D2 F3 G2 B3 D3 A3 G1 B2 D2 A2 B1 D1 A1 B0 A0
        ...
          one GPU                             114.00 | 32.03
          --tp 8                               23.00 | 11.01
          --tp 8 --sp                          14.25 | 4.00
          --recompute block                     2.00 | 2.00"""),
    # Step s of reduce-scatter adds to chunk r-2-s of rank r, step s of all-gather completes chunk r-s-1.
    ("collectives", 4, """
        ring all-reduce: rank r begins with 1, 2, ... times 10^r, so digits say whose numbers a chunk has; [new]
        start
                chunk 0  chunk 1  chunk 2  chunk 3
        rank 0  1        2        3        4
        rank 1  10       20       30       40
        rank 2  100      200      300      400
        rank 3  1000     2000     3000     4000
        reduce-scatter step 0: chunk r-1 goes right and is added
                chunk 0  chunk 1  chunk 2  chunk 3
        rank 0  1        2        [3003]   4
        rank 1  10       20       30       [44]
        rank 2  [110]    200      300      400
        rank 3  1000     [2200]   3000     4000
        reduce-scatter step 1: chunk r-2 goes right and is added
                chunk 0  chunk 1  chunk 2  chunk 3
        rank 0  1        [2202]   3003     4
        rank 1  10       20       [3033]   44
        rank 2  110      200      300      [444]
        rank 3  [1110]   2200     3000     4000
        reduce-scatter step 2: chunk r-3 goes right and is added
                chunk 0  chunk 1  chunk 2  chunk 3
        rank 0  [1111]   2202     3003     4
        rank 1  10       [2222]   3033     44
        rank 2  110      200      [3333]   444
        rank 3  1110     2200     3000     [4444]
        all-gather step 0: chunk r-0, complete, goes right
                chunk 0  chunk 1  chunk 2  chunk 3
        rank 0  1111     2202     3003     [4444]
        rank 1  [1111]   2222     3033     44
        rank 2  110      [2222]   3333     444
        rank 3  1110     2200     [3333]   4444
        all-gather step 1: chunk r-1, complete, goes right
                chunk 0  chunk 1  chunk 2  chunk 3
        rank 0  1111     2202     [3333]   4444
        rank 1  1111     2222     3033     [4444]
        rank 2  [1111]   2222     3333     444
        rank 3  1110     [2222]   3333     4444
        all-gather step 2: chunk r-2, complete, goes right
                chunk 0  chunk 1  chunk 2  chunk 3
        rank 0  1111     [2222]   3333     4444
        rank 1  1111     2222     [3333]   4444
        rank 2  1111     2222     3333     [4444]
        rank 3  [1111]   2222     3333     4444

        an all-reduce by hand, all to rank 0 and back: rank 0 sends 12,582,912 bytes, (N-1) K; of the ring
        ...
        bytes sent by rank 0, K = 4 MiB, N = 4:  counted | formula
          all_reduce                 6,291,456 |    6,291,456   2(N-1)/N K
          reduce_scatter_tensor      3,145,728 |    3,145,728   (N-1)/N K
          all_gather_into_tensor     3,145,728 |    3,145,728   (N-1)/N K
          broadcast                  8,388,608 |    8,388,608   ceil(log2 N) K at the root; all ranks together (N-1) K
          barrier                            2 |            2   ceil(log2 N)"""),
    # 4 x 16 x 128 x 96 x 8 / 3 = 2,097,152
    ("tensor", 3, """
          f   forward   identity                                backward  all-reduce of dX, 2,097,152 bytes sent
          g   forward   all-reduce of Y, 2,097,152 bytes sent   backward  identity
          relative error, off from one rank's result: Y ~0, dX ~0

        MLP: Y = GeLU(X A) B. A (96, 384) is cut by columns, B (384, 96) by rows:
          rank 0   A_0 (96, 128)   between them (16, 128, 128)   B_0 (128, 96)   its term of Y (16, 128, 96), 81 % off Y
          rank 1   A_1 (96, 128)   between them (16, 128, 128)   B_1 (128, 96)   its term of Y (16, 128, 96), 81 % off Y
          rank 2   A_2 (96, 128)   between them (16, 128, 128)   B_2 (128, 96)   its term of Y (16, 128, 96), 81 % off Y
          f   forward   identity                                backward  all-reduce of dX, 2,097,152 bytes sent
          g   forward   all-reduce of Y, 2,097,152 bytes sent   backward  identity
          relative error, off from one rank's result: Y ~0, dX ~0"""),
    # Experts 0 and 1 are rank 0's. It sends 3 rows, and the outputs of 6: 9 x 32 x 8 = 2,304 bytes, and two counts.
    ("experts", 2, """
          rank 0   token 0   0.59 x expert 0 + 0.41 x expert 1
          rank 0   token 1   0.57 x expert 1 + 0.43 x expert 0
          rank 0   token 2   0.60 x expert 1 + 0.40 x expert 3
          rank 0   token 3   0.53 x expert 3 + 0.47 x expert 0
          rank 0   token 4   0.61 x expert 0 + 0.39 x expert 3
          rank 1   token 0   0.51 x expert 2 + 0.49 x expert 1
          rank 1   token 1   0.67 x expert 0 + 0.33 x expert 3
          rank 1   token 2   0.52 x expert 0 + 0.48 x expert 1
          rank 1   token 3   0.81 x expert 2 + 0.19 x expert 1
          rank 1   token 4   0.51 x expert 2 + 0.49 x expert 0

                   rows for each expert, so for each rank; bytes sent by all-to-all: counted | formula; errors
          rank 0  [4, 3, 0, 3]   [7, 3]   forward 2,320 | 2,320   backward 2,304 | 2,304   Y ~0, dX ~0
          rank 1  [3, 3, 3, 1]   [6, 4]   forward 2,320 | 2,320   backward 2,304 | 2,304   Y ~0, dX ~0"""),
    # Contiguous chunks keep the last rank busy for 14 blocks of scores, zigzag each for 8.
    ("context", 1, """
          rank 3  6,7 x 6,7: 2      6,7 x 4,5: 4      6,7 x 2,3: 4      6,7 x 0,1: 4      14
          busiest 2                 4                 4                 4                 14

        zigzag, which our ring uses
                  step 0            step 1            step 2            step 3            blocks
          rank 0  0,7 x 0,7: 2      7 x 3,4: 2        7 x 2,5: 2        7 x 1,6: 2        8
          rank 1  1,6 x 1,6: 2      1,6 x 0: 2        6 x 3,4: 2        6 x 2,5: 2        8
          rank 2  2,5 x 2,5: 2      2,5 x 1: 2        2,5 x 0: 2        5 x 3,4: 2        8
          rank 3  3,4 x 3,4: 2      3,4 x 2: 2        3,4 x 1: 2        3,4 x 0: 2        8
          busiest 2                 2                 2                 2                 8""")]


@parametrize("name, ranks, shown", SHOWN)
def test_a_demo_shows_the_law(plain_pool, name, ranks, shown):
    demo, flags = lessons.demos.DEMOS[name], {"steps": 1} if name == "sampling" else {}
    printed = plain_pool(ranks).run(printed_by, demo, **flags)[0]
    printed = re.sub(r"\de-1[3-9]|0e\+00", "~0", printed)
    for part in shown.replace("\n        ", "\n").split("\n...\n"):
        assert part.lstrip("\n") in printed, printed


def test_a_demo_outlives_a_closed_pipe(monkeypatch):
    """As behind `| head`: a rank that ended there would be called lost."""
    monkeypatch.setattr(sys, "stdout", Mock(encoding="utf-8", write=Mock(side_effect=BrokenPipeError)))
    say("a line")


def test_cuda_is_played_without_a_gpu():
    """The kernels' own text gives the product. A warp reads 32 rows of A and one number of B, or one and 32 neighbours;
    in tiles 2 x 4 sectors for 32 multiply-adds, where a thread has 4 x 4 outputs for 128. Of shared memory it reads two
    numbers for one multiply-add, or 8 for 16."""
    printed = in_new_process(printed_by, lessons.demos.demo_ladder)
    if printed.startswith("not built"):
        pytest.skip(printed)
    found = re.findall(r"(?m)^([a-z ]+?) +([\d.]+) +([\d.]+) +([\d.e-]+)", printed)
    assert [(name, float(sectors), float(passes)) for name, sectors, passes, _ in found] == [
        ("down columns", 33, 0), ("along rows", 5, 0), ("in shared memory", 8 / 32, 2), ("coarsened", 32 / 512, 8 / 16)]
    assert all(float(error) < 1e-6 for *_, error in found)
    assert [law for _, law, _ in STEPS.values()] == [float(sectors) for _, sectors, *_ in found]
