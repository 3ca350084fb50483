"""The command's start: what it imports, shell completion, and its output.

The latter name the report. Each shows the fault's cause here and the right answer.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from machines import comes_true
from rank_programs import run_command
from report import fitted, make_table
from rich.console import Console
from test_cli import COMMAND, ROOT, TIMEOUT_S, members, start

import _ringcomm.command
from _ringcomm import start as cli
from _ringcomm.status import EXIT_OK

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


@pytest.mark.parametrize("line", ["--version", "bench barrier --help", "trace --evnets x"])
def test_python_m_is_the_command_and_imports_no_torch(line: str, tmp_path: Path) -> None:
    """And the version, which is read without an import, is the package's."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')", encoding="utf-8")
    env = {"PYTHONPATH": str(tmp_path)}
    done = run_command(*COMMAND, *line.split(), env=env)
    same = run_command(Path(sys.executable).with_name("ringcomm"), *line.split())
    assert (done.returncode, done.stdout) == (same.returncode, same.stdout)
    assert done.stderr == same.stderr
    assert line != "--version" or done.stdout == f"ringcomm {__import__('ringcomm').__version__}\n"
    assert "torch is imported" in run_command(*COMMAND, "show", "loss", env=env).stderr


def completed(line: str, folder: Path) -> list[str]:
    """What bash would offer after a line, by argcomplete's protocol."""
    answer = folder / "answer"
    env = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "IFS": "\n"}
    env |= {"_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    code = "import sys, _ringcomm.start; sys.argv = ['ringcomm']; _ringcomm.start.main()"
    run_command(sys.executable, "-c", code, env=env)
    return sorted(word.strip() for word in answer.read_text().split("\n"))


def test_shell_completion(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    assert completed("ringcomm t", tmp_path) == ["trace", "tune"]
    assert completed("ringcomm show --tr", tmp_path) == ["--trace"]
    assert completed("ringcomm show l", tmp_path) == ["lomo", "loss"]
    assert completed("ringcomm bench all_t", tmp_path) == ["all_to_all"]


# ---- output: pipes, terminals, encodings, full disks


WRITING = (
    "plan --help",
    "plan --collectives",
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
    """https://github.com/Backblaze/B2_Command_Line_Tool/issues/1071

    Unbuffered, so that the first line meets the closed pipe."""
    reading, writing = os.pipe()
    if "/fd/1" in line:  # the page does not fit; without a reader open() would wait
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        threading.Thread(target=read_and_leave, args=(reading,)).start()
    else:
        os.close(reading)
    try:
        words = line.format(folder=tmp_path).split()
        done = run_command(*COMMAND, *words, env={"PYTHONUNBUFFERED": "1"}, stdout=writing)
    finally:
        os.close(writing)
    assert done.returncode == 141, done.stderr
    assert "roken pipe" not in done.stderr
    assert "Traceback" not in done.stderr


def test_output_that_is_closed_from_the_start() -> None:
    """As a service manager may start it: https://github.com/bmc/daemonize/issues/34"""
    command = shlex.join([*COMMAND, "doctor", "--job", str(1 << 22)])
    done = run_command("sh", "-c", f"{command} >&-")
    assert (done.returncode, done.stderr) == (1, "ringcomm doctor: there is no process 4194304\n")


def test_measuring_without_proc() -> None:
    """Its ranks meet in a file of /proc: https://github.com/nolabs-ai/nono/issues/1750"""
    command = shlex.join([*COMMAND, "doctor", "--world-size", "2", "--seconds", "0"])
    shell = f"mount -t tmpfs none /proc || exit 77; exec {command}"
    done = run_command("unshare", "--mount", "--map-root-user", "sh", "-c", shell)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this user may not make namespaces")
    assert done.returncode == 1
    assert re.fullmatch(r"ringcomm doctor: .* ringcomm needs /proc here .*\n", done.stderr)


def test_output_to_a_terminal_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, "ascii"))
    monkeypatch.setattr(sys, "argv", ["ringcomm", *["plan", "--model", "llama-7b", "--gpus", "8"]])
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


def test_a_full_disk_is_an_error() -> None:
    """https://github.com/wren-lang/wren-cli/issues/56: the buffer is written after the status."""
    for words in (["--help"], ["plan", "--model", "gpt2", "--gpus", "1"]):
        with Path("/dev/full").open("w", encoding="utf-8") as full:
            done = run_command(*COMMAND, *words, stdout=full)
        assert ": [Errno 28] No space left on device\n" in done.stderr, words
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
        done = run_command(*COMMAND, *words, env=ascii_only)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.isascii()


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
    done = run_command("env", "-i", *COMMAND, "plan", "--model", "gpt2", "--gpus", "1")
    assert (done.returncode, done.stderr) == (0, "")


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
    done = run_command(*COMMAND, *given, cwd="/proc", env={"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
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
