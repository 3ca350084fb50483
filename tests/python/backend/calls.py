"""A table of calls, each with all tensors of a rank, whose contents are known before and after.

Tests of failures, of counters and of threads make each of them; values: sequence_calls.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm import ops
from ringcomm.backend import resolve_group

MARGIN = 1024
GUARD, NOT_WRITTEN = -7.0, -1.0
WEIGHT = 8.0  # at the start; an update takes the sum of the gradients from it


class Tensors:
    """Those of one call on one rank; each is inside a larger one, which must not change.

    Rank r has 2**r everywhere, so that a sum over any of three ranks is an integer from 1 to 7.
    """

    def __init__(self, rank: int, empty: Callable[..., Tensor] = torch.empty) -> None:
        self.rank = rank
        self.size = dist.get_world_size() if dist.is_initialized() else 3
        self._empty = empty
        self._value = 2.0**rank
        self._made: list[tuple[str, Tensor]] = []
        self.input, self.output, self.in_place, self.weight, self.state = (
            partial(self._make, kind) for kind in ("input", "output", "in place", "weight", "state")
        )

    def _fill(self, kind: str, tensor: Tensor) -> Tensor:
        value = {"output": NOT_WRITTEN, "weight": WEIGHT, "state": 0.0}.get(kind, self._value)
        return tensor.fill_(value)

    def _make(self, kind: str, num_elems: int) -> Tensor:
        whole = self._empty(num_elems + 2 * MARGIN).fill_(GUARD)
        self._made.append((kind, whole))
        return self._fill(kind, whole[MARGIN:-MARGIN])

    def inputs(self, num_elems: int) -> list[Tensor]:
        return [self.input(num_elems) for _ in range(self.size)]

    def outputs(self, num_elems: int) -> list[Tensor]:
        return [self.output(num_elems) for _ in range(self.size)]

    def violations(self, is_refused: bool) -> list[str]:
        """What the documentation does not allow after a failure."""
        found = []
        for kind, whole in self._made:
            tensor = whole[MARGIN:-MARGIN]
            if (whole[:MARGIN] != GUARD).any() or (whole[-MARGIN:] != GUARD).any():
                found.append(f"{kind}: written beside the tensor")
            if kind == "output":
                is_allowed = not is_refused or bool((tensor == NOT_WRITTEN).all())
            elif kind in ("weight", "state"):
                changed = WEIGHT - tensor if kind == "weight" else tensor
                sums = [0.0] if is_refused else range(2**self.size)
                is_allowed = bool(torch.isin(changed.round(decimals=3), torch.tensor(sums)).all())
            elif kind == "input" or is_refused:
                is_allowed = bool((tensor == self._value).all())
            else:
                values = torch.arange(1.0, 2.0**self.size)
                is_allowed = bool(torch.isin(tensor, values).all())
            if not is_allowed:
                found.append(f"{kind}: has {tensor.unique().tolist()}")
        return found


class Random(Tensors):
    """Normal values, of which a sum's last bits show its order."""

    def _fill(self, kind: str, tensor: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(self.rank + 10 * len(self._made))
        return tensor.zero_() if kind == "state" else tensor.normal_(generator=draw)

    def bits(self) -> list[bytes]:
        return [whole.view(torch.uint8).numpy().tobytes() for _, whole in self._made]


def pass_on(t: Tensors, n: int, g: Any) -> None:
    """Rank 0 sends to rank 1, and that to rank 2."""
    if t.rank > 0:
        dist.recv(t.in_place(n), t.rank - 1, g)
    if t.rank < t.size - 1:
        dist.send(t.input(n), t.rank + 1, g)


def uneven_all_to_all(t: Tensors, n: int, g: Any) -> None:
    """Rank r has r parts for each; rank 0 sends nothing, as to an expert that gets no token."""
    sizes = [n * r for r in range(t.size)]
    given = [n * t.rank] * t.size
    dist.all_to_all_single(t.output(sum(sizes)), t.input(sum(given)), sizes, given, g)


def fused_update(t: Tensors, n: int, g: Any, momentum: float) -> None:
    """Subtracts the sum of the gradients from the weights; this rank keeps its shard of it."""
    step = ops.SGDStep(lr=1.0, momentum=momentum)
    begin, end = ops.shard_range(n, t.size, t.rank)
    state = {name: t.state(end - begin) for name in step.state_names}
    ops.reduce_scatter_update_all_gather_(
        t.weight(n), t.input(n), state, optimizer=step, step=1, group=g, average=False
    )


def by_name(operator: str, *args: Any, group: Any) -> Any:
    """An operator without a wrapper, which takes the group's name."""
    return getattr(torch.ops.ringcomm, operator)(*args, resolve_group(group).group_name)


def later(t: Tensors, n: int, g: Any) -> Any:
    return dist.all_reduce(t.in_place(n), group=g, async_op=True)


# Of a rank's tensors, for shares of so many elements, on a group of all ranks.
Call = Callable[[Tensors, int, Any], object]
CALLS: dict[str, Call] = {
    "all_reduce": lambda t, n, g: dist.all_reduce(t.in_place(n), group=g),
    "broadcast": lambda t, n, g: dist.broadcast(t.in_place(n), 1, g),
    "reduce": lambda t, n, g: dist.reduce(t.in_place(n), 0, group=g),
    "all_gather": lambda t, n, g: dist.all_gather(t.outputs(n), t.input(n), g),
    "all_gather_into_tensor": lambda t, n, g: dist.all_gather_into_tensor(
        t.output(t.size * n), t.input(n), g
    ),
    "reduce_scatter": lambda t, n, g: dist.reduce_scatter(t.output(n), t.inputs(n), group=g),
    "reduce_scatter_tensor": lambda t, n, g: dist.reduce_scatter_tensor(
        t.output(n), t.input(t.size * n), group=g
    ),
    "all_to_all": lambda t, n, g: dist.all_to_all(t.outputs(n), t.inputs(n), g),
    "all_to_all_single": lambda t, n, g: dist.all_to_all_single(
        t.output(t.size * n), t.input(t.size * n), group=g
    ),
    "uneven all_to_all_single": uneven_all_to_all,
    "gather": lambda t, n, g: dist.gather(
        t.input(n), t.outputs(n) if t.rank == 0 else None, 0, g
    ),
    "scatter": lambda t, n, g: dist.scatter(
        t.output(n), t.inputs(n) if t.rank == 0 else None, 0, g
    ),
    "barrier": lambda t, n, g: dist.barrier(g),
    "asynchronous all_reduce": lambda t, n, g: later(t, n, g).wait(),
    "all_reduce, its future": lambda t, n, g: later(t, n, g).get_future().wait(),
    "send and recv": pass_on,
    "ops.all_reduce": lambda t, n, g: ops.all_reduce(t.input(n), "sum", g),
    "ops.all_reduce, out": lambda t, n, g: ops.all_reduce(
        t.input(n), "sum", g, out=t.output(n)
    ),
    "ops.reduce_scatter": lambda t, n, g: ops.reduce_scatter(t.input(t.size * n), "sum", g),
    "ops.all_gather": lambda t, n, g: ops.all_gather(t.input(n), g),
    "ops.broadcast": lambda t, n, g: by_name("broadcast", t.input(n), 1, group=g),
    "ops.reduce": lambda t, n, g: by_name("reduce", t.input(n), 0, "sum", group=g),
    "fused update": partial(fused_update, momentum=0.0),
    "fused update, momentum": partial(fused_update, momentum=0.9),
}  # fmt: skip


def op_of(name: str) -> str:
    """What an error calls the collective."""
    words = name.removeprefix("ops.").partition(",")[0].removesuffix("_into_tensor")
    return words.removesuffix("_tensor").removesuffix("_single").rpartition(" ")[2]
