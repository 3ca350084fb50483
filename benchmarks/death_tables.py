"""The table of deaths: docs/reliability.md's, and what deaths.py prints."""

from __future__ import annotations

from typing import Any

from cells import Cell, Run, grid_of

# How the ranks of a backend go on after the error.
SHRINK, STAY, END = "shrink", "stay", "end"
HOSTS = "ringcomm-hosts"  # two, which exchange messages over Gloo
BACKENDS = {"ringcomm": SHRINK, HOSTS: STAY, "gloo": STAY, "gloo-end": END, "mpi": STAY}
NAMES = {
    HOSTS: "ringcomm, two hosts",
    "gloo": "Gloo, caught",
    "gloo-end": "Gloo, not caught",
    "mpi": "MPI",
}


def figures(found: dict[str, float] | None) -> str:
    """``p50 / p99 / max``."""
    if found is None:
        return "–"
    return " / ".join(f"{found[name]:,.1f}" for name in ("p50", "p99", "max"))


def group_figures(record: dict[str, Any]) -> str:
    """None between hosts; records of 25 November 2026 are from before shrink() refused them."""
    return figures(record["new_group"] if BACKENDS[record["backend"]] == SHRINK else None)


COLUMNS: list[tuple[str, Cell]] = [
    ("backend", lambda r: NAMES.get(r["backend"], str(r["backend"]))),
    ("killed in a", lambda r: r["moment"]),
    ("ranks", lambda r: str(r["world_size"])),
    ("deaths", lambda r: str(r["num_deaths"])),
    ("death to last error, ms", lambda r: figures(r["aware"]) + ("" if r["quiet"] else " *")),
    ("call to last error, ms", lambda r: figures(r["after_call"])),
    ("then to the new group, ms", group_figures),
    ("ranks with an error", lambda r: f"{100 * r['raised_share']:.0f} %"),
]


def death_lines(runs: list[Run]) -> list[str]:
    """Heading and grid."""
    num_strangers = runs[0][0]["strangers"]
    beside = f"Beside {num_strangers} CPU-bound processes" if num_strangers else "Ranks alone"
    title = f"{beside}; median / 99th percentile / most:"
    return [title, *grid_of(COLUMNS, 2, [record for run in runs for record in run])]
