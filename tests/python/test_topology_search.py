"""Rings in meshes given as matrices: the search against brute force, and what is refused."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ringcomm.topology import (
    MACHINES,
    Link,
    LinkKind,
    Node,
    NodeKind,
    Topology,
    check_plan,
    find_rings,
    topology_from_matrix,
)
from ringcomm.topology.bounds import channel_bound
from ringcomm.topology.fixtures import dgx1v
from ringcomm.topology.mesh import pack_rings
from ringcomm.topology.plan import link_loads

NVLINK = frozenset({LinkKind.NVLINK})
# Searches are bounded in steps, not in seconds: on a slow machine only the test takes longer.
QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def complete(size: int, entry: float = 1) -> list[list[float]]:
    return [[0 if i == j else entry for j in range(size)] for i in range(size)]


def from_lanes(lanes: Any, **options: Any) -> Topology:
    return topology_from_matrix(lanes, lane_gb_per_s=25.0, **options)


def torus(rows: int, columns: int) -> np.ndarray[Any, Any]:
    lanes = np.zeros((rows * columns, rows * columns), dtype=int)
    for i, j in itertools.product(range(rows), range(columns)):
        for k, m in (((i + 1) % rows, j), (i, (j + 1) % columns)):
            lanes[i * columns + j, k * columns + m] = lanes[k * columns + m, i * columns + j] = 1
    return lanes


def most_rings(lanes: list[list[int]]) -> int:
    """The oracle: tries every set of directed Hamiltonian cycles."""
    nodes = range(1, len(lanes))
    cycles = [
        Counter(itertools.pairwise((0, *middle, 0))) for middle in itertools.permutations(nodes)
    ]

    def best(first: int, free: Counter[tuple[int, int]]) -> int:
        found = 0
        for i in range(first, len(cycles)):
            if all(free[pair] >= count for pair, count in cycles[i].items()):
                found = max(found, 1 + best(i, free - cycles[i]))
        return found

    return best(0, Counter({(i, j): n for i, row in enumerate(lanes) for j, n in enumerate(row)}))


@pytest.mark.parametrize(
    ("matrix", "num_channels"),
    [
        pytest.param(complete(2), 1, id="a pair"),
        pytest.param(
            complete(4), 2, id="4 in a clique: of three lanes a ring cannot use the third"
        ),
        pytest.param(complete(5), 4, id="5 in a clique"),
        pytest.param(complete(8), 7, id="8 in a clique"),
        pytest.param(torus(4, 4), 4, id="torus 4 x 4"),
        pytest.param(torus(8, 8), 4, id="torus 8 x 8"),
        pytest.param(torus(3, 5), 4, id="torus 3 x 5"),
    ],
)
def test_meshes(matrix: Any, num_channels: int) -> None:
    plan = find_rings(from_lanes(matrix))
    assert check_plan(plan) == []
    assert plan.is_maximum
    assert len(plan.channels) == num_channels


def test_half_a_lane_per_channel_can_use_what_whole_lanes_cannot() -> None:
    plan = find_rings(from_lanes(complete(4)), channel_gb_per_s=12.5)
    assert check_plan(plan) == []
    assert (len(plan.channels), plan.bound, plan.gb_per_s) == (6, 6, 75.0)


@pytest.mark.parametrize("size", [2, 3, 16, 64])
def test_switches_of_any_size(size: int) -> None:
    plan = find_rings(from_lanes(complete(size, 18), switched=True))
    assert check_plan(plan) == []
    assert len(plan.channels) == plan.bound == 18


@pytest.mark.parametrize(
    "matrix",
    [
        pytest.param([[0, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]], id="star"),
        pytest.param([[0, 2, 0], [2, 0, 1], [0, 1, 0]], id="line"),
    ],
)
def test_without_a_cycle_one_ring_goes_around_the_tree(matrix: Any) -> None:
    plan = find_rings(from_lanes(matrix))
    assert check_plan(plan) == []
    assert "spanning tree" in plan.method
    assert len(plan.channels) == plan.bound == 1
    assert link_loads(plan.channels) == dict.fromkeys(range(len(plan.topology.links)), 1)


def test_the_tree_is_the_widest() -> None:
    """A triangle with one narrow side, and a GPU at a single link: no ring without the tree."""
    plan = find_rings(
        topology_from_matrix([[0, 50, 10, 0], [50, 0, 50, 0], [10, 50, 0, 50], [0, 0, 50, 0]])
    )
    assert check_plan(plan) == []
    assert plan.gb_per_s == 50.0


def test_the_rate_with_the_most_bandwidth_wins() -> None:
    """A square of 40 GB/s with diagonals of 30: 2 rings of 40 are more than 2 of 30."""
    matrix = [[0, 40, 30, 40], [40, 0, 40, 30], [30, 40, 0, 40], [40, 30, 40, 0]]
    plan = find_rings(topology_from_matrix(matrix))
    assert (len(plan.channels), plan.channel_gb_per_s) == (2, 40)
    narrow = find_rings(topology_from_matrix([[0, 50, 20], [50, 0, 50], [20, 50, 0]]))
    assert (len(narrow.channels), narrow.channel_gb_per_s) == (2, 20)


def test_a_spent_budget_leaves_a_ring_and_says_so() -> None:
    plan = find_rings(from_lanes(torus(8, 8)), step_budget=1)
    assert check_plan(plan) == []
    assert len(plan.channels) == 1
    assert not plan.is_maximum
    dense = find_rings(from_lanes(complete(16, 2)))
    assert check_plan(dense) == []
    assert 10 <= len(dense.channels) < dense.bound == 30
    assert not dense.is_maximum


def test_fewer_channels_on_demand() -> None:
    assert len(find_rings(dgx1v(), max_channels=3).channels) == 3
    assert len(find_rings(MACHINES["2x8"](), max_channels=5).channels) == 5
    # A tiny rate is not an endless list.
    assert len(find_rings(MACHINES["dgx-a100"](), channel_gb_per_s=1e-3).channels) == 64


def test_one_way_links() -> None:
    ring = [[0, 3.5, 0], [0, 0, 3.5], [3.5, 0, 0]]
    plan = find_rings(topology_from_matrix(ring, directed=True))
    assert [channel.order for channel in plan.channels] == [(0, 1, 2)]
    both = [[0, 1, 0, 1], [0, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 0]]
    with pytest.raises(ValueError, match="one-way links only"):
        find_rings(from_lanes(both, directed=True))


def test_two_hosts_from_one_matrix() -> None:
    """Two cliques of four, and a network link from each GPU to its counterpart."""
    matrix = np.kron(np.eye(2), np.array(complete(4, 50))) + np.kron(
        [[0, 1], [1, 0]], np.eye(4) * 25
    )
    topology = topology_from_matrix(matrix, hosts=[0] * 4 + [1] * 4)
    kinds = Counter(link.kind for link in topology.links)
    assert kinds == {LinkKind.NVLINK: 24, LinkKind.NETWORK: 8}
    plan = find_rings(topology)
    assert check_plan(plan) == []
    assert plan.gb_per_s == 100.0, "four links of 25 GB/s lead out of a host"


lane_matrices = st.integers(3, 5).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 2), min_size=n, max_size=n), min_size=n, max_size=n)
)


def without_diagonal(lanes: list[list[int]]) -> list[list[int]]:
    return [[0 if i == j else n for j, n in enumerate(row)] for i, row in enumerate(lanes)]


@QUICK
@given(lanes=lane_matrices, symmetric=st.booleans())
def test_search_finds_the_maximum(lanes: list[list[int]], symmetric: bool) -> None:
    lanes = without_diagonal(lanes)
    if symmetric:
        lanes = [
            [lanes[max(i, j)][min(i, j)] for j in range(len(lanes))] for i in range(len(lanes))
        ]
    bound = min(*map(sum, lanes), *map(sum, zip(*lanes, strict=True)))
    packing = pack_rings(lanes, bound, 100_000)
    assert packing.is_maximum
    assert len(packing.rings) == most_rings(lanes)


@QUICK
@given(lanes=lane_matrices)
# Much leads from the first two to the others, and one lane back.
@example(lanes=[[0, 5, 5, 0], [5, 0, 0, 5], [1, 0, 0, 5], [0, 0, 5, 0]])
def test_bound_is_the_smallest_cut(lanes: list[list[int]]) -> None:
    lanes = without_diagonal(lanes)
    nodes = range(len(lanes))
    cuts = [
        sum(lanes[i][j] for i in part for j in nodes if j not in part)
        for size in nodes[1:]
        for part in itertools.combinations(nodes, size)
    ]
    assume(min(cuts) > 0)
    topology = from_lanes(lanes, directed=True)
    assert channel_bound(topology, 25.0, NVLINK) == min(cuts)
    assert most_rings(lanes) <= min(cuts)


@QUICK
@given(
    size=st.integers(3, 12),
    orders=st.lists(st.randoms(use_true_random=False), min_size=1, max_size=3),
    noise=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=8),
    both_ways=st.booleans(),
)
def test_planted_rings_are_found(
    size: int, orders: list[Any], noise: list[tuple[int, int]], both_ways: bool
) -> None:
    lanes = np.zeros((size, size), dtype=int)
    for random in orders:
        ring = list(range(size))
        random.shuffle(ring)
        for i, j in zip(ring, ring[1:] + ring[:1], strict=True):
            lanes[i, j] += 1
    for i, j in noise:
        if i != j and max(i, j) < size:
            lanes[i, j] += 1
    if both_ways:
        lanes = lanes + lanes.T
    plan = find_rings(from_lanes(lanes, directed=not both_ways))
    assert check_plan(plan) == []
    assert 1 <= len(plan.channels) <= plan.bound
    assert plan.method == "search in the mesh"
    if plan.is_maximum:
        assert len(plan.channels) >= len(orders) * (1 + both_ways)


@QUICK
@given(
    size=st.integers(2, 7),
    data=st.data(),
)
def test_any_connected_matrix_has_a_ring(size: int, data: st.DataObject) -> None:
    entries = st.sampled_from([0.0, 0.0, 6.0, 12.5, 25.0, 50.0])
    matrix = np.zeros((size, size))
    for i in range(1, size):
        matrix[i, data.draw(st.integers(0, i - 1))] = 10.0
        for j in range(i):
            matrix[i, j] = max(matrix[i, j], data.draw(entries))
    plan = find_rings(topology_from_matrix(matrix + matrix.T))
    assert check_plan(plan) == []
    assert len(plan.channels) <= plan.bound


@pytest.mark.parametrize(
    ("matrix", "options", "error", "text"),
    [
        ([[0, 1], [1]], {}, ValueError, "not square"),
        (np.zeros((2, 3)), {}, ValueError, "not square"),
        ([], {}, ValueError, "empty"),
        ([1, 2], {}, ValueError, "two-dimensional"),
        (7, {}, ValueError, "two-dimensional"),
        ([[0, -1], [-1, 0]], {}, ValueError, r"\[0\]\[1\] must be finite and not negative, got -1"),
        ([[0, math.nan], [1, 0]], {}, ValueError, "finite"),
        ([[0, math.inf], [math.inf, 0]], {}, ValueError, "finite"),
        ([[1, 1], [1, 0]], {}, ValueError, "linked to itself"),
        ([[0, 1], [2, 0]], {}, ValueError, "not symmetric"),
        ([[0, "1"], ["1", 0]], {}, TypeError, "must be a number, got '1'"),
        ([[0, True], [True, 0]], {}, TypeError, "must be a number"),
        ([[0, 0], [0, 0]], {}, ValueError, "no path from gpu0 to gpu1"),
        ([[0, 1], [0, 0]], {"directed": True}, ValueError, "no path from gpu1 to gpu0"),
        ([[0, 1.5], [1.5, 0]], {"lane_gb_per_s": 25}, ValueError, "whole number of lanes"),
        ([[0, 1], [1, 0]], {"lane_gb_per_s": 0}, ValueError, "lane_gb_per_s must be positive"),
        ([[0, 1], [1, 0]], {"efficiency": 1.5}, ValueError, "efficiency"),
        ([[0, 1], [1, 0]], {"hosts": [0]}, ValueError, "1 entries for 2 GPUs"),
        ([[0, 1, 2], [1, 0, 1], [2, 1, 0]], {"switched": True}, ValueError, "same positive entry"),
    ],
)
def test_bad_matrices(matrix: Any, options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        topology_from_matrix(matrix, **options)


@pytest.mark.parametrize(
    ("nodes", "links", "text"),
    [
        ([], [], "no GPU"),
        (["cpu"], [], "no GPU"),
        (["a", "a"], [(0, 1), (1, 0)], "same name"),
        (["a", "b"], [(0, 0)], "does not join two"),
        (["a", "b"], [(0, 2)], "does not join two"),
        (["a", "b"], [(0, 1), (0, 1)], "twice"),
        (["a", "b"], [(0, 1)], "no path from b to a"),
    ],
)
def test_bad_graphs(nodes: list[str], links: list[tuple[int, int]], text: str) -> None:
    kinds = [NodeKind.CPU if name == "cpu" else NodeKind.GPU for name in nodes]
    made = tuple(Link(src, dst, LinkKind.PCIE, 1, 16.0) for src, dst in links)
    with pytest.raises(ValueError, match=text):
        Topology("bad", tuple(map(Node, nodes, kinds)), made)
