"""Factors of gradients: a loss scale (Micikevicius et al. 2018), and clipping."""

from __future__ import annotations

import math
from typing import Any


class LossScale:
    """A fixed factor, or one that halves on overflow and doubles after `growth_interval` steps.

    Attributes:
        value: the current factor of the loss.
    """

    initial_value = 2.0**16
    growth_interval = 2000

    def __init__(self, given: str | float) -> None:
        """`given` is "dynamic" or the factor; raises ValueError for others."""
        self.is_dynamic = given == "dynamic"
        if not self.is_dynamic and (
            isinstance(given, str) or not math.isfinite(given) or given <= 0
        ):
            raise ValueError(
                f'loss_scale must be None, "dynamic" or a positive number, got {given!r}'
            )
        self.value = self.initial_value if self.is_dynamic else float(given)
        self._num_good_steps = 0

    def update(self, has_overflow: bool) -> None:
        """After a step, or one that was skipped."""
        if not self.is_dynamic:
            return
        self._num_good_steps = 0 if has_overflow else self._num_good_steps + 1
        if has_overflow:
            self.value /= 2
        elif self._num_good_steps == self.growth_interval:
            self.value *= 2
            self._num_good_steps = 0

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"value": self.value, "num_good_steps": self._num_good_steps}

    def load(self, state: dict[str, Any]) -> None:
        """Restores a `state`."""
        self.value, self._num_good_steps = state["value"], state["num_good_steps"]


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor by which torch.nn.utils.clip_grad_norm_ multiplies gradients."""
    return min(1.0, max_norm / (norm + 1e-6))
