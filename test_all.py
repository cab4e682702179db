"""Every claim of the other files, on a machine with no GPU. `pytest test_all.py`

A strategy is right if it equals one process: in float64, where a logic error stands out from rounding by ten orders of
magnitude, on gloo. So the same training step runs in every layout, and loss, each gathered gradient, the gradient norm,
and the weights after two clipped SGD steps (which, unlike Adam's, do not forgive a wrong factor) must agree to 1e-10.
And a test must be able to fail: each strategy runs again with its collective taken out, and must then be found wrong.

Layouts are rows of one table in tests/layouts.py. A row that names what it is wrong without runs twice: in the whole
program and in the reference alone. Processes come from a pool, started once for each world size. With GPUs, the same
tests run again on NCCL. The proofs are modules of tests/, by subject:
"""

import atexit
import gc

import pytest

gc.disable()  # what is imported stays: to look for garbage in it would take a third of the imports' time
pytest.register_assert_rewrite("tests")
pytest_plugins = ["tests.pool"]  # pytest calls that module's hooks

from tests.pool import *  # noqa: E402, F403  first: it decides whether kernels are interpreted
from tests.micro import *  # noqa: E402, F403
from tests.collectives import *  # noqa: E402, F403
from tests.windows import *  # noqa: E402, F403
from tests.messages import *  # noqa: E402, F403
from tests.models import *  # noqa: E402, F403
from tests.llama import *  # noqa: E402, F403
from tests.layouts import *  # noqa: E402, F403
from tests.chunked_loss import *  # noqa: E402, F403
from tests.packed import *  # noqa: E402, F403
from tests.chain import *  # noqa: E402, F403
from tests.muon import *  # noqa: E402, F403
from tests.graphs import *  # noqa: E402, F403
from tests.further import *  # noqa: E402, F403
from tests.data import *  # noqa: E402, F403
from tests.strategies import *  # noqa: E402, F403
from tests.zero import *  # noqa: E402, F403
from tests.memory import *  # noqa: E402, F403
from tests.schedules import *  # noqa: E402, F403
from tests.demos import *  # noqa: E402, F403
from tests.puzzles import *  # noqa: E402, F403
from tests.pages import *  # noqa: E402, F403
from tests.runs import *  # noqa: E402, F403
from tests.training import *  # noqa: E402, F403
from tests.refusals import *  # noqa: E402, F403
from tests.launching import *  # noqa: E402, F403
from tests.benchmark import *  # noqa: E402, F403
from tests.plan import *  # noqa: E402, F403
from tests.explore import *  # noqa: E402, F403
from tests.checkpoints import *  # noqa: E402, F403
from tests.daily import *  # noqa: E402, F403
from tests.kernels import *  # noqa: E402, F403
from tests.fp8 import *  # noqa: E402, F403
from tests.attention import *  # noqa: E402, F403
from tests.walls import *  # noqa: E402, F403
from tests.budgets import *  # noqa: E402, F403
from tests.together import *  # noqa: E402, F403
from tests.survive import *  # noqa: E402, F403
from tests.text import *  # noqa: E402, F403
from tests.same import *  # noqa: E402, F403
from tests.bugs import *  # noqa: E402, F403
from tests.letters import *  # noqa: E402, F403
from tests.readme import *  # noqa: E402, F403

gc.freeze()
atexit.register(gc.unfreeze)  # else libraries report at the end what they find left
gc.enable()
