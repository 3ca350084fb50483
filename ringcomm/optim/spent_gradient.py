"""What a parameter's .grad is between the use of its gradient and step()."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_add: Any = torch.ops.aten.add_


class SpentGradient(Tensor):
    """Stands in for a gradient that is gone, and raises when an operator reads or writes it.

    Without it torch's clipping and loss scaling would find no gradient and do nothing, in silence.
    It has the parameter's shape, dtype and device, and no memory.
    """

    message: str
    again: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, param: Tensor, name: str, optimizer: str) -> SpentGradient:
        """For a parameter called `name` of an optimizer of the class `optimizer`."""
        make: Any = Tensor._make_wrapper_subclass
        made: SpentGradient = make(
            cls,
            param.shape,
            strides=param.stride(),
            dtype=param.dtype,
            device=param.device,
            storage_size=0,
        )
        made.message = (
            f"{optimizer} has used the gradient of {name} inside the backward pass:"
            " torch.nn.utils.clip_grad_norm_, torch.amp.GradScaler and DistributedDataParallel find"
            f" none. Use clip_grad_norm=, clip_grad_value=, loss_scale= and group= of {optimizer};"
            " with Trainer and Accelerate call prepare() of ringcomm.integrations.transformers or"
            " .accelerate first"
        )
        made.again = (
            f"{name} got a gradient after its update: backward() ran again before step() (say"
            " accumulation_steps), or a weight is used in several segments of a reentrant"
            " checkpoint (use_reentrant=False)"
        )
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raises RuntimeError."""
        found = next(x for x in _flat((*args, *(kwargs or {}).values())) if isinstance(x, cls))
        raise RuntimeError(found.again if func.overloadpacket is _add else found.message)

    def __deepcopy__(self, memo: Any) -> None:
        """None: a copy of the parameter has no gradient, and no optimizer of this kind."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Says whose it is."""
        return f"SpentGradient({self.message!r})"


def _flat(values: Any) -> list[Any]:
    return [x for value in values for x in (value if isinstance(value, list | tuple) else [value])]
