"""The project's folder is where its tests import from."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
