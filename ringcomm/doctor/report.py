"""The report of `ringcomm doctor`: one JSON object with what deserves attention, and its tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from ringcomm import tuning
from ringcomm.doctor.facts import (
    Cpus,
    memory_and_load,
    missing_features,
    read_cpus,
    read_limits,
    telling_pairs,
    versions,
)
from ringcomm.doctor.group import examine_group
from ringcomm.measure.machine import MAX_OTHERS_PERCENT, identity, rounded, variables
from ringcomm.measure.ranks import RankError
from ringcomm.measure.screen import byte_count, make_table, microseconds
from ringcomm.options import Options

if TYPE_CHECKING:
    from rich.console import Console

MIB = 1 << 20
SHM_NOTE = (
    "not used: ringcomm's memory comes from memfd_create and is passed on as a file descriptor, so"
    " the size of /dev/shm does not limit it; the cgroup's memory does"
)
# Read by csrc/, losses and the build; each of the others stands for a field of ringcomm.Options.
OTHER_VARIABLES = (
    *("RINGCOMM_SIMD", "RINGCOMM_HOST_ID", "RINGCOMM_CHECK_TARGETS"),
    *("RINGCOMM_CUDA", "RINGCOMM_CUDA_ARCHS", "RINGCOMM_CUDA_DRIVER", "RINGCOMM_CUDA_IMAGE"),
    *("RINGCOMM_USE_ENV", "RINGCOMM_TORCH_INDEX", "RINGCOMM_MAX_JOBS", "RINGCOMM_WERROR"),
)


def known_variables() -> set[str]:
    """The names of all environment variables that ringcomm obeys."""
    return {f"RINGCOMM_{field.name.upper()}" for field in fields(Options)} | set(OTHER_VARIABLES)


def _tuning_notes(path: str | None, machine: dict[str, Any], world_size: int) -> list[str]:
    if path is None:
        return []
    try:
        found = tuning.load(path)
    except (OSError, ValueError) as error:
        return [f"RINGCOMM_TUNING: {error}"]
    notes = [f"RINGCOMM_TUNING: {path}: {text}" for text in found.differences(machine)]
    if found.one_shot_max_bytes(world_size) is None:
        notes.append(f"RINGCOMM_TUNING: {path} has nothing about {world_size} ranks")
    return notes


def _cache_notes(cpus: Cpus, hand_overs: list[dict[str, Any]]) -> list[str]:
    notes = []
    for entry in hand_overs:
        said, measured = cpus.shares_l3(entry["cpus"]), entry["looks_shared"]
        names = " and ".join(map(str, entry["cpus"]))
        if measured is False and said:
            notes.append(
                f"CPUs {names} should share an L3 by what the kernel says, but a hand-over takes"
                f" {entry['us']:.2g} µs: a virtual machine may show caches that it does not have,"
                " or lose them for a time"
            )
        elif measured is False:
            notes.append(f"CPUs {names} share no cache: a hand-over takes {entry['us']:.2g} µs")
        elif measured is None:
            notes.append(
                f"hand-over between CPUs {names} was not measured: it takes a C compiler (cc, gcc"
                " or clang) and two CPUs that are free at the same time"
            )
    return notes


def _limit_notes(cpus: Cpus, limits: dict[str, Any], world_size: int) -> list[str]:
    notes = []
    if world_size > len(cpus.cores):
        notes.append(
            f"{world_size} ranks on {len(cpus.cores)} core(s): ranks wait for each other's turns"
        )
    allowed, file = limits["cpu_cores"] or (float("inf"), "")
    if allowed < min(world_size, len(cpus.usable)):
        notes.append(
            f"the container may use {allowed:g} CPUs ({file}): {world_size} computing ranks are"
            " stopped for a part of the time"
        )
    return notes


def _group_notes(group: dict[str, Any]) -> list[str]:
    notes = [f"the group cannot be made: {text}" for text in group.get("errors", [])]
    memory = group.get("memory", {})
    for name in ("mapped", "resident"):
        per_pair = memory.get(f"{name}_bytes_per_pair")
        if per_pair is not None and per_pair > memory["max_bytes_per_pair"]:
            mib = per_pair / (1 << 20)
            notes.append(
                f"{mib:.1f} MiB are {name} per pair of ranks, over the"
                f" {memory['max_bytes_per_pair'] >> 20} MiB that default options keep to"
            )
    if group.get("others_busy_percent", 0.0) > MAX_OTHERS_PERCENT:
        notes.append(
            f"other programs used {group['others_busy_percent']:.0f} % of the machine meanwhile:"
            " times are longer than they need be"
        )
    return notes


def examine(world_size: int, seconds: float) -> dict[str, Any]:
    """Examines the machine and a group of that many ranks.

    Args:
        world_size: ranks that are started, 1 to 64.
        seconds: per size of all_reduce that is timed.

    Returns:
        What --json prints; `group.errors` are there when the group could not be made.
    """
    cpus, limits, machine = read_cpus(), read_limits(), identity()
    set_variables = variables("RINGCOMM_")
    missing = missing_features()
    try:
        group = examine_group(world_size, telling_pairs(cpus), seconds)
    except RankError as error:
        group = {"errors": [str(error)]}
    unknown = sorted(set_variables.keys() - known_variables())
    notes = [
        *(f"the kernel refuses {text}" for text in missing),
        *_group_notes(group),
        *_limit_notes(cpus, limits, world_size),
        *_cache_notes(cpus, group.get("hand_overs", [])),
        *(f"{name} is set, but ringcomm reads no such variable" for name in unknown),
        *_tuning_notes(set_variables.get("RINGCOMM_TUNING"), machine, world_size),
    ]
    report = {
        "versions": versions(),
        "machine": {**machine, **memory_and_load()},
        "cpus": asdict(cpus),
        "limits": {**limits, "dev_shm": SHM_NOTE, "missing_features": missing},
        "environment": set_variables,
        "world_size": world_size,
        "group": group,
        "notes": notes,
    }
    return dict(rounded(report))


# ---- for people


def _words(value: Any) -> str:
    """A part of the report in a line."""
    if isinstance(value, dict):
        parts = [f"{name} {_words(part)}" for name, part in value.items() if part not in (None, [])]
        return ", ".join(parts)
    if isinstance(value, (list, tuple)):
        return "; ".join(map(_words, value))
    return byte_count(value) if isinstance(value, int) and value > 1 << 20 else f"{value}"


def _group_rows(group: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for entry in group.get("hand_overs", []):
        verdict = {True: "they share a cache", False: "they share none", None: "not measured"}
        time = f"{entry['us']:.2g} µs, " if entry["us"] is not None else ""
        name = f"hand-over, CPUs {' and '.join(map(str, entry['cpus']))}"
        yield name, time + verdict[entry["looks_shared"]]
    if "init_s" in group:
        yield "making the group", f"{group['init_s'] * 1e3:.0f} ms"
    for entry in group.get("all_reduce", []):
        yield (
            f"all_reduce, {byte_count(entry['bytes'])}",
            f"p50 {microseconds(entry['p50_us'])} µs, p99 {microseconds(entry['p99_us'])} µs, busbw"
            f" {entry['busbw_gb_per_s']:.3g} GB/s, {'+'.join(entry['algorithms'])}",
        )
    for pair in group.get("pairs", []):
        times = "not timed"
        if "latency_us" in pair:
            times = (
                f"1 KiB in {microseconds(pair['latency_us'])} µs one way, 4 MiB at"
                f" {pair['gb_per_s']:.3g} GB/s"
            )
        name = f"ranks {'–'.join(map(str, pair['ranks']))}"
        yield name, f"{pair['transport']}, {times}; {pair['why']}"
    if "memory" in group:
        memory = {name: f"{(size or 0) / MIB:.2f} MiB" for name, size in group["memory"].items()}
        yield "shared memory", _words(memory).replace("_bytes", "").replace("_", " ")


def print_report(console: Console, report: dict[str, Any]) -> None:
    """The machine, the group, and what deserves attention."""
    parts = ("versions", "machine", "cpus", "limits", "environment")
    machine = [(name, _words(report[name]) or "nothing is set") for name in parts]
    group = f"a group of {report['world_size']} rank(s)"
    for title, rows in (("this machine", machine), (group, [*_group_rows(report["group"])])):
        table = make_table(["what", "found"], "", wraps=True)
        for row in rows:
            table.add_row(*row)
        if table.row_count:
            console.print(f"\n[bold]{title}[/bold]")
            console.print(table)
    console.print()
    for note in report["notes"] or ["nothing deserves attention"]:
        console.print(f"• {note}", markup=False)
