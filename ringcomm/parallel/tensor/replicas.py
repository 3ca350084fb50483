"""Checks that tensor-parallel ranks compute the same where layers are not sharded."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.backend import resolve_group
from ringcomm.parallel.flat_collectives import device_of, gathered_rows
from ringcomm.parallel.tensor.splits import refuse_copy


def are_same(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> bool:
    """Whether all ranks of a group have the same integers in tensors. Collective: 8 bytes."""
    total = torch.zeros(1, dtype=torch.int64, device="cpu")
    for tensor in tensors:
        numbers = tensor.flatten().to(torch.int64)
        order = torch.arange(1, numbers.numel() + 1, device=numbers.device)
        total = 31 * total.to(numbers.device) + 7 * numbers.sum() + (numbers * order).sum()
    return len(set(gathered_rows(total.to(device_of(group)), group).flatten().tolist())) == 1


def check_replicas(
    module: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    mesh: DeviceMesh | None = None,
    compares_inputs: bool = False,
    may_draw: bool = True,
) -> None:
    """Makes a module raise ValueError in training if tensor-parallel ranks compute other values.

    Ranks must draw the same random numbers from torch's generators, such as for dropout: call
    torch.manual_seed() with one seed on all of them. tensor_parallelize() and parallelize() call
    this; call it for a model of your own, outside of layers that draw for different tokens.

    Args:
        module: a model that has tensor-parallel layers. Its calls number 1, 2, 4, 8 and so on in
            training mode are checked; compiled code and captured graphs are not.
        group: None for the default group.
        mesh: a one-dimensional DeviceMesh, instead of a group.
        compares_inputs: whether integer tensors among the arguments must be the same, too.
        may_draw: False if the ranks have different tokens or features in the module, for which the
            same random numbers would be wrong, too.

    The checked calls are collective: they exchange 8 or 16 bytes.
    """
    resolved = resolve_group(group, mesh)
    if resolved.size() > 1:
        check = _Check(resolved, compares_inputs, may_draw)
        module.register_forward_pre_hook(check.before, with_kwargs=True)
        module.register_forward_hook(check.after)


class _Check:
    __deepcopy__ = __reduce_ex__ = refuse_copy

    def __init__(self, group: dist.ProcessGroup, compares_inputs: bool, may_draw: bool) -> None:
        self._group, self._compares_inputs, self._may_draw = group, compares_inputs, may_draw
        self._num_calls = 0
        self._states: list[Tensor] = []  # of torch's generators before a call that is checked

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._states = []
        if not module.training or torch.compiler.is_compiling():
            return
        self._num_calls += 1
        # Powers of two: a fault that persists is found, and the mean cost of a call goes to 0.
        if self._num_calls & (self._num_calls - 1):
            return
        device = next((param.device for param in module.parameters()), torch.device("cpu"))
        if getattr(_module_of(device), "is_current_stream_capturing", bool)():
            return
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        inputs = [value for value in given if not value.is_floating_point()]
        if self._compares_inputs and not are_same(inputs, self._group):
            raise ValueError(
                "the tensor-parallel ranks have different input ids, labels or masks: give them the"
                " same rows"
            )
        self._states = _states_on(device)

    def after(self, module: nn.Module, _: Any, __: Any) -> None:
        before, self._states = self._states, []
        if not before:
            return
        device = next((param.device for param in module.parameters()), torch.device("cpu"))
        states = _states_on(device)
        drawn: list[Tensor] = []
        if any(not torch.equal(*pair) for pair in zip(before, states, strict=True)):
            apart = torch.tensor([self._group.rank() + 1], dtype=torch.int64, device="cpu")
            drawn = [*before, *states] if self._may_draw else [apart]
        if are_same(drawn, self._group):
            return
        problem = (
            "draw different random numbers in a {}, such as for dropout, so weights that all of"
            " them have would diverge: call torch.manual_seed() with one seed on all of them, or"
            " set dropout to 0"
            if self._may_draw
            else "draw random numbers in a {}, such as for dropout or NEFTune, of which they have"
            " different tokens: set it to 0, or leave sequence_parallel out"
        )
        raise ValueError(f"the tensor-parallel ranks {problem.format(type(module).__name__)}")


def _states_on(device: torch.device) -> list[Tensor]:
    module = _module_of(device)
    return [torch.get_rng_state(), *([] if module is None else [module.get_rng_state(device)])]


def _module_of(device: torch.device) -> Any:
    """torch's of an accelerator, such as torch.cuda; None of others."""
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device)
