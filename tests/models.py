"""The model and Hugging Face's folders."""

import itertools
import json
import math
import re

import pytest
import torch
from torch import nn

import model
import further.folder
import safe.huggingface
from further.kinds import resized
from further.folder import read_safetensors, write_safetensors
from safe.huggingface import load, save
from tests.pool import parametrize


# ---------------------------------------------------------------------------------------------------------------- model

TOKENS = torch.arange(20).view(2, 10)


def small(seed=3, pieces=None, **change):
    return model.GPT(resized(model.GPTConfig(37, 10, 2, 4, 16), **change), seed, pieces)


def test_sizes_are_the_model_s():
    for c in model.PRESETS.values():
        in_blocks = c.n_layer * (12 * c.n_embd**2 + 13 * c.n_embd)
        assert c.parameters() == in_blocks + (c.vocab_size + c.seq_len + 2) * c.n_embd
        assert c.flops_per_token() == (6 * (c.parameters() - c.seq_len * c.n_embd)
                                       + 12 * c.n_layer * c.n_embd * c.seq_len)
    assert model.PRESETS["gpt2"].parameters() == 124_439_808  # as published
    assert 0.5e6 < model.PRESETS["tiny"].parameters() < 2e6
    assert model.GPTConfig(n_embd=12).hidden == 48


def test_initial_weights_depend_on_seed_and_name_alone():
    whole, part = small(), small(pieces=range(2, 4))
    for name, p in part.named_parameters():
        assert torch.equal(p, whole.get_parameter(name)), name
    assert "wte.weight" not in dict(part.named_parameters()) and part.lm_head.weight.equal(whole.wte.weight)
    assert not small(seed=6).wte.weight.equal(whole.wte.weight)
    assert whole.get_parameter("h.0.mlp.c_proj.weight").std() < 0.6 * whole.get_parameter("h.0.mlp.c_fc.weight").std()


def test_generate():
    net = small().double()
    start = torch.tensor([[1, 2], [3, 4]])
    out = net.generate(start, 15, seed=1)  # longer than the context
    assert out.shape == (2, 17) and out[:, :2].equal(start) and out.max() < 37
    assert out.equal(net.generate(start, 15, seed=1)) and not out.equal(net.generate(start, 15, seed=2))
    greedy = net.generate(start, 5, temperature=0)
    assert greedy.equal(net.generate(start, 5, top_k=1)) and greedy[:, 2].equal(net(start)[:, -1].argmax(-1))
    with pytest.raises(ValueError, match="11 tokens are more than the 10 positions"):
        net(torch.zeros(1, 11, dtype=torch.int64))


def tensors_of(net):
    """{name in a folder: tensor}. Buffers, the routers' biases, are kept beside parameters; each expert has a name."""
    found = {}
    for name, t in [*net.named_parameters(), *net.named_buffers()]:
        name = name if name == "lm_head.weight" else f"transformer.{name}"
        each = {name.replace("experts.", f"experts.{e}."): one for e, one in enumerate(t)}
        found |= each if "experts." in name else {name: t}
    return {name: t.t() if name.endswith(further.folder.TRANSPOSED) else t for name, t in found.items()}


CHANGES = [{}, {"tied": False}, {"inner": 24}, {"activation": "elu"}, {"experts": 3, "expert_every": 2}]


@parametrize("change", CHANGES, ids=str)
def test_hugging_face_folder_round_trip(tmp_path, change):
    net = small(**change)
    for name, bias in net.named_buffers():
        bias += torch.tensor([0.1, -0.3, 0.2])
    save(net, tmp_path)
    again, written, ours = load(tmp_path), read_safetensors(tmp_path / "model.safetensors"), tensors_of(net)
    assert again.config == net.config and again(TOKENS).equal(net(TOKENS))
    assert written.keys() == ours.keys() and all(written[name].equal(t) for name, t in ours.items())


def in_shards(folder, net):
    """Save a model in two files with an index. Returns the index's map."""
    save(net, folder)
    tensors = read_safetensors(folder / "model.safetensors")
    shards = {name: f"model-0000{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in {*shards.values()}:
        mine = {name: t for name, t in tensors.items() if shards[name] == shard}
        write_safetensors(folder / shard, torch.float32, {name: [*t.shape] for name, t in mine.items()},
                          iter(mine.items()))
    (folder / "model.safetensors").unlink()
    return shards


def test_files_that_are_not_the_model_s_are_not_read(tmp_path):
    """The index decides which are, and model.safetensors before it, as in transformers. Sizes may have either name."""
    net, index, path = small(), tmp_path / "model.safetensors.index.json", tmp_path / "config.json"
    shards = in_shards(tmp_path, net)
    config = path.read_text()
    for key, name in safe.huggingface.ALSO_CALLED.items():
        config = config.replace(f'"{key}"', f'"{name}"')
    path.write_text(config)
    others = tmp_path / "others.safetensors"  # what some programs save beside weights
    write_safetensors(others, torch.int32, {"position_ids": [4]}, iter([("position_ids", torch.arange(4))]))
    index.write_text(json.dumps({"weight_map": shards | {"position_ids": others.name}}))
    assert load(tmp_path)(TOKENS).equal(net(TOKENS))
    config, source = safe.huggingface.shortened(*safe.huggingface.open_hf(tmp_path), 4)
    assert source("wpe.weight").equal(net.wpe.weight[:4]) and config.seq_len == 4 and config.inner == net.config.inner
    other = small(seed=4)
    save(other, tmp_path)  # beside the shards
    assert load(tmp_path)(TOKENS).equal(other(TOKENS))


def test_weights_that_are_not_read_here_are_refused(tmp_path):
    """Quantized ones are numbers without their scales."""
    save(small(), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors, written = read_safetensors(path), path.read_bytes()
    path.write_bytes(written.replace(b'"F32"', b'"C64"', 1))
    with pytest.raises(ValueError, match="in C64, which is not read here"):
        load(tmp_path)
    write_safetensors(path, torch.int8, {name: [*t.shape] for name, t in tensors.items()}, iter(tensors.items()))
    with pytest.raises(ValueError, match="in torch.int8: give a folder whose weights are not quantized"):
        load(tmp_path)


def test_transformers_reads_and_writes_the_same_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    hf = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=131, n_positions=37, n_embd=36, n_layer=3,
                                                              n_head=3)).eval()
    for p in hf.parameters():
        nn.init.normal_(p, 0, 0.3)
    hf.save_pretrained(tmp_path / "theirs")
    net, tokens = load(tmp_path / "theirs"), torch.arange(58).view(2, 29) % 131
    with torch.no_grad():
        assert (hf(tokens).logits - net(tokens)).abs().max() < 1e-5
        save(net, tmp_path / "ours")
        again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()
        assert (again(tokens).logits - net(tokens)).abs().max() < 1e-5


LEFT_OUT = object()
HF_VALUES = [LEFT_OUT, None, True, False, 0, 1, -1, 2, 3, 16, 1.5, -0.5, 1e400, math.nan, 10**9, 2**31, 2**40, 2**63,
             10**400, "", "x", "4", "gelu", "relu", "é\n", [], [1], {}, {"a": [1]}, [[]] * 3]


@parametrize("experts", [0, 2])
def test_wrong_values_in_a_config_json_are_named(tmp_path, experts):
    """Each key with each value: the folder loads, or one ValueError names the file and the key, at once."""
    save(small(experts=experts), tmp_path)
    path, refused = tmp_path / "config.json", 0
    config = json.loads(path.read_text())
    keys = """vocab_size n_positions n_embd n_layer n_head n_inner activation_function layer_norm_epsilon
        tie_word_embeddings model_type""" + " num_experts num_experts_per_tok decoder_sparse_step" * (experts > 0)
    for key, value in itertools.product([*keys.split(), *further.folder.FIXED], HF_VALUES):
        path.write_text(json.dumps({name: old for name, old in config.items() if name != key}
                                   | ({} if value is LEFT_OUT else {key: value})))
        try:
            load(tmp_path)
        except ValueError as error:
            refused += 1
            assert re.fullmatch(rf"{tmp_path}/(config.json|model.safetensors): .*{key}.*", str(error)), (key, value)
        else:
            may_load = value is LEFT_OUT or repr(value) in (repr(config[key]), "1", "2", "16", "True", "False", "None")
            assert may_load, (key, value)
    assert refused > 300
