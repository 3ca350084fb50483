"""The benchmarks end to end in small: their records, and that wrong results do not go unseen.

No test here asserts a time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import all_reduce
import harness
import races
import table

from ringcomm.bench import exit_codes, machine, operations, ranks
from ringcomm.bench.interleave import Timings, labelled
from ringcomm.bench.quantiles import quantile
from ringcomm.bench.records import Recorder, read_records

BACKENDS = ["ringcomm", "gloo"]
pytestmark = pytest.mark.skipif(
    "ringcomm" not in dist.Backend.backend_list, reason="the extension is not installed"
)


def run(path: Path, *argv: str) -> int:
    """A sweep that takes as little time as one can; its exit code."""
    quick = ["--seconds", "0.02", "--repeats", "0", "--json", str(path)]
    return all_reduce.main([*quick, *argv])


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_records_of_a_sweep(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records" / "sweep.jsonl"
    assert run(path, "--sizes", "1024,1000000") == exit_codes.EXIT_OK
    records = lines_of(path)
    points = [(r["op"], r["bytes"], r["backend"]) for r in records]
    assert points == [("all_reduce", b, name) for b in (1024, 1000000) for name in BACKENDS]
    for record in records:
        assert record["kind"] == "collective"
        assert (record["world_size"], record["dtype"]) == (2, "float32")
        assert record["date"].endswith("+00:00")
        assert record["machine"].keys() == {"cpu", "cores", "kernel"}
        assert record["torch"] == torch.__version__
        assert {"commit", "dirty", "ringcomm", "python"} <= record.keys()
        assert record["p10_us"] <= record["p50_us"] <= record["p90_us"] <= record["p99_us"]
        assert record["verified"]
        assert record["wrong_elems"] == 0
        assert record["num_calls"] >= 5
        # Bandwidths follow from the same p50; records keep five digits.
        algbw = record["bytes"] / record["p50_us"] / 1000
        assert record["algbw_gb_per_s"] == pytest.approx(algbw, rel=1e-3)
        assert record["busbw_gb_per_s"] == pytest.approx(algbw, rel=1e-3)  # 2 (N - 1) / N = 1
        assert 0 <= record["others_busy_percent"] <= 100
        assert record["quiet"] == (record["others_busy_percent"] <= machine.MAX_OTHERS_PERCENT)
        assert record["floor_us"]["before"] > 0
        assert record["flag_us"].keys() == {"before", "after"}
        if record["backend"] == "gloo":
            ratio = record["ratio"]
            assert ratio["over"] == "ringcomm"
            assert ratio["p10"] <= ratio["p50"] <= ratio["p90"]
            assert ratio["num_pairs"] >= 5
            assert record["algorithms"] == []
        else:
            assert record["ratio"] is None
            assert set(record["algorithms"]) <= {"one_shot", "two_shot", "ring"}
            assert record["algorithms"]
    said = capfd.readouterr().out
    assert "time over ringcomm's" in said
    assert table.main([str(path)]) == exit_codes.EXIT_OK
    markdown = capfd.readouterr().out
    assert "| bytes | ringcomm, µs | gloo, µs | gloo / ringcomm (10–90 %) |" in markdown
    assert "| 1 KiB |" in markdown
    assert records[0]["date"] in markdown


def test_every_operation_is_right(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    ops = ",".join(operations.OPERATIONS)
    # Not a multiple of the ranks: collectives that divide the buffer round down.
    assert run(path, "--ops", ops, "--sizes", "1004", "--dtype", "bfloat16") == exit_codes.EXIT_OK
    records = lines_of(path)
    assert [r["op"] for r in records[::2]] == list(operations.OPERATIONS)
    assert all(record["verified"] for record in records)
    assert records[-1]["bytes"] == 0  # barrier


def spoil_one_element(buffers: operations.Buffers, group: dist.ProcessGroup) -> None:
    dist.all_reduce(buffers.output, group=group)
    if dist.get_backend(group) == "ringcomm" and buffers.place.rank == 1:
        buffers.output[7] += 1


def test_one_wrong_element_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = dataclasses.replace(operations.OPERATIONS["all_reduce"], call=spoil_one_element)
    monkeypatch.setitem(operations.OPERATIONS, "all_reduce", broken)
    path = tmp_path / "sweep.jsonl"
    assert run(path, "--sizes", "1024") == exit_codes.EXIT_WRONG_RESULTS
    ours, gloo = lines_of(path)
    assert (ours["verified"], gloo["verified"]) == (False, True)
    assert ours["wrong_elems"] == 2  # one before the clocks ran, one after
    assert gloo["ratio"] is None
    said = capfd.readouterr().out
    assert "wrong results" in said
    assert "×" not in said


@pytest.mark.parametrize("name", [n for n, op in operations.OPERATIONS.items() if op.has_data])
def test_a_call_that_does_nothing_is_wrong(name: str) -> None:
    """On some rank at least: the source of a broadcast needs nothing done."""

    def nothing() -> None: ...

    operation = operations.OPERATIONS[name]
    wrong: list[list[int]] = []

    def main(team: ranks.Team) -> None:
        place = operations.Place(team.rank, 2, 64, torch.float32, torch.device("cpu"))
        counts = team.share(operation.verify(nothing, operation.setup(place), team))
        if team.rank == 0:
            team.report(counts)

    ranks.run_ranks(2, main, wrong.append)
    assert sum(wrong[0]) > 0


def test_a_barrier_that_does_not_wait_is_wrong() -> None:
    barrier = operations.OPERATIONS["barrier"]
    wrong: list[list[int]] = []

    def main(team: ranks.Team) -> None:
        place = operations.Place(team.rank, 2, 0, torch.float32, torch.device("cpu"))
        counts = team.share(barrier.verify(lambda: None, barrier.setup(place), team))
        if team.rank == 0:
            team.report(counts)

    ranks.run_ranks(2, main, wrong.append)
    assert sum(wrong[0]) > 0


@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_a_rank_that_fails_is_named_and_ends_the_others(tmp_path: Path, how: str) -> None:
    def main(team: ranks.Team) -> None:
        (tmp_path / str(os.getpid())).touch()
        team.share(None)
        if team.rank == 1 and how == "raises":
            raise ValueError("on purpose")
        if team.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        team.share(None)

    expected = (
        "(?s)rank 1 failed.*on purpose" if how == "raises" else "rank 1 was killed by SIGKILL"
    )
    with pytest.raises(ranks.RankError, match=expected):
        ranks.run_ranks(3, main, print)
    pids = [path.name for path in tmp_path.iterdir()]
    assert len(pids) == 3
    assert not any(Path("/proc", pid).exists() for pid in pids)


def test_a_rank_that_returns_early_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lose it at once, and do not wait for it in vain."""
    monkeypatch.setattr(ranks, "SIDE_CHANNEL_TIMEOUT_S", 20.0)

    def main(team: ranks.Team) -> None:
        team.share(None)
        if team.rank != 1:
            team.share(None)

    with pytest.raises(ranks.RankError, match=r"ranks \[.*\] lost a rank that ended too early"):
        ranks.run_ranks(3, main, print)


def test_what_does_not_come_through_a_store(tmp_path: Path) -> None:
    """In time is told from never: the process that holds a store has ended."""
    file_store = dist.FileStore(str(tmp_path / "store"), 2)
    assert not ranks._StoreChannel(file_store, 0, 1).poll(0.05)
    other = ranks._StoreChannel(file_store, 1, 0)
    other.send("late")
    assert ranks._StoreChannel(file_store, 0, 1).poll(0.05)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    orphan = ranks._StoreChannel(client, 0, 1)
    orphan.send("something")
    del server
    with pytest.raises(EOFError):
        orphan.poll(5.0)
    with pytest.raises(BrokenPipeError):
        orphan.send("more")


def test_store_channels_are_a_side_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a launcher has started agree through its store; here forked ones play them."""
    store = tmp_path / "env store"
    for name, value in (("WORLD_SIZE", "3"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    found: list[list[int]] = []

    def main(team: ranks.Team) -> None:
        os.environ["RANK"] = str(team.rank)
        file_store = dist.FileStore(str(store), 3)
        monkeypatch.setattr(dist, "rendezvous", lambda _: iter([(file_store, team.rank, 3)]))

        def joined(inner: ranks.Team) -> None:
            assert inner.agree(inner.rank) == 0
            everything = inner.share({"rank": inner.rank})
            assert everything == [{"rank": rank} for rank in range(3)]
            if inner.rank == 0:
                inner.report([entry["rank"] for entry in everything])

        ranks.run_ranks(3, joined, team.report)

    ranks.run_ranks(3, main, found.append)
    assert found == [[0, 1, 2]]


def test_ratio_is_paired() -> None:
    """Both slow down tenfold half-way: each pair still says 3."""
    fast = Timings([[1.0, 1.0], [10.0, 10.0]])
    slow = Timings([[3.0, 3.0, 9.0], [30.0, 30.0, 2.0]])
    assert slow.ratio_over(fast) == {"p50": 3.0, "p10": 3.0, "p90": 3.0, "num_pairs": 2}


def test_quantiles_interpolate() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert quantile([5.0], 0.99) == 5.0


def test_a_backend_may_race_itself() -> None:
    labels = {"gloo": "gloo", "ringcomm": "ringcomm", "gloo#2": "gloo"}
    assert labelled(["gloo", "ringcomm", "gloo"]) == labels


def test_table_prefers_what_was_measured_on_a_quiet_machine() -> None:
    def record(date: str, quiet: bool) -> dict[str, Any]:
        place = {"op": "all_reduce", "world_size": 2, "device": "cpu", "dtype": "float32"}
        state = {"quiet": quiet, "verified": True, "machine": {"cpu": "a CPU", "cores": 2}}
        return {"kind": "collective", "date": date, "bytes": 64, **place, **state}

    old, quiet, busy = record("1", True), record("2", True), record("3", False)
    assert table.newest([old, busy, quiet], "collective") == [[quiet]]
    assert table.newest([busy], "collective") == [[busy]]


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


def race_log(tokens: str) -> list[dict[str, Any]]:
    """What a run of the main job leaves, apart from what the benchmark leaves aside."""
    options = {"world_size": 2, "device": "cpu", "backends": ["ringcomm", "gloo"]}
    options |= {"race_size": "4.6M", "tokens": tokens, "race_seconds": 6.0}
    race = dict.fromkeys(races.RACE_FIELDS, 1) | {"num_pairs": 20, "ratio": [1.846, 1.62, 2.1]}
    race |= {"sent_bytes": [18232320, None], "formula_bytes": 18232320.0, "step_s": [0.1, 0.2]}
    race |= {"comm_s": [0.01, 0.1], "no_claim": None}
    return [
        {"kind": "run", "options": options},
        {"kind": "race pair", "name": "LOMO"},
        {"kind": "race", **race, "name": "LOMO"},
        {"kind": "race", **race, "name": "DDP", "no_claim": "it is not known what others did"},
    ]


def race_records(tokens: str) -> list[dict[str, Any]]:
    found = races.records_of(race_log(tokens), is_verified=True)
    return [{"kind": "races", **FACTS, **record} for record in found]


def test_records_of_races(tmp_path: Path) -> None:
    path = tmp_path / "races.jsonl"
    for record in races.records_of(race_log("small"), is_verified=True):
        Recorder(path, FACTS).write(record)
    first, second = lines_of(path)
    assert (first["system"], second["system"]) == ("LOMO", "DDP")
    assert (first["tokens"], first["rows_per_rank"], first["tokens_per_row"]) == ("small", 1, 64)
    assert first["ratio"] == {"over": "ringcomm", "p50": 1.846, "p10": 1.62, "p90": 2.1}
    assert (first["num_pairs"], first["comm_s"]) == (20, [0.01, 0.1])
    assert (first["sent_bytes"], first["formula_bytes"]) == ([18232320, None], 18232320)
    assert (first["quiet"], second["quiet"]) == (True, False)
    wrong = races.records_of(race_log("small"), is_verified=False)
    assert all(record["ratio"] is None and not record["verified"] for record in wrong)


def write_records(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def test_tables_are_written_between_the_marks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = [{**r, "date": "2026-11-19", "p50_us": 1} for r in collective_records(2, "x", 16, 9.0)]
    files = [
        write_records(tmp_path / "two.jsonl", collective_records(2, "x", 1 << 20, 2345.6)),
        write_records(tmp_path / "small.jsonl", collective_records(2, "x", 16, 1.5) + old),
        write_records(tmp_path / "other.jsonl", collective_records(2, "barrier", 0, 0.8)),
        write_records(tmp_path / "four.jsonl", collective_records(4, "x", 16, 3.0)),
        write_records(tmp_path / "eight.jsonl", collective_records(8, "x", 16, 3.0)),
        write_records(tmp_path / "races.jsonl", race_records("default") + race_records("small")),
    ]
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n", encoding="utf-8")
    assert table.main(["--write", str(readme), *files]) == exit_codes.EXIT_OK
    header = (
        "| operation | bytes | ringcomm, µs | gloo, µs | gloo / ringcomm (10–90 %) |\n"
        "|---|---:|---:|---:|---:|"
    )
    num_params = race_records("small")[0]["num_params"]
    expected = f"""before
{table.BEGIN}

2 ranks, float32, cpu; median of calls, the slowest rank counts:

{header}
| `x` | 16 B | 1.5 | 18.8 | 12.5× (9.70–104) |
| `x` | 1 MiB | 2,346 | 29,320 | 12.5× (9.70–104) |
| `barrier` | – | 0.8 | 10 | 12.5× (9.70–104) |

{MEASURED}

4 ranks, float32, cpu; median of calls, the slowest rank counts:

{header}
| `x` | 16 B | 3 | 37.5 | 12.5× (9.70–104) |

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
    assert table.main(["--write", str(readme), *files]) == exit_codes.EXIT_OK
    assert readme.read_text(encoding="utf-8") == expected
    assert table.main(["--kind", "races", *files]) == exit_codes.EXIT_OK
    assert "| LOMO | 1.85× (1.62–2.10) |" in capsys.readouterr().out
    assert table.main(["--kind", "waiting", *files]) == exit_codes.EXIT_FAILED
    with pytest.raises(ValueError, match="no line"):
        table.with_tables(f"{table.END}{table.BEGIN}", ["a table"])


def test_table_of_waiting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [record for world in (2, 4) for record in collective_records(world, "barrier", 0, 8.0)]
    records = [{**r, "kind": "waiting", "strangers": 1, "quiet": False} for r in base]
    path = write_records(tmp_path / "waiting.jsonl", records)
    assert table.main(["--kind", "waiting", path]) == exit_codes.EXIT_OK
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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--backends", "carrier_pigeon"], "carrier_pigeon"),
        (["--backends", "nccl"], "--device cuda"),
        (["--sizes", "many"], "--sizes"),
        (["--ops", "all_reduce,juggle"], "juggle"),
        (["--world", "0"], "1 to 64"),
    ],
)
def test_what_makes_no_sense_is_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        all_reduce.parse(argv)
    assert message in capsys.readouterr().err
