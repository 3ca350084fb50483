"""Stage 3 where ranks do not use the same weights: zeros for some, an error for units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.errors import MismatchError
from ringcomm.torch_names import all_gather_single, reduce_scatter_single

Result = TypeVar("Result")


def watch_unit(unit: Any, model: nn.Module, *, is_ringcomm: bool) -> None:
    """Has a unit of fully_shard reduce zeros for weights without a gradient on this rank.

    torch does so from 2.13 on. Where ranks still call different collectives of the unit, which
    ringcomm finds out, an error names it.
    """
    if hasattr(unit, "set_reduce_scatter_unused_params"):
        unit.set_reduce_scatter_unused_params(True, recurse=False)
    if not is_ringcomm:
        return
    name = next((name for name, module in model.named_modules() if module is unit), "")
    unit.set_custom_all_gather(_AllGather(name))
    unit.set_custom_reduce_scatter(_ReduceScatter(name))


class _Named:
    """What set_custom_all_gather() and set_custom_reduce_scatter() take; explains a mismatch."""

    def __init__(self, name: str) -> None:
        self._name = f"unit {name!r}" if name else "the root unit"

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new tensor."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _explained(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except MismatchError as error:
            raise RuntimeError(
                f"ranks do not run the same weights of {self._name}: zero.shard(stage=3) wants"
                " every rank to run the same units in the same order, and before torch 2.13"
                " gradients of the same weights; stages 1 and 2 do not. No weight has been written"
            ) from error


class _AllGather(_Named):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        return self._explained(
            lambda: all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        )


class _ReduceScatter(_Named):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        return self._explained(
            lambda: reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        )
