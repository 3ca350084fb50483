"""How a program of ringcomm ends: its exit status, and an error in one line."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_WRONG_RESULTS = 3
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141  # as of a program that SIGPIPE ends


WRONG = "wrong elements"  # in the text of a RankError for a backend's wrong result


class RankError(RuntimeError):
    """A rank that measures failed; the text has its traceback or the signal that ended it."""


def in_words(error: Exception) -> str:
    """The text of an error; of a file's, its name and the reason without the number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def run_main(name: str, main: Callable[[list[str]], int]) -> int:
    """Returns ``main(argv)``'s exit code; user errors and Ctrl-C become one line on stderr."""

    def interrupt(_signum: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    for opened in range(3):  # a closed one would be the number of the next file
        with contextlib.suppress(OSError):
            os.fstat(opened)
            continue
        os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # a terminal without × and µs gets question marks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        # Also if a shell started this in the background, which ignores SIGINT.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        try:
            return main(sys.argv[1:])
        finally:
            _flush_output()  # here, where a failure is handled
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        return EXIT_PIPE_CLOSED
    except (OSError, ValueError, RankError, subprocess.SubprocessError) as error:
        print(f"{name}: {in_words(error)}", file=sys.stderr)
        return EXIT_WRONG_RESULTS if WRONG in str(error) else EXIT_FAILED


def _flush_output() -> None:
    try:
        sys.stdout.flush()
    except OSError:  # a closed pipe, a full disk: Python would try again at its end, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
