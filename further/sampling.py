"""Sampling with a cache: what does one more token compute?

`GPT.stream` runs all tokens again for each one that it yields. But under a causal mask a token never looks at later
ones, so the keys and values of earlier tokens stay as they are. A block's `Cache` keeps them, and one more token
computes one row of scores. When the context is full it slides: all positions change, so all tokens run again.

    python train.py --steps 10
"""

import torch

import kernels
from model import GPT


class Cache:
    """A block's keys and values of the tokens so far."""

    def __init__(self, length):
        self.length = length
        self.seen = 0

    def attention(self, qkv):                                          # as kernels.attention's, of t new tokens
        first = self.seen
        self.seen += qkv.shape[1]
        if first == 0:
            self.kv = qkv.new_empty(len(qkv), self.length, 2, *qkv.shape[3:])
        self.kv[:, first:self.seen] = qkv[:, :, -2:]
        k, v = self.kv[:, :self.seen].permute(2, 0, 3, 1, 4)                                  # 2 x (B, H, T, D)
        q, _, _ = kernels.heads(qkv)                                                          # (B, H, t, D)
        return kernels.library_attention(q, k, v, is_causal=first == 0).transpose(1, 2)


class CachedGPT(GPT):
    """A GPT to sample from, one stream at a time."""
    seen = 0  # tokens whose keys and values the caches have

    def positions(self, every):
        return every + self.seen

    def stream(self, *args, **options):
        self.seen = 0
        return super().stream(*args, **options)

    @torch.inference_mode()
    def newest_logits(self, tokens):
        """As in GPT, of the tokens of the call before and one more; or of others, which all run."""
        T = tokens.shape[1]
        if self.seen == 0 or T != self.seen + 1:
            self.seen = 0
            for block in self.h.values():
                block.attn.attention = Cache(self.config.seq_len).attention
                block.attn.positions = self.positions
        x = self.embed(tokens[:, self.seen:])                                                 # (B, t, C)
        for block in self.h.values():
            x = block(x)
        self.seen = T
        return self.head(x[:, -1:])[:, 0]                                                     # (B, V)
