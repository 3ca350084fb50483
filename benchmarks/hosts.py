#!/usr/bin/env python3
"""Collectives between two hosts: ringcomm beside Gloo alone, in turn.

    python benchmarks/hosts.py --ranks-per-host 1,2 --cable 1gbit

The hosts are two network namespaces of this machine, made in a user namespace of this script's own
and joined by a cable (veth) whose rate tc limits. They need Linux's unshare, nsenter, ip and tc.
What separate machines differ in, such as the latency of a switch, is not in these figures.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import harness  # before torch: it sets the number of threads
import torch
from groups import labelled, open_groups
from harness import Bench, Options, flag
from operations import OPERATIONS
from point import measure_point
from programs import environment, missing_programs

from _ringcomm.status import EXIT_OK, EXIT_WRONG_RESULTS, RankError, run_main
from _ringcomm.values import byte_counts, several, whole, words
from ringcomm.measure.ranks import joined_world_size

OPS = "all_reduce,reduce_scatter,all_gather,all_to_all,broadcast"
TOOLS = ("unshare", "nsenter", "ip", "tc")
ADDRESSES, PORT = ("10.211.0.1", "10.211.0.2"), 29555
IN_NAMESPACE = "_RINGCOMM_BENCH_IN_NAMESPACE"
LIMIT_S = 1800.0
START_S = 60.0  # of a command, and until the second host has ended, on a busy machine


def run_rank(bench: Bench, options: Options) -> None:
    """Times each operation and size; rank 0 reports records. Collective."""
    bench = replace(bench, groups=open_groups(bench.team, labelled(["ringcomm", "gloo"])))
    for op in options.ops:
        for num_bytes in options.sizes:
            bench.report(measure_point(bench, op, num_bytes, torch.float32))


def join_hosts(cable: str) -> subprocess.Popen[bytes]:
    """Makes the second host and the cable; returns the process that keeps the host."""
    with_tools = environment()
    other = subprocess.Popen(["unshare", "-n", "sleep", str(LIMIT_S)], env=with_tools)
    mine, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + START_S
    while os.readlink(f"/proc/{other.pid}/ns/net") == mine:
        if other.poll() is not None or time.monotonic() > deadline:
            raise RankError("unshare made no second network namespace")
        time.sleep(0.01)
    here, there = "", f"nsenter -t {other.pid} -n "
    lines = ["ip link add rc0 type veth peer name rc1", f"ip link set rc1 netns {other.pid}"]
    for where, name, address in ((here, "rc0", ADDRESSES[0]), (there, "rc1", ADDRESSES[1])):
        lines += [
            f"{where}ip link set lo up",
            f"{where}ip address add {address}/24 dev {name}",
            f"{where}ip link set {name} up",
        ]
        if cable != "none":
            rate = f"tbf rate {cable} burst 256kb latency 50ms"
            lines.append(f"{where}tc qdisc add dev {name} root {rate}")
    for line in lines:
        subprocess.run(line.split(), env=with_tools, check=True, timeout=START_S)
    return other


def race(num_ranks: int, options: Options, argv: list[str]) -> int:
    """Starts torchrun on both hosts; returns the first one's status."""
    other = join_hosts(options.cable)
    job = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    job += ["--nproc-per-node", str(num_ranks), "--master-addr", ADDRESSES[0]]
    job += ["--master-port", str(PORT)]
    script = [str(Path(__file__).resolve()), *argv, "--json", str(options.json)]
    quiet = {**environment(), "PYTHONWARNINGS": "ignore"}
    second = subprocess.Popen(
        ["nsenter", "-t", str(other.pid), "-n", *job, "--node-rank", "1", *script],
        env={**quiet, "GLOO_SOCKET_IFNAME": "rc1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        first = subprocess.run(
            [*job, "--node-rank", "0", *script],
            env={**quiet, "GLOO_SOCKET_IFNAME": "rc0"},
            timeout=LIMIT_S,
            check=False,
        )
        second.wait(START_S)
        return first.returncode
    finally:
        for process in (second, other):
            process.kill()
            process.wait()


def check(options: Options) -> None:
    """Raises ValueError where a tool is missing."""
    if missing := missing_programs(*TOOLS):
        raise ValueError(f"not installed: {', '.join(missing)} (Debian: util-linux, iproute2)")


WORLD_SIZE = joined_world_size() or 1
PROGRAM = harness.Program(
    doc=__doc__,
    kind="hosts",
    rank=run_rank,
    world=WORLD_SIZE,
    seconds=2.0,
    per="operation and size",
    flags=[
        flag("--ranks-per-host", several(whole(1)), "1,2", "on each of two hosts"),
        flag("--cable", str, "1gbit", "its rate, as tc names it, or none for no limit"),
        flag("--ops", words, OPS, "operations", known=OPERATIONS),
        flag("--sizes", byte_counts, "1k,64k,1m,16m", "bytes"),
    ],
    check=check,
    named=("cable",),
    facts=lambda _: {"ranks_per_host": WORLD_SIZE // len(ADDRESSES), "dtype": "float32"},
)


def main(argv: list[str]) -> int:
    """Measures each number of ranks in namespaces of its own; returns the exit code."""
    if joined_world_size() is not None:  # a rank of torchrun
        return PROGRAM.main(argv)
    options = PROGRAM.parse(argv)
    if os.environ.get(IN_NAMESPACE):
        return race(options.ranks_per_host[0], options, argv)
    statuses = []
    for num_ranks in options.ranks_per_host:
        own = [sys.executable, __file__, *argv, "--ranks-per-host", str(num_ranks)]
        done = subprocess.run(
            ["unshare", "-rn", *own, "--json", str(options.json)],
            env={**environment(), IN_NAMESPACE: "1"},
            check=False,
        )
        statuses.append(done.returncode)
    return EXIT_WRONG_RESULTS if EXIT_WRONG_RESULTS in statuses else max(statuses, default=EXIT_OK)


if __name__ == "__main__":
    sys.exit(run_main("hosts.py", main))
