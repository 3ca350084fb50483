"""AdaLomo: LOMO with Adafactor's second moments, which take a row and a column of a matrix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Unpack

from ringcomm.ops.updates.weight_update import matrix_factors, step_and_decay
from ringcomm.optim.gradients import Gradient, LinearGradient
from ringcomm.optim.in_backward import InBackwardOptimizer
from ringcomm.optim.slot import Slot
from ringcomm.optim.step_options import StepArguments, StepOptions

_ops: Any = torch.ops.ringcomm


class AdaLomo(InBackwardOptimizer):
    """Updates by second moments inside the backward pass (Lv et al. 2023, arXiv 2310.10195).

    In step t, with beta = 1 - t ** -0.8 and means over the rows and columns of a matrix:

        R <- beta R + (1 - beta) (row means of G^2 + eps[0]), C likewise with column means
        U = G / sqrt(R C / mean(R)),  U <- U / max(1, RMS(U) / clip_threshold)
        s = lr * max(eps[1], RMS(W)), W <- (1 - s * weight_decay) W - s U

    What is no matrix keeps a moment for each element. State: "exp_avg_sq_row" and "exp_avg_sq_col",
    or "exp_avg_sq", float32. Of a linear layer's gradient one exists at a time.

    Args:
        model_or_params: as Lomo.
        lr: the learning rate, relative to each weight's RMS; positive.
        weight_decay: decoupled, relative likewise.
        eps: added to squares of gradients; the least RMS of a weight.
        clip_threshold: the largest RMS of an update.
        decay_rate: the exponent of t in beta, negative.
        model: as Lomo.
        options: as Lomo.

    Raises:
        ValueError: as Lomo.

    In the backward pass as Lomo.
    """

    def __init__(
        self,
        model_or_params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        *,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        model: nn.Module | None = None,
        **options: Unpack[StepArguments],
    ) -> None:
        if not lr > 0:
            raise ValueError(f"lr is a positive number, got {lr!r}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay is 0 or more, got {weight_decay!r}")
        if not (min(eps) > 0 and clip_threshold > 0 and decay_rate < 0):
            raise ValueError(
                "eps and clip_threshold are positive and decay_rate is negative, got"
                f" {eps}, {clip_threshold} and {decay_rate}"
            )
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
        }
        super().__init__(model_or_params, model, defaults, StepOptions(**options))

    def _new_state(self, slot: Slot) -> dict[str, Tensor]:
        rows, columns = slot.layout.matrix
        device = slot.local.device
        state = self._new_low(slot)
        if slot.layout.is_matrix:
            state["exp_avg_sq_row"] = torch.zeros(rows, device=device)
            state["exp_avg_sq_col"] = torch.zeros(columns, device=device)
        else:
            state["exp_avg_sq"] = torch.zeros(columns, device=device)
        return state

    def update(self, slot: Slot, gradient: Gradient, factor: float) -> None:
        """See gradient_path.Updater."""
        group, state = self._group_of(slot), self.state[slot.param]
        beta2 = 1.0 - (group["step"] + 1) ** group["decay_rate"]
        low, clip_value = state.get("low"), self.options.clip_grad_value
        lr, seed = self._lr_of(slot), self._rounding_seed(slot)
        if isinstance(gradient, LinearGradient) and not slot.layout.groups:
            _ops.linear_adalomo_update_(
                slot.local,
                gradient.x,
                gradient.grad_out,
                state["exp_avg_sq_row"],
                state["exp_avg_sq_col"],
                lr,
                group["weight_decay"],
                factor,
                seed,
                beta2=beta2,
                clip_threshold=group["clip_threshold"],
                eps_grad=group["eps"][0],
                eps_weight=group["eps"][1],
                low=low,
                clip_value=clip_value,
            )
            return
        local = slot.local
        weight = _flat(local, local)
        grad = _flat(gradient.dense(), local)
        low = None if low is None else _flat(low, local)
        row_factor, column_factor = self._factors(slot, grad, factor, beta2)
        squares = torch.zeros(2, device=weight.device)
        for block in slot.layout.blocks:
            squares += _ops.adalomo_squares(
                block.of(weight),
                block.of(grad),
                row_factor[block.rows],
                column_factor[block.columns],
                factor,
                low=None if low is None else block.of(low),
                clip_value=clip_value,
            )
        for ranks in slot.layout.groups:
            dist.all_reduce(squares, group=ranks)
        scalars = step_and_decay(
            squares / max(1, slot.layout.shape.numel()),
            lr,
            group["weight_decay"],
            group["clip_threshold"],
            group["eps"][1],
        )
        for block in slot.layout.blocks:
            _ops.adalomo_update_(
                block.of(weight),
                block.of(grad),
                row_factor[block.rows],
                column_factor[block.columns],
                scalars,
                factor,
                seed,
                low=None if low is None else block.of(low),
                clip_value=clip_value,
                first_elem=slot.layout.first_elem + block.begin,
            )

    def _factors(
        self, slot: Slot, grad: Tensor, factor: float, beta2: float
    ) -> tuple[Tensor, Tensor]:
        """Moves the moments on; what rows and columns of G are multiplied by to make U."""
        state, layout = self.state[slot.param], slot.layout
        eps = self._group_of(slot)["eps"][0]
        num_rows, num_columns = layout.matrix
        sums = torch.zeros(num_rows + num_columns, device=grad.device)
        rows, columns = sums[:num_rows], sums[num_rows:]
        for block in layout.blocks:
            of_rows, of_columns = _ops.square_sums(
                block.of(grad), factor, clip_value=self.options.clip_grad_value
            )
            rows[block.rows] += of_rows
            columns[block.columns] += of_columns
        if not layout.is_matrix:
            moment = state["exp_avg_sq"].lerp_(columns + eps, 1 - beta2)
            return torch.ones(1, device=grad.device), moment.rsqrt()
        for ranks in layout.groups:
            dist.all_reduce(sums, group=ranks)
        row = state["exp_avg_sq_row"].lerp_(rows / num_columns + eps, 1 - beta2)
        column = state["exp_avg_sq_col"].lerp_(columns / num_rows + eps, 1 - beta2)
        return matrix_factors(row, column)


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor's elements in the memory order of `like`, which is dense."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return tensor.as_strided([tensor.numel()], [1])
