"""Topology on paper: ring orders and channels of a machine, and what they are worth.

    from ringcomm import topology
    machine = topology.MACHINES["dgx-1v"]()          # or topology.topology_from_matrix(lanes, ...)
    plan = topology.find_rings(machine)              # 6 rings that share no lane
    topology.predict(plan, "ring", 1 << 30).busbw_gb_per_s
    print(topology.describe(plan))

Nothing here asks the machine it runs on, and no GPU is needed.
"""

from ringcomm.topology.check import check_channels, check_orders, check_plan
from ringcomm.topology.cost_model import CostModel, Prediction, busbw_factor, predict
from ringcomm.topology.fixtures import MACHINES
from ringcomm.topology.graph import Builder, Link, LinkKind, Node, NodeKind, Topology
from ringcomm.topology.matrix import topology_from_matrix
from ringcomm.topology.plan import Channel, RingPlan
from ringcomm.topology.report import describe, prediction_rows
from ringcomm.topology.rings import find_rings

__all__ = [
    "MACHINES",
    "Builder",
    "Channel",
    "CostModel",
    "Link",
    "LinkKind",
    "Node",
    "NodeKind",
    "Prediction",
    "RingPlan",
    "Topology",
    "busbw_factor",
    "check_channels",
    "check_orders",
    "check_plan",
    "describe",
    "find_rings",
    "predict",
    "prediction_rows",
    "topology_from_matrix",
]
