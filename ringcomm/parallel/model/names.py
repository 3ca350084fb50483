"""Names of a module's tensors as the model without torch's wrappers has them.

Wrappers are DistributedDataParallel, FullyShardedDataParallel, the modules of torch.compile and of
checkpoint_wrapper. They are known by their class: a submodule that a user calls "module" keeps its
name, and so do the wrappers of users and of other libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from ringcomm.torch_names import wrapped_attribute


def plain_name(module: nn.Module, name: str) -> str:
    """A name of a parameter or buffer, or a key of state_dict(), without the names of wrappers.

    Some wrappers remove their own name from keys, so that it may be missing.
    """
    kept: list[str] = []
    found: Any = module
    for part in name.split("."):
        is_wrapper = False
        while not is_wrapper and (attribute := wrapped_attribute(found)) is not None:
            found, is_wrapper = getattr(found, attribute), part == attribute
        if not is_wrapper:
            kept.append(part)
            found = getattr(found, part, None)
    return ".".join(kept)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, each under all of its names; parameters first."""
    named = chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    return ((plain_name(module, name), tensor) for name, tensor in named)


def parameter_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """The first name of each parameter, in the order of module.parameters()."""
    return {param: plain_name(module, name) for name, param in module.named_parameters()}
