"""reduce_scatter_update_all_gather_ as an operator, and every way to call it wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from update_runs import BF16, F32, OPTIMIZERS, Run

import ringcomm
from ringcomm import MismatchError, ops
from ringcomm.ops import AdamWStep, LomoStep, SGDStep

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


def test_operator() -> None:
    run_ranks(2, check_operator, timeout_s=120)


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


@pytest.mark.parametrize("name", ["momentum", "lomo"])
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
        (lambda: SGDStep(lr=-1), "lr"),
        (lambda: SGDStep(lr=float("nan")), "lr"),
        (lambda: SGDStep(lr=1, momentum=-0.1), "momentum"),
        (lambda: SGDStep(lr=1, dampening=float("inf")), "dampening"),
        (lambda: SGDStep(lr=1, nesterov=True), "nesterov"),
        (lambda: SGDStep(lr=1, momentum=0.9, dampening=0.1, nesterov=True), "nesterov"),
        (lambda: AdamWStep(betas=(1.0, 0.9)), r"betas\[0\]"),
        (lambda: AdamWStep(betas=(0.9, -1)), r"betas\[1\]"),
        (lambda: AdamWStep(eps=-1e-8), "eps"),
        (lambda: AdamWStep(weight_decay=float("inf")), "weight_decay"),
        (lambda: LomoStep(lr=1, clip_value=0.0), "clip_value"),
        (lambda: LomoStep(lr=1, weight_decay=-1), "weight_decay"),
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
    refused(ValueError, "no 'master'", optimizer=LomoStep(lr=1), state={"master": torch.ones(5)})
    refused(ValueError, "step counts", step=0)
    refused(ValueError, "grad_scale is a finite", grad_scale=float("nan"))
    for optimizer, dtype in ((adamw, F32), (LomoStep(lr=1), BF16)):
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
            torch.ones(2), torch.ones(2), {}, optimizer=SGDStep(lr=1), step=1
        )


def test_over_gloo() -> None:
    run_ranks(2, check_over_gloo, backend="gloo", fresh=True)


MISMATCHES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "lr": ({"optimizer": SGDStep(lr=0.25)}, {"optimizer": SGDStep(lr=0.5)}, ["lr=0.25", "lr=0.5"]),
    "optimizer": ({"optimizer": SGDStep(lr=1)}, {"optimizer": LomoStep(lr=1)}, ["sgd", "lomo"]),
    "step": ({"step": 3}, {"step": 4}, ["step 3", "step 4"]),
    "size": ({"num_elems": 100}, {"num_elems": 101}, ["400 bytes", "404 bytes"]),
    "average": ({"average": True}, {"average": False}, ["avg", "sum"]),
    "dtype": ({"dtype": BF16}, {"dtype": F32}, ["of bfloat16 param", "of float32 param"]),
    "scale": ({"grad_scale": 0.5}, {"grad_scale": 0.25}, ["scale=0.5", "scale=0.25"]),
}


def differ(rank: int) -> list[str]:
    """In each case with a group of its own, which does not survive it."""
    said = []
    for _, values in sorted(MISMATCHES.items()):
        group = dist.new_group()
        chosen: dict[str, Any] = {"optimizer": SGDStep(lr=1), "num_elems": 100, "dtype": F32}
        chosen |= {"step": 1, **values[:2][rank]}
        made = (chosen.pop(name) for name in ("optimizer", "num_elems", "dtype"))
        run = Run(*made, grad_dtype=F32)
        with pytest.raises(MismatchError) as caught:
            run.step(chosen.pop("step"), group=group, **chosen)
        said.append(str(caught.value))
    return said


def test_ranks_that_differ() -> None:
    """Both calls are named on both ranks."""
    for texts in run_ranks(2, differ, fresh=True):
        for text, name in zip(texts, sorted(MISMATCHES), strict=True):
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
