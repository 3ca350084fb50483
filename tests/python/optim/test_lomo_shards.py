"""LOMO and AdaLomo over WeightShards: the steps of one process, in the memory of shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_weights
from lomo_models import VOCAB, batches, train_sgd, weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel.shards import WeightShards, find_shards

LR = 0.05
ROWS = 12


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 21), nn.Linear(21, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + y


class Stack(nn.Module):
    """An embedding, layers and a tied output; some layers may be frozen, or used twice."""

    def __init__(
        self, reentrant: bool | None = None, frozen: bool = False, twice: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))  # smaller than the world
        self.reentrant, self.twice = reentrant, twice
        if frozen:
            self.layers[1].requires_grad_(False)
            self.layers[2].up.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in [*self.layers, *(self.layers[:1] if self.twice else [])]:
            if self.reentrant is None or not torch.is_grad_enabled():
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        logits = self.head(x) * self.scale
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpoint": {"reentrant": False},
    "reentrant": {"reentrant": True},
    "frozen": {"frozen": True},
    "frozen_reentrant": {"frozen": True, "reentrant": True},
    "twice": {"twice": True},
    "twice_checkpoint": {"twice": True, "reentrant": False},
}


def parts(rank: int, world_size: int) -> list[Tensor]:
    size = ROWS // world_size
    return [ids[rank * size : (rank + 1) * size] for ids in batches(3, rows=ROWS)]


def live_bytes(model: nn.Module) -> int:
    return sum(param.untyped_storage().nbytes() for param in model.parameters())


# ---- steps


def train_sharded(rank: int, case: str, kind: str, options: dict[str, Any]) -> Any:
    model = Stack(**CASES[case])
    shards = WeightShards(model)
    opt = {"lomo": Lomo, "adalomo": AdaLomo}[kind](model, LR if kind == "lomo" else 0.02, **options)
    whole = sum(param.nbytes for param in Stack().parameters())
    unit = max(sum(p.nbytes for p in u.params) for u in shards.units)
    root = sum(p.nbytes for p in shards.units[0].params)
    peak = 0

    def look(*_: Any) -> None:
        nonlocal peak
        peak = max(peak, live_bytes(model))

    for module in model.modules():
        module.register_forward_hook(look)
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(look)
    for ids in parts(rank, dist.get_world_size()):
        opt.backward(model(ids))
        if opt.options.mode == "immediate" and not CASES[case].get("frozen"):
            assert live_bytes(model) == 0  # gone with the gradients
        opt.step()
        opt.zero_grad()
    assert live_bytes(model) == 0
    assert peak <= root + 2 * unit
    assert peak < whole
    state = full_weights(shards)
    return {name: state[name] for name, _ in model.named_parameters()}, opt.grad_norm


RUNS: list[tuple[int, str, str, dict[str, Any]]] = [
    *((2, case, "lomo", {}) for case in CASES),
    (3, "frozen_reentrant", "lomo", {"weight_decay": 0.1}),
    (2, "plain", "lomo", {"loss_scale": "dynamic"}),
    (2, "twice", "lomo", {"clip_grad_norm": 0.1}),
    (2, "reentrant", "lomo", {"clip_grad_norm": 0.1, "clip_mode": "two_pass"}),
    (2, "checkpoint", "lomo", {"clip_grad_norm": 0.1, "clip_mode": "two_pass"}),
    (3, "plain", "adalomo", {}),
]


@pytest.mark.parametrize(("world_size", "case", "kind", "options"), RUNS, ids=str)
def test_steps_of_one_process(
    world_size: int, case: str, kind: str, options: dict[str, Any]
) -> None:
    """AdaLomo's means are of whole matrices, though ranks have pieces of rows."""
    results = run_ranks(world_size, train_sharded, case, kind, options)
    model, data, norms = Stack(**CASES[case]), batches(3, rows=ROWS), list[float]()
    if kind == "lomo":
        clip, decay = options.get("clip_grad_norm"), options.get("weight_decay", 0.0)
        norms = train_sgd(model, data, LR, clip_norm=clip, weight_decay=decay)
    else:
        opt = AdaLomo(model, 0.02)
        for ids in data:
            opt.backward(model(ids))
            opt.step()
    for found, norm in results:
        for name, value in weights(model).items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)
        if norms:
            assert norm == pytest.approx(norms[-1], rel=1e-5)


# ---- what is refused, and coming and going


def check_coming_and_going(rank: int) -> None:
    model = Stack()
    shards = WeightShards(model)
    with pytest.raises(ValueError, match="its shards know their group"):
        Lomo(model, LR, group=dist.group.WORLD)
    opt = Lomo(model, LR)
    model(parts(rank, 2)[0]).backward()
    opt.step()
    del opt
    trained = full_weights(shards)
    shards.close()
    assert find_shards(model.embed.weight) is None
    assert all(torch.equal(param, trained[name]) for name, param in model.named_parameters())
    alone, before = copy.deepcopy(model), weights(model)
    opt = Lomo(alone, LR, group="none")
    alone(parts(rank, 2)[0]).backward()
    opt.step()
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    assert not any(torch.equal(param, before[name]) for name, param in alone.named_parameters())


def test_shards_come_and_go() -> None:
    run_ranks(2, check_coming_and_going)
    run_ranks(1, check_coming_and_going)
