"""reduce_scatter_update_all_gather_: bits against its parts, steps against torch.optim, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

import ringcomm
from ringcomm import MismatchError, Options, ops
from ringcomm.ops import SGD, AdamW, Lomo

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NUM_STEPS = 5

OPTIMIZERS: dict[str, Any] = {
    "sgd": SGD(lr=0.1),
    "momentum": SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
    "dampening": SGD(lr=0.01, momentum=0.9, dampening=0.5),
    "nesterov": SGD(lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adamw": AdamW(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
    "adamw_low_betas": AdamW(lr=1e-2, betas=(0.3, 0.5), eps=1e-3, weight_decay=0.0),
    "lomo": Lomo(lr=0.1, weight_decay=0.1),
    "lomo_clipped": Lomo(lr=0.1, clip_value=0.3),
}


def sizes(world_size: int) -> list[int]:
    """Nothing; fewer than ranks; one each; a longer shard; many; many, and odd."""
    return [0, 1, world_size, world_size + 1, 1000 * world_size, 5000 * world_size + 1]


# A slice of 256 KiB and an element, on each rank.
TWO_SLICES = 65_537


def grad_of(rank: int, num_elems: int, dtype: torch.dtype, step: int) -> Tensor:
    return oracle.floats(rank, num_elems, F32, seed=step + 2).to(dtype)


def start(num_elems: int, dtype: torch.dtype) -> Tensor:
    return oracle.floats(0, num_elems, F32, seed=1).to(dtype)


def average(world_size: int, num_elems: int, dtype: torch.dtype, step: int) -> Tensor:
    """In fp32, in the order of the ranks, rounded to the gradient's dtype."""
    grads = [grad_of(rank, num_elems, dtype, step).float() for rank in range(world_size)]
    total = grads[0]
    for grad in grads[1:]:
        total = total + grad
    return (total / world_size).to(dtype)


class Run:
    """Parameters, this rank's state, and gradients that every rank can compute for all."""

    def __init__(self, optimizer: Any, num_elems: int, dtype: torch.dtype, **kwargs: Any) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.optimizer = optimizer
        self.grad_dtype = kwargs.pop("grad_dtype", dtype)
        self.param = start(num_elems, dtype)
        self.state = ops.new_shard_state(self.param, optimizer, **kwargs)
        self.shard = slice(*ops.shard_range(num_elems, self.world_size, self.rank))

    def grad(self, step: int) -> Tensor:
        return grad_of(self.rank, self.param.numel(), self.grad_dtype, step)

    def step(self, step: int, **kwargs: Any) -> None:
        grad = self.grad(step)
        result = ops.reduce_scatter_update_all_gather_(
            self.param, grad, self.state, optimizer=self.optimizer, step=step, **kwargs
        )
        assert result is self.param
        oracle.assert_equal(grad, self.grad(step))


# ---- the parts

_own_group: list[dist.ProcessGroup] = []


def own_group() -> dist.ProcessGroup:
    """A group of this rank alone: there the operator is the update and nothing else."""
    if not _own_group:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        _own_group.append(groups[dist.get_rank()])
    return _own_group[0]


def unfused_step(run: Run, step: int) -> None:
    grad = run.grad(step)
    if grad.numel() > 0 and grad.numel() % run.world_size == 0:
        reduced = ops.reduce_scatter(grad, "avg")
    else:
        reduced = ops.all_reduce(grad, "avg")[run.shard]
    ops.reduce_scatter_update_all_gather_(
        run.param[run.shard],
        reduced.clone(),
        run.state,
        optimizer=run.optimizer,
        step=step,
        group=own_group(),
    )
    for rank in range(run.world_size):
        begin, end = ops.shard_range(grad.numel(), run.world_size, rank)
        ops.broadcast_(run.param[begin:end], rank)


def check_bits(rank: int, name: str, algorithm: str) -> None:
    world_size = dist.get_world_size()
    for dtype, grad_dtype, master in (
        (F32, F32, False),
        (BF16, BF16, False),
        (BF16, BF16, True),
        (F16, F32, False),
        (F32, BF16, False),
    ):
        if master and name.startswith("lomo"):
            continue
        for num_elems in [*sizes(world_size), TWO_SLICES * world_size]:
            kwargs = {"grad_dtype": grad_dtype, "master": master}
            fused = Run(OPTIMIZERS[name], num_elems, dtype, **kwargs)
            parts = Run(OPTIMIZERS[name], num_elems, dtype, **kwargs)
            for step in (1, 2):
                fused.step(step)
                if algorithm == "auto":
                    unfused_step(parts, step)
                    oracle.assert_equal(fused.param, parts.param)
                    for key, value in fused.state.items():
                        oracle.assert_equal(value, parts.state[key])
            oracle.assert_equal(ops.broadcast(fused.param, 0), fused.param)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_same_bits_as_the_parts_and_on_all_ranks(world_size: int, name: str) -> None:
    run_ranks(world_size, check_bits, name, "auto")


@pytest.mark.parametrize("name", ["momentum", "adamw", "lomo"])
def test_same_bits_on_all_ranks_of_a_ring(name: str) -> None:
    run_ranks(3, check_bits, name, "ring", pg_options=Options(algorithm="ring"))


# ---- torch.optim


def torch_step(optimizer: Any, weight: Tensor, grad: Tensor, state: dict[str, Tensor]) -> None:
    """One step of torch's own in fp32; `state` has its number, and is updated too."""
    step = int(state.pop("step"))
    if isinstance(optimizer, Lomo):
        if optimizer.clip_value is not None:
            grad = grad.clamp(-optimizer.clip_value, optimizer.clip_value)
        weight.mul_(1 - optimizer.lr * optimizer.weight_decay).sub_(grad, alpha=optimizer.lr)
        return
    param = nn.Parameter(weight)
    param.grad = grad
    if isinstance(optimizer, SGD):
        reference: torch.optim.Optimizer = torch.optim.SGD(
            [param],
            lr=optimizer.lr,
            momentum=optimizer.momentum,
            dampening=optimizer.dampening,
            weight_decay=optimizer.weight_decay,
            nesterov=optimizer.nesterov,
        )
        if step > 1:
            reference.state[param].update(state)
    else:
        reference = torch.optim.AdamW(
            [param],
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,  # the default takes MKL's square root, which is an ulp off itself
        )
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


def shards_of_steps(
    rank: int, name: str, dtype: torch.dtype, master: bool
) -> list[list[dict[str, Tensor]]]:
    """For each size: this rank's shard of everything before the first step and after each."""
    found = []
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


def check_torch(world_size: int, name: str, dtype: torch.dtype, master: bool) -> None:
    """Every step by torch.optim from where we were before it; 2 ulp apart at most."""
    optimizer = OPTIMIZERS[name]
    by_rank = run_ranks(world_size, shards_of_steps, name, dtype, master)
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
            torch_step(
                optimizer, weight, average(world_size, num_elems, dtype, step).float(), state
            )
            for key in optimizer.state_names:
                assert ulps(after[key], state[key], before[key]) <= 2
            if dtype == F32 or master:
                assert ulps(after[weight_key], weight, before[weight_key]) <= 2
                oracle.assert_equal(after["param"], after[weight_key].to(dtype))
            else:  # near the middle of two 16-bit numbers, either
                rtol = 2**-7 if dtype == BF16 else 2**-10
                torch.testing.assert_close(after["param"], weight.to(dtype), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_steps_of_torch_optim(world_size: int, name: str) -> None:
    check_torch(world_size, name, F32, False)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    ("name", "master"),
    [("momentum", False), ("momentum", True), ("adamw", False), ("adamw", True), ("lomo", False)],
)
def test_steps_in_16_bits(name: str, master: bool, dtype: torch.dtype) -> None:
    check_torch(3, name, dtype, master)


def check_scale(rank: int) -> None:
    """Not averaged, and unscaled: exact in powers of two."""
    plain, scaled = (Run(OPTIMIZERS["adamw"], 1001, F32) for _ in range(2))
    plain.step(1)
    scaled.step(1, average=False, grad_scale=0.5)
    oracle.assert_equal(scaled.param, plain.param)
    assert not torch.equal(scaled.param, Run(OPTIMIZERS["adamw"], 1001, F32).param)


def test_scale() -> None:
    run_ranks(2, check_scale)


# ---- a model


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 3))


def losses(name: str, rank: int, world_size: int) -> list[float]:
    """A short training on this rank's part of every batch; of one process with torch.optim."""
    model = make_model()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(flat, model.parameters())
    optimizer = OPTIMIZERS[name]
    state = {key: torch.zeros_like(flat) for key in optimizer.state_names}
    if world_size > 1:
        state = ops.new_shard_state(flat, optimizer)
    found = []
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(7, 3, generator=generator)
    for step in range(1, 21):
        x = torch.randn(12, 7, generator=generator)
        share = slice(rank * 12 // world_size, (rank + 1) * 12 // world_size)
        loss = ((model(x[share]) - (x @ target)[share]) ** 2).mean()
        model.zero_grad()
        loss.backward()
        grad = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        if world_size > 1:
            ops.reduce_scatter_update_all_gather_(flat, grad, state, optimizer=optimizer, step=step)
            loss = ops.all_reduce(loss.detach(), "avg")
        else:
            state["step"] = torch.tensor(step)
            torch_step(optimizer, flat, grad, state)
        found.append(float(loss))
    return found


@pytest.mark.parametrize("name", ["momentum", "adamw_low_betas", "lomo"])
def test_a_model_learns_as_in_one_process(name: str) -> None:
    expected = run_ranks(1, losses_of_one, name, backend=None)[0]
    assert expected[-1] < 0.8 * expected[0]
    for found in run_ranks(3, losses_of_three, name):
        assert found == pytest.approx(expected, rel=1e-5)


def losses_of_one(rank: int, name: str) -> list[float]:
    return losses(name, 0, 1)


def losses_of_three(rank: int, name: str) -> list[float]:
    return losses(name, rank, 3)


# ---- as an operator


def check_operator(rank: int) -> None:
    packet = torch.ops.ringcomm.reduce_scatter_update_all_gather_
    group_name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    common = {"lr": 0.1, "weight_decay": 0.1, "average": True, "grad_scale": 1.0}
    num_elems = 2 * dist.get_world_size()
    param, grad, first, second = torch.rand(4, num_elems).unbind()
    sgd = {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "step": 2, **common}
    plain_sgd = {**sgd, "momentum": 0.0}
    adamw = {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "step": 2, **common}
    shard = [t[: num_elems // dist.get_world_size()].clone() for t in (first, second, first)]
    half = param.clone().bfloat16()
    for overload, args, kwargs in (
        (packet.sgd, (param.clone(), grad.clone(), None, None), plain_sgd),
        (packet.sgd, (param.clone(), grad.clone(), shard[0], None), sgd),
        (packet.sgd, (half, grad.clone(), shard[0], shard[1]), sgd),
        (packet.adamw, (param.clone(), grad.clone(), shard[0], shard[1], None), adamw),
        (packet.adamw, (half, grad.clone(), shard[0], shard[1], shard[2]), adamw),
        (packet.lomo, (param.clone(), grad.clone()), {"clip_value": None, **common}),
    ):
        torch.library.opcheck(overload, (*args, group_name), kwargs)

    parameter = nn.Parameter(param.clone())
    with pytest.raises(ValueError, match="requires grad"):
        packet.lomo(parameter, grad, group_name, clip_value=None, **common)
    state = ops.new_shard_state(parameter, OPTIMIZERS["adamw"])
    versions = parameter._version, state["exp_avg"]._version
    ops.reduce_scatter_update_all_gather_(
        parameter, grad, state, optimizer=OPTIMIZERS["adamw"], step=1
    )
    assert parameter._version > versions[0]
    assert state["exp_avg"]._version > versions[1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_operator(world_size: int) -> None:
    run_ranks(world_size, check_operator, timeout_s=120)


def check_compile(rank: int, name: str) -> None:
    optimizer = OPTIMIZERS[name]
    eager, compiled = Run(optimizer, 11, F32), Run(optimizer, 11, F32)

    def step(param: Tensor, grad: Tensor, state: dict[str, Tensor], num: int) -> Tensor:
        result = ops.reduce_scatter_update_all_gather_(
            param, grad * 2, state, optimizer=optimizer, step=num
        )
        return result + 1

    fast = torch.compile(step, fullgraph=True, backend="aot_eager")
    for num in (1, 2):
        expected = step(eager.param, eager.grad(num), eager.state, num)
        actual = fast(compiled.param, eager.grad(num), compiled.state, num)
        oracle.assert_equal(actual, expected)
        oracle.assert_equal(compiled.param, eager.param)


@pytest.mark.parametrize("name", ["momentum", "adamw", "lomo"])
def test_compile(name: str) -> None:
    run_ranks(2, check_compile, name, timeout_s=120)


def check_stats(rank: int) -> None:
    before = ringcomm.stats().get(("reduce_scatter_update_all_gather", "direct"), {})
    Run(OPTIMIZERS["adamw"], 1000, F32, grad_dtype=BF16).step(1)
    counts = ringcomm.stats()["reduce_scatter_update_all_gather", "direct"]
    assert counts["num_calls"] - before.get("num_calls", 0) == 1
    assert counts["sent_bytes"] - before.get("sent_bytes", 0) == 500 * 2 + 500 * 4


def test_bytes_are_counted() -> None:
    run_ranks(2, check_stats)


# ---- what is wrong


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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SGD(lr=-1), "lr"),
        (lambda: SGD(lr=float("nan")), "lr"),
        (lambda: SGD(lr=1, momentum=-0.1), "momentum"),
        (lambda: SGD(lr=1, dampening=float("inf")), "dampening"),
        (lambda: SGD(lr=1, nesterov=True), "nesterov"),
        (lambda: SGD(lr=1, momentum=0.9, dampening=0.1, nesterov=True), "nesterov"),
        (lambda: AdamW(betas=(1.0, 0.9)), r"betas\[0\]"),
        (lambda: AdamW(betas=(0.9, -1)), r"betas\[1\]"),
        (lambda: AdamW(eps=-1e-8), "eps"),
        (lambda: AdamW(weight_decay=float("inf")), "weight_decay"),
        (lambda: Lomo(lr=1, clip_value=0.0), "clip_value"),
        (lambda: Lomo(lr=1, weight_decay=-1), "weight_decay"),
    ],
)
def test_hyper_parameters(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def check_wrong(rank: int) -> None:
    adamw, momentum = OPTIMIZERS["adamw"], OPTIMIZERS["momentum"]
    param, grad = torch.ones(10), torch.ones(10)
    state = ops.new_shard_state(param, adamw)
    rows = torch.ones(2, 5)

    def refused(error: type[Exception], words: str, **changes: Any) -> None:
        args: dict[str, Any] = {"param": param, "grad": grad, "state": state, "optimizer": adamw}
        with pytest.raises(error, match=words):
            ops.reduce_scatter_update_all_gather_(**{**args, "step": 1, **changes})

    refused(ValueError, "parameters contiguous", param=torch.ones(20)[::2])
    refused(ValueError, "gradient contiguous", param=rows, grad=torch.ones(5, 2).t())
    refused(ValueError, "parameters' shape", grad=torch.ones(9))
    refused(ValueError, "parameters' shape", grad=rows)
    refused(TypeError, "parameters in float32", param=param.double())
    refused(TypeError, "gradient in float32", grad=grad.int())
    refused(ValueError, "has .*exp_avg", state={})
    refused(ValueError, "has .*momentum_buffer", optimizer=momentum)
    refused(ValueError, "this rank's shard", state={**state, "exp_avg": torch.ones(10)})
    refused(TypeError, "exp_avg_sq in float32", state={**state, "exp_avg_sq": torch.ones(5).half()})
    refused(ValueError, "share memory", grad=param)
    refused(ValueError, "share memory", state={**state, "exp_avg": state["exp_avg_sq"]})
    refused(ValueError, "master weights are for 16-bit", state={**state, "master": torch.ones(5)})
    refused(ValueError, "no 'master'", optimizer=Lomo(lr=1), state={"master": torch.ones(5)})
    refused(ValueError, "step counts", step=0)
    refused(ValueError, "grad_scale is a finite", grad_scale=float("nan"))
    for optimizer, dtype in ((adamw, F32), (Lomo(lr=1), BF16)):
        with pytest.raises(ValueError, match="no master weights"):
            ops.new_shard_state(param.to(dtype), optimizer, master=True)
    ops.reduce_scatter_update_all_gather_(param, grad, state, optimizer=adamw, step=1)
    assert (param != 1).all()


def test_wrong_arguments() -> None:
    """Each is refused before anything is exchanged, and the group works on."""
    run_ranks(2, check_wrong)


def check_over_gloo(rank: int) -> None:
    with pytest.raises(ValueError, match=r"backend ringcomm .* gloo"):
        ops.reduce_scatter_update_all_gather_(
            torch.ones(2), torch.ones(2), {}, optimizer=SGD(lr=1), step=1
        )


def test_over_gloo() -> None:
    run_ranks(2, check_over_gloo, backend="gloo", fresh=True)


MISMATCHES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "lr": ({"optimizer": SGD(lr=0.25)}, {"optimizer": SGD(lr=0.5)}, ["lr=0.25", "lr=0.5"]),
    "optimizer": ({"optimizer": SGD(lr=1)}, {"optimizer": Lomo(lr=1)}, ["sgd", "lomo"]),
    "step": ({"step": 3}, {"step": 4}, ["step 3", "step 4"]),
    "size": ({"num_elems": 100}, {"num_elems": 101}, ["400 bytes", "404 bytes"]),
    "average": ({"average": True}, {"average": False}, ["avg", "sum"]),
    "dtype": ({"dtype": BF16}, {"dtype": F32}, ["of bfloat16 param", "of float32 param"]),
    "scale": ({"grad_scale": 0.5}, {"grad_scale": 0.25}, ["scale=0.5", "scale=0.25"]),
}


def differ(rank: int, name: str) -> str:
    chosen: dict[str, Any] = {"optimizer": SGD(lr=1), "num_elems": 100, "dtype": F32, "step": 1}
    chosen |= MISMATCHES[name][:2][rank]
    run = Run(chosen.pop("optimizer"), chosen.pop("num_elems"), chosen.pop("dtype"), grad_dtype=F32)
    with pytest.raises(MismatchError) as caught:
        run.step(chosen.pop("step"), **chosen)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(MISMATCHES))
def test_ranks_that_differ(name: str) -> None:
    """Both calls are named on both ranks."""
    for text in run_ranks(2, differ, name, fresh=True):
        for word in ["reduce_scatter_update_all_gather", *MISMATCHES[name][2]]:
            assert word in text


def check_not_finite(rank: int) -> None:
    """Into parameters and state, and nowhere else."""
    for name, optimizer in OPTIMIZERS.items():
        run = Run(optimizer, 100, F32)
        grad = torch.zeros(100)
        grad[3 + 50 * rank] = (float("nan"), float("inf"))[rank]
        ops.reduce_scatter_update_all_gather_(
            run.param, grad, run.state, optimizer=optimizer, step=1
        )
        wrong = (~run.param.isfinite()).nonzero().flatten().tolist()
        assert wrong == ([3] if name == "lomo_clipped" else [3, 53])


def test_gradients_that_are_not_finite() -> None:
    run_ranks(2, check_not_finite)
