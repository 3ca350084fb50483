"""ringcomm.shrink() over several hosts: the agreement over messages, and who may take part in it.

What it has in common with groups that share memory: test_shrink.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import slow
from ranks import hosts, run_ranks
from test_errors import caught
from test_shrink import PATIENCE_S, SOON_S, die, fail, in_new_ranks, shrink_to, shrink_until

import ringcomm
from ringcomm.survivors import agreement
from ringcomm.torch_names import backend_of

# ---- a death behind every message of the agreement

MANY = 100  # messages: no death in shrink()


def die_behind_messages(rank: int, victim: int, num_sent: int) -> tuple[list[int], int]:
    """Rank 3 ends the group; `victim` dies instead of sending its next message in shrink().

    Returns the ranks that are left, and the messages of this one.
    """
    dist.barrier()
    if rank == 3:
        die()
    fail()
    sent = 0
    connection_type: Any = agreement.Connection
    send = connection_type.send

    def send_or_die(connection: Any, **message: Any) -> None:
        nonlocal sent
        if "ping" not in message:
            if rank == victim and sent == num_sent:
                die()
            sent += 1
        send(connection, **message)

    connection_type.send = send_or_die
    limit = timedelta(seconds=20)
    ringcomm.shrink(timeout=limit)
    num_sent_once = sent
    if rank == victim and num_sent < MANY:
        die()
    return shrink_until(rank, 4 if num_sent == MANY else 3, timeout=limit), num_sent_once


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_behind_every_message(victim: int) -> None:
    kind: dict[str, Any] = {"fresh": True, "env": hosts("ababa")}
    whole = run_ranks(5, die_behind_messages, victim, MANY, may_die=[3], **kind)
    assert whole[0][0] == [0, 1, 2, 4]
    num_sent = whole[victim][1]
    assert num_sent >= (6 if victim == 0 else 2)  # a proposal and a decision for each member
    left = [rank for rank in (0, 1, 2, 4) if rank != victim]
    for behind in range(num_sent + 1):
        results = run_ranks(5, die_behind_messages, victim, behind, may_die=[3, victim], **kind)
        assert [results[rank][0] for rank in left] == [left] * 3, (behind, results)


@in_new_ranks(5, env=hosts("ababa"), may_die=[0, 3])
@pytest.mark.parametrize("is_broken", [False, slow(True)])
def test_a_group_that_one_rank_has_is_made(rank: int, is_broken: bool, tmp_path: Path) -> None:
    """The coordinator dies when rank 1 alone has its decision, and rank 1 is stopped with it.

    Without asking what the others have made, two ranks would have another group than rank 1.
    """
    seen = dist.FileStore(str(tmp_path / "seen"), -1)
    dist.barrier()
    if rank == 3:
        die()
    fail()
    connection_type: Any = agreement.Connection
    send, answer = connection_type.send, agreement.answer_late_ranks

    def send_one(connection: Any, **message: Any) -> None:
        if "all_made" not in message:
            send(connection, **message)
        elif connection.rank == 1:  # the others may have joined before it
            send(connection, **message)
            die()

    def stop_before_an_answer(*args: Any) -> None:
        seen.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        answer(*args)

    if rank == 0:
        connection_type.send = send_one
    if rank == 1:
        vars(agreement)["answer_late_ranks"] = stop_before_an_answer
    if is_broken:
        vars(agreement)["Meeting"].may_be_made = lambda _: False
    ringcomm.shrink(timeout=timedelta(seconds=PATIENCE_S))
    size = dist.get_world_size()
    seen.set(f"done {rank}", "")
    seen.wait(["done 2", "done 4"], timedelta(seconds=80))
    if rank == 2:
        os.kill(int(seen.get("pid")), signal.SIGCONT)
    assert size == (2 if is_broken and rank != 1 else 4)


@in_new_ranks(4, env=hosts("aabb"), group_timeout_s=1.0)
@pytest.mark.parametrize("first", [slow([0, 1]), [2, 3]])
def test_one_half_may_go_on(rank: int, first: list[int], tmp_path: Path) -> None:
    """Half of the ranks does not answer, as behind a network that is cut.

    The half with rank 0 goes on, whichever comes first.
    """
    seen = dist.FileStore(str(tmp_path / "seen"), -1)
    if rank not in first:
        seen.wait([f"done {other}" for other in first], timedelta(seconds=80))
    error = caught(ringcomm.shrink)
    seen.set(f"done {rank}", "")
    if rank < 2:
        assert not error, error
        dist.barrier()
        assert dist.get_world_size() == 2
    else:
        assert error["type"] == "RingcommError"
        text = "did not call shrink in time" if first == [0, 1] else "only [2, 3] answer"
        assert text in error["text"]
    seen.wait([f"done {other}" for other in range(4)], timedelta(seconds=80))


# ---- strangers, children, and a store that dies with rank 0


def address_of_rank_0() -> Any:
    world: Any = dist.group.WORLD
    return backend_of(world, torch.device("cpu")).contacts.addresses[0]


@in_new_ranks(3, env=hosts("aba"))
def test_strangers_are_refused(rank: int) -> None:
    """Rank 0 is connected to by strangers, before and while it waits for the late rank 1."""
    address = address_of_rank_0()
    dist.barrier()
    ends: list[socket.socket] = []
    if rank == 1:
        wrong = address.key[::-1] if address.key != address.key[::-1] else "0" * 32
        gone_on = b'{"gone_on": [0]}\n'
        for text in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"x" * 100_000,
            b"\xff\x00\n",
            f"ringcomm-contact-1 {wrong} 1 call\n".encode() + gone_on,
            f"ringcomm-contact-1 {wrong} 2 call\n".encode() + gone_on,
            f"ringcomm-contact-0 {address.key} 1 call\n".encode() + gone_on,
            f"ringcomm-contact-1 {address.key} 7 call\n".encode() + gone_on,
            f"ringcomm-contact-1 {address.key} 2 watch\n".encode() + b"[" * 100_000 + b"\n",
        ):
            ends.append(socket.create_connection(address[:2], timeout=10))
            ends[-1].sendall(text)
        time.sleep(0.5)
    shrink_to(rank, [0, 1, 2])
    for end in ends[1:]:
        end.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert b"proposal" not in end.recv(1000)


@in_new_ranks(2, env=hosts("ab"))
def test_the_key_opens_the_door(rank: int) -> None:
    """What a stranger could do with the key: the counterpart of the test above."""
    address = address_of_rank_0()
    dist.barrier()
    if rank == 1:
        with socket.create_connection(address[:2], timeout=10) as end:
            text = f'ringcomm-contact-1 {address.key} 1 call\n{{"gone_on": [1]}}\n'
            end.sendall(text.encode())
            time.sleep(1)
        return
    assert "the other ranks go on without it (ranks 1)" in caught(ringcomm.shrink)["text"]


@in_new_ranks(4, env=hosts("abab"), may_die=[0])
def test_a_child_of_a_dead_rank_does_not_answer(rank: int, tmp_path: Path) -> None:
    """Rank 0's child, as a data loader's, outlives it, and has inherited its sockets."""
    dist.barrier()
    if rank == 0:
        if os.fork() == 0:
            while len(list(tmp_path.iterdir())) < 3:
                time.sleep(0.05)
            os._exit(0)
        die()
    fail()
    try:
        shrink_to(rank, [1, 2, 3])
    finally:
        (tmp_path / str(rank)).touch()


@in_new_ranks(4, env=hosts("abab"), backend=None, may_die=[0, 1])
def test_the_store_dies_with_rank_0(rank: int, tmp_path: Path) -> None:
    """Rank 0's process serves the store, as torchrun's address does without an agent's store."""
    place = dist.FileStore(str(tmp_path / "place"), -1)
    port = 0 if rank == 0 else int(place.get("port"))
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        place.set("port", str(store.port))
    dist.init_process_group("ringcomm", store=store, rank=rank, world_size=4)
    dist.barrier()
    for victim in (0, 1):
        if rank == victim:
            die()
        fail()
        shrink_to(rank, list(range(victim + 1, 4)), most_s=2 * SOON_S)
