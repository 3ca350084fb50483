"""Modules over ringcomm's operators: those of losses exchange the ranks' vocabulary shards once."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from ringcomm.backend import resolve_group
from ringcomm.ops.losses.cross_entropy import cross_entropy
from ringcomm.ops.losses.linear_cross_entropy import FusedUpdate, linear_cross_entropy
from ringcomm.ops.losses.options import (
    InPlace,
    LossArguments,
    check_inplace,
    checked_options,
    find_vocab_shard,
)
from ringcomm.parallel.expert.layer import MixtureOfExperts
from ringcomm.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from ringcomm.torch_names import group_named

__all__ = [
    "ColumnParallelLinear",
    "CrossEntropyLoss",
    "LinearCrossEntropyLoss",
    "MixtureOfExperts",
    "RowParallelLinear",
    "VocabParallelEmbedding",
]


class CrossEntropyLoss(nn.Module):
    """ringcomm.ops.cross_entropy with its options, as torch.nn.CrossEntropyLoss.

    Args:
        num_columns: needed with a group and without vocab_start: this rank's number of classes,
            padding included. The constructor is collective then.
        weight, group, mesh, vocab_start, vocab_size, inplace, options: as there.

    A copy has the same group. A pickled module keeps the group's name, and looks for the group of
    that name where it is loaded. Class weights are not in state dicts; those in a state dict of
    torch.nn.CrossEntropyLoss are loaded.

    Raises:
        ValueError: options are out of their range, or do not fit each other.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        num_columns: int | None = None,
        vocab_start: int | None = None,
        vocab_size: int | None = None,
        inplace: InPlace = False,
        **options: Unpack[LossArguments],
    ) -> None:
        super().__init__()
        check_inplace(inplace, checked_options(**options).reduction)
        if mesh is not None:
            group = resolve_group(group, mesh)
        if group is not None and vocab_start is None:
            if num_columns is None:
                raise ValueError(
                    "a group needs num_columns, this rank's number of classes, or vocab_start"
                )
            shard = find_vocab_shard(num_columns, group, None, vocab_size, weight)
            vocab_start, vocab_size = shard.start, shard.size
        self.register_buffer("weight", weight, persistent=False)
        self._group: Any = group
        shards = {"vocab_start": vocab_start, "vocab_size": vocab_size}
        self.options: dict[str, Any] = {**shards, **options, "inplace": inplace}
        self.register_load_state_dict_pre_hook(_load_weight)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, with the name of the group."""
        return {**vars(self), "_group": None if self._group is None else self._group.group_name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Looks for the group of the name."""
        super().__setstate__(state)
        self._group = None if self._group is None else group_named(self._group)

    def forward(
        self, logits: Tensor, target: Tensor, num_items: float | Tensor | None = None
    ) -> Any:
        """The loss of ringcomm.ops.cross_entropy."""
        given = {"weight": self.weight, "num_items": num_items, **self.options}
        return cross_entropy(logits, target, group=self._group, **given)


def _load_weight(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Loads class weights, which are in state dicts of torch's loss only."""
    value = None if module.weight is None else state.pop(f"{prefix}weight", None)
    if value is not None:
        module.weight.copy_(value)


class LinearCrossEntropyLoss(CrossEntropyLoss):
    """ringcomm.ops.linear_cross_entropy with its options.

    Args:
        class_weight, sequence_parallel, fused_update, accumulate_dtype: as there.
        options: those of CrossEntropyLoss, without inplace. It raises the same errors.
    """

    def __init__(
        self,
        class_weight: Tensor | None = None,
        *,
        sequence_parallel: bool = False,
        fused_update: FusedUpdate | None = None,
        accumulate_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(class_weight, **options)
        if self.options.pop("inplace"):
            raise ValueError(
                "inplace is for given logits; those of a linear layer are never materialized at"
                " once"
            )
        self.options |= {"sequence_parallel": sequence_parallel, "fused_update": fused_update}
        self.options["accumulate_dtype"] = accumulate_dtype

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        num_items: float | Tensor | None = None,
    ) -> Any:
        """The loss of ringcomm.ops.linear_cross_entropy."""
        given = {"class_weight": self.weight, "num_items": num_items, **self.options}
        return linear_cross_entropy(hidden, weight, target, bias=bias, group=self._group, **given)
