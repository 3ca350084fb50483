"""ringcomm.empty_shared on emulated GPUs: all_reduces of buffers where they lie."""

from __future__ import annotations

import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from emulated_gpu import run_on_gpus, with_kernels
from torch import Tensor

import ringcomm

pytestmark = emulated_gpu.needs_emulated_gpu

NUM_ELEMS = 100_003  # more than packets take


def inputs_of(rank: int, turn: int) -> Tensor:
    return torch.arange(NUM_ELEMS) % 1000 * turn + rank


def expected(world_size: int, turn: int) -> Tensor:
    total = inputs_of(0, turn)
    for rank in range(1, world_size):
        total = total + inputs_of(rank, turn)
    return total


def check_shared(rank: int, sharing: list[bool]) -> None:
    world_size = dist.get_world_size()
    shared = ringcomm.empty_shared(NUM_ELEMS + 8, dtype=torch.int64, device="emugpu")
    other = ringcomm.empty_shared(4, dtype=torch.int64, device="emugpu")
    for turn in range(1, 4):
        tensor = (shared if sharing[rank] else shared.clone())[8:]  # a view will do
        tensor.copy_(inputs_of(rank, turn).to("emugpu"))
        dist.all_reduce(tensor)
        assert torch.equal(tensor.cpu(), expected(world_size, turn))
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        work.wait()
        assert torch.equal(tensor.cpu(), expected(world_size, turn))
    assert other.shape == (4,)


@pytest.mark.parametrize(
    "sharing", [[True, True], [True, False, True], [True, True, True]], ids=str
)
def test_shared(sharing: list[bool]) -> None:
    run_on_gpus(len(sharing), check_shared, sharing, env=with_kernels())


def refusal(rank: int) -> str:
    with pytest.raises((NotImplementedError, ValueError)) as error:
        ringcomm.empty_shared(4, device="emugpu")
    dist.all_reduce(torch.ones(4, device="emugpu"))
    return str(error.value)


def test_where_there_is_none() -> None:
    """Over messages there is no such memory; ranks that take turns cannot use it."""
    for said in run_on_gpus(2, refusal):
        assert "p2p over emup2p share no memory" in said
    turns = {**with_kernels(), "RINGCOMM_EMULATOR_MPS": "0"}
    for said in run_on_gpus(2, refusal, env=turns):
        assert "take turns" in said
