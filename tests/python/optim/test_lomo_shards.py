"""WeightShards: the steps of one process, in 1/N of the weights, for 3 (N-1)/N of their bytes."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_weights
from lomo_models import VOCAB, batches, train_sgd, weights
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ringcomm
from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import WeightShards, find_shards

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


def train_by_hand(rank: int, case: str) -> dict[str, Tensor]:
    """SGD on the pieces, by the methods that optimizers use."""
    model = Stack(**CASES[case])
    if rank != 0:
        nn.init.zeros_(model.head.weight)  # rank 0's count
    shards = WeightShards(model)
    assert live_bytes(model) == 0
    for ids in parts(rank, dist.get_world_size()):
        model(ids).backward()
        for param in model.parameters():
            if param.grad is not None:
                grad = shards.reduce_scatter(param, param.grad)
                shards.shard_of(param).add_(grad, alpha=-LR)
                param.grad = None
        shards.release_all()
        assert live_bytes(model) == 0
    state = full_weights(shards)
    shards.close()
    assert all(torch.equal(param, state[name]) for name, param in model.named_parameters())
    return {name: state[name] for name, _ in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("world_size", "backend"), [(2, "ringcomm"), (3, "ringcomm"), (2, "gloo")])
def test_steps_are_those_of_one_process(case: str, world_size: int, backend: str) -> None:
    results = run_ranks(world_size, train_by_hand, case, backend=backend)
    sgd = Stack(**CASES[case])
    train_sgd(sgd, batches(3, rows=ROWS), LR)
    for found in results:
        for name, value in weights(sgd).items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
            assert torch.equal(found[name], results[0][name])


# ---- with optimizers


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
        if opt.options.mode == "two_pass":
            opt.backward(model(ids))
        else:
            opt.scale(model(ids)).backward()
        if opt.options.mode == "immediate" and not CASES[case].get("frozen"):
            assert live_bytes(model) == 0  # gone with the gradients
        opt.step()
        opt.zero_grad()
    assert live_bytes(model) == 0
    assert peak <= root + 2 * unit
    assert peak < whole
    state = full_weights(shards)
    return {name: state[name] for name, _ in model.named_parameters()}, opt.grad_norm


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_lomo_updates_the_owners_pieces(case: str, world_size: int) -> None:
    results = run_ranks(world_size, train_sharded, case, "lomo", {})
    sgd = Stack(**CASES[case])
    train_sgd(sgd, batches(3, rows=ROWS), LR)
    for found, _ in results:
        for name, value in weights(sgd).items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad_norm": 0.1},
        {"clip_grad_norm": 0.1, "clip_mode": "two_pass"},
        {"loss_scale": "dynamic"},
        {"accumulation_steps": 1, "weight_decay": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("case", ["plain", "reentrant", "checkpoint"])
def test_lomo_with_a_look_ahead(case: str, options: dict[str, Any]) -> None:
    results = run_ranks(2, train_sharded, case, "lomo", options)
    sgd = Stack(**CASES[case])
    norms = train_sgd(
        sgd,
        batches(3, rows=ROWS),
        LR,
        clip_norm=options.get("clip_grad_norm"),
        weight_decay=options.get("weight_decay", 0.0),
    )
    for found, norm in results:
        for name, value in weights(sgd).items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
        if norms:
            assert norm == pytest.approx(norms[-1], rel=1e-5)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_adalomos_means_are_of_whole_matrices(world_size: int) -> None:
    results = run_ranks(world_size, train_sharded, "plain", "adalomo", {})
    model = Stack()
    opt = AdaLomo(model, 0.02)
    for ids in batches(3, rows=ROWS):
        model(ids).backward()
        opt.step()
    for found, _ in results:
        for name, value in weights(model).items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)


# ---- bytes


def count_bytes(rank: int) -> tuple[int, int]:
    """What a step sends, and the elements of a whole copy, each piece as long as the longest."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False)
    )
    shards = WeightShards(model, units=[model[0], model[2]])
    opt = Lomo(model, LR)
    before = _sent_bytes()
    model(torch.randn(5, 32)).square().sum().backward()
    opt.step()
    assert find_shards(model[0].weight) is shards
    return _sent_bytes() - before, sum(param.nbytes for param in model.parameters())


def _sent_bytes() -> int:
    """Of all but all_reduce, by which ranks agree on the weights that have gradients."""
    found = ringcomm.stats().items()
    return sum(entry["sent_bytes"] for (name, _), entry in found if name != "all_reduce")


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_moves_three_parts(world_size: int) -> None:
    for sent, whole in run_ranks(world_size, count_bytes):
        assert sent == 3 * (world_size - 1) * whole // world_size


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


def check_nothing_stays(rank: int) -> None:
    model = Stack()
    WeightShards(model)
    opt = Lomo(model, LR)  # finds the shards, which nobody but the model keeps
    model(parts(rank, 2)[0]).backward()
    opt.step()
    params = [weakref.ref(param) for param in model.parameters()]
    del opt, model
    gc.collect()
    assert all(ref() is None for ref in params)


def test_shards_go_with_their_model() -> None:
    run_ranks(2, check_nothing_stays)
