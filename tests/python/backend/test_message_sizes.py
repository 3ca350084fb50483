"""Messages of every size over Gloo: what an envelope carries, one byte more, and other sizes there.

The algorithms and all pairs of calls that differ, without torch: tests/cpp/test_message_*.cc.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from ranks import hosts, in_ranks
from test_errors import caught
from test_message_deaths import CountingStore

MESSAGES = {"RINGCOMM_TRANSPORT": "messages"}
ENVS: dict[str, Any] = {"messages": MESSAGES, "hosts": hosts("aba")}
# The data of an envelope, in a collective and in a send; and what has a tag of its size.
EAGER, SEND_EAGER, SIZED = 1 << 16, 4080, 1 << 20
LIMITS = [0, 1, SEND_EAGER, EAGER, SIZED]


def content(source: int, target: int, num_bytes: int) -> torch.Tensor:
    """What `source` has for `target`: another byte at each place, rank and size."""
    steps = torch.arange(num_bytes) * (2 * source + 3) + 31 * target + num_bytes
    return (steps % 251).to(torch.uint8)


@in_ranks(3, ENVS)
@pytest.mark.parametrize("limit", LIMITS)
def test_shards_at_a_limit(rank: int, limit: int) -> None:
    """Each pair of ranks has another size, of which some are empty.

    Gloo ended processes where two ranks of an alltoallv were a few bytes apart
    (https://github.com/pytorch/gloo/issues/334), and in an all_gather of nothing
    (https://github.com/pytorch/pytorch/issues/85234).
    """

    def size(source: int, target: int) -> int:
        return max(0, limit + (source + 2 * target) % 3 - 1)

    given = [content(rank, target, size(rank, target)) for target in range(3)]
    taken = [torch.zeros(size(source, rank), dtype=torch.uint8) for source in range(3)]
    dist.all_to_all(taken, given)
    for source in range(3):
        assert taken[source].equal(content(source, rank, size(source, rank)))

    for num_bytes in {limit, limit + 1}:
        gathered = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(3)]
        dist.all_gather(gathered, content(rank, 0, num_bytes))
        for source in range(3):
            assert gathered[source].equal(content(source, 0, num_bytes))
        sums = content(rank, 0, num_bytes).to(torch.int32)
        dist.all_reduce(sums)
        all_three = torch.stack([content(source, 0, num_bytes) for source in range(3)])
        assert sums.equal(all_three.sum(0, dtype=torch.int32))
        sent = content(1, 5, num_bytes) if rank == 1 else torch.zeros(num_bytes, dtype=torch.uint8)
        dist.broadcast(sent, 1)
        assert sent.equal(content(1, 5, num_bytes))


@in_ranks(2, env=MESSAGES, fresh=True)
@pytest.mark.parametrize(
    ("sent_bytes", "taken_bytes"),
    [(0, 1), (SEND_EAGER, SEND_EAGER - 1), (SEND_EAGER, SEND_EAGER + 1), (1 << 18, 8)],
)
def test_a_send_of_another_size(rank: int, sent_bytes: int, taken_bytes: int) -> None:
    """Over NCCL the shorter receive is filled, and the longer one hangs.

    https://github.com/NVIDIA/nccl/issues/1938
    """
    if rank == 0:
        sent = content(0, 1, sent_bytes)
        error = caught(lambda: (dist.send(sent, 1), dist.barrier()))
    else:
        taken = torch.full((taken_bytes,), 7, dtype=torch.uint8)
        error = caught(dist.recv, taken, 0)
        assert taken.eq(7).all(), "nothing is written before the sizes are compared"
    assert error["type"] == "MismatchError", error
    assert f" {sent_bytes} bytes" in error["text"], error
    assert f" {taken_bytes} bytes" in error["text"], error


def reduce_gradients(rank: int, odd: torch.Tensor, usual: torch.Tensor) -> None:
    dist.all_reduce(odd if rank == 1 else usual)


def gather_states(rank: int, odd: torch.Tensor, usual: torch.Tensor) -> None:
    own = odd if rank == 1 else usual
    dist.all_gather_into_tensor(own.new_zeros(3 * own.numel()), own)


@in_ranks(3, ENVS, fresh=True)
@pytest.mark.parametrize(
    ("call", "usual_bytes", "odd_bytes"),
    [
        (reduce_gradients, 1_040_256, 1_046_204),
        (reduce_gradients, 4, 194_478_720),
        (gather_states, EAGER, EAGER + 4),
        (gather_states, 8, EAGER),
    ],
)
def test_one_rank_has_another_size(
    rank: int, call: Callable[..., None], usual_bytes: int, odd_bytes: int
) -> None:
    """The sizes of two reports of processes that Gloo ended, where a rank was a step ahead.

    https://github.com/PrimeIntellect-ai/prime-diloco/issues/68 and
    https://github.com/pytorch/gloo/pull/456
    """
    error = caught(call, rank, torch.ones(odd_bytes // 4), torch.ones(usual_bytes // 4))
    assert error["type"] == "MismatchError", error
    assert str(odd_bytes) in error["text"], error
    assert str(usual_bytes) in error["text"], error


@in_ranks(3, ENVS, fresh=True)
@pytest.mark.parametrize("op", ["all_gather", "broadcast", "all_to_all"])
def test_another_type_of_the_same_size_is_not_written(rank: int, op: str) -> None:
    """What fits an envelope comes with its header, which is compared first."""
    dtype = torch.float32 if rank == 1 else torch.int32
    own = torch.full((3 * 64,), 9, dtype=dtype)
    taken = torch.full((3 * 64,), 5, dtype=dtype)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(taken, own[:64]),
        "broadcast": lambda: dist.broadcast(own if rank == 1 else taken, 1),
        "all_to_all": lambda: dist.all_to_all_single(taken, own),
    }
    error = caught(lambda: (calls[op](), dist.barrier()))
    assert error["type"] == "MismatchError", error
    parts = taken.split(64)
    others = (0, 2) if rank == 1 else (0, 1, 2) if op == "broadcast" else (1,)
    assert all(parts[source].eq(5).all() for source in others)


class RecordingStore(CountingStore):
    """A FileStore that records the keys that its rank asks for."""

    keys: ClassVar[list[str]] = []  # of all clones; each rank is a process

    def __init__(self, store: Any) -> None:
        super().__init__(store, 0, "")

    def clone(self) -> Any:
        self._clones.append(RecordingStore(self._store.clone()))
        return self._clones[-1]

    def get(self, key: str) -> bytes:
        self.keys.append(key)
        return super().get(key)

    def check(self, keys: list[str]) -> bool:
        self.keys.extend(keys)
        return super().check(keys)


@in_ranks(4, env=MESSAGES, backend=None, fresh=True)
def test_rank_0_alone_asks_the_store_about_every_end(rank: int, tmp_path: Path) -> None:
    """N ranks that ask about N others each made the start of large jobs slow over Gloo.

    https://github.com/pytorch/gloo/issues/419
    """
    store = RecordingStore(dist.FileStore(str(tmp_path / "store"), 4))
    dist.init_process_group("ringcomm", store=store, rank=rank, world_size=4)
    dist.barrier()
    ours = [key for key in RecordingStore.keys if "ringcomm/message_backend" in key]
    asked = {int(key.rsplit("/", 1)[1]) for key in ours if "/made/" in key}
    assert asked == ({0, 1, 2, 3} if rank == 0 else set()), ours
