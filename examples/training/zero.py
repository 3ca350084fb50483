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

from ringcomm.parallel import get_state_dict, zero
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
    ) -> None:
        """Over the wire's ranks, or a group of some of them; gradients up to a norm."""
        group = group or wire.group
        self._model, self._wire = model, wire
        self._names = [name for name, _ in model.named_parameters()]
        options: dict[str, Any] = {} if max_norm is None else {"clip_grad_norm": max_norm}
        if offload is not None and stage == 3:
            options["offload_weights"] = True
        made = make_optimizer(kind, list(model.parameters()), offload)
        self._step_bytes = zero.predict_traffic(
            model, made, stage, world_size=group.size(), rank=group.rank(), **options
        )
        if max_norm is not None:  # its statistics
            self._step_bytes += 32 * (group.size() - 1)
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
                return get_state_dict(self._model, full=True)[0]
            return {name: _whole(param) for name, param in self._model.named_parameters()}

    def moments(self) -> Moments:
        """The state of ALL weights, gathered from the ranks. Collective."""
        found: Moments = {}
        with self._wire.aside():
            for name, param in zip(self._names, self._optimizer.all_params(), strict=True):
                for key, value in self._optimizer.whole_state(param):
                    if isinstance(value, Tensor) and key != "step":
                        found.setdefault(key, {})[name] = value.cpu()
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
        groups = self._optimizer.numbered_groups()
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def close(self) -> None:
        """See ``Updater``. Collective at stage 3."""
        if isinstance(self._optimizer, zero.ZeroInfinity):
            with self._wire.aside():
                self._optimizer.close()


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(param: nn.Parameter) -> Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param.detach()
