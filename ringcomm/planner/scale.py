"""What becomes of collectives and of plans at numbers of ranks that nobody has at hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ringcomm.planner.cluster import Cluster
from ringcomm.planner.job import Job
from ringcomm.planner.mesh import Mesh
from ringcomm.planner.models import find_model
from ringcomm.planner.search import plan
from ringcomm.planner.sizes import in_gb, in_seconds
from ringcomm.planner.step_time import BUCKET_BYTES

__all__ = ["RANKS", "collectives_table", "plans_table"]

RANKS = (8, 64, 1024, 100_000)
_TOKENS_PER_RANK = 16384


def collectives_table(num_bytes: int = BUCKET_BYTES, ranks: Sequence[int] = RANKS) -> str:
    """An all_reduce of replicas on H100s, eight a host, in Markdown.

    Args:
        num_bytes: of each rank's buffer.
        ranks: how many, whole hosts.
    """
    rows = []
    for num_ranks in ranks:
        group = Cluster(num_ranks).data_group(Mesh(num_ranks))
        latency = 2 * group.ring(0)
        ring, levels = 2 * group.ring(num_bytes), 2 * group.levels(num_bytes)
        trees = group.trees(num_bytes)
        rows.append(
            (
                f"{num_ranks:,}",
                in_seconds(ring),
                f"{latency / ring:.0%}",
                in_seconds(levels),
                in_seconds(trees),
                f"{ring / min(levels, trees):.1f}×",
            )
        )
    headers = ("ranks", "ring", "of it latency", "levels", "levels, trees between hosts", "gain")
    return _table(headers, rows)


def plans_table(model: str = "llama-3-70b", ranks: Sequence[int] = RANKS) -> str:
    """The plan that the planner ranks first, with 16,384 tokens a rank, in Markdown."""
    shape = find_model(model)
    rows = []
    for num_ranks in ranks:
        plans = plan(shape, Cluster(num_ranks), Job(tokens=_TOKENS_PER_RANK * num_ranks))
        best = plans.best
        if best is None:
            rows.append((f"{num_ranks:,}", "nothing fits", *[""] * 6))
            continue
        candidate = best.candidate
        rows.append(
            (
                f"{num_ranks:,}",
                candidate.system.name,
                str(candidate.mesh),
                candidate.checkpointing,
                in_gb(best.memory.device),
                in_gb(best.traffic.sent),
                in_seconds(best.time.step),
                f"{best.tokens_per_s / num_ranks:,.0f}",
            )
        )
    headers = ("ranks", "system", "mesh", "recomputed", "memory", "sent", "step")
    return _table((*headers, "tokens/s a rank"), rows)


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---:"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
