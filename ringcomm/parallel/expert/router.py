"""The gate of a mixture of experts: which experts a token goes to, and with what weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Routing", "TopKRouter"]


@dataclass(frozen=True)
class Routing:
    """Where this rank's tokens go.

    Attributes:
        logits: shape (tokens, experts), in float32, or float64 of such tokens; so are all below
            that are not said to be otherwise.
        probabilities: their softmax.
        experts: shape (tokens, top_k), int64: of a token the most probable first, of equals that
            of the smaller number.
        weights: shape (tokens, top_k): of the experts' results.
        is_kept: shape (tokens, top_k), bool: False where the expert is full.
        tokens_per_expert: shape (experts,), int64: how many each gets.
        num_dropped_tokens: of no dimension, int64: the choices that are not kept. With top_k=1
            these are tokens; a token none of whose choices is kept has 0 as its result.
    """

    logits: Tensor
    probabilities: Tensor
    experts: Tensor
    weights: Tensor
    is_kept: Tensor
    tokens_per_expert: Tensor
    num_dropped_tokens: Tensor

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

    Args:
        in_features: of a token.
        num_experts: to choose from.
        top_k: experts of a token (Shazeer et al. 2017).
        capacity_factor: an expert takes ceil(capacity_factor * top_k * tokens / num_experts) of
            this rank's tokens: first choices before second ones, and in the order of positions
            (Lepikhin et al. 2021, algorithm 1). Ranks need not talk about that, and what is dropped
            does not depend on other ranks' tokens. None: no token is dropped.
        normalize_weights: whether the weights of a token's experts sum to 1, as in Mixtral;
            otherwise they are their probabilities, as in Switch.
        bias, device, dtype: as in nn.Linear.

    Raises:
        ValueError: an argument is out of range.
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
        _check(num_experts, top_k, capacity_factor, normalize_weights)
        super().__init__(in_features, num_experts, bias, device=device, dtype=dtype)
        self.num_experts, self.top_k = num_experts, top_k
        self.capacity_factor, self.normalize_weights = capacity_factor, normalize_weights

    def capacity(self, num_tokens: int) -> int | None:
        """How many of so many tokens an expert takes; None: all."""
        if self.capacity_factor is None:
            return None
        return math.ceil(self.capacity_factor * self.top_k * num_tokens / self.num_experts)

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
        capacity = self.capacity(experts.shape[0])
        if capacity is None:
            return torch.ones_like(experts, dtype=torch.bool)
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


def _check(
    num_experts: int, top_k: int, capacity_factor: float | None, normalize_weights: bool
) -> None:
    if num_experts < 1:
        raise ValueError(f"num_experts is 1 or more, got {num_experts}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"top_k={top_k} of {num_experts} experts: choose 1 to {num_experts} of them"
        )
    if capacity_factor is not None and not 0 < capacity_factor < math.inf:
        raise ValueError(
            f"capacity_factor={capacity_factor} leaves experts no tokens: give some 1.25, or None,"
            " which drops none"
        )
    if normalize_weights and top_k == 1 < num_experts:
        raise ValueError(
            "the weight of one expert, normalized, is always 1, and the router would learn nothing:"
            " normalize_weights=False, or top_k=2"
        )
