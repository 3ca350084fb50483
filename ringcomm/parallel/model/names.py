"""Names of a module's tensors as the model without torch's wrappers has them.

Wrappers are DistributedDataParallel, FullyShardedDataParallel, the modules of torch.compile and of
checkpoint_wrapper. They are known by their class: a submodule that a user calls "module" keeps its
name, and so do the wrappers of users and of other libraries.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ringcomm.parallel.model.describe import wrapped_attribute


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
