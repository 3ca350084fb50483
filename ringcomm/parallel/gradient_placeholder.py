"""What `param.grad` is where an optimizer has taken the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["GradientPlaceholder"]

_add: Any = torch.ops.aten.add_


class GradientPlaceholder(Tensor):
    """Stands in for a gradient that is not here, and raises when an operator reads or writes it.

    Without it torch.nn.utils.clip_grad_norm_, torch.amp.GradScaler, DistributedDataParallel and
    other optimizers over the same weights would find no gradient, and do nothing in silence. It has
    the parameter's shape, strides, dtype and device, which can be read, and no memory.

    Args:
        param: in whose `grad` it will be.
        message: of the RuntimeError.
        message_of_add: of the one for another gradient that is added; default: `message`.
    """

    message: str
    message_of_add: str

    # Attributes such as the shape can be read, as torch.compile does.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, param: Tensor, message: str, message_of_add: str | None = None
    ) -> GradientPlaceholder:
        """See the class."""
        make: Any = Tensor._make_wrapper_subclass
        made: GradientPlaceholder = make(
            cls,
            param.shape,
            strides=param.stride(),
            dtype=param.dtype,
            device=param.device,
            storage_size=0,
        )
        made.message = message
        made.message_of_add = message if message_of_add is None else message_of_add
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raises RuntimeError, always."""
        found = next(x for x in _flat((*args, *(kwargs or {}).values())) if isinstance(x, cls))
        raise RuntimeError(found.message_of_add if func.overloadpacket is _add else found.message)

    def __deepcopy__(self, memo: Any) -> None:
        """None: a copy of the parameter has no gradient, and no optimizer that took it."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Without values."""
        return f"GradientPlaceholder(shape={tuple(self.shape)}, dtype={self.dtype})"


def _flat(values: Any) -> list[Any]:
    return [x for value in values for x in (value if isinstance(value, list | tuple) else [value])]
