"""`ringcomm doctor --job PID --dump FOLDER`: dumps of a job's flight recorders, from outside.

The ranks do nothing for it: they may be stopped, or blocked with Python's lock.
"""

import contextlib
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ringcomm.measure.job import JobError, Rank
from ringcomm.trace import dumps, flight, torch_dumps


def writer(folder: Path | None, form: str) -> Callable[[list[Rank]], None] | None:
    """What job.examine() calls with the ranks; None if no folder is given."""
    return None if folder is None else partial(_write, folder, form)


def _write(folder: Path, form: str, ranks: list[Rank]) -> None:
    """Writes the dumps of the ranks of a job to FOLDER/rank0.json and so on.

    Records of ranks that have ended are in them where the system lets this process read the memory
    of the others, as it lets root.

    Args:
        folder: made if need be.
        form: "json", or "torch" for FOLDER/rank0 and so on, which torchfrtrace reads.
        ranks: as the doctor has found them.

    Raises:
        JobError: the folder has other files that torchfrtrace would read.
        OSError: a file cannot be written.
    """
    with contextlib.ExitStack() as stack:
        target = folder
        if form == "torch":
            target = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ringcomm-")))
        for rank in ranks:
            peers: list[flight.Record] = []
            with contextlib.suppress(OSError):
                _, peers = flight.mapped_records(rank.pid)
            stacks = {"MainThread": rank.stack}
            dumps.write(f"{target}/rank", rank.record, peers, "ringcomm doctor", stacks)
        if form == "torch":
            try:
                torch_dumps.write(folder, dumps.read([target]))
            except ValueError as error:
                raise JobError(str(error)) from None
