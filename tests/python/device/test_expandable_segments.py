"""Tensors in segments that are made of pieces, as torch's expandable ones: peers map each piece by
a handle that its owner retains, side by side with the others of its range.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import emugpu
import emulated_gpu
import pytest
import torch
import torch.distributed as dist
from cases import slow
from emulated_gpu import in_emulated_ranks, run_on_gpus, with_kernels
from gpu_ranks import meet, stderr_of
from test_peer_allocations import (
    FEW_CALLS,
    GPU,
    NUM_BYTES,
    NUM_ELEMS,
    check_sum,
    check_sums,
    few_calls,
    long_calls,
    new_tensor,
    reuse_addresses,
    used_bytes,
)
from torch import Tensor

import ringcomm

pytestmark = emulated_gpu.needs_emulated_gpu

PIECE_BYTES = 2 << 20
EXPANDABLE = {"RINGCOMM_EMULATOR_PIECES": "1"}
NOT_SHARED = EXPANDABLE | {"TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0"}
in_two = in_emulated_ranks(2, env=EXPANDABLE, fresh=True)


def range_of(address: int) -> range:
    """The addresses that a piece is mapped into."""
    driver = ctypes.CDLL(os.environ["RINGCOMM_CUDA_DRIVER"])
    base, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
    results = (ctypes.c_void_p * 2)(ctypes.addressof(base), ctypes.addressof(num_bytes))
    attributes = (ctypes.c_int * 2)(11, 12)  # where it begins, and its size
    assert driver.cuPointerGetAttributes(2, attributes, results, ctypes.c_uint64(address)) == 0
    return range(base.value, base.value + num_bytes.value)


def peers_pieces(tensor: Tensor) -> list[int]:
    """How much of each piece that this process has of peers it has ever accessed."""
    own, found, is_peers = range_of(tensor.data_ptr()), [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field, *values = line.split()
        if "-" in field:
            begin, end = (int(part, 16) for part in field.split("-"))
            is_peers = "emulated-gpu" in line and end - begin == PIECE_BYTES and begin not in own
        elif field == "Rss:" and is_peers:
            found.append(1024 * int(values[0]))
    return found


def check_in_place(rank: int) -> None:
    world_size = dist.get_world_size()
    tensor = new_tensor()
    check_sum(tensor)
    num_others = len(peers_pieces(tensor))  # that are as large
    check_sums(tensor)
    in_place, staged = long_calls()
    assert in_place > 0
    num_pieces = NUM_BYTES // PIECE_BYTES
    assert len(peers_pieces(tensor)) == num_others + (world_size - 1) * num_pieces
    # A rank's share of the sums, from every peer.
    least = (world_size - 1) * NUM_BYTES // world_size
    assert least <= sum(peers_pieces(tensor)) <= 1.1 * least + (1 << 20)
    # A view that begins and ends inside of pieces, at another place on each rank.
    for turn in range(3):
        check_sum(tensor[1 + rank : NUM_ELEMS - 5 + rank], turn)
    # The segment grows under a tensor, which is then mapped, too.
    check_sums(new_tensor())
    assert long_calls() > (in_place + 3, staged)
    assert len(peers_pieces(tensor)) == num_others + 2 * (world_size - 1) * num_pieces


@pytest.mark.parametrize("num_devices", [1, slow(3)])
def test_they_are_used_in_place(num_devices: int) -> None:
    env = with_kernels() | EXPANDABLE
    run_on_gpus(3, check_in_place, num_devices=num_devices, env=env, fresh=True)


@pytest.mark.slow
@in_two
def test_pieces_that_are_mapped_anew(rank: int) -> None:
    counts = [long_calls()[0]]

    def is_in_place(_: Tensor) -> bool:
        counts.append(long_calls()[0])
        return counts[-1] > counts[-2]

    reuse_addresses(rank, 2 * FEW_CALLS, is_in_place)


@in_two
def test_half_of_a_run_is_mapped_anew(rank: int) -> None:
    """A tensor over pieces that peers know, and others, is staged until they know all."""
    first, second = new_tensor(), new_tensor()
    check_sums(first)
    check_sums(second)
    place = first.data_ptr()
    assert second.data_ptr() == place + NUM_BYTES
    meet()
    del first
    emugpu.empty_cache()
    first = torch.empty(NUM_ELEMS // 2, dtype=torch.int32, device=GPU)
    assert first.data_ptr() == place
    check_sums(first, 2 * FEW_CALLS)
    check_sums(second)


@in_two
def test_freed_pieces_are_given_back(rank: int) -> None:
    few_calls()
    tensor = new_tensor()
    before = used_bytes()
    check_sums(tensor)
    emugpu.synchronize()
    meet()
    del tensor
    emugpu.empty_cache()
    assert ringcomm.release(20)
    assert used_bytes() <= before - NUM_BYTES
    meet()  # a rank whose kernel waits for another unmaps nothing


@in_two
def test_a_shared_tensor_is_mapped_at_once(rank: int) -> None:
    tensor = ringcomm.empty_shared(NUM_ELEMS, dtype=torch.int32, device=GPU)
    check_sum(tensor)
    assert long_calls() == (1, 0)


@in_emulated_ranks(2, env=[NOT_SHARED, EXPANDABLE], fresh=True)
def test_pieces_that_are_not_shared_are_staged(rank: int) -> None:
    """Those of rank 0, which says so once."""
    with pytest.warns(UserWarning, match=r"empty_shared: .* are staged"):
        tensor = ringcomm.empty_shared(NUM_ELEMS, dtype=torch.int32, device=GPU)
    said = stderr_of(lambda: check_sums(tensor))
    assert said.count("processes cannot map them") == (rank == 0)
    assert long_calls() == ((0, FEW_CALLS) if rank == 0 else (FEW_CALLS, 0))


@in_emulated_ranks(2, env=[EXPANDABLE, {}], fresh=True)
def test_beside_a_rank_with_ordinary_segments(rank: int) -> None:
    tensor = new_tensor()
    check_sums(tensor)
    assert long_calls()[0] > 0


@pytest.mark.slow
@in_two
def test_more_pieces_than_are_offered_at_a_time(rank: int) -> None:
    """Each offer is an open file: further ones follow when peers have taken up the first."""
    tensor = torch.empty(150 * PIECE_BYTES, dtype=torch.uint8, device=GPU)
    for turn in range(FEW_CALLS + 2):
        tensor.fill_(turn + rank)
        dist.all_reduce(tensor)
        assert tensor[:: 1 << 20].unique().tolist() == [2 * turn + 1]
    assert long_calls()[0] > 0


@pytest.mark.slow
@in_two
def test_a_shared_tensor_of_more_pieces_than_are_offered_at_a_time(rank: int) -> None:
    tensor = ringcomm.empty_shared(150 * PIECE_BYTES, dtype=torch.uint8, device=GPU)
    dist.all_reduce(tensor.fill_(rank))
    assert long_calls() == (1, 0)
