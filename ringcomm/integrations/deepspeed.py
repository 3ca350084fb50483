"""ringcomm as the communicator of DeepSpeed's inference on CPUs; written for DeepSpeed 0.19."""

import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ringcomm import ops

__all__ = ["register"]


def register() -> None:
    """Makes DeepSpeed's inference_all_reduce() use ringcomm. Call it before init_distributed().

        ringcomm.integrations.deepspeed.register()
        deepspeed.init_distributed("ringcomm")

    DeepSpeed's shared-memory operator is then neither compiled nor used: it ignores the group, and
    leaves strided tensors and dtypes other than float32, float16 and bfloat16 as they are. Raises
    ImportError without DeepSpeed.
    """
    from deepspeed.comm.torch import TorchBackend

    # The attribute `torch` of deepspeed.comm is PyTorch.
    vars(sys.modules[TorchBackend.__module__])["build_shm_op"] = lambda: None
    TorchBackend.inference_all_reduce = inference_all_reduce


def inference_all_reduce(
    self: Any, tensor: Tensor, op: Any, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The reduction in place; `op` is DeepSpeed's or torch's, `group` None for the default one."""
    if getattr(op, "name", "") == "SUM" and tensor.is_cpu:
        return ops.all_reduce(tensor, group=group, out=tensor)
    dist.all_reduce(tensor, self._reduce_op(op), group)
    return tensor
