"""The options of Lomo and AdaLomo."""

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.backend import resolve_group
from ringcomm.options import check_names


@dataclasses.dataclass(kw_only=True)
class StepOptions:
    """The options of Lomo; raises ValueError for those out of range or not used together."""

    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    clip_mode: str | None = None
    loss_scale: float | str | None = None
    accumulation_steps: int = 1
    reduce_dtype: torch.dtype | None = None
    group: dist.ProcessGroup | str | None = None
    mesh: dataclasses.InitVar[DeviceMesh | None] = None
    overlap: bool | None = None
    stochastic_rounding: bool = False
    master: str | None = None
    seed: int = 0

    def __post_init__(self, mesh: DeviceMesh | None) -> None:
        if mesh is not None:
            self.group = resolve_group(self.group, mesh)  # type: ignore[arg-type]
        for name in ("clip_grad_norm", "clip_grad_value"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a positive number or None, got {value!r}")
        _check_word("clip_mode", self.clip_mode, "deferred", "two_pass")
        _check_word("master", self.master, "split")
        if not isinstance(self.group, dist.ProcessGroup):
            _check_word("group", self.group, "none")
        if self.accumulation_steps < 1:
            raise ValueError(f"accumulation_steps must be 1 or more, got {self.accumulation_steps}")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed must be a number of 32 bits, got {self.seed}")
        if self.clip_grad_norm is not None and self.clip_grad_value is not None:
            raise ValueError("clip_grad_norm and clip_grad_value cannot be used together")
        if self.clip_mode is not None and not self.needs_all_gradients:
            raise ValueError(
                "clip_mode has no effect without clip_grad_norm or loss_scale: set one of them"
            )
        if self.mode == "two_pass" and self.accumulation_steps > 1:
            raise ValueError(
                'clip_mode="two_pass" runs one backward pass twice and cannot accumulate over'
                ' several: use clip_mode="deferred"'
            )
        if self.master is not None and self.stochastic_rounding:
            raise ValueError(
                'master="split" keeps all bits, so that stochastic_rounding has no effect: leave '
                "one of them out"
            )

    @property
    def needs_all_gradients(self) -> bool:
        """Whether the whole step's gradients must be known before it is made."""
        return self.clip_grad_norm is not None or self.loss_scale is not None

    @property
    def mode(self) -> str:
        """When weights are written: "immediate" (in the backward), "deferred" or "two_pass"."""
        return (self.clip_mode or "deferred") if self.needs_all_gradients else "immediate"


def _check_word(name: str, value: str | None, *allowed: str) -> None:
    if value is not None and value not in allowed:
        raise ValueError(f"{name} must be None or one of {', '.join(allowed)}, got {value!r}")


def options_of(optimizer: object, given: dict[str, Any]) -> StepOptions:
    """The options of an optimizer; raises TypeError for one that it does not have."""
    known = [field.name for field in dataclasses.fields(StepOptions)] + ["mesh"]
    why = ": LOMO keeps no state for a weight" if given.keys() & {"momentum", "betas"} else ""
    check_names(type(optimizer).__name__, given, known, why)
    return StepOptions(**given)
