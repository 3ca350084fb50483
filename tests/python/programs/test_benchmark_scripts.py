"""The other benchmarks end to end in small, and the list of them all. No test asserts a time."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import cross_entropy
import deaths
import hosts
import libraries
import llama_memory
import plot
import programs
import pytest
import run_all
import systems
import table
import torch
import workload
from cells import RESULTS
from html_report import read_records
from machines import needs_programs
from torch import Tensor

from _ringcomm import command
from _ringcomm import start as cli
from _ringcomm.status import EXIT_FAILED, EXIT_OK, EXIT_WRONG_RESULTS, run_main

# What every record says of its run.
FACTS = {"kind", "commit", "dirty", "ringcomm", "python", "torch", "date", "machine"}
# By script the options of its smoke run.
SCRIPTS = {
    "deaths": "--worlds 2 --deaths 2 --peer-deaths 1 --strangers 0 --backends ringcomm,gloo-end",
    "fused_update": "--seconds 0.02 --sizes 40006",
    "inference": "--seconds 0 --repeats 0 --decode-seconds 0 --hidden 64 --layers 1",
    "libraries": "--ops all_reduce,all_gather,reduce_scatter --worlds 2,3 --sizes 1k --seconds 0.01"
    " --repeats 0 --dtype bfloat16",
    "llama_memory": "--device cpu --size tiny --layers 1 --rows 1 --tokens 8 --ways AdamW",
    "device_kernels": "--device cpu --scale 64 --seconds 0.01",
    "hosts": "--seconds 0 --repeats 0 --ranks-per-host 1 --cable none --ops all_reduce --sizes 1k",
    "cores": "--seconds 0.02 --repeats 0 --threads 1,2 --ops all_gather --sizes 64k",
    "offload": "--seconds 0.01 --repeats 0 --path FOLDER",
}
# The field that tells its records apart, and what there is a record of.
WAYS: dict[str, tuple[str, set[Any]]] = {
    "deaths": ("moment", {*deaths.MOMENTS}),
    "fused_update": ("way", {"fused", "zero1", "ringcomm", "gloo"}),
    "libraries": ("way", {libraries.OPS, *libraries.OVER_TORCH, libraries.COPY}),
    "device_kernels": ("case", {"linear", "embedding", "sgd", "linear_loss"}),
    "hosts": ("backend", {"ringcomm", "gloo"}),
    "cores": ("threads", {"memory", "1 thread", "2 threads", "auto"}),
    "offload": ("part", {"files", "adam"}),
}


# Less than a script measures by its options.
LESS: dict[str, dict[str, Any]] = {
    "offload": {
        "FILE_BYTES": 1 << 22,
        "ADAM_SIZES": (1 << 20,),
    },
}


def run_script(script: str, arguments: list[str]) -> int:
    module: Any = import_module(script)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LESS.get(script, {}).items():
            patch.setattr(module, name, value)
        main = hosts.main if module is hosts else module.PROGRAM.main
        return int(main(arguments))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_records_of_a_script(script: str, tmp_path: Path) -> None:
    if script in ("inference", "llama_memory"):
        pytest.importorskip("transformers")
    if script == "hosts":
        needs_programs(*hosts.TOOLS)
        probe = ["unshare", "-rn", "ip", "link", "set", "lo", "up"]
        if subprocess.call(probe, env=programs.environment()):
            pytest.skip("this machine does not let users make network namespaces")
    path = tmp_path / "records.jsonl"
    arguments = ["--json", str(path), *SCRIPTS[script].replace("FOLDER", str(tmp_path)).split()]
    assert run_script(script, arguments) == EXIT_OK
    records = read_records([path])
    assert records
    assert all(record["verified"] and record.keys() >= FACTS for record in records)
    field, expected = WAYS.get(script, ("way", {record.get("way") for record in records}))
    assert {record[field] for record in records} == expected


@pytest.mark.slow
def test_tables_and_pictures_of_the_committed_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert table.main([]) == EXIT_OK
    said = capsys.readouterr().out
    assert all(f"## {layout.title}\n" in said for layout in table.LAYOUTS.values())
    assert plot.main(["--out", str(tmp_path)]) == EXIT_OK
    assert {path.stem for path in tmp_path.iterdir()} == {*plot.PLOTS}


def test_a_way_that_is_refused_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next one runs, and has its record and the table."""
    pytest.importorskip("transformers")
    asked = tmp_path / "asked"

    def refuse_the_first(*_: object) -> str | None:
        is_first = not asked.exists()  # of the ranks, which are processes
        asked.touch()
        return "refused, because nothing is free" if is_first else None

    monkeypatch.setattr(llama_memory, "refusal", refuse_the_first)
    path = tmp_path / "records.jsonl"
    words = SCRIPTS["llama_memory"].replace("AdamW", "SGD,Lomo --predict").split()
    monkeypatch.setattr(sys, "argv", ["llama_memory.py", *words, "--json", str(path)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of the tests stay
    assert run_main("llama_memory.py", llama_memory.PROGRAM.main) == EXIT_FAILED
    out, err = capfd.readouterr()
    assert "llama_memory.py: SGD: refused, because nothing is free" in err
    assert "Lomo: predicted" in out
    assert "peak GiB" in out
    assert [record["way"] for record in read_records([path])] == ["Lomo"]


def test_the_list_of_all_calls_scripts_as_they_are() -> None:
    for job in (job for jobs in run_all.JOBS.values() for job in jobs):
        _, *words = run_all.command_of(job, None)
        if words[0] == "-m":
            parse, arguments = command.read, words[2:]
        else:
            parse, arguments = import_module(Path(words[0]).stem).PROGRAM.parse, words[1:]
        assert parse([*arguments, "--seconds", "1"]).seconds == 1


LOSSES = "bench cross_entropy --seconds 0.02 --repeats 0 --tokens 40 --threads 1"
SYSTEMS = "bench systems --width 96 --layers 2 --tokens 12 --seconds 0.1 --repeats 1"


def records_of(path: Path, words: str, *more: str, status: int = EXIT_OK) -> list[dict[str, Any]]:
    """What a run writes."""
    path.unlink(missing_ok=True)
    assert cli.run([*words.split(), "--json", str(path), *more]) == status
    return read_records([path])


@pytest.mark.slow
def test_cross_entropy_of_one_rank_and_two(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = records_of(path, f"{LOSSES} --vocabularies 100,1001")
    points = [(dtype, size) for dtype in ("float32", "bfloat16") for size in (100, 1001)]
    ways = ("ringcomm", "in place", "in forward", "torch", "copy")
    found = [(r["dtype"], r["vocab_size"], r["way"]) for r in records]
    assert found == [(*point, way) for point in points for way in ways]
    assert all(r["verified"] and r["extra_bytes"] >= 0 for r in records)
    records = records_of(path, f"{LOSSES} --world-size 2 --vocabularies 101 --dtypes float32")
    assert [r["way"] for r in records] == ["ringcomm", "in place", "one rank", "copy"]
    assert all(record["verified"] for record in records)


def test_wrong_gradients_and_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(logits: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits, target) + 1e-2 * logits[0, 3]

    monkeypatch.setitem(cross_entropy.PEERS, "torch", lambda: spoiled)
    ddp = replace(systems.SYSTEMS["ddp"], like=systems.SYSTEMS["lomo"].like)
    monkeypatch.setitem(systems.SYSTEMS, "ddp", ddp)
    for words, wrong in (
        (f"{LOSSES} --vocabularies 100 --dtypes float32", "torch"),
        (f"{SYSTEMS} --systems ddp", "ddp"),
    ):
        records = records_of(tmp_path / "records.jsonl", words, status=EXIT_WRONG_RESULTS)
        found = [r.get("way", r.get("system")) for r in records if not r["verified"]]
        assert found == [wrong]


@pytest.mark.slow
def test_losses_bytes_and_memory_of_systems(tmp_path: Path) -> None:
    path, picture = tmp_path / "systems.jsonl", tmp_path / "systems.svg"
    records = records_of(path, f"{SYSTEMS} --world-size 2", "--plot", str(picture))
    assert [record["system"] for record in records] == workload.DEFAULT
    by_name = {record["system"]: record for record in records}
    for record in records:
        assert record["loss"] == pytest.approx(record["one_process_loss"], rel=1e-4)
        if "gloo" in record["system"] or record["system"] == "parameter server":
            assert record["sent_bytes"] is None
        elif record["formula_bytes"] is not None:  # the planner splits no three heads
            # Bytes of agreements are not in the formula; records have five digits.
            assert record["sent_bytes"] == pytest.approx(record["formula_bytes"], rel=2e-3)
    whole = by_name["ddp"]["param_bytes"]
    assert whole == 4 * by_name["ddp"]["num_params"]
    assert by_name["ddp"]["state_bytes"] >= 2 * whole
    assert by_name["lomo"]["state_bytes"] == 0
    for name in ("zero-1", "zero-2"):
        assert by_name[name]["state_bytes"] == pytest.approx(whole, rel=0.01)
    assert by_name["lomo on shards"]["param_bytes"] <= whole / 2 + 4 * 40
    assert "ddp" in picture.read_text(encoding="utf-8")
    # Over other backends, also where a name has a comma; steps that move nothing are no records.
    names = "ddp;zero-3;tensor, tokens shared"
    tuning = str(RESULTS / "2026-11-28-tuning.json")
    words = f"{SYSTEMS} --over gloo,fake --tuning {tuning}"
    records = records_of(path, words, "--systems", names)
    found = {record["system"]: record for record in records}
    assert list(found) == [f"{n}{on}" for n in names.split(";") for on in ("", " on gloo")]
    for name, record in found.items():
        assert record["backend"] == ("gloo" if "gloo" in name else "ringcomm")
        assert ("over_ringcomm" in record) == ("gloo" in name)
        assert ("communication_share" in record) == ("tokens shared" not in name)
        assert record.get("predicted_us", 1) > 0
        assert ("predicted_us" in record) == (name in ("ddp", "zero-3"))  # and not of three heads


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizers_in_the_backward_pass_and_other_splits(world_size: int, tmp_path: Path) -> None:
    """Their losses are those of one process, and they send what their formulas say."""
    names = [*run_all.LOMO.split(";"), *run_all.TENSOR.split(";")]
    words = f"{SYSTEMS} --width 64 --world-size {world_size}"
    records = records_of(tmp_path / "a.jsonl", words, "--systems", ";".join(names))
    by_name = {record["system"]: record for record in records}
    assert list(by_name) == names
    for record in records:
        formula_bytes = record["formula_bytes"] or record["sent_bytes"]
        assert record["sent_bytes"] == pytest.approx(formula_bytes, rel=2e-3)
    whole = by_name["sgd"]["grad_bytes"]
    assert by_name["lomo, clip deferred"]["grad_bytes"] >= 4 * by_name["sgd"]["num_params"]
    assert by_name["lomo, clip two_pass"]["grad_bytes"] < whole / 2
