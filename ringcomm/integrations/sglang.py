"""ringcomm as SGLang's communicator of tensor-parallel ranks on CPUs; written for SGLang 0.5."""

import os
from typing import Any

from torch import Tensor

from ringcomm import ops

__all__ = ["register"]


def register() -> None:
    """Makes SGLang's groups on CPUs use ringcomm. Call it before they are made, on every rank.

    The groups' backend becomes ringcomm. GroupCoordinator then reduces CPU tensors by ringcomm and
    gathers them by torch.distributed, in place of the shared-memory operators of sgl-kernel, and
    fuses an all_reduce with the residual addition and the RMSNorm that follow where a model asks
    for it. Tensors of other devices take SGLang's own way. Raises ImportError without SGLang.

    SGLang's schedulers are processes of their own, which call the plug-ins that `SGLANG_PLUGINS`
    names: with `SGLANG_PLUGINS=ringcomm` they call this function.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.platforms.cpu import CpuDeviceMixin

    coordinator: Any = parallel_state.GroupCoordinator
    if getattr(coordinator, "uses_ringcomm", False):
        return
    CpuDeviceMixin.get_torch_distributed_backend_str = lambda _: "ringcomm"
    parallel_state.is_shm_available = lambda *_: False
    sum_of_others = coordinator.all_reduce
    norm_of_others = getattr(coordinator, "fused_allreduce_rmsnorm", None)

    def all_reduce(self: Any, input_: Tensor, *options: Any, **names: Any) -> Tensor:
        if self.world_size == 1 or not input_.is_cpu:
            return sum_of_others(self, input_, *options, **names)
        return ops.all_reduce(input_, group=self.device_group, out=input_)

    def fused_allreduce_rmsnorm(
        self: Any, input_: Tensor, residual_inp_: Tensor, weight_: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None:
        if input_.is_cpu:
            return ops.all_reduce_add_rms_norm_(
                input_, residual_inp_, weight_, eps, self.device_group
            )
        if norm_of_others is None:
            return None
        return norm_of_others(self, input_, residual_inp_, weight_, eps)

    coordinator.all_reduce = all_reduce
    coordinator.fused_allreduce_rmsnorm = fused_allreduce_rmsnorm
    coordinator.uses_ringcomm = True


def plugin() -> None:
    """The entry point of SGLang's plug-ins, which SGLang calls unless SGLANG_PLUGINS omits it."""
    if "ringcomm" in os.environ.get("SGLANG_PLUGINS", "").split(","):
        register()
