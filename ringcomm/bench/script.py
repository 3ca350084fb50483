"""How a measuring program ends: errors become one message, Ctrl-C none."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from ringcomm.bench.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED
from ringcomm.bench.ranks import RankError


def run_main(name: str, main: Callable[[list[str]], int]) -> int:
    """``main(argv)``'s exit code: what a user can mend becomes one message, Ctrl-C ends quietly."""

    def interrupt(_signum: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    try:
        # Also where a shell started this in the background, and so with SIGINT ignored.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        return main(sys.argv[1:])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (RankError, OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_FAILED
