"""GPT-2 as a Hugging Face folder: `load(folder)`, `save(model, folder)`."""

import json
import os
from types import SimpleNamespace

import torch

from model import GPT, buffers, GPTConfig, materialize, names_of_experts, shapes
from safe.files import read_safetensors, write_file, write_safetensors
from safe.sizes import check_sizes


# --------------------------------------------------------------------------------------------- Hugging Face's folders
#
# A .safetensors file has a number n (8 bytes, little-endian), n bytes of JSON {name: {dtype, shape, data_offsets}}, and
# then the tensors' bytes.

HF_FIXED = {  # our model has these values; a config.json with others is refused
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
    "add_cross_attention": False}
HF_KEYS = {  # field of GPTConfig: (key in config.json, value if the key is missing)
    "vocab_size": ("vocab_size", 50257), "seq_len": ("n_positions", 1024), "n_layer": ("n_layer", 12),
    "n_head": ("n_head", 12), "n_embd": ("n_embd", 768), "inner": ("n_inner", None),
    "activation": ("activation_function", "gelu_new"), "tied": ("tie_word_embeddings", True),
    "norm_eps": ("layer_norm_epsilon", 1e-5), "experts": ("num_experts", 0), "top_k": ("num_experts_per_tok", 2),
    "expert_every": ("decoder_sparse_step", 1)}
WITH_EXPERTS = "ringgpt_moe"  # model_type of a folder with experts. transformers knows no such model:
# AutoModelForCausalLM refuses the folder. GPT2LMHeadModel warns, leaves experts out and draws new MLPs.
HF_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "elu": "elu"}
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2's Conv1D keeps (in, out), nn.Linear (out, in)


def load(folder):
    """Load a Hugging Face GPT-2 folder, config.json with model.safetensors or pytorch_model.bin, in float32 on the CPU.

    Raises ValueError, which names the file, if it is no GPT-2, if a name or shape is wrong, or if it is cut short.
    """
    config, source = open_hf(folder)
    model = GPT(config, seed=None)
    materialize(model, source)
    return model


def save(model, folder):
    """Write the model as a Hugging Face folder, which transformers' GPT2LMHeadModel.from_pretrained can read."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    write_hf(folder, model.config, state.__getitem__)


def open_hf(folder):
    """(config, source) of a Hugging Face GPT-2 folder: source(name) is a parameter. ValueError names a faulty file."""
    config = read_hf_config(os.path.join(folder, "config.json"))
    path, tensors = read_hf_tensors(folder)
    if config.tied:
        tensors["lm_head.weight"] = tensors.get("wte.weight")
    said = ", ".join(f"{key} {getattr(config, field)}" for field, (key, _) in HF_KEYS.items())

    def check(expected):
        for name, shape in expected:
            shape = shape[::-1] if name.endswith(TRANSPOSED) else shape
            found = tensors.get(name)
            if found is None:
                raise ValueError(f"{path}: has no {name}, which config.json asks for ({said})")
            if tuple(found.shape) != shape:
                raise ValueError(f"{path}: {name} is {tuple(found.shape)}, config.json makes it {shape} ({said})")

    def stacked(name):
        each = names_of_experts(config, name)
        return torch.stack([get(one) for one in each]) if each else get(name)

    def get(name):
        return tensors[name].t() if name.endswith(TRANSPOSED) else tensors[name]

    # First the sizes that a damaged config.json may make so large that `entries` would not end or run out of memory.
    check([("wte.weight", (config.vocab_size, config.n_embd))])
    check((f"h.{i}.ln_1.weight", (config.n_embd,)) for i in range(config.n_layer))
    check((f"h.{i}.mlp.router.weight", (config.experts, config.n_embd)) for i in range(config.n_layer)
          if config.has_experts(i))
    check((name, shape) for name, _, _, shape in entries(config))
    return config, stacked


def entries(config):
    """A folder's tensors: [(name in the file, parameter or buffer it is of, number of the expert or None, shape)]."""
    rows = []
    for name, shape in {**shapes(config), **buffers(config)}.items():
        each = names_of_experts(config, name)
        rows += [(one, name, e, shape[1:]) for e, one in enumerate(each)] or [(name, name, None, shape)]
    return rows


def read_hf_config(path):
    """The GPTConfig that a config.json describes. ValueError names the file and the key."""
    try:
        with open(path) as file:
            hf = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(hf, dict) or hf.get("model_type", "gpt2") not in ("gpt2", WITH_EXPERTS):
        raise ValueError(f"{path}: not the config of a GPT-2 (model_type is not 'gpt2')")
    kind, experts = hf.get("model_type"), hf.get("num_experts")
    if (kind == WITH_EXPERTS) != bool(experts):
        raise ValueError(f"{path}: model_type {kind!r} with num_experts {experts!r}: only {WITH_EXPERTS!r} has "
                         "num_experts, and at least 1")
    for key, value in HF_FIXED.items():
        if hf.get(key, value) is not value:
            raise ValueError(f"{path}: {key} is {hf[key]!r}, only {value} is supported")
    sizes = {field: hf.get(key, default) for field, (key, default) in HF_KEYS.items()}
    name, inner = sizes["activation"], sizes["inner"]
    if not isinstance(name, str) or name not in HF_ACTIVATIONS:
        raise ValueError(f"{path}: activation_function is {name!r}, not one of {', '.join(HF_ACTIVATIONS)}")
    if inner is not None and (type(inner) is not int or inner < 1):  # null stands for 4C, as 0 does in a GPTConfig
        raise ValueError(f"{path}: n_inner {inner!r} must be null or at least 1")
    try:
        sizes |= {"activation": HF_ACTIVATIONS[name], "inner": inner or 0}
        check_sizes(SimpleNamespace(**sizes))
        return GPTConfig(**sizes)
    except ValueError as error:  # its text begins with the field's name
        field, _, rest = str(error).partition(" ")
        raise ValueError(f"{path}: {HF_KEYS[field][0]} {rest}") from None


def read_hf_tensors(folder):
    """(the file that errors name, {name: tensor}) of a folder's weights."""
    tensors, path = {}, os.path.join(folder, "model.safetensors")
    files = sorted(f for f in os.listdir(folder) if f.startswith("model") and f.endswith(".safetensors"))
    if files:
        for file in files:
            tensors.update(read_safetensors(os.path.join(folder, file)))
    else:
        path = os.path.join(folder, "pytorch_model.bin")
        if not os.path.exists(path):
            raise ValueError(f"{folder}: holds neither model.safetensors nor pytorch_model.bin")
        try:
            tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # noqa: BLE001  a damaged or hostile file can make the unpickler raise anything
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ValueError(f"{path}: not a file of tensors ({reason})") from None
        if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
            raise ValueError(f"{path}: not a file of tensors")
    return path, {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}


def write_hf(folder, config, get, dtype=torch.float32):
    """Write config.json and model.safetensors. get(name) returns one whole parameter at a time, at the end buffers.

    dtype: of the tensors in the file; float64 keeps float64 weights exactly. Returns {file: {"bytes", "crc32"}}.
    """
    os.makedirs(folder, exist_ok=True)
    activation = next(name for name, ours in HF_ACTIVATIONS.items() if ours == config.activation)
    hf = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": config.vocab_size,
          "n_positions": config.seq_len, "n_embd": config.n_embd, "n_layer": config.n_layer, "n_head": config.n_head,
          "n_inner": config.inner, "activation_function": activation, "layer_norm_epsilon": config.norm_eps,
          "tie_word_embeddings": config.tied, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
          "bos_token_id": None, "eos_token_id": None, "dtype": str(dtype).removeprefix("torch."), **HF_FIXED}
    if config.experts:
        hf |= {"model_type": WITH_EXPERTS, "architectures": ["RingGPTMixtureOfExperts"],
               **{HF_KEYS[field][0]: getattr(config, field) for field in ("experts", "top_k", "expert_every")}}
    ours = {name if name == "lm_head.weight" else f"transformer.{name}": rest for name, *rest in entries(config)}
    turn, whole = {name: name.endswith(TRANSPOSED) for name in ours}, {}

    def part(hf_name):
        name, expert, _ = ours[hf_name]
        if name not in whole:  # get a stack of experts once, not for each expert
            whole.clear()
            whole[name] = get(name)
        tensor = whole[name] if expert is None else whole[name][expert]
        return tensor.t() if turn[hf_name] else tensor

    weights = write_safetensors(
        os.path.join(folder, "model.safetensors"),
        {hf_name: (dtype, shape[::-1] if turn[hf_name] else shape) for hf_name, (*_, shape) in ours.items()}, part)
    text = write_file(os.path.join(folder, "config.json"), json.dumps(hf, indent=2))
    return {"config.json": text, "model.safetensors": weights}
