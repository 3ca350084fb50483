#!/usr/bin/env python3
"""Measures collectives with 1, 2, ... threads of each rank, and what memory allows.

    ringcomm bench cores --worlds 2,4 --ops all_reduce,all_gather --json cores.jsonl

Each rank is pinned to cores of its own where there are enough. "1 thread" and the others are
groups with that Options(max_threads=); "auto" is what a group chooses by itself. "memory" scales
the rank's buffer in place, by all ranks and all their threads at once: each byte read and written
once. It is measured before the others, because its threads spin for a while after each call. The
record has the processor's name, its cores and nodes, and the model's costs and time (--tuning), so
that it can be sent.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, replace
from functools import partial

import front_door
import harness  # before torch: it sets the number of threads
import torch
from cells import Record, comparison
from groups import open_groups
from harness import Bench, Options
from operations import OPERATIONS, RINGCOMM
from point import algorithms_used, count_wrong, make_buffers, make_contender, num_calls

import ringcomm
from ringcomm import tuning
from ringcomm.cost_model import OPERATIONS as MODELLED
from ringcomm.cost_model import Machine
from ringcomm.measure.machine import num_nodes
from ringcomm.screen import counted

MEMORY, AUTO = "memory", "auto"
# Threads that spin after a kernel sleep by then (docs/decisions.md).
SPIN_S = 0.05


def default_threads(world_size: int) -> list[int]:
    """1, 2, 4, ... and as many as each rank has cores."""
    most = max(1, len(os.sched_getaffinity(0)) // world_size)
    return sorted({1, most, *(1 << power for power in range(most.bit_length()))})


def pin(rank: int, world_size: int, num_threads: int) -> bool:
    """To cores of this rank; False, and nothing is done, where ranks would share them."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // world_size
    if each < num_threads:
        return False
    os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each])
    return True


def run_rank(bench: Bench, options: Options) -> None:
    """Every operation and size in turn; rank 0 reports each one's records."""
    team = bench.team
    counts = options.threads or default_threads(team.world_size)
    machine = options.machine
    is_pinned = pin(team.rank, team.world_size, max(counts))  # before torch's threads begin
    torch.set_num_threads(max(counts))
    limited = {counted(num, "thread"): ringcomm.Options(max_threads=num) for num in counts}
    limited[AUTO] = ringcomm.Options()
    # The default group may be Gloo's.
    groups = open_groups(team, dict.fromkeys((RINGCOMM, *limited), RINGCOMM), limited)
    default = {RINGCOMM: groups.pop(RINGCOMM)}
    for op in options.ops:
        for num_bytes in options.sizes:
            buffers = make_buffers(
                replace(bench, groups=default), OPERATIONS[op], num_bytes, torch.float32
            )
            wrong = count_wrong(replace(bench, groups=groups), OPERATIONS[op], buffers)
            scaled = torch.zeros(max(1, num_bytes // 4))
            scaling = bench.contender(partial(scaled.mul_, 1), default[RINGCOMM])
            facts = {"op": op, "bytes": scaled.nbytes, "is_pinned": is_pinned}
            facts |= {"nodes": machine.nodes, "costs": asdict(machine.costs)}
            bench.report(bench.race({MEMORY: scaling}, MEMORY, name="threads", **facts))
            time.sleep(SPIN_S)
            contenders = {
                label: make_contender(bench, OPERATIONS[op], buffers, group)
                for label, group in groups.items()
            }
            # Threads of one contender would spin on the cores of the next.
            races = [contenders] if is_pinned else [{one: contenders[one]} for one in contenders]
            for race in races:
                torch.set_num_threads(max(counts) if is_pinned else threads_of(next(iter(race))))
                before = {label: num_calls(groups[label]) for label in race}
                found = bench.race(race, next(iter(race)), wrong, name="threads", **facts)
                for record in found:
                    label = record["threads"]
                    record["algorithm"] = algorithms_used(before[label], num_calls(groups[label]))
                bench.report([modelled(record, machine, team.world_size) for record in found])
                time.sleep(SPIN_S)


def machine_of(options: Options) -> Machine:
    """The cores of this machine, before ranks are pinned, with the costs of --tuning.

    Raises ValueError where it cannot be read.
    """
    cores = len(os.sched_getaffinity(0))
    if options.tuning is None:
        return Machine(cores, num_nodes())
    try:
        return replace(tuning.load(options.tuning).host, cores=cores, nodes=num_nodes())
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None


def check(options: Options) -> None:
    """Reads the machine before ranks start."""
    options.machine = machine_of(options)


def threads_of(label: str) -> int:
    """Of a contender; what a group chooses itself is one where ranks share cores."""
    return 1 if label == AUTO else int(label.split(maxsplit=1)[0])


def modelled(record: Record, machine: Machine, world_size: int) -> Record:
    """With the model's time, and how many times as long the measured one is."""
    if record["op"] not in MODELLED or record["threads"] == AUTO:
        return record
    threads = threads_of(record["threads"])
    expected = machine.microseconds(record["op"], record["bytes"], world_size, threads)
    return record | {"model_us": expected, "measured_over_model": record["p50_us"] / expected}


PROGRAM = harness.Program(
    **vars(front_door.CORES),
    kind="cores",
    rank=run_rank,
    check=check,
    columns=[
        *("ranks", "op", "bytes", "threads", "p50 µs", "p99 µs"),
        ("time / one thread's", comparison),
        (
            "time / model's",
            lambda r: f"{r['measured_over_model']:.2f}" if "measured_over_model" in r else "",
        ),
        ("own cores", lambda r: "yes" if r["is_pinned"] else "no"),
        "state",
    ],
    section=("world_size", "op", "bytes"),
    caption="Time / one thread's: median (10th to 90th percentile). Own cores: whether each thread"
    " of every rank has one.",
)
run = PROGRAM.run

if __name__ == "__main__":
    PROGRAM.run_script()
