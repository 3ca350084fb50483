#!/usr/bin/env python3
"""Collectives between two hosts: ringcomm beside Gloo alone, in turn.

    python benchmarks/hosts.py --ranks-per-host 1,2 --cable 1gbit

The hosts are two network namespaces of this machine, made in a user namespace of this script's own
and joined by a cable (veth) whose rate tc limits. They need Linux's unshare, nsenter, ip and tc.
What separate machines differ in, such as the latency of a switch, is not in these figures.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import harness  # before torch: it sets the number of threads
import torch
from cells import Record
from groups import labelled, open_groups, run_ranks
from harness import Bench, Options, Report, flag
from operations import OPERATIONS
from point import measure_point
from programs import environment, missing_programs

from _ringcomm.status import RankError, run_main
from _ringcomm.values import byte_counts, several, whole, words

OPS = "all_reduce,reduce_scatter,all_gather,all_to_all,broadcast"
TOOLS = ("unshare", "nsenter", "ip", "tc")
INTERFACES, ADDRESSES = ("rc0", "rc1"), ("10.211.0.1", "10.211.0.2")
IN_NAMESPACE = "_RINGCOMM_BENCH_IN_NAMESPACE"
LIMIT_S = 3600.0
START_S = 60.0  # of a command, on a busy machine


def run_rank(bench: Bench, options: Options) -> None:
    """Goes to its host, and times each operation and size; rank 0 reports records. Collective."""
    host = 2 * bench.team.rank // bench.team.world_size
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACES[host]
    if host == 1:
        enter(options.other_host)
    bench = replace(bench, groups=open_groups(bench.team, labelled(["ringcomm", "gloo"])))
    for op in options.ops:
        for num_bytes in options.sizes:
            bench.report(measure_point(bench, op, num_bytes, torch.float32))


def enter(pid: int) -> None:
    """Takes this thread, and those that it will start, to the network of another process."""
    with open(f"/proc/{pid}/ns/net", encoding="ascii") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "setns", namespace.name)


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
    for where, name, address in zip((here, there), INTERFACES, ADDRESSES, strict=True):
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


def measure(options: Options, report: Report) -> None:
    """Each number of ranks in turn, between the same hosts."""
    other = join_hosts(options.cable)
    options.other_host = other.pid
    try:
        for num_ranks in options.ranks_per_host:
            facts = {"world_size": len(ADDRESSES) * num_ranks, "ranks_per_host": num_ranks}

            def add(records: list[Record], facts: Record = facts) -> None:
                report.add([facts | record for record in records])

            run_ranks(facts["world_size"], partial(PROGRAM.run_rank, options=options), add)
    finally:
        other.kill()
        other.wait()


def check(options: Options) -> None:
    """Raises ValueError where a tool is missing."""
    if missing := missing_programs(*TOOLS):
        raise ValueError(f"not installed: {', '.join(missing)} (Debian: util-linux, iproute2)")


PROGRAM = harness.Program(
    doc=__doc__,
    kind="hosts",
    rank=run_rank,
    measure=measure,
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
    facts=lambda _: {"dtype": "float32"},
)


def main(argv: list[str]) -> int:
    """Checks the command line, and measures in a namespace; returns the exit code."""
    if os.environ.get(IN_NAMESPACE):
        return PROGRAM.main(argv)
    options = PROGRAM.parse(argv)
    command = ["unshare", "-rn", sys.executable, __file__, *argv, "--json", str(options.json)]
    return subprocess.call(command, env={**environment(), IN_NAMESPACE: "1"})


if __name__ == "__main__":
    sys.exit(run_main("hosts.py", main))
