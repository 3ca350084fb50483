"""Mixtures of experts in one process, and a net around a layer: what ranks must agree with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rows import Row, Training, train
from torch import Tensor, nn

from ringcomm.nn import MixtureOfExperts

IN, DIM, HIDDEN, OUT = 5, 12, 20, 3
STEPS, LR = 4, 0.2


class Case(NamedTuple):
    """A layer."""

    num_experts: int
    top_k: int
    capacity_factor: float | None = None
    normalize_weights: bool = False


def make_expert() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM))


def choose(probabilities: list[list[float]], case: Case) -> tuple[list[list[int]], int]:
    """The kept experts of each token, one token after the other, and how many were dropped."""
    ranked = [
        sorted(range(case.num_experts), key=[-value for value in row].__getitem__)[: case.top_k]
        for row in probabilities
    ]
    places = [math.inf] * case.num_experts
    if case.capacity_factor is not None:
        num = case.capacity_factor * case.top_k * len(ranked) / case.num_experts
        places = [math.ceil(num)] * case.num_experts
    kept: list[list[int]] = [[] for _ in ranked]
    num_dropped = 0
    for choice in range(case.top_k):
        for token, experts in enumerate(ranked):
            if places[experts[choice]] > 0:
                places[experts[choice]] -= 1
                kept[token].append(experts[choice])
            else:
                num_dropped += 1
    return kept, num_dropped


class DenseMixture(nn.Module):
    """All experts over all tokens, summed with weights that are mostly 0."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.router = nn.Linear(DIM, case.num_experts, bias=False)
        self.experts = nn.ModuleList(make_expert() for _ in range(case.num_experts))
        self.balance = self.z = torch.zeros(())
        self.num_dropped = 0

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, DIM)
        logits = self.router(tokens)
        probabilities = logits.softmax(-1)
        kept, self.num_dropped = choose(probabilities.tolist(), self.case)
        chosen, _ = choose(probabilities.tolist(), self.case._replace(capacity_factor=None))
        mask = torch.zeros_like(logits)
        full = torch.zeros_like(logits)
        for token, (some, every) in enumerate(zip(kept, chosen, strict=True)):
            mask[token, some] = 1
            full[token, every] = 1
        weights = probabilities * full
        if self.case.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * mask
        num = max(len(tokens), 1)
        shares = full.sum(0) / (num * self.case.top_k)
        self.balance = self.case.num_experts * (shares * probabilities.sum(0) / num).sum()
        self.z = logits.exp().sum(-1).log().pow(2).sum() / num
        out = torch.zeros_like(tokens)
        for idx, expert_of in enumerate(self.experts):
            out = out + weights[:, idx, None] * expert_of(tokens)
        return out.view(x.shape)


class Net(nn.Module):
    def __init__(self, make_layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(IN, DIM)
        self.moe: Any = make_layer()
        self.last = nn.Linear(DIM, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        out: Tensor = self.last(x + self.moe(x))
        return out


def dense_net(case: Case) -> Net:
    return Net(lambda: DenseMixture(case))


def expert_net(case: Case, **options: Any) -> Net:
    return Net(
        lambda: MixtureOfExperts(
            *(DIM, make_expert, case.num_experts, case.top_k),
            capacity_factor=case.capacity_factor,
            normalize_weights=case.normalize_weights,
            **options,
        )
    )


def batch(step: int, rank: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(
        num_tokens, 2, IN, generator=torch.Generator().manual_seed(100 * step + rank + 1)
    )
    return x, x[..., :OUT].sin()


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A sum, so that no tokens are no trouble; and the router's losses."""
    moe: Any = getattr(net, "module", net).moe
    param = next(net.parameters())
    x, y = x.to(param.device, param.dtype), y.to(param.device)
    loss = (net(x) - y).square().sum() / 16
    balance, z = (
        (moe.balance, moe.z)
        if isinstance(moe, DenseMixture)
        else (moe.routing.load_balancing_loss, moe.routing.router_z_loss)
    )
    total: Tensor = loss + 0.05 * balance + 0.01 * z
    return total


def groups_of(num_shards: int) -> dict[str, Any]:
    """Of a MixtureOfExperts over that many ranks; others have replicas. Collective."""
    num_replicas = dist.get_world_size() // num_shards
    if num_replicas == 1:
        return {}
    names = ("replica", "expert")
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", (num_replicas, num_shards), mesh_dim_names=names
    )
    return {"group": mesh["expert"].get_group(), "replica_group": mesh["replica"].get_group()}


def on_ranks(case: Case, num_shards: int, prepare: Any, made: Training) -> Any:
    """The net of a row on a mesh of ranks, or by the mesh of parallelize()."""
    groups = groups_of(num_shards)
    if made.dims is not None:
        groups = {"group": made.dims.group("ep"), "replica_group": made.dims.group("edp")}
    return prepare(expert_net(case, **groups))


def row_of(
    case: Case,
    num_shards: int,
    program: Callable[[Training], Any] = train,
    *,
    sizes: Sequence[int] = (2, 3, 1, 2),
    prepare: Callable[[Any], Any] = lambda net: net,
    **more: Any,
) -> Row:
    """Experts over ranks with so many tokens, and in one process the dense mixture."""
    return Row(
        program,
        lambda: prepare(dense_net(case)),
        num_ranks=len(sizes),
        **{
            "on_ranks": partial(on_ranks, case, num_shards, prepare),
            "loss": loss_of,
            "batch": lambda step, rank, _: batch(step, rank, sizes[rank]),
            "atol": 5e-6,
            **more,
        },
    )
