"""Tables and plots of records, and that README has those of the committed ones."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import harness
import plot
import pytest
import table
from report import read_records

from ringcomm.measure.ranks import EXIT_FAILED, EXIT_OK


def test_table_prefers_what_was_measured_on_a_quiet_machine() -> None:
    def record(date: str, quiet: bool) -> dict[str, Any]:
        place = {"op": "all_reduce", "world_size": 2, "device": "cpu", "dtype": "float32"}
        state = {"quiet": quiet, "verified": True, "machine": {"cpu": "a CPU", "cores": 2}}
        return {"kind": "collective", "date": date, "bytes": 64, **place, **state}

    old, quiet, busy = record("1", True), record("2", True), record("3", False)
    layout = table.LAYOUTS["collective"]
    assert table.newest([old, busy, quiet], layout) == [[quiet]]
    assert table.newest([busy], layout) == [[busy]]


FACTS = {
    "date": "2026-11-20T10:00:00+00:00",
    "commit": "0123456789abcdef",
    "dirty": False,
    "machine": {"cpu": "a CPU", "cores": 2, "kernel": "6.18"},
    "torch": "2.13.0",
    "ringcomm": "0.1.0",
}
MEASURED = (
    "Measured on a CPU, 2 cores, Linux 6.18; torch 2.13.0, ringcomm 0.1.0;"
    " 2026-11-20T10:00:00+00:00; commit 012345678."
)


def collective_records(world: int, op: str, num_bytes: int, us: float) -> list[dict[str, Any]]:
    """Of a point where Gloo takes 12.5 times as long."""
    place = {"op": op, "bytes": num_bytes, "world_size": world, "device": "cpu", "dtype": "float32"}
    state = {"quiet": True, "verified": True}
    ratio = {"over": "ringcomm", "p50": 12.5, "p10": 9.7, "p90": 104.4}
    return [
        {"kind": "collective", **FACTS, **place, **state, "backend": backend, **figures}
        for backend, figures in (
            ("ringcomm", {"p50_us": us, "ratio": None}),
            ("gloo", {"p50_us": 12.5 * us, "ratio": ratio}),
        )
    ]


def race_records(tokens: str) -> list[dict[str, Any]]:
    """Of the main job's former races: one record for both backends."""
    rows, context = {"default": (4, 128), "small": (1, 64)}[tokens]
    record = {
        "kind": "races",
        **FACTS,
        "world_size": 2,
        "device": "cpu",
        "backends": ["ringcomm", "gloo"],
        "size": "4.6M",
        "num_params": 4558080,
        "tokens": tokens,
        "rows_per_rank": rows,
        "tokens_per_row": context,
        "ratio": {"over": "ringcomm", "p50": 1.846, "p10": 1.62, "p90": 2.1},
        "verified": True,
        "quiet": True,
        "no_claim": None,
    }
    why = "it is not known what others did"
    return [
        {**record, "system": "LOMO"},
        {**record, "system": "DDP", "quiet": False, "no_claim": why},
    ]


def write_records(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def test_tables_are_written_between_the_marks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kib, mib = 1 << 10, 1 << 20
    old = [{**r, "date": "2026-11-19"} for r in collective_records(2, "all_reduce", kib, 9.0)]
    odd = collective_records(2, "all_reduce", 3 * kib, 9.0)  # of the plots only
    files = [
        write_records(tmp_path / name, records)
        for name, records in {
            "two.jsonl": collective_records(2, "all_reduce", 4 * mib, 2345.6),
            "small.jsonl": collective_records(2, "all_reduce", kib, 1.5) + old + odd,
            "barrier.jsonl": collective_records(2, "barrier", 0, 0.8),
            "four.jsonl": collective_records(4, "all_reduce", kib, 3.0),
            "eight.jsonl": collective_records(8, "all_reduce", kib, 3.0),
            "gather.jsonl": collective_records(2, "all_gather", kib, 2.0),
            "races.jsonl": race_records("default") + race_records("small"),
        }.items()
    ]
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n", encoding="utf-8")
    assert table.main(["--write", str(readme), *files]) == EXIT_OK
    header = (
        "| operation | bytes | ringcomm, µs | gloo, µs | gloo / ringcomm (10–90 %) |\n"
        "|---|---:|---:|---:|---:|"
    )
    num_params = race_records("small")[0]["num_params"]
    expected = f"""before
{table.BEGIN}

2 ranks, float32, cpu; median of calls, the slowest rank counts:

{header}
| `all_reduce` | 1 KiB | 1.5 | 18.8 | 12.5× (9.70–104) |
| `all_reduce` | 4 MiB | 2,346 | 29,320 | 12.5× (9.70–104) |
| `barrier` | – | 0.8 | 10 | 12.5× (9.70–104) |

{MEASURED}

4 ranks, float32, cpu; median of calls, the slowest rank counts:

{header}
| `all_reduce` | 1 KiB | 3 | 37.5 | 12.5× (9.70–104) |

{MEASURED}

2 ranks, float32, cpu; median µs of calls over ringcomm by bytes, and how many times as long \
gloo takes:

| operation | 1 KiB |
|---|---:|
| `all_gather` | 2 (12.5×) |

{MEASURED}

Training steps, gloo / ringcomm, by tokens: 2 ranks, {num_params:,} parameters, cpu; median \
of pairs of neighbouring steps (10–90 %), the slowest rank counts:

| system | default: 4 × 128 per rank | small: 1 × 64 per rank |
|---|---:|---:|
| LOMO | 1.85× (1.62–2.10) | 1.85× (1.62–2.10) |
| DDP | 1.85× (1.62–2.10) * | 1.85× (1.62–2.10) * |

{MEASURED}

\\* it is not known what others did.

{table.END}
after
"""
    assert readme.read_text(encoding="utf-8") == expected
    assert table.main(["--write", str(readme), *files]) == EXIT_OK
    assert readme.read_text(encoding="utf-8") == expected
    assert table.main(["--kind", "races", *files]) == EXIT_OK
    assert "| LOMO | 1.85× (1.62–2.10) |" in capsys.readouterr().out
    assert table.main(["--kind", "waiting", *files]) == EXIT_FAILED
    with pytest.raises(ValueError, match="no line"):
        table.with_tables(f"{table.END}{table.BEGIN}", ["a table"])


def rows_of(records: list[dict[str, Any]], kind: str) -> list[str]:
    """The head and rows of the only table of a kind."""
    (text,) = table.tables(records, table.LAYOUTS[kind])
    return [line for line in text.splitlines() if line.startswith("| ")]


def test_mpi_is_a_column_and_named_below() -> None:
    """Rows of runs without it have none."""
    library = {"mpi": "An MPI 4.1"}
    records = [{**r, **library} for r in collective_records(2, "all_reduce", 1024, 4.0)]
    records.append({**records[1], "backend": "mpi4py", "p50_us": 8.0})
    records += collective_records(2, "all_reduce", 2048, 4.0)
    head, *rows = rows_of(records, "collective")
    assert "| ringcomm, µs | gloo, µs | mpi4py, µs |" in head
    assert rows[0].startswith("| `all_reduce` | 1 KiB | 4 | 50 | 8 | 12.5× (9.70–104) | 12.5×")
    assert rows[1] == "| `all_reduce` | 2 KiB | 4 | 50 | – | 12.5× (9.70–104) | – |"
    (text,) = table.tables(records, table.LAYOUTS["collective"])
    assert "ringcomm 0.1.0, An MPI 4.1; 2026" in text


def ratio_over(subject: str) -> dict[str, Any]:
    return {"over": subject, "p50": 4.0, "p10": 2.0, "p90": 5.0}


def records_by(kind: str, field: str, *names: str, **more: Any) -> list[dict[str, Any]]:
    """A record per contender: each takes 8 µs, and the first is compared with the others."""
    state = {"kind": kind, **FACTS, "world_size": 2, "quiet": True, "verified": True, **more}
    first = {**state, field: names[0], "p50_us": 8.0, "ratio": None}
    return [first, *({**first, field: name, "ratio": ratio_over(names[0])} for name in names[1:])]


def test_tables_of_the_other_kinds() -> None:
    share = {"p50": 0.25, "p10": 0.2, "p90": 0.31}
    step: dict[str, Any] = {"system": "DDP", "communication_share": share, "num_params": 1000}
    step |= {"rows_per_rank": 2, "tokens_per_row": 64}
    update: dict[str, Any] = {"optimizer": "adamw", "dtype": "float32", "bytes": 1 << 20}
    sizes = {f"{name}_bytes": 1 << 20 for name in ("param", "grad", "state", "sent", "formula")}
    whole: dict[str, Any] = {**step, **sizes, "loss": 5.0, "p99_us": 9.0, "update_p50_us": 2.0}
    del whole["system"], whole["communication_share"]
    memory: dict[str, Any] = {"quantity": "memory", "unit": "bytes"}
    waits: dict[str, Any] = {"quantity": "of a core", "unit": "%", "value": 0.1234}
    records = [
        *records_by("floor", "variant", "floor", "staged", "shared", bytes=1 << 20, quiet=False),
        *records_by("steps", "backend", "ringcomm", "gloo", "fake", **step),
        *records_by("systems", "system", "ddp", "ddp on gloo", **whole),
        *records_by("fused_update", "way", "fused", "zero1", "ringcomm", "gloo", **update),
        *records_by("footprint", "backend", "ringcomm", value=593920, **memory),
        *records_by("footprint", "backend", "gloo", value=3 << 20, **memory),
        *records_by("footprint", "backend", "ringcomm", **waits),
    ]
    (row,) = rows_of(records, "floor")[1:]
    assert row == "| 2 | 1 MiB | 8 | 8 | 25 % (20–50) * | 8 | 25 % (20–50) * |"
    head, row = rows_of(records, "steps")
    assert head.endswith("| communication over gloo | step, gloo / ringcomm |")
    assert row == "| DDP | 25 % (20–31) | 25 % (20–31) | 4.00× (2.00–5.00) |"
    head, *_ = rows_of(records, "systems")
    assert "ringcomm" not in head
    for record in records:
        if record.get("system") == "ddp on gloo":
            record |= {"over_ringcomm": ratio_over("ddp"), "communication_share": share}
    head, first, row = rows_of(records, "systems")
    assert "| time / ringcomm's | communication | update, ms |" in head
    assert "| 1× |  |  | 0.00 |" in first
    assert "| 4.00× (2.00–5.00) | 4.00× (2.00–5.00) | 25 % (20–31) | 0.00 |" in row
    head, row = rows_of(records, "fused_update")
    assert head.endswith("| DDP over ringcomm / fused | over Gloo / fused |")
    assert row.startswith("| 1 MiB | 8 | 4.00× (2.00–5.00) |")
    assert rows_of(records, "footprint") == [
        "| quantity | ringcomm | gloo |",
        "| memory | 580 KiB | 3,072 KiB |",
        "| of a core | 0.12 % | – |",
    ]
    assert len(table.readme_tables(records)) == 5


def test_plots_are_the_same_for_the_same_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    spread = {"p10_us": 3.0, "p90_us": 50.0}
    curve = [
        {**r, **spread}
        for world in (2, 4)
        for num_bytes in (1024, 1 << 20)
        for r in collective_records(world, "all_reduce", num_bytes, 4.0)
    ]
    path = write_records(tmp_path / "curve.jsonl", curve)
    drawn = []
    for name in ("one", "two"):
        assert plot.main(["--out", str(tmp_path / name), path]) == EXIT_OK
        drawn.append((tmp_path / name / "all_reduce.svg").read_bytes())
    assert drawn[0] == drawn[1]
    assert all(text in drawn[0].decode() for text in ("2 ranks", "4 ranks", "gloo"))
    assert "no records to draw algorithms from" in capsys.readouterr().out

    changes = [{"op": "all_reduce", "bytes": 262148, "algorithm": "two_shot"}]
    for record in curve:
        record.update(kind="algorithm", algorithm=record["backend"], changes=changes)
    path = write_records(tmp_path / "algorithms.jsonl", curve)
    assert plot.main(["--out", str(tmp_path), path]) == EXIT_OK
    assert "two_shot from 256 KiB" in (tmp_path / "algorithms.svg").read_text(encoding="utf-8")


def test_table_of_waiting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [record for world in (2, 4) for record in collective_records(world, "barrier", 0, 8.0)]
    records = [{**r, "kind": "waiting", "strangers": 1, "quiet": False} for r in base]
    path = write_records(tmp_path / "waiting.jsonl", records)
    assert table.main(["--kind", "waiting", path]) == EXIT_OK
    said = capsys.readouterr().out
    assert "| ranks | strangers | ringcomm, µs | gloo, µs | gloo / ringcomm (10–90 %) |" in said
    assert "| 2 | 1 | 8 | 100 | 12.5× (9.70–104) * |\n| 4 | 1 | 8 |" in said
    assert "\\* other programs used more than 10 %" in said


def test_readme_has_the_tables_of_the_committed_records(tmp_path: Path) -> None:
    """As git has them: records that a run has added since are not README's yet."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(harness.ROOT), *arguments]
        run = subprocess.run(command, check=True, capture_output=True, encoding="utf-8")
        return run.stdout

    try:
        names = git("ls-files", "--", f"{harness.RESULTS.relative_to(harness.ROOT)}/*.jsonl")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not in a git checkout")
    copies = [tmp_path / Path(name).name for name in sorted(names.splitlines())]
    for copy, name in zip(copies, sorted(names.splitlines()), strict=True):
        copy.write_text(git("show", f":{name}"), encoding="utf-8")
    written = table.readme_tables(read_records(copies))
    if not written:
        pytest.skip("there are no records yet")
    readme = (harness.ROOT / "README.md").read_text(encoding="utf-8")
    told = "out of date: python benchmarks/table.py --write README.md"
    assert table.with_tables(readme, written) == readme, told
