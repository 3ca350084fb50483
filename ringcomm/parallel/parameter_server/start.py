"""A group of its own for the ranks of a parameter server, and what they start from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ringcomm.parallel.parameter_server.keys import Packing

__all__ = ["group_of_its_own", "start_from_first"]


def group_of_its_own(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same ranks over ringcomm: messages that meet no others. Collective."""
    backend: Any = group._get_backend(torch.device("cpu"))
    is_whole = group.size() == dist.get_world_size()
    return dist.new_group(
        dist.get_process_group_ranks(group),
        backend="ringcomm",
        timeout=backend.options._timeout,
        pg_options=backend.options if backend.name() == "ringcomm" else None,
        use_local_synchronization=not is_whole,
        group_desc="ringcomm parameter server",
    )


def start_from_first(modules: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
    """Parameters and buffers of rank 0 into all modules of all ranks. Collective: one broadcast."""
    of_modules = [[*module.parameters(), *module.buffers()] for module in modules]
    values = of_modules[0]
    packing = Packing([value.shape for value in values], [value.dtype for value in values])
    buffer = packing.pack([value.detach() for value in values])
    if buffer.numel():
        dist.broadcast(buffer, group=group, group_src=0)
    with torch.no_grad():
        for others in of_modules:
            for value, sent in zip(others, packing.views(buffer), strict=True):
                value.copy_(sent)
