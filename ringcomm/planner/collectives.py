"""`ringcomm plan --collectives`: the model's times of collectives on CPUs, as tables."""

from ringcomm.cost_model import KIB, MIB, OPERATIONS, Machine
from ringcomm.screen import byte_count, columns, counted, in_seconds
from ringcomm.tuning import Tuning

SIZES = (KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
# Two sockets of 64 cores: ranks and the threads of each.
SOCKETS = Machine(128, 2)
SHAPES = ((2, 64), (128, 1))


def tables(tuning: Tuning | None) -> str:
    """Of the tuned machine with 2 to 32 ranks, or else of two cores; and of two sockets.

    The sockets have the costs of the tuned cores, and defaults where a cost is not measured.
    """
    machine = tuning.host if tuning else Machine(2)
    name = str(tuning.machine["cpu"]) if tuning else "defaults"
    defaults = ", ".join(machine.costs.defaults)
    sockets = Machine(SOCKETS.cores, SOCKETS.nodes, machine.costs)
    parts = [_table(machine, world_size, 1) for world_size in (2, 8, 32)]
    parts += [_table(sockets, *shape) for shape in SHAPES]
    return "\n\n".join(
        (
            f"costs of one core: {name}; not measured, but defaults: {defaults}",
            *parts,
            "Computed. Bytes of the larger buffer of a rank, which has them in ordinary tensors.",
        )
    )


def _table(machine: Machine, world_size: int, threads: int) -> str:
    rows = [["bytes", *OPERATIONS]]
    for size in SIZES:
        times = (machine.microseconds(op, size, world_size, threads) for op in OPERATIONS)
        rows.append([byte_count(size), *(in_seconds(time * 1e-6) for time in times)])
    cores = counted(machine.cores, "core")
    where = f"{machine.nodes} sockets with {cores}" if machine.nodes > 1 else cores
    head = f"{world_size} ranks of {counted(threads, 'thread')} on {where}"
    return f"{head}\n{columns(rows, '')}"
