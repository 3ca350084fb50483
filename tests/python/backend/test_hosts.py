"""Ranks on several hosts: shared memory inside, Gloo between. The hosts are made up by
RINGCOMM_HOST_ID, but for the last test, which has network namespaces of its own.

Results over hosts: test_collectives.py, test_random_sequences.py; failures: test_faults.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_errors import caught

import ringcomm
from ringcomm import Options


def transport(group: Any) -> str:
    return ringcomm._C.transport_of(group._get_backend(torch.device("cpu")))


def check_transports(rank: int) -> dict[str, str]:
    """Of groups inside a host, across, and of ranks of which no two share one."""
    names = {}
    for ranks in ([0, 1], [0, 2], [1, 2, 3]):
        group = dist.new_group(ranks)
        if rank in ranks:
            tensor = torch.ones(5000)
            dist.all_reduce(tensor, group=group)
            assert (tensor == len(ranks)).all()
            names[str(ranks)] = transport(group)
    return names


def test_groups_take_what_reaches_all_their_ranks() -> None:
    env = [{"RINGCOMM_HOST_ID": f"host-{host}"} for host in "aabb"]
    names = run_ranks(4, check_transports, env=env)
    assert names[0]["[0, 1]"].startswith("shm: 1 host")
    assert "no two ranks share a host; 2 hosts" in names[2]["[0, 2]"]
    assert "between them; 2 hosts" in names[1]["[1, 2, 3]"]


def need_shared_memory(rank: int, folder: str) -> dict[str, Any]:
    store, options = dist.FileStore(folder + "/store", 2), Options(transport="shm")
    return caught(
        lambda: dist.init_process_group(
            "ringcomm", store=store, rank=rank, world_size=2, pg_options=options
        )
    )


def test_ranks_on_different_hosts_that_must_share_memory(tmp_path: Path) -> None:
    env = [{"RINGCOMM_HOST_ID": f"machine{rank}"} for rank in range(2)]
    args = (2, need_shared_memory, str(tmp_path))
    for error in run_ranks(*args, backend=None, fresh=True, env=env):
        assert error["type"] == "RingcommError"
        assert all(word in error["text"] for word in ("share no memory", "machine0", "machine1"))


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


def run_nodes(folder: Path, address: str, port: int, in_network: list[str] | None = None) -> None:
    """torchrun on two nodes of two ranks, both at once; each must end well in a minute."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    commands = [
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"),
            *("--master-addr", address, "--master-port", str(port), str(program), str(folder)),
        ]
        for node in range(2)
    ]
    hosts = [{"RINGCOMM_HOST_ID": f"node{node}"} for node in range(2)]
    if in_network is not None:
        commands, hosts = [[*in_network, *(" ".join(command) for command in commands)]], [{}]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **host},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for command, host in zip(commands, hosts, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=60.0)[0].decode() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    for rank in range(4):
        text = (folder / str(rank)).read_text()
        assert text.startswith("shm inside a host, p2p over gloo between them; 2 hosts: "), text
        assert "(ranks 0 1)" in text
        assert "(ranks 2 3)" in text


@pytest.mark.slow
def test_torchrun_with_two_nodes(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = int(listener.getsockname()[1])
    run_nodes(tmp_path, "127.0.0.1", port)


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


@pytest.mark.slow
def test_two_network_namespaces(tmp_path: Path) -> None:
    if any(shutil.which(name) is None for name in ("unshare", "nsenter", "ip")):
        pytest.skip("no unshare, nsenter or ip: apt-get install util-linux iproute2")
    in_network = ["unshare", "-rn", "sh", "-c", NETWORK, "sh"]
    attempt = subprocess.run(
        [*in_network, "try"], capture_output=True, text=True, timeout=30.0, check=False
    )
    if attempt.returncode != 0:
        pytest.skip(f"network namespaces are not permitted here: {attempt.stderr.strip()}")
    run_nodes(tmp_path, "10.211.0.1", 29511, in_network)
