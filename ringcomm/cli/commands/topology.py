"""Plans rings on a machine that need not be at hand, and predicts what they reach.

The machine is one of those that are built in, or a JSON file with a square matrix, GPU by GPU:
lanes between two GPUs with --lane-gb-per-s, otherwise GB/s per direction. See
docs/design/topology.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "ring orders and predicted bandwidth of a machine, on paper"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which machine, which of its GPUs, which sizes."""
    add = parser.add_argument
    add("machine", help="dgx-1v, dgx-a100, hgx-h100, pcie-8, 2x8, or a file")
    add("--gpus", help="the GPUs to use, such as 0,1,4,5 (default: all)")
    add("--lane-gb-per-s", type=float, help="of a lane, per direction; entries are then lanes")
    add("--sizes", default="1k,1m,1g", help="bytes of the buffers (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Prints the plan."""
    from ringcomm import topology
    from ringcomm.bench.wording import byte_counts

    try:
        if options.machine in topology.MACHINES:
            machine = topology.MACHINES[options.machine]()
        elif Path(options.machine).is_file():
            matrix = json.loads(Path(options.machine).read_text(encoding="utf-8"))
            machine = topology.topology_from_matrix(matrix, lane_gb_per_s=options.lane_gb_per_s)
        else:
            known = ", ".join(topology.MACHINES)
            raise ValueError(f"{options.machine!r} is no file and none of {known}")
        if options.gpus is not None:
            machine = machine.subset([int(gpu) for gpu in options.gpus.split(",")])
        plan = topology.find_rings(machine)
        print(topology.describe(plan, sizes_bytes=byte_counts(options.sizes)))
    except (ValueError, TypeError) as error:
        options.parser.error(str(error))
    return 0
