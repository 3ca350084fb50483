"""What is to be trained: tokens of a step, and the amounts that its options are written in."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from ringcomm.planner.hardware import Precision
from ringcomm.planner.mesh import SCHEDULES, SYSTEMS

__all__ = ["CHECKPOINTINGS", "Job", "bytes_of", "count_of", "in_gb", "in_seconds"]

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def bytes_of(text: str) -> int:
    """``80GiB`` in powers of 1024, ``80GB`` in powers of 1000, or plain bytes.

    Raises:
        ValueError: it is neither, or not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b|b?)", text.strip().lower())
    size = 0.0
    if match is not None:
        base = 1024 if match[3] else 1000
        size = float(match[1]) * base ** _POWERS[match[2] or ""]
    if size < 1:
        raise ValueError(f"{text!r} is no amount of memory: write 80GiB, 80GB or bytes")
    return int(size)


def count_of(text: str) -> int:
    """``4M`` tokens in powers of 1024, or plain.

    Raises:
        ValueError: it is no whole positive number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)", text.strip().lower())
    count = float(match[1]) * 1024 ** _POWERS[match[2]] if match is not None else 0.0
    if count < 1 or count != int(count):
        raise ValueError(f"{text!r} is no number of tokens: write 4194304, 512k or 4M")
    return int(count)


def in_gb(num_bytes: float) -> str:
    """``31.4 GB`` in powers of 1000, or in MB or KB where it is less."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:,.{2 if value < 10 else 1}f} {unit}"
    return f"{num_bytes:.0f} B"


def in_seconds(seconds: float) -> str:
    """``1.25 s``, ``12.5 ms`` or ``8.1 µs``: three digits."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            value = seconds / size
            return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{seconds * 1e6:.3g} µs"


Checkpointing = Literal["none", "selective", "full"]
CHECKPOINTINGS: tuple[Checkpointing, ...] = ("none", "selective", "full")
_AXES = ("dp", "pp", "tp", "ep")


@dataclasses.dataclass(frozen=True)
class Job:
    """A step of training, and restrictions of the search.

    Attributes:
        tokens: of a step, over all ranks.
        sequence: tokens of a sequence; 0 for the model's context, or the tokens if they are fewer.
        precision: "bf16" for 16-bit weights and gradients beside float32 masters, or "fp32".
        optimizer: "adamw" or "sgd", which has momentum.
        attention: "flash" keeps a number per token and head, "full" the s × s matrices.
        is_sequence_split: whether tensor-parallel ranks share the tokens between layers; None where
            they can.
        regathers: whether what sequence parallelism has gathered is gathered again in the backward
            pass (Korthikanti et al. 2022); ringcomm.nn keeps it.
        fused_norms: whether a norm keeps its input alone; torch's operators for CPUs keep two
            float32 numbers per element.
        loads_whole: whether every rank reads all weights of its part of the model into host memory
            first, as torch.load does, in place of one at a time.
        utilisation: share of the peak that layers reach; 0 for the hardware's.
        dp, pp, tp, ep: sizes to look at; 0 for all.
        systems, schedules, checkpointings: to look at; empty for all.
        virtual_stages: parts of the model on a rank with the interleaved schedule.

    Raises:
        ValueError: a value is out of its range, or not known.
    """

    tokens: int
    sequence: int = 0
    precision: Precision = "bf16"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    attention: Literal["flash", "full"] = "flash"
    is_sequence_split: bool | None = None
    regathers: bool = False
    fused_norms: bool = True
    loads_whole: bool = False
    utilisation: float = 0.0
    dp: int = 0
    pp: int = 0
    tp: int = 0
    ep: int = 0
    systems: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    checkpointings: tuple[str, ...] = ()
    virtual_stages: int = 2

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.sequence < 0:
            raise ValueError(f"tokens are positive, got {self.tokens} of {self.sequence}")
        if self.sequence and self.tokens % self.sequence:
            raise ValueError(
                f"{self.tokens} tokens are no whole number of sequences of {self.sequence}"
            )
        if not 0 <= self.utilisation <= 1:
            raise ValueError(f"utilisation is a share up to 1, got {self.utilisation}")
        if self.virtual_stages < 2:
            raise ValueError(
                f"an interleaved rank has 2 stages at least, got {self.virtual_stages}"
            )
        known: dict[str, tuple[str, ...]] = {
            "precision": ("bf16", "fp32"),
            "optimizer": ("adamw", "sgd"),
            "attention": ("flash", "full"),
            "systems": tuple(SYSTEMS),
            "schedules": SCHEDULES,
            "checkpointings": CHECKPOINTINGS,
        }
        for name, names in known.items():
            value = getattr(self, name)
            for one in (value,) if isinstance(value, str) else value:
                if one not in names:
                    raise ValueError(f"{name}: known are {', '.join(names)}, got {one!r}")
        for name in _AXES:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is positive, or 0 for all, got {getattr(self, name)}")

    @property
    def itemsize(self) -> int:
        """Bytes of a weight, a gradient and an activation."""
        return 2 if self.precision == "bf16" else 4

    @property
    def num_states(self) -> int:
        """Numbers in float32 that the optimizer keeps of a weight, masters left out."""
        return 2 if self.optimizer == "adamw" else 1

    @property
    def state_bytes(self) -> int:
        """Of a weight: the optimizer's numbers, and a master beside 16-bit weights."""
        return 4 * self.num_states + (4 if self.itemsize == 2 else 0)

    def with_sequence(self, context: int) -> Job:
        """The same with a sequence length.

        Raises:
            ValueError: the model's context does not divide the tokens.
        """
        if self.sequence:
            return self
        return dataclasses.replace(self, sequence=min(context, self.tokens))

    @property
    def num_sequences(self) -> int:
        """Of a step, over all ranks."""
        return self.tokens // self.sequence
