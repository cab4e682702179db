"""A DeepSeek-V2-Lite, and a V3 of its sizes, are transformers' own; their folders; what is refused.

    python -m tests.deepseek    prints NUMBERS again, where transformers is installed
"""

import json
import tempfile

import pytest
import torch

from safe.files import write_safetensors
from safe.huggingface import load, open_hf, save
from tests.llama import numbers_of, opened, weight, X
from tests.pool import close, parametrize

SIZES = dict(vocab_size=37, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=10,
             rms_norm_eps=1e-3, kv_lora_rank=12, q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
             intermediate_size=48, rope_theta=1000.0, tie_word_embeddings=False)
EXPERTS = dict(moe_intermediate_size=20, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
               first_k_dense_replace=1, routed_scaling_factor=1.0)
KINDS = {  # V2-Lite's config.json at a tiny size; V3's; V2's with no experts
    "lite": {"model_type": "deepseek_v2", **EXPERTS, "norm_topk_prob": False, "topk_method": "greedy", "n_group": 1,
             "topk_group": 1, "scoring_func": "softmax", "moe_layer_freq": 1, "attention_bias": False},
    "v3": {"model_type": "deepseek_v3", **EXPERTS, "norm_topk_prob": True, "n_group": 3, "topk_group": 2},
    "dense": {"model_type": "deepseek_v2", "first_k_dense_replace": 2}}

# What transformers 5.24 computes in float64: four logits, and the losses of twelve steps. Its norms, angles and routers
# compute in float32.
NUMBERS = {
    "lite": """
        0.253750113896393 -0.228243361861158 0.165112084150406 -0.0747630867267833
        3.63840704474952 3.52571211300897 3.4196877288607 3.32353634809427
        3.23818645796544 3.13818026367923 3.03709596507257 2.94197706828122
        2.85203593587586 2.7666614950868 2.68242929267605 2.59876387194347""",
    "v3": """
        0.254088723149842 -0.228225663583942 0.164740995795544 -0.074099779945541
        3.64214892796467 3.52462611198928 3.41945671809862 3.32380849368253
        3.23685045733634 3.14319722990209 3.04291436624811 2.96127216142503
        2.87952221693142 2.79433504587022 2.70608205641684 2.6301747515324""",
    "dense": """
        0.253963411188314 -0.228462110819929 0.165300225344775 -0.0748896062287196
        3.6117725318038 3.52272855945644 3.42191098705011 3.31920797792617
        3.21264627058425 3.09832137775402 2.97351506688735 2.86134245177558
        2.76500233886733 2.67235506701153 2.57979518602421 2.47908790317252""",
}


def write_folder(folder, kind, **change):
    """A folder with DeepSeek's names, in float64."""
    config = {**SIZES, **KINDS[kind], **change}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    C = 32

    def mlp(prefix, inner):
        return {f"{prefix}.gate_proj.weight": (inner, C), f"{prefix}.up_proj.weight": (inner, C),
                f"{prefix}.down_proj.weight": (C, inner)}

    names = {"model.embed_tokens.weight": (37, C), "model.norm.weight": (C,), "lm_head.weight": (37, C)}
    for i in range(2):
        layer = {"input_layernorm.weight": (C,), "post_attention_layernorm.weight": (C,),
                 "self_attn.q_proj.weight": (4 * 12, C), "self_attn.kv_a_proj_with_mqa.weight": (12 + 4, C),
                 "self_attn.kv_a_layernorm.weight": (12,), "self_attn.kv_b_proj.weight": (4 * 16, 12),
                 "self_attn.o_proj.weight": (C, 32)}
        if i < config["first_k_dense_replace"]:
            layer |= mlp("mlp", 48)
        else:
            layer |= {"mlp.gate.weight": (6, C), **mlp("mlp.shared_experts", 40)}
            layer |= {"mlp.gate.e_score_correction_bias": (6,)} if kind == "v3" else {}
            for e in range(6):
                layer |= mlp(f"mlp.experts.{e}", 20)
        names |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    write_safetensors(folder / "model.safetensors", torch.float64, names,
                      ((name, weight(name, shape)) for name, shape in names.items()))
    return names


def numbers_of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    return numbers_of(net, lambda output: output.logits)


@parametrize("kind", KINDS)
def test_a_deepseek_is_transformers_deepseek(tmp_path, kind):
    """From a folder: logits, and twelve steps under PyTorch's AdamW. What we write is the same folder again."""
    _, net = opened(tmp_path, write_folder(tmp_path, kind))
    found = numbers_of(net, lambda logits: logits)
    assert close(found, [*map(float, NUMBERS[kind].split())], 1e-6)


@parametrize("kind", KINDS)
def test_transformers_reads_our_deepseek(tmp_path, kind):
    """A folder that came, and one of a model that came from none. (A router in float32 rounds as its CPU does.)"""
    transformers = pytest.importorskip("transformers")
    write_folder(tmp_path, kind)
    assert close(numbers_of_transformers(tmp_path), [*map(float, NUMBERS[kind].split())], 1e-7)
    net = load(tmp_path)
    save(net, tmp_path / "ours")
    del net.came
    save(net, tmp_path / "new")
    for folder in "ours", "new":
        hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
        with torch.no_grad():
            assert (hf(X).logits - net(X)).abs().max() < 1e-5


@parametrize("change, words", [
    ({"q_lora_rank": 16}, "q_lora_rank is 16, only None is supported"),
    ({"rope_scaling": {"type": "yarn", "factor": 40}}, "rope_scaling is {'type': 'yarn'"),
    ({"v_head_dim": 16}, "v_head_dim 16 is not qk_nope_head_dim 8: only equal ones are supported"),
    ({"n_group": 2}, "n_group is 2, only 1 is supported"),
    ({"topk_method": "group_limited_greedy"}, "topk_method is 'group_limited_greedy'"),
    ({"norm_topk_prob": True}, "norm_topk_prob is True, only False is supported"),
    ({"num_experts_per_tok": 7}, "n_routed_experts 6 is less than the 7"),
    ({"qk_rope_head_dim": 3}, "qk_rope_head_dim 3 makes rotary keys of 3 numbers"),
    ({"first_k_dense_replace": 0}, "which config.json asks for")], ids=str)
def test_what_a_deepseek_here_cannot_be_is_refused(tmp_path, change, words):
    names = write_folder(tmp_path, "lite")
    assert names
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError) as error:
        open_hf(tmp_path)
    assert words in str(error.value) and "\n" not in str(error.value)


if __name__ == "__main__":
    import pathlib
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            write_folder(pathlib.Path(folder), kind)
            print(kind, *(f"{number:.15g}" for number in numbers_of_transformers(folder)))
