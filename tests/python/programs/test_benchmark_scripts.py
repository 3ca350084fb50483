"""The other benchmarks end to end in small, and the list of them all. No test asserts a time."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import cross_entropy
import front_door
import harness
import lomo
import plot
import pytest
import run_all
import systems
import table
import torch
import trainees
from report import read_records
from torch import Tensor

from ringcomm import cli
from ringcomm.measure.ranks import EXIT_OK, EXIT_WRONG_RESULTS

QUICK = ("--seconds", "0.02", "--repeats", "0")


def records_of(folder: Path, script: str, *argv: str) -> list[dict[str, Any]]:
    """What a script records, all of it verified."""
    path = folder / f"{script}.jsonl"
    assert import_module(script).main(["--json", str(path), *argv]) == EXIT_OK
    records = read_records([path])
    assert all(record["verified"] for record in records)
    return records


@pytest.mark.slow
def test_algorithms_are_compared_and_where_the_choice_changes(tmp_path: Path) -> None:
    records = records_of(tmp_path, "algorithms", *QUICK, "--worlds", "2", "--sizes", "4k,512k")
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
    records = records_of(tmp_path, "floor", *QUICK, "--worlds", "2", "--sizes", "1024,400000")
    found = [(r["bytes"], r["variant"], r["algorithm"]) for r in records]
    # Buffers that are shared pay from some size on.
    small = [(1024, name, how) for name, how in (("staged", "one_shot"), ("shared", "one_shot"))]
    large = [(400000, name, how) for name, how in (("staged", "two_shot"), ("shared", "direct"))]
    assert found == [(1024, "floor", None), *small, (400000, "floor", None), *large]


def test_footprint(tmp_path: Path) -> None:
    records = records_of(tmp_path, "footprint", *QUICK, "--world", "2", "--groups", "3")
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


# ---- tables of records


def test_table_prefers_what_was_measured_on_a_quiet_machine() -> None:
    def record(date: str, quiet: bool) -> dict[str, Any]:
        place = {"op": "all_reduce", "world_size": 2, "device": "cpu", "dtype": "float32"}
        state = {"quiet": quiet, "verified": True, "machine": {"cpu": "a CPU", "cores": 2}}
        return {"kind": "collective", "date": date, "bytes": 64, **place, **state}

    old, quiet, busy = record("1", True), record("2", True), record("3", False)
    layout = table.LAYOUTS["collective"]
    assert table.newest([old, busy, quiet], layout) == [[quiet]]
    assert table.newest([busy], layout) == [[busy]]


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


@pytest.mark.slow
def test_lomo(tmp_path: Path) -> None:
    small = ["--size", "tiny", "--rows", "1", "--context", "8", "--world", "2"]
    found = records_of(tmp_path, "lomo", *small, "--seconds", "0.1", "--repeats", "0")
    records = {record["way"]: record for record in found}
    assert list(records) == [way for way in lomo.WAYS if way != lomo.NO_AGREEMENT]
    whole = records["SGD"]["grad_bytes"]
    assert whole >= 4 * records["SGD"]["num_params"]
    for way in ("Lomo", "Lomo, clip two_pass", "AdaLomo"):
        assert records[way]["grad_bytes"] <= records[way]["largest_weight_bytes"]
    assert records["Lomo"]["grad_bytes"] < records["Lomo, clip deferred"]["grad_bytes"] <= whole


@pytest.mark.slow
def test_fused_updates(tmp_path: Path) -> None:
    records = records_of(tmp_path, "fused_update", *QUICK[:2], "--sizes", "40006")
    ways = [(record["bytes"], record["way"]) for record in records]
    assert ways == [(40_000, way) for way in ("fused", "zero1", "ringcomm", "gloo")]


# ---- one device


@pytest.mark.slow
def test_device_kernels(tmp_path: Path) -> None:
    records = records_of(tmp_path, "device_kernels", *QUICK[:2], "--device", "cpu", "--scale", "64")
    assert {r["case"] for r in records} == {"linear", "embedding", "sgd", "linear_loss"}
    assert all(record["p50_us"] > 0 and record["device"] == "cpu" for record in records)


@pytest.mark.slow
def test_llama_memory(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    small = ["--size", "tiny", "--layers", "1", "--rows", "1", "--tokens", "8"]
    ways = ["forward only", "AdamW", "two-pass clip"]
    argv = ["--device", "cpu", *small, "--ways", ",".join(ways)]
    records = records_of(tmp_path, "llama_memory", *argv)
    assert [record["way"] for record in records] == ways
    learns = [record["losses"][-1] < record["losses"][0] for record in records]
    assert learns == [False, True, True]


# ---- pipelines


@pytest.mark.slow
def test_pipelines_and_their_timelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = import_module("pipeline")
    monkeypatch.setattr(script, "PICTURED", (2, 4))
    monkeypatch.setattr(script, "MIN_STEPS", 2)
    argv = ["--worlds", "2", "--factors", "2", "--unit-ms", "0.2", "--seconds", "0.01"]
    records = records_of(tmp_path, "pipeline", *argv, "--repeats", "0", "--pictures", str(tmp_path))
    assert [r["schedule"] for r in records] == list(script.pipeline.SCHEDULES)
    assert all(r["num_steps"] >= 2 for r in records)
    # m = 4 over 2 ranks: 1/5; in halves of stages 1/9; ZB-H1 1/13, and in halves 1/25.
    found = [r["predicted_bubble"] for r in records]
    assert found == pytest.approx([1 / 5, 1 / 5, 1 / 9, 1 / 13, 1 / 25], rel=1e-4)
    for record in records:
        assert record["bound_us"] <= record["slept_bound_us"]  # a sleep is never early
        assert 0 < record["bubble"]["p50_share"] < 1
        assert (tmp_path / f"pipeline-{record['schedule']}.json").stat().st_size > 100


# ---- systems


SIZES = ["--width", "96", "--layers", "2", "--tokens", "12", "--seconds", "0.1", "--repeats", "1"]


def race(tmp_path: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    path = tmp_path / "systems.jsonl"
    status = cli.run(["bench", "systems", *SIZES, "--json", str(path), *options])
    return status, read_records([path])


@pytest.mark.slow
def test_losses_bytes_and_memory_of_systems(tmp_path: Path) -> None:
    picture = tmp_path / "systems.svg"
    status, records = race(tmp_path, "--world-size", "2", "--plot", str(picture))
    assert status == EXIT_OK
    assert [record["system"] for record in records] == trainees.DEFAULT
    by_name = {record["system"]: record for record in records}
    for record in records:
        assert record["loss"] == pytest.approx(record["one_process_loss"], rel=1e-4)
        if "gloo" in record["system"] or record["system"] == "parameter server":
            assert record["sent_bytes"] is None
        else:
            assert record["sent_bytes"] == record["formula_bytes"]
    whole = by_name["ddp"]["param_bytes"]
    assert whole == 4 * by_name["ddp"]["num_params"]
    assert by_name["ddp"]["state_bytes"] >= 2 * whole
    assert by_name["lomo"]["state_bytes"] == 0
    for name in ("zero-1", "zero-2"):
        assert by_name[name]["state_bytes"] == pytest.approx(whole, rel=0.01)
    assert by_name["lomo on shards"]["param_bytes"] <= whole / 2 + 4 * 40
    assert "ddp" in picture.read_text(encoding="utf-8")


@pytest.mark.slow
def test_backends_and_the_share_of_communication(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where a name has a comma; steps that move nothing are no records."""
    names = "ddp;ddp blocking;zero-3;tensor, tokens shared"
    status, records = race(tmp_path, "--systems", names, "--over", "gloo,fake")
    assert status == EXIT_OK
    found = {record["system"]: record for record in records}
    assert list(found) == [f"{n}{on}" for n in names.split(";") for on in ("", " on gloo")]
    for name, record in found.items():
        assert record["backend"] == ("gloo" if "gloo" in name else "ringcomm")
        assert ("over_ringcomm" in record) == ("gloo" in name)
        assert ("communication_share" in record) == ("tensor" not in name)
    said = capfd.readouterr().out
    assert "over ringcomm" in said
    assert "communication share" in said


@pytest.mark.slow
def test_wrong_losses_of_a_system_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = systems.SYSTEMS["ddp"]
    wrong = replace(ddp, like=systems.SYSTEMS["lomo"].like)
    monkeypatch.setitem(systems.SYSTEMS, "ddp", wrong)
    status, records = race(tmp_path, "--systems", "ddp")
    assert status == EXIT_WRONG_RESULTS
    assert records[0]["wrong_elems"] > 0
