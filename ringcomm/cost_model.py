"""The time of a collective in shared memory, by bytes, ranks, threads, cores and NUMA nodes.

    time = calls and rounds of the ranks of a core
         + the largest of: copies and sums of a core, memory of a node, bytes between nodes

It counts what csrc/transport/shm does for ordinary tensors: docs/design/collectives.md has the
table. `ringcomm tune` fits the costs of a machine. This module imports the standard library only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil

KIB, MIB = 1 << 10, 1 << 20
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_PHASE_BYTES = MIB  # of a rank's region of a board
_MIN_CALL_BYTES, _MIN_PART_BYTES = 256 * KIB, 64 * KIB  # csrc/host/workers: a call, a thread's part
# Ranks whose code of a call stays in a core's own cache while they take turns on it: 4 of some
# 250 KiB in 1 MiB (docs/decisions.md).
_RESIDENT_RANKS = 4


@dataclass(frozen=True)
class Costs:
    """What a machine takes. The defaults are roughly those of a core of 2025."""

    call_us: float = 3.0  # per call
    cold_us: float = 15.0  # more, for each rank of a core beyond the first 4
    round_us: float = 0.3  # per publish and wait
    peer_us: float = 0.05  # and for each peer, whose cursor is read
    switch_us: float = 5.0  # per round, for each further rank of a core
    copy_us: float = 20.0  # per MiB that one core copies
    sum_us: float = 10.0  # per MiB of sources that one core sums
    shared_us: float = 20.0  # per MiB copied or summed, for each further rank of a core
    memory_us: float = 25.0  # more, per MiB of a tensor that is not in the node's cache
    cache_bytes: int = 24 << 20  # of a node: tensors and boards of its ranks up to that are in it
    join_us: float = 0.8  # per step that several threads share
    node_gb_per_s: float = 150.0  # of a node's memory
    between_gb_per_s: float = 60.0  # into a node from the others
    defaults: tuple[str, ...] = field(default=())  # costs that `ringcomm tune` could not measure


FITTED = (
    *("call_us", "cold_us", "round_us", "peer_us", "switch_us"),
    *("copy_us", "sum_us", "shared_us", "memory_us"),
)
NOT_FITTED = ("join_us", "node_gb_per_s", "between_gb_per_s")
UNTUNED = Costs(defaults=(*FITTED, "cache_bytes", *NOT_FITTED))


def all_reduce_algorithm(num_bytes: float, world_size: int, most: int | None = None) -> str:
    """As a group begins (csrc/transport/shm/all_reduce.cc), for ordinary tensors.

    ``most`` is a tuned limit of one_shot in bytes.
    """
    if most is None:
        most = 256 * KIB if world_size <= 2 else min(48 * KIB, 256 * KIB // world_size)
    return "one_shot" if num_bytes <= most else "two_shot"


@dataclass(frozen=True)
class Work:
    """What one rank does in a call. A step is what a rank copies or sums between two waits."""

    num_rounds: int
    copies: tuple[tuple[float, float], ...]  # number of steps, bytes of each
    sums: tuple[tuple[float, float], ...]  # bytes of the result of each
    num_sources: int  # of a sum
    tensor_bytes: float  # of the input and the output, each byte once
    moved_bytes: float  # read from them and written to them
    board_bytes: float  # of its own board, in this call and the next
    from_peers: float  # bytes that are read from the boards of other ranks
    has_one_source: bool = False  # all are read from the same rank


def work_of(
    op: str, num_bytes: float, world_size: int, one_shot_max_bytes: int | None = None
) -> Work:
    """Of the busiest rank. Raises ValueError for an unknown operation.

    ``op`` is one of OPERATIONS, or all_reduce's algorithm, which else depends on the tuned limit of
    one_shot. ``num_bytes`` are those of the larger buffer of a rank.
    """
    n, size, peers = world_size, float(num_bytes), world_size - 1
    part = size / n
    if op == "all_reduce":
        op = all_reduce_algorithm(num_bytes, world_size, one_shot_max_bytes)

    def pieces(staged: float, most: int = _PHASE_BYTES) -> int:
        return max(1, ceil(staged / most))

    def board(staged: float) -> float:
        """Phases alternate between its two regions."""
        return min(2 * staged, 2 * _PHASE_BYTES)

    if op == "one_shot":
        p = pieces(size)
        step = size / p
        amounts = (size, 3 * size, board(size), peers * size)
        return Work(p, ((p, step),), ((p, step),), n, *amounts)
    if op == "two_shot":
        p = pieces(size)
        step = part / p
        # A phase of inputs, one of results: each has a region. The sum writes the result twice.
        amounts = (size, 2 * size, min(size, _PHASE_BYTES), 2 * peers * part)
        return Work(2 * p, ((2 * p, peers * step),), ((p, step),), n, *amounts)
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        num_staged = 1 if op == "all_gather" else peers
        p = pieces(num_staged * part)
        step = part / p
        used = 2 * size if op == "all_to_all" else size + part
        amounts = (used, used, board(num_staged * part), peers * part)
        staged, result = (p, num_staged * step), (p, n * step)
        if op == "reduce_scatter":
            return Work(p, (staged,), ((p, step),), n, *amounts)
        return Work(p, (staged, result), (), n, *amounts)
    if op == "broadcast":
        # The root stages a piece while the others copy the one before.
        p = pieces(size, _PHASE_BYTES // 2)
        amounts = (size, size, board(size), size)
        return Work(p, ((p + 1, size / p),), (), n, *amounts, has_one_source=True)
    known = ", ".join((*OPERATIONS, "one_shot", "two_shot"))
    raise ValueError(f"the operation must be one of {known}, got {op!r}")


@dataclass(frozen=True)
class Machine:
    """Cores and nodes of a host, and what they take. Ranks are spread evenly over both."""

    cores: int
    nodes: int = 1
    costs: Costs = UNTUNED
    one_shot_max_bytes: Mapping[int, int] = field(default_factory=dict)  # by number of ranks

    def __post_init__(self) -> None:
        if self.cores < 1 or self.nodes < 1:
            raise ValueError(f"cores and nodes must be positive, got {self.cores}, {self.nodes}")

    def microseconds(
        self,
        op: str,
        num_bytes: float,
        world_size: int,
        threads: int = 1,
        ranks_of_host: int | None = None,
    ) -> float:
        """A call that all ranks begin together; 0 for one rank.

        ``ranks_of_host`` are those that share the host's cores, in groups of ``world_size`` that
        all make such a call. Without it there is one group.
        """
        if world_size < 2:
            return 0.0
        ranks_of_host = ranks_of_host or world_size
        limit, costs = self.one_shot_max_bytes.get(world_size), self.costs
        work = work_of(op, num_bytes, world_size, limit)
        # Those whose ranks are more than cores take turns, at each round.
        turns = max(1.0, ranks_of_host / self.cores)
        each = costs.round_us + costs.peer_us * (world_size - 1)
        waits = turns * (costs.call_us + work.num_rounds * each)
        waits += max(0.0, turns - _RESIDENT_RANKS) * costs.cold_us
        waits += work.num_rounds * costs.switch_us * (turns - 1)
        return waits + max(self._bounds(work, world_size, threads, ranks_of_host))

    def _bounds(
        self, work: Work, world_size: int, threads: int, ranks_of_host: int
    ) -> Iterator[float]:
        """Microseconds of a core, of a node's memory, and between nodes."""
        costs = self.costs
        copied = sum(num * size for num, size in work.copies)
        summed = sum(num * size for num, size in work.sums) * work.num_sources
        cores = threads if work.moved_bytes + copied >= _MIN_CALL_BYTES else 1
        joined = 0.0
        rates = ((work.copies, costs.copy_us), (work.sums, costs.sum_us * work.num_sources))
        for steps, us_per_mib in rates:
            for num, size in steps:
                used = max(1, min(cores, int(size) // _MIN_PART_BYTES))
                joined += num * (size / MIB * us_per_mib / used + costs.join_us * (used > 1))
        # Each rank has its part of the node's cache.
        ranks_of_node = ranks_of_host / min(self.nodes, ranks_of_host)
        used_bytes = ranks_of_node * (work.tensor_bytes + work.board_bytes)
        far = work.moved_bytes / MIB * max(0.0, 1 - costs.cache_bytes / max(1.0, used_bytes))
        far_us = far * costs.memory_us
        # Where there are fewer cores than threads, each core has its part of all ranks' work, and
        # finds the data of the rank before in its own cache.
        alone = (copied * costs.copy_us + summed * costs.sum_us) / MIB
        turns = ranks_of_host / self.cores
        shared = turns * (alone + far_us)
        if not work.has_one_source:  # which all ranks of a core read
            shared += max(0.0, turns - 1) * (copied + summed) / MIB * costs.shared_us
        yield max(joined + far_us / cores, shared)
        yield ranks_of_node * far * MIB / costs.node_gb_per_s / 1e3
        if self.nodes > 1:
            ranks_here = world_size / min(self.nodes, world_size)
            away = (world_size - ranks_here) / (world_size - 1)
            read = ranks_of_node * work.from_peers * (1.0 if work.has_one_source else away)
            yield read / costs.between_gb_per_s / 1e3
