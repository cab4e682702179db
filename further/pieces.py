"""Stages that take equally long: where does a pipeline cut the model?

    python train.py --pp 3 --steps 3        a stage that takes longer than the others makes all of them wait
"""

import functools


@functools.cache
def matrices(config, tp=1):
    """(attention's, an MLP's): elements of a block's matrices on one of tp ranks."""
    def is_attention_s(name):
        return name.startswith("h.0.attn.c_") and name.endswith("weight")
    return config.parameters(is_attention_s) / tp, config.n_embd / tp * (config.up_width + config.hidden)


@functools.cache
def split_pieces(config, stages):
    """Cut the L+2 pieces of a GPT into `stages` runs, so that the slowest run takes as little time as possible:
    [range, ...], cached, so callers must not change it.

    Costs are multiply-adds a token: of a block its attention and matrices (of experts, k), of the head C V. The
    embedding costs nothing, because it is a look-up.
    """
    n = config.n_layer + 2
    attention, mlp = matrices(config)
    met = config.top_k + config.shared_experts if config.experts else 1
    mlps = [met if config.experts and config.has_experts(i) else 1 for i in range(config.n_layer)]
    attention += config.seq_len * config.heads_width
    cost = [0] + [attention + mlp * k for k in mlps] + [config.n_embd * config.vocab_size]

    @functools.cache
    def best(end, k):
        """Cut the pieces before `end` into k runs: (the slowest one's cost, the runs)."""
        if k == 1:
            return sum(cost[:end]), [range(end)]
        cuts = []
        for start in range(k - 1, end):
            slowest, runs = best(start, k - 1)
            cuts.append((max(slowest, sum(cost[start:end])), [*runs, range(start, end)]))
        return min(cuts, key=lambda cut: cut[0])

    return best(n, stages)[1]
