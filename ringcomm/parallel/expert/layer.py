"""A layer of experts, of which each rank has some, and the router in front of them.

Shazeer et al. 2017; Lepikhin et al. 2021; Fedus et al. 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Self

from ringcomm.backend import resolve_group
from ringcomm.parallel.expert.dispatch import plan_dispatch, rows_of_tokens, sums_of_rows
from ringcomm.parallel.expert.local_experts import LocalExperts
from ringcomm.parallel.flat_collectives import check_agreement
from ringcomm.parallel.parts_of_models import register_part
from ringcomm.parallel.tensor.splits import refuse_copy

__all__ = ["MixtureOfExperts", "Routing", "TopKRouter"]


@dataclass(frozen=True)
class Routing:
    """Where this rank's tokens go; numbers are float32, or float64 of such tokens."""

    logits: Tensor  # (tokens, experts)
    probabilities: Tensor  # their softmax
    experts: Tensor  # (tokens, top_k), int64: the most probable first, of equals the smaller number
    weights: Tensor  # (tokens, top_k): of the experts' results
    is_kept: Tensor  # (tokens, top_k), bool: False where the expert is full
    tokens_per_expert: Tensor  # (experts,), int64
    num_dropped_tokens: Tensor  # of no dimension, int64: the choices that are not kept

    def slots_by_expert(self) -> Tensor:
        """The choices, token * top_k + choice, by expert and then by token; dropped ones last."""
        num_experts = self.logits.shape[1]
        found = torch.where(self.is_kept, self.experts, num_experts)
        return found.flatten().argsort(stable=True)

    @property
    def load_balancing_loss(self) -> Tensor:
        """experts * sum(f * P), 1 where balanced (Fedus et al. 2022, eq. 4, without alpha).

        f is an expert's share of all choices before any is dropped, P the mean of its
        probabilities; over this rank's tokens. 0 without any.
        """
        num_experts = self.logits.shape[1]
        shares = _counts(self.experts, num_experts) / max(self.experts.numel(), 1)
        mean = self.probabilities.sum(0) / max(self.probabilities.shape[0], 1)
        return num_experts * (shares.to(mean.dtype) * mean).sum()

    @property
    def router_z_loss(self) -> Tensor:
        """The mean of logsumexp(logits)^2 over this rank's tokens (Zoph et al. 2022, eq. 5)."""
        squares = self.logits.logsumexp(-1).square()
        return squares.sum() / max(squares.numel(), 1)


class TopKRouter(nn.Linear):
    """A linear gate, whose softmax is in float32 whatever the tokens are, autocast or not.

    Its arguments are those of MixtureOfExperts.
    """

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        top_k: int = 2,
        *,
        capacity_factor: float | None = None,
        normalize_weights: bool = False,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if num_experts < 1:
            raise ValueError(f"num_experts must be 1 or more, got {num_experts}")
        if not 1 <= top_k <= num_experts:
            raise ValueError(
                f"top_k={top_k} of {num_experts} experts: choose 1 to {num_experts} of them"
            )
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ValueError(
                f"capacity_factor={capacity_factor} leaves no room for tokens: use about 1.25, or "
                "None, which drops no token"
            )
        if normalize_weights and top_k == 1 < num_experts:
            raise ValueError(
                "with top_k=1 a normalized weight is always 1, and the router would learn "
                "nothing: set normalize_weights=False or top_k=2"
            )
        super().__init__(in_features, num_experts, bias, device=device, dtype=dtype)
        self.num_experts, self.top_k = num_experts, top_k
        self.capacity_factor, self.normalize_weights = capacity_factor, normalize_weights

    def forward(self, tokens: Tensor) -> Routing:  # type: ignore[override]
        """(tokens, in_features) to a Routing."""
        with torch.autocast(tokens.device.type, enabled=False):
            dtype = torch.promote_types(tokens.dtype, torch.float32)
            bias = None if self.bias is None else self.bias.to(dtype)
            logits = F.linear(tokens.to(dtype), self.weight.to(dtype), bias)
            probabilities = logits.softmax(-1)
        # Not topk(): which of several equal ones that takes is not said.
        weights, experts = probabilities.sort(dim=-1, descending=True, stable=True)
        weights, experts = weights[:, : self.top_k], experts[:, : self.top_k]
        if self.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        is_kept = self._within_capacity(experts)
        kept = torch.where(is_kept, experts, self.num_experts)
        return Routing(
            *(logits, probabilities, experts, weights, is_kept),
            tokens_per_expert=_counts(kept, self.num_experts + 1)[:-1],
            num_dropped_tokens=(~is_kept).sum(),
        )

    def _within_capacity(self, experts: Tensor) -> Tensor:
        """Which choices find a place."""
        if self.capacity_factor is None:
            return torch.ones_like(experts, dtype=torch.bool)
        capacity = math.ceil(self.capacity_factor * experts.numel() / self.num_experts)
        choices = experts.t().flatten()  # all first ones, then all second ones
        order = choices.argsort(stable=True)
        counts = _counts(choices, self.num_experts)
        begins = counts.cumsum(0) - counts
        places = torch.empty_like(choices)
        places[order] = torch.arange(len(order), device=order.device) - begins[choices[order]]
        return (places < capacity).view(self.top_k, -1).t()

    def extra_repr(self) -> str:
        """As nn.Linear has it, and what is not the default."""
        words = [super().extra_repr(), f"top_k={self.top_k}"]
        if self.capacity_factor is not None:
            words.append(f"capacity_factor={self.capacity_factor}")
        if self.normalize_weights:
            words.append("normalize_weights=True")
        return ", ".join(words)


def _counts(numbers: Tensor, num_kinds: int) -> Tensor:
    """How often each number below num_kinds is there; unlike bincount() without waiting for it."""
    flat = numbers.reshape(-1)
    return flat.new_zeros(num_kinds).scatter_add_(0, flat, torch.ones_like(flat))


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
    back, and as much backward; and forward 8 bytes for each expert elsewhere, and 16 for each
    other rank.

    Args:
        in_features: of a token.
        make_expert: makes one expert, a module from (rows, in_features) to the same shape. Every
            rank makes all of them, one after the other, and keeps its own: seed all ranks alike,
            and the values are those of a single process.
        num_experts: of the whole layer. Ranks have contiguous ones, as many or one more, or none.
        top_k: experts of a token (Shazeer et al. 2017).
        group, mesh: the ranks that share the experts, ParallelDims()["ep"]; default: all.
        replica_group: where there are fewer experts' ranks than ranks of data parallelism: those
            that have the same experts as this one, ParallelDims().group("edp").
        capacity_factor: an expert takes ceil(capacity_factor * top_k * tokens / num_experts) of
            this rank's tokens: first choices before second ones, and in the order of positions
            (Lepikhin et al. 2021, algorithm 1). Ranks need not talk about that, and what is dropped
            does not depend on other ranks' tokens. None: no token is dropped.
        normalize_weights: whether the weights of a token's experts sum to 1, as in Mixtral;
            otherwise they are their probabilities, as in Switch.
        device, dtype: of the router.

    Attributes:
        router: a linear layer, in float32 whatever the tokens are.
        experts: this rank's, by their numbers in the layer.
        routing: of the last forward: tokens_per_expert, num_dropped_tokens, load_balancing_loss,
            router_z_loss and more; None before. Under a reentrant torch.utils.checkpoint its losses
            have no gradient: take use_reentrant=False.

    Raises:
        ValueError: an argument is out of range; two experts share a parameter; on all ranks, they
            disagree on an argument, or have routers of other values.

    Collective: one object of arguments.
    """

    __deepcopy__ = __reduce_ex__ = refuse_copy

    group = property(lambda self: self.experts.group)  # whose ranks share the experts

    def __init__(
        self,
        in_features: int,
        make_expert: Callable[[], nn.Module],
        num_experts: int,
        top_k: int = 2,
        *,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        replica_group: dist.ProcessGroup | None = None,
        capacity_factor: float | None = None,
        normalize_weights: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        _router: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        resolved = resolve_group(group, mesh)
        self.router = TopKRouter(
            *(in_features, num_experts, top_k),
            capacity_factor=capacity_factor,
            normalize_weights=normalize_weights,
            bias=_router is not None and _router.bias is not None,
            device=device,
            dtype=dtype,
        )
        if _router is not None:
            self.router.load_state_dict(_router.state_dict())
            for name, param in self.router.named_parameters():
                param.requires_grad_(_router.get_parameter(name).requires_grad)
        made = (make_expert() for _ in range(num_experts))
        self.experts = LocalExperts(made, num_experts, resolved, replica_group)
        register_part(self)  # not the experts: a rank may have none of them
        self.routing: Routing | None = None
        alike = {
            "number of experts": num_experts,
            "arguments of the router": repr(self.router),
            "sum of the router's values, which seeds make alike": _sum_of(self.router),
        }
        check_agreement(alike, resolved)
        if replica_group is not None:
            alike["experts of replicas"] = self.experts.range
            alike["sum of the experts' values, which seeds make alike"] = _sum_of(self.experts)
            check_agreement(alike, replica_group)

    @classmethod
    def from_experts(
        cls, router: nn.Linear, experts: Sequence[nn.Module], top_k: int = 2, **options: Any
    ) -> Self:
        """This rank's part of a layer whose experts are there, the same on all ranks.

        Args:
            router: makes a logit for each expert; copied.
            experts: all of them; this rank's are taken as they are.
            top_k: see the class.
            options: group, mesh, replica_group, capacity_factor and normalize_weights of the class.

        Raises ValueError, and is collective, as the class.
        """
        if router.out_features != len(experts):
            raise ValueError(
                f"the router has {router.out_features} outputs, and there are {len(experts)}"
                " experts: one for each"
            )
        weight, next_expert = router.weight, iter(experts).__next__
        return cls(
            *(router.in_features, next_expert, len(experts), top_k),
            **{"device": weight.device, "dtype": weight.dtype, "_router": router, **options},
        )

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to the same shape and dtype.

        Any number of tokens on each rank, none too. Under autocast tokens travel in its dtype, as
        they enter linear layers; results are weighted and summed in float32. Raises ValueError on
        all ranks where tokens differ between them in dtype, or in whether gradients are needed.
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
            wire.dtype,
            self.experts.group,
            is_grad_needed=x.requires_grad or is_trained,
        )
        slots = routing.slots_by_expert()[: sum(plan.sent)]
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
