"""The same Llama, the same step, in picotron: its model, its train_step and its clock, with our weights and tokens.

    git clone https://github.com/huggingface/picotron runs/picotron
    python bench.py picotron --folder runs/picotron --gpus 1 --arch llama --model 1b --batch-size 4

Nothing else needs to be installed. Its train.py imports packages that a step does not call: where one is missing, a
stand-in takes its place while picotron is imported. With FLASH_ATTEN=1, which needs flash-attn, picotron takes that,
else PyTorch's attention and a norm of its own. Its step does less than ours: it has 16-bit weights without float32
masters, and does not clip.
"""

import importlib.util
import itertools
import os
import statistics
import sys
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

from further.folder import hf_config, taken_apart
from lessons.bench.strategies import make_trainer
from lessons.bench.timing import interleaved, Table, write_json
from model import shapes
from theory.speed import mfu, peak_flops

IMPORTED = ("flash_attn.flash_attn_interface", "flash_attn.layers.rotary", "flash_attn.ops.triton.layer_norm",
            "transformers", "datasets", "safetensors", "huggingface_hub", "wandb")
NAMES = {  # as transformers' names begin: as picotron's do
    "model.embed_tokens": "embedding", "model.layers": "decoder_layers", "self_attn.o_proj": "attention.out_proj",
    "self_attn": "attention", "model.norm": "final_norm", "lm_head": "final_proj"}


def import_train(folder, device):
    """picotron's train.py, which imports all else. Environment variables choose its device and attention."""
    os.environ["DEVICE"] = device.type
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("FLASH_ATTEN", "0")
    missing = {name: MagicMock() for name in IMPORTED if not importlib.util.find_spec(name.partition(".")[0])}
    sys.modules.update(missing)
    sys.path.append(folder)  # last, because its train.py has the name of ours
    spec = importlib.util.spec_from_file_location("train_of_picotron", os.path.join(folder, "train.py"))
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    for name in missing:
        del sys.modules[name]
    return train


def weights_of(net, config):
    """All our weights, by picotron's names."""
    found = {}
    for name in shapes(config):
        for theirs, part in taken_apart(config, name, net.whole_parameter(name)):
            for old, new in NAMES.items():
                theirs = theirs.replace(old, new)
            found[theirs] = part
    return found


class Batches(itertools.cycle):
    """picotron's loader of data, for the same micro-batches in each step."""


def picotron(a, device):
    """A row of ours, one of picotron by our clock, one by its own, whose MFU is by its own formula."""
    trainer = make_trainer(a.config, a.layout, device)
    train = import_train(a.folder, device)
    train.setup_process_group_manager(tp_size=1, cp_size=1, pp_size=1, dp_size=a.gpus)
    sizes = SimpleNamespace(**hf_config(a.config, trainer.net.dtype))
    model = train.Llama(sizes)
    model.load_state_dict(weights_of(trainer.net, a.config))
    model = model.to(trainer.net.dtype).to(device)
    if a.gpus > 1:
        model = train.DataParallelBucket(model)
    optimizer = train.AdamW(model.parameters(), lr=a.layout.lr)
    micro_batches = zip(*trainer.micro_batches(trainer.train_data, a.layout.seed, 0))
    batches = Batches([{"input_ids": x, "target_ids": y} for x, y in micro_batches])
    batches.grad_acc_steps = a.layout.micro_batches
    durations = []

    def step():
        """As the loop in its train.py."""
        start = time.time()
        optimizer.zero_grad()
        loss = train.average_loss_across_dp_cp_ranks(train.train_step(model, batches, device), device)
        optimizer.step()
        if a.gpus > 1:
            model.reset()
        durations.append(time.time() - start)
        return loss

    losses = trainer.mean_over_ranks(trainer.step(0).loss), step()
    seconds = interleaved({"ours": lambda: trainer.step(0), "picotron": step}, device, a.repeats, 3)
    table = Table("From the same weights, on the same tokens; the loss is the first step's", {
        "who": "who:<24", "ms": "ms:>9.1f", "mfu": "MFU %:>6.1f", "loss": "loss:>9.5f"}, device)
    tokens = a.batch_size * a.config.seq_len / a.gpus
    for loss, (who, took) in zip(losses, seconds.items()):
        table.row(who=who, ms=1e3 * took, mfu=mfu(a.config, tokens / took, peak_flops(device)), loss=loss)
    took = statistics.median(durations)
    own = train.get_mfu(tokens / took, sum(param.numel() for param in model.parameters()), sizes)
    table.row(who="picotron, its own clock", ms=1e3 * took, mfu=own, loss=losses[1])
    write_json(a, device, table, model=a.model)
