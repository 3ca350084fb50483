"""A topology from what a user has: a GPU x GPU matrix, as `nvidia-smi topo -m` shows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from ringcomm.topology.graph import Builder, Link, LinkKind, NodeKind, Topology

__all__ = ["topology_from_matrix"]


def topology_from_matrix(
    matrix: Any,
    *,
    lane_gb_per_s: float | None = None,
    kind: LinkKind = LinkKind.NVLINK,
    hosts: Sequence[int] | None = None,
    directed: bool = False,
    switched: bool = False,
    efficiency: float = 1.0,
    name: str = "matrix",
) -> Topology:
    """Builds a topology whose GPUs are joined as a matrix says.

    Args:
        matrix: N x N numbers (nested lists, numpy, torch), 0 where there is no link and on the
            diagonal. With `lane_gb_per_s` the entries are whole numbers of lanes (4 for "NV4"),
            without it they are GB/s per direction, and a link is one lane.
        lane_gb_per_s: line rate of a lane per direction.
        kind: of the links within a host.
        hosts: host of each GPU; links between hosts are network links. None puts all on one.
        directed: accept a matrix that is not symmetric; entry [i][j] leads from i to j.
        switched: the entries are lanes into a common switch, as NV12 between all pairs of a DGX
            A100 is, and not lanes between two GPUs. All off-diagonal entries must be equal.
        efficiency: share of the line rate that payload gets.
        name: for texts.

    Returns:
        The topology; rank i is row i.

    Raises:
        ValueError: not square, not symmetric, negative, not finite, a GPU linked to itself, a part
            of a lane, or GPUs that cannot reach each other.
        TypeError: an entry is no number.
    """
    rows = _rows(matrix)
    num_gpus = len(rows)
    if hosts is not None and len(hosts) != num_gpus:
        raise ValueError(f"hosts has {len(hosts)} entries for {num_gpus} GPUs")
    if lane_gb_per_s is not None:
        _check_whole(rows)
    if not directed:
        _check_symmetric(rows)
    builder = Builder(name)
    on_host = [0] * num_gpus if hosts is None else hosts
    gpus = [builder.add(f"gpu{i}", NodeKind.GPU, on_host[i]) for i in range(num_gpus)]
    if switched:
        lanes = _common_entry(rows)
        switch = builder.add("switch", NodeKind.NVSWITCH)
        links = [(gpu, switch, kind, lanes) for gpu in gpus]
        links += [(switch, gpu, kind, lanes) for gpu in gpus]
    else:
        links = [
            (i, j, kind if on_host[i] == on_host[j] else LinkKind.NETWORK, rows[i][j])
            for i in gpus
            for j in gpus
            if rows[i][j]
        ]
    for src, dst, link_kind, entry in links:
        num_lanes, lane = (1, entry) if lane_gb_per_s is None else (int(entry), lane_gb_per_s)
        builder.connect_one_way(Link(src, dst, link_kind, num_lanes, lane, efficiency))
    return builder.build()


def _rows(matrix: Any) -> list[list[float]]:
    plain = matrix.tolist() if hasattr(matrix, "tolist") else matrix
    if not isinstance(plain, list | tuple) or not all(isinstance(r, list | tuple) for r in plain):
        raise ValueError("the matrix must be two-dimensional: a list of rows")
    size = len(plain)
    if size == 0:
        raise ValueError("the matrix is empty")
    for i, row in enumerate(plain):
        if len(row) != size:
            raise ValueError(
                f"the matrix is not square: {size} rows, row {i} has {len(row)} columns"
            )
        for j, entry in enumerate(row):
            if isinstance(entry, bool) or not isinstance(entry, Real):
                raise TypeError(f"entry [{i}][{j}] must be a number, got {entry!r}")
            if not math.isfinite(entry) or entry < 0:
                raise ValueError(f"entry [{i}][{j}] must be finite and not negative, got {entry}")
        if row[i] != 0:
            raise ValueError(
                f"entry [{i}][{i}] must be 0, got {row[i]}: no GPU is linked to itself"
            )
    return [list(map(float, row)) for row in plain]


def _check_whole(rows: list[list[float]]) -> None:
    for i, row in enumerate(rows):
        for j, entry in enumerate(row):
            if entry != int(entry):
                raise ValueError(
                    f"entry [{i}][{j}] must be a whole number of lanes, got {entry}; "
                    "leave out lane_gb_per_s if the entries are GB/s"
                )


def _check_symmetric(rows: list[list[float]]) -> None:
    for i, row in enumerate(rows):
        for j in range(i):
            if row[j] != rows[j][i]:
                raise ValueError(
                    f"the matrix is not symmetric: [{i}][{j}] is {row[j]:g} and [{j}][{i}] is "
                    f"{rows[j][i]:g}; say directed=True if that is so"
                )


def _common_entry(rows: list[list[float]]) -> float:
    entries = {entry for i, row in enumerate(rows) for j, entry in enumerate(row) if i != j}
    if len(entries) != 1 or entries == {0.0}:
        raise ValueError(
            f"switched=True needs the same positive entry for every pair, got {sorted(entries)}"
        )
    return entries.pop()
