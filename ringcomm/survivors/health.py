"""What a rank knows of the other ranks of a group."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from ringcomm import _C
from ringcomm.backend import resolve_group
from ringcomm.torch_names import backend_of


@dataclass(frozen=True)
class Health:
    """What this rank knows of a group.

    Attributes:
        ranks: for each rank of the group "alive", "dead" (its process has ended), "left" (it has
            destroyed the group) or "stopped" (by SIGSTOP or a debugger).
        failure: why the group has failed, or None. A group that has failed serves no further call.
    """

    ranks: tuple[Literal["alive", "dead", "left", "stopped"], ...]
    failure: str | None


def health(group: dist.ProcessGroup | None = None) -> Health:
    """Returns what this rank knows of the group's ranks. Not collective, exchanges nothing.

    The answer is local and may be late: a death is usually known within a millisecond. Of ranks on
    other machines it knows nothing before a call has failed, and reports them as alive. A rank that
    hangs in its own code is alive.

    Args:
        group: the group; None is the default group.

    Raises:
        ValueError: the group has another backend for CPU tensors, was destroyed, or this rank is
            not in it.
    """
    known = _C.health(backend_of(resolve_group(group), torch.device("cpu")))
    return Health(tuple(known["ranks"]), known["failure"])
