"""Bad input refused, crashes survived, what happened told, other formats read.

`safe.on()` puts what stands here in the place of the reference's leaves that SWAPS names. The program's own classes are
chosen by train.py's last lines.
"""

import collectives
import kernels
from further import nodes
from safe import launch, messages, sizes

SWAPS = [  # (module, name there, what takes its place)
    (collectives, "make_link", messages.watched_link),
    (collectives, "rendezvous", launch.settled_rendezvous),
    (nodes, "TwoLevels", messages.WatchedLevels),
    (kernels, "use", sizes.checked_use),
]


def on():
    swap(SWAPS)


def swap(rows):
    """Rebind each row's name. RuntimeError once a group exists: what was made before would keep the old parts."""
    if collectives.is_initialized() or collectives.process.links:
        raise RuntimeError("on() comes first: before any process group, model or optimizer is made")
    for module, name, new in rows:
        setattr(module, name, new)
