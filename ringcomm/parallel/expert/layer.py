"""A layer of experts, of which each rank has some (Shazeer et al. 2017; Lepikhin et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Self

from ringcomm.backend import resolve_group
from ringcomm.parallel.expert.dispatch import plan_dispatch, rows_of_tokens, sums_of_rows
from ringcomm.parallel.expert.local_experts import LocalExperts
from ringcomm.parallel.expert.router import Routing, TopKRouter
from ringcomm.parallel.flat_collectives import check_agreement
from ringcomm.parallel.tensor.splits import refuse_copy

__all__ = ["MixtureOfExperts"]


class MixtureOfExperts(nn.Module):
    """Each token goes through the top_k experts that a router chooses; expert parallelism.

    Every rank has tokens of its own, as in data parallelism, the whole router, and some of the
    experts; tokens travel to the ranks of their experts and back. The result is that of all experts
    in one place.

        layer = MixtureOfExperts(512, lambda: MLP(512), num_experts=8, top_k=2)
        y = x + layer(x)
        loss = loss_of(y) + 0.01 * layer.routing.load_balancing_loss
        loss.backward()
        ringcomm.parallel.expert.average_gradients(model)

    A step sends, for each choice whose expert is on another rank, in_features elements there and
    back, and as much backward; and forward 8 bytes for each expert elsewhere, and 24
    for each other rank.

    Args:
        in_features: of a token.
        make_expert: makes one expert, a module from (rows, in_features) to the same shape. Every
            rank makes all of them, one after the other, and keeps its own: seed all ranks alike,
            and the values are those of a single process.
        num_experts: of the whole layer. Ranks have contiguous ones, as many or one more, or none.
        top_k, capacity_factor, normalize_weights: see TopKRouter.
        group: the ranks that share the experts; None for the default group.
        replica_group: where there are fewer experts' ranks than ranks of data parallelism: those
            that have the same experts as this one. With a mesh of ("replica", "expert") these are
            mesh["expert"].get_group() and mesh["replica"].get_group().
        device, dtype: of the router.

    Attributes:
        router: a TopKRouter.
        experts: a LocalExperts, this rank's by their numbers.
        routing: of the last forward: tokens_per_expert, num_dropped_tokens, load_balancing_loss,
            router_z_loss and more; None before. Under a reentrant torch.utils.checkpoint its losses
            have no gradient: take use_reentrant=False.

    Raises:
        ValueError: an argument is out of range; two experts share a parameter; on all ranks, they
            disagree on an argument, or have routers of other values.

    Collective: one object of arguments.
    """

    __deepcopy__ = __reduce_ex__ = refuse_copy

    def __init__(
        self,
        in_features: int,
        make_expert: Callable[[], nn.Module],
        num_experts: int,
        top_k: int = 2,
        *,
        group: dist.ProcessGroup | None = None,
        replica_group: dist.ProcessGroup | None = None,
        capacity_factor: float | None = None,
        normalize_weights: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        resolved = resolve_group(group)
        router = TopKRouter(
            *(in_features, num_experts, top_k),
            capacity_factor=capacity_factor,
            normalize_weights=normalize_weights,
            device=device,
            dtype=dtype,
        )
        made = (make_expert() for _ in range(num_experts))
        self._take(router, made, resolved, replica_group)

    def _take(
        self,
        router: TopKRouter,
        experts: Iterable[nn.Module],
        group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup | None,
    ) -> None:
        self.router = router
        self.experts = LocalExperts(experts, router.num_experts, group, replica_group)
        self.routing: Routing | None = None
        alike = {
            "number of experts": router.num_experts,
            "arguments of the router": repr(router),
            "sum of the router's values, which seeds make alike": _sum_of(router),
        }
        check_agreement(alike, group)
        if replica_group is not None:
            alike["experts of replicas"] = self.experts.range
            alike["sum of the experts' values, which seeds make alike"] = _sum_of(self.experts)
            check_agreement(alike, replica_group)

    @classmethod
    def from_experts(
        cls,
        router: nn.Linear,
        experts: Sequence[nn.Module],
        top_k: int = 2,
        *,
        group: dist.ProcessGroup | None = None,
        replica_group: dist.ProcessGroup | None = None,
        capacity_factor: float | None = None,
        normalize_weights: bool = False,
    ) -> Self:
        """This rank's part of a layer whose experts are there, the same on all ranks.

        `router` makes a logit for each expert and is copied; of `experts`, which are all, this
        rank's are taken as they are. The rest is as in the class.

        Raises:
            ValueError: the router has another number of outputs, or as the class.

        Collective: one object of arguments.
        """
        if router.out_features != len(experts):
            raise ValueError(
                f"the router has {router.out_features} outputs, and there are {len(experts)}"
                " experts: one for each"
            )
        gate = TopKRouter(
            *(router.in_features, len(experts), top_k),
            capacity_factor=capacity_factor,
            normalize_weights=normalize_weights,
            bias=router.bias is not None,
            device=router.weight.device,
            dtype=router.weight.dtype,
        )
        gate.load_state_dict(router.state_dict())
        for name, param in gate.named_parameters():
            param.requires_grad_(router.get_parameter(name).requires_grad)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(gate, experts, resolve_group(group), replica_group)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to the same shape and dtype.

        Any number of tokens on each rank, none too. Under autocast tokens travel in its dtype, as
        they enter linear layers; results are weighted and summed in float32.

        Raises:
            ValueError: tokens have another number of features; or, on all ranks, they differ
                between ranks in dtype, or in whether gradients are needed at all.

        Collective, and so is its backward pass, on all ranks if some need it.
        """
        if x.dim() == 0 or x.shape[-1] != self.router.in_features:
            raise ValueError(
                f"a token has {self.router.in_features} features, got tokens {tuple(x.shape)}"
            )
        tokens = x.reshape(-1, x.shape[-1])
        routing: Routing = self.router(tokens)
        self.routing = routing
        wire = tokens.to(_wire_dtype(x))
        is_trained = any(param.requires_grad for param in self.parameters())
        plan = plan_dispatch(
            routing.tokens_per_expert,
            wire,
            self.experts.group,
            is_grad_needed=x.requires_grad or is_trained,
        )
        slots = routing.slots_by_expert()[: plan.num_rows]
        top_k = self.router.top_k
        results = self.experts(rows_of_tokens(wire, slots, top_k), plan)
        weighted = results * routing.weights.reshape(-1).index_select(0, slots)[:, None]
        return sums_of_rows(weighted, slots, tokens.shape[0], top_k).to(x.dtype).view(x.shape)


def _sum_of(module: nn.Module) -> str:
    """Of all values, as a text, since NaN is not equal to itself."""
    params = [param.detach() for param in module.parameters() if not param.is_meta]
    return repr(float(sum(param.double().sum() for param in params)))


def _wire_dtype(x: Tensor) -> torch.dtype:
    """Autocast's, as for the inputs of linear layers, which leaves float64 alone."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype
