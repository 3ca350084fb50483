"""Tables and plots of records, and that docs/benchmarks.md has those of the committed ones."""

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


def write_records(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def test_tables_are_written_between_the_marks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kib, mib = 1 << 10, 1 << 20
    library = {"mpi": "An MPI 4.1"}
    records = collective_records(2, "all_reduce", 4 * mib, 2345.6)
    records += [{**r, **library} for r in collective_records(2, "all_reduce", kib, 1.5)]
    records.append({**records[-1], "backend": "mpi4py", "p50_us": 8.0})
    records += [{**r, "date": "2026-11-19"} for r in collective_records(2, "all_reduce", kib, 9.0)]
    records += [{**r, "quiet": False} for r in collective_records(4, "barrier", 0, 0.8)]
    path = write_records(tmp_path / "records.jsonl", records)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n", encoding="utf-8")
    for _ in range(2):  # a second time changes nothing
        assert table.main(["--write", str(page), path]) == EXIT_OK
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"before\n{table.BEGIN}\n")
        assert text.endswith(f"{table.END}\nafter\n")
        assert "\nold\n" not in text
        assert "| ringcomm, µs | gloo, µs | mpi4py, µs |" in text
        assert "| `all_reduce` | 1 KiB | 1.5 | 18.8 | 8 | 12.5× (9.70–104) | 12.5×" in text
        assert "| `all_reduce` | 4 MiB | 2,346 | 29,320 | – | 12.5× (9.70–104) | – |" in text
        assert "| `barrier` | – | 0.8 | 10 | 12.5× (9.70–104) * |" in text
        assert "torch 2.13.0, ringcomm 0.1.0, An MPI 4.1; 2026-11-20T10:00" in text
        assert "\\* other programs used more than 10 %" in text
    assert table.main(["--kind", "waiting", path]) == EXIT_FAILED
    with pytest.raises(ValueError, match="no line"):
        table.with_tables(f"{table.END}{table.BEGIN}", ["a table"])


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


def test_the_page_has_the_tables_of_the_committed_records(tmp_path: Path) -> None:
    """As git has them: records that a run has added since are not on the page yet."""

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
    written = table.page_tables(read_records(copies))
    if not written:
        pytest.skip("there are no records yet")
    page = table.PAGE.read_text(encoding="utf-8")
    told = "out of date: python benchmarks/table.py --write docs/benchmarks.md"
    assert table.with_tables(page, written) == page, told
