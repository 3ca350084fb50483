"""reduce_scatter_update_all_gather_ and optimizer_update_: bits, torch.optim's steps, bad calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks, run_ranks
from torch import Tensor, nn
from update_runs import BF16, F16, F32, OPTIMIZERS, Run, average, check_bits, grad_of, sizes, start

import ringcomm
from ringcomm import MismatchError, Options, ops
from ringcomm.ops import AdamWStep, LomoStep, SGDStep

NUM_STEPS = 5
RULES = {name: rule for name, rule in OPTIMIZERS.items() if not name.startswith("lomo")}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_same_bits_as_the_parts_and_on_all_ranks(world_size: int) -> None:
    run_ranks(world_size, check_bits, sorted(OPTIMIZERS)[world_size - 1 :: 4])


def test_same_bits_on_all_ranks_of_a_ring() -> None:
    ring = Options(algorithm="ring")
    run_ranks(3, check_bits, ["adamw"], "cpu", False, pg_options=ring)


def torch_step(optimizer: Any, weight: Tensor, grad: Tensor, state: dict[str, Tensor]) -> None:
    """One step of torch's own in fp32; `state` has its number, and is updated too."""
    step = int(state.pop("step"))
    numbers = dataclasses.asdict(optimizer)
    if isinstance(optimizer, LomoStep):
        limit = numbers["clip_value"] or torch.inf
        weight.mul_(1 - optimizer.lr * optimizer.weight_decay)
        weight.sub_(grad.clamp(-limit, limit), alpha=optimizer.lr)
        return
    param = nn.Parameter(weight)
    param.grad = grad
    if isinstance(optimizer, SGDStep):
        reference: torch.optim.Optimizer = torch.optim.SGD([param], **numbers)
        if step > 1:
            reference.state[param].update(state)
    else:  # the default takes MKL's square root, which is an ulp off itself
        reference = torch.optim.AdamW([param], **numbers, fused=True)
        reference.state[param].update(state, step=torch.tensor(float(step - 1)))
    reference.step()
    state.update({key: reference.state[param][key] for key in optimizer.state_names})


def ulps(actual: Tensor, expected: Tensor, before: Tensor) -> float:
    """The largest difference, in units in the last place of what was there before or is after."""
    if actual.numel() == 0:
        return 0.0
    size = torch.maximum(expected.abs(), before.abs()).clamp(min=1e-30)
    ulp = torch.nextafter(size, torch.full_like(size, torch.inf)) - size
    return float(((actual.double() - expected.double()).abs() / ulp.double()).max())


Case = tuple[str, torch.dtype, bool]
CASES: list[Case] = [(name, F32, False) for name in sorted(OPTIMIZERS)]
CASES += [(n, d, m) for n in ("momentum", "adamw") for d in (BF16, F16) for m in (False, True)]
CASES += [("lomo", BF16, False), ("lomo", F16, False)]


def shards_of_steps(rank: int, case: Case) -> list[list[dict[str, Tensor]]]:
    """For each size: this rank's shard of everything before the first step and after each."""
    (name, dtype, master), found = case, []
    for num_elems in sizes(dist.get_world_size()):
        run = Run(OPTIMIZERS[name], num_elems, dtype, master=master)
        steps = []
        for step in range(NUM_STEPS + 1):
            if step > 0:
                run.step(step)
            shards = {"param": run.param[run.shard], **run.state}
            steps.append({key: value.clone() for key, value in shards.items()})
        found.append(steps)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_of_torch_optim(case: Case) -> None:
    """Every step by torch.optim from where we were before it; 2 ulp apart at most."""
    (name, dtype, master), world_size = case, 3
    optimizer = OPTIMIZERS[name]
    by_rank = run_ranks(world_size, shards_of_steps, case)
    for num_elems, *ranks in zip(sizes(world_size), *by_rank, strict=True):
        steps = [
            {key: torch.cat([shards[key] for shards in parts]) for key in parts[0]}
            for parts in zip(*ranks, strict=True)
        ]
        oracle.assert_equal(steps[0]["param"], start(num_elems, dtype))
        weight_key = "master" if master else "param"
        for step in range(1, NUM_STEPS + 1):
            before, after = steps[step - 1], steps[step]
            state = {key: before[key].clone() for key in optimizer.state_names}
            state["step"] = torch.tensor(step)
            weight = before[weight_key].float().clone()
            grad = average(world_size, num_elems, dtype, step).float()
            torch_step(optimizer, weight, grad, state)
            for key in optimizer.state_names:
                assert ulps(after[key], state[key], before[key]) <= 2
            if dtype == F32 or master:
                assert ulps(after[weight_key], weight, before[weight_key]) <= 2
                oracle.assert_equal(after["param"], after[weight_key].to(dtype))
            else:  # near the middle of two 16-bit numbers, either
                rtol = 2**-7 if dtype == BF16 else 2**-10
                torch.testing.assert_close(after["param"], weight.to(dtype), rtol=rtol, atol=1e-6)


def new_state(rule: Any, num_elems: int) -> dict[str, Tensor]:
    return {name: torch.zeros(num_elems) for name in rule.state_names}


@pytest.mark.parametrize("name", RULES)
def test_optimizer_update(name: str) -> None:
    """The same without a group; weights of 16 bits with a master are its rounded form."""
    for num_elems in (0, 1, 7, 33, 10_003):
        rule, param = RULES[name], start(num_elems, F32)
        state, halves = new_state(rule, num_elems), {d: param.to(d) for d in (BF16, F16)}
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


@in_ranks(2)
def test_scale_bytes_and_what_is_not_finite(rank: int) -> None:
    """Infinities and NaN go into parameters and state, and nowhere else."""
    plain, scaled = (Run(OPTIMIZERS["adamw"], 1001, F32) for _ in range(2))
    plain.step(1)
    scaled.step(1, average=False, grad_scale=0.5)  # exact in powers of two
    oracle.assert_equal(scaled.param, plain.param)
    assert not torch.equal(scaled.param, Run(OPTIMIZERS["adamw"], 1001, F32).param)
    before = ringcomm.stats()["reduce_scatter_update_all_gather", "direct"]
    Run(OPTIMIZERS["adamw"], 1000, F32, grad_dtype=BF16).step(1)
    counts = ringcomm.stats()["reduce_scatter_update_all_gather", "direct"]
    assert counts["num_calls"] - before["num_calls"] == 1
    assert counts["sent_bytes"] - before["sent_bytes"] == 500 * 2 + 500 * 4
    for name, optimizer in OPTIMIZERS.items():
        run, grad = Run(optimizer, 100, F32), torch.zeros(100)
        grad[3 + 50 * rank] = (float("nan"), float("inf"))[rank]
        call = ops.reduce_scatter_update_all_gather_
        call(run.param, grad, run.state, optimizer=optimizer, step=1)
        wrong = (~run.param.isfinite()).nonzero().flatten().tolist()
        assert wrong == ([3] if name == "lomo_clipped" else [3, 53])


@in_ranks(2, timeout_s=120)
def test_operator(rank: int) -> None:
    op = torch.ops.ringcomm.reduce_scatter_update_all_gather_.default
    group_name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    common = {"nesterov": False, "step": 2, "average": True, "grad_scale": 1.0}
    param, grad, first, second = torch.rand(4, 4).unbind()
    shard = [t[:2].clone() for t in (first, second, first)]
    half = param.clone().bfloat16()
    for args, name, own in (
        ((param.clone(), grad.clone(), [], None), "sgd", [0.0, 0.0]),
        ((half, grad.clone(), shard[:1], shard[1]), "sgd", [0.9, 0.0]),
        ((half, grad.clone(), shard[:2], shard[2]), "adamw", [0.9, 0.9, 1e-8]),
        ((param.clone(), grad.clone(), [], None), "lomo", [0.0]),
    ):
        kwargs = {"optimizer": name, "numbers": [0.1, 0.1, *own], **common}
        torch.library.opcheck(op, (*args, group_name), kwargs)
    parameter = nn.Parameter(param.clone())
    with pytest.raises(ValueError, match="requires grad"):
        op(parameter, grad, [], None, group_name, optimizer="lomo", numbers=[0.1, 0, 0], **common)
    for wrong, words in (
        ({"optimizer": "adagrad", "numbers": [0.1, 0.1]}, "no optimizer adagrad with 2 numbers"),
        ({"optimizer": "sgd", "numbers": [0.1, 0.1]}, "no optimizer sgd with 2 numbers"),
        ({"optimizer": "sgd", "numbers": [0.1, 0.1, 0.9, 0.0]}, "sgd needs 1 states, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            op(param, grad, [], None, group_name, **wrong, **common)
    state, adam = new_state(OPTIMIZERS["adamw"], 2), OPTIMIZERS["adamw"]
    versions = parameter._version, state["exp_avg"]._version
    ops.reduce_scatter_update_all_gather_(parameter, grad, state, optimizer=adam, step=1)
    assert parameter._version > versions[0]
    assert state["exp_avg"]._version > versions[1]


@in_ranks(2, timeout_s=120)
def test_compile(rank: int) -> None:
    for name in ("momentum", "lomo"):
        optimizer = OPTIMIZERS[name]
        eager, compiled = Run(optimizer, 11, F32), Run(optimizer, 11, F32)

        def step(param: Tensor, grad: Tensor, state: Any, num: int, rule: Any = optimizer) -> Any:
            call = ops.reduce_scatter_update_all_gather_
            return call(param, grad * 2, state, optimizer=rule, step=num) + 1

        fast = torch.compile(step, fullgraph=True, backend="aot_eager")
        for num in (1, 2):
            expected = step(eager.param, eager.grad(num), eager.state, num)
            actual = fast(compiled.param, eager.grad(num), compiled.state, num)
            oracle.assert_equal(actual, expected)
            oracle.assert_equal(compiled.param, eager.param)


def test_shards_cover_the_buffer() -> None:
    for num_elems in (0, 1, 5, 12, 1001):
        for world_size in (1, 2, 3, 7):
            ends = [ops.shard_range(num_elems, world_size, rank) for rank in range(world_size)]
            assert [begin for begin, _ in ends] == [0, *(end for _, end in ends[:-1])]
            assert ends[-1][1] == num_elems
            lengths = [end - begin for begin, end in ends]
            assert max(lengths) - min(lengths) <= 1
            assert lengths == sorted(lengths, reverse=True)
    for wrong in ((5, 2, 2), (5, 2, -1), (-1, 2, 0)):
        with pytest.raises(ValueError, match="no shard"):
            ops.shard_range(*wrong)


# In place of the argument of a right call: a gradient, a state, a step or another optimizer.
WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "lr must be", {"optimizer": SGDStep(lr=-1)}),
    (ValueError, "lr must be", {"optimizer": SGDStep(lr=float("nan"))}),
    (ValueError, "momentum must be", {"optimizer": SGDStep(lr=1, momentum=-0.1)}),
    (ValueError, "dampening", {"optimizer": SGDStep(lr=1, dampening=float("inf"))}),
    (ValueError, "nesterov needs", {"optimizer": SGDStep(lr=1, nesterov=True)}),
    (ValueError, "betas must be", {"optimizer": AdamWStep(betas=(1.0, 0.9))}),
    (ValueError, "betas must be", {"optimizer": AdamWStep(betas=(0.9, -1))}),
    (ValueError, "eps must be", {"optimizer": AdamWStep(eps=-1e-8)}),
    (ValueError, "weight_decay must be", {"optimizer": AdamWStep(weight_decay=float("inf"))}),
    (ValueError, "grad_scale must be finite", {"grad_scale": float("nan")}),
    (ValueError, "gradient contiguous", {"grad": torch.ones(20)[::2]}),
    (ValueError, "parameters contiguous", {"param": torch.ones(20)[::2]}),
    (ValueError, "parameters' shape|of 10 elements", {"grad": torch.ones(9)}),
    (TypeError, "gradient in float32", {"grad": torch.ones(10).int()}),
    (TypeError, "parameters in float32", {"param": torch.ones(10).double()}),
    (ValueError, "state of AdamWStep must have .*exp_avg", {"state": {}}),
    (ValueError, "must have .*momentum_buffer", {"optimizer": OPTIMIZERS["momentum"], "state": {}}),
    (ValueError, "step must be 1 or more", {"step": 0}),
]


def check_refused(call: Any, num_elems: int) -> None:
    param, grad = torch.ones(10), torch.ones(10)
    state = {key: torch.zeros(num_elems) for key in ("exp_avg", "exp_avg_sq")}
    of_state: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "memory", {"grad": param}),
        (ValueError, "memory", {"state": {**state, "exp_avg": state["exp_avg_sq"]}}),
        (TypeError, "exp_avg .*loat", {"state": {**state, "exp_avg": state["exp_avg"].half()}}),
        (ValueError, "rank's shard|elements", {"state": {**state, "exp_avg": torch.ones(11)}}),
        (ValueError, "for 16-bit", {"state": {**state, "master": torch.zeros(num_elems)}}),
    ]
    for error, words, changes in (*WRONG, *of_state):
        args = {"param": param, "grad": grad, "state": state, "optimizer": AdamWStep(), "step": 1}
        if "optimizer" in changes and "state" not in changes:
            names = changes["optimizer"].state_names
            args["state"] = {key: torch.zeros(num_elems) for key in names}
        with pytest.raises(error, match=words):
            call(**{**args, **changes})
        assert (param == 1).all()
    call(**{**args, "optimizer": OPTIMIZERS["adamw"]})
    assert (param != 1).all()


def test_wrong_arguments_without_a_group() -> None:
    check_refused(ops.optimizer_update_, 10)
    param = torch.ones(4, requires_grad=True)
    ops.optimizer_update_(param, torch.ones(4), {}, optimizer=SGDStep(lr=0.5), step=1)
    assert param._version == 1


@in_ranks(2)
def test_wrong_arguments(rank: int) -> None:
    """Each is refused before anything is exchanged, and the group works on."""
    call, ones = ops.reduce_scatter_update_all_gather_, torch.ones(10)
    check_refused(call, 5)
    for optimizer, state, words in (
        (LomoStep(lr=1), {"master": torch.ones(5)}, "no 'master'"),
        (LomoStep(lr=1, clip_value=0.0), {}, "clip_value must be positive"),
        (LomoStep(lr=1, weight_decay=-1), {}, "weight_decay must be"),
    ):
        with pytest.raises(ValueError, match=words):
            call(ones, ones.clone(), state, optimizer=optimizer, step=1)
    sgd = OPTIMIZERS["momentum"]
    state = new_state(sgd, 5) | {"master": torch.ones(5)}
    with pytest.raises(ValueError, match="master"):
        call(ones, ones.clone(), state, optimizer=sgd, step=1)


@in_ranks(2, backend="gloo", fresh=True)
def test_over_gloo(rank: int) -> None:
    with pytest.raises(ValueError, match=r"backend ringcomm .* gloo"):
        ops.reduce_scatter_update_all_gather_(
            torch.ones(2), torch.ones(2), {}, optimizer=SGDStep(lr=1), step=1
        )


MISMATCHES: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"optimizer": SGDStep(lr=0.25)}, {"optimizer": SGDStep(lr=0.5)}, ["lr=0.25", "lr=0.5"]),
    ({"optimizer": SGDStep(lr=1)}, {"optimizer": LomoStep(lr=1)}, ["sgd", "lomo"]),
    ({"step": 3}, {"step": 4}, ["step 3", "step 4"]),
    ({"num_elems": 100}, {"num_elems": 101}, ["400 bytes", "404 bytes"]),
    ({"average": True}, {"average": False}, ["avg", "sum"]),
    ({"dtype": BF16}, {"dtype": F32}, ["of bfloat16 param", "of float32 param"]),
    ({"grad_scale": 0.5}, {"grad_scale": 0.25}, ["scale=0.5", "scale=0.25"]),
]


@in_ranks(2, fresh=True)
def test_ranks_that_differ(rank: int) -> None:
    """Both calls are named on both ranks; each case has a group, which does not survive it."""
    for first, second, words in MISMATCHES:
        group = dist.new_group()
        chosen: dict[str, Any] = {"optimizer": SGDStep(lr=1), "num_elems": 100, "dtype": F32}
        chosen |= {"step": 1, **(first, second)[rank]}
        made = (chosen.pop(name) for name in ("optimizer", "num_elems", "dtype"))
        run = Run(*made, grad_dtype=F32)
        with pytest.raises(MismatchError) as caught:
            run.step(chosen.pop("step"), group=group, **chosen)
        for word in ["reduce_scatter_update_all_gather", *words]:
            assert word in str(caught.value)
