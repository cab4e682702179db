"""The flags of train.py: which there are, and what they say together.

    python train.py --help
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from dataclasses import dataclass, field

import torch

from further.bad_input import BadInput
from further.kinds import resized
from further.lists import SCHEDULES
from model import ACTIVATIONS, PRESETS
from parallel import PRECISIONS


def flag(default, help, **more):
    return field(default=default, metadata=dict(help=help, **more))


LLAMAS = "1b", "llama3-8b", "qwen3-0.6b", "cs336-8b"  # presets that only further/llama.py has


@dataclass
class Layout:
    """How a GPT is spread over ranks, and what it computes in."""
    dp: int = flag(1, "data-parallel replicas")
    tp: int = flag(1, "ranks each layer is cut over")
    sp: bool = flag(False, "sequence parallelism: tp cuts the tokens too, between the layers that it cuts")
    cp: int = flag(1, "context parallelism: ranks each sequence is cut over")
    cp_kind: str = flag("ring", "ring: keys and values go round; ulysses: tokens are traded for heads",
                        choices=["ring", "ulysses"])
    ep: int = flag(1, "ranks of dp that share out the experts")
    pp: int = flag(1, "ranks the layers are spread over, as a pipeline")
    schedule: str = flag("1f1b", f"of the pipeline: {', '.join(SCHEDULES)}, or a text file of actions, a row a rank")
    virtual_stages: int = flag(1, "stages a rank has, for --schedule interleaved")
    zero: int = flag(0, "ZeRO over dp x cp: 1 shards optimizer state, 2 also gradients, 3 parameters", choices=range(4))
    zero_within: int = flag(None, "ranks that ZeRO shards over, e.g. a node's; other such groups are replicas")
    recompute: str = flag("none", "what backward computes again", choices=["none", "mlp", "block"])
    recompute_blocks: int = flag(0, "in how many blocks of each stage, the first ones; 0: all")
    loss_chunk: int = flag(0, "tokens whose logits exist at a time, in head and loss; 0: all")
    dtype: torch.dtype = torch.float32  # of the layers

    @property
    def replicas(self):
        """How many ranks average gradients."""
        return self.dp * self.cp


@dataclass
class Flags(Layout):
    """Flags of the command line, --with-dashes: a Layout's, and these."""
    data: str = flag("", "a text file; without --plain also a folder of text, or a .bin of tokens; left out, the "
                         "source of Python's standard library. The last 10 %% are held out")
    pack: bool = flag(False, "each file of --data is a document, whose tokens see no other's")
    tokenizer: str = flag("", "folder with tokenizer.json, or vocab.json and merges.txt; left out, those beside the "
                              "weights of --init-from or --resume, or else tokens are bytes")
    arch: str = flag(None, "architecture, instead of the preset's", choices=["gpt2", "llama"])
    model: str = flag("tiny", "preset", choices=[*PRESETS, *LLAMAS])
    n_layer: int = flag(None, "blocks, instead of the preset's")
    n_head: int = flag(None, "attention heads, instead of the preset's")
    n_kv_head: int = flag(None, "heads of keys and values, of a Llama, instead of the preset's")
    n_embd: int = flag(None, "width, instead of the preset's")
    inner: int = flag(None, "width of the MLP's hidden layer, instead of the preset's")
    seq_len: int = flag(None, "tokens a sequence, instead of the preset's")
    vocab_size: int = flag(None, "vocabulary, instead of the preset's")
    activation: str = flag(None, "of the MLP, instead of the preset's", choices=list(ACTIVATIONS))
    experts: int = flag(None, "MLPs that a block's router has to choose from, instead of the preset's one")
    top_k: int = flag(None, "experts that a token goes through (default: 2)")
    expert_every: int = flag(None, "n, where every n-th block has experts (default: 1)")
    shared_experts: int = flag(None, "further experts of such a block, which every token goes through (default: 0)")
    steps: int = flag(450, "optimizer steps")
    batch_size: int = flag(16, "sequences a step, over all ranks")
    micro_batches: int = flag(1, "parts of each rank's share of a step; their gradients add up")
    lr: float = flag(2e-3, "peak learning rate")
    min_lr: float = flag(1e-4, "learning rate at the end of the cosine")
    warmup_steps: int = flag(20, "steps of linear warm-up")
    weight_decay: float = flag(0.1, "of matrices only")
    optimizer: str = flag("adamw", "muon: Muon for the blocks' matrices, AdamW for all else", choices=["adamw", "muon"])
    clip: float = flag(1.0, "largest gradient norm; 0 does not clip")
    seed: int = flag(0, "of weights, batches and sampling")
    dp: int = flag(None, "data-parallel replicas; left out, what --tp, --cp and --pp leave")
    dtype: str = flag("fp32", "of the layers; bf16 and fp16 keep float32 masters",
                      choices=["fp32", "bf16", "fp16", "fp64"])
    device: str = flag("auto", "auto: CUDA where each process gets a GPU of its own", choices=["auto", "cpu", "cuda"])
    kernels: str = flag("auto", "auto: Triton from Hopper on, in 16 bits or fp32", choices=["auto", "torch", "triton"])
    comm: str = flag("ours", "collectives: ours, with --fast the fastest; the textbook's; PyTorch's",
                     choices=["ours", "ring", "torch"])
    plain: bool = flag(False, "run the reference alone, without fast/ and safe/; several processes need torchrun then")
    together: bool = flag(False, "run the reference alone, with all ranks as threads of this process, to step through")
    eval_every: int = flag(100, "steps between validations, and one at the end; 0: never")
    log_every: int = flag(10, "steps between log lines; 0: never")
    sample: int = flag(200, "tokens to generate at the end; 0: none")
    prompt: str = flag("def ", "what the sample continues")
    temperature: float = flag(0.8, "of the sample; 0 takes the likeliest token each time")
    out: str = flag("", "folder for log.jsonl and checkpoints; without --plain also for index.html with its curves, "
                        "and the same command again goes on from the newest checkpoint")
    save_every: int = flag(100, "steps between checkpoints, and one at the end; 0: only that one")
    resume: str = flag("", "checkpoint to go on from, or the newest in this folder; without a value, in --out. Without "
                           "--plain, flags that decide the losses keep its values if they are left out", nargs="?",
                       const="newest", metavar="PATH")
    config: str = flag("", "a run.json, whose flags and sizes this run takes; flags on the line win")


ABOUT = {"description": "Train a GPT on one process or many.", "allow_abbrev": False, "add_help": False,
         "usage": "train.py [--help [all]] [flags]"}
FIRST = "data", "model", "out", "steps", "batch_size", "lr", "dp", "tp", "pp", "zero"  # in --help without "all"
GROUPS = {  # of --help: the first flag of each; those behind it belong there, too
    "dp": "layout", "data": "data", "arch": "model", "steps": "training", "device": "machine", "eval_every": "output"}


def dashed(name):
    return "--" + name.replace("_", "-")


def parse(parser, flags, arguments):
    """The command line's arguments as an object of the dataclass `flags`."""
    all_flags = "all" in arguments
    parser.add_argument("--help", "-h", nargs="?", const="first", help="the flags used most; --help all: every flag")
    for f in dataclasses.fields(flags):
        if f.name in GROUPS:
            group = parser.add_argument_group(GROUPS[f.name])
        how = {"action": "store_true"} if f.type is bool else {"type": f.type, "default": f.default}
        default = "" if f.type is bool or f.default in (None, "") else f" (default: {f.default})"
        shown = f.metadata["help"] + default if all_flags or f.name in FIRST else argparse.SUPPRESS
        group.add_argument(dashed(f.name), **how, **f.metadata | {"help": shown})
    given = vars(parser.parse_args(arguments))
    if given["config"]:
        given = vars(parser.parse_args(words_of(given["config"], {*given}) + arguments))
    if given.pop("help"):
        parser.print_help()
        sys.exit(0)
    return flags(**given)


def sizes_in(model):
    """{flag: value} that give a model the sizes that a run.json or a checkpoint says it has."""
    names = ["arch", "n_layer", "n_head", "n_embd", "inner", "seq_len", "vocab_size"]
    names += ["n_kv_head"] * (model["arch"] == "llama")
    names += ["experts", "top_k", "expert_every", "shared_experts"] * bool(model["experts"])
    return {name: model[name] for name in names}


def words_of(path, known):
    """The words of a command line that asks for what a run.json says, by flags that are known. BadInput if it is
    none."""
    try:
        run = json.loads(pathlib.Path(path).read_text())
        given = {**run["flags"], "init_from": run["start"].get("init_from")}
        if not given["init_from"]:
            given |= sizes_in(run["model"])
        return [dashed(name) if value is True else f"{dashed(name)}={value}"
                for name, value in given.items() if name in known and value not in (None, "", False)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadInput(f"--config {path}: no run.json of a run ({error}); give one, e.g. runs/1/run.json") from None


def config_of(s):
    """The preset's GPTConfig, with the sizes that were given. ValueError if the architecture has no such preset, or no
    such size."""
    presets = PRESETS
    if s.arch == "llama" or s.arch is None and s.model in LLAMAS:
        from further.llama import PRESETS as presets
    if s.model not in presets:
        raise ValueError(f"--model {s.model} is no preset of --arch {s.arch or 'gpt2'}: give --model tiny")
    preset = presets[s.model]
    if s.experts:
        preset = resized(preset, experts=s.experts)
    given = {field.name: size for field in dataclasses.fields(preset)
             if (size := getattr(s, field.name, None)) is not None}
    return dataclasses.replace(preset, **given)


def layout_of(s):
    """The flags that make a Layout."""
    given = {field.name: getattr(s, field.name) for field in dataclasses.fields(Layout)}
    return Layout(**given | {"dtype": PRECISIONS[s.dtype]})


def processes_of(s, world):
    """How many processes the layout takes. Where --dp is left out, it becomes what the other axes leave of `world`."""
    s.dp = s.dp or max(1, world // (s.tp * s.pp * s.cp))
    return s.dp * s.tp * s.pp * s.cp


def device_for(asked, processes):
    """--device, where it is auto: CUDA if each process on this machine gets a GPU of its own, else the CPU."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= processes
    return asked if asked != "auto" else "cuda" if enough else "cpu"


def learning_rate(s, step):
    """Linear warm-up, then half a cosine from lr to min_lr at the last step; steps count from 0."""
    if step < s.warmup_steps:
        return s.lr * (step + 1) / s.warmup_steps
    progress = (step - s.warmup_steps) / max(1, s.steps - 1 - s.warmup_steps)
    return s.min_lr + (s.lr - s.min_lr) * (1 + math.cos(math.pi * min(1, progress))) / 2


def due(s, what, done):
    """Whether "log", "eval" or "save" comes after `done` steps. 0 means never, but there is always a last save."""
    every = getattr(s, what + "_every")
    last = done == s.steps
    return every > 0 and done % every == 0 or last and (every > 0 or what == "save")
