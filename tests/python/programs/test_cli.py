"""What `ringcomm bench`, `tune` and `trace` run: results in files, exit status, interrupts."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from html_report import read_records
from machines import comes_true
from test_trace import of, titles

from _ringcomm import start as cli
from _ringcomm.status import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
)
from _ringcomm.values import output_file
from ringcomm import tuning
from ringcomm.cost_model import Costs
from ringcomm.measure import algorithms

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 120.0
COMMAND = [sys.executable, "-m", "ringcomm"]
TRACE = [*COMMAND, "trace"]
QUICK = ["--seconds", "0", "--repeats", "0"]
WORLD = tuning.World(2, True, 1 << 18, ())
TUNED = tuning.Tuning("2026-11-20", {}, "2.13.0", "0.1.0", 1, Costs(copy_us=90.0), 1.2, (WORLD,))

pytestmark = pytest.mark.skipif(
    "ringcomm" not in dist.Backend.backend_list, reason="the extension is not installed"
)


def start(*command: str, **env: str) -> subprocess.Popen[str]:
    """A process in a session of its own, so that what it leaves behind can be found."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RINGCOMM_")}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=clean | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def length(path: Path) -> int:
    """Bytes of a file, 0 without one. `exists` first would race with output_file's removal."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def members(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status and output of a process that leaves nothing behind."""
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert members(process.pid) == []
    return process.returncode, out, err


def run(*argv: str, **env: str) -> tuple[int, str, str]:
    return finish(start(*COMMAND, *argv, **env))


@pytest.mark.slow
def test_bench_joins_the_ranks_of_torchrun(tmp_path: Path) -> None:
    """One rank prints and writes."""
    path = tmp_path / "bench.jsonl"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    argv = ["bench", "all_gather", "--peers", "none", "--sizes", "4k", "--json", str(path), *QUICK]
    process = start(*torchrun, "--nproc-per-node=2", "-m", "ringcomm", *argv, OMP_NUM_THREADS="1")
    status, out, err = finish(process)
    assert status == EXIT_OK, err
    assert out.count("records: ") == 1
    (record,) = read_records([path])
    assert (record["op"], record["world_size"], record["bytes"]) == ("all_gather", 2, 4096)
    assert record["verified"]


def test_two_ranks_check_the_same_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank removes the file of its check while the other rank has it open for its own."""
    opens = Path.open

    def open_and_lose(path: Path, *args: Any, **kwargs: Any) -> Any:
        file = opens(path, *args, **kwargs)
        path.unlink()
        return file

    monkeypatch.setattr(Path, "open", open_and_lose)
    output_file(str(tmp_path / "records.jsonl"))
    assert not list(tmp_path.iterdir())


def test_tune_writes_what_load_reads(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    argv = ["--world-sizes", "2", "--sizes", "1k,256k", "--json", str(path)]
    status, out, err = run("tune", *argv, *QUICK, "--force", RINGCOMM_TUNING=str(path))
    assert status == EXIT_OK
    first, second = err.splitlines()  # a line for each measurement where stderr is no terminal
    assert first == "1 of 2: 1 KiB on 2 ranks"
    assert re.fullmatch(r"2 of 2: 256 KiB on 2 ranks, about \d+ s left", second)
    assert "two_shot / one_shot" in out
    found = tuning.load(path)
    (world,) = found.worlds
    assert [(p.bytes, p.algorithm) for p in world.points] == [
        (size, name) for size in (1024, 262144) for name in ("one_shot", "two_shot", "ring")
    ]
    assert all(0 < p.p10_us <= p.p50_us <= p.p90_us for p in world.points)
    assert found.worst_fit >= 1
    assert found.one_shot_max_bytes(2) in range(1, 262145)
    assert found.differences(json.loads(path.read_text())["machine"]) == []


def test_tune_keeps_no_disturbed_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a file of such figures, which --force writes, warns where it is loaded."""
    times = tuple(tuning.Point(1024, name, 1.0, 1.0, 1.0, 9) for name in algorithms.TUNED)
    sizes = [algorithms.SizeTimes(times, 1.0, 50.0), algorithms.SizeTimes(times, 1.0, 0.0)]
    monkeypatch.setattr(algorithms, "measure_algorithms", lambda *_: sizes)
    path = tmp_path / "tuning.json"
    command = ["tune", "--world-sizes", "2", "--sizes", "1k,4k", "--json", str(path)]
    assert cli.run(command) == EXIT_FAILED
    assert f"not written: {path} (--force writes it)" in capsys.readouterr().out
    assert not path.exists()
    assert cli.run([*command, "--force"]) == EXIT_OK
    with pytest.warns(UserWarning, match=r"measured while other programs ran \(for 2 ranks\)"):
        tuning.load(path)


def test_ctrl_c_ends_all_processes_and_keeps_what_was_measured(tmp_path: Path) -> None:
    # ringcomm alone: what other backends say when a peer goes while they connect is not ours.
    path, page = tmp_path / "bench.jsonl", tmp_path / "bench.html"
    sizes = ",".join(str(1024 * number) for number in range(1, 200))
    files = ["--json", str(path), "--html", str(page)]
    line = ["bench", "all_reduce", "--world-size", "3", "--sizes", sizes, "--peers", "none"]
    process = start(*COMMAND, *line, *files, *QUICK, OMP_NUM_THREADS="1")
    assert comes_true(lambda: length(page) or process.poll() is not None, TIMEOUT_S)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    status, out, err = finish(process)
    assert (status, err) == (EXIT_INTERRUPTED, "ringcomm bench: interrupted\n")
    records = read_records([path])
    assert 0 < len(records) < 199
    assert f"interrupted after {len(records)} records:" in out
    assert f"{records[-1]['bytes']:,} " in out
    assert '"isPartial": true' in page.read_text(encoding="utf-8")


# ---- `ringcomm trace`: the status of the program, and Ctrl-C

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


def test_arguments_of_a_command_arrive_unchanged(tmp_path: Path) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/4523: one with a space was split."""
    words = ["--text=two words", "", "--", "-o", "*", "$HOME", "--merge"]
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    for dashes in (["--"], []):
        command = [*TRACE, "-o", str(tmp_path / "t.json"), *dashes, sys.executable, "-c", code]
        status, out, _ = finish(start(*command, *words))
        assert json.loads(out) == words
        assert status == 1  # no rank was recorded


@pytest.mark.parametrize(
    ("command", "status"),
    [("exit 3", 3), ("kill -9 $$", 137), pytest.param("kill -15 $$", 143, marks=pytest.mark.slow)],
)
def test_the_status_of_a_command_is_passed_on(command: str, status: int, tmp_path: Path) -> None:
    """https://github.com/BerriAI/litellm/issues/37948: 0 although a worker had failed."""
    words = ["-o", str(tmp_path / "t.json"), "--html", str(tmp_path / "t.html")]
    assert finish(start(*TRACE, *words, "--", "sh", "-c", command))[0] == status
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_outlives_an_interrupted_command(number: signal.Signals, tmp_path: Path) -> None:
    """https://github.com/clemsgrs/slide2vec/pull/131: the launcher's workers kept running."""
    ready = tmp_path / "ready"
    script = f"trap 'kill $!; exit 1' INT TERM; sleep 300 & touch {ready}; wait"
    process = start(*TRACE, "-o", str(tmp_path / "t.json"), "--", "sh", "-c", script)
    assert comes_true(ready.exists, TIMEOUT_S)
    process.send_signal(number)  # to the command alone, as a service manager does
    status, _, err = finish(process)  # which sees that the session has no other process
    assert status == 130
    assert "Traceback" not in err


def test_an_interrupt_while_the_command_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended Popen(), and the command ran on."""
    started, start_really = [], subprocess.Popen

    def interrupted(*args: Any, **options: Any) -> Any:
        started.append(start_really(*args, **options))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    assert cli.run(["trace", "-o", str(tmp_path / "t.json"), "--", "sleep", "300"]) == 130
    assert started[0].poll() == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_ends_the_command_and_keeps_the_recordings(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It left the command running, and dropped what its ranks had recorded."""
    started: list[Any] = []

    class Impatient(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            started.append(self)
            if len(started) <= 2:  # of the command, and while it ends
                signal.raise_signal(number)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Impatient)
    kept = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as run_main() does
    try:
        status = cli.run(["trace", "-o", str(tmp_path / "t.json"), "--", "sleep", "300"])
    except KeyboardInterrupt:
        started[0].kill()
        status = -1
    finally:
        handler = signal.signal(signal.SIGTERM, kept)
    assert status == 130
    assert started[0].poll() == -signal.SIGTERM
    assert "nothing was recorded" in capsys.readouterr().err  # it has looked
    assert handler == signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.parametrize(
    ("number", "command"),
    [
        (signal.SIGINT, "kill -INT $PPID; exec sleep 300"),
        (signal.SIGTERM, "kill -TERM $PPID; exec sleep 300"),
        pytest.param(signal.SIGINT, "exit 3", marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_ends_the_merge(number: signal.Signals, command: str, tmp_path: Path) -> None:
    """Also after one that has ended the command: it was sent to that, and the merge went on."""
    words = ["ringcomm", "trace", "-o", str(tmp_path / "t.json"), "--", "sh", "-c", command]
    code = f"""
import os, sys
import _ringcomm.start
from ringcomm.trace import merge
def interrupted(*arguments):
    os.kill(os.getpid(), {number:d})
    return merge_really(*arguments)
merge_really, merge.merge_folders = merge.merge_folders, interrupted
sys.argv = {words}
sys.exit(_ringcomm.start.main())
"""
    status, _, err = finish(start(sys.executable, "-c", code, TMPDIR=str(tmp_path)))
    assert (status, err) == (130, "ringcomm trace: interrupted\n")
    assert not [*tmp_path.iterdir()]
