"""Sharded weights, gathered only when needed: ZeRO stage 3 (Rajbhandari et al. 2020).

Each rank keeps 1/N of every parameter. Parameters keep their identity, and their memory is
allocated and freed: unit_hooks.py decides when, sharded_unit.py does it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.backend import resolve_group
from ringcomm.backward_pass import in_backward
from ringcomm.ops.fused_update import shard_range
from ringcomm.parallel.flat_collectives import reduce_scatter_mean
from ringcomm.parallel.model.axes import note_shards
from ringcomm.parallel.model.describe import describe, start_equal_over_data
from ringcomm.parallel.model.refuse import Asked, refuse
from ringcomm.parallel.model.saving import refuse_copy, save_full
from ringcomm.parallel.shards.sharded_unit import ShardedUnit
from ringcomm.parallel.shards.unit_hooks import UnitHooks, refuse_compile
from ringcomm.parallel.shards.units import (
    data_group_of,
    materialize,
    new_group_alone,
    params_of_units,
)
from ringcomm.torch_names import APPLY, ignore_in_ddp, ignored_in_ddp


class WeightShards:
    """Shards the weights of a model over the ranks of a group.

    A unit's weights are gathered before its forward and freed afterwards, and again for its
    backward. A rank has in memory its shards, the weights outside all units, and those of one or
    two units. A step gathers every weight twice and reduces its gradient once: 3(N-1)/N of their
    bytes. Gradients are unsharded and local to this rank: `reduce_scatter` returns the gradient for
    `shard_of`.

        shards = WeightShards(model)
        loss(model(x)).backward()
        for param in model.parameters():
            grad = shards.reduce_scatter(param, param.grad)
            shards.shard_of(param).add_(grad, alpha=-lr)
            param.grad = None

    Reading a parameter while its weights are freed raises RuntimeError: read values through
    `shard_of`, or inside `gather()`. Views and detached tensors of a parameter must not be used
    outside the forward or `gather()` that made them: their memory is freed too. If a unit returns
    them, its output has copies. Move the model to its device and dtype before. Gradients of
    gradients (create_graph=True) raise.

    Args:
        model: a module whose parameters are dense, contiguous, in separate memory, on one device,
            and equal in shape and dtype on all ranks. Parameters and buffers get the values of rank
            0. Frozen parameters are sharded too; buffers are not.
        group: None for the default group. ringcomm supports pieces of any size; for other backends
            they are padded to equal sizes when they are sent.
        mesh: a one-dimensional DeviceMesh, instead of a group.
        units: the modules whose weights are gathered together, the layers of a model. Default: the
            entries of every outermost nn.ModuleList, or of every outermost nn.Sequential if there
            is no such list; also the parts of a model that cannot be called. The model itself is
            the unit of all other parameters, and of those that several units share. All ranks run
            the same units in the same order.

    Attributes:
        group: as resolved.
        units: the units; the model itself first, if it has parameters outside other units.

    Raises:
        TypeError: a parameter is not a plain tensor, or a unit is not a module.
        ValueError: a parameter does not meet the conditions above or is already sharded, or a unit
            is not part of the model or cannot be called. Nothing has been written.
        RuntimeError: a part of the model is compiled; also raised by a compiled forward.
        RingcommError: a rank failed or called something else; also raised by every forward and
            backward.

    Collective: one broadcast per unit.
    """

    _shard_store: Any = None  # of ZeRO-Infinity

    @torch.inference_mode(False)  # what it makes is trained later
    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        mesh: DeviceMesh | None = None,
        units: Iterable[nn.Module] | None = None,
    ) -> None:
        self.group = resolve_group(group, mesh)
        described = describe(model)
        if self._shard_store is None:  # zero.shard() has asked
            refuse(described, Asked("WeightShards", "WeightShards"))
        refuse_compile(model)
        found = params_of_units(model, units)
        self._model = model
        self._hooks: dict[nn.Parameter, UnitHooks] = {}
        self.units: list[ShardedUnit] = []
        alone: Any = None
        for module, params in found:
            materialize(module, params, torch.device("cpu"))
            start_equal_over_data(described, [self.group], params)
            ranks = data_group_of(module, self.group) or alone or (alone := new_group_alone())
            self.units.append(ShardedUnit(module, params, ranks, self._shard_store))
        materialize(model, (), torch.device("cpu"))  # modules with only buffers
        start_equal_over_data(describe(model), [self.group], model.buffers())
        for unit in self.units:
            hooks = UnitHooks(unit, is_root=unit.module is model)
            self._hooks.update(dict.fromkeys(unit.params, hooks))
            unit.free()
        # It would read freed weights; an empty list of parameters means that it is not needed.
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        self._ignored_before = ignored_in_ddp(model)
        ignore_in_ddp(model, names)
        # state_dict() reads weights, which raises by itself while they are freed. These hooks keep
        # the shards alive as long as the model.
        self._handles = [
            module.register_load_state_dict_pre_hook(self._refuse_load)
            for module in model.modules()
            if any(param in self._hooks for param in module.parameters(recurse=False))
        ]
        note_shards(self._hooks, self)
        for param in self._hooks:
            for name in ("__deepcopy__", "__reduce_ex__"):
                setattr(param, name, refuse_copy)
        refuse_moves(model)
        self._end_save_full = save_full(model, self.group)

    # ---- shards

    def unit_of(self, param: Tensor) -> ShardedUnit:
        """The unit of a parameter. Raises ValueError if it is not sharded here."""
        if param not in self._hooks:
            raise ValueError(
                f"a tensor of shape {tuple(param.shape)} is not a parameter of these shards"
            )
        return self._hooks[param].unit  # type: ignore[index]

    def shard_of(self, param: Tensor) -> Tensor:
        """This rank's piece of a parameter, which an optimizer updates in place.

        Elements range_of(param) of the flat parameter, the same tensor every time. The next gather
        uses its values. Raises ValueError if the parameter is not sharded here.
        """
        return self.unit_of(param).shards[param]  # type: ignore[index]

    def range_of(self, param: Tensor, rank: int | None = None) -> tuple[int, int]:
        """The elements [begin, end) of the flat parameter in a rank's shard_of(), by shard_range().

        `rank`: of the unit's group; by default this one.
        """
        group = self.unit_of(param).group
        return shard_range(param.numel(), group.size(), group.rank() if rank is None else rank)

    def reduce_scatter(self, param: Tensor, grad: Tensor) -> Tensor:
        """Elements range_of(param) of the mean of the ranks' gradients, in their dtype.

        Raises:
            ValueError: the parameter is not sharded here; or the gradient is sparse, or has another
                shape or device.

        Collective; sends (N-1)/N of the gradient.
        """
        group = self.unit_of(param).group
        if grad.shape != param.shape or grad.device != param.device or grad.is_sparse:
            kind = "sparse" if grad.is_sparse else "dense"
            raise ValueError(
                f"the gradient must be dense, {tuple(param.shape)} on {param.device}, got {kind},"
                f" {tuple(grad.shape)} on {grad.device}"
            )
        mean = reduce_scatter_mean(grad.detach().reshape(-1), group)
        # Gradients of experts are sums over the tokens of all ranks that share the layer.
        return mean if group is self.group else mean.mul_(group.size() / self.group.size())

    # ---- gathered weights

    def release(self, param: Tensor) -> None:
        """Marks the parameter's gradient as computed, so that its weight is no longer needed.

        Call it for a gradient that autograd does not accumulate into the parameter itself. A unit's
        weights are freed when a backward pass has all its gradients and has left it; those of the
        model itself when the backward pass ends.
        """
        self.unit_of(param)
        self._hooks[param].grad_arrived(param)  # type: ignore[index]

    def release_all(self) -> None:
        """Frees all weights except those held by gather(), as after a failed backward pass.

        Raises:
            RuntimeError: called within a backward pass.
        """
        if in_backward():
            raise RuntimeError(
                "release_all() was called in a backward pass, which needs the weights"
            )
        for hooks in set(self._hooks.values()):
            hooks.forget_backward()
            hooks.unit.free()

    @contextmanager
    def gather(self) -> Iterator[None]:
        """A context in which all weights of the model are gathered, for reading.

        Writes to them are lost, and updates of shards are not visible inside.

        Collective: one call for each unit.
        """
        mine = [unit for unit in self.units if not unit.is_held]
        freed = [unit for unit in mine if not unit.is_full]
        try:
            for unit in mine:
                unit.gather()
                unit.is_held = True
            yield
        finally:
            for unit in mine:
                unit.is_held = False
            for unit in freed:
                unit.free()

    def close(self) -> None:
        """Makes the model an ordinary one with full weights again; a second call does nothing.

        Collective: one call for each unit.
        """
        for unit in self.units:
            unit.gather()
        for param, hooks in self._hooks.items():
            hooks.remove()
            del param.__deepcopy__, param.__reduce_ex__
        note_shards(self._hooks, None)
        for module in self._model.modules():
            vars(module).pop(APPLY, None)
        for handle in self._handles:
            handle.remove()
        self._end_save_full()
        if self.units:
            ignore_in_ddp(self._model, self._ignored_before)
        self.units, self._hooks, self._handles = [], {}, []

    # ---- state dicts

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A context in which pieces may be replaced; raises RuntimeError inside gather()."""
        if any(unit.is_held for unit in self.units):
            raise RuntimeError(
                "set_state_dict() was called inside gather(), which holds the weights: call it"
                " outside"
            )
        self.release_all()
        with nullcontext() if self._shard_store is None else self._shard_store.replacing():
            yield

    def _refuse_load(self, *_: Any) -> NoReturn:
        raise RuntimeError("the weights are sharded: call ringcomm.parallel.set_state_dict()")


def refuse_moves(model: nn.Module) -> None:
    """Makes to(), half() and similar methods raise where they would change a weight or a buffer.

    Not on parts without weights, such as an activation, which several models may have.
    """
    for module in model.modules():
        if next(module.parameters(), None) is not None:
            setattr(module, APPLY, partial(_move_nothing, module))


def _move_nothing(
    module: nn.Module, move: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Raises RuntimeError if `move` changes any kind of tensor that the module has.

    Freed weights, and those that hooks refer to, cannot be replaced.
    """
    tensors = (*module.parameters(recurse), *module.buffers(recurse))
    for dtype, device, dim in dict.fromkeys((x.dtype, x.device, x.dim()) for x in tensors):
        # Strides of tensors without elements, or of size 1, are those of any memory format.
        trial = torch.empty((2,) * dim, dtype=dtype, device=device)
        was_shared = trial.is_shared()
        if move(trial) is not trial or trial.is_shared() != was_shared:
            raise RuntimeError(
                "the weights are sharded, so to(), half() and similar calls cannot move or cast"
                " them: call these before WeightShards or zero.shard(stage=3). transformers'"
                " Trainer moves its model when it is made: make it first"
            )
    return module
