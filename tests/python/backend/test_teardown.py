"""The end of groups while something is under way, and who is blamed for what."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_errors import caught

import ringcomm


def destroy_with_a_receive_pending(rank: int) -> tuple[dict[str, Any], bool] | None:
    dist.barrier()
    if rank == 1:
        return None
    tensor = torch.zeros(4)
    work = dist.irecv(tensor, 1)
    assert work is not None
    future = work.get_future()
    dist.destroy_process_group()
    error = caught(work.wait)
    with pytest.raises(Exception, match="destroyed"):
        future.wait()
    return error, bool((tensor == 0).all())


def test_a_receive_ends_with_its_group() -> None:
    result = run_ranks(2, destroy_with_a_receive_pending, fresh=True)[0]
    error, is_untouched = result
    assert error["type"] == "RingcommError"
    assert "the group was destroyed" in error["text"]
    assert is_untouched


def receive_into_one_element(rank: int) -> dict[str, Any]:
    error = caught(lambda: dist.recv(torch.zeros(1).expand(4), 1 - rank))
    works = [dist.isend(torch.full((4,), float(rank)), 1 - rank)]
    tensor = torch.empty(4)
    dist.recv(tensor, 1 - rank)
    for work in works:
        assert work is not None
        work.wait()
    assert tensor.tolist() == [1.0 - rank] * 4
    return error


def test_an_expanded_tensor_cannot_receive() -> None:
    for error in run_ranks(2, receive_into_one_element):
        assert error["type"] == "ValueError"
        assert "clone()" in error["text"]


def lose_rank_2_in_a_ring(rank: int) -> dict[str, Any]:
    dist.barrier()
    if rank == 2:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    # More slices than slots: ranks wait for credits as well as for data.
    return caught(lambda: dist.all_reduce(torch.ones(4 << 20)))


def test_a_ring_blames_the_rank_that_died() -> None:
    options = ringcomm.Options(algorithm="ring")
    results = run_ranks(4, lose_rank_2_in_a_ring, pg_options=options, fresh=True, may_die=[2])
    for rank in (0, 1, 3):
        assert results[rank]["type"] == "PeerDiedError"
        assert results[rank]["rank"] == 2


def leave_at_once(rank: int) -> dict[str, Any] | None:
    if rank == 1:
        os._exit(0)  # right after init_process_group, before the others may have met it
    return caught(dist.barrier)


def test_a_rank_may_end_right_after_the_start() -> None:
    results = run_ranks(3, leave_at_once, fresh=True, may_die=[1])
    for rank in (0, 2):
        assert results[rank]["type"] == "PeerDiedError"
        assert results[rank]["rank"] == 1


def wait_in_a_forked_child(rank: int) -> str:
    tensor = torch.zeros(4)
    receive = dist.irecv(tensor, 1 - rank)
    collective = dist.all_reduce(torch.ones(4), async_op=True)
    assert receive is not None
    assert collective is not None
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for call in (receive.wait, dist.barrier, lambda: dist.send(tensor, 1 - rank)):
            said.append(caught(call)["text"])
        dist.destroy_process_group()
        os.write(writable, "\n".join(said).encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable, encoding="utf-8") as pipe:
        said_by_child = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    collective.wait()
    dist.send(torch.full((4,), float(rank)), 1 - rank)
    receive.wait()
    assert tensor.tolist() == [1.0 - rank] * 4
    dist.barrier()  # the parent's group is as it was
    return said_by_child


def test_a_forked_child_cannot_touch_the_parents_group() -> None:
    for said in run_ranks(2, wait_in_a_forked_child, fresh=True):
        assert said.count("forked") == 3


def restart_over_one_store(rank: int, path: str) -> list[float]:
    sums = []
    for round_idx, algorithm in enumerate(("auto", "ring", "two_shot")):
        if rank == 0 and round_idx > 0:
            time.sleep(0.2)  # the other finds this rank's old record first
        store = dist.PrefixStore("same", dist.FileStore(path, 2))
        dist.init_process_group(
            "ringcomm",
            store=store,
            rank=rank,
            world_size=2,
            pg_options=ringcomm.Options(algorithm=algorithm),  # type: ignore[arg-type]
        )
        tensor = torch.ones(3) * (rank + 1)
        dist.all_reduce(tensor)
        sums.append(float(tensor.sum()))
        dist.destroy_process_group()
    return sums


def test_groups_are_made_again_over_the_same_store(tmp_path: Any) -> None:
    path = str(tmp_path / "store")
    assert run_ranks(2, restart_over_one_store, path, backend=None, fresh=True) == [[9.0] * 3] * 2


def unmatched(name: str) -> Any:
    if name == "all_reduce":
        return dist.all_reduce(torch.ones(10), async_op=True)
    return dist.isend(torch.ones(10_000_000), 1)  # more than any buffer between the ranks holds


def interrupt_the_end(rank: int, name: str) -> tuple[str, float]:
    dist.barrier()
    if rank == 1:
        time.sleep(1.5)
        # Rank 0 may have published its part before it gave up: then the first call succeeds.
        errors = [caught(lambda: dist.all_reduce(torch.ones(10))) for _ in range(2)]
        return (errors[1]["type"], 0.0)
    unmatched(name)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    kind = "nothing"
    try:
        dist.destroy_process_group()
    except KeyboardInterrupt:
        kind = "KeyboardInterrupt"
    return (kind, time.monotonic() - begin)


@pytest.mark.parametrize("transport", ["shm", "p2p"])
@pytest.mark.parametrize("name", ["all_reduce", "isend"])
def test_ctrl_c_while_the_group_is_destroyed(name: str, transport: str) -> None:
    """Destroying a group waits for what was started; Ctrl-C ends that wait, and the group."""
    env = {"RINGCOMM_TRANSPORT": transport}
    (kind, seconds), (other, _) = run_ranks(2, interrupt_the_end, name, fresh=True, env=env)
    assert kind == "KeyboardInterrupt"
    assert seconds < 5.0  # of the group's 30
    assert other in ("RingcommError", "PeerDiedError")
