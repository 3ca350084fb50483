"""Steps of an optimizer piece by piece, while states and operands of others are moved."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringcomm.ops.fused_update import Rule, rule_of
from ringcomm.parallel.flat_collectives import take_written
from ringcomm.parallel.offload.device_copies import copy_back, host_copy, settle
from ringcomm.parallel.offload.state_rows import (
    Operands,
    StateRows,
    text_of,
    update_by_kernel,
)
from ringcomm.parallel.offload.tiers import RowHandle
from ringcomm.parallel.optimizer_classes import BY_WEIGHT, options_of, run_on_parts
from ringcomm.torch_names import tree_map_only

_CPU, _META = torch.device("cpu"), torch.device("meta")


def dtype_of(param: Tensor) -> torch.dtype:
    """In which it is updated: that of a master, or its own."""
    return torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype


class PieceSteps(torch.optim.Optimizer):
    """What Offloaded does with its pieces; see there."""

    steps: dict[Tensor, int]
    inner: torch.optim.Optimizer
    is_whole: bool
    _chunk_elems: int
    _takes_empty: bool
    _places: dict[Tensor, tuple[int, int]]  # by parameter its number, and that of its group
    _operands: Operands
    _rows: StateRows
    _ahead: dict[tuple[int, int], RowHandle | None]  # states that are being read
    _copied: dict[tuple[int, int], Any]  # to the host: weight and gradient, events

    @torch.no_grad()
    def run(
        self, method: str, params: Sequence[Tensor], grad_scale: float = 1.0, before: Any = None
    ) -> None:
        """A method of the class on some parameters, with gradients multiplied by a factor.

        Each piece begins with the same options of its group, so that what a class counts there
        counts once. `before` has these options in a step of several calls.
        """
        if not hasattr(self.inner, method):
            return
        self._check_dtypes(params)
        before = before or [*map(options_of, self.param_groups)]
        pieces = [(param, *piece) for param in params for piece in self._pieces(param)]
        after: dict[int, dict[str, Any]] = {}
        try:
            for i, (param, begin, end) in enumerate(pieces):
                for ahead, first, last in pieces[i : i + 2]:
                    self.start(ahead, first)
                    group = before[self._places[ahead][1]]
                    self._start_copy(method, ahead, slice(first, last), group)
                number = self._places[param][1]
                place = slice(begin, end)
                after[number] = self._run_piece(method, param, place, before[number], grad_scale)
                if i + 1 == len(pieces) or pieces[i + 1][0] is not param:
                    self._operands.done(param)
                    self.steps[param] = self.steps.get(param, 0) + (method == "step")
            others = [i for i in range(len(before)) if i not in after]
            if others and self._takes_empty:
                groups = [{**self.param_groups[i], **options_of(before[i])} for i in others]
                _, called = run_on_parts(self.inner, method, groups, {}, {}, grad_scale, {})
                after |= zip(others, called, strict=True)
        finally:
            for handle in self._ahead.values():
                self._rows.release(handle)
            self._ahead, self._copied = {}, {}
            for device in {param.device for param in params} - {_CPU, _META}:
                settle(device)
        for number, options in after.items():
            for key in options.keys() - {*BY_WEIGHT}:
                if text_of(options[key]) != text_of(before[number].get(key)):
                    self.param_groups[number][key] = options[key]

    def start(self, param: Tensor, begin: int = 0) -> None:
        """Starts reading the state of a piece."""
        piece = self._places[param][0], begin
        if piece not in self._ahead:
            if begin == 0:
                self._operands.start(param)
            self._ahead[piece] = self._rows.fetch(piece)

    def _check_dtypes(self, params: Sequence[Tensor]) -> None:
        """Raises ValueError if weights with masters were cast."""
        for param in params:
            _, values = self._rows.kept.get((self._places[param][0], 0), ("", {}))
            if "master" in values and dtype_of(param) == param.dtype:
                raise ValueError(
                    f"a weight of shape {tuple(param.shape)} was cast to {param.dtype} after steps"
                    " with a float32 master: cast the model before offload.Offloaded(), or make"
                    " another one for the cast model"
                )

    def _pieces(self, param: Tensor) -> list[tuple[int, int | None]]:
        """The first and last elements of what is updated together."""
        if self.is_whole:
            return [(0, None)]
        num_elems, size = self._operands.shape(param).numel(), self._chunk_elems
        return [(b, min(b + size, num_elems)) for b in range(0, max(1, num_elems), size)]

    def _rule_of(self, method: str, param: Tensor, options: dict[str, Any]) -> Rule | None:
        """Of a kernel with the same update as the class."""
        is_known = type(self.inner) in (torch.optim.AdamW, torch.optim.SGD)
        if not (is_known and method == "step" and dtype_of(param) == torch.float32):
            return None
        return rule_of(self.inner, {**options, "lr": float(options["lr"])})

    def _operands_of(self, param: Tensor, place: slice) -> tuple[Tensor, Tensor | None]:
        weight, grad = self._operands.get(param)
        if self.is_whole:
            return weight, grad
        grad = None if grad is None else grad.reshape(-1)[place].contiguous()
        return weight.view(-1)[place], grad

    def _start_copy(
        self, method: str, param: Tensor, place: slice, options: dict[str, Any]
    ) -> None:
        """Starts copying a piece from its device, if a kernel of the host will update it."""
        piece = self._places[param][0], place.start
        if param.device in (_CPU, _META) or piece in self._copied:
            return
        weight, grad = self._operands_of(param, place)
        if grad is not None and self._rule_of(method, weight, options) is not None:
            is_sent = grad.device == _CPU  # in the backward pass
            self._copied[piece] = host_copy(weight), (grad, None) if is_sent else host_copy(grad)

    def _run_piece(
        self, method: str, param: Tensor, place: slice, options: dict[str, Any], grad_scale: float
    ) -> dict[str, Any]:
        """Returns the options of the group after the call."""
        piece = self._places[param][0], place.start
        handle = self._ahead.pop(piece)
        state = self._rows.view(piece, handle)  # before anything is written
        weight, grad = self._operands_of(param, place)
        on_host, host_grad = weight, grad
        if piece in self._copied:
            (on_host, has_weight), (host_grad, has_grad) = self._copied.pop(piece)
            (has_grad or has_weight).synchronize()  # the weight was copied first
        master = state.get("master")
        if weight.dtype != dtype_of(weight):
            if master is None:
                master = state["master"] = on_host.to("cpu", torch.float32)
            take_written(master, on_host.to("cpu"))
        rule = self._rule_of(method, weight, options)
        if rule is not None and host_grad is not None:
            update_by_kernel(rule, on_host, host_grad, grad_scale, state)
            if on_host is not weight:
                copy_back(weight, on_host)
        else:
            state.pop("master", None)
            state = tree_map_only(Tensor, lambda x: x.to(weight.device) if x.dim() else x, state)
            updated = weight if master is None else master.to(weight.device)
            group = {**self.param_groups[self._places[param][1]], **options_of(options)}
            grad = None if grad is None else grad.to(updated.device, non_blocking=True)
            given = {param: updated}, {param: grad}, grad_scale, {param: state}
            states, (options,) = run_on_parts(self.inner, method, [group], *given)
            state = dict(states.get(param, {}))
            if master is not None:
                weight.copy_(updated)
                state["master"] = updated
        self._rows.keep(piece, state, handle)
        return options
