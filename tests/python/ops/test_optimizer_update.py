"""optimizer_update_: torch's steps on one rank, whatever the threads and the parts."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from test_fused_update import torch_step, ulps
from torch import Tensor
from update_runs import BF16, F16, F32, OPTIMIZERS, grad_of, start

from ringcomm import ops
from ringcomm.ops import AdamWStep, SGDStep

RULES: dict[str, SGDStep | AdamWStep] = {
    name: rule for name, rule in OPTIMIZERS.items() if not name.startswith("lomo")
}


def new_state(rule: SGDStep | AdamWStep, num_elems: int) -> dict[str, Tensor]:
    return {name: torch.zeros(num_elems) for name in rule.state_names}


@pytest.mark.parametrize("num_elems", [0, 1, 7, 33, 100_003])
@pytest.mark.parametrize("name", RULES)
def test_steps_of_torch(name: str, num_elems: int) -> None:
    """Within 2 ulp; weights of 16 bits with a master are its rounded form."""
    rule, param = RULES[name], start(num_elems, F32)
    state, halves = new_state(rule, num_elems), {dtype: param.to(dtype) for dtype in (BF16, F16)}
    masters = {d: {**new_state(rule, num_elems), "master": param.clone()} for d in halves}
    for step in range(1, 5):
        grad = grad_of(0, num_elems, BF16, step)
        expected = {name: value.clone() for name, value in state.items()}
        expected["step"], weight, before = torch.tensor(step), param.clone(), param.clone()
        torch_step(rule, weight, grad.float() * 0.5, expected)
        options: dict[str, Any] = {"optimizer": rule, "step": step, "grad_scale": 0.5}
        assert ops.optimizer_update_(param, grad, state, **options) is param
        assert ulps(param, weight, before) <= 2
        for dtype, half in halves.items():
            ops.optimizer_update_(half, grad, masters[dtype], **options)
            oracle.assert_equal(masters[dtype]["master"], param)
            oracle.assert_equal(half, param.to(dtype))


@pytest.mark.parametrize("name", ["adamw", "nesterov"])
def test_any_threads_and_any_parts_have_the_same_bits(name: str) -> None:
    rule, num_elems = RULES[name], 100_003
    grad = grad_of(0, num_elems, F32, 1)
    whole, state = start(num_elems, F32), new_state(rule, num_elems)
    other, others = start(num_elems, F32), new_state(rule, num_elems)
    with oracle.num_threads(1):
        ops.optimizer_update_(whole, grad, state, optimizer=rule, step=1)
    with oracle.num_threads(3):
        for begin in range(0, num_elems, 33_333):
            part = slice(begin, begin + 33_333)
            states = {key: value[part] for key, value in others.items()}
            ops.optimizer_update_(other[part], grad[part], states, optimizer=rule, step=1)
    for one, two in ((whole, other), *((state[key], others[key]) for key in state)):
        oracle.assert_equal(two, one)


def test_it_counts_as_a_write_and_needs_no_no_grad() -> None:
    param = torch.ones(4, requires_grad=True)
    version = param._version
    ops.optimizer_update_(param, torch.ones(4), {}, optimizer=SGDStep(lr=0.5), step=1)
    assert param._version == version + 1
    assert torch.equal(param.detach(), torch.full([4], 0.5))


ZEROS = {key: torch.zeros(4) for key in ("exp_avg", "exp_avg_sq", "master")}
STATE = {key: ZEROS[key] for key in ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"grad": torch.ones(5)}, ValueError, "gradient contiguous and of 4 elements"),
        ({"grad": torch.ones(8)[::2]}, ValueError, "gradient contiguous"),
        ({"grad": torch.ones(4, dtype=torch.int32)}, TypeError, "gradient"),
        ({"grad": STATE["exp_avg"]}, ValueError, "memory"),
        ({"state": {}}, ValueError, "the state of AdamWStep has"),
        ({"state": {**STATE, "exp_avg": torch.zeros(4).half()}}, TypeError, "exp_avg in float32"),
        ({"state": ZEROS}, ValueError, "master weights are for 16-bit"),
        ({"step": 0}, ValueError, "steps from 1 on"),
    ],
)
def test_wrong_arguments_write_nothing(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    given = {"param": torch.ones(4), "grad": torch.ones(4), "state": STATE, "step": 1, **changes}
    with pytest.raises(error, match=words):
        ops.optimizer_update_(**given, optimizer=RULES["adamw"])
    assert torch.equal(given["param"], torch.ones(4))
