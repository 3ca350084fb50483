"""Collectives of ordinary tensors in allocations that several groups use, and that are freed and
come again.
"""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from gpu_ranks import device, in_gpu_ranks, meet, module, on_gpus
from torch import Tensor

import ringcomm

NUM_ELEMS = 3 << 20  # 12 MiB: torch's allocator takes an allocation for it
FEW_CALLS = 5  # in the last two of which it is used in place


def check_sums(tensor: Tensor, group: dist.ProcessGroup | None, turn: int) -> None:
    """Exact, of different values at each place, rank and turn."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = torch.arange(tensor.numel(), dtype=torch.int32, device=device()).remainder_(1001)
    for i in range(FEW_CALLS):
        tensor.copy_(own * (rank + 1) + (turn + i))
        dist.all_reduce(tensor, group=group)
        expected = own * (world_size * (world_size + 1) // 2) + world_size * (turn + i)
        assert torch.equal(tensor.cpu(), expected.cpu())


@in_gpu_ranks(on_gpus, fresh=True)
def test_two_groups_over_one_allocation_that_comes_again(rank: int) -> None:
    """At its address, while the second group still has the first one mapped."""
    groups = [dist.group.WORLD, dist.new_group()]
    for turn in range(3):
        tensor = torch.empty(NUM_ELEMS, dtype=torch.int32, device=device())
        for group in groups if turn % 2 == 0 else groups[::-1]:
            check_sums(tensor, group, 10 * turn)
        module().synchronize()
        del tensor
        gc.collect()
        module().empty_cache()


@in_gpu_ranks(on_gpus, no_turns="nothing is mapped", fresh=True)
def test_freed_memory_is_given_back(rank: int) -> None:
    """By release(), after which the same sums are right in new memory."""
    for turn in range(2):
        tensor = torch.empty(NUM_ELEMS, dtype=torch.int32, device=device())
        check_sums(tensor, None, turn)
        module().synchronize()
        meet()  # until all have ended their calls none can unmap
        del tensor
        gc.collect()
        module().empty_cache()
        assert ringcomm.release(30.0)
