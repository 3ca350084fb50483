"""Tuning files: JSON files with the measurements of `ringcomm tune`, for use by groups.

A file is a `Tuning` as a JSON object, with its "schema". Groups use each world's
`one_shot_max_bytes`, the planner the `costs`. The other fields document the measurement.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from _ringcomm.values import MAX_WORLD_SIZE
from ringcomm.cost_model import KIB, MIB, OPERATIONS, Costs, Machine
from ringcomm.screen import byte_count, columns, counted, in_seconds, write_text

__all__ = ["SCHEMA", "Point", "Tuning", "World", "load", "save"]

SCHEMA = 3
_SIZES = (KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)  # of tables()
# Fields of a world that are used: the type, and the smallest and largest value.
_USED: dict[str, tuple[Any, int, int]] = {
    "world_size": (int, 2, MAX_WORLD_SIZE),
    "one_shot_max_bytes": (int, 1, 1 << 62),
}


@dataclass(frozen=True)
class Point:
    """The calls of one algorithm at one size; the time of a call is that of the slowest rank."""

    bytes: int
    algorithm: str
    p10_us: float
    p50_us: float
    p90_us: float
    num_calls: int


@dataclass(frozen=True)
class World:
    """The result for one number of ranks."""

    world_size: int
    quiet: bool  # whether the machine was otherwise idle at every size
    one_shot_max_bytes: int  # the largest all_reduce for which one_shot is chosen, at least 1
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Tuning:
    """A file of `ringcomm tune`."""

    date: str
    machine: Mapping[str, Any]  # "cpu", "cores" and "kernel" of the one that was measured
    torch: str
    ringcomm: str
    nodes: int  # NUMA nodes
    costs: Costs
    worst_fit: float  # the largest error of the costs at a measured median, as a factor
    worlds: tuple[World, ...]  # by ascending number of ranks

    def one_shot_max_bytes(self, world_size: int) -> int | None:
        """The largest all_reduce for one_shot; None if that number of ranks was not measured."""
        return self.host.one_shot_max_bytes.get(world_size)

    @property
    def host(self) -> Machine:
        """The measured machine, for the times of collectives."""
        limits = {world.world_size: world.one_shot_max_bytes for world in self.worlds}
        return Machine(int(self.machine["cores"]), self.nodes, self.costs, limits)

    def differences(self, machine: Mapping[str, Any]) -> list[str]:
        """The differences between `machine` and the measured machine."""
        return [
            f"{name} is {machine.get(name)!r}, but the file was tuned with {measured!r}"
            for name, measured in self.machine.items()
            if machine.get(name) != measured
        ]


def save(tuning: Tuning, path: str | PathLike[str]) -> None:
    """Writes the file atomically. Raises OSError."""
    text = json.dumps({"schema": SCHEMA, **asdict(tuning)}, indent=1, allow_nan=False)
    target = Path(path)
    partial = target.with_name(f"{target.name}.partial")
    write_text(partial, text + "\n")
    partial.replace(target)


def load(path: str | PathLike[str]) -> Tuning:
    """Reads a file that `ringcomm tune` has written.

    Raises:
        FileNotFoundError: the file does not exist; other OSErrors if it cannot be read.
        ValueError: it is not a tuning file; names the file, the field and the expected value.
    """
    try:
        found = {**json.loads(Path(path).read_text(encoding="utf-8"))}
        if (schema := found.pop("schema")) != SCHEMA:
            raise ValueError(
                f"schema must be {SCHEMA} for this version of ringcomm, got {schema!r}: write the"
                " file again with `ringcomm tune`"
            )
        worlds = sorted(map(_read_world, found.pop("worlds")), key=lambda world: world.world_size)
        found["costs"] = _read_costs(found["costs"])
        sizes = [world.world_size for world in worlds]
        if not sizes or len(set(sizes)) < len(sizes):
            raise ValueError(
                f"worlds must have one entry for each of one or more sizes, got {sizes}"
            )
        if disturbed := [world.world_size for world in worlds if not world.quiet]:
            warnings.warn(
                f"the tuning file {str(path)!r} was measured while other programs ran (for"
                f" {', '.join(map(str, disturbed))} ranks): tune again on an idle machine",
                stacklevel=2,
            )
        tuning = Tuning(**{**found, "machine": dict(found["machine"]), "worlds": tuple(worlds)})
        _check("cores", tuning.machine["cores"], int, 1, 1 << 20)
        _check("nodes", tuning.nodes, int, 1, 1 << 20)
        _check("worst_fit", tuning.worst_fit, (int, float), 1, 1 << 62)
        tuning.machine["cpu"]
        return tuning
    except FileNotFoundError:
        raise FileNotFoundError(
            f"the tuning file {str(path)!r} does not exist; `ringcomm tune --json FILE` writes one"
        ) from None
    except KeyError as error:
        why = f"the field {error.args[0]} is missing"
    except (TypeError, AttributeError) as error:
        why = f"it was not written by `ringcomm tune`: {error}"
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        why = f"not JSON: {error}"
    except ValueError as error:
        why = str(error)
    raise ValueError(f"tuning file {str(path)!r}: {why}")


def _check(name: str, value: Any, kind: Any, least: float, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} must be {what} from {least} to {most}, got {value!r:.80}")


def _read_costs(found: dict[str, Any]) -> Costs:
    for field in fields(Costs):
        if field.name != "defaults":
            least = 1e-3 if field.name.endswith("gb_per_s") else 0
            _check(field.name, found[field.name], (int, float), least, 1 << 62)
    return Costs(**{**found, "defaults": tuple(map(str, found["defaults"]))})


def _read_world(found: dict[str, Any]) -> World:
    for name, limits in _USED.items():
        _check(name, found[name], *limits)
    return World(**{**found, "points": tuple(Point(**point) for point in found["points"])})


def tables(tuning: Tuning | None) -> str:
    """`ringcomm plan --collectives`: times of collectives on CPUs as the cost model has them.

    Of the tuned machine with 2 to 32 ranks, or else of two cores; and of two sockets of 64 cores,
    with the costs of the tuned cores, and defaults where a cost is not measured.
    """
    machine = tuning.host if tuning else Machine(2)
    name = str(tuning.machine["cpu"]) if tuning else "defaults"
    sockets = Machine(128, 2, machine.costs)
    parts = [_table(machine, world_size, 1) for world_size in (2, 8, 32)]
    parts += [_table(sockets, 2, 64), _table(sockets, 128, 1)]
    defaults = ", ".join(machine.costs.defaults)
    return "\n\n".join(
        (
            f"costs of one core: {name}; not measured, but defaults: {defaults}",
            *parts,
            "Computed. Bytes of the larger buffer of a rank, which has them in ordinary tensors.",
        )
    )


def _table(machine: Machine, world_size: int, threads: int) -> str:
    rows = [["bytes", *OPERATIONS]]
    for size in _SIZES:
        times = (machine.microseconds(op, size, world_size, threads) for op in OPERATIONS)
        rows.append([byte_count(size), *(in_seconds(time * 1e-6) for time in times)])
    cores = counted(machine.cores, "core")
    where = f"{machine.nodes} sockets with {cores}" if machine.nodes > 1 else cores
    head = f"{world_size} ranks of {counted(threads, 'thread')} on {where}"
    return f"{head}\n{columns(rows, '')}"
