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
from ranks import in_ranks, run_ranks

from ringcomm import _C, Options, RingcommError


def check_transports(rank: int) -> dict[str, str]:
    """Of groups inside a host, across, and of ranks of which no two share one."""
    names = {}
    for ranks in ([0, 1], [0, 2], [1, 2, 3]):
        group: Any = dist.new_group(ranks)
        if rank in ranks:
            dist.barrier(group)
            names[str(ranks)] = _C.transport_of(group._get_backend(torch.device("cpu")))
    return names


def test_groups_take_what_reaches_all_their_ranks() -> None:
    env = [{"RINGCOMM_HOST_ID": f"host-{host}"} for host in "aabb"]
    names = run_ranks(4, check_transports, env=env)
    assert names[0]["[0, 1]"].startswith("shm: 1 host")
    assert "no two ranks share a host; 2 hosts" in names[2]["[0, 2]"]
    assert "between them; 2 hosts" in names[1]["[1, 2, 3]"]


MACHINES = [{"RINGCOMM_HOST_ID": f"machine{rank}"} for rank in range(2)]


@in_ranks(2, backend=None, fresh=True, env=MACHINES)
def test_ranks_on_different_hosts_that_must_share_memory(rank: int, tmp_path: Path) -> None:
    store, options = dist.FileStore(str(tmp_path / "store"), 2), Options(transport="shm")
    with pytest.raises(RingcommError, match=r"share no memory.*machine[01].*machine[01]"):
        dist.init_process_group(
            "ringcomm", store=store, rank=rank, world_size=2, pg_options=options
        )


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
def test_torchrun_with_two_nodes(tmp_path: Path) -> None:
    """In two network namespaces, where a user may make them; else both on the loopback device."""
    in_network = ["unshare", "-rn", "sh", "-c", NETWORK, "sh"]
    has_tools = all(shutil.which(name) for name in ("unshare", "nsenter", "ip"))
    attempt = [*in_network, "try"] if has_tools else ["false"]
    if subprocess.run(attempt, capture_output=True, timeout=30.0, check=False).returncode == 0:
        run_nodes(tmp_path, "10.211.0.1", 29511, in_network)
        return
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = int(listener.getsockname()[1])
    run_nodes(tmp_path, "127.0.0.1", port)
