"""torch's PipelineStage, with fixes for older versions: all that uses its private names.

Versions before 2.15 preallocate memory for the messages of all micro-batches of a step. Versions
before 2.13 assume that every input of a stage requires grad, compare strides, and send to the own
rank before the first step of a V. Their split backward counts the gradient twice for a weight that
one stage uses twice, so Stage does both halves at once there.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed import P2POp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.stage import stage_backward_weight

from ringcomm.torch_names import TORCH_VERSION

HAS_HALVES, ALLOCATES_LATE = TORCH_VERSION >= (2, 13), TORCH_VERSION >= (2, 15)


def meta_like(tensor: Tensor, requires_grad: bool) -> Tensor:
    """A contiguous tensor on the meta device."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


class TorchStage(PipelineStage):
    """torch's stage, with what its version lacks."""

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False
    ) -> Any:
        """Splits the backward pass also of a weight that is used before and after another one."""
        if backward_type != "weight":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if isinstance(self.submod, FSDPModule):  # as torch's
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        # The gradients of two weights may pass the same operation. Its graph ends with this call.
        groups = bwd_kwargs["param_groups"]
        return stage_backward_weight(self.submod.parameters(), groups, retain_graph=True), None

    def clear_runtime_states(self) -> None:
        """Frees the messages that a failed step may leave."""
        super().clear_runtime_states()
        for info in chain(*self.args_recv_info.values(), *self.grad_recv_info.values()):
            if ALLOCATES_LATE:
                info.buffer = None
            else:
                _drop(info)

    # ---- memory for a message is allocated when a stage waits for it; the last reference frees it

    if not ALLOCATES_LATE:

        def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
            had_backward = self.has_backward
            self.has_backward &= HAS_HALVES  # before, integers would have to require grad
            result = super()._prepare_forward_infra(*args, **kwargs)
            self.has_backward = had_backward
            _drop(*chain(*self.args_recv_info.values()))
            if not HAS_HALVES and not self.is_first:
                for infos in self.args_recv_info.values():
                    for info, meta in zip(infos, self.inputs_meta, strict=True):
                        info.buffer = meta
            return result

        def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
            result = super()._prepare_backward_infra(*args, **kwargs)
            _drop(*chain(*self.grad_recv_info.values()))
            return result

        def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
            self._make_room(self.args_recv_info[fwd_chunk_id])
            return super().get_fwd_recv_ops(fwd_chunk_id)

        def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
            self._make_room(self.grad_recv_info.get(bwd_chunk_id, ()))
            return super().get_bwd_recv_ops(bwd_chunk_id)

        def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
            infos = zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True)
            if HAS_HALVES:
                self._make_room(info for info, grad in infos if grad is None)  # torch fills zeros
                super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
                return
            for info, grad in infos:
                if info is not None:
                    info.buffer = grad

        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            _drop(*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info.get(bwd_chunk_id, ()))
            if not (HAS_HALVES or self.is_first):
                # The stage before waits for a gradient of all that requires one.
                self.bwd_cache[bwd_chunk_id] = tuple(
                    torch.zeros_like(meta, device=self.device, requires_grad=False)
                    if grad is None and meta.requires_grad
                    else grad
                    for grad, meta in zip(
                        self.bwd_cache[bwd_chunk_id], self.inputs_meta, strict=True
                    )
                )

        def _make_room(self, infos: Iterable[Any]) -> None:
            for info in infos:
                buffer = getattr(info, "buffer", None)
                if isinstance(buffer, Tensor) and buffer.is_meta:
                    info.placeholder = buffer
                    # empty_like() of a tensor on the meta device takes ten times as long.
                    info.buffer = torch.empty(
                        buffer.shape,
                        dtype=buffer.dtype,
                        device=self.device,
                        requires_grad=buffer.requires_grad,
                    )

    # ---- boundaries are taken from the meta tensors that the stage was made with

    if not HAS_HALVES:
        inputs_meta: Any
        get_outputs_meta: Any

        def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
            ops = super()._get_init_p2p_neighbors_ops()
            return [op for op in ops if op.group_peer != self.group_rank]

        def _validate_fwd_input(self, *_: Any) -> None:
            """Stage checks shapes itself."""

        _validate_fwd_outputs = _validate_fwd_input

        def _create_grad_recv_info(self, act_send_info: Any) -> tuple[Any, ...]:
            infos = super()._create_grad_recv_info(act_send_info)
            metas = self.get_outputs_meta()[: len(infos)]  # the last stage receives none
            return tuple(
                info if meta.requires_grad else None
                for info, meta in zip(infos, metas, strict=True)
            )

        def _create_grad_send_info(self, args_recv_info: Any) -> list[int | None]:
            sources = super()._create_grad_send_info(args_recv_info)
            return [
                source if meta.requires_grad else None
                for source, meta in zip(sources, self.inputs_meta, strict=True)
            ]

        def _map_tensor_from_recv_info(self, recv_infos: Any) -> Any:
            return tuple(getattr(info, "buffer", None) for info in recv_infos)

        def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
            outputs = prev_stage_outputs
            for info, tensor in zip(
                self.args_recv_info[mb_index],
                outputs if isinstance(outputs, tuple) else (outputs,),
                strict=True,
            ):
                info.buffer = tensor.detach().requires_grad_(tensor.requires_grad)


def _drop(*infos: Any) -> None:
    """Frees messages; leaves a placeholder with the shape and no memory for each."""
    for info in infos:
        buffer = getattr(info, "buffer", None)
        if isinstance(buffer, Tensor) and not buffer.is_meta:
            if not hasattr(info, "placeholder"):
                info.placeholder = meta_like(buffer, buffer.requires_grad)
            info.buffer = info.placeholder
