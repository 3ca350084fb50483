"""The program for a machine with a GPU: its file, what a cut run keeps, aims, and layouts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE
from typing import Any

import device_kernels
import front_door
import mps
import placement
import pytest
import torch
import verify_gpu
from verify_gpu import Check

ROOT = Path(__file__).parents[3]


# In place of the programs of a check: each adds its words to a file, as a line.
STUBS = """
note() { (IFS=$'\\x1f'; printf '%s\\n' "$*" >>"$CALLS"); }
for name in python nvidia-smi compute-sanitizer ncu build/gpu/probe; do
  eval "$name() { note $name \\"\\$@\\"; }"
done
"""
# Collects the tests of several command lines, and prints a status for each: 5 where none is left.
# Where none is, it tries again as if there were a GPU, for which conftest.py has cases of its own.
COLLECT = """
import contextlib, json, os, sys, pytest, torch
is_available = torch.cuda.is_available

def collect(words):
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        return int(pytest.main([*words, "--collect-only", "-p", "no:cacheprovider"]))

found = []
for words in json.loads(sys.argv[1]):
    torch.cuda.is_available = is_available
    found.append(collect(words))
    if found[-1] == 5:
        torch.cuda.is_available = lambda: True
        found[-1] = collect(words)
print(json.dumps(found))
"""


def table_of(check: Check) -> str:
    """A check as a file has it, before it has run."""
    return f'[[check]]\nname = "{check.name}"\nwhat = "what"\nlast_run = "not run"\n'


def calls_of(check: Check, folder: Path) -> list[list[str]]:
    """The programs and their words that a check's command starts, each part of it."""
    calls = folder / "calls"
    calls.write_text("")
    env = {**os.environ, "OUT": str(folder), "GPUS": "2", "CALLS": str(calls)}
    env.pop("NCCL", None)
    command = ["bash", "-c", f"{STUBS}\n{check.command}"]
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=60)
    found = [line.split("\x1f") for line in calls.read_text().splitlines()]
    for number, (program, *words) in enumerate(found):
        if program in ("compute-sanitizer", "ncu"):
            assert program in check.needs
            found[number] = words[words.index("python") :]
    return found


def test_commands_fit_their_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each part of a check; scripts parse options as if there were a GPU; files are there."""
    for check in verify_gpu.load(verify_gpu.CHECKS)[0]:
        assert bool(check.command) != bool(check.not_scripted)
        assert not re.search(r"\bmake\b", check.command)  # not on every machine with a GPU
        if not check.command:
            continue
        assert 0 < check.limit_s <= verify_gpu.BUDGET_S
        calls = calls_of(check, tmp_path)
        assert calls
        for program, *arguments in calls:
            for word in (program, *arguments):
                assert not word.endswith(".py") or (ROOT / word).exists()
                assert not word.startswith("build/") or word in check.needs
            if program != "python":
                continue
            if arguments[0] == "-m":
                assert find_spec(arguments[1])
            if arguments[:2] == ["-m", "ringcomm"]:
                assert arguments[2] == "bench"
                front_door.make_parser(arguments[3]).parse_args(arguments[4:])
            elif arguments[0].startswith("benchmarks/"):
                if "llama" in arguments[0]:
                    pytest.importorskip("transformers")
                module: Any = import_module(Path(arguments[0]).stem)
                if hasattr(module, "PROGRAM"):  # not of mps.py, whose words are a command
                    for name in ("count_devices", "find_control"):
                        monkeypatch.setattr(placement, name, lambda *_: 2)
                    module.PROGRAM.parse(arguments[1:])
            elif arguments[0] == "tools/verify_gpu.py":
                verify_gpu.parse(arguments[1:])


@pytest.mark.slow
def test_checks_select_tests(tmp_path: Path) -> None:
    """Each command line of pytest, those in a layout with its -m, leaves a test."""
    lines = {}
    for check in verify_gpu.load(verify_gpu.CHECKS)[0]:
        for _, *words in calls_of(check, tmp_path) if check.command else ():
            if words[:2] == ["-m", "pytest"]:
                lines[check.name] = [*words[2:], *(["-n0"] if "-n" in words else [])]
            elif words[:1] == ["tools/verify_gpu.py"] and "--" in words:
                lines[check.name] = ["-m", "gpu", *words[words.index("--") + 1 :]]
    command = [sys.executable, "-c", COLLECT, json.dumps(list(lines.values()))]
    done = subprocess.run(command, cwd=ROOT, stdout=PIPE, text=True, check=True, timeout=600)
    found = dict(zip(lines, json.loads(done.stdout.splitlines()[-1]), strict=True))
    assert {name: status for name, status in found.items() if status != 0} == {}


@pytest.mark.slow
def test_a_run_goes_on_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_gpu, "gpu_archs", lambda: ["90"])
    path = tmp_path / "checks.toml"

    def run(checks: list[Check], budget_s: float) -> tuple[list[str], dict[str, str]]:
        path.write_text("".join(map(table_of, checks)))
        found, left = verify_gpu.verify(checks, tmp_path, budget_s, path)
        return left, {name: status.removeprefix("not run: ") for name, status in found.items()}

    hangs = "sleep 300 & echo $! > $OUT/pid; wait"
    checks = [
        Check("build", "echo $GPUS GPU; echo 12''34", 4, ()),
        Check("bad", "exit 3", 4, ()),
        Check("empty", "exit 5", 4, ()),  # as pytest without a test
        Check("two", "true", 4, ("2 GPUs",)),
        Check("module", "true", 4, ("no_such_module",)),
        Check("program", "env PATH= python -c pass", 4, ("env",)),
        Check("none", "", 0, (), "no reason"),
        Check("hangs", hangs, 0.5, ()),
    ]
    left, found = run(checks, 60)
    assert left == []
    assert list(found.values()) == [
        *("passed", "failed", "not run", "one GPU here", "no_such_module is not installed"),
        *("passed", "not scripted: no reason", "stopped"),
    ]
    look = ["ps", "-o", "stat=", (tmp_path / "pid").read_text()]
    ended = subprocess.run(look, check=False, stdout=PIPE)
    assert ended.stdout[:1] in (b"", b"Z")  # nothing is left running
    written = {table["name"]: table["last_run"] for table in verify_gpu.tables_of(path)["check"]}
    assert written["build"].startswith("passed, 20")
    assert written["empty"] == written["two"] == "not run"
    assert "1 GPU\n1234" in (tmp_path / "verify.log").read_text(encoding="utf-8")
    # The budget ends a run. What is stopped before its own limit is left for the next one.
    late = "the budget is spent"
    names = {"one": ("true", 4), "cut": ("sleep 60", 5), "short": ("true", 9)}
    checks = [checks[0], *(Check(name, *what, ()) for name, what in names.items())]
    left, found = run(checks, 4)
    assert left == ["cut", "short"]
    assert found == {"build": "passed", "one": "passed", "cut": "stopped", "short": late}


def driver_program(folder: Path, name: str, script: str) -> None:
    """A stand-in for a program of NVIDIA's driver."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_programs_of_the_driver_are_found_beside_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU without a working nvidia-smi is an error; MPS's clients get what they need."""
    folder = tmp_path / "bin"
    monkeypatch.setattr(mps, "FOLDERS", (str(folder),))
    monkeypatch.setattr(verify_gpu, "count_devices", lambda kind: 1)
    assert verify_gpu.main(["--only", "facts", "--out", str(tmp_path)]) == 1
    assert "nvidia-smi is neither on PATH" in capsys.readouterr().out
    driver_program(folder, "nvidia-smi", "echo no devices were found; exit 6")
    assert verify_gpu.main(["--only", "facts", "--out", str(tmp_path)]) == 1
    assert "fails: no devices were found" in capsys.readouterr().out
    driver_program(folder, "nvidia-smi", "echo 9.0; echo 10.0")
    assert verify_gpu.gpu_archs() == ["90", "100"]

    driver_program(folder, mps.CONTROL, "exit 0")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    before = dict(os.environ)
    with mps.Mps():
        assert os.environ["PATH"].startswith(f"{folder}:")
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
        assert Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
    assert dict(os.environ) == before
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    with mps.Mps():
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


# What nvidia-smi says of a GPU after its number, and what is said of it.
WRONG = {
    "570.10, Default, Disabled, 140000": "driver 570.10 is older than CUDA 13, which needs 580",
    "590.48, Exclusive_Process, Disabled, 140000": "it is in exclusive mode, and without MPS a",
    "590.48, Prohibited, Disabled, 140000": "it takes no programs: nvidia-smi -i 2 -c DEFAULT",
    "590.48, Default, Enabled, 140000": "it is cut by MIG: ranks of one group need one slice",
    "590.48, Default, Disabled, 2048": "2.0 GiB are free, and the large sizes need 8: nvidia-smi",
    "590.48, Default, Disabled, 140000": "",
}


def test_gpus_that_do_not_serve_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = [[str(gpu), *line.split(", ")] for gpu, line in enumerate(WRONG)]
    monkeypatch.setattr(verify_gpu, "query_gpus", lambda *_: seen)
    verify_gpu.complain()
    said = capsys.readouterr().out.splitlines()
    wanted = [f"GPU {gpu}: {text}" for gpu, text in enumerate(WRONG.values()) if text]
    assert len(said) == len(wanted)
    assert all(line.startswith(start) for line, start in zip(said, wanted, strict=True))


def test_without_a_gpu_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_gpu, "gpu_archs", list)
    monkeypatch.setattr(verify_gpu, "count_devices", lambda kind: 0)
    assert verify_gpu.main(["--out", str(tmp_path)]) == 0
    assert verify_gpu.main(["--layout", "every"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in verify_gpu.LAYOUTS)
    assert "passed" not in said


AIMS = """
[[aim]]
checks = ["speed", "other"]
records = "backend=nccl, bytes<=64k"
figure = "ratio.p50"
limit = ">= 3"
[[aim]]
checks = ["speed"]
records = "backend=ringcomm, mode=graph, bytes=1k"
figure = "p50_us"
limit = "<= 8"
[[aim]]
checks = ["speed"]
records = "way=in place"
figure = "p50_us / way=copy"
limit = "<= 1.25"
"""


def nccl(num_bytes: int, ratio: float, **fields: Any) -> dict[str, Any]:
    return {"bytes": num_bytes, "backend": "nccl", "ratio": {"p50": ratio}, **fields}


def way(name: str, us: float | None, vocab_size: int) -> dict[str, Any]:
    return {"way": name, "p50_us": us, "vocab_size": vocab_size}


@pytest.mark.parametrize(
    ("idx", "records", "said"),
    [
        (0, [nccl(1 << 10, 4), nccl(1 << 16, 2.5, mode="graph"), nccl(1 << 20, 1)],
         r"missed by 16\.7%: .*: aim >= 3, found 2\.5 \(bytes 65536, mode graph\)"),
        (0, [nccl(1 << 10, 4), nccl(1 << 16, 2.5, verified=False)], "met: .* found 4 "),
        (0, [nccl(1 << 20, 1), {"bytes": 1, "backend": "nccl", "ratio": None}], "no record: "),
        (1, [{"backend": "Ringcomm", "mode": "graph", "bytes": 1024, "p50_us": 10}], "missed by 2"),
        (2, [way("copy", 8, 10), way("in place", 10, 10), way("in place", 9, 20)], "met: .* 1.25 "),
        (2, [way("copy", 7, 10), way("in place", 8, 10), way("in place", None, 10)], "met: .* 1.1"),
        (2, [way("copy", 7, 10), way("in place", 10, 10)], "missed by 14.3%"),
    ],
)  # fmt: skip
def test_the_worst_record_is_compared_with_an_aim(
    idx: int, records: list[dict[str, Any]], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "checks.toml"
    path.write_text(AIMS, encoding="utf-8")
    kind, text = verify_gpu.judge(verify_gpu.load(path)[1][idx], records)
    assert re.match(said, text), text
    assert kind == {"no": "without a record"}.get(text.split()[0], text.split()[0].strip(":"))


def test_a_condition_that_makes_no_sense_is_shown() -> None:
    with pytest.raises(ValueError, match="no condition on a record: 'bytes > 3'"):
        verify_gpu.condition_of("bytes > 3")


def test_aims_are_of_checks_that_write_such_records() -> None:
    checks, aims = verify_gpu.load(verify_gpu.CHECKS)
    commands = {check.name: check.command for check in checks}
    assert aims
    for aim in aims:
        assert verify_gpu.number_of(verify_gpu.condition_of(f"figure {aim.limit}")[2]) is not None
        for name in aim.checks:
            assert ".jsonl" in commands[name], name
            for key, _, value in map(verify_gpu.condition_of, aim.records.split(", ")):
                if key == "op":  # that the check measures
                    assert value in commands[name] or name.startswith("kernel-sweep"), name


def test_a_check_says_what_became_of_its_aims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the records that it has appended, without one that was cut off."""
    monkeypatch.setattr(verify_gpu, "gpu_archs", lambda: ["90"])
    path, records = tmp_path / "checks.toml", tmp_path / "records.jsonl"
    old, new = (json.dumps(nccl(1024, ratio)) for ratio in (1, 4))
    records.write_text(f"{old}\n")
    command = f"echo '{new}' >> {records}; printf '{{' >> {records}"
    check = Check("speed", command, 9, ())
    path.write_text(table_of(check) + AIMS)
    assert verify_gpu.verify([check], tmp_path, 60, path) == ({"speed": "passed"}, [])
    said = capsys.readouterr().out
    assert "  met: ratio.p50 of backend=nccl, bytes<=64k: aim >= 3, found 4 (" in said
    assert said.count("no record: ") == 2
    assert "met: ratio.p50" in (tmp_path / "verify.log").read_text(encoding="utf-8")
    (written,) = verify_gpu.tables_of(path)["check"]
    said = r"passed, 20\d\d-\d\d-\d\d, aims: 1 met, 2 without a record"
    assert re.fullmatch(said, written["last_run"])
    assert path.read_text().endswith(AIMS)


def test_gradients_are_no_extra_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an allocator that counts what a call takes, and what is left of it."""
    state = {"now": 1000, "peak": 0}

    class Result:
        def __init__(self) -> None:
            state["now"] += 70
            state["peak"] = max(state["peak"], state["now"] + 5)

        def __del__(self) -> None:
            state["now"] -= 70

    fakes = {
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": lambda device: state.update(peak=state["now"]),
        "memory_allocated": lambda device: state["now"],
        "max_memory_allocated": lambda device: state["peak"],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    assert device_kernels.extra_bytes(Result, torch.device("cuda")) == 5
    assert device_kernels.extra_bytes(Result, torch.device("cpu")) is None
