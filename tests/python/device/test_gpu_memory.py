"""Bytes of a GPU that groups keep: as many as are stated, and no more after more calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import LAYOUT, Gpus, device, on_cuda

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
