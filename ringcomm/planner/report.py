"""Plans on a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from ringcomm.planner.plans import Plan, Plans
from ringcomm.planner.sizes import in_gb, in_seconds

__all__ = ["headline", "refusal_lines", "table_of_plans"]

_PARTS = ("parameters", "gradients", "states", "activations", "buffers")


def headline(plans: Plans) -> str:
    """What was asked, in two lines."""
    shape, cluster, job = plans.shape, plans.cluster, plans.job
    return (
        f"{shape.name}: {shape.num_params:,} parameters, {shape.layers} layers of {shape.hidden};"
        f" {job.tokens:,} tokens a step in sequences of {job.sequence:,}, {job.precision},"
        f" {job.optimizer}\n"
        f"{cluster.num_gpus:,} × {cluster.hardware.name} with {in_gb(cluster.memory_bytes)},"
        f" {cluster.per_host} a host; {len(plans):,} plans fit, {len(plans.refused):,} do not"
    )


def table_of_plans(plans: Plans, top: int) -> Any:
    """A rich table of the first ones; all where top is 0."""
    from ringcomm.measure.screen import make_table

    headers = ["system", "mesh", "schedule", "m × b", "recompute"]
    memory = ["params", "grads", "states", "acts", "buffers", "GB", "host"]
    table = make_table(
        [*headers, *memory, "sent GB", "bubble", "step", "tokens/s", "most is"],
        "Of the fullest rank, in 10^9 bytes; host: of its memory or disks, a rank. m × b:"
        " micro-batches, and sequences of each.",
    )
    for column in table.columns[:3]:
        column.justify = "left"
    for plan in plans.ranked[: top or None]:
        table.add_row(*_cells(plan))
    return table


def _cells(plan: Plan) -> Iterator[str]:
    candidate, memory = plan.candidate, plan.memory
    yield candidate.system.name
    yield str(candidate.mesh)
    yield candidate.schedule
    yield f"{candidate.num_micro_batches} × {candidate.micro_batch}"
    yield candidate.checkpointing
    for part in _PARTS:
        yield _gb(getattr(memory, part))
    yield _gb(memory.device)
    yield _gb(memory.host + memory.disk)
    yield _gb(plan.traffic.sent)
    yield f"{plan.bubble:.0%}" if candidate.mesh.pp > 1 else ""
    yield in_seconds(plan.time.step)
    yield f"{plan.tokens_per_s:,.0f}"
    yield plan.time.largest


def _gb(num_bytes: int) -> str:
    value = num_bytes / 1e9
    return f"{value:,.{2 if value < 10 else 1 if value < 1000 else 0}f}"


def refusal_lines(plans: Plans, top: int) -> Iterator[str]:
    """One per reason and system, with the meshes; the first ones, all where top is 0."""
    meshes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for refusal in plans.refused:
        meshes[refusal.system, refusal.reason].append(refusal.mesh)
    found = list(meshes.items())
    for (system, reason), names in found[: top or None]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{system or 'no system'}, {names[0]}{more}: {reason}"
    if top and len(found) > top:
        yield f"… and {len(found) - top} more reasons: --top 0 has all, --json too"
