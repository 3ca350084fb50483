"""What programs do with a model beside its forward pass: right at stage 3, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import in_ranks
from steps import train_step
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from ringcomm.parallel import get_state_dict, zero


class Towers(nn.Module):
    """With a method beside forward, which uses weights of the model itself."""

    def __init__(self, *, is_reentrant: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 4)
        self.is_reentrant = is_reentrant

    def encode(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = checkpoint(layer, x, use_reentrant=True) if self.is_reentrant else layer(x)
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).square()


X = torch.linspace(-1, 1, 16).view(2, 8)


def made(**options: Any) -> tuple[Any, Any]:
    """A model after a step, and its optimizer."""
    model = Towers(**options)
    optimizer = zero.shard(model, torch.optim.SGD(model.parameters(), 0.1), 3)
    if not options:
        train(model, optimizer)
    return model, optimizer


def train(model: Any, optimizer: Any) -> None:
    train_step(model(X.clone().requires_grad_()).sum(), optimizer)


@in_ranks(2)
def test_methods_beside_forward(rank: int) -> None:
    """https://github.com/haotian-liu/LLaVA/issues/799"""
    alone = Towers()
    train(alone, torch.optim.SGD(alone.parameters(), 0.1))
    model, _ = made()
    with pytest.raises(RuntimeError, match=r"this Linear are sharded .*register_fsdp_forward_meth"):
        model.encode(X)
    register_fsdp_forward_method(model, "encode")
    assert_close(model.encode(X), alone.encode(X))
    assert_close(model(X), alone(X))


@in_ranks(2)
def test_what_would_have_no_effect(rank: int) -> None:
    """Weights that are set by `.data`, and weights that are passed to backward()."""

    def by_data(model: Any) -> None:
        model.head.weight.data = torch.ones(4, 8)

    def by_sharded_data(model: Any) -> None:
        model.layers[1][0].bias.data = 2 * model.layers[1][0].bias.data

    def by_vector(model: Any) -> None:
        vector_to_parameters(0 * parameters_to_vector(model.parameters()), model.parameters())

    for write in (by_data, by_sharded_data, by_vector):
        model, optimizer = made()
        wanted, _ = get_state_dict(model, full=True)
        write(model)
        for call in (lambda model=model: model(X), optimizer.step):
            with pytest.raises(RuntimeError, match=r"`\.data` of .* was set.*set_state_dict"):
                call()
        assert_close(get_state_dict(model, full=True)[0], wanted, rtol=0, atol=0)
    model, optimizer = made()
    model(X).sum().backward(inputs=list(model.parameters()))
    with pytest.raises(RuntimeError, match=r"backward\(inputs=weights\) does nothing at stage 3"):
        optimizer.step()
    train(model, optimizer)  # goes on
    assert model(X).requires_grad  # not followed by a backward pass
    train(model, optimizer)
    optimizer.step()  # without gradients: nothing, as in torch


@in_ranks(2)
def test_a_layer_in_two_reentrant_segments(rank: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/2103"""
    model, optimizer = made(is_reentrant=True)
    with pytest.raises(RuntimeError, match=r"layers\.0\.0\.weight .*reentrant.*use_reentrant=Fal"):
        train(model, optimizer)
