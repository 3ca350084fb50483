"""Cross-entropy as modules, which find out once which classes the ranks have."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.ops.cross_entropy import cross_entropy
from ringcomm.ops.linear_cross_entropy import FusedUpdate, linear_cross_entropy
from ringcomm.ops.vocab_shards import find_shard


class _Loss(nn.Module):
    """Options of the loss, and this rank's classes."""

    class_weight: Tensor | None

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_columns: int | None,
        vocab_start: int | None,
        vocab_size: int | None,
        options: dict[str, Any],
    ) -> None:
        super().__init__()
        if group is not None and vocab_start is None:
            if num_columns is None:
                raise ValueError(
                    "a group wants num_columns, this rank's number of classes, or vocab_start"
                )
            shard = find_shard(num_columns, group, None, vocab_size, options["weight"])
            vocab_start, vocab_size = shard.start, shard.size
        self.register_buffer("class_weight", options.pop("weight"), persistent=False)
        self.options = {
            "group": group,
            "vocab_start": vocab_start,
            "vocab_size": vocab_size,
            **options,
        }

    def fp32_weight(self) -> Tensor | None:
        """The classes' weights, also where a model around the module was made bfloat16."""
        return None if self.class_weight is None else self.class_weight.float()


class CrossEntropyLoss(_Loss):
    """ringcomm.ops.cross_entropy with its options, as torch.nn.CrossEntropyLoss.

    Args:
        group: whose ranks share the vocabulary; None where this rank has all of it.
        num_columns: with a group and without vocab_start: how many classes this rank has, padding
            included. Making the module is a collective then.
        vocab_start, vocab_size, weight, ignore_index, label_smoothing, z_loss, softcap,
            logit_scale, reduction, outputs, inplace: as there.

    Raises:
        ValueError: options do not fit each other.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        num_columns: int | None = None,
        vocab_start: int | None = None,
        vocab_size: int | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        reduction: str = "mean",
        outputs: Sequence[str] = (),
        inplace: bool = False,
    ) -> None:
        options = {
            "weight": weight,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "reduction": reduction,
            "outputs": tuple(outputs),
            "inplace": inplace,
        }
        super().__init__(group, num_columns, vocab_start, vocab_size, options)

    def forward(
        self, logits: Tensor, target: Tensor, num_items: float | Tensor | None = None
    ) -> Any:
        """The loss of ringcomm.ops.cross_entropy."""
        return cross_entropy(
            logits, target, weight=self.fp32_weight(), num_items=num_items, **self.options
        )


class LinearCrossEntropyLoss(_Loss):
    """ringcomm.ops.linear_cross_entropy with its options.

    Args:
        group: whose ranks share the vocabulary; None where this rank has all of it.
        num_columns: with a group and without vocab_start: how many classes this rank has, padding
            included. Making the module is a collective then.
        vocab_start, vocab_size, class_weight, ignore_index, label_smoothing, z_loss, softcap,
            logit_scale, reduction, outputs, sequence_parallel, fused_update: as there.

    Raises:
        ValueError: options do not fit each other.
    """

    def __init__(
        self,
        class_weight: Tensor | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        num_columns: int | None = None,
        vocab_start: int | None = None,
        vocab_size: int | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        reduction: str = "mean",
        outputs: Sequence[str] = (),
        sequence_parallel: bool = False,
        fused_update: FusedUpdate | None = None,
    ) -> None:
        options = {
            "weight": class_weight,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "reduction": reduction,
            "outputs": tuple(outputs),
            "sequence_parallel": sequence_parallel,
            "fused_update": fused_update,
        }
        super().__init__(group, num_columns, vocab_start, vocab_size, options)

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
