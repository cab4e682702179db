"""A GPT-2, a Llama, a Qwen 2 or 3 as a Hugging Face folder: `load(folder)`, `save(model, folder)`.

further/folder.py says what such a folder calls our tensors. Here is what others' folders may say instead."""

import contextlib
import json
import math
import os
import pathlib
import re
from dataclasses import fields, replace
from typing import NamedTuple

import torch

from further.fits import misfit, what_sizes_divide
from further.folder import (
    ARCHITECTURES, FIXED, hf_config, is_llama, KEYS, keys_of, LLAMAS_FIXED, LLAMAS_KEYS, NO_IDS,
    OF_EXPERTS, PLAIN_ROPE, read_safetensors, shapes_there, source_of, WITH_EXPERTS, write_folder)
from further.kinds import resized
from further.llama import LlamaConfig
from model import GPT, GPTConfig, materialize, shapes_of_all
from safe.files import is_ours
from further.bad_input import BadInput, reject

ALSO_CALLED = {"n_positions": "max_position_embeddings", "n_embd": "hidden_size", "n_layer": "num_hidden_layers",
               "n_head": "num_attention_heads"}  # names that transformers takes, too, and first
MAY_BE_MISSING = {  # from files of others, and what transformers takes then; the head's tie: as a GPT-2's, a Llama's
    "n_inner": None, "num_experts": 0, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "n_shared_experts": 0,
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new", "hidden_act": "silu"}
OURS_ALONE = {**FIXED, "n_group": 1}  # our model has these values; a config.json with others is refused
OURS_ALONE_OF_LLAMAS = {
    **LLAMAS_FIXED, "rope_scaling": None, "partial_rotary_factor": None, "quantization_config": None}
OURS_OF_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "elu": "elu"}


def load(folder):
    """Load a Hugging Face folder of a GPT-2, a Llama, a Qwen 2 or 3, config.json with model.safetensors, in
    float32 on the CPU.

    Raises BadInput, a ValueError that names the file, if it is another model, if a name or shape is wrong, if it is cut
    short.
    """
    config, source = open_hf(folder)
    model = GPT(config, seed=None)
    materialize(model, source)
    model.came = came_with(folder)
    return model


def save(model, folder):
    """Write the model as a Hugging Face folder, which transformers' from_pretrained can read. With a model from `load`
    go the other files of its folder and all keys of its config.json."""
    tensors = model.state_dict()
    came = getattr(model, "came", NOTHING)
    write_folder(folder, model.config, ((name, tensors[name]) for name in shapes_of_all(model.config)), torch.float32,
                 config_json(model.config, torch.float32, came.config), came.files)


# --------------------------------------------------------------------------------------------------------------- read

def open_hf(folder):
    """(config, source) of a Hugging Face folder: source(name) is a parameter. BadInput names a faulty file."""
    config, hf = read_config(folder)
    tensors = {}
    where = {}
    for file in weight_files(folder):
        found = {long_name(config, name): tensor for name, tensor in read_safetensors(file).items()}
        tensors |= found
        where |= dict.fromkeys(found, file)
    config = with_the_head_there(config, tensors)
    said = ", ".join(f"{key} {getattr(config, field)}" for field, key in keys_there(config, hf).items())
    for name, shape in expected(config):
        at = where.get(name, file)
        reject(name not in tensors, f"{at}: has no {name}, which config.json asks for ({said})")
        tensor = tensors[name]
        is_known = isinstance(tensor, torch.Tensor)
        reject(is_known and tuple(tensor.shape) != shape,
               f"{at}: {name} is {tuple(getattr(tensor, 'shape', ()))}, config.json makes it {shape} ({said})")
        reject(not is_known or not tensor.is_floating_point(), f"{at}: {name} is in {getattr(tensor, 'dtype', tensor)}"
               f"{', which is not read here' * (not is_known)}: give a folder whose weights are not quantized")
    return config, source_of(config, tensors)


def read_config(folder):
    """(config, contents) of a folder's config.json."""
    path = pathlib.Path(folder, "config.json")
    try:
        hf = json.loads(path.read_text("utf-8-sig"))
        return config_from(hf), hf
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: {error}") from None


def long_name(config, name):
    """What a model with a head calls a tensor. A body alone, as GPT2Model and LlamaModel are saved, leaves out the
    beginning."""
    prefix = "model." if is_llama(config) else "transformer."
    return name if name.startswith((prefix, "lm_head.")) else prefix + name


def with_the_head_there(config, tensors):
    """The config of these tensors. As in transformers, a head that has other numbers than the embedding is not tied to
    it, whatever config.json says. A head without an embedding is both."""
    head = tensors.get("lm_head.weight")
    if not config.tied or not isinstance(head, torch.Tensor):
        return config
    embedding = tensors.setdefault(long_name(config, "embed_tokens.weight" if is_llama(config) else "wte.weight"), head)
    tied = isinstance(embedding, torch.Tensor) and embedding.shape == head.shape and (embedding == head).all()
    return replace(config, tied=bool(tied))


def weight_files(folder):
    """The .safetensors files that transformers takes: model.safetensors, or else those that its index names."""
    folder = pathlib.Path(folder)
    name = "model.safetensors"
    index = folder / f"{name}.index.json"
    files = [folder / name]
    named_by = "which transformers' save_pretrained writes"
    if index.exists() and not files[0].exists():
        try:
            files = [folder / shard for shard in sorted(
                     {*json.loads(index.read_text("utf-8-sig"))["weight_map"].values()})]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadInput(f"{index}: no index of weights ({error})") from None
        named_by = f"which {index.name} names; give all files of the folder"
    for file in files:
        reject(not file.exists(), f"{folder}: holds no {file.name}, {named_by}")
    return files


def expected(config):
    """(name, shape there) of all tensors. First come the sizes that a damaged config.json may make so large that
    `shapes_there` would not end."""
    first_norm = "model.layers.{}.input_layernorm.weight" if is_llama(config) else "transformer.h.{}.ln_1.weight"
    yield first_norm.format(config.n_layer - 1), (config.n_embd,)
    if config.experts:
        yield f"transformer.h.{config.expert_every - 1}.mlp.router.weight", (config.experts, config.n_embd)
    yield from shapes_there(config).items()


def shortened(config, source, seq_len):
    """config and source of the same model for shorter sequences. A GPT-2 is left with the first positions. Rotary ones
    are no weights, so a Llama's folder goes on to name all that the model knows."""
    def first(name):
        return source(name)[:seq_len] if name == "wpe.weight" else source(name)

    known = {"max_positions": config.max_positions or config.seq_len} if config.arch == "llama" else {}
    return replace(config, seq_len=seq_len, **known), first


# ---------------------------------------------------------------------------------------------------------- config.json

def keys_there(config, hf):
    """{field: what this config.json calls it} of the fields that such a config has."""
    keys = keys_of(config)
    return keys if is_llama(config) else {field: key_of(hf, key) for field, key in keys.items()}


def key_of(hf, key):
    return ALSO_CALLED[key] if ALSO_CALLED.get(key) in hf else key


def config_from(hf):
    """The GPTConfig that a config.json describes. BadInput names the key."""
    kind = hf.get("model_type", "gpt2") if isinstance(hf, dict) else None
    reject(kind not in ["gpt2", WITH_EXPERTS, *ARCHITECTURES],
           "not the config of a GPT-2 (model_type is not 'gpt2'), nor of one of " + ", ".join(ARCHITECTURES))
    if kind in ARCHITECTURES:
        return llama_from(hf, kind)
    experts = hf.get("num_experts")
    reject((kind == WITH_EXPERTS) != bool(experts), f"model_type {kind!r} with num_experts {experts!r}: only "
           f"{WITH_EXPERTS!r} has num_experts, and at least 1")
    check_fixed(hf, OURS_ALONE)
    hf = {"tie_word_embeddings": True} | MAY_BE_MISSING | hf
    sizes = {field: value_of(hf, key_of(hf, key)) for field, key in (KEYS | OF_EXPERTS).items()}
    name = sizes["activation"]
    reject(name not in [*OURS_OF_ACTIVATIONS],
           f"activation_function is {name!r}, not one of {', '.join(OURS_OF_ACTIVATIONS)}")
    sizes |= {"activation": OURS_OF_ACTIVATIONS[name], "inner": null_for_0(sizes["inner"], "n_inner")}
    config = resized(GPTConfig(), **sizes)
    check_sizes(config, lambda field: key_of(hf, (KEYS | OF_EXPERTS)[field]))
    return config


def llama_from(hf, kind):
    check_fixed(hf, OURS_ALONE_OF_LLAMAS)
    layers = hf.get("layer_types") or []
    reject(not isinstance(layers, list) or any(layer != "full_attention" for layer in layers),
           f"layer_types is {layers!r}, only 'full_attention' is supported")
    hf = {"tie_word_embeddings": False} | MAY_BE_MISSING | {"head_dim": 128 if kind == "qwen3" else None} | hf
    sizes = {field: value_of(hf, key) for field, key in LLAMAS_KEYS.items()}
    for field in "n_kv_head", "head_size":  # null: as many as of queries, C/H
        sizes[field] = null_for_0(sizes[field], LLAMAS_KEYS[field])
    sizes |= {"rope_theta": theta_of(hf), "qk_norm": kind == "qwen3", "qkv_bias": kind == "qwen2"}
    config = LlamaConfig(**sizes)
    check_sizes(config, lambda field: LLAMAS_KEYS.get(field, field))
    same = config.head_size * config.n_head == config.n_embd
    return replace(config, head_size=0) if same else config


def value_of(hf, key):
    reject(key not in hf, f"has no {key}")
    return hf[key]


def null_for_0(value, key):
    """What a GPTConfig has for it: 0 stands there for what null stands for here."""
    reject(value == 0, f"{key} {value!r} must be null or at least 1")
    return 0 if value is None else value


def theta_of(hf):
    """rope_theta, which transformers 5 writes into rope_parameters."""
    rope = hf.get("rope_parameters") or {}
    reject(not isinstance(rope, dict), f"rope_parameters {rope!r} must be null or an object")
    others = {key: value for key, value in rope.items() if key != "rope_theta"}
    reject(others not in ({}, PLAIN_ROPE), f"rope_parameters is {rope!r}: only rope_type 'default' is supported")
    theta = rope.get("rope_theta", hf.get("rope_theta", 10000.0))
    return float(theta) if type(theta) is int and theta < 2**63 else theta


def check_fixed(hf, fixed):
    """BadInput if a config.json has another value than the one that is supported. fixed: {key: value}."""
    for key, value in fixed.items():
        reject(hf.get(key, value) is not value, f"{key} is {hf.get(key)!r}, only {value} is supported")


MAY_BE_0 = "inner", "experts", "n_kv_head", "head_size", "max_positions", "shared_experts"


def check_sizes(c, called):
    """BadInput unless a model can have the sizes of the GPTConfig c. called(field): what users call it."""
    for field in fields(c):
        name = called(field.name)
        value = getattr(c, field.name)
        least = int(field.name not in MAY_BE_0)
        # Not isinstance, by which True is an int.
        reject(type(value) is not field.type, f"{name} {value!r} must be of type {field.type.__name__}")
        reject(field.type is int and not least <= value < 2**31,
               f"{name} {value} must be at least {least} and less than 2^31: give e.g. {name} {field.default}")
    reject(c.activation not in c.activations,
           f"{called('activation')} {c.activation!r} is not one of {', '.join(c.activations)}")
    reject(not 0 <= c.norm_eps <= 1, f"{called('norm_eps')} {c.norm_eps} must be between 0 and 1")
    if c.arch == "llama":
        reject(not 0 < c.rope_theta < math.inf, f"{called('rope_theta')} {c.rope_theta} must be above 0")
    why = misfit(what_sizes_divide(c, called))
    reject(why, why)


# ------------------------------------------------------------------------------------------- what goes out with weights

class Came(NamedTuple):
    """What came with weights, and goes out with them again."""
    config: dict    # the contents of config.json
    files: dict     # {name: bytes} of the other files
    left_out: dict  # {name: why} of files that do not go along


NOTHING = Came({}, {}, {})
# Names of files. What does not stay where it is goes along with the weights.
STAYS = r"\..*|(config|manifest)\.json|.*\.(safetensors|bin|pt|pth|h5|msgpack|gguf|onnx|index\.json)"
OF_TOKENIZERS = r"(special_)?token.*|added_tokens\.json|vocab\.\w+|merges\.txt|chat_template.*"
MOST_KEPT = 1 << 26  # bytes of a file that goes along
LONGEST_NAME = 250  # bytes: .part comes behind it, and most filesystems take 255


def came_with(folder, tokenizer=""):
    """The Came of a folder of weights ("": none). tokenizer: the folder whose tokenizer stands in for its own."""
    found = Came({}, {}, {})
    if folder:
        with contextlib.suppress(OSError, ValueError):  # a file of --plain's has none
            found.config.update(json.loads(pathlib.Path(folder, "config.json").read_text("utf-8-sig")))
    for where, of_tokenizers in (folder, False), (tokenizer or folder, True):
        try:
            names = sorted(os.listdir(where)) if os.path.isdir(where) else []
        except OSError as error:
            found.left_out[f"all of {where}"] = error.strerror
            continue
        for name in names:
            if bool(re.fullmatch(OF_TOKENIZERS, name)) == of_tokenizers and not re.fullmatch(STAYS, name):
                take_along(pathlib.Path(where, name), found)
    return found


def take_along(file, found):
    """Put a file into a Came. What cannot go along stays behind: no checkpoint may suffer from it."""
    try:
        if not file.is_file():
            return
        size = file.stat().st_size
        if is_ours(file):
            return
        if size > MOST_KEPT:
            found.left_out[file.name] = "too large"
        elif len(os.fsencode(file.name)) > LONGEST_NAME:
            found.left_out[file.name] = "its name is too long"
        else:
            found.files[file.name] = file.read_bytes()
    except OSError as error:  # it may not be read, say
        found.left_out[file.name] = error.strerror


def config_json(config, dtype, came, ids=NO_IDS):
    """The contents of a config.json beside weights that came with `came`, another's contents ({}: none). ids: numbers
    of the tokens that begin and end a text, if what came does not say; at eos_token_id transformers' generate()
    stops."""
    if not came or came.get("model_type") == WITH_EXPERTS:
        return ids | hf_config(config, dtype)
    known = {key: value for key, value in ids.items() if value is not None}
    return known | came | changes(config, dtype, came)


def changes(config, dtype, came):
    """{key: value} of what a config.json must say of these weights and what `came` does not say. All else stays as it
    came, because `config` was read from it."""
    ours = hf_config(config, dtype)
    before = hf_config(config_from(came), dtype)
    theirs = keys_there(config, came)
    found = {theirs[field]: ours[key] for field, key in keys_of(config).items() if ours[key] != before[key]}
    found |= {"architectures": ours["architectures"]}
    found["torch_dtype" if "torch_dtype" in came else "dtype"] = ours["dtype"]
    return {key: value for key, value in found.items() if key not in came or came[key] != value}
