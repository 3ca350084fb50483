"""Ranks that torchrun starts, and ranks on several hosts, made up by RINGCOMM_HOST_ID.

Results over hosts: test_collectives.py, test_random_sequences.py; failures: test_failures.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from curves import Run, mean_losses, single_process
from programs import environment, missing_programs
from rank_programs import run_command
from ranks import hosts, in_ranks, init_group

from ringcomm import _C, Options, RingcommError

HERE = Path(__file__).parent
JOB = str(HERE / "torchrun_job.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
ENV = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent / "support")}
DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}  # which test_backend.py only imitates


def assert_curve(folder: Path, world_size: int, attempt: int, debug: str = "OFF") -> list[str]:
    """What the job has written; returns the transports."""
    reports = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]
    for report in reports:
        found = report["attempt"], report["backend"], report["debug"]
        assert found == (attempt, "ringcomm", debug)
    losses = mean_losses([Run(report["losses"], {}) for report in reports])
    assert losses == pytest.approx(single_process().losses, rel=0, abs=1e-5)
    return [report["transport"] for report in reports]


@pytest.mark.slow
def test_a_worker_dies_once(tmp_path: Path) -> None:
    """torchrun names the rank that died, not the one that missed it, and the next ones go on."""
    launcher = [*TORCHRUN, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    options = ["--nnodes", "1:1", "--max-restarts", "2", JOB, str(tmp_path), "die"]
    done = run_command(*launcher, *options, env=ENV)
    assert done.returncode == 0, done.stderr
    assert "failed (exitcode: -9) local_rank: 1" in done.stderr
    assert_curve(tmp_path, 2, attempt=1)


# ---- hosts: shared memory inside, Gloo between


@in_ranks(4, env=hosts("aabb"))
def test_groups_take_what_reaches_all_their_ranks(rank: int) -> None:
    """Of groups inside a host, across, and of ranks of which no two share one."""
    for ranks, words in (
        ([0, 1], "shm: 1 host"),
        ([0, 2], "no two ranks share a host; 2 hosts"),
        ([1, 2, 3], "between them; 2 hosts"),
    ):
        group: Any = dist.new_group(ranks)
        if rank in ranks:
            dist.barrier(group)
            assert words in _C.transport_of(group._get_backend(torch.device("cpu")))


@in_ranks(2, backend=None, fresh=True, env=hosts("ab"))
def test_ranks_on_different_hosts_that_must_share_memory(rank: int, tmp_path: Path) -> None:
    with pytest.raises(RingcommError, match=r"share no memory.*host-[ab].*host-[ab]"):
        init_group(rank, 2, tmp_path / "store", pg_options=Options(transport="shm"))


def run_nodes(folder: Path, address: str, port: int, in_network: list[str] | None = None) -> None:
    """torchrun on two nodes of two ranks, both at once; each must end well in a minute."""
    commands = [
        [
            *(*TORCHRUN, "--nnodes", "2", "--node-rank", str(node)),
            *("--master-addr", address, "--master-port", str(port), JOB, str(folder), "live"),
        ]
        for node in range(2)
    ]
    hosts = [{"RINGCOMM_HOST_ID": f"node{node}"} for node in range(2)]
    if in_network is not None:
        commands, hosts = [[*in_network, *(" ".join(command) for command in commands)]], [{}]
    processes = [
        subprocess.Popen(
            command,
            env={**environment(), **ENV, **DETAIL, **host},
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
    for text in assert_curve(folder, 4, attempt=0, debug="DETAIL"):
        assert text.startswith("shm inside a host, messages over gloo between them; 2 hosts: "), (
            text
        )
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
    has_tools = not missing_programs("unshare", "nsenter", "ip")
    attempt = [*in_network, "try"] if has_tools else ["false"]
    tried = subprocess.run(
        attempt, env=environment(), capture_output=True, timeout=30.0, check=False
    )
    if tried.returncode == 0:
        run_nodes(tmp_path, "10.211.0.1", 29511, in_network)
        return
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = int(listener.getsockname()[1])
    run_nodes(tmp_path, "127.0.0.1", port)
