"""What one rank does from its start to its end, and what it needs for that."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from training import launch
from training.checkpoint import Checkpoint
from training.corpus import Batches, Corpus
from training.model import ModelConfig
from training.options import CONTEXT_BYTES, Options
from training.screen import Screen
from training.updaters import Offload
from training.wire import Wire

# Longest wait for a peer. Rank 0 alone replays 20 steps in one process meanwhile.
TIMEOUT = timedelta(minutes=10)
# How often a rank looks whether another one has shared its result.
POLL_S = 0.005


class Board:
    """Small results of the ranks, through the rendezvous store: no backend has to support it."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = dist.PrefixStore("board", store)
        self._rank = rank
        self._world_size = world_size

    def share(self, key: str, value: Any) -> list[Any]:
        """Every rank's ``value`` (JSON), in rank order. Collective; each key only once.

        Raises:
            Interrupted: asked to stop while waiting.
            TimeoutError: a rank has not shared its value in time.
        """
        self._store.set(f"{key}/{self._rank}", json.dumps(value))
        return [json.loads(self._wait_for(key, rank)) for rank in range(self._world_size)]

    def _wait_for(self, key: str, rank: int) -> bytes:
        # Not the store's own wait, which would not let a signal through.
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        while not self._store.check([f"{key}/{rank}"]):
            if launch.stop_requested():
                raise launch.Interrupted
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._rank} waits for {key!r} of rank {rank} in vain")
            time.sleep(POLL_S)
        return self._store.get(f"{key}/{rank}")


class Log:
    """``train.jsonl``: one object per line, ``kind`` says which; written by rank 0 only."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a", encoding="utf-8") if path else io.StringIO()
        self._writes = path is not None

    def write(self, kind: str, **fields: Any) -> None:
        """Appends one line."""
        if self._writes:
            self._file.write(json.dumps({"kind": kind, **fields}) + "\n")
            self._file.flush()


@dataclass
class Job:
    """The surroundings of one rank."""

    options: Options
    corpus: Corpus
    start: Checkpoint
    run_dir: Path
    rank: int
    world_size: int
    device: torch.device
    wires: list[Wire]
    board: Board
    screen: Screen
    log: Log
    began: float = field(default_factory=time.perf_counter)
    failures: list[str] = field(default_factory=list)
    """Of all ranks and of this rank's parent."""

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    @property
    def config(self) -> ModelConfig:
        """Sizes of the model that learns."""
        return self.options.config

    def batches(self, context: int = CONTEXT_BYTES) -> Batches:
        """The training rows of this run."""
        return Batches(self.corpus.train, context, self.options.seed, self.device)

    @property
    def system_options(self) -> dict[str, Any]:
        """What ``build_system`` is told of the mesh, offload, recomputation and clipping."""
        options = self.options
        offload = None
        if options.offload is not None:
            path = (options.offload_path or self.run_dir) if options.offload == "nvme" else None
            offload = Offload(options.offload, path)
        return {
            "mesh": options.mesh,
            "offload": offload,
            "recompute": options.partition_activations,
            "clip_grad_norm": options.clip_grad_norm,
        }

    def agree(self, values: list[float]) -> list[float]:
        """Rank 0's ``values`` on every rank, over the first backend."""
        return self.wires[0].from_rank_zero(values) if self.wires else values

    def fail(self, message: str) -> None:
        """Notes that a promise did not hold; the run goes on, and ends with a non-zero code."""
        self.failures.append(message)
        self.screen.failure(message)
        self.log.write("failure", message=message)


def open_store(rank: int, world_size: int, file: str | None) -> dist.Store:
    """The rendezvous: a file that the parent chose, or what torchrun's environment says."""
    if file is not None:
        return dist.FileStore(file, world_size)
    store, _, _ = next(dist.rendezvous("env://", rank=rank, world_size=world_size, timeout=TIMEOUT))
    return store


def connect(options: Options, rank: int, store: dist.Store, device: torch.device) -> list[Wire]:
    """Makes one group of all ranks per backend. Collective.

    Returns:
        a wire per backend, in the order of ``--backend``; none for ``--parallel single``.
    """
    if options.parallel == "single":
        return []
    first, *others = options.backends
    dist.init_process_group(
        first,
        store=dist.PrefixStore("groups", store),
        rank=rank,
        world_size=options.world_size,
        timeout=TIMEOUT,
    )
    groups = [dist.group.WORLD]
    groups += [dist.new_group(backend=name, timeout=TIMEOUT) for name in others]
    return [
        Wire(name, group, device)
        for name, group in zip(options.backends, groups, strict=True)
        if group is not None
    ]


def _device_of(options: Options, rank: int) -> torch.device:
    if options.device == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def run_rank(
    options: Options,
    corpus: Corpus,
    start: Checkpoint,
    rank: int,
    run_dir: Path | None,
    store_file: str | None,
    phases: Callable[[Job], None],
) -> int:
    """Runs one rank through ``phases``.

    Args:
        options: the same on every rank.
        corpus: the same on every rank.
        start: where training begins.
        rank: of this process.
        run_dir: where results go; only rank 0 needs to know.
        store_file: for the rendezvous; None under torchrun.
        phases: the work.

    Returns:
        the exit code of this rank.
    """
    try:
        return _run(options, corpus, start, rank, run_dir, store_file, phases)
    except launch.Interrupted:
        return launch.EXIT_INTERRUPTED


def _run(
    options: Options,
    corpus: Corpus,
    start: Checkpoint,
    rank: int,
    run_dir: Path | None,
    store_file: str | None,
    phases: Callable[[Job], None],
) -> int:
    device = _device_of(options, rank)
    store = open_store(rank, options.world_size, store_file)
    board = Board(store, rank, options.world_size)
    run_dir = Path(board.share("run_dir", str(run_dir))[0])
    log = Log(run_dir / "train.jsonl" if rank == 0 else None)
    screen = Screen(speaks=rank == 0)
    wires = connect(options, rank, store, device)
    job = Job(
        options, corpus, start, run_dir, rank, options.world_size, device, wires, board, screen, log
    )
    phases(job)
    failed = any(board.share("failed", bool(job.failures)))
    if wires:
        wires[0].barrier()
        dist.destroy_process_group()
    return launch.EXIT_CHECK_FAILED if failed and rank == 0 else launch.EXIT_OK
