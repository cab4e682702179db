"""DeepSeek-V2 and V3 in Hugging Face folders: what config.json says beside a Llama's, and in which order rows lie.

V2-Lite and other models that do not compress queries. V2 chooses experts by a softmax, V3 by sigmoids and a bias.
"""

from dataclasses import replace

import torch

from further.latent import LatentConfig, LatentExpertsConfig
from safe import llamas
from safe.sizes import check_sizes, reject

KEYS = {field: key for field, key in llamas.KEYS.items() if field != "n_kv_head"} | {
    "head_size": "qk_nope_head_dim", "rope_size": "qk_rope_head_dim", "latent": "kv_lora_rank"}
OF_EXPERTS = {"inner": "moe_intermediate_size", "dense_inner": "intermediate_size", "experts": "n_routed_experts",
              "top_k": "num_experts_per_tok", "shared_experts": "n_shared_experts",
              "first_dense": "first_k_dense_replace"}
BOTH = {  # values of missing keys, transformers' own
    "max_position_embeddings": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": 1536}
DEFAULTS = {
    "deepseek_v2": BOTH | {
        "vocab_size": 102400, "max_position_embeddings": 2048, "num_hidden_layers": 32, "num_attention_heads": 32,
        "hidden_size": 4096, "intermediate_size": 11008, "moe_intermediate_size": 1407, "n_routed_experts": 64,
        "num_experts_per_tok": None, "n_shared_experts": 2, "first_k_dense_replace": 0, "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None},
    "deepseek_v3": BOTH | {
        "vocab_size": 129280, "num_hidden_layers": 61, "num_attention_heads": 128, "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "n_group": 8, "topk_group": 4}}
ARCHITECTURES = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
FIXED = {  # our models have these values; a config.json with others is refused
    "attention_bias": (False,), "mlp_bias": (False,), "q_lora_rank": (None,), "rope_scaling": (None,),
    "rope_interleave": (True,), "quantization_config": (None,), "routed_scaling_factor": (1.0,),
    "topk_method": ("greedy", "noaux_tc", None), "n_group": (1, None), "topk_group": (1, None), "moe_layer_freq": (1,)}


OF_GROUPS = {"expert_groups": "n_group", "top_groups": "topk_group"}  # V3's


def keys_of(config):
    """{field of the config: key in config.json}."""
    if not config.experts:
        return KEYS
    return KEYS | OF_EXPERTS | ({} if config.softmax else OF_GROUPS)


def config_from(hf):
    """The LatentConfig that a config.json describes, or the LatentExpertsConfig. BadInput names the key."""
    kind = hf["model_type"]
    hf = DEFAULTS[kind] | hf
    softmax = kind == "deepseek_v2"
    is_dense = hf["first_k_dense_replace"] == hf["num_hidden_layers"] or not hf["n_routed_experts"]
    keys = KEYS if is_dense else KEYS | OF_EXPERTS | ({} if softmax else OF_GROUPS)
    for key, values in FIXED.items():
        reject(key not in keys.values() and hf.get(key, values[0]) not in values,
               f"{key} is {hf.get(key)!r}, only {values[0]} is supported")
    norm = hf["norm_topk_prob"]
    reject(norm == softmax, f"norm_topk_prob is {norm}, only {not softmax} is supported")
    reject(hf["v_head_dim"] != hf["qk_nope_head_dim"], f"v_head_dim {hf['v_head_dim']!r} is not qk_nope_head_dim "
           f"{hf['qk_nope_head_dim']!r}: only equal ones are supported")
    sizes = {field: hf[key] for field, key in keys.items()} | {"rope_theta": llamas.theta_of(hf)}
    config = LatentConfig(**sizes) if is_dense else LatentExpertsConfig(**sizes, softmax=softmax)
    check_sizes(config, lambda field: keys.get(field, field))
    usual = {"head_size": config.n_embd / config.n_head, "rope_size": config.head_dim // 2, "dense_inner": config.inner}
    zeros = {field: 0 for field, value in usual.items() if getattr(config, field, None) == value}
    return replace(config, **zeros)  # as flags have it


def hf_config(config):
    """What config.json says beside what every model's says."""
    kind = "deepseek_v3" if config.experts and not config.softmax else "deepseek_v2"
    why = f"a model with --latent and --experts is written as a {kind}, which"
    if config.experts:
        reject(config.expert_every > 1, f"{why} has experts in each block: leave --expert-every out")
        reject(not config.shared_experts, f"{why} has shared experts, too: give --shared-experts 1")
        reject(config.softmax and config.expert_groups > 1, f"{why} has no groups of experts here: leave them out")
        reject(kind == "deepseek_v3" and config.top_k == 1, f"{why} weighs one expert by 1: give --top-k 2")
    sizes = {key: getattr(config, field) for field, key in KEYS.items()}
    sizes |= {"max_position_embeddings": config.max_positions or config.seq_len, "head_dim": config.rope_dim}
    sizes |= {"qk_nope_head_dim": config.head_dim, "v_head_dim": config.head_dim, "qk_rope_head_dim": config.rope_dim,
              "intermediate_size": config.hidden, "num_key_value_heads": config.n_head, "n_routed_experts": 1,
              "num_experts_per_tok": 1, "first_k_dense_replace": config.n_layer}
    if config.experts:
        sizes |= {key: getattr(config, field) for field, key in (OF_EXPERTS | OF_GROUPS).items()}
        sizes |= {"moe_intermediate_size": config.hidden, "intermediate_size": config.dense_inner or config.hidden}
    fixed = {key: values[0] for key, values in FIXED.items()}
    v3 = {"norm_topk_prob": True, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    router = v3 if kind == "deepseek_v3" else {"norm_topk_prob": False, "scoring_func": "softmax"}
    return {"model_type": kind, "architectures": [ARCHITECTURES[kind]], **fixed, **sizes, **router,
            "rope_theta": config.rope_theta, "rope_parameters": {"rope_theta": config.rope_theta, **llamas.PLAIN_ROPE}}


# They turn pairs of neighbours, 2i and 2i + 1, where we turn i and i + r/2. So the rows that make what is turned lie in
# another order.

def pairs(config, name, weight, order):
    """The last r rows of each head's, or of the rotary key's, put in this order."""
    if not name.endswith(("attn.c_q.weight", "attn.c_down.weight")):
        return weight
    blocks = weight.unflatten(0, (config.n_head if "c_q" in name else 1, -1))
    kept, turned = blocks.split([blocks.shape[1] - config.rope_dim, config.rope_dim], 1)
    return torch.cat([kept, turned[:, order]], 1).flatten(0, 1)


def joined(config, name, parts):
    """Our parameter of a folder's parts."""
    order = torch.arange(config.rope_dim).view(-1, 2).T.flatten()
    return pairs(config, name, llamas.joined(config, name, parts), order)


def taken_apart(config, name, whole):
    """A folder's parts of our parameter."""
    order = torch.arange(config.rope_dim).view(2, -1).T.flatten()
    return llamas.taken_apart(config, name, pairs(config, name, whole, order))
