"""This machine as the planner sees it: `ringcomm bench systems --tuning FILE`.

The costs of collectives are the file's. The others are those of calls that take turns with the
systems, on all ranks at once: forward and backward of a rank's rows, AdamW's update of all weights,
and memory that is new. The predictions have seen the time of no system.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from workload import Workload

from ringcomm import planner
from ringcomm.cost_model import Machine
from ringcomm.measure.timing import Timings
from ringcomm.planner.costs import compute_flops
from ringcomm.planner.hardware import HARDWARE, Hardware

BACKWARD, UPDATE, NEW_MEMORY = "backward alone", "update", "new memory"
# More than an allocator keeps.
NEW_BYTES = 64 << 20


def calibration(systems: Workload) -> dict[str, Callable[[], object]]:
    """The calls besides the backward pass."""
    model = systems.model()
    adamw = torch.optim.AdamW(model.parameters(), fused=True)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return {
        UPDATE: adamw.step,
        NEW_MEMORY: lambda: torch.empty(NEW_BYTES, dtype=torch.uint8).zero_(),
    }


def measured(systems: Workload, timings: dict[str, Timings], machine: Machine) -> Hardware:
    """A core with the speeds of these calls."""
    shape = systems.shape()
    seconds = {
        name: timings[name].summary_us()["p50_us"] * 1e-6 for name in (BACKWARD, UPDATE, NEW_MEMORY)
    }
    of_rank = planner.Job(systems.rows * systems.tokens, systems.tokens, "fp32")
    rate = compute_flops(shape, of_rank, "none") / seconds[BACKWARD]
    return replace(
        HARDWARE["cpu-core"],
        name="measured",
        machine=machine,
        peak_flops={"bf16": rate, "fp32": rate},
        utilisation=1.0,
        memory_rate=24 * shape.num_params / seconds[UPDATE],
        new_memory_rate=NEW_BYTES / seconds[NEW_MEMORY],
    )
