"""What an optimizer acts on is known by its class, or said: in every system that splits weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from full_states import full_weights
from oracle import all_equal
from ranks import in_ranks
from rows import ZERO, Row, Training, check, trained_by
from torch import nn
from whole_optimizers import EachWeight

from ringcomm.nn import ColumnParallelLinear, MixtureOfExperts, RowParallelLinear
from ringcomm.parallel import (
    ParallelDims,
    ParameterServer,
    declare_optimizers,
    offload,
    parallelize,
    zero,
)
from ringcomm.parallel.optimizer_kinds import Kind, known_kind, needs_whole
from ringcomm.parallel.pipeline import Pipeline


class Factored(EachWeight):
    """Moments of rows and columns, of matrices with sides of 8 and more only.

    https://github.com/huggingface/transformers/issues/14830
    """

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})
        self.log: list[int] = []

    def step(self, closure: Any = None) -> Any:
        self.log.append(len(self.log))
        return super().step(closure)

    def update(self, group: dict[str, Any], param: Any) -> None:
        moment = param.grad.square() + 1e-6
        if param.dim() == 2 and min(param.shape) >= 8:
            moment = moment.mean(1, keepdim=True) * moment.mean(0) / moment.mean()
        param.sub_(group["lr"] * param.grad / moment.sqrt())


class Late(EachWeight):
    """Norms of columns from the third step on.

    https://github.com/pytorch/pytorch/issues/109581
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    def update(self, group: dict[str, Any], param: Any) -> None:
        count = self.state[param]["num"] = self.state[param].get("num", 0) + 1
        size = param.grad.norm(dim=0, keepdim=True) + 1e-3 if count > 2 else 1
        param.sub_(group["lr"] * param.grad / size)


class Smooth(EachWeight):
    """Of each element by itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    def update(self, group: dict[str, Any], param: Any) -> None:
        param.sub_(group["lr"] * param.grad / (param.grad.abs() + 0.1))


class WithTable(Smooth):
    """Keeps a tensor that is no state, as classes with 8-bit states do.

    https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2080
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.table = torch.linspace(0, 1, 256)


class ClippedAdamW(torch.optim.AdamW):
    """A subclass of a known class, by the norm of all gradients.

    https://github.com/deepspeedai/DeepSpeed/issues/490
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        return super().step(closure)


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Linear(width, 8), nn.Linear(8, 12)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(12, 3, bias=False))


def five_steps(made: Training) -> None:
    made.train(range(5))


def split_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        ColumnParallelLinear(8, 16, bias=False), nn.Tanh(), RowParallelLinear(16, 8, bias=False)
    )


def expert_model() -> nn.Module:
    return nn.Sequential(MixtureOfExperts(8, lambda: nn.Linear(8, 8), 2))


def by_row(kind: Any, system: str, **words: Any) -> Any:
    model = network()
    return model, trained_by(system, model, kind(model.parameters()), **words)


def by_server(kind: Any, **words: Any) -> Any:
    model = network()
    return model, ParameterServer(model, kind, **words)


def by_mesh(kind: Any, make: Callable[[], Any] = network, stage: int = 0, **given: Any) -> Any:
    words = {key: given.pop(key) for key in ("elementwise", "whole") if key in given}
    model, loss = make(), nn.functional.mse_loss
    dims = ParallelDims(**given)
    return model, parallelize(model, dims, kind, loss_fn=loss, zero_stage=stage, **words)


# Each splits weights over two ranks.
SYSTEMS: dict[str, Callable[..., Any]] = {
    **{system: partial(by_row, system=system) for system in (*ZERO, "offload")},
    "parameter server": by_server,
    "tp": partial(by_mesh, make=split_model, tp=2),
    "pp": partial(by_mesh, pp=2),
    "ep": partial(by_mesh, make=expert_model, ep=2),
    "fsdp": partial(by_mesh, fsdp=2, stage=3),
    "dp, zero 1": partial(by_mesh, dp=2, stage=1),
}


@pytest.mark.parametrize("system", SYSTEMS)
@in_ranks(2)
def test_an_unknown_class_is_asked_for_before_anything_is_changed(rank: int, system: str) -> None:
    made: list[Any] = []

    def kind(params: Any) -> Any:
        made.append(Factored(params))
        return made[-1]

    for name, of_class in (("Factored", kind), ("ClippedAdamW", ClippedAdamW)):
        words = rf"{name}.*elementwise=\[{name}\].*whole=\[{name}\]"
        with pytest.raises(TypeError, match=words):
            SYSTEMS[system](of_class)
    assert made[0].log == []
    assert not made[0].state
    for param in (p for group in made[0].param_groups for p in group["params"]):
        assert type(param) is nn.Parameter
    for known, text in (
        (torch.optim.LBFGS, "several weights together"),
        (torch.optim.SparseAdam, "dense gradients"),
    ):
        with pytest.raises(TypeError, match=f"{known.__name__} .*{text}"):
            SYSTEMS[system](known)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "known better": ({"elementwise": [torch.optim.Muon]}, ValueError, "names Muon, which needs"),
    "together": ({"whole": [torch.optim.LBFGS]}, ValueError, "names LBFGS, which updates several"),
    "no list": ({"whole": Factored}, TypeError, "whole= must be a list of classes"),
    "an optimizer": ({"elementwise": ["Factored"]}, TypeError, "must be a list of classes"),
    "both": ({"elementwise": [Late], "whole": [Late]}, ValueError, "Late is in elementwise= and"),
}  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
@in_ranks(2)
def test_wrong_words(rank: int, system: str) -> None:
    for words, kind, text in WRONG.values():
        with pytest.raises(kind, match=text):
            SYSTEMS[system](torch.optim.SGD, **words)


def word_of(kind: Any) -> dict[str, Any]:
    """The user's word wins: a class that is elementwise may be updated as a whole."""
    return {"elementwise": [kind]} if kind is Smooth else {"whole": [kind]}


@pytest.mark.parametrize("kind", [Factored, Late, Smooth, torch.optim.AdamW])
@pytest.mark.parametrize("system", [*ZERO, "offload"])
@in_ranks(2)
def test_words(rank: int, system: str, kind: Any) -> None:
    optimizer: Any = lambda model: kind(model.parameters())  # noqa: E731
    row = Row(five_steps, partial(network, 7), optimizer, options=word_of(kind))
    check(rank, row, system)


@pytest.mark.parametrize("kind", [Factored, Smooth, torch.optim.AdamW])
@in_ranks(2)
def test_words_where_a_rank_has_a_part_of_the_model(rank: int, kind: Any) -> None:
    for system in ("pp", "ep", "parameter server"):
        SYSTEMS[system](kind, **word_of(kind))
    if kind is not Smooth:
        with pytest.raises(TypeError, match=r"needs full weights, but 0.weight is split"):
            SYSTEMS["tp"](kind, **word_of(kind))
    else:
        SYSTEMS["tp"](kind, **word_of(kind))


@pytest.mark.parametrize("system", SYSTEMS)
@in_ranks(2)
def test_tensors_beside_the_state(rank: int, system: str) -> None:
    """Refused where copies step on parts of weights, and not where the optimizer itself steps."""
    word = {"elementwise": [WithTable]}
    if system in ("tp", "pp", "ep", "parameter server"):
        SYSTEMS[system](WithTable, **word)
        return
    with pytest.raises(TypeError, match="WithTable keeps tensors, a module or an optimizer"):
        SYSTEMS[system](WithTable, **word)


@in_ranks(2)
def test_models_that_are_split_by_hand(rank: int) -> None:
    """https://github.com/hpcaitech/ColossalAI/issues/5484: the first step asks."""

    class Unknown(Smooth):
        pass

    class Matrices(Factored):
        pass

    stage = Pipeline([nn.Linear(8, 8), nn.Linear(8, 8)], nn.functional.mse_loss).module
    for model in (split_model(), expert_model(), stage):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        for of_class in (Unknown, Matrices, ClippedAdamW):
            with pytest.raises(
                TypeError, match=rf"declare_optimizers\(elementwise=\[{of_class.__name__}\]\)"
            ):
                of_class(model.parameters()).step()
        with pytest.raises(TypeError, match="LBFGS updates several weights together"):
            torch.optim.LBFGS(model.parameters()).step(float)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        torch.optim.AdamW(model.parameters()).step()
    declare_optimizers(elementwise=[Unknown], whole=[Matrices])
    for model in (split_model(), expert_model(), stage):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        Unknown(model.parameters()).step()
    Matrices(stage.parameters()).step()
    model = split_model()
    with pytest.raises(TypeError, match="Matrices needs full weights, and this rank has a part"):
        Matrices(model.parameters()).step()
    Matrices(nn.Linear(8, 8).parameters()).step()  # of no part


@in_ranks(2)
def test_layers_that_are_split_by_hand_beside_a_mesh_of_data(rank: int) -> None:
    """The mesh splits nothing, and does not answer for the layers."""
    for of_class in (Factored, torch.optim.Adafactor):
        model, train = by_mesh(of_class, make=split_model, dp=2)
        before = [param.detach().clone() for param in model.parameters()]
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with pytest.raises(
            TypeError, match=f"{of_class.__name__}.*(declare_optimizers|full weights)"
        ):
            train.optimizer.step()
        assert all_equal(before, [*model.parameters()])


@in_ranks(2)
def test_a_function_that_returns_one_optimizer(rank: int) -> None:
    model, made = network(), []

    def kind(params: Any) -> Any:
        made.append(torch.optim.SGD(params, 0.1))
        return made[0]

    _, train = by_mesh(kind, make=lambda: model, pp=2)
    train.step(torch.ones(4, 8), torch.ones(4, 3))
    train.optimizer.step()


@in_ranks(2)
def test_where_only_data_is_split_nothing_is_asked(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/103910: ranks with one seed draw alike."""

    class Noisy(Smooth):
        def update(self, group: dict[str, Any], param: Any) -> None:
            param.add_(torch.randn_like(param), alpha=-group["lr"])

    model, train = by_mesh(Noisy, dp=2)
    torch.manual_seed(1)
    train.step(torch.ones(2, 8), torch.ones(2, 3))
    train.optimizer.step()
    before = dict(network().named_parameters())
    torch.manual_seed(1)
    for name, value in before.items():
        expected = value - 0.02 * torch.randn_like(value)
        torch.testing.assert_close(full_weights(model)[name], expected)


def test_the_users_optimizer_is_not_stepped(tmp_path: Path) -> None:
    """What it keeps beside its state, it keeps for its own steps."""
    model = network()
    given = Factored(model.parameters())
    seed = torch.get_rng_state()
    zero.predict_memory(model, given, 2, world_size=2, whole=[Factored])
    offload.Offloaded(given, to="nvme", path=tmp_path, whole=[Factored])
    assert given.log == []
    assert torch.equal(torch.get_rng_state(), seed)


@pytest.mark.parametrize(
    ("kind", "num_states"),
    [
        (torch.optim.Adagrad, 1),  # before its first step, in which it expects them
        (partial(torch.optim.Adam, weight_decay=0.1, capturable=True), 2),
        (partial(torch.optim.SGD, momentum=0.9), 1),
        (torch.optim.SGD, 0),
    ],
)
def test_states_that_are_predicted(kind: Any, num_states: int) -> None:
    model = network()
    num_elems = sum(param.numel() for param in model.parameters())
    found = zero.predict_memory(model, kind(model.parameters()), 0, world_size=1)
    assert found.states == 4 * num_states * num_elems


OPTIONS: dict[str, tuple[str, dict[str, Any], bool | str]] = {
    "plain": ("pytorch_optimizer.optimizer.adan.Adan", {"max_grad_norm": 0.0}, False),
    "cautious": ("pytorch_optimizer.optimizer.lion.Lion", {"cautious": True}, True),
    "norm of all": ("pytorch_optimizer.optimizer.adan.Adan", {"max_grad_norm": 1.0}, "together"),
    "worst": ("pytorch_optimizer.optimizer.lamb.Lamb", {"pre_norm": True}, "together"),
    "rounding": ("torchao.optim.adam.AdamW8bit", {"bf16_stochastic_round": True}, "random numbers"),
    "by size": ("transformers.optimization.Adafactor", {}, True),
    "other": ("schedulefree.wrapper.SGDScheduleFreeClosure", {}, "needs or keeps more than"),
}


@pytest.mark.parametrize("place", ["group", "attribute"])
@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_known_classes(case: str, place: str) -> None:
    """Their defaults, and options that couple elements or weights."""
    name, options, expected = OPTIONS[case]
    module, _, kind = name.rpartition(".")
    made: Any = type(kind, (torch.optim.SGD,), {"__module__": module})(
        [nn.Parameter(torch.ones(2))], 0.1
    )
    if place == "group":
        made.param_groups[0].update(options)
    else:
        vars(made).update(options)
    if isinstance(expected, bool):
        assert needs_whole(made) is expected
        return
    with pytest.raises(TypeError, match=f"{kind} .*{expected}"):
        needs_whole(made)


def test_every_class_of_torch_is_known() -> None:
    classes = {
        each
        for each in vars(torch.optim).values()
        if inspect.isclass(each) and issubclass(each, torch.optim.Optimizer)
    } - {torch.optim.Optimizer}
    assert {each.__name__ for each in classes if known_kind(each) is None} == set()
    whole = {each.__name__ for each in classes if known_kind(each) is Kind.WEIGHTS}
    assert whole == {"Adafactor", "Muon"}
    assert needs_whole(torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]))
