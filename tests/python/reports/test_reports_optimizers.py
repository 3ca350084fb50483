"""What users of other libraries reported of Muon, several optimizers, and schedule-free ones; what
classes of optimizers read, keep and hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from full_states import full_weights
from one_process import WIDTH, muon, network, same, train
from one_process import pair as of_one_process
from ranks import in_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from whole_optimizers import Averaged, EachWeight, Muon64, elementwise, orthogonal, whole

from ringcomm.parallel import get_state_dict as get_whole_state
from ringcomm.parallel import offload, zero
from ringcomm.parallel import set_state_dict as set_whole_state

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


@whole
class MuonWithAdam(EachWeight):
    """One class for both, by a flag of its groups, as Muon's first implementation has it."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    def update(self, group: dict[str, Any], param: Any) -> None:
        state = self.state[param]
        mean = state.setdefault("mean", torch.zeros_like(param))
        mean.lerp_(param.grad, 0.1)
        if group["use_muon"]:
            assert mean.dim() == 2, "Muon takes matrices"
            param.sub_(orthogonal(mean), alpha=group["lr"])
            return
        square = state.setdefault("square", torch.zeros_like(param))
        square.lerp_(param.grad.square(), 0.05)
        param.sub_(group["lr"] * mean / (square.sqrt() + 1e-3))


@STAGES
@in_ranks(2)
def test_one_class_with_matrices_and_others(rank: int, stage: int) -> None:
    """https://github.com/KellerJordan/Muon/issues/45, https://github.com/deepspeedai/DeepSpeed/pull/7509:
    parts of a matrix have one dimension."""
    models = network(), network()
    made = []
    for model in models:
        groups: list[dict[str, Any]] = []
        for is_2d in (True, False):
            params = [param for param in model.parameters() if (param.dim() == 2) == is_2d]
            groups.append({"params": params, "use_muon": is_2d, "lr": 0.02})
        made.append(MuonWithAdam(groups))
    train(models[0], made[0], range(4))
    train(models[1], zero.shard(models[1], made[1], stage), range(4), rank, 2)
    same(full_weights(models[1]), full_weights(models[0]))


def directions(rank: int, stage: int, options: dict[str, Any], on_meta: bool) -> list[float]:
    """The singular values of an update of torch's Muon, as shares of the learning rate."""
    with torch.device("meta" if on_meta else "cpu"):
        model: Any = nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 3)
        )
    first = model[0].weight
    muon = torch.optim.Muon([first], 0.5, weight_decay=0.0)
    rest = torch.optim.AdamW([param for param in model.parameters() if param is not first])
    optimizer = zero.shard(model, [muon, rest], stage, **options)
    before = full_weights(model)["0.weight"].float()
    train(model, optimizer, range(1), rank, 2)
    update = (before - full_weights(model)["0.weight"].float()) / 0.5
    return torch.linalg.svdvals(update).tolist()


@pytest.mark.parametrize(
    ("stage", "options", "on_meta"),
    [
        (1, {"param_dtype": torch.bfloat16}, False),
        (2, {}, True),
        (2, {"param_dtype": torch.bfloat16}, True),
        (3, {"param_dtype": torch.bfloat16}, False),
        (3, {}, True),
    ],
)
def test_muon_is_not_skipped_in_silence(stage: int, options: dict[str, Any], on_meta: bool) -> None:
    """https://github.com/deepspeedai/DeepSpeed/pull/8438 (weights made on the meta device),
    https://github.com/deepspeedai/DeepSpeed/pull/8442 (16 bits), which AdamW or SGD then train."""
    found = run_ranks(2, directions, stage, options, on_meta)
    assert found[0] == found[1]
    assert sum(0.4 < value < 1.6 for value in found[0]) >= WIDTH - 2, found[0]


@STAGES
@in_ranks(3)
def test_ranks_without_a_weight_save_and_load(rank: int, stage: int) -> None:
    """torch steps an optimizer that has no state: on all ranks, or on none."""
    models = network(), network()
    made = []
    for model in models:
        for param in model.parameters():
            param.requires_grad_(param is model[0].weight)
        made.append(zero.shard(model, Muon64([model[0].weight]), stage))
    train(models[0], made[0], range(2), rank, 3)
    options = StateDictOptions(full_state_dict=True, strict=False)
    values, state = get_state_dict(models[0], made[0], options=options)
    set_state_dict(
        models[1], made[1], model_state_dict=values, optim_state_dict=state, options=options
    )
    for model, optimizer in zip(models, made, strict=True):
        train(model, optimizer, range(2, 4), rank, 3)
    same(full_weights(models[1]), full_weights(models[0]), 0)


@whole
class Preconditioned(EachWeight):
    """With a list of matrices as state, no learning rate, and no step of an empty group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None, "num_steps": 0})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert max(param.numel() for param in group["params"]) > 0
            group["num_steps"] += 1
        return super().step(closure)

    def update(self, group: dict[str, Any], param: Any) -> None:
        grad = update = param.grad.view(len(param), -1)
        start = [0.1 * torch.eye(n if n <= 100 else 1) for n in grad.shape]  # none of large sizes
        sums = self.state[param].setdefault("sums", start)
        for number, part in enumerate((grad, grad.T)):
            if len(sums[number]) == len(part):
                sums[number] += part @ part.T
                root = torch.linalg.inv(torch.linalg.cholesky(sums[number]))
                update = update @ root.T if number else root @ update
        param.sub_(0.02 * update.view_as(param))


@STAGES
@in_ranks(2)
def test_states_of_several_matrices(rank: int, stage: int) -> None:
    """As SOAP's and Shampoo's; its state before zero.shard() moves, and it is saved and loaded."""
    models = network(), network(), network()
    given = [Preconditioned(model.parameters()) for model in models]
    for model, each in zip(models[:2], given, strict=False):
        train(model, each, range(1))
    optimizer = zero.shard(models[1], given[1], stage)
    train(models[0], given[0], range(1, 3))
    train(models[1], optimizer, range(1, 3), rank, 2)
    same(full_weights(models[1]), full_weights(models[0]))
    values, state = get_whole_state(models[1], optimizer, full=True)
    again = zero.shard(models[2], given[2], stage % 3 + 1)
    set_whole_state(models[2], again, values, state)
    train(models[0], given[0], range(3, 5))
    train(models[2], again, range(3, 5), rank, 2)
    same(full_weights(models[2]), full_weights(models[0]))


@whole
class Fragile(Muon64):
    """That raises for one weight."""

    def direction(self, mean: Tensor) -> Tensor:
        if mean.shape == (12, WIDTH) and mean.abs().sum() < 1e9:
            raise ArithmeticError("no root of this matrix")
        return super().direction(mean)


@STAGES
@in_ranks(2)
def test_an_error_of_one_owner_is_one_of_all(rank: int, stage: int) -> None:
    """The other ranks would wait for the weight."""
    model = network()
    matrices = [param for param in model.parameters() if param.dim() == 2]
    for param in model.parameters():
        param.requires_grad_(param.dim() == 2)
    optimizer = zero.shard(model, Fragile(matrices), stage)
    with pytest.raises((ArithmeticError, RuntimeError), match=r"no root|on another rank"):
        train(model, optimizer, range(1), rank, 2)


@STAGES
@in_ranks(2)
def test_modes_reach_through_accelerate(rank: int, stage: int) -> None:
    """https://github.com/huggingface/accelerate/issues/4159: eval() of a wrapper does nothing."""
    optimizer_module = pytest.importorskip("accelerate.optimizer")
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)
    model = network()
    made = optimizer_module.AcceleratedOptimizer(
        zero.shard(model, Averaged(model.parameters()), stage)
    )
    made.train()
    train(model, made.optimizer, range(2), rank, 2)
    trained = full_weights(model)
    made.eval()
    assert any(not torch.equal(value, trained[name]) for name, value in full_weights(model).items())
    made.train()
    same(full_weights(model), trained)


@STAGES
@in_ranks(2)
def test_saved_in_evaluation_mode(rank: int, stage: int) -> None:
    """https://github.com/facebookresearch/schedule_free/issues/22: what was saved is what is
    evaluated, and training goes on from it."""
    plain, model, again = network(), network(), network()
    given = Averaged(plain.parameters())
    optimizer = zero.shard(model, Averaged(model.parameters()), stage)
    get_whole_state(model, optimizer)  # of states that are not there yet
    for mode in ("eval", "train"):
        getattr(optimizer, mode)()
        getattr(given, mode)()
    same(full_weights(model), full_weights(plain), 0)
    train(plain, given, range(4))
    train(model, optimizer, range(2), rank, 2)
    optimizer.eval()
    evaluated = full_weights(model)
    values, state = get_whole_state(model, optimizer, full=True)
    same(values, evaluated, 0)
    resumed = zero.shard(again, Averaged(again.parameters()), stage % 3 + 1)
    resumed.train()
    set_whole_state(again, resumed, values, state)
    resumed.train()
    train(again, resumed, range(2, 4), rank, 2)
    same(full_weights(again), full_weights(plain))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("stage", [1, 2, 3, "infinity"])
@in_ranks(2)
def test_a_state_before_the_first_step_has_no_decay(rank: int, stage: Any, kind: Any) -> None:
    """https://github.com/NVIDIA/Megatron-LM/pull/5976: it is made by a step without a gradient."""
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3}
    if kind is not torch.optim.Adam:
        options["momentum"] = 0.9

    def made() -> tuple[Any, Any]:
        model = network()
        given = kind(model.parameters(), **options)
        if stage == "infinity":
            own = offload.Offloaded(given)
            return model, zero.shard(model, own, 3, offload_weights=True)
        return model, zero.shard(model, given, stage)

    alone, (first, optimizer), (again, resumed) = network(), made(), made()
    set_whole_state(again, resumed, *get_whole_state(first, optimizer, full=True))
    train(alone, kind(alone.parameters(), **options), range(3))
    train(again, resumed, range(3), rank, 2)
    same(full_weights(again), full_weights(alone), 2e-6)


# ---- what classes read, keep and hook


class Plain(EachWeight):
    """Gradient descent; subclasses write it as users do."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.05, **options})


@elementwise
class Attributes(Plain):
    """That weights may have a rate of their own."""

    def update(self, group: dict[str, Any], param: Any) -> None:
        param.sub_(group["lr"] * getattr(param, "rate", 1.0) * param.grad)


@elementwise
class Trainable(Plain):
    """That asks again which weights are trained."""

    def update(self, group: dict[str, Any], param: Any) -> None:
        if param.requires_grad and isinstance(param, nn.Parameter):
            param.sub_(group["lr"] * param.grad)


@elementwise
class SetsData(Plain):
    def update(self, group: dict[str, Any], param: Any) -> None:
        param.data = param.data - group["lr"] * param.grad


@whole
class SetsWholeData(Plain):
    def update(self, group: dict[str, Any], param: Any) -> None:
        param.data = param.data - group["lr"] * param.grad / (1 + param.grad.norm())


@whole
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


@elementwise
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

    both = of_one_process(stage, make)
    both.train(range(2), rank)
    for model in (both.plain, both.model):
        model[0].requires_grad_(True)
    both.train(range(2, 4), rank)


@elementwise
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

    both = of_one_process(stage, make, num_steps_before=1)
    both.train(range(4), rank)


@in_ranks(2)
def test_compiled_updates(rank: int) -> None:
    """https://github.com/pytorch/pytorch/issues/120814: that take no part in a trial as a graph."""
    of_one_process(2, lambda model: Compiled(model.parameters())).train(range(2), rank)


class Counts(Plain):
    """With a state of no weight, as MADGRAD."""

    def update(self, group: dict[str, Any], param: Any) -> None:
        states: Any = self.state
        count = states.setdefault("k", torch.zeros(1))
        count += 1
        param.sub_(group["lr"] / float(count) * param.grad)


@pytest.mark.parametrize("word", ["elementwise", "whole"])
@in_ranks(2)
def test_a_state_of_no_weight_is_refused(rank: int, word: Any) -> None:
    """https://github.com/facebookresearch/fairscale/pull/343: it would begin anew in each step."""
    model = network()
    words: dict[str, Any] = {word: [Counts]}
    optimizer = zero.shard(model, Counts(model.parameters()), 1, **words)
    with pytest.raises(TypeError, match="Counts has a state of no weight, 'k'"):
        train(model, optimizer, range(1), rank, 2)


@in_ranks(3)
def test_fewer_rows_than_ranks(rank: int) -> None:
    """https://github.com/MoonshotAI/Moonlight/issues/27: a rank of stage 3 has nothing of a matrix;
    and the momentum changes between steps, as in https://github.com/karpathy/nanochat."""

    def make() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 2), nn.Tanh(), nn.Linear(2, 3, bias=False))

    both = of_one_process(3, muon, make)
    for step in range(3):
        for each in (*both.given, both.optimizer):
            for group in each.param_groups:
                group.update({"momentum": 0.85 + 0.05 * step} if "momentum" in group else {})
        both.train(range(step, step + 1), rank, 3)


@elementwise
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

    both = of_one_process(stage, named)
    both.train(range(3), rank)
    assert both.optimizer.param_groups[0]["param_names"][:2] == ["0.weight", "0.bias"]
    model = network()
    matrices = [(name, param) for name, param in model.named_parameters() if param.dim() == 2]
    others = torch.optim.AdamW([param for param in model.parameters() if param.dim() != 2])
    with pytest.raises(ValueError, match="named parameters to all"):
        zero.shard(model, [Muon64(matrices), others], stage)
    zero.shard(model, torch.optim.AdamW(model.parameters()), stage)  # nothing has been changed


@STAGES
@in_ranks(2)
def test_hooks_of_saving_and_loading(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/pull/105953: those of the given optimizer move."""
    model, seen = network(), []
    given = torch.optim.AdamW(model.parameters(), 0.02, eps=1e-3)

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
