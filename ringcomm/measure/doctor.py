"""`ringcomm doctor`: measures a group of ringcomm on this machine and reports problems."""

import os
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from importlib.metadata import entry_points
from itertools import combinations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import ringcomm
from _ringcomm.status import RankError
from _ringcomm.values import MAX_OTHERS_PERCENT
from ringcomm import _C, tuning
from ringcomm.backend import resolve_group
from ringcomm.measure import machine
from ringcomm.measure.ranks import Team, run_ranks
from ringcomm.measure.timing import Contender, measure, open_default_group
from ringcomm.options import unknown_variables
from ringcomm.screen import byte_count, counted, in_gib, in_seconds
from ringcomm.torch_names import backend_of

INIT_TIMEOUT = timedelta(seconds=30)
# One size per algorithm; the last does not fit in a core's cache.
ALL_REDUCE_BYTES = (1 << 10, 256 << 10, 16 << 20)
LATENCY_BYTES = 1 << 10
BANDWIDTH_BYTES = 4 << 20
NUM_TRIPS = {LATENCY_BYTES: 200, BANDWIDTH_BYTES: 10}
LEAST_SHARE_OF_COPY = 0.1
MAX_P99 = 50  # over the median: a rank waited for a core, or for several turns of other programs
# With more ranks only neighbours are timed, because the number of pairs grows with the square.
MAX_WORLD_OF_ALL_PAIRS = 8
# With one of them OpenMP moves the main thread to one place when torch is imported, in each rank to
# the same one.
PINNING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def _num_all_reduces() -> dict[str, int]:
    found = ringcomm.stats(dist.group.WORLD)
    return {how: entry["num_calls"] for (op, how), entry in found.items() if op == "all_reduce"}


def _all_reduces(team: Team, seconds: float) -> list[dict[str, Any]]:
    """Times of all_reduce with the algorithms that it selects; returns on rank 0. Collective."""
    found = []
    for num_bytes in ALL_REDUCE_BYTES:
        before = _num_all_reduces()
        buffer = torch.zeros(num_bytes // 4, dtype=torch.float32)
        call = partial(dist.all_reduce, buffer)
        timings = measure(team, {"ringcomm": Contender(call, dist.barrier)}, seconds)
        used = [how for how, num in _num_all_reduces().items() if num > before.get(how, 0)]
        if timings is not None:
            us = timings["ringcomm"].summary_us()
            share = 2 * (team.world_size - 1) / team.world_size  # of the bytes, sent over a link
            times = {"p50_us": us["p50_us"], "p99_us": us["p99_us"]}
            times["busbw_gb_per_s"] = num_bytes / us["p50_us"] / 1e3 * share
            found.append({"bytes": num_bytes, "algorithms": sorted(used), **times})
    return found


def _copy_gb_per_s() -> float:
    """Of the largest all_reduce's buffer, in this rank alone: the fastest of a few."""
    buffer = torch.zeros(ALL_REDUCE_BYTES[-1] // 4, dtype=torch.float32)
    target, seconds = torch.empty_like(buffer), []
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(buffer)
        seconds.append(time.perf_counter() - begin)
    return buffer.nbytes / min(seconds) / 1e9


def _trip_us(peer: int, num_bytes: int, is_first: bool) -> float:
    """Half the median round-trip time of a message, in µs."""
    buffer = torch.zeros(num_bytes // 4, dtype=torch.float32)
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

    `said` are the engine's words: "shm: one host, ..." or "messages over gloo, as requested; ...".
    """
    transport = re.findall(r"\w+", said)[0]
    why = said.removeprefix(transport).strip(": ")
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

    warnings.filterwarnings("ignore", "the environment variable RINGCOMM_")  # a check of its own
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
    if team.rank == 0:
        tell(copy_gb_per_s=_copy_gb_per_s())
    backend = backend_of(resolve_group(), torch.device("cpu"))
    pairs = _pairs(team, _C.transport_of(backend))
    # All ranks map the group's shared memory: one segment, charged once.
    resident = sum(team.share(machine.mapped_memory()["share_bytes"]))
    memory = {"mapped_bytes": _C.mapped_bytes(backend), "resident_bytes": resident}
    tell(pairs=pairs, memory=memory, ranks_per_core=_C.most_ranks_per_core())
    tell(others_busy_percent=watch.percent())
    team.share(None)  # a rank that has ended would count for the others
    dist.destroy_process_group()


def _share_of_copy(group: dict[str, Any]) -> float:
    """The speed of the largest all_reduce over that of a copy; 1 if they were not measured."""
    points, copy = group.get("all_reduce"), group.get("copy_gb_per_s")
    return points[-1]["busbw_gb_per_s"] / copy if points and copy else 1.0


def _name_of(point: dict[str, Any]) -> str:
    return f"all_reduce of {byte_count(point['bytes'])}"


def _times_of(point: dict[str, Any]) -> str:
    p50, p99 = (in_seconds(point[name] / 1e6) for name in ("p50_us", "p99_us"))
    return f"{p50}, 99th percentile {p99}"


def _speed_text(group: dict[str, Any]) -> str:
    percent, size = f"{100 * _share_of_copy(group):.0f} %", byte_count(ALL_REDUCE_BYTES[-1])
    copy = f"{group['copy_gb_per_s']:.3g} GB/s"
    least = f"{100 * LEAST_SHARE_OF_COPY:.0f} %"
    text = f"all_reduce of {size} has {percent} of the speed of one rank's copy, {copy}"
    return f"{text} (at least {least} expected)"


def _pinning_variables() -> str:
    """Those that are set and have OpenMP pin its threads, as "NAME=value, ..."."""
    found = {name: os.environ.get(name, "") for name in PINNING_VARIABLES}
    if found["OMP_PROC_BIND"].lower() == "false":
        return ""
    return ", ".join(f"{name}={value}" for name, value in found.items() if value)


def _problems(report: dict[str, Any], world_size: int) -> Iterator[tuple[str, str, str]]:
    """Of each problem that the parts of a report show: its check, what is wrong, and the fix."""
    group, known, variables = report["group"], report["machine"], report["environment"]
    for text in group.get("errors", []):
        fix = "look the message up in docs/how-to/mistakes.md"
        yield "group", f"the group could not be created: {text}", fix
    is_busy = group.get("others_busy_percent", 0.0) > MAX_OTHERS_PERCENT
    if is_busy:
        text = f"other programs used {group['others_busy_percent']:.0f} % of the machine during the"
        text += " measurement: times are longer than on an idle machine"
        if known["load"] and known["load"][0] > known["cores"]:
            text += f"; {_load_text(known['load'])}, on {counted(known['cores'], 'CPU')}"
        yield "others", text, "measure again when the machine is idle"
    num_cores = report["cpus"]["num_cores"] or known["cores"]
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and world_size * int(threads) > max(num_cores, world_size):
        num_threads = world_size * min(int(threads), report["threads"]["torch"])
        text = f"OMP_NUM_THREADS is {threads}: {world_size} ranks compute with"
        text += f" {num_threads} threads on {counted(num_cores, 'core')}"
        yield "environment", text, f"set it to {max(1, num_cores // world_size)}"
    if world_size > 1 and _share_of_copy(group) < LEAST_SHARE_OF_COPY:
        text = f"{_speed_text(group)}: ranks share cores, or other programs ran"
        yield "speed", text, "measure on an idle machine, with at most one rank per core"
    for point in group.get("all_reduce", []):
        if point["p99_us"] > MAX_P99 * point["p50_us"]:
            name, ratio = _name_of(point), point["p99_us"] / point["p50_us"]
            text = f"{name}: {_times_of(point)}, {ratio:.0f} times the median (at most {MAX_P99}"
            text += " expected)"
            text += ": other programs use the cores" if is_busy else ": a rank waited for a core"
            yield name, text, "measure on an idle machine, with at most one rank per core"
    if world_size > num_cores:
        text = f"{world_size} ranks on {counted(num_cores, 'core')}: the ranks have to take turns"
        fix = f"start at most {counted(num_cores, 'rank')}"
        if pinning := _pinning_variables():
            text += f"; with {pinning} OpenMP moves each rank there when it imports torch"
            fix = "unset it, or start each rank with taskset or numactl on cores of its own"
        yield "cpus", text, fix
    allowed, file = report["limits"]["cpu_cores"] or (float("inf"), "")
    if allowed < min(world_size, len(os.sched_getaffinity(0))):
        text = f"the container may use {allowed:g} CPUs ({file}): {world_size} busy ranks are"
        fix = f"allow it {world_size} CPUs (docker run --cpus {world_size}), or start fewer ranks"
        yield "limits", f"{text} throttled", fix
    for name, near in unknown_variables().items():
        text = f"{name} is set, but ringcomm has no such variable"
        yield "environment", text, f"did you mean {near}?" if near else f"unset {name}"
    as_gloo = variables.get("RINGCOMM_AS_GLOO") or "0"
    if as_gloo not in ("0", "1"):
        yield "environment", f"RINGCOMM_AS_GLOO is {as_gloo!r}", "set it to 1 or 0"
    text = "RINGCOMM_AS_GLOO has no effect, and groups use Gloo: "
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    if as_gloo == "1" and autoload != "1":
        text += f"TORCH_DEVICE_BACKEND_AUTOLOAD is {autoload}"
        yield "environment", text, "unset the latter, or write `import ringcomm` in the program"
    elif as_gloo == "1" and "ringcomm" not in entry_points(group="torch.backends").names:
        text += "ringcomm is not installed here, so `import torch` does not load it"
        yield "environment", text, "run pip install . in a checkout, or write `import ringcomm`"
    if not (path := variables.get("RINGCOMM_TUNING")):
        return
    fix = f"ringcomm tune --world-sizes {world_size} --json {path}"
    try:
        found = tuning.load(path)
    except (OSError, ValueError) as error:
        yield "tuning", f"RINGCOMM_TUNING: {error}", fix
        return
    for text in found.differences(known):
        yield "tuning", f"RINGCOMM_TUNING: {path}: {text}", fix
    if found.one_shot_max_bytes(world_size) is None:
        yield "tuning", f"RINGCOMM_TUNING: {path} has no entry for {world_size} ranks", fix


def examine(world_size: int, seconds: float) -> dict[str, Any]:
    """The report that --json prints; has `group.errors` if the group cannot be made."""
    limits, known, memory = machine.read_limits(), machine.identity(), machine.memory()
    huge, load = machine.huge_pages(), machine.load()  # a load without the ranks below
    group: dict[str, Any] = {}
    try:
        run_ranks(world_size, lambda team: _run_rank(team, seconds), group.update)
    except RankError as error:
        group["errors"] = [str(error)]
    usable, (quota, _) = len(os.sched_getaffinity(0)), limits["cpu_cores"] or (float("inf"), "")
    report = {
        "versions": machine.versions(),
        "machine": {**known, **memory, "load": load, "huge_pages": huge},
        "cpus": {
            "num_online": os.cpu_count(),
            "num_cores": machine.num_cores(),
            "usable": sorted(os.sched_getaffinity(0)),
        },
        "limits": limits,
        "threads": {
            "torch": torch.get_num_threads(),
            "cores_per_rank": int(min(usable, quota) // world_size),
        },
        "environment": machine.variables("RINGCOMM_"),
        "world_size": world_size,
        "group": group,
    }
    problems = [
        {"check": check, "problem": problem, "fix": fix}
        for check, problem, fix in _problems(report, world_size)
    ]
    notes = [problem["problem"] for problem in problems]
    return dict(machine.rounded({**report, "notes": notes, "problems": problems}))


def _machine_facts(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(check, what was found) of the machine and the environment."""
    versions, known, cpus = report["versions"], report["machine"], report["cpus"]
    names = ("ringcomm", "torch", "python", "kernel")
    text = ", ".join(f"{name} {versions[name]}" for name in names)
    yield "versions", f"{text}, {versions['os']}, {versions['simd']} instructions"
    cores = "" if cpus["num_cores"] is None else f", {counted(cpus['num_cores'], 'core')}"
    yield "cpus", f"{known['cpu']}: {known['cores']} of {cpus['num_online']} CPUs usable{cores}"
    total, available = in_gib(known["total_bytes"]), in_gib(known["available_bytes"])
    yield "memory", f"{total} of memory, {available} available"
    yield "huge pages", _huge_pages_text(known["huge_pages"])
    yield "load", _load_text(known["load"])
    cpu, memory = report["limits"]["cpu_cores"], report["limits"]["memory_bytes"]
    parts = [f"{cpu[0]:g} CPUs" if cpu else "no limit of CPU time"]
    parts.append(f"{in_gib(memory[0])} of memory" if memory else "no limit of memory")
    yield "limits", f"cgroup: {', '.join(parts)}; {report['limits']['max_fds']:,} open files"
    yield "threads", _threads_text(report)
    variables = [f"{name}={value}" for name, value in report["environment"].items()]
    yield "environment", ", ".join(variables) or "no RINGCOMM_* variable is set"
    if path := report["environment"].get("RINGCOMM_TUNING"):
        yield "tuning", f"{path} was tuned on this machine"


def _load_text(load: Sequence[float] | None) -> str:
    """Averages that the kernel keeps: they tell of programs that have ended, too."""
    if load is None:
        return "the kernel does not say what the load is"
    return "load {:.2f} over the minute before, {:.2f} over 5, {:.2f} over 15".format(*load)


def _huge_pages_text(found: dict[str, str] | None) -> str:
    """Whether shared buffers have them, and what to set."""
    if found is None:
        return "the kernel does not say whether shared buffers have huge pages"
    setting = found["setting"]
    if setting in ("never", "deny"):
        text = "shared buffers have no huge pages: shmem_enabled is"
        return f"{text} {setting}; `advise` in {found['file']} allows them"
    return f"shared buffers may have huge pages: shmem_enabled is {setting}"


def _threads_text(report: dict[str, Any]) -> str:
    """How many threads copy and sum in a large call, and why."""
    num_threads, num_cores = report["threads"]["torch"], report["threads"]["cores_per_rank"]
    used = num_threads if num_threads <= num_cores else 1
    text = f"collectives of 256 KiB and more use {counted(used, 'thread')} of a rank: torch has"
    more = f"; with OMP_NUM_THREADS={num_cores} they use {num_cores}" if used < num_cores else ""
    share = counted(num_cores, "core") if num_cores else "less than 1 core"
    if num_threads > max(1, num_cores) and num_cores <= 1 and "OMP_NUM_THREADS" not in os.environ:
        more = f"; without torchrun, which sets OMP_NUM_THREADS=1, ranks compute with {num_threads}"
        more += f" threads on {share}"
    return f"{text} {num_threads}, and a rank {share}{more}"


def _algorithms_text(ranks_per_core: int) -> str:
    """What decides between the algorithms of all_reduce that sum in rank order."""
    if os.environ.get("RINGCOMM_ALGORITHM", "auto") not in ("", "auto"):
        return "RINGCOMM_ALGORITHM says which algorithm all_reduce has"
    if os.environ.get("RINGCOMM_TUNING"):
        return (
            "RINGCOMM_TUNING says when all_reduce is one_shot, for the numbers of ranks that it has"
        )
    text = "all_reduce is one_shot or two_shot by"
    if ranks_per_core > 1:
        text = f"{text} a size that is the same on all machines"
        return f"{text}: up to {ranks_per_core} ranks share a core"
    return f"{text} what the group's calls find faster"


def _group_facts(group: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(check, what was measured) of a group, as far as it came."""
    if "init_s" in group or "errors" in group:  # these are shown in its place
        yield "group", f"made in {in_seconds(group.get('init_s', 0.0))}"
    for point in group.get("all_reduce", []):
        name, how = _name_of(point), " and ".join(point["algorithms"]) or "no algorithm: one rank"
        yield name, f"{name}: {_times_of(point)}, {point['busbw_gb_per_s']:.3g} GB/s ({how})"
    if "copy_gb_per_s" in group and group.get("pairs"):
        yield "speed", _speed_text(group)
    if pairs := group.get("pairs", []):
        yield "transport", f"transport {pairs[0]['transport']}, {pairs[0]['why']}"
        if pairs[0]["transport"] == "shm":
            yield "algorithms", _algorithms_text(group["ranks_per_core"])
    for pair in pairs:
        if "latency_us" in pair:
            latency, rate = in_seconds(pair["latency_us"] / 1e6), f"{pair['gb_per_s']:.3g} GB/s"
            ranks = "ranks {} and {}".format(*pair["ranks"])
            yield "pairs", f"{ranks}: 1 KiB in {latency}, 4 MiB with {rate}"
    if "memory" in group:
        touched, mapped = (in_gib(group["memory"][f"{n}_bytes"]) for n in ("resident", "mapped"))
        yield "group memory", f"shared memory of the group: {touched} in use of at most {mapped}"
    if "others_busy_percent" in group:
        percent = f"{group['others_busy_percent']:.0f} %"
        yield "others", f"other programs used {percent} of the machine meanwhile"


def print_report(report: dict[str, Any]) -> None:
    """Prints a line for each check: ✓ and what was found, or ✗, what is wrong, and a fix."""
    problems = report["problems"]
    facts = {
        "this machine": list(_machine_facts(report)),
        f"a group of {counted(report['world_size'], 'rank')}": list(_group_facts(report["group"])),
    }
    for title, checks in facts.items():
        print(title)
        for check, fact in checks:
            wrong = [problem for problem in problems if problem["check"] == check]
            for problem in wrong:
                print(f"  ✗ {problem['problem']}\n    fix: {problem['fix']}")
            if not wrong:
                print(f"  ✓ {fact}")
        print()
    number = counted(len(problems), "problem") if problems else "no problems"
    print(f"{number} found{'' if 'errors' in report['group'] else '; the group works'}")
