"""The report for people."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rich.console import Console

from ringcomm.bench.screen import make_table
from ringcomm.bench.wording import byte_count, microseconds

MIB = 1 << 20


def _caches(cpus: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """`L2: 2 x 1 MiB` per level and size."""

    def kind(cache: dict[str, Any]) -> tuple[int, int]:
        return cache["level"], cache["num_bytes"]

    for (level, size), found in groupby(sorted(cpus["caches"], key=kind), key=kind):
        caches = list(found)
        owners = " | ".join(",".join(map(str, cache["cpus"])) for cache in caches[:8])
        more = " | …" if len(caches) > 8 else ""
        text = f"{len(caches)} × {byte_count(size)}, of CPUs {owners}{more}"
        yield f"L{level} cache", text


def _limit(limit: dict[str, Any] | None, of_bytes: bool) -> str:
    if limit is None:
        return "no limit"
    value = f"{limit['value'] / MIB:,.0f} MiB" if of_bytes else f"{limit['value']:g} CPUs"
    return f"{value} ({limit['file']})"


def _machine_rows(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    versions, cpus, limits = report["versions"], report["cpus"], report["limits"]
    yield (
        "versions",
        ", ".join(
            f"{name} {value}"
            for name, value in versions.items()
            if value is not None and value is not False and value is not True
        ),
    )
    yield "peers", "gloo" if versions["gloo"] else "torch has no Gloo"
    usable = f"{len(cpus['usable'])} of {cpus['num_online']} CPUs on {len(cpus['cores'])} cores"
    yield "cores", f"{report['machine']['cpu']}; {usable}"
    yield from _caches(cpus)
    memory = report["machine"]["memory"]
    yield "memory", ", ".join(f"{k.split('_')[0]} {v / MIB:,.0f} MiB" for k, v in memory.items())
    yield "limit of CPU time", _limit(limits["cpu_cores"], of_bytes=False)
    yield "limit of memory", _limit(limits["memory_bytes"], of_bytes=True)
    yield "limit of open files", f"{limits['max_fds']:,}"
    yield "/dev/shm", limits["dev_shm"]
    variables = report["environment"]
    yield "variables", ", ".join(f"{k}={v}" for k, v in variables.items()) or "no RINGCOMM_* is set"


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
    memory = group.get("memory")
    if memory is not None:
        for name in ("mapped", "resident"):
            text = f"{memory[f'{name}_bytes'] / MIB:.2f} MiB for the group"
            per_pair = memory[f"{name}_bytes_per_pair"]
            if per_pair is not None:
                text += f", {per_pair / MIB:.2f} MiB per pair"
            yield f"shared memory, {name}", text
        yield "", f"at most {memory['max_bytes_per_pair'] >> 20} MiB per pair by default options"


def print_report(console: Console, report: dict[str, Any]) -> None:
    """The machine, the group, its pairs, and what deserves attention."""
    group = report["group"]
    for title, rows in (
        ("this machine", _machine_rows(report)),
        (f"a group of {report['world_size']} rank(s)", _group_rows(group)),
    ):
        table = make_table(["what", "found"], "", wraps=True)
        for row in rows:
            table.add_row(*row)
        if table.row_count:
            console.print(f"\n[bold]{title}[/bold]")
            console.print(table)
    pairs = group.get("pairs", [])
    if pairs:
        table = make_table(["ranks", "transport", "why", "1 KiB, one way µs", "4 MiB, GB/s"], "")
        for pair in pairs:
            table.add_row(
                "–".join(map(str, pair["ranks"])),
                pair["transport"],
                pair["why"],
                microseconds(pair["latency_us"]) if "latency_us" in pair else "–",
                f"{pair['gb_per_s']:.3g}" if "gb_per_s" in pair else "–",
            )
        console.print("\n[bold]pairs of ranks[/bold]")
        console.print(table)
    console.print()
    for note in report["notes"] or ["nothing deserves attention"]:
        console.print(f"• {note}", markup=False)
