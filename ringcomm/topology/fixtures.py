"""Machines whose wiring is published, at their line rates.

Line rates come from the makers' documents, what payload gets of them (`efficiency`) from the
constants of NCCL's topology model (src/graph/topo.h) and from answers of its authors; each figure
has its source beside it. An NVSwitch system has several switch chips, and every GPU reaches each
with its share of lanes; one node with all lanes is the same graph for any set of flows.
"""

from __future__ import annotations

from collections.abc import Callable

from ringcomm.topology.graph import Builder, LinkKind, NodeKind, Topology

__all__ = ["MACHINES", "dgx1v", "dgx_a100", "hgx_h100", "nvswitch_hosts", "pcie8", "two_by_eight"]

# NVLink 2, 3 and 4: 25 GB/s per lane and direction (datasheets of V100, A100 and H100: 300, 600
# and 900 GB/s per GPU for 6, 12 and 18 lanes, both directions together).
NVLINK_GB_PER_S = 25.0
# "Roughly, the app-level bandwidth is 80 % of the peak" (github.com/NVIDIA/nccl/issues/1054):
# NCCL counts 20 GB/s per lane up to NVLink 3, and 20.6 for NVLink 4.
NVLINK3_EFFICIENCY = 20.0 / 25.0
NVLINK4_EFFICIENCY = 20.6 / 25.0

# PCIe x16 per direction after 128b/130b: 8, 16, 32 GT/s. NCCL counts 12 GB/s for Gen3 and doubles
# it per generation.
PCIE3_GB_PER_S = 15.75
PCIE4_GB_PER_S = 31.5
PCIE5_GB_PER_S = 63.0
PCIE_EFFICIENCY = 12.0 / 15.75

# Between sockets NCCL counts what peer traffic was seen to get, so there is nothing to take off:
# QPI of Broadwell, two-socket EPYC, and UPI of Sapphire Rapids.
QPI_GB_PER_S = 6.0
XGMI_GB_PER_S = 16.0
UPI_GB_PER_S = 22.0

# "24 GB/s is the peak per 200G NIC, 12 per 100G" (github.com/NVIDIA/nccl-tests/issues/119), 46-48
# for 400G (issue 290 there): 0.96 of the line rate.
NETWORK_EFFICIENCY = 0.96

# The cube mesh of a DGX-1 with V100, as in the topology file of github.com/NVIDIA/nccl/issues/671
# and in `nvidia-smi topo -m`: six lanes per GPU, some pairs with two.
DGX1V_LANES = (
    (0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2),
    (1, 2, 2), (1, 3, 1), (1, 5, 2),
    (2, 3, 2), (2, 6, 1),
    (3, 7, 1),
    (4, 5, 1), (4, 6, 1), (4, 7, 2),
    (5, 6, 2), (5, 7, 1),
    (6, 7, 2),
)  # fmt: skip


def _add_pcie(
    b: Builder,
    gpus: list[int],
    lane_gb_per_s: float,
    socket_gb_per_s: float,
    *,
    gpus_per_switch: int,
    host: int = 0,
    prefix: str = "",
) -> list[int]:
    """Adds two CPUs and their PCIe switches above the GPUs; returns the switches."""
    cpus = [b.add(f"{prefix}cpu{i}", NodeKind.CPU, host) for i in range(2)]
    b.connect(cpus[0], cpus[1], LinkKind.SOCKET, socket_gb_per_s)
    num_switches = len(gpus) // gpus_per_switch
    switches = []
    for s in range(num_switches):
        switch = b.add(f"{prefix}pcie{s}", NodeKind.PCIE_SWITCH, host)
        switches.append(switch)
        cpu = cpus[s * 2 // num_switches]
        below = gpus[s * gpus_per_switch : (s + 1) * gpus_per_switch]
        for node in [cpu, *below]:
            b.connect(switch, node, LinkKind.PCIE, lane_gb_per_s, efficiency=PCIE_EFFICIENCY)
    return switches


def _add_nics(
    b: Builder,
    switches: list[int],
    num_nics: int,
    pcie_gb_per_s: float,
    nic_gb_per_s: float,
    fabric: int,
    host: int,
) -> None:
    """Adds NICs, spread evenly over the PCIe switches, and joins them to the fabric."""
    for i in range(num_nics):
        nic = b.add(f"h{host}.nic{i}", NodeKind.NIC, host)
        switch = switches[i * len(switches) // num_nics]
        b.connect(switch, nic, LinkKind.PCIE, pcie_gb_per_s, efficiency=PCIE_EFFICIENCY)
        b.connect(nic, fabric, LinkKind.NETWORK, nic_gb_per_s, efficiency=NETWORK_EFFICIENCY)


def dgx1v(num_hosts: int = 1) -> Topology:
    """DGX-1 with 8 V100: hybrid cube mesh of NVLink 2, PCIe Gen3 below two Broadwell sockets.

    Several hosts have 4 NICs of 100 Gb/s each, one per PCIe switch, as the machine is sold.
    """
    b = Builder("DGX-1V" if num_hosts == 1 else f"{num_hosts} x DGX-1V")
    fabric = b.add("fabric", NodeKind.FABRIC, -1) if num_hosts > 1 else -1
    for host in range(num_hosts):
        prefix = f"h{host}." if num_hosts > 1 else ""
        gpus = b.add_gpus(8, host, prefix)
        for i, j, num_lanes in DGX1V_LANES:
            b.connect(
                gpus[i],
                gpus[j],
                LinkKind.NVLINK,
                NVLINK_GB_PER_S,
                num_lanes=num_lanes,
                efficiency=NVLINK3_EFFICIENCY,
            )
        switches = _add_pcie(
            b, gpus, PCIE3_GB_PER_S, QPI_GB_PER_S, gpus_per_switch=2, host=host, prefix=prefix
        )
        if num_hosts > 1:
            _add_nics(b, switches, 4, PCIE3_GB_PER_S, 12.5, fabric, host)
    return b.build()


def dgx_a100() -> Topology:
    """DGX A100: 12 lanes of NVLink 3 per GPU into NVSwitch, PCIe Gen4 below two EPYC sockets."""
    return nvswitch_hosts("DGX A100", 1, num_nics=0, generation="a100")


def hgx_h100() -> Topology:
    """HGX H100: 18 lanes of NVLink 4 per GPU into NVSwitch, PCIe Gen5 below two Xeon sockets."""
    return nvswitch_hosts("HGX H100", 1, num_nics=0, generation="h100")


def pcie8(socket_gb_per_s: float = XGMI_GB_PER_S) -> Topology:
    """Eight GPUs on PCIe alone: two roots, two switches each, two GPUs each, all Gen4 x16."""
    b = Builder("PCIe, 8 GPUs")
    _add_pcie(b, b.add_gpus(8), PCIE4_GB_PER_S, socket_gb_per_s, gpus_per_switch=2)
    return b.build()


def two_by_eight() -> Topology:
    """Two HGX H100 hosts, each with 8 NICs of 400 Gb/s, one per GPU."""
    return nvswitch_hosts("2 x HGX H100", 2, num_nics=8, generation="h100")


def nvswitch_hosts(name: str, num_hosts: int, *, num_nics: int, generation: str) -> Topology:
    """Hosts of 8 GPUs behind NVSwitch, joined by a fabric that blocks nothing.

    Args:
        name: for texts.
        num_hosts: 1 or more.
        num_nics: per host, 0 to 8 and a divisor of 8; each hangs at a PCIe switch beside its GPUs.
        generation: "a100" (NICs of 200 Gb/s) or "h100" (NICs of 400 Gb/s).

    Raises:
        ValueError: a number or a generation that is none of these.
    """
    figures = {
        "a100": (12, NVLINK3_EFFICIENCY, PCIE4_GB_PER_S, XGMI_GB_PER_S, 25.0),
        "h100": (18, NVLINK4_EFFICIENCY, PCIE5_GB_PER_S, UPI_GB_PER_S, 50.0),
    }
    if generation not in figures:
        raise ValueError(f"generation must be one of {sorted(figures)}, got {generation!r}")
    if num_hosts < 1 or num_nics not in (0, 1, 2, 4, 8) or (num_hosts > 1 and num_nics == 0):
        raise ValueError(f"no such machine: {num_hosts} hosts with {num_nics} NICs each")
    num_lanes, nvlink_efficiency, pcie, socket, nic_gb_per_s = figures[generation]
    b = Builder(name)
    fabric = b.add("fabric", NodeKind.FABRIC, -1) if num_hosts > 1 else -1
    for host in range(num_hosts):
        prefix = f"h{host}." if num_hosts > 1 else ""
        gpus = b.add_gpus(8, host, prefix)
        nvswitch = b.add(f"{prefix}nvswitch", NodeKind.NVSWITCH, host)
        for gpu in gpus:
            b.connect(
                gpu,
                nvswitch,
                LinkKind.NVLINK,
                NVLINK_GB_PER_S,
                num_lanes=num_lanes,
                efficiency=nvlink_efficiency,
            )
        # An HGX H100 board has a switch per GPU, a DGX A100 one per two.
        per_switch = 1 if generation == "h100" else 2
        switches = _add_pcie(
            b, gpus, pcie, socket, gpus_per_switch=per_switch, host=host, prefix=prefix
        )
        if num_hosts > 1:
            _add_nics(b, switches, num_nics, pcie, nic_gb_per_s, fabric, host)
    return b.build()


MACHINES: dict[str, Callable[[], Topology]] = {
    "dgx-1v": dgx1v,
    "dgx-a100": dgx_a100,
    "hgx-h100": hgx_h100,
    "pcie-8": pcie8,
    "2x8": two_by_eight,
}
