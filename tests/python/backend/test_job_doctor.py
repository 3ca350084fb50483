"""`ringcomm doctor --job` on jobs that hang: the verdict names the rank and the reason.

The hangs are in hang_cases.py. No test asserts a short time.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import machines
import pytest
from cases import quick, slow
from failures import ENVS
from hang_cases import CASES, Case
from machines import Unavailable, comes_true
from rank_programs import run_command
from staged_hangs import Launcher, ask_on_host

from _ringcomm import start as cli
from ringcomm.measure import job
from ringcomm.trace import layout
from ringcomm.version import __version__

LIMIT_S = 60
# Of the doctor with eight ranks, on a machine that is busy otherwise.
SLACK_S = 20


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with closing(Launcher()) as found:
        yield found


@pytest.fixture(scope="module")
def late_jobs(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """The folder and the pids of jobs whose waits are long, while other tests run."""
    jobs = {}
    with closing(Launcher()) as own:  # the other one ends all of its jobs at once
        for name, case, env in (
            *((name, "late", env) for name, env in ENVS.items()),
            ("silent", "late", {"RINGCOMM_LOG_WAITS": "0"}),
            ("stopped", "stopped", {}),
            ("in CI", "evaluates", {"CI": "true"}),
        ):
            folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
            jobs[name] = (folder, own.begin(case, folder, 3, env))
        yield jobs


def have_ended(pids: list[int]) -> bool:
    return all(job._stat(pid)[0] == "Z" for pid in pids)


def check(case: Case, report: dict[str, Any]) -> None:
    assert case.is_right(report), report
    assert 0 < report["took_s"] < SLACK_S


# Each kind of verdict; hang_cases.py has others of the same kinds.
QUICK = ("stopped", "skips", "other call", "dies", "circle", "loader", "slow")
NAMES = [name for name in CASES if name not in ("host gone", "late", "evaluates", "many calls")]


@pytest.mark.usefixtures("late_jobs")  # they begin with the first test of this file
@pytest.mark.parametrize("name", quick(NAMES, *QUICK))
def test_the_cause_is_named(launcher: Launcher, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    with launcher.job(name, tmp_path, settle_s=case.settle_s) as pids:
        states = [job._stat(pid)[0] for pid in pids]
        report = job.examine(pids[0])
        check(case, report)
        is_there = [pid for pid, state in zip(pids, states, strict=True) if state != "Z"]
        assert [row["pid"] for row in report["ranks"]] == is_there
        # Nothing was stopped, and nobody died of the question.
        after = [job._stat(pid)[0] for pid in pids]
        assert [state in "TZ" for state in after] == [state in "TZ" for state in states]


# Rank 2 is on the same host as rank 0, and rank 1 on another one.
@pytest.mark.parametrize("env", [env for env in ENVS if env != "shm"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        slow("stopped", ("rank 2 is the cause: its process", "stopped", "for it in all_reduce #1")),
        slow("computes", ("rank 2 is the cause: it has computed", "waits for it in all_reduce #1")),
        ("recv", ("rank 0 is the cause: it is in recv with tag 7", "rank 1 has no send")),
    ],
)
def test_the_peer_over_messages(
    launcher: Launcher, tmp_path: Path, env: str, name: str, words: tuple[str, ...]
) -> None:
    cause = 0 if name == "recv" else 2
    with launcher.job(name, tmp_path, 3, ENVS[env]) as pids:
        check(Case(CASES[name].body, cause, words), job.examine(pids[1]))


RINGS = {"shm": {"RINGCOMM_ALGORITHM": "ring"}}
RINGS["messages"] = {**RINGS["shm"], "RINGCOMM_TRANSPORT": "messages"}


def waits_in_a_ring(report: dict[str, Any], num_steps: int) -> dict[int, int] | None:
    """The steps of the ranks that wait, of all slices; None if not all are in the same ring."""
    calls = [row["call"] for row in report["ranks"]]
    if len({(call["seq"], call["state"]) for call in calls}) > 1:
        return None
    waits = {row["rank"]: row["call"] for row in report["ranks"] if row["state"] != "stopped"}
    if any(call["num_steps"] != num_steps for call in waits.values()):
        return None
    return {rank: (call["slice"] - 1) * num_steps + call["step"] for rank, call in waits.items()}


@pytest.mark.parametrize("transport", quick(RINGS, "shm"))
def test_the_step_of_each_rank_that_waits_in_a_ring(
    launcher: Launcher, tmp_path: Path, transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 2 is stopped anywhere, until that is inside a call."""
    dumped, num_steps = tmp_path / "dump", 6
    with launcher.job("many calls", tmp_path, 4, RINGS[transport]) as pids:
        deadline = time.monotonic() + LIMIT_S
        steps = None
        while steps is None:
            assert time.monotonic() < deadline
            os.kill(pids[2], signal.SIGCONT)
            time.sleep(0.1)
            os.kill(pids[2], signal.SIGSTOP)
            time.sleep(0.5)
            report = job.examine(pids[0], dumped)
            steps = waits_in_a_ring(report, num_steps)
        check(CASES["many calls"], report)
    rows = report["ranks"]
    assert [row["waits_for"] for row in rows][3] == 2
    # Rank 3 waits for what rank 2 has not sent, and rank 0 for what follows from that; or for room
    # at rank 1, for which rank 2 has no room: stopped after it has sent, before it makes room. A
    # link has room for two slices, the first of which a rank sends without one that it received.
    has_no_room = transport == "shm" and rows[0]["waits_for"] == 1
    assert steps[0] - steps[3] in ((0, 1) if has_no_room else (1,)), (steps, report)
    if transport == "shm":  # rank 1 waits for the same as rank 0, or for room at rank 2
        assert steps[0] - 1 - has_no_room <= steps[1] <= steps[3] + 2, (steps, report)
    else:  # rank 1 waits for what follows, or for rank 2 to take what it has sent
        last = min(steps[3] + 2, rows[1]["call"]["num_slices"] * num_steps)
        assert last - (rows[1]["waits_for"] == 2) <= steps[1] <= last, (steps, report)
        assert rows[3]["step"] == f"step {steps[3]}/{num_steps}"
    job.print_report(report)
    said = capsys.readouterr().out
    for row in (rows[0], rows[1], rows[3]):
        assert f"waits for rank {row['waits_for']} in {row['step']}\n" in said
    dump = pickle.loads((dumped / "rank3").read_bytes())
    kept = dump["processes"][0]["calls"][-1]
    assert (kept["step"], kept["num_steps"]) == (rows[3]["call"]["step"], num_steps)
    assert dump["entries"]


def test_a_host_that_is_gone(launcher: Launcher, tmp_path: Path) -> None:
    """The doctor runs where the processes of the other host cannot be seen."""
    try:
        with launcher.job("host gone", tmp_path, are_hosts=True):
            report = ask_on_host(tmp_path)
    except Unavailable as reason:
        pytest.skip(str(reason))
    check(CASES["host gone"], report)
    assert [row["rank"] for row in report["ranks"]] == [0, 1, 2, 3]


def test_the_command_reads_the_job_of_a_launcher(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with launcher.job("computes", tmp_path, 2):
        words = ["doctor", "--job", str(launcher.pid)]
        found = run_command(sys.executable, "-m", "ringcomm", *words, timeout_s=LIMIT_S)
        assert "rank 1 is the cause" in found.stdout
        assert "asked 2 ranks in " in found.stdout
        assert cli.run([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["cause"] == 1


@pytest.mark.slow
def test_two_jobs_of_one_parent_are_told_apart(launcher: Launcher, tmp_path: Path) -> None:
    """Their groups have the same names."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with (
        launcher.job("stopped", folders[0], 2) as first,
        launcher.job("computes", folders[1], 2) as second,
    ):
        for pids, words in ((first, "is stopped"), (second, "it has computed (")):
            report = job.examine(pids[0])
            assert [row["pid"] for row in report["ranks"]] == pids
            assert words in report["verdict"]
        with pytest.raises(job.JobError, match="has started 2 jobs: give the pid of a rank"):
            job.examine(launcher.pid)


# ---- what cannot be examined


def test_what_is_no_job_is_refused_in_one_line() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        with pytest.raises(job.JobError, match=r"neither process \d+ nor one that it has started"):
            job.examine(other.pid)
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(job.JobError, match="has ended meanwhile"):  # and nobody waited for it
            job.examine(other.pid)
        other.wait()
        for pid in (other.pid, 0, -1, 1 << 40):
            with pytest.raises(job.JobError, match=f"there is no process {pid}"):
                job.examine(pid)


def as_another_user(call: Callable[[], object], hidepid: str) -> str:
    """What a call raises in a process of user nobody, for whom /proc hides others' processes."""
    answers = machines.Answers()

    def become_nobody() -> None:
        try:
            if hidepid != "0":
                machines.enter_namespaces(machines.CLONE_NEWNS)
                machines.make_mounts_private()
                machines.mount("proc", "/proc", data=f"hidepid={hidepid}")
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            call()
        except BaseException as error:
            answers.say(f"{type(error).__name__}: {error}")

    pid = machines.run_in_child(LIMIT_S, become_nobody)
    (text,) = answers.read(1, LIMIT_S)
    os.waitpid(pid, 0)
    return str(text)


OF_ANOTHER_USER = "process {} belongs to another user: run this as that user, or as root"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_job_is_refused_in_one_line(launcher: Launcher, tmp_path: Path) -> None:
    """Also where /proc shows its processes, and no more (1), or hides them (2)."""
    with launcher.job("computes", tmp_path, 2) as pids:
        for pid, hidepid in product((pids[0], launcher.pid), "012"):
            said = as_another_user(partial(job.examine, pid), hidepid)
            if said.startswith("Unavailable"):
                pytest.skip(said)
            assert said == f"JobError: {OF_ANOTHER_USER.format(pid)}", hidepid


def test_a_process_of_root_is_refused_in_one_line() -> None:
    try:
        os.kill(1, 0)
    except PermissionError:
        with pytest.raises(job.JobError, match=OF_ANOTHER_USER.format(1)):
            job.examine(1)
    else:
        pytest.skip("the first process is this user's, or this user is root")


def test_a_job_that_ends_meanwhile(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launcher.job("computes", tmp_path, 2) as pids:
        sample = job._sample

        def kill_and_sample(ranks: list[job.Rank]) -> list[job.Rank]:
            for pid in pids:
                os.kill(pid, 9)
            assert comes_true(lambda: have_ended(pids), LIMIT_S)
            return sample(ranks)

        monkeypatch.setattr(job, "_sample", kill_and_sample)
        with pytest.raises(job.JobError, match=f"the job of process {pids[0]} has ended meanwhile"):
            job.examine(pids[0])


def test_a_recorder_of_another_version_is_refused(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = layout._HEADER.pack(layout._MAGIC, layout.NUM_BYTES, 7, 0, 0, 0, b"0.0.9", 0)
    data = header.ljust(layout.NUM_BYTES, b"\0")
    said = r"process 7 runs ringcomm 0\.0\.9, .*: run `ringcomm doctor` of that version"
    with pytest.raises(ValueError, match=said):
        layout.parse(lambda: data)
    version = __version__.encode()
    header = layout._HEADER.pack(b"RINGFLY2", layout.NUM_BYTES, 7, 0, 0, 0, version, 0)
    with pytest.raises(ValueError, match=r"whose recorder is RINGFLY2, and this reads RINGFLY3"):
        layout.parse(lambda: header.ljust(layout.NUM_BYTES, b"\0"))
    with pytest.raises(ValueError, match="no flight recorder"):
        layout.parse(lambda: b"something else")
    with launcher.job("computes", tmp_path, 2) as pids:
        monkeypatch.setattr(layout, "__version__", "9.9")
        for pid in (pids[1], launcher.pid):
            with pytest.raises(job.JobError, match=r"runs ringcomm .*, and this is 9\.9: run"):
                job.examine(pid)


# ---- the lines of ranks that wait


def lines_of(folder: Path) -> list[str]:
    said = (folder / "output").read_text().splitlines()
    return [line for line in said if line.startswith("ringcomm ")]


def wait_for_lines(folder: Path, num_lines: int) -> list[str]:
    assert comes_true(lambda: len(lines_of(folder)) >= num_lines, 2 * LIMIT_S), lines_of(folder)
    return lines_of(folder)


def test_a_rank_that_sleeps_outside_of_calls_is_said_once(late_jobs: dict[str, Any]) -> None:
    """By one rank; over shared memory and over messages.

    Lines of an idle server look like a hang: https://github.com/vllm-project/vllm/issues/46611
    """
    for folder, pids in (late_jobs[name] for name in (*ENVS, "silent")):
        # Then no more lines come.
        assert comes_true(partial(have_ended, pids), LIMIT_S), lines_of(folder)
    for name in ENVS:
        (line,) = lines_of(late_jobs[name][0])
        assert re.match(r"ringcomm rank 0/3: idle for \d\d s in ", line), line
        for words in (
            " in all_reduce #1 (4 MiB): rank 2 (pid ",
            "running, last call: ",
            "sleeps outside of calls",
            "ringcomm doctor --job",
        ):
            assert words in line, line
    assert not lines_of(late_jobs["silent"][0])


def test_a_long_wait_is_said_by_one_rank(late_jobs: dict[str, Any]) -> None:
    (line,) = wait_for_lines(late_jobs["stopped"][0], 1)[:1]
    assert line.startswith("ringcomm rank 0/3: all_reduce #1 (4 MiB) waits for rank 2 (pid "), line
    assert "stopped, last call: " in line, line
    assert re.search(r" for \d\d s; ", line), line


@pytest.mark.slow
def test_a_wait_of_a_minute_has_the_verdict_where_nobody_can_ask(late_jobs: dict[str, Any]) -> None:
    """Which rank hangs, and where, as https://github.com/pytorch/pytorch/issues/69563 asks for."""
    idle, verdict = wait_for_lines(late_jobs["in CI"][0], 2)
    assert re.match(r"ringcomm rank 0/3: idle for \d\d s in ", idle), idle
    assert verdict.startswith(
        "ringcomm doctor: rank 2 is the cause: it has slept outside any collective for "
    ), verdict
    assert "hang_cases.py:" in verdict, verdict
    assert "evaluate" in verdict, verdict
