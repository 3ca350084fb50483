"""Collectives of ordinary tensors in allocations that several groups use, and that are freed and
come again.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import LAYOUT, Gpus, device, in_gpu_ranks, meet, module, on_cuda, on_gpus
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


@pytest.mark.slow
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


@in_gpu_ranks(on_gpus, fresh=True)
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
        meet()  # a rank whose kernel waits for another unmaps nothing


# ---- bytes that groups keep: as many as are stated, and no more after more calls

MIB = 1 << 20
# Of all ranks on a GPU together; or of each, for what messages have beside that.
STAGING_BYTES, RANK_STAGING_BYTES = 27 * MIB, 8 * MIB
# Of each rank: the code of all kernels, which are loaded up front (for sm_90 about 14 MiB), and
# what the driver rounds up, 2 MiB for each of the four images.
CODE_BYTES = (14 + 4 * 2) * MIB


def used_bytes() -> int:
    """Of the whole device, by all processes, once all ranks are here."""
    torch.cuda.synchronize()
    dist.barrier()
    free, total = torch.cuda.mem_get_info()
    dist.all_reduce(torch.ones(1))  # of the host: nobody goes on before all have looked
    return total - free


def of_every_size(tensor: torch.Tensor) -> None:
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        for num_elems in (1, 1000, 100_000, tensor.numel()):
            dist.all_reduce(tensor[:num_elems], op)


def footprint(rank: int) -> dict[str, Any]:
    tensor = torch.zeros(4 * MIB, device=device())
    group = dist.new_group()
    before = used_bytes()
    dist.all_reduce(tensor[:1000], group=group)
    first = used_bytes()
    of_every_size(tensor)
    torch.cuda.synchronize()
    used = used_bytes()
    for _ in range(20):
        of_every_size(tensor)
    return {"first": first - before, "then": used - before, "later": used_bytes() - before}


@on_cuda
@pytest.mark.skipif(LAYOUT != "one", reason="it counts what all ranks have on one GPU")
def test_staging_is_small_and_constant(gpus: Gpus) -> None:
    found = gpus.run(footprint, fresh=True)[0]
    print(f"{gpus.world_size} ranks on one GPU, bytes: {found}")
    # Two groups: the default one's ranks made theirs for the barrier or the last calls.
    staging_bytes = max(STAGING_BYTES, gpus.world_size * RANK_STAGING_BYTES)
    limit = 2 * staging_bytes + gpus.world_size * CODE_BYTES
    assert 0 < found["then"] <= limit, found
    assert found["later"] == found["then"], found
