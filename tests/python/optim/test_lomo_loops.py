"""Loops of users around LOMO's steps: rows, each as with torch.optim.SGD in the same loop."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pair_optimizers
import pytest
import torch
from lomo_models import batches, make, weights
from steps import apply_steps, train_step
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.optim import swa_utils

from ringcomm.optim import Lomo

LR = 0.1
DATA = [torch.randn(5, 6, generator=torch.Generator().manual_seed(i)) for i in range(8)]
IMMEDIATE: dict[str, dict[str, Any]] = {"immediate": {}}
DEFERRED: dict[str, dict[str, Any]] = {"deferred": {"clip_grad_norm": 1e6}}


def net(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    first, second = nn.Linear(6, width), nn.Linear(width, width)
    return nn.Sequential(first, nn.Tanh(), second, nn.LayerNorm(width), nn.Linear(width, 3))


def steps(model: Any, opt: Any, data: list[Tensor] = DATA[:3]) -> None:
    for x in data:
        train_step(model(x).square().mean(), opt)


# ---- tensors of the user


def refill_input(model: Any, opt: Any) -> None:
    buffer = torch.empty(5, 6)
    for x in DATA[:3]:
        model(buffer.copy_(x)).square().mean().backward()
        buffer.fill_(9)
        apply_steps(opt)


def refill_numpy_input(model: Any, opt: Any) -> None:
    array = torch.empty(5, 6).numpy()
    for x in DATA[:3]:
        array[:] = x.numpy()
        model(torch.from_numpy(array)).square().mean().backward()
        array[:] = 9
        apply_steps(opt)


def change_ids(model: Any, opt: Any) -> None:
    ids = torch.arange(5)
    for _ in range(3):
        model(ids).square().mean().backward()
        ids += 1
        apply_steps(opt)


def embedded() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 3))


def relu(y: Tensor) -> Tensor:
    return functional.relu_(y)


def view(y: Tensor) -> Tensor:
    y.view(-1)[:2].zero_()
    return y


def change_outputs(change: Any, shape: tuple[int, ...], model: Any, opt: Any) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        train_step(change(model[4](change(model[0](x)))).square().mean(), opt)


def scale_rows(model: Any, opt: Any) -> None:
    """With ids of two dimensions, whose output would be a view."""
    model(torch.tensor([[1, 2], [3, 1]])).mul_(0.5).square().sum().backward()
    opt.step()


# ---- what torch has a layer for


def nested_rows(model: Any, x: Tensor) -> Any:
    return model[0](torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)).values()


def padded_rows(model: Any, x: Tensor) -> Any:
    return model[0](torch.nested.nested_tensor([x[:2], x[2:]])).to_padded_tensor(0.0)


def dual_numbers(model: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, DATA[7])))
    return torch.cat([primal, tangent])


USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "nested": nested_rows,  # https://github.com/Lightning-AI/pytorch-lightning/issues/21588
    "padded": padded_rows,
    "sparse": lambda model, x: model(x.relu().to_sparse()),
    "compressed": lambda model, x: model(x.relu().to_sparse_csr()),
    "dual": dual_numbers,  # https://github.com/pytorch/pytorch/issues/137720
    # https://github.com/microsoft/nni/issues/5134, https://github.com/pytorch/pytorch/issues/20862
    "traced": lambda model, x: torch.jit.trace(model, x)(x),
}


def use(name: str, model: Any, opt: Any) -> None:
    for x in DATA[:2]:
        train_step(USES[name](model, x).square().mean(), opt)


# ---- passes


def to_some(names: list[str], model: Any, opt: Any) -> None:
    """backward(inputs=...), which leaves the others alone."""
    before = weights(model)
    for ids in batches(2):
        model(ids).backward(inputs=[model.get_parameter(name) for name in names])
        apply_steps(opt)
    assert {name for name, x in weights(model).items() if not x.equal(before[name])} == {*names}


def zero_grad_between(model: Any, opt: Any) -> None:
    """It keeps the uses by segments."""
    for ids in batches(3):
        loss = model(ids)
        opt.zero_grad()
        loss.backward()
        opt.step()


def penalized(has_table: bool, model: Any, opt: Any) -> None:
    """Second-order gradients of fused layers, and in the end a graph of the gradients."""
    for is_last, ids in enumerate(batches(4), -2):
        rows: list[Tensor] = []
        hook = model.embed.register_forward_hook(lambda _m, _a, out, to=rows: to.append(out))
        model.embed.requires_grad_(True)
        loss = model(ids)
        model.embed.requires_grad_(has_table)
        hook.remove()
        if is_last < 1:
            (slope,) = torch.autograd.grad(loss, rows, create_graph=True)
            loss = loss + 0.01 * slope.square().sum()
        loss.backward(create_graph=is_last == 1)
        apply_steps(opt)


# ---- parameter groups, schedulers, wrappers

SCHEDULERS = {**pair_optimizers.SCHEDULERS, "SWALR": lambda opt: swa_utils.SWALR(opt, 0.05)}


def scheduled(name: str, model: Any, opt: Any) -> None:
    scheduler = SCHEDULERS[name](opt)
    for x in DATA[:5]:
        steps(model, opt, [x])
        scheduler.step()


def frozen_at_first() -> nn.Sequential:
    model = net()
    model[0].requires_grad_(False)
    return model


def thaw(model: Any, opt: Any) -> None:
    steps(model, opt)
    model[0].requires_grad_(True)
    opt.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
    steps(model, opt)


def two_groups(kind: Any, model: Any, **options: Any) -> Any:
    rest = [param for layer in model[1:] for param in layer.parameters()]
    groups = [{"params": list(model[0].parameters()), "lr": LR}, {"params": rest, "lr": 0.01}]
    return kind(groups, LR, **({"model": model} if kind is Lomo else {}), **options)


def reverse_groups(model: Any, opt: Any) -> None:
    """Each weight keeps the learning rate of the group that it is in."""
    opt.param_groups.reverse()
    steps(model, opt)


def freeze_compiled(model: Any, opt: Any) -> None:
    """A layer of a compiled model, for a step."""
    compiled = torch.compile(model, backend="eager")
    for i, x in enumerate(DATA[:4]):
        model[2].requires_grad_(i != 1)
        steps(compiled, opt, [x])
    model[2].requires_grad_(True)


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    model = net()
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, target_modules=["0", "2"], modules_to_save=["4"], init_lora_weights=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config)


# ---- rows


def made(kind: Any, model: Any, **options: Any) -> Any:
    if kind is Lomo:
        return Lomo(model, LR, **options)
    return kind([param for param in model.parameters() if param.requires_grad], LR)


@dataclasses.dataclass(frozen=True)
class Row:
    """What a user does with a model and its optimizer, and how that is made."""

    loop: Callable[[Any, Any], Any] = steps
    build: Callable[[], Any] = net
    optimizer: Callable[..., Any] = made
    tol: float = 1e-5
    modes: dict[str, dict[str, Any]] = dataclasses.field(
        default_factory=lambda: {**IMMEDIATE, **DEFERRED}
    )


in_place = partial(Row, modes=IMMEDIATE)  # which deferred updates refuse
ROWS: dict[str, Row] = {
    # https://github.com/OpenLMLab/LOMO/issues/41 asks what is kept until the update.
    "input is refilled": Row(refill_input, partial(net, 64)),
    "numpy input is refilled": Row(refill_numpy_input, partial(net, 64)),
    "ids change": Row(change_ids, embedded),
    # https://github.com/gustavecortal/gpt-j-fine-tuning-example/issues/1
    **{
        f"output of {len(shape)} dimensions, {change.__name__}": in_place(
            partial(change_outputs, change, shape)
        )
        for change in (relu, view)
        for shape in ((6,), (3, 6), (2, 3, 6), (2, 2, 3, 6))
    },
    "output of an embedding": in_place(scale_rows, lambda: make("weight is input").table),
    **{f"{name} input": Row(partial(use, name)) for name in USES},
    **{
        f"backward to {names[0]}": Row(partial(to_some, names), partial(make, "plain"), tol=2.5e-7)
        for names in (["up.weight", "norm.bias"], ["embed.weight"])
    },
    **{
        f"zero_grad() between passes, {name}": Row(zero_grad_between, partial(make, name))
        for name in ("reused twice", "reused before", "reused nested")
    },
    **{
        f"gradient penalty, {name}": in_place(
            partial(penalized, name != "low_rank"), partial(make, name), tol=2.5e-6
        )
        for name in ("plain", "low_rank", "checkpoint")
    },
    # https://github.com/huggingface/transformers/issues/30371: a warm-up that had no effect.
    **{name: Row(partial(scheduled, name)) for name in SCHEDULERS},
    # https://github.com/amdegroot/ssd.pytorch/issues/109
    "thawed later": Row(thaw, frozen_at_first),
    "groups are reordered": Row(reverse_groups, optimizer=two_groups),
    # https://github.com/LoganBooker/prodigy-plus-schedule-free/issues/7
    "adapters": Row(steps, adapted),
    # https://github.com/pytorch/pytorch/issues/115607
    "frozen for a step, compiled": Row(freeze_compiled),
}
SLOW = ("frozen for a step, compiled",)
CASES = [
    pytest.param(name, mode, marks=[pytest.mark.slow] if name in SLOW else [], id=f"{name}, {how}")
    for name, row in ROWS.items()
    for how, mode in row.modes.items()
]


@pytest.mark.filterwarnings("ignore")  # of prototypes, of torch.jit, and of cycles of gradients
@pytest.mark.parametrize(("name", "options"), CASES)
def test_rows(name: str, options: dict[str, Any]) -> None:
    row = ROWS[name]
    model, reference = row.build(), row.build()
    before = weights(model)
    row.loop(reference, row.optimizer(torch.optim.SGD, reference))
    row.loop(model, row.optimizer(Lomo, model, **options))
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    found = weights(model)
    torch.testing.assert_close(found, weights(reference), rtol=row.tol, atol=row.tol)
    assert max(float((x - before[name]).abs().max()) for name, x in found.items()) > 1e-3
