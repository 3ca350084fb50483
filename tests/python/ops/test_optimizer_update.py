"""optimizer_update_: torch's steps on one rank, whatever the threads and the parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

from ringcomm import ops

RULES: dict[str, ops.SGDStep | ops.AdamWStep] = {
    "adamw": ops.AdamWStep(lr=1e-2, weight_decay=0.1),
    "sgd": ops.SGDStep(lr=1e-2, weight_decay=0.1),
    "momentum": ops.SGDStep(lr=1e-2, momentum=0.9, dampening=0.1),
    "nesterov": ops.SGDStep(lr=1e-2, momentum=0.9, nesterov=True),
}


def gradient(step: int, num_elems: int) -> Tensor:
    return torch.randn(num_elems, generator=torch.Generator().manual_seed(step))


def new_state(rule: ops.SGDStep | ops.AdamWStep, num_elems: int) -> dict[str, Tensor]:
    return {name: torch.zeros(num_elems) for name in rule.state_names}


@pytest.mark.parametrize("name", RULES)
def test_steps_of_torch(name: str) -> None:
    for num_elems in (0, 1, 7, 33, 100_003):
        check_steps(RULES[name], num_elems)


def check_steps(rule: ops.SGDStep | ops.AdamWStep, num_elems: int) -> None:
    param = gradient(0, num_elems)
    expected = param.clone().requires_grad_()
    kind = torch.optim.AdamW if isinstance(rule, ops.AdamWStep) else torch.optim.SGD
    optimizer: torch.optim.Optimizer = kind([expected], **dataclasses.asdict(rule))
    state = new_state(rule, num_elems)
    for step in range(1, 5):
        grad = gradient(step, num_elems)
        expected.grad = grad * 0.5
        optimizer.step()
        found = ops.optimizer_update_(param, grad, state, optimizer=rule, step=step, grad_scale=0.5)
        assert found is param
        torch.testing.assert_close(param, expected.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_masters_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    rule, num_elems = RULES[name], 1001
    whole = gradient(0, num_elems)
    param, master = whole.to(dtype), whole.clone()
    state, own = new_state(rule, num_elems), new_state(rule, num_elems)
    for step in range(1, 4):
        grad = gradient(step, num_elems).to(dtype)
        ops.optimizer_update_(param, grad, {**state, "master": master}, optimizer=rule, step=step)
        ops.optimizer_update_(whole, grad.float(), own, optimizer=rule, step=step)
        assert torch.equal(master, whole)
        assert torch.equal(param, whole.to(dtype))


@pytest.mark.parametrize("name", RULES)
def test_any_threads_and_any_parts_have_the_same_bits(name: str) -> None:
    rule, num_elems = RULES[name], 100_003
    grad = gradient(1, num_elems)
    whole, state = gradient(0, num_elems), new_state(rule, num_elems)
    with oracle.num_threads(1):
        ops.optimizer_update_(whole, grad, state, optimizer=rule, step=1)
    with oracle.num_threads(3):
        other, others = gradient(0, num_elems), new_state(rule, num_elems)
        for begin in range(0, num_elems, 33_333):
            part = slice(begin, begin + 33_333)
            states = {key: value[part] for key, value in others.items()}
            ops.optimizer_update_(other[part], grad[part], states, optimizer=rule, step=1)
    assert torch.equal(whole, other)
    for key, value in state.items():
        assert torch.equal(value, others[key])


def test_it_counts_as_a_write_and_needs_no_no_grad() -> None:
    param = torch.ones(4, requires_grad=True)
    version = param._version
    ops.optimizer_update_(param, torch.ones(4), {}, optimizer=ops.SGDStep(lr=0.5), step=1)
    assert param._version == version + 1
    assert torch.equal(param.detach(), torch.full([4], 0.5))


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "size": ({"grad": torch.ones(5)}, ValueError, "gradient contiguous and of 4 elements"),
    "strides": ({"grad": torch.ones(8)[::2]}, ValueError, "gradient contiguous"),
    "dtype": ({"grad": torch.ones(4, dtype=torch.int32)}, TypeError, "gradient"),
    "missing": ({"state": {}}, ValueError, "the state of AdamWStep has"),
    "step": ({"step": 0}, ValueError, "steps from 1 on"),
    "state dtype": (
        {"state": {"exp_avg": torch.zeros(4).half(), "exp_avg_sq": torch.zeros(4)}},
        TypeError,
        "exp_avg in float32",
    ),
    "master of float32": (
        {"state": {k: torch.zeros(4) for k in ("exp_avg", "exp_avg_sq", "master")}},
        ValueError,
        "master weights are for 16-bit",
    ),
    "meta": ({"param": torch.ones(4, device="meta")}, Exception, ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_write_nothing(name: str) -> None:
    changes, error, words = WRONG[name]
    param, grad = torch.ones(4), torch.ones(4)
    state = {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
    arguments = {"param": param, "grad": grad, "state": state, "step": 1, **changes}
    if name == "meta":
        ops.optimizer_update_(**arguments, optimizer=RULES["adamw"])  # a fake: nothing happens
        return
    with pytest.raises(error, match=words):
        ops.optimizer_update_(**arguments, optimizer=RULES["adamw"])
    assert torch.equal(param, torch.ones(4))


def test_shared_memory_is_refused() -> None:
    both = torch.ones(4)
    with pytest.raises(ValueError, match="memory"):
        ops.optimizer_update_(both, both, {}, optimizer=ops.SGDStep(lr=0.5), step=1)
