"""MPI as a peer: ranks that mpiexec has started, and mpi4py's communicator in place of a group.

    mpiexec -n 2 python -m ringcomm bench all_reduce --peers gloo,mpi4py

The buffers are the tensors' own memory, and calls go to mpi4py's buffer interface, which adds about
as much to a call as c10d does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

__all__ = ["MPI", "Communicator", "started_world_size"]

MPI = "mpi4py"  # its name among the backends; "mpi" is c10d's own

# What launchers tell their processes: MPICH's and Intel's, Open MPI's.
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def started_world_size() -> int | None:
    """How many ranks mpiexec has started, this process among them, or None."""
    sizes = (os.environ.get(name) for name in _SIZE_VARIABLES)
    return next((int(size) for size in sizes if size), None)


class Communicator:
    """All ranks that mpiexec has started. Raises ImportError where mpi4py is not installed."""

    def __init__(self) -> None:
        from mpi4py import MPI as library  # noqa: N811 - it starts MPI, so not before it is wanted

        world = library.COMM_WORLD
        self.rank: int = world.rank
        self.size: int = world.size
        self.broadcast: Callable[[Any], Any] = world.bcast
        self.barrier: Callable[[], None] = world.Barrier
        self.all_reduce: Callable[[Any, Any], None] = world.Allreduce
        self.in_place: Any = library.IN_PLACE
        # Some end theirs with a line and a zero.
        self.version: str = library.Get_library_version().partition("\n")[0].strip(" \0")
