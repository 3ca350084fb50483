"""Expert parallelism for Mixtral models of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.backend import resolve_group
from ringcomm.parallel.expert.layer import MixtureOfExperts


class MixtralExpert(nn.Module):
    """One expert, with copies of its slices of the block's stacked weights."""

    def __init__(
        self, gate_up_proj: Tensor, down_proj: Tensor, act_fn: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(gate_up_proj.detach().clone(), gate_up_proj.requires_grad)
        self.down_proj = nn.Parameter(down_proj.detach().clone(), down_proj.requires_grad)
        self.act_fn = act_fn

    def forward(self, x: Tensor) -> Tensor:
        """(rows, hidden) to the same shape."""
        gate, up = F.linear(x, self.gate_up_proj).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, self.down_proj)


def expert_parallelize(
    model: Any,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    replica_group: dist.ProcessGroup | None = None,
    capacity_factor: float | None = None,
) -> Any:
    """Distributes the experts of a Mixtral model over the ranks of a group, in place.

    Each MixtralSparseMoeBlock becomes a MixtureOfExperts with the same results; its router computes
    in float32. The model's own load-balancing loss no longer finds routers: add
    `load_balancing_loss` of the layers' `routing` to the loss.

    Args:
        model: MixtralForCausalLM or another model with such blocks, of transformers >= 5.0, with
            the same values on all ranks.
        group: the ranks that share the experts; None for the default group.
        mesh: a one-dimensional DeviceMesh of them, instead of a group.
        replica_group: see MixtureOfExperts.
        capacity_factor: see MixtureOfExperts.

    Returns:
        `model`.

    Raises:
        ValueError: the model has no such block, or has router_jitter_noise or output_router_logits
            set. The model is unchanged.

    Collective.
    """
    blocks = {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ == "MixtralSparseMoeBlock"
        and hasattr(module.gate, "weight")
        and hasattr(module.experts, "gate_up_proj")
    }
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no MixtralSparseMoeBlock of transformers >= 5.0"
        )
    if any(block.jitter_noise > 0 for block in blocks.values()):
        raise ValueError("expert parallelism does not support router_jitter_noise: set it to 0")
    if getattr(model.config, "output_router_logits", False):
        raise ValueError(
            "output_router_logits finds no routers in sharded layers: set it to False, and add"
            " load_balancing_loss of the layers' routing to the loss"
        )
    resolved = resolve_group(group, mesh)
    for name, block in blocks.items():
        weight, of_experts = block.gate.weight, block.experts
        router = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        router.weight = weight
        weights = zip(of_experts.gate_up_proj, of_experts.down_proj, strict=True)
        layer = MixtureOfExperts.from_experts(
            router,
            [MixtralExpert(gate_up, down, of_experts.act_fn) for gate_up, down in weights],
            block.top_k,
            group=resolved,
            replica_group=replica_group,
            capacity_factor=capacity_factor,
            normalize_weights=block.top_k > 1,
        )
        # As in transformers, where the weight of a token's only expert is 1. TopKRouter refuses it.
        layer.router.normalize_weights = True
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    return model
