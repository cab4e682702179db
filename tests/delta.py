"""A gated delta rule: in chunks as token by token, transformers' numbers, generation from its state.

    python -m tests.delta    prints NUMBERS again, where transformers is installed
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import model
from further.delta import CHUNK, chunked, GatedDelta, recurrent
from further.delta_state import Nothing
from further.llama import LlamaConfig
from further.sampling import CachedGPT
from tests.llama import SIZES, weight, X, Y
from tests.pool import close, parametrize


@parametrize("tokens", [1, 5, CHUNK, 2 * CHUNK + 22])
def test_chunks_give_what_the_recurrence_does(tokens):
    """And its gradients."""
    torch.manual_seed(0)
    q, k, v, dy = torch.randn(4, 2, tokens, 3, 4, dtype=torch.float64)
    log_a, b = -3 * torch.rand(2, tokens, 3, dtype=torch.float64), torch.rand(2, tokens, 3, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, F.normalize(k, dim=3), v, log_a, b)]
    one, other = recurrent(*leaves), chunked(*leaves, Nothing().state)
    assert close(other.detach(), one.detach(), 1e-12)
    for ours, theirs in zip(*(torch.autograd.grad(y, leaves, dy) for y in (other, one))):
        assert close(ours, theirs, 1e-12)


# Four logits, the loss and the gradient's norm of a Qwen3-Next all of whose blocks have the rule, by transformers 5.24
# in float64; but the rule it computes in float32.
NUMBERS = [-0.04403254509326634, 0.27247420680758516, -0.45600015791219123, 0.5643572650710221, 3.838519533211534,
           4.894317402351016]


def numbers_of(net, logits):
    found = logits(net(X))
    loss = F.cross_entropy(found.flatten(0, 1), Y.flatten())
    loss.backward()
    return [*found[1, 7, :4].tolist(), loss.item(), nn.utils.get_total_norm([p.grad for p in net.parameters()]).item()]


def numbers_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3NextConfig(
        **SIZES, head_dim=8, num_experts=0, use_cache=False, tie_word_embeddings=False,
        layer_types=2 * ["linear_attention"], linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8)
    net = transformers.Qwen3NextForCausalLM(config).double()
    for name, p in net.named_parameters():
        p.data = weight(name, tuple(p.shape))
    return numbers_of(net, lambda output: output.logits)


def from_qwen3_next(name):
    """A parameter, made of theirs. Their norms multiply by 1 + weight. They keep q, k, v, gate head by head."""
    H, D, C, inner = 4, 8, 32, 48
    block, _, rest = name.removeprefix("h.").partition(".")
    layer = f"model.layers.{block}."
    if rest == "attn.c_attn.weight":
        qkvz = weight(layer + "linear_attn.in_proj_qkvz.weight", (4 * H * D, C)).view(H, 4, D, C).transpose(0, 1)
        b, a = weight(layer + "linear_attn.in_proj_ba.weight", (2 * H, C)).view(H, 2, C).unbind(1)
        return torch.cat([qkvz.reshape(-1, C), a, b])
    if rest == "mlp.c_fc.weight":
        return torch.cat([weight(f"{layer}mlp.{part}_proj.weight", (inner, C)) for part in ("gate", "up")])
    theirs, shape, more = {
        "ln_1.weight": ("input_layernorm.weight", (C,), 1), "ln_2.weight": ("post_attention_layernorm.weight", (C,), 1),
        "attn.conv.weight": ("linear_attn.conv1d.weight", (3 * H * D, 1, 4), 0),
        "attn.decay.A_log": ("linear_attn.A_log", (H,), 0), "attn.decay.dt_bias": ("linear_attn.dt_bias", (H,), 0),
        "attn.norm.weight": ("linear_attn.norm.weight", (D,), 0),
        "attn.c_proj.weight": ("linear_attn.out_proj.weight", (C, H * D), 0),
        "mlp.c_proj.weight": ("mlp.down_proj.weight", (C, inner), 0)}.get(rest, (None, (37, C), 0))
    if theirs is None:
        layer = "" if name == "lm_head.weight" else "model."
        theirs, shape, more = {
            "wte.weight": ("embed_tokens.weight", (37, C), 0), "lm_head.weight": ("lm_head.weight", (37, C), 0),
            "ln_f.weight": ("norm.weight", (C,), 1)}[name]
    value = weight(layer + theirs, shape) + more
    return value.flatten() if rest == "attn.conv.weight" else value


def test_a_llama_of_delta_rules_is_transformers_qwen3_next():
    config = LlamaConfig(vocab_size=37, seq_len=10, n_layer=2, n_head=4, n_embd=32, inner=48, norm_eps=1e-3,
                         delta_every=3)
    net = model.GPT(config, seed=None)
    model.materialize(net, from_qwen3_next, dtype=torch.float64)
    assert all(isinstance(block.attn, GatedDelta) for block in net.h.values())
    assert close(torch.tensor(numbers_of(net, lambda logits: logits)), torch.tensor(NUMBERS), 1e-6)


def test_a_state_goes_on_as_all_tokens_do():
    """One token at a time; and anew when the context slides. It keeps nothing that grows."""
    config = LlamaConfig(vocab_size=37, seq_len=10, n_layer=3, n_head=4, n_embd=32, n_kv_head=2, delta_every=2)
    plain, cached = (kind(config, 3).double() for kind in (model.GPT, CachedGPT))
    tokens = torch.tensor([[1, 2, 3], [3, 4, 36]])
    sizes = []
    for i in range(12):
        logits = cached.newest_logits(tokens)
        assert close(logits, plain(tokens)[:, -1].detach(), 1e-10)
        sizes.append(cached.caches[0].reached.numel() + cached.caches[0].newest.numel())
        tokens = torch.cat([tokens, logits.argmax(1, keepdim=True)], 1)[:, -10:]
    assert len({*sizes}) == 1


if __name__ == "__main__":
    print(numbers_of_transformers())
