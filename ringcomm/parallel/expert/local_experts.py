"""The experts of a layer that one rank has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringcomm.ops.updates.fused_update import shard_range
from ringcomm.parallel.expert.dispatch import DispatchPlan, combine, dispatch
from ringcomm.parallel.tensor.splits import refuse_copy

__all__ = ["LocalExperts", "expert_parameters", "ignore_in_ddp", "refuse_experts", "split_experts"]


class LocalExperts(nn.ModuleDict):
    """This rank's experts, by their numbers in the whole layer, so that names differ between ranks.

    Args:
        experts: of the whole layer, in order, the same on all ranks: each rank keeps its own of
            them, as they are. An iterator may make one after the other.
        num_experts: how many there are.
        group: the ranks that share the experts, contiguous ones by shard_range(); a rank has none
            where there are fewer experts.
        replica_group: the ranks that have the same experts as this one, None where it is alone.

    Attributes:
        range: the experts [begin, end) of this rank.

    Raises:
        ValueError: two experts share a parameter.
    """

    __deepcopy__ = __reduce_ex__ = refuse_copy

    def __init__(
        self,
        experts: Iterable[nn.Module],
        num_experts: int,
        group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.group, self.replica_group = num_experts, group, replica_group
        self.range = shard_range(num_experts, group.size(), group.rank())
        seen: set[nn.Parameter] = set()
        for idx, expert in enumerate(experts):
            params = set(expert.parameters())
            if seen & params:
                raise ValueError(f"expert {idx} shares a parameter with another: copy it for each")
            seen |= params
            if self.range[0] <= idx < self.range[1]:
                self[str(idx)] = expert

    @property
    def is_split(self) -> bool:
        """Whether other ranks have other experts."""
        return self.group.size() > 1

    def forward(self, rows: Tensor, plan: DispatchPlan) -> Tensor:
        """Each row through its expert, wherever that is, in the order and dtype of the rows.

        Every expert runs, on no rows too, so that its parameters have gradients on every rank in
        every step. Collective, forward and backward.
        """
        self._check_ddp()
        parts, link = dispatch(rows, plan)
        results = []
        for (idx, expert), part in zip(self.items(), parts, strict=True):
            result = expert(part)
            if result.shape != part.shape:
                raise ValueError(
                    f"expert {idx} makes {tuple(result.shape)} of {tuple(part.shape)}: the results"
                    " of experts have the shape of their tokens"
                )
            results.append(result.to(plan.dtype))
        return combine(results, link, plan)

    def _check_ddp(self) -> None:
        ddp: Any = DistributedDataParallel
        if not self.is_split or ddp._get_active_ddp_module() is None:
            return
        if not all(getattr(param, "_ddp_ignored", False) for param in self.parameters()):
            raise RuntimeError(
                "DistributedDataParallel has replaced this rank's experts by those of rank 0, and"
                " would average them: call ringcomm.parallel.expert.ignore_in_ddp(model) before"
            )

    def extra_repr(self) -> str:
        """Which experts of how many."""
        return f"{self.range[0]}:{self.range[1]} of {self.num_experts}"


def split_experts(model: nn.Module) -> dict[str, LocalExperts]:
    """By name the modules of a model whose experts are shared among ranks."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LocalExperts) and module.is_split
    }


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name the parameters of a model that this rank, or it and its replicas, have alone.

    For what averages or shards the others, such as fully_shard(ignored_params=...).
    """
    return {
        f"{name}.{of_expert}" if name else of_expert: param
        for name, experts in split_experts(model).items()
        for of_expert, param in experts.named_parameters()
    }


def ignore_in_ddp(model: nn.Module) -> None:
    """Has DistributedDataParallel leave a model's experts alone; call it before, on the same model.

    Their gradients are for average_gradients(), or an optimizer of their own.
    """
    names = list(expert_parameters(model))
    for name, experts in split_experts(model).items():
        names += [f"{name}.{buffer}" if name else buffer for buffer, _ in experts.named_buffers()]
    names += getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def refuse_experts(model: nn.Module, system: str) -> None:
    """Raises ValueError where ranks have experts of their own, for a system that wants replicas."""
    for name in split_experts(model):
        raise ValueError(
            f"each rank has experts of its own in {name or 'the model'}, and {system} would take"
            " them for replicas of one: train such a model with an optimizer of torch and"
            " ringcomm.parallel.expert.average_gradients()"
        )
