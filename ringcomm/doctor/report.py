"""The report of `ringcomm doctor`: everything in one JSON object, with what deserves attention."""

from __future__ import annotations

import platform
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringcomm
from ringcomm import _C, tuning
from ringcomm.bench.machine import MAX_OTHERS_PERCENT, identity, variables
from ringcomm.bench.ranks import RankError
from ringcomm.bench.records import rounded
from ringcomm.doctor.cpus import Cpus, read_cpus, telling_pairs
from ringcomm.doctor.group import Plan, examine_group
from ringcomm.doctor.limits import Limits, missing_features, read_limits
from ringcomm.options import Options

SHM_NOTE = (
    "not used: ringcomm's memory comes from memfd_create and is passed on as a file descriptor, so"
    " the size of /dev/shm does not limit it; the cgroup's memory does"
)
# Read by csrc/, losses and the build; each of the others stands for a field of ringcomm.Options.
OTHER_VARIABLES = (
    *("RINGCOMM_SIMD", "RINGCOMM_HOST_ID", "RINGCOMM_CHECK_TARGETS"),
    *("RINGCOMM_CUDA", "RINGCOMM_CUDA_ARCHS", "RINGCOMM_CUDA_DRIVER", "RINGCOMM_CUDA_IMAGE"),
    *("RINGCOMM_USE_ENV", "RINGCOMM_TORCH_INDEX", "RINGCOMM_MAX_JOBS", "RINGCOMM_WERROR"),
)


def known_variables() -> set[str]:
    """The names of all environment variables that ringcomm obeys."""
    return {f"RINGCOMM_{field.name.upper()}" for field in fields(Options)} | set(OTHER_VARIABLES)


def _versions() -> dict[str, Any]:
    return {
        "ringcomm": ringcomm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "simd": _C.simd_level(),
        "gloo": dist.is_gloo_available(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
    }


def _memory_info() -> dict[str, int]:
    """Bytes of the whole machine, whatever the container is allowed."""
    wanted = {"MemTotal": "total_bytes", "MemAvailable": "available_bytes"}
    found = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in wanted:
                found[wanted[name]] = int(value.split()[0]) << 10
    except (OSError, ValueError):
        pass
    return found


def _tuning_notes(path: str | None, machine: dict[str, Any], world_size: int) -> list[str]:
    if path is None:
        return []
    try:
        found = tuning.load(path)
    except (OSError, ValueError) as error:
        return [f"RINGCOMM_TUNING: {error}"]
    notes = [f"RINGCOMM_TUNING: {path}: {text}" for text in found.differences(machine)]
    if found.one_shot_max_bytes(world_size) is None:
        notes.append(f"RINGCOMM_TUNING: {path} has nothing about {world_size} ranks")
    return notes


def _cache_notes(cpus: Cpus, hand_overs: list[dict[str, Any]]) -> list[str]:
    notes = []
    for entry in hand_overs:
        said, measured = cpus.shares_l3(entry["cpus"]), entry["looks_shared"]
        names = " and ".join(map(str, entry["cpus"]))
        if measured is False and said:
            notes.append(
                f"CPUs {names} should share an L3 by what the kernel says, but a hand-over takes"
                f" {entry['us']:.2g} µs: a virtual machine may show caches that it does not have,"
                " or lose them for a time"
            )
        elif measured is False:
            notes.append(f"CPUs {names} share no cache: a hand-over takes {entry['us']:.2g} µs")
        elif measured is None:
            notes.append(
                f"hand-over between CPUs {names} was not measured: it takes a C compiler (cc, gcc"
                " or clang) and two CPUs that are free at the same time"
            )
    return notes


def _limit_notes(cpus: Cpus, limits: Limits, world_size: int) -> list[str]:
    notes = []
    if world_size > len(cpus.cores):
        notes.append(
            f"{world_size} ranks on {len(cpus.cores)} core(s): ranks wait for each other's turns"
        )
    if limits.cpu_cores is not None and limits.cpu_cores.value < min(world_size, len(cpus.usable)):
        notes.append(
            f"the container may use {limits.cpu_cores.value:g} CPUs ({limits.cpu_cores.file}):"
            f" {world_size} computing ranks are stopped for a part of the time"
        )
    return notes


def _group_notes(group: dict[str, Any]) -> list[str]:
    notes = [f"the group cannot be made: {text}" for text in group.get("errors", [])]
    memory = group.get("memory", {})
    for name in ("mapped", "resident"):
        per_pair = memory.get(f"{name}_bytes_per_pair")
        if per_pair is not None and per_pair > memory["max_bytes_per_pair"]:
            mib = per_pair / (1 << 20)
            notes.append(
                f"{mib:.1f} MiB are {name} per pair of ranks, over the"
                f" {memory['max_bytes_per_pair'] >> 20} MiB that default options keep to"
            )
    if group.get("others_busy_percent", 0.0) > MAX_OTHERS_PERCENT:
        notes.append(
            f"other programs used {group['others_busy_percent']:.0f} % of the machine meanwhile:"
            " times are longer than they need be"
        )
    return notes


def examine(world_size: int, seconds: float) -> dict[str, Any]:
    """Examines the machine and a group of that many ranks.

    Args:
        world_size: ranks that are started, 1 to 64.
        seconds: per size of all_reduce that is timed.

    Returns:
        What --json prints; `group.errors` are there when the group could not be made.
    """
    cpus, limits, machine = read_cpus(), read_limits(), identity()
    set_variables = variables("RINGCOMM_")
    missing = missing_features()
    try:
        group = examine_group(Plan(world_size, telling_pairs(cpus), seconds))
    except RankError as error:
        group = {"errors": [str(error)]}
    unknown = sorted(set_variables.keys() - known_variables())
    notes = [
        *(f"the kernel refuses {text}" for text in missing),
        *_group_notes(group),
        *_limit_notes(cpus, limits, world_size),
        *_cache_notes(cpus, group.get("hand_overs", [])),
        *(f"{name} is set, but ringcomm reads no such variable" for name in unknown),
        *_tuning_notes(set_variables.get("RINGCOMM_TUNING"), machine, world_size),
    ]
    report = {
        "versions": _versions(),
        "machine": {**machine, "memory": _memory_info()},
        "cpus": asdict(cpus),
        "limits": {**asdict(limits), "dev_shm": SHM_NOTE, "missing_features": missing},
        "environment": set_variables,
        "world_size": world_size,
        "group": group,
        "notes": notes,
    }
    return dict(rounded(report))
