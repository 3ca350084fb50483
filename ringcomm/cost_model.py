"""The time of a collective in shared memory, by bytes, ranks, threads, cores and NUMA nodes.

    time = calls and rounds of the ranks of a core
         + the largest of: copies and sums of a core, memory of a node, bytes between nodes

It counts what csrc/transport/shm does for ordinary tensors: docs/design/collectives.md has the
table. `ringcomm tune` fits the costs of a machine. This module imports the standard library only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

KIB, MIB = 1 << 10, 1 << 20
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_PHASE_BYTES = MIB  # of a rank's region of a board
_MIN_CALL_BYTES, _MIN_PART_BYTES = 256 * KIB, 64 * KIB  # csrc/host/workers: a call, a thread's part


@dataclass(frozen=True)
class Costs:
    """What a machine takes. The defaults are those of no machine: `ringcomm tune` measures."""

    call_us: float = 3.0  # per call
    round_us: float = 0.3  # per publish and wait
    peer_us: float = 0.05  # and for each peer, whose cursor is read
    switch_us: float = 5.0  # per round, for each further rank of a core
    copy_us: float = 70.0  # per MiB that one core copies in its cache
    sum_us: float = 30.0  # per MiB of sources that one core sums
    memory_us: float = 50.0  # more, per MiB of a tensor that is not in the cache
    cache_bytes: int = 1 << 20  # of a core: tensors up to that are in it
    join_us: float = 0.8  # per step that several threads share
    node_gb_per_s: float = 150.0  # of a node's memory
    between_gb_per_s: float = 60.0  # into a node from the others
    defaults: tuple[str, ...] = field(default=())  # costs that `ringcomm tune` could not measure


FITTED = ("call_us", "round_us", "peer_us", "switch_us", "copy_us", "sum_us", "memory_us")
UNTUNED = Costs(defaults=(*FITTED, "cache_bytes", "join_us", "node_gb_per_s", "between_gb_per_s"))


def all_reduce_algorithm(num_bytes: float, world_size: int) -> str:
    """As choose_all_reduce in csrc/transport/shm/all_reduce.cc, for ordinary tensors, untuned."""
    few = 256 * KIB if world_size <= 2 else min(48 * KIB, 256 * KIB // world_size)
    return "one_shot" if num_bytes <= few else "two_shot"


@dataclass(frozen=True)
class Work:
    """What one rank does in a call. Bytes are those of sources; a step is one copy or sum."""

    num_rounds: int
    copies: tuple[tuple[int, float], ...]  # number of steps, bytes of each
    sums: tuple[tuple[int, float], ...]  # bytes of the result of each
    num_sources: int  # of a sum
    tensor_bytes: float  # of the input and the output, each byte once
    moved_bytes: float  # read from them and written to them
    from_peers: float  # bytes that are read from the boards of other ranks


def work_of(op: str, num_bytes: float, world_size: int) -> Work:
    """Of the busiest rank. Raises ValueError for an unknown operation.

    ``op`` is one of OPERATIONS, or all_reduce's algorithm. ``num_bytes`` are those of the larger
    buffer of a rank.
    """
    n, size, peers = world_size, float(num_bytes), world_size - 1
    part = size / n
    if op == "all_reduce":
        op = all_reduce_algorithm(num_bytes, world_size)

    def pieces(staged: float, most: int = _PHASE_BYTES) -> int:
        return max(1, ceil(staged / most))

    if op == "one_shot":
        p = pieces(size)
        steps: tuple[int, list[tuple[int, float]], list[tuple[int, float]]]
        steps = p, [(p, size / p)], [(p, size / p)]
        return _work(steps, n, size, 2 * size, peers * size)
    if op == "two_shot":
        p = pieces(size)
        copies = [(p * (2 * peers + 1), part / p)]
        return _work((2 * p, copies, [(p, part / p)]), n, size, 2 * size, 2 * peers * part)
    if op == "all_gather":
        p = pieces(part)
        copies = [(p * (n + 1), part / p)]
        return _work((p, copies, []), n, size + part, size + part, peers * part)
    if op == "reduce_scatter":
        p = pieces(peers * part)
        copies = [(p * peers, part / p)]
        return _work((p, copies, [(p, part / p)]), n, size + part, size + part, peers * part)
    if op == "all_to_all":
        p = pieces(peers * part)
        return _work((p, [(p * (n + peers), part / p)], []), n, 2 * size, 2 * size, peers * part)
    if op == "broadcast":
        p = pieces(size, _PHASE_BYTES // 2)  # the root stages one while the others copy another
        return _work((p, [(p, size / p)], []), n, size, size, size)
    known = ", ".join((*OPERATIONS, "one_shot", "two_shot"))
    raise ValueError(f"the operation must be one of {known}, got {op!r}")


def _work(
    steps: tuple[int, list[tuple[int, float]], list[tuple[int, float]]],
    num_sources: int,
    tensor_bytes: float,
    moved_bytes: float,
    from_peers: float,
) -> Work:
    num_rounds, copies, sums = steps
    amounts = (num_sources, tensor_bytes, moved_bytes, from_peers)
    return Work(num_rounds, tuple(copies), tuple(sums), *amounts)


@dataclass(frozen=True)
class Machine:
    """Cores and nodes of a host, and what they take. Ranks are spread evenly over both."""

    cores: int
    nodes: int = 1
    costs: Costs = UNTUNED

    def __post_init__(self) -> None:
        if self.cores < 1 or self.nodes < 1:
            raise ValueError(f"cores and nodes must be positive, got {self.cores}, {self.nodes}")

    def microseconds(self, op: str, num_bytes: float, world_size: int, threads: int = 1) -> float:
        """A call of all ranks, that begin it together; 0 for one rank."""
        return sum(self.parts(op, num_bytes, world_size, threads).values())

    def parts(self, op: str, num_bytes: float, world_size: int, threads: int) -> dict[str, float]:
        """Microseconds of the rounds, and of what bounds the bytes, by its name."""
        if world_size < 2:
            return {}
        work, costs = work_of(op, num_bytes, world_size), self.costs
        # Those whose ranks are more than cores take turns, at each round.
        turns = max(1.0, world_size / self.cores)
        each = costs.round_us + costs.peer_us * (world_size - 1)
        waits = turns * (costs.call_us + work.num_rounds * each)
        waits += work.num_rounds * costs.switch_us * (turns - 1)
        bounds = dict(self._bounds(work, world_size, threads))
        name = max(bounds, key=bounds.__getitem__)
        return {"rounds": waits, name: bounds[name]}

    def _bounds(self, work: Work, world_size: int, threads: int) -> Iterator[tuple[str, float]]:
        costs = self.costs
        copied = sum(num * size for num, size in work.copies)
        is_split = threads > 1 and work.moved_bytes + copied >= _MIN_CALL_BYTES
        cores = threads if is_split else 1
        alone = joined = 0.0
        rates = ((work.copies, costs.copy_us), (work.sums, costs.sum_us * work.num_sources))
        for steps, us_per_mib in rates:
            for num, size in steps:
                used = max(1, min(cores, int(size) // _MIN_PART_BYTES))
                alone += num * size / MIB * us_per_mib
                joined += num * (size / MIB * us_per_mib / used + costs.join_us * (used > 1))
        cached = costs.cache_bytes * cores / max(1.0, world_size * cores / self.cores)
        far = work.moved_bytes / MIB * max(0.0, 1 - cached / max(1.0, work.tensor_bytes))
        far_us = far * costs.memory_us
        # Where there are fewer cores than threads, each core has its part of all ranks' work.
        shared = world_size / self.cores * (alone + far_us)
        yield "cores", max(joined + far_us / cores, shared)
        ranks_of_node = world_size / min(self.nodes, world_size)
        yield "memory", ranks_of_node * far * MIB / costs.node_gb_per_s / 1e3
        if self.nodes > 1:
            away = (world_size - ranks_of_node) / (world_size - 1)
            read = ranks_of_node * work.from_peers * away
            yield "between nodes", read / costs.between_gb_per_s / 1e3
