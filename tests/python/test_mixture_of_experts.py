"""Experts shared among ranks: the training of one process that has them all, and exact bytes."""

from __future__ import annotations

import pytest
import torch
from moe_models import Case, expert_net, train, train_alone
from ranks import run_ranks
from torch import Tensor

from ringcomm.parallel import expert

CASES = [
    Case(4, 2),
    Case(5, 2, normalize_weights=True),
    Case(2, 1),  # fewer experts than ranks
    Case(5, 3, capacity_factor=0.7),
    Case(4, 1, capacity_factor=1.0),
    Case(3, 3),  # dense
    Case(1, 1),
]


def train_ranks(
    rank: int, case: Case, sizes: list[int]
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    net = expert_net(case)
    losses = train(net, rank, sizes)
    return losses, net.state_dict(), expert.full_state_dict(net)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("sizes", [[6], [5, 7], [4, 0, 3], [1, 6, 2, 5]], ids=str)
def test_the_training_of_one_process(case: Case, sizes: list[int]) -> None:
    losses, weights = train_alone(case, sizes)
    results = run_ranks(len(sizes), train_ranks, case, sizes)
    for rank, (found, mine, whole) in enumerate(results):
        expected = [of_step[rank] for of_step in losses]
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
        assert sorted(whole) == sorted(weights)
        for name, value in weights.items():
            torch.testing.assert_close(whole[name], value, rtol=0, atol=2e-6)
        assert all(torch.equal(whole[name], value) for name, value in mine.items())
