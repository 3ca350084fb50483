"""Two ranks merge softmax statistics through Gloo by the interpreted kernel, as the CPU does.

Run by test_triton.py with TRITON_INTERPRET=1 and a file for the store.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import ringcomm  # noqa: F401

_ops: Any = torch.ops.ringcomm


def check(rank: int) -> None:
    torch.manual_seed(rank)
    logits, target = torch.randn(5, 7 + rank), torch.tensor([0, 6, 8, -100, 14])
    own = _ops.softmax_stats(logits, target, None, 7 * rank, -1, -100, 1.0, 0.0, True, True)
    group = dist.distributed_c10d._get_default_group().group_name
    wanted = _ops.merge_softmax_stats(own, group)
    from ringcomm.ops.losses import cross_entropy_cuda

    found = cross_entropy_cuda.merge_softmax_stats(own, group)
    torch.testing.assert_close(found[:, :5], wanted[:, :5], rtol=1e-6, atol=1e-6)
    bits = (stats[:, 5].contiguous().view(torch.int32) for stats in (found, wanted))
    assert torch.equal(*bits)


def main() -> None:
    child = os.fork()
    rank = 1 if child == 0 else 0
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
    try:
        check(rank)
    finally:
        dist.destroy_process_group()
    if child:
        assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main()
