"""An expert-parallel layer and its router.

Shazeer et al. 2017; Lepikhin et al. 2021; Fedus et al. 2022.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Self

from ringcomm.backend import resolve_group
from ringcomm.parallel.expert.dispatch import counts_of
from ringcomm.parallel.expert.local_experts import LocalExperts
from ringcomm.parallel.flat_collectives import check_agreement
from ringcomm.parallel.model.saving import refuse_copy
from ringcomm.parallel.torch_checks import register_part


@dataclass(frozen=True)
class Routing:
    """The routing of this rank's tokens; values are float32, or float64 for float64 tokens."""

    logits: Tensor  # (tokens, experts)
    probabilities: Tensor  # their softmax
    experts: Tensor  # (tokens, top_k), int64: the most probable first; ties: smaller number first
    weights: Tensor  # (tokens, top_k): of the experts' results
    is_kept: Tensor  # (tokens, top_k), bool: False where the expert is full
    tokens_per_expert: Tensor  # (experts,), int64
    num_dropped_tokens: Tensor  # scalar, int64: the number of dropped choices

    @property
    def load_balancing_loss(self) -> Tensor:
        """experts * sum(f * P), 1 where balanced (Fedus et al. 2022, eq. 4, without alpha).

        f is an expert's share of all choices before any is dropped, P the mean of its
        probabilities; over this rank's tokens. 0 without any.
        """
        num_experts = self.logits.shape[1]
        shares = counts_of(self.experts, num_experts) / max(self.experts.numel(), 1)
        mean = self.probabilities.sum(0) / max(self.probabilities.shape[0], 1)
        return num_experts * (shares.to(mean.dtype) * mean).sum()

    @property
    def router_z_loss(self) -> Tensor:
        """The mean of logsumexp(logits)^2 over this rank's tokens (Zoph et al. 2022, eq. 5)."""
        squares = self.logits.logsumexp(-1).square()
        return squares.sum() / max(squares.numel(), 1)


class TopKRouter(nn.Linear):
    """A linear gate with a softmax in float32 for any dtype of tokens, also under autocast.

    Its arguments are those of MixtureOfExperts. It has a bias if from_experts() gets one.
    """

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        top_k: int = 2,
        *,
        capacity_factor: float | None = None,
        normalize_weights: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if num_experts < 1:
            raise ValueError(f"num_experts must be 1 or more, got {num_experts}")
        if not 1 <= top_k <= num_experts:
            raise ValueError(
                f"top_k must be at least 1 and at most num_experts={num_experts}, got {top_k}"
            )
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ValueError(
                "capacity_factor must be positive and finite, such as 1.25, or None, which drops"
                f" no token; got {capacity_factor}"
            )
        if normalize_weights and top_k == 1 < num_experts:
            raise ValueError(
                "with top_k=1 a normalized weight is always 1, and the router would learn "
                "nothing: set normalize_weights=False or top_k=2"
            )
        super().__init__(in_features, num_experts, bias=False, device=device, dtype=dtype)
        self.num_experts, self.top_k = num_experts, top_k
        self.capacity_factor, self.normalize_weights = capacity_factor, normalize_weights

    def forward(self, tokens: Tensor) -> Routing:  # type: ignore[override]
        """(tokens, in_features) to a Routing."""
        with torch.autocast(tokens.device.type, enabled=False):
            dtype = torch.promote_types(tokens.dtype, torch.float32)
            bias = None if self.bias is None else self.bias.to(dtype)
            logits = F.linear(tokens.to(dtype), self.weight.to(dtype), bias)
            probabilities = logits.softmax(-1)
        # Not topk(), whose choice among equal values is not specified.
        weights, experts = probabilities.sort(dim=-1, descending=True, stable=True)
        weights, experts = weights[:, : self.top_k], experts[:, : self.top_k]
        if self.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        is_kept = within_capacity(experts, self.num_experts, self.capacity_factor)
        kept = torch.where(is_kept, experts, self.num_experts)
        return Routing(
            logits=logits,
            probabilities=probabilities,
            experts=experts,
            weights=weights,
            is_kept=is_kept,
            tokens_per_expert=counts_of(kept, self.num_experts + 1)[:-1],
            num_dropped_tokens=(~is_kept).sum(),
        )

    def extra_repr(self) -> str:
        """As in nn.Linear, plus options that are not the default."""
        words = [super().extra_repr(), f"top_k={self.top_k}"]
        if self.capacity_factor is not None:
            words.append(f"capacity_factor={self.capacity_factor}")
        if self.normalize_weights:
            words.append("normalize_weights=True")
        return ", ".join(words)


def within_capacity(experts: Tensor, num_experts: int, factor: float | None) -> Tensor:
    """Which choices, (tokens, choices), are within capacity_factor; see MixtureOfExperts."""
    if factor is None:
        return torch.ones_like(experts, dtype=torch.bool)
    capacity = math.ceil(factor * experts.numel() / num_experts)
    choices = experts.t().flatten()  # all first ones, then all second ones
    order = choices.argsort(stable=True)
    counts = counts_of(choices, num_experts)
    begins = counts.cumsum(0) - counts
    places = torch.empty_like(choices)
    places[order] = torch.arange(len(order), device=order.device) - begins[choices[order]]
    return (places < capacity).view(experts.shape[1], -1).t()


def check_layer(experts: LocalExperts, alike: dict[str, Any]) -> None:
    """Raises ValueError on all ranks unless values, and the experts of replicas, are the same.

    Collective.
    """
    check_agreement(alike, experts.group)
    if experts.replica_group is not None:
        alike["experts of replicas"] = experts.range
        alike["sum of the experts' values, which seeds make alike"] = sum_of(experts.parameters())
        check_agreement(alike, experts.replica_group)


class MixtureOfExperts(nn.Module):
    """Each token goes through the top_k experts that a router chooses; expert parallelism.

    Every rank has different tokens, as in data parallelism, the whole router, and some of the
    experts. Tokens are sent to the ranks of their experts and back. The result equals that of all
    experts on one rank.

        layer = MixtureOfExperts(512, lambda: MLP(512), num_experts=8, top_k=2)
        y = x + layer(x)
        loss = loss_of(y) + 0.01 * layer.routing.load_balancing_loss
        loss.backward()
        ringcomm.parallel.expert.average_gradients(model)

    For each choice whose expert is on another rank, a step sends in_features elements there and
    back, and the same again in the backward pass. The forward pass also sends 8 bytes for each
    expert on another rank, and 16 for each other rank.

    Args:
        in_features: the size of a token.
        make_expert: a function that returns one expert, a module from (rows, in_features) to the
            same shape. Every rank makes all experts one after the other and keeps its own. With the
            same seed on all ranks, values are those of a single process.
        num_experts: the number of experts of the layer. Each rank has a contiguous range; sizes
            differ by at most one and may be 0.
        top_k: experts per token (Shazeer et al. 2017).
        group, mesh: the expert-parallel ranks, ParallelDims()["ep"]; default: all.
        replica_group: needed if there are fewer expert-parallel than data-parallel ranks: the ranks
            with the same experts as this one, ParallelDims().group("edp").
        capacity_factor: an expert accepts ceil(capacity_factor * top_k * tokens / num_experts) of
            this rank's tokens: first choices before second ones, in the order of positions
            (Lepikhin et al. 2021, algorithm 1). This needs no communication, and dropped tokens do
            not depend on other ranks' tokens. None: no token is dropped.
        normalize_weights: whether the weights of a token's experts sum to 1, as in Mixtral;
            otherwise they are the probabilities, as in Switch.
        device, dtype: those of the router.

    Attributes:
        router: a linear layer that computes in float32 for any dtype of tokens.
        experts: this rank's experts, by their numbers in the layer.
        routing: the Routing of the last forward: tokens_per_expert, num_dropped_tokens,
            load_balancing_loss, router_z_loss and more; None before. Under a reentrant
            torch.utils.checkpoint its losses have no gradient: use use_reentrant=False.

    Raises:
        ValueError: an argument is out of range; two experts share a parameter; or, on all ranks,
            the ranks have different arguments or different router values.

    Collective: exchanges the arguments as one object.
    """

    group = property(lambda self: self.experts.group)  # whose ranks share the experts

    __deepcopy__ = __reduce_ex__ = refuse_copy

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
        register_part(self)
        resolved = resolve_group(group, mesh)
        self.router = TopKRouter(
            in_features,
            num_experts,
            top_k,
            capacity_factor=capacity_factor,
            normalize_weights=normalize_weights,
            device=device,
            dtype=dtype,
        )
        if _router is not None:
            self.router.weight, self.router.bias = copy.deepcopy((_router.weight, _router.bias))
        made = (make_expert() for _ in range(num_experts))
        self.experts = LocalExperts(made, num_experts, resolved, replica_group)
        self.routing: Routing | None = None
        alike = {
            "number of experts": num_experts,
            "arguments of the router": repr(self.router),
            "sum of the router's values, which seeds make alike": sum_of(self.router.parameters()),
        }
        check_layer(self.experts, alike)

    @classmethod
    def from_experts(
        cls, router: nn.Linear, experts: Sequence[nn.Module], top_k: int = 2, **options: Any
    ) -> Self:
        """Makes this rank's part of a layer from existing experts, the same on all ranks.

        Args:
            router: a linear layer with one logit per expert; copied.
            experts: all experts; this rank's are used without a copy.
            top_k: see the class.
            options: group, mesh, replica_group, capacity_factor and normalize_weights of the class.

        Raises ValueError, and is collective, as the class.
        """
        if router.out_features != len(experts):
            raise ValueError(
                f"the router must have one output for each of the {len(experts)} experts, got"
                f" {router.out_features} outputs"
            )
        next_expert = iter(experts).__next__
        return cls(router.in_features, next_expert, len(experts), top_k, _router=router, **options)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to the same shape and dtype.

        Each rank may have any number of tokens, including none. Autocast, errors and what is
        collective are as in LocalExperts.forward().
        """
        if x.dim() == 0 or x.shape[-1] != self.router.in_features:
            raise ValueError(
                f"tokens must have {self.router.in_features} features, got tokens {tuple(x.shape)}"
            )
        tokens = x.reshape(-1, x.shape[-1])
        routing: Routing = self.router(tokens)
        self.routing = routing
        kept = torch.where(routing.is_kept, routing.experts, self.router.num_experts)
        return self.experts(tokens, kept, routing.weights).view(x.shape)


def sum_of(params: Iterable[Tensor]) -> str:
    """The sum of all values, as text, because NaN is not equal to itself."""
    found = [param.detach() for param in params if not param.is_meta]
    return repr(float(sum(param.double().sum() for param in found)))
