"""A step of a tiny model, phase by phase: which rank holds what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ringcomm.ops.updates.fused_update import shard_range

Range = tuple[int, int]


class Holding(NamedTuple):
    """What one rank has after a phase, as elements [begin, end) of the flat weights.

    Attributes:
        phase: of the step, such as "backward".
        rank: whose.
        weights, gradients, states: None for nothing.
        is_mean: whether the gradients are the mean over the ranks, or this rank's own.
        is_new: the weights that have been updated.
    """

    phase: str
    rank: int
    weights: Range | None
    gradients: Range | None
    states: Range | None
    is_mean: bool
    is_new: Range | None


class Explanation(NamedTuple):
    """The holdings of all ranks, by phase; prints as a table."""

    num_elems: int
    world_size: int
    stage: int
    holdings: list[Holding]

    def __str__(self) -> str:
        """One line for each rank and phase."""
        head = (
            f"ZeRO stage {self.stage}: {self.num_elems} weights over {self.world_size} ranks"
            " (elements; ~ a rank's own gradients, ' updated weights)"
        )
        rows = [("phase", "rank", "weights", "gradients", "states")]
        last = ""
        for held in self.holdings:
            rows.append(
                (
                    held.phase if held.phase != last else "",
                    str(held.rank),
                    _weights_text(held),
                    _text(held.gradients, "" if held.is_mean else "~"),
                    _text(held.states, ""),
                )
            )
            last = held.phase
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([head, *lines])


def explain(num_elems: int, world_size: int, stage: int) -> Explanation:
    """Says what each rank holds after each phase of a step, of one bucket or unit of weights.

    Args:
        num_elems: the weights of the bucket.
        world_size: the number of ranks.
        stage: 1, 2 or 3. At stage 3 shards are cut here like flat weights; fully_shard cuts between
            rows.

    Raises:
        ValueError: there is no such stage, or no rank.
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"stage is 1, 2 or 3, got {stage!r}")
    if world_size < 1 or num_elems < 0:
        raise ValueError(f"wants a rank and no negative size, got {world_size} and {num_elems}")
    everything = 0, num_elems
    shards = [shard_range(num_elems, world_size, rank) for rank in range(world_size)]
    holdings = []
    for phase in _phases(stage):
        for rank, shard in enumerate(shards):
            holdings.append(
                Holding(
                    phase.name,
                    rank,
                    everything if phase.has_all_weights else shard,
                    {"all": everything, "shard": shard, "": None}[phase.gradients],
                    shard,
                    phase.gradients == "shard",
                    {"all": everything, "shard": shard, "": None}[phase.updated],
                )
            )
    return Explanation(num_elems, world_size, stage, holdings)


class _Phase(NamedTuple):
    name: str
    has_all_weights: bool
    gradients: str  # "", "all" or "shard"
    updated: str


def _phases(stage: int) -> Iterator[_Phase]:
    is_whole = stage < 3
    yield _Phase("start", is_whole, "", "")
    if stage == 3:
        yield _Phase("all-gather for forward", True, "", "")
    yield _Phase("forward", is_whole, "", "")
    if stage == 3:
        yield _Phase("all-gather for backward", True, "", "")
    yield _Phase("backward", True, "all", "")
    yield _Phase("reduce-scatter", is_whole, "all" if stage == 1 else "shard", "")
    if stage == 1:
        yield _Phase("update", True, "all", "shard")
        yield _Phase("all-gather", True, "", "all")
        return
    yield _Phase("update", is_whole, "shard", "shard")
    if stage == 2:
        yield _Phase("all-gather", True, "", "all")
    else:
        yield _Phase("end", False, "", "shard")


def _text(held: Range | None, mark: str) -> str:
    if held is None or held[0] == held[1]:
        return "-"
    return f"{mark}{held[0]}-{held[1] - 1}"


def _weights_text(held: Holding) -> str:
    text = _text(held.weights, "")
    if held.is_new is None or text == "-":
        return text
    return f"{text}'" if held.is_new == held.weights else f"{text} ({_text(held.is_new, '')}')"
