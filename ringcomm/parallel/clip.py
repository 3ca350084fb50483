"""Factors of all gradients: clipping by one norm, on any mesh, and loss scales."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ringcomm.parallel.flat_collectives import gathered_rows, local_of
from ringcomm.parallel.model.cut import Axes, Sharding
from ringcomm.parallel.model.describe import describe
from ringcomm.torch_names import foreach_mul_, foreach_norm


@torch.no_grad()
def clip_grad_norm_(
    model: Any, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for a model on any mesh of ranks.

    Every element of the whole model's gradient counts once, with any combination of tensor,
    sequence, expert and pipeline parallelism and fully_shard. The norm and the factor are bitwise
    equal on all ranks, so replicas stay equal.

    Args:
        model: an nn.Module, or a `pipeline.Pipeline`, after the backward pass. Gradients must
            already be averaged over data-parallel ranks (by DistributedDataParallel, fully_shard or
            `expert.average_gradients`). For an optimizer with its own clip_grad_norm_(), that
            method is called.
        max_norm: gradients are multiplied by min(1, max_norm / (norm + 1e-6)).
        norm_type: p > 0, or infinity.
        error_if_nonfinite: whether to raise RuntimeError if the norm is not finite.

    Returns:
        The norm before clipping, a float64 scalar tensor, the same on all ranks.

    Raises:
        TypeError: `model` is a list of parameters, or an optimizer without its model.
        ValueError: norm_type is out of range, or the model is a piece of a pipeline.
        RuntimeError: on all ranks and before gradients change: no rank has a gradient, or the norm
            is not finite with error_if_nonfinite.

    Collective: one all_gather of 16 bytes per rank for each group of a mesh dimension, of tensor
    parallelism, of experts and of stages; 32 bytes for tensor-parallel groups of sharded experts.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be a positive number or infinity, got {norm_type}")
    if isinstance(model, torch.optim.Optimizer) and hasattr(model, "clip_grad_norm_"):
        if norm_type != 2:
            name = type(model).__name__
            raise ValueError(
                f"{name} clips by the 2-norm: norm_type must be 2, got norm_type={norm_type}"
            )
        return model.clip_grad_norm_(max_norm, error_if_nonfinite=error_if_nonfinite)
    module = model if isinstance(model, nn.Module) else getattr(model, "module", None)
    if not isinstance(module, nn.Module):
        raise TypeError(
            "clip_grad_norm_ needs the model or its Pipeline, which describe the parts of other"
            f" ranks; got {type(model).__name__}"
        )
    axes = describe(module).axes()
    grads = {param: param.grad for param in module.parameters() if param.grad is not None}
    # The same kind on all ranks, also on one without a gradient, or without weights of a pipeline.
    device = next((param.device for param in module.parameters()), getattr(model, "device", _CPU))
    own = {param: _own(grad) for param, grad in grads.items()}
    norm = _total_norm(axes, own, norm_type, device)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradients is {float(norm)}")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    parts = [local_of(grad) for grad in grads.values()]
    for of_kind in _by_kind(parts):
        foreach_mul_(of_kind, factor.to(of_kind[0].device))
    return norm


_CPU = torch.device("cpu")


def _total_norm(
    axes: Axes, grads: dict[nn.Parameter, Tensor], norm_type: float, device: torch.device
) -> Tensor:
    """The norm of the whole model's gradient; `grads` has this rank's elements. Collective."""
    is_max = norm_type == math.inf
    by_sharding: dict[Sharding, list[Tensor]] = {}
    for param, sharding in axes.shardings.items():
        if param in grads:
            by_sharding.setdefault(sharding, []).append(grads[param])
    own = {}
    for sharding, of_sharding in by_sharding.items():
        power = power_of(of_sharding, norm_type, device)
        own[sharding] = torch.stack([torch.full_like(power, len(of_sharding)), power])
    zeros = torch.zeros(2, dtype=torch.float64, device=device)
    num_grads, power = over_all_ranks(axes, own, zeros, num_sums=1 if is_max else 2)
    # A rank with a gradient skips the check, and so does not wait for its device.
    if not grads and not num_grads:
        raise RuntimeError(
            "no rank has a gradient to clip: call backward() before. For an optimizer that"
            " applies gradients in the backward pass, such as Lomo, set its option"
            " clip_grad_norm"
        )
    return power if is_max else power ** (1 / norm_type)


def norm_of_shards(
    axes: Axes, shards: Iterable[tuple[nn.Parameter, Tensor]], device: torch.device
) -> float:
    """The 2-norm of the whole model's gradient, from this rank's shards. Collective."""
    zero = torch.zeros(1, dtype=torch.float64, device=device)
    own: dict[Sharding, Tensor] = {}
    for param, grad in shards:
        sharding = axes.shardings.get(param)
        if sharding is not None and grad.numel():  # else tied, and counted by an earlier stage
            norm = torch.linalg.vector_norm(grad, dtype=torch.float32).double()
            own[sharding] = own.get(sharding, zero) + norm.square()
    return float(over_all_ranks(axes, own, zero, num_sums=1)) ** 0.5


def over_all_ranks(
    axes: Axes, own: Mapping[Sharding, Tensor], zeros: Tensor, num_sums: int
) -> Tensor:
    """Sums and maxima over the whole model; every element counts once.

    `own` has rows for this rank's elements, grouped by the ranks with the other elements:
    `num_sums` sums, then maxima. `zeros` is an empty row in float64. Returns a row that is bitwise
    equal on all ranks, because everything is added in rank order. Collective: an all_gather of one
    or a few rows over each group of the axes.
    """
    pools = dict.fromkeys(_pools_of(axes), zeros)
    for sharding, row in own.items():
        share = torch.cat([row[:num_sums] / sharding.num_copies, row[num_sums:]])
        pools[sharding.groups] = _joined([pools[sharding.groups], share], num_sums)
    for group in axes.groups:  # Not by all_reduce: its order may differ between groups.
        # All ranks of the group have the same pools in the same order, because they have the same
        # modules. The exception is a group of experts, which is last and therefore has one pool.
        mine = [rest for rest in pools if rest[:1] == (group,)]
        rows = gathered_rows(torch.stack([pools[rest] for rest in mine]), group)
        for rest, row in zip(mine, rows.unbind(1), strict=True):
            pools[rest[1:]] = _joined([pools[rest[1:]], *row], num_sums)
    total = pools[()]
    if axes.stages is not None and axes.stages.size() > 1:
        total = _joined([*gathered_rows(total, axes.stages)], num_sums)
    return total


def bytes_over_all_ranks(axes: Axes, row_bytes: int) -> int:
    """Bytes that a rank sends in over_all_ranks()."""
    pools, num_sent = _pools_of(axes), 0
    for group in axes.groups:
        num_sent += (group.size() - 1) * sum(pool[:1] == (group,) for pool in pools)
    if axes.stages is not None:
        num_sent += axes.stages.size() - 1
    return row_bytes * num_sent


def _pools_of(axes: Axes) -> list[tuple[dist.ProcessGroup, ...]]:
    """The groups over which elements remain to be summed; their sums are kept separate."""
    of_params = (sharding.groups for sharding in axes.shardings.values())
    every = [(), *((group,) for group in axes.groups), *of_params]
    return list(dict.fromkeys(groups[idx:] for groups in every for idx in range(len(groups) + 1)))


def _joined(rows: list[Tensor], num_sums: int) -> Tensor:
    """Combines several rows in this order, so that the bits are the same on all ranks."""
    found, *others = rows
    for row in others:
        largest = torch.maximum(found[num_sums:], row[num_sums:])
        found = torch.cat([found[:num_sums] + row[:num_sums], largest])
    return found


def power_of(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of |g|^p over all elements, or the largest |g|; 0 without any."""
    found = [torch.zeros(1, dtype=torch.float64, device=device)]
    for of_kind in _by_kind([grad for grad in grads if grad.numel()]):
        wide = torch.promote_types(of_kind[0].dtype, torch.float32)
        norms = torch.stack(foreach_norm(of_kind, norm_type, dtype=wide))
        found.append(norms.to(device, torch.float64))
    every = torch.cat(found)
    return every.amax() if norm_type == math.inf else every.pow(norm_type).sum()


def _by_kind(grads: list[Tensor]) -> list[list[Tensor]]:
    """Groups tensors by device and dtype."""
    found: dict[Any, list[Tensor]] = {}
    for grad in grads:
        found.setdefault((grad.device, grad.dtype), []).append(grad)
    return list(found.values())


def _own(grad: Tensor) -> Tensor:
    if not isinstance(grad, DTensor):
        return grad
    whole = [Replicate() if p.is_partial() else p for p in grad.placements]
    return grad.redistribute(placements=whole).to_local()


class LossScale:
    """A factor of the loss, its `value`; fixed, or dynamic (Micikevicius et al. 2018).

    A dynamic one halves on overflow and doubles after `growth_interval` steps.
    """

    initial_value = 2.0**16
    growth_interval = 2000
    least_value = 2.0**-24  # if each step overflows; steps divide by it

    def __init__(self, given: str | float) -> None:
        """`given` is "dynamic" or the factor; raises ValueError for others."""
        self.is_dynamic = given == "dynamic"
        if not self.is_dynamic and (
            isinstance(given, str) or not math.isfinite(given) or given <= 0
        ):
            raise ValueError(
                f'loss_scale must be None, "dynamic" or a positive number, got {given!r}'
            )
        self.value = self.initial_value if self.is_dynamic else float(given)
        self._num_good_steps = 0

    def update(self, has_overflow: bool) -> None:
        """After a step, or one that was skipped."""
        if not self.is_dynamic:
            return
        self._num_good_steps = 0 if has_overflow else self._num_good_steps + 1
        if has_overflow:
            self.value = max(self.value / 2, self.least_value)
        elif self._num_good_steps == self.growth_interval:
            self.value *= 2
            self._num_good_steps = 0

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint: keys of each parameter group, which torch's format lacks."""
        return {"loss_scale": self.value, "loss_scale_good_steps": self._num_good_steps}

    @staticmethod
    def take(group: dict[str, Any], scale: "LossScale | None") -> None:
        """Removes a `state` from a parameter group, if it has one, and restores it in a scale."""
        found = [group.pop(key, None) for key in ("loss_scale", "loss_scale_good_steps")]
        if scale is not None and None not in found:
            scale.value, scale._num_good_steps = found


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor by which torch.nn.utils.clip_grad_norm_ multiplies gradients."""
    return min(1.0, max_norm / (norm + 1e-6))
