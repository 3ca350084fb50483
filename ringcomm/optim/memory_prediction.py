"""The memory of a training step by its shapes alone: no element is computed, none is allocated."""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ringcomm.optim.memory_parts import Ledger, Mark, Parts
from ringcomm.optim.memory_step import Step, Variant, run_steps
from ringcomm.optim.update_memory import update_bytes

_aten = torch.ops.aten


def predict(model: nn.Module, step: Step, variant: Variant) -> Parts:
    """The parts of a step, from a copy of a model in FakeTensorMode.

    Its forward and backward passes run on tensors without elements, and so do the optimizer and its
    hooks, which therefore keep here what they keep in earnest. Where a size depends on values (how
    many rows of an embedding a batch has) it is the largest; a condition on values is true.

    Raises:
        RuntimeError: an operator has no fake, or a size depends on values in a way that is not
            known.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(fake_mode):
        fake = copy.deepcopy(model)
    tracker = _Tracker(fake_mode, next(model.parameters()).device)
    for tensor in [*fake.parameters(), *fake.buffers()]:
        tracker.add(tensor)
    try:
        with _not_tracing(), fake_mode, tracker:
            run_steps(fake, step, variant, _Observer(tracker))
    except RuntimeError as error:
        raise RuntimeError(
            f"the memory of a step with {variant.name} cannot be predicted: {error}"
        ) from error
    return tracker.ledger.parts()


@contextlib.contextmanager
def _not_tracing() -> Iterator[None]:
    """Has transformers treat fake tensors as others.

    It takes them for a sign of tracing, where it makes masks that it does not make in earnest, and
    so has attention keep other tensors.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    is_fake_tensor = getattr(module, "is_fake_tensor", None)
    if module is None or is_fake_tensor is None:
        yield
        return
    module.is_fake_tensor = lambda _: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.is_fake_tensor = is_fake_tensor  # type: ignore[attr-defined]


class _Observer:
    """Writes what it is told into the tracker's ledger."""

    def __init__(self, tracker: _Tracker) -> None:
        self._tracker = tracker

    def mark(self, mark: Mark) -> None:
        """See Observer."""
        self._tracker.ledger.mark(mark)

    def gradient(self, grad: Tensor) -> None:
        """See Observer."""
        self._tracker.ledger.set_gradient(grad.untyped_storage()._cdata)


class _Tracker(TorchDispatchMode):
    """Every storage that an operator makes, from then until its last reference is gone."""

    def __init__(self, fake_mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__()
        self.ledger = Ledger()
        self._fake_mode, self._device = fake_mode, device
        self._storages: dict[int, Any] = {}  # address -> weak reference, whose end frees

    def add(self, tensor: Tensor, *, is_ours: bool = True) -> None:
        """Tracks a storage, or learns of one that is another's."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        if is_ours and tensor.device.type == self._device.type:
            self.ledger.allocate(key, storage.nbytes())
        self._storages[key] = weakref.ref(storage, partial(_freed, self, key))

    def freed(self, key: int) -> None:
        """The storage is gone."""
        self._storages.pop(key, None)
        self.ledger.free(key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator on fakes."""
        args, kwargs = tree_map_only(Tensor, self._fake, (args, kwargs or {}))
        out = self._run(func, args, kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return out

    def _fake(self, tensor: Tensor) -> Tensor:
        """A batch's tensors are real, and not the step's."""
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self._fake_mode.from_tensor(tensor)
        self.add(fake, is_ours=False)
        return fake

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in _BY_VALUE:
            return _BY_VALUE[func](*args, **kwargs)
        if func is _aten.index.Tensor and any(_is_mask(index) for index in args[1]):
            return _masked(*args)
        if func.namespace == "c10d":
            return _reduced(func, args)
        if func.namespace == "ringcomm":
            inside = update_bytes(func, args, self._device)
            if inside:
                self.ledger.allocate(func, inside, in_update=True)
                self.ledger.free(func)
        return func(*args, **kwargs)


def _freed(tracker: _Tracker, key: int, _: Any) -> None:
    tracker.freed(key)


# ---- what depends on values


def _scalar(tensor: Tensor) -> Any:
    if tensor.dtype == torch.float64:
        return 0.0  # StepFacts: nothing that is not finite
    return 1.0 if tensor.is_floating_point() else tensor.dtype == torch.bool or 1


def _unique(tensor: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    places = torch.empty_like(tensor, dtype=torch.int64)
    return tensor.new_empty([tensor.numel()]), places, places.new_empty([tensor.numel()])


def _nonzero(tensor: Tensor) -> Tensor:
    return tensor.new_empty([tensor.numel(), tensor.dim()], dtype=torch.int64)


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    return tensor.new_empty([torch.broadcast_shapes(tensor.shape, mask.shape).numel()])


_BY_VALUE: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: _scalar,
    _aten._unique2.default: _unique,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
}


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _masked(tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
    """tensor[mask], of a mask that is all true.

    Raises:
        RuntimeError: there are other indices beside it.
    """
    mask, *others = indices
    if mask is None or not _is_mask(mask) or any(other is not None for other in others):
        raise RuntimeError("a mask stands beside other indices")
    return tensor.new_empty([mask.numel(), *tensor.shape[mask.dim() :]])


def _reduced(func: Any, args: Any) -> Any:
    """A collective in place, which stays on this rank.

    Raises:
        RuntimeError: it is another.
    """
    if func is not torch.ops.c10d.allreduce_.default:
        raise RuntimeError(f"{func} among ranks")
    from torch._C._distributed_c10d import FakeWork

    return args[0], FakeWork().boxed()
