"""Sharded weights, gathered only when needed, of ZeRO-Infinity.

Each rank keeps 1/N of every parameter. Parameters keep their identity, and their memory is
allocated and freed: unit_hooks.py decides when, sharded_unit.py does it.
"""

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.backward_pass import in_backward
from ringcomm.ops.fused_update import shard_range
from ringcomm.parallel.flat_collectives import reduce_scatter_mean
from ringcomm.parallel.model.cut import note_shards
from ringcomm.parallel.model.describe import Model, describe, start_equal
from ringcomm.parallel.model.saving import refuse_copy, refuse_moves, save_full
from ringcomm.parallel.model.units import (
    materialize,
    new_group_alone,
    params_of_units,
)
from ringcomm.parallel.offload.shard_store import ShardStore
from ringcomm.parallel.offload.sharded_unit import ShardedUnit
from ringcomm.parallel.offload.unit_hooks import UnitHooks, refuse_compile
from ringcomm.torch_names import APPLY, ignore_in_ddp, ignored_in_ddp, num_calls_under_way


class WeightShards:
    """Shards the weights of a model over the ranks of a group, into a ShardStore.

    A unit's weights are gathered before its forward and freed afterwards, and again for its
    backward. A rank has in memory the small weights of its shards, those of one or two units, and
    those outside all units. A step gathers every weight twice and reduces its gradient once:
    3(N-1)/N of their bytes.

    Reading a parameter while its weights are freed raises RuntimeError. Views and detached tensors
    of a parameter must not be used outside the forward that made them: their memory is freed too.
    If a unit returns them, its output has copies. Gradients of gradients (create_graph=True) raise.

    Arguments are checked, and the group is of backend ringcomm. A model on the meta device is
    materialized unit by unit on `device`. Frozen parameters are sharded too; buffers are not.
    Raises RuntimeError if a part of the model is compiled, as a compiled forward does.

    Attributes:
        group: as given.
        units: the units; the model itself first, if it has parameters outside other units or that
            several units share.

    Collective: one broadcast per unit.
    """

    def __init__(
        self,
        described: Model,
        group: dist.ProcessGroup,
        units: Iterable[nn.Module] | None,
        shard_store: ShardStore,
        device: torch.device,
    ) -> None:
        self.group, model = group, described.module
        refuse_compile(model)
        found, had_meta = params_of_units(described, units), described.has_meta
        self._model = model
        self._hooks: dict[nn.Parameter, UnitHooks] = {}
        self.units: list[ShardedUnit] = []
        alone: Any = None
        for module, params in found:
            materialize(module, params, device)
            start_equal(described, [self.group], params, over_data=True)
            ranks = described.weights[params[0]].data_group(group) or alone
            ranks = ranks or (alone := new_group_alone())
            self.units.append(ShardedUnit(module, params, ranks, shard_store))
        materialize(model, (), device)  # modules with only buffers
        described = describe(model) if had_meta else described  # of other buffers
        start_equal(described, [self.group], described.buffers, over_data=True)
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
        self._handles.append(model.register_forward_pre_hook(self._forward_begins, prepend=True))
        self._end_save_full = save_full(model, self.group)

    # A copy of the model copies its hooks.
    __deepcopy__ = __reduce_ex__ = refuse_copy

    # ---- shards

    def unit_of(self, param: Tensor) -> ShardedUnit:
        """The unit of a parameter."""
        return self._hooks[param].unit  # type: ignore[index]

    def range_of(self, param: Tensor, rank: int | None = None) -> tuple[int, int]:
        """The elements [begin, end) of the flat parameter in a rank's piece, by shard_range().

        `rank`: of the unit's group; by default this one.
        """
        group = self.unit_of(param).group
        return shard_range(param.numel(), group.size(), group.rank() if rank is None else rank)

    def reduce_scatter(self, param: Tensor, grad: Tensor) -> Tensor:
        """Elements range_of(param) of the mean of the ranks' gradients, in their dtype.

        Collective; sends (N-1)/N of the gradient.
        """
        group = self.unit_of(param).group
        mean = reduce_scatter_mean(grad.detach().reshape(-1), group)
        # Gradients of experts are sums over the tokens of all ranks that share the layer.
        return mean if group is self.group else mean.mul_(group.size() / self.group.size())

    # ---- gathered weights

    def release_all(self) -> None:
        """Frees all weights, as after a failed backward pass.

        Raises:
            RuntimeError: called within a backward pass.
        """
        if in_backward():
            raise RuntimeError(
                "zero_grad() or set_state_dict() was called in a backward pass, which needs the"
                " weights"
            )
        for hooks in set(self._hooks.values()):
            hooks.forget_backward()
            hooks.unit.free()

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

    def _forward_begins(self, *_: Any) -> None:
        """Ctrl-C may have ended the last forward pass, and then hooks were not called."""
        is_inner = in_backward() or num_calls_under_way(self._model) > 1
        for hooks in () if is_inner else self._hooks.values():
            hooks.forget_forward()

    def _refuse_load(self, *_: Any) -> NoReturn:
        raise RuntimeError("the weights are sharded: call ringcomm.parallel.set_state_dict()")
