"""The cost model: sums worked out by hand, published measurements, and the printed report."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from ringcomm.topology import (
    MACHINES,
    CostModel,
    LinkKind,
    busbw_factor,
    describe,
    find_rings,
    predict,
    prediction_rows,
    topology_from_matrix,
)
from ringcomm.topology.fixtures import dgx1v, nvswitch_hosts
from ringcomm.topology.flows import ALGORITHMS, phases_of

GIB = 1 << 30
FREE = CostModel(base_us=0.0, step_us=dict.fromkeys(LinkKind, 0.0))
FLAT = [name for name in ALGORITHMS if name != "hierarchical"]


def switch(num_gpus: int, gb_per_s: float = 100.0) -> Any:
    matrix = [[0 if i == j else gb_per_s for j in range(num_gpus)] for i in range(num_gpus)]
    return find_rings(topology_from_matrix(matrix, switched=True))


@pytest.mark.parametrize(
    ("machine", "algorithm", "low", "high"),
    [
        # 232.5 GB/s measured: github.com/NVIDIA/nccl-tests/issues/175.
        pytest.param(MACHINES["dgx-a100"](), "ring", 225, 242, id="DGX A100"),
        # 365-370 GB/s with NCCL_ALGO=RING: github.com/NVIDIA/nccl/issues/1455.
        pytest.param(MACHINES["hgx-h100"](), "ring", 360, 371, id="HGX H100"),
        # 46-48 GB/s per NIC is what to expect of a ring: github.com/NVIDIA/nccl-tests/issues/290.
        pytest.param(MACHINES["2x8"](), "ring", 8 * 46, 8 * 48, id="2 x 8"),
        # 95-97 GB/s measured with 3 hosts and 4 NICs each: github.com/NVIDIA/nccl-tests/issues/119.
        pytest.param(
            nvswitch_hosts("", 3, num_nics=4, generation="a100"), "ring", 90, 97, id="3 x 8 A100"
        ),
        # No measurement at hand: NCCL counts 20 GB/s for each of the six lanes (src/graph/topo.h).
        pytest.param(MACHINES["dgx-1v"](), "ring", 110, 120, id="DGX-1V"),
        # Nor here: between what NCCL counts for a Skylake's UPI and for a Gen4 slot.
        pytest.param(MACHINES["pcie-8"](), "ring", 10, 24, id="PCIe"),
    ],
)
def test_predictions_are_where_measurements_are(
    machine: Any, algorithm: str, low: float, high: float
) -> None:
    assert low <= predict(find_rings(machine), algorithm, 4 * GIB).busbw_gb_per_s <= high


def test_a_tree_over_two_hosts_exceeds_what_nics_allow_a_ring() -> None:
    """As NCCL's authors say: github.com/NVIDIA/nccl-tests/issues/196."""
    plan = find_rings(MACHINES["2x8"]())
    ring, tree = (predict(plan, name, 4 * GIB) for name in ("ring", "tree"))
    assert "network" in ring.bottleneck
    assert "nvlink" in tree.bottleneck
    assert tree.busbw_gb_per_s > ring.busbw_gb_per_s


def test_two_trees_share_the_work_of_their_roots() -> None:
    """Of three hosts, each is the root with two children in one tree at most, else a leaf."""
    plan = find_rings(nvswitch_hosts("", 3, num_nics=4, generation="a100"))
    assert predict(plan, "tree", 10**9, FREE).time_us == pytest.approx(1.5 / 4 / 24 * 1e6)


@pytest.mark.parametrize("num_gpus", [2, 3, 4, 8])
def test_times_behind_a_switch(num_gpus: int) -> None:
    """Every GPU's cable carries all that it sends and receives: multiples of S at 100 GB/s."""
    plan, n = switch(num_gpus), num_gpus
    expected = {
        "ring": 2 * (n - 1) / n,
        "two_shot": 2 * (n - 1) / n,
        "one_shot": n - 1,
        # Inner ranks of the chain pass sums up and results down.
        "tree": 1 if n == 2 else 2,
    }
    for name, multiple in expected.items():
        result = predict(plan, name, 10**9, FREE)
        assert result.time_us == pytest.approx(multiple * 1e4)
        assert result.algbw_gb_per_s == pytest.approx(100 / multiple)
        assert result.busbw_gb_per_s == pytest.approx(100 / multiple * 2 * (n - 1) / n)


def test_uplinks_add_up_what_crosses_them() -> None:
    """Between the sockets of 4 + 4 GPUs, 16 pairs send the whole buffer; the ring sends once."""
    plan = find_rings(MACHINES["pcie-8"]())
    times = {name: predict(plan, name, 10**9, FREE).time_us * 1e-6 for name in FLAT}
    assert times == pytest.approx(
        {"one_shot": 16 / 16, "two_shot": 2 * 16 / 8 / 16, "ring": 14 / 8 / 16, "tree": 2 / 24}
    )


def test_hierarchical_is_the_sum_of_its_phases() -> None:
    plan = find_rings(MACHINES["2x8"]())
    seconds = predict(plan, "hierarchical", 10**9, FREE).time_us * 1e-6
    assert seconds == pytest.approx(2 * 7 / 8 / (18 * 20.6) + 2 * 1 / 2 / 8 / 48)
    one_per_host = find_rings(MACHINES["2x8"]().subset([0, 8]))
    assert predict(one_per_host, "hierarchical", 10**9, FREE).time_us == pytest.approx(1e6 / 48)


@pytest.mark.parametrize(
    ("machine", "algorithm", "expected_us"),
    [
        ("dgx-a100", "ring", 8.4 + 14 * 3.4),
        ("dgx-a100", "one_shot", 8.4 + 3.4),
        ("dgx-a100", "two_shot", 8.4 + 2 * 3.4),
        ("dgx-a100", "tree", 8.4 + 14 * 3.4),
        ("dgx-1v", "two_shot", 8.4 + 2 * 5.7),  # some pairs only meet over PCIe
        # Of 30 hops in a row out of 14 + 2 per round, the dearest have all four crossings.
        ("2x8", "ring", 8.4 + 26 * 3.4 + 4 * 14),
        ("2x8", "tree", 8.4 + 14 * 3.4 + 2 * 14),
        ("2x8", "hierarchical", 8.4 + 2 * 7 * 3.4 + 2 * 14),
    ],
)
def test_latencies(machine: str, algorithm: str, expected_us: float) -> None:
    result = predict(find_rings(MACHINES[machine]()), algorithm, 1)
    assert result.latency_us == pytest.approx(expected_us)
    assert result.time_us == pytest.approx(expected_us, rel=1e-3)


@pytest.mark.parametrize("machine", list(MACHINES))
def test_ranks_send_what_the_algorithms_say(machine: str) -> None:
    plan = find_rings(MACHINES[machine]())
    topology = plan.topology
    n = len(topology.gpus)
    expected = {"ring": 2 * (n - 1) / n, "two_shot": 2 * (n - 1) / n, "one_shot": n - 1.0}
    for name, multiple in expected.items():
        for gpu in topology.gpus:
            links = [i for i, link in enumerate(topology.links) if link.src == gpu]
            shares = [phase.share.get(i, 0.0) for phase in phases_of(plan, name) for i in links]
            assert sum(shares) == pytest.approx(multiple), name


@pytest.mark.parametrize("machine", list(MACHINES))
def test_larger_buffers_take_longer_and_get_more_bandwidth(machine: str) -> None:
    plan = find_rings(MACHINES[machine]())
    for name in FLAT:
        results = [predict(plan, name, 1 << shift) for shift in range(0, 34, 3)]
        for a, b in itertools.pairwise(results):
            assert a.time_us < b.time_us
            assert a.busbw_gb_per_s < b.busbw_gb_per_s
    # Line rate is never reached: payload gets less, and steps take time.
    assert predict(plan, "ring", GIB).busbw_gb_per_s < plan.gb_per_s


def test_rings_over_shared_lanes_are_slower() -> None:
    """The model sees loads, not promises: all channels on one order overload its single lanes."""
    plan = find_rings(dgx1v())
    crowded = replace(plan, channels=plan.channels[:1] * 6)
    ours, theirs = (predict(p, "ring", GIB, FREE).busbw_gb_per_s for p in (plan, crowded))
    assert ours == pytest.approx(120)
    assert theirs == pytest.approx(20)


def test_routes_through_gpus_count_where_there_is_no_other_way() -> None:
    star = [[0, 10, 10], [10, 0, 0], [10, 0, 0]]
    plan = find_rings(topology_from_matrix(star))
    # 0 -> 1 carries what 0 sends and what 2 sends to 1.
    assert predict(plan, "one_shot", 10**9, FREE).time_us == pytest.approx(2e5)


def test_busbw_factor_is_that_of_nccl_tests() -> None:
    assert [busbw_factor(n) for n in (1, 2, 4, 8)] == [0, 1, 1.5, 1.75]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: predict(switch(2), "ring", 0), "size_bytes must be positive, got 0"),
        (lambda: predict(switch(2), "rings", 1), "algorithm must be one of .* got 'rings'"),
        (
            lambda: predict(switch(2), "hierarchical", 1),
            r"several hosts .* got \[2\]",
        ),
        (
            lambda: predict(find_rings(MACHINES["2x8"]().subset([0, 1, 8])), "hierarchical", 1),
            r"got \[2, 1\]",
        ),
        (lambda: CostModel(step_us={LinkKind.NVLINK: 1.0}), "no latency for pcie, socket, network"),
        (lambda: CostModel(base_us=-1.0), "negative"),
    ],
)
def test_bad_calls(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("machine", list(MACHINES))
def test_report(machine: str) -> None:
    plan = find_rings(MACHINES[machine]())
    text = describe(plan)
    assert text.startswith(f"{plan.topology.name}: {len(plan.topology.gpus)} GPUs")
    assert f"upper bound {plan.bound}: met" in text
    assert "checked: every ring is a permutation" in text
    assert "100% of the line rate" in text
    assert not text.endswith("\n")
    assert max(map(len, text.splitlines())) <= 100
    header, *rows = prediction_rows(plan)
    assert {len(row) for row in rows} == {len(header)}
    names = {row[1] for row in rows}
    assert names == set(ALGORITHMS if machine == "2x8" else FLAT)
    keys = [(int(row[0]), float(row[2])) for row in rows]
    assert keys == sorted(keys), "by size, and the fastest first"


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (find_rings(dgx1v().subset(range(6))), "upper bound 3: not met, but no larger set exists"),
        (replace(find_rings(dgx1v()), bound=7, is_maximum=False), "the search ended at its budget"),
        (replace(find_rings(dgx1v()), channel_gb_per_s=26.0), "need 26"),
    ],
)
def test_report_says_what_is_wrong(plan: Any, text: str) -> None:
    assert text in describe(plan, sizes_bytes=[GIB])
