"""Llama, Qwen 2 and Qwen 3 in Hugging Face folders: what config.json says, and what they call our parameters."""

from dataclasses import replace

from further.kinds import shapes_of_all
from further.llama import LlamaConfig
from safe.sizes import check_fixed, check_sizes, reject

KEYS = {  # field of LlamaConfig: key in config.json
    "vocab_size": "vocab_size", "seq_len": "max_position_embeddings", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads", "head_size": "head_dim",
    "n_embd": "hidden_size", "inner": "intermediate_size", "activation": "hidden_act", "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings"}
QWENS = {  # values of missing keys, transformers' own
    "vocab_size": 151936, "max_position_embeddings": 32768, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": None, "hidden_size": 4096, "intermediate_size": 22016,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
DEFAULTS = {
    "llama": QWENS | {"vocab_size": 32000, "max_position_embeddings": 2048, "num_key_value_heads": None,
                      "intermediate_size": 11008},
    "qwen2": QWENS, "qwen3": QWENS | {"head_dim": 128}}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
FIXED = {  # our model has these values; a config.json with others is refused
    "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "rope_scaling": None,
    "partial_rotary_factor": None, "quantization_config": None}
PLAIN_ROPE = {"rope_type": "default"}
PARTS = {  # our layer: theirs, whose rows lie one below the other
    "wte": ["embed_tokens"], "ln_f": ["norm"], "ln_1": ["input_layernorm"], "ln_2": ["post_attention_layernorm"],
    "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "attn.c_proj": ["self_attn.o_proj"],
    "attn.q_norm": ["self_attn.q_norm"], "attn.k_norm": ["self_attn.k_norm"],
    "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"], "mlp.c_proj": ["mlp.down_proj"]}


def config_from(hf):
    """The LlamaConfig that a config.json describes. BadInput names the key."""
    kind = hf["model_type"]
    check_fixed(hf, FIXED)
    layers = hf.get("layer_types") or []
    reject(not isinstance(layers, list) or any(layer != "full_attention" for layer in layers),
           f"layer_types is {layers!r}, only 'full_attention' is supported")
    sizes = {field: hf.get(key, DEFAULTS[kind][key]) for field, key in KEYS.items()}
    for field in "n_kv_head", "head_size":  # null: as many as of queries, C/H
        reject(sizes[field] == 0, f"{KEYS[field]} {sizes[field]!r} must be null or at least 1")
        sizes[field] = 0 if sizes[field] is None else sizes[field]
    sizes |= {"rope_theta": theta_of(hf), "qk_norm": kind == "qwen3", "qkv_bias": kind == "qwen2"}
    config = LlamaConfig(**sizes)
    check_sizes(config, lambda field: KEYS.get(field, field))
    same = config.head_size * config.n_head == config.n_embd
    return replace(config, head_size=0) if same else config


def theta_of(hf):
    """rope_theta, which transformers 5 writes into rope_parameters."""
    rope = hf.get("rope_parameters") or {}
    reject(not isinstance(rope, dict), f"rope_parameters {rope!r} must be null or an object")
    others = {key: value for key, value in rope.items() if key != "rope_theta"}
    reject(others not in ({}, PLAIN_ROPE), f"rope_parameters is {rope!r}: only rope_type 'default' is supported")
    theta = rope.get("rope_theta", hf.get("rope_theta", 10000.0))
    return float(theta) if type(theta) is int and theta < 2**63 else theta


def hf_config(config):
    """What config.json says beside what every model's says."""
    reject(config.experts, "a Llama with experts has no name in transformers")
    reject(config.qk_norm and config.qkv_bias, "a model with biases and norms of heads has no name in transformers")
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    sizes = {key: getattr(config, field) for field, key in KEYS.items()}
    sizes |= {"max_position_embeddings": config.max_positions or config.seq_len}
    sizes |= {"num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "intermediate_size": config.hidden}
    fixed = {key: value for key, value in FIXED.items() if value is not None}
    return {"model_type": kind, "architectures": [ARCHITECTURES[kind]], **fixed, **sizes,
            "rope_theta": config.rope_theta, "rope_parameters": {"rope_theta": config.rope_theta, **PLAIN_ROPE}}


def parts_of(config, name):
    """{what a folder calls a part of our parameter: its shape}."""
    layer, _, leaf = name.rpartition(".")
    shape = shapes_of_all(config)[name]
    if layer == "lm_head":
        return {name: shape}
    heads = config.heads_width
    keys = config.kv_heads * config.head_dim
    rows = {"c_attn": [heads, keys, keys], "c_fc": 2 * [shape[0] // 2]}.get(layer.rpartition(".")[2], shape[:1])
    prefix = "model."
    if layer.startswith("h."):
        _, number, layer = layer.split(".", 2)
        prefix = f"model.layers.{number}."
    return {f"{prefix}{part}.{leaf}": (n, *shape[1:]) for part, n in zip(PARTS[layer], rows)}
