"""A Llama is transformers' Llama; its folders; what is refused.

    python -m tests.llama    prints NUMBERS again, where transformers is installed
"""

import json
import math
import os
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import model
import safe.huggingface
import train
from further.flags import LLAMAS
from further.kinds import resized
from further.llama import PRESETS, LlamaConfig
from further.sampling import CachedGPT
from further.folder import read_safetensors, write_safetensors
from safe.huggingface import came_with, changes, load, open_hf, save, shortened
from tests.pool import close, parametrize
from tests.runs import ran


SIZES = dict(vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=10, rms_norm_eps=1e-3)
KINDS = {"llama": dict(rope_theta=1000.0, tie_word_embeddings=False),
         "qwen2": dict(rope_theta=10000.0, tie_word_embeddings=True),
         "qwen3": dict(rope_theta=20000.0, tie_word_embeddings=False, head_dim=12)}
X = torch.arange(40).view(4, 10) * 7 % 37
Y = (X * 3 + 1) % 37

# What transformers 5.24 computes in float64: four logits, and the losses of twelve steps. (kind, whether its norms and
# angles, which it computes in float32, are in float64, too)
NUMBERS = {
    ("llama", True): """
        0.036355900698413 0.189489816405002 -0.384099293363515 0.515392345225332 3.6465990023396
        3.54785409412415 3.48585765968365 3.41863985567307 3.34077327129354 3.27351475179119
        3.20462533636704 3.16432053153305 3.11775946061484 3.06651566926829 3.02196423644149
        2.98414590559092""",
    ("llama", False): """
        0.0363559068647539 0.189489815205882 -0.384099297329283 0.515392353702256 3.64659899509372
        3.5478540901499 3.48585766333928 3.4186398566503 3.34077325920441 3.27351476947851
        3.20462531729421 3.16432041316189 3.11775978726039 3.06651582131427 3.02196428057261
        2.98414615232251""",
    ("qwen2", True): """
        -0.528615387749829 0.489286761144941 -0.369302197135014 0.18844041906362 3.71622010698335
        3.61597770041616 3.56665715812177 3.52846673652681 3.49272428514207 3.45724623464648
        3.4210389724302 3.3832213902587 3.34306697678878 3.30452894401559 3.26501966685373
        3.22194000484473""",
    ("qwen2", False): """
        -0.528615423334222 0.489286779980359 -0.369302196116552 0.188440398359165 3.71622011410355
        3.61597769847858 3.56665716117996 3.52846673235855 3.49272427447802 3.45724623085946
        3.42103896510758 3.38322139493287 3.34306697508311 3.30452893566919 3.26501965312058
        3.22193999626241""",
    ("qwen3", True): """
        -0.105449519901369 0.779678090823898 -1.32538148533983 1.6526038282344 4.07472619533873
        3.67318135522904 3.58664932557471 3.55964453237467 3.53555692949686 3.48853727603963
        3.4498866170109 3.42605467507509 3.38787506834437 3.34418137930475 3.31103592186374
        3.27526513241971""",
    ("qwen3", False): """
        -0.105449506659102 0.779678031183888 -1.32538138913337 1.65260371132053 4.07472618027815
        3.67318133804018 3.58664931609932 3.55964453720418 3.53555692386754 3.48853726941676
        3.4498866093117 3.42605468504317 3.38787506796875 3.34418137876104 3.31103590847308
        3.27526512700431""",
}


def weight(name, shape):
    """A weight that no random generator decides."""
    where = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    wave = torch.sin(where * 0.7 + zlib.crc32(name.encode()) % 1000)
    return wave * 0.2 + (len(shape) == 1 and name.endswith("weight"))


def numbers_of(net, logits):
    """Four logits, and twelve steps of AdamW."""
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    found = logits(net(X))[1, 7, :4].tolist()
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(logits(net(X)).flatten(0, 1), Y.flatten())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def numbers_of_transformers(kind, exact):
    transformers = pytest.importorskip("transformers")
    rest = {key: value for key, value in KINDS[kind].items() if key != "rope_theta"}
    theta, name = KINDS[kind]["rope_theta"], kind.capitalize()
    config = getattr(transformers, name + "Config")(**SIZES, **rest, rope_parameters={
        "rope_theta": theta, "rope_type": "default"})
    net = getattr(transformers, name + "ForCausalLM")(config).double()
    for name, p in net.named_parameters():
        p.data = weight(name, tuple(p.shape))

    def angles(x, position_ids):
        dim = rest.get("head_dim", 8)
        both = position_ids[..., None].double() * theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        both = torch.cat([both, both], -1)
        return both.cos(), both.sin()

    for module in net.modules() if exact else ():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, norm=module: F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = angles
    return numbers_of(net, lambda output: output.logits)


def write_folder(folder, kind, **change):
    """A folder as transformers writes it, sizes changed, in float64."""
    config = {"model_type": kind, **SIZES, **KINDS[kind], **change}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    heads, keys, C, V, D, inner = 4, 2, 32, 37, config.get("head_dim", 8), 48
    layer = {"input_layernorm.weight": (C,), "post_attention_layernorm.weight": (C,),
             "self_attn.q_proj.weight": (heads * D, C), "self_attn.k_proj.weight": (keys * D, C),
             "self_attn.v_proj.weight": (keys * D, C), "self_attn.o_proj.weight": (C, heads * D),
             "mlp.gate_proj.weight": (inner, C), "mlp.up_proj.weight": (inner, C), "mlp.down_proj.weight": (C, inner)}
    if kind == "qwen2":
        layer |= {f"self_attn.{x}_proj.bias": (n * D,) for x, n in (("q", heads), ("k", keys), ("v", keys))}
    if kind == "qwen3":
        layer |= {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
    names = {"model.embed_tokens.weight": (V, C), "model.norm.weight": (C,),
             **{f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}}
    if not config["tie_word_embeddings"]:
        names["lm_head.weight"] = V, C
    write_safetensors(folder / "model.safetensors", torch.float64, names,
                      ((name, weight(name, shape)) for name, shape in names.items()))
    return names


def opened(folder, names):
    """(config, GPT in float64) of a folder with these names. What we write of it must be the same folder again."""
    config, source = open_hf(folder)
    net = model.GPT(config, seed=None)
    model.materialize(net, source, dtype=torch.float64)
    theirs = read_safetensors(folder / "model.safetensors")
    save(load(folder), folder / "ours")
    ours = read_safetensors(folder / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys() == names.keys() and load(folder / "ours").config == config
    assert all(ours[name].equal(theirs[name].float()) for name in names)
    return config, net


@parametrize("kind", KINDS)
def test_a_llama_is_transformers_llama(tmp_path, kind):
    """From a folder: logits, and twelve steps under PyTorch's AdamW. What we write is the same folder again."""
    config, net = opened(tmp_path, write_folder(tmp_path, kind))
    assert sum(map(math.prod, model.shapes(config).values())) == config.parameters()
    found = numbers_of(net, lambda logits: logits)
    for exact, tolerance in (True, 1e-12), (False, 1e-6):
        want = [*map(float, NUMBERS[kind, exact].split())]
        assert close(torch.tensor(found), torch.tensor(want), tolerance)


@parametrize("kind", [*KINDS, "gpt2"])
def test_a_head_beside_a_tied_config_is_what_transformers_makes_of_it(tmp_path, kind):
    """One with other numbers than the embedding is not tied to it. A body is called by shorter names."""
    if kind == "gpt2":
        save(model.GPT(model.GPTConfig(37, 10, 2, 2, 32)), tmp_path)
    else:
        write_folder(tmp_path, kind, tie_word_embeddings=True)
    name = "transformer.wte.weight" if kind == "gpt2" else "model.embed_tokens.weight"
    file, tied = tmp_path / "model.safetensors", load(tmp_path)(X)
    tensors = {key: t.clone() for key, t in read_safetensors(file).items()}

    def loaded(tensors):
        write_safetensors(file, torch.float32, {key: [*t.shape] for key, t in tensors.items()}, iter(tensors.items()))
        return load(tmp_path)

    assert loaded({**tensors, "lm_head.weight": tensors[name]})(X).equal(tied)
    other = loaded({**tensors, "lm_head.weight": 2 * tensors[name]})
    assert not other.config.tied and close(other(X).detach(), 2 * tied.detach(), 1e-5)
    body = loaded({key.partition(".")[2]: t for key, t in tensors.items()})
    assert body(X).equal(tied) and body.config.tied


def test_what_came_with_weights_goes_out_with_them(tmp_path):
    """Files, and keys that nobody here knows, whatever --seq-len was: when the run goes on, too. What changes is said.
    Not all of a long context is taken unasked."""
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    write_folder(theirs, "qwen3", max_position_embeddings=3000)
    path = theirs / "config.json"
    came = json.loads(path.read_text()) | {"bos_token_id": None, "eos_token_id": [2, 3], "of_somebody": {"a": [1]}}
    path.write_text(json.dumps(came))
    files = {"LICENSE": b"free", "tokenizer.json": b"[]"}
    (np.arange(4000) % 37).astype(np.uint16).tofile(tmp_path / "x.bin")
    for name in (*files, "pytorch_model.bin", ".hidden"):
        (theirs / name).write_bytes(files.get(name, b"stays"))
    flags = f"--device cpu --eval-every 0 --sample 0 --data {tmp_path}/x.bin --batch-size 1"
    new = f"--init-from {theirs} --steps 1"
    assert "sequences of 2048 a step" in (said := ran(f"{flags} {new}".split(), 1, tmp_path / "log"))
    assert "the model knows 3,000 positions, --seq-len takes more" in said and "export" not in said
    for more in f"--seq-len 8 {new}", "--steps 2 --resume":
        said = ran(f"{flags} --out {out} {more}".split(), 1, tmp_path / "log")
    assert f"export   {', '.join(files)}\n" in said
    for folder in out / "step-00000001", out / "step-00000002":
        assert json.loads((folder / "config.json").read_text()) == came | {
            "torch_dtype": "float32", "architectures": ["Qwen3ForCausalLM"]}
        assert {name: (folder / name).read_bytes() for name in files} == files
        assert not {"pytorch_model.bin", ".hidden"} & {*os.listdir(folder)}


def test_what_a_run_changes_in_config_json_is_named(tmp_path, monkeypatch):
    """A GPT-2's positions are cut, and its keys keep their names."""
    save(model.GPT(model.GPTConfig(37, 10, 1, 2, 32)), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"n_positions"', '"max_position_embeddings"'))
    came = came_with(tmp_path).config
    monkeypatch.setattr(safe.huggingface, "MOST_KEPT", path.stat().st_size)
    (tmp_path / "large.txt").write_bytes(bytes(path.stat().st_size + 1))
    assert came_with(tmp_path).left_out == {"large.txt": "too large"} and not came_with(tmp_path).files
    config, _ = shortened(*open_hf(tmp_path), 4)
    assert changes(config, torch.float64, came) == {"max_position_embeddings": 4, "dtype": "float64"}


@parametrize("kind", KINDS)
def test_transformers_reads_our_llama(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    for exact in True, False:
        assert close(numbers_of_transformers(kind, exact), [*map(float, NUMBERS[kind, exact].split())], 1e-9)
    write_folder(tmp_path, kind)
    net = load(tmp_path)
    save(net, tmp_path / "ours")
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        assert (hf(X).logits - net(X)).abs().max() < 1e-5


@parametrize("change, words", [
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling is {'rope_type': 'llama3'"),
    ({"attention_bias": True}, "attention_bias is True, only False is supported"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "only 'full_attention'"),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide the 4 heads of num_attention_heads: "
                                 "give num_key_value_heads 2 or 4"),
    ({"rope_theta": 0}, "rope_theta 0.0 must be above 0"),
    ({"model_type": "mistral"}, "nor of one of llama, qwen2, qwen3"),
    ({"intermediate_size": 40}, "gate_proj.weight is (48, 32), config.json makes it (40, 32)")], ids=str)
def test_what_a_llama_here_cannot_be_is_refused(tmp_path, change, words):
    write_folder(tmp_path, "qwen3", **change)
    with pytest.raises(ValueError) as error:
        open_hf(tmp_path)
    assert words in str(error.value) and "\n" not in str(error.value)


@parametrize("change", [{}, {"qk_norm": True, "head_size": 6, "n_kv_head": 0}], ids=str)
def test_a_llama_samples_with_a_cache(change):
    """As without one, past the end of the context, too."""
    llama = LlamaConfig(**{"vocab_size": 37, "seq_len": 10, "n_layer": 2, "n_embd": 32, "n_kv_head": 2})
    config = resized(llama, **change)
    start = torch.tensor([[1, 2], [3, 4]])
    plain, cached = (kind(config).double().generate(start, 15, seed=1) for kind in (model.GPT, CachedGPT))
    assert plain.equal(cached) and plain.shape == (2, 17)


def test_sizes_of_presets():
    """Two are published."""
    assert 1.1e9 < PRESETS["1b"].parameters() < 1.3e9 and {*LLAMAS} == PRESETS.keys() - {"tiny"}
    assert PRESETS["llama3-8b"].parameters() == 8_030_261_248 and PRESETS["qwen3-0.6b"].parameters() == 596_049_920
    assert train.config_of(train.Flags(model="cs336-8b", inner=64)) == replace(PRESETS["cs336-8b"], inner=64)


if __name__ == "__main__":
    for kind, exact in NUMBERS:
        print(kind, exact, *(f"{number:.15g}" for number in numbers_of_transformers(kind, exact)))
