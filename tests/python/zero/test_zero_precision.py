"""zero.shard(): 16-bit weights accumulate and reduce in float32; offload under a loss scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from full_states import full_state
from ranks import run_ranks
from torch import Tensor, nn
from zero_models import weights

from ringcomm.parallel import offload, zero


def accumulate(rank: int, stage: int, reduce_dtype: torch.dtype | None, how: str) -> list[float]:
    """Gradients of 256, and then eight of 1, which 16 bits round off; the ranks' differ by 1."""
    model = nn.Linear(1, 4, bias=False)
    options: dict[str, Any] = {"reduce_dtype": reduce_dtype}
    optimizer: Any = torch.optim.SGD(model.parameters(), 1.0)
    if how == "param_dtype":
        options["param_dtype"] = torch.bfloat16
    else:
        model.to(torch.bfloat16)
    if how == "offload":
        optimizer = offload.SGD(model.parameters(), 1.0)
        options["offload_weights"] = stage == 3
    with torch.no_grad():
        model.weight.zero_()
    sharded = zero.shard(model, optimizer, stage, **options)
    for value in [256.0 + 2 * rank, *[1.0] * 8]:
        model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    sharded.step()
    if how == "param_dtype" and stage == 3:
        return [float(value) for value in -weights(model)["weight"].flatten()]
    state = full_state(sharded)["state"]["weight"]
    return [float(value) for value in -state["master"].flatten()]


@pytest.mark.parametrize(
    ("stage", "how"),
    [(1, "param_dtype"), (3, "param_dtype"), (2, "own"), (2, "offload"), (3, "offload")],
)
def test_micro_batches_add_up_in_float32(stage: int, how: str) -> None:
    for found in run_ranks(2, accumulate, stage, None, how):
        assert found == [257.0 + 8] * 4
    # The control: in 16 bits, as asked for, something is lost.
    for found in run_ranks(2, accumulate, stage, torch.bfloat16, how):
        assert max(found) < 265


def tiny_gradients(rank: int, stage: int, how: str) -> tuple[Tensor, Tensor]:
    """1e-8 and 1e-7: of float16 the first is 0, the second has two bits."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    options: dict[str, Any] = {"loss_scale": 2.0**14}
    if how == "offload_weights":
        model.half()
        options["offload_weights"] = True
    else:
        options["param_dtype"] = torch.float16
    own = offload.AdamW(model.parameters(), 0.01, eps=1e-12, weight_decay=0.0)
    if how == "reduced":
        options["reduce_dtype"] = torch.float16
    sharded = zero.shard(model, own, stage, **options)
    for _ in range(2):
        # The loss is of float32, so that the scale comes before the gradients get 16 bits.
        x = torch.tensor([[1e-4, 1e-3]], dtype=torch.float16)
        sharded.scale(model(x).float().sum() * 1e-4).backward()
        sharded.step()
        sharded.zero_grad()
    state = full_state(sharded)["state"]["weight"]
    return state["exp_avg"].flatten(), state["master"].flatten()


@pytest.mark.parametrize(("stage", "how"), [(1, "plain"), (2, "reduced"), (3, "offload_weights")])
def test_offloaded_states_see_gradients_of_float16(stage: int, how: str) -> None:
    alone = nn.Linear(2, 1, bias=False)
    nn.init.ones_(alone.weight)
    optimizer = torch.optim.AdamW(alone.parameters(), 0.01, eps=1e-12, weight_decay=0.0)
    for _ in range(2):
        alone.weight.grad = torch.tensor([[1e-8, 1e-7]])
        optimizer.step()
    expected = optimizer.state[alone.weight]["exp_avg"].flatten()
    for exp_avg, master in run_ranks(2, tiny_gradients, stage, how):
        torch.testing.assert_close(exp_avg, expected, rtol=5e-3, atol=0)
        torch.testing.assert_close(master, alone.weight.detach().flatten(), rtol=0, atol=1e-5)
