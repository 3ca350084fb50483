"""Classes of optimizers as users write them, for test_classes.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rows import muon
from torch import Tensor, nn
from whole_optimizers import Averaged, EachWeight, Kron, Muon64, elementwise, orthogonal, whole


@elementwise
class Lion(EachWeight):
    """Chen et al. 2023, as users write it: an argument without default, a number as `step`."""

    def __init__(self, params: Any, lr: float, *, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "num_calls": 0})
        self.decay = decay

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["num_calls"] += 1
        return super().step(closure)

    def update(self, group: dict[str, Any], param: Any) -> None:
        state, (first, second) = self.state[param], group["betas"]
        lr = group["lr"] / group["num_calls"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param), skipped=None)
        state["step"] += 1
        param.mul_(1 - lr * self.decay)
        mean = state["exp_avg"]
        param.add_(torch.tanh(30 * mean.lerp(param.grad, 1 - first)), alpha=-lr)
        mean.lerp_(param.grad, 1 - second)


@whole
class Counting(Muon64):
    """Counts its steps in a group and, as a number and as a tensor, in a state; replaces a state,
    keeps one of integers, one in a list, and one without elements."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["num_calls"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["num_calls"] += 1
        return super().step(closure)

    def update(self, group: dict[str, Any], param: Any) -> None:
        state = self.state[param]
        if not state:
            state.update(step=torch.tensor(0.0), num=0, rows=[torch.zeros(len(param))])
            state.update(signs=torch.zeros_like(param, dtype=torch.int8))
            state.update(mean=torch.zeros_like(param), none=torch.zeros(0))
            state.update(odd=torch.zeros_like(param), even=torch.zeros_like(param))
        state["step"] += 1
        state["num"] += 1
        # Two that change places, and one that is new.
        state["odd"], state["even"] = state["even"], state["odd"]
        state["odd"].add_(param.grad)
        param.sub_(state["odd"], alpha=0.01)
        state["mean"] = 0.9 * state["mean"] + param.grad
        state["rows"][0].mul_(0.9).add_(param.grad.square().sum(1))
        state["signs"] += param.grad.sign().to(torch.int8)
        scale = (state["rows"][0][:, None] + 1e-3).rsqrt() + 0.01 * state["signs"]
        param.sub_(state["mean"] * scale, alpha=group["lr"] / group["num_calls"])


@elementwise
class Damped(torch.optim.AdamW):
    """A subclass whose step is not AdamW's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.clamp_(-0.1, 0.1)
        super().step(closure)


@whole
class Lamb(torch.optim.SGD):
    """By the norm of a weight's gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad /= param.grad.norm() + 1e-9
        super().step(closure)


@whole
class Rows(torch.optim.SGD):
    """With a state of a weight's rows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["rows"] = torch.zeros(len(param))


@whole
class MuonWithAdam(EachWeight):
    """One class for both, by a flag of its groups, as Muon's first implementation has it."""

    def __init__(self, model: nn.Module) -> None:
        groups = [
            {"params": [p for p in model.parameters() if (p.dim() == 2) == is_2d], "is_2d": is_2d}
            for is_2d in (True, False)
        ]
        super().__init__(groups, {"lr": 0.02})

    def update(self, group: dict[str, Any], param: Any) -> None:
        state = self.state[param]
        mean = state.setdefault("mean", torch.zeros_like(param))
        mean.lerp_(param.grad, 0.1)
        if group["is_2d"]:
            assert mean.dim() == 2, "Muon takes matrices"
            param.sub_(orthogonal(mean), alpha=group["lr"])
            return
        square = state.setdefault("square", torch.zeros_like(param))
        square.lerp_(param.grad.square(), 0.05)
        param.sub_(group["lr"] * mean / (square.sqrt() + 1e-3))


@whole
class NoRate(Kron):
    """Without a learning rate, and without a step of an empty group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, None)
        self.param_groups[0]["num_steps"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert max(param.numel() for param in group["params"]) > 0
            group["num_steps"] += 1
        return super().step(closure)


@whole
class Fragile(Muon64):
    """That raises for one weight."""

    def direction(self, mean: Tensor) -> Tensor:
        if mean.shape == (3, 13) and mean.abs().sum() < 1e9:
            raise ArithmeticError("no root of this matrix")
        return super().direction(mean)


@elementwise
class Bits(EachWeight):
    """Whose states are integers and booleans."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def update(self, group: dict[str, Any], param: Any) -> None:
        state, is_up = self.state[param], param.grad > 0
        signs = state.setdefault("signs", torch.zeros_like(param, dtype=torch.uint8))
        flips = state.setdefault("flips", torch.zeros_like(param, dtype=torch.bool))
        state["signs"] = (signs << 1) | is_up.byte()
        state["flips"] = flips ^ is_up
        factor = torch.where(state["flips"], 1.0, -0.5) * (1 + (state["signs"] & 3))
        param.sub_(group["lr"] * factor * param.grad)


@whole
class AveragedRows(Averaged):
    """Of whole weights."""

    def _direction(self, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1e-9)


# ---- what classes read and keep


class Plain(EachWeight):
    """Gradient descent; subclasses write it as users do."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.05, **options})

    def update(self, group: dict[str, Any], param: Any) -> None:
        param.sub_(group["lr"] * param.grad)


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
            super().update(group, param)


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


@elementwise
class First(Plain):
    """That cannot step where its first group has no weights."""

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["params"][0].dim()
        return super().step()


@torch.compile(backend="eager", fullgraph=True, dynamic=True)
def lion(param: Tensor, grad: Tensor, mean: Tensor, rate: Tensor) -> None:
    param.sub_(rate * torch.tanh(mean.lerp_(grad, 0.1)))


@elementwise
class Compiled(Plain):
    def update(self, group: dict[str, Any], param: Any) -> None:
        mean = self.state[param].setdefault("mean", torch.zeros_like(param))
        rate = torch.full_like(param, group["lr"])
        lion(*(x.detach().view(-1) for x in (param, param.grad, mean, rate)))


@elementwise
class ByName(Plain):
    """With another rate for weights of some names, as Adam-mini's and Muon's variants."""

    def update(self, group: dict[str, Any], param: Any) -> None:
        number = next(i for i, each in enumerate(group["params"]) if each is param)
        rate = 3 if "bias" in group["param_names"][number] else 1
        param.sub_(group["lr"] * rate * param.grad)


# ---- what is refused


class Joint(torch.optim.SGD):
    """By the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            grads = [param.grad for param in group["params"] if param.grad is not None]
            torch._foreach_div_(grads, nn.utils.get_total_norm(grads))
        super().step(closure)


class Reduced(Lamb):
    """That sums over ranks itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        dist.all_reduce(torch.ones(1))
        super().step(closure)


@elementwise
class Shadow(torch.optim.SGD):
    """With tensors that are no states."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.shadow = [param.detach().clone() for param in self.param_groups[0]["params"]]


@elementwise
class Wrapper(torch.optim.SGD):
    """Around another optimizer, whose step would be the whole weights'."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.optimizer = torch.optim.SGD(self.param_groups[0]["params"], lr)


class ByRow(Plain):
    """Whose state has one element for each row, so that its step is not elementwise."""

    def update(self, group: dict[str, Any], param: Any) -> None:
        rows = self.state[param].setdefault("rows", torch.zeros(len(param)))
        rows += param.grad.reshape(len(param), -1).sum(1)
        super().update(group, param)


class Counts(Plain):
    """With a state of no weight, as MADGRAD."""

    def update(self, group: dict[str, Any], param: Any) -> None:
        states: Any = self.state
        count = states.setdefault("k", torch.zeros(1))
        count += 1
        param.sub_(group["lr"] / float(count) * param.grad)


# Those of matrices have AdamW for the other weights.
OFFLOADED: dict[str, Callable[[Any], Any]] = {
    "Muon64": muon,
    "Muon": partial(muon, kind=partial(torch.optim.Muon, lr=0.02)),
    "Adafactor": partial(muon, kind=partial(torch.optim.Adafactor, lr=0.02)),
    "Counting": partial(muon, kind=Counting),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), 0.01, eps=1e-3),
}
