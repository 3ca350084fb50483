"""Ranks on several hosts: shared memory inside, Gloo between. The hosts are made up by
RINGCOMM_HOST_ID, but for the last test, which has network namespaces of its own."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from curves import Run, assert_same_run
from ranks import run_ranks
from test_ddp import make_model, single_process, train, wrap
from test_errors import caught
from torch import Tensor

import ringcomm
from ringcomm import Options

# Each letter is the host of its rank.
PLACEMENTS = ["aabb", "abab", "abbccc"]
LARGE = 300_001  # above where all_reduce goes through leaders
DTYPES = [*oracle.FLOATS, *oracle.INTS, torch.bool]
# What a rank's death or lateness takes to be told everywhere, on a busy machine.
SOON_S = 4.0


def run_hosts(placement: str, fn: Any, *args: Any, **options: Any) -> list[Any]:
    env = [{"RINGCOMM_HOST_ID": f"host-{host}"} for host in placement]
    return run_ranks(len(placement), fn, *args, env=env, **options)


def inputs_of(num_elems: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [oracle.integers(r, num_elems, dtype, seed) for r in range(dist.get_world_size())]


# ---- results


def check_reductions(rank: int, dtype: torch.dtype) -> None:
    world_size = dist.get_world_size()
    ops = ["sum", "max"] + (["avg"] if dtype.is_floating_point else [])
    for seed, (num_elems, op) in enumerate(itertools.product([0, 1, 1000, LARGE], ops)):
        root = seed % world_size
        reduce_op = getattr(dist.ReduceOp, op.upper())
        inputs = inputs_of(num_elems, dtype, seed)
        expected = oracle.reduced(inputs, op)
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, reduce_op)
        oracle.assert_equal(tensor, expected)
        tensor = inputs[rank].clone()
        dist.reduce(tensor, root, reduce_op)
        oracle.assert_equal(tensor, expected if rank == root else inputs[rank])
        share = num_elems // world_size
        output = torch.empty(share, dtype=dtype)
        dist.reduce_scatter_tensor(output, inputs[rank][: share * world_size], reduce_op)
        oracle.assert_equal(output, expected[rank * share : (rank + 1) * share])


def check_moves(rank: int, dtype: torch.dtype) -> None:
    world_size = dist.get_world_size()
    for seed, num_elems in enumerate([0, 1, 1000, LARGE]):
        root = seed % world_size
        inputs = inputs_of(num_elems, dtype, seed)
        tensor = inputs[rank].clone()
        dist.broadcast(tensor, root)
        oracle.assert_equal(tensor, inputs[root])
        outputs = [torch.empty_like(tensor) for _ in range(world_size)]
        dist.all_gather(outputs, inputs[rank])
        assert all(map(torch.equal, outputs, inputs))
        gathered = [torch.empty_like(tensor) for _ in range(world_size)] if rank == root else None
        dist.gather(inputs[rank], gathered, root)
        if gathered is not None:
            assert all(map(torch.equal, gathered, inputs))
        dist.scatter(tensor, inputs if rank == root else None, root)
        oracle.assert_equal(tensor, inputs[rank])
        # Rank i has i + j + 1 elements for rank j.
        sizes = [rank + r + 1 for r in range(world_size)]
        wide = oracle.integers(99, 3 * world_size, dtype)
        received = [torch.empty(size, dtype=dtype) for size in sizes]
        dist.all_to_all(received, [wide[rank : rank + size] for size in sizes])
        for r, (part, size) in enumerate(zip(received, sizes, strict=True)):
            oracle.assert_equal(part, wide[r : r + size])
        dist.barrier()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_reductions(placement: str) -> None:
    dtypes = DTYPES if placement == "abab" else [torch.float32, torch.bfloat16]
    for dtype in dtypes:
        run_hosts(placement, check_reductions, dtype)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_moves(placement: str) -> None:
    for dtype in [torch.float32, torch.uint8]:
        run_hosts(placement, check_moves, dtype)


def check_uneven(rank: int) -> None:
    world_size = dist.get_world_size()
    for scale in (1, 20_000):
        sizes = [scale * (r % 3) + r for r in range(world_size)]
        shares = [oracle.integers(r, size, torch.int32) for r, size in enumerate(sizes)]
        outputs = [torch.empty_like(share) for share in shares]
        dist.all_gather(outputs, shares[rank])
        assert all(map(torch.equal, outputs, shares))
        inputs = [[share + r for share in shares] for r in range(world_size)]
        output = torch.empty_like(shares[rank])
        dist.reduce_scatter(output, inputs[rank])
        oracle.assert_equal(output, oracle.reduced([i[rank] for i in inputs], "sum"))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_uneven_shares(placement: str) -> None:
    run_hosts(placement, check_uneven)


def check_messages(rank: int) -> None:
    """A ring of sends, and a receive from any source, on this host or another."""
    world_size = dist.get_world_size()
    for num_elems in (3, LARGE):
        sent = torch.full((num_elems,), float(rank))
        work = dist.isend(sent, (rank + 1) % world_size, tag=7)
        received = torch.empty(num_elems)
        dist.recv(received, (rank - 1) % world_size, tag=7)
        assert work is not None
        work.wait()
        assert (received == (rank - 1) % world_size).all()
    if rank != 0:
        dist.send(torch.tensor([rank]), 0)
        return
    sources = set()
    for _ in range(world_size - 1):
        received = torch.empty(1, dtype=torch.int64)
        source = dist.recv(received)
        assert received.item() == source
        sources.add(source)
    assert sources == set(range(1, world_size))


@pytest.mark.parametrize("placement", ["aabb", "abbccc"])
def test_sends_and_receives(placement: str) -> None:
    run_hosts(placement, check_messages)


def check_many(rank: int) -> None:
    """Asynchronous calls, subgroups inside a host and across, objects, coalesced calls."""
    works = []
    tensors = [torch.full((100 + i,), float(rank + i)) for i in range(10)]
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, async_op=True))
    for work in works:
        work.wait()
    world_size = dist.get_world_size()
    for i, tensor in enumerate(tensors):
        assert (tensor == sum(r + i for r in range(world_size))).all()
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    assert [o["rank"] for o in objects] == list(range(world_size))
    names: dict[int, str] = {}
    for ranks in ([0, 1], [0, 2], [1, 2, 3]):
        group = dist.new_group(ranks)
        if rank not in ranks:
            continue
        assert isinstance(group, dist.ProcessGroup)
        tensor = torch.ones(5000)
        dist.all_reduce(tensor, group=group)
        assert (tensor == len(ranks)).all()
        names[len(names)] = ringcomm._C.transport_of(group._get_backend(torch.device("cpu")))
    if rank == 1:
        assert names[0].startswith("shm: 1 host")
        assert "between them; 2 hosts" in names[1]
    if rank == 2:
        assert "no two ranks share a host; 2 hosts" in names[0]


def test_groups_and_asynchronous_calls() -> None:
    run_hosts("aabb", check_many)


def check_rank_order(rank: int) -> None:
    world_size = dist.get_world_size()
    for num_elems in (7, LARGE):
        inputs = [oracle.floats(r, num_elems, torch.float32) for r in range(world_size)]
        expected = inputs[0].clone()
        for other in inputs[1:]:
            expected += other
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor)
        assert torch.equal(tensor, expected)


def test_rank_order() -> None:
    run_hosts("abab", check_rank_order, pg_options=Options(deterministic="rank_order"))


def train_on_hosts(rank: int) -> Run:
    return train(wrap(make_model()), rank, dist.get_world_size())


def test_ddp_equals_one_process() -> None:
    assert_same_run(run_hosts("aabb", train_on_hosts), single_process())


# ---- failures


def fail(rank: int, how: str, at_fault: int) -> list[dict[str, Any]]:
    dist.all_reduce(torch.ones(LARGE))
    begin = time.monotonic()
    if rank == at_fault:
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "late":
            time.sleep(2.0)
    if rank == at_fault and how == "differ":
        first = caught(lambda: dist.broadcast(torch.ones(20), 0))
    else:
        first = caught(lambda: dist.all_reduce(torch.ones(LARGE)))
    first["seconds"] = time.monotonic() - begin
    return [first, caught(dist.barrier)]


CASES = [(placement, rank) for placement in ("aabb", "abbccc") for rank in (0, 3)]


@pytest.mark.parametrize(("placement", "at_fault"), CASES)
def test_a_rank_dies(placement: str, at_fault: int) -> None:
    results = run_hosts(placement, fail, "die", at_fault, fresh=True, may_die=[at_fault])
    for rank, result in enumerate(results):
        if rank == at_fault:
            continue
        for error in result:
            assert error["type"] == "PeerDiedError", (rank, error)
            assert error["rank"] == at_fault
            assert error["host"] == socket.gethostname()
        assert result[0]["seconds"] < SOON_S


@pytest.mark.parametrize(("placement", "at_fault"), CASES)
def test_a_call_that_differs(placement: str, at_fault: int) -> None:
    for result in run_hosts(placement, fail, "differ", at_fault, fresh=True):
        for error in result:
            assert error["type"] == "MismatchError", result
            assert "broadcast #1" in error["text"]
            assert "all_reduce #1" in error["text"]
        assert result[0]["seconds"] < SOON_S


@pytest.mark.parametrize("at_fault", [0, 3])
def test_a_rank_is_late(at_fault: int) -> None:
    results = run_hosts("aabb", fail, "late", at_fault, fresh=True, group_timeout_s=1.0)
    for result in results:
        for error in result:
            assert error["type"] == "CollectiveTimeoutError", result
        assert result[0]["seconds"] < 2.0 + SOON_S


def make_with_other_options(rank: int) -> dict[str, Any]:
    options = Options(num_slots=3 if rank == 3 else 2)
    store = dist.FileStore(os.environ["HOSTS_TEST_STORE"], 4)
    return caught(
        lambda: dist.init_process_group(
            "ringcomm", store=store, rank=rank, world_size=4, pg_options=options
        )
    )


def test_options_that_differ(tmp_path: Path) -> None:
    env = [
        {"RINGCOMM_HOST_ID": host, "HOSTS_TEST_STORE": str(tmp_path / "store")} for host in "aabb"
    ]
    for error in run_ranks(4, make_with_other_options, backend=None, fresh=True, env=env):
        assert error["type"] == "MismatchError"
        assert "num_slots=3" in error["text"]


def make_again(rank: int, folder: str) -> None:
    """Groups over one store, one after the other, the last with other options."""
    store = dist.FileStore(folder + "/store", 4)
    for num_slots in (2, 2, 3):
        dist.init_process_group(
            "ringcomm",
            store=store,
            rank=rank,
            world_size=4,
            pg_options=Options(num_slots=num_slots),
        )
        tensor = torch.ones(LARGE)
        dist.all_reduce(tensor)
        assert (tensor == 4).all()
        dist.destroy_process_group()


def test_groups_made_again_over_one_store(tmp_path: Path) -> None:
    run_hosts("abba", make_again, str(tmp_path), backend=None, fresh=True)


# ---- programs

PROGRAM = """
import os, sys
import torch, torch.distributed as dist
import ringcomm
dist.init_process_group("ringcomm")
rank, size = dist.get_rank(), dist.get_world_size()
for num_elems in (10, 200_000):
    tensor = torch.full((num_elems,), float(rank + 1))
    dist.all_reduce(tensor)
    assert (tensor == size * (size + 1) / 2).all()
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
with open(f"{sys.argv[1]}/{rank}", "w") as file:
    file.write(ringcomm._C.transport_of(backend))
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def torchrun(program: Path, folder: Path, node: int, address: str, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"),
        *("--master-addr", address, "--master-port", str(port), str(program), str(folder)),
    ]


def check_program(folder: Path) -> None:
    for rank in range(4):
        text = (folder / str(rank)).read_text()
        assert text.startswith("shm inside a host, p2p over gloo between them; 2 hosts: "), text
        assert "(ranks 0 1)" in text
        assert "(ranks 2 3)" in text


def run_all(commands: list[list[str]], envs: list[dict[str, str]]) -> None:
    """All at once; every one must end well in a minute."""
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for command, env in zip(commands, envs, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=60.0)[0].decode() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs


def test_torchrun_with_two_nodes(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    port = free_port()
    commands = [torchrun(program, tmp_path, node, "127.0.0.1", port) for node in range(2)]
    run_all(commands, [{"RINGCOMM_HOST_ID": f"node{node}"} for node in range(2)])
    check_program(tmp_path)


# Two network namespaces with a cable between them, in a user namespace of their own. $1 and $2 are
# what runs in each; both end with the script.
NETWORK = """
set -e
trap 'kill $other 2>/dev/null' EXIT
unshare -n sleep 120 & other=$!
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.01; done
ip link set lo up
ip link add ringcomm0 type veth peer name ringcomm1
ip link set ringcomm1 netns $other
ip address add 10.211.0.1/24 dev ringcomm0
ip link set ringcomm0 up
nsenter -t $other -n sh -c 'ip link set lo up; ip address add 10.211.0.2/24 dev ringcomm1;
    ip link set ringcomm1 up'
[ "$1" = try ] && exit 0
GLOO_SOCKET_IFNAME=ringcomm1 nsenter -t $other -n sh -c "$2" & second=$!
GLOO_SOCKET_IFNAME=ringcomm0 sh -c "$1"
wait $second
"""


def test_two_network_namespaces(tmp_path: Path) -> None:
    if any(shutil.which(name) is None for name in ("unshare", "nsenter", "ip")):
        pytest.skip("no unshare, nsenter or ip: apt-get install util-linux iproute2")
    in_network = ["unshare", "-rn", "sh", "-c", NETWORK, "sh"]
    attempt = subprocess.run(
        [*in_network, "try"], capture_output=True, text=True, timeout=30.0, check=False
    )
    if attempt.returncode != 0:
        pytest.skip(f"network namespaces are not permitted here: {attempt.stderr.strip()}")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    commands = [
        " ".join(torchrun(program, tmp_path, node, "10.211.0.1", 29511)) for node in range(2)
    ]
    run_all([[*in_network, *commands]], [{}])
    check_program(tmp_path)
