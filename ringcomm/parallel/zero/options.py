"""What zero.shard() is given, checked, and what it refuses afterwards."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.parallel.clip import LossScale
from ringcomm.parallel.model.cut import find_trainer
from ringcomm.parallel.model.describe import Model
from ringcomm.parallel.zero.inner import Inner
from ringcomm.torch_names import active_ddp


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """The options of zero.shard(); raises ValueError for one that is out of range."""

    bucket_bytes: int = 25 << 20
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    loss_scale: float | str | None = None
    clip_grad_norm: float | None = None
    offload_weights: bool = False

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, got {self.bucket_bytes}")
        if self.param_dtype not in (None, torch.float16, torch.bfloat16):
            raise ValueError(
                f"param_dtype must be None, torch.float16 or torch.bfloat16, got {self.param_dtype}"
            )
        if self.loss_scale is not None:
            LossScale(self.loss_scale)  # raises for a wrong one
        norm = self.clip_grad_norm
        if norm is not None and not (norm > 0 and math.isfinite(norm)):
            raise ValueError(f"clip_grad_norm must be a positive number or None, got {norm!r}")
        if self.offload_weights and self.param_dtype is not None:
            raise ValueError(
                "param_dtype is not supported with offload_weights: cast the model itself"
            )

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype in which gradients are accumulated and reduced."""
        return self.reduce_dtype or torch.float32

    @property
    def needs_all_gradients(self) -> bool:
        """Whether all gradients must be known before a weight is written."""
        return self.clip_grad_norm is not None or self.loss_scale is not None


class Given(NamedTuple):
    """What zero.shard() was given, checked."""

    model: Model
    optimizers: list[Inner]
    stage: int
    group: dist.ProcessGroup
    mesh: DeviceMesh | None
    units: Iterable[nn.Module] | None
    options: ShardOptions

    @property
    def groups(self) -> list[dict[str, Any]]:
        """All parameter groups."""
        return [group for inner in self.optimizers for group in inner.groups]


def data_was_set(name: str) -> str:
    """The error message for a weight in other memory than that of its shards."""
    return (
        f"`.data` of {name} was set after zero.shard(), as vector_to_parameters() and"
        " to(memory_format=...) do, so that its shards have other values: write by param.copy_() in"
        " torch.no_grad(), or ringcomm.parallel.set_state_dict(). A Trainer moves its model,"
        " so make it before"
    )


def refuse_ddp(model: nn.Module, *_: Any) -> None:
    """A forward pre-hook; raises if DistributedDataParallel runs the model, but not its copies."""
    if active_ddp() is not None and any(map(find_trainer, model.parameters())):
        raise RuntimeError(
            "the model was sharded by zero.shard() but runs in DistributedDataParallel,"
            " which would reduce gradients again: call the model itself. With Accelerate or"
            " Trainer, call register() of ringcomm.integrations"
        )
