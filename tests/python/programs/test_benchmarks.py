"""`ringcomm bench` of collectives in small: its records, its page, and that wrong results are seen.

On devices by one that is the host with a clock of its own.

No test here asserts a time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import html_report
import pytest
import table
import torch
import torch.distributed as dist
from browsers import PHONE, SCREEN, assert_alone, data_of, opened
from cases import slow
from cells import RESULTS
from html_report import read_records
from operations import OPERATIONS, Buffers, Place
from placement import Placement, Speeds
from race import of_blocks
from rank_programs import run_command
from test_benchmark_scripts import FACTS

from _ringcomm import start as cli
from _ringcomm.status import EXIT_OK, EXIT_WRONG_RESULTS, RankError
from _ringcomm.values import MAX_OTHERS_PERCENT
from ringcomm.measure import bench, ranks
from ringcomm.measure.timing import Timings

BACKENDS = ["ringcomm", "gloo"]
KIND = "hostgpu"
pytestmark = pytest.mark.skipif(
    "ringcomm" not in dist.Backend.backend_list, reason="the extension is not installed"
)


def run(path: Path, *argv: str, op: str = "all_reduce") -> int:
    """A sweep that takes as little time as one can; its exit code."""
    quick = ["--seconds", "0.02", "--repeats", "0", "--json", str(path)]
    return cli.run(["bench", op, *quick, *argv])


def test_records_of_a_sweep(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.jsonl"
    assert run(path, "--sizes", "1024,1000000") == EXIT_OK
    records = read_records([path])
    points = [(r["op"], r["bytes"], r["backend"]) for r in records]
    assert points == [("all_reduce", b, name) for b in (1024, 1000000) for name in BACKENDS]
    for record in records:
        kind = [record[name] for name in ("kind", "world_size", "dtype")]
        assert kind == ["collective", 2, "float32"]
        assert record.keys() >= FACTS
        assert record["p10_us"] <= record["p50_us"] <= record["p90_us"] <= record["p99_us"]
        assert (record["verified"], record["wrong_elems"]) == (True, 0)
        assert record["num_calls"] >= 5
        # Bandwidths follow from the same p50; records keep five digits.
        algbw = record["bytes"] / record["p50_us"] / 1000
        assert record["algbw_gb_per_s"] == pytest.approx(algbw, rel=1e-3)
        assert record["busbw_gb_per_s"] == pytest.approx(algbw, rel=1e-3)  # 2 (N - 1) / N = 1
        assert 0 <= record["others_busy_percent"] <= 100
        assert record["quiet"] == (record["others_busy_percent"] <= MAX_OTHERS_PERCENT)
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
    ops = ",".join(OPERATIONS)
    # Not a multiple of the ranks: collectives that divide the buffer round down.
    argv = ["--sizes", "1004", "--dtype", "bfloat16", "--peers", "none"]
    assert run(path, *argv, op=ops) == EXIT_OK
    records = read_records([path])
    assert [r["op"] for r in records] == list(OPERATIONS)
    assert all(record["verified"] for record in records)
    assert records[-1]["bytes"] == 0  # barrier


def spoil_one_element(buffers: Buffers, group: dist.ProcessGroup) -> None:
    dist.all_reduce(buffers.output, group=group)
    if dist.get_backend(group) == "ringcomm" and buffers.place.rank == 1:
        buffers.output[7] += 1


@pytest.mark.parametrize("where", ["host", slow(KIND)])
def test_one_wrong_element_is_seen(
    where: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if where == KIND:
        request.getfixturevalue("devices")
    broken = replace(OPERATIONS["all_reduce"], call=spoil_one_element)
    monkeypatch.setitem(OPERATIONS, "all_reduce", broken)
    path = tmp_path / "sweep.jsonl"
    on_device = ["--device", KIND] if where == KIND else []
    assert run(path, "--sizes", "1024", *on_device) == EXIT_WRONG_RESULTS
    ours, gloo = read_records([path])[:2]  # on a device, torch's add_ is a third
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
        for name, operation in OPERATIONS.items():
            num_elems = 64 if operation.has_data else 0
            place = Place(team.rank, 2, num_elems, torch.float32, torch.device("cpu"))
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

    with pytest.raises(RankError, match=expected):
        ranks.run_ranks(3, main, print)
    pids = [path.name for path in tmp_path.iterdir()]
    assert len(pids) == 3
    assert not any(Path("/proc", pid).exists() for pid in pids)


def test_ratio_is_paired() -> None:
    """Both slow down tenfold half-way: each pair still says 3."""
    fast = Timings([[1.0, 1.0], [10.0, 10.0]], [0.5, 5.0])
    slow = Timings([[3.0, 3.0, 9.0], [30.0, 30.0, 2.0]], [3.0, 30.0])
    assert slow.ratio_over(fast) == {"p50": 3.0, "p10": 3.0, "p90": 3.0, "num_pairs": 2}
    by_block = of_blocks(slow)
    assert by_block.num_calls() == slow.num_calls()
    assert by_block.ratio_over(of_blocks(fast))["p50"] == 6.0


# ---- `ringcomm bench` without an operation: Gloo beside ringcomm in a short run

QUICK = ["bench", "--world-size", "2", "--seconds", "0"]


def test_a_table_a_sentence_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"SIZES": (1 << 10, 64 << 10), "WIDTH": 32, "TOKENS": 8}.items():
        monkeypatch.setattr(bench, name, value)
    path = tmp_path / "bench.html"
    figures = tmp_path / "bench.json"
    assert cli.run([*QUICK, "--html", str(path), "--json", str(figures)]) == EXIT_OK
    out, err = capfd.readouterr()
    assert re.search(r"^1 of 3: 2 ranks: all_reduce, 1 KiB$", err, re.M)
    for name in ("1 KiB", "64 KiB"):
        assert re.search(rf"^ +2  all_reduce, {name} .*× \(.*–.*\)$", out, re.M)
    assert re.search(rf"^ +2  {bench.STEP_TITLE} .*× \(.*–.*\)$", out, re.M)
    said = re.search(r"^With 2 ranks on this machine, ringcomm's all_reduce is .*$", out, re.M)
    assert said is not None
    content = json.loads(figures.read_text(encoding="utf-8"))
    rows = content["rows"]
    assert (content["world_sizes"], content["left_out"]) == ([2], [])
    assert [row["num_bytes"] for row in rows] == [1 << 10, 64 << 10, 0]
    page = path.read_text(encoding="utf-8")
    assert f"<h1>{said[0].replace(chr(39), '&#x27;')}</h1>" in page
    assert page.count('class="row"') == 2 * (len(bench.SIZES) + 1)
    assert_alone(page)


def test_a_wrong_sum_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `ringcomm bench`, `tune` and `doctor` alike."""
    all_reduce = bench.dist.all_reduce

    def spoil(tensor: Any, **options: Any) -> None:
        all_reduce(tensor, **options)
        tensor[7] += 1

    monkeypatch.setattr(bench.dist, "all_reduce", spoil)
    with pytest.raises(RankError, match="2 wrong elements in all_reduce of 1024 B by") as found:
        cli.run(QUICK)
    program = """
import sys
from _ringcomm.status import RankError, run_main
def fail(_): raise RankError(sys.argv[1])
sys.exit(run_main('ringcomm', fail))
"""
    command = (sys.executable, "-c", program, found.value)
    assert run_command(*command, cwd=RESULTS.parents[1]).returncode == EXIT_WRONG_RESULTS


def row(num_bytes: int, low: float, high: float, others: float = 0.0, n: int = 2) -> bench.Row:
    times = {name: {"p50_us": 10.0, "p99_us": 20.0} for name in ("ringcomm", "gloo")}
    ratio = {"p10": low, "p50": (low + high) / 2, "p90": high}
    return bench.Row("a title", n, num_bytes, times, ratio, others)


def test_what_cannot_be_told_apart_is_said_so() -> None:
    even, faster = row(0, 0.9, 1.2), row(0, 1.1, 1.3)
    all_reduce = row(1, 2, 3)
    said = "has no measurable difference from Gloo (median 1.05×, 10–90 %: 0.90 to 1.20)."
    assert bench.sentence([all_reduce, even]).endswith(said)
    assert "1.20× as fast." in bench.sentence([all_reduce, faster])
    more = [row(1, 4, 4, n=4), row(0, 0.8, 1.1, n=4)]
    assert bench.sentence([all_reduce, faster, *more]) == (
        "With 2 to 4 ranks on this machine, ringcomm's all_reduce is 2.50× to 4.00× as fast as"
        " Gloo's, and a training step of a small transformer is 0.95× to 1.20× as fast (with 4"
        " ranks there is no measurable difference)."
    )


def test_ranks_up_to_the_cores() -> None:
    assert bench.world_sizes(1) == bench.world_sizes(2) == [2]
    assert bench.world_sizes(6) == [2, 4, 6]
    assert bench.world_sizes(16) == [2, 4, 8, 16]
    assert bench.world_sizes(96) == [2, 4, 8, 16, 32, 64]


def test_ctrl_c_shows_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_ranks(world_size: int, _: Any, add: Any) -> None:
        add(row(1, 2, 3, n=world_size))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.ranks, "run_ranks", run_ranks)
    with pytest.raises(KeyboardInterrupt):
        cli.run(["bench", "--world-size", "2"])
    assert re.search(r"^ +2  a title .*2\.50× \(2\.00–3\.00\)$", capsys.readouterr().out, re.M)


def test_the_page_has_the_terminals_caveat() -> None:
    rows = [row(1, 2, 3, others=40.0), row(0, 1.1, 1.2)]
    said = bench.caveat(rows, [])
    assert said.startswith("Other programs used up to 40 %")
    assert said in bench.page(rows, {"cores": 2, "cpu": "x"}, [])
    assert bench.caveat([row(1, 2, 3)], []) == ""


# ---- the page of measurements: one file that needs no network, looked at in Chromium where it is

FILES = ("2026-11-28-all_reduce-w4.jsonl", "2026-11-28-systems.jsonl")


def records() -> list[dict[str, Any]]:
    return read_records([RESULTS / name for name in FILES])


def test_a_page_needs_no_other_file(tmp_path: Path) -> None:
    given = records()
    given[0]["environment"] = {"RINGCOMM_X": "</script><b>"}
    path = tmp_path / "folder" / "page.html"
    html_report.write_html(given, path)
    assert data_of(path, "records") == {"records": given, "isPartial": False}
    assert_alone(path.read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="nothing to show"):
        html_report.write_html([{"kind": "floor"}], path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [SCREEN, PHONE], ids=["screen", "phone"])
def test_a_browser_draws_filters_and_hovers(browser: Any, size: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    html_report.write_html(records(), path)
    with opened(browser, path, size) as page:
        points = page.locator("#collective circle.point")
        num_points = points.count()
        assert num_points >= 10
        assert page.locator("#systems g.point").count() > 0
        points.first.hover()
        assert "p50" in page.locator("#tip").inner_text()
        assert page.locator("#tip").is_visible()
        page.locator("#collective input[name=gloo]").uncheck()
        assert 0 < points.count() < num_points
        for option in page.locator("#collective select[name=operation] option").all_inner_texts():
            page.locator("#collective select[name=operation]").select_option(option)
            assert page.locator("#collective tbody tr").count() > 0
        assert "have verified results" in page.locator("main").inner_text()


# ---- sweeps on devices


class HostEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.at - self.at) * 1e3


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices whose tensors are the CPU's."""
    module = SimpleNamespace(
        Event=HostEvent,
        synchronize=lambda device=None: None,
        set_device=lambda device: None,
        device_count=lambda: 2,
    )
    monkeypatch.setattr(torch, KIND, module, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    monkeypatch.setattr(Placement, "device_of", lambda self, rank: torch.device("cpu"))


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("clock", [slow("events"), "host"])
def test_records_on_a_device(tmp_path: Path, clock: str, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records.jsonl"
    asked = f"--device {KIND} --peers gloo,mpi4py,nccl --sizes 1k --layout one --clock {clock}"
    assert run(path, *asked.split()) == EXIT_OK
    records = read_records([path])
    said = capfd.readouterr().out
    assert "not available: mpi4py: its calls take arrays in the host's memory" in said
    assert "not available: nccl" in said
    assert f"2 ranks on 1 {KIND}" in said
    timed = [*BACKENDS, "add_"] if clock == "events" else BACKENDS
    assert [record["backend"] for record in records] == timed
    for record in records:
        assert (record["kind"], record["device"]) == ("collective_on_device", KIND)
        assert (record["layout"], record["num_devices"], record["mps"]) == ("one", 2, False)
        assert (record["mode"], record["clock"]) == ("eager", clock)
        assert record["verified"]
        assert record["link_gb_per_s"] is None
        # The floor by hand: 2 N S bytes at the copy's speed, and the share of the median call.
        floor_us = 4 * record["bytes"] / record["copy_gb_per_s"] / 1e3
        assert record["floor_us"] == pytest.approx(floor_us, rel=1e-3)
        assert record["share_of_floor"] == pytest.approx(floor_us / record["p50_us"], rel=1e-3)


def test_the_floor_of_an_all_reduce() -> None:
    four_on_two = Placement("cuda", 2)
    # Two ranks of each device read and write a MB each: 4 MB; half as much crosses each link.
    assert OPERATIONS["all_reduce"].memory_factor(4) * four_on_two.share(4) == 4
    assert Speeds(1e12, None).floor_us(4e6, 1.5e6) == 4.0
    assert Speeds(1e12, 1e11).floor_us(4e6, 1.5e6) == 15.0
