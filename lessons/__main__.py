"""python -m lessons NAME"""

import os
import sys

if sys.argv[1:2] == ["puzzles"]:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: a puzzle's kernels run on the CPU

from lessons.demos import main  # noqa: E402

if __name__ == "__main__":
    main()
