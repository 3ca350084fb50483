"""What `ringcomm tune` has measured on a machine: a JSON file that groups may be made with.

    {"schema": 1, "date": ..., "machine": {"cpu", "cores", "kernel"}, "torch", "ringcomm",
     "worlds": [{"world_size", "alpha_us", "beta_us_per_mib", "overhead_us", "worst_fit",
                 "quiet", "one_shot_max_bytes",
                 "points": [{"bytes", "algorithm", "p10_us", "p50_us", "p90_us", "num_calls"}]}]}

Groups use each world's `one_shot_max_bytes`, the planner its `alpha_us`, `beta_us_per_mib` and
`overhead_us`. The other fields say where these come from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

__all__ = ["SCHEMA", "Point", "Tuning", "World", "load", "save"]

SCHEMA = 1
MAX_WORLD_SIZE = 64
# Fields of a world that are used: the type, and the least and the largest value.
_USED: dict[str, tuple[Any, int, int]] = {
    "world_size": (int, 2, MAX_WORLD_SIZE),
    "one_shot_max_bytes": (int, 1, 1 << 62),
    **dict.fromkeys(("alpha_us", "beta_us_per_mib", "overhead_us"), ((int, float), 0, 1 << 62)),
}


@dataclass(frozen=True)
class Point:
    """The calls of one algorithm at one size; of each call the slowest rank counts."""

    bytes: int
    algorithm: str
    p10_us: float
    p50_us: float
    p90_us: float
    num_calls: int


@dataclass(frozen=True)
class World:
    """What was found for one number of ranks."""

    world_size: int
    alpha_us: float  # per hand-over
    beta_us_per_mib: float  # per MiB that a rank sends, 2^20 bytes
    overhead_us: float  # per call, whatever it moves: torch's share
    worst_fit: float  # how far the model is from the worst measured median, as a factor
    quiet: bool  # whether other programs left the machine alone at every size
    one_shot_max_bytes: int  # the largest all_reduce for which one_shot is chosen, at least 1
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Tuning:
    """A file of `ringcomm tune`."""

    date: str
    machine: Mapping[str, Any]  # "cpu", "cores" and "kernel" of the one that was measured
    torch: str
    ringcomm: str
    worlds: tuple[World, ...]  # by ascending number of ranks

    def one_shot_max_bytes(self, world_size: int) -> int | None:
        """The largest all_reduce that takes one_shot; None when that many were not measured."""
        return {world.world_size: world.one_shot_max_bytes for world in self.worlds}.get(world_size)

    def differences(self, machine: Mapping[str, Any]) -> list[str]:
        """How `machine`, of the same fields, differs from what was measured."""
        return [
            f"{name} is {machine.get(name)!r}, tuned was {measured!r}"
            for name, measured in self.machine.items()
            if machine.get(name) != measured
        ]


def save(tuning: Tuning, path: str | PathLike[str]) -> None:
    """Writes the file atomically. Raises OSError."""
    text = json.dumps({"schema": SCHEMA, **asdict(tuning)}, indent=1, allow_nan=False)
    target = Path(path)
    partial = target.with_name(f"{target.name}.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(target)


def load(path: str | PathLike[str]) -> Tuning:
    """Reads a file that `ringcomm tune` has written.

    Raises:
        FileNotFoundError: there is none; other OSErrors where it cannot be read.
        ValueError: it is no such file; names the file, the field, and what it should hold.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return _read(json.loads(text))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no tuning file {str(path)!r}; `ringcomm tune --json FILE` writes one"
        ) from None
    except KeyError as error:
        why = f"there is no field {error.args[0]}"
    except (TypeError, AttributeError) as error:
        why = f"it is not what `ringcomm tune` writes: {error}"
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        why = f"not JSON: {error}"
    except ValueError as error:
        why = str(error)
    raise ValueError(f"tuning file {str(path)!r}: {why}")


def _read(content: dict[str, Any]) -> Tuning:
    """Raises KeyError, TypeError, AttributeError or ValueError where it is no such object."""
    fields = dict(content)
    schema = fields.pop("schema")
    if schema != SCHEMA:
        raise ValueError(f"schema is {SCHEMA} in files that this ringcomm reads, got {schema!r}")
    worlds = sorted(map(_read_world, fields.pop("worlds")), key=lambda world: world.world_size)
    sizes = [world.world_size for world in worlds]
    if not sizes or len(set(sizes)) < len(sizes):
        raise ValueError(f"worlds has one entry for each of one or more sizes, got {sizes}")
    return Tuning(**{**fields, "machine": dict(fields["machine"]), "worlds": tuple(worlds)})


def _read_world(fields: dict[str, Any]) -> World:
    for name, (kind, least, most) in _USED.items():
        value = fields[name]
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
            what = "a whole number" if kind is int else "a number"
            raise ValueError(f"{name} is {what} from {least} to {most}, got {value!r:.80}")
    return World(**{**fields, "points": tuple(Point(**point) for point in fields["points"])})
