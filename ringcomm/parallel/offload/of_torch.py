"""torch's AdamW and SGD with offloaded states, which a kernel updates."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch

from ringcomm.parallel.offload.optimizers import Offloaded


class _OfTorch(Offloaded):
    """Makes the given optimizer itself."""

    _kind: Any

    def __init__(
        self,
        params: Any,
        *args: Any,
        to: Literal["cpu", "nvme"] = "cpu",
        path: str | os.PathLike[str] | None = None,
        chunk_elems: int = 1 << 20,
        **options: Any,
    ) -> None:
        given = self._kind(params, *args, **options)
        super().__init__(given, to=to, path=path, chunk_elems=chunk_elems)


class AdamW(_OfTorch, torch.optim.AdamW):
    """torch.optim.AdamW with exp_avg and exp_avg_sq in host memory, or in files: see Offloaded.

        optimizer = offload.AdamW(model.parameters(), lr=1e-3, to="nvme", path="/mnt/nvme")

    A step reads and writes 8 bytes each way per float32 weight, 12 per 16-bit weight. State in
    files needs three chunks of memory. With amsgrad and maximize torch's own step runs.

    Args:
        params, *args, **options: as in torch.
        to, path, chunk_elems: see Offloaded.

    Raises ValueError and OSError as Offloaded.
    """

    _kind = torch.optim.AdamW


class SGD(_OfTorch, torch.optim.SGD):
    """torch.optim.SGD with its momentum in host memory, or in files; see AdamW."""

    _kind = torch.optim.SGD
