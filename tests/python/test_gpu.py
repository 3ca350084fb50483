"""What can be said about GPUs before ringcomm moves their tensors."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import ringcomm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


def _refusals(rank: int, world_size: int) -> list[str]:
    tensor = torch.ones(4, device="cuda")
    said = []
    for call in (
        lambda: dist.all_reduce(tensor),
        lambda: dist.broadcast(tensor, 0),
        lambda: dist.send(tensor, 1 - rank),
        lambda: ringcomm.ops.all_reduce(tensor),
        lambda: ringcomm.ops.ring_all_reduce_(tensor),
    ):
        with pytest.raises(ValueError, match="moves CPU tensors only") as error:
            call()
        said.append(str(error.value))
    on_cpu = torch.ones(4)
    dist.all_reduce(on_cpu)  # the group is as usable as before
    assert on_cpu.tolist() == [world_size] * 4
    return said


def test_cuda_tensors_are_refused_with_the_way_out() -> None:
    for said in run_ranks(2, _refusals, 2):
        assert all("cpu:ringcomm,cuda:nccl" in text for text in said)
