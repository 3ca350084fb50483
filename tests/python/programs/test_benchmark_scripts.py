"""The other benchmarks end to end in small, and the list of them all. No test asserts a time."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cross_entropy
import deaths
import front_door
import harness
import hosts
import libraries
import llama_memory
import lomo
import palette
import pictures
import plot
import programs
import pytest
import run_all
import sample_jobs
import systems
import table
import torch
import trainees
from html_report import read_records
from machines import needs_programs
from torch import Tensor

from _ringcomm import start as cli
from _ringcomm.status import EXIT_OK, EXIT_WRONG_RESULTS
from ringcomm.parallel import pipeline
from ringcomm.screen import in_seconds
from ringcomm.show import Ring

ALGORITHMS = ["one_shot", "two_shot", "ring"]
INFERENCE = [
    *("ringcomm, fused", "ops.all_reduce, fused norm"),
    *("ops.all_reduce, torch", "dist.all_reduce, torch"),
]
# A script with its options, the field that tells its records apart, and what is recorded of it.
SCRIPTS: dict[str, tuple[str, str, list[Any]]] = {
    # What is too small to run where it lies is staged, and no record.
    "algorithms": (
        "--seconds 0.02 --repeats 0 --worlds 2 --sizes 4k,512k",
        "algorithm",
        [*ALGORITHMS, *ALGORITHMS, "direct"],
    ),
    "floor": (
        "--seconds 0.02 --repeats 0 --worlds 2 --sizes 1024,400000",
        "algorithm",
        [None, "one_shot", "one_shot", None, "two_shot", "direct"],
    ),
    "deaths": (
        "--worlds 2 --deaths 2 --peer-deaths 1 --strangers 0 --backends ringcomm,gloo-end",
        "moment",
        [*deaths.MOMENTS, *deaths.MOMENTS],
    ),
    "lomo": (
        "--seconds 0.1 --repeats 0 --size tiny --rows 1 --context 8 --world 2",
        "way",
        list(lomo.WAYS),
    ),
    "fused_update": ("--seconds 0.02 --sizes 40006", "way", ["fused", "zero1", "ringcomm", "gloo"]),
    "inference": (
        "--seconds 0 --repeats 0 --decode-seconds 0 --hidden 64 --layers 1",
        "way",
        [*(6 * INFERENCE), *INFERENCE, "Gloo", "nothing sent"],
    ),
    "libraries": (
        "--ops all_reduce,all_gather,reduce_scatter --worlds 2,3 --sizes 1k --seconds 0.01"
        " --repeats 0",
        "way",
        2 * [libraries.OPS, *(3 * [*libraries.OVER_TORCH])],
    ),
    "llama_memory": (
        "--device cpu --size tiny --layers 1 --rows 1 --tokens 8 --ways AdamW",
        "way",
        ["AdamW"],
    ),
    "device_kernels": (
        "--device cpu --scale 64 --seconds 0.01",
        "case",
        ["linear", "linear_plans", "embedding", "sgd", "linear_loss"],
    ),
    "hosts": (
        "--seconds 0 --repeats 0 --ranks-per-host 1 --cable none --ops all_reduce --sizes 1k",
        "backend",
        ["ringcomm", "gloo"],
    ),
    "pipeline": (
        "--seconds 0.01 --repeats 0 --worlds 2 --factors 2 --unit-ms 0.2",
        "schedule",
        list(pipeline.SCHEDULES),
    ),
}


def test_programs_of_the_system_are_found_beside_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An ordinary user's PATH has no /usr/sbin, where ip and tc are."""
    tool = tmp_path / "ringcomm-tc"
    tool.write_text("#!/bin/sh\nexit 7\n")
    monkeypatch.setattr(hosts, "TOOLS", ("sh", tool.name))
    with pytest.raises(SystemExit):
        hosts.PROGRAM.parse([])
    assert f"not installed: {tool.name} (" in capsys.readouterr().err
    tool.chmod(0o755)
    monkeypatch.setattr(programs, "SYSTEM_FOLDERS", (str(tmp_path),))
    assert hosts.PROGRAM.parse([]).ranks_per_host == [1, 2]
    assert subprocess.call([tool.name], env=programs.environment()) == 7


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
    options, field, expected = SCRIPTS[script]
    path = tmp_path / "records.jsonl"
    module: Any = import_module(script)
    main = hosts.main if module is hosts else module.PROGRAM.main
    assert main(["--json", str(path), *options.split()]) == EXIT_OK
    records = read_records([path])
    assert all(record["verified"] for record in records)
    found = [record[field] for record in records]
    assert (list(dict.fromkeys(found)) if script == "device_kernels" else found) == expected


def test_a_table_of_libraries_is_of_all_runs_of_the_newest_day() -> None:
    def record(way: str, day: int, second: int, ratio: float | None, **more: Any) -> table.Record:
        compared = ratio and {"p50": ratio, "over": libraries.OPS}
        times = {"p50_us": (ratio or 1) * second, "ratio": compared}
        machine = {"cpu": "a", "cores": 2, "kernel": "6"}
        facts = {"kind": "libraries", "op": "all_reduce", "world_size": 2, "bytes": 1024}
        facts |= {"machine": machine}
        facts |= {"torch": "2", "ringcomm": "1", "commit": "abc", "dirty": False}
        date = f"2026-01-{day:02}T00:00:{second:02}+00:00"
        marks = {"quiet": True, "verified": True}
        return {"way": way, "date": date, **times, **facts, **marks, **more}

    mpi = {"mpi": "Intel(R) MPI Library 2021.18.1 for Linux* OS"}
    found = [record(libraries.OPS, 1, 1, None), record("Gloo", 1, 1, 90.0)]
    for second, ratio in ((1, 3.0), (2, 2.0), (5, 4.0)):
        found += [record(libraries.OPS, 2, second, None, **mpi)]
        found += [record("Gloo", 2, second, ratio, **mpi)]
    found += [record("Intel MPI", 2, 2, 0.5, **mpi)]
    (text,) = table.tables(found, table.LAYOUTS["libraries"])
    assert "| ringcomm.ops | 2 |" in text
    assert "| Gloo | 4 (3.00×, 2.00–4.00) |" in text
    assert "| Intel MPI 2021.18.1 | 1 (0.50×) |" in text
    assert "2026-01-02T00:00:05+00:00; commit abc; 3 runs." in text


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS", "Intel MPI"),
        ("MPICH Version:      5.0.2", "MPICH"),
        ("Open MPI v5.0.11, package: Open MPI Distribution", "Open MPI"),
    ],
)
def test_names_of_mpi_libraries(version: str, name: str) -> None:
    assert libraries.mpi_name(version) == name


def test_memory_is_told_with_one_gradient_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {
        "max_memory_allocated": lambda device: 5000,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=4000),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    weights = [torch.zeros(n, dtype=torch.bfloat16) for n in (100, 400)]
    found = llama_memory.memory_of(weights, True, torch.device("cuda"))
    shares = {"one_grad_bytes": 800, "forward_bytes": 4200, "weights_share": 0.25}
    assert found == {"peak_bytes": 5000, **shares}
    forward = llama_memory.memory_of(weights, False, torch.device("cuda"))
    assert (forward["one_grad_bytes"], forward["forward_bytes"]) == (0, 5000)
    on_cpu = llama_memory.memory_of(weights, True, torch.device("cpu"))
    assert (on_cpu["one_grad_bytes"], on_cpu["peak_bytes"]) == (800, None)


def test_the_list_of_all_calls_scripts_as_they_are() -> None:
    for job in (job for jobs in run_all.JOBS.values() for job in jobs):
        script, *arguments = shlex.split(job)
        if script == "ringcomm":
            parse, arguments = front_door.make_parser(arguments[1]).parse_args, arguments[2:]
        else:
            parse = import_module(Path(script).stem).PROGRAM.parse
        assert parse([*arguments, "--seconds", "1"]).seconds == 1


@pytest.fixture
def committed(tmp_path: Path) -> list[dict[str, Any]]:
    """Records as git has them: those that a run has added since are on no page yet."""

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
    return read_records(copies)


# As builds of the site are, with the page's source on standard input.
WITHOUT_TORCH = """
import sys
from types import SimpleNamespace

sys.modules |= {"torch": None, "rich": None}  # importing them raises ImportError
import site_pages

page = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))
print(site_pages.on_page_markdown(sys.stdin.read(), page))
"""


def test_the_site_has_a_table_for_each_mark_and_a_mark_for_each_table(committed: Any) -> None:
    pages = [harness.ROOT / "docs" / name for name in ("benchmarks.md", "reliability.md")]
    source = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    marks = re.findall(r"(?m)^<!-- table: (\w+) -->", source)
    assert sorted(marks) == sorted(table.page_tables(committed))
    shown = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        env=os.environ | {"PYTHONPATH": str(harness.ROOT / "tools")},
        input=source,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
        timeout=60,
    ).stdout
    assert "\n<!-- table" not in shown
    assert shown.count("\nMeasured on ") >= len(marks)


def test_the_bars_of_readme_are_the_committed_records(committed: Any) -> None:
    rows = pictures.rows_of(committed)
    assert [*rows] == [*pictures.ROWS]
    readme = pictures.README.read_text(encoding="utf-8")
    assert pictures.with_sentence(readme, rows) == readme
    for theme in pictures.THEMES:
        for name, width in (("speed", pictures.WIDTH), ("speed-narrow", pictures.NARROW)):
            drawn = (pictures.DESIGN / f"{name}-{theme}.svg").read_text(encoding="utf-8")
            told = "renew it: python benchmarks/pictures.py --only speed"
            assert drawn == pictures.speed(rows, theme, width), told
            for bars, _ in rows.values():
                texts = [in_seconds(record["p50_us"] * 1e-6) for _, record in bars]
                assert all(f">{text}</text>" in drawn for text in texts)


def test_a_ring_is_drawn_step_by_step() -> None:
    """Each rank's cell of a step has its chunk, in each theme."""
    names = {rank: f"rank {rank}" for rank in range(2)}
    begin, *others = ("reduce_scatter first send", "reduce_scatter step 1", "all_gather step 1")
    steps = [
        {
            "name": name,
            "pid": rank,
            "dur": 1.5,
            "args": {"chunk": (rank - 1 - idx) % 2, "to": 1 - rank},
        }
        for rank in names
        for idx, name in enumerate((begin, *others))
    ]
    found = Ring({"args": {"bytes": 8 << 10}}, steps, [], names)
    for theme in pictures.THEMES:
        drawn = pictures.ring(found, theme)
        assert [drawn.count(f">chunk {chunk}</text>") for chunk in (0, 1)] == [3, 3]
        assert drawn.count("1.50 µs") == 6
        assert "8 KiB" in drawn


def test_lines_of_the_terminal_end_with_a_sentence_or_a_part_of_one() -> None:
    said = f"rank 2 (pid 7 on vm): {'a' * 40}, {'b' * 30} ended 9 s ago. {'C' * 70}, step 1/2"
    assert sample_jobs.wrapped(said) == [
        f"rank 2 (pid 7 on vm): {'a' * 40}, {'b' * 30} ended 9 s ago.",
        f"{'C' * 70}, step 1/2",
    ]
    said = f"{'a' * 50}, {'b' * 60} {'c' * 60}"
    assert sample_jobs.wrapped(said) == [f"{'a' * 50},", f"{'b' * 60}", f"{'c' * 60}"]
    long = "d" * (2 * sample_jobs.COLUMNS)
    assert sample_jobs.wrapped(long) == [long[: sample_jobs.COLUMNS]] * 2


def test_a_library_has_one_colour() -> None:
    assert len({*palette.LIBRARIES.values()}) == len(palette.LIBRARIES)
    names = ["gloo", "one_shot", "ringcomm", "ring"]
    colors = palette.colors_of(names)
    assert [*colors] == names
    assert len({*colors.values()}) == 4
    assert not {colors["one_shot"], colors["ring"]} & {*palette.LIBRARIES.values()}
    assert all(colors[name] == palette.LIBRARIES[name] for name in ("gloo", "ringcomm"))


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
    pytest.importorskip("matplotlib")
    assert plot.main(["--out", str(tmp_path), str(path)]) == EXIT_OK
    assert "in place" in (tmp_path / "cross_entropy.svg").read_text(encoding="utf-8")
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
    assert [record["system"] for record in records] == trainees.DEFAULT
    by_name = {record["system"]: record for record in records}
    for record in records:
        assert record["loss"] == pytest.approx(record["one_process_loss"], rel=1e-4)
        if "gloo" in record["system"] or record["system"] == "parameter server":
            assert record["sent_bytes"] is None
        else:
            # Bytes of agreements are not in the formula; records have five digits.
            assert record["sent_bytes"] == pytest.approx(record["formula_bytes"], rel=1e-4)
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
    records = records_of(path, f"{SYSTEMS} --over gloo,fake", "--systems", names)
    found = {record["system"]: record for record in records}
    assert list(found) == [f"{n}{on}" for n in names.split(";") for on in ("", " on gloo")]
    for name, record in found.items():
        assert record["backend"] == ("gloo" if "gloo" in name else "ringcomm")
        assert ("over_ringcomm" in record) == ("gloo" in name)
        assert ("communication_share" in record) == ("tensor" not in name)
