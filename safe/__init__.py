"""Bad input refused, crashes survived, what happened told, other formats read.

`safe.on()` lets links report and name what fails. All else of safe/ a program chooses: its classes in train.py's last
lines, `checked_use` for kernels, `settled_rendezvous` for `dist.initialize`.
"""

import collectives
from safe import messages


def on():
    """RuntimeError once a group exists: what was made before would keep the old parts."""
    if collectives.LINKS["ring"] is messages.Watched:  # it is on
        return
    if collectives.is_initialized() or collectives.process.links:
        raise RuntimeError("on() comes first: before any process group, model or optimizer is made")
    collectives.LINKS.update(messages.LINKS)
