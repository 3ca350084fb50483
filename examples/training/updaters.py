"""What happens to the weights of one rank between two steps: the interface, and torch's optimizers.

``Lomo`` and ``Zero`` have files of their own. A new system is a sharding, an updater and a line
in ``systems.build_system``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ringcomm.parallel import offload

# moments["exp_avg"]["layers.0.wq.weight"]: optimizer state by torch's own key, then by weight.
Moments = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Offload:
    """Where optimizer state goes: memory of the host, or files in a folder."""

    to: Literal["cpu", "nvme"]
    path: Path | None


def live_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of memory that the tensors keep alive; storage that several share counts once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Updater(Protocol):
    """Changes the weights of a model by their gradients; one object per replica."""

    grad_bytes: int
    """Bytes of gradients alive at the fullest moment of the last ``measured`` step."""
    measured: bool
    """While true, each step measures ``grad_bytes`` (it costs some 0.1 ms)."""

    def begin(self, lr: float) -> None:
        """Called before the backward pass."""

    def finish(self) -> None:
        """Called after the backward pass; the weights are new when it returns."""

    def state_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds."""

    def weights(self) -> dict[str, Tensor]:
        """This rank's weights by name; whole where the updater itself has them in shards."""

    def moments(self) -> Moments:
        """Optimizer state by name of weight, in the shape of ``weights``."""

    def load_moments(self, moments: Moments, num_updates: int) -> None:
        """Puts saved state in place; the inverse of ``moments``."""

    def close(self) -> None:
        """Lets files go; there are no more steps."""


def make_optimizer(
    kind: str, params: list[Any], where: Offload | None = None
) -> torch.optim.Optimizer:
    """``adamw`` (fused: one pass over memory) or ``sgd`` (no momentum), lr set at each step."""
    if kind not in ("adamw", "sgd"):
        raise ValueError(f"no torch optimizer {kind!r}: adamw or sgd")
    adamw: dict[str, Any] = {"betas": (0.9, 0.99), "weight_decay": 0.01}
    if where is not None:
        if kind == "adamw":
            return offload.AdamW(params, to=where.to, path=where.path, **adamw)
        return offload.SGD(params, lr=1.0, to=where.to, path=where.path)
    if kind == "adamw":
        return torch.optim.AdamW(params, fused=True, **adamw)
    return torch.optim.SGD(params, lr=1.0)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step, for all weights."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def set_optimizer_state(
    optimizer: torch.optim.Optimizer, param: Tensor, state: dict[str, Tensor], num_updates: int
) -> None:
    """Gives ``param`` the state (copied) that it had after ``num_updates`` steps of AdamW."""
    entry: dict[str, Any] = {
        key: value.to(param.device, copy=True).view_as(param) for key, value in state.items()
    }
    if entry:
        entry["step"] = torch.tensor(float(num_updates), device=param.device)
        if isinstance(optimizer, offload.AdamW | offload.SGD):
            optimizer.set_state_of(param, entry)
        else:
            optimizer.state[param] = entry


class TorchUpdater:
    """An ordinary optimizer behind ordinary gradients; see ``Updater``."""

    def __init__(
        self, named_params: list[tuple[str, nn.Parameter]], kind: str, where: Offload | None = None
    ) -> None:
        self._named = named_params
        self._optimizer = make_optimizer(kind, [p for _, p in named_params], where)
        self.grad_bytes = 0
        self.measured = False

    def begin(self, lr: float) -> None:
        """See ``Updater``."""
        set_lr(self._optimizer, lr)

    def finish(self) -> None:
        """See ``Updater``; the gradients are gone afterwards."""
        if self.measured:
            self.grad_bytes = live_bytes(p.grad for _, p in self._named)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state_bytes(self) -> int:
        """See ``Updater``."""
        return live_bytes(
            value for entry in self._optimizer.state.values() for value in entry.values()
        )

    def weights(self) -> dict[str, Tensor]:
        """See ``Updater``."""
        return {name: param.detach() for name, param in self._named}

    def _state_of(self, param: nn.Parameter) -> dict[str, Any]:
        if isinstance(self._optimizer, offload.AdamW | offload.SGD):
            return self._optimizer.state_of(param)
        return self._optimizer.state.get(param, {})

    def moments(self) -> Moments:
        """See ``Updater``."""
        found: Moments = {}
        for name, param in self._named:
            for key, value in self._state_of(param).items():
                if key != "step":
                    found.setdefault(key, {})[name] = value
        return found

    def load_moments(self, moments: Moments, num_updates: int) -> None:
        """See ``Updater``."""
        for name, param in self._named:
            state = {key: by_name[name] for key, by_name in moments.items()}
            set_optimizer_state(self._optimizer, param, state, num_updates)

    def close(self) -> None:
        """See ``Updater``."""
        if isinstance(self._optimizer, offload.AdamW | offload.SGD):
            self._optimizer.close()
