"""The strategies as the lecture has them, and a step as a list: each equals one process if its messages are sent."""

import functools
import re
from collections import Counter

import torch

import collectives as dist
import parallel
import train
from lessons import lecture8, zero
from lessons.demos import main
from lessons.bench.timing import of_all_ranks, patched
from lessons.step import settings_of
from safe.flags import Parser
from tests.pool import close, in_new_process, on_plain, on_ranks, parametrize
from tests.runs import output_of


def without(names):
    """Collectives, or kinds of messages, do nothing."""
    return patched([(dist, name, lambda *_, **__: None) for name in names.split()])


def without_averages(name, all_of_them):
    """A collective does nothing; unless `all_of_them`, only where it is awaited later, as G and A are."""
    real = getattr(dist, name)

    def stand_in(*tensors, async_op=False, **more):
        return dist.Handle() if async_op or all_of_them else real(*tensors, **more)

    return patched([(dist, name, stand_in)])


@on_plain
@parametrize("strategy", [*zero.STRATEGIES])
@on_ranks(2)
def test_data_parallelism_and_zero_beside_one_process(strategy):
    """Losses of 3 steps. What is kept and sent is the table's over parallel.with_weights: messages of three numbers are
    8 x 3 bytes a step, and ZeRO-3 gathers neither for an embedding's backward nor twice for the last piece."""
    config = zero.config_on(2)
    K = config.parameters()
    want = zero.in_one_process(config, 2)
    run, shares = zero.STRATEGIES[strategy]
    stage = -1 if strategy == "average_gradients" else int(strategy[-1])
    found = run(config)
    assert close(torch.stack(of_all_ranks(found.losses)).mean(0), want)
    saved = zero.M * (64 + 32 + 2 + 64) * 32 * (stage == 3)  # wte, wpe; norm and head
    nbytes = sum(log.bytes for log in found.traffic.values())
    assert nbytes == zero.STEPS * (8 * (shares * K - saved) // 2 + 24 * (stage >= 0))
    weights, momentum = (K // 2 if shard else K for shard in (stage == 3, stage >= 1))
    units = config.n_layer + 2  # each has one NaN, which its parameters are while nobody has gathered them
    assert found.kept == 8 * (weights + momentum + units * (stage == 3))
    assert found.at_the_end == 8 * (K // 2 if stage >= 1 else K)
    assert found.most == 8 * K if stage < 2 else found.at_the_end < found.most < 8 * K
    for lost in ["reduce_scatter_tensor", "all_gather_into_tensor"] if stage > 0 else ["all_reduce"]:
        with without_averages(lost, stage < 0):
            losses = run(config).losses
        assert not close(torch.stack(of_all_ranks(losses)).mean(0), want), lost


@parametrize("words, chain", [
    ("--dp 2 --zero 3", parallel.one_f_one_b(1, 1)), ("--dp 2 --zero 1 --micro-batches 2", parallel.one_f_one_b(1, 2))])
def test_the_printed_list_is_with_weights_and_its_bytes_are_the_traffic(words, chain):
    """Of an embedding, two blocks and a head that is tied to it. ZeRO-1 sends 2 (N-1)/N K; behind the list travel three
    numbers of 8 bytes, and the norm, and whether a number was not finite."""
    printed = in_new_process(functools.partial(output_of, main, "step", *words.split()))
    [actions] = [line.split()[2:] for line in printed.splitlines() if re.match(r"rank \d   \S", line)]
    stage = int(words.split()[3])
    right = parallel.with_weights(parallel.into_pieces(chain[0], {0: range(4)}), stage, (0,), {3: [0]})
    several = "micro" in words
    assert actions == [f"{a}/{a.stage}" if several else f"{a.kind}{a.stage}" for a in right]
    assert "the norm: all_reduce 40 B\n" in printed
    if several:
        s, _ = settings_of(Parser(add_help=False), words.split())
        sent = Counter()
        for op, nbytes in re.findall(r"(\w+) ([\d,]+) B", printed.partition("sent\n")[2]):
            sent[op] += int(nbytes.replace(",", ""))
        halves = sent["reduce_scatter_tensor"], sent["all_gather_into_tensor"]
        assert halves == 2 * (train.config_of(s).parameters() // 2 * 4,)


@on_plain
@parametrize("strategy, lost", [
    (lecture8.data_parallel, "all_reduce"), (lecture8.pipeline, "send recv"),
    (lecture8.all_gather_tensor_parallel, "all_gather_into_tensor"),
    (lecture8.all_gather_tensor_parallel, "reduce_scatter_tensor")],
    ids=lambda value: getattr(value, "__name__", value))
@on_ranks(3)
def test_strategies_as_the_lecture_has_them(strategy, lost):
    """Gradients of its deep MLP; the pipeline is `gpipe_step`."""
    for names in "", lost:
        with without(names):
            *_, error = lecture8.beside_one_process(strategy)
        assert all(error < (1e-3 if names else 1e-12) for error in of_all_ranks(error)) == (not names)
