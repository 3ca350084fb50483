"""ZeRO stage 3: weights, gradients and state in shards, by torch's fully_shard."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ringcomm.parallel.flat_collectives import device_of, takes_uneven
from ringcomm.parallel.model_units import default_units, materialize
from ringcomm.parallel.same_gradients import watch_whole_weights
from ringcomm.parallel.zero.inner import is_offloaded, made_over, set_state_of, state_of
from ringcomm.parallel.zero.optimizer import ZeroOptimizer, tensors_of
from ringcomm.parallel.zero.options import ShardOptions
from ringcomm.parallel.zero.state_rows import check_rows
from ringcomm.parallel.zero.unit_comms import watch_unit


class Zero3(ZeroOptimizer):
    """torch's optimizer on the shards of fully_shard; made by zero.shard().

    The root reshards after its forward like every unit, so that a step moves three parts: weights
    twice, gradients once. Weights stay as they were given (float32) and are gathered in
    `param_dtype`; gradients are reduced in `reduce_dtype`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        options: ShardOptions,
        units: Iterable[nn.Module] | None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Over the ranks of the group, which are those of the mesh. Collective."""
        names = {param: name for name, param in model.named_parameters()}
        found = default_units(model) if units is None else units
        _shard_units(model, units_apart(model, found), group, mesh, options)
        new = dict(model.named_parameters())
        groups = [
            {**old, "params": [new[names[param]] for param in old["params"]]}
            for old in optimizer.param_groups
        ]
        super().__init__(model, groups, group, options)
        self._inner = made_over(optimizer, groups)
        # The weights that autograd has made a gradient of on this rank since the last step, and
        # what fully_shard has left of any, be it zeros.
        self._marked: set[nn.Parameter] = set()
        self._reduced: dict[nn.Parameter, Tensor | None] = {}
        told = weakref.ref(self)

        def mark(module: nn.Module, name: str, _: Tensor) -> None:
            if (found := told()) is not None:
                found._marked.add(found._names[module, name])

        def seen(module: nn.Module, name: str, param: nn.Parameter) -> None:
            param.register_post_accumulate_grad_hook(partial(mark, module, name))

        self._names = {
            (module, name): param
            for module in model.modules()
            for name, param in module.named_parameters(recurse=False)
        }
        for module in model.modules():
            if isinstance(module, FSDPModule):
                watch_whole_weights(module, seen)

        def reduced(param: Any) -> None:
            if (found := told()) is not None:
                found._reduced[param] = param.grad

        for param in self._params():
            param.register_post_accumulate_grad_hook(reduced)
        self._tell_scale()

    @property
    def _grad_scale(self) -> float:
        return 1.0  # see _tell_scale()

    def _tell_scale(self) -> None:
        """Has fully_shard divide gradients by the loss scale, with the number of ranks.

        So they are what torch.nn.utils.clip_grad_norm_ takes them for.
        """
        model = self._model()
        if self._scale is None or model is None:
            return
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Gloo has no other reduction than SUM; alone, torch 2.13 would divide twice by it.
                module.set_force_sum_reduction_for_comms(self.group.size() > 1)
                module.set_gradient_divide_factor(self.group.size() * self.loss_scale)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See ZeroOptimizer."""
        loss = super().step(closure)
        self._tell_scale()
        return loss

    def _params(self) -> Iterator[nn.Parameter]:
        for param_group in self.param_groups:
            yield from param_group["params"]

    def _agree(self) -> bool:
        """Drops the zeros that fully_shard has reduced where no rank has a gradient."""
        params = list(self._params())
        mine = [self._has_gradient(param) for param in params]
        facts = torch.tensor(mine, dtype=torch.uint8, device=device_of(self.group))
        dist.all_reduce(facts, dist.ReduceOp.MAX, group=self.group)
        for param, has in zip(params, facts.tolist(), strict=True):
            if not has:
                param.grad = None
        return bool(facts.any())

    def _has_gradient(self, param: nn.Parameter) -> bool:
        """Whether one has come on this rank: by autograd, or by the user."""
        is_by_user = param.grad is not self._reduced.get(param)
        return param.grad is not None and (is_by_user or param in self._marked)

    def _reduce(self) -> None:
        """The backward pass has reduced all."""

    def _shards(self) -> Iterator[tuple[nn.Parameter, Tensor, Tensor]]:
        for param in self._params():
            if param.grad is not None:
                yield param, _local(param.detach()), _local(param.grad)

    def gradient_tensors(self) -> list[Tensor]:
        """See ZeroOptimizer."""
        return [grad for _, _, grad in self._shards()]

    def state_tensors(self) -> list[Tensor]:
        """See ZeroOptimizer."""
        return [_local(tensor) for tensor in tensors_of(self._inner)]

    def _update(self, factor: float) -> None:
        for inner, outer in zip(self._inner.param_groups, self.param_groups, strict=True):
            inner.update({key: value for key, value in outer.items() if key != "params"})
        if factor != 1:
            torch._foreach_mul_([grad for _, _, grad in self._shards()], factor)
        self._inner.step()

    def _forget_gradients(self) -> None:
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, whatever `set_to_none`."""
        self._marked.clear()
        self._reduced.clear()
        super().zero_grad()

    # ---- state

    def _state_of(self, param: Any) -> dict[str, Any]:
        state = state_of(self._inner, param)
        return {key: _spread(value, param) for key, value in state.items() if value is not None}

    def has_stepped(self, param: Any) -> bool:
        """See ZeroOptimizer."""
        return bool(state_of(self._inner, param))

    def whole_state(self, param: Any) -> Iterator[tuple[str, Any]]:
        """See ZeroOptimizer."""
        for key, value in self._state_of(param).items():
            yield key, value.full_tensor() if isinstance(value, DTensor) else value

    def _check_part(self, param: Any, value: DTensor) -> None:
        if param.device_mesh.ndim == 1:
            check_rows(value, self.group)
        elif value.placements != param.placements:
            raise ValueError(
                f"a state of shape {tuple(value.shape)} is placed as {value.placements}, and its"
                f" weight as {param.placements}: torch.distributed.checkpoint goes between meshes"
            )

    def _row_state(self, param: Any) -> dict[str, Any]:
        return self._state_of(param)  # fully_shard cuts between rows as well

    def range_of(self, param: Any) -> None:
        """See ZeroOptimizer."""

    def new_state_of(self, param: Any) -> dict[str, Any]:
        """See ZeroOptimizer."""
        if not is_offloaded(self._inner):
            return {}
        state = self._inner.new_state_of(param, _local(param.detach()))
        return {key: _spread(value, param) for key, value in state.items()}

    def forget_steps(self) -> None:
        """See ZeroOptimizer."""
        for state in self._inner.state.values():
            if "step" in state:
                state["step"].zero_()

    def _cut(self, param: Any, value: Tensor) -> Tensor:
        """This rank's rows of a whole state, or the rows that it has already."""
        if isinstance(value, DTensor):
            return self._taken(value.to_local(), param)
        whole = value.to(device=param.device, dtype=self._state_dtype(param))
        # None: every rank has the whole value, and nothing is sent.
        return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)

    def _taken(self, local: Tensor, param: Any) -> Any:
        """A copy of a state of this rank's shard, as the optimizer keeps it."""
        dtype = self._state_dtype(param)
        return _spread(local.to(device=param.device, dtype=dtype, copy=True), param)

    def _state_dtype(self, param: Any) -> torch.dtype:
        return torch.float32 if is_offloaded(self._inner) else param.dtype

    def _set_state(self, param: Any, state: dict[str, Any]) -> None:
        mine = {}
        for key, value in state.items():
            if key == "step" or not isinstance(value, Tensor):
                mine[key] = value
            elif key != "master" or is_offloaded(self._inner):  # else the weights themselves
                mine[key] = value if isinstance(value, DTensor) else self._taken(value, param)
        set_state_of(self._inner, param, mine)

    def _states_taken(self) -> None:
        self._tell_scale()  # which has been loaded as well


def _shard_units(
    model: nn.Module,
    units: list[nn.Module],
    group: dist.ProcessGroup,
    mesh: DeviceMesh | None,
    options: ShardOptions,
) -> None:
    """Unit after unit: those on the meta device get their values, all get rank 0's."""
    device = next(model.parameters()).device
    device = device_of(group) if device.type == "meta" else device
    mesh = mesh or DeviceMesh.from_group(group, device.type)
    policy = MixedPrecisionPolicy(param_dtype=options.param_dtype, reduce_dtype=options.grad_dtype)
    for module in [*units, model]:
        params = [param for param in module.parameters() if not isinstance(param, DTensor)]
        materialize(module, params, device)
        with torch.no_grad():
            for param in params:
                dist.broadcast(param.data, group=group, group_src=0)
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        watch_unit(module, model, is_ringcomm=takes_uneven(group, device))


def units_apart(model: nn.Module, units: Iterable[nn.Module]) -> list[nn.Module]:
    """The units that fully_shard can have beside the root: those that share no weight."""
    return [unit for unit in units if _is_apart(model, unit)]


def _is_apart(model: nn.Module, unit: nn.Module) -> bool:
    """Whether nobody outside of a unit has its weights; the others are the root's."""
    inside = {id(module) for module in unit.modules()}
    others = {
        param
        for module in model.modules()
        if id(module) not in inside
        for param in module.parameters(recurse=False)
    }
    return unit is not model and not any(param in others for param in unit.parameters())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _spread(value: Any, param: Any) -> Any:
    """A state that is this rank's shard alone, as one of all ranks."""
    if isinstance(value, DTensor) or not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return DTensor.from_local(
        value,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
