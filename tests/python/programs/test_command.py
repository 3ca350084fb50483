"""The command's start: what it imports, shell completion, and faults reported of other commands.

The latter name the report. Each shows the fault's cause here and the right answer.
"""

from __future__ import annotations

import ctypes
import fcntl
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cross_entropy
import front_door
import operations
import pytest
import torch
import torch.distributed as dist
from machines import comes_true
from rank_programs import run_command
from ranks import run_ranks
from test_cli import COMMAND, ROOT, TIMEOUT_S, finish, members, start
from torch.profiler import profile

import _ringcomm.command
from _ringcomm import start as cli
from _ringcomm.status import run_main
from ringcomm import show
from ringcomm.trace import merge

TRACE = [*COMMAND, "trace"]

# ---- without torch

STARTS = (
    *(f"{command} --help".split() for command in ("", *_ringcomm.command._COMMANDS)),
    *(f"bench {op} --help".split() for op in ("all_gather,barrier", "cross_entropy", "systems")),
    *(["--version"], ["benhc"], ["trace", "--evnets", "x"], ["bench", "--seconds", "nan"], []),
    ["bench", "all_gatther"],
    *(line.split() for line in ("plan --model gpt2 --gpus -3", "doctor --world-size 0")),
    *(line.split() for line in ("show loss --ranks 5", "trace --merge nothing", "bench --ops x")),
)
WITHOUT_TORCH = f"""
import sys
import _ringcomm.start
for line in {STARTS!r}:
    try:
        _ringcomm.start.run(line)
    except SystemExit as ended:
        print("status", ended.code)
print("imported", *({{"torch", "numpy", "ringcomm"}} & {{*sys.modules}}))
"""


def test_help_and_wrong_options_import_no_torch() -> None:
    """https://github.com/pytorch/pytorch/issues/91856: torchrun's help takes a second."""
    done = run_command(sys.executable, "-c", WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^status (\d)$", done.stdout, re.M) == ["0"] * 11 + ["2"] * 10
    assert done.stdout.endswith("\nimported\n")


@pytest.mark.parametrize(
    "line", ["--help", "bench barrier --help", "--version", "benhc", "trace --evnets x"]
)
def test_python_m_answers_before_the_package_imports_torch(line: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')", encoding="utf-8")
    env = {"PYTHONPATH": str(tmp_path)}
    done = run_command(*COMMAND, *line.split(), env=env)
    script = run_command(Path(sys.executable).with_name("ringcomm"), *line.split())
    assert (done.returncode, done.stdout, done.stderr) == (
        script.returncode,
        script.stdout,
        script.stderr,
    )
    assert "torch is imported" in run_command(*COMMAND, "show", "loss", env=env).stderr


def test_the_command_and_python_m_are_the_same() -> None:
    """And the version, which is read without an import, is the package's."""
    script = Path(sys.executable).with_name("ringcomm")
    said = {run_command(*command, "--version").stdout for command in (COMMAND, [script])}
    assert said == {f"ringcomm {__import__('ringcomm').__version__}\n"}


def completed(line: str, folder: Path) -> list[str]:
    """What bash would offer after a line, by argcomplete's protocol."""
    answer = folder / "answer"
    env = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "IFS": "\n"}
    env |= {"_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    code = "import sys, _ringcomm.start; sys.argv = ['ringcomm']; _ringcomm.start.main()"
    subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, timeout=TIMEOUT_S, check=False
    )
    return sorted(word.strip() for word in answer.read_text().split("\n"))


def test_shell_completion(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    assert completed("ringcomm t", tmp_path) == ["trace", "tune"]
    assert completed("ringcomm show --tr", tmp_path) == ["--trace"]
    assert completed("ringcomm show l", tmp_path) == ["lomo", "loss"]
    assert completed("ringcomm bench all_t", tmp_path) == ["all_to_all"]


def test_completion_knows_the_operations_of_bench() -> None:
    known = {*_ringcomm.command.OPERATIONS}
    assert known == {*operations.OPERATIONS, *front_door.ALONE}


def test_words_of_options_are_those_of_what_measures() -> None:
    """The options are read before what measures is imported, which needs torch."""
    assert (*cross_entropy.TOLERANCES,) == front_door.LOSS_DTYPES
    assert (*cross_entropy.PEERS,)[3:] == front_door.LOSS_PEERS
    assert all(hasattr(torch, name) for name in front_door.DTYPES)


# ---- output: pipes, terminals, encodings, full disks


def test_help_to_a_reader_that_has_gone() -> None:
    """https://github.com/Backblaze/B2_Command_Line_Tool/issues/1071"""
    process = start(*COMMAND, "plan", "--help")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(TIMEOUT_S) == 141
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


WRITING = (
    "plan --collectives",
    "plan --model gpt2 --gpus 1",
    "plan --model gpt2 --gpus 1 --json",
    "show ring -o {folder}/page.html",
    "show ring -o /proc/self/fd/1",
    "doctor --world-size 1 --seconds 0",
    "tune --world-sizes 2 --sizes 1k,2k --seconds 0 --repeats 0 --json {folder}/t.json",
    "bench barrier --world-size 2 --seconds 0 --repeats 0",
)


def read_and_leave(pipe: int) -> None:
    os.read(pipe, 1)
    os.close(pipe)


@pytest.mark.parametrize("line", WRITING)
def test_a_command_whose_reader_has_gone(line: str, tmp_path: Path) -> None:
    """`| head` is no bad input. Unbuffered, so that the first line meets the closed pipe."""
    args = {"group": "0", "seq": 0, "bytes": 4, "slice": 0, "chunk": 0, "from": 0}
    place: dict[str, Any] = {"pid": 0, "tid": 0, "ts": 0.0, "dur": 1.0, "args": args}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "pid": 0, "args": {"name": "rank 0"}},
        {"name": "all_reduce", "cat": "collective"} | place,
        {"name": "reduce_scatter step 1", "cat": "step"} | place,
    ]
    trace = {"otherData": {"clock": []}, "traceEvents": events}
    (tmp_path / "ring.json").write_text(json.dumps(trace), encoding="utf-8")
    reading, writing = os.pipe()
    if "/fd/1" in line:  # the page does not fit; without a reader open() would wait
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        threading.Thread(target=read_and_leave, args=(reading,)).start()
    else:
        os.close(reading)
    try:
        done = subprocess.run(
            [*COMMAND, *line.format(folder=tmp_path).split()],
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.returncode == 141, done.stderr
    assert "roken pipe" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_an_error() -> None:
    """https://github.com/wren-lang/wren-cli/issues/56: the buffer is written after the status."""
    for words in (["--help"], ["plan", "--model", "gpt2", "--gpus", "1"]):
        with Path("/dev/full").open("w", encoding="utf-8") as full:
            done = subprocess.run(
                [*COMMAND, *words],
                stdout=full,
                stderr=subprocess.PIPE,
                timeout=TIMEOUT_S,
                check=False,
            )
        assert b": [Errno 28] No space left on device\n" in done.stderr, words
        assert done.returncode == 1
    page = run_command(*COMMAND, "show", "loss", "-o", "/dev/full")
    said = "ringcomm show: /dev/full: No space left on device\n"
    assert (page.returncode, page.stderr) == (1, said)


def test_a_killed_measurement_leaves_nothing(tmp_path: Path) -> None:
    """A SIGKILL left the folder of its ranks' store.

    As https://github.com/Dicklesworthstone/mcp_agent_mail_rust/issues/308, a folder each time.
    """
    process = start(*COMMAND, "bench", "--world-size", "2", "--seconds", "60", TMPDIR=str(tmp_path))
    assert comes_true(lambda: len(members(process.pid)) == 3, TIMEOUT_S)
    process.kill()
    assert comes_true(lambda: not members(process.pid), TIMEOUT_S)
    process.communicate()
    assert not [*tmp_path.iterdir()]


def test_a_locale_without_unicode() -> None:
    """https://github.com/labgrid-project/labgrid/issues/486: an arrow ended the program."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for words in (["show", "--help"], ["plan", "--model", "gpt2", "--gpus", "1"]):
        status, out, err = finish(start(*COMMAND, *words, **ascii_only))
        assert (status, err) == (0, "")
        assert out.isascii()


@pytest.mark.parametrize("columns", ["", "0", "many"])
def test_without_a_terminal(columns: str) -> None:
    """https://github.com/benfred/py-spy/issues/122: the size of a terminal that is not there."""
    done = run_command(
        "sh", "-c", f"COLUMNS={columns} TERM= {' '.join(COMMAND)} trace --help <&- 2>&1 | cat"
    )
    assert "--html FILE" in done.stdout
    assert "Traceback" not in done.stdout


def test_without_a_home_and_a_name() -> None:
    """https://github.com/fosrl/cli/issues/44: as a service."""
    command = ["env", "-i", *COMMAND, "plan", "--model", "gpt2", "--gpus", "1"]
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "words",
    [
        ["show", "ring"],
        ["tune", "--world-sizes", "2"],
        ["trace", "--", "touch", "{folder}/ran"],
        ["bench", "--html", "page.html"],
    ],
)
def test_a_folder_that_nobody_can_write_to(words: list[str], tmp_path: Path) -> None:
    """https://github.com/knative/func/issues/2150. Said before anything runs."""
    given = [word.format(folder=tmp_path) for word in words]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*COMMAND, *given],
        cwd="/proc",
        env=env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert not [*tmp_path.iterdir()]


# ---- commands that it runs


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


def test_a_command_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "not_executable"
    file.write_text("", encoding="utf-8")
    for command in ("no_such_program", str(file), str(tmp_path)):
        assert cli.run(["trace", "-o", str(tmp_path / "t.json"), "--", command]) == 2
        assert f"cannot run {command}: " in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_outlives_an_interrupted_command(number: signal.Signals, tmp_path: Path) -> None:
    """https://github.com/clemsgrs/slide2vec/pull/131: the launcher's workers kept running."""
    ready = tmp_path / "ready"
    script = f"trap 'kill $!; exit 1' INT TERM; sleep 300 & touch {ready}; wait"
    process = start(*TRACE, "-o", str(tmp_path / "t.json"), "--", "sh", "-c", script)
    deadline = time.monotonic() + TIMEOUT_S
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
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


def test_ctrl_c_while_torch_is_imported() -> None:
    """https://github.com/Tracer-Cloud/opensre/issues/2748"""
    code = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
import _ringcomm.start
sys.argv = ["ringcomm", "doctor"]
sys.exit(_ringcomm.start.main())
"""
    done = run_command(sys.executable, "-c", code)
    assert (done.returncode, done.stderr) == (130, "ringcomm doctor: interrupted\n")


# ---- traces of other programs, damaged and odd ones


def profiled() -> str:
    """A trace of torch.profiler."""
    with profile() as found:
        torch.ones(3).sum()
    events = [
        {"ph": "X", "cat": "cpu_op", "name": e.key, "ts": 0, "dur": 1} for e in found.events()
    ]
    return json.dumps({"traceEvents": events, "distributedInfo": {"rank": 0}})


@pytest.mark.parametrize("kind", ["profiler", "truncated", "gzip", "not gzip", "a list", "binary"])
@pytest.mark.parametrize("command", ["show trace --trace", "show ring --trace"])
def test_a_file_that_is_no_trace(
    kind: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """https://github.com/facebookresearch/HolisticTraceAnalysis/issues/17: a long traceback.

    And https://github.com/google/trace-viewer/issues/145: a file without its end.
    """
    path = tmp_path / ("t.json.gz" if "gzip" in kind else "t.json")
    whole = '{"otherData": {"clock": []}, "traceEvents": [{"name": "all_reduce"}]}'
    path.write_bytes(
        {
            "profiler": profiled().encode(),
            "truncated": whole[:-20].encode(),
            "gzip": gzip.compress(whole.encode())[:-12],
            "not gzip": whole.encode(),
            "a list": b"[1, 2]",
            "binary": b"\xff\xfe\x00",
        }[kind]
    )
    kept = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        status = run_main("ringcomm", lambda _: cli.run([*command.split(), str(path)]))
    except SystemExit as ended:
        status = int(str(ended.code))
    finally:
        for number, handler in kept:
            signal.signal(number, handler)
    err = capsys.readouterr().err
    assert status in (1, 2)
    assert f"{path} is not a trace written by `ringcomm trace`" in err
    assert err.count("\n") == 1


def call_in_a_thread_of_odd_name(rank: int) -> None:
    """As Python 3.14 names a thread: by the first 15 bytes of a text in UTF-8."""

    def call() -> None:
        ctypes.CDLL(None).prctl(15, "Überträger für ö".encode()[:15])  # PR_SET_NAME
        dist.barrier()

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)


def test_a_thread_whose_name_is_not_unicode(tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/64345: the whole recording was lost."""
    env = {"RINGCOMM_TRACE": str(tmp_path)}
    run_ranks(2, call_in_a_thread_of_odd_name, fresh=True, env=env)
    merge.merge([tmp_path], tmp_path / "t.json")
    events = show.load(tmp_path / "t.json")
    assert "barrier" in {e["name"] for e in events}
