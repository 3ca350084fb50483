"""`ringcomm doctor`: measures a group of ringcomm on this machine and reports problems."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from functools import partial
from itertools import combinations
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist

import ringcomm
from ringcomm import _C, tuning
from ringcomm.backend import resolve_group
from ringcomm.measure import machine
from ringcomm.measure.ranks import RankError, Team, run_ranks
from ringcomm.measure.screen import byte_count
from ringcomm.measure.timing import Contender, measure, open_default_group
from ringcomm.torch_names import backend_of

MIB = 1 << 20
INIT_TIMEOUT = timedelta(seconds=30)
# One size per algorithm; the last does not fit in a core's cache.
ALL_REDUCE_BYTES = (1 << 10, 256 << 10, 16 << 20)
LATENCY_BYTES = 1 << 10
BANDWIDTH_BYTES = 4 << 20
NUM_TRIPS = {LATENCY_BYTES: 200, BANDWIDTH_BYTES: 10}
# With more ranks only neighbours are timed, because the number of pairs grows with the square.
MAX_WORLD_OF_ALL_PAIRS = 8
# Read by csrc/, losses and the build; each of the others stands for a field of ringcomm.Options.
OTHER_VARIABLES = (
    *("RINGCOMM_AS_GLOO", "RINGCOMM_SIMD", "RINGCOMM_HOST_ID", "RINGCOMM_CHECK_TARGETS"),
    *("RINGCOMM_CUDA", "RINGCOMM_CUDA_ARCHS", "RINGCOMM_CUDA_DRIVER", "RINGCOMM_CUDA_IMAGE"),
    *("RINGCOMM_TRACE", "RINGCOMM_TRACE_EVENTS"),
    *(
        "RINGCOMM_PREBUILT",
        "RINGCOMM_USE_ENV",
        "RINGCOMM_TORCH_INDEX",
        "RINGCOMM_MAX_JOBS",
        "RINGCOMM_WERROR",
    ),
)


def known_variables() -> set[str]:
    """The names of all environment variables that ringcomm reads."""
    options = {f"RINGCOMM_{field.name.upper()}" for field in fields(ringcomm.Options)}
    return options | set(OTHER_VARIABLES)


def _num_all_reduces() -> dict[str, int]:
    """By algorithm."""
    found = ringcomm.stats(dist.group.WORLD)
    return {how: entry["num_calls"] for (op, how), entry in found.items() if op == "all_reduce"}


def _all_reduces(team: Team, seconds: float) -> list[dict[str, Any]]:
    """Times of all_reduce with the algorithms that it selects; returns on rank 0. Collective."""
    found = []
    for num_bytes in ALL_REDUCE_BYTES:
        before = _num_all_reduces()
        call = partial(dist.all_reduce, torch.zeros(num_bytes // 4))
        timings = measure(team, {"ringcomm": Contender(call, dist.barrier)}, seconds)
        used = [how for how, num in _num_all_reduces().items() if num > before.get(how, 0)]
        if timings is not None:
            us = timings["ringcomm"].summary_us()
            share = 2 * (team.world_size - 1) / team.world_size  # of the bytes, sent over a link
            times = {"p50_us": us["p50_us"], "p99_us": us["p99_us"]}
            times["busbw_gb_per_s"] = num_bytes / us["p50_us"] / 1e3 * share
            found.append({"bytes": num_bytes, "algorithms": sorted(used), **times})
    return found


def _trip_us(peer: int, num_bytes: int, is_first: bool) -> float:
    """Half the median round-trip time of a message, in µs."""
    buffer = torch.zeros(num_bytes // 4)
    seconds = []
    for _ in range(NUM_TRIPS[num_bytes]):
        begin = time.perf_counter()
        for is_sending in (is_first, not is_first):
            if is_sending:
                dist.send(buffer, peer)
            else:
                dist.recv(buffer, peer)
        seconds.append(time.perf_counter() - begin)
    return 1e6 * median(seconds[1:]) / 2


def _pairs(team: Team, said: str) -> list[dict[str, Any]]:
    """Transport and message times of every pair, or of neighbours if there are many. Collective.

    `said` are the engine's words: "shm: one host, ..." or "p2p over gloo, as asked for; ...".
    """
    transport, why = said[:3], said[3:].strip(": ")
    found = []
    for first, second in combinations(range(team.world_size), 2):
        entry: dict[str, Any] = {"ranks": [first, second], "transport": transport, "why": why}
        if team.world_size <= MAX_WORLD_OF_ALL_PAIRS or second == first + 1:
            team.share(None)  # the others sleep meanwhile
            mine = {}
            if team.rank in (first, second):
                peer = first + second - team.rank
                mine = {size: _trip_us(peer, size, team.rank == first) for size in NUM_TRIPS}
            us = team.share(mine)[first]
            entry["latency_us"] = us[LATENCY_BYTES]
            entry["gb_per_s"] = BANDWIDTH_BYTES / us[BANDWIDTH_BYTES] / 1e3
        found.append(entry)
    return found


def _run_rank(team: Team, seconds: float) -> None:
    """Rank 0 reports results one by one, so that those before a failure are kept."""

    def tell(**parts: Any) -> None:
        if team.rank == 0:
            team.report(parts)

    begin = time.perf_counter()
    error = None
    try:
        open_default_group(team, "ringcomm", INIT_TIMEOUT)
    except Exception as problem:  # show any error to the user
        error = f"{type(problem).__name__}: {problem}"
    init_s = max(team.share(time.perf_counter() - begin))
    errors = [f"rank {rank}: {text}" for rank, text in enumerate(team.share(error)) if text]
    if errors:
        tell(errors=errors)
        return
    watch = machine.OthersWatch([os.getppid(), *team.share(os.getpid())])
    tell(init_s=init_s, all_reduce=_all_reduces(team, seconds))
    backend = backend_of(resolve_group(), torch.device("cpu"))
    pairs = _pairs(team, _C.transport_of(backend))
    # All ranks map the group's shared memory: one segment, charged once.
    resident = sum(team.share(machine.mapped_memory()["share_bytes"]))
    memory = {"mapped_bytes": _C.mapped_bytes(backend), "resident_bytes": resident}
    tell(pairs=pairs, memory=memory)
    tell(others_busy_percent=watch.percent())
    team.share(None)  # a rank that has ended would count for the others
    dist.destroy_process_group()


def _notes(report: dict[str, Any], world_size: int) -> Iterator[str]:
    """Problems that the parts of a report show."""
    group, known, variables = report["group"], report["machine"], report["environment"]
    yield from (f"the group could not be created: {text}" for text in group.get("errors", []))
    if group.get("others_busy_percent", 0.0) > machine.MAX_OTHERS_PERCENT:
        yield (
            f"other programs used {group['others_busy_percent']:.0f} % of the machine during the"
            " measurement: times are longer than on an idle machine"
        )
    num_cores = min(report["cpus"]["num_cores"] or known["cores"], known["cores"])
    if world_size > num_cores:
        yield f"{world_size} ranks on {num_cores} core(s): the ranks have to take turns"
    allowed, file = report["limits"]["cpu_cores"] or (float("inf"), "")
    if allowed < min(world_size, len(os.sched_getaffinity(0))):
        yield (
            f"the container may use {allowed:g} CPUs ({file}): {world_size} busy ranks are"
            " throttled"
        )
    for name in sorted(variables.keys() - known_variables()):
        yield f"{name} is set, but ringcomm has no such variable"
    if (path := variables.get("RINGCOMM_TUNING")) is None:
        return
    try:
        found = tuning.load(path)
    except (OSError, ValueError) as error:
        yield f"RINGCOMM_TUNING: {error}"
        return
    yield from (f"RINGCOMM_TUNING: {path}: {text}" for text in found.differences(known))
    if found.one_shot_max_bytes(world_size) is None:
        yield f"RINGCOMM_TUNING: {path} has no entry for {world_size} ranks"


def examine(world_size: int, seconds: float) -> dict[str, Any]:
    """The report that --json prints; has `group.errors` if the group cannot be made."""
    limits, known, memory = machine.read_limits(), machine.identity(), psutil.virtual_memory()
    group: dict[str, Any] = {}
    try:
        run_ranks(world_size, lambda team: _run_rank(team, seconds), group.update)
    except RankError as error:
        group["errors"] = [str(error)]
    report = {
        "versions": machine.versions(),
        "machine": {
            **known,
            "total_bytes": memory.total,
            "available_bytes": memory.available,
            "load": psutil.getloadavg(),
        },
        "cpus": {
            "num_online": os.cpu_count(),
            "num_cores": psutil.cpu_count(logical=False),
            "usable": sorted(os.sched_getaffinity(0)),
        },
        "limits": limits,
        "environment": machine.variables("RINGCOMM_"),
        "world_size": world_size,
        "group": group,
    }
    return dict(machine.rounded({**report, "notes": list(_notes(report, world_size))}))


def _words(value: Any) -> str:
    """A part of the report in a line."""
    if isinstance(value, dict):
        parts = [f"{name} {_words(part)}" for name, part in value.items() if part not in (None, [])]
        return ", ".join(parts)
    if isinstance(value, (list, tuple)):
        return "; ".join(map(_words, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return byte_count(value) if isinstance(value, int) and value > MIB else f"{value}"


def print_report(report: dict[str, Any]) -> None:
    """Prints a line for each part and for each measurement of the group, then the problems."""
    for name in ("versions", "machine", "cpus", "limits", "environment"):
        print(f"{name}: {_words(report[name]) or 'nothing is set'}")
    print(f"\na group of {report['world_size']} rank(s)")
    for name, found in report["group"].items():
        for one in found if isinstance(found, list) else [found]:
            print(f"{name}: {_words(one)}")
    print()
    for note in report["notes"] or ["no problems found"]:
        print(f"• {note}")
