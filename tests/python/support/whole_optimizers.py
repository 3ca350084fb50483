"""Optimizers of users for the tests of ZeRO: of whole weights, and schedule-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Muon64(torch.optim.Optimizer):
    """Jordan et al. 2024, whose Newton-Schulz iterations do not round to 16 bits."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": 0.1})

    def direction(self, mean: Tensor) -> Tensor:
        return orthogonal(mean)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                mean = state.setdefault("momentum_buffer", torch.zeros_like(param))
                mean.lerp_(param.grad, 1 - group["momentum"])
                direction = self.direction(param.grad.lerp(mean, group["momentum"]))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(direction, alpha=group["lr"])


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


class Kron(torch.optim.Optimizer):
    """A preconditioner of rows and one of columns, as users write Shampoo."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad.view(len(param), -1)
                if not state:
                    state["left"] = 0.1 * torch.eye(grad.shape[0])
                    state["right"] = 0.1 * torch.eye(grad.shape[1])
                state["left"] += grad @ grad.T
                state["right"] += grad.T @ grad
                roots = [torch.linalg.inv(torch.linalg.cholesky(x)) for x in state.values()]
                param.sub_(group["lr"] * (roots[0] @ grad @ roots[1].T).view_as(param))


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


class Together:
    """Several optimizers that step together, in one process."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.optimizers = [*optimizers]

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    def train(self) -> None:
        """The mode in which schedule-free ones step."""
        for each in self.optimizers:
            if hasattr(each, "train"):
                each.train()


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
