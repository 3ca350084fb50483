"""Gradients on their way to an optimizer: hooks, placeholders, and a check of all ranks."""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ringcomm.parallel.flat_collectives import largest_of
from ringcomm.torch_names import make_wrapper, no_torch_function, to_copy, tree_leaves

_aten: Any = torch.ops.aten
_NO_VALUES = (
    "param.grad of a weight that zero.shard() has sharded has no values; gradients are in the"
    " optimizer"
)
_MESSAGE = (
    f"{_NO_VALUES}. Use optimizer.clip_grad_norm_() instead of torch.nn.utils.clip_grad_norm_, the"
    " option loss_scale= instead of torch.amp.GradScaler, and no DistributedDataParallel"
)
_MESSAGES = {
    _aten.zero_: f"{_NO_VALUES}: call optimizer.zero_grad(), which drops them, instead of"
    " model.zero_grad(set_to_none=False)",
    to_copy: "the model was cast or moved after zero.shard(): do it before",
}


class GradientPlaceholder(Tensor):
    """A placeholder for a gradient; raises when an operator reads or writes it.

    Without it torch.nn.utils.clip_grad_norm_, torch.amp.GradScaler, DistributedDataParallel and
    other optimizers over the same weights would find no gradient and silently do nothing. It has
    the parameter's shape, strides, dtype and device, and no memory.

    Args:
        param: the parameter whose `grad` it will be.
        message: the message of the RuntimeError.
        add: called if autograd adds another gradient; default: that raises, too.
    """

    message: str
    messages: dict[Any, str]  # of operators
    add_gradient: Callable[[Tensor], None] | None

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(
        cls, param: Tensor, message: str, add: Callable[[Tensor], None] | None = None
    ) -> "GradientPlaceholder":
        """See the class."""
        made = make_wrapper(
            cls,
            param.shape,
            strides=param.stride(),
            dtype=param.dtype,
            device=param.device,
            storage_size=0,
        )
        made.message = message
        made.messages, made.add_gradient = {}, add
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raises RuntimeError, except where autograd adds a gradient and `add` takes it."""
        found = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        if func.overloadpacket is _aten.add_ and found.add_gradient is not None:
            found.add_gradient(args[1])
            return found
        raise RuntimeError(found.messages.get(func.overloadpacket, found.message))

    def __deepcopy__(self, memo: Any) -> None:
        """Returns None: a copy of the parameter has no gradient and no optimizer."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Without values."""
        return f"GradientPlaceholder(shape={tuple(self.shape)}, dtype={self.dtype})"


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls a method while its object is alive, without keeping it alive.

    Garbage collection does not traverse the hooks of parameters and of graphs.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (found := reference()) is not None:
            found(*args)

    return call


@contextmanager
def hookable(param: Tensor) -> Iterator[None]:
    """A context in which torch takes hooks of a frozen parameter, which may be unfrozen later."""
    is_trained = param.requires_grad
    param.requires_grad_()
    try:
        yield
    finally:
        param.requires_grad_(is_trained)


class GradientHooks:
    """Passes each gradient from autograd to `consumer` and leaves a GradientPlaceholder.

    It calls consumer.take_gradient(param, grad), which accumulates the gradient, and
    consumer.drop_gradient(param) if the user has set `param.grad` to None or no gradient has
    arrived yet. The hooks live as long as the consumer and refer to it weakly. Gradients of `late`
    parameters are ordinary until collect(), because other code adds to them after autograd.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        consumer: Any,
        late: Collection[nn.Parameter] = (),
    ) -> None:
        self._consumer = weakref.proxy(consumer)
        self._late = list(late)
        self._placeholders = {p: GradientPlaceholder(p, _MESSAGE) for p in params if p not in late}
        for placeholder in self._placeholders.values():
            placeholder.messages = _MESSAGES
        # References are kept: autograd would otherwise make new nodes, without hooks, for the next
        # graph.
        self.nodes: dict[nn.Parameter, Any] = {}
        handles: list[Any] = []
        before, after = weakly(self.before), weakly(self.after)
        for param in self._placeholders:
            with hookable(param):
                node = self.nodes[param] = get_gradient_edge(param).node
                handles += [node.register_prehook(partial(before, param))]
                handles += [param.register_post_accumulate_grad_hook(after)]
        weakref.finalize(self, remove_hooks, handles)

    def before(self, param: nn.Parameter, *_: Any) -> None:
        """Prepares `param.grad` for autograd, which adds to it."""
        if isinstance(param.grad, GradientPlaceholder):
            param.grad = None
        else:  # None, by the user or before the first gradient; or the user's own gradient
            self._consumer.drop_gradient(param)

    def after(self, param: nn.Parameter) -> None:
        """Takes the gradient that autograd has stored."""
        if param.grad is not None:
            with torch.no_grad():
                self._consumer.take_gradient(param, param.grad)
            param.grad = self._placeholders[param]

    def collect(self) -> None:
        """Takes gradients that users have replaced, and drops those that they set to None."""
        for param in self._placeholders:
            if not isinstance(param.grad, GradientPlaceholder):
                self.before(param)
                self.after(param)
        for param in self._late:
            if param.grad is not None:
                self._consumer.take_gradient(param, param.grad)
                param.grad = None


def remove_hooks(handles: list[Any]) -> None:
    """Removes hooks."""
    for handle in handles:
        handle.remove()


def progress(num_before: int, *, is_coming: bool, is_by_hand: bool) -> int:
    """The progress of a weight, for check_same_gradients().

    `num_before` backward passes since the last step had a gradient, and this one `is_coming`.
    """
    return 4 * num_before + 2 * is_coming + is_by_hand


def check_same_gradients(
    mine: Mapping[str, int],
    groups: Sequence[dist.ProcessGroup],
    *,
    system: str,
    alternative: str,
) -> None:
    """Raises RuntimeError on all ranks if progress() of a weight, by name, differs.

    The message says that `system` cannot reduce such gradients, and names the `alternative`.
    Collective over each of the groups, which are those of a mesh.
    """
    found = largest_of([*mine.values(), *(-value for value in mine.values())], groups)
    for name, most, least in zip(mine, found[: len(mine)], found[len(mine) :], strict=True):
        if most != -least:
            raise RuntimeError(
                f"{name} has a gradient on some ranks only, which {system} cannot reduce. No weight"
                " has been written. Use the weight on every rank in every backward pass (add 0"
                f" times it to the loss), or {alternative}"
            )
