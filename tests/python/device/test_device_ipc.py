"""Collectives of device tensors by kernels, in memory that all ranks map, on emulated GPUs.

In each way in which ranks may come to share memory and devices; the results' checks are those of
transport "p2p" (test_device_p2p.py), and more stand in test_gpu_*.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emulated_gpu import needs_emulated_gpu, run_on_gpus, with_kernels
from test_device_p2p import check_layouts, check_moves, check_sizes, check_types, check_uneven

from ringcomm import _C

pytestmark = needs_emulated_gpu


@dataclass(frozen=True)
class Box:
    """Where three ranks are, and what their driver can do."""

    name: str
    said: tuple[str, ...]
    num_devices: int = 1
    env: dict[str, str] = field(default_factory=dict)

    def run(self, fn: Any, *args: Any, world_size: int = 3) -> list[Any]:
        env = {**with_kernels(), **self.env}
        return run_on_gpus(world_size, fn, *args, num_devices=self.num_devices, env=env)


NO_FDS = {"RINGCOMM_EMULATOR_VMM": "0"}
BOXES = [
    Box("one GPU under MPS", ("cuda_ipc", "file descriptors", "3 ranks on a GPU, side by side")),
    Box("one GPU without MPS", ("taking turns",), env={"RINGCOMM_EMULATOR_MPS": "0"}),
    Box("two GPUs", ("2 ranks on a GPU",), num_devices=2),
    Box("a GPU for each", ("1 ranks on a GPU",), num_devices=3),
    Box("no file descriptors", ("cuda_ipc by IPC handles",), env=NO_FDS),
    Box("no shared memory", ("p2p over emup2p",), env={**NO_FDS, "RINGCOMM_EMULATOR_IPC": "0"}),
    Box(
        "threads of blocks",
        ("cuda_ipc",),
        env={"RINGCOMM_EMULATOR_THREADS": "3", "RINGCOMM_EMULATOR_DELAY_US": "100"},
    ),
]
each_box = pytest.mark.parametrize("box", BOXES, ids=lambda box: box.name.replace(" ", "-"))


def transport(rank: int) -> str:
    dist.all_reduce(torch.ones(4, device="emugpu"))
    group = dist.group.WORLD
    assert group is not None
    (name,) = _C.device_transports(group._get_backend(torch.device("emugpu"))).values()
    return str(name)


@each_box
def test_what_carries(box: Box) -> None:
    (name,) = set(box.run(transport))
    for text in box.said:
        assert text in name


@each_box
def test_reductions(box: Box) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        box.run(check_types, dtype)
    for algorithm in ("auto", "two_shot", "ring"):
        box.run(check_sizes, algorithm, None)


@each_box
def test_moves(box: Box) -> None:
    box.run(check_moves, torch.float32)
    box.run(check_uneven)
    box.run(check_layouts)


def test_gpus_that_cannot_reach_each_other() -> None:
    box = Box("no peer access", (), num_devices=2, env={"RINGCOMM_EMULATOR_PEER_ACCESS": "0"})
    assert set(box.run(transport, world_size=2)) == {"p2p over emup2p"}


def one_kind_is_not_the_other(rank: int) -> str:
    try:
        x = torch.ones(10 if rank == 0 else 100_000, device="emugpu")
        dist.all_reduce(x)
        torch.accelerator.synchronize()
        dist.barrier(device_ids=[0])
        dist.all_reduce(x)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_calls_that_never_meet_in_a_kernel_are_a_mismatch_on_both() -> None:
    env = with_kernels()
    for said in run_on_gpus(2, one_kind_is_not_the_other, env=env, fresh=True):
        assert "40 bytes" in said
        assert "400000 bytes" in said
