"""The loss scale of fp16: `python train.py --dtype fp16`.

fp16's smallest number is 6e-8. So that gradients stay above it, the loss is multiplied by `scale`, and
`clip_grad_norm_` divides the gradients by it. Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; the
numbers are ours.
"""


class LossScale:
    """A step whose gradients are not finite is skipped, and halves the scale. 200 good steps double it."""

    def __init__(self, start=2.0**16, interval=200):
        self.scale = start
        self.interval = interval
        self.good = 0  # steps since the last one that was skipped

    def update(self, finite):
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.good % self.interval == 0:
            self.scale = min(2.0**24, self.scale * 2)
