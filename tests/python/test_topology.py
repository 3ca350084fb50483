"""Rings on paper: known machines and parts of them, and the checker of rings."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from ringcomm.topology import (
    MACHINES,
    Builder,
    LinkKind,
    NodeKind,
    RingPlan,
    Topology,
    check_channels,
    check_orders,
    check_plan,
    find_rings,
)
from ringcomm.topology.fixtures import dgx1v, nvswitch_hosts, pcie8
from ringcomm.topology.routes import best_route

NVLINK = frozenset({LinkKind.NVLINK})


def loads(plan: RingPlan) -> Counter[str]:
    """Channels per link, counted here once more."""
    name = plan.topology.link_name
    return Counter(name(i) for c in plan.channels for hop in c.hops for i in hop)


@pytest.mark.parametrize(
    ("machine", "num_channels", "channel_gb_per_s"),
    [
        ("dgx-1v", 6, 25),
        ("dgx-a100", 12, 25),
        ("hgx-h100", 18, 25),
        ("pcie-8", 1, 16),
        ("2x8", 8, 50),
    ],
)
def test_machines_have_as_many_rings_as_can_be(
    machine: str, num_channels: int, channel_gb_per_s: float
) -> None:
    plan = find_rings(MACHINES[machine]())
    assert check_plan(plan) == []
    assert (len(plan.channels), plan.channel_gb_per_s) == (num_channels, channel_gb_per_s)
    assert plan.bound == num_channels
    assert plan.is_maximum


def test_cube_mesh_uses_every_lane_of_every_gpu() -> None:
    """Six lanes leave each GPU, and six lead from one half to the other: no more than 6 rings."""
    machine = dgx1v()
    nvlinks = [link for link in machine.links if link.kind is LinkKind.NVLINK]
    for gpu in machine.gpus:
        assert sum(link.num_lanes for link in nvlinks if link.src == gpu) == 6
    across = [k for k in nvlinks if k.src in machine.gpus[:4] and k.dst in machine.gpus[4:]]
    assert sum(link.num_lanes for link in across) == 6
    plan = find_rings(machine)
    used = loads(plan)
    assert all(used[machine.link_name(machine.index[k.src, k.dst])] == k.num_lanes for k in nvlinks)
    orders = [channel.order for channel in plan.channels]
    assert all((order[0], *order[:0:-1]) in orders for order in orders), "rings come in pairs"
    assert check_orders(machine, orders, 25, kinds=NVLINK) == []
    # One more of any of them is one too many.
    assert check_orders(machine, [*orders, orders[0]], 25, kinds=NVLINK)


def test_all_parts_of_a_cube_mesh_have_rings() -> None:
    machine = dgx1v()
    for size in range(2, 8):
        for ranks in itertools.combinations(range(8), size):
            plan = find_rings(machine.subset(ranks))
            assert check_plan(plan) == [], ranks
            assert plan.is_maximum, ranks


@pytest.mark.parametrize(
    ("ranks", "num_channels", "kind"),
    [
        ((0, 1, 2, 3), 4, LinkKind.NVLINK),  # a clique of four with four lanes each
        ((0, 1, 2, 3, 4, 5), 2, LinkKind.NVLINK),  # 4 and 5 hang together by one lane
        ((0, 3), 2, LinkKind.NVLINK),
        ((0, 1, 4, 7), 1, LinkKind.SOCKET),  # 1 and 7 have no lane, so the ring goes over PCIe
        ((0, 5), 1, LinkKind.SOCKET),
    ],
)
def test_parts_of_a_cube_mesh(ranks: tuple[int, ...], num_channels: int, kind: LinkKind) -> None:
    plan = find_rings(dgx1v().subset(ranks))
    assert len(plan.channels) == num_channels
    links = plan.topology.links
    assert max(links[i].kind for hop in plan.channels[0].hops for i in hop) is kind
    assert [plan.topology.gpu_name(i) for i in range(len(ranks))] == [f"gpu{r}" for r in ranks]


def test_pcie_ring_crosses_each_bridge_once_each_way() -> None:
    plan = find_rings(pcie8())
    assert plan.channels[0].order == tuple(range(8))
    used = loads(plan)
    assert len(used) == len(plan.topology.links) == 26
    assert set(used.values()) == {1}
    # The order that jumps between the sockets loads the bridge four times each way.
    jumping = check_orders(plan.topology, [(0, 4, 1, 5, 2, 6, 3, 7)], 16)
    assert any("cpu0 -> cpu1" in problem and "need 64" in problem for problem in jumping)


@pytest.mark.parametrize(
    ("topology", "num_nics"),
    [
        pytest.param(MACHINES["2x8"](), 8, id="2x8"),
        pytest.param(dgx1v(2), 4, id="2 cube meshes"),
        pytest.param(dgx1v(3), 4, id="3 cube meshes"),
        pytest.param(nvswitch_hosts("x", 3, num_nics=4, generation="a100"), 4, id="3 hosts"),
        pytest.param(nvswitch_hosts("x", 3, num_nics=2, generation="h100"), 2, id="2 NICs, odd"),
        pytest.param(nvswitch_hosts("x", 2, num_nics=1, generation="a100"), 1, id="1 NIC"),
        pytest.param(nvswitch_hosts("x", 3, num_nics=8, generation="h100"), 8, id="8 NICs, odd"),
        pytest.param(nvswitch_hosts("x", 8, num_nics=8, generation="h100"), 8, id="64 GPUs"),
    ],
)
def test_hosts_are_entered_once_per_channel_through_each_nic(
    topology: Topology, num_nics: int
) -> None:
    plan = find_rings(topology)
    assert check_plan(plan) == []
    assert len(plan.channels) == plan.bound == num_nics
    host_of = [topology.nodes[gpu].host for gpu in topology.gpus]
    for channel in plan.channels:
        hosts = [host for host, _ in itertools.groupby(host_of[rank] for rank in channel.order)]
        assert hosts == list(topology.hosts)
    fabric = {name: n for name, n in loads(plan).items() if "fabric" in name}
    assert len(fabric) == 2 * num_nics * len(topology.hosts)
    assert set(fabric.values()) == {1}
    for hop in (hop for channel in plan.channels for hop in channel.hops):
        nics = [n for i in hop for n in topology.link_name(i).split(" -> ") if "nic" in n]
        assert len({nic.split(".")[1] for nic in nics}) <= 1, "traffic stays on its rail"
        # GPU, PCIe switch, NIC, fabric and back: GPUs beside the NICs, if there are enough.
        assert len(hop) <= 6 or num_nics < 3


@pytest.mark.parametrize(
    ("ranks", "num_channels"),
    [((0, 1, 2, 3, 8, 9, 10, 11), 4), ((3, 12), 1), ((0, 8, 9, 10), 1), ((0, 1, 2, 14, 15), 2)],
)
def test_parts_of_two_hosts(ranks: tuple[int, ...], num_channels: int) -> None:
    """The smaller part decides: each of its GPUs has one NIC."""
    plan = find_rings(MACHINES["2x8"]().subset(ranks))
    assert check_plan(plan) == []
    assert len(plan.channels) == plan.bound == num_channels


def test_hosts_with_pcie_alone() -> None:
    b = Builder("two boxes")
    fabric = b.add("fabric", NodeKind.FABRIC)
    for host in range(2):
        gpus = b.add_gpus(4, host, f"h{host}.")
        switches = [b.add(f"h{host}.pcie{i}", NodeKind.PCIE_SWITCH, host) for i in range(2)]
        b.connect(switches[0], switches[1], LinkKind.PCIE, 31.5)
        for i, gpu in enumerate(gpus):
            b.connect(gpu, switches[i // 2], LinkKind.PCIE, 31.5)
        for i, switch in enumerate(switches):
            nic = b.add(f"h{host}.nic{i}", NodeKind.NIC, host)
            b.connect(nic, switch, LinkKind.PCIE, 31.5)
            b.connect(nic, fabric, LinkKind.NETWORK, 12.5)
    plan = find_rings(b.build())
    assert check_plan(plan) == []
    assert plan.gb_per_s == 25.0


def test_channels_over_hosts_leave_lanes_to_each_other() -> None:
    """Four NICs, and inside the hosts four GPUs in a circle of single lanes: less than four fit."""
    b = Builder("two circles")
    fabric = b.add("fabric", NodeKind.FABRIC)
    for host in range(2):
        gpus = b.add_gpus(4, host, f"h{host}.")
        for i, gpu in enumerate(gpus):
            b.connect(gpu, gpus[i - 1], LinkKind.NVLINK, 25.0)
            nic = b.add(f"h{host}.nic{i}", NodeKind.NIC, host)
            b.connect(gpu, nic, LinkKind.PCIE, 25.0)
            b.connect(nic, fabric, LinkKind.NETWORK, 25.0)
    plan = find_rings(b.build())
    assert check_plan(plan) == []
    assert 1 <= len(plan.channels) < 4


def test_nvlink_over_a_switch_is_better_than_pcie_without() -> None:
    b = Builder("both")
    gpus = b.add_gpus(2)
    switch = b.add("nvswitch", NodeKind.NVSWITCH)
    b.connect(gpus[0], gpus[1], LinkKind.PCIE, 31.5)
    for gpu in gpus:
        b.connect(gpu, switch, LinkKind.NVLINK, 25.0)
    topology = b.build()
    route = best_route(topology, 0, 1)
    assert route is not None
    assert [topology.link_name(i) for i in route] == ["gpu0 -> nvswitch", "nvswitch -> gpu1"]
    assert best_route(topology, 0, 1, NVLINK) == route
    assert best_route(topology, 0, 1, {LinkKind.NETWORK}) is None


def test_results_do_not_change_from_run_to_run() -> None:
    for make in MACHINES.values():
        assert find_rings(make()).channels == find_rings(make()).channels


@pytest.mark.parametrize(
    ("orders", "problem"),
    [
        ([(0, 1, 2, 3, 7, 6, 5, 4)] * 2, r"gpu0 -> gpu1 .* has 25 GB/s, and channels 0, 1 need 50"),
        ([(0, 1, 2, 3, 4, 5, 6, 7)], "channel 0: no path from gpu3 to gpu4"),
        ([(0, 1, 2, 3, 7, 6, 5)], r"not a permutation of the ranks: missing \[4\]"),
        ([(0, 1, 2, 3, 7, 6, 5, 5)], r"repeated \[5\]"),
        ([(0, 1, 2, 3, 7, 6, 5, 8)], r"unknown \[8\]"),
        ([(0, 1, 2, 3, 7, 6, 5, -4)], r"unknown \[-4\]"),
    ],
)
def test_wrong_orders(orders: list[tuple[int, ...]], problem: str) -> None:
    found = check_orders(dgx1v(), orders, 25, kinds=NVLINK)
    assert any(re.search(problem, text) for text in found), found


def test_wrong_channels() -> None:
    plan = find_rings(dgx1v())
    first, second = plan.channels[:2]

    def problems(**changes: Any) -> str:
        changed = (replace(first, **changes), *plan.channels[1:])
        return " | ".join(check_channels(plan.topology, changed, plan.channel_gb_per_s))

    assert problems() == ""
    assert "8 ranks" in problems(hops=first.hops[:-1])
    assert "broken" in problems(hops=first.hops[1:] + first.hops[:1])
    assert "broken" in problems(hops=((999,), *first.hops[1:]))
    assert "ends at gpu0" in problems(hops=((), *first.hops[1:]))
    assert "need 50" in problems(order=second.order, hops=second.hops)
    assert "missing [0]" in problems(order=(1, *first.order[1:]))


def test_plans_that_claim_too_much() -> None:
    plan = find_rings(dgx1v())
    assert "bound is 5" in check_plan(replace(plan, bound=5))[0]
    assert "no channel" in check_plan(replace(plan, channels=()))[0]
    assert "nvlink" in check_plan(replace(plan, kinds=frozenset({LinkKind.PCIE})))[0]
    assert "need 30" in check_plan(replace(plan, channel_gb_per_s=30.0))[0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: find_rings(dgx1v().subset([3])), "two GPUs at least"),
        (lambda: dgx1v().subset([0, 8]), "rank 8 is not one of the 8"),
        (lambda: dgx1v().subset([0, 0]), "named twice"),
        (lambda: dgx1v().subset([]), "no GPU"),
        (lambda: find_rings(dgx1v(), channel_gb_per_s=0), "must be positive"),
        (lambda: find_rings(dgx1v(), channel_gb_per_s=math.nan), "must be positive"),
        (lambda: find_rings(dgx1v(), channel_gb_per_s=99), "no ring of 99 GB/s"),
        (lambda: find_rings(dgx1v(), max_channels=0), "max_channels must be positive"),
        (lambda: find_rings(dgx1v(), step_budget=0), "step_budget must be positive"),
        (lambda: nvswitch_hosts("x", 2, num_nics=0, generation="h100"), "no such machine"),
        (lambda: nvswitch_hosts("x", 2, num_nics=3, generation="h100"), "no such machine"),
        (lambda: nvswitch_hosts("x", 1, num_nics=0, generation="b300"), "generation must be one"),
    ],
)
def test_bad_calls(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()
