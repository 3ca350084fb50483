"""Optimizers of users for tests, most of them of whole weights; and the steps of AdaLomo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringcomm.parallel import declare_optimizers


def elementwise(kind: Any) -> Any:
    """Declares a class whose step treats each element by itself."""
    declare_optimizers(elementwise=[kind])
    return kind


def whole(kind: Any) -> Any:
    """Declares a class that needs full weights."""
    declare_optimizers(whole=[kind])
    return kind


class EachWeight(torch.optim.Optimizer):
    """Whose step is update() of each weight that has a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(group, param)

    def update(self, group: dict[str, Any], param: Any) -> None:
        raise NotImplementedError


@whole
class Muon64(EachWeight):
    """Jordan et al. 2024, whose Newton-Schulz iterations do not round to 16 bits."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": 0.1})

    def direction(self, mean: Tensor) -> Tensor:
        return orthogonal(mean)

    def update(self, group: dict[str, Any], param: Any) -> None:
        mean = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
        mean.lerp_(param.grad, 1 - group["momentum"])
        direction = self.direction(param.grad.lerp(mean, group["momentum"]))
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(direction, alpha=group["lr"])


@whole
class SmoothMuon(Muon64):
    """With s / (s + 0.05) for the singular values s: rounded gradients give nearly the same."""

    def direction(self, mean: Tensor) -> Tensor:
        left, values, right = torch.linalg.svd(mean.double(), full_matrices=False)
        return (left * (values / (values + 0.05)) @ right).to(mean.dtype)


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly its nearest matrix with orthogonal rows or columns, in its dtype."""
    is_high = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_high else matrix).double()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    x = x.T if is_high else x
    return (max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5 * x).to(matrix.dtype)


@whole
class Kron(EachWeight):
    """A preconditioner of rows and one of columns, as users write Shampoo; none of large sizes."""

    largest = 100

    def __init__(self, params: Any, lr: float | None) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, group: dict[str, Any], param: Any) -> None:
        grad = update = param.grad.view(len(param), -1)
        start = [0.1 * torch.eye(size if size <= self.largest else 1) for size in grad.shape]
        sums = self.state[param].setdefault("sums", start)
        for number, part in enumerate((grad, grad.T)):
            if len(sums[number]) == len(part):
                sums[number] += part @ part.T
                root = torch.linalg.inv(torch.linalg.cholesky(sums[number]))
                update = update @ root.T if number else root @ update
        param.sub_((group["lr"] or 0.02) * update.view_as(param))


@elementwise
class Averaged(torch.optim.Optimizer):
    """Defazio et al. 2024: gradients at an interpolation of the iterates and of their mean."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9, "k": 0, "train_mode": False})

    def _move(self, *, is_training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != is_training:
                weight = 1 - group["beta"] if is_training else 1 - 1 / group["beta"]
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.data.lerp_(self.state[param]["z"], weight)
            group["train_mode"] = is_training

    def train(self) -> None:
        self._move(is_training=True)

    def eval(self) -> None:
        self._move(is_training=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() first")
            group["k"] += 1
            weight = 1 / group["k"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], self._direction(param.grad)
                state.setdefault("z", param.clone())
                param.lerp_(state["z"], weight)
                param.sub_(grad, alpha=group["lr"] * (1 - group["beta"] * (1 - weight)))
                state["z"].sub_(grad, alpha=group["lr"])

    def _direction(self, grad: Tensor) -> Tensor:
        return grad


@elementwise
class SmoothLion(EachWeight):
    """A user's optimizer: Lion with x / (|x| + eps) for the sign, which rounding cannot flip."""

    def __init__(self, params: Any, lr: float = 0.02, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.95)})

    def update(self, group: dict[str, Any], param: Any) -> None:
        fast, slow = group["betas"]
        average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
        update = average.lerp(param.grad, 1 - fast)
        average.lerp_(param.grad, 1 - slow)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(group["lr"] * update / (update.abs() + 1e-2))


class AdaLomoOracle(torch.optim.Optimizer):
    """AdaLomo's docstring, line by line, in float64."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.05, "weight_decay": 0.01})
        self.num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        beta = 1 - self.num_steps**-0.8
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, beta, group["lr"], group["weight_decay"])

    def _step(self, param: Tensor, beta: float, lr: float, weight_decay: float) -> None:
        assert param.grad is not None
        state, grad, weight = self.state[param], param.grad.double(), param.detach().double()
        squares = grad.square() + 1e-30
        if grad.dim() == 2:
            means = {"row": squares.mean(1, keepdim=True), "column": squares.mean(0, keepdim=True)}
        else:
            means = {"each": squares}
        for name, mean in means.items():
            old = state.get(name, torch.zeros_like(mean))
            state[name] = beta * old + (1 - beta) * mean
        if grad.dim() == 2:
            moment = state["row"] * state["column"] / state["row"].mean()
        else:
            moment = state["each"]
        update = grad / moment.sqrt()
        update /= max(1.0, float(update.square().mean().sqrt()))
        size = lr * max(1e-3, float(weight.square().mean().sqrt()))
        param.data.copy_((1 - size * weight_decay) * weight - size * update)


def by_dimensions(
    groups: list[dict[str, Any]], matrices: Any, others: Any
) -> list[torch.optim.Optimizer]:
    """An optimizer of the matrices of parameter groups, and one of the other weights."""

    def part(*, is_2d: bool) -> list[dict[str, Any]]:
        found = [
            {**group, "params": [p for p in group["params"] if (p.dim() == 2) == is_2d]}
            for group in groups
        ]
        return [group for group in found if group["params"]]

    return [matrices(part(is_2d=True)), others(part(is_2d=False))]
