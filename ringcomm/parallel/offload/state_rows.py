"""What offloaded optimizers work on, and their states in a tier, of which a piece is one row."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ringcomm import ops
from ringcomm.ops.fused_update import Rule
from ringcomm.parallel.flat_collectives import local_of
from ringcomm.parallel.offload.tiers import RowHandle, Tier
from ringcomm.parallel.offload.transfers import edges_in_row, views_in_row
from ringcomm.parallel.optimizer_classes import MASTER, State, States
from ringcomm.torch_names import tree_leaves, tree_map_only


class Operands:
    """Access to a parameter and its gradient; subclasses store them elsewhere."""

    def shape(self, param: Tensor) -> torch.Size:
        """The shape of this rank's part of a parameter."""
        return local_of(param).shape

    def has_grad(self, param: Tensor) -> bool:
        """Whether a parameter has a gradient. Raises ValueError for a sparse gradient."""
        if param.grad is not None and param.grad.is_sparse:
            raise ValueError("gradients must be dense: make the embedding with sparse=False")
        return param.grad is not None

    def start(self, param: Tensor) -> None:
        """Called ahead of get()."""

    def get(self, param: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weights, to be written in place, and their gradient if there is one."""
        grad = None if param.grad is None else local_of(param.grad.detach())
        return local_of(param.detach()), grad

    def done(self, param: Tensor) -> None:
        """Called after the last get() of a step."""


class StatesView(Mapping[Any, dict[str, Any]]):
    """Copies of offloaded states by parameter, made on lookup; {} before the first update."""

    def __init__(self, stepped: Iterable[Any], state_of: Callable[[Any], dict[str, Any]]) -> None:
        self._stepped, self._state_of = list(stepped), state_of

    def __getitem__(self, param: Any) -> dict[str, Any]:
        """A copy: use load_state_dict() to replace it."""
        return self._state_of(param)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stepped)

    def __len__(self) -> int:
        return len(self._stepped)


class OffloadedStates(States):
    """Those of Offloaded."""

    is_stored, is_in_place = True, False

    def groups(self) -> list[State]:
        """See States."""
        self._native = {}
        return numbered_groups(self.optimizer)

    def parts(self, param: Any) -> State:
        """Also before a weight's first step."""
        found: State = self.optimizer.state_of(param)
        if not found.keys() - {MASTER}:
            found = {**self.optimizer.new_state_of(param, local_of(param.detach())), **found}
        return found

    def kept(self, param: Any) -> Any:
        """See States."""
        return self.optimizer.kept_of(param)

    def inner_of(self, param: Any) -> Any:
        """See States."""
        return self.optimizer.inner

    def new(self, param: Any) -> None:
        """None: parts() has a new one."""

    def replace(self, param: Any, state: State) -> None:
        """See States."""
        self.optimizer.set_state_of(param, state)


def numbered_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The parameter groups as in torch's state_dict()."""
    number, groups = count(), optimizer.param_groups
    return [{**group, "params": [next(number) for _ in group["params"]]} for group in groups]


def large_tensors(state: Any) -> list[Tensor]:
    """The tensors of one or more dimensions in a state, also in its dicts, lists and tuples."""
    return [value for value in tree_leaves(state) if isinstance(value, Tensor) and value.dim()]


class StateRows:
    """States by the number of a parameter and the first element of a piece.

    Tensors of one or more dimensions are in the tier. `kept` has the row's key and all values, with
    these tensors on the meta device.
    """

    def __init__(self, tier: Tier, first: int) -> None:
        """`first` is the number of parameter 0 in the tier, which optimizers may share."""
        self._tier, self._first = tier, first
        self.kept: dict[tuple[int, int], tuple[str, dict[str, Any]]] = {}
        self._known: dict[str, list[Tensor]] = {}  # views of rows that stay where they are

    def fetch(self, piece: tuple[int, int]) -> RowHandle | None:
        """Starts reading a state; None if it has no row."""
        key, _ = self.kept.get(piece, ("", None))
        return self._tier.fetch(key) if key else None

    def release(self, handle: RowHandle | None) -> None:
        """Releases a row whose state is not kept."""
        if handle is not None:
            self._tier.release(handle, is_written=False)

    def view(self, piece: tuple[int, int], handle: RowHandle | None) -> dict[str, Any]:
        """A state of which fetch() returned the row; waits for it."""
        key, values = self.kept.get(piece, ("", {}))
        views = iter(self._views(key, handle, large_tensors(values)))
        found: dict[str, Any] = tree_map_only(
            Tensor, lambda x: next(views) if x.dim() else x, values
        )
        return found

    def _views(self, key: str, handle: RowHandle | None, tensors: list[Tensor]) -> list[Tensor]:
        """Tensors like these in a row; there is none for tensors without elements."""
        if handle is None:
            return views_in_row(torch.empty(0, dtype=torch.uint8, device="cpu"), tensors)
        known = self._known.get(key, [])
        kinds = [[(x.shape, x.dtype) for x in of] for of in (known, tensors)]
        if not known or kinds[0] != kinds[1]:
            known = views_in_row(handle.wait(), tensors)
            if self._tier.keeps_memory:
                self._known[key] = known
        return known

    def copy(self, piece: tuple[int, int]) -> dict[str, Any]:
        """A copy of a state; {} if there is none."""
        handle = self.fetch(piece)
        found: dict[str, Any] = tree_map_only(Tensor, torch.clone, self.view(piece, handle))
        self.release(handle)
        return found

    def keep(
        self, piece: tuple[int, int], state: dict[str, Any], handle: RowHandle | None = None
    ) -> None:
        """Replaces a state, of which `handle` has the old row; tensors may be views of it.

        Raises TypeError for a tensor of another kind than torch's dense ones.
        """
        tensors = large_tensors(state)
        for value in tensors:
            if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
                kind = f"{type(value).__name__} of layout {value.layout}"
                raise TypeError(f"an optimizer's state is a {kind}, which cannot be offloaded")
        num_bytes = edges_in_row(tensors)[-1]
        key = f"state.{self._first + piece[0]}.{piece[1]}.{num_bytes}" if num_bytes else ""
        self.kept[piece] = key, tree_map_only(Tensor, _without_values, state)
        new = handle if handle is not None and handle.key == key else None
        if new is None and num_bytes:
            new = self._tier.new(key, num_bytes, torch.uint8)
        if new is not None:
            pairs = zip(self._views(key, new, tensors), tensors, strict=True)
            moved = [
                (p, x)
                for p, x in pairs
                if p is not x and (p.data_ptr() != x.data_ptr() or p.stride() != x.stride())
            ]
            # What a class has replaced may share memory with another part of the row.
            for place, value in [(p, x.clone() if new is handle else x) for p, x in moved]:
                place.copy_(value)
            self._tier.release(new, is_written=True)
        if new is not handle:
            self.release(handle)


def _without_values(value: Tensor) -> Tensor:
    return _meta(value.shape, value.dtype) if value.dim() else value.detach().clone()


@cache
def _meta(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def text_of(option: Any) -> str:
    """To compare values, also of tensors in lists."""
    return repr(tree_map_only(Tensor, Tensor.tolist, option))


def update_by_kernel(
    rule: Rule, weight: Tensor, grad: Tensor, grad_scale: float, state: dict[str, Any]
) -> None:
    """A step of torch's AdamW or SGD in host memory, by the kernel with the same update."""
    # Of SGD it only matters whether there was a step.
    step = int(state.get("step", "momentum_buffer" in state)) + 1
    for name in rule.state_names:
        if name not in state:
            state[name] = torch.zeros_like(weight, dtype=torch.float32)
    # A scheduler may have set a momentum to 0: the buffer stays.
    tensors = {key: state[key] for key in state.keys() & {MASTER, *rule.state_names}}
    ops.optimizer_update_(weight, grad, tensors, optimizer=rule, step=step, grad_scale=grad_scale)
    if isinstance(rule, ops.AdamWStep):
        state["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
