"""All ranks in one process: a step's messages, in the order of their sends.

    python -m lessons together --dp 2 --tp 2

pdb in one rank, from where all others can be looked at: docs/reading.md, "Stepping through".
"""

from functools import partial

import torch

import collectives as dist
import train
from further import together
from model import GPTConfig
from further.bad_input import reject


class Log(together.World):
    """A World that notes its messages: [(sender, receiver, bytes, operation)]."""

    def __init__(self):
        super().__init__(worker="eager")
        self.log = []

    def post(self, ticket, tensor, what):
        self.log.append((ticket[1], ticket[2], tensor.nbytes, what or "message"))
        super().post(ticket, tensor, what)


def step_of(layout):
    """A training step on one rank; its loss."""
    config = GPTConfig(vocab_size=256, seq_len=128, n_layer=4, n_head=8, n_embd=256)
    net = train.parallelize(config, layout, "cpu", optimizer=partial(torch.optim.SGD, lr=0.1))
    x = torch.arange(8 * 128).view(8, 128).remainder(251).chunk(layout.dp)[dist.get_rank(net.groups.dp)].chunk(2)
    loss = net.forward_backward(x, x)
    net.clip_grad_norm_(1.0)
    net.step()
    return loss.item()


def demo_together(dp, tp, pp):
    """All ranks as threads of one process: a step's messages."""
    reject(8 % dp or 8 % tp or pp > 6, f"--dp {dp} --tp {tp} --pp {pp}: 8 sequences, 8 heads and 6 pieces cannot be "
           "cut so: give e.g. --dp 2 --tp 2 --pp 1")
    world = Log()
    losses = together.run(dp * tp * pp, partial(step_of, train.Layout(dp=dp, tp=tp, pp=pp)), world)
    for sender, receiver, nbytes, operation in world.log[-10:]:
        print(f"rank {sender} -> rank {receiver}  {nbytes:9,} bytes  {operation}")
    print(f"the last of {len(world.log)} messages, the model's start among them; loss {losses[0]:.6f}")
