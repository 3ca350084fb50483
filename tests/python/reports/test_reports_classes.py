"""What users of other libraries reported of optimizers' classes: what they read, keep and hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_process import WIDTH, network, pair, train
from ranks import in_ranks
from torch import Tensor, nn
from whole_optimizers import Muon64, by_dimensions

from ringcomm.parallel import zero

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), 0.02, eps=1e-3)


def muon(model: Any) -> Any:
    groups = [{"params": [*model.parameters()]}]
    return by_dimensions(groups, Muon64, lambda own: torch.optim.AdamW(own, 0.02, eps=1e-3))


class Plain(torch.optim.Optimizer):
    """Gradient descent; subclasses write it as users do."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.05, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(group, param)

    def update(self, group: dict[str, Any], param: Any) -> None:
        raise NotImplementedError


class Attributes(Plain):
    """That weights may have a rate of their own."""

    def update(self, group: dict[str, Any], param: Any) -> None:
        param.sub_(group["lr"] * getattr(param, "rate", 1.0) * param.grad)


class Trainable(Plain):
    """That asks again which weights are trained."""

    def update(self, group: dict[str, Any], param: Any) -> None:
        if param.requires_grad and isinstance(param, nn.Parameter):
            param.sub_(group["lr"] * param.grad)


class SetsData(Plain):
    def update(self, group: dict[str, Any], param: Any) -> None:
        param.data = param.data - group["lr"] * param.grad


class SetsWholeData(Plain):
    def update(self, group: dict[str, Any], param: Any) -> None:
        param.data = param.data - group["lr"] * param.grad / (1 + param.grad.norm())


class Lists(Plain):
    """With a list of tensors of the weight's shape as state, and nothing."""

    def update(self, group: dict[str, Any], param: Any) -> None:
        state, grad = self.state[param], param.grad.clone()
        state["last"] = [*state.get("last", []), grad][-2:]
        state["nothing"] = None
        param.sub_(group["lr"] * sum(state["last"]))


@torch.compile(backend="eager", fullgraph=True, dynamic=True)
def lion(param: Tensor, grad: Tensor, mean: Tensor, rate: Tensor) -> None:
    param.sub_(rate * torch.tanh(mean.lerp_(grad, 0.1)))


class First(Plain):
    """That cannot step where its first group has no weights."""

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["params"][0].dim()
        return super().step()

    def update(self, group: dict[str, Any], param: Any) -> None:
        param.sub_(group["lr"] * param.grad)


@STAGES
@in_ranks(2)
def test_an_optimizer_without_a_gradient(rank: int, stage: int) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/7869, and one that takes parts of weights."""

    def make(model: Any) -> Any:
        model[0].requires_grad_(False)
        rest = [*model[2].parameters(), *model[4].parameters()]
        return [First(model[0].parameters()), torch.optim.SGD(rest, 0.1)]

    both = pair(stage, make)
    both.train(range(2), rank)
    for model in (both.plain, both.model):
        model[0].requires_grad_(True)
    both.train(range(2, 4), rank)


class Compiled(Plain):
    def update(self, group: dict[str, Any], param: Any) -> None:
        mean = self.state[param].setdefault("mean", torch.zeros_like(param))
        rate = torch.full_like(param, group["lr"])
        lion(*(x.detach().view(-1) for x in (param, param.grad, mean, rate)))


@pytest.mark.parametrize("kind", [Attributes, Trainable, SetsData, SetsWholeData, Lists])
@STAGES
@in_ranks(2)
def test_what_steps_see_of_weights(rank: int, stage: int, kind: Any) -> None:
    """https://github.com/pytorch/pytorch/issues/136929, https://github.com/NVIDIA/Megatron-LM/pull/7230:
    attributes; https://github.com/facebookresearch/fairscale/pull/721: requires_grad;
    https://github.com/facebookresearch/fairscale/pull/537: states that are no tensor."""

    def make(model: Any) -> Any:
        model[0].weight.rate, model[2].bias.rate = 3.0, 0.1
        return kind(model.parameters())

    both = pair(stage, make, num_steps_before=1)
    both.train(range(4), rank)


@in_ranks(2)
def test_compiled_updates(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/120814: that take no part in a trial as a graph."""
    pair(2, lambda model: Compiled(model.parameters())).train(range(2), rank)


class Counts(Plain):
    """With a state of no weight, as MADGRAD."""

    def update(self, group: dict[str, Any], param: Any) -> None:
        states: Any = self.state
        count = states.setdefault("k", torch.zeros(1))
        count += 1
        param.sub_(group["lr"] / float(count) * param.grad)


@pytest.mark.parametrize("whole", [set(), {Counts}])
@in_ranks(2)
def test_a_state_of_no_weight_is_refused(rank: int, whole: Any) -> None:
    """https://github.com/facebookresearch/fairscale/pull/343: it would begin anew in each step."""
    model = network()
    with pytest.raises(TypeError, match="a state of no weight, 'k' of Counts"):
        zero.shard(model, Counts(model.parameters()), 1, whole=whole)


@in_ranks(3)
def test_fewer_rows_than_ranks(rank: int) -> None:
    """https://github.com/MoonshotAI/Moonlight/issues/27: a rank of stage 3 has nothing of a matrix;
    and the momentum changes between steps, as in https://github.com/karpathy/nanochat."""

    def make() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 2), nn.Tanh(), nn.Linear(2, 3, bias=False))

    both = pair(3, muon, make)
    for step in range(3):
        for each in (*both.given, both.optimizer):
            for group in each.param_groups:
                group.update({"momentum": 0.85 + 0.05 * step} if "momentum" in group else {})
        both.train(range(step, step + 1), rank, 3)


class ByName(torch.optim.Optimizer):
    """With another rate for weights of some names, as Adam-mini's and Muon's variants."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param, name in zip(group["params"], group["param_names"], strict=True):
                if param.grad is not None:
                    param.sub_(group["lr"] * (3 if "bias" in name else 1) * param.grad)


@STAGES
@in_ranks(2)
def test_names_of_weights(rank: int, stage: int) -> None:
    """https://github.com/hiyouga/LlamaFactory/issues/5303, https://github.com/pytorch/pytorch/pull/134107:
    optimizers of named_parameters(), of which ranks have some."""

    def named(model: Any) -> Any:
        model[0].weight.requires_grad_(False)
        return ByName(model.named_parameters())

    both = pair(stage, named)
    both.train(range(3), rank)
    assert both.optimizer.param_groups[0]["param_names"][:2] == ["0.weight", "0.bias"]
    model = network()
    matrices = [(name, param) for name, param in model.named_parameters() if param.dim() == 2]
    others = torch.optim.AdamW([param for param in model.parameters() if param.dim() != 2])
    with pytest.raises(ValueError, match="named parameters to all"):
        zero.shard(model, [Muon64(matrices), others], stage)
    zero.shard(model, adamw(model), stage)  # nothing has been changed


@STAGES
@in_ranks(2)
def test_hooks_of_saving_and_loading(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/pull/105953: those of the given optimizer move."""
    model, seen = network(), []
    given = adamw(model)

    def replace(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append("replace")
        return {**state, "by": "a hook"}

    given.register_state_dict_post_hook(replace)
    given.register_load_state_dict_pre_hook(lambda _, state: seen.append(state["by"]))
    optimizer = zero.shard(model, given, stage)
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after"))
    train(model, optimizer, range(1), rank, 2)
    seen.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "replace", "a hook", "after"]


@pytest.mark.parametrize("kinds", [(1,), (2, 1), (4, 1)])
@in_ranks(2)
def test_states_are_even_for_weights_of_any_dimensions(rank: int, kinds: Any) -> None:
    """As with the usual groups of matrices and of biases: half the elements on each rank."""
    weights = [nn.Parameter(torch.ones([6] * kind)) for kind in kinds]
    model = nn.ParameterList(weights)
    rmsprop = torch.optim.RMSprop([{"params": [weight]} for weight in weights])
    optimizer = zero.shard(model, rmsprop, 1)
    torch.stack([weight.square().sum() for weight in weights]).sum().backward()
    optimizer.step()
    num_elems = sum(weight.numel() for weight in weights)
    assert sum(state.numel() for state in optimizer.state_tensors()) == num_elems // 2
