"""python -m lessons NAME"""

import os
import sys

import torch

if sys.argv[1:2] == ["puzzles"] or sys.argv[1:2] == ["kernels"] and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it decorates a kernel, which then runs on the CPU

from lessons.demos import main  # noqa: E402

if __name__ == "__main__":
    main()
