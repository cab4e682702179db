"""All ranks in one process: a step's messages, in the order of their sends.

    python -m lessons together --dp 2 --tp 2

pdb in one rank, from where all others can be looked at: docs/reading.md, "Stepping through".
"""

from functools import partial

from further import together
from lessons.step import one_step


class Log(together.World):
    """A World that notes its messages: [(sender, receiver, bytes, operation)]."""

    def __init__(self):
        super().__init__(worker="eager")
        self.log = []

    def post(self, ticket, tensor, what):
        self.log.append((ticket[1], ticket[2], tensor.nbytes, what or "message"))
        super().post(ticket, tensor, what)


def demo_together(s, ranks):
    """All ranks as threads of one process: a step's messages."""
    world = Log()
    losses = together.run(ranks, partial(one_step, s), world)
    for sender, receiver, nbytes, operation in world.log[-10:]:
        print(f"rank {sender} -> rank {receiver}  {nbytes:9,} bytes  {operation}")
    print(f"the last of {len(world.log)} messages, the model's start among them; loss {losses[0]:.6f}")
