"""Errors that ringcomm raises at run time.

Wrong arguments raise ValueError, TypeError or NotImplementedError before anything is written, and
leave the group usable.
"""

import inspect
import traceback
from collections.abc import Callable
from typing import Any

from torch.distributed import DistBackendError

# Called with the message of each error while it is made (ringcomm/trace/dumps.py).
on_error: Callable[[str], None] | None = None


class RingcommError(DistBackendError):
    """A collective failed. Further calls of the group raise the same error.

    Tensors that the call only reads are unchanged. A tensor that it changes in place may hold any
    mixture of old, partial and final values, and outputs any values. Nothing else is written.

    Attributes:
        rank: the rank at fault in the group's numbering, -1 when unknown.
        host: the name of its host, "" when unknown.
        pid: its process id, -1 when unknown.
        op: the collective, such as "all_reduce", "" when unknown.
        seq: the collective's number in its group, -1 when unknown.
    """

    def __init__(
        self,
        message: str,
        rank: int = -1,
        host: str = "",
        pid: int = -1,
        op: str = "",
        seq: int = -1,
    ) -> None:
        super().__init__(message)
        self.rank, self.host, self.pid = rank, host, pid
        self.op, self.seq = op, seq
        if on_error is not None:
            on_error(message)


class PeerDiedError(RingcommError):
    """A rank's process ended, or left the group, while other ranks waited for it."""


class MismatchError(RingcommError):
    """Ranks called different collectives, or made the group with different options or sizes.

    Over shared memory no tensor has been written. Over messages one that the call changes may have.
    The message names the method of ringcomm that this rank is in.
    """

    def __init__(self, message: str, *about: Any) -> None:
        super().__init__(message + _method_running(), *about)


def _method_running() -> str:
    """The outermost public method of ringcomm in this thread, in words."""
    found = ""
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith("ringcomm.") and not name.startswith("_"):
            found = f"; this rank is in {name}()"
    return found


class CollectiveTimeoutError(RingcommError, TimeoutError):
    """A rank did not arrive within the group's timeout."""
