"""ringcomm.shrink() of groups over messages: over several hosts, or with transport="messages".

What the ranks do is that of test_shrink.py, whose groups share memory. Two hosts are two identities
on this machine (RINGCOMM_HOST_ID).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import quick, slow
from ranks import run_ranks
from test_errors import ENVS, caught
from test_shrink import (
    PATIENCE_S,
    SOON_S,
    die,
    die_in_shrink,
    fail,
    groups_after_a_death,
    interrupt_one,
    leave,
    lose,
    lose_one_by_one,
    raise_in_one,
    shrunk,
)

import ringcomm
from ringcomm.survivors import agreement
from ringcomm.torch_names import backend_of


def hosts(places: str) -> list[dict[str, str]]:
    """Of each rank, the letter of its host."""
    return [{"RINGCOMM_HOST_ID": f"host-{host}"} for host in places]


@pytest.mark.parametrize(
    ("places", "victims"),
    [
        slow("aabb", [0]),
        ("abab", [3]),
        slow("aabb", [2, 3]),  # a whole host, without the lowest rank
        ("aabb", [0, 1]),  # and with it
        ("aaaabbbb", [0, 5]),
        slow("abc", [0, 1]),
    ],
)
def test_a_death(places: str, victims: list[int]) -> None:
    results = run_ranks(len(places), lose, victims, fresh=True, may_die=victims, env=hosts(places))
    left = [rank for rank in range(len(places)) if rank not in victims]
    for idx, rank in enumerate(left):
        result = results[rank]
        assert (result["ranks"], result["rank"], result["size"]) == (left, idx, len(left))
        assert result["is_default"]
        assert result["seconds"] < SOON_S


def test_a_death_over_messages_on_one_host() -> None:
    results = run_ranks(4, lose, [0], fresh=True, may_die=[0], env=ENVS["messages"])
    assert [result["ranks"] for result in results[1:]] == [[1, 2, 3]] * 3


def test_one_death_after_another() -> None:
    kind: dict[str, Any] = {"fresh": True, "may_die": [3, 0, 2], "env": hosts("ababa")}
    results = run_ranks(5, lose_one_by_one, **kind)
    for rank in (1, 4):
        assert results[rank] == [[0, 1, 2, 4], [1, 2, 4], [1, 4]]


@pytest.mark.parametrize("what", ["mismatch", "exception", "abort"])
def test_no_rank_is_lost(what: str) -> None:
    results = run_ranks(3, raise_in_one, what, fresh=True, env=hosts("aba"))
    for rank, result in enumerate(results):
        assert (result["ranks"], result["rank"]) == ([0, 1, 2], rank)


def test_a_rank_that_has_destroyed_the_group_is_left_out() -> None:
    results = run_ranks(3, leave, fresh=True, env=hosts("aba"))
    assert results[0]["ranks"] == results[2]["ranks"] == [0, 2]


@pytest.mark.parametrize("phase", ["wait", "make"])
def test_an_interrupted_rank_may_call_again(phase: str) -> None:
    for result in run_ranks(3, interrupt_one, phase, fresh=True, env=hosts("aba")):
        assert result["ranks"] == [0, 1, 2]
        assert result["seconds"] < 2 + SOON_S


def test_other_groups() -> None:
    kind: dict[str, Any] = {"fresh": True, "may_die": [0], "env": hosts("abab")}
    results = run_ranks(4, groups_after_a_death, **kind)
    for rank in (1, 2, 3):
        assert results[rank]["123"] == [3.0, 3.0]
    for rank in (1, 3):
        assert results[rank]["13"] == [3.0, 3.0]


@pytest.mark.parametrize("delay_ms", quick((1, 3, 10, 20, 40), 3, 20))
def test_a_death_in_shrink(delay_ms: float) -> None:
    kind: dict[str, Any] = {"fresh": True, "may_die": [0, 2], "env": hosts("abab")}
    results = run_ranks(4, die_in_shrink, delay_ms / 1000, **kind)
    assert results[1] == results[3] == [1, 3]


# ---- a death behind every message of the agreement


MANY = 100  # messages: no death in shrink()


def die_behind_messages(rank: int, victim: int, num_sent: int) -> dict[str, Any]:
    """Rank 3 ends the group; `victim` dies instead of sending its next message in shrink()."""
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
    limit = datetime.timedelta(seconds=20)
    ringcomm.shrink(timeout=limit)
    num_sent_once = sent
    if rank == victim and num_sent < MANY:
        die()
    num_left = 4 if num_sent == MANY else 3
    while True:
        try:
            ranks = [torch.zeros(1) for _ in range(dist.get_world_size())]
            dist.all_gather(ranks, torch.tensor([float(rank)]))
            if len(ranks) == num_left:
                return {"ranks": [int(old) for old in ranks], "sent": num_sent_once}
        except ringcomm.RingcommError:
            ringcomm.shrink(timeout=limit)


@pytest.mark.parametrize("victim", [slow(0), 2])
def test_a_death_behind_every_message(victim: int) -> None:
    kind: dict[str, Any] = {"fresh": True, "env": hosts("ababa")}
    whole = run_ranks(5, die_behind_messages, victim, MANY, may_die=[3], **kind)
    assert whole[0]["ranks"] == [0, 1, 2, 4]
    num_sent = whole[victim]["sent"]
    assert num_sent >= (6 if victim == 0 else 2)  # a proposal and a decision for each member
    left = [rank for rank in (0, 1, 2, 4) if rank != victim]
    for behind in range(num_sent + 1):
        results = run_ranks(5, die_behind_messages, victim, behind, may_die=[3, victim], **kind)
        for rank in left:
            assert results[rank]["ranks"] == left, (behind, results)


def stop_behind_the_decision(rank: int, path: str, is_broken: bool) -> int:
    """The coordinator dies when rank 1 alone has its decision, and rank 1 is stopped with it."""
    seen = dist.FileStore(path, -1)
    dist.barrier()
    if rank == 3:
        die()
    fail()
    if rank == 0:
        connection_type: Any = agreement.Connection
        send = connection_type.send

        def send_one(connection: Any, **message: Any) -> None:
            if "all_made" not in message:
                send(connection, **message)
            elif connection.rank == 1:  # the others may have joined before it
                send(connection, **message)
                die()

        connection_type.send = send_one
    if rank == 1:
        answer = agreement.answer_late_ranks

        def stop_before_an_answer(*args: Any) -> None:
            seen.set("pid", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            answer(*args)

        vars(agreement)["answer_late_ranks"] = stop_before_an_answer
    if is_broken:
        vars(agreement)["Meeting"].may_be_made = lambda _: False
    ringcomm.shrink(timeout=datetime.timedelta(seconds=PATIENCE_S))
    size = dist.get_world_size()
    seen.set(f"done {rank}", "")
    for other in (2, 4):
        seen.wait([f"done {other}"], datetime.timedelta(seconds=40))
    if rank == 2:
        os.kill(int(seen.get("pid")), signal.SIGCONT)
    return size


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_group_that_one_rank_has_is_made(tmp_path: Path, is_broken: bool) -> None:
    """Without asking what the others have made, two ranks would have another group than rank 1."""
    kind: dict[str, Any] = {"fresh": True, "may_die": [0, 3], "env": hosts("ababa")}
    results = run_ranks(5, stop_behind_the_decision, str(tmp_path / "seen"), is_broken, **kind)
    assert [results[rank] for rank in (1, 2, 4)] == ([4, 2, 2] if is_broken else [4, 4, 4])


# ---- ranks that live and do not answer


def stop_one(rank: int, path: str, victim: int) -> dict[str, Any]:
    """The others go on without a stopped rank, which is told so when it comes."""
    seen = dist.FileStore(path, -1)
    if rank == victim:
        seen.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        late = caught(ringcomm.shrink)
        return {"shrink": late, "again": caught(ringcomm.shrink)}
    pid = int(seen.get("pid"))
    try:
        error = fail()
        result = shrunk(rank, timeout=datetime.timedelta(seconds=PATIENCE_S))
        dist.barrier()
    finally:
        if rank == 2:
            os.kill(pid, signal.SIGCONT)
    dist.barrier()
    return {**result, "error": error}


@pytest.mark.parametrize("victim", [0, slow(1)])
def test_a_stopped_rank_is_left_out(tmp_path: Path, victim: int) -> None:
    kind: dict[str, Any] = {"fresh": True, "group_timeout_s": 1.0, "env": hosts("aba")}
    results = run_ranks(3, stop_one, str(tmp_path / "seen"), victim, **kind)
    left = [rank for rank in range(3) if rank != victim]
    for rank in left:
        assert results[rank]["ranks"] == left
        assert 1 < results[rank]["seconds"] < 2 * PATIENCE_S + SOON_S
    for error in (results[victim]["shrink"], results[victim]["again"]):
        assert error["type"] == "RingcommError"
        assert "did not call shrink in time" in error["text"]


def only_some_call(rank: int, path: str, first: list[int]) -> dict[str, Any]:
    """Half of the ranks does not answer, as behind a network that is cut."""
    seen = dist.FileStore(path, -1)
    if rank not in first:
        for other in first:
            seen.wait([f"done {other}"], datetime.timedelta(seconds=40))
    result = caught(ringcomm.shrink, None)
    seen.set(f"done {rank}", "")
    if "type" not in result:
        dist.barrier()
        result["size"] = dist.get_world_size()
    for other in range(4):
        seen.wait([f"done {other}"], datetime.timedelta(seconds=40))
    return result


@pytest.mark.parametrize("first", [slow([0, 1]), [2, 3]])
def test_one_half_may_go_on(tmp_path: Path, first: list[int]) -> None:
    """The half with rank 0, whichever comes first."""
    kind: dict[str, Any] = {"fresh": True, "group_timeout_s": 1.0, "env": hosts("aabb")}
    results = run_ranks(4, only_some_call, str(tmp_path / "seen"), first, **kind)
    assert [result.get("size") for result in results] == [2, 2, None, None]
    for result in results[2:]:
        assert result["type"] == "RingcommError"
        text = "did not call shrink in time" if first == [0, 1] else "only [2, 3] answer"
        assert text in result["text"]


def shrink_with_unequal_patience(rank: int, path: str, hurried: int) -> float:
    seen = dist.FileStore(path, -1)
    if rank == 1:
        for key in ("done 0", "done 2"):
            seen.wait([key], datetime.timedelta(seconds=40))
        return 0.0
    begin = time.monotonic()
    limit = datetime.timedelta(seconds=PATIENCE_S if rank == hurried else 60)
    assert ringcomm.shrink(timeout=limit).size() == 2
    seconds = time.monotonic() - begin
    dist.barrier()
    seen.set(f"done {rank}", "")
    return seconds


@pytest.mark.parametrize("hurried", [slow(0), 2])
def test_the_least_patience_counts(tmp_path: Path, hurried: int) -> None:
    args = (str(tmp_path / "seen"), hurried)
    results = run_ranks(3, shrink_with_unequal_patience, *args, fresh=True, env=hosts("aba"))
    assert max(results) < 2 * PATIENCE_S + SOON_S


# ---- strangers, children, and a store that dies with rank 0


def shrink_beside_strangers(rank: int) -> dict[str, Any]:
    """Rank 0 is connected to by strangers, before and while it waits for the late rank 1."""
    group = dist.group.WORLD
    assert group is not None
    contacts = backend_of(group, torch.device("cpu")).contacts
    address = contacts.addresses[0]
    dist.barrier()
    ends: list[socket.socket] = []
    if rank == 1:
        wrong = address.key[::-1] if address.key != address.key[::-1] else "0" * 32
        for text in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"x" * 100_000,
            b"\xff\x00\n",
            f"ringcomm-contact-1 {wrong} 1 call\n".encode() + b'{"gone_on": [0]}\n',
            f"ringcomm-contact-1 {wrong} 2 call\n".encode() + b'{"gone_on": [0]}\n',
            f"ringcomm-contact-0 {address.key} 1 call\n".encode() + b'{"gone_on": [0]}\n',
            f"ringcomm-contact-1 {address.key} 7 call\n".encode() + b'{"gone_on": [0]}\n',
            f"ringcomm-contact-1 {address.key} 2 watch\n".encode() + b"[" * 100_000 + b"\n",
        ):
            ends.append(socket.create_connection(address[:2], timeout=10))
            ends[-1].sendall(text)
        time.sleep(0.5)
    result = shrunk(rank)
    for end in ends[1:]:
        end.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert b"proposal" not in end.recv(1000)
    return result


def test_strangers_are_refused() -> None:
    for result in run_ranks(3, shrink_beside_strangers, fresh=True, env=hosts("aba")):
        assert result["ranks"] == [0, 1, 2]
        print(result)


def a_key_that_is_known(rank: int) -> dict[str, Any]:
    """What a stranger could do with the key: the counterpart of the test above."""
    group = dist.group.WORLD
    assert group is not None
    address = backend_of(group, torch.device("cpu")).contacts.addresses[0]
    dist.barrier()
    if rank == 1:
        with socket.create_connection(address[:2], timeout=10) as end:
            text = f'ringcomm-contact-1 {address.key} 1 call\n{{"gone_on": [1]}}\n'
            end.sendall(text.encode())
            time.sleep(1)
        return {}
    return caught(ringcomm.shrink)


def test_the_key_opens_the_door() -> None:
    results = run_ranks(2, a_key_that_is_known, fresh=True, env=hosts("ab"))
    assert "the other ranks go on without it (ranks 1)" in results[0]["text"]


def die_with_a_child(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 0's child, as a data loader's, outlives it, and has inherited its sockets."""
    dist.barrier()
    if rank == 0:
        if os.fork() == 0:
            while len(list(folder.iterdir())) < 3:
                time.sleep(0.05)
            os._exit(0)
        die()
    fail()
    try:
        return shrunk(rank)
    finally:
        (folder / str(rank)).touch()


def test_a_child_of_a_dead_rank_does_not_answer(tmp_path: Path) -> None:
    kind: dict[str, Any] = {"fresh": True, "may_die": [0], "env": hosts("abab")}
    for result in run_ranks(4, die_with_a_child, tmp_path, **kind)[1:]:
        assert result["ranks"] == [1, 2, 3]
        assert result["seconds"] < SOON_S


def lose_the_store(rank: int, path: str) -> list[Any]:
    """Rank 0's process serves the store, as torchrun's address does without an agent's store."""
    place = dist.FileStore(path, -1)
    store: Any
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place.set("port", str(store.port))
    else:
        port = int(place.get("port"))
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("ringcomm", store=store, rank=rank, world_size=4)
    dist.barrier()
    seen = []
    for victim in (0, 1):
        if rank == victim:
            die()
        fail()
        seen.append(shrunk(rank))
    return seen


def test_the_store_dies_with_rank_0(tmp_path: Path) -> None:
    kind: dict[str, Any] = {"fresh": True, "may_die": [0, 1], "env": hosts("abab")}
    results = run_ranks(4, lose_the_store, str(tmp_path / "place"), backend=None, **kind)
    for rank in (2, 3):
        assert [result["ranks"] for result in results[rank]] == [[1, 2, 3], [2, 3]]
        assert all(result["seconds"] < 2 * SOON_S for result in results[rank])
