"""Loss curves: a small model, its data, and what one process that sees the whole batch makes of it.

The oracle of every training system: the mean of the ranks' losses is the loss of one process, step
by step, and so are the weights at the end. SGD with momentum: Adam would not see a gradient that is
N times too large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

STEPS = 5
ROWS = 16  # of a batch, over all ranks
DIM = 8
NUM_OUTPUTS = 3


Data = Callable[[int, int, int], tuple[Tensor, Tensor]]  # as batch()


@dataclass
class Run:
    """What a training left: a loss for each step, and the weights."""

    losses: list[float]
    weights: dict[str, Tensor]


class Block(nn.Module):
    """14 hidden units: among 4 ranks no two shards need be alike."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 14)
        self.down = nn.Linear(14, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def make_model(num_blocks: int = 2) -> nn.Sequential:
    """Blocks, and a head with 3 rows: fewer than 4 ranks."""
    torch.manual_seed(1)
    return nn.Sequential(*(Block() for _ in range(num_blocks)), nn.Linear(DIM, NUM_OUTPUTS))


def batch(step: int, share: int = 0, num_shares: int = 1) -> tuple[Tensor, Tensor]:
    """A rank's share of the batch of a step; all of it by default. It can be learned."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, DIM, generator=generator)
    y = torch.sin(x[:, :NUM_OUTPUTS]) + x[:, -NUM_OUTPUTS:]
    return x.chunk(num_shares)[share], y.chunk(num_shares)[share]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(
    model: nn.Module,
    share: int = 0,
    num_shares: int = 1,
    optimizer: Any = None,
    scale: float = 1.0,
    steps: Sequence[int] = range(STEPS),
    data: Data = batch,
) -> list[float]:
    """The losses of some steps; gradients are those of the loss times `scale`."""
    optimizer = optimizer or sgd(model.parameters())
    losses = []
    for step in steps:
        x, y = data(step, share, num_shares)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        (loss * scale).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, gathered (collective); of another tensor a copy."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights, by the names that they have without a wrapper."""
    state = model.state_dict()
    return {name.removeprefix("module."): whole(value) for name, value in state.items()}


def single_process(num_blocks: int = 2, **options: Any) -> Run:
    """One process, the whole batch; options are train()'s."""
    model = make_model(num_blocks)
    losses = train(model, **options)
    assert losses[-1] < 0.9 * losses[0], "it must learn, else everything would equal everything"
    return Run(losses, weights_of(model))


def mean_losses(results: Sequence[Run]) -> list[float]:
    """Of the ranks' equal shares: the loss of the whole batch."""
    return [sum(step) / len(step) for step in zip(*(r.losses for r in results), strict=True)]


def assert_same_run(results: Sequence[Run], expected: Run, atol: float = 1e-5) -> None:
    """The curve and the weights of `expected`; all ranks' weights to the last bit the same.

    1e-5: fp32, where only the order of the sum over the batch differs.
    """
    assert mean_losses(results) == pytest.approx(expected.losses, rel=0, abs=atol)
    for result in results:
        assert_weights(result.weights, expected.weights, atol)
        assert_weights(result.weights, results[0].weights, atol=0)


def assert_weights(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=atol, msg=name)
