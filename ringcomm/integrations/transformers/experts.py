"""Expert parallelism for mixtures of experts of Hugging Face transformers."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.backend import resolve_group
from ringcomm.ops import shard_range
from ringcomm.parallel.expert.layer import check_layer, sum_of, within_capacity
from ringcomm.parallel.expert.local_experts import LocalExperts
from ringcomm.parallel.model.describe import describe
from ringcomm.parallel.model.refuse import Asked, refuse
from ringcomm.parallel.model.saving import save_full
from ringcomm.parallel.tensor.splits import Split


class ChosenExperts(LocalExperts):
    """This rank's rows of the stacked experts of a block of transformers, which keeps its router.

    They are copied: a view would keep all experts in memory. `groups` are those of LocalExperts.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    act_fn: Callable[[Tensor], Tensor]

    def __init__(self, whole: Any, capacity_factor: float | None, *groups: Any) -> None:
        num_experts = len(whole.down_proj)
        super().__init__((), num_experts, *groups)
        # Not a submodule: it is no expert.
        vars(self)["act_fn"], self.capacity_factor = whole.act_fn, capacity_factor
        size = self.group.size()
        ranges = tuple(shard_range(num_experts, size, rank) for rank in range(size))
        for name, param in whole.named_parameters():
            self.splits[name] = split = Split(0, ranges, self.group.rank())
            own = split.cut(param.detach()).clone()
            self.register_parameter(name, nn.Parameter(own, param.requires_grad))

    def _experts(self) -> dict[str, Any]:
        rows = zip(self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        return {str(i): partial(self._gated, *of) for i, of in enumerate(rows, self.range[0])}

    def _gated(self, gate_up_proj: Tensor, down_proj: Tensor, x: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_up_proj).chunk(2, dim=-1)
        return F.linear(self.act_fn(gate) * up, down_proj)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See LocalExperts; of the choices beyond the capacity, none."""
        is_kept = within_capacity(top_k_index, self.num_experts, self.capacity_factor)
        kept = top_k_index.where(is_kept, self.num_experts)
        output = super().forward(hidden_states, kept, top_k_weights)
        if not len(self.down_proj):  # empty weights have gradients, and states, as on other ranks
            output = output + self.gate_up_proj.sum() + self.down_proj.sum()
        return output


def is_stacked(module: nn.Module) -> bool:
    """Whether a module is experts of transformers >= 5.0 that ChosenExperts computes."""
    found: Any = module
    names = [name for name, _ in module.named_parameters()]
    is_gated = sorted(names) == ["down_proj", "gate_up_proj"] and hasattr(module, "act_fn")
    if isinstance(module, LocalExperts) or not is_gated:
        return False
    num_experts, hidden, size = found.down_proj.shape
    gate = getattr(found, "_apply_gate", None)
    return (
        found.gate_up_proj.shape == (num_experts, 2 * size, hidden)
        and [*inspect.signature(found.forward).parameters]
        == ["hidden_states", "top_k_index", "top_k_weights"]
        and (gate is None or gate.__name__ == "_default_apply_gate")
    )


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
    rank's tokens. Each rank has rows of the stacked weights, under their names; save_pretrained()
    is collective over all ranks, and rank 0 writes the full model.

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
        ValueError: the model has no such block, is already sharded, or has adapters of PEFT for
            the weights of all experts. The model is unchanged. Or, on all ranks, the ranks have
            different values.

    Collective.
    """
    layers = {name: module for name, module in model.named_modules() if is_stacked(module)}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no stacked experts of transformers >= 5.0, such as"
            " Mixtral's, Qwen3-MoE's and DeepSeek-V3's"
        )
    refuse(describe(model), Asked("expert_parallelize", "expert_parallelize"))
    resolved = resolve_group(group, mesh)
    for name, whole in layers.items():
        parent, _, child = name.rpartition(".")
        block = model.get_submodule(parent)
        experts = ChosenExperts(whole, capacity_factor, resolved, replica_group)
        setattr(block, child, experts)
        sums = sum_of(param for param in block.parameters() if param not in {*experts.parameters()})
        alike = {
            "experts of a layer": (name, experts.num_experts, capacity_factor),
            "sum of the router's values, which seeds make alike": sums,
        }
        check_layer(experts, alike)
    save_full(model)
    return model
