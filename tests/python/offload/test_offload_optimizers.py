"""AdamW and SGD in offload.Offloaded alone: torch's steps with state in host memory or in files.

test_pairs.py has them under zero.shard() at all stages.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from steps import train_step
from torch import nn
from whole_optimizers import Muon64
from zero_models import Net, make_optimizer, place_of, train, weights

from ringcomm.parallel import offload


@pytest.mark.parametrize(
    ("kind", "to", "chunk_elems"),
    [
        ("adamw", "cpu", 7),
        ("adamw", "nvme", 1 << 20),
        ("sgd", "cpu", 1 << 20),
        ("sgd", "nvme", 7),
        ("momentum", "cpu", 1),
        ("momentum", "nvme", 7),
    ],
)
def test_steps_of_torch(device: str, kind: str, to: str, chunk_elems: int, tmp_path: Path) -> None:
    ours, theirs = Net().to(device), Net().to(device)
    optimizer = make_optimizer(ours, kind, chunk_elems=chunk_elems, **place_of(to, tmp_path))
    train(ours, optimizer)
    train(theirs, make_optimizer(theirs, kind))
    for name, value in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], value, rtol=1e-5, atol=1e-6)
    assert set(optimizer.state) == set(optimizer.steps)
    optimizer.close()
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize(("kind", "to"), [("adamw", "nvme"), ("sgd", "nvme"), ("momentum", "cpu")])
def test_state_goes_to_torch_and_back(kind: str, to: str, tmp_path: Path) -> None:
    first, second, third = Net(), Net(), Net()
    optimizer = make_optimizer(first, kind, chunk_elems=50, **place_of(to, tmp_path))
    train(first, optimizer, steps=range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    theirs = make_optimizer(second, kind)
    theirs.load_state_dict(saved)
    second.load_state_dict(first.state_dict())
    other = make_optimizer(third, kind, chunk_elems=1000, to="cpu")
    other.load_state_dict(theirs.state_dict())
    third.load_state_dict(first.state_dict())
    for model, found in ((first, optimizer), (second, theirs), (third, other)):
        train(model, found, steps=range(2, 4))
    for name, value in weights(first).items():
        assert torch.equal(weights(third)[name], value)
        torch.testing.assert_close(weights(second)[name], value, rtol=1e-5, atol=1e-6)


def test_a_step_reads_and_writes_each_state_once(tmp_path: Path) -> None:
    model = nn.Linear(512, 256, bias=False)
    optimizer = offload.Offloaded(
        torch.optim.AdamW(model.parameters()), to="nvme", path=tmp_path, chunk_elems=1 << 14
    )
    store = optimizer.tier.store  # type: ignore[attr-defined]
    moved = []
    for _ in range(3):
        before = store.read_bytes, store.written_bytes
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
        moved.append((store.read_bytes - before[0], store.written_bytes - before[1]))
    state_bytes = 8 * model.weight.numel()
    assert moved == [(0, state_bytes), (state_bytes, state_bytes), (state_bytes, state_bytes)]
    # In host memory: buffers of some chunks, not the states.
    assert optimizer.tier._pool.num_bytes <= 4 * (8 << 14)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["adamw", "momentum", "muon"])
def test_16_bit_weights_have_masters(kind: str, tmp_path: Path) -> None:
    """What is written into a weight between steps replaces its own masters only."""
    torch.manual_seed(0)
    half = nn.Linear(33, 17, bias=kind != "muon").to(torch.bfloat16)
    whole = copy.deepcopy(half).float()
    if kind == "muon":
        where: dict[str, Any] = {"to": "nvme", "path": tmp_path}
        ours = offload.Offloaded(Muon64(half.parameters()), **where)
        theirs: Any = Muon64(whole.parameters())
    else:
        ours = make_optimizer(half, kind, to="nvme", path=tmp_path, chunk_elems=100)
        theirs = make_optimizer(whole, kind)
    for step in range(4):
        for low, full in zip(half.parameters(), whole.parameters(), strict=True):
            generator = torch.Generator().manual_seed(step)
            low.grad = torch.randn(low.shape, generator=generator).to(torch.bfloat16)
            full.grad = low.grad.float()
            if step == 2:
                with torch.no_grad():
                    low.view(-1)[0] = full.view(-1)[0] = 0.5
        ours.step()
        theirs.step()
    for low, full in zip(half.parameters(), whole.parameters(), strict=True):
        assert torch.equal(low, full.to(torch.bfloat16))
        assert torch.equal(ours.state[low]["master"], full.detach())


@pytest.mark.parametrize("written", [3.0, float("nan")])
def test_written_16_bit_weights_replace_their_own_masters(written: float) -> None:
    """Only theirs: the masters beside them keep what the weights' 16 bits do not show."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False).to(torch.bfloat16)
    expected = model.weight.detach().float()
    optimizer = offload.Offloaded(torch.optim.SGD(model.parameters(), 1e-3))
    for step in range(4):
        if step == 1:
            with torch.no_grad():
                model.weight[0, 1] = written
            expected[0, 1] = written
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        expected -= 1e-3
        master = optimizer.state_of(model.weight)["master"]
        torch.testing.assert_close(master, expected, equal_nan=True, rtol=1e-6, atol=1e-6)
        rounded = expected.to(torch.bfloat16)
        torch.testing.assert_close(model.weight.detach(), rounded, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"amsgrad": True}, torch.float32),
        ({"maximize": True}, torch.float32),
        ({"fused": True}, torch.float32),
        ({"lr": torch.tensor(0.01)}, torch.float32),
        ({}, torch.float64),
    ],
)
def test_options_that_the_kernels_lack(options: dict[str, Any], dtype: torch.dtype) -> None:
    models = [nn.Linear(9, 5).to(dtype) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    own = offload.Offloaded(torch.optim.AdamW(models[0].parameters(), **options), chunk_elems=7)
    expected = torch.optim.AdamW(models[1].parameters(), **options)
    for step in range(4):
        for model, optimizer in zip(models, (own, expected), strict=True):
            x = torch.randn(3, 9, dtype=dtype, generator=torch.Generator().manual_seed(step))
            train_step(model(x).square().sum(), optimizer)
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_errors(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"must have no path|needs path="):
        offload.Offloaded(torch.optim.AdamW(model.parameters()), to="nvme")
    with pytest.raises(ValueError, match=r"must have no path|needs path="):
        offload.Offloaded(torch.optim.AdamW(model.parameters()), path=tmp_path)
    with pytest.raises(ValueError, match='"cpu" or "nvme"'):
        offload.Offloaded(torch.optim.AdamW(model.parameters()), to="disk")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk_elems"):
        offload.Offloaded(torch.optim.SGD(model.parameters()), chunk_elems=0)
    with pytest.raises(ValueError, match="not contiguous"):
        offload.Offloaded(torch.optim.AdamW([torch.zeros(3, 2).t().requires_grad_()]))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        offload.Offloaded(torch.optim.AdamW(model.parameters()), to="nvme", path=tmp_path / "file")


def test_a_momentum_that_a_scheduler_sets_to_0_and_back() -> None:
    """The buffer stays meanwhile, as torch's does."""
    ours, theirs = Net(), Net()
    optimizers = [offload.Offloaded(make_sgd(ours)), make_sgd(theirs)]
    for step, momentum in enumerate((0.9, 0.0, 0.9)):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            for group in optimizer.param_groups:
                group["momentum"] = momentum
            train(model, optimizer, steps=range(step, step + 1))
    for name, value in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], value, rtol=1e-5, atol=1e-6)


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def test_copies_are_refused() -> None:
    optimizer = offload.Offloaded(make_sgd(Net()))
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(RuntimeError, match="an offloaded optimizer cannot be copied"):
            copied(optimizer)


class Moments(NamedTuple):
    """Of a gradient."""

    mean: torch.Tensor
    square: torch.Tensor


class Named(torch.optim.SGD):
    """Its states are named tuples."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            old = self.state[param].get("moments", Moments(0 * param, 0 * param))
            new = Moments(old.mean + param.grad, old.square + param.grad**2)
            self.state[param]["moments"] = new
            param.sub_(0.1 * new.mean / (new.square + 1))


def test_states_in_named_tuples(tmp_path: Path) -> None:
    ours, theirs = Net(), Net()
    inner, alone = Named(ours.parameters()), Named(theirs.parameters())
    optimizer = offload.Offloaded(inner, elementwise=(Named,), **place_of("nvme", tmp_path))
    with torch.no_grad():
        for model in (ours, theirs):
            for param in model.parameters():
                param.grad = param.clone()
        for _ in range(3):
            optimizer.step()
            alone.step()
    for name, value in weights(theirs).items():
        assert torch.equal(weights(ours)[name], value)
    assert isinstance(optimizer.state[ours.first.weight]["moments"], Moments)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_that_is_cast_after_steps_is_refused(kind: Any, dtype: torch.dtype) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/762: masters and weights that differ."""
    model = nn.Linear(3, 2).bfloat16()
    optimizer = offload.Offloaded(kind(model.parameters(), 0.1))
    train_step(model(torch.ones(4, 3, dtype=torch.bfloat16)).sum(), optimizer)
    model.to(dtype)
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=f"was cast to {dtype} after steps"):
        train_step(model(torch.ones(4, 3, dtype=dtype)).sum(), optimizer)
    assert torch.equal(model.weight, before)
    model.bfloat16()
    train_step(model(torch.ones(4, 3, dtype=torch.bfloat16)).sum(), optimizer)


def test_a_gradient_with_gaps() -> None:
    """https://github.com/pytorch/ao/issues/1209"""
    weights = [nn.Parameter(torch.ones(6)) for _ in range(2)]
    own = offload.Offloaded(torch.optim.SGD(weights[:1], 0.1), chunk_elems=4)
    optimizers = (own, torch.optim.SGD(weights[1:], 0.1))
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = torch.arange(12.0)[::2]
        optimizer.step()
    assert torch.equal(*weights)
