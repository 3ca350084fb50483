"""The experts in a model, for what treats them and replicated parameters differently."""

from __future__ import annotations

from torch import nn

from ringcomm.parallel.ddp import ignored_in_ddp, set_ignored_in_ddp
from ringcomm.parallel.expert.local_experts import LocalExperts

__all__ = ["expert_parameters", "ignore_in_ddp", "refuse_experts", "split_experts"]


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
    set_ignored_in_ddp(model, names + ignored_in_ddp(model))


def refuse_experts(model: nn.Module, system: str) -> None:
    """Raises ValueError where ranks have experts of their own, for a system that wants replicas."""
    for name in split_experts(model):
        raise ValueError(
            f"each rank has experts of its own in {name or 'the model'}, and {system} would take"
            " them for replicas of one: train such a model with an optimizer of torch and"
            " ringcomm.parallel.expert.average_gradients()"
        )
