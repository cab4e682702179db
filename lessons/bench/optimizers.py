"""A step of the optimizer alone: AdamW beside Muon, which multiplies matrices.

    python bench.py optimizers --model gpt2-xl
"""

from lessons.bench.strategies import make_trainer
from lessons.bench.timing import interleaved, Table, write_json

KINDS = "adamw", "muon"


def optimizers(a, device):
    """The time of an optimizer's step, with the weights that it makes for the layers, and their all-gather."""
    table = Table(f"{a.gpus} processes; {a.model}, {a.config.parameters():,} parameters, {a.dtype}. A step of the "
                  "optimizer; on several processes with ZeRO-1 and its all-gather", {
        "optimizer": "optimizer:<9", "ms": "ms:>9.2f"}, device)
    for name, s in a.layouts.items():
        trainer = make_trainer(a.config, s, device)
        trainer.gradients(0)  # each step takes these again
        net = trainer.net

        def step():
            net.step()
            for unit in net.units if s.zero else ():
                unit.gather()
            for unit in net.units:
                unit.wait()

        table.row(optimizer=name, ms=1e3 * interleaved({name: step}, device, a.repeats, 1)[name])
    write_json(a, device, table)
