"""Expert parallelism for mixtures of experts of Hugging Face transformers."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.backend import resolve_group
from ringcomm.options import named_options
from ringcomm.parallel.expert.layer import check_layer, sum_of, within_capacity
from ringcomm.parallel.expert.local_experts import LocalExperts
from ringcomm.parallel.torch_checks import register_part


class GatedExpert(nn.Module):
    """One expert, of its slices of a layer's stacked weights."""

    def __init__(
        self, gate_up_proj: Tensor, down_proj: Tensor, act_fn: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(gate_up_proj.detach(), gate_up_proj.requires_grad)
        self.down_proj = nn.Parameter(down_proj.detach(), down_proj.requires_grad)
        self.act_fn = act_fn

    def forward(self, x: Tensor) -> Tensor:
        """(rows, hidden) to the same shape."""
        gate, up = F.linear(x, self.gate_up_proj).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, self.down_proj)


class ChosenExperts(LocalExperts):
    """This rank's experts of a block of transformers, which keeps its router."""

    capacity_factor: float | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See LocalExperts; of the choices beyond the capacity, none."""
        is_kept = within_capacity(top_k_index, self.num_experts, self.capacity_factor)
        kept = top_k_index.where(is_kept, self.num_experts)
        return super().forward(hidden_states, kept, top_k_weights)


def is_stacked(module: nn.Module) -> bool:
    """Whether a module is experts of transformers >= 5.0 that GatedExpert computes."""
    found: Any = module
    names = [name for name, _ in module.named_parameters()]
    if sorted(names) != ["down_proj", "gate_up_proj"] or not hasattr(module, "act_fn"):
        return False
    num_experts, hidden, size = found.down_proj.shape
    gate = getattr(found, "_apply_gate", None)
    return (
        found.gate_up_proj.shape == (num_experts, 2 * size, hidden)
        and [*inspect.signature(found.forward).parameters]
        == ["hidden_states", "top_k_index", "top_k_weights"]
        and (gate is None or gate.__name__ == "_default_apply_gate")
    )


@named_options()
def expert_parallelize(
    model: Any,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    replica_group: dist.ProcessGroup | None = None,
    capacity_factor: float | None = None,
) -> Any:
    """Distributes the experts of a model over the ranks of a group, in place.

    Blocks keep their routers, and whatever else they have besides experts: normalized weights,
    groups of experts, shared experts. The loss of routers with output_router_logits is that of this
    rank's tokens.

    Args:
        model: MixtralForCausalLM, Qwen3MoeForCausalLM or another model of transformers >= 5.0 whose
            blocks have stacked experts of gated linear layers (Qwen2-MoE, OLMoE, DeepSeek-V3), with
            the same values on all ranks.
        group: the ranks that share the experts; None for the default group.
        mesh: a one-dimensional DeviceMesh of them, instead of a group.
        replica_group: see MixtureOfExperts.
        capacity_factor: see MixtureOfExperts.

    Returns:
        `model`.

    Raises:
        ValueError: the model has no such block. The model is unchanged. Or, on all ranks, the ranks
            have different values.

    Collective.
    """
    layers = {name: module for name, module in model.named_modules() if is_stacked(module)}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no stacked experts of transformers >= 5.0, such as"
            " Mixtral's, Qwen3-MoE's and DeepSeek-V3's"
        )
    resolved = resolve_group(group, mesh)
    for name, whole in layers.items():
        parent, _, child = name.rpartition(".")
        block = model.get_submodule(parent)
        weights = zip(whole.gate_up_proj, whole.down_proj, strict=True)
        every = (GatedExpert(gate_up, down, whole.act_fn) for gate_up, down in weights)
        experts = ChosenExperts(every, len(whole.down_proj), resolved, replica_group)
        experts.capacity_factor = capacity_factor
        # A slice keeps the stacked weights in memory, and shares their version counter.
        for idx, expert in experts.items():
            experts.add_module(idx, copy.deepcopy(expert))
        setattr(block, child, experts)
        block.group = resolved
        register_part(block)  # not the experts: a rank may have none of them
        sums = sum_of(param for param in block.parameters() if param not in {*experts.parameters()})
        alike = {
            "experts of a layer": (name, experts.num_experts, capacity_factor),
            "sum of the router's values, which seeds make alike": sums,
        }
        check_layer(experts, alike)
    return model
