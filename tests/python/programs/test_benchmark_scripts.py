"""The other benchmarks end to end in small, and the list of them all. No test asserts a time."""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import front_door
import pytest
import run_all
from report import read_records

from ringcomm.measure.ranks import EXIT_OK


def records_of(path: Path, script: str, *argv: str, seconds: str = "0.02") -> list[dict[str, Any]]:
    """What a script records in as little time as it can."""
    quick = ["--seconds", seconds, "--repeats", "0", "--json", str(path / "records.jsonl")]
    assert import_module(script).main([*quick, *argv]) == EXIT_OK
    records = read_records([path / "records.jsonl"])
    assert all(record["verified"] for record in records)
    return records


def test_algorithms_are_compared_and_where_the_choice_changes(tmp_path: Path) -> None:
    records = records_of(tmp_path, "algorithms", "--worlds", "2", "--sizes", "4k,512k")
    names = ["one_shot", "two_shot", "ring", "ring, rank_order"]
    found = [(record["bytes"], record["algorithm"]) for record in records]
    large = [(524288, name) for name in [*names, "direct"]]
    assert found == [(4096, name) for name in names] + large  # too small to be worth it
    changes = [(c["op"], c["bytes"], c["algorithm"]) for c in records[0]["changes"]]
    assert changes == [
        ("all_reduce", 262148, "two_shot"),
        ("all_reduce_shared", 8192, "direct"),
    ]


def test_floor(tmp_path: Path) -> None:
    records = records_of(tmp_path, "floor", "--worlds", "2", "--sizes", "1024,400000")
    found = [(r["bytes"], r["variant"], r["algorithm"]) for r in records]
    assert found == [
        (1024, "floor", None),
        (1024, "staged", "one_shot"),
        (1024, "shared", "one_shot"),  # too small to be worth it
        (400000, "floor", None),
        (400000, "staged", "two_shot"),
        (400000, "shared", "direct"),
    ]
    assert [record["ratio"] is None for record in records] == [True, False, False] * 2


def test_footprint(tmp_path: Path) -> None:
    records = records_of(tmp_path, "footprint", "--world", "2", "--groups", "3")
    values = {(r["quantity"], r["backend"]): r["value"] for r in records}
    idle = "3 idle groups, per rank"
    for state in (idle, f"{idle}, one of them used"):
        assert values[f"{state}: file descriptors", "ringcomm"] == 0
        assert values[f"{state}: file descriptors", "gloo"] > 0
    states = ("unused", "after 64 MiB")
    mapped = [values[f"a pair of ranks, {state}: mapped", "ringcomm"] for state in states]
    assert 0 < mapped[0] == mapped[1]
    waiting = [name for name, _ in values if "wait for one that computes" in name]
    assert len(waiting) == 2
    assert all(0 <= r["value"] <= 100 for r in records if r["unit"] == "%")


def test_waiting(tmp_path: Path) -> None:
    records = records_of(tmp_path, "waiting", "--worlds", "2", "--strangers", "0")
    found = [(record["op"], record["backend"], record["bytes"]) for record in records]
    assert found == [
        *(("barrier", name, 0) for name in ("ringcomm", "gloo")),
        *(("all_reduce", name, 1024) for name in ("ringcomm", "gloo")),
    ]


@pytest.mark.parametrize("job", [job for jobs in run_all.JOBS.values() for job in jobs])
def test_the_list_of_all_calls_scripts_as_they_are(job: str) -> None:
    script, *arguments = shlex.split(job)
    if script == "ringcomm":
        front_door.make_parser(arguments[1]).parse_args([*arguments[2:], "--seconds", "1"])
    else:
        import_module(Path(script).stem).parse([*arguments, "--seconds", "1"])


def test_mpi_takes_part_where_it_is_there() -> None:
    command = run_all.command_of(run_all.JOBS["all_reduce"][1], "/usr/bin/mpiexec")
    assert command[:4] == ["/usr/bin/mpiexec", "-n", "4", sys.executable]
    assert command[4:8] == ["-m", "ringcomm", "bench", "all_reduce"]
    assert command[-2:] == ["--peers", "gloo,mpi4py"]
    assert run_all.command_of("floor.py", None)[0] == sys.executable


@pytest.mark.parametrize(
    ("job", "stem"),
    [
        (run_all.JOBS["all_reduce"][1], "all_reduce-w4"),
        (run_all.JOBS["operations"][0], "collectives-w2"),
        (run_all.JOBS["cross_entropy"][1], "cross_entropy"),
    ],
)
def test_the_command_is_called_with_a_file(job: str, stem: str) -> None:
    command = run_all.command_of(job, None)
    assert command[-2] == "--json"
    assert command[-1].endswith(f"-{stem}.jsonl")


def test_what_fails_or_hangs_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_all.run([sys.executable, "-c", "pass"])
    assert not run_all.run([sys.executable, "-c", "raise SystemExit(3)"])
    monkeypatch.setattr(run_all, "LIMIT_S", 0.5)
    assert not run_all.run([sys.executable, "-c", "import time; time.sleep(60)"])
    said = capfd.readouterr().out
    assert "status 3" in said
    assert "stopped after" in said
