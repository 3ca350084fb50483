"""Errors that ringcomm raises at run time.

Wrong arguments raise ValueError, TypeError or NotImplementedError and leave the group usable.
"""

from torch.distributed import DistBackendError


class RingcommError(DistBackendError):
    """A collective failed. Further calls of the group raise the same error.

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


class PeerDiedError(RingcommError):
    """A rank's process ended, or left the group, while other ranks waited for it."""


class MismatchError(RingcommError):
    """Ranks called different collectives, or made the group with different options or sizes."""


class CollectiveTimeoutError(RingcommError, TimeoutError):
    """A rank did not arrive within the group's timeout."""
