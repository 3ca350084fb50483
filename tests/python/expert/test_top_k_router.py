"""TopKRouter: choices, places, losses, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_models import DIM
from torch import nn

from ringcomm.parallel.expert.layer import TopKRouter


def test_equal_probabilities_take_the_smaller_numbers() -> None:
    router = TopKRouter(DIM, 6, 2, capacity_factor=1.0)
    nn.init.zeros_(router.weight)
    routing = router(torch.randn(9, DIM))
    assert routing.experts.tolist() == [[0, 1]] * 9
    assert routing.is_kept.tolist() == [[True, True]] * 3 + [[False, False]] * 6  # by position
    assert "top_k=2, capacity_factor=1.0" in repr(router)
    assert routing.tokens_per_expert.tolist() == [3, 3, 0, 0, 0, 0]
    assert float(routing.load_balancing_loss.detach()) == pytest.approx(1)
    assert float(routing.router_z_loss.detach()) == pytest.approx(torch.tensor(6.0).log() ** 2)


def test_arguments_of_the_router() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"top_k": 5}, "top_k=5 of 4 experts: choose 1 to 4 of them"),
        ({"num_experts": 0}, "num_experts is 1 or more, got 0"),
        ({"capacity_factor": 0.0}, r"capacity_factor=0.0 leaves experts no tokens: give some 1.25"),
        ({"capacity_factor": float("nan")}, "capacity_factor=nan"),
        ({"top_k": 1, "normalize_weights": True}, "the router would learn nothing"),
    ]
    for arguments, words in wrong:
        with pytest.raises(ValueError, match=words):
            TopKRouter(**{"in_features": DIM, "num_experts": 4, **arguments})


def test_the_router_is_in_float32() -> None:
    torch.manual_seed(0)
    router = TopKRouter(DIM, 4).bfloat16()
    x = torch.randn(7, DIM).bfloat16()
    logits = x.float() @ router.weight.float().t()
    with torch.autocast("cpu", torch.bfloat16):
        routing = router(x)
    assert routing.logits.dtype == routing.weights.dtype == torch.float32
    assert torch.equal(routing.logits, logits)
    assert router.double()(x.double()).weights.dtype == torch.float64
