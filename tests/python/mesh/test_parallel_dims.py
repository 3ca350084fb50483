"""ParallelDims: sizes, the ranks of each axis, the meshes, and what cannot be made."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks

from ringcomm.parallel import ParallelDims
from ringcomm.torch_names import backend_of, flat_mesh, timeout_of

TIMEOUT = timedelta(seconds=37)  # which torch does not give to new groups
AXES = ("pp", "dp", "fsdp", "tp", "batch", "ep", "edp")


def test_the_lines_of_each_axis_cover_all_ranks_once() -> None:
    for pp, dp, fsdp, tp, ep in itertools.product((1, 2), (1, 2), (1, 3), (1, 2), (1, 2, 3)):
        if (dp * fsdp) % ep == 0:
            check_lines(pp, dp, fsdp, tp, ep)


def check_lines(pp: int, dp: int, fsdp: int, tp: int, ep: int) -> None:
    world_size = pp * dp * fsdp * tp
    dims = ParallelDims(pp=pp, dp=dp, fsdp=fsdp, tp=tp, ep=ep, world_size=world_size)
    lengths = dict(zip(AXES, (pp, dp, fsdp, tp, dp * fsdp, ep, dp * fsdp // ep), strict=True))
    for axis in AXES:
        lines = {tuple(dims.ranks_of(axis, rank)) for rank in range(world_size)}
        assert sorted(itertools.chain(*lines)) == list(range(world_size))
        assert {len(line) for line in lines} == {lengths[axis]}
    # Experts are shared inside of data parallelism: the same stage, the same part of each layer.
    of_rank = [tuple(set(dims.ranks_of(a, r)) for a in AXES) for r in range(world_size)]
    for _, _, _, own_tp, batch, own_ep, own_edp in of_rank:
        assert own_ep <= batch
        assert own_edp <= batch
        assert len(own_ep & own_edp) == len(own_tp & batch) == 1


def test_the_ranks_that_are_left() -> None:
    assert repr(ParallelDims(tp=2, world_size=6)) == "ParallelDims(pp=1, dp=3, fsdp=1, tp=2, ep=1)"
    dims = ParallelDims(dp=2, fsdp=-1, pp=2, world_size=16)
    assert (dims.dp, dims.fsdp, dims.pp, dims.tp) == (2, 4, 2, 1)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tp": 3}, "tp 3 needs a multiple of 3 ranks, got 8"),
        ({"dp": 2, "tp": 2}, "dp 2 x fsdp 1 x tp 2 needs 4 ranks, got 8"),
        ({"pp": 0}, "pp must be a positive number, got 0"),
        ({"tp": -1}, "tp must be a positive number, got -1"),
        ({"dp": -2}, "dp must be a positive number or -1"),
        ({"dp": -1, "fsdp": -1}, "cannot both be -1"),
        ({"tp": 4, "ep": 4}, "ep 4 must divide dp x fsdp, which has 2 ranks"),
        ({"ep": 0}, "ep 0"),
    ],
)
def test_sizes_that_make_no_mesh(sizes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ParallelDims(**sizes, world_size=8)


def test_without_a_group_the_world_size_is_wanted() -> None:
    with pytest.raises(ValueError, match="init_process_group first, or pass world_size"):
        ParallelDims(dp=1)
    with pytest.raises(ValueError, match="the mesh has 2 ranks, but the default group 0"):
        ParallelDims(world_size=2)["tp"]
    with pytest.raises(KeyError, match=r"the axis must be one of pp, dp.*got 'cp'"):
        ParallelDims(world_size=2)["cp"]


def test_the_table_says_who_talks_to_whom() -> None:
    title, header, *rows = str(ParallelDims(dp=2, fsdp=2, tp=2, ep=2, world_size=8)).splitlines()
    assert title == "8 ranks = pp 1 x dp 2 x fsdp 2 x tp 2, ep 2"
    assert header.split()[:3] == ["axis", "size", "ranks"]
    assert [row.split()[:4] for row in rows] == [
        ["dp", "2", "0", "4"],
        ["fsdp", "2", "0", "2"],
        ["tp", "2", "0", "1"],
        ["ep", "2", "0", "2"],
        ["edp", "2", "0", "4"],
    ]


@in_ranks(8, group_timeout_s=TIMEOUT.total_seconds())
def test_groups_are_those_of_the_table(rank: int) -> None:
    table = ParallelDims(dp=2, fsdp=2, tp=2, ep=2, world_size=8)
    dims = ParallelDims(dp=2, fsdp=2, tp=2, ep=2, device_type="cpu")
    for axis in AXES:
        total, ranks = torch.tensor([float(1 << rank)]), table.ranks_of(axis, rank)
        dist.all_reduce(total, group=dims.group(axis))
        assert dims[axis].mesh.tolist() == ranks, axis
        assert total.item() == sum(1 << r for r in ranks), axis
        assert dims[axis].get_local_rank() == ranks.index(rank), axis
    assert dims["hsdp"].mesh_dim_names == ("dp", "fsdp")
    groups: list[Any] = [dist.group.WORLD, flat_mesh(dims["hsdp"]).get_group()]
    groups += [dims.group(axis) for axis in AXES]
    assert {timeout_of(backend_of(group, torch.device("cpu"))) for group in groups} == {TIMEOUT}
