"""A rank that mpiexec starts for deaths.py: it calls until a rank has died. Without torch.

python deaths_mpi.py FILE: a table of float64 with a row for each rank, the columns of deaths.py.
"""

import os
import sys
import time

import numpy as np

PID, CALL, RAISED = 0, 1, 2


def main(path: str) -> None:
    """Calls Allreduce until it raises, and then stays, so that only mpiexec ends this process."""
    from mpi4py import MPI  # which starts MPI, so not in deaths.py

    world = MPI.COMM_WORLD  # mpi4py makes its errors exceptions
    board = np.memmap(path, np.float64, "r+").reshape(world.size, -1)
    row = board[world.rank]
    given, total = np.ones(1 << 18, np.float32), np.empty(1 << 18, np.float32)
    world.Barrier()
    row[PID] = os.getpid()
    try:
        while True:
            row[CALL] = time.monotonic()
            world.Allreduce(given, total)
    except MPI.Exception:
        row[RAISED] = time.monotonic()
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
