"""GPT-2 as one device would run it. Nothing here knows that there is more than one.

The model is a list of pieces, embedding, blocks, head, and `forward` folds over it: that is what lets a pipeline cut it
anywhere. Parameters carry GPT-2's own names ("h.3.attn.c_attn.weight"). Initial weights depend on the seed and the
parameter's name, on nothing else.

    python model.py            parameters, FLOPs and training bytes of every preset

Letters: K parameters (N is for ranks), B sequences, T tokens each, C embedding width, H heads, D = C/H width of a head,
V vocabulary, L layers, E experts, k of them a token.
Read with: CS336 lecture 1-3 for the model; Ultra-Scale Playbook "counting parameters and FLOPs" for the formulas.
"""

import functools
import math
import zlib
from dataclasses import dataclass

import torch
from torch import nn

import kernels

ACTIVATIONS = {"gelu": kernels.gelu, "elu": kernels.elu}
FASTER = {}  # class: a subclass from below the bar that computes the same faster; read when a model is built
CHECKS = []  # from below the bar: f(config), which raises ValueError for values that are no sizes


# ------------------------------------------------------------------------------------------------------------- sizes

@dataclass(frozen=True)
class GPTConfig:
    """All sizes of a model, and what follows from them."""
    vocab_size: int = 256
    seq_len: int = 128
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    inner: int = 0             # width of the MLP; 0 stands for 4C
    activation: str = "gelu"   # "gelu" (the tanh form, GPT-2's) or "elu"
    tied: bool = True          # the head is the transposed embedding
    norm_eps: float = 1e-5
    experts: int = 0           # MLPs a block has to choose from; 0: one, for all tokens
    top_k: int = 2             # experts a token goes through
    expert_every: int = 1      # of how many blocks the last has experts

    def __post_init__(self):
        for check in CHECKS:
            check(self)
        object.__setattr__(self, "inner", self.inner or 4 * self.n_embd)  # the class is frozen

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    def has_experts(self, block):
        """Whether the block of this number, from 0, has experts: of each `expert_every` blocks the last."""
        return self.experts > 0 and block % self.expert_every == self.expert_every - 1

    def parameters(self, experts=None):
        """K, how many parameters; a tied head counts once. experts: how many of a block's to count; left out, all."""
        c, v = self.n_embd, self.vocab_size
        attention = 4 * c * c + 4 * c                          # qkv and output projection, with biases
        mlp = 2 * c * self.inner + c + self.inner
        blocks = self.n_layer * (attention + 4 * c)            # two layer norms of 2C each
        routed = sum(map(self.has_experts, range(self.n_layer)))
        count = self.experts if experts is None else experts
        blocks += (self.n_layer - routed) * mlp + routed * (count * mlp + self.experts * c)    # the router: E C
        return v * c * (1 if self.tied else 2) + self.seq_len * c + blocks + 2 * c

    def active_parameters(self):
        """How many parameters one token meets: of E experts only k."""
        return self.parameters(self.top_k)

    @property
    def long_sequences(self):
        """Whether T > 4C."""
        return self.seq_len > 4 * self.n_embd

    def flops_per_token(self):
        """FLOPs to train on one token: 6 (K - T C) + 12 L C T. Backward takes twice what forward takes.

        6 a parameter that is multiplied, of experts those the token goes through: position embeddings (T C) are only
        added, an embedding that is no head as well is only read. 12 L C T is Q K^T and P V, in full though a causal
        kernel skips half, as others count, too. PaLM (2022), appendix B. Up to T = 4C that is a quarter too much at
        most. Longer sequences count the causal half, 6 L C T: with all of it a fast kernel's MFU would pass 100 %.
        """
        read = self.seq_len * self.n_embd + (0 if self.tied else self.vocab_size * self.n_embd)
        scores = (6 if self.long_sequences else 12) * self.n_layer * self.n_embd * self.seq_len
        return 6 * (self.active_parameters() - read) + scores


PRESETS = {
    "tiny": GPTConfig(),  # bytes, a minute or two on a laptop
    "small": GPTConfig(seq_len=256, n_layer=6, n_head=6, n_embd=384),
    "gpt2": GPTConfig(50257, 1024, 12, 12, 768),
    "gpt2-medium": GPTConfig(50257, 1024, 24, 16, 1024),
    "gpt2-large": GPTConfig(50257, 1024, 36, 20, 1280),
    "gpt2-xl": GPTConfig(50257, 1024, 48, 25, 1600),
}


# ------------------------------------------------------------------------------------------------------------ layers

class Linear(nn.Linear):
    """x W^T + b, by `self.linear`, in whose place a zero-bubble pipeline puts one that computes W's gradient later."""

    linear = staticmethod(kernels.linear)

    def reset_parameters(self):
        if not self.weight.is_meta:  # there, PyTorch would draw no values, but take two thirds of a model's making
            super().reset_parameters()

    def forward(self, x):
        return self.linear(x, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Causal self-attention. The number of heads is read off the activations, so it runs a slice of them, too."""

    attention = staticmethod(kernels.attention)  # where ranks share a sequence, one that sees all of it

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)     # q, k, v: three thirds, each H heads of D
        self.c_proj = Linear(config.n_embd, config.n_embd)

    def forward(self, x):                                                                     # (B, T, C)
        qkv = self.c_attn(x)                                                                  # (B, T, 3C)
        B, T, _ = qkv.shape
        y = self.attention(qkv.view(B, T, 3, -1, self.head_dim))                              # (B, T, H, D)
        return self.c_proj(y.reshape(B, T, -1))                                               # (B, T, C)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = Linear(config.n_embd, config.inner)
        self.c_proj = Linear(config.inner, config.n_embd)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x):                                                                     # (B, T, C)
        return self.c_proj(self.activation(self.c_fc(x)))


class Block(nn.Module):
    """Pre-norm: the residual stream passes untouched from the embedding to the head, each sublayer adds to it."""

    def __init__(self, config, number):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.norm_eps)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config.n_embd, config.norm_eps)
        self.mlp = (MixtureOfExperts if config.has_experts(number) else MLP)(config)

    def forward(self, x):                                                                     # (B, T, C)
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


# Mixture of experts: in place of one MLP a block has E, and a router sends each token through k of them. Parameters
# grow with E, FLOPs with k. A router left alone learns to use few experts. The usual remedies depend on how a batch is
# cut into micro-batches and over ranks: an auxiliary loss is a product of two means over a part's tokens (unless all
# ranks first add up their counts), and with a capacity each expert drops the tokens that a part has beyond it. Here no
# token is dropped. Each expert has a bias, which is added to its scores when experts are chosen, and not when their
# outputs are weighed. After a step it falls by `rate` if more than 1/E of the batch's choices fell on the expert; if
# fewer did, it rises. How many did is a sum of integers, so it is the same in every layout.
# Shazeer et al., "Outrageously Large Neural Networks" (2017); Wang et al., "Auxiliary-Loss-Free Load Balancing" (2024);
# DeepSeek-V3 (2024), section 2.1.2. CS336 lecture 4.

class Router(nn.Module):
    """Chooses k of E experts for each token, and weighs them. In float32, or float64, whatever layers compute in.

    load: int64 (E), how often each expert was chosen since somebody set it to 0. Backward counts, so evaluation does
    not count, and a forward that backward runs again does not count twice.
    """

    def __init__(self, config):
        super().__init__()
        self.top_k, self.load = config.top_k, 0
        self.weight = nn.Parameter(torch.empty(config.experts, config.n_embd))
        self.register_buffer("bias", torch.empty(config.experts, dtype=torch.float32))

    def forward(self, x):                                                                     # (B, T, C)
        chosen, gates, counts = self.choose(x)
        if gates.requires_grad:
            gates.register_hook(lambda grad: self.count(counts))
        return chosen, gates

    def choose(self, x):
        """(the numbers of k experts (B, T, k), the weights of their outputs (B, T, k), how often each is chosen (E))"""
        x, weight = kernels.at_least_float32(x), kernels.at_least_float32(self.weight)
        scores = (x @ weight.T).sigmoid()  # each expert's own: a softmax would tie it to the others'; (B, T, E)
        ranked = (scores.detach() + self.bias).sort(descending=True, stable=True).indices     # equals: the first leads
        chosen = ranked[..., :self.top_k]                                                     # (B, T, k)
        gates = scores.gather(-1, chosen)
        if self.top_k > 1:  # with one expert its share is always 1, which would give the router no gradient
            gates = gates / gates.sum(-1, keepdim=True)
        return chosen, gates, count_of_each(chosen, len(weight))

    def count(self, counts):
        self.load = self.load + counts

    @torch.no_grad()
    def balance(self, load, rate):
        """Move the bias against the load (E) of a whole batch. Its mean stays 0."""
        self.bias += rate * (load.sum() - len(load) * load).sign()
        self.bias -= self.bias.double().mean()  # the mean is taken in float64, so that every device rounds alike


def count_of_each(chosen, experts):
    """How often each expert's number stands in `chosen`, of any shape: int64 (E)."""
    return (chosen.reshape(-1, 1) == torch.arange(experts, device=chosen.device)).sum(0)


class StackedLinear(nn.Module):
    """A Linear of each expert, weight (E, out, in), bias (E, out): rows (n, in) -> (n, out).

    counts (E) says whose rows they are: the first counts[0] are the first expert's, the next counts[1] the second's.
    """

    def __init__(self, experts, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, n_out, n_in))
        self.bias = nn.Parameter(torch.empty(experts, n_out))
        self.bias.matrix = False  # it is E vectors, so weight decay leaves it alone

    def forward(self, rows, counts):
        return kernels.grouped_linear(rows, self.weight, self.bias, counts)


class Experts(nn.Module):
    """E MLPs: tokens (B, T, C), their experts' numbers and weights (B, T, k) -> weighted sums of outputs (B, T, C).

    Each token becomes k rows, one for each of its experts. Rows are sorted by expert, so that each expert multiplies
    one matrix. Outputs are put back in the order of the tokens.
    """

    def __init__(self, config):
        super().__init__()
        self.c_fc = StackedLinear(config.experts, config.n_embd, config.inner)
        self.c_proj = StackedLinear(config.experts, config.inner, config.n_embd)
        self.count, self.activation = config.experts, ACTIVATIONS[config.activation]

    def forward(self, x, chosen, gates):
        order, k = chosen.flatten().argsort(stable=True), chosen.shape[-1]                    # (B T k)
        rows = x.flatten(0, 1).repeat_interleave(k, 0).index_select(0, order)                 # (B T k, C)
        y = self.mlps(rows, count_of_each(chosen, self.count))
        y = y.index_select(0, order.argsort()).view(*chosen.shape, -1)                        # (B, T, k, C)
        return (y * gates.unsqueeze(-1).to(y.dtype)).sum(-2)

    def mlps(self, rows, counts):
        """Rows (n, C), as for StackedLinear -> each through its expert, (n, C)."""
        return self.c_proj(self.activation(self.c_fc(rows, counts)), counts)


class MixtureOfExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router, self.experts = (FASTER.get(part, part)(config) for part in (Router, Experts))

    def forward(self, x):                                                                     # (B, T, C)
        return self.experts(x, *self.router(x))


def routers(model):
    """{number of a block: its Router}."""
    return {int(i): block.mlp.router for i, block in model.h.items() if isinstance(block.mlp, MixtureOfExperts)}


class GPT(nn.Module):
    """GPT-2. `GPT(config)(tokens)` takes int64 (B, T) and returns logits (B, T, V).

    pieces: which of the L+2 pieces (0 the embedding, 1..L the blocks, L+1 the head) to build, a range; left out, all.
    seed: the initial weights'; None leaves the parameters on the meta device, shapes without memory, for `materialize`.
    """

    def __init__(self, config, seed=0, pieces=None):
        super().__init__()
        pieces = range(config.n_layer + 2) if pieces is None else pieces
        self.config, first, last = config, 0 in pieces, config.n_layer + 1 in pieces
        with torch.device("meta"):
            if first:  # from_pretrained, because nn.Embedding itself would draw values
                self.wte, self.wpe = (nn.Embedding.from_pretrained(torch.empty(n, config.n_embd), freeze=False)
                                      for n in (config.vocab_size, config.seq_len))
            block = FASTER.get(Block, Block)
            self.h = nn.ModuleDict({str(i - 1): block(config, i - 1) for i in pieces if 1 <= i <= config.n_layer})
            if last:
                self.ln_f = LayerNorm(config.n_embd, config.norm_eps)
                self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
            if first and last and config.tied:
                self.lm_head.weight = self.wte.weight
        self.pieces = [self.embed] * first + list(self.h.values()) + [self.head] * last
        if seed is not None:
            materialize(self, lambda name: initial_weight(config, name, seed))

    def embed(self, tokens):                                                                  # (B, T)
        T = tokens.shape[1]
        if T > self.config.seq_len:
            raise ValueError(f"{T} tokens are more than the {self.config.seq_len} positions this model has")
        return self.wte(tokens) + self.wpe(self.positions(torch.arange(T, device=tokens.device)))   # (B, T, C)

    @staticmethod
    def positions(every):
        """Where in the sequence this device's tokens stand: on one device everywhere, `every` int64 (T)."""
        return every

    def head(self, x):
        return self.lm_head(self.ln_f(x))                                                     # (B, T, V)

    def forward(self, x):
        for piece in self.pieces:
            x = piece(x)
        return x

    @torch.no_grad()
    def generate(self, tokens, n, temperature=1.0, top_k=None, seed=None):
        """Continue tokens (B, T) by n sampled ones: (B, T + n).

        Temperature 0 takes the likeliest token, top_k samples among the k likeliest. Each token runs the whole
        context again, because there is no cache of keys and values.
        """
        generator = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
        for _ in range(n):
            logits = self(tokens[:, -self.config.seq_len:])[:, -1].float()                    # (B, V)
            if top_k:
                kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            if temperature:
                token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                token = logits.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, token], 1)
        return tokens


# ----------------------------------------------------------------------------------------------------------- weights

def initial_weight(config, name, seed):
    """GPT-2's initial value of one parameter, float32 on the CPU: the same for this seed and name in every layout.

    Matrices from N(0, 0.02); those that add to the residual stream, 2L of them, from N(0, 0.02 / sqrt(2L)).
    """
    name = "wte.weight" if config.tied and name == "lm_head.weight" else name
    if each := names_of_experts(config, name):
        return torch.stack([initial_value(config, one, shapes(config)[name][1:], seed) for one in each])
    return initial_value(config, name, {**shapes(config), **buffers(config)}[name], seed)


def initial_value(config, name, shape, seed):
    if len(shape) == 1:
        return torch.full(shape, float(name.endswith("weight")), device="cpu")
    std = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 0.02
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return torch.empty(shape, device="cpu").normal_(0, std, generator=generator)


def names_of_experts(config, name):
    """What each expert's part of a stacked parameter is called in files and for its initial values:
    ["h.0.mlp.experts.0.c_fc.weight", ...]. Empty for other parameters."""
    numbered = name.replace(".experts.", ".experts.{}.")
    return [numbered.format(e) for e in range(config.experts)] if numbered != name else []


@functools.cache
def shapes(config):
    """Name -> shape of every parameter of the whole model (one dict for all who ask: not to be changed)."""
    return {name: tuple(p.shape) for name, p in GPT(config, seed=None).named_parameters()}


@functools.cache
def buffers(config):
    """Name -> shape of every buffer, what is kept and is no parameter: the routers' biases, float32."""
    return {name: tuple(b.shape) for name, b in GPT(config, seed=None).named_buffers()}


def materialize(module, source, device="cpu", dtype=torch.float32, place=lambda param, value: value):
    """Replace every parameter, one at a time, by place(param, source(name)) on `device`; tied ones stay tied.

    At no time does more than one whole parameter exist beside what stays here; `place` may keep a part of it.
    """
    made = {}
    for prefix, owner in module.named_modules():
        for leaf, old in list(owner.named_parameters(recurse=False)):
            if old not in made:
                value = place(old, source(f"{prefix}.{leaf}" if prefix else leaf))
                made[old] = nn.Parameter(value.to(device, dtype, copy=True).contiguous(), old.requires_grad)
                made[old].__dict__.update(old.__dict__)
            setattr(owner, leaf, made[old])
    materialize_buffers(module, source, device)


def materialize_buffers(module, source, device):
    """Give every buffer its value. They are routers' biases, float32 whatever dtype layers have."""
    for prefix, owner in module.named_modules():
        for leaf, old in list(owner.named_buffers(recurse=False)):
            owner.register_buffer(leaf, source(f"{prefix}.{leaf}").to(device, torch.float32, copy=True))


# ============================================================ machinery: the same results, faster or safer ============

import json
import mmap
import os
import struct
from dataclasses import fields

# --------------------------------------------------------------------------------------------------------- bad sizes

def check_sizes(config):
    for field in fields(config):
        value, least = getattr(config, field.name), 0 if field.name in ("inner", "experts") else 1
        if type(value) is not field.type:  # not isinstance, by which True is an int
            raise ValueError(f"{field.name} {value!r} must be of type {field.type.__name__}")
        if field.type is int and not least <= value < 2**31:
            raise ValueError(f"{field.name} {value} must be at least {least} and less than 2^31")
    if config.n_embd % config.n_head:
        raise ValueError(f"n_embd {config.n_embd} must be a multiple of n_head {config.n_head}")
    if config.activation not in ACTIVATIONS:
        raise ValueError(f"activation {config.activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if config.experts and config.top_k > config.experts:
        raise ValueError(f"top_k {config.top_k} must be at most the number of experts, {config.experts}")
    if config.experts and config.expert_every > config.n_layer:
        raise ValueError(f"expert_every {config.expert_every} must be at most the number of blocks, {config.n_layer}")
    if not 0 <= config.norm_eps <= 1:
        raise ValueError(f"norm_eps {config.norm_eps} must be between 0 and 1")


CHECKS.append(check_sizes)


# ------------------------------------------------------------------------------------------------------ fused blocks
#
# Between matrix products a block is bound by memory. These subclasses make fewer passes over it, by kernels that do two
# operations at once. The price: a layer leaves its bias, or its addition to the residual stream, to the next layer.

class ProductLinear(Linear):
    """A Linear that can leave out its bias, because the activation's kernel adds it without another pass."""

    def product(self, x):
        return self.linear(x, self.weight)


class FusedMLP(MLP):
    """The activation's kernel also adds the first layer's bias, and its backward sums the bias's gradient."""

    def __init__(self, config):
        super().__init__(config)
        self.c_fc = ProductLinear(config.n_embd, config.inner)

    def forward(self, x):
        if not hasattr(self.c_fc, "product"):  # a tensor-parallel layer that always adds its bias
            return super().forward(x)
        return self.c_proj(kernels.add_bias(self.activation, self.c_fc.product(x), self.c_fc.bias))


class FusedBlock(Block):
    """One kernel adds a sublayer's output to the residual stream and takes the norm: 4 passes over memory, not 5."""

    def __init__(self, config, number):
        super().__init__(config, number)
        if isinstance(self.mlp, MLP):
            self.mlp = FusedMLP(config)

    def forward(self, x):
        one, two = self.ln_1, self.ln_2
        x, y = kernels.add_layer_norm(x, None, one.weight, one.bias, one.eps)  # with x: one backward for both its uses
        x, y = kernels.add_layer_norm(x, self.attn(y), two.weight, two.bias, two.eps)
        return x + self.mlp(y)


class FusedRouter(Router):
    def choose(self, x):
        return (kernels.route(x, self.weight, self.bias, self.top_k) if kernels.on_triton(x) else super().choose(x))


class FusedExperts(Experts):
    """One kernel copies tokens to rows sorted by expert, and one adds the rows back up: no sort, no index_select."""

    def forward(self, x, chosen, gates):
        if not kernels.on_triton(x):
            return super().forward(x, chosen, gates)
        places, counts = kernels.places_by_expert(chosen, self.count)
        y = self.mlps(kernels.dispatch(x.flatten(0, 1), places), counts)
        return kernels.combine(y, places, gates.view(places.shape)).view_as(x)


FASTER.update({Block: FusedBlock, Router: FusedRouter, Experts: FusedExperts})


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
SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
                      "U8": torch.uint8, "BOOL": torch.bool, "I64": torch.int64}
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2's Conv1D keeps (in, out), nn.Linear (out, in)


def from_hf(cls, folder):
    """Load a Hugging Face GPT-2 folder, config.json with model.safetensors or pytorch_model.bin, in float32 on the CPU.

    Raises ValueError, which names the file, if it is no GPT-2, if a name or shape is wrong, or if it is cut short.
    """
    config, source = open_hf(folder)
    model = cls(config, seed=None)
    materialize(model, source)
    return model


def save_hf(self, folder):
    """Write the model as a Hugging Face folder, which transformers' GPT2LMHeadModel.from_pretrained can read."""
    state = {**dict(self.named_parameters()), **dict(self.named_buffers())}
    write_hf(folder, self.config, state.__getitem__)


# Methods of GPT itself, not of a subclass, so that the GPTs that parallel.py builds have them, too.
GPT.from_hf, GPT.save_hf = classmethod(from_hf), save_hf


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
        return GPTConfig(**{**sizes, "activation": HF_ACTIVATIONS[name], "inner": inner or 0})
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


def read_safetensors(path):
    """{name: tensor} of a .safetensors file, mapped into memory and read when used. ValueError if it is damaged."""
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:start].decode())
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            dtype, (begin, end) = SAFETENSORS_DTYPES[entry["dtype"]], entry["data_offsets"]
            count = math.prod(entry["shape"])
            if end - begin != count * dtype.itemsize or begin < 0 or start + end > len(data):
                raise ValueError(f"{name} lies outside the file: it is cut short or damaged")
            tensors[name] = (torch.frombuffer(data, dtype=dtype, count=count, offset=start + begin) if count
                             else torch.empty(0, dtype=dtype)).view(entry["shape"])
        return tensors
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, struct.error,
            RecursionError) as error:
        raise ValueError(f"{path}: not a whole .safetensors file ({error})") from None


def write_file(path, text):
    """Write a file that has its name only when all of it is on the disk. Returns its {"bytes", "crc32"}."""
    with open(path + ".part", "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)
    return {"bytes": len(text.encode()), "crc32": zlib.crc32(text.encode())}


def sync_folder(path):
    """Bring a folder to the disk: it holds its files' names, which a power cut could lose otherwise."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def crc_of_file(path):
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return crc


def write_safetensors(path, entries, get):
    """Write tensors {name: (dtype, shape)}. get(name) returns one at a time, so that memory need not hold all.

    The file has its name only when all of it is on the disk. Returns its {"bytes", "crc32"}.
    """
    names, header, offset = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}, {}, 0
    for name, (dtype, shape) in entries.items():
        size = dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    start = struct.pack("<Q", len(text)) + text
    with open(path + ".part", "wb") as file:
        file.write(start)
        crc = zlib.crc32(start)
        for name, (dtype, _) in entries.items():
            data = get(name).detach().to("cpu", dtype).contiguous().view(-1).numpy().data
            file.write(data)
            crc = zlib.crc32(data, crc)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)
    return {"bytes": len(start) + offset, "crc32": crc}


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


def main():
    print(f"{'preset':12} {'layers':>6} {'heads':>5} {'width':>5} {'vocab':>6} {'context':>7} {'parameters':>13} "
          f"{'FLOPs/token':>12} {'training MiB':>12}")
    for name, c in PRESETS.items():
        print(f"{name:12} {c.n_layer:6} {c.n_head:5} {c.n_embd:5} {c.vocab_size:6} {c.seq_len:7} {c.parameters():13,} "
              f"{c.flops_per_token():12.3g} {16 * c.parameters() / 2**20:12,.0f}")
    print("\nFLOPs/token: 6 (K - T C) + 12 L C T, forward and backward. Training: float32 weights 4 bytes a parameter, "
          "gradients 4,\nAdamW 8; activations come on top.")


if __name__ == "__main__":
    main()
