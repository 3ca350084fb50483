"""ringcomm as vLLM's communicator of tensor-parallel ranks on CPUs; for vLLM 0.32 and 0.33."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import lazy, ops
from ringcomm.torch_names import all_gather_single

__getattr__, __dir__ = lazy.attributes(__name__)


def plugin() -> None:
    """The entry point of vLLM's plug-ins, which each of its processes calls.

    With `VLLM_PLUGINS=ringcomm` the backend of its groups on CPUs becomes ringcomm, and
    CpuCommunicator uses it in place of vLLM's own shared-memory operators, which support 2, 3, 4
    or 8 ranks.
    """
    if "ringcomm" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    from vllm.distributed.device_communicators import cpu_communicator
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.dist_backend = "ringcomm"
    vars(cpu_communicator)["_CPUSHMDistributed"] = CpuDistributed


class CpuDistributed:
    """What CpuCommunicator calls in place of torch.distributed; collectives block.

    Args:
        communicator: vLLM's, with its `device_group` of ringcomm and its `ranks`.
    """

    def __init__(self, communicator: Any) -> None:
        self._group: dist.ProcessGroup = communicator.device_group

    @staticmethod
    def make_group_name(communicator: Any) -> str:
        """Equal on all ranks of a group; vLLM compares it."""
        return f"ringcomm-{communicator.unique_name}-{communicator.ranks}"

    def all_reduce(self, input: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """The sum, in place."""
        ops.all_reduce(input, group=self._group, out=input)

    def gather(
        self,
        input: Tensor,
        gather_list: list[Tensor] | None,
        dst: int = -1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """To the global rank `dst`, which gives a list."""
        dist.gather(input, gather_list, dst=dst, group=self._group)

    def all_gather_into_tensor(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None
    ) -> None:
        """The ranks' inputs, concatenated along dimension 0."""
        all_gather_single(output, input, group=self._group)

    def send_tensor_dict(self, tensor_dict: dict[str, Tensor], dst: int) -> None:
        """To the rank `dst` of the group, as its recv_tensor_dict() takes it."""
        kinds = {name: (value.shape, value.dtype) for name, value in tensor_dict.items()}
        dist.send_object_list([kinds], group=self._group, group_dst=dst)
        for value in tensor_dict.values():
            dist.send(value.contiguous(), group=self._group, group_dst=dst)

    def recv_tensor_dict(self, src: int) -> dict[str, Tensor]:
        """What the rank `src` of the group sent."""
        box: list[Any] = [None]
        dist.recv_object_list(box, group=self._group, group_src=src)
        received = {}
        for name, (shape, dtype) in box[0].items():
            received[name] = torch.empty(shape, dtype=dtype, device="cpu")
            dist.recv(received[name], group=self._group, group_src=src)
        return received
