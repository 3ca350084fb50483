"""The other benchmarks end to end in small, and the list of them all. No test asserts a time."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import cross_entropy
import device_kernels
import front_door
import fused_update
import llama_memory
import lomo
import plot
import pytest
import run_all
import torch
from report import read_records
from torch import Tensor

from ringcomm import cli
from ringcomm.measure.ranks import EXIT_OK, EXIT_WRONG_RESULTS


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
    # Buffers that are shared pay from some size on.
    small = [(1024, name, how) for name, how in (("staged", "one_shot"), ("shared", "one_shot"))]
    large = [(400000, name, how) for name, how in (("staged", "two_shot"), ("shared", "direct"))]
    assert found == [(1024, "floor", None), *small, (400000, "floor", None), *large]


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


def test_the_list_of_all_calls_scripts_as_they_are() -> None:
    for job in (job for jobs in run_all.JOBS.values() for job in jobs):
        script, *arguments = shlex.split(job)
        if script == "ringcomm":
            front_door.make_parser(arguments[1]).parse_args([*arguments[2:], "--seconds", "1"])
        else:
            import_module(Path(script).stem).parse([*arguments, "--seconds", "1"])


def test_commands_of_the_list() -> None:
    command = run_all.command_of(run_all.JOBS["all_reduce"][1], "/usr/bin/mpiexec")
    assert command[:4] == ["/usr/bin/mpiexec", "-n", "4", sys.executable]
    assert command[4:8] == ["-m", "ringcomm", "bench", "all_reduce"]
    assert command[-2:] == ["--peers", "gloo,mpi4py"]
    assert run_all.command_of("floor.py", None)[0] == sys.executable
    command = run_all.command_of(run_all.JOBS["cross_entropy"][1], None)
    assert command[-2] == "--json"
    assert command[-1].endswith("-cross_entropy.jsonl")


def test_what_fails_or_hangs_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not run_all.run([sys.executable, "-c", "raise SystemExit(3)"])
    monkeypatch.setattr(run_all, "LIMIT_S", 0.5)
    assert not run_all.run([sys.executable, "-c", "import time; time.sleep(60)"])
    said = capfd.readouterr().out
    assert "status 3" in said
    assert "stopped after" in said


# ---- cross-entropy


def bench_losses(path: Path, *argv: str) -> tuple[int, list[dict[str, Any]]]:
    quick = ["--seconds", "0.02", "--repeats", "0", "--tokens", "40", "--threads", "1"]
    code = cli.run(["bench", "cross_entropy", *quick, "--json", str(path), *argv])
    return code, read_records([path])


@pytest.mark.slow
def test_cross_entropy_of_one_rank_and_two(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    code, records = bench_losses(path, "--vocabularies", "100,1001")
    assert code == EXIT_OK
    points = [(dtype, size) for dtype in ("float32", "bfloat16") for size in (100, 1001)]
    ways = ("ringcomm", "in place", "torch", "copy")
    found = [(r["dtype"], r["vocab_size"], r["way"]) for r in records]
    assert found == [(*point, way) for point in points for way in ways]
    assert all(r["verified"] and r["extra_bytes"] >= 0 for r in records)
    pytest.importorskip("matplotlib")
    assert plot.main(["--out", str(tmp_path), str(path)]) == EXIT_OK
    assert "in place" in (tmp_path / "cross_entropy.svg").read_text(encoding="utf-8")
    argv = ["--world-size", "2", "--vocabularies", "101", "--dtypes", "float32"]
    code, records = bench_losses(tmp_path / "two.jsonl", *argv)
    assert code == EXIT_OK
    assert [(r["way"], r["verified"]) for r in records] == [("ringcomm", True), ("one rank", True)]


def test_a_wrong_gradient_of_cross_entropy_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(logits: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits, target) + 1e-2 * logits[0, 3]

    monkeypatch.setitem(cross_entropy.PEERS, "torch", lambda: spoiled)
    argv = ["--vocabularies", "100", "--dtypes", "float32"]
    code, records = bench_losses(tmp_path / "records.jsonl", *argv)
    assert code == EXIT_WRONG_RESULTS
    assert [(r["way"], r["wrong_elems"]) for r in records if not r["verified"]] == [("torch", 1)]


# ---- LOMO, and the fused update


QUICK_LOMO = ["--size", "tiny", "--rows", "1", "--context", "8", "--seconds", "0.1"]


@pytest.mark.slow
def test_lomo(tmp_path: Path) -> None:
    path = tmp_path / "lomo.jsonl"
    assert (
        lomo.main([*QUICK_LOMO, "--world", "2", "--repeats", "1", "--json", str(path)]) == EXIT_OK
    )
    records = {record["way"]: record for record in read_records([path])}
    assert list(records) == [way for way in lomo.WAYS if way != lomo.NO_AGREEMENT]
    assert all(record["verified"] for record in records.values())
    whole = records["SGD"]["grad_bytes"]
    assert whole >= 4 * records["SGD"]["num_params"]
    for way in ("Lomo", "Lomo, clip two_pass", "AdaLomo"):
        assert records[way]["grad_bytes"] <= records[way]["largest_weight_bytes"]
    assert records["Lomo"]["grad_bytes"] < records["Lomo, clip deferred"]["grad_bytes"] <= whole


def test_steps_of_lomo_that_are_not_sgds_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: torch.nn.Module, _: Any) -> torch.optim.Optimizer:
        return lomo.Lomo(model, 2 * lomo.LEARNING_RATE)

    monkeypatch.setitem(lomo.WAYS, "Lomo", lomo.Way(wrong, "SGD"))
    path = tmp_path / "lomo.jsonl"
    argv = [*QUICK_LOMO, "--world", "1", "--repeats", "1", "--json", str(path)]
    assert lomo.main([*argv, "--ways", "Lomo;SGD"]) == EXIT_WRONG_RESULTS
    records = {record["way"]: record for record in read_records([path])}
    assert not records["Lomo"]["verified"]
    assert records["SGD"]["verified"]


@pytest.mark.slow
def test_fused_updates_and_a_wrong_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.jsonl"
    quick = ["--seconds", "0.02", "--sizes", "40006", "--json", str(path)]
    assert fused_update.main([*quick, "--optimizer", "adamw"]) == EXIT_OK
    records = read_records([path])
    assert [(r["bytes"], r["way"], r["verified"]) for r in records] == [
        (40_000, way, True) for way in ("fused", "zero1", "ringcomm", "gloo")
    ]
    step_of = fused_update.Way._whole

    def spoiled(self: fused_update.Way) -> Callable[[], None]:
        step = step_of(self)

        def spoil() -> None:
            step()
            self.param[7] += 0.5

        return spoil

    monkeypatch.setattr(fused_update.Way, "_zero1", spoiled)
    path.unlink()
    assert fused_update.main([*quick, "--optimizer", "sgd"]) == EXIT_WRONG_RESULTS
    wrong = [r for r in read_records([path]) if not r["verified"]]
    assert [(r["way"], r["wrong_elems"], r["ratio"]) for r in wrong] == [("zero1", 2, None)]


# ---- one device


def test_device_kernels(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    argv = ["--device", "cpu", "--json", str(path), "--scale", "64", "--seconds", "0.01"]
    assert device_kernels.main(argv) == EXIT_OK
    records = read_records([path])
    cases = {record["case"] for record in records}
    assert cases == {"linear", "embedding", "sgd", "linear_loss"}
    assert all(record["p50_us"] > 0 and record["device"] == "cpu" for record in records)


@pytest.mark.slow
def test_llama_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "records.jsonl"
    small = ["--size", "tiny", "--layers", "1", "--rows", "1", "--tokens", "8"]
    ways = ["forward only", "AdamW", "two-pass clip"]
    argv = ["--device", "cpu", "--json", str(path), *small, "--ways", ",".join(ways)]
    assert llama_memory.main(argv) == EXIT_OK
    records = read_records([path])
    assert [record["way"] for record in records] == ways
    for record in records:
        learns = record["losses"][-1] < record["losses"][0]
        assert learns == (record["way"] != "forward only")

    def attempt(way: str, options: Any, num_layers: int, placement: Any) -> dict[str, int] | None:
        return {"num_layers": num_layers} if num_layers <= 90 else None

    monkeypatch.setattr(llama_memory, "attempt", attempt)
    found: Any = llama_memory.grow("Lomo", None, None)  # type: ignore[arg-type]
    assert found["num_layers"] <= 90 < found["num_layers"] * 1.1


# ---- pipelines


@pytest.mark.slow
def test_pipelines_and_their_timelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = import_module("pipeline")
    monkeypatch.setattr(script, "PICTURED", (2, 4))
    monkeypatch.setattr(script, "MIN_STEPS", 2)
    argv = ["--worlds", "2", "--factors", "2", "--unit-ms", "0.2", "--seconds", "0.01"]
    path = tmp_path / "records.jsonl"
    options = ["--repeats", "0", "--json", str(path), "--pictures", str(tmp_path)]
    assert script.main([*argv, *options]) == EXIT_OK
    records = read_records([path])
    assert [r["schedule"] for r in records] == list(script.pipeline.SCHEDULES)
    assert all(r["verified"] and r["num_steps"] >= 2 for r in records)
    # m = 4 over 2 ranks: 1/5; in halves of stages 1/9; ZB-H1 1/13, and in halves 1/25.
    found = [r["predicted_bubble"] for r in records]
    assert found == pytest.approx([1 / 5, 1 / 5, 1 / 9, 1 / 13, 1 / 25], rel=1e-4)
    for record in records:
        assert record["bound_us"] <= record["slept_bound_us"]  # a sleep is never early
        assert 0 < record["bubble"]["p50_share"] < 1
        assert (tmp_path / f"pipeline-{record['schedule']}.json").stat().st_size > 100
