"""`ringcomm trace`: the status of the program, Ctrl-C, and bad input. Traces: test_trace.py."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli import finish, start
from test_trace import of, titles

from ringcomm import cli

JOB = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
print("reduced", flush=True)
if sys.argv[1] == "wait":
    import time
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


def start_job(tmp_path: Path, argument: str) -> tuple[subprocess.Popen[str], Path]:
    (tmp_path / "job.py").write_text(JOB)
    output = tmp_path / "job.json.gz"
    job = [sys.executable, str(tmp_path / "job.py"), argument]
    command = [sys.executable, "-m", "ringcomm", "trace", "-o", str(output), "--", *job]
    return start(*command), output


def events_of(path: Path) -> list[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return list(json.load(file)["traceEvents"])


def test_command_has_the_status_of_the_program(tmp_path: Path) -> None:
    process, output = start_job(tmp_path, "3")
    status, out, err = finish(process)
    assert (status, out) == (3, "reduced\n"), err
    assert f"{output}: 1 rank, " in err
    assert "ringcomm trace: the longest: all_reduce #0 of rank 0 " in err
    events = events_of(output)
    assert titles(events) == ["rank 0"]
    assert [e["name"] for e in of(events, "call")] == ["ringcomm:all_reduce"]


@pytest.mark.slow
def test_ctrl_c_ends_the_program_and_leaves_a_trace(tmp_path: Path) -> None:
    process, output = start_job(tmp_path, "wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "reduced\n"
    os.kill(process.pid, signal.SIGINT)
    status, _, err = finish(process)
    assert status == 130, err
    events = events_of(output)
    assert titles(events) == ["rank 0 (ended early)"]


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        ("", 2, "give one of: -- COMMAND, --merge FOLDER, --steps FILE"),
        ("--merge FOLDER -- true", 2, "give one of"),
        ("--events 1 -- true", 2, "--events must be 64 to"),
        ("-o /nowhere/job.json -- true", 2, "cannot write '/nowhere/job.json'"),
        ("-o FOLDER/job.json -- /no/such/program", 2, "cannot run /no/such/program: No such file"),
        ("-o FOLDER/job.json -- true", 1, "nothing was recorded: no rank made a group"),
        ("-o FOLDER/job.json -- false", 1, "nothing was recorded"),
        ("-o FOLDER/job.json --merge FOLDER", 1, "nothing was recorded"),
    ],
)
def test_bad_input_is_one_line(
    argv: str, status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = cli.run(["trace", *argv.replace("FOLDER", str(tmp_path)).split()])
    except SystemExit as ended:
        found = int(ended.code or 0)
    err = capsys.readouterr().err
    assert (found, err.count("\n")) == (status, 1), err
    assert message in err
    assert not (tmp_path / "job.json").exists()
