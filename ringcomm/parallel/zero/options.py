"""How a model is sharded: the options of zero.shard()."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, TypedDict

import torch


class ShardArguments(TypedDict, total=False):
    """The keyword arguments of ShardOptions."""

    bucket_bytes: int
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    loss_scale: float | Literal["dynamic"] | None
    clip_grad_norm: float | None
    offload_weights: bool
    resume: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """Checked; see zero.shard() for what they mean.

    Raises:
        ValueError: a value is out of its range.
    """

    bucket_bytes: int = 25 << 20
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    loss_scale: float | str | None = None
    clip_grad_norm: float | None = None
    offload_weights: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is positive, got {self.bucket_bytes}")
        if self.param_dtype not in (None, torch.float16, torch.bfloat16):
            raise ValueError(
                f"param_dtype is None, torch.float16 or torch.bfloat16, got {self.param_dtype}"
            )
        norm = self.clip_grad_norm
        if norm is not None and not (norm > 0 and math.isfinite(norm)):
            raise ValueError(f"clip_grad_norm is a positive number or None, got {norm!r}")
        if self.resume and not self.offload_weights:
            raise ValueError("resume is for offload_weights; load a state_dict() elsewhere")
        if self.offload_weights and self.param_dtype is not None:
            raise ValueError("with offload_weights cast the model itself, in place of param_dtype")

    @property
    def grad_dtype(self) -> torch.dtype:
        """What gradients are accumulated and reduced in."""
        return self.reduce_dtype or torch.float32

    @property
    def looks_first(self) -> bool:
        """Whether all gradients must be known before a weight is written."""
        return self.clip_grad_norm is not None or self.loss_scale is not None
