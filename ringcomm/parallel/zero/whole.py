"""Optimizers that need whole weights, such as Muon: which rank owns which weight."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def owners_of(params: Iterable[nn.Parameter], world_size: int) -> dict[nn.Parameter, int]:
    """The rank that updates each weight, the same on all ranks.

    Balanced by cost and by bytes together. The cost is that of a product of a matrix with its own
    transpose, min(m, n) * m * n, as in Newton-Schulz iterations and preconditioners.
    """
    costs = {param: _cost(param) for param in params}
    total, num_elems = sum(costs.values()) or 1, sum(param.numel() for param in costs) or 1
    shares = {param: cost / total + param.numel() / num_elems for param, cost in costs.items()}
    loads, owners = [0.0] * world_size, {}
    for param in sorted(shares, key=shares.__getitem__, reverse=True):
        owners[param] = min(range(world_size), key=loads.__getitem__)
        loads[owners[param]] += shares[param]
    return owners


def _cost(param: nn.Parameter) -> int:
    num_rows = param.shape[0] if param.dim() > 1 else 1
    num_columns = param.numel() // max(1, num_rows)
    return min(num_rows, num_columns) * param.numel()
