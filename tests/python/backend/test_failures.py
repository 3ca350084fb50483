"""One matrix of failures: how a rank is lost, in which call of the others, over which transport.

Each of the others raises an error that names the rank and the call, soon, and its tensors are as
docs/reference/backend.md has it. Deaths while a group is made: test_failed_init.py; at every
step, without torch: tests/cpp/test_deaths.cc; signals and forks: test_faults.py.
"""

from __future__ import annotations

import datetime
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from calls import CALLS, Tensors, op_of
from cases import quick, slow
from failures import ENVS, SOON_S, caught, end_process, in_threads, kill_named, timed
from ranks import hosts, run_ranks

import ringcomm
from ringcomm import Options, RingcommError
from ringcomm.torch_names import backend_of, set_timeout

WORLD_SIZE = 3
CPU = torch.device("cpu")
SMALL, MIDDLE, LARGE = 5, 20_000, 300_001  # elements of a rank's share
# By name: the ranks' environment, and whether they use memory that peers map.
WAYS: dict[str, tuple[Any, bool]] = {
    **{name: (env, False) for name, env in ENVS.items()},
    **{f"{name}, large": (env, False) for name, env in ENVS.items() if name != "shm"},
    "shm, ring": ({"RINGCOMM_ALGORITHM": "ring"}, False),
    "shm, in place": (None, True),
    "shm, threads": ({"RINGCOMM_MAX_THREADS": "3"}, False),
    "shm, ring, threads": ({"RINGCOMM_MAX_THREADS": "3", "RINGCOMM_ALGORITHM": "ring"}, False),
}
LATE_S = 0.4

# ---- calls in which ranks 0 and 2 are when rank 1 is lost: those of CALLS, and these

Call = Callable[[Any], Any]
WAITS: dict[str, Call] = {
    "recv": lambda g: dist.recv(torch.ones(10), 1, g),
    # Rank 2 waits for rank 1, and rank 0 for rank 2.
    "chain": lambda g: dist.recv(torch.ones(10), 1 if dist.get_rank() == 2 else 2, g),
    # Of two ranks: with three a receive from any source may still be served.
    "recv_any": lambda g: dist.recv(torch.ones(10), None, g),
    "send": lambda g: dist.send(torch.ones(10_000_000), 1, g),
    "monitored": lambda g: ringcomm.monitored_barrier(g, datetime.timedelta(seconds=20)),
}


def of_bytes(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8)


# Sends that begin when rank 1 is known to be gone. Each would fit into its mailbox.
SENDS: dict[str, Call] = {
    "send_nothing": lambda g: dist.send(of_bytes(0), 1, g),
    "send_60_kib": lambda g: dist.send(of_bytes(60 << 10), 1, g),
    "send_1_mib": lambda g: dist.send(of_bytes(1 << 20), 1, g),
    "send_with_tag": lambda g: dist.send(of_bytes(1000), 1, g, tag=7),
    "isend": lambda g: cast(dist.Work, dist.isend(of_bytes(1000), 1, g)).wait(),
    "batch": lambda g: [
        work.wait()
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, of_bytes(1000), 1, g)])
    ],
    "send_objects": lambda g: dist.send_object_list([{"work": 1}], 1, g),
}
FEW = ["all_reduce", "asynchronous all_reduce", "recv", "chain", "recv_any"]
# Calls in which both other ranks need rank 1 at once.
AT_ONCE = [
    *("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "uneven all_to_all_single"),
    "barrier",
]
Found = dict[str, Any]


def calls_of(way: str, how: str) -> list[tuple[str, int]]:
    """The names of calls, and the sizes of their shares."""
    if how == "dies in the middle":
        return [(name, LARGE) for name in CALLS]
    if how not in ("kill", "late"):
        sends = list(SENDS) if way == "shm" else ["send_60_kib", "isend"]
        return [(name, SMALL) for name in (*FEW, *(sends if how != "own abort" else []))]
    waits = [*WAITS, *SENDS] if how == "kill" else ["recv", "recv_any"]
    sizes: tuple[int, ...] = (SMALL, LARGE) if way.startswith("shm") else (SMALL,)
    if "large" in way:
        sizes, waits = (LARGE,), []
    return [*product(CALLS, sizes), *((name, 0) for name in waits)]


def lose(rank: int, how: str, is_shared: bool, keys: list[tuple[str, int]], path: str) -> Found:
    """Each call in a thread and a group of its own, until rank 1 is missing.

    Returns the errors of the call and of the next one, and what is wrong with the call's tensors.
    """
    torch.set_num_threads(int(os.environ.get("RINGCOMM_MAX_THREADS", "1")))
    seen = dist.FileStore(path, -1)
    groups = {key: dist.new_group([0, 1] if key[0] == "recv_any" else None) for key in keys}
    mine = [key for key in keys if rank != 2 or key[0] != "recv_any"]
    backends = [backend_of(cast(Any, groups[key]), CPU) for key in mine]
    for backend in backends if how == "late" else ():  # which have connected meanwhile
        set_timeout(backend.options, datetime.timedelta(seconds=LATE_S))
    dist.barrier()
    found: Found = {}
    if rank == 1 and how != "dies in the middle":
        time.sleep(0.15)
        if how in ("kill", "exec", "exit"):
            end_process(how)
        if how == "abort":
            for backend in backends:
                backend.abort()
        elif how == "destroy":
            dist.destroy_process_group()  # alive, but gone
        seen.set("is gone", "")
        return found
    if rank == 1:
        threading.Timer(0.3, end_process, ["kill"]).start()
    if how == "own abort":
        threading.Timer(0.3, lambda: [backend.abort() for backend in backends]).start()

    def wait(key: tuple[str, int]) -> None:
        (name, num_elems), group = key, groups[key]
        first: dict[str, Any] = {}
        begin = time.monotonic()
        while "type" not in first:
            tensors = Tensors(rank, ringcomm.empty_shared if is_shared else torch.empty)
            if name in CALLS:
                first = caught(CALLS[name], tensors, num_elems, group)
            else:
                first = caught({**WAITS, **SENDS}[name], group)
        seconds = time.monotonic() - begin
        later = timed(dist.all_reduce, torch.ones(10), dist.ReduceOp.SUM, group)
        found[f"{name} of {num_elems}"] = (
            {**first, "seconds": seconds},
            later,
            tensors.violations(False),
        )

    in_threads(wait, [key for key in mine if key[0] not in SENDS])
    if how in ("abort", "destroy"):
        seen.wait(["is gone"], datetime.timedelta(seconds=20))
    in_threads(wait, [key for key in mine if key[0] in SENDS])
    if how == "exec":
        kill_named(found[f"all_reduce of {SMALL}"][0], path, rank, 1)
    if how == "exit":
        dist.destroy_process_group()
    return found


KINDS = {"late": "CollectiveTimeoutError", "abort": "RingcommError", "own abort": "RingcommError"}


@pytest.mark.parametrize(
    ("way", "how"),
    [
        *product(ENVS, ("kill", "exit", "destroy", "abort", "late")),
        *product(("shm", "messages"), ("own abort",)),
        ("shm", "exec"),
        *product(("shm, in place",), ("kill", "late")),
        *product(("shm", "shm, ring", "messages"), ("dies in the middle",)),
        *product(("shm, threads", "shm, ring, threads"), ("dies in the middle",)),
        ("hosts, large", "kill"),
        slow("hosts, large", "late"),
        *(slow(*each) for each in product(("shm, ring", "messages, large"), ("kill", "late"))),
        *(slow(*each) for each in product(("shm, in place", "hosts"), ("dies in the middle",))),
    ],
)
def test_a_rank_that_is_lost(way: str, how: str, tmp_path: Path) -> None:
    """In the first call of a group (https://github.com/pytorch/gloo/issues/520), and in others.

    Sends to a rank that is gone: https://github.com/ml-explore/mlx/issues/4060. A call that fails
    leaves its inputs unchanged, and writes nothing beside its outputs; an update, by which LOMO's
    backward pass steps, has changed all of a weight or nothing. The group is destroyed then
    (https://github.com/pytorch/pytorch/issues/76760 https://github.com/pytorch/pytorch/issues/132696),
    and a rank that leaves waits for nobody (https://github.com/pytorch/pytorch/issues/75097).
    """
    env, is_shared = WAYS[way]
    keys = calls_of(way, how)
    may_die = [1] if how in ("kill", "exit", "exec", "dies in the middle") else []
    args = (how, is_shared, keys, str(tmp_path / "seen"))
    options: dict[str, Any] = {"fresh": True, "may_die": may_die, "env": env}
    for found in run_ranks(WORLD_SIZE, lose, *args, **options)[::2]:
        assert len(found) >= len(keys) - 1
        for name, (first, later, violations) in found.items():
            call = name.rpartition(" of ")[0]
            assert first["type"] == later["type"] == KINDS.get(how, "PeerDiedError"), (name, first)
            assert not violations, (name, violations)
            assert max(first["seconds"], later["seconds"]) < 0.5 + SOON_S, (name, first, later)
            if how == "own abort":
                assert "aborted" in first["text"], first
            elif how == "late":
                check_late(call, first, is_shm=way.startswith("shm"))
            else:
                for error in (first, later):
                    assert error["rank"] == 1, (name, error)
                    assert error["pid"] > 0
                    assert error["host"] == socket.gethostname()
                assert "rank 1" in first["text"]
            if call in AT_ONCE and how != "own abort":
                assert first["op"] == op_of(call), (name, first)
                assert first["seq"] == 0 or how == "dies in the middle", (name, first)
            assert how != "exec" or "is no longer a rank: its process runs" in first["text"], first


def check_late(call: str, error: dict[str, Any], is_shm: bool) -> None:
    assert "400 ms" in error["text"], error
    if is_shm and call in (*AT_ONCE, "recv", "recv_any"):
        expected = "waited for any rank" if call == "recv_any" else "rank 1"
        assert expected in error["text"], error
        assert error["rank"] == 1 or call == "recv_any", error


# ---- a death in the middle of a job of more ranks, with or without its store


def calls_without_end() -> None:
    """Collectives of all sizes and patterns, one after another, until one raises."""
    world_size = dist.get_world_size()
    tensors = [torch.ones(num_elems) for num_elems in (10, 5000, 300_001)]
    while True:
        for turn, tensor in enumerate(tensors):
            dist.all_reduce(tensor)
            tensor.fill_(1.0)
            dist.broadcast(tensor, turn % world_size)
            dist.all_gather([torch.empty_like(tensor) for _ in range(world_size)], tensor)
        dist.barrier()


def die_in_the_middle(
    rank: int, world_size: int, port: int, algorithm: Any, victim: int
) -> dict[str, Any]:
    """The victim ends in the middle of some collective; what the others are told, and when."""
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    place: dict[str, Any] = {"rank": rank, "world_size": world_size, "store": store}
    dist.init_process_group("ringcomm", pg_options=Options(algorithm=algorithm), **place)
    dist.barrier()
    if rank == victim:
        threading.Timer(0.1, end_process, ["kill"]).start()
    return timed(calls_without_end)


# With rank 0 dies the store; with 5 ranks some are no neighbours of it. Of the hosts, the last
# victim is no leader.
@pytest.mark.parametrize(
    ("env", "algorithm", "victim"),
    [("-----", "ring", 3), ("-----", "auto", 0), ("abbccc", "auto", 4)],
)
def test_killed_in_the_middle(env: str, algorithm: Any, victim: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        args = (len(env), probe.getsockname()[1], algorithm, victim)
    options: dict[str, Any] = {"backend": None, "fresh": True, "may_die": [victim]}
    errors = run_ranks(len(env), die_in_the_middle, *args, env=hosts(env), **options)
    del errors[victim]
    kinds = {error["type"] for error in errors}
    assert "PeerDiedError" in kinds
    # A rank that learns of it without the store cannot ask who it was.
    assert kinds <= ({"PeerDiedError"} | ({"RingcommError"} if victim == 0 else set())), errors
    for error in errors:
        assert error["type"] != "PeerDiedError" or victim == 0 or error["rank"] == victim, errors
        assert error["seconds"] < 2 * SOON_S + 1, error


# ---- a rank that calls something else


def mismatch(rank: int, is_refused: bool, is_shared: bool) -> dict[str, tuple[str, list[str]]]:
    """Rank 1 calls a barrier, or has one element more."""
    found: dict[str, tuple[str, list[str]]] = {}
    sizes = (SMALL, MIDDLE, LARGE) if is_refused else (LARGE,)
    for name, call in CALLS.items():
        for n in sizes:
            for kind in ("another call", "another size"):
                if (name, kind) == ("send and recv", "another call"):
                    continue  # messages are no calls of the group
                if name == "barrier":
                    continue
                group: Any = dist.new_group()
                tensors = Tensors(rank, ringcomm.empty_shared if is_shared else torch.empty)
                is_other = rank == 1
                made: Callable[[], object] = partial(call, tensors, n + is_other, group)
                if is_other and kind == "another call":
                    made = partial(dist.barrier, group)
                try:
                    made()
                except RingcommError as error:
                    said = tensors.violations(is_refused or name == "send and recv")
                    found[f"{name} of {n}, {kind}"] = (type(error).__name__, said)
                dist.barrier()
                dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize(
    "way", quick([*ENVS, "shm, ring", "shm, in place"], "shm", "shm, in place")
)
def test_a_mismatch_over_shared_memory_has_written_nothing(way: str) -> None:
    """Over messages it may be found in the middle of a call, as a death, or in the next call."""
    env, is_shared = WAYS[way]
    is_shm = way.startswith("shm")
    args = (is_shm, is_shared)
    for found in run_ranks(WORLD_SIZE, mismatch, *args, fresh=True, env=env):
        assert {kinds for kinds, _ in found.values()} == {"MismatchError"}, found
        assert not {name: said for name, (_, said) in found.items() if said}
        names = {name.partition(" of ")[0] for name in found}
        assert not is_shm or names >= CALLS.keys() - {"send and recv", "barrier"}
        assert not is_shm or len(found) >= 6 * (len(CALLS) - 2)


def test_what_must_not_be_written_is_seen() -> None:
    tensors = Tensors(1)
    given, result, changed = tensors.input(4), tensors.output(4), tensors.in_place(4)
    assert not tensors.violations(True)
    result[0], changed[0] = 3, 7  # a part of a result
    assert not tensors.violations(False)
    assert tensors.violations(True) == ["output: has [-1.0, 3.0]", "in place: has [2.0, 7.0]"]
    changed[1] = 0.5
    given[0] = 3
    given.as_strided((1,), (1,), given.storage_offset() - 1).zero_()
    assert tensors.violations(False) == [
        "input: written beside the tensor",
        "input: has [2.0, 3.0]",
        "in place: has [0.5, 2.0, 7.0]",
    ]
