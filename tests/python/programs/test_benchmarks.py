"""`ringcomm bench` of collectives in small: its records, and that wrong results are seen.

No test here asserts a time.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import operations
import pytest
import table
import torch
import torch.distributed as dist
from html_report import read_records

from ringcomm import cli
from ringcomm.measure import bench, machine, ranks
from ringcomm.measure.timing import Timings
from ringcomm.screen import EXIT_OK, EXIT_WRONG_RESULTS

BACKENDS = ["ringcomm", "gloo"]
pytestmark = pytest.mark.skipif(
    "ringcomm" not in dist.Backend.backend_list, reason="the extension is not installed"
)


def run(path: Path, *argv: str, op: str = "all_reduce") -> int:
    """A sweep that takes as little time as one can; its exit code."""
    quick = ["--seconds", "0.02", "--repeats", "0", "--json", str(path)]
    return cli.run(["bench", op, *quick, *argv])


def test_records_of_a_sweep(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records" / "sweep.jsonl"
    assert run(path, "--sizes", "1024,1000000") == EXIT_OK
    records = read_records([path])
    points = [(r["op"], r["bytes"], r["backend"]) for r in records]
    assert points == [("all_reduce", b, name) for b in (1024, 1000000) for name in BACKENDS]
    facts = {"commit", "dirty", "ringcomm", "python", "torch", "date", "machine"}
    for record in records:
        kind = [record[name] for name in ("kind", "world_size", "dtype")]
        assert kind == ["collective", 2, "float32"]
        assert facts <= record.keys()
        assert record["p10_us"] <= record["p50_us"] <= record["p90_us"] <= record["p99_us"]
        assert (record["verified"], record["wrong_elems"]) == (True, 0)
        assert record["num_calls"] >= 5
        # Bandwidths follow from the same p50; records keep five digits.
        algbw = record["bytes"] / record["p50_us"] / 1000
        assert record["algbw_gb_per_s"] == pytest.approx(algbw, rel=1e-3)
        assert record["busbw_gb_per_s"] == pytest.approx(algbw, rel=1e-3)  # 2 (N - 1) / N = 1
        assert 0 <= record["others_busy_percent"] <= 100
        assert record["quiet"] == (record["others_busy_percent"] <= machine.MAX_OTHERS_PERCENT)
        ratio, is_gloo = record["ratio"], record["backend"] == "gloo"
        assert (ratio is None) == bool(record["algorithms"]) == (not is_gloo)
        if is_gloo:
            assert ratio["over"] == "ringcomm"
            assert ratio["p10"] <= ratio["p50"] <= ratio["p90"]
            assert ratio["num_pairs"] >= 5
    assert "time / ringcomm's" in capfd.readouterr().out
    assert table.main([str(path)]) == EXIT_OK
    assert "| 1 KiB |" in capfd.readouterr().out


@pytest.mark.slow
def test_every_operation_is_right(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    ops = ",".join(operations.OPERATIONS)
    # Not a multiple of the ranks: collectives that divide the buffer round down.
    argv = ["--sizes", "1004", "--dtype", "bfloat16", "--peers", "none"]
    assert run(path, *argv, op=ops) == EXIT_OK
    records = read_records([path])
    assert [r["op"] for r in records] == list(operations.OPERATIONS)
    assert all(record["verified"] for record in records)
    assert records[-1]["bytes"] == 0  # barrier


def spoil_one_element(buffers: operations.Buffers, group: dist.ProcessGroup) -> None:
    dist.all_reduce(buffers.output, group=group)
    if dist.get_backend(group) == "ringcomm" and buffers.place.rank == 1:
        buffers.output[7] += 1


def test_one_wrong_element_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = replace(operations.OPERATIONS["all_reduce"], call=spoil_one_element)
    monkeypatch.setitem(operations.OPERATIONS, "all_reduce", broken)
    path = tmp_path / "sweep.jsonl"
    assert run(path, "--sizes", "1024") == EXIT_WRONG_RESULTS
    ours, gloo = read_records([path])
    assert (ours["verified"], gloo["verified"]) == (False, True)
    assert ours["wrong_elems"] == 2  # one before the clocks ran, one after
    assert gloo["ratio"] is None
    said = capfd.readouterr().out
    assert "wrong results" in said
    assert "×" not in said


def test_calls_that_do_nothing_are_wrong() -> None:
    """On some rank at least: the source of a broadcast needs nothing done."""
    wrong: list[dict[str, int]] = []

    def main(team: ranks.Team) -> None:
        counts = {}
        for name, operation in operations.OPERATIONS.items():
            num_elems = 64 if operation.has_data else 0
            place = operations.Place(team.rank, 2, num_elems, torch.float32, torch.device("cpu"))
            found = operation.verify(lambda: None, operation.setup(place), team)
            counts[name] = sum(team.share(found))
        if team.rank == 0:
            team.report(counts)

    ranks.run_ranks(2, main, wrong.append)
    assert all(wrong[0].values()), wrong[0]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raises", "(?s)rank 1: .*on purpose"),
        ("is killed", "rank 1: .* terminated with signal SIGKILL"),
        ("returns", "(?s)rank [02]: .*another rank ended early"),
    ],
)
def test_a_rank_that_fails_is_named_and_ends_all(tmp_path: Path, how: str, expected: str) -> None:
    def main(team: ranks.Team) -> None:
        (tmp_path / str(os.getpid())).touch()
        team.share(None)
        if team.rank == 1 and how == "raises":
            raise ValueError("on purpose")
        if team.rank == 1 and how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if team.rank != 1 or how != "returns":
            team.share(None)

    with pytest.raises(ranks.RankError, match=expected):
        ranks.run_ranks(3, main, print)
    pids = [path.name for path in tmp_path.iterdir()]
    assert len(pids) == 3
    assert not any(Path("/proc", pid).exists() for pid in pids)


def test_ratio_is_paired() -> None:
    """Both slow down tenfold half-way: each pair still says 3."""
    fast = Timings([[1.0, 1.0], [10.0, 10.0]])
    slow = Timings([[3.0, 3.0, 9.0], [30.0, 30.0, 2.0]])
    assert slow.ratio_over(fast) == {"p50": 3.0, "p10": 3.0, "p90": 3.0, "num_pairs": 2}


# ---- `ringcomm bench` without an operation: Gloo beside ringcomm in a short run

QUICK = ["bench", "--world-size", "2", "--seconds", "0"]


def test_a_table_a_sentence_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"SIZES": (1 << 10, 64 << 10), "WIDTH": 32, "TOKENS": 8}.items():
        monkeypatch.setattr(bench, name, value)
    path = tmp_path / "folder" / "bench.html"
    assert cli.run([*QUICK, "--html", str(path)]) == EXIT_OK
    out, err = capfd.readouterr()
    assert err == ""
    for name in ("1 KiB", "64 KiB"):
        assert re.search(rf"^all_reduce, {name} .*×$", out, re.M)
    assert re.search(rf"^{bench.STEP_TITLE} .*×$", out, re.M)
    said = re.search(r"^With 2 ranks on this machine, ringcomm's all_reduce is .*$", out, re.M)
    assert said is not None
    page = path.read_text(encoding="utf-8")
    assert f"<h1>{said[0].replace(chr(39), '&#x27;')}</h1>" in page
    assert page.count('class="row"') == 2 * (len(bench.SIZES) + 1)
    assert not re.search(r"https?:|src=|href=|@import", page)  # it needs no other file


def test_a_wrong_sum_is_no_result(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    all_reduce = bench.dist.all_reduce

    def spoil(tensor: Any, **options: Any) -> None:
        all_reduce(tensor, **options)
        tensor[7] += 1

    monkeypatch.setattr(bench.dist, "all_reduce", spoil)
    assert cli.run(QUICK) == EXIT_WRONG_RESULTS
    assert "2 wrong elements in all_reduce of 1024 B by ringcomm" in capfd.readouterr().out
