"""GPT-2 as a Hugging Face folder: `load(folder)`, `save(model, folder)`. safe/llamas.py says how others differ."""

import contextlib
import json
import os
import pathlib
import re
from dataclasses import replace
from typing import NamedTuple

import torch

from further.kinds import resized, shapes_of_all
from model import GPT, GPTConfig, materialize
from safe import llamas
from safe.files import is_ours, OURS, read_safetensors, write_blocks, write_file, write_safetensors
from safe.sizes import BadInput, check_fixed, check_sizes, reject

KEYS = {  # field of GPTConfig: (key in config.json, value if the key is missing)
    "vocab_size": ("vocab_size", 50257), "seq_len": ("n_positions", 1024), "n_layer": ("n_layer", 12),
    "n_head": ("n_head", 12), "n_embd": ("n_embd", 768), "inner": ("n_inner", None),
    "activation": ("activation_function", "gelu_new"), "tied": ("tie_word_embeddings", True),
    "norm_eps": ("layer_norm_epsilon", 1e-5), "experts": ("num_experts", 0), "top_k": ("num_experts_per_tok", 2),
    "expert_every": ("decoder_sparse_step", 1), "shared_experts": ("n_shared_experts", 0)}
OF_EXPERTS = "experts", "top_k", "expert_every", "shared_experts"
ALSO_CALLED = {"n_positions": "max_position_embeddings", "n_embd": "hidden_size", "n_layer": "num_hidden_layers",
               "n_head": "num_attention_heads"}  # names that transformers takes, too, and first
HF_FIXED = {  # our model has these values; a config.json with others is refused
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
    "add_cross_attention": False}
ALSO_WRITTEN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
WITH_EXPERTS = "ringgpt_moe"  # model_type of a folder with experts. transformers knows no such model:
# AutoModelForCausalLM refuses the folder. GPT2LMHeadModel warns, leaves experts out and draws new MLPs.
# Names of files. What does not stay where it is goes along with the weights.
STAYS = r"\..*|(config|manifest)\.json|.*\.(safetensors|bin|pt|pth|h5|msgpack|gguf|onnx|index\.json)"
OF_TOKENIZERS = r"(special_)?token.*|added_tokens\.json|vocab\.\w+|merges\.txt|chat_template.*"
NO_IDS = {"bos_token_id": None, "eos_token_id": None}  # else transformers takes those of its GPT-2, or its Llama
MOST_KEPT = 1 << 26  # bytes of a file that goes along
LONGEST_NAME = 250  # bytes: .part comes behind it, and most filesystems take 255
HF_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "elu": "elu"}
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2's Conv1D keeps (in, out), nn.Linear (out, in)


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
    named = ((name, tensors[name]) for name in shapes_of_all(model.config))
    write_hf(folder, model.config, named, came=getattr(model, "came", NOTHING))


def parts_of(config, name):
    """{what a folder calls a part of our parameter or buffer: its shape}. Experts are stacked in ours, not there."""
    if config.arch == "llama":
        return llamas.parts_of(config, name)
    shape = shapes_of_all(config)[name]
    each = config.stacked(name)
    own = shape[1:] if each else shape
    return dict.fromkeys(each or [name], own[::-1] if name.endswith(TRANSPOSED) else own)


def joined(config, name, parts):
    """Our parameter of a folder's parts."""
    if config.arch == "llama":
        return torch.cat(parts)
    whole = torch.stack(parts) if config.stacked(name) else parts[0]
    return whole.mT if name.endswith(TRANSPOSED) else whole


def taken_apart(config, name, whole):
    """A folder's parts of our parameter."""
    if config.arch == "llama":
        return whole.split([shape[0] for shape in parts_of(config, name).values()])
    whole = whole.mT if name.endswith(TRANSPOSED) else whole
    return whole if config.stacked(name) else [whole]


def shapes_there(config):
    """{name: shape} of a folder's tensors: parameters, then buffers."""
    return {part: shape for name in shapes_of_all(config) for part, shape in parts_of(config, name).items()}


# --------------------------------------------------------------------------------------------------------------- read

def open_hf(folder):
    """(config, source) of a Hugging Face folder: source(name) is a parameter. BadInput names a faulty file."""
    config, hf = read_config(folder)
    tensors = {}
    where = {}
    for file in weight_files(folder):
        found = {whole_name(config, name): tensor for name, tensor in read_safetensors(file).items()}
        tensors |= found
        where |= dict.fromkeys(found, file)
    config = with_the_head_there(config, tensors)
    whose = "the default" if config.arch == "llama" else "a GPT-2's"
    said = ", ".join(f"{key} {getattr(config, field)}" + f", {whose}, as there is none in the file" * (key not in hf)
                     for field, key in keys_of(config, hf).items())
    for name, shape in expected(config):
        reject(name not in tensors, f"{file}: has no {name}, which config.json asks for ({said})")
        tensor = tensors[name]
        quantized = f"{where.get(name, file)}: {name} is in {{}}: give a folder whose weights are not quantized"
        reject(isinstance(tensor, str), quantized.format(f"{tensor}, which is not read here"))
        found = tuple(tensor.shape)
        reject(found != shape, f"{where.get(name, file)}: {name} is {found}, config.json makes it {shape} ({said})")
        reject(not tensor.is_floating_point(), quantized.format(tensor.dtype))

    def source(name):
        name = "wte.weight" if config.tied and name == "lm_head.weight" else name
        return joined(config, name, [tensors[part] for part in parts_of(config, name)])

    return config, source


def read_config(folder):
    """(config, contents) of a folder's config.json."""
    path = pathlib.Path(folder, "config.json")
    try:
        hf = json.loads(path.read_text("utf-8-sig"))
        return config_from(hf), hf
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: {error}") from None


def whole_name(config, name):
    """What a tensor of a file is called here. A body alone, as GPT2Model and LlamaModel are saved, has shorter names
    than a model with a head has."""
    if config.arch != "llama":
        return name.removeprefix("transformer.")
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def with_the_head_there(config, tensors):
    """The config of these tensors. As in transformers, a head that has other numbers than the embedding is not tied to
    it, whatever config.json says. A head without an embedding is both."""
    head = tensors.get("lm_head.weight")
    if not config.tied or not isinstance(head, torch.Tensor):
        return config
    embedding = tensors.setdefault("model.embed_tokens.weight" if config.arch == "llama" else "wte.weight", head)
    tied = isinstance(embedding, torch.Tensor) and embedding.shape == head.shape and (embedding == head).all()
    return replace(config, tied=bool(tied))


class Came(NamedTuple):
    """What came with weights, and goes out with them again."""
    config: dict    # the contents of config.json
    files: dict     # {name: bytes} of the other files
    left_out: dict  # {name: why} of files that do not go along


NOTHING = Came({}, {}, {})


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
        if is_ours(file) or file.name in OURS and not size:  # a run's log begins empty
            return
        if size > MOST_KEPT:
            found.left_out[file.name] = "too large"
        elif len(os.fsencode(file.name)) > LONGEST_NAME:
            found.left_out[file.name] = "its name is too long"
        else:
            found.files[file.name] = file.read_bytes()
    except OSError as error:  # it may not be read, say
        found.left_out[file.name] = error.strerror


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


def shortened(config, source, seq_len):
    """config and source of the same model for shorter sequences. A GPT-2 is left with the first positions. Rotary ones
    are no weights, so a Llama's folder goes on to name all that the model knows."""
    def first(name):
        return source(name)[:seq_len] if name == "wpe.weight" else source(name)

    known = {"max_positions": config.max_positions or config.seq_len} if config.arch == "llama" else {}
    return replace(config, seq_len=seq_len, **known), first


def key_of(hf, field):
    """What a config.json calls a field of the GPTConfig."""
    key = KEYS[field][0]
    return ALSO_CALLED[key] if ALSO_CALLED.get(key) in hf else key


def keys_of(config, hf):
    """{field: what a config.json calls it} of the fields that such a config has. hf {}: by the names that we write."""
    if config.arch == "llama":
        return llamas.KEYS
    return {field: key_of(hf, field) for field in KEYS if config.experts or field not in OF_EXPERTS}


def expected(config):
    """(name, shape there) of all tensors. First come the sizes that a damaged config.json may make so large that
    `shapes_there` would not end."""
    first_norm = "model.layers.{}.input_layernorm.weight" if config.arch == "llama" else "h.{}.ln_1.weight"
    yield first_norm.format(config.n_layer - 1), (config.n_embd,)
    if config.experts and config.arch == "gpt2":
        yield f"h.{config.expert_every - 1}.mlp.router.weight", (config.experts, config.n_embd)
    yield from shapes_there(config).items()


def config_from(hf):
    """The GPTConfig that a config.json describes. BadInput names the key."""
    known = "gpt2", WITH_EXPERTS, *llamas.ARCHITECTURES
    reject(not isinstance(hf, dict) or hf.get("model_type", "gpt2") not in known,
           "not the config of a GPT-2 (model_type is not 'gpt2'), nor of one of " + ", ".join(known[2:]))
    if hf.get("model_type") in llamas.ARCHITECTURES:
        return llamas.config_from(hf)
    kind = hf.get("model_type")
    experts = hf.get("num_experts")
    sizes = {field: hf.get(key_of(hf, field), default) for field, (_, default) in KEYS.items()}
    name = sizes["activation"]
    inner = sizes["inner"]
    reject((kind == WITH_EXPERTS) != bool(experts), f"model_type {kind!r} with num_experts {experts!r}: only "
           f"{WITH_EXPERTS!r} has num_experts, and at least 1")
    check_fixed(hf, HF_FIXED | {"n_group": 1})
    reject(name not in list(HF_ACTIVATIONS), f"activation_function is {name!r}, not one of {', '.join(HF_ACTIVATIONS)}")
    # In a GPTConfig 0 stands for 4C, here null does.
    reject(inner == 0, f"n_inner {inner!r} must be null or at least 1")
    sizes |= {"activation": HF_ACTIVATIONS[name], "inner": 0 if inner is None else inner}
    config = resized(GPTConfig(), **sizes)
    check_sizes(config, lambda field: key_of(hf, field))
    return config


# -------------------------------------------------------------------------------------------------------------- written

def write_hf(folder, config, tensors, dtype=torch.float32, came=NOTHING, ids=None):
    """Write config.json and model.safetensors, and the files that came. tensors: an iterator of (name, tensor), each
    parameter, then buffers.

    dtype: of the tensors in the file; float64 keeps float64 weights exactly. ids: numbers of the tokens that begin and
    end a text, if what came does not say; at eos_token_id transformers' generate() stops. Returns
    {file: {"bytes", "crc32"}}.
    """
    ids = {key: value for key, value in (ids or NO_IDS).items() if value is not None or not came.config}
    said = {**ids, **came.config, **changes(config, dtype, came.config)}
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    there = {long_name(config, part): shape for part, shape in shapes_there(config).items()}
    parts = ((long_name(config, part), tensor) for name, whole in tensors
             for part, tensor in zip(parts_of(config, name), taken_apart(config, name, whole)))
    return {"model.safetensors": write_safetensors(folder / "model.safetensors", dtype, there, parts),
            "config.json": write_file(folder / "config.json", json.dumps(said, indent=2)),
            **{name: write_blocks(folder / name, [raw]) for name, raw in came.files.items()}}


def changes(config, dtype, came):
    """{key: value} of what a config.json must say of these weights and what `came` does not say. All else stays as it
    came, because `config` was read from it."""
    ours = hf_config(config, dtype)
    if not came:
        return ours
    before = config_from(came)
    theirs = keys_of(config, came)
    found = {theirs[field]: ours[key] for field, key in keys_of(config, {}).items()
             if getattr(config, field) != getattr(before, field)}
    found |= {"architectures": ours["architectures"]}
    found["torch_dtype" if "torch_dtype" in came else "dtype"] = ours["dtype"]
    return {key: value for key, value in found.items() if key not in came or came[key] != value}


def long_name(config, name):
    return name if name == "lm_head.weight" or config.arch == "llama" else f"transformer.{name}"


def hf_config(config, dtype):
    """The contents of a config.json, of a model that came from none."""
    every = {"dtype": str(dtype).removeprefix("torch.")}
    if config.arch == "llama":
        return every | llamas.hf_config(config)
    kind, name = (WITH_EXPERTS, "RingGPTMixtureOfExperts") if config.experts else ("gpt2", "GPT2LMHeadModel")
    return {"model_type": kind, "architectures": [name], **every, **HF_FIXED, **ALSO_WRITTEN,
            **{key: getattr(config, field) for field, key in keys_of(config, {}).items()},
            "n_inner": config.inner or None,
            "activation_function": next(hf for hf, ours in HF_ACTIVATIONS.items() if ours == config.activation)}
