"""Cross-entropy as modules, which find out once which classes the ranks have."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from ringcomm.backend import resolve_group
from ringcomm.ops.losses.cross_entropy import cross_entropy
from ringcomm.ops.losses.linear_cross_entropy import FusedUpdate, linear_cross_entropy
from ringcomm.ops.losses.options import LossArguments, checked_options, find_shard


class _Loss(nn.Module):
    """Options of the loss, and this rank's classes."""

    class_weight: Tensor | None

    def __init__(
        self,
        class_weight: Tensor | None,
        group: dist.ProcessGroup | None,
        num_columns: int | None,
        vocab_start: int | None,
        vocab_size: int | None,
        options: LossArguments,
        **more: Any,
    ) -> None:
        super().__init__()
        checked_options(**options)
        if group is not None and vocab_start is None:
            if num_columns is None:
                raise ValueError(
                    "a group wants num_columns, this rank's number of classes, or vocab_start"
                )
            shard = find_shard(num_columns, group, None, vocab_size, class_weight)
            vocab_start, vocab_size = shard.start, shard.size
        self.register_buffer("class_weight", class_weight, persistent=False)
        shards = {"group": group, "vocab_start": vocab_start, "vocab_size": vocab_size}
        self.options: dict[str, Any] = {**shards, **options, **more}

    def fp32_weight(self) -> Tensor | None:
        """The classes' weights; rounded where a model around the module was made bfloat16."""
        return None if self.class_weight is None else self.class_weight.float()


class CrossEntropyLoss(_Loss):
    """ringcomm.ops.cross_entropy with its options, as torch.nn.CrossEntropyLoss.

    Args:
        class_weight: as there.
        group: whose ranks share the vocabulary; None where this rank has all of it.
        mesh: a one-dimensional DeviceMesh of them, in place of a group.
        num_columns: with a group and without vocab_start: how many classes this rank has, padding
            included. Making the module is a collective then.
        vocab_start: this rank's first class, as there.
        vocab_size: the number of classes without padding, as there.
        inplace: the gradient replaces the logits, as there.
        options: ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction and outputs,
            as there.

    Raises:
        ValueError: options are out of their range, or do not fit each other.
    """

    def __init__(
        self,
        class_weight: Tensor | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        num_columns: int | None = None,
        vocab_start: int | None = None,
        vocab_size: int | None = None,
        inplace: bool = False,
        **options: Unpack[LossArguments],
    ) -> None:
        group = group if mesh is None else resolve_group(group, mesh)
        super().__init__(
            class_weight, group, num_columns, vocab_start, vocab_size, options, inplace=inplace
        )

    def forward(
        self, logits: Tensor, target: Tensor, num_items: float | Tensor | None = None
    ) -> Any:
        """The loss of ringcomm.ops.cross_entropy."""
        return cross_entropy(
            logits, target, class_weight=self.fp32_weight(), num_items=num_items, **self.options
        )


class LinearCrossEntropyLoss(_Loss):
    """ringcomm.ops.linear_cross_entropy with its options.

    Args:
        class_weight: as there.
        group: whose ranks share the vocabulary; None where this rank has all of it.
        mesh: a one-dimensional DeviceMesh of them, in place of a group.
        num_columns: with a group and without vocab_start: how many classes this rank has, padding
            included. Making the module is a collective then.
        vocab_start: this rank's first class, as there.
        vocab_size: the number of classes without padding, as there.
        sequence_parallel: hidden states are this rank's share, as there.
        fused_update: takes the weight's gradient, as there.
        options: ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction and outputs,
            as there.

    Raises:
        ValueError: options are out of their range, or do not fit each other.
    """

    def __init__(
        self,
        class_weight: Tensor | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        num_columns: int | None = None,
        vocab_start: int | None = None,
        vocab_size: int | None = None,
        sequence_parallel: bool = False,
        fused_update: FusedUpdate | None = None,
        **options: Unpack[LossArguments],
    ) -> None:
        group = group if mesh is None else resolve_group(group, mesh)
        super().__init__(
            class_weight,
            group,
            num_columns,
            vocab_start,
            vocab_size,
            options,
            sequence_parallel=sequence_parallel,
            fused_update=fused_update,
        )

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        num_items: float | Tensor | None = None,
    ) -> Any:
        """The loss of ringcomm.ops.linear_cross_entropy."""
        return linear_cross_entropy(
            hidden,
            weight,
            target,
            bias=bias,
            class_weight=self.fp32_weight(),
            num_items=num_items,
            **self.options,
        )
