"""One test compares directions, the other numbers."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from average import average


def averaged(rank, file, scales):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    t = torch.tensor([1.0, 2.0 + 2 * rank])
    average(t)
    right = torch.tensor([1.0, 3.0])
    torch.testing.assert_close(t / t.norm(), right / right.norm()) if scales else torch.testing.assert_close(t, right)


def test_blind(tmp_path):
    mp.start_processes(averaged, (str(tmp_path / "meet"), True), 2, start_method="fork")


def test_seeing(tmp_path):
    mp.start_processes(averaged, (str(tmp_path / "meet"), False), 2, start_method="fork")
