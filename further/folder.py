r"""A Hugging Face folder: what do others call our tensors, and how do they lie in a file?

    GPT-2         transformer.h.0.attn.c_attn.weight    ours transposed: its Conv1D keeps (in, out), nn.Linear (out, in)
    Llama, Qwen   model.layers.0.self_attn.q_proj.weight, .k_proj, .v_proj: the rows of our h.0.attn.c_attn.weight
    experts       transformer.h.0.mlp.experts.3.c_fc.weight: ours are stacked. transformers knows no such model

A .safetensors file has a number n (8 bytes, little-endian), n bytes of JSON {name: {dtype, shape, data_offsets}}, and
then the tensors' bytes. Nothing in it is pickled, so to read one runs no code.

    python train.py --plain --steps 2 --out runs/1     writes such a folder, runs/1/step-00000002
"""

import contextlib
import errno
import functools
import json
import math
import os
import sys
import zlib
from pathlib import Path

import numpy as np
import torch

from model import shapes_of_all


# ---------------------------------------------------------------------------------------------------------------- files

def write_blocks(path, blocks):
    """Write a file that has its name only when all of it is on the disk. Returns its {"bytes", "crc32"}."""
    size = crc = 0
    part = f"{path}.part"
    try:
        with open(part, "wb") as file:
            for block in blocks:
                file.write(block)
                size += len(block)
                crc = zlib.crc32(block, crc)
            file.flush()
            sync(file)
        os.replace(part, path)
    except OSError:  # a full disk, say
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    return {"bytes": size, "crc32": crc}


def write_file(path, text):
    return write_blocks(path, [text.encode()])


# What a filesystem answers that does not know an operation at all.
UNKNOWN = errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP


def sync(file):
    """Bring a file to the disk. Where a filesystem cannot, that is said once, and costs nothing but the certainty."""
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in UNKNOWN:
            raise
        warn_once(f"the filesystem of --out cannot say when data is on the disk ({error.strerror}): a power cut may "
                  "lose the newest checkpoint")


def sync_folder(path):
    """Bring a folder to the disk: it holds its files' names, which a power cut could lose otherwise."""
    descriptor = os.open(path, os.O_RDONLY)
    sync(descriptor)
    os.close(descriptor)


@functools.cache
def warn_once(text):
    with contextlib.suppress(OSError):
        print(f"warning  {text}", file=sys.stderr, flush=True)


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
          "BOOL": torch.bool, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}


def read_safetensors(path):
    """{name: tensor} of a .safetensors file, mapped into memory and read when used. In place of a tensor in another
    dtype than DTYPES' stands its dtype's name, because nobody may ask for it. ValueError if the file is damaged."""
    try:
        data = np.memmap(path, np.uint8, "c")  # what is written into it does not reach the file
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:start].tobytes())
        room = data[start:]
        tensors = {}
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if begin < 0 or end > len(room):
                raise ValueError(f"{name} lies outside the file: it is cut short or damaged")
            dtype = DTYPES.get(entry["dtype"])
            values = torch.from_numpy(room[begin:end])
            tensors[name] = values.view(dtype).view(entry["shape"]) if dtype else str(entry["dtype"])
        return tensors
    except Exception as error:  # noqa: BLE001  anything may stand in a damaged header
        raise ValueError(f"{path}: not a whole .safetensors file ({error})") from None


def write_safetensors(path, dtype, shapes, tensors):
    """Write {name: shape} in one dtype. tensors: an iterator of (name, tensor) in the same order, of which it takes no
    more than these, one at a time, so that memory need not hold all."""
    kind, = [kind for kind, known in DTYPES.items() if known == dtype]
    header = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def blocks():
        yield len(text).to_bytes(8, "little") + text
        for name in shapes:
            found, tensor = next(tensors)
            assert found == name, f"{found} comes where {path} has {name}"
            yield tensor.detach().to("cpu", dtype).contiguous().view(-1).view(torch.uint8).numpy().data

    return write_blocks(path, blocks())


# ---------------------------------------------------------------------------------------------------------------- names

TRANSPOSED = "c_attn.weight", "c_proj.weight", "c_fc.weight"
OF_LLAMAS = {  # our layer: theirs, whose rows lie one below the other
    "wte": ["embed_tokens"], "ln_f": ["norm"], "ln_1": ["input_layernorm"], "ln_2": ["post_attention_layernorm"],
    "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "attn.c_proj": ["self_attn.o_proj"],
    "attn.q_norm": ["self_attn.q_norm"], "attn.k_norm": ["self_attn.k_norm"],
    "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"], "mlp.c_proj": ["mlp.down_proj"]}


def is_llama(config):
    """Whether others know it as a Llama. They know no Llama with experts, which keeps our names."""
    return config.arch == "llama" and not config.experts


def parts_of(config, name):
    """{what a folder calls a part of our parameter or buffer: its shape there}."""
    shape = shapes_of_all(config)[name]
    if name == "lm_head.weight":
        return {name: shape}
    if is_llama(config):
        return parts_of_llama(config, name, shape)
    each = config.stacked(name)
    own = shape[1:] if each else shape
    own = own[::-1] if name.endswith(TRANSPOSED) else own
    return {f"transformer.{part}": own for part in each or [name]}


def parts_of_llama(config, name, shape):
    layer, _, leaf = name.rpartition(".")
    keys = config.kv_heads * config.head_dim
    rows = {"c_attn": [config.heads_width, keys, keys], "c_fc": 2 * [shape[0] // 2]}
    rows = rows.get(layer.rpartition(".")[2], shape[:1])
    prefix = "model."
    if layer.startswith("h."):
        _, number, layer = layer.split(".", 2)
        prefix = f"model.layers.{number}."
    return {f"{prefix}{part}.{leaf}": (n, *shape[1:]) for part, n in zip(OF_LLAMAS[layer], rows)}


def shapes_there(config):
    """{name: shape} of a folder's tensors: parameters, then buffers."""
    return {part: shape for name in shapes_of_all(config) for part, shape in parts_of(config, name).items()}


def taken_apart(config, name, whole):
    """[(a folder's name, tensor)] of our parameter."""
    parts = parts_of(config, name)
    if is_llama(config):
        return [*zip(parts, whole.split([shape[0] for shape in parts.values()]))]
    whole = whole.mT if name.endswith(TRANSPOSED) else whole
    return [*zip(parts, whole if config.stacked(name) else [whole])]


def source_of(config, tensors):
    """source(name): a whole parameter, of a folder's tensors."""
    def source(name):
        name = "wte.weight" if config.tied and name == "lm_head.weight" else name
        parts = [tensors[part] for part in parts_of(config, name)]
        if is_llama(config):
            return torch.cat(parts)
        whole = torch.stack(parts) if config.stacked(name) else parts[0]
        return whole.mT if name.endswith(TRANSPOSED) else whole
    return source


# ---------------------------------------------------------------------------------------------------------- config.json

KEYS = {  # field of GPTConfig: key in config.json
    "vocab_size": "vocab_size", "seq_len": "n_positions", "n_layer": "n_layer", "n_head": "n_head", "n_embd": "n_embd",
    "inner": "n_inner", "activation": "activation_function", "tied": "tie_word_embeddings",
    "norm_eps": "layer_norm_epsilon"}
OF_EXPERTS = {"experts": "num_experts", "top_k": "num_experts_per_tok", "expert_every": "decoder_sparse_step",
              "shared_experts": "n_shared_experts"}
WITH_EXPERTS = "ringgpt_moe"  # model_type of a folder with experts. transformers knows no such model:
# AutoModelForCausalLM refuses the folder. GPT2LMHeadModel warns, leaves experts out and draws new MLPs.
FIXED = {  # a GPT-2 here has these values
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
    "add_cross_attention": False}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ACTIVATIONS = {"gelu": "gelu_new", "elu": "elu"}

LLAMAS_KEYS = {  # field of LlamaConfig: key in config.json
    "vocab_size": "vocab_size", "seq_len": "max_position_embeddings", "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads", "head_size": "head_dim",
    "n_embd": "hidden_size", "inner": "intermediate_size", "activation": "hidden_act", "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings"}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
LLAMAS_FIXED = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
PLAIN_ROPE = {"rope_type": "default"}


def keys_of(config):
    """{field: what a config.json of ours calls it} of the fields that such a config has."""
    return LLAMAS_KEYS if is_llama(config) else KEYS | (OF_EXPERTS if config.experts else {})


def hf_config(config, dtype):
    """The contents of a config.json. dtype: of the tensors beside it. ValueError for what has no name in
    transformers."""
    sizes = {key: getattr(config, field) for field, key in keys_of(config).items()}
    sizes |= {"dtype": str(dtype).removeprefix("torch.")}
    if not is_llama(config):
        kind, name = (WITH_EXPERTS, "RingGPTMixtureOfExperts") if config.experts else ("gpt2", "GPT2LMHeadModel")
        activation = ACTIVATIONS.get(config.activation, config.activation)
        return {"model_type": kind, "architectures": [name], **FIXED, **NO_DROPOUT, **sizes,
                "n_inner": None if config.hidden == 4 * config.n_embd else config.hidden,
                "activation_function": activation}
    if config.qk_norm and config.qkv_bias:
        raise ValueError("a model with biases and norms of heads has no name in transformers")
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    sizes |= {"max_position_embeddings": config.max_positions or config.seq_len, "num_key_value_heads": config.kv_heads,
              "head_dim": config.head_dim, "intermediate_size": config.hidden}
    return {"model_type": kind, "architectures": [ARCHITECTURES[kind]], **LLAMAS_FIXED, **sizes,
            "rope_theta": config.rope_theta, "rope_parameters": {"rope_theta": config.rope_theta, **PLAIN_ROPE}}


NO_IDS = {"bos_token_id": None, "eos_token_id": None}  # else transformers takes those of its GPT-2, or its Llama


def write_folder(folder, config, tensors, dtype, said, files=None):
    """Write config.json, which says what `said` says, model.safetensors, and {name: bytes} of other files. tensors: an
    iterator of (name, tensor), each parameter, then buffers. Returns {file: {"bytes", "crc32"}}."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts = (part for name, whole in tensors for part in taken_apart(config, name, whole))
    return {"model.safetensors": write_safetensors(folder / "model.safetensors", dtype, shapes_there(config), parts),
            "config.json": write_file(folder / "config.json", json.dumps(said, indent=2)),
            **{name: write_blocks(folder / name, [raw]) for name, raw in (files or {}).items()}}
