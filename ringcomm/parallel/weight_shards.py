"""Every weight split over the ranks, whole only while its layer is at work (ZeRO stage 3).

Rajbhandari et al. 2020. A unit is a module whose weights are gathered by one collective: before its
forward, freed after it, gathered again when the gradient of its output comes, and freed once its
own gradients have been consumed. The nn.Parameters stay; their storage comes and goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm.backend import resolve_group
from ringcomm.ops import shard_range
from ringcomm.parallel.weight_unit import Unit
from ringcomm.torch_names import reduce_scatter_single

_shards_of = WeakIdKeyDictionary()  # parameter -> weak reference to its WeightShards


def find_shards(param: nn.Parameter) -> WeightShards | None:
    """What splits a parameter over ranks; None for one that is whole."""
    found = _shards_of.get(param)
    return None if found is None else found()


class WeightShards:
    """Splits a model's weights over a group of ranks, and gathers them where they are needed.

    Each rank keeps 1/N of every parameter; at work are the weights of one or two units more. A
    training step moves 3 (N-1)/N of the weights per rank: two gathers and the gradients'
    reduce-scatter, which the optimizer does weight by weight (ringcomm.optim.Lomo does).

        shards = WeightShards(model)
        opt = ringcomm.optim.Lomo(model, lr=1e-3)  # finds the shards by itself

    Args:
        model: whose parameters are dense, and the same on all ranks afterwards: rank 0's.
        group: None for the default group.
        units: modules whose weights are gathered together; what is in none of them is a unit with
            the model itself. None: the entries of every outermost nn.ModuleList, such as a
            transformer's layers.

    Raises:
        ValueError: a parameter is a DTensor, not contiguous, or split already, or units overlap.

    Attributes:
        group: the ranks.

    Collective, and so is every forward and backward pass of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        units: Iterable[nn.Module] | None = None,
    ) -> None:
        self.group = resolve_group(group)
        self._model = model
        chosen = _outermost_layers(model) if units is None else list(units)
        parts = _parameters_by_unit(model, chosen)
        for params in parts.values():
            for param in params:
                _check(param)
        self._units = [Unit(module, params, self.group) for module, params in parts.items()]
        self._unit_of = {param: unit for unit in self._units for param in unit.params}
        self._handles: list[Any] = []
        for unit in self._units:
            unit.split()
            self._hook(unit)
            for param in unit.params:
                _shards_of[param] = weakref.ref(self)
        # The model keeps this object alive, and both may go together.
        refuse = partial(_refuse_state_dict, self)
        self._handles.append(model.register_state_dict_pre_hook(refuse))
        model.__deepcopy__ = _refuse_copy  # type: ignore[assignment]

    # ---- pieces

    def range_of(self, param: nn.Parameter) -> tuple[int, int]:
        """Which elements [begin, end) of the flattened parameter this rank keeps."""
        return shard_range(param.numel(), self.group.size(), self.group.rank())

    def shard_of(self, param: nn.Parameter) -> Tensor:
        """This rank's elements, 1-D, of the parameter's dtype: what an optimizer updates."""
        return self._unit_of[param].shards[param]

    def reduce_scatter(self, param: nn.Parameter, grad: Tensor) -> Tensor:
        """The mean over the ranks of a whole gradient: this rank's elements, 1-D.

        Collective.
        """
        size, longest = self.group.size(), -(-param.numel() // self.group.size())
        flat = grad.contiguous().view(-1)
        if flat.numel() != longest * size:  # ranks' pieces differ by an element
            padded = flat.new_zeros(size, longest)
            for rank in range(size):
                begin, end = shard_range(flat.numel(), size, rank)
                padded[rank, : end - begin] = flat[begin:end]
            flat = padded.view(-1)
        piece = flat.new_empty(longest)
        reduce_scatter_single(piece, flat, op=dist.ReduceOp.AVG, group=self.group)
        begin, end = self.range_of(param)
        return piece[: end - begin]

    # ---- whole weights

    def release(self, param: nn.Parameter) -> None:
        """Says that a parameter's gradient has been consumed: its unit's weights may go."""
        self._unit_of[param].consumed(param)

    def release_all(self) -> None:
        """Frees every whole weight."""
        for unit in self._units:
            unit.free()

    @contextmanager
    def gather(self) -> Iterator[None]:
        """All weights whole, to read them. Collective."""
        for unit in self._units:
            unit.gather()
        try:
            yield
        finally:
            self.release_all()

    def full_state_dict(self) -> dict[str, Tensor]:
        """The model's state_dict with whole weights, copied to the CPU unit by unit. Collective."""
        copies: dict[nn.Parameter, Tensor] = {}
        for unit in self._units:
            unit.gather()
            copies.update({param: param.detach().cpu().clone() for param in unit.params})
            unit.free()
        state = {name: t.detach().cpu().clone() for name, t in self._model.named_buffers()}
        named = self._model.named_parameters(remove_duplicate=False)
        return {**{name: copies[param] for name, param in named}, **state}

    def load_full_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes this rank's elements of whole weights. Not collective.

        Raises:
            ValueError: a name is missing, or a shape is another one; nothing has been changed.
        """
        tensors = dict(self._model.named_parameters(remove_duplicate=False))
        everything: dict[str, Tensor] = {**tensors, **dict(self._model.named_buffers())}
        for name, tensor in everything.items():
            if name not in state or state[name].shape != tensor.shape:
                found = tuple(state[name].shape) if name in state else "nothing"
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, got {found}")
        with torch.no_grad():
            for name, tensor in everything.items():
                if name in tensors:
                    begin, end = self.range_of(tensors[name])
                    self.shard_of(tensors[name]).copy_(state[name].reshape(-1)[begin:end])
                else:
                    tensor.copy_(state[name])

    def close(self) -> None:
        """Gives the model back with whole weights. Collective."""
        for unit in self._units:
            unit.gather()
            for param in unit.params:
                _shards_of.pop(param, None)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if "__deepcopy__" in vars(self._model):
            del self._model.__deepcopy__

    # ---- hooks

    def _hook(self, unit: Unit) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            unit.gather()
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
                    tensor.register_hook(lambda _: unit.left())

        def after(_: nn.Module, args: Any, out: Any) -> None:
            # A checkpoint that runs again does so because the weights' gradients are next.
            is_backward = torch._C._current_graph_task_id() != -1
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: unit.entered())
            if is_backward:
                unit.entered()
            else:
                unit.free()

        self._handles += [
            unit.module.register_forward_pre_hook(before, with_kwargs=True),
            unit.module.register_forward_hook(after, always_call=True),
        ]


def _outermost_layers(model: nn.Module) -> list[nn.Module]:
    """The entries of ModuleLists that are in no other."""
    found: list[nn.Module] = []
    todo = [model]
    while todo:
        for child in todo.pop().children():
            if isinstance(child, nn.ModuleList):
                found += child
            else:
                todo.append(child)
    return found


def _parameters_by_unit(
    model: nn.Module, units: list[nn.Module]
) -> dict[nn.Module, list[nn.Parameter]]:
    """Each parameter once; what several units share is the model's own."""
    owners: dict[nn.Parameter, list[nn.Module]] = {param: [] for param in model.parameters()}
    for unit in units:
        for param in unit.parameters():
            if param not in owners:
                raise ValueError("units are parts of the model")
            owners[param].append(unit)
    inside = {id(m) for unit in units for m in unit.modules() if m is not unit}
    if any(id(unit) in inside for unit in units):
        raise ValueError("units overlap: one is a part of another")
    parts: dict[nn.Module, list[nn.Parameter]] = {model: [], **{unit: [] for unit in units}}
    for param, found in owners.items():
        parts[found[0] if len(found) == 1 else model].append(param)
    return {module: params for module, params in parts.items() if params}


def _check(param: nn.Parameter) -> None:
    if isinstance(param, DTensor) or not param.is_contiguous() or param.layout != torch.strided:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is no dense, contiguous tensor of its own"
        )
    if param in _shards_of:
        raise ValueError(f"a parameter of shape {tuple(param.shape)} is split already")


def _refuse_state_dict(*_: Any) -> None:
    raise RuntimeError("the weights are split over ranks: WeightShards.full_state_dict() has them")


def _refuse_copy(_: Any) -> None:
    raise RuntimeError("a model whose weights are split over ranks cannot be copied: close() first")
