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
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["SCHEMA", "Point", "Tuning", "World", "load", "save"]

SCHEMA = 1


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
    return _tuning(_Fields(str(path), "", content))


class _Fields:
    """A JSON object and where it stands; tells which field is wrong, and how."""

    def __init__(self, file: str, place: str, content: Any) -> None:
        self._file = file
        self._place = place
        if not isinstance(content, dict):
            self.refuse("" if place else "the file", "an object", content)
        self._content: dict[str, Any] = content

    def refuse(self, field: str, expected: str, got: object) -> NoReturn:
        where = ".".join(filter(None, (self._place, field)))
        raise ValueError(f"tuning file {self._file!r}: {where} is {expected}, got {got!r:.80}")

    def get(self, field: str, expected: str, *kinds: type) -> Any:
        """The value if it is of one of the kinds; true and false are no numbers."""
        if field not in self._content:
            raise ValueError(
                f"tuning file {self._file!r}: there is no field"
                f" {'.'.join(filter(None, (self._place, field)))}, {expected}"
            )
        value = self._content[field]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            self.refuse(field, expected, value)
        return value

    def text(self, field: str) -> str:
        return str(self.get(field, "a text", str))

    def truth(self, field: str) -> bool:
        return bool(self.get(field, "true or false", bool))

    def whole(self, field: str, least: int, most: int) -> int:
        expected = f"a whole number from {least} to {most}"
        value = int(self.get(field, expected, int))
        if not least <= value <= most:
            self.refuse(field, expected, value)
        return value

    def number(self, field: str) -> float:
        expected = "a number, not negative"
        value = float(self.get(field, expected, int, float))
        if not 0 <= value < float("inf"):
            self.refuse(field, expected, value)
        return value

    def objects(self, field: str) -> list[_Fields]:
        place = f"{self._place}.{field}" if self._place else field
        entries = self.get(field, "a list of objects", list)
        return [_Fields(self._file, f"{place}[{i}]", entry) for i, entry in enumerate(entries)]


MAX_BYTES = (1 << 63) - 1
MAX_WORLD_SIZE = 64


def _tuning(fields: _Fields) -> Tuning:
    schema = fields.whole("schema", 0, MAX_BYTES)
    if schema != SCHEMA:
        fields.refuse("schema", f"{SCHEMA} in files that this ringcomm reads", schema)
    worlds = sorted(map(_world, fields.objects("worlds")), key=lambda world: world.world_size)
    sizes = [world.world_size for world in worlds]
    if not sizes or len(set(sizes)) < len(sizes):
        fields.refuse("worlds", "a list with one entry for each of one or more world sizes", sizes)
    return Tuning(
        date=fields.text("date"),
        machine=fields.get("machine", "an object", dict),
        torch=fields.text("torch"),
        ringcomm=fields.text("ringcomm"),
        worlds=tuple(worlds),
    )


def _world(fields: _Fields) -> World:
    return World(
        world_size=fields.whole("world_size", 2, MAX_WORLD_SIZE),
        alpha_us=fields.number("alpha_us"),
        beta_us_per_mib=fields.number("beta_us_per_mib"),
        overhead_us=fields.number("overhead_us"),
        worst_fit=fields.number("worst_fit"),
        quiet=fields.truth("quiet"),
        one_shot_max_bytes=fields.whole("one_shot_max_bytes", 1, MAX_BYTES),
        points=tuple(map(_point, fields.objects("points"))),
    )


def _point(fields: _Fields) -> Point:
    return Point(
        bytes=fields.whole("bytes", 1, MAX_BYTES),
        algorithm=fields.text("algorithm"),
        p10_us=fields.number("p10_us"),
        p50_us=fields.number("p50_us"),
        p90_us=fields.number("p90_us"),
        num_calls=fields.whole("num_calls", 1, MAX_BYTES),
    )
