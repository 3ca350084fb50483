"""`ringcomm trace`: runs a program whose ranks record themselves, and merges the recordings."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ringcomm.measure.ranks import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from ringcomm.measure.screen import counted
from ringcomm.trace import dumps, torch_dumps
from ringcomm.trace.merge import merge


def run_recorded(command: Sequence[str], num_events: int, output: Path) -> int:
    """Runs a command and writes the trace of its ranks; returns its exit status.

    Blocks until the command has ended. Ctrl-C ends it; what was recorded until then is written.
    """
    with tempfile.TemporaryDirectory(prefix="ringcomm-trace-") as folder:
        wanted = {"RINGCOMM_TRACE": folder, "RINGCOMM_TRACE_EVENTS": str(num_events)}
        try:
            process = subprocess.Popen(command, env=os.environ | wanted)
        except OSError as error:
            print(f"ringcomm trace: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
            return EXIT_BAD_INPUT
        try:
            status = process.wait()
        except KeyboardInterrupt:  # which the command has also received from the terminal
            for grace_s, number in ((1.0, signal.SIGTERM), (10.0, signal.SIGKILL)):
                try:
                    process.wait(grace_s)
                except subprocess.TimeoutExpired:
                    process.send_signal(number)
            process.wait()
            status = EXIT_INTERRUPTED
        merged = merge_folders([Path(folder)], output, time.monotonic_ns())
    return merged if status == EXIT_OK else status if status > 0 else 128 - status


def merge_folders(folders: Sequence[Path], output: Path, now_ns: int = 0) -> int:
    """Writes the trace of recordings and a summary on stderr; returns the exit status."""
    try:
        summary = merge(folders, output, now_ns)
    except ValueError as error:
        print(f"ringcomm trace: {error}", file=sys.stderr)
        return EXIT_FAILED
    about = f"{counted(summary.num_ranks, 'rank')}, {summary.num_events} events"
    for line in (*summary.notes, f"{output}: {about}; open it in https://ui.perfetto.dev"):
        print(f"ringcomm trace: {line}", file=sys.stderr)
    return EXIT_OK


def convert_dumps(folders: Sequence[Path], output: Path) -> int:
    """Writes the dumps in some folders to another one, for torch's analyser; the exit status."""
    try:
        found = dumps.read(folders)
        if not found:
            raise ValueError(f"no dump of a flight recorder is in {', '.join(map(str, folders))}")
        note = torch_dumps.write(output, found)
    except ValueError as error:
        print(f"ringcomm trace: {error}", file=sys.stderr)
        return EXIT_FAILED
    about = f"{output}: {counted(len(found), 'rank')}; run torchfrtrace {output}"
    for line in filter(None, (note, about)):
        print(f"ringcomm trace: {line}", file=sys.stderr)
    return EXIT_OK
