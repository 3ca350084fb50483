"""ZeRO (Rajbhandari et al. 2020) by ``ringcomm.parallel.zero``, at any stage, and offloaded.

Per step and rank two parts of (N-1)/N of the weights travel, or three at stage 3. torch's
``ZeroRedundancyOptimizer`` has three at stage 1: all-reduced gradients, and every weight again.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringcomm.parallel import zero
from training.updaters import Moments, Offload, live_bytes, make_optimizer, set_lr
from training.wire import Wire


class Zero:
    """AdamW or SGD over shards; see ``updaters.Updater``. Collective: all ranks step together."""

    def __init__(
        self,
        model: nn.Module,
        kind: str,
        wire: Wire,
        stage: int,
        offload: Offload | None,
        group: dist.ProcessGroup | None = None,
        max_norm: float | None = None,
        num_backwards: int = 1,
    ) -> None:
        """Over the wire's ranks, or a group of some of them.

        Args:
            model: the whole one, or this rank's part.
            kind: of optimizer.
            wire: counts what a step sends.
            stage: 1, 2 or 3.
            offload: where state goes.
            group: None for the wire's.
            max_norm: the largest norm of the whole model's gradients; None for any.
            num_backwards: backward passes for each step.
        """
        group = group or wire.group
        self._model, self._wire = model, wire
        self._names = [name for name, _ in model.named_parameters()]
        options: dict[str, Any] = {} if max_norm is None else {"clip_grad_norm": max_norm}
        if offload is not None and stage == 3:
            options["offload_weights"] = True
        made = make_optimizer(kind, list(model.parameters()), offload)
        self._step_bytes = zero.predict_traffic(
            model,
            made,
            stage,
            world_size=group.size(),
            rank=group.rank(),
            num_backwards=num_backwards,
            **options,
        )
        self._optimizer = zero.shard(model, made, stage, group=group, **options)
        self._stage = stage
        self.grad_bytes = 0
        self.measured = False

    def begin(self, lr: float) -> None:
        """See ``Updater``."""
        set_lr(self._optimizer, lr)

    def finish(self) -> None:
        """See ``Updater``. What is timed as communication has the update in it."""
        if self.measured:
            self.grad_bytes = live_bytes(map(_local, self._optimizer.gradient_tensors()))
        began = time.perf_counter()
        self._optimizer.step()
        self._wire.seconds += time.perf_counter() - began
        self._wire.formula_bytes += self._step_bytes
        self._optimizer.zero_grad()

    def state_bytes(self) -> int:
        """See ``Updater``."""
        return live_bytes(map(_local, self._optimizer.state_tensors()))

    def weights(self) -> dict[str, Tensor]:
        """See ``Updater``. Collective at stage 3."""
        with self._wire.aside():
            if isinstance(self._optimizer, zero.ZeroInfinity):
                return self._optimizer.full_model_state_dict()
            return {name: _whole(param) for name, param in self._model.named_parameters()}

    def moments(self) -> Moments:
        """The state of ALL weights, gathered from the ranks. Collective."""
        found: Moments = {}
        with self._wire.aside():
            full = zero.full_state_dict(self._optimizer)
        for number, state in full["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step":
                    found.setdefault(key, {})[self._names[number]] = value
        return found

    def load_moments(self, moments: Moments, num_updates: int) -> None:
        """Takes this rank's part of the given state; the weights are already there."""
        if not moments:
            return
        state: dict[int, dict[str, Any]] = {}
        for number, name in enumerate(self._names):
            state[number] = {key: by_name[name] for key, by_name in moments.items()}
            if "exp_avg" in moments:
                state[number]["step"] = torch.tensor(float(num_updates))
        full = zero.full_state_dict(self._optimizer)
        zero.load_full_state_dict(self._optimizer, {**full, "state": state})

    def close(self) -> None:
        """See ``Updater``. Collective at stage 3."""
        if isinstance(self._optimizer, zero.ZeroInfinity):
            with self._wire.aside():
                self._optimizer.close()


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(param: nn.Parameter) -> Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param.detach()
