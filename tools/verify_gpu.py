"""The one command for a machine with a GPU: builds, tests and measures, and keeps what it found.

Usage: python tools/verify_gpu.py [--list] [--from NAME | --only NAME,...] [--budget-s S]
           [--out FOLDER]

Entries (tools/gpu_entries.py, a row each of docs/gpu-verification.md) run one after the other in
the order of what a minute tells, each within its own limit and what is left of the budget, which
is that of a machine whose commands end after ten minutes: the last line is the command that goes
on where this one ended. The active Python and its torch are used. The folder, $OUT by default,
gets as they come: verify.log, records.jsonl, plots, and summary.json, which is whole after each
entry, so that a run that is cut short keeps what it has. The status is 1 when an entry failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from gpu_entries import ENTRIES, Entry
from gpu_facts import load_mps

ROOT = Path(__file__).resolve().parent.parent
BUDGET_S = 540.0
# Of an entry's limit: with less it is left to the next command.
MIN_SHARE = 0.5
# For a program to end what it has started, MPS too.
END_S = 50.0
TAIL_LINES = 12
QUERY_TIMEOUT_S = 60.0


def say(log: TextIO, text: str) -> None:
    """To the terminal and to the log."""
    print(text, flush=True)
    log.write(text + "\n")
    log.flush()


def output_of(command: list[str]) -> str:
    """What a command prints; nothing where it fails."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=QUERY_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """Commit, GPUs, driver and versions, asked of processes of their own."""
    versions = (
        "import torch, json; v = torch.cuda.nccl.version() if torch.cuda.is_available() else ();"
        "print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda,"
        "'nccl': '.'.join(map(str, v))}))"
    )
    query = "--query-gpu=name,driver_version,memory.total"
    gpus = output_of(["nvidia-smi", query, "--format=csv,noheader"])
    triton = importlib.util.find_spec("triton") is not None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": output_of(["git", "rev-parse", "HEAD"]) or None,
        "dirty": bool(output_of(["git", "status", "--porcelain"])),
        "gpus": gpus.splitlines(),
        "python": platform.python_version(),
        "triton": importlib.metadata.version("triton") if triton else None,
        **json.loads(output_of([sys.executable, "-c", versions]) or "{}"),
    }


@functools.cache
def own_archs() -> str:
    """The architectures of the GPUs here, as RINGCOMM_CUDA_ARCHS has them: kernels for no other."""
    said = output_of(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    found = {line.strip().replace(".", "") for line in said.splitlines()}
    return " ".join(sorted(filter(str.isdigit, found), key=int))


def why_not(entry: Entry, num_gpus: int) -> str | None:
    """The need of an entry that this machine does not meet, or None."""
    if num_gpus == 0:
        return "no GPU here"
    for need in entry.needs:
        if need == "mps":
            mps = load_mps()
            if mps.find_control() is None:
                return f"MPS is missing: there is no {mps.CONTROL}"
        elif need == "gpus":
            if num_gpus < 2:
                return "one GPU here"
        elif importlib.util.find_spec(need) is None:
            return f"{need} is not installed"
    return None


def command_of(
    entry: Entry, out: Path, nccl: Path | None, num_gpus: int, limit_s: float
) -> list[str]:
    """The command, of this Python but for make; with a limit where it has one for what it runs."""
    library = f"--nccl-library {shlex.quote(str(nccl))}" if nccl else ""
    words = entry.words(shlex.quote(str(out)), library)
    option = "--world-size"
    if option in words and words[words.index(option) + 1] == "0":
        words[words.index(option) + 1] = str(num_gpus)
    if words[0] == "tools/gpu_layouts.py":
        num_layouts = len(words[words.index("--only") + 1].split(","))
        words[1:1] = ["--limit-s", f"{max(1.0, (limit_s - END_S) / num_layouts):.0f}"]
    return words if words[0] == "make" else [sys.executable, *words]


def run(command: list[str], limit_s: float, log: TextIO) -> tuple[int | None, str]:
    """Runs a command, stopped with all it has started at the limit; its status and last lines.

    What it writes goes to the log at once.
    """
    env = {
        **os.environ,
        "RINGCOMM_USE_ENV": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHON": sys.executable,
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "RINGCOMM_CUDA_ARCHS": os.environ.get("RINGCOMM_CUDA_ARCHS") or own_archs(),
    }
    begin = os.path.getsize(log.name)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    status = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(limit_s)
        if status is None:
            # Programs that have started MPS end it before they end.
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    log.seek(0, os.SEEK_END)
    text = Path(log.name).read_bytes()[begin:].decode(errors="replace")
    return status, "\n".join(text.strip().splitlines()[-TAIL_LINES:])


def run_entry(
    entry: Entry, options: argparse.Namespace, num_gpus: int, left_s: float, log: TextIO
) -> dict[str, Any]:
    """Runs an entry's command; what is kept of it."""
    limit_s = min(entry.limit_s, left_s)
    command = command_of(entry, options.out, options.nccl_library, num_gpus, limit_s)
    say(log, f"\n== {entry.name}: {shlex.join(command)}")
    begin = time.monotonic()
    code, tail = run(command, limit_s, log)
    return {
        "status": "stopped" if code is None else "passed" if code == 0 else "failed",
        "code": code,
        "seconds": round(time.monotonic() - begin, 1),
        "limit_s": round(limit_s),
        "command": shlex.join(command),
        "tail": tail,
    }


def verify(entries: Iterable[Entry], options: argparse.Namespace, log: TextIO) -> dict[str, Any]:
    """Runs entries in turn; the summary, which is on disk after each.

    Its "next" is the entry with which another command goes on: the first that had no time left, or
    less than its limit and was stopped, unless it was the first one; None where all are done.
    """
    facts = machine()
    num_gpus = len(facts["gpus"])
    summary: dict[str, Any] = {**facts, "budget_s": options.budget_s, "next": None, "entries": {}}
    deadline = time.monotonic() + options.budget_s
    say(log, json.dumps(facts))
    num_run = 0
    for entry in entries:
        left_s = deadline - time.monotonic()
        reason = entry.not_scripted or why_not(entry, num_gpus)
        # The first of a command is never too late, whatever the build has left of it.
        is_late = summary["next"] is not None or (
            num_run > 0 and left_s < MIN_SHARE * entry.limit_s
        )
        if reason is not None or is_late:
            status = "not scripted" if entry.not_scripted else "not run"
            found: dict[str, Any] = {"status": status, "why": reason or "the budget is spent"}
        else:
            found = run_entry(entry, options, num_gpus, left_s, log)
            is_late = found["status"] == "stopped" and left_s < entry.limit_s and num_run > 0
            num_run += entry.name != "build"
        if reason is None and is_late:
            summary["next"] = summary["next"] or entry.name
        summary["entries"][entry.name] = found
        say(log, f"{entry.name}: {found['status']} {found.get('seconds', found.get('why'))}")
        draft = options.out / "summary.tmp"
        draft.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        draft.replace(options.out / "summary.json")
        if entry.name == "build" and found["status"] in ("failed", "stopped"):
            say(log, found["tail"])
            break
    return summary


def chosen_of(options: argparse.Namespace) -> list[Entry]:
    """The entries that are asked for; those from one on have the build before them."""
    names = [entry.name for entry in ENTRIES]
    if options.only is not None:
        return [entry for entry in ENTRIES if entry.name in options.only]
    begin = names.index(options.begin)
    before = [entry for entry in ENTRIES[:begin] if entry.name == "build"]
    return [*before, *ENTRIES[begin:]]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ends the process with a message when it makes no sense."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    names = [entry.name for entry in ENTRIES]
    default = Path(os.environ.get("OUT") or ROOT / "build" / "gpu-verification")
    add("--list", action="store_true", help="print the entries, and run nothing")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--from",
        dest="begin",
        default=names[0],
        choices=names,
        metavar="NAME",
        help="build, then go on with this entry of --list",
    )
    which.add_argument("--only", metavar="NAME,...", help="these entries alone")
    add("--budget-s", type=float, default=BUDGET_S, help="of all entries")
    add("--out", type=Path, default=default, metavar="FOLDER", help="for results")
    add("--nccl-library", type=Path, metavar="FILE", help="a libnccl.so.2 of 2.30 or newer")
    options = parser.parse_args(argv)
    options.only = options.only.split(",") if options.only is not None else None
    unknown = set(options.only or ()) - set(names)
    if unknown:
        parser.error(f"--only: there is no entry {', '.join(sorted(unknown))}")
    return options


def main(argv: list[str]) -> int:
    """Runs what is asked for; returns the exit code."""
    options = parse(argv)
    chosen = chosen_of(options)
    if options.list:
        for entry in chosen:
            what = f"python {entry.command}" if entry.command else f"({entry.not_scripted})"
            print(f"{entry.name:<22} {entry.limit_s:4.0f} s  {what.replace('python make', 'make')}")
        return 0
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "verify.log").open("w", encoding="utf-8") as log:
        summary = verify(chosen, options, log)
        statuses = [found["status"] for found in summary["entries"].values()]
        counts = ", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses))
        say(log, f"\n{counts}; results: {options.out}")
        if not summary["gpus"]:
            say(log, "no GPU here: nothing ran")
        if summary["next"] is not None:
            again = f"--from {summary['next']}" if options.only is None else "--only ..."
            say(log, f"go on with: python tools/verify_gpu.py {again}")
    return int(any(status in ("failed", "stopped") for status in statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
