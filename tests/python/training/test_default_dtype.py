"""Another default dtype or device, and inference mode: they do not change what is trained.

https://github.com/pytorch/ao/pull/4915: under torch.set_default_dtype(torch.bfloat16) a step count
ends at 256. https://github.com/pytorch/pytorch/issues/113203: what the first forward pass keeps
was made in inference mode. https://github.com/huggingface/transformers/issues/30371: programs that
load models set the default dtype. https://github.com/meta-pytorch/torchtune/pull/2818: Lightning
checks a model before its first step, and a checkpoint is restored, in inference mode.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from curves import whole
from oracle import default_dtype
from ranks import in_ranks
from rows import ZERO, trained_by
from steps import apply_steps
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, mse_loss

from ringcomm import ops
from ringcomm.nn import ColumnParallelLinear, MixtureOfExperts, RowParallelLinear
from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import (
    ParallelDims,
    ParameterServer,
    get_state_dict,
    parallelize,
    pipeline,
    zero,
)

ROOT = Path(__file__).resolve().parents[3]
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

FACTORIES = {"zeros", "ones", "empty", "full", "tensor", "rand", "randn", "eye", "linspace"}
FACTORIES |= {"logspace", "scalar_tensor", "asarray", "empty_strided", "normal", "Tensor"}
# Not among them: `arange`, only of integers here; `as_tensor`, only of arrays, which have a dtype.


def without(keyword: str, source: str, factories: set[str]) -> Iterator[int]:
    """The lines of factory calls whose result depends on the default dtype or device."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        call = ast.unparse(node.func)
        named = {each.arg for each in node.keywords}
        if call == "partial" and node.args:  # the dtype may come with the call
            continue
        if call.startswith("torch.") and call[6:] in factories and not named & {keyword, None}:
            yield node.lineno


@pytest.mark.parametrize("keyword", ["dtype", "device"])
def test_factory_calls_say_what_they_make(keyword: str) -> None:
    """https://github.com/pytorch/pytorch/issues/27878: packages that rely on the default device.

    Only the programs in ringcomm/measure choose no device: they run on the default one.
    """
    source = "torch.zeros(3)\ntorch.ones(3, dtype=x, device=y)\nx.zeros(2)"
    assert list(without(keyword, source, FACTORIES)) == [1]
    files = [path for name in ("ringcomm", "kernels") for path in (ROOT / name).rglob("*.py")]
    factories = FACTORIES
    if keyword == "device":
        factories = FACTORIES | {"arange", "randint", "randperm"}
        files = [path for path in files if path.parent.name != "measure"]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in without(keyword, path.read_text(encoding="utf-8"), factories)
    ]
    assert len(files) > 100
    assert not found, f"torch's defaults change the results of these calls: give {keyword}="


# ---- systems

STEPS = 3


def net() -> nn.Sequential:
    with torch.inference_mode(False):
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"dtype": F32, "device": "cpu"}
        layers = [nn.Sequential(nn.Linear(8, 8, **sizes), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*layers, nn.Linear(8, 4, **sizes))


def batch(step: int) -> tuple[Tensor, Tensor]:
    how: dict[str, Any] = {"dtype": F32, "device": "cpu"}
    how["generator"] = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, **how), torch.randn(4, 4, **how)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


class System(NamedTuple):
    """A step and an evaluation of rows, which return the loss."""

    step: Callable[[Tensor, Tensor], Tensor]
    evaluate: Callable[[Tensor, Tensor], Tensor]
    optimizer: Any
    model: Any


def by_model(model: nn.Module, optimizer: Any) -> System:
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(model(x), y)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(x, y)
        (optimizer.scale(loss) if hasattr(optimizer, "scale") else loss).backward()
        return loss.detach()

    return System(step, loss_of, optimizer, model)


def by_given(system: str) -> System:
    model = net()
    return by_model(model, trained_by(system, model, adamw(model.parameters())))


def by_lomo(kind: type[Any], **options: Any) -> System:
    model = net()
    return by_model(model, kind(model, lr=0.01, group=dist.group.WORLD, **options))


def by_lomo_on_shards() -> System:
    model = net()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return by_model(model, Lomo(model, lr=0.01))


def by_tensor_parallelism() -> System:
    model: Any = net()
    model[0][0] = ColumnParallelLinear.from_linear(model[0][0])
    model[1][0] = RowParallelLinear.from_linear(model[1][0])
    return by_model(model, adamw(model.parameters()))


def by_experts() -> System:
    torch.manual_seed(0)
    experts = MixtureOfExperts(8, lambda: nn.Linear(8, 8, dtype=F32), 4, dtype=F32)
    torch.manual_seed(0)
    model = nn.Sequential(experts, nn.Linear(8, 4, dtype=F32))
    return by_model(model, adamw(model.parameters()))


def by_parallelize(dims: ParallelDims) -> System:
    made = parallelize(net(), dims, adamw, loss_fn=mse_loss)
    return System(made.step, made.evaluate, made.optimizer, made.model)


def by_pipeline(schedule: str) -> System:
    pipe = pipeline.Pipeline(net(), mse_loss, schedule, 2)
    return System(pipe.step, pipe.evaluate, adamw(pipe.parameters()), pipe.module)


SYSTEMS: dict[str, Callable[[], System]] = {
    **{system: partial(by_given, system) for system in (*ZERO, "offload")},
    "Lomo": lambda: by_lomo(Lomo),
    "Lomo, deferred": lambda: by_lomo(Lomo, clip_grad_norm=0.1),
    "AdaLomo": lambda: by_lomo(AdaLomo),
    "AdaLomo, scaled": lambda: by_lomo(AdaLomo, loss_scale="dynamic"),
    "Lomo on fully_shard": by_lomo_on_shards,
    "tensor parallelism": by_tensor_parallelism,
    "experts": by_experts,
    "parallelize dp": lambda: by_parallelize(ParallelDims(dp=2)),
    "parallelize fsdp": lambda: by_parallelize(ParallelDims(fsdp=2)),
    "parallelize pp": lambda: by_parallelize(ParallelDims(pp=2)),
    "pipeline 1f1b": lambda: by_pipeline("1f1b"),
    "pipeline zbv": lambda: by_pipeline("zbv"),
}


def trained(name: str, first: Any = None, between: Any = None, around: Any = None) -> list[Tensor]:
    """Losses, and the states that the optimizer shows, after some steps.

    The system is made, saved and loaded in a context of `around`, if that is given.
    """
    with (around or nullcontext)():
        step, evaluate, optimizer, model = SYSTEMS[name]()
    losses = []
    for idx in range(STEPS):
        if mode := first if idx == 0 else between:
            model.eval()
            with mode():
                evaluate(*batch(9))
            model.train()
        losses.append(step(*batch(idx)))
        apply_steps(optimizer)
        if around is not None and idx == 0 and name != "infinity":  # its state is in files
            with around():
                get_state_dict(model, optimizer)
                optimizer.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        losses.append(evaluate(*batch(9)))
    states = {} if name == "infinity" else getattr(optimizer, "state", {})  # those are outside
    # A step count of torch's own is in float64 where that is the default.
    items = [item for state in states.values() for item in state.items()]
    found = [x for key, x in items if isinstance(x, Tensor) and key != "step"]
    return [whole(x) for x in (*losses, *found)]


@cache
def expected(name: str, around: Any = None) -> list[Tensor]:
    """As nobody has changed anything."""
    return trained(name, around=around)


def assert_same(found: list[Tensor], right: list[Tensor], what: str) -> None:
    assert len(found) == len(right), what
    for own, wanted in zip(found, right, strict=True):
        assert own.dtype == wanted.dtype, what
        torch.testing.assert_close(own, wanted, rtol=0, atol=0, msg=lambda m: f"{what}: {m}")


def check_default_dtypes(*dtypes: torch.dtype) -> None:
    for name in SYSTEMS:
        for dtype in dtypes:
            with default_dtype(dtype):
                found = trained(name)
            assert_same(found, expected(name), f"{name} under {dtype}")


@in_ranks(2)
def test_bfloat16_as_the_default_dtype(rank: int) -> None:
    """Losses, their dtype and the optimizer's states are those under float32."""
    check_default_dtypes(BF16)


@pytest.mark.slow
@in_ranks(2)
def test_more_default_dtypes(rank: int) -> None:
    check_default_dtypes(F64, torch.float16)


def check_evaluations(mode: Any, **when: Any) -> None:
    for name in SYSTEMS:
        found = trained(name, **dict.fromkeys(when, mode))
        assert_same(found, expected(name), f"{name}, {mode.__name__} {[*when]}")


@in_ranks(2)
def test_an_evaluation_in_inference_mode_before_the_first_step(rank: int) -> None:
    check_evaluations(torch.inference_mode, first=True)


@pytest.mark.slow
@in_ranks(2)
def test_evaluations_before_and_between_steps(rank: int) -> None:
    check_evaluations(torch.inference_mode, between=True)
    check_evaluations(torch.inference_mode, first=True, between=True)
    check_evaluations(torch.no_grad, first=True, between=True)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")  # nothing can be computed there
    try:
        yield
    finally:
        torch.set_default_device("cpu")


@in_ranks(2)
@pytest.mark.parametrize("around", [torch.inference_mode, default_device])
def test_systems_are_made_and_loaded_in_other_surroundings(rank: int, around: Any) -> None:
    """https://github.com/pytorch/pytorch/issues/95957 and 148874.

    Layers that are made in inference mode cannot be trained in torch either.
    """
    for name in SYSTEMS:
        if name not in ("tensor parallelism", "experts"):
            right = expected(name, nullcontext)
            assert_same(trained(name, around=around), right, f"{name}, {around.__name__}")


@in_ranks(2)
@pytest.mark.parametrize("around", [torch.inference_mode, default_device])
def test_a_parameter_server_in_other_surroundings(rank: int, around: Any) -> None:
    """As above."""
    results = []
    for each in (nullcontext, around):
        model = net()
        with each():
            server = ParameterServer(model, adamw)
        with server:
            for idx in range(STEPS):
                with each():
                    server.pull()
                mse_loss(model(batch(2 * idx + rank)[0]), batch(idx)[1]).backward()
                with each():
                    server.push()
            server.pull(fresh=True)
        results.append([param.detach().clone() for param in model.parameters()])
    assert_same(results[1], results[0], around.__name__)


@in_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_step_count_goes_on_after_256(rank: int, stage: int) -> None:
    with default_dtype(BF16):
        layer = nn.Linear(2, 2, bias=False, dtype=F32)
        optimizer = zero.shard(layer, adamw(layer.parameters()), stage)
        for _ in range(260):
            layer.weight.grad = torch.ones_like(layer.weight)
            optimizer.step()
        state = next(iter(optimizer.state.values()))
        optimizer.load_state_dict(optimizer.state_dict())
        again = next(iter(optimizer.state.values()))
    assert state["step"].dtype == again["step"].dtype == F32
    assert int(state["step"]) == int(again["step"]) == 260


def test_losses_under_another_default_dtype() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, dtype=F32, generator=generator) for n in (5, 9))
    target = torch.tensor([0, 8, -100, 3, 1])
    results = []
    for dtype in (F32, BF16, torch.float16, F64):
        with default_dtype(dtype):
            h, w = (x.clone().requires_grad_() for x in (hidden, weight))
            logits = h @ w.T
            losses = [
                ops.linear_cross_entropy(h, w, target, z_loss=0.1),
                ops.linear_cross_entropy(h, w, target, num_items=3, label_smoothing=0.1),
                ops.cross_entropy(logits, target, num_items=3),
                ops.cross_entropy(logits * 1, target, inplace=True),
                ops.cross_entropy(logits, logits.detach().softmax(-1)),
                ops.cross_entropy(logits.double(), target).float(),
            ]
            grads = torch.autograd.grad(torch.stack(losses).sum(), (h, w))
            results.append([*losses, *grads])
    torch.testing.assert_close(results[0][3], cross_entropy(hidden @ weight.T, target))
    for found in results[1:]:
        assert_same(found, results[0], "losses")
