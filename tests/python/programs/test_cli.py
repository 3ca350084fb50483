"""The command `ringcomm` as users start it, and what doctor reads of the kernel."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import json
import mmap
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import AVAILABLE
from html_report import read_records
from rank_programs import run_command
from report import fitted, make_table
from rich.console import Console

from _ringcomm import start as cli
from _ringcomm.status import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PIPE_CLOSED,
)
from _ringcomm.values import output_file
from ringcomm import tuning
from ringcomm.cost_model import Costs
from ringcomm.measure import algorithms, doctor, machine
from ringcomm.measure.algorithms import measure_algorithms
from ringcomm.screen import counted

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 120.0
COMMAND = [sys.executable, "-m", "ringcomm"]
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
    """One rank prints and writes; the flag probe finds its way between strangers' processes."""
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
    assert record["flag_us"].keys() == {"before", "after"}


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


Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_doctor(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Doctor:
    """`ringcomm doctor` in this process, whose imports are done; its status and output."""
    for name in [name for name in os.environ if name.startswith("RINGCOMM_")]:
        monkeypatch.delenv(name)

    def run_here(*argv: str, **env: str) -> tuple[int, str, str]:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        status = cli.run(["doctor", *argv])
        out, err = capfd.readouterr()
        return status, out, err

    return run_here


def test_doctor_reports_machine_group_and_pairs(run_doctor: Doctor, tmp_path: Path) -> None:
    tuned = str(tmp_path / "tuning.json")
    tuning.save(dataclasses.replace(TUNED, machine={"cpu": "another", "cores": 2}), tuned)
    env = {"RINGCOMM_ALGORITHM": "two_shot", "RINGCOMM_TUNING": tuned, "RINGCOMM_TYPO": "1"}
    status, out, err = run_doctor("--json", "--world-size", "3", "--seconds", "0", **env)
    assert (status, err) == (EXIT_OK, "")
    report = json.loads(out)
    assert report["environment"] == env
    assert {"ringcomm", "torch", "python", "kernel", "simd"} <= report["versions"].keys()
    assert report["cpus"]["usable"] == sorted(os.sched_getaffinity(0))
    assert {"cpu_cores", "memory_bytes", "max_fds"} <= report["limits"].keys()
    assert report["threads"]["torch"] == torch.get_num_threads()
    group = report["group"]
    assert [pair["ranks"] for pair in group["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    for pair in group["pairs"]:
        assert pair["transport"] == "shm"
        assert re.fullmatch(r"1 host: .* \(ranks 0 1 2\)", pair["why"])
        assert pair["latency_us"] > 0
        assert pair["gb_per_s"] > 0
    assert [point["algorithms"] for point in group["all_reduce"]] == [["two_shot"]] * 3
    memory = group["memory"]
    assert 0 < memory["resident_bytes"] <= memory["mapped_bytes"]
    assert memory["mapped_bytes"] <= 3 * (8 << 20)  # of three pairs
    notes = "\n".join(report["notes"])
    for text in (
        "RINGCOMM_TYPO is set, but ringcomm has no such variable",
        f"{tuned} has no entry for 3 ranks",
        "the file was tuned with 'another'",
    ):
        assert text in notes
    assert "RINGCOMM_TUNING is set" not in notes
    assert [problem["problem"] for problem in report["problems"]] == report["notes"]
    assert all(problem["fix"] for problem in report["problems"])
    assert doctor.examine(1, 0.0)["group"]["pairs"] == []


def test_doctor_names_messages(run_doctor: Doctor) -> None:
    asked = ("--json", "--world-size", "2", "--seconds", "0")
    status, out, err = run_doctor(*asked, RINGCOMM_TRANSPORT="messages")
    assert (status, err) == (EXIT_OK, "")
    (pair,) = json.loads(out)["group"]["pairs"]
    assert pair["transport"] == "messages"
    assert pair["why"].startswith("over gloo, as requested; 1 host: ")


def test_doctor_says_why_a_group_cannot_be_made(run_doctor: Doctor) -> None:
    """And tells the rest all the same."""
    status, out, err = run_doctor("--world-size", "2", RINGCOMM_TRANSPORT="tcp")
    assert (status, err) == (EXIT_FAILED, "")
    cause = "rank 1: ValueError: transport of ringcomm.Options, or RINGCOMM_TRANSPORT, must be"
    said = f"  ✗ the group could not be created: {cause} shm or messages, got 'tcp'\n"
    assert f"{said}    fix: look the message up" in out
    assert "cores" in out
    assert "all_reduce" not in out


def test_doctor_prints_a_line_for_each_check(run_doctor: Doctor) -> None:
    """✓ with units that people read, ✗ with one fix."""
    env = {"RINGCOMM_TRANSPRT": "shm", "RINGCOMM_ALGORITHM": "two_shot"}
    env |= {"RINGCOMM_AS_GLOO": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    status, out, err = run_doctor("--world-size", "2", "--seconds", "0", **env)
    assert (status, err) == (EXIT_OK, "")
    lines = [line for line in out.splitlines() if line]
    checks = [line for line in lines if line.startswith("  ✓ ")]
    wrong = [index for index, line in enumerate(lines) if line.startswith("  ✗ ")]
    fixes = [index for index, line in enumerate(lines) if line.startswith("    fix: ")]
    assert fixes == [index + 1 for index in wrong]
    assert len(lines) == len(checks) + 2 * len(wrong) + 3  # two titles, and how many problems
    assert lines[-1] == f"{counted(len(wrong), 'problem')} found; the group works"
    named = lines.index("  ✗ RINGCOMM_TRANSPRT is set, but ringcomm has no such variable")
    assert lines[named + 1] == "    fix: did you mean RINGCOMM_TRANSPORT?"
    unused = (
        "  ✗ RINGCOMM_AS_GLOO has no effect, and groups use Gloo: TORCH_DEVICE_BACKEND_AUTOLOAD"
    )
    assert f"{unused} is 0" in lines
    time_, rate = r"[\d.,]+ (µs|ms|s)", r"[\d.e+]+ GB/s"
    for pattern in (
        r"  ✓ [\d.,]+ [GM]iB of memory, [\d.,]+ [GM]iB available",
        rf"  ✓ ranks 0 and 1: 1 KiB in {time_}, 4 MiB with {rate}",
        r"  ✓ shared memory of the group: [\d.]+ [MK]iB in use of at most [\d.]+ MiB",
    ):
        assert any(re.fullmatch(pattern, line) for line in checks), (pattern, out)
    # ✗ if other programs use the cores.
    pattern = rf"  [✓✗] all_reduce of 16 MiB: {time_}, 99th percentile {time_}, "
    assert any(re.match(pattern, line) for line in lines), out


def test_doctor_has_limits_for_load_speed_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in doctor.PINNING_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def problems(
        load: float,
        busbw: float,
        threads: str,
        world_size: int = 2,
        p99_us: float = 500.0,
        others: float = 0.0,
    ) -> dict[str, str]:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        point = {"bytes": 16 << 20, "busbw_gb_per_s": busbw, "p50_us": 10.0, "p99_us": p99_us}
        report: dict[str, Any] = {
            "group": {
                "all_reduce": [point],
                "copy_gb_per_s": 10.0,
                "others_busy_percent": others,
            },
            "machine": {"cores": 8, "load": (2 * load, 0, 0)},
            "cpus": {"num_cores": 4},
            "threads": {"torch": 3},
            "limits": {"cpu_cores": None},
            "environment": {},
        }
        return {check: text for check, text, _ in doctor._problems(report, world_size)}

    assert problems(4.0, 1.1, "2") == {}
    assert problems(4.5, 1.1, "2") == {}  # of programs that have ended
    assert [*problems(4.0, 1.1, "2", others=11.0)] == ["others"]
    found = problems(4.5, 0.9, "3", others=11.0)
    averages = "load 9.00 over the minute before, 0.00 over 5, 0.00 over 15"
    assert found["load"] == f"{averages}, on 8 CPUs: programs wait for their turn"
    assert found["speed"].startswith("all_reduce of 16 MiB has 9 % of the speed of one rank's copy")
    assert found["environment"].startswith("OMP_NUM_THREADS is 3: 2 ranks compute with 6 threads")
    found = problems(4.0, 1.1, "300")  # more than torch takes
    assert found["environment"].startswith("OMP_NUM_THREADS is 300: 2 ranks compute with 6 threads")
    for others, why in ((0.0, "a rank waited for a core"), (11.0, "other programs use the cores")):
        late = problems(4.0, 1.1, "1", p99_us=1000.0, others=others)
        assert late["all_reduce of 16 MiB"] == (
            "all_reduce of 16 MiB: 10.0 µs, 99th percentile 1.00 ms, 100 times the median (at most"
            f" 50 expected): {why}"
        )
        assert [*late][-1] == "all_reduce of 16 MiB"
    turns = problems(4.0, 1.1, "1", world_size=5)
    text = "5 ranks on 4 cores: the ranks have to take turns"
    assert turns == {"cpus": text}
    # https://github.com/pytorch/pytorch/issues/91989: importing torch left a process one core.
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0-3")
    moved = "; with GOMP_CPU_AFFINITY=0-3 OpenMP moves each rank there when it imports torch"
    assert problems(4.0, 1.1, "1", world_size=5) == {"cpus": text + moved}
    monkeypatch.setenv("OMP_PROC_BIND", "FALSE")
    assert problems(4.0, 1.1, "1", world_size=5) == {"cpus": text}


@pytest.mark.parametrize(
    ("threads", "cores", "said"),
    [
        (8, 8, "use 8 threads of a rank: torch has 8, and a rank 8 cores"),
        (8, 4, "use 1 thread of a rank: torch has 8, and a rank 4 cores; with OMP_NUM_THREADS=4"),
        (1, 2, "use 1 thread of a rank: torch has 1, and a rank 2 cores; with OMP_NUM_THREADS=2"),
        (1, 0, "use 1 thread of a rank: torch has 1, and a rank less than 1 core"),
        (
            2,
            0,
            "use 1 thread of a rank: torch has 2, and a rank less than 1 core; without torchrun,"
            " which sets OMP_NUM_THREADS=1, ranks compute with 2 threads on less than 1 core",
        ),
        (
            2,
            1,
            "use 1 thread of a rank: torch has 2, and a rank 1 core; without torchrun, which sets"
            " OMP_NUM_THREADS=1, ranks compute with 2 threads on 1 core",
        ),
    ],
)
def test_doctor_says_how_many_threads_of_a_rank_copy(
    monkeypatch: pytest.MonkeyPatch, threads: int, cores: int, said: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    text = doctor._threads_text({"threads": {"torch": threads, "cores_per_rank": cores}})
    more = f" they use {cores}" if "; with OMP" in said else ""
    assert text == f"collectives of 256 KiB and more {said}{more}"


def test_doctor_says_that_gloo_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ringcomm is not installed, so that `import torch` does not load it."""
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(doctor, "entry_points", lambda group: importlib.metadata.EntryPoints())
    report: dict[str, Any] = {
        "group": {},
        "machine": {"cores": 4, "load": (0, 0, 0)},
        "cpus": {"num_cores": 4},
        "limits": {"cpu_cores": None},
        "environment": {"RINGCOMM_AS_GLOO": "1"},
    }
    ((check, text, _),) = doctor._problems(report, 2)
    assert (check, "ringcomm is not installed here" in text) == ("environment", True)


def test_no_cost_model_of_a_disturbed_run() -> None:
    assert "copy_us 90" in algorithms._model_text(TUNED)
    disturbed = dataclasses.replace(TUNED, worlds=(dataclasses.replace(WORLD, quiet=False),))
    for found in (disturbed, dataclasses.replace(TUNED, worst_fit=1988.0)):
        assert "copy_us" not in algorithms._model_text(found)


@pytest.mark.parametrize(
    ("all_sizes", "of_2_mib", "setting", "text"),
    [
        ("always within_size advise [never] deny force", None, "never", "thp/shmem_enabled allows"),
        ("always within_size [advise] never deny force", None, "advise", "is advise"),
        ("always [never] deny", "always [inherit] within_size advise never", "never", "no huge"),
        ("always [never] deny", "[always] inherit within_size advise never", "always", "may have"),
        ("always [deny] force", "always [inherit] never", "deny", "is deny; `advise`"),
        ("[always] never", "always inherit [never]", "never", "2048kB/shmem_enabled allows"),
        (None, None, None, "does not say"),
        ("", None, None, "does not say"),
    ],
)
def test_huge_pages_of_shared_memory(
    tmp_path: Path, all_sizes: str | None, of_2_mib: str | None, setting: str | None, text: str
) -> None:
    files = {"shmem_enabled": all_sizes, "hugepages-2048kB/shmem_enabled": of_2_mib}
    write(tmp_path / "thp", {name: said for name, said in files.items() if said is not None})
    found = machine.huge_pages(tmp_path / "thp")
    assert (found and found["setting"]) == setting
    assert text in doctor._huge_pages_text(found)


def test_what_proc_says_of_memory_and_processes() -> None:
    found = machine.memory()
    assert found["total_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < found["available_bytes"] <= found["total_bytes"]
    assert 1 <= (machine.num_cores() or 1) <= (os.cpu_count() or 1)
    before = machine._cpu_s(os.getpid())
    begin = time.process_time()
    while time.process_time() < begin + 0.3:
        pass
    assert machine._cpu_s(os.getpid()) - before >= 0.2
    descriptor = os.memfd_create("ringcomm-of-a-test")
    os.ftruncate(descriptor, 8 << 12)
    with mmap.mmap(descriptor, 8 << 12) as memory:
        memory[:1] = b"x"
        after = machine.mapped_memory()
        memory.flush()
    os.close(descriptor)
    gone = machine.mapped_memory()
    assert after["mapped_bytes"] - gone["mapped_bytes"] == 8 << 12
    assert after["resident_bytes"] - gone["resident_bytes"] >= 1 << 12
    assert after["share_bytes"] - gone["share_bytes"] >= 1 << 12


def test_ctrl_c_ends_all_processes_and_keeps_what_was_measured(tmp_path: Path) -> None:
    # ringcomm alone: what other backends say when a peer goes while they connect is not ours.
    path, page = tmp_path / "bench.jsonl", tmp_path / "bench.html"
    sizes = ",".join(str(1024 * number) for number in range(1, 200))
    files = ["--json", str(path), "--html", str(page)]
    line = ["bench", "all_reduce", "--world-size", "3", "--sizes", sizes, "--peers", "none"]
    process = start(*COMMAND, *line, *files, *QUICK, OMP_NUM_THREADS="1")
    deadline = time.monotonic() + TIMEOUT_S
    while not length(page) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    status, out, err = finish(process)
    assert (status, err) == (EXIT_INTERRUPTED, "ringcomm bench: interrupted\n")
    records = read_records([path])
    assert 0 < len(records) < 199
    assert f"interrupted after {len(records)} records:" in out
    assert f"{records[-1]['bytes']:,} " in out
    assert '"isPartial": true' in page.read_text(encoding="utf-8")


def test_ctrl_c_keeps_numbers_of_ranks_that_are_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(world_size: int, sizes: list[int], *_: Any) -> list[Any]:
        if world_size > 2:
            raise KeyboardInterrupt
        return measure_algorithms(world_size, sizes, 0.0, 0)

    monkeypatch.setattr(algorithms, "measure_algorithms", measure)
    path = tmp_path / "tuning.json"
    path.write_text("of an earlier run")
    with pytest.raises(KeyboardInterrupt):
        cli.run(["tune", "--sizes", "1k,4k", "--json", str(path), *QUICK])
    assert path.read_text() == "of an earlier run"
    partial = tmp_path / "tuning.json.interrupted"
    assert f"interrupted: {partial} has only the numbers of ranks above" in capsys.readouterr().out
    assert [world.world_size for world in tuning.load(partial).worlds] == [2]


LLAMA = "plan --model llama-7b --gpus 8"


def test_output_that_is_closed_from_the_start() -> None:
    """As a service manager may start it: https://github.com/bmc/daemonize/issues/34"""
    command = shlex.join([*COMMAND, "doctor", "--job", str(1 << 22)])
    done = run_command("sh", "-c", f"{command} >&-")
    assert (done.returncode, done.stderr) == (1, "ringcomm doctor: there is no process 4194304\n")


def test_output_to_a_pipe_that_closes() -> None:
    process = start(*COMMAND, *LLAMA.split())
    assert process.stdout is not None
    process.stdout.close()  # as of `| head -0`
    assert process.wait(TIMEOUT_S) == EXIT_PIPE_CLOSED
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


def test_output_to_a_terminal_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, "ascii"))
    monkeypatch.setattr(sys, "argv", ["ringcomm", *LLAMA.split()])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # handlers of pytest stay
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.main() == EXIT_OK
    assert b"8 ? h100" in screen.getvalue()  # for a multiplication sign


def test_a_narrow_terminal_gets_lines_in_place_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")  # a dumb terminal has no width of its own
    table = make_table(["op", "p50 µs", "time / ringcomm's"], "Medians.")
    table.add_row("all_reduce", "4.66", "19.2× (18.9–19.2)")
    table.add_row("all_gather", "5.25", "")
    screen = io.StringIO()
    for width in (200, 30):
        options: Any = {"force_terminal": True, "highlight": False}
        console = Console(file=screen, width=width, **options)
        console.print(fitted(console, table))
    wide, _, narrow = screen.getvalue().partition("\nop  ")
    assert "┃" in wide
    lines = ["all_reduce", "p50 µs             4.66"]
    lines += ["time / ringcomm's  19.2×", "(18.9–19.2)", "all_gather", "Medians."]
    for line in lines:
        assert line in narrow
    assert "…" not in screen.getvalue()
    assert "\x1b[3" not in screen.getvalue()  # a color, which NO_COLOR forbids


OF_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}
BAD_INPUT = [
    ("", "COMMAND"),
    ("juggle", "invalid choice: 'juggle'"),
    ("benhc", "; did you mean bench?"),
    ("bench juggle", "invalid choice: 'juggle'"),
    ("bench all_reduce,systems", "systems must be the only operation"),
    ("bench all_reduce --peers nccl", "add --device cuda"),
    ("bench all_reduce --peers carrier_pigeon", "has no backend 'carrier_pigeon'"),
    ("bench all_reduce --peers gloo", "built without gloo"),
    ("bench cross_entropy --world-size 2 --peers torch", "--peers are for one rank"),
    ("bench cross_entropy --device abacus", "this torch finds no abacus device here"),
    ("bench sendrecv --world-size 1", "at least two ranks"),
    ("bench all_reduce --device no_such_device", "no no_such_device device here"),
    ("bench all_reduce --nccl-library /nowhere/libnccl.so", "/nowhere/libnccl.so"),
    ("bench cores --tuning /proc/version", "tuning file '/proc/version': not JSON"),
    ("bench systems --plot it.doc", "--plot it.doc: the file name must end in one of"),
    ("trace --merge /proc/self/fdinfo", "ringcomm trace: nothing was recorded"),
    ("plan --model llama-8b --gpus 8", "known are llama-7b, llama-13b"),
    (f"{LLAMA} --why 100000", "--why must be 1 to "),
    (f"{LLAMA} --memory 80M", "less than the 1.00 GiB that the driver uses"),
    (f"{LLAMA} --tuning /proc/version", "not JSON"),
    *((line, "torchrun") for line in ("bench barrier --world-size 2", "tune", "doctor")),
]


@pytest.mark.parametrize(("line", "message"), BAD_INPUT)
def test_bad_input_is_one_line_and_status_2(
    line: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(AVAILABLE, "gloo", lambda: False)  # as a torch built without it says
    if message == "torchrun":
        for name, value in OF_TORCHRUN.items():
            monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        cli.run(line.split())
    assert ended.value.code == EXIT_BAD_INPUT
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


# ---- what doctor reads of the kernel, from trees made as the kernel does


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_nodes_are_those_of_the_cores_that_a_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {"node0": "0-3,8-11", "node1": "4-7,12", "node2": ""}  # node2 has only memory
    folder = write(tmp_path / "node", {f"{name}/cpulist": said for name, said in nodes.items()})
    for usable, expected in (({0, 9}, 1), ({3, 4}, 2), ({12}, 1), ({99}, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, usable=usable: usable)
        assert machine.num_nodes(folder) == expected
    assert machine.num_nodes(tmp_path / "nowhere") == 1


def test_two_threads_of_a_core_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/llmmanorg/llmman/issues/331: a cpuset's CPUs were taken for cores."""
    siblings = {
        f"cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)
    }
    cpus = write(tmp_path / "cpu", siblings)
    for usable, expected in ((range(8), 4), ({0, 4}, 1), ({0, 1}, 2), ({3, 7, 2}, 2), ({99}, None)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, usable=usable: usable)
        assert machine.num_cores(cpus) == expected


def test_limits_of_a_cgroup(tmp_path: Path) -> None:
    """An ancestor may allow less; the root of the hierarchy has no such files."""
    top = tmp_path / "cg"
    files = {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}
    files |= {"a/memory.max": "max", "a/b/memory.max": str(3 << 30)}
    write(top, files)
    found = machine.read_limits(write(tmp_path / "proc", {"cgroup": "0::/a/b"}), top)
    assert found["cpu_cores"] == (1.5, str(top / "a/cpu.max"))
    assert found["memory_bytes"] == (3 << 30, str(top / "a/b/memory.max"))
    # In a container the cgroup may be at the root, and its name that on the host. Version 1 is not
    # read.
    top = tmp_path / "container"
    files = {"cpu.max": "250000 100000", "memory.max": str(5 << 30)}
    write(top, {**files, "memory/memory.limit_in_bytes": str(1 << 30)})
    lines = "4:memory:/\n1:name=systemd:/\n0::/a/gone"
    for proc in (write(tmp_path / "proc", {"cgroup": lines}), tmp_path / "no proc"):
        found = machine.read_limits(proc, top)
        assert found["cpu_cores"] == (2.5, str(top / "cpu.max"))
        assert found["memory_bytes"] == (5 << 30, str(top / "memory.max"))
    found = machine.read_limits(tmp_path / "no proc", tmp_path / "no cgroup")
    assert (found["cpu_cores"], found["memory_bytes"]) == (None, None)
