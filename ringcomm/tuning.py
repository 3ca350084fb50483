"""What `ringcomm tune` has measured on a machine: a JSON file that groups may be made with.

    {"schema": 1, "date": ..., "machine": {"cpu", "cores", "kernel"}, "torch", "ringcomm",
     "worlds": [{"world_size", "alpha_us", "beta_us_per_mib", "overhead_us", "worst_fit",
                 "quiet", "one_shot_max_bytes",
                 "points": [{"bytes", "algorithm", "p10_us", "p50_us", "p90_us", "num_calls"}]}]}

Only `schema` and each world's `world_size` and `one_shot_max_bytes` decide anything; the rest says
where they come from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

__all__ = ["SCHEMA", "Point", "Tuning", "World", "load", "save"]

SCHEMA = 1
MAX_WORLD_SIZE = 64


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
    """What was found for one number of ranks.

    Attributes:
        alpha_us: per hand-over.
        beta_us_per_mib: per MiB that a rank sends, 2^20 bytes.
        overhead_us: per call, whatever it moves: torch's share.
        worst_fit: how far the model is from the worst measured median, as a factor.
        quiet: whether other programs left the machine alone at every size.
        one_shot_max_bytes: the largest all_reduce for which one_shot is chosen, at least 1.
    """

    world_size: int
    alpha_us: float
    beta_us_per_mib: float
    overhead_us: float
    worst_fit: float
    quiet: bool
    one_shot_max_bytes: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Tuning:
    """A file of `ringcomm tune`.

    Attributes:
        machine: "cpu", "cores" and "kernel" of the machine that was measured.
        worlds: by ascending number of ranks.
    """

    date: str
    machine: Mapping[str, Any]
    torch: str
    ringcomm: str
    worlds: tuple[World, ...]

    def one_shot_max_bytes(self, world_size: int) -> int | None:
        """The largest all_reduce that takes one_shot; None when that many were not measured.

        At least 1: where one_shot never won, it is left to what has no bytes.
        """
        for world in self.worlds:
            if world.world_size == world_size:
                return world.one_shot_max_bytes
        return None

    def differences(self, machine: Mapping[str, Any]) -> list[str]:
        """What of a machine, as in `machine`, is another one than what was measured."""
        return [
            f"{name} is {machine.get(name)!r}, tuned was {measured!r}"
            for name, measured in self.machine.items()
            if machine.get(name) != measured
        ]


def save(tuning: Tuning, path: str | PathLike[str]) -> None:
    """Writes the file, at once whole. Raises OSError."""
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
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no tuning file {str(path)!r}; `ringcomm tune --json FILE` writes one"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"tuning file {str(path)!r}: not UTF-8: {error}") from None
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"tuning file {str(path)!r}: not JSON: {error}") from None
    file = f"tuning file {str(path)!r}"
    if isinstance(content, dict):
        if "schema" not in content:
            raise ValueError(f"{file}: there is no field schema, a whole number")
        if content["schema"] != SCHEMA:
            expected = f"{SCHEMA} in files that this ringcomm reads"
            _refuse(file, "schema", expected, content["schema"])
    found: Tuning = _read(file, Tuning, content, "")
    sizes = [world.world_size for world in found.worlds]
    if not sizes or len(set(sizes)) < len(sizes):
        expected = "a list with one entry for each of one or more world sizes"
        _refuse(file, "worlds", expected, sizes)
    return replace(found, worlds=tuple(sorted(found.worlds, key=lambda world: world.world_size)))


def _refuse(file: str, place: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{file}: {place or 'the file'} is {expected}, got {got!r:.80}")


def _expected(kind: Any, name: str) -> str:
    """In words, what a field of this type holds."""
    if kind is int:
        return "a whole number from 2 to 64" if name == "world_size" else "a whole number from 1"
    if get_origin(kind) is tuple:
        return "a list of objects"
    words = {str: "a text", bool: "true or false", float: "a number, not negative"}
    return words.get(kind, "an object")


def _read(file: str, kind: Any, value: Any, place: str) -> Any:
    """A value of JSON as a type that the dataclasses above have; true and false are no numbers.

    Raises:
        ValueError: it is something else; names the place.
    """
    name = place.rpartition(".")[2]
    expected = _expected(kind, name)
    json_types: dict[Any, Any] = {int: int, float: (int, float), str: str, bool: bool, tuple: list}
    is_fine = isinstance(value, json_types.get(get_origin(kind) or kind, dict))
    if is_fine and kind in (int, float):
        least, most = (2, 64) if name == "world_size" else (int(kind is int), (1 << 63) - 1)
        is_fine = not isinstance(value, bool) and least <= value <= most
    if not is_fine:
        _refuse(file, place, expected, value)
    if get_origin(kind) is tuple:
        one = get_args(kind)[0]
        return tuple(_read(file, one, entry, f"{place}[{i}]") for i, entry in enumerate(value))
    make: Any = kind
    if not is_dataclass(kind):
        return float(value) if kind is float else value
    found = {}
    for field, of in get_type_hints(kind).items():
        where = f"{place}.{field}" if place else field
        if field not in value:
            raise ValueError(f"{file}: there is no field {where}, {_expected(of, field)}")
        found[field] = _read(file, of, value[field], where)
    return make(**found)
