"""Sampling with a cache: what does one more token compute?

`GPT.stream` runs all tokens again for each one that it yields. But under a causal mask a token never looks at later
ones, so the keys and values of earlier tokens stay as they are. A block's `Cache` keeps them, and one more token
computes one row of scores. When the context is full it slides: all positions change, so all tokens run again.

    python train.py --steps 10
"""

from contextlib import contextmanager

import torch

import collectives as dist
import kernels
from model import GPT, materialize
from parallel import master_dtype


class Cache:
    """A block's keys and values of the tokens so far."""

    def __init__(self, length):
        self.length = length
        self.seen = 0

    def look(self, qkv):                                               # as kernels.attention's, of t new tokens
        first = self.seen
        self.seen += qkv.shape[1]
        if first == 0:
            self.kv = qkv.new_empty(len(qkv), self.length, 2, *qkv.shape[3:])
        self.kv[:, first:self.seen] = qkv[:, :, -2:]
        k, v = self.kv[:, :self.seen].permute(2, 0, 3, 1, 4)                                  # 2 x (B, H, T, D)
        q, _, _ = kernels.heads(qkv)                                                          # (B, H, t, D)
        return kernels.library_attention(q, k, v, is_causal=first == 0).transpose(1, 2)


class CachedGPT(GPT):
    """A GPT to sample from. It has room for the keys and values of one stream; two in turn run all tokens each time."""
    cached = None  # the tokens (B, T) whose keys and values the caches have
    first = 0  # where in the sequence the tokens of this call begin

    def positions(self, all_positions):
        return all_positions + self.first

    def stream(self, *args, **options):
        self.cached = None
        return super().stream(*args, **options)

    @torch.inference_mode()
    def newest_logits(self, tokens):
        """As in GPT, of the tokens of the call before and one more; or of others, which all run."""
        if self.cached is None or not tokens[:, :-1].equal(self.cached):
            self.caches = [Cache(self.config.seq_len) for _ in self.h]
        logits = self.logits_after(tokens[:, self.caches[0].seen:])
        self.cached = tokens
        return logits

    @torch.inference_mode()
    def logits_after(self, tokens):
        """Logits (B, V) after tokens (B, t) that follow those whose keys and values the caches have."""
        with self.caching(self.caches[0].seen):
            x = self.embed(tokens)                                                            # (B, t, C)
            for block in self.h.values():
                x = block(x)
        return self.head(x[:, -1:])[:, 0]                                                     # (B, V)

    @contextmanager
    def caching(self, first):
        """Blocks look into their caches in this call alone: afterwards the model runs any tokens as a GPT does."""
        layers = [block.attn for block in self.h.values()]
        self.first = first
        for layer, cache in zip(layers, self.caches):
            layer.attention = cache.look
            layer.positions = self.positions
        try:
            yield
        finally:
            self.first = 0
            for layer in layers:
                del layer.attention
                del layer.positions


# ------------------------------------------------------------------------------------------------- a model that is cut
TOP_K = 40  # of how many of the likeliest tokens each one of a run's sample is drawn


def whole_model(trainer):
    """Each rank gives its parts; rank 0 gets the GPT that one process would hold, the others its shapes alone.
    Where a rank keeps only parts of the weights, it is on the CPU, because a GPU may not have room for all."""
    layout = trainer.net.layout
    in_parts = layout.zero == 3 or layout.tp * layout.pp * layout.ep > 1
    device = "cpu" if in_parts else trainer.device
    whole = CachedGPT(trainer.config, seed=None)
    materialize(whole, trainer.net.whole_parameter, device if dist.get_rank() == 0 else "meta",
                master_dtype(layout.dtype))
    return whole


def show_sample(trainer, say, goes_on=lambda: True):
    """Rank 0 prints what a Trainer's model goes on with after its prompt. Call it on all ranks, after the last step,
    which all ask goes_on() before each tenth token."""
    s = trainer.s
    tokens = trainer.vocabulary.encode(s.prompt or "\n")
    stream = stream_after(trainer, tokens)
    for i in range(s.sample):
        if i % 10 == 0 and not goes_on():
            break
        if dist.get_rank() == 0:
            tokens.append(next(stream).item())
    say(f"--- sample, {s.sample} tokens ---\n{trainer.vocabulary.decode(tokens)}\n---")


def stream_after(trainer, prompt):
    """Tokens (1, 1) with which a Trainer's model goes on after the prompt, without end, for rank 0. Call it on all
    ranks, after the last step."""
    whole = whole_model(trainer)
    start = torch.tensor([prompt], device=whole.wte.weight.device)
    if start.device.type != trainer.device.type:
        kernels.use("auto")  # "triton" refuses what is on the CPU
    return whole.stream(start, trainer.s.temperature, TOP_K, trainer.s.seed)
