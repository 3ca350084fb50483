"""LOMO (Lv et al. 2023, arXiv 2306.09782): SGD whose gradients never gather.

Each weight's gradient is consumed in the hook that runs when it is complete: summed over the ranks,
applied, freed. At most one weight's gradient is alive, where DDP keeps all of them. The price is
one small blocking all-reduce per weight in the middle of the backward pass, so latency decides.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from training.updaters import Moments, live_bytes
from training.wire import Wire


class Lomo:
    """SGD without momentum, fused into the backward pass; see ``updaters.Updater``.

    Equal to the last bit to ``torch.optim.SGD`` on gradients divided by a power of two of ranks.
    Accumulating gradients over several backward passes is impossible: they are gone.
    """

    def __init__(self, named_params: list[tuple[str, nn.Parameter]], wire: Wire | None) -> None:
        """With a ``wire``, averages gradients over its ranks; without, updates from its own."""
        self._wire = wire
        self._world_size = wire.world_size if wire else 1
        self._named = named_params
        self._params = [p for _, p in named_params]
        self._lr = 0.0
        self.grad_bytes = 0
        self.measured = False
        for param in self._params:
            param.register_post_accumulate_grad_hook(self._consume)

    def _consume(self, param: Tensor) -> None:
        if self.measured:
            alive = live_bytes(p.grad for p in self._params)
            self.grad_bytes = max(self.grad_bytes, alive)
        grad = param.grad
        assert grad is not None
        if self._wire is not None:
            self._wire.all_reduce(grad)
        with torch.no_grad():
            param.add_(grad, alpha=-self._lr / self._world_size)
        param.grad = None

    def begin(self, lr: float) -> None:
        """See ``Updater``: the whole update happens in the backward pass that follows."""
        self._lr = lr
        if self.measured:
            self.grad_bytes = 0

    def finish(self) -> None:
        """See ``Updater``; nothing is left to do."""

    def state_bytes(self) -> int:
        """See ``Updater``; there is no state."""
        return 0

    def weights(self) -> dict[str, Tensor]:
        """See ``Updater``."""
        return {name: param.detach() for name, param in self._named}

    def moments(self) -> Moments:
        """See ``Updater``; there is no state."""
        return {}

    def load_moments(self, moments: Moments, num_updates: int) -> None:
        """See ``Updater``; there is no state."""

    def close(self) -> None:
        """See ``Updater``; there are no files."""
